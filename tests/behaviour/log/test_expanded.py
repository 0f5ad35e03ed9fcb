"""A buffer of which all elements are one in memory, in a log."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everstep.errors import EverstepError
from everstep.testing import inspect
from tests.support.logged import World, opened
from tests.support.world import forget


class Scaled(World):
    """Has one number that is seen as four, and as six, and counts its steps there."""

    def __init__(self, *, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.once, self.grown = torch.zeros(1).expand(4), torch.zeros(2, 1).expand(2, 3)
        self.module = torch.nn.Module()
        self.module.register_buffer("once", self.once)
        self.module.register_buffer("grown", self.grown)
        self.state |= {"scaled": self.module}

    def train(self) -> None:
        super().train()
        self.once[:1].add_(1)
        self.grown[:, :1].add_(torch.tensor([[1.0], [10.0]]))


@pytest.mark.parametrize("step", [None, 4])
def test_it_comes_back_by_replay(step: int | None, run_folder: Path) -> None:
    world, wanted = Scaled(), dict[int, dict[str, bytes]]()
    with opened(run_folder, world, every=None) as ckpt:
        ckpt.resume()
        for number in range(1, 7):
            world.train()
            ckpt.step()
            wanted[number] = world.snapshot()
        ckpt.wait()
        inspect(ckpt).skip_last_base()  # no last base
    forget(run_folder)
    again = Scaled(seed=5)
    with opened(run_folder, again) as ckpt:
        found = ckpt.resume(step)
        end = step or 6
        assert (found.step, found.exact, found.replayed) == (end, True, end - 1), found.evidence
        assert again.snapshot() == wanted[end]
        assert again.once.tolist() == [end] * 4
        assert again.grown.tolist() == [[end] * 3, [10 * end] * 3]
        assert again.once.stride() == (0,), "and it is one element still"
        with pytest.raises(EverstepError):
            ckpt.resume(99)
        inspect(ckpt).skip_last_base()
