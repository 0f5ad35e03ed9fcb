"""Shared memory of the operating system: a memfd, its mapping, and advice about its pages.

System calls are made through the C library and not with Python's ``mmap``, which

- keeps a duplicate of the descriptor, so that a forked child would keep the memory alive,
- unmaps in a forked child too, where something else may have taken the addresses,
- holds the interpreter lock during ``madvise``, which takes a second for some GiB,
- has no ``memfd_create`` where Python was built against an old C library (conda).

Not ``/dev/shm``: containers limit it to 64 MB, writing past that is a SIGBUS, and its names
outlive crashes. Not ``multiprocessing.shared_memory``, whose tracker unlinks at exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import fcntl
except ImportError:  # not a POSIX system; the command line says so before anything else
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "PAGE_BYTES",
    "SharedMemory",
    "WritableMemory",
    "copy_memory",
    "copy_view",
    "memory_at",
    "sealed_bytes",
    "take_pages",
]

PAGE_BYTES = mmap.PAGESIZE

_BLOCK_BYTES = 512  # in which stat() counts
_SLICE_BYTES = 256 << 20  # per call, so that signals are seen in between
_LINUX = sys.platform == "linux"

# Linux's; Python names some of them only where it was built against a recent C library.
_MFD_CLOEXEC = 1
_MFD_ALLOW_SEALING = 2
_MFD_NOEXEC_SEAL = 8
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SEAL = 1
_F_SEAL_SHRINK = 2
_F_SEAL_GROW = 4
_SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW
_MADV_REMOVE = 9
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_NORESERVE = 0x4000 if _LINUX else 0
_PROT_NONE = 0

_NOT_KNOWN = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


copy_memory: Callable[[int, int, int], object] = ctypes.memmove
"""Copies to an address from another so many bytes, in the calling thread; other threads run
meanwhile. Called as it is: a function around it would keep the interpreter lock longer."""


def copy_view(target: memoryview, source: memoryview) -> None:
    """Copies bytes, as many as there are on both sides; other threads run meanwhile, which an
    assignment of a memoryview would not let them."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Memory of this process as it lies. Whoever asks keeps it mapped while the view is used."""
    if not size_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def take_pages(address: int, size_bytes: int) -> None:
    """Takes the pages of mapped memory now, as far as the system knows how; contents stay. Other
    threads run meanwhile. What there is no memory for is left to whoever writes there.

    Args:
        address: of a page.
    """
    with contextlib.suppress(OSError):
        _madvise(address, size_bytes, _MADV_POPULATE_WRITE)


def sealed_bytes(fd: int) -> int | None:
    """The size of a memfd that can never change again, whoever else holds it; None if it can.

    Raises:
        OSError: for what is not a memfd, or not a descriptor.
    """
    if fcntl is None or not _LINUX:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    sealed = fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS
    return os.fstat(fd).st_size if sealed else None


