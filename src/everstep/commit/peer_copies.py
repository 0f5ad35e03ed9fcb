"""Copies of bases in the memory of another node, as state machines without I/O.

Each rank's keeper sends its files of a base to the keeper of the same local rank on the next node
in a ring of nodes (TierCheck, section 3.1). Rank 0 says which base: all ranks send the same one,
and the next begins when it is whole with all peers, or has failed (:class:`CopyRounds`). So there
is always one base that is whole everywhere, once there was one, and a peer lets go of it only when
a newer one is (section 3.4; I5, I10): :class:`HeldCopies`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from everstep.commit.job.actions import Send
from everstep.commit.job.messages import PeerRound
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogRun, runs_of
from everstep.errors import FormatError
from everstep.format.log import RecordHead

__all__ = [
    "NEEDED_MAX",
    "Copy",
    "CopyRounds",
    "HeldCopies",
    "HeldLogCopies",
    "LogCopy",
    "merged",
    "nodes_of",
    "peer_of",
    "run_of",
]

NEEDED_MAX = 3
"""Bases that disks keep because peers have parts of them."""


def nodes_of(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, nodes in the order of their first ranks.

    Args:
        names: by rank: what the node is called.
    """
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def peer_of(names: Sequence[str], rank: int) -> int | None:
    """The rank whose keeper holds the copies of ``rank``: of the same place on the next node in the
    ring; where that has fewer ranks, they take turns. None: there is one node only.

    Args:
        names: by rank: what the node is called.
    """
    nodes = nodes_of(names)
    if len(nodes) < 2:
        return None
    mine = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    following = nodes[(mine + 1) % len(nodes)]
    return following[nodes[mine].index(rank) % len(following)]


@dataclass(slots=True)
class Copy:
    """One rank's files of a base, held for it.

    Attributes:
        whole: all of it is there, with its digests.
        left: training has gone on from an older base since.
    """

    source: int
    base: BaseId
    size_bytes: int
    whole: bool = False
    left: bool = False


