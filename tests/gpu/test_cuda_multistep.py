"""Bases over several steps on a CUDA device: copied whole, and brought forward on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import everstep
from everstep.keeper.registry import list_keepers
from everstep.seams.processes import process_gone
from tests.gpu.world import NEEDS_CUDA, World
from tests.unit.world import TIMEOUT_S, forget

pytestmark = NEEDS_CUDA


@pytest.fixture(autouse=True)
def no_keeper_stays() -> Iterator[None]:
    yield
    for keeper in list_keepers():
        os.kill(keeper.pid, signal.SIGKILL)
        assert process_gone(keeper.pid, TIMEOUT_S)


@pytest.mark.parametrize("overlap", [False, True], ids=["gockpt", "gockpt_o"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_a_base_is_the_state_of_its_step_up_to_rounding(
    overlap: bool, scaled: bool, run_folder: Path
) -> None:
    """And is never called exact: the keeper computes on the CPU what training did on the device."""
    method = everstep.Method(base="multistep", parts=4, overlap_forward=overlap)
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
