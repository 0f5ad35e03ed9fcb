"""Opens the run folders of all ranks of a job as the same run, before anything is written.

Ranks may share a folder or have one each. All of them exchange the run's id, their places for
copies, nodes and options, and compare them: every rank must have been given the same. Then each
rank creates the record of the run in its folder.

Decides which node's memory holds whose copies, and describes it at the start.

Bases (and logs) of a rank are sent to the keeper of the same local rank on the next node. Nodes are
machines, unless the options emulate them on fewer machines for tests.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from rich.filesize import decimal

from everstep.commit.job import COORDINATOR
from everstep.commit.peer_copies import nodes_of, peer_of
from everstep.errors import (
    EverstepError,
    ForeignDirectoryError,
    OptionError,
    RecoveryError,
    StateError,
)
from everstep.format.names import RUN_RECORD, TEMPORARY_SUFFIX
from everstep.format.records import RunRecord
from everstep.restore.fetch import Copies
from everstep.restore.fetch.node_reads import NodeStart
from everstep.run import scan_run
from everstep.seams import Clock, Seams
from everstep.seams.machine import (
    is_local_device,
    launcher,
    machine_name,
    namespaces,
    resolve_path,
)
from everstep.state.ranks import RankInfo
from everstep.tiers import PeerOptions, Tier, TierOptions, remove_if_there, storage_errors
from everstep.tiers.durable_files import create_exclusive, ensure_dirs
from everstep.trainer.budget import peer_sources

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


Exchange = Callable[[str, dict[str, Any]], list[dict[str, Any]]]
"""Collective call: send a message for a purpose, and receive those of all ranks."""


@dataclass(slots=True)
class SharedRun:
    """Run folders of a job.

    Attributes:
        run_id: id of the run.
        disks: name of the disk of each rank; ranks with the same name share a folder.
        memories: name of the shared memory of each rank; the same for ranks of a node.
        nodes: node of each rank; empty if nothing is sent to peers.
        hosts: host name of each rank.
        copies: places for copies.
        fetches: True if bases may be in the memory of other ranks' keepers.
    """

    run_id: str = ""
    disks: tuple[str, ...] = ()
    memories: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    copies: Copies | None = field(default=None)
    fetches: bool = False

    @property
    def has_several_disks(self) -> bool:
        """True if not all ranks share one folder."""
        return len(set(self.disks)) > 1

    def ranks_with_disk_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share a folder with ``rank``."""
        return tuple(r for r, disk in enumerate(self.disks) if disk == self.disks[rank])

    def ranks_with_memory_of(self, rank: int) -> list[int]:
        """Return the ranks that share memory with ``rank``."""
        return [r for r, memory in enumerate(self.memories) if memory == self.memories[rank]]

    def node_start(self, run: PurePath, rank: int, clock: Clock, timeout_s: float) -> NodeStart:
        """Return the ranks of this node at a start; see :class:`.NodeStart`."""
        pairs = zip(self.memories, self.disks, strict=True)
        seen_from = {memory for memory, disk in pairs if disk == self.disks[rank]}
        # A folder that ranks of several nodes see is on a network's disk.
        local = len(seen_from) == 1 and is_local_device(run)
        return NodeStart(rank, self.memories, clock, local=local, timeout_s=timeout_s)


def open_places(tiers: Sequence[TierOptions], seams: Seams, run: PurePath) -> list[Tier]:
    """Open all places for copies, and check that they can be reached.

    Raises:
        OptionError, UnavailableError: A place is invalid, or is inside of another one.
        StorageError: A place cannot be reached.
    """
    # As written and with links followed: either way one place may lie inside another.
    _refuse_overlap([run, *(PurePath(one.where) for one in tiers)])
    _refuse_overlap([_followed(run), *(_followed(PurePath(one.where)) for one in tiers)])
    places = [one.open(seams.filesystem, seams.clock) for one in tiers]
    for one, place in zip(tiers, places, strict=True):
        if one.opens and place.url != one.where:
            raise OptionError(
                f"{one.opens} was made from {one.where!r}, and its url is {place.url!r}",
                hint="the keeper process opens the tier again by its class and URL",
            )
        place.check()
    return places


def _followed(place: PurePath) -> PurePath:
    """Return the target of a path through links; a URL is returned unchanged."""
    return place if any(":" in name for name in place.parts[:1]) else resolve_path(place)


