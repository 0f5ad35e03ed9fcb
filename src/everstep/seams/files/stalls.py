"""What tells a storage that is slow from one that hangs: whether its operations come back.

No thread can be got out of an operation that never returns. Whoever waits for what it is part of
looks here whether anything has moved meanwhile.
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
    """For how long something has not moved, as of the last look.

    Args:
        timeout_s: longer than that is too long.
        now_s: seconds that this process has run (:mod:`.running`); None: so far as it looks here,
            several times a second.
    """

    def __init__(self, timeout_s: float, now_s: Callable[[], float] | None = None) -> None:
        self.timeout_s = timeout_s
        self._now_s = now_s or RunningTime().now_s
        self._at: object = None
        self._since_s = self._now_s()

    def for_s(self, at: object) -> float:
        """It is ``at`` that now."""
        now_s = self._now_s()
        if at != self._at:
            self._at = at
            self._since_s = now_s
        return now_s - self._since_s

    def is_over(self, at: object) -> bool:
        """Likewise: whether it was there for too long."""
        return self.for_s(at) > self.timeout_s

    @property
    def poll_s(self) -> float:
        """How long to wait at most before the next look."""
        return min(_LOOK_AGAIN_S, self.timeout_s)


def wait_while_active(
    future: Future[Any],
    timeout_s: float,
    moves: Callable[[], object],
    *,
    now_s: Callable[[], float] | None = None,
    alive: Callable[[], None] = lambda: None,
) -> bool:
    """Whether ``future`` has ended, well or badly, for which is waited as long as anything moves;
    False: nothing has for ``timeout_s``.

    Args:
        moves: changes with whatever moves.
        alive: called at each look, as long as that is not too long ago.
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
    """Passes everything on, and tells of each operation that has come back.

    Args:
        moved: told of it, in the thread that has asked for the operation.
    """

    def __init__(self, filesystem: FileSystem, moved: Callable[[], None]) -> None:
        self._inner = filesystem
        self._moved = moved

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        return _Written(self._do(self._inner.create, path, direct=direct), self._moved)

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        file = self._do(self._inner.reuse, path, direct=direct)
        return None if file is None else _Written(file, self._moved)

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        return _Read(self._do(self._inner.open, path, direct=direct), self._moved)

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
        return _told(self._moved, function, *args, **named)


class _Written:
    def __init__(self, file: WriteFile, moved: Callable[[], None]) -> None:
        self._file = file
        self._moved = moved

    def write(self, data: memoryview, offset: int) -> None:
        _told(self._moved, self._file.write, data, offset)

    def reserve(self, size_bytes: int) -> None:
        _told(self._moved, self._file.reserve, size_bytes)

    def truncate(self, size_bytes: int) -> None:
        _told(self._moved, self._file.truncate, size_bytes)

    def sync(self) -> None:
        _told(self._moved, self._file.sync)

    def close(self) -> None:
        _told(self._moved, self._file.close)


class _Read:
    def __init__(self, file: ReadFile, moved: Callable[[], None]) -> None:
        self._file = file
        self._moved = moved

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return _told(self._moved, self._file.read_into, buffer, offset)

    def close(self) -> None:
        _told(self._moved, self._file.close)


def _told(
    moved: Callable[[], None], function: Callable[_P, _T], *args: _P.args, **named: _P.kwargs
) -> _T:
    try:
        return function(*args, **named)
    finally:  # one that has failed has come back, too
        moved()
