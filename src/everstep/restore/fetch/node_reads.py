"""Read files that several ranks of a node need once on that node.

At a start each rank announces its node. All ranks can compute which files each of them needs
(:data:`everstep.commit.job.offers.Needs`), so each knows which files it shares with a neighbour. It
reads those through shared memory (:mod:`.node_reads`), if both read them from the same place.
Headers and files that one rank needs are read as usual.

Shared memory of the ranks of one node while they load a base: each piece of a file that several
of them need is read by one of them, and the others copy it from here.

The files of a base are cut into cells, numbered in the order in which every rank reads them. A cell
can be in one slot only: its number modulo the number of slots. The first rank to reach a cell
claims the slot, reads, and leaves a copy; later ranks take the copy. A slot is reused when all
ranks are past its cell. So ranks stay within the window of each other, and the slowest never waits
for the others.

Nothing depends on another rank: a claim ends with its process, every wait is bounded, and a rank
that gives up waiting reads for itself. The receiver verifies copies as bytes of the file.

============================  =======================================================
of the arena                  content
============================  =======================================================
words 0 to ``RANKS_MAX``      by place of a rank: first cell that it still needs
the words after these         by slot: number of the cell in it, plus one; 0: empty
data: 64 bytes for each slot  source of the bytes, and their range within the cell
data: the next page           name of the start that the memory belongs to
data: the rest                slots
============================  =======================================================
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from everstep.arena import PAGE_BYTES, Arena
from everstep.commit.job import Needs
from everstep.errors import EverstepError, StateError, UnavailableError
from everstep.format import Manifest, digest
from everstep.restore.fetch.sources import Place
from everstep.run import BaseFound, OpenBase
from everstep.seams import Clock, ReadFile
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES
from everstep.seams.locks import Claims, descriptor_of
from everstep.seams.sockets import close_descriptors

CELL_BYTES = 2 << 20
SLOTS = 32
"""Twice as many as a rank reads ahead, so that it never waits for itself."""
RANKS_MAX = 64

# Claims are locks on single bytes of the arena: on byte N for place N, and from here on for slots.
_CLAIM_OF_SLOT = 1 << 20
_ATTEMPT = 1 << 40  # numbers of cells of one attempt
# Greater than any cell, so no rank waits for one that has this progress.
_IDLE = (1 << 64) - 1
_LATE_CELLS = 4  # threads of one rank may overtake each other by this many
_SOURCE = struct.Struct("<16sII")
_SOURCE_STRIDE_BYTES = 64
_NAME_AT = PAGE_BYTES
_NAME_BYTES = 32
_HEAD_BYTES = 2 * PAGE_BYTES
# First pause between two looks at a slot. It is doubled up to _LOOK_S_MAX; once it exceeds _TURN_S,
# a rank no longer leaves the cell to the rank whose turn it is.
_LOOK_S = 0.0005
_TURN_S = 0.001
_LOOK_S_MAX = 0.008

assert SLOTS * _SOURCE_STRIDE_BYTES <= PAGE_BYTES, "all slots are described on one page"


class NodeWindow:
    """One rank's view of the window. Made by :meth:`create` on one rank, and by :meth:`join` on the
    others.

    Args:
        arena: shared memory.
        claims: this process's claims on slots and places.
        place: index of this rank among the ranks of its node.
        count: number of these ranks.
        clock: source of time.
        wait_s: longest wait for another rank.

    Attributes:
        arena, claims, wait_s: as given.
    """

    def __init__(
        self, arena: Arena, claims: Claims, place: int, count: int, clock: Clock, wait_s: float
    ) -> None:
        self.arena = arena
        self.claims = claims
        self._clock = clock
        self._place = place
        self._count = count
        self.wait_s = wait_s
        self._slots = (arena.size_bytes - _HEAD_BYTES) // CELL_BYTES
        self._bytes = np.frombuffer(arena.view, np.uint8)
        # Reading threads change this set and the next one without a lock. A lost update costs
        # another wait.
        self._others: frozenset[int] = frozenset()
        self._stuck: set[int] = set()  # slots that this rank does not wait for any more
        self._attempt = 0
        self._under_way: list[int] = []
        self._past = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # The claim marks this rank as alive: the others wait for it only while it is held.
        claims.take(place)

    @classmethod
    def create(
        cls, name: str, count: int, clock: Clock, wait_s: float, slots: int = SLOTS
    ) -> NodeWindow:
        """Create the memory, for the ranks that get its name.

        Args:
            name: name of this start of the job, at most 32 characters.
            count: number of ranks.
            clock: source of time.
            wait_s: longest wait for another rank.
            slots: at most ``SLOTS``.

        Raises:
            EverstepError: this machine cannot provide it.
        """
        arena = Arena.create(_HEAD_BYTES + slots * CELL_BYTES)
        assert arena.fd is not None
        # Written before the descriptor is announced, since join() compares it.
        arena.view[_NAME_AT : _NAME_AT + _NAME_BYTES] = _encoded(name)
        return cls(arena, _claims(arena), 0, count, clock, wait_s)

    @classmethod
    def join(
        cls, name: str, pid: int, fd: int, place: int, count: int, clock: Clock, wait_s: float
    ) -> NodeWindow:
        """Join the memory that another rank of this node created.

        Args:
            name: as given to :meth:`create`.
            pid: process of that rank.
            fd: its :attr:`fd`.
            place: index of this rank among the ranks of its node.
            count: number of these ranks.
            clock: source of time.
            wait_s: longest wait for another rank.

        Raises:
            EverstepError: it does not exist, or belongs to another start.
        """
        with _explained():
            own = descriptor_of(pid, fd)
        try:
            arena = Arena.attach(own)
        finally:
            close_descriptors([own])
        # The numbers of the process and of the descriptor may have been reused since they were
        # announced.
        if bytes(arena.view[_NAME_AT : _NAME_AT + _NAME_BYTES]) != _encoded(name):
            arena.close()
            raise UnavailableError("the memory belongs to another start")
        return cls(arena, _claims(arena), place, count, clock, wait_s)

    @property
    def fd(self) -> int:
        """Descriptor that the other ranks open."""
        assert self.arena.fd is not None
        return self.arena.fd

    def begin(self) -> None:
        """Start to load a base. Cells of an earlier attempt are not reused, since they may have
        been damaged."""
        with self._lock:
            self._attempt += 1
            self._under_way = []
            self._past = 0
            # A rank given up in the last attempt may have recovered.
            self._others = frozenset(range(self._count)) - {self._place}
            self._stuck.clear()
            self._publish()

    def end(self) -> None:
        """Announce that this rank needs nothing until it begins again."""
        self.arena.set_progress(self._place, _IDLE)

    def close(self) -> None:
        """Release the memory; pending reads end soon, by reading for themselves."""
        # First, so that waiting threads end before the arena is released.
        self._closed.set()
        # A forked child may hold the same file description. Closing it here would then not release
        # the lock.
        self.claims.give(self._place)
        self.claims.close()
        self.arena.close()

    def take(
        self,
        cell: int,
        source: bytes,
        begin: int,
        buffer: memoryview,
        size_bytes: int,
        read: Callable[[memoryview], int],
    ) -> int:
        """Fill ``buffer`` with bytes of a cell; return how many.

        Args:
            cell: number of the cell.
            source: 16 bytes that name the file and the place that it is read from.
            begin: offset in the cell.
            buffer: target.
            size_bytes: bytes of the buffer before the file ends.
            read: fills a buffer from the file itself.

        Raises:
            OSError: from ``read``.
        """
        # Cells of a later attempt are greater than all earlier ones, so one comparison orders them.
        at = self._attempt * _ATTEMPT + cell
        with self._under(cell):
            try:
                found = self._shared(at, source, begin, buffer[:size_bytes])
                if found:
                    return size_bytes
                if found is None:
                    return read(buffer)
                return self._read(at, source, begin, buffer, size_bytes, read)
            except StateError:  # closed concurrently
                return read(buffer)

    def _shared(self, at: int, source: bytes, begin: int, buffer: memoryview) -> bool | None:
        """Wait for a cell. Return True if the buffer has its bytes; False if this rank claimed the
        slot and has to read; None if it reads for itself."""
        slot = at % self._slots
        deadline_s = self._clock.monotonic_s() + self.wait_s
        look_s = _LOOK_S
        while not self._closed.is_set():
            held = self.arena.progress(RANKS_MAX + slot) - 1
            if held == at:
                # A copy that does not fit is not awaited: this rank reads for itself and leaves no
                # copy.
                return self._copied(at, source, begin, buffer) or None
            if held > at:  # the other ranks are past it
                return None
            waiting = self._ranks_before(held)
            mine = not self._is_anothers(at, look_s)
            if not waiting and mine and self.claims.take(_CLAIM_OF_SLOT + slot):
                # Another rank may have filled the slot between the look and the claim.
                if self.arena.progress(RANKS_MAX + slot) - 1 == held:
                    return False
                self.claims.give(_CLAIM_OF_SLOT + slot)
                continue
            # A reader that was too slow once is not awaited again in this attempt.
            if slot in self._stuck:
                return None
            if self._clock.monotonic_s() >= deadline_s:
                self._others -= waiting  # they are stuck, or need none of this
                if not waiting:
                    self._stuck.add(slot)  # its reader is stuck
                return None
            self._closed.wait(look_s)
            look_s = min(2 * look_s, _LOOK_S_MAX)
        return None

    def _copied(self, at: int, source: bytes, begin: int, buffer: memoryview) -> bool:
        """Copy a cell from its slot; return True if it had all wanted bytes and kept them during
        the copy."""
        slot = at % self._slots
        named, low, high = _SOURCE.unpack_from(self.arena.view, slot * _SOURCE_STRIDE_BYTES)
        # The slot may have the same cell from another place, or only the range that its reader
        # needed.
        if named != source or not low <= begin <= begin + buffer.nbytes <= high:
            return False
        data = self._data(slot)[begin : begin + buffer.nbytes]
        np.copyto(np.frombuffer(buffer, np.uint8), data)
        # The slot may have been reused during the copy: the word is compared after it.
        return self.arena.progress(RANKS_MAX + slot) == at + 1

    def _read(
        self,
        at: int,
        source: bytes,
        begin: int,
        buffer: memoryview,
        size_bytes: int,
        read: Callable[[memoryview], int],
    ) -> int:
        """Read, and leave a copy in the slot that this rank has claimed."""
        slot = at % self._slots
        word = RANKS_MAX + slot
        try:
            # A short read is not shared. Its reader reports the file as too short.
            got = read(buffer)
            if got >= size_bytes:
                # Empty while it is written, so that no reader takes a mixture of two cells.
                self.arena.set_progress(word, 0)
                data = np.frombuffer(buffer[:size_bytes], np.uint8)
                np.copyto(self._data(slot)[begin : begin + size_bytes], data)
                about = slot * _SOURCE_STRIDE_BYTES
                _SOURCE.pack_into(self.arena.view, about, source, begin, begin + size_bytes)
                # Published last: data and source are complete before readers see the cell.
                self.arena.set_progress(word, at + 1)
            return got
        finally:
            # Also after an error: the next rank can then claim the slot and read.
            self.claims.give(_CLAIM_OF_SLOT + slot)

    def _data(self, slot: int) -> npt.NDArray[np.uint8]:
        first = _HEAD_BYTES + slot * CELL_BYTES
        return self._bytes[first : first + CELL_BYTES]

    def _is_anothers(self, at: int, look_s: float) -> bool:
        """Return True if it is another rank's turn: ranks read by turns while all are near."""
        turn = at % self._count
        if turn not in self._others or look_s > _TURN_S:
            return False
        # A rank in another attempt, or past this cell, will not read it.
        return at - at % _ATTEMPT <= self.arena.progress(turn) <= at

    def _ranks_before(self, held: int) -> frozenset[int]:
        """Return the places of ranks that may still need the cell ``held``."""
        if held < 0:
            return frozenset()
        waiting = frozenset(one for one in self._others if self.arena.progress(one) <= held)
        # The kernel releases the claim of a process however it ends, so the next look notices a
        # killed rank.
        dead = frozenset(one for one in waiting if not self.claims.taken(one))
        self._others -= dead
        return waiting - dead

    @contextlib.contextmanager
    def _under(self, cell: int) -> Iterator[None]:
        """Publish that this rank needs a cell, and afterwards that it does not."""
        with self._lock:
            self._under_way.append(cell)
            self._past = max(self._past, cell)
            self._publish()
        try:
            yield
        finally:
            with self._lock:
                if cell in self._under_way:  # it may belong to an abandoned attempt
                    self._under_way.remove(cell)
                self._publish()

    def _publish(self) -> None:
        # Threads do not start in the order of the cells: one may still need a cell that is a little
        # before the lowest one under way.
        low = min(self._under_way, default=self._past)
        low = max(0, low - min(_LATE_CELLS, self._slots // 4))
        with contextlib.suppress(StateError):  # closed concurrently
            self.arena.set_progress(self._place, self._attempt * _ATTEMPT + low)


def _claims(arena: Arena) -> Claims:
    """Return the claims of this process on slots and places."""
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


_log = logging.getLogger("everstep")
_WAIT_S_MAX = 5.0


class NodeStart:
    """Ranks of this node at a start of their job.

    Args:
        rank: this rank.
        names: name of each rank's node, by rank.
        clock: source of time.
        local: this rank's disk is local to its node: files on it are not shared.
        timeout_s: time limit of a transfer; at most a quarter of it is spent waiting.
    """

    def __init__(
        self, rank: int, names: Sequence[str], clock: Clock, *, local: bool, timeout_s: float
    ) -> None:
        # The window has RANKS_MAX progress words. Any further ranks read by themselves.
        same_node = [other for other, name in enumerate(names) if name == names[rank]]
        self._ranks = same_node[:RANKS_MAX]
        self._rank = rank
        self._clock = clock
        self._local = local
        # The wait is part of a read with that time limit. It must end well before, or a slow
        # neighbour would be reported as hung storage.
        self._wait_s = min(_WAIT_S_MAX, timeout_s / 4)
        self._window: NodeWindow | None = None

    def offer(self, name: str) -> tuple[str, int, int] | None:
        """Return name, process and descriptor to announce, if this rank creates the memory;
        otherwise None.

        Args:
            name: name of this start, at most 32 characters.
        """
        if len(self._ranks) < 2 or self._ranks[0] != self._rank:
            return None
        try:
            self._window = NodeWindow.create(name, len(self._ranks), self._clock, self._wait_s)
        except EverstepError as error:
            # Sharing only saves reads. Without the memory each rank reads by itself.
            _log.debug("ranks of this node do not share reads: %s", error)
            return None
        return name, os.getpid(), self._window.fd

    def join(self, announced: Sequence[Mapping[str, Any]], needs: Needs) -> NodeReads | None:
        """Join the memory of the node; None if this rank does not share reads.

        Args:
            announced: by rank: ``"window"`` as from :meth:`offer`.
            needs: which ranks' files a rank reads.
        """
        if len(self._ranks) < 2 or self._rank not in self._ranks:
            return None
        window = announced[self._ranks[0]]["window"]
        if window is None:
            return None
        if self._window is None:
            name, pid, fd = window
            place = self._ranks.index(self._rank)
            count = len(self._ranks)
            try:
                self._window = NodeWindow.join(
                    name, int(pid), int(fd), place, count, self._clock, self._wait_s
                )
            except EverstepError as error:
                # The other ranks wait for a place only while it is claimed, so this rank delays
                # none of them.
                _log.debug("this rank does not share reads: %s", error)
                return None
        return NodeReads(self._window, self._ranks, needs, local=self._local)

    def close(self) -> None:
        """Release the memory, after this rank has restored. Idempotent."""
        if self._window is not None:
            self._window.close()


@dataclass(eq=False)
class NodeReads:
    """One rank's reads through the memory of its node.

    Attributes:
        window: shared memory.
        ranks: ranks of this node.
        needs: which ranks' files a rank reads.
        local: files on this rank's disk are not shared.
    """

    window: NodeWindow
    ranks: Sequence[int]
    needs: Needs
    _: KW_ONLY
    local: bool
    _cells: dict[str, int] = field(default_factory=dict, init=False)
    _common: set[int] = field(default_factory=set, init=False)

    def needs_alone(self, rank: int, manifest: Manifest) -> Collection[int]:
        """Return the ranks whose files this rank reads, and no other rank of its node."""
        return [one for one in self.needs(rank, manifest) if self._readers(one, manifest) < 2]

    def begin(self, base: BaseFound, places: Mapping[int, Place]) -> bool:
        """Prepare to read a base from these places.

        Returns:
            True if some of it may be exchanged with other ranks.
        """
        manifest = base.manifest
        assert manifest is not None
        # Without a name, ranks cannot tell that they read the same files. Files on a local disk are
        # left out because reading them costs less than waiting for each other.
        self._common = {
            number
            for number, place in places.items()
            if place.name
            and not (self.local and place.source.tier == "disk")
            and self._readers(number, manifest) > 1
        }
        self._cells = {}
        cells = 0
        # All files are counted, including those that are not shared: the numbers of the cells must
        # be equal on all ranks.
        for marker in manifest.markers:
            for record in marker.files:
                self._cells[record.name] = cells
                cells += -(-record.length // CELL_BYTES)
        if not self._common:
            # Without this the other ranks would keep their cells for this one until they give up
            # waiting.
            self.window.end()
            return False
        self.window.begin()
        return True

    def share(self, opened: OpenBase, place: Place) -> None:
        """Read the files of a rank through the memory, if another rank of this node needs them."""
        if opened.marker.rank in self._common:
            opened.shards = [
                one._replace(file=self._file(one.file, place, one.path, one.header.room_bytes))
                for one in opened.shards
            ]

    def end(self) -> None:
        """Announce that this rank reads nothing more of the base."""
        self.window.end()

    def _readers(self, number: int, manifest: Manifest) -> int:
        """Return how many ranks of this node read the files of rank ``number``."""
        return sum(number in self.needs(rank, manifest) for rank in self.ranks)

    def _file(self, file: ReadFile, place: Place, path: PurePath, body_at: int) -> ReadFile:
        # The place is part of the name, as a copy elsewhere may be damaged while this one is
        # intact.
        source = bytes.fromhex(digest(f"{place.source.tier} {place.name} {path}".encode()))
        return _NodeFile(file, self.window, source, body_at, self._cells[path.name])


@dataclass(eq=False)
class _NodeFile:
    """File whose body is read in cells.

    Attributes:
        body_at: offset of the body.
        first: number of its first cell.
    """

    file: ReadFile
    window: NodeWindow
    source: bytes
    body_at: int
    first: int

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        begin = offset - self.body_at
        # Unaligned reads are of small objects, which no other rank needs.
        if begin < 0 or begin % DIRECT_ALIGNMENT_BYTES or buffer.nbytes % DIRECT_ALIGNMENT_BYTES:
            return self.file.read_into(buffer, offset)
        done = 0
        while done < buffer.nbytes:
            cell, at = divmod(begin + done, CELL_BYTES)
            chunk = buffer[done : done + CELL_BYTES - at]
            # Buffers are padded to full pages, which may reach beyond the end of the file.
            available = min(chunk.nbytes, self.size_bytes - offset - done)
            if available <= 0:
                break
            got = self._read_chunk(cell, at, chunk, available, offset + done)
            done += got
            if got < chunk.nbytes:
                break
        return done

    def close(self) -> None:
        self.file.close()

    def _read_chunk(
        self, cell: int, at: int, chunk: memoryview, available: int, offset: int
    ) -> int:
        return self.window.take(
            self.first + cell,
            self.source,
            at,
            chunk,
            available,
            lambda buffer: self.file.read_into(buffer, offset),
        )
