"""All lengths of a copy, all shares of gradients, both ways, in all numbers of parts."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.errors import EverstepError
from everstep_bench.harness.display import Display
from everstep_bench.harness.session import Session, session
from everstep_bench.multistep import saves
from everstep_bench.multistep.figures import AUTO, Measurement, Row
from everstep_bench.multistep.report import MultistepReport
from everstep_bench.multistep.saves import measure_row
from everstep_bench.multistep.training import TimedTraining
from everstep_bench.options import WAYS, MultistepOptions, Ratio

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
            saves.about_s(way, parts, copy_steps, options.step_s, options.repeats)
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