class HeldCopies:
    """Which copies one peer holds, and which it lets go.

    Args:
        bound_bytes: of all copies together, those that are on their way included.

    Attributes:
        everywhere: the newest base known to be whole with all peers.
    """

    def __init__(self, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self.everywhere: BaseId | None = None
        self._copies: dict[tuple[int, BaseId], Copy] = {}

    @property
    def copies(self) -> list[Copy]:
        """All that is held, by rank and age."""
        return [copy for _, copy in sorted(self._copies.items())]

    @property
    def used_bytes(self) -> int:
        """Memory of all of them."""
        return sum(copy.size_bytes for copy in self._copies.values())

    def find(self, source: int, base: BaseId) -> Copy | None:
        """The copy of a rank's files of a base."""
        return self._copies.get((source, base))

    def begin(self, source: int, base: BaseId, size_bytes: int) -> tuple[list[Copy], str]:
        """A rank wants to send its files of a base.

        Returns:
            Copies that make room for it, and are gone; and why there is no room, or "".
        """
        mine = [copy for copy in self._copies.values() if copy.source == source]
        guarded = self._guarded(mine)
        if guarded is not None and not guarded.left and base <= guarded.base:
            return [], f"a newer one is held already, of step {guarded.base.step}"
        gone = [copy for copy in mine if copy is not guarded]
        left_bytes = self.used_bytes - sum(copy.size_bytes for copy in gone)
        if left_bytes + size_bytes > self.bound_bytes:
            return [], (
                f"it takes {size_bytes} bytes, beside {left_bytes} that have to stay, and the "
                f"bound for copies of other ranks is {self.bound_bytes}"
            )
        self._remove(gone)
        self._copies[source, base] = Copy(source, base, size_bytes)
        return gone, ""

    def finished(self, source: int, base: BaseId) -> None:
        """All of a copy is there, and its digests are those of its marker."""
        self._copies[source, base].whole = True

    def drop(self, source: int, base: BaseId) -> None:
        """A copy is damaged, or will never be whole."""
        self._copies.pop((source, base), None)

    def passed(self, everywhere: BaseId) -> list[Copy]:
        """A base is whole with all peers: older ones are not needed any more.

        Returns:
            Copies that are gone.
        """
        if self.everywhere is not None and everywhere <= self.everywhere:
            return []
        self.everywhere = everywhere
        # Where this peer has no copy of it, what there is stays: something is better than nothing.
        there = {copy.source for copy in self._copies.values() if self._is(copy, everywhere)}
        gone = [
            copy
            for copy in self._copies.values()
            if (copy.left or copy.base < everywhere) and (copy.source in there or not copy.whole)
        ]
        return self._remove(gone)

    def new_start(
        self, sources: Collection[int], recovered: BaseId | None, spare: BaseId | None = None
    ) -> list[Copy]:
        """The job was started anew.

        Args:
            sources: ranks that send their files here from now on.
            recovered: what training goes on from, if that is durable: copies of other ranks'
                files are not needed then.
            spare: the same, if it is not durable: what was found whole everywhere.

        Returns:
            Copies that are gone: halves, and those of ranks that send them elsewhere now.
        """
        if spare is not None:
            self.everywhere = spare
        if recovered is not None:  # all that is newer is of what training has gone back from
            for copy in self._copies.values():
                copy.left = copy.base > recovered
            if self.everywhere is not None and self.everywhere > recovered:
                self.everywhere = None
        gone = [
            copy
            for copy in self._copies.values()
            if not copy.whole or (recovered is not None and copy.source not in sources)
        ]
        return self._remove(gone)

    def _guarded(self, mine: Sequence[Copy]) -> Copy | None:
        """The copy of a rank that has to stay until a newer one is whole everywhere."""
        whole = sorted((copy for copy in mine if copy.whole), key=lambda copy: copy.base)
        safe = [copy for copy in whole if self._is(copy, self.everywhere)]
        best = safe or [copy for copy in whole if not copy.left] or whole
        return best[-1] if best else None

    @staticmethod
    def _is(copy: Copy, base: BaseId | None) -> bool:
        return copy.whole and copy.base == base

    def _remove(self, gone: list[Copy]) -> list[Copy]:
        for copy in gone:
            del self._copies[copy.source, copy.base]
        return gone


class CopyRounds:
    """Rank 0's part: which base all ranks send to their peers.

    Args:
        repeat_s: what nobody has answered is said again after so long.
        late_s: a rank that says nothing for so long ends a round.

    Attributes:
        base: that is being sent; None between rounds.
        everywhere: the newest one that is whole with all peers.
        passed_over: bases that became durable while an older one was still being sent, and that
            a newer one has overtaken.
    """

    def __init__(self, world: int, *, repeat_s: float = 2.0, late_s: float = 120.0) -> None:
        self._world = world
        self._repeat_s = repeat_s
        self._late_s = late_s
        self.base: BaseId | None = None
        self.everywhere: BaseId | None = None
        self.passed_over = 0
        self._next: BaseId | None = None
        self._whole: set[int] = set()
        self._unanswered: set[int] = set()
        self._heard_s = self._said_s = 0.0

    def needed(self, held: Collection[BaseId] = ()) -> list[BaseId]:
        """Bases of which a lost node's part is with its peer, or will be: the others need theirs.
        To be called in any thread; :data:`NEEDED_MAX` at most.

        Args:
            held: what this rank holds whole for others: before the first base of this start is
                whole with all peers, one of an earlier start may be.
        """
        following = self._next  # in this order: one becomes the other
        under_way = self.base
        whole = [self.everywhere] if self.everywhere is not None else sorted(held, reverse=True)
        found = [base for base in (under_way, *whole, following) if base is not None]
        return list(dict.fromkeys(found))[:NEEDED_MAX]

    def durable(self, base: BaseId, now_s: float) -> list[Send]:
        """A base is durable on all ranks."""
        if self._next is not None and self._next < base:
            self.passed_over += 1
        self._next = base if self._next is None else max(self._next, base)
        return self._begin(now_s)

    def said(self, rank: int, base: BaseId, state: str, now_s: float) -> list[Send]:
        """What has become of a rank's part of ``base``."""
        if state == "noted":
            if base == self.everywhere and self.base is None:
                self._unanswered.discard(rank)
            return []
        if base != self.base:
            return []
        self._heard_s = now_s
        self._unanswered.discard(rank)
        if state == "failed":
            return self._over(now_s)
        if state == "whole":
            self._whole.add(rank)
        if len(self._whole) < self._world:
            return []
        self.everywhere = self.base
        return self._over(now_s)

    def tick(self, now_s: float) -> list[Send]:
        """Some time has passed: repeats what nobody has answered."""
        if self.base is not None and now_s - self._heard_s > self._late_s:
            return self._over(now_s)
        if not self._unanswered or now_s - self._said_s < self._repeat_s:
            return []
        return self._tell(sorted(self._unanswered), now_s)

    def _begin(self, now_s: float) -> list[Send]:
        if self.base is not None or self._next is None:
            return []
        self.base = self._next
        self._next = None
        self._whole = set()
        self._heard_s = now_s
        return self._tell_all(now_s)

    def _over(self, now_s: float) -> list[Send]:
        self.base = None
        return self._begin(now_s) or self._tell_all(now_s)

    def _tell_all(self, now_s: float) -> list[Send]:
        self._unanswered = set(range(self._world))
        return self._tell(range(self._world), now_s)

    def _tell(self, ranks: Collection[int], now_s: float) -> list[Send]:
        self._said_s = now_s
        return [Send(rank, PeerRound(self.base, self.everywhere)) for rank in ranks]


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


class HeldLogCopies:
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

    def drop_other_timeline(self, source: int, timeline: int, record: str) -> list[LogCopy]:
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
