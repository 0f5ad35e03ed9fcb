"""Copies of bases in the memory of another node, as state machines without I/O.

Each rank's keeper sends its files of a base to the keeper of the same local rank on the next node
in a ring of nodes (TierCheck, section 3.1). Rank 0 says which base: all ranks send the same one,
and the next begins when it is whole with all peers, or has failed (:class:`Rounds`). So there is
always one base that is whole everywhere, once there was one, and a peer lets go of it only when
a newer one is (section 3.4; I5, I10): :class:`Shelf`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from everstep.commit.job.messages import PeerRound
from everstep.commit.job.steps import Send
from everstep.commit.lineage import BaseId

__all__ = ["NEEDED_MAX", "Copy", "Rounds", "Shelf", "nodes_of", "peer_of"]

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


class Shelf:
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


class Rounds:
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
