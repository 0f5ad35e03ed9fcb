"""Messages between trainer and keeper: whole or an error, never a wait without end."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everstep import errors
from everstep.errors import EverstepError, KeeperError, KeeperTimeoutError
from everstep.link import wire
from everstep.link.wire import (
    MESSAGE_BYTES_MAX,
    Connection,
    decode_message,
    encode_message,
    error_from_wire,
    error_to_wire,
)
from everstep.seams import sockets
from everstep.seams.sockets import FDS_MAX, UnixStream, close_descriptors, listen_at
from tests.support.serving import connected_pair

TIMEOUT_S = 20.0

Pair = tuple[Connection, Connection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = connected_pair(send_timeout_s=TIMEOUT_S)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Connection]]:
    """A bare socket, and a connection at its other end."""
    bare, behind = socket.socketpair()
    connection = Connection(UnixStream(behind), send_timeout_s=0.2)
    yield bare, connection
    bare.close()
    connection.close()


@pytest.fixture(scope="module", autouse=True)
def little_to_look_at() -> None:
    """What earlier tests have loaded stays: each test here collects garbage, which takes a second
    behind those that compile models."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


def received(connection: Connection) -> tuple[dict[str, Any], list[int]]:
    found = connection.receive(TIMEOUT_S)
    assert found is not None
    return found


# --- Messages as bytes ------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.binary(max_size=20)
    | st.text(st.characters(), max_size=10)  # surrogates too: names of files
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(-5, 5), inner, max_size=4)
    ),
    max_leaves=12,
)
messages = st.dictionaries(st.text(max_size=6), values, max_size=5)


@given(message=messages)
@example(message={"run": os.fsdecode(b"/runs/\xff\xfe")})
def test_what_is_encoded_is_decoded(message: dict[str, Any]) -> None:
    frame = encode_message(message)
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert decode_message(frame[4:]) == message


