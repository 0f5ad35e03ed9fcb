"""Reads the log of a run folder: which segments there are, and their records, verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath

import numpy as np

from everstep.arena import Block
from everstep.errors import DamageError, EverstepError, FormatError, NewerFormatError
from everstep.format.digests import digest
from everstep.format.header import ShardHeader, ShardIdentity
from everstep.format.log import (
    LOG_OBJECT,
    LogRecord,
    RecordHead,
    heads_of,
    records_of_segment,
)
from everstep.format.names import (
    LOG_DIR,
    LOSSY_DIR,
    marker_name,
    parse_marker,
    parse_segment,
    segment_dir,
    timeline_dir,
)
from everstep.format.reader import read_body, read_header, read_record_bytes
from everstep.format.records import FileRecord, Marker, TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.run.scan import not_a_directory
from everstep.seams.files.filesystem import FileSystem, ReadFile
from everstep.seams.progress import ProgressSink, silent

__all__ = [
    "SegmentCache",
    "SegmentFound",
    "open_segment",
    "read_heads",
    "read_index",
    "read_records",
    "read_segment",
    "scan_log",
    "scan_logs",
    "validated",
]


_AGAIN = 32  # of those that are known, read anew in each look

_Key = tuple[PurePath, int]


@dataclass(frozen=True, slots=True)
class SegmentFound:
    """A segment on disk: steps ``(after, last]`` of a timeline.

    Attributes:
        marker: None where it cannot be used, for the reason ``problem``.
        heads: what its records are; read with the marker.
        lossy: its gradients are not what training has consumed.
        files: where it is read from; None: from the run folder.
    """

    timeline: int
    after: int
    last: int
    path: PurePath
    marker: Marker | None
    problem: str | None
    heads: tuple[RecordHead, ...] = ()
    size_bytes: int = 0
    lossy: bool = False
    files: FileSystem | None = None


class SegmentCache:
    """What one process has read of the log, so that its next look reads what is new.

    Segments are written once. One is read anew where a name in its directory has changed since (it
    was replaced, or a file of it is gone), or where it could not be used. As a file can be damaged
    without that, a few are read anew in each look, those first that were not read for longest.
    """

    def __init__(self) -> None:
        self._found: dict[_Key, tuple[float, SegmentFound]] = {}  # in the order they were read

    def to_trust(self) -> dict[_Key, tuple[float, SegmentFound]]:
        """By path and rank: the time of the directory, by the disk, and what was in it."""
        return dict(islice(self._found.items(), _AGAIN, None))

    def looked(
        self, trusted: Collection[_Key], read: Mapping[_Key, tuple[float, SegmentFound]]
    ) -> None:
        """All that there is now: what was not read, and what was."""
        self._found = {key: self._found[key] for key in self._found if key in trusted}
        self._found |= {key: item for key, item in read.items() if item[1].problem is None}


def scan_log(
    filesystem: FileSystem,
    run: PurePath,
    timelines: list[int],
    *,
    rank: int = 0,
    wanted: Callable[[int, int, int], bool] = lambda timeline, after, last: True,
    lossy: bool = True,
    threads: int = 1,
    there: Callable[[int, str], bool] = lambda timeline, name: True,
) -> list[SegmentFound]:
    """All segments of these timelines, in order, lossy ones behind the others; one without its
    marker was never finished and is left out.

    Args:
        wanted: whether a segment of these steps of a timeline is looked at; else it is left out,
            too.
        lossy: look at lossy ones, too.
        threads: look at segments at a time: of use where each look waits for a network.
        there: whether a timeline may have a directory of this name (:meth:`.Inventory.may_hold`).

    Raises:
        NewerFormatError: one was written by a newer everstep.
        OSError: a directory cannot be read.
    """
    places = []
    for poor, kind in ((False, LOG_DIR), (True, LOSSY_DIR))[: 1 + lossy]:
        for timeline in sorted(timelines):
            if not there(timeline, kind):
                continue
            try:
                entries = filesystem.scan(timeline_dir(run, timeline) / kind)
            except FileNotFoundError:
                continue
            for entry in sorted(entries, key=lambda entry: entry.name):
                steps = parse_segment(entry.name)
                if steps is None or not wanted(timeline, *steps):
                    continue
                places.append((timeline, *steps, poor, entry.kind))

    def look(place: tuple[int, int, int, bool, str]) -> SegmentFound | None:
        return _scan(filesystem, run, *place[:3], rank, lossy=place[3], kind=place[4])

    if threads == 1 or len(places) < 2:
        found = [look(place) for place in places]
    else:
        with ThreadPoolExecutor(threads, "everstep-segments") as pool:
            found = list(pool.map(look, places))
    return [segment for segment in found if segment is not None]


def scan_logs(
    filesystem: FileSystem,
    run: PurePath,
    timelines: Mapping[int, TimelineRecord | None],
    known: SegmentCache | None = None,
    there: Callable[[int, str], bool] = lambda timeline, name: True,
) -> dict[int, dict[int, list[SegmentFound]]]:
    """All segments of these timelines, as of :func:`scan_log`, by timeline and rank; of ranks that
    have none there is no list.

    Args:
        known: of the process that looks, which looks often; told what there is now.
        there: as of :func:`scan_log`.

    Raises:
        NewerFormatError, OSError: as :func:`scan_log`.
    """
    found: dict[int, dict[int, list[SegmentFound]]] = {}
    before = {} if known is None else known.to_trust()
    trusted: set[_Key] = set()
    read: dict[_Key, tuple[float, SegmentFound]] = {}
    for timeline, record in timelines.items():
        of_one = record is not None and record.world == 1
        by_rank = found.setdefault(timeline, {})
        for poor, name in ((False, LOG_DIR), (True, LOSSY_DIR)):
            if not there(timeline, name):
                continue
            directory = timeline_dir(run, timeline) / name
            for after, last, kind, time_s in _segments_in(filesystem, directory):
                path = segment_dir(run, timeline, after, last, lossy=poor)
                alone = of_one or kind != "dir"
                for rank in (0,) if alone else _ranks_in(filesystem, path):
                    key = path, rank
                    then_s, one = before.get(key, (0.0, None))
                    if one is not None and then_s == time_s:
                        trusted.add(key)
                    else:
                        about = timeline, after, last, rank
                        one = _scan(filesystem, run, *about, lossy=poor, kind=kind)
                        if one is None:
                            continue
                        read[key] = time_s, one
                    by_rank.setdefault(rank, []).append(one)
    if known is not None:
        known.looked(trusted, read)
    return found


def _segments_in(filesystem: FileSystem, directory: PurePath) -> list[tuple[int, int, str, float]]:
    """The steps of the segments in a directory of them, in order, the kind of each (a directory, or
    something in its place), and when it has got its last name, by the disk."""
    try:
        entries = filesystem.scan(directory)
    except FileNotFoundError:
        return []
    named = ((parse_segment(entry.name), entry) for entry in entries)
    return sorted((*steps, entry.kind, entry.mtime_s) for steps, entry in named if steps)


def _ranks_in(filesystem: FileSystem, path: PurePath) -> list[int]:
    """Ranks that have finished a segment."""
    try:
        names = [entry.name for entry in filesystem.scan(path)]
    except FileNotFoundError:  # a process at work deletes it
        return []
    return sorted(rank for name in names if (rank := parse_marker(name)) is not None)


def read_segment(
    filesystem: FileSystem,
    segment: SegmentFound,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink = silent,
) -> list[LogRecord]:
    """The records of a segment, every byte verified.

    Raises:
        DamageError, FormatError: with the path.
        OSError: it cannot be read.
    """
    file, record, header, path = open_segment(filesystem, segment)
    try:
        return read_records(
            file, record, header, path, ring, timeout_s=timeout_s, progress=progress
        )
    finally:
        file.close()


def open_segment(
    filesystem: FileSystem, segment: SegmentFound
) -> tuple[ReadFile, FileRecord, ShardHeader, PurePath]:
    """A segment opened for reading, its header verified; whoever asks closes the file.

    Raises:
        DamageError, FormatError: with the path.
        OSError: it cannot be read.
    """
    marker = segment.marker
    assert marker is not None
    (record,) = marker.files
    path = segment.path / record.name
    file = filesystem.open(path, direct=True)
    try:
        header = read_header(file, record, path)
        _check_identity(header.identity, marker, path)
    except BaseException:
        file.close()
        raise
    return file, record, header, path


def _check_identity(identity: ShardIdentity, marker: Marker, path: PurePath) -> None:
    if (identity.run, identity.timeline, identity.step, identity.lsn, identity.rank) != (
        marker.run,
        marker.timeline,
        marker.step,
        marker.lsn,
        marker.rank,
    ):
        raise FormatError(f"{path} is of another segment than its marker", path=path)


def read_records(
    file: ReadFile,
    record: FileRecord,
    header: ShardHeader,
    path: PurePath,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
) -> list[LogRecord]:
    """The records of an open segment whose header has been verified, every byte verified.

    Raises:
        DamageError, FormatError: with the path.
        OSError: it cannot be read.
    """
    # Huge pages, taken as they are filled: a bytearray is filled with zeros first, page by
    # page, which takes three times as long as to read and digest the segment.
    body = Block(record.length - header.room_bytes, touch=False).view
    target = np.frombuffer(body, np.uint8)  # other threads run while it is copied to

    def keep(begin: int, piece: memoryview) -> None:
        target[begin : begin + piece.nbytes] = np.frombuffer(piece, np.uint8)

    read_body(file, header, record, path, ring, timeout_s=timeout_s, progress=progress, sink=keep)
    data = {place.entry.name: body[place.begin : place.end] for place in header.placed}
    records = records_of_segment(header.identity, data, path)
    for item in records:
        item.verify()
    return records


def validated(segment: SegmentFound, run: str | None) -> SegmentFound:
    """The segment, or one that says why it cannot be used: what its index lists must be records
    of this run and timeline, in the order in which they were made (I4)."""
    if segment.problem is not None or segment.marker is None:
        return segment
    if run is not None and segment.marker.run != run:
        why: str | None = "it belongs to another run"
    else:
        why = _disorder(segment.heads, segment.timeline, segment.last)
    if why is None:
        return segment
    return dataclasses.replace(segment, problem=f"{segment.path}: {why}", heads=())


def _disorder(heads: Sequence[RecordHead], timeline: int, last: int) -> str | None:
    step = lsn = marked = -1
    for number, head in enumerate(heads):
        numbers = (head.step, head.lsn)
        if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(head.shape, str):
            return f"record {number} has no step or number"
        if head.timeline != timeline:
            return f"record {number} is of timeline {head.timeline}"
        if head.kind not in ("update", "mark"):
            return f"record {number} is of no kind that is known"
        newer = head.lsn > lsn if head.kind == "update" else head.lsn >= lsn
        if not newer or head.step < step or head.step <= marked:
            return f"record {number} ({head}) is out of order"
        step, lsn = numbers
        marked = step if head.kind == "mark" else marked
    if not heads or heads[-1].kind != "mark" or heads[-1].step != last:
        return f"it does not end with the mark of step {last}"
    return None


def _scan(
    filesystem: FileSystem,
    run: PurePath,
    timeline: int,
    after: int,
    last: int,
    rank: int,
    *,
    lossy: bool,
    kind: str,
) -> SegmentFound | None:
    path = segment_dir(run, timeline, after, last, lossy=lossy)
    name = marker_name(rank)

    def bad(problem: str) -> SegmentFound:
        return SegmentFound(timeline, after, last, path, None, problem, (), 0, lossy)

    if kind != "dir":
        return bad(f"{path} {not_a_directory(kind)}")
    try:
        # By name: a store takes as long for a listing as for this, and there are many segments.
        data = read_record_bytes(filesystem, path / name)
    except FileNotFoundError:
        return None
    except EverstepError as error:
        return bad(error.message)
    except OSError as error:
        return bad(f"{path}: {error.strerror or error}")
    try:
        marker = Marker.decode(data, path / name)
        if (marker.timeline, marker.step, marker.rank, len(marker.files)) != (
            timeline,
            last,
            rank,
            1,
        ):
            return bad(f"{path / name} is of another segment")
        heads = _heads(filesystem, path, marker)
    except NewerFormatError:
        raise
    except EverstepError as error:
        return bad(error.message)
    except OSError as error:
        return bad(f"{path}: {error.strerror or error}")
    size_bytes = len(data) + sum(file.length for file in marker.files)
    return SegmentFound(timeline, after, last, path, marker, None, heads, size_bytes, lossy)


def _heads(filesystem: FileSystem, path: PurePath, marker: Marker) -> tuple[RecordHead, ...]:
    """What the records are, without their tensors."""
    (record,) = marker.files
    path = path / record.name
    file = filesystem.open(path)
    try:
        return read_heads(file, read_header(file, record, path), path)
    finally:
        file.close()


def read_heads(file: ReadFile, header: ShardHeader, path: PurePath) -> tuple[RecordHead, ...]:
    """What the records of an open segment are, without their tensors.

    Raises:
        DamageError, FormatError: with the path.
        OSError: it cannot be read.
    """
    return heads_of(header.identity.timeline, read_index(file, header, path), path)


def read_index(file: ReadFile, header: ShardHeader, path: PurePath) -> bytes:
    """The object of an open segment that says what its records are, verified.

    Raises:
        DamageError, FormatError: with the path.
        OSError: it cannot be read.
    """
    for place, expected in zip(header.placed, header.digests, strict=True):
        if place.entry.name == LOG_OBJECT:
            data = bytearray(place.end - place.begin)
            got = file.read_into(memoryview(data), header.room_bytes + place.begin)
            if got != len(data) or digest(memoryview(data)) != expected:
                raise DamageError(f"{path}: its index is damaged", path=path)
            return bytes(data)
    raise FormatError(f"{path} has no index", path=path)
