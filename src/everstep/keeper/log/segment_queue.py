"""Collect digested records of a log and write them to segments on disk, several steps at a time.

The number of steps per segment is fixed, or adapted to the speed of the disk with the cost model in
:mod:`everstep.plan.batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from everstep.errors import EverstepError, FencedError, OutOfSpaceError
from everstep.format.header import ShardIdentity
from everstep.format.log import LogRecord, RecordHead
from everstep.format.writer import ChunkRing
from everstep.keeper.log.disk_space import LogSpace, NoLogSpaceError
from everstep.keeper.log.segment_writer import SegmentTimes, SegmentWriter
from everstep.link.log_records import ENDED, record_memory_bytes
from everstep.plan.batch import BatchEstimator
from everstep.seams import Seams
from everstep.state.layout.shards import ShardLayout

if TYPE_CHECKING:
    from everstep.link.keeper_stats import KeeperStats


_STEPS_MAX = 100_000


class Batch:
    """Fixed number of steps per segment, limited by the log's memory.

    Args:
        steps: steps per segment.
        bytes_max: size in bytes at which a segment is full, regardless of its steps.
        memory_max: bytes of record memory at which a segment is full. Records that wait to be
            written cannot be released; without this limit a log could fill its memory with them and
            stop.

    Attributes:
        steps: steps of the next segment.
    """

    def __init__(
        self, steps: int, bytes_max: int | None = None, memory_max: int | None = None
    ) -> None:
        self.steps = steps
        self._bytes_max = bytes_max
        self._memory_max = memory_max

    def is_full(self, steps: int, size_bytes: int, memory_bytes: int) -> bool:
        """Return True if the pending records make a full segment.

        Args:
            steps: number of complete steps.
            size_bytes: size of the records.
            memory_bytes: memory that the records take, including their objects.
        """
        if steps >= self.steps:
            return True
        if self._bytes_max is not None and size_bytes >= self._bytes_max:
            return True
        return self._memory_max is not None and memory_bytes >= self._memory_max

    def step_ended(self, step: int, at_s: float) -> None:
        """Note that a step of the log ended at time ``at_s``."""

    def segment_written(
        self, steps: int, size_bytes: int, digest_s: float, times: SegmentTimes
    ) -> None:
        """Note that a segment is durable.

        Args:
            size_bytes: size of its records in memory.
            digest_s: seconds spent on digesting them.
        """


class AutoBatch(Batch):
    """As few steps per segment as the disk sustains, estimated from past segments.

    Args:
        first: steps per segment until enough was measured.
        most: upper limit of steps per segment; None: a built-in limit.
    """

    def __init__(
        self,
        first: int,
        most: int | None = None,
        bytes_max: int | None = None,
        memory_max: int | None = None,
    ) -> None:
        super().__init__(first, bytes_max, memory_max)
        self._estimator = BatchEstimator(first, _STEPS_MAX if most is None else most, bytes_max)
        self._last: tuple[int, float] | None = None  # step, and when it was over

    def step_ended(self, step: int, at_s: float) -> None:
        # Only consecutive steps measure a step time: a gap contains a base, or a pause.
        if self._last is not None and step == self._last[0] + 1 and at_s >= self._last[1]:
            self._estimator.observe_step(at_s - self._last[1])
        self._last = step, at_s

    def segment_written(
        self, steps: int, size_bytes: int, digest_s: float, times: SegmentTimes
    ) -> None:
        work_s = times.work_s + digest_s
        # A segment may hold objects only: the estimator needs a positive size.
        self._estimator.observe_write(steps, max(1, size_bytes), times.price_s, work_s)
        self.steps = self._estimator.choose()


@dataclass(slots=True, eq=False)
class StoredRecord:
    """A record in memory; ``record`` is None until its digest is computed.

    Attributes:
        number: number that the training process gave it; increases.
        offset: offset of its data in the arena, in bytes.
        received_s: time of arrival, in seconds of the writer's clock.
        failed: True if there will be no record: digesting it failed.
        digest_s: seconds spent on digesting it.
    """

    number: int
    head: RecordHead
    layout: ShardLayout
    objects: Mapping[str, bytes]
    offset: int
    received_s: float
    record: LogRecord | None = None
    failed: bool = False
    digest_s: float = 0.0


@dataclass(slots=True)
class _Pending:
    """Records of the next segment.

    Attributes:
        steps: number of complete steps.
        size_bytes: size of the records.
        memory_bytes: memory that the records take, including their objects.
        digest_s: seconds spent on digesting them.
    """

    items: list[StoredRecord] = field(default_factory=list)
    steps: int = 0
    size_bytes: int = 0
    memory_bytes: int = 0
    digest_s: float = 0.0

    def add(self, item: StoredRecord) -> None:
        """Add a record."""
        self.items.append(item)
        self.steps += item.head.kind == "mark"
        self.size_bytes += item.layout.size_bytes
        self.memory_bytes += record_memory_bytes(item.layout.size_bytes, item.objects)
        self.digest_s += item.digest_s


class SegmentQueue:
    """Writes the records of one log to segments. Used in the log's thread, except for properties.

    Args:
        writer: writes segments to disk; None: the log stays in memory.
        post: called with errors.
        on_disk: called with the number of the last record on disk, or :data:`.log_records.ENDED`.
        batch: number of steps per segment.

    Attributes:
        bases_expected: callables; each returns True while a base is expected after which retention
            may free disk space.
        base_pending: True while a base is in progress, after which retention may free disk space.
        after: the step after which the next segment begins; None before the first record.
        waits_for_space: True while records stay in memory because a segment does not fit.
    """

    def __init__(
        self,
        writer: SegmentWriter | None,
        post: Callable[[EverstepError], None],
        on_disk: Callable[[int], None] = lambda number: None,
        batch: Batch | None = None,
    ) -> None:
        self.batch = batch or Batch(1)
        self.bases_expected: list[Callable[[], bool]] = []
        self.base_pending = False
        self.after: int | None = None
        self.waits_for_space = False
        self._writer = writer
        self._post = post
        self._on_disk = on_disk
        self._pending = _Pending()
        self._failed = False
        self._fenced = False
        self._disabled = False

    @property
    def in_memory_only(self) -> bool:
        """True if new records do not go to disk."""
        return self._writer is None or self._disabled or self._failed or self._fenced

    @property
    def moves(self) -> int:
        """Counter that increases with each completed disk operation."""
        return 0 if self._writer is None else self._writer.moves

    @property
    def now_s(self) -> float:
        """Time of the writer's clock; 0 without a writer."""
        return 0.0 if self._writer is None else self._writer.now_s()

    def add_to(self, stats: KeeperStats) -> None:
        """Add bytes on disk and steps per segment to ``stats``."""
        if self._writer is not None:
            stats.log_bytes = self._writer.written_bytes
            stats.log_batch_steps = self.batch.steps

    def add(self, item: StoredRecord, digest_s: float) -> None:
        """Add a digested record; write a segment if it is full."""
        if self._writer is None or self._failed or self._disabled:
            return
        if self.after is None:
            self.after = item.head.step - 1
        item.digest_s = digest_s
        self._pending.add(item)
        if item.head.kind != "mark":
            return
        self.batch.step_ended(item.head.step, item.received_s)
        if self.waits_for_space and not self._base_expected:
            # No base will free space any more: write what fits, and report the rest.
            self._catch_up()
        elif not self.waits_for_space and self._is_full:
            # Not guarded: LogStore._digest_record() passes errors to fail().
            self._write()

    def flush(self) -> None:
        """Write an unfinished segment up to its last step mark."""
        if self.waits_for_space:
            self.catch_up()
        # Still no space: all records stay pending, in order.
        if self.waits_for_space:
            return
        items = self._pending.items
        complete = len(items)
        while complete and items[complete - 1].head.kind != "mark":
            complete -= 1
        if self._writer is None or self._failed or not complete:
            return
        # A segment ends with a mark; updates of the unfinished step go to the next one.
        self._pending = _Pending()
        for item in items[:complete]:
            self._pending.add(item)
        if self._guarded(self._write):
            for item in items[complete:]:
                self._pending.add(item)

    def catch_up(self) -> None:
        """Write records that waited for disk space, in segments of the usual size."""
        self._guarded(self._catch_up)

    def set_to_disk(self, on: bool) -> None:
        """Start or stop writing, beginning with the next step; also after an earlier failure."""
        # Read before the flush, which empties the list.
        last = self._pending.items[-1].number if self._pending.items else 0
        self.flush()
        if self.waits_for_space:
            error = "the disk has no space for pending log records"
            self.fail(OutOfSpaceError(error, step=self.after))
        self._pending = _Pending()
        # A restarted log begins a new run of segments: nothing connects it to the old ones.
        self.after = None
        self._disabled = not on
        self._failed = self._failed and (self._fenced or not on)
        # In every case: the trainer must not wait for records that were dropped above.
        self._on_disk(ENDED if self._failed else last)

    def fail(self, error: EverstepError) -> None:
        """Stop writing: segments after a gap are useless until the next base. Recording goes on in
        memory.
        """
        self._failed = True
        # Kept for good: a process that was superseded never writes again, not even after the next
        # base.
        self._fenced = self._fenced or isinstance(error, FencedError)
        self.waits_for_space = False
        self._pending = _Pending()
        if not self._fenced:
            effect = "the log on disk ends here and continues after the next base"
            error.hint = effect if error.hint is None else f"{error.hint}; {effect}"
        self._post(error)
        self._on_disk(ENDED)

    @property
    def _base_expected(self) -> bool:
        return self.base_pending or any(coming() for coming in self.bases_expected)

    @property
    def _is_full(self) -> bool:
        pending = self._pending
        return self.batch.is_full(pending.steps, pending.size_bytes, pending.memory_bytes)

    def _write(self) -> None:
        """Write the pending records, the last of which is a step mark."""
        assert self._writer is not None
        assert self.after is not None
        pending = self._pending
        records = [item.record for item in pending.items if item.record is not None]
        try:
            times = self._writer.write(records, self.after)
        except NoLogSpaceError:
            if not self._base_expected:
                raise
            # The records stay pending: retention after that base may free space for them.
            self.waits_for_space = True
            return
        # The segment is durable: only now may the trainer be told.
        self.batch.segment_written(pending.steps, pending.size_bytes, pending.digest_s, times)
        last = pending.items[-1]
        self.after = last.head.step
        self._pending = _Pending()
        self._on_disk(last.number)

    def _catch_up(self) -> None:
        items = self._pending.items
        self.waits_for_space = False
        self._pending = _Pending()
        for item in items:
            self._pending.add(item)
            # After the first segment that does not fit no later one is written: it would leave a
            # gap.
            if item.head.kind == "mark" and not self.waits_for_space and self._is_full:
                self._write()

    def _guarded(self, write: Callable[[], None]) -> bool:
        """Write; return False if it failed, which is reported."""
        try:
            write()
        except EverstepError as error:
            self.fail(error)
            return False
        except Exception as error:
            self.fail(EverstepError(f"internal error in the log: {error!r}"))
            return False
        return True


