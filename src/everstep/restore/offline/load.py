"""Read a base into host memory, without the program that trained it: all ranks that saved it.

The files of one rank at a time are in host memory, besides the restored state.

Plan of the tensors and objects of a job's base that are loaded for each of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from everstep.errors import FormatError
from everstep.format import TimelineRecord
from everstep.replay import ONE_THREAD, ReplayOptions
from everstep.restore.load import Reads, SavedRanks
from everstep.restore.load.saved_ranks import Piece, View
from everstep.restore.load.targets import Fill, PieceReads, fills_by_file
from everstep.restore.offline.job_state import JobState, RankReplay, Sharing, TensorKey, tensor_key
from everstep.restore.offline.memory import HostMemory, OfflineState
from everstep.restore.offline.rank_files import complete_rank_files, read_rank_files, require_memory
from everstep.restore.redo import owned_entries, parameter_names
from everstep.restore.redo.owned import is_partitioned, merged_object
from everstep.run import BaseFound, OpenBase
from everstep.run.open_base import open_ranks
from everstep.run.tensors import shape_of_base
from everstep.seams import FileSystem
from everstep.state.layout import OBJECT_PREFIX, Box, Entry, Placement
from everstep.state.layout.placement import box_on_mesh
from everstep.state.providers import PARTITIONED, OptimizerProvider
from everstep.state.values.objects import decode
from everstep.state.values.tensors import empty_like_entry, host_bytes


@dataclass(slots=True, eq=False)
class RankPlan:
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

    def select(self, wanted: Callable[[str], bool] | None) -> None:
        """Load only what is wanted under any of its names; None: everything."""
        if wanted is None:
            return
        names = {name: [name] for name in self.mine}
        for other, name in self.aliases.items():
            names.get(name, []).append(other)
        self.mine = [name for name, every in names.items() if any(map(wanted, every))]

    def targets(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, Sequence[Piece], Box, memoryview]]:
        """Yield name, pieces, box and memory of tensors to fill, as :func:`.fills_by_file` takes
        them."""
        for name, tensor in tensors.items():
            entry, pieces = self.entries[name]
            yield name, pieces, Box(entry.global_offset, entry.shape), host_bytes(tensor)

    @property
    def size_bytes(self) -> int:
        return sum(self.entries[name][0].size_bytes for name in self.mine)


def plan_rank(saved: SavedRanks, rank: int, owners: dict[TensorKey, int]) -> RankPlan:
    """Plan the load of a rank: everything that it held if that includes optimizer state that no
    earlier rank held; otherwise only what no earlier rank held.

    Args:
        saved: headers of the base.
        rank: rank to plan for.
        owners: rank that each tensor is loaded for; extended.
    """
    view = saved.view_of_all(rank)
    named = {name: _held(pieces, rank) for name, pieces in view.pieces.items()}
    held = {entry.name: (entry, pieces) for entry, pieces in named.values()}
    aliases = {name: entry.name for name, (entry, _) in named.items() if name != entry.name}
    new = [name for name, (entry, _) in held.items() if tensor_key(entry) not in owners]
    owners.update({tensor_key(held[name][0]): rank for name in new})
    plan = RankPlan(rank, view, held, aliases, new, False)
    owned = owned_entries(view.trees, plan.name_of)
    # A replay needs all tensors of the rank, also those that an earlier rank holds as well.
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


def objects_of_rank(saved: SavedRanks, plan: RankPlan) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return a rank's objects by entry name, merged where each rank had a share of one (ZeRO); and
    the unmerged ones."""
    found: dict[str, bytes] = {}
    parts: dict[str, bytes] = {}
    for section, data in saved.objects_of(plan.rank).items():
        name = OBJECT_PREFIX + section
        tree = plan.view.trees[section]
        if is_partitioned(decode(data)):  # the merged objects are equal on all ranks
            parts[name] = data
            data = merged_object(tree, tree["state"], section)
        found[name] = data
    return found, parts


def diverged_parameters(saved: SavedRanks, plan: RankPlan, parts: Mapping[str, bytes]) -> list[str]:
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


