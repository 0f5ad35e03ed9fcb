"""The estimator: medians, the posterior of failures, a choice that does not flap, saved state."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import InfeasibleError, OptionError
from everstep.plan.costs import Costs, waste
from everstep.plan.estimator import Estimator, FailurePrior, Recommendation
from everstep.plan.interval import best_choice, interval_steps_min

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


def recommended(estimator: Estimator) -> Recommendation:
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
    assert recommended(estimator).changed


def test_estimator_finds_what_the_costs_give() -> None:
    prior = FailurePrior(seconds=COSTS.mtbf_s)
    costs = replace(COSTS, load_bytes_per_s=2e9, base_cost_s=1.0, accelerators=8)
    estimator = fed(Estimator(prior=prior, accelerators=8), costs)
    found = recommended(estimator)
    best = best_choice(costs)
    assert (found.interval_steps, best.batch_steps) == (best.interval_steps, 1)
    assert found.waste.total == pytest.approx(best.waste.total)
    assert found.costs.accelerators == 8
    assert found.costs.load_s == pytest.approx(7.0)


def test_estimates_shrug_off_outliers_and_follow_what_lasts() -> None:
    estimator = fed(Estimator(window=32, half_life=8), rounds=20)
    for _ in range(3):
        estimator.observe_step(500.0)
        estimator.observe_base(COSTS.state_bytes, 1000.0)
        estimator.observe_replay(1, 99.0)
    costs = estimator.costs()
    assert costs is not None
    assert costs.step_s == COSTS.step_s
    assert costs.write_s == pytest.approx(COSTS.write_s)
    assert costs.replay_s == pytest.approx(COSTS.replay_s)
    # Half of all weight is in the newest 8 or so: later, the change is believed.
    for _ in range(9):
        estimator.observe_step(500.0)
    costs = estimator.costs()
    assert costs is not None
    assert costs.step_s == 500.0


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40), st.floats(0.5, 30))
def test_median_is_weighted(samples: list[float], half_life: float) -> None:
    estimator = Estimator(window=25, half_life=half_life)
    for sample in samples:
        estimator.observe_step(sample)
    estimator.observe_base(1e9, 1.0)
    estimator.observe_replay(1, 0.001)
    costs = estimator.costs()
    assert costs is not None
    seen = samples[-25:]
    weights = [0.5 ** (age / half_life) for age in reversed(range(len(seen)))]
    below = sum(w for s, w in zip(seen, weights, strict=True) if s < costs.step_s)
    above = sum(w for s, w in zip(seen, weights, strict=True) if s > costs.step_s)
    assert costs.step_s in seen
    assert max(below, above) <= sum(weights) / 2 * (1 + 1e-9)


def test_failures_follow_the_posterior_of_a_gamma_prior() -> None:
    estimator = Estimator(failure_half_life_s=None)
    assert estimator.mtbf_s == 86_400  # nothing seen, no division by nothing
    estimator.advance(7 * 86_400)
    assert estimator.mtbf_s == 8 * 86_400
    estimator = Estimator(failure_half_life_s=None)
    for hour in range(1, 11):
        estimator.observe_failure(hour * 3600)
    assert estimator.mtbf_s == pytest.approx((86_400 + 36_000) / 11)
    assert estimator.trained_s == 36_000
    # A stronger belief moves less.
    sure = Estimator(prior=FailurePrior(100, 100 * 86_400), failure_half_life_s=None)
    sure.observe_failure(3600)
    assert sure.mtbf_s == pytest.approx(86_400, rel=0.02)


def test_time_that_goes_back_adds_a_failure_and_no_time() -> None:
    estimator = Estimator(failure_half_life_s=None)
    estimator.advance(1000)
    estimator.observe_failure(900)
    estimator.advance(950)
    assert estimator.trained_s == 1000
    assert estimator.mtbf_s == pytest.approx((86_400 + 1000) / 2)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(1e3, 1e7))
def test_old_failures_fade_as_their_definition_says(at: list[float], half_life_s: float) -> None:
    at = sorted(at)
    estimator = Estimator(failure_half_life_s=half_life_s)
    for moment in at:
        estimator.observe_failure(moment)
    end = at[-1] + 1e5
    for part in range(1, 11):  # in how many pieces time goes by does not matter
        estimator.advance(at[-1] + 1e4 * part)
    failures = sum(0.5 ** ((end - moment) / half_life_s) for moment in at)
    seen_s = half_life_s / math.log(2) * (1 - 0.5 ** (end / half_life_s))
    assert estimator.mtbf_s == pytest.approx((86_400 + seen_s) / (1 + failures), rel=1e-6)


def test_noise_does_not_make_it_flap_and_a_real_change_does() -> None:
    draw = random.Random(7)
    estimator = Estimator(window=16, half_life=4)
    changes = 0
    for _ in range(200):
        noisy = replace(
            COSTS,
            step_s=COSTS.step_s * draw.uniform(0.85, 1.15),
            replay_s=COSTS.replay_s * draw.uniform(0.7, 1.3),
            write_bytes_per_s=COSTS.write_bytes_per_s * draw.uniform(0.7, 1.3),
        )
        changes += recommended(fed(estimator, noisy, rounds=1)).changed
    assert changes == 1  # the first
    before = recommended(estimator)
    slow = fed(estimator, replace(COSTS, write_bytes_per_s=3e8), rounds=16)
    after = recommended(slow)
    assert after.changed
    assert after.interval_steps > 2 * before.interval_steps
    assert not recommended(slow).changed


def test_without_a_margin_the_same_noise_makes_it_flap() -> None:
    draw = random.Random(7)
    estimator = Estimator(window=16, half_life=4, margin=0.0)
    for _ in range(50):
        fed(estimator, replace(COSTS, step_s=COSTS.step_s * draw.uniform(0.85, 1.15)), rounds=1)
        changes = recommended(estimator).changed
    assert changes is not None
    series = []
    for _ in range(50):
        fed(estimator, replace(COSTS, step_s=COSTS.step_s * draw.uniform(0.85, 1.15)), rounds=1)
        series.append(recommended(estimator).changed)
    assert sum(series) > 5


@given(any_costs(), any_costs())
def test_what_stays_in_force_is_allowed_and_within_the_margin(first: Costs, then: Costs) -> None:
    margin = 0.1
    estimator = Estimator(window=4, half_life=1, margin=margin)
    for costs in (first, then):
        fed(estimator, costs, rounds=4)
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
    estimator = fed(Estimator(margin=0.99, window=4, half_life=1))
    before = recommended(estimator)
    # Nothing saves 99 %, but writing a base now takes longer than the interval.
    slow_s = (before.interval_steps + 10) * COSTS.step_s
    for _ in range(4):
        estimator.observe_base(COSTS.state_bytes, slow_s, cost_s=0.0)
    after = recommended(estimator)
    assert after.changed
    assert after.interval_steps >= before.interval_steps + 10


def test_infeasible_measurements_are_said_and_change_nothing() -> None:
    estimator = fed(Estimator(window=4, half_life=1))
    before = recommended(estimator)
    for _ in range(4):
        estimator.observe_replay(1, 2 * COSTS.step_s)
    with pytest.raises(InfeasibleError):
        estimator.recommend()
    fed(estimator, rounds=4)
    after = recommended(estimator)
    assert after.interval_steps == before.interval_steps
    assert not after.changed


events = st.lists(
    st.tuples(st.sampled_from(["step", "base", "load", "replay", "fail", "go"]),
              st.floats(0.01, 50), st.floats(0.01, 50)),
    max_size=30,
)  # fmt: skip


def happen(estimator: Estimator, what: list[tuple[str, float, float]]) -> None:
    for kind, one, other in what:
        if kind == "step":
            estimator.observe_step(one)
        elif kind == "base":
            estimator.observe_base(one * 1e9, other, one)
        elif kind == "load":
            estimator.observe_load(one * 1e9, other)
        elif kind == "replay":
            estimator.observe_replay(math.ceil(one), other / 100)
        elif kind == "fail":
            estimator.observe_failure(estimator.trained_s + one * 1e4)
        else:
            estimator.advance(estimator.trained_s + one * 1e5)


def asked(estimator: Estimator) -> object:
    try:
        return estimator.recommend()
    except InfeasibleError as error:
        return error.fields()


@given(events, events)
def test_an_estimator_goes_on_from_its_saved_state(
    before: list[tuple[str, float, float]], after: list[tuple[str, float, float]]
) -> None:
    one = Estimator(window=8)
    happen(one, before)
    asked(one)
    other = Estimator(window=8)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.state_dict() == one.state_dict()
    assert asked(other) == asked(one)
    for estimator in (one, other):
        happen(estimator, after)
    assert asked(other) == asked(one)
    assert other.state_dict() == one.state_dict()
    assert all(len(series) <= 8 for series in one.state_dict()["series"].values())


def test_a_saved_state_is_no_window_into_the_estimator() -> None:
    estimator = fed(Estimator())
    state = estimator.state_dict()
    copy = json.loads(json.dumps(state))
    fed(estimator)
    assert state == copy


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"series": {}},
        {"series": None},
        {"series": {"step_s": ["x"]}},
        {"series": {"step_s": [math.nan]}},
        {"series": {"step_s": [-1.0]}},
        {"trained_s": -1.0},
        {"trained_s": None},
        {"failures": math.inf},
        {"held": 0},
        {"held": 1.5},
        {"held": True},
        {"held": [3]},
        {"held": "x"},
        {"state_bytes": 0},
    ],
)
def test_states_that_are_none_are_refused_whole(wrong: dict[str, Any]) -> None:
    estimator = fed(Estimator())
    before = estimator.state_dict()
    broken = {**fed(Estimator(), rounds=9).state_dict(), **wrong}
    if wrong.get("series"):
        broken["series"] = {**before["series"], **wrong["series"]}
    for state in (broken, {}):
        with pytest.raises(OptionError, match="not the state of an interval estimator"):
            estimator.load_state_dict(state)
        assert estimator.state_dict() == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 0},
        {"window": 1.5},
        {"half_life": 0.0},
        {"half_life": None},
        {"margin": 1.0},
        {"margin": -0.1},
        {"failure_half_life_s": 0.0},
        {"accelerators": 0},
    ],
)
def test_estimators_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Estimator(**wrong)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_samples_and_priors_that_are_none(wrong: Any) -> None:
    estimator = Estimator()
    before = estimator.state_dict()
    for observe in (
        lambda: estimator.observe_step(wrong),
        lambda: estimator.observe_base(wrong, 1.0),
        lambda: estimator.observe_base(1e9, wrong),
        lambda: estimator.observe_load(1e9, wrong),
        lambda: estimator.observe_replay(wrong, 1.0),
        lambda: estimator.observe_replay(1, wrong),
        lambda: estimator.observe_base(1e9, 1.0, -1.0),
        lambda: estimator.observe_failure(-1.0),
        lambda: FailurePrior(failures=wrong),
        lambda: FailurePrior(seconds=wrong),
    ):
        with pytest.raises(OptionError):
            observe()
    assert estimator.state_dict() == before
