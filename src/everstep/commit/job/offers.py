"""What each rank can read when a job starts, and what all of them should restore (I7).

Ranks agree on the newest recovery point that *every* rank can read all of, along the history of
the newest timeline that any of them knows: the newest element of the intersection. TierCheck
(section 3.3) takes the minimum over the ranks of the newest version of each, which some rank may
not hold any more, and tells versions by the number of the step, which two timelines may both have.

A decision is a pure function of the offers, as a manifest is of the markers: whoever has all
offers decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.commit.lineage import (
    BaseId,
    Branch,
    branches_of,
    describe_abandoned,
    describe_lost_steps,
    describe_missing_steps,
    describe_unused,
    split_by_history,
)
from everstep.commit.log_reach import JobLogs, LogReader, LogRun, Reach
from everstep.commit.retention import COPY_TIERS, TIERS, VOLATILE_TIERS
from everstep.errors import RecoveryError
from everstep.format.digests import digest
from everstep.format.records import Manifest, Marker, TimelineRecord, manifest_of

__all__ = [
    "BaseOffer",
    "Choice",
    "Needs",
    "Offer",
    "Piece",
    "Source",
    "all_ranks",
    "choose",
    "given_up",
    "may_start_fresh",
    "merge_timelines",
    "recovery_hint",
    "unreadable_error",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """The files of one rank of a base, as some rank can read them.

    Attributes:
        marker: whose, and what they have to be.
        tiers: where they are, of :data:`everstep.commit.retention.TIERS`.
    """

    marker: Marker
    tiers: tuple[str, ...] = ("disk",)


@dataclass(frozen=True, slots=True)
class BaseOffer:
    """What one rank can read of a base.

    Attributes:
        pieces: by the rank that wrote them.
        manifest: digest of its manifest, where there is one.
        listed: markers that this manifest has of files that are not here; only where ranks are
            asked for them.
    """

    pieces: Mapping[int, Piece]
    manifest: str | None = None
    listed: tuple[Marker, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """All that one rank can read.

    Attributes:
        rank: of the job that starts.
        disk: name of the disk that it writes to.
        run: id of the run on it; None on an empty disk.
        next_timeline: the smallest number that nobody has taken there.
        timelines: their records; None where one is damaged.
        bases: those that have a manifest, and those that have markers.
        lost: bases of which there is something that cannot be read.
        log: this rank's own log, in its keeper's memory and on its disk.
        others: of the logs of ranks that trained in another number than this job has, those that
            this rank would read, by the number of that rank then; where it was asked to, also of
            as many as it has, in another layout.
    """

    rank: int
    disk: str
    run: str | None
    next_timeline: int
    timelines: Mapping[int, TimelineRecord | None]
    bases: Mapping[BaseId, BaseOffer]
    lost: tuple[BaseId, ...] = ()
    log: tuple[LogRun, ...] = ()
    others: Mapping[int, tuple[LogRun, ...]] = field(default_factory=dict)

    @property
    def logs(self) -> Iterator[LogRun]:
        """All of them."""
        yield from self.log
        for runs in self.others.values():
            yield from runs


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """A place to read a piece from; the cheapest sorts first.

    Attributes:
        cost: place of ``tier`` in :data:`everstep.commit.retention.TIERS`.
        rank: of the job that starts: the one that can read it there.
    """

    cost: int
    rank: int

    @property
    def tier(self) -> str:
        return TIERS[self.cost]


@dataclass(frozen=True, slots=True)
class Choice:
    """What to restore.

    Attributes:
        base: None: there is nothing, training starts afresh.
        manifest: of that base.
        sources: for each rank of the base, where its files are, the cheapest first.
        complete: manifests of all bases that are whole on the disks, to be on every disk.
        timelines: records of the history, to be on every disk.
        run: id of the run; None where nobody has one.
        timeline: the number to open.
        skipped: ``(base, why)`` of what is newer, or was asked for.
        unreadable: bases that have a manifest, and that the ranks cannot read all of.
        durable: every piece of the base is in a tier that survives a power loss.
        elsewhere: bases that the ranks can read all of only with what copies hold: no disk may
            count on them.
        reach: the step that every rank replays to behind the base; None: the base itself.
        readers: where another number of ranks has written the log up to there: who reads what.
        partly: of some ranks no files are left, or not where they are needed: what they had in
            common with others is taken from those.
        note: what is to be said of where it lies in the history, in words; "": nothing.
    """

    base: BaseId | None
    manifest: Manifest | None
    sources: Mapping[int, tuple[Source, ...]]
    complete: tuple[Manifest, ...]
    timelines: tuple[TimelineRecord, ...]
    run: str | None
    timeline: int
    skipped: tuple[tuple[BaseId, str], ...] = ()
    unreadable: tuple[BaseId, ...] = ()
    durable: bool = False
    elsewhere: tuple[BaseId, ...] = ()
    reach: Reach | None = None
    readers: tuple[LogReader, ...] = ()
    partly: bool = False
    note: str = ""

    @property
    def end(self) -> BaseId | None:
        """Timeline and step that are restored."""
        return self.base if self.reach is None else self.reach.end


Needs = Callable[[int, Manifest], Collection[int]]
"""Which ranks' files of a base a rank of the job that starts needs."""


