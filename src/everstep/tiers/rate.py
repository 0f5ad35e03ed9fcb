"""Limit the number of objects per hour: stores charge for requests and throttle frequent ones.

A base is a handful of objects; a log that is written every step is the expensive part. So steps are
batched into segments (:func:`pace_s`). :class:`ObjectRate` enforces the limit independently of
that: it counts written objects and returns how long the next ones must wait.

The limit applies to a place, for all ranks of a job on all nodes together
(``TierOptions.objects_per_hour``). Here one rank's equal share of it is counted.
"""

from __future__ import annotations

import threading
from collections import deque

from everstep.errors import InfeasibleError, OptionError
from everstep.seams.clock import Clock

HOUR_S = 3600.0
SEGMENT_OBJECTS = 2
"""Objects per log segment: its data and its marker."""

_LOG_SHARE = 0.75
"""Share of the limit for the log; the rest is for bases."""
_LOOK_AGAIN_S = 1.0


def pace_s(cap_per_hour: int | None) -> float:
    """Return the minimum seconds between two segments of one writer.

    The log then uses three quarters of the limit, evenly over the hour, so that bases never wait
    for a burst of segments.
    """
    return 0.0 if cap_per_hour is None else SEGMENT_OBJECTS * HOUR_S / (cap_per_hour * _LOG_SHARE)


class ObjectRate:
    """Keeps the objects written in any hour under a limit.

    Args:
        cap_per_hour: limit; None: no limit.
        before: the rate that this one continues, whose objects count as well, e.g. after a restart
            of the trainer within the hour.

    Attributes:
        total: objects written.
    """

    def __init__(
        self, cap_per_hour: int | None, clock: Clock, before: ObjectRate | None = None
    ) -> None:
        if cap_per_hour is not None and cap_per_hour < 1:
            raise OptionError(f"a limit of {cap_per_hour} objects per hour allows nothing")
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
        """Return the seconds until ``count`` more objects may be written; 0: now.

        Args:
            claim: key of the caller. If the result is 0, the objects are reserved for it until
                :meth:`settled`, as other writers are active between the first and the last object
                of a base.

        Raises:
            InfeasibleError: the limit is below ``count``.
        """
        if self._cap is None:
            return 0.0
        if count > self._cap:
            raise InfeasibleError(
                f"{count} objects belong together, but the limit is {self._cap} per hour",
                quantity="objects per hour",
                needed=count,
                hint=f"set objects_per_hour={count} or more",
            )
        now_s = self._clock.monotonic_s()
        free_s = 0.0
        with self._lock:
            while self._written and self._written[0][0] <= now_s - HOUR_S:
                self._written.popleft()
            # A repeated call replaces the reservation of its caller, which must not count against
            # it.
            claimed = sum(number for key, number in self._claims.items() if key is not claim)
            over = sum(number for _, number in self._written) + claimed + count - self._cap
            if over <= 0 and claim is not None:
                self._claims[claim] = count
            # Wait until enough of them are more than an hour old.
            for at_s, number in self._written:
                if over <= 0:
                    break
                over -= number
                free_s = at_s + HOUR_S - now_s
            # The rest is reserved; nobody can tell when it will be settled, so check again soon.
            if over > 0:
                free_s = max(free_s, _LOOK_AGAIN_S)
        return max(0.0, free_s)

    def settled(self, claim: object) -> None:
        """Release the reservation of ``claim``: its objects are written, or will not be."""
        with self._lock:
            self._claims.pop(claim, None)

    def wrote(self, count: int) -> None:
        """Count ``count`` objects that were written or tried."""
        with self._lock:
            self.total += count
            if self._cap is not None:
                self._written.append((self._clock.monotonic_s(), count))
