"""``everstep ps`` and ``everstep stop``: what is said of keepers is so, and only they are ended."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.cli.common.errors import ExitCode
from everstep.cli.ps import Status, duration_in_words, steps_of
from everstep.errors import KeeperError
from everstep.link import registry
from everstep.link.registry import Registration, find_keeper, list_keepers
from everstep.link.spawn import SpawnOptions
from everstep.link.wire import error_to_wire
from everstep.seams.processes.processes import PidWatch, runtime_folder
from tests.support.fakekeeper import STATUS, TIMEOUT_S, info_of, running
from tests.support.logged import document, invoke

# The package offers functions of these names.
ps_module: Any = importlib.import_module("everstep.cli.ps")
stop_module: Any = importlib.import_module("everstep.cli.ps")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own."""
    path = tmp_path / "r"
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(path))
    return path


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may let a keeper that is well wait for a while."""
    monkeypatch.setattr(ps_module, "_ANSWER_S", TIMEOUT_S)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def options_of(run: Path, rank: int = 0) -> SpawnOptions:
    return SpawnOptions(str(run), "id", rank, detach=False)


def lives(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


# --- ps ---------------------------------------------------------------------------------


def test_no_keepers(folder: Path) -> None:
    assert document("ps") == {"runtime_dir": str(folder), "keepers": []}
    result = invoke("ps")
    assert result.exit_code == 0
    assert result.stdout == f"no keeper is running (none in {folder})\n"
    assert not folder.exists()


def test_keepers_and_what_they_do(run: Path, folder: Path) -> None:
    busy = {"trainer": 4321, "writing": [11, 12], "held": [9, 10], "ends_in_s": None}
    with running(options_of(run)) as first, running(options_of(run, 1), status=busy) as second:
        found = document("ps")["keepers"]
        assert [keeper["pid"] for keeper in found] == [first.pid, second.pid]
        assert [keeper["rank"] for keeper in found] == [0, 1]
        assert {keeper["run"] for keeper in found} == {str(run)}
        assert all(keeper["answers"] for keeper in found)
        expected = {name: value for name, value in STATUS.items() if name != "kind"}
        assert found[0]["status"] == expected
        assert found[1]["status"] == {**expected, **busy}
        assert found[0]["log"] == str(folder / f"{options_of(run).key}.log")

        head, one, other = invoke("ps").stdout.splitlines()
        assert head.split()[:5] == ["pid", "run", "rank", "trainer", "doing"]
        assert one.split()[:4] == [str(first.pid), str(run), "0", "-"]
        assert "without a trainer for 35 s, ends in 9 min" in one
        assert one.split()[-5:] == ["step", "10", "10", "3.2", "GB"]
        assert other.split()[:4] == [str(second.pid), str(run), "1", "4321"]
        assert "writing steps 11, 12" in other
        assert "steps 9, 10" in other


def test_keepers_that_do_not_answer(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deaf, stopped, of another version: none of them holds the command up."""
    odd = {"status": {"held": "all of them"}}
    with (
        running(options_of(run, 0), deaf=True),
        running(options_of(run, 1)) as stopped,
        running(options_of(run, 2), **odd),
        running(options_of(run, 3)) as well,
    ):
        os.kill(stopped.pid, signal.SIGSTOP)
        for answer_s in (0.3, 1.0, 3.0, 10.0):  # until the one that is well has had the time
            monkeypatch.setattr(ps_module, "_ANSWER_S", answer_s)
            found, text = document("ps")["keepers"], invoke("ps").stdout
            if found[3]["answers"] and f"process {well.pid} does not" not in text:
                break
        assert [keeper["answers"] for keeper in found] == [False, False, False, True]
        assert [keeper["status"] is None for keeper in found] == [True, True, True, False]
        assert text.count("not answering") == 3
        log = folder / f"{options_of(run, 1).key}.log"
        assert f"process {stopped.pid} does not answer; its log: {log}" in text
        assert f"process {well.pid} does not" not in text


