"""``everstep bench lossy-recovery``, with a model that learns in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import OptionError
from everstep.workloads import GPTConfig
from everstep_bench.lossy import (
    ARMS,
    Approximated,
    LossyReport,
    run_lossy,
)
from everstep_bench.options import LossyOptions
from tests.support.displays import Silent
from tests.support.stalls import shown_by

# Its fused projection and its feed-forward layers are large ones (192 x 576, 192 x 768).
SMALL = GPTConfig(layers=1, width=192, heads=4, context=16)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> LossyReport:
    folder = tmp_path_factory.mktemp("lossy")
    options = LossyOptions(
        steps=16, every=5, fail_every=4, batch=2, model=SMALL, folder=Path(folder)
    )
    display = Silent()
    found = run_lossy(options, display)
    assert display.done == display.total == len(ARMS)
    assert not list(folder.iterdir())
    return found


def of(report: LossyReport, arm: str) -> Approximated:
    return next(one for one in report.arms if one.arm == arm)


@pytest.mark.slow
def test_an_exact_log_changes_nothing(report: LossyReport) -> None:
    dense = of(report, "dense")
    assert dense.losses == report.arms[0].losses
    assert report.behind(dense) == (0.0, 0.0)
    assert dense.errors == [0.0] * 4
    assert all(dense.exact)


def test_a_lossy_log_approximates(report: LossyReport) -> None:
    """Less so, the less it holds; and nothing that was recovered from it is called exact."""
    tenth, hundredth = of(report, "adaptive, 10 %"), of(report, "adaptive, 1 %")
    assert tenth.replayed == hundredth.replayed
    assert all(steps > 0 for steps in tenth.replayed)
    assert not any(tenth.exact + hundredth.exact)
    assert 0 < tenth.errors[0] < hundredth.errors[0] < 1
    assert hundredth.losses[:4] == report.arms[0].losses[:4]
    assert hundredth.losses[4:] != report.arms[0].losses[4:]


def test_most_of_it_is_sparse(report: LossyReport) -> None:
    assert 0.5 < report.large / report.parameters < 1


def test_a_table_and_a_document(report: LossyReport) -> None:
    lines = shown_by(report).splitlines()
    assert sum(line.startswith(tuple(ARMS)) for line in lines) == len(ARMS)
    arms = report.as_json()["arms"]
    assert [arm["log"] for arm in arms] == list(ARMS)
    assert arms[1]["loss_behind"] == 0.0


def test_failures_right_behind_bases_are_refused() -> None:
    with pytest.raises(OptionError, match="nothing would be replayed"):
        LossyOptions(every=5, fail_every=10)
    with pytest.raises(OptionError, match="at least 1"):
        LossyOptions(steps=0)
