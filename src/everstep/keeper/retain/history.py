"""Steps that ``LogOptions(history=...)`` keeps reachable, and the bases that they are replayed
from.

Resume can go back to a step while there is a base before it and every record between. So the base
at which the chain of such a step begins stays, however many newer ones there are.
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

from everstep.commit import BaseId
from everstep.config import History
from everstep.format import TimelineRecord, timeline_dir
from everstep.format.log import RecordHead
from everstep.format.names import LOG_DIR, LOSSY_DIR, parse_segment
from everstep.keeper.log import LogStore
from everstep.run import BaseFound, Inventory
from everstep.run.chain import LogIndex, chains, common_heads, path_of
from everstep.run.segments import SegmentCache, SegmentFound, scan_logs, validated
from everstep.seams import Clock, FileSystem

_Step = tuple[int, int]  # of a timeline


class HistoryWindow:
    """The steps that must stay reachable.

    Args:
        steps: ``(timeline, step)`` of each.
        index: index of the whole log on disk.
        timelines: records of timelines by number.
        moves_on: the window moves with time: its steps leave it some day.
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
        known: SegmentCache | None = None,
    ) -> HistoryWindow:
        """Read the heads of all segments, as a resume does, and build the window.

        Of several ranks, the logs of all that write to this disk count together: only as a set are
        they of use.

        Args:
            ages: ages of segments, updated with the current inventory.
            known: cache of :func:`scan_logs`.

        Raises:
            NewerFormatError: a newer version of everstep wrote a segment.
            OSError: the file system failed.
        """
        logs: list[list[list[SegmentFound]]] = []  # of each timeline, of each rank
        found_logs = scan_logs(
            filesystem, inventory.path, inventory.timelines, known, there=inventory.may_hold
        )
        for by_rank in found_logs.values():
            # Invalid segments are left out: a step after a gap cannot be reached.
            good = [[validated(s, inventory.run) for s in found] for found in by_rank.values()]
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

    def kept(self, lsns: Mapping[BaseId, int], victims: Collection[BaseId]) -> set[BaseId]:
        """Return the victims that stay: those that are :meth:`needed`, and their successor."""
        needed = self.needed(lsns, victims)
        # The successor takes over when the window has moved past the oldest base. If it were
        # deleted now, the oldest base and the log after it would have to stay for ever.
        later = [base for base in victims if needed and base > max(needed)]
        return needed | ({min(later)} if later and self._moves_on else set())

    def needed(self, lsns: Mapping[BaseId, int], victims: Iterable[BaseId]) -> set[BaseId]:
        """Return the victims that must stay so that each step of the window stays reachable.

        Args:
            lsns: LSN of each base that exists.
            victims: bases that may be deleted; the oldest are deleted first.
        """
        reach = {base: self._reach(base, lsn) for base, lsn in lsns.items()}
        sure = {base: reach[base] if self._is_sure(base, lsns) else set() for base in lsns}
        ways = Counter(step for steps in sure.values() for step in steps)
        needed = set()
        for base in sorted(victims):
            # Superfluous if each of its steps has another certain way to be reached.
            if all(ways[step] > (step in sure[base]) for step in reach[base]):
                # It is going to be deleted: the others have to do without it.
                ways.subtract(sure[base])
            else:
                needed.add(base)
        return needed

    def _reach(self, base: BaseId, lsn: int) -> set[_Step]:
        """Return the steps of the window that can be replayed from a base, or possibly can."""
        steps = {(base.timeline, base.step)}
        # The mark at the base's own step has the shape of its state.
        own = self._index.marks.get((base.timeline, base.step))
        shape = None if own is None else own.shape
        for path in self._paths:
            for chain in chains({base: (lsn, shape)}, self._index, path):
                steps.update(chain.steps)
        return steps & set(self._steps)

    def _is_sure(self, base: BaseId, bases: Collection[BaseId]) -> bool:
        """Return True if the log after this base certainly fits its state.

        The mark at the base's own step proves it. If that mark was deleted with earlier steps, the
        shape may change at the next step; but then that step has a base of its own, which no other
        base replaces.
        """
        known = (base.timeline, base.step) in self._index.marks
        return known or all(other.step != base.step + 1 for other in bases)


def _heads(segments: Iterable[SegmentFound]) -> Iterator[RecordHead]:
    return (head for segment in segments for head in segment.heads)


def _promised(
    segments: Sequence[SegmentFound],
    history: History,
    ages: SegmentAges,
) -> list[SegmentFound]:
    found = []
    size_bytes = 0
    # Newest first: a promise in bytes covers the newest segments.
    for segment in sorted(segments, key=lambda s: (s.timeline, s.last), reverse=True):
        size_bytes += segment.size_bytes
        young = history.age_s and ages.of_s(segment.path) <= history.age_s
        if young or size_bytes <= history.size_bytes:
            found.append(segment)
    return found


def _leaves(timelines: Mapping[int, TimelineRecord | None], index: LogIndex) -> list[int]:
    """Return the timelines that no younger one continues after all of their logged steps."""
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
"""A pause between segments counts in full up to so many times the usual pause."""


