"""Keepers are found as long as they live, and never longer, whatever files they leave."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import KeeperError, KeeperTimeoutError
from everstep.link import registry
from everstep.link.registry import (
    KeeperInfo,
    Registration,
    find_keeper,
    keeper_files,
    keeper_key,
    kill_keeper,
    list_keepers,
    read_tail,
)
from everstep.link.spawn import SpawnOptions
from everstep.seams import locks
from everstep.seams.locks import lock_file
from everstep.seams.processes import processes
from everstep.seams.processes.processes import (
    PidWatch,
    has_file_open,
    open_pidfd,
    process_ended,
    runtime_folder,
)
from tests.support.fakekeeper import TIMEOUT_S, info_of, running

OPTIONS = SpawnOptions("/runs/a", "id-a", 0, detach=False)
INFO = info_of(OPTIONS)
KEY = OPTIONS.key


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own; it does not exist yet."""
    path = tmp_path / "r"
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(path))
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"registry.lock"}


@contextlib.contextmanager
def registered(info: KeeperInfo = INFO) -> Iterator[Registration]:
    registration = Registration.acquire(info.key, info)
    assert registration is not None
    yield registration
    registration.release()


# --- The folder -------------------------------------------------------------------------


def test_which_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_folder(create=False) == tmp_path / "r"
    assert not (tmp_path / "r").exists()
    assert runtime_folder() == tmp_path / "r"
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o700

    monkeypatch.delenv("EVERSTEP_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder() == tmp_path / "everstep"

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for unusable in ("", "relative", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert runtime_folder() == tmp_path / f"everstep-{os.geteuid()}"


def test_a_folder_named_relatively_and_not_yet_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", "a/b")
    assert runtime_folder() == tmp_path / "a" / "b"


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_folder_that_is_open_to_others(mode: int, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(KeeperError, match="is open to other users") as refused:
        list_keepers()
    assert f"chmod 700 {folder}" in str(refused.value)


def test_a_folder_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    for create in (True, False):
        with pytest.raises(KeeperError, match="is a symbolic link"):
            runtime_folder(create=create)


def test_a_folder_of_somebody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(KeeperError, match=f"belongs to another user \\(uid {uid}\\)") as refused:
        runtime_folder()
    assert "EVERSTEP_RUNTIME_DIR" in str(refused.value)


def test_a_folder_that_is_a_file_or_cannot_be_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("mine")
    with pytest.raises(KeeperError, match="cannot be used: Not a directory"):
        runtime_folder()
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(folder / "below"))
    with pytest.raises(KeeperError, match="cannot be used"):
        runtime_folder()


def test_a_path_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 107 - len("/0123456789abcdef.sock")
    for size, fits in ((room, True), (room + 1, False)):
        path = str(tmp_path) + "/" + "x" * (size - len(str(tmp_path)) - 1)
        monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", path)
        if fits:
            with registered() as registration:
                registration.listen().close()
        else:
            with pytest.raises(KeeperError, match="too long for a socket: 108 bytes") as refused:
                Registration.acquire(KEY, INFO)
            assert "EVERSTEP_RUNTIME_DIR" in str(refused.value)


# --- Keys and infos ---------------------------------------------------------------------

places = st.tuples(st.text(max_size=5), st.text(max_size=5), st.integers(0, 3))


@given(one=places, other=places)
def test_two_runs_never_meet(one: tuple[str, str, int], other: tuple[str, str, int]) -> None:
    assert (keeper_key(*one) == keeper_key(*other)) == (one == other)


def test_keys_stay_what_they_are() -> None:
    """A keeper of another version must be found, too, or there would be two."""
    assert keeper_key("/runs/gpt2", "0123", 7) == "0818ace063248373"
    assert keeper_key(os.fsdecode(b"/\xff"), "0123", 7) != keeper_key("/runs/gpt2", "0123", 7)


@given(
    info=st.builds(
        KeeperInfo,
        pid=st.integers(0, 1 << 22),
        run=st.text(),
        run_id=st.text(),
        rank=st.integers(0, 1 << 20),
        version=st.text(max_size=5),
        protocol=st.integers(0, 9),
        started_unix_s=st.floats(0, 1e10),
    )
)
def test_infos(info: KeeperInfo) -> None:
    assert KeeperInfo.decode(info.encode()) == info
    more = json.dumps({**json.loads(info.encode()), "newer": [1]})
    assert KeeperInfo.decode(more.encode()) == info


@given(data=st.binary(max_size=80))
def test_infos_that_are_none(data: bytes) -> None:
    assert KeeperInfo.decode(data) is None
    for name in ("pid", "run", "started_unix_s"):
        fields = {**json.loads(INFO.encode()), name: None}
        assert KeeperInfo.decode(json.dumps(fields).encode()) is None


# --- Taking a key -----------------------------------------------------------------------


def test_a_key_is_taken_once_and_given_back(folder: Path) -> None:
    with registered() as registration:
        assert Registration.acquire(KEY, INFO) is None
        assert find_keeper(KEY) == INFO
        assert list_keepers() == [INFO]
        assert registration.is_current
        listener = registration.listen()
        assert names(folder) == {f"{KEY}.json", f"{KEY}.sock"}
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        listener.close()
        other = SpawnOptions("/runs/a", "id-a", 1)
        with registered(info_of(other)):
            assert list_keepers() == [INFO, info_of(other)]
    registration.release()
    assert names(folder) == set()
    assert list_keepers() == []
    assert find_keeper(KEY) is None
    with registered():
        pass


def test_nothing_is_made_by_looking(folder: Path) -> None:
    assert list_keepers() == []
    assert find_keeper(KEY) is None
    assert not folder.exists()


def test_a_key_that_is_about_to_be_given_back() -> None:
    with registered() as registration:
        thread = threading.Timer(0.1, registration.release)
        thread.start()
        second = Registration.acquire(KEY, INFO, timeout_s=TIMEOUT_S)
        assert second is not None
        thread.join()
        assert second.is_current
        second.release()


def test_a_killed_keeper_leaves_nothing_that_matters(folder: Path) -> None:
    with running(OPTIONS) as process:
        assert find_keeper(KEY) == info_of(OPTIONS, process.pid)
        assert Registration.acquire(KEY, INFO) is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
        assert names(folder) == {f"{KEY}.json", f"{KEY}.sock"}
        assert list_keepers() == []
        assert names(folder) == set()


def test_a_killed_keeper_is_no_obstacle_to_the_next(folder: Path) -> None:
    for _ in range(2):
        with running(OPTIONS) as process:  # connects: an old socket would refuse
            assert find_keeper(KEY) == info_of(OPTIONS, process.pid)
            process.kill()
            process.wait(TIMEOUT_S)
        assert f"{KEY}.sock" in names(folder)
    with registered():
        assert names(folder) == {f"{KEY}.json"}


def test_a_process_id_that_another_process_has_now_proves_nothing(folder: Path) -> None:
    """The file names a living process, but nobody holds the lock."""
    runtime_folder()
    (folder / f"{KEY}.json").write_bytes(INFO.encode())
    assert list_keepers() == []
    assert names(folder) == set()


def test_a_keeper_that_ends_while_it_is_looked_at_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(path: object, bytes_max: int) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    with registered():
        monkeypatch.setattr("everstep.link.registry._read", gone)
        assert find_keeper(KEY) is None
        assert list_keepers() == []


def test_looking_and_taking_at_the_same_time() -> None:
    """Who looks locks what it finds for a moment: nobody may take it for a keeper."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            while not stop.is_set():
                list_keepers()
                find_keeper(KEY)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            with registered() as registration:
                assert registration.is_current
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not errors


def test_many_take_one_key_and_one_gets_it() -> None:
    got: list[Registration | None] = []
    barrier = threading.Barrier(8)

    def take() -> None:
        barrier.wait(TIMEOUT_S)
        got.append(Registration.acquire(KEY, INFO))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    winners = [one for one in got if one is not None]
    assert (len(got), len(winners)) == (8, 1)
    winners[0].release()


def test_a_registry_that_somebody_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_GATE_TIMEOUT_S", 0.05)
    runtime_folder()
    gate = lock_file(folder / "registry.lock")  # type: ignore[arg-type]
    assert gate is not None
    with pytest.raises(KeeperTimeoutError, match=r"another process has held .*registry\.lock"):
        Registration.acquire(KEY, INFO)
    gate.release()


# --- Files that are deleted, or are none of ours ----------------------------------------


def test_files_deleted_under_a_living_keeper(folder: Path) -> None:
    """As the system does with the folder of a session: the next keeper has its own files."""
    with registered() as old:
        old.listen().close()
        for path in folder.iterdir():
            path.unlink()
        assert not old.is_current
        assert list_keepers() == []
        with registered() as new:
            new.listen().close()
            old.release()
            assert names(folder) == {f"{KEY}.json", f"{KEY}.sock"}  # not the new one's
            assert new.is_current


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_is_deleted_while_it_is_being_locked(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock on a file without a name would exclude nobody."""
    path = tmp_path / "file"
    real, calls = fcntl.flock, []

    def flock(fd: int, kind: int) -> None:
        calls.append(fd)
        if len(calls) <= 2:
            path.unlink()
            if replaced:
                path.write_text("")
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    got = lock_file(path)
    assert got is not None
    assert len(calls) == 3
    assert got.is_current
    monkeypatch.undo()
    assert lock_file(path) is None
    got.release()


def test_a_file_that_is_always_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / "file").unlink())
    with pytest.raises(OSError, match="keeps being replaced"):
        lock_file(tmp_path / "file")


