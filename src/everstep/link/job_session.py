"""A rank's place in one start of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from everstep.commit.lineage import BaseId
from everstep.commit.peers import peer_of
from everstep.errors import KeeperError

__all__ = ["JobSession", "mailbox_error"]


@dataclass(frozen=True, slots=True)
class JobSession:
    """A rank's place in one start of a job.

    Attributes:
        session: names the start; no other has the same.
        disks: by rank: a name of the disk that it writes to.
        peers: by rank: where its keeper's mailbox is.
        recovered: what the timeline began with, if that is durable on all ranks.
        unread: not all of it was read from their disks: nobody knows whether what is there is good.
        spare: the same, if it is not.
        unreadable: bases that have a manifest, and that the ranks cannot read all of.
        again: another keeper has served this rank in this start, and is lost.
        lost: steps of the bases that were lost with it.
        nodes: by rank: what its node is called; empty where nobody sends copies to peers.
    """

    session: str
    rank: int
    disks: tuple[str, ...]
    peers: tuple[tuple[str, int], ...]
    recovered: BaseId | None = None
    spare: BaseId | None = None
    unreadable: tuple[BaseId, ...] = ()
    again: bool = False
    lost: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    unread: bool = False

    @property
    def peer(self) -> int | None:
        """The rank whose keeper holds copies of this one's bases; None: nobody's does."""
        return peer_of(self.nodes, self.rank) if self.nodes else None

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks whose copies this one's keeper holds."""
        return tuple(r for r in range(len(self.nodes)) if peer_of(self.nodes, r) == self.rank)

    def to_wire(self) -> dict[str, Any]:
        """As a message holds it."""
        return asdict(self)

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> JobSession:
        """The inverse of :meth:`to_wire`."""
        return cls(
            fields["session"],
            fields["rank"],
            tuple(fields["disks"]),
            tuple((host, port) for host, port in fields["peers"]),
            _base(fields["recovered"]),
            _base(fields["spare"]),
            tuple(BaseId(**base) for base in fields["unreadable"]),
            fields["again"],
            tuple(fields["lost"]),
            tuple(fields["nodes"]),
        )


def mailbox_error(host: str, port: int, error: OSError) -> KeeperError:
    """The error that no mailbox can be opened."""
    return KeeperError(
        f"no mailbox for the other ranks can be opened at {host}, port {port}: "
        f"{error.strerror or error}",
        hint="MASTER_ADDR has to be an address that this machine can reach",
    )


def _base(fields: Mapping[str, int] | None) -> BaseId | None:
    return None if fields is None else BaseId(**fields)
