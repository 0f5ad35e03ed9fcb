"""Ranks that are processes, whose keepers follow their logs: killed anywhere, they come back to the
last step that all of them had, and end with the same bits as a training that nobody disturbed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.ranks import replica_processes
from tests.support.ranks.log_processes import undisturbed
from tests.support.ranks.processes import STEPS, WORLD, check
from tests.support.ranks.replica_processes import (
    LARGE_STATE,
    LARGE_UPDATE,
    LOADS_S,
    STATE,
    UPDATE,
    Made,
    Steps,
    came_back,
    change,
    committed,
    compressed_training,
    followed,
    lose_a_node,
)
from tests.support.trainers import finish_trainer

made = replica_processes.made  # the fixture
replicas_follow = replica_processes.replicas_follow  # which every test here takes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return undisturbed(kind, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("step", [3, 5, 6])
def test_all_ranks_are_killed(
    tmp_path: Path, made: Made, kind: str, expected: Steps, step: int
) -> None:
    job = followed(made, tmp_path, kind)
    job.until_all_die(step)
    # Replicas exist from step 4 on, where training waits for their first base.
    assert came_back(job, expected, by_replicas=step > 4) == step
    assert STEPS in committed(job)


@pytest.mark.parametrize("seed", range(4))
def test_one_rank_is_killed(
    tmp_path: Path, made: Made, kind: str, expected: Steps, seed: int
) -> None:
    job = followed(made, tmp_path, kind, every=1 + seed % 2)
    rank, step = seed % WORLD, random.Random(seed).randrange(2, STEPS)
    job.until_one_dies(*({"DIES": str(step)} if r == rank else {} for r in range(WORLD)))
    assert came_back(job, expected) in (step - 1, step), "at most the step in flight is lost"


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize(
    "point",
    [
        "replica.before_apply=kill:2",
        "replica.after_apply=kill:1",
        "replica.before_persist=kill:1",
        "save.before_marker=kill:2",
    ],
)
def test_a_keeper_is_killed(
    tmp_path: Path, made: Made, kind: str, expected: Steps, point: str, rank: int
) -> None:
    """Training goes on; what this rank's next keeper lacks, it gets from training."""
    job = followed(made, tmp_path, kind, keep=50)
    deadly = ({"EVERSTEP_FAILPOINTS": point} if r == rank else {} for r in range(WORLD))
    ended = [finish_trainer(one, LOADS_S) for one in job.start(*deadly)]
    assert [status for status, _, _ in ended] == [0] * WORLD, ended
    said = [[json.loads(line) for line in out.splitlines()] for _, out, _ in ended]
    check(said, expected)
    assert [lines[-1]["restarts"] for lines in said] == [int(r == rank) for r in range(WORLD)]
    assert {6, STEPS} <= committed(job)
    assert came_back(job, expected) == STEPS


def test_what_comes_before_an_update_is_in_the_log(
    tmp_path: Path, made: Made, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation, a scaler that skips updates, clipping, a fused kernel."""
    change(monkeypatch, (UPDATE, LARGE_UPDATE), (STATE, LARGE_STATE))
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    expected = undisturbed(kind, folder)
    job = followed(made, tmp_path, kind)
    job.until_all_die(5)
    assert came_back(job, expected) == 5
    assert came_back(job, expected) == STEPS


def test_compressed_training(
    tmp_path: Path, made: Made, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed_training(tmp_path, made, kind, monkeypatch)


@pytest.mark.parametrize(
    ("before", "after"), [("logged", "lowdiff_plus"), ("lowdiff_plus", "logged")]
)
def test_another_method_goes_on(
    tmp_path: Path, made: Made, kind: str, expected: Steps, before: str, after: str
) -> None:
    """Who writes and records what may be split otherwise then."""
    job = followed(made, tmp_path, kind, method=before)
    job.until_all_die(5)
    job.options["method"] = after
    assert came_back(job, expected) == 5


def test_a_node_that_is_lost_comes_back_from_its_peer(
    tmp_path: Path, made: Made, kind: str, expected: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_a_node(tmp_path, made, kind, expected, monkeypatch)
