"""Reads a base of several ranks into host memory: the beginning of what :class:`.JobState` is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from everstep.errors import FormatError, UnavailableError
from everstep.format.reader import read_body
from everstep.format.records import TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.load.pieces import Fill, PieceReads, fills_by_file
from everstep.restore.load.saved_ranks import Piece, SavedRanks, View
from everstep.restore.offline.offline import OfflineState
from everstep.restore.offline.offline_job import JobState, Key, Resting, key_of
from everstep.restore.offline.whole_ranks import made_whole
from everstep.restore.redo.owned import owned_entries, parameter_names
from everstep.restore.redo.partitioned import is_partitioned, whole_object
from everstep.run.open_base import OpenBase, open_ranks
from everstep.run.scan import BaseFound
from everstep.run.shape import shape_of_base
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.machine import memory_available_bytes
from everstep.seams.progress import ProgressSink
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.layout.placement import Box, Placement, box_on_mesh
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import PARTITIONED
from everstep.state.values.objects import decode
from everstep.state.values.tensors import empty_like_entry, host_bytes

__all__ = ["load_job"]


@dataclass(slots=True, eq=False)
class _Plan:
    """What is made of one rank.

    Attributes:
        entries: what it held, by name, as it held it, and where that is.
        aliases: other names by which its objects refer to these.
        mine: of these, what is loaded for it.
        computes: its log is replayed.
    """

    rank: int
    view: View
    entries: dict[str, tuple[Entry, Sequence[Piece]]]
    aliases: dict[str, str]
    mine: list[str]
    computes: bool

    def name_of(self, name: str) -> str:
        """What an entry is called in this rank's own files and log."""
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
    """Reads a base of several ranks into host memory, every byte verified; arguments and errors as
    of :func:`.load_offline`."""
    assert base.manifest is not None
    if base.manifest.markers[0].run != run:
        raise FormatError(f"{base.path} belongs to another run", path=base.path)
    there = {file.name for file in base.files}
    markers = base.manifest.markers
    if missing := [m.rank for m in markers if not there.issuperset(one.name for one in m.files)]:
        ranks = ", ".join(map(str, missing))
        raise FormatError(f"the files of rank(s) {ranks} are not in this folder", path=base.path)
    with open_ranks(filesystem, base) as opened:
        about: dict[str, Any] = {"timeout_s": timeout_s, "progress": progress}
        return _load(opened, ring, threads, training_threads, trained, **about)


def _load(
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
    keeper = dict[Key, int]()
    parts = dict[int, dict[str, bytes]]()
    apart = list[str]()
    plans = [_plan(saved, rank, keeper) for rank in saved.ranks]
    need_bytes = sum(plan.size_bytes for plan in plans)
    free_bytes = memory_available_bytes()
    if need_bytes > free_bytes:
        marker = opened[0].marker
        raise UnavailableError(
            f"the base of step {marker.step} takes {need_bytes} bytes of memory; {free_bytes} "
            "are left",
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
        if one.redo is not None:  # a base over several steps
            made = made_whole(one, ring, trained, timeout_s=timeout_s, progress=progress)
            mine = saved.files_of(one.marker.rank)
            made.fill(fill for number in mine for fill in fills.get(number, ()))
            doubt = doubt or made.doubt
            done.update(mine)
    _read(saved, fills, done, ring, timeout_s, progress)
    computed: dict[int, OfflineState] = {}
    resting: dict[int, Resting] = {}
    written: dict[int, dict[str, Entry]] = {}
    for one, plan in zip(opened, plans, strict=True):
        entries = [place.entry for place in one.placed()]
        tensor_entries = {e.name: e for e in entries if not e.name.startswith(OBJECT_PREFIX)}
        written[plan.rank] = tensor_entries
        aliases = {k: v for _, _, header, _ in one.shards for k, v in header.aliases.items()}
        shape = shape_of_base(one.placed(), aliases, plan.view.trees)
        objects, parts[plan.rank] = _objects(saved, plan)
        apart += _apart(saved, plan, parts[plan.rank])
        if not plan.computes:
            resting[plan.rank] = Resting(tensors[plan.rank], objects, shape)
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
    return JobState(markers, saved, computed, resting, written, keeper, parts, apart, doubt)


def _plan(saved: SavedRanks, rank: int, keeper: dict[Key, int]) -> _Plan:
    """What is loaded for a rank: all that it held, where there is something of optimizers that no
    rank before it held; otherwise what none of these held.

    Args:
        keeper: the rank of which each tensor is taken, which is added to.
    """
    view = saved.view_of_all(rank)
    named = {name: _held(pieces, rank) for name, pieces in view.pieces.items()}
    held = {entry.name: (entry, pieces) for entry, pieces in named.values()}
    aliases = {name: entry.name for name, (entry, _) in named.items() if name != entry.name}
    new = [name for name, (entry, _) in held.items() if key_of(entry) not in keeper]
    keeper.update({key_of(held[name][0]): rank for name in new})
    plan = _Plan(rank, view, held, aliases, new, False)
    owned = owned_entries(view.trees, plan.name_of)
    if not owned.isdisjoint(new):
        plan.mine = list(held)
        plan.computes = True
    return plan


def _held(pieces: Sequence[Piece], rank: int) -> tuple[Entry, Sequence[Piece]]:
    """The part of a tensor that a rank held, by the name that those have for it that held it."""
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


def _read(
    saved: SavedRanks,
    wanted: Mapping[int, Sequence[Fill]],
    done: Collection[int],
    ring: ChunkRing,
    timeout_s: float,
    progress: ProgressSink,
) -> None:
    """Reads all files as a whole, but those that were read already."""
    for number, (file, record, header, path) in enumerate(saved.files):
        if number in done:
            continue
        reads = PieceReads(header, wanted.get(number, ()))
        how: dict[str, Any] = {"timeout_s": timeout_s, "progress": progress}
        read_body(
            file, header, record, path, ring, sink=reads.sink, on_entry=reads.entry_done, **how
        )


def _objects(saved: SavedRanks, plan: _Plan) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """A rank's objects by entry name, whole where ranks had a part of one each (ZeRO); and of these
    the parts."""
    found: dict[str, bytes] = {}
    parts: dict[str, bytes] = {}
    for section, data in saved.objects_of(plan.rank).items():
        name = OBJECT_PREFIX + section
        tree = plan.view.trees[section]
        if is_partitioned(decode(data)):  # alike on all ranks, whoever had what
            parts[name], data = data, whole_object(tree, tree["state"], section)
        found[name] = data
    return found, parts


def _apart(saved: SavedRanks, plan: _Plan, parts: Mapping[str, bytes]) -> list[str]:
    """Parameters of which the ranks of an optimizer had different copies, though each is updated
    on one of them alone, and handed to the others."""
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
