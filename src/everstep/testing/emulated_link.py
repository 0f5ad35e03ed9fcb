"""An emulated link between device and host, for experiments on machines without a device.

Figures that are measured with it are marked as emulated; it is never chosen automatically.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from everstep.capture import Batch
from everstep.capture.lane import CpuLane
from everstep.seams.processes import Condition


class EmulatedLink(CpuLane):
    """A CPU lane that copies no faster than a link of the given bandwidth.

    A copy occupies the link from its issue, or from the end of the previous copy, for as long as
    its bytes take. A thread that wakes up late does not delay later copies. Copies are not
    interrupted and keep the order of any CPU lane, except for a step mark: training waits for it,
    so it overtakes submitted copies and waits for one batch of them at most.

    Args:
        bytes_per_s: bandwidth of the link.
    """

    in_runs = False

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s
        self._lock = Condition()
        self._marks = 0  # marks that overtake submitted copies
        self._free_s = 0.0  # end of the last copy on the link

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        with self._lock:
            self._marks += 1
        try:
            for batch in batches:
                end_s = self._busy_until(batch, time.monotonic())
                super().copy_now([batch], block)
                _sleep_until(end_s)
        finally:
            with self._lock:
                self._marks -= 1
                self._lock.notify_all()

    def now_s(self) -> float:
        return time.monotonic()

    def copy_batch(self, batch: Batch, block: torch.Tensor) -> None:
        with self._lock:
            # A mark blocks training: submitted copies wait until it is done.
            self._lock.wait_for(lambda: not self._marks)
            end_s = self._busy_until(batch, self._issued_s)
        super().copy_batch(batch, block)
        _sleep_until(end_s)

    def _busy_until(self, batch: Batch, issued_s: float) -> float:
        with self._lock:
            # From the time of issue, not of now: a late wake-up does not slow the link down.
            start_s = max(self._free_s, issued_s)
            self._free_s = start_s + (batch.end - batch.begin) / self._bytes_per_s
            return self._free_s


def _sleep_until(end_s: float) -> None:
    left_s = end_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
