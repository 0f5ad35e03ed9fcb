"""Event loop of the keeper process: it owns the arena and outlives the trainer.

One thread waits for messages and for the death of the trainer, another one
(:class:`.base_writer.BaseWriter`) writes; :class:`.duties.Duties` handles the messages. The death
of a trainer is noticed through its process descriptor, even while other processes still hold its
socket. Its complete captures are made durable, incomplete ones are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from everstep.arena import Arena
from everstep.errors import EverstepError, KeeperError
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.keeper.process.connections import Connections, Presence, Registered
from everstep.keeper.process.duties import Duties
from everstep.keeper.process.duty import AttachedTrainer
from everstep.link import Connection, error_to_wire
from everstep.link.messages import PROTOCOL
from everstep.seams import Seams
from everstep.seams.sockets import close_descriptors

_log = logging.getLogger("everstep.keeper")
_TICK_S = 0.2
_SETTLING_TICK_S = 0.02
_TELL_EVERY_S = 0.05
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


class Server:
    """Serves one run and rank.

    Args:
        listener: socket for connections of trainers and guests.
        run: the run folder.
        registration: registration of this keeper. It is released at the end, before clients that
            said goodbye are disconnected, so that they then find a run without a keeper.
        version: version of everstep, for replies.
        linger_s: seconds without a trainer after which the keeper exits.
        writers: number of threads that write to disk.

    Attributes:
        duties: what this keeper does for the trainer.
        trainer: training process that is attached; None without one.
        connections: sockets of trainers and guests.
    """

    def __init__(
        self,
        listener: socket.socket,
        run: PurePath,
        registration: Registered,
        *,
        version: str,
        linger_s: float,
        writers: int = WRITERS,
        seams: Seams | None = None,
    ) -> None:
        seams = seams or Seams()
        self._run = run
        self._version = version
        self._linger_s = linger_s
        self._filesystem = seams.filesystem
        self._clock = seams.clock
        self.connections = Connections(listener, self, seams.clock)
        self._presence = Presence(registration, self.connections, run, seams.clock)
        # As many chunks beyond one per writer as by default.
        self._ring = ChunkRing(CHUNKS - WRITERS + writers, writers)
        self.duties = Duties(seams, run, self._ring)
        self.trainer: AttachedTrainer | None = None
        self._settling = False
        self._ending = False
        self._progress_sent_s = 0.0
        self._alone_since_s = self._clock.monotonic_s()
        self._alone_s_max = _FIRST_TRAINER_S  # short: it holds nothing yet

    def run(self) -> None:
        """Serve until the keeper is no longer needed."""
        try:
            while not self.is_over():
                self.turn(_SETTLING_TICK_S if self._settling or self._ending else _TICK_S)
        finally:
            self.duties.close()
            self._ring.close()
            # Order matters: all work first, then the registration, then the connections of clients
            # that said goodbye. They take the end of the connection as the sign that the run has no
            # keeper any more.
            self._presence.release()
            self.connections.close_listener()
            self.connections.hang_up_farewells()

    def turn(self, timeout_s: float) -> None:
        """Handle the events that arrive within ``timeout_s``, then the periodic work."""
        self.connections.turn(timeout_s)
        self._tick()

    def end(self) -> None:
        """Refuse new trainers, make complete captures durable, then let :meth:`run` return."""
        self._ending = self.duties.bases.stopping = True

    def is_over(self) -> bool:
        """Return True when the keeper may exit: nothing to write, and no trainer to wait for."""
        writer = self.duties.writer
        # Never exit while a complete capture is not durable.
        if writer is not None and writer.waiting:
            return False
        alone_s = self._clock.monotonic_s() - self._alone_since_s
        over = self._ending or (self.trainer is None and alone_s > self._alone_s_max)
        # finish() starts the last work of the keeper: called only if nothing else keeps it alive.
        return over and not self.duties.finish()

    def close(self) -> None:
        """Close the sockets and threads of a server that :meth:`run` has not closed."""
        self._ring.close()
        self.connections.close()

    def _tick(self) -> None:
        """Do the periodic work: deadlines, guests, registration, progress."""
        # Advances the clock that leaves out time in which this process stood still: all deadlines
        # in this process rely on a regular call.
        self._clock.running_s()
        # At each turn, as work that hangs calls nothing by itself.
        self.duties.pass_on()
        self.connections.tick()
        self._presence.refresh()
        trainer = self.trainer
        if trainer is not None and trainer.has_ended:
            self._lose_trainer(trainer)
            return
        if not self._ending and not self._presence.check(trainer, self._has_only_copy):
            self.end()
        if trainer is not None:
            self._send_progress(trainer)

    def _has_only_copy(self) -> bool:
        """Return True if memory holds state that a later trainer may need and no disk has."""
        if not self.duties.holds_only_copy:
            return False
        try:
            self._filesystem.scan(self._run)
        except (FileNotFoundError, NotADirectoryError):
            # The run folder itself was removed: nobody will resume it.
            return False
        except OSError:
            # The disk is not available now; it may be when a trainer restarts.
            pass
        return True

    def _send_progress(self, trainer: AttachedTrainer) -> None:
        """Send counters now and then, and ``settled`` when everything queued was written."""
        timeline = self.duties.timeline
        now_s = self._clock.monotonic_s()
        # At most every _TELL_EVERY_S: each message wakes the training process.
        if timeline is not None and now_s - self._progress_sent_s >= _TELL_EVERY_S:
            self._progress_sent_s = now_s
            writer = timeline.writer
            trainer.send(
                {
                    "kind": "progress",
                    "written_bytes": writer.written_bytes,
                    "moves": [writer.moves, writer.log_moves],
                    "hung": timeline.channel.hung(),
                    **self.duties.stats(),
                }
            )
        if self._settling and (timeline is None or not timeline.writer.waiting):
            self._settling = False
            trainer.send({"kind": "settled"})

    def on_message(self, connection: Connection, message: Any, fds: Sequence[int]) -> None:
        """Handle one message: of any client, or of the trainer, for its duty.

        Raises:
            KeeperError: the message is invalid; the caller closes the connection.
        """
        # No message to a keeper carries descriptors: close any, so that they do not leak.
        close_descriptors(fds)
        kind = message.get("kind")
        try:
            if kind in _GUEST_HANDLERS:
                _GUEST_HANDLERS[kind](self, connection, message)
                return
            trainer = self.trainer
            if trainer is None or trainer.connection is not connection:
                raise KeeperError(f"message {kind!r} from a process that is not attached")
            if kind in _TRAINER_HANDLERS:
                _TRAINER_HANDLERS[kind](self, trainer, message)
            elif kind in self.duties.handlers:
                self.duties.handlers[kind](trainer, message)
            else:
                raise KeeperError(f"unknown message {kind!r}")
        except KeeperError:
            raise
        except _NONSENSE as error:
            raise KeeperError(f"invalid message {kind!r}: {error!r}") from error

    def on_end(self, connection: Connection) -> bool:
        """Lose the trainer with its connection; return False for a guest's connection."""
        if self.trainer is None or self.trainer.connection is not connection:
            return False
        self._lose_trainer(self.trainer)
        return True

    def _send_status(self, connection: Connection, message: Any) -> None:
        connection.send(self.status())

    def _stop(self, connection: Connection, message: Any) -> None:
        _log.info("received a request to stop")
        connection.send({"kind": "stopping"})
        # Not subject to the guest timeout: the client waits until this keeper has ended.
        self.connections.adopt(connection)
        self.end()

    def _show_memory(self, connection: Connection, message: Any) -> None:
        """Send the contents of memory to a process that only reads them."""
        trainer = self.trainer
        # A dead trainer first: its last messages may announce a complete capture.
        if trainer is not None and trainer.has_ended:
            self._lose_trainer(trainer)
            trainer = self.trainer
        if message.get("protocol") != PROTOCOL:
            connection.send({"kind": "refused", "version": self._version, "protocol": PROTOCOL})
            return
        self.duties.recalls.look(served=trainer is not None).send(
            connection, None if trainer is None else trainer.watch.pid
        )

    def _attach(self, connection: Connection, message: Any) -> None:
        """Attach a trainer, which replaces the one before.

        Raises:
            KeeperError: the keeper was asked to stop, or the connection is attached already.
        """
        trainer = self.trainer
        # ``idle``: attach only if no live trainer is attached.
        busy = message.get("idle") and trainer is not None and not trainer.has_ended
        if busy or message.get("protocol") != PROTOCOL:
            connection.send(
                {"kind": "refused", "version": self._version, "protocol": PROTOCOL, "error": None}
            )
            return
        if self.duties.bases.stopping:
            raise KeeperError("this keeper was asked to stop")
        if self.trainer is not None and self.trainer.connection is connection:
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
            if self.trainer is None and self.duties.timeline is None:
                self.end()
            return
        # The arena exists: only now end the previous attachment, as nothing can fail any more.
        if self.trainer is not None:
            self.trainer.send({"kind": "replaced", "pid": pid})
            self._lose_trainer(self.trainer)
        # The keeper may have been about to exit after a goodbye: not any more.
        self._ending = self.duties.bases.stopping
        self.connections.hang_up_farewells()
        self.connections.adopt(connection)
        self.trainer = trainer = AttachedTrainer(connection, pid, arena, timeout_s=timeout_s)
        self._alone_s_max = self._linger_s
        # A process descriptor becomes readable at death, even if children keep the socket open.
        if (death := trainer.watch.fileno()) is not None:
            self.connections.watch(death, self._on_death)
        assert arena.fd is not None
        connection.send({"kind": "welcome", "version": self._version}, [arena.fd])
        _log.info("process %d attached, arena of %d bytes", pid, arena.size_bytes)

    def _on_death(self, _: int) -> None:
        if self.trainer is not None:
            self._lose_trainer(self.trainer)

    def _lose_trainer(self, trainer: AttachedTrainer) -> None:
        """Detach a trainer that has ended: persist its complete captures, drop the others."""
        # First, as messages that it sent before it died may complete a capture.
        self._drain(trainer)
        # Its last message was ``bye``, which has detached it already.
        if self.trainer is not trainer:
            return
        _log.info("process %d has ended or detached", trainer.watch.pid)
        self.trainer = None
        trainer.unreachable = True
        self._settling = False
        self._alone_since_s = self._clock.monotonic_s()
        self._presence.look_at_once()
        if (death := trainer.watch.fileno()) is not None:
            self.connections.unwatch(death)
        trainer.watch.close()
        self.connections.say_farewell(trainer.connection)
        # After ``bye`` the connection stays open until this keeper ends: the trainer waits for
        # that.
        if not trainer.detaching:
            self.connections.hang_up_farewells()
        # After the detachment: replies of the duties to this trainer are dropped silently.
        self.duties.lose(trainer)

    def _drain(self, trainer: AttachedTrainer) -> None:
        """Handle the messages that a trainer sent before it died.

        They may announce that a capture is complete, or that one is about to be overwritten.
        """
        # The stream may end in the middle of a message: its sender died while sending.
        with contextlib.suppress(KeeperError, OSError):
            while self.trainer is trainer:
                received = trainer.connection.receive(0.0)
                if received is None:
                    return
                self.on_message(trainer.connection, *received)

    def status(self) -> dict[str, Any]:
        """Return the reply to ``status`` (``everstep ps``)."""
        writer = self.duties.writer
        trainer = self.trainer
        logs = self.duties.logs
        alone_s = self._clock.monotonic_s() - self._alone_since_s
        return {
            "kind": "status",
            "trainer": None if trainer is None else trainer.watch.pid,
            "log_step": logs.memory_step if self.duties.replicas.step is None else None,
            "held": [] if self.duties.held_step is None else [self.duties.held_step],
            "writing": [] if writer is None else [capture.step for capture in writer.waiting],
            "durable_step": None if writer is None else writer.stats.durable_step,
            "idle_s": 0.0 if trainer is not None else alone_s,
            "ends_in_s": None if trainer is not None else max(0.0, self._alone_s_max - alone_s),
            "arena_bytes": self.duties.arena_bytes(trainer),
            "copies": [list(copy) for copy in self.duties.peers.store.held],
            "logs": [list(one) for one in self.duties.peers.logs.held.items()],
        }

    def _on_settle(self, trainer: AttachedTrainer, message: Any) -> None:
        self._settling = True
        self.duties.settle()

    def _on_bye(self, trainer: AttachedTrainer, message: Any) -> None:
        trainer.detaching = not message.get("stay")
        self._lose_trainer(trainer)
        # ``stay``: the keeper waits for the next trainer, as after a crash.
        if not trainer.detaching:
            return
        # A state that no disk has outlives the goodbye: the keeper then lingers instead.
        self._ending = self.duties.bases.stopping or not self.duties.newest_capture.is_only_copy
        if not self._ending:
            self.connections.hang_up_farewells()


_GUEST_HANDLERS: Mapping[str, Callable[[Server, Connection, Any], None]] = {
    "status": Server._send_status,
    "look": Server._show_memory,
    "stop": Server._stop,
    "attach": Server._attach,
}
"""Handler of each kind of message that any client may send."""

_TRAINER_HANDLERS: Mapping[str, Callable[[Server, AttachedTrainer, Any], None]] = {
    "settle": Server._on_settle,
    "bye": Server._on_bye,
}
"""Handler of each kind of message from the trainer that concerns the process, not a duty."""
