"""A log to disk that stops, for the write budget or a disk that is full, and goes on: what is there
has no hole that is not known, and every step of it can be gone back to."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path, PurePath
from typing import Any

import pytest

import everstep
from everstep.errors import (
    EverstepError,
    FencedError,
    OptionError,
    OutOfSpaceError,
    RecoveryError,
)
from everstep.keeper.log.segment_queue import SegmentQueue
from everstep.link.messages import ENDED
from everstep.options import Budget, LogOptions
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from everstep.trainer.session.cadence import FIRST_STEPS
from tests.support.log.budget import Trained, assert_rebuilt, spans
from tests.support.logged import World, invoke, rebuilder_of, segments_of
from tests.support.serving import Bench, die, serving
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, forget

TO_DISK = LogOptions(to="disk", batch_steps=2, history="all")


@pytest.fixture(scope="module")
def day_bytes(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What such a run writes in a day, at a second a step."""
    run = Trained(tmp_path_factory.mktemp("measured") / "run", log=TO_DISK, every=8)
    with run:
        run.train(FIRST_STEPS + 1)
        forecast = run.ckpt.stats().forecast_bytes_per_day
        keeper = inspect(run.ckpt).keeper
        assert isinstance(keeper, ThreadKeeper)
        assert keeper.records is not None
        keeper.records.settle(TIMEOUT_S)
        run.train(1)  # what was written is counted when more comes
        assert run.ckpt.stats().log_written_bytes > 0
    assert forecast is not None
    return forecast


