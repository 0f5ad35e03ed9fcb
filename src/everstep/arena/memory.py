"""Memory that several processes share and that mirrors files.

One process makes an arena and hands its descriptor to others, which attach. What lies in the
data at some offset is written to a file from there, as it is. In front of the data is the
control area:

=================  =====================================================================
bytes              content
=================  =====================================================================
0 to 32            magic, version, number of progress words, offset and size of the data
4096 to 36864      512 progress words of 8 bytes, each in a cache line (64 bytes) of its own
65536              the data, page-aligned
=================  =====================================================================

A progress word says how far something has come ("all of batch 17 has been copied"). One
process writes it, others read it, without a lock. That is right because

- a word is one aligned load or store of 8 bytes (NumPy's, on a C ``uint64``), which no
  reader ever sees half done, and Python itself neither moves nor merges them;
- who sees a word also sees all data written before it. x86 keeps stores in their order, and
  loads in theirs, across processes; other machines need not, and Python promises nothing
  there, so on those a barrier goes before each store and after each load. It is made of a
  lock, given back and taken again, which is one on ARM and POWER.

Copies that a device makes are outside this: whoever has waited for them in this process sets the
word (:mod:`everstep.capture.lanes.cuda`), or the device itself does, with a fence before it
(:meth:`Arena.progress_address`).
"""

from __future__ import annotations

import contextlib
import errno
import platform
import struct
import threading
from collections.abc import Iterator
from types import TracebackType

import numpy as np
import numpy.typing as npt

from everstep.errors import OptionError, OutOfSpaceError, StateError, UnavailableError
from everstep.seams.memory import PAGE_BYTES, SharedMemory, sealed_bytes

__all__ = ["CONTROL_BYTES", "PROGRESS_WORDS", "Arena"]

CONTROL_BYTES = 65536
PROGRESS_WORDS = 512

_MAGIC = b"EVSARENA"
_VERSION = 1
_HEADER = struct.Struct("=8sIIQQ")  # native: all who attach are on one machine
_WORDS_OFFSET = 4096
_WORD_STRIDE_BYTES = 64
_NO_ROOM = (errno.ENOMEM, errno.EFBIG, errno.ENOSPC, errno.EFAULT)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_LESS = (
    "a smaller Budget(host_bytes=...), or more memory for this job (container or job limit, "
    "ulimit -v, ulimit -f)"
)

assert CONTROL_BYTES % PAGE_BYTES == 0, "the data starts on a page"
assert _WORDS_OFFSET + PROGRESS_WORDS * _WORD_STRIDE_BYTES <= CONTROL_BYTES