class WritableMemory:
    """Which memory of this process can be written to, as it was at the first question: of a file
    that is mapped to be read, say, none can, and who tries is ended."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] | None = None

    def has(self, address: int) -> bool:
        """Whether ``address`` can be written to; everywhere, where nothing tells."""
        if not _LINUX:
            return True
        if self._spans is None:
            self._spans = list(_writable_spans())
        return any(begin <= address < end for begin, end in self._spans)


def _writable_spans() -> Iterator[tuple[int, int]]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            span, rights = line.split(maxsplit=2)[:2]
            begin, end = (int(number, 16) for number in span.split("-"))
            if "w" in rights:
                yield begin, end


class SharedMemory:
    """One mapping of shared memory, and a descriptor of its own for it.

    Pages come when they are first written to, and read as zeros before that. Huge pages are
    asked for. The mapping is not part of core dumps, which would write private data to disk.

    The mapping ends when the last array or memoryview of it is gone, so that no view ever
    points to nothing. Children made by ``os.fork()`` get neither mapping nor descriptor: in
    them ``lost`` is true, and views that they inherited point to pages that cannot be read.

    Attributes:
        address: where it starts; page-aligned.
        size_bytes: a multiple of the page.

    Raises:
        OSError: whatever the system said, by any method.
    """

    def __init__(self, size_bytes: int, *, fd: int | None) -> None:
        """Maps ``fd``, of which it takes a duplicate, or anonymous memory if that is None."""
        assert size_bytes % PAGE_BYTES == 0, "mappings are whole pages"
        _check_fits(size_bytes)
        with _lock:  # no fork between a mapping and the advice not to inherit it
            own = -1 if fd is None else os.dup(fd)
            try:
                held = _map(size_bytes, own)
            except BaseException:
                if own >= 0:
                    os.close(own)
                raise
            _mappings[held.address] = held
        self._held = held
        self.address = held.address
        self.size_bytes = size_bytes
        # Not at exit: threads may still copy, and the system unmaps all the same.
        weakref.finalize(self, _release, held).atexit = False

    @classmethod
    def create(cls, name: str, size_bytes: int) -> SharedMemory:
        """A new memfd, sparse, whose size nobody can change: writing is never a SIGBUS.

        Args:
            name: for people who read ``/proc/<pid>/maps``.
        """
        _check_fits(size_bytes)
        with _lock:
            fd = _memfd_create(name)
            try:
                os.ftruncate(fd, size_bytes)
                fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
                return cls(size_bytes, fd=fd)
            finally:
                os.close(fd)

    @property
    def fd(self) -> int | None:
        """The descriptor; None for anonymous memory, and once it is closed."""
        return self._held.fd if self._held.fd >= 0 else None

    @property
    def taken_bytes(self) -> int:
        """Memory that pages have taken so far, of whichever process; of anonymous memory, which
        nothing tells it of, all of it."""
        fd = self.fd
        return self.size_bytes if fd is None else os.fstat(fd).st_blocks * _BLOCK_BYTES

    @property
    def lost(self) -> bool:
        """Whether this process was forked from the one that made the mapping."""
        return self._held.lost

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes; keeps the mapping alive."""
        return np.asarray(self)

    def populate(self, offset: int, size_bytes: int) -> None:
        """Takes the pages of a range now; contents stay. Other threads run meanwhile."""
        if not size_bytes:
            return
        end = offset + size_bytes
        start = offset - offset % PAGE_BYTES
        for at in range(start, end, _SLICE_BYTES):
            length = min(_SLICE_BYTES, end - at)
            try:
                _madvise(self.address + at, length, _MADV_POPULATE_WRITE)
            except OSError as error:
                if error.errno not in _NOT_KNOWN:  # before Linux 5.14, or not Linux
                    raise
                self._read_pages(max(at, offset), at + length)

    def remove(self, offset: int, size_bytes: int) -> None:
        """Gives the whole pages of a range back to the system; all of it reads as zeros.

        Where the system cannot (not Linux, or pages locked by ``mlock``), zeros are written
        and the memory stays taken.
        """
        array = self.array()
        end = offset + size_bytes
        first = min(end, -(-offset // PAGE_BYTES) * PAGE_BYTES)
        last = max(first, end - end % PAGE_BYTES)
        array[offset:first] = 0
        array[last:end] = 0
        for at in range(first, last, _SLICE_BYTES):
            length = min(_SLICE_BYTES, last - at)
            try:
                _madvise(self.address + at, length, _MADV_REMOVE)
            except OSError as error:
                if error.errno not in _NOT_KNOWN:
                    raise
                array[at : at + length] = 0

    def close_fd(self) -> None:
        """Closes the descriptor; the mapping stays."""
        with _lock:
            _close_fd(self._held)

    def _read_pages(self, start: int, end: int) -> None:
        """Reads one byte of each page, which takes pages that are shared. To write what is there
        would lose what somebody else writes meanwhile: a device that copies there asks nobody."""
        array = self.array()
        pages = array[-(-start // PAGE_BYTES) * PAGE_BYTES : end : PAGE_BYTES]
        np.bitwise_or.reduce(pages, initial=array[start])


# --- System calls -----------------------------------------------------------------------


@functools.cache
def _libc() -> Any:
    # CDLL, not PyDLL: its functions release the interpreter lock.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if _LINUX and hasattr(libc, "memfd_create"):
        libc.memfd_create.argtypes = [ctypes.c_char_p, ctypes.c_uint]
    return libc


def _failed() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _check_fits(size_bytes: int) -> None:
    if size_bytes > sys.maxsize:  # or ctypes would cut it off without a word
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def _memfd_create(name: str) -> int:
    if not _LINUX or not hasattr(_libc(), "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    # Not executable: some machines allow no other (vm.memfd_noexec); before 6.3 unknown.
    fd: int = _libc().memfd_create(name.encode(), flags | _MFD_NOEXEC_SEAL)
    if fd < 0 and ctypes.get_errno() == errno.EINVAL:
        fd = _libc().memfd_create(name.encode(), flags)
    if fd < 0:
        raise _failed()
    return fd


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    got: int | None = _libc().mmap(address, size_bytes, protection, flags, fd, 0)
    if got is None or got == ctypes.c_void_p(-1).value:
        raise _failed()
    return got


def _madvise(address: int, size_bytes: int, advice: int) -> None:
    if not _LINUX:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _libc().madvise(address, size_bytes, advice) != 0:
        error = _failed()
        if error.errno != errno.EINTR:
            raise error


# --- Mappings that exist ----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Held:
    """What a :class:`SharedMemory` holds; outlives it until it is given back.

    Attributes:
        fd: -1 where there is none (any more).
        inherited: whether forked children have the mapping; Linux can keep it from them.
        lost: whether this process is such a child.
    """

    address: int
    size_bytes: int
    fd: int
    inherited: bool
    lost: bool = False


# Reentrant: the garbage collector may release one mapping while another is made.
_lock = threading.RLock()
_mappings: dict[int, _Held] = {}


def _map(size_bytes: int, fd: int) -> _Held:
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)
    for advice in (_MADV_HUGEPAGE, _MADV_DONTDUMP):
        with contextlib.suppress(OSError):  # built without huge pages, or not Linux
            _madvise(address, size_bytes, advice)
    try:
        _madvise(address, size_bytes, _MADV_DONTFORK)
        inherited = False
    except OSError:
        inherited = True
    return _Held(address, size_bytes, fd, inherited)


def _release(held: _Held) -> None:
    """Unmaps, once nothing refers to the mapping any more."""
    with _lock:
        if held.lost:  # a child: the addresses may be somebody else's by now
            return
        del _mappings[held.address]
        _close_fd(held)
        _libc().munmap(held.address, held.size_bytes)


def _close_fd(held: _Held) -> None:
    fd = held.fd
    held.fd = -1
    if fd >= 0:
        os.close(fd)


def _lose_all() -> None:
    """In a forked child: closes descriptors, and fences the addresses off.

    Without the fence other memory of the child would come to lie there, and a view that it
    inherited would read and write that.
    """
    try:
        for held in _mappings.values():
            held.lost = True
            with contextlib.suppress(OSError):
                _close_fd(held)
            _fence(held)
        _mappings.clear()
    finally:
        _lock.release()


def _fence(held: _Held) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    # What the child did inherit is replaced; a gap is filled unless it is taken already.
    flags |= _MAP_FIXED if held.inherited else _MAP_FIXED_NOREPLACE
    with contextlib.suppress(OSError):
        got = _mmap(held.address, held.size_bytes, _PROT_NONE, flags, -1)
        if got != held.address:  # before Linux 4.17 the address is but a wish
            _libc().munmap(got, held.size_bytes)


if hasattr(os, "register_at_fork"):
    # The lock is free in the child: whoever forks waits for it first.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lose_all
    )
