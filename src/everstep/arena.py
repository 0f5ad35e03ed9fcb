"""The arena: host memory shared between processes, laid out as the files written from it.

One process creates an arena and passes its descriptor to others, which attach. The bytes of its
data area are written to files unchanged. A control area precedes the data:

=================  =====================================================================
bytes              content
=================  =====================================================================
0 to 32            magic, version, number of progress words, offset and size of the data
4096 to 36864      512 progress words of 8 bytes, each in a cache line (64 bytes) of its own
65536              the data, page-aligned
=================  =====================================================================

A progress word publishes the progress of a copy ("all of batch 17 has been copied"). One process
writes it, others read it, without a lock. This is correct because

- a word is read and written as one aligned 8-byte access (NumPy's, on a C ``uint64``), so that no
  reader sees a half-written value, and Python neither reorders nor merges these accesses;
- a reader that sees a word also sees all data written before it. x86 keeps the order of stores and
  of loads across processes. Other architectures do not, so there a barrier precedes each store and
  follows each load: a lock that is released and acquired again, a full barrier on ARM and POWER.

Copies by a device are not covered: the thread that waited for them sets the word
(:mod:`everstep.capture.cuda`).

Allocator of ranges in an arena: offsets and sizes only, no memory. Blocks are freed in any order,
because bases become durable in any order. Free space is a list of holes. A ring buffer with a head
and a tail would not do: DataStates-LLM's treats "head == tail" as empty and hands out memory that
is still in use when the buffer is full.

Private blocks of one process, for chunks in flight to and from the disk, and a pool of such blocks
that are reused after the last view is released. The system allocates fresh memory page by page, on
a virtual machine perhaps from the host: there, reading a file into fresh memory was up to ten times
slower than into memory used before.

Used in both processes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import platform
import queue
import struct
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from everstep.errors import OptionError, OutOfSpaceError, StateError, UnavailableError
from everstep.seams.memory import PAGE_BYTES as SYSTEM_PAGE_BYTES
from everstep.seams.memory import SharedMemory, sealed_bytes

PAGE_BYTES = 4096
# Linux's number: Python names it only where it was built against a recent C library.
_MADV_HUGEPAGE = 14
CONTROL_BYTES = 65536
PROGRESS_WORDS = 512

_MAGIC = b"EVSARENA"
_VERSION = 1
_HEADER = struct.Struct("=8sIIQQ")  # native byte order: all attached processes are on one machine
_WORDS_OFFSET = 4096
_WORD_STRIDE_BYTES = 64
# EFBIG: the memfd exceeds the limit of file sizes (ulimit -f). EFAULT: pages could not be
# populated.
_NO_ROOM = (errno.ENOMEM, errno.EFBIG, errno.ENOSPC, errno.EFAULT)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_LESS = (
    "a smaller Budget(host_bytes=...), or more memory for this job (container or job limit, "
    "ulimit -v, ulimit -f)"
)

assert CONTROL_BYTES % SYSTEM_PAGE_BYTES == 0, "the data starts on a page"
assert _WORDS_OFFSET + PROGRESS_WORDS * _WORD_STRIDE_BYTES <= CONTROL_BYTES


class Arena:
    """Shared memory of a fixed size: a data area and progress words (see the module docstring).

    Constructed by :meth:`create`, :meth:`attach` or :meth:`anonymous`. All methods are thread-safe.
    Pages are allocated at the first write or by :meth:`populate`; until then they read as zeros.

    A forked child (e.g. a worker of a data loader) can neither use the arena nor keep it alive.

    Attributes:
        size_bytes: size of the data area, a multiple of the page size.
    """

    def __init__(self, memory: SharedMemory) -> None:
        array = memory.array()
        self.size_bytes = memory.size_bytes - CONTROL_BYTES
        self._memory: SharedMemory | None = memory
        self._view: memoryview | None = array.data[CONTROL_BYTES:]
        self._words = np.ndarray(
            PROGRESS_WORDS, np.uint64, array.data, _WORDS_OFFSET, strides=(_WORD_STRIDE_BYTES,)
        )
        assert self._words.flags.aligned, "or words could be seen half written"

    @classmethod
    def create(cls, size_bytes: int) -> Arena:
        """Create an arena that other processes can attach to through its descriptor.

        Its size is sealed: if a holder of the descriptor could shrink it, another process that
        touches the removed pages would be killed by SIGBUS.

        Args:
            size_bytes: size of the data area, rounded up to whole pages.

        Raises:
            OptionError: if ``size_bytes`` is not positive.
            OutOfSpaceError: if the system has not enough memory.
            UnavailableError: without ``memfd_create``, or without free descriptors.
        """
        total_bytes = _total_bytes(size_bytes)
        with _explained(f"an arena of {size_bytes} bytes"):
            memory = SharedMemory.create("everstep-arena", total_bytes)
        return cls._started(memory)

    @classmethod
    def anonymous(cls, size_bytes: int) -> Arena:
        """Create an arena for this process only, without a descriptor, on any platform.

        Raises:
            OptionError: if ``size_bytes`` is not positive.
            OutOfSpaceError: if the system has not enough memory.
        """
        total_bytes = _total_bytes(size_bytes)
        with _explained(f"an arena of {size_bytes} bytes"):
            memory = SharedMemory(total_bytes, fd=None)
        return cls._started(memory)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map an arena that another process created.

        Args:
            fd: its descriptor. The caller keeps it and should close it.

        Raises:
            StateError: if the descriptor is not a complete, sealed arena of this version.
            OutOfSpaceError: if there is no address space for the mapping.
            UnavailableError: if there are no free descriptors.
        """
        try:
            total_bytes = sealed_bytes(fd)
        except (OSError, ValueError, OverflowError) as error:
            raise _not_an_arena(fd, f"it is no memfd ({error})") from error
        # Its creator could shrink it after this test, and an access to a removed page is a SIGBUS.
        if total_bytes is None:
            raise _not_an_arena(fd, "its size is not sealed")
        if total_bytes <= CONTROL_BYTES or total_bytes % SYSTEM_PAGE_BYTES:
            raise _not_an_arena(fd, f"it has {total_bytes} bytes")
        try:
            memory = SharedMemory(total_bytes, fd=fd)
        except OSError as error:
            if error.errno in (*_NO_ROOM, *_NO_DESCRIPTORS):
                raise _explanation(error, f"an arena of {total_bytes} bytes") from error
            raise _not_an_arena(fd, f"it cannot be mapped ({error})") from error
        if memory.array()[: _HEADER.size].tobytes() != _header(total_bytes - CONTROL_BYTES):
            memory.close_fd()
            raise _not_an_arena(fd, "its header is of another version, or of something else")
        return cls(memory)

    @property
    def fd(self) -> int | None:
        """Descriptor to pass to other processes, owned by the arena; None if anonymous."""
        return self._here().fd

    @property
    def taken_bytes(self) -> int:
        """Memory of the pages allocated so far; 0 after :meth:`close`."""
        return 0 if self._memory is None else self._memory.taken_bytes

    @property
    def view(self) -> memoryview:
        """The data area as writable bytes; views of it keep the memory mapped."""
        view = self._view
        self._here()
        assert view is not None, "there is a view as long as there is memory"
        return view

    @property
    def address(self) -> int:
        """Address of the data area, page-aligned. Valid while the arena is open."""
        return self._here().address + CONTROL_BYTES

    def progress(self, index: int) -> int:
        """Read a progress word; data written before it was set is visible afterwards."""
        words = self._words_with(index)
        value: int = words.item(index)
        # After the load: no later load of data may be moved before it.
        _barrier()
        return value

    def set_progress(self, index: int, value: int) -> None:
        """Set a progress word, ordered after all earlier writes.

        Args:
            value: 0 to 2**64 - 1.
        """
        words = self._words_with(index)
        if not 0 <= value < 1 << 64:
            raise OptionError(f"a progress word cannot hold {value}")
        # Before the store: all data must be visible before the word is.
        _barrier()
        words[index] = np.uint64(value)

    def populate(self, offset: int, size_bytes: int) -> None:
        """Fault in the pages of a range: copying into fresh pages is several times slower.

        For blocks without contents. Other threads run meanwhile and may use other ranges.

        Raises:
            OptionError: if the range is not inside the arena.
            OutOfSpaceError: if memory is exhausted. Beyond the memory limit of a container the
                kernel kills the process instead, so a budget has to stay below that limit.
        """
        memory = self._here()
        self._check_range(offset, size_bytes)
        with _explained(f"{size_bytes} bytes of the arena"):
            memory.populate(CONTROL_BYTES + offset, size_bytes)

    def close(self) -> None:
        """Release descriptor and memory; idempotent.

        The memory is unmapped with the last view of it: existing views stay valid.
        """
        memory = self._memory
        self._memory = None
        self._view = None
        self._words = np.zeros(0, np.uint64)
        if memory is not None:
            memory.close_fd()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def _started(cls, memory: SharedMemory) -> Arena:
        header = _header(memory.size_bytes - CONTROL_BYTES)
        # Written before another process can get the descriptor, so no barrier is needed.
        memory.array()[: len(header)] = np.frombuffer(header, np.uint8)
        return cls(memory)

    def _here(self) -> SharedMemory:
        memory = self._memory
        if memory is None:
            raise StateError("the arena is closed")
        if memory.lost:
            raise StateError(
                "this arena belongs to the process that this one was forked from",
                hint="start the process with spawn, and attach to the arena there",
            )
        return memory

    def _check_range(self, offset: int, size_bytes: int) -> None:
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise OptionError(
                f"{size_bytes} bytes at offset {offset} are not in an arena of "
                f"{self.size_bytes} bytes"
            )

    def _words_with(self, index: int) -> npt.NDArray[np.uint64]:
        words = self._words  # a reference of our own: another thread may close the arena meanwhile
        self._here()
        if not 0 <= index < PROGRESS_WORDS:
            raise OptionError(f"there is no progress word {index}: 0 to {PROGRESS_WORDS - 1}")
        return words


