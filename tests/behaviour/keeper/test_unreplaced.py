"""A keeper that is gone, and no other can take its place for a while: training goes on, which is
said again and again, and its end tries once more, however short ago that was in vain."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.errors import EverstepError, KeeperError, KeeperTimeoutError
from everstep.options import LogOptions
from everstep.seams.clock import ManualClock
from everstep.testing import inspect
from everstep.trainer.attach import keepers
from everstep.trainer.attach.keepers import ReplacementAttempts
from tests.support.log.every_step import World, opened, run_steps
from tests.support.lost_keepers import kill_noticed

pytestmark = [
    pytest.mark.usefixtures("no_keeper_stays"),
    pytest.mark.filterwarnings("ignore:everstep. the keeper .* is gone:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:everstep. it does not answer:RuntimeWarning"),
]


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who attaches to a keeper, or starts one, waits in vain while there is anything in this."""
    attach = keepers.attach
    why: list[str] = []

    def answers(*about: Any) -> Any:
        if why:
            raise KeeperTimeoutError(why[0])
        return attach(*about)

    monkeypatch.setattr(keepers, "attach", answers)
    yield why
    why.clear()


def trained_without(
    ckpt: everstep.Checkpointer, world: World, unanswered: list[str], told: list[EverstepError]
) -> dict[str, bytes]:
    """Six steps of which the last three have no keeper; the state behind them."""
    ckpt.resume()
    run_steps(ckpt, world, 3)
    ckpt.wait()
    kill_noticed(ckpt)
    unanswered.append("it does not answer")
    for _ in range(3):
        world.train()
        try:
            ckpt.step()
        except KeeperTimeoutError as error:
            told.append(error)
    return world.snapshot()


def policy_of(name: str, told: list[EverstepError]) -> Any:
    return told.append if name == "function" else name


@pytest.mark.thinned(18)
@pytest.mark.parametrize(
    ("policy", "method", "ends"),
    [
        ("warn", "logged", "close"),
        ("function", "lazy", "close"),
        ("raise", "logged", "close"),
        ("warn", "lazy", "wait"),
        ("warn", "logged", "preempted"),
    ],
)
def test_the_end_of_training_tries_once_more(
    policy: str, method: str, ends: str, run_folder: Path, unanswered: list[str]
) -> None:
    """What had been tried in vain less than half a minute ago was not tried again, and close()
    returned as if all were well."""
    told = list[EverstepError]()
    world = World()
    ckpt = opened(run_folder, world, method=method, on_failure=policy_of(policy, told))
    wanted = trained_without(ckpt, world, unanswered, told)
    assert policy == "warn" or told
    assert ckpt.stats().failed == 1, "nobody who watches sees that nothing is durable any more"
    unanswered.clear()
    if ends == "wait":
        ckpt.wait()
        assert ckpt.stats().durable_step == 6
    elif ends == "preempted":
        inspect(ckpt).save_last(60.0)
        assert ckpt.stats().durable_step == 6
    ckpt.close()
    other = World(seed=9)
    with opened(run_folder, other, method=method) as ckpt:
        assert ckpt.resume().step == 6
        assert other.snapshot() == wanted


@pytest.mark.parametrize(
    ("policy", "to"), [("warn", "memory"), ("function", "memory"), ("raise", "disk")]
)
def test_close_says_which_steps_are_lost(
    policy: str, to: Any, run_folder: Path, unanswered: list[str]
) -> None:
    told = list[EverstepError]()
    world, log = World(), LogOptions(to=to)
    options = {"method": "logged", "log": log, "on_failure": policy_of(policy, told)}
    ckpt = opened(run_folder, world, every=3, **options)
    trained_without(ckpt, world, unanswered, told)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            ckpt.close()
        except EverstepError as error:
            told.append(error)
            assert policy == "raise"
        else:
            assert policy != "raise", "close() returned as if all were well"
    said = [str(one.message) for one in warned] if policy == "warn" else [str(one) for one in told]
    (last,) = [one for one in said if "training has ended" in one]
    assert "ended at step 6 without a keeper" in last
    assert "the newest base is of step 3," in last
    assert ("in the log on disk" in last) == (to == "disk")
    assert "it does not answer" in last
    assert policy == "warn" or isinstance(told[-1], KeeperError)


def test_nothing_is_called_lost_where_nothing_is(run_folder: Path, unanswered: list[str]) -> None:
    """All was durable when the keeper went."""
    told = list[EverstepError]()
    world = World()
    ckpt = opened(run_folder, world, method="lazy", on_failure=told.append)
    ckpt.resume()
    run_steps(ckpt, world, 4)
    ckpt.wait()
    kill_noticed(ckpt)
    unanswered.append("it does not answer")
    ckpt.close()
    assert not [one for one in told if "training has ended" in one.message]


def test_one_that_hangs_is_not_waited_for_at_each_step() -> None:
    """An attempt may take minutes, in which training waits."""
    clock = ManualClock()
    attempts, why = ReplacementAttempts(clock), KeeperError("none")
    for took_s, again_s in ((0.0, 30.0), (5.0, 30.0), (120.0, 480.0)):
        assert attempts.is_due
        attempts.begin()
        clock.advance(took_s)
        attempts.fail(why)
        assert attempts.why_not is why
        clock.advance(again_s - 1.0)
        assert not attempts.is_due
        clock.advance(1.0)
    assert attempts.failed == 3
    attempts.begin()
    assert attempts.why_not is None
