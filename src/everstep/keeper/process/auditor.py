"""Background audit: check that the newest base equals the previous base plus the log.

The keeper has no torch and computes nothing itself. A child process replays the log, at the lowest
priority and one at a time; the keeper records the result. Commits, retention and the trainer never
wait for an audit. The child ends with the keeper, or when another trainer attaches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Protocol

from everstep.commit import split_by_history
from everstep.commit.job import COORDINATOR
from everstep.errors import AuditError, DeadlineError, EverstepError
from everstep.format import base_dir
from everstep.format.names import AUDIT_RECORD
from everstep.format.records import AuditRecord
from everstep.keeper.log import Logs
from everstep.keeper.process.duty import Handler, ServedTimeline
from everstep.run import newest_timeline, scan_run
from everstep.run.verify import describe_audit
from everstep.seams import Clock, FileSystem, Seams
from everstep.seams.processes import Child, Condition, Ended
from everstep.tiers import write_durably

CPU_SHARE = 0.05
"""Largest share of one core for audits, averaged from the start of one to the start of the next."""

_log = logging.getLogger("everstep.keeper")
_PROGRAM = "everstep.restore.offline.audit_process"
_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 5.0
_ATTEMPTS = 3


class _Child(Protocol):
    def wait(self, timeout_s: float) -> Ended: ...
    def kill(self) -> None: ...


class Audits:
    """The keeper's duty to audit bases, if the trainer asks for it.

    Of several ranks that share a disk, only the coordinator's keeper audits: all entries of a base,
    with the logs of all ranks. The others keep the log on disk current.

    Attributes:
        auditor: audits bases; None if another keeper does, or none.
    """

    handlers: Mapping[str, Handler] = {}

    def __init__(self, seams: Seams, run: PurePath, logs: Logs) -> None:
        self._seams = seams
        self._run = run
        self._logs = logs
        self.auditor: Auditor | None = None
        self._is_audited_elsewhere = False

    def serve(self, timeline: ServedTimeline) -> None:
        """Start to audit the bases of a timeline, if its settings ask for it."""
        self.auditor = None
        wanted = bool((timeline.settings.get("log") or {}).get("audit"))
        rank = COORDINATOR if timeline.link is None else timeline.link.session.rank
        self._is_audited_elsewhere = wanted and rank != COORDINATOR
        if wanted and rank == COORDINATOR:
            self.auditor = Auditor(
                self._seams.filesystem,
                self._run,
                timeline.number,
                self._seams.clock,
                timeline.channel.post,
                self._logs.settle,
            )

    def base_durable(self) -> None:
        """Have the base audited that has just become durable."""
        if self.auditor is not None:
            self.auditor.base_durable()
        elif self._is_audited_elsewhere:
            # The audit of a new base needs all records before it, batched or not.
            self._logs.flush()

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Kill the audit that is running and discard its result."""
        if self.auditor is not None:
            self.auditor.close()


