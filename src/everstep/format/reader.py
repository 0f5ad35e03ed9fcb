"""Reads shards: header first, checked before anything is allocated, then the body in chunks.

Nothing that a file claims is believed before it is compared with the file's real length and
with the digests in the marker or manifest.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_futures
from pathlib import PurePath

from everstep.arena import Block
from everstep.errors import DamageError, DeadlineError, FormatError
from everstep.format.digests import Digester, digest, digest_of_file
from everstep.format.header import (
    HEADER_ROOM_BYTES_MAX,
    LENGTH_BYTES,
    ShardHeader,
    decode_header,
)
from everstep.format.records import RECORD_BYTES_MAX, FileRecord
from everstep.format.writer import ChunkRing
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES, FileSystem, ReadFile
from everstep.seams.progress import ProgressSink
from everstep.state.body import PIECE_BYTES

__all__ = ["read_body", "read_header", "read_record_bytes"]

_READ_BYTES = 2 << 20  # a part of a chunk: 1.2 times faster than whole ones, measured
_READ_AHEAD_CHUNKS = 4


def read_record_bytes(filesystem: FileSystem, path: PurePath) -> bytes:
    """A small file as a whole.

    Raises:
        FormatError: when it is too large to be a record.
        OSError: when it is not there, not a regular file, or cannot be read.
    """
    file = filesystem.open(path)
    try:
        if file.size_bytes > RECORD_BYTES_MAX:
            raise FormatError(f"{path}: {file.size_bytes} bytes are too many for a record")
        data = bytearray(file.size_bytes)
        got = file.read_into(memoryview(data), 0)
        return bytes(data[:got])
    finally:
        file.close()


def read_header(file: ReadFile, record: FileRecord, path: PurePath) -> ShardHeader:
    """The header of a shard, verified against its record.

    Raises:
        DamageError: when length or header are not what the record says.
        FormatError: when the header describes something impossible.
    """
    if file.size_bytes != record.length:
        raise DamageError(
            f"{path}: {file.size_bytes} bytes, its marker says {record.length}", path=path
        )
    room = record.header_length
    if not LENGTH_BYTES < room <= min(HEADER_ROOM_BYTES_MAX, record.length):
        raise FormatError(f"{path}: {room} bytes is no possible length of a header", path=path)
    data = bytearray(room)
    got = file.read_into(memoryview(data), 0)
    if got != room or digest(memoryview(data)) != record.header_digest:
        raise DamageError(f"{path}: the header's digest does not match", path=path)
    if struct.unpack_from("<Q", data)[0] != room - LENGTH_BYTES:
        raise FormatError(f"{path}: the header's length field contradicts its marker", path=path)
    return decode_header(bytes(data), record.length, path)


def read_body(
    file: ReadFile,
    header: ShardHeader,
    record: FileRecord,
    path: PurePath,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
    sink: Callable[[int, memoryview], None] | None = None,
    on_damage: Callable[[DamageError], None] | None = None,
) -> None:
    """Reads and verifies all entries; a few threads read ahead, the caller's verifies.

    Args:
        sink: gets ``(offset in the body, bytes)`` in order; the piece is only
            valid during the call. It sees bytes before their entry's digest is known: what
            it made of them is worth nothing if this function raises.
        on_damage: called for each damaged entry instead of raising at the first.

    Raises:
        DamageError: naming the entry whose digest does not match.
        DeadlineError: when a transfer hangs.
    """

    def check(index: int, found: str) -> None:
        if found != header.digests[index]:
            name = header.placed[index].entry.name
            damage = DamageError(
                f"{path}: entry {name!r} is damaged: its digest does not match",
                entry=name,
                path=path,
                step=header.identity.step,
                rank=header.identity.rank,
            )
            if on_damage is None:
                raise damage
            on_damage(damage)

    digester = Digester(header.placed, check)
    size = record.length - header.room_bytes
    chunks = deque(range(0, size, _READ_BYTES))
    under_way: deque[tuple[int, Block, Future[int]]] = deque()
    try:
        while chunks or under_way:
            while chunks and len(under_way) < _READ_AHEAD_CHUNKS:
                begin = chunks.popleft()
                block = ring.take(timeout_s)
                offset = header.room_bytes + begin
                want = min(_READ_BYTES, size - begin)
                future = ring.threads.submit(_read, file, block, want, offset)
                under_way.append((begin, block, future))
            begin, block, future = under_way[0]
            got = _result(future, timeout_s, path)
            under_way.popleft()
            want = min(_READ_BYTES, size - begin)
            if got < want:
                raise DamageError(f"{path}: ends at byte {begin + got} of its body", path=path)
            try:
                for at in range(0, want, PIECE_BYTES):
                    piece = block.view[at : min(want, at + PIECE_BYTES)]
                    digester.update(piece)
                    if sink is not None:
                        sink(begin + at, piece)
            finally:
                ring.give(block)
            progress.advance(want)
    finally:
        wait_futures([future for _, _, future in under_way], timeout=timeout_s)
        for _, block, future in under_way:
            if future.done():  # a hung read may still write into its chunk: never reuse that one
                ring.give(block)
    whole = digest_of_file(record.header_digest, header.digests)
    if whole != record.digest:
        damage = DamageError(f"{path}: the file's digest does not match its marker", path=path)
        if on_damage is None:
            raise damage
        on_damage(damage)


def _read(file: ReadFile, block: Block, want: int, offset: int) -> int:
    # Up to the next page boundary, so that the last chunk, too, goes past the page cache.
    padded = -(-want // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
    return min(want, file.read_into(block.view[:padded], offset))


def _result(future: Future[int], timeout_s: float, path: PurePath) -> int:
    try:
        return future.result(timeout=timeout_s)
    except FutureTimeout as error:
        raise DeadlineError(
            f"{path}: a read took longer than {timeout_s:g} s: the storage hangs",
            path=path,
            hint="look at the disk or the network file system (dmesg, df, iostat)",
        ) from error
