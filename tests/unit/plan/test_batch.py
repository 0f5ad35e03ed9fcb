"""The shortest batch that the disk carries with ease, and an estimate of it that does not flap."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.plan import estimator as module
from everstep.plan.estimator import (
    LONGEST_S,
    PRICE_SHARE,
    BatchEstimator,
    least_batch,
    weighted_median,
)


def log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def any_costs(draw: st.DrawFn) -> tuple[float, float, float]:
    """Price, work and step: of quick disks and slow ones, of some that do not carry the log."""
    step_s = draw(log_uniform(1e-3, 30))
    return draw(log_uniform(1e-5, 10)), step_s * draw(st.floats(0, 1.2)), step_s


def carried(costs: tuple[float, float, float], steps: int, share: float = PRICE_SHARE) -> bool:
    price_s, work_s, step_s = costs
    return price_s <= share * steps * (step_s - work_s)


def brute(costs: tuple[float, float, float], most: int, share: float = PRICE_SHARE) -> int:
    return next((n for n in range(1, most + 1) if carried(costs, n, share)), most)


def fed(
    estimator: BatchEstimator, costs: tuple[float, float, float], rounds: int = 10, steps: int = 4
) -> BatchEstimator:
    price_s, work_s, step_s = costs
    for _ in range(rounds):
        estimator.observe_step(step_s)
        estimator.observe_write(steps, 1000 * steps, price_s, work_s * steps)
        estimator.choose()
    return estimator


@given(any_costs(), st.integers(1, 400), st.sampled_from([PRICE_SHARE, 0.075, 0.5]))
def test_the_batch_is_the_shortest_that_is_carried(
    costs: tuple[float, float, float], most: int, share: float
) -> None:
    assert least_batch(*costs, most=most, share=share) == brute(costs, most, share)


@given(any_costs(), st.integers(1, 400))
def test_price_and_bytes_take_less_than_all_of_the_time(
    costs: tuple[float, float, float], most: int
) -> None:
    price_s, work_s, step_s = costs
    steps = least_batch(*costs, most=most)
    if steps < most:
        assert price_s + steps * work_s < steps * step_s


@given(
    st.lists(any_costs(), min_size=1, max_size=4),
    st.integers(10, 300),
    st.none() | st.integers(500, 10**6),
)
def test_the_batch_in_force_is_not_too_short_and_not_much_too_long(
    all_costs: list[tuple[float, float, float]], most: int, bytes_max: int | None
) -> None:
    estimator = BatchEstimator(10, most, bytes_max)
    for costs in all_costs:
        fed(estimator, costs, rounds=64)  # by then nothing else is remembered
        within = max(1, min(most, int(LONGEST_S / costs[2]), (bytes_max or 10**9) // 1000))
        low = brute(costs, within, 1.25 * PRICE_SHARE * (1 + 1e-9))
        high = brute(costs, within, 0.75 * PRICE_SHARE * (1 - 1e-9))
        assert low <= estimator.steps <= high


@given(any_costs(), st.integers(10, 400))
def test_the_first_choice_is_the_shortest(costs: tuple[float, float, float], most: int) -> None:
    estimator = fed(BatchEstimator(10, most), costs)
    within = max(1, min(most, int(LONGEST_S / costs[2])))
    shortest = {brute(costs, within, PRICE_SHARE * about) for about in (1 - 1e-9, 1 + 1e-9)}
    near = (brute(costs, within, PRICE_SHARE * about) for about in (1.25, 0.75))
    low, high = near
    assert estimator.steps in shortest or (low <= 10 <= high and estimator.steps == 10)


def test_nothing_is_chosen_before_enough_was_measured() -> None:
    estimator = BatchEstimator(10, 100)
    for _ in range(4):
        estimator.observe_write(10, 1000, 0.001, 0.001)
    for _ in range(50):
        estimator.observe_step(1.0)
    assert estimator.choose() == 10
    estimator.observe_write(10, 1000, 0.001, 0.001)
    assert estimator.choose() == 1
    slow = BatchEstimator(10, 100)
    for _ in range(50):
        slow.observe_write(10, 1000, 0.001, 0.001)
    for _ in range(7):
        slow.observe_step(1.0)
    assert slow.choose() == 10
    slow.observe_step(1.0)
    assert slow.choose() == 1


@pytest.mark.parametrize("left_alone", [True, False])
def test_noise_of_the_disk_changes_nothing(
    left_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would, without what is left alone."""
    if not left_alone:
        monkeypatch.setattr(module, "_NEAR", 0.0)
    draw = random.Random(5)
    estimator, changes = fed(BatchEstimator(10, 1000), (0.5, 0.2, 1.0), rounds=30), 0
    for _ in range(300):
        before = estimator.steps
        noisy = 0.5 * draw.uniform(0.75, 1.3), 0.2 * draw.uniform(0.75, 1.3), draw.uniform(0.8, 1.3)
        fed(estimator, noisy, rounds=1)
        if draw.random() < 0.05:
            estimator.observe_write(4, 4000, 30.0, 5.0)
            estimator.observe_step(20.0)
        changes += estimator.steps != before
    assert changes <= 1 if left_alone else changes > 10
    assert 6 <= estimator.steps <= 9


def test_it_follows_a_change_that_lasts_both_ways() -> None:
    estimator = fed(BatchEstimator(10, 1000), (0.01, 0.1, 1.0), rounds=30)
    assert estimator.steps == 1
    fed(estimator, (2.0, 0.1, 1.0), rounds=20)
    assert estimator.steps == brute((2.0, 0.1, 1.0), 1000) == 23
    fed(estimator, (0.3, 0.1, 1.0), rounds=20)
    assert estimator.steps == brute((0.3, 0.1, 1.0), 1000) == 4


def test_a_disk_that_does_not_carry_the_bytes_gets_the_longest_batch() -> None:
    assert fed(BatchEstimator(10, 40), (0.01, 1.1, 1.0)).steps == 40
    assert fed(BatchEstimator(10, 10**5), (0.01, 1.1, 1.0)).steps == LONGEST_S
    assert fed(BatchEstimator(10, 10**5, 25_000), (0.01, 1.1, 1.0)).steps == 25
    assert fed(BatchEstimator(10, 10**5, 10), (0.01, 1.1, 1.0)).steps == 1, "a step is a step"


def test_a_clock_that_stands_still_is_no_error() -> None:
    assert fed(BatchEstimator(10, 100), (0.0, 0.0, 0.0)).steps == 10


def test_a_median_of_nothing_is_none() -> None:
    assert weighted_median([], 8.0) is None
