"""The keeper process: owns the arena, makes durable what was captured, outlives the trainer.

One thread waits for messages and deaths, one (:class:`.local.LocalKeeper`) writes; what is
done at a message is in :class:`.duties.Duties`. A trainer
that dies is noticed through its process descriptor, whoever else still holds its socket;
what it had captured whole is finished, what it had not is dropped.
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
from everstep.format.writer import ChunkRing
from everstep.keeper.held.newest_capture import NewestCapture
from everstep.keeper.log.attached import Attached
from everstep.keeper.persist.local_keeper import CHUNKS, WRITERS, LocalKeeper
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
_FIRST_TRAINER_S = 60.0  # whoever has started the keeper is about to attach
_GUESTS_MAX = 64
_GUESTS_SHARE = 4  # of its descriptors: the others are for its files and for other ranks
_DEAF_S = 0.5
_GUEST_S = 10.0  # without a whole message for so long, a guest is shown the door


class Server:
    """Serves one run and rank.

    Args:
        listener: at which trainers, and ``everstep ps`` and ``stop``, call.
        run: the run folder.
        linger_s: it ends by itself after so long without a trainer.
        found: whether others can still find this keeper.
        again: makes that so again, and returns where it listens from now on; None if another keeper
            is found in its place.
        still_used: called now and then, that nobody removes the files by which others find it.
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
        again: Callable[[], socket.socket | None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
        still_used: Callable[[], None] = lambda: None,
        seams: Seams | None = None,
    ) -> None:
        self._listener = listener
        self._found = found
        self._again = again
        self._leave = leave
        self._still_used = still_used
        self._run = run
        self._version = version
        self._linger_s = linger_s
        self._seams = seams or Seams()
        self._clock = self._seams.clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._guests: dict[Connection, float] = {}  # since when they have said nothing
        most = descriptors_max()
        self._guests_max = _GUESTS_MAX
        if most is not None:
            self._guests_max = max(1, min(_GUESTS_MAX, most // _GUESTS_SHARE))
        self._listens_again_s: float | None = None  # no descriptor was left for a connection
        self._ring = ChunkRing(CHUNKS - WRITERS + writers, writers)
        self._trainer: Attached | None = None
        self._duties = Duties(self._seams, run, self._ring, timeout_s=_TIMEOUT_S)
        self._farewells: list[Connection] = []
        self._settling = False
        self._told_s = 0.0  # how far the writing is
        self._used_s = self._look_s = self._clock.monotonic_s()
        self._hidden = self._replaced = False  # nobody finds it; they find another one
        self._ending = False
        self._stopping = False
        self._alone_since_s = self._clock.monotonic_s()
        self._alone_s_max = _FIRST_TRAINER_S  # it holds nothing yet that is worth more

    @property
    def _keeper(self) -> LocalKeeper | None:
        return self._duties.keeper

    @property
    def _newest_capture(self) -> NewestCapture:
        return self._duties.newest_capture

    def run(self) -> None:
        """Returns when the keeper is no longer needed."""
        try:
            while not self._over():
                self._turn(_SETTLING_TICK_S if self._settling or self._ending else _TICK_S)
        finally:
            self._duties.close()
            self._ring.close()
            self._leave()
            self._listener.close()
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
        self._ending = self._stopping = self._duties.stopping = True

    def _over(self) -> bool:
        if self._keeper is not None and self._keeper.waiting:
            return False
        alone_s = self._clock.monotonic_s() - self._alone_since_s
        over = self._ending or (self._trainer is None and alone_s > self._alone_s_max)
        return over and not self._duties.finish()

    def _tick(self) -> None:
        duties = self._duties
        self._clock.running_s()  # goes on, for all deadlines in this process
        duties.pass_on(duties.channel)
        now_s = self._clock.monotonic_s()
        for guest in [guest for guest, s in self._guests.items() if now_s - s > _GUEST_S]:
            self._hang_up(guest)
        if self._listens_again_s is not None and now_s >= self._listens_again_s:
            self._listen_again()
        keeper = self._keeper
        trainer = self._trainer
        if now_s - self._used_s >= _USED_EVERY_S:
            self._used_s = now_s
            self._still_used()
        if trainer is not None and (trainer.gone or (trainer.watch.pid and trainer.watch.gone())):
            self._lose_trainer(trainer)
            return
        if now_s >= self._look_s and not self._ending:
            self._look_s = now_s + _LOOK_EVERY_S
            self._look(trainer)
        if trainer is None:
            return
        # Not at every message that comes: each wakes the training process.
        if keeper is not None and now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            moves = [keeper.moves, keeper.log_moves]
            message = {"kind": "progress", "written_bytes": keeper.written_bytes, "moves": moves}
            hung = duties.channel is not None and duties.channel.hung()
            trainer.tell({**message, "hung": hung, **duties.stats()})
        if self._settling and (keeper is None or not keeper.waiting):
            self._settling = False
            trainer.tell({"kind": "settled"})

    def _look(self, trainer: Attached | None) -> None:
        """Whoever removes the files by which others find this keeper takes away what it holds for
        a training process that dies: it puts them there again."""
        if self._found():
            self._hidden = False
            return
        if trainer is None and (self._replaced or not self._has_only_copy()):
            self.end()  # nobody will come back
            return
        if self._replaced:
            return
        try:
            listener = self._again()
        except KeeperError as error:
            self._look_s += _TRY_AGAIN_S - _LOOK_EVERY_S
            self._tell_hidden(trainer, error, f"the keeper tries again every {_TRY_AGAIN_S:g} s")
            return
        if listener is None:
            self._replaced = True  # for good: when that one ends, the run has gone on without us
            why = KeeperError("another keeper of this run has its place", path=self._run)
            self._tell_hidden(trainer, why, "everstep ps shows it")
            return
        self._hidden = False
        while self._accept(self._listener):  # they have found it before
            pass
        if self._listens_again_s is None:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        self._listen_again()
        _log.warning("its files in the runtime folder were gone: they are there again")

    def _has_only_copy(self) -> bool:
        """Whether somebody may come back for what is in memory."""
        peers = self._duties.peers
        logs = self._duties.logs
        held = self._newest_capture.is_only_copy or bool(peers.store.held or peers.logs.held)
        if not held and logs.memory_step is None:
            return False
        try:
            self._seams.filesystem.scan(self._run)
        except (FileNotFoundError, NotADirectoryError):
            return False  # the run was removed, too
        except OSError:
            pass
        return True

    def _tell_hidden(self, trainer: Attached | None, why: KeeperError, then: str) -> None:
        """Once: nothing has failed, but what would be of use behind a kill is out of reach."""
        if self._hidden:
            return
        self._hidden = True
        told = KeeperError(
            "the keeper of this process can be found by no other any more, since its files in the "
            f"runtime folder were removed, and cannot be made anew: {why.message}",
            path=why.path,
            hint=f"{then}. Steps since the newest base on disk are lost if this process is killed: "
            "ckpt.save() takes one",
        )
        _log.error("%s", told)
        if trainer is not None:
            trainer.tell({"kind": "notice", "error": error_to_wire(told)})

    def _accept(self, listener: Any) -> bool:
        try:
            connection = accept(listener, 0.0)
        except OSError as error:
            self._refuse_for_a_while(error)
            return False
        if connection is None:
            return False
        if len(self._guests) >= self._guests_max:
            self._hang_up_oldest()
        self._guests[connection] = self._clock.monotonic_s()
        self._selector.register(connection, selectors.EVENT_READ, self._on_readable)
        return True

    def _refuse_for_a_while(self, error: OSError) -> None:
        """No connection can be taken, for want of descriptors mostly: the keeper lives on, as it
        alone may have the log. The connection stays in the queue of the listener, which would be
        ready at once again: it is not listened to until some have become free."""
        _log.warning("no connection can be accepted for %g s: %s", _DEAF_S, error)
        if self._guests:
            self._hang_up_oldest()
        if self._listens_again_s is None:
            self._selector.unregister(self._listener)
        self._listens_again_s = self._clock.monotonic_s() + _DEAF_S

    def _listen_again(self) -> None:
        self._listens_again_s = None
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _hang_up_oldest(self) -> None:
        self._hang_up(min(self._guests, key=self._guests.__getitem__))

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
        elif kind == "look":
            self._look_in(connection, message)
        elif kind == "stop":
            _log.info("asked to stop")
            connection.send({"kind": "stopping"})
            self._guests.pop(connection, None)  # it may wait for the end
            self.end()
        elif kind == "attach":
            self._attach(connection, message)
        elif self._trainer is not None and self._trainer.connection is connection:
            self._do(self._trainer, str(kind), message)
        else:
            raise KeeperError(f"{kind!r} from a process that is not attached")

    def _do(self, trainer: Attached, kind: str, message: dict[str, Any]) -> None:
        if kind == "settle":
            self._on_settle(trainer, message)
        elif kind == "bye":
            self._on_bye(trainer, message)
        elif kind in HANDLERS:
            HANDLERS[kind](self._duties, trainer, message)
        else:
            raise KeeperError(f"no message {kind!r} is known")

    def _look_in(self, connection: Connection, message: dict[str, Any]) -> None:
        """Shows what is in memory to a process that takes nothing over."""
        trainer = self._trainer
        if trainer is not None and (trainer.gone or trainer.watch.gone()):
            self._lose_trainer(trainer)  # what it said last is heard before
            trainer = self._trainer
        if message.get("protocol") != PROTOCOL:
            connection.send({"kind": "refused", "version": self._version, "protocol": PROTOCOL})
            return
        self._duties.look(served=trainer is not None).send(
            connection, None if trainer is None else trainer.watch.pid
        )

    def _attach(self, connection: Connection, message: dict[str, Any]) -> None:
        trainer = self._trainer
        busy = message.get("idle") and trainer is not None and not trainer.watch.gone()
        if busy or message.get("protocol") != PROTOCOL:
            connection.send(
                {"kind": "refused", "version": self._version, "protocol": PROTOCOL, "error": None}
            )
            return
        if self._stopping:
            raise KeeperError("this keeper was asked to stop")  # hangs up
        if self._trainer is not None and self._trainer.connection is connection:
            raise KeeperError("it is attached already")
        pid = connection.peer().pid
        timeout_s = float(message["timeout_s"])
        try:
            arena = Arena.create(message["arena_bytes"])
        except EverstepError as error:
            connection.send({"kind": "refused", "error": error_to_wire(error)})
            if self._trainer is None and self._keeper is None:
                # It holds nothing, and has the limits that it was started with: whoever comes
                # with higher ones gets another keeper.
                self.end()
            return
        if self._trainer is not None:
            self._trainer.tell({"kind": "replaced", "pid": pid})
            self._lose_trainer(self._trainer)
        self._ending = self._stopping  # a trainer had said goodbye; here is the next one
        self._hang_up_farewells()
        self._duties.timeout_s = timeout_s
        self._guests.pop(connection, None)
        self._trainer = trainer = Attached(connection, pid, arena)
        self._alone_s_max = self._linger_s
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
        self._alone_since_s = self._look_s = self._clock.monotonic_s()  # who is next comes soon
        if (death := trainer.watch.fileno()) is not None:
            self._selector.unregister(death)
        trainer.watch.close()
        self._selector.unregister(trainer.connection)
        self._farewells.append(trainer.connection)
        if not trainer.said_bye:
            self._hang_up_farewells()
        self._duties.lose(trainer)

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

    def _on_settle(self, trainer: Attached, message: dict[str, Any]) -> None:
        self._settling = True
        self._duties.settle()

    def _on_bye(self, trainer: Attached, message: dict[str, Any]) -> None:
        trainer.said_bye = not message.get("stay")
        self._lose_trainer(trainer)
        if not trainer.said_bye:
            return  # as if it had died
        self._ending = self._stopping or not self._newest_capture.is_only_copy
        if not self._ending:
            self._hang_up_farewells()
