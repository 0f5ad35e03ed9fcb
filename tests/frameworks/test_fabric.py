"""A loop over objects that Fabric has set up: refused before it trains, or resumable."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep import Checkpointer
from everstep.data import ResumableLoader
from everstep.errors import OptionError
from everstep.integrations.lightning import resumable


class Sharding(SingleDeviceStrategy):
    """Stands for strategies that need devices which this machine may not have."""


def set_up(loader: Any = None, **options: Any) -> tuple[Fabric, dict[str, Any], Any]:
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = loader or DataLoader(torch.randn(8, 2), batch_size=2, shuffle=True)
    return fabric, {"model": model, "optimizer": optimizer}, fabric.setup_dataloaders(loader)


def train(fabric: Fabric, state: dict[str, Any], batch: torch.Tensor) -> None:
    fabric.backward(state["model"](batch).square().mean())
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def test_strategies(tmp_path: Path) -> None:
    fabric, state, loader = set_up(strategy=Sharding("cpu"))
    with pytest.raises(OptionError, match="a Fabric with the strategy Sharding cannot be"):
        resumable(fabric, tmp_path / "run", state, loader)
    assert not (tmp_path / "run").exists()


def test_loaders(tmp_path: Path) -> None:
    fabric, state, _ = set_up()
    with pytest.raises(OptionError, match="a DataLoader cannot be made resumable"):
        resumable(fabric, tmp_path / "run", state, DataLoader(torch.randn(8, 2)))
    fabric, state, stateful = set_up(StatefulDataLoader(torch.randn(8, 2)))
    with pytest.raises(OptionError, match="a StatefulDataLoader that Fabric has set up"):
        resumable(fabric, tmp_path / "run", state, stateful)


@pytest.mark.parametrize("missing", ["optimizer", "loader"])
def test_incomplete_arguments(missing: str, tmp_path: Path) -> None:
    fabric, state, loader = set_up()
    state.pop(missing, None)
    with pytest.raises(OptionError, match="no optimizer in the state, or no loader"):
        resumable(fabric, tmp_path / "run", state, *([] if missing == "loader" else [loader]))


def test_names_of_parts(tmp_path: Path) -> None:
    fabric, state, loader = set_up()
    with pytest.raises(OptionError, match="'data' of the state is Fabric's own"):
        resumable(fabric, tmp_path / "run", {**state, "data": 1}, loader)


def test_a_plain_checkpointer_takes_what_fabric_has_set_up(tmp_path: Path) -> None:
    def trained(run: Path, *stops: int) -> tuple[dict[str, Any], list[float]]:
        saw = list[float]()
        for stop in stops:
            torch.manual_seed(0)
            fabric, state, _ = set_up(precision="bf16-mixed")
            loader = ResumableLoader(DataLoader(torch.arange(8.0).reshape(4, 2), shuffle=True))
            with Checkpointer(run, {**state, "data": loader}, method="logged") as ckpt:
                step = ckpt.resume().step
                batches = (batch for _ in range(loader.epoch, 3) for batch in loader)
                for batch in itertools.islice(batches, stop - step):
                    train(fabric, state, batch)
                    saw.append(batch.sum().item())
                    ckpt.step()
        return state["model"].state_dict(), saw

    whole, all_of_it = trained(tmp_path / "whole", 12)
    resumed, parts = trained(tmp_path / "resumed", 5, 12)
    assert parts == all_of_it
    assert all(torch.equal(resumed[name], one) for name, one in whole.items())


def test_a_finished_training_does_not_go_on(tmp_path: Path) -> None:
    """Plain data goes on in the user's own dict."""
    fabric, state, loader = set_up()
    state["samples"] = 0
    for _ in resumable(fabric, tmp_path / "run", state, loader).epochs(2):
        for batch in loader:
            train(fabric, state, batch)
            state["samples"] += len(batch)
    fabric, again, loader = set_up()
    again["samples"] = 0
    run = resumable(fabric, tmp_path / "run", again, loader)
    assert (run.recovery.step, run.recovery.exact, run.epoch) == (8, True, 2)
    assert (list(run.epochs(2)), again["samples"]) == ([], 16)
    assert torch.equal(again["model"].weight, state["model"].weight)


def test_a_loop_that_leaves_its_epochs_early(tmp_path: Path) -> None:
    """The step of the last batch is marked, and the next epoch begins with its own order."""
    fabric, state, loader = set_up()
    run = resumable(fabric, tmp_path / "run", state, loader, every=1)
    saw = list[torch.Tensor]()
    for _ in range(3):
        for number, batch in enumerate(loader):
            train(fabric, state, batch)
            saw.append(batch)
            if number == 2:
                break
    run.close()
    assert (run.checkpointer.stats().step, run.epoch) == (9, 3)
    assert not torch.equal(torch.cat(saw[:3]), torch.cat(saw[3:6]))
    assert len(loader) == 4


def test_the_epoch_is_that_of_the_loader_that_trains(tmp_path: Path) -> None:
    """Of several loaders, in any order: an evaluation has epochs of its own."""
    for start in range(2):
        fabric, state, loader = set_up()
        held_out = fabric.setup_dataloaders(DataLoader(torch.randn(8, 2), batch_size=2))
        run = resumable(fabric, tmp_path / "run", state, held_out, loader)
        assert run.epoch == 2 * start
        for _ in range(run.epoch, 2):
            for batch in loader:
                train(fabric, state, batch)
                for _ in held_out:
                    pass
        run.close()
