"""Intervals: LowDiff's formulas and table, and optima against searches that look everywhere."""

from __future__ import annotations

import contextlib
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep.errors import EverstepError, InfeasibleError, OptionError
from everstep.plan.interval import (
    Choice,
    Costs,
    Waste,
    best_choice,
    checkfreq_interval,
    closed_form,
    continuous_optimum,
    curve,
    interval_steps_min,
    optimum,
    waste,
)

COSTS = Costs(14e9, 3e9, 0.2, 4 * 3600.0, 1.1, batch_write_s=0.05)
"""14 GB to 3 GB/s, a failure every 4 hours, steps of 1.1 s that are redone in 0.2 s."""


def log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    """Costs of real jobs and of odd ones; replay is faster than training."""
    step_s = draw(log_uniform(1e-3, 100))
    return Costs(
        state_bytes=draw(log_uniform(1e6, 1e13)),
        write_bytes_per_s=draw(log_uniform(1e7, 1e11)),
        replay_s=step_s * draw(st.floats(1e-3, 0.98)),
        mtbf_s=draw(log_uniform(60, 1e7)),
        step_s=step_s,
        load_bytes_per_s=draw(st.none() | log_uniform(1e7, 1e11)),
        merge_s=draw(st.just(0.0) | log_uniform(1e-4, 10)),
        batch_write_s=draw(st.just(0.0) | log_uniform(1e-4, 10)),
        base_cost_s=draw(st.none() | log_uniform(1e-3, 100)),
    )


# --- The paper's formulas, written down once more ---------------------------------------


def eq8(costs: Costs, f: float, b: float, n: int = 1, t: float = 1.0) -> float:
    """LowDiff Eq. 8 as printed, from its own symbols; f in 1/s, b in seconds."""
    m, s, w = costs.mtbf_s, costs.state_bytes, costs.write_bytes_per_s
    r_f, r_d = costs.load_s, costs.merge_s
    return n * t / m * (b / 2 + (r_f + r_d / 2 * (1 / (f * b) - 1))) + n * t * s * f / w


def eq10(costs: Costs) -> tuple[float, float]:
    """LowDiff Eq. 10 as printed: (f*, b*)."""
    m, s, w, r_d = costs.mtbf_s, costs.state_bytes, costs.write_bytes_per_s, costs.merge_s
    return (r_d * w**2 / (4 * s**2 * m**2)) ** (1 / 3), (2 * s * r_d * m / w) ** (1 / 3)


@given(any_costs(), log_uniform(0.1, 1e5), st.floats(1e-4, 1), st.integers(1, 1000))
def test_waste_is_eq_8_where_batches_are_summed_and_written_for_nothing(
    costs: Costs, interval_s: float, part: float, accelerators: int
) -> None:
    costs = replace(costs, accelerators=accelerators).summed()
    found = waste(costs, interval_s, interval_s * part, write_cost=False)
    expected = eq8(costs, 1 / interval_s, interval_s * part, accelerators, 1e6)
    assert costs.wasted_accelerator_s(found, 1e6) == pytest.approx(expected, rel=1e-9)


@given(any_costs())
def test_eq_10_is_where_both_derivatives_of_eq_8_vanish(costs: Costs) -> None:
    costs = costs.summed()
    f, b = eq10(costs)
    m, s, w, r_d = costs.mtbf_s, costs.state_bytes, costs.write_bytes_per_s, costs.merge_s
    # Eq. 9 as printed, each against the larger of its two terms.
    assert s / w == pytest.approx(r_d / (2 * f**2 * m * b), rel=1e-9)
    assert r_d / (2 * b**2 * f) == pytest.approx(1 / 2, rel=1e-9)
    # Eq. 9 is right: differences of Eq. 8 vanish there, to second order.
    constant = costs.load_s / m - r_d / (2 * m)
    least = eq8(costs, f, b) - constant
    for df, db in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3), (1e-3, 1e-3), (-1e-3, 1e-3)):
        there = eq8(costs, f * (1 + df), b * (1 + db)) - constant
        assert least * (1 - 1e-9) <= there <= least * (1 + 1e-5)


