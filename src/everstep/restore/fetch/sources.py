"""Places of each rank's files of a base: the cheapest first, and the next one where files are
damaged or missing; and read-ahead of files from a remote place into host memory.

While some ranks fetch missing files from the memory of other nodes, all ranks wait. A rank that
will read its share of the base, or steps of its log, from a store uses another link for that: it
starts meanwhile. Readers of such a file get it from memory, or wait for the chunk that is still
pending. They verify it as usual.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeVar

from everstep.commit import COPY_TIERS, BaseId
from everstep.commit.job import Choice, Needs, Source
from everstep.errors import DamageError, FormatError, NewerFormatError, RecoveryError
from everstep.format import base_dir
from everstep.format.names import parse_marker, parse_shard
from everstep.format.writer import CHUNK_BYTES
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.rank_copies import CopyOfRun
from everstep.restore.load.saved_ranks import HoleError
from everstep.seams import DirEntry, FileSystem, ReadFile
from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes import IoThreads
from everstep.tiers.files import ReadingFileSystem

_log = logging.getLogger("everstep")
_T = TypeVar("_T")
_CHUNK_BYTES = CHUNK_BYTES
_THREADS = 8
_LOG_BYTES_MAX = 320 << 20
_SHARE_OF_MEMORY = 8  # of available memory


@dataclass(frozen=True, slots=True)
class Place:
    """Place with one rank's files of a base.

    Attributes:
        source: source named in the offer.
        files: file system to read from, or a base in memory.
        name: equal on two ranks that read the same files; "" if unknown.
    """

    source: Source
    files: HeldBase | FileSystem
    name: str = ""


class Places:
    """Places that have not failed yet.

    Args:
        places: by the rank that wrote the files, cheapest first.
    """

    def __init__(self, places: Mapping[int, Sequence[Place]]) -> None:
        self._left = {rank: list(found) for rank, found in places.items()}
        self.damaged: list[tuple[int, Source]] = []

    @property
    def readable(self) -> tuple[int, ...]:
        """Ranks whose files can be read somewhere."""
        return tuple(rank for rank, left in sorted(self._left.items()) if left)

    def pick(self, ranks: Sequence[int]) -> dict[int, Place] | None:
        """Return the cheapest place of each rank; None if one of them has none left."""
        if not all(self._left.get(rank) for rank in ranks):
            return None
        return {rank: self._left[rank][0] for rank in ranks}

    def failed(self, tried: Mapping[int, Place], rank: int | None) -> None:
        """Drop places that could not be read.

        Args:
            tried: places that were picked.
            rank: rank whose files failed; None if unknown.
        """
        for each, place in tried.items():
            # An error that names none of the picked ranks may be due to any of them, so all are
            # dropped.
            if rank in (None, each) or rank not in tried:
                left = self._left[each]
                left.remove(place)
                # Several directories may be one source. It is reported only when none of them is
                # left.
                if not any(other.source == place.source for other in left):
                    self.damaged.append((each, place.source))


def source_name(tiers: set[str]) -> str:
    """Name the source of a resume. It is never "disk" if a copy was used: that would vouch for the
    contents of this rank's disk."""
    # The most expensive copy that was read names the source.
    copies = [tier for tier in reversed(COPY_TIERS) if tier in tiers]
    if copies:
        return copies[0]
    if "peer" in tiers:
        return "peer"
    return "memory" if "memory" in tiers else "disk"


def failed_rank(error: Exception) -> int | None:
    """Return the rank whose files an error is about, if it names one."""
    rank = getattr(error, "rank", None)
    path = getattr(error, "path", None) or getattr(error, "filename", None)
    if rank is not None or path is None:
        return rank
    # An OSError has no rank, but the name of its file contains it.
    name = PurePath(str(path)).name
    shard = parse_shard(name)
    return parse_marker(name) if shard is None else shard[0]


