"""Bases and logs of jobs of several ranks, made in one process rank by rank, and redone by jobs of
another number of ranks, or another layout (see :mod:`tests.support.ranks.sharding`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

from everstep.capture.mark_samples import MarkSampler, mark_entries, sampled_bits
from everstep.commit.lineage import BaseId
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.format.records import TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.link.recordable import Layouts, state_digest
from everstep.restore.load.saved_ranks import SavedLayout, SavedRanks
from everstep.restore.reshard.replay import replay_resharded
from everstep.restore.start.roll_forward import Restored
from everstep.run.scan import BaseFound
from everstep.seams.fingerprint import fingerprint
from everstep.state.layout.placement import Box
from everstep.state.layout.shards import ShardLayout
from everstep.state.ranks.log_shares import updated_elsewhere
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.state.values.objects import encode
from everstep.state.values.tensors import host_bytes, is_dtensor, local_box, local_tensor
from everstep.trainer.log.update_inputs import InputReader, RankInputReader, UpdateInputs
from tests.support.ranks.sharding import STEP, Values, as_rank, build, found, load, open_all, write

__all__ = ["Logs", "Looks", "gradient", "logged", "record_of", "records_of", "redone", "train"]

Logs = dict[tuple[int, int], list[LogRecord]]
"""Updates and mark, by rank and step."""

Compress = Callable[[Any], Any]
Change = Callable[[Values, RankInfo], None]


class Looks(Protocol):
    """As :class:`everstep.trainer.log.update_inputs.LogShare`."""

    def look(
        self, consumption: InputReader, key: str
    ) -> tuple[UpdateInputs, str, Mapping[str, Any]]:
        """What is recorded of an update."""
        ...


def gradient(name: str, shape: Sequence[int], step: int) -> torch.Tensor:
    """What a whole parameter's gradient is in a step: other elements everywhere."""
    count = int(torch.Size(shape).numel())
    seed = sum(map(ord, name)) + 31 * step
    return (torch.arange(float(count)) * 0.7 + seed).sin().reshape(tuple(shape))


def train(values: Values, step: int) -> None:
    """Gives every parameter this rank's part of its gradient; no update."""
    for name, parameter in values["model"].named_parameters():
        whole = gradient(name.removeprefix("module."), parameter.shape, step)
        box = local_box(parameter)
        part = whole[box.slices_in(Box((0,) * whole.dim(), tuple(whole.shape)))].contiguous()
        if is_dtensor(parameter):
            kind: Any = distributed.tensor.DTensor
            part = kind.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=whole.stride(),
            )
        parameter.grad = part


def logged(
    run: Path,
    layout: str,
    world: int,
    ring: ChunkRing,
    steps: int,
    *,
    seed: int = 3,
    optimizer: Callable[[Any], Any] | None = None,
    compress: Compress | None = None,
    change: Change = lambda values, info: None,
) -> tuple[BaseFound, Logs]:
    """A base of all ranks, and what each of them logs in as many steps behind it.

    Args:
        compress: makes a Compressor of the optimizer.
        change: made to a rank's state behind each update.
    """
    markers, logs = [], Logs()
    for rank in range(world):
        with as_rank(rank, world) as info:
            values = _values(layout, info, seed, optimizer, compress)
            state = State(values, ranks=info)
            markers.append(write(run, state, ring))
            for step, records in records_of(values, state, steps, change):
                logs[rank, step] = records
    return found(run, markers), logs


def records_of(
    values: Values,
    state: State,
    steps: int,
    change: Change = lambda values, info: None,
    *,
    part: Looks | None = None,
) -> Iterator[tuple[int, list[LogRecord]]]:
    """Trains a rank, and gives what it logs of each step: update and mark.

    Args:
        change: as for :func:`logged`.
        part: says what is recorded of an update; None: this rank's part.
    """
    consumption, layouts = InputReader(state), Layouts()
    part = part or RankInputReader(state)
    for step in range(STEP + 1, STEP + 1 + steps):
        train(values, step)
        shape = state_digest(state.survey().shape, consumption.regroup())
        head = RecordHead("update", 1, step, step, shape)
        update = _update(values["optimizer"], consumption, part, head)
        values["own"]["n"] = step
        change(values, state.ranks)
        yield step, [update, _mark(state, layouts, step, shape)]