def test_what_is_not_ours_is_left_alone(folder: Path) -> None:
    runtime_folder()
    (folder / "notes.json").write_text("mine")
    (folder / "0123456789abcdef.json").mkdir()
    (folder / "fedcba9876543210.json").symlink_to(folder / "notes.json")
    assert list_keepers() == []
    assert len(names(folder)) == 3


def test_something_else_in_the_place_of_the_file(folder: Path) -> None:
    path = runtime_folder() / f"{KEY}.json"
    path.mkdir()
    with pytest.raises(KeeperError, match=rf"{KEY}\.json cannot be used: Is a directory"):
        Registration.acquire(KEY, INFO)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(KeeperError, match="cannot be used: not a regular file"):
        Registration.acquire(KEY, INFO)
    path.unlink()
    (folder / "victim").write_text("mine")
    path.symlink_to(folder / "victim")
    with pytest.raises(KeeperError, match="cannot be used"):
        Registration.acquire(KEY, INFO)
    assert (folder / "victim").read_text() == "mine"


def test_a_full_disk_leaves_no_half_registration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(locks.LockedFile, "replace", full)
        with pytest.raises(KeeperError, match="No space left on device"):
            Registration.acquire(KEY, INFO)
    assert names(folder) == set()
    with registered():
        pass


