"""Messages between trainer and keeper over a Unix socket, with file descriptors.

A message is a length of four bytes (little-endian) and as many bytes of msgpack: a map with text
keys. Tuples arrive as lists, byte arrays as bytes; file names that are not valid Unicode pass
unchanged. A list or map has at most 1,048,576 items. Descriptors travel with the first byte of
their message.

No wait is unbounded: neither for a side that has stopped reading, nor for the rest of a message.
Invalid data ends the connection, as nothing after it could be trusted.
"""

from __future__ import annotations

import errno
import operator
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from everstep import errors
from everstep.errors import EverstepError, KeeperError, KeeperTimeoutError
from everstep.seams.clock import WaitBudget
from everstep.seams.sockets import (
    FDS_MAX,
    PeerProcess,
    UnixStream,
    accept_stream,
    close_descriptors,
    own_uid,
)

MESSAGE_BYTES_MAX = 64 << 20
"""Size limit of the msgpack of one message, in bytes."""

SEND_TIMEOUT_S = 10.0
"""Time after which a side that does not read counts as lost."""

_HEADER_BYTES = 4
# Received in pieces: a wrong length must not make this process allocate that much memory.
_PIECE_BYTES = 1 << 20
# Items of one list or map: msgpack allocates for the count that the data claims.
_ITEMS_MAX = 1 << 20
_CLOSE_TIMEOUT_S = 1.0
_GONE = (errno.ECONNRESET, errno.EPIPE, errno.EBADF, errno.ENOTCONN)


