"""What bases over several steps have cost and done."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["MultistepBase", "MultistepReport", "MultistepStats", "Watch"]

_BASES_MAX = 64
_COSTS = 8  # bases that say what a part of one costs


@dataclass(frozen=True, slots=True)
class MultistepBase:
    """One base.

    Attributes:
        step: that it holds.
        parts: into which it was cut.
        begin_s: of training, to begin copies.
        state_wait_s: that updates waited for parts of the state.
        gradients_wait_s: that training waited for copies of gradients.
        state_bytes, gradient_bytes: that were copied.
        whole_s: from its beginning to its last step mark.
    """

    step: int
    parts: int
    begin_s: float
    state_wait_s: float
    gradients_wait_s: float
    state_bytes: int
    gradient_bytes: int
    whole_s: float

    @property
    def stall_s(self) -> float:
        """That training lost."""
        return self.begin_s + self.state_wait_s + self.gradients_wait_s


@dataclass(frozen=True, slots=True)
class MultistepReport:
    """All of them so far.

    Attributes:
        windows: that were begun.
        abandoned: that had to be given up; a new one was begun.
        deferred: bases that were due while one was under way, and were begun behind it.
        parts: of the last one.
        link_bytes_per_s: as measured; None before the first copy.
        part_s: that a part takes the training thread itself, copies aside, as measured; None before
            the second base in as many parts (``--part-ms`` of ``everstep plan multistep``).
        bases: the last ones.
    """

    windows: int
    abandoned: int
    deferred: int
    parts: int | None
    link_bytes_per_s: float | None
    part_s: float | None
    bases: tuple[MultistepBase, ...]


@dataclass(slots=True, eq=False)
class Watch:
    """One base under way.

    Attributes:
        stall_s: what training had lost when it began, by cause.
        begin_s: when it began, on the monotonic clock.
    """

    parts: int
    stall_s: Mapping[str, float]
    begin_s: float
    state_bytes: int = 0
    gradient_bytes: int = 0
    step: int = 0
    whole_s: float = 0.0


@dataclass(slots=True, eq=False)
class MultistepStats:
    """Counts.

    Attributes:
        closing: a base whose last copies may still hold the next update up.
    """

    windows: int = 0
    abandoned: int = 0
    deferred: int = 0
    parts: int | None = None
    link_bytes_per_s: float | None = None
    bases: deque[MultistepBase] = field(default_factory=lambda: deque(maxlen=_BASES_MAX))
    closing: Watch | None = None

    @property
    def part_s(self) -> float | None:
        """Seconds that a part takes the training thread itself; None as long as that is not known.
        In the middle of the last bases, so that what one of them had to wait for a busy machine
        counts no more than its share; and never the first in so many parts: whatever is cut anew is
        planned anew, once."""
        seen: set[int] = set()
        costs = []
        for base in self.bases:
            if base.parts in seen:
                costs.append(base.begin_s / base.parts)
            seen.add(base.parts)
        return statistics.median_low(costs[-_COSTS:]) if costs else None

    def finishing(self, watch: Watch, step: int, now_s: float) -> None:
        """The last part of a base of ``step`` is being copied."""
        watch.step = step
        watch.whole_s = now_s - watch.begin_s
        self.closing = watch

    def close(self, stall_s: Mapping[str, float]) -> None:
        """The step behind it is over, too: nothing waits for it any more."""
        watch = self.closing
        self.closing = None
        if watch is None:
            return
        lost = {cause: stall_s[cause] - watch.stall_s[cause] for cause in stall_s}
        self.bases.append(
            MultistepBase(
                watch.step,
                watch.parts,
                lost["capture"],
                lost["gate"],
                lost["gradients"],
                watch.state_bytes,
                watch.gradient_bytes,
                watch.whole_s,
            )
        )

    def report(self) -> MultistepReport:
        """As it is now."""
        return MultistepReport(
            self.windows,
            self.abandoned,
            self.deferred,
            self.parts,
            self.link_bytes_per_s,
            self.part_s,
            tuple(self.bases),
        )
