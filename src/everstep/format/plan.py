"""A base before it is written: which files, and what lies where in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everstep.format.header import ShardIdentity, header_room_bytes
from everstep.format.names import shard_name
from everstep.state.entries import Entry
from everstep.state.layout import ShardLayout, plan_shards

__all__ = ["BasePlan", "ShardPlan", "plan_files"]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file of a base.

    Attributes:
        layout: its tensors; their LSN is that of the base, but for those in ``lsns``.
        aliases: ``other name -> entry name``.
        room_bytes: reserved for the header.
        objects_bytes: what the objects behind the tensors will take, about.
        lsns: number of the last update of each entry that was captured before the base's step.
    """

    name: str
    layout: ShardLayout
    aliases: Mapping[str, str]
    room_bytes: int
    objects_bytes: int
    lsns: Mapping[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return self.room_bytes + self.layout.size_bytes + self.objects_bytes


@dataclass(frozen=True, slots=True)
class BasePlan:
    """All files of this rank.

    Attributes:
        kinds: how entries may change, by name (see :mod:`everstep.state.owners`), where a
            capture depends on it; nothing is assumed of the others.
    """

    identity: ShardIdentity
    shards: tuple[ShardPlan, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


def plan_files(
    identity: ShardIdentity,
    entries: Sequence[Entry],
    aliases: Mapping[str, str],
    objects_bytes: Mapping[str, int],
) -> tuple[ShardPlan, ...]:
    """Lays entries out in files; objects go to the end of the last one.

    Args:
        identity: of any base of this rank; the files of all bases are laid out alike.
        objects_bytes: the objects' names and about their sizes.
    """
    layouts = plan_shards(entries)
    shards = []
    for part, layout in enumerate(layouts):
        last = part == len(layouts) - 1
        names = {place.entry.name for place in layout.placed}
        mine = {other: name for other, name in aliases.items() if name in names}
        objects = list(objects_bytes) if last else []
        room_bytes = header_room_bytes(identity, layout.placed, objects, mine)
        about = sum(objects_bytes.values()) if last else 0
        shards.append(ShardPlan(shard_name(identity.rank, part), layout, mine, room_bytes, about))
    return tuple(shards)
