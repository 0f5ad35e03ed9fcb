"""Two ranks over gloo save and load by ``torch.distributed.checkpoint``; one of them is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import everstep
from tests.support.ranks.dcp import Job
from tests.support.trainers import finish_trainer

_HANGS_S = 120.0


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "world", "other", "others"),
    [
        ("fsdp", 2, "plain", 1),
        ("plain", 1, "fsdp", 2),
        slow("fsdp", 2, "fsdp", 2),
        slow("ddp", 2, "ddp", 2),
        slow("ddp", 2, "fsdp", 3),
        slow("fsdp", 3, "fsdp", 2),
        slow("tp", 4, "fsdp", 3),
        slow("plain", 1, "tp", 4),
    ],
)
def test_another_layout_has_the_same_bits(
    layout: str, world: int, other: str, others: int, tmp_path: Path
) -> None:
    job = Job(tmp_path)
    saved = job.run("save", layout, world, "step-3", seed=3)
    assert job.run("load", other, others, "step-3", seed=9) == saved
    found = everstep.load(tmp_path / "step-3")
    assert (found.step, found.exact) == (3, True)


@pytest.mark.slow
def test_in_the_background(tmp_path: Path) -> None:
    job = Job(tmp_path)
    saved = job.run("async", "fsdp", 2, "step-3", seed=3)
    assert job.run("load", "fsdp", 2, "step-3", seed=9) == saved


@pytest.mark.parametrize(
    ("point", "victim", "is_new"),
    [
        slow("save.before_write", 1, False),
        slow("save.before_header", 1, False),
        slow("save.before_rename", 0, False),
        ("save.before_marker", 1, False),
        slow("save.before_write", 0, False),
        slow("save.before_rename=kill:2", 0, False),  # the plain data
        slow("save.before_marker", 0, False),
        ("save.before_manifest", 0, True),
        slow("save.after_manifest", 0, True),
        slow("retain.after_condemn", 0, True),
        slow("retain.before_unlink", 0, True),
    ],
)
def test_a_rank_is_killed_in_a_save_to_the_same_id(
    point: str, victim: int, is_new: bool, tmp_path: Path
) -> None:
    """Once all markers are there, the new checkpoint counts."""
    job = Job(tmp_path)
    old = job.run("save", "fsdp", 2, "latest", seed=1)
    armed = {"EVERSTEP_FAILPOINTS": point if "=" in point else f"{point}=kill"}
    environments = [armed if rank == victim else {} for rank in range(2)]
    ranks = job.start("save", "fsdp", 2, "latest", 2, *environments)
    status, _, err = finish_trainer(ranks[victim], _HANGS_S)
    ranks[1 - victim].kill()
    finish_trainer(ranks[1 - victim], _HANGS_S)
    assert status == -signal.SIGKILL, err
    found = job.run("load", "fsdp", 2, "latest")
    new = job.run("save", "fsdp", 2, "latest", seed=2)
    assert found == (new if is_new else old)
    assert old != new
