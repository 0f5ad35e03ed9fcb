"""How far the log reaches from each base: decisions without I/O.

A log is followed step by step along a history of timelines. It ends at the first step whose
mark is missing, or is of a state of another shape, or with an update missing before it (I4);
and at a fork it goes on only with what the younger timeline has written.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from everstep.commit.lineage import BaseId
from everstep.format.log import RecordHead
from everstep.format.records import TimelineRecord
from everstep.state.layout.entries import shape_of_all

__all__ = ["Chain", "LogIndex", "chains", "common_heads", "path_of"]


@dataclass(frozen=True, slots=True)
class Chain:
    """What can be made of a base.

    Attributes:
        base: where it begins.
        steps: ``(timeline, step)`` of every step that the log adds, in order.
        stopped: why it goes no further, in words.
        lost: newest step of the history that has a mark and is not reached: between lies a hole.
    """

    base: BaseId
    steps: tuple[tuple[int, int], ...]
    stopped: str
    lost: int | None = None

    @property
    def end(self) -> tuple[int, int]:
        """``(timeline, step)`` of the newest state."""
        return self.steps[-1] if self.steps else (self.base.timeline, self.base.step)


class LogIndex:
    """Heads of all records, to be looked up.

    Attributes:
        marks: by timeline and step.
        updates: timeline and LSN of each.
        of_step: by timeline and step: LSNs of the updates of the step.
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

    def first_beyond(
        self, chain: Chain, lsn: int, functions: Collection[str]
    ) -> tuple[int, str] | None:
        """The first step of a chain that needs a declared update without a function here: its
        place in the chain, and the pattern.

        Args:
            lsn: of the base.
            functions: patterns for which there is one.
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
        """The longest chain from a base.

        Args:
            lsn: of the base.
        shape: of the base; None: whatever the first mark says, to be compared later.
            path: a history, youngest first (see :func:`path_of`).
        """
        steps: list[tuple[int, int]] = []
        timeline_of = _timelines_of(path)
        while True:
            step = base.step + len(steps) + 1
            timeline = timeline_of(step)
            if timeline is None:
                return Chain(base, tuple(steps), "the history ends")
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
        """Why a step cannot follow update ``lsn``; "" if it can."""
        if mark is None:
            return f"there is no record of step {step}"
        if mark.shape != shape:
            return f"at step {step} the state consists of something else"
        missing = [n for n in range(lsn + 1, mark.lsn + 1) if (timeline, n) not in self.updates]
        if missing or mark.lsn < lsn:
            return f"update {missing[0] if missing else lsn} of step {step} is missing"
        return ""


def common_heads(logs: Sequence[Iterable[RecordHead]]) -> list[RecordHead]:
    """What the logs of several ranks, of one timeline, have all: the heads of one log. It goes on
    where each of theirs does, with the same updates (I4); its shape is that of all of their states.

    Args:
        logs: by rank.
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
    """The history of a timeline as its records tell it, youngest first, with the last step of
    each that counts. It ends where a record cannot be read: what lies before has no known end.

    Args:
        records: of all timelines, by number.
    """
    path: list[tuple[int, int | None]] = [(timeline, None)]
    limit: int | None = None
    while (record := records.get(timeline)) is not None and record.parent is not None:
        if record.parent >= timeline:
            break
        limit = record.fork_step if limit is None else min(limit, record.fork_step)
        timeline = record.parent
        path.append((timeline, limit))
    return path


def chains(
    bases: Mapping[BaseId, tuple[int, str | None]],
    index: LogIndex,
    path: Sequence[tuple[int, int | None]],
) -> list[Chain]:
    """One chain for each base of a history, those that reach furthest first, then those that
    need least replay.

    Args:
        bases: LSN and shape of each.
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
    """What says which timeline of a history has written a step: the oldest that had not forked
    yet. It is asked for each step, and a run that went back often has a long history."""
    oldest_first = [(timeline, math.inf if last is None else last) for timeline, last in path][::-1]
    limits = list(accumulate((last for _, last in oldest_first), max))

    def timeline_of(step: int) -> int | None:
        at = bisect_left(limits, step)
        return oldest_first[at][0] if at < len(limits) else None

    return timeline_of
