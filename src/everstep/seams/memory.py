"""Shared memory of the operating system: a memfd, its mapping, and advice about its pages.

System calls go through the C library. Python's ``mmap``

- keeps a duplicate of the descriptor, so that a forked child would keep the memory alive,
- unmaps in a forked child too, where the addresses may be in use for something else,
- holds the interpreter lock during ``madvise``, which takes a second for some GiB,
- has no ``memfd_create`` where Python was built against an old C library (conda).

``/dev/shm`` is not used: containers limit it to 64 MB, writing past that is a SIGBUS, and its names
outlive crashes. Neither is ``multiprocessing.shared_memory``, whose tracker unlinks at exit.

Fast reads of scattered elements. The spot check samples a few elements of each tensor, and none of
them is in a cache. A loop over the tensors waits for one memory access after the other. One indexed
read over the whole address range keeps many accesses in flight and takes a third of the time.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import fcntl
except ImportError:  # not a POSIX system; the command line says so before anything else
    fcntl = None  # type: ignore[assignment]


PAGE_BYTES = mmap.PAGESIZE

_BLOCK_BYTES = 512  # unit of st_blocks
# Per system call, so that signals are handled in between.
_SLICE_BYTES = 256 << 20
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
MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_NORESERVE = 0x4000 if _LINUX else 0
_PROT_NONE = 0

_NOT_KNOWN = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


copy_memory: Callable[[int, int, int], object] = ctypes.memmove
"""Copy bytes: target address, source address, size. Releases the interpreter lock; a Python wrapper
would hold it longer."""


def copy_view(target: memoryview, source: memoryview) -> None:
    """Copy bytes between views of equal size without holding the interpreter lock, as an assignment
    of a memoryview would.
    """
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return a view of this process's memory. The caller keeps it mapped while the view is used."""
    if not size_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def take_pages(address: int, size_bytes: int) -> None:
    """Allocate the pages of mapped memory now, as far as the system supports it; contents stay.
    Releases the interpreter lock. If memory is short, pages are left to be allocated on first
    write.

    Args:
        address: address of a page.
        size_bytes: length of the range.
    """
    with contextlib.suppress(OSError):
        madvise(address, size_bytes, MADV_POPULATE_WRITE)


def sealed_bytes(fd: int) -> int | None:
    """Return the size of a memfd whose size is sealed; None if any holder can still change it.

    Raises:
        OSError: ``fd`` is no memfd, or no descriptor.
    """
    if fcntl is None or not _LINUX:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    sealed = fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS
    return os.fstat(fd).st_size if sealed else None