@given(any_costs())
def test_closed_form_is_eq_10_unless_a_batch_would_outgrow_the_interval(costs: Costs) -> None:
    found = closed_form(costs)
    f, b = eq10(costs.summed())
    if 1 / (f * b) >= 1 + 1e-9:
        assert (found.interval_s, found.batch_s) == pytest.approx((1 / f, b), rel=1e-9)
    elif 1 / (f * b) < 1 - 1e-9:
        young_s = math.sqrt(2 * costs.mtbf_s * costs.write_s)
        assert (found.interval_s, found.batch_s) == pytest.approx((young_s, young_s), rel=1e-9)
    # Either way it is what bisection finds, which knows no Eq. 10.
    same = continuous_optimum(replace(costs.summed(), base_cost_s=None, batch_write_s=0.0))
    assert found.waste.total == pytest.approx(same.waste.total, rel=1e-9)
    assert found.interval_s == pytest.approx(same.interval_s, rel=1e-6)
    assert found.batch_s == pytest.approx(same.batch_s, rel=1e-6)


def test_eq_10_breaks_its_constraint_when_merging_is_slow() -> None:
    costs = Costs(1e9, 1e9, replay_s=0.1, mtbf_s=50.0, step_s=0.2, merge_s=20.0).summed()
    f, b = eq10(costs)
    assert 1 / (f * b) < 1
    found = closed_form(costs)
    assert found.interval_s == found.batch_s == math.sqrt(2 * 50 * 1)
    assert found.waste.replay == 0


@given(any_costs(), st.integers(0, 2**32))
def test_no_real_point_beats_the_continuous_optimum(costs: Costs, seed: int) -> None:
    found = continuous_optimum(costs)
    if costs.merge_s == 0 and costs.batch_write_s == 0:
        assert found.batch_s <= costs.step_s  # would be 0 otherwise
        return
    draw = random.Random(seed)
    for scale in (1e-3, 0.1, 3):
        for _ in range(5):
            interval_s = found.interval_s * math.exp(draw.gauss(0, scale))
            batch_s = min(interval_s, found.batch_s * math.exp(draw.gauss(0, scale)))
            there = waste(costs, interval_s, batch_s)
            assert there.total >= found.waste.total * (1 - 1e-9)


@given(any_costs())
def test_continuous_optimum_of_records_in_closed_form(costs: Costs) -> None:
    """Without costs per merge both intervals are square roots, each like Young's."""
    costs = replace(costs, merge_s=0.0, batch_write_s=costs.batch_write_s or 0.01)
    rate, base_s = costs.replay_s / costs.step_s, costs.base_cost_s or costs.write_s
    interval_s = math.sqrt(2 * costs.mtbf_s * base_s / rate)
    batch_s = math.sqrt(2 * costs.mtbf_s * costs.batch_write_s / (1 - rate))
    assume(batch_s < interval_s)
    found = continuous_optimum(costs)
    assert (found.interval_s, found.batch_s) == pytest.approx((interval_s, batch_s), rel=1e-6)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6), (40, 8)])
def test_waste_is_what_failures_cost_on_average(n: int, k: int) -> None:
    """Failures at 16 instants of every step, each recovered by hand."""
    costs = Costs(10.0, 2.0, replay_s=0.5, mtbf_s=1000.0, step_s=2.0, merge_s=0.25)
    lost, redone = [], []
    for tick in range(n * 16):
        trained_s = (tick + 0.5) / 16 * costs.step_s
        written = math.floor(trained_s / (k * costs.step_s))  # whole batches since the base
        lost.append(trained_s - written * k * costs.step_s)
        redone.append(written * (costs.merge_s + k * costs.replay_s))
    found = waste(costs, n * costs.step_s, k * costs.step_s)
    assert found.lost == pytest.approx(sum(lost) / len(lost) / costs.mtbf_s)
    assert found.replay == pytest.approx(sum(redone) / len(redone) / costs.mtbf_s)
    assert found.load == pytest.approx(5 / 1000)
    assert found.bases == pytest.approx(5 / (n * 2))


