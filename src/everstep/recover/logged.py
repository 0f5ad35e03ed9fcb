"""What base and log on disk give together: which steps, from which base, by which segments."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, FormatError
from everstep.format.log import RecordHead
from everstep.recover.chain import Chain, path_of
from everstep.recover.load import contents
from everstep.recover.logs import LogFound
from everstep.recover.opened import OpenBase
from everstep.recover.scan import BaseFound, Inventory
from everstep.recover.segments import SegmentFound, scan_log
from everstep.recover.shape import shape_of_base
from everstep.seams.filesystem import FileSystem

__all__ = ["Reach", "RunLog", "spans", "vetted"]

_ATTEMPTS = 8
_UNKNOWN = "?"  # the shape of a base that cannot be read: that of no log


@dataclass(frozen=True, slots=True)
class Reach:
    """What the log of one timeline adds.

    Attributes:
        steps: of this timeline that can be reached by replay, ascending.
        stopped: why the newest base's log goes no further, in words.
    """

    timeline: int
    steps: tuple[int, ...]
    segments: tuple[SegmentFound, ...]
    stopped: str

    @property
    def records(self) -> int:
        return sum(len(segment.heads) for segment in self.segments)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


class RunLog:
    """The log of a run on disk; reads records and headers, and of bases their objects.

    Attributes:
        segments: all of them; those that cannot be used have a ``problem``.
        log: the records of those that can.
    """

    def __init__(
        self, filesystem: FileSystem, inventory: Inventory, segments: Sequence[SegmentFound]
    ) -> None:
        self._filesystem = filesystem
        self.inventory = inventory
        self.segments = [vetted(segment, inventory.run) for segment in segments]
        self.log = LogFound((), self.segments)
        self._shapes: dict[BaseId, str] = {}

    @classmethod
    def of(cls, filesystem: FileSystem, inventory: Inventory) -> RunLog:
        """Looks at all segments.

        Raises:
            NewerFormatError: one was written by a newer everstep.
            OSError: a directory cannot be read.
        """
        timelines = sorted(inventory.timelines)
        for left in reversed(range(_ATTEMPTS)):
            try:
                found = scan_log(filesystem, inventory.path, timelines)
                return cls(filesystem, inventory, found)
            except FileNotFoundError:  # a process at work deletes segments meanwhile
                if not left:
                    raise
        raise AssertionError("unreachable")

    @property
    def usable(self) -> dict[BaseId, BaseFound]:
        """Bases that have all of their records."""
        there = ("committed", "complete")
        return {base.id: base for base in self.inventory.bases if base.status in there}

    def shape(self, base: BaseFound) -> str:
        """What a base consists of (see :mod:`everstep.state.shapes`), from its objects."""
        found = self._shapes.get(base.id)
        if found is None:
            found = self._shapes[base.id] = self._shape(base)
        return found

    def chain(
        self, base: BaseFound, path: Sequence[tuple[int, int | None]], *, look: bool = True
    ) -> Chain:
        """How far the log goes from a base along a history.

        Args:
            look: at what the base consists of; otherwise the first mark is believed.
        """
        assert base.manifest is not None
        lsn = base.manifest.markers[0].lsn
        chain = self.log.index.follow(base.id, lsn, None, path)
        if look and chain.steps and self.shape(base) != self.log.index.marks[chain.steps[0]].shape:
            return Chain(base.id, (), "the log behind it is of a state of another shape")
        return chain

    def ways(self, step: int, timeline: int | None = None) -> list[tuple[BaseFound, Chain]]:
        """Bases from which ``step`` may be reached, and the steps to redo on each: those of the
        newest timeline's history first, and of these the base that needs least replay.

        Args:
            timeline: only states of this one.
        """
        branches, usable = self.inventory.branches, self.usable
        found: dict[tuple[BaseId, tuple[tuple[int, int], ...]], Chain] = {}
        for number in sorted(branches, reverse=True):
            path = path_of(number, branches)
            for key in sorted(_on(path, usable), reverse=True):
                if key.step > step:
                    continue
                chain = self.chain(usable[key], path, look=False)
                steps = tuple(item for item in chain.steps if item[1] <= step)
                cut = replace(chain, steps=steps)
                if cut.end[1] == step and timeline in (None, cut.end[0]):
                    found.setdefault((key, steps), cut)
        for key in sorted(usable, reverse=True):  # also where it is in no history
            if key.step == step and timeline in (None, key.timeline):
                found.setdefault((key, ()), Chain(key, (), ""))
        return [(usable[key], chain) for (key, _), chain in found.items()]

    def replayable(self, without: Collection[BaseId] = ()) -> set[tuple[int, int]]:
        """``(timeline, step)`` of every state that replay reaches.

        Args:
            without: as if these bases were not there.
        """
        return {item for _, chain in self._chains(without) for item in chain.steps}

    def newest_end(self, base: BaseFound) -> BaseId | None:
        """How far replay goes from a base along the newest history; None: not a step."""
        branches = self.inventory.branches
        chain = self.chain(base, path_of(max(branches), branches))
        return BaseId(*chain.end) if chain.steps else None

    def reaches(self) -> dict[int, Reach]:
        """What the log of each timeline adds; only timelines that have segments."""
        steps: dict[int, set[int]] = {}
        stopped: dict[int, str] = {}
        for number, chain in self._chains(()):
            for timeline, step in chain.steps:
                steps.setdefault(timeline, set()).add(step)
            stopped[number] = chain.stopped  # the newest base comes last
        found = {}
        for timeline in sorted({segment.timeline for segment in self.segments}):
            mine = tuple(s for s in self.segments if s.timeline == timeline)
            reached = tuple(sorted(steps.get(timeline, ())))
            found[timeline] = Reach(timeline, reached, mine, stopped.get(timeline, ""))
        return found

    def _chains(self, without: Collection[BaseId]) -> Iterable[tuple[int, Chain]]:
        """Chains along the history of each timeline, by its number; older bases first."""
        branches, usable = self.inventory.branches, self.usable
        for number in sorted(branches) if self.log.index.marks else ():
            path = path_of(number, branches)
            for key in sorted(_on(path, usable)):
                if key not in without:
                    yield number, self.chain(usable[key], path)

    def _shape(self, base: BaseFound) -> str:
        try:
            opened = OpenBase.open(self._filesystem, base, rank=0)
            try:
                trees, _ = contents(opened)
                aliases = {k: v for _, _, h, _ in opened.shards for k, v in h.aliases.items()}
                return shape_of_base(opened.placed(), aliases, trees)
            finally:
                opened.close()
        except (DamageError, FormatError, OSError):
            return _UNKNOWN


def vetted(segment: SegmentFound, run: str | None) -> SegmentFound:
    """The segment, or one that says why it cannot be used: what its index lists must be records
    of this run and timeline, in the order in which they were made (I4)."""
    if segment.problem is not None or segment.marker is None:
        return segment
    if run is not None and segment.marker.run != run:
        why: str | None = "it belongs to another run"
    else:
        why = _disorder(segment.heads, segment.timeline, segment.last)
    if why is None:
        return segment
    return dataclasses.replace(segment, problem=f"{segment.path}: {why}", heads=())


def spans(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending steps as ranges, both ends included."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def _disorder(heads: Sequence[RecordHead], timeline: int, last: int) -> str | None:
    step = lsn = marked = -1
    for number, head in enumerate(heads):
        numbers = (head.step, head.lsn)
        if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(head.shape, str):
            return f"record {number} has no step or number"
        if head.timeline != timeline:
            return f"record {number} is of timeline {head.timeline}"
        if head.kind not in ("update", "mark"):
            return f"record {number} is of no kind that is known"
        newer = head.lsn > lsn if head.kind == "update" else head.lsn >= lsn
        if not newer or head.step < step or head.step <= marked:
            return f"record {number} ({head}) is out of order"
        step, lsn = numbers
        marked = step if head.kind == "mark" else marked
    if not heads or heads[-1].kind != "mark" or heads[-1].step != last:
        return f"it does not end with the mark of step {last}"
    return None


def _on(path: Sequence[tuple[int, int | None]], bases: Iterable[BaseId]) -> list[BaseId]:
    limits = dict(path)
    return [
        base
        for base in bases
        if base.timeline in limits
        and (limits[base.timeline] is None or base.step <= (limits[base.timeline] or 0))
    ]