class WritableMemory:
    """Addresses of this process that are writable, as of the first query. Writing elsewhere, e.g.
    to a file mapped read-only, kills the process.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] | None = None

    def has(self, address: int) -> bool:
        """Return True if ``address`` is writable, or if the system does not tell."""
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
    """One mapping of shared memory with its own descriptor.

    Pages are allocated on first write and read as zeros before that. Huge pages are requested. The
    mapping is excluded from core dumps, which would write private data to disk.

    The mapping lasts until the last array or memoryview of it is released, so no view can dangle.
    Children made by ``os.fork()`` inherit neither mapping nor descriptor: in them ``lost`` is true,
    and inherited views point to inaccessible pages.

    Attributes:
        address: start of the mapping, page-aligned.
        size_bytes: length, a multiple of the page size.

    Raises:
        OSError: any method: the error of the operating system.
    """

    def __init__(self, size_bytes: int, *, fd: int | None) -> None:
        """Map a duplicate of ``fd``, or anonymous memory if ``fd`` is None."""
        assert size_bytes % PAGE_BYTES == 0, "mappings are multiples of the page size"
        _check_fits(size_bytes)
        # No fork may come between the mapping and MADV_DONTFORK: the child would inherit it.
        with _lock:
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
        # Not at exit: threads may still copy, and the system unmaps anyway.
        weakref.finalize(self, _release, held).atexit = False

    @classmethod
    def create(cls, name: str, size_bytes: int) -> SharedMemory:
        """Create a sparse memfd with a sealed size, so that writing can never raise SIGBUS.

        Args:
            name: label in ``/proc/<pid>/maps``.
            size_bytes: length, a multiple of the page size.
        """
        _check_fits(size_bytes)
        # No fork may come in between: the child would keep this descriptor, which is not
        # registered, and with it the memory.
        with _lock:
            fd = _memfd_create(name)
            try:
                os.ftruncate(fd, size_bytes)
                fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
                return cls(size_bytes, fd=fd)
            finally:
                # The mapping has a duplicate.
                os.close(fd)

    @property
    def fd(self) -> int | None:
        """Descriptor; None for anonymous memory, and once it is closed."""
        return self._held.fd if self._held.fd >= 0 else None

    @property
    def taken_bytes(self) -> int:
        """Memory allocated so far by all processes; for anonymous memory, where the system does not
        tell, the full size.
        """
        fd = self.fd
        return self.size_bytes if fd is None else os.fstat(fd).st_blocks * _BLOCK_BYTES

    @property
    def lost(self) -> bool:
        """True in a process that was forked from the one that made the mapping."""
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
        """Return all bytes as an array, which keeps the mapping alive."""
        return np.asarray(self)

    def populate(self, offset: int, size_bytes: int) -> None:
        """Allocate the pages of a range now; contents stay. Releases the interpreter lock."""
        if not size_bytes:
            return
        end = offset + size_bytes
        start = offset - offset % PAGE_BYTES
        for at in range(start, end, _SLICE_BYTES):
            length = min(_SLICE_BYTES, end - at)
            try:
                madvise(self.address + at, length, MADV_POPULATE_WRITE)
            except OSError as error:
                if error.errno not in _NOT_KNOWN:  # before Linux 5.14, or not Linux
                    raise
                self._read_pages(max(at, offset), at + length)

    def close_fd(self) -> None:
        """Close the descriptor; the mapping stays."""
        with _lock:
            _close_fd(self._held)

    def _read_pages(self, start: int, end: int) -> None:
        """Read one byte of each page, which allocates shared pages. Writing back the same bytes
        would race with concurrent writers, e.g. a device copy.
        """
        array = self.array()
        pages = array[-(-start // PAGE_BYTES) * PAGE_BYTES : end : PAGE_BYTES]
        np.bitwise_or.reduce(pages, initial=array[start])


# --- System calls -----------------------------------------------------------------------


@functools.cache
def c_library() -> Any:
    """Return the C library."""
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
    # ctypes would truncate the number silently.
    if size_bytes > sys.maxsize:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def _memfd_create(name: str) -> int:
    if not _LINUX or not hasattr(c_library(), "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    # Some machines require non-executable memfds (vm.memfd_noexec); before Linux 6.3 the flag is
    # unknown and refused with EINVAL.
    fd: int = c_library().memfd_create(name.encode(), flags | _MFD_NOEXEC_SEAL)
    if fd < 0 and ctypes.get_errno() == errno.EINVAL:
        fd = c_library().memfd_create(name.encode(), flags)
    if fd < 0:
        raise _failed()
    return fd


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    got: int | None = c_library().mmap(address, size_bytes, protection, flags, fd, 0)
    if got is None or got == ctypes.c_void_p(-1).value:
        raise _failed()
    return got


def madvise(address: int, size_bytes: int, advice: int) -> None:
    """Give advice about the pages of a range.

    Raises:
        OSError: it was not taken.
    """
    if not _LINUX:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while c_library().madvise(address, size_bytes, advice) != 0:
        error = _failed()
        if error.errno != errno.EINTR:
            raise error


# --- Mappings that exist ----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Held:
    """Resources of a :class:`SharedMemory`; they outlive it until they are released.

    Attributes:
        fd: descriptor; -1 if there is none or it is closed.
        inherited: True if forked children inherit the mapping; Linux can prevent that.
        lost: True if this process is such a child.
    """

    address: int
    size_bytes: int
    fd: int
    inherited: bool
    lost: bool = False


# Reentrant: the garbage collector may release one mapping while another is being made.
_lock = threading.RLock()
_mappings: dict[int, _Held] = {}


def mappings() -> set[int]:
    """Return the addresses of all mappings that exist."""
    return set(_mappings)


def _map(size_bytes: int, fd: int) -> _Held:
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)
    for advice in (MADV_HUGEPAGE, MADV_DONTDUMP):
        with contextlib.suppress(OSError):  # built without huge pages, or not Linux
            madvise(address, size_bytes, advice)
    try:
        madvise(address, size_bytes, MADV_DONTFORK)
        inherited = False
    except OSError:
        inherited = True
    return _Held(address, size_bytes, fd, inherited)


def _release(held: _Held) -> None:
    """Unmap, once nothing refers to the mapping any more."""
    with _lock:
        # In a forked child the addresses may belong to another mapping by now.
        if held.lost:
            return
        del _mappings[held.address]
        _close_fd(held)
        c_library().munmap(held.address, held.size_bytes)


def _close_fd(held: _Held) -> None:
    fd = held.fd
    held.fd = -1
    if fd >= 0:
        os.close(fd)


def _lose_all() -> None:
    """In a forked child: close descriptors and make the addresses inaccessible.

    Otherwise other memory of the child could be mapped there, and an inherited view would read and
    write it.
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
    # An inherited mapping is replaced; a gap is filled unless something is mapped there already.
    flags |= _MAP_FIXED if held.inherited else _MAP_FIXED_NOREPLACE
    with contextlib.suppress(OSError):
        got = _mmap(held.address, held.size_bytes, _PROT_NONE, flags, -1)
        # Before Linux 4.17 the address is only a hint.
        if got != held.address:
            c_library().munmap(got, held.size_bytes)


