"""Bases over several steps on a CUDA device: copied whole, and brought forward on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.link.registry import list_keepers
from everstep.seams.processes.processes import process_ended
from everstep.trainer.multistep.held_gradients import GraphMemory, HeldGradients, own_their_memory
from tests.gpu.world import DEVICE, NEEDS_CUDA, World, warm_up
from tests.support.world import TIMEOUT_S, forget

pytestmark = NEEDS_CUDA


@pytest.fixture(autouse=True)
def no_keeper_stays() -> Iterator[None]:
    yield
    for keeper in list_keepers():
        os.kill(keeper.pid, signal.SIGKILL)
        assert process_ended(keeper.pid, TIMEOUT_S)


@pytest.mark.parametrize("overlap", [0, 1, 3], ids=["gockpt", "gockpt_o", "held for 3"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_a_base_is_the_state_of_its_step_up_to_rounding(
    overlap: int, scaled: bool, run_folder: Path
) -> None:
    """And is never called exact: the keeper computes on the CPU what training did on the device."""
    about = {"overlap_forward": overlap > 0, "held_steps": max(1, overlap)}
    method = everstep.Method(base="multistep", parts=4, **about)
    world, wanted = World(width=2048, scaled=scaled), {}
    forget(run_folder)
    with everstep.Checkpointer(run_folder, world.state, method=method, every=5, keep=9) as ckpt:
        ckpt.resume()
        for step in range(1, 15):
            world.train()
            ckpt.step()
            wanted[step] = {k: v.detach().clone() for k, v in world.model.state_dict().items()}
        ckpt.wait()
        report = ckpt.stats().multistep
    assert report is not None
    assert report.abandoned == 0
    for step in (8, 13):
        other = World(seed=9, width=2048, scaled=scaled)
        forget(run_folder)
        with everstep.Checkpointer(run_folder, other.state, method="lazy", every=None) as ckpt:
            recovery = ckpt.resume(step)
            assert not recovery.exact
        for name, tensor in other.model.state_dict().items():
            assert torch.allclose(tensor, wanted[step][name], rtol=1e-4, atol=1e-5), name


class Captured(World):
    """Forward and backward are a CUDA graph: replays write to the same gradients each time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batch = torch.randn(16, 32, device=DEVICE)
        warm_up(self.make_gradients)
        self.optimizer.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.backward()

    def make_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.backward()

    def backward(self) -> None:
        self.model(self.batch).square().mean().backward()

    def train(self) -> None:
        self.batch.copy_(torch.randn(16, 32, device=DEVICE))
        self.graph.replay()
        self.optimizer.step()


def test_gradients_in_the_memory_of_a_graph_are_known() -> None:
    world = Captured()
    gradients: list[Any] = [parameter.grad for parameter in world.model.parameters()]
    assert own_their_memory(gradients), "as far as they themselves tell"
    assert GraphMemory().has(gradients)
    world.optimizer.zero_grad()
    world.backward()
    gradients = [parameter.grad for parameter in world.model.parameters()]
    assert not GraphMemory().has(gradients)


def test_replays_do_not_write_over_what_is_copied(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    monkeypatch.setattr(HeldGradients, "hold", lambda self, *about: held.append(about))
    method = everstep.Method(base="multistep", parts=4, overlap_forward=True)
    world, wanted = Captured(width=2048), {}
    with everstep.Checkpointer(run_folder, world.state, method=method, every=5, keep=9) as ckpt:
        ckpt.resume()
        for step in range(1, 10):
            world.train()
            ckpt.step()
            wanted[step] = {k: v.detach().clone() for k, v in world.model.state_dict().items()}
        ckpt.wait()
    assert not held
    other = World(seed=9, width=2048)
    forget(run_folder)
    with everstep.Checkpointer(run_folder, other.state, method="lazy", every=None) as ckpt:
        ckpt.resume(8)
    for name, tensor in other.model.state_dict().items():
        assert torch.allclose(tensor, wanted[8][name], rtol=1e-4, atol=1e-5), name
