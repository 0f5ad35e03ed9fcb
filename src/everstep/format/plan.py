"""Files of a base before they are written, and the place of each entry in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.format.header import ShardIdentity, header_size_bytes
from everstep.format.names import shard_name
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import ShardLayout, plan_shards


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file of a base.

    Attributes:
        layout: its tensors; their LSN is that of the base, except for those in ``lsns``.
        aliases: ``other name -> entry name``.
        room_bytes: size reserved for the header.
        objects_bytes: estimated size of the objects after the tensors.
        lsns: last update of each entry that was captured before the base's step.
        static: its entries are declared to never change (``adr/050``).
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
        """Estimated size of the file."""
        return self.room_bytes + self.layout.size_bytes + self.objects_bytes

    def identity_in(self, base: ShardIdentity) -> ShardIdentity:
        """Return the identity for the header of this file.

        A static file must not contain anything that is untrue for other bases that link to it.
        """
        return replace(base, static=True, behind_mark=False) if self.static else base


@dataclass(frozen=True, slots=True)
class BasePlan:
    """All files of this rank.

    Attributes:
        kinds: kind of change by entry name (see :mod:`everstep.state.survey.ownership`), if the
            capture depends on it; nothing is assumed of other entries.
    """

    identity: ShardIdentity
    shards: tuple[ShardPlan, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Estimated size of all files."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def objects_in(self) -> ShardPlan:
        """File that ends with the objects: the last one that is not static."""
        return next(shard for shard in reversed(self.shards) if not shard.static)


def plan_files(
    identity: ShardIdentity,
    entries: Sequence[Entry],
    aliases: Mapping[str, str],
    objects_bytes: Mapping[str, int],
    static: Collection[str] = (),
) -> tuple[ShardPlan, ...]:
    """Distribute entries over files.

    Objects go to the end of the last file that is not static. Files of static entries follow it,
    because no optimizer waits for their copies.

    Args:
        identity: identity of any base of this rank; all bases have the same layout.
        objects_bytes: estimated size of each object, by name.
        static: names of entries that never change; they get files of their own.
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
        # Needs the ShardPlan: the identity in the header of a static file differs (identity_in).
        header_bytes = header_size_bytes(
            shard.identity_in(identity), layout.placed, list(objects), mine
        )
        shards.append(replace(shard, room_bytes=header_bytes))
    return tuple(shards)
