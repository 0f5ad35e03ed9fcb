"""A base opened for reading: its shards with verified headers, and its redo file.

The *redo file* of a multi-step base brings its parts, which were captured at different updates, to
the step of the base. It is a log segment stored inside the base: one record for each update that
some part lacks, and one mark. Updates that concern no part have empty records, so that a missing
record is noticed (I4).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from everstep.errors import DamageError, FormatError
from everstep.format import Marker
from everstep.format.header import ShardHeader
from everstep.format.log import LOG_OBJECT, LogRecord, RecordHead
from everstep.format.reader import OpenShard
from everstep.format.writer import ChunkRing
from everstep.run.scan import BaseFound
from everstep.run.segments import read_heads, read_records
from everstep.seams import FileSystem
from everstep.seams.progress import ProgressSink
from everstep.state.layout import Entry, Placed, Placement, ShardLayout
from everstep.state.layout.shards import at_lsn


@dataclass(frozen=True, slots=True)
class RedoRecords:
    """Records to replay on the parts of a multi-step base.

    Attributes:
        updates: in order; updates that concern none of its parts are left out.
        mark: mark of the step of the base.
    """

    updates: tuple[LogRecord, ...]
    mark: LogRecord


def is_redo_file(header: ShardHeader) -> bool:
    """Return True if a file of a base is its redo file."""
    return any(place.entry.name == LOG_OBJECT for place in header.placed)


def read_redo_file(
    shard: OpenShard, ring: ChunkRing, *, timeout_s: float, progress: ProgressSink
) -> RedoRecords:
    """Read the records of the redo file of an open base, and verify every byte.

    Raises:
        DamageError, FormatError: with the path.
        OSError: the file cannot be read.
    """
    records = read_records(shard, ring, timeout_s=timeout_s, progress=progress)
    updates = tuple(record for record in records[:-1] if record.objects)
    return RedoRecords(updates, records[-1])


def _check_heads(heads: Sequence[RecordHead], path: PurePath, marker: Marker, first: int) -> None:
    kinds = [head.kind for head in heads]
    found = [head.lsn for head in heads[:-1]]
    wanted = range(first + 1, marker.lsn + 1)
    # The lengths first, without a list: a marker may claim any number.
    numbered = len(found) == len(wanted) and all(map(operator.eq, found, wanted))
    ends = [(head.step, head.lsn) for head in heads[-1:]] == [(marker.step, marker.lsn)]
    if not numbered or not ends or kinds != ["update"] * len(found) + ["mark"]:
        raise FormatError(
            f"{path}: has the updates {_in_words(found)}, but entries of the base are at update "
            f"{first} and the base is at update {marker.lsn}: the base is incomplete",
            path=path,
        )


def _in_words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:24])) + (", ..." if len(numbers) > 24 else "") or "none"


@dataclass(slots=True)
class OpenBase:
    """Open files of one rank of a base, headers verified.

    Attributes:
        shards: files with the entries of the state.
        redo: redo file of a multi-step base whose parts are not replayed yet; otherwise None.
        heads: heads of the records of the redo file.
    """

    marker: Marker
    shards: list[OpenShard] = field(default_factory=list)
    redo: OpenShard | None = None
    heads: tuple[RecordHead, ...] = ()

    @classmethod
    def open(cls, filesystem: FileSystem, base: BaseFound, rank: int) -> OpenBase:
        """Open a base that has a manifest, or whose markers yield one.

        Raises:
            DamageError, FormatError: a header is damaged or does not fit the marker.
            OSError: a file is missing or cannot be read.
        """
        assert base.manifest is not None
        opened = cls(base.manifest.markers[rank])
        try:
            for record in opened.marker.files:
                path = base.path / record.name
                # Listed before its identity is checked, so that close() closes it after an error.
                opened.shards.append(OpenShard.open(filesystem, path, record))
                header = check_identity(opened.shards[-1].header, opened.marker, path)
                opened.shards[-1] = opened.shards[-1]._replace(header=header)
            opened.split_redo_file()
        except BaseException:
            opened.close()
            raise
        return opened

    @property
    def files(self) -> list[OpenShard]:
        """All files, in the order of the marker."""
        return self.shards if self.redo is None else [*self.shards, self.redo]

    @property
    def size_bytes(self) -> int:
        return sum(record.length for _, record, _, _ in self.files)

    def split_redo_file(self) -> None:
        """Separate the redo file from the shards; called when all files are open.

        Raises:
            DamageError, FormatError: entries have other LSNs than the base, and the redo file is
                missing, damaged or incomplete.
        """
        last = self.shards[-1] if self.shards else None
        if last is not None and is_redo_file(last[2]):
            self.redo = self.shards.pop()
        lsns = {place.entry.lsn for place in self.placed()}
        if self.redo is not None:
            file, _, header, path = self.redo
            self.heads = read_heads(file, header, path)
            _check_heads(self.heads, path, self.marker, min(lsns, default=self.marker.lsn))
        elif lsns - {self.marker.lsn}:
            raise FormatError(
                f"{self.shards[0][3]}: has entries of other updates than {self.marker.lsn}, "
                "that of the base, and the base has no redo file",
                path=self.shards[0][3],
            )

    def placed(self) -> list[Placed]:
        """Return all entries of all shards."""
        return [place for _, _, header, _ in self.shards for place in header.placed]

    def entries(self) -> dict[str, Entry]:
        """Return all entries by name, aliases included."""
        found: dict[str, Entry] = {}
        for _, _, header, path in self.shards:
            for place in header.placed:
                if place.entry.name in found:
                    raise FormatError(
                        f"{path}: {place.entry.name!r} appears in two shards", path=path
                    )
                found[place.entry.name] = place.entry
        for _, _, header, _ in self.shards:
            found.update({other: found[name] for other, name in header.aliases.items()})
        return found

    def close(self) -> None:
        for file, _, _, _ in self.files:
            file.close()


@contextlib.contextmanager
def open_ranks(filesystem: FileSystem, base: BaseFound) -> Iterator[list[OpenBase]]:
    """Open the files of all ranks that saved a base, in order; errors as of
    :meth:`OpenBase.open`."""
    assert base.manifest is not None
    with contextlib.ExitStack() as stack:
        opened: list[OpenBase] = []
        for marker in base.manifest.markers:
            opened.append(OpenBase.open(filesystem, base, marker.rank))
            stack.callback(opened[-1].close)
        yield opened


def check_identity(header: ShardHeader, marker: Marker, path: PurePath) -> ShardHeader:
    """Check that the header of a shard belongs to the base of the marker, and return it.

    A static file may have been written for another base of the run (``adr/050``). Its header has
    the digest that the marker records, and its entries are the same at every LSN, so they get that
    of the marker.

    Raises:
        DamageError, FormatError: the shard belongs to another base.
    """
    mine = header.identity
    if mine.static:
        mine = replace(mine, timeline=marker.timeline, step=marker.step, lsn=marker.lsn)
        placed = at_lsn(ShardLayout(header.placed), marker.lsn).placed
        header = replace(header, identity=mine, placed=placed)
    theirs = (marker.run, marker.timeline, marker.step, marker.lsn, marker.rank, marker.world)
    if (mine.run, mine.timeline, mine.step, mine.lsn, mine.rank, mine.world) != theirs:
        raise DamageError(f"{path}: belongs to another base than its marker", path=path)
    for place in header.placed:
        entry = place.entry
        problem = _misplaced(entry, marker)
        if problem is None and entry.lsn > marker.lsn:
            problem = "is newer than the base"
        if problem is not None:
            raise FormatError(f"{path}: entry {entry.name!r}: {problem}", path=path)
    return header


def _misplaced(entry: Entry, marker: Marker) -> str | None:
    """Return why the shape or placement of an entry is impossible; None if it is valid."""
    # Entries are copied by these offsets when ranks or layouts change. An impossible slice is found
    # here, before anything is restored.
    dimensions = {len(entry.shape), len(entry.global_shape), len(entry.global_offset)}
    if len(dimensions) != 1:
        return "its shape and offset have different numbers of dimensions"
    try:
        placement = Placement.parse(entry.placement)
    except ValueError as error:
        return str(error)
    if marker.world == 1 and (placement.ranks is not None or placement.is_sliced):
        return "is sharded, but a single rank saved the base"
    ranks = placement.ranks or ()
    if ranks and (max(ranks) >= marker.world or marker.rank not in ranks):
        return f"{entry.placement!r} is impossible for rank {marker.rank} of {marker.world}"
    may_be_slice = placement.is_cut or placement.is_sliced
    if not may_be_slice and (entry.global_shape != entry.shape or any(entry.global_offset)):
        return "is marked as unsharded, but is only a slice"
    ends = map(operator.add, entry.global_offset, entry.shape)
    if any(map(operator.gt, ends, entry.global_shape)):
        return "extends beyond the tensor that it is a slice of"
    return None
