"""Inventories of the ranks of a starting job, and the choice of what all ranks restore (I7).

The ranks agree on the newest recovery point that *every* rank can read completely, along the
history of the newest timeline that any rank knows: the newest element of the intersection.
TierCheck (section 3.3) takes the minimum over the ranks of each rank's newest version. Some rank
may no longer hold that version; and TierCheck tells versions apart by step number, which two
timelines may share.

A choice is a pure function of the offers: each rank that has all offers makes the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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
from everstep.commit.retention import COPY_TIERS, TIERS, VOLATILE_TIERS, Tier, TierIndex
from everstep.errors import RecoveryError
from everstep.format import Manifest, Marker, TimelineRecord, digest
from everstep.format.message_codec import Rank
from everstep.format.records import manifest_of


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's files of a base, as some rank can read them.

    Attributes:
        marker: marker with owner, names and digests of the files.
        tiers: tiers where they are, of :data:`everstep.commit.retention.TIERS`.
    """

    marker: Marker
    tiers: tuple[Tier, ...] = ("disk",)


@dataclass(frozen=True, slots=True)
class BaseOffer:
    """Files of a base that one rank can read.

    Attributes:
        pieces: files by the rank that wrote them.
        manifest: digest of the manifest, if there is one.
        listed: markers in that manifest whose files are missing here; only if they were requested.
    """

    pieces: Mapping[int, Piece]
    manifest: str | None = None
    listed: tuple[Marker, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """Inventory of one rank: all bases and logs that it can read.

    Attributes:
        rank: rank in the job that starts.
        disk: name of the disk that the rank writes to.
        run: id of the run on that disk; None on an empty disk.
        next_timeline: smallest free timeline number there.
        timelines: records by timeline number; None where a record is damaged.
        bases: bases that have a manifest or markers.
        lost: bases with records that cannot be read.
        log: this rank's own log, in its keeper's memory and on its disk.
        others: logs of another number of ranks that this rank would read, by the rank number at
            that time; if requested, also logs of the same number of ranks with another layout.
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
        """All runs of all logs."""
        yield from self.log
        for runs in self.others.values():
            yield from runs


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """Place to read a piece from; the cheapest sorts first.

    Attributes:
        cost: index of the tier in :data:`everstep.commit.retention.TIERS`.
        rank: rank of the starting job that can read it there.
    """

    cost: TierIndex
    rank: Rank

    @property
    def tier(self) -> str:
        """Name of the tier."""
        return TIERS[self.cost]


@dataclass(frozen=True, slots=True)
class Choice:
    """State to restore, and the data needed to restore it.

    Attributes:
        base: None if there is nothing to restore and training starts at step 0.
        manifest: manifest of the base.
        sources: sources of each saved rank's files, the cheapest first.
        complete: manifests of all bases that are complete on the disks; each disk gets them.
        timelines: records of the history; each disk gets them.
        run: id of the run; None if no disk has one.
        timeline: number of the timeline to open.
        skipped: ``(base, reason)`` for newer or requested bases that are not used.
        unreadable: bases with a manifest that the ranks cannot read completely.
        durable: each piece of the base is in a tier that survives a power loss.
        elsewhere: bases that are readable only with copies in other tiers; no disk may rely on
        them.
        reach: step that every rank replays to from the base; None for the base itself.
        readers: assignment of log steps to ranks, if the log is of another number of ranks.
        partly: files of some ranks are lost or out of reach; what they shared with other ranks is
            read from those.
        note: message about the place of the state in the history; "" if there is none.
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
        """Timeline and step to restore."""
        return self.base if self.reach is None else self.reach.end


Needs = Callable[[int, Manifest], Collection[int]]
"""Returns the ranks whose files of a base a rank of the starting job needs."""


def all_ranks(rank: int, manifest: Manifest) -> Collection[int]:
    """Return all ranks: the default, as after a change of the layout."""
    return range(len(manifest.markers))


@dataclass(slots=True)
class Excluded:
    """Data that attempts to restore have found unusable.

    Attributes:
        files: pieces found damaged: base, its rank, source.
        log: records of logs found unusable: rank, timeline and step.
        relaid: timelines of the same number of ranks with another layout.
    """

    files: set[tuple[BaseId, int, Source]] = field(default_factory=set)
    log: set[tuple[int, int, int]] = field(default_factory=set)
    relaid: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Base:
    """Everything known of one base, over all offers."""

    # By rank, then by digest of the marker: places to read from, and the rank that can. Markers of
    # one rank that differ come from different attempts to write the base.
    pieces: dict[int, dict[str, list[tuple[Source, int]]]] = field(default_factory=dict)
    markers: dict[int, dict[str, Marker]] = field(default_factory=dict)
    listed: dict[int, Marker] = field(default_factory=dict)
    manifests: set[str] = field(default_factory=set)
    why: str = ""

    def without_copies(self) -> _Base:
        """Return the same base without the copies in other tiers."""
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
    excluded: Excluded | None = None,
    partly: bool = False,
) -> Choice:
    """Choose the newest recovery point that every rank can read.

    Args:
        offers: one offer of each rank of the job.
        step: restore this step, by base and log or by a base alone; bases of the history take
            precedence over those of other timelines. 0 without such a base: start at step 0.
        needs: returns the ranks whose files of a base a rank must read.
        fetch: ranks can read files through one another.
        excluded: data that an attempt to restore has found unusable.
        partly: as a last resort, accept a base of which each rank can read the files of some ranks.

    Raises:
        RecoveryError: bases exist, or existed, but none is readable by all ranks; there is none of
            ``step``; the disks belong to several runs, or were written independently of each other.
    """
    assert sorted(offer.rank for offer in offers) == list(range(len(offers)))
    candidates = _Candidates(offers, needs, fetch, excluded or Excluded())
    pick = candidates.pick(step)
    if pick is None and partly:
        pick = candidates.pick_partly(step)
    note = candidates.fresh_note(step) if pick is None else candidates.note(pick, step)
    return candidates.choice(pick, step, note or "")