# --- Table I ----------------------------------------------------------------------------

TABLE = {
    10: (1.258, 1.226, 1.279, 1.330, 1.408, 1.513),
    20: (1.052, 1.000, 1.031, 1.085, 1.149, 1.202),
    50: (1.394, 1.290, 1.255, 1.312, 1.387, 1.481),
    100: (1.916, 1.783, 1.712, 1.752, 1.869, 1.952),
}
"""LowDiff Table I: wasted time by interval in steps and batch size 1 to 6, least is 1."""

CELLS = [(n, k) for n in TABLE for k in range(1, 7)]

# How the waste depends on n steps of interval and k of batch. Constant: loading.
LOAD, LOST, MERGE, BASE, BATCH, REDO = range(6)
TERMS: tuple[Callable[[int, int], float], ...] = (
    lambda n, k: 1.0,
    lambda n, k: k,
    lambda n, k: n / k,
    lambda n, k: 1 / n,
    lambda n, k: 1 / k,
    lambda n, k: n,
)


def fitted(*terms: int) -> tuple[dict[int, float], float]:
    """Least squares of the table on some terms: their factors, and the root mean square left."""
    wanted = np.array([TABLE[n][k - 1] for n, k in CELLS])
    matrix = np.array([[TERMS[term](n, k) for term in terms] for n, k in CELLS])
    factors, *_ = np.linalg.lstsq(matrix, wanted, rcond=None)
    left = float(np.sqrt(np.mean((matrix @ factors - wanted) ** 2)))
    return dict(zip(terms, map(float, factors), strict=True)), left


def costs_of(factors: dict[int, float]) -> tuple[Costs, float]:
    """Costs with these factors, in steps of 1 s and for some MTBF; and the table's unit.

    The table is normalized and names no unit of time, so the MTBF is free: what is determined
    are the products of the MTBF with the costs of a base and of a batch.
    """
    mtbf_s = 1000.0
    unit = 2 * mtbf_s * (factors[LOST] + factors.get(REDO, 0.0))
    merge_s = 2 * mtbf_s * factors[MERGE] / unit
    write_s = factors[BASE] / unit
    load_s = mtbf_s * factors[LOAD] / unit + merge_s / 2
    costs = Costs(
        state_bytes=write_s,
        write_bytes_per_s=1.0,
        load_bytes_per_s=write_s / load_s,
        replay_s=2 * mtbf_s * factors.get(REDO, 0.0) / unit,
        merge_s=merge_s,
        batch_write_s=factors.get(BATCH, 0.0) / unit,
        mtbf_s=mtbf_s,
        step_s=1.0,
    )
    return costs, unit


def table_of(costs: Costs, unit: float, **how: bool) -> dict[tuple[int, int], float]:
    return {(n, k): unit * waste(costs, n, k, **how).total for n, k in CELLS}


def test_table_1_by_eq_8_as_printed() -> None:
    factors, left = fitted(LOAD, LOST, MERGE, BASE)
    found = table_of(*costs_of(factors), write_cost=False)
    assert min(found, key=found.__getitem__) == (10, 1)
    assert left == pytest.approx(0.170, abs=5e-4)
    # Charging for the writes of summed batches does not help: they would have to be gainful.
    more, still_left = fitted(LOAD, LOST, MERGE, BASE, BATCH)
    assert more[BATCH] < 0
    assert still_left > 0.16


