"""What ``ls``, ``inspect``, ``du`` and ``rm`` say and do about the log."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.common.log import steps_in_words
from everstep.run.chain import path_of
from everstep.seams import PosixFileSystem
from tests.support.logged import (
    World,
    document,
    edit_base,
    invoke,
    rebuilder_of,
    record,
    rewrite_segment,
    segments_of,
    train,
)
from tests.support.world import base_folder, flip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Timeline 1: bases 1, 4, 8, 9, steps 1 to 9 logged; timeline 2, from its step 6, up to 8."""
    run = tmp_path_factory.mktemp("verbs") / "run"
    train(run, World(), 9)
    train(run, World(seed=2), 2, at=6, every=1000)
    return run


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def test_ls(run: Path) -> None:
    found = document("ls", run)
    first, second = (row["log"] for row in found["timelines"])
    assert (first["steps"], first["segments"], first["records"]) == ([[2, 9]], 5, 18)
    assert first["size_bytes"] == sum(one.size_bytes for one in segments_of(run))
    assert second["steps"] == [[7, 8]]  # also from base 4, over the fork
    text = invoke("ls", run).stdout
    assert "log of timeline 1: steps 2 to 9 by replay (5 segments, 18 records, " in text


@pytest.mark.parametrize("lost", [None, "damaged", "gap", "other update", "other shape"])
def test_chains_of_all_bases_are_those_of_each_on_its_own(lost: str | None, run: Path) -> None:
    """They are found from the newest to the oldest, each going on where the next begins."""
    shutil.rmtree(run / "timeline-00002")
    if lost == "damaged":
        flip(base_folder(run, 4) / "rank-00000.safetensors", 5)
    if lost == "gap":
        shutil.rmtree(Path(segments_of(run)[2].path))
    if lost == "other update":
        marker = lambda state: replace(state.marker, lsn=77)  # noqa: E731
        edit_base(run, 4, lambda state: setattr(state, "marker", marker(state)))
    if lost == "other shape":
        edit_base(run, 4, lambda state: state.aliases.update({"an/alias": "model/0.weight"}))
    with rebuilder_of(run) as rebuilder:
        log = rebuilder.log
        path = path_of(1, log.inventory.timelines)
        one_by_one = [log.chain(log.usable[key], path) for key in sorted(log.usable)]
        together = [chain for _, chain in log.chains(())]
    assert together == one_by_one
    ends = {chain.base.step: chain.end[1] for chain in together}
    wanted = {1: 9, 4: 9, 8: 9, 9: 9}
    wanted |= {1: 4, 4: 4} if lost == "gap" else {}
    wanted |= {4: 4} if lost in ("damaged", "other update", "other shape") else {}
    assert ends == wanted


def test_ls_says_how_far_resume_would_replay(run: Path) -> None:
    assert document("ls", run)["resume_replay"] is None
    shutil.rmtree(base_folder(run, 8, timeline=2))
    found = document("ls", run)
    assert found["resume"] == {"timeline": 2, "step": 7}
    assert found["resume_replay"] == {"timeline": 2, "step": 8}
    text = invoke("ls", run).stdout
    assert "step 7 of timeline 2 (if its data verify), and replay the log up to step 8" in text


def test_ls_says_which_steps_the_log_lacks(run: Path) -> None:
    """They may never have been written, which is no damage; but they cannot be gone back to."""
    assert document("ls", run)["timelines"][0]["log"]["gaps"] == []
    assert "missing" not in invoke("ls", run).stdout
    shutil.rmtree(Path(segments_of(run)[2].path))
    found = document("ls", run)
    row = found["timelines"][0]["log"]
    assert (row["gaps"], row["steps"], row["segments"]) == ([[5, 6]], [[2, 4], [9, 9]], 4)
    assert found["ok"]
    line = next(line for line in invoke("ls", run).stdout.splitlines() if "timeline 1:" in line)
    assert line.endswith("; missing: steps 5 to 6")


