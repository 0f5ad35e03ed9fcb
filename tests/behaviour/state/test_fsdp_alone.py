"""``fully_shard`` in a job of one rank: a log holds its parts, which are all there is, and replay
gives the bits of training, as in a job of several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep
from everstep.testing import inspect
from tests.support.ranks.sharding import locals_of
from tests.support.serving import Bench, die, serving
from tests.support.world import forget

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as bench:
        yield bench


class Sharded:
    def __init__(self, seed: int, *, fused: bool) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        fully_shard(self.model[0])
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)
        self.values: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self, ckpt: everstep.Checkpointer | None, steps: int) -> dict[str, bytes]:
        for _ in range(steps):
            self.model(torch.randn(6, 5)).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if ckpt is not None:
                ckpt.step()
        return self.parts()

    def parts(self) -> dict[str, bytes]:
        found = {**locals_of(self.values), "drawn next": torch.get_rng_state()}
        return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


def opened(run: Path, there: Sharded, method: Any) -> everstep.Checkpointer:
    forget(run)
    return everstep.Checkpointer(run, there.values, method=method, every=4)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", ["logged", "gockpt"])
def test_a_killed_training_comes_back_bit_for_bit(served: Bench, method: str, fused: bool) -> None:
    undisturbed = Sharded(1, fused=fused)
    wanted = [undisturbed.parts(), *(undisturbed.train(None, 1) for _ in range(9))]
    there = Sharded(1, fused=fused)
    ckpt = opened(served.run, there, method)
    ckpt.resume()
    there.train(ckpt, 7)
    inspect(ckpt).saver.finish_captures()
    ckpt.wait()
    die(ckpt)
    other = Sharded(9, fused=fused)
    again = opened(served.run, other, method)
    recovery = again.resume()
    assert recovery.exact, recovery.evidence
    assert recovery.step == (7 if method == "logged" else 4)
    assert (recovery.replayed > 0) == (method == "logged")
    assert other.parts() == wanted[recovery.step]
    assert other.train(again, 9 - recovery.step) == wanted[9]
    again.close()
