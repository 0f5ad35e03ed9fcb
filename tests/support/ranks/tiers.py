"""Ranks in one process that copy their bases to a tier."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from everstep.tiers.memory import MemoryTier
from tests.support.ranks.copying import Job
from tests.support.ranks.together import resume, train, trainings


def saved(*runs: Path, steps: int = 1, **options: Any) -> list[Path]:
    """A job of so many ranks, with a base after each step."""
    with trainings(*runs, **{"every": 1, "keep": 9, **options}) as ranks:
        resume(ranks)
        train(ranks, steps)
    return list(runs)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two ranks with disks of their own, after three steps: not to be changed."""
    folder = tmp_path_factory.mktemp("apart")
    return saved(folder / "a", folder / "b", steps=3)


def up_to(runs: list[Path], folder: Path, step: int) -> list[Path]:
    """The same job, a while before."""
    found = []
    for run in runs:
        found.append(folder / run.name)
        shutil.copytree(run, found[-1])
        for base in (found[-1] / "timeline-00001/base").iterdir():
            if int(base.name) > step:
                shutil.rmtree(base)
    return found


def fill(store: MemoryTier, apart: list[Path], folder: Path, *steps: int) -> None:
    for step in steps:
        Job(up_to(apart, folder / f"then-{step}", step), store).copy()


def started(*runs: Path, **options: Any) -> Any:
    return trainings(*runs, **{"tiers": ["/copies"], **options})
