"""Read-ahead of files from a remote place into host memory.

While some ranks fetch missing files from the memory of other nodes, all ranks wait. A rank that
will read its share of the base, or steps of its log, from a store uses another link for that: it
starts meanwhile. Readers of such a file get it from memory, or wait for the chunk that is still
pending. They verify it as usual.
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

_CHUNK_BYTES = CHUNK_BYTES
_THREADS = 8
_LOG_BYTES_MAX = 320 << 20
_SHARE_OF_MEMORY = 8  # of available memory

SoleReader = Callable[[int, Manifest], bool]
"""Predicate: no other rank of this node reads the files of a rank."""


class CopiesAhead:
    """Read-ahead of a base, and of the log after it, from copies.

    Args:
        run: run folder.
        rank: this rank.
        needs: which ranks' files a rank reads.
        is_sole_reader: files that several ranks of a node read together are not read ahead.
    """

    def __init__(self, run: PurePath, rank: int, needs: Needs, is_sole_reader: SoleReader) -> None:
        self._run = run
        self._rank = rank
        self._needs = needs
        self._is_sole_reader = is_sole_reader
        self._base: BaseId | None = None
        self._ahead: dict[CopyOfRun, FilesAhead] = {}
        self._logs: dict[FileSystem, FilesAhead] = {}

    def begin(self, choice: Choice, places: Sequence[CopyOfRun]) -> None:
        """Start reading the files of a choice that this rank would read from these places, unless a
        cheaper place has them."""
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
            if not self._is_sole_reader(marker.rank, manifest):
                continue
            copy = next(copy for copy in places if copy.kind == here[0])
            files = self._ahead.setdefault(copy, FilesAhead(copy.files))
            for record in marker.files:
                path = base_dir(self._run, base.timeline, base.step) / record.name
                files.begin(path, record.length)

    def begin_log(self, segments: Iterable[SegmentFound]) -> None:
        """Start reading segments as well, in this order, up to 320 MiB or an eighth of the
        available memory; the others are read when they are needed.

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
            # A log that was scanned before is itself read ahead: begin on the copy, not on that.
            there = segment.files
            there = there.files if isinstance(there, FilesAhead) else there
            if there not in self._logs:
                self._logs[there] = FilesAhead(there)
            self._logs[there].begin(segment.path / record.name, record.length)

    def files(self, copy: CopyOfRun) -> FileSystem:
        """Return the file system from which to read bases of a copy."""
        return self._ahead.get(copy, copy.files)

    def log_files(self, files: FileSystem) -> FileSystem:
        """Return the file system from which to read segments of a copy."""
        return self._logs.get(files, files)

    def only(self, base: BaseId | None) -> None:
        """Stop unless this base is the one being read ahead."""
        if base != self._base:
            self.close()

    def close(self) -> None:
        """Cancel pending reads and release the memory. Idempotent."""
        ahead = [*self._ahead.values(), *self._logs.values()]
        self._ahead = {}
        self._logs = {}
        self._base = None
        for files in ahead:
            files.close()


class FilesAhead(ReadingFileSystem):
    """Read-only view of a file system. Takes host memory for each file being read ahead.

    Attributes:
        files: that file system.
    """

    def __init__(self, files: FileSystem) -> None:
        self.files = files
        self._threads = IoThreads(_THREADS, "everstep-files-ahead")
        self._stopped = threading.Event()
        self._begun: dict[PurePath, _PendingFile] = {}

    def begin(self, path: PurePath, size_bytes: int) -> None:
        """Start reading a file; does not wait.

        Args:
            path: path of the file.
            size_bytes: expected length; a file of another length is not read ahead.
        """
        if path not in self._begun:
            self._begun[path] = _PendingFile(
                self.files, path, size_bytes, self._threads, self._stopped
            )

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        """Open a file; wait until its length is known.

        Raises:
            OSError: it cannot be read; for a file being read ahead raised here instead of at a
                read.
        """
        pending = self._begun.get(path)
        if pending is None:
            return self.files.open(path, direct=direct)
        return _File(pending.opened.result(), pending.chunks)

    def scan(self, path: PurePath) -> list[DirEntry]:
        return self.files.scan(path)

    def close(self) -> None:
        """Cancel pending reads and release the memory. Idempotent."""
        # Queued reads find the event set and end at once; only those under way are waited for.
        self._stopped.set()
        self._threads.close()
        begun = self._begun
        self._begun = {}
        for pending in begun.values():
            if pending.opened.done() and pending.opened.exception() is None:
                pending.opened.result().close()


class _PendingFile:
    """File whose chunks are being read.

    Attributes:
        opened: the file itself.
        chunks: bytes of each chunk; shorter where the file ends early.
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
        # First in the queue: the threads that read chunks wait for it.
        self.opened: Future[ReadFile] = threads.submit(lambda: files.open(path, direct=False))
        self.chunks: list[Future[memoryview]] = [
            threads.submit(self._read, begin) for begin in range(0, size_bytes, _CHUNK_BYTES)
        ]

    def _read(self, begin: int) -> memoryview:
        file = self.opened.result()
        if self._stopped.is_set() or file.size_bytes != self._size_bytes:
            return memoryview(b"")
        chunk = self._memory[begin : begin + _CHUNK_BYTES]
        return chunk[: file.read_into(chunk, begin)]


class _File:
    """File as its readers see it."""

    def __init__(self, file: ReadFile, chunks: list[Future[memoryview]]) -> None:
        self._file = file
        self._chunks = chunks

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read from memory; wait for chunks that are pending."""
        got = 0
        while got < buffer.nbytes and offset + got < self._file.size_bytes:
            number, at = divmod(offset + got, _CHUNK_BYTES)
            chunk = memoryview(b"")
            if number < len(self._chunks):
                chunk = self._chunks[number].result()
            piece = chunk[at : at + buffer.nbytes - got]
            if not piece.nbytes:
                break  # shorter than expected: the read below reports it
            buffer[got : got + piece.nbytes] = piece
            got += piece.nbytes
        return got if got else self._file.read_into(buffer, offset)

    def close(self) -> None:
        """Do nothing: other readers use the file until the read-ahead is closed."""
