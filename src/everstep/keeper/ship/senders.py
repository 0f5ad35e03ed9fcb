"""Send a rank's bases and the steps of its log to the memory of its peer, in the background.

Runs in the keeper's thread of :mod:`.peer_copies`. A payload is sent with a window of
unacknowledged bytes. Messages may be lost or late: the sender asks how much has arrived, and
continues from there.

Of the log a few complete steps at a time are copied out, compared with their digests, and sent; the
next ones follow when the peer holds them. So memory for transfers is limited, and steps that are
not sent yet stay in the log. Bases are sent one after the other, at a configured pace; rank 0
decides which one when (:class:`everstep.commit.peer_copies.CopyRounds`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.commit import BaseId
from everstep.commit.job import COORDINATOR, Message
from everstep.commit.job.messages import (
    PeerCopyAck,
    PeerCopyBegin,
    PeerCopyChunk,
    PeerLogAck,
    PeerLogBegin,
    PeerLogChunk,
    PeerRoundReply,
)
from everstep.errors import DamageError, EverstepError, FormatError, KeeperError
from everstep.format.message_codec import Stored
from everstep.keeper.log import LogStore
from everstep.link.messages import JobSession
from everstep.restore.fetch import HeldBase, PackedSteps
from everstep.restore.fetch.held import pack_steps, unpack_steps
from everstep.seams import Clock

if TYPE_CHECKING:
    from everstep.keeper.ship.log_copies import Shrink

_log = logging.getLogger("everstep.keeper")
CHUNK_BYTES = 1 << 20
REPEAT_S = 2.0
"""Seconds until an unanswered message is repeated."""
_CHUNKS_IN_FLIGHT_MAX = 4
"""Chunks sent before the first of them is acknowledged."""


@dataclass(slots=True)
class CopyStats:
    """Figures about copies of bases, or of steps of the log, since the start.

    Attributes:
        copied: bases or steps that were copied completely.
        copied_bytes: their bytes.
        step: newest step that was copied.
        missed: bases that became durable while an older one was being sent and were overtaken by a
            newer one: the interval is too short for the link. Or steps that will not be copied, as
            they were released before, or did not fit into the memory of the peer: later steps are
            useless until the next base.
        failed: failed attempts.
        gap_last: last step of the newest gap in the steps; -1 without one.
    """

    copied: int = 0
    copied_bytes: int = 0
    step: int | None = None
    missed: int = 0
    failed: int = 0
    gap_last: int = -1


class PeerLink:
    """Connection of this rank to the keepers of the other ranks.

    Args:
        send: sends a message to the keeper of a rank, without waiting; it may be lost.
        notify: called with errors; training goes on.

    Attributes:
        rank: this rank.
        peer: rank whose keeper holds this rank's copies.
        world: number of ranks.
        timeout_s: seconds without progress after which a peer is reported.
    """

    def __init__(
        self,
        job_session: JobSession,
        clock: Clock,
        send: Callable[[int, Message], None],
        notify: Callable[[EverstepError], None],
        *,
        timeout_s: float,
    ) -> None:
        peer = job_session.peer
        self.rank = job_session.rank
        self.peer = job_session.rank if peer is None else peer
        self.world = len(job_session.disks)
        self.clock = clock
        self.timeout_s = timeout_s
        self.send = send
        self._notify = notify
        self._reported: set[str] = set()

    @property
    def now_s(self) -> float:
        """Time of the clock."""
        return self.clock.monotonic_s()

    def report(self, error: EverstepError, kind: str = "") -> None:
        """Report an error, once for each kind."""
        _log.warning("%s", error)
        if (kind or error.message) not in self._reported:
            self._reported.add(kind or error.message)
            self._notify(error)

    def report_not_sent(self, what: str, reason: str, step: int, hint: str, kind: str) -> None:
        """Report that ``what`` (a base, steps of the log) is not sent to the peer."""
        message = f"{what} not sent to the peer, rank {self.peer}: {reason}"
        self.report(KeeperError(message, step=step, rank=self.rank, tier="peer", hint=hint), kind)


class WindowedTransfer:
    """Transfer of one payload; subclasses say what is sent.

    Args:
        announcement: message that begins the transfer, and asks how much has arrived.
        rate: maximum bytes per second; None: full speed.
        free_s: time before which no chunk is sent, because of the rate.

    Attributes:
        size_bytes: size of the payload.
        progress_s: time of the last progress.
        free_s: time at which the rate allows the next chunk.
    """

    def __init__(
        self,
        link: PeerLink,
        announcement: Message,
        size_bytes: int,
        *,
        rate: float | None,
        free_s: float = 0.0,
    ) -> None:
        self.size_bytes = size_bytes
        self._link = link
        self._announcement = announcement
        self._rate = rate
        self.progress_s = self._reply_s = link.now_s
        self.free_s = max(self.progress_s, free_s)
        self._sent_bytes = 0
        self._acked_bytes = 0
        self.query()

    def chunk(self, offset: int, size_bytes: int) -> Message:
        """Return the message with these bytes.

        Raises:
            OSError, EverstepError: they cannot be read any more.
        """
        raise NotImplementedError

    @property
    def silent(self) -> bool:
        """True if there was no progress for the timeout of the link."""
        return self._link.now_s - self.progress_s > self._link.timeout_s

    def query(self) -> None:
        """Announce the payload, or ask how much of it has arrived."""
        # Nothing is sent before the reply: after lost chunks the peer needs earlier bytes first.
        self._answered = False
        self._queried_s = self._link.now_s
        self._link.send(self._link.peer, self._announcement)

    def watch(self) -> None:
        """Ask again if a reply is late."""
        now_s = self._link.now_s
        if self._answered and self._sent_bytes > self._acked_bytes:
            # Chunks or replies were lost: ask how much has arrived.
            if now_s - self._reply_s > REPEAT_S:
                self.query()
        elif self._answered:
            # Everything sent is acknowledged: only the pace delays the rest, not the peer.
            self.progress_s = now_s
        elif now_s - self._queried_s > REPEAT_S:
            self.query()

    def send(self) -> int:
        """Send the chunks that window and rate allow; return the bytes sent.

        Raises:
            OSError, EverstepError: the payload cannot be read any more.
        """
        now_s = self._link.now_s
        before_bytes = self._sent_bytes
        while (
            self._answered
            and self._sent_bytes < self.size_bytes
            # The window bounds the memory of both keepers, and what a slow link must deliver
            # before a query.
            and self._sent_bytes - self._acked_bytes < _CHUNKS_IN_FLIGHT_MAX * CHUNK_BYTES
            and now_s >= self.free_s
        ):
            count = min(self.size_bytes - self._sent_bytes, CHUNK_BYTES)
            chunk = self.chunk(self._sent_bytes, count)
            if self._sent_bytes == self._acked_bytes:
                # Start the timeout with the first chunk in flight.
                self._reply_s = now_s
            self._link.send(self._link.peer, chunk)
            self._sent_bytes += count
            self.charge(count)
        return self._sent_bytes - before_bytes

    def charge(self, size_bytes: int) -> None:
        """Count bytes that were sent against the rate."""
        if self._rate is not None:
            # Added to the planned time, not to the current one: chunks that were sent late are
            # caught up, so that the average holds.
            self.free_s += size_bytes / self._rate

    def acknowledge(self, received_bytes: int) -> None:
        """Handle a reply: the peer has received so many bytes from the start."""
        now_s = self._link.now_s
        further = received_bytes > self._acked_bytes
        if further or not self._answered:
            self.progress_s = now_s
        # Replies come in order. One that acknowledges more belongs to a chunk; later chunks may
        # still be on their way, and sending them again would slow a slow link down for ever. Only
        # a reply to a query without progress says that chunks were lost.
        if received_bytes > self._sent_bytes or not (self._answered or further):
            self._sent_bytes = received_bytes
        self._answered = True
        self._reply_s = now_s
        self._acked_bytes = received_bytes


_BATCH_BYTES = 4 << 20
"""Maximum size of several steps sent together; a single step may be larger."""
_TRIES_MAX = 3
_HINT = (
    "training goes on; if this node is lost before its peer has the next base, training resumes "
    "from before that step. Raise PeerOptions(host_bytes=), or shorten every="
)


class _LogTransfer(WindowedTransfer):
    """Transfer of some steps.

    Attributes:
        key: timeline and first step, which replies repeat.
        upto: number of their last record.
        full: True if the peer had no memory for them when it last replied.
    """

    def __init__(
        self,
        link: PeerLink,
        record: bytes,
        steps: PackedSteps,
        upto: int,
        *,
        rate: float | None,
        free_s: float,
    ) -> None:
        run = steps.run
        self.key = run.timeline, run.first
        self.steps = steps
        self.upto = upto
        self.full = False
        begun = PeerLogBegin(
            run.timeline,
            run.first,
            run.last,
            record,
            steps.memory.nbytes,
            steps.index_bytes,
            steps.index_digest,
        )
        super().__init__(link, begun, begun.size_bytes, rate=rate, free_s=free_s)

    def chunk(self, offset: int, size_bytes: int) -> PeerLogChunk:
        data = bytes(self.steps.memory[offset : offset + size_bytes])
        return PeerLogChunk(*self.key, offset, data)


class LogSender:
    """Sends one rank's log to its peer, for one start of the job.

    Args:
        log: log of this rank.
        bytes_per_s: maximum rate; None: full speed.
        record_of: returns the record of a timeline as it is on disk; None: it cannot be read yet.
        shrink: makes a record approximate; None: records are sent exactly.
        on_step: called with the newest step that the peer holds, whenever it advances; with none
            after a gap, until a base after the gap is everywhere.
    """

    def __init__(
        self,
        link: PeerLink,
        log: LogStore,
        timeline: int,
        record_of: Callable[[int], bytes | None],
        *,
        bytes_per_s: float | None = None,
        shrink: Shrink | None = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.stats = CopyStats()
        self._link = link
        self._log = log
        self._timeline = timeline
        self._record_of = record_of
        self._record: bytes | None = None
        self._rate = bytes_per_s
        self._shrink = shrink
        self._on_step = on_step
        # Number of the last record that was sent or skipped.
        self._number = 0
        # The steps that the peer received last.
        self._before: PackedSteps | None = None
        self._everywhere_step = -1
        self._batch: _LogTransfer | None = None
        self._free_s = 0.0
        self._tries = 0

    @property
    def busy(self) -> bool:
        """True while steps are being sent."""
        return self._batch is not None and not self._batch.full

    def passed(self, everywhere: BaseId) -> None:
        """Skip steps up to this base: all peers hold it completely."""
        if everywhere.timeline == self._timeline:
            self._everywhere_step = max(self._everywhere_step, everywhere.step)

    def turn(self) -> int:
        """Send everything that may be sent now; return the bytes sent."""
        if self._batch is not None and self._batch.steps.run.last <= self._everywhere_step:
            self._past(self._batch)
        if self._batch is None:
            self._begin()
        one = self._batch
        if one is None:
            return 0
        one.watch()
        if one.silent:
            # Reported again only after another timeout without progress.
            one.progress_s = self._link.now_s
            self._fail(one, f"no reply from its keeper for {self._link.timeout_s:g} s", "silent")
        sent_bytes = one.send()
        # The rate holds from one batch to the next.
        self._free_s = one.free_s
        return sent_bytes

    def on_reply(self, message: PeerLogAck) -> None:
        """Handle the peer's reply about the steps in flight."""
        one = self._batch
        # A late reply about earlier steps.
        if one is None or (message.timeline, message.first) != one.key:
            return
        was_full = one.full
        one.full = message.state == "full"
        if message.state == "whole":
            self._confirmed(one)
        elif message.state == "full":
            one.progress_s = self._link.now_s
            if not was_full:
                self._fail(one, f"its memory for logs is full: {message.problem}", "full")
        elif message.state == "refused":
            self._refused(one, message.problem)
        elif message.state == "lost":
            # The peer has a new keeper: start again.
            one.query()
        else:
            one.acknowledge(message.received_bytes)

    def _begin(self) -> None:
        """Take the next steps out of the log and announce them."""
        if self._record is None:
            self._record = self._record_of(self._timeline)
        if self._record is None:
            return
        if self._shrink is not None and not self._shrink.ready:
            return  # bases, which need no torch, are sent by the same thread
        records, upto = self._log.steps_from(self._number, self._everywhere_step, _BATCH_BYTES)
        if not records:
            return
        first = records[0].head.step
        last = records[-1].head.step
        try:
            steps = pack_steps(records)
            if self._shrink is not None:
                steps = pack_steps([self._shrink(record) for record in unpack_steps(steps)])
        except (DamageError, FormatError) as error:
            # Usually training has already reused their memory.
            self._number = upto
            self._report_missed(
                first, last, f"they were released before they could be sent ({error.message})"
            )
            return
        self._report_gap(steps)
        self._batch = _LogTransfer(
            self._link, self._record, steps, upto, rate=self._rate, free_s=self._free_s
        )

    def _report_gap(self, steps: PackedSteps) -> None:
        """Report steps that are missing between these and the previous ones, unless a base covers
        them.
        """
        before = self._before
        run = steps.run
        if before is None or run.first - 1 <= self._everywhere_step:
            return
        if not run.follows(run.first, before.run.lsns[-1]) or run.first != before.run.last + 1:
            self._report_missed(before.run.last + 1, run.first - 1, "they are missing in the log")

    def _confirmed(self, one: _LogTransfer) -> None:
        run = one.steps.run
        self.stats.copied += len(run.lsns)
        self.stats.copied_bytes += one.size_bytes
        self.stats.step = run.last
        self._before = one.steps
        self._past(one)
        if self._everywhere_step >= self.stats.gap_last:
            self._on_step(run.last)

    def _past(self, one: _LogTransfer) -> None:
        self._batch = None
        self._number = one.upto
        self._tries = 0

    def _refused(self, one: _LogTransfer, problem: str) -> None:
        """Take the steps out of the log again and send them again; give up after a few attempts."""
        self._tries += 1
        self._batch = None
        if self._tries >= _TRIES_MAX:
            self._past(one)
            self._report_missed(one.steps.run.first, one.steps.run.last, problem)

    def _report_missed(self, first: int, last: int, reason: str) -> None:
        last = max(first, last)
        self.stats.missed += last - first + 1
        self.stats.gap_last = max(self.stats.gap_last, last)
        what = f"steps {first} to {last} of the log are"
        self._link.report_not_sent(what, reason, last, _HINT, "missed")

    def _fail(self, one: _LogTransfer, reason: str, kind: str) -> None:
        first = one.steps.run.first
        what = f"the log from step {first} on is"
        self._link.report_not_sent(what, reason, first, _HINT, kind)


