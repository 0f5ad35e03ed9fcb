"""Read a base into host memory, without the program that trained it.

``load_offline`` reads a base of one rank, ``load_job`` a base of several. The parts of a multi-step
base (``docs/design/multistep.md``) are brought to the step of the base: the files of each rank by
themselves, on the CPU, as its keeper would have done. A rank's files hold the parameters that it
writes, their state and the gradients of these, so neither the present number of ranks nor their
layout matters. The files of one rank at a time are in host memory, besides the restored state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch

from everstep.errors import (
    FormatError,
    RecoveryError,
    ReplayError,
    UnavailableError,
    UnsupportedStateError,
)
from everstep.format.header import ShardHeader
from everstep.format.reader import read_body
from everstep.format.records import TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.load.load import contents, rank_contents
from everstep.restore.load.pieces import Fill, PieceReads, fills_by_file
from everstep.restore.load.saved_ranks import Piece, SavedRanks, View
from everstep.restore.offline.complete import complete_offline_base
from everstep.restore.offline.job_state import JobState, TensorKey, UnreplayedRank, tensor_key
from everstep.restore.offline.state import OfflineState
from everstep.restore.redo.conditions import replay_conditions
from everstep.restore.redo.owned import owned_entries, parameter_names
from everstep.restore.redo.zero_objects import is_partitioned, merged_object
from everstep.run.open_base import OpenBase, open_ranks
from everstep.run.scan import BaseFound
from everstep.run.shape import shape_of_base
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes.processes import available_cores
from everstep.seams.progress import ProgressSink, silent
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.layout.placement import Box, Placement, box_on_mesh
from everstep.state.layout.shards import Placed, overlaps
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import PARTITIONED
from everstep.state.values.objects import decode
from everstep.state.values.tensors import empty_like_entry, host_bytes

__all__ = [
    "CompletedFiles",
    "complete_rank_files",
    "load_job",
    "load_offline",
    "read_multistep",
]


def load_offline(
    filesystem: FileSystem,
    base: BaseFound,
    run: str | None,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink = silent,
    threads: int = 1,
    training_threads: int | None = None,
    trained: TimelineRecord | None = None,
    wanted: Callable[[str], bool] | None = None,
) -> OfflineState:
    """Read a base of one rank into host memory, every byte verified; complete a multi-step base.

    Args:
        filesystem: file system of the run.
        base: base to read.
        run: id of the run that it must belong to.
        ring: buffers for reading.
        timeout_s: a read that takes longer counts as hung.
        progress: notified of bytes read.
        threads, training_threads: see :class:`OfflineState`.
        trained: record of its timeline, which names the conditions of training.
        wanted: predicate on names that selects tensors; nothing can be replayed on the others.
            None:
            all tensors, as for multi-step bases in any case.

    Raises:
        DamageError, FormatError: the files are damaged or invalid.
        ReplayError, UnsupportedStateError: a multi-step base cannot be completed.
        RecoveryError: it was saved by several ranks.
        UnavailableError: there is not enough memory.
        OSError: it cannot be read.
    """
    if base.manifest is None:
        raise FormatError(f"{base.id} is {base.status}: {base.problem}", path=base.path)
    marker = base.manifest.markers[0]
    if marker.run != run:
        raise FormatError(f"{base.path} belongs to another run", path=base.path)
    if marker.world != 1:
        raise RecoveryError(
            f"it was saved by {marker.world} ranks", step=marker.step, path=base.path
        )
    opened = OpenBase.open(filesystem, base, rank=0)
    try:
        trees, _ = contents(opened)
        if opened.redo is not None:
            return read_multistep(
                opened, ring, trained, threads, timeout_s=timeout_s, progress=progress
            )[0]
        return _read_rank(
            opened,
            trees,
            ring,
            timeout_s=timeout_s,
            progress=progress,
            threads=threads,
            training_threads=training_threads,
            wanted=wanted,
        )
    finally:
        opened.close()


def read_multistep(
    opened: OpenBase,
    ring: ChunkRing,
    trained: TimelineRecord | None,
    threads: int,
    *,
    timeout_s: float,
    progress: ProgressSink,
) -> tuple[OfflineState, int]:
    """Read the files of one rank of a multi-step base, and bring their parts to the step of the
    base.

    Args:
        opened: files of the rank, with a redo file.
        ring: buffers for reading.
        trained: record of its timeline, which names the conditions of training.
        threads: Python threads that share the work of replay.
        timeout_s: a read that takes longer counts as hung.
        progress: notified of bytes read.

    Returns:
        The state; and the number of updates that some part had not seen.

    Raises:
        DamageError, FormatError, UnavailableError, ReplayError, UnsupportedStateError, OSError: as
            :func:`load_offline`.
    """
    training_threads, inexact = replay_conditions([trained])
    state = _read_rank(
        opened,
        rank_contents(opened)[0],
        ring,
        timeout_s=timeout_s,
        progress=progress,
        threads=threads,
        training_threads=training_threads,
    )
    updates = complete_offline_base(
        opened, state, ring, inexact, timeout_s=timeout_s, progress=progress
    )
    return state, updates


def _read_rank(
    opened: OpenBase,
    trees: Mapping[str, Any],
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
    threads: int,
    training_threads: int | None,
    wanted: Callable[[str], bool] | None = None,
) -> OfflineState:
    """Read one rank's files without replaying anything."""
    free_bytes = memory_available_bytes()
    first = opened.shards[0][3]
    chosen = [_chosen(header, wanted) for _, _, header, _ in opened.shards]
    need_bytes = 0
    for (_, _, header, _), some in zip(opened.shards, chosen, strict=True):
        places = map(header.placed.__getitem__, some)
        need_bytes += sum(place.end - place.begin for place in places)
    if need_bytes > free_bytes:
        raise UnavailableError(
            f"the base of step {opened.marker.step} takes {need_bytes} bytes of memory; "
            f"{free_bytes} are available",
            path=first.parent,
        )
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, Entry] = {}
    objects: dict[str, bytearray] = {}
    aliases: dict[str, str] = {}
    for (file, record, header, path), some in zip(opened.shards, chosen, strict=True):
        aliases.update(header.aliases)
        targets: dict[str, memoryview] = {}
        placed = [header.placed[index] for index in some]
        for place in placed:
            name = place.entry.name
            if name.startswith(OBJECT_PREFIX):
                objects[name] = bytearray(place.end - place.begin)
                targets[name] = memoryview(objects[name])
                continue
            entries[name], tensors[name] = place.entry, empty_like_entry(place.entry)
            targets[name] = host_bytes(tensors[name])
        read_body(
            file,
            header,
            record,
            path,
            ring,
            timeout_s=timeout_s,
            progress=progress,
            sink=_into(placed, targets),
            wanted=None if wanted is None else some,
        )
    return OfflineState(
        opened.marker,
        entries,
        tensors,
        aliases,
        {name: bytes(data) for name, data in objects.items()},
        trees,
        shape_of_base(opened.placed(), aliases, trees),
        threads=threads,
        training_threads=training_threads,
    )


