"""Bases over several steps of several ranks, made in one process rank by rank, that whoever
restores them makes whole (see :mod:`tests.support.ranks.sharding`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from everstep.capture.lane import LiveBody
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.format.log import LogRecord, RecordHead, plan_segment
from everstep.format.names import base_dir, marker_name, shard_name, timeline_dir
from everstep.format.records import Marker, TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.keeper.persist.shard_writer import ShardWriter
from everstep.link.recordable import Layouts, state_digest
from everstep.restore.load.load import CompleteRank, Reads
from everstep.restore.offline.rank_files import complete_rank_files
from everstep.run.scan import BaseFound
from everstep.seams import PosixFileSystem
from everstep.seams.fingerprint import fingerprint
from everstep.seams.progress import silent
from everstep.state.layout.entries import UPDATE_OBJECT
from everstep.state.layout.shards import ShardLayout
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.state.values.objects import encode
from everstep.state.values.tensors import local_tensor
from everstep.tiers.durable_files import SlotStore, ensure_dirs
from everstep.trainer.log.update_inputs import InputReader
from everstep.trainer.multistep.plan import capturable_units
from everstep.trainer.multistep.window import samples_at_mark
from tests.support.ranks.relogged import record_of, train
from tests.support.ranks.sharding import STEP, TIMEOUT_S, Values, as_rank, build, found

__all__ = ["LAST", "PARTS", "TRAINED", "Records", "fuzzy_base", "trained_to_last", "whole"]

PARTS = 3
LAST = STEP + PARTS - 1
TRAINED = TimelineRecord("run", 1, None, 0, True, 1, fingerprint(), 0.0)
Records = list[LogRecord]
Spoil = Callable[[int, Records], Sequence[LogRecord]]
Seen = Callable[[int, dict[str, int]], dict[str, int]]


def whole(ring: ChunkRing, trained: TimelineRecord | None = TRAINED) -> CompleteRank:
    """As whoever restores makes files whole."""
    return partial(complete_rank_files, reads=Reads(ring, TIMEOUT_S), trained=trained)


def trained_to_last(layout: str, info: RankInfo) -> Values:
    """A rank of a job that nobody disturbed."""
    values = build(layout, info, 3)
    for step in range(STEP + 1, LAST + 1):
        _step(values, step)
    return values


def fuzzy_base(
    run: Path,
    layout: str,
    world: int,
    ring: ChunkRing,
    *,
    spoil: Spoil = lambda rank, records: records,
    seen: Seen = lambda rank, lsns: lsns,
    begins: Callable[[int], int] = lambda rank: STEP + rank % 2,
    near: Callable[[int], tuple[int, ...] | None] = lambda rank: None,
    change: Callable[[Values, RankInfo, int], None] = lambda values, info, step: None,
) -> BaseFound:
    """A base of step ``LAST``.

    Args:
        spoil: what becomes of a rank's records.
        seen: what becomes of the updates that its entries have seen.
        begins: at which step mark a rank takes its first part; ``LAST``: it takes all there.
        near: the ranks that write to the same disk as one.
        change: made to a rank's state behind each update.
    """
    markers = []
    for rank in range(world):
        with as_rank(rank, world) as info:
            about = dataclasses.replace(info, followed=True, near=near(rank))
            markers.append(_write(run, layout, about, ring, spoil, seen, begins(rank), change))
    base = found(run, markers, LAST)
    assert base.manifest is not None
    Path(base.path / "manifest.json").write_bytes(base.manifest.encode())
    return base


def _step(values: Values, step: int) -> None:
    train(values, step)
    values["optimizer"].step()
    values["own"]["n"] = step


def _write(
    run: Path,
    layout: str,
    info: RankInfo,
    ring: ChunkRing,
    spoil: Spoil,
    seen: Seen,
    begin: int,
    change: Callable[[Values, RankInfo, int], None],
) -> Marker:
    torch.manual_seed(5)  # what models draw for their weights shows in what is saved
    values = build(layout, info, 3)
    state = State(values, ranks=info)
    consumption, layouts = InputReader(state), Layouts()
    units = capturable_units(state, state.survey().shape)
    parts = LAST - begin
    early = {begin + n: units[n :: parts + 1] for n in range(parts)}
    held: dict[str, torch.Tensor] = {}
    lsns: dict[str, int] = {}
    captured: set[str] = set()
    records: Records = []
    digest = state_digest(state.survey().shape, consumption.regroup())
    for step in range(STEP, LAST + 1):
        if step > STEP:
            head = RecordHead("update", 1, step, step, digest)
            records += _update(values, consumption, frozenset(captured), head) if held else []
            if not held:
                _step(values, step)
            values["own"]["n"] = step
            change(values, info, step)
        survey = state.survey()
        mine = [name for unit in early.get(step, ()) for name in unit.entries]
        captured |= {unit.parameter for unit in early.get(step, ())}
        if step == LAST:
            spots = samples_at_mark(set(held), survey.tensors, step)
            mine = [entry.name for entry in survey.shape.entries if entry.name not in held]
        for name in mine:
            held[name] = local_tensor(survey.tensors[name]).detach().clone()
            lsns[name] = step
    objects, shape = survey.objects(), survey.shape
    identity = ShardIdentity("run", 1, LAST, LAST, info.rank, info.world, True)
    sizes = {name: len(data) for name, data in objects.items()}
    (shard,) = plan_files(identity, shape.entries, shape.aliases, sizes)
    bodies: list[Any] = [LiveBody(shard.layout, held, objects)]
    shards = [shard]
    if parts:
        shards = [dataclasses.replace(shard, lsns=seen(info.rank, lsns))]
        head = RecordHead("mark", 1, LAST, LAST, digest)
        mark = record_of(head, layouts.of(spots), objects, spots)
        plan, body = plan_segment(identity, spoil(info.rank, [*records, mark]))
        shards.append(dataclasses.replace(plan, name=shard_name(info.rank, 1)))
        bodies.append(body)
    filesystem, directory = PosixFileSystem(), base_dir(run, 1, LAST)
    ensure_dirs(filesystem, directory)
    slots = SlotStore(filesystem, timeline_dir(run, 1) / "slots")
    writer = ShardWriter(filesystem, run, ring, slots, timeout_s=TIMEOUT_S)
    written = writer.write(BasePlan(identity, tuple(shards)), bodies, silent)
    files = tuple(one.record for one in written)
    marker = Marker("run", 1, LAST, LAST, info.rank, info.world, True, files)
    Path(directory / marker_name(info.rank)).write_bytes(marker.encode())
    return marker


def _update(
    values: Values, consumption: InputReader, captured: frozenset[str], head: RecordHead
) -> Records:
    """Makes a step; returns the record of what of it concerns the captured parameters."""
    records: Records = []

    def record(*_: Any) -> None:
        if not captured:
            records.append(record_of(head, ShardLayout(()), {}, {}))
            return
        consumed = consumption.look("optimizer", captured)
        objects = {UPDATE_OBJECT: encode(consumed.about, checked=True)}
        records.append(record_of(head, consumed.layout, objects, consumed.tensors))

    train(values, head.step)
    handle = values["optimizer"].register_step_pre_hook(record)
    values["optimizer"].step()
    handle.remove()
    return records