_SHARE = 0.8
"""Share of the time between two bases used for sending; the rest absorbs delays (section 3.2)."""

Source = tuple[HeldBase, bytes]
"""A rank's files of a base, and the record of its timeline."""


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


class _BaseTransfer(WindowedTransfer):
    """Transfer of a rank's files of a base, one after the other."""

    def __init__(self, link: PeerLink, base: BaseId, source: Source, pace: Pace) -> None:
        held, record = source
        size_bytes = sum(file.size_bytes for file, _ in held.files)
        self._base = base
        self.files = [file for file, _ in held.files]
        rate = pace.rate_of(size_bytes)
        super().__init__(link, PeerCopyBegin(Stored(held.marker), record), size_bytes, rate=rate)

    def chunk(self, offset: int, size_bytes: int) -> PeerCopyChunk:
        data = bytearray(size_bytes)
        begin = done = 0
        for file in self.files:
            at = offset + done
            end = begin + file.size_bytes
            # A chunk may begin in one file and end in a later one.
            if begin <= at < end and done < size_bytes:
                want = min(size_bytes - done, end - at)
                if file.read_into(memoryview(data)[done : done + want], at - begin) != want:
                    raise OSError(f"a file is too short: expected {want} more bytes")
                done += want
            begin = end
        return PeerCopyChunk(self._base, offset, bytes(data))


