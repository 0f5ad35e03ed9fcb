"""Files of bases on a rank's own disk, served to ranks that have another disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.errors import EverstepError
from everstep.format import Marker, base_dir
from everstep.restore.fetch.held import size_of
from everstep.run import BaseFound, OpenBase
from everstep.seams import FileSystem, ReadFile
from everstep.state.layout import OBJECT_PREFIX, Placed, Placement
from everstep.state.layout.placement import replicas_on_mesh

_log = logging.getLogger("everstep")

OpenFile = Callable[[BaseId, str], ReadFile]
"""Function that opens a file of a base, by base and file name."""

Coverage = Mapping[BaseId, Mapping[int, int]]
"""By base and rank: bytes on this disk that the rank needs too; only for ranks whose shard of every
tensor on this disk is there."""


def run_file_opener(filesystem: FileSystem, run: PurePath) -> OpenFile:
    """Return a function that opens files of bases in a run folder."""
    return partial(_open, filesystem, run)


def _open(filesystem: FileSystem, run: PurePath, base: BaseId, name: str) -> ReadFile:
    # Chunks begin at arbitrary offsets, which direct I/O does not support.
    return filesystem.open(base_dir(run, base.timeline, base.step) / name, direct=False)


class ServedFiles:
    """One rank's files of a base, addressed as one sequence of bytes. Files are opened at the first
    request, and the receiver verifies them."""

    def __init__(self, opens: OpenFile, base: BaseId, marker: Marker) -> None:
        self._opens = opens
        self._base = base
        self._marker = marker
        self._files: dict[str, ReadFile] = {}

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return these bytes, as far as the files reach; b"" if they cannot be read."""
        data = bytearray(max(0, min(size_bytes, size_of(self._marker) - offset)))
        try:
            self._read_into(memoryview(data), offset)
        except (OSError, EverstepError) as error:
            # An empty reply lets the other rank plan without this source. An exception would end
            # the start on all ranks.
            _log.warning("%s of rank %d: %s", self._base, self._marker.rank, error)
            return b""
        return bytes(data)

    def _read_into(self, data: memoryview, offset: int) -> None:
        begin = 0
        for record in self._marker.files:
            first = max(offset, begin)
            last = min(offset + data.nbytes, begin + record.length)
            if first < last:
                file = self._files.get(record.name)
                if file is None:
                    file = self._files[record.name] = self._opens(self._base, record.name)
                chunk = data[first - offset : last - offset]
                if file.read_into(chunk, first - begin) != chunk.nbytes:
                    raise OSError(f"{record.name} is shorter than its record")
            begin += record.length

    def close(self) -> None:
        """Close the files. Idempotent."""
        files = self._files
        self._files = {}
        for file in files.values():
            file.close()


def coverage_on_disk(filesystem: FileSystem, bases: Iterable[BaseFound]) -> Coverage:
    """Return the coverage of committed bases on a disk, from their headers: see
    :data:`Coverage`."""
    found: dict[BaseId, Mapping[int, int]] = {}
    for base in bases:
        shared = _SharedEntries()
        for marker in () if base.manifest is None else base.manifest.markers:
            if base.has_files_of(marker):
                # Damage is reported when the base is loaded.
                with suppress(OSError, ValueError, EverstepError):
                    shared.add(OpenBase.open(filesystem, base, marker.rank))
        found[base.id] = shared.sizes
    return {base: sizes for base, sizes in found.items() if sizes}


class _SharedEntries:
    """Entries of a base, by the ranks that share them."""

    def __init__(self) -> None:
        self._sizes: dict[int, dict[str, int]] = {}
        self._wanted: dict[int, set[str]] = {}

    def add(self, opened: OpenBase) -> None:
        """Count all entries that one rank wrote."""
        try:
            for _, _, header, _ in opened.shards:
                for place in header.placed:
                    self._count(place, opened.marker.rank, opened.marker.world)
        finally:
            opened.close()

    def _count(self, place: Placed, writer: int, world: int) -> None:
        placement = Placement.parse(place.entry.placement)
        name = place.entry.name
        if name.startswith(OBJECT_PREFIX):
            return  # each rank writes its own
        ranks = tuple(range(world)) if placement.ranks is None else placement.ranks
        for rank in ranks:
            self._wanted.setdefault(rank, set()).add(name)
        for rank in replicas_on_mesh(placement, writer) if placement.is_cut else ranks:
            self._sizes.setdefault(rank, {})[name] = place.end - place.begin

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes by rank, for ranks whose shard of no entry is missing, as far as this disk
        shows."""
        return {
            rank: sum(sizes.values())
            for rank, sizes in self._sizes.items()
            if sizes.keys() == self._wanted[rank]
        }