def test_table_1_with_the_cost_of_writes_and_of_every_record() -> None:
    factors, left = fitted(LOAD, LOST, MERGE, BASE, BATCH, REDO)
    assert all(factor > 0 for factor in factors.values())
    assert left == pytest.approx(0.040, abs=5e-4)
    costs, unit = costs_of(factors)
    found = table_of(costs, unit)
    assert min(found, key=found.__getitem__) == (20, 2)
    for (n, k), value in found.items():
        assert value == pytest.approx(sum(f * TERMS[term](n, k) for term, f in factors.items()))
        assert value == pytest.approx(TABLE[n][k - 1], abs=0.08)
    # The best batch of each row, which the paper prints in bold as 2, 2, 3, 3.
    rows = {n: min(range(1, 7), key=lambda k: found[n, k]) for n in TABLE}
    assert list(rows.values()) == [2, 2, 2, 3]
    # Without what a write costs, the same constants choose the shortest batch again.
    free = table_of(costs, unit, write_cost=False)
    assert min(free, key=free.__getitem__) == (20, 1)
    # What was inferred, in steps: replay 0.11, merging 0.03, loading 0.88 of a step; a base
    # times the MTBF 31, a batch times the MTBF 1.3 squared steps.
    inferred = (costs.replay_s, costs.merge_s, costs.load_s)
    assert inferred == pytest.approx((0.109, 0.0295, 0.880), rel=0.01)
    products = (costs.write_s * costs.mtbf_s, costs.batch_write_s * costs.mtbf_s)
    assert products == pytest.approx((31.1, 1.29), rel=0.01)
    best = best_choice(costs)
    assert (best.interval_steps, best.batch_steps) == (22, 2)


# --- Whole numbers ----------------------------------------------------------------------


def exactly(costs: Costs, n: int, k: int) -> Fraction:
    """The waste without rounding."""
    f = Fraction
    step, mtbf, merges = f(costs.step_s), f(costs.mtbf_s), (f(n, k) - 1) / 2
    write = f(costs.state_bytes) / f(costs.write_bytes_per_s)
    load = f(costs.state_bytes) / f(costs.load_bytes_per_s or costs.write_bytes_per_s)
    base = write if costs.base_cost_s is None else f(costs.base_cost_s)
    batch = f(costs.batch_write_s)
    recovery = k * step / 2 + load + merges * (f(costs.merge_s) + k * f(costs.replay_s))
    return recovery / mtbf + base / (n * step) + batch / (k * step)


@st.composite
def small_costs(draw: st.DrawFn) -> Costs:
    """Quarters and small whole numbers: optima of a few steps, and many ties."""
    quarters = st.integers(1, 16).map(lambda count: count / 4)
    step_s = draw(st.sampled_from([1.0, 2.0, 4.0]))
    base_s = draw(quarters)
    return Costs(
        state_bytes=base_s,
        write_bytes_per_s=1.0,
        load_bytes_per_s=8.0,
        replay_s=step_s * draw(st.sampled_from([1 / 8, 1 / 4, 1 / 2, 3 / 4])),
        merge_s=draw(st.just(0.0) | quarters),
        batch_write_s=draw(st.just(0.0) | quarters),
        base_cost_s=draw(st.none() | quarters),
        mtbf_s=float(draw(st.sampled_from([24, 48, 60, 96, 128, 240]))),
        step_s=step_s,
    )


@pytest.mark.slow
@settings(max_examples=60)
@given(small_costs(), st.booleans(), st.none() | st.integers(1, 6))
def test_best_choice_is_the_best_of_all(costs: Costs, summed: bool, batch_max: int | None) -> None:
    costs = costs.summed() if summed else costs
    least = interval_steps_min(costs)
    everywhere = {
        (k, n): exactly(costs, n, k)
        for k in range(1, min(60, batch_max or 60) + 1)
        for n in range(max(k, least), 60)
    }
    best = min(everywhere.values())
    expected = min(place for place, value in everywhere.items() if value == best)
    assume(expected[1] < 50)  # the search above saw around it
    try:
        found = best_choice(costs, batch_max=batch_max)
    except InfeasibleError:
        batches_s = (batch_max or 60) * costs.step_s
        assert best >= 1 or costs.batch_write_s >= batches_s
        return
    assert (found.batch_steps, found.interval_steps) == expected
    assert found.waste.total == pytest.approx(float(best))
    assert (found.interval_s, found.batch_s) == (
        found.interval_steps * costs.step_s,
        found.batch_steps * costs.step_s,
    )


