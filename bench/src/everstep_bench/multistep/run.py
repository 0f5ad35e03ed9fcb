"""All lengths of a copy, all shares of gradients, both ways, in all numbers of parts.

For each one Checkpointer, and saves of it while training goes on.
"""

from __future__ import annotations

import gc
import itertools
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpointer import Checkpointer
from everstep.config.method import Method
from everstep.config.options import Budget, KeeperOptions
from everstep.errors import DeadlineError, EverstepError
from everstep.plan.multistep import PARTS_MAX
from everstep.seams import Seams
from everstep.testing.emulated_link import EmulatedLink
from everstep_bench.harness.children import TIMEOUT_S
from everstep_bench.harness.display import Display
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.running import LINGER_S, close_run, keepers_of, quiet, take_due
from everstep_bench.harness.session import Session, session
from everstep_bench.multistep.report import AUTO, MeasuredSave, Measurement, MultistepReport, Row
from everstep_bench.multistep.training import Lengths, TimedTraining
from everstep_bench.options import WAYS, MultistepOptions, Ratio

_IDLE_STEPS = 4  # before each save; nothing is under way in these
_IDLE_STEPS_WARMING_UP = 1
_SLACK_BYTES = 64 << 20
_OPEN_S = 3.0  # a keeper process begins, and ends; bases become durable
_STEPS_UNTIL_DURABLE = 3


def warm_ups_of(way: str, parts: int) -> int:
    """Saves before those that count: from then on the link is known, and parts are as they stay;
    what parts cost is known, too, where everstep chooses their number."""
    if way not in WAYS:
        return 1
    return 3 if parts == AUTO else 2


