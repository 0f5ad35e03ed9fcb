"""Collect digested records of a log and write them to segments on disk, several steps at a time.

The number of steps per segment is fixed, or adapted to the speed of the disk with the cost model in
:mod:`everstep.plan.estimator`.

Write log segments to disk: data file, then marker.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from everstep.errors import DeadlineError, EverstepError, FencedError, OutOfSpaceError
from everstep.format import Marker, ShardIdentity, timeline_dir
from everstep.format.header import ShardPlan
from everstep.format.log import LogRecord, RecordHead, plan_segment
from everstep.format.names import LOG_DIR, marker_name, segment_dir
from everstep.format.writer import ChunkRing, write_shard
from everstep.link.messages import ENDED, record_memory_bytes
from everstep.plan import BatchEstimator
from everstep.run.fence import Fence
from everstep.seams import Seams, failpoint
from everstep.seams.filesystem import observed
from everstep.seams.progress import silent
from everstep.state.layout import Body, ShardLayout
from everstep.tiers import ensure_dir, remove_if_there, storage_errors, write_durably
from everstep.tiers.durable_files import create_in, temporary

if TYPE_CHECKING:
    from everstep.link.messages import KeeperStats
from collections.abc import Iterator

from everstep.format.names import TEMPORARY_SUFFIX, parse_rank
from everstep.seams import FileSystem


class NoLogSpaceError(OutOfSpaceError):
    """The log has used up its share of the budget; retention after the next base may free space."""


class LogSpace:
    """Counts log segments against the disk budget.

    The folder is scanned only when the last scan, plus all segments written since, leaves no space.

    Args:
        rank: rank whose files count. With several ranks, rank 0 also counts files of ranks that no
            longer exist.
        world: number of ranks.
        budget_bytes: budget of the run folder.
        bases_bytes: bytes of the budget reserved for bases, written or not.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        rank: int,
        world: int,
        *,
        budget_bytes: int,
        bases_bytes: int,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._rank = rank
        self._world = world
        self._budget_bytes = budget_bytes
        self._bases_bytes = bases_bytes
        self._taken_bytes: int | None = None

    def reserve(self, size_bytes: int, *, step: int) -> None:
        """Reserve space for a segment that is about to be written.

        Raises:
            NoLogSpaceError: it does not fit; nothing was reserved.
        """
        taken_bytes = self._taken_bytes
        if taken_bytes is None or taken_bytes + size_bytes > self._budget_bytes:
            # Retention may have deleted bases or segments since the last scan.
            others_bytes, log_bytes = folder_bytes(
                self._filesystem, self._run, self._rank, self._world
            )
            # Bases keep their reserved share even before they are written: a log that used it
            # would make the next base fail.
            self._taken_bytes = taken_bytes = max(others_bytes, self._bases_bytes) + log_bytes
            if taken_bytes + size_bytes > self._budget_bytes:
                raise NoLogSpaceError(
                    f"a log segment takes {size_bytes} bytes; bases and the segments that they "
                    f"need take {taken_bytes} of Budget(disk_bytes={self._budget_bytes})",
                    step=step,
                    rank=self._rank,
                    tier="disk",
                    path=self._run,
                    hint="raise the budget, keep fewer bases (keep=), or shorten every=",
                )
        self._taken_bytes = taken_bytes + size_bytes


def folder_bytes(
    filesystem: FileSystem, run: PurePath, rank: int = 0, world: int = 1
) -> tuple[int, int]:
    """Return the bytes of a rank's files in a run folder: ``(all but the log, the log)``."""
    sizes = [0, 0]
    for path, size_bytes in _files(filesystem, run):
        owner = parse_rank(path.name.removesuffix(TEMPORARY_SUFFIX))
        # Rank 0 counts files without a rank, and files of ranks that no longer exist.
        counts = world == 1 or owner == rank or (rank == 0 and (owner is None or owner >= world))
        if counts:
            # A bool as the index: 1 for files below a log directory.
            sizes[LOG_DIR in path.relative_to(run).parts[:-1]] += size_bytes
    return sizes[0], sizes[1]


def _files(filesystem: FileSystem, directory: PurePath) -> Iterator[tuple[PurePath, int]]:
    try:
        entries = filesystem.scan(directory)
    except FileNotFoundError:
        # Retention removed it during the scan.
        return
    for entry in entries:
        if entry.kind == "dir":
            yield from _files(filesystem, directory / entry.name)
        elif entry.kind == "file":
            yield directory / entry.name, entry.size_bytes


def full_disk_error(
    what: str, size_bytes: int, free_bytes: int, run: PurePath, identity: ShardIdentity
) -> OutOfSpaceError:
    """Return the error for files that do not fit on the disk of the run folder."""
    return OutOfSpaceError(
        f"{what} takes {size_bytes} bytes, {free_bytes} are free",
        step=identity.step,
        rank=identity.rank,
        tier="disk",
        path=run,
        hint="free some space, or keep fewer bases (keep=, everstep rm)",
    )


_MARKER_BYTES = 1024
"""Reserved for a marker; about 450 bytes are used."""


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """Durations of one segment write.

    Attributes:
        price_s: seconds for everything but the body: names, header, marker, syncs of directories.
        work_s: seconds until the body was durable.
    """

    price_s: float
    work_s: float