@settings(max_examples=200)
@given(any_costs(), st.booleans(), st.none() | st.integers(1, 1000), st.integers(0, 2**32))
def test_no_neighbour_and_no_stranger_beats_the_best_choice(
    costs: Costs, summed: bool, batch_max: int | None, seed: int
) -> None:
    costs = costs.summed() if summed else costs
    try:
        found = best_choice(costs, batch_max=batch_max)
    except InfeasibleError:
        return
    n, k, least = found.interval_steps, found.batch_steps, interval_steps_min(costs)
    assert 1 <= k <= n
    assert n >= least
    assert k <= (batch_max or k)
    draw = random.Random(seed)
    places = [(n + dn, k + dk) for dn in (-1, 0, 1) for dk in (-1, 0, 1)]
    places += [(m, m) for m in (n, k, n - 1, k + 1)]
    for _ in range(20):
        places.append((round(n * draw.lognormvariate(0, 1)), round(k * draw.lognormvariate(0, 1))))
    for m, j in places:
        j = min(j, batch_max or j)
        if 1 <= j <= m and m >= least:
            assert waste(costs, m * costs.step_s, j * costs.step_s).total >= (
                found.waste.total * (1 - 1e-11)
            )


@pytest.mark.parametrize(
    ("base_cost_s", "merge_s", "batch_write_s", "mtbf_s", "replay_s", "step_s", "expected"),
    [
        (0.25, 3, 0.25, 60, 0, 1, (9, 8)),  # with real intervals, 7 is the best batch
        (0.5, 1, 0.25, 24, 2.0, 4, (2, 2)),  # 1
        (0.25, 0.25, 0, 240, 0.75, 1, (12, 3)),  # 4
        (0.25, 0.25, 1, 48, 0.5, 2, (5, 5)),  # 6
    ],
)
def test_whole_intervals_move_the_best_batch(
    base_cost_s: float,
    merge_s: float,
    batch_write_s: float,
    mtbf_s: float,
    replay_s: float,
    step_s: float,
    expected: tuple[int, int],
) -> None:
    costs = Costs(
        *(0.25, 1.0, replay_s, mtbf_s, step_s),
        merge_s=merge_s,
        batch_write_s=batch_write_s,
        base_cost_s=base_cost_s,
    )
    pairs = [(n, k) for n in range(1, 40) for k in range(1, n + 1)]
    assert min(pairs, key=lambda pair: exactly(costs, *pair)) == expected
    found = best_choice(costs)
    assert (found.interval_steps, found.batch_steps) == expected


def test_ties_go_to_the_shorter_batch_and_interval() -> None:
    costs = Costs(1.0, 1.0, replay_s=1.0, step_s=2.0, mtbf_s=96.0, base_cost_s=0.0625)
    assert exactly(costs, 2, 1) == exactly(costs, 3, 1)
    found = best_choice(costs)
    assert (found.interval_steps, found.batch_steps) == (2, 1)
    costs = replace(costs, base_cost_s=1.0, batch_write_s=0.0625)
    assert exactly(costs, 10, 2) == exactly(costs, 10, 3)
    found = best_choice(costs)
    assert (found.interval_steps, found.batch_steps) == (10, 2)


