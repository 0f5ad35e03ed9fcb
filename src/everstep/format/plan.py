"""A base before it is written: which files, and what lies where in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.format.header import ShardIdentity, header_size_bytes
from everstep.format.names import shard_name
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import ShardLayout, plan_shards

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
        static: its entries were declared to never change (``adr/050``).
    """

    name: str
    layout: ShardLayout
    aliases: Mapping[str, str]
    room_bytes: int
    objects_bytes: int
    lsns: Mapping[str, int] = field(default_factory=dict)
    static: bool = False

    @property
    def size_bytes(self) -> int:
        return self.room_bytes + self.layout.size_bytes + self.objects_bytes

    def identity_in(self, base: ShardIdentity) -> ShardIdentity:
        """What the header of this file says of the base. A static file says nothing of one base
        that would not be true of others that link to it."""
        return replace(base, static=True, behind_mark=False) if self.static else base


@dataclass(frozen=True, slots=True)
class BasePlan:
    """All files of this rank.

    Attributes:
        kinds: how entries may change, by name (see :mod:`everstep.state.survey.ownership`), where a
            capture depends on it; nothing is assumed of the others.
    """

    identity: ShardIdentity
    shards: tuple[ShardPlan, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def objects_in(self) -> ShardPlan:
        """The file that ends with the objects: the last one that is not static."""
        return next(shard for shard in reversed(self.shards) if not shard.static)


def plan_files(
    identity: ShardIdentity,
    entries: Sequence[Entry],
    aliases: Mapping[str, str],
    objects_bytes: Mapping[str, int],
    static: Collection[str] = (),
) -> tuple[ShardPlan, ...]:
    """Lays entries out in files; objects go to the end of the last one, behind which come the files
    of static entries: an optimizer does not wait for the copies of these.

    Args:
        identity: of any base of this rank; the files of all bases are laid out alike.
        objects_bytes: the objects' names and about their sizes.
        static: names of entries that never change, and get files of their own.
    """
    layouts = plan_shards([entry for entry in entries if entry.name not in static])
    ends_with_objects = len(layouts) - 1
    if static:
        layouts += plan_shards([entry for entry in entries if entry.name in static])
    shards = []
    for part, layout in enumerate(layouts):
        names = {place.entry.name for place in layout.placed}
        mine = {other: name for other, name in aliases.items() if name in names}
        objects = objects_bytes if part == ends_with_objects else {}
        shard = ShardPlan(
            shard_name(identity.rank, part),
            layout,
            mine,
            0,
            sum(objects.values()),
            static=part > ends_with_objects,
        )
        about = shard.identity_in(identity), layout.placed, list(objects), mine
        shards.append(replace(shard, room_bytes=header_size_bytes(*about)))
    return tuple(shards)
