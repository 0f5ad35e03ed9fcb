"""The newest complete captures, held in memory for a restarted training process.

A capture is held until a newer one is complete, until its memory is overwritten, or until nobody
can use it any more. A capture that the disk has refused is the only copy, and is held as long as
possible. Where every step is captured, several are held until training needs their memory: the
keepers of several ranks are not at the same step, and must have one in common.

Messages that hand captures and logs in a keeper's memory to a restarted training process.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeAlias

import msgpack

from everstep.arena import Arena
from everstep.commit import BaseId
from everstep.commit.log_reach import LogRun
from everstep.errors import AuditError
from everstep.format import BasePlan, FileRecord, Marker, ShardIdentity
from everstep.format.log import LogRecord
from everstep.format.writer import Written, digest_shard
from everstep.keeper.log import records_from_wire
from everstep.link import Connection
from everstep.link.capture import Capture, shard_offsets
from everstep.link.messages import identity_from_wire, identity_to_wire
from everstep.restore.fetch import HeldBase, KeeperContents, PackedSteps, PeerLog, ReplicaReach
from everstep.restore.fetch.held import PeerCopy, size_of
from everstep.tiers import MemoryFile

_log = logging.getLogger("everstep.keeper")
# Three of every step, and bases that are being written.
_HELD_MAX = 6


_Held: TypeAlias = tuple[Capture, Arena]


class NewestCapture:
    """The newest complete captures, if there are any; used by the serving and the writing thread.

    Unless another one is named, "the capture" is the newest.

    Attributes:
        on_disk: base that the disks of all ranks have, even if its capture has failed here: a start
            that finds all its shards commits it.
    """

    def __init__(self) -> None:
        self.on_disk: BaseId | None = None
        # The serving thread takes and drops captures while the writing thread reports their end.
        self._lock = threading.Lock()
        # Oldest first. Replaced, never changed: readers without the lock see a list of some moment.
        self._captures: tuple[_Held, ...] = ()

    @property
    def _held(self) -> _Held | None:
        # Read once: another thread may replace the captures between two reads.
        captures = self._captures
        return captures[-1] if captures else None

    @property
    def ids(self) -> list[BaseId]:
        """Timelines and steps of all captures."""
        return [BaseId(held.timeline, held.step) for held, _ in self._captures]

    @property
    def step(self) -> int | None:
        """Step of the capture; None without one."""
        held = self._held
        return None if held is None else held[0].step

    @property
    def arena(self) -> Arena | None:
        """Memory of the capture; None without one."""
        held = self._held
        return None if held is None else held[1]

    @property
    def undigested(self) -> ShardIdentity | None:
        """Identity of the capture if its digests do not exist yet."""
        held = self._held
        return None if held is None or held[0].written else held[0].plan.identity

    @property
    def is_only_copy(self) -> bool:
        """True if there is a capture that no disk has."""
        held = self._held
        if held is None or held[0].durable:
            return False
        return BaseId(held[0].timeline, held[0].step) != self.on_disk

    def take(self, capture: Capture, arena: Arena, *, several: bool = False) -> None:
        """Hold a complete capture instead of the previous ones.

        Args:
            several: this rank is one of several: captures of every step are held beside each other.
        """
        mine = capture.plan.identity
        with self._lock:
            newest = self._held
            if newest is not None and newest[1] is arena:
                # A multi-step capture takes time to rebuild: a newer one may have overtaken it.
                held = newest[0].plan.identity
                if (held.timeline, held.step) > (mine.timeline, mine.step):
                    return
            beside = [
                (held, memory)
                for held, memory in self._captures
                if several and (held.parked or capture.parked)
            ]
            self._captures = (*beside, (capture, arena))[-_HELD_MAX:]

    def return_to(self, agreed: BaseId) -> None:
        """Drop the captures after the one that the ranks have agreed on, if it is there."""
        if agreed in self.ids:
            self._drop_if(lambda held, memory: BaseId(held.timeline, held.step) > agreed)

    def drop_overwritten(self, capture: Capture, arena: Arena) -> None:
        """Drop the capture if a new one uses its memory, even if ``forget`` was not received."""
        begin, end = _block(capture)

        def is_overwritten(held: Capture, memory: Arena) -> bool:
            # Any overlap destroys it: after ``begin`` the trainer fills the block at any moment.
            held_begin, held_end = _block(held)
            return memory is arena and begin < held_end and held_begin < end

        self._drop_if(is_overwritten)

    def forget(self, number: int | None, arena: Arena) -> None:
        """Drop a capture that a training process no longer needs.

        Args:
            number: number of its own capture; None for the capture of an earlier process.
            arena: arena of the process that sends the request.
        """
        if number is None:
            # Another process's capture that is not durable stays: it is the only copy.
            self._drop_if(lambda held, memory: memory is not arena and held.durable)
        else:
            self._drop_if(lambda held, memory: memory is arena and held.number == number)

    def parked(self, arena: Arena, timeline: int) -> Capture | None:
        """Return a parked capture of this timeline, which is on no disk as nobody has asked for
        it."""
        with self._lock:
            newest = self._held
            if newest is None or newest[1] is not arena:
                return None
            capture = newest[0]
            return capture if capture.parked and capture.timeline == timeline else None

    def drop(self, capture: Capture) -> None:
        """Drop a capture whose memory is about to change."""
        # Compared by identity: a newer capture may have taken its place meanwhile.
        self._drop_if(lambda held, memory: held is capture)

    def drop_not_durable(self) -> None:
        """Drop a capture that is not durable: the run was resumed from a base on disk instead.

        It belongs to a history that no process will resume.
        """
        self._drop_if(lambda held, memory: not held.durable)

    def drop_from_timeline(self, timeline: int) -> None:
        """Drop a capture of this timeline or a later one: it belongs to another history."""
        # The folder was put back to an older state: timelines from this number on never happened
        # there.
        self._drop_if(lambda held, memory: held.timeline >= timeline)

    def failed(self, capture: Capture, error: BaseException, *, reused: bool) -> None:
        """Handle a capture that has not become durable.

        Args:
            reused: True if its training process is alive and will reuse the memory.
        """
        # A capture that failed the audit is not the state of its step: never restore from it.
        if reused or isinstance(error, AuditError):
            self.drop(capture)

    def _drop_if(self, is_over: Callable[[Capture, Arena], bool]) -> None:
        with self._lock:
            self._captures = tuple(held for held in self._captures if not is_over(*held))

    def recall(
        self,
        arena: Arena,
        audit: Callable[[BasePlan, Sequence[Written]], None],
        *,
        own: bool = False,
    ) -> tuple[dict[str, Any], list[bytes], Arena] | None:
        """Return the capture that an earlier process has left, as :func:`.base_to_wire` encodes it,
        and its arena.

        Args:
            arena: arena of the process that asks.
            audit: raises AuditError for a capture that must not be restored; called for one that
                the disk has refused before it was audited.
            own: also return a capture of the process that asks.
        """
        held = self._held
        # A trainer's own capture is not a candidate by default: it has not restarted.
        if held is None or (held[1] is arena and not own):
            return None
        return self.look(audit)

    def look(
        self, audit: Callable[[BasePlan, Sequence[Written]], None] | None
    ) -> tuple[dict[str, Any], list[bytes], Arena] | None:
        """Return the capture, whichever process made it; see :meth:`recall`.

        Args:
            audit: as for :meth:`recall`; None leaves out a capture without digests, as nothing
                would reveal that its process has overwritten it.
        """
        held = self._held
        if held is None or (audit is None and not held[0].written):
            return None
        capture, theirs = held
        # No disk has this capture, so nobody has digested or audited it yet: do that now.
        if audit is not None and not capture.written:
            identity = capture.plan.identity
            written = tuple(
                digest_shard(shard, identity, body)
                for shard, body in zip(capture.files.shards, capture.bodies(theirs), strict=True)
            )
            try:
                audit(capture.plan, written)
            except AuditError as error:
                _log.error("%s", error)
                self.failed(capture, error, reused=False)
                return None
            # Kept, so that a second recall need not digest the block again.
            capture.written = written
        return *base_to_wire(capture), theirs


def _block(capture: Capture) -> tuple[int, int]:
    """Return the begin and end of a capture's memory in the arena."""
    return capture.offset, capture.offset + shard_offsets(capture.plan)[1]


