"""Capture plans from the events of a running step, and the seconds between them.

In production, training is not traced, so operators and lifetimes of tensors are unknown. There are
only *events* (a module begins, a gradient exists, an optimizer is about to update), numbered from
the step mark, event 0. The time from one event to the next takes the place of an operator in
:class:`.schedule.Problem`. Tensors are divisible, except for those whose memory differs from their
form in the file. So the plan for divisible items is used itself: each interval of the step fills
the link, first with items that the next update overwrites, then earliest deadline first. No plan
needs fewer duplicates (:func:`.schedule.bound`; Checkflow section III-A in the direct mode).

If the link is too slow, training waits. The plan is then that of a step that is longer by the
missing time before its first update, and the wait of each update is predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from everstep.plan.schedule.schedule import Chunk, Item, Placement, Problem

_INTERVALS = 32  # approximate number in a step; copies are issued at their beginnings
_UNIT_BYTES = (512, 64 << 10)  # slices are multiples of a unit: its minimum and maximum
_UNITS = 4096  # approximate number that the link moves in a step
_STRETCHES = 8


@dataclass(frozen=True, slots=True)
class Leaving:
    """A tensor that is copied in each step.

    Attributes:
        update: number of the event that begins its first update; the number of all events if there
            is none.
        divisible: True if slices of it can leave separately.
    """

    size_bytes: int
    update: int
    divisible: bool = True


@dataclass(frozen=True, slots=True)
class Departure:
    """A slice of a tensor that leaves.

    Attributes:
        chunk: the slice.
        event: event at which its copy is issued.
        duplicated: True: it is duplicated just before the update, and the duplicate is copied.
        start_s, end_s: predicted times of the copy after the step mark, in seconds.
    """

    chunk: Chunk
    event: int
    duplicated: bool
    start_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Times at which tensors leave.

    Attributes:
        departures: in the order of the link.
        waits_s: predicted wait of training by event, in seconds; only events with a wait.
        step_s: duration of the step itself, in seconds.
        duplicated_bytes: device memory for duplicates.
        link_bytes_per_s: bandwidth that was assumed.
        needed_bytes_per_s: bandwidth below which training waits in any plan; infinite if there is
            no time before the first update.
        problem: problem that was solved; its last interval before the first update may be
            stretched.
        placements: its solution.
    """

    departures: tuple[Departure, ...]
    waits_s: dict[int, float]
    step_s: float
    duplicated_bytes: int
    link_bytes_per_s: float
    needed_bytes_per_s: float
    problem: Problem
    placements: tuple[Placement, ...]

    @property
    def wait_s(self) -> float:
        """Predicted wait of the whole step, in seconds."""
        return sum(self.waits_s.values())


def plan_departures(
    seconds: Sequence[float],
    leaving: Sequence[Leaving],
    link_bytes_per_s: float,
    *,
    duplicates: bool = True,
    duplicate_bytes_per_s: float = float("inf"),
) -> StepPlan:
    """Plan a step.

    Args:
        seconds: durations from each event to the next, and from the last one to the next mark.
        leaving: tensors to copy; none may be updated by event 0.
        duplicates: True if there is memory for duplicates; otherwise updates wait.
        duplicate_bytes_per_s: speed of making duplicates.
    """
    firsts = _intervals(seconds, {item.update for item in leaving})
    number_of = {event: number for number, event in enumerate(firsts)}
    ends = (*firsts[1:], len(seconds))
    lengths = tuple(sum(seconds[a:b]) for a, b in zip(firsts, ends, strict=True))
    items = tuple(
        Item(str(number), item.size_bytes, number_of.get(item.update, len(firsts)))
        for number, item in enumerate(leaving)
    )
    problem = Problem(lengths, (0,) * len(lengths), items, link_bytes_per_s)
    needed = problem.needed_bytes_per_s("direct")
    problem, placements = _stretched(problem)
    planned = _departures(placements, leaving, items, len(lengths), duplicates=duplicates)
    return _step_plan(
        (firsts, lengths), planned, items, problem, placements, needed, duplicate_bytes_per_s
    )


