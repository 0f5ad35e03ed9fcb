"""``everstep bench schedule``: the cells of Table I, and figures that follow from each other."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from everstep.bench.schedule import solving, tables
from everstep.bench.schedule.tables import LAUNCH_S, ScheduleOptions, run_schedule
from everstep.bench.workloads.published import PUBLISHED
from everstep.cli import app
from everstep.cli._common import ExitCode
from everstep.plan.devices import device


class Nowhere:
    def begin(self, what: str, total: int) -> None:
        pass

    def advance(self, what: str) -> None:
        pass


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One network for Fig. 2, and one row of Table I."""
    monkeypatch.setattr(tables, "PUBLISHED", {"alexnet": PUBLISHED["alexnet"]})
    monkeypatch.setattr(solving, "PUBLISHED", {"alexnet": PUBLISHED["alexnet"]})
    monkeypatch.setattr(tables, "TABLE", tables.TABLE[:1])


@pytest.mark.slow
def test_table_1() -> None:
    report = run_schedule(ScheduleOptions(batches=()), Nowhere())
    rows = [cell for cell in report.cells if cell.model != "bert, 4 tokens"]
    assert len(rows) == 9
    assert all(cell.feasible == cell.paper for cell in rows)
    short = [cell for cell in report.cells if cell.model == "bert, 4 tokens"]
    assert [cell.feasible for cell in short] == [False] * 3
    assert all(cell.holds_from_s is not None and 0 < cell.holds_from_s < LAUNCH_S for cell in short)


@pytest.mark.usefixtures("few")
def test_figure_2() -> None:
    report = run_schedule(ScheduleOptions(batches=(32,)), Nowhere())
    assert [cell.feasible for cell in report.cells] == [True, False, False]
    assert len(report.columns) == 2 * 2 * 2
    for column in report.columns:
        assert column.at_once_bytes == column.peak_bytes + column.state_bytes
        assert column.gap is not None
        assert column.gap <= 0.025
        if column.mode == "direct" and column.order == "after":
            assert column.planned_bytes == column.peak_bytes
            assert column.overhead_reduction == 1
    mean = report.mean_reduction(32, "after", "direct", 0.0)
    found = [c.reduction for c in report.columns if c.reduction is not None]
    assert mean is not None
    assert min(found) <= mean <= max(found)
    for row in report.solved:
        assert row.gap <= 0.025
        assert row.link_bytes_per_s == 63e9
    assert [row.mode for row in report.solved] == ["paper", "direct"]


@pytest.mark.usefixtures("few")
def test_solve_times() -> None:
    """Where 63 GB/s are too few, at a twentieth more than it takes; exact is never worse."""
    pytest.importorskip("pyscipopt")
    rows = list(solving.solve_all(device("rtx3090"), (1, 32), Nowhere(), exact_s=20))
    assert [(row.batch, row.link_bytes_per_s > 63e9) for row in rows] == [
        *((1, True), (1, True), (32, False), (32, False))
    ]
    for row in rows:
        assert (row.exact_s is None) == (row.gap == 0)
        assert row.exact_gap is None or row.exact_gap <= row.gap


@pytest.mark.slow
def test_all_are_planned_within_seconds() -> None:
    rows = list(solving.solve_all(device("rtx3090"), (1, 32), Nowhere()))
    assert len(rows) == 2 * 2 * 8
    for row in rows:
        assert row.gap <= 0.025, row
        assert row.trace_s + row.greedy_s < 5, row


@pytest.mark.usefixtures("few")
def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    row = solving.Solved("alexnet", 32, "paper", 76, 63e9, 1.0, 0.02, 1 << 18, 0.0027, 10.0, 0.0)
    monkeypatch.setattr(tables, "solve_all", lambda *_, **__: [row])
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "schedule"])
    assert shown.exit_code == ExitCode.OK, shown.output
    assert "yes (yes)" in shown.stdout
    assert "no, from" in shown.stdout
    assert "To trace and to plan" in shown.stdout
    assert "0.27%     10    0.00%" in shown.stdout
    result = CliRunner().invoke(app, ["bench", "schedule", "--gpu", "h200", "--json"])
    assert result.exit_code == ExitCode.OK, result.output
    found = json.loads(result.stdout)
    assert found["paper"]["reduction, mean, batch 32"] == 0.128
    assert len(found["table_1"]) == 3
    assert CliRunner().invoke(app, ["bench", "schedule", "--gpu", "x"]).exit_code == ExitCode.USAGE
