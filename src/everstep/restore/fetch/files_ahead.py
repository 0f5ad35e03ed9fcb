"""Files of a place that is far away, on their way to host memory before anybody opens them.

Where some ranks fetch what they lack from the memory of other nodes, all wait until those have it.
A rank that will read its part of the base, or steps of its log, from a store needs another link for
that: so it begins meanwhile, and whoever reads the file gets it from memory, or waits for the part
that is still to come. What comes is verified by whoever reads it, as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import PurePath

from everstep.commit.job.offers import Choice, Needs
from everstep.commit.lineage import BaseId
from everstep.commit.retention import COPY_TIERS
from everstep.format.names import base_dir
from everstep.format.records import Manifest
from everstep.format.writer import CHUNK_BYTES
from everstep.restore.fetch.rank_copies import CopyOfRun
from everstep.run.segments import SegmentFound
from everstep.seams.files.filesystem import DirEntry, FileSystem, ReadFile
from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes.threads import IoThreads
from everstep.tiers.files import ReadingFileSystem

__all__ = ["CopiesAhead", "FilesAhead", "SoleReader"]

_PART_BYTES = CHUNK_BYTES
_THREADS = 8
_LOG_BYTES_MAX = 320 << 20
_SHARE_OF_MEMORY = 8  # of what is available

SoleReader = Callable[[int, Manifest], bool]
"""Whether no other rank of this node reads the files of a rank."""


class CopiesAhead:
    """What a rank is going to read from copies, on its way: of a base, and of its log behind it.

    Args:
        needs: which ranks' files a rank reads.
        apart: what several ranks of a node read together is not read ahead.
    """

    def __init__(self, run: PurePath, rank: int, needs: Needs, apart: SoleReader) -> None:
        self._run = run
        self._rank = rank
        self._needs = needs
        self._apart = apart
        self._base: BaseId | None = None
        self._ahead: dict[CopyOfRun, FilesAhead] = {}
        self._logs: dict[FileSystem, FilesAhead] = {}

    def begin(self, choice: Choice, places: Sequence[CopyOfRun]) -> None:
        """From now on, what this rank would read of a choice comes from these places, as far as
        nothing nearer has it."""
        self.close()
        base = choice.base
        manifest = choice.manifest
        if base is None or manifest is None:
            return
        self._base = base
        wanted = self._needs(self._rank, manifest)
        for marker in manifest.markers:
            here = [s.tier for s in choice.sources[marker.rank] if s.rank == self._rank]
            if marker.rank not in wanted or not here or here[0] not in COPY_TIERS:
                continue
            if not self._apart(marker.rank, manifest):
                continue
            copy = next(copy for copy in places if copy.kind == here[0])
            files = self._ahead.setdefault(copy, FilesAhead(copy.files))
            for record in marker.files:
                path = base_dir(self._run, base.timeline, base.step) / record.name
                files.begin(path, record.length)

    def begin_log(self, segments: Iterable[SegmentFound]) -> None:
        """From now on these come, too, in this order: the first 320 MiB of them, or an eighth of
        the memory that is available; others are read when they are needed.

        Args:
            segments: found in copies; each with its marker.
        """
        left_bytes = min(_LOG_BYTES_MAX, memory_available_bytes() // _SHARE_OF_MEMORY)
        for segment in segments:
            assert segment.files is not None
            assert segment.marker is not None
            (record,) = segment.marker.files
            left_bytes -= record.length
            if left_bytes < 0:
                return
            there = segment.files
            there = there.files if isinstance(there, FilesAhead) else there
            if there not in self._logs:
                self._logs[there] = FilesAhead(there)
            self._logs[there].begin(segment.path / record.name, record.length)

    def files(self, copy: CopyOfRun) -> FileSystem:
        """Where to read files of bases that are in a copy."""
        return self._ahead.get(copy, copy.files)

    def log_files(self, files: FileSystem) -> FileSystem:
        """Where to read segments that were found in a copy."""
        return self._logs.get(files, files)

    def only(self, base: BaseId | None) -> None:
        """Nothing else than this base is going to be read."""
        if base != self._base:
            self.close()

    def close(self) -> None:
        """Ends what is under way, and lets go of the memory. Idempotent."""
        ahead = [*self._ahead.values(), *self._logs.values()]
        self._ahead = {}
        self._logs = {}
        self._base = None
        for files in ahead:
            files.close()


class FilesAhead(ReadingFileSystem):
    """Another file system, to be read only. Takes host memory for each file that was begun.

    Attributes:
        files: that file system.
    """

    def __init__(self, files: FileSystem) -> None:
        self.files = files
        self._threads = IoThreads(_THREADS, "everstep-files-ahead")
        self._stopped = threading.Event()
        self._begun: dict[PurePath, _Coming] = {}

    def begin(self, path: PurePath, size_bytes: int) -> None:
        """From now on a file is on its way; does not wait.

        Args:
            size_bytes: of the file; if it is not so long, none of it is read ahead.
        """
        if path not in self._begun:
            about = self.files, path, size_bytes, self._threads, self._stopped
            self._begun[path] = _Coming(*about)

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        """A file; waits until its length is known.

        Raises:
            OSError: it cannot be read; for a file that was begun at once, not at a read.
        """
        coming = self._begun.get(path)
        if coming is None:
            return self.files.open(path, direct=direct)
        return _File(coming.opened.result(), coming.parts)

    def scan(self, path: PurePath) -> list[DirEntry]:
        return self.files.scan(path)

    def close(self) -> None:
        """Ends what is under way, and lets go of the memory. Idempotent."""
        self._stopped.set()
        self._threads.close()
        begun = self._begun
        self._begun = {}
        for coming in begun.values():
            if coming.opened.done() and coming.opened.exception() is None:
                coming.opened.result().close()


class _Coming:
    """A file whose parts are being read.

    Attributes:
        opened: the file itself.
        parts: each with its bytes; shorter where the file ends before.
    """

    def __init__(
        self,
        files: FileSystem,
        path: PurePath,
        size_bytes: int,
        threads: IoThreads,
        stopped: threading.Event,
    ) -> None:
        self._size_bytes = size_bytes
        self._stopped = stopped
        self._memory = memoryview(bytearray(size_bytes))
        # First in the queue: the threads that read parts wait for it.
        self.opened: Future[ReadFile] = threads.submit(lambda: files.open(path, direct=False))
        self.parts: list[Future[memoryview]] = [
            threads.submit(self._read, begin) for begin in range(0, size_bytes, _PART_BYTES)
        ]

    def _read(self, begin: int) -> memoryview:
        file = self.opened.result()
        if self._stopped.is_set() or file.size_bytes != self._size_bytes:
            return memoryview(b"")
        part = self._memory[begin : begin + _PART_BYTES]
        return part[: file.read_into(part, begin)]


class _File:
    """A file as whoever reads it sees it."""

    def __init__(self, file: ReadFile, parts: list[Future[memoryview]]) -> None:
        self._file = file
        self._parts = parts

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """As of the file itself; waits for what has not come yet."""
        got = 0
        while got < buffer.nbytes and offset + got < self._file.size_bytes:
            number, at = divmod(offset + got, _PART_BYTES)
            part = self._parts[number].result() if number < len(self._parts) else memoryview(b"")
            piece = part[at : at + buffer.nbytes - got]
            if not piece.nbytes:
                break  # shorter than it said: the file itself shows what that means
            buffer[got : got + piece.nbytes] = piece
            got += piece.nbytes
        return got if got else self._file.read_into(buffer, offset)

    def close(self) -> None:
        """The file stays open for others who read it, until all of it ends."""
