"""Reach of the gradient log from each base. No I/O.

A log is followed step by step along a history of timelines. It ends at the first step whose mark is
missing, belongs to a state of another shape, or lacks an update (I4). After a fork, only records of
the younger timeline count.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from everstep.commit import BaseId
from everstep.format import TimelineRecord
from everstep.format.log import RecordHead
from everstep.state.layout.entries import shape_of_all


@dataclass(frozen=True, slots=True)
class Chain:
    """A base, and the log steps that can be replayed on it.

    Attributes:
        base: base to start from.
        steps: ``(timeline, step)`` of each step to replay, in order.
        stopped: reason why the chain ends there.
        lost: newest step of the history that has a mark but cannot be reached because of a gap.
    """

    base: BaseId
    steps: tuple[tuple[int, int], ...]
    stopped: str
    lost: int | None = None

    @property
    def end(self) -> tuple[int, int]:
        """``(timeline, step)`` of the last state."""
        return self.steps[-1] if self.steps else (self.base.timeline, self.base.step)


class LogIndex:
    """Index of record heads.

    Attributes:
        marks: head of the mark, by timeline and step.
        updates: ``(timeline, LSN)`` of each update.
        of_step: LSNs of the updates of a step, by timeline and step.
    """

    def __init__(self, heads: Iterable[RecordHead]) -> None:
        self.marks: dict[tuple[int, int], RecordHead] = {}
        self.updates: set[tuple[int, int]] = set()
        self.of_step: dict[tuple[int, int], list[int]] = {}
        self._declared: dict[tuple[int, int], str] = {}
        for head in heads:
            if head.kind == "mark":
                self.marks[head.timeline, head.step] = head
            else:
                self.updates.add((head.timeline, head.lsn))
                self.of_step.setdefault((head.timeline, head.step), []).append(head.lsn)
                if head.declared:
                    self._declared[head.timeline, head.lsn] = head.declared

    def first_unregistered(
        self, chain: Chain, lsn: int, functions: Collection[str]
    ) -> tuple[int, str] | None:
        """Return the first step of a chain that needs a declared update without a registered
        function.

        Args:
            lsn: LSN of the base.
            functions: patterns that have a registered function.

        Returns:
            Index in the chain and the pattern; None if all functions are registered.
        """
        for place, (timeline, step) in enumerate(chain.steps):
            last = self.marks[timeline, step].lsn
            for number in range(lsn + 1, last + 1):
                pattern = self._declared.get((timeline, number))
                if pattern is not None and pattern not in functions:
                    return place, pattern
            lsn = last
        return None

    def follow(
        self, base: BaseId, lsn: int, shape: str | None, path: Sequence[tuple[int, int | None]]
    ) -> Chain:
        """Return the longest chain from a base.

        Args:
            lsn: LSN of the base.
            shape: shape digest of the base; None: take that of the first mark, to be compared
                later.
            path: a history, youngest timeline first (see :func:`path_of`).
        """
        steps: list[tuple[int, int]] = []
        timeline_of = _timelines_of(path)
        while True:
            step = base.step + len(steps) + 1
            timeline = timeline_of(step)
            if timeline is None:
                return Chain(base, tuple(steps), "the history ends there")
            mark = self.marks.get((timeline, step))
            shape = mark.shape if mark is not None and shape is None else shape
            why = self._break(step, timeline, mark, lsn, shape)
            if why or mark is None:
                later = [s for t, s in self.marks if s >= step and t == timeline_of(s)]
                return Chain(base, tuple(steps), why, max(later, default=None))
            lsn = mark.lsn
            steps.append((timeline, step))

    def _break(
        self, step: int, timeline: int, mark: RecordHead | None, lsn: int, shape: str | None
    ) -> str:
        """Return why a step cannot follow update ``lsn``; "" if it can."""
        if mark is None:
            return f"step {step} has no mark"
        if mark.shape != shape:
            return f"at step {step} the state has another composition"
        missing = [n for n in range(lsn + 1, mark.lsn + 1) if (timeline, n) not in self.updates]
        # A mark with a smaller number belongs to updates other than those in the state.
        if missing or mark.lsn < lsn:
            return f"update {missing[0] if missing else lsn} of step {step} is missing"
        return ""


def common_heads(logs: Sequence[Iterable[RecordHead]]) -> list[RecordHead]:
    """Return the record heads that the logs of all ranks of a timeline have in common.

    A common log continues as long as every rank's log does, with the same updates (I4). Its shape
    digest covers the states of all ranks.

    Args:
        logs: record heads of each rank.
    """
    if len(logs) == 1:
        return list(logs[0])
    by_key = [{(h.kind, h.timeline, h.step, h.lsn): h for h in log} for log in logs]
    found: list[RecordHead] = []
    for key, first in by_key[0].items() if by_key else ():
        heads = [heads[key] for heads in by_key if key in heads]
        if len(heads) == len(by_key):
            shape = shape_of_all([head.shape for head in heads])
            exact = all(h.exact for h in heads)
            declared = next((head.declared for head in heads if head.declared), "")
            found.append(replace(first, shape=shape, exact=exact, declared=declared))
    return found


def path_of(
    timeline: int, records: Mapping[int, TimelineRecord | None]
) -> list[tuple[int, int | None]]:
    """Return the history of a timeline, youngest first, with the last step that counts of each.

    The history ends at a record that cannot be read, since the fork point is unknown there.

    Args:
        timeline: timeline to begin with.
        records: timeline records by number.
    """
    path: list[tuple[int, int | None]] = [(timeline, None)]
    limit: int | None = None
    while (record := records.get(timeline)) is not None and record.parent is not None:
        # A forged record may name a younger parent. Stop, or the loop would never end.
        if record.parent >= timeline:
            break
        # A fork limits all older timelines, too: their later steps are not in this history.
        limit = record.fork_step if limit is None else min(limit, record.fork_step)
        timeline = record.parent
        path.append((timeline, limit))
    return path


def chains(
    bases: Mapping[BaseId, tuple[int, str | None]],
    index: LogIndex,
    path: Sequence[tuple[int, int | None]],
) -> list[Chain]:
    """Return one chain for each base of a history, sorted by reach, then by least replay.

    Args:
        bases: LSN and shape digest of each base.
    """
    found = []
    for base, (lsn, shape) in bases.items():
        if any(
            timeline == base.timeline and (limit is None or base.step <= limit)
            for timeline, limit in path
        ):
            found.append(index.follow(base, lsn, shape, path))
    found.sort(key=lambda chain: (chain.end, chain.base), reverse=True)
    return found


def _timelines_of(path: Sequence[tuple[int, int | None]]) -> Callable[[int], int | None]:
    """Return a function that maps a step to the timeline of a history that wrote it.

    The function is called for each step, and a run that was rewound often has a long history, hence
    the binary search.
    """
    oldest_first = [(timeline, math.inf if last is None else last) for timeline, last in path][::-1]
    # bisect needs ascending limits. A timeline that ends before an older one wrote no step of this
    # history.
    limits = list(accumulate((last for _, last in oldest_first), max))

    def timeline_of(step: int) -> int | None:
        at = bisect_left(limits, step)
        return oldest_first[at][0] if at < len(limits) else None

    return timeline_of
