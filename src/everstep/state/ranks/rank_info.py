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
        near: the ranks that write to the same disk as this one, itself included; what all ranks
            have in common is written once to each disk. None: all of them do.
        here: how many ranks share the memory of this machine, itself included.
        nodes: by rank: what its node is called; empty where no rank sends its bases to a peer.
        followed: what this rank writes in a base its keeper can compute by its log alone, or by the
            gradients that it copies: all are split alike (``docs/design/multistep.md``,
            ``docs/design/log.md``).
        logged: there is a gradient log: what its marks hold each rank restores of its own, so each
            writes it.
    """

    rank: int = 0
    world: int = 1
    near: tuple[int, ...] | None = None
    here: int = 1
    nodes: tuple[str, ...] = ()
    followed: bool = False
    logged: bool = False


ONE_RANK = RankInfo()
"""A process that trains alone."""
