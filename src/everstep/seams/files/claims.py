"""Claims on numbers, shared by the processes of one machine through locks on bytes of a file.

A claim is a lock on one byte. It belongs to an open file description, not to a process: several
ranks in one process exclude each other too, and the kernel releases it when the last descriptor is
closed, however the owner ends. No call ever waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading

try:
    import fcntl
except ImportError:  # not a POSIX system; the command line refuses it first
    fcntl = None  # type: ignore[assignment]

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
