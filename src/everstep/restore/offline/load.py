"""Read a base into host memory, without the program that trained it: all ranks that saved it.

The files of one rank at a time are in host memory, besides the restored state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from everstep.errors import FormatError
from everstep.format.records import TimelineRecord
from everstep.replay.engine import ONE_THREAD, ReplayOptions
from everstep.restore.load.load import Reads
from everstep.restore.load.pieces import Fill, PieceReads, fills_by_file
from everstep.restore.load.saved_ranks import Piece, SavedRanks
from everstep.restore.offline.job_plan import (
    RankPlan,
    diverged_parameters,
    objects_of_rank,
    plan_rank,
)
from everstep.restore.offline.job_state import JobState, RankReplay, Sharing, TensorKey
from everstep.restore.offline.memory import HostMemory
from everstep.restore.offline.rank_files import (
    complete_rank_files,
    read_rank_files,
    require_memory,
)
from everstep.restore.offline.state import OfflineState
from everstep.run.open_base import OpenBase, open_ranks
from everstep.run.scan import BaseFound
from everstep.run.shape import shape_of_base
from everstep.seams.files.filesystem import FileSystem
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.layout.placement import Box
from everstep.state.values.tensors import empty_like_entry, host_bytes


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
        wanted: predicate on names that selects tensors of a base of one rank; nothing can be
            replayed on the others. None: all tensors.

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
            return _load_ranks(opened, reads, trained, options)
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
) -> JobState:
    saved = SavedRanks(opened)
    owners: dict[TensorKey, int] = {}
    plans = [plan_rank(saved, rank, owners) for rank in saved.ranks]
    # Before anything is allocated: an overcommitted machine would kill a process instead.
    require_memory(opened[0], sum(plan.size_bytes for plan in plans))
    tensors = {
        plan.rank: {name: empty_like_entry(plan.entries[name][0]) for name in plan.mine}
        for plan in plans
    }
    wanted: list[tuple[str, Sequence[Piece], Box, memoryview]] = []
    for plan in plans:
        for name, tensor in tensors[plan.rank].items():
            entry, pieces = plan.entries[name]
            box = Box(entry.global_offset, entry.shape)
            wanted.append((name, pieces, box, host_bytes(tensor)))
    fills = fills_by_file(saved, wanted)
    doubt = ""
    done: set[int] = set()
    for one in opened:
        # Parts of a multi-step base are of several updates: its pieces are taken from the
        # completed files, one rank's at a time.
        if one.redo is not None:
            made = complete_rank_files(one, reads, trained)
            mine = saved.files_of(one.marker.rank)
            made.fill(fill for number in mine for fill in fills.get(number, ()))
            doubt = doubt or made.doubt
            done.update(mine)
    _read_files(saved, fills, done, reads)
    ranks: dict[int, RankReplay] = {}
    diverged: list[str] = []
    for one, plan in zip(opened, plans, strict=True):
        ranks[plan.rank] = _rank_replay(saved, one, plan, tensors[plan.rank], options)
        diverged += diverged_parameters(saved, plan, ranks[plan.rank].unmerged)
    exact = all(one.marker.exact for one in opened)
    marker = replace(opened[0].marker, exact=exact)
    return JobState(marker, ranks, Sharing(saved, owners, diverged), doubt)


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
) -> None:
    """Read all files completely, except those already read."""
    for number, shard in enumerate(saved.files):
        if number not in done:
            pieces = PieceReads(shard[2], wanted.get(number, ()))
            reads.body(shard, sink=pieces.sink, on_entry=pieces.entry_done)
