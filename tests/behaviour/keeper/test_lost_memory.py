"""The memory of a keeper that is lost: it may live on, and write what it was given. What training
does until another is in service must not get into that."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import everstep
from everstep.arena import Arena
from everstep.errors import KeeperError
from everstep.link.pool import CapturePool
from everstep.testing import inspect
from tests.support.following import opened, run_steps, steps_on_disk, until
from tests.support.lost_keepers import cut
from tests.support.multistep.rows import over, restored
from tests.support.multistep.world import World, begin
from tests.support.serving import serving
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem


def test_no_memory_is_given_out_again() -> None:
    keeper: Any = SimpleNamespace(lost=None, moves=0, log_moves=0)
    pool = CapturePool(Arena.anonymous(4 * 4096), keeper)
    first, second = (pool.acquire(2 * 4096, timeout_s=1) for _ in range(2))
    pool.release(first)
    keeper.lost = KeeperError("it is gone")
    assert pool.acquire_now(4096) is None
    with pytest.raises(KeeperError, match="it is gone"):
        pool.acquire(4096, timeout_s=1)
    pool.release(second)
    assert pool.used_bytes == 0


def test_whoever_waits_for_memory_hears_of_it() -> None:
    keeper: Any = SimpleNamespace(lost=None, moves=0, log_moves=0)
    pool = CapturePool(Arena.anonymous(4096), keeper)
    first = pool.acquire(4096, timeout_s=1)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            pool.acquire(4096, timeout_s=TIMEOUT_S)
        except KeeperError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    keeper.lost = KeeperError("it is gone")
    pool.release(first)  # as for every capture that was under way
    thread.join(TIMEOUT_S)
    assert found == [keeper.lost]


@pytest.mark.parametrize("overlap", [False, True], ids=["gockpt", "gockpt_o"])
def test_gradients_of_the_step_under_way_are_not_written_into_its_base(
    overlap: bool, run_folder: Path
) -> None:
    """Which it still has to write to disk."""
    filesystem, gate = HookedFileSystem(), Gate()
    with serving(run_folder, filesystem=filesystem) as bench:
        world = World()
        method = over(3, overlap=overlap)
        ckpt = opened(bench.run, world, method=method, on_failure=lambda error: None)
        ckpt.resume()
        states = run_steps(ckpt, world, 2)
        ckpt.wait()
        filesystem.hook = _at_data(gate)
        states |= take_one(ckpt, world)
        assert gate.reached.wait(TIMEOUT_S)
        cut(ckpt)
        world.train()  # its gradients are copied
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
        gate.open()
        until(lambda: 4 in steps_on_disk(bench.run), "the base that it had")
        with pytest.warns(RuntimeWarning, match="the keeper"):
            ckpt.close()
    assert restored(run_folder, World(seed=9), 4) == states[4]


def _at_data(gate: Gate) -> Any:
    def hook(op: str, path: Any) -> None:
        if op in ("create", "reuse") and "safetensors" in path.name and "base" in path.parts:
            gate.wait_at()

    return hook


def take_one(ckpt: everstep.Checkpointer, world: World) -> dict[int, Any]:
    """A base of step 4, which does not get to the disk; and whatever comes next has begun."""
    assert inspect(ckpt).multistep is not None
    save = begin(ckpt)
    states = run_steps(ckpt, world, 2)
    save.staged.result(TIMEOUT_S)
    remote: Any = inspect(ckpt).keepers.current
    until(lambda: not remote.rebuilding, "that it is whole")
    states |= run_steps(ckpt, world, 1)
    begin(ckpt)
    assert inspect(ckpt).multistep.window
    return states
