"""The same record of a log in another place, where the nearest one turns out to be damaged.

Only the same: a record is named by timeline and number, and its digest, which an index beside it
has told, says which bits it had. So a lossy copy never stands in for a whole record, nor what
another process has written under the same number.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.errors import EverstepError
from everstep.format.log import LogRecord, RecordHead
from everstep.format.writer import ChunkRing
from everstep.run.segment_reads import ReadRoom, SegmentReads
from everstep.run.segments import SegmentFound
from everstep.seams.files.filesystem import FileSystem

__all__ = ["Key", "key_of", "whole_record"]

Key = tuple[str, int, int]
"""Kind, timeline, and number: of an update its LSN, of a mark its step."""


def key_of(head: RecordHead) -> Key:
    """What names a record."""
    return head.kind, head.timeline, head.step if head.kind == "mark" else head.lsn


def whole_record(
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
    reads = SegmentReads(files, segment, ring, ReadRoom(), first=place, timeout_s=timeout_s)
    try:
        found = reads.read()
    finally:
        reads.close()
    found.verify()
    return found