class _Pick(NamedTuple):
    """Base that was picked, its manifest, and how far the logs reach from it."""

    base: BaseId
    manifest: Manifest
    reach: Reach | None = None

    @property
    def end(self) -> BaseId:
        """Timeline and step to restore."""
        return self.base if self.reach is None else self.reach.end


class _Candidates:
    """Bases and logs of all offers, along the history of the run.

    Args: as of :func:`choose`.
    """

    def __init__(
        self,
        offers: Sequence[Offer],
        needs: Needs,
        fetch: bool,
        excluded: Excluded,
    ) -> None:
        self._offers = offers
        self._needs = needs
        self._fetch = fetch
        self._run = _run_of(offers)
        self._records, foreign = merge_timelines(offers)
        self._bases = _bases_of(offers, foreign, excluded.files)
        self._readable: dict[BaseId, Manifest] = {}
        for base, known in self._bases.items():
            manifest = _manifest(known)
            if manifest is not None and self._all_can_read(known, manifest):
                self._readable[base] = manifest
        lost = {base for offer in offers for base in offer.lost}
        # Half-deleted bases do not count: a timeline that forked from one keeps all of its parent.
        whole = {base for base, known in self._bases.items() if len(known.markers) == _world(known)}
        self._lost = lost
        self._existing = whole | lost
        self._logged = {
            run.timeline
            for offer in offers
            for run in offer.logs
            if (offer.rank, run.timeline) not in foreign
        }
        self._branches = branches_of(self._records, self._existing, self._logged)
        self._here, self._elsewhere = split_by_history(self._readable, self._branches)
        self._logs = _logs_of(offers, foreign, self._records, self._branches, excluded)

    def pick(self, step: int | None) -> _Pick | None:
        """Return the best base that every rank can read."""
        best = self._logs.best({base: self._readable[base] for base in self._here}, step)
        if best is not None:
            base, reach = best
            return _Pick(base, self._readable[base], reach)
        # A step that was asked for may also be of an abandoned branch.
        for base in self._elsewhere:
            if step is not None and base.step == step:
                return _Pick(base, self._readable[base])
        return None

    def pick_partly(self, step: int | None) -> _Pick | None:
        """Return the newest base of which every rank can read some files: the last resort."""
        left = _left_of(self._bases, self._offers)
        # These bases count as existing: otherwise timelines that forked from them would be void.
        branches = branches_of(self._records, self._existing | left.keys(), self._logged)
        here, _ = split_by_history(left, branches)
        return next((_Pick(base, left[base]) for base in here if step in (None, base.step)), None)

    def fresh_note(self, step: int | None) -> str | None:
        """Return the note of a start at step 0.

        Raises:
            RecoveryError: the job may not start at step 0.
        """
        good = self._existing | {base for base, known in self._bases.items() if known.manifests}
        good -= _abandoned(good, self._branches, self._offers)
        had = None if good else describe_missing_steps(self._records, self._branches)
        if not may_start_fresh(step, good, had):
            why = {base: self._reason(base) for base in self._bases}
            readable = self._here + self._elsewhere
            raise unreadable_error(step, why, self._lost, readable, len(self._offers), had)
        if step is not None:
            return None
        return describe_unused([*self._bases, *self._logs.ends()], self._branches)

    def note(self, pick: _Pick, step: int | None) -> str | None:
        """Return the note about the place of the picked state in the history."""
        if step is not None:
            return describe_abandoned(pick.end, self._branches)
        here = {base: self._readable[base] for base in self._here}
        kept = self._logs.kept(pick.end, pick.manifest, here)
        return describe_lost_steps(pick.end, self._branches, kept)

    def choice(self, pick: _Pick | None, step: int | None, note: str) -> Choice:
        """Return the choice, with all that the ranks need to carry it out."""
        readable = sorted(self._readable)
        choice = Choice(
            base=None,
            manifest=None,
            sources={},
            # A manifest on a disk promises files on disks, so bases that are only in memory or in
            # copies get none.
            complete=tuple(self._readable[b] for b in readable if _is_on_disks(self._bases[b])),
            timelines=tuple(r for _, r in sorted(self._records.items()) if r is not None),
            run=self._run,
            timeline=max(offer.next_timeline for offer in self._offers),
            skipped=self._skipped(pick, step),
            unreadable=tuple(
                sorted(
                    base
                    for base, known in self._bases.items()
                    if known.manifests and base not in self._readable
                )
            ),
            elsewhere=tuple(
                base
                for base in readable
                if not self._all_can_read(self._bases[base].without_copies(), self._readable[base])
            ),
            note=note,
        )
        if pick is None:
            return choice
        reach = pick.reach if pick.reach is not None and pick.reach.count > 0 else None
        known = self._bases[pick.base]
        whole = pick.base in self._readable
        return replace(
            choice,
            base=pick.base,
            manifest=pick.manifest,
            sources=_sources(known, pick.manifest),
            durable=whole and _is_durable(known),
            reach=reach,
            readers=() if reach is None else self._logs.readers(pick.base, pick.manifest, reach),
            partly=not whole,
        )

    def _skipped(self, pick: _Pick | None, step: int | None) -> tuple[tuple[BaseId, str], ...]:
        """Return newer bases and log steps that are not used, with the reasons."""
        newer = sorted(base for base in self._bases if pick is None or base > pick.base)
        skipped = [(base, self._reason(base)) for base in newer]
        if pick is not None:
            skipped += self._logs.refused(pick.end, pick.manifest)
            skipped += _cut_off(pick.manifest, pick.reach, step, len(self._offers))
        return tuple(skipped)

    def _reason(self, base: BaseId) -> str:
        if base not in self._readable:
            return self._bases[base].why or "not readable"
        return self._bases[base].why or "not in the history of the newest timeline"

    def _all_can_read(self, known: _Base, manifest: Manifest) -> bool:
        for offer in self._offers:
            for rank in self._needs(offer.rank, manifest):
                holders = {holder for places in known.pieces[rank].values() for _, holder in places}
                if not holders or not (self._fetch or offer.rank in holders):
                    why = f"rank {offer.rank} cannot read the files of rank {rank}"
                    known.why = known.why or why
                    return False
        return True