@dataclass(frozen=True, slots=True)
class LookReply:
    """Reply to ``look``: the contents of memory, for a process that only reads them.

    It is one small message, however large the index: the index is in shared memory of its own,
    whose descriptor is sent along. So a reader that is stopped never blocks the keeper.

    Attributes:
        recalled, blobs, arenas: as in the reply to ``recall``.
        settled: True if nothing is still being written or digested.
        moves: counters that change while that goes on.
        pending: identity of a base in memory that has no digests yet.
    """

    recalled: dict[str, Any]
    blobs: list[bytes]
    arenas: list[Arena]
    settled: bool
    moves: list[int]
    pending: dict[str, Any] | None

    def send(self, connection: Connection, trainer: int | None) -> None:
        """Send the reply.

        Args:
            trainer: process id of the trainer that is attached; None without one.
        """
        index: bytes = msgpack.packb(
            {**self.recalled, "blobs": self.blobs, "pending": self.pending},
            unicode_errors="surrogatepass",
        )
        # The receiver gets duplicates of the descriptors: this mapping can be closed at once.
        # A failed send must not leak the memory of the index: the context closes it in every case.
        with Arena.create(len(index)) as memory:
            memory.view[: len(index)] = index
            fds = [one.fd for one in (memory, *self.arenas) if one.fd is not None]
            message = {
                "kind": "looked",
                "size_bytes": len(index),
                "settled": self.settled,
                "moves": self.moves,
                "trainer": trainer,
            }
            connection.send(message, fds)


