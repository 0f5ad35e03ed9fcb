"""A tier as a file system for reading, so that code for run folders also reads copies."""

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
    StorageError,
)
from everstep.seams import DirEntry, ReadFile, WriteFile
from everstep.tiers.contract import Item, ReadThrough, Tier


class ReadingFileSystem:
    """The writing half of :class:`everstep.seams.filesystem.FileSystem`: all methods raise
    EROFS.
    """

    def free_bytes(self, path: PurePath) -> int:
        """Return 0: nothing can be written."""
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
        """Do nothing: everything that can be seen is durable."""


class TierFileSystem(ReadingFileSystem):
    """The reading half of :class:`everstep.seams.filesystem.FileSystem` on a tier.

    Errors are the ``OSError`` that a file system would raise, with the tier's message. Writing
    raises EROFS.

    Args:
        root: path that stands for the tier's root.
    """

    def __init__(self, tier: Tier, root: PurePath) -> None:
        self._tier = tier
        self._root = root

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        with _system_errors(path):
            file = self._tier.open(self._name(path))
        return ReadThrough(file, _system_errors(path)(file.read_into))

    def scan(self, path: PurePath) -> list[DirEntry]:
        """List a directory. A missing one is empty: object stores have no empty folders."""
        name = self._name(path)
        with _system_errors(path):
            return [_entry(item) for item in self._tier.scan(name)]

    def _name(self, path: PurePath) -> str:
        name = path.relative_to(self._root).as_posix()
        return "" if name == "." else name


def _entry(item: Item) -> DirEntry:
    name = item.name.rpartition("/")[2]
    if item.size_bytes is None:
        # Stores have no folders, so there is no time of change that a cache could compare.
        return DirEntry(name, "dir", 0, 0, 0.0)
    return DirEntry(name, "file", item.size_bytes, item.size_bytes, item.modified_s)


@contextlib.contextmanager
def _system_errors(path: PurePath) -> Iterator[None]:
    try:
        yield
    except OptionError:
        # Not a valid object name, so there cannot be such an object.
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from None
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except EverstepError as error:
        # Readers of files use errno and strerror only. The message of the tier becomes strerror;
        # callers that know tiers find the original error in __cause__.
        number = errno.EIO
        if isinstance(error, PermissionDeniedError):
            number = errno.EACCES
        elif isinstance(error, DeadlineError):
            number = errno.ETIMEDOUT
        raise OSError(number, error.message, str(path)) from error


@contextlib.contextmanager
def tier_errors(*passed: type[OSError]) -> Iterator[None]:
    """Turn file system errors that a tier's error caused into the tier's error again.

    Args:
        passed: errors that are no failure to read the tier, and are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, passed):
            raise
        if isinstance(error.__cause__, EverstepError):
            raise error.__cause__ from None
        raise StorageError(f"could not read a copy: {error}") from error


def _refuse(path: PurePath) -> NoReturn:
    raise OSError(errno.EROFS, "copies in a store are read-only here", str(path))
