"""One gradient log in the keeper: records in memory and, optionally, in segments on disk.

Records stay in the memory where the training process put them. So they survive its death and are
there when it restarts.
"""

from __future__ import annotations

import dataclasses
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from everstep.arena.memory import Arena
from everstep.commit.peer_copies import run_of
from everstep.errors import (
    DeadlineError,
    EverstepError,
    FencedError,
    FormatError,
    OutOfSpaceError,
)
from everstep.format.header import ShardIdentity
from everstep.format.log import (
    LogRecord,
    RecordHead,
    layout_from_index,
    layout_to_index,
    record_digest,
)
from everstep.format.writer import ChunkRing
from everstep.keeper.log.batch import ENDED, Batch, batch_from_wire
from everstep.keeper.log.disk_space import LogSpace, NoLogSpaceError
from everstep.keeper.log.segment_writer import SegmentWriter
from everstep.link.log_records import record_memory_bytes
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.files.stalls import wait_while_active
from everstep.seams.processes.threads import IoThreads
from everstep.state.layout.shards import ShardLayout

if TYPE_CHECKING:
    from everstep.link.keeper_stats import KeeperStats

__all__ = ["LogStore", "LoggedStep", "open_log", "records_from_wire"]

_STEPS_MAX = 64
"""Most steps that :meth:`LogStore.steps_from` returns at once."""


