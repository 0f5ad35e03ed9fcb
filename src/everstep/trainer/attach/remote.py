"""The keeper process as seen from the training process.

Messages are few and small; the bytes of the state go through the arena. A separate thread reads
messages, so that the loss of the keeper is noticed at once, and no caller waits forever.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from everstep.arena import Arena
from everstep.commit import BaseId
from everstep.errors import DeadlineError, EverstepError, KeeperError, KeeperTimeoutError
from everstep.format.log import RecordHead
from everstep.format.records import Annotations
from everstep.keeper.held import recalled_from_wire
from everstep.link import BackgroundChannel, Connection, Save, complete, error_to_wire, fail
from everstep.link.assembly import Assembly, Samples, assembly_to_wire
from everstep.link.capture import Capture
from everstep.link.messages import (
    OBJECT_PART_BYTES,
    JobSession,
    KeeperStats,
    LogLayouts,
    begin_to_wire,
    layout_to_wire,
    parts_of,
    to_plain,
)
from everstep.link.wire import error_from_wire
from everstep.restore.fetch import KeeperContents
from everstep.seams import Clock
from everstep.seams.processes import Condition
from everstep.seams.progress import progress
from everstep.seams.sockets import close_descriptors
from everstep.state.layout import ShardLayout
from everstep.trainer.attach.requests import (
    ReplicaProgress,
    ReplicaRequests,
    Replies,
    WaitDeadline,
    base_request_to_wire,
    keeper_lost_error,
    storage_hang_error,
)
from everstep.trainer.attach.terms import KeeperTerms

if TYPE_CHECKING:
    from everstep.trainer.participant import Participant

_GRACE_S = 1.0


class Silence:
    """Detect a keeper process that sends no messages: it is stopped, or hangs.

    A keeper that serves a training process reports its progress several times a second, even if it
    has nothing to do.

    Args:
        pid: keeper process.
        timeout_s: seconds without a message after which the keeper counts as hung.

    Attributes:
        received_s: time of the last message, on the monotonic clock.
    """

    def __init__(self, clock: Clock, pid: int, timeout_s: float) -> None:
        self.clock = clock
        self._pid = pid
        self.timeout_s = timeout_s
        self.grace_s = _GRACE_S
        self._received = threading.Event()
        self.received_s = self._reported_s = clock.monotonic_s()

    def message_received(self) -> None:
        """Note that a message has arrived, or that messages are expected only from now on.

        Called in any thread.
        """
        self.received_s = self.clock.monotonic_s()
        self._received.set()

    def check(self) -> None:
        """Check that the keeper is not silent; for a caller that waits for it.

        Raises:
            DeadlineError: It has sent no message for too long.
        """
        if self._is_over(self.received_s):
            raise self._error()

    def overdue(self) -> DeadlineError | None:
        """Return an error if the keeper is silent, and again after each further timeout.

        For training, which continues meanwhile.
        """
        if not self._is_over(max(self.received_s, self._reported_s)):
            return None  # the usual case
        self._reported_s = self.clock.monotonic_s()
        return self._error()

    def _is_over(self, since_s: float) -> bool:
        """Return True if no message has arrived since ``since_s`` for longer than the timeout.

        After the timeout there is a grace period: if the whole machine, or this process, was
        paused (or a long call has kept other threads from running), messages may be waiting that
        the reader thread has had no time to read.
        """
        if self.clock.monotonic_s() - since_s <= self.timeout_s:
            return False
        # A message that arrived just before this line is missed, but a live keeper sends several a
        # second, so the next one arrives within the grace period.
        self._received.clear()
        return not self._received.wait(self.grace_s)

    def _error(self) -> DeadlineError:
        silent_s = self.clock.monotonic_s() - self.received_s
        return DeadlineError(
            f"the keeper (process {self._pid}) has sent no message for {silent_s:.0f} s",
            hint="it is stopped (kill -CONT continues it), or hangs, or this machine is "
            "overloaded: nothing becomes durable meanwhile. everstep ps shows its state",
        )


_READER_ENDS_S = 0.2  # after its connection was closed
_ENDS_S = 5.0  # usually it ends at once: everything is durable by then
_BASE_EVENTS = frozenset(("durable", "failed", "done", "persisted", "retained", "asks_refused"))
_RECEIVE_S = 1000.0  # the reader's timeout, which has no meaning: it starts again


class RemoteKeeper:
    """Connection to a keeper process that serves this training process.

    Args:
        connection: connection to a keeper that has accepted this process.
        arena: shared memory that the keeper has made.
        pid: keeper process.
        timeout_s: seconds without a message after which the keeper counts as hung.
        participants: receive what the keeper reports about log, peers and replica.

    Attributes:
        stats: statistics, as last reported by the keeper.
        lost: error that describes why the keeper is lost; None while it is there.
        replaced: True if it was lost because it now serves another process.
        lost_steps: steps of the bases lost with it, or requested after that.
        replica_step: step of its replica, as last reported; None without one.
        replica_applied: number of the last log record that the replica has applied.
        peer_log_step: newest step of this timeline whose log this rank's peer holds, as last
            reported.
        replica_requests: bases requested from its replica.
        log_layouts: layouts of records that the keeper has received.
        rebuilding: functions to call when the keeper no longer reads the updates of a multi-step
            base, by the number of its capture.
        moves, log_moves: counters of its progress with bases and with the log.
    """

    def __init__(
        self,
        connection: Connection,
        arena: Arena,
        pid: int,
        channel: BackgroundChannel,
        clock: Clock,
        participants: Sequence[Participant] = (),
        *,
        timeout_s: float,
    ) -> None:
        self._participants = participants
        self.arena = arena
        self.pid = pid
        self.stats = KeeperStats()
        self.lost: EverstepError | None = None
        self._connection = connection
        self._channel = channel
        self.silence = Silence(clock, pid, timeout_s)
        self._changed = Condition()
        self._waiting: dict[int, Capture] = {}  # until durable or failed, and retention is over
        self._writing: dict[int, Capture] = {}  # until durable or failed
        self._replies = Replies(self._changed, clock)
        self._unsent: dict[int, dict[str, Any]] = {}
        self._layouts = set[int]()
        self._abandoned = set[int]()
        # Orders the messages about captures, which two threads send.
        self._capture_lock = threading.Lock()
        self.log_layouts = LogLayouts(self.send)
        self.replica_requests = ReplicaRequests(self._changed)
        self.rebuilding: dict[int, Callable[[bool], None]] = {}
        self.replica_step: int | None = None
        self.replica_applied = self.replica_bytes = 0
        self.peer_log_step: int | None = None
        self._timeline = self.written_bytes = self.moves = self.log_moves = 0
        self._hung = self._closing = self._recalled = self.replaced = False
        self.lost_steps = set[int]()
        self._reader = threading.Thread(
            target=self._read, name="everstep-keeper-messages", daemon=True
        )
        # Last: the thread uses the attributes above.
        self._reader.start()

    @property
    def waiting(self) -> list[Capture]:
        """Captures that are not durable yet, or whose retention is not over."""
        with self._changed:
            return list(self._waiting.values())

    def serve(
        self,
        terms: KeeperTerms,
        timeline: int,
        verified: BaseId | None = None,
        job_session: JobSession | None = None,
    ) -> None:
        """Begin to serve a timeline.

        Args:
            terms: terms of all keepers of this rank.
            verified: base on disk that was just read and verified.
            job_session: place of this rank in the job; None for a single rank.
        """
        # Set before the message is sent: statistics of this timeline may arrive right after it.
        self._timeline = timeline
        self.stats = KeeperStats()
        self.silence.message_received()  # a keeper that serves no process sends nothing
        self.replica_step = self.peer_log_step = None
        self.replica_applied = self.replica_bytes = 0
        self.send(
            {
                "kind": "serve",
                "timeline": timeline,
                "keep": to_plain(terms.options.keep),
                "verified": None if verified is None else [verified.timeline, verified.step],
                "log": terms.log(),
                "history": terms.options.log.history,
                "replica": terms.replica(),
                "rebuild": terms.rebuild(),
                **terms.copies(timeline),
                "seat": None if job_session is None else job_session.to_wire(),
            }
        )

    def listen(self, host: str, port: int, timeout_s: float) -> int:
        """Let the keeper open a mailbox for the keepers of other ranks; return its port.

        Raises:
            KeeperError, DeadlineError: See :meth:`settle`.
        """
        request = {"kind": "listen", "host": host, "port": port}
        reply, _ = self._request(request, "listening", timeout_s)
        if reply["error"] is not None:
            raise error_from_wire(reply["error"])
        return int(reply["port"])

    def settle(self, timeout_s: float) -> None:
        """Wait until captures of an earlier training process are durable or have failed.

        Raises:
            KeeperError: The keeper is lost.
            DeadlineError: It makes no progress for ``timeout_s``.
        """
        self._request({"kind": "settle"}, "settled", timeout_s)

    def recall(
        self, timeout_s: float, *, own: bool = False, at: BaseId | None = None
    ) -> KeeperContents:
        """Return the newest base in the keeper's memory, if any, and the records of its log.

        Args:
            own: True to include captures of this very process.
            at: state on which all ranks have agreed; it then is that base, if the replica reaches
                it, or there is a capture of it.

        Raises:
            KeeperError, DeadlineError: See :meth:`settle`.
        """
        message = {"kind": "recall", "own": own, "at": to_plain(at)}
        reply, fds = self._request(message, "recalled", timeout_s)
        self._recalled = self._recalled or bool(fds)
        try:
            # The arenas keep duplicates of the descriptors.
            return recalled_from_wire(reply, [Arena.attach(fd) for fd in fds])
        finally:
            close_descriptors(fds)

    def annotate(self, annotations: Annotations) -> None:
        """Let the keeper write metrics and a note to a base, once that is committed."""
        self.send({"kind": "annotate", "annotations": to_plain(annotations)})

    def forget_all(self) -> None:
        """Let the keeper free the memory of earlier training processes."""
        self.send({"kind": "forget", "number": None})

    def begin(self, capture: Capture) -> None:
        """Register a capture. The keeper is notified by :meth:`announce`.

        Raises:
            KeeperError: The keeper is lost.
        """
        with self._changed:
            # Under the lock: _lose() ends the captures that are listed, and none may be added after
            # it.
            if self.lost is not None:
                raise self.lost
            capture.begun = True
            self._waiting[capture.number] = self._writing[capture.number] = capture

    def announce(self, capture: Capture) -> None:
        """Announce a capture to the keeper, unless it was abandoned meanwhile.

        The keeper writes a streamed capture while it arrives. Called in any thread, but in the
        order of captures.
        """
        with self._capture_lock:
            if capture.number in self._abandoned:
                return
            # The keeper holds only the newest layout, and reads it when the capture is announced.
            if capture.layout not in self._layouts:
                layout = layout_to_wire(capture.plan)
                self.send({"kind": "layout", "number": capture.layout, "layout": layout})
                self._layouts.add(capture.layout)  # after the send, which may fail
            self.send(begin_to_wire(capture))

    def captured(self, capture: Capture, objects: Mapping[str, bytes]) -> None:
        """Report a complete capture. The keeper makes it durable even if this process dies."""
        self._send_objects(capture.number, objects)
        self.send({"kind": "captured", "number": capture.number})

    def assemble(
        self,
        capture: Capture,
        objects: Mapping[str, bytes],
        assembly: Assembly,
        on_rebuilt: Callable[[bool], None],
    ) -> None:
        """Report that all parts of a multi-step base have arrived.

        The keeper completes it with the logged updates and makes it durable, even if this process
        dies.

        Args:
            on_rebuilt: called when the keeper no longer reads the updates, with True if the base is
                complete. Called in another thread, and not if the keeper is lost.
        """
        self._send_objects(capture.number, objects)
        # Registered before the messages: the reply may arrive before this call returns.
        self.rebuilding[capture.number] = on_rebuilt
        # Held until all messages are sent: another thread could give the number of a layout to
        # another one.
        with self.log_layouts.lock:
            for message in assembly_to_wire(capture.number, assembly, self.log_layouts.number):
                self.send(message)

    def _send_objects(self, number: int, objects: Mapping[str, bytes]) -> None:
        for name, data in objects.items():
            for chunk in parts_of(data):
                message = {"kind": "object", "number": number, "name": name, "part": chunk}
                self.send(message)

    def set_aside(self, capture: Capture) -> None:
        """Keep a complete capture in memory only; :meth:`wait` does not wait for it."""
        with self._changed:
            self._writing.pop(capture.number, None)
            self._waiting.pop(capture.number, None)
            self._changed.notify_all()

    def persist(self, capture: Capture) -> None:
        """Make a capture durable that was set aside.

        Raises:
            KeeperError: The keeper is lost.
        """
        message = {"kind": "persist", "number": capture.number}
        # After an interrupt, the next wait() sends it again.
        self._unsent[capture.number] = message
        self.begin(capture)
        self.send(message)
        self._unsent.pop(capture.number, None)

    def abandon(self, capture: Capture, error: EverstepError | None) -> None:
        """Report that a capture stays incomplete; ``error`` is None if it was withdrawn."""
        why = None if error is None else error_to_wire(error)
        with self._capture_lock:
            # Under the lock, so the lane's thread announces the capture before this message or not
            # at all.
            self._abandoned.add(capture.number)
            self.send({"kind": "abandon", "number": capture.number, "error": why})

    def log(
        self,
        number: int,
        head: RecordHead,
        layout: ShardLayout,
        objects: Mapping[str, bytes],
        offset: int,
    ) -> None:
        """Report a log record that is complete in the arena."""
        inline = sum(map(len, objects.values())) <= OBJECT_PART_BYTES // 2
        if not inline:
            # Negative: the keeper collects objects of captures and of records in one table.
            self._send_objects(-number, objects)
        with self.log_layouts.lock:
            self.send(
                {
                    "kind": "log",
                    "number": number,
                    "head": dataclasses.astuple(head),
                    "layout": self.log_layouts.number(layout),
                    "objects": dict(objects) if inline else None,
                    "offset": offset,
                }
            )

    def ask(self, save: Save, samples: Sequence[Samples], *, exact: bool) -> None:
        """Request a base from the replica.

        Args:
            save: the pending base.
            samples: samples of the live state.
            exact: True if it must be of the step of ``save``, and not of a later one.
        """
        number = self.replica_requests.number()
        message = base_request_to_wire(number, save.step, samples, exact=exact)
        try:
            with self._changed:
                if self.lost is not None:
                    self.lost_steps.add(save.step)
                    fail(save.durable, self.lost)
                    return
                self.replica_requests.add(number, save, exact=exact)
            self.send(message)
        except BaseException:  # an interrupt: the keeper may not have received the request
            self.replica_requests.refused(
                [number], KeeperError("the request was interrupted"), None
            )
            raise

    def drop_replica(self) -> None:
        """Let the keeper drop its replica."""
        self.send({"kind": "no_replica"})
        self.replica_requests.lose(KeeperError("the replica was dropped"))

    def forget_log(self, upto: int) -> None:
        """Announce that the memory of records up to this number will be overwritten."""
        self.send({"kind": "forget_log", "upto": upto})

    def log_to_disk(self, on: bool) -> None:
        """Start or stop writing the log to disk, from the next step on."""
        self.send({"kind": "log_to_disk", "on": on})

    def forget(self, capture: Capture) -> None:
        """Announce that the memory of a capture will be overwritten."""
        self.send({"kind": "forget", "number": capture.number})

    def wait(self, timeout_s: float | None, *, show: bool = True) -> None:
        """Wait until every base that was begun is durable or has failed.

        Raises:
            DeadlineError: The timeout is over, or the keeper sends no messages.
            EverstepError: A base has failed, and the policy is to raise.
        """
        patience = WaitDeadline(self.silence.clock, timeout_s)
        moves = ReplicaProgress(self.silence.clock, self.silence.timeout_s)
        for message in list(self._unsent.values()):
            # Marked as repeated: the keeper may have persisted the capture already.
            self.send({**message, "again": True})
        self._unsent.clear()
        with self._changed:
            total = sum(capture.plan.size_bytes for capture in self._waiting.values())
        seen = self.written_bytes
        title = "save" if total else "save by the keeper's replica (which loads torch first)"
        with progress(title, total) as bar:
            while True:
                with self._changed:
                    if self.lost is not None or not (
                        self._waiting or self.replica_requests.pending
                    ):
                        break
                    self._changed.wait(patience.poll_s)
                if show:
                    bar.advance(self.written_bytes - seen)
                    seen = self.written_bytes
                self._channel.check()
                self.silence.check()
                if steps := self.replica_requests.steps:
                    moves.check(
                        self.moves,
                        self.log_moves,
                        self.replica_step,
                        self.replica_applied,
                        steps,
                    )
                if self._hung:  # reported already; the wait would never end
                    raise storage_hang_error(len(self._waiting))
                with self._changed:
                    left = 0 if self.lost else len(self._waiting) + len(self.replica_requests.steps)
                if patience.is_over(left):
                    break
        self._channel.check()

    def look(self) -> None:
        """Report a silent keeper while training continues, by the policy."""
        silent = self.silence.overdue()
        if silent is not None and self.lost is None:
            self._channel.post(silent)
            self._channel.check()

    def close(self, *, stay: bool = False) -> None:
        """Detach from the keeper. It finishes its work, and then ends.

        A keeper whose memory this process has read but not taken over stays, too.

        Args:
            stay: True to let it stay with its memory, as if this process had crashed.
        """
        # Before the message: the end of the connection is expected from now on, and is no loss.
        self._closing = True
        self.send({"kind": "bye", "stay": stay or (self._recalled and not self._timeline)})
        self._reader.join(_ENDS_S)
        # Wakes a reader that is still waiting because the keeper has not closed its side in time.
        self.disconnect()
        self._lose(None)

    def disconnect(self, timeout_s: float = _READER_ENDS_S) -> None:
        """Close the connection without a message, and wait for the thread that reads it.

        Unless this is part of :meth:`close`, the keeper is lost then.
        """
        self._connection.close()
        self._reader.join(timeout_s)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. A lost keeper is no error here: the reader thread reports it."""
        if self.lost is not None:
            return
        try:
            self._connection.send(message)
        except (KeeperError, OSError) as error:
            self._lose(keeper_lost_error(self.pid, error))

    def _request(
        self, message: dict[str, Any], reply: str, timeout_s: float
    ) -> tuple[dict[str, Any], list[int]]:
        self._replies.forget(reply)
        self.send(message)
        return self._replies.wait(self, message["kind"], reply, timeout_s)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            while True:
                try:
                    received = self._connection.receive(_RECEIVE_S)
                except KeeperTimeoutError:
                    continue
                if received is None:
                    break
                self.silence.message_received()
                self.handle(*received)
        except Exception as found:
            error = found
        if not self._closing:
            self._lose(keeper_lost_error(self.pid, error))
        self._connection.close()

    def handle(self, message: dict[str, Any], fds: list[int]) -> None:
        """Handle a message of the keeper; called in the thread that reads them."""
        kind = message["kind"]
        # Statistics of another timeline belong to a session that has ended.
        if message.get("timeline") == self._timeline:
            # Replaced and never changed, because the training thread reads it without a lock.
            self.stats = KeeperStats(**message["stats"])
            self.replica_step, self.replica_applied, self.replica_bytes = message["replica"]
        if kind == "blob":
            self._replies.add_blob(message)
        elif kind in ("settled", "recalled", "listening"):
            self._replies.arrived(message, fds)
        elif kind == "progress":
            self.written_bytes = message["written_bytes"]
            self._hung = message["hung"]
            self.moves = message["moves"][0]
            self.log_moves = message["moves"][1]
        elif kind in ("error", "notice"):
            error = error_from_wire(message["error"])
            if kind == "error":
                self._channel.post(error, timeline=message.get("of_timeline"))
            else:
                self._channel.post_notice(error)
        elif kind == "replaced":
            self.replaced = True
            why = f"the keeper (process {self.pid}) now serves process {message['pid']}"
            self._lose(KeeperError(why))
        elif kind in _BASE_EVENTS:
            self._on_base_event(kind, message)
        else:
            self._on_event(kind, message)

    def _on_base_event(self, kind: str, message: dict[str, Any]) -> None:
        """Handle the end of a base: captured by this process, or made by the replica."""
        if kind == "durable":
            self._end(message["number"], None, message["size_bytes"])
        elif kind == "failed":
            self._end(message["number"], error_from_wire(message["error"]), 0)
        elif kind == "done":
            with self._changed:
                ended = self._waiting.pop(message["number"], None)
                self._changed.notify_all()
            if ended is not None:
                self.replica_requests.retained(ended.step)
        elif kind == "persisted":
            self.replica_requests.persisted(
                message["numbers"], message["step"], message["size_bytes"]
            )
        elif kind == "retained":
            self.replica_requests.retained(message["step"])
        elif kind == "asks_refused":
            error = error_from_wire(message["error"])
            self.replica_requests.refused(message["numbers"], error, message["step"])

    def _on_event(self, kind: str, message: dict[str, Any]) -> None:
        """Handle an event of the log, the peers or the replica."""
        if kind == "replica_stopped":
            for participant in self._participants:
                participant.replica_stopped(message["why"], message["for_good"])
        elif kind == "logged":
            self._log_on_disk(message["upto"])
        elif kind in ("peered", "copied"):
            self._on_copied(kind, message)
        elif kind == "rebuilt":
            on_rebuilt = self.rebuilding.pop(message["number"], None)
            if on_rebuilt is not None:
                on_rebuilt(message["whole"])

    def _on_copied(self, kind: str, message: dict[str, Any]) -> None:
        """Handle a base or a step that has arrived elsewhere."""
        # Sent before the keeper began this timeline: after a rewind its steps are not those of the
        # same numbers here, and a promise must not count them.
        if message["of_timeline"] != self._timeline:
            return
        if kind == "peered":
            if message["base"] is not None:
                for participant in self._participants:
                    participant.base_everywhere(message["base"])
            if message["step"] is not None:
                self.peer_log_step = message["step"]
            return
        for participant in self._participants:
            participant.copied(message["place"], message["base"], message["step"])

    def _log_on_disk(self, number: int) -> None:
        for participant in self._participants:
            participant.log_on_disk(number)

    def _end(self, number: int, error: EverstepError | None, size_bytes: int) -> None:
        """End a base that is durable or has failed. Retention may still be running."""
        with self._changed:
            # The thread that removes the capture ends it: _lose() may run at the same time in
            # another one.
            capture = self._writing.pop(number, None)
        if capture is None:
            return
        if error is None:
            complete(capture.save.durable, size_bytes)
        else:
            fail(capture.save.durable, error)
        # After the outcome is set: on_end() keeps the block of a durable base and returns that of a
        # failed one.
        capture.on_end(capture)

    def _lose(self, error: EverstepError | None) -> None:
        """Note the loss of the keeper, and end everything that waits for it."""
        with self._changed:
            if self.lost is not None:
                return
            captures = list(self._writing.values())
            self.lost_steps.update(
                (capture.step for capture in captures), self.replica_requests.steps
            )
            # Before the dicts are cleared: a waiter that finds them empty reads ``lost``.
            self.lost = error or KeeperError("this keeper was released")
            self._writing.clear()
            self._waiting.clear()
            self._changed.notify_all()
        # Without the lock: callbacks of futures and on_end() take other locks.
        self.replica_requests.lose(self.lost)
        self._log_on_disk(0)  # wake callers that wait for the log; they read ``lost``
        for capture in captures:
            fail(capture.save.durable, self.lost)
            capture.on_end(capture)