def _logs_of(
    offers: Sequence[Offer],
    foreign: Collection[tuple[int, int]],
    records: Mapping[int, TimelineRecord | None],
    branches: Mapping[int, Branch],
    excluded: Excluded,
) -> JobLogs:
    """Return all logs, without those that belong to no timeline of the job."""
    own: list[list[LogRun]] = []
    others: list[dict[int, list[LogRun]]] = []
    for offer in sorted(offers, key=lambda offer: offer.rank):

        def fit(runs: Iterable[LogRun], rank: int = offer.rank) -> list[LogRun]:
            return [run for run in runs if (rank, run.timeline) not in foreign]

        own.append(fit(offer.log))
        others.append({source: fit(runs) for source, runs in offer.others.items()})
    return JobLogs(own, records, branches, excluded.log, others, excluded.relaid)


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
    foreign: Collection[tuple[int, int]],
    unusable: Collection[tuple[BaseId, int, Source]],
) -> dict[BaseId, _Base]:
    found: dict[BaseId, _Base] = {}
    for offer in offers:
        for base, one in offer.bases.items():
            if (offer.rank, base.timeline) in foreign:
                continue
            known = found.setdefault(base, _Base())
            if one.manifest is not None:
                known.manifests.add(one.manifest)
            known.listed |= {marker.rank: marker for marker in one.listed}
            for rank, piece in one.pieces.items():
                key = digest(piece.marker.encode())
                # Also if the files prove unusable: a marker that differs from it shows a
                # contradiction.
                known.markers.setdefault(rank, {})[key] = piece.marker
                for tier in piece.tiers:
                    source = Source(TIERS.index(tier), offer.rank)
                    if (base, rank, source) in unusable:
                        known.why = (
                            f"the files of rank {rank} are damaged, or inconsistent with others"
                        )
                        continue
                    places = known.pieces.setdefault(rank, {})
                    places.setdefault(key, []).append((source, offer.rank))
    return found


