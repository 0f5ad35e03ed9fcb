"""Ranks of a job, and the disks they share."""

from __future__ import annotations

from dataclasses import dataclass

COORDINATOR = 0
"""The rank that sends requests and collects replies. Its decisions are functions of the replies."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks of a job and their disks.

    A folder shared by all ranks and disks local to each node are treated alike: of the ranks that
    see the same disk, the first leads. It writes the manifest there and deletes there.

    Attributes:
        disks: name of the disk that each rank writes to, by rank.
    """

    disks: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.disks, "a job has at least one rank"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.disks)

    def leader_of(self, rank: int) -> int:
        """Return the rank that leads on the disk of ``rank``."""
        # The first one: each rank computes the same leader without an exchange.
        return self.disks.index(self.disks[rank])

    @property
    def leaders(self) -> tuple[int, ...]:
        """Leading rank of each disk, in order."""
        return tuple(rank for rank in range(self.world) if self.leader_of(rank) == rank)

    def others(self, rank: int) -> tuple[int, ...]:
        """Return all ranks but ``rank``."""
        return tuple(other for other in range(self.world) if other != rank)
