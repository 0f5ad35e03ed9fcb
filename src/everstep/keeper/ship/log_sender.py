"""Send the steps of a rank's log to the memory of its peer, in order, in the background.

Runs in the keeper's thread of :mod:`.peer_exchange`. A few complete steps at a time are copied out
of the log, compared with their digests, and sent; the next ones follow when the peer holds them. So
memory for transfers is limited, and steps that are not sent yet stay in the log.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.commit.job.messages import PeerLogAck, PeerLogBegin, PeerLogChunk
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, FormatError
from everstep.format.log import LogRecord
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.ship.transfer import PeerLink, SendStats, WindowedTransfer
from everstep.restore.fetch.peer_log import PackedSteps, pack_steps, unpack_steps

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
        on_step: called with the newest step that the peer holds, whenever it advances.
    """

    def __init__(
        self,
        link: PeerLink,
        log: LogStore,
        timeline: int,
        record_of: Callable[[int], bytes | None],
        *,
        bytes_per_s: float | None = None,
        shrink: Callable[[LogRecord], LogRecord] | None = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.stats = SendStats()
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
        self.stats.sent += len(run.lsns)
        self.stats.sent_bytes += one.size_bytes
        self.stats.step = run.last
        self._before = one.steps
        self._past(one)
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
        what = f"steps {first} to {last} of the log are"
        self._link.report_not_sent(what, reason, last, _HINT, "missed")

    def _fail(self, one: _LogTransfer, reason: str, kind: str) -> None:
        first = one.steps.run.first
        what = f"the log from step {first} on is"
        self._link.report_not_sent(what, reason, first, _HINT, kind)
