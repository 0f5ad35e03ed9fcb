"""What each rank would have with ``every="auto"``, and what becomes of it for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HYSTERESIS", "TOLERANCE", "AgreedInterval", "IntervalProposal", "agree_on_interval"]

TOLERANCE = 0.25
"""The waste is flat around its minimum: what is so near stays as it is."""

HYSTERESIS = 0.1
"""Between what is refused and what is allowed again."""


@dataclass(frozen=True, slots=True)
class IntervalProposal:
    """What one process would have, by what it measures.

    Attributes:
        steps: from base to base.
        why: in words.
        least, most: bounds of it; None: there is none.
        full: what holds no more than ``most``.
    """

    steps: int
    why: str
    least: int
    most: int | None
    full: str


@dataclass(frozen=True, slots=True)
class AgreedInterval:
    """What comes next to the wish of the rank that wants the longest one, within the bounds of all.

    Attributes:
        steps, why: as of a wish.
        least, most, full: of all ranks; where the bounds contradict each other, ``most`` holds.
    """

    steps: int
    why: str
    least: int
    most: int | None
    full: str

    def stays(self, held: int | None) -> bool:
        """Whether what there was is as good."""
        if held is None or held == self.steps:
            return held is not None
        within = held >= self.least and (self.most is None or held <= self.most)
        return within and abs(held - self.steps) <= TOLERANCE * held


def agree_on_interval(wishes: Sequence[IntervalProposal]) -> AgreedInterval:
    """The interval of all ranks: of each, what it wishes."""
    rank = max(range(len(wishes)), key=lambda rank: wishes[rank].steps)
    steps = wishes[rank].steps
    why = wishes[rank].why
    least = max(wish.least for wish in wishes)
    bounds = [(wish.most, wish.full) for wish in wishes if wish.most is not None]
    most, full = min(bounds) if bounds else (None, "")
    if len(wishes) > 1:
        why = f"as rank {rank} measures, {why}"
    if steps < least:
        steps = round(least * (1 + HYSTERESIS))
        why = "the write budget allows no more"
    if most is not None and steps > most:
        steps = most
        why = f"{full} holds no more"
    return AgreedInterval(steps, why, least, most, full)
