"""Segments of the gradient log: the list of them, and their records, verified.

A segment holds the records of consecutive steps of one rank. It counts once its marker exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from everstep.arena import Block
from everstep.errors import DamageError, EverstepError, FormatError, NewerFormatError
from everstep.format import Marker, TimelineRecord, digest, timeline_dir
from everstep.format.header import ShardHeader
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
)
from everstep.format.reader import OpenShard, read_body, read_header, read_record_bytes
from everstep.format.writer import ChunkRing
from everstep.run.scan import not_a_directory
from everstep.seams import DirEntry, FileSystem, ReadFile
from everstep.seams.progress import ProgressSink, silent

_REREAD = 32  # known segments that each scan reads again

_Key = tuple[PurePath, int]


@dataclass(frozen=True, slots=True)
class SegmentFound:
    """A segment on disk with the steps ``(after, last]`` of a timeline.

    Attributes:
        marker: None if the segment is unusable; ``problem`` says why.
        heads: heads of its records; read together with the marker.
        lossy: its gradients are approximations of those that training consumed.
        files: file system that it is read from; None: that of the run folder.
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
    """Segments that this process has already read, so that later scans read only new ones.

    Segments are written once. A segment is read again if a name in its directory has changed (it
    was replaced, or lost a file) or if it was unusable. Files can also be damaged without such a
    change, so each scan rereads a few segments, least recently read first.
    """

    def __init__(self) -> None:
        self._found: dict[_Key, tuple[float, SegmentFound]] = {}  # least recently read first

    def trusted_segments(self) -> dict[_Key, tuple[float, SegmentFound]]:
        """Return the segments that need no reading now, by path and rank, with the modification
        time of their directory."""
        return dict(islice(self._found.items(), _REREAD, None))

    def update(
        self, trusted: Collection[_Key], read: Mapping[_Key, tuple[float, SegmentFound]]
    ) -> None:
        """Replace the contents by the result of a scan.

        Args:
            trusted: keys of segments that exist and were not read.
            read: segments that were read.
        """
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
    """Return all segments of these timelines, in order, lossy ones last.

    A segment without its marker was never finished and is left out.

    Args:
        wanted: returns True if a segment with these steps of a timeline shall be read; others are
            left out.
        lossy: include lossy segments.
        threads: number of segments to read at a time; useful over a network.
        there: returns False if a timeline certainly has no directory of this name
            (:meth:`.Inventory.may_hold`).

    Raises:
        NewerFormatError: a segment was written by a newer everstep.
        OSError: a directory cannot be read.
    """
    found = _places(filesystem, run, sorted(timelines), there, lossy=lossy)
    places = [one for one in found if wanted(one.timeline, one.after, one.last)]

    def look(place: _Place) -> SegmentFound | None:
        return _scan(filesystem, run, place, rank)

    if threads == 1 or len(places) < 2:
        segments = [look(place) for place in places]
    else:
        with ThreadPoolExecutor(threads, "everstep-segments") as pool:
            segments = list(pool.map(look, places))
    return [segment for segment in segments if segment is not None]


def scan_logs(
    filesystem: FileSystem,
    run: PurePath,
    timelines: Mapping[int, TimelineRecord | None],
    known: SegmentCache | None = None,
    there: Callable[[int, str], bool] = lambda timeline, name: True,
) -> dict[int, dict[int, list[SegmentFound]]]:
    """Return all segments of these timelines, as :func:`scan_log` does, by timeline and rank.

    Ranks without segments have no list.

    Args:
        known: segments read by earlier scans of this process; updated.
        there: as of :func:`scan_log`.

    Raises:
        NewerFormatError, OSError: as of :func:`scan_log`.
    """
    found: dict[int, dict[int, list[SegmentFound]]] = {timeline: {} for timeline in timelines}
    # A directory with an unchanged modification time is trusted: segments are written once.
    before = {} if known is None else known.trusted_segments()
    trusted: set[_Key] = set()
    read: dict[_Key, tuple[float, SegmentFound]] = {}
    for place in _places(filesystem, run, timelines, there):
        record = timelines[place.timeline]
        path = place.path(run)
        # The name of a single rank's marker is known: one listing per segment less.
        single_rank = place.kind != "dir" or (record is not None and record.world == 1)
        for rank in (0,) if single_rank else _ranks_in(filesystem, path):
            key = path, rank
            then_s, one = before.get(key, (0.0, None))
            if one is not None and then_s == place.mtime_s:
                trusted.add(key)
            else:
                one = _scan(filesystem, run, place, rank)
                if one is None:
                    continue
                read[key] = place.mtime_s, one
            found[place.timeline].setdefault(rank, []).append(one)
    if known is not None:
        known.update(trusted, read)
    return found


