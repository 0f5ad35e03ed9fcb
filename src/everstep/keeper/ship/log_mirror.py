"""Copies the log of a rank to another tier, behind training, a batch of steps at a time.

What is copied are segments, as on a disk (:mod:`everstep.format.log`): a file, then its marker.
They are made of what lies in the keeper's memory, whether the log goes to a disk or not. With lossy
gradients (TierCheck, section 3.2) they are a hundredth of the size, lie beside the others under a
name of their own, and say that they are not what training has consumed.

A step that was let go before it could be copied leaves a hole: what lies behind it is of use behind
the next base that is copied, which recovery sees by itself. Training waits for none of this.
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
from everstep.keeper.log.log import LogStore
from everstep.keeper.ship.place import ROOT, CopyPlace, own_errors
from everstep.restore.fetch.peer_log import copy_steps
from everstep.run.scan import bases_keeping_log
from everstep.seams.clock import Clock
from everstep.seams.failpoints import failpoint
from everstep.seams.processes.conditions import Condition
from everstep.tiers.memory import MemoryFile
from everstep.tiers.rate import SEGMENT_OBJECTS, pace_s

__all__ = ["LogMirror", "LogMirrorStats"]

_log = logging.getLogger("everstep.keeper")
_SEGMENT_BYTES = 32 << 20  # of several steps; one may be larger
_AGAIN_S = 5.0  # after a failure
_STOP_TIMEOUT_S = 5.0
_SETTLE_S = 5.0
_SLOW = "its memory was needed before, as less gets there than is logged"


@dataclass(slots=True)
class LogMirrorStats:
    """What was done so far.

    Attributes:
        steps, copied_bytes: that are there, or were.
        step: the newest of them.
        missed: that will not be: they were let go before.
        failed: attempts.
    """

    steps: int = 0
    copied_bytes: int = 0
    step: int | None = None
    missed: int = 0
    failed: int = 0


class LogMirror:
    """Copies the log of one timeline to one place.

    Args:
        log: of this rank; its memory may be used again as soon as a newer base is durable.
        identity: of this rank; step and LSN are those of each segment.
        post: told of what fails.
        batch_steps: of a segment, at least, as long as training goes on.
        lossy: makes a record lossy; None: as it is.
        leads: deletes for ranks that there are no more, too.
        objects_per_hour: by this rank, of which the log takes three quarters at most.
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
        self._stirred = self._flushing = self._retains = self._paused = False
        self._at_work = self._closed = self._refused = False
        self._not_before_s = clock.monotonic_s()
        self._wake_s: float | None = None  # when to look again, without another step
        self._number = 0  # of the last record that was taken out of the log
        self._records: list[LogRecord] = []  # taken out, for the next segment
        self._last: int | None = None  # step that was taken out last
        self._tried = False  # to copy just these: once more, so that no other segment has them
        self._base_step = -1
        self._missed_said = False
        self._down = False
        self._thread: threading.Thread | None = None
        self.stats = LogMirrorStats()

    def start(self) -> None:
        """From now on the log is copied."""
        self._log.listeners.append(self._stir)
        self._thread = threading.Thread(target=self._work, name="everstep-log-copy", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether something is being copied, or is going to be without another step."""
        with self._changed:
            over = self._closed or self._refused
            return not over and (self._at_work or self._flushing)

    def pause(self) -> None:
        """The keeper is about to end, or the process that it serves may open another timeline:
        nothing is begun, and it is no error to be shut out, until there is another step, which says
        that it was not so. Training that has died is another matter."""
        with self._changed:
            self._paused = not self._flushing

    def flush(self) -> None:
        """No further step may come: what is left of a batch is copied, too; tried once."""
        with self._changed:
            self._flushing = True
            self._paused = False
            self._changed.notify_all()

    def base_durable(self, base: BaseId | None = None) -> None:
        """There is a new base: segments before older ones may go."""
        with self._changed:
            self._retains = True
        if base is not None:
            self.base_known(base)

    def base_known(self, base: BaseId) -> None:
        """This base is durable: what the log has up to it may be let go of at any time."""
        with self._changed:
            if base.timeline == self._identity.timeline:
                self._base_step = max(self._base_step, base.step)

    def close(self) -> None:
        """Ends the copying; the next one goes on where records are still in memory."""
        if self._stir in self._log.listeners:
            self._log.listeners.remove(self._stir)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)  # it may be in a transfer, which nothing ends

    def turn(self, *, flush: bool = False) -> None:
        """Copies what is due.

        Args:
            flush: whatever there is.

        Raises:
            FencedError: a newer timeline has been opened in the place.
            StorageError, DeadlineError, InfeasibleError
        """
        if flush:  # the last records may be on their way
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

    def _stir(self) -> None:
        with self._changed:
            self._stirred = True
            self._paused = False
            self._changed.notify_all()

    def _work(self) -> None:
        while self._next():
            flush = self._flushing
            try:
                self.turn(flush=flush)
            except (FencedError, ForeignDirectoryError, InfeasibleError) as error:
                self._fail(error, for_good=True)
            except EverstepError as error:
                self._fail(error)
            except Exception as error:  # would end this thread, and all copies to come
                url = self._place.tier.url
                ours = EverstepError(f"internal error in copying the log to {url}: {error!r}")
                ours.__cause__ = error
                self._fail(ours)
            finally:
                with self._changed:
                    self._at_work = False
                    self._flushing = self._flushing and not flush

    def _next(self) -> bool:
        """Waits until something may be due; False when nothing will be any more."""
        with self._changed:
            while not self._closed and not self._refused:
                now_s = self._clock.monotonic_s()
                wake_s = self._wake_s
                if self._flushing or self._stirred or (wake_s is not None and now_s >= wake_s):
                    self._stirred = False
                    self._wake_s = None
                    self._at_work = True
                    return True
                self._changed.wait(None if wake_s is None else wake_s - now_s)
            return False

    def _is_due(self, *, flush: bool) -> bool:
        """Takes out of the log what has come, and says whether a segment is to be made of it."""
        held_bytes, more = self._take()
        if self._closed or self._paused or not self._records:
            return False
        full = more or held_bytes >= _SEGMENT_BYTES
        steps = sum(record.head.kind == "mark" for record in self._records)
        if not (flush or self._tried or full or steps >= self._batch_steps):
            return False
        now_s = self._clock.monotonic_s()
        early_s = 0.0 if flush else self._not_before_s - now_s  # the last ones only keep to the cap
        wait_s = early_s if early_s > 0 else self._place.rate.wait_s(SEGMENT_OBJECTS, self)
        if wait_s > 0 and not flush:
            with self._changed:
                self._wake_s = now_s + wait_s
            return False
        if wait_s > 0:
            raise StorageError(
                "the last steps of the log are not copied: the cap of objects an hour is used up",
                tier=self._place.tier.traits.kind,
                path=self._place.tier.url,
                hint="a higher TierOptions.objects_per_hour",
            )
        return True

    def _take(self) -> tuple[int, bool]:
        """Takes whole steps out of the log, as many as make a segment: a copy of them, compared
        with their digests, for training is going to use their memory again.

        Returns:
            Bytes of what was taken; and whether what comes next is for another segment.
        """
        held_bytes = sum(record.size_bytes for record in self._records)
        while held_bytes < _SEGMENT_BYTES and not (self._closed or self._tried):
            # One by one where they get smaller: so that no more than one is there in full.
            at_once_bytes = 1 if self._lossy is not None else _SEGMENT_BYTES - held_bytes
            before = self._number
            records, number = self._log.steps_from(before, -1, at_once_bytes)
            if not records:
                self._number = max(self._number, number)
                break
            first = records[0].head.step
            last = records[-1].head.step
            if self._records and first != (self._last or 0) + 1:
                return held_bytes, True  # behind a hole
            try:
                found = copy_steps(records)
                if self._lossy is not None:
                    found = [self._lossy(record) for record in found]
            except (DamageError, FormatError) as error:  # never tried again: it would stay so
                self._number = number
                self._last = last
                self._miss(first, last, None if isinstance(error, DamageError) else error.message)
                continue
            del records
            # Else nothing was there to be let go of: updates that could not be recorded. Training
            # knows of those, and has taken a base.
            let_go = self._log.forgotten > before
            if let_go and self._last is not None and first > self._last + 1:
                self._miss(self._last + 1, first - 1)
            self._records += found
            self._number = number
            self._last = last
            held_bytes += sum(record.size_bytes for record in found)
        return held_bytes, False

    def _copy(self) -> None:
        """Makes a segment of what was taken out."""
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
        self._tried = True
        place.check_fence()
        place.rate.wrote(1)
        place.tier.put(f"{directory}/{plan.name}", file)
        failpoint("log_copy.before_marker")
        marker = Marker.of(identity, (written.record,))
        place.create(f"{directory}/{marker_name(identity.rank)}", marker.encode())
        self._records = []
        self._tried = False
        self._down = False
        self._not_before_s = self._clock.monotonic_s() + self._every_s
        self.stats.steps += last.step - first.step + 1
        self.stats.copied_bytes += plan.size_bytes
        self.stats.step = last.step

    def _retain(self) -> None:
        """Deletes segments that no base there could be brought further by, each with its marker
        first: without it nobody reads the rest."""
        place = self._place
        own = self._identity
        inventory = place.inventory()
        bases = bases_keeping_log(inventory.bases)
        committed = [base.id for base in inventory.bases if base.status == "committed"]
        if not committed:
            return  # a listing may be some time old
        newest = max((b.step for b in committed if b.timeline == own.timeline), default=-1)
        for timeline in sorted(n for n in inventory.timelines if n <= own.timeline):
            everyones = self._leads and timeline < own.timeline
            for kind in (LOG_DIR, LOSSY_DIR):
                directory = timeline_dir(ROOT, timeline) / kind
                with own_errors():
                    names = [entry.name for entry in place.files.scan(directory)]
                for name in sorted(names):
                    steps = parse_segment(name)
                    if steps is None or (timeline == own.timeline and steps[-1] > newest):
                        continue  # of our own: the base that it leads on from may be coming
                    if not needed_by((timeline, *steps), bases):
                        self._delete(
                            f"{directory.relative_to(ROOT).as_posix()}/{name}",
                            None if everyones else own.rank,
                        )

    def _delete(self, directory: str, rank: int | None) -> None:
        """Files of one rank, whose log this is; or (None) all, and what is not whole."""
        with own_errors():
            names = [item.name.rpartition("/")[2] for item in self._place.tier.scan(directory)]
        mine = [name for name in names if parse_rank(name) is not None]
        if rank is not None:
            mine = [name for name in mine if parse_rank(name) == rank]
        if mine:
            self._place.check_fence()
        for name in sorted(mine, key=lambda name: (parse_marker(name) is None, name)):
            self._place.tier.delete(f"{directory}/{name}")
        if rank is None:
            self._place.tier.sweep(directory)

    def _miss(self, first: int, last: int, flaw: str | None = None) -> None:
        """Steps were let go before they could be copied: once that is said aloud, unless a base
        behind them is durable, which is going to be copied.

        Args:
            flaw: of a record, that makes it so; None: they have waited for too long.
        """
        why = flaw or _SLOW
        self.stats.missed += last - first + 1
        url = self._place.tier.url
        _log.info("steps %d to %d of the log are not copied to %s: %s", first, last, url, why)
        if self._missed_said or last <= self._base_step:
            return
        self._missed_said = True
        self._post(
            StorageError(
                f"the log of steps {first} to {last} is not copied to {url}: {why}",
                step=last,
                rank=self._identity.rank,
                tier=self._place.tier.traits.kind,
                path=url,
                hint=self._way_out(waited=flaw is None) + ". Bases are copied as before",
            )
        )

    def _way_out(self, *, waited: bool) -> str:
        """What the user may choose instead, so that no steps are missed.

        Args:
            waited: for a link, a store or the cap; else a record of them cannot be copied.
        """
        if not waited:
            whole = 'TierOptions(log="whole") copies what is there; or '
            return (whole if self._lossy is not None else "") + 'log="none"'
        less = 'TierOptions(log="adaptive") needs a hundredth'
        if self._lossy is not None:
            less = "a smaller log_ratio of TierOptions needs less"
        cap = ", a higher objects_per_hour" if self._capped else ""
        return f'{less}{cap}; or log="none"'

    def _fail(self, error: EverstepError, *, for_good: bool = False) -> None:
        with self._changed:
            paused = self._paused and isinstance(error, FencedError)
            self._refused = self._refused or (for_good and not paused)
            if self._closed or paused:
                _log.info("not copied: %s", error)
                return
            self.stats.failed += 1
            self._not_before_s = self._clock.monotonic_s() + max(_AGAIN_S, self._every_s)
            self._wake_s = self._not_before_s
            was_down = self._down
            self._down = True
        if for_good or not was_down:  # of an outage that lasts the log tells the rest
            self._post(error)
        else:
            _log.warning("%s", error)
