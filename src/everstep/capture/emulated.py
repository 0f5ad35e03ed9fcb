"""A slow link, emulated: for experiments on machines without a device.

Whatever is measured through it says so; nothing chooses it by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from everstep.capture.batches import Batch
from everstep.capture.lane import CpuLane

__all__ = ["EmulatedLink"]


class EmulatedLink(CpuLane):
    """A CPU lane that copies no faster than a link of the given bandwidth would.

    Args:
        bytes_per_s: of the link.
    """

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s

    def mark(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        for batch in batches:
            start_s = time.monotonic()
            super().mark([batch], block)
            self._pace(batch.end - batch.begin, start_s)

    def _copy(self, batch: Batch, block: torch.Tensor) -> None:
        start_s = time.monotonic()
        super()._copy(batch, block)
        self._pace(batch.end - batch.begin, start_s)

    def _pace(self, size_bytes: int, start_s: float) -> None:
        left_s = start_s + size_bytes / self._bytes_per_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
