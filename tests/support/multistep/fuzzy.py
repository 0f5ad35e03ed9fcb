"""What the tests of bases share that whoever restores them makes whole: training, and spoiling."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import everstep
from everstep.capture.lane import LiveBody
from everstep.commit.lineage import BaseId
from everstep.format.header import BasePlan, ShardHeader, ShardIdentity, ShardPlan, plan_files
from everstep.format.log import LogRecord, plan_segment
from everstep.format.names import SLOTS_DIR, base_dir, shard_name, timeline_dir
from everstep.format.reader import OpenShard, read_body
from everstep.format.writer import ChunkRing
from everstep.keeper.persist.committer import OneRankCommit
from everstep.keeper.persist.shard_writer import ShardWriter
from everstep.run.fence import Fence
from everstep.run.open_base import OpenBase
from everstep.run.scan import scan_run
from everstep.run.segments import read_records
from everstep.seams import PosixFileSystem
from everstep.seams.progress import silent
from everstep.state.layout.entries import OBJECT_PREFIX
from everstep.state.layout.shards import Body
from everstep.state.values.tensors import empty_like_entry, host_bytes
from everstep.tiers.durable_files import SlotStore
from tests.support.world import TIMEOUT_S

__all__ = ["heads_on_disk", "left", "lsns_on_disk", "opened_base", "rewrite"]

Records = list[LogRecord]


def left(parts: int | str, *, overlap: bool = False) -> everstep.Method:
    """Bases over several steps that stay as they were captured."""
    return everstep.Method(
        base="multistep", parts=parts, overlap_forward=overlap, rebuild="recovery"
    )


def opened_base(run: Path, step: int, timeline: int = 1) -> OpenBase:
    filesystem = PosixFileSystem()
    bases = scan_run(filesystem, PurePath(run)).bases
    (base,) = [one for one in bases if one.id == BaseId(timeline, step)]
    return OpenBase.open(filesystem, base, rank=0)


def lsns_on_disk(run: Path, step: int) -> dict[str, int]:
    """The last update that each tensor of a base has seen."""
    opened = opened_base(run, step)
    opened.close()
    names = {place.entry.name: place.entry.lsn for place in opened.placed()}
    return {name: lsn for name, lsn in names.items() if not name.startswith(OBJECT_PREFIX)}


def heads_on_disk(run: Path, step: int) -> list[tuple[str, int, bool]]:
    """Kind and update of each record of a redo file, and whether it has anything to replay."""
    opened, ring = opened_base(run, step), ChunkRing(4, 2)
    try:
        assert opened.redo is not None
        records = _records(opened, ring)
        return [(one.head.kind, one.head.lsn, bool(one.objects)) for one in records]
    finally:
        opened.close()
        ring.close()


def rewrite(
    run: Path,
    step: int,
    *,
    records: Callable[[Records], Sequence[LogRecord]] | None = lambda found: found,
    lsns: Callable[[dict[str, int]], dict[str, int]] = lambda found: found,
) -> None:
    """Writes a base anew with another redo file, with digests that vouch for everything.

    Args:
        records: what becomes of its records; None: it has no such file.
        lsns: what becomes of the updates that its entries have seen.
    """
    opened, ring = opened_base(run, step), ChunkRing(4, 2)
    try:
        marker = opened.marker
        identity = ShardIdentity(marker.run, marker.timeline, step, marker.lsn, 0, 1, marker.exact)
        ((plan, body),) = [_shard(one[0], one[1], one[2], ring, lsns) for one in opened.shards]
        shards: list[ShardPlan] = [plan]
        bodies: list[Body] = [body]
        if records is not None:
            segment, gathered = plan_segment(identity, records(_records(opened, ring)))
            shards.append(replace(segment, name=shard_name(0, 1)))
            bodies.append(gathered)
        shutil.rmtree(base_dir(PurePath(run), marker.timeline, step))
        slots = PurePath(timeline_dir(PurePath(run), marker.timeline) / SLOTS_DIR)
        filesystem = PosixFileSystem()
        parked = SlotStore(filesystem, slots)
        writer = ShardWriter(filesystem, PurePath(run), ring, parked, timeout_s=TIMEOUT_S)
        fence = Fence(filesystem, PurePath(run), marker.timeline)
        OneRankCommit(writer, BasePlan(identity, tuple(shards)), fence).run(bodies, silent)
    finally:
        opened.close()
        ring.close()


def _records(opened: OpenBase, ring: ChunkRing) -> Records:
    assert opened.redo is not None
    return read_records(opened.redo, ring, timeout_s=TIMEOUT_S, progress=silent)


def _shard(
    file: Any,
    record: Any,
    header: ShardHeader,
    ring: ChunkRing,
    lsns: Callable[[dict[str, int]], dict[str, int]],
) -> tuple[ShardPlan, Body]:
    data = bytearray(record.length - header.room_bytes)

    def keep(begin: int, piece: memoryview) -> None:
        data[begin : begin + piece.nbytes] = piece

    shard = OpenShard(file, record, header, PurePath(record.name))
    read_body(shard, ring, timeout_s=TIMEOUT_S, progress=silent, sink=keep)
    tensors, objects = {}, {}
    for place in header.placed:
        name, piece = place.entry.name, data[place.begin : place.end]
        if name.startswith(OBJECT_PREFIX):
            objects[name] = bytes(piece)
        else:
            tensors[name] = empty_like_entry(place.entry)
            host_bytes(tensors[name])[:] = piece
    entries = [place.entry for place in header.placed if place.entry.name in tensors]
    sizes = {name: len(item) for name, item in objects.items()}
    (plan,) = plan_files(header.identity, entries, header.aliases, sizes)
    seen = lsns({entry.name: entry.lsn for entry in entries})
    plan = dataclasses.replace(plan, lsns=seen)
    return plan, LiveBody(plan.layout, tensors, objects)
