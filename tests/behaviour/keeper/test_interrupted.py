"""An interrupt while the keeper is being told of something: what it never hears of is not waited
for, beside a keeper that is well, for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.errors import DeadlineError, KeeperError
from everstep.link.channel import BackgroundChannel
from everstep.link.save import Save
from everstep.link.wire import Connection
from everstep.seams import SystemClock
from everstep.testing import inspect
from everstep.trainer.attach.remote import RemoteKeeper
from tests.support import following
from tests.support.interrupts import interrupted_at
from tests.support.log.every_step import World
from tests.support.serving import connected_pair
from tests.support.world import TIMEOUT_S


@contextmanager
def attached() -> Iterator[tuple[RemoteKeeper, Connection]]:
    """What a training process has, and the keeper's side of it."""
    # One interrupt comes between its lock and what gives it back.
    mine, theirs = connected_pair(send_timeout_s=0.2)
    channel = BackgroundChannel("raise", SystemClock(), progress_timeout_s=TIMEOUT_S)
    arena: Any = None
    remote = RemoteKeeper(mine, arena, 7, channel, SystemClock(), timeout_s=TIMEOUT_S)
    try:
        yield remote, theirs
    finally:
        theirs.close()
        remote.close()


def heard(theirs: Connection) -> list[dict[str, Any]]:
    """What has arrived whole."""
    found = []
    with suppress(KeeperError):  # no more has come, or the last one was sent in part
        while (received := theirs.receive(0.0)) is not None:
            found.append(received[0])
    return found


def places(call: Callable[[int], bool]) -> int:
    """Calls with 0, 1, and so on while there is such a place; how many there were."""
    count = 0
    while call(count):
        count += 1
        assert count < 1000
    return count


def test_an_interrupt_anywhere_while_a_base_is_asked_for() -> None:
    def asks(count: int) -> bool:
        with attached() as (remote, theirs):
            save = Save(3, 1)
            was = interrupted_at(count, lambda: remote.ask(save, [], exact=True))
            asked = [m["number"] for m in heard(theirs) if m["kind"] == "ask"]
            if remote.lost is None and remote.replica_requests.pending:
                assert asked == [1], "it is waited for, and the keeper has not heard of it"
            elif save.durable.done():
                assert isinstance(save.durable.exception(), KeeperError)
                remote.replica_requests.persisted(asked, 3, 9)  # an answer that nobody waits for
                remote.replica_requests.retained(3)
                assert not remote.replica_requests.pending
            return was

    assert places(asks) > 20


def test_an_interrupt_anywhere_while_a_capture_is_to_become_durable() -> None:
    """Whoever waits for it tells the keeper of it again, which knows what it has heard."""

    def persists(count: int) -> bool:
        with attached() as (remote, theirs):
            ends: Any = SimpleNamespace(number=5, step=3, save=Save(3, 1), begun=False)
            ends.on_end, ends.plan = (lambda _: None), SimpleNamespace(size_bytes=9)
            was = interrupted_at(count, lambda: remote.persist(ends))
            waits = bool(remote.waiting)
            with suppress(DeadlineError):
                remote.wait(0.0, show=False)
            if waits and remote.lost is None:
                told = [m["number"] for m in heard(theirs) if m["kind"] == "persist"]
                assert told, "it is waited for, and the keeper has not heard of it"
            return was

    assert places(persists) > 10


@pytest.mark.usefixtures("no_keeper_stays")
def test_a_base_that_was_never_asked_for_is_asked_for_again(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same save(); and close() does not wait for the one of before."""
    send, interrupts = Connection.send, ["ask"]

    def interrupted(connection: Connection, message: dict[str, Any]) -> None:
        if message["kind"] in interrupts:
            interrupts.remove(message["kind"])
            raise KeyboardInterrupt
        send(connection, message)

    world = World()
    with following.opened(run_folder, world) as ckpt:
        ckpt.resume()
        following.run_steps(ckpt, world, 2)
        ckpt.wait()
        following.run_steps(ckpt, world, 2)
        monkeypatch.setattr(Connection, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save()
        keeper = inspect(ckpt).keepers.current
        assert isinstance(keeper, RemoteKeeper)
        assert not keeper.replica_requests.steps
        ckpt.save().durable.result(TIMEOUT_S)
        assert 4 in following.steps_on_disk(run_folder)