def all_ranks(rank: int, manifest: Manifest) -> Collection[int]:
    """The default: every rank needs all files, as after a change of the layout."""
    return range(len(manifest.markers))


@dataclass(slots=True)
class _Base:
    """What is known of one base, over all offers."""

    pieces: dict[int, dict[str, list[tuple[Source, int]]]] = field(default_factory=dict)
    markers: dict[int, dict[str, Marker]] = field(default_factory=dict)
    listed: dict[int, Marker] = field(default_factory=dict)
    manifests: set[str] = field(default_factory=set)
    why: str = ""

    def without_copies(self) -> _Base:
        """What is left of it if copies in other tiers are not counted."""
        left = {
            rank: {
                key: [found for found in sources if found[0].tier not in COPY_TIERS]
                for key, sources in places.items()
            }
            for rank, places in self.pieces.items()
        }
        return _Base(left, self.markers, self.listed, self.manifests)


def choose(
    offers: Sequence[Offer],
    *,
    step: int | None = None,
    needs: Needs = all_ranks,
    fetch: bool = True,
    unusable: Collection[tuple[BaseId, int, Source]] = (),
    unusable_log: Collection[tuple[int, int, int]] = (),
    relaid: Collection[int] = (),
    partly: bool = False,
) -> Choice:
    """The newest recovery point that every rank can read.

    Args:
        offers: one of each rank of the job.
        step: the newest of this step, those of the history first, by base and log or by a base
            alone, then bases of any timeline; 0 with no such base: start afresh.
        needs: what a rank has to read of a base.
        fetch: ranks hand each other what they can read.
        unusable: pieces that turned out to be damaged: base, its rank, where.
        unusable_log: of logs what turned out to be of no use: rank, timeline and step.
        relaid: timelines whose ranks, as many as start now, had another layout.
        partly: where nothing else is left, a base of which each rank can read the files of some.

    Raises:
        RecoveryError: there are bases, or have been, and none can be read by all; there is none of
            ``step``; the disks are of several runs, or have been written apart from each other.
    """
    assert sorted(offer.rank for offer in offers) == list(range(len(offers)))
    run = _run_of(offers)
    records, apart = merge_timelines(offers)
    bases = _bases_of(offers, apart, set(unusable))
    readable: dict[BaseId, Manifest] = {}
    for one, known in bases.items():
        found = _manifest(known)
        if found is not None and _all_can_read(known, found, offers, needs, fetch):
            readable[one] = found
    lost = {base for offer in offers for base in offer.lost}
    # Not those that are half deleted: where a timeline forked from one, all of its parent counts.
    whole = {base for base, known in bases.items() if len(known.markers) == _world(known)}
    logged = {r.timeline for o in offers for r in o.logs if (o.rank, r.timeline) not in apart}
    branches = branches_of(records, whole | lost, logged)
    here, elsewhere = split_by_history(readable, branches)
    logs = _logs_of(offers, apart, records, branches, unusable_log, relaid)
    best = logs.best({base: readable[base] for base in here}, step)
    others = [base for base in elsewhere if step is not None and base.step == step]
    chosen = [best] if best is not None else [(base, None) for base in others[:1]]
    left: dict[BaseId, Manifest] = {}
    if partly and not chosen:
        left = _left_of(bases, offers)
        there = branches_of(records, whole | lost | left.keys(), logged)
        found_here, _ = split_by_history(left, there)
        chosen = [(base, None) for base in found_here if step in (None, base.step)][:1]
    note = None
    if not chosen:
        good = whole | lost | {base for base, known in bases.items() if known.manifests}
        good -= given_up(good, branches, offers)
        had = None if good else describe_missing_steps(records, branches)
        if not may_start_fresh(step, good, had):
            why = {base: known.why or _why(base, readable) for base, known in bases.items()}
            raise unreadable_error(step, why, lost, here + elsewhere, len(offers), had)
        if step is None:
            note = describe_unused([*bases, *logs.ends()], branches)
    base, reach = chosen[0] if chosen else (None, None)
    manifest = None if base is None else {**left, **readable}[base]
    newer = [other for other in bases if base is None or other > base]
    leads = reach is not None and reach.count > 0
    end = base if reach is None else reach.end
    if end is not None and step is not None:
        note = describe_abandoned(end, branches)
    if step is None and end is not None and manifest is not None:
        kept = logs.kept(end, manifest, {base: readable[base] for base in here})
        note = describe_lost_steps(end, branches, kept)
    return Choice(
        base,
        manifest,
        {} if base is None or manifest is None else _sources(bases[base], manifest),
        tuple(readable[other] for other in sorted(readable) if _is_on_disks(bases[other])),
        tuple(record for _, record in sorted(records.items()) if record is not None),
        run,
        max(offer.next_timeline for offer in offers),
        (
            *((other, bases[other].why or _why(other, readable)) for other in sorted(newer)),
            *(logs.refused(end, manifest) if end and manifest else ()),
            *_cut_off(manifest, reach, step, len(offers)),
        ),
        tuple(sorted(b for b in bases if b not in readable and bases[b].manifests)),
        base is not None and base in readable and _is_durable(bases[base]),
        tuple(
            other
            for other in sorted(readable)
            if not _all_can_read(
                bases[other].without_copies(), readable[other], offers, needs, fetch
            )
        ),
        reach if leads else None,
        logs.readers(base, manifest, reach) if leads and base and manifest and reach else (),
        base is not None and base not in readable,
        note or "",
    )


