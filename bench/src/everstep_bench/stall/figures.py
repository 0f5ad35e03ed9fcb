"""Blocks and the arithmetic on them.

A block of an arm is compared with the blocks without a save of the same round, which met the
same machine; over the rounds the median counts. A block is as long as it was asked to be, or
until its save was done, whatever comes later: what it lost is what its steps took more than
as many ideal ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep_bench.harness import figures
from everstep_bench.harness.figures import Spread
from everstep_bench.harness.loop import Step
from everstep_bench.stall.arms import Copied


@dataclass(frozen=True, slots=True)
class Block:
    """One save and the steps after it; times in seconds of the monotonic clock.

    Attributes:
        begin_s: the save was asked for.
        called_s: the call came back.
        end_s: of the last step, and what the library does after it.
        steps: without what the library does between them.
        calls_s: inside all calls of the library together.
        causes: seconds that training was held up, by cause.
        within_s: of these, within steps; None: ``gate``, and nothing else.
        device_s: what a device spent within hooks, where it waits instead of the thread; None
            without one.
        staged_s: the state was copied; None if that is not known.
        done_s: the library said so; None without a save.
        sync_s: what it had left unsynced.
        after_s: from then until nothing of it was under way any more.
        persist_s: writing, in whichever thread; None if that is not known.
        trainer_cpu_s: processor time of this process, all threads, until ``end_s``.
        helper_cpu_s: of processes beside it.
        others_cores: cores that other processes kept busy, helpers included.
        copies: what was copied, piece by piece; none where nobody knows.
    """

    begin_s: float
    called_s: float
    end_s: float
    steps: tuple[Step, ...]
    calls_s: float = 0.0
    causes: Mapping[str, float] = field(default_factory=dict)
    within_s: float | None = None
    device_s: float | None = None
    staged_s: float | None = None
    done_s: float | None = None
    sync_s: float = 0.0
    after_s: float = 0.0
    persist_s: float | None = None
    trainer_cpu_s: float = 0.0
    helper_cpu_s: float = 0.0
    others_cores: float = 0.0
    copies: tuple[Copied, ...] = ()

    @property
    def wall_s(self) -> float:
        """All of it."""
        return self.end_s - self.begin_s

    @property
    def stall_s(self) -> float:
        """Return the time that the training thread spent in the library: in calls and hooks.

        With a device: the time of the device within the hooks, as the thread runs ahead of it.
        """
        return self.calls_s + (self._within_s if self.device_s is None else self.device_s)

    @property
    def other_s(self) -> float:
        """Return the time in its calls that has no known cause."""
        return self.calls_s - (sum(self.causes.values()) - self._within_s)

    @property
    def _within_s(self) -> float:
        return self.causes.get("gate", 0.0) if self.within_s is None else self.within_s

    @property
    def durable_s(self) -> float | None:
        """From the call until the state was durable."""
        return None if self.done_s is None else self.done_s - self.begin_s + self.sync_s


@dataclass(frozen=True, slots=True)
class Ideal:
    """Duration of steps without a save, in one round."""

    blocks: tuple[Block, ...]

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        count = sum(len(block.steps) for block in self.blocks)
        return sum(block.wall_s for block in self.blocks) / count

    @property
    def cpu_s(self) -> float:
        """Processor seconds per step."""
        count = sum(len(block.steps) for block in self.blocks)
        return sum(block.trainer_cpu_s for block in self.blocks) / count

    @property
    def noise_s(self) -> float | None:
        """By how much the steps of two blocks differ, per step; None if there is one block."""
        steps_s = [block.wall_s / len(block.steps) for block in self.blocks]
        return max(steps_s) - min(steps_s) if len(steps_s) > 1 else None

    def slowdown_s(self, block: Block) -> float:
        """Return the extra time of the steps of ``block`` over as many ideal ones."""
        return block.wall_s - len(block.steps) * self.step_s

    def loop_rate(self, block: Block) -> float | None:
        """Steps per second from the call until the save was done, relative to ideal ones.

        All that the steps in that window lost, they lost in it: a step that reaches beyond
        the window was ideal there. None without a save.
        """
        if block.done_s is None or block.done_s <= block.begin_s:
            return None
        window_s = block.done_s - block.begin_s
        inside = [step for step in block.steps if step.begin_s < block.done_s]
        end_s = max([block.done_s, block.called_s, *(step.end_s for step in inside[-1:])])
        lost_s = end_s - block.begin_s - len(inside) * self.step_s
        if not inside:
            lost_s = window_s  # nothing but the save
        return max(0.0, 1.0 - lost_s / window_s)


Row = figures.Row[Block]
"""Figures of one arm."""


@dataclass(slots=True)
class Interval:
    """All rounds with blocks of one length.

    Attributes:
        every: steps of a block, at least.
        ideals: by number of the round.
        pinned_bytes_per_s: of a plain copy from the device into pinned memory, likewise.
    """

    every: int
    ideals: dict[int, Ideal]
    rows: list[Row]
    pinned_bytes_per_s: dict[int, float] = field(default_factory=dict)

    def row(self, name: str) -> Row:
        """Return the row of an arm; an empty one if it has no figure."""
        return next((row for row in self.rows if row.name == name and row.blocks), Row(name))

    def step_s(self) -> Spread | None:
        """An ideal step."""
        return Spread.of([ideal.step_s for ideal in self.ideals.values()])

    def noise_s(self) -> float | None:
        """By how much two blocks without a save differ, in the middle."""
        found = Spread.of([ideal.noise_s for ideal in self.ideals.values()])
        return None if found is None else self.every * found.median

    def slowdown_s(self, row: Row) -> Spread | None:
        """Return the cost of a save for training, in wall-clock time."""
        return row.paired(self.ideals, lambda block, ideal: ideal.slowdown_s(block))

    def loop_rate(self, row: Row) -> Spread | None:
        """Return the speed of the loop during a save, relative to ideal."""
        return row.paired(self.ideals, lambda block, ideal: ideal.loop_rate(block))

    def link_share(self, row: Row, size_bytes: int) -> Spread | None:
        """Return the speed at which a state reached host memory after the call, relative to a
        plain copy into pinned memory."""

        def share(block: Block, pinned: float) -> float | None:
            if block.staged_s is None:
                return None
            return size_bytes / (block.staged_s - block.begin_s) / pinned

        return row.paired(self.pinned_bytes_per_s, share)

    def figures_of(self, row: Row, size_bytes: int) -> dict[str, Spread | None]:
        """Return the figures of an arm by name; ``size_bytes``: of the state."""

        def of_stall(block: Block) -> float | None:
            return size_bytes / 1e9 / block.stall_s if block.stall_s > 0 else None

        ideals = self.ideals
        return {
            "stall_s": row.spread(lambda block: block.stall_s),
            "slowdown_s": self.slowdown_s(row),
            # The part of the slow-down outside the library: interference, noise.
            "difference_s": row.paired(ideals, lambda b, ideal: ideal.slowdown_s(b) - b.stall_s),
            # Next to the time that training needs from one save to the next.
            "share_of_training": row.paired(
                ideals, lambda b, ideal: ideal.slowdown_s(b) / (self.every * ideal.step_s)
            ),
            "gb_per_s_of_stall": row.spread(of_stall),
            "durable_s": row.spread(lambda block: block.durable_s),
            "after_s": row.spread(lambda block: block.after_s),
            "loop_rate": self.loop_rate(row),
            "trainer_cpu_s": row.paired(
                ideals, lambda b, ideal: b.trainer_cpu_s - len(b.steps) * ideal.cpu_s
            ),
            "helper_cpu_s": row.spread(lambda block: block.helper_cpu_s),
        }
