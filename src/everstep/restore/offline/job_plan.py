"""Plan of the tensors and objects of a job's base that are loaded for each of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.restore.load.saved_ranks import Piece, SavedRanks, View
from everstep.restore.offline.job_state import TensorKey, tensor_key
from everstep.restore.redo.owned import owned_entries, parameter_names
from everstep.restore.redo.zero_objects import is_partitioned, merged_object
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.layout.placement import Box, Placement, box_on_mesh
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import PARTITIONED
from everstep.state.values.objects import decode


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
