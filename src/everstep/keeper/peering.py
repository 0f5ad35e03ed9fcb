"""Which node's memory holds whose copies, decided and said when a Checkpointer is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from everstep.commit.peers import nodes_of, peer_of
from everstep.errors import OptionError, OutOfSpaceError
from everstep.seams.machine import machine_name
from everstep.state.ranks import RankInfo
from everstep.tiers.options import PeerOptions

__all__ = ["node_to_say", "nodes_said", "peer_announcement", "peer_bytes", "refuse_lonely"]

_EMULATED = "emulated "


def node_to_say(peers: PeerOptions | None) -> str:
    """What this rank tells the others of its node; "" where it sends nothing to a peer."""
    if peers is None:
        return ""
    return machine_name() if peers.emulated_node is None else _EMULATED + peers.emulated_node


def nodes_said(found: Sequence[Mapping[str, Any]], rank: int) -> tuple[str, ...]:
    """By rank: what its node is called; empty where nobody sends anything to a peer.

    Raises:
        OptionError: some ranks do and others do not; or all ranks are on one node.
    """
    nodes = tuple(str(said["node"]) for said in found)
    if not any(nodes):
        return ()
    emulated = [node.startswith(_EMULATED) for node in nodes]
    if not all(nodes) or len(set(emulated)) > 1:
        raise OptionError(
            "the ranks do not say the same of peers",
            rank=rank,
            hint='tiers=["peer"] on every rank, or on none; and nodes emulated by all, or by none',
        )
    if len(set(nodes)) == 1:
        raise OptionError(
            f"all {len(nodes)} ranks are on one node: a copy of its memory in its own memory "
            "protects nothing",
            rank=rank,
            hint='leave "peer" out; tests emulate nodes: PeerOptions(emulated_node="a")',
        )
    return nodes


def refuse_lonely(peers: PeerOptions | None) -> None:
    """Of a process that trains alone.

    Raises:
        OptionError: it is to have a peer.
    """
    if peers is not None:
        raise OptionError(
            "a peer is the keeper of a rank on another node, and this process trains alone",
            hint='leave "peer" out, or train with several ranks on several nodes',
        )


def peer_bytes(peers: PeerOptions | None, info: RankInfo, host_bytes: int, state_bytes: int) -> int:
    """What copies of other ranks may take of the host memory here (DESIGN section 9: two states
    of one's own, and two of another rank).

    Args:
        host_bytes: for captured state, all in all.

    Raises:
        OutOfSpaceError: nothing would be left for a base of this rank, with the number.
    """
    if peers is None or not _sources(info):
        return 0
    found = host_bytes // 2 if peers.host_bytes is None else int(peers.host_bytes)
    if host_bytes - found < state_bytes:
        need = 2 * state_bytes if peers.host_bytes is None else found + state_bytes
        raise OutOfSpaceError(
            f"copies of other ranks may take {found} of {host_bytes} bytes of host memory, and a "
            f"base of this one takes {state_bytes}",
            rank=info.rank,
            hint=f"Budget(host_bytes={need}) or more, or a smaller PeerOptions(host_bytes=)",
        )
    return found


def peer_announcement(peers: PeerOptions, info: RankInfo, bound_bytes: int) -> str:
    """The line printed at start: who holds whose copies, and how much memory that takes."""
    emulated = all(node.startswith(_EMULATED) for node in info.nodes)
    peer = peer_of(info.nodes, info.rank)
    assert peer is not None
    sources = ", ".join(map(str, _sources(info))) or "no rank"
    pace = "in four fifths of the interval"
    if peers.bytes_per_s is not None:
        pace = f"at {decimal(round(peers.bytes_per_s))} a second at most"
    label = ", EMULATED on fewer machines" if emulated else ""
    return (
        f"bases of rank {info.rank} are sent to the memory of rank {peer}'s keeper, on the next "
        f"of {len(nodes_of(info.nodes))} nodes{label}, {pace}; up to {decimal(bound_bytes)} here "
        f"for copies of rank {sources}"
    )


def _sources(info: RankInfo) -> list[int]:
    return [rank for rank in range(len(info.nodes)) if peer_of(info.nodes, rank) == info.rank]
