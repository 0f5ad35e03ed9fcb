"""This process's place in a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of a job.

    Attributes:
        rank: from 0.
        world: number of ranks that train together; 1: a job of one rank.
        near: ranks that write to the same disk as this one, this rank included; replicated state is
            written once to each disk. None: all ranks.
        here: number of ranks that share the memory of this machine, this rank included.
        nodes: node names by rank; empty if no rank sends its bases to a peer.
        followed: a keeper can compute this rank's entries of a base from its log, or from the
            gradients that it copies; all ranks divide bases and logs in the same way
            (``docs/design/multistep.md``,
            ``docs/design/log.md``).
        logged: there is a gradient log. Each rank restores the contents of marks from its own log,
            so each writes them.
    """

    rank: int = 0
    world: int = 1
    near: tuple[int, ...] | None = None
    here: int = 1
    nodes: tuple[str, ...] = ()
    followed: bool = False
    logged: bool = False


ONE_RANK = RankInfo()
"""Job of one rank."""
