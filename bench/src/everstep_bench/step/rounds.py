"""Blocks of all arms in turns, on one training, and the arithmetic on them.

A block of an arm is compared with the blocks of the same round in which nothing was saved, which
met the same machine; over the rounds the median counts.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.errors import EverstepError
from everstep_bench.harness import figures
from everstep_bench.harness.figures import Spread
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.machine import busy_s, cpu_s, written_bytes
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.running import quiet
from everstep_bench.harness.session import Turns
from everstep_bench.options import COMPRESSED, NONE
from everstep_bench.step.arms import DcpWarm, Ours, Setting, StepArm, TorchSave, missing

REFERENCE_BLOCKS = 2
"""In each round, of each training that saves nothing; how much they differ is the noise."""

_FIRST_STEPS = 3
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
        trainer_cpu_s: processor time of this process.
        helper_cpu_s: of the arm's processes, until nothing was under way.
        behind_s: from the last step until then.
        others_cores: cores that other processes kept busy meanwhile, the arm's included.
    """

    steps: int
    wall_s: float
    memory_bytes: int | None = None
    written_bytes: int | None = None
    trainer_cpu_s: float = 0.0
    helper_cpu_s: float = 0.0
    behind_s: float = 0.0
    others_cores: float = 0.0


@dataclass(slots=True)
class Row(figures.Row[tuple[Block, ...]]):
    """Figures of one arm with one setting; several blocks in a round where nothing is saved."""

    setting: Setting = field(default_factory=lambda: Setting(NONE, 1))

    def step_s(self, number: int) -> float:
        """Return the seconds for each step in a round."""
        blocks = self.blocks[number]
        return sum(b.wall_s for b in blocks) / sum(b.steps for b in blocks)

    def steps_s(self) -> Spread | None:
        """Return the same over the rounds."""
        return Spread.of([self.step_s(number) for number in self.blocks])

    def noise(self) -> float | None:
        """Return by how much two blocks of one round differ, in the middle, as a share; None
        where there is one."""
        found = []
        for number, blocks in self.blocks.items():
            steps_s = [block.wall_s / block.steps for block in blocks]
            if len(steps_s) > 1:
                found.append((max(steps_s) - min(steps_s)) / self.step_s(number))
        spread = Spread.of(found)
        return None if spread is None else spread.median

    def resolution(self) -> float:
        """Return the uncertainty of the median of this many paired rounds, as a share; 0 if it is
        not known.

        If blocks scatter by ``s``, two of them differ by 0.95 s in the middle; a block differs
        from the mean of two with a deviation of 1.22 s, and the median of n such differences has
        one of 1.25 times that by the square root of n.
        """
        noise = self.noise()
        return 0.0 if noise is None else _MEDIAN_BY_NOISE * noise / math.sqrt(len(self.blocks))

    def each(self, figure: Callable[[Block], float | None]) -> Spread | None:
        """Return one figure over all blocks; None where it is not known in any."""
        return Spread.of([figure(block) for blocks in self.blocks.values() for block in blocks])

    def per_step(self, figure: Callable[[Block], float | None]) -> Spread | None:
        """Return one figure for each step."""

        def share(block: Block) -> float | None:
            value = figure(block)
            return None if value is None else value / block.steps

        return self.each(share)


@dataclass(slots=True)
class Rows:
    """All arms, in the order in which they are shown."""

    rows: list[Row]

    def first(self, arm: str, ratio: float | None = None) -> Row:
        """Return the row of an arm in its usual setting, or with this share; an empty one if it
        has no figure."""
        rows = (r for r in self.rows if r.name == arm and ratio in (None, r.setting.ratio))
        row = next(rows, None)
        return row if row is not None and row.blocks else Row(arm)

    def dense(self) -> Row:
        """Return training alone."""
        return self.first(NONE)

    def slowdown(self, row: Row, reference: Row) -> Spread | None:
        """Return by what share steps take longer, round by round."""
        both = sorted(row.blocks.keys() & reference.blocks.keys())
        return Spread.of([row.step_s(n) / reference.step_s(n) - 1 for n in both])

    def own(self, row: Row) -> Row:
        """Return the same training without saving: compressed for LowDiff."""
        setting = row.setting
        return self.first(COMPRESSED, setting.ratio) if setting.compresses else self.dense()

    def against_its_own(self, row: Row) -> Spread | None:
        """Return the slow-down next to the same training without saving."""
        return self.slowdown(row, self.own(row))


