"""The files by which others find a keeper are removed while it lives: it makes them anew, or it is
said; what it has in memory is not lost with them."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import KeeperError
from everstep.link import registry
from everstep.link.registry import (
    Registration,
    find_keeper,
    keeper_files,
    list_keepers,
    read_tail,
)
from everstep.link.spawn import SpawnOptions, connect
from everstep.link.wire import error_from_wire
from everstep.seams import ManualClock
from everstep.seams.locks import file_identity
from everstep.seams.sockets import listen_at
from tests.support.fakekeeper import TIMEOUT_S, info_of
from tests.support.following import until
from tests.support.log.last_mark import Training, resumed, same
from tests.support.serving import Bench, Hand, bench, die
from tests.support.world import HookedFileSystem

OPTIONS = SpawnOptions("/runs/a", "id-a", 0, detach=False)
INFO = info_of(OPTIONS)
KEY = OPTIONS.key


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own; it does not exist yet."""
    path = tmp_path / "r"
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(path))
    return path


def _replace(folder: Path) -> None:
    folder.rename(folder.with_suffix(".old"))
    folder.mkdir(mode=0o700)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _one(name: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(f"*.{name}")).unlink()


HARMS: dict[str, Callable[[Path], None]] = {
    "the folder is removed": lambda folder: shutil.rmtree(folder),
    "the folder is replaced": _replace,
    "the folder is emptied": _empty,
    "the socket is removed": _one("sock"),
    "the lock is removed": _one("json"),
}


# --- Its registration -------------------------------------------------------------------


@pytest.fixture
def registered(folder: Path) -> Iterator[Registration]:
    """A keeper that listens."""
    registration = Registration.acquire(KEY, INFO)
    assert registration is not None
    with registration.listen():
        yield registration
    registration.release()


@pytest.mark.parametrize("harm", HARMS)
def test_it_is_found_again(harm: str, folder: Path, registered: Registration) -> None:
    for _ in range(2):
        HARMS[harm](folder)
        assert not registered.is_current
        listener = registered.again()
        assert listener is not None
        with listener:
            assert registered.is_current
            assert find_keeper(KEY) == INFO
            connect(KEY, timeout_s=0.0).close()
            assert Registration.acquire(KEY, INFO) is None
        shutil.rmtree(folder.with_suffix(".old"), ignore_errors=True)
    registered.release()
    assert {path.name for path in folder.iterdir()} <= {"registry.lock"}


def test_another_keeper_has_its_place(folder: Path, registered: Registration) -> None:
    shutil.rmtree(folder)
    other = Registration.acquire(KEY, INFO)
    assert other is not None
    with other.listen():
        assert registered.again() is None
        registered.release()
        assert other.is_current, "what is there is the other one's"
        connect(KEY, timeout_s=0.0).close()
    other.release()


def test_one_of_two_that_come_at_once_gets_its_place(
    folder: Path, registered: Registration
) -> None:
    for _ in range(8):
        shutil.rmtree(folder)
        barrier, others = threading.Barrier(2), list[Registration | None]()

        def come(barrier: threading.Barrier = barrier, others: Any = others) -> None:
            barrier.wait(TIMEOUT_S)
            others.append(Registration.acquire(KEY, INFO))

        thread = threading.Thread(target=come)
        thread.start()
        barrier.wait(TIMEOUT_S)
        listener = registered.again()
        thread.join(TIMEOUT_S)
        (other,) = others
        assert (listener is None) != (other is None)
        assert registered.is_current is (listener is not None)
        if other is not None:
            other.release()
        if listener is not None:
            listener.close()


def test_a_folder_that_cannot_be_used(folder: Path, registered: Registration) -> None:
    shutil.rmtree(folder)
    folder.write_text("mine")
    for _ in range(2):
        assert not registered.is_current
        with pytest.raises(KeeperError, match="cannot be used: Not a directory"):
            registered.again()
    assert folder.read_text() == "mine"
    folder.unlink()
    listener = registered.again()
    assert listener is not None
    listener.close()


@pytest.mark.parametrize("harm", ["the folder is removed", "the socket is removed"])
def test_what_fails_half_way_keeps_nobody_out(
    harm: str, folder: Path, registered: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: object) -> socket.socket:
        raise OSError(errno.ENOSPC, "No space left on device")

    HARMS[harm](folder)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "listen_at", full)
        with pytest.raises(KeeperError, match="No space left on device"):
            registered.again()
    assert not registered.is_current
    assert (find_keeper(KEY) is None) is (harm == "the folder is removed")
    listener = registered.again()
    assert listener is not None
    listener.close()
    assert find_keeper(KEY) == INFO


# --- Its server -------------------------------------------------------------------------


