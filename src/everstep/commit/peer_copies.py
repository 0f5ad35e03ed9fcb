"""Copies of bases and logs in the memory of another node, as state machines without I/O.

Each rank's keeper sends its files of a base to the keeper of the same local rank on the next node
in a ring of nodes (TierCheck, section 3.1). Rank 0 chooses the base (:class:`CopyRounds`): all
ranks send the same one, and the next round begins when it is complete with all peers, or has
failed. So once there was a base that is complete with all peers, there always is one, and a peer
drops it only when a newer one is complete (section 3.4; I5, I10): :class:`HeldCopies`.

After its bases each rank sends the steps of its log, a few complete steps at a time
(:class:`.LogRun` describes them), to the keeper that holds its bases. They are dropped when a newer
base is complete with all peers, and not before: a lost node is restored from its newest base here
and the steps after it (I4, I5, I10): :class:`HeldLogCopies`.

State of rank 0 while all ranks copy one base to another tier (:class:`CopyRound`): it chooses the
base and every rank copies its own files, so all ranks copy the same base however fast each of them
is. The replies are hints only: before it creates the manifest, rank 0 checks in the tier itself
that every marker is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from everstep.commit.job import Send
from everstep.commit.job.messages import PeerRound
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogRun, runs_of
from everstep.errors import FormatError
from everstep.format.log import RecordHead

# A longer gap between two ticks means that the driver itself was blocked and received nothing.
_TICK_GAP_S = 5.0


@dataclass(slots=True)
class CopyRound:
    """Replies of the ranks that copy one base to one place.

    Args:
        ranks: ranks that were sent a request; rank 0 is not among them.
        silent_s: seconds without a message after which rank 0 no longer waits for a rank.
        repeat_s: seconds between repetitions of an unanswered request.

    Attributes:
        there: ranks that have reported that their files are in place.
        problems: error message by rank, for ranks whose copy failed.
    """

    base: BaseId
    ranks: Collection[int]
    silent_s: float
    repeat_s: float = 1.0
    there: set[int] = field(default_factory=set)
    problems: dict[int, str] = field(default_factory=dict)
    _last_message_s: dict[int, float] = field(default_factory=dict)
    _requested_s: float | None = None
    _now_s: float | None = None

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks that have not reported success or failure."""
        return tuple(r for r in self.ranks if r not in self.there and r not in self.problems)

    def on_reply(self, rank: int, base: BaseId, problem: str) -> None:
        """Record the result of ``rank`` for ``base``; an empty ``problem`` means success."""
        self.on_message(rank)
        # A late reply about an earlier base is proof of life, and nothing more.
        if base != self.base or rank not in self.ranks:
            return
        if problem:
            self.problems[rank] = problem
        else:
            self.there.add(rank)

    def on_message(self, rank: int) -> None:
        """Record that ``rank`` has sent a message of any kind."""
        # Before the first tick there is no time; that tick starts the wait for all ranks.
        if self._now_s is not None:
            self._last_message_s[rank] = self._now_s

    def tick(self, now_s: float) -> tuple[int, ...]:
        """Advance the clock and return the ranks to which the request must be sent now."""
        if self._now_s is None:
            self._last_message_s = dict.fromkeys(self.ranks, now_s)
        elif now_s - self._now_s > _TICK_GAP_S:
            # Messages were not read during the gap, so it must not count as silence of the ranks.
            gap_s = now_s - self._now_s
            self._last_message_s = {rank: s + gap_s for rank, s in self._last_message_s.items()}
        self._now_s = now_s
        if self._requested_s is not None and now_s - self._requested_s < self.repeat_s:
            return ()
        self._requested_s = now_s
        return self.waits_for

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that have sent no message for longer than ``silent_s``."""
        now_s = self._now_s
        if now_s is None:
            return ()
        silent_s = self.silent_s
        return tuple(r for r in self.waits_for if now_s - self._last_message_s[r] > silent_s)


NEEDED_MAX = 3
"""Number of bases that disks keep because peers hold files of them."""


def nodes_of(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, nodes in the order of their first ranks.

    Args:
        names: node name by rank.
    """
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def peer_of(names: Sequence[str], rank: int) -> int | None:
    """Return the rank whose keeper holds the copies of ``rank``; None if there is only one node.

    It is the rank of the same position on the next node in the ring. If that node has fewer ranks,
    its ranks take turns.

    Args:
        names: node name by rank.
    """
    nodes = nodes_of(names)
    if len(nodes) < 2:
        return None
    mine = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    following = nodes[(mine + 1) % len(nodes)]
    return following[nodes[mine].index(rank) % len(following)]


