"""What became of planned captures: when each copy ran, next to when it was planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from everstep.capture.scheduled import Dispatch, Unit
from everstep.state.layout.shards import overlaps
from everstep.trainer.base.prepared import Prepared
from everstep.trainer.schedule.program import Program

__all__ = ["Executed", "ScheduleStats", "TensorTimes", "link_of", "tensor_times"]


class TensorTimes(NamedTuple):
    """When the copy of an entry ran, in seconds behind the step mark.

    Attributes:
        planned_start_s, planned_end_s: None without a plan.
        duplicated: whether a part of it left from a duplicate.
    """

    planned_start_s: float | None
    planned_end_s: float | None
    start_s: float
    end_s: float
    duplicated: bool


@dataclass(frozen=True, slots=True)
class ScheduleStats:
    """What became of the plans.

    Attributes:
        captures: taken so far, of which ``held_step`` is the newest whole one's step.
        plans: made so far.
        strayed_steps: steps that did not go as their plan expected.
        followed_steps: that did.
        link_bytes_per_s: as measured; None before the first capture was whole.
        needed_bytes_per_s: below which training waits in any plan; None without a plan.
        step_s: of a step without waits; None without a plan.
        predicted_wait_s: that a step waits for copies, by the plan; None without one.
        waited_s: that the newest steps have waited, by the same plan, oldest first.
        duplicated_bytes: of device memory that is taken for duplicates.
        tensors: of the newest whole capture, by entry.
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
class Executed:
    """A capture that is whole, without the memory that it filled.

    Attributes:
        begun_s, issued_s, arrived_s: as of :class:`.Dispatch`.
    """

    program: Program
    prepared: Prepared
    units: Sequence[Unit]
    begun_s: float
    issued_s: Sequence[float | None]
    arrived_s: Sequence[Sequence[float]]

    @classmethod
    def of(cls, dispatch: Dispatch, program: Program, prepared: Prepared) -> Executed:
        """What is known of a capture whose copies are complete."""
        return cls(
            program,
            prepared,
            dispatch.units,
            dispatch.begun_s,
            tuple(dispatch.issued_s),
            tuple(tuple(arrived) for arrived in dispatch.arrived_s),
        )


def link_of(executed: Executed) -> float | None:
    """Bytes per second while copies were under way; None if there were none."""
    busy_s = size_bytes = 0.0
    for start_s, end_s, number in _busy(executed):
        busy_s += end_s - start_s
        size_bytes += sum(batch.end - batch.begin for batch in executed.units[number].batches)
    return size_bytes / busy_s if busy_s > 0 and size_bytes else None


def tensor_times(executed: Executed) -> dict[str, TensorTimes]:
    """Of each entry the first start and the last end of its parts."""
    found: dict[str, TensorTimes] = {}
    for begin, end, times in _parts(executed):
        for shard, offset in zip(executed.prepared.shards, executed.prepared.offsets, strict=True):
            placed = [place for place in shard.layout.placed if place.end > place.begin]
            ends = [place.end for place in placed]
            for place, _, _ in overlaps(placed, ends, begin - offset, end - begin):
                name = place.entry.name
                before = found.get(name)
                found[name] = times if before is None else _both(before, times)
    return found


def _busy(executed: Executed) -> Iterator[tuple[float, float, int]]:
    """Start and end of each unit's copies on one queue, in its order, and its number."""
    free_s = executed.begun_s
    ends = [(arrived[-1], number) for number, arrived in enumerate(executed.arrived_s) if arrived]
    for end_s, number in sorted(ends):
        issued_s = executed.issued_s[number]
        assert issued_s is not None
        yield max(free_s, issued_s), end_s, number
        free_s = end_s


def _parts(executed: Executed) -> Iterator[tuple[int, int, TensorTimes]]:
    """Range of the block, and times, of each batch."""
    zero_s = executed.begun_s
    for start_s, _, number in _busy(executed):
        unit = executed.units[number]
        arrived = executed.arrived_s[number]
        for place, batch in enumerate(unit.batches):
            # A device says how far it is less often than at each batch.
            end_s = arrived[place] if len(arrived) == len(unit.batches) else arrived[-1]
            planned: tuple[float | None, float | None] = None, None
            if executed.program.planned_s:
                planned = executed.program.planned_s[number][place]
            times = TensorTimes(*planned, start_s - zero_s, end_s - zero_s, bool(unit.slots))
            yield batch.begin, batch.end, times
            start_s = end_s


def _both(one: TensorTimes, other: TensorTimes) -> TensorTimes:
    starts = [s for s in (one.planned_start_s, other.planned_start_s) if s is not None]
    ends = [s for s in (one.planned_end_s, other.planned_end_s) if s is not None]
    return TensorTimes(
        min(starts, default=None),
        max(ends, default=None),
        min(one.start_s, other.start_s),
        max(one.end_s, other.end_s),
        one.duplicated or other.duplicated,
    )