def _chosen(header: ShardHeader, wanted: Callable[[str], bool] | None) -> Sequence[int]:
    """Return the indices of the entries to read: all objects, and the tensors that are wanted under
    any of their names."""
    if wanted is None:
        return range(len(header.placed))
    names: dict[str, list[str]] = {}
    for other, name in header.aliases.items():
        names.setdefault(name, []).append(other)
    return [
        index
        for index, name in enumerate(place.entry.name for place in header.placed)
        if name.startswith(OBJECT_PREFIX) or any(map(wanted, (name, *names.get(name, ()))))
    ]


def _into(
    entries: Sequence[Placed], targets: Mapping[str, memoryview]
) -> Callable[[int, memoryview], None]:
    """Return a sink that copies the bytes of a body to their targets."""
    placed = [place for place in entries if place.end > place.begin]
    ends = [place.end for place in placed]

    def put(begin: int, piece: memoryview) -> None:
        for place, start, stop in overlaps(placed, ends, begin, piece.nbytes):
            target = targets[place.entry.name]
            target[start - place.begin : stop - place.begin] = piece[start - begin : stop - begin]

    return put


_ALIVE_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class CompletedFiles:
    """State in one rank's files of a base, all of it at the step of the base.

    Attributes:
        state: tensors and objects.
        updates: number of updates that some part had not seen.
    """

    state: OfflineState
    updates: int

    @property
    def doubt(self) -> str:
        """Reason why the state is inexact; "" if it is exact."""
        return self.state.doubt

    def digests(self) -> dict[str, str]:
        """Return the digests of all entries, by name."""
        return self.state.digests()

    def fill(self, fills: Iterable[Fill]) -> set[str]:
        """Copy pieces of these files to their targets; return the names of their entries."""
        names = set()
        for one in fills:
            one.copy(self.state.bytes_of(one.piece.entry.name))
            names.add(one.piece.entry.name)
        return names


