"""Gradients that ``fully_shard`` has not reduced yet: ``rewind()`` leaves nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import everstep
from tests.support.ranks.sharding import locals_of
from tests.support.world import forget

pytestmark = pytest.mark.usefixtures("alone")


class Breaks(nn.Module):
    """Raises in the backward, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.broken:
            values.register_hook(self._raise)
        return values.relu()

    def _raise(self, gradient: torch.Tensor) -> None:
        self.broken = False
        raise ArithmeticError


class World:
    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.breaks = Breaks()
        self.model: Any = nn.Sequential(nn.Linear(5, 7), self.breaks, nn.Linear(7, 3))
        fully_shard(self.model[0], **options)
        fully_shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.values: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.model(torch.randn(6, 5)).square().mean().backward()

    def spoil(self) -> None:
        """A backward of a batch that is not finite."""
        self.model(torch.full((6, 5), torch.nan)).square().mean().backward()

    def train(self, ckpt: everstep.Checkpointer | None, steps: int) -> dict[str, bytes]:
        for _ in range(steps):
            for last in (False, True):
                self.model.set_requires_gradient_sync(last)
                self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if ckpt is not None:
                ckpt.step()
        found = {**locals_of(self.values), "drawn next": torch.get_rng_state()}
        return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


def opened(
    run: Path, world: World, method: Any = "lazy", state: dict[str, Any] | None = None
) -> everstep.Checkpointer:
    forget(run)
    alone: Any = {"keeper": everstep.KeeperOptions(process=False)}
    ckpt = everstep.Checkpointer(run, state or world.values, method=method, every=1, **alone)
    ckpt.resume()
    return ckpt


def not_reduced(world: World) -> None:
    world.model.set_requires_gradient_sync(False)
    world.spoil()


def not_all_reduced(world: World) -> None:
    world.model.set_requires_all_reduce(False)
    world.spoil()


def broken_off(world: World) -> None:
    world.breaks.broken = True
    with pytest.raises(ArithmeticError):
        world.spoil()


def in_mid_accumulation(world: World) -> None:
    not_reduced(world)
    world.model.set_requires_gradient_sync(True)
    broken_off(world)


def without_backward(world: World) -> None:
    world.model(torch.randn(6, 5))


def plain() -> World:
    return World()


def in_another_dtype() -> World:
    return World(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def replicated() -> World:
    return World(mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "parts")))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["lazy", "logged"])
@pytest.mark.parametrize(
    ("make", "undone"),
    [
        (plain, not_reduced),
        (plain, broken_off),
        (plain, in_mid_accumulation),
        (plain, without_backward),
        (in_another_dtype, not_reduced),
        (replicated, not_all_reduced),
    ],
)
def test_a_rewind_leaves_nothing_of_a_micro_batch(
    run_folder: Path, make: Callable[[], World], undone: Callable[[World], None], method: str
) -> None:
    wanted = make().train(None, 5)
    world = make()
    with opened(run_folder, world, method) as ckpt:
        world.train(ckpt, 3)
        undone(world)
        recovery = ckpt.rewind(2)
        assert recovery.exact, recovery.evidence
        assert not recovery.notes
        world.model.set_requires_all_reduce(True)
        assert world.train(ckpt, 3) == wanted


def test_a_part_of_what_is_sharded_is_enough(run_folder: Path) -> None:
    """The state has the modules in the one that is sharded as a whole, and not that one."""
    wanted = World().train(None, 3)
    world = World()
    first, _, last = world.model
    state = {"first": first, "last": last, "optimizer": world.optimizer}
    with opened(run_folder, world, state=state) as ckpt:
        world.train(ckpt, 2)
        not_reduced(world)
        broken_off(world)
        assert ckpt.rewind(2).exact
        assert world.train(ckpt, 1) == wanted


def test_a_torch_that_keeps_them_elsewhere_is_not_called_exact(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    with opened(run_folder, world) as ckpt:
        world.train(ckpt, 2)
        with monkeypatch.context() as other:
            other.delattr(FSDPModule, "_get_fsdp_state")
            recovery = ckpt.rewind(2)
        assert not recovery.exact
        (note,) = recovery.notes
        assert "cannot find unreduced gradients of fully_shard" in note
        assert note in recovery.evidence


@pytest.mark.parametrize("undone", [not_reduced, without_backward, broken_off])
def test_a_torch_that_cannot_clean_up_is_not_called_exact_behind_an_error(
    run_folder: Path, undone: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    with opened(run_folder, world) as ckpt:
        world.train(ckpt, 2)
        undone(world)
        state = world.model._get_fsdp_state()
        with monkeypatch.context() as older:
            older.delattr(type(state), "_reset_iter_state")
            recovery = ckpt.rewind(2)
        assert recovery.exact == (undone is not broken_off), recovery.evidence
        interrupted = [note for note in recovery.notes if "was interrupted in" in note]
        assert interrupted == list(recovery.notes)
