"""Read the records of a log ahead of replay, from one segment after another.

A segment may hold many steps, so it is never read as one piece: replay starts with the first step
while the next ones are being read. Most segments hold only a few steps, so the next segment is
opened, and its first records requested, before the last record of the current one is taken. A few
threads read past the page cache, straight into the memory that the records keep. Nothing here
verifies the bytes: the caller verifies each record once, right before it decodes the gradients
(:meth:`~everstep.format.log.LogRecord.verify`). A segment that cannot be opened raises only when
one of its records is requested.

If a record is damaged, :func:`find_record` looks for the same record in another place. A record is
identified by kind, timeline and number, and by its digest in the index of its segment. So a lossy
copy never replaces an exact record, nor does a record that another process wrote under the same
number.

:class:`Prefetch` produces the items of a generator ahead of their use, in a thread. Replay of a
step takes about as long as reading, verifying and decoding the next ones, so both run at the same
time (LowDiff section IV-C: recovery in parallel).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

from everstep.arena import ReusedMemory
from everstep.errors import DamageError, EverstepError, FormatError
from everstep.format.log import LogRecord, RecordHead, RecordIndex, gathered, index_of_segment
from everstep.format.reader import read_result
from everstep.format.writer import ChunkRing
from everstep.run.segments import SegmentFound, open_segment, read_index
from everstep.seams import FileSystem
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES
from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes import Condition, wait_all

_READ_BYTES = 2 << 20
_IN_FLIGHT_MAX = 64  # other users of these threads wait for no more than that
_AHEAD_BYTES_MAX = 64 << 20
_LENT_BYTES_MAX = 320 << 20
_SHARE_OF_MEMORY = 8  # of available memory


class ReadBudget:
    """Threads for reading a log ahead, their timeout, limits, and the memory for it.

    Records started before they are requested take at most 64 MiB, or one step. All records that
    were read and are still in use take at most 320 MiB (less if memory is short), or two steps: one
    step is read while the previous one is applied. Fresh memory is slow to obtain, so a larger
    budget would only cost time.

    Args:
        ring: provides the reading threads.

    Attributes:
        ahead_bytes: size of records started, but not requested yet.
    """

    def __init__(self, ring: ChunkRing, timeout_s: float) -> None:
        self.ring = ring
        self.timeout_s = timeout_s
        self.ahead_bytes = 0
        self._memory = ReusedMemory()
        self._in_flight: deque[Future[int]] = deque()
        self._lent_bytes_max = min(_LENT_BYTES_MAX, memory_available_bytes() // _SHARE_OF_MEMORY)

    @property
    def lent_bytes(self) -> int:
        """Memory of all records that are being read or are in use."""
        return self._memory.lent_bytes

    @property
    def can_submit(self) -> bool:
        """True if not too many reads are in flight."""
        # Only from the front: a slow read there makes the count too large, never too small.
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        return len(self._in_flight) < _IN_FLIGHT_MAX

    def submitted(self, future: Future[int]) -> None:
        """Count a read as in flight."""
        self._in_flight.append(future)

    def take(self, size_bytes: int) -> memoryview:
        """Return memory for a tensor of a record, regardless of the limits."""
        return self._memory.take(size_bytes)

    def allows(self, size_bytes: int, step_bytes: int) -> bool:
        """Return True if a record may be started before it is requested.

        Args:
            size_bytes: size of the record.
            step_bytes: size of all records of its step.
        """
        # At least one step may always be read ahead, however large, or replay would wait for every
        # read.
        if self.ahead_bytes + size_bytes > max(_AHEAD_BYTES_MAX, step_bytes):
            return False
        two_steps = 2 * step_bytes + step_bytes // 8  # plus padding to full pages
        return self.lent_bytes + size_bytes <= max(self._lent_bytes_max, two_steps)


@dataclass(slots=True)
class _PendingRecord:
    """A record that is being read.

    Attributes:
        tensors: memory of its flat tensors, by dtype.
        left: reads not submitted yet: destination, file offset, and expected bytes.
        reads: submitted reads: expected bytes, and the future.
        ahead_bytes: bytes counted as read ahead.
    """

    index: RecordIndex
    tensors: dict[str, memoryview] = field(default_factory=dict)
    left: deque[tuple[memoryview, int, int]] = field(default_factory=deque)
    reads: list[tuple[int, Future[int]]] = field(default_factory=list)
    ahead_bytes: int = 0


class SegmentReads:
    """Reader of consecutive records of one segment, unverified.

    To be used by one thread at a time, and closed by its creator; no read is in flight afterwards.

    Args:
        budget: shared by all segments of one log.
        first: number of the first record.
        end: number after the last record; None: up to the end of the segment.
        meanwhile: called while a record is awaited, to submit later reads; None:
            :meth:`submit_ahead`.

    Attributes:
        next: number of the next record.
        end: number after the last record.
        digests: expected digests of the records.

    Raises:
        DamageError, FormatError: the header or the index is damaged; with the path.
        OSError: the segment cannot be read.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        segment: SegmentFound,
        budget: ReadBudget,
        *,
        first: int,
        end: int | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self.segment = segment
        self.next = first
        self._budget = budget
        self._meanwhile = meanwhile
        self._file, _, header, self._path = open_segment(filesystem, segment)
        try:
            # If this fails, the caller has no object to close.
            data = read_index(self._file, header, self._path)
            records = index_of_segment(header.identity, data, self._path)
        except BaseException:
            self._file.close()
            raise
        self.digests = [index.digest for index in records]
        self._header_bytes = header.room_bytes
        self._places: dict[str, list[tuple[str, int, int]]] = {}
        for place in header.placed:
            number, _, dtype = place.entry.name.partition("/")
            self._places.setdefault(number, []).append((dtype, place.begin, place.end))
        self._step_bytes: dict[int, int] = {}
        for index in records:
            step = index.head.step
            self._step_bytes[step] = self._step_bytes.get(step, 0) + self._size_bytes(index)
        self.end = len(records) if end is None else end
        self._unstarted = deque(records[first:end])
        self._pending: deque[_PendingRecord] = deque()

    def read(self) -> LogRecord:
        """Return the next record.

        Raises:
            DamageError: the file ends before the record does.
            FormatError: the record is malformed, or there are no more.
            DeadlineError: a read hangs.
            OSError: the segment cannot be read.
        """
        meanwhile = self._meanwhile or self.submit_ahead
        if not self._pending:
            if not self._unstarted:
                raise FormatError(f"{self._path} has no record number {self.next}", path=self._path)
            self._start_next()
        record = self._pending[0]
        self._release_ahead(record)
        done = 0
        # Reads of later records are submitted before each wait, so that the threads always have
        # work.
        while record.left or done < len(record.reads):
            meanwhile()
            # The budget allowed none, but the caller waits for this record: submit one regardless.
            if done == len(record.reads):
                self._submit_next(record)
            expected, future = record.reads[done]
            budget = self._budget
            if read_result(future, budget.ring, budget.timeout_s, self._path) < expected:
                raise DamageError(f"{self._path} is truncated", path=self._path)
            done += 1
        # Not before all its reads are over: close() waits for the reads of pending records.
        self._pending.popleft()
        meanwhile()  # later reads proceed while the caller verifies this record
        self.next += 1
        data = gathered(record.index.layout, record.tensors, self._path)
        return record.index.record(data, self._path)

    @property
    def pending(self) -> int:
        """Number of records that are begun and were not returned."""
        return len(self._pending)

    def submit_ahead(self) -> bool:
        """Submit as many reads as the budget allows; return True if none are left to submit."""
        for record in self._pending:
            while record.left:
                if not self._budget.can_submit:
                    return False
                self._submit_next(record)
        while self._unstarted:
            index = self._unstarted[0]
            size_bytes = self._size_bytes(index)
            step_bytes = self._step_bytes[index.head.step]
            if not self._budget.can_submit or not self._budget.allows(size_bytes, step_bytes):
                return False
            try:
                record = self._start_next()
            except OSError:  # no memory now; there may be some when the record is requested
                return False
            while record.left and self._budget.can_submit:
                self._submit_next(record)
            if record.left:
                return False
        return True

    def close(self) -> None:
        """Cancel outstanding reads and close the file. Idempotent."""
        self._unstarted.clear()
        futures = [future for record in self._pending for _, future in record.reads]
        for future in futures:
            future.cancel()
        # A hanging read may still write later. Its memory stays lent, so it is never reused.
        wait_all(futures, self._budget.timeout_s)
        for record in self._pending:
            self._release_ahead(record)
        self._pending.clear()
        # The file is closed last: its descriptor may be reused while a read is in progress.
        self._file.close()

    def _release_ahead(self, record: _PendingRecord) -> None:
        """Stop counting a record as read ahead: it was requested, or is discarded."""
        self._budget.ahead_bytes -= record.ahead_bytes
        record.ahead_bytes = 0

    def _size_bytes(self, index: RecordIndex) -> int:
        places = self._places.get(f"{index.number:06d}", ())
        return sum(end - begin for _, begin, end in places)

    def _start_next(self) -> _PendingRecord:
        """Allocate memory for the next unstarted record and plan its reads."""
        record = _PendingRecord(self._unstarted[0])
        for dtype, begin, end in self._places.get(f"{record.index.number:06d}", ()):
            # Direct I/O needs offsets and lengths in full pages, so both ends are padded.
            offset = self._header_bytes + begin
            ahead = offset % DIRECT_ALIGNMENT_BYTES
            size_bytes = ahead + end - begin
            padded = -(-size_bytes // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
            memory = self._budget.take(padded)
            record.tensors[dtype] = memory[ahead:size_bytes]
            for at in range(0, padded, _READ_BYTES):
                stop = min(padded, at + _READ_BYTES)
                # The padding may be past the end of the file, so a read may be short by that much.
                expected = min(stop, size_bytes) - at
                record.left.append((memory[at:stop], offset - ahead + at, expected))
        # Removed after the allocation, which may fail: the record can be started again later.
        self._unstarted.popleft()
        self._pending.append(record)
        record.ahead_bytes = self._size_bytes(record.index)
        self._budget.ahead_bytes += record.ahead_bytes
        return record

    def _submit_next(self, record: _PendingRecord) -> None:
        memory, offset, expected = record.left.popleft()
        future = self._budget.ring.threads.submit(self._file.read_into, memory, offset)
        record.reads.append((expected, future))
        self._budget.submitted(future)


Key = tuple[str, int, int]
"""Kind, timeline, and number: the LSN of an update, the step of a mark."""


def key_of(head: RecordHead) -> Key:
    """Return the identity of a record."""
    return head.kind, head.timeline, head.step if head.kind == "mark" else head.lsn


def find_record(
    key: Key,
    digest: str,
    segments: Iterable[SegmentFound],
    filesystem: FileSystem,
    ring: ChunkRing,
    timeout_s: float,
) -> LogRecord | None:
    """Return a verified record from the first of these segments that has it; None if no segment
    has.

    Args:
        key: identity of the record.
        digest: expected digest.
        segments: searched lazily, in order.
        filesystem: for segments that do not name their own.
    """
    budget = ReadBudget(ring, timeout_s)
    for segment in segments:
        places = [number for number, head in enumerate(segment.heads) if key_of(head) == key]
        if segment.problem is not None or not places:
            continue
        files = segment.files or filesystem
        try:
            reads = SegmentReads(files, segment, budget, first=places[0])
            try:
                found = reads.read()
            finally:
                reads.close()
            found.verify()
        except (EverstepError, OSError):  # the caller reports the error of the first place
            continue
        if found.digest == digest:
            return found
    return None


ReadFrom = Callable[[FileSystem], FileSystem]
"""Returns the file system to read segments of a copy from, which may read ahead of it."""

_OPEN_MAX = 4  # segments open at a time; more would not make reading faster


@dataclass(frozen=True, slots=True)
class _Run:
    """Records ``[first, end)`` of a segment."""

    segment: SegmentFound
    first: int
    end: int


class LogReads:
    """Reader of log records by segment and number, unverified.

    To be used by one thread at a time, and closed.

    Args:
        filesystem: for segments that do not name their own.
        ring: provides the reading threads.
        expected: records that will be requested, in this order; they are read ahead. Other records
            may be requested, too.
        read_from: called for segments that name their own file system.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        ring: ChunkRing,
        timeout_s: float,
        expected: Iterable[tuple[SegmentFound, int]] = (),
        read_from: ReadFrom = lambda files: files,
    ) -> None:
        self._filesystem = filesystem
        self._read_from = read_from
        self.budget = ReadBudget(ring, timeout_s)
        self._runs = _runs(expected)  # not open yet
        self._open: deque[SegmentReads] = deque()  # the segment being read comes first
        self._reads_ahead = True

    def read(self, segment: SegmentFound, place: int) -> LogRecord:
        """Return a record.

        Raises:
            DamageError, FormatError: the segment is damaged, or the file ends before the record
                does.
            DeadlineError: a read hangs.
            OSError: the segment cannot be read.
        """
        reads = self._at(segment, place)
        while reads.next < place:
            reads.read()
        return reads.read()

    def digest_of(self, segment: SegmentFound, place: int) -> str | None:
        """Return the expected digest of a record of the segment read last; None for other
        segments."""
        if self._open and self._open[0].segment is segment:
            return self._open[0].digests[place]
        return None

    def close(self) -> None:
        """Cancel outstanding reads. Idempotent; records requested later are read anew."""
        while self._open:
            self._open.popleft().close()

    def _at(self, segment: SegmentFound, place: int) -> SegmentReads:
        """Return a reader of the segment that is not past ``place``."""
        # The segment is finished, or the caller does not follow the expected order.
        while self._open and not _has(self._open[0], segment, place):
            self._open.popleft().close()
        if not self._open:
            end = None
            if any(run.segment is segment for run in self._runs):
                while self._runs[0].segment is not segment:
                    self._runs.popleft()
                run = self._runs.popleft()
                # A record after the expected ones: up to the end of the segment.
                end = run.end if place < run.end else None
            self._reads_ahead = True
            self._open.append(self._opened(segment, place, end))
        return self._open[0]

    def _opened(self, segment: SegmentFound, first: int, end: int | None) -> SegmentReads:
        files = segment.files
        return SegmentReads(
            self._filesystem if files is None else self._read_from(files),
            segment,
            self.budget,
            first=first,
            end=end,
            meanwhile=self._submit_ahead,
        )

    def _submit_ahead(self) -> None:
        """Submit as many reads as the budget allows, in the expected order."""
        # Stops at the first segment with reads left, so that later ones do not take its budget.
        if not all(reads.submit_ahead() for reads in self._open):
            return
        while self._runs and self._reads_ahead and len(self._open) < _OPEN_MAX:
            run = self._runs[0]
            try:
                reads = self._opened(run.segment, run.first, run.end)
            except (EverstepError, OSError):  # raised again when a record of it is requested
                self._reads_ahead = False
                return
            self._runs.popleft()
            self._open.append(reads)
            if not reads.submit_ahead():
                return


def _has(reads: SegmentReads, segment: SegmentFound, place: int) -> bool:
    return reads.segment is segment and reads.next <= place < reads.end


def _runs(expected: Iterable[tuple[SegmentFound, int]]) -> deque[_Run]:
    found: deque[_Run] = deque()
    for segment, place in expected:
        last = found[-1] if found else None
        # Records in a gap are read too, and dropped: a segment is read in sequence (LogReads.read).
        if last is not None and last.segment is segment and last.end <= place:
            found[-1] = _Run(segment, last.first, place + 1)
        else:
            found.append(_Run(segment, place, place + 1))
    return found


_T = TypeVar("_T")


class Prefetch(Generic[_T]):
    """Items of a generator, in order, produced ahead of the consumer.

    An error of the generator is raised in place of the item that it prevented. Use it in a ``with``
    block: on exit the thread has ended and the generator is closed.

    Args:
        items: generator run in the thread; nothing else may use its resources meanwhile.
        count: maximum number of waiting items; one more is being produced.
        size_bytes: returns the host memory that an item takes.
        limit_bytes: maximum total size of waiting items and of those that the consumer still holds:
            the last one returned, and the size given to :meth:`set_held_bytes`. A single item may
            be larger, and one more is being produced.
    """

    def __init__(
        self,
        items: Generator[_T, None, None],
        *,
        count: int,
        size_bytes: Callable[[_T], int] = lambda item: 0,
        limit_bytes: int = 0,
    ) -> None:
        self._items = items
        self._count = count
        self._size_bytes = size_bytes
        self._limit_bytes = limit_bytes
        self._changed = Condition()
        self._waiting: deque[tuple[_T, int]] = deque()
        self._kept_bytes = self._held_bytes = 0
        self._ended = self._stopped = self._wanted = False
        self._error: BaseException | None = None
        # A daemon: a read that never returns must not keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name="everstep-ahead", daemon=True)

    def __enter__(self) -> Prefetch[_T]:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        # Join before the generator is closed by anybody else: its resources are free afterwards.
        self._thread.join()

    def __iter__(self) -> Prefetch[_T]:
        return self

    @property
    def ready(self) -> bool:
        """True if the next item, or the end, can be returned without waiting."""
        with self._changed:
            return bool(self._waiting) or self._ended

    def set_held_bytes(self, size_bytes: int) -> None:
        """Set the size of all returned items that the consumer still uses."""
        with self._changed:
            self._kept_bytes = self._held_bytes = size_bytes
            self._changed.notify_all()

    def __next__(self) -> _T:
        with self._changed:
            # The consumer releases the last item before it requests the next one.
            self._held_bytes = self._kept_bytes
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._ended)
            self._wanted = False
            # Also after an error: items produced before it are valid.
            if self._waiting:
                item, size_bytes = self._waiting.popleft()
                self._held_bytes += size_bytes
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
                del item  # only the consumer may keep the item alive
        except BaseException as error:  # raised in the consumer, in place of the item
            self._error = error
        finally:
            # Before the end is announced: afterwards the consumer may use the resources itself.
            self._items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: _T) -> bool:
        """Queue an item when it fits the limits; return False if the consumer has stopped."""
        size_bytes = self._size_bytes(item)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._fits(size_bytes))
            if not self._stopped:
                self._waiting.append((item, size_bytes))
                self._changed.notify_all()
            return not self._stopped

    def _fits(self, size_bytes: int) -> bool:
        taken_bytes = self._held_bytes + sum(size for _, size in self._waiting)
        # Always let one item through: an item larger than the limit must not block for ever.
        if not self._waiting and (self._wanted or not taken_bytes):
            return True
        return len(self._waiting) < self._count and taken_bytes + size_bytes <= self._limit_bytes
