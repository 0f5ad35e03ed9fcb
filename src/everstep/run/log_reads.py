"""Reads the records of a log, from one segment after the other, ahead of whoever replays them.

Most segments hold a few steps, or one. So what comes next is most often in another file: that is
opened, and its first records are on their way, before the last one of this file is taken. Where it
cannot be opened, or has not what it should have, that shows when it is asked for, and not before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from everstep.arena.reused import ReusedMemory
from everstep.errors import DamageError, EverstepError, FormatError
from everstep.format.log import LogRecord, RecordHead, RecordIndex, gathered, index_of_segment
from everstep.format.reader import read_result
from everstep.format.writer import ChunkRing
from everstep.run.segments import SegmentFound, open_segment, read_index
from everstep.seams.files.filesystem import DIRECT_ALIGNMENT_BYTES, FileSystem
from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes.conditions import all_over

__all__ = [
    "Key",
    "LogReads",
    "ReadBudget",
    "SegmentReads",
    "find_record",
    "key_of",
]

_READ_BYTES = 2 << 20
_UNDER_WAY = 64  # whoever else reads with these threads waits for no more than that
_AHEAD_BYTES_MAX = 64 << 20
_LENT_BYTES_MAX = 320 << 20
_SHARE_OF_MEMORY = 8  # of what is available


class ReadBudget:
    """How far ahead a log may be read, and the memory for it.

    What is begun before it is asked for takes no more than 64 MiB, or as much as one step. Together
    with all that was read and is still in use it takes no more than 320 MiB (less where memory is
    short), or as much as two steps: one is read while the one before it is applied, and takes its
    memory then. Memory that was never used is slow to come, so more would only cost time.

    Attributes:
        ahead_bytes: begun, and not asked for yet.
    """

    def __init__(self) -> None:
        self.ahead_bytes = 0
        self._memory = ReusedMemory()
        self._under_way: deque[Future[int]] = deque()
        self._lent_bytes_max = min(_LENT_BYTES_MAX, memory_available_bytes() // _SHARE_OF_MEMORY)

    @property
    def lent_bytes(self) -> int:
        """Memory of all records that were read, or begun, and are in use."""
        return self._memory.lent_bytes

    @property
    def takes_reads(self) -> bool:
        """Whether a read that is sent now has not too many before it."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        return len(self._under_way) < _UNDER_WAY

    def sent(self, future: Future[int]) -> None:
        """A read is under way."""
        self._under_way.append(future)

    def take(self, size_bytes: int) -> memoryview:
        """Memory for a part of a record, whether or not it is allowed."""
        return self._memory.take(size_bytes)

    def allows(self, size_bytes: int, step_bytes: int) -> bool:
        """Whether a record may be begun before it is asked for.

        Args:
            step_bytes: of all of its step.
        """
        if self.ahead_bytes + size_bytes > max(_AHEAD_BYTES_MAX, step_bytes):
            return False
        two_steps = 2 * step_bytes + step_bytes // 8  # and what whole pages take more
        return self.lent_bytes + size_bytes <= max(self._lent_bytes_max, two_steps)


@dataclass(slots=True)
class _Coming:
    """A record on its way.

    Attributes:
        parts: memory of its flat tensors, by dtype.
        left: reads that are not sent yet: where to, from which place of the file, and how many
            bytes of it are expected.
        reads: the last of which makes it whole: what is expected, and what will have been read.
        ahead_bytes: that count as begun before it is asked for.
    """

    index: RecordIndex
    parts: dict[str, memoryview] = field(default_factory=dict)
    left: deque[tuple[memoryview, int, int]] = field(default_factory=deque)
    reads: list[tuple[int, Future[int]]] = field(default_factory=list)
    ahead_bytes: int = 0


