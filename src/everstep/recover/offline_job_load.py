"""Reads a base of several ranks into host memory: the beginning of what :class:`.JobState` is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from everstep.errors import FormatError, UnavailableError
from everstep.format.reader import read_body
from everstep.format.records import TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.recover.offline import OfflineState
from everstep.recover.offline_job import JobState, Key, Resting, key_of
from everstep.recover.opened import OpenBase, open_ranks
from everstep.recover.owned import owned_entries
from everstep.recover.pieces import Fill, PieceReads, fills
from everstep.recover.reshard import Piece, SavedRanks, View
from everstep.recover.scan import BaseFound
from everstep.recover.shape import shape_of_base
from everstep.seams.filesystem import FileSystem
from everstep.seams.machine import memory_available_bytes
from everstep.seams.progress import ProgressSink
from everstep.state.entries import Entry
from everstep.state.image import OBJECT_PREFIX
from everstep.state.objects import decode, encode
from everstep.state.placing import Box, box_on_mesh
from everstep.state.tensors import empty_like_entry, host_bytes
from everstep.state.zero import PARTITIONED

__all__ = ["load_job"]


@dataclass(slots=True, eq=False)
class _Plan:
    """What is made of one rank.

    Attributes:
        entries: what it held, by name, as it held it, and where that is.
        mine: of these, what is loaded for it.
        computes: its log is replayed.
    """

    rank: int
    view: View
    entries: dict[str, tuple[Entry, Sequence[Piece]]]
    mine: list[str]
    computes: bool

    @property
    def aliases(self) -> dict[str, str]:
        found = self.view.entries.items()
        return {name: entry.name for name, entry in found if name != entry.name}

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
    of :func:`.load_offline`, but that none over several steps is made whole."""
    assert base.manifest is not None
    if base.manifest.markers[0].run != run:
        raise FormatError(f"{base.path} belongs to another run", path=base.path)
    there = {file.name for file in base.files}
    markers = base.manifest.markers
    if missing := [m.rank for m in markers if not there.issuperset(one.name for one in m.files)]:
        ranks = ", ".join(map(str, missing))
        raise FormatError(f"the files of rank(s) {ranks} are not in this folder", path=base.path)
    with open_ranks(filesystem, base) as opened:
        if any(one.redo is not None for one in opened):
            raise FormatError(
                f"{base.path}: its tensors are of several updates: only a process that trains "
                "alone makes it whole",
                path=base.path,
            )
        about: dict[str, Any] = {"timeout_s": timeout_s, "progress": progress}
        return _load(opened, ring, threads, training_threads, **about)


def _load(
    opened: Sequence[OpenBase],
    ring: ChunkRing,
    threads: int,
    training_threads: int | None,
    *,
    timeout_s: float,
    progress: ProgressSink,
) -> JobState:
    saved, keeper = SavedRanks(opened), dict[Key, int]()
    plans = [_plan(saved, rank, keeper) for rank in saved.ranks]
    need_bytes, free_bytes = sum(plan.size_bytes for plan in plans), memory_available_bytes()
    if need_bytes > free_bytes:
        marker = opened[0].marker
        raise UnavailableError(
            f"the base of step {marker.step} takes {need_bytes} bytes of memory; {free_bytes} "
            "are left",
            step=marker.step,
        )
    tensors = {plan.rank: _empty(plan) for plan in plans}
    _read(saved, _fills(saved, plans, tensors), ring, timeout_s, progress)
    computed: dict[int, OfflineState] = {}
    resting: dict[int, Resting] = {}
    written: dict[int, dict[str, Entry]] = {}
    for one, plan in zip(opened, plans, strict=True):
        entries = [place.entry for place in one.placed()]
        tensor_entries = {e.name: e for e in entries if not e.name.startswith(OBJECT_PREFIX)}
        written[plan.rank] = tensor_entries
        aliases = {k: v for _, _, header, _ in one.shards for k, v in header.aliases.items()}
        shape = shape_of_base(one.placed(), aliases, plan.view.trees)
        objects, partitioned = _objects(saved, plan)
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
    return JobState(markers, saved, computed, resting, written, keeper, partitioned)


