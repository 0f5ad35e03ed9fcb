"""How many objects an hour: stores charge for requests, and slow down those who ask too often.

A base is a handful of objects. A log that is written every step is the expensive part: so it is
batched, and :func:`batch_steps_for` says how many steps must go into one segment for the objects
of an hour to stay under a stated cap. :class:`ObjectRate` holds the cap, whatever was
calculated: it counts what is written and says how long the next objects have to wait.

The cap is that of a place, for all ranks of a job on all nodes together
(``TierOptions.objects_per_hour``). What counts here is one rank's equal part of it.
"""

from __future__ import annotations

import math
import threading
from collections import deque

from everstep.errors import InfeasibleError, OptionError
from everstep.seams.clock import Clock

__all__ = [
    "HOUR_S",
    "SEGMENT_OBJECTS",
    "ObjectRate",
    "batch_steps_for",
    "objects_per_hour",
    "pace_s",
]

HOUR_S = 3600.0
SEGMENT_OBJECTS = 2
"""Of a segment of the log: its data and its marker."""

_LOG_SHARE = 0.75  # of the cap; the rest is for bases
_LOOK_AGAIN_S = 1.0


def objects_per_hour(
    step_s: float,
    *,
    batch_steps: int | None,
    base_steps: int,
    writers: int = 1,
    objects_per_base: int = 3,
) -> float:
    """Objects that are written in an hour of training.

    Args:
        step_s: of one training step.
        batch_steps: of one segment of the log; None: there is no log.
        base_steps: from base to base.
        writers: of segments: ranks, each of which writes its own (TierCheck section 3.2 batches
            the differentials of N steps of a node).
        objects_per_base: of all ranks: their shards and markers, and the manifest.
    """
    if step_s <= 0 or base_steps < 1 or (batch_steps is not None and batch_steps < 1):
        raise OptionError(f"no rate of steps: {step_s} s, {batch_steps}, {base_steps}")
    steps = HOUR_S / step_s
    segments = 0.0 if batch_steps is None else steps / batch_steps * writers
    return segments * SEGMENT_OBJECTS + steps / base_steps * objects_per_base


def batch_steps_for(
    cap_per_hour: float,
    step_s: float,
    *,
    base_steps: int,
    writers: int = 1,
    objects_per_base: int = 3,
) -> int:
    """The fewest steps of one segment with which no more objects are written than ``cap_per_hour``.

    Raises:
        InfeasibleError: the bases alone are more; ``needed`` is the fewest steps between them.
    """
    bases = objects_per_hour(
        step_s, batch_steps=None, base_steps=base_steps, objects_per_base=objects_per_base
    )
    left = cap_per_hour - bases
    steps = HOUR_S / step_s
    if left <= 0:
        needed = math.floor(steps * objects_per_base / cap_per_hour) + 1 if cap_per_hour > 0 else 0
        raise InfeasibleError(
            f"bases alone are {bases:.0f} objects an hour, the cap is {cap_per_hour:g}",
            quantity="steps between bases",
            needed=needed,
            hint=f"a base every {needed} steps or less often, or a higher cap",
        )
    return max(1, math.ceil(steps * writers * SEGMENT_OBJECTS / left))


def pace_s(cap_per_hour: int | None) -> float:
    """Seconds from segment to segment of one writer, at least, so that its log takes three
    quarters of its cap, evenly over the hour, and bases never wait for a burst of segments."""
    return 0.0 if cap_per_hour is None else SEGMENT_OBJECTS * HOUR_S / (cap_per_hour * _LOG_SHARE)


class ObjectRate:
    """Keeps objects under a cap, in any hour.

    Args:
        cap_per_hour: None: no cap.
        before: what this one follows, whose objects count as well: a trainer that comes back, say,
            within the hour.
    """

    def __init__(
        self, cap_per_hour: int | None, clock: Clock, before: ObjectRate | None = None
    ) -> None:
        if cap_per_hour is not None and cap_per_hour < 1:
            raise OptionError(f"a cap of {cap_per_hour} objects an hour lets nothing through")
        self._cap = cap_per_hour
        self._clock = clock
        self._lock = threading.Lock()
        self._written: deque[tuple[float, int]] = deque()
        if before is not None:
            with before._lock:
                self._written.extend(before._written)
        self._claims: dict[object, int] = {}
        self.total = 0

    def wait_s(self, count: int, claim: object = None) -> float:
        """Seconds until ``count`` more objects may be written; 0: now.

        Args:
            claim: who asks; where the answer is 0, they are nobody else's until :meth:`settled`:
                from the first object of a base to the last others write, too.

        Raises:
            InfeasibleError: the cap is smaller than that.
        """
        if self._cap is None:
            return 0.0
        if count > self._cap:
            raise InfeasibleError(
                f"{count} objects belong together, and the cap is {self._cap} an hour",
                quantity="objects per hour",
                needed=count,
                hint=f"objects_per_hour={count} at least",
            )
        now_s = self._clock.monotonic_s()
        free_s = 0.0
        with self._lock:
            while self._written and self._written[0][0] <= now_s - HOUR_S:
                self._written.popleft()
            claimed = sum(number for who, number in self._claims.items() if who is not claim)
            over = sum(number for _, number in self._written) + claimed + count - self._cap
            if over <= 0 and claim is not None:
                self._claims[claim] = count
            for at_s, number in self._written:  # until so many are more than an hour old
                if over <= 0:
                    break
                over -= number
                free_s = at_s + HOUR_S - now_s
            if over > 0:  # only who has claimed them knows when
                free_s = max(free_s, _LOOK_AGAIN_S)
        return max(0.0, free_s)

    def settled(self, claim: object) -> None:
        """What was claimed is written, or will not be."""
        with self._lock:
            self._claims.pop(claim, None)

    def wrote(self, count: int) -> None:
        """``count`` objects were written, or at least tried."""
        with self._lock:
            self.total += count
            if self._cap is not None:
                self._written.append((self._clock.monotonic_s(), count))
