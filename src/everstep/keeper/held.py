"""A captured base on its way to a training process that was restarted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from everstep.arena.memory import Arena
from everstep.format.log import LogRecord
from everstep.format.records import FileRecord, Marker
from everstep.keeper.capture import Capture, shard_offsets
from everstep.keeper.log import records_from_wire
from everstep.keeper.messages import identity_from_wire, identity_to_wire
from everstep.recover.held import HeldBase, Recalled
from everstep.tiers.memory import MemoryFile

__all__ = ["base_from_wire", "base_to_wire", "recalled_from_wire"]


def base_to_wire(capture: Capture) -> tuple[dict[str, Any], list[bytes]]:
    """Where a captured base lies in the arena; and what makes files of it, headers and objects,
    which are named by their place in the list: they may be too large for one message."""
    offsets, _ = shard_offsets(capture.plan)
    blobs: list[bytes] = []
    shards = []
    for shard, written, offset in zip(capture.plan.shards, capture.written, offsets, strict=True):
        first = len(blobs)
        blobs.append(written.header)
        if shard is capture.plan.shards[-1]:
            blobs += capture.incoming.objects().values()
        shards.append(
            {
                "record": dataclasses.asdict(written.record),
                "offset": capture.offset + offset,
                "tensors_bytes": shard.layout.size_bytes,
                "header": first,
                "objects": list(range(first + 1, len(blobs))),
            }
        )
    identity = identity_to_wire(capture.plan.identity)
    return {"identity": identity, "durable": capture.durable, "shards": shards}, blobs


def base_from_wire(
    fields: Mapping[str, Any], blobs: Mapping[int, bytes | bytearray], arena: Arena
) -> HeldBase:
    """The base, over the memory of ``arena``."""
    files = []
    for shard in fields["shards"]:
        begin = shard["offset"]
        tensors = arena.view[begin : begin + shard["tensors_bytes"]]
        objects = [memoryview(blobs[number]) for number in shard["objects"]]
        parts = [memoryview(blobs[shard["header"]]), tensors, *objects]
        files.append((MemoryFile(parts), FileRecord(**shard["record"])))
    identity = identity_from_wire(fields["identity"])
    marker = Marker(
        identity.run,
        identity.timeline,
        identity.step,
        identity.lsn,
        identity.rank,
        identity.world,
        identity.exact,
        tuple(record for _, record in files),
    )
    return HeldBase(marker, tuple(files), fields["durable"])


def recalled_from_wire(fields: Mapping[str, Any], arenas: Sequence[Arena]) -> Recalled:
    """What a keeper has in memory: its answer to ``recall``, over the arenas that came with it."""
    blobs, base = fields["blobs"], None
    if fields["base"] is not None:
        base = base_from_wire(fields["base"], blobs, arenas[fields["base"]["arena"]])
    records: list[LogRecord] = []
    for number, place in fields["logs"]:
        index = msgpack.unpackb(bytes(blobs[number]), strict_map_key=False)
        records += records_from_wire(index, arenas[place])
    return Recalled(base, tuple(records))
