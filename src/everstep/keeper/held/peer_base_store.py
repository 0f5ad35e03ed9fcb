"""Memory for copies of other nodes' bases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from everstep.arena import PAGE_BYTES
from everstep.arena.memory import CONTROL_BYTES, Arena
from everstep.commit.job.messages import PeerCopyAck, PeerCopyBegin, PeerCopyChunk
from everstep.commit.lineage import BaseId
from everstep.commit.peer_copies import Copy, HeldCopies
from everstep.errors import DamageError, EverstepError, FormatError, OutOfSpaceError
from everstep.format.message_codec import Stored
from everstep.format.records import Marker
from everstep.restore.fetch.peer_copy import PeerCopy, check_files, size_of

_log = logging.getLogger("everstep.keeper")


def copy_memory_bytes(size_bytes: int) -> int:
    """Return the host memory that a copy takes, in bytes."""
    return CONTROL_BYTES + max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


@dataclass(slots=True)
class _Memory:
    """Memory of one copy.

    Attributes:
        marker: marker of the rank's files.
        record: record of the timeline.
        received_bytes: bytes received so far, from the start.
    """

    marker: Marker
    record: bytes
    arena: Arena
    received_bytes: int = 0


class PeerBaseStore:
    """Copies of bases that other ranks' keepers have sent.

    It outlives timelines, and several threads use it.

    Args:
        bound_bytes: limit for all copies together, including those in flight (I10).
    """

    def __init__(self, bound_bytes: int = 0) -> None:
        # Messages of peers, the writing thread and recalls access the copies at the same time.
        self._lock = threading.Lock()
        self._shelf = HeldCopies(bound_bytes)
        self._memories: dict[tuple[int, BaseId], _Memory] = {}

    @property
    def used_bytes(self) -> int:
        """Host memory in use, in bytes."""
        return self._shelf.used_bytes

    @property
    def held(self) -> list[tuple[int, int]]:
        """Rank and step of each complete copy."""
        with self._lock:
            return [(copy.source, copy.base.step) for copy in self._shelf.copies if copy.whole]

    @property
    def bases(self) -> set[BaseId]:
        """Bases of which there is a complete copy."""
        with self._lock:
            return {copy.base for copy in self._shelf.copies if copy.whole}

    def ranks_of(self, base: BaseId) -> set[int]:
        """Return the ranks whose files of a base are held completely."""
        with self._lock:
            return {one.source for one in self._shelf.copies if one.whole and one.base == base}

    def holds_two(self, source: int) -> bool:
        """Return True if two copies of a rank are complete: the older one makes space for the
        next."""
        with self._lock:
            return sum(copy.whole and copy.source == source for copy in self._shelf.copies) > 1

    def whole(self) -> list[tuple[PeerCopy, Arena]]:
        """Return all complete copies, each with its memory."""
        with self._lock:
            found = []
            for copy in self._shelf.copies:
                if copy.whole:
                    one = self._memories[copy.source, copy.base]
                    memory = one.arena.view[: size_of(one.marker)]
                    found.append((PeerCopy(one.marker, one.record, memory), one.arena))
            return found

    def new_start(
        self,
        bound_bytes: int,
        sources: Collection[int],
        recovered: BaseId | None,
        spare: BaseId | None = None,
    ) -> None:
        """Prepare for a new start of the job; see :meth:`.peer_copies.HeldCopies.new_start`."""
        with self._lock:
            self._shelf.bound_bytes = bound_bytes
            self._free(self._shelf.new_start(sources, recovered, spare))

    def passed(self, everywhere: BaseId) -> None:
        """Free copies that a base, now complete on all peers, replaces."""
        with self._lock:
            self._free(self._shelf.passed(everywhere))

    def begun(self, source: int, message: PeerCopyBegin) -> PeerCopyAck:
        """Handle the announcement of a copy; reply with the bytes received so far."""
        marker = message.marker.record
        base = BaseId(marker.timeline, marker.step)
        if marker.rank != source:
            return PeerCopyAck(base, 0, False, "its files belong to another rank")
        with self._lock:
            known = self._memories.get((source, base))
            # The sender was restarted or has lost the reply: it continues after the bytes received
            # so far.
            if known is not None and known.marker == marker and known.record == message.record:
                return self._at(source, base)
            size_bytes = size_of(marker)
            dropped, why = self._shelf.begin(source, base, copy_memory_bytes(size_bytes))
            # Freed before the new memory is allocated: both together could exceed the bound.
            self._free(dropped)
            if why:
                return PeerCopyAck(base, 0, False, why)
            try:
                arena = Arena.create(max(1, size_bytes))
            except EverstepError as error:
                self._shelf.drop(source, base)
                return PeerCopyAck(base, 0, False, error.message)
            self._memories[source, base] = _Memory(marker, message.record, arena)
            return self._at(source, base)

    def part(self, source: int, message: PeerCopyChunk) -> PeerCopyAck:
        """Receive bytes of a copy; bytes out of order are ignored."""
        base = message.base
        data = message.data
        with self._lock:
            one = self._memories.get((source, base))
            if one is None:
                return PeerCopyAck(base, 0, False, "the keeper was replaced and holds no such copy")
            size_bytes = size_of(one.marker)
            end = message.offset + len(data)
            # A repeated or overtaken chunk: the reply tells the sender where to continue.
            if message.offset != one.received_bytes or end > size_bytes or not data:
                return self._at(source, base)
            one.arena.view[message.offset : end] = data
            one.received_bytes = end
            if end < size_bytes:
                return self._at(source, base)
        # Without the lock: digesting a copy takes long, and other sources send meanwhile.
        return self._check(source, base, one)

    def keep(self, marker: Marker, record: bytes, fill: Callable[[memoryview], None]) -> None:
        """Hold a base of this keeper's own rank, like a copy that a peer has sent.

        Args:
            fill: writes the files into the memory, one after the other.

        Raises:
            OutOfSpaceError: there is no space for it.
            DamageError: the bytes written do not have their digests.
        """
        source = marker.rank
        base = BaseId(marker.timeline, marker.step)
        at = self.begun(source, PeerCopyBegin(Stored(marker), record))
        summary = f"the base of step {base.step} is not held in memory"
        if at.problem:
            raise OutOfSpaceError(
                f"{summary}: {at.problem}",
                step=base.step,
                rank=source,
                tier="memory",
                hint="use a larger Budget(host_bytes=), or another method",
            )
        if at.whole:
            return
        with self._lock:
            one = self._memories.get((source, base))
        assert one is not None, "one thread takes bases in, and starts of the job wait for it"
        # Without the lock: the copy takes long, and is not visible to others before it is finished.
        fill(one.arena.view[: size_of(marker)])
        one.received_bytes = size_of(marker)
        at = self._check(source, base, one)
        if at.problem:
            raise DamageError(
                f"{summary}: {at.problem}", step=base.step, rank=source, tier="memory"
            )

    def find(self, source: int, base: BaseId) -> PeerCopy | None:
        """Return the copy of a rank's files of a base, if it is complete."""
        with self._lock:
            copy = self._shelf.find(source, base)
            one = self._memories.get((source, base))
            if copy is None or one is None or not copy.whole:
                return None
            return PeerCopy(one.marker, one.record, one.arena.view[: size_of(one.marker)])

    def _check(self, source: int, base: BaseId, one: _Memory) -> PeerCopyAck:
        """Verify a copy that has arrived completely.

        Needs no lock for the data: only the thread of this source writes to it.
        """
        try:
            check_files(one.marker, one.arena.view[: one.received_bytes])
        except (DamageError, FormatError) as error:
            _log.warning("a copy of %s of rank %d: %s", base, source, error)
            with self._lock:
                self._shelf.drop(source, base)
                self._memories.pop((source, base), None)
            return PeerCopyAck(base, 0, False, f"it arrived damaged: {error.message}")
        with self._lock:
            # A new start may have dropped or replaced the copy while the lock was free.
            if self._memories.get((source, base)) is not one:
                return PeerCopyAck(base, 0, False, "another start of the job has begun")
            self._shelf.finished(source, base)
            return self._at(source, base)

    def _at(self, source: int, base: BaseId) -> PeerCopyAck:
        copy = self._shelf.find(source, base)
        assert copy is not None
        return PeerCopyAck(base, self._memories[source, base].received_bytes, copy.whole, "")

    def _free(self, dropped: list[Copy]) -> None:
        for copy in dropped:
            # Not closed: a training process may be about to map it. The memory is freed with the
            # last reference.
            self._memories.pop((copy.source, copy.base), None)