def _logs_of(
    offers: Sequence[Offer],
    apart: Collection[tuple[int, int]],
    records: Mapping[int, TimelineRecord | None],
    branches: Mapping[int, Branch],
    unusable: Collection[tuple[int, int, int]],
    relaid: Collection[int],
) -> JobLogs:
    """All logs, without what belongs to no timeline."""
    own: list[list[LogRun]] = []
    others: list[dict[int, list[LogRun]]] = []
    for offer in sorted(offers, key=lambda offer: offer.rank):

        def fit(runs: Iterable[LogRun], rank: int = offer.rank) -> list[LogRun]:
            return [run for run in runs if (rank, run.timeline) not in apart]

        own.append(fit(offer.log))
        others.append({source: fit(runs) for source, runs in offer.others.items()})
    return JobLogs(own, records, branches, unusable, others, relaid)


def _run_of(offers: Sequence[Offer]) -> str | None:
    runs = {offer.run: offer for offer in offers if offer.run is not None}
    if len(runs) > 1:
        where = ", ".join(f"rank {offer.rank}: run {run}" for run, offer in sorted(runs.items()))
        raise RecoveryError(
            f"the ranks see different runs ({where})",
            hint="give every rank the same run folder, or remove those of other runs",
        )
    return next(iter(runs), None)


def _bases_of(
    offers: Sequence[Offer],
    apart: Collection[tuple[int, int]],
    unusable: Collection[tuple[BaseId, int, Source]],
) -> dict[BaseId, _Base]:
    found: dict[BaseId, _Base] = {}
    for offer in offers:
        for base, one in offer.bases.items():
            if (offer.rank, base.timeline) in apart:
                continue
            known = found.setdefault(base, _Base())
            if one.manifest is not None:
                known.manifests.add(one.manifest)
            known.listed |= {marker.rank: marker for marker in one.listed}
            for rank, piece in one.pieces.items():
                key = digest(piece.marker.encode())
                known.markers.setdefault(rank, {})[key] = piece.marker
                for tier in piece.tiers:
                    source = Source(TIERS.index(tier), offer.rank)
                    if (base, rank, source) in unusable:
                        known.why = (
                            f"the files of rank {rank} are damaged, or do not fit those of others"
                        )
                        continue
                    places = known.pieces.setdefault(rank, {})
                    places.setdefault(key, []).append((source, offer.rank))
    return found


