"""Bases over several steps through the lane of CUDA devices, on devices that are played: gradients
are zeroed in place as soon as the stream waits for their copies, and the lane learns of it late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.capture.cuda import CudaLane, DeviceLane
from everstep.errors import EverstepError
from everstep.testing import inspect
from everstep.trainer.multistep.held_gradients import GraphMemory
from tests.support import cuda_world
from tests.support.following import run_steps, steps_on_disk
from tests.support.multistep.rows import over, restored
from tests.support.multistep.world import World, report_of, start
from tests.support.serving import Bench, serving
from tests.support.world import TIMEOUT_S

played = cuda_world.played  # the fixture


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def test_zeroing_behind_the_gate_is_not_taken_for_a_torn_gradient(
    played: threading.Event, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients but a small one lie on the device, and their copies are made; the lane's thread
    sees that only when they have been zeroed."""
    monkeypatch.setattr(GraphMemory, "has", lambda *_: False)
    played.set()
    reported: list[EverstepError] = []
    world = World(to_none=False)
    ckpt = start(served, world, over(3, overlap=True), on_failure=reported.append)
    states = {}
    for step in (3, 4):
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
        played.clear()
        world.train()
        assert not any(parameter.grad.any() for parameter in world.model.parameters())
        played.set()
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
        ckpt.step()
        states[step] = world.snapshot()
    states |= run_steps(ckpt, world, 1)
    assert isinstance(inspect(ckpt).lane, DeviceLane)
    assert isinstance(inspect(ckpt).lane.current, CudaLane)
    ckpt.close()
    assert not reported
    assert report_of(ckpt).abandoned == 0
    assert not inspect(ckpt).multistep.copies.waits
    assert restored(served.run, World(seed=9), 4) == states[4]
    assert 4 in steps_on_disk(served.run)
