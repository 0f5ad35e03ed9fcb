"""The smallest interval that slows training down by no more than so much (LowDiff, Exp. 4).

For each arm 1, 2, 4, 8, ... steps until the slow-down stays within the bound, then bisection
between the last that does not and the first that does. Each probe is so many paired blocks, and
their median counts; what lies within the noise of the bound may fall on either side of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from everstep.workloads.processes import interruptible
from everstep_bench.persist.machine import Machine, look_at
from everstep_bench.persist.report import Spread
from everstep_bench.persist.show import Display
from everstep_bench.persist.workspace import workspace
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.loop import Loop, seeded_single_thread
from everstep_bench.stall.report import facts_as_json
from everstep_bench.stall.show import machine_facts, plain_table, titled
from everstep_bench.step.figures import Rows
from everstep_bench.step.options import COMPRESSED, NONE, FrequencyOptions
from everstep_bench.step.ours import missing
from everstep_bench.step.rounds import Bench
from everstep_bench.step.run import check_room
from everstep_bench.step.show import per_cent, range_per_cent

__all__ = ["Found", "FrequencyReport", "Probe", "present", "run_frequency", "smallest"]

_BLOCK_STEPS_MIN = 8
_LOGS = ("logged", "lowdiff", "lowdiff_plus", "naive-diff")
_COLUMNS = ("arm", "one can go back to", "whole state every", "slow-down", "min - max", "noise",
            "tried")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probe:
    """Cost of an interval.

    Attributes:
        slowdown: as a share, over the rounds.
        noise: by how much two blocks that save nothing differed; None if that is not known.
    """

    every: int
    slowdown: Spread
    noise: float | None = None


@dataclass(slots=True)
class Found:
    """Result for an arm.

    Attributes:
        every: steps between whole states; None if no interval that was tried is within the bound.
        error: why nothing was tried.
    """

    arm: str
    probes: list[Probe] = field(default_factory=list)
    every: int | None = None
    error: str | None = None

    @property
    def each_step(self) -> bool:
        """True if every step can be recovered at any interval."""
        return self.arm in _LOGS

    def probe(self) -> Probe | None:
        """That of the interval; of the greatest that was tried if there is none."""
        if not self.probes:
            return None
        wanted = self.every or max(probe.every for probe in self.probes)
        return next(probe for probe in self.probes if probe.every == wanted)


@dataclass(slots=True)
class FrequencyReport:
    """Everything that was found."""

    options: FrequencyOptions
    machine: Machine
    size_bytes: int
    tensors: int
    workload: str
    free_core: bool
    found: list[Found]
    load_after: float
    seconds: float
    folder: str

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        found = [] if self.free_core else ["ONE CORE: training and everything else share it"]
        if self.options.tiers:
            places = ", ".join(self.options.tiers)
            found.append(f"TIERS: everstep's arms copy each base to {places}; the others do not")
        return found

    def as_json(self) -> dict[str, Any]:
        """Everything, every probe included."""
        return {
            **facts_as_json(self),
            "within": self.options.within,
            "tiers": list(self.options.tiers),
            "arms": [
                {
                    "name": found.arm,
                    "error": found.error,
                    "whole_state_every": found.every,
                    "every_step": found.each_step and found.every is not None,
                    "probes": [asdict(probe) for probe in found.probes],
                }
                for found in self.found
            ],
        }


def smallest(within: Callable[[int], bool], most: int) -> int | None:
    """The smallest number for which ``within`` holds, if it holds for all above: by doubling,
    then bisection; None if it does not for ``most`` either."""
    failed = 0
    good = 1
    while not within(good):
        if good >= most:
            return None
        failed = good
        good = min(2 * good, most)
    while good - failed > 1:
        middle = (good + failed) // 2
        if within(middle):
            good = middle
        else:
            failed = middle
    return good


def run_frequency(options: FrequencyOptions, display: Display) -> FrequencyReport:
    """Measures; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when an arm fails.
    """
    begin_s = time.monotonic()
    with (
        interruptible(),
        workspace(options.folder) as folder,
        seeded_single_thread(options.seed),
    ):
        machine = look_at(folder)
        widest = [options.setting(arm, options.every_max, 1) for arm in options.names()]
        check_room(machine, options.params, widest, folder)
        placement = Placement(free_core=options.free_core)
        with placement.pinned():
            display.begin("making a model", 1)
            loop = Loop(options, batch=options.batch)
            bench = Bench(loop, folder, placement, display, seed=options.seed)
            found = [_search(options, bench, arm) for arm in options.names()]
            return FrequencyReport(
                options=options,
                machine=machine,
                size_bytes=loop.size_bytes,
                tensors=loop.tensors,
                workload=loop.description,
                free_core=placement.free,
                found=found,
                load_after=os.getloadavg()[0],
                seconds=time.monotonic() - begin_s,
                folder=str(folder.parent),
            )


def present(report: FrequencyReport, console: Console) -> None:
    """Prints facts and the table."""
    options = report.options
    for line in (
        *machine_facts(report.machine, report.folder, free_core=report.free_core),
        f"{report.size_bytes / 1e9:.3f} GB in {report.tensors} tensors: {report.workload}",
        f"{options.repeats} paired rounds for each interval, seed {options.seed}; "
        f"{report.seconds:.0f} s",
        *report.labels(),
    ):
        console.print(line, soft_wrap=True)
    table = plain_table(_COLUMNS, words=("arm", "one can go back to", "tried"))
    for found in report.found:
        table.add_row(*_cells(found, options.every_max))
    title = f"The smallest interval within a slow-down of {100 * options.within:g} %"
    console.print()
    console.print(Text(titled(title, report.labels()), style="bold"), soft_wrap=True)
    console.print(table)
    console.print()
    console.print(
        "slow-down: next to training without saving (lowdiff: compressed training), the median of "
        "the paired rounds at that interval. noise: by how much two blocks that save nothing "
        "differ; a slow-down within it of the bound may fall on either side. tried: intervals, in "
        "their order.",
        soft_wrap=True,
    )


def _search(options: FrequencyOptions, bench: Bench, arm: str) -> Found:
    found = Found(arm, error=missing(arm))
    if found.error is not None:
        return found

    def within(every: int) -> bool:
        # A block has a whole number of intervals.
        steps = every * -(-_BLOCK_STEPS_MIN // every)
        setting = options.setting(arm, every, steps)
        alone = options.setting(COMPRESSED if setting.compresses else NONE, 1, steps)
        rows = bench.measure([alone, setting], options.repeats, f"{arm} every {every}")
        slowdown = Rows(rows).slowdown(rows[1], rows[0])
        assert slowdown is not None
        found.probes.append(Probe(every, slowdown, rows[0].noise()))
        return slowdown.median <= options.within

    found.every = smallest(within, options.every_max)
    return found


def _cells(found: Found, most: int) -> tuple[str, ...]:
    probe = found.probe()
    if probe is None:
        return found.arm, found.error or "-", *[""] * (len(_COLUMNS) - 2)
    every = "none" if found.every is None else f"{found.every}"
    back = "every step" if found.each_step else f"every {every}"
    if found.every is None:
        back = f"- (not even every {most})"
    return (
        found.arm,
        back,
        every,
        per_cent(probe.slowdown),
        range_per_cent(probe.slowdown),
        "-" if probe.noise is None else f"{100 * probe.noise:.1f} %",
        ", ".join(str(probe.every) for probe in found.probes),
    )
