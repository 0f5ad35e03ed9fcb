"""Clocks, so that tests can control deadlines and intervals.

Deadlines of progress use the time during which this process runs. If the process is stopped
(SIGSTOP, a frozen cgroup, a paused virtual machine), its peers and children may be stopped as well;
with the machine's clock every deadline would have passed on return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

_LOOK_S = 0.2
"""Length of a wait slice, and interval of the ticking thread."""

_LATE_S = 1.0
"""A longer gap between two reads means that the process was stopped, however busy the machine."""


class RunningTime:
    """Count the time during which this process runs.

    The clock has to be read several times a second: at most one second is counted between two
    reads. Without reads it stands still, unless :meth:`ticking` is active.

    Args:
        clock_s: monotonic clock in seconds; None: the machine's.
    """

    def __init__(self, clock_s: Callable[[], float] | None = None) -> None:
        self._clock_s = clock_s or time.monotonic
        self._lock = threading.Lock()
        self._ran_s, self._seen_s = 0.0, self._clock_s()

    def now_s(self) -> float:
        """Read the clock and return the seconds counted so far."""
        with self._lock:
            seen_s = self._clock_s()
            # A larger step means that the process stood still: count one second of it at most.
            self._ran_s += min(seen_s - self._seen_s, _LATE_S)
            self._seen_s = seen_s
            return self._ran_s

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Read the clock from a background thread while the block runs."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(_LOOK_S):
                self.now_s()

        thread = threading.Thread(target=tick, name="everstep-clock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class WaitBudget:
    """Remaining time of a wait, spent in slices.

    If the process is stopped during a slice, only the length of that slice is deducted.

    Attributes:
        left_s: remaining seconds; 0 when the budget is spent.
    """

    def __init__(self, timeout_s: float) -> None:
        self.left_s = max(0.0, timeout_s)

    def spend(self, wait: Callable[[float], object]) -> None:
        """Call ``wait`` with the seconds of one slice and deduct the time it took."""
        slice_s = min(self.left_s, _LOOK_S)
        since_s = time.monotonic()
        wait(slice_s)
        self.left_s = max(0.0, self.left_s - min(time.monotonic() - since_s, slice_s))


class Clock(Protocol):
    """Clock for durations, for timestamps in records, and for deadlines of progress."""

    def monotonic_s(self) -> float:
        """Return seconds of a clock that never goes back; for intervals and deadlines."""
        ...

    def unix_s(self) -> float:
        """Return seconds since the epoch; for display only, never compared between machines."""
        ...

    def running_s(self) -> float:
        """Return seconds during which this process ran (not stopped, frozen or paused). Counts only
        while it is read several times a second; see :meth:`ticking`.
        """
        ...

    def ticking(self) -> AbstractContextManager[None]:
        """Keep :meth:`running_s` counting in the block even if nothing reads it."""
        ...


class SystemClock(RunningTime):
    """Clocks of this machine."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()

    def running_s(self) -> float:
        return self.now_s()


class ManualClock:
    """Clock that tests move by hand."""

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
        """Move :meth:`unix_s` only, forward or back, as setting the machine's clock does."""
        self._jumped_s += seconds

    def advance(self, seconds: float) -> None:
        """Move all clocks forward by ``seconds``."""
        if seconds < 0:
            raise ValueError("a clock cannot go back: seconds must be at least 0")
        self._now_s += seconds

    def stand_still(self, seconds: float) -> None:
        """Move all clocks except :meth:`running_s`, as if the process had been stopped."""
        self.advance(seconds)
        self._stood_s += seconds