def _manifest(known: _Base) -> Manifest | None:
    """Return the manifest of a base; None if files are missing or the ranks contradict each other.

    Files of two attempts to write a base are never mixed.
    """
    readable = {rank: known.markers[rank] for rank in known.pieces}
    if any(len(markers) > 1 for markers in known.markers.values()) or len(known.manifests) > 1:
        known.why = "the disks contradict each other"
        return None
    manifest = manifest_of({rank: next(iter(m.values())) for rank, m in readable.items()})
    if manifest is None:
        known.why = known.why or _missing(known)
    elif known.manifests and known.manifests != {digest(manifest.encode())}:
        known.why = "its files do not match its manifest"
        return None
    return manifest


def _left_of(bases: Mapping[BaseId, _Base], offers: Sequence[Offer]) -> dict[BaseId, Manifest]:
    """Return committed bases of which each rank can read some files."""
    found = {}
    for base, known in bases.items():
        if any(len(markers) > 1 for markers in known.markers.values()):
            continue
        markers = known.listed | {rank: next(iter(m.values())) for rank, m in known.markers.items()}
        manifest = manifest_of(markers)
        holders = {h for m in known.pieces.values() for places in m.values() for _, h in places}
        # Without a manifest it is unknown if the lost ranks ever wrote their files.
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
        return "the markers of its ranks are of different updates"
    return "the files of rank " + ", ".join(map(str, missing[:8])) + " are missing"


def _is_on_disks(known: _Base) -> bool:
    """Return True if each piece is on a rank's own disk."""
    return all(
        any(source.tier == "disk" for found in places.values() for source, _ in found)
        for places in known.pieces.values()
    )


def _is_durable(known: _Base) -> bool:
    tiers = (
        {source.tier for found in places.values() for source, _ in found}
        for places in known.pieces.values()
    )
    # One place that survives a power loss is enough for each piece.
    return all(not found <= set(VOLATILE_TIERS) for found in tiers)


def _sources(known: _Base, manifest: Manifest) -> dict[int, tuple[Source, ...]]:
    return {
        marker.rank: tuple(
            sorted(s for places in known.pieces.get(marker.rank, {}).values() for s, _ in places)
        )
        for marker in manifest.markers
    }


def _cut_off(
    manifest: Manifest | None, reach: Reach | None, step: int | None, world: int
) -> Iterable[tuple[BaseId, str]]:
    """Report steps that some ranks' logs have, but not all.

    Args:
        manifest: manifest of the base.
        world: number of ranks that start.
    """
    if manifest is None or reach is None or step is not None:
        return
    before = len(manifest.markers)
    whose = "" if before == world else f" of {before} that wrote it"
    if reach.furthest > reach.step:
        why = f"the log of rank {reach.shortest}{whose} ends before; others reach {reach.furthest}"
    elif reach.beyond:
        why = (
            f"no rank{whose} reaches step {reach.step + 1}: the state changed there, or the step "
            f"was not recorded; records up to step {reach.beyond} cannot be used"
        )
    else:
        return
    yield BaseId(reach.timeline, reach.step + 1), f"log: {why}"


