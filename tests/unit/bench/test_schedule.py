"""``everstep bench schedule``: the cells of Table I, and figures that follow from each other."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from everstep.cli import app
from everstep.cli.common.errors import ExitCode
from everstep.plan.schedule.exact import every_steps
from everstep.plan.schedule.steps import device
from everstep.workloads.published import PUBLISHED
from everstep_bench.options import ScheduleOptions
from everstep_bench.schedule import tables
from everstep_bench.schedule.tables import LAUNCH_S, SHORT, ScheduleReport, run_schedule


class Nowhere:
    def begin(self, what: str, total: int) -> None:
        pass

    def advance(self, what: str) -> None:
        pass


def planned(options: ScheduleOptions) -> ScheduleReport:
    report = run_schedule(options, Nowhere())
    assert isinstance(report, ScheduleReport)
    return report


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One network for Fig. 2, and one row of Table I."""
    monkeypatch.setattr(tables, "PUBLISHED", {"alexnet": PUBLISHED["alexnet"]})
    monkeypatch.setattr(tables, "TABLE", tables.TABLE[:1])


@pytest.mark.slow
def test_table_1() -> None:
    report = planned(ScheduleOptions(batches=()))
    rows = [cell for cell in report.cells if cell.model != SHORT]
    assert len(rows) == 9
    assert all(cell.feasible == cell.paper for cell in rows)
    short = [cell for cell in report.cells if cell.model == SHORT]
    assert [cell.feasible for cell in short] == [False] * 3
    assert all(cell.holds_from_s is not None and 0 < cell.holds_from_s < LAUNCH_S for cell in short)


@pytest.mark.usefixtures("few")
def test_figure_2() -> None:
    report = planned(ScheduleOptions(batches=(32,)))
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
    verdicts = {verdict.target.partition(",")[0]: verdict for verdict in report.verdicts()}
    assert verdicts["Table I as in the paper"].figure == "3 of 3"
    assert verdicts["Table I as in the paper"].met
    assert verdicts["gap to the lower bound at most 2.5%"].met
    assert verdicts["direct"].figure == "2 of 2 plans"
    slowest = verdicts["trace and greedy plan within 5 s of processor time"]
    assert "alexnet, batch 32" in slowest.figure
    assert verdicts["Fig. 2"].met is False  # of one network, which has more
    assert [verdict.met for verdict in report.verdicts()][-1] is None  # nothing was solved
    assert not report.all_met()


@pytest.mark.usefixtures("few")
def test_what_persisting_takes() -> None:
    """By hand: a checkpoint of 244.4 MB in each step (section IV-B)."""
    report = planned(ScheduleOptions(batches=(32,), disk_bytes_per_s=2e9))
    fast, slow = report.persisting()
    for column in (fast, slow):
        assert column.state_bytes == 4 * 61_100_840
        assert column.disk_bytes_per_s == pytest.approx(244_403_360 / column.step_s)
    assert fast.step_s == pytest.approx(5.55e-3, rel=0.01)
    assert slow.step_s > fast.step_s
    found = report.as_json()["persisting"]
    assert [row["every_steps"] for row in found] == [23, 19]
    for row in found:
        assert (row["every_steps"] - 1) * 2e9 < row["disk_bytes_per_s"] <= row["every_steps"] * 2e9


def test_a_disk_that_keeps_up() -> None:
    assert every_steps(3e9, 3e9) == 1
    assert every_steps(3.1e9, 3e9) == 2
    assert every_steps(1.0, 3e9) == 1


@pytest.mark.parametrize(("exact_s", "met"), [(119.0, True), (121.0, False), (None, None)])
def test_verdicts_of_times(exact_s: float | None, met: bool | None) -> None:
    row = tables.Solved("alexnet", 32, "paper", 76, 63e9, 4.0, 0.9, 4 << 20, 0.0, exact_s, 0.0)
    options = ScheduleOptions()
    made = tables.ScheduleReport(options, "", (), (), (row,), 1.0)
    *_, greedy, exact = made.verdicts()
    assert (greedy.met, exact.met) == (True, met)
    assert made.all_met() == (met is not False)
    slower = dataclasses.replace(row, greedy_s=1.1)
    made = dataclasses.replace(made, solved=(row, slower))
    assert made.verdicts()[-2].met is False
    assert "5.1 s at most" in made.verdicts()[-2].figure


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_solve_times() -> None:
    """Where 63 GB/s are too few, at a twentieth more than it takes; exact is never worse."""
    pytest.importorskip("pyscipopt")
    rows = list(tables.solve_all(device("rtx3090"), (1, 32), Nowhere(), exact_s=20))
    assert [(row.batch, row.link_bytes_per_s > 63e9) for row in rows] == [
        *((1, True), (1, True), (32, False), (32, False))
    ]
    for row in rows:
        assert (row.exact_s is None) == (row.gap == 0)
        assert row.exact_gap is None or row.exact_gap <= row.gap


@pytest.mark.slow
def test_all_are_planned_within_seconds() -> None:
    rows = list(tables.solve_all(device("rtx3090"), (1, 32), Nowhere()))
    assert len(rows) == 2 * 2 * 8
    for row in rows:
        assert row.gap <= 0.025, row
        assert row.trace_s + row.greedy_s < 5, row


@pytest.mark.usefixtures("few")
def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    row = tables.Solved("alexnet", 32, "paper", 76, 63e9, 1.0, 0.02, 1 << 18, 0.0027, 10.0, 0.0)
    monkeypatch.setattr(tables, "solve_all", lambda *_, **__: [row])
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "schedule", "--check"])
    assert shown.exit_code == ExitCode.INFEASIBLE, shown.output
    assert "yes (yes)" in shown.stdout
    assert "no, from" in shown.stdout
    assert "To trace and to plan" in shown.stdout
    assert "0.27%     10    0.00%" in shown.stdout
    assert "Section IV-B" in shown.stdout
    assert "met     exact plan" in shown.stdout
    assert "not met Fig. 2, mean" in shown.stdout
    result = CliRunner().invoke(app, ["bench", "schedule", "--gpu", "h200", "--json"])
    assert result.exit_code == ExitCode.OK, result.output
    found = json.loads(result.stdout)
    assert [verdict["met"] for verdict in found["verdicts"]][:2] == [None, None]  # another GPU
    assert found["persisting"][0]["every_steps"] > 1
    assert found["paper"]["reduction, mean, batch 32"] == 0.128
    assert len(found["table_1"]) == 3
    assert CliRunner().invoke(app, ["bench", "schedule", "--gpu", "x"]).exit_code == ExitCode.USAGE