@dataclass(slots=True, eq=False)
class _StoredRecord:
    """A record in memory; ``record`` is None until its digest is computed.

    Attributes:
        number: number that the training process gave it; increases.
        offset: offset of its data in the arena, in bytes.
        received_s: time of arrival, in seconds of the writer's clock.
        failed: True if there will be no record: digesting it failed.
    """

    number: int
    head: RecordHead
    layout: ShardLayout
    objects: Mapping[str, bytes]
    offset: int
    received_s: float
    record: LogRecord | None = None
    failed: bool = False

    @property
    def memory_bytes(self) -> int:
        return record_memory_bytes(self.layout.size_bytes, self.objects)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A complete step of the log: its updates and its step mark.

    Attributes:
        first: number of its first record.
    """

    updates: tuple[LogRecord, ...]
    mark: LogRecord
    first: int


class LogStore:
    """Records of one training process, in the order in which they were made.

    Args:
        arena: memory that holds the records.
        writer: writes segments to disk; None: the log stays in memory.
        post: called with errors of the background thread.
        on_disk: called with the number of the last record on disk.
        batch: number of steps per segment.

    Attributes:
        listeners: called in the log's thread when a step is complete.
        bases_expected: callables; each returns True while a base is expected after which retention
            may free disk space.
        after: the step after which the next segment begins; None before the first record.
        forgotten: number of the last record whose memory was released.
    """

    def __init__(
        self,
        arena: Arena,
        writer: SegmentWriter | None,
        post: Callable[[EverstepError], None],
        on_disk: Callable[[int], None] = lambda number: None,
        batch: Batch | None = None,
    ) -> None:
        self.listeners: list[Callable[[], None]] = []
        self.bases_expected: list[Callable[[], bool]] = []
        self.arena = arena
        self._writer = writer
        self._post = post
        self._on_disk = on_disk
        self._lock = threading.Lock()
        self._stored: list[_StoredRecord] = []
        self.forgotten = 0
        self._digested_count = 0
        self._batch = batch or Batch(1)
        self._start_segment()
        self.after: int | None = None
        self._thread = IoThreads(1, "everstep-log")
        self._failed = False
        self._fenced = False
        self._disabled = False
        self._waits_for_space = False
        self._base_pending = False

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last complete step in memory; None: there is none."""
        with self._lock:
            first = next((i.head.step for i in self._stored if i.head.kind == "mark"), None)
            last = (i.head.step for i in reversed(self._stored) if i.head.kind == "mark")
            return None if first is None else (first, next(last))

    @property
    def in_memory_only(self) -> bool:
        """True if new records do not go to disk."""
        return self._writer is None or self._disabled or self._failed or self._fenced

    def add_to(self, stats: KeeperStats) -> None:
        """Add bytes on disk and steps per segment to ``stats``."""
        if self._writer is not None:
            stats.log_bytes = self._writer.written_bytes
            stats.log_batch_steps = self._batch.steps

    def add(
        self,
        number: int,
        head: RecordHead,
        layout: ShardLayout,
        objects: Mapping[str, bytes],
        offset: int,
    ) -> None:
        """Add a record that has arrived completely, at ``offset`` of the arena."""
        item = _StoredRecord(number, head, layout, objects, offset, self._now_s())
        failpoint("keeper.log_arrived")
        with self._lock:
            self._stored.append(item)
        # After the append: the thread may notify listeners, which look for this record.
        self._thread.submit(self._digest_record, item)

    def steps_after(self, step: int, lsn: int, at_most: int) -> list[LoggedStep]:
        """Return complete steps that follow a state, in order, up to the first incomplete one (I3,
        I4).

        A step is incomplete if its mark has not arrived or an update before it is missing.

        Args:
            step: step of the state.
            lsn: LSN of the state.
            at_most: maximum number of steps.
        """
        found: list[LoggedStep] = []
        updates: list[LogRecord] = []
        first = 0
        with self._lock:
            # Read without the lock below: this list only grows. forget() replaces it by another.
            items = self._stored
            begin = bisect_right(items, step, key=lambda item: item.head.step)
        for place in range(begin, len(items)):
            item = items[place]
            head = item.head
            record = item.record
            if record is None or len(found) == at_most:
                break
            if head.kind != "mark":
                if head.lsn > lsn:
                    first = first if updates else item.number
                    updates.append(record)
                continue
            numbers = [update.head.lsn for update in updates]
            if head.step != step + 1 or numbers != list(range(lsn + 1, head.lsn + 1)):
                break
            found.append(LoggedStep(tuple(updates), record, first if updates else item.number))
            step = head.step
            lsn = head.lsn
            updates = []
        return found

    def steps_from(self, number: int, beyond: int, size_bytes: int) -> tuple[list[LogRecord], int]:
        """Return the next complete, consecutive steps, and the number of the last record that is
        done with.

        Records of steps that can never become complete are skipped; their numbers count as done
        with.

        Args:
            number: start after this record.
            beyond: skip steps up to this one.
            size_bytes: maximum size of several steps; a single step may be larger.
        """
        with self._lock:
            items = self._stored
            begin = bisect_right(items, number, key=lambda item: item.number)
        found: list[LogRecord] = []
        step: list[_StoredRecord] = []
        for place in range(begin, len(items)):
            item = items[place]
            if item.head.step <= beyond:
                number = item.number
                continue
            # Not digested yet: later records must not overtake it.
            if item.record is None and not item.failed:
                break
            step.append(item)
            if item.head.kind != "mark":
                continue
            records = [one.record for one in step if one.record is not None]
            total_bytes = sum(record.size_bytes for record in [*found, *records])
            enough = sum(record.head.kind == "mark" for record in found) >= _STEPS_MAX
            if found and (enough or total_bytes > size_bytes):
                break
            # A step with a missing record or a gap before it ends the run; if it is the first, it
            # is skipped for good.
            if len(records) < len(step) or not _is_run([*found, *records]):
                if found:
                    break
            else:
                found += records
            number = item.number
            step = []
        return found, number

    @property
    def empty(self) -> bool:
        """True if there is no record in memory."""
        with self._lock:
            return not self._stored

    @property
    def arriving(self) -> bool:
        """True while a record in memory has no digest yet."""
        with self._lock:
            last = self._stored[-1] if self._stored else None
        return last is not None and last.record is None and not last.failed

    def flush(self) -> None:
        """Write an unfinished segment up to its last step mark, in the background."""
        self._thread.submit(self._flush)

    def expect_base(self, coming: bool) -> None:
        """Note whether a base is in progress, after which retention may free disk space for the
        log.

        Segments that do not fit stay in memory as long as a base is expected.
        """
        self._base_pending = coming
        if self._waits_for_space:
            self._thread.submit(self._guarded, self._catch_up)

    @property
    def _base_expected(self) -> bool:
        return self._base_pending or any(coming() for coming in self.bases_expected)

    def forget(self, upto: int) -> None:
        """Drop records up to this number: their memory is about to be reused."""
        with self._lock:
            self.forgotten = max(self.forgotten, upto)
            count = bisect_right(self._stored, upto, key=lambda item: item.number)
            # A new list: another thread may be iterating over the old one.
            self._stored = self._stored[count:]

    def to_disk(self, on: bool) -> None:
        """Start or stop writing to disk, beginning with the next step.

        Starting also works after an earlier failure. Records that have already arrived are still
        written.
        """
        self._thread.submit(self._set_to_disk, on)

    @property
    def moves(self) -> int:
        """Counter that increases with each digested record and each completed disk operation."""
        return self._digested_count + (0 if self._writer is None else self._writer.moves)

    def settle(self, timeout_s: float, alive: Callable[[], None] = lambda: None) -> None:
        """Wait until all records that have arrived are digested and, if the log goes to disk,
        written.

        Args:
            alive: called repeatedly while there is progress.

        Raises:
            DeadlineError: no progress for ``timeout_s``.
        """
        # One thread, in order: when this empty task ends, all work submitted before has ended.
        end = self._thread.submit(lambda: None)
        if not wait_while_active(end, timeout_s, lambda: self.moves, alive=alive):
            raise DeadlineError(
                f"no progress in writing the log for {timeout_s:g} s: the storage hangs",
                hint="check the disk or the network file system (dmesg, df, iostat)",
            )

    def to_wire(self) -> dict[str, Any]:
        """Encode the records for another training process. Call :meth:`settle` before."""
        layouts: list[Any] = []
        numbers: dict[int, int] = {}
        rows = []
        with self._lock:
            items = [item for item in self._stored if item.record is not None]
        for item in items:
            if id(item.layout) not in numbers:
                numbers[id(item.layout)] = len(layouts)
                layouts.append(layout_to_index(item.layout))
            assert item.record is not None
            rows.append(
                [
                    dataclasses.astuple(item.head),
                    numbers[id(item.layout)],
                    dict(item.objects),
                    item.offset,
                    item.record.digest,
                ]
            )
        return {"layouts": layouts, "records": rows}

    def records(self) -> list[LogRecord]:
        """Return all records in memory. Call :meth:`settle` before."""
        with self._lock:
            return [item.record for item in self._stored if item.record is not None]

    def close(self) -> None:
        """End the thread. Records of an unfinished segment stay in memory only."""
        self._thread.close()

    def _now_s(self) -> float:
        return 0.0 if self._writer is None else self._writer.now_s()

    def _digest_record(self, item: _StoredRecord) -> None:
        began_s = self._now_s()
        try:
            data = self.arena.view[item.offset : item.offset + item.layout.size_bytes]
            # In the log's thread: digesting a large record must not delay messages of the trainer.
            found = record_digest(data, item.objects)
            item.record = LogRecord(item.head, item.layout, item.objects, data, found)
            digest_s = self._now_s() - began_s
            if item.head.kind == "mark":
                # A copy: a listener may be removed while this runs.
                for listener in tuple(self.listeners):
                    listener()
            if self._writer is not None and not self._failed and not self._disabled:
                self._add_to_segment(item, digest_s)
        except EverstepError as error:
            self._fail(error)
        except Exception as error:
            step = item.head.step
            self._fail(EverstepError(f"internal error in the log: {error!r}", step=step))
        finally:
            # Also on errors: settle() and steps_from() must not wait for this record.
            item.failed = item.record is None
            self._digested_count += 1

    def _fail(self, error: EverstepError) -> None:
        """Stop writing: segments after a gap are useless until the next base. Recording goes on in
        memory.
        """
        self._failed = True
        self._fenced = self._fenced or isinstance(error, FencedError)
        self._waits_for_space = False
        self._pending.clear()
        if not self._fenced:
            effect = "the log on disk ends here and continues after the next base"
            error.hint = effect if error.hint is None else f"{error.hint}; {effect}"
        self._post(error)
        self._on_disk(ENDED)

    def _start_segment(self, items: Sequence[_StoredRecord] = ()) -> None:
        """Begin the next segment with ``items``, which belong to an unfinished step."""
        self._pending = list(items)
        self._segment_steps = 0
        self._segment_bytes = sum(item.layout.size_bytes for item in items)
        self._segment_memory_bytes = sum(item.memory_bytes for item in items)
        self._segment_digest_s = 0.0

    def _add_to_segment(self, item: _StoredRecord, digest_s: float) -> None:
        if self.after is None:
            self.after = item.head.step - 1
        self._pending.append(item)
        self._segment_bytes += item.layout.size_bytes
        self._segment_memory_bytes += item.memory_bytes
        self._segment_digest_s += digest_s
        if item.head.kind != "mark":
            return
        self._segment_steps += 1
        self._batch.step_ended(item.head.step, item.received_s)
        if self._waits_for_space and not self._base_expected:
            self._catch_up()
        elif not self._waits_for_space and self._batch.is_full(
            self._segment_steps, self._segment_bytes, self._segment_memory_bytes
        ):
            self._write_segment()

    def _write_segment(self) -> None:
        """Write the pending records, the last of which is a step mark."""
        assert self._writer is not None
        assert self.after is not None
        records = [pending.record for pending in self._pending if pending.record is not None]
        try:
            times = self._writer.write(records, self.after)
        except NoLogSpaceError:
            if not self._base_expected:
                raise
            # The records stay pending: retention after that base may free space for them.
            self._waits_for_space = True
            return
        # The segment is durable: only now may the trainer be told.
        self._batch.segment_written(
            self._segment_steps, self._segment_bytes, self._segment_digest_s, times
        )
        last = self._pending[-1]
        self.after = last.head.step
        self._start_segment()
        self._on_disk(last.number)

    def _catch_up(self) -> None:
        """Write records that waited for disk space, in segments of the usual size."""
        items = self._pending
        self._waits_for_space = False
        self._start_segment()
        for item in items:
            self._pending.append(item)
            self._segment_bytes += item.layout.size_bytes
            self._segment_memory_bytes += item.memory_bytes
            if item.head.kind == "mark":
                self._segment_steps += 1
                if not self._waits_for_space and self._batch.is_full(
                    self._segment_steps, self._segment_bytes, self._segment_memory_bytes
                ):
                    self._write_segment()

    def _set_to_disk(self, on: bool) -> None:
        last = self._pending[-1].number if self._pending else 0
        self._flush()
        if self._waits_for_space:
            error = "the disk has no space for pending log records"
            self._fail(OutOfSpaceError(error, step=self.after))
        self._start_segment()
        # A restarted log begins a new run of segments: nothing connects it to the old ones.
        self.after = None
        self._disabled = not on
        self._failed = self._failed and (self._fenced or not on)
        self._on_disk(ENDED if self._failed else last)

    def _flush(self) -> None:
        if self._waits_for_space:
            self._guarded(self._catch_up)
        if self._waits_for_space:
            return
        complete = len(self._pending)
        while complete and self._pending[complete - 1].head.kind != "mark":
            complete -= 1
        if self._writer is None or self._failed or not complete:
            return
        # A segment ends with a mark; updates of the unfinished step go to the next one.
        rest = self._pending[complete:]
        self._pending = self._pending[:complete]

        def write() -> None:
            self._write_segment()
            if self._waits_for_space:
                self._pending += rest
            else:
                self._start_segment(rest)

        self._guarded(write)

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except EverstepError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EverstepError(f"internal error in the log: {error!r}"))


