"""Files locked during the lifetime of their owner with ``flock``, which ends with the process.

The lock belongs to the file, not to its name. A process that deletes such a file holds its lock,
and a process that has got a lock checks that the name still leads to the locked file. So two
processes never hold "the same" lock on two files.

Claims on numbers, shared by the processes of one machine through locks on bytes of a file.

A claim is a lock on one byte. It belongs to an open file description, not to a process: several
ranks in one process exclude each other too, and the kernel releases it when the last descriptor is
closed, however the owner ends. No call ever waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import PurePath

try:
    import fcntl
except ImportError:  # not a POSIX system; the command line refuses it first
    fcntl = None  # type: ignore[assignment]


_LOOK_AGAIN_S = 0.01
_REPLACED_MAX = 100
_WOULD_BLOCK = (errno.EAGAIN, errno.EACCES)


class LockedFile:
    """Regular file locked by this process. Made by :func:`lock_file`.

    Attributes:
        fd: descriptor, close-on-exec.
        identity: device and inode, which distinguish the file from others of the same name.
    """

    def __init__(self, path: PurePath, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.identity = _identity(os.fstat(fd))

    @property
    def is_current(self) -> bool:
        """True if the name still leads to this file."""
        return file_identity(self.path) == self.identity

    def replace(self, data: bytes) -> None:
        """Replace the contents of the file by ``data``."""
        os.ftruncate(self.fd, 0)
        while data:
            data = data[os.write(self.fd, data) :]

    def share(self, timeout_s: float) -> bool:
        """Convert the lock into a shared one; return False on timeout or if the name was removed.

        The kernel releases the old lock first: another process may hold the lock in between.
        """
        return _lock(self.fd, True, time.monotonic() + timeout_s) and self.is_current

    def put_at(self, fds: Iterable[int]) -> None:
        """Make ``fds`` (e.g. 1 and 2) refer to the file and hold its lock; close this object."""
        for fd in fds:
            # Duplicates share the open file description, and flock() locks that.
            os.dup2(self.fd, fd)
        self.close()

    def unlink(self) -> None:
        """Remove the name if it leads to this file."""
        if self.is_current:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def release(self) -> None:
        """Unlock and close, also for forked children that have inherited the descriptor."""
        if self.fd >= 0:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            finally:
                self.close()

    def close(self) -> None:
        """Close without unlocking: a process that inherited the descriptor keeps the lock."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            os.close(fd)


def lock_file(
    path: PurePath, *, shared: bool = False, create: bool = True, timeout_s: float = 0.0
) -> LockedFile | None:
    """Lock the file at ``path``; return None if another process holds it until ``timeout_s``.

    Writes through the descriptor append.

    Args:
        path: path of the file.
        shared: take a lock that several processes can hold.
        create: create the file with mode 0600 if it does not exist.
        timeout_s: seconds to wait for the lock.

    Raises:
        OSError: FileNotFoundError without ``create``; ELOOP for a symbolic link.
    """
    deadline_s = time.monotonic() + timeout_s
    for _ in range(_REPLACED_MAX):
        file = _open(path, create)
        held = False
        try:
            if not _lock(file.fd, shared, deadline_s):
                return None
            # The file may have been deleted or replaced before the lock was granted: check.
            held = file.is_current
            if held:
                return file
        finally:
            if not held:
                file.close()
    raise OSError(
        errno.EBUSY, "the file keeps being replaced while it is being locked", os.fspath(path)
    )


def file_identity(path: PurePath) -> tuple[int, int] | None:
    """Return device and inode of ``path``, links not followed; None if it does not exist."""
    try:
        return _identity(os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return None


def same_file(fd: int, path: PurePath) -> bool:
    """Return True if ``path`` leads to the file that ``fd`` has open."""
    try:
        return _identity(os.fstat(fd)) == file_identity(path)
    except OSError:  # no such descriptor
        return False


def try_lock(fd: int) -> bool:
    """Take the exclusive lock on the file of ``fd`` without waiting; return False if another
    process holds a lock.
    """
    try:
        return _lock(fd, False, 0.0)
    except OSError:
        return False


def _open(path: PurePath, create: bool) -> LockedFile:
    # O_NONBLOCK: opening a FIFO of this name must not hang.
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return LockedFile(path, fd)
    except BaseException:
        os.close(fd)
        raise


def _lock(fd: int, shared: bool, deadline_s: float) -> bool:
    # Poll: a blocking flock cannot have a timeout without signals.
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


_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def descriptor_of(pid: int, fd: int) -> int:
    """Open a file of another process of this user, with a file description of its own.

    Raises:
        OSError: the process or file does not exist or is not accessible, or this system lacks the
            locks of :class:`Claims`.
    """
    if not hasattr(fcntl, "F_OFD_SETLK"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    # Opened anew: a descriptor that was duplicated or passed shares its file description, and with
    # that its locks.
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


class Claims:
    """Numbers claimed by this process.

    Args:
        fd: descriptor from :func:`descriptor_of`; closed by :meth:`close`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mine: set[int] = set()
        self._lock = threading.Lock()

    def take(self, number: int) -> bool:
        """Claim a number. Return False if another process or thread has it, or if the system is out
        of locks.
        """
        # Threads of this process share the file description: the kernel would grant each the byte.
        with self._lock:
            if number in self._mine or self._fd < 0:
                return False
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, number))
            except OSError:
                return False
            self._mine.add(number)
            return True

    def give(self, number: int) -> None:
        """Release a number."""
        with self._lock:
            self._mine.discard(number)
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, number))

    def taken(self, number: int) -> bool:
        """Return True if another owner has claimed a number."""
        with self._lock:
            if self._fd < 0:
                return False
            try:
                found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, number))
            except OSError:
                return False
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Release all numbers. Idempotent."""
        with self._lock:
            # Invalidated under the lock, so that no thread uses the number after it was closed: it
            # may belong to another file by then.
            fd = self._fd
            self._fd = -1
        if fd >= 0:
            os.close(fd)


def _flock(kind: int, number: int) -> bytes:
    # One byte per number. The last field, l_pid, must be 0 for locks of open file descriptions.
    return _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0)
