"""The contract for files and directories: all that everstep asks of a file system.

Paths are pure (``PurePath``): they name, they do not touch. Every method raises ``OSError``
with the errno that the operating system gave; the callers above turn those into
:mod:`everstep.errors` with step, rank and hint.

What durability means here, and what the crash simulator of the tests (``tests/crash/sim``)
assumes: bytes are durable after :meth:`WriteFile.sync`; a *name* (created, renamed, linked
or removed) is durable only after :meth:`FileSystem.sync_dir` of its directory. Until then
any subset may survive a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, Protocol

__all__ = ["DIRECT_ALIGNMENT_BYTES", "DirEntry", "FileSystem", "ReadFile", "WriteFile"]

DIRECT_ALIGNMENT_BYTES = 4096
"""Offsets, lengths and addresses that are multiples of this may bypass the page cache."""


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name in a directory; symbolic links are reported as such and never followed.

    Attributes:
        allocated_bytes: room taken on disk, which for a sparse file is less than ``size_bytes``.
        links: names that the file has.
        file: of a file with several names: the same number under each, and no other file's in the
            run folder.
    """

    name: str
    kind: Literal["file", "dir", "link", "other"]
    size_bytes: int
    allocated_bytes: int
    mtime_s: float
    links: int = 1
    file: int = 0


class ReadFile(Protocol):
    """A regular file opened for reading."""

    @property
    def size_bytes(self) -> int:
        """The file's size when it was opened."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills ``buffer`` from ``offset``; returns the bytes read, short only at the end."""
        ...

    def close(self) -> None: ...


class WriteFile(Protocol):
    """A regular file opened for positioned writing."""

    def write(self, data: memoryview, offset: int) -> None:
        """Writes all of ``data`` at ``offset``. Safe from several threads at once."""
        ...

    def reserve(self, size_bytes: int) -> None:
        """Takes room for so many bytes now, where the file system can: writing is then faster,
        and a full disk is noticed before. The file may be longer afterwards.

        Raises:
            OSError: ENOSPC or EDQUOT: there is no such room; nothing of it is taken.
        """
        ...

    def truncate(self, size_bytes: int) -> None: ...

    def sync(self) -> None:
        """Returns when the bytes (not the name) are durable."""
        ...

    def close(self) -> None: ...


class FileSystem(Protocol):
    """Files and directories, private by default: directories 0700, files 0600."""

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        """Creates a file that must not exist yet.

        Args:
            direct: bypass the page cache for aligned writes where the file system can.
        """
        ...

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        """Opens an existing file for overwriting if nobody else can be looking at it.

        Returns None, and changes nothing, when any other process (or this one) has it open
        or mapped, when it has other hard links, or when that cannot be determined.
        """
        ...

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        """Opens a regular file for reading; refuses symbolic links (ELOOP) and the rest."""
        ...

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Renames atomically, replacing ``target``."""
        ...

    def link(self, source: PurePath, target: PurePath) -> None:
        """Gives a file a second name; FileExistsError if ``target`` exists."""
        ...

    def unlink(self, path: PurePath) -> None: ...

    def make_dir(self, path: PurePath) -> None:
        """Makes one directory; FileExistsError if there is something of that name."""
        ...

    def remove_dir(self, path: PurePath) -> None:
        """Removes an empty directory."""
        ...

    def sync_dir(self, path: PurePath) -> None:
        """Returns when the names in the directory are durable."""
        ...

    def scan(self, path: PurePath) -> list[DirEntry]:
        """The names in a directory, sorted; FileNotFoundError if it is not there."""
        ...

    def free_bytes(self, path: PurePath) -> int:
        """Bytes that this user may still write on the file system of ``path``."""
        ...
