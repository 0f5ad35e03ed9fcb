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
"""

from __future__ import annotations

import contextlib
import errno
import platform
import struct
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from everstep.errors import OptionError, OutOfSpaceError, StateError, UnavailableError
from everstep.seams.memory import PAGE_BYTES, SharedMemory, sealed_bytes

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

assert CONTROL_BYTES % PAGE_BYTES == 0, "the data starts on a page"
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
        if total_bytes <= CONTROL_BYTES or total_bytes % PAGE_BYTES:
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
    return CONTROL_BYTES + -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


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
