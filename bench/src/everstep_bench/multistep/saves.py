"""One Checkpointer, and saves of it while training goes on."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpointer import Checkpointer
from everstep.config.method import Method
from everstep.config.options import Budget, KeeperOptions
from everstep.errors import DeadlineError
from everstep.plan.multistep import PARTS_MAX
from everstep.seams import Seams
from everstep.testing.emulated_link import EmulatedLink
from everstep_bench.harness.children import TIMEOUT_S
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.running import LINGER_S, close_run, keepers_of, quiet, take_due
from everstep_bench.multistep.figures import AUTO, MeasuredSave, Row
from everstep_bench.multistep.training import Lengths, TimedStep, TimedTraining
from everstep_bench.options import WAYS, MultistepOptions

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


def about_s(way: str, parts: int, copy_steps: float, step_s: float, repeats: int) -> float:
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
        parts: :data:`~everstep_bench.multistep.figures.AUTO`: everstep chooses.
        run: its folder, which is kept.
        options: saves that count, and steps for which ``gockpt_o`` keeps gradients.

    Raises:
        EverstepError: what a save failed with.
    """
    gc.collect()  # what the row before has left, or it is done within a save: for 0.2 s, and more
    checkpointer = _open(way, parts, training, link_bytes_per_s, run, placement, options)
    warm_ups = warm_ups_of(way, parts)
    steps: list[TimedStep] = []
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

    steps: list[TimedStep]
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
    steps = list[TimedStep]()
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
