"""Measuring replay and recovery: the ways do the same work, and what is back is what was lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everstep_bench.options import Training
from everstep_bench.step import recovery
from everstep_bench.step.recovery import (
    BLOCKED,
    EVERSTEP,
    RecoveryFigures,
    ReplayFigures,
    measure_recovery,
    measure_replay,
)
from tests.support.replays import assert_same_bits

TINY = 200_000
TRAINING = Training(params=TINY, seed=7)


def test_all_ways_do_the_same_work() -> None:
    shapes = recovery._shapes(TINY)
    found = []
    for way, threads in ((BLOCKED, 1), (BLOCKED, 2), (EVERSTEP, 1), (EVERSTEP, 2)):
        measured = recovery._Way(way, shapes, 3, seed=4)
        assert measured.run(threads) > 0
        found.append((way, measured))
    _, first = found[0]
    for way, other in found[1:]:
        assert_same_bits(dict(other._tensors), dict(first._tensors), way)
        for name, values in first._state.items():
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(other._state[name][key], values[key]), (way, name, key)


def test_replay_is_measured_in_every_way() -> None:
    before = torch.get_num_threads()
    found = measure_replay(params=TINY, steps=2, repeats=2)
    assert torch.get_num_threads() == before
    assert set(found.seconds) == {(w, n) for w in (BLOCKED, EVERSTEP) for n in (1, 2)}
    assert all(len(rounds) == 2 for rounds in found.seconds.values())
    plain = found.as_json()
    assert len(plain["rows"]) == 4
    assert plain["copy_bytes_per_s"]["1"] > 0


def test_the_arithmetic_on_figures() -> None:
    seconds = {(EVERSTEP, 1): (2.0, 4.0, 1.0), (BLOCKED, 1): (1.0, 4.0, 3.0)}
    found = ReplayFigures(100, 6, seconds, {1: 12_000.0})
    assert found.speed(EVERSTEP, 1) == 600.0
    assert found.ratio(1) == 1.0  # of 0.5, 1 and 3
    assert found.of_bandwidth(1) == pytest.approx(600 * (24 / 6 + 2) / 12_000)
    back = RecoveryFigures(
        to="disk",
        params=10,
        state_bytes=120,
        log_bytes=80,
        steps=2,
        resume_s=2.0,
        load_s=1.0,
        replay_s=0.5,
        training_s=6.0,
        source="disk",
        exact=True,
        identical=True,
    )
    assert (back.replay_s, back.steps_per_s, back.faster_than_training) == (0.5, 4.0, 12.0)
    assert back.parameter_steps_per_s == 40.0
    assert back.as_json()["steps_per_s"] == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("to", ["memory", "disk"])
def test_what_was_killed_is_back(to: str, tmp_path: Path) -> None:
    found = measure_recovery(tmp_path, TRAINING, steps=3, to=to)
    assert (found.steps, found.source) == (3, to)
    assert found.exact
    assert found.identical
    assert found.state_bytes == pytest.approx(12 * found.params, rel=0.01)
    assert found.log_bytes >= 3 * 4 * found.params
    assert found.resume_s > 0
    assert found.training_s > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_fused_training_is_replayed_by_its_kernel(tmp_path: Path) -> None:
    found = measure_recovery(tmp_path, TRAINING, steps=3, fused=True)
    assert (found.variant, found.exact, found.identical) == ("fused", True, True)
