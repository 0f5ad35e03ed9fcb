"""What the ranks of a job tell each other while one base is copied to another tier.

Rank 0 says which base, and every rank copies its own part; so all of them copy the same one,
however fast each is. What they say are hints: whether all markers are in the tier is looked
at there, before the manifest is created. No I/O here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from everstep.commit.lineage import BaseId

__all__ = ["CopyRound"]

_LISTENS_S = 5.0  # no tick for longer: whoever drives this was busy, and heard nobody


@dataclass(slots=True)
class CopyRound:
    """What rank 0 knows of one base that all ranks copy to one place.

    Args:
        ranks: that were asked; rank 0 is none of them.
        silent_s: a rank that says nothing for so long is not waited for.
        repeat_s: until what was not answered is asked again.

    Attributes:
        there: ranks that have said that their part is there.
        problems: why the part of a rank will not be there.
    """

    base: BaseId
    ranks: Collection[int]
    silent_s: float
    repeat_s: float = 1.0
    there: set[int] = field(default_factory=set)
    problems: dict[int, str] = field(default_factory=dict)
    _heard_s: dict[int, float] = field(default_factory=dict)
    _asked_s: float | None = None
    _now_s: float | None = None

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks that have not said how it went."""
        return tuple(r for r in self.ranks if r not in self.there and r not in self.problems)

    def told(self, rank: int, base: BaseId, problem: str) -> None:
        """A rank has said how it went with its part of ``base``."""
        self.alive(rank)
        if base != self.base or rank not in self.ranks:
            return
        if problem:
            self.problems[rank] = problem
        else:
            self.there.add(rank)

    def alive(self, rank: int) -> None:
        """A rank has said something."""
        if self._now_s is not None:
            self._heard_s[rank] = self._now_s

    def tick(self, now_s: float) -> tuple[int, ...]:
        """Some time has passed; which ranks are to be asked (again)."""
        if self._now_s is None:
            self._heard_s = dict.fromkeys(self.ranks, now_s)
        elif now_s - self._now_s > _LISTENS_S:
            away_s = now_s - self._now_s
            self._heard_s = {rank: s + away_s for rank, s in self._heard_s.items()}
        self._now_s = now_s
        if self._asked_s is not None and now_s - self._asked_s < self.repeat_s:
            return ()
        self._asked_s = now_s
        return self.waits_for

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that have said nothing for too long."""
        now_s = self._now_s
        if now_s is None:
            return ()
        return tuple(r for r in self.waits_for if now_s - self._heard_s[r] > self.silent_s)
