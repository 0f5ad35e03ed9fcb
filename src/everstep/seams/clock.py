"""Time behind a seam, so that deadlines and intervals can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Two clocks: one to measure with, one to write into records."""

    def monotonic_s(self) -> float:
        """Seconds of a clock that never goes back; for intervals and deadlines."""
        ...

    def unix_s(self) -> float:
        """Seconds since the epoch; for people only, never compared between machines."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to; for tests."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s
        self._jumped_s = 0.0

    def monotonic_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s + self._jumped_s

    def jump(self, seconds: float) -> None:
        """Moves only what :meth:`unix_s` says, forward or back, as whoever sets a clock does."""
        self._jumped_s += seconds

    def advance(self, seconds: float) -> None:
        """Moves both clocks forward by ``seconds``."""
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self._now_s += seconds