def _plan(saved: SavedRanks, rank: int, keeper: dict[Key, int]) -> _Plan:
    """What is loaded for a rank: all that it held, where there is something of optimizers that no
    rank before it held; otherwise what none of these held.

    Args:
        keeper: the rank of which each tensor is taken, which is added to.
    """
    view = saved.view_of_all(rank)
    held = {pieces[0].entry.name: _held(pieces, rank) for pieces in view.pieces.values()}
    new = [name for name, (entry, _) in held.items() if key_of(entry) not in keeper]
    keeper.update({key_of(held[name][0]): rank for name in new})
    plan = _Plan(rank, view, held, new, False)
    owned = owned_entries(view.trees, lambda name: view.entries[name].name)
    if not owned.isdisjoint(new):
        plan.mine, plan.computes = list(held), True
    return plan


def _held(pieces: Sequence[Piece], rank: int) -> tuple[Entry, Sequence[Piece]]:
    """The part of a tensor that a rank held."""
    first = pieces[0]
    shape, placement = first.entry.global_shape, first.placement
    box = Box((0,) * len(shape), shape)
    if placement.cuts:
        box = box_on_mesh(shape, placement.mesh, placement.coordinate(rank), placement.cuts)
    there = next((piece.entry for piece in pieces if piece.box == box), None)
    if there is None:
        there = replace(first.entry, shape=box.shape, global_offset=box.offset, stride=None)
    return there, pieces


def _empty(plan: _Plan) -> dict[str, torch.Tensor]:
    return {name: empty_like_entry(plan.entries[name][0]) for name in plan.mine}


def _fills(
    saved: SavedRanks, plans: Sequence[_Plan], tensors: Mapping[int, Mapping[str, torch.Tensor]]
) -> dict[int, list[Fill]]:
    """What to read, by file.

    Raises:
        DamageError: listing what nobody has written.
    """
    wanted: dict[int, list[Fill]] = {}
    holes: dict[str, str] = {}
    for plan in plans:
        for name in plan.mine:
            entry, pieces = plan.entries[name]
            box = Box(entry.global_offset, entry.shape)
            found, missing = fills(pieces, box, host_bytes(tensors[plan.rank][name]))
            if missing:
                holes[name] = f"{missing} of {box.size} elements of rank {plan.rank}"
            for fill in found:
                wanted.setdefault(fill.piece.file, []).append(fill)
    if holes:
        raise saved.hole(holes)
    return wanted


def _read(
    saved: SavedRanks,
    wanted: Mapping[int, Sequence[Fill]],
    ring: ChunkRing,
    timeout_s: float,
    progress: ProgressSink,
) -> None:
    """Reads all files as a whole."""
    for number, (file, record, header, path) in enumerate(saved.files):
        reads = PieceReads(header, wanted.get(number, ()))
        how: dict[str, Any] = {"timeout_s": timeout_s, "progress": progress}
        read_body(
            file, header, record, path, ring, sink=reads.sink, on_entry=reads.entry_done, **how
        )


def _objects(saved: SavedRanks, plan: _Plan) -> tuple[dict[str, bytes], list[str]]:
    """A rank's objects by entry name, whole where ranks had a part of one each (ZeRO); and of which
    sections that is so."""
    found: dict[str, bytes] = {}
    partitioned: list[str] = []
    for section, data in saved.objects_of(plan.rank).items():
        raw, tree = decode(data), plan.view.trees[section]
        if isinstance(raw, dict) and PARTITIONED in raw:  # alike on all ranks, whoever had what
            data = encode({**tree, "state": dict(sorted(tree["state"].items()))}, section)
            partitioned.append(section)
        found[OBJECT_PREFIX + section] = data
    return found, partitioned
