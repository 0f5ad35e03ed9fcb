"""A keeper that dies where nobody was looking: between two steps, two calls, or two keepers."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import KeeperError
from everstep.link.pool import Block, CapturePool
from everstep.testing import inspect
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.session.session import finish_at_exit
from tests.support.following import until
from tests.support.log.every_step import World, opened, run_steps
from tests.support.lost_keepers import cut, kill_keeper, kill_noticed, lost_of
from tests.support.world import TIMEOUT_S

pytestmark = [
    pytest.mark.usefixtures("no_keeper_stays"),
    pytest.mark.filterwarnings("ignore:everstep. the keeper .* is gone:RuntimeWarning"),
]

FAILPOINTS = "EVERSTEP_FAILPOINTS"


def test_a_capture_that_is_only_parked_finds_no_keeper(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, killed = CapturePool.acquire, list[KeeperError]()

    def acquire_of_the_dead(pool: CapturePool, *args: Any, **options: Any) -> Block:
        if not killed:
            kill_keeper()
            killed.append(lost_of(pool))
        return acquire(pool, *args, **options)

    world = World()
    with opened(run_folder, world, method="checkflow", every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        ckpt.wait()
        monkeypatch.setattr(CapturePool, "acquire", acquire_of_the_dead)
        states = run_steps(ckpt, world, 3)
        ckpt.wait()
        assert killed
        assert ckpt.stats().keeper_restarts == 1
    other = World(seed=9)
    with opened(run_folder, other, method="checkflow") as ckpt:
        assert ckpt.resume().step == 5
        assert other.snapshot() == states[5]


def test_close_makes_good_what_was_parked_and_says_once_that_it_was_lost(run_folder: Path) -> None:
    world = World()
    ckpt = opened(run_folder, world, method="checkflow", every=None)
    ckpt.resume()
    states = run_steps(ckpt, world, 4)
    inspect(ckpt).saver.finish_captures()
    kill_noticed(ckpt)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ckpt.close()
    assert len([one for one in told if "is gone" in str(one.message)]) == 1
    other = World(seed=9)
    with opened(run_folder, other, method="checkflow") as ckpt:
        assert ckpt.resume().step == 4
        assert other.snapshot() == states[4]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["lazy", "gockpt", "checkflow"])
def test_a_base_lost_before_a_wait_within_a_step_is_taken_at_its_end(
    method: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILPOINTS, "save.before_marker=kill:1")
    world = World()
    with opened(run_folder, world, method=method, every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        save = ckpt.save()
        until(lambda: inspect(ckpt).keepers.lost is not None, "the loss of the keeper")
        monkeypatch.delenv(FAILPOINTS)
        world.train()
        ckpt.wait()
        assert isinstance(save.durable.exception(TIMEOUT_S), KeeperError)
        ckpt.step()
        ckpt.save() if method == "gockpt" else None  # ends what is taken over several steps
        ckpt.wait()
        assert ckpt.stats().durable_step == 3


@pytest.mark.thinned(2)
@pytest.mark.parametrize("moment", ["settle", "serve"])
def test_training_goes_on_when_the_next_keeper_dies_as_it_comes_into_service(
    moment: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: Callable[..., object] = getattr(RemoteKeeper, moment)
    killed = list[int]()

    def of_the_dead(keeper: RemoteKeeper, *args: Any, **options: Any) -> object:
        if not killed:
            killed.append(keeper.pid)
            os.kill(keeper.pid, signal.SIGKILL)
            until(lambda: keeper.lost is not None, "the loss of the keeper")
        return call(keeper, *args, **options)

    world = World()
    with opened(run_folder, world, every=None, method="lazy") as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        ckpt.wait()
        kill_noticed(ckpt)
        monkeypatch.setattr(RemoteKeeper, moment, of_the_dead)
        states = run_steps(ckpt, world, 3)
        ckpt.wait()
        assert ckpt.stats().keeper_restarts == 2
        durable_step = ckpt.stats().durable_step
    other = World(seed=9)
    with opened(run_folder, other, method="lazy") as ckpt:
        step = ckpt.resume().step
        assert step == durable_step >= 3
        assert other.snapshot() == states[step]


def test_nobody_waits_for_what_was_still_to_be_retained(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends notices first that it is gone; what it had said before is read behind that."""
    monkeypatch.setenv(FAILPOINTS, "retain.before_unlink=kill:1")
    hear, heard = RemoteKeeper.handle, threading.Event()

    def hear_late(keeper: RemoteKeeper, message: dict[str, Any], fds: list[int]) -> None:
        if message["kind"] == "persisted" and not heard.is_set():
            heard.set()
            until(lambda: keeper.lost is not None, "the loss of the keeper")
        hear(keeper, message, fds)

    world, about = World(), {"keep": 1, "progress_timeout_s": TIMEOUT_S}
    with opened(run_folder, world, method="lowdiff_plus", every=None, **about) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 1)
        ckpt.wait()
        monkeypatch.delenv(FAILPOINTS)
        run_steps(ckpt, world, 1)
        monkeypatch.setattr(RemoteKeeper, "handle", hear_late)
        ckpt.save()
        assert heard.wait(TIMEOUT_S)
        keeper = inspect(ckpt).keepers.current
        assert isinstance(keeper, RemoteKeeper)

        def noticed() -> bool:
            keeper.forget_log(0)
            return keeper.lost is not None

        until(noticed, "the loss of the keeper")
        cut(ckpt)
        keeper.wait(TIMEOUT_S / 4)  # nothing is left to wait for


def test_what_is_lost_at_exit_with_a_keeper_is_said(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAILPOINTS, "save.before_marker=kill:1")
    world = World()
    with opened(run_folder, world, method="lazy", every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        monkeypatch.delenv(FAILPOINTS)
        ckpt.save()
        until(lambda: inspect(ckpt).keepers.lost is not None, "the loss of the keeper")
        keeper = inspect(ckpt).keepers.current
        assert keeper is not None
        finish_at_exit(inspect(ckpt).components, keeper, lambda: None, os.getpid(), sys.stderr)
        assert (
            "data that was not durable (bases of steps 2) was lost at exit"
            in capsys.readouterr().err
        )
        closed = io.StringIO()
        closed.close()  # as that of a daemon may be: the keeper is let go of all the same
        finish_at_exit(inspect(ckpt).components, keeper, lambda: None, os.getpid(), closed)


def test_a_log_that_is_gone_is_not_said_to_be_in_memory(run_folder: Path) -> None:
    world = World()
    ckpt = opened(run_folder, world, method="logged", every=None)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    kill_noticed(ckpt)
    world.train()
    said = io.StringIO()
    with redirect_stderr(said):
        ckpt.close()
    assert "was in the memory of a keeper that was lost, and is lost with it" in said.getvalue()


def test_a_keeper_that_serves_another_process_is_not_called_gone(run_folder: Path) -> None:
    """Which has what was in its memory, too."""
    world = World()
    ckpt = opened(run_folder, world, method="logged", every=None)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    keeper = inspect(ckpt).keepers.current
    assert isinstance(keeper, RemoteKeeper)
    keeper.handle({"kind": "replaced", "pid": 4711}, [])
    world.train()
    said = io.StringIO()
    with redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt.close()
    assert "no last base of step 3 is taken: another process has taken over the run" in (
        told := said.getvalue()
    )
    assert "now serves process 4711" in told
    assert "gone" not in told
