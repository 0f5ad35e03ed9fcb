"""Steps that a run on disk can restore: from which base, by which segments of the log.

With several ranks a step exists if every rank has it (I4, ``docs/design/audit.md``).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain as chained
from types import MappingProxyType

from everstep.commit import BaseId
from everstep.errors import DamageError, EverstepError, FormatError
from everstep.format.log import LogRecord, RecordHead
from everstep.format.writer import ChunkRing
from everstep.restore.load import SavedLayout, SavedRanks, contents
from everstep.restore.log import LogFound, current_first, spans
from everstep.restore.offline.job_state import JobStep
from everstep.run import BaseFound, Chain, Inventory, OpenBase
from everstep.run.chain import LogIndex, common_heads, path_of
from everstep.run.open_base import open_ranks
from everstep.run.segments import SegmentFound, scan_logs, validated
from everstep.run.tensors import shape_of_base
from everstep.seams import FileSystem
from everstep.state.layout.entries import shape_of_all

_ATTEMPTS = 8
_UNKNOWN = "?"  # shape of an unreadable base; matches no log


@dataclass(frozen=True, slots=True)
class Reach:
    """Steps that the log of one timeline adds.

    Attributes:
        timeline: number of the timeline.
        steps: steps of this timeline that replay reaches, ascending.
        segments: its segments.
        stopped: why the log after the newest base goes no further.
        gaps: ranges of steps between recorded ones that were lost or never written
            (``Budget(write_bytes_per_day=)``); segments with a ``problem`` are not gaps.
    """

    timeline: int
    steps: tuple[int, ...]
    segments: tuple[SegmentFound, ...]
    stopped: str
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def records(self) -> int:
        return sum(len(segment.heads) for segment in self.segments)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


class RunLog:
    """Log of a run on disk; reads records, headers, and the objects of bases.

    Args:
        filesystem: file system of the run.
        inventory: bases and timelines of the run.
        segments: by timeline, and by rank.
        records: by rank, records in keepers' memory, of timelines in the inventory.

    Attributes:
        inventory: bases and timelines of the run.
        segments: all segments; unusable ones have a ``problem``.
        index: index of the usable records that all ranks have.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        inventory: Inventory,
        segments: Mapping[int, Mapping[int, Sequence[SegmentFound]]],
        records: Mapping[int, Sequence[LogRecord]] = MappingProxyType({}),
    ) -> None:
        self._filesystem = filesystem
        self.inventory = inventory
        self.segments: list[SegmentFound] = []
        by_rank: dict[int, list[SegmentFound]] = {}
        heads: list[list[RecordHead]] = []
        in_memory = {one.head.timeline for mine in records.values() for one in mine}
        for timeline in sorted(segments.keys() | in_memory):
            of_ranks = segments.get(timeline, {})
            record = inventory.timelines.get(timeline)
            good = {r: [validated(s, inventory.run) for s in mine] for r, mine in of_ranks.items()}
            for rank, mine in good.items():
                by_rank.setdefault(rank, []).extend(mine)
                self.segments += mine
            world = 1 if record is None else record.world
            logs = [[h for s in good.get(rank, ()) for h in s.heads] for rank in range(world)]
            for rank, log in enumerate(logs):
                held = (one.head for one in records.get(rank, ()))
                log += (head for head in held if head.timeline == timeline)
            # A record counts only if every rank has it: a step is restored on all ranks or on none
            # (I4).
            heads.append(common_heads(logs))
        self.segments.sort(key=lambda one: (one.lossy, one.timeline, one.after))
        self.index = LogIndex(chained.from_iterable(heads))
        self._logs = {
            rank: LogFound(records.get(rank, ()), by_rank.get(rank, ()))
            for rank in records.keys() | by_rank.keys()
        }
        self._shapes: dict[BaseId, str] = {}
        self._unreadable: dict[BaseId, str] = {}

    @classmethod
    def of(
        cls,
        filesystem: FileSystem,
        inventory: Inventory,
        records: Mapping[int, Sequence[LogRecord]] = MappingProxyType({}),
    ) -> RunLog:
        """Scan all segments.

        Raises:
            NewerFormatError: a segment was written by a newer everstep.
            OSError: a directory cannot be read.
        """
        for left in reversed(range(_ATTEMPTS)):
            try:
                found = scan_logs(
                    filesystem, inventory.path, inventory.timelines, there=inventory.may_hold
                )
                return cls(filesystem, inventory, found, records)
            except FileNotFoundError:
                # A running keeper may delete segments during the scan: start over.
                if not left:
                    raise
        raise AssertionError("unreachable")

    @property
    def usable(self) -> dict[BaseId, BaseFound]:
        """Bases that have all of their records."""
        there = ("committed", "complete")
        return {base.id: base for base in self.inventory.bases if base.status in there}

    def shape(self, base: BaseFound) -> str:
        """Return the shape of a base (see :mod:`everstep.state.layout.entries`), from its
        objects."""
        found = self._shapes.get(base.id)
        if found is None:
            found = self._shapes[base.id] = self._shape(base)
        return found

    def chain(
        self, base: BaseFound, path: Sequence[tuple[int, int | None]], *, look: bool = True
    ) -> Chain:
        """Follow the log from a base along a history.

        Args:
            base: base to start from.
            path: history as timelines with their last steps.
            look: compare with the shape of the base; otherwise the first mark is trusted.
        """
        assert base.manifest is not None
        lsn = base.manifest.markers[0].lsn
        chain = self.index.follow(base.id, lsn, None, path)
        if look and chain.steps:
            shape = self.shape(base)
            if shape == _UNKNOWN:
                return Chain(base.id, (), f"{base.id} cannot be read: {self._unreadable[base.id]}")
            if shape != self.index.marks[chain.steps[0]].shape:
                return Chain(
                    base.id, (), "the log after it belongs to a state of another composition"
                )
        # The index has no record of a damaged segment: without this the end would look like a
        # missing step.
        damaged = self.damage_at(chain.end[1] + 1, {timeline for timeline, _ in path})
        return chain if damaged is None else replace(chain, stopped=damaged)

    def steps(
        self, chain: Chain, lsn: int, world: int, ring: ChunkRing, timeout_s: float
    ) -> Generator[JobStep | EverstepError, None, None]:
        """Yield the verified records of all ranks for each step of a chain, in order; an error in
        place of the step, and nothing after it, where a record is damaged. Use as
        :meth:`.LogReader.steps`.

        Args:
            chain: steps to read.
            lsn: LSN of the base.
            world: number of ranks that saved the base and wrote the log.
            ring: buffers for reading.
            timeout_s: a read that takes longer counts as hung.
        """
        # There may be no log at all.
        if not chain.steps:
            return
        logs = [self._logs[r].reader(self._filesystem, ring, timeout_s) for r in range(world)]
        if world == 1:
            for updates, mark in logs[0].steps(chain, lsn):
                step = _verified_step(updates, mark)
                yield step
                if isinstance(step, EverstepError):
                    return
            return
        # Step by step: an update needs the records of all ranks at the same time.
        try:
            for at in chain.steps:
                try:
                    found = [log.step_of(*at) for log in logs]
                except EverstepError as error:
                    yield error
                    return
                yield {rank: _split_step(records) for rank, records in enumerate(found)}
        finally:
            # The consumer may stop early: no read may outlive the generator, since the ring is
            # shared.
            for log in logs:
                log.close()

    def damage_at(self, step: int, timelines: Collection[int]) -> str | None:
        """Return the problem of a damaged segment that should hold a step; None if there is
        none."""
        for segment in self.segments:
            covers = segment.after < step <= segment.last and segment.timeline in timelines
            if covers and segment.problem is not None:
                return segment.problem
        return None

    def why_not(self, step: int, timeline: int | None) -> str | None:
        """Return why the log does not lead to a step that it has or had; None if it never had
        it."""
        branches = self.inventory.branches
        usable = self.usable
        chosen = [number for number in branches if timeline in (None, number)]
        if damaged := self.damage_at(step, chosen):
            return damaged
        for number in sorted(chosen, reverse=True):
            if (number, step) not in self.index.marks:
                continue
            path = path_of(number, self.inventory.timelines)
            before = [key for key in bases_on(path, usable) if key.step < step]
            if not before:
                return "no base before it exists any more"
            return self.chain(usable[max(before)], path).stopped
        return None

    def ways(self, step: int, timeline: int | None = None) -> Iterator[tuple[BaseFound, Chain]]:
        """Yield bases from which a step may be reached, each with the steps to replay: those in the
        history of the newest timeline first, and of these the base that needs least replay.

        Args:
            step: step to reach.
            timeline: only states of this timeline; None: of any.
        """
        usable = self.usable
        seen: set[tuple[BaseId, tuple[tuple[int, int], ...]]] = set()
        for number in current_first(self.inventory, self.index):
            path = path_of(number, self.inventory.timelines)
            for key in sorted(bases_on(path, usable), reverse=True):
                if key.step > step:
                    continue
                # Shapes are not compared here, which would open every base: replay compares that of
                # each mark.
                chain = self.chain(usable[key], _until(path, step), look=False)
                fits = chain.end[1] == step and timeline in (None, chain.end[0])
                if fits and (key, chain.steps) not in seen:
                    seen.add((key, chain.steps))
                    yield usable[key], chain
        for key in sorted(usable, reverse=True):  # bases outside every history, too
            if key.step == step and timeline in (None, key.timeline) and (key, ()) not in seen:
                yield usable[key], Chain(key, (), "")

    def cut_off(self, inventory: Inventory) -> tuple[BaseId, str] | None:
        """Return the first step of the current history that has no record while later steps have,
        with no base after it, and the loss as text; None if everything recorded after the newest
        base can be reached.

        Args:
            inventory: taken after the log was read. A running process commits a base before it
                deletes the
                segments before it, so segments read earlier are never reported as cut off because
                their
                base did not exist yet.
        """
        if not self.index.marks or not inventory.branches:
            return None
        path = path_of(current_first(inventory, self.index)[0], inventory.timelines)
        usable = {base.id: base for base in inventory.bases if base.is_usable}
        ends: list[Chain] = []
        for key in bases_on(path, usable):
            manifest = usable[key].manifest
            assert manifest is not None
            ends.append(self.index.follow(key, manifest.markers[0].lsn, None, path))
        best = max(ends, key=lambda chain: chain.end, default=None)
        if best is None or best.lost is None:
            return None
        timeline, step = best.end
        reason = (
            f"later steps, up to step {best.lost}, cannot be restored: {best.stopped}, and "
            "there is no base of a later step"
        )
        return BaseId(timeline, step + 1), reason

    def replayable(self, without: Collection[BaseId] = ()) -> set[tuple[int, int]]:
        """Return ``(timeline, step)`` of every state that replay reaches.

        Args:
            without: bases to ignore.
        """
        return {item for _, chain in self.chains(without) for item in chain.steps}

    def newest_end(self, base: BaseFound) -> BaseId | None:
        """Return the last step that replay reaches from a base along the newest history; None if
        there is none."""
        present = current_first(self.inventory, self.index)[0]
        chain = self.chain(base, path_of(present, self.inventory.timelines))
        return BaseId(*chain.end) if chain.steps else None

    def reaches(self) -> dict[int, Reach]:
        """Return the reach of the log of each timeline that has segments."""
        steps: dict[int, set[int]] = {}
        stopped: dict[int, str] = {}
        for number, chain in self.chains(()):
            for timeline, step in chain.steps:
                steps.setdefault(timeline, set()).add(step)
            stopped[number] = chain.stopped  # of the newest base, which comes last
        recorded: dict[int, list[int]] = {}
        for timeline, step in self.index.marks:
            recorded.setdefault(timeline, []).append(step)
        found = {}
        for timeline in sorted({segment.timeline for segment in self.segments}):
            mine = tuple(s for s in self.segments if s.timeline == timeline)
            reached = tuple(sorted(steps.get(timeline, ())))
            known = spans(sorted(recorded.get(timeline, ())))
            known += [(s.after + 1, s.last) for s in mine if s.problem is not None]
            why = stopped.get(timeline, "")
            found[timeline] = Reach(timeline, reached, mine, why, _between(known))
        return found

    def chains(self, without: Collection[BaseId]) -> Iterator[tuple[int, Chain]]:
        """Yield chains along the history of each timeline, with its number; older bases first."""
        branches = self.inventory.branches
        usable = self.usable
        for number in sorted(branches) if self.index.marks else ():
            path = path_of(number, self.inventory.timelines)
            # Newest base first: the chain of an older one goes on as that of the next.
            after: tuple[BaseFound, Chain] | None = None
            found = []
            for key in sorted(bases_on(path, usable), key=lambda key: key.step, reverse=True):
                if key not in without:
                    after = usable[key], self._onto(usable[key], path, after)
                    found.append((number, after[1]))
            yield from reversed(found)

    def _onto(
        self,
        base: BaseFound,
        path: Sequence[tuple[int, int | None]],
        after: tuple[BaseFound, Chain] | None,
    ) -> Chain:
        """Return the chain of a base, given that of the next base in its history: if the log leads
        to the state of the next base, it continues as from there."""
        if after is None or after[0].id.step <= base.id.step:
            return self.chain(base, path)
        later, rest = after
        chain = self.chain(base, _until(path, later.id.step))
        if chain.end != (later.id.timeline, later.id.step):
            return self.chain(base, path)
        mark = self.index.marks[chain.end]
        assert later.manifest is not None
        if (mark.lsn, mark.shape) != (later.manifest.markers[0].lsn, self.shape(later)):
            return self.chain(base, path)
        return Chain(base.id, (*chain.steps, *rest.steps), rest.stopped, rest.lost)

    def _shape(self, base: BaseFound) -> str:
        assert base.manifest is not None
        try:
            with open_ranks(self._filesystem, base) as opened:
                if len(opened) > 1:
                    return shape_of_all(_shapes_of_ranks(opened))
                trees, _ = contents(opened[0])
                aliases = {k: v for _, _, h, _ in opened[0].shards for k, v in h.aliases.items()}
                return shape_of_base(opened[0].placed(), aliases, trees)
        except (DamageError, FormatError) as error:
            self._unreadable[base.id] = error.message
        except OSError as error:
            self._unreadable[base.id] = error.strerror or str(error)
        return _UNKNOWN