def _refuse_overlap(places: list[PurePath]) -> None:
    """Refuse places inside of each other: cleaning up one would delete files of the other."""
    for number, one in enumerate(places):
        for other in places[:number]:
            if one == other or one in other.parents or other in one.parents:
                raise OptionError(
                    f"{one} and {other} overlap: each copy needs a separate place",
                    path=one,
                )


def refuse_other_options(found: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Refuse different options: ranks would take different bases, and wait for each other.

    Args:
        found: message of each rank, with its ``"options"``.
        rank: this rank.

    Raises:
        OptionError: Naming the option, its values, and the ranks.
    """
    for name in dict.fromkeys(name for message in found for name in message["options"]):
        ranks: dict[str, list[int]] = {}
        for other, message in enumerate(found):
            ranks.setdefault(message["options"].get(name, "none"), []).append(other)
        if len(ranks) > 1:
            listed = "; ".join(
                f"rank(s) {' '.join(map(str, each))}: {value}" for value, each in ranks.items()
            )
            raise OptionError(
                f"the ranks were given different values of {name} ({listed})",
                rank=rank,
                hint=f"give every rank the same {name.partition('.')[0]}",
            )


def same_run(found: Sequence[Mapping[str, Any]], rank: int) -> str:
    """Return the run that the folders of all ranks belong to.

    Raises:
        RecoveryError: They belong to different runs.
    """
    runs = {
        message["run"]: other for other, message in enumerate(found) if message["run"] is not None
    }
    if len(runs) > 1:
        where = ", ".join(f"rank {other}: run {run}" for run, other in sorted(runs.items()))
        raise RecoveryError(
            f"the ranks see different runs ({where})",
            rank=rank,
            hint="give every rank the same run folder, or remove those of other runs",
        )
    return str(next(iter(runs), found[0]["name"]))


def same_as_copies(run: str | None, copied: str | None, path: PurePath) -> str | None:
    """Return the run that a folder and its places for copies belong to; None for no run yet.

    Raises:
        ForeignDirectoryError: They belong to different runs.
    """
    if None not in (run, copied) and run != copied:
        raise ForeignDirectoryError(
            f"the places for copies contain another run than {path}",
            path=path,
            hint="give each run its own place for copies",
        )
    return run if run is not None else copied


def refuse_errors(found: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Refuse to continue if a rank cannot open its run folder.

    Raises:
        StateError: Naming the rank and its error.
    """
    for other, message in enumerate(found):
        if message["error"] is not None:
            raise StateError(
                f"rank {other} cannot open its run folder: {message['error']}",
                rank=rank,
                hint="see the output of that rank",
            )


def refuse_other_calls(found: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Refuse ranks that start in different ways.

    Raises:
        StateError: Naming the calls.
    """
    if len({message["what"] for message in found}) > 1:
        calls = "; ".join(f"rank {other}: {message['what']}" for other, message in enumerate(found))
        raise StateError(
            f"the ranks make different calls ({calls})",
            rank=rank,
            hint="call resume() with the same step on every rank, or on none",
        )


def open_shared_run(
    exchange: Exchange,
    rank: int,
    world: int,
    seams: Seams,
    run: PurePath,
    tiers: Sequence[TierOptions] = (),
    peers: PeerOptions | None = None,
    options: Mapping[str, str] | None = None,
) -> SharedRun:
    """Make the folder of each rank a run, the same one on all ranks.

    Args:
        exchange: collective call of all ranks.
        tiers: places for copies. A new folder becomes one of the run whose copies they contain.
        peers: options for the memory of other nodes.
        options: options that must be the same on all ranks.

    Raises:
        ForeignDirectoryError, StorageError: A folder or place cannot be used.
        OptionError: A place is invalid or not the same for all ranks, or options differ.
        RecoveryError: The folders belong to different runs.
        DeadlineError: Not all ranks arrive in time.
    """
    mine: dict[str, Any] = {
        "name": uuid.uuid4().hex,
        "run": None,
        "error": None,
        "host": platform.node(),
        "tiers": [tier.where for tier in tiers],
        "node": node_name(peers),
        "options": dict(options or {}),
    }
    # Equal on two ranks if each can reach the other's keeper. Two launchers on one machine
    # (torchrun's GROUP_RANK) are two nodes.
    mine["memory"] = f"{machine_name()} {namespaces()} {launcher()} {mine['node']}"
    failed: EverstepError | None = None
    copies = None
    try:
        copies = Copies(open_places(tiers, seams, run), run)
        with storage_errors("open the run folder", run, rank=rank):
            ensure_dirs(seams.filesystem, run)
            mine["run"] = scan_run(seams.filesystem, run).run
        mine["run"] = same_as_copies(mine["run"], copies.run_id(), run)
    except EverstepError as error:
        # Raised after the exchange: the other ranks wait for this message.
        failed = error
        mine["error"] = error.message
    found = exchange("make a Checkpointer", mine)
    if failed is not None:
        raise failed
    assert copies is not None
    refuse_errors(found, rank)
    refuse_other_options(found, rank)
    nodes = node_names(found, rank, if_there=peers is not None and peers.if_there)
    run_id = same_run(found, rank)
    _open_copies(exchange, rank, copies, found, run_id)
    with storage_errors("open the run folder", run, rank=rank):
        disks = _find_disks(exchange, rank, world, seams, run, found[0]["name"])
        unique = f"{mine['name'][:8]}-{rank}"
        # Exclusive: ranks that share a folder create the same record at the same time.
        create_exclusive(seams.filesystem, run / RUN_RECORD, RunRecord(run_id).encode(), unique)
    return SharedRun(
        run_id=run_id,
        disks=disks,
        memories=tuple(str(message["memory"]) for message in found),
        nodes=nodes,
        hosts=tuple(str(message["host"]) for message in found),
        copies=copies,
        fetches=any(message["node"] for message in found),
    )


def _open_copies(
    exchange: Exchange, rank: int, copies: Copies, found: Sequence[dict[str, Any]], run_id: str
) -> None:
    """Let rank 0 claim the places for the run, and all other ranks check that they see it.

    Raises:
        OptionError: The ranks have different places, or a rank cannot use them.
    """
    named = [message["tiers"] for message in found]
    if any(places != named[0] for places in named):
        raise OptionError(
            "the ranks have different places for copies: "
            + "; ".join(f"rank {rank}: {places}" for rank, places in enumerate(named)),
            rank=rank,
            hint="give every rank the same tiers=",
        )
    if not copies.places:
        return
    failed = None
    problem = ""
    # Rank 0 in the first round, the others in the second: they look for what it has written.
    for first in (True, False):
        try:
            if first == (rank == COORDINATOR) and failed is None:
                problem = _open_mine(rank, copies, run_id)
        except EverstepError as error:
            failed = error
            problem = error.message
        # In both rounds, even after an error: the other ranks wait for this message.
        results = exchange("open the places for copies", {"problem": problem})
    if failed is not None:
        raise failed
    for other, result in enumerate(results):
        if result["problem"]:
            raise OptionError(
                f"rank {other} cannot use the places for copies: {result['problem']}",
                rank=rank,
                hint="tiers= must name places that every rank sees: a store, or a directory "
                "of a network file system",
            )


def _open_mine(rank: int, copies: Copies, run_id: str) -> str:
    """Claim the places (rank 0), or return a description of one that is another place here."""
    if rank == COORDINATOR:
        copies.publish(run_id)
    elif unseen := copies.unseen(run_id):
        return f"{unseen} is not the place that rank {COORDINATOR} sees under that name"
    return ""


def _find_disks(
    exchange: Exchange, rank: int, world: int, seams: Seams, run: PurePath, name: str
) -> tuple[str, ...]:
    """Find out which ranks share a folder: each creates a file and looks for those of others.

    Returns:
        The name of each rank's disk.
    """
    filesystem = seams.filesystem
    purpose = "look at the run folder"
    mine = run / _probe(name, rank)
    filesystem.create(mine).close()
    try:
        exchange(purpose, {})  # a barrier: all files exist after it
        names = {entry.name for entry in filesystem.scan(run)}
        seen = [other for other in range(world) if _probe(name, other) in names]
        # A barrier, too: after it every rank has looked, and the file may be removed.
        found = exchange(purpose, {"seen": min(seen, default=rank)})
    finally:
        remove_if_there(filesystem, mine)
    return tuple(str(message["seen"]) for message in found)


def _probe(name: str, rank: int) -> str:
    # The name is of this start, so a file left by a killed one is not mistaken for a rank.
    return f"run.{name}-{rank:05d}{TEMPORARY_SUFFIX}"
