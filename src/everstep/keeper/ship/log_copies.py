"""Copy a rank's log to another tier, in the background, several steps at a time.

The copies are segments as on disk (:mod:`everstep.format.log`): a file, then its marker. They are
made from the records in the keeper's memory, whether or not the log also goes to disk. Approximate
copies (TierCheck, section 3.2) take a hundredth of the bytes; they have names of their own and are
marked as not exact. They equal, bit for bit, what training would have recorded with
``log="adaptive"``: the elements that are kept, and their rounding, depend only on the gradient and
the ratio.

Steps whose memory is released before they are copied leave a gap. Steps after it are useful only
together with the next base that is copied, which recovery finds out by itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from everstep.commit import BaseId
from everstep.commit.job import COORDINATOR
from everstep.commit.log_reach import needed_by
from everstep.commit.retention import KeepRules
from everstep.errors import DamageError, DeadlineError, FormatError, StorageError
from everstep.format import Marker, ShardIdentity, timeline_dir
from everstep.format.log import LogRecord, plan_segment
from everstep.format.names import (
    LOG_DIR,
    LOSSY_DIR,
    marker_name,
    parse_marker,
    parse_rank,
    parse_segment,
    segment_dir,
)
from everstep.format.writer import digest_shard
from everstep.keeper.log import LogStore
from everstep.keeper.replica.replica import import_torch
from everstep.keeper.retain import kept_by
from everstep.keeper.ship.courier import ROOT, CopyWork, Courier
from everstep.restore.fetch.held import copy_steps
from everstep.run.scan import bases_keeping_log
from everstep.seams import failpoint
from everstep.seams.filesystem import observed
from everstep.tiers import MemoryFile, PeerOptions, TierOptions
from everstep.tiers.files import tier_errors

_log = logging.getLogger("everstep.keeper")
_SEGMENT_BYTES = 32 << 20
"""Maximum size of a segment of several steps; a single step may be larger."""
_SETTLE_S = 5.0
_OTHER_FORMS = (
    'bases are still copied; try another TierOptions(log=): "adaptive" needs the fewest bytes '
    '(log_ratio=), "whole" copies every record unchanged, "none" copies bases only'
)
_TOO_SLOW = "their memory was reused before that: copying is slower than logging"


class LogCopies(CopyWork):
    """Copies the log of one timeline to one place.

    Args:
        log: log of this rank. Its records are released as soon as a newer base is durable.
        identity: identity of this rank; each segment gets its own step and LSN.
        batch_steps: minimum steps per segment while training goes on.
        keep: copies of bases that are kept there.
        lossy: makes a record approximate; None: records are copied exactly.
        on_step: called with the newest step that is there; with none after a gap.

    Attributes:
        taken_step: last step that was taken out of the log for a segment.
    """

    def __init__(
        self,
        courier: Courier,
        log: LogStore,
        identity: ShardIdentity,
        *,
        batch_steps: int,
        keep: KeepRules,
        lossy: Callable[[LogRecord], LogRecord] | None = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.courier = courier
        self._on_step = on_step
        self._log = log
        self._identity = identity
        self._batch_steps = batch_steps
        self._keep = keep
        self._lossy = lossy
        self._flushing = False
        self._retains = False
        # Number of the last record taken out of the log.
        self._number = 0
        # Records taken out for the next segment.
        self._records: list[LogRecord] = []
        self.taken_step: int | None = None
        # True after a failed attempt: exactly these records must be tried again, as a file of the
        # same name may already exist.
        self._attempted = False
        self._base_step = -1
        self._missed_reported = False

    def start(self) -> None:
        """Start copying."""
        self._log.listeners.append(self.courier.wake)
        self.courier.start(self, "everstep-log-copy")

    @property
    def busy(self) -> bool:
        """True while something is being copied, or will be without another step."""
        with self.courier.changed:
            return not self.courier.over and (self.courier.at_work or self._flushing)

    def pause(self) -> None:
        """Begin no more copies until the next step arrives.

        The keeper is about to end, or the attached process may open another timeline. Ignored after
        :meth:`flush`: the training process is dead.
        """
        with self.courier.changed:
            if not self._flushing:
                self.courier.pause()

    def flush(self) -> None:
        """Copy an unfinished segment, too: no further step may come. Tried once."""
        with self.courier.changed:
            self._flushing = True
            self.courier.wake()

    def base_durable(self, base: BaseId | None = None) -> None:
        """Note a new base: segments before older bases may be deleted."""
        with self.courier.changed:
            self._retains = True
        if base is not None:
            self.base_known(base)

    def base_known(self, base: BaseId) -> None:
        """Note that a base is durable: records up to it may be released at any time."""
        with self.courier.changed:
            if base.timeline == self._identity.timeline:
                self._base_step = max(self._base_step, base.step)

    def close(self) -> None:
        """Stop. The next courier continues with the records that are still in memory."""
        if self.courier.wake in self._log.listeners:
            self._log.listeners.remove(self.courier.wake)
        self.courier.close()

    def turn(self) -> None:
        """Copy all segments that are due, then run retention.

        Raises:
            FencedError: a newer timeline was opened in the place.
            StorageError: the tier failed.
            DeadlineError: the tier hangs.
        """
        # Read once: a flush that is requested during this turn belongs to the next one.
        flush = self._flushing
        try:
            if flush:
                # The last records may not be digested yet.
                with contextlib.suppress(DeadlineError):
                    self._log.settle(_SETTLE_S)
            while self._is_due(flush=flush):
                self._copy()
            if self._retains and self.courier.stats.copied:
                self._retains = False
                self._retain()
        finally:
            with self.courier.changed:
                self._flushing = self._flushing and not flush

    def _is_due(self, *, flush: bool) -> bool:
        """Take new records out of the log; return True if a segment must be made of them."""
        held_bytes, more = self._take_steps()
        courier = self.courier
        if courier.closed or courier.paused or not self._records:
            return False
        full = more or held_bytes >= _SEGMENT_BYTES
        steps = sum(record.head.kind == "mark" for record in self._records)
        if not (flush or self._attempted or full or steps >= self._batch_steps):
            return False
        # The last steps do not wait for the next attempt after a failure.
        if not flush and courier.not_before_s > courier.clock.monotonic_s():
            courier.look_again(courier.not_before_s)
            return False
        return True

    def _take_steps(self) -> tuple[int, bool]:
        """Take complete steps out of the log, enough for one segment.

        Returns:
            Bytes taken, and True if the next steps belong to another segment.
        """
        held_bytes = sum(record.size_bytes for record in self._records)
        while held_bytes < _SEGMENT_BYTES and not (self.courier.closed or self._attempted):
            # One step at a time if it is made smaller: only one is held in full.
            at_once_bytes = 1 if self._lossy is not None else _SEGMENT_BYTES - held_bytes
            before = self._number
            records, number = self._log.steps_from(before, -1, at_once_bytes)
            if not records:
                self._number = max(self._number, number)
                break
            first = records[0].head.step
            if self._records and first != (self.taken_step or 0) + 1:
                # After a gap: a segment holds consecutive steps only.
                return held_bytes, True
            found = self._copies_of(records)
            # Without released records the gap consists of updates that could not be recorded;
            # training has taken a base because of them.
            released = found and self._log.forgotten > before
            if released and self.taken_step is not None and first > self.taken_step + 1:
                self._report_missed(self.taken_step + 1, first - 1)
            self._records += found
            self._number = number
            self.taken_step = records[-1].head.step
            held_bytes += sum(record.size_bytes for record in found)
        return held_bytes, False

    def _copies_of(self, records: Sequence[LogRecord]) -> list[LogRecord]:
        """Return records of complete steps in memory of their own; none if they cannot be copied.

        They are compared with their digests, as training may reuse their memory at any moment.
        """
        try:
            found = copy_steps(records)
            return found if self._lossy is None else [self._lossy(record) for record in found]
        except (DamageError, FormatError) as error:
            # Not tried again: the records will not change. Damage means that training has already
            # reused the memory.
            reason = None if isinstance(error, DamageError) else error.message
            self._report_missed(records[0].head.step, records[-1].head.step, reason)
            return []

    def _copy(self) -> None:
        """Write a segment of the records that were taken."""
        records = self._records
        place = self.courier.place
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
        place.tier.put(f"{directory}/{plan.name}", observed(file, self.courier.moved))
        failpoint("log_copy.before_marker")
        marker = Marker.of(identity, (written.record,))
        place.create(f"{directory}/{marker_name(identity.rank)}", marker.encode())
        self._records = []
        self._attempted = False
        self.courier.succeeded()
        stats = self.courier.stats
        stats.copied += last.step - first.step + 1
        stats.copied_bytes += plan.size_bytes
        stats.step = last.step
        if self._base_step >= stats.gap_last:
            self._on_step(last.step)

    def _retain(self) -> None:
        """Delete segments that no base in the place needs, each with its marker first.

        Without its marker nobody reads the rest of a segment.
        """
        place = self.courier.place
        own = self._identity
        inventory = place.inventory()
        kept = kept_by(self._keep, inventory.bases, inventory.branches)
        bases = bases_keeping_log(inventory.bases, kept, self._keep.newest)
        committed = [base.id for base in inventory.bases if base.status == "committed"]
        # The listing may be outdated: without any base it says nothing about needed segments.
        if not committed:
            return
        newest = max((b.step for b in committed if b.timeline == own.timeline), default=-1)
        for timeline in sorted(n for n in inventory.timelines if n <= own.timeline):
            # Rank 0 also deletes segments of ranks that no longer exist.
            everyones = own.rank == COORDINATOR and timeline < own.timeline
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
        place = self.courier.place
        with tier_errors():
            names = [item.name.rpartition("/")[2] for item in place.tier.scan(directory)]
        victims = [name for name in names if parse_rank(name) is not None]
        if rank is not None:
            victims = [name for name in victims if parse_rank(name) == rank]
        # Before each deletion: a process of an older timeline must not delete (I11).
        if victims:
            place.check_fence()
        for name in sorted(victims, key=lambda name: (parse_marker(name) is None, name)):
            place.tier.delete(f"{directory}/{name}")
        if rank is None:
            place.tier.sweep(directory)

    def _report_missed(self, first: int, last: int, flaw: str | None = None) -> None:
        """Count steps that will not be copied; report it once.

        Not reported if a base after them is durable: that base will be copied.

        Args:
            flaw: why a record cannot be copied; None: the records waited for too long.
        """
        why = flaw or _TOO_SLOW
        self.courier.stats.missed += last - first + 1
        stats = self.courier.stats
        stats.gap_last = max(stats.gap_last, last)
        url = self.courier.place.url
        _log.info("steps %d to %d of the log are not copied to %s: %s", first, last, url, why)
        if self._missed_reported or last <= self._base_step:
            return
        self._missed_reported = True
        self.courier.post(
            StorageError(
                f"steps {first} to {last} of the log are not copied to {url}: {why}",
                step=last,
                rank=self._identity.rank,
                tier=self.courier.place.kind,
                path=url,
                hint=_OTHER_FORMS,
            )
        )


class Shrink:
    """Makes records approximate for a place.

    Attributes:
        ready: True once torch is loaded, which takes seconds, and longer on a busy machine.
    """

    def __init__(self, ratio: float, int8_below: int) -> None:
        self.ready = False
        self._ratio = ratio
        self._int8_below = int8_below
        # From the start on: otherwise the first steps would wait for it.
        threading.Thread(target=self._load_torch, name="everstep-load-torch", daemon=True).start()

    def __call__(self, record: LogRecord) -> LogRecord:
        return lossy_record(record, self._ratio, self._int8_below)

    def _load_torch(self) -> None:
        try:
            import_torch()
        finally:
            self.ready = True  # an error is raised again, and reported, where torch is used


def shrinking(options: TierOptions | PeerOptions) -> Shrink | None:
    """Return the function that makes records approximate for a place; None: records are copied
    exactly.
    """
    if options.log != "adaptive":
        return None
    return Shrink(options.log_ratio, options.log_int8_below)


def lossy_record(record: LogRecord, ratio: float, int8_below: int = 100_000) -> LogRecord:
    """Return a copy with approximate gradients, in memory of its own.

    Everything else is copied bit for bit: the head, hyperparameters, and gradients that have no
    approximate form (:mod:`everstep.compress.lossy`). The same holds for step marks, declared
    updates, and updates of which training consumed a compressed gradient: these are small and
    exact.

    Args:
        record: record of an update, or one rank's share of an update; its digest was verified.
        ratio: fraction of the elements of a large gradient that is kept, in (0, 1].
        int8_below: gradients with fewer elements than this are small.

    Raises:
        OptionError: the ratio is out of range.
        FormatError: it is not the record of an update.
        DamageError: an entry lies outside the record.
    """
    if record.head.kind == "update" and not record.head.declared:
        import_torch()  # takes seconds; only this thread waits for it
        from everstep.keeper.replica.lossy_update import lossy_update

        found = lossy_update(record, ratio, int8_below)
        if found is not None:
            return found
    # A copy: records that were read together share one block, and each would keep all of it alive.
    data = memoryview(bytearray(record.data))
    return LogRecord(record.head, record.layout, dict(record.objects), data, record.digest)
