"""Unix stream sockets that pass descriptors, and know who is at the other end.

Everything here is non-blocking: waiting is :meth:`UnixStream.wait`, which has a timeout.
Children made by ``os.fork()`` (data-loader workers) get no stream of their parent's: else
the other side would not see the end of the parent as long as a child lives.
"""

from __future__ import annotations

import array
import contextlib
import errno
import math
import os
import select
import socket
import struct
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

__all__ = [
    "FDS_MAX",
    "SOCKET_PATH_BYTES_MAX",
    "PeerProcess",
    "UnixStream",
    "accept_stream",
    "close_descriptors",
    "connect_stream",
    "listen_at",
    "own_uid",
    "stream_pair",
]

FDS_MAX = 16
"""Descriptors that one message can carry."""

SOCKET_PATH_BYTES_MAX = 107
"""Of a socket's path; the kernel's field has 108, the last of which is zero."""

_WAIT_S_MAX = 1000.0
_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")
_INT_BYTES = array.array("i").itemsize
_CONTROL_BYTES = socket.CMSG_SPACE(FDS_MAX * _INT_BYTES)
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
_CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process at the other end of a connection, as the kernel knows it.

    Attributes:
        pid: of the process that connected or listened; 0 if it is not visible from here
            (another container).
        uid: its user then.
    """

    pid: int
    uid: int


class UnixStream:
    """One connected stream.

    Attributes:
        lost: whether this process was forked from the one that has the stream.

    Raises:
        OSError: whatever the system said, by any method.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self.lost = False
        _streams.add(self)

    def fileno(self) -> int:
        """The descriptor, for ``select``; -1 once it is closed."""
        return self._socket.fileno()

    def send_some(self, data: memoryview, fds: Sequence[int] = ()) -> int:
        """Sends what there is room for and returns its size; descriptors go with the first byte.

        Returns 0, and has sent no descriptor, when there is no room.
        """
        control = []
        if fds:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            return self._socket.sendmsg([data], control, _NO_SIGNAL)
        except BlockingIOError:
            return 0

    def receive_some(self, size_bytes: int, fds: list[int] | None) -> bytes | None:
        """What is there, at most ``size_bytes``; ``b""`` at the end; None if nothing is there.

        Args:
            fds: receives the descriptors that came along, all close-on-exec. With None they
                are discarded.
        """
        try:
            if fds is None:
                return self._socket.recv(size_bytes)
            got = self._socket.recvmsg(size_bytes, _CONTROL_BYTES, _CLOSE_ON_EXEC)
        except BlockingIOError:
            return None
        data, control, flags, _ = got
        for level, kind, payload in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(payload) - len(payload) % _INT_BYTES
                fds.extend(array.array("i", payload[:whole]))
        if flags & socket.MSG_CTRUNC:
            close_descriptors(fds)
            fds.clear()
            raise OSError(
                errno.EMFILE,
                f"descriptors were lost on the way: more than {FDS_MAX}, or too many open files",
            )
        return data

    def wait(self, *, write: bool, timeout_s: float) -> bool:
        """Waits until something can be received (or sent), or the other side is gone."""
        descriptor = self.fileno()
        if descriptor < 0:
            return True
        return _ready(descriptor, select.POLLOUT if write else select.POLLIN, timeout_s)

    def peer(self) -> PeerProcess:
        """Who is at the other end."""
        if not hasattr(socket, "SO_PEERCRED"):
            raise OSError(errno.ENOTSUP, "this system does not tell who is at the other end")
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
        return PeerProcess(pid, uid)

    def shutdown(self) -> None:
        """Ends both directions; whoever waits, here or there, wakes up."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the descriptor; does not wake other threads, so shut down first."""
        self._socket.close()


def stream_pair() -> tuple[UnixStream, UnixStream]:
    """Two streams connected with each other, in this process."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return UnixStream(one), UnixStream(other)


def listen_at(path: PurePath) -> socket.socket:
    """Listens at ``path``, which is replaced; for this user only.

    The name appears when connections are accepted, not before: made under another name
    (the suffix becomes ``.tmp``) and renamed.
    """
    temporary = path.with_suffix(".tmp")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        listener.bind(os.fspath(temporary))
        os.chmod(temporary, 0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        os.rename(temporary, path)
    except BaseException:
        listener.close()
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return listener


def accept_stream(listener: socket.socket, timeout_s: float) -> UnixStream | None:
    """The next connection; None when there is none within ``timeout_s``."""
    if not _ready(listener.fileno(), select.POLLIN, timeout_s):
        return None
    try:
        connected, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):  # it has gone again
        return None
    return UnixStream(connected)


def connect_stream(path: PurePath) -> UnixStream:
    """Connects at once or not at all.

    Raises:
        OSError: FileNotFoundError and ConnectionRefusedError when nobody listens,
            BlockingIOError when too many connections wait to be accepted.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        connected.connect(os.fspath(path))
    except BaseException:
        connected.close()
        raise
    return UnixStream(connected)


def own_uid() -> int:
    """The user that this process acts for."""
    return os.geteuid()


def close_descriptors(fds: Iterable[int]) -> None:
    """Closes descriptors that were received."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _ready(descriptor: int, events: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, events)
    return bool(poller.poll(math.ceil(1000 * min(max(0.0, timeout_s), _WAIT_S_MAX))))


# --- Forked children --------------------------------------------------------------------

_streams: weakref.WeakSet[UnixStream] = weakref.WeakSet()


def _lose_all() -> None:
    """In a forked child: closes, without a word to the other side."""
    for stream in list(_streams):
        stream.lost = True
        with contextlib.suppress(OSError):
            stream.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_all)
