"""Sockets of the keeper process: accept connections, wait for messages.

Registration of the keeper in the runtime folder, renewed if its files are removed.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, Protocol

from everstep.errors import KeeperError, KeeperTimeoutError
from everstep.keeper.process.duty import AttachedTrainer
from everstep.link import Connection, error_to_wire
from everstep.link.wire import accept
from everstep.seams import Clock
from everstep.seams.machine import limit_of

_log = logging.getLogger("everstep.keeper")
_GUESTS_MAX = 64
# Divisor of the descriptor limit: the keeper needs the others for files and for other ranks.
_GUESTS_SHARE = 4
_ACCEPT_PAUSE_S = 0.5
# A guest that sends no complete message for so long is disconnected.
_GUEST_S = 10.0


class MessageHandler(Protocol):
    """Receives messages, and the ends of connections that are not guests'."""

    def on_message(self, connection: Connection, message: Any, fds: Sequence[int]) -> None:
        """Handle one message.

        Raises:
            KeeperError: the message is invalid; the connection is closed.
        """
        ...

    def on_end(self, connection: Connection) -> bool:
        """Handle the end of a connection; return False if it is a guest's, to be closed here."""
        ...


class Connections:
    """Listener and connections of one keeper, in one event loop.

    A *guest* is a connection that is not attached as the trainer: ``everstep ps`` and ``stop``,
    readers, and trainers before they attach.

    Args:
        listener: socket for connections of trainers and guests.
    """

    def __init__(self, listener: socket.socket, handler: MessageHandler, clock: Clock) -> None:
        self._listener = listener
        self._handler = handler
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._guests: dict[Connection, float] = {}  # time of the last message of each
        self._farewells: list[Connection] = []
        most = limit_of("RLIMIT_NOFILE")
        self._guests_max = _GUESTS_MAX
        if most is not None:
            self._guests_max = max(1, min(_GUESTS_MAX, most // _GUESTS_SHARE))
        self._listens_again_s: float | None = None  # set while accepting is paused

    @property
    def count(self) -> int:
        """Number of sockets that are read, with the listener."""
        return len(self._selector.get_map())

    def turn(self, timeout_s: float) -> None:
        """Handle the events that arrive within ``timeout_s``."""
        for key, _ in self._selector.select(timeout_s):
            # An earlier handler of this round may have closed the connection, and its descriptor
            # number may already belong to another one: handle only what is still registered.
            if self._selector.get_map().get(key.fd) is key:
                key.data(key.fileobj)

    def tick(self) -> None:
        """Disconnect silent guests; resume accepting after a pause."""
        now_s = self._clock.monotonic_s()
        for guest in [guest for guest, s in self._guests.items() if now_s - s > _GUEST_S]:
            self._hang_up(guest)
        if self._listens_again_s is not None and now_s >= self._listens_again_s:
            self._listen_again()

    def watch(self, descriptor: int, on_readable: Callable[[Any], None]) -> None:
        """Call ``on_readable`` when a descriptor becomes readable, until :meth:`unwatch`."""
        self._selector.register(descriptor, selectors.EVENT_READ, on_readable)

    def unwatch(self, descriptor: int) -> None:
        """End :meth:`watch`."""
        self._selector.unregister(descriptor)

    def adopt(self, guest: Connection) -> None:
        """Make a guest a connection that may be silent for as long as it likes."""
        self._guests.pop(guest, None)

    def say_farewell(self, connection: Connection) -> None:
        """Read no more from a connection, but keep it open until :meth:`hang_up_farewells`."""
        self._selector.unregister(connection)
        self._farewells.append(connection)

    def hang_up_farewells(self) -> None:
        """Close the connections of clients that said goodbye and wait for the end of this
        keeper."""
        for connection in self._farewells:
            connection.close()
        self._farewells.clear()

    def replace_listener(self, listener: socket.socket) -> None:
        """Accept connections at another socket from now on."""
        # Accept the connections that wait in the old listener's queue before it is closed.
        while self._accept(self._listener):
            pass
        if self._listens_again_s is None:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        self._listen_again()

    def close_listener(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
        self.hang_up_farewells()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Connection):
                key.fileobj.close()
        self._selector.close()

    def _accept(self, listener: Any) -> bool:
        """Accept one connection as a guest; return False if there is none."""
        try:
            connection = accept(listener, 0.0)
        except OSError as error:
            self._pause_accepting(error)
            return False
        if connection is None:
            return False
        # The oldest makes way: many idle connections must not keep a trainer from attaching.
        if len(self._guests) >= self._guests_max:
            self._hang_up_oldest()
        self._guests[connection] = self._clock.monotonic_s()
        self._selector.register(connection, selectors.EVENT_READ, self._on_readable)
        return True

    def _pause_accepting(self, error: OSError) -> None:
        """Stop accepting connections for a while, mostly for lack of descriptors."""
        _log.warning("no connection can be accepted for %g s: %s", _ACCEPT_PAUSE_S, error)
        # The keeper must survive this, as it may have the only copy of the log: free a descriptor.
        if self._guests:
            self._hang_up_oldest()
        # The connection stays in the listener's queue, so the selector would return at once, for
        # ever: leave the listener out of it for a while.
        if self._listens_again_s is None:
            self._selector.unregister(self._listener)
        self._listens_again_s = self._clock.monotonic_s() + _ACCEPT_PAUSE_S

    def _listen_again(self) -> None:
        self._listens_again_s = None
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _hang_up_oldest(self) -> None:
        self._hang_up(min(self._guests, key=self._guests.__getitem__))

    def _on_readable(self, connection: Connection) -> None:
        try:
            # Without waiting: a guest that sends half a message must not block the keeper.
            received = connection.receive(0.0)
            # receive() takes no byte of a second message from the socket, so the selector reports
            # that one in the next turn.
            if received is not None:
                if connection in self._guests:
                    self._guests[connection] = self._clock.monotonic_s()
                self._handler.on_message(connection, *received)
                return
        except KeeperTimeoutError:
            # Only a part of the message has arrived: wait for the rest.
            return
        except (KeeperError, OSError) as error:
            _log.warning("a connection was closed: %s", error)
        self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        if self._handler.on_end(connection):
            return
        self._guests.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()


_REFRESH_EVERY_S = 3600.0
_LOOK_EVERY_S = 1.0
_TRY_AGAIN_S = 10.0


class Registered(Protocol):
    """Registration of this keeper, through which other processes find it."""

    @property
    def is_current(self) -> bool:
        """True while other processes can find this keeper."""
        ...

    def again(self) -> socket.socket | None:
        """Register again; return the new listener, or None if another keeper has the place."""
        ...

    def release(self) -> None:
        """Release the registration."""
        ...

    def refresh_times(self) -> None:
        """Refresh the files, so that no cleanup of old files removes them."""
        ...


class Presence:
    """Keeps this keeper findable.

    Without its files in the runtime folder no restarted trainer finds this keeper, and all state in
    its memory is lost.

    Args:
        run: the run folder.
    """

    def __init__(
        self, registration: Registered, connections: Connections, run: PurePath, clock: Clock
    ) -> None:
        self._registration = registration
        self._connections = connections
        self._run = run
        self._clock = clock
        self._refresh_s = clock.monotonic_s() + _REFRESH_EVERY_S
        self._look_s = clock.monotonic_s()
        self._hidden = False  # the registration is lost, and that was reported
        self._replaced = False  # another keeper is registered in its place

    def refresh(self) -> None:
        """Refresh the files now and then."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._refresh_s:
            self._refresh_s = now_s + _REFRESH_EVERY_S
            self._registration.refresh_times()

    def look_at_once(self) -> None:
        """Check the registration at the next turn: a restarted trainer will look for it soon."""
        self._look_s = self._clock.monotonic_s()

    def check(self, trainer: AttachedTrainer | None, holds_only_copy: Callable[[], bool]) -> bool:
        """Register again if the files in the runtime folder were removed.

        Args:
            trainer: trainer that is attached, to be warned.
            holds_only_copy: returns True if memory holds state that no disk has.

        Returns:
            False if this keeper has to end: nobody needs it, or another one serves the run.
        """
        now_s = self._clock.monotonic_s()
        if now_s < self._look_s:
            return True
        self._look_s = now_s + _LOOK_EVERY_S
        if self._registration.is_current:
            self._hidden = False
            return True
        if trainer is None and (self._replaced or not holds_only_copy()):
            return False
        if self._replaced:
            return True
        try:
            listener = self._registration.again()
        except KeeperError as error:
            self._look_s += _TRY_AGAIN_S - _LOOK_EVERY_S
            self._report_hidden(trainer, error, f"the keeper tries again every {_TRY_AGAIN_S:g} s")
            return True
        if listener is None:
            # For good: even if that keeper ends, the run has continued without this one.
            self._replaced = True
            why = KeeperError("another keeper of this run has its place", path=self._run)
            self._report_hidden(trainer, why, "everstep ps shows it")
            return True
        self._hidden = False
        self._connections.replace_listener(listener)
        _log.warning("the registration files in the runtime folder were removed: written again")
        return True

    def release(self) -> None:
        """Release the registration: from here on other processes find no keeper."""
        self._registration.release()

    def _report_hidden(self, trainer: AttachedTrainer | None, why: KeeperError, then: str) -> None:
        """Warn once that no restarted trainer can find this keeper."""
        if self._hidden:
            return
        self._hidden = True
        notice = KeeperError(
            "no other process can find the keeper of this process any more: its files in the "
            f"runtime folder were removed and cannot be recreated: {why.message}",
            path=why.path,
            hint=f"{then}. Steps since the newest base on disk are lost if this process is killed: "
            "ckpt.save() takes a base now",
        )
        _log.error("%s", notice)
        if trainer is not None:
            trainer.send({"kind": "notice", "error": error_to_wire(notice)})