@pytest.mark.parametrize(
    "extreme",
    [
        {"replay_s": 1.1 * (1 - 1e-12), "batch_write_s": 1e-9},
        {"replay_s": 1.1 * (1 - 1e-12), "batch_write_s": 1e-9, "merge_s": 1e-9},
        {"step_s": 1e-6, "replay_s": 1e-6 * 0.999999, "mtbf_s": 1e18, "batch_write_s": 1.0},
        {"replay_s": 1e-9, "merge_s": 1e-9, "mtbf_s": 1e18},
        {"replay_s": 1e-9, "mtbf_s": 1e18, "base_cost_s": 1e-9},
        {"batch_write_s": 100.0, "mtbf_s": 1e18},
        {"state_bytes": 1e18, "mtbf_s": 1e18, "base_cost_s": 1e-9, "batch_write_s": 1.0},
    ],
)
@pytest.mark.parametrize("summed", [False, True])
def test_extremes_are_quick_and_no_worse_than_real_numbers(
    extreme: dict[str, float], summed: bool
) -> None:
    costs = replace(COSTS, **extreme)
    costs = costs.summed() if summed else costs
    began = time.process_time()
    found = optimum(costs)
    assert time.process_time() - began < 2
    bound = found.continuous.waste.total
    if interval_steps_min(costs) * costs.step_s <= found.continuous.interval_s:
        assert found.choice.waste.total == pytest.approx(bound, rel=1e-3)
    else:
        assert found.choice.interval_steps == interval_steps_min(costs)


@given(any_costs(), st.lists(st.integers(1, 10_000), min_size=1, max_size=6))
def test_curve_has_the_best_batch_of_each_interval(costs: Costs, intervals: list[int]) -> None:
    found = curve(costs, intervals, batch_max=30)
    least = interval_steps_min(costs)
    assert [row.interval_steps for row in found] == sorted({max(n, least) for n in intervals})
    for row in found:
        n = row.interval_steps
        batches = range(1, min(30, n) + 1)
        totals = [waste(costs, n * costs.step_s, k * costs.step_s).total for k in batches]
        assert row.waste.total == pytest.approx(min(totals), rel=1e-12)


def test_without_log_is_young() -> None:
    found = optimum(COSTS).without_log
    # GoCkpt section 3.1: sqrt(2 T_ckpt / p) / T_step, and the whole number next to it.
    assert found.interval_steps == found.batch_steps
    real = math.sqrt(2 * COSTS.write_s * COSTS.mtbf_s) / COSTS.step_s
    assert found.interval_steps in (math.floor(real), math.ceil(real))
    best = min(range(1, 2000), key=lambda n: n * 1.1 / 2 / 14400 + COSTS.write_s / (n * 1.1))
    assert found.interval_steps == best
    assert found.waste.replay == found.waste.batches == 0


# --- What changes what ------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("field", ["mtbf_s", "base_cost_s", "batch_write_s"])
@settings(max_examples=100)
@given(costs=any_costs(), summed=st.booleans(), factor=st.floats(1.01, 100))
def test_rarer_failures_and_dearer_writes_lengthen_both_intervals(
    field: str, costs: Costs, summed: bool, factor: float
) -> None:
    costs = replace(costs, base_cost_s=costs.base_cost_s or costs.write_s)
    costs = replace(costs, batch_write_s=costs.batch_write_s or 1e-3)
    costs = costs.summed() if summed else costs
    more = replace(costs, **{field: getattr(costs, field) * factor})
    try:
        before, after = best_choice(costs), best_choice(more)
    except InfeasibleError:
        assume(False)
        return
    interval = max(before.interval_steps, after.interval_steps)
    batch = max(before.batch_steps, after.batch_steps)
    if (interval, batch) != (after.interval_steps, after.batch_steps):
        # Two neighbours whose waste differs by less than rounding: either is the best.
        same = waste(more, interval * more.step_s, batch * more.step_s).total
        assert same == pytest.approx(after.waste.total, rel=1e-11)
    if field == "mtbf_s":
        assert after.waste.total < before.waste.total
    else:
        assert after.waste.total >= before.waste.total


@given(any_costs(), st.floats(0.01, 0.99))
def test_a_faster_replay_lengthens_the_interval_and_shortens_the_batch(
    costs: Costs, factor: float
) -> None:
    costs = replace(costs, merge_s=0.0, base_cost_s=costs.write_s * 2)
    faster = replace(costs, replay_s=costs.replay_s * factor)
    try:
        before, after = best_choice(costs), best_choice(faster)
    except InfeasibleError:
        assume(False)
        return
    assume(before.batch_steps < before.interval_steps)
    assert after.interval_steps >= before.interval_steps
    assert after.batch_steps <= before.batch_steps
    assert after.waste.total < before.waste.total


