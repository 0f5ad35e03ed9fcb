"""A step mark while gradients are accumulated: a resume there would go on without them, unsaid."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import everstep
from everstep.errors import EverstepError, StateError
from tests.support.world import forget


class World:
    """A linear layer, and what was told of it.

    Args:
        kind: ``"plain"``, ``"ddp"``, or ``"fsdp"``.
    """

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        self.model: Any = nn.Linear(4, 3)
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif kind == "fsdp":
            fully_shard(self.model)
        self.kind = kind
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.told: list[EverstepError] = []

    def backward(self, *, last: bool = True) -> None:
        """Of a micro-batch; those before the last are not reduced."""
        apart = self.kind == "ddp" and not last
        if self.kind == "fsdp":
            self.model.set_requires_gradient_sync(last)
        with self.model.no_sync() if apart else contextlib.nullcontext():
            self.model(torch.randn(2, 4)).sum().backward()

    def update(self, *, to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)


@pytest.fixture(params=["plain", "ddp", "fsdp"])
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{tmp_path}/store"
    if request.param != "plain":
        distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield World(request.param)
    if request.param != "plain":
        distributed.destroy_process_group()


@pytest.fixture(params=["lazy", "logged"])
def opened(
    request: pytest.FixtureRequest, run_folder: Path, world: World
) -> Iterator[tuple[World, everstep.Checkpointer]]:
    forget(run_folder)
    alone: dict[str, Any] = {"keeper": everstep.KeeperOptions(process=False)}
    state = {"model": world.model, "optimizer": world.optimizer}
    with everstep.Checkpointer(
        run_folder, state, method=request.param, every=4, on_failure=world.told.append, **alone
    ) as ckpt:
        ckpt.resume()
        yield world, ckpt


Loop = Callable[[World, everstep.Checkpointer], None]


def each_micro_batch(world: World, ckpt: everstep.Checkpointer) -> None:
    for last in (False, True):
        world.backward(last=last)
        ckpt.step()
    world.update()


def each_that_is_reduced(world: World, ckpt: everstep.Checkpointer) -> None:
    for _ in range(2):
        world.backward()
        ckpt.step()
    world.update()


def but_for_the_last(world: World, ckpt: everstep.Checkpointer) -> None:
    world.backward(last=False)
    ckpt.step()
    world.backward()
    world.update()
    ckpt.step()


def clipped_at_last(world: World, ckpt: everstep.Checkpointer) -> None:
    """What was added to by clipping, too, is as often written to as what was zeroed: the marks
    before it tell."""
    for _ in range(2):
        world.backward(last=False)
        ckpt.step()
    world.backward()
    nn.utils.clip_grad_norm_(world.model.parameters(), 0.1)
    world.update()
    ckpt.step()


def before_the_update(world: World, ckpt: everstep.Checkpointer) -> None:
    world.backward()
    ckpt.step()
    world.update()


def behind_the_update(world: World, ckpt: everstep.Checkpointer) -> None:
    for last in (False, True):
        world.backward(last=last)
    world.update()
    ckpt.step()


def zeroed_first(world: World, ckpt: everstep.Checkpointer) -> None:
    world.optimizer.zero_grad()
    world.backward()
    world.optimizer.step()
    ckpt.step()


def skipped_now_and_then(world: World, ckpt: everstep.Checkpointer) -> None:
    """As a GradScaler does where a gradient is not finite."""
    world.backward()
    if ckpt.stats().step % 2:
        world.optimizer.step()
    world.optimizer.zero_grad()
    ckpt.step()


def skipped_and_zeroed_in_place(world: World, ckpt: everstep.Checkpointer) -> None:
    world.backward()
    if ckpt.stats().step % 2:
        world.optimizer.step()
    world.optimizer.zero_grad(set_to_none=False)
    ckpt.step()


def skipped_with_micro_batches(world: World, ckpt: everstep.Checkpointer) -> None:
    """In each step two; their gradients are zeroed in place."""
    world.optimizer.zero_grad(set_to_none=False)
    for last in (False, True):
        world.backward(last=last)
    if ckpt.stats().step % 3 == 2:
        world.optimizer.step()
    ckpt.step()


def skipped_and_zeroed_late(world: World, ckpt: everstep.Checkpointer) -> None:
    world.optimizer.zero_grad()
    world.backward()
    if ckpt.stats().step % 2:
        world.optimizer.step()
    ckpt.step()


@pytest.mark.thinned(10)
@pytest.mark.parametrize(
    "loop",
    [each_micro_batch, each_that_is_reduced, but_for_the_last, clipped_at_last, before_the_update],
)
def test_who_marks_a_step_in_the_middle_of_it_is_told_once(
    loop: Loop, opened: tuple[World, everstep.Checkpointer]
) -> None:
    world, ckpt = opened
    for _ in range(4):
        loop(world, ckpt)
    ckpt.wait()
    (told,) = world.told
    assert isinstance(told, StateError)
    assert "gradients of 'optimizer' waited for an update" in str(told)
    assert "after optimizer.step()" in str(told)
    assert told.step == 1
    assert ckpt.stats().log_holes == 0


def skipped_and_zeroed_late_in_place(world: World, ckpt: everstep.Checkpointer) -> None:
    """The same tensor at the mark and at the update, written to twice in between."""
    world.optimizer.zero_grad(set_to_none=False)
    world.backward()
    if ckpt.stats().step % 3 == 2:
        world.optimizer.step()
    ckpt.step()


def marked_again(world: World, ckpt: everstep.Checkpointer) -> None:
    """Steps of nothing, as an evaluation is, while gradients that are spent lie there."""
    zeroed_first(world, ckpt)
    ckpt.step()
    ckpt.step()


@pytest.mark.thinned(18)
@pytest.mark.parametrize(
    "loop",
    [
        behind_the_update,
        zeroed_first,
        skipped_now_and_then,
        skipped_and_zeroed_in_place,
        skipped_with_micro_batches,
        skipped_and_zeroed_late,
        skipped_and_zeroed_late_in_place,
        marked_again,
    ],
)
def test_others_are_not(loop: Loop, opened: tuple[World, everstep.Checkpointer]) -> None:
    world, ckpt = opened
    for _ in range(6):
        loop(world, ckpt)
    ckpt.wait()
    assert not world.told
    assert ckpt.stats().log_holes == 0


def test_hooks_go_with_the_checkpointer(opened: tuple[World, everstep.Checkpointer]) -> None:
    world, ckpt = opened
    each_micro_batch(world, ckpt)
    hooks: Any = world.optimizer
    assert hooks._optimizer_step_pre_hooks
    with warnings.catch_warnings(record=True):
        ckpt.close()
    assert not hooks._optimizer_step_pre_hooks