@given(body=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(body: bytes) -> None:
    with contextlib.suppress(KeeperError):
        assert isinstance(decode_message(body), dict)


@given(message=messages, data=st.data())
def test_damaged_messages_are_a_message_or_an_error(message: dict[str, Any], data: Any) -> None:
    body = bytearray(encode_message(message)[4:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(body[: data.draw(st.integers(0, len(body)))])
    for damaged in (bytes(body), cut):
        with contextlib.suppress(KeeperError):
            assert all(isinstance(key, str) for key in decode_message(damaged))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        msgpack.packb([1, 2]),
        msgpack.packb(None),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": 1}) + b"\0",
        msgpack.packb({"a": 1})[:-1],
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        b"\x81\xa1a\x81\x90\x01",  # a list as a key
        b"\x91" * 5000,
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\xc1",
    ],
)
def test_no_messages(body: bytes) -> None:
    with pytest.raises(KeeperError, match="a message is not"):
        decode_message(body)


def test_lists_that_claim_to_be_long_take_no_memory() -> None:
    """A thousand nested lists, each of which claims to have as many items as are allowed."""
    body = b"\x81\xa1a" + b"\xdd\x00\x0f\xff\xff" * 500 + bytes(1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(KeeperError):
        decode_message(body)
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown_bytes < 256 << 20


def test_lists_that_really_are_too_long_are_refused() -> None:
    zeros = [0] * (1 << 20)
    assert decode_message(encode_message({"a": zeros})[4:]) == {"a": zeros}
    with pytest.raises(KeeperError, match="exceeds max_array_len"):
        decode_message(encode_message({"a": [*zeros, 0]})[4:])


def test_messages_that_are_too_large_are_not_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    monkeypatch.setattr(wire, "MESSAGE_BYTES_MAX", 1000)
    with pytest.raises(KeeperError, match=r"a message \(layout\) has 10.. bytes, at most 1000"):
        one.send({"kind": "layout", "data": bytes(1000)})
    one.send({"kind": "small"})  # nothing of it was under way
    assert received(other) == ({"kind": "small"}, [])


@pytest.mark.parametrize("message", [{1: 2}, {"a": object()}, {"a": {1, 2}}])
def test_what_has_no_form_is_a_bug_and_harms_nothing(message: Any, pair: Pair) -> None:
    with pytest.raises(TypeError):
        pair[0].send(message)
    pair[0].send({"a": 1})
    assert received(pair[1]) == ({"a": 1}, [])


# --- Sending and receiving --------------------------------------------------------------


def test_messages_arrive_in_order_and_then_the_end(pair: Pair) -> None:
    one, other = pair
    for number in range(50):
        one.send({"kind": "n", "number": number, "pair": (1, 2)})
    one.close()
    assert [received(other)[0]["number"] for _ in range(50)] == list(range(50))
    assert other.receive(0.0) is None
    assert other.receive(TIMEOUT_S) is None
    with pytest.raises(KeeperError, match="the keeper is gone: it has closed the connection"):
        other.send({"kind": "late"})
    assert not isinstance(errors.KeeperError("x"), TimeoutError)


def test_nothing_comes(pair: Pair) -> None:
    for timeout_s in (0.0, 0.05):
        with pytest.raises(KeeperTimeoutError, match="the keeper has sent nothing in time"):
            pair[0].receive(timeout_s)
    pair[1].send({"kind": "late"})
    assert received(pair[0])[0] == {"kind": "late"}


def test_a_message_that_comes_byte_by_byte(raw: tuple[socket.socket, Connection]) -> None:
    """Each wait is short, the sum of them as long as it takes; nothing is lost in between."""
    bare, connection = raw
    frame = encode_message({"kind": "slow", "data": b"x" * 20})
    for byte in frame[:-1]:
        bare.sendall(bytes([byte]))
        with pytest.raises(KeeperTimeoutError):
            connection.receive(0.0)
    bare.sendall(frame[-1:] + encode_message({"kind": "next"}))
    assert received(connection)[0] == {"kind": "slow", "data": b"x" * 20}
    assert connection.receive(0.0) == ({"kind": "next"}, [])


def test_a_message_that_stops_half_way_is_not_waited_for(
    raw: tuple[socket.socket, Connection],
) -> None:
    bare, connection = raw
    bare.sendall((1000).to_bytes(4, "little") + bytes(10))
    start_s = time.monotonic()
    with pytest.raises(KeeperTimeoutError):
        connection.receive(0.1)
    assert time.monotonic() - start_s < TIMEOUT_S / 2


@pytest.mark.parametrize("cut", [1, 3, 4, 5, -1])
def test_a_torn_message(cut: int, raw: tuple[socket.socket, Connection]) -> None:
    bare, connection = raw
    bare.sendall(encode_message({"kind": "torn"})[:cut])
    bare.close()
    with pytest.raises(KeeperError, match="the keeper is gone: it ended in the middle"):
        connection.receive(TIMEOUT_S)
    with pytest.raises(KeeperError, match="has failed: the keeper is gone"):
        connection.receive(TIMEOUT_S)
    with pytest.raises(KeeperError, match="has failed"):
        connection.send({"kind": "more"})


@pytest.mark.parametrize("size_bytes", [MESSAGE_BYTES_MAX + 1, (1 << 32) - 1])
def test_a_length_beyond_the_limit(size_bytes: int, raw: tuple[socket.socket, Connection]) -> None:
    bare, connection = raw
    bare.sendall(size_bytes.to_bytes(4, "little"))
    with pytest.raises(KeeperError, match=f"claims {size_bytes} bytes, at most"):
        connection.receive(TIMEOUT_S)
    bare.settimeout(TIMEOUT_S)
    assert bare.recv(1) == b""  # the connection was ended


def test_a_length_within_the_limit_takes_no_memory_before_the_bytes_come(
    raw: tuple[socket.socket, Connection],
) -> None:
    bare, connection = raw
    bare.sendall(MESSAGE_BYTES_MAX.to_bytes(4, "little") + bytes(100))
    tracemalloc.start()
    with pytest.raises(KeeperTimeoutError):
        connection.receive(0.0)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < MESSAGE_BYTES_MAX // 16


def test_what_is_no_message_ends_the_connection(raw: tuple[socket.socket, Connection]) -> None:
    bare, connection = raw
    bare.sendall((1).to_bytes(4, "little") + b"\xc1" + encode_message({"kind": "good"}))
    for pattern in ("a message is not msgpack", "has failed: a message is not msgpack"):
        with pytest.raises(KeeperError, match=pattern):
            connection.receive(TIMEOUT_S)


@given(data=st.binary(max_size=60))
@example(data=b"\1\0\0\0\x80\1\0\0\0\x80\1")
@example(data=b"\0\0\0\0")
def test_any_stream_of_bytes_ends(data: bytes) -> None:
    bare, behind = socket.socketpair()
    connection = Connection(UnixStream(behind))
    try:
        bare.sendall(data)
        bare.close()
        with contextlib.suppress(KeeperError):
            while (found := connection.receive(0.0)) is not None:
                assert isinstance(found[0], dict)
        with contextlib.suppress(KeeperError):
            assert connection.receive(0.0) is None
    finally:
        connection.close()


def test_a_side_that_does_not_read_is_not_waited_for() -> None:
    one, other = connected_pair(send_timeout_s=0.2)
    try:
        start_s = time.monotonic()
        with pytest.raises(KeeperTimeoutError, match=r"has not read a message for 0\.2 s"):
            one.send({"kind": "large", "data": bytes(4 << 20)})
        assert time.monotonic() - start_s < TIMEOUT_S / 2
        with pytest.raises(KeeperError, match="has failed: the keeper has not read"):
            one.send({"kind": "small"})  # would be read as a part of the other
        with pytest.raises(KeeperError, match="in the middle"):
            other.receive(TIMEOUT_S)
    finally:
        one.close()
        other.close()


def test_other_threads_do_not_wait_longer_for_a_side_that_does_not_read() -> None:
    one, other = connected_pair(send_timeout_s=0.3)
    found: list[Exception] = []

    def send() -> None:
        try:
            one.send({"data": bytes(4 << 20)})
        except KeeperError as error:
            found.append(error)

    threads = [threading.Thread(target=send) for _ in range(4)]
    start_s = time.monotonic()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(found) == 4
        assert time.monotonic() - start_s < 4 * 0.3 + 5
    finally:
        one.close()
        other.close()


def test_what_came_before_a_failed_send_can_be_received(pair: Pair) -> None:
    """The other side says why, and hangs up; we find that out while sending."""
    one, other = pair
    one.send({"kind": "refused"})
    one.close()
    with pytest.raises(KeeperError, match="is gone"):
        other.send({"kind": "more"})
    assert received(other)[0] == {"kind": "refused"}
    assert other.receive(TIMEOUT_S) is None


@pytest.mark.parametrize("sends", [True, False])
def test_what_fails_keeps_nothing_that_was_in_use_then(
    sends: bool, raw: tuple[socket.socket, Connection]
) -> None:
    bare, connection = raw

    def fail() -> weakref.ref[threading.Event]:
        in_use = threading.Event()
        with contextlib.suppress(KeeperError):
            if sends:
                connection.send({"kind": "more"})
            else:
                connection.receive(TIMEOUT_S)
        return weakref.ref(in_use)

    bare.sendall((1).to_bytes(4, "little") + b"\xc1")
    if sends:
        bare.close()
    assert fail()() is None
    with pytest.raises(KeeperError, match="has failed"):
        connection.send({"kind": "more"})


def test_several_threads_send_and_no_message_is_mixed_with_another(pair: Pair) -> None:
    one, other = pair

    def send(name: int) -> None:
        for number in range(20):
            one.send({"name": name, "number": number, "data": bytes([name]) * 100_000})

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    counts = [0] * 4
    for _ in range(80):
        message, _ = received(other)
        name = message["name"]
        assert message["number"] == counts[name]
        assert message["data"] == bytes([name]) * 100_000
        counts[name] += 1
    for thread in threads:
        thread.join(TIMEOUT_S)


def test_closing_wakes_whoever_waits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair
    results: list[Any] = []
    waiting = threading.Event()
    real = UnixStream.wait

    def wait(stream: UnixStream, *, write: bool, timeout_s: float) -> bool:
        waiting.set()
        return real(stream, write=write, timeout_s=timeout_s)

    monkeypatch.setattr(UnixStream, "wait", wait)
    thread = threading.Thread(target=lambda: results.append(one.receive(2 * TIMEOUT_S)))
    thread.start()
    assert waiting.wait(TIMEOUT_S)
    one.close()
    thread.join(TIMEOUT_S)
    assert results == [None]
    assert one.fileno() == -1
    assert one.receive(0.0) is None
    one.close()
    with pytest.raises(KeeperError, match="the connection to the keeper was closed"):
        one.send({"kind": "late"})
    with pytest.raises(KeeperError, match="was closed"):
        one.peer()


class Interrupted(BaseException):
    """Stands for a KeyboardInterrupt, which may come between any two instructions."""


def test_an_interrupt_while_waiting_loses_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair

    def interrupt(*_: Any, **__: Any) -> bool:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(UnixStream, "wait", interrupt)
        with pytest.raises(Interrupted):
            one.receive(TIMEOUT_S)
    other.send({"kind": "after"})
    assert received(one)[0] == {"kind": "after"}
    one.send({"kind": "back"})
    assert received(other)[0] == {"kind": "back"}


@pytest.mark.parametrize("receiving", [True, False])
def test_an_interrupt_while_bytes_move_ends_the_connection(
    receiving: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how many of them did: whatever came next could be anything."""
    one, other = pair
    name = "receive_some" if receiving else "send_some"
    real = getattr(UnixStream, name)

    def interrupted(*args: Any) -> Any:
        real(*args)
        raise Interrupted

    other.send({"kind": "waiting"})
    with monkeypatch.context() as patch:
        patch.setattr(UnixStream, name, interrupted)
        with pytest.raises(Interrupted):
            if receiving:
                one.receive(TIMEOUT_S)
            else:
                one.send({"kind": "hello"})
    with pytest.raises(KeeperError, match=r"was interrupted|sent in part"):
        one.send({"kind": "more"})


# --- Descriptors ------------------------------------------------------------------------


def test_descriptors_travel_with_their_message(pair: Pair, tmp_path: Path) -> None:
    one, other = pair
    files = [tmp_path / name for name in "abc"]
    for number, file in enumerate(files):
        file.write_text(f"file {number}")
    for count in (1, 2, 3):
        fds = [os.open(file, os.O_RDONLY) for file in files[:count]]
        one.send({"kind": "before"})
        one.send({"kind": "with", "data": bytes(30_000)}, fds)
        one.send({"kind": "after"})
        close_descriptors(fds)
        assert received(other) == ({"kind": "before"}, [])
        message, found = received(other)
        assert message["kind"] == "with"
        contents = [os.pread(fd, 100, 0).decode() for fd in found]
        assert contents == [f"file {number}" for number in range(count)]
        assert not any(os.get_inheritable(fd) for fd in found)
        close_descriptors(found)
        assert received(other) == ({"kind": "after"}, [])


def test_as_many_descriptors_as_there_may_be(pair: Pair) -> None:
    one, other = pair
    with pytest.raises(ValueError, match="at most"):
        one.send({"kind": "many"}, [0] * (FDS_MAX + 1))
    one.send({"kind": "many"}, [0] * FDS_MAX)
    _, fds = received(other)
    assert len(fds) == FDS_MAX
    close_descriptors(fds)


def test_too_many_descriptors_are_refused_and_none_stays_open(
    raw: tuple[socket.socket, Connection],
) -> None:
    bare, connection = raw
    socket.send_fds(bare, [encode_message({"kind": "many"})], [0] * (FDS_MAX + 1))
    with pytest.raises(KeeperError, match="received descriptors were dropped"):
        connection.receive(TIMEOUT_S)


def test_descriptors_of_a_message_that_is_none_are_closed(
    raw: tuple[socket.socket, Connection],
) -> None:
    bare, connection = raw
    socket.send_fds(bare, [(1).to_bytes(4, "little") + b"\xc1"], [0, 0])
    with pytest.raises(KeeperError):
        connection.receive(TIMEOUT_S)


def test_descriptors_of_a_message_that_never_came_whole_are_closed(
    raw: tuple[socket.socket, Connection],
) -> None:
    bare, connection = raw
    socket.send_fds(bare, [b"\x09\0\0\0"], [0])
    with pytest.raises(KeeperTimeoutError):
        connection.receive(0.0)
    connection.close()  # `no_descriptor_is_left` sees to the rest


def test_descriptors_that_nobody_may_send_with_the_body_are_dropped(
    raw: tuple[socket.socket, Connection],
) -> None:
    bare, connection = raw
    frame = encode_message({"kind": "odd"})
    bare.sendall(frame[:4])
    socket.send_fds(bare, [frame[4:]], [0])
    assert received(connection) == ({"kind": "odd"}, [])


# --- Who is there -----------------------------------------------------------------------


def test_peer(pair: Pair) -> None:
    assert pair[0].peer() == sockets.PeerProcess(os.getpid(), os.geteuid())


def test_accept(tmp_path: Path) -> None:
    path = tmp_path / "k.sock"
    path.write_text("left by somebody")
    listener = listen_at(path)
    try:
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert [*tmp_path.iterdir()] == [path]
        assert wire.accept(listener, 0.0) is None
        caller = Connection(sockets.connect_stream(path))
        accepted = wire.accept(listener, TIMEOUT_S)
        assert accepted is not None
        caller.send({"kind": "hello"})
        assert received(accepted)[0] == {"kind": "hello"}
        caller.close()
        with pytest.raises(KeeperError, match="the trainer is gone"):
            for _ in range(3):
                accepted.send({"kind": "more"})
        accepted.close()
    finally:
        listener.close()


def test_other_users_are_not_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen_at(tmp_path / "k.sock")
    try:
        caller = Connection(sockets.connect_stream(tmp_path / "k.sock"))
        monkeypatch.setattr(wire, "own_uid", lambda: os.geteuid() + 1)
        assert wire.accept(listener, TIMEOUT_S) is None
        assert caller.receive(TIMEOUT_S) is None
        caller.close()
    finally:
        listener.close()


FORKING = """
import os
import socket
from everstep.errors import KeeperError
from everstep.link.wire import Connection
from everstep.seams.sockets import UnixStream

one, other = map(Connection, map(UnixStream, socket.socketpair()))
ready_out, ready_in = os.pipe()
end_out, end_in = os.pipe()
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: one.send({"kind": "child"}), lambda: one.receive(0.0), one.peer):
        try:
            call()
        except KeeperError as error:
            refused += "was forked" in str(error)
    one.close()
    os.close(end_in)
    os.write(ready_in, bytes([refused, one.fileno() == -1]))
    os.read(end_out, 1)  # until the parent is gone
    os._exit(0)
assert os.read(ready_out, 2) == bytes([3, 1])
one.send({"kind": "parent"})  # not disturbed by the child's close()
assert other.receive(20.0) == ({"kind": "parent"}, [])
one._stream.close()  # as the end of the process would; the child has no copy
assert other.receive(20.0) is None
assert os.waitpid(child, os.WNOHANG) == (0, 0)
os.close(end_in)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_neither_speaks_nor_keeps_the_connection_open() -> None:
    """A data-loader worker outlives its parent: the keeper sees the parent's end all the same."""
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=60)


# --- Errors -----------------------------------------------------------------------------

_SAMPLES = {
    "leaves": (("model/f", "is a function"), ("x", "is open")),
    "mismatches": (("w", "shape (2,) and (3,)"),),
    "entry": "model/w",
    "quantity": "link_bytes_per_s",
    "needed": 4e10,
}


def sample(kind: type[EverstepError]) -> EverstepError:
    """An error of this class with every field that its constructor knows."""
    where: dict[str, Any] = {"step": 3, "rank": 1, "tier": "disk", "path": "/p", "hint": "h"}
    own = [
        name
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in where
    ]
    return kind("what happened", **where, **{name: _SAMPLES[name] for name in own})


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n[0].isupper()])
def test_every_error_survives_the_way(name: str) -> None:
    error = sample(getattr(errors, name))
    frame = encode_message({"kind": "error", "error": error_to_wire(error)})
    back = error_from_wire(decode_message(frame[4:])["error"])
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)
    assert back.args == error.args


