"""Loaders of torchdata, datasets and accelerate go on where they were, wherever that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.kills import train

DATA = (
    "shuffled",
    "shuffled, own generator",
    "distributed",
    "torch's sampler",
    "permuted",
    "weighted",
    "stream",
    "datasets",
    "accelerate",
    "accelerate, seeded",
)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", DATA)
def test_killed_training_ends_in_the_same_bits(data: str, workers: int, tmp_path: Path) -> None:
    """In mid-epoch, twice there; at its end; in a later one; and right after that resume."""
    env = {"DATA": data, "WORKERS": str(workers), "METHOD": "logged"}
    whole = train("stateful_loader", tmp_path / "whole", env=env)
    killed = train("stateful_loader", tmp_path / "killed", (7, 13, 20, 33, 34), env=env)
    assert [one["step"] for one in killed.recoveries] == [0, 7, 13, 20, 33, 34]
    assert all(one["exact"] for one in killed.recoveries)
    assert len(whole.steps) == 60
    assert killed.steps == whole.steps
    assert killed.final == whole.final


@pytest.mark.parametrize("data", ["persistent", "accelerate"])
def test_bases_alone(data: str, tmp_path: Path) -> None:
    env = {"DATA": data, "WORKERS": "2", "METHOD": "lazy"}
    whole = train("stateful_loader", tmp_path / "whole", env=env)
    killed = train("stateful_loader", tmp_path / "killed", (8, 22, 41), env=env)
    assert killed.steps == whole.steps
    assert killed.final == whole.final


def test_a_shuffle_buffer_is_told_of(tmp_path: Path) -> None:
    env = {"DATA": "datasets, buffer", "WORKERS": "0", "METHOD": "lazy"}
    killed = train("stateful_loader", tmp_path, (10, 30), env=env)
    assert "fills the buffers of shuffle(buffer_size=) anew" in killed.output
    assert killed.recoveries[-1]["exact"] is False