def load_job(
    filesystem: FileSystem,
    base: BaseFound,
    reads: Reads,
    trained: TimelineRecord | None = None,
    options: ReplayOptions = ONE_THREAD,
    wanted: Callable[[str], bool] | None = None,
) -> JobState:
    """Read a base into host memory, every byte verified; complete a multi-step base.

    Args:
        filesystem: file system of the run.
        base: base to read.
        reads: how to read.
        trained: record of the base's timeline, which names the conditions of training.
        options: options of the replay.
        wanted: predicate on names that selects tensors; nothing can be replayed on the others.
            None: all tensors, as for multi-step bases in any case.

    Raises:
        DamageError, FormatError: the files are damaged or invalid.
        ReplayError, UnsupportedStateError: a multi-step base cannot be completed.
        UnavailableError: there is not enough memory.
        OSError: it cannot be read.
    """
    if base.manifest is None:
        raise FormatError(f"{base.id} is {base.status}: {base.problem}", path=base.path)
    there = {file.name for file in base.files}
    markers = base.manifest.markers
    # Ranks may have written to disks of their own, of which this folder has one.
    missing = [m.rank for m in markers if not there.issuperset(one.name for one in m.files)]
    if missing and len(markers) > 1:
        ranks = ", ".join(map(str, missing))
        raise FormatError(
            f"the files of rank(s) {ranks} are missing in this folder", path=base.path
        )
    with open_ranks(filesystem, base) as opened:
        if len(opened) > 1:
            return _load_ranks(opened, reads, trained, options, wanted)
        found = read_rank_files(opened[0], reads, trained, options, wanted)
        state = found.memory.state
        return JobState(
            state.marker, {0: RankReplay(found.memory, state.entries)}, doubt=found.doubt
        )


def _load_ranks(
    opened: Sequence[OpenBase],
    reads: Reads,
    trained: TimelineRecord | None,
    options: ReplayOptions,
    wanted: Callable[[str], bool] | None,
) -> JobState:
    saved = SavedRanks(opened)
    # Completing a multi-step base replays updates of all its parameters.
    if any(one.redo is not None for one in opened):
        wanted = None
    owners: dict[TensorKey, int] = {}
    plans = [plan_rank(saved, rank, owners) for rank in saved.ranks]
    for plan in plans:
        plan.select(wanted)
    # Before anything is allocated: an overcommitted machine would kill a process instead.
    require_memory(opened[0], sum(plan.size_bytes for plan in plans))
    tensors = {
        plan.rank: {name: empty_like_entry(plan.entries[name][0]) for name in plan.mine}
        for plan in plans
    }
    targets = (target for plan in plans for target in plan.targets(tensors[plan.rank]))
    fills = fills_by_file(saved, targets)
    done, doubt = _complete(saved, opened, fills, reads, trained)
    _read_files(saved, fills, done, reads, completely=wanted is None)
    ranks: dict[int, RankReplay] = {}
    diverged: list[str] = []
    for one, plan in zip(opened, plans, strict=True):
        ranks[plan.rank] = _rank_replay(saved, one, plan, tensors[plan.rank], options)
        diverged += diverged_parameters(saved, plan, ranks[plan.rank].unmerged)
    exact = all(one.marker.exact for one in opened)
    marker = replace(opened[0].marker, exact=exact)
    return JobState(marker, ranks, Sharing(saved, owners, diverged), doubt)


def _complete(
    saved: SavedRanks,
    opened: Sequence[OpenBase],
    fills: Mapping[int, Sequence[Fill]],
    reads: Reads,
    trained: TimelineRecord | None,
) -> tuple[set[int], str]:
    """Take the pieces of a multi-step base, whose parts are of several updates, from the completed
    files, one rank's at a time.

    Returns:
        The numbers of these files; and the reason why the state is inexact, "" if it is exact.
    """
    doubt = ""
    done: set[int] = set()
    for one in opened:
        if one.redo is not None:
            made = complete_rank_files(one, reads, trained)
            mine = saved.files_of(one.marker.rank)
            made.fill(fill for number in mine for fill in fills.get(number, ()))
            doubt = doubt or made.doubt
            done.update(mine)
    return done, doubt


def _rank_replay(
    saved: SavedRanks,
    opened: OpenBase,
    plan: RankPlan,
    tensors: dict[str, torch.Tensor],
    options: ReplayOptions,
) -> RankReplay:
    entries = [place.entry for place in opened.placed()]
    written = {e.name: e for e in entries if not e.name.startswith(OBJECT_PREFIX)}
    aliases = {k: v for _, _, header, _ in opened.shards for k, v in header.aliases.items()}
    objects, unmerged = objects_of_rank(saved, plan)
    state = OfflineState(
        # Each rank replays its log to the tensors that it held, as the only rank would.
        replace(opened.marker, rank=0, world=1),
        {name: entry for name, (entry, _) in plan.entries.items()},
        tensors,
        plan.aliases,
        objects,
        shape_of_base(opened.placed(), aliases, plan.view.trees),
    )
    trees = plan.view.trees if plan.computes else {}
    return RankReplay(HostMemory(state, trees, options), written, unmerged)


def _read_files(
    saved: SavedRanks,
    wanted: Mapping[int, Sequence[Fill]],
    done: Collection[int],
    reads: Reads,
    *,
    completely: bool,
) -> None:
    """Read the files that were not read already: completely, or what is wanted of them."""
    for number, shard in enumerate(saved.files):
        pieces = PieceReads(shard.header, wanted.get(number, ()))
        if number not in done and (completely or pieces.wanted):
            some = None if completely else pieces.wanted
            reads.body(shard, sink=pieces.sink, wanted=some, on_entry=pieces.entry_done)
