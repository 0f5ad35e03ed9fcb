"""Small files of a place that is far away: each is read once, as a whole.

A record is looked at in each look at what a rank could restore, and a segment of a log once more
before it is replayed. Over a network each look costs more than all of its
bytes. Files of a run are written once, so what was read stays true.
"""

from __future__ import annotations

from pathlib import PurePath

from everstep.seams.files.filesystem import DirEntry, FileSystem, ReadFile
from everstep.tiers.files import ReadingFileSystem
from everstep.tiers.memory import MemoryFile

__all__ = ["SmallFiles"]

_SMALL_BYTES = 1 << 20
_KEPT_BYTES_MAX = 64 << 20


class SmallFiles(ReadingFileSystem):
    """Another file system, to be read only; files up to 1 MiB are kept, up to 64 MiB of them."""

    def __init__(self, files: FileSystem) -> None:
        self._files = files
        self._kept: dict[PurePath, MemoryFile] = {}
        self._listed: dict[PurePath, tuple[int, float]] = {}
        self._left_bytes = _KEPT_BYTES_MAX

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        found = self._kept.get(path)
        if found is not None:
            return found
        file = self._files.open(path, direct=direct)
        size_bytes = file.size_bytes
        if size_bytes > min(_SMALL_BYTES, self._left_bytes):
            return file
        try:
            data = memoryview(bytearray(size_bytes))
            got = file.read_into(data, 0)
        finally:
            file.close()
        found = MemoryFile([data[:got]])
        self._kept[path] = found
        self._left_bytes -= size_bytes
        return found

    def forget(self) -> None:
        """Lets go of the memory; what is asked for later is read anew."""
        self._kept.clear()
        self._listed.clear()
        self._left_bytes = _KEPT_BYTES_MAX

    def scan(self, path: PurePath) -> list[DirEntry]:
        """What another listing shows than the one before is read anew: an audit, for one, takes
        the place of an older one."""
        found = self._files.scan(path)
        for entry in found:
            name = path / entry.name
            stamp = (entry.size_bytes, entry.mtime_s)
            if self._listed.setdefault(name, stamp) == stamp:
                continue
            self._listed[name] = stamp
            if (kept := self._kept.pop(name, None)) is not None:
                self._left_bytes += kept.size_bytes
        return found
