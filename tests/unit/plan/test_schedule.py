"""``plan/schedule/schedule.py``: against all plans there are, the paper's equations read
literally."""

from __future__ import annotations

import dataclasses
import itertools
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import InfeasibleError, OptionError, UnavailableError
from everstep.plan.schedule.exact import exact
from everstep.plan.schedule.schedule import (
    Chunk,
    Item,
    Mode,
    Problem,
    bound,
    greedy,
    problem_of,
    schedule,
)
from everstep.plan.schedule.steps import device, seconds_of
from everstep.plan.schedule.trace import trace_training
from everstep.workloads.published import published
from tests.support.checkflow_program import literal, obeys


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(2, 5))
    seconds = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    live = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    items = draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, count)), min_size=1, max_size=3)
    )
    return Problem(
        tuple(map(float, seconds)),
        tuple(live),
        tuple(Item(f"item {n}", size, u) for n, (size, u) in enumerate(items)),
        1.0,
    )


modes = st.sampled_from(["paper", "direct"])


def literally(problem: Problem, mode: Mode) -> int | None:
    """The lowest peak over all choices of creation and offload of whole items; None if there is
    none. Checks Eq. 1 to 12 for each, with what they leave out: no offload at the first operator.

    An item that is created at ``c``, preserved until ``s`` and offloaded there takes memory from c
    to s (Eq. 11); ``direct`` adds the choice to offload it as it lies, before its update.
    """
    count = len(problem.seconds)
    choices = []
    for item in problem.items:
        mine: list[tuple[int | None, int]] = []
        for c, s in itertools.combinations(range(count), 2):  # Eq. 2, 3, 7: c before s
            if c < item.update:  # Eq. 8
                mine.append((c, s))
        if mode == "direct":
            mine += [(None, s) for s in range(min(item.update, count))]
        choices.append(mine)
    best: int | None = None
    for plan in itertools.product(*choices):
        moved, memory = [0] * count, list(problem.live_bytes)
        for item, (c, s) in zip(problem.items, plan, strict=True):
            moved[s] += item.size_bytes
            for t in range(s + 1 if c is None else c, s + 1):
                memory[t] += item.size_bytes  # Eq. 10
        if all(
            m <= problem.link_bytes_per_s * t for m, t in zip(moved, problem.seconds, strict=True)
        ):
            peak = max(memory)
            best = peak if best is None else min(best, peak)  # Eq. 12
    return best


@settings(max_examples=40)
@given(problems())
def test_the_printed_program_gives_what_all_plans_give(problem: Problem) -> None:
    """Checkflow Eq. 1 to 12 in binaries, next to the enumeration, which shares nothing with it."""
    pytest.importorskip("pyscipopt")
    assert literal(problem) == literally(problem, "paper")


def test_what_is_put_right_in_the_printed_program() -> None:
    pytest.importorskip("pyscipopt")
    assert literal(Problem((1.0, 1.0), (1, 1), (Item("mean", 1, 0),), 10.0)) is None
    # Nothing leaves behind the first operator, however long that takes.
    assert literal(Problem((9.0, 0.0, 0.0), (1, 1, 1), (Item("w", 1, 2),), 1.0)) is None
    assert literal(Problem((0.0, 1.0), (1, 1), (Item("w", 1, 1),), 1.0)) == 2


def halves(problem: Problem, parts: int) -> Problem:
    """The same, with items in so many parts, which may be planned one by one."""
    items = [
        Item(f"{item.name}.{part}", 1, item.update)
        for item in problem.items
        for part in range(item.size_bytes * parts)
    ]
    return dataclasses.replace(
        problem,
        seconds=tuple(s * parts for s in problem.seconds),
        live_bytes=tuple(m * parts for m in problem.live_bytes),
        items=tuple(items),
    )


@given(problems(), modes)
def test_nothing_is_below_the_bound(problem: Problem, mode: Mode) -> None:
    exact = literally(problem, mode)
    if exact is None:
        return
    assert bound(problem, mode) <= exact


@given(problems(), modes)
def test_the_bound_is_met_by_small_chunks(problem: Problem, mode: Mode) -> None:
    small = halves(problem, 1)
    if len(small.items) > 5:
        return
    exact = literally(small, mode)
    try:
        lowest = bound(problem, mode)
    except InfeasibleError:
        assert exact is None
        return
    assert lowest == exact


@given(problems(), modes, st.integers(1, 3))
def test_plans_are_valid(problem: Problem, mode: Mode, chunk_bytes: int) -> None:
    try:
        lowest = bound(problem, mode)
    except InfeasibleError:
        return
    plan = greedy(problem, mode, chunk_bytes)
    if plan is None:
        assert chunk_bytes > 1
        return
    assert obeys(problem, plan)
    assert plan.peak_bytes >= lowest == plan.bound_bytes


@given(problems(), modes)
def test_greedy_finds_a_plan_where_there_is_one(problem: Problem, mode: Mode) -> None:
    if literally(problem, mode) is not None:
        assert greedy(problem, mode, 1) is not None


@given(problems(), modes)
def test_infeasible_says_what_would_do(problem: Problem, mode: Mode) -> None:
    try:
        bound(problem, mode)
    except InfeasibleError as error:
        if error.needed == float("inf"):
            return
        faster = dataclasses.replace(problem, link_bytes_per_s=error.needed * 1.01 + 1)
        bound(faster, mode)
        slower = dataclasses.replace(problem, link_bytes_per_s=error.needed * 0.9)
        with pytest.raises(InfeasibleError):
            bound(slower, mode)


