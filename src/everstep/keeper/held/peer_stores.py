"""Memory for copies of other nodes' bases.

Memory for steps of other ranks' gradient logs, next to their bases.

Bases of this rank that live in memory: that of its keeper, and that of the next node's keeper. Such
a base is copied out of the arena into memory of its own, compared with its digests, and then sent
to the peer like a durable one. At most two exist: the newest that is complete on all ranks (I10),
and the next one, which is in flight. The next capture waits for that one, and training for the next
capture, as in GEMINI (TierCheck, section 2.3). A base in memory counts for a resume only if all
ranks can read their shards (I7).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from everstep.arena import CONTROL_BYTES, PAGE_BYTES, Allocator, Arena
from everstep.commit import BaseId
from everstep.commit.job.messages import (
    PeerCopyAck,
    PeerCopyBegin,
    PeerCopyChunk,
    PeerLogAck,
    PeerLogBegin,
    PeerLogChunk,
)
from everstep.commit.peer_copies import Copy, HeldCopies, HeldLogCopies, LogCopy
from everstep.errors import (
    DamageError,
    DeadlineError,
    EverstepError,
    FormatError,
    OutOfSpaceError,
    StateError,
)
from everstep.format import BasePlan, Marker, digest, timeline_dir
from everstep.format.message_codec import Stored
from everstep.format.names import TIMELINE_RECORD
from everstep.format.reader import read_record_bytes
from everstep.format.writer import Written, digest_shard
from everstep.restore.fetch import PackedSteps, PeerLog
from everstep.restore.fetch.held import PeerCopy, check_files, read_pack, size_of
from everstep.seams import Clock, FileSystem
from everstep.seams.progress import ProgressSink
from everstep.state.layout import Body
from everstep.tiers import storage_errors

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


@dataclass(slots=True)
class _InFlight:
    """Steps of one rank that are in flight.

    Attributes:
        begun: their announcement.
        offset: offset of their memory in the arena.
        received_bytes: bytes received so far, from the start.
    """

    begun: PeerLogBegin
    offset: int
    received_bytes: int = 0


class PeerLogStore:
    """Steps of logs that other ranks' keepers have sent.

    It outlives timelines, and several threads use it. All steps lie in one arena as large as the
    bound, whose pages are taken at first use.
    """

    def __init__(self) -> None:
        # Messages of peers and recalls access the steps at the same time.
        self._lock = threading.Lock()
        self._shelf = HeldLogCopies(0)
        self._sources: tuple[int, ...] = ()
        self._arena: Arena | None = None
        self._allocator: Allocator | None = None
        self._touched_bytes = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._complete: dict[tuple[int, int, int], tuple[int, PeerLogBegin]] = {}

    @property
    def used_bytes(self) -> int:
        """Host memory in use, in bytes; freed memory is reused, not returned to the system."""
        return 0 if self._arena is None else CONTROL_BYTES + self._touched_bytes

    @property
    def held(self) -> dict[int, int]:
        """Newest step held of each rank's log."""
        found: dict[int, int] = {}
        with self._lock:
            for copy in self._shelf.copies:  # by timeline: the newest comes last
                found[copy.source] = copy.run.last
        return found

    def whole(self) -> tuple[list[tuple[PeerLog, int]], Arena | None]:
        """Return all complete steps, each with its offset, and the arena that they lie in."""
        with self._lock:
            if self._arena is None:
                return [], None
            found = []
            for copy in self._shelf.copies:
                offset, begun = self._complete[copy.key]
                memory = self._arena.view[offset : offset + begun.size_bytes]
                steps = PackedSteps(copy.run, memory, begun.index_bytes, begun.index_digest)
                found.append((PeerLog(copy.source, begun.record, steps), offset))
            return found, self._arena

    def new_start(self, bound_bytes: int, sources: Collection[int]) -> None:
        """Prepare for a new start of the job: drop steps in flight, whose rest will not arrive.

        Args:
            bound_bytes: new limit; an arena that holds steps is not enlarged.
            sources: ranks that send here from now on. Steps of other ranks stay until a newer base
                is complete on all peers.
        """
        with self._lock:
            self._sources = tuple(sources)
            for source in list(self._in_flight):
                self._drop(source)
            if self._arena is not None and not self._shelf.copies:
                # Nothing is held: return the memory, so that the arena may get a new size.
                self._arena = None
                self._allocator = None
                self._touched_bytes = 0
            # An arena with steps keeps its size, as they cannot be moved while a trainer may map
            # them.
            size_bytes = bound_bytes if self._arena is None else self._arena.size_bytes
            self._shelf.bound_bytes = min(bound_bytes, size_bytes)

    def passed(self, everywhere: BaseId, there: Collection[int]) -> None:
        """Free steps before a base that is complete on all peers.

        Args:
            there: ranks whose files of the base are held here.
        """
        with self._lock:
            self._free(self._shelf.passed(everywhere, there, self._sources))

    def begun(self, source: int, message: PeerLogBegin) -> PeerLogAck:
        """Handle the announcement of steps; reply with the bytes received so far."""
        with self._lock:
            coming = self._in_flight.get(source)
            # The sender has lost the reply: it continues after the bytes received so far.
            if coming is not None and coming.begun == message:
                return _at(message, coming.received_bytes, "more")
            # The rank's keeper was replaced, or has given up the earlier steps.
            self._drop(source)
            self._free(
                self._shelf.drop_other_timeline(source, message.timeline, digest(message.record))
            )
            # The sender missed the reply about steps that are complete.
            known = self._complete.get((source, message.timeline, message.first))
            if known is not None and known[1] == message:
                return _at(message, message.size_bytes, "whole")
            if not 0 < message.index_bytes <= message.size_bytes:
                return _at(message, 0, "refused", "the announced sizes are invalid")
            try:
                offset = self._allocate(message.size_bytes)
            except EverstepError as error:
                return _at(message, 0, "full", error.message)
            if offset is None:
                held_bytes = self._shelf.used_bytes
                bound_bytes = self._shelf.bound_bytes
                why = (
                    f"they take {message.size_bytes} bytes, {held_bytes} bytes are in use and "
                    f"needed, and the limit for logs of other ranks is {bound_bytes} bytes"
                )
                return _at(message, 0, "full", why)
            self._in_flight[source] = _InFlight(message, offset)
            return _at(message, 0, "more")

    def part(self, source: int, message: PeerLogChunk) -> PeerLogAck:
        """Receive bytes of steps; bytes out of order are ignored."""
        with self._lock:
            coming = self._in_flight.get(source)
            ours = None if coming is None else (coming.begun.timeline, coming.begun.first)
            if coming is None or ours != (message.timeline, message.first):
                known = self._complete.get((source, message.timeline, message.first))
                # The last chunk was sent again, as the sender missed the reply.
                if known is not None:
                    return _at(known[1], known[1].size_bytes, "whole")
                return PeerLogAck(message.timeline, message.first, 0, "lost", "")
            begun = coming.begun
            arena = self._arena
            assert arena is not None
            end = message.offset + len(message.data)
            # A repeated or overtaken chunk is not stored; the reply tells the sender where to
            # continue.
            if message.offset == coming.received_bytes and end <= begun.size_bytes:
                place = coming.offset + message.offset
                arena.view[place : coming.offset + end] = message.data
                coming.received_bytes = end
            if coming.received_bytes < begun.size_bytes:
                return _at(begun, coming.received_bytes, "more")
            return self._arrived(source, coming, arena)

    def _arrived(self, source: int, coming: _InFlight, arena: Arena) -> PeerLogAck:
        """Verify steps that have arrived completely, and hold them."""
        begun = coming.begun
        memory = arena.view[coming.offset : coming.offset + begun.size_bytes]
        try:
            # Verified before the steps count as held: damage in transit must be found now, not at a
            # resume.
            run, _ = read_pack(begun.timeline, memory, begun.index_bytes, begun.index_digest)
            if (run.first, run.last) != (begun.first, begun.last):
                raise FormatError(f"they are steps {run.first} to {run.last}")
        except (DamageError, FormatError) as error:
            _log.warning("steps of the log of rank %d: %s", source, error)
            self._drop(source)
            return _at(begun, 0, "refused", f"they arrived damaged: {error.message}")
        if self._shelf.holds(source, run):
            self._drop(source)
            return _at(begun, 0, "refused", "some of these steps are held already")
        del self._in_flight[source]
        rounded = self._rounded(begun.size_bytes)
        copy = LogCopy(source, digest(begun.record), run, rounded)
        self._complete[copy.key] = coming.offset, begun
        self._shelf.take(copy)
        return _at(begun, begun.size_bytes, "whole")

    def _allocate(self, size_bytes: int) -> int | None:
        """Allocate memory and return its offset; None if other steps have to be freed first.

        Raises:
            EverstepError: the system has no memory.
        """
        rounded = self._rounded(size_bytes)
        # Steps in flight count as well: several ranks send at the same time.
        on_way = sum(self._rounded(one.begun.size_bytes) for one in self._in_flight.values())
        if not self._shelf.fits(rounded + on_way):
            return None
        # Created at first use: most keepers never hold logs of other ranks.
        if self._arena is None:
            self._arena = Arena.create(self._shelf.bound_bytes)
            self._allocator = Allocator(self._arena.size_bytes)
        assert self._allocator is not None
        offset = self._allocator.allocate(size_bytes)
        if offset is not None:
            self._touched_bytes = max(self._touched_bytes, offset + rounded)
        return offset

    @staticmethod
    def _rounded(size_bytes: int) -> int:
        return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES

    def _drop(self, source: int) -> None:
        coming = self._in_flight.pop(source, None)
        if coming is not None and self._allocator is not None:
            self._allocator.free(coming.offset)

    def _free(self, dropped: list[LogCopy]) -> None:
        for copy in dropped:
            offset, _ = self._complete.pop(copy.key)
            assert self._allocator is not None
            self._allocator.free(offset)


