"""Loaders that are in no part of the state: what a program does before its first step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from everstep import Checkpointer, Recovery
from tests.unit.test_positions import BATCH, COUNT, EPOCH, Noisy

MOVED = "batches were skipped, and the loader, its sampler or its samples have drawn from them"


class Fixed(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


def train(
    run: Path,
    stop: int,
    data: Any,
    *,
    method: str = "sync",
    own: bool = True,
    skips: bool = True,
    counts: bool = True,
    accumulate: int = 1,
    before: Any = lambda model: None,
) -> Recovery:
    """The README's recipe: counters in plain data, a generator seeded by the epoch, a skip."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    generator = torch.Generator() if own else None
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if counts:
        state |= {"epoch": 0, "batch": 0}
    with Checkpointer(run, state, every=1, method=method) as ckpt:
        recovery = ckpt.resume()
        step = recovery.step
        before(model)
        done = step * accumulate
        for epoch in range(done // EPOCH, 4):
            if generator is not None:
                generator.manual_seed(epoch)
            skipped = done - epoch * EPOCH if skips else 0
            for batch in itertools.islice(loader, skipped, None):
                (model(batch).square().mean() / accumulate).backward()
                done += 1
                if done % accumulate:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if counts:
                    state["epoch"], state["batch"] = divmod(done, EPOCH)
                ckpt.step()
                if step >= stop:
                    return recovery
    return recovery


def unobserved() -> bool:
    """Return whether torch's loaders are as they were."""
    return _BaseDataLoaderIter.__init__.__module__ == "torch.utils.data.dataloader"


@pytest.mark.parametrize("method", ["sync", "logged"])
def test_skipping_that_draws_is_not_called_exact(
    method: str, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(run_folder, 3, Noisy(), method=method)
    assert MOVED not in caplog.text
    recovery = train(run_folder, 4, Noisy(), method=method)
    assert recovery.exact, "this far it is"
    assert recovery.data == "not in the state"
    assert caplog.text.count(MOVED) == 1
    again = train(run_folder, 5, Noisy(), method=method)
    assert (again.step, again.exact) == (4, False)
    assert unobserved()


def test_a_loader_that_draws_its_order_from_the_processs_generator(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(run_folder, 3, Fixed(), own=False)
    train(run_folder, 4, Fixed(), own=False)
    assert MOVED in caplog.text


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("data", [Fixed(), Noisy()], ids=["fixed", "noisy"])
def test_nothing_is_said_of_a_right_program(
    data: Any, accumulate: int, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It skips batches whose samples draw nothing, or resumes between two epochs."""
    stops = (3, 4, 8, 9) if isinstance(data, Fixed) else (EPOCH, 2 * EPOCH)
    for stop in stops:
        assert train(run_folder, stop, data, accumulate=accumulate).exact
    assert not caplog.text
    assert unobserved()


def test_an_evaluation_skips_nothing(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            for batch in DataLoader(Noisy(), batch_size=BATCH):
                model(batch)

    train(run_folder, EPOCH, Fixed())
    train(run_folder, EPOCH + 1, Fixed(), before=evaluate)
    assert MOVED not in caplog.text


def test_generators_that_are_seeded_after_resume(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(run_folder, 3, Fixed(), before=lambda model: torch.manual_seed(1))
    assert not caplog.text, "a fresh run may"
    train(run_folder, 4, Fixed(), before=lambda model: torch.manual_seed(2))
    assert "were drawn from, or seeded, between resume() and the first batch" in caplog.text


def test_an_epoch_that_begins_anew_in_its_middle(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    what = "the order of batches is in no part of the state"
    train(run_folder, 3, Fixed(), skips=False, counts=False)
    assert what not in caplog.text
    train(run_folder, 4, Fixed(), skips=False, counts=False)
    assert what in caplog.text
    caplog.clear()
    train(run_folder, 5, Fixed(), counts=False)
    assert what not in caplog.text, "it skips: by the step, say"


def test_a_run_without_steps_leaves_nothing_behind(run_folder: Path) -> None:
    train(run_folder, 3, Fixed())
    model = nn.Linear(2, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4)}
    with Checkpointer(run_folder, {**state, "epoch": 0, "batch": 0}) as ckpt:
        ckpt.resume()
        assert not unobserved()
    assert unobserved()