def read_from_places(
    places: Places,
    wanted: Sequence[int],
    use: Callable[[Mapping[int, Place]], _T],
    *,
    base: BaseId,
    rank: int,
    run: PurePath,
    failed: Callable[[str], None],
) -> tuple[_T, Mapping[int, Place]] | None:
    """Call ``use`` with the cheapest places; on damage repeat with the next ones. Return its result
    and these places; None if files are damaged or inconsistent (see ``places.damaged``).

    Args:
        places: places to read from; failed ones are dropped.
        wanted: ranks whose files are needed; if they do not suffice, all readable ones are used.
        use: loads the base from the picked places.
        base: base to read.
        rank: this rank.
        run: run folder, for errors.
        failed: called with the description of unusable files.

    Raises:
        RecoveryError: needed files are missing.
        NewerFormatError: the files were written by a newer everstep, and must not be skipped.
    """
    # Each pass drops a place, or extends ``wanted`` to all readable ranks, so the loop ends.
    while (picked := places.pick(wanted)) is not None:
        try:
            return use(picked), picked
        except (HoleError, RecoveryError) as error:
            # Ranks wrote to other disks then: entries that they shared may be in other ranks'
            # files.
            if set(wanted) >= set(places.readable):
                if isinstance(error, RecoveryError):
                    raise
                failed(f"{base}: {error.message}")
                places.failed(picked, None)
            wanted = places.readable or wanted
        except NewerFormatError:
            raise
        except (DamageError, FormatError, OSError) as error:
            where = ", ".join(sorted({place.source.tier for place in picked.values()}))
            _log.warning("%s could not be restored from %s: %s", base, where, error)
            failed(f"{base}, from {where}: {error}")
            places.failed(picked, failed_rank(error))
    # Nothing is damaged, so the offer was wrong: the other ranks must not continue with this state.
    if not places.damaged:
        missing = ", ".join(str(r) for r in wanted if r not in places.readable)
        raise RecoveryError(
            f"rank {rank} was chosen to restore {base} but needs the files of rank(s) {missing}, "
            "which it did not offer",
            rank=rank,
            path=run,
            hint="the ranks hold different kinds of state; please report this",
        )
    return None


