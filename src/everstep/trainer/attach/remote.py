"""The keeper process, seen from the training process.

Few and small messages; the bytes of the state go through the arena. A thread of its own
waits for messages, so that the loss of the keeper is noticed at once and nobody who waits
for it waits for ever.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.errors import DeadlineError, EverstepError, KeeperError, KeeperTimeoutError
from everstep.format.log import RecordHead
from everstep.keeper.log.held import recalled_from_wire
from everstep.link.assembly import Assembly, assembly_to_wire
from everstep.link.capture import Capture
from everstep.link.channel import BackgroundChannel
from everstep.link.keeper_stats import KeeperStats
from everstep.link.log_layouts import LogLayouts
from everstep.link.messages import OBJECT_PART_BYTES, begin_to_wire, layout_to_wire, parts_of
from everstep.link.samples import Samples
from everstep.link.save import Save, done, failed
from everstep.link.waiting import Moves, Patience, keeper_gone, storage_hangs
from everstep.link.wire import Connection, error_from_wire, error_to_wire
from everstep.restore.fetch.held import Recalled
from everstep.seams import Clock
from everstep.seams.network.sockets import close_descriptors
from everstep.seams.processes.conditions import Condition
from everstep.seams.progress import progress
from everstep.state.layout import ShardLayout
from everstep.trainer.attach.requests import ReplicaRequests, Replies, base_request_to_wire

__all__ = [
    "RemoteKeeper",
    "Silence",
]

_GRACE_S = 1.0


class Silence:
    """How long a keeper has said nothing. One that serves a training process says how far it is
    several times a second, whether it has anything to do or not.

    Args:
        pid: of the keeper process.
        timeout_s: so long it may be silent.
    """

    def __init__(self, clock: Clock, pid: int, timeout_s: float) -> None:
        self._clock = clock
        self._pid = pid
        self.timeout_s = timeout_s
        self.grace_s = _GRACE_S
        self._word = threading.Event()
        self._heard_s = self._told_s = clock.monotonic_s()

    def heard(self) -> None:
        """It has said something, or is only now about to begin; in any thread."""
        self._heard_s = self._clock.monotonic_s()
        self._word.set()

    def check(self) -> None:
        """For who waits for it.

        Raises:
            DeadlineError: it has said nothing for too long.
        """
        if self._is_over(self._heard_s):
            raise self._error()

    def news(self) -> DeadlineError | None:
        """For training that goes on beside it: that it has said nothing for too long, and again
        each time that has gone on for as long."""
        if not self._is_over(max(self._heard_s, self._told_s)):
            return None  # mostly
        self._told_s = self._clock.monotonic_s()
        return self._error()

    def _is_over(self, since_s: float) -> bool:
        """Where all of this machine stood still, or this process did (in a long call that lets no
        other thread run), nobody has read what the keeper says: there is a while for that."""
        if self._clock.monotonic_s() - since_s <= self.timeout_s:
            return False
        self._word.clear()
        return not self._word.wait(self.grace_s)

    def _error(self) -> DeadlineError:
        silent_s = self._clock.monotonic_s() - self._heard_s
        return DeadlineError(
            f"the keeper (process {self._pid}) has said nothing for {silent_s:.0f} s",
            hint="it is stopped (kill -CONT lets it go on), or hangs, or this machine is "
            "overloaded: nothing becomes durable meanwhile. everstep ps shows it",
        )


_LOOK_AGAIN_S = 0.2
_ENDS_S = 5.0  # mostly at once: everything is durable by then
_PATIENCE_S = 1000.0


class RemoteKeeper:
    """One attachment to a keeper process.

    Args:
        connection: to a keeper that has welcomed us.
        arena: that it has made for us.
        pid: of the keeper process.
        timeout_s: a keeper that says nothing for so long counts as hung.

    Attributes:
        stats: what it has done, as it last said.
        lost: why it is gone; None while it is there. ``replaced``: it serves another process.
    """

    def __init__(
        self,
        connection: Connection,
        arena: Arena,
        pid: int,
        channel: BackgroundChannel,
        clock: Clock,
        *,
        timeout_s: float,
    ) -> None:
        self.arena = arena
        self.pid = pid
        self.stats = KeeperStats()
        self.lost: EverstepError | None = None
        self._connection = connection
        self._channel = channel
        self._clock = clock
        self.silence = Silence(clock, pid, timeout_s)
        self._changed = Condition()
        self._waiting: dict[int, Capture] = {}  # until the keeper is done with them
        self._writing: dict[int, Capture] = {}  # until they are durable or have failed
        self._replies = Replies(self._changed, clock)
        self._untold: dict[int, dict[str, Any]] = {}
        self._layouts = set[int]()
        self._abandoned = set[int]()
        self._telling = threading.Lock()  # of captures
        self._log_layouts = LogLayouts(self._send)
        self._asked = ReplicaRequests(self._changed)
        self._rebuilding: dict[int, Callable[[bool], None]] = {}
        self.replica_step: int | None = None
        self.replica_applied = self.replica_bytes = 0
        self.on_replica_stopped: Callable[[str, bool], None] = lambda why, for_good: None
        self.on_disk: Callable[[int], None] = lambda number: None
        self.on_peered: Callable[[int | None, int | None], None] = lambda base, step: None
        self.copies: dict[str, Any] = {}  # "tiers" and "peers" that get some; whose ("identity")
        self._timeline = self.written_bytes = self.moves = self.log_moves = 0
        self._hung = self._closing = self._recalled = self.replaced = False
        self.lost_steps = set[int]()  # of bases lost with it, or due when it was gone
        self._reader = threading.Thread(
            target=self._read, name="everstep-keeper-messages", daemon=True
        )
        self._reader.start()

    def serve(
        self,
        timeline: int,
        *,
        keep: int,
        verified: BaseId | None,
        log: Mapping[str, Any] | None = None,
        history: str = "last",
        replica: Mapping[str, Any] | None = None,
        rebuild: Mapping[str, Any] | None = None,
        seat: Mapping[str, Any] | None = None,
    ) -> None:
        """From now on bases are of this timeline.

        Args:
            log: how the log is put on disk (see :class:`.logs.Logs`); None if it is not.
            history: which of its segments stay.
            replica: what the replica may take (see :class:`.replica.ReplicaLimits`); None: there
                is none.
            rebuild: ``threads`` that make bases whole which are captured over several steps, and
                whether to be ready for it (``warm``); None: there will be none.
            seat: of this rank among several (see :class:`.commits.Seat`); None: it is alone.
        """
        known = None if verified is None else [verified.timeline, verified.step]
        self._timeline = timeline
        self.stats = KeeperStats()
        self.silence.heard()  # up to now it had nobody to say anything to
        self.replica_step = None
        self.replica_applied = 0
        self.replica_bytes = 0
        self._send(
            {
                "kind": "serve",
                "timeline": timeline,
                "keep": keep,
                "verified": known,
                "log": log,
                "history": history,
                "replica": replica,
                "rebuild": rebuild,
                **self.copies,
                "seat": seat,
            }
        )

    def listen(self, host: str, port: int, timeout_s: float) -> int:
        """The keeper opens a mailbox for the keepers of other ranks; returns its port.

        Raises:
            KeeperError, DeadlineError: as for :meth:`settle`.
        """
        ask = {"kind": "listen", "host": host, "port": port}
        reply, _ = self._request(ask, "listening", timeout_s)
        if reply["error"] is not None:
            raise error_from_wire(reply["error"])
        return int(reply["port"])

    def settle(self, timeout_s: float) -> None:
        """Waits until what an earlier trainer left is durable or has failed.

        Raises:
            KeeperError: the keeper is gone.
            DeadlineError: it gets nowhere for ``timeout_s``.
        """
        self._request({"kind": "settle"}, "settled", timeout_s)

    def recall(self, timeout_s: float, *, own: bool = False) -> Recalled:
        """The newest base in the keeper's memory, if there is one, and the records of its log.

        Args:
            own: of this very process, too; otherwise only what others have left.

        Raises:
            KeeperError, DeadlineError: as for :meth:`settle`.
        """
        reply, fds = self._request({"kind": "recall", "own": own}, "recalled", timeout_s)
        self._recalled = self._recalled or bool(fds)
        try:
            return recalled_from_wire(reply, [Arena.attach(fd) for fd in fds])
        finally:
            close_descriptors(fds)

    def forget_all(self) -> None:
        """What an earlier trainer left in memory is no longer needed."""
        self._send({"kind": "forget", "number": None})

    def begin(self, capture: Capture) -> None:
        """Takes a capture on; the keeper is told of it with :meth:`announce`.

        Raises:
            KeeperError: the keeper is gone.
        """
        with self._changed:
            if self.lost is not None:
                raise self.lost
            capture.begun = True
            self._waiting[capture.number] = self._writing[capture.number] = capture

    def announce(self, capture: Capture) -> None:
        """Tells the keeper of a capture, unless it was abandoned meanwhile; one that streams is
        written as it arrives. In any thread, but in the order of captures."""
        with self._telling:
            if capture.number in self._abandoned:
                return
            if capture.layout not in self._layouts:
                self._layouts.add(capture.layout)
                layout = layout_to_wire(capture.plan)
                self._send({"kind": "layout", "number": capture.layout, "layout": layout})
            self._send(begin_to_wire(capture))

    def captured(self, capture: Capture, objects: Mapping[str, bytes]) -> None:
        """All of a capture has arrived; the keeper makes it durable, whatever happens to us."""
        self._send_objects(capture.number, objects)
        self._send({"kind": "captured", "number": capture.number})

    def assemble(
        self,
        capture: Capture,
        objects: Mapping[str, bytes],
        assembly: Assembly,
        on_rebuilt: Callable[[bool], None],
    ) -> None:
        """All parts of a capture have arrived; the keeper makes it whole and durable, whatever
        happens to us.

        Args:
            on_rebuilt: told that the updates are not read any more, and whether the base is
                whole; in another thread, and not if the keeper is lost.
        """
        self._send_objects(capture.number, objects)
        self._rebuilding[capture.number] = on_rebuilt
        with self._log_layouts.lock:
            for message in assembly_to_wire(capture.number, assembly, self._log_layouts.number):
                self._send(message)

    def _send_objects(self, number: int, objects: Mapping[str, bytes]) -> None:
        for name, data in objects.items():
            for part in parts_of(data):
                self._send({"kind": "object", "number": number, "name": name, "part": part})

    def set_aside(self, capture: Capture) -> None:
        """It is whole, and stays in memory: nobody waits for it."""
        with self._changed:
            self._writing.pop(capture.number, None)
            self._waiting.pop(capture.number, None)
            self._changed.notify_all()

    def persist(self, capture: Capture) -> None:
        """What was set aside becomes durable after all.

        Raises:
            KeeperError: the keeper is gone.
        """
        message = {"kind": "persist", "number": capture.number}
        self._untold[capture.number] = message  # an interrupt leaves it to whoever waits next
        self.begin(capture)
        self._send(message)
        self._untold.pop(capture.number, None)

    def abandon(self, capture: Capture, error: EverstepError | None) -> None:
        """The rest of a capture will never arrive; ``error`` is None when it was withdrawn."""
        why = None if error is None else error_to_wire(error)
        with self._telling:
            self._abandoned.add(capture.number)
            self._send({"kind": "abandon", "number": capture.number, "error": why})

    def log(
        self,
        number: int,
        head: RecordHead,
        layout: ShardLayout,
        objects: Mapping[str, bytes],
        offset: int,
    ) -> None:
        """A record of the log lies whole in the arena."""
        inline = sum(map(len, objects.values())) <= OBJECT_PART_BYTES // 2
        if not inline:
            self._send_objects(-number, objects)
        with self._log_layouts.lock:
            self._send(
                {
                    "kind": "log",
                    "number": number,
                    "head": dataclasses.astuple(head),
                    "layout": self._log_layouts.number(layout),
                    "objects": dict(objects) if inline else None,
                    "offset": offset,
                }
            )

    def ask(self, save: Save, samples: Sequence[Samples], *, exact: bool) -> None:
        """Asks for a base of the replica's, of the step of ``save`` or (not ``exact``) later.

        Args:
            samples: of the state as it is now.
        """
        number = self._asked.number()
        message = base_request_to_wire(number, save.step, samples, exact=exact)
        try:
            with self._changed:
                if self.lost is not None:
                    self.lost_steps.add(save.step)
                    failed(save.durable, self.lost)
                    return
                self._asked.add(number, save, exact=exact)
            self._send(message)
        except BaseException:  # an interrupt: the keeper may never hear of it, or answers nobody
            self._asked.refused([number], KeeperError("asking for it was interrupted"), None)
            raise

    def drop_replica(self) -> None:
        """There is to be no replica any more."""
        self._send({"kind": "no_replica"})
        self._asked.lose(KeeperError("there is no replica any more"))

    def forget_log(self, upto: int) -> None:
        """The memory of records up to this number is going to be used again."""
        self._send({"kind": "forget_log", "upto": upto})

    def log_to_disk(self, on: bool) -> None:
        """Records of the steps from now on are written to disk, too; or they are not."""
        self._send({"kind": "log_to_disk", "on": on})

    def forget(self, capture: Capture) -> None:
        """The memory of a capture is going to be overwritten."""
        self._send({"kind": "forget", "number": capture.number})

    def wait(self, timeout_s: float | None, *, show: bool = True) -> None:
        """Waits until everything that was begun is durable or has failed.

        Raises:
            DeadlineError: after ``timeout_s``, or when the keeper says nothing.
            EverstepError: what failed meanwhile, by the policy.
        """
        patience = Patience(self._clock, timeout_s)
        moves = Moves(self._clock, self.silence.timeout_s)
        for message in list(self._untold.values()):
            self._send({**message, "again": True})
        self._untold.clear()
        with self._changed:
            total = sum(capture.plan.size_bytes for capture in self._waiting.values())
        seen = self.written_bytes
        what = "save" if total else "save by the keeper's replica (which loads torch first)"
        with progress(what, total) as bar:
            while True:
                with self._changed:
                    if self.lost is not None or not (self._waiting or self._asked.pending):
                        break
                    self._changed.wait(patience.look_again_s)
                if show:
                    bar.advance(self.written_bytes - seen)
                    seen = self.written_bytes
                self._channel.check()
                self.silence.check()
                if steps := self._asked.steps:
                    disk = self.moves, self.log_moves
                    moves.look(*disk, self.replica_step, self.replica_applied, steps)
                if self._hung:  # reported already; waiting on would be for ever
                    raise storage_hangs(len(self._waiting))
                with self._changed:
                    left = 0 if self.lost else len(self._waiting) + len(self._asked.steps)
                if patience.is_over(left):
                    break
        self._channel.check()

    def look(self) -> None:
        """Training goes on: that the keeper says nothing any more is reported, by the policy."""
        silent = self.silence.news()
        if silent is not None and self.lost is None:
            self._channel.post(silent)
            self._channel.check()

    def close(self, *, stay: bool = False) -> None:
        """Lets the keeper go: it finishes what it was given, and ends, or is to ``stay``, as if we
        had died. It stays with what others have left that we did not take over."""
        self._closing = True
        self._send({"kind": "bye", "stay": stay or (self._recalled and not self._timeline)})
        self._reader.join(_ENDS_S)
        self._connection.close()
        self._reader.join(_LOOK_AGAIN_S)
        self._lose(None)

    def _send(self, message: dict[str, Any]) -> None:
        """A keeper that is gone is noticed by the reader; here it is no error."""
        if self.lost is not None:
            return
        try:
            self._connection.send(message)
        except (KeeperError, OSError) as error:
            self._lose(keeper_gone(self.pid, error))

    def _request(
        self, message: dict[str, Any], reply: str, timeout_s: float
    ) -> tuple[dict[str, Any], list[int]]:
        self._replies.forget(reply)
        self._send(message)
        return self._replies.wait(self, message["kind"], reply, timeout_s)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            while True:
                try:
                    received = self._connection.receive(_PATIENCE_S)
                except KeeperTimeoutError:
                    continue
                if received is None:
                    break
                self.silence.heard()
                self._on_message(*received)
        except Exception as found:
            error = found
        if not self._closing:
            self._lose(keeper_gone(self.pid, error))
        self._connection.close()

    def _on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        kind = message["kind"]
        if message.get("timeline") == self._timeline:  # else of what was served before
            self.stats = KeeperStats(**message["stats"])
            self.replica_step, self.replica_applied, self.replica_bytes = message["replica"]
        if kind == "blob":
            self._replies.part(message)
        elif kind in ("settled", "recalled", "listening"):
            self._replies.came(message, fds)
        elif kind == "progress":
            self.written_bytes = message["written_bytes"]
            self._hung = message["hung"]
            self.moves, self.log_moves = message["moves"]
        elif kind in ("error", "notice"):
            error = error_from_wire(message["error"])
            if kind == "error":
                self._channel.post(error, timeline=message.get("of_timeline"))
            else:
                self._channel.tell(error)
        elif kind == "durable":
            self._end(message["number"], None, message["size_bytes"])
        elif kind == "failed":
            self._end(message["number"], error_from_wire(message["error"]), 0)
        elif kind == "done":
            with self._changed:
                ended = self._waiting.pop(message["number"], None)
                self._changed.notify_all()
            if ended is not None:
                self._asked.retained(ended.step)
        elif kind == "persisted":
            self._asked.persisted(message["numbers"], message["step"], message["size_bytes"])
        elif kind == "retained":
            self._asked.retained(message["step"])
        elif kind == "asks_refused":
            error = error_from_wire(message["error"])
            self._asked.refused(message["numbers"], error, message["step"])
        elif kind == "replica_stopped":
            self.on_replica_stopped(message["why"], message["for_good"])
        elif kind == "logged":
            self.on_disk(message["upto"])
        elif kind == "peered":
            self.on_peered(message["base"], message["step"])
        elif kind == "rebuilt":
            if (told := self._rebuilding.pop(message["number"], None)) is not None:
                told(message["whole"])
        elif kind == "replaced":
            self.replaced = True
            why = f"the keeper (process {self.pid}) now serves process {message['pid']}"
            self._lose(KeeperError(why))

    def _end(self, number: int, error: EverstepError | None, size_bytes: int) -> None:
        """A base is durable or has failed; retention may still go on."""
        with self._changed:
            capture = self._writing.pop(number, None)
        if capture is None:
            return
        if error is None:
            done(capture.save.durable, size_bytes)
        else:
            failed(capture.save.durable, error)
        capture.on_end(capture)

    def _lose(self, error: EverstepError | None) -> None:
        """The keeper is gone: nobody may go on waiting for it."""
        with self._changed:
            if self.lost is not None:
                return
            captures = list(self._writing.values())
            self.lost_steps.update((capture.step for capture in captures), self._asked.steps)
            self.lost = error or KeeperError("this keeper was let go")  # others look at it first
            self._writing.clear()
            self._waiting.clear()
            self._changed.notify_all()
        self._asked.lose(self.lost)
        self.on_disk(0)  # who waits for the log looks at what became of us
        for capture in captures:
            failed(capture.save.durable, self.lost)
            capture.on_end(capture)
