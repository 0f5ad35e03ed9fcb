"""Closed-form models, each with a value computed by hand, and with the papers' own tables."""

from __future__ import annotations

import math
import random

import pytest

from everstep.errors import OptionError
from everstep.plan import models
from everstep.plan.interval import Costs, without_log


def test_young() -> None:
    assert models.young_interval_s(8.0, 100.0) == 40.0


def test_daly() -> None:
    """C = 8, M = 100: 40 (1 + 0.2/3 + 0.04/9) - 8 = 34.8444..."""
    assert models.daly_interval_s(8.0, 100.0) == pytest.approx(40 * (1 + 0.2 / 3 + 0.04 / 9) - 8)
    assert models.daly_interval_s(200.0, 100.0) == 100.0, "failures come faster than checkpoints"


def test_daly_run() -> None:
    """W = 1000, i = 90, C = 10, R = 0, M = 100: 100 (e - 1) 1000 / 90."""
    assert models.daly_run_s(1000, 90, 10, 0, 100) == pytest.approx(100 * (math.e - 1) * 1000 / 90)
    assert models.daly_run_s(1000, 90, 10, 100, 100) == pytest.approx(
        math.e * models.daly_run_s(1000, 90, 10, 0, 100)
    )


def test_dalys_interval_is_nearly_the_best_of_his_model() -> None:
    for cost_s in (1.0, 10.0, 60.0):
        best = models.daly_interval_s(cost_s, 100.0)
        run_s = models.daly_run_s(1e4, best, cost_s, 5.0, 100.0)
        others = [models.daly_run_s(1e4, best * f, cost_s, 5.0, 100.0) for f in (0.5, 0.9, 1.1, 2)]
        assert run_s < min(others)


def test_dalys_model_is_what_a_simulation_gives() -> None:
    """A run with failures at random times, also during checkpoints and restarts."""
    rng = random.Random(7)
    mtbf_s, interval_s, cost_s, restart_s, segments = 50.0, 20.0, 5.0, 3.0, 4000
    now_s = 0.0
    for _ in range(segments):
        needed_s = interval_s + cost_s
        while (failed_s := rng.expovariate(1 / mtbf_s)) < needed_s:
            now_s += failed_s
            needed_s = restart_s + interval_s + cost_s
        now_s += needed_s
    expected = models.daly_run_s(segments * interval_s, interval_s, cost_s, restart_s, mtbf_s)
    assert now_s == pytest.approx(expected, rel=0.03)  # the error of 4000 random segments


def test_gockpts_waste() -> None:
    """N = 50, t = 2, C = 5, L = 20, M = 1000: 0.05 + 0.05 + 0.02."""
    assert models.gockpt_waste(50, 2.0, 5.0, 20.0, 1000.0) == pytest.approx(0.12)


def test_gockpts_table_1() -> None:
    """Stalls and intervals of the paper for a failure each 600 s. The step follows from the first
    row; the other rows then agree."""
    rows = {12.226: 272, 1.313: 89, 0.988: 77, 0.435: 51, 0.175: 32}
    step_s = math.sqrt(2 * 12.226 * 600) / 272.5
    for stall_s, interval_steps in rows.items():
        assert models.gockpt_interval_steps(step_s, stall_s, 600.0) == interval_steps


def test_gockpts_best_interval_is_that_of_the_planner() -> None:
    costs = Costs(
        state_bytes=5e9, write_bytes_per_s=1e9, replay_s=1.0, mtbf_s=600.0, step_s=0.5,
        base_cost_s=5.0,
    )  # fmt: skip
    best = models.gockpt_interval_steps(0.5, 5.0, 600.0)
    assert without_log(costs).interval_steps in (best, best + 1)


def test_gockpts_stalls() -> None:
    """With gradients of a seventh of the state 7 and 8 parts save 3 steps, and 14 none."""
    saved = {
        n: models.async_overlap_stall_steps(n) - models.gockpt_stall_steps(n) for n in range(1, 15)
    }
    assert saved[7] == pytest.approx(3.0)
    assert saved[8] == pytest.approx(3.0)
    assert max(saved.values()) == pytest.approx(3.0)
    assert saved[14] == pytest.approx(0.0)
    sixth = {
        n: models.async_overlap_stall_steps(n) - models.gockpt_stall_steps(n, 1 / 6)
        for n in range(1, 13)
    }
    assert max(sixth.values()) == pytest.approx(2.5)
    assert sixth[12] == pytest.approx(0.0)
    assert models.async_overlap_stall_steps(0.5) == 0.0


def test_a_recovery_from_a_tier() -> None:
    """A base of 10 s; 25 steps before the middle of 50, less 5 that are lost: 20 at 0.2 s, which
    fetching them takes; and 5 steps of 2 s again."""
    found = models.tier_recovery(
        1e10, 2e8, 1e9, interval_steps=50, lag_steps=5, replay_s=0.1, step_s=2.0
    )
    assert (found.rollback_s, found.rerun_s) == (10.0, pytest.approx(14.0))
    assert found.total_s == pytest.approx(24.0)
    slow = models.tier_recovery(
        1e10, 2e8, 1e9, interval_steps=50, lag_steps=5, replay_s=0.3, step_s=2.0
    )
    assert slow.rerun_s == pytest.approx(20 * 0.3 + 10)


def test_steps_that_a_tier_does_not_have() -> None:
    """Batches of 5 steps of 0.1 GB to 1 GB/s, in steps of 1 s: half a step each."""
    assert models.batch_lag_steps(5, 1e8, 1e9, 1.0) == pytest.approx(5.5)
    assert models.batch_lag_steps(5, 1e8, 0.9e8, 1.0) == math.inf


def test_a_base_in_tierchecks_chunks() -> None:
    assert models.base_flush_steps(14.25 * 2**30, 256 * 2**20) == 57


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "1"])
def test_what_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(OptionError, match="cost_s must be a positive number"):
        models.young_interval_s(bad, 10.0)
    with pytest.raises(OptionError, match="cost_s must be a positive number"):
        models.daly_interval_s(bad, 10.0)