@given(any_costs(), st.integers(-8, 8), st.integers(-8, 8))
def test_units_of_time_and_size_do_not_matter(costs: Costs, times: int, sizes: int) -> None:
    time_, size = 2.0**times, 2.0**sizes
    scaled = Costs(
        state_bytes=costs.state_bytes * size,
        write_bytes_per_s=costs.write_bytes_per_s * size / time_,
        load_bytes_per_s=costs.load_bytes_per_s and costs.load_bytes_per_s * size / time_,
        replay_s=costs.replay_s * time_,
        mtbf_s=costs.mtbf_s * time_,
        step_s=costs.step_s * time_,
        merge_s=costs.merge_s * time_,
        batch_write_s=costs.batch_write_s * time_,
        base_cost_s=costs.base_cost_s and costs.base_cost_s * time_,
    )
    try:
        found, same = optimum(costs), optimum(scaled)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            optimum(scaled)
        return
    for one, other in (
        (found.choice, same.choice),
        (found.without_log, same.without_log),
    ):
        assert one.interval_steps == other.interval_steps
        assert one.batch_steps == other.batch_steps
        assert one.waste.total == pytest.approx(other.waste.total, rel=1e-12)
    assert found.closed_form.interval_s * time_ == pytest.approx(same.closed_form.interval_s)
    assert found.continuous.batch_s * time_ == pytest.approx(same.continuous.batch_s, rel=1e-6)


def test_accelerators_scale_the_waste_and_not_the_optimum() -> None:
    many = replace(COSTS, accelerators=64)
    assert optimum(many) == optimum(COSTS)
    wasted = optimum(COSTS).choice.waste
    assert many.wasted_accelerator_s(wasted, 100.0) == 64 * 100 * wasted.total


# --- What is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "quantity", "needed"),
    [
        ({"mtbf_s": 4.0}, "write_bytes_per_s", 3.5e9),
        ({"load_bytes_per_s": 1e5}, "load_bytes_per_s", 14e9 / 14400),
        ({"replay_s": 1.1}, "replay_s", 1.1),
        ({"replay_s": 5.0}, "replay_s", 1.1),
    ],
)
def test_infeasible_costs(change: dict[str, float], quantity: str, needed: float) -> None:
    costs = replace(COSTS, **change)
    with pytest.raises(InfeasibleError) as caught:
        optimum(costs)
    assert caught.value.quantity == quantity
    assert caught.value.needed == pytest.approx(needed)
    fields = caught.value.fields()
    assert (fields["quantity"], fields["needed"]) == (quantity, caught.value.needed)
    assert isinstance(caught.value, EverstepError)
    # On the right side of what is needed, it is no longer that which stands in the way.
    better = needed * (0.99 if quantity == "replay_s" else 1.01)
    with contextlib.suppress(InfeasibleError):
        optimum(replace(costs, **{quantity: better}))
        return
    with pytest.raises(InfeasibleError) as then:
        optimum(replace(costs, **{quantity: better}))
    assert then.value.quantity != quantity


def test_replay_slower_than_training_names_the_way_without_a_log() -> None:
    with pytest.raises(InfeasibleError, match="every 333 steps"):
        optimum(replace(COSTS, replay_s=2.0))
    with pytest.raises(InfeasibleError):
        continuous_optimum(replace(COSTS, replay_s=2.0))
    with pytest.raises(InfeasibleError):
        curve(replace(COSTS, replay_s=2.0), [10])


@pytest.mark.parametrize("summed", [False, True])
def test_no_time_left_for_training(summed: bool) -> None:
    costs = replace(COSTS, mtbf_s=6.0, replay_s=0.5)
    costs = costs.summed() if summed else costs
    with pytest.raises(InfeasibleError) as caught:
        best_choice(costs)
    assert caught.value.quantity == "mtbf_s"
    needed_s = caught.value.needed
    assert best_choice(replace(costs, mtbf_s=needed_s * 1.00001)).waste.total < 1
    with pytest.raises(InfeasibleError):
        best_choice(replace(costs, mtbf_s=needed_s * 0.99999))


