"""Keepers that do not respond, or have reached a limit, are named at a start."""

from __future__ import annotations

from errno import EMFILE
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import (
    EverstepError,
    KeeperTimeoutError,
    OutOfSpaceError,
    UnavailableError,
)
from everstep.link.registry import keeper_files
from everstep.link.spawn import SpawnOptions
from everstep.link.wire import error_from_wire, error_to_wire
from everstep.options import KeeperOptions
from everstep.seams import SystemClock
from everstep.trainer.attach.attach import attach
from tests.support.fakekeeper import running, started


@pytest.mark.parametrize("gone", [False, True])
def test_one_that_lives_and_does_not_answer_is_named(
    gone: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped, say, as its training process was killed; or its socket was removed. Another one that
    is started finds the key taken, and ends."""
    monkeypatch.setattr("everstep.trainer.attach.attach._START_S", 0.1)
    monkeypatch.setattr("everstep.trainer.attach.attach.spawn_keeper", lambda _: None)
    options = SpawnOptions(str(tmp_path), "id", 3, detach=False)
    about: Any = (tmp_path, "id", 3, 4096, KeeperOptions(), None, SystemClock())
    with started(options), running(options, deaf=True) as keeper:
        if gone:
            Path(keeper_files(options.key).socket).unlink()
        with pytest.raises(KeeperTimeoutError) as caught:
            attach(*about, timeout_s=0.1)
        told, hint = caught.value, str(caught.value.hint)
        assert f"process {keeper.pid}) does not respond" in told.message
        assert (told.path, told.rank) == (str(tmp_path), 3)
        assert "steps after the newest base" in hint
        assert "everstep stop --now ends it, and these steps are lost" in hint
        assert (f"kill -CONT {keeper.pid}" in hint) == (not gone)
        assert ("its socket is missing" in hint) == gone


def test_one_that_never_came_is_nobody_to_be_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("everstep.trainer.attach.attach._START_S", 0.1)
    monkeypatch.setattr("everstep.trainer.attach.attach.spawn_keeper", lambda _: None)
    about: Any = (tmp_path, "id", 3, 4096, KeeperOptions(), None, SystemClock())
    with pytest.raises(KeeperTimeoutError, match="no keeper has answered") as caught:
        attach(*about, timeout_s=0.1)
    assert "does not respond" not in caught.value.message


@pytest.mark.parametrize("lives", [False, True])
@pytest.mark.parametrize("kind", [OutOfSpaceError, UnavailableError])
def test_what_a_keeper_of_before_has_no_room_for(
    kind: type[EverstepError], lives: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has the limits of the process that started it, and not those of this one."""
    calls: list[float] = []

    def connect(key: str, *, timeout_s: float) -> Any:
        calls.append(timeout_s)
        if not lives and len(calls) == 1:
            raise KeeperTimeoutError("none")
        return object()

    def met(*_: Any, **named: Any) -> Any:
        raise error_from_wire(error_to_wire(kind("no room", hint="a smaller budget")))

    where = "everstep.trainer.attach.attach"
    monkeypatch.setattr(f"{where}.connect", connect)
    monkeypatch.setattr(f"{where}.spawn_keeper", lambda _: None)
    monkeypatch.setattr(f"{where}._attach_over", met)
    about: Any = (tmp_path, "id", 0, 4096, KeeperOptions(), None, SystemClock())
    with pytest.raises(kind) as caught:
        attach(*about, timeout_s=1.0)
    hint = str(caught.value.hint)
    assert hint.startswith("a smaller budget")
    assert ("everstep stop" in hint) == lives


def test_a_keeper_without_descriptors_is_named(tmp_path: Path) -> None:
    """This process's own limit, which its user may raise, is not the one that was met."""
    options = SpawnOptions(str(tmp_path), "id", 0, detach=False)
    refusal = UnavailableError("no file descriptor for an arena", hint="raise ulimit -n")
    about: Any = (tmp_path, "id", 0, 4096, KeeperOptions(), None, SystemClock())
    with (
        running(options, attach={**error_to_wire(refusal)}) as process,
        pytest.raises(UnavailableError) as caught,
    ):
        attach(*about, timeout_s=20.0)
    assert caught.value.hint == (
        "raise ulimit -n; the running keeper has the limits of the process that started it: "
        f"prlimit --pid {process.pid} raises them, everstep stop ends it"
    )


def test_a_limit_of_this_process_is_not_put_on_the_keeper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def met(*_: Any, **named: Any) -> Any:
        raise UnavailableError("no descriptor", hint="raise ulimit -n") from OSError(EMFILE, "")

    where = "everstep.trainer.attach.attach"
    monkeypatch.setattr(f"{where}._connect", lambda spawn: (object(), spawn.key, True))
    monkeypatch.setattr(f"{where}._attach_over", met)
    about: Any = (tmp_path, "id", 0, 4096, KeeperOptions(), None, SystemClock())
    with pytest.raises(UnavailableError) as caught:
        attach(*about, timeout_s=1.0)
    assert caught.value.hint == "raise ulimit -n"