class Auditor:
    """Audits the bases of one timeline as they become durable.

    Args:
        run: the run folder.
        timeline: number of the timeline that this process writes.
        post: receives an error when a base differs from the replayed state.
        settle: waits until the log on disk is as long as it can be now.
        start: starts the program that audits.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        timeline: int,
        clock: Clock,
        post: Callable[[EverstepError], None],
        settle: Callable[[], None],
        *,
        start: Callable[[str, Sequence[str]], _Child] | None = None,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._timeline = timeline
        self._clock = clock
        self._post = post
        self._settle = settle
        self._start = start or Child
        self._changed = Condition()
        self._due = self._closed = False
        self._not_before_s = clock.monotonic_s()
        self._child: _Child | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_due(self) -> bool:
        """True if an audit is requested and has not begun."""
        with self._changed:
            return self._due

    def base_durable(self) -> None:
        """Request an audit of the base that has just become durable.

        Requests do not queue: only the newest base is audited.
        """
        with self._changed:
            if self._closed:
                return
            self._due = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="everstep-auditor", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Kill the audit that is running and discard its result."""
        with self._changed:
            self._closed = True
            if self._child is not None:
                self._child.kill()
            self._changed.notify_all()
        if self._thread is not None:
            # Bounded: the thread may be writing its record to a disk that hangs.
            self._thread.join(_STOP_TIMEOUT_S)

    def _work(self) -> None:
        while self._next():
            try:
                self.audit()
            except (EverstepError, OSError) as error:
                _log.error("the audit failed: %s", error)
            except Exception:
                # An internal error here must not reach the run: the base itself is durable.
                _log.exception("the audit failed with an internal error")

    def _next(self) -> bool:
        """Wait until an audit may start; return False when there will be no more."""
        with self._changed:
            while not self._closed:
                early_s = self._not_before_s - self._clock.monotonic_s()
                if self._due and early_s <= 0:
                    self._due = False
                    return True
                self._changed.wait(early_s if self._due else None)
            return False

    def audit(self) -> None:
        """Audit the newest base now, in the calling thread."""
        # Checked before the log is settled: settling closes the current segment early.
        if not self._has_two_bases():
            return
        try:
            self._settle()
        except DeadlineError as error:
            # Not posted: the log writer reports a disk that hangs on its own.
            _log.error("the audit was skipped: %s", error)
            return
        began_s = self._clock.monotonic_s()
        with self._changed:
            # Started under the lock: close() either finds the child and kills it, or prevents its
            # start.
            if self._closed:
                return
            arguments = [f"--run={self._run}", f"--timeline={self._timeline}"]
            self._child = self._start(_PROGRAM, arguments)
        # Outside of the lock, so that close() can kill the child. In the thread that has started
        # it: the kernel kills the child at the end of that thread.
        ended = self._child.wait(_TIMEOUT_S)
        with self._changed:
            self._child = None
            # Space audits out by the processor time of the last one, so that the average stays
            # below CPU_SHARE.
            self._not_before_s = began_s + ended.cpu_s / CPU_SHARE
            if self._closed:
                return
        _log.info("the audit took %.1f s of processor time", ended.cpu_s)
        if ended.status == 0 and ended.output:
            self._take(AuditRecord.decode(ended.output, PurePath(AUDIT_RECORD)))
        elif ended.late:
            _log.warning("the audit was stopped: not finished after %g s", _TIMEOUT_S)
        else:
            level = logging.INFO if ended.status == 0 else logging.ERROR
            _log.log(level, "no audit result (exit status %d): %s", ended.status, ended.words)

    def _has_two_bases(self) -> bool:
        """Return True if the newest base has a predecessor in its history and no audit record."""
        inventory = scan_run(self._filesystem, self._run)
        there = {base.id: base for base in inventory.bases if base.manifest is not None}
        here, _ = split_by_history(there, inventory.branches)
        return len(here) > 1 and there[here[0]].audit is None

    def _take(self, record: AuditRecord) -> None:
        """Record the result of an audit, and report a difference."""
        # Fence: a process that was superseded must not add files to bases of the run.
        newest = newest_timeline(self._filesystem, self._run)
        if newest > self._timeline:
            _log.info("the audit result is dropped: timeline %d has taken the run over", newest)
            return
        summary = describe_audit(record)
        level = logging.ERROR if record.verdict == "different" else logging.INFO
        _log.log(level, "%s", summary)
        try:
            self._write(record)
        finally:
            if record.verdict == "different":
                self._post(
                    AuditError(
                        summary,
                        step=record.step,
                        path=base_dir(self._run, record.timeline, record.step),
                        hint="possible causes: code that changes the state without the optimizer, "
                        "training that computes in a way that replay cannot reproduce, failing "
                        "memory or processor; everstep verify --replay repeats the comparison, "
                        f"resume(step={record.before[1]}) goes back to the base before it",
                    )
                )

    def _write(self, record: AuditRecord) -> None:
        directory = base_dir(self._run, record.timeline, record.step)
        for left in reversed(range(_ATTEMPTS)):
            try:
                write_durably(self._filesystem, directory / AUDIT_RECORD, record.encode())
                return
            except FileNotFoundError:
                # Retention has removed the temporary file (retry), or deleted the base (give up).
                if not left:
                    _log.info("the audit of base %d is dropped: it was deleted", record.step)
