"""The disk tier: durable files in a directory, and errors in words.

The order is always the same: temporary name, bytes, sync, rename, sync of the directory.
Only then has anything happened.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import PurePath

from everstep.errors import OutOfSpaceError, PermissionDeniedError, StorageError
from everstep.format.names import TEMPORARY_SUFFIX, parse_timeline
from everstep.seams.files.filesystem import FileSystem, WriteFile
from everstep.seams.machine import first_missing

__all__ = [
    "create_exclusive",
    "create_in",
    "ensure_dir",
    "ensure_dirs",
    "remove_if_there",
    "storage_errors",
    "temporary",
    "write_durably",
]

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_ATTEMPTS = 8
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_HINTS = {
    errno.ENOTDIR: "a file is where a directory should be: choose another path, or move the file",
    errno.ENOENT: "it was deleted or moved while it was in use, or unmounted, or nothing can be "
    "made here: put it back, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "symbolic links on the way lead in a circle: choose another path",
}


def temporary(path: PurePath) -> PurePath:
    """The name that a file has until it is whole."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


@contextlib.contextmanager
def storage_errors(
    what: str, path: PurePath, *, step: int | None = None, rank: int | None = None
) -> Iterator[None]:
    """Turns an ``OSError`` in the block into the :class:`StorageError` that says what to do.

    Args:
        what: what was being done, e.g. ``"write the base"``.
    """
    try:
        yield
    except OSError as error:
        kind: type[StorageError] = StorageError
        hint = "look at the disk or the network file system (dmesg, df, mount)"
        if error.errno in _NO_SPACE:
            kind = OutOfSpaceError
            hint = "free some space, or keep fewer bases (keep=, everstep rm)"
            if error.errno == errno.EFBIG:
                hint = (
                    "a limit of the size of files is met: raise it (ulimit -f); a keeper that "
                    "lives has the old one, and everstep stop ends it"
                )
        elif error.errno in _NO_PERMISSION:
            kind = PermissionDeniedError
            hint = "choose a directory that this user may write"
            if error.errno == errno.EROFS:
                hint = (
                    "the file system is read-only, since an error perhaps (dmesg, mount): make it "
                    f"writable again, or {hint}"
                )
        elif error.errno in _HINTS:
            hint = _HINTS[error.errno]
        reason = error.strerror or str(error)
        if error.errno == errno.ENOENT:
            reason += _what_is_missing(path)
        raise kind(
            f"could not {what}: {reason}", step=step, rank=rank, tier="disk", path=path, hint=hint
        ) from error


def _what_is_missing(path: PurePath) -> str:
    """What on the way to ``path`` is gone, that of which somebody has to see to it."""
    gone = first_missing(path)
    if gone is None:
        return ""
    inside = path.relative_to(gone).parts
    if inside and parse_timeline(inside[0]) is not None:
        return f": the run folder {gone} is gone"
    return f": {gone} leads nowhere"


def write_durably(
    filesystem: FileSystem, path: PurePath, data: bytes, *, may_go: bool = False
) -> None:
    """Writes a small file so that it is there whole, or not at all, after any crash.

    Args:
        may_go: as soon as it is there somebody may delete it, and its directory.
    """
    staged = temporary(path)
    _write_new(filesystem, staged, data)
    filesystem.rename(staged, path)
    try:
        filesystem.sync_dir(path.parent)
    except FileNotFoundError:
        if not may_go:
            raise


def create_in(filesystem: FileSystem, path: PurePath, *, direct: bool = False) -> WriteFile:
    """Makes an empty file, and its directory, which others remove wherever they find it empty; a
    file of that name, left by a process that died, makes room."""
    for left in reversed(range(_ATTEMPTS)):
        ensure_dir(filesystem, path.parent)
        remove_if_there(filesystem, path)
        try:
            return filesystem.create(path, direct=direct)
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError


def create_exclusive(filesystem: FileSystem, path: PurePath, data: bytes, unique: str) -> bool:
    """Writes a small file durably, unless there is one already.

    Args:
        unique: makes the temporary name this process's own.

    Returns:
        False, having changed nothing, when somebody else was first.
    """
    staged = path.with_name(f"{path.name}.{unique}{TEMPORARY_SUFFIX}")
    try:
        _write_and_link(filesystem, staged, path, data)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No hard links here: an exclusive create is the next best; if this process dies
        # within it, recovery sees a torn record and passes over it.
        try:
            _write_new(filesystem, path, data, replace=False)
        except FileExistsError:
            return False
    finally:
        remove_if_there(filesystem, staged)
    filesystem.sync_dir(path.parent)
    return True


def _write_and_link(filesystem: FileSystem, staged: PurePath, path: PurePath, data: bytes) -> None:
    """Another process that cleans up may take the staged file for a leftover: once more, then."""
    for left in reversed(range(_ATTEMPTS)):
        _write_new(filesystem, staged, data)
        try:
            filesystem.link(staged, path)
            return
        except FileNotFoundError:
            if not left:
                raise


def ensure_dir(filesystem: FileSystem, path: PurePath) -> None:
    """Makes a directory if it is not there, and its name durable either way.

    Raises:
        OSError: a link is in its place: what it leads to is nobody's, and no reader follows it.
    """
    try:
        filesystem.make_dir(path)
    except FileExistsError:
        kinds = {item.name: item.kind for item in filesystem.scan(path.parent)}
        if kinds.get(path.name) == "link":
            why = "it is a link, and links are not followed"
            raise OSError(errno.ELOOP, why, str(path)) from None
    filesystem.sync_dir(path.parent)


def ensure_dirs(filesystem: FileSystem, path: PurePath) -> None:
    """Makes a directory and those above it that are not there, durably."""
    try:
        filesystem.make_dir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        ensure_dirs(filesystem, path.parent)
        with contextlib.suppress(FileExistsError):  # by another process, in this moment
            filesystem.make_dir(path)
    filesystem.sync_dir(path.parent)


def remove_if_there(filesystem: FileSystem, path: PurePath) -> None:
    """Removes a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        filesystem.unlink(path)


def _write_new(
    filesystem: FileSystem, path: PurePath, data: bytes, *, replace: bool = True
) -> None:
    if replace:
        remove_if_there(filesystem, path)
    file = filesystem.create(path)
    try:
        file.write(memoryview(data), 0)
        file.sync()
    finally:
        file.close()
