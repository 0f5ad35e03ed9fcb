"""Fetch copies from the memory of other nodes at the start of a job.

Before the ranks agree on a restore, each announces what it can read, and what its keeper holds for
others. From that every rank computes the same choice that these copies would allow
(:func:`everstep.commit.job.offers.choose`), and fetches its missing files from the training process
beside the keeper that holds them. Fetched files are verified, and then offered in the agreement
like anything else that a rank can read. Damaged ones are reported, and all ranks plan again without
them. Files of bases on a rank's own disk are served to ranks that have another disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import msgspec

from everstep.commit import BaseId
from everstep.commit.job import Choice, ChunkReply, ChunkRequest, Needs, Offer
from everstep.commit.job.messages import FetchProgress, decode_offer, encode_offer
from everstep.commit.job.offers import Piece
from everstep.errors import DamageError, EverstepError, FormatError
from everstep.format import Marker, TimelineRecord, base_dir
from everstep.format.message_codec import Count, Decoder, Stored, encode
from everstep.restore.fetch.held import (
    FetchedLog,
    HeldBase,
    PackedSteps,
    PeerCopy,
    PeerLog,
    check_files,
    size_of,
    unpack_steps,
)
from everstep.restore.fetch.peer_plan import (
    CopyOffer,
    Coverage,
    FetchPlan,
    LogOffer,
    fetch_plan,
    offers_on_disks,
    prove_timelines,
    with_proven_bases,
)
from everstep.restore.fetch.start_channel import CHUNK_BYTES, IncomingBytes, StartChannel
from everstep.run import BaseFound, Inventory, OpenBase
from everstep.seams import Clock, FileSystem, ReadFile
from everstep.state.layout import OBJECT_PREFIX, Placed, Placement
from everstep.state.layout.placement import replicas_on_mesh

_log = logging.getLogger("everstep")
_WIRE = PurePath("copy")
_TICK_S = 0.05
_ALIVE_EVERY_S = 1.0

OpenFile = Callable[[BaseId, str], ReadFile]
"""Function that opens a file of a base, by base and file name."""


def run_file_opener(filesystem: FileSystem, run: PurePath) -> OpenFile:
    """Return a function that opens files of bases in a run folder."""

    def opens(base: BaseId, name: str) -> ReadFile:
        # Chunks begin at arbitrary offsets, which direct I/O does not support.
        return filesystem.open(base_dir(run, base.timeline, base.step) / name, direct=False)

    return opens


@dataclass(eq=False)
class ServedFiles:
    """One rank's files of a base, addressed as one sequence of bytes. Files are opened at the first
    request, and the receiver verifies them."""

    opens: OpenFile
    base: BaseId
    marker: Marker
    _files: dict[str, ReadFile] = field(default_factory=dict, init=False)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return these bytes, as far as the files reach; b"" if they cannot be read."""
        data = bytearray(max(0, min(size_bytes, size_of(self.marker) - offset)))
        try:
            self._read_into(memoryview(data), offset)
        except (OSError, EverstepError) as error:
            # An empty reply lets the other rank plan without this source. An exception would end
            # the start on all ranks.
            _log.warning("%s of rank %d: %s", self.base, self.marker.rank, error)
            return b""
        return bytes(data)

    def _read_into(self, data: memoryview, offset: int) -> None:
        begin = 0
        for record in self.marker.files:
            first = max(offset, begin)
            last = min(offset + data.nbytes, begin + record.length)
            if first < last:
                file = self._files.get(record.name)
                if file is None:
                    file = self._files[record.name] = self.opens(self.base, record.name)
                chunk = data[first - offset : last - offset]
                if file.read_into(chunk, first - begin) != chunk.nbytes:
                    raise OSError(f"{record.name} is shorter than its record")
            begin += record.length

    def close(self) -> None:
        """Close the files. Idempotent."""
        files = self._files
        self._files = {}
        for file in files.values():
            file.close()


