"""Claims on numbers, which the processes of one machine make on a file that they share.

A claim is a lock on one byte of that file. It belongs to an open file description, not to a
process: several ranks in one process exclude each other, too, and the kernel lifts it when the
last descriptor is closed, however its owner ends. Nobody ever waits here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading

try:
    import fcntl
except ImportError:  # not a POSIX system; the command line says so before anything else
    fcntl = None  # type: ignore[assignment]

__all__ = ["Claims", "descriptor_of", "namespaces"]

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def descriptor_of(pid: int, fd: int) -> int:
    """A descriptor, with a description of its own, of what a process of this user has open.

    Raises:
        OSError: there is no such process or file here, this one may not look at it, or this
            system has no locks for :class:`Claims`.
    """
    if not hasattr(fcntl, "F_OFD_SETLK"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def namespaces() -> str:
    """Which processes and networks this process sees; "" where that is not known.

    Two processes of one machine can open each other's descriptors if they say the same.
    """
    try:
        return " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    except OSError:  # not Linux, or not mounted
        return ""


class Claims:
    """What this process has claimed.

    Args:
        fd: of the file, from :func:`descriptor_of`; closed by :meth:`close`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mine: set[int] = set()
        self._lock = threading.Lock()

    def take(self, number: int) -> bool:
        """Claims a number; false if anybody has it, another thread of this process included, or
        the system has no more locks."""
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
        """Lets go of a number."""
        with self._lock:
            self._mine.discard(number)
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, number))

    def taken(self, number: int) -> bool:
        """Whether somebody else has a number."""
        with self._lock:
            if self._fd < 0:
                return False
            try:
                found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, number))
            except OSError:
                return False
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        with self._lock:
            fd = self._fd
            self._fd = -1
        if fd >= 0:
            os.close(fd)


def _flock(kind: int, number: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0)