class SegmentAges:
    """Minimum ages of log segments, as one process observes them.

    A segment in ``history="2h"`` must not be deleted because a clock has jumped: the wall clock
    jumps
    (NTP, a machine booted with a wrong time), and the clock of a network file server differs from
    it. So the age is measured with the monotonic clock from the moment at which this process first
    saw the segment. The age of segments that existed before comes from the differences between the
    times of their files. A pause that is much longer than usual, which may be a pause of training
    or a jump of the clock, counts for little.
    """

    def __init__(self, filesystem: FileSystem, clock: Clock) -> None:
        self._filesystem = filesystem
        self._now_s = clock.monotonic_s
        # By path and time of the last rename (that of the marker): a segment that replaces another
        # one under the same path starts with age zero.
        self._written: dict[tuple[PurePath, float], float] | None = None
        self._since_s: dict[PurePath, float] = {}

    def observe(self, inventory: Inventory) -> None:
        """Note the segments that exist now."""
        now_s = self._now_s()
        found = self._found(inventory)
        # First look of this process: estimate the ages from the times of the files.
        if self._written is None:
            before = _ages([stamp for _, stamp in found])
            self._written = {one: now_s - age_s for one, age_s in zip(found, before, strict=True)}
        # Deleted segments are forgotten; new ones are young, whatever the times of their files say.
        self._written = {one: self._written.get(one, now_s) for one in found}
        self._since_s = {path: since_s for (path, _), since_s in self._written.items()}

    def of_s(self, path: PurePath) -> float:
        """Return the minimum age of a segment in seconds; 0 if it was not observed yet."""
        now_s = self._now_s()
        return now_s - self._since_s.get(path, now_s)

    def _found(self, inventory: Inventory) -> list[tuple[PurePath, float]]:
        """Return the directories of segments and their times, in the order in which they were
        written."""
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
    """Return by how much each time precedes the last one, in seconds, without unusual pauses."""
    gaps = [max(0.0, later - earlier) for earlier, later in pairwise(stamps)]
    # Without the longest, which may itself be the jump, even if there are only two.
    others = sorted(gap for gap in gaps if gap > 0)[:-1]
    most = _USUAL_MAX * statistics.median_low(others) if others else 0.0
    ages = list(accumulate((min(gap, most) for gap in reversed(gaps)), initial=0.0))
    return ages[::-1][len(ages) - len(stamps) :]


class HistoryWindows:
    """Windows of one process, each read from the log that is on disk at that moment.

    Args:
        history: steps that resume can go back to (:meth:`everstep.config.options.History.parse`).
        clock: its monotonic time measures the age of segments.
    """

    def __init__(self, filesystem: FileSystem, clock: Clock, history: str) -> None:
        self._filesystem = filesystem
        self._history = History.parse(history)
        self._ages = SegmentAges(filesystem, clock)
        self._segments = SegmentCache()

    def observe(self, inventory: Inventory) -> None:
        """Note the ages of the segments that exist now."""
        if self._history.is_by_age:
            self._ages.observe(inventory)

    def read(self, inventory: Inventory) -> HistoryWindow:
        """Return the current window."""
        return HistoryWindow.of(
            self._filesystem, inventory, self._history, ages=self._ages, known=self._segments
        )

    def needed(
        self,
        inventory: Inventory,
        bases: Iterable[BaseFound],
        damaged: Collection[BaseId],
        victims: Collection[BaseId] | None = None,
    ) -> set[BaseId]:
        """Return the victims that steps of the history need as the start of their replay.

        Args:
            bases: bases that exist.
            damaged: bases that do not count, as nothing can be replayed from them.
            victims: bases that may be deleted; None: all but the newest, which retention never
                deletes.
        """
        # Otherwise the history holds only steps that the bases kept anyway lead to.
        if not self._history.is_more or (victims is not None and not victims):
            return set()
        lsns = {
            base.id: base.manifest.markers[0].lsn
            for base in bases
            if base.manifest is not None and base.id not in damaged
        }
        victims = sorted(lsns)[:-1] if victims is None else victims
        return self.read(inventory).kept(lsns, [base for base in victims if base in lsns])


class HistoryFlush:
    """Writes batched records to disk before retention decides which bases the history needs.

    Args:
        history: steps that resume can go back to (:meth:`everstep.config.options.History.parse`).
        keep: number of bases that retention keeps in any case.
    """

    def __init__(self, history: str, keep: int) -> None:
        self._kept = deque[int](maxlen=keep) if History.parse(history).is_more else None

    def before_base(
        self, step: int, log: LogStore | None, timeout_s: float, alive: Callable[[], None]
    ) -> None:
        """Flush the log if retention after the next base could otherwise delete too much.

        Retention looks at the log on disk only. Without the flush it would delete the base from
        which the steps of an unfinished batch lead on.

        Args:
            alive: called repeatedly while records are being written.

        Raises:
            DeadlineError: no record was written for ``timeout_s`` seconds.
        """
        if self._kept is None or log is None:
            return
        self._kept.append(step)
        # Only when retention could delete the base that unflushed steps need: a flush ends a batch
        # early.
        if len(self._kept) == self._kept.maxlen and (log.segments.after or 0) + 1 < self._kept[0]:
            log.flush()
            log.settle(timeout_s, alive)