def coverage_on_disk(filesystem: FileSystem, bases: Iterable[BaseFound]) -> Coverage:
    """Return the coverage of committed bases on a disk, from their headers: see
    :data:`Coverage`."""
    found: dict[BaseId, Mapping[int, int]] = {}
    for base in bases:
        shared = _SharedEntries()
        for marker in () if base.manifest is None else base.manifest.markers:
            if base.has_files_of(marker):
                # Damage is reported when the base is loaded.
                with suppress(OSError, ValueError, EverstepError):
                    shared.add(OpenBase.open(filesystem, base, marker.rank))
        found[base.id] = shared.sizes
    return {base: sizes for base, sizes in found.items() if sizes}


class _SharedEntries:
    """Entries of a base, by the ranks that share them."""

    def __init__(self) -> None:
        self._sizes: dict[int, dict[str, int]] = {}
        self._wanted: dict[int, set[str]] = {}

    def add(self, opened: OpenBase) -> None:
        """Count all entries that one rank wrote."""
        try:
            for _, _, header, _ in opened.shards:
                for place in header.placed:
                    self.count(place, opened.marker.rank, opened.marker.world)
        finally:
            opened.close()

    def count(self, place: Placed, writer: int, world: int) -> None:
        """Count an entry that one rank wrote."""
        placement = Placement.parse(place.entry.placement)
        name = place.entry.name
        if name.startswith(OBJECT_PREFIX):
            return  # each rank writes its own
        ranks = tuple(range(world)) if placement.ranks is None else placement.ranks
        for rank in ranks:
            self._wanted.setdefault(rank, set()).add(name)
        for rank in replicas_on_mesh(placement, writer) if placement.is_cut else ranks:
            self._sizes.setdefault(rank, {})[name] = place.end - place.begin

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes by rank, for ranks whose shard of no entry is missing, as far as this disk
        shows."""
        return {
            rank: sum(sizes.values())
            for rank, sizes in self._sizes.items()
            if sizes.keys() == self._wanted[rank]
        }


AllGather = Callable[[str, dict[str, Any]], list[dict[str, Any]]]
"""All-gather: send a label and fields, return the fields of every rank, by rank."""


@dataclass(frozen=True, slots=True)
class FetchedBase:
    """Base files fetched from another node.

    Attributes:
        held: the files in memory.
        record: timeline record of the base.
        tier: tier in which they were found.
        disk: they were on the disk of another rank.
    """

    held: HeldBase
    record: TimelineRecord
    tier: str = "peer"
    disk: bool = False

    @classmethod
    def of_own(cls, copy: PeerCopy) -> FetchedBase:
        """Wrap a copy in the memory of this rank's own keeper."""
        return cls(HeldBase.of_copy(copy.marker, copy.memory), copy.timeline, "memory")

    def is_of(self, inventory: Inventory) -> bool:
        """Return True if this disk has the same timeline under that number, or none (I7)."""
        return inventory.timelines.get(self.record.timeline) in (None, self.record)


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Result of fetching on one rank.

    Attributes:
        bases: fetched files of bases.
        logs: fetched steps of its own log.
        proven: timeline record of the base in its keeper's memory, if its disk has none and other
            ranks proved it.
    """

    bases: list[FetchedBase]
    logs: list[FetchedLog]
    proven: TimelineRecord | None = None


@dataclass(frozen=True, slots=True)
class OfferExtras:
    """Information of a rank besides its offer.

    Attributes:
        planned: called with the planned choice, the same on all ranks, before ranks fetch and wait
            for each other. Must not wait.
        unproven: marker of the base in its keeper's memory, if its disk does not know its timeline.
        left: returns its offer with markers of missing files, and the coverage of its disk. Called
            only if no base can be read by all ranks. None, on every rank: it does not count.
    """

    planned: Callable[[Choice], None]
    unproven: Marker | None = None
    left: Callable[[], tuple[Offer, Coverage]] | None = None


FetchCopies = Callable[[StartChannel, Offer, OfferExtras], FetchResult]
"""Fetches what a rank with this offer needs, and proves the timeline of an unproven base."""


class _Inventory(msgspec.Struct, forbid_unknown_fields=True):
    """Copies that a rank can read by itself, and those that its keeper holds for others.

    Attributes:
        offer: see :func:`.messages.encode_offer`.
        copies: marker of each copy, and the record of its timeline.
        room_bytes: bytes that the rank may take for files from other disks.
        unproven: marker of the base in its keeper's memory, of a timeline unknown to its disk.
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
    others: StartChannel,
    clock: Clock,
    say: AllGather,
    offer: Offer,
    copies: Sequence[PeerCopy],
    needs: Needs,
    *,
    extras: OfferExtras,
    step: int | None,
    logs: Sequence[PeerLog] = (),
    opens: OpenFile | None = None,
    room_bytes: int = 0,
) -> FetchResult:
    """Fetch what this rank needs from the memory of other nodes, and from the disks of other ranks.
    Every rank calls it.

    Args:
        others: messages to and from the other ranks.
        clock: source of time.
        say: all-gather among the ranks.
        offer: what this rank can read by itself.
        copies: copies that its keeper holds for others.
        needs: which ranks' files a rank reads.
        extras: further information for the plan.
        step: as for a resume.
        logs: steps of other ranks' logs that its keeper holds.
        opens: opens files of bases on this rank's disk, to serve them to ranks with another disk;
            None, on every rank: disks are not served.
        room_bytes: bytes that may be taken for files from other disks.

    Raises:
        DeadlineError: a rank is silent.
        RecoveryError: a rank has failed.
    """
    known = _Announced.by_all(say, offer, copies, logs, room_bytes, extras)
    if opens is not None:
        known.copies += offers_on_disks(known.offers, known.copies)
    attempt = 0
    with ExitStack() as opened:
        held = _held(copies, logs)
        if opens is not None:
            for base, piece in _pieces_on_disk(offer):
                files = ServedFiles(opens, base, piece.marker)
                opened.callback(files.close)
                # The same files in memory take precedence over those on the disk.
                held.setdefault((base, piece.marker.rank, False), files)
        while True:
            attempt += 1
            plan, choice = known.plan(needs, step)
            if choice is not None:
                extras.planned(choice)
            elif extras.left is not None and known.covers is None:
                # Only once, and on all ranks in the same round: add_remains() is an exchange, and
                # sets ``covers``.
                known.add_remains(say, extras.left)
                continue
            if not plan:
                return FetchResult([], [], known.proof.get(offer.rank))
            exchange = _Exchange(others, clock, offer.rank, attempt, plan, held, len(known.offers))
            # What was fetched in a round with damage is discarded: the next plan may be of another
            # base. Each such round drops at least one offer, so the loop ends.
            brought, damaged = exchange.run()
            unusable = say("fetch copies", {"damaged": [list(one.key) for one in damaged]})
            bad = {tuple(key) for one in unusable for key in one["damaged"]}
            if not bad:
                return replace(brought, proven=known.proof.get(offer.rank))
            # All ranks plan again without what any of them found damaged.
            known.drop(bad)