def follow_placements(
    seconds: Sequence[float],
    leaving: Sequence[Leaving],
    placements: Sequence[Placement],
    link_bytes_per_s: float,
    *,
    duplicates: bool = True,
    duplicate_bytes_per_s: float = float("inf"),
) -> StepPlan:
    """Return a plan whose copies are given, with the waits that this step will have under it.

    Args:
        seconds: durations from each event to the next, and from the last one to the next mark.
        leaving: tensors to copy.
        placements: their copies in the order of the link; an operator is an event.
        duplicates: True if there is memory for duplicates; otherwise updates wait.
        duplicate_bytes_per_s: speed of making duplicates.
    """
    items = tuple(
        Item(str(number), item.size_bytes, min(item.update, len(seconds)))
        for number, item in enumerate(leaving)
    )
    problem = Problem(tuple(seconds), (0,) * len(seconds), items, link_bytes_per_s)
    planned = _departures(placements, leaving, items, len(seconds), duplicates=duplicates)
    needed = problem.needed_bytes_per_s("direct")
    intervals = range(len(seconds)), seconds
    return _step_plan(intervals, planned, items, problem, placements, needed, duplicate_bytes_per_s)


def place(problem: Problem) -> tuple[list[Placement], int]:
    """Return the plan for divisible items, in the order of the copies, and the bytes that do not
    fit into the step.

    Items that are copied after their update are duplicated before it (``snapshot``).
    """
    items = problem.items
    capacities = problem.capacities("direct")
    unit = _unit_bytes(sum(capacities))
    order = sorted(range(len(items)), key=lambda number: items[number].update)
    due: dict[int, list[int]] = defaultdict(list)
    for number in order:
        due[items[number].update].append(number)
    gone = [0] * len(items)
    first = 0  # items before this one in the order are copied completely
    found: list[Placement] = []
    for interval, room in enumerate(capacities):
        for number in chain(due.get(interval + 1, ()), islice(order, first, None)):
            left = items[number].size_bytes - gone[number]
            size = left if left <= room else room // unit * unit
            if size:
                late = items[number].update <= interval
                chunk = Chunk(number, gone[number], gone[number] + size)
                found.append(Placement(chunk, items[number].update - 1 if late else None, interval))
                gone[number] += size
                room -= size
            if room < unit:
                break
        while first < len(order) and gone[order[first]] == items[order[first]].size_bytes:
            first += 1
    return found, problem.size_bytes - sum(gone)


def _intervals(seconds: Sequence[float], updates: set[int]) -> list[int]:
    """Return the first events of intervals: one at each update, and about ``_INTERVALS`` more."""
    least_s = sum(seconds) / _INTERVALS
    found = [0]
    since_s = 0.0
    for event, before_s in enumerate(seconds[:-1], start=1):
        since_s += before_s
        if event in updates or since_s >= least_s:
            found.append(event)
            since_s = 0.0
    return found


def _unit_bytes(capacity: int) -> int:
    least, most = _UNIT_BYTES
    unit = least
    while unit < most and unit * _UNITS < capacity:
        unit *= 2
    return unit


def _stretched(problem: Problem) -> tuple[Problem, list[Placement]]:
    """Return the problem with as much time before its first update as it needs, and its plan."""
    placements, left = place(problem)
    first = min((item.update for item in problem.items if item.size_bytes), default=1)
    for _ in range(_STRETCHES):
        if not left:
            break
        lengths = list(problem.seconds)
        # Before the first update: the copies that do not fit need no duplicates there.
        lengths[first - 1] += left / problem.link_bytes_per_s
        problem = replace(problem, seconds=tuple(lengths))
        placements, left = place(problem)
    if left:  # rounding to units in each interval leaves a rest, which is copied after the step
        placements += _rest(problem, placements)
    return problem, placements


def _rest(problem: Problem, placements: Sequence[Placement]) -> list[Placement]:
    gone = [0] * len(problem.items)
    for placement in placements:
        gone[placement.chunk.item] = placement.chunk.end
    last = len(problem.seconds) - 1
    return [
        Placement(
            Chunk(number, gone[number], item.size_bytes),
            item.update - 1 if item.update <= last else None,
            last,
        )
        for number, item in enumerate(problem.items)
        if gone[number] < item.size_bytes
    ]


