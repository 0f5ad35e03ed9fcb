"""The outcome: what was where, next to what was announced, and what tiers add."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_bench.harness.figures import Verdict
from everstep_bench.harness.pictures import drawn
from everstep_bench.harness.report import Report, Table, number, per_cent
from everstep_bench.options import TiersOptions
from everstep_bench.tiers.sampling import COPIES, DISK, MEMORY, PEER, above

THREAD_SHARE_MAX = 0.01
_MB = 1e6
_INCHES = (10.0, 6.5)
_BYTES = ("what", "announced", "at most", "share", "at the end", "steps above")
_COST = ("training", "thread ms per step", "of a step", "trainers, CPU s", "keepers, CPU s")
TIERS: Mapping[str, str] = {
    MEMORY: "captured state in a keeper's memory",
    PEER: "copies of another rank in a keeper's memory",
    DISK: "a rank's run folder",
    COPIES: "copies of all ranks in the durable place",
}
"""What is measured of each, in words."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """Bytes held by a tier.

    Attributes:
        bound_bytes: that was announced; of several ranks the smallest, of the durable place the
            sum.
        most: bytes, by step: the most that was seen in it, on any rank.
    """

    tier: str
    bound_bytes: int
    most: Mapping[int, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.most.values(), default=0)

    @property
    def above(self) -> list[int]:
        """Steps in which there was more than announced."""
        return above(self.most, self.bound_bytes)


@dataclass(slots=True)
class Trained:
    """One training of all ranks.

    Attributes:
        tiers: whether bases went anywhere but to the disk.
        saved_s: processor time of the training thread in the library, by step, on the rank that
            took most of it in all.
        trained_s: the same of the rest of each step, the library's hooks included.
        wall_s: of each step there, by the clock.
        trainer_cpu_s: of all training processes and threads.
        keeper_cpu_s: of all keepers.
        done: what each rank's Checkpointer counted.
    """

    tiers: bool
    occupied: list[Occupied] = field(default_factory=list)
    saved_s: list[float] = field(default_factory=list)
    trained_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    trainer_cpu_s: float = 0.0
    keeper_cpu_s: float = 0.0
    looked: int = 0
    done: list[dict[str, Any]] = field(default_factory=list)

    @property
    def thread_s(self) -> float:
        """Processor time in the library, of a step, in the mean."""
        return math.fsum(self.saved_s) / max(1, len(self.saved_s))

    @property
    def step_s(self) -> float:
        """Processor time of a step without the library's call, in the middle: it does not wait
        for a turn, so that a busy machine makes no step look long."""
        return statistics.median(self.trained_s)


@dataclass
class TiersReport(Report):
    """Everything that was found.

    Attributes:
        without, with_tiers: the same training, without and with tiers.
    """

    options: TiersOptions
    without: Trained
    with_tiers: Trained

    @property
    def added_s(self) -> float:
        """Processor time of the training thread that tiers add to a step."""
        return self.with_tiers.thread_s - self.without.thread_s

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        return [] if self.options.ranks == 1 else ["EMULATED: all nodes are on this machine"]

    def verdicts(self) -> list[Verdict]:
        """The targets, each with the measured figure."""
        found = []
        for one in self.with_tiers.occupied:
            figure = f"{words_of(one.peak_bytes)} at most, {words_of(one.bound_bytes)} announced"
            if one.above:
                figure += f"; above in {len(one.above)} steps, first in step {one.above[0]}"
            found.append(Verdict(f"{one.tier} within its bound", figure, not one.above))
        unseen = [s for s in range(1, self.options.steps + 1) if not self._seen(s)]
        seen = f"{self.options.steps - len(unseen)} of {self.options.steps} steps"
        found.append(Verdict("looked at in each step", seen, not unseen))
        share = self.added_s / self.with_tiers.step_s
        figure = f"{1e3 * self.added_s:+.3f} ms, {100 * share:+.2f} % of a step"
        found.append(
            Verdict("thread time that tiers add <= 1 %", figure, share <= THREAD_SHARE_MAX)
        )
        return found

    def _seen(self, step: int) -> bool:
        return all(step in one.most for one in self.with_tiers.occupied)

    def rounds(self) -> str:
        """Return what was trained."""
        options = self.options
        return (
            f"{options.ranks} rank(s); {options.steps} steps, a base every {options.every}, keep "
            f"{options.keep}; copies in {options.place or 'a folder of this machine'}; seed "
            f"{options.seed}; load {self.facts.machine.load:.1f} before and "
            f"{self.facts.load_after:.1f} after"
        )

    def tables(self) -> Iterator[Table]:
        """Yield bytes, and what tiers cost."""
        yield Table(
            f"Bytes over {self.options.steps} steps", _BYTES, map(_bytes, self.with_tiers.occupied),
            words=("what",),
        )  # fmt: skip
        yield Table(
            "What they cost", _COST, map(_cost, (self.without, self.with_tiers)), ("training",)
        )

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            f"looked at {self.with_tiers.looked} times, in each step and between; files by their "
            "sizes, memory by the pages that the kernel has given. of each step the most on any "
            "rank. at the end: the last step, until the keepers have ended, at most. thread: "
            "processor time of the training thread in ckpt.step(), on the rank with the most; a "
            "step: its processor time without that."
        )

    def figures(self) -> dict[str, Any]:
        """Return everything, each step included."""
        names = "steps ranks every keep batch".split()
        return {
            **{name: getattr(self.options, name) for name in names},
            "load_before": self.facts.machine.load,
            "state_bytes": self.facts.size_bytes,
            "thread_added_s": self.added_s,
            "verdicts": self.verdicts(),
            "arms": [_as_json(arm) for arm in (self.without, self.with_tiers)],
        }

    def write(self) -> None:
        """Draw bytes in each tier over the steps, below the line that was announced."""
        path = self.options.picture
        if path is None:
            return
        found = self.with_tiers.occupied
        labels = "".join(f" [{label.split(':', 1)[0]}]" for label in self.labels())
        title = f"{self.options.ranks} rank(s), keep {self.options.keep}{labels}"
        with drawn(path, title, _INCHES, rows=-(-len(found) // 2), columns=2) as panels:
            for axes, one in zip(panels, found, strict=False):
                steps = sorted(one.most)
                values = [one.most[step] / _MB for step in steps]
                bound_mb = one.bound_bytes / _MB
                top = max(bound_mb, one.peak_bytes / _MB)
                axes.step(steps, values, where="mid", label="measured")
                axes.axhline(bound_mb, color="tab:red", linestyle="--", label="announced")
                axes.set(title=f"{one.tier}: {TIERS[one.tier]}", ylabel="MB", ylim=(0, 1.1 * top))
                axes.legend(loc="lower right", fontsize="small")
            for axes in panels[len(found) :]:
                axes.set_visible(False)
            for axes in panels[-2:]:
                axes.set_xlabel("step")


def words_of(size_bytes: int) -> str:
    """``"12.35 MB"``."""
    return f"{size_bytes / _MB:.2f} MB"


def _as_json(arm: Trained) -> dict[str, Any]:
    return {
        "tiers": arm.tiers,
        "thread_s": arm.thread_s,
        "step_thread_s": arm.step_s,
        "step_wall_s": statistics.median(arm.wall_s),
        "saved_s": arm.saved_s,
        "trainer_cpu_s": arm.trainer_cpu_s,
        "keeper_cpu_s": arm.keeper_cpu_s,
        "looked": arm.looked,
        "done": arm.done,
        "occupied": [
            {
                "tier": one.tier,
                "bound_bytes": one.bound_bytes,
                "peak_bytes": one.peak_bytes,
                "steps_above": one.above,
                "bytes_by_step": [one.most[step] for step in sorted(one.most)],
            }
            for one in arm.occupied
        ],
    }


def _bytes(one: Occupied) -> tuple[str, ...]:
    return (
        f"{one.tier}: {TIERS[one.tier]}",
        words_of(one.bound_bytes),
        words_of(one.peak_bytes),
        per_cent(one.peak_bytes / one.bound_bytes),
        words_of(one.most[max(one.most)]),
        f"{len(one.above)} of {len(one.most)}",
    )


def _cost(arm: Trained) -> tuple[str, ...]:
    return (
        "with tiers" if arm.tiers else "without",
        number(arm.thread_s, 3, 1e3),
        f"{100 * arm.thread_s / arm.step_s:.2f} %",
        number(arm.trainer_cpu_s),
        number(arm.keeper_cpu_s),
    )
