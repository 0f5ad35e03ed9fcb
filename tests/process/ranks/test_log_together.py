"""Ranks that are processes, with a log each: killed anywhere, they come back to the last step that
all of them had, and end with the same bits as a training that nobody disturbed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.link.registry import kill_keeper, list_keepers
from tests.support.keepers import end_keepers
from tests.support.ranks.log_processes import LogJob, came_back, undisturbed
from tests.support.ranks.processes import STEPS, WORLD
from tests.support.trainers import finish_trainer
from tests.support.world import TIMEOUT_S

pytestmark = pytest.mark.slow


Made = list[LogJob]


@pytest.fixture
def made() -> Iterator[Made]:
    """Jobs, whose keepers end with the test."""
    jobs: Made = []
    yield jobs
    for job in jobs:
        end_keepers(job.run.parent)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(kind: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    return undisturbed(kind, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("to", ["memory", "disk"])
def test_all_ranks_are_killed_behind_a_step(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]], to: str
) -> None:
    made.append(job := LogJob(tmp_path, kind, to=to))
    job.until_all_die(4)
    if to == "disk":
        job.kill_keepers()
    assert came_back(job, expected) == 4


@pytest.mark.parametrize("seed", range(4))
def test_one_rank_is_killed_behind_a_step(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]], seed: int
) -> None:
    made.append(job := LogJob(tmp_path, kind, to=random.Random(seed).choice(["memory", "disk"])))
    rank, step = seed % WORLD, random.Random(seed).randrange(2, STEPS)
    job.until_one_dies(*({"DIES": str(step)} if r == rank else {} for r in range(WORLD)))
    assert came_back(job, expected) in (step - 1, step), "at most the step in flight is lost"


def test_a_rank_raises_and_the_others_logs_stay(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]]
) -> None:
    """An exception ends each of them, without a base of all: their keepers hold the logs."""
    made.append(job := LogJob(tmp_path, kind))
    for one in job.start(*({"RAISES": "4"},) * WORLD):
        status, _, err = finish_trainer(one, TIMEOUT_S)
        assert status == 1
        assert "as asked" in err
    assert came_back(job, expected) == 4


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize(
    ("point", "least"),
    [
        ("log.before_record=kill:8", 3),
        ("log.after_record=kill:8", 3),
        ("capture.before_captured=kill:2", 4),
        ("resume.before_timeline=kill:1", 0),
    ],
)
def test_a_rank_dies_at_a_named_point(
    tmp_path: Path,
    made: Made,
    kind: str,
    expected: list[dict[int, str]],
    point: str,
    least: int,
    rank: int,
) -> None:
    made.append(job := LogJob(tmp_path, kind))
    deadly = {"EVERSTEP_FAILPOINTS": point}
    job.until_one_dies(*(deadly if number == rank else {} for number in range(WORLD)))
    step = came_back(job, expected)
    assert step >= least, "at most the step in flight is lost"


def test_the_log_of_the_last_start_stays_until_a_base_of_all_is_there(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]]
) -> None:
    """The first base of the second start is whole in one keeper, and never in the other."""
    made.append(job := LogJob(tmp_path, kind))
    job.until_all_die(4)
    job.until_one_dies({}, {"EVERSTEP_FAILPOINTS": "capture.before_captured=kill:1"})
    assert came_back(job, expected) >= 4


@pytest.mark.parametrize("point", ["log.before_rename", "log.before_marker"])
def test_a_keeper_dies_while_it_writes_the_log_and_its_rank_with_it(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]], point: str
) -> None:
    """The third segment, that of step 3: its rank has up to step 2, if the base of step 1 was
    durable by then."""
    made.append(job := LogJob(tmp_path, kind, to="disk, behind"))
    deadly = {"EVERSTEP_FAILPOINTS": f"{point}=kill:3", "DIES": "4"}
    job.until_one_dies({}, deadly)
    assert came_back(job, expected) in (0, 1, 2)


def test_a_rank_that_has_lost_its_keeper_too_takes_all_back_to_the_base(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]]
) -> None:
    made.append(job := LogJob(tmp_path, kind))
    job.until_all_die(4)
    waited, left = threading.Event(), int(TIMEOUT_S / 0.02)
    while "committed" not in job.statuses().values():  # its keepers finish the first base
        assert left, job.statuses()
        left -= 1
        waited.wait(0.02)
    for info in list_keepers():
        if info.run == str(job.run) and info.rank == 1:
            kill_keeper(info)
    assert came_back(job, expected) == 1


@pytest.mark.parametrize("to", ["memory", "disk"])
@pytest.mark.parametrize("how", ["ddp, exchange", "ddp, compressor", "fsdp, compressor"])
def test_compressed_training_is_killed_behind_a_step_and_in_one(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    made: Made,
    how: str,
    to: str,
) -> None:
    """Its residuals come back with the rest, to each rank its own."""
    expected = undisturbed(how, tmp_path_factory.mktemp("undisturbed"))
    made.append(job := LogJob(tmp_path, how, to=to, method="lowdiff"))
    job.until_all_die(4)
    if to == "disk":
        job.kill_keepers()
    job.until_one_dies({}, {"EVERSTEP_FAILPOINTS": "log.before_record=kill:4"})
    assert came_back(job, expected) >= 4


@pytest.mark.parametrize("kind", ["zero, declared", "ddp, declared"])
def test_what_a_registered_function_has_updated_comes_back(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, made: Made, kind: str
) -> None:
    """It reads parameters, of which a rank of ZeRO has the others' only when replay is over."""
    expected = undisturbed(kind, tmp_path_factory.mktemp("undisturbed"))
    made.append(job := LogJob(tmp_path, kind))
    job.until_all_die(4)
    assert came_back(job, expected) == 4
