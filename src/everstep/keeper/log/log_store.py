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
from typing import Any

from everstep.arena import Arena
from everstep.commit.peer_copies import run_of
from everstep.errors import DeadlineError, EverstepError, FormatError
from everstep.format.log import (
    LogRecord,
    RecordHead,
    layout_from_index,
    layout_to_index,
    record_digest,
)
from everstep.keeper.log.segment_queue import SegmentQueue, StoredRecord
from everstep.seams import failpoint
from everstep.seams.filesystem import wait_while_active
from everstep.seams.processes import IoThreads
from everstep.state.layout import ShardLayout

_STEPS_MAX = 64
"""Most steps that :meth:`LogStore.steps_from` returns at once."""


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
        segments: writes the records to disk, if they go there. In the thread of this log.

    Attributes:
        listeners: called in the log's thread when a step is complete.
        forgotten: number of the last record whose memory was released.
        stored: records kept, in order; changed under a lock by the serving thread.
    """

    def __init__(self, arena: Arena, segments: SegmentQueue) -> None:
        self.listeners: list[Callable[[], None]] = []
        self.arena = arena
        self.segments = segments
        self.forgotten = 0
        # The serving thread adds and drops records; replica, peers and copies read them.
        self._lock = threading.Lock()
        self.stored: list[StoredRecord] = []
        self._digested_count = 0
        # One thread: records are digested and written in the order in which they were made.
        self._thread = IoThreads(1, "everstep-log")

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last complete step in memory; None: there is none."""
        with self._lock:
            first = next((i.head.step for i in self.stored if i.head.kind == "mark"), None)
            last = (i.head.step for i in reversed(self.stored) if i.head.kind == "mark")
            return None if first is None else (first, next(last))

    def add(
        self,
        number: int,
        head: RecordHead,
        layout: ShardLayout,
        objects: Mapping[str, bytes],
        offset: int,
    ) -> None:
        """Add a record that has arrived completely, at ``offset`` of the arena."""
        item = StoredRecord(number, head, layout, objects, offset, self.segments.now_s)
        failpoint("keeper.log_arrived")
        with self._lock:
            self.stored.append(item)
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
            items = self.stored
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
            # Replay needs each update exactly once and in order: at a gap or a repetition the run
            # ends.
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
            items = self.stored
            begin = bisect_right(items, number, key=lambda item: item.number)
        found: list[LogRecord] = []
        step: list[StoredRecord] = []
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
            return not self.stored

    @property
    def arriving(self) -> bool:
        """True while a record in memory has no digest yet."""
        with self._lock:
            last = self.stored[-1] if self.stored else None
        return last is not None and last.record is None and not last.failed

    def flush(self) -> None:
        """Write an unfinished segment up to its last step mark, in the background."""
        self._thread.submit(self.segments.flush)

    def expect_base(self, coming: bool) -> None:
        """Note whether a base is in progress, after which retention may free disk space for the
        log.

        Segments that do not fit stay in memory as long as a base is expected.
        """
        self.segments.base_pending = coming
        # Records that begin to wait at this moment are missed here; SegmentQueue.add() writes them
        # at the next step mark.
        if self.segments.waits_for_space:
            self._thread.submit(self.segments.catch_up)

    def forget(self, upto: int) -> None:
        """Drop records up to this number: their memory is about to be reused."""
        with self._lock:
            self.forgotten = max(self.forgotten, upto)
            count = bisect_right(self.stored, upto, key=lambda item: item.number)
            # A new list: another thread may be iterating over the old one.
            self.stored = self.stored[count:]

    def to_disk(self, on: bool) -> None:
        """Start or stop writing to disk, beginning with the next step.

        Starting also works after an earlier failure. Records that have already arrived are still
        written.
        """
        self._thread.submit(self.segments.set_to_disk, on)

    @property
    def moves(self) -> int:
        """Counter that increases with each digested record and each completed disk operation."""
        return self._digested_count + self.segments.moves

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
            items = [item for item in self.stored if item.record is not None]
        for item in items:
            # id() is a safe key: the items keep their layouts alive.
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
            return [item.record for item in self.stored if item.record is not None]

    def close(self) -> None:
        """End the thread. Records of an unfinished segment stay in memory only."""
        self._thread.close()

    def _digest_record(self, item: StoredRecord) -> None:
        began_s = self.segments.now_s
        try:
            data = self.arena.view[item.offset : item.offset + item.layout.size_bytes]
            # In the log's thread: digesting a large record must not delay messages of the trainer.
            found = record_digest(data, item.objects)
            # One assignment, without the lock: readers see either no record or a complete one.
            item.record = LogRecord(item.head, item.layout, item.objects, data, found)
            digest_s = self.segments.now_s - began_s
            if item.head.kind == "mark":
                # A copy: a listener may be removed while this runs.
                for listener in tuple(self.listeners):
                    listener()
            self.segments.add(item, digest_s)
        except EverstepError as error:
            self.segments.fail(error)
        except Exception as error:
            step = item.head.step
            self.segments.fail(EverstepError(f"internal error in the log: {error!r}", step=step))
        finally:
            # Also on errors: settle() and steps_from() must not wait for this record.
            item.failed = item.record is None
            self._digested_count += 1


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
