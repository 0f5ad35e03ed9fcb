"""Send the steps of a rank's log to the memory of its peer, in order, in the background.

Runs in the keeper's thread that also sends bases (:mod:`.peer_exchange`). A few complete steps at a
time are copied out of the log, compared with their digests, and sent; the next ones follow when the
peer holds them. So memory for transfers is limited, and steps that are not sent yet stay in the
log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep.commit.job.messages import Message, PeerLogAck, PeerLogBegin, PeerLogChunk
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, EverstepError, FormatError, KeeperError
from everstep.format.log import LogRecord
from everstep.keeper.log.log_store import LogStore
from everstep.restore.fetch.peer_log import PackedSteps, pack_steps, unpack_steps
from everstep.seams.clock import Clock

__all__ = ["LogSender", "LogSenderStats"]

_CHUNK_BYTES = 1 << 20
_CHUNKS_IN_FLIGHT_MAX = 4
"""Chunks sent before the first of them is acknowledged."""
_BATCH_BYTES = 4 << 20
"""Maximum size of several steps sent together; a single step may be larger."""
_REPEAT_S = 2.0
_TRIES_MAX = 3


@dataclass(slots=True)
class LogSenderStats:
    """Figures about the log since the start.

    Attributes:
        steps: steps that the peer has received.
        sent_bytes: their bytes.
        step: newest step that the peer has received.
        missed: steps that the peer will not get, as they were released before they could be sent or
            did not fit into its memory. Later steps are useless to it until the next base.
    """

    steps: int = 0
    sent_bytes: int = 0
    step: int | None = None
    missed: int = 0


@dataclass(slots=True)
class _Batch:
    """The steps that are being sent.

    Attributes:
        upto: number of their last record.
        progress_s: time of the last progress.
        queried_s: time when the peer was last asked how much it holds.
        answered: True once it has replied.
        full: True if it had no memory for them when it last replied.
        reply_s: time of its last reply.
        sent_bytes: bytes that were sent.
        acked_bytes: bytes that the peer has acknowledged.
    """

    begun: PeerLogBegin
    steps: PackedSteps
    upto: int
    progress_s: float
    queried_s: float = 0.0
    answered: bool = False
    full: bool = False
    reply_s: float = 0.0
    sent_bytes: int = 0
    acked_bytes: int = 0


class LogSender:
    """Sends one rank's log to its peer, for one start of the job.

    Args:
        bytes_per_s: maximum rate; None: full speed.
        record_of: returns the record of a timeline as it is on disk; None: it cannot be read yet.
        send: sends a message to the peer's keeper, without waiting.
        report_failure: called with an error and the kind of the problem.
        shrink: makes a record approximate; None: records are sent exactly.
        timeout_s: seconds without a reply after which the peer is reported.
        on_step: called with the newest step that the peer holds, whenever it advances.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        bytes_per_s: float | None,
        clock: Clock,
        record_of: Callable[[int], bytes | None],
        send: Callable[[Message], None],
        report_failure: Callable[[EverstepError, str], None],
        *,
        shrink: Callable[[LogRecord], LogRecord] | None = None,
        timeout_s: float,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._rank = rank
        self._peer = peer
        self._rate = bytes_per_s
        self._clock = clock
        self._record_of = record_of
        self._send = send
        self._report_failure = report_failure
        self._timeout_s = timeout_s
        self._shrink = shrink
        self.stats = LogSenderStats()
        self._on_step = on_step
        self._log: LogStore | None = None
        self._timeline = 0
        self._record: bytes | None = None
        # Number of the last record that was sent or skipped.
        self._number = 0
        # The steps that the peer received last.
        self._before: PackedSteps | None = None
        self._everywhere_step = -1
        self._batch: _Batch | None = None
        self._tries = 0
        self._free_s = 0.0

    @property
    def busy(self) -> bool:
        """True while steps are being sent."""
        return self._batch is not None and not self._batch.full

    def follow(self, log: LogStore, timeline: int) -> None:
        """Send the steps of this log from now on."""
        self._log = log
        self._timeline = timeline

    def passed(self, everywhere: BaseId) -> None:
        """Skip steps up to this base: all peers hold it completely."""
        if everywhere.timeline == self._timeline:
            self._everywhere_step = max(self._everywhere_step, everywhere.step)

    def turn(self) -> int:
        """Send everything that may be sent now; return the bytes sent."""
        now_s = self._clock.monotonic_s()
        if self._batch is not None and self._batch.begun.last <= self._everywhere_step:
            self._past(self._batch)
        if self._batch is None:
            self._begin(now_s)
        one = self._batch
        if one is None:
            return 0
        if one.answered and one.sent_bytes > one.acked_bytes:
            # Chunks or replies were lost: ask how much has arrived.
            if now_s - one.reply_s > _REPEAT_S:
                self._query(one, now_s)
        elif one.answered:
            # Everything sent is acknowledged: only the pace delays the rest, not the peer.
            one.progress_s = now_s
        elif now_s - one.queried_s > _REPEAT_S:
            self._query(one, now_s)
        if now_s - one.progress_s > self._timeout_s:
            one.progress_s = now_s
            self._fail(one, f"no reply from its keeper for {self._timeout_s:g} s", "silent")
        return self._send_chunks(one, now_s) if one.answered else 0

    def on_reply(self, message: PeerLogAck) -> None:
        """Handle the peer's reply about the steps in flight."""
        one = self._batch
        now_s = self._clock.monotonic_s()
        # A late reply about earlier steps.
        if one is None or (one.begun.timeline, one.begun.first) != (
            message.timeline,
            message.first,
        ):
            return
        was_full = one.full
        one.full = message.state == "full"
        if message.state == "whole":
            self._confirmed(one)
        elif message.state == "full":
            one.progress_s = now_s
            if not was_full:
                self._fail(one, f"its memory for logs is full: {message.problem}", "full")
        elif message.state == "refused":
            self._refused(one, message.problem)
        elif message.state == "lost":
            # The peer has a new keeper: start again.
            self._query(one, now_s)
        else:
            further = message.received_bytes > one.acked_bytes
            if further or not one.answered:
                one.progress_s = now_s
            # As in PeerExchange._on_at: chunks after the acknowledged one may be on their way.
            if message.received_bytes > one.sent_bytes or not (one.answered or further):
                one.sent_bytes = message.received_bytes
            one.answered = True
            one.reply_s = now_s
            one.acked_bytes = message.received_bytes

    def _begin(self, now_s: float) -> None:
        """Take the next steps out of the log and announce them."""
        if self._log is None:
            return
        if self._record is None:
            self._record = self._record_of(self._timeline)
        if self._record is None:
            return
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
        run = steps.run
        begun = PeerLogBegin(
            run.timeline,
            run.first,
            run.last,
            self._record,
            steps.memory.nbytes,
            steps.index_bytes,
            steps.index_digest,
        )
        self._report_gap(steps)
        self._batch = _Batch(begun, steps, upto, now_s)
        self._query(self._batch, now_s)

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

    def _query(self, one: _Batch, now_s: float) -> None:
        one.answered = False
        one.queried_s = now_s
        self._send(one.begun)

    def _send_chunks(self, one: _Batch, now_s: float) -> int:
        size_bytes = one.begun.size_bytes
        sent = 0
        while (
            one.sent_bytes < size_bytes
            and one.sent_bytes - one.acked_bytes < _CHUNKS_IN_FLIGHT_MAX * _CHUNK_BYTES
            and now_s >= self._free_s
        ):
            data = one.steps.memory[one.sent_bytes : one.sent_bytes + _CHUNK_BYTES]
            if one.sent_bytes == one.acked_bytes:
                one.reply_s = now_s  # from now on an answer is waited for
            begun = one.begun
            self._send(PeerLogChunk(begun.timeline, begun.first, one.sent_bytes, bytes(data)))
            one.sent_bytes += data.nbytes
            sent += data.nbytes
            if self._rate is not None:
                self._free_s = max(now_s, self._free_s) + data.nbytes / self._rate
        return sent

    def _confirmed(self, one: _Batch) -> None:
        run = one.steps.run
        self.stats.steps += len(run.lsns)
        self.stats.sent_bytes += one.begun.size_bytes
        self.stats.step = run.last
        self._before = one.steps
        self._past(one)
        self._on_step(run.last)

    def _past(self, one: _Batch) -> None:
        self._batch = None
        self._number = one.upto
        self._tries = 0

    def _refused(self, one: _Batch, problem: str) -> None:
        """Take the steps out of the log again and send them again; give up after a few attempts."""
        self._tries += 1
        self._batch = None
        if self._tries >= _TRIES_MAX:
            self._past(one)
            self._report_missed(one.begun.first, one.begun.last, problem)

    def _report_missed(self, first: int, last: int, reason: str) -> None:
        self.stats.missed += max(1, last - first + 1)
        self._report_failure(
            self._error(
                f"steps {first} to {max(first, last)} of the log are not sent to the peer, rank "
                f"{self._peer}: {reason}",
                max(first, last),
            ),
            "missed",
        )

    def _fail(self, one: _Batch, reason: str, kind: str) -> None:
        begun = one.begun
        text = (
            f"the log from step {begun.first} on is not sent to the peer, rank {self._peer}: "
            f"{reason}"
        )
        self._report_failure(self._error(text, begun.first), kind)

    def _error(self, text: str, step: int) -> KeeperError:
        return KeeperError(
            text,
            step=step,
            rank=self._rank,
            tier="peer",
            hint="training goes on; if this node is lost before its peer has the next base, "
            "training resumes from before that step. Raise PeerOptions(host_bytes=), or shorten "
            "every=",
        )
