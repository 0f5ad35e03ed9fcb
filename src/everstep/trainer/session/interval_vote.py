"""Choose one base interval from the ranks' proposals (``every="auto"``).

Each rank measures its own costs and proposes an interval. All ranks must take bases at the same
steps, so each of them computes the same interval from all proposals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HYSTERESIS", "TOLERANCE", "IntervalProposal", "agree_on_interval"]

TOLERANCE = 0.25
"""Relative difference up to which the current interval is kept.

The waste is flat around its minimum, so a change of the interval would gain almost nothing.
"""

HYSTERESIS = 0.1
"""Relative margin between a limit that is exceeded and the value that is allowed again."""


@dataclass(frozen=True, slots=True)
class IntervalProposal:
    """Base interval that one rank proposes according to its measurements, or that all agree on.

    Attributes:
        steps: number of steps between two bases.
        why: reason, for the message.
        least: minimum number of steps that the write budget allows.
        most: maximum number of steps that the log has space for; None if there is no limit.
        full: name of the space that limits ``most``.
    """

    steps: int
    why: str
    least: int
    most: int | None
    full: str

    def keeps(self, current: int | None) -> bool:
        """Return True if the ``current`` interval is within the limits and close enough."""
        if current is None or current == self.steps:
            return current is not None
        within = current >= self.least and (self.most is None or current <= self.most)
        return within and abs(current - self.steps) <= TOLERANCE * current


def agree_on_interval(proposals: Sequence[IntervalProposal]) -> IntervalProposal:
    """Return the interval for all ranks.

    It is the longest proposed interval, moved into the limits of all ranks. If the limits
    contradict each other, ``most`` wins: without a base, steps would be lost.

    Args:
        proposals: one for each rank, in the order of ranks.
    """
    rank = max(range(len(proposals)), key=lambda rank: proposals[rank].steps)
    steps = proposals[rank].steps
    why = proposals[rank].why
    least = max(proposal.least for proposal in proposals)
    limits = [(proposal.most, proposal.full) for proposal in proposals if proposal.most is not None]
    most, full = min(limits) if limits else (None, "")
    if len(proposals) > 1:
        why = f"according to rank {rank}, {why}"
    if steps < least:
        steps = round(least * (1 + HYSTERESIS))
        why = "the write budget allows no shorter interval"
    if most is not None and steps > most:
        steps = most
        why = f"{full} has space for no more"
    return IntervalProposal(steps, why, least, most, full)
