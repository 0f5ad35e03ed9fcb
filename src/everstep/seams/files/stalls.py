"""Detect storage that hangs: time out when no operation has completed for too long.

A thread cannot be interrupted in a system call that never returns. Callers that wait for its result
watch here if any operation completes meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, cast

from everstep.seams.clock import RunningTime
from everstep.seams.files.filesystem import FileSystem

# Well below the second that RunningTime counts at most between two reads.
_LOOK_AGAIN_S = 0.2
_OPENING = ("create", "reuse", "open")


class StallTimer:
    """Time since a progress value last changed.

    Args:
        timeout_s: duration without change that counts as a stall.
        now_s: clock of the time during which this process runs
            (:class:`~everstep.seams.clock.RunningTime`); None: a new one, which counts while it is
            read several times a second.
    """

    def __init__(self, timeout_s: float, now_s: Callable[[], float] | None = None) -> None:
        self.timeout_s = timeout_s
        self._now_s = now_s or RunningTime().now_s
        self._at: object = None
        self._since_s = self._now_s()

    def for_s(self, at: object) -> float:
        """Note the progress value ``at``; return the seconds since it last changed."""
        now_s = self._now_s()
        if at != self._at:
            self._at = at
            self._since_s = now_s
        return now_s - self._since_s

    def is_over(self, at: object) -> bool:
        """Note the progress value ``at``; return True if it has not changed for ``timeout_s``."""
        return self.for_s(at) > self.timeout_s

    @property
    def poll_s(self) -> float:
        """Maximum time to wait before the next check."""
        return min(_LOOK_AGAIN_S, self.timeout_s)


def wait_while_active(
    future: Future[Any],
    timeout_s: float,
    moves: Callable[[], object],
    *,
    alive: Callable[[], None] = lambda: None,
) -> bool:
    """Wait until ``future`` is done, as long as there is progress.

    Args:
        future: result to wait for.
        timeout_s: maximum time without progress.
        moves: returns a value that changes with any progress.
        alive: called at each check before the timeout.

    Returns:
        True if the future is done, with a result or an exception; False if nothing has progressed
            for ``timeout_s``.
    """
    still = StallTimer(timeout_s)
    still.for_s(moves())
    while not future.done():
        with contextlib.suppress(FutureTimeout, CancelledError):
            # exception() waits like result(), and leaves it to the caller to raise the error.
            future.exception(still.poll_s)
        if not future.done() and still.is_over(moves()):
            return False
        alive()
    return True


def observed(filesystem: FileSystem, moved: Callable[[], None]) -> FileSystem:
    """Return a file system that forwards all operations and reports each that has returned.

    Args:
        filesystem: performs the operations.
        moved: called after each operation, in the thread that called it.
    """
    return cast("FileSystem", _Observed(filesystem, moved))


class _Observed:
    """A file system, or a file that it has opened."""

    def __init__(self, inner: Any, moved: Callable[[], None]) -> None:
        self._inner = inner
        self._moved = moved

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._inner, name)
        if not callable(operation):
            return operation

        def observed_operation(*args: Any, **named: Any) -> Any:
            try:
                found = operation(*args, **named)
            # A failed operation has returned as well.
            finally:
                self._moved()
            opened = name in _OPENING and found is not None
            return _Observed(found, self._moved) if opened else found

        return observed_operation
