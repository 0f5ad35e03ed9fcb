"""The keeper process: owns the arena, makes durable what was captured, outlives the trainer.

One thread waits for messages and deaths, one (:class:`.local.LocalKeeper`) writes. A trainer
that dies is noticed through its process descriptor, whoever else still holds its socket;
what it had captured whole is finished, what it had not is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError, KeeperError, KeeperTimeoutError, StateError
from everstep.format.writer import ChunkRing
from everstep.keeper.attached import Attached
from everstep.keeper.capture import Capture, Incoming
from everstep.keeper.channel import BackgroundChannel
from everstep.keeper.holding import Holding
from everstep.keeper.local import CHUNKS, WRITERS, LocalKeeper
from everstep.keeper.logs import Logs
from everstep.keeper.messages import PROTOCOL, identity_from_wire, layout_from_wire, parts_of
from everstep.keeper.save import Save
from everstep.keeper.wire import Connection, accept, error_from_wire, error_to_wire
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.sockets import close_descriptors

__all__ = ["Server"]

_log = logging.getLogger("everstep.keeper")
_TICK_S = 0.2
_SETTLING_TICK_S = 0.02
_TELL_EVERY_S = 0.05
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
_GUESTS_MAX = 64
_GUEST_S = 10.0  # without a whole message for so long, a guest is shown the door


class Server:
    """Serves one run and rank.

    Args:
        listener: at which trainers, and ``everstep ps`` and ``stop``, call.
        run: the run folder.
        linger_s: it ends by itself after so long without a trainer.
        found: whether others can still find this keeper; when not, it ends.
        leave: called at the end, before those who said goodbye are let go: what they find then
            is a run without a keeper.
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
        leave: Callable[[], None] = lambda: None,
        seams: Seams | None = None,
    ) -> None:
        self._listener = listener
        self._found = found
        self._leave = leave
        self._run = run
        self._version = version
        self._linger_s = linger_s
        self._seams = seams or Seams()
        self._clock = self._seams.clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._guests: dict[Connection, float] = {}  # since when they have said nothing
        self._channel: BackgroundChannel | None = None
        self._reporting = threading.Lock()
        self._ring = ChunkRing(CHUNKS - WRITERS + writers, writers)
        self._trainer: Attached | None = None
        self._keeper: LocalKeeper | None = None
        self._holding = Holding()
        self._logs = Logs(self._seams.filesystem, run, self._ring)
        self._farewells: list[Connection] = []
        self._settling = False
        self._told_s = 0.0  # how far the writing is
        self._ending = False
        self._stopping = False
        self._timeout_s = _TIMEOUT_S
        self._timeline = 0
        self._alone_since_s = self._clock.monotonic_s()

    def run(self) -> None:
        """Returns when the keeper is no longer needed."""
        try:
            while not self._over():
                self._turn(_SETTLING_TICK_S if self._settling or self._ending else _TICK_S)
        finally:
            if self._keeper is not None:
                self._keeper.close()
            self._logs.flush()
            self._logs.close(self._timeout_s)
            self._ring.close()
            self._leave()
            self._hang_up_farewells()

    def _turn(self, timeout_s: float) -> None:
        """Deals with what has come, or comes within ``timeout_s``."""
        for key, _ in self._selector.select(timeout_s):
            # Not closed by the one before, nor is its descriptor somebody else's by now.
            if self._selector.get_map().get(key.fd) is key:
                key.data(key.fileobj)
        self._tick()

    def end(self) -> None:
        """Finishes what was captured, then :meth:`run` returns; nobody can attach any more."""
        self._ending = self._stopping = True

    def _over(self) -> bool:
        if self._keeper is not None and self._keeper.waiting:
            return False
        if self._ending:
            return True
        alone_s = self._clock.monotonic_s() - self._alone_since_s
        return self._trainer is None and alone_s > self._linger_s

    def _tick(self) -> None:
        self._pass_on(self._channel)
        now_s = self._clock.monotonic_s()
        for guest in [guest for guest, s in self._guests.items() if now_s - s > _GUEST_S]:
            self._hang_up(guest)
        keeper, trainer = self._keeper, self._trainer
        if trainer is None:
            if not self._found():  # its runtime folder was removed: nobody will come back
                self.end()
            return
        if trainer.gone or (trainer.watch.pid and trainer.watch.gone()):
            self._lose_trainer(trainer)
            return
        # Not at every message that comes: each wakes the training process.
        if keeper is not None and now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            message = {"kind": "progress", "written_bytes": keeper.written_bytes}
            hung = self._channel is not None and self._channel.hung()
            trainer.tell({**message, "hung": hung, **self._stats()})
        if self._settling and (keeper is None or not keeper.waiting):
            self._settling = False
            trainer.tell({"kind": "settled"})

    def _stats(self) -> dict[str, Any]:
        assert self._keeper is not None
        self._keeper.stats.cpu_s = time.process_time()
        return {"stats": dataclasses.asdict(self._keeper.stats), "timeline": self._timeline}

    def _pass_on(self, channel: BackgroundChannel | None) -> None:
        """Tells the trainer what has failed; when this returns, it has been told."""
        if channel is not None:
            with self._reporting:
                channel.check()

    def _accept(self, _: Any) -> None:
        connection = accept(self._listener, 0.0)
        if connection is None:
            return
        if len(self._guests) >= _GUESTS_MAX:
            self._hang_up(min(self._guests, key=self._guests.__getitem__))
        self._guests[connection] = self._clock.monotonic_s()
        self._selector.register(connection, selectors.EVENT_READ, self._on_readable)

    def _on_readable(self, connection: Connection) -> None:
        try:
            received = connection.receive(0.0)
            if received is not None:
                if connection in self._guests:
                    self._guests[connection] = self._clock.monotonic_s()
                self._on_message(connection, *received)
                return
        except KeeperTimeoutError:
            return  # the rest of the message is still on its way
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
        """Does what a message asks for.

        Raises:
            KeeperError: it makes no sense; whoever sent it is hung up on.
        """
        close_descriptors(fds)  # nobody sends us any on purpose
        try:
            self._obey(connection, message)
        except KeeperError:
            raise
        except _NONSENSE as error:
            kind = message.get("kind")
            raise KeeperError(f"a message {kind!r} that makes no sense: {error!r}") from error

    def _obey(self, connection: Connection, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "status":
            connection.send(self._status())
        elif kind == "stop":
            _log.info("asked to stop")
            connection.send({"kind": "stopping"})
            self._guests.pop(connection, None)  # it may wait for the end
            self.end()
        elif kind == "attach":
            self._attach(connection, message)
        elif self._trainer is not None and self._trainer.connection is connection:
            handle = _HANDLERS.get(str(kind))
            if handle is None:
                raise KeeperError(f"no message {kind!r} is known")
            handle(self, self._trainer, message)
        else:
            raise KeeperError(f"{kind!r} from a process that is not attached")

    def _attach(self, connection: Connection, message: dict[str, Any]) -> None:
        if message.get("protocol") != PROTOCOL:
            connection.send(
                {"kind": "refused", "version": self._version, "protocol": PROTOCOL, "error": None}
            )
            return
        if self._stopping:
            raise KeeperError("this keeper was asked to stop")  # hangs up
        if self._trainer is not None and self._trainer.connection is connection:
            raise KeeperError("it is attached already")
        pid, timeout_s = connection.peer().pid, float(message["timeout_s"])
        try:
            arena = Arena.create(message["arena_bytes"])
        except EverstepError as error:
            connection.send({"kind": "refused", "error": error_to_wire(error)})
            return
        if self._trainer is not None:
            self._trainer.tell({"kind": "replaced", "pid": pid})
            self._lose_trainer(self._trainer)
        self._ending = self._stopping  # a trainer had said goodbye; here is the next one
        self._hang_up_farewells()
        self._timeout_s = timeout_s
        self._guests.pop(connection, None)
        self._trainer = trainer = Attached(connection, pid, arena)
        if (death := trainer.watch.fileno()) is not None:
            self._selector.register(death, selectors.EVENT_READ, self._on_death)
        assert arena.fd is not None
        connection.send({"kind": "welcome", "version": self._version}, [arena.fd])
        _log.info("process %d attached, arena of %d bytes", pid, arena.size_bytes)

    def _on_death(self, _: int) -> None:
        if self._trainer is not None:
            self._lose_trainer(self._trainer)

    def _lose_trainer(self, trainer: Attached) -> None:
        """Whole captures become durable, the others are dropped (a base at a step mark is all
        or nothing)."""
        self._drain(trainer)
        if self._trainer is not trainer:
            return  # its last word was goodbye
        _log.info("process %d is gone", trainer.watch.pid)
        self._trainer = None
        trainer.gone = True
        self._settling = False
        self._alone_since_s = self._clock.monotonic_s()
        if (death := trainer.watch.fileno()) is not None:
            self._selector.unregister(death)
        trainer.watch.close()
        self._selector.unregister(trainer.connection)
        self._farewells.append(trainer.connection)
        if not trainer.said_bye:
            self._hang_up_farewells()
        for capture in list(trainer.captures.values()):
            if not capture.incoming.complete and self._keeper is not None:
                _log.info("step %d was not captured whole", capture.step)
                self._keeper.abandon(capture, None)  # nobody is there to be told

    def _hang_up_farewells(self) -> None:
        """Those who said goodbye see the end of the connection when we have ended, too."""
        for connection in self._farewells:
            connection.close()
        self._farewells.clear()

    def _drain(self, trainer: Attached) -> None:
        """Reads what the trainer said before it died: perhaps that a capture is whole, or that
        it was going to write over one."""
        with contextlib.suppress(KeeperError, OSError):  # nothing more, or its end is missing
            while self._trainer is trainer:
                received = trainer.connection.receive(0.0)
                if received is None:
                    return
                self._on_message(trainer.connection, *received)

    def _status(self) -> dict[str, Any]:
        keeper, trainer = self._keeper, self._trainer
        alone_s = self._clock.monotonic_s() - self._alone_since_s
        return {
            "kind": "status",
            "trainer": None if trainer is None else trainer.watch.pid,
            "held": [] if self._holding.step is None else [self._holding.step],
            "writing": [] if keeper is None else [capture.step for capture in keeper.waiting],
            "durable_step": None if keeper is None else keeper.stats.durable_step,
            "idle_s": 0.0 if trainer is not None else alone_s,
            "ends_in_s": None if trainer is not None else max(0.0, self._linger_s - alone_s),
            "arena_bytes": 0 if trainer is None else trainer.arena.size_bytes,
        }

    def _on_serve(self, trainer: Attached, message: dict[str, Any]) -> None:
        if self._keeper is not None:
            if self._keeper.waiting:  # two that write at once would take each other's files away
                raise KeeperError("earlier captures are still being written: settle first")
            self._keeper.close()
        verified = message["verified"]
        self._channel = channel = BackgroundChannel(
            lambda error: _report(trainer, error),
            self._clock,
            progress_timeout_s=self._timeout_s,
        )
        self._keeper = LocalKeeper(
            self._seams,
            self._run,
            message["timeline"],
            channel,
            self._ring,
            trainer.arena,
            keep=message["keep"],
            verified=None if verified is None else BaseId(*verified),
            timeout_s=self._timeout_s,
            history=message.get("history", "last"),
            on_done=lambda capture: self._on_done(trainer, channel, capture),
        )
        self._timeline = message["timeline"]
        self._keeper.sweep_behind()
        self._logs.serve(trainer, channel, message, self._timeout_s)

    def _on_layout(self, trainer: Attached, message: dict[str, Any]) -> None:
        trainer.layouts = {message["number"]: message["layout"]}  # the one before is over

    def _on_begin(self, trainer: Attached, message: dict[str, Any]) -> None:
        assert self._keeper is not None
        if self._stopping:  # or there would be no end of it
            raise KeeperError("this keeper was asked to stop")
        identity = identity_from_wire(message["identity"])
        arena, word = trainer.arena, message["word"]
        plan = layout_from_wire(trainer.layouts[message["layout"]], identity)
        capture = Capture(
            number=message["number"],
            layout=message["layout"],
            plan=plan,
            save=Save(identity.step, identity.timeline),
            offset=message["offset"],
            word=word,
            stream=message["stream"],
            incoming=Incoming(lambda: arena.progress(word), timeout_s=self._timeout_s),
            on_end=lambda ended: self._on_end(trainer, ended),
        )
        trainer.captures[capture.number] = capture
        self._holding.written_over_by(capture, arena)
        failpoint("keeper.after_begin")
        self._keeper.begin(capture)

    def _on_object(self, trainer: Attached, message: dict[str, Any]) -> None:
        objects = trainer.objects.setdefault(message["number"], {})
        objects.setdefault(message["name"], bytearray()).extend(message["part"])

    def _on_captured(self, trainer: Attached, message: dict[str, Any]) -> None:
        parts = trainer.objects.pop(message["number"], {})
        capture = trainer.captures.get(message["number"])
        if capture is None or capture.incoming.lost:
            return  # it has failed meanwhile, and the trainer may use its memory again
        assert self._keeper is not None
        failpoint("keeper.after_captured")
        self._holding.take(capture, trainer.arena)
        self._logs.drop_older()  # nothing needs them any more
        self._keeper.captured(capture, {name: bytes(data) for name, data in parts.items()})

    def _on_abandon(self, trainer: Attached, message: dict[str, Any]) -> None:
        trainer.objects.pop(message["number"], None)
        capture, why = trainer.captures.get(message["number"]), message["error"]
        if capture is not None and self._keeper is not None:
            self._keeper.abandon(capture, None if why is None else error_from_wire(why))
            return
        # It is over; or the trainer was interrupted before it said that it had begun.
        gone = StateError("the save was interrupted")
        number = {"number": message["number"]}
        trainer.tell({"kind": "failed", "error": error_to_wire(gone), **number})
        trainer.tell({"kind": "done", **number})

    def _on_log(self, trainer: Attached, message: dict[str, Any]) -> None:
        self._logs.on_message(trainer, message)

    def _on_forget(self, trainer: Attached, message: dict[str, Any]) -> None:
        self._holding.forget(message["number"], trainer.arena)

    def _on_settle(self, trainer: Attached, message: dict[str, Any]) -> None:
        self._settling = True

    def _on_recall(self, trainer: Attached, message: dict[str, Any]) -> None:
        keeper = self._keeper
        audit = keeper.audit if keeper is not None else lambda plan, written: None
        own = bool(message.get("own"))
        found = self._holding.recall(trainer.arena, audit, own=own)
        base: dict[str, Any] | None = None
        blobs: list[bytes] = []
        arenas: list[Arena] = []
        if found is not None:
            base, blobs, arena = found
            base["arena"], arenas = 0, [arena]
        logs = []
        for arena, index in self._logs.recall(trainer, own=own, timeout_s=self._timeout_s):
            if arena not in arenas:
                arenas.append(arena)
            logs.append([len(blobs), arenas.index(arena)])
            blobs.append(index)
        for number, blob in enumerate(blobs):
            for part in parts_of(blob):
                trainer.connection.send({"kind": "blob", "number": number, "part": part})
        fds = [arena.fd for arena in arenas if arena.fd is not None]
        trainer.connection.send({"kind": "recalled", "base": base, "logs": logs}, fds)

    def _on_bye(self, trainer: Attached, message: dict[str, Any]) -> None:
        trainer.said_bye = True
        self._lose_trainer(trainer)
        self._ending = self._stopping or not self._holding.is_only_copy
        if not self._ending:
            self._hang_up_farewells()

    def _on_done(self, trainer: Attached, channel: BackgroundChannel, capture: Capture) -> None:
        """In the writing thread: retention is over, too. What failed is told before: whoever
        waits for the end and then goes must have heard of it."""
        self._pass_on(channel)
        trainer.tell({"kind": "done", "number": capture.number})

    def _on_end(self, trainer: Attached, capture: Capture) -> None:
        """In the writing thread: a base is durable or has failed."""
        trainer.captures.pop(capture.number, None)
        message: dict[str, Any] = {"number": capture.number, **self._stats()}
        error = capture.save.durable.exception()
        if error is None:
            size_bytes = capture.plan.size_bytes
            trainer.tell({"kind": "durable", "size_bytes": size_bytes, **message})
            return
        self._holding.failed(capture, error, reused=not trainer.gone)
        ours = error if isinstance(error, EverstepError) else EverstepError(repr(error))
        trainer.tell({"kind": "failed", "error": error_to_wire(ours), **message})


def _report(trainer: Attached, error: EverstepError) -> None:
    """What fails is told to the trainer whose it is, and to no other."""
    _log.error("%s", error)
    trainer.tell({"kind": "error", "error": error_to_wire(error)})


_HANDLERS: Mapping[str, Callable[[Server, Attached, dict[str, Any]], None]] = {
    "serve": Server._on_serve,
    "layout": Server._on_layout,
    "begin": Server._on_begin,
    "object": Server._on_object,
    "captured": Server._on_captured,
    "abandon": Server._on_abandon,
    "log_layout": Server._on_log,
    "log": Server._on_log,
    "forget_log": Server._on_log,
    "forget": Server._on_forget,
    "settle": Server._on_settle,
    "recall": Server._on_recall,
    "bye": Server._on_bye,
}