# --- Messages as bytes ------------------------------------------------------------------


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Encode a message, with its length in front.

    Raises:
        KeeperError: it is too large.
        TypeError, ValueError, OverflowError: it holds a value that msgpack cannot encode (a bug).
    """
    if not all(isinstance(key, str) for key in message):
        raise TypeError("the keys of a message are text")
    body: bytes = msgpack.packb(dict(message), unicode_errors="surrogatepass")
    if len(body) > MESSAGE_BYTES_MAX:
        kind = message.get("kind")
        raise KeeperError(
            f"a message ({kind!s:.80}) has {len(body)} bytes, at most {MESSAGE_BYTES_MAX}"
        )
    return len(body).to_bytes(_HEADER_BYTES, "little") + body


def decode_message(body: bytes | bytearray) -> dict[str, Any]:
    """Decode the body of a message, without its length.

    Raises:
        KeeperError: it is not a msgpack map with text keys, or is followed by other data.
    """
    # An item takes at least one byte: a larger count is false, and nothing is allocated for it.
    items_max = min(len(body), _ITEMS_MAX)
    try:
        message = msgpack.unpackb(
            body,
            strict_map_key=False,
            max_array_len=items_max,
            max_map_len=items_max,
            ext_hook=_no_extensions,
            unicode_errors="surrogatepass",
        )
    except (ValueError, TypeError, MemoryError, RecursionError, msgpack.UnpackException) as error:
        raise KeeperError(f"a message is not msgpack: {error}") from error
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise KeeperError("a message is not a map with text as keys")
    return message


def _no_extensions(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


# --- Connections ------------------------------------------------------------------------


class Connection:
    """One side of a connection. Any thread may send; one at a time receives.

    In a process forked from the one that made it, it can neither send nor receive, and the other
    side does not notice that process.

    Args:
        other: name of the other side in errors.
        send_timeout_s: seconds within which a message must have been sent.
    """

    def __init__(
        self,
        stream: UnixStream,
        *,
        other: str = "the keeper",
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        self._stream = stream
        self._other = other
        self._send_timeout_s = send_timeout_s
        # Two locks: a thread that waits for a message must not keep others from sending.
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._closed = False
        # Reasons why sending or receiving has failed. The two are separate: data that arrived
        # before a send failed (perhaps the other side's reason) can still be received. Texts and
        # no exceptions: a traceback would keep objects alive, such as a keeper's memory.
        self._send_failure: str | None = None
        self._receive_failure: str | None = None
        # Received bytes of the next message. An interrupt between reading bytes from the socket
        # and storing them here would lose them: ``_moving`` is True in between.
        self._header = bytearray()
        self._body = bytearray()
        self._fds: list[int] = []
        self._moving = False

    def fileno(self) -> int:
        """Return the descriptor, for ``select``; -1 once closed."""
        return self._stream.fileno()

    def peer(self) -> PeerProcess:
        """Return process and user of the other side, from the kernel.

        Raises:
            KeeperError: the connection is closed, or this system does not support it.
        """
        try:
            return self._stream.peer()
        except OSError as error:
            raise self._failed(error) from error

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message; return when it has left this process, which is before it is read.

        The other side gets duplicates of the descriptors: the caller still has to close its own.

        Raises:
            KeeperTimeoutError: the other side has not read for too long. As after any other failure
                while
                sending, the connection can no longer be used.
            KeeperError: the other side has closed the connection, or the message is too large.
        """
        if len(fds) > FDS_MAX:
            raise ValueError(f"{len(fds)} descriptors in one message, at most {FDS_MAX}")
        # Encoded first: an invalid message must fail before any byte is sent.
        frame = encode_message(message)
        left = WaitBudget(self._send_timeout_s)
        self._usable()
        # With a timeout: another thread may be blocked in a send to a side that has stopped
        # reading.
        if not self._send_lock.acquire(timeout=self._send_timeout_s):
            raise self._not_read()
        try:
            # Again under the lock: the thread that held it may have failed in mid-message.
            self._usable()
            self._send(frame, fds, left)
        finally:
            self._send_lock.release()

    def _send(self, frame: bytes, fds: Sequence[int], left: WaitBudget) -> None:
        rest = memoryview(frame)
        complete = False
        touched = False
        try:
            while rest.nbytes:
                touched = True
                sent = self._stream.send_some(rest, fds)
                rest = rest[sent:]
                if sent:
                    # The descriptors went with the first byte: sending them again would duplicate
                    # them.
                    fds = ()
                    continue
                touched = rest.nbytes < len(frame)
                if not left.left_s:
                    raise self._end_sending(self._not_read())
                left.spend(lambda slice_s: self._stream.wait(write=True, timeout_s=slice_s))
            complete = True
        except OSError as error:
            raise self._end_sending(self._failed(error)) from error
        finally:
            # An interrupt has left a part of a message on the stream: the other side would take
            # the next message for the rest of this one.
            if touched and not complete:
                self._end_sending(KeeperError(f"a message to {self._other} was sent in part"))

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors, which the caller has to close; None at the
        end.

        If only a part of a message arrives within ``timeout_s``, it is not lost: the next call
        continues with it. With 0, only data that is already there is read.

        The end is reached when the other side has closed or ended between two messages, or when
        this side
        has called :meth:`close`.

        Raises:
            KeeperTimeoutError: no complete message arrived in time; the caller may try again.
            KeeperError: the data is invalid, or ends within a message. The connection can no longer
                be
                used.
        """
        deadline_s = time.monotonic() + timeout_s
        if not self._receive_lock.acquire(timeout=max(0.0, timeout_s)):
            raise KeeperTimeoutError(f"another thread is waiting for {self._other}")
        try:
            if self._closed:
                return None
            if self._stream.lost:
                raise self._forked()
            # After a failure in mid-message the stream has no boundaries any more.
            if self._receive_failure is not None:
                raise self._again(self._receive_failure)
            return self._receive(deadline_s)
        except OSError as error:
            raise self._break(self._failed(error)) from error
        finally:
            # An exception came between reading bytes and storing them: the stream position is
            # unknown.
            if self._moving:
                self._break(KeeperError(f"a message from {self._other} was interrupted"))
            self._receive_lock.release()

    def _receive(self, deadline_s: float) -> tuple[dict[str, Any], list[int]] | None:
        if not self._fill(self._header, _HEADER_BYTES, self._fds, deadline_s):
            if not self._header or self._closed:
                return None
            raise self._break(self._torn())
        size_bytes = int.from_bytes(self._header, "little")
        # Before anything is allocated: a wrong length means that the data is no message.
        if size_bytes > MESSAGE_BYTES_MAX:
            raise self._break(
                KeeperError(
                    f"a message from {self._other} claims {size_bytes} bytes, at most "
                    f"{MESSAGE_BYTES_MAX}"
                )
            )
        if not self._fill(self._body, size_bytes, None, deadline_s):
            if self._closed:
                return None
            raise self._break(self._torn())
        try:
            message = decode_message(self._body)
        except KeeperError as error:
            self._break(error)
            raise
        # Reset only after the message was decoded: a timeout keeps what has arrived so far.
        fds = self._fds
        self._fds = []
        self._header = bytearray()
        self._body = bytearray()
        return message, fds

    def _fill(
        self, target: bytearray, size_bytes: int, fds: list[int] | None, deadline_s: float
    ) -> bool:
        """Receive until ``target`` has ``size_bytes`` bytes; return False at the end of the
        stream."""
        while len(target) < size_bytes:
            self._moving = True
            try:
                data = self._stream.receive_some(min(size_bytes - len(target), _PIECE_BYTES), fds)
                if data:
                    target += data
            except OSError as error:
                self._moving = False
                if error.errno in _GONE:
                    return False
                raise
            self._moving = False
            if data == b"":
                return False
            if data is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise KeeperTimeoutError(f"{self._other} has sent nothing in time")
                self._stream.wait(write=False, timeout_s=left_s)
        return True

    def close(self) -> None:
        """Close; threads that wait in :meth:`receive` or :meth:`send` return at once.

        Messages sent before are still delivered. Harmless when repeated.
        """
        self._closed = True
        if self._stream.lost:
            return
        # First, to wake threads in send() and receive(), which hold the locks below.
        self._stream.shutdown()
        # Not while another thread is about to use the descriptor: after close() its number may
        # belong to another file. The shutdown has woken those threads, so this takes no time.
        locks = (self._send_lock, self._receive_lock)
        held = [lock for lock in locks if lock.acquire(timeout=_CLOSE_TIMEOUT_S)]
        try:
            self._stream.close()
            close_descriptors(self._fds)
            self._fds = []
        finally:
            for lock in held:
                lock.release()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- Failures ---

    def _usable(self) -> None:
        if self._stream.lost:
            raise self._forked()
        if self._closed:
            raise KeeperError(f"the connection to {self._other} was closed")
        if self._send_failure is not None:
            raise self._again(self._send_failure)

    def _end_sending(self, error: KeeperError) -> KeeperError:
        """Stop sending; of several reasons the first one is kept."""
        if self._send_failure is None:
            self._send_failure = error.message
        # Wakes threads that wait on this connection, and tells the other side.
        self._stream.shutdown()
        return error

    def _break(self, error: KeeperError) -> KeeperError:
        """Stop sending and receiving."""
        if self._receive_failure is None:
            self._receive_failure = error.message
        self._moving = False
        fds = self._fds
        self._fds = []
        # They belong to no message that a caller will get, and would leak.
        close_descriptors(fds)
        return self._end_sending(error)

    def _again(self, why: str) -> KeeperError:
        return KeeperError(f"the connection to {self._other} has failed: {why}")

    def _not_read(self) -> KeeperError:
        return KeeperTimeoutError(
            f"{self._other} has not read a message for {self._send_timeout_s:g} s: it hangs",
            hint="everstep ps shows its state; everstep stop --now ends it",
        )

    def _torn(self) -> KeeperError:
        return KeeperError(f"{self._other} is gone: it ended in the middle of a message")

    def _forked(self) -> KeeperError:
        return KeeperError(
            f"this process was forked from the one that is connected to {self._other}",
            hint="use the Checkpointer only in the process that made it",
        )

    def _failed(self, error: OSError) -> KeeperError:
        if self._stream.lost:
            return self._forked()
        if self._closed:
            return KeeperError(f"the connection to {self._other} was closed")
        if error.errno in _GONE and self.fileno() >= 0 and error.errno != errno.EBADF:
            return KeeperError(f"{self._other} is gone: it has closed the connection")
        return KeeperError(f"the connection to {self._other} failed: {error.strerror or error}")


def accept(listener: socket.socket, timeout_s: float) -> Connection | None:
    """Return the next connection of this user; None if there is none within ``timeout_s``.

    A connection of another user is closed.

    Raises:
        OSError: the listener is closed, or too many files are open.
    """
    stream = accept_stream(listener, timeout_s)
    if stream is None:
        return None
    # Checked with the kernel: the permissions of the runtime folder alone do not prove the user.
    try:
        is_own = stream.peer().uid == own_uid()
    except OSError:
        is_own = False
    if not is_own:
        stream.close()
        return None
    return Connection(stream, other="the trainer")


# --- Errors -----------------------------------------------------------------------------

_CLASSES: dict[str, type[EverstepError]] = {
    name: getattr(errors, name)
    for name in errors.__all__
    if issubclass(getattr(errors, name), EverstepError)
}
_COMMON = ("message", "step", "rank", "tier", "path", "hint")


def error_to_wire(error: BaseException) -> dict[str, Any]:
    """Encode an error with all its fields as part of a message.

    An exception that is not an :class:`~everstep.errors.EverstepError` becomes an internal error.
    """
    if not isinstance(error, EverstepError):
        return {"error": EverstepError.__name__, "message": f"internal error: {error!r}"}
    # The nearest public class: subclasses that only the keeper defines do not exist on the other
    # side.
    known = next(kind for kind in type(error).__mro__ if kind in _CLASSES.values())
    fields = {name: _plain(value) for name, value in vars(error).items() if name[0] != "_"}
    return {**fields, "error": known.__name__}


def error_from_wire(fields: Mapping[str, Any]) -> EverstepError:
    """Decode an error: same class, same fields.

    Accepts any fields; a class that this version does not have becomes an EverstepError.
    """
    kind = _CLASSES.get(str(fields.get("error")), EverstepError)
    message = fields.get("message")
    if not isinstance(message, str):
        message = f"internal error: an error without a message: {dict(fields)!r:.200}"
    # Not through the constructor of the class: its parameters differ, and may change between
    # versions.
    error = kind.__new__(kind, message)
    EverstepError.__init__(
        error,
        message,
        step=_of(int, fields.get("step")),
        rank=_of(int, fields.get("rank")),
        tier=_of(str, fields.get("tier")),
        path=_of(str, fields.get("path")),
        hint=_of(str, fields.get("hint")),
    )
    for name, value in fields.items():
        if name not in ("error", *_COMMON) and _is_field(kind, name):
            setattr(error, name, _frozen(value))
    return error


def _is_field(kind: type, name: Any) -> bool:
    """Return True if an error of this class may get an attribute of this name."""
    named = isinstance(name, str) and name.isidentifier() and not name.startswith("_")
    # A field from another process must not replace a method or property of the class.
    return named and not hasattr(kind, name)


def _of(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else None


def _plain(value: Any) -> Any:
    """Convert ``value`` to types of msgpack; other objects to their text."""
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return value
    # Integers of numpy have it, too.
    if hasattr(value, "__index__"):
        number = operator.index(value)
        # Integers of msgpack have 64 bits, signed or unsigned.
        return number if -(1 << 63) <= number < 1 << 64 else str(number)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def _frozen(value: Any) -> Any:
    """Convert lists back to the tuples that they were."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value
