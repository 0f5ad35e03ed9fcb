"""Messages between ranks: the seam for the network, where few and small messages go.

What implements it promises little, so that nearly anything can: a message arrives once, never,
late, twice, or after a later one. Those who use it repeat what is not answered, and pass over
what they know already. :class:`.peers.TcpMailbox` implements it over TCP; tests and the simulated
network of the crash tests have others.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = [
    "Mailbox",
    "ReservedPort",
    "TcpMailbox",
]


class Mailbox(Protocol):
    """One rank's way to the others of its job."""

    def open(self, session: str, rank: int, peers: Sequence[tuple[str, int]]) -> None:
        """From now on this ``rank`` hears those of ``session``, and speaks to them.

        Args:
            peers: address of each rank's mailbox.
        """
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message, sooner or later or never; does not wait and does not raise for a
        rank that is gone."""
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message, or None when none comes within ``timeout_s``."""
        ...

    def is_disconnected(self, rank: int) -> bool:
        """Whether ``rank`` has been heard, and will not be heard any more."""
        ...

    def close(self) -> None:
        """Lets go, when what was sent is on its way, or after a moment."""
        ...


_LENGTH_BYTES = 4
_MESSAGE_BYTES_MAX = 64 << 20
_PIECE_BYTES = 1 << 18
_KEPT_MAX = 1024  # messages for a rank that cannot be reached
_TRY_AGAIN_S = 0.25
_CONNECT_S = 5.0
_LOOK_AGAIN_S = 0.02
_STRANGERS_MAX = 64  # connections that have not said their session yet
_STRANGER_S = 10.0  # within which they have to