def test_errors_without_fields() -> None:
    back = error_from_wire(error_to_wire(EverstepError("x")))
    assert vars(back) == vars(EverstepError("x"))


def test_unknown_exceptions_are_internal_errors() -> None:
    class Finer(errors.DamageError):
        pass

    found = error_from_wire(error_to_wire(ZeroDivisionError("oh")))
    assert type(found) is EverstepError
    assert str(found) == "internal error: ZeroDivisionError('oh')"
    assert type(error_from_wire(error_to_wire(Finer("x", entry="e")))) is errors.DamageError


def test_fields_that_msgpack_has_no_form_for() -> None:
    error = EverstepError("x", step=np.int64(7))  # type: ignore[arg-type]
    error.odd = {"path": Path("/p"), 2: 1 << 70}  # type: ignore[attr-defined]
    back = error_from_wire(decode_message(encode_message(error_to_wire(error))[4:]))
    assert back.step == 7
    assert back.odd == {"path": "/p", "2": str(1 << 70)}  # type: ignore[attr-defined]


@given(fields=st.dictionaries(st.sampled_from(
    ["error", "message", "step", "path", "hint", "fields", "args", "__class__", "entry", "leaves",
     "__notes__", "add_note", "not a name", ""]
) | st.integers(0, 3), values | st.sampled_from([*errors.__all__]), max_size=6))  # fmt: skip
def test_whatever_comes_is_an_error_in_words(fields: dict[Any, Any]) -> None:
    error = error_from_wire(fields)
    assert isinstance(error, EverstepError)
    assert isinstance(str(error), str)
    assert callable(error.fields)
    assert isinstance(error.message, str)


# --- Imports ----------------------------------------------------------------------------


def test_nothing_of_it_needs_torch() -> None:
    """A keeper and the command line start in a fraction of the time that torch takes."""
    code = """
import sys
import everstep.link.registry, everstep.link.spawn, everstep.link.wire
import everstep.seams.locks, everstep.seams.processes.processes, everstep.seams.sockets
import everstep.seams.processes
import everstep.cli, everstep.cli.ps
assert "torch" not in sys.modules, "torch was imported"
assert "numpy" not in sys.modules, "numpy was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
