"""Capture plan bound to the tensors of a state: which copies are issued at which event of a
step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from everstep.capture.dispatch import Duplicates, Unit
from everstep.capture.lanes.batches import Batch, plan_batches
from everstep.capture.step_events import Observed
from everstep.plan.schedule.timeline import StepPlan
from everstep.trainer.base.prepared_base import PreparedBase

_SLOT_BYTES = 512
_MISSES_MAX = 4


class CopySource(NamedTuple):
    """Copy that is made in one piece unless the plan cuts it."""

    owner: str
    batch: Batch

    @property
    def divisible(self) -> bool:
        """Return True if the plan may cut this copy into chunks."""
        return self.batch.rearranged is None and len(self.batch.sources) == 1

    @property
    def place(self) -> tuple[str, int, int, bool]:
        """Return owner, byte range in the block, and divisibility; equal places can be rebound."""
        return self.owner, self.batch.begin, self.batch.end, self.divisible


@dataclass(slots=True)
class BoundPlan:
    """Plan of a step, bound to tensors.

    Attributes:
        units: copies issued together, in order.
        plan: the plan; None while the first steps are observed.
        keys: sequence of events of the steps it is for.
        updates: index of the event at which each optimizer, by key, updates first.
        duplicates: device memory of duplicated tensors (Checkflow's snapshots).
        issuing_events: indices of the events at which units are issued.
        misses: latest consecutive steps that did not wait as predicted.
        misses_max: number of misses after which the plan is made again.
    """

    units: tuple[Unit, ...]
    plan: StepPlan | None = None
    keys: tuple[int, ...] = ()
    updates: Mapping[str, int] = field(default_factory=dict)
    duplicates: Duplicates = field(default_factory=lambda: Duplicates({}))
    issuing_events: frozenset[int] = frozenset()
    misses: list[Observed] = field(default_factory=list)
    misses_max: int = _MISSES_MAX


def copy_sources(
    prepared: PreparedBase, tensors: Mapping[str, torch.Tensor]
) -> Iterator[CopySource]:
    """Yield the copies that may run after the step mark, separately for each optimizer."""
    owners: dict[str, set[str]] = {}
    for name in prepared.gated:
        owner = prepared.shape.owners[name].optimizer or ""
        owners.setdefault(owner, set()).add(name)
    for owner, names in owners.items():
        for shard, offset in zip(prepared.shards, prepared.offsets, strict=True):
            for batch in plan_batches(shard.layout, tensors, names, offset=offset):
                yield CopySource(owner, batch)


def all_at_mark(sources: Sequence[CopySource], updates: Mapping[str, int]) -> tuple[Unit, ...]:
    """Return units that issue everything at the step mark, the earliest known update first."""
    by_owner: dict[str, list[Batch]] = {}
    for source in sources:
        by_owner.setdefault(source.owner, []).append(source.batch)
    # Larger than any event: entries whose update was not observed go last.
    last = len(by_owner) + max(updates.values(), default=0)
    order = sorted(by_owner, key=lambda owner: updates.get(owner, last))
    return tuple(Unit(0, owner, tuple(by_owner[owner])) for owner in order)


def plan_units(
    plan: StepPlan, sources: Sequence[CopySource]
) -> tuple[tuple[Unit, ...], dict[torch.device, int]]:
    """Return the copies of a plan, and the sizes of duplicates."""
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
    for (event, owner, duplicated), found in groups:
        # In file order: Dispatch.admit() takes the end of the last batch as the end of the unit.
        found.sort(key=lambda pair: pair[0].begin)
        batches = tuple(batch for batch, _ in found)
        slots = tuple(_slot(batch, sizes) for batch in batches) if duplicated else ()
        planned_s = tuple(times for _, times in found)
        units.append(Unit(event, owner, batches, slots, planned_s))
    return tuple(units), sizes


def _slot(batch: Batch, sizes: dict[torch.device, int]) -> int:
    device = (batch.sources[0] if batch.rearranged is None else batch.rearranged).device
    begin = sizes.get(device, 0)
    sizes[device] = begin + -(-(batch.end - batch.begin) // _SLOT_BYTES) * _SLOT_BYTES
    return begin


def _cut(batch: Batch, begin: int, end: int) -> Batch:
    if begin == 0 and end == batch.end - batch.begin:
        return batch
    return Batch(batch.begin + begin, batch.begin + end, (batch.sources[0][begin:end],))


def allocate_duplicates(sizes: Mapping[torch.device, int]) -> tuple[Duplicates, float] | None:
    """Allocate device memory for duplicates.

    Returns:
        The memory, and the speed of duplication where it blocks the training thread (in host
        memory; infinite on devices), in bytes per second. None if there is not enough memory.
    """
    try:
        memory = {
            device: torch.zeros(size, dtype=torch.uint8, device=device)
            for device, size in sizes.items()
        }
    # Host memory that is short raises a plain RuntimeError.
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
