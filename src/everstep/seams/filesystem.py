"""Contract for files and directories: every operation that everstep uses.

Paths are pure (``PurePath``): they name files and never access them. Every method raises
``OSError`` with the errno of the operating system; callers turn it into :mod:`everstep.errors` with
step, rank and hint.

Durability, as assumed here and by the crash simulator of the tests (``tests/crash/sim``): bytes are
durable after :meth:`WriteFile.sync`; a *name* (created, renamed, linked or removed) is durable only
after :meth:`FileSystem.sync_dir` of its directory. Until then any subset may survive a crash.

Detect storage that hangs: time out when no operation has completed for too long.

A thread cannot be interrupted in a system call that never returns. Callers that wait for its result
watch here if any operation completes meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Protocol, TypeVar, cast

from everstep.seams.clock import RunningTime

_Storage = TypeVar("_Storage")

DIRECT_ALIGNMENT_BYTES = 4096
"""Offsets, lengths and addresses that are multiples of this may bypass the page cache."""


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name in a directory; symbolic links are reported as such and never followed.

    Attributes:
        allocated_bytes: space taken on disk, less than ``size_bytes`` for a sparse file.
        links: number of names of the file.
        file: for a file with several names: a number equal under each of them and unique in the run
            folder.
    """

    name: str
    kind: Literal["file", "dir", "link", "other"]
    size_bytes: int
    allocated_bytes: int
    mtime_s: float
    links: int = 1
    file: int = 0


class ReadFile(Protocol):
    """Regular file opened for reading."""

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was opened."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset``; return the bytes read, fewer only at the end of the
        file.
        """
        ...

    def close(self) -> None: ...


class WriteFile(Protocol):
    """Regular file opened for positioned writing."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``. Thread-safe."""
        ...

    def reserve(self, size_bytes: int) -> None:
        """Allocate space for ``size_bytes`` now, if the file system supports it. Writing is then
        faster, and a full disk is noticed early. The file may be longer afterwards.

        Raises:
            OSError: ENOSPC or EDQUOT: not enough space; nothing stays allocated.
        """
        ...

    def truncate(self, size_bytes: int) -> None: ...

    def sync(self) -> None:
        """Return when the bytes (not the name) are durable."""
        ...

    def close(self) -> None: ...


class FileSystem(Protocol):
    """Files and directories, private by default: directories 0700, files 0600."""

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        """Create a file that must not exist yet.

        Args:
            path: path of the file.
            direct: bypass the page cache for aligned writes if the file system supports it.
        """
        ...

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        """Open an existing file for overwriting if no other process can be reading it.

        Return None, and change nothing, if any process (including this one) has it open or mapped,
        if it has other hard links, or if that cannot be determined.
        """
        ...

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        """Open a regular file for reading; refuse symbolic links (ELOOP) and special files."""
        ...

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Rename atomically, replacing ``target``."""
        ...

    def link(self, source: PurePath, target: PurePath) -> None:
        """Give a file a second name; FileExistsError if ``target`` exists."""
        ...

    def unlink(self, path: PurePath) -> None: ...

    def make_dir(self, path: PurePath) -> None:
        """Make one directory; FileExistsError if the name exists."""
        ...

    def remove_dir(self, path: PurePath) -> None:
        """Remove an empty directory."""
        ...

    def sync_dir(self, path: PurePath) -> None:
        """Return when the names in the directory are durable."""
        ...

    def scan(self, path: PurePath) -> list[DirEntry]:
        """Return the names in a directory, sorted; FileNotFoundError if it does not exist."""
        ...

    def free_bytes(self, path: PurePath) -> int:
        """Return the bytes that this user may still write on the file system of ``path``."""
        ...


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


def observed(storage: _Storage, moved: Callable[[], None]) -> _Storage:
    """Return a file system, a tier or a file that forwards all operations and reports each that has
    returned; also those of files that it opens.

    Args:
        storage: performs the operations.
        moved: called after each operation, in the thread that called it.
    """
    return cast("_Storage", _Observed(storage, moved))


class _Observed:
    """A file system or a tier, or a file that it has opened."""

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
            # A tier's create() returns no file.
            opened = name in _OPENING and hasattr(found, "close")
            return _Observed(found, self._moved) if opened else found

        return observed_operation
