"""Reads records of a segment one after the other, straight into the memory that they stay in.

A segment may be as large as many steps, so it is never read as a whole: replay begins with the
first step while the next ones are on their way. A few threads read ahead, past the page cache, and
no byte is copied. Nothing here looks at the bytes: whoever takes a record verifies it, once, right
before its gradients are decoded (:meth:`~everstep.format.log.LogRecord.verify`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field

from everstep.arena.reused import ReusedMemory
from everstep.errors import DamageError, FormatError
from everstep.format.log import LogRecord, RecordIndex, gathered, index_of_segment
from everstep.format.reader import read_result
from everstep.format.writer import ChunkRing
from everstep.recover.segments import SegmentFound, open_segment, read_index
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES, FileSystem

__all__ = ["SegmentReads"]

_READ_BYTES = 4 << 20
_UNDER_WAY = 16
_AHEAD_BYTES_MAX = 64 << 20


@dataclass(slots=True)
class _Coming:
    """A record on its way.

    Attributes:
        parts: memory of its flat tensors, by dtype.
        reads: the last of which makes it whole: what is expected, and what will have been read.
    """

    index: RecordIndex
    parts: dict[str, memoryview] = field(default_factory=dict)
    reads: list[tuple[int, Future[int]]] = field(default_factory=list)
    sent: bool = False


class SegmentReads:
    """Records of one segment from a place on, in their order; not verified.

    To be used by one thread at a time, and closed by whoever has made it: then nothing is under
    way. Beyond the record that is asked for, it takes no more than 128 MiB.

    Args:
        ring: whose threads read.
        memory: for the records.
        first: number of the first record.

    Attributes:
        next: number of the record that comes next.
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
        memory: ReusedMemory,
        *,
        first: int,
        timeout_s: float,
    ) -> None:
        self.segment = segment
        self.next = first
        self._ring, self._memory, self._timeout_s = ring, memory, timeout_s
        self._file, _, header, self._path = open_segment(filesystem, segment)
        try:
            data = read_index(self._file, header, self._path)
            self._records = index_of_segment(header.identity, data, self._path)
        except BaseException:
            self._file.close()
            raise
        self.digests = [index.digest for index in self._records]
        self._room_bytes = header.room_bytes
        self._places: dict[str, list[tuple[str, int, int]]] = {}
        for place in header.placed:
            number, _, dtype = place.entry.name.partition("/")
            self._places.setdefault(number, []).append((dtype, place.begin, place.end))
        self._coming: deque[_Coming] = deque()
        self._under_way: deque[Future[int]] = deque()
        self._sending = self._sends(first)

    def read(self) -> LogRecord:
        """The next record.

        Raises:
            DamageError: the file ends before it.
            FormatError: it is none, or there is none.
            DeadlineError: a transfer hangs.
            OSError: it cannot be read.
        """
        while not self._coming or not self._coming[0].sent:
            if not self._send():
                raise FormatError(f"{self._path} has no record {self.next}", path=self._path)
        coming = self._coming[0]
        for expected, future in coming.reads:
            self._send_ahead()
            if read_result(future, self._timeout_s, self._path) < expected:
                raise DamageError(f"{self._path}: it ends too early", path=self._path)
        self._send_ahead()
        self._coming.popleft()
        self.next += 1
        data = gathered(coming.index.layout, coming.parts, self._path)
        return coming.index.record(data, self._path)

    def close(self) -> None:
        """Ends what is under way."""
        self._sending = iter(())
        futures = [future for coming in self._coming for _, future in coming.reads]
        for future in futures:
            future.cancel()
        # A read that hangs may still write: into memory that it keeps from being used again.
        wait_futures(futures, timeout=self._timeout_s)
        self._coming.clear()
        self._under_way.clear()
        self._file.close()

    def _send_ahead(self) -> None:
        """As many reads as are of use, also of the records behind this one."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        while len(self._under_way) < _UNDER_WAY and self._may_begin() and self._send():
            pass

    def _may_begin(self) -> bool:
        """Not a large record before it is asked for: the memory of the one before it is free then,
        perhaps, and this one would take as much again."""
        last = self._coming[-1]
        places = self._places.get(f"{last.index.number + 1:06d}", ())
        return not last.sent or sum(end - begin for _, begin, end in places) <= _AHEAD_BYTES_MAX

    def _send(self) -> bool:
        """One read, or the end of a record; False if there is nothing more."""
        return next(self._sending, None) is not None

    def _sends(self, first: int) -> Iterator[bool]:
        for index in self._records[first:]:
            coming = _Coming(index)
            self._coming.append(coming)
            for dtype, begin, end in self._places.get(f"{index.number:06d}", ()):
                # From page to page, at both ends, so that all of it goes past the page cache.
                offset = self._room_bytes + begin
                ahead = offset % DIRECT_ALIGNMENT_BYTES
                size_bytes = ahead + end - begin
                padded = -(-size_bytes // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
                memory = self._memory.take(padded)
                coming.parts[dtype] = memory[ahead:size_bytes]
                for at in range(0, padded, _READ_BYTES):
                    stop = min(padded, at + _READ_BYTES)
                    future = self._ring.threads.submit(
                        self._file.read_into, memory[at:stop], offset - ahead + at
                    )
                    coming.reads.append((min(stop, size_bytes) - at, future))
                    self._under_way.append(future)
                    yield True
            coming.sent = True
            yield True