class SegmentReads:
    """Records of one segment from a place on, in their order; not verified.

    To be used by one thread at a time, and closed by whoever has made it: then nothing is under
    way.

    Args:
        ring: whose threads read.
        room: for the records; of all segments that are read one behind the other.
        first: number of the first record.
        end: number of the first one that is not wanted any more; None: all are.
        meanwhile: called whenever a record is waited for, to send what comes behind it; None: that
            is :meth:`send_ahead`.

    Attributes:
        next: number of the record that comes next.
        end: number of the first one that does not.
        digests: that the records must have.

    Raises:
        DamageError, FormatError: of header or index; with the path.
        OSError: it cannot be read.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        segment: SegmentFound,
        ring: ChunkRing,
        room: ReadBudget,
        *,
        first: int,
        timeout_s: float,
        end: int | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self.segment = segment
        self.next = first
        self._ring = ring
        self._room = room
        self._timeout_s = timeout_s
        self._meanwhile = meanwhile
        self._file, _, header, self._path = open_segment(filesystem, segment)
        try:
            data = read_index(self._file, header, self._path)
            records = index_of_segment(header.identity, data, self._path)
        except BaseException:
            self._file.close()
            raise
        self.digests = [index.digest for index in records]
        self._room_bytes = header.room_bytes
        self._places: dict[str, list[tuple[str, int, int]]] = {}
        for place in header.placed:
            number, _, dtype = place.entry.name.partition("/")
            self._places.setdefault(number, []).append((dtype, place.begin, place.end))
        self._step_bytes: dict[int, int] = {}
        for index in records:
            step = index.head.step
            self._step_bytes[step] = self._step_bytes.get(step, 0) + self._size_bytes(index)
        self.end = len(records) if end is None else end
        self._left = deque(records[first:end])
        self._coming: deque[_Coming] = deque()

    def read(self) -> LogRecord:
        """The next record.

        Raises:
            DamageError: the file ends before it.
            FormatError: it is none, or there is none.
            DeadlineError: a transfer hangs.
            OSError: it cannot be read.
        """
        meanwhile = self._meanwhile or self.send_ahead
        if not self._coming:
            if not self._left:
                raise FormatError(f"{self._path} has no record {self.next}", path=self._path)
            self._begin()
        coming = self._coming[0]
        self._is_asked_for(coming)
        done = 0
        while coming.left or done < len(coming.reads):
            meanwhile()
            if done == len(coming.reads):
                self._send(coming)
            expected, future = coming.reads[done]
            if read_result(future, self._ring, self._timeout_s, self._path) < expected:
                raise DamageError(f"{self._path}: it ends too early", path=self._path)
            done += 1
        self._coming.popleft()
        meanwhile()  # while this one is being verified
        self.next += 1
        data = gathered(coming.index.layout, coming.parts, self._path)
        return coming.index.record(data, self._path)

    def send_ahead(self) -> bool:
        """Sends as many reads as are of use now; whether none are left to be sent."""
        for coming in self._coming:
            while coming.left:
                if not self._room.takes_reads:
                    return False
                self._send(coming)
        while self._left:
            index = self._left[0]
            size_bytes = self._size_bytes(index)
            step_bytes = self._step_bytes[index.head.step]
            if not self._room.takes_reads or not self._room.allows(size_bytes, step_bytes):
                return False
            try:
                coming = self._begin()
            except OSError:  # no memory for it: there is some, perhaps, when it is asked for
                return False
            while coming.left and self._room.takes_reads:
                self._send(coming)
            if coming.left:
                return False
        return True

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        self._left.clear()
        futures = [future for coming in self._coming for _, future in coming.reads]
        for future in futures:
            future.cancel()
        # A read that hangs may still write: into memory that it keeps from being used again.
        all_over(futures, self._timeout_s)
        for coming in self._coming:
            self._is_asked_for(coming)
        self._coming.clear()
        self._file.close()

    def _is_asked_for(self, coming: _Coming) -> None:
        """It, or nobody any more."""
        self._room.ahead_bytes -= coming.ahead_bytes
        coming.ahead_bytes = 0

    def _size_bytes(self, index: RecordIndex) -> int:
        places = self._places.get(f"{index.number:06d}", ())
        return sum(end - begin for _, begin, end in places)

    def _begin(self) -> _Coming:
        """The next record that is left: memory for it, and what is to be read."""
        coming = _Coming(self._left[0])
        for dtype, begin, end in self._places.get(f"{coming.index.number:06d}", ()):
            # From page to page, at both ends, so that all of it goes past the page cache.
            offset = self._room_bytes + begin
            ahead = offset % DIRECT_ALIGNMENT_BYTES
            size_bytes = ahead + end - begin
            padded = -(-size_bytes // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
            memory = self._room.take(padded)
            coming.parts[dtype] = memory[ahead:size_bytes]
            for at in range(0, padded, _READ_BYTES):
                stop = min(padded, at + _READ_BYTES)
                expected = min(stop, size_bytes) - at
                coming.left.append((memory[at:stop], offset - ahead + at, expected))
        self._left.popleft()
        self._coming.append(coming)
        coming.ahead_bytes = self._size_bytes(coming.index)
        self._room.ahead_bytes += coming.ahead_bytes
        return coming

    def _send(self, coming: _Coming) -> None:
        memory, offset, expected = coming.left.popleft()
        future = self._ring.threads.submit(self._file.read_into, memory, offset)
        coming.reads.append((expected, future))
        self._room.sent(future)


Key = tuple[str, int, int]
"""Kind, timeline, and number: of an update its LSN, of a mark its step."""


def key_of(head: RecordHead) -> Key:
    """What names a record."""
    return head.kind, head.timeline, head.step if head.kind == "mark" else head.lsn


def find_record(
    key: Key,
    digest: str,
    segments: Iterable[SegmentFound],
    filesystem: FileSystem,
    ring: ChunkRing,
    timeout_s: float,
) -> LogRecord | None:
    """A record, verified, from the first of these segments that has it; None: none of them has.

    Args:
        digest: that it must have.
        segments: looked at one by one, as long as they are needed.
        filesystem: of segments that name none.
    """
    for segment in segments:
        places = [number for number, head in enumerate(segment.heads) if key_of(head) == key]
        if segment.problem is not None or not places:
            continue
        files = segment.files or filesystem
        try:
            found = _read(files, segment, places[0], ring, timeout_s)
        except (EverstepError, OSError):  # whoever asks says what was wrong with the first one
            continue
        if found.digest == digest:
            return found
    return None


def _read(
    files: FileSystem, segment: SegmentFound, place: int, ring: ChunkRing, timeout_s: float
) -> LogRecord:
    reads = SegmentReads(files, segment, ring, ReadBudget(), first=place, timeout_s=timeout_s)
    try:
        found = reads.read()
    finally:
        reads.close()
    found.verify()
    return found


_OPEN_MAX = 4  # segments: as many small ones as are worth to have on their way


@dataclass(frozen=True, slots=True)
class _Run:
    """Records ``[first, end)`` of a segment."""

    segment: SegmentFound
    first: int
    end: int


class LogReads:
    """Records by segment and number; not verified. To be used by one thread at a time, and closed.

    Args:
        filesystem: of segments that name none.
        ring: whose threads read.
        expected: the records that are going to be asked for, in this order: these are read ahead.
            Any other may be asked for, too.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        ring: ChunkRing,
        timeout_s: float,
        expected: Iterable[tuple[SegmentFound, int]] = (),
    ) -> None:
        self._filesystem = filesystem
        self._ring = ring
        self._timeout_s = timeout_s
        self._room = ReadBudget()
        self._runs = _runs(expected)  # that are not open yet
        self._open: deque[SegmentReads] = deque()  # the one that is being read first
        self._looks_ahead = True

    def read(self, segment: SegmentFound, place: int) -> LogRecord:
        """A record.

        Raises:
            DamageError, FormatError: of the segment, or the file ends before it.
            DeadlineError: a transfer hangs.
            OSError: it cannot be read.
        """
        reads = self._at(segment, place)
        while reads.next < place:
            reads.read()
        return reads.read()

    def digest_of(self, segment: SegmentFound, place: int) -> str | None:
        """That a record must have, of the segment that was read last; None: that is another one."""
        if self._open and self._open[0].segment is segment:
            return self._open[0].digests[place]
        return None

    def close(self) -> None:
        """Ends what is under way. Idempotent; what is asked for later is read anew."""
        while self._open:
            self._open.popleft().close()

    def _at(self, segment: SegmentFound, place: int) -> SegmentReads:
        """The segment, open, and not past that place."""
        while self._open and not _has(self._open[0], segment, place):
            self._open.popleft().close()
        if not self._open:
            end = None
            if any(run.segment is segment for run in self._runs):
                while self._runs[0].segment is not segment:
                    self._runs.popleft()
                run = self._runs.popleft()
                end = run.end if place < run.end else None
            self._looks_ahead = True
            self._open.append(self._opened(segment, place, end))
        return self._open[0]

    def _opened(self, segment: SegmentFound, first: int, end: int | None) -> SegmentReads:
        return SegmentReads(
            segment.files or self._filesystem,
            segment,
            self._ring,
            self._room,
            first=first,
            end=end,
            meanwhile=self._send_ahead,
            timeout_s=self._timeout_s,
        )

    def _send_ahead(self) -> None:
        """As many reads as are of use, in the order in which they will be asked for."""
        if not all(reads.send_ahead() for reads in self._open):
            return
        while self._runs and self._looks_ahead and len(self._open) < _OPEN_MAX:
            run = self._runs[0]
            try:
                reads = self._opened(run.segment, run.first, run.end)
            except (EverstepError, OSError):  # whoever asks for it is told
                self._looks_ahead = False
                return
            self._runs.popleft()
            self._open.append(reads)
            if not reads.send_ahead():
                return


def _has(reads: SegmentReads, segment: SegmentFound, place: int) -> bool:
    return reads.segment is segment and reads.next <= place < reads.end


def _runs(expected: Iterable[tuple[SegmentFound, int]]) -> deque[_Run]:
    found: deque[_Run] = deque()
    for segment, place in expected:
        last = found[-1] if found else None
        if last is not None and last.segment is segment and last.end <= place:
            found[-1] = _Run(segment, last.first, place + 1)
        else:
            found.append(_Run(segment, place, place + 1))
    return found