class _Place(NamedTuple):
    """A name of a segment in a listing; its kind is "dir" unless something else has such a name."""

    timeline: int
    after: int
    last: int
    lossy: bool
    kind: str
    mtime_s: float

    def path(self, run: PurePath) -> PurePath:
        return segment_dir(run, self.timeline, self.after, self.last, lossy=self.lossy)


def _places(
    filesystem: FileSystem,
    run: PurePath,
    timelines: Iterable[int],
    there: Callable[[int, str], bool],
    *,
    lossy: bool = True,
) -> Iterator[_Place]:
    """List the segments of these timelines, in order, lossy ones last."""
    for is_lossy, name in ((False, LOG_DIR), (True, LOSSY_DIR))[: 1 + lossy]:
        for timeline in timelines:
            entries: list[DirEntry] = []
            if there(timeline, name):
                # The directory is created with the first segment.
                with contextlib.suppress(FileNotFoundError):
                    entries = filesystem.scan(timeline_dir(run, timeline) / name)
            for entry in entries:
                if (steps := parse_segment(entry.name)) is not None:
                    yield _Place(timeline, *steps, is_lossy, entry.kind, entry.mtime_s)


def _ranks_in(filesystem: FileSystem, path: PurePath) -> list[int]:
    """Return the ranks that have finished a segment."""
    try:
        names = [entry.name for entry in filesystem.scan(path)]
    except FileNotFoundError:  # retention of a running process has just deleted it
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
    """Return the records of a segment, every byte verified.

    Raises:
        DamageError, FormatError: with the path.
        OSError: the segment cannot be read.
    """
    shard = open_segment(filesystem, segment)
    try:
        return read_records(shard, ring, timeout_s=timeout_s, progress=progress)
    finally:
        shard.file.close()


def open_segment(filesystem: FileSystem, segment: SegmentFound) -> OpenShard:
    """Open a segment and verify its header; the caller closes the file.

    Raises:
        DamageError, FormatError: with the path.
        OSError: the segment cannot be read.
    """
    marker = segment.marker
    assert marker is not None
    (record,) = marker.files
    path = segment.path / record.name
    shard = OpenShard.open(filesystem, path, record)
    mine = shard.header.identity
    theirs = (marker.run, marker.timeline, marker.step, marker.lsn, marker.rank)
    if (mine.run, mine.timeline, mine.step, mine.lsn, mine.rank) != theirs:
        shard.file.close()
        raise FormatError(f"{path} belongs to another segment than its marker", path=path)
    return shard


def read_records(
    shard: OpenShard, ring: ChunkRing, *, timeout_s: float, progress: ProgressSink
) -> list[LogRecord]:
    """Return the records of an open segment with a verified header, every byte verified.

    Raises:
        DamageError, FormatError: with the path.
        OSError: the segment cannot be read.
    """
    _, record, header, path = shard
    # Huge pages, touched only as they are filled. A bytearray would be zeroed first, page by
    # page, which takes three times as long as reading and digesting the segment.
    body = Block(record.length - header.room_bytes).view
    target = np.frombuffer(body, np.uint8)  # releases the GIL while copying

    def keep(begin: int, piece: memoryview) -> None:
        target[begin : begin + piece.nbytes] = np.frombuffer(piece, np.uint8)

    read_body(shard, ring, timeout_s=timeout_s, progress=progress, sink=keep)
    data = {place.entry.name: body[place.begin : place.end] for place in header.placed}
    records = records_of_segment(header.identity, data, path)
    # read_body() has compared the bytes with digests made when the segment was written. The digest
    # of a record is older: it was made when the keeper received it.
    for item in records:
        item.verify()
    return records