def _manifest(known: _Base) -> Manifest | None:
    """The manifest of a base, or None where files are missing or the ranks contradict each
    other: what two attempts have left is not mixed."""
    readable = {rank: known.markers[rank] for rank in known.pieces}
    if any(len(markers) > 1 for markers in known.markers.values()) or len(known.manifests) > 1:
        known.why = "the disks contradict each other"
        return None
    manifest = manifest_of({rank: next(iter(m.values())) for rank, m in readable.items()})
    if manifest is None:
        known.why = known.why or _missing(known)
    elif known.manifests and known.manifests != {digest(manifest.encode())}:
        known.why = "its files are not those that its manifest lists"
        return None
    return manifest


def _left_of(bases: Mapping[BaseId, _Base], offers: Sequence[Offer]) -> dict[BaseId, Manifest]:
    """Committed bases of which each rank can read something."""
    found = {}
    for base, known in bases.items():
        if any(len(markers) > 1 for markers in known.markers.values()):
            continue
        markers = known.listed | {rank: next(iter(m.values())) for rank, m in known.markers.items()}
        manifest = manifest_of(markers)
        holders = {h for m in known.pieces.values() for places in m.values() for _, h in places}
        committed = manifest is not None and known.manifests == {digest(manifest.encode())}
        if manifest is not None and committed and holders >= {offer.rank for offer in offers}:
            found[base] = manifest
    return found


def _world(known: _Base) -> int | None:
    worlds = {marker.world for markers in known.markers.values() for marker in markers.values()}
    return worlds.pop() if len(worlds) == 1 else None


def _missing(known: _Base) -> str:
    world = _world(known)
    if world is None:
        return "no rank's files can be read"
    missing = sorted(set(range(world)) - known.pieces.keys())
    if not missing:
        return "its ranks' markers are not of the same updates"
    return "the files of rank " + ", ".join(map(str, missing[:8])) + " are missing"


def _all_can_read(
    known: _Base, manifest: Manifest, offers: Sequence[Offer], needs: Needs, fetch: bool
) -> bool:
    for offer in offers:
        for rank in needs(offer.rank, manifest):
            holders = {holder for places in known.pieces[rank].values() for _, holder in places}
            if not holders or not (fetch or offer.rank in holders):
                known.why = known.why or f"rank {offer.rank} cannot read the files of rank {rank}"
                return False
    return True


def _is_on_disks(known: _Base) -> bool:
    """Whether every piece is on a rank's own disk."""
    return all(
        any(source.tier == "disk" for found in places.values() for source, _ in found)
        for places in known.pieces.values()
    )


def _is_durable(known: _Base) -> bool:
    tiers = (
        {source.tier for found in places.values() for source, _ in found}
        for places in known.pieces.values()
    )
    return all(not found <= set(VOLATILE_TIERS) for found in tiers)


def _sources(known: _Base, manifest: Manifest) -> dict[int, tuple[Source, ...]]:
    return {
        marker.rank: tuple(
            sorted(s for places in known.pieces.get(marker.rank, {}).values() for s, _ in places)
        )
        for marker in manifest.markers
    }


def _why(base: BaseId, readable: Collection[BaseId]) -> str:
    return "not in the history of the newest timeline" if base in readable else "not readable"


def _cut_off(
    manifest: Manifest | None, reach: Reach | None, step: int | None, world: int
) -> Iterable[tuple[BaseId, str]]:
    """What the logs of some ranks have, and not those of all.

    Args:
        manifest: of the base.
        world: ranks that start.
    """
    if manifest is None or reach is None or step is not None:
        return
    before = len(manifest.markers)
    whose = "" if before == world else f" of {before} that wrote it"
    if reach.furthest > reach.step:
        why = f"rank {reach.shortest}{whose} gets no further; others have up to {reach.furthest}"
    elif reach.beyond:
        why = (
            f"no rank{whose} gets to step {reach.step + 1}: the state had changed there, or it was "
        )
        why += f"not recorded, and what they have up to step {reach.beyond} is of no use"
    else:
        return
    yield BaseId(reach.timeline, reach.step + 1), f"log: {why}"


_FROM_SCRATCH = "resume(step=0) starts from scratch"


