"""Contract for files and directories: every operation that everstep uses.

Paths are pure (``PurePath``): they name files and never access them. Every method raises
``OSError`` with the errno of the operating system; callers turn it into :mod:`everstep.errors` with
step, rank and hint.

Durability, as assumed here and by the crash simulator of the tests (``tests/crash/sim``): bytes are
durable after :meth:`WriteFile.sync`; a *name* (created, renamed, linked or removed) is durable only
after :meth:`FileSystem.sync_dir` of its directory. Until then any subset may survive a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, Protocol

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
