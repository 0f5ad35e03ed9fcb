"""Reads the records of a log, from one segment after the other, ahead of whoever replays them.

Most segments hold a few steps, or one. So what comes next is most often in another file: that is
opened, and its first records are on their way, before the last one of this file is taken. Where it
cannot be opened, or has not what it should have, that shows when it is asked for, and not before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from everstep.errors import EverstepError
from everstep.format.log import LogRecord
from everstep.format.writer import ChunkRing
from everstep.run.segment_reads import ReadRoom, SegmentReads
from everstep.run.segments import SegmentFound
from everstep.seams.files.filesystem import FileSystem

__all__ = ["LogReads"]

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
        self._room = ReadRoom()
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
