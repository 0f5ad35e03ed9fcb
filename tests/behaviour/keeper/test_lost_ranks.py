"""A keeper of one rank of several that dies where a base is due, and that never hears of it: the
other ranks do not wait for that base, and all of them are told that there is none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep import KeeperOptions
from everstep.errors import EverstepError, KeeperError, StorageError
from everstep.testing import inspect
from everstep.trainer.attach.remote import RemoteKeeper
from tests.support.following import until
from tests.support.ranks.together import (
    RankTraining,
    bases,
    on_all,
    resume,
    train,
    trained,
    trainings,
)
from tests.support.world import TIMEOUT_S

pytestmark = [
    pytest.mark.usefixtures("no_keeper_stays"),
    pytest.mark.filterwarnings("ignore:everstep. the keeper .* is gone:RuntimeWarning"),
]

LOST = "no rank has the base of step 2: it was lost with the keeper of rank 1"


def kill_before(one: RankTraining, of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper of a rank is gone, and that is noticed, before it calls ``name`` the next time."""
    call: Callable[..., object] = getattr(of, name)

    def of_the_dead(*args: Any, **options: Any) -> object:
        monkeypatch.setattr(of, name, call)
        keeper = inspect(one.ckpt).keepers.current
        assert isinstance(keeper, RemoteKeeper)
        os.kill(keeper.pid, signal.SIGKILL)
        until(lambda: keeper.lost is not None, "the loss of the keeper")
        return call(*args, **options)

    monkeypatch.setattr(of, name, of_the_dead)


def save_and_wait(one: RankTraining) -> BaseException | None:
    """What has become of a base that is taken now."""
    save = one.ckpt.save()
    one.ckpt.wait()
    return save.durable.exception(TIMEOUT_S)


def on_both(ranks: list[RankTraining], do: Callable[[RankTraining], Any]) -> list[Any]:
    return on_all(*(lambda one=one: do(one) for one in ranks))  # type: ignore[misc]


def committed(run: Path) -> set[int]:
    return {step for step, status in bases(run).items() if status == "committed"}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["lazy", "logged", "gockpt"])
def test_nobody_waits_for_a_base_that_has_found_no_keeper(
    method: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[EverstepError] = []
    about: dict[str, Any] = {"method": method, "keeper": KeeperOptions()}
    with trainings(run_folder, run_folder, on_failure=told.append, **about) as ranks:
        resume(ranks)
        train(ranks, 2)
        on_both(ranks, lambda one: one.ckpt.wait())
        kill_before(ranks[1], inspect(ranks[1].ckpt).keepers.pool, "acquire", monkeypatch)
        first, second = on_both(ranks, save_and_wait)
        assert isinstance(first, StorageError)
        assert first.message == LOST
        assert isinstance(second, KeeperError)
        assert any("no rank has the base of step 2: the keeper (" in one.message for one in told)
        train(ranks, 1)
        assert on_both(ranks, save_and_wait) == [None, None]
        on_both(ranks, lambda one: one.ckpt.close())
    assert max(committed(run_folder)) == 3
    with trainings(run_folder, run_folder) as ranks:
        assert [one.step for one in resume(ranks)] == [3, 3]
        assert all(torch.equal(one.weight, trained(one.rank, 3)) for one in ranks)


def test_nobody_waits_for_a_base_that_was_due_as_the_keeper_died(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whether it is there, and the base."""
    told: list[EverstepError] = []
    about: dict[str, Any] = {"method": "lazy", "every": 2, "keeper": KeeperOptions()}
    with trainings(run_folder, run_folder, on_failure=told.append, **about) as ranks:
        resume(ranks)
        train(ranks, 1)
        kill_before(ranks[1], inspect(ranks[1].ckpt).consensus, "decide", monkeypatch)
        train(ranks, 1)
        on_both(ranks, lambda one: one.ckpt.wait())
        assert LOST in [one.message for one in told]
        train(ranks, 2)
        on_both(ranks, lambda one: one.ckpt.close())
    assert committed(run_folder) == {4}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("place", ["acquire", "decide"])
def test_a_base_of_the_same_step_is_taken_again(
    place: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have their parts, and have not been told that this rank has none."""
    about: dict[str, Any] = {"method": "lazy", "every": 2, "keeper": KeeperOptions()}
    with trainings(run_folder, run_folder, on_failure="raise", **about) as ranks:
        resume(ranks)
        train(ranks, 1)
        ckpt = ranks[1].ckpt
        owner = inspect(ckpt).consensus if place == "decide" else inspect(ckpt).keepers.pool
        kill_before(ranks[1], owner, place, monkeypatch)
        train(ranks, 1)
        assert on_both(ranks, save_and_wait) == [None, None]
        on_both(ranks, lambda one: one.ckpt.close())
    assert committed(run_folder) == {2}


def test_what_came_from_memory_is_written_even_if_a_keeper_is_lost_first(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all ranks: also by the one whose keeper is replaced at the end of that step."""
    about: dict[str, Any] = {"method": "gemini", "every": 1, "keeper": KeeperOptions()}
    with trainings(run_folder, run_folder, on_failure="warn", **about) as ranks:
        resume(ranks)
        train(ranks, 2)
        on_both(ranks, lambda one: one.ckpt.wait())
        assert [one.source for one in resume(ranks)] == ["memory", "memory"]
        kill_before(ranks[1], inspect(ranks[1].ckpt).keepers, "replace_if_lost", monkeypatch)
        train(ranks, 1)
        on_both(ranks, lambda one: one.ckpt.wait())
        assert committed(run_folder) == {3}
