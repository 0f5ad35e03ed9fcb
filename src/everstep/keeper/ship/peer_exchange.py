"""Send a rank's bases to the memory of its peer, and receive those of other ranks.

One thread of the keeper; training is not involved. A base is sent in chunks at a configured pace,
with a few chunks unacknowledged at a time. Lost messages are sent again. The receiver verifies the
digests. Rank 0 decides which base is sent when (:class:`everstep.commit.peer_copies.CopyRounds`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.commit.job.actions import Send
from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import (
    Message,
    PeerCopyAck,
    PeerCopyBegin,
    PeerCopyChunk,
    PeerLogAck,
    PeerLogBegin,
    PeerLogChunk,
    PeerMessage,
    PeerRound,
    PeerRoundReply,
)
from everstep.commit.lineage import BaseId
from everstep.commit.peer_copies import CopyRounds
from everstep.errors import EverstepError, KeeperError
from everstep.format.message_codec import Stored
from everstep.keeper.held.peer_base_store import PeerBaseStore
from everstep.keeper.held.peer_log_store import PeerLogStore
from everstep.keeper.ship.log_sender import LogSender
from everstep.link.job_session import JobSession
from everstep.restore.fetch.held import HeldBase
from everstep.seams.clock import Clock

__all__ = ["Pace", "PeerExchange", "PeerExchangeStats", "Source"]

_log = logging.getLogger("everstep.keeper")
_CHUNK_BYTES = 1 << 20
_CHUNKS_IN_FLIGHT_MAX = 4
"""Chunks sent before the first of them is acknowledged."""
_REPEAT_S = 2.0
_IDLE_S = 0.1
_BUSY_S = 0.01
_SHARE = 0.8
"""Share of the time between two bases used for sending; the rest absorbs delays (section 3.2)."""

Source = tuple[HeldBase, bytes]
"""A rank's files of a base, and the record of its timeline."""


@dataclass(slots=True)
class PeerExchangeStats:
    """Figures about bases since the start.

    Attributes:
        sent: bases that the peer has received completely.
        sent_bytes: their bytes.
        passed_over: bases that became durable while an older one was being sent and were overtaken
            by a newer one: the interval is too short for the link.
        failed: bases that could not be sent.
        step: step of the newest base that the peer holds completely.
    """

    sent: int = 0
    sent_bytes: int = 0
    passed_over: int = 0
    failed: int = 0
    step: int | None = None


@dataclass(slots=True)
class Pace:
    """Rate at which bases are sent.

    Attributes:
        bytes_per_s: maximum rate. None: four fifths of the time between the last two bases are
            used; the first two bases are sent at full speed.
        at_once: True: None means full speed, as training waits for the transfer.
    """

    bytes_per_s: float | None = None
    at_once: bool = False
    _durable_s: float | None = None
    _interval_s: float | None = None

    def durable(self, now_s: float) -> None:
        """Note a new base."""
        if self._durable_s is not None:
            self._interval_s = now_s - self._durable_s
        self._durable_s = now_s

    def rate_of(self, size_bytes: int) -> float | None:
        """Return the bytes per second for a base of this size; None: full speed."""
        if self.bytes_per_s is not None:
            return self.bytes_per_s
        if self.at_once or not self._interval_s:
            return None
        return size_bytes / (_SHARE * self._interval_s)


@dataclass(slots=True)
class _Sending:
    """The base that this rank sends.

    Attributes:
        reported_s: time of the last report to rank 0.
        progress_s: time of the last progress.
        queried_s: time when the peer was last asked how much it holds.
        answered: True once it has replied.
        reply_s: time of its last reply.
        sent_bytes: bytes that were sent.
        acked_bytes: bytes that the peer has acknowledged.
        outcome: ``"whole"`` or ``"failed"``; repeated to rank 0 until the next round; "" while it
            is being sent.
    """

    base: BaseId
    reported_s: float
    progress_s: float
    source: Source | None = None
    size_bytes: int = 0
    rate: float | None = None
    paced_s: float = 0.0
    paced_bytes: int = 0
    queried_s: float = 0.0
    answered: bool = False
    reply_s: float = 0.0
    sent_bytes: int = 0
    acked_bytes: int = 0
    outcome: str = ""


