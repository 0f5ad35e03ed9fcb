"""Time behind a seam, so that deadlines and intervals can be tested without waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

__all__ = [
    "Clock",
    "ManualClock",
    "RunningTime",
    "SystemClock",
    "WaitBudget",
]

_LOOK_S = 0.2
"""How often whoever waits, or ticks, looks at the clock."""

_LATE_S = 1.0
"""So much later nobody looks in a process that runs, however busy its machine is."""


class RunningTime:
    """Counts it, as long as somebody looks several times a second: between two looks no more than a
    second counts. It stands still for who does not, unless in :meth:`ticking`.

    Args:
        clock_s: that never goes back; None: the machine's.
    """

    def __init__(self, clock_s: Callable[[], float] | None = None) -> None:
        self._clock_s = clock_s or time.monotonic
        self._lock = threading.Lock()
        self._ran_s, self._seen_s = 0.0, self._clock_s()

    def now_s(self) -> float:
        """Seconds counted so far; a look."""
        with self._lock:
            seen_s = self._clock_s()
            self._ran_s += min(seen_s - self._seen_s, _LATE_S)
            self._seen_s = seen_s
            return self._ran_s

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """A thread looks in the block, whatever the one that is in it waits for."""
        over = threading.Event()
        thread = threading.Thread(
            target=self._tick, args=(over,), name="everstep-clock", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _tick(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_S):
            self.now_s()


class WaitBudget:
    """Time that is left for waiting. It is waited in slices: of a time in which this process stood
    still no more than one of them counts.

    Attributes:
        left_s: 0: none.
    """

    def __init__(self, timeout_s: float) -> None:
        self.left_s = max(0.0, timeout_s)

    def spend(self, wait: Callable[[float], object]) -> None:
        """Calls ``wait`` with so many seconds, of which those count that it takes."""
        slice_s = min(self.left_s, _LOOK_S)
        since_s = time.monotonic()
        wait(slice_s)
        self.left_s = max(0.0, self.left_s - min(time.monotonic() - since_s, slice_s))


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
