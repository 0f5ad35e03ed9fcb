"""A keeper is nobody's child; whoever waits for one that never comes is told why, and soon."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import KeeperError, KeeperTimeoutError
from everstep.link import spawn
from everstep.link.registry import Registration, find_keeper, keeper_files, list_keepers
from everstep.link.spawn import SpawnOptions, connect, spawn_keeper
from everstep.seams.locks import lock_file
from everstep.seams.processes import processes
from everstep.seams.processes.processes import PidWatch, available_cores, process_ended
from tests.support.fakekeeper import (
    PROGRAM,
    STATUS,
    TIMEOUT_S,
    end,
    info_of,
    planned,
    running,
    started,
)

ROOT = Path(__file__).parents[3]
OPTIONS = SpawnOptions("/runs/a", "id-a", 0)
KEY = OPTIONS.key


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own."""
    path = tmp_path / "r"
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(path))
    return path


def ask(key: str = KEY) -> dict[str, Any]:
    """What the keeper says when asked for its status."""
    with connect(key, timeout_s=TIMEOUT_S) as connection:
        connection.send({"kind": "status"})
        received = connection.receive(TIMEOUT_S)
    assert received is not None
    return received[0]


def log_of(key: str = KEY) -> Path:
    return Path(keeper_files(key).log)


# --- Options ----------------------------------------------------------------------------


@given(
    options=st.builds(
        SpawnOptions,
        run=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        run_id=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        rank=st.integers(0, 9999),
        linger_s=st.floats(0, 1e9),
        cores=st.none() | st.lists(st.integers(0, 300), min_size=1).map(tuple),
        threads=st.integers(1, 64),
        detach=st.booleans(),
    )
)
def test_options_survive_the_command_line(options: SpawnOptions) -> None:
    assert SpawnOptions.parse(options.arguments()) == options


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--run=/a", "--run-id=b"],
        [*OPTIONS.arguments(), "--cores=x"],
        [*OPTIONS.arguments(), "y"],
    ],
)
def test_arguments_that_are_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        SpawnOptions.parse(arguments)
    assert "usage: python -m everstep.keeper" in capsys.readouterr().err


# --- What a keeper is born into ---------------------------------------------------------


