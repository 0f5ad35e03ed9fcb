"""The log of a run, wherever its records are: in a keeper's memory, and in segments on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain as chained
from pathlib import PurePath

from everstep.commit.lineage import BaseId
from everstep.commit.logs import needed_by
from everstep.errors import DamageError, EverstepError, FormatError, StorageError
from everstep.format.log import LogRecord, RecordHead
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.copies import has_copy
from everstep.restore.fetch.rank_copies import own_words
from everstep.run.candidates import Skipped
from everstep.run.chain import Chain, LogIndex
from everstep.run.log_reads import Key, LogReads, find_record, key_of
from everstep.run.scan import Inventory
from everstep.run.segments import SegmentFound, scan_log, validated
from everstep.seams.files.filesystem import FileSystem
from everstep.state.layout.names import PART_OBJECT, UPDATE_OBJECT
from everstep.state.values.objects import decode

__all__ = ["LogFound"]


class LogFound:
    """Records by what they are; those on disk are read when they are needed.

    Args:
        records: in memory.
        near_lossy: likewise, of peers that have lossy gradients of them.

    Attributes:
        index: which records there are.
        skipped: segments that cannot be used.
        parts: of updates, by timeline and LSN: other ranks' records, which go with this one's.

    Of the same record in several places the one that is nearest is read: in memory, on the disk, in
    a copy; and a lossy one only where there is no other, wherever that is.
    """

    def __init__(
        self,
        records: Sequence[LogRecord],
        segments: Sequence[SegmentFound],
        near_lossy: Sequence[LogRecord] = (),
    ) -> None:
        self._memory = {_key(record): record for record in records}
        self._lossy = {_key(record): record for record in near_lossy}
        self._segments: dict[Key, tuple[SegmentFound, int]] = {}
        self._places: dict[Key, list[SegmentFound]] = {}  # the nearest last
        self._look: Callable[[int, int], Iterable[SegmentFound]] = lambda timeline, step: ()
        self._mended: dict[Skipped, None] = {}
        self._reads: LogReads | None = None
        heads: dict[bool, list[RecordHead]] = {True: [], False: []}  # by whether they are lossy
        self.skipped: list[Skipped] = []
        self.parts: Mapping[tuple[int, int], Mapping[int, LogRecord]] = {}
        for segment in sorted(segments, key=lambda segment: not segment.lossy):
            if segment.problem is not None:
                self.skipped.append(Skipped(segment.timeline, segment.last, segment.problem))
                continue
            for place, head in enumerate(segment.heads):
                heads[segment.lossy].append(head)
                self._segments[key_of(head)] = segment, place
                self._places.setdefault(key_of(head), []).append(segment)
        whole = [*heads[False], *(record.head for record in records)]
        every = [*heads[True], *(record.head for record in near_lossy), *whole]
        self.index = LogIndex(every)

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
        read_from: Callable[[FileSystem], FileSystem] = lambda files: files,
    ) -> LogFound:
        """All that there is of one rank.

        Args:
            records: in memory.
            lent: more of them, whose timelines have been compared with those of this disk.
            copies: places that have copies of the log, nearest first; their timelines have been
                compared, too.
            bases: of what is in copies only what leads on from one of these is looked at.
            lossy_copies: look at lossy segments in copies, too.
            threads: look at segments of ``filesystem`` at a time.
            read_from: where to read what was found in a copy. What is damaged there is read in the
                copy itself.
            world: leave out what another number of ranks has written. None: whoever asks looks at
                that.

        Raises:
            OSError: a directory cannot be read.
        """
        there = set(inventory.timelines)
        mine = [record for record in records if record.head.timeline in there]
        own = partial(scan_log, filesystem, inventory.path, rank=rank, threads=threads)
        look = partial(own, there=inventory.may_hold)
        found = look(sorted(there))
        bad = [one for one in found if one.problem is not None and has_copy(filesystem, one.path)]
        found = look(sorted(there)) if bad else found  # from now on these are read in a copy
        others: dict[int, Skipped] = {}
        for number, record in inventory.timelines.items():
            if world is None or record is None or record.world == world:
                continue
            last = [segment.last for segment in found if segment.timeline == number]
            last += [record.head.step for record in mine if record.head.timeline == number]
            if last:
                why = f"log: {record.world} rank(s) wrote it, and {world} start"
                others[number] = Skipped(number, max(last), why)
        mine = [record for record in mine if record.head.timeline not in others]
        found = [segment for segment in found if segment.timeline not in others]
        found = [validated(segment, inventory.run) for segment in found]
        poor = [record for record in lent if _is_lossy(record)]
        lent = [record for record in lent if not _is_lossy(record)]
        lossy = {_step(record) for record in poor}  # a copy may have them whole
        steps = {_step(record) for record in lent} - lossy | {_step(record) for record in mine}
        for one in found:
            if one.problem is None:
                steps |= {(one.timeline, step) for step in range(one.after + 1, one.last + 1)}

        def wanted(timeline: int, after: int, last: int) -> bool:
            if not needed_by((timeline, after, last), bases):
                return False
            return not all((timeline, step) in steps for step in range(after + 1, last + 1))

        for files, there_too in copies:
            known = sorted(n for n, record in there_too.timelines.items() if record is not None)
            with own_words():
                how = partial(scan_log, rank=rank, wanted=wanted, lossy=lossy_copies, threads=8)
                here = how(files, inventory.path, known, there=there_too.may_hold)
            found = [*(replace(segment, files=read_from(files)) for segment in here), *found]
        log = cls([*lent, *mine], [validated(segment, inventory.run) for segment in found], poor)
        log.skipped += others.values()
        log.skipped += [Skipped(one.timeline, one.last, one.problem or "") for one in bad]

        def look_for(timeline: int, step: int) -> Iterator[SegmentFound]:
            def has(timeline: int, after: int, last: int) -> bool:
                return after < step <= last

            for files, there_too in copies:
                if there_too.timelines.get(timeline) is not None:
                    here = scan_log(files, inventory.path, [timeline], rank=rank, wanted=has)
                    for segment in here:
                        yield validated(replace(segment, files=files), inventory.run)

        log._look = look_for
        return log

    def steps(
        self, chain: Chain, lsn: int, filesystem: FileSystem, ring: ChunkRing, timeout_s: float
    ) -> Generator[tuple[list[LogRecord], LogRecord | EverstepError], None, None]:
        """Updates and mark of each step of a chain; an error instead of a mark, and the end,
        where a record cannot be read. To be used by one thread at a time, whichever it is, and
        closed by whoever does not come to the end.

        Nothing is verified yet. What is on disk is read ahead (:class:`.segment_reads.ReadBudget`).
        The memory of a record that was read from there is used again when nobody looks at it any
        more: so whoever keeps records keeps memory.

        Args:
            lsn: of the base.
        """
        self._close()
        self._reads = LogReads(filesystem, ring, timeout_s, self._on_disk(chain, lsn))
        try:
            for timeline, step in chain.steps:
                mark = self.index.marks[timeline, step]
                try:
                    about = filesystem, ring, timeout_s
                    numbers = range(lsn + 1, mark.lsn + 1)
                    updates = [self._update(timeline, number, *about) for number in numbers]
                    last = self._record("mark", timeline, step, filesystem, ring, timeout_s)
                except EverstepError as error:
                    yield [], error
                    return
                lsn = mark.lsn
                yield updates, last
                del updates, last  # not while the next ones are being read
        finally:
            self._close()

    def records_of(
        self, timeline: int, step: int, filesystem: FileSystem, ring: ChunkRing, timeout_s: float
    ) -> list[LogRecord]:
        """The updates of one step, verified.

        Raises:
            EverstepError: one cannot be read, or is damaged in every place.
        """
        about = filesystem, ring, timeout_s
        numbers = sorted(set(self.index.of_step.get((timeline, step), ())))
        found = [self._record("update", timeline, number, *about) for number in numbers]
        return [self.sound(record, *about) for record in found]

    def step_of(
        self, timeline: int, step: int, filesystem: FileSystem, ring: ChunkRing, timeout_s: float
    ) -> list[LogRecord]:
        """The updates of one step, and its mark; see :meth:`records_of`.

        Raises:
            EverstepError: one cannot be read.
        """
        about = filesystem, ring, timeout_s
        updates = self.records_of(timeline, step, *about)
        return [*updates, self.sound(self._record("mark", timeline, step, *about), *about)]

    def sound(
        self, record: LogRecord, filesystem: FileSystem, ring: ChunkRing, timeout_s: float
    ) -> LogRecord:
        """The record, if every bit of it is what it was; else the same from another place.

        Raises:
            DamageError: no place has it whole.
        """
        try:
            record.verify()
            return record
        except DamageError as error:
            if record.path is not None:  # of one run with its copies: the next look is at these
                with contextlib.suppress(EverstepError, OSError):
                    has_copy(filesystem, record.path.parent)
            about = filesystem, ring, timeout_s
            found = self._elsewhere(record.head, record.digest, error, *about)
            return replace(found, parts=record.parts)

    def in_copies(self, steps: Iterable[tuple[int, int]]) -> Iterator[SegmentFound]:
        """Segments of copies that have records of these steps which are nowhere nearer, each once,
        in the order of the steps."""
        seen: set[PurePath] = set()
        for timeline, step in steps:
            updates = self.index.of_step.get((timeline, step), ())
            keys: list[Key] = [("update", timeline, number) for number in updates]
            for key in (*keys, ("mark", timeline, step)):
                if key in self._memory or key in self._lossy or key not in self._segments:
                    continue
                segment, _ = self._segments[key]
                if segment.files is not None and segment.path not in seen:
                    seen.add(segment.path)
                    yield segment

    def take_repaired(self) -> list[Skipped]:
        """What was damaged, and was read elsewhere, since this was asked."""
        found = list(self._mended)
        self._mended.clear()
        return found

    def twin(self) -> LogFound:
        """The same records, for another thread to read."""
        found = copy(self)
        found._reads = None
        found.parts = {}
        return found

    def close(self) -> None:
        """Ends what is under way."""
        self._close()

    def _update(
        self,
        timeline: int,
        number: int,
        filesystem: FileSystem,
        ring: ChunkRing,
        timeout_s: float,
    ) -> LogRecord:
        record = self._record("update", timeline, number, filesystem, ring, timeout_s)
        parts = self.parts.get((timeline, number))
        return record if parts is None else replace(record, parts=parts)

    def _record(
        self,
        kind: str,
        timeline: int,
        number: int,
        filesystem: FileSystem,
        ring: ChunkRing,
        timeout_s: float,
    ) -> LogRecord:
        key: Key = (kind, timeline, number)
        found = self._nearest(key)
        if isinstance(found, LogRecord):
            return found
        segment, place = found
        try:
            return self._read(segment, place, filesystem, ring, timeout_s)
        except EverstepError as error:
            reads = self._reads
            digest = None if reads is None else reads.digest_of(segment, place)
            if reads is None or digest is None:  # nobody knows which bits it had
                raise
            reads.close()
            return self._elsewhere(segment.heads[place], digest, error, filesystem, ring, timeout_s)

    def _nearest(self, key: Key) -> LogRecord | tuple[SegmentFound, int]:
        """A record in memory, or the segment that it is read from, and its number there."""
        if key in self._memory:
            return self._memory[key]
        there = self._segments.get(key)
        if key in self._lossy and (there is None or there[0].lossy):
            return self._lossy[key]
        return self._segments[key]

    def _on_disk(self, chain: Chain, lsn: int) -> Iterator[tuple[SegmentFound, int]]:
        """What of a chain is read from segments, in the order in which it is needed."""
        for timeline, step in chain.steps:
            last = self.index.marks[timeline, step].lsn
            keys: list[Key] = [("update", timeline, number) for number in range(lsn + 1, last + 1)]
            for key in (*keys, ("mark", timeline, step)):
                found = self._nearest(key)
                if not isinstance(found, LogRecord):
                    yield found
            lsn = last

    def _elsewhere(
        self,
        head: RecordHead,
        digest: str,
        error: EverstepError,
        filesystem: FileSystem,
        ring: ChunkRing,
        timeout_s: float,
    ) -> LogRecord:
        """A record that cannot be used where it is nearest, from another place."""
        key = key_of(head)
        segments = chained(
            reversed(self._places.get(key, [])), self._look(head.timeline, head.step)
        )
        try:
            found = find_record(key, digest, segments, filesystem, ring, timeout_s)
        except (EverstepError, OSError) as problem:  # of listing another place
            raise error from problem
        if found is None:
            raise error
        why = f"log: {error.message}; it was whole in another place"
        self._mended[Skipped(head.timeline, head.step, why)] = None
        return found

    def _read(
        self,
        segment: SegmentFound,
        place: int,
        filesystem: FileSystem,
        ring: ChunkRing,
        timeout_s: float,
    ) -> LogRecord:
        try:
            if self._reads is None:
                self._reads = LogReads(filesystem, ring, timeout_s)
            return self._reads.read(segment, place)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(f"{segment.path}: {reason}", path=segment.path) from error

    def _close(self) -> None:
        reads = self._reads
        self._reads = None
        if reads is not None:
            reads.close()


def _step(record: LogRecord) -> tuple[int, int]:
    return record.head.timeline, record.head.step


def _is_lossy(record: LogRecord) -> bool:
    """Whether it says that its gradients are not what training has consumed."""
    for name in (PART_OBJECT, UPDATE_OBJECT):
        if name in record.objects:
            try:
                about = decode(record.objects[name])
            except FormatError:  # whoever replays it says so
                return False
            return isinstance(about, dict) and bool(about.get("lossy"))
    return False


def _key(record: LogRecord) -> Key:
    return key_of(record.head)
