"""Which ranks there are, and which of them see the same disk."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COORDINATOR", "Cluster"]

COORDINATOR = 0
"""The rank that asks, collects and tells; whatever it decides, others can decide without it."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ranks of a job, and their disks.

    A folder that all ranks share and disks of the nodes' own are the same thing seen from
    here: of the ranks that see the same disk, the first leads: it writes the manifest there and
    deletes there.

    Attributes:
        disks: by rank: a name of the disk that it writes to.
    """

    disks: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.disks, "a job has at least one rank"

    @property
    def world(self) -> int:
        return len(self.disks)

    def leader_of(self, rank: int) -> int:
        """The rank that leads on the disk of ``rank``."""
        return self.disks.index(self.disks[rank])

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank for each disk, in order."""
        return tuple(rank for rank in range(self.world) if self.leader_of(rank) == rank)

    def others(self, rank: int) -> tuple[int, ...]:
        """All ranks but ``rank``."""
        return tuple(other for other in range(self.world) if other != rank)
