"""Statistics of planned captures."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.capture.dispatch import Dispatch


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


def link_bandwidth(dispatch: Dispatch) -> float | None:
    """Return bytes per second while copies of a complete capture were in progress; None if nothing
    was copied."""
    busy_s = size_bytes = 0.0
    # Units run one after another on one queue.
    free_s = dispatch.begun_s
    ends = [(arrived[-1], number) for number, arrived in enumerate(dispatch.arrived_s) if arrived]
    for end_s, number in sorted(ends):
        issued_s = dispatch.issued_s[number]
        assert issued_s is not None
        busy_s += end_s - max(free_s, issued_s)
        free_s = end_s
        size_bytes += sum(batch.end - batch.begin for batch in dispatch.units[number].batches)
    return size_bytes / busy_s if busy_s > 0 and size_bytes else None
