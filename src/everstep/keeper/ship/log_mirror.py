"""Copy a rank's log to another tier, in the background, several steps at a time.

The copies are segments as on disk (:mod:`everstep.format.log`): a file, then its marker. They are
made from the records in the keeper's memory, whether or not the log also goes to disk. Approximate
copies (TierCheck, section 3.2) take a hundredth of the bytes; they have names of their own and are
marked as not exact.

Steps whose memory is released before they are copied leave a gap. Steps after it are useful only
together with the next base that is copied, which recovery finds out by itself. Training never waits
for these copies.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import needed_by
from everstep.errors import (
    DamageError,
    DeadlineError,
    EverstepError,
    FencedError,
    ForeignDirectoryError,
    FormatError,
    InfeasibleError,
    StorageError,
)
from everstep.format.header import ShardIdentity
from everstep.format.log import LogRecord, plan_segment
from everstep.format.names import (
    LOG_DIR,
    LOSSY_DIR,
    marker_name,
    parse_marker,
    parse_rank,
    parse_segment,
    segment_dir,
    timeline_dir,
)
from everstep.format.records import Marker
from everstep.format.writer import digest_shard
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.ship.place import ROOT, CopyPlace, tier_errors
from everstep.restore.fetch.peer_log import copy_steps
from everstep.run.scan import bases_keeping_log
from everstep.seams.clock import Clock
from everstep.seams.failpoints import failpoint
from everstep.seams.processes.conditions import Condition
from everstep.tiers.memory import MemoryFile
from everstep.tiers.rate import SEGMENT_OBJECTS, pace_s

__all__ = ["LogMirror", "LogMirrorStats"]

_log = logging.getLogger("everstep.keeper")
_SEGMENT_BYTES = 32 << 20
"""Maximum size of a segment of several steps; a single step may be larger."""
_RETRY_S = 5.0
"""Seconds until the next attempt after a failure."""
_STOP_TIMEOUT_S = 5.0
_SETTLE_S = 5.0
_TOO_SLOW = "their memory was reused before that: copying is slower than logging"


@dataclass(slots=True)
class LogMirrorStats:
    """Figures of a log mirror since it started.

    Attributes:
        steps: steps that were copied.
        copied_bytes: bytes that were copied.
        step: newest copied step.
        missed: steps that will not be copied: their memory was released before.
        failed: failed attempts.
    """

    steps: int = 0
    copied_bytes: int = 0
    step: int | None = None
    missed: int = 0
    failed: int = 0


class LogMirror:
    """Copies the log of one timeline to one place.

    Args:
        log: log of this rank. Its records are released as soon as a newer base is durable.
        identity: identity of this rank; each segment gets its own step and LSN.
        post: called with errors.
        batch_steps: minimum steps per segment while training goes on.
        lossy: makes a record approximate; None: records are copied exactly.
        leads: True: also delete segments of ranks that no longer exist.
        objects_per_hour: this rank's limit, of which the log uses three quarters at most.
    """

    def __init__(
        self,
        place: CopyPlace,
        log: LogStore,
        identity: ShardIdentity,
        clock: Clock,
        post: Callable[[EverstepError], None],
        *,
        batch_steps: int,
        lossy: Callable[[LogRecord], LogRecord] | None = None,
        leads: bool = True,
        objects_per_hour: int | None = None,
    ) -> None:
        self._place = place
        self._log = log
        self._identity = identity
        self._clock = clock
        self._post = post
        self._lossy = lossy
        self._batch_steps = batch_steps
        self._leads = leads
        self._every_s = pace_s(objects_per_hour)
        self._capped = objects_per_hour is not None
        self._changed = Condition()
        self._wake_pending = False
        self._flushing = False
        self._retains = False
        self._paused = False
        self._at_work = False
        self._closed = False
        self._refused = False
        self._not_before_s = clock.monotonic_s()
        # Time of the next check if no step arrives before.
        self._wake_at_s: float | None = None
        # Number of the last record taken out of the log.
        self._number = 0
        # Records taken out for the next segment.
        self._records: list[LogRecord] = []
        # The last step taken out.
        self._last: int | None = None
        # True after a failed attempt: exactly these records must be tried again, as a file of the
        # same name may already exist.
        self._attempted = False
        self._base_step = -1
        self._missed_reported = False
        self._down = False
        self._thread: threading.Thread | None = None
        self.stats = LogMirrorStats()

    def start(self) -> None:
        """Start copying."""
        self._log.listeners.append(self._wake)
        self._thread = threading.Thread(target=self._run, name="everstep-log-copy", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while something is being copied, or will be without another step."""
        with self._changed:
            over = self._closed or self._refused
            return not over and (self._at_work or self._flushing)

    def pause(self) -> None:
        """Begin no more copies until the next step arrives.

        The keeper is about to end, or the attached process may open another timeline. Being fenced
        off is no error then. Ignored after :meth:`flush`: the training process is dead.
        """
        with self._changed:
            self._paused = not self._flushing

    def flush(self) -> None:
        """Copy an unfinished segment, too: no further step may come. Tried once."""
        with self._changed:
            self._flushing = True
            self._paused = False
            self._changed.notify_all()

    def base_durable(self, base: BaseId | None = None) -> None:
        """Note a new base: segments before older bases may be deleted."""
        with self._changed:
            self._retains = True
        if base is not None:
            self.base_known(base)

    def base_known(self, base: BaseId) -> None:
        """Note that a base is durable: records up to it may be released at any time."""
        with self._changed:
            if base.timeline == self._identity.timeline:
                self._base_step = max(self._base_step, base.step)

    def close(self) -> None:
        """Stop. The next mirror continues with the records that are still in memory."""
        if self._wake in self._log.listeners:
            self._log.listeners.remove(self._wake)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            # With a timeout: a transfer in progress cannot be cancelled.
            self._thread.join(_STOP_TIMEOUT_S)

    def turn(self, *, flush: bool = False) -> None:
        """Copy all segments that are due, then run retention.

        Args:
            flush: True: copy an unfinished segment, too.

        Raises:
            FencedError: a newer timeline was opened in the place.
            StorageError: the tier failed, or the limit of objects per hour is reached.
            DeadlineError: the tier hangs.
            InfeasibleError: a segment has more objects than may be written in an hour.
        """
        if flush:
            # The last records may not be digested yet.
            with contextlib.suppress(DeadlineError):
                self._log.settle(_SETTLE_S)
        while self._is_due(flush=flush):
            try:
                self._copy()
            finally:
                self._place.rate.settled(self)
        if self._retains and self.stats.steps:
            self._retains = False
            self._retain()

    def _wake(self) -> None:
        with self._changed:
            self._wake_pending = True
            self._paused = False
            self._changed.notify_all()

    def _run(self) -> None:
        while self._wait_for_work():
            flush = self._flushing
            try:
                self.turn(flush=flush)
            except (FencedError, ForeignDirectoryError, InfeasibleError) as error:
                self._fail(error, for_good=True)
            except EverstepError as error:
                self._fail(error)
            except Exception as error:
                # Must not end this thread: all later copies would be missing without a report.
                url = self._place.tier.url
                internal = EverstepError(
                    f"internal error while copying the log to {url}: {error!r}"
                )
                internal.__cause__ = error
                self._fail(internal)
            finally:
                with self._changed:
                    self._at_work = False
                    self._flushing = self._flushing and not flush

    def _wait_for_work(self) -> bool:
        """Wait until a segment may be due; return False if the thread must end."""
        with self._changed:
            while not self._closed and not self._refused:
                now_s = self._clock.monotonic_s()
                wake_s = self._wake_at_s
                if self._flushing or self._wake_pending or (wake_s is not None and now_s >= wake_s):
                    self._wake_pending = False
                    self._wake_at_s = None
                    self._at_work = True
                    return True
                self._changed.wait(None if wake_s is None else wake_s - now_s)
            return False

    def _is_due(self, *, flush: bool) -> bool:
        """Take new records out of the log; return True if a segment must be made of them."""
        held_bytes, more = self._take_steps()
        if self._closed or self._paused or not self._records:
            return False
        full = more or held_bytes >= _SEGMENT_BYTES
        steps = sum(record.head.kind == "mark" for record in self._records)
        if not (flush or self._attempted or full or steps >= self._batch_steps):
            return False
        now_s = self._clock.monotonic_s()
        # The last steps do not wait for the even pace, only for the limit itself.
        early_s = 0.0 if flush else self._not_before_s - now_s
        wait_s = early_s if early_s > 0 else self._place.rate.wait_s(SEGMENT_OBJECTS, self)
        if wait_s > 0 and not flush:
            with self._changed:
                self._wake_at_s = now_s + wait_s
            return False
        if wait_s > 0:
            raise StorageError(
                "the last log steps are not copied: the limit of objects per hour is reached",
                tier=self._place.tier.traits.kind,
                path=self._place.tier.url,
                hint="raise TierOptions.objects_per_hour",
            )
        return True

    def _take_steps(self) -> tuple[int, bool]:
        """Take complete steps out of the log, enough for one segment.

        The records are copied and compared with their digests, as training may reuse their memory.

        Returns:
            Bytes taken, and True if the next steps belong to another segment.
        """
        held_bytes = sum(record.size_bytes for record in self._records)
        while held_bytes < _SEGMENT_BYTES and not (self._closed or self._attempted):
            # One step at a time if it is made smaller: only one is held in full.
            at_once_bytes = 1 if self._lossy is not None else _SEGMENT_BYTES - held_bytes
            before = self._number
            records, number = self._log.steps_from(before, -1, at_once_bytes)
            if not records:
                self._number = max(self._number, number)
                break
            first = records[0].head.step
            last = records[-1].head.step
            if self._records and first != (self._last or 0) + 1:
                # After a gap: a segment holds consecutive steps only.
                return held_bytes, True
            try:
                found = copy_steps(records)
                if self._lossy is not None:
                    found = [self._lossy(record) for record in found]
            except (DamageError, FormatError) as error:
                # Not tried again: the records will not change. Damage means that training has
                # already reused the memory.
                self._number = number
                self._last = last
                self._report_missed(
                    first, last, None if isinstance(error, DamageError) else error.message
                )
                continue
            del records
            # Without released records the gap consists of updates that could not be recorded;
            # training has taken a base because of them.
            released = self._log.forgotten > before
            if released and self._last is not None and first > self._last + 1:
                self._report_missed(self._last + 1, first - 1)
            self._records += found
            self._number = number
            self._last = last
            held_bytes += sum(record.size_bytes for record in found)
        return held_bytes, False

    def _copy(self) -> None:
        """Write a segment of the records that were taken."""
        records = self._records
        place = self._place
        lossy = self._lossy is not None
        first = next(record for record in records if record.head.kind == "mark").head
        last = records[-1].head
        identity = replace(
            self._identity, step=last.step, lsn=last.lsn, exact=last.exact and not lossy
        )
        plan, body = plan_segment(identity, records)
        written = digest_shard(plan, identity, body)
        header = bytes(written.header).ljust(plan.room_bytes, b"\0")
        file = MemoryFile([memoryview(header), *body.views])
        path = segment_dir(ROOT, identity.timeline, first.step - 1, last.step, lossy=lossy)
        directory = path.relative_to(ROOT).as_posix()
        self._attempted = True
        # File, fence, marker: the marker promises that the file is complete, and a process of an
        # older timeline must not add to the history (I11).
        place.check_fence()
        place.rate.wrote(1)
        place.tier.put(f"{directory}/{plan.name}", file)
        failpoint("log_copy.before_marker")
        marker = Marker.of(identity, (written.record,))
        place.create(f"{directory}/{marker_name(identity.rank)}", marker.encode())
        self._records = []
        self._attempted = False
        self._down = False
        self._not_before_s = self._clock.monotonic_s() + self._every_s
        self.stats.steps += last.step - first.step + 1
        self.stats.copied_bytes += plan.size_bytes
        self.stats.step = last.step

    def _retain(self) -> None:
        """Delete segments that no base in the place needs, each with its marker first.

        Without its marker nobody reads the rest of a segment.
        """
        place = self._place
        own = self._identity
        inventory = place.inventory()
        bases = bases_keeping_log(inventory.bases)
        committed = [base.id for base in inventory.bases if base.status == "committed"]
        # The listing may be outdated: without any base it says nothing about needed segments.
        if not committed:
            return
        newest = max((b.step for b in committed if b.timeline == own.timeline), default=-1)
        for timeline in sorted(n for n in inventory.timelines if n <= own.timeline):
            everyones = self._leads and timeline < own.timeline
            for kind in (LOG_DIR, LOSSY_DIR):
                directory = timeline_dir(ROOT, timeline) / kind
                with tier_errors():
                    names = [entry.name for entry in place.files.scan(directory)]
                for name in sorted(names):
                    steps = parse_segment(name)
                    if steps is None or (timeline == own.timeline and steps[-1] > newest):
                        # The base that needs this segment may still be in the process of being
                        # copied.
                        continue
                    if not needed_by((timeline, *steps), bases):
                        self._delete(
                            f"{directory.relative_to(ROOT).as_posix()}/{name}",
                            None if everyones else own.rank,
                        )

    def _delete(self, directory: str, rank: int | None) -> None:
        """Delete a segment's files of one rank; ``rank=None``: all files, and remains of failed
        writes.
        """
        with tier_errors():
            names = [item.name.rpartition("/")[2] for item in self._place.tier.scan(directory)]
        victims = [name for name in names if parse_rank(name) is not None]
        if rank is not None:
            victims = [name for name in victims if parse_rank(name) == rank]
        # Before each deletion: a process of an older timeline must not delete (I11).
        if victims:
            self._place.check_fence()
        for name in sorted(victims, key=lambda name: (parse_marker(name) is None, name)):
            self._place.tier.delete(f"{directory}/{name}")
        if rank is None:
            self._place.tier.sweep(directory)

    def _report_missed(self, first: int, last: int, flaw: str | None = None) -> None:
        """Count steps that will not be copied; report it once.

        Not reported if a base after them is durable: that base will be copied.

        Args:
            flaw: why a record cannot be copied; None: the records waited for too long.
        """
        why = flaw or _TOO_SLOW
        self.stats.missed += last - first + 1
        url = self._place.tier.url
        _log.info("steps %d to %d of the log are not copied to %s: %s", first, last, url, why)
        if self._missed_reported or last <= self._base_step:
            return
        self._missed_reported = True
        self._post(
            StorageError(
                f"steps {first} to {last} of the log are not copied to {url}: {why}",
                step=last,
                rank=self._identity.rank,
                tier=self._place.tier.traits.kind,
                path=url,
                hint=self._alternative(waited=flaw is None) + ". Bases are still copied",
            )
        )

    def _alternative(self, *, waited: bool) -> str:
        """Return a hint how to avoid missing steps.

        Args:
            waited: True: the link, the store or the limit was too slow; False: a record cannot be
                copied.
        """
        if not waited:
            exact = 'use TierOptions(log="whole"), which copies records unchanged; or '
            return (exact if self._lossy is not None else "") + 'log="none"'
        smaller = 'use TierOptions(log="adaptive"), which needs a hundredth of the bytes'
        if self._lossy is not None:
            smaller = "lower TierOptions.log_ratio"
        limit = ", raise objects_per_hour" if self._capped else ""
        return f'{smaller}{limit}; or use log="none"'

    def _fail(self, error: EverstepError, *, for_good: bool = False) -> None:
        with self._changed:
            # Fenced off by the attached process itself, which opens a new timeline: no error.
            paused = self._paused and isinstance(error, FencedError)
            self._refused = self._refused or (for_good and not paused)
            if self._closed or paused:
                _log.info("not copied: %s", error)
                return
            self.stats.failed += 1
            self._not_before_s = self._clock.monotonic_s() + max(_RETRY_S, self._every_s)
            self._wake_at_s = self._not_before_s
            was_down = self._down
            self._down = True
        # One report per outage; later attempts only go to the keeper's log file.
        if for_good or not was_down:
            self._post(error)
        else:
            _log.warning("%s", error)