def test_a_keeper_is_on_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No child of ours, no session, directory, descriptor or signal of ours."""
    seen = tmp_path / "seen.json"
    package = Path(spawn.__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", "r")  # relative, like the next
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["lib", str(ROOT)]))
    monkeypatch.setenv("PYTHONINSPECT", "1")
    cores = available_cores()[-1:]
    options = SpawnOptions("/runs/a", "id-a", 3, linger_s=5.5, cores=tuple(cores), threads=4)
    open_one = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(open_one, True)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with planned(sees=str(seen)), started(options):
            spawn_keeper(options, program=PROGRAM)
            assert ask(options.key) == STATUS
            found = json.loads(seen.read_text())
            assert found["pid"] == find_keeper(options.key).pid  # type: ignore[union-attr]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(open_one)
    assert found["parent"] != os.getpid()
    assert process_ended(found["session"])  # its leader was the process in between
    assert found["group"] == found["session"] not in (os.getsid(0), os.getpgrp())
    assert found["cwd"] == "/"
    given = {name: path for name, path in found["descriptors"].items() if int(name) <= 2}
    log = str(folder / f"{options.key}.log")
    assert given == {"0": os.devnull, "1": log, "2": log}
    assert str(tmp_path) not in found["descriptors"].values()
    assert found["cores"] == cores
    assert found["blocked"] == []
    assert not found["ignores_term"]
    assert found["umask"] == 0o077
    assert not found["torch"]
    assert SpawnOptions.parse(found["arguments"]) == options
    environment = found["environment"]
    assert environment["EVERSTEP_RUNTIME_DIR"] == str(folder)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths[-2:] == [str(tmp_path / "lib"), str(ROOT)]
    assert package.name in ("site-packages", "dist-packages") or str(package) in paths
    assert "PYTHONINSPECT" not in environment


def test_installed_packages_are_not_put_before_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    place = tmp_path / "site-packages" / "everstep" / "seams" / "processes" / "processes.py"
    monkeypatch.setattr(processes, "__file__", str(place))
    assert "PYTHONPATH" not in spawn.keeper_environment(keeper_files(KEY))


def trainer(body: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A process that starts keepers."""
    code = """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from tests.support.fakekeeper import PROGRAM
    from everstep.link.spawn import *
    options = SpawnOptions("/runs/a", "id-a", 0)
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(code) + textwrap.dedent(body),
            str(ROOT),
            *arguments,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_keeper_outlives_the_process_group_of_its_trainer() -> None:
    """Launchers kill the group of a worker, not just the worker."""
    process = trainer(
        """
        spawn_keeper(options, program=PROGRAM)
        connect(options.key, timeout_s=20).close()
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no child", flush=True)
        sys.stdin.read()
        """,
        start_new_session=True,
    )
    with started(OPTIONS):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "no child\n"
            before = list_keepers()
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.wait(TIMEOUT_S)
        assert ask() == STATUS
        assert list_keepers() == before != []


@pytest.mark.parametrize(
    "odd",
    [
        "sys.argv = []",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "os.chdir(sys.argv[2]); os.rmdir(sys.argv[2])",
        "for fd in (0, 1, 2): os.close(fd)",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    ],
)
def test_odd_trainers(odd: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with started(OPTIONS):
        process = trainer(f"{odd}\nspawn_keeper(options, program=PROGRAM)\n", str(place))
        try:
            process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.wait(TIMEOUT_S)
        assert process.returncode == 0
        assert ask() == STATUS


# --- What goes wrong at the start -------------------------------------------------------


def test_a_keeper_that_fails_at_once() -> None:
    expected = pytest.raises(KeeperError, match="could not be started: exit status 3")
    with planned(fails="ImportError: no module named nonsense"), expected as failed:
        spawn_keeper(OPTIONS, program=PROGRAM)
    told = f"its log ends with [{log_of()}]:\n    ImportError: no module named nonsense"
    assert told in str(failed.value)
    assert failed.value.path == str(log_of())


def test_a_keeper_that_dies_while_it_starts_is_not_waited_for() -> None:
    with planned(dies="OSError: the disk is on fire"):
        spawn_keeper(OPTIONS, program=PROGRAM)
    start_s = time.monotonic()
    with pytest.raises(KeeperError, match=r"has ended; its log ends with \[.*\]:\n    OSError"):
        connect(KEY, timeout_s=10 * TIMEOUT_S)
    assert time.monotonic() - start_s < TIMEOUT_S


def test_a_keeper_that_never_listens() -> None:
    with planned(never_listens="thinking ...", fails=None):
        spawn_keeper(OPTIONS, program=(sys.executable, "-c", PID_FIRST, *PROGRAM[1:]))
        words = log_of().read_text().split()  # it thinks perhaps before its number is told
        pid = next(int(word) for word in words if word.isdigit())
        try:
            for timeout_s, said in ((0.2, "within 0.2 s"), (0.0, "no keeper at")):
                with pytest.raises(KeeperTimeoutError, match=said) as late:
                    connect(KEY, timeout_s=timeout_s)
                assert isinstance(late.value, KeeperError)
            assert str(pid) in str(late.value)
        finally:
            end(pid)


PID_FIRST = """
import os, runpy, sys
sys.argv = sys.argv[1:]
import everstep.seams.processes.processes as p
real = os.fork
def fork():
    child = real()
    if child:
        print(child, flush=True)
    return child
os.fork = fork
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_process_that_does_not_detach_itself_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(*args, **options))
        return made[0]

    class Patched:
        Popen = staticmethod(popen)
        DEVNULL = subprocess.DEVNULL
        TimeoutExpired = subprocess.TimeoutExpired

    monkeypatch.setattr(processes, "subprocess", Patched)
    code = "import threading; threading.Event().wait(60)"
    with pytest.raises(KeeperTimeoutError, match=r"did not start within 0\.3 s"):
        spawn_keeper(OPTIONS, program=(sys.executable, "-c", code), timeout_s=0.3)
    assert made[0].returncode == -signal.SIGKILL


def test_no_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = str(tmp_path / "python")
    with pytest.raises(KeeperError, match="cannot be started: No such file") as failed:
        spawn_keeper(OPTIONS, program=(missing,))
    assert failed.value.path == missing
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(KeeperError, match="does not know its own executable"):
        spawn_keeper(OPTIONS)


def test_the_program() -> None:
    assert spawn.keeper_program() == [sys.executable, "-X", "faulthandler", "-m", "everstep.keeper"]


def test_cores_that_are_not_there_are_said_and_no_obstacle() -> None:
    options = SpawnOptions("/runs/a", "id-a", 0, cores=(4000,))
    with started(options):
        spawn_keeper(options, program=PROGRAM)
        ask()
        assert "none of the cores [4000] is available" in log_of().read_text()


