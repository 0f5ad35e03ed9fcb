"""A base opened for reading: its shards, and what their verified headers say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from everstep.errors import DamageError, FormatError
from everstep.format.header import ShardHeader
from everstep.format.log import RecordHead
from everstep.format.reader import read_header
from everstep.format.records import FileRecord, Marker
from everstep.run.redo_file import check_redo_file, is_redo_file
from everstep.run.scan import BaseFound
from everstep.seams.files.filesystem import FileSystem, ReadFile
from everstep.state.layout.entries import Entry
from everstep.state.layout.placement import Placement
from everstep.state.layout.shards import Placed, ShardLayout, at_lsn

__all__ = ["OpenBase", "Opened", "check_identity", "open_ranks"]

Opened = tuple[ReadFile, FileRecord, ShardHeader, PurePath]
"""A file, its record, its header and its path."""


@dataclass(slots=True)
class OpenBase:
    """One rank's files of a base, opened, headers verified.

    Attributes:
        shards: with the entries of the state.
        redo: of a base over several steps that is still to be made whole, the file with which
            (:mod:`.redo_file`); otherwise None.
        heads: what the records of that file are.
    """

    marker: Marker
    shards: list[Opened] = field(default_factory=list)
    redo: Opened | None = None
    heads: tuple[RecordHead, ...] = ()

    @classmethod
    def open(cls, filesystem: FileSystem, base: BaseFound, rank: int) -> OpenBase:
        """Opens a base that has a manifest, or whose markers yield one.

        Raises:
            DamageError, FormatError: for what the headers say.
            OSError: for a file that is missing or cannot be read.
        """
        assert base.manifest is not None
        opened = cls(base.manifest.markers[rank])
        try:
            for record in opened.marker.files:
                path = base.path / record.name
                file = filesystem.open(path, direct=True)
                opened.shards.append((file, record, None, path))  # type: ignore[arg-type]
                header = check_identity(read_header(file, record, path), opened.marker, path)
                opened.shards[-1] = (file, record, header, path)
            opened.set_apart()
        except BaseException:
            opened.close()
            raise
        return opened

    @property
    def files(self) -> list[Opened]:
        """All of them, in the order of the marker."""
        return self.shards if self.redo is None else [*self.shards, self.redo]

    @property
    def size_bytes(self) -> int:
        return sum(record.length for _, record, _, _ in self.files)

    def set_apart(self) -> None:
        """Tells the redo file from the shards; called when all files are open.

        Raises:
            DamageError, FormatError: entries are of other updates than the base, and it lacks what
                would bring them there.
        """
        last = self.shards[-1] if self.shards else None
        if last is not None and is_redo_file(last[2]):
            self.redo = self.shards.pop()
        lsns = {place.entry.lsn for place in self.placed()}
        if self.redo is not None:
            file, _, header, path = self.redo
            self.heads = check_redo_file(file, header, path, self.marker, lsns)
        elif lsns - {self.marker.lsn}:
            raise FormatError(
                f"{self.shards[0][3]}: it has entries of other updates than {self.marker.lsn}, "
                "that of the base, and no file that brings them there",
                path=self.shards[0][3],
            )

    def placed(self) -> list[Placed]:
        """All entries of all shards."""
        return [place for _, _, header, _ in self.shards for place in header.placed]

    def entries(self) -> dict[str, Entry]:
        """Entries by every name, aliases included."""
        found: dict[str, Entry] = {}
        for _, _, header, path in self.shards:
            for place in header.placed:
                if place.entry.name in found:
                    raise FormatError(f"{path}: {place.entry.name!r} is in two shards", path=path)
                found[place.entry.name] = place.entry
        for _, _, header, _ in self.shards:
            found.update({other: found[name] for other, name in header.aliases.items()})
        return found

    def close(self) -> None:
        for file, _, _, _ in self.files:
            file.close()


@contextlib.contextmanager
def open_ranks(filesystem: FileSystem, base: BaseFound) -> Iterator[list[OpenBase]]:
    """The files of all ranks that saved a base, in order; errors as of :meth:`OpenBase.open`."""
    assert base.manifest is not None
    with contextlib.ExitStack() as stack:
        opened: list[OpenBase] = []
        for marker in base.manifest.markers:
            opened.append(OpenBase.open(filesystem, base, marker.rank))
            stack.callback(opened[-1].close)
        yield opened


def check_identity(header: ShardHeader, marker: Marker, path: PurePath) -> ShardHeader:
    """Return the header of a shard as one of the marker's base.

    A static file may have been written for another base of the run (``adr/050``): its header has
    the digest that the marker asks for, and its entries are the same at every update.

    Raises:
        DamageError, FormatError: it is not of that base.
    """
    mine = header.identity
    if mine.static:
        mine = replace(mine, timeline=marker.timeline, step=marker.step, lsn=marker.lsn)
        placed = at_lsn(ShardLayout(header.placed), marker.lsn).placed
        header = replace(header, identity=mine, placed=placed)
    theirs = (marker.run, marker.timeline, marker.step, marker.lsn, marker.rank, marker.world)
    if (mine.run, mine.timeline, mine.step, mine.lsn, mine.rank, mine.world) != theirs:
        raise DamageError(f"{path}: it is a shard of another base than its marker says", path=path)
    for place in header.placed:
        entry = place.entry
        problem = _misplaced(entry, marker)
        if problem is None and entry.lsn > marker.lsn:
            problem = "it is of a later update than the base"
        if problem is not None:
            raise FormatError(f"{path}: entry {entry.name!r}: {problem}", path=path)
    return header


def _misplaced(entry: Entry, marker: Marker) -> str | None:
    """Why an entry cannot lie where it says; None if it can."""
    sides = (entry.shape, entry.global_shape, entry.global_offset)
    if len(set(map(len, sides))) != 1:
        return "its shape and its place are of different dimensions"
    try:
        placement = Placement.parse(entry.placement)
    except ValueError as error:
        return str(error)
    if marker.world == 1 and placement.ranks is not None:
        return "it is sharded, but one rank has saved the base"
    ranks = placement.ranks or ()
    if ranks and (max(ranks) >= marker.world or marker.rank not in ranks):
        return f"{entry.placement!r} cannot be of rank {marker.rank} of {marker.world}"
    if not placement.is_cut and (entry.global_shape != entry.shape or any(entry.global_offset)):
        return "it is said to be whole, and is not"
    if any(o + n > whole for n, whole, o in zip(*sides, strict=True)):
        return "it reaches beyond the tensor that it is a part of"
    return None
