"""How much of the log goes into the next segment on disk: so many steps, or as many as the disk
wants by what the last ones took (:mod:`everstep.plan.batch`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.plan.batch import BatchEstimator

__all__ = ["ENDED", "AutoBatch", "Batch", "SegmentTimes", "batch_of"]

ENDED = 1 << 62
"""In the place of the number of the last record on disk: since a segment failed none follows."""

_STEPS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """What a segment took.

    Attributes:
        price_s: seconds for all but its bytes: names, header, marker, and what makes them durable.
        work_s: seconds until its bytes were durable.
    """

    price_s: float
    work_s: float


class Batch:
    """Always the same number of steps, or as many as the memory of the log allows.

    Args:
        steps: of a segment.
        bytes_max: with so many a segment is full, whatever steps it has.
        memory_max: likewise, of memory that its records take: what waits to be written cannot be
            let go of, and a log whose memory is full of that would never go on.

    Attributes:
        steps: of the next segment.
    """

    def __init__(
        self, steps: int, bytes_max: int | None = None, memory_max: int | None = None
    ) -> None:
        self.steps = steps
        self._bytes_max = bytes_max
        self._memory_max = memory_max

    def is_full(self, steps: int, size_bytes: int, memory_bytes: int) -> bool:
        """Whether what has come is a segment.

        Args:
            size_bytes: of its records.
            memory_bytes: that they take.
        """
        pairs = (size_bytes, self._bytes_max), (memory_bytes, self._memory_max)
        return steps >= self.steps or any(most is not None and now >= most for now, most in pairs)

    def marked(self, step: int, at_s: float) -> None:
        """A step that goes to disk was over at ``at_s``."""

    def written(self, steps: int, size_bytes: int, digest_s: float, times: SegmentTimes) -> None:
        """A segment is durable, whose records, ``size_bytes`` in memory, took ``digest_s`` to be
        digested."""


class AutoBatch(Batch):
    """As few steps as the disk carries with ease, by what it has taken so far.

    Args:
        first: steps of a segment until enough was measured.
        most: steps, at most; None: as many as there may ever be.
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

    def marked(self, step: int, at_s: float) -> None:
        if self._last is not None and step == self._last[0] + 1 and at_s >= self._last[1]:
            self._estimator.observe_step(at_s - self._last[1])
        self._last = step, at_s

    def written(self, steps: int, size_bytes: int, digest_s: float, times: SegmentTimes) -> None:
        work_s = times.work_s + digest_s  # some steps may have nothing but objects
        self._estimator.observe_write(steps, max(1, size_bytes), times.price_s, work_s)
        self.steps = self._estimator.choose()


def batch_of(told: Mapping[str, Any]) -> Batch:
    """Return the batch that a training process asked for, see ``LogLimits.batch_to_wire``."""
    if told["auto"]:
        return AutoBatch(told["steps"], told["most"], told["bytes_max"], told["memory_max"])
    return Batch(told["steps"], told["bytes_max"], told["memory_max"])