def open_segments(
    seams: Seams,
    run: PurePath,
    ring: ChunkRing,
    to_disk: Mapping[str, Any] | None,
    identity: ShardIdentity | None,
    post: Callable[[EverstepError], None],
    on_disk: Callable[[int], None],
    *,
    timeout_s: float,
) -> SegmentQueue:
    """Open the segments of a timeline's log.

    Args:
        to_disk: limits of the log on disk, as in :func:`batch_from_wire`; None: memory only.
        identity: identity of this rank; needed if the log goes to disk.
    """
    if to_disk is None or identity is None:
        return SegmentQueue(None, post, on_disk)
    space = LogSpace.from_wire(seams.filesystem, run, identity.rank, identity.world, to_disk)
    writer = SegmentWriter(seams, run, identity, ring, timeout_s=timeout_s, space=space)
    return SegmentQueue(writer, post, on_disk, batch_from_wire(to_disk))


def batch_from_wire(bounds: Mapping[str, Any]) -> Batch:
    """Return the segment size that a training process asked for (``LogLimits.batch_to_wire``)."""
    if bounds["auto"]:
        return AutoBatch(bounds["steps"], bounds["most"], bounds["bytes_max"], bounds["memory_max"])
    return Batch(bounds["steps"], bounds["bytes_max"], bounds["memory_max"])
