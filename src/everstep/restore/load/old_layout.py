"""Which part of each tensor ranks had that trained in another number, or in another layout: as a
base of theirs says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.restore.load.reshard import SavedRanks
from everstep.run.opened import OpenBase
from everstep.run.shape import shape_of_base
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.providers.optimizers import OptimizerProvider

__all__ = ["OldLayout"]


@dataclass(frozen=True, slots=True)
class OldLayout:
    """What the headers of a base say; nothing of it is read any more.

    Attributes:
        opened: of each rank that saved it, with files that are closed.
        saved: the same together.
        shapes: by rank: digest of what its state consisted of, as its log has it.
        groups: names of the parameters of each optimizer, as the first rank had them.
    """

    opened: Mapping[int, OpenBase]
    saved: SavedRanks
    shapes: Mapping[int, str]
    groups: Mapping[str, Sequence[Sequence[str]]]

    @classmethod
    def of(
        cls, saved: SavedRanks, opened: Sequence[OpenBase], optimizers: Collection[str]
    ) -> OldLayout | None:
        """Of a base that is open; None: the files of some ranks are not.

        Args:
            optimizers: their sections.

        Raises:
            DamageError, FormatError: objects cannot be read.
        """
        if len(opened) < saved.world:
            return None
        shapes: dict[int, str] = {}
        known: dict[str, Any] = {}
        groups: dict[str, Sequence[Sequence[str]]] = {}
        for one in opened:
            rank = one.marker.rank
            trees = saved.trees_of(rank, optimizers, known)
            aliases = {k: v for _, _, header, _ in one.shards for k, v in header.aliases.items()}
            shapes[rank] = shape_of_base(one.placed(), aliases, trees)
            for key, tree in trees.items():
                groups.setdefault(key, OptimizerProvider.groups_of(tree) or [])
        return cls({one.marker.rank: one for one in opened}, saved, shapes, groups)

    @property
    def world(self) -> int:
        """How many ranks saved it."""
        return self.saved.world

    def entries(self, rank: int) -> dict[str, Entry]:
        """What of tensors a rank wrote of bases, and of marks of its log, by name."""
        placed = self.opened[rank].placed()
        return {p.entry.name: p.entry for p in placed if not p.entry.name.startswith(OBJECT_PREFIX)}
