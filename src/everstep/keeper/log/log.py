"""The gradient log in the keeper: records in memory, and in segments on disk if asked for.

The memory of a record stays where the trainer has put it, so that what is in the log when the
trainer dies is there when it comes back.
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
from everstep.keeper.log.log_batch import ENDED, Batch, batch_of
from everstep.keeper.log.log_room import LogRoom, NoRoomError
from everstep.keeper.log.log_writer import SegmentWriter
from everstep.link.log_records import record_memory_bytes
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.files.stalls import wait_while_active
from everstep.seams.processes.threads import IoThreads
from everstep.state.layout.shards import ShardLayout

if TYPE_CHECKING:
    from everstep.link.keeper_stats import KeeperStats

__all__ = ["LogStore", "LoggedStep", "open_log", "records_from_wire"]

_AT_ONCE_MAX = 64  # steps


@dataclass(slots=True, eq=False)
class _Item:
    number: int
    head: RecordHead
    layout: ShardLayout
    objects: Mapping[str, bytes]
    offset: int
    came_s: float
    record: LogRecord | None = None
    unusable: bool = False  # there will be no record

    @property
    def memory_bytes(self) -> int:
        return record_memory_bytes(self.layout.size_bytes, self.objects)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A whole step.

    Attributes:
        first: number of its first record.
    """

    updates: tuple[LogRecord, ...]
    mark: LogRecord
    first: int


