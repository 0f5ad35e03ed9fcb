"""A directory as a tier: one file per object.

The directory may be local or on a network file system that all nodes see.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import TypeVar

from everstep.format.names import TEMPORARY_SUFFIX
from everstep.seams import DirEntry, FileSystem, ReadFile
from everstep.tiers.contract import Item, ReadThrough, Traits, check_name, pieces_of
from everstep.tiers.durable_files import (
    create_exclusive,
    ensure_dirs,
    remove_if_there,
    storage_errors,
    sync_if_allowed,
)

_T = TypeVar("_T")
_ATTEMPTS = 8
_PIECE_BYTES = 4 << 20
# ENOTDIR: a file has the name of one of the folders, so there is no such object either.
_MISSING = (errno.ENOENT, errno.ENOTDIR)


class DiskTier:
    """Objects as files in a directory, which is created with the first object.

    Args:
        root: the directory. Other files in it are ignored; links are not followed.
    """

    traits = Traits("disk", 2)

    def __init__(self, filesystem: FileSystem, root: PurePath) -> None:
        self._filesystem = filesystem
        self._root = root
        self._made: set[PurePath] = set()
        self._making = threading.Lock()

    @property
    def url(self) -> str:
        return str(self._root)

    def put(self, name: str, source: ReadFile) -> None:
        path = self._path(name)
        with storage_errors(f"write {name}", path):
            self._in_folder(path.parent, lambda: self._put(path, source))

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with storage_errors(f"create {name}", path):
            unique = _unique()
            if self._in_folder(
                path.parent, lambda: create_exclusive(self._filesystem, path, data, unique)
            ):
                return True
            # The name is taken. A repeated call must succeed if its own bytes are there: an earlier
            # attempt may have created the file and failed afterwards.
            file = self._filesystem.open(path)
            try:
                if file.size_bytes != len(data):
                    return False
                there = bytearray(len(data))
                same = file.read_into(memoryview(there), 0) == len(data) and there == data
            finally:
                file.close()
            if same:
                # Perhaps written by an attempt of this process that failed before its sync.
                self._filesystem.sync_dir(path.parent)
            return same

    def open(self, name: str) -> ReadFile:
        path = self._path(name)
        # storage_errors() turns FileNotFoundError into StorageError; _missing() reverts this,
        # because a missing object is no failure of the tier.
        with _missing(path), storage_errors(f"open {name}", path):
            file = self._filesystem.open(path, direct=True)
        return ReadThrough(file, storage_errors("read", path)(file.read_into))

    def scan(self, prefix: str = "") -> list[Item]:
        if prefix:
            check_name(prefix)
        path = self._root / prefix
        with storage_errors("list", path):
            found = self._scan(path)
            # Links are left out below: their targets may lie outside of the tier.
            under = f"{prefix}/" if prefix else ""
            return sorted(
                Item(
                    under + entry.name,
                    entry.size_bytes if entry.kind == "file" else None,
                    entry.mtime_s if entry.kind == "file" else 0.0,
                )
                for entry in found
                if entry.kind in ("file", "dir")
            )

    def delete(self, name: str) -> None:
        path = self._path(name)
        with storage_errors(f"delete {name}", path):
            try:
                # Synced: otherwise the object could be back after a power loss, although delete()
                # has returned.
                self._filesystem.unlink(path)
                self._filesystem.sync_dir(path.parent)
            except OSError as error:
                # Already deleted; the folder as well if another rank deleted its last file.
                if error.errno in _MISSING:
                    return
                raise
            self._remove_empty(path.parent)

    def sweep(self, prefix: str) -> None:
        check_name(prefix)
        folder = self._root / prefix
        with storage_errors(f"clean up {prefix}", folder), _suppressed_missing():
            for entry in self._filesystem.scan(folder):
                if entry.kind == "file" and entry.name.endswith(TEMPORARY_SUFFIX):
                    remove_if_there(self._filesystem, folder / entry.name)
            self._remove_empty(folder)

    def check(self) -> None:
        """Check that the directory, or the parent it will be created in, can be listed."""
        with storage_errors("read", self._root):
            self._scan(self._root)

    def refresh(self) -> None:
        """Forget which folders exist; there are no credentials."""
        with self._making:
            self._made.clear()

    def close(self) -> None:
        """Do nothing: nothing is held open."""

    def _remove_empty(self, folder: PurePath) -> None:
        """Remove a folder and its parents up to the root, as long as they are empty."""
        # Fails if a folder is not empty, or may not be removed by this user.
        with contextlib.suppress(OSError):
            # A process that is about to write in the folder creates it again (_in_folder).
            for one in [folder, *folder.parents]:
                if one == self._root:
                    break
                self._filesystem.remove_dir(one)

    def _path(self, name: str) -> PurePath:
        check_name(name)
        return self._root / name

    def _in_folder(self, folder: PurePath, write: Callable[[], _T]) -> _T:
        """Create a folder, then write in it; repeat if the folder was removed in between.

        A process that deletes the last object of a folder removes the folder.
        """
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._make(folder)
                return write()
            except FileNotFoundError:
                if not left:
                    raise
                # All folders are checked again: a parent may have been removed as well.
                self.refresh()
        raise AssertionError("unreachable")

    def _make(self, folder: PurePath) -> None:
        """Create a folder durably, once."""
        # One thread at a time: another must not write before the folder is durable.
        with self._making:
            if folder not in self._made:
                ensure_dirs(self._filesystem, folder)
                # Up to the name of the root itself, which may have been created by this call, too.
                for made in [folder, *folder.parents]:
                    if made == self._root.parent:
                        break
                    # The process that created it may have crashed before this sync.
                    sync_if_allowed(self._filesystem, made.parent)
                    self._made.add(made)

    def _put(self, path: PurePath, source: ReadFile) -> None:
        # Unique: processes that write the same name at the same time must not share a temporary
        # file.
        staged = path.with_name(f"{path.name}.{_unique()}{TEMPORARY_SUFFIX}")
        try:
            # Synced before the rename: the name never refers to incomplete bytes.
            self._write(staged, source)
            self._filesystem.rename(staged, path)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_if_there(self._filesystem, staged)
            raise
        # Until then a power loss may undo the rename.
        self._filesystem.sync_dir(path.parent)

    def _write(self, path: PurePath, source: ReadFile) -> None:
        file = self._filesystem.create(path, direct=True)
        try:
            # A full disk is noticed here, before any byte is written.
            if source.size_bytes:
                file.reserve(source.size_bytes)
            at = 0
            for piece in pieces_of(source, str(path), _PIECE_BYTES):
                file.write(piece, at)
                at += piece.nbytes
            # Reserving space may have made the file longer.
            file.truncate(source.size_bytes)
            file.sync()
        finally:
            file.close()

    def _scan(self, path: PurePath) -> list[DirEntry]:
        """Return directory entries, without incomplete files."""
        try:
            found = self._filesystem.scan(path)
        except OSError as error:
            if error.errno in _MISSING:
                return []
            raise
        return [entry for entry in found if not entry.name.endswith(TEMPORARY_SUFFIX)]


def _unique() -> str:
    # Process ids are not unique among containers that share storage.
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def _suppressed_missing() -> Iterator[None]:
    """Ignore a missing directory."""
    try:
        yield
    except OSError as error:
        if error.errno not in _MISSING:
            raise


@contextlib.contextmanager
def _missing(path: PurePath) -> Iterator[None]:
    """Turn the error of ``storage_errors`` for a missing object back into ``FileNotFoundError``."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__
        # EISDIR, EINVAL: the name is a directory or a special file, which is no object.
        if isinstance(cause, OSError) and cause.errno in (*_MISSING, errno.EISDIR, errno.EINVAL):
            raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from None
        raise
