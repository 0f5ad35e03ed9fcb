"""Blocks and the arithmetic on them.

A block of an arm is compared with the blocks without a save of the same round, which met the
same machine; over the rounds the median counts. A block is as long as it was asked to be, or
until its save was done, whatever comes later: what it lost is what its steps took more than
as many ideal ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep_bench.persist.report import Spread
from everstep_bench.stall.arms import Arm, Role
from everstep_bench.stall.loop import Step
from everstep_bench.stall.recording import Copied

__all__ = ["Block", "Ideal", "Interval", "Row", "Split"]


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
        peak_bytes: memory of this process, the most above what it had at the beginning; None
            if that is not known.
        helper_bytes: memory of processes beside it, shared memory left out.
        writers_s: the slowest of other processes that flushed at the same time.
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
    peak_bytes: int | None = None
    helper_bytes: int = 0
    writers_s: float | None = None
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


@dataclass(frozen=True, slots=True)
class Split:
    """Breakdown of the time of a save (DataStates-LLM, Table III); items may overlap, and each is
    None if it cannot be separated.

    Attributes:
        serialise_s: metadata and serialisation.
        copy_s: from the device, or from live tensors, into memory that does not change.
        file_s: into files.
    """

    serialise_s: float | None
    copy_s: float | None
    file_s: float | None


@dataclass(slots=True)
class Row:
    """Figures of one arm.

    Attributes:
        blocks: by number of the round.
        error: why it has none, or no more.
        held_bytes: memory that it keeps between saves, about; None if that is not known.
        probe_s: serialising without writing, where that was tried.
    """

    name: str
    role: Role
    detail: str
    blocks: dict[int, Block] = field(default_factory=dict)
    error: str | None = None
    held_bytes: int | None = None
    probe_s: float | None = None

    @classmethod
    def of(cls, arm: Arm) -> Row:
        """An empty row for ``arm``."""
        return cls(arm.name, arm.role, arm.detail)

    def spread(self, figure: Callable[[Block], float | None]) -> Spread | None:
        """Of one figure over the rounds; None where it is not known in any."""
        found = [figure(block) for block in self.blocks.values()]
        return Spread.of([value for value in found if value is not None])

    @property
    def memory_bytes(self) -> int | None:
        """Host memory at most: kept between saves, taken during one, and that of helpers."""
        peaks = [block.peak_bytes for block in self.blocks.values() if block.peak_bytes is not None]
        if self.held_bytes is None or not peaks:
            return None
        helpers = max(block.helper_bytes for block in self.blocks.values())
        return self.held_bytes + max(peaks) + helpers

    def split(self) -> Split:
        """Medians over the rounds."""
        call = self._median(lambda block: block.called_s - block.begin_s)
        capture = self._median(lambda block: block.causes.get("capture"))
        staged = self._median(
            lambda block: None if block.staged_s is None else block.staged_s - block.begin_s
        )
        persist = self._median(lambda block: block.persist_s)
        if self.role == "ours":
            if self.name == "sync":
                return Split(None, None, persist)
            if self.name == "async":
                return Split(None, capture, persist)
            behind = None if staged is None or capture is None else max(0.0, staged - capture)
            return Split(capture, behind, persist)
        if self.name == "torch.save":
            known = call is not None and self.probe_s is not None
            return Split(self.probe_s, None, max(0.0, call - self.probe_s) if known else None)  # type: ignore[operator]
        return Split(None, staged, self._median(_after_copy))

    def _median(self, figure: Callable[[Block], float | None]) -> float | None:
        spread = self.spread(figure)
        return None if spread is None else spread.median


def _after_copy(block: Block) -> float | None:
    if block.done_s is None or block.staged_s is None:
        return None
    return block.done_s - block.staged_s


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

    def row(self, name: str) -> Row | None:
        """The row of an arm, if it has a figure."""
        return next((row for row in self.rows if row.name == name and row.blocks), None)

    def step_s(self) -> Spread | None:
        """An ideal step."""
        return Spread.of([ideal.step_s for ideal in self.ideals.values()])

    def noise_s(self) -> float | None:
        """By how much two blocks without a save differ, in the middle."""
        found = [ideal.noise_s for ideal in self.ideals.values()]
        known = [noise for noise in found if noise is not None]
        return self.every * statistics.median(known) if known else None

    def slowdown_s(self, row: Row) -> Spread | None:
        """Return the cost of a save for training, in wall-clock time."""
        return self._paired(row, lambda ideal, block: ideal.slowdown_s(block))

    def difference_s(self, row: Row) -> Spread | None:
        """Return the part of the slow-down outside the library: interference, noise."""
        return self._paired(row, lambda ideal, block: ideal.slowdown_s(block) - block.stall_s)

    def share(self, row: Row) -> Spread | None:
        """The same, next to the time that training needs from one save to the next."""
        return self._paired(
            row, lambda ideal, block: ideal.slowdown_s(block) / (self.every * ideal.step_s)
        )

    def loop_rate(self, row: Row) -> Spread | None:
        """Return the speed of the loop during a save, relative to ideal."""
        return self._paired(row, lambda ideal, block: ideal.loop_rate(block))

    def link_share(self, row: Row, size_bytes: int) -> Spread | None:
        """Return the speed at which a state reached host memory after the call, relative to a
        plain copy into pinned memory."""
        found = []
        for number in sorted(self.pinned_bytes_per_s.keys() & row.blocks.keys()):
            block = row.blocks[number]
            if block.staged_s is not None:
                rate = size_bytes / (block.staged_s - block.begin_s)
                found.append(rate / self.pinned_bytes_per_s[number])
        return Spread.of(found)

    def trainer_cpu_s(self, row: Row) -> Spread | None:
        """Processor time of the training process for a save."""
        return self._paired(
            row, lambda ideal, block: block.trainer_cpu_s - len(block.steps) * ideal.cpu_s
        )

    def _paired(self, row: Row, figure: Callable[[Ideal, Block], float | None]) -> Spread | None:
        both: Sequence[int] = sorted(self.ideals.keys() & row.blocks.keys())
        found = [figure(self.ideals[number], row.blocks[number]) for number in both]
        return Spread.of([value for value in found if value is not None])
