"""Ranks that are processes, with a ZeroRedundancyOptimizer, whose keepers follow what their ranks
write: killed anywhere, they come back to the last step that all of them had, and end with the same
bits as a training that nobody disturbed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.keepers import end_keepers
from tests.support.ranks import log_processes, replica_processes
from tests.support.ranks.log_processes import LogJob, undisturbed
from tests.support.ranks.processes import STEPS, WORLD, check
from tests.support.ranks.replica_processes import (
    LARGE_STATE,
    LARGE_UPDATE,
    LONG,
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

pytestmark = pytest.mark.slow
replicas_follow = replica_processes.replicas_follow  # which every test here takes

EARLIER = """
import dataclasses
from everstep.state.ranks import rank_share as share

now = share.find_replication

def by_the_other(*about):
    found = now(*about)
    others = {name: (1 - rank, ranks) for name, (rank, ranks) in found.updaters.items()}
    return dataclasses.replace(found, updaters=others)

share.find_replication = by_the_other
"""
"""Bases are split otherwise, as they were before who updates a parameter wrote it."""


@pytest.fixture
def made() -> Iterator[Made]:
    """Jobs, whose keepers end with the test."""
    jobs: Made = []
    yield jobs
    for job in jobs:
        end_keepers(job.run.parent)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return undisturbed("zero", tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("step", [3, 6])
def test_all_ranks_are_killed(tmp_path: Path, made: Made, expected: Steps, step: int) -> None:
    job = followed(made, tmp_path, "zero")
    job.until_all_die(step)
    assert came_back(job, expected) == step
    assert STEPS in committed(job)


@pytest.mark.parametrize("seed", range(2))
def test_one_rank_is_killed(tmp_path: Path, made: Made, expected: Steps, seed: int) -> None:
    job = followed(made, tmp_path, "zero", every=1 + seed)
    rank, step = seed % WORLD, random.Random(seed).randrange(2, STEPS)
    job.until_one_dies(*({"DIES": str(step)} if r == rank else {} for r in range(WORLD)))
    assert came_back(job, expected) in (step - 1, step), "at most the step in flight is lost"


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("point", ["replica.after_apply=kill:1", "save.before_marker=kill:2"])
def test_a_keeper_is_killed(
    tmp_path: Path, made: Made, expected: Steps, point: str, rank: int
) -> None:
    """Training goes on; what this rank's next keeper lacks, it gets from training."""
    job = followed(made, tmp_path, "zero", keep=50)
    deadly = ({"EVERSTEP_FAILPOINTS": point} if r == rank else {} for r in range(WORLD))
    ended = [finish_trainer(one, LONG["progress_timeout_s"]) for one in job.start(*deadly)]
    assert [status for status, _, _ in ended] == [0] * WORLD, ended
    said = [[json.loads(line) for line in out.splitlines()] for _, out, _ in ended]
    check(said, expected)
    assert [lines[-1]["restarts"] for lines in said] == [int(r == rank) for r in range(WORLD)]
    assert {6, STEPS} <= committed(job)
    assert came_back(job, expected) == STEPS


def test_what_comes_before_an_update_is_in_the_log(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation, a scaler that skips updates, clipping, a fused kernel."""
    large = LARGE_STATE.replace('kind == "ddp"', 'kind == "zero"')
    change(monkeypatch, (UPDATE, LARGE_UPDATE), (STATE, large))
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    wanted = undisturbed("zero", folder)
    job = followed(made, tmp_path, "zero")
    job.until_all_die(5)
    assert came_back(job, wanted) == 5
    assert came_back(job, wanted) == STEPS


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("logged", "lowdiff_plus"),
        ("lowdiff_plus", "logged"),
        ("lowdiff_plus", "gockpt_o"),
        ("gockpt", "lowdiff_plus"),
    ],
)
def test_another_method_goes_on(
    tmp_path: Path, made: Made, expected: Steps, before: str, after: str
) -> None:
    job = followed(made, tmp_path, "zero", method=before)
    job.until_all_die(5)
    job.options["method"] = after
    assert came_back(job, expected) == (5 if before != "gockpt" else 4)


def test_compressed_training(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed_training(tmp_path, made, "zero", monkeypatch)


def test_a_node_that_is_lost_comes_back_from_its_peer(
    tmp_path: Path, made: Made, expected: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_a_node(tmp_path, made, "zero", expected, monkeypatch)


@pytest.mark.parametrize("after", ["logged", "lowdiff_plus"])
def test_a_log_behind_a_base_that_was_split_otherwise_leads_on(
    tmp_path: Path, made: Made, expected: Steps, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    job = LogJob(tmp_path, "zero", method="logged", **LONG)
    made.append(job)
    with monkeypatch.context() as patched:
        program = log_processes.TRAINING
        patched.setattr(log_processes, "TRAINING", EARLIER + program)
        job.until_all_die(5)
    job.options["method"] = after
    assert came_back(job, expected) == 5
    assert came_back(job, expected) == STEPS