def test_a_keeper_has_as_many_descriptors_as_its_trainer_might() -> None:
    """Connections come from others, and take them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with started(OPTIONS):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, hard), hard))
        try:
            spawn_keeper(OPTIONS, program=PROGRAM)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        ask()
        info = find_keeper(OPTIONS.key)
        assert info is not None
        assert resource.prlimit(info.pid, resource.RLIMIT_NOFILE) == (hard, hard)


# --- The log ----------------------------------------------------------------------------


def test_the_log_starts_anew_unless_somebody_writes_into_it() -> None:
    keeper_files(KEY)
    log_of().write_text("of an earlier one\n")
    with started(OPTIONS):
        spawn_keeper(OPTIONS, program=PROGRAM)
        ask()
        assert log_of().read_text() == ""
        log_of().write_text("by the first\n")
        before = list_keepers()
        spawn_keeper(OPTIONS, program=PROGRAM)  # finds the key taken, and ends
        assert ask() == STATUS
        assert list_keepers() == before
        wait_for_the_second()
        lines = log_of().read_text().splitlines()
        assert lines == ["by the first", "another keeper serves this run already"]


def wait_for_the_second() -> None:
    """Until it has said that it is not needed."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while "another keeper" not in log_of().read_text():
        ask()
        assert time.monotonic() < deadline_s


def test_a_log_that_is_deleted_while_it_is_being_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the exclusive lock and the shared one somebody may come and clear it away."""
    files = keeper_files(KEY)
    real, calls = spawn.LockedFile.share, []

    def share(self: Any, timeout_s: float) -> bool:
        calls.append(self)
        if len(calls) == 1:
            Path(files.log).unlink()
        return real(self, timeout_s)

    monkeypatch.setattr(spawn.LockedFile, "share", share)
    log = spawn.open_log(files)
    assert len(calls) == 2
    assert log.is_current
    assert lock_file(files.log) is None
    log.release()


def test_a_log_that_somebody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_LOCK_TIMEOUT_S", 0.1)
    held = lock_file(keeper_files(KEY).log)
    assert held is not None
    with pytest.raises(KeeperTimeoutError, match="another process has held"):
        spawn_keeper(OPTIONS, program=PROGRAM)
    held.release()


# --- Connecting -------------------------------------------------------------------------


def test_no_keeper(folder: Path) -> None:
    start_s = time.monotonic()
    with pytest.raises(KeeperTimeoutError, match="no keeper at"):
        connect(KEY, timeout_s=0.0)
    assert not folder.exists()
    with pytest.raises(KeeperTimeoutError, match=r"no keeper has answered within 0\.1 s"):
        connect(KEY, timeout_s=0.1)
    assert time.monotonic() - start_s < TIMEOUT_S


def test_a_keeper_that_is_still_starting_is_waited_for() -> None:
    """By hand, say: there is no log that could tell."""
    registration = Registration.acquire(KEY, info_of(OPTIONS))
    assert registration is not None
    listeners: list[socket.socket] = []
    timer = threading.Timer(0.2, lambda: listeners.append(registration.listen()))
    timer.start()
    connect(KEY, timeout_s=TIMEOUT_S).close()
    timer.join()
    listeners[0].close()
    registration.release()


def test_a_killed_keeper_is_not_waited_for() -> None:
    with started(OPTIONS):
        spawn_keeper(OPTIONS, program=PROGRAM)
        ask()
        info = find_keeper(KEY)
        assert info is not None
        with PidWatch(info.pid) as watch:
            watch.signal(signal.SIGKILL)
            assert watch.ended(TIMEOUT_S)
    start_s = time.monotonic()
    with pytest.raises(KeeperError, match="the keeper has ended"):
        connect(KEY, timeout_s=10 * TIMEOUT_S)
    assert time.monotonic() - start_s < TIMEOUT_S


def test_a_keeper_that_accepts_nobody_is_not_waited_for_longer_than_stated() -> None:
    """Its queue is full: connecting would block."""
    with running(SpawnOptions("/runs/a", "id-a", 0, detach=False)) as process:
        os.kill(process.pid, signal.SIGSTOP)
        held = []
        with pytest.raises(KeeperTimeoutError, match=r"within 0\.1 s"):
            for _ in range(200):
                held.append(connect(KEY, timeout_s=0.1))
        assert held
        for connection in held:
            connection.close()


def test_what_answers_is_another_users(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(SpawnOptions("/runs/a", "id-a", 0, detach=False)) as process:
        monkeypatch.setattr(spawn, "own_uid", lambda: os.geteuid() + 1)
        with pytest.raises(
            KeeperError, match=f"another user's process answers at .* .process {process.pid}, uid"
        ):
            connect(KEY, timeout_s=TIMEOUT_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_answers_really_is_another_users() -> None:
    code = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.setuid(12345)
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""
    path = keeper_files(KEY).socket
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        with pytest.raises(KeeperError, match=rf"process {process.pid}, uid 12345"):
            connect(KEY, timeout_s=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def test_a_socket_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(keeper_files(KEY).socket)
    path.write_text("no socket")
    with pytest.raises(KeeperTimeoutError):
        connect(KEY, timeout_s=0.0)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(KeeperError, match="the keeper's socket cannot be used: Too many levels"):
        connect(KEY, timeout_s=TIMEOUT_S)
    shutil.rmtree(path.parent)