class LogStore:
    """Records of one training process, in the order in which they were made.

    Args:
        arena: the memory that they are in.
        writer: puts them on disk, too, if given.
        post: told what fails in the background.
        on_disk: told the number up to which records are on disk.
        batch: says what is a segment.

    Attributes:
        listeners: called when a step is whole; in the log's thread.
        reliefs: say whether a base is going to be made, behind which there may be room on disk.
        after: the step behind which what is not on disk begins; None: nothing has come yet.
        forgotten: the last record whose memory is used again.
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
        self.reliefs: list[Callable[[], bool]] = []
        self.arena = arena
        self._writer = writer
        self._post = post
        self._on_disk = on_disk
        self._lock = threading.Lock()
        self._items: list[_Item] = []
        self.forgotten = self._digested = 0
        self._batch = batch or Batch(1)
        self._gather()
        self.after: int | None = None
        self._threads = IoThreads(1, "everstep-log")
        self._failed = self._fenced = self._off = False
        self._held = self._under_way = False

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step in memory."""
        with self._lock:
            first = next((i.head.step for i in self._items if i.head.kind == "mark"), None)
            last = (i.head.step for i in reversed(self._items) if i.head.kind == "mark")
            return None if first is None else (first, next(last))

    @property
    def in_memory_only(self) -> bool:
        """Whether what arrives goes to no disk."""
        return self._writer is None or self._off or self._failed or self._fenced

    def add_to(self, stats: KeeperStats) -> None:
        """Notes what is on disk so far, and how much goes there at a time."""
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
        """A record has arrived whole, at ``offset`` of the arena."""
        item = _Item(number, head, layout, objects, offset, self._now_s())
        failpoint("keeper.log_arrived")
        with self._lock:
            self._items.append(item)
        self._threads.submit(self._arrive, item)

    def steps_behind(self, step: int, lsn: int, at_most: int) -> list[LoggedStep]:
        """Whole steps that follow a state, in order, up to the first that is not whole: whose
        mark has not come, or with a hole before it (I3, I4).

        Args:
            step, lsn: of the state.
            at_most: so many.
        """
        found: list[LoggedStep] = []
        updates: list[LogRecord] = []
        first = 0
        with self._lock:
            items = self._items  # only ever longer: what goes is left out of another list
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
        """The next whole steps that follow each other, in order; and the number of their last
        record, or of the last one that no whole step has.

        Args:
            number: behind this record.
            beyond: no step up to this one.
            size_bytes: no more of several steps; one may be larger.
        """
        with self._lock:
            items = self._items
            begin = bisect_right(items, number, key=lambda item: item.number)
        found: list[LogRecord] = []
        step: list[_Item] = []
        for place in range(begin, len(items)):
            item = items[place]
            if item.head.step <= beyond:
                number = item.number
                continue
            if item.record is None and not item.unusable:
                break
            step.append(item)
            if item.head.kind != "mark":
                continue
            records = [one.record for one in step if one.record is not None]
            both = sum(record.size_bytes for record in [*found, *records])
            many = sum(record.head.kind == "mark" for record in found) >= _AT_ONCE_MAX
            if found and (many or both > size_bytes):
                break
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
        """Whether there is no record in memory."""
        with self._lock:
            return not self._items

    @property
    def arriving(self) -> bool:
        """Whether a record in memory is not digested yet."""
        with self._lock:
            last = self._items[-1] if self._items else None
        return last is not None and last.record is None and not last.unusable

    def flush(self) -> None:
        """Begins to write what is left of an unfinished batch, up to its last mark."""
        self._threads.submit(self._flush)

    def relief(self, coming: bool) -> None:
        """Whether a base is under way, behind which the log on disk may have room: what has none is
        in memory until then."""
        self._under_way = coming
        if self._held:
            self._threads.submit(self._guarded, self._catch_up)

    @property
    def _relief(self) -> bool:
        return self._under_way or any(coming() for coming in self.reliefs)

    def forget(self, upto: int) -> None:
        """The memory of records up to this number is going to be used again."""
        with self._lock:
            self.forgotten = max(self.forgotten, upto)
            gone = bisect_right(self._items, upto, key=lambda item: item.number)
            self._items = self._items[gone:]  # another list: somebody may be reading this one

    def to_disk(self, on: bool) -> None:
        """Records that arrive from now on, at the end of a step, are written, too, even if that has
        failed before; or they are not. Those that have arrived are."""
        self._threads.submit(self._turn, on)

    @property
    def moves(self) -> int:
        """Changes as long as what has arrived is being digested, or written."""
        return self._digested + (0 if self._writer is None else self._writer.moves)

    def settle(self, timeout_s: float, alive: Callable[[], None] = lambda: None) -> None:
        """Returns when all that has arrived is digested, and written if it will be.

        Args:
            alive: called as long as that is being done.

        Raises:
            DeadlineError: nothing of it was done for ``timeout_s``.
        """
        end = self._threads.submit(lambda: None)
        if not wait_while_active(end, timeout_s, lambda: self.moves, alive=alive):
            raise DeadlineError(
                f"the log was not written within {timeout_s:g} s: the storage hangs",
                hint="look at the disk or the network file system (dmesg, df, iostat)",
            )

    def to_wire(self) -> dict[str, Any]:
        """Records for another training process; after :meth:`settle`."""
        layouts: list[Any] = []
        numbers: dict[int, int] = {}
        rows = []
        with self._lock:
            items = [item for item in self._items if item.record is not None]
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
        """All that are in memory; after :meth:`settle`."""
        with self._lock:
            return [item.record for item in self._items if item.record is not None]

    def close(self) -> None:
        """Ends the thread. What is left of an unfinished batch is in memory only."""
        self._threads.close()

    def _now_s(self) -> float:
        return 0.0 if self._writer is None else self._writer.now_s()

    def _arrive(self, item: _Item) -> None:
        began_s = self._now_s()
        try:
            data = self.arena.view[item.offset : item.offset + item.layout.size_bytes]
            found = record_digest(data, item.objects)
            item.record = LogRecord(item.head, item.layout, item.objects, data, found)
            digest_s = self._now_s() - began_s
            if item.head.kind == "mark":
                for told in tuple(self.listeners):
                    told()
            if self._writer is not None and not self._failed and not self._off:
                self._collect(item, digest_s)
        except EverstepError as error:
            self._fail(error)
        except Exception as error:
            step = item.head.step
            self._fail(EverstepError(f"internal error in the log: {error!r}", step=step))
        finally:
            item.unusable = item.record is None
            self._digested += 1

    def _fail(self, error: EverstepError) -> None:
        """No more segments: behind a hole they would be of no use. Nobody waits for them."""
        self._failed = True
        self._fenced = self._fenced or isinstance(error, FencedError)
        self._held = False
        self._pending.clear()
        said = "the log on disk ends there, and goes on behind the next base"
        if not self._fenced:  # by whoever goes on with the run
            error.hint = said if error.hint is None else f"{error.hint}; {said}"
        self._post(error)
        self._on_disk(ENDED)

    def _gather(self, items: Sequence[_Item] = ()) -> None:
        """What begins the next segment: of a step that is not over."""
        self._pending = list(items)
        self._steps = 0
        self._bytes = sum(item.layout.size_bytes for item in items)
        self._memory_bytes = sum(item.memory_bytes for item in items)
        self._digest_s = 0.0

    def _collect(self, item: _Item, digest_s: float) -> None:
        if self.after is None:
            self.after = item.head.step - 1
        self._pending.append(item)
        self._bytes += item.layout.size_bytes
        self._memory_bytes += item.memory_bytes
        self._digest_s += digest_s
        if item.head.kind != "mark":
            return
        self._steps += 1
        self._batch.marked(item.head.step, item.came_s)
        if self._held and not self._relief:
            self._catch_up()
        elif not self._held and self._batch.is_full(self._steps, self._bytes, self._memory_bytes):
            self._write()

    def _write(self) -> None:
        """Puts the pending records, of which the last is a mark, on disk."""
        assert self._writer is not None
        assert self.after is not None
        records = [pending.record for pending in self._pending if pending.record is not None]
        try:
            times = self._writer.write(records, self.after)
        except NoRoomError:
            if not self._relief:
                raise
            self._held = True
            return
        self._batch.written(self._steps, self._bytes, self._digest_s, times)
        last = self._pending[-1]
        self.after = last.head.step
        self._gather()
        self._on_disk(last.number)

    def _catch_up(self) -> None:
        """Writes what had no room, in segments as it would have become."""
        items = self._pending
        self._held = False
        self._gather()
        for item in items:
            self._pending.append(item)
            self._bytes += item.layout.size_bytes
            self._memory_bytes += item.memory_bytes
            if item.head.kind == "mark":
                self._steps += 1
                if not self._held and self._batch.is_full(
                    self._steps, self._bytes, self._memory_bytes
                ):
                    self._write()

    def _turn(self, on: bool) -> None:
        last = self._pending[-1].number if self._pending else 0
        self._flush()
        if self._held:
            self._fail(OutOfSpaceError("the log has no room on disk", step=self.after))
        self._gather()
        self.after = None
        self._off = not on
        self._failed = self._failed and (self._fenced or not on)
        self._on_disk(ENDED if self._failed else last)

    def _flush(self) -> None:
        if self._held:
            self._guarded(self._catch_up)
        if self._held:
            return
        whole = len(self._pending)
        while whole and self._pending[whole - 1].head.kind != "mark":
            whole -= 1
        if self._writer is None or self._failed or not whole:
            return
        rest = self._pending[whole:]
        self._pending = self._pending[:whole]

        def write() -> None:
            self._write()
            if self._held:
                self._pending += rest
            else:
                self._gather(rest)

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
    """The log of a timeline.

    Args:
        to_disk: how it goes there, as of :func:`.log_batch.batch_of`; None: it does not.
        identity: of this rank, if it does.
    """
    if to_disk is None or identity is None:
        return LogStore(arena, None, post, on_disk)
    room = LogRoom.of(seams.filesystem, run, identity.rank, identity.world, to_disk)
    writer = SegmentWriter(seams, run, identity, ring, timeout_s=timeout_s, room=room)
    return LogStore(arena, writer, post, on_disk, batch_of(to_disk))


def _is_run(records: Sequence[LogRecord]) -> bool:
    try:
        run_of([record.head for record in records])
    except FormatError:
        return False
    return True


def records_from_wire(fields: Mapping[str, Any], arena: Arena) -> list[LogRecord]:
    """The records of :meth:`LogStore.to_wire`, over the memory of ``arena``."""
    layouts = [layout_from_index(layout) for layout in fields["layouts"]]
    records = []
    for head, number, objects, offset, found in fields["records"]:
        layout = layouts[number]
        data = arena.view[offset : offset + layout.size_bytes]
        records.append(LogRecord(RecordHead(*head), layout, objects, data, found))
    return records
