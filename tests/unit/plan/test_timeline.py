"""Plans of what hooks see: against the validator and the bound of plans of operators, and against
steps worked out by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from everstep.plan.schedule.schedule import Item, Problem, Schedule, bound, peak_of
from everstep.plan.schedule.timeline import Leaving, StepPlan, place, plan_departures
from tests.support.checkflow_program import obeys

MB = 1 << 20


def random_step(seed: int) -> tuple[list[float], list[Leaving], float]:
    """A step, what leaves in it, and a link between too slow and four times as fast as needed."""
    random_ = random.Random(seed)
    events = random_.randrange(3, 60)
    seconds = [random_.random() * 0.01 for _ in range(events)]
    leaving = [
        Leaving(
            random_.randrange(1, 4 * MB), random_.randrange(1, events + 1), random_.random() < 0.8
        )
        for _ in range(random_.randrange(1, 30))
    ]
    needed = sum(item.size_bytes for item in leaving) / sum(seconds)
    return seconds, leaving, needed * random_.choice([0.3, 0.9, 1.05, 1.5, 4.0])


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_keeps_to_all_constraints(seed: int) -> None:
    """No constraint of plans of operators is violated; the peak is what no plan can
    go below, but for the grain of the cuts."""
    seconds, leaving, link = random_step(seed)
    plan = plan_departures(seconds, leaving, link)
    peak = peak_of(plan.problem, plan.placements)
    chunk_bytes = max(place.chunk.size_bytes for place in plan.placements)
    found = Schedule("direct", plan.placements, peak, 0, chunk_bytes)
    assert obeys(plan.problem, found)
    grain = 64 * 1024 * len(plan.problem.seconds)
    assert peak <= bound(plan.problem, "direct") + grain


@pytest.mark.parametrize("duplicates", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_everything_leaves_once_and_in_time(seed: int, duplicates: bool) -> None:
    seconds, leaving, link = random_step(seed)
    plan = plan_departures(seconds, leaving, link, duplicates=duplicates)
    parts: dict[int, list[tuple[int, int]]] = {}
    for departure in plan.departures:
        chunk, update = departure.chunk, leaving[departure.chunk.item].update
        parts.setdefault(chunk.item, []).append((chunk.begin, chunk.end))
        assert departure.duplicated == (departure.event >= update)
        if not leaving[chunk.item].divisible:
            assert (chunk.begin, chunk.end) == (0, leaving[chunk.item].size_bytes)
    assert duplicates or not plan.duplicated_bytes
    for number, item in enumerate(leaving):
        position = 0
        for begin, end in sorted(parts[number]):
            assert begin == position
            position = end
        assert position == item.size_bytes


@pytest.mark.parametrize("seed", range(40))
def test_the_link_is_one_queue(seed: int) -> None:
    """Copies follow each other in the order of the plan, none before its event."""
    seconds, leaving, link = random_step(seed)
    plan = plan_departures(seconds, leaving, link)
    begins = [0.0, *itertools.accumulate(seconds)]
    for before, after in itertools.pairwise(plan.departures):
        assert after.start_s >= before.end_s
        assert after.event >= before.event
    for departure in plan.departures:
        assert departure.start_s >= begins[departure.event] - 1e-12


def planned(link: float, **options: bool) -> StepPlan:
    """A step of 100 ms: forward and backward of 90, one update of 10; a state of 9 MB."""
    return plan_departures([0.03, 0.06, 0.01], [Leaving(9_000_000, 2)], link, **options)


def test_with_time_enough_nobody_waits_and_nothing_is_duplicated() -> None:
    plan = planned(120e6)
    assert plan.wait_s == 0
    assert plan.duplicated_bytes == 0
    assert plan.needed_bytes_per_s == pytest.approx(90e6)
    assert plan.departures[0].event == 0
    assert plan.departures[-1].end_s == pytest.approx(0.075)


def test_what_is_late_is_duplicated() -> None:
    """95 MB/s move 8.55 MB before the update, and the rest beside it."""
    plan = planned(95e6)
    assert plan.wait_s == 0
    assert plan.duplicated_bytes == pytest.approx(450_000, abs=64 * 1024)


def test_without_memory_for_that_the_update_waits() -> None:
    plan = planned(95e6, duplicates=False)
    assert plan.waits_s == {2: pytest.approx(9 / 95 - 0.09, abs=1e-6)}


def test_a_link_that_is_too_slow_is_waited_for_as_long_as_it_takes_and_no_longer() -> None:
    """45 MB/s: 200 ms, of which the step covers 100; what leaves beside the update is late."""
    plan = planned(45e6)
    assert plan.wait_s == pytest.approx(0.1, abs=2e-3)
    assert plan.departures[-1].end_s == pytest.approx(0.2, abs=2e-3)


def test_updates_inside_of_backward_wait_for_their_own() -> None:
    """Three layers, updated one after the other; the link moves one and a half before the first
    update. The first to be updated goes first."""
    seconds = [0.03, 0.01, 0.01, 0.01]
    layers = [Leaving(2_000_000, update) for update in (3, 2, 1)]
    plan = plan_departures(seconds, layers, 100e6)
    assert plan.departures[0].chunk.item == 2
    assert plan.wait_s == pytest.approx(0, abs=1e-4)
    assert plan.duplicated_bytes == pytest.approx(1_000_000, abs=64 * 1024)
    alone = plan_departures(seconds, layers, 100e6, duplicates=False)
    assert alone.waits_s == {3: pytest.approx(0.01, abs=1e-3)}
    # Each wait gives the link time for what the next update waits for.
    slow = plan_departures(seconds, layers, 50e6, duplicates=False)
    assert slow.wait_s == pytest.approx(6 / 50 - 0.05, abs=2e-3)


def test_what_is_never_updated_leaves_last() -> None:
    plan = plan_departures([0.05, 0.05], [Leaving(MB, 2), Leaving(MB, 1)], 100e6)
    assert [departure.chunk.item for departure in plan.departures] == [1, 0]


def test_a_plan_with_nothing_to_copy() -> None:
    plan = plan_departures([0.05, 0.05], [], 100e6)
    assert plan.departures == ()
    assert plan.wait_s == 0


def test_no_place_is_left_empty_while_something_may_go() -> None:
    items = (Item("a", 3_000_000, 8), Item("b", 3_000_000, 5))
    problem = Problem((0.01,) * 10, (0,) * 10, items, 100e6)
    placements, left = place(problem)
    assert not left
    carried = [0] * 10
    for placement in placements:
        carried[placement.offload] += placement.chunk.size_bytes
    assert all(1_000_000 - 64 * 1024 <= size <= 1_000_000 for size in carried[:6])
    assert placements[0].chunk.item == 1
