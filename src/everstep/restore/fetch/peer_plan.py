"""What each rank fetches at a start from other nodes: decisions without I/O.

Of copies in the memory of keepers, and of what is on the disks of others: there a rank looks last,
for what it has nowhere else. So hosts may come back as other ranks than before, new ones without a
disk may join, and of ranks that trained alike a lost one takes what the others have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from everstep.commit.job.offer_codec import run_from_wire, run_to_wire
from everstep.commit.job.offers import (
    BaseOffer,
    Choice,
    Needs,
    Offer,
    Piece,
    choose,
    merge_timelines,
)
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogRun
from everstep.commit.peer_copies import merge_runs
from everstep.commit.retention import COPY_TIERS
from everstep.errors import RecoveryError
from everstep.format.digests import digest
from everstep.format.records import Manifest, Marker, TimelineRecord, manifest_of
from everstep.restore.fetch.copy_inventory import CopyOffer
from everstep.restore.fetch.peer_log import PeerLog
from everstep.restore.fetch.served_files import Coverage

__all__ = [
    "FetchPlan",
    "LogOffer",
    "fetch_plan",
    "logs_needed",
    "offers_on_disks",
    "prove_timelines",
    "with_logs",
    "with_proven_bases",
]

_LOG_WIRE = PurePath("log of a peer")


@dataclass(frozen=True, slots=True)
class LogOffer:
    """Steps of a rank's log that the keeper of some rank holds for it.

    Attributes:
        holder: that rank.
        record: of their timeline, as it was on the disk of ``source``.
        size_bytes, index_bytes, index_digest: see :class:`.peer_log.PackedSteps`.
    """

    holder: int
    source: int
    record: bytes
    run: LogRun
    size_bytes: int
    index_bytes: int
    index_digest: str

    @property
    def base(self) -> BaseId:
        """Timeline and first step, which name them."""
        return BaseId(self.run.timeline, self.run.first)

    @property
    def place(self) -> tuple[BaseId, int, bool]:
        """Names them among all that the holder has."""
        return self.base, self.source, True

    @property
    def key(self) -> tuple[int, ...]:
        """Names them among all copies."""
        return self.holder, self.source, self.run.timeline, self.run.first, 1

    @classmethod
    def to_wire(cls, log: PeerLog) -> list[Any]:
        """What a holder says of what it has."""
        steps = log.steps
        about = [steps.memory.nbytes, steps.index_bytes, steps.index_digest]
        return [log.source, log.record, run_to_wire(steps.run), *about]

    @classmethod
    def from_wire(cls, holder: int, fields: Sequence[Any]) -> LogOffer:
        """The inverse of :meth:`to_wire`."""
        source, record, run, size_bytes, index_bytes, index_digest = fields
        about = int(size_bytes), int(index_bytes), str(index_digest)
        return cls(holder, int(source), record, run_from_wire(*run), *about)


def with_logs(offers: Sequence[Offer], logs: Sequence[LogOffer]) -> list[Offer]:
    """What the ranks could offer if each had what is held of its log."""
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
    """What each rank fetches to reach the step of ``choice``: that of :func:`with_logs`."""
    base = choice.base
    reach = choice.reach
    if base is None or reach is None:
        return {}
    found: dict[int, list[LogOffer]] = {}
    for offer in offers:
        known: dict[BaseId, LogOffer] = {}
        for log in _of(offer, logs):
            if any(base.step < s <= reach.step and not _has(offer, log, s) for s in _steps(log)):
                known.setdefault(log.base, log)
        if known:
            found[offer.rank] = [log for _, log in sorted(known.items())]
    return found


def _of(offer: Offer, logs: Sequence[LogOffer]) -> list[LogOffer]:
    """Steps of a rank's log, of timelines that are what its disk has under that number, or of which
    it has none (I7)."""
    found = []
    for log in logs:
        known = offer.timelines.get(log.run.timeline)
        if log.source == offer.rank and (known is None or known.encode() == log.record):
            found.append(log)
    return found


def _steps(log: LogOffer) -> range:
    return range(log.run.first, log.run.last + 1)


def _has(offer: Offer, log: LogOffer, step: int) -> bool:
    """Whether a rank has a step itself, with all updates since the one before."""
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
"""What each rank fetches."""


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
    """What each rank fetches, so that all can read what would be chosen with these copies, and
    that choice; the same on every rank, as it is a function of what all have said.

    A copy counts only where its timeline is the one that the rank knows under that number (I7): two
    starts that saw nothing of each other may both have opened it.

    Args:
        rooms: by rank: bytes that it may take for what comes from others' disks; (): any number.
        covers: there is nothing else than what is left of replicas (``docs/design/ranks.md``); by
        rank: whose
            entries are in what it has.
    """
    disks = {offer.rank: offer.disk for offer in offers}
    lent: dict[int, list[CopyOffer]] = {}
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
        lent[offer.rank] = mine
    partly = covers is not None
    try:
        choice = choose(
            with_logs(counted, logs), step=step, needs=needs, fetch=False, partly=partly
        )
    except RecoveryError:  # the agreement will say so
        return {}, None
    plan: FetchPlan = {}
    for rank, mine in lent.items():
        found: dict[int, CopyOffer] = {}
        for copy in mine:
            if copy.base == choice.base:
                found.setdefault(copy.marker.rank, copy)
        if found:
            plan[rank] = [*found.values()]
    for rank, steps in logs_needed(offers, logs, choice).items():
        plan[rank] = [*plan.get(rank, ()), *steps]
    return plan, choice


def _of_one_start(
    offers: Sequence[Offer], copies: Sequence[CopyOffer | LogOffer]
) -> list[CopyOffer | LogOffer]:
    """Copies of timelines that are beyond doubt: the one that the disks have under that number; or
    where none has any, what all copies have. A rank with an empty disk could not tell, and would
    mix what two starts have made (I7)."""
    try:
        known, _ = merge_timelines(offers)
    except RecoveryError:  # the agreement will say so
        return []
    records: dict[int, set[bytes]] = {}
    for copy in copies:
        record = known.get(copy.base.timeline)
        mine = copy.record if record is None else record.encode()
        records.setdefault(copy.base.timeline, set()).add(mine)
    return [copy for copy in copies if records[copy.base.timeline] == {copy.record}]


def _fits(copy: CopyOffer, offer: Offer) -> bool:
    """Whether the timeline of a copy is what this rank has under that number, or it has none."""
    known = offer.timelines.get(copy.base.timeline)
    return known is None or known.encode() == copy.record


def _lacks(offer: Offer, copy: CopyOffer, needs: Needs) -> bool:
    """Whether a rank needs what was copied, and cannot read it by itself."""
    marker = copy.marker
    if marker.rank not in needs(offer.rank, Manifest((marker,) * marker.world)):
        return False
    base = offer.bases.get(copy.base)
    piece = None if base is None else base.pieces.get(marker.rank)
    if copy.disk:
        return piece is None
    return piece is None or set(piece.tiers) <= set(COPY_TIERS)  # a peer's is cheaper to read


def _with(offer: Offer, copies: Sequence[CopyOffer], tier: str = "peer") -> Offer:
    """What a rank could offer if it had these copies."""
    bases = dict(offer.bases)
    timelines = dict(offer.timelines)
    for copy in copies:
        old = bases.get(copy.base, BaseOffer({}))
        known = old.pieces.get(copy.marker.rank)
        if known is not None and known.marker != copy.marker:
            continue
        tiers = (tier, *(() if known is None else known.tiers))
        pieces = {**old.pieces, copy.marker.rank: Piece(copy.marker, tiers)}
        bases[copy.base] = replace(old, pieces=pieces)
        if timelines.get(copy.base.timeline) is None:
            timelines[copy.base.timeline] = TimelineRecord.decode(copy.record, _WIRE)
    return replace(offer, bases=bases, timelines=timelines)


def offers_on_disks(offers: Sequence[Offer], copies: Sequence[CopyOffer]) -> list[CopyOffer]:
    """Files of bases that ranks can hand out from their disks: of each disk once, and not what the
    keeper of the same rank holds, too (``copies``)."""
    try:
        known, _ = merge_timelines(offers)
    except RecoveryError:  # the agreement will say so
        return []
    held = {(copy.holder, copy.place) for copy in copies}
    found: dict[tuple[object, ...], CopyOffer] = {}
    for offer in offers:
        for base, one in offer.bases.items():
            record = known.get(base.timeline)
            if record is None:
                continue
            for piece in one.pieces.values():
                told = CopyOffer(offer.rank, piece.marker, record.encode(), disk=True)
                if "disk" in piece.tiers and (offer.rank, told.place) not in held:
                    found.setdefault((offer.disk, told.place), told)
    return list(found.values())


def prove_timelines(
    offers: Sequence[Offer], markers: Mapping[int, Marker]
) -> dict[int, TimelineRecord]:
    """Of bases that keepers hold for ranks whose disk has no record of the timeline: which one it
    is, where the manifest on another disk lists just these files. A number says nothing (I7).

    Args:
        markers: of what they hold, by rank.
    """
    if not markers:
        return {}
    try:
        known, _ = merge_timelines(offers)
    except RecoveryError:  # the agreement will say so
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
        if manifest is not None and record and manifests == {digest(manifest.encode())}:
            found[rank] = record
    return found


def with_proven_bases(
    offers: Sequence[Offer], markers: Mapping[int, Marker], records: Mapping[int, TimelineRecord]
) -> list[Offer]:
    """With what :func:`prove_timelines` says, in the memory of their keepers."""
    copies = {rank: CopyOffer(rank, markers[rank], one.encode()) for rank, one in records.items()}
    return [
        _with(offer, [copies[offer.rank]] if offer.rank in copies else [], "memory")
        for offer in offers
    ]


def _given(
    offer: Offer, copies: Sequence[CopyOffer], disks: Mapping[int, str], covers: Sequence[Coverage]
) -> list[CopyOffer]:
    """What a rank that has nothing of a base gets of what is left: the files on one disk, on which
    there is most that it had in common with others. Common state is once on each disk; where none
    has any, or all have another part of it, nothing comes."""

    def common_bytes(there: Sequence[CopyOffer]) -> int:
        found = [covers[copy.holder].get(copy.base, {}) for copy in there]
        if offer.rank >= there[0].marker.world:  # it had no part then, and begins with any
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
    """Without those from disks that a rank has no room for, all of a base together."""
    sizes: dict[BaseId, dict[int, int]] = {}
    for copy in copies:
        if copy.disk:
            sizes.setdefault(copy.base, {})[copy.marker.rank] = copy.size_bytes
    return [c for c in copies if not c.disk or sum(sizes[c.base].values()) <= room_bytes]