def test_batches_that_cannot_be_written_in_time() -> None:
    costs = replace(COSTS, batch_write_s=5.0)
    with pytest.raises(InfeasibleError, match="more than 4 steps") as caught:
        best_choice(costs, batch_max=4)
    assert (caught.value.quantity, caught.value.needed) == ("batch_write_s", 4.4)
    assert best_choice(costs, batch_max=8).batch_steps == 8


@pytest.mark.parametrize(
    "change",
    [
        *({name: 0.0} for name in ("state_bytes", "write_bytes_per_s", "mtbf_s", "step_s")),
        *({name: -1.0} for name in ("replay_s", "merge_s", "batch_write_s", "base_cost_s")),
        *({name: math.nan} for name in ("state_bytes", "replay_s", "batch_write_s")),
        {"mtbf_s": math.inf},
        {"replay_s": 0.0},
        {"load_bytes_per_s": 0.0},
        {"base_cost_s": 0.0},
        {"step_s": True},
        {"step_s": "1"},
        {"mtbf_s": None},
        {"mtbf_s": 1e19},
        {"step_s": 1e-10},
        {"accelerators": 0},
        {"accelerators": 1.5},
    ],
)
def test_costs_that_are_none(change: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(change))):
        replace(COSTS, **change)


@pytest.mark.parametrize(
    ("interval_s", "batch_s"), [(1.0, 1.1), (1.0, 0.0), (0.0, 0.0), (math.inf, 1.0), (math.nan, 1)]
)
def test_intervals_that_are_none(interval_s: float, batch_s: float) -> None:
    with pytest.raises(OptionError, match="does not fit"):
        waste(COSTS, interval_s, batch_s)


@pytest.mark.parametrize("batch_max", [0, -1, 1.5])
def test_batch_max_that_is_none(batch_max: Any) -> None:
    with pytest.raises(OptionError, match="batch_max"):
        optimum(COSTS, batch_max=batch_max)


# --- CheckFreq --------------------------------------------------------------------------


@given(
    st.floats(0.001, 10), st.just(0.0) | st.floats(0.0, 20), st.floats(0.0, 20), st.floats(0.01, 1)
)
def test_checkfreq_is_the_shortest_interval_that_keeps_both_bounds(
    step_s: float, stall_s: float, persist_s: float, share: float
) -> None:
    found = checkfreq_interval(step_s=step_s, stall_s=stall_s, persist_s=persist_s, share=share)

    def keeps(steps: int, slack: float) -> bool:
        time_s = steps * step_s * (1 + slack)
        return steps >= 1 and stall_s <= share * time_s and persist_s <= time_s

    assert keeps(found, 1e-9)
    assert not keeps(found - 1, -1e-9)


def test_checkfreq_is_not_fooled_by_rounding() -> None:
    # 0.3 / 0.1 is 3 and a bit less, 0.1 * 3 is 0.3 and a bit more.
    assert checkfreq_interval(step_s=0.1, stall_s=0.0, persist_s=0.1 * 3) == 3
    assert checkfreq_interval(step_s=1.0, stall_s=0.035) == 1
    assert checkfreq_interval(step_s=1.0, stall_s=0.0351) == 2
    assert checkfreq_interval(step_s=1.0, stall_s=0.7, share=0.035) == 20


# --- Light and free of side effects -----------------------------------------------------


def test_planning_needs_no_torch() -> None:
    source = (
        "import sys; import everstep.plan.interval, everstep.plan.estimator; "
        "import everstep.cli.plan.interval; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_results_are_frozen() -> None:
    found = optimum(COSTS)
    assert isinstance(found.choice, Choice)
    assert isinstance(found.choice.waste, Waste)
    for one in (COSTS, found, found.choice, found.continuous, found.choice.waste):
        with pytest.raises(AttributeError):
            setattr(one, fields(one)[0].name, 1)
