"""Blocks of all arms in turns, on one training."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from everstep.errors import EverstepError
from everstep_bench.persist.meter import busy_s
from everstep_bench.persist.show import Display
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.gauges import (
    cpu_s,
    give_back_free_memory,
    own_peak_bytes,
    own_resident_bytes,
    private_bytes,
    reset_peak,
    shared_bytes,
    written_bytes,
)
from everstep_bench.stall.loop import Loop
from everstep_bench.stall.running import quiet
from everstep_bench.step.arms import StepArm, TorchSave
from everstep_bench.step.figures import Block, Row
from everstep_bench.step.naive import NaiveDiff
from everstep_bench.step.options import COMPRESSED, NONE, Setting
from everstep_bench.step.ours import Ours, missing

__all__ = ["Bench", "make_arm"]

REFERENCE_BLOCKS = 2
"""In each round, of each training that saves nothing; how much they differ is the noise."""

_FIRST_STEPS = 3


def make_arm(setting: Setting, loop: Loop, folder: Path, placement: Placement) -> StepArm:
    """The arm of this setting; nothing is begun."""
    kinds: dict[str, type[StepArm]] = {
        NONE: StepArm,
        COMPRESSED: StepArm,
        "torch.save": TorchSave,
        "naive-diff": NaiveDiff,
    }
    return kinds.get(setting.arm, Ours)(setting, loop, folder, placement)


class Bench:
    """Runs blocks.

    Args:
        folder: where arms write; each gets a folder of its own, removed after its block.
    """

    def __init__(
        self, loop: Loop, folder: Path, placement: Placement, display: Display, *, seed: int
    ) -> None:
        self._loop = loop
        self._folder = folder
        self._placement = placement
        self._display = display
        self._random = random.Random(seed)
        self._count = 0
        for _ in range(_FIRST_STEPS):
            loop.step()

    def measure(self, settings: Sequence[Setting], repeats: int, what: str = "") -> list[Row]:
        """So many rounds of all of them, in an order that is drawn anew for each.

        An arm that fails has no figures, and its error.
        """
        rows = [Row(setting, error=missing(setting.arm)) for setting in settings]
        for number in range(1, repeats + 1):
            order = [row for row in rows if row.error is None]
            order += [row for row in order if row.setting.is_reference] * (REFERENCE_BLOCKS - 1)
            self._random.shuffle(order)
            self._display.begin(f"{what} round {number} of {repeats}".strip(), len(order))
            for row in order:
                self._display.advance(row.setting.arm)
                if row.error is None:
                    self._try(row, number)
        return rows

    def _try(self, row: Row, number: int) -> None:
        try:
            row.blocks[number] = (*row.blocks.get(number, ()), self.block(row))
        except EverstepError as error:
            row.error = f"failed: {error}"
            row.blocks.clear()

    def block(self, row: Row) -> Block:
        """Opens an arm, warms it up, times a block, and lets nothing of it remain."""
        self._count += 1
        folder = self._folder / f"{self._count}"
        give_back_free_memory()
        alone_bytes = own_resident_bytes() if reset_peak() else None
        arm = make_arm(row.setting, self._loop, folder, self._placement)
        row.detail = arm.detail
        with quiet(), self._opened(arm, folder):
            arm.warm_up()
            gc.collect()
            os.sync()  # nothing is on its way to the disk
            self._placement.spread()
            return self._timed(arm, row.setting.block_steps, folder, alone_bytes)

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

    def _timed(self, arm: StepArm, steps: int, folder: Path, alone_bytes: int | None) -> Block:
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
        return Block(
            steps=steps,
            wall_s=wall_s,
            memory_bytes=None if taken is None or memory is None else taken - memory,
            written_bytes=None
            if written is None or after is None
            else int(share * (after - written)),
            storage_bytes=_storage_bytes(folder),
            host_bytes=None if alone_bytes is None else _host_bytes(helpers) - alone_bytes,
            trainer_cpu_s=trainer_s,
            helper_cpu_s=share * (sum(map(cpu_s, helpers)) - helpers_s),
            behind_s=time.monotonic() - begin_s - wall_s,
            others_cores=max(0.0, others_s / wall_s),
        )


def _written_bytes(helpers: Sequence[int]) -> int | None:
    found = [written_bytes(pid) for pid in (os.getpid(), *helpers)]
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None


def _host_bytes(helpers: Sequence[int]) -> int:
    """Of this process at most, and of the others: shared memory counts where more of it is
    touched."""
    own = shared_bytes(os.getpid())
    more = sum(max(0, shared_bytes(pid) - own) for pid in helpers)
    return own_peak_bytes() + more + sum(map(private_bytes, helpers))


def _storage_bytes(folder: Path) -> int:
    """Return the disk space of files."""
    if not folder.exists():
        return 0
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
