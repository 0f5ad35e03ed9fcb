"""Times of planned captures: when each copy ran, next to when it was planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from everstep.capture.dispatch import Dispatch, Unit
from everstep.state.layout.shards import overlaps
from everstep.trainer.base.prepared_base import PreparedBase
from everstep.trainer.schedule.bound_plan import BoundPlan

__all__ = ["ExecutedCapture", "ScheduleStats", "TensorTimes", "link_bandwidth", "tensor_times"]


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


@dataclass(frozen=True, slots=True)
class ExecutedCapture:
    """Complete capture, without the memory it filled.

    Attributes:
        bound_plan: plan it followed.
        prepared: layout of the base.
        units: its copies.
        begun_s, issued_s, arrived_s: see :class:`.Dispatch`.
    """

    bound_plan: BoundPlan
    prepared: PreparedBase
    units: Sequence[Unit]
    begun_s: float
    issued_s: Sequence[float | None]
    arrived_s: Sequence[Sequence[float]]

    @classmethod
    def of(
        cls, dispatch: Dispatch, bound_plan: BoundPlan, prepared: PreparedBase
    ) -> ExecutedCapture:
        """Return the record of a capture whose copies are complete."""
        return cls(
            bound_plan,
            prepared,
            dispatch.units,
            dispatch.begun_s,
            tuple(dispatch.issued_s),
            tuple(tuple(arrived) for arrived in dispatch.arrived_s),
        )


def link_bandwidth(executed: ExecutedCapture) -> float | None:
    """Return bytes per second while copies were in progress; None if nothing was copied."""
    busy_s = size_bytes = 0.0
    for start_s, end_s, number in _busy_intervals(executed):
        busy_s += end_s - start_s
        size_bytes += sum(batch.end - batch.begin for batch in executed.units[number].batches)
    return size_bytes / busy_s if busy_s > 0 and size_bytes else None


def tensor_times(executed: ExecutedCapture) -> dict[str, TensorTimes]:
    """Return the first start and the last end of the copies of each entry, by name."""
    found: dict[str, TensorTimes] = {}
    for begin, end, times in _batch_times(executed):
        for shard, offset in zip(executed.prepared.shards, executed.prepared.offsets, strict=True):
            placed = [place for place in shard.layout.placed if place.end > place.begin]
            ends = [place.end for place in placed]
            for place, _, _ in overlaps(placed, ends, begin - offset, end - begin):
                name = place.entry.name
                before = found.get(name)
                found[name] = times if before is None else _merge_times(before, times)
    return found


def _busy_intervals(executed: ExecutedCapture) -> Iterator[tuple[float, float, int]]:
    """Yield start, end and number of each unit's copies, which run one after another on one
    queue."""
    free_s = executed.begun_s
    ends = [(arrived[-1], number) for number, arrived in enumerate(executed.arrived_s) if arrived]
    for end_s, number in sorted(ends):
        issued_s = executed.issued_s[number]
        assert issued_s is not None
        yield max(free_s, issued_s), end_s, number
        free_s = end_s


def _batch_times(executed: ExecutedCapture) -> Iterator[tuple[int, int, TensorTimes]]:
    """Yield range in the block, and times, of each batch."""
    zero_s = executed.begun_s
    for start_s, _, number in _busy_intervals(executed):
        unit = executed.units[number]
        arrived = executed.arrived_s[number]
        for place, batch in enumerate(unit.batches):
            # A device may report progress less often than after each batch.
            end_s = arrived[place] if len(arrived) == len(unit.batches) else arrived[-1]
            planned: tuple[float | None, float | None] = None, None
            if executed.bound_plan.planned_s:
                planned = executed.bound_plan.planned_s[number][place]
            times = TensorTimes(*planned, start_s - zero_s, end_s - zero_s, bool(unit.slots))
            yield batch.begin, batch.end, times
            start_s = end_s


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
