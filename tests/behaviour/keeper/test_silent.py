"""A keeper that says nothing any more is reported while training goes on beside it, and not only to
whoever waits for it; one that nobody has listened to is not."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from everstep.errors import DeadlineError, EverstepError
from everstep.seams.clock import ManualClock
from everstep.trainer.attach.remote import Silence
from everstep.trainer.attach.requests import ReplicaProgress
from tests.support.following import until
from tests.support.log.every_step import World, opened, run_steps
from tests.support.lost_keepers import keeper_of, remote_of, stopped
from tests.support.world import TIMEOUT_S


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("no_keeper_stays")
@pytest.mark.parametrize("method", ["lazy", "logged"])
def test_training_beside_a_stopped_keeper_is_told(method: str, run_folder: Path) -> None:
    told = list[EverstepError]()
    world = World()
    options = {"method": method, "on_failure": told.append, "progress_timeout_s": TIMEOUT_S}
    with opened(run_folder, world, every=None, **options) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        remote = remote_of(ckpt)
        with stopped(keeper_of(ckpt)):
            remote.silence.timeout_s = 0.5
            until(lambda: time.monotonic() - remote.silence.received_s > 0.5, "silence")
            assert not told
            run_steps(ckpt, world, 1)
            remote.silence.timeout_s = TIMEOUT_S
        (error,) = told
        assert isinstance(error, DeadlineError)
        assert f"keeper (process {remote.pid}) has sent no message for" in error.message
        ckpt.save()
        ckpt.wait()
        assert ckpt.stats().durable_step == ckpt.stats().step
    assert len(told) == 1


@pytest.mark.usefixtures("no_keeper_stays")
def test_a_keeper_with_nothing_to_do_says_so(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world, every=None, method="lazy") as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 1)
        remote = remote_of(ckpt)
        times_s = set[float]()

        def has_said_so() -> bool:
            times_s.add(remote.silence.received_s)
            return len(times_s) > 3

        until(has_said_so, "a word of it")


def test_what_is_called_silence() -> None:
    clock = ManualClock()
    silence = Silence(clock, 7, 120.0)
    silence.grace_s = 0.0
    clock.advance(120.0)
    assert silence.overdue() is None
    silence.check()
    clock.advance(1.0)
    with pytest.raises(DeadlineError, match=r"process 7\) has sent no message for 121 s"):
        silence.check()
    error = silence.overdue()
    assert error is not None
    assert "121 s" in error.message
    clock.advance(120.0)
    assert silence.overdue() is None, "once, for as long"
    clock.advance(1.0)
    assert silence.overdue() is not None
    silence.message_received()
    clock.advance(120.0)
    assert silence.overdue() is None
    silence.check()


def test_one_that_nobody_has_listened_to_is_not_accused() -> None:
    """The machine has slept, or a call of this process has held all its threads up."""
    clock = ManualClock()
    silence = Silence(clock, 7, 120.0)
    silence.grace_s = TIMEOUT_S
    clock.advance(3600.0)
    comes = threading.Timer(0.1, silence.message_received)
    comes.start()
    silence.check()
    comes.join()
    assert silence.overdue() is None


def test_a_replica_that_gets_nowhere_is_not_waited_for() -> None:
    clock = ManualClock()
    for timeout_s, twice_s in ((5.0, 60.0), (120.0, 240.0)):
        moves = ReplicaProgress(clock, timeout_s)
        for step in range(3):
            moves.check(step)
            clock.advance(twice_s)
            moves.check(step)
        clock.advance(1.0)
        with pytest.raises(DeadlineError, match="the keeper's replica has made no progress for"):
            moves.check(2)