def complete_rank_files(
    opened: OpenBase,
    ring: ChunkRing,
    trained: TimelineRecord | None,
    *,
    timeout_s: float,
    progress: ProgressSink,
    alive: Callable[[], None] = lambda: None,
) -> CompletedFiles:
    """Read one rank's files of a multi-step base, every byte verified, and replay the updates that
    its parts have not seen.

    Args:
        opened: files of the rank, with a redo file.
        ring: buffers for reading.
        trained: record of its timeline, which names the conditions of training.
        timeout_s: a read that takes longer counts as hung.
        progress: notified of bytes read.
        alive: called every half second.

    Raises:
        DamageError, FormatError: the files cannot be read or completed.
        UnavailableError: there is not enough memory.
        OSError: the files cannot be read.
    """
    # Only now: most bases are whole.
    from everstep.restore.offline.load import read_multistep

    marker = opened.marker
    threads = min(2, len(available_cores()))
    with ThreadPoolExecutor(1, "everstep-complete") as thread:
        found = thread.submit(
            read_multistep,
            opened,
            ring,
            trained,
            threads,
            timeout_s=timeout_s,
            progress=progress,
        )
        # The thread reads and replays; this one reports that the rank is alive.
        while wait([found], _ALIVE_S).not_done:
            alive()
    try:
        return CompletedFiles(*found.result())
    except (ReplayError, UnsupportedStateError) as error:
        raise FormatError(
            f"the files of rank {marker.rank}: {error.message}",
            step=marker.step,
            rank=marker.rank,
            path=opened.shards[0][3],
        ) from error


@dataclass(slots=True, eq=False)
class _Plan:
    """Entries to load for one rank.

    Attributes:
        rank: rank that saved them.
        view: object trees and pieces of the rank.
        entries: entries that the rank held, by name, with the pieces of the files that hold them.
        aliases: other names by which its objects refer to these.
        mine: names of the entries to load for it.
        computes: its log is replayed.
    """

    rank: int
    view: View
    entries: dict[str, tuple[Entry, Sequence[Piece]]]
    aliases: dict[str, str]
    mine: list[str]
    computes: bool

    def name_of(self, name: str) -> str:
        """Return the name of an entry in this rank's own files and log."""
        return self.aliases.get(name, name)

    @property
    def size_bytes(self) -> int:
        return sum(self.entries[name][0].size_bytes for name in self.mine)