def test_what_the_first_operator_writes() -> None:
    problem = Problem((1.0, 1.0), (1, 1), (Item("mean", 1, 0),), 10.0)
    for mode in ("paper", "direct"):
        with pytest.raises(InfeasibleError, match="'mean'"):
            bound(problem, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_short_operators_and_a_fast_link(seed: int) -> None:
    """Operators behind which hardly a chunk of 16 KiB fits: smaller ones keep to the gap."""
    random, large = Random(seed), 16 << 10
    count, items = random.randint(30, 200), random.randint(1, 40)
    moved = [int(large * random.choice([0, 0.3, 0.9, 1.5, 2.2, 3.7, 8])) for _ in range(count)]
    total = int(sum(moved[1:]) * random.choice([0.1, 0.5, 0.9]))
    problem = Problem(
        tuple(size / 1e9 for size in moved),
        tuple(random.randint(0, total // 5) for _ in range(count)),
        tuple(
            Item(str(number), total // items, random.randint(count // 2, count))
            for number in range(items)
        ),
        1e9,
    )
    print(f"seed {seed}: {count} operators, {items} items of {total // items} bytes")
    for mode in ("paper", "direct"):
        found = schedule(problem, mode)  # type: ignore[arg-type]
        assert obeys(problem, found)
        assert found.gap <= 0.025


def test_nonsense_is_refused() -> None:
    with pytest.raises(OptionError):
        Problem((), (), (), 1.0)
    with pytest.raises(OptionError):
        Problem((1.0,), (1,), (), 0.0)
    for number in (float("nan"), float("inf"), -1.0):
        with pytest.raises(OptionError):
            Problem((1.0,), (1,), (), number)
        with pytest.raises(OptionError):
            Problem((number,), (1,), (), 1.0)
    with pytest.raises(OptionError):
        Problem((1.0,), (1,), (Item("w", 1, 2),), 1.0)


def traced(name: str, batch: int, link_bytes_per_s: float) -> Problem:
    with torch.device("meta"):
        model, loss = published(name).training(batch)
        trace = trace_training(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    return problem_of(trace, seconds_of(trace.operators, device("rtx3090")), link_bytes_per_s)


def test_alexnet_as_in_table_1() -> None:
    """Checkflow Table I: feasible at 63 GB/s with batches of 32, at any with 1024."""
    for batch, link, feasible in (
        *((32, 63e9, True), (32, 40e9, False), (32, 20e9, False)),
        *((1024, 63e9, True), (1024, 40e9, True), (1024, 20e9, True)),
    ):
        problem = traced("alexnet", batch, link)
        if not feasible:
            with pytest.raises(InfeasibleError) as caught:
                schedule(problem, "paper")
            assert 40e9 < caught.value.needed < 63e9
            continue
        found = schedule(problem, "paper")
        assert obeys(problem, found)
        assert found.gap < 0.02


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["mnasnet", "resnet3d"])
def test_directly_costs_no_memory_where_the_link_suffices(name: str) -> None:
    problem = traced(name, 32, 63e9)
    found = schedule(problem, "direct")
    assert obeys(problem, found)
    assert found.peak_bytes == problem.peak_bytes
    assert all(place.snapshot is None for place in found.placements)


@given(problems(), modes)
def test_exact_is_exact(problem: Problem, mode: Mode) -> None:
    pytest.importorskip("pyscipopt")
    try:
        bound(problem, mode)
    except InfeasibleError:
        return
    found = exact(problem, mode, 9, limit_s=60)
    best = literally(problem, mode)
    assert (found and found.peak_bytes) == best
    if found is not None:
        assert obeys(problem, found)
        assert found.gap == 0


def test_exact_beats_greedy() -> None:
    pytest.importorskip("pyscipopt")
    problem = traced("alexnet", 32, 63e9)
    first = greedy(problem, "paper", 4 << 20)
    found = exact(problem, "paper", 4 << 20, limit_s=60)
    assert first is not None
    assert found is not None
    assert obeys(problem, found)
    assert found.peak_bytes < first.peak_bytes
    assert found.gap < 1e-6


def test_without_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.plan.schedule.exact.has_solver", lambda: False)
    problem = traced("alexnet", 32, 63e9)
    with pytest.raises(UnavailableError, match="PySCIPOpt"):
        exact(problem, "paper", 4 << 20, limit_s=60)


def test_chunks_cover_an_item() -> None:
    problem = Problem((10.0,) * 4, (0,) * 4, (Item("w", 10, 4),), 1.0)
    found = greedy(problem, "direct", 4)
    assert found is not None
    chunks = sorted((place.chunk for place in found.placements), key=lambda chunk: chunk.begin)
    assert chunks == [Chunk(0, 0, 4), Chunk(0, 4, 8), Chunk(0, 8, 10)]


@given(problems(), modes)
def test_the_bandwidth_that_is_named_is_enough(problem: Problem, mode: Mode) -> None:
    try:
        schedule(problem, mode)
    except InfeasibleError as error:
        if error.needed < float("inf"):
            schedule(dataclasses.replace(problem, link_bytes_per_s=error.needed), mode)


def test_chunks_that_do_not_fit_name_a_bandwidth_at_which_they_do() -> None:
    """Each operator moves less than the smallest chunk, and all together enough."""
    problem = Problem((1.0,) * 400, (0,) * 400, (Item("w", 400_000, 399),), 1_010.0)
    with pytest.raises(InfeasibleError, match="in chunks of 1 KiB cannot be copied") as caught:
        schedule(problem, "direct")
    assert caught.value.needed == pytest.approx(1_024, rel=0.002)
    found = schedule(dataclasses.replace(problem, link_bytes_per_s=caught.value.needed), "direct")
    assert found.gap == 0
