"""Read the records of a log ahead of replay, from one segment after another.

A segment may hold many steps, so it is never read as one piece; and most hold only a few, so the
next one is opened before the last record of this one is taken. A few threads read past the page
cache, straight into the memory that the records keep. Nothing here verifies the bytes: the caller
verifies each record once, right before it decodes the gradients
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

import contextlib
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
from everstep.seams.processes import Condition, wait_all

_READ_BYTES = 2 << 20
# Limits of what is read before it is requested. Other users of the threads wait for no more.
_AHEAD_BYTES = 64 << 20
_AHEAD_RECORDS = 16


@dataclass(slots=True)
class _PendingRecord:
    """A record that is being read.

    Attributes:
        tensors: memory of its flat tensors, by dtype.
        reads: expected bytes of each read, and the future.
    """

    source: _OpenSegment
    index: RecordIndex
    tensors: dict[str, memoryview] = field(default_factory=dict)
    reads: list[tuple[int, Future[int]]] = field(default_factory=list)


class _OpenSegment:
    """A segment whose records are being read.

    Raises:
        DamageError, FormatError: the header or the index is damaged; with the path.
        OSError: the segment cannot be read.
    """

    def __init__(self, filesystem: FileSystem, segment: SegmentFound) -> None:
        self.segment = segment
        self.file, _, header, self.path = open_segment(filesystem, segment)
        try:
            # If this fails, the caller has no object to close.
            data = read_index(self.file, header, self.path)
            self.records = index_of_segment(header.identity, data, self.path)
        except BaseException:
            self.file.close()
            raise
        self._header_bytes = header.room_bytes
        self._places: dict[str, list[tuple[str, int, int]]] = {}
        for place in header.placed:
            number, _, dtype = place.entry.name.partition("/")
            self._places.setdefault(number, []).append((dtype, place.begin, place.end))

    def record(self, place: int) -> RecordIndex:
        """Return the index entry of a record.

        Raises:
            FormatError: there is no such record.
        """
        if place >= len(self.records):
            raise FormatError(f"{self.path} has no record number {place}", path=self.path)
        return self.records[place]

    def start(self, place: int, memory: ReusedMemory, ring: ChunkRing) -> _PendingRecord:
        """Allocate memory for a record and start its reads."""
        record = _PendingRecord(self, self.record(place))
        for dtype, begin, end in self._places.get(f"{place:06d}", ()):
            # Direct I/O needs offsets and lengths in full pages, so both ends are padded.
            offset = self._header_bytes + begin
            ahead = offset % DIRECT_ALIGNMENT_BYTES
            size_bytes = ahead + end - begin
            padded = -(-size_bytes // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
            part = memory.take(padded)
            record.tensors[dtype] = part[ahead:size_bytes]
            for at in range(0, padded, _READ_BYTES):
                stop = min(padded, at + _READ_BYTES)
                # The padding may be past the end of the file, so a read may be short by that much.
                expected = min(stop, size_bytes) - at
                read = ring.threads.submit(self.file.read_into, part[at:stop], offset - ahead + at)
                record.reads.append((expected, read))
        return record


ReadFrom = Callable[[FileSystem], FileSystem]
"""Returns the file system to read segments of a copy from, which may read ahead of it."""


class LogReads:
    """Reader of log records by segment and number, unverified.

    To be used by one thread at a time, and closed; no read is in flight afterwards. The records
    that follow are read before they are requested, if they are small: 64 MiB at most.

    Args:
        filesystem: for segments that do not name their own.
        ring: provides the reading threads.
        expected: records that will be requested, in this order. If another record is requested, the
            rest of its segment is expected next.
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
        self._ring = ring
        self._timeout_s = timeout_s
        self._read_from = read_from
        self._memory = ReusedMemory()
        # In the order of requests: records that were started, and those that were not.
        self._pending: deque[_PendingRecord] = deque()
        self._expected = deque(expected)
        # Segments of the last record and of the pending ones.
        self._open: deque[_OpenSegment] = deque()

    @property
    def pending(self) -> int:
        """Number of records that are being read and were not requested yet."""
        return len(self._pending)

    @property
    def lent_bytes(self) -> int:
        """Memory of records that are being read, or whose reader still holds them."""
        return self._memory.lent_bytes

    def read(self, segment: SegmentFound, place: int) -> LogRecord:
        """Return a record.

        Raises:
            DamageError, FormatError: the segment is damaged, or the file ends before the record
                does.
            DeadlineError: a read hangs.
            OSError: the segment cannot be read.
        """
        if not self._is_next(segment, place):
            self.close()
            self._expected = deque((segment, number) for number in range(place, len(segment.heads)))
        if not self._pending:
            self._start_next()
        self._start_ahead()
        record = self._pending[0]
        while self._open[0] is not record.source:
            self._open.popleft().file.close()
        path = record.source.path
        for expected, future in record.reads:
            if read_result(future, self._ring, self._timeout_s, path) < expected:
                raise DamageError(f"{path} is truncated", path=path)
        # Not before all its reads are over: close() waits for the reads of pending records.
        self._pending.popleft()
        return record.index.record(gathered(record.index.layout, record.tensors, path), path)

    def digest_of(self, segment: SegmentFound, place: int) -> str | None:
        """Return the expected digest of a record of the segment read last; None for segments that
        are not open."""
        sources = (one for one in self._open if one.segment is segment)
        return next((one.record(place).digest for one in sources), None)

    def close(self) -> None:
        """Cancel outstanding reads. Idempotent; records requested later are read anew."""
        futures = [future for record in self._pending for _, future in record.reads]
        for future in futures:
            future.cancel()
        # A hanging read may still write later. Its memory stays lent, so it is never reused.
        wait_all(futures, self._timeout_s)
        self._pending.clear()
        # Files are closed last: a descriptor may be reused while a read is in progress.
        while self._open:
            self._open.popleft().file.close()

    def _is_next(self, segment: SegmentFound, place: int) -> bool:
        if self._pending:
            first = self._pending[0]
            return first.source.segment is segment and first.index.number == place
        return bool(self._expected) and self._expected[0] == (segment, place)

    def _opened(self, segment: SegmentFound) -> _OpenSegment:
        """Return the segment that was opened last, or open this one."""
        if not self._open or self._open[-1].segment is not segment:
            files = segment.files
            files = self._filesystem if files is None else self._read_from(files)
            self._open.append(_OpenSegment(files, segment))
        return self._open[-1]

    def _start_next(self) -> None:
        """Start to read the next expected record."""
        segment, place = self._expected[0]
        self._pending.append(self._opened(segment).start(place, self._memory, self._ring))
        self._expected.popleft()

    def _start_ahead(self) -> None:
        """Start to read the records after the next one, within the limits."""
        ahead_bytes = sum(record.index.layout.size_bytes for record in list(self._pending)[1:])
        try:
            while self._expected and len(self._pending) <= _AHEAD_RECORDS:
                segment, place = self._expected[0]
                ahead_bytes += self._opened(segment).record(place).layout.size_bytes
                if ahead_bytes > _AHEAD_BYTES:
                    return
                self._start_next()
        except (EverstepError, OSError):
            # Raised again when this record is requested.
            self._expected.clear()


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
    for segment in segments:
        places = [number for number, head in enumerate(segment.heads) if key_of(head) == key]
        if segment.problem is not None or not places:
            continue
        try:
            only = [(segment, places[0])]
            with contextlib.closing(LogReads(filesystem, ring, timeout_s, only)) as reads:
                found = reads.read(segment, places[0])
            found.verify()
        except (EverstepError, OSError):  # the caller reports the error of the first place
            continue
        if found.digest == digest:
            return found
    return None


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