def make_arm(setting: Setting, loop: Loop, folder: Path, placement: Placement) -> StepArm:
    """Return the arm of this setting; nothing is begun."""
    kinds: dict[str, type[StepArm]] = {
        NONE: StepArm,
        COMPRESSED: StepArm,
        "torch.save": TorchSave,
        "dcp-warm": DcpWarm,
    }
    return kinds.get(setting.arm, Ours)(setting, loop, folder, placement)


class Bench:
    """Runs blocks.

    Args:
        folder: where arms write; each gets a folder of its own, removed after its block.
    """

    def __init__(self, loop: Loop, folder: Path, placement: Placement, turns: Turns) -> None:
        self._loop = loop
        self._folder = folder
        self._placement = placement
        self._turns = turns
        self._count = 0
        for _ in range(_FIRST_STEPS):
            loop.step()

    def measure(self, settings: Sequence[Setting], repeats: int, what: str = "") -> list[Row]:
        """Let all of them take turns in so many rounds.

        An arm that fails has no figures, and its error.
        """
        rows = [Row(one.arm, error=missing(one.arm), setting=one) for one in settings]
        for number, turn in self._turns.rounds(
            what,
            rows,
            repeats,
            warm_up=False,
            times=lambda row: REFERENCE_BLOCKS if row.setting.is_reference else 1,
        ):
            for row in turn:
                try:
                    row.blocks[number] = (*row.blocks.get(number, ()), self.block(row))
                except EverstepError as error:
                    row.error = f"failed: {error}"
                    row.blocks.clear()
        return rows

    def block(self, row: Row) -> Block:
        """Open an arm, warm it up, time a block, and let nothing of it remain."""
        self._count += 1
        folder = self._folder / f"{self._count}"
        arm = make_arm(row.setting, self._loop, folder, self._placement)
        row.detail = arm.detail
        with quiet(), self._opened(arm, folder):
            arm.warm_up()
            gc.collect()
            os.sync()  # nothing is on its way to the disk
            self._placement.spread()
            return self._timed(arm, row.setting.block_steps)

    @contextlib.contextmanager
    def _opened(self, arm: StepArm, folder: Path) -> Iterator[None]:
        try:
            arm.open()
            self._placement.spread()
            yield
        finally:
            try:
                arm.close()
            finally:
                if folder.exists():
                    shutil.rmtree(folder)

    def _timed(self, arm: StepArm, steps: int) -> Block:
        helpers = arm.processes()
        helpers_s = sum(map(cpu_s, helpers))
        written = _written_bytes(helpers)
        leading = int(arm.saves_each_step)  # a block begins among saves, where there are so many
        for _ in range(leading):
            self._loop.step()
            arm.after_step()
        memory = arm.memory_bytes()
        others_s = busy_s()
        own_s = time.process_time()
        begin_s = time.monotonic()
        for _ in range(steps):
            self._loop.step()
            arm.after_step()
        wall_s = time.monotonic() - begin_s
        trainer_s = time.process_time() - own_s
        others_s = busy_s() - others_s - trainer_s
        taken = arm.memory_bytes()
        arm.settle()
        after = _written_bytes(helpers)
        share = steps / (steps + leading)  # of the work after the last step, too
        known = written is not None and after is not None
        return Block(
            steps=steps,
            wall_s=wall_s,
            memory_bytes=None if taken is None or memory is None else taken - memory,
            written_bytes=int(share * (after - written)) if known else None,  # type: ignore[operator]
            trainer_cpu_s=trainer_s,
            helper_cpu_s=share * (sum(map(cpu_s, helpers)) - helpers_s),
            behind_s=time.monotonic() - begin_s - wall_s,
            others_cores=max(0.0, others_s / wall_s),
        )


def _written_bytes(helpers: Sequence[int]) -> int | None:
    found = [written_bytes(pid) for pid in (os.getpid(), *helpers)]
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None