@dataclass(slots=True)
class _Announced:
    """Announcements of all ranks; equal on all ranks, so that each makes the same plan.

    Attributes:
        offers: what each rank can read by itself.
        copies: copies that ranks can serve.
        logs: steps of logs that ranks can serve.
        rooms: by rank: bytes that it may take for files from other disks.
        markers: by rank: marker of its unproven base.
        proof: by rank: timeline record of its marker, as proved by other ranks.
        covers: remains of bases on each disk; None until they are needed.
    """

    offers: list[Offer]
    copies: list[CopyOffer]
    logs: list[LogOffer]
    rooms: list[int]
    markers: dict[int, Marker]
    proof: dict[int, TimelineRecord]
    covers: list[Coverage] | None = None

    @classmethod
    def by_all(
        cls,
        say: AllGather,
        offer: Offer,
        copies: Sequence[PeerCopy],
        logs: Sequence[PeerLog],
        room_bytes: int,
        extras: OfferExtras,
    ) -> _Announced:
        """Announce what this rank has, and return what all have announced."""
        unproven = extras.unproven
        mine = _Inventory(
            encode_offer(offer),
            [(Stored(copy.marker), copy.record) for copy in copies],
            [LogOffer.of(offer.rank, log) for log in logs],
            room_bytes,
            None if unproven is None else Stored(unproven),
        )
        found = say("list the copies that their keepers hold", {"held": encode(mine)})
        # The own inventory is decoded like the others, so that all ranks plan from equal values.
        everyones = [_INVENTORY.decode(one["held"]) for one in found]
        offers = [decode_offer(one.offer) for one in everyones]
        lost = {rank: one.unproven for rank, one in enumerate(everyones)}
        markers = {rank: stored.record for rank, stored in lost.items() if stored is not None}
        return cls(
            offers,
            [
                CopyOffer(holder, marker.record, record)
                for holder, one in enumerate(everyones)
                for marker, record in one.copies
            ],
            [log for one in everyones for log in one.logs],
            [one.room_bytes for one in everyones],
            markers,
            prove_timelines(offers, markers),
        )

    def plan(self, needs: Needs, step: int | None) -> tuple[FetchPlan, Choice | None]:
        """Return what each rank fetches, and the choice that it makes possible."""
        return fetch_plan(
            with_proven_bases(self.offers, self.markers, self.proof),
            self.copies,
            needs,
            step,
            self.logs,
            rooms=self.rooms,
            covers=self.covers,
        )

    def add_remains(self, say: AllGather, left: Callable[[], tuple[Offer, Coverage]]) -> None:
        """Exchange what is left of incomplete bases, since no base can be read by all ranks."""
        offer, covers = left()
        mine = encode((encode_offer(offer), covers))
        found = say("list the remains of replicas", {"left": mine})
        everyones = [_REMAINS.decode(one["left"]) for one in found]
        self.offers = [decode_offer(one) for one, _ in everyones]
        self.covers = [one for _, one in everyones]

    def drop(self, damaged: Collection[tuple[int, ...]]) -> None:
        """Drop copies and steps that proved damaged, by their keys."""
        self.copies = [copy for copy in self.copies if copy.key not in damaged]
        self.logs = [log for log in self.logs if log.key not in damaged]


