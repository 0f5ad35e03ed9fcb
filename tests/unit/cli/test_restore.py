"""``everstep restore``: the state of any logged step as a run of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from everstep.cli import app
from everstep.seams import PosixFileSystem
from everstep.seams.failpoints import FailpointError, arm
from tests.support.inside.declared import declared
from tests.support.logged import World, document, edit_base, invoke, opened, segments_of, train
from tests.support.world import base_folder, flip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """Bases 1, 4, 8, 10, and all of the log."""
    run = tmp_path_factory.mktemp("restore") / "run"
    return run, train(run, World(), 10)


@pytest.fixture
def run(template: tuple[Path, dict[int, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(template[0], tmp_path / "run"))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("step", [1, 3, 4, 7, 10])
def test_resume_loads_what_restore_has_written(
    step: int, run: Path, template: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    """Every bit of the uninterrupted state: model, moments, schedule, plain data, generators."""
    out = tmp_path / "somewhere" / "new"
    found = document("restore", run, "--step", step, "--out", out)
    assert (found["step"], found["exact"], found["why"]) == (step, True, "")
    assert found["replayed"] == step - found["base"]["step"]
    assert document("verify", out)["ok"]
    other = World(seed=99)
    with opened(out, other, every=1000) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.exact) == (step, True)
        assert other.snapshot() == template[1][step]
        if step < 10:  # and training goes on as it did
            other.train()
            ckpt.step()
            assert other.snapshot() == template[1][step + 1]


def test_a_new_run_that_names_its_lineage(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    out.mkdir()  # empty: fine
    found = document("restore", run, "--step", 6, "--out", out)
    assert found["out_run"] != found["run"]
    record = json.loads((out / "timeline-00001" / "timeline.json").read_text())
    marker = json.loads((out / "timeline-00001/base/000000000006/rank-00000.done").read_text())
    assert (record["exact"], record["parent"], record["run"]) == (True, None, found["out_run"])
    assert (marker["exact"], marker["step"], marker["lsn"]) == (True, 6, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run"]


def test_what_is_not_exact_stays_so(run: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    edit_base(run, 4, lambda state: setattr(state, "marker", replace(state.marker, exact=False)))
    result = invoke("restore", run, "--step", 6, "--out", tmp_path / "new")
    assert result.exit_code == 0
    assert "not exact: the base is not exact" in result.stdout
    with opened(tmp_path / "new", World(seed=2)) as ckpt:
        assert not ckpt.resume().exact


def test_the_run_itself_is_not_touched(run: Path, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    invoke("restore", run, "--step", 6, "--out", tmp_path / "new")
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_over_a_fork(run: Path, tmp_path: Path) -> None:
    states = train(run, World(seed=9), 3, at=6, every=1000)
    found = document("restore", run, "--step", 8, "--out", tmp_path / "new")
    assert (found["timeline"], found["base"]["timeline"]) == (2, 2)
    old = document("restore", run, "--step", 8, "--timeline", 1, "--out", tmp_path / "old")
    assert old["timeline"] == 1
    other = World(seed=3)
    with opened(tmp_path / "new", other) as ckpt:
        ckpt.resume()
        assert other.snapshot() == states[8]


# --- Refusals ---------------------------------------------------------------------------


def test_a_folder_that_holds_something(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.tex").write_text("no copy of it anywhere")
    result = invoke("restore", run, "--step", 6, "--out", out)
    assert result.exit_code == 2
    assert "is not empty: it holds 'thesis.tex'" in result.stderr
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    assert invoke("restore", run, "--step", 6, "--out", out / "thesis.tex").exit_code == 2


@pytest.mark.parametrize("out", ["", "s3://bucket/run", "run", "run/timeline-00001/new"])
def test_no_place_for_a_run(
    out: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = invoke("restore", run, "--step", 6, "--out", out)
    assert refused.exit_code == 2
    assert "hint: " in refused.stderr, "what to do"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_step_that_nobody_has(run: Path, tmp_path: Path) -> None:
    found = document("restore", run, "--step", 77, "--out", tmp_path / "new", status=2)
    assert "neither a base nor the log on disk has step 77" in found["message"]
    assert found["hint"] == "existing steps: 1 to 10"
    assert not (tmp_path / "new").exists()


def test_without_a_log_it_is_said_how_there_is_one(run: Path, tmp_path: Path) -> None:
    for segment in segments_of(run):
        shutil.rmtree(segment.path)
    found = document("restore", run, "--step", 6, "--out", tmp_path / "new", status=2)
    assert found["hint"].startswith("existing steps: 1, 4, 8")
    assert 'LogOptions(to="disk")' in found["hint"]


def test_of_a_log_behind_the_bases_it_is_not_said_that_there_is_none(
    run: Path, tmp_path: Path
) -> None:
    """Its segments lead on from bases that retention has deleted."""
    for step in (1, 4, 8):
        shutil.rmtree(base_folder(run, step))
    found = document("restore", run, "--step", 6, "--out", tmp_path / "new", status=1)
    assert found["hint"] == "existing steps: 10; the log on disk leads on from none of its bases"


def test_a_damaged_log(run: Path, tmp_path: Path) -> None:
    segment = Path(segments_of(run)[2].path) / "rank-00000.safetensors"
    flip(segment, segment.stat().st_size - 100)  # of the object that says what its records are
    found = document("restore", run, "--step", 6, "--out", tmp_path / "new", status=1)
    assert "the log does not lead to step 6" in found["message"]
    assert segment.parent.name in found["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damaged_base_is_said(run: Path, tmp_path: Path) -> None:
    flip(run / "timeline-00001/base/000000000004/rank-00000.safetensors", -9)
    result = invoke("restore", run, "--step", 6, "--out", tmp_path / "new")
    assert result.exit_code == 0
    assert "passed over step 4 of timeline 1" in result.stdout
    assert "step 6 of timeline 1, from base 1 and 5 steps of the log" in result.stdout


def test_an_optimizer_of_ones_own_is_infeasible(run_folder: Path, tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        pass

    with declared(Own):
        train(run_folder, World(lambda p: Own(p, lr=0.1)), 3, every=1000)
    found = document("restore", run_folder, "--step", 2, "--out", tmp_path / "new", status=3)
    assert found["exit_code"] == 3
    assert "without the program that declares it" in found["message"]
    text = invoke("restore", run_folder, "--step", 2, "--out", tmp_path / "new")
    assert (text.exit_code, "error: the optimizer" in text.stderr) == (3, True)


@pytest.mark.parametrize(
    "point", ["save.before_write", "save.before_marker", "save.before_manifest"]
)
def test_nothing_is_left_of_what_fails(point: str, run: Path, tmp_path: Path) -> None:
    arm(point, "raise")
    args = ["restore", str(run), "--step", "6", "--out", str(tmp_path / "new")]
    result = CliRunner().invoke(app, args)
    assert isinstance(result.exception, FailpointError)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_write_that_does_not_come_true(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is read back before it gets its name."""
    rename = PosixFileSystem.rename

    def spoil(self: PosixFileSystem, source: Any, target: Any) -> None:
        rename(self, source, target)
        if target.name.endswith(".safetensors"):
            flip(Path(target), -3)

    monkeypatch.setattr(PosixFileSystem, "rename", spoil)
    result = invoke("restore", run, "--step", 6, "--out", tmp_path / "new")
    assert result.exit_code == 4
    assert "what was written reads back damaged" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
