"""Files that are locked while their owner lives: ``flock``, which ends with the process.

The lock belongs to the file, not to its name. Whoever deletes such a file holds the lock,
and whoever has got the lock looks whether the name still leads to the file: so two
processes never hold "the same" lock on two files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable
from pathlib import PurePath

try:
    import fcntl
except ImportError:  # not a POSIX system; the command line says so before anything else
    fcntl = None  # type: ignore[assignment]

__all__ = ["LockedFile", "file_identity", "lock_file", "same_file", "try_lock"]

_LOOK_AGAIN_S = 0.01
_REPLACED_MAX = 100
_WOULD_BLOCK = (errno.EAGAIN, errno.EACCES)


class LockedFile:
    """A regular file that this process holds locked. Made by :func:`lock_file`.

    Attributes:
        fd: its descriptor, close-on-exec.
        identity: device and inode: tells the file from others of the same name.
    """

    def __init__(self, path: PurePath, fd: int) -> None:
        info = os.fstat(fd)
        self.path = path
        self.fd = fd
        self.identity = (info.st_dev, info.st_ino)

    @property
    def is_current(self) -> bool:
        """Whether the name still leads to this file."""
        return file_identity(self.path) == self.identity

    def replace(self, data: bytes) -> None:
        """Makes ``data`` all of the contents."""
        os.ftruncate(self.fd, 0)
        while data:
            data = data[os.write(self.fd, data) :]

    def share(self, timeout_s: float) -> bool:
        """Turns the lock into a shared one; False if that took too long, or the name is gone.

        The kernel gives the old lock up first: in between another process may come and go.
        """
        return _lock(self.fd, True, time.monotonic() + timeout_s) and self.is_current

    def put_at(self, fds: Iterable[int]) -> None:
        """From now on ``fds`` (1 and 2, say) lead here, and hold the lock; closes this object."""
        for fd in fds:
            os.dup2(self.fd, fd)
        self.close()

    def unlink(self) -> None:
        """Removes the name, if it leads here."""
        if self.is_current:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def release(self) -> None:
        """Unlocks and closes, also for forked children that have inherited the descriptor."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Closes only: a process that was given the descriptor goes on holding the lock."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            os.close(fd)


def lock_file(
    path: PurePath, *, shared: bool = False, create: bool = True, timeout_s: float = 0.0
) -> LockedFile | None:
    """Locks the file at ``path``; None when somebody else holds it until ``timeout_s``.

    Writes through the descriptor go to the end of the file.

    Args:
        shared: a lock that several processes can hold together.
        create: make the file, 0600, if it is not there.

    Raises:
        OSError: FileNotFoundError without ``create``; ELOOP for a symbolic link.
    """
    deadline_s = time.monotonic() + timeout_s
    for _ in range(_REPLACED_MAX):
        fd = _open(path, create)
        try:
            if not _lock(fd, shared, deadline_s):
                os.close(fd)
                return None
            if file_identity(path) == _identity(os.fstat(fd)):
                return LockedFile(path, fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # deleted, or replaced by another, before we had the lock
    raise OSError(errno.EBUSY, "the file is replaced again and again", os.fspath(path))


def file_identity(path: PurePath) -> tuple[int, int] | None:
    """Device and inode of what ``path`` leads to, links not followed; None if nothing is there."""
    try:
        return _identity(os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return None


def same_file(fd: int, path: PurePath) -> bool:
    """Whether ``path`` leads to the file that ``fd`` has open."""
    try:
        return _identity(os.fstat(fd)) == file_identity(path)
    except OSError:  # no such descriptor
        return False


def try_lock(fd: int) -> bool:
    """Whether nobody else has a lock on the file that ``fd`` has open; takes it if so."""
    try:
        return _lock(fd, False, 0.0)
    except OSError:
        return False


def _open(path: PurePath, create: bool) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return fd


def _lock(fd: int, shared: bool, deadline_s: float) -> bool:
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _WOULD_BLOCK:
                raise
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_LOOK_AGAIN_S)


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino
