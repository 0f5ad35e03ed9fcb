"""Mailboxes over TCP: messages of one start of a job, and nothing that hangs."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from everstep.options import validate_options
from everstep.seams import Seams, mailbox
from everstep.seams.mailbox import ReservedPort, TcpMailbox
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.attach.terms import KeeperTerms
from tests.support.inside.dying import die

HOST = "127.0.0.1"
DEADLINE_S = 20.0


@pytest.fixture
def boxes() -> Iterator[list[TcpMailbox]]:
    found = [TcpMailbox(HOST) for _ in range(3)]
    yield found
    for box in found:
        box.close()


def opened(boxes: list[TcpMailbox], *sessions: str) -> list[TcpMailbox]:
    for rank, session in enumerate(sessions):
        boxes[rank].open(session, rank, [box.address for box in boxes])
    return boxes


def test_messages_arrive_in_order_and_whole(boxes: list[TcpMailbox]) -> None:
    opened(boxes, "s", "s")
    sent = [bytes([n]) * size for n, size in enumerate((0, 1, 5_000_000, 3))]
    for message in sent:
        boxes[0].send(1, message)
    assert [boxes[1].receive(DEADLINE_S) for _ in sent] == sent
    assert boxes[1].receive(0.0) is None


def test_what_is_sent_before_the_other_listens_is_not_lost(boxes: list[TcpMailbox]) -> None:
    opened(boxes, "s")
    boxes[0].send(1, b"early")
    boxes[1].open("s", 1, [box.address for box in boxes])
    assert boxes[1].receive(DEADLINE_S) == b"early"


def test_another_session_is_not_heard(boxes: list[TcpMailbox]) -> None:
    opened(boxes, "new", "new", "old")
    boxes[2].send(0, b"from the last start")
    boxes[1].send(0, b"from this one")
    assert boxes[0].receive(DEADLINE_S) == b"from this one"
    boxes[2].close()  # says all that it can before
    assert boxes[0].receive(0.2) is None


def test_nonsense_ends_the_connection_it_came_on(boxes: list[TcpMailbox]) -> None:
    opened(boxes, "s", "s")
    for nonsense in (b"\xff" * 64, b"\x02\x00\x00\x00ab", b"GET / HTTP/1.0\r\n\r\n"):
        with socket.create_connection(boxes[0].address, DEADLINE_S) as stranger:
            stranger.sendall(nonsense)
            stranger.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionResetError):  # an end, too
                assert stranger.recv(1) == b""
    boxes[1].send(0, b"well")
    assert boxes[0].receive(DEADLINE_S) == b"well"


def test_nobody_waits_for_a_rank_that_is_gone(boxes: list[TcpMailbox]) -> None:
    opened(boxes, "s", "s", "s")
    boxes[1].send(0, b"last")
    assert boxes[0].receive(DEADLINE_S) == b"last"
    assert not boxes[0].is_disconnected(1)
    boxes[1].close()
    until(lambda: boxes[0].is_disconnected(1))
    for _ in range(2000):
        boxes[0].send(1, b"into the void")
    boxes[0].send(2, b"to those who are there")
    assert boxes[2].receive(DEADLINE_S) == b"to those who are there"
    assert not boxes[0].is_disconnected(2)


def test_a_rank_that_reads_nothing_holds_nobody_up(boxes: list[TcpMailbox]) -> None:
    """It is there, and takes no bytes: who sends does not wait, others hear what they are told, and
    only so much is kept for it."""
    for rank in (0, 2):  # the other one listens, so it is connected to, and nobody looks
        boxes[rank].open("s", rank, [box.address for box in boxes])
    began_s = time.monotonic()
    for _ in range(mailbox.KEPT_MAX + 100):
        boxes[0].send(1, b"x" * 20_000)
    boxes[0].send(2, b"and you")
    assert boxes[2].receive(DEADLINE_S) == b"and you"
    assert time.monotonic() - began_s < DEADLINE_S / 4
    assert 0 < boxes[0].backlog(1) <= mailbox.KEPT_MAX
    boxes[0].close(0.0)


def test_a_rank_that_comes_back_at_its_address_is_heard(boxes: list[TcpMailbox]) -> None:
    opened(boxes, "s", "s")
    boxes[0].send(1, b"one")
    assert boxes[1].receive(DEADLINE_S) == b"one"
    boxes[1].close()
    again = boxes[1] = TcpMailbox(*boxes[1].address)
    again.open("s", 1, [box.address for box in boxes])
    found = None
    deadline_s = time.monotonic() + DEADLINE_S
    while found is None and time.monotonic() < deadline_s:
        boxes[0].send(1, b"two")  # what is on its way when a connection ends is lost
        found = again.receive(0.2)
    assert found == b"two"


def test_a_port_that_is_held_is_nobody_elses(boxes: list[TcpMailbox]) -> None:
    """A keeper opens its mailbox there, dies, and its successor finds the port free. Otherwise
    whoever asks for any port may be given it meanwhile, by accident."""
    held = ReservedPort(HOST)
    for _ in range(2):
        TcpMailbox(HOST, held.number).close()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((HOST, held.number))
    held.close()
    held.close()
    with socket.socket() as stranger:
        stranger.bind((HOST, held.number))


def test_a_keepers_port_is_held_until_it_is_let_go(tmp_path: Path) -> None:
    """Between a keeper that is gone and its successor, too: the address is known to the others."""

    class Remote:
        def listen(self, host: str, port: int, timeout_s: float) -> int:
            TcpMailbox(host, port).close()  # its keeper is gone at once
            return port

        def close(self, *, stay: bool = False) -> None: ...

    given: Any = {"method": "lazy", "every": None, "keep": 1, "budget": None}
    options = validate_options(**given, on_failure="warn", progress_timeout_s=DEADLINE_S)
    terms, nothing = KeeperTerms(options, Seams(), tmp_path, "run", 4096), cast("Any", None)
    keepers = Keepers(terms, nothing, nothing)
    keepers._remote = Remote()  # type: ignore[assignment]
    host, first = keepers.listen(HOST)
    assert keepers.listen(HOST, first) == (host, first), "its successor"
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((HOST, first))
    second = keepers.listen(HOST)[1]  # of another start
    with socket.socket() as stranger:
        stranger.bind((HOST, first))
    keepers.close()
    with socket.socket() as stranger:
        stranger.bind((HOST, second))


def test_whoever_never_says_the_session_is_let_go(
    boxes: list[TcpMailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(boxes, "s", "s")
    boxes[1].send(0, b"well")
    assert boxes[0].receive(DEADLINE_S) == b"well"
    monkeypatch.setattr(mailbox, "_STRANGER_S", 0.1)
    with socket.create_connection(boxes[0].address, DEADLINE_S) as silent:
        silent.settimeout(DEADLINE_S)
        assert silent.recv(1) == b""
    boxes[1].send(0, b"a rank may be silent for as long as it likes")
    assert boxes[0].receive(DEADLINE_S)
    assert not boxes[0].is_disconnected(1)


def test_strangers_are_few(boxes: list[TcpMailbox], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_STRANGERS_MAX", 2)
    opened(boxes, "s", "s", "s")
    strangers = []
    try:
        for _ in range(2 + 2 + 1):  # as many as may be there, and one for each other rank; one more
            strangers.append(socket.create_connection(boxes[0].address, DEADLINE_S))
        strangers[0].settimeout(DEADLINE_S)
        assert strangers[0].recv(1) == b"", "the oldest one makes room"
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)
        boxes[1].send(0, b"well")
        assert boxes[0].receive(DEADLINE_S) == b"well"
    finally:
        for one in strangers:
            one.close()


def out_of_descriptors(*_: object) -> socket.socket:
    raise OSError(errno.EMFILE, "Too many open files")


def test_without_descriptors_a_connected_rank_is_still_heard(
    boxes: list[TcpMailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(boxes, "s", "s", "s")
    boxes[1].send(0, b"before")
    assert boxes[0].receive(DEADLINE_S) == b"before"
    with monkeypatch.context() as patch:
        patch.setattr(mailbox.socket, "socket", out_of_descriptors)
        boxes[0].send(2, b"later")
        boxes[1].send(0, b"meanwhile")
        assert boxes[0].receive(DEADLINE_S) == b"meanwhile"
        boxes[1].send(0, b"and again")
        assert boxes[0].receive(DEADLINE_S) == b"and again"
    assert boxes[2].receive(DEADLINE_S) == b"later"


def test_without_descriptors_connections_are_accepted_later(
    boxes: list[TcpMailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread does not spin meanwhile."""
    tried_s: list[float] = []

    def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
        tried_s.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    opened(boxes, "s", "s")
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", accept)
        boxes[1].send(0, b"well")
        until(lambda: len(tried_s) > 1)
    assert tried_s[1] - tried_s[0] > 0.1
    assert boxes[0].receive(DEADLINE_S) == b"well"


def test_a_forked_child_leaves_the_connections_to_its_parent(boxes: list[TcpMailbox]) -> None:
    opened(boxes, "s", "s")
    boxes[0].send(1, b"hello")
    assert boxes[1].receive(DEADLINE_S) == b"hello"
    ready, wait = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(wait[1])
        os.write(ready[1], b"x")
        os.read(wait[0], 1)
        die()
    try:
        os.read(ready[0], 1)
        boxes[0].close()
        until(lambda: boxes[1].is_disconnected(0))
    finally:
        os.close(wait[1])
        os.waitpid(child, 0)
        for number in (*ready, wait[0]):
            os.close(number)


def until(there: Callable[[], bool]) -> None:
    """Returns when ``there()``, which another thread brings about."""
    deadline_s, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not there():
        assert time.monotonic() < deadline_s
        pause.wait(0.01)
