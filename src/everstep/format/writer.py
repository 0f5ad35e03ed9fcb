"""Writes the body and header of a shard.

The calling thread brings the bytes into page-aligned chunks of the *file*, whatever
entries they cut through, and digests them while they are in the cache; a few threads write
the chunks past the page cache. The header comes last: until then the file begins with
zeros and no reader of safetensors accepts it.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_futures

import torch

from everstep.arena import Block
from everstep.capture.base import Body, pieces
from everstep.errors import DeadlineError
from everstep.format.digests import Digester, digest, digest_of_file
from everstep.format.header import ShardIdentity, encode_header
from everstep.format.records import FileRecord
from everstep.seams.failpoints import failpoint
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES, WriteFile
from everstep.seams.progress import ProgressSink
from everstep.seams.threads import IoThreads
from everstep.state.layout import Placed

__all__ = ["CHUNK_BYTES", "ChunkRing", "write_shard"]

CHUNK_BYTES = 8 << 20


class ChunkRing:
    """Page-aligned chunks that go round between the thread that fills and those that write.

    Args:
        chunks: number of chunks; one more than there are writers keeps all of them busy.
    """

    def __init__(self, chunks: int, writers: int) -> None:
        self._free: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._left = chunks
        self.threads = IoThreads(writers, "everstep-io")

    def take(self, timeout_s: float) -> Block:
        """A free chunk; chunks are made when they are first needed."""
        if self._left and self._free.empty():
            self._left -= 1
            return Block(CHUNK_BYTES, touch=False)
        try:
            return self._free.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(
                f"no chunk was transferred within {timeout_s:g} s: the storage hangs",
                hint="look at the disk or the network file system (dmesg, df, iostat)",
            ) from None

    def give(self, block: Block) -> None:
        """Hands a chunk back."""
        self._free.put(block)

    def close(self) -> None:
        """Ends the threads; transfers under way are finished first."""
        self.threads.close()


def write_shard(
    file: WriteFile,
    name: str,
    identity: ShardIdentity,
    placed: Sequence[Placed],
    aliases: Mapping[str, str],
    room_bytes: int,
    body: Body,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
) -> FileRecord:
    """Writes a whole shard and makes its bytes (not its name) durable.

    Args:
        file: an empty file, or a recycled one whose header has been invalidated.
        name: the name it will get; goes into the record.
        placed: entries in file order, objects included.
        room_bytes: reserved for the header; the body begins there.
        timeout_s: a single transfer that takes longer counts as hung.

    Returns:
        Length and digests, for the marker.

    Raises:
        OSError: what the file system said.
        DeadlineError: when a transfer hangs.
    """
    end = placed[-1].end if placed else 0
    digester = Digester(placed)
    transfers: list[Future[None]] = []
    try:
        for begin in range(0, end, CHUNK_BYTES):
            stop = min(end, begin + CHUNK_BYTES)
            _raise_failed(transfers)
            held = body.held(begin, stop)
            block = None if held is not None else ring.take(timeout_s)
            chunk = held if block is None else block.tensor[: stop - begin]
            assert chunk is not None
            if block is None:
                for piece in pieces(chunk.numpy().data):
                    digester.update(piece)
            else:
                try:
                    body.fill(begin, chunk, digester.update)
                except BaseException:
                    ring.give(block)
                    raise
            data = _padded(chunk)
            transfers.append(
                ring.threads.submit(_write, file, data, room_bytes + begin, block, ring)
            )
            progress.advance(stop - begin)
        _wait(transfers, timeout_s)
    finally:
        # Whatever happened, nobody may still be reading from chunks that are used again.
        wait_futures(transfers, timeout=timeout_s)
    file.truncate(room_bytes + end)
    file.sync()  # the body is durable before any header vouches for it
    failpoint("save.before_header")
    header = encode_header(identity, placed, digester.digests, aliases, room_bytes)
    _write_header(file, header)
    file.sync()
    header_digest = digest(header)
    return FileRecord(
        name,
        room_bytes + end,
        room_bytes,
        header_digest,
        digest_of_file(header_digest, digester.digests),
    )


def _padded(chunk: torch.Tensor) -> memoryview:
    """The chunk up to the next page boundary, zeros behind it: cut off again by truncation."""
    size = chunk.numel()
    padding = -size % DIRECT_ALIGNMENT_BYTES
    if padding:
        chunk = torch.as_strided(chunk, (size + padding,), (1,), chunk.storage_offset())
        chunk[size:].zero_()
    return chunk.numpy().data


def _write(
    file: WriteFile, data: memoryview, offset: int, block: Block | None, ring: ChunkRing
) -> None:
    try:
        file.write(data, offset)
    finally:
        if block is not None:
            ring.give(block)


def _write_header(file: WriteFile, header: bytes) -> None:
    aligned = Block(len(header), touch=False)  # so that it, too, goes past the page cache
    aligned.view[: len(header)] = header
    file.write(aligned.view[: len(header)], 0)


def _raise_failed(transfers: list[Future[None]]) -> None:
    for transfer in transfers:
        if transfer.done():
            transfer.result()
    transfers[:] = [transfer for transfer in transfers if not transfer.done()]


def _wait(transfers: list[Future[None]], timeout_s: float) -> None:
    for transfer in transfers:
        try:
            transfer.result(timeout=timeout_s)
        except FutureTimeout as error:
            raise DeadlineError(
                f"a write took longer than {timeout_s:g} s: the storage hangs",
                hint="look at the disk or the network file system (dmesg, df, iostat)",
            ) from error