class ReservedPort:
    """A free port that nobody else is given while this exists, whether a mailbox is open there or
    not: who goes on at an address where others look for it finds it free. (Linux: a mailbox may
    be opened beside it. What asks the system for any port, or connects to somewhere, is given
    another one.)

    Raises:
        OSError: the address is not this machine's.

    Attributes:
        number: of the port.
    """

    def __init__(self, host: str) -> None:
        self._socket = _bound(host, 0)
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Lets it go. Idempotent."""
        self._socket.close()


class TcpMailbox:
    """One rank's mailbox. It hears nothing before :meth:`open`, so that its address can be made
    known first.

    Args:
        host: address of this machine that the other ranks can reach.
        port: 0: any that is free.

    Raises:
        OSError: the address is not this machine's, or is taken.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._listener = _bound(host, port)
        try:
            self._listener.listen(128)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._hello = b""
        self._session = b""
        self._out: dict[int, _Out] = {}
        self._in: dict[socket.socket, _In] = {}
        self._from: dict[int, int] = {}  # connections there are, by rank
        self._arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._selector: selectors.BaseSelector | None = None
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._closing = False
        self._thread: threading.Thread | None = None
        _mailboxes.add(self)

    def open(self, session: str, rank: int, peers: Sequence[tuple[str, int]]) -> None:
        """From now on this rank hears those of ``session``, and speaks to them.

        Args:
            peers: address of each rank's mailbox.
        """
        assert self._thread is None
        self._session = session.encode("utf-8")
        self._hello = _frame(rank.to_bytes(4, "little") + self._session)
        self._out = {
            number: _Out(address) for number, address in enumerate(peers) if number != rank
        }
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake)
        self._thread = threading.Thread(target=self._work, name="everstep-mailbox", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message, sooner or later or never; does not wait."""
        with self._lock:
            out = self._out[rank]
            out.waiting.append(_frame(message))
            while len(out.waiting) > _KEPT_MAX:
                out.waiting.popleft()
        with contextlib.suppress(OSError):  # it has been woken often enough, or is closed
            self._wakes.send(b"x")

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message, or None when none comes within ``timeout_s``."""
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def is_disconnected(self, rank: int) -> bool:
        """Whether ``rank`` has spoken to us, and its mailbox is closed."""
        return self._from.get(rank) == 0

    def close(self, timeout_s: float = 1.0) -> None:
        """Sends what can be sent within ``timeout_s``, and hangs up. Idempotent."""
        deadline_s = time.monotonic() + timeout_s
        if self._thread is not None:
            while self._unsent() and time.monotonic() < deadline_s:
                self._thread.join(_LOOK_AGAIN_S)
            self._closing = True
            with contextlib.suppress(OSError):
                self._wakes.send(b"x")
            self._thread.join(_CONNECT_S)
        self._hang_up()

    def _unsent(self) -> bool:
        with self._lock:
            return any(out.waiting or out.sending for out in self._out.values() if out.heard)

    def _hang_up(self) -> None:
        """Closes what this process has of it."""
        ours = [self._listener, self._woken, self._wakes, *self._in]
        for one in (*ours, *(out.socket for out in self._out.values() if out.socket is not None)):
            one.close()
        if self._selector is not None:
            self._selector.close()

    # The thread.

    def _work(self) -> None:
        assert self._selector is not None
        while not self._closing:
            try:
                self._drop_strangers()
                self._connect_all()
                for key, events in self._selector.select(_TRY_AGAIN_S):
                    key.data(key.fileobj, events)
            except OSError:  # of a connection that has just gone
                continue

    def _wake(self, _: Any, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _accept(self, _: Any, events: int) -> None:
        assert self._selector is not None
        with contextlib.suppress(OSError):
            connected, _peer = self._listener.accept()
            connected.setblocking(False)
            self._in[connected] = _In(time.monotonic())
            self._selector.register(connected, selectors.EVENT_READ, self._read)

    def _drop_strangers(self) -> None:
        """Whoever does not say the session in time, or is one of too many who have not, is no rank
        of ours; a rank that was only slow connects again."""
        strangers = [one for one, incoming in self._in.items() if incoming.rank is None]
        # All ranks may connect at once.
        too_many = max(0, len(strangers) - _STRANGERS_MAX - len(self._out))
        now_s = time.monotonic()
        for place, connected in enumerate(strangers):  # the oldest first
            if place < too_many or now_s - self._in[connected].since_s > _STRANGER_S:
                self._drop_incoming(connected)

    def _drop_incoming(self, connected: socket.socket) -> None:
        assert self._selector is not None
        incoming = self._in.pop(connected)
        self._selector.unregister(connected)
        connected.close()
        if incoming.rank is not None:
            self._from[incoming.rank] -= 1

    def _read(self, connected: Any, events: int) -> None:
        incoming = self._in[connected]
        try:
            piece = connected.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if piece:
            incoming.data += piece
        if not piece or not self._parse(incoming):
            self._drop_incoming(connected)

    def _parse(self, incoming: _In) -> bool:
        """Takes whole messages; False: this is none of ours."""
        while len(incoming.data) >= _LENGTH_BYTES:
            size = int.from_bytes(incoming.data[:_LENGTH_BYTES], "little")
            if size > (_MESSAGE_BYTES_MAX if incoming.rank is not None else 4096):
                return False
            if len(incoming.data) < _LENGTH_BYTES + size:
                return True
            message = bytes(incoming.data[_LENGTH_BYTES : _LENGTH_BYTES + size])
            del incoming.data[: _LENGTH_BYTES + size]
            if incoming.rank is not None:
                self._arrived.put(message)
            elif message[4:] != self._session or len(message) < 4:
                return False
            else:
                incoming.rank = int.from_bytes(message[:4], "little")
                self._from[incoming.rank] = self._from.get(incoming.rank, 0) + 1
        return True

    def _connect_all(self) -> None:
        assert self._selector is not None
        now_s = time.monotonic()
        for out in self._out.values():
            if out.socket is None and out.waiting and now_s >= out.not_before_s:
                self._connect(out, now_s)
            elif out.socket is not None and not out.connected and now_s > out.give_up_s:
                self._drop(out)
            elif out.socket is not None and out.connected and (out.waiting or out.sending):
                self._selector.modify(out.socket, _BOTH, out.on_ready)

    def _connect(self, out: _Out, now_s: float) -> None:
        assert self._selector is not None
        family = socket.AF_INET6 if ":" in out.address[0] else socket.AF_INET
        out.socket = socket.socket(family, socket.SOCK_STREAM)
        out.socket.setblocking(False)
        with contextlib.suppress(OSError):
            out.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        out.connected = False
        out.give_up_s = now_s + _CONNECT_S
        out.on_ready = lambda _, events: self._write(out, events)
        try:
            out.socket.connect(out.address)
        except BlockingIOError:
            pass
        except OSError:
            out.socket.close()
            out.socket = None
            out.not_before_s = now_s + _TRY_AGAIN_S
            return
        self._selector.register(out.socket, _BOTH, out.on_ready)

    def _write(self, out: _Out, events: int) -> None:
        assert out.socket is not None
        try:
            if not out.connected:
                if out.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._drop(out)
                    return
                out.connected = out.heard = True
                out.sending = self._hello
            if events & selectors.EVENT_READ and not out.socket.recv(4096):
                self._drop(out)  # nothing ever comes back but the end
                return
        except BlockingIOError:
            pass
        except OSError:
            self._drop(out)
            return
        self._send_some(out)

    def _send_some(self, out: _Out) -> None:
        assert self._selector is not None
        assert out.socket is not None
        try:
            while True:
                with self._lock:
                    if not out.sending and not out.waiting:
                        self._selector.modify(out.socket, selectors.EVENT_READ, out.on_ready)
                        return
                    if not out.sending:
                        out.sending = out.waiting.popleft()
                sent = out.socket.send(out.sending)
                out.sending = out.sending[sent:]
        except BlockingIOError:
            return
        except OSError:
            self._drop(out)

    def _drop(self, out: _Out) -> None:
        """The connection is gone; what was on its way is lost, the rest is tried again."""
        assert self._selector is not None
        if out.socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(out.socket)
            out.socket.close()
        out.socket = None
        out.sending = b""
        out.connected = False
        out.heard = False
        out.not_before_s = time.monotonic() + _TRY_AGAIN_S


class _In:
    """A connection that another rank has made, or somebody else.

    Attributes:
        rank: None before the session was said.
    """

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.data = bytearray()
        self.rank: int | None = None


class _Out:
    """A connection to another rank, and what it is to be told."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.socket: socket.socket | None = None
        self.connected = False
        self.heard = False
        self.waiting: deque[bytes] = deque()
        self.sending = b""
        self.not_before_s = self.give_up_s = 0.0
        self.on_ready: Any = None


_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE
_mailboxes: weakref.WeakSet[TcpMailbox] = weakref.WeakSet()


def _bound(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine; port 0: any that is free."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def _leave_to_parent() -> None:
    """In a forked child: else the others would not see the end of the parent."""
    for mailbox in list(_mailboxes):
        mailbox._hang_up()


os.register_at_fork(after_in_child=_leave_to_parent)
