"""Copy of one rank's files of a base, held in memory for another node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from everstep.errors import DamageError
from everstep.format.digests import Digester, digest_of_file
from everstep.format.reader import read_header
from everstep.format.records import FileRecord, Marker, TimelineRecord
from everstep.run.open_base import check_identity
from everstep.tiers.memory import MemoryFile

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """Complete copy whose digests were verified when it arrived.

    Attributes:
        marker: marker of the rank's files.
        record: timeline record of the base, in the bytes on its writer's disk: a number alone does
            not
            identify a timeline (I7).
        memory: contents of the files, one after the other.
    """

    marker: Marker
    record: bytes
    memory: memoryview

    @property
    def timeline(self) -> TimelineRecord:
        """Decoded timeline record."""
        return TimelineRecord.decode(self.record, PurePath("copy"))


def size_of(marker: Marker) -> int:
    """Return the total length of all files of a rank."""
    return sum(record.length for record in marker.files)


def files_over(marker: Marker, memory: memoryview) -> tuple[tuple[MemoryFile, FileRecord], ...]:
    """Return the files of a marker, which are stored one after the other in ``memory``."""
    found = []
    begin = 0
    for record in marker.files:
        found.append((MemoryFile([memory[begin : begin + record.length]]), record))
        begin += record.length
    return tuple(found)


def check_files(marker: Marker, memory: memoryview) -> None:
    """Verify every byte against the digests of the marker.

    Raises:
        DamageError, FormatError: the bytes differ.
    """
    begin = 0
    for file, record in files_over(marker, memory):
        path = PurePath("peer") / record.name
        header = check_identity(read_header(file, record, path), marker, path)
        digester = Digester(header.placed)
        for at in range(record.header_length, record.length, _CHUNK_BYTES):
            end = min(record.length, at + _CHUNK_BYTES)
            digester.update(memory[begin + at : begin + end])
        found = digester.digests
        # The digest of a file covers those of its header and entries (``adr/002``), so no second
        # pass over the bytes is needed.
        intact = digest_of_file(record.header_digest, found) == record.digest
        if found != list(header.digests) or not intact:
            raise DamageError(
                f"{path}: its digests do not match",
                step=marker.step,
                rank=marker.rank,
                tier="peer",
                path=path,
            )
        begin += record.length