def _shapes_of_ranks(opened: Sequence[OpenBase]) -> list[str]:
    """Return the shape of the state of each rank that saved a base, as its log records it.

    Raises:
        DamageError, FormatError: objects cannot be read.
    """
    saved = SavedRanks(opened)
    sections = {section for rank in saved.ranks for section in saved.sections_of(rank)}
    layout = SavedLayout.of(saved, opened, sections)
    assert layout is not None
    return [layout.shapes[rank] for rank in saved.ranks]


def _verified_step(
    updates: Sequence[LogRecord], mark: LogRecord | EverstepError
) -> JobStep | EverstepError:
    """Return the records of the only rank, or the error if one is damaged."""
    if isinstance(mark, EverstepError):
        return mark
    try:
        for record in (*updates, mark):
            record.verify()
    except DamageError as error:
        return error
    return {0: (updates, mark)}


def _split_step(records: Sequence[LogRecord]) -> tuple[list[LogRecord], LogRecord]:
    """Return the updates of a step in order, and its mark."""
    (mark,) = (one for one in records if one.head.kind == "mark")
    updates = sorted((one for one in records if one is not mark), key=lambda one: one.head.lsn)
    return updates, mark


def _between(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the gaps between ranges."""
    found: list[tuple[int, int]] = []
    end: int | None = None
    for first, last in sorted(ranges):
        if end is not None and first > end + 1:
            found.append((end + 1, first - 1))
        end = last if end is None else max(end, last)
    return tuple(found)


def _until(path: Sequence[tuple[int, int | None]], step: int) -> list[tuple[int, int | None]]:
    """Return a history cut after a step."""
    return [(timeline, step if limit is None else min(limit, step)) for timeline, limit in path]


def bases_on(path: Sequence[tuple[int, int | None]], bases: Iterable[BaseId]) -> list[BaseId]:
    """Return the bases along a history."""
    limits = dict(path)
    return [
        base
        for base in bases
        if base.timeline in limits
        and (limits[base.timeline] is None or base.step <= (limits[base.timeline] or 0))
    ]