def open_log(
    seams: Seams,
    run: PurePath,
    ring: ChunkRing,
    arena: Arena,
    to_disk: Mapping[str, Any] | None,
    identity: ShardIdentity | None,
    post: Callable[[EverstepError], None],
    on_disk: Callable[[int], None],
    *,
    timeout_s: float,
) -> LogStore:
    """Open the log of a timeline.

    Args:
        to_disk: limits of the log on disk, as in :func:`.batch.batch_from_wire`; None: memory only.
        identity: identity of this rank; needed if the log goes to disk.
    """
    if to_disk is None or identity is None:
        return LogStore(arena, None, post, on_disk)
    space = LogSpace.from_wire(seams.filesystem, run, identity.rank, identity.world, to_disk)
    writer = SegmentWriter(seams, run, identity, ring, timeout_s=timeout_s, space=space)
    return LogStore(arena, writer, post, on_disk, batch_from_wire(to_disk))


def _is_run(records: Sequence[LogRecord]) -> bool:
    try:
        run_of([record.head for record in records])
    except FormatError:
        return False
    return True


def records_from_wire(fields: Mapping[str, Any], arena: Arena) -> list[LogRecord]:
    """Decode records encoded by :meth:`LogStore.to_wire`; their data stays in the memory of
    ``arena``.
    """
    layouts = [layout_from_index(layout) for layout in fields["layouts"]]
    records = []
    for head, number, objects, offset, found in fields["records"]:
        layout = layouts[number]
        data = arena.view[offset : offset + layout.size_bytes]
        records.append(LogRecord(RecordHead(*head), layout, objects, data, found))
    return records
