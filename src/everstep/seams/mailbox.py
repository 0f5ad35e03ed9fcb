"""Small messages between the ranks of a job: the contract, and its implementation over TCP.

The contract promises little: a message may arrive once, never, late, twice, or after a later one.
Users repeat messages that are not answered and ignore repetitions. Tests and the simulated network
of the crash tests have other implementations.

:class:`TcpMailbox` outlives training. One thread does all its work and never waits for a rank that
has ended: unsent messages are kept for a while and then dropped. A connection begins with the
session; those of another start of the job are closed.
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


class Mailbox(Protocol):
    """One rank's connection to the other ranks of its job."""

    def open(self, session: str, rank: int, peers: Sequence[tuple[str, int]]) -> None:
        """Start to exchange messages with the other ranks of ``session``.

        Args:
            session: identifies the start of the job.
            rank: this rank.
            peers: address of each rank's mailbox.
        """
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Queue a message; does not wait, and does not raise for a rank that has ended. Delivery is
        not guaranteed.
        """
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message, or None if none arrives within ``timeout_s``."""
        ...

    def is_disconnected(self, rank: int) -> bool:
        """Return True if ``rank`` was connected once and its mailbox has been closed."""
        ...

    def close(self) -> None:
        """Close after sending queued messages, or after a short timeout."""
        ...


class NoMailbox:
    """Mailbox of a job with a single rank, which has nobody to exchange messages with."""

    def open(self, session: str, rank: int, peers: Sequence[tuple[str, int]]) -> None: ...

    def send(self, rank: int, message: bytes) -> None: ...

    def receive(self, timeout_s: float) -> bytes | None:
        return None

    def is_disconnected(self, rank: int) -> bool:
        return False

    def close(self) -> None: ...


_LENGTH_BYTES = 4
_MESSAGE_BYTES_MAX = 64 << 20
_PIECE_BYTES = 1 << 18
KEPT_MAX = 1024  # queued messages for a rank that cannot be reached
_TRY_AGAIN_S = 0.25
_CONNECT_S = 5.0
_LOOK_AGAIN_S = 0.02
_STRANGERS_MAX = 64  # connections that have not sent their session yet
_STRANGER_S = 10.0  # time in which they have to


class ReservedPort:
    """Reserved free port: the system gives it to no other program while this object exists, even
    when no mailbox is open on it. A mailbox can so be closed and reopened at an address known to
    others. (On Linux a mailbox may listen on it at the same time. Programs that request any port,
    or connect out, get another one.)

    Attributes:
        number: port number.

    Raises:
        OSError: the address is not one of this machine.
    """

    def __init__(self, host: str) -> None:
        self._socket = _bound(host, 0)
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()