# --- Logs -------------------------------------------------------------------------------


def test_logs_of_dead_keepers_are_kept_for_a_day(folder: Path) -> None:
    runtime_folder()
    log = keeper_files(KEY).log
    Path(log).write_text("why it died\n")
    assert list_keepers() == []
    assert names(folder) == {f"{KEY}.log"}
    os.utime(log, (0, 0))
    writing = lock_file(log, shared=True)
    assert writing is not None
    list_keepers()
    assert names(folder) == {f"{KEY}.log"}  # somebody may still print into it
    writing.release()
    with registered():
        list_keepers()
        assert f"{KEY}.log" in names(folder)
    list_keepers()
    assert names(folder) == set()


@pytest.mark.parametrize("others", [False, True])
def test_a_keeper_that_ends_takes_its_log_along(others: bool, folder: Path) -> None:
    code = f"""
import sys
from everstep.link.registry import *
info = KeeperInfo.decode({INFO.encode()!r})
registration = Registration.acquire(info.key, info)
print("printed", flush=True)
sys.stdin.readline()
registration.release()
"""
    runtime_folder()
    path = keeper_files(KEY).log
    log = lock_file(path, shared=True)
    assert log is not None
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=log.fd, stderr=log.fd
    )
    try:
        log.close()
        another = lock_file(path, shared=True) if others else None
        process.communicate(b"\n", timeout=TIMEOUT_S)
        assert process.returncode == 0
        assert names(folder) == ({f"{KEY}.log"} if others else set())
        if another is not None:
            assert read_tail(path) == ["printed"]
            another.release()
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def test_tails(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert read_tail(path) == []
    assert read_tail(tmp_path) == []
    path.write_bytes(b"one\n\n" + b"\xfftwo \n" * 20)
    assert read_tail(path, lines_max=2) == ["\ufffdtwo "] * 2
    assert read_tail(path, bytes_max=3) == ["o "]


# --- Killing ----------------------------------------------------------------------------


def test_killing_a_keeper() -> None:
    with running(OPTIONS) as process:
        info = info_of(OPTIONS, process.pid)
        assert kill_keeper(info)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert not kill_keeper(info)


def test_a_keeper_that_has_ended_is_not_killed_again() -> None:
    """Its number may be another process's by now: here it is ours."""
    assert not kill_keeper(INFO)
    with running(OPTIONS):
        assert not kill_keeper(INFO)  # another keeper has the key


def test_a_process_that_is_not_the_keeper_is_not_killed(folder: Path) -> None:
    """A keeper in another container: its number means another process here."""
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        info = info_of(OPTIONS, bystander.pid)
        with registered(info):
            with pytest.raises(KeeperError, match="cannot be verified to be the keeper"):
                kill_keeper(info)
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(TIMEOUT_S)


def test_a_process_that_only_looks_at_the_file_of_a_dead_keeper_is_not_killed(
    folder: Path,
) -> None:
    path = runtime_folder() / f"{KEY}.json"
    path.touch()
    with path.open() as file:
        reader = subprocess.Popen(["sleep", "60"], stdin=file)
    try:
        info = info_of(OPTIONS, reader.pid)
        path.write_bytes(info.encode())
        assert not kill_keeper(info)
        assert reader.poll() is None
    finally:
        reader.kill()
        reader.wait(TIMEOUT_S)


# --- Processes --------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["pidfd", "no pidfd"])
def pidfds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without what Linux has since 5.3."""
    if not request.param:

        def missing(pid: int) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", missing)


@pytest.mark.usefixtures("pidfds")
def test_watching_a_process() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        with PidWatch(process.pid) as watch:
            assert not watch.ended()
            assert not watch.ended(0.05)
            assert watch.signal(signal.SIGKILL)
            assert watch.ended(TIMEOUT_S)  # it is a zombie: nobody has asked for its status
            assert watch.ended()
            assert not watch.signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
    assert process_ended(process.pid)
    with PidWatch(process.pid) as watch:
        assert watch.ended()
        assert watch.fileno() is None
    assert not process_ended(os.getpid())


def test_a_number_that_another_process_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "open_pidfd", lambda pid: None)
    with PidWatch(os.getpid()) as watch:
        assert not watch.ended()
        monkeypatch.setattr(processes, "_start_time", lambda pid: "later")
        assert watch.ended()


@pytest.mark.parametrize("pid", [0, -1, 1 << 22])
def test_numbers_that_no_process_has(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        open_pidfd(pid)
    assert process_ended(pid)
    with PidWatch(pid) as watch:
        assert not watch.signal(signal.SIGKILL)


def test_who_has_a_file_open(tmp_path: Path) -> None:
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    for file in (path, other):
        file.touch()
    identity = (path.stat().st_dev, path.stat().st_ino)
    assert not has_file_open(os.getpid(), path, identity)
    with path.open(), other.open():
        assert has_file_open(os.getpid(), path, identity)
        assert not has_file_open(os.getpid(), other, identity)
    assert not has_file_open(1 << 22, path, identity)


def test_affinity() -> None:
    code = """
import os
from everstep.seams.processes.processes import available_cores, set_affinity
first = available_cores()[0]
assert set_affinity([first, 4000]) == [first] == available_cores()
for cores in ([4000], [], [-1], [1 << 40]):
    try:
        set_affinity(cores)
    except ValueError as error:
        assert "none of the cores" in str(error), error
    else:
        raise AssertionError(cores)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_its_files_look_as_if_they_were_in_use(folder: Path) -> None:
    """Folders for temporary files are cleaned of what was not touched for days."""
    with registered() as registration:
        files = registration.files
        listener = registration.listen()
        Path(files.log).touch()
        there = [Path(path) for path in (files.folder, files.info, files.socket, files.log)]
        for path in there:
            os.utime(path, (1.0, 1.0))
        registration.refresh_times()
        assert all(path.stat().st_mtime > 1e9 for path in there)
        assert registration.is_current
        assert find_keeper(INFO.key) == INFO
        Path(files.log).unlink()
        registration.refresh_times()  # what is gone is for others to notice
        listener.close()