class Arena:
    """Shared memory of a fixed size: data, and progress words. See the module's text.

    Made by :meth:`create`, :meth:`attach` or :meth:`anonymous`. All methods may be called
    from any thread. Pages come when they are written to, or with :meth:`populate`; until then
    they read as zeros and take no memory.

    A forked child (a worker of a data loader) has no part in the arena: it neither keeps the
    memory alive nor can it use it.

    Attributes:
        size_bytes: of the data, a multiple of the page.
        words_count: number of progress words.
    """

    words_count = PROGRESS_WORDS

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
        """Memory that other processes can attach to, through its descriptor.

        Its size is sealed: no holder of the descriptor can shrink it, which would kill
        whoever touches what is gone.

        Args:
            size_bytes: of the data, rounded up to whole pages.

        Raises:
            OptionError: for no bytes at all.
            OutOfSpaceError: for more than the system gives, with the number.
            UnavailableError: where there is no ``memfd_create``, or descriptors have run out.
        """
        total_bytes = _total_bytes(size_bytes)
        with _explained(f"an arena of {size_bytes} bytes"):
            memory = SharedMemory.create("everstep-arena", total_bytes)
        return cls._started(memory)

    @classmethod
    def anonymous(cls, size_bytes: int) -> Arena:
        """The same for this process alone, without a descriptor; works on every platform.

        Raises:
            OptionError: for no bytes at all.
            OutOfSpaceError: for more than the system gives, with the number.
        """
        total_bytes = _total_bytes(size_bytes)
        with _explained(f"an arena of {size_bytes} bytes"):
            memory = SharedMemory(total_bytes, fd=None)
        return cls._started(memory)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Maps the arena that another process made.

        Args:
            fd: its descriptor; it stays the caller's, who should close it.

        Raises:
            StateError: for anything that is not an arena of this version, whole and sealed.
            OutOfSpaceError: when there is no room for the mapping, with the number.
            UnavailableError: when descriptors have run out.
        """
        try:
            total_bytes = sealed_bytes(fd)
        except (OSError, ValueError, OverflowError) as error:
            raise _not_an_arena(fd, f"it is no memfd ({error})") from error
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
        found = _HEADER.unpack(memory.array()[: _HEADER.size].tobytes())
        wrong = _difference(found, total_bytes - CONTROL_BYTES)
        if wrong:
            memory.close_fd()
            raise _not_an_arena(fd, wrong)
        return cls(memory)

    @property
    def fd(self) -> int | None:
        """The descriptor, to be passed on; None if anonymous. Stays the arena's."""
        return self._here().fd

    @property
    def taken_bytes(self) -> int:
        """Memory that its pages have taken so far; 0 once it is closed."""
        return 0 if self._memory is None else self._memory.taken_bytes

    @property
    def view(self) -> memoryview:
        """The data as writable bytes; what is made of it keeps the memory mapped."""
        view = self._view
        self._here()
        assert view is not None, "there is a view as long as there is memory"
        return view

    @property
    def address(self) -> int:
        """Where the data starts; page-aligned. Keep the arena open while it is in use."""
        return self._here().address + CONTROL_BYTES

    def progress(self, index: int) -> int:
        """Reads a progress word; what was written before it was set can be read now."""
        words = self._words_with(index)
        value: int = words.item(index)
        _barrier()
        return value

    def set_progress(self, index: int, value: int) -> None:
        """Sets a progress word, after everything that was written before.

        Args:
            value: 0 to 2**64 - 1.
        """
        words = self._words_with(index)
        if not 0 <= value < 1 << 64:
            raise OptionError(f"a progress word cannot hold {value}")
        _barrier()
        words[index] = np.uint64(value)

    def progress_address(self, index: int) -> int:
        """Where a progress word is, for a device that writes it."""
        self._words_with(index)
        return self._here().address + _WORDS_OFFSET + index * _WORD_STRIDE_BYTES

    def populate(self, offset: int, size_bytes: int) -> None:
        """Takes the pages of a range now: copying into fresh ones is several times slower.

        For blocks that hold nothing yet. Other threads run meanwhile, and may touch other
        ranges.

        Raises:
            OptionError: for a range that is not in the arena.
            OutOfSpaceError: when memory has run out. Past the limit of a container the
                system ends the process instead, so a budget has to be below that.
        """
        memory = self._here()
        self._check_range(offset, size_bytes)
        with _explained(f"{size_bytes} bytes of the arena"):
            memory.populate(CONTROL_BYTES + offset, size_bytes)

    def discard(self, offset: int, size_bytes: int) -> None:
        """Gives the pages of a range back to the system; the range reads as zeros.

        For all processes at once. Not for memory that is registered with a device, which
        would keep the old pages. A page of which only a part is in the range stays taken.

        Raises:
            OptionError: for a range that is not in the arena.
        """
        memory = self._here()
        self._check_range(offset, size_bytes)
        with _explained(f"{size_bytes} bytes of the arena"):
            memory.remove(CONTROL_BYTES + offset, size_bytes)

    def close(self) -> None:
        """Lets go of descriptor and memory; may be called again.

        The mapping ends with the last view of it: those that are still in use stay valid.
        """
        memory = self._memory
        self._memory = None
        self._view = None
        self._words = np.zeros(0, np.uint64)
        if memory is not None:
            memory.close_fd()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @classmethod
    def _started(cls, memory: SharedMemory) -> Arena:
        data_bytes = memory.size_bytes - CONTROL_BYTES
        header = _HEADER.pack(_MAGIC, _VERSION, PROGRESS_WORDS, CONTROL_BYTES, data_bytes)
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
        words = self._words  # stays mapped, though another thread may close the arena now
        self._here()
        if not 0 <= index < PROGRESS_WORDS:
            raise OptionError(f"there is no progress word {index}: 0 to {PROGRESS_WORDS - 1}")
        return words


def _total_bytes(size_bytes: int) -> int:
    if size_bytes <= 0:
        raise OptionError(f"an arena cannot have {size_bytes} bytes")
    return CONTROL_BYTES + -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _difference(found: tuple[bytes, int, int, int, int], data_bytes: int) -> str | None:
    """What in the header of the control area is not as it should be."""
    magic, version, *sizes = found
    if magic != _MAGIC:
        return "its first bytes are not those of one"
    if version != _VERSION:
        return f"it has version {version}, this everstep knows {_VERSION}"
    if sizes != [PROGRESS_WORDS, CONTROL_BYTES, data_bytes]:
        return f"its sizes contradict each other: {sizes}, {data_bytes} bytes of data"
    return None


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
    """Keeps what comes before it before what comes after it, as other processes see it."""
    if _IN_ORDER:
        return
    # Given back by the first, taken by the second: nothing passes that pair either way.
    with _fence:
        pass
    with _fence:
        pass
