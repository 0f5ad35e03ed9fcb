"""``everstep bench schedule --executed``: captures are compared for real; the verdict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from everstep.cli import app
from everstep.cli.common.errors import ExitCode
from everstep_bench.schedule import executed
from everstep_bench.schedule.executed import ExecutedOptions, ExecutedRow, run_executed
from everstep_bench.schedule.peaks import PeaksReport, allocated_bytes, network_peak
from tests.support.stalls import shown_by

TINY = ExecutedOptions(layers=2, width=32, layer_s=1e-3, steps=3, checked_steps=2)

ROW = ExecutedRow(
    order="after",
    factor=1.0,
    link_bytes_per_s=1e9,
    state_bytes=1,
    alone_s=0.1,
    predicted_wait_s=0.05,
    waited_s=0.05,
    step_s=0.15,
    late_s=(0.0, 0.0),
    plans=1,
    strayed_steps=0,
    followed_steps=9,
    duplicated_bytes=0,
    compared=4,
    torn=0,
)


class Nowhere:
    def begin(self, what: str, total: int) -> None:
        pass

    def advance(self, what: str) -> None:
        pass


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One link, that is too slow."""
    monkeypatch.setattr(executed, "_FACTORS", (0.7,))


@pytest.mark.usefixtures("few")
def test_plans_are_carried_out_and_captures_compared(tmp_path: Path) -> None:
    report = run_executed(dataclasses.replace(TINY, folder=tmp_path), Nowhere())
    assert [row.order for row in report.rows] == ["after", "inside"]
    for row in report.rows:
        assert row.plans >= 1
        assert row.followed_steps >= TINY.steps
        assert row.compared > 0
        assert row.torn == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("few")
def test_a_capture_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = executed.contents_of
    monkeypatch.setattr(
        executed, "contents_of", lambda held: ((name, data[:-1]) for name, data in real(held))
    )
    report = run_executed(dataclasses.replace(TINY, folder=tmp_path), Nowhere())
    assert all(row.torn == row.compared > 0 for row in report.rows)
    assert not report.all_met()


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"waited_s": 0.0549}, True),
        ({"waited_s": 0.0551}, False),
        ({"waited_s": 0.0449}, False),
        ({"predicted_wait_s": 0.0, "waited_s": 0.0019}, True),
        ({"predicted_wait_s": 0.0, "waited_s": 0.0021}, False),
        ({"waited_s": float("nan")}, False),
        ({"torn": 1}, False),
        ({"compared": 0}, False),
    ],
)
def test_verdict(change: dict[str, float], met: bool) -> None:
    assert dataclasses.replace(ROW, **change).met is met


@pytest.mark.usefixtures("few")
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        executed,
        "ExecutedOptions",
        lambda compute, folder: dataclasses.replace(TINY, compute=compute, folder=folder),
    )
    where = ["--dir", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "schedule", "--executed", "--json", *where])
    assert result.exit_code == ExitCode.OK, result.output
    found = json.loads(result.stdout)
    assert found["link"] == "EMULATED"
    assert len(found["rows"]) == 2
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["bench", "schedule", "--executed", "--compute", *where]
    )
    assert shown.exit_code == ExitCode.OK, shown.output
    assert "the link is EMULATED" in shown.stdout


def test_memory_that_a_step_takes_at_most() -> None:
    def step() -> None:
        one = torch.empty(1 << 20, dtype=torch.uint8)
        two = torch.empty(1 << 20, dtype=torch.uint8)
        del one
        three = torch.empty(1 << 19, dtype=torch.uint8)
        del two, three

    assert allocated_bytes(step) == 2 << 20


@pytest.mark.slow
def test_a_plan_of_a_network_is_followed_with_the_predicted_peak(tmp_path: Path) -> None:
    row = network_peak(tmp_path / "transformer", "transformer", adam=False)
    assert row.followed
    assert row.duplicated_bytes > 0
    assert row.without[1] == pytest.approx(row.without[0], rel=0.02)
    assert row.with_copies[1] == pytest.approx(row.with_copies[0], rel=0.02)
    text = shown_by(PeaksReport("SGD", (row,)))
    assert "transformer" in text
    assert "yes" in text
