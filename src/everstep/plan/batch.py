"""How many steps of the log go to disk at a time: as few as the disk carries with ease.

A write of the log has a price, whatever it holds: a directory, two files, and the syncs that make
their names and bytes durable. LowDiff (section V-B) batches steps because of that price, and weighs
it against the steps that are lost with a node (half a batch; :mod:`.costs`). It counts what the
price costs *training* [g]. A keeper writes beside training, to which that costs nothing that could
be measured, and with ``g = 0`` the model says one step. What it leaves out then bounds the batch
from below: the thread that writes has to keep up, and the disk and the core are not the log's
alone. So a batch is the shortest with which the prices take no more than :data:`PRICE_SHARE` of
the time that the bytes leave::

    price <= share * b * (t - w)

``b`` steps to a batch, ``t`` seconds of a step, ``w`` seconds in which the records of a step are
digested and written: their bytes by the bandwidth. Together that is less than all of the time, as
soon as the bytes alone are, for which no batch is of any help.

Nothing here has a clock or touches a file.
"""

from __future__ import annotations

from collections import deque

from everstep.errors import OptionError
from everstep.plan.costs import is_number
from everstep.plan.median import weighted_median

__all__ = ["LONGEST_S", "PRICE_SHARE", "BatchEstimator", "least_batch"]

PRICE_SHARE = 0.1
"""Of the time that the bytes of the log leave: what the prices of its writes may take."""

LONGEST_S = 60.0
"""No batch holds more than so many seconds of training, however slow the disk is: at most so much
(and what is being written) is lost with a node."""

_WRITES_MIN = 5  # samples before anything is chosen
_STEPS_MIN = 8
_WINDOW = 64  # as in the other estimator
_HALF_LIFE = 16.0
_NEAR = 0.25  # a batch whose price is so near to its share stays as it is
_LEAST_S = 1e-9


def least_batch(
    price_s: float, work_s: float, step_s: float, *, most: int, share: float = PRICE_SHARE
) -> int:
    """The fewest steps ``b`` with ``price_s <= share * b * (step_s - work_s)``; ``most``, where no
    number up to that will do.

    Args:
        price_s: of a write, however much is in it.
        work_s: of the thread that writes, for each step: digesting and writing its bytes.
        step_s: of training.
        most: at least 1.
    """
    low = 1
    high = most
    while low < high:
        middle = (low + high) // 2
        if price_s <= share * middle * (step_s - work_s):
            high = middle
        else:
            low = middle + 1
    return low


class BatchEstimator:
    """Running estimates of the three costs, and the batch that they lead to.

    Each is the median of its newest samples, as in :mod:`.estimator`. The batch in force stays as
    long as it would be the shortest by a share that differs by no more than a quarter: the noise of
    a disk is to change nothing.

    Args:
        first: steps of a batch until enough was measured.
        most: steps that a batch may have.
        bytes_max: that it may have; None: any number. One step may be larger.

    Attributes:
        steps: of the next batch.

    Raises:
        OptionError: unless ``1 <= first <= most``.
    """

    def __init__(self, first: int, most: int, bytes_max: int | None = None) -> None:
        if not 1 <= first <= most:
            raise OptionError(f"no batch: {first} steps at first, at most {most}")
        self.steps = first
        self._most = most
        self._bytes_max = bytes_max
        self._step_s = deque[float](maxlen=_WINDOW)
        self._price_s = deque[float](maxlen=_WINDOW)
        self._step_bytes = deque[float](maxlen=_WINDOW)
        self._bytes_per_s = deque[float](maxlen=_WINDOW)

    def observe_step(self, step_s: float) -> None:
        """A step of training took so long, whatever it waited for."""
        self._step_s.append(_seconds("step_s", step_s))

    def observe_write(self, steps: int, size_bytes: int, price_s: float, work_s: float) -> None:
        """A batch is durable.

        Args:
            size_bytes: of its records.
            price_s: seconds for all but its bytes.
            work_s: seconds in which these were digested and written.
        """
        if steps < 1 or size_bytes < 1:
            raise OptionError(f"no batch: {steps} steps in {size_bytes} bytes")
        price_s = _seconds("price_s", price_s)
        work_s = _seconds("work_s", work_s)
        self._price_s.append(price_s)
        self._step_bytes.append(size_bytes / steps)
        self._bytes_per_s.append(size_bytes / work_s)

    def choose(self) -> int:
        """Looks at the costs again; the steps of the next batch."""
        price_s = weighted_median(self._price_s, _HALF_LIFE)
        step_bytes = weighted_median(self._step_bytes, _HALF_LIFE)
        bytes_per_s = weighted_median(self._bytes_per_s, _HALF_LIFE)
        step_s = weighted_median(self._step_s, _HALF_LIFE)
        enough = len(self._price_s) >= _WRITES_MIN and len(self._step_s) >= _STEPS_MIN
        if not enough or not (price_s and step_bytes and bytes_per_s and step_s):
            return self.steps
        if step_s <= _LEAST_S:  # of a clock that stands still
            return self.steps
        most = min(self._most, LONGEST_S / step_s)
        if self._bytes_max is not None:
            most = min(most, self._bytes_max / step_bytes)
        costs = (price_s, step_bytes / bytes_per_s, step_s)
        most = max(1, int(most))
        low, high = (
            least_batch(*costs, most=most, share=PRICE_SHARE * near)
            for near in (1 + _NEAR, 1 - _NEAR)
        )
        if not low <= self.steps <= high:
            self.steps = least_batch(*costs, most=most)
        return self.steps


def _seconds(name: str, value: float) -> float:
    """Never quite nothing: it divides."""
    if not is_number(value) or value < 0:
        raise OptionError(f"{name} must be seconds, not {value!r}")
    return max(_LEAST_S, float(value))
