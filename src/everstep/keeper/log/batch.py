"""Number of steps in the next log segment: fixed, or adapted to the speed of the disk.

The adaptive form uses the cost model in :mod:`everstep.plan.batch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.plan.batch import BatchEstimator

__all__ = ["ENDED", "AutoBatch", "Batch", "SegmentTimes", "batch_from_wire"]

ENDED = 1 << 62
"""Sent instead of the number of the last record on disk: a segment failed, none will follow."""

_STEPS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """Durations of one segment write.

    Attributes:
        price_s: seconds for everything but the body: names, header, marker, syncs of directories.
        work_s: seconds until the body was durable.
    """

    price_s: float
    work_s: float


class Batch:
    """Fixed number of steps per segment, limited by the log's memory.

    Args:
        steps: steps per segment.
        bytes_max: size in bytes at which a segment is full, regardless of its steps.
        memory_max: bytes of record memory at which a segment is full. Records that wait to be
            written cannot be released; without this limit a log could fill its memory with them and
            stop.

    Attributes:
        steps: steps of the next segment.
    """

    def __init__(
        self, steps: int, bytes_max: int | None = None, memory_max: int | None = None
    ) -> None:
        self.steps = steps
        self._bytes_max = bytes_max
        self._memory_max = memory_max

    def is_full(self, steps: int, size_bytes: int, memory_bytes: int) -> bool:
        """Return True if the pending records make a full segment.

        Args:
            steps: number of complete steps.
            size_bytes: size of the records.
            memory_bytes: memory that the records take, including their objects.
        """
        if steps >= self.steps:
            return True
        if self._bytes_max is not None and size_bytes >= self._bytes_max:
            return True
        return self._memory_max is not None and memory_bytes >= self._memory_max

    def step_ended(self, step: int, at_s: float) -> None:
        """Note that a step of the log ended at time ``at_s``."""

    def segment_written(
        self, steps: int, size_bytes: int, digest_s: float, times: SegmentTimes
    ) -> None:
        """Note that a segment is durable.

        Args:
            size_bytes: size of its records in memory.
            digest_s: seconds spent on digesting them.
        """


class AutoBatch(Batch):
    """As few steps per segment as the disk sustains, estimated from past segments.

    Args:
        first: steps per segment until enough was measured.
        most: upper limit of steps per segment; None: a built-in limit.
    """

    def __init__(
        self,
        first: int,
        most: int | None = None,
        bytes_max: int | None = None,
        memory_max: int | None = None,
    ) -> None:
        super().__init__(first, bytes_max, memory_max)
        self._estimator = BatchEstimator(first, _STEPS_MAX if most is None else most, bytes_max)
        self._last: tuple[int, float] | None = None  # step, and when it was over

    def step_ended(self, step: int, at_s: float) -> None:
        # Only consecutive steps measure a step time: a gap contains a base, or a pause.
        if self._last is not None and step == self._last[0] + 1 and at_s >= self._last[1]:
            self._estimator.observe_step(at_s - self._last[1])
        self._last = step, at_s

    def segment_written(
        self, steps: int, size_bytes: int, digest_s: float, times: SegmentTimes
    ) -> None:
        work_s = times.work_s + digest_s
        # A segment may hold objects only: the estimator needs a positive size.
        self._estimator.observe_write(steps, max(1, size_bytes), times.price_s, work_s)
        self.steps = self._estimator.choose()


def batch_from_wire(bounds: Mapping[str, Any]) -> Batch:
    """Return the segment size that a training process asked for (``LogLimits.batch_to_wire``)."""
    if bounds["auto"]:
        return AutoBatch(bounds["steps"], bounds["most"], bounds["bytes_max"], bounds["memory_max"])
    return Batch(bounds["steps"], bounds["bytes_max"], bounds["memory_max"])