def test_ps_clears_away_what_killed_keepers_left(run: Path, folder: Path) -> None:
    with running(options_of(run)) as process:
        process.kill()
        process.wait(TIMEOUT_S)
    assert document("ps")["keepers"] == []
    assert {path.name for path in folder.iterdir()} == {"registry.lock"}


@pytest.mark.parametrize("verb", [["ps"], ["stop", "--all"]])
def test_a_folder_that_cannot_be_used_is_the_machines_trouble(
    verb: list[str], folder: Path
) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    result = invoke(*verb)
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "is open to other users" in result.stderr
    assert f"chmod 700 {folder}" in result.stderr
    assert document(*verb, status=4)["path"] == str(folder)


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    run = tmp_path / "a\x1b[31m\nb"
    run.mkdir()
    with running(options_of(run)):
        for result in (invoke("ps"), invoke("stop", run), invoke("stop", run)):
            assert "\x1b" not in result.output
            assert "a\\x1b[31m\\nb" in result.stdout


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(changes=st.dictionaries(st.sampled_from(sorted(STATUS)), json_values, max_size=3))
def test_any_message_is_a_status_that_can_be_shown_or_refused(changes: dict[str, Any]) -> None:
    with contextlib.suppress(msgspec.ValidationError):
        status = msgspec.convert({**STATUS, **changes}, Status)
        assert all(isinstance(step, int) for step in status.unwritten)
        assert isinstance(ps_module.activity_of(status), str)


def test_words() -> None:
    assert [duration_in_words(s) for s in (-1.0, 0.4, 119.4, 120.0, 7199.0, 9000.0)] == [
        "0 s",
        "0 s",
        "119 s",
        "2 min",
        "120 min",
        "2.5 h",
    ]
    assert steps_of([3]) == "step 3"
    assert steps_of(range(9)) == "steps ..., 3, 4, 5, 6, 7, 8"
    status = msgspec.convert(STATUS, Status)
    assert status.unwritten == []
    assert replace(status, held=(8, 12), writing=(11,), durable_step=9).unwritten == [11, 12]
    assert replace(status, durable_step=None).unwritten == [10]


# --- stop -------------------------------------------------------------------------------


def test_nothing_is_stopped_that_was_not_named(run: Path) -> None:
    with running(options_of(run)) as process:
        result = invoke("stop")
        assert result.exit_code == ExitCode.USAGE
        assert "no keeper given" in result.stderr
        assert "give a RUN, --pid or --all" in result.stderr
        for args in (["--pid", os.getpid()], [run / "missing"], ["--all", "--timeout", "-1"]):
            refused = invoke("stop", *args)
            assert refused.exit_code == ExitCode.USAGE, refused.output
        assert f"keepers are running of {run} (process {process.pid})" in invoke(
            "stop", run / "missing"
        ).stderr.replace("\n", " ")
        assert lives(process)


def test_stop_one_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [tmp_path / name for name in "abc"]
    for run in runs:
        run.mkdir()
    (tmp_path / "link").symlink_to(runs[0])
    monkeypatch.chdir(tmp_path)
    with (
        running(options_of(runs[0])) as a,
        running(options_of(runs[1])) as b,
        running(options_of(runs[2])) as c,
    ):
        result = invoke("stop", "link/")
        assert result.exit_code == 0, result.output
        assert result.stdout == f"stopped: keeper {a.pid} of {runs[0]}, rank 0\n"
        assert a.wait(TIMEOUT_S) == 0
        assert lives(b)
        assert lives(c)

        assert invoke("stop", "a").stdout == "no keeper of a is running\n"
        assert document("stop", "a") == {"ok": True, "keepers": []}

        found = document("stop", "--pid", b.pid)
        assert found["ok"]
        assert found["keepers"] == [
            {
                "pid": b.pid,
                "run": str(runs[1]),
                "rank": 0,
                "gone": True,
                "killed": False,
                "lost_steps": [],
                "problem": None,
            }
        ]
        assert b.wait(TIMEOUT_S) == 0
        assert lives(c)
    assert list_keepers() == []