def _row_about_s(way: str, parts: int, copy_steps: float, step_s: float, repeats: int) -> float:
    """Seconds that :func:`measure_row` takes, roughly."""
    steps = (parts or PARTS_MAX // 3) + copy_steps / 2 + _STEPS_UNTIL_DURABLE
    warm_ups = warm_ups_of(way, parts)
    idle = warm_ups * _IDLE_STEPS_WARMING_UP + repeats * _IDLE_STEPS
    return _OPEN_S + step_s * ((warm_ups + repeats) * steps + idle)


def measure_row(
    way: str,
    parts: int,
    training: TimedTraining,
    link_bytes_per_s: float,
    run: Path,
    placement: Placement,
    options: MultistepOptions,
) -> Row:
    """Measure one way in so many parts.

    Args:
        way: ``"gockpt"``, ``"gockpt_o"``, or a preset that has no parts.
        parts: :data:`~everstep_bench.multistep.report.AUTO`: everstep chooses.
        run: its folder, which is kept.
        options: saves that count, and steps for which ``gockpt_o`` keeps gradients.

    Raises:
        EverstepError: what a save failed with.
    """
    gc.collect()  # what the row before has left, or it is done within a save: for 0.2 s, and more
    checkpointer = _open(way, parts, training, link_bytes_per_s, run, placement, options)
    warm_ups = warm_ups_of(way, parts)
    steps: list[Lengths] = []
    row = Row(way, parts)
    try:
        placement.spread()
        for number in range(warm_ups + options.repeats):
            counts = number >= warm_ups
            idle = _idle(training, checkpointer, _IDLE_STEPS if counts else _IDLE_STEPS_WARMING_UP)
            placement.spread()
            save = _save(training, checkpointer, idle)
            if counts:
                steps += idle.steps
                row.saves.append(save)
        row.lengths = Lengths.of(steps)
    finally:
        close_run(checkpointer, keepers_of(run), f"{way}, {parts} parts")
    return row


def _open(
    way: str,
    parts: int,
    training: TimedTraining,
    link_bytes_per_s: float,
    run: Path,
    placement: Placement,
    options: MultistepOptions,
) -> Checkpointer:
    method: str | Method = way
    if way in WAYS:
        overlaps = way == "gockpt_o"
        method = Method(
            base="multistep",
            parts="auto" if parts == AUTO else parts,
            overlap_forward=overlaps,
            held_steps=options.held_steps if overlaps else 1,
        )
    # Two bases, and the gradients of all steps of one.
    host_bytes = 2 * training.state_bytes + PARTS_MAX * training.gradient_bytes + _SLACK_BYTES
    with quiet():
        return Checkpointer(
            run,
            training.state(),
            method=method,
            every=None,
            keep=1,
            budget=Budget(host_bytes=host_bytes),
            keeper=KeeperOptions(cores=placement.others, linger_s=LINGER_S),
            seams=Seams(lane=lambda: EmulatedLink(link_bytes_per_s)),
        )


@dataclass(frozen=True, slots=True)
class _Idle:
    """Steps in which nothing is saved, and the time of a call of the library after each."""

    steps: list[Lengths]
    call_s: float
    wall_s: float


def _idle(training: TimedTraining, checkpointer: Checkpointer, count: int) -> _Idle:
    steps = []
    calls_s = []
    walls_s = []
    for _ in range(count):
        begin_s = time.monotonic()
        steps.append(training.step())
        stepped_s = time.monotonic()
        checkpointer.step()
        end_s = time.monotonic()
        calls_s.append(end_s - stepped_s)
        walls_s.append(end_s - begin_s)
    return _Idle(steps, statistics.median(calls_s), statistics.median(walls_s))


def _save(training: TimedTraining, checkpointer: Checkpointer, idle: _Idle) -> MeasuredSave:
    """Begin a base after a step, and train until it is durable."""

    def stalls() -> dict[str, float]:
        return dict(checkpointer.stats().stall_s)

    before = stalls()
    begin_s = time.monotonic()
    save = take_due(checkpointer)
    calls_s = time.monotonic() - begin_s
    steps = list[Lengths]()
    within_s = 0.0
    last_s = sum(stalls().values())
    while not save.staged.done():
        steps.append(training.step())
        within_s += sum(stalls().values()) - last_s
        stepped_s = time.monotonic()
        checkpointer.step()
        calls_s += time.monotonic() - stepped_s - idle.call_s
        last_s = sum(stalls().values())
        _check(begin_s)
    wall_s = time.monotonic() - begin_s
    after = stalls()
    multistep = checkpointer.stats().multistep
    while not save.durable.done():
        training.step()
        checkpointer.step()
        _check(begin_s)
    save.durable.result()
    with quiet():
        checkpointer.wait(TIMEOUT_S)
    return MeasuredSave(
        causes={cause: s - before.get(cause, 0.0) for cause, s in after.items()},
        calls_s=calls_s,
        within_s=within_s,
        wall_s=wall_s,
        steps=len(steps),
        step_s=idle.wall_s,
        parts=1 if multistep is None else multistep.parts or 1,
        forward_s=statistics.fmean(step.forward_s for step in steps or idle.steps),
        backward_s=statistics.fmean(step.backward_s for step in steps or idle.steps),
    )


def _check(begin_s: float) -> None:
    if time.monotonic() - begin_s > TIMEOUT_S:
        raise DeadlineError(f"a save is not done after {TIMEOUT_S:g} s")


_OTHERS = ("async", "lazy")
_CALIBRATE_S = 2.0
_COPIES_ON_DISK = 4
_COPIES_IN_MEMORY = 20  # training, its gradients, two bases, gradients of 24 steps, the keeper's
_MEMORY_BESIDES = 1 << 30


def about_s(options: MultistepOptions) -> float:
    """Return the seconds that :func:`run_multistep` takes, roughly."""
    rows = [*_wanted(options), *_owned(options)]
    return len(options.ratios) * sum(
        _CALIBRATE_S
        + sum(
            _row_about_s(way, parts, copy_steps, options.step_s, options.repeats)
            for way, parts in rows
        )
        for copy_steps in options.copies
    )


def run_multistep(options: MultistepOptions, display: Display) -> MultistepReport:
    """Measure; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        OptionError: steps cannot be as short as that here.
    """
    with session(options, display) as run, run.alone():
        run.refuse_without_room(
            disk_bytes=_COPIES_ON_DISK * options.state_bytes,
            memory_bytes=_COPIES_IN_MEMORY * options.state_bytes + _MEMORY_BESIDES,
            hint="a smaller --state-bytes",
        )
        drawn = random.Random(options.seed)
        found: list[Measurement] = []
        tensors = 0
        for ratio in options.ratios:
            display.begin("making a state", 1)
            training = TimedTraining(
                options.state_bytes,
                ratio.value,
                options.step_s,
                layers=options.layers,
                seed=options.seed,
            )
            tensors = training.tensors
            bench = Bench(run, training, ratio, drawn)
            found += [bench.measured(copy_steps) for copy_steps in options.copies]
        steps = f"steps of {1e3 * options.step_s:g} ms of real compute"
        facts = run.facts(options.state_bytes, tensors, f"AdamW, fused, float32; {steps}")
        return MultistepReport(options, facts, found)


def _wanted(options: MultistepOptions) -> list[tuple[str, int]]:
    """Return each way, and number of parts."""
    counts = (*options.parts, AUTO)
    return [*itertools.product(WAYS, counts), *((way, 1) for way in _OTHERS)]


def _owned(options: MultistepOptions) -> list[tuple[str, int]]:
    """Return the rows whose own work is measured separately."""
    return list(itertools.product(WAYS, options.parts))


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures one share of gradients."""

    run: Session
    training: TimedTraining
    ratio: Ratio
    drawn: random.Random

    def measured(self, copy_steps: float) -> Measurement:
        """Measure everything that is compared, for one length of a copy; own work in runs of its
        own."""
        options: MultistepOptions = self.run.options
        speed = self.training.state_bytes / (copy_steps * options.step_s)
        what = f"a copy takes {copy_steps:g} steps, gradients {self.ratio} of the state"
        return Measurement(
            copy_steps=copy_steps,
            ratio=self.ratio,
            state_bytes=self.training.state_bytes,
            gradient_bytes=self.training.gradient_bytes,
            link_bytes_per_s=speed,
            own=self.rows(f"{what}: own work", _owned(options), speed),
            rows=self.rows(what, _wanted(options), speed),
            units=self.training.units,
            held_steps=options.held_steps,
        )

    def rows(self, what: str, wanted: Sequence[tuple[str, int]], speed: float) -> list[Row]:
        """Measure these, in an order that is drawn."""
        rows = {one: Row(*one) for one in wanted}
        order = list(wanted)
        self.drawn.shuffle(order)
        self.run.display.begin(what, len(order))
        folder = self.run.folder / "run"
        for way, parts in order:
            self.run.display.advance(f"{way}, {parts or 'auto'}")
            try:
                rows[way, parts] = measure_row(
                    way, parts, self.training, speed, folder, self.run.placement, self.run.options
                )
            except EverstepError as error:
                rows[way, parts].error = f"failed: {error}"
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return list(rows.values())
