"""A capture plan bound to the tensors of a state: which copies are issued at which event."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from everstep.capture.events import Observed
from everstep.capture.lanes.batches import Batch, plan_batches
from everstep.capture.scheduled import Duplicates, Unit
from everstep.plan.schedule.timeline import StepPlan
from everstep.trainer.base.prepared import Prepared

__all__ = ["Program", "Source", "lazily", "memory_of", "sources_of", "units_of"]

_SLOT_BYTES = 512
_OFF = 4

PlannedTimes = tuple[tuple[tuple[float, float], ...], ...]
"""Start and end of each batch of each unit, in seconds behind the step mark."""


class Source(NamedTuple):
    """What is copied in one go, unless the plan cuts it."""

    owner: str
    batch: Batch

    @property
    def divisible(self) -> bool:
        return self.batch.rearranged is None and len(self.batch.sources) == 1

    @property
    def place(self) -> tuple[str, int, int, bool]:
        return self.owner, self.batch.begin, self.batch.end, self.divisible


@dataclass(slots=True)
class Program:
    """A plan, bound to the tensors as they are.

    Attributes:
        plan: None while the steps are being learnt.
        keys: the sequence of events that it is for.
        updates: event at which each optimizer, by key, updates first.
        planned_s: start and end of each batch of each unit.
        asked: events at which units are issued.
        off: newest steps in a row that have not waited as predicted.
        off_max: with so many of them it is made anew.
    """

    units: tuple[Unit, ...]
    plan: StepPlan | None = None
    keys: tuple[int, ...] = ()
    updates: Mapping[str, int] = field(default_factory=dict)
    planned_s: PlannedTimes = ()
    duplicates: Duplicates = field(default_factory=lambda: Duplicates({}))
    asked: frozenset[int] = frozenset()
    off: list[Observed] = field(default_factory=list)
    off_max: int = _OFF


def sources_of(prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> Iterator[Source]:
    """What is copied behind the step mark, apart for each optimizer."""
    owners: dict[str, set[str]] = {}
    for name in prepared.gated:
        owner = prepared.shape.owners[name].optimizer or ""
        owners.setdefault(owner, set()).add(name)
    for owner, names in owners.items():
        for shard, offset in zip(prepared.shards, prepared.offsets, strict=True):
            for batch in plan_batches(shard.layout, tensors, names, offset=offset):
                yield Source(owner, batch)


def lazily(sources: Sequence[Source], updates: Mapping[str, int]) -> tuple[Unit, ...]:
    """Everything at the mark: the earliest update first, as far as that is known."""
    by_owner: dict[str, list[Batch]] = {}
    for source in sources:
        by_owner.setdefault(source.owner, []).append(source.batch)
    last = len(by_owner) + max(updates.values(), default=0)
    order = sorted(by_owner, key=lambda owner: updates.get(owner, last))
    return tuple(Unit(0, owner, tuple(by_owner[owner])) for owner in order)


def units_of(
    plan: StepPlan, sources: Sequence[Source]
) -> tuple[tuple[Unit, ...], tuple[tuple[tuple[float, float], ...], ...], dict[torch.device, int]]:
    """The copies of a plan, when each batch of them is planned, and the memory of duplicates."""
    groups: list[tuple[tuple[int, str, bool], list[tuple[Batch, tuple[float, float]]]]] = []
    for departure in plan.departures:
        source = sources[departure.chunk.item]
        key = departure.event, source.owner, departure.duplicated
        if not groups or groups[-1][0] != key:
            groups.append((key, []))
        batch = _cut(source.batch, departure.chunk.begin, departure.chunk.end)
        groups[-1][1].append((batch, (departure.start_s, departure.end_s)))
    sizes: dict[torch.device, int] = {}
    units = []
    planned_s = []
    for (event, owner, duplicated), found in groups:
        found.sort(key=lambda pair: pair[0].begin)
        batches = tuple(batch for batch, _ in found)
        slots = tuple(_slot(batch, sizes) for batch in batches) if duplicated else ()
        units.append(Unit(event, owner, batches, slots))
        planned_s.append(tuple(times for _, times in found))
    return tuple(units), tuple(planned_s), sizes


def _slot(batch: Batch, sizes: dict[torch.device, int]) -> int:
    device = (batch.sources[0] if batch.rearranged is None else batch.rearranged).device
    begin = sizes.get(device, 0)
    sizes[device] = begin + -(-(batch.end - batch.begin) // _SLOT_BYTES) * _SLOT_BYTES
    return begin


def _cut(batch: Batch, begin: int, end: int) -> Batch:
    if begin == 0 and end == batch.end - batch.begin:
        return batch
    return Batch(batch.begin + begin, batch.begin + end, (batch.sources[0][begin:end],))


def memory_of(sizes: Mapping[torch.device, int]) -> tuple[Duplicates, float] | None:
    """Memory for duplicates, and how fast they are made where that takes the training thread's
    time; None where there is not enough."""
    try:
        memory = {
            device: torch.zeros(size, dtype=torch.uint8, device=device)
            for device, size in sizes.items()
        }
    except (torch.OutOfMemoryError, RuntimeError):
        return None
    speed = float("inf")
    for device, some in memory.items():
        half = some.numel() // 2
        if device.type == "cpu" and half:
            start_s = time.perf_counter()
            some[:half].copy_(some[half : 2 * half])
            speed = half / max(1e-9, time.perf_counter() - start_s)
    return Duplicates(memory), speed