def test_stop_all(run: Path) -> None:
    with running(options_of(run, 0)) as first, running(options_of(run, 1)) as second:
        assert invoke("stop", "--all").stdout.count("stopped: keeper") == 2
        assert (first.wait(TIMEOUT_S), second.wait(TIMEOUT_S)) == (0, 0)
    assert invoke("stop", "--all").stdout == "no keeper is running\n"


@pytest.mark.parametrize("now", [[], ["--now"]])
def test_a_keeper_with_a_trainer_is_stopped_by_force_only(now: list[str], run: Path) -> None:
    attached = {"trainer": 4321}
    with running(options_of(run, 0)) as free, running(options_of(run, 1), status=attached) as used:
        result = invoke("stop", "--all", *now)
        assert result.exit_code == ExitCode.USAGE
        assert "process 4321 is training with the keeper" in result.stderr
        assert "start a new keeper" in result.stderr
        assert "--force" in result.stderr
        assert document("stop", run, *now, status=2)["rank"] == 1
        assert lives(free)  # refused before anything was done
        assert lives(used)
        assert invoke("stop", "--all", "--force", *now).exit_code == 0
        status = -signal.SIGKILL if now else 0
        assert (free.wait(TIMEOUT_S), used.wait(TIMEOUT_S)) == (status, status)


def test_a_keeper_with_the_only_log_is_not_stopped(run: Path) -> None:
    """The one thing that it cannot make durable."""
    alone = {"log_step": 18, "held": [10], "ends_in_s": 540.0}
    with running(options_of(run), status=alone) as process:
        assert "step 10, log to 18" in invoke("ps").stdout
        result = invoke("stop", run)
        assert result.exit_code == ExitCode.INFEASIBLE
        assert f"not stopped: keeper {process.pid} of {run}" in result.stdout
        assert "nothing else has the steps up to 18" in result.stdout
        assert "resuming the run within 9 min takes them over" in result.stdout
        (found,) = document("stop", run, status=3)["keepers"]
        assert (found["gone"], found["lost_steps"]) == (False, [])
        assert lives(process)
        (found,) = document("stop", run, "--now")["keepers"]
        assert found["lost_steps"] == [18]


@pytest.mark.parametrize("has", [{"held": [18]}, {"writing": [18]}, {"durable_step": 18}])
def test_one_whose_log_ends_where_a_base_is_ends(has: dict[str, Any], run: Path) -> None:
    with running(options_of(run), status={"log_step": 18, **has}):
        assert "log to" not in invoke("ps").stdout
        assert invoke("stop", run).exit_code == 0


def test_a_keeper_that_does_not_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_module, "_ANSWER_S", 0.2)
    with running(options_of(run), deaf=True) as process:
        result = invoke("stop", run, "--timeout", 0.3)
        assert result.exit_code == ExitCode.INFEASIBLE
        assert f"not stopped: keeper {process.pid}" in result.stdout
        assert "it is still there after 0 s" in result.stdout
        assert "--now ends it at once" in result.stdout
        found = document("stop", run, "--timeout", 0.0, status=3)
        assert not found["ok"]
        assert not found["keepers"][0]["gone"]
        assert lives(process)


def test_a_keeper_that_refuses(run: Path) -> None:
    refusal = {"kind": "refused", "error": error_to_wire(KeeperError("it is Sunday"))}
    with running(options_of(run), stop=refusal) as process:
        result = invoke("stop", run)  # and does not wait for a minute
        assert result.exit_code == ExitCode.INFEASIBLE
        assert "it refuses: it is Sunday" in result.stdout
        assert lives(process)


def test_a_keeper_that_cannot_be_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "_REQUEST_TIMEOUT_S", 0.1)
    info = info_of(options_of(run))
    registration = Registration.acquire(info.key, info)  # and never listens
    assert registration is not None
    monkeypatch.setattr(ps_module, "_ANSWER_S", 0.1)
    result = invoke("stop", run)
    assert result.exit_code == ExitCode.INFEASIBLE
    assert "the request failed: no keeper has answered within 0.1 s" in result.stdout
    registration.release()


