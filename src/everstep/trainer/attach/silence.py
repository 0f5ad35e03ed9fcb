"""A keeper process that says nothing any more: it is stopped, or hangs."""

from __future__ import annotations

import threading

from everstep.errors import DeadlineError
from everstep.seams import Clock

__all__ = ["Silence"]

_GRACE_S = 1.0


class Silence:
    """How long a keeper has said nothing. One that serves a training process says how far it is
    several times a second, whether it has anything to do or not.

    Args:
        pid: of the keeper process.
        timeout_s: so long it may be silent.
    """

    def __init__(self, clock: Clock, pid: int, timeout_s: float) -> None:
        self._clock = clock
        self._pid = pid
        self.timeout_s = timeout_s
        self.grace_s = _GRACE_S
        self._word = threading.Event()
        self._heard_s = self._told_s = clock.monotonic_s()

    def heard(self) -> None:
        """It has said something, or is only now about to begin; in any thread."""
        self._heard_s = self._clock.monotonic_s()
        self._word.set()

    def check(self) -> None:
        """For who waits for it.

        Raises:
            DeadlineError: it has said nothing for too long.
        """
        if self._is_over(self._heard_s):
            raise self._error()

    def news(self) -> DeadlineError | None:
        """For training that goes on beside it: that it has said nothing for too long, and again
        each time that has gone on for as long."""
        if not self._is_over(max(self._heard_s, self._told_s)):
            return None  # mostly
        self._told_s = self._clock.monotonic_s()
        return self._error()

    def _is_over(self, since_s: float) -> bool:
        """Where all of this machine stood still, or this process did (in a long call that lets no
        other thread run), nobody has read what the keeper says: there is a while for that."""
        if self._clock.monotonic_s() - since_s <= self.timeout_s:
            return False
        self._word.clear()
        return not self._word.wait(self.grace_s)

    def _error(self) -> DeadlineError:
        silent_s = self._clock.monotonic_s() - self._heard_s
        return DeadlineError(
            f"the keeper (process {self._pid}) has said nothing for {silent_s:.0f} s",
            hint="it is stopped (kill -CONT lets it go on), or hangs, or this machine is "
            "overloaded: nothing becomes durable meanwhile. everstep ps shows it",
        )