class SegmentWriter:
    """Writes the segments of one timeline.

    Args:
        identity: identity of this rank; each segment gets its own step and LSN.
        space: the log's share of the disk budget; None: no limit.

    Attributes:
        now_s: clock for the durations of segments.
        moves: counter that increases with each completed disk operation.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        identity: ShardIdentity,
        ring: ChunkRing,
        *,
        timeout_s: float,
        space: LogSpace | None = None,
    ) -> None:
        self.moves = 0
        self._filesystem = observed(seams.filesystem, self._moved)
        self._space = space
        self.now_s = seams.clock.monotonic_s
        self._run = run
        self._identity = identity
        self._fence = Fence(self._filesystem, run, identity.timeline)
        self._ring = ring
        self._timeout_s = timeout_s
        self._has_dir = False
        self.written_bytes = 0

    def write(self, records: Sequence[LogRecord], after: int) -> SegmentTimes:
        """Make a segment durable.

        Args:
            after: the step before its first step.

        Raises:
            FencedError: a newer timeline has taken over the run.
            NoLogSpaceError: it does not fit into the budget; nothing was written.
            StorageError: the disk failed; the files of the segment were removed if the disk allowed
                it.
            DeadlineError: the disk hangs. Files without a marker may be left; readers ignore them,
                retention removes them.
        """
        began_s = self.now_s()
        last = records[-1].head
        identity = dataclasses.replace(
            self._identity, step=last.step, lsn=last.lsn, exact=last.exact
        )
        directory = segment_dir(self._run, identity.timeline, after, last.step)
        plan, body = plan_segment(identity, records, narrow=True)
        with storage_errors("write the log", directory, step=last.step, rank=identity.rank):
            # A segment is a commit: a process of an older timeline must not add to the history
            # (I11).
            self._fence.check()
            self._check_space(identity, plan)
            try:
                work_s = self._write(directory, identity, plan, body)
            except DeadlineError:
                # No cleanup: on a disk that hangs it would hang as well, and the error would
                # never be reported.
                raise
            except BaseException:
                self._clean_up(directory, plan.name)
                raise
        return SegmentTimes(max(0.0, self.now_s() - began_s - work_s), work_s)

    def _moved(self) -> None:
        self.moves += 1

    def _check_space(self, identity: ShardIdentity, plan: ShardPlan) -> None:
        """Raise before anything is written if the segment cannot fit, so that bases can use the
        free space.
        """
        if self._space is not None:
            self._space.reserve(plan.size_bytes + _MARKER_BYTES, step=identity.step)
        free_bytes = self._filesystem.free_bytes(self._run)
        if free_bytes < plan.size_bytes:
            raise full_disk_error("a log segment", plan.size_bytes, free_bytes, self._run, identity)

    def _write(
        self, directory: PurePath, identity: ShardIdentity, plan: ShardPlan, body: Body
    ) -> float:
        """Write file and marker; return the seconds until the body was durable."""
        filesystem = self._filesystem
        # Once per timeline: after the first sync of its parent the name of the directory is
        # durable.
        if not self._has_dir:
            ensure_dir(filesystem, timeline_dir(self._run, identity.timeline) / LOG_DIR)
            self._has_dir = True
        path = directory / plan.name
        # Temporary name until the bytes are durable: a crash leaves no file that looks complete.
        file = create_in(filesystem, temporary(path))
        limits: dict[str, Any] = {"timeout_s": self._timeout_s, "progress": silent}
        try:
            # A full disk is noticed here, before anything is written.
            file.reserve(plan.size_bytes)
            # The body takes the time from here to on_body. The rest is the fixed price of a
            # segment, which a batch of several steps pays once.
            at_s = [self.now_s()]
            limits["on_body"] = lambda: at_s.append(self.now_s())
            written = write_shard(file, plan, identity, body, self._ring, **limits)
        finally:
            file.close()
        # write_shard has synced the file. The rename is durable only after the sync of the
        # directory; the marker must come after both, as it promises that the file is complete.
        failpoint("log.before_rename")
        filesystem.rename(temporary(path), path)
        filesystem.sync_dir(directory)
        failpoint("log.before_marker")
        marker = Marker.of(identity, (written.record,)).encode()
        # May be deleted at once: if a base of its last step is already durable, retention
        # deletes the segment as soon as it has its marker.
        path = directory / marker_name(identity.rank)
        write_durably(filesystem, path, marker, may_go=True)
        self.written_bytes += plan.size_bytes
        return at_s[1] - at_s[0]

    def _clean_up(self, directory: PurePath, name: str) -> None:
        """Remove the files of a failed segment: they may take the last free space of the disk."""
        filesystem = self._filesystem
        marker = directory / marker_name(self._identity.rank)
        # The disk that failed the write may fail the cleanup, too: the first error counts.
        with contextlib.suppress(OSError):
            names = {entry.name for entry in filesystem.scan(directory)}
            # A segment with its marker is complete and may have been read: it stays. After a
            # takeover the files belong to the new timeline.
            if marker.name in names or self._fence.newest_or_next() != self._identity.timeline:
                return
            shard = directory / name
            for path in (temporary(shard), shard, temporary(marker)):
                remove_if_there(filesystem, path)
            # Fails, and does no harm, while another rank's files are in the directory.
            filesystem.remove_dir(directory)


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
        on_disk: called with the number of the last record on disk, or :data:`.messages.ENDED`.
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
    space = None
    if (budget_bytes := to_disk.get("disk_bytes")) is not None:
        space = LogSpace(
            seams.filesystem,
            run,
            identity.rank,
            identity.world,
            budget_bytes=budget_bytes,
            bases_bytes=to_disk["bases_bytes"],
        )
    writer = SegmentWriter(seams, run, identity, ring, timeout_s=timeout_s, space=space)
    return SegmentQueue(writer, post, on_disk, batch_from_wire(to_disk))


def batch_from_wire(bounds: Mapping[str, Any]) -> Batch:
    """Return the segment size that a training process asked for (``LogLimits.batch_to_wire``)."""
    if bounds["auto"]:
        return AutoBatch(bounds["steps"], bounds["most"], bounds["bytes_max"], bounds["memory_max"])
    return Batch(bounds["steps"], bounds["bytes_max"], bounds["memory_max"])