def test_ls_names_what_is_damaged(run: Path) -> None:
    path = Path(segments_of(run)[1].path) / "rank-00000.done"
    flip(path, 20)
    row = document("ls", run, status=1)["timelines"][0]["log"]
    assert row["steps"] == [[2, 2], [5, 9]]
    assert row["gaps"] == [], "it is said what is wrong with them"
    assert len(row["problems"]) == 1
    text = invoke("ls", run).stdout
    assert "steps 2, 5 to 9 by replay" in text
    assert "problem: " in text
    assert path.parent.name in text
    assert invoke("inspect", run, "--timeline", 1).exit_code == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_segment_that_is_deleted_while_ls_looks_is_no_damage(
    whole: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process at work: the marker was read, and the data are gone, perhaps the folder too."""
    path = Path(segments_of(run)[1].path)
    real, deleted = PosixFileSystem.open, list[Path]()

    def opening(filesystem: PosixFileSystem, where: Any, **how: bool) -> Any:
        if Path(where) == path / "rank-00000.safetensors" and not deleted:
            shutil.rmtree(path)
            deleted.append(path)
            if not whole:
                path.mkdir()
        return real(filesystem, where, **how)

    monkeypatch.setattr(PosixFileSystem, "open", opening)
    assert document("ls", run)["ok"]
    assert deleted


def test_ls_without_a_log(run: Path) -> None:
    for number in (1, 2):
        shutil.rmtree(run / f"timeline-{number:05d}" / "log")
    found = document("ls", run)
    assert [row["log"] for row in found["timelines"]] == [None, None]
    assert "log of" not in invoke("ls", run).stdout


def test_inspect(run: Path) -> None:
    found = document("inspect", run, "--timeline", 1)
    assert [(one["first"], one["last"]) for one in found["segments"]][:2] == [(1, 2), (3, 4)]
    assert {one["records"] for one in found["segments"]} == {2, 4}
    assert "steps 3 to 4" in invoke("inspect", run).stdout
    file = Path(segments_of(run)[1].path) / "rank-00000.safetensors"
    found = document("inspect", file)
    assert [(one["kind"], one["step"]) for one in found["records"]] == [
        ("update", 3),
        ("mark", 3),
        ("update", 4),
        ("mark", 4),
    ]
    assert found["vouched"]
    kinds = {one["name"]: one["kind"] for one in found["entries"]}
    assert (kinds["everstep/log"], kinds["000000/F32"]) == ("object", "tensor")
    text = invoke("inspect", file).stdout
    assert "update" in text
    flip(file, -1)
    assert invoke("inspect", file).exit_code == 1


def test_du(run: Path) -> None:
    found = document("du", run)
    first = found["timelines"][0]
    assert first["log"]["segments"] == 5
    assert first["log"]["size_bytes"] == sum(one.size_bytes for one in segments_of(run))
    assert first["other"]["files"] == 0
    held = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    assert found["size_bytes"] == held
    (run / "timeline-00001/log/mine.txt").write_text("not ours")
    segment = Path(segments_of(run)[0].path)
    (segment / "rank-00000.safetensors.tmp").write_text("half")
    (segment / "notes.txt").write_text("not ours")
    (segment / "rank-00000.done").unlink()
    first = document("du", run)["timelines"][0]
    assert (first["log"]["segments"], first["other"]["files"]) == (4, 2)
    assert first["temporary"]["files"] == 1
    assert "log, 4 segments" in invoke("du", run).stdout


def test_rm_keeps_the_base_that_the_log_stands_on(run: Path) -> None:
    refused = invoke("rm", run, "--step", 1)
    assert refused.exit_code == 2
    assert "the log leads to steps 2 to 4 only from step 1 of timeline 1" in refused.stderr
    assert base_folder(run, 1).exists()
    told = document("rm", run, "--step", 1, "--dry-run")
    assert "only from step 1" in told["refusal"]
    assert invoke("rm", run, "--step", 4).exit_code == 0  # step 1 leads to all of it
    assert "to steps 2 to 8 only" in invoke("rm", run, "--step", 1).stderr
    assert invoke("rm", run, "--step", 1, "--force").exit_code == 0
    assert not base_folder(run, 1).exists()
    assert document("ls", run)["timelines"][0]["log"]["steps"] == [[9, 9]]


def test_rm_where_the_log_is_of_another_shape(run: Path) -> None:
    """No log stands on a base that it does not fit."""
    shutil.rmtree(run / "timeline-00002")
    for segment in segments_of(run)[4:]:
        rewrite_segment(
            run, segment, lambda records: [record(one, shape="other") for one in records]
        )
    assert invoke("rm", run, "--step", 8).exit_code == 0


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "no step"),
        ([3], "step 3"),
        ([3, 4], "steps 3 to 4"),
        ([1, 3], "steps 1, 3"),
        (range(0, 40, 2), "steps 0, 2, 4, ..., 34, 36, 38"),
    ],
)
def test_steps_in_words(steps: list[int], words: str) -> None:
    assert steps_in_words(steps) == words
