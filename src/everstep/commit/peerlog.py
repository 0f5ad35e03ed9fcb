"""Copies of other ranks' logs in the memory of a peer, as a state machine without I/O.

Behind its bases each rank sends the steps of its log, a few whole ones at a time (:class:`.LogRun`
says which), to the keeper that holds its bases. They are let go when a newer base is whole with
all peers, and not before: what comes back of a lost node is its newest base here and the steps
behind it (I4, I5, I10).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from everstep.commit.lineage import BaseId
from everstep.commit.logs import LogRun, runs_of
from everstep.errors import FormatError
from everstep.format.log import RecordHead

__all__ = ["LogCopy", "LogShelf", "merged", "run_of"]


@dataclass(frozen=True, slots=True)
class LogCopy:
    """Steps of one rank's log, held for it.

    Attributes:
        record: digest of the record of their timeline: its number alone does not say which (I7).
        size_bytes: of the memory that they take.
    """

    source: int
    record: str
    run: LogRun
    size_bytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Names it among all that one peer holds."""
        return self.source, self.run.timeline, self.run.first


class LogShelf:
    """Which steps one peer holds, and which it lets go.

    Args:
        bound_bytes: of all of them, those that are on their way included.
    """

    def __init__(self, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self._copies: dict[tuple[int, int, int], LogCopy] = {}

    @property
    def copies(self) -> list[LogCopy]:
        """All that is held, by rank and age."""
        return [copy for _, copy in sorted(self._copies.items())]

    @property
    def used_bytes(self) -> int:
        """Memory of all of them."""
        return sum(copy.size_bytes for copy in self._copies.values())

    def strangers(self, source: int, timeline: int, record: str) -> list[LogCopy]:
        """Lets go of steps of another timeline that has the same number: two starts that saw
        nothing of each other may both have opened it, and the later one sends."""
        gone = [
            copy
            for copy in self._copies.values()
            if (copy.source, copy.run.timeline) == (source, timeline) and copy.record != record
        ]
        return self._remove(gone)

    def fits(self, size_bytes: int) -> bool:
        """Whether so many bytes have room beside what is held."""
        return self.used_bytes + size_bytes <= self.bound_bytes

    def holds(self, source: int, run: LogRun) -> bool:
        """Whether one of these steps is held already."""
        return any(
            (copy.source, copy.run.timeline) == (source, run.timeline)
            and copy.run.first <= run.last
            and run.first <= copy.run.last
            for copy in self._copies.values()
        )

    def take(self, copy: LogCopy) -> None:
        """Whole steps have arrived, with their digests."""
        assert self.fits(copy.size_bytes)
        assert not self.holds(copy.source, copy.run)
        self._copies[copy.key] = copy

    def passed(
        self, everywhere: BaseId, there: Collection[int], sources: Collection[int]
    ) -> list[LogCopy]:
        """A base is whole with all peers: steps up to it are not needed any more.

        Args:
            there: ranks whose part of it is held here. Of another one that sends here, and of whom
                this peer has an older base only, the steps behind that one are all there is.
            sources: ranks that send here.

        Returns:
            Steps that are gone.
        """
        gone = [
            copy
            for copy in self._copies.values()
            if BaseId(copy.run.timeline, copy.run.last) <= everywhere
            and (copy.source in there or copy.source not in sources)
        ]
        return self._remove(gone)

    def _remove(self, gone: list[LogCopy]) -> list[LogCopy]:
        for copy in gone:
            del self._copies[copy.key]
        return gone


def run_of(heads: Sequence[RecordHead]) -> LogRun:
    """The steps that these records are, in order, each whole and without a hole (I3, I4).

    Raises:
        FormatError: they are anything else.
    """
    if not heads or heads[-1].kind != "mark":
        raise FormatError("steps of a log end with a mark, these do not")
    lsns: list[int] = []
    first = heads[0]
    after = lsn = first.lsn - 1 if first.kind == "update" else first.lsn
    marks = [head for head in heads if head.kind == "mark"]
    for head in heads:
        wanted = lsn + (head.kind == "update")
        step = marks[0].step + len(lsns)
        if (head.timeline, head.lsn, head.step) != (first.timeline, wanted, step):
            raise FormatError(f"{head} does not follow the record before it")
        lsn = head.lsn
        if head.kind == "mark":
            if head.shape != marks[0].shape:
                raise FormatError(f"{head} is of a state of another shape")
            lsns.append(lsn)
    return LogRun(first.timeline, marks[0].step, after, tuple(lsns), marks[0].shape)


def merged(runs: Iterable[LogRun], lent: Iterable[LogRun]) -> tuple[LogRun, ...]:
    """The runs of a log to which others are added.

    Args:
        lent: of the same rank and timelines; where both have a step, that of ``runs`` counts.
    """
    marks: dict[tuple[int, int], RecordHead] = {}
    updates: set[tuple[int, int]] = set()
    for run in [*runs, *lent]:
        updates |= {(run.timeline, lsn) for lsn in range(run.after + 1, run.lsns[-1] + 1)}
        for step, lsn in enumerate(run.lsns, run.first):
            head = RecordHead("mark", run.timeline, step, lsn, run.shape)
            marks.setdefault((run.timeline, step), head)
    return runs_of(marks, updates)
