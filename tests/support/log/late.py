"""A lane whose copies are made as late as they may be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import everstep
from everstep.capture.batches import Batch, run_batch
from everstep.capture.lane import CpuLane, CpuTransfer, Progress, Transfer
from everstep.seams import Seams
from tests.support.matrix import World
from tests.support.world import forget


class LateTransfer(CpuTransfer):
    """Copies when somebody cannot go on without it, and not before."""

    def __init__(self, copy: Callable[[], None]) -> None:
        super().__init__()
        self._copy, self._lock = copy, threading.Lock()

    def gate(self, end: int, timeout_s: float) -> bool:
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> bool:
        with self._lock:
            if not self._over:
                self._copy()
                self.end()
        return super().wait(timeout_s)


class LateLane(CpuLane):
    """The latest lane that the rules allow: what changes too early is torn, every time."""

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        def copy() -> None:
            for batch in batches:
                run_batch(batch, block)
                progress(batch.end)

        return LateTransfer(copy)

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        return self.submit(batches, block, progress)


def opened(run: Path, world: World, **options: Any) -> everstep.Checkpointer:
    forget(run)
    options = {"method": "logged", "every": 4, "seams": Seams(lane=LateLane)} | options
    return everstep.Checkpointer(run, world.state, **options)
