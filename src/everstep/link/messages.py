"""Messages between trainer and keeper: plain dicts with a ``kind``, and their encoding.

Trainer to keeper:

``attach``       attach, with the size of the arena
``listen``       open a mailbox for the keepers of other ranks
``serve``        start a timeline
``layout``       layout of the files of captures to come
``begin``        a capture has begun
``object``       chunk of an encoded object
``captured``     a capture is complete
``persist``      make a capture durable that was to stay in memory only
``redo``         update that concerns a multi-step capture
``assemble``     all data of a multi-step capture was sent
``abandon``      the rest of a capture will not be sent
``ask``          request a base from the replica
``no_replica``   end the replica
``forget``       a capture held in memory is about to be overwritten
``log_layout``   number of a record layout, and numbers that are no longer used
``log``          a log record is complete
``forget_log``   the memory of records is about to be reused
``log_to_disk``  switch writing the log to disk on or off
``settle``       finish the captures of an earlier trainer
``recall``       request the contents of memory
``bye``          detach

From a process that is not attached: ``status``, ``stop``, ``look`` (request the contents of memory,
which stay there; the reply is ``looked``).

Keeper to trainer:

``welcome``          reply to ``attach``, with the descriptor of the arena
``refused``          reply to ``attach``: not possible
``listening``        reply to ``listen``, with the port
``durable``          a base is committed
``failed``           a base has failed
``error``            other failure
``notice``           condition that is no failure
``done``             a capture and its retention have ended
``rebuilt``          the rebuild of a multi-step capture has ended
``progress``         counters
``settled``          reply to ``settle``
``logged``           records are on disk
``peered``           a base or step is complete in the memory of other nodes
``persisted``        a base of the replica is committed
``retained``         the retention after it has ended
``asks_refused``     reply to ``ask``: not possible
``replica_stopped``  the replica has ended
``blob``             chunk of the data that ``recalled`` refers to
``recalled``         reply to ``recall``
``replaced``         another trainer has attached
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from everstep.format.header import ShardIdentity
from everstep.format.plan import BasePlan, ShardPlan
from everstep.link.capture import Capture
from everstep.state.layout.entries import Entry
from everstep.state.layout.replica_digest import ReplicaDigest
from everstep.state.layout.shards import Placed, ShardLayout

PROTOCOL = 10
"""Version of the messages. Trainer and keeper, which may come from different installations, must
have the same."""

OBJECT_PART_BYTES = 16 << 20
"""Size limit of a chunk: larger objects are sent in several messages."""


def parts_of(data: bytes) -> Iterator[bytes]:
    """Split ``data`` into chunks that fit into messages; yield at least one, which may be empty."""
    for begin in range(0, max(1, len(data)), OBJECT_PART_BYTES):
        yield data[begin : begin + OBJECT_PART_BYTES]


def identity_to_wire(identity: ShardIdentity) -> dict[str, Any]:
    """Encode the identity of a base."""
    fields = asdict(identity)
    # A property of single files; always False for a base.
    del fields["static"]
    return fields


def identity_from_wire(fields: Mapping[str, Any]) -> ShardIdentity:
    """Decode the identity of a base."""
    # msgpack returns plain lists and dicts: restore the types that identities are compared by.
    common = tuple(ReplicaDigest(**one) for one in fields["common"])
    return ShardIdentity(**{**fields, "common": common})


def begin_to_wire(capture: Capture) -> dict[str, Any]:
    """Encode the start of a capture, whose layout was sent before."""
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
    """Encode the fields of a plan that are the same for all bases of a layout."""
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
    """Return the plan of one base of a layout."""
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
    # _placed_from_wire() reads the fields in this order: a change needs another PROTOCOL.
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
