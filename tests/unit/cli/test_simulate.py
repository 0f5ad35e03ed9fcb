"""``everstep simulate``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from everstep.plan.simulation import SCHEMES
from tests.support.command import document, invoke

SMALL = ("simulate", "--days", 2, "--gpus", 4000)


def test_all_methods_in_one_table_best_first() -> None:
    shown = invoke(*SMALL, columns=200).output
    rows = [line.split()[0] for line in shown.splitlines()[2:-1]]
    assert set(rows) == set(SCHEMES)
    goodputs = [float(line.split("%")[0].split()[-1]) for line in shown.splitlines()[2:-1]]
    assert goodputs == sorted(goodputs, reverse=True)
    assert "4,000 accelerators, 2 days; steps of 6 s" in shown


def test_one_method_as_a_document() -> None:
    options = ("--method", "lazy", "--every", 50, "--mtbf", "node=1h", "--seed", 7)
    found = document(*SMALL, *options)
    assert found["failures_per_day"] == {"node": pytest.approx(24.0)}
    (outcome,) = found["outcomes"]
    assert (outcome["scheme"], outcome["interval_steps"]) == ("lazy", 50)
    assert outcome["failures"]["node"] > 20
    assert 0.8 < outcome["goodput"] < 1.0
    assert document(*SMALL, *options) == found


def test_a_log_that_does_not_fit_is_mentioned() -> None:
    shown = invoke(
        *SMALL, "--method", "logged+peer+store", "--bandwidth", "store=1GB/s", columns=250
    )
    assert "without a log in: store (larger than its link takes)" in shown.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "magic"), "no scheme 'magic' to simulate"),
        (("--mtbf", "fire=1h"), "'fire' fails every"),
        (("--mtbf", "node=soon"), "--mtbf node="),
        (("--bandwidth", "tape=1GB/s"), "no bandwidth 'tape'"),
        (("--days", 0), "--days 0"),
        (("--state", "big"), "--state"),
    ],
)
def test_what_cannot_be_simulated(options: tuple[object, ...], words: str) -> None:
    result = invoke("simulate", *options)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "where.svg"
    assert invoke(*SMALL, "--picture", path).exit_code == 0
    assert "percent of the time" in path.read_text() or path.stat().st_size > 1000
