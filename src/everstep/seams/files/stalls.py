"""Detect storage that hangs: time out when no operation has completed for too long.

A thread cannot be interrupted in a system call that never returns. Callers that wait for its result
watch here if any operation completes meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import PurePath
from typing import Any, ParamSpec, TypeVar

from everstep.seams.clock import RunningTime
from everstep.seams.files.filesystem import DirEntry, FileSystem, ReadFile, WriteFile

__all__ = ["ObservedFileSystem", "StallTimer", "wait_while_active"]

_LOOK_AGAIN_S = 0.2
_P = ParamSpec("_P")
_T = TypeVar("_T")


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
    now_s: Callable[[], float] | None = None,
    alive: Callable[[], None] = lambda: None,
) -> bool:
    """Wait until ``future`` is done, as long as there is progress.

    Args:
        future: result to wait for.
        timeout_s: maximum time without progress.
        moves: returns a value that changes with any progress.
        now_s: see :class:`StallTimer`.
        alive: called at each check before the timeout.

    Returns:
        True if the future is done, with a result or an exception; False if nothing has progressed
            for ``timeout_s``.
    """
    still = StallTimer(timeout_s, now_s)
    still.for_s(moves())
    while not future.done():
        with contextlib.suppress(FutureTimeout, CancelledError):
            future.exception(still.poll_s)
        if not future.done() and still.is_over(moves()):
            return False
        alive()
    return True


class ObservedFileSystem:
    """Forward all operations to a file system and report each that has returned.

    Args:
        filesystem: performs the operations.
        moved: called after each operation, in the thread that called it.
    """

    def __init__(self, filesystem: FileSystem, moved: Callable[[], None]) -> None:
        self._inner = filesystem
        self._moved = moved

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        return _ObservedWriteFile(self._do(self._inner.create, path, direct=direct), self._moved)

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        file = self._do(self._inner.reuse, path, direct=direct)
        return None if file is None else _ObservedWriteFile(file, self._moved)

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        return _ObservedReadFile(self._do(self._inner.open, path, direct=direct), self._moved)

    def rename(self, source: PurePath, target: PurePath) -> None:
        self._do(self._inner.rename, source, target)

    def link(self, source: PurePath, target: PurePath) -> None:
        self._do(self._inner.link, source, target)

    def unlink(self, path: PurePath) -> None:
        self._do(self._inner.unlink, path)

    def make_dir(self, path: PurePath) -> None:
        self._do(self._inner.make_dir, path)

    def remove_dir(self, path: PurePath) -> None:
        self._do(self._inner.remove_dir, path)

    def sync_dir(self, path: PurePath) -> None:
        self._do(self._inner.sync_dir, path)

    def scan(self, path: PurePath) -> list[DirEntry]:
        return self._do(self._inner.scan, path)

    def free_bytes(self, path: PurePath) -> int:
        return self._do(self._inner.free_bytes, path)

    def _do(self, function: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
        return _observed(self._moved, function, *args, **named)


class _ObservedWriteFile:
    def __init__(self, file: WriteFile, moved: Callable[[], None]) -> None:
        self._file = file
        self._moved = moved

    def write(self, data: memoryview, offset: int) -> None:
        _observed(self._moved, self._file.write, data, offset)

    def reserve(self, size_bytes: int) -> None:
        _observed(self._moved, self._file.reserve, size_bytes)

    def truncate(self, size_bytes: int) -> None:
        _observed(self._moved, self._file.truncate, size_bytes)

    def sync(self) -> None:
        _observed(self._moved, self._file.sync)

    def close(self) -> None:
        _observed(self._moved, self._file.close)


class _ObservedReadFile:
    def __init__(self, file: ReadFile, moved: Callable[[], None]) -> None:
        self._file = file
        self._moved = moved

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return _observed(self._moved, self._file.read_into, buffer, offset)

    def close(self) -> None:
        _observed(self._moved, self._file.close)


def _observed(
    moved: Callable[[], None], function: Callable[_P, _T], *args: _P.args, **named: _P.kwargs
) -> _T:
    try:
        return function(*args, **named)
    # A failed operation has returned as well.
    finally:
        moved()