def recovery_hint(elsewhere: Sequence[BaseId] = ()) -> str:
    """What to do where a run has had steps, and no base of them is left.

    Args:
        elsewhere: bases that its history has turned away from, the newest first.
    """
    if elsewhere:
        first = elsewhere[0]
        return f"resume(step={first.step}) goes on from {first}; {_FROM_SCRATCH}"
    return (
        "bring back what was deleted (of a copy that was made while training went on: copy once "
        f"more), or the tiers= that have copies; {_FROM_SCRATCH}"
    )


def given_up(
    bases: Iterable[BaseId], branches: Mapping[int, Branch], offers: Sequence[Offer]
) -> set[BaseId]:
    """Which of some bases the newest timeline has turned away from, by a start that every rank that
    has something of them took part in: what hosts did without them gives nothing up."""
    _, elsewhere = split_by_history(bases, branches)

    def knows(offer: Offer, base: BaseId) -> bool:
        has = base in offer.bases or base in offer.lost
        return not has or max(branches) in offer.timelines

    return {base for base in elsewhere if all(knows(offer, base) for offer in offers)}


def may_start_fresh(step: int | None, good: Collection[BaseId], had: str | None) -> bool:
    """Whether starting afresh throws nothing away, or is what was asked for.

    Args:
        step: that was asked for.
        good: bases that are, or may have been, whole, and were not given up.
        had: see :func:`everstep.commit.lineage.describe_missing_steps`.
    """
    return step == 0 if step is not None else not good and had is None


def unreadable_error(
    step: int | None,
    why: Mapping[BaseId, str],
    lost: Iterable[BaseId],
    readable: Sequence[BaseId],
    world: int,
    had: str | None,
) -> RecoveryError:
    """What is said where a job may not start afresh.

    Args:
        why: of bases that there are: why they cannot be used.
        lost: bases of which there is something that cannot be read.
        readable: those that can, of any timeline.
        had: what the history has had, where there is no base of it.
    """
    can_read = "can be read" if world == 1 else "every rank can read"
    if step is not None:
        return RecoveryError(
            f"there is no base of step {step} that {can_read}",
            step=step,
            hint="bases there are: " + (", ".join(map(str, readable[:20])) or "none"),
        )
    reasons = [f"  {base}: {reason}" for base, reason in sorted(why.items(), reverse=True)]
    reasons += [f"  {base}: its records are damaged" for base in sorted(set(lost) - why.keys())]
    hint = _FROM_SCRATCH if had is None else recovery_hint()
    hint = f"start with the hosts that have the missing files; {hint}"
    hint = recovery_hint(readable) if readable else hint
    said = had or f"there are bases, but none that {can_read}"
    return RecoveryError("\n".join([f"{said}:" if reasons else said, *reasons]), hint=hint)


def merge_timelines(
    offers: Sequence[Offer],
) -> tuple[dict[int, TimelineRecord | None], set[tuple[int, int]]]:
    """The timelines that there are, and ``(rank, timeline)`` of what belongs to none of them.

    Two starts that saw none of each other's disks may both have opened a timeline of the same
    number. One that has neither bases nor a log was never trained on and does not count.

    Raises:
        RecoveryError: both were trained on: nobody but a person can say which one is meant.
    """
    records: dict[int, TimelineRecord | None] = {}
    apart: set[tuple[int, int]] = set()
    for number in sorted({number for offer in offers for number in offer.timelines}):
        kinds: dict[bytes, tuple[TimelineRecord, list[int]]] = {}
        for offer in offers:
            record = offer.timelines.get(number)
            if record is not None:
                kinds.setdefault(record.encode(), (record, []))[1].append(offer.rank)
        used = {
            key
            for key, (_, ranks) in kinds.items()
            if any(_trained_on(offer, number) for offer in offers if offer.rank in ranks)
        }
        if len(used) > 1:
            ranks = " and ".join(str(kinds[key][1]) for key in sorted(used))
            raise RecoveryError(
                f"timeline {number} was opened by two starts of the job that knew nothing of each "
                f"other, and both trained on: the disks of ranks {ranks} differ",
                hint="start with the hosts of one of them only, and empty the others' run folders",
            )
        wins = next(iter(used), None) or (min(kinds) if kinds else None)
        records[number] = None if wins is None else kinds[wins][0]
        apart |= {(r, number) for key in kinds if key != wins for r in kinds[key][1]}
    return records, apart


def _trained_on(offer: Offer, timeline: int) -> bool:
    """Whether a rank has anything of a timeline but its record."""
    logged = any(run.timeline == timeline for run in offer.logs)
    return logged or any(base.timeline == timeline for base in offer.bases)
