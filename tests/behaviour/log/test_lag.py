"""A log on disk that may be no more than so many steps behind: where nothing on disk leads to a
step but its base, training waits for that."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest

import everstep
from everstep.errors import DeadlineError, EverstepError
from everstep.options import LogOptions
from everstep.seams import Seams
from everstep.testing import inspect
from tests.support.log.every_step import World, opened
from tests.support.ranks.together import bases, resume, train, trainings
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, inventory_of

_RETURNS_S = 0.5
"""By then a step that waits for nothing has returned; one that waits is given no less."""


class Held:
    """A training whose bases can be kept from becoming durable, and segments from being written."""

    def __init__(self, run: Path, lag_steps: int, **options: Any) -> None:
        self.run, self.world, self.holding, self.failing = run, World(), False, False
        self.gate = Gate()
        log = LogOptions(to="disk", batch_steps=1, lag_steps=lag_steps)
        keeper = everstep.KeeperOptions(process=False)
        seams = Seams(filesystem=HookedFileSystem(self._at))
        options = {"every": None, "log": log, "keeper": keeper, "seams": seams, **options}
        self.ckpt = opened(run, self.world, **options)
        self.ckpt.resume()

    def _at(self, op: str, path: PurePath) -> None:
        if self.holding and op == "rename" and "base" in path.parts:
            self.gate.wait_at()
        if self.failing and op == "rename" and "log" in path.parts:
            raise OSError(5, "Input/output error")

    def step(self, *, hole: bool = False) -> None:
        self.world.train()
        if hole:
            self.ckpt.before_update()
            self.world.model[0].weight.data.clamp_(-0.1, 0.1)
            self.ckpt.after_update()
        self.ckpt.step()

    def waits(self, *, hole: bool = False) -> None:
        """A step waits for its base."""
        thread = threading.Thread(target=lambda: self.step(hole=hole))
        thread.start()
        try:
            assert self.gate.reached.wait(TIMEOUT_S)
            thread.join(_RETURNS_S)
            assert thread.is_alive(), "it has not waited"
        finally:
            self.holding = False
            self.gate.open()
            thread.join(TIMEOUT_S)
        assert not thread.is_alive()

    def lost_now(self, copy: Path) -> int:
        """The step that the disk alone leads back to, with the bits that it had."""
        for attempt in range(9):
            try:
                shutil.copytree(self.run, copy)
                break
            except shutil.Error:  # the log before a base that is durable now was going away
                shutil.rmtree(copy)
                assert attempt < 8
        other = World(seed=9)
        keeper = everstep.KeeperOptions(process=False)
        with opened(copy, other, every=None, keeper=keeper) as ckpt:
            step = ckpt.resume().step
        if step == self.ckpt.stats().step:
            assert other.snapshot() == self.world.snapshot()
        return step


@pytest.fixture
def close() -> Iterator[list[Held]]:
    held: list[Held] = []
    yield held
    for one in held:
        one.holding = False
        one.gate.open()
        one.ckpt.close()


@pytest.mark.parametrize("lag_steps", [0, 2])
def test_a_base_behind_a_hole_is_no_further_behind_than_the_log(
    lag_steps: int, run_folder: Path, tmp_path: Path, close: list[Held]
) -> None:
    held = Held(run_folder, lag_steps)
    close.append(held)
    for _ in range(3):
        held.step()
    held.ckpt.wait()
    held.holding = True
    for number in range(lag_steps):
        held.step(hole=number == 0)
    held.waits(hole=lag_steps == 0)
    assert 4 in [base.id.step for base in inventory_of(run_folder).bases]
    assert held.lost_now(tmp_path / "copy") == 4 + lag_steps


def test_each_step_of_many_with_a_hole_is_on_disk(
    run_folder: Path, tmp_path: Path, close: list[Held]
) -> None:
    held = Held(run_folder, 0)
    close.append(held)
    for step in range(1, 6):
        held.step(hole=step != 3)
        assert held.lost_now(tmp_path / f"copy {step}") == step


def test_a_log_that_goes_on_behind_a_base_waits_for_it(
    run_folder: Path, tmp_path: Path, close: list[Held]
) -> None:
    """What was recorded while it went to no disk does not lead there."""
    told: list[EverstepError] = []
    held = Held(run_folder, 0, every=4, on_failure=told.append)
    close.append(held)
    for step in range(1, 4):
        held.failing = step == 3
        held.step()
    held.ckpt.wait()
    held.failing, held.holding = False, True
    held.waits()
    assert held.lost_now(tmp_path / "copy") == 4
    held.step()
    assert held.lost_now(tmp_path / "copy 2") == 5
    assert len(told) == 1
    assert "the log on disk ends here" in str(told[0])


def test_a_base_that_hangs_is_told_of_and_not_waited_for_again(
    run_folder: Path, close: list[Held]
) -> None:
    told: list[EverstepError] = []
    held = Held(run_folder, 0, on_failure=told.append, progress_timeout_s=0.3)
    close.append(held)
    held.step()
    held.holding = True
    held.step(hole=True)
    held.holding = False
    held.gate.open()
    held.step()
    said = [one for one in told if "which the log on disk starts from" in str(one)]
    assert len(said) == 1
    assert isinstance(said[0], DeadlineError)
    assert said[0].step == 2


def test_ranks_take_a_base_at_the_step_of_a_hole_of_one_of_them(tmp_path: Path) -> None:
    """With a log that may not be behind they ask each other at each step."""
    path, log = tmp_path / "run", LogOptions(to="disk", lag_steps=0)
    with trainings(path, path, method="logged", log=log) as ranks:
        resume(ranks)
        train(ranks, 3)
        recorder = inspect(ranks[1].ckpt).recorder
        assert recorder is not None
        recorder.skipped("a test")
        train(ranks, 1)
        assert bases(path) == {1: "committed", 4: "committed"}
