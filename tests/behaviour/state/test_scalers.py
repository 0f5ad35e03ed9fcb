"""A GradScaler knows of the gradients it has looked at, which is no part of its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import EverstepError, StateError
from tests.support.world import forget

STEPS = 8
SPIKE = 4


class World:
    """A linear layer that is trained with a scaler, and what was told of it."""

    def __init__(self, *, unscales: int = 1, lr: float = 0.01, enabled: bool = True) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**10, growth_interval=3, enabled=enabled
        )
        self.unscales = unscales
        self.told: list[EverstepError] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def backward(self, step: int, *, spike: bool = False) -> float:
        """Returns the norm of the gradients, if it is looked at."""
        loss = self.model(torch.randn(2, 4)).square().mean()
        if spike:
            loss = loss * torch.inf
        self.scaler.scale(loss).backward()
        if step % self.unscales:
            return 0.0
        self.scaler.unscale_(self.optimizer)
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), 1e9))

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def bits(self) -> tuple[bytes, Any]:
        return self.model.weight.detach().numpy().tobytes(), self.scaler.state_dict()


def opened(run_folder: Path, world: World, method: str) -> everstep.Checkpointer:
    forget(run_folder)
    return everstep.Checkpointer(
        run_folder,
        world.state,
        method=method,
        every=2,
        on_failure=world.told.append,
        keeper=everstep.KeeperOptions(process=False),
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["lazy", "logged"])
@pytest.mark.parametrize("unscales", [1, SPIKE], ids=["each step", "some steps"])
@pytest.mark.parametrize("spike", [False, True], ids=["finite", "infinite"])
def test_a_rewind_of_gradients_that_were_unscaled(
    method: str, unscales: int, spike: bool, run_folder: Path
) -> None:
    """The next ones are unscaled as if those had never been."""
    straight = World(unscales=unscales)
    for step in range(1, STEPS + 1):
        straight.backward(step)
        straight.update()
    world, rewound = World(unscales=unscales), False
    with opened(run_folder, world, method) as ckpt:
        step = ckpt.resume().step + 1
        while step <= STEPS:
            world.backward(step, spike=spike and step == SPIKE and not rewound)
            if step == SPIKE and not rewound:
                rewound, recovery = True, ckpt.rewind(2)
                assert (recovery.step, recovery.exact) == (2, True)
                step = 3
                continue
            world.update()
            ckpt.step()
            step += 1
    assert world.bits() == straight.bits()
    assert not world.told


def before_its_update(world: World, ckpt: everstep.Checkpointer) -> None:
    world.backward(1)
    world.scaler.step(world.optimizer)
    ckpt.step()
    world.scaler.update()
    world.optimizer.zero_grad()


def behind_unscale(world: World, ckpt: everstep.Checkpointer) -> None:
    world.backward(1)
    ckpt.step()
    world.update()


def behind_its_update(world: World, ckpt: everstep.Checkpointer) -> None:
    world.backward(1)
    world.update()
    ckpt.step()


def in_micro_batches(world: World, ckpt: everstep.Checkpointer) -> None:
    for step in (1, 2, SPIKE):
        world.backward(step)
    world.update()
    ckpt.step()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (before_its_update, True),
        (behind_unscale, True),
        (behind_its_update, False),
        (in_micro_batches, False),
    ],
)
@pytest.mark.parametrize("method", ["lazy", "logged"])
def test_a_step_mark_before_its_update_is_told_of_once(
    method: str, loop: Callable[[World, everstep.Checkpointer], None], told: bool, run_folder: Path
) -> None:
    world = World(unscales=SPIKE if loop is in_micro_batches else 1)
    with opened(run_folder, world, method) as ckpt:
        ckpt.resume()
        for _ in range(3):
            loop(world, ckpt)
    mine = [error for error in world.told if "'scaler'" in str(error)]
    assert len(mine) == told
    if told:
        assert isinstance(mine[0], StateError)
        assert mine[0].step == 1
        assert "after the scaler's update()" in str(mine[0].hint)


def test_a_scaler_that_does_nothing(run_folder: Path) -> None:
    world = World(enabled=False)
    with opened(run_folder, world, "logged") as ckpt:
        ckpt.resume()
        for step in (1, 2, 3):
            world.backward(step)
            world.update()
            ckpt.step()
        assert ckpt.rewind(2).exact
    assert not world.told
