"""Blocks of steps and the arithmetic on them.

A block of an arm is compared with the blocks of the same round in which nothing was saved, which
met the same machine; over the rounds the median counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep_bench.persist.report import Spread
from everstep_bench.step.options import COMPRESSED, NONE, Setting

__all__ = ["Block", "Row", "Rows"]

_MEDIAN_BY_NOISE = 1.25 * 1.22 / 0.95


@dataclass(frozen=True, slots=True)
class Block:
    """Timed steps of one arm.

    Attributes:
        steps: number of them.
        wall_s: all of it, what the arm does between steps included.
        memory_bytes: taken into host memory in them; None if that is not known.
        written_bytes: sent to storage by all processes, until nothing was under way; None if
            that is secret.
        storage_bytes: on disk in the end.
        host_bytes: memory at most of this process, above training alone, and of the arm's
            processes; None if that is not known.
        trainer_cpu_s: processor time of this process.
        helper_cpu_s: of the arm's processes, until nothing was under way.
        behind_s: from the last step until then.
        others_cores: cores that other processes kept busy meanwhile, the arm's included.
    """

    steps: int
    wall_s: float
    memory_bytes: int | None = None
    written_bytes: int | None = None
    storage_bytes: int = 0
    host_bytes: int | None = None
    trainer_cpu_s: float = 0.0
    helper_cpu_s: float = 0.0
    behind_s: float = 0.0
    others_cores: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds for each step."""
        return self.wall_s / self.steps


@dataclass(slots=True)
class Row:
    """Figures of one arm with one setting.

    Attributes:
        blocks: by number of the round; several where nothing is saved.
        error: why it has none, or no more.
    """

    setting: Setting
    detail: str = ""
    blocks: dict[int, tuple[Block, ...]] = field(default_factory=dict)
    error: str | None = None

    def step_s(self, number: int) -> float:
        """Seconds for each step in a round."""
        blocks = self.blocks[number]
        return sum(b.wall_s for b in blocks) / sum(b.steps for b in blocks)

    def steps_s(self) -> Spread | None:
        """The same over the rounds."""
        return Spread.of([self.step_s(number) for number in self.blocks])

    def noise(self) -> float | None:
        """By how much two blocks of one round differ, in the middle, as a share; None where
        there is one."""
        found = []
        for number, blocks in self.blocks.items():
            steps_s = [block.step_s for block in blocks]
            if len(steps_s) > 1:
                found.append((max(steps_s) - min(steps_s)) / self.step_s(number))
        return statistics.median(found) if found else None

    def resolution(self) -> float | None:
        """Return the uncertainty of the median of this many paired rounds, as a share.

        If blocks scatter by ``s``, two of them differ by 0.95 s in the middle; a block differs
        from the mean of two with a deviation of 1.22 s, and the median of n such differences has
        one of 1.25 times that by the square root of n.
        """
        noise = self.noise()
        return None if noise is None else _MEDIAN_BY_NOISE * noise / math.sqrt(len(self.blocks))

    def spread(self, figure: Callable[[Block], float | None]) -> Spread | None:
        """Of one figure over all blocks; None where it is not known in any."""
        found = [figure(block) for blocks in self.blocks.values() for block in blocks]
        return Spread.of([value for value in found if value is not None])

    def per_step(self, figure: Callable[[Block], float | None]) -> Spread | None:
        """Of one figure for each step."""

        def each(block: Block) -> float | None:
            value = figure(block)
            return None if value is None else value / block.steps

        return self.spread(each)


@dataclass(slots=True)
class Rows:
    """All arms, in the order in which they are shown."""

    rows: list[Row]

    def of(self, setting: Setting) -> Row | None:
        """The row of a setting, if it has a figure."""
        return next((row for row in self.rows if row.setting == setting and row.blocks), None)

    def first(self, arm: str) -> Row | None:
        """The row of an arm in its usual setting, if it has a figure."""
        row = next((row for row in self.rows if row.setting.arm == arm), None)
        return row if row is not None and row.blocks else None

    def dense(self) -> Row | None:
        """Training alone."""
        return self.first(NONE)

    def compressed(self, ratio: float) -> Row | None:
        """Compressed training without a log, with the same share."""
        return next(
            (
                row
                for row in self.rows
                if row.setting.arm == COMPRESSED and row.setting.ratio == ratio and row.blocks
            ),
            None,
        )

    def slowdown(self, row: Row, reference: Row | None) -> Spread | None:
        """By what share steps take longer, round by round."""
        if reference is None:
            return None
        both = sorted(row.blocks.keys() & reference.blocks.keys())
        return Spread.of([row.step_s(n) / reference.step_s(n) - 1 for n in both])

    def own(self, row: Row) -> Row | None:
        """The same training without saving: compressed for LowDiff."""
        setting = row.setting
        return self.compressed(setting.ratio) if setting.compresses else self.dense()

    def against_its_own(self, row: Row) -> Spread | None:
        """The slow-down next to the same training without saving."""
        return self.slowdown(row, self.own(row))