@dataclass(slots=True)
class Copy:
    """One rank's files of a base, held for that rank.

    Attributes:
        whole: all bytes are there and match their digests.
        left: training has since continued from an older base.
    """

    source: int
    base: BaseId
    size_bytes: int
    whole: bool = False
    left: bool = False


class HeldCopies:
    """Copies of bases that one peer holds.

    Args:
        bound_bytes: limit for all copies together, including those being received.

    Attributes:
        everywhere: newest base known to be complete with all peers.
    """

    def __init__(self, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self.everywhere: BaseId | None = None
        self._copies: dict[tuple[int, BaseId], Copy] = {}

    @property
    def copies(self) -> list[Copy]:
        """All copies, ordered by rank and base."""
        return [copy for _, copy in sorted(self._copies.items())]

    @property
    def used_bytes(self) -> int:
        """Memory of all copies, in bytes."""
        return sum(copy.size_bytes for copy in self._copies.values())

    def find(self, source: int, base: BaseId) -> Copy | None:
        """Return the copy of a rank's files of a base, or None."""
        return self._copies.get((source, base))

    def begin(self, source: int, base: BaseId, size_bytes: int) -> tuple[list[Copy], str]:
        """Make space for a rank's files of a base.

        Returns:
            Copies that were dropped for it, and the reason for refusing it; "" if it is accepted.
        """
        mine = [copy for copy in self._copies.values() if copy.source == source]
        guarded = self._guarded(mine)
        if guarded is not None and not guarded.left and base <= guarded.base:
            return [], f"a newer copy is already held, of step {guarded.base.step}"
        # At most two copies per rank: the guarded one and the one that is received.
        gone = [copy for copy in mine if copy is not guarded]
        left_bytes = self.used_bytes - sum(copy.size_bytes for copy in gone)
        if left_bytes + size_bytes > self.bound_bytes:
            return [], (
                f"it needs {size_bytes} bytes in addition to {left_bytes} that must stay, and the "
                f"limit for copies of other ranks is {self.bound_bytes}"
            )
        # Not before it is certain to fit: a refusal must not cost copies that are held.
        self._remove(gone)
        self._copies[source, base] = Copy(source, base, size_bytes)
        return gone, ""

    def finished(self, source: int, base: BaseId) -> None:
        """Record that a copy is complete and its digests match its marker."""
        self._copies[source, base].whole = True

    def drop(self, source: int, base: BaseId) -> None:
        """Drop a copy that is damaged or will never be complete."""
        self._copies.pop((source, base), None)

    def passed(self, everywhere: BaseId) -> list[Copy]:
        """Drop copies older than a base that is complete with all peers.

        Returns:
            Copies that were dropped.
        """
        if self.everywhere is not None and everywhere <= self.everywhere:
            return []
        self.everywhere = everywhere
        # Without a copy of that base, an older complete one stays: it may be the only one left.
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
        """Adapt to a new start of the job.

        Args:
            sources: ranks that send their files here from now on.
            recovered: base that training continues from, if it is durable. Copies of files of ranks
                that send elsewhere are not needed then.
            spare: base that training continues from, if it is not durable; it was found complete
            with
                all peers.

        Returns:
            Copies that were dropped: incomplete ones, and those of ranks that now send elsewhere.
        """
        if spare is not None:
            self.everywhere = spare
        if recovered is not None:
            # Training went back to `recovered`: newer bases are on an abandoned branch.
            for copy in self._copies.values():
                copy.left = copy.base > recovered
            # Otherwise _guarded() would prefer a copy of the abandoned branch to one of the base
            # that training continues from.
            if self.everywhere is not None and self.everywhere > recovered:
                self.everywhere = None
        gone = [
            copy
            for copy in self._copies.values()
            if not copy.whole or (recovered is not None and copy.source not in sources)
        ]
        return self._remove(gone)

    def _guarded(self, mine: Sequence[Copy]) -> Copy | None:
        """Return the copy of a rank that must stay until a newer one is complete with all peers."""
        whole = sorted((copy for copy in mine if copy.whole), key=lambda copy: copy.base)
        safe = [copy for copy in whole if self._is(copy, self.everywhere)]
        # Complete with all peers; else of the branch that training continues; else any.
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
    """Rank 0's choice of the base that all ranks send to their peers.

    Args:
        repeat_s: seconds between repetitions of an unanswered message.
        late_s: seconds without any message from a rank after which a round ends.

    Attributes:
        base: base that is being sent; None between rounds.
        everywhere: newest base that is complete with all peers.
        passed_over: number of bases that became durable during a round and were overtaken by a
            newer one before it ended.
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
        self._last_reply_s = self._sent_s = 0.0

    def needed(self, held: Collection[BaseId] = ()) -> list[BaseId]:
        """Return bases of which a peer has, or will have, a lost node's files; disks must keep the
        rest.

        May be called from any thread. At most :data:`NEEDED_MAX` bases.

        Args:
            held: bases that this rank holds completely for others. Before the first base of this
                start is complete with all peers, one of an earlier start may be.
        """
        # Read in this order: another thread may move `_next` to `base` in between, and a base must
        # not be missing from both.
        following = self._next
        under_way = self.base
        whole = [self.everywhere] if self.everywhere is not None else sorted(held, reverse=True)
        found = [base for base in (under_way, *whole, following) if base is not None]
        return list(dict.fromkeys(found))[:NEEDED_MAX]

    def durable(self, base: BaseId, now_s: float) -> list[Send]:
        """Record that a base is durable on all ranks, and begin a round if none is running."""
        if self._next is not None and self._next < base:
            self.passed_over += 1
        self._next = base if self._next is None else max(self._next, base)
        return self._begin(now_s)

    def on_reply(self, rank: int, base: BaseId, state: str, now_s: float) -> list[Send]:
        """Record a rank's state of ``base``: ``"whole"``, ``"failed"``, ``"noted"``, or in
        progress."""
        if state == "noted":
            # A late acknowledgement must not count for a message of the next round.
            if base == self.everywhere and self.base is None:
                self._unanswered.discard(rank)
            return []
        if base != self.base:
            return []  # about an earlier round
        self._last_reply_s = now_s
        self._unanswered.discard(rank)
        # Without the copy of one rank the base cannot become complete with all peers.
        if state == "failed":
            return self._over(now_s)
        if state == "whole":
            self._whole.add(rank)
        if len(self._whole) < self._world:
            return []
        self.everywhere = self.base
        return self._over(now_s)

    def tick(self, now_s: float) -> list[Send]:
        """Repeat unanswered messages, and end a round that takes too long."""
        if self.base is not None and now_s - self._last_reply_s > self._late_s:
            return self._over(now_s)
        if not self._unanswered or now_s - self._sent_s < self._repeat_s:
            return []
        return self._tell(sorted(self._unanswered), now_s)

    def _begin(self, now_s: float) -> list[Send]:
        if self.base is not None or self._next is None:
            return []
        self.base = self._next
        self._next = None
        self._whole = set()
        self._last_reply_s = now_s
        return self._tell_all(now_s)

    def _over(self, now_s: float) -> list[Send]:
        self.base = None
        # The message that begins a round also carries `everywhere`, so the end needs none then.
        return self._begin(now_s) or self._tell_all(now_s)

    def _tell_all(self, now_s: float) -> list[Send]:
        self._unanswered = set(range(self._world))
        return self._tell(range(self._world), now_s)

    def _tell(self, ranks: Collection[int], now_s: float) -> list[Send]:
        self._sent_s = now_s
        return [Send(rank, PeerRound(self.base, self.everywhere)) for rank in ranks]


@dataclass(frozen=True, slots=True)
class LogCopy:
    """Steps of one rank's log, held for that rank.

    Attributes:
        record: digest of the record of their timeline. The number alone does not identify a
            timeline (I7).
        size_bytes: memory of the copy.
    """

    source: int
    record: str
    run: LogRun
    size_bytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Key of the copy among all that one peer holds."""
        return self.source, self.run.timeline, self.run.first


class HeldLogCopies:
    """Copies of log steps that one peer holds.

    Args:
        bound_bytes: limit for all copies together, including those being received.
    """

    def __init__(self, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self._copies: dict[tuple[int, int, int], LogCopy] = {}

    @property
    def copies(self) -> list[LogCopy]:
        """All copies, ordered by rank and age."""
        return [copy for _, copy in sorted(self._copies.items())]

    @property
    def used_bytes(self) -> int:
        """Memory of all copies, in bytes."""
        return sum(copy.size_bytes for copy in self._copies.values())

    def drop_other_timeline(self, source: int, timeline: int, record: str) -> list[LogCopy]:
        """Drop and return steps of another timeline that has the same number.

        Two starts that could not see each other may both have opened it; the later one sends.
        """
        gone = [
            copy
            for copy in self._copies.values()
            if (copy.source, copy.run.timeline) == (source, timeline) and copy.record != record
        ]
        return self._remove(gone)

    def fits(self, size_bytes: int) -> bool:
        """Return True if ``size_bytes`` more fit within the limit."""
        return self.used_bytes + size_bytes <= self.bound_bytes

    def holds(self, source: int, run: LogRun) -> bool:
        """Return True if at least one of these steps is held already."""
        return any(
            (copy.source, copy.run.timeline) == (source, run.timeline)
            and copy.run.first <= run.last
            and run.first <= copy.run.last
            for copy in self._copies.values()
        )

    def take(self, copy: LogCopy) -> None:
        """Store complete steps that match their digests."""
        assert self.fits(copy.size_bytes)
        assert not self.holds(copy.source, copy.run)
        self._copies[copy.key] = copy

    def passed(
        self, everywhere: BaseId, there: Collection[int], sources: Collection[int]
    ) -> list[LogCopy]:
        """Drop steps up to a base that is complete with all peers.

        Args:
            there: ranks whose files of that base are held here. For another rank that sends here,
            this
                peer has an older base only, and needs the steps after that base.
            sources: ranks that send here.

        Returns:
            Steps that were dropped.
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
    """Return the steps of consecutive records, each step complete (I3, I4).

    Raises:
        FormatError: the records are not consecutive complete steps of one state.
    """
    if not heads or heads[-1].kind != "mark":
        raise FormatError("the copied steps of a log do not end with a step mark")
    lsns: list[int] = []
    first = heads[0]
    after = lsn = first.lsn - 1 if first.kind == "update" else first.lsn
    marks = [head for head in heads if head.kind == "mark"]
    for head in heads:
        # An update has the next number; a mark repeats that of the last update.
        wanted = lsn + (head.kind == "update")
        step = marks[0].step + len(lsns)
        if (head.timeline, head.lsn, head.step) != (first.timeline, wanted, step):
            raise FormatError(f"{head} does not continue the record before it")
        lsn = head.lsn
        if head.kind == "mark":
            if head.shape != marks[0].shape:
                raise FormatError(f"{head} has another state shape than the records before it")
            lsns.append(lsn)
    return LogRun(first.timeline, marks[0].step, after, tuple(lsns), marks[0].shape)


def merge_runs(runs: Iterable[LogRun], lent: Iterable[LogRun]) -> tuple[LogRun, ...]:
    """Merge the runs of a log with runs from elsewhere.

    Args:
        lent: runs of the same rank and timelines; where both have a step, ``runs`` takes
            precedence.
    """
    marks: dict[tuple[int, int], RecordHead] = {}
    updates: set[tuple[int, int]] = set()
    for run in [*runs, *lent]:
        # A run has no hole: it has every update up to its last mark.
        updates |= {(run.timeline, lsn) for lsn in range(run.after + 1, run.lsns[-1] + 1)}
        for step, lsn in enumerate(run.lsns, run.first):
            head = RecordHead("mark", run.timeline, step, lsn, run.shape)
            marks.setdefault((run.timeline, step), head)
    return runs_of(marks, updates)
