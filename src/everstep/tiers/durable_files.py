"""Small durable files on disk, and operating system errors turned into everstep's errors.

The order is always: write under a temporary name, sync, rename, sync the directory. A file exists
durably only after the last of these.
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

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_ATTEMPTS = 8
# Errors of link() on a file system without hard links. Linux documents EPERM (link(2)).
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_HINTS = {
    errno.ENOTDIR: "a file is in the place of a directory: choose another path, or move the file",
    errno.ENOENT: "it was deleted, moved or unmounted while in use, or nothing can be created "
    "here: put it back, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "the path contains a symbolic link that is not followed, or a cycle of links: "
    "choose another path",
}


def temporary(path: PurePath) -> PurePath:
    """Return the name of a file while it is incomplete."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


@contextlib.contextmanager
def storage_errors(
    what: str, path: PurePath, *, step: int | None = None, rank: int | None = None
) -> Iterator[None]:
    """Turn an ``OSError`` in the block into a :class:`StorageError` with a hint.

    Args:
        what: the action for the message, e.g. ``"write the base"``.
    """
    try:
        yield
    except OSError as error:
        kind: type[StorageError] = StorageError
        hint = "check the disk or the network file system (dmesg, df, mount)"
        if error.errno in _NO_SPACE:
            kind = OutOfSpaceError
            hint = "free some space, or keep fewer bases (keep=, everstep rm)"
            if error.errno == errno.EFBIG:
                hint = (
                    "the limit for file sizes is reached: raise it (ulimit -f); a running keeper "
                    "has the old limit, so stop it (everstep stop)"
                )
        elif error.errno in _NO_PERMISSION:
            kind = PermissionDeniedError
            hint = "choose a directory that this user may write to"
            if error.errno == errno.EROFS:
                hint = (
                    "the file system is read-only, perhaps after an error (dmesg, mount): make it "
                    f"writable again, or {hint}"
                )
        elif error.errno in _HINTS:
            hint = _HINTS[error.errno]
        reason = error.strerror or str(error)
        if error.errno == errno.ENOENT:
            reason += _missing_directory(path)
        raise kind(
            f"could not {what}: {reason}", step=step, rank=rank, tier="disk", path=path, hint=hint
        ) from error


def _missing_directory(path: PurePath) -> str:
    """Name the first missing directory on the way to ``path``."""
    missing = first_missing(path)
    if missing is None:
        return ""
    inside = path.relative_to(missing).parts
    # Directories of the run folder itself are everstep's to create; the folder is the user's.
    if inside and parse_timeline(inside[0]) is not None:
        return f": the run folder {missing} does not exist any more"
    return f": {missing} does not exist"


def write_durably(
    filesystem: FileSystem, path: PurePath, data: bytes, *, may_go: bool = False
) -> None:
    """Write a small file so that after any crash it is complete, or absent.

    Args:
        may_go: True: another process may delete the file and its directory as soon as it exists.
    """
    # The same name for each attempt: only one process writes this file, and _write_new() replaces
    # what a crash has left.
    staged = temporary(path)
    _write_new(filesystem, staged, data)
    # The bytes are synced: a crash after the rename cannot leave an empty or short file.
    filesystem.rename(staged, path)
    # Until the directory is synced, a power loss may undo the rename.
    try:
        filesystem.sync_dir(path.parent)
    except FileNotFoundError:
        # The directory was deleted together with the file: no name is left to make durable.
        if not may_go:
            raise


def create_in(filesystem: FileSystem, path: PurePath) -> WriteFile:
    """Create an empty file and its directory; replace a file of that name left by a crashed
    process.

    Other processes remove the directory whenever they find it empty, so this is retried.
    """
    for left in reversed(range(_ATTEMPTS)):
        ensure_dir(filesystem, path.parent)
        remove_if_there(filesystem, path)
        try:
            return filesystem.create(path, direct=True)
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError


def create_exclusive(filesystem: FileSystem, path: PurePath, data: bytes, unique: str) -> bool:
    """Write a small file durably if there is none.

    Args:
        unique: makes the temporary name unique to this process.

    Returns:
        False if another process was first; nothing was changed.
    """
    staged = path.with_name(f"{path.name}.{unique}{TEMPORARY_SUFFIX}")
    try:
        # link() fails if the name exists, unlike rename(): of several processes exactly one wins,
        # with a complete file.
        _write_and_link(filesystem, staged, path, data)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without hard links: create the file exclusively. If this process dies
        # before it is complete, recovery finds a torn record and ignores it.
        try:
            _write_new(filesystem, path, data, replace=False)
        except FileExistsError:
            return False
    finally:
        # Only the temporary name is removed: after link() the file has two names.
        remove_if_there(filesystem, staged)
    # The winner may report success only when the name is durable.
    filesystem.sync_dir(path.parent)
    return True


def _write_and_link(filesystem: FileSystem, staged: PurePath, path: PurePath, data: bytes) -> None:
    """Write the staged file and link it; retry if a process that cleans up has deleted it as a
    leftover.
    """
    for left in reversed(range(_ATTEMPTS)):
        _write_new(filesystem, staged, data)
        try:
            filesystem.link(staged, path)
            return
        except FileNotFoundError:
            if not left:
                raise


def ensure_dir(filesystem: FileSystem, path: PurePath) -> None:
    """Create a directory if it is missing; make its name durable in any case.

    Raises:
        OSError: there is a link instead; links are not followed.
    """
    try:
        filesystem.make_dir(path)
    except FileExistsError:
        # EEXIST is reported for a link as well, and everything below would be written to its
        # target.
        kinds = {item.name: item.kind for item in filesystem.scan(path.parent)}
        if kinds.get(path.name) == "link":
            reason = "it is a link, and links are not followed"
            raise OSError(errno.ELOOP, reason, str(path)) from None
    # Also if it existed: its creator may have crashed before this sync.
    filesystem.sync_dir(path.parent)


def ensure_dirs(filesystem: FileSystem, path: PurePath) -> None:
    """Create a directory and its missing parents, durably."""
    try:
        filesystem.make_dir(path)
    except FileExistsError:
        # Not synced, although its creator may have crashed before its sync: callers that need the
        # name to be durable sync it themselves.
        return
    except FileNotFoundError:
        ensure_dirs(filesystem, path.parent)
        # Another process may have created it in the meantime.
        with contextlib.suppress(FileExistsError):
            filesystem.make_dir(path)
    filesystem.sync_dir(path.parent)


def sync_if_allowed(filesystem: FileSystem, directory: PurePath) -> None:
    """Sync a directory, unless it belongs to another user and cannot be opened: the durability of
    its names is up to its owner then."""
    with contextlib.suppress(PermissionError):
        filesystem.sync_dir(directory)


def remove_if_there(filesystem: FileSystem, path: PurePath) -> None:
    """Delete a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        filesystem.unlink(path)


def _write_new(
    filesystem: FileSystem, path: PurePath, data: bytes, *, replace: bool = True
) -> None:
    if replace:
        remove_if_there(filesystem, path)
    # Created exclusively. Without `replace` this decides which of several processes writes.
    file = filesystem.create(path)
    try:
        file.write(memoryview(data), 0)
        # Before any rename or link: these make the file visible under its final name.
        file.sync()
    finally:
        file.close()
