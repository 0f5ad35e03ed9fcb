"""Unix stream sockets that pass file descriptors and identify the process at the other end.

All operations are non-blocking; :meth:`UnixStream.wait` waits with a timeout. Children made by
``os.fork()`` (data-loader workers) do not keep their parent's streams: otherwise the other side
would not notice the end of the parent while a child lives.
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

FDS_MAX = 16
"""Maximum number of descriptors in one message."""

SOCKET_PATH_BYTES_MAX = 107
"""Maximum length of a socket's path: the kernel's field has 108 bytes, with a final zero."""

_WAIT_S_MAX = 1000.0
_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")
_INT_BYTES = array.array("i").itemsize
_CONTROL_BYTES = socket.CMSG_SPACE(FDS_MAX * _INT_BYTES)
# An error (EPIPE) instead of SIGPIPE, whose handling is up to the program.
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
_CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """Process at the other end of a connection, as reported by the kernel.

    Attributes:
        pid: PID of the process that connected or listened; 0 if not visible from here (another
            container).
        uid: its user at that time.
    """

    pid: int
    uid: int


class UnixStream:
    """Connected stream.

    Attributes:
        lost: True if this process was forked from the one that has the stream.

    Raises:
        OSError: any method: the error of the operating system.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self.lost = False
        _streams.add(self)

    def fileno(self) -> int:
        """Return the descriptor, for ``select``; -1 once it is closed."""
        return self._socket.fileno()

    def send_some(self, data: memoryview, fds: Sequence[int] = ()) -> int:
        """Send as much of ``data`` as fits and return its size; descriptors go with the first byte.

        Return 0, with no descriptor sent, if the buffer is full.
        """
        control = []
        if fds:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            return self._socket.sendmsg([data], control, _NO_SIGNAL)
        except BlockingIOError:
            return 0

    def receive_some(self, size_bytes: int, fds: list[int] | None) -> bytes | None:
        """Return received bytes, at most ``size_bytes``; ``b""`` at the end; None if nothing has
        arrived.

        Args:
            size_bytes: maximum size.
            fds: list that receives descriptors, all close-on-exec. With None they are discarded.
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
        # The kernel has dropped some: the message is incomplete, and the others would leak.
        if flags & socket.MSG_CTRUNC:
            close_descriptors(fds)
            fds.clear()
            raise OSError(
                errno.EMFILE,
                f"received descriptors were dropped: more than {FDS_MAX}, or too many open files",
            )
        return data

    def wait(self, *, write: bool, timeout_s: float) -> bool:
        """Wait until data can be received (or sent), or the other side has closed."""
        descriptor = self.fileno()
        if descriptor < 0:
            return True
        return _ready(descriptor, select.POLLOUT if write else select.POLLIN, timeout_s)

    def peer(self) -> PeerProcess:
        """Return the process at the other end."""
        if not hasattr(socket, "SO_PEERCRED"):
            raise OSError(errno.ENOTSUP, "this system cannot identify the process at the other end")
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
        return PeerProcess(pid, uid)

    def shutdown(self) -> None:
        """End both directions, which wakes waiting threads on both sides."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. Does not wake other threads, so shut down first."""
        self._socket.close()


def listen_at(path: PurePath) -> socket.socket:
    """Listen at ``path``, replacing it; for this user only.

    The name appears only when connections are accepted: the socket is made under another name
    (suffix ``.tmp``) and renamed.
    """
    temporary = path.with_suffix(".tmp")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        listener.bind(os.fspath(temporary))
        # Before listen and rename: no other user may ever connect.
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
    """Return the next connection; None if there is none within ``timeout_s``."""
    if not _ready(listener.fileno(), select.POLLIN, timeout_s):
        return None
    try:
        connected, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):  # closed before it was accepted
        return None
    return UnixStream(connected)


def connect_stream(path: PurePath) -> UnixStream:
    """Connect without waiting.

    Raises:
        OSError: FileNotFoundError and ConnectionRefusedError if nobody listens, BlockingIOError if
            the queue of connections is full.
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
    """Return the effective user of this process."""
    return os.geteuid()


def close_descriptors(fds: Iterable[int]) -> None:
    """Close received descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _ready(descriptor: int, events: int, timeout_s: float) -> bool:
    # poll() and not select(), which is limited to descriptors below 1024. Rounded up: a wait of
    # less than 1 ms would become 0, and a loop around it would spin.
    poller = select.poll()
    poller.register(descriptor, events)
    return bool(poller.poll(math.ceil(1000 * min(max(0.0, timeout_s), _WAIT_S_MAX))))


# --- Forked children --------------------------------------------------------------------

_streams: weakref.WeakSet[UnixStream] = weakref.WeakSet()


def _lose_all() -> None:
    """Close all streams in a forked child, without sending anything."""
    for stream in list(_streams):
        stream.lost = True
        with contextlib.suppress(OSError):
            # Not shutdown(), which would end the connection of the parent, too.
            stream.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_all)