def _total_bytes(size_bytes: int) -> int:
    if size_bytes <= 0:
        raise OptionError(f"an arena cannot have {size_bytes} bytes")
    return CONTROL_BYTES + -(-size_bytes // SYSTEM_PAGE_BYTES) * SYSTEM_PAGE_BYTES


def _header(data_bytes: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, PROGRESS_WORDS, CONTROL_BYTES, data_bytes)


# --- Errors -----------------------------------------------------------------------------


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _explanation(error, what) from error


def _explanation(error: OSError, what: str) -> OutOfSpaceError | UnavailableError:
    if error.errno in _NO_ROOM:
        return OutOfSpaceError(f"no memory for {what}: {error.strerror}", hint=_LESS)
    if error.errno in _NO_DESCRIPTORS:
        return UnavailableError(
            f"no file descriptor for {what}: {error.strerror}", hint="raise ulimit -n"
        )
    return UnavailableError(
        f"this machine refuses {what}: {error.strerror}",
        hint="shared memory needs memfd_create: Linux 3.17, glibc 2.27, and a sandbox that "
        "allows it",
    )


def _not_an_arena(fd: int, why: str) -> StateError:
    return StateError(
        f"descriptor {fd} is not an arena: {why}",
        hint="both processes must run the same version of everstep",
    )


# --- Order of loads and stores ----------------------------------------------------------

_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")
_fence = threading.Lock()


def _barrier() -> None:
    """Order all earlier loads and stores before all later ones, as other processes see them."""
    if _IN_ORDER:
        return
    # Release, then acquire: no load or store moves across this pair in either direction.
    with _fence:
        pass
    with _fence:
        pass


# --- Ranges and blocks -----------------------------------------------------------------------


class Block:
    """Page-aligned host memory.

    Attributes:
        view: the memory as bytes.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-max(1, size_bytes) // PAGE_BYTES) * PAGE_BYTES
        memory = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(memory)
        # Direct I/O pins pages: with huge ones reads are 1.6 times faster, measured.
        with contextlib.suppress(OSError, ValueError):
            memory.madvise(_MADV_HUGEPAGE)


class Allocator:
    """First-fit allocator of ranges ``[offset, offset + size)``.

    Live blocks never overlap; a freed block merges with adjacent holes. Not thread-safe: only the
    owner of the arena calls it.

    Args:
        size_bytes: size of the arena, a multiple of the page size.

    Attributes:
        size_bytes: as given.
        used_bytes: total size of all live blocks, rounded up to pages.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._live: dict[int, int] = {}
        # Half-open ranges, by offset; never empty ones, never two that touch.
        self._holes: list[tuple[int, int]] = [(0, size_bytes)]

    def rounded_bytes(self, size_bytes: int) -> int:
        """Round a block size up to full pages, at least one."""
        if size_bytes < 0:
            raise OptionError(f"a block cannot have {size_bytes} bytes")
        return -(-max(1, size_bytes) // PAGE_BYTES) * PAGE_BYTES

    def allocate(self, size_bytes: int) -> int | None:
        """Allocate from the lowest hole that is large enough.

        Returns:
            The offset, or None when no hole is large enough.
        """
        need = self.rounded_bytes(size_bytes)
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= need:
                rest = [(start + need, stop)] if stop - start > need else []
                self._holes[index : index + 1] = rest
                self._live[start] = need
                self.used_bytes += need
                return start
        return None

    def free(self, offset: int) -> None:
        """Free a block; blocks may be freed in any order.

        Raises:
            StateError: if no live block starts at ``offset``, e.g. if it was freed before.
        """
        if offset not in self._live:
            raise StateError(
                f"no live block of the arena starts at offset {offset}: it was freed before, or "
                "never taken"
            )
        size_bytes = self._live.pop(offset)
        self.used_bytes -= size_bytes
        start = offset
        stop = offset + size_bytes
        # Merge with the hole after and the one before: of two holes that touch, none would fit a
        # block of their joint size.
        index = bisect_right(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, stop))


_WASTE = 2  # a block serves requests of at least 1/2 of its size
_SLACK = 8  # the pool may exceed the peak of lent bytes by 1/8


class ReusedMemory:
    """Pool of page-aligned blocks. One thread calls it; any thread may use and release the memory.

    A block returns to the pool when its last view is released, including views by tensors. The pool
    holds at most 9/8 of the peak of lent bytes: before a new block is allocated, free blocks beyond
    that are returned to the system. Without the extra eighth a small request would discard a large
    block that the next request needs.
    """

    def __init__(self) -> None:
        # Finalizers run at arbitrary points, even while a lock is held: SimpleQueue is reentrant.
        self._returned: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._free: list[Block] = []
        self._lent_bytes = self._most_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """Bytes lent now; called by the thread that takes."""
        self._collect()
        return self._lent_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes kept to be lent again; called by the thread that takes."""
        self._collect()
        return sum(block.size_bytes for block in self._free)

    def take(self, size_bytes: int) -> memoryview:
        """Lend ``size_bytes`` of uninitialized memory."""
        self._collect()
        fitting = [
            block
            for block in self._free
            if size_bytes <= block.size_bytes <= _WASTE * max(1, size_bytes)
        ]
        if fitting:
            block = min(fitting, key=lambda block: block.size_bytes)
            self._free.remove(block)
        else:
            self._discard_excess(size_bytes)
            block = Block(size_bytes)
        self._lent_bytes += block.size_bytes
        self._most_bytes = max(self._most_bytes, self._lent_bytes)
        lent = np.frombuffer(block.view, np.uint8)
        # All views of the lent memory refer to this array, so it is finalized after the last of
        # them. Not at exit: threads may still copy.
        weakref.finalize(lent, self._returned.put, block).atexit = False
        return lent.data[:size_bytes]

    def _discard_excess(self, size_bytes: int) -> None:
        """Discard free blocks, smallest first, until a new block fits under the limit."""
        taken_bytes = self._lent_bytes + size_bytes
        most_bytes = max(self._most_bytes, taken_bytes)
        kept_bytes = sum(block.size_bytes for block in self._free)
        self._free.sort(key=lambda block: block.size_bytes, reverse=True)
        while self._free and taken_bytes + kept_bytes > most_bytes + most_bytes // _SLACK:
            kept_bytes -= self._free.pop().size_bytes

    def _collect(self) -> None:
        while True:
            try:
                block = self._returned.get_nowait()
            except queue.Empty:
                return
            self._lent_bytes -= block.size_bytes
            self._free.append(block)
