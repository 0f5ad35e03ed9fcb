"""A keeper that is killed while training waits for it: what it had is made good, or said to be
lost, and nobody goes on waiting."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.errors import EverstepError, KeeperError
from everstep.link.pool import Block, CapturePool
from everstep.options import LogOptions
from everstep.testing import inspect
from tests.support.following import until
from tests.support.log.every_step import World, opened, run_steps
from tests.support.lost_keepers import kill_keeper, lost_of
from tests.support.world import TIMEOUT_S

pytestmark = [
    pytest.mark.usefixtures("no_keeper_stays"),
    pytest.mark.filterwarnings("ignore:everstep. the keeper .* is gone:RuntimeWarning"),
]

FAILPOINTS = "EVERSTEP_FAILPOINTS"


@pytest.mark.thinned(3)
@pytest.mark.parametrize("hit", [2, 5, 6])
def test_training_that_waits_for_the_log_on_disk_goes_on(
    hit: int, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more is written by a keeper that is gone; to wait for it ended in a word about storage
    that hangs."""
    monkeypatch.setenv(FAILPOINTS, f"keeper.log_arrived=kill:{hit}")
    told: list[EverstepError] = []
    world, log = World(), LogOptions(to="disk", batch_steps=1, lag_steps=0)
    options = {"log": log, "on_failure": told.append, "progress_timeout_s": 2 * TIMEOUT_S}
    with opened(run_folder, world, **options) as ckpt:
        ckpt.resume()
        monkeypatch.delenv(FAILPOINTS)  # keepers that are started later live on
        begin_s = time.monotonic()
        states = run_steps(ckpt, world, 7)
        assert time.monotonic() - begin_s < TIMEOUT_S
        assert ckpt.stats().keeper_restarts == 1
    assert {type(error) for error in told} <= {KeeperError}, told  # a base was under way
    other = World(seed=9)
    with opened(run_folder, other, log=log) as ckpt:
        assert ckpt.resume().step == 7
        assert other.snapshot() == states[7]


def test_a_base_that_is_taken_once_more_is_of_the_end_of_its_step(run_folder: Path) -> None:
    """And not of what has been drawn since."""
    world = World()
    with opened(run_folder, world, every=None) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 3)
        ckpt.wait()
        kill_keeper()
        until(lambda: inspect(ckpt).keepers.lost is not None, "the loss of the keeper")
        torch.manual_seed(99)
        ckpt.wait()
        assert ckpt.stats().durable_step == 3
    other = World(seed=9)
    with opened(run_folder, other) as ckpt:
        assert ckpt.resume().step == 3
        assert other.snapshot() == states[3]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["lazy", "logged", "gockpt"])
def test_training_goes_on_when_the_keeper_dies_as_a_base_is_taken(
    method: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, when another takes its place, and not later, when a base is under way."""
    acquire, killed = CapturePool.acquire, list[KeeperError]()

    def acquire_of_the_dead(pool: CapturePool, *args: Any, **options: Any) -> Block:
        if not killed:
            kill_keeper()
            killed.append(lost_of(pool))
        return acquire(pool, *args, **options)

    world = World()
    with opened(run_folder, world, method=method, every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        ckpt.wait()
        monkeypatch.setattr(CapturePool, "acquire", acquire_of_the_dead)
        save = ckpt.save()
        assert save.durable.exception(TIMEOUT_S) is killed[0]
        states = run_steps(ckpt, world, 3)  # the first of them takes the base anew
        ckpt.wait()
        assert ckpt.stats().keeper_restarts == 1
        durable_step = ckpt.stats().durable_step
    other = World(seed=9)
    with opened(run_folder, other, method=method) as ckpt:
        step = ckpt.resume().step
        assert step >= durable_step >= 3
        assert other.snapshot() == states[step]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["lazy", "logged"])
@pytest.mark.parametrize("ends", ["wait", "close"])
def test_two_keepers_in_a_row(
    ends: str, method: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits is told that nothing is durable."""
    monkeypatch.setenv(FAILPOINTS, "save.before_marker=kill:1")
    world = World()
    ckpt = opened(run_folder, world, method=method, every=None)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    ckpt.save()
    with pytest.raises(KeeperError, match="two keepers in a row were lost: no base of step"):
        ckpt.wait() if ends == "wait" else ckpt.close()
    monkeypatch.delenv(FAILPOINTS)
    if ends == "wait":
        ckpt.close()  # tries again
    other = World(seed=9)
    with opened(run_folder, other, method=method) as ckpt:
        assert ckpt.resume().step == (3 if ends == "wait" else 0)
        if ends == "wait":
            assert other.snapshot() == world.snapshot()