class PeerExchange:
    """One rank's exchange with its peer, for one start of the job.

    Args:
        find: returns a base of this rank from wherever it can be read; None: it cannot be read yet.
        send: sends a message to the keeper of a rank, without waiting.
        notify: called with errors; training goes on.
        timeout_s: seconds without progress after which a peer is reported.
        logs: steps of other ranks' logs that are held.
        on_everywhere: called in the thread with each base that all peers hold completely.

    Attributes:
        log: sends this rank's own log; None: it is not sent.
    """

    def __init__(
        self,
        job_session: JobSession,
        store: PeerBaseStore,
        pace: Pace,
        clock: Clock,
        find: Callable[[BaseId], Source | None],
        send: Callable[[int, Message], None],
        notify: Callable[[EverstepError], None],
        *,
        timeout_s: float,
        logs: PeerLogStore | None = None,
        on_everywhere: Callable[[BaseId], None] = lambda base: None,
    ) -> None:
        peer = job_session.peer
        # Its own rank means that it has no peer: a base in every rank's own memory suffices.
        self.peer = job_session.rank if peer is None else peer
        self.stats = PeerExchangeStats()
        self._job_session = job_session
        self._store = store
        self._pace = pace
        self._clock = clock
        self._find = find
        self._send = send
        self._notify = notify
        self._timeout_s = timeout_s
        self._rounds = None
        if job_session.rank == COORDINATOR:
            self._rounds = CopyRounds(
                len(job_session.disks), repeat_s=_REPEAT_S, late_s=2 * timeout_s
            )
        self.logs = PeerLogStore() if logs is None else logs
        self.log: LogSender | None = None
        self._on_everywhere = on_everywhere
        self._everywhere: BaseId | None = None
        self._events: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._sending: _Sending | None = None
        self._waiting: BaseId | None = None
        # The base that all ranks send, as far as this rank has been notified.
        self._round: BaseId | None = None
        # The newest base of earlier rounds.
        self._past: BaseId | None = None
        # Announcements that came before the news of their round, by sender.
        self._early: dict[int, PeerCopyBegin] = {}
        self._reported: set[str] = set()
        self._thread: threading.Thread | None = None

    # From any thread.

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="everstep-peers", daemon=True)
        self._thread.start()

    def receive(self, sender: int, message: PeerMessage) -> None:
        """Queue a message that has arrived."""
        self._events.put(lambda: self._handle(sender, message))

    def durable(self, base: BaseId) -> None:
        """Queue a base that is durable on all ranks."""
        self._events.put(lambda: self._durable(base))

    def logged(self) -> None:
        """Wake the thread: a step of the log is complete."""
        self._events.put(lambda: None)

    def report_failure(self, error: EverstepError, kind: str = "") -> None:
        """Report an error, once for each kind. In the thread."""
        _log.warning("%s", error)
        if (kind or error.message) not in self._reported:
            self._reported.add(kind or error.message)
            self._notify(error)

    def is_past(self, base: BaseId) -> bool:
        """Return True if all peers hold a base completely, or will never do so."""
        over = self._past
        now = self._round
        return (over is not None and base <= over) or (now is not None and base < now)

    def needed(self) -> list[BaseId]:
        """Return bases that disks must keep in case a node is lost: peers hold its files of these.

        Empty except on rank 0, which decides about deletions.
        """
        if self._rounds is None:
            return []
        return self._rounds.needed(self._store.bases)

    def close(self) -> None:
        """End the thread. Transfers in progress are abandoned."""
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    # The thread.

    def _run(self) -> None:
        while True:
            busy = self._sending is not None and not self._sending.outcome
            busy = busy or (self.log is not None and self.log.busy)
            try:
                if not self.turn(_BUSY_S if busy else _IDLE_S):
                    return
            except BaseException as error:
                # Must not end this thread: all later copies would be missing without a report.
                _log.exception("internal error while sending bases to a peer")
                self.report_failure(
                    EverstepError(f"internal error while sending to a peer: {error!r}")
                )

    def turn(self, timeout_s: float) -> bool:
        """Handle events that arrive within ``timeout_s``, then send; return False after
        :meth:`close`.
        """
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            while True:
                if event is None:
                    return False
                event()
                event = self._events.get_nowait()
        except queue.Empty:
            pass
        if self._rounds is not None:
            self._send_all(self._rounds.tick(self._now_s))
        self._continue_sending()
        if self.log is not None:
            sent_bytes = self.log.turn()
            # Log and bases share one rate.
            if self._sending is not None:
                self._sending.paced_bytes += sent_bytes
        return True

    @property
    def _now_s(self) -> float:
        return self._clock.monotonic_s()

    def _send_all(self, sends: list[Send]) -> None:
        for one in sends:
            self._deliver(one.rank, one.message)

    def _deliver(self, rank: int, message: Message) -> None:
        if rank == self._job_session.rank:
            assert isinstance(message, PeerMessage)
            self._handle(rank, message)
        else:
            self._send(rank, message)

    def _handle(self, sender: int, message: PeerMessage) -> None:
        if isinstance(message, PeerCopyBegin):
            self._on_begun(sender, message)
        elif isinstance(message, PeerCopyChunk):
            self._deliver(sender, self._store.part(sender, message))
        elif isinstance(message, PeerLogBegin):
            self._deliver(sender, self.logs.begun(sender, message))
        elif isinstance(message, PeerLogChunk):
            self._deliver(sender, self.logs.part(sender, message))
        elif isinstance(message, PeerLogAck):
            if self.log is not None:
                self.log.on_reply(message)
        elif isinstance(message, PeerCopyAck):
            self._on_at(message)
        elif isinstance(message, PeerRoundReply):
            if self._rounds is not None:
                self._send_all(
                    self._rounds.on_reply(sender, message.base, message.state, self._now_s)
                )
        elif isinstance(message, PeerRound):
            self._on_round(message)

    def _durable(self, base: BaseId) -> None:
        self._pace.durable(self._now_s)
        if self._sending is not None and not self._sending.outcome and base != self._sending.base:
            if self._waiting is not None and self._waiting != self._sending.base:
                self._pass_over(self._waiting)
            self._waiting = base
        if self._rounds is not None:
            self._send_all(self._rounds.durable(base, self._now_s))

    def _pass_over(self, base: BaseId) -> None:
        self.stats.passed_over += 1
        self.report_failure(
            KeeperError(
                f"the base of step {base.step} is not sent to the peer, rank {self.peer}: the "
                "previous one is still being sent while the next one is already durable",
                step=base.step,
                rank=self._job_session.rank,
                tier="peer",
                hint="lengthen every=, or raise PeerOptions(bytes_per_s=); counted in "
                "stats().peers_passed_over",
            ),
            "passed over",
        )

    def _on_begun(self, sender: int, message: PeerCopyBegin) -> None:
        """Handle the announcement of a base by another rank.

        If the store holds two complete bases of that rank, only the news of the current round tells
        which one must stay: the reply waits for it.
        """
        base = BaseId(message.marker.record.timeline, message.marker.record.step)
        if base != self._round and self._store.holds_two(sender):
            self._early[sender] = message
            return
        self._early.pop(sender, None)
        self._deliver(sender, self._store.begun(sender, message))

    def _on_round(self, message: PeerRound) -> None:
        over = [one for one in (self._past, message.everywhere) if one is not None]
        if self._round is not None and self._round != message.base:
            over.append(self._round)
        self._past = max(over, default=None)
        self._round = message.base
        if message.everywhere is not None:
            self._base_everywhere(message.everywhere)
            if message.base is None:
                self._deliver(COORDINATOR, PeerRoundReply(message.everywhere, "noted"))
        sending = self._sending
        if message.base is None:
            self._sending = None
        elif sending is None or sending.base != message.base:
            if sending is not None and not sending.outcome:
                _close(sending)
            now_s = self._now_s
            self._sending = _Sending(message.base, now_s, now_s)
            if self._waiting is not None and self._waiting <= message.base:
                self._waiting = None
            self._deliver(COORDINATOR, PeerRoundReply(message.base, "sending"))
        early = self._early
        self._early = {}
        for sender, begun in early.items():
            # Announcements of another round are dropped: their senders repeat them.
            if BaseId(begun.marker.record.timeline, begun.marker.record.step) == message.base:
                self._on_begun(sender, begun)

    def _base_everywhere(self, everywhere: BaseId) -> None:
        """Handle the news that all peers hold a base completely."""
        self._store.passed(everywhere)
        self.logs.passed(everywhere, self._store.ranks_of(everywhere))
        if self._everywhere is None or everywhere > self._everywhere:
            self._everywhere = everywhere
            if self.log is not None:
                self.log.passed(everywhere)
            self._on_everywhere(everywhere)

    # Sending.

    def _continue_sending(self) -> None:
        one = self._sending
        now_s = self._now_s
        if one is None:
            return
        if now_s - one.reported_s >= _REPEAT_S:
            one.reported_s = now_s
            self._deliver(COORDINATOR, PeerRoundReply(one.base, one.outcome or "sending"))
        if one.outcome or self._sending is not one:
            return
        if one.source is None:
            self._begin(one, now_s)
        elif one.answered and one.sent_bytes > one.acked_bytes:
            # Chunks or replies were lost: ask how much has arrived.
            if now_s - one.reply_s > _REPEAT_S:
                self._query(one, now_s)
        elif one.answered:
            # Everything sent is acknowledged: only the pace delays the rest, not the peer.
            one.progress_s = now_s
        elif now_s - one.queried_s > _REPEAT_S:
            self._query(one, now_s)
        if now_s - one.progress_s > self._timeout_s:
            if one.source:
                reason = f"no reply from its keeper for {self._timeout_s:g} s"
            else:
                reason = f"its files could not be read for {self._timeout_s:g} s"
            self._fail(one, reason)
        elif one.answered:
            self._send_chunks(one, now_s)

    def _begin(self, one: _Sending, now_s: float) -> None:
        one.source = self._find(one.base)
        if one.source is not None and self.peer == self._job_session.rank:
            self._finish(one, "whole")
        elif one.source is not None:
            one.size_bytes = sum(file.size_bytes for file, _ in one.source[0].files)
            one.rate = self._pace.rate_of(one.size_bytes)
            one.progress_s = one.paced_s = now_s
            self._query(one, now_s)

    def _query(self, one: _Sending, now_s: float) -> None:
        assert one.source is not None
        held, record = one.source
        one.answered = False
        one.queried_s = now_s
        self._send(self.peer, PeerCopyBegin(Stored(held.marker), record))

    def _send_chunks(self, one: _Sending, now_s: float) -> None:
        assert one.source is not None
        while (
            one.sent_bytes < one.size_bytes
            and one.sent_bytes - one.acked_bytes < _CHUNKS_IN_FLIGHT_MAX * _CHUNK_BYTES
            and (one.rate is None or one.paced_bytes <= one.rate * (now_s - one.paced_s))
        ):
            data = bytearray(min(one.size_bytes - one.sent_bytes, _CHUNK_BYTES))
            try:
                _read(one.source[0], one.sent_bytes, memoryview(data))
            except (OSError, EverstepError) as error:
                self._fail(one, f"its files cannot be read any more ({error})")
                return
            if one.sent_bytes == one.acked_bytes:
                # Start the timeout with the first chunk in flight.
                one.reply_s = now_s
            self._send(self.peer, PeerCopyChunk(one.base, one.sent_bytes, bytes(data)))
            one.sent_bytes += len(data)
            one.paced_bytes += len(data)

    def _on_at(self, message: PeerCopyAck) -> None:
        one = self._sending
        now_s = self._now_s
        if one is None or one.outcome or one.base != message.base or one.source is None:
            return
        if message.problem:
            self._fail(one, message.problem)
            return
        further = message.received_bytes > one.acked_bytes
        if further or not one.answered:
            one.progress_s = now_s
        # Replies come in order. One that acknowledges more belongs to a chunk; later chunks may
        # still be on their way, and sending them again would slow a slow link down for ever. Only
        # a reply to a query without progress says that chunks were lost.
        if message.received_bytes > one.sent_bytes or not (one.answered or further):
            one.sent_bytes = message.received_bytes
        one.answered = True
        one.reply_s = now_s
        one.acked_bytes = message.received_bytes
        if message.whole:
            self.stats.sent += 1
            self.stats.sent_bytes += one.size_bytes
            self.stats.step = one.base.step
            self._finish(one, "whole")

    def _fail(self, one: _Sending, reason: str) -> None:
        self.stats.failed += 1
        self.report_failure(
            KeeperError(
                f"the base of step {one.base.step} is not sent to the peer, rank {self.peer}: "
                f"{reason}",
                step=one.base.step,
                rank=self._job_session.rank,
                tier="peer",
                hint="training goes on; the next base will be sent",
            ),
            reason,
        )
        self._finish(one, "failed")

    def _finish(self, one: _Sending, state: str) -> None:
        _close(one)
        one.outcome = state
        one.reported_s = self._now_s
        self._deliver(COORDINATOR, PeerRoundReply(one.base, state))


def _read(held: HeldBase, offset: int, buffer: memoryview) -> None:
    """Read bytes from the concatenation of all files of a base.

    Raises:
        OSError: a file is shorter than before.
    """
    begin = done = 0
    for file, _ in held.files:
        at = offset + done
        end = begin + file.size_bytes
        if begin <= at < end and done < buffer.nbytes:
            want = min(buffer.nbytes - done, end - at)
            if file.read_into(buffer[done : done + want], at - begin) != want:
                raise OSError(f"a file is too short: expected {want} more bytes")
            done += want
        begin = end


def _close(one: _Sending) -> None:
    if one.source is not None:
        for file, _ in one.source[0].files:
            file.close()
