"""Which rank of a job this process is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ONE_RANK", "RankInfo"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of a job.

    Attributes:
        rank: from 0.
        world: number of ranks that train together; 1: nobody else does.
    """

    rank: int = 0
    world: int = 1


ONE_RANK = RankInfo()
"""A process that trains alone."""
