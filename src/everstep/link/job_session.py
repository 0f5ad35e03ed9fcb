"""One rank's place in one start (session) of a job of several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep.commit.lineage import BaseId
from everstep.commit.peer_copies import peer_of
from everstep.errors import KeeperError


@dataclass(frozen=True, slots=True)
class JobSession:
    """One rank's place in one start of a job.

    Attributes:
        session: unique name of the start.
        rank: this rank.
        disks: by rank, name of the disk that it writes to.
        peers: by rank, address of its keeper's mailbox.
        recovered: base that the timeline started from, if durable on all ranks.
        spare: the same base, if it is not durable on all ranks.
        unreadable: bases with a manifest that the ranks cannot read completely.
        again: True if this keeper replaces one that was lost during this start.
        lost: steps of the bases that were lost with that keeper.
        nodes: by rank, name of its node; empty if no rank sends copies to peers.
        unread: True if the base was not completely read from disks, so that its copies there are
            unverified.
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
        """Rank whose keeper holds copies of this rank's bases; None without one."""
        return peer_of(self.nodes, self.rank) if self.nodes else None

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks whose copies this rank's keeper holds."""
        return tuple(r for r in range(len(self.nodes)) if peer_of(self.nodes, r) == self.rank)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields for a message."""
        # Bases are structs of msgspec, which asdict() leaves as they are.
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> JobSession:
        """Decode the fields of :meth:`to_wire`."""
        # msgpack returns lists: restore the tuples.
        return cls(
            fields["session"],
            fields["rank"],
            tuple(fields["disks"]),
            tuple((host, port) for host, port in fields["peers"]),
            _base(fields["recovered"]),
            _base(fields["spare"]),
            tuple(BaseId(*base) for base in fields["unreadable"]),
            fields["again"],
            tuple(fields["lost"]),
            tuple(fields["nodes"]),
            fields["unread"],
        )


def mailbox_error(host: str, port: int, error: OSError) -> KeeperError:
    """Return the error for a mailbox that cannot be opened."""
    return KeeperError(
        f"the mailbox for the other ranks cannot be opened at {host}, port {port}: "
        f"{error.strerror or error}",
        hint="MASTER_ADDR must be an address that this machine can reach",
    )


def _base(fields: Sequence[int] | None) -> BaseId | None:
    return None if fields is None else BaseId(*fields)