class TcpMailbox:
    """Mailbox of one rank over TCP. It receives nothing before :meth:`open`, so that its address
    can be announced first.

    Args:
        host: address of this machine that the other ranks can reach.
        port: port number; 0: any free one.

    Raises:
        OSError: the address is not one of this machine, or is in use.
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
        self._accepts_at_s: float | None = None  # set while accepting is paused
        self._closing = False
        self._thread: threading.Thread | None = None
        _mailboxes.add(self)

    def open(self, session: str, rank: int, peers: Sequence[tuple[str, int]]) -> None:
        """Start to exchange messages with the other ranks of ``session``.

        Args:
            session: identifies the start of the job.
            rank: this rank.
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
        """Queue a message; does not wait. Delivery is not guaranteed."""
        with self._lock:
            out = self._out[rank]
            out.waiting.append(_frame(message))
            # The oldest first: users repeat messages that are not answered.
            while len(out.waiting) > KEPT_MAX:
                out.waiting.popleft()
        # The pipe may be full, which wakes the thread as well, or closed.
        with contextlib.suppress(OSError):
            self._wakes.send(b"x")

    def backlog(self, rank: int) -> int:
        """Return the number of queued messages for a rank."""
        with self._lock:
            return len(self._out[rank].waiting)

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message, or None if none arrives within ``timeout_s``."""
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def is_disconnected(self, rank: int) -> bool:
        """Return True if ``rank`` was connected once and its mailbox has been closed."""
        # None: it was never connected, and may still be starting.
        return self._from.get(rank) == 0

    def close(self, timeout_s: float = 1.0) -> None:
        """Send for at most ``timeout_s``, then close all connections. Idempotent."""
        deadline_s = time.monotonic() + timeout_s
        if self._thread is not None:
            # Only connected ranks count: others may have ended, and nothing can be sent to them.
            while self._unsent() and time.monotonic() < deadline_s:
                self._thread.join(_LOOK_AGAIN_S)
            self._closing = True
            with contextlib.suppress(OSError):
                self._wakes.send(b"x")
            self._thread.join(_CONNECT_S)
        self._hang_up()

    def _unsent(self) -> bool:
        with self._lock:
            return any(out.waiting or out.sending for out in self._out.values() if out.reached)

    def _hang_up(self) -> None:
        """Close the sockets of this process."""
        ours = [self._listener, self._woken, self._wakes, *self._in]
        for one in (*ours, *(out.socket for out in self._out.values() if out.socket is not None)):
            one.close()
        if self._selector is not None:
            self._selector.close()

    # --- In the mailbox thread ---

    def _work(self) -> None:
        assert self._selector is not None
        while not self._closing:
            try:
                self._drop_strangers()
                self._listen_again()
                self._connect_all()
                # Returns at least this often: retries and the time limit of strangers need no
                # event.
                for key, events in self._selector.select(_TRY_AGAIN_S):
                    key.data(key.fileobj, events)
            except OSError:  # a connection was closed at this moment
                continue

    def _wake(self, _: Any, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _accept(self, _: Any, events: int) -> None:
        assert self._selector is not None
        try:
            connected, _peer = self._listener.accept()
            connected.setblocking(False)
            self._selector.register(connected, selectors.EVENT_READ, self._read)
        except BlockingIOError:  # the other side has given up
            return
        except OSError:
            # Mostly for lack of descriptors. The connection stays in the listener's queue, so the
            # selector would return at once, for ever: leave the listener out of it for a while.
            self._selector.unregister(self._listener)
            self._accepts_at_s = time.monotonic() + _TRY_AGAIN_S
            return
        self._in[connected] = _In(time.monotonic())

    def _listen_again(self) -> None:
        """Resume accepting after a pause."""
        assert self._selector is not None
        if self._accepts_at_s is not None and time.monotonic() >= self._accepts_at_s:
            self._accepts_at_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _drop_strangers(self) -> None:
        """Close connections that do not send the session in time, or that are too many. They are no
        ranks of this job; a slow rank connects again.
        """
        strangers = [one for one, incoming in self._in.items() if incoming.rank is None]
        # All ranks may connect at the same time: allow for them.
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
        """Take complete messages from a connection; return False if it is not of this session."""
        while len(incoming.data) >= _LENGTH_BYTES:
            size = int.from_bytes(incoming.data[:_LENGTH_BYTES], "little")
            # A stranger must not make this process collect a large message.
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
                # A count: a rank that connects again may have two connections for a moment.
                self._from[incoming.rank] = self._from.get(incoming.rank, 0) + 1
        return True

    def _connect_all(self) -> None:
        assert self._selector is not None
        now_s = time.monotonic()
        for out in self._out.values():
            if out.socket is None and out.waiting and now_s >= out.retry_at_s:
                self._connect(out, now_s)
            elif out.socket is not None and not out.connected and now_s > out.connect_deadline_s:
                self._drop(out)
            elif out.socket is not None and out.connected and (out.waiting or out.sending):
                # send() runs in other threads and only queues: this thread alone changes the
                # selector.
                self._selector.modify(out.socket, _BOTH, out.on_ready)

    def _connect(self, out: _Out, now_s: float) -> None:
        assert self._selector is not None
        family = socket.AF_INET6 if ":" in out.address[0] else socket.AF_INET
        out.connect_deadline_s = now_s + _CONNECT_S
        out.on_ready = lambda _, events: self._write(out, events)
        try:
            out.socket = socket.socket(family, socket.SOCK_STREAM)
            out.socket.setblocking(False)
            with contextlib.suppress(OSError):
                # Short messages must not wait for the acknowledgement of earlier ones (Nagle).
                out.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            out.socket.connect(out.address)
        except BlockingIOError:
            pass
        except OSError:  # also for lack of descriptors
            self._drop(out)
            return
        assert out.socket is not None
        self._selector.register(out.socket, _BOTH, out.on_ready)

    def _write(self, out: _Out, events: int) -> None:
        assert out.socket is not None
        try:
            if not out.connected:
                # The result of the non-blocking connect().
                if out.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._drop(out)
                    return
                out.connected = True
                out.reached = True
                # The session comes first on each connection: a receiver accepts nothing before it.
                out.sending = self._hello
            if events & selectors.EVENT_READ and not out.socket.recv(4096):
                # The other side never sends: readable means closed.
                self._drop(out)
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
        """Close a broken connection. The message being sent is lost; the others are sent again
        later.
        """
        assert self._selector is not None
        if out.socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(out.socket)
            out.socket.close()
        out.socket = None
        # The rest of a message that was sent in part would be garbage on a new connection.
        out.sending = b""
        out.connected = False
        out.reached = False
        out.retry_at_s = time.monotonic() + _TRY_AGAIN_S


class _In:
    """Incoming connection, from another rank or a stranger.

    Attributes:
        rank: rank at the other end; None until the session has arrived.
    """

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.data = bytearray()
        self.rank: int | None = None


class _Out:
    """Outgoing connection to another rank, and its queue of messages."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.socket: socket.socket | None = None
        self.connected = False
        self.reached = False
        self.waiting: deque[bytes] = deque()
        self.sending = b""
        self.retry_at_s = 0.0
        self.connect_deadline_s = 0.0
        self.on_ready: Any = None


_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE
_mailboxes: weakref.WeakSet[TcpMailbox] = weakref.WeakSet()


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address of this machine; port 0: any free one."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # For a port with connections in TIME_WAIT, and for one that ReservedPort holds: on Linux
        # several sockets may bind a port like this while none of them listens.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def _leave_to_parent() -> None:
    """Close the sockets in a forked child: otherwise other ranks would not notice the end of the
    parent.
    """
    for mailbox in list(_mailboxes):
        mailbox._hang_up()


os.register_at_fork(after_in_child=_leave_to_parent)