if hasattr(os, "register_at_fork"):
    # Hold the lock across the fork: otherwise the child could inherit it locked by another thread,
    # or a mapping that is only half registered.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lose_all
    )


_NO_ADDRESSES = np.empty(0, np.int64)


class Gather:
    """Read the same elements repeatedly.

    Args:
        views: arrays of one integer dtype of at most 8 bytes. The caller keeps their memory mapped
            and in place while this object is used.
    """

    def __init__(self, views: Sequence[npt.NDArray[Any]]) -> None:
        addresses = np.concatenate([_NO_ADDRESSES, *map(_addresses, views)])
        self._place(addresses, views[0].dtype if views else np.dtype(np.int8))

    @classmethod
    def at(cls, addresses: npt.NDArray[np.int64], kind: np.dtype[Any]) -> Gather:
        """Return a reader of one element at each address, under the same conditions."""
        gather = cls.__new__(cls)
        gather._place(addresses, kind)
        return gather

    def _place(self, addresses: npt.NDArray[np.int64], kind: np.dtype[Any]) -> None:
        self._kind = kind
        width = kind.itemsize
        if width > 1 and (addresses % width).any():
            # Unaligned elements are read byte by byte: NumPy would copy the whole range.
            addresses = (addresses[:, None] + np.arange(width)).ravel()
            kind = np.dtype(np.uint8)
            width = 1
        first = int(addresses.min()) if addresses.size else 0
        last = int(addresses.max()) if addresses.size else -width
        # Without a remainder: all addresses are multiples of the width here.
        self._where = (addresses - first) // width
        # The range spans memory of other owners, too: only the selected elements are read.
        count = (last - first) // width + 1
        self._between = np.asarray(_Memory(first, count, kind)) if count else np.empty(0, kind)

    def take(self) -> npt.NDArray[Any]:
        """Return the current elements of all views in order, each view in row-major order."""
        # All positions are valid; mode="clip" skips NumPy's bounds check pass.
        found: npt.NDArray[Any] = self._between.take(self._where, mode="clip").view(self._kind)
        return found


class _Memory:
    """Range of this process's memory as a NumPy array interface. (A ctypes array would create a
    type for each length, ten times slower.)
    """

    def __init__(self, address: int, count: int, kind: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # read-only
            "shape": (count,),
            "typestr": kind.str,
        }


def _addresses(view: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the addresses of all elements of an array."""
    found = np.full(1, view.__array_interface__["data"][0], np.int64)
    for count, stride in zip(view.shape, view.strides, strict=True):
        found = (found[:, None] + stride * np.arange(count)).ravel()
    return found
