"""The gradient log of one rank: records in a keeper's memory, in segments on disk, and in copies;
and the choice of a base and of the log steps to replay on it, which needs no I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.commit.job.offers import recovery_hint
from everstep.commit.lineage import describe_missing_steps
from everstep.commit.log_reach import needed_by
from everstep.errors import (
    AuditError,
    DamageError,
    EverstepError,
    FormatError,
    NewerFormatError,
    RecoveryError,
    ReplayError,
    StorageError,
)
from everstep.format.log import LogRecord, RecordHead
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.copies import switch_to_copy
from everstep.run import BaseFound, Chain, Inventory, Skipped, scan_base
from everstep.run.chain import LogIndex, chains, path_of
from everstep.run.log_reads import Key, LogReads, ReadFrom, find_record, key_of
from everstep.run.scan import Candidates, candidates
from everstep.run.segments import SegmentFound, scan_log, validated
from everstep.seams import FileSystem
from everstep.state.layout.entries import PART_OBJECT, UPDATE_OBJECT
from everstep.state.values.objects import decode
from everstep.tiers.files import tier_errors

_THREADS = 8  # segments of a copy to read at a time, as each read waits for a network
_LISTED_MAX = 20  # ranges of existing steps in a hint


class LogFound:
    """Log records by kind, timeline and number; a :class:`LogReader` reads those on disk.

    If a record exists in several places, the nearest is read: memory, then disk, then copies. A
    lossy record is used only if there is no other anywhere.

    Args:
        records: records in memory.
        segments: segments on disk and in copies.
        near_lossy: lossy records in the memory of other nodes.
        copies: copies in which to look for a record that is damaged everywhere else.

    Attributes:
        index: index of the existing records.
        skipped: unusable segments.
    """

    def __init__(
        self,
        records: Sequence[LogRecord],
        segments: Sequence[SegmentFound],
        near_lossy: Sequence[LogRecord] = (),
        copies: _LogCopies | None = None,
    ) -> None:
        self._memory = {_key(record): record for record in records}
        self._lossy = {_key(record): record for record in near_lossy}
        self._segments: dict[Key, tuple[SegmentFound, int]] = {}
        self._places: dict[Key, list[SegmentFound]] = {}  # nearest last
        self._copies = copies
        heads: dict[bool, list[RecordHead]] = {True: [], False: []}  # lossy ones under True
        self.skipped: list[Skipped] = []
        # Lossy ones first, then the farthest first, as given. A later segment replaces an earlier
        # one, so the nearest exact one remains.
        for segment in sorted(segments, key=lambda segment: not segment.lossy):
            if segment.problem is not None:
                self.skipped.append(Skipped(segment.timeline, segment.last, segment.problem))
                continue
            for place, head in enumerate(segment.heads):
                heads[segment.lossy].append(head)
                self._segments[key_of(head)] = segment, place
                self._places.setdefault(key_of(head), []).append(segment)
        # Exact heads come last: the index keeps the last mark of a step.
        exact = [*heads[False], *(record.head for record in records)]
        all_heads = [*heads[True], *(record.head for record in near_lossy), *exact]
        self.index = LogIndex(all_heads)

    @classmethod
    def of(
        cls,
        filesystem: FileSystem,
        inventory: Inventory,
        records: Sequence[LogRecord],
        *,
        rank: int = 0,
        world: int | None = None,
        lent: Sequence[LogRecord] = (),
        copies: Sequence[tuple[FileSystem, Inventory]] = (),
        bases: Collection[BaseId] = (),
        lossy_copies: bool = True,
        threads: int = 1,
    ) -> LogFound:
        """Find all records of one rank.

        Args:
            records: in memory.
            lent: more records, whose timelines were compared with those of this disk.
            copies: places with copies of the log, nearest first, with timelines that were compared,
                too.
            bases: consider in copies only records that lead on from one of these bases.
            lossy_copies: consider lossy segments in copies, too.
            threads: number of segments of ``filesystem`` to read at a time.
            world: ignore logs of another number of ranks; None: the caller checks that.

        Raises:
            OSError: a directory cannot be read.
        """
        # Records of a timeline that is unknown in this folder are in no history of it.
        mine = [record for record in records if record.head.timeline in inventory.timelines]
        found, damaged = _on_disk(filesystem, inventory, rank, threads)
        others = {} if world is None else _of_other_jobs(inventory, world, mine, found)
        mine = [record for record in mine if record.head.timeline not in others]
        found = [
            validated(segment, inventory.run) for segment in found if segment.timeline not in others
        ]
        lossy_lent = [record for record in lent if _is_lossy(record)]
        exact_lent = [record for record in lent if not _is_lossy(record)]
        in_copies = _LogCopies(copies, inventory, rank)
        if copies:
            nearer = _steps_of(mine, exact_lent, lossy_lent, found)
            more = in_copies.beyond(nearer, bases, lossy=lossy_copies)
            found = [*more, *found]
        log = cls([*exact_lent, *mine], found, lossy_lent, in_copies)
        log.skipped += others.values()
        log.skipped += damaged
        return log

    def reader(
        self,
        filesystem: FileSystem,
        ring: ChunkRing,
        timeout_s: float,
        read_from: ReadFrom = lambda files: files,
    ) -> LogReader:
        """Return a reader of these records, for one thread at a time.

        Args:
            filesystem: file system of the segments in the run folder.
            ring: buffers for reading.
            timeout_s: a read that takes longer counts as hung.
            read_from: returns the file system to read segments of a copy from. Damaged ones are
                read in the copy itself.
        """
        return LogReader(self, filesystem, ring, timeout_s, read_from)

    def nearest(self, key: Key) -> LogRecord | tuple[SegmentFound, int]:
        """Return a record in memory, or else its segment and its number there."""
        if key in self._memory:
            return self._memory[key]
        there = self._segments.get(key)
        # An exact record in any segment comes before a lossy one in memory.
        if key in self._lossy and (there is None or there[0].lossy):
            return self._lossy[key]
        return self._segments[key]

    def in_copies(self, steps: Iterable[tuple[int, int]]) -> dict[PurePath, tuple[FileSystem, int]]:
        """Return the files of copies with records of these steps that exist nowhere nearer, in
        order; with where each is, and its size."""
        found: dict[PurePath, tuple[FileSystem, int]] = {}
        for timeline, step in steps:
            updates = self.index.of_step.get((timeline, step), ())
            keys: list[Key] = [("update", timeline, number) for number in updates]
            for key in (*keys, ("mark", timeline, step)):
                nearest = self.nearest(key) if key in self._segments else None
                if not isinstance(nearest, tuple):
                    continue
                segment, _ = nearest
                if segment.files is not None and segment.marker is not None:
                    (record,) = segment.marker.files
                    found[segment.path / record.name] = segment.files, record.length
        return found

    def elsewhere(self, head: RecordHead) -> Iterator[SegmentFound]:
        """Yield the segments that should hold a record, nearest first, then those of copies."""
        yield from reversed(self._places.get(key_of(head), []))
        if self._copies is not None:
            yield from self._copies.with_step(head.timeline, head.step)


class LogReader:
    """Reads the records of a log; arguments as of :meth:`LogFound.reader`.

    Attributes:
        found: the log.
        parts: records of other ranks that belong with an update of this one, by timeline and LSN,
            then by rank.
    """

    def __init__(
        self,
        found: LogFound,
        filesystem: FileSystem,
        ring: ChunkRing,
        timeout_s: float,
        read_from: ReadFrom,
    ) -> None:
        self.found = found
        self.parts: Mapping[tuple[int, int], Mapping[int, LogRecord]] = {}
        self._filesystem = filesystem
        self._ring = ring
        self._timeout_s = timeout_s
        self._read_from = read_from
        self._repaired: dict[Skipped, None] = {}
        self._reads: LogReads | None = None

    def steps(
        self, chain: Chain, lsn: int
    ) -> Generator[tuple[list[LogRecord], LogRecord | EverstepError], None, None]:
        """Yield the updates and the mark of each step of a chain.

        If a record cannot be read, an error is yielded in place of the mark, and the generator
        ends. To be used by one thread at a time, and closed if not exhausted.

        Nothing is verified. Records on disk are read ahead (:class:`.LogReads`). Their
        memory is reused once nothing refers to it, so a caller that keeps records keeps their
        memory.

        Args:
            lsn: LSN of the base.
        """
        self.close()
        ahead = self._on_disk(chain, lsn)
        self._reads = self._reads_of(ahead)
        try:
            for timeline, step in chain.steps:
                mark = self.found.index.marks[timeline, step]
                try:
                    numbers = range(lsn + 1, mark.lsn + 1)
                    updates = [self._update(timeline, number) for number in numbers]
                    last = self.record("mark", timeline, step)
                except EverstepError as error:
                    yield [], error
                    return
                lsn = mark.lsn
                yield updates, last
                del updates, last  # free their memory before the next ones are read
        finally:
            self.close()

    def records_of(self, timeline: int, step: int) -> list[LogRecord]:
        """Return the updates of one step, verified.

        Raises:
            EverstepError: a record cannot be read, or is damaged in every place.
        """
        numbers = sorted(set(self.found.index.of_step.get((timeline, step), ())))
        found = [self.record("update", timeline, number) for number in numbers]
        return [self.verified(record) for record in found]

    def step_of(self, timeline: int, step: int) -> list[LogRecord]:
        """Return the updates of one step, and its mark; see :meth:`records_of`.

        Raises:
            EverstepError: a record cannot be read.
        """
        updates = self.records_of(timeline, step)
        return [*updates, self.verified(self.record("mark", timeline, step))]

    def verified(self, record: LogRecord) -> LogRecord:
        """Return the record if it is intact, or else an intact one from another place.

        Raises:
            DamageError: it is damaged in every place.
        """
        try:
            record.verify()
            return record
        except DamageError as error:
            if record.path is not None:  # later reads of this segment use the copy
                # A failure here only affects later reads. This record is looked for in all places
                # below.
                with contextlib.suppress(EverstepError, OSError):
                    switch_to_copy(self._filesystem, record.path.parent)
            found = self._from_another_place(record.head, record.digest, error)
            # The shares of other ranks came with the update, not from the place of this record.
            return replace(found, parts=record.parts)

    def take_repaired(self) -> list[Skipped]:
        """Return the damaged records that were read from another place since the last call."""
        found = list(self._repaired)
        self._repaired.clear()
        return found

    def close(self) -> None:
        """Cancel outstanding reads. Idempotent."""
        reads = self._reads
        self._reads = None
        if reads is not None:
            reads.close()

    def _reads_of(self, expected: Iterable[tuple[SegmentFound, int]]) -> LogReads:
        return LogReads(self._filesystem, self._ring, self._timeout_s, expected, self._read_from)

    def _update(self, timeline: int, number: int) -> LogRecord:
        record = self.record("update", timeline, number)
        parts = self.parts.get((timeline, number))
        return record if parts is None else replace(record, parts=parts)

    def record(self, kind: str, timeline: int, number: int) -> LogRecord:
        """Return a record as it was found, before it is verified."""
        found = self.found.nearest((kind, timeline, number))
        if isinstance(found, LogRecord):
            return found
        segment, place = found
        if self._reads is None:
            self._reads = self._reads_of(())
        reads = self._reads
        try:
            return reads.read(segment, place)
        except (EverstepError, OSError) as error:
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
                error = StorageError(f"{segment.path}: {reason}", path=segment.path)
            digest = reads.digest_of(segment, place)
            if digest is None:  # without the expected digest no other record can be trusted
                raise error from None
            reads.close()
            return self._from_another_place(segment.heads[place], digest, error)

    def _on_disk(self, chain: Chain, lsn: int) -> Iterator[tuple[SegmentFound, int]]:
        """Yield the records of a chain that are read from segments, in order."""
        for timeline, step in chain.steps:
            last = self.found.index.marks[timeline, step].lsn
            keys: list[Key] = [("update", timeline, number) for number in range(lsn + 1, last + 1)]
            for key in (*keys, ("mark", timeline, step)):
                found = self.found.nearest(key)
                if not isinstance(found, LogRecord):
                    yield found
            lsn = last

    def _from_another_place(self, head: RecordHead, digest: str, error: EverstepError) -> LogRecord:
        """Return an intact record from another place."""
        try:
            found = find_record(
                key_of(head),
                digest,
                self.found.elsewhere(head),
                self._filesystem,
                self._ring,
                self._timeout_s,
            )
        except (EverstepError, OSError) as problem:  # while another place was listed
            raise error from problem
        if found is None:
            raise error
        why = f"log: {error.message}; it was intact in another place"
        self._repaired[Skipped(head.timeline, head.step, why)] = None
        return found


class _LogCopies:
    """Copies of one rank's log in tiers.

    Args:
        copies: file system and inventory of each place, nearest first.
        inventory: of the run folder, whose path also names the files in each place.
    """

    def __init__(
        self,
        copies: Sequence[tuple[FileSystem, Inventory]],
        inventory: Inventory,
        rank: int,
    ) -> None:
        self._copies = copies
        self._path = inventory.path
        self._run = inventory.run
        self._rank = rank

    def beyond(
        self,
        nearer: Collection[tuple[int, int]],
        bases: Collection[BaseId],
        *,
        lossy: bool,
    ) -> list[SegmentFound]:
        """Return the segments with steps that exist nowhere nearer, the farthest place first.

        Args:
            nearer: timeline and step of the steps that exist nearer.
        """

        def wanted(timeline: int, after: int, last: int) -> bool:
            if not needed_by((timeline, after, last), bases):
                return False
            return not all((timeline, step) in nearer for step in range(after + 1, last + 1))

        found: list[SegmentFound] = []
        for files, there in self._copies:
            # A timeline whose record is damaged there cannot be compared with that of the disk
            # (I7).
            known = sorted(n for n, record in there.timelines.items() if record is not None)
            with tier_errors(FileNotFoundError):
                here = scan_log(
                    files,
                    self._path,
                    known,
                    rank=self._rank,
                    wanted=wanted,
                    lossy=lossy,
                    threads=_THREADS,
                    there=there.may_hold,
                )
            here = [validated(replace(segment, files=files), self._run) for segment in here]
            # In the order in which LogFound lets nearer segments replace farther ones.
            found = [*here, *found]
        return found

    def with_step(self, timeline: int, step: int) -> Iterator[SegmentFound]:
        """Yield the segments with a step."""

        def wanted(timeline: int, after: int, last: int) -> bool:
            return after < step <= last

        # From the copy itself, not through ``read_from``: bytes that were read ahead may be the
        # damaged ones.
        for files, there in self._copies:
            if there.timelines.get(timeline) is not None:
                here = scan_log(files, self._path, [timeline], rank=self._rank, wanted=wanted)
                for segment in here:
                    yield validated(replace(segment, files=files), self._run)


def _on_disk(
    filesystem: FileSystem, inventory: Inventory, rank: int, threads: int
) -> tuple[list[SegmentFound], list[Skipped]]:
    """Return the segments in the run folder, and those replaced by copies as they are damaged."""
    timelines = sorted(inventory.timelines)
    scan = partial(
        scan_log,
        filesystem,
        inventory.path,
        timelines,
        rank=rank,
        threads=threads,
        there=inventory.may_hold,
    )
    found = scan()
    damaged = [
        Skipped(one.timeline, one.last, one.problem)
        for one in found
        if one.problem is not None and switch_to_copy(filesystem, one.path)
    ]
    # The damaged ones are now read from a copy.
    return (scan() if damaged else found), damaged


def _of_other_jobs(
    inventory: Inventory,
    world: int,
    records: Iterable[LogRecord],
    segments: Sequence[SegmentFound],
) -> dict[int, Skipped]:
    """Return the last step of each timeline whose log another number of ranks wrote."""
    last: dict[int, int] = {}
    for record in records:
        timeline = record.head.timeline
        last[timeline] = max(last.get(timeline, 0), record.head.step)
    for segment in segments:
        last[segment.timeline] = max(last.get(segment.timeline, 0), segment.last)
    found = {}
    for number, opened in inventory.timelines.items():
        if opened is not None and opened.world != world and number in last:
            why = f"log: written by {opened.world} rank(s), but {world} rank(s) start"
            found[number] = Skipped(number, last[number], why)
    return found


def _steps_of(
    own: Iterable[LogRecord],
    exact_lent: Iterable[LogRecord],
    lossy_lent: Iterable[LogRecord],
    segments: Iterable[SegmentFound],
) -> set[tuple[int, int]]:
    """Return timeline and step of all steps that need not be looked up in copies.

    Steps with a lossy record in the memory of other nodes are looked up: a copy may have the exact
    one.
    """
    steps = {_step(record) for record in exact_lent} - {_step(record) for record in lossy_lent}
    steps |= {_step(record) for record in own}
    for one in segments:
        if one.problem is None:
            steps |= {(one.timeline, step) for step in range(one.after + 1, one.last + 1)}
    return steps


def _step(record: LogRecord) -> tuple[int, int]:
    return record.head.timeline, record.head.step


def _is_lossy(record: LogRecord) -> bool:
    """Return True if the gradients of a record are approximations."""
    for name in (PART_OBJECT, UPDATE_OBJECT):
        if name in record.objects:
            try:
                about = decode(record.objects[name])
            except FormatError:  # reported when it is replayed
                return False
            return isinstance(about, dict) and bool(about.get("lossy"))
    return False


def _key(record: LogRecord) -> Key:
    return key_of(record.head)


@dataclass(frozen=True, slots=True)
class Reachable:
    """Bases to try, best first, each with the log steps to replay on it."""

    ordered: tuple[tuple[BaseFound, Chain], ...]
    candidates: Candidates


def reachable(inventory: Inventory, index: LogIndex, *, step: int | None = None) -> Reachable:
    """Return the ways to the newest step along the history of the newest timeline, or to a given
    step.

    Args:
        step: in any timeline: that of the history first, then younger ones. The caller has to
            report a step outside the history (:func:`everstep.commit.lineage.describe_abandoned`).

    Raises:
        RecoveryError: no base and no log has ``step``.
    """
    if not index.marks:
        chosen = candidates(inventory, step=step)
        return Reachable(tuple((base, Chain(base.id, (), "")) for base in chosen.ordered), chosen)
    # Not restricted to ``step``: the log may lead to it from a base before it.
    everything = candidates(inventory)
    usable = {b.id: b for b in inventory.bases if b.is_usable}
    lsns: dict[BaseId, tuple[int, str | None]] = {}
    for base in usable.values():
        assert base.manifest is not None
        own = index.marks.get((base.id.timeline, base.id.step))  # for the shape digest
        lsns[base.id] = (base.manifest.markers[0].lsn, None if own is None else own.shape)
    if step is None:
        found = _newest_first(inventory, index, lsns, everything)
    else:
        found = _leading_to(step, inventory, index, lsns)
    return Reachable(tuple((usable[chain.base], chain) for chain in found), everything)


def _newest_first(
    inventory: Inventory,
    index: LogIndex,
    lsns: Mapping[BaseId, tuple[int, str | None]],
    everything: Candidates,
) -> list[Chain]:
    """Return the ways along the current history, farthest first."""
    here = {base.id for base in everything.ordered}
    known = {key: value for key, value in lsns.items() if key in here}
    path = path_of(_trained(inventory, index), inventory.timelines) if known else []
    found = chains(known, index, path)
    there = {chain.base for chain in found}
    # Bases outside every recorded history are still offered, after the others.
    found += [Chain(key, (), "") for key in known if key not in there]
    # Of several ways to one end, the newest base is tried first, as the least must be replayed on
    # it.
    return sorted(found, key=lambda chain: (chain.end, chain.base), reverse=True)


def _leading_to(
    step: int,
    inventory: Inventory,
    index: LogIndex,
    lsns: Mapping[BaseId, tuple[int, str | None]],
) -> list[Chain]:
    """Return the ways to a step in any timeline.

    Raises:
        RecoveryError: there are none.
    """
    ordered: dict[BaseId, Chain] = {}
    early = {key: value for key, value in lsns.items() if key.step <= step}
    for timeline in current_first(inventory, index):
        path = path_of(timeline, inventory.timelines)
        cut = [_cut(chain, step) for chain in chains(early, index, path)]
        for chain in sorted(cut, key=lambda chain: chain.base, reverse=True):
            if chain.end[1] == step:
                # The first timeline that leads there is that of the current history, if it has the
                # step.
                ordered.setdefault(chain.base, chain)
    for key in sorted(lsns, reverse=True):  # outside every history, but of this step
        if key.step == step:
            ordered.setdefault(key, Chain(key, (), ""))
    if ordered:
        return list(ordered.values())
    raise RecoveryError(
        f"neither a base nor the log has step {step}",
        step=step,
        path=inventory.path,
        hint=existing_steps(_reached(lsns, index, inventory)),
    )


def nothing_restorable(
    inventory: Inventory,
    chosen: Reachable,
    skipped: Sequence[Skipped],
    *,
    step: int | None,
    apart: bool = False,
) -> RecoveryError | None:
    """Return the error to raise if none of the choices can be restored; None if there was never
    anything, so training may start afresh.

    Args:
        skipped: choices tried, with the reasons.
        apart: a base fits the live state incompletely, and the log after it does not.
    """
    had = (
        None
        if step is not None
        else describe_missing_steps(inventory.timelines, inventory.branches)
    )
    if not chosen.ordered and not chosen.candidates.damaged and had is None:
        return None
    listed = "\n".join(f"  step {s.step}, timeline {s.timeline}: {s.reason}" for s in skipped)
    hint = "everstep verify lists the damage; resume(step=0) starts from scratch"
    if apart:
        steps = sorted({base.id.step for base in inventory.bases if base.is_usable})
        hint = f"strict=False can restore steps of bases only: {', '.join(map(str, steps))}"
        hint += "; any other step needs the model and the optimizer of that time"
    of_step = f"no base and no log after one leads to step {step}"
    problem = "bases exist, but none can be used" if step is None else of_step
    if not chosen.ordered and not chosen.candidates.damaged:
        usable = (base.id for base in inventory.bases if base.is_usable)
        problem = had or problem
        hint = recovery_hint(sorted(usable, reverse=True))
    message = f"{problem}:\n{listed}" if listed else problem
    return RecoveryError(message, path=inventory.path, hint=hint)


def base_is_there(filesystem: FileSystem, run: PurePath, base: BaseId) -> bool:
    """Return True if a base still exists, and can be used."""
    try:
        return scan_base(filesystem, run, base).is_usable
    except FileNotFoundError:
        return False


def why_unusable(error: EverstepError | OSError, base: BaseFound) -> str:
    """Return why a base, or the log after it, cannot be used, given the error of an attempt.

    Raises:
        EverstepError: the same error, if it is not one of the base (no memory, for example), or if
            the base was written by a newer everstep: an older base would hide its data.
    """
    if isinstance(error, OSError):
        return f"{error.filename or base.path}: {error.strerror or error}"
    theirs = isinstance(error, (AuditError, DamageError, FormatError, ReplayError))
    if isinstance(error, NewerFormatError) or not (theirs or type(error) is StorageError):
        raise error
    return error.message


def current_first(inventory: Inventory, index: LogIndex) -> list[int]:
    """Return all timelines: first the one whose history is current, then from young to old.

    The current one is not the newest if nobody trained on that and its fork point is lost.
    """
    numbers = sorted(inventory.branches, reverse=True)
    # False sorts before True, and the sort is stable.
    return sorted(numbers, key=_trained(inventory, index).__ne__) if numbers else []


def _trained(inventory: Inventory, index: LogIndex) -> int:
    """Return the newest timeline that has a log, or whose place in the history its record
    proves."""
    branches = inventory.branches
    newest = max(branches)
    logged = {timeline for timeline, _ in index.marks}
    while (record := inventory.timelines[newest]) is not None and record.parent is not None:
        if newest in logged:
            break
        branch = branches[newest]
        if branch.fork_step is not None or branch.parent is None:
            break
        newest = branch.parent
    return newest


def _cut(chain: Chain, step: int) -> Chain:
    steps = tuple(item for item in chain.steps if item[1] <= step)
    # Steps after the requested one are not reported as lost.
    return replace(chain, steps=steps, lost=None)


def _reached(
    lsns: Mapping[BaseId, tuple[int, str | None]], index: LogIndex, inventory: Inventory
) -> Iterator[int]:
    """Yield the steps that some base and the log after it lead to."""
    for timeline in inventory.branches:
        for chain in chains(lsns, index, path_of(timeline, inventory.timelines)):
            yield chain.base.step
            yield from (step for _, step in chain.steps)


def spans(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending steps as ranges, both ends included."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def existing_steps(steps: Iterable[int]) -> str:
    """Return the hint for a step that does not exist: the steps that do."""
    ends = spans(sorted(set(steps)))[-_LISTED_MAX:]
    listed = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in ends)
    return f"existing steps: {listed or 'none'}"
