"""Memory that the ranks of one node share while they load a base: each part of a file that several
of them need is read by one, and the others take it from here.

The files of a base are cut into cells, numbered in the order in which every rank reads them. A cell
has one slot that it can be in: its number modulo the number of slots. Whoever comes first to a cell
claims the slot, reads, and leaves a copy; whoever comes later takes that. A slot is used anew when
all ranks are past what it holds. So ranks keep together within the window, and the slowest never
waits for the others.

Nothing depends on another rank: a claim ends with the process that has it, every wait is bounded,
and who gives up waiting reads for itself. What is taken is checked by whoever takes it, as bytes of
the file (:mod:`.loading`).

============================  =======================================================
of the arena                  content
============================  =======================================================
words 0 to ``RANKS_MAX``      by place of a rank: before which cell it needs nothing
the words behind              by slot: number of the cell in it, plus one; 0: none
data: 64 bytes for each slot  source of the bytes, and which of the cell they are
data: the next page           name of the start that the memory is for
data: the rest                slots
============================  =======================================================
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from everstep.arena import PAGE_BYTES
from everstep.arena.memory import Arena
from everstep.errors import StateError, UnavailableError
from everstep.seams.clock import Clock
from everstep.seams.files.claims import Claims, descriptor_of
from everstep.seams.network.sockets import close_descriptors

__all__ = ["CELL_BYTES", "RANKS_MAX", "SLOTS", "NodeWindow"]

CELL_BYTES = 2 << 20
SLOTS = 32
"""More than a rank reads ahead, twice over: it never waits for itself."""
RANKS_MAX = 64

_CLAIM_OF_SLOT = 1 << 20
_ATTEMPT = 1 << 40  # cells of one attempt
_IDLE = (1 << 64) - 1
_LATE_CELLS = 4  # threads of one rank may overtake each other by so many
_SOURCE = struct.Struct("<16sII")
_SOURCE_STRIDE_BYTES = 64
_NAME_AT = PAGE_BYTES
_NAME_BYTES = 32
_HEAD_BYTES = 2 * PAGE_BYTES
_LOOK_S = 0.0005
_TURN_S = 0.001
_LOOK_S_MAX = 0.008

assert SLOTS * _SOURCE_STRIDE_BYTES <= PAGE_BYTES, "all slots are described on one page"


class NodeWindow:
    """One rank's part in it. Made by :meth:`create` on one rank, and by :meth:`join` on the others.

    Args:
        place: of this rank among the ranks of its node.
        count: of these.
        wait_s: for which another rank is waited for at most.

    Attributes:
        read_bytes: that this rank has read of what is shared.
        taken_bytes: that it has taken from others.
    """

    def __init__(
        self, arena: Arena, claims: Claims, place: int, count: int, clock: Clock, wait_s: float
    ) -> None:
        self._arena = arena
        self._claims = claims
        self._clock = clock
        self._place = place
        self._count = count
        self._wait_s = wait_s
        self._slots = (arena.size_bytes - _HEAD_BYTES) // CELL_BYTES
        self._bytes = np.frombuffer(arena.view, np.uint8)
        self._others = self._all_others = frozenset(range(count)) - {place}
        self._stuck: set[int] = set()  # slots that are waited for no more
        self._attempt = 0
        self._under_way: list[int] = []
        self._past = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.read_bytes = self.taken_bytes = 0
        claims.take(place)  # as long as it has that, the others wait for it

    @classmethod
    def create(
        cls, name: str, count: int, clock: Clock, wait_s: float, slots: int = SLOTS
    ) -> NodeWindow:
        """New memory, for the ranks that are told its name.

        Args:
            name: of this start of the job, of at most 32 characters.
            slots: at most ``SLOTS``.

        Raises:
            EverstepError: this machine does not give any.
        """
        arena = Arena.create(_HEAD_BYTES + slots * CELL_BYTES)
        assert arena.fd is not None
        arena.view[_NAME_AT : _NAME_AT + _NAME_BYTES] = _encoded(name)
        return cls(arena, _claims(arena), 0, count, clock, wait_s)

    @classmethod
    def join(
        cls, name: str, pid: int, fd: int, place: int, count: int, clock: Clock, wait_s: float
    ) -> NodeWindow:
        """The memory that another rank of this node has made.

        Args:
            name: as it was given to :meth:`create`.
            pid: of that rank's process.
            fd: its :attr:`fd`.

        Raises:
            EverstepError: it is not there, or is another one.
        """
        with _explained():
            own = descriptor_of(pid, fd)
        try:
            arena = Arena.attach(own)
        finally:
            close_descriptors([own])
        if bytes(arena.view[_NAME_AT : _NAME_AT + _NAME_BYTES]) != _encoded(name):
            arena.close()
            raise UnavailableError("the memory is that of another start")
        return cls(arena, _claims(arena), place, count, clock, wait_s)

    @property
    def fd(self) -> int:
        """The descriptor that the others open."""
        assert self._arena.fd is not None
        return self._arena.fd

    def begin(self) -> None:
        """This rank is going to load a base. Cells of an earlier attempt are none of this one's:
        they may have been damaged."""
        with self._lock:
            self._attempt += 1
            self._under_way = []
            self._past = 0
            self._others = self._all_others
            self._stuck.clear()
            self._tell()

    def end(self) -> None:
        """This rank needs nothing, until it begins again."""
        self._arena.set_progress(self._place, _IDLE)

    def close(self) -> None:
        """Lets go; what is under way ends soon, by reading for itself."""
        self._closed.set()
        self._claims.give(self._place)
        self._claims.close()
        self._arena.close()

    def take(
        self,
        cell: int,
        source: bytes,
        begin: int,
        buffer: memoryview,
        size_bytes: int,
        read: Callable[[memoryview], int],
    ) -> int:
        """Fills ``buffer`` with bytes of a cell, from ``begin`` on; returns how many.

        Args:
            source: 16 bytes that name the file and the place that it is read from.
            size_bytes: of the buffer's, how many there are before the file ends.
            read: does the same, without anybody's help.

        Raises:
            OSError: of ``read``.
        """
        at = self._attempt * _ATTEMPT + cell
        with self._under(cell):
            try:
                found = self._shared(at, source, begin, buffer[:size_bytes])
                if found:
                    with self._lock:
                        self.taken_bytes += size_bytes
                    return size_bytes
                if found is None:
                    return read(buffer)
                return self._read(at, source, begin, buffer, size_bytes, read)
            except StateError:  # closed meanwhile
                return read(buffer)

    def _shared(self, at: int, source: bytes, begin: int, buffer: memoryview) -> bool | None:
        """Waits for a cell: true when the buffer has what was wanted of it; false when the slot is
        claimed, and this rank has to read; None where it reads for itself."""
        slot = at % self._slots
        deadline_s = self._clock.monotonic_s() + self._wait_s
        look_s = _LOOK_S
        while not self._closed.is_set():
            held = self._arena.progress(RANKS_MAX + slot) - 1
            if held == at:
                return self._copied(slot, source, begin, buffer) or None
            if held > at:  # the others have gone on
                return None
            behind = self._behind(held)
            mine = not self._is_anothers(at, look_s)
            if not behind and mine and self._claims.take(_CLAIM_OF_SLOT + slot):
                if self._arena.progress(RANKS_MAX + slot) - 1 == held:
                    return False
                self._claims.give(_CLAIM_OF_SLOT + slot)
                continue
            if slot in self._stuck:
                return None
            if self._clock.monotonic_s() >= deadline_s:
                self._others -= behind  # they do not get on, or do not need any of this
                if not behind:
                    self._stuck.add(slot)  # nor does whoever reads this one
                return None
            self._closed.wait(look_s)
            look_s = min(2 * look_s, _LOOK_S_MAX)
        return None

    def _copied(self, slot: int, source: bytes, begin: int, buffer: memoryview) -> bool:
        """Whether the slot had all that was wanted, and went on having it."""
        word = self._arena.progress(RANKS_MAX + slot)
        named, low, high = _SOURCE.unpack_from(self._arena.view, slot * _SOURCE_STRIDE_BYTES)
        if named != source or not low <= begin <= begin + buffer.nbytes <= high:
            return False
        data = self._data(slot)[begin : begin + buffer.nbytes]
        np.copyto(np.frombuffer(buffer, np.uint8), data)
        return self._arena.progress(RANKS_MAX + slot) == word

    def _read(
        self,
        at: int,
        source: bytes,
        begin: int,
        buffer: memoryview,
        size_bytes: int,
        read: Callable[[memoryview], int],
    ) -> int:
        """Reads, and leaves a copy in the slot, which this rank has claimed."""
        slot = at % self._slots
        word = RANKS_MAX + slot
        try:
            got = read(buffer)
            if got >= size_bytes:
                self._arena.set_progress(word, 0)
                data = np.frombuffer(buffer[:size_bytes], np.uint8)
                np.copyto(self._data(slot)[begin : begin + size_bytes], data)
                about = slot * _SOURCE_STRIDE_BYTES
                _SOURCE.pack_into(self._arena.view, about, source, begin, begin + size_bytes)
                self._arena.set_progress(word, at + 1)
                with self._lock:
                    self.read_bytes += size_bytes
            return got
        finally:
            self._claims.give(_CLAIM_OF_SLOT + slot)

    def _data(self, slot: int) -> npt.NDArray[np.uint8]:
        first = _HEAD_BYTES + slot * CELL_BYTES
        return self._bytes[first : first + CELL_BYTES]

    def _is_anothers(self, at: int, look_s: float) -> bool:
        """Whether it is another rank's turn: they read by turns, if all are there."""
        turn = at % self._count
        if turn not in self._others or look_s > _TURN_S:
            return False
        return at - at % _ATTEMPT <= self._arena.progress(turn) <= at

    def _behind(self, held: int) -> frozenset[int]:
        """Places of ranks that may still need the cell ``held``."""
        if held < 0:
            return frozenset()
        waiting = frozenset(one for one in self._others if self._arena.progress(one) <= held)
        gone = frozenset(one for one in waiting if not self._claims.taken(one))
        self._others -= gone
        return waiting - gone

    @contextlib.contextmanager
    def _under(self, cell: int) -> Iterator[None]:
        """Tells the others that this rank still needs a cell, and then that it does not."""
        with self._lock:
            self._under_way.append(cell)
            self._past = max(self._past, cell)
            self._tell()
        try:
            yield
        finally:
            with self._lock:
                if cell in self._under_way:  # not of an attempt that was given up
                    self._under_way.remove(cell)
                self._tell()

    def _tell(self) -> None:
        low = min(self._under_way, default=self._past)
        low = max(0, low - min(_LATE_CELLS, self._slots // 4))
        with contextlib.suppress(StateError):  # closed meanwhile
            self._arena.set_progress(self._place, self._attempt * _ATTEMPT + low)


def _claims(arena: Arena) -> Claims:
    """Claims of this process on slots and places."""
    assert arena.fd is not None
    with _explained():
        return Claims(descriptor_of(os.getpid(), arena.fd))


def _encoded(name: str) -> bytes:
    return name.encode("ascii").ljust(_NAME_BYTES)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"no memory is shared on this node: {error.strerror}") from error
