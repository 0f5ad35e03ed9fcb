"""Decide what each rank fetches at a start from other nodes. No I/O.

Sources are copies in the memory of keepers, and the disks of other ranks, used last, for files that
a rank has nowhere else. So hosts may return as other ranks than before, new hosts without a disk
may join, and a lost rank takes the state of its replicas from other ranks.

Steps of other ranks' logs in the memory of peers count as well: they may lead all ranks to a later
step. Each rank then fetches those that it needs to reach it, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.commit import COPY_TIERS, BaseId
from everstep.commit.job import Choice, Needs, Offer
from everstep.commit.job.offers import choose, merge_timelines
from everstep.commit.log_reach import LogRun
from everstep.commit.peer_copies import merge_runs
from everstep.errors import RecoveryError
from everstep.format import Manifest, Marker, TimelineRecord, digest
from everstep.format.message_codec import Count, Rank
from everstep.format.records import manifest_of
from everstep.restore.fetch.held import PeerLog, size_of
from everstep.restore.fetch.rank_copies import add_piece

_LOG_WIRE = PurePath("log of a peer")

Coverage = Mapping[BaseId, Mapping[int, int]]
"""By base and rank: bytes on this disk that the rank needs too; only for ranks whose shard of every
tensor on this disk is there."""


@dataclass(frozen=True, slots=True)
class CopyOffer:
    """One rank's files of a base that rank ``holder`` can serve.

    Attributes:
        holder: rank that can serve them.
        marker: marker of the files.
        record: timeline record of the base, as bytes.
        disk: they are on its disk; otherwise in the memory of its keeper.
    """

    holder: int
    marker: Marker
    record: bytes
    disk: bool = False

    @property
    def base(self) -> BaseId:
        return BaseId(self.marker.timeline, self.marker.step)

    @property
    def place(self) -> tuple[BaseId, int, bool]:
        """Key among everything that the holder has."""
        return self.base, self.marker.rank, False

    @property
    def size_bytes(self) -> int:
        return size_of(self.marker)

    @property
    def key(self) -> tuple[int, ...]:
        """Key among all offers."""
        front = self.holder, self.marker.rank, self.base.timeline, self.base.step
        # Keys of steps of a log end in 1 (:class:`LogOffer`), those of copies in memory have no
        # fifth number.
        return (*front, 2) if self.disk else front


@dataclass(frozen=True, slots=True)
class LogOffer:
    """Steps of rank ``source``'s log that the keeper of rank ``holder`` holds.

    Attributes:
        holder: rank whose keeper holds them.
        source: rank that recorded them.
        record: their timeline record, in the bytes on the disk of ``source``.
        run: timeline and steps.
        size_bytes, index_bytes, index_digest: see :class:`.held.PackedSteps`.
    """

    holder: Rank
    source: Rank
    record: bytes
    run: LogRun
    size_bytes: Count
    index_bytes: Count
    index_digest: str

    @property
    def base(self) -> BaseId:
        """Timeline and first step, which identify the steps."""
        return BaseId(self.run.timeline, self.run.first)

    @property
    def place(self) -> tuple[BaseId, int, bool]:
        """Key among everything that the holder has."""
        return self.base, self.source, True

    @property
    def key(self) -> tuple[int, ...]:
        """Key among all offers."""
        return self.holder, self.source, self.run.timeline, self.run.first, 1

    @classmethod
    def of(cls, holder: int, log: PeerLog) -> LogOffer:
        """Return the offer of a held log."""
        steps = log.steps
        return cls(
            holder,
            log.source,
            log.record,
            steps.run,
            steps.memory.nbytes,
            steps.index_bytes,
            steps.index_digest,
        )


def with_logs(offers: Sequence[Offer], logs: Sequence[LogOffer]) -> list[Offer]:
    """Return the offers of the ranks with the steps that are held of their logs."""
    found = []
    for offer in offers:
        mine = _of(offer, logs)
        timelines = dict(offer.timelines)
        for log in mine:
            if timelines.get(log.run.timeline) is None:
                timelines[log.run.timeline] = TimelineRecord.decode(log.record, _LOG_WIRE)
        runs = merge_runs(offer.log, (log.run for log in mine)) if mine else offer.log
        found.append(replace(offer, log=runs, timelines=timelines))
    return found


def logs_needed(
    offers: Sequence[Offer], logs: Sequence[LogOffer], choice: Choice
) -> dict[int, list[LogOffer]]:
    """Return the steps that each rank fetches to reach the step of ``choice``, made from
    :func:`with_logs`."""
    base = choice.base
    reach = choice.reach
    if base is None or reach is None:
        return {}
    found: dict[int, list[LogOffer]] = {}
    for offer in offers:
        known: dict[BaseId, LogOffer] = {}
        for log in _of(offer, logs):
            if any(base.step < s <= reach.step and not _has(offer, log, s) for s in _steps(log)):
                # One of several holders suffices. All ranks have the same order of logs, so all
                # choose the same.
                known.setdefault(log.base, log)
        if known:
            found[offer.rank] = [log for _, log in sorted(known.items())]
    return found


def _of(offer: Offer, logs: Sequence[LogOffer]) -> list[LogOffer]:
    """Return the held steps of a rank's log whose timeline is the one on its disk under that
    number, or unknown there (I7)."""
    return [log for log in logs if log.source == offer.rank and _fits(log, offer)]


def _steps(log: LogOffer) -> range:
    return range(log.run.first, log.run.last + 1)


def _has(offer: Offer, log: LogOffer, step: int) -> bool:
    """Return True if a rank has a step itself, with all updates since the one before."""
    at = step - log.run.first
    before = log.run.lsns[at - 1] if at else log.run.after
    return any(
        run.timeline == log.run.timeline
        and run.first <= step <= run.last
        and run.follows(step, before)
        for run in offer.log
    )


_WIRE = PurePath("copy")

FetchPlan = dict[int, list[CopyOffer | LogOffer]]
"""Copies and steps to fetch, by rank."""


def fetch_plan(
    offers: Sequence[Offer],
    copies: Sequence[CopyOffer],
    needs: Needs,
    step: int | None,
    logs: Sequence[LogOffer] = (),
    *,
    rooms: Sequence[int] = (),
    covers: Sequence[Coverage] | None = None,
) -> tuple[FetchPlan, Choice | None]:
    """Plan what each rank fetches, so that all can read the base that would be chosen with these
    copies; the same on every rank, as it depends only on the exchanged offers.

    A copy counts only if its timeline is the one that the rank knows under that number (I7): two
    starts that did not see each other may both have opened it.

    Args:
        offers: what each rank can read by itself.
        copies: files of bases that ranks can serve.
        needs: which ranks' files a rank reads.
        step: requested step; None: the newest.
        logs: steps of logs that ranks can serve.
        rooms: by rank: bytes that it may take for files from other disks; (): unlimited.
        covers: set if only remains of replicas are left (``docs/design/ranks.md``); by rank:
            coverage
            of its disk.
    """
    disks = {offer.rank: offer.disk for offer in offers}
    usable: dict[int, list[CopyOffer]] = {}
    counted = []
    both = _of_one_start(offers, [*copies, *logs])
    copies = [copy for copy in both if isinstance(copy, CopyOffer)]
    logs = [log for log in both if isinstance(log, LogOffer)]
    for offer in offers:
        mine = [copy for copy in copies if _fits(copy, offer)]
        if covers is None:
            mine = [copy for copy in mine if _lacks(offer, copy, needs)]
        else:
            mine = _given(offer, mine, disks, covers)
        mine = _within(mine, rooms[offer.rank]) if rooms else mine
        counted.append(_with(offer, mine))
        usable[offer.rank] = mine
    partly = covers is not None
    try:
        choice = choose(
            with_logs(counted, logs), step=step, needs=needs, fetch=False, partly=partly
        )
    except RecoveryError:  # the agreement reports it
        return {}, None
    plan: FetchPlan = {}
    for rank, mine in usable.items():
        found: dict[int, CopyOffer] = {}
        for copy in mine:
            if copy.base == choice.base:
                # The first holder in the common order: all ranks must compute the same plan.
                found.setdefault(copy.marker.rank, copy)
        if found:
            plan[rank] = [*found.values()]
    for rank, steps in logs_needed(offers, logs, choice).items():
        plan[rank] = [*plan.get(rank, ()), *steps]
    return plan, choice


def _of_one_start(
    offers: Sequence[Offer], copies: Sequence[CopyOffer | LogOffer]
) -> list[CopyOffer | LogOffer]:
    """Return copies whose timeline is certain: the one on the disks under that number or, where no
    disk has it, the one that all copies agree on. A rank with an empty disk cannot tell, and would
    mix the results of two starts (I7)."""
    try:
        known, _ = merge_timelines(offers)
    except RecoveryError:  # the agreement reports it
        return []
    records: dict[int, set[bytes]] = {}
    for copy in copies:
        record = known.get(copy.base.timeline)
        mine = copy.record if record is None else record.encode()
        records.setdefault(copy.base.timeline, set()).add(mine)
    return [copy for copy in copies if records[copy.base.timeline] == {copy.record}]


def _fits(copy: CopyOffer | LogOffer, offer: Offer) -> bool:
    """Return True if the timeline of a copy is the one that this rank knows under that number, or
    unknown to it."""
    known = offer.timelines.get(copy.base.timeline)
    return known is None or known.encode() == copy.record


def _lacks(offer: Offer, copy: CopyOffer, needs: Needs) -> bool:
    """Return True if a rank needs the copied files and cannot read them by itself."""
    marker = copy.marker
    # The other markers may be unknown here. needs() only uses their number.
    if marker.rank not in needs(offer.rank, Manifest((marker,) * marker.world)):
        return False
    base = offer.bases.get(copy.base)
    piece = None if base is None else base.pieces.get(marker.rank)
    # Files on the disk of another rank are the last resort, after copies in tiers.
    if copy.disk:
        return piece is None
    return piece is None or set(piece.tiers) <= set(COPY_TIERS)  # a peer is cheaper to read


def _with(offer: Offer, copies: Sequence[CopyOffer], tier: str = "peer") -> Offer:
    """Return the offer of a rank with these copies."""
    bases = dict(offer.bases)
    timelines = dict(offer.timelines)
    for copy in copies:
        added = add_piece(bases, copy.marker, tier)
        if added and timelines.get(copy.base.timeline) is None:
            timelines[copy.base.timeline] = TimelineRecord.decode(copy.record, _WIRE)
    return replace(offer, bases=bases, timelines=timelines)


def offers_on_disks(offers: Sequence[Offer], copies: Sequence[CopyOffer]) -> list[CopyOffer]:
    """Return files of bases that ranks can serve from their disks: each disk once, and not what the
    keeper of the same rank already offers (``copies``)."""
    try:
        known, _ = merge_timelines(offers)
    except RecoveryError:  # the agreement reports it
        return []
    held = {(copy.holder, copy.place) for copy in copies}
    found: dict[tuple[object, ...], CopyOffer] = {}
    for offer in offers:
        for base, one in offer.bases.items():
            record = known.get(base.timeline)
            if record is None:
                continue
            for piece in one.pieces.values():
                copy = CopyOffer(offer.rank, piece.marker, record.encode(), disk=True)
                if "disk" in piece.tiers and (offer.rank, copy.place) not in held:
                    found.setdefault((offer.disk, copy.place), copy)
    return list(found.values())


def prove_timelines(
    offers: Sequence[Offer], markers: Mapping[int, Marker]
) -> dict[int, TimelineRecord]:
    """Prove the timeline of bases that keepers hold for ranks whose disk has no record of it: the
    manifest on another disk lists exactly these files. A number alone proves nothing (I7).

    Args:
        offers: what each rank can read.
        markers: markers of the held bases, by rank.
    """
    if not markers:
        return {}
    try:
        known, _ = merge_timelines(offers)
    except RecoveryError:  # the agreement reports it
        return {}
    found = {}
    for rank, marker in markers.items():
        base = BaseId(marker.timeline, marker.step)
        all_of_them = {m.rank: m for m in markers.values() if BaseId(m.timeline, m.step) == base}
        manifests = set()
        for offer in offers:
            one = offer.bases.get(base)
            if one is not None:
                all_of_them |= {r: p.marker for r, p in one.pieces.items() if r not in all_of_them}
                manifests |= {one.manifest} - {None}
        manifest = manifest_of(all_of_them)
        record = known.get(base.timeline)
        # All manifests must be that of these markers. Two different ones are of two histories.
        if manifest is not None and record and manifests == {digest(manifest.encode())}:
            found[rank] = record
    return found


def with_proven_bases(
    offers: Sequence[Offer], markers: Mapping[int, Marker], records: Mapping[int, TimelineRecord]
) -> list[Offer]:
    """Return the offers with the bases of :func:`prove_timelines` in the memory of their
    keepers."""
    copies = {rank: CopyOffer(rank, markers[rank], one.encode()) for rank, one in records.items()}
    return [
        _with(offer, [copies[offer.rank]] if offer.rank in copies else [], "memory")
        for offer in offers
    ]


def _given(
    offer: Offer, copies: Sequence[CopyOffer], disks: Mapping[int, str], covers: Sequence[Coverage]
) -> list[CopyOffer]:
    """Choose the files that a rank without anything of a base gets from remains of replicas: those
    on the disk that has most of the state that it shared. Shared state is once on each disk; where
    no disk has any, or all have other shards of it, it gets nothing."""

    def common_bytes(there: Sequence[CopyOffer]) -> int:
        found = [covers[copy.holder].get(copy.base, {}) for copy in there]
        if offer.rank >= there[0].marker.world:  # it is new and may start from any rank's state
            return max(max(sizes.values(), default=0) for sizes in found)
        return max(sizes.get(offer.rank, 0) for sizes in found)

    found: list[CopyOffer] = []
    for base in dict.fromkeys(copy.base for copy in copies):
        if base in offer.bases and offer.bases[base].pieces:
            continue
        there: dict[str, list[CopyOffer]] = {}
        for copy in copies:
            if copy.base == base and copy.disk:
                there.setdefault(disks[copy.holder], []).append(copy)
        best = max(there.values(), key=common_bytes, default=[])
        if best and common_bytes(best):
            found += best
    return found


def _within(copies: Sequence[CopyOffer], room_bytes: int) -> list[CopyOffer]:
    """Drop copies from disks that exceed the rank's memory, all of a base together."""
    sizes: dict[BaseId, dict[int, int]] = {}
    for copy in copies:
        if copy.disk:
            sizes.setdefault(copy.base, {})[copy.marker.rank] = copy.size_bytes
    return [c for c in copies if not c.disk or sum(sizes[c.base].values()) <= room_bytes]
