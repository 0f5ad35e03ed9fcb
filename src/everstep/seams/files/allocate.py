"""Room for a file before it is written."""

from __future__ import annotations

import ctypes
import errno
import sys

__all__ = ["allocate"]


def allocate(fd: int, size_bytes: int) -> int:
    """Linux's ``fallocate``: blocks for the first ``size_bytes`` of a file.

    Returns:
        0, or the errno: mostly that this file system cannot (EOPNOTSUPP).
    """
    if sys.platform != "linux":
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while libc.fallocate(fd, 0, 0, size_bytes) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0
