"""Gradients that are placed otherwise than their parameters, as those of a norm whose input is
split between ranks (``SequenceParallel``): an update sums them, and a log has none of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import everstep
from everstep.errors import EverstepError, UnsupportedStateError
from everstep.testing import inspect
from tests.support.ranks.sharding import locals_of
from tests.support.serving import Bench, die, serving
from tests.support.world import forget

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as bench:
        yield bench


class World:
    """A block, and what was told of it.

    Args:
        placed: gradients are placed as their parameters are before they are consumed.
    """

    def __init__(self, seed: int, *, placed: bool) -> None:
        torch.manual_seed(seed)
        self.placed = placed
        self.model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        plan = {
            "0": SequenceParallel(sequence_dim=1),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(self.model, init_device_mesh("cpu", (1,)), plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.values = {"model": self.model, "optimizer": self.optimizer}
        self.told: list[EverstepError] = []

    def opened(self, run: Path) -> everstep.Checkpointer:
        forget(run)
        ckpt = everstep.Checkpointer(
            run, self.values, method="logged", every=4, on_failure=self.told.append
        )
        self.recovery = ckpt.resume()
        return ckpt

    def train(self, ckpt: everstep.Checkpointer | None, steps: int) -> dict[str, bytes]:
        for _ in range(steps):
            self.model(torch.randn(2, 4, 6)).square().mean().backward()
            for p in self.model.parameters():
                if self.placed:
                    p.grad = p.grad.redistribute(placements=p.placements)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if ckpt is not None:
                ckpt.step()
        found = {**locals_of(self.values), "drawn next": torch.get_rng_state()}
        return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


def test_they_are_named_and_what_to_do_about_them(served: Bench) -> None:
    world = World(1, placed=False)
    with world.opened(served.run) as ckpt:
        world.train(ckpt, 1)
        ckpt.wait()
    told = world.told[0]
    assert isinstance(told, UnsupportedStateError)
    assert "the gradient of model.0.weight is placed as Partial(sum), but" in str(told)
    assert "its parameter as Replicate()" in str(told)
    assert "p.grad = p.grad.redistribute(placements=p.placements)" in str(told)


def test_placed_as_their_parameters_they_are_logged(served: Bench) -> None:
    wanted = World(1, placed=False).train(None, 9)
    world = World(1, placed=True)
    ckpt = world.opened(served.run)
    world.train(ckpt, 7)
    inspect(ckpt).saver.finish_captures()
    ckpt.wait()
    assert not world.told
    assert ckpt.stats().log_holes == 0
    die(ckpt)
    other = World(9, placed=True)
    with other.opened(served.run) as again:
        assert other.recovery.exact, other.recovery.evidence
        assert (other.recovery.step, other.recovery.replayed) == (7, 3)
        assert other.train(again, 2) == wanted
