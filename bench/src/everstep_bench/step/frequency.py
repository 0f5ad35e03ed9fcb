"""The smallest interval that slows training down by no more than so much (LowDiff, Exp. 4).

For each arm 1, 2, 4, 8, ... steps until the slow-down stays within the bound, then bisection
between the last that does not and the first that does. Each probe is so many paired blocks, and
their median counts; what lies within the noise of the bound may fall on either side of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from everstep.errors import EverstepError
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Spread
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.report import Report, Table, per_cent, range_of
from everstep_bench.harness.session import session
from everstep_bench.options import COMPRESSED, NONE, FrequencyOptions
from everstep_bench.step.arms import missing, probed, recovers_each_step
from everstep_bench.step.rounds import Bench, Rows
from everstep_bench.step.run import check_room

_BLOCK_STEPS_MIN = 8
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
        return recovers_each_step(self.arm)

    def probe(self) -> Probe | None:
        """That of the interval; of the greatest that was tried if there is none."""
        if not self.probes:
            return None
        wanted = self.every or max(probe.every for probe in self.probes)
        return next(probe for probe in self.probes if probe.every == wanted)


@dataclass
class FrequencyReport(Report):
    """Everything that was found."""

    options: FrequencyOptions
    found: list[Found]

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        found = super().labels()
        if self.options.tiers:
            places = ", ".join(self.options.tiers)
            found.append(f"TIERS: everstep's arms copy each base to {places}; the others do not")
        return found

    def rounds(self) -> str:
        """Return how often each interval was measured."""
        return f"{self.options.repeats} paired rounds for each interval, seed {self.options.seed}"

    def tables(self) -> Iterator[Table]:
        """Yield the table."""
        options = self.options
        title = f"The smallest interval within a slow-down of {100 * options.within:g} %"
        rows = [_cells(found, options.every_max) for found in self.found]
        yield Table(title, _COLUMNS, rows, words=("arm", "one can go back to", "tried"))

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "slow-down: next to training without saving (lowdiff: compressed training), the median "
            "of the paired rounds at that interval. noise: by how much two blocks that save "
            "nothing differ; a slow-down within it of the bound may fall on either side. tried: "
            "intervals, in their order."
        )

    def figures(self) -> dict[str, Any]:
        """Return everything, every probe included."""
        return {
            "within": self.options.within,
            "tiers": self.options.tiers,
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
    """Measure; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when an arm fails.
    """
    with session(options, display) as run:
        check_room(run)
        with run.alone():
            display.begin("making a model", 1)
            loop = Loop(options)
            bench = Bench(loop, run.folder, run.placement, run.turns())
            found = [_search(options, bench, arm) for arm in options.names()]
            facts = run.facts(loop.size_bytes, loop.tensors, loop.description)
            return FrequencyReport(options, facts, found)


def _search(options: FrequencyOptions, bench: Bench, arm: str) -> Found:
    found = Found(arm, error=missing(arm))
    if found.error is not None:
        return found

    def within(every: int) -> bool:
        # A block has a whole number of intervals.
        steps = every * -(-_BLOCK_STEPS_MIN // every)
        setting = probed(options, arm, every, steps)
        alone = probed(options, COMPRESSED if setting.compresses else NONE, 1, steps)
        rows = bench.measure([alone, setting], options.repeats, f"{arm} every {every}")
        slowdown = Rows(rows).slowdown(rows[1], rows[0])
        if slowdown is None:
            raise EverstepError(f"{arm} every {every}: {rows[1].error or rows[0].error}")
        found.probes.append(Probe(every, slowdown, rows[0].noise()))
        return slowdown.median <= options.within

    found.every = smallest(within, options.every_max)
    return found


def _cells(found: Found, most: int) -> tuple[str, ...]:
    probe = found.probe()
    if probe is None:
        return found.arm, found.error or "-"
    every = "none" if found.every is None else f"{found.every}"
    back = "every step" if found.each_step else f"every {every}"
    if found.every is None:
        back = f"- (not even every {most})"
    return (
        found.arm,
        back,
        every,
        per_cent(probe.slowdown),
        range_of(probe.slowdown, 1, 100),
        per_cent(probe.noise),
        ", ".join(str(probe.every) for probe in found.probes),
    )
