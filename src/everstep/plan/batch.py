"""Number of steps per log segment: the fewest that the disk sustains.

Writing a segment has a fixed cost: a directory, two files, and the syncs that make names and bytes
durable. LowDiff (section V-B) batches steps because of this cost, and weighs it against the steps
lost with a node (half a segment; :mod:`.costs`). It counts the cost to *training* [g]. A keeper
writes in the background, at no measurable cost to training; with ``g = 0`` the model says one step
per segment. Other limits then apply: the writing thread must keep up, and the disk and the core are
shared. So a segment has the fewest steps with which the fixed costs take at most
:data:`PRICE_SHARE` of the time that the bytes leave::

    price <= share * b * (t - w)

``b`` steps per segment, ``t`` seconds per step, ``w`` seconds to digest and write the records of
one step. If the bytes alone take all the time, no segment size helps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

PRICE_SHARE = 0.1
"""Share of the time not needed for the log's bytes that fixed costs of writes may take."""

LONGEST_S = 60.0
"""Maximum seconds of training in a segment, however slow the disk is.

With a node, at most this much and the segment being written are lost.
"""

# Samples before the size is adapted.
_WRITES_MIN = 5
_STEPS_MIN = 8
_WINDOW = 64  # as in the other estimator
_HALF_LIFE = 16.0
# Tolerance of the share within which the current size stays.
_NEAR = 0.25
_LEAST_S = 1e-9


def least_batch(
    price_s: float, work_s: float, step_s: float, *, most: int, share: float = PRICE_SHARE
) -> int:
    """Return the fewest steps ``b`` with ``price_s <= share * b * (step_s - work_s)``, at most
    ``most``.

    Args:
        price_s: fixed cost of a write, in seconds.
        work_s: seconds of the writing thread per step, for digesting and writing its bytes.
        step_s: seconds of a training step.
        most: maximum number of steps, at least 1.
    """
    low = 1
    high = most
    # The right side grows with the number of steps, or is never positive: the search then ends at
    # `most`.
    while low < high:
        middle = (low + high) // 2
        if price_s <= share * middle * (step_s - work_s):
            high = middle
        else:
            low = middle + 1
    return low


def weighted_median(values: Sequence[float], half_life: float) -> float | None:
    """Return the weighted median of samples in the order of their arrival; None if there are none.

    Single outliers (a stalled disk, a step that compiled something) do not change it.

    Args:
        half_life: number of newer samples after which a sample's weight is halved.
    """
    newest = len(values) - 1
    weighted = sorted(
        (value, 0.5 ** ((newest - place) / half_life)) for place, value in enumerate(values)
    )
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in weighted:
        half -= weight
        if half <= 0:
            return value
    return weighted[-1][0] if weighted else None


class BatchEstimator:
    """Running estimates of the three costs, and the segment size that follows from them.

    Each estimate is the median of the newest samples, as in :mod:`.estimator`. The current size
    stays while it is optimal for a share within a quarter of :data:`PRICE_SHARE`, so that noise of
    the disk changes nothing.

    Args:
        first: steps per segment until enough was measured.
        most: maximum steps per segment.
        bytes_max: maximum bytes per segment; None: no limit. A single step may be larger.

    Attributes:
        steps: steps of the next segment.
    """

    def __init__(self, first: int, most: int, bytes_max: int | None = None) -> None:
        self.steps = first
        self._most = most
        self._bytes_max = bytes_max
        self._step_s = deque[float](maxlen=_WINDOW)
        self._price_s = deque[float](maxlen=_WINDOW)
        self._step_bytes = deque[float](maxlen=_WINDOW)
        self._bytes_per_s = deque[float](maxlen=_WINDOW)

    def observe_step(self, step_s: float) -> None:
        """Add the duration of a training step, including its waits."""
        self._step_s.append(max(_LEAST_S, step_s))

    def observe_write(self, steps: int, size_bytes: int, price_s: float, work_s: float) -> None:
        """Add a durable segment.

        Args:
            size_bytes: size of its records.
            price_s: seconds for everything but its bytes.
            work_s: seconds for digesting and writing its bytes.
        """
        self._price_s.append(max(_LEAST_S, price_s))
        self._step_bytes.append(size_bytes / steps)
        self._bytes_per_s.append(size_bytes / max(_LEAST_S, work_s))

    def choose(self) -> int:
        """Evaluate the costs again; return the steps of the next segment."""
        price_s = weighted_median(self._price_s, _HALF_LIFE)
        step_bytes = weighted_median(self._step_bytes, _HALF_LIFE)
        bytes_per_s = weighted_median(self._bytes_per_s, _HALF_LIFE)
        step_s = weighted_median(self._step_s, _HALF_LIFE)
        enough = len(self._price_s) >= _WRITES_MIN and len(self._step_s) >= _STEPS_MIN
        if not enough or not (price_s and step_bytes and bytes_per_s and step_s):
            return self.steps
        # A clock that stands still, as in tests.
        if step_s <= _LEAST_S:
            return self.steps
        most = min(self._most, LONGEST_S / step_s)
        if self._bytes_max is not None:
            most = min(most, self._bytes_max / step_bytes)

        def least(share: float) -> int:
            work_s = step_bytes / bytes_per_s
            return least_batch(price_s, work_s, step_s, most=max(1, int(most)), share=share)

        # A larger share allows shorter segments: this is the lower end of the range.
        low = least(PRICE_SHARE * (1 + _NEAR))
        high = least(PRICE_SHARE * (1 - _NEAR))
        if not low <= self.steps <= high:
            self.steps = least(PRICE_SHARE)
        return self.steps
