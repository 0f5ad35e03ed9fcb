"""Which node's memory holds whose copies, decided and said when a Checkpointer is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from everstep.commit.peers import nodes_of, peer_of
from everstep.errors import OptionError
from everstep.seams.machine import machine_name
from everstep.state.ranks.ranks import RankInfo
from everstep.tiers.options import PeerOptions
from everstep.trainer.budget.host_memory import peer_sources

__all__ = [
    "memory_notice",
    "node_name",
    "node_names",
    "peer_notice",
    "refuse_peer_without_ranks",
    "refuse_single_base_with_peer",
]

_EMULATED = "emulated "


def node_name(peers: PeerOptions | None) -> str:
    """What this rank tells the others of its node; "" where it sends nothing to a peer."""
    if peers is None:
        return ""
    return machine_name() if peers.emulated_node is None else _EMULATED + peers.emulated_node


def node_names(
    found: Sequence[Mapping[str, Any]], rank: int, *, if_there: bool = False
) -> tuple[str, ...]:
    """By rank: what its node is called; empty where nobody sends anything to a peer.

    Args:
        if_there: one node is no error; nothing is sent then.

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
    """Of bases that are on disks, and of which ``keep`` are kept.

    Raises:
        OptionError: nothing might be left. A node that is lost while the newest base is on its
            way to its peer has it nowhere else, and what its peer has whole, the others would
            have deleted.
    """
    if peers is not None and len(set(info.nodes)) > 1 and keep < 2:  # all ranks, or none
        raise OptionError(
            "keep=1 with a peer: a node that is lost before its peer has the newest base leaves no "
            "base that all ranks can read",
            hint="keep=2, or more",
        )


def refuse_peer_without_ranks(peers: PeerOptions | None) -> None:
    """Of a process that trains alone.

    Raises:
        OptionError: it is to have a peer.
    """
    if peers is not None and not peers.if_there:
        raise OptionError(
            "a peer is the keeper of a rank on another node, and this process trains alone",
            hint='leave "peer" out, or train with several ranks on several nodes',
        )


def peer_notice(
    peers: PeerOptions,
    info: RankInfo,
    bound_bytes: int,
    log_bytes: int | None = None,
    *,
    at_once: bool = False,
) -> str:
    """The line printed at start: who holds whose copies, and how much memory that takes.

    Args:
        log_bytes: of ``bound_bytes``, for logs; None: there are none.
        at_once: bases live in memory only, and are sent as fast as it goes.
    """
    emulated = all(node.startswith(_EMULATED) for node in info.nodes)
    peer = peer_of(info.nodes, info.rank)
    assert peer is not None
    sources = ", ".join(map(str, peer_sources(info))) or "no rank"
    pace = "as fast as the link goes" if at_once else "in four fifths of the interval"
    if peers.bytes_per_s is not None:
        pace = f"at {decimal(round(peers.bytes_per_s))} a second at most"
    label = ", EMULATED on fewer machines" if emulated else ""
    what = "bases"
    of_which = ""
    if log_bytes:
        what = "bases and log"
        of_which = f" ({decimal(log_bytes)} of it for their logs)"
    elif log_bytes is not None:
        of_which = ", with no room for their logs"
    return (
        f"{what} of rank {info.rank} are sent to the memory of rank {peer}'s keeper, on the next "
        f"of {len(nodes_of(info.nodes))} nodes{label}, {pace}; up to {decimal(bound_bytes)} here "
        f"for copies of rank {sources}{of_which}"
    )


def memory_notice(info: RankInfo, disk_every: int, bound_bytes: int) -> str:
    """The line printed at start where bases live in memory: what that survives."""
    survives = "survives a killed trainer, NOT a lost node: no other node holds a copy"
    if info.nodes:
        peer = peer_of(info.nodes, info.rank)
        survives = f"survives the loss of this node in that of rank {peer}'s"
    ordinal = "each base" if disk_every == 1 else f"one base of {disk_every}"
    return (
        f"bases live in the memory of keepers, the newest two, up to {decimal(bound_bytes)} here "
        f"for those of rank {info.rank}; {ordinal} goes to disk; what is in this keeper's memory "
        f"{survives}"
    )