def load_job(
    filesystem: FileSystem,
    base: BaseFound,
    run: str | None,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
    threads: int = 1,
    training_threads: int | None = None,
    trained: TimelineRecord | None = None,
) -> JobState:
    """Read a base of several ranks into host memory, every byte verified; arguments and errors as
    for :func:`load_offline`."""
    assert base.manifest is not None
    if base.manifest.markers[0].run != run:
        raise FormatError(f"{base.path} belongs to another run", path=base.path)
    there = {file.name for file in base.files}
    markers = base.manifest.markers
    if missing := [m.rank for m in markers if not there.issuperset(one.name for one in m.files)]:
        ranks = ", ".join(map(str, missing))
        raise FormatError(
            f"the files of rank(s) {ranks} are missing in this folder", path=base.path
        )
    with open_ranks(filesystem, base) as opened:
        return _load_opened(
            opened,
            ring,
            threads,
            training_threads,
            trained,
            timeout_s=timeout_s,
            progress=progress,
        )


def _load_opened(
    opened: Sequence[OpenBase],
    ring: ChunkRing,
    threads: int,
    training_threads: int | None,
    trained: TimelineRecord | None,
    *,
    timeout_s: float,
    progress: ProgressSink,
) -> JobState:
    saved = SavedRanks(opened)
    keeper = dict[TensorKey, int]()
    parts = dict[int, dict[str, bytes]]()
    diverged = list[str]()
    plans = [_plan(saved, rank, keeper) for rank in saved.ranks]
    need_bytes = sum(plan.size_bytes for plan in plans)
    free_bytes = memory_available_bytes()
    if need_bytes > free_bytes:
        marker = opened[0].marker
        raise UnavailableError(
            f"the base of step {marker.step} takes {need_bytes} bytes of memory; {free_bytes} "
            "are available",
            step=marker.step,
        )
    tensors = {plan.rank: _empty(plan) for plan in plans}
    wanted: list[tuple[str, Sequence[Piece], Box, memoryview]] = []
    for plan in plans:
        for name, tensor in tensors[plan.rank].items():
            entry, pieces = plan.entries[name]
            box = Box(entry.global_offset, entry.shape)
            wanted.append((name, pieces, box, host_bytes(tensor)))
    fills = fills_by_file(saved, wanted)
    doubt = ""
    done = set[int]()
    for one in opened:
        if one.redo is not None:  # a multi-step base
            made = complete_rank_files(one, ring, trained, timeout_s=timeout_s, progress=progress)
            mine = saved.files_of(one.marker.rank)
            made.fill(fill for number in mine for fill in fills.get(number, ()))
            doubt = doubt or made.doubt
            done.update(mine)
    _read_files(saved, fills, done, ring, timeout_s, progress)
    computed: dict[int, OfflineState] = {}
    resting: dict[int, UnreplayedRank] = {}
    written: dict[int, dict[str, Entry]] = {}
    for one, plan in zip(opened, plans, strict=True):
        entries = [place.entry for place in one.placed()]
        tensor_entries = {e.name: e for e in entries if not e.name.startswith(OBJECT_PREFIX)}
        written[plan.rank] = tensor_entries
        aliases = {k: v for _, _, header, _ in one.shards for k, v in header.aliases.items()}
        shape = shape_of_base(one.placed(), aliases, plan.view.trees)
        objects, parts[plan.rank] = _objects(saved, plan)
        diverged += _diverged(saved, plan, parts[plan.rank])
        if not plan.computes:
            resting[plan.rank] = UnreplayedRank(tensors[plan.rank], objects, shape)
            continue
        computed[plan.rank] = OfflineState(
            replace(one.marker, rank=0, world=1),
            {name: entry for name, (entry, _) in plan.entries.items()},
            tensors[plan.rank],
            plan.aliases,
            objects,
            plan.view.trees,
            shape,
            threads=threads,
            training_threads=training_threads,
        )
    markers = [one.marker for one in opened]
    return JobState(markers, saved, computed, resting, written, keeper, parts, diverged, doubt)