def base_to_wire(capture: Capture) -> tuple[dict[str, Any], list[bytes]]:
    """Encode a captured base: the slices of the arena that it consists of, and its headers and
    objects.

    Returns:
        Fields of the message, and the blobs. The fields name blobs by their index in the list;
        blobs are sent on their own, as they may be too large for one message.
    """
    blobs: list[bytes] = []
    shards = []
    for written, body in zip(capture.written, _bodies(capture), strict=True):
        slices: list[tuple[int, int] | int] = []
        for piece in (written.header, *body):
            if isinstance(piece, bytes):
                blobs.append(piece)
                slices.append(len(blobs) - 1)
            else:
                slices.append(piece)
        shards.append({"record": dataclasses.asdict(written.record), "parts": slices})
    identity = identity_to_wire(capture.plan.identity)
    return {"identity": identity, "durable": capture.durable, "shards": shards}, blobs


def _bodies(capture: Capture) -> Iterator[list[tuple[int, int] | bytes]]:
    """Yield the body of each file: ``(offset, size)`` of slices of the arena, or bytes."""
    offsets, _ = shard_offsets(capture.plan)
    for shard, offset in zip(capture.plan.shards, offsets, strict=True):
        body: list[tuple[int, int] | bytes] = []
        body.append((capture.offset + offset, shard.layout.size_bytes))
        if shard is capture.plan.objects_in:
            body += capture.incoming.objects().values()
        yield body
    if capture.redo is not None:
        yield [*capture.redo.parts, capture.redo.body.index]


def base_from_wire(
    fields: Mapping[str, Any], blobs: Mapping[int, bytes | bytearray], arena: Arena
) -> HeldBase:
    """Decode a captured base; its bytes stay in the memory of ``arena``."""
    files = []
    for shard in fields["shards"]:
        views = []
        for piece in shard["parts"]:
            if isinstance(piece, int):
                views.append(memoryview(blobs[piece]))
            else:
                offset, size_bytes = piece
                views.append(arena.view[offset : offset + size_bytes])
        files.append((MemoryFile(views), FileRecord(**shard["record"])))
    identity = identity_from_wire(fields["identity"])
    marker = Marker.of(identity, tuple(record for _, record in files))
    return HeldBase(marker, tuple(files), fields["durable"])


def recalled_from_wire(fields: Mapping[str, Any], arenas: Sequence[Arena]) -> KeeperContents:
    """Decode a keeper's reply to ``recall``, over the arenas that came with it."""
    blobs = fields["blobs"]
    base = None
    if fields["base"] is not None:
        base = base_from_wire(fields["base"], blobs, arenas[fields["base"]["arena"]])
    records: list[LogRecord] = []
    for number, place in fields["logs"]:
        index = msgpack.unpackb(bytes(blobs[number]), strict_map_key=False)
        records += records_from_wire(index, arenas[place])
    copies = tuple(_copy_from_wire(copy, arenas) for copy in fields["copies"])
    peer_logs: list[PeerLog] = []
    for number, place in fields.get("peer_logs", ()):
        rows = msgpack.unpackb(bytes(blobs[number]))
        peer_logs += [_log_from_wire(row, arenas[place]) for row in rows]
    served = {number: bytes(record) for number, record in fields.get("served", ())}
    reach = fields.get("replica")
    replica = None if reach is None else ReplicaReach(*reach)
    captures = tuple(BaseId(*one) for one in fields.get("captures", ()))
    return KeeperContents(base, tuple(records), copies, tuple(peer_logs), served, replica, captures)


def log_to_wire(log: PeerLog, offset: int) -> dict[str, Any]:
    """Encode the held steps of another rank's log, which begin at ``offset`` of an arena."""
    run = log.steps.run
    steps = log.steps
    return {
        "source": log.source,
        "record": log.record,
        "run": [run.timeline, run.first, run.after, run.lsns, run.shape],
        "offset": offset,
        "size_bytes": steps.memory.nbytes,
        "index_bytes": steps.index_bytes,
        "index_digest": steps.index_digest,
    }


def _log_from_wire(fields: Mapping[str, Any], arena: Arena) -> PeerLog:
    timeline, first, after, lsns, shape = fields["run"]
    run = LogRun(timeline, first, after, tuple(lsns), shape)
    memory = arena.view[fields["offset"] : fields["offset"] + fields["size_bytes"]]
    steps = PackedSteps(run, memory, fields["index_bytes"], fields["index_digest"])
    return PeerLog(fields["source"], fields["record"], steps)


def _copy_from_wire(fields: Mapping[str, Any], arenas: Sequence[Arena]) -> PeerCopy:
    marker = Marker.decode(fields["marker"], PurePath("copy"))
    return PeerCopy(marker, fields["record"], arenas[fields["arena"]].view[: size_of(marker)])