def _held(copies: Sequence[PeerCopy], logs: Sequence[PeerLog]) -> Held:
    held: Held = {}
    for copy in copies:
        marker = copy.marker
        held[BaseId(marker.timeline, marker.step), marker.rank, False] = copy.memory
    for log in logs:
        first = BaseId(log.steps.run.timeline, log.steps.run.first)
        held[first, log.source, True] = log.steps.memory
    return held


def _pieces_on_disk(offer: Offer) -> Iterator[tuple[BaseId, Piece]]:
    for base, one in offer.bases.items():
        for piece in one.pieces.values():
            if "disk" in piece.tiers:
                yield base, piece


class _Exchange:
    """Exchange of chunks: all ranks fetch the files that they need, and serve those that they
    have."""

    def __init__(
        self,
        others: StartChannel,
        clock: Clock,
        rank: int,
        attempt: int,
        plan: FetchPlan,
        held: Held,
        world: int,
    ) -> None:
        self._others = others
        self._clock = clock
        self._attempt = attempt
        self._held = held
        self._rank = rank
        self._todo = list(plan.get(rank, ()))
        self._incoming = IncomingBytes(clock.monotonic_s())
        self._brought = FetchResult([], [])
        self._damaged: list[CopyOffer | LogOffer] = []
        self._waits_for = set(plan) - {rank}
        # All ranks: one that has nothing to do here must not run into a deadline elsewhere.
        self._all = range(world)
        self._said_s = float("-inf")

    def run(self) -> tuple[FetchResult, list[CopyOffer | LogOffer]]:
        """Run until all ranks have what they need; return the result, and the damaged items.

        Raises:
            DeadlineError: a rank is silent.
            RecoveryError: a rank has failed.
        """
        self._take_own()
        self._next()
        self._others.doing = "fetches copies from other ranks"
        self._others.expect(self._all)
        # A rank that needs nothing more still serves until every rank with a plan is done.
        while self._todo or self._waits_for:
            self._request()
            self._report()
            self._others.attend(_TICK_S)
            self._others.raise_failed()
            while self._others.chunks:
                sender, message = self._others.chunks.popleft()
                if isinstance(message, ChunkRequest):
                    self._serve(sender, message)
                elif isinstance(message, ChunkReply):
                    self._take(sender, message)
                elif message.round == self._attempt and message.done:
                    # A late message of the round before must not count as done in this one.
                    self._waits_for.discard(sender)
            # A holder that fetches nothing itself is in no plan, but this rank waits for its
            # replies.
            self._others.check({*self._waits_for, *(one.holder for one in self._todo)})
        # Others may still wait for this rank's word that it needs nothing more.
        self._report(now=True)
        return self._brought, self._damaged

    def _take_own(self) -> None:
        """Take copies that this rank's own keeper holds, without messages."""
        todo = self._todo
        self._todo = []
        for one in todo:
            memory = self._held.get(one.place)
            if one.holder != self._rank or not isinstance(memory, memoryview):
                self._todo.append(one)
                continue
            self._finish(one, bytearray(memory[: one.size_bytes]))

    def _next(self) -> None:
        """Begin with the next item, or report that there is none."""
        if self._todo:
            now_s = self._clock.monotonic_s()
            self._incoming = IncomingBytes(now_s, self._todo[0].size_bytes)
        else:
            self._report(now=True)

    def _request(self) -> None:
        """Request the next chunks."""
        if not self._todo:
            return
        one = self._todo[0]
        base, rank, log = one.place
        for offset, size in self._incoming.next_requests(self._clock.monotonic_s()):
            self._others.tell(one.holder, ChunkRequest(base, rank, offset, size, log))

    def _serve(self, rank: int, wanted: ChunkRequest) -> None:
        held = self._held.get((wanted.base, wanted.rank, wanted.log))
        # The request comes from another process: its size is limited before memory is allocated for
        # it.
        if held is None or wanted.offset < 0 or not 0 < wanted.size_bytes <= CHUNK_BYTES:
            return
        if isinstance(held, ServedFiles):
            data = held.read(wanted.offset, wanted.size_bytes)
        else:
            data = bytes(held[wanted.offset : wanted.offset + wanted.size_bytes])
        reply = ChunkReply(wanted.base, wanted.rank, wanted.offset, data, wanted.log)
        self._others.tell(rank, reply)

    def _take(self, sender: int, part: ChunkReply) -> None:
        if not self._todo:
            return
        one = self._todo[0]
        # Not of the item being fetched: a repeated reply for an earlier one.
        if (sender, (part.base, part.rank, part.log)) != (one.holder, one.place):
            return
        if not self._incoming.add(part.offset, part.data, self._clock.monotonic_s()):
            return
        # At the expected offset, an empty reply means that the holder cannot read the file.
        if not part.data:
            _log.warning("rank %d can no longer read %s of rank %d", sender, one.base, part.rank)
            self._damaged.append(self._todo.pop(0))
            self._next()
        elif self._incoming.is_complete:
            self._finish(self._todo.pop(0), self._incoming.data)
            self._next()

    def _finish(self, one: CopyOffer | LogOffer, data: bytearray) -> None:
        memory = memoryview(data)
        try:
            record = TimelineRecord.decode(one.record, _WIRE)
            if isinstance(one, LogOffer):
                steps = PackedSteps(one.run, memory, one.index_bytes, one.index_digest)
                self._brought.logs.append(FetchedLog(record, steps, tuple(unpack_steps(steps))))
                return
            # Verified before it is offered: the ranks must agree only on files that can be read
            # (I7).
            check_files(one.marker, memory)
        except (DamageError, FormatError) as error:
            _log.warning("the copy held by rank %d is unusable: %s", one.holder, error)
            self._damaged.append(one)
            return
        held = HeldBase.of_copy(one.marker, memory)
        self._brought.bases.append(FetchedBase(held, record, disk=one.disk))

    def _report(self, *, now: bool = False) -> None:
        """Send a sign of life, and whether this rank has what it needs."""
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s < _ALIVE_EVERY_S and not now:
            return
        self._said_s = now_s
        for rank in self._all:
            if rank != self._rank:
                self._others.tell(rank, FetchProgress(self._attempt, not self._todo))
