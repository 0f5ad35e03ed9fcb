"""Reads records of a segment one after the other, straight into the memory that they stay in.

A segment may be as large as many steps, so it is never read as a whole: replay begins with the
first step while the next ones are on their way. A few threads read ahead, past the page cache, and
no byte is copied. Nothing here looks at the bytes: whoever takes a record verifies it, once, right
before its gradients are decoded (:meth:`~everstep.format.log.LogRecord.verify`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from everstep.arena.reused import ReusedMemory
from everstep.errors import DamageError, FormatError
from everstep.format.log import LogRecord, RecordIndex, gathered, index_of_segment
from everstep.format.reader import read_result
from everstep.format.writer import ChunkRing
from everstep.run.segments import SegmentFound, open_segment, read_index
from everstep.seams.files.filesystem import DIRECT_ALIGNMENT_BYTES, FileSystem
from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes.conditions import all_over

__all__ = ["ReadRoom", "SegmentReads"]

_READ_BYTES = 2 << 20
_UNDER_WAY = 64  # whoever else reads with these threads waits for no more than that
_AHEAD_BYTES_MAX = 64 << 20
_LENT_BYTES_MAX = 320 << 20
_SHARE_OF_MEMORY = 8  # of what is available


class ReadRoom:
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
        room: ReadRoom,
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
