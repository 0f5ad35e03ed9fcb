"""A keeper that is started beside the restoring: found where it was said to be, waited for before a
timeline is opened, and missed by nobody if it cannot be started."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

import everstep
from everstep.errors import (
    KeeperError,
    KeeperTimeoutError,
)
from everstep.link.registry import keeper_files
from everstep.link.spawn import SpawnOptions
from everstep.options import validate_options
from everstep.restore.fetch.held import KeeperContents
from everstep.seams import Seams
from everstep.testing import inspect
from everstep.trainer.attach import keepers as keepers_module
from everstep.trainer.attach.attach import attach
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.attach.terms import KeeperTerms
from tests.support.fakekeeper import running, started
from tests.support.keepers import terms_of
from tests.support.ranks.together import on_all, resume, train, trainings

HOST, DEADLINE_S = "127.0.0.1", 20.0


class Remote:
    """A keeper as a trainer sees it."""

    lost = None
    arena: Any = type("Arena", (), {"size_bytes": 0, "view": memoryview(b"")})()

    moves = log_moves = 0
    peer_log_step = None

    def __init__(self) -> None:
        self.at: list[tuple[str, int]] = []

    def listen(self, host: str, port: int, timeout_s: float) -> int:
        self.at.append((host, port))
        return port

    def settle(self, timeout_s: float) -> None: ...

    def recall(self, timeout_s: float, *, own: bool) -> KeeperContents:
        return KeeperContents()

    def close(self, *, stay: bool = False) -> None:
        self.at.append(("closed", 0))


class Pool:
    def __init__(self, arena: Any, keeper: Any = None) -> None:
        self.keeper = keeper

    def close(self) -> None: ...


@pytest.fixture
def keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keepers:
    given: Any = {"method": "lazy", "every": None, "keep": 1, "budget": None}
    options = validate_options(**given, on_failure="warn", progress_timeout_s=DEADLINE_S)
    terms, nothing = KeeperTerms(options, Seams(), tmp_path, "run", 4096), cast("Any", None)
    monkeypatch.setattr(keepers_module, "CapturePool", Pool)
    monkeypatch.setattr(keepers_module, "is_there", lambda run, run_id, rank: False)
    return Keepers(terms, nothing, nothing)


def test_others_are_told_its_address_before_it_is_there(
    keepers: Keepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, remote = threading.Event(), Remote()

    def attach(self: Keepers) -> Any:
        assert gate.wait(DEADLINE_S)
        return remote

    monkeypatch.setattr(Keepers, "_attach", attach)
    keepers.open(while_ranks_meet=True)
    assert keepers.recall_leftovers() == KeeperContents(), "a new one has nothing"
    told = keepers.listen(HOST)
    assert told[1] > 0
    assert remote.at == [], "it is not there yet"
    gate.set()
    keepers.ready()
    assert remote.at == [told]
    keepers.ready()
    assert remote.at == [told], "once"
    assert keepers.pool is not None
    keeper: object = keepers.pool.keeper
    assert keeper is remote, "whoever waits for its memory sees that it moves"
    keepers.close()
    assert remote.at == [told, ("closed", 0)]


def test_one_that_is_there_is_asked_what_it_holds(
    keepers: Keepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this very call, in its own thread: what it has in memory is to be restored."""
    threads: list[threading.Thread] = []

    def attach(self: Keepers) -> Any:
        threads.append(threading.current_thread())
        return Remote()

    monkeypatch.setattr(Keepers, "_attach", attach)
    monkeypatch.setattr(keepers_module, "is_there", lambda run, run_id, rank: True)
    keepers.open(while_ranks_meet=True)
    assert threads == [threading.current_thread()]
    keepers.close()


def test_one_that_cannot_be_started_is_tried_again_by_the_next_resume(
    keepers: Keepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = [KeeperError("no memory"), Remote()]

    def attach(self: Keepers) -> Any:
        one = found.pop(0)
        if isinstance(one, KeeperError):
            raise one
        return one

    monkeypatch.setattr(Keepers, "_attach", attach)
    keepers.open(while_ranks_meet=True)
    with pytest.raises(KeeperError, match="no memory"):
        keepers.ready()
    keepers.open(while_ranks_meet=True)
    keepers.ready()
    assert not found
    keepers.close()


def test_whoever_is_closed_lets_one_go_that_was_still_starting(
    keepers: Keepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote()
    monkeypatch.setattr(Keepers, "_attach", lambda self: remote)
    keepers.open(while_ranks_meet=True)
    keepers.close()
    assert remote.at == [("closed", 0)]


def test_no_timeline_is_opened_on_a_rank_without_a_keeper_and_others_hear_why(
    tmp_path: Path,
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    with trainings(*runs, every=1) as ranks:
        resume(ranks)
        train(ranks, 2)
    with trainings(*runs) as ranks:
        keepers, calls = inspect(ranks[1].ckpt).keepers, iter(range(9))

        def ready() -> None:
            if next(calls):  # not where it is opened, but before the timeline
                raise KeeperError("there is no memory for it")

        keepers.ready = ready  # type: ignore[method-assign]

        def resumes(rank: int) -> str:
            with pytest.raises(everstep.EverstepError) as caught:
                ranks[rank].ckpt.resume()
            return str(caught.value)

        said = on_all(lambda: resumes(0), lambda: resumes(1))
        del keepers.ready
    assert "rank 1 could not resume: there is no memory for it" in said[0]
    assert "there is no memory for it" in said[1]
    assert not (runs[1] / "timeline-00002").exists()
    with trainings(*runs) as ranks:
        assert [one.step for one in resume(ranks)] == [2, 2]


@pytest.mark.parametrize("gone", [False, True])
def test_one_that_lives_and_does_not_answer_is_named(
    gone: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped, say, as its training process was killed; or its socket was removed. Another one that
    is started finds the key taken, and ends."""
    monkeypatch.setattr("everstep.trainer.attach.attach._START_S", 0.1)
    monkeypatch.setattr("everstep.trainer.attach.attach.spawn_keeper", lambda _: None)
    options = SpawnOptions(str(tmp_path), "id", 3, detach=False)
    terms = terms_of(tmp_path, rank=3, timeout_s=0.1)
    with started(options), running(options, deaf=True) as keeper:
        if gone:
            Path(keeper_files(options.key).socket).unlink()
        with pytest.raises(KeeperTimeoutError) as caught:
            attach(terms, cast("Any", None))
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
    terms = terms_of(tmp_path, rank=3, timeout_s=0.1)
    with pytest.raises(KeeperTimeoutError, match="no keeper has answered") as caught:
        attach(terms, cast("Any", None))
    assert "does not respond" not in caught.value.message
