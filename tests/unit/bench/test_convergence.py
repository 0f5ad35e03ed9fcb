"""``everstep bench convergence``, with a model that learns in a second."""

from __future__ import annotations

import pytest

from everstep.errors import OptionError
from everstep.workloads import GPTConfig
from everstep_bench.convergence import (
    ARMS,
    ConvergenceReport,
    Learned,
    run_convergence,
)
from everstep_bench.options import ConvergenceOptions
from tests.support.displays import Silent
from tests.support.stalls import shown_by

TINY = GPTConfig(layers=1, width=32, heads=1, context=32)


@pytest.fixture(scope="module")
def report() -> ConvergenceReport:
    display = Silent()
    options = ConvergenceOptions(steps=40, batch=8, seeds=(0,), optimizers=("SGD",), model=TINY)
    found = run_convergence(options, display)
    assert display.done == display.total == len(ARMS)
    return found


def of(report: ConvergenceReport, arm: str) -> Learned:
    return next(one for one in report.learned if one.arm == arm)


def test_every_arm_learns_and_only_what_it_consumes_differs(report: ConvergenceReport) -> None:
    dense = of(report, "dense")
    assert dense.losses[0] < 4.5
    assert report.behind_dense(dense) == (0.0, 0.0)
    others = [one for one in report.learned if one.arm != "threshold 1%"]  # small: all is sampled
    assert len({tuple(one.losses) for one in others}) == len(others)  # none is another one
    assert of(report, "int8").losses[0] == pytest.approx(dense.losses[0], abs=0.02)
    assert of(report, "top 1%, no feedback").losses[0] > of(report, "top 1%").losses[0]


def test_bytes_are_those_of_the_log(report: ConvergenceReport) -> None:
    dense = of(report, "dense")
    assert dense.step_bytes == dense.dense_bytes == 4.0 * report.parameters
    assert of(report, "top 1%").step_bytes < 0.2 * dense.step_bytes
    assert of(report, "top 1%").step_bytes < of(report, "top 10%").step_bytes
    assert of(report, "int8").step_bytes == pytest.approx(dense.step_bytes / 4, rel=0.1)


def test_the_same_seed_gives_the_same_table(report: ConvergenceReport) -> None:
    again = run_convergence(report.options, Silent())
    assert [one.losses for one in again.learned] == [one.losses for one in report.learned]


def test_a_table_and_a_document(report: ConvergenceReport) -> None:
    lines = shown_by(report).splitlines()
    assert sum("SGD" in line for line in lines) == len(ARMS)
    arms = report.as_json()["arms"]
    assert [arm["name"] for arm in arms] == list(ARMS)
    assert arms[0]["loss_behind_dense"] == 0.0


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(OptionError, match="at least one"):
        ConvergenceOptions(seeds=())