@pytest.mark.parametrize(
    ("status", "lost", "words"),
    [
        ({}, [], "all that it had in memory was durable; step 10 is durable"),
        ({"held": [], "durable_step": None}, [], "its memory was empty"),
        (
            {"held": [10, 12], "writing": [11, 12]},
            [11, 12],
            "lost with it: steps 11, 12, captured and not durable; step 10 is durable",
        ),
    ],
)
def test_now(status: dict[str, Any], lost: list[int], words: str, run: Path, folder: Path) -> None:
    for as_json in (True, False):
        with running(options_of(run), status=status, stop={"kind": "never"}) as process:
            if as_json:
                (found,) = document("stop", run, "--now")["keepers"]
                assert (found["killed"], found["gone"]) == (True, True)
                assert found["lost_steps"] == lost
            else:
                result = invoke("stop", run, "--now")
                assert result.exit_code == 0
                assert f"killed: keeper {process.pid} of {run}, rank 0; {words}\n" in result.stdout
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert {path.name for path in folder.iterdir()} == {"registry.lock"}


def test_now_of_a_keeper_that_hangs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_module, "_ANSWER_S", 0.2)
    with running(options_of(run)) as process:
        os.kill(process.pid, signal.SIGSTOP)
        result = invoke("stop", run, "--now")
        assert result.exit_code == 0, result.output
        assert (
            "the state in its memory is lost; it did not answer which steps that was"
            in result.stdout
        )
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL


@contextlib.contextmanager
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def test_now_kills_nobody_who_is_not_the_keeper(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that names another process; held by a keeper in another container, say."""
    monkeypatch.setattr(ps_module, "_ANSWER_S", 0.1)
    with bystander() as process:
        info = info_of(options_of(run), process.pid)
        registration = Registration.acquire(info.key, info)
        assert registration is not None
        result = invoke("stop", run, "--now")
        assert result.exit_code == ExitCode.INFEASIBLE
        assert "cannot be verified to be the keeper" in result.stdout
        assert process.poll() is None
        registration.release()

        (runtime_folder() / f"{info.key}.json").write_bytes(info.encode())  # and nobody's lock
        assert invoke("stop", "--pid", process.pid, "--now").exit_code == ExitCode.USAGE
        assert process.poll() is None


def test_a_keeper_that_ends_meanwhile(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the list and the kill: nothing is killed, and it is gone all the same."""
    with running(options_of(run)) as process:
        real = registry.kill_keeper

        def kill_later(info: Any) -> bool:
            process.kill()
            process.wait(TIMEOUT_S)
            return real(info)

        monkeypatch.setattr(registry, "kill_keeper", kill_later)
        (found,) = document("stop", run, "--now")["keepers"]
        assert (found["gone"], found["killed"], found["lost_steps"]) == (True, False, [])
        assert find_keeper(options_of(run).key) is None


def test_a_keeper_that_starts_while_the_old_one_ends_is_not_waited_for(run: Path) -> None:
    """A trainer that goes on has it replaced at once, under the same key."""
    with running(options_of(run)) as old:
        info = find_keeper(options_of(run).key)
        assert info is not None
        stopping = stop_module.Stopping(info, None, PidWatch(info.pid))
        old.kill()
        old.wait(TIMEOUT_S)
        with running(options_of(run)) as new:
            stop_module.wait_for_end([stopping], TIMEOUT_S)
            assert stopping.gone
            assert lives(new)
        stopping.watch.close()


def test_help_names_both_and_is_quick() -> None:
    code = """
import sys
from everstep.cli import main
sys.argv = ["everstep", "--help"]
assert main() == 0
assert "torch" not in sys.modules
assert "msgpack" not in sys.modules
"""
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    ).stdout
    assert "ps " in out
    assert "stop " in out
