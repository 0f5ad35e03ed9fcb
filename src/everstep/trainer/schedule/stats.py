"""Times of planned captures: when each copy ran, next to when it was planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from everstep.capture.dispatch import Dispatch
from everstep.state.layout.shards import overlaps
from everstep.trainer.base.prepared_base import PreparedBase


class TensorTimes(NamedTuple):
    """Times of the copy of an entry, in seconds after the step mark.

    Attributes:
        planned_start_s, planned_end_s: planned times; None without a plan.
        start_s, end_s: measured times.
        duplicated: True if some of it was copied from a duplicate.
    """

    planned_start_s: float | None
    planned_end_s: float | None
    start_s: float
    end_s: float
    duplicated: bool


BatchTimes = tuple[int, int, TensorTimes]
"""Range of a batch in the block, and its times."""


@dataclass(frozen=True, slots=True)
class ScheduleStats:
    """Statistics of plans and captures.

    Attributes:
        captures: number of captures.
        held_step: step of the newest complete capture; None before the first.
        plans: number of plans made.
        strayed_steps: number of steps that did not follow their plan's sequence of events.
        followed_steps: number of steps that did.
        link_bytes_per_s: measured bandwidth; None before the first complete capture.
        needed_bytes_per_s: bandwidth below which training waits under any plan (Checkflow, Eq. 9);
            None without a plan.
        step_s: duration of a step without waits; None without a plan.
        predicted_wait_s: time a step waits for copies by the plan; None without a plan.
        waited_s: measured waits of the latest steps under the same plan, oldest first.
        duplicated_bytes: device memory used for duplicates.
        tensors: times of the newest complete capture, by entry.
    """

    captures: int
    held_step: int | None
    plans: int
    strayed_steps: int
    followed_steps: int
    link_bytes_per_s: float | None
    needed_bytes_per_s: float | None
    step_s: float | None
    predicted_wait_s: float | None
    waited_s: tuple[float, ...]
    duplicated_bytes: int
    tensors: Mapping[str, TensorTimes]


def batch_times(dispatch: Dispatch) -> list[BatchTimes]:
    """Return the times of each batch of a complete capture, without the memory that it filled."""
    found: list[BatchTimes] = []
    # Units run one after another on one queue.
    zero_s = start_s = dispatch.begun_s
    ends = [(arrived[-1], number) for number, arrived in enumerate(dispatch.arrived_s) if arrived]
    for _, number in sorted(ends):
        issued_s = dispatch.issued_s[number]
        assert issued_s is not None
        # A unit begins when it is issued, or when the one before it on the queue has ended.
        start_s = max(start_s, issued_s)
        unit = dispatch.units[number]
        arrived = dispatch.arrived_s[number]
        for place, batch in enumerate(unit.batches):
            # A device may report progress less often than after each batch.
            end_s = arrived[place] if len(arrived) == len(unit.batches) else arrived[-1]
            planned: tuple[float | None, float | None] = (None, None)
            if unit.planned_s:
                planned = unit.planned_s[place]
            times = TensorTimes(*planned, start_s - zero_s, end_s - zero_s, bool(unit.slots))
            found.append((batch.begin, batch.end, times))
            start_s = end_s
    return found


def link_bandwidth(batches: Iterable[BatchTimes]) -> float | None:
    """Return bytes per second while copies were in progress; None if nothing was copied."""
    busy_s = size_bytes = 0.0
    for begin, end, times in batches:
        busy_s += times.end_s - times.start_s
        size_bytes += end - begin
    return size_bytes / busy_s if busy_s > 0 and size_bytes else None


def tensor_times(
    prepared: PreparedBase, batches: Iterable[BatchTimes]
) -> Mapping[str, TensorTimes]:
    """Return the first start and the last end of the copies of each entry, by name."""
    found: dict[str, TensorTimes] = {}
    for begin, end, times in batches:
        for shard, offset in zip(prepared.shards, prepared.offsets, strict=True):
            placed = [place for place in shard.layout.placed if place.end > place.begin]
            ends = [place.end for place in placed]
            for place, _, _ in overlaps(placed, ends, begin - offset, end - begin):
                before = found.get(place.entry.name, times)
                found[place.entry.name] = _merge_times(before, times)
    return found


def _merge_times(one: TensorTimes, other: TensorTimes) -> TensorTimes:
    starts = [s for s in (one.planned_start_s, other.planned_start_s) if s is not None]
    ends = [s for s in (one.planned_end_s, other.planned_end_s) if s is not None]
    return TensorTimes(
        min(starts, default=None),
        max(ends, default=None),
        min(one.start_s, other.start_s),
        max(one.end_s, other.end_s),
        one.duplicated or other.duplicated,
    )
