"""Ranks that are processes, with keepers that are processes: killed anywhere, they come back to the
same step, and end with the same bits as a training that nobody disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.keepers import end_keepers
from tests.support.ranks.processes import STEPS, TRAINING, WORLD, Job, check, undisturbed
from tests.support.trainers import finish_trainer, whole_lines
from tests.support.world import TIMEOUT_S

_LAUNCHER_S = 9 * TIMEOUT_S  # it loads torch five times


@pytest.fixture(autouse=True)
def no_keeper_stays(tmp_path: Path) -> Iterator[None]:
    yield
    end_keepers(tmp_path)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, method="lazy")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


def test_a_killed_rank_takes_all_back_to_the_same_base(
    job: Job, expected: list[dict[int, str]]
) -> None:
    job.until_one_dies({}, {"DIES": "1 5"})
    assert check(job.to_the_end(), expected) == (4, 2)
    assert all(status == "committed" for status in job.statuses().values())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sync", "async", "lazy"])
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize(
    "point",
    [
        "save.before_write",
        "save.before_rename",
        "save.before_marker",
        "save.before_manifest",
        "save.after_manifest",
        "capture.before_captured",
        "capture.after_captured",
        "resume.before_timeline",
    ],
)
def test_a_rank_dies_at_a_named_point(
    tmp_path: Path, expected: list[dict[int, str]], method: str, rank: int, point: str
) -> None:
    writes_manifest = point in ("save.before_manifest", "save.after_manifest")
    if rank and writes_manifest:
        pytest.skip("rank 0 writes the manifest of a shared folder")
    if method == "sync" and point.startswith("capture."):
        pytest.skip("nothing is captured")
    job = Job(tmp_path, method=method)
    hit = 1 if point.startswith("resume.") else 2
    deadly = {"EVERSTEP_FAILPOINTS": f"{point}=kill:{hit}"}
    if method != "sync" and point.startswith("save."):  # the keeper dies there, and then its rank
        deadly["DIES"] = f"{rank} 6"
    environments = [deadly if number == rank else {} for number in range(WORLD)]
    job.until_one_dies(*environments)
    step, timeline = check(job.to_the_end(), expected)
    assert step == (0 if hit == 1 else step)
    assert step in (0, 2, 4, 6), "only bases of all ranks count"
    assert timeline >= 1
    assert set(job.statuses().values()) == {"committed"}


def test_a_keeper_that_died_between_files_and_marker_leaves_no_base(
    job: Job, expected: list[dict[int, str]]
) -> None:
    deadly = {"EVERSTEP_FAILPOINTS": "save.before_marker=kill:2", "DIES": "1 5"}
    job.until_one_dies({}, deadly)
    step, _ = check(job.to_the_end(), expected)
    assert step in (2, 4), "base 4 is whole in memory, or the one before is all there is"


@pytest.mark.slow
def test_a_leader_that_died_before_the_manifest_is_rolled_forward(
    job: Job, expected: list[dict[int, str]]
) -> None:
    deadly = {"EVERSTEP_FAILPOINTS": "save.before_manifest=kill:2", "DIES": "0 5"}
    job.until_one_dies(deadly, {})
    assert check(job.to_the_end(), expected) == (4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on(job: Job, world: int) -> None:
    """With what all had in common; what was a rank's own, and is not there any more or not yet,
    makes the resume inexact, and is said."""
    before = [line["shared"] for line in job.to_the_end()[0] if line.get("step") == STEPS - 1]
    job.world = world
    said = job.to_the_end()
    assert [lines[0]["resumed"] for lines in said] == [STEPS - 1] * world
    assert {lines[0]["shared"] for lines in said} == set(before)
    assert len({lines[-2]["shared"] for lines in said}) == 1, "they train on together"
    if world > WORLD:
        assert said[-1][0]["notes"]
    assert not any(lines[0]["exact"] for lines in said)


def test_a_lost_keeper_costs_one_base_and_the_others_go_on(
    job: Job, expected: list[dict[int, str]]
) -> None:
    # Each keeper of rank 1 dies before it writes its second base.
    ranks = job.start({}, {"EVERSTEP_FAILPOINTS": "keeper.before_persist=kill:2"})
    for rank, one in enumerate(ranks):
        status, out, err = finish_trainer(one, 2 * TIMEOUT_S)
        assert status == 0, err
        said = [json.loads(line) for line in out.splitlines()]
        assert said[-1]["rank"] == rank
    found = job.statuses()
    assert found.pop((1, 2)) == "committed"
    # Training may have been over before that keeper came to its second base.
    assert {step for _, step in found} <= {6}
    assert check(job.to_the_end(), expected)[0] in (2, 6)


@pytest.mark.slow
def test_torchrun_restarts_all_ranks_and_they_go_on(
    tmp_path: Path, expected: list[dict[int, str]]
) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={WORLD}", "--max-restarts=1", "--monitor-interval=0.1"]
    # Else restarted workers find the addresses of those that were killed in the launcher's store.
    workaround = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = subprocess.Popen(
        [*command, str(script), str(tmp_path / "run"), json.dumps({"method": "async"})],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **workaround, "DIES": "1 5"},
        start_new_session=True,
    )
    try:
        out, err = launcher.communicate(timeout=_LAUNCHER_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, err
    said = [json.loads(line) for line in whole_lines(out) if line.startswith("{")]
    again: list[list[dict[str, Any]]] = []
    for rank in range(WORLD):
        lines = [one for one in said if one["rank"] == rank]
        starts = [number for number, one in enumerate(lines) if "resumed" in one]
        assert len(starts) == 2
        again.append(lines[starts[1] :])
    assert check(again, expected) == (4, 2)