def test_the_log_ends_where_the_budget_does(
    run_folder: Path, day_bytes: float, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = Budget(write_bytes_per_day=int(day_bytes / 2))
    stopped = FIRST_STEPS + 1  # as soon as a step is known to be so short
    with Trained(run_folder, log=TO_DISK, every=8, budget=budget) as run:
        run.train(20)
        stats = run.ckpt.stats()
        assert stats.log_steps_in_memory == 20 - stopped
        assert stats.log_holes == 0
    said = capsys.readouterr().err
    assert said.count("from now on the log stays in memory") == 1
    assert spans(run_folder) == [(0, stopped)], "the batch under way is written, no more"
    assert_rebuilt(run_folder, run.states, range(1, stopped + 1))
    with rebuilder_of(run_folder) as rebuilder, pytest.raises(OptionError, match="has step 13"):
        rebuilder.state_at(stopped + 2)
    assert invoke("verify", run_folder, "--replay").exit_code == 0
    other = Trained(run_folder, log=TO_DISK, every=8)
    with other:
        assert other.ckpt.resume(step=stopped).exact
        assert other.world.snapshot() == run.states[stopped]
        with pytest.raises(RecoveryError):
            other.ckpt.resume(step=stopped + 2)


def test_it_goes_on_behind_a_base(
    run_folder: Path, day_bytes: float, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = Budget(write_bytes_per_day=int(day_bytes / 2))
    with Trained(run_folder, log=TO_DISK, every=8, budget=budget) as run:
        run.train(20)
        run.train(75, step_s=4.0)
        end = run.step
        assert run.ckpt.stats().log_steps_in_memory < end - FIRST_STEPS - 1
    assert capsys.readouterr().err.count("the budget has space again") == 1
    (_, stopped), (again, last) = spans(run_folder)
    assert (stopped, last) == (FIRST_STEPS + 1, end)
    assert again % 8 == 0, "at a base, and nowhere else"
    assert again > 20
    assert_rebuilt(run_folder, run.states, range(again, end + 1))
    assert invoke("verify", run_folder, "--replay").exit_code == 0
    other = Trained(run_folder, log=TO_DISK, every=8)
    with other:
        assert other.ckpt.resume().exact
        assert other.world.snapshot() == run.states[end]


def test_training_does_not_wait_for_what_is_not_written(run_folder: Path) -> None:
    log = LogOptions(to="disk", batch_steps=1, lag_steps=0, history="all")
    with Trained(run_folder, log=log, every=8, progress_timeout_s=5) as run:
        run.train(4)
        assert spans(run_folder) in ([(0, 4)], [(1, 4)])  # the first base is of step 1
        disk = inspect(run.ckpt).recorder.disk
        disk.stop()
        run.train(6)
        assert disk.again()
        assert not disk.again(), "it was asked for"
        run.train(6)
        assert spans(run_folder) in ([(0, 4)], [(1, 4)])  # the first base is of step 1
        for step in range(17, 20):
            run.train(1)
            assert spans(run_folder)[1:] == [(16, step)], "each step, before the next"
    assert_rebuilt(run_folder, run.states, range(16, 20))


def test_memory_of_records_is_kept_until_they_are_written(run_folder: Path) -> None:
    """What was made before the log was stopped is still on its way."""
    gate = Gate()

    def hook(op: str, path: PurePath) -> None:
        if op == "rename" and "log" in path.parts:
            gate.wait_at()

    with Trained(run_folder, log=TO_DISK, every=100, fs=HookedFileSystem(hook)) as run:
        try:
            run.train(3)
            recorder, keeper = inspect(run.ckpt).recorder, inspect(run.ckpt).keeper
            assert recorder is not None
            assert isinstance(keeper, ThreadKeeper)
            recorder.disk.stop()
            run.train(2)
            run.ckpt.save()
            run.ckpt.wait()
            rooms = recorder.memory
            assert {kept.step for kept in rooms.kept} == {1, 2, 3, 4, 5}
            assert rooms.kept_bytes == sum(kept.taken_bytes for kept in rooms.kept)
        finally:
            gate.open()
        assert keeper.records is not None
        keeper.records.settle(TIMEOUT_S)
        assert not recorder.memory.kept, "a base is durable, and nothing is on its way"
        assert recorder.memory.kept_bytes == 0
    assert spans(run_folder) == [(0, 3)]


def test_records_of_a_step_without_a_mark_are_waited_for_by_nobody(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trained(run_folder, log=TO_DISK, every=100) as run:
        run.train(3)
        recorder, keeper = inspect(run.ckpt).recorder, inspect(run.ckpt).keeper
        assert recorder is not None
        assert isinstance(keeper, ThreadKeeper)
        with monkeypatch.context() as patched:  # as if there were no memory for it
            patched.setattr(recorder, "_copy_now", lambda *args: None)
            run.train(1)
        recorder.disk.stop()
        run.train(2)
        run.ckpt.save()
        run.ckpt.wait()
        assert keeper.records is not None
        keeper.records.settle(TIMEOUT_S)
        assert not recorder.memory.kept


@pytest.mark.parametrize("stopped_first", [False, True])
def test_a_log_that_failed_goes_on_when_the_budget_lets_it_and_nobody_waits_for_it(
    run_folder: Path, stopped_first: bool
) -> None:
    failing: list[bool] = []

    def hook(op: str, path: PurePath) -> None:
        if failing and op == "rename" and "log" in path.parts:
            raise OSError(5, "Input/output error")

    log = LogOptions(to="disk", batch_steps=1, lag_steps=0, history="all")
    options: dict[str, Any] = {"on_failure": "warn", "progress_timeout_s": 5}
    with Trained(run_folder, log=log, every=4, fs=HookedFileSystem(hook), **options) as run:
        run.train(2)
        disk = inspect(run.ckpt).recorder.disk
        if stopped_first:
            disk.stop()
        failing.append(True)
        with nullcontext() if stopped_first else pytest.warns(RuntimeWarning):
            run.train(1)
        if not stopped_first:
            disk.stop()
        failing.clear()
        assert disk.again()
        run.train(6)
    first, *later = spans(run_folder)
    assert first in ((0, 2), (1, 2))  # the first base is of step 1: nothing leads to what is before
    assert later == [(4, 9)], "behind a base"


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def test_a_keeper_process_is_told(served: Bench) -> None:
    """And what is in memory has no hole: a killed trainer still loses nothing."""
    world = World()
    options: dict[str, Any] = {"keeper": everstep.KeeperOptions(), "log": TO_DISK, "every": 4}
    forget(served.run)
    ckpt = everstep.Checkpointer(served.run, world.state, method="logged", **options)
    ckpt.resume()
    recorder = inspect(ckpt).recorder
    assert recorder is not None

    def steps(count: int) -> None:
        for _ in range(count):
            world.train()
            ckpt.step()

    steps(3)
    recorder.disk.stop()
    steps(3)
    assert recorder.disk.again()
    steps(5)
    ckpt.wait()
    wanted = world.snapshot()
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = World(seed=9)
    forget(served.run)
    again = everstep.Checkpointer(served.run, other.state, method="logged", **options)
    recovery = again.resume()
    assert (recovery.step, recovery.exact, recovery.source) == (11, True, "memory")
    assert other.snapshot() == wanted
    assert spans(served.run) == [(0, 3), (8, 11)]
    again.close()


def full_at(op: str, pattern: str, gate: Gate) -> Callable[[str, PurePath], None]:
    """The disk is full when the first such operation comes, behind the gate."""
    left = [OSError(errno.ENOSPC, "No space left on device")]

    def hook(name: str, path: PurePath) -> None:
        if left and name == op and path.match(pattern):
            gate.wait_at()
            raise left.pop()

    return hook


@pytest.mark.parametrize("op", ["create", "sync_dir"])
def test_what_could_not_be_written_ends_behind_the_next_base(run_folder: Path, op: str) -> None:
    """A full disk, say, that has room again: until the next start every step was in memory only."""
    fs, gate = HookedFileSystem(), Gate()
    reported: list[EverstepError] = []
    options: dict[str, Any] = {"log": TO_DISK, "every": 8, "on_failure": reported.append}
    with Trained(run_folder, fs=fs, **options) as run:
        run.train_slowly(4)
        fs.hook = full_at(op, "log/*-*/*" if op == "create" else "log/*-*", gate)
        run.train_slowly(1)
        run.train(1)  # its segment fails when the step is over, and not in the middle of its mark
        gate.open()
        run.settle()
        run.train_slowly(14)
        (error,) = reported
        assert isinstance(error, OutOfSpaceError)
        assert "the log on disk ends here and continues after the next base" in str(error)
        stats = run.ckpt.stats()
        assert stats.log_holes == 0, "in memory there is none"
        assert stats.log_steps_in_memory == 2, "7, and 8, of which there is a base"
    assert spans(run_folder) == [(0, 4), (8, 20)]
    assert_rebuilt(run_folder, run.states, range(1, 5))
    assert_rebuilt(run_folder, run.states, range(8, 21))
    other = Trained(run_folder, log=TO_DISK, every=8)
    with other:
        recovery = other.ckpt.resume()
        assert (recovery.step, recovery.exact) == (20, True)
        assert other.world.snapshot() == run.states[20]


def test_a_disk_that_stays_full_is_said_with_each_base(run_folder: Path) -> None:
    """And memory of records that never will be written is given back."""
    fs = HookedFileSystem()
    reported: list[EverstepError] = []
    options: dict[str, Any] = {"log": TO_DISK, "every": 8, "on_failure": reported.append}

    def full(name: str, path: PurePath) -> None:
        if name == "create" and path.match("log/*-*/*"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with Trained(run_folder, fs=fs, **options) as run:
        fs.hook = full
        run.train_slowly(30)
        recorder = inspect(run.ckpt).recorder
        assert recorder is not None
        assert min(kept.step for kept in recorder.memory.kept) > 24, "as the base of 24 is durable"
        assert run.ckpt.stats().log_holes == 0
    assert [error.step for error in reported] == [2, 10, 18, 26]
    assert spans(run_folder) == []


def test_who_is_fenced_off_writes_no_more_of_it() -> None:
    """Whoever goes on with the run has a log of its own."""
    told: list[EverstepError] = []
    reached: list[int] = []
    segments = SegmentQueue(None, told.append, reached.append)
    for error in (FencedError("a newer timeline has begun"), OutOfSpaceError("full")):
        segments.fail(error)
        segments.set_to_disk(True)
    assert [error.hint for error in told] == [None, None]
    assert reached == [ENDED] * 4


def test_a_new_keeper_does_not_begin_to_write_it(served: Bench) -> None:
    world = World()
    options: dict[str, Any] = {"keeper": everstep.KeeperOptions(), "log": TO_DISK, "every": 100}
    forget(served.run)
    with everstep.Checkpointer(served.run, world.state, method="logged", **options) as ckpt:
        ckpt.resume()
        world.train()
        ckpt.step()
        recorder = inspect(ckpt).recorder
        assert recorder is not None
        recorder.disk.stop()
        ckpt.save()
        ckpt.rewind(1)  # a new timeline
        world.train()
        ckpt.step()
        world.train()
        ckpt.step()
        assert ckpt.stats().log_steps_in_memory == 2
    assert segments_of(served.run, 2) == []
