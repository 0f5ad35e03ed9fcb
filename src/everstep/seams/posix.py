"""The file-system contract with Linux system calls.

Large aligned writes and reads bypass the page cache with O_DIRECT: on a Zen 4 machine 3.8 GB/s and
0.03 CPU seconds per GB against 1.6 GB/s and 0.34 for buffered writes. On a file system that refuses
O_DIRECT (tmpfs, some network file systems) everything is buffered.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import stat
import sys
from pathlib import PurePath

from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES, DirEntry, ReadFile, WriteFile


def allocate(fd: int, size_bytes: int) -> int:
    """Allocate blocks for the first ``size_bytes`` of a file (Linux's ``fallocate``).

    Returns:
        0, or the errno: usually EOPNOTSUPP, if the file system lacks the call.
    """
    if sys.platform != "linux":
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while libc.fallocate(fd, 0, 0, size_bytes) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0


def exchange(one: PurePath, other: PurePath) -> int:
    """Exchange two names atomically (Linux's ``renameat2``).

    Returns:
        0, or the errno: usually EINVAL, if the file system lacks the call.
    """
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "renameat2"):
        return errno.ENOSYS
    names = [os.fsencode(one), os.fsencode(other)]
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return 0
    return ctypes.get_errno()


try:
    import fcntl
except ImportError:  # not a POSIX system; the command line refuses it first
    fcntl = None  # type: ignore[assignment]


_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_O_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_F_SETSIG = 10  # Linux; Python's fcntl does not name it
_SYNC_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


class _Descriptors:
    """One file under two descriptors: ``direct`` (or -1) for aligned transfers, ``plain``."""

    def __init__(self, path: PurePath, flags: int, *, direct: bool) -> None:
        try:
            self.plain = os.open(path, flags | _O_NOFOLLOW | _O_CLOEXEC, 0o600)
        except OSError as error:
            # The system's message speaks of too many links, which would mislead.
            if error.errno == errno.ELOOP:
                why = "it is a symbolic link; links inside a run folder are not followed"
                raise OSError(errno.ELOOP, why, str(path)) from None
            raise
        self.direct = -1
        if direct:
            # The first open() has created the file: O_EXCL would refuse it now.
            self.open_direct(path, flags & ~(os.O_CREAT | os.O_EXCL))

    def open_direct(self, path: PurePath, flags: int) -> None:
        """Open the file once more for aligned transfers, if the system can."""
        # EINVAL: the file system lacks O_DIRECT. Then everything goes through the page cache.
        if _O_DIRECT:
            with contextlib.suppress(OSError):
                self.direct = os.open(path, flags | _O_NOFOLLOW | _O_CLOEXEC | _O_DIRECT)

    def close(self) -> None:
        plain = self.plain
        direct = self.direct
        self.plain = -1
        self.direct = -1
        try:
            if plain >= 0:
                os.close(plain)
        finally:
            if direct >= 0:
                os.close(direct)


def _aligned(buffer: memoryview, offset: int) -> bool:
    return offset % DIRECT_ALIGNMENT_BYTES == 0 and buffer.nbytes % DIRECT_ALIGNMENT_BYTES == 0


class _PosixWriteFile:
    def __init__(self, descriptors: _Descriptors) -> None:
        self._fds = descriptors

    def write(self, data: memoryview, offset: int) -> None:
        data = data.cast("B")
        while data.nbytes:
            written = self._write_some(data, offset)
            data = data[written:]
            offset = offset + written

    def _write_some(self, data: memoryview, offset: int) -> int:
        if self._fds.direct >= 0 and _aligned(data, offset):
            try:
                return os.pwrite(self._fds.direct, data, offset)
            except OSError as error:
                # EINVAL: the address is not aligned, or the file system requires more than 4096
                # bytes. Write through the page cache instead.
                if error.errno != errno.EINVAL:
                    raise
        written = os.pwrite(self._fds.plain, data, offset)
        if written == 0:
            raise OSError(errno.EIO, "the file system wrote nothing and gave no reason")
        return written

    def reserve(self, size_bytes: int) -> None:
        # Not os.posix_fallocate: it writes zeros if the file system lacks fallocate.
        before_bytes = os.fstat(self._fds.plain).st_size
        error = allocate(self._fds.plain, size_bytes)
        if error in (errno.ENOSPC, errno.EDQUOT):
            # ext4 keeps the blocks allocated so far: give the last free space of the disk back.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fds.plain, before_bytes)
            raise OSError(error, os.strerror(error))

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._fds.plain, size_bytes)

    def sync(self) -> None:
        # One call for both descriptors, as it syncs the inode. O_DIRECT skips the page cache only:
        # metadata and the cache of the drive are not durable without it.
        os.fsync(self._fds.plain)

    def close(self) -> None:
        self._fds.close()


class _PosixReadFile:
    def __init__(self, descriptors: _Descriptors, size_bytes: int) -> None:
        self._fds = descriptors
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        buffer = buffer.cast("B")
        done = 0
        while done < buffer.nbytes:
            got = self._read_some(buffer[done:], offset + done)
            if got == 0:
                break
            done += got
        return done

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        if self._fds.direct >= 0 and _aligned(buffer, offset):
            try:
                return os.preadv(self._fds.direct, [buffer], offset)
            except OSError as error:
                # As in _write_some(): read through the page cache.
                if error.errno != errno.EINVAL:
                    raise
        return os.preadv(self._fds.plain, [buffer], offset)

    def close(self) -> None:
        self._fds.close()


class PosixFileSystem:
    """Implement :class:`everstep.seams.filesystem.FileSystem` with system calls."""

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        return _PosixWriteFile(
            _Descriptors(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=direct)
        )

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        if fcntl is None or not hasattr(fcntl, "F_SETLEASE"):
            return None
        try:
            descriptors = _Descriptors(path, os.O_RDWR, direct=False)
        except OSError:
            return None
        try:
            info = os.fstat(descriptors.plain)
            unshared = stat.S_ISREG(info.st_mode) and info.st_nlink == 1
            if unshared:
                # A write lease is granted only if no other open file refers to this inode,
                # in any process, and a mapping keeps its open file alive. If another process
                # opens the file while we hold the lease, the kernel sends a signal. Its default,
                # SIGIO, would end this process, so choose one that is ignored by default.
                fcntl.fcntl(descriptors.plain, _F_SETSIG, signal.SIGURG)
                fcntl.fcntl(descriptors.plain, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                fcntl.fcntl(descriptors.plain, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            unshared = False
        if not unshared:
            descriptors.close()
            return None
        if direct:
            descriptors.open_direct(path, os.O_RDWR)
        return _PosixWriteFile(descriptors)

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        # O_NONBLOCK: opening a FIFO of this name must not hang.
        descriptors = _Descriptors(path, os.O_RDONLY | os.O_NONBLOCK, direct=direct)
        info = os.fstat(descriptors.plain)
        if not stat.S_ISREG(info.st_mode):
            descriptors.close()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return _PosixReadFile(descriptors, info.st_size)

    def rename(self, source: PurePath, target: PurePath) -> None:
        os.replace(source, target)

    def link(self, source: PurePath, target: PurePath) -> None:
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: PurePath) -> None:
        os.unlink(path)

    def make_dir(self, path: PurePath) -> None:
        os.mkdir(path, 0o700)

    def remove_dir(self, path: PurePath) -> None:
        os.rmdir(path)

    def sync_dir(self, path: PurePath) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems lack fsync on directories: the server makes names durable.
            if error.errno not in _SYNC_REFUSED:
                raise
        finally:
            os.close(descriptor)

    def scan(self, path: PurePath) -> list[DirEntry]:
        with os.scandir(path) as found:
            entries = [entry for item in found if (entry := _entry(item)) is not None]
        return sorted(entries, key=lambda entry: entry.name)

    def free_bytes(self, path: PurePath) -> int:
        info = os.statvfs(path)
        # Not f_bfree, which includes the blocks reserved for root.
        return info.f_bavail * info.f_frsize


def _entry(item: os.DirEntry[str]) -> DirEntry | None:
    """Return the properties of a name; None if it was removed after the directory was listed."""
    try:
        info = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(info.st_mode):
        kind = "link"
    elif stat.S_ISDIR(info.st_mode):
        kind = "dir"
    else:
        kind = "file" if stat.S_ISREG(info.st_mode) else "other"
    # st_blocks counts 512 bytes on Linux, whatever the block size of the file system is.
    allocated = getattr(info, "st_blocks", 0) * 512
    linked = kind == "file" and info.st_nlink > 1
    return DirEntry(
        name=item.name,
        kind=kind,  # type: ignore[arg-type]
        size_bytes=info.st_size,
        allocated_bytes=allocated,
        mtime_s=info.st_mtime,
        links=info.st_nlink if linked else 1,
        file=info.st_ino if linked else 0,
    )