@dataclass(eq=False)
class CopiesAhead:
    """Read-ahead of a base, and of the log after it, from copies.

    Attributes:
        run: run folder.
        rank: this rank.
        needs: which ranks' files a rank reads ahead.
    """

    run: PurePath
    rank: int
    needs: Needs
    _base: BaseId | None = field(default=None, init=False)
    _ahead: dict[FileSystem, FilesAhead] = field(default_factory=dict, init=False)

    def begin(
        self,
        choice: Choice,
        places: Sequence[CopyOfRun],
        log: Mapping[PurePath, tuple[FileSystem, int]],
    ) -> None:
        """Start reading what this rank would read from copies; what is read ahead of another choice
        is released.

        Args:
            places: the copies. Files of the base that a cheaper place has are left out.
            log: files of segments in copies: where each is, and its size. They are read in this
                order, up to 320 MiB or an eighth of the available memory; the others are read when
                they are needed.
        """
        # Memory of the previous choice is released before more is taken.
        self.close()
        base = choice.base
        manifest = choice.manifest
        if base is None or manifest is None:
            return
        self._base = base
        wanted = self.needs(self.rank, manifest)
        for marker in manifest.markers:
            # The sources are sorted by cost: if the first is no copy, this rank reads the files
            # elsewhere.
            here = [s.tier for s in choice.sources[marker.rank] if s.rank == self.rank]
            if marker.rank not in wanted or not here or here[0] not in COPY_TIERS:
                continue
            copy = next(copy for copy in places if copy.kind == here[0])
            folder = base_dir(self.run, base.timeline, base.step)
            for record in marker.files:
                self._begin(copy.files, folder / record.name, record.length)
        left_bytes = min(_LOG_BYTES_MAX, memory_available_bytes() // _SHARE_OF_MEMORY)
        for path, (files, size_bytes) in log.items():
            left_bytes -= size_bytes
            # The files come in the order of replay. Skipping one to fit a later, smaller one would
            # help replay less.
            if left_bytes < 0:
                return
            self._begin(files, path, size_bytes)

    def files(self, files: FileSystem) -> FileSystem:
        """Return the file system from which to read files of a copy."""
        return self._ahead.get(files, files)

    def only(self, base: BaseId | None) -> None:
        """Stop unless this base is the one being read ahead."""
        if base != self._base:
            self.close()

    def close(self) -> None:
        """Cancel pending reads and release the memory. Idempotent."""
        ahead = self._ahead
        # Detached first: from here on files() leads readers to the copy itself.
        self._ahead = {}
        self._base = None
        for files in ahead.values():
            files.close()

    def _begin(self, files: FileSystem, path: PurePath, size_bytes: int) -> None:
        if files not in self._ahead:
            self._ahead[files] = FilesAhead(files)
        self._ahead[files].begin(path, size_bytes)


class FilesAhead(ReadingFileSystem):
    """Read-only view of a file system. Takes host memory for each file being read ahead."""

    def __init__(self, files: FileSystem) -> None:
        self._files = files
        self._threads = IoThreads(_THREADS, "everstep-files-ahead")
        self._stopped = threading.Event()
        self._begun: dict[PurePath, _PendingFile] = {}

    def begin(self, path: PurePath, size_bytes: int) -> None:
        """Start reading a file; does not wait.

        Args:
            size_bytes: expected length; a file of another length is not read ahead.
        """
        if path not in self._begun:
            self._begun[path] = _PendingFile(
                self._files, path, size_bytes, self._threads, self._stopped
            )

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        """Open a file; wait until its length is known.

        Raises:
            OSError: it cannot be read; for a file being read ahead raised here instead of at a
                read.
        """
        pending = self._begun.get(path)
        if pending is None:
            return self._files.open(path, direct=direct)
        pending.opened.result()
        return pending

    def scan(self, path: PurePath) -> list[DirEntry]:
        return self._files.scan(path)

    def close(self) -> None:
        """Cancel pending reads and release the memory. Idempotent."""
        # Queued reads find the event set and end at once; only those under way are waited for.
        self._stopped.set()
        self._threads.close()
        begun = self._begun
        self._begun = {}
        # After the threads: the descriptor of a file closed during a read may be reused for another
        # file. An open that hangs is left alone, as result() would wait for it.
        for pending in begun.values():
            if pending.opened.done() and pending.opened.exception() is None:
                pending.opened.result().close()


class _PendingFile:
    """File whose chunks are being read.

    Attributes:
        opened: the file itself.
    """

    def __init__(
        self,
        files: FileSystem,
        path: PurePath,
        size_bytes: int,
        threads: IoThreads,
        stopped: threading.Event,
    ) -> None:
        self._expected_bytes = size_bytes
        self._stopped = stopped
        self._memory = memoryview(bytearray(size_bytes))
        # First in the queue: the threads that read chunks wait for it.
        self.opened: Future[ReadFile] = threads.submit(lambda: files.open(path, direct=False))
        # Bytes of each chunk; shorter where the file ends early.
        self._chunks: list[Future[memoryview]] = [
            threads.submit(self._read, begin) for begin in range(0, size_bytes, _CHUNK_BYTES)
        ]

    @property
    def size_bytes(self) -> int:
        return self.opened.result().size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read from memory; wait for chunks that are pending."""
        got = 0
        while got < buffer.nbytes and offset + got < self.size_bytes:
            number, at = divmod(offset + got, _CHUNK_BYTES)
            chunk = memoryview(b"")
            if number < len(self._chunks):
                chunk = self._chunks[number].result()
            piece = chunk[at : at + buffer.nbytes - got]
            if not piece.nbytes:
                break  # shorter than expected: the read below reports it
            buffer[got : got + piece.nbytes] = piece
            got += piece.nbytes
        # Where no byte was read ahead, the file itself determines the result: an error, or its end.
        return got if got else self.opened.result().read_into(buffer, offset)

    def close(self) -> None:
        """Do nothing: other readers use the file until the read-ahead is closed."""

    def _read(self, begin: int) -> memoryview:
        file = self.opened.result()
        # A file of another length is not the one in the marker. It is then read directly, and its
        # reader reports the damage.
        if self._stopped.is_set() or file.size_bytes != self._expected_bytes:
            return memoryview(b"")
        chunk = self._memory[begin : begin + _CHUNK_BYTES]
        return chunk[: file.read_into(chunk, begin)]
