"""Messages that hand captures and logs in a keeper's memory to a restarted training process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgpack

from everstep.arena import Arena
from everstep.commit.log_reach import LogRun
from everstep.format import FileRecord, Marker
from everstep.format.log import LogRecord
from everstep.keeper.log.log_store import records_from_wire
from everstep.link.capture import Capture, shard_offsets
from everstep.link.messages import identity_from_wire, identity_to_wire
from everstep.restore.fetch import HeldBase, KeeperContents, PackedSteps, PeerLog
from everstep.restore.fetch.held import PeerCopy, size_of
from everstep.tiers import MemoryFile


def base_to_wire(capture: Capture) -> tuple[dict[str, Any], list[bytes]]:
    """Encode a captured base: the slices of the arena that it consists of, and its headers and
    objects.

    Returns:
        Fields of the message, and the blobs. The fields name blobs by their index in the list;
        blobs are sent on their own, as they may be too large for one message.
    """
    blobs: list[bytes] = []
    shards = []
    for written, body in zip(capture.written, _bodies(capture), strict=True):
        slices: list[tuple[int, int] | int] = []
        for piece in (written.header, *body):
            if isinstance(piece, bytes):
                blobs.append(piece)
                slices.append(len(blobs) - 1)
            else:
                slices.append(piece)
        shards.append({"record": dataclasses.asdict(written.record), "parts": slices})
    identity = identity_to_wire(capture.plan.identity)
    return {"identity": identity, "durable": capture.durable, "shards": shards}, blobs


def _bodies(capture: Capture) -> Iterator[list[tuple[int, int] | bytes]]:
    """Yield the body of each file: ``(offset, size)`` of slices of the arena, or bytes."""
    offsets, _ = shard_offsets(capture.plan)
    for shard, offset in zip(capture.plan.shards, offsets, strict=True):
        body: list[tuple[int, int] | bytes] = []
        body.append((capture.offset + offset, shard.layout.size_bytes))
        if shard is capture.plan.objects_in:
            body += capture.incoming.objects().values()
        yield body
    if capture.redo is not None:
        yield [*capture.redo.parts, capture.redo.body.index]


def base_from_wire(
    fields: Mapping[str, Any], blobs: Mapping[int, bytes | bytearray], arena: Arena
) -> HeldBase:
    """Decode a captured base; its bytes stay in the memory of ``arena``."""
    files = []
    for shard in fields["shards"]:
        views = []
        for piece in shard["parts"]:
            if isinstance(piece, int):
                views.append(memoryview(blobs[piece]))
            else:
                offset, size_bytes = piece
                views.append(arena.view[offset : offset + size_bytes])
        files.append((MemoryFile(views), FileRecord(**shard["record"])))
    identity = identity_from_wire(fields["identity"])
    marker = Marker.of(identity, tuple(record for _, record in files))
    return HeldBase(marker, tuple(files), fields["durable"])


def recalled_from_wire(fields: Mapping[str, Any], arenas: Sequence[Arena]) -> KeeperContents:
    """Decode a keeper's reply to ``recall``, over the arenas that came with it."""
    blobs = fields["blobs"]
    base = None
    if fields["base"] is not None:
        base = base_from_wire(fields["base"], blobs, arenas[fields["base"]["arena"]])
    records: list[LogRecord] = []
    for number, place in fields["logs"]:
        index = msgpack.unpackb(bytes(blobs[number]), strict_map_key=False)
        records += records_from_wire(index, arenas[place])
    copies = tuple(_copy_from_wire(copy, arenas) for copy in fields["copies"])
    peer_logs: list[PeerLog] = []
    for number, place in fields.get("peer_logs", ()):
        rows = msgpack.unpackb(bytes(blobs[number]))
        peer_logs += [_log_from_wire(row, arenas[place]) for row in rows]
    served = {number: bytes(record) for number, record in fields.get("served", ())}
    return KeeperContents(base, tuple(records), copies, tuple(peer_logs), served)


def log_to_wire(log: PeerLog, offset: int) -> dict[str, Any]:
    """Encode the held steps of another rank's log, which begin at ``offset`` of an arena."""
    run = log.steps.run
    steps = log.steps
    return {
        "source": log.source,
        "record": log.record,
        "run": [run.timeline, run.first, run.after, run.lsns, run.shape],
        "offset": offset,
        "size_bytes": steps.memory.nbytes,
        "index_bytes": steps.index_bytes,
        "index_digest": steps.index_digest,
    }


def _log_from_wire(fields: Mapping[str, Any], arena: Arena) -> PeerLog:
    timeline, first, after, lsns, shape = fields["run"]
    run = LogRun(timeline, first, after, tuple(lsns), shape)
    memory = arena.view[fields["offset"] : fields["offset"] + fields["size_bytes"]]
    steps = PackedSteps(run, memory, fields["index_bytes"], fields["index_digest"])
    return PeerLog(fields["source"], fields["record"], steps)


def _copy_from_wire(fields: Mapping[str, Any], arenas: Sequence[Arena]) -> PeerCopy:
    marker = Marker.decode(fields["marker"], PurePath("copy"))
    return PeerCopy(marker, fields["record"], arenas[fields["arena"]].view[: size_of(marker)])
