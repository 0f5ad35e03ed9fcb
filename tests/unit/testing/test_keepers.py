"""The keeper of a run: its bases in memory, and its end at any moment."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from everstep.errors import KeeperError, KeeperTimeoutError
from everstep.link.registry import find_keeper, keeper_files, kill_keeper
from everstep.link.spawn import SpawnOptions, connect, spawn_keeper
from everstep.run.folder import open_run_folder
from everstep.seams.locks import lock_file
from everstep.seams.posix import PosixFileSystem
from everstep.seams.processes.processes import process_ended, runtime_folder
from everstep.testing import keepers
from everstep.testing.keepers import end_keeper, held_step
from tests.support.fakekeeper import PROGRAM, TIMEOUT_S, end, planned, running, started
from tests.support.leftovers import MARK, processes_marked


def begun(run: Path) -> SpawnOptions:
    """A run that has begun, and how its keeper is started."""
    run_id = open_run_folder(PosixFileSystem(), run).run
    assert run_id is not None
    return SpawnOptions(str(run), run_id, 0)


@pytest.fixture
def options(run_folder: Path) -> Iterator[SpawnOptions]:
    """Of the run in ``run_folder``; a keeper of it ends with the test."""
    found = begun(run_folder)
    with started(found):
        yield found


def attached(options: SpawnOptions) -> SpawnOptions:
    """The same, of one that stays our child."""
    return dataclasses.replace(options, detach=False)


def pid_of(options: SpawnOptions) -> int:
    with connect(options.key, timeout_s=TIMEOUT_S) as connection:
        return connection.peer().pid


class TestHeld:
    @pytest.mark.parametrize(("steps", "held"), [([], None), ([60], 60), ([50, 60], 60)])
    def test_what_it_has_in_memory(
        self, options: SpawnOptions, steps: list[int], held: int | None
    ) -> None:
        with running(attached(options), status={"held": steps}):
            assert held_step(Path(options.run)) == held

    def test_a_real_one_without_a_trainer_has_nothing(self, options: SpawnOptions) -> None:
        spawn_keeper(options)
        pid_of(options)  # it is up
        assert held_step(Path(options.run)) is None

    def test_there_is_none(self, options: SpawnOptions, tmp_path: Path) -> None:
        for run in (Path(options.run), tmp_path / "never begun"):
            with pytest.raises(KeeperError, match="has no keeper"):
                held_step(run)

    def test_one_that_does_not_answer(
        self, options: SpawnOptions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(keepers, "_ANSWER_S", 0.2)
        with running(attached(options), deaf=True), pytest.raises(KeeperTimeoutError):
            held_step(Path(options.run))


class TestEnd:
    def test_a_run_that_never_began_has_none(self, tmp_path: Path) -> None:
        end_keeper(tmp_path / "never begun")

    def test_a_run_without_a_keeper(self, options: SpawnOptions) -> None:
        end_keeper(Path(options.run))

    def test_it_is_told_to_stop_and_nobody_else_is(
        self, options: SpawnOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        killed: list[object] = []
        monkeypatch.setattr(keepers, "kill_keeper", killed.append)
        other = begun(tmp_path / "other")
        with started(other):
            spawn_keeper(options)
            spawn_keeper(other)
            pid, other_pid = pid_of(options), pid_of(other)
            end_keeper(Path(options.run))
            assert process_ended(pid), "it has returned too early"
            assert killed == []
            assert not process_ended(other_pid)

    def test_one_that_is_starting_is_waited_for(
        self, options: SpawnOptions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A trainer that was killed while it started its keeper: nobody can be told yet."""
        gate = lock_file(runtime_folder() / "registry.lock")
        assert gate is not None
        rounds = itertools.count(1)
        seen: list[object] = []

        def pause(wait_s: float) -> None:
            process_ended(os.getpid(), wait_s)
            if next(rounds) == 3:
                seen.append(find_keeper(options.key))
                gate.release()  # now it can register

        spawn_keeper(options, program=PROGRAM)
        monkeypatch.setattr(keepers, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
        end_keeper(Path(options.run))
        assert seen == [None]
        assert find_keeper(options.key) is None
        assert lock_is_free(options)

    def test_one_that_never_comes_up_is_an_error(self, options: SpawnOptions) -> None:
        with planned(never_listens="it waits"):
            spawn_keeper(options, program=PROGRAM)
        try:
            with pytest.raises(KeeperTimeoutError, match=r"is starting, .*within 0\.2 s"):
                end_keeper(Path(options.run), timeout_s=0.2)
        finally:
            for pid, command in processes_marked(os.environ[MARK]).items():
                if options.run in command:
                    end(pid)

    @pytest.mark.parametrize("how", ["deaf", "stopped", "refuses"])
    def test_one_that_does_not_end_is_killed(self, options: SpawnOptions, how: str) -> None:
        plans = {"deaf": {"deaf": True}, "refuses": {"stop": {"kind": "never"}}}
        with running(attached(options), **plans.get(how, {})) as process:
            if how == "stopped":
                process.send_signal(signal.SIGSTOP)
            end_keeper(Path(options.run), timeout_s=0.3)
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert find_keeper(options.key) is None

    def test_an_interrupt_kills_it(
        self, options: SpawnOptions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(_: float) -> None:
            raise KeyboardInterrupt

        patched = SimpleNamespace(monotonic=time.monotonic, sleep=interrupt)
        with running(attached(options), stop={"kind": "never"}) as process:
            monkeypatch.setattr(keepers, "time", patched)
            with pytest.raises(KeyboardInterrupt):
                end_keeper(Path(options.run))
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL

    def test_one_that_ends_while_it_is_told(
        self, options: SpawnOptions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(attached(options)) as process:
            info = find_keeper(options.key)
            assert info is not None

            def gone_meanwhile(*_: object, **__: object) -> None:
                assert kill_keeper(info)
                process.wait(TIMEOUT_S)
                raise KeeperError("the keeper is gone")

            monkeypatch.setattr(keepers, "connect", gone_meanwhile)
            end_keeper(Path(options.run))
        assert find_keeper(options.key) is None


def lock_is_free(options: SpawnOptions) -> bool:
    """Whether no process is left that was started to be the keeper."""
    try:
        log = lock_file(keeper_files(options.key).log, create=False)
    except FileNotFoundError:
        return True
    if log is not None:
        log.release()
    return log is not None
