"""Decides which node's memory holds whose copies, and describes it at the start.

Bases (and logs) of a rank are sent to the keeper of the same local rank on the next node. Nodes are
machines, unless the options emulate them on fewer machines for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from everstep.commit.peer_copies import nodes_of, peer_of
from everstep.errors import OptionError
from everstep.seams.machine import machine_name
from everstep.state.ranks.rank_info import RankInfo
from everstep.tiers.options import PeerOptions
from everstep.trainer.budget.host_memory import peer_sources

_EMULATED = "emulated "


def node_name(peers: PeerOptions | None) -> str:
    """Return the name of this rank's node; "" if it sends nothing to a peer."""
    if peers is None:
        return ""
    return machine_name() if peers.emulated_node is None else _EMULATED + peers.emulated_node


def node_names(
    found: Sequence[Mapping[str, Any]], rank: int, *, if_there: bool = False
) -> tuple[str, ...]:
    """Return the node of each rank; an empty tuple if nothing is sent to peers.

    Args:
        found: message of each rank.
        rank: this rank.
        if_there: True to send nothing if there is a single node, instead of raising an error.

    Raises:
        OptionError: Only some ranks have peers, or all ranks are on one node.
    """
    nodes = tuple(str(message["node"]) for message in found)
    if not any(nodes):
        return ()
    emulated = [node.startswith(_EMULATED) for node in nodes]
    if not all(nodes) or len(set(emulated)) > 1:
        raise OptionError(
            "only some ranks send copies to peers, or only some emulate nodes",
            rank=rank,
            hint='use tiers=["peer"] on every rank or on none, and emulate nodes on all or on none',
        )
    if len(set(nodes)) == 1 and if_there:
        return ()
    if len(set(nodes)) == 1:
        raise OptionError(
            f"all {len(nodes)} ranks are on one node: a copy of its memory in its own memory "
            "protects nothing",
            rank=rank,
            hint='leave "peer" out; tests emulate nodes: PeerOptions(emulated_node="a")',
        )
    return nodes


def refuse_single_base_with_peer(peers: PeerOptions | None, info: RankInfo, keep: int) -> None:
    """Refuse ``keep=1`` for bases on disk with a peer.

    A node may be lost while its newest base is being sent to its peer. That base exists nowhere
    else then, and the other ranks would have deleted the previous one.

    Raises:
        OptionError: ``keep`` is 1.
    """
    if peers is not None and len(set(info.nodes)) > 1 and keep < 2:  # the same on all ranks
        raise OptionError(
            "keep=1 with a peer: if a node is lost before its peer has the newest base, no base is "
            "left that all ranks can read",
            hint="keep=2, or more",
        )


def refuse_peer_without_ranks(peers: PeerOptions | None) -> None:
    """Refuse peers for a process that trains alone.

    Raises:
        OptionError: A peer is required.
    """
    if peers is not None and not peers.if_there:
        raise OptionError(
            "a peer is the keeper of a rank on another node, and this process trains alone",
            hint='leave "peer" out, or train with several ranks on several nodes',
        )


def peer_notice(info: RankInfo, bound_bytes: int, log_bytes: int | None = None) -> str:
    """Return the line about copies in the memory of other nodes.

    Args:
        bound_bytes: memory here for copies of other ranks.
        log_bytes: share of it for their logs; None if no logs are sent.
    """
    emulated = all(node.startswith(_EMULATED) for node in info.nodes)
    peer = peer_of(info.nodes, info.rank)
    assert peer is not None
    sources = ", ".join(map(str, peer_sources(info))) or "no rank"
    label = ", EMULATED on fewer machines" if emulated else ""
    data = "bases"
    of_which = ""
    if log_bytes is not None:
        data = "bases and log"
        of_which = f" ({decimal(log_bytes)} of it for their logs)"
    return (
        f"{data} of rank {info.rank} are sent to the memory of rank {peer}'s keeper, on the next "
        f"of {len(nodes_of(info.nodes))} nodes{label}; up to {decimal(bound_bytes)} here "
        f"for copies of rank {sources}{of_which}"
    )


def memory_notice(info: RankInfo, disk_every: int, bound_bytes: int) -> str:
    """Return the line about bases that live in memory, and the failures that they survive."""
    survives = "survives a killed trainer, NOT a lost node: no other node holds a copy"
    if info.nodes:
        peer = peer_of(info.nodes, info.rank)
        survives = f"survives the loss of this node in the memory of rank {peer}'s keeper"
    ordinal = "each base" if disk_every == 1 else f"one base of {disk_every}"
    return (
        f"bases live in the memory of keepers, the newest two, up to {decimal(bound_bytes)} here "
        f"for rank {info.rank}; {ordinal} goes to disk; the memory of this keeper "
        f"{survives}"
    )
