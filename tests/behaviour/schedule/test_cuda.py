"""Planned captures through the lane of CUDA devices, on devices that are played: updates are held
back on the stream, and each capture is the state at its mark."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.capture.cuda import CudaLane, CudaTransfer, DeviceLane
from everstep.capture.spot_check import SpotCheck
from everstep.testing import inspect
from tests.support import cuda_world
from tests.support.cuda_world import World, restored
from tests.support.world import opened

played = cuda_world.played  # the fixture


@pytest.mark.thinned(2)
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
def test_every_capture_is_the_state_at_its_mark(
    gate: bool, played: threading.Event, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps are learnt from; then the lane's thread sees nothing arrive, so only what an
    update waits for on the stream is copied before it; and without that it is not."""
    if not gate:
        monkeypatch.setattr(CudaTransfer, "gate", lambda *_: True)
        monkeypatch.setattr(SpotCheck, "differing", lambda *_: None)
    world = World()
    snapshots: dict[int, Any] = {}
    with opened(run_folder, world.state, method="checkflow", every=1, keep=100) as ckpt:
        played.set()
        for step in range(1, 10):
            snapshots[step] = world.snapshot()
            ckpt.step()
            if step <= 5:
                ckpt.wait()  # no plan before the link is known
            if step == 5:
                schedule = ckpt.stats().schedule
                assert schedule is not None
                assert schedule.plans >= 1
                played.clear()
            world.train()
        assert isinstance(inspect(ckpt).lane, DeviceLane)
        assert isinstance(inspect(ckpt).lane.current, CudaLane)
        played.set()
        ckpt.wait()
    found = {step: restored(run_folder, step) for step in snapshots if step > 5}
    wanted = {step: snapshot for step, snapshot in snapshots.items() if step > 5}
    assert (found == wanted) == gate