def redone(
    base: BaseFound,
    logs: Logs,
    layout: str,
    info: RankInfo,
    ring: ChunkRing,
    steps: int,
    *,
    optimizer: Callable[[Any], Any] | None = None,
    compress: Compress | None = None,
    together: bool = True,
    asked: set[tuple[int, int]] | None = None,
) -> tuple[Values, Restored]:
    """A rank of another job, behind base and log.

    Args:
        asked: gets whose logs were asked for, and of which step.
    """
    values = _values(layout, info, 9, optimizer, compress)
    state = State(values, ranks=info)
    loaded = load(base, state, ring)
    if loaded.layout is None:  # as many ranks, in another layout
        with open_all(base) as opened:
            layout_then = SavedLayout.of(SavedRanks(opened), opened, state.optimizers)
        loaded = replace(loaded, layout=layout_then)
    restored = Restored(base, loaded, base.id, loaded.marker.lsn)

    def fetch(ranks: Sequence[int], timeline: int, step: int) -> Mapping[int, list[LogRecord]]:
        if asked is not None:
            asked.update((rank, step) for rank in ranks)
        records = {rank: logs[rank, step] for rank in ranks}
        for record in (one for own in records.values() for one in own):
            record.verify()
        return records

    numbers = [(1, step) for step in range(STEP + 1, STEP + 1 + steps)]
    record = TimelineRecord("run", 1, None, 0, True, 1, fingerprint(), 0.0)
    about = restored, numbers, state, fetch, {1: record}
    replay_resharded(*about, together=together, alive=lambda: None)
    assert restored.end == BaseId(1, STEP + restored.replayed) or not restored.replayed
    return values, restored


def _values(
    layout: str,
    info: RankInfo,
    seed: int,
    optimizer: Callable[[Any], Any] | None,
    compress: Compress | None,
) -> Values:
    values = build(layout, info, seed)
    if optimizer is not None:
        values["optimizer"] = optimizer(values["model"].parameters())
        train(values, 0)
        values["optimizer"].step()
    if compress is not None:
        values["compressor"] = compress(values["optimizer"])
        train(values, 0)  # residuals are there
        values["optimizer"].step()
    return values


def _update(
    optimizer: torch.optim.Optimizer, consumption: InputReader, part: Looks, head: RecordHead
) -> LogRecord:
    """Makes a step; returns the record of what it consumes."""
    records: list[LogRecord] = []

    def record(*_: Any) -> None:
        consumed, name, about = part.look(consumption, "optimizer")
        objects = {name: encode(about, checked=True)}
        records.append(record_of(head, consumed.layout, objects, consumed.tensors))

    handle = optimizer.register_step_pre_hook(record)
    optimizer.step()
    handle.remove()
    (found,) = records
    return found


def _mark(state: State, layouts: Layouts, step: int, shape: str) -> LogRecord:
    survey = state.survey()
    owners = survey.shape.owners
    named = {e.name: survey.tensors[e.name] for e in survey.shape.entries}
    elsewhere = updated_elsewhere(state)
    replayed = {
        name: tensor
        for name, tensor in named.items()
        if owners[name].kind == "replayed" and name not in elsewhere
    }
    spots = MarkSampler(replayed)
    named = {name: t for name, t in named.items() if owners[name].in_marks}
    named |= mark_entries(spots, sampled_bits(spots, sorted(survey.tensors)), step)
    head = RecordHead("mark", 1, step, step, shape)
    return record_of(head, layouts.of(named), survey.objects(), named)


def record_of(
    head: RecordHead,
    layout: ShardLayout,
    objects: Mapping[str, bytes],
    tensors: Mapping[str, torch.Tensor],
) -> LogRecord:
    """A record of these tensors, of DTensors this rank's parts."""
    data = bytearray(layout.size_bytes)
    for place in layout.placed:
        tensor = local_tensor(tensors[place.entry.name]).detach().contiguous()
        data[place.begin : place.end] = host_bytes(tensor)
    view = memoryview(data)
    return LogRecord(head, layout, objects, view, record_digest(view, objects))


def only(run: Path, step: int) -> None:
    """Leaves no later base, so that it must be by replay, from one program to the other."""
    for base in run.glob("timeline-*/base/*"):
        if int(base.name) > step:
            shutil.rmtree(base)