def _departures(
    placements: Sequence[Placement],
    leaving: Sequence[Leaving],
    items: Sequence[Item],
    intervals: int,
    *,
    duplicates: bool,
) -> list[Departure]:
    """Turn placements into copies.

    Adjacent slices become one copy. An item that is not divisible is copied at one time, and late
    if a slice of it would be late.
    """
    whole: dict[int, Placement] = {}  # by item, the placement that gives the time
    for placement in placements:
        number = placement.chunk.item
        if not leaving[number].divisible:
            before = whole.get(number)
            if before is None or (before.snapshot is None and placement.snapshot is not None):
                whole[number] = placement
    found: list[Departure] = []
    for placement in placements:
        number = placement.chunk.item
        late = placement.snapshot is not None
        chunk = placement.chunk
        interval = placement.offload
        if number in whole:
            if placement is not whole[number]:
                continue
            chunk = Chunk(number, 0, items[number].size_bytes)
        if late and not duplicates:  # copied at the last moment, and the update waits
            late = False
            interval = min(items[number].update, intervals) - 1
        last = found[-1] if found else None
        if (
            last is not None
            and last.chunk.item == number
            and last.chunk.end == chunk.begin
            and last.duplicated == late
        ):
            found[-1] = replace(last, chunk=Chunk(number, last.chunk.begin, chunk.end))
            continue
        found.append(Departure(chunk, interval, late))
    return found if duplicates else sorted(found, key=lambda departure: departure.event)


def _step_plan(
    intervals: tuple[Sequence[int], Sequence[float]],
    planned: Sequence[Departure],
    items: Sequence[Item],
    problem: Problem,
    placements: Sequence[Placement],
    needed_bytes_per_s: float,
    duplicate_bytes_per_s: float,
) -> StepPlan:
    """Return the plan of these copies, with predicted times and waits.

    Args:
        intervals: first event and duration of each interval of the step.
        planned: the copies; their events are numbers of intervals.
    """
    firsts, lengths = intervals
    link = problem.link_bytes_per_s
    times_s, waits_s = _predict(lengths, planned, items, link, duplicate_bytes_per_s)
    return StepPlan(
        tuple(
            replace(departure, event=firsts[departure.event], start_s=start_s, end_s=end_s)
            for departure, (start_s, end_s) in zip(planned, times_s, strict=True)
        ),
        {firsts[number]: wait_s for number, wait_s in enumerate(waits_s) if wait_s > 0},
        sum(lengths),
        sum(departure.chunk.size_bytes for departure in planned if departure.duplicated),
        link,
        needed_bytes_per_s,
        problem,
        tuple(placements),
    )


def _predict(
    lengths: Sequence[float],
    departures: Sequence[Departure],
    items: Sequence[Item],
    link_bytes_per_s: float,
    duplicate_bytes_per_s: float,
) -> tuple[list[tuple[float, float]], list[float]]:
    """Return start and end of each copy on one queue, and the wait of each interval's event."""
    issued: dict[int, list[int]] = defaultdict(list)
    awaited: dict[int, list[int]] = defaultdict(list)
    duplicated = [0] * (len(lengths) + 1)
    for number, departure in enumerate(departures):
        issued[departure.event].append(number)
        update = items[departure.chunk.item].update
        if departure.duplicated:
            duplicated[update] += departure.chunk.size_bytes
        else:
            awaited[update].append(number)
    times_s = [(0.0, 0.0)] * len(departures)
    waits_s = []
    now_s = free_s = 0.0
    for interval, length_s in enumerate(lengths):
        copied_s = max((times_s[number][1] for number in awaited[interval]), default=now_s)
        wait_s = max(0.0, copied_s - now_s) + duplicated[interval] / duplicate_bytes_per_s
        waits_s.append(wait_s)
        now_s += wait_s
        for number in issued[interval]:
            start_s = max(free_s, now_s)
            free_s = start_s + departures[number].chunk.size_bytes / link_bytes_per_s
            times_s[number] = start_s, free_s
        now_s += length_s
    return times_s, waits_s
