"""Time in which this process runs: what deadlines of progress are measured with.

Where all of it stands still (SIGSTOP, a frozen cgroup, a paused virtual machine), so does what it
waits for: by the machine's clock that would be late as soon as it goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Allowance", "RunningTime"]

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


class Allowance:
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
