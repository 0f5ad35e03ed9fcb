"""A slow link, emulated: for experiments on machines without a device.

Whatever is measured through it says so; nothing chooses it by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from everstep.capture.lanes.batches import Batch
from everstep.capture.lanes.lane import CpuLane
from everstep.seams.processes.conditions import Condition

__all__ = ["EmulatedLink"]


class EmulatedLink(CpuLane):
    """A CPU lane that copies no faster than a link of the given bandwidth would.

    The link is busy from when a copy was issued, or the one before it has ended, for as long as its
    bytes take; that a thread wakes up late makes the copies behind it no later. What is under way
    is not interrupted, and copies keep the order of any CPU lane; but a mark, for which training
    stands still, goes before those that were submitted: it waits for one batch of them at most.

    Args:
        bytes_per_s: of the link.
    """

    _in_runs = False

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s
        self._lock = Condition()
        self._marks = 0  # that go before what was submitted
        self._free_s = 0.0  # the link is, from then on

    def mark(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        with self._lock:
            self._marks += 1
        try:
            for batch in batches:
                end_s = self._busy_until(batch, time.monotonic())
                super().mark([batch], block)
                _sleep_until(end_s)
        finally:
            with self._lock:
                self._marks -= 1
                self._lock.notify_all()

    def _now(self) -> float:
        return time.monotonic()

    def _copy(self, batch: Batch, block: torch.Tensor) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._marks)
            end_s = self._busy_until(batch, self._issued_s)
        super()._copy(batch, block)
        _sleep_until(end_s)

    def _busy_until(self, batch: Batch, issued_s: float) -> float:
        with self._lock:
            start_s = max(self._free_s, issued_s)
            self._free_s = start_s + (batch.end - batch.begin) / self._bytes_per_s
            return self._free_s


def _sleep_until(end_s: float) -> None:
    left_s = end_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
