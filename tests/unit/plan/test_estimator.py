"""The estimator: medians, the posterior of failures, a choice that does not flap, saved state."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import InfeasibleError
from everstep.plan.estimator import Estimator, FailurePrior
from everstep.plan.interval import Choice, Costs, best_choice, interval_steps_min, waste

COSTS = Costs(14e9, 3e9, 0.2, 4 * 3600.0, 1.1)
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
        base_cost_s=draw(st.none() | log_uniform(1e-3, 100)),
    )


def fed(estimator: Estimator, costs: Costs = COSTS, rounds: int = 3) -> Estimator:
    """An estimator that has seen some rounds of these costs."""
    for _ in range(rounds):
        estimator.observe_step(costs.step_s)
        estimator.observe_replay(10, 10 * costs.replay_s)
        estimator.observe_base(costs.state_bytes, costs.write_s, costs.base_cost_s)
        estimator.observe_load(costs.state_bytes, costs.load_s)
    return estimator


def recommended(estimator: Estimator) -> Choice:
    found = estimator.recommend()
    assert found is not None
    return found


def test_estimator_waits_for_a_step_a_base_and_a_replay() -> None:
    estimator = Estimator()
    assert estimator.recommend() is None
    estimator.observe_step(1.0)
    estimator.observe_base(1e9, 1.0)
    assert estimator.costs() is None
    estimator.observe_replay(4, 0.4)
    costs = estimator.costs()
    assert costs is not None
    assert (costs.replay_s, costs.write_s, costs.load_s, costs.batch_write_s) == (0.1, 1, 1, 0)
    assert costs.base_cost_s is None
    assert recommended(estimator).interval_steps >= 1


def test_estimator_finds_what_the_costs_give() -> None:
    prior = FailurePrior(1.0, COSTS.mtbf_s)
    costs = replace(COSTS, load_bytes_per_s=2e9, base_cost_s=1.0)
    estimator = fed(Estimator(prior=prior), costs)
    found = recommended(estimator)
    best = best_choice(costs)
    assert (found.interval_steps, best.batch_steps) == (best.interval_steps, 1)
    assert found.waste.total == pytest.approx(best.waste.total)


def test_estimates_shrug_off_outliers_and_follow_what_lasts() -> None:
    estimator = fed(Estimator(), rounds=40)
    for _ in range(3):
        estimator.observe_step(500.0)
        estimator.observe_base(COSTS.state_bytes, 1000.0)
        estimator.observe_replay(1, 99.0)
    costs = estimator.costs()
    assert costs is not None
    assert costs.step_s == COSTS.step_s
    assert costs.write_s == pytest.approx(COSTS.write_s)
    assert costs.replay_s == pytest.approx(COSTS.replay_s)
    # Half of all weight is in the newest 16 or so: later, the change is believed.
    for _ in range(18):
        estimator.observe_step(500.0)
    costs = estimator.costs()
    assert costs is not None
    assert costs.step_s == 500.0


@pytest.mark.parametrize(
    ("slowed_s", "cost_s"),
    [((-0.3, 0.0, 0.4, -0.2, 0.1), 0.5), ((0.3, 0.25, 0.4), 0.8), ((-0.3, -0.2), 0.5)],
)
def test_noise_of_steps_beside_bases_is_no_cost(slowed_s: Sequence[float], cost_s: float) -> None:
    estimator = Estimator()
    for slower_s in slowed_s:
        estimator.observe_base(1e9, 1.0, 0.5, slower_s)
    assert estimator.base_cost_s == pytest.approx(cost_s)


def test_rare_slow_steps_hide_no_slowdown() -> None:
    """Each 50th step takes a hundred times as long; a base slows two steps by half."""
    estimator = Estimator()
    for number in range(1, 1001):
        estimator.observe_step(10.0 if number % 50 == 0 else 0.1)
        if number % 20 == 0:
            estimator.observe_base(1e9, 1.0, 0.001, estimator.slower_s([0.15, 0.15]))
    assert estimator.base_cost_s == pytest.approx(0.101, rel=0.2)


def test_expected_costs_count_as_a_few_bases_and_as_no_measurement() -> None:
    estimator = Estimator()
    estimator.expect_base(1e9, 2.0, 1.0)
    assert (estimator.base_cost_s, estimator.measured_base_cost_s) == (1.0, None)
    for _ in range(3):
        estimator.observe_base(1e9, 2.0, 0.25)
    assert (estimator.base_cost_s, estimator.measured_base_cost_s) == (1.0, 0.25)
    for _ in range(3):
        estimator.observe_base(1e9, 2.0, 0.25)
    assert estimator.base_cost_s == 0.25


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=90))
def test_median_is_weighted(samples: list[float]) -> None:
    estimator = Estimator()
    for sample in samples:
        estimator.observe_step(sample)
    estimator.observe_base(1e9, 1.0)
    estimator.observe_replay(1, 0.001)
    costs = estimator.costs()
    assert costs is not None
    seen = samples[-64:]
    weights = [0.5 ** (age / 16) for age in reversed(range(len(seen)))]
    below = sum(w for s, w in zip(seen, weights, strict=True) if s < costs.step_s)
    above = sum(w for s, w in zip(seen, weights, strict=True) if s > costs.step_s)
    assert costs.step_s in seen
    assert max(below, above) <= sum(weights) / 2 * (1 + 1e-9)


def test_failures_follow_the_posterior_of_a_gamma_prior() -> None:
    estimator = Estimator()
    assert estimator.mtbf_s == 20.0  # nothing seen, no division by nothing
    estimator.advance(7 * 86_400)
    assert estimator.mtbf_s == pytest.approx(14 * 86_400, rel=0.1)
    estimator = Estimator()
    for hour in range(1, 11):
        estimator.observe_failure(hour * 3600)
    assert estimator.mtbf_s == pytest.approx(36_010 / 10.5, rel=0.02)
    # A stronger belief moves less.
    sure = Estimator(prior=FailurePrior(100, 100 * 86_400))
    sure.observe_failure(3600)
    assert sure.mtbf_s == pytest.approx(86_400, rel=0.02)


def test_time_that_goes_back_adds_a_failure_and_no_time() -> None:
    estimator = Estimator()
    estimator.advance(1000)
    estimator.observe_failure(900)
    estimator.advance(950)
    assert estimator.mtbf_s == pytest.approx(1010 / 1.5, rel=1e-3)


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=20))
def test_old_failures_fade_as_their_definition_says(at: list[float]) -> None:
    half_life_s = 30 * 86_400.0
    at = sorted(at)
    estimator = Estimator()
    for moment in at:
        estimator.observe_failure(moment)
    end = at[-1] + 1e5
    for part in range(1, 11):  # in how many pieces time goes by does not matter
        estimator.advance(at[-1] + 1e4 * part)
    failures = sum(0.5 ** ((end - moment) / half_life_s) for moment in at)
    seen_s = half_life_s / math.log(2) * (1 - 0.5 ** (end / half_life_s))
    assert estimator.mtbf_s == pytest.approx((10 + seen_s) / (0.5 + failures), rel=1e-6)


def test_noise_does_not_make_it_flap_and_a_real_change_does() -> None:
    draw = random.Random(7)
    estimator = Estimator()
    seen = set()
    for _ in range(200):
        noisy = replace(
            COSTS,
            step_s=COSTS.step_s * draw.uniform(0.85, 1.15),
            replay_s=COSTS.replay_s * draw.uniform(0.7, 1.3),
            write_bytes_per_s=COSTS.write_bytes_per_s * draw.uniform(0.7, 1.3),
        )
        seen.add(recommended(fed(estimator, noisy, rounds=1)).interval_steps)
    assert len(seen) == 1
    before = recommended(estimator)
    slow = fed(estimator, replace(COSTS, write_bytes_per_s=3e8), rounds=64)
    after = recommended(slow)
    assert after.interval_steps > 2 * before.interval_steps
    assert recommended(slow).interval_steps == after.interval_steps


@given(any_costs(), any_costs())
def test_what_stays_in_force_is_allowed_and_within_the_margin(first: Costs, then: Costs) -> None:
    margin = 0.05
    estimator = Estimator()
    for costs in (first, then):
        fed(estimator, costs, rounds=64)
        measured = estimator.costs()
        assert measured is not None
        try:
            found = recommended(estimator)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                best_choice(measured)
            continue
        best = best_choice(measured)
        assert found.waste.total * (1 - margin) <= best.waste.total * (1 + 1e-12)
        assert found.interval_steps >= interval_steps_min(measured)
        assert found.waste == waste(
            measured, found.interval_steps * measured.step_s, measured.step_s
        )


def test_a_choice_that_is_no_longer_allowed_is_given_up() -> None:
    estimator = fed(Estimator())
    before = recommended(estimator)
    # Writing a base now takes longer than the interval.
    slow_s = (before.interval_steps + 10) * COSTS.step_s
    for _ in range(64):
        estimator.observe_base(COSTS.state_bytes, slow_s, stall_s=0.0)
    after = recommended(estimator)
    assert after.interval_steps >= before.interval_steps + 10


def test_infeasible_measurements_are_said_and_change_nothing() -> None:
    estimator = fed(Estimator())
    before = recommended(estimator)
    for _ in range(64):
        estimator.observe_replay(1, 2 * COSTS.step_s)
    with pytest.raises(InfeasibleError):
        estimator.recommend()
    fed(estimator, rounds=64)
    after = recommended(estimator)
    assert after.interval_steps == before.interval_steps
