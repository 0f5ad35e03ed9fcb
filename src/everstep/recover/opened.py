"""A base opened for reading: its shards, and what their verified headers say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath

from everstep.errors import DamageError, FormatError
from everstep.format.header import ShardHeader
from everstep.format.reader import read_header
from everstep.format.records import FileRecord, Marker
from everstep.recover.scan import BaseFound
from everstep.seams.filesystem import FileSystem, ReadFile
from everstep.state.entries import Entry
from everstep.state.layout import Placed

__all__ = ["OpenBase", "check_identity"]


@dataclass(slots=True)
class OpenBase:
    """One rank's shards of a base, opened, headers verified."""

    marker: Marker
    shards: list[tuple[ReadFile, FileRecord, ShardHeader, PurePath]] = field(default_factory=list)

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
                header = read_header(file, record, path)
                opened.shards[-1] = (file, record, header, path)
                check_identity(header, opened.marker, path)
        except BaseException:
            opened.close()
            raise
        return opened

    @property
    def size_bytes(self) -> int:
        return sum(record.length for _, record, _, _ in self.shards)

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
        for file, _, _, _ in self.shards:
            file.close()


def check_identity(header: ShardHeader, marker: Marker, path: PurePath) -> None:
    """Raises DamageError or FormatError for a shard that is not of the marker's base."""
    mine = header.identity
    theirs = (marker.run, marker.timeline, marker.step, marker.lsn, marker.rank, marker.world)
    if (mine.run, mine.timeline, mine.step, mine.lsn, mine.rank, mine.world) != theirs:
        raise DamageError(f"{path}: it is a shard of another base than its marker says", path=path)
    for place in header.placed:
        entry = place.entry
        whole = entry.placement == "whole" and entry.global_shape == entry.shape
        if not whole or any(entry.global_offset) or entry.lsn != marker.lsn:
            raise FormatError(
                f"{path}: entry {entry.name!r} is sharded, or of another update than the base: "
                "this version reads whole entries of one update only",
                path=path,
            )
