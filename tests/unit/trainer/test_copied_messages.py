"""Messages of a keeper about copies count for the timeline that they are about, and no other."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from everstep.seams import SystemClock
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.participant import Participant


class Told(Participant):
    """Keeps what it is told of."""

    def __init__(self) -> None:
        self.of: list[tuple[int, int | None, int | None]] = []

    def base_everywhere(self, step: int) -> None:
        self.of.append((-1, step, None))

    def copied(self, place: int, base: int | None, step: int | None) -> None:
        self.of.append((place, base, step))


class Silent:
    """A connection on which nothing arrives until it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def receive(self, timeout_s: float) -> None:
        self.closed.wait(30.0)

    def send(self, *args: Any) -> None:
        pass

    def close(self) -> None:
        self.closed.set()


def test_copies_of_an_undone_timeline_do_not_count() -> None:
    """After a rewind the steps of the same numbers are others: a promise must not count them."""
    told = Told()
    connection: Any = Silent()
    anything: Any = SimpleNamespace()
    keeper = RemoteKeeper(connection, anything, 1, anything, SystemClock(), [told], timeout_s=30.0)
    base = {"kind": "copied", "place": 0, "base": 10, "step": None}
    log = {"kind": "copied", "place": 0, "base": None, "step": 12}
    peer = {"kind": "peered", "base": 10, "step": None}
    peer_log = {"kind": "peered", "base": None, "step": 12}
    for message in (base, log, peer, peer_log):
        keeper.handle({**message, "of_timeline": 7}, [])
    assert told.of == []
    assert keeper.peer_log_step is None
    served = 0  # no timeline was begun
    for message in (base, log, peer, peer_log):
        keeper.handle({**message, "of_timeline": served}, [])
    assert told.of == [(0, 10, None), (0, None, 12), (-1, 10, None)]
    assert keeper.peer_log_step == 12
    connection.close()