@dataclass(slots=True)
class _Sending:
    """The base that this rank sends.

    Attributes:
        begun_s: time when it was requested.
        reported_s: time of the last report to rank 0.
        transfer: None until its files can be read.
        outcome: ``"whole"`` or ``"failed"``; repeated to rank 0 until the next round; "" while it
            is being sent.
    """

    base: BaseId
    begun_s: float
    reported_s: float
    transfer: _BaseTransfer | None = None
    outcome: str = ""

    def close(self) -> None:
        """Close its files."""
        if self.transfer is not None:
            for file in self.transfer.files:
                file.close()


class BaseSender:
    """Sends one rank's bases to its peer, for one start of the job.

    Args:
        find: returns a base of this rank from wherever it can be read; None: it cannot be read yet.
        deliver: delivers a message to a rank, which may be this one.
    """

    def __init__(
        self,
        link: PeerLink,
        pace: Pace,
        find: Callable[[BaseId], Source | None],
        deliver: Callable[[int, Message], None],
    ) -> None:
        self.stats = CopyStats()
        self._link = link
        self._pace = pace
        self._find = find
        self._deliver = deliver
        self._sending: _Sending | None = None
        self._waiting: BaseId | None = None

    @property
    def busy(self) -> bool:
        """True while a base is being sent."""
        return self._sending is not None and not self._sending.outcome

    def durable(self, base: BaseId) -> None:
        """Note a base that is durable on all ranks; it waits while another one is being sent."""
        self._pace.durable(self._link.now_s)
        one = self._sending
        # Rank 0's keeper may announce the round of this base before this rank has it on disk: then
        # it is the one that is being sent.
        if one is not None and not one.outcome and base != one.base:
            if self._waiting is not None and self._waiting != one.base:
                self._pass_over(self._waiting)
            self._waiting = base

    def begin(self, base: BaseId) -> None:
        """Send this base, which rank 0 has chosen, instead of the previous one."""
        one = self._sending
        if one is not None and one.base == base:
            return
        self.end()
        now_s = self._link.now_s
        self._sending = _Sending(base, now_s, now_s)
        if self._waiting is not None and self._waiting <= base:
            self._waiting = None
        self._report("sending", base)

    def end(self) -> None:
        """Note that the round is over."""
        if self._sending is not None and not self._sending.outcome:
            self._sending.close()
        self._sending = None

    def charge(self, size_bytes: int) -> None:
        """Count bytes of the log that were sent: log and bases share one rate."""
        if self._sending is not None and self._sending.transfer is not None:
            self._sending.transfer.charge(size_bytes)

    def turn(self) -> None:
        """Send everything that may be sent now."""
        one = self._sending
        now_s = self._link.now_s
        if one is None:
            return
        # Repeated: rank 0 ends a round without a sign of life.
        if now_s - one.reported_s >= REPEAT_S:
            one.reported_s = now_s
            self._report(one.outcome or "sending", one.base)
        # The report may have ended the round: rank 0 hears itself at once.
        if one.outcome or self._sending is not one:
            return
        if one.transfer is None:
            self._open(one)
        if one.transfer is None:
            if not one.outcome and now_s - one.begun_s > self._link.timeout_s:
                self.fail(f"its files could not be read for {self._link.timeout_s:g} s")
            return
        one.transfer.watch()
        if one.transfer.silent:
            self.fail(f"no reply from its keeper for {self._link.timeout_s:g} s")
            return
        try:
            one.transfer.send()
        except (OSError, EverstepError) as error:
            self.fail(f"its files cannot be read any more ({error})")

    def on_ack(self, message: PeerCopyAck) -> None:
        """Handle the peer's reply about the base that is being sent."""
        one = self._sending
        if one is None or one.outcome or one.base != message.base or one.transfer is None:
            return
        if message.problem:
            self.fail(message.problem)
            return
        one.transfer.acknowledge(message.received_bytes)
        if message.whole:
            self.stats.copied += 1
            self.stats.copied_bytes += one.transfer.size_bytes
            self._finish(one, "whole")

    def fail(self, reason: str) -> None:
        """Give up the base that is being sent; the next one will be sent."""
        one = self._sending
        assert one is not None
        self.stats.failed += 1
        hint = "training goes on; the next base will be sent"
        what = f"the base of step {one.base.step} is"
        self._link.report_not_sent(what, reason, one.base.step, hint, reason)
        self._finish(one, "failed")

    def _open(self, one: _Sending) -> None:
        source = self._find(one.base)
        # None: not on disk yet, although it is durable for rank 0. Tried again in the next turn.
        if source is not None and self._link.peer == self._link.rank:
            self._finish(one, "whole")
        elif source is not None:
            one.transfer = _BaseTransfer(self._link, one.base, source, self._pace)

    def _finish(self, one: _Sending, outcome: str) -> None:
        one.close()
        one.outcome = outcome
        # Repeated until the next round begins: this report may be lost.
        one.reported_s = self._link.now_s
        self._report(outcome, one.base)

    def _report(self, state: str, base: BaseId) -> None:
        self._deliver(COORDINATOR, PeerRoundReply(base, state))

    def _pass_over(self, base: BaseId) -> None:
        self.stats.missed += 1
        self._link.report_not_sent(
            f"the base of step {base.step} is",
            "the previous one is still being sent while the next one is already durable",
            base.step,
            "lengthen every=, or raise PeerOptions(bytes_per_s=); counted in "
            "stats().peers_passed_over",
            "passed over",
        )
