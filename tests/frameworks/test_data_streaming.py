"""Streaming datasets of Hugging Face, through ``everstep.data``: batches are the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from everstep.data import ResumableLoader
from everstep.errors import OptionError
from tests.frameworks.kills import train
from tests.support.loaded import Taken, take


@pytest.mark.parametrize(
    "env",
    [
        {"WORKERS": "0", "BUFFER": "10"},
        {"WORKERS": "2", "BUFFER": "10"},
        {"WORKERS": "2", "STATE": "1"},
    ],
    ids=lambda env: ",".join(f"{name}={value}" for name, value in env.items()),
)
def test_killed_training_sees_the_same_batches(env: dict[str, str], tmp_path: Path) -> None:
    """Twice in the second epoch, and at its end; it has 12 batches."""
    env = {**env, "METHOD": "logged"}
    whole = train("streaming", tmp_path / "whole", env=env)
    killed = train("streaming", tmp_path / "killed", kill_at=(15, 20, 24), env=env)
    assert [r["exact"] for r in killed.recoveries] == [True] * 4
    assert [r["step"] for r in killed.recoveries] == [0, 15, 20, 24]
    assert max(whole.steps) == 36, "three epochs"
    assert killed.steps == whole.steps
    assert killed.final == whole.final


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": [float(sample["n"]), float(np.random.rand()), float(torch.rand(()))]}


def collated(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([sample["x"] for sample in samples])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("buffer", [0, 7])
@pytest.mark.parametrize("by_state", [False, True])
def test_any_position_of_a_stream(
    workers: int, persistent: bool, buffer: int, by_state: bool
) -> None:
    if persistent > workers or by_state * buffer:
        pytest.skip("no such loader")

    def make() -> ResumableLoader:
        stream = Dataset.from_dict({"n": list(range(50))}).to_iterable_dataset(num_shards=5)
        stream = stream.shuffle(seed=9, buffer_size=buffer) if buffer else stream
        made = DataLoader(
            stream.map(noisy),
            batch_size=4,
            num_workers=workers,
            persistent_workers=persistent,
            collate_fn=collated,
        )
        return ResumableLoader(made, dataset_state=by_state)

    whole = take(make(), 30)
    for cuts in ((2,), (13, 14), (15, 22, 26)):
        found: Taken = []
        state = None
        for cut in (*cuts, 30):
            loader = make()
            if state is not None:
                loader.load_state_dict(state)
            found += take(loader, cut - len(found))
            state = loader.state_dict()
            del loader
        assert [epoch for epoch, _ in found] == [epoch for epoch, _ in whole]
        assert all(torch.equal(a[1], b[1]) for a, b in zip(found, whole, strict=True))


def test_a_dataset_that_loses_its_buffer_is_not_restored_by_its_state() -> None:
    stream = Dataset.from_dict({"n": [1, 2]}).to_iterable_dataset().shuffle(buffer_size=2)
    with pytest.raises(OptionError, match="shuffles in a buffer"):
        ResumableLoader(DataLoader(stream.map(noisy)), dataset_state=True)