def validated(segment: SegmentFound, run: str | None) -> SegmentFound:
    """Return the segment, or a copy of it that records why it is unusable.

    The records in its index must belong to this run and timeline, in the order in which they were
    made (I4).
    """
    if segment.problem is not None or segment.marker is None:
        return segment
    if run is not None and segment.marker.run != run:
        why: str | None = "belongs to another run"
    else:
        why = _disorder(segment.heads, segment.timeline, segment.last)
    if why is None:
        return segment
    return dataclasses.replace(segment, problem=f"{segment.path}: {why}", heads=())


def _disorder(heads: Sequence[RecordHead], timeline: int, last: int) -> str | None:
    step = lsn = marked = -1
    for number, head in enumerate(heads):
        if head.timeline != timeline:
            return f"record {number} belongs to timeline {head.timeline}"
        # A mark repeats the number of the update before it. No record of its step follows it.
        newer = head.lsn > lsn if head.kind == "update" else head.lsn >= lsn
        if not newer or head.step < step or head.step <= marked:
            return f"record {number} ({head}) is out of order"
        step = head.step
        lsn = head.lsn
        marked = step if head.kind == "mark" else marked
    if not heads or heads[-1].kind != "mark" or heads[-1].step != last:
        return f"does not end with the mark of step {last}"
    return None


def _scan(filesystem: FileSystem, run: PurePath, place: _Place, rank: int) -> SegmentFound | None:
    timeline, after, last, lossy, kind, _ = place
    path = place.path(run)
    name = marker_name(rank)

    def bad(problem: str) -> SegmentFound:
        return SegmentFound(timeline, after, last, path, None, problem, (), 0, lossy)

    if kind != "dir":
        return bad(f"{path} {not_a_directory(kind)}")
    try:
        # Read by name without a listing: in an object store a listing costs as much as this read.
        try:
            data = read_record_bytes(filesystem, path / name)
        except FileNotFoundError:
            return None
        marker = Marker.decode(data, path / name)
        mine = (marker.timeline, marker.step, marker.rank, len(marker.files))
        if mine != (timeline, last, rank, 1):
            return bad(f"{path / name} belongs to another segment")
        # The heads are read now, so that reach is decided without opening segments again.
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
    """Return the heads of the records, without reading tensors."""
    (record,) = marker.files
    path = path / record.name
    file = filesystem.open(path)
    try:
        return read_heads(file, read_header(file, record, path), path)
    finally:
        file.close()


def read_heads(file: ReadFile, header: ShardHeader, path: PurePath) -> tuple[RecordHead, ...]:
    """Return the heads of the records of an open segment, without reading tensors.

    Raises:
        DamageError, FormatError: with the path.
        OSError: the segment cannot be read.
    """
    return heads_of(header.identity.timeline, read_index(file, header, path), path)


def read_index(file: ReadFile, header: ShardHeader, path: PurePath) -> bytes:
    """Return the index object of an open segment, verified.

    Raises:
        DamageError, FormatError: with the path.
        OSError: the segment cannot be read.
    """
    for place, expected in zip(header.placed, header.digests, strict=True):
        if place.entry.name == LOG_OBJECT:
            data = bytearray(place.end - place.begin)
            got = file.read_into(memoryview(data), header.room_bytes + place.begin)
            if got != len(data) or digest(memoryview(data)) != expected:
                raise DamageError(f"{path}: the index is damaged", path=path)
            return bytes(data)
    raise FormatError(f"{path} has no index", path=path)