def _at(begun: PeerLogBegin, received_bytes: int, state: str, problem: str = "") -> PeerLogAck:
    return PeerLogAck(begun.timeline, begun.first, received_bytes, state, problem)


_PIECE_BYTES = 1 << 20
_LOOK_AGAIN_S = 0.02
_LATE = 3
"""Multiple of the deadline: longer than the two deadlines after which rank 0 gives up a round."""

IsPast = Callable[[BaseId], bool]
"""Returns True if a base is complete on all ranks, or never will be."""


class MemoryBases:
    """Holds the bases of this rank that live in memory.

    Args:
        run: the run folder, which has the record of the timeline.
        store: holds the bases, within its bound.
        is_past: returns True if a base is complete on all ranks, or never will be; None for a
            single process.
        whole: receives each base that is complete here.
        timeout_s: seconds without progress after which other ranks are no longer waited for.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        store: PeerBaseStore,
        clock: Clock,
        is_past: IsPast | None,
        whole: Callable[[BaseId], None],
        *,
        timeout_s: float,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._clock = clock
        self._store = store
        self._is_past = is_past
        self._whole = whole
        self._timeout_s = timeout_s
        self._last: BaseId | None = None
        self._released = threading.Event()

    def release(self) -> None:
        """Stop waiting for other ranks: the next start of the job has begun."""
        self._released.set()

    def hold(
        self,
        plan: BasePlan,
        bodies: Sequence[Body],
        progress: ProgressSink,
        audit: Callable[[BasePlan, Sequence[Written]], None],
    ) -> tuple[Written, ...]:
        """Copy a base into the memory of this keeper and compare its digests.

        Args:
            audit: raises AuditError for a base that is not the state of its step.

        Raises:
            AuditError: the base is not the state of its step.
            OutOfSpaceError: it does not fit into the bound.
            DamageError: its bytes changed while they were copied.
            DeadlineError: other ranks have not finished the previous base.
            StateError: another start of the job has begun.
        """
        identity = plan.identity
        base = BaseId(identity.timeline, identity.step)
        pairs = list(zip(plan.shards, bodies, strict=True))
        written = tuple(digest_shard(shard, identity, body, progress) for shard, body in pairs)
        # Before the copy: a base that fails the audit must not replace a good one in memory.
        audit(plan, written)
        marker = Marker.of(identity, tuple(shard.record for shard in written))
        with storage_errors("read the record of the timeline", self._run, step=base.step):
            path = timeline_dir(self._run, base.timeline) / TIMELINE_RECORD
            # The copy carries the record of its timeline, so that a node without the run folder can
            # restore it.
            record = read_record_bytes(self._filesystem, path)
        # After digesting, before copying: two bases fit into the bound, a third one only when the
        # previous is complete everywhere.
        self._wait_for_previous(base, progress)

        def fill(memory: memoryview) -> None:
            begin = 0
            for shard, body in zip(written, bodies, strict=True):
                header = shard.header
                end = begin + shard.record.length
                memory[begin : begin + len(header)] = header
                begin += len(header)
                # In pieces: each one counts as progress, so that a large base is not taken for a
                # hang.
                for at in range(begin, end, _PIECE_BYTES):
                    piece = memory[at : min(end, at + _PIECE_BYTES)]
                    body.fill(at - begin, piece, lambda seen: None)
                    progress.advance(piece.nbytes)
                begin = end

        # Verifies the digests of the copy: the arena may have been overwritten while it was read.
        self._store.keep(marker, record, fill)
        # Only a base that is held is waited for: one that failed never gets complete anywhere.
        self._last = base
        # A single process has no round with other ranks: its base is complete at once.
        if self._is_past is None:
            self._store.passed(base)
        self._whole(base)
        return written

    def _wait_for_previous(self, base: BaseId, progress: ProgressSink) -> None:
        """Wait until the previous base is complete on all ranks, which frees the one before it."""
        last = self._last
        is_past = self._is_past
        if last is None or is_past is None:
            return
        since_s = self._clock.running_s()
        while not is_past(last):
            # Polled: rank 0 decides a round in another thread, which knows nothing of this wait.
            if self._released.wait(_LOOK_AGAIN_S):
                raise StateError(
                    "the next start of the job began before the base was held in memory",
                    step=base.step,
                )
            # Waiting for other ranks must not count as a hang of this base.
            progress.advance(0)
            # Only time in which this process runs counts: a suspended machine must not fail the
            # base.
            if self._clock.running_s() - since_s > _LATE * self._timeout_s:
                raise DeadlineError(
                    f"the base of step {last.step} is not complete on all ranks yet",
                    step=base.step,
                    tier="memory",
                    hint="another rank's keeper hangs or has ended: see the output of its rank",
                )
