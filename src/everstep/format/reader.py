"""Reading of shards: the header is verified before anything is allocated, then the body in chunks.

Nothing in a file is trusted before it is compared with the real length of the file and with the
digests in the marker or manifest.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import PurePath
from types import TracebackType
from typing import NamedTuple

from everstep.arena import Block
from everstep.errors import DamageError, DeadlineError, FormatError, StorageError
from everstep.format.digests import Digester, digest, digest_of_file
from everstep.format.header import (
    HEADER_SIZE_BYTES_MAX,
    LENGTH_BYTES,
    ShardHeader,
    decode_header,
)
from everstep.format.records import RECORD_BYTES_MAX, FileRecord
from everstep.format.writer import CHUNK_BYTES, ChunkRing
from everstep.seams import FileSystem, ReadFile
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES
from everstep.seams.processes import wait_all
from everstep.seams.progress import ProgressSink
from everstep.state.layout.shards import PIECE_BYTES

_READ_BYTES = 2 << 20  # half a chunk: measured 1.2 times faster than reads of entire chunks
_READ_AHEAD_CHUNKS = 8


def read_record_bytes(filesystem: FileSystem, path: PurePath) -> bytes:
    """Return the contents of a small file.

    Raises:
        FormatError: it is too large for a record.
        OSError: it is missing, not a regular file, or cannot be read.
    """
    file = filesystem.open(path)
    try:
        if file.size_bytes > RECORD_BYTES_MAX:
            raise FormatError(f"{path}: {file.size_bytes} bytes are too many for a record")
        data = bytearray(file.size_bytes)
        got = file.read_into(memoryview(data), 0)
        # The file may have become shorter since the open; then the digest of the record does not
        # match.
        return bytes(data[:got])
    finally:
        file.close()


def read_header(file: ReadFile, record: FileRecord, path: PurePath) -> ShardHeader:
    """Return the header of a shard, verified against its record.

    Raises:
        DamageError: length or header do not match the record.
        FormatError: the header describes an impossible file.
    """
    # Compared first: a truncated file is found without reading or allocating anything.
    if file.size_bytes != record.length:
        raise DamageError(
            f"{path}: has {file.size_bytes} bytes, but {record.length} in its marker", path=path
        )
    room = record.header_length
    # The size comes from a record. It is bounded before memory of this size is allocated.
    if not LENGTH_BYTES < room <= min(HEADER_SIZE_BYTES_MAX, record.length):
        raise FormatError(f"{path}: {room} bytes is not a possible header length", path=path)
    data = bytearray(room)
    got = file.read_into(memoryview(data), 0)
    if got != room or digest(memoryview(data)) != record.header_digest:
        raise DamageError(f"{path}: the header's digest does not match", path=path)
    # Other readers of safetensors rely on this field, so it must state the same length.
    if struct.unpack_from("<Q", data)[0] != room - LENGTH_BYTES:
        raise FormatError(f"{path}: the header's length field contradicts its marker", path=path)
    return decode_header(bytes(data), record.length, path)


class OpenShard(NamedTuple):
    """A shard opened for reading.

    Attributes:
        record: its length and digests, from the marker.
        header: its header, verified.
    """

    file: ReadFile
    record: FileRecord
    header: ShardHeader
    path: PurePath

    @classmethod
    def open(cls, filesystem: FileSystem, path: PurePath, record: FileRecord) -> OpenShard:
        """Open a shard and verify its header; the caller closes the file.

        Raises:
            DamageError, FormatError: as of :func:`read_header`.
            OSError: the file is missing or cannot be read.
        """
        file = filesystem.open(path, direct=True)
        try:
            return cls(file, record, read_header(file, record, path), path)
        except BaseException:
            file.close()
            raise


def read_body(
    shard: OpenShard,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
    sink: Callable[[int, memoryview], None] | None = None,
    on_damage: Callable[[DamageError], None] | None = None,
    wanted: Sequence[int] | None = None,
    on_entry: Callable[[int], None] | None = None,
) -> None:
    """Read and verify entries. Threads read ahead; the calling thread verifies.

    Args:
        sink: receives ``(offset in the body, bytes)`` in order; the bytes are only valid during the
            call. They are not verified yet: discard all results if this function raises.
        on_damage: called for each damaged entry, instead of raising at the first.
        wanted: indices of the entries to read, ascending; None for all entries, and the digest of
            the file.
        on_entry: called with the index of each verified entry.

    Raises:
        DamageError: the digest of the named entry does not match.
        DeadlineError: a transfer hangs.
    """

    _, record, header, path = shard
    chosen = range(len(header.placed)) if wanted is None else wanted

    def check(number: int, found: str) -> None:
        index = chosen[number]
        if found != header.digests[index]:
            report(_damaged_entry(shard, index))
        elif on_entry is not None:
            on_entry(index)

    def report(damage: DamageError) -> None:
        if on_damage is None:
            raise damage
        on_damage(damage)

    # The sink gets the last bytes of an entry before the digester completes it and calls `check`.
    digester = Digester([header.placed[index] for index in chosen], check)
    with _ReadsAhead(shard, ring, timeout_s=timeout_s, wanted=wanted) as reads:
        for chunk, block in reads:
            try:
                for begin in range(chunk.begin, chunk.end, PIECE_BYTES):
                    end = min(chunk.end, begin + PIECE_BYTES)
                    piece = block.view[begin - chunk.at : end - chunk.at]
                    if sink is not None:
                        sink(begin, piece)
                    digester.update(piece)
            finally:
                ring.give(block)
            progress.advance(chunk.end - chunk.begin)
    # The digest of the file needs all entries.
    if wanted is not None:
        return
    # From the digests in the header: the bytes have been compared with each of them above.
    whole = digest_of_file(record.header_digest, header.digests)
    if whole != record.digest:
        report(DamageError(f"{path}: the file's digest does not match its marker", path=path))


def _damaged_entry(shard: OpenShard, index: int) -> DamageError:
    name = shard.header.placed[index].entry.name
    return _damage(shard, f"entry {name!r} is damaged: its digest does not match", name)


def _damage(shard: OpenShard, problem: str, entry: str | None = None) -> DamageError:
    return DamageError(
        f"{shard.path}: {problem}",
        entry=entry,
        path=shard.path,
        step=shard.header.identity.step,
        rank=shard.header.identity.rank,
    )


class _Chunk(NamedTuple):
    """Bytes ``[begin, end)`` of a body, read from the page boundary ``at``."""

    at: int
    begin: int
    end: int


class _ReadsAhead:
    """Chunks of a body in order, read by threads ahead of the iterating caller.

    Use it in a ``with`` block: after that no read is in progress.

    Args:
        wanted: as for :func:`read_body`.
    """

    def __init__(
        self,
        shard: OpenShard,
        ring: ChunkRing,
        *,
        timeout_s: float,
        wanted: Sequence[int] | None = None,
    ) -> None:
        self._file, record, header, self._path = shard
        self._ring = ring
        self._timeout_s = timeout_s
        self._room_bytes = header.room_bytes
        body = [(0, record.length - header.room_bytes)]
        self._left = deque(_chunks(body if wanted is None else _ranges(header, wanted)))
        self._under_way: deque[tuple[_Chunk, Block, Future[int]]] = deque()

    def _start(self) -> None:
        """Start reads, up to the maximum number of chunks."""
        while self._left and len(self._under_way) < _READ_AHEAD_CHUNKS:
            ring = self._ring
            first = not self._under_way
            # Wait only while holding no chunk: two readers that wait for each other's chunks, each
            # holding some, would never continue.
            block = ring.take(self._timeout_s) if first else ring.try_take()
            if block is None:
                return
            chunk = self._left.popleft()
            offset = self._room_bytes + chunk.at
            future = ring.threads.submit(_read, self._file, block, chunk.end - chunk.at, offset)
            self._under_way.append((chunk, block, future))

    def __enter__(self) -> _ReadsAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # No thread may write into a chunk after this: the ring gives it to another file.
        self._left.clear()
        under_way = [future for _, _, future in self._under_way]
        wait_all(under_way, self._timeout_s)
        for _, block, future in self._under_way:
            if future.done():  # a hung read may still write into its chunk: never reuse that chunk
                self._ring.give(block)
        self._under_way.clear()

    def __iter__(self) -> _ReadsAhead:
        return self

    def __next__(self) -> tuple[_Chunk, Block]:
        """Return a chunk and the block that holds it; the caller gives the block back to the ring.

        Raises:
            DamageError: the file ends before the chunk.
            DeadlineError: the transfer hangs.
        """
        self._start()
        if not self._under_way:
            raise StopIteration
        chunk, block, future = self._under_way[0]
        got = read_result(future, self._ring, self._timeout_s, self._path)
        # The file was long enough when it was opened, so it was cut since.
        if got < chunk.end - chunk.at:
            at = chunk.at + got
            raise DamageError(f"{self._path}: ends at byte {at} of its body", path=self._path)
        # Removed only now: after an error __exit__() has to give the chunk back to the ring.
        self._under_way.popleft()
        return chunk, block


def _chunks(ranges: Iterable[tuple[int, int]]) -> Iterator[_Chunk]:
    sizes = itertools.chain(
        itertools.repeat(
            CHUNK_BYTES, _READ_AHEAD_CHUNKS
        ),  # the first ones, before the caller waits
        itertools.repeat(_READ_BYTES),
    )
    for first, last in ranges:
        begin = first
        while begin < last:
            at = begin - begin % DIRECT_ALIGNMENT_BYTES
            size_bytes = next(sizes)
            # Cut at the same offsets wherever a range begins: ranks on a node share their reads.
            end = min(last, at - at % size_bytes + size_bytes)
            yield _Chunk(at, begin, end)
            begin = end


def _ranges(header: ShardHeader, wanted: Iterable[int]) -> list[tuple[int, int]]:
    """Return the half-open ranges of the body of the wanted entries; adjacent ranges are joined."""
    found: list[tuple[int, int]] = []
    for index in wanted:
        place = header.placed[index]
        if found and found[-1][1] == place.begin:
            found[-1] = (found[-1][0], place.end)
        else:
            found.append((place.begin, place.end))
    return found


def _read(file: ReadFile, block: Block, want: int, offset: int) -> int:
    # Up to the next page boundary, so that the last chunk also bypasses the page cache.
    padded = -(-want // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
    return min(want, file.read_into(block.view[:padded], offset))


def read_result(future: Future[int], ring: ChunkRing, timeout_s: float, path: PurePath) -> int:
    """Return the number of bytes that a thread has read of the file ``path``.

    Raises:
        DeadlineError: the read hangs.
        OSError: the file cannot be read.
    """
    if not ring.is_over(future, timeout_s):
        raise DeadlineError(
            f"{path}: a read took longer than {timeout_s:g} s: the storage hangs",
            path=path,
            hint="check the disk or the network file system (dmesg, df, iostat)",
        )
    return future.result()


class CheckedFile:
    """A shard to be copied, verified while it is read: a damaged file is never copied completely.

    It is read in order. All bytes have been compared with the header's digests, and the header with
    the marker's, before the last bytes are returned. So a complete copy is a copy of the written
    file.

    """

    def __init__(self, shard: OpenShard) -> None:
        self._shard = shard
        self._begin()

    @property
    def size_bytes(self) -> int:
        return self._shard.record.length

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read the next bytes; offset 0 starts again from the beginning.

        Raises:
            DamageError: the bytes do not match the digests.
            StorageError: the file cannot be read.
        """
        # A tier that repeats a write reads from the beginning again.
        if offset == 0:
            self._begin()
        assert offset == self._at, "a checked file is read in order"
        file, record, header, path = self._shard
        try:
            got = file.read_into(buffer, offset)
        except OSError as error:
            raise StorageError(
                f"could not read {path.name}: {error.strerror or error}",
                step=header.identity.step,
                rank=header.identity.rank,
                path=path,
                hint="check the disk or the network file system (dmesg, df, mount)",
            ) from error
        data = buffer.cast("B")[: min(got, record.length - offset)]
        self._at += data.nbytes
        if len(self._head) < header.room_bytes:
            head = data[: header.room_bytes - len(self._head)]
            self._head += head
            data = data[head.nbytes :]
        self._digester.update(data)
        if self._at == record.length:
            self._check_whole()
        return got

    def close(self) -> None:
        self._shard.file.close()

    def _begin(self) -> None:
        self._at = 0
        self._head = bytearray()
        self._digester = Digester(self._shard.header.placed, self._check_entry)

    def _check_entry(self, index: int, found: str) -> None:
        if found != self._shard.header.digests[index]:
            raise _damaged_entry(self._shard, index)

    def _check_whole(self) -> None:
        if digest(memoryview(self._head)) != self._shard.record.header_digest:
            raise _damage(self._shard, "the header's digest does not match")
        if len(self._digester.digests) != len(self._shard.header.digests):
            raise _damage(self._shard, "the file ends before its last entry")