_FROM_SCRATCH = "resume(step=0) starts from scratch"


def recovery_hint(elsewhere: Sequence[BaseId] = ()) -> str:
    """Return the hint for a run that had steps but has no readable base of its history.

    Args:
        elsewhere: readable bases of abandoned branches, newest first.
    """
    if elsewhere:
        first = elsewhere[0]
        return f"resume(step={first.step}) continues from {first}; {_FROM_SCRATCH}"
    return (
        "restore the deleted files (if the run folder was copied during training, copy it again), "
        f"or add the tiers= that have copies; {_FROM_SCRATCH}"
    )


def _abandoned(
    bases: Iterable[BaseId], branches: Mapping[int, Branch], offers: Sequence[Offer]
) -> set[BaseId]:
    """Return the bases that the newest timeline abandoned, in a start with all ranks that hold
    them.

    A start of other hosts alone does not abandon bases.
    """
    _, elsewhere = split_by_history(bases, branches)

    def knows(offer: Offer, base: BaseId) -> bool:
        has = base in offer.bases or base in offer.lost
        return not has or max(branches) in offer.timelines

    return {base for base in elsewhere if all(knows(offer, base) for offer in offers)}


def may_start_fresh(step: int | None, good: Collection[BaseId], had: str | None) -> bool:
    """Return True if starting at step 0 discards nothing, or was requested.

    Args:
        step: requested step.
        good: bases that are, or may be, complete and were not abandoned.
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
    """Return the error for a job that may not start at step 0.

    Args:
        why: reason by base, for existing bases that cannot be used.
        lost: bases with unreadable records.
        readable: readable bases of any timeline.
        had: description of steps in the history whose bases are missing.
    """
    can_read = "can be read" if world == 1 else "every rank can read"
    if step is not None:
        return RecoveryError(
            f"there is no base of step {step} that {can_read}",
            step=step,
            hint="existing bases: " + (", ".join(map(str, readable[:20])) or "none"),
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
    """Return the timeline records of all ranks, and ``(rank, timeline)`` of foreign ones.

    Two starts that could not see each other's disks may both have opened a timeline of the same
    number. A timeline with neither bases nor a log was never trained on and does not count.

    Raises:
        RecoveryError: both were trained on; only the user can decide between them.
    """
    records: dict[int, TimelineRecord | None] = {}
    foreign: set[tuple[int, int]] = set()
    for number in sorted({number for offer in offers for number in offer.timelines}):
        kinds: dict[bytes, tuple[TimelineRecord, list[int]]] = {}
        for offer in offers:
            record = offer.timelines.get(number)
            if record is not None:
                # The bytes identify a timeline; two of the same number may differ (``adr/048``).
                kinds.setdefault(record.encode(), (record, []))[1].append(offer.rank)
        used = {
            key
            for key, (_, ranks) in kinds.items()
            if any(_trained_on(offer, number) for offer in offers if offer.rank in ranks)
        }
        if len(used) > 1:
            ranks = " and ".join(str(kinds[key][1]) for key in sorted(used))
            raise RecoveryError(
                f"timeline {number} was opened by two starts of the job that could not see each "
                f"other, and both trained: the disks of ranks {ranks} differ",
                hint="start only with the hosts of one of them, and empty the run folders of the "
                "others",
            )
        # If none was trained on, any will do, but the choice must not depend on the order of
        # offers.
        wins = next(iter(used), None) or (min(kinds) if kinds else None)
        records[number] = None if wins is None else kinds[wins][0]
        foreign |= {(r, number) for key in kinds if key != wins for r in kinds[key][1]}
    return records, foreign


def _trained_on(offer: Offer, timeline: int) -> bool:
    """Return True if a rank has a base or log of a timeline."""
    logged = any(run.timeline == timeline for run in offer.logs)
    return logged or any(base.timeline == timeline for base in offer.bases)
