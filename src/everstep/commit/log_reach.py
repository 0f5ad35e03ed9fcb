"""Last step that the logs of all ranks reach from a base: decisions without I/O (I4, I7).

Each rank replays its own log on its own files of a base. A job can only continue from a step that
every log reaches: where one log ends or has a hole, replay ends for all ranks. The same holds for
logs of another number of ranks or another layout (``docs/design/ranks.md``): the job that starts
needs the logs of all of those ranks, whichever of its own ranks can read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta

from everstep.commit.lineage import BaseId, Branch, split_by_history
from everstep.format import Manifest, TimelineRecord
from everstep.format.log import RecordHead
from everstep.format.message_codec import Count, Rank

Path = Sequence[tuple[int, int | None]]
"""A history, newest timeline first, with the last step of each that is in the history."""


@dataclass(frozen=True, slots=True)
class LogRun:
    """Consecutive steps of one rank's log, without a hole.

    Attributes:
        first: first step.
        after: all updates after this one are recorded, up to the mark of the first step.
        lsns: for each step, the last update before its mark.
        shape: digest of the state's shape, the same for all steps.
    """

    timeline: Count
    first: Count
    after: Count
    lsns: Annotated[tuple[Count, ...], Meta(min_length=1)]
    shape: str

    @property
    def last(self) -> int:
        """Last step."""
        return self.first + len(self.lsns) - 1

    def follows(self, step: int, lsn: int) -> bool:
        """Return True if ``step`` can be replayed on the state after update ``lsn``.

        Args:
            lsn: last update that the state of the previous step contains; it contains all earlier
                ones and no later one.
        """
        at = step - self.first
        if at == 0:
            # The updates from after + 1 on are recorded, so any state from there up to the mark can
            # be continued from.
            return self.after <= lsn <= self.lsns[0]
        return 0 < at < len(self.lsns) and self.lsns[at - 1] == lsn


class LogReader(NamedTuple):
    """Assignment of log steps of another number of ranks, or another layout, to a rank that reads
    them.

    Attributes:
        source: rank that wrote the log.
        timeline, first, last: the steps, inclusive.
        rank: rank of the job that starts.
    """

    source: Rank
    timeline: Count
    first: Count
    last: Count
    rank: Rank


@dataclass(frozen=True, slots=True)
class Reach:
    """Last step that all ranks reach from a base; the base's own step if nothing can be replayed.

    Attributes:
        lsn: last update before the mark of that step, the same for all ranks.
        count: number of steps to replay.
        furthest: last step that any rank could reach.
        shortest: a rank whose log ends at ``step``.
        beyond: last step of the history that is in any log after ``furthest``, if no log leads to
        it
            and no other reason was reported; else 0.
    """

    timeline: Count
    step: Count
    lsn: Count
    count: Count
    furthest: Count
    shortest: Rank
    beyond: Count = 0

    @property
    def end(self) -> BaseId:
        """Timeline and step."""
        return BaseId(self.timeline, self.step)


def runs_of(
    marks: Mapping[tuple[int, int], RecordHead], updates: Collection[tuple[int, int]]
) -> tuple[LogRun, ...]:
    """Return the runs of a log.

    Args:
        marks: heads of step marks by timeline and step.
        updates: timeline and LSN of each update.
    """
    found: list[LogRun] = []
    lsns: list[int] = []
    before: RecordHead | None = None
    begin = 0

    def end() -> None:
        if before is not None:
            first = before.step - len(lsns) + 1
            found.append(LogRun(before.timeline, first, begin, tuple(lsns), before.shape))

    for key in sorted(marks):
        mark = marks[key]
        if before is None or not _continues(before, mark, updates):
            end()
            begin = mark.lsn
            lsns = []
            # No mark before it tells where the updates of its step begin: count back to the first.
            while (mark.timeline, begin) in updates:
                begin -= 1
        lsns.append(mark.lsn)
        before = mark
    end()
    return tuple(found)


def _continues(before: RecordHead, mark: RecordHead, updates: Collection[tuple[int, int]]) -> bool:
    if (before.timeline, before.step + 1, before.shape) != (mark.timeline, mark.step, mark.shape):
        return False
    between = range(before.lsn + 1, mark.lsn + 1)
    return mark.lsn >= before.lsn and all((mark.timeline, lsn) in updates for lsn in between)


def log_path(branches: Mapping[int, Branch], logged: Collection[int]) -> Path:
    """Return the history along which logs are followed.

    It begins at the newest timeline that has a log or whose record gives its fork point. It ends at
    a timeline whose record cannot be read, because the end of the one before it is unknown.

    Args:
        logged: timelines that some rank has a log of.
    """
    if not branches:
        return ()
    timeline = max(branches)
    while timeline not in logged and (branch := branches[timeline]).parent is not None:
        if branch.fork_step is not None:
            break
        timeline = branch.parent
    path: list[tuple[int, int | None]] = [(timeline, None)]
    limit: int | None = None
    while (found := branches.get(timeline)) is not None and found.parent is not None:
        # A forged record may name a younger parent, and the loop would not end.
        if found.fork_step is None or found.parent >= timeline:
            break
        limit = found.fork_step if limit is None else min(limit, found.fork_step)
        timeline = found.parent
        path.append((timeline, limit))
    return path


def steps_reached(
    runs: Iterable[LogRun],
    base: BaseId,
    lsn: int,
    path: Path,
    *,
    unusable: Collection[tuple[int, int]] = (),
) -> list[tuple[int, int, int]]:
    """Return timeline, step and LSN of each step that one rank's log adds to a base.

    Args:
        lsn: LSN of the rank's own files of the base.
        unusable: timeline and step of records found unusable.
    """
    by_timeline: dict[int, list[LogRun]] = {}
    for run in runs:
        by_timeline.setdefault(run.timeline, []).append(run)
    found: list[tuple[int, int, int]] = []
    # No log follows a base of an abandoned branch.
    if not any(t == base.timeline and (end is None or base.step <= end) for t, end in path):
        return found
    step = base.step
    shape = None
    while True:
        step += 1
        timeline = timeline_of(step, path)
        here = by_timeline.get(timeline, []) if timeline is not None else []
        fit = (run for run in here if run.first <= step <= run.last and run.follows(step, lsn))
        one = next(fit, None)
        # The shape of the base is not known here: the first step gives it, and restore compares it.
        if one is None or (one.timeline, step) in unusable or shape not in (None, one.shape):
            return found
        lsn = one.lsns[step - one.first]
        shape = one.shape
        found.append((one.timeline, step, lsn))


def common_reach(
    logs: Sequence[Collection[LogRun]],
    base: BaseId,
    lsn: int,
    path: Path,
    *,
    until: int | None = None,
    unusable: Collection[tuple[int, int, int]] = (),
) -> Reach:
    """Return the last step that every rank reaches from a base, each by its own log.

    Replay ends before a step in which one rank has made more updates than another: no base after
    that step would be complete either.

    Args:
        logs: runs of each rank's log.
        lsn: LSN of the base.
        until: no step after this one.
        unusable: rank, timeline and step of records found unusable.
    """
    chains = []
    for rank, runs in enumerate(logs):
        bad = {(timeline, step) for one, timeline, step in unusable if one == rank}
        chains.append(steps_reached(runs, base, lsn, path, unusable=bad))
    count = 0
    while count < min(map(len, chains)) and len({chain[count] for chain in chains}) == 1:
        count += 1
    if until is not None:
        count = max(0, min(count, until - base.step))
    timeline, step, last = chains[0][count - 1] if count else (base.timeline, base.step, lsn)
    furthest = base.step + max(map(len, chains))
    beyond = max((_last_of(run, path) for runs in logs for run in runs), default=0)
    # A record found unusable is reported with its own reason.
    if beyond <= furthest or any(at == furthest + 1 for _, _, at in unusable):
        beyond = 0
    shortest = min(range(len(chains)), key=lambda rank: len(chains[rank]))
    return Reach(timeline, step, last, count, furthest, shortest, beyond)


def _last_of(run: LogRun, path: Path) -> int:
    """Return the last step of a run that is in a history; 0 if there is none."""
    limit = next((end for timeline, end in path if timeline == run.timeline), 0)
    last = run.last if limit is None else min(run.last, limit)
    return last if last >= run.first and timeline_of(last, path) == run.timeline else 0


def needed_by(segment: tuple[int, int, int], bases: Collection[BaseId]) -> bool:
    """Return True if replay of a segment may take one of these bases further.

    Args:
        segment: timeline, and its steps ``(after, last]``.
    """
    timeline, _, last = segment
    return any(base.step < last and base.timeline <= timeline for base in bases)


def timeline_of(step: int, path: Path) -> int | None:
    """Return the timeline of a history that wrote ``step``: the oldest that had not forked yet."""
    for timeline, limit in reversed(path):
        if limit is None or step <= limit:
            return timeline
    return None


class JobLogs:
    """Logs of all ranks of a starting job, along the history of its run.

    Args:
        runs: runs of each rank's own log, by rank.
        records: records of all timelines.
        branches: fork point of each timeline.
        unusable: rank, timeline and step of records found unusable.
        others: for each rank, the runs it can read of logs of another number of ranks, by the rank
            number at that time; of this number as well for timelines in ``relaid``.
        relaid: timelines of the same number of ranks with another layout.
    """

    def __init__(
        self,
        runs: Sequence[Sequence[LogRun]],
        records: Mapping[int, TimelineRecord | None],
        branches: Mapping[int, Branch],
        unusable: Collection[tuple[int, int, int]] = (),
        others: Sequence[Mapping[int, Sequence[LogRun]]] = (),
        relaid: Collection[int] = (),
    ) -> None:
        self._world = len(runs)
        self._unusable = unusable
        self._relaid = relaid
        self._worlds = {n: record.world for n, record in records.items() if record is not None}
        # A rank's own log counts only if as many ranks wrote it: another number of ranks divided
        # the state in another way.
        self._runs = [
            [run for run in own if self._worlds.get(run.timeline) == len(runs)] for own in runs
        ]
        self._others: dict[int, dict[int, list[tuple[int, LogRun]]]] = {}  # by world, then rank
        for rank, seen in enumerate(others):
            for source, run in ((s, run) for s, found in seen.items() for run in found):
                if (world := self._worlds.get(run.timeline)) is not None:
                    known = self._others.setdefault(world, {})
                    known.setdefault(source, []).append((rank, run))
        self._last: dict[int, int] = {}  # step of each timeline
        self._shapes: dict[int, set[str]] = {}  # likewise
        every = [run for own in self._runs for run in own]
        every += [run for w in self._others.values() for s in w.values() for _, run in s]
        for run in every:
            self._last[run.timeline] = max(self._last.get(run.timeline, 0), run.last)
            self._shapes.setdefault(run.timeline, set()).add(run.shape)
        self._branches = branches
        self._path = log_path(branches, self._last)

    def ends(self) -> list[BaseId]:
        """Return the last logged step of each timeline."""
        return [BaseId(*one) for one in self._last.items()]

    def reach(self, base: BaseId, manifest: Manifest, until: int | None = None) -> Reach | None:
        """Return the last step that all ranks reach from a base by the logs of the ranks that saved
        it.

        Return None if those were another number of ranks, or had another layout, and no rank can
        read their logs.

        Args:
            until: no step after this one.
        """
        lsn = manifest.markers[0].lsn  # that of all
        world = len(manifest.markers)
        if self._is_own(base, manifest):
            logs: Sequence[Collection[LogRun]] = self._runs
            unusable = self._unusable
        elif world in self._others:
            others = self._others[world]
            logs = [[run for _, run in others.get(source, ())] for source in range(world)]
            # The number is that of the reading rank, which may read the logs of several: refuse the
            # step of all of them.
            bad = {(timeline, step) for _, timeline, step in self._unusable}
            unusable = {(source, *one) for source in range(world) for one in bad}
        else:
            return None
        return common_reach(logs, base, lsn, self._path, until=until, unusable=unusable)

    def readers(self, base: BaseId, manifest: Manifest, reach: Reach) -> tuple[LogReader, ...]:
        """Assign the reading of logs of another number of ranks, or another layout, up to
        ``reach``.

        Each step of each log is read once, preferably by the rank that needs it. Empty if every
        rank reads its own log.
        """
        world = len(manifest.markers)
        found = list[LogReader]()
        if self._is_own(base, manifest):
            return ()
        for source in range(world):
            # The rank at the same relative position: it most likely needs these slices itself.
            nearest = source * self._world // world
            held = sorted(
                self._others[world].get(source, ()), key=lambda one: (abs(one[0] - nearest), one[0])
            )
            lsn = manifest.markers[0].lsn
            for step in range(base.step + 1, reach.step + 1):
                timeline = timeline_of(step, self._path)
                fit = ((rank, run) for rank, run in held if run.timeline == timeline)
                # There is one: reach() has found such a run for each step.
                rank, run = next(
                    (rank, run)
                    for rank, run in fit
                    if run.first <= step <= run.last and run.follows(step, lsn)
                )
                lsn = run.lsns[step - run.first]
                one = LogReader(source, run.timeline, step, step, rank)
                if found and found[-1]._replace(last=step) == one._replace(first=found[-1].first):
                    found[-1] = found[-1]._replace(last=step)
                else:
                    found.append(one)
        return tuple(found)

    def best(
        self, bases: Mapping[BaseId, Manifest], step: int | None
    ) -> tuple[BaseId, Reach | None] | None:
        """Return the base from which all ranks get furthest, the newest of several; None if there
        is none.

        Args:
            bases: bases of one history that every rank can read.
            step: reach exactly this step.
        """
        found: list[tuple[BaseId, BaseId, Reach | None]] = []
        for base, manifest in bases.items():
            reach = self.reach(base, manifest, step)
            end = base if reach is None else reach.end
            if step is None or end.step == step:
                found.append((end, base, reach))
        if not found:
            return None
        # Without the Reach, which has no order.
        _, base, reach = max(found, key=lambda one: one[:2])
        return base, reach

    def refused(self, end: BaseId, manifest: Manifest) -> list[tuple[BaseId, str]]:
        """Return last steps of logs after the restored step that do not fit its base, and the
        reasons.

        They were written by another number of ranks, or with another layout, so the slices of
        tensors that their gradients belong to are unknown.

        Args:
            end: restored timeline and step.
            manifest: manifest of the base.
        """
        world = len(manifest.markers)
        found = list[tuple[BaseId, str]]()
        for timeline, step in sorted(self._last.items()):
            if timeline < end.timeline or step <= end.step:
                continue
            if (wrote := self._worlds[timeline]) != world:
                why = f"log: written by {wrote} rank(s), but the base before it by {world}"
                found.append((BaseId(timeline, step), why))
            elif manifest.timeline in self._relaid and not (
                self._shapes[timeline] & self._shapes.get(end.timeline, set())
            ):
                why = "log: the layout of its ranks is not that of the base before it"
                found.append((BaseId(timeline, step), why))
        return found

    def kept(
        self, end: BaseId, manifest: Manifest, bases: Mapping[BaseId, Manifest]
    ) -> tuple[BaseId, str] | None:
        """Return how far the logs lead beyond the restored step, and why this job cannot replay
        them.

        Return None if they lead no further.

        Args:
            end: restored timeline and step.
            manifest: manifest of the base.
            bases: bases of the history that every rank can read.
        """
        # Shows how far the logs lead if the records that failed in this start are not left out.
        whole = copy(self)
        whole._unusable = ()
        _, reach = whole.best(bases, None) or (end, None)
        if reach is not None and reach.step > end.step:
            at = end.step + 1
            ranks = sorted({rank for rank, _, step in self._unusable if step == at})
            who = f"rank(s) {', '.join(map(str, ranks))}" if ranks else "a rank"
            return (
                reach.end,
                f"{who} could not replay step {at}; see Recovery.skipped for the reason",
            )
        refused = dict(self.refused(end, manifest))
        there, _ = split_by_history(refused, self._branches)
        return (there[0], refused[there[0]]) if there else None

    def _is_own(self, base: BaseId, manifest: Manifest) -> bool:
        """Return True if each rank replays its own log from this base."""
        return len(manifest.markers) == self._world and base.timeline not in self._relaid
