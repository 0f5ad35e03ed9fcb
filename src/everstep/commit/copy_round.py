"""State of rank 0 while all ranks copy one base to another tier.

Rank 0 chooses the base and every rank copies its own files, so all ranks copy the same base however
fast each of them is. The replies are hints only: before it creates the manifest, rank 0 checks in
the tier itself that every marker is there. No I/O here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from everstep.commit.lineage import BaseId

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