class Found:
    """Stands in for the registration."""

    def __init__(self) -> None:
        self.there = True
        self.bench: Bench | None = None
        self.fails: KeeperError | None = None
        self.other = False
        self.tries = 0

    @property
    def is_current(self) -> bool:
        return self.there

    def release(self) -> None:
        """Nothing is registered."""

    def refresh_times(self) -> None:
        """There are no files."""

    def again(self) -> socket.socket | None:
        self.tries += 1
        if self.fails is not None:
            raise self.fails
        if self.other:
            return None
        assert self.bench is not None
        self.there = True
        return listen_at(self.bench.files.socket)

    def after(self, clock: ManualClock, seconds: float) -> None:
        """Lets time go by."""
        assert self.bench is not None
        for _ in range(int(seconds / 0.5)):
            clock.advance(0.5)
            self.bench.turn()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def found() -> Found:
    return Found()


@pytest.fixture
def disk() -> HookedFileSystem:
    return HookedFileSystem()


@pytest.fixture
def b(
    run_folder: Path, clock: ManualClock, found: Found, disk: HookedFileSystem
) -> Iterator[Bench]:
    """A server that is found as ``found`` says."""
    with bench(run_folder, clock=clock, filesystem=disk, registration=found) as made:
        found.bench = made
        yield made
        disk.hook = lambda op, path: None


def notices(one: Hand) -> list[str]:
    return [str(error_from_wire(message["error"])) for message in one.hear("notice")]


def test_with_a_trainer_it_sees_to_it(b: Bench, found: Found, clock: ManualClock) -> None:
    one = b.trainer()
    one.serve()
    found.after(clock, 5.0)
    assert found.tries == 0
    found.there = False
    before, old = file_identity(b.files.socket), b.guest()
    found.after(clock, 5.0)
    assert found.tries == 1
    assert file_identity(b.files.socket) != before
    for guest in (old, b.guest()):
        guest.send({"kind": "status"})
        b.turn(2)
        received = guest.receive(0.0)
        assert received is not None
        assert received[0]["trainer"] == os.getpid()
    one.take(1, 5)
    assert one.await_("done")["number"] == 1
    assert notices(one) == []
    assert b.listener.fileno() == -1, "nobody can call at the old one"


def test_it_says_once_that_it_cannot(b: Bench, found: Found, clock: ManualClock) -> None:
    one = b.trainer()
    one.serve()
    found.there = False
    found.fails = KeeperError("the runtime folder /r cannot be used: No such device", path="/r")
    found.after(clock, 40.0)
    assert 4 <= found.tries <= 5, "that takes time each time"
    (said,) = notices(one)
    assert "the runtime folder /r cannot be used: No such device" in said
    assert "ckpt.save()" in said
    found.fails = None
    found.after(clock, 10.0)
    assert found.there
    found.there, found.fails = False, KeeperError("again")
    found.after(clock, 20.0)
    assert [text.count("again") for text in notices(one)][1:] == [2], "it was found in between"
    assert not one.hear("error"), "nothing has failed"
    one.take(1, 5)
    assert one.await_("done")["number"] == 1


def test_it_leaves_its_place_to_another(b: Bench, found: Found, clock: ManualClock) -> None:
    one = b.trainer()
    one.serve()
    found.there, found.other = False, True
    found.after(clock, 40.0)
    assert found.tries == 1
    (said,) = notices(one)
    assert "another keeper of this run has its place" in said
    assert not b.over(), "it still serves"
    found.other = False  # that one has ended: the run has gone on
    one.die()
    found.after(clock, 2.0)
    assert (found.tries, b.over()) == (1, True)


@pytest.mark.parametrize("held", [True, False])
def test_without_a_trainer(
    held: bool, b: Bench, found: Found, clock: ManualClock, disk: HookedFileSystem
) -> None:
    """What is on no disk is worth being found, nothing else is."""

    def full(op: str, path: object) -> None:
        if op == "create" and str(path).endswith(".safetensors.tmp"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    one = b.trainer()
    one.serve()
    disk.hook = full if held else disk.hook
    one.take(1, 5)
    one.die()
    b.settled()
    found.there, found.fails = False, KeeperError("not now")
    found.after(clock, 2.0)
    assert (found.tries, b.over()) == ((1, False) if held else (0, True))
    found.fails = None
    found.after(clock, 20.0)
    assert found.there is held
    if held:
        next_one = b.trainer()
        assert next_one.recall() is not None
        next_one.die()
        shutil.rmtree(b.run)
        found.there = False
        found.after(clock, 2.0)
        assert b.over(), "the run is gone, too"


# --- A real one -------------------------------------------------------------------------


@pytest.mark.usefixtures("no_keeper_stays")
def test_no_step_is_lost_with_the_folder(run_folder: Path, folder: Path) -> None:
    it = Training()
    ckpt = it.opened(run_folder)
    ckpt.resume()
    it.train()
    ckpt.step()
    (before,) = list_keepers()
    shutil.rmtree(folder)
    it.train()
    ckpt.step()
    log = keeper_files(before.key, create=False).log
    until(lambda: "were removed: written again" in " ".join(read_tail(log)))
    assert list_keepers() == [before]
    die(ckpt)
    recovery, there = resumed(run_folder)
    assert (recovery.step, recovery.source, recovery.exact) == (2, "memory", True)
    assert same(there, it.seen())
    until(lambda: not Path(log).exists())
    assert not list_keepers(), "it has taken away its files, as ever"
