"""All lengths of a copy, all shares of gradients, both ways, in all numbers of parts."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import EverstepError
from everstep.workloads.processes import interruptible
from everstep_bench.multistep import saves
from everstep_bench.multistep.figures import AUTO, Measurement, Row
from everstep_bench.multistep.options import WAYS, MultistepOptions, Ratio
from everstep_bench.multistep.report import MultistepReport
from everstep_bench.multistep.saves import measure_row
from everstep_bench.multistep.training import TimedTraining
from everstep_bench.persist.machine import look_at
from everstep_bench.persist.show import Display
from everstep_bench.persist.workspace import refuse_without_room, workspace
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.loop import seeded_single_thread

__all__ = ["about_s", "run_multistep"]

_OTHERS = ("async", "lazy")
_CALIBRATE_S = 2.0
_COPIES_ON_DISK = 4
_COPIES_IN_MEMORY = 20  # training, its gradients, two bases, gradients of 24 steps, the keeper's
_MEMORY_BESIDES = 1 << 30


def about_s(options: MultistepOptions) -> float:
    """Seconds that :func:`run_multistep` takes, roughly."""
    return sum(
        _CALIBRATE_S
        + sum(
            saves.about_s(way, parts, copy_steps, options.step_s, options.repeats)
            for way, parts in [*_wanted(options), *_owned(options)]
        )
        for copy_steps in options.copies
        for _ in options.ratios
    )


def run_multistep(options: MultistepOptions, display: Display) -> MultistepReport:
    """Measures; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        OptionError: steps cannot be as short as that here.
    """
    begin_s = time.monotonic()
    with (
        interruptible(),
        workspace(options.folder) as folder,
        seeded_single_thread(options.seed),
    ):
        machine = look_at(folder)
        refuse_without_room(
            machine,
            folder,
            disk_bytes=_COPIES_ON_DISK * options.state_bytes,
            memory_bytes=_COPIES_IN_MEMORY * options.state_bytes + _MEMORY_BESIDES,
            hint="a smaller --state-bytes",
        )
        placement = Placement(free_core=options.free_core)
        drawn = random.Random(options.seed)
        found: list[Measurement] = []
        tensors = 0
        with placement.pinned():
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
                bench = _Bench(options, training, ratio, folder, placement, display, drawn)
                found += [bench.measured(copy_steps) for copy_steps in options.copies]
        return MultistepReport(
            options=options,
            machine=machine,
            size_bytes=options.state_bytes,
            tensors=tensors,
            workload=f"AdamW, fused, float32; steps of {1e3 * options.step_s:g} ms of real compute",
            free_core=placement.free,
            found=found,
            load_after=os.getloadavg()[0],
            seconds=time.monotonic() - begin_s,
            folder=str(folder.parent),
        )


def _wanted(options: MultistepOptions) -> list[tuple[str, int]]:
    """Each way, and number of parts."""
    counts = (*options.parts, AUTO)
    return [*itertools.product(WAYS, counts), *((way, 1) for way in _OTHERS)]


def _owned(options: MultistepOptions) -> list[tuple[str, int]]:
    """Return the rows whose own work is measured separately."""
    return list(itertools.product(WAYS, options.parts))


@dataclass(frozen=True, slots=True)
class _Bench:
    """Of one share of gradients."""

    options: MultistepOptions
    training: TimedTraining
    ratio: Ratio
    folder: Path
    placement: Placement
    display: Display
    drawn: random.Random

    def measured(self, copy_steps: float) -> Measurement:
        """Everything that is compared, for one length of a copy; own work in runs of its own."""
        speed = self.training.state_bytes / (copy_steps * self.options.step_s)
        what = f"a copy takes {copy_steps:g} steps, gradients {self.ratio} of the state"
        return Measurement(
            copy_steps=copy_steps,
            ratio=self.ratio,
            state_bytes=self.training.state_bytes,
            gradient_bytes=self.training.gradient_bytes,
            link_bytes_per_s=speed,
            own=self._rows(f"{what}: own work", _owned(self.options), speed),
            rows=self._rows(what, _wanted(self.options), speed),
            units=self.training.units,
            held_steps=self.options.held_steps,
        )

    def _rows(self, what: str, wanted: list[tuple[str, int]], speed: float) -> list[Row]:
        rows = {one: Row(*one) for one in wanted}
        order = list(wanted)
        self.drawn.shuffle(order)
        self.display.begin(what, len(order))
        for way, parts in order:
            self.display.advance(f"{way}, {parts or 'auto'}")
            run = self.folder / "run"
            try:
                rows[way, parts] = measure_row(
                    *(way, parts, self.training, speed, run, self.placement),
                    repeats=self.options.repeats,
                    held_steps=self.options.held_steps,
                )
            except EverstepError as error:
                rows[way, parts].error = f"failed: {error}"
            finally:
                shutil.rmtree(run, ignore_errors=True)
        return list(rows.values())
