"""What trainer and keeper tell each other: plain dicts, told apart by ``kind``.

Trainer to keeper: ``attach`` (who, and how large an arena), ``serve`` (a timeline), ``layout``
(once per layout of files), ``begin`` (a capture), ``object`` (a part of one), ``captured``,
``persist`` (what was to stay in memory only), ``redo`` (an update that concerns a capture over
several steps), ``assemble`` (one is all there), ``abandon``, ``ask`` (for a base of the replica's),
``no_replica`` (any more), ``forget`` (a kept block is going to be overwritten), ``log_layout``
(what a number stands for from now on, and which numbers stand for nothing any more), ``log`` (a
record is whole), ``forget_log`` (the memory of records likewise), ``log_to_disk`` (or no more),
``settle`` (finish what an earlier trainer left), ``recall`` (what is in memory), ``bye``.

From a process that is not attached: ``status``, ``stop``, ``look`` (what is in memory, which stays
there), answered by ``looked``.

Keeper to trainer: ``welcome`` (with the arena's descriptor), ``refused``, ``durable``,
``failed``, ``error``, ``done`` (with a capture, retention included), ``rebuilt`` (a capture over
several steps is whole, or will never be), ``progress``, ``settled``,
``logged`` (records are on disk), ``persisted`` (a base of the replica's), ``retained`` (behind it,
too), ``asks_refused``, ``replica_stopped``, ``blob`` (a part of what ``recalled`` then refers to),
``recalled``, ``replaced`` (another trainer has taken over).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from everstep.format.header import ShardIdentity
from everstep.format.plan import BasePlan, ShardPlan
from everstep.link.capture import Capture
from everstep.state.layout.entries import Entry
from everstep.state.layout.replica_digest import InCommon
from everstep.state.layout.shards import Placed, ShardLayout

__all__ = [
    "OBJECT_PART_BYTES",
    "PROTOCOL",
    "begin_to_wire",
    "identity_from_wire",
    "identity_to_wire",
    "layout_from_wire",
    "layout_to_wire",
    "parts_of",
]

PROTOCOL = 10
"""Trainer and keeper must have the same; the two may be of different installations."""

OBJECT_PART_BYTES = 16 << 20


def parts_of(data: bytes) -> Iterator[bytes]:
    """``data`` in parts that fit into messages; at least one, though it may be empty."""
    for begin in range(0, max(1, len(data)), OBJECT_PART_BYTES):
        yield data[begin : begin + OBJECT_PART_BYTES]


def identity_to_wire(identity: ShardIdentity) -> dict[str, Any]:
    """A base's identity as a message holds it."""
    fields = asdict(identity)
    del fields["static"]  # of a file, and never of a base
    return fields


def identity_from_wire(fields: Mapping[str, Any]) -> ShardIdentity:
    """The inverse of :func:`identity_to_wire`."""
    common = tuple(InCommon(**one) for one in fields["common"])
    return ShardIdentity(**{**fields, "common": common})


def begin_to_wire(capture: Capture) -> dict[str, Any]:
    """That a capture has begun; its layout was told before."""
    return {
        "kind": "begin",
        "number": capture.number,
        "layout": capture.layout,
        "identity": identity_to_wire(capture.plan.identity),
        "offset": capture.offset,
        "word": capture.word,
        "stream": capture.stream,
        "parked": capture.parked,
        "in_memory": capture.save.in_memory,
    }


def layout_to_wire(plan: BasePlan) -> dict[str, Any]:
    """Everything of a plan that is the same for all bases of this layout."""
    return {
        "shards": [
            {
                "name": shard.name,
                "aliases": dict(shard.aliases),
                "room_bytes": shard.room_bytes,
                "objects_bytes": shard.objects_bytes,
                "static": shard.static,
                "placed": [_placed_to_wire(place) for place in shard.layout.placed],
            }
            for shard in plan.shards
        ],
        "kinds": dict(plan.kinds),
    }


def layout_from_wire(fields: Mapping[str, Any], identity: ShardIdentity) -> BasePlan:
    """The plan of one base of a layout."""
    shards = tuple(
        ShardPlan(
            shard["name"],
            ShardLayout(tuple(_placed_from_wire(place) for place in shard["placed"])),
            shard["aliases"],
            shard["room_bytes"],
            shard["objects_bytes"],
            static=shard["static"],
        )
        for shard in fields["shards"]
    )
    return BasePlan(identity, shards, fields["kinds"])


def _placed_to_wire(place: Placed) -> list[Any]:
    e = place.entry
    return [
        place.begin,
        place.end,
        e.name,
        e.dtype,
        e.shape,
        e.global_shape,
        e.global_offset,
        e.placement,
        e.stride,
        e.logical_dtype,
    ]


def _placed_from_wire(fields: Sequence[Any]) -> Placed:
    begin, end, name, dtype, shape, whole, offset, placement, stride, logical = fields
    entry = Entry(
        name,
        dtype,
        tuple(shape),
        tuple(whole),
        tuple(offset),
        placement,
        None if stride is None else tuple(stride),
        logical,
    )
    return Placed(entry, begin, end)
