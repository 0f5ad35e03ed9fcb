"""Event loop of the keeper process: it owns the arena and outlives the trainer.

One thread waits for messages and for the death of the trainer, another one
(:class:`.base_writer.BaseWriter`) writes; :class:`.duties.Duties` handles the messages. The death
of a trainer is noticed through its process descriptor, even while other processes still hold its
socket. Its complete captures are made durable, incomplete ones are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from everstep.arena.memory import Arena
from everstep.errors import EverstepError, KeeperError, KeeperTimeoutError
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.keeper.held.newest_capture import NewestCapture
from everstep.keeper.log.attached import AttachedTrainer
from everstep.keeper.persist.base_writer import BaseWriter
from everstep.keeper.process.duties import HANDLERS, Duties
from everstep.link.messages import PROTOCOL
from everstep.link.wire import Connection, accept, error_to_wire
from everstep.seams import Seams
from everstep.seams.network.sockets import close_descriptors
from everstep.seams.processes.processes import descriptors_max

__all__ = ["Server"]

_log = logging.getLogger("everstep.keeper")
_TICK_S = 0.2
_SETTLING_TICK_S = 0.02
_TELL_EVERY_S = 0.05
_USED_EVERY_S = 3600.0
_LOOK_EVERY_S = 1.0
_TRY_AGAIN_S = 10.0
_TIMEOUT_S = 120.0
_NONSENSE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EverstepError,
    LookupError,
    TypeError,
    ValueError,
)
# The trainer that has started the keeper is about to attach.
_FIRST_TRAINER_S = 60.0
_GUESTS_MAX = 64
# Divisor of the descriptor limit: the keeper needs the others for files and for other ranks.
_GUESTS_SHARE = 4
_ACCEPT_PAUSE_S = 0.5
# A guest that sends no complete message for so long is disconnected.
_GUEST_S = 10.0


class Server:
    """Serves one run and rank.

    A *guest* is a connection that is not attached as the trainer: ``everstep ps`` and ``stop``,
    readers, and trainers before they attach.

    Args:
        listener: socket for connections of trainers and guests.
        run: the run folder.
        version: version of everstep, for replies.
        linger_s: seconds without a trainer after which the keeper exits.
        writers: number of threads that write to disk.
        found: returns True while other processes can find this keeper in the runtime folder.
        again: registers this keeper again and returns its new listener; None if another keeper has
            taken its place.
        leave: releases the registration; called at the end, before clients that said goodbye are
            disconnected, so that they then find a run without a keeper.
        refresh_times: refreshes the registration files, so that no cleanup of old files removes
            them.
    """

    def __init__(
        self,
        listener: socket.socket,
        run: PurePath,
        *,
        version: str,
        linger_s: float,
        writers: int = WRITERS,
        found: Callable[[], bool] = lambda: True,
        again: Callable[[], socket.socket | None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
        refresh_times: Callable[[], None] = lambda: None,
        seams: Seams | None = None,
    ) -> None:
        self._listener = listener
        self._found = found
        self._again = again
        self._leave = leave
        self._still_used = refresh_times
        self._run = run
        self._version = version
        self._linger_s = linger_s
        self._seams = seams or Seams()
        self._clock = self._seams.clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._guests: dict[Connection, float] = {}  # time of the last message of each
        most = descriptors_max()
        self._guests_max = _GUESTS_MAX
        if most is not None:
            self._guests_max = max(1, min(_GUESTS_MAX, most // _GUESTS_SHARE))
        self._listens_again_s: float | None = None  # set while accepting is paused
        self._ring = ChunkRing(CHUNKS - WRITERS + writers, writers)
        self._trainer: AttachedTrainer | None = None
        self._duties = Duties(self._seams, run, self._ring, timeout_s=_TIMEOUT_S)
        self._farewells: list[Connection] = []
        self._settling = False
        self._progress_sent_s = 0.0
        self._used_s = self._look_s = self._clock.monotonic_s()
        self._hidden = False  # the registration is lost, and that was reported
        self._replaced = False  # another keeper is registered in its place
        self._ending = False
        self._stopping = False
        self._alone_since_s = self._clock.monotonic_s()
        self._alone_s_max = _FIRST_TRAINER_S  # short: it holds nothing yet

    @property
    def _keeper(self) -> BaseWriter | None:
        return self._duties.keeper

    @property
    def _newest_capture(self) -> NewestCapture:
        return self._duties.newest_capture

    def run(self) -> None:
        """Serve until the keeper is no longer needed."""
        try:
            while not self._over():
                self._turn(_SETTLING_TICK_S if self._settling or self._ending else _TICK_S)
        finally:
            self._duties.close()
            self._ring.close()
            # Order matters: all work first, then the registration, then the connections of clients
            # that said goodbye. They take the end of the connection as the sign that the run has no
            # keeper any more.
            self._leave()
            self._listener.close()
            self._hang_up_farewells()

    def _turn(self, timeout_s: float) -> None:
        """Handle the events that arrive within ``timeout_s``, then the periodic work."""
        for key, _ in self._selector.select(timeout_s):
            # An earlier handler of this round may have closed the connection, and its descriptor
            # number may already belong to another one: handle only what is still registered.
            if self._selector.get_map().get(key.fd) is key:
                key.data(key.fileobj)
        self._tick()

    def end(self) -> None:
        """Refuse new trainers, make complete captures durable, then let :meth:`run` return."""
        self._ending = self._stopping = self._duties.stopping = True

    def _over(self) -> bool:
        """Return True when the keeper may exit: nothing to write, and no trainer to wait for."""
        # Never exit while a complete capture is not durable.
        if self._keeper is not None and self._keeper.waiting:
            return False
        alone_s = self._clock.monotonic_s() - self._alone_since_s
        over = self._ending or (self._trainer is None and alone_s > self._alone_s_max)
        return over and not self._duties.finish()

    def _tick(self) -> None:
        """Do the periodic work: deadlines, guests, registration, progress."""
        duties = self._duties
        # Advances the clock that leaves out time in which this process stood still: all deadlines
        # in this process rely on a regular call.
        self._clock.running_s()
        # At each turn, as work that hangs calls nothing by itself.
        duties.pass_on(duties.channel)
        now_s = self._clock.monotonic_s()
        self._check_connections(now_s)
        trainer = self._trainer
        if now_s - self._used_s >= _USED_EVERY_S:
            self._used_s = now_s
            self._still_used()
        if trainer is not None and (
            trainer.unreachable or (trainer.watch.pid and trainer.watch.ended())
        ):
            self._lose_trainer(trainer)
            return
        if now_s >= self._look_s and not self._ending:
            self._look_s = now_s + _LOOK_EVERY_S
            self._check_registration(trainer)
        if trainer is not None:
            self._send_progress(trainer, now_s)

    def _check_connections(self, now_s: float) -> None:
        """Disconnect silent guests; resume accepting after a pause."""
        for guest in [guest for guest, s in self._guests.items() if now_s - s > _GUEST_S]:
            self._hang_up(guest)
        if self._listens_again_s is not None and now_s >= self._listens_again_s:
            self._listen_again()

    def _send_progress(self, trainer: AttachedTrainer, now_s: float) -> None:
        """Send counters now and then, and ``settled`` when everything queued was written."""
        keeper = self._keeper
        # At most every _TELL_EVERY_S: each message wakes the training process.
        if keeper is not None and now_s - self._progress_sent_s >= _TELL_EVERY_S:
            self._progress_sent_s = now_s
            channel = self._duties.channel
            trainer.send(
                {
                    "kind": "progress",
                    "written_bytes": keeper.written_bytes,
                    "moves": [keeper.moves, keeper.log_moves],
                    "hung": channel is not None and channel.hung(),
                    **self._duties.stats(),
                }
            )
        if self._settling and (keeper is None or not keeper.waiting):
            self._settling = False
            trainer.send({"kind": "settled"})

    def _check_registration(self, trainer: AttachedTrainer | None) -> None:
        """Register again if the files in the runtime folder were removed.

        Without them no restarted trainer finds this keeper, and all state in its memory is lost.
        """
        if self._found():
            self._hidden = False
            return
        # Nothing in memory is worth keeping, or another keeper serves the run: exit.
        if trainer is None and (self._replaced or not self._has_only_copy()):
            self.end()
            return
        if self._replaced:
            return
        try:
            listener = self._again()
        except KeeperError as error:
            self._look_s += _TRY_AGAIN_S - _LOOK_EVERY_S
            self._report_hidden(trainer, error, f"the keeper tries again every {_TRY_AGAIN_S:g} s")
            return
        if listener is None:
            # For good: even if that keeper ends, the run has continued without this one.
            self._replaced = True
            why = KeeperError("another keeper of this run has its place", path=self._run)
            self._report_hidden(trainer, why, "everstep ps shows it")
            return
        self._hidden = False
        # Accept the connections that wait in the old listener's queue before it is closed.
        while self._accept(self._listener):
            pass
        if self._listens_again_s is None:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        self._listen_again()
        _log.warning("the registration files in the runtime folder were removed: written again")

    def _has_only_copy(self) -> bool:
        """Return True if memory holds state that a later trainer may need and no disk has."""
        peers = self._duties.peers
        logs = self._duties.logs
        held = self._newest_capture.is_only_copy or bool(peers.store.held or peers.logs.held)
        if not held and logs.memory_step is None:
            return False
        try:
            self._seams.filesystem.scan(self._run)
        except (FileNotFoundError, NotADirectoryError):
            # The run folder itself was removed: nobody will resume it.
            return False
        except OSError:
            pass
        return True

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
            if received is not None:
                if connection in self._guests:
                    self._guests[connection] = self._clock.monotonic_s()
                self._on_message(connection, *received)
                return
        except KeeperTimeoutError:
            # Only a part of the message has arrived: wait for the rest.
            return
        except (KeeperError, OSError) as error:
            _log.warning("a connection was closed: %s", error)
        self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        if self._trainer is not None and self._trainer.connection is connection:
            self._lose_trainer(self._trainer)
            return
        self._guests.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _on_message(
        self, connection: Connection, message: dict[str, Any], fds: Sequence[int]
    ) -> None:
        """Handle one message.

        Raises:
            KeeperError: the message is invalid; the caller closes the connection.
        """
        # No message to a keeper carries descriptors: close any, so that they do not leak.
        close_descriptors(fds)
        try:
            self._dispatch(connection, message)
        except KeeperError:
            raise
        except _NONSENSE as error:
            kind = message.get("kind")
            raise KeeperError(f"invalid message {kind!r}: {error!r}") from error

    def _dispatch(self, connection: Connection, message: dict[str, Any]) -> None:
        """Handle messages of any client; pass those of the trainer on to its duties."""
        kind = message.get("kind")
        if kind == "status":
            connection.send(self._status())
        elif kind == "look":
            self._show_memory(connection, message)
        elif kind == "stop":
            _log.info("received a request to stop")
            connection.send({"kind": "stopping"})
            # Not subject to the guest timeout: the client waits until this keeper has ended.
            self._guests.pop(connection, None)
            self.end()
        elif kind == "attach":
            self._attach(connection, message)
        elif self._trainer is not None and self._trainer.connection is connection:
            self._dispatch_to_duty(self._trainer, str(kind), message)
        else:
            raise KeeperError(f"message {kind!r} from a process that is not attached")

    def _dispatch_to_duty(
        self, trainer: AttachedTrainer, kind: str, message: dict[str, Any]
    ) -> None:
        """Handle a message of the trainer that is attached."""
        if kind == "settle":
            self._on_settle(trainer, message)
        elif kind == "bye":
            self._on_bye(trainer, message)
        elif kind in HANDLERS:
            HANDLERS[kind](self._duties, trainer, message)
        else:
            raise KeeperError(f"unknown message {kind!r}")

    def _show_memory(self, connection: Connection, message: dict[str, Any]) -> None:
        """Send the contents of memory to a process that only reads them."""
        trainer = self._trainer
        # A dead trainer first: its last messages may announce a complete capture.
        if trainer is not None and (trainer.unreachable or trainer.watch.ended()):
            self._lose_trainer(trainer)
            trainer = self._trainer
        if message.get("protocol") != PROTOCOL:
            connection.send({"kind": "refused", "version": self._version, "protocol": PROTOCOL})
            return
        self._duties.look(served=trainer is not None).send(
            connection, None if trainer is None else trainer.watch.pid
        )

    def _attach(self, connection: Connection, message: dict[str, Any]) -> None:
        """Attach a trainer, which replaces the one before.

        Raises:
            KeeperError: the keeper was asked to stop, or the connection is attached already.
        """
        trainer = self._trainer
        # ``idle``: attach only if no live trainer is attached.
        busy = message.get("idle") and trainer is not None and not trainer.watch.ended()
        if busy or message.get("protocol") != PROTOCOL:
            connection.send(
                {"kind": "refused", "version": self._version, "protocol": PROTOCOL, "error": None}
            )
            return
        if self._stopping:
            raise KeeperError("this keeper was asked to stop")
        if self._trainer is not None and self._trainer.connection is connection:
            raise KeeperError("this connection is already attached")
        # From the kernel, which cannot be mistaken.
        pid = connection.peer().pid
        timeout_s = float(message["timeout_s"])
        try:
            arena = Arena.create(message["arena_bytes"])
        except EverstepError as error:
            connection.send({"kind": "refused", "error": error_to_wire(error)})
            # This process keeps the memory limits that it was started with. While it holds
            # nothing, let it end, so that a trainer with higher limits gets a new keeper.
            if self._trainer is None and self._keeper is None:
                self.end()
            return
        # The arena exists: only now end the previous attachment, as nothing can fail any more.
        if self._trainer is not None:
            self._trainer.send({"kind": "replaced", "pid": pid})
            self._lose_trainer(self._trainer)
        # The keeper may have been about to exit after a goodbye: not any more.
        self._ending = self._stopping
        self._hang_up_farewells()
        self._duties.timeout_s = timeout_s
        self._guests.pop(connection, None)
        self._trainer = trainer = AttachedTrainer(connection, pid, arena)
        self._alone_s_max = self._linger_s
        # A process descriptor becomes readable at death, even if children keep the socket open.
        if (death := trainer.watch.fileno()) is not None:
            self._selector.register(death, selectors.EVENT_READ, self._on_death)
        assert arena.fd is not None
        connection.send({"kind": "welcome", "version": self._version}, [arena.fd])
        _log.info("process %d attached, arena of %d bytes", pid, arena.size_bytes)

    def _on_death(self, _: int) -> None:
        if self._trainer is not None:
            self._lose_trainer(self._trainer)

    def _lose_trainer(self, trainer: AttachedTrainer) -> None:
        """Detach a trainer that has ended: persist its complete captures, drop the others."""
        # First, as messages that it sent before it died may complete a capture.
        self._drain(trainer)
        # Its last message was ``bye``, which has detached it already.
        if self._trainer is not trainer:
            return
        _log.info("process %d has ended or detached", trainer.watch.pid)
        self._trainer = None
        trainer.unreachable = True
        self._settling = False
        # Check the registration at once: a restarted trainer will look for this keeper soon.
        self._alone_since_s = self._look_s = self._clock.monotonic_s()
        if (death := trainer.watch.fileno()) is not None:
            self._selector.unregister(death)
        trainer.watch.close()
        self._selector.unregister(trainer.connection)
        self._farewells.append(trainer.connection)
        # After ``bye`` the connection stays open until this keeper ends: the trainer waits for
        # that.
        if not trainer.detaching:
            self._hang_up_farewells()
        # After the detachment: replies of the duties to this trainer are dropped silently.
        self._duties.lose(trainer)

    def _hang_up_farewells(self) -> None:
        """Close the connections of clients that said goodbye and wait for the end of
        this keeper."""
        for connection in self._farewells:
            connection.close()
        self._farewells.clear()

    def _drain(self, trainer: AttachedTrainer) -> None:
        """Handle the messages that a trainer sent before it died.

        They may announce that a capture is complete, or that one is about to be overwritten.
        """
        # The stream may end in the middle of a message: its sender died while sending.
        with contextlib.suppress(KeeperError, OSError):
            while self._trainer is trainer:
                received = trainer.connection.receive(0.0)
                if received is None:
                    return
                self._on_message(trainer.connection, *received)

    def _status(self) -> dict[str, Any]:
        """Return the reply to ``status`` (``everstep ps``)."""
        keeper = self._keeper
        trainer = self._trainer
        logs = self._duties.logs
        alone_s = self._clock.monotonic_s() - self._alone_since_s
        return {
            "kind": "status",
            "trainer": None if trainer is None else trainer.watch.pid,
            "log_step": logs.memory_step if self._duties.replicas.step is None else None,
            "held": [] if self._duties.held_step is None else [self._duties.held_step],
            "writing": [] if keeper is None else [capture.step for capture in keeper.waiting],
            "durable_step": None if keeper is None else keeper.stats.durable_step,
            "idle_s": 0.0 if trainer is not None else alone_s,
            "ends_in_s": None if trainer is not None else max(0.0, self._alone_s_max - alone_s),
            "arena_bytes": self._duties.arena_bytes(trainer),
            "copies": [list(copy) for copy in self._duties.peers.store.held],
            "logs": [list(one) for one in self._duties.peers.logs.held.items()],
        }

    def _on_settle(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        self._settling = True
        self._duties.settle()

    def _on_bye(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        trainer.detaching = not message.get("stay")
        self._lose_trainer(trainer)
        # ``stay``: the keeper waits for the next trainer, as after a crash.
        if not trainer.detaching:
            return
        # A state that no disk has outlives the goodbye: the keeper then lingers instead.
        self._ending = self._stopping or not self._newest_capture.is_only_copy
        if not self._ending:
            self._hang_up_farewells()
