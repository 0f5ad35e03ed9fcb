"""Time behind a seam, so that deadlines and intervals can be tested without waiting."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from everstep.seams.processes.running import RunningTime

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Clocks: one to measure with, one to write into records, one for deadlines of progress."""

    def monotonic_s(self) -> float:
        """Seconds of a clock that never goes back; for intervals and deadlines."""
        ...

    def unix_s(self) -> float:
        """Seconds since the epoch; for people only, never compared between machines."""
        ...

    def running_s(self) -> float:
        """As :meth:`monotonic_s`, but it stands still where this process does (stopped, frozen, on
        a paused machine), and where nobody asks it several times a second."""
        ...

    def ticking(self) -> AbstractContextManager[None]:
        """In the block :meth:`running_s` goes on, whether anybody asks it or not."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def __init__(self) -> None:
        self._running = RunningTime()

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()

    def running_s(self) -> float:
        return self._running.now_s()

    def ticking(self) -> AbstractContextManager[None]:
        return self._running.ticking()


class ManualClock:
    """A clock that moves only when told to; for tests."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s
        self._jumped_s = self._stood_s = 0.0

    def monotonic_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s + self._jumped_s

    def running_s(self) -> float:
        return self._now_s - self._stood_s

    def ticking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def jump(self, seconds: float) -> None:
        """Moves only what :meth:`unix_s` says, forward or back, as whoever sets a clock does."""
        self._jumped_s += seconds

    def advance(self, seconds: float) -> None:
        """Moves all clocks forward by ``seconds``."""
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self._now_s += seconds

    def stand_still(self, seconds: float) -> None:
        """Moves all but :meth:`running_s`, as if this process had been stopped for so long."""
        self.advance(seconds)
        self._stood_s += seconds
