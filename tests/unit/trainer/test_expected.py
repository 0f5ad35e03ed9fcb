"""What a state will consist of behind the first update, told before it: as it then is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import OutOfSpaceError
from everstep.state.survey import Shape
from everstep.state.training_state import State
from everstep.trainer.budget import shape_after_first_update
from tests.support.ranks.sharding import as_rank, build

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "amsgrad, tensor lr": partial(torch.optim.AdamW, lr=torch.tensor(0.1), amsgrad=True),
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "foreach": partial(torch.optim.RAdam, lr=0.1, foreach=True),
    "centred": partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "rprop": partial(torch.optim.Rprop, lr=0.1),
}


def forms(shape: Shape) -> dict[str, Any]:
    return {entry.name: (entry.shape, entry.dtype, entry.stride) for entry in shape.entries}


def sizes(shape: Shape) -> dict[str, int]:
    """Without numbers of steps, each of which one rank or another writes where parameters are
    sharded."""
    return {e.name: e.size_bytes for e in shape.entries if not e.name.endswith("/step")}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_what_comes(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    model[1].bias.requires_grad_(False)
    optimizer = OPTIMIZERS[name](model.parameters())
    state = State({"model": model, "optimizer": optimizer})
    found, is_all = shape_after_first_update(state, state.survey().shape)
    assert not any(group for group in optimizer.state.values()) or name == "adagrad"
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    shape = state.survey().shape
    assert is_all
    assert forms(found) == forms(shape)
    assert shape_after_first_update(state, shape) == (shape, True)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.ASGD, torch.optim.LBFGS, type("Own", (torch.optim.Adam,), {})]
)
def test_what_cannot_be_told_is_not_claimed(optimizer: Any) -> None:
    model = nn.Linear(2, 2)
    state = State({"model": model, "optimizer": optimizer(model.parameters())})
    shape = state.survey().shape
    assert shape_after_first_update(state, shape) == (shape, False)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", ["one", "ddp", "fsdp", "hsdp", "zero"])
def test_of_several_ranks_it_is_each_ones_own(layout: str) -> None:
    world = 1 if layout == "one" else 4
    for rank in range(world):
        with as_rank(rank, world) as info:
            before = State(build(layout, info, 3, stepped=False), ranks=info)
            found, is_all = shape_after_first_update(before, before.survey().shape)
            behind = State(build(layout, info, 3), ranks=info).survey().shape
            assert is_all
            assert sizes(found) == sizes(behind), rank


def test_a_budget_that_the_first_update_exceeds_is_refused_before_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(1000, 100)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    budget = everstep.Budget(host_bytes=1_000_000)
    with pytest.raises(OutOfSpaceError, match="copies the state"):
        everstep.Checkpointer(tmp_path / "run", state, budget=budget)
    assert not (tmp_path / "run").exists()
    with everstep.Checkpointer(tmp_path / "run", state, every=None) as ckpt:
        ckpt.resume()
    assert "(12.1 bytes per parameter)" in capfd.readouterr().err
