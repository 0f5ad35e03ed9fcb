"""The keeper's background audit: is the newest base what the one before it and the log give?

The keeper computes nothing itself (it has no torch): a child does, at the lowest priority, one at
a time, and the keeper writes down what it has found. Commits, retention and the trainer wait for
none of it. The child ends with the keeper, or when another trainer is served.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Protocol

from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.lineage import split_by_history
from everstep.errors import AuditError, DeadlineError, EverstepError
from everstep.format.names import AUDIT_RECORD, base_dir
from everstep.format.records import AuditRecord
from everstep.keeper.log.logs import Logs
from everstep.link.job_session import JobSession
from everstep.run.audits import audit_in_words
from everstep.run.scan import newest_timeline, scan_run
from everstep.seams import Clock, Seams
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.processes.children import Child, Ended
from everstep.seams.processes.conditions import Condition
from everstep.tiers.disk import write_durably

__all__ = ["CPU_SHARE", "AuditedElsewhere", "Auditor", "auditor_of"]

CPU_SHARE = 0.05
"""Of one core, that audits take at most, averaged from the beginning of one to that of the next."""

_log = logging.getLogger("everstep.keeper")
_PROGRAM = "everstep.restore.offline.audit_process"
_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 5.0
_ATTEMPTS = 3


class _Child(Protocol):
    def wait(self, timeout_s: float) -> Ended: ...
    def kill(self) -> None: ...


def auditor_of(
    job_session: JobSession | None,
    seams: Seams,
    run: PurePath,
    timeline: int,
    post: Callable[[EverstepError], None],
    logs: Logs,
    timeout_s: float,
) -> Auditor | AuditedElsewhere:
    """This keeper's part in audits: of several ranks, which share a disk, the first one's audits
    all that bases hold, by the logs of all.

    Args:
        job_session: of this rank among several; None: it is alone.
        timeout_s: until the log is on disk.
    """
    if job_session is not None and job_session.rank != COORDINATOR:
        return AuditedElsewhere(logs)
    about = seams.filesystem, run, timeline, seams.clock, post
    return Auditor(*about, lambda: logs.settle(timeout_s))


class AuditedElsewhere:
    """The part of a keeper whose rank's bases another one's audits: the log is on disk for it."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    def base_durable(self) -> None:
        """There is a new base: what was logged before it is written, whatever batch it is of."""
        self._logs.flush()

    def close(self) -> None:
        """There is nothing to end."""


class Auditor:
    """Audits the bases of one timeline as they become durable.

    Args:
        run: the run folder.
        post: told of a difference.
        settle: returns when the log on disk is as long as it can be now.
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

    def base_durable(self) -> None:
        """There is a new base: what was not audited yet is older than the newest now."""
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
        """Ends the audit that is under way; nothing is known of it."""
        with self._changed:
            self._closed = True
            if self._child is not None:
                self._child.kill()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)  # it may be writing, to a disk that hangs

    def _work(self) -> None:
        while self._next():
            try:
                self._audit()
            except (EverstepError, OSError) as error:
                _log.error("not audited: %s", error)
            except Exception:  # a bug of ours is none of the run's troubles
                _log.exception("not audited")

    def _next(self) -> bool:
        """Waits until an audit may begin; False when there will be no more."""
        with self._changed:
            while not self._closed:
                early_s = self._not_before_s - self._clock.monotonic_s()
                if self._due and early_s <= 0:
                    self._due = False
                    return True
                self._changed.wait(early_s if self._due else None)
            return False

    def _audit(self) -> None:
        if not self._has_two_bases():
            return  # before the log is settled, which ends a segment wherever it is
        try:
            self._settle()
        except DeadlineError as error:  # reported by those who wait for it
            _log.error("not audited: %s", error)
            return
        began_s = self._clock.monotonic_s()
        with self._changed:
            if self._closed:
                return
            arguments = [f"--run={self._run}", f"--timeline={self._timeline}"]
            self._child = self._start(_PROGRAM, arguments)
        ended = self._child.wait(_TIMEOUT_S)
        with self._changed:
            self._child = None
            self._not_before_s = began_s + ended.cpu_s / CPU_SHARE
            if self._closed:
                return
        _log.info("an audit has taken %.1f s of processor time", ended.cpu_s)
        if ended.status == 0 and ended.output:
            self._take(AuditRecord.decode(ended.output, PurePath(AUDIT_RECORD)))
        elif ended.late:
            _log.warning("not audited: it was not done after %g s", _TIMEOUT_S)
        else:
            level = logging.INFO if ended.status == 0 else logging.ERROR
            _log.log(level, "not audited (status %d): %s", ended.status, ended.words)

    def _has_two_bases(self) -> bool:
        """Whether the newest base of the history has one before it, and no audit yet."""
        inventory = scan_run(self._filesystem, self._run)
        there = {base.id: base for base in inventory.bases if base.manifest is not None}
        here, _ = split_by_history(there, inventory.branches)
        return len(here) > 1 and there[here[0]].audit is None

    def _take(self, record: AuditRecord) -> None:
        """Writes down what an audit has found, and reports a difference."""
        newest = newest_timeline(self._filesystem, self._run)
        if newest > self._timeline:
            _log.info("timeline %d has taken the run over: its audits count", newest)
            return
        told = audit_in_words(record)
        _log.log(logging.ERROR if record.verdict == "different" else logging.INFO, "%s", told)
        try:
            self._write(record)
        finally:
            if record.verdict == "different":
                self._post(
                    AuditError(
                        told,
                        step=record.step,
                        path=base_dir(self._run, record.timeline, record.step),
                        hint="either something changes the state past the optimizer, or training "
                        "computes in a way that replay does not know of, or memory or processor of "
                        "this machine fail; everstep verify --replay repeats the comparison, "
                        f"resume(step={record.before[1]}) goes back before it",
                    )
                )

    def _write(self, record: AuditRecord) -> None:
        directory = base_dir(self._run, record.timeline, record.step)
        for left in reversed(range(_ATTEMPTS)):
            try:
                write_durably(self._filesystem, directory / AUDIT_RECORD, record.encode())
                return
            except FileNotFoundError:  # retention has cleaned up, or deleted the base
                if not left:
                    _log.info("base %d is gone: its audit is, too", record.step)
