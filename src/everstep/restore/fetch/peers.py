"""Fetch copies from the memory of other nodes at the start of a job.

Before the ranks agree on a restore, each announces what it can read, and what its keeper holds for
others. From that every rank computes the same choice that these copies would allow
(:func:`everstep.commit.job.offers.choose`), and fetches its missing files from the training process
beside the keeper that holds them. Fetched files are verified, and then offered in the agreement
like anything else that a rank can read. Damaged ones are reported, and all ranks plan again without
them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Protocol

import msgspec

from everstep.commit.job.messages import (
    ChunkReply,
    ChunkRequest,
    Envelope,
    FetchProgress,
    Message,
    StartFailed,
    accept,
    encode_message,
)
from everstep.commit.job.offer_codec import decode_offer, encode_offer
from everstep.commit.job.offers import Choice, Needs, Offer, Piece
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, DeadlineError, FormatError
from everstep.format.message_codec import Count, Decoder, Stored, encode
from everstep.format.records import Marker, TimelineRecord
from everstep.restore.fetch.copy_inventory import CopyOffer, FetchedBase, FetchResult, OfferExtras
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.peer_copy import PeerCopy, check_files, files_over
from everstep.restore.fetch.peer_log import FetchedLog, PackedSteps, PeerLog, unpack_steps
from everstep.restore.fetch.peer_plan import (
    FetchPlan,
    LogOffer,
    fetch_plan,
    offers_on_disks,
    prove_timelines,
    with_proven_bases,
)
from everstep.restore.fetch.served_files import Coverage, OpenFile, ServedFiles
from everstep.restore.fetch.start_channel import remote_failure
from everstep.seams.clock import Clock
from everstep.seams.network.mailbox import Mailbox

__all__ = [
    "AllGather",
    "CopyOffer",
    "FetchCopies",
    "FetchPlan",
    "FetchResult",
    "FetchedBase",
    "MeetingLike",
    "OfferExtras",
    "OnPlanned",
    "fetch_from_peers",
    "fetch_plan",
]

_log = logging.getLogger("everstep")
_WIRE = PurePath("copy")
_CHUNK_BYTES = 1 << 20
_UNANSWERED_MAX = 8  # chunks
_TICK_S = 0.05
_AGAIN_S = 2.0  # initially
_AGAIN_MAX_S = 30.0
_ALIVE_EVERY_S = 1.0

AllGather = Callable[[str, dict[str, Any]], list[dict[str, Any]]]
"""All-gather: send a label and fields, return the fields of every rank, by rank."""


class MeetingLike(Protocol):
    """All ranks at a start of their job; see :class:`.start_channel.Meeting`."""

    @property
    def session(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def mailbox(self) -> Mailbox: ...


OnPlanned = Callable[[Choice], None]
"""Called with the planned choice, the same on all ranks, before ranks fetch and wait for each
other.
Must not wait."""

FetchCopies = Callable[[Offer, OnPlanned, OfferExtras], FetchResult]
"""Fetches what a rank with this offer needs."""


class _Inventory(msgspec.Struct, forbid_unknown_fields=True):
    """Copies that a rank can read by itself, and those that its keeper holds for others.

    Attributes:
        offer: see :func:`.offer_codec.encode_offer`.
        copies: marker of each copy, and the record of its timeline.
        room_bytes: bytes that the rank may take for files from other disks.
        unproven: see :class:`.copy_inventory.OfferExtras`.
    """

    offer: bytes
    copies: list[tuple[Stored[Marker], bytes]]
    logs: list[LogOffer]
    room_bytes: Count
    unproven: Stored[Marker] | None


_INVENTORY = Decoder[_Inventory](_Inventory, "a list of copies")
_REMAINS = Decoder[tuple[bytes, Coverage]](tuple[bytes, Coverage], "a list of remains")

Held = dict[tuple[BaseId, int, bool], "memoryview | ServedFiles"]
"""Copies that a rank serves, by key."""


def fetch_from_peers(
    meeting: MeetingLike,
    clock: Clock,
    say: AllGather,
    offer: Offer,
    copies: Sequence[PeerCopy],
    needs: Needs,
    *,
    step: int | None,
    timeout_s: float,
    logs: Sequence[PeerLog] = (),
    meanwhile: OnPlanned = lambda choice: None,
    opens: OpenFile | None = None,
    room_bytes: int = 0,
    lent: OfferExtras | None = None,
) -> FetchResult:
    """Fetch what this rank needs from the memory of other nodes, and from the disks of other ranks.
    Every rank calls it.

    Args:
        meeting: all ranks at this start.
        clock: source of time.
        say: all-gather among the ranks.
        offer: what this rank can read by itself.
        copies: copies that its keeper holds for others.
        needs: which ranks' files a rank reads.
        step: as for a resume.
        timeout_s: a rank that is silent for longer is reported.
        logs: steps of other ranks' logs that its keeper holds.
        meanwhile: called with the planned choice.
        opens: opens files of bases on this rank's disk, to serve them to ranks with another disk;
            None,
            on every rank: disks are not served.
        room_bytes: bytes that may be taken for files from other disks.
        lent: further information for the plan; None, on every rank: none.

    Raises:
        DeadlineError: a rank is silent.
        RecoveryError: a rank has failed.
    """
    known = _Announced.by_all(say, meeting.rank, offer, copies, logs, room_bytes, lent)
    if opens is not None:
        known.copies += offers_on_disks(known.offers, known.copies)
    attempt = 0
    with ExitStack() as opened:
        held = _held(copies, logs)
        if opens is not None:
            for base, piece in _pieces_on_disk(offer):
                files = ServedFiles(opens, base, piece.marker)
                opened.callback(files.close)
                held.setdefault((base, piece.marker.rank, False), files)
        while True:
            attempt += 1
            plan, choice = known.plan(needs, step)
            if choice is None and known.covers is None and lent is not None:
                known.add_remains(say, lent)
                continue
            if choice is not None:
                meanwhile(choice)
            proven = known.proof.get(meeting.rank)
            if not plan:
                return FetchResult([], [], proven)
            exchange = _Exchange(meeting, clock, attempt, plan, held, len(known.offers), timeout_s)
            brought, damaged = exchange.run()
            unusable = say("fetch copies", {"damaged": [list(one.key) for one in damaged]})
            bad = {tuple(key) for one in unusable for key in one["damaged"]}
            if not bad:
                return replace(brought, proven=proven)
            # All ranks plan again without what any of them found damaged.
            known.drop(bad)


@dataclass(slots=True)
class _Announced:
    """Announcements of all ranks; equal on all ranks, so that each makes the same plan.

    Attributes:
        offers: what each rank can read by itself.
        markers: by rank: marker of the base in its keeper's memory whose timeline its disk lacks.
        copies: copies that ranks can serve.
        logs: steps of logs that ranks can serve.
        rooms: by rank: bytes that it may take for files from other disks.
        covers: remains of bases on each disk; None until they are needed.
        proof: by rank: timeline record of its marker, as proved by other ranks.
    """

    offers: list[Offer]
    markers: dict[int, Marker]
    copies: list[CopyOffer]
    logs: list[LogOffer]
    rooms: list[int]
    proof: dict[int, TimelineRecord]
    covers: list[Coverage] | None = None

    @classmethod
    def by_all(
        cls,
        say: AllGather,
        rank: int,
        offer: Offer,
        copies: Sequence[PeerCopy],
        logs: Sequence[PeerLog],
        room_bytes: int,
        lent: OfferExtras | None,
    ) -> _Announced:
        """Announce what this rank has, and return what all have announced."""
        unproven = None if lent is None else lent.unproven
        mine = _Inventory(
            encode_offer(offer),
            [(Stored(copy.marker), copy.record) for copy in copies],
            [LogOffer.of(rank, log) for log in logs],
            room_bytes,
            None if unproven is None else Stored(unproven),
        )
        found = say("list the copies that their keepers hold", {"held": encode(mine)})
        everyones = [_INVENTORY.decode(one["held"]) for one in found]
        offers = [decode_offer(one.offer) for one in everyones]
        markers = {
            rank: one.unproven.record
            for rank, one in enumerate(everyones)
            if one.unproven is not None
        }
        return cls(
            offers,
            markers,
            [
                CopyOffer(holder, marker.record, record)
                for holder, one in enumerate(everyones)
                for marker, record in one.copies
            ],
            [log for one in everyones for log in one.logs],
            [one.room_bytes for one in everyones],
            prove_timelines(offers, markers),
        )

    def plan(self, needs: Needs, step: int | None) -> tuple[FetchPlan, Choice | None]:
        """Return what each rank fetches, and the choice that it makes possible."""
        offers = with_proven_bases(self.offers, self.markers, self.proof)
        return fetch_plan(
            offers, self.copies, needs, step, self.logs, rooms=self.rooms, covers=self.covers
        )

    def add_remains(self, say: AllGather, lent: OfferExtras) -> None:
        """Exchange what is left of incomplete bases, since no base can be read by all ranks."""
        offer, covers = lent.left()
        left = encode((encode_offer(offer), covers))
        found = say("list the remains of replicas", {"left": left})
        remains = [_REMAINS.decode(one["left"]) for one in found]
        self.offers = [decode_offer(one) for one, _ in remains]
        self.covers = [one for _, one in remains]

    def drop(self, damaged: Collection[tuple[int, ...]]) -> None:
        """Drop copies and steps that proved damaged, by their keys."""
        self.copies = [copy for copy in self.copies if copy.key not in damaged]
        self.logs = [log for log in self.logs if log.key not in damaged]


def _held(copies: Sequence[PeerCopy], logs: Sequence[PeerLog]) -> Held:
    held: Held = {(_base_of(copy.marker), copy.marker.rank, False): copy.memory for copy in copies}
    for log in logs:
        first = BaseId(log.steps.run.timeline, log.steps.run.first)
        held[first, log.source, True] = log.steps.memory
    return held


def _pieces_on_disk(offer: Offer) -> Iterator[tuple[BaseId, Piece]]:
    for base, one in offer.bases.items():
        for piece in one.pieces.values():
            if "disk" in piece.tiers:
                yield base, piece


class _Incoming:
    """Bytes that arrive in chunks, in order, from one rank at a time.

    Requests are repeated if nothing arrived for longer than the last two chunks took. Chunks may be
    in flight on a slow link, and each repeated request sends them again.
    """

    def __init__(self, now_s: float) -> None:
        self._data = bytearray()
        self._requested = 0
        self._arrived = 0
        self._requested_s = now_s
        self._arrived_s = now_s
        self._retry_after_s = _AGAIN_S

    def begin(self, size_bytes: int, now_s: float) -> None:
        """Expect this many bytes, from the first one on."""
        self._data = bytearray(size_bytes)
        self._requested = 0
        self._arrived = 0
        self._requested_s = now_s
        self._arrived_s = now_s

    def next_requests(self, now_s: float) -> Iterator[tuple[int, int]]:
        """Yield offset and size of the chunks to request now."""
        if self._requested > self._arrived and now_s - self._requested_s > self._retry_after_s:
            self._requested = self._arrived
            self._retry_after_s = min(2 * self._retry_after_s, _AGAIN_MAX_S)
        end = min(len(self._data), self._arrived + _UNANSWERED_MAX * _CHUNK_BYTES)
        while self._requested < end:
            size = min(len(self._data) - self._requested, _CHUNK_BYTES)
            yield self._requested, size
            self._requested += size
            self._requested_s = now_s

    def expects(self, offset: int, size_bytes: int, now_s: float) -> bool:
        """Return True if a chunk that arrived is the next one."""
        # Earlier chunks, requested twice, count as signs of life as well: others follow them.
        self._retry_after_s = max(_AGAIN_S, 2 * (now_s - self._arrived_s))
        self._requested_s = now_s
        self._arrived_s = now_s
        return offset == self._arrived and offset + size_bytes <= len(self._data)

    def add(self, data: bytes) -> None:
        """Add the next chunk."""
        self._data[self._arrived : self._arrived + len(data)] = data
        self._arrived += len(data)

    @property
    def is_complete(self) -> bool:
        return self._arrived == len(self._data)

    def take(self) -> bytearray:
        """Return all bytes, and release them here."""
        data = self._data
        self._data = bytearray()
        return data


class _Exchange:
    """Exchange of chunks: all ranks fetch the files that they need, and serve those that they
    have."""

    def __init__(
        self,
        meeting: MeetingLike,
        clock: Clock,
        attempt: int,
        plan: FetchPlan,
        held: Held,
        world: int,
        timeout_s: float,
    ) -> None:
        self._meeting = meeting
        self._clock = clock
        self._attempt = attempt
        self._timeout_s = timeout_s
        self._held = held
        self._todo = list(plan.get(meeting.rank, ()))
        self._brought = FetchResult([], [])
        self._damaged: list[CopyOffer | LogOffer] = []
        self._others = [rank for rank in plan if rank != meeting.rank]
        # All ranks: one that has nothing to do here must not run into a deadline elsewhere.
        self._all = range(world)
        self._incoming = _Incoming(clock.monotonic_s())
        self._said_s = float("-inf")
        self._heard_s = dict.fromkeys(self._all, clock.monotonic_s())

    def run(self) -> tuple[FetchResult, list[CopyOffer | LogOffer]]:
        """Run until all ranks have what they need; return the result, and the damaged items.

        Raises:
            DeadlineError: a rank is silent.
            RecoveryError: a rank has failed.
        """
        self._take_own()
        if self._todo:
            self._begin()
        done: set[int] = set()
        while self._todo or not done >= set(self._others):
            self._ask()
            self._report()
            data = self._meeting.mailbox.receive(_TICK_S)
            envelope = None if data is None else self._accept(data)
            self._check(done)
            if envelope is None:
                continue
            self._heard_s[envelope.sender] = self._clock.monotonic_s()
            message = envelope.message
            if isinstance(message, StartFailed):
                raise remote_failure(message, self._meeting.rank)
            if isinstance(message, ChunkRequest):
                self._serve(envelope.sender, message)
            elif isinstance(message, ChunkReply):
                self._take(envelope.sender, message)
            elif (
                isinstance(message, FetchProgress)
                and message.round == self._attempt
                and message.done
            ):
                done.add(envelope.sender)
        # Others may still wait for this rank's word that it needs nothing more.
        self._report(now=True)
        return self._brought, self._damaged

    def _take_own(self) -> None:
        """Take copies that this rank's own keeper holds, without messages."""
        todo = self._todo
        self._todo = []
        for one in todo:
            memory = self._held.get(one.place)
            if one.holder != self._meeting.rank or not isinstance(memory, memoryview):
                self._todo.append(one)
                continue
            self._finish(one, bytearray(memory[: one.size_bytes]))

    def _accept(self, data: bytes) -> Envelope | None:
        try:
            return accept(data, self._meeting.session)
        except FormatError as error:
            _log.warning("a message was ignored: %s", error)
            return None

    def _begin(self) -> None:
        self._incoming.begin(self._todo[0].size_bytes, self._clock.monotonic_s())

    def _ask(self) -> None:
        """Request the next chunks."""
        if not self._todo:
            return
        one = self._todo[0]
        base, rank, log = one.place
        for offset, size in self._incoming.next_requests(self._clock.monotonic_s()):
            self._send(one.holder, ChunkRequest(base, rank, offset, size, log))

    def _serve(self, rank: int, wanted: ChunkRequest) -> None:
        held = self._held.get((wanted.base, wanted.rank, wanted.log))
        if held is None or wanted.offset < 0 or not 0 < wanted.size_bytes <= _CHUNK_BYTES:
            return
        if isinstance(held, ServedFiles):
            data = held.read(wanted.offset, wanted.size_bytes)
        else:
            data = bytes(held[wanted.offset : wanted.offset + wanted.size_bytes])
        self._send(rank, ChunkReply(wanted.base, wanted.rank, wanted.offset, data, wanted.log))

    def _take(self, sender: int, part: ChunkReply) -> None:
        if not self._todo:
            return
        one = self._todo[0]
        place = part.base, part.rank, part.log
        if (sender, place) != (one.holder, one.place):
            return
        incoming = self._incoming
        if not incoming.expects(part.offset, len(part.data), self._clock.monotonic_s()):
            return
        if not part.data:
            _log.warning("rank %d can no longer read %s of rank %d", sender, one.base, part.rank)
            self._damaged.append(self._todo.pop(0))
            self._next()
            return
        incoming.add(part.data)
        if incoming.is_complete:
            self._finish(self._todo.pop(0), incoming.take())
            self._next()

    def _next(self) -> None:
        if self._todo:
            self._begin()
        else:
            self._report(now=True)

    def _finish(self, one: CopyOffer | LogOffer, data: bytearray) -> None:
        memory = memoryview(data)
        try:
            record = TimelineRecord.decode(one.record, _WIRE)
            if isinstance(one, LogOffer):
                steps = PackedSteps(one.run, memory, one.index_bytes, one.index_digest)
                self._brought.logs.append(FetchedLog(record, steps, tuple(unpack_steps(steps))))
                return
            check_files(one.marker, memory)
        except (DamageError, FormatError) as error:
            _log.warning("the copy held by rank %d is unusable: %s", one.holder, error)
            self._damaged.append(one)
            return
        held = HeldBase(one.marker, files_over(one.marker, memory), durable=False)
        self._brought.bases.append(FetchedBase(held, record, disk=one.disk))

    def _report(self, *, now: bool = False) -> None:
        """Send a sign of life, and whether this rank has what it needs."""
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s < _ALIVE_EVERY_S and not now:
            return
        self._said_s = now_s
        for rank in self._all:
            if rank != self._meeting.rank:
                self._send(rank, FetchProgress(self._attempt, not self._todo))

    def _check(self, done: set[int]) -> None:
        now_s = self._clock.monotonic_s()
        waits = {rank for rank in self._others if rank not in done}
        waits |= {one.holder for one in self._todo}
        silent = sorted(
            rank
            for rank in waits
            if rank != self._meeting.rank and now_s - self._heard_s[rank] > self._timeout_s
        )
        if silent:
            raise DeadlineError(
                f"rank(s) {', '.join(map(str, silent))} were silent for "
                f"{self._timeout_s:g} s while copies were fetched from the memory of peers",
                rank=self._meeting.rank,
                hint="they died, hang, or raised an error: look at their output",
            )

    def _send(self, rank: int, message: Message) -> None:
        envelope = Envelope(self._meeting.session, self._meeting.rank, message)
        self._meeting.mailbox.send(rank, encode_message(envelope))


def _base_of(marker: Marker) -> BaseId:
    return BaseId(marker.timeline, marker.step)
