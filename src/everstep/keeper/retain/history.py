"""The steps that ``LogOptions(history=...)`` promises, and the bases that they are replayed from.

A step can be gone back to while there is a base before it and every record between. So a base at
which the chain of a promised step begins stays, however many newer ones there are.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from itertools import chain as chained
from pathlib import PurePath

from everstep.commit.lineage import BaseId
from everstep.config.options import History
from everstep.format.log import RecordHead
from everstep.format.names import LOG_DIR, LOSSY_DIR, parse_segment, timeline_dir
from everstep.format.records import TimelineRecord
from everstep.keeper.log.log import LogStore
from everstep.run.chain import LogIndex, chains, common_heads, path_of
from everstep.run.scan import Inventory
from everstep.run.segments import KnownSegments, SegmentFound, scan_logs, vetted
from everstep.seams import Seams
from everstep.seams.clock import Clock
from everstep.seams.files.filesystem import FileSystem

__all__ = [
    "HistoryFlush",
    "HistoryWindow",
    "SegmentAges",
    "history_windows",
]

_Step = tuple[int, int]  # of a timeline


class HistoryWindow:
    """What can be gone back to, and shall stay so.

    Args:
        steps: ``(timeline, step)`` of each promised one.
        index: of the whole log on disk.
        timelines: records by number.
        moves_on: what is promised now will not be for ever.
    """

    def __init__(
        self,
        steps: Collection[_Step],
        index: LogIndex,
        timelines: Mapping[int, TimelineRecord | None],
        *,
        moves_on: bool = False,
    ) -> None:
        self._steps = steps
        self._moves_on = moves_on
        self._index = index
        self._paths = [path_of(number, timelines) for number in _leaves(timelines, index)]

    @classmethod
    def of(
        cls,
        filesystem: FileSystem,
        inventory: Inventory,
        history: History,
        *,
        ages: SegmentAges,
        known: KnownSegments | None = None,
    ) -> HistoryWindow:
        """Reads what the records of all segments are, as a resume does; of several ranks those of
        all that write to this disk, whose logs are of use together only.

        Args:
            ages: of the process that asks, told what is there now.
            known: of :func:`scan_logs`.

        Raises:
            NewerFormatError, OSError
        """
        logs: list[list[list[SegmentFound]]] = []  # of each timeline, of each rank
        about = filesystem, inventory.path, inventory.timelines, known
        for by_rank in scan_logs(*about, there=inventory.may_hold).values():
            good = [[vetted(s, inventory.run) for s in found] for found in by_rank.values()]
            logs.append([[s for s in found if s.problem is None] for found in good])
        segments = [segment for log in logs for found in log for segment in found]
        steps = {
            (segment.timeline, step)
            for segment in _promised(segments, history, ages)
            for step in range(segment.after + 1, segment.last + 1)
        }
        heads = (common_heads([_heads(found) for found in log]) for log in logs)
        index = LogIndex(chained.from_iterable(heads))
        return cls(steps, index, inventory.timelines, moves_on=history.age_s < math.inf)

    def kept(self, lsns: Mapping[BaseId, int], going: Collection[BaseId]) -> set[BaseId]:
        """Which of ``going`` stay: those that are :meth:`needed`, and the one behind them, which
        takes their place when less is promised; without it the oldest would stay for ever, and the
        log behind it, as the others all go before it does."""
        needed = self.needed(lsns, going)
        later = [base for base in going if needed and base > max(needed)]
        return needed | ({min(later)} if later and self._moves_on else set())

    def needed(self, lsns: Mapping[BaseId, int], going: Iterable[BaseId]) -> set[BaseId]:
        """Which of ``going`` have to stay, so that every promised step that can be reached now can
        be reached without the others.

        Args:
            lsns: of all bases that there are.
            going: those that may go; the oldest go first.
        """
        reach = {base: self._reach(base, lsn) for base, lsn in lsns.items()}
        sure = {base: reach[base] if self._is_sure(base, lsns) else set() for base in lsns}
        ways = Counter(step for steps in sure.values() for step in steps)
        needed = set()
        for base in sorted(going):
            if all(ways[step] > (step in sure[base]) for step in reach[base]):
                ways.subtract(sure[base])
            else:
                needed.add(base)
        return needed

    def _reach(self, base: BaseId, lsn: int) -> set[_Step]:
        """What can be replayed from a base, or might be."""
        steps = {(base.timeline, base.step)}
        own = self._index.marks.get((base.timeline, base.step))  # of what its state consists
        shape = None if own is None else own.shape
        for path in self._paths:
            for chain in chains({base: (lsn, shape)}, self._index, path):
                steps.update(chain.steps)
        return steps & set(self._steps)

    def _is_sure(self, base: BaseId, bases: Collection[BaseId]) -> bool:
        """Whether the log behind this base is of such a state, and others may go on its account.

        Its own mark says so. Where that has gone with the steps before, the state may consist of
        something else from the next step on; but then that step has a base, which goes on nobody's.
        """
        known = (base.timeline, base.step) in self._index.marks
        return known or all(other.step != base.step + 1 for other in bases)


def history_windows(seams: Seams, history: str) -> Callable[[Inventory], HistoryWindow] | None:
    """What says what is promised now (:meth:`History.parse`); None: nothing more than the bases
    that are kept anyway lead to."""
    found = History.parse(history)
    if not found.is_more:
        return None
    files = seams.filesystem
    known = KnownSegments()
    ages = SegmentAges(files, seams.clock)

    def promise(inventory: Inventory) -> HistoryWindow:
        if found.is_by_age:
            ages.look(inventory)
        return HistoryWindow.of(files, inventory, found, ages=ages, known=known)

    return promise


def _heads(segments: Iterable[SegmentFound]) -> Iterator[RecordHead]:
    return (head for segment in segments for head in segment.heads)


def _promised(
    segments: Sequence[SegmentFound],
    history: History,
    ages: SegmentAges,
) -> list[SegmentFound]:
    found = []
    size_bytes = 0
    for segment in sorted(segments, key=lambda s: (s.timeline, s.last), reverse=True):
        size_bytes += segment.size_bytes
        young = history.age_s and ages.of_s(segment.path) <= history.age_s
        if young or size_bytes <= history.size_bytes:
            found.append(segment)
    return found


def _leaves(timelines: Mapping[int, TimelineRecord | None], index: LogIndex) -> list[int]:
    """Timelines but for those that a younger one goes on with, behind all that they have logged."""
    last: dict[int, int] = {}
    for timeline, step in index.marks:
        last[timeline] = max(step, last.get(timeline, 0))
    gone_on = {
        record.parent
        for record in timelines.values()
        if record is not None
        and record.parent is not None
        and record.fork_step >= last.get(record.parent, 0)
    }
    return [number for number in timelines if number not in gone_on]


_USUAL_MAX = 4
"""Times that a pause between segments may be as long as usual and count as what it is."""


class SegmentAges:
    """Ages of segments, as one process sees them.

    What it finds when it first looks is as old as the segments that came behind it took, by the
    times of their files: a longer pause between two of them than is usual is one of training, or a
    clock that has jumped, and counts for little. What comes later is young when it is first seen.
    From then on all of them age by the monotonic clock.
    """

    def __init__(self, filesystem: FileSystem, clock: Clock) -> None:
        self._filesystem = filesystem
        self._now_s = clock.monotonic_s
        # When it got its last name (of its marker), by the disk: another one may take its place.
        self._written: dict[tuple[PurePath, float], float] | None = None
        self._since_s: dict[PurePath, float] = {}

    def look(self, inventory: Inventory) -> None:
        """Takes note of what is there."""
        now_s = self._now_s()
        found = self._found(inventory)
        if self._written is None:
            before = _ages([stamp for _, stamp in found])
            self._written = {one: now_s - age_s for one, age_s in zip(found, before, strict=True)}
        self._written = {one: self._written.get(one, now_s) for one in found}
        self._since_s = {path: since_s for (path, _), since_s in self._written.items()}

    def of_s(self, path: PurePath) -> float:
        """Seconds that a segment is old, at least; none where it was not seen yet."""
        now_s = self._now_s()
        return now_s - self._since_s.get(path, now_s)

    def _found(self, inventory: Inventory) -> list[tuple[PurePath, float]]:
        """Directories of segments in the order in which they were written, and their times."""
        found = []
        for timeline in inventory.timelines:
            for kind in (LOG_DIR, LOSSY_DIR):
                if not inventory.may_hold(timeline, kind):
                    continue
                directory = timeline_dir(inventory.path, timeline) / kind
                with contextlib.suppress(FileNotFoundError):
                    for entry in self._filesystem.scan(directory):
                        if (steps := parse_segment(entry.name)) is not None:
                            path = directory / entry.name
                            found.append((timeline, steps[1], path, entry.mtime_s))
        return [(path, stamp) for _, _, path, stamp in sorted(found)]


def _ages(stamps: Sequence[float]) -> list[float]:
    """How much older than the last one each of them is."""
    gaps = [max(0.0, later - earlier) for earlier, later in pairwise(stamps)]
    # The longest says nothing of what is usual: of two, one may be the jump.
    others = sorted(gap for gap in gaps if gap > 0)[:-1]
    most = _USUAL_MAX * statistics.median_low(others) if others else 0.0
    ages = list(accumulate((min(gap, most) for gap in reversed(gaps)), initial=0.0))
    return ages[::-1][len(ages) - len(stamps) :]


class HistoryFlush:
    """Of one timeline.

    Args:
        history: steps that can be gone back to (:meth:`everstep.config.options.History.parse`).
        keep: bases that retention keeps in any case.
    """

    def __init__(self, history: str, keep: int) -> None:
        self._kept = deque[int](maxlen=keep) if History.parse(history).is_more else None

    def before_base(
        self, step: int, log: LogStore | None, timeout_s: float, alive: Callable[[], None]
    ) -> None:
        """A base is going to be durable. Retention looks at what of the log is on disk, and would
        delete the base that steps of an unfinished batch lead on from: these are written before.

        Args:
            alive: called as long as they are being written.

        Raises:
            DeadlineError: nothing of them was written for ``timeout_s``.
        """
        if self._kept is None or log is None:
            return
        self._kept.append(step)
        if len(self._kept) == self._kept.maxlen and (log.after or 0) + 1 < self._kept[0]:
            log.flush()
            log.settle(timeout_s, alive)
