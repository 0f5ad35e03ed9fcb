"""Sends the steps of a rank's log to the memory of its peer, behind training, in their order.

A part of the keeper's thread that sends bases (:mod:`.replicator`). A few whole steps at a time are
copied out of the log, compared with their digests, and sent; the next ones when the peer holds
them. So there is never more of it in flight than that, and what is not sent yet lies where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep.commit.job.messages import Message, PeerLogAck, PeerLogBegin, PeerLogChunk
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, EverstepError, FormatError, KeeperError
from everstep.format.log import LogRecord
from everstep.keeper.log.log import LogStore
from everstep.restore.fetch.peer_log import PackedSteps, pack_steps, unpack_steps
from everstep.seams.clock import Clock

__all__ = ["LogSender", "LogSenderStats"]

_PART_BYTES = 1 << 20
_UNANSWERED_MAX = 4  # parts
_BATCH_BYTES = 4 << 20  # of several steps; one may be larger
_SAY_AGAIN_S = 2.0
_TRIES_MAX = 3


@dataclass(slots=True)
class LogSenderStats:
    """What was done so far.

    Attributes:
        steps, sent_bytes: of the log that the peer holds, or has held.
        step: the newest of them.
        missed: steps that the peer will not get, so that those behind them are of no use to it
            before the next base: they were let go before they could be sent, or had no room.
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
        asked_s: the peer was last asked how far it has come; ``answered`` since.
        progress_s: when it last got anywhere.
        full: it had no room when it last answered.
    """

    begun: PeerLogBegin
    steps: PackedSteps
    upto: int
    progress_s: float
    asked_s: float = 0.0
    answered: bool = False
    full: bool = False
    heard_s: float = 0.0
    sent_bytes: int = 0
    acked_bytes: int = 0


class LogSender:
    """One rank's part, in one start of the job.

    Args:
        bytes_per_s: at most; None: as they come.
        record_of: the record of a timeline, as it is on the disk; None: it cannot be read (yet).
        send: to the keeper of the peer; does not wait.
        complain: told of what fails, and of what kind of trouble it is.
        shrink: makes a record lossy; None: as it is.
        timeout_s: a peer that says nothing for so long is reported.

    Attributes:
        on_step: told of the newest step that the peer holds, when there is a newer one.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        bytes_per_s: float | None,
        clock: Clock,
        record_of: Callable[[int], bytes | None],
        send: Callable[[Message], None],
        complain: Callable[[EverstepError, str], None],
        *,
        shrink: Callable[[LogRecord], LogRecord] | None = None,
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._peer = peer
        self._rate = bytes_per_s
        self._clock = clock
        self._record_of = record_of
        self._send = send
        self._complain = complain
        self._timeout_s = timeout_s
        self._shrink = shrink
        self.stats = LogSenderStats()
        self.on_step: Callable[[int], None] = lambda step: None
        self._log: LogStore | None = None
        self._timeline = 0
        self._record: bytes | None = None
        self._number = 0  # of the last record that was sent, or will not be
        self._before: PackedSteps | None = None  # the steps before
        self._everywhere_step = -1
        self._batch: _Batch | None = None
        self._tries = 0
        self._free_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return self._batch is not None and not self._batch.full

    def follow(self, log: LogStore, timeline: int) -> None:
        """From now on the steps of this log are sent."""
        self._log = log
        self._timeline = timeline

    def passed(self, everywhere: BaseId) -> None:
        """A base is whole with all peers: steps up to it need not be sent any more."""
        if everywhere.timeline == self._timeline:
            self._everywhere_step = max(self._everywhere_step, everywhere.step)

    def turn(self) -> int:
        """Sends what may be sent now; returns how many bytes."""
        now_s = self._clock.monotonic_s()
        if self._batch is not None and self._batch.begun.last <= self._everywhere_step:
            self._over(self._batch)
        if self._batch is None:
            self._begin(now_s)
        one = self._batch
        if one is None:
            return 0
        if one.answered and one.sent_bytes > one.acked_bytes:
            if now_s - one.heard_s > _SAY_AGAIN_S:  # parts or answers were lost
                self._ask(one, now_s)
        elif one.answered:
            one.progress_s = now_s  # nobody is waited for
        elif now_s - one.asked_s > _SAY_AGAIN_S:
            self._ask(one, now_s)
        if now_s - one.progress_s > self._timeout_s:
            one.progress_s = now_s
            self._fail(one, f"its keeper has said nothing for {self._timeout_s:g} s", "silent")
        return self._send_parts(one, now_s) if one.answered else 0

    def heard(self, message: PeerLogAck) -> None:
        """The peer says how far it has come."""
        one = self._batch
        now_s = self._clock.monotonic_s()
        ours = None if one is None else (one.begun.timeline, one.begun.first)
        if one is None or ours != (message.timeline, message.first):
            return
        was_full = one.full
        one.full = message.state == "full"
        if message.state == "whole":
            self._there(one)
        elif message.state == "full":
            one.progress_s = now_s
            if not was_full:
                self._fail(one, f"there is no room for it: {message.problem}", "full")
        elif message.state == "refused":
            self._refused(one, message.problem)
        elif message.state == "lost":  # another keeper has come into service there
            self._ask(one, now_s)
        else:
            further = message.received_bytes > one.acked_bytes
            if further or not one.answered:
                one.progress_s = now_s
            # As in the replicator: parts behind the one that this answers may be on their way.
            if message.received_bytes > one.sent_bytes or not (one.answered or further):
                one.sent_bytes = message.received_bytes
            one.answered = True
            one.heard_s = now_s
            one.acked_bytes = message.received_bytes

    def _begin(self, now_s: float) -> None:
        """Takes the next steps out of the log."""
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
        except (DamageError, FormatError) as error:  # or their memory is being used again
            self._number = upto
            self._miss(first, last, f"they were let go before they could be sent ({error.message})")
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
        self._look_for_hole(steps)
        self._batch = _Batch(begun, steps, upto, now_s)
        self._ask(self._batch, now_s)

    def _look_for_hole(self, steps: PackedSteps) -> None:
        """Whether these steps follow those before them, or a base that the peers hold."""
        before = self._before
        run = steps.run
        if before is None or run.first - 1 <= self._everywhere_step:
            return
        if not run.follows(run.first, before.run.lsns[-1]) or run.first != before.run.last + 1:
            self._miss(before.run.last + 1, run.first - 1, "the log has a hole before them")

    def _ask(self, one: _Batch, now_s: float) -> None:
        one.answered = False
        one.asked_s = now_s
        self._send(one.begun)

    def _send_parts(self, one: _Batch, now_s: float) -> int:
        size_bytes = one.begun.size_bytes
        sent = 0
        while (
            one.sent_bytes < size_bytes
            and one.sent_bytes - one.acked_bytes < _UNANSWERED_MAX * _PART_BYTES
            and now_s >= self._free_s
        ):
            data = one.steps.memory[one.sent_bytes : one.sent_bytes + _PART_BYTES]
            if one.sent_bytes == one.acked_bytes:
                one.heard_s = now_s  # from now on an answer is waited for
            begun = one.begun
            self._send(PeerLogChunk(begun.timeline, begun.first, one.sent_bytes, bytes(data)))
            one.sent_bytes += data.nbytes
            sent += data.nbytes
            if self._rate is not None:
                self._free_s = max(now_s, self._free_s) + data.nbytes / self._rate
        return sent

    def _there(self, one: _Batch) -> None:
        run = one.steps.run
        self.stats.steps += len(run.lsns)
        self.stats.sent_bytes += one.begun.size_bytes
        self.stats.step = run.last
        self._before = one.steps
        self._over(one)
        self.on_step(run.last)

    def _over(self, one: _Batch) -> None:
        self._batch = None
        self._number = one.upto
        self._tries = 0

    def _refused(self, one: _Batch, problem: str) -> None:
        """They are taken out of the log once more, and sent anew; a few times."""
        self._tries += 1
        self._batch = None
        if self._tries >= _TRIES_MAX:
            self._over(one)
            self._miss(one.begun.first, one.begun.last, problem)

    def _miss(self, first: int, last: int, why: str) -> None:
        self.stats.missed += max(1, last - first + 1)
        self._complain(
            self._error(
                f"the peer, rank {self._peer}, does not get the log of steps {first} to "
                f"{max(first, last)}: {why}",
                max(first, last),
            ),
            "missed",
        )

    def _fail(self, one: _Batch, why: str, kind: str) -> None:
        begun = one.begun
        text = f"the peer, rank {self._peer}, gets no log from step {begun.first} on: {why}"
        self._complain(self._error(text, begun.first), kind)

    def _error(self, text: str, step: int) -> KeeperError:
        return KeeperError(
            text,
            step=step,
            rank=self._rank,
            tier="peer",
            hint="training goes on; a node that is lost before its next base is with its peer goes "
            "back to before that step. PeerOptions(host_bytes=), or a shorter every=, make room",
        )