def _plan(saved: SavedRanks, rank: int, keeper: dict[TensorKey, int]) -> _Plan:
    """Plan the load of a rank: everything that it held if that includes optimizer state that no
    earlier rank held; otherwise only what no earlier rank held.

    Args:
        saved: headers of the base.
        rank: rank to plan for.
        keeper: rank that each tensor is loaded for; extended.
    """
    view = saved.view_of_all(rank)
    named = {name: _held(pieces, rank) for name, pieces in view.pieces.items()}
    held = {entry.name: (entry, pieces) for entry, pieces in named.values()}
    aliases = {name: entry.name for name, (entry, _) in named.items() if name != entry.name}
    new = [name for name, (entry, _) in held.items() if tensor_key(entry) not in keeper]
    keeper.update({tensor_key(held[name][0]): rank for name in new})
    plan = _Plan(rank, view, held, aliases, new, False)
    owned = owned_entries(view.trees, plan.name_of)
    if not owned.isdisjoint(new):
        plan.mine = list(held)
        plan.computes = True
    return plan


def _held(pieces: Sequence[Piece], rank: int) -> tuple[Entry, Sequence[Piece]]:
    """Return the shard of a tensor that a rank held, under the name that the ranks sharing it
    use."""
    first = pieces[0]
    shape = first.entry.global_shape
    placement = first.placement
    box = Box((0,) * len(shape), shape)
    if placement.cuts:
        box = box_on_mesh(shape, placement.mesh, placement.coordinate(rank), placement.cuts)
    there = next((piece.entry for piece in pieces if piece.box == box), None)
    if there is None:
        there = replace(first.entry, shape=box.shape, global_offset=box.offset, stride=None)
    return there, pieces


def _empty(plan: _Plan) -> dict[str, torch.Tensor]:
    return {name: empty_like_entry(plan.entries[name][0]) for name in plan.mine}


def _read_files(
    saved: SavedRanks,
    wanted: Mapping[int, Sequence[Fill]],
    done: Collection[int],
    ring: ChunkRing,
    timeout_s: float,
    progress: ProgressSink,
) -> None:
    """Read all files completely, except those already read."""
    for number, (file, record, header, path) in enumerate(saved.files):
        if number in done:
            continue
        reads = PieceReads(header, wanted.get(number, ()))
        read_body(
            file,
            header,
            record,
            path,
            ring,
            timeout_s=timeout_s,
            progress=progress,
            sink=reads.sink,
            on_entry=reads.entry_done,
        )


def _objects(saved: SavedRanks, plan: _Plan) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return a rank's objects by entry name, merged where each rank had a share of one (ZeRO); and
    the unmerged ones."""
    found: dict[str, bytes] = {}
    parts: dict[str, bytes] = {}
    for section, data in saved.objects_of(plan.rank).items():
        name = OBJECT_PREFIX + section
        tree = plan.view.trees[section]
        if is_partitioned(decode(data)):  # the merged objects are equal on all ranks
            parts[name], data = data, merged_object(tree, tree["state"], section)
        found[name] = data
    return found, parts


def _diverged(saved: SavedRanks, plan: _Plan, parts: Mapping[str, bytes]) -> list[str]:
    """Return parameters of which the ranks of an optimizer had different copies, although each is
    updated on one rank only and sent to the others."""
    found: list[str] = []
    named = parameter_names(plan.view.trees, plan.name_of)
    for data in parts.values():
        tree: Any = decode(data)
        ranks = Placement.parse(tree[PARTITIONED]).ranks
        among = set(saved.ranks if ranks is None else ranks)
        for parameter in (p for group in OptimizerProvider.groups_of(tree) or () for p in group):
            pieces = [
                piece
                for entry in named.get(parameter, ())
                for piece in saved.all_pieces(entry)
                if piece.entry.name == entry
                and (piece.placement.ranks is None or among.intersection(piece.placement.ranks))
            ]
            if len({piece.digest for piece in pieces}) > 1:
                found.append(parameter)
    return found
