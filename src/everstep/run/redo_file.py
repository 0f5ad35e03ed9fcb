"""The redo file of a base over several steps: what brings its parts to the base's step.

It is a segment of the log that lies in the base itself: one record for each update that a part has
not seen, and one mark. Updates that concern none of the parts have records without any content, so
that a hole shows (I4).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from everstep.errors import FormatError
from everstep.format.header import ShardHeader
from everstep.format.log import LOG_OBJECT, LogRecord, RecordHead
from everstep.format.records import FileRecord, Marker
from everstep.format.writer import ChunkRing
from everstep.run.segments import read_heads, read_records
from everstep.seams.files.filesystem import ReadFile
from everstep.seams.progress import ProgressSink

__all__ = ["RedoRecords", "check_redo_file", "is_redo_file", "read_redo_file"]


@dataclass(frozen=True, slots=True)
class RedoRecords:
    """What is replayed to make a base whole.

    Attributes:
        updates: in order; those that concern none of its parts are left out.
        mark: of the base's step.
    """

    updates: tuple[LogRecord, ...]
    mark: LogRecord


def is_redo_file(header: ShardHeader) -> bool:
    """Whether a file of a base is its redo file."""
    return any(place.entry.name == LOG_OBJECT for place in header.placed)


def check_redo_file(
    file: ReadFile, header: ShardHeader, path: PurePath, marker: Marker, lsns: Iterable[int]
) -> tuple[RecordHead, ...]:
    """Looks whether a redo file lists every update that some entry of its base has not seen; none
    of its tensors is read.

    Args:
        lsns: of all entries of the base.

    Returns:
        What its records are.

    Raises:
        DamageError, FormatError: it does not: the base cannot be made whole.
        OSError: it cannot be read.
    """
    heads = read_heads(file, header, path)
    _check_heads(heads, path, marker, min(lsns, default=marker.lsn))
    return heads


def read_redo_file(
    file: ReadFile,
    record: FileRecord,
    header: ShardHeader,
    path: PurePath,
    marker: Marker,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
) -> RedoRecords:
    """The records of a redo file that :func:`check_redo_file` has looked at, every byte verified.

    Raises:
        DamageError, FormatError: with the path.
        OSError: it cannot be read.
    """
    records = read_records(file, record, header, path, ring, timeout_s=timeout_s, progress=progress)
    updates = tuple(record for record in records[:-1] if record.objects)
    return RedoRecords(updates, records[-1])


def _check_heads(heads: Sequence[RecordHead], path: PurePath, marker: Marker, first: int) -> None:
    kinds = [head.kind for head in heads]
    found = [head.lsn for head in heads[:-1]]
    wanted = range(first + 1, marker.lsn + 1)  # of any length, whoever has made the file
    numbered = len(found) == len(wanted) and all(map(operator.eq, found, wanted))
    ends = [(head.step, head.lsn) for head in heads[-1:]] == [(marker.step, marker.lsn)]
    if not numbered or not ends or kinds != ["update"] * len(found) + ["mark"]:
        raise FormatError(
            f"{path}: it has the updates {_in_words(found)}; entries of its base have seen those "
            f"up to {first}, and the base is of update {marker.lsn}: it cannot be made whole",
            path=path,
        )


def _in_words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:24])) + (", ..." if len(numbers) > 24 else "") or "none"
