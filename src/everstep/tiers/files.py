"""A tier as a file system to read from: what reads runs in directories reads them there, too."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import PurePath
from typing import NoReturn

from everstep.errors import (
    DeadlineError,
    EverstepError,
    OptionError,
    PermissionDeniedError,
)
from everstep.seams.files.filesystem import DirEntry, ReadFile, WriteFile
from everstep.tiers.contract import Item, Tier

__all__ = ["ReadingFileSystem", "TierFileSystem"]


class ReadingFileSystem:
    """The half of :class:`everstep.seams.files.filesystem.FileSystem` that writes: each raises
    EROFS."""

    def free_bytes(self, path: PurePath) -> int:
        """Nothing can be written here."""
        return 0

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        _refuse(path)

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        return None

    def rename(self, source: PurePath, target: PurePath) -> None:
        _refuse(source)

    def link(self, source: PurePath, target: PurePath) -> None:
        _refuse(target)

    def unlink(self, path: PurePath) -> None:
        _refuse(path)

    def make_dir(self, path: PurePath) -> None:
        _refuse(path)

    def remove_dir(self, path: PurePath) -> None:
        _refuse(path)

    def sync_dir(self, path: PurePath) -> None:
        """Everything that can be seen is durable."""


class TierFileSystem(ReadingFileSystem):
    """Implements the reading half of :class:`everstep.seams.files.filesystem.FileSystem` on a tier.

    Errors are the ``OSError`` that a file system would raise, with the tier's own words; whatever
    would write raises EROFS.

    Args:
        root: the path that stands for the tier's root.
    """

    def __init__(self, tier: Tier, root: PurePath) -> None:
        self._tier = tier
        self._root = root

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        with _system_errors(path):
            return _File(self._tier.open(self._name(path)), path)

    def scan(self, path: PurePath) -> list[DirEntry]:
        """Nothing under a name is an empty folder: stores have no others."""
        name = self._name(path)
        with _system_errors(path):
            return [_entry(item) for item in self._tier.scan(name)]

    def _name(self, path: PurePath) -> str:
        name = path.relative_to(self._root).as_posix()
        return "" if name == "." else name


class _File:
    def __init__(self, file: ReadFile, path: PurePath) -> None:
        self._file = file
        self._path = path

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        with _system_errors(self._path):
            return self._file.read_into(buffer, offset)

    def close(self) -> None:
        self._file.close()


def _entry(item: Item) -> DirEntry:
    name = item.name.rpartition("/")[2]
    if item.size_bytes is None:
        return DirEntry(name, "dir", 0, 0, 0.0)
    return DirEntry(name, "file", item.size_bytes, item.size_bytes, item.modified_s)


@contextlib.contextmanager
def _system_errors(path: PurePath) -> Iterator[None]:
    try:
        yield
    except OptionError:  # a name that no tier has
        raise FileNotFoundError(errno.ENOENT, "there is nothing of that name", str(path)) from None
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except EverstepError as error:
        number = errno.EIO
        if isinstance(error, PermissionDeniedError):
            number = errno.EACCES
        elif isinstance(error, DeadlineError):
            number = errno.ETIMEDOUT
        raise OSError(number, error.message, str(path)) from error


def _refuse(path: PurePath) -> NoReturn:
    raise OSError(errno.EROFS, "a copy in a store is only read here", str(path))
