"""Writing of the body and header of a shard.

The calling thread brings the bytes into page-aligned chunks of the *file*, whichever entries they
cut through, and digests them while they are in the processor's cache. A few threads write the
chunks past the page cache. The header is written last: until then the file begins with zeros, and
no safetensors reader accepts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from everstep.arena import Block
from everstep.errors import DeadlineError
from everstep.format.digests import Digester, digest, digest_of_file
from everstep.format.header import ShardIdentity, ShardPlan, encode_header
from everstep.format.records import FileRecord
from everstep.seams import WriteFile, failpoint
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES, wait_while_active
from everstep.seams.processes import Condition, IoThreads, wait_all
from everstep.seams.progress import ProgressSink, silent
from everstep.state.layout import Body, Placed
from everstep.state.layout.shards import append_objects, at_lsn, pieces

CHUNK_BYTES = 4 << 20

WRITERS = 6
"""Transfers in flight: virtual and NVMe disks reach their bandwidth only with several."""

CHUNKS = WRITERS + 2


_COPIED_MAX = 2
"""Chunks that are written while the next one is copied. More chunks would leave the cache before
the disk fetches them, and more threads would take processor time from the copying thread: compared
with six, a fifth less processor time, and up to 1.2 times as fast."""


class ChunkRing:
    """Page-aligned chunks that circulate between the filling thread and the transferring threads.

    Args:
        chunks: number of chunks; one more than there are writers keeps all writers busy.

    Attributes:
        threads: threads for transfers.
        copied: threads that write chunks while the calling thread fills the next one.
    """

    def __init__(self, chunks: int, writers: int) -> None:
        self._free: list[Block] = []  # the last one is used first: it is still in the cache
        self._left = chunks  # not allocated yet
        self._changed = Condition()  # several threads may share the ring
        self.threads = IoThreads(writers, "everstep-io")
        self.copied = IoThreads(min(writers, _COPIED_MAX), "everstep-write")

    @property
    def free_chunks(self) -> int:
        """Number of chunks that can be taken now."""
        with self._changed:
            return len(self._free) + self._left

    def try_take(self) -> Block | None:
        """Return a free chunk, or None.

        A caller that already holds chunks must use this: two callers that wait for each other's
        chunks would wait forever.
        """
        with self._changed:
            return self._take_or_make()

    def take(self, timeout_s: float) -> Block:
        """Wait for a free chunk; chunks are allocated when first needed."""
        with self._changed:
            if self._changed.wait_for(lambda: self._free or self._left, timeout_s):
                block = self._take_or_make()
                assert block is not None
                return block
        raise DeadlineError(
            f"no chunk was transferred within {timeout_s:g} s: the storage hangs",
            hint="check the disk or the network file system (dmesg, df, iostat)",
        )

    def _take_or_make(self) -> Block | None:
        if self._free:
            return self._free.pop()
        if not self._left:
            return None
        self._left -= 1
        return Block(CHUNK_BYTES)

    def give(self, block: Block) -> None:
        """Return a chunk to the ring."""
        with self._changed:
            self._free.append(block)
            self._changed.notify()

    def is_over(self, transfer: Future[Any], timeout_s: float) -> bool:
        """Wait until a transfer has ended, successfully or not; return False after ``timeout_s``.

        The timeout starts again whenever a transfer of another caller ahead of it ends.
        """
        ahead = self.threads, self.copied

        def moves() -> object:
            # While the transfer itself runs, only its end counts as progress. In the queue, any
            # transfer ahead of it does.
            return transfer.running() or [threads.ended for threads in ahead]

        return wait_while_active(transfer, timeout_s, moves)

    def close(self) -> None:
        """End the threads; transfers in progress are finished first."""
        self.threads.close()
        self.copied.close()


@dataclass(frozen=True, slots=True)
class Written:
    """A shard that is durable, except for its name.

    Attributes:
        record: length and digests, for the marker.
        header: bytes of the header.
        digests: digest of each entry, by name.
        linked: the file already existed and has got another name.
    """

    record: FileRecord
    header: bytes
    digests: Mapping[str, str]
    linked: bool = False


def write_shard(
    file: WriteFile,
    shard: ShardPlan,
    identity: ShardIdentity,
    body: Body,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
    on_body: Callable[[], None] = lambda: None,
) -> Written:
    """Write a complete shard and make its bytes (not its name) durable.

    Complete chunks of tensors are written while later ones are still being captured. Then come the
    objects, whose sizes are known only now, and the header.

    Args:
        file: an empty file, or a recycled one whose header has been invalidated.
        timeout_s: time after which a single transfer counts as hung.
        on_body: called when the bytes of the body are durable, before the header.

    Raises:
        OSError: error of the file system.
        DeadlineError: a transfer hangs.
    """
    digester = Digester(shard.layout.placed)
    transfers: list[Future[None]] = []

    def send(first: int, end: int) -> None:
        for begin in range(first, end, CHUNK_BYTES):
            stop = min(end, begin + CHUNK_BYTES)
            # A failed write ends the base at once, instead of after the rest was copied.
            _raise_failed(transfers)
            at = shard.room_bytes + begin
            held = _held(body, begin, stop, digester)
            if held is not None:
                # The bytes lie in the arena as in the file: no copy, so no chunk is needed.
                transfers.append(ring.threads.submit(file.write, held, at))
            else:
                # Bounds the copied chunks in flight, so that they stay in the processor's cache.
                _wait(transfers[:-_COPIED_MAX], ring, timeout_s)
                data, block = _copied(body, begin, stop, ring, digester, timeout_s)
                transfers.append(ring.copied.submit(_write, file, data, at, block, ring))
            progress.advance(stop - begin)

    try:
        # Only complete chunks yet: the last one also has the objects, whose size is not known.
        whole = shard.layout.size_bytes - shard.layout.size_bytes % CHUNK_BYTES
        send(0, whole)
        # Digests and header are computed here, while the disk still writes earlier chunks.
        layout = at_lsn(shard.layout, identity.lsn, shard.lsns)
        placed = append_objects(layout, body.objects_bytes(), lsn=identity.lsn).placed
        digester.extend(placed[len(layout.placed) :])
        end = placed[-1].end if placed else 0
        send(whole, end)
        written = _written(shard, identity, placed, digester)
        _wait(transfers, ring, timeout_s)
    finally:
        # On any exit: no thread may still be reading chunks that the ring will reuse.
        wait_all(transfers, timeout_s)
    # Direct writes end at a page boundary, and a recycled file may have been longer.
    file.truncate(shard.room_bytes + end)
    # The body must be durable before the header: after a crash, a valid header means a valid body.
    file.sync()
    on_body()
    failpoint("save.before_header")
    _write_header(file, written.header)
    # The caller renames the file next. Its name must not become durable before its header.
    file.sync()
    return written


def digest_shard(
    shard: ShardPlan, identity: ShardIdentity, body: Body, progress: ProgressSink = silent
) -> Written:
    """Return the result of :func:`write_shard` without writing anything."""
    layout = at_lsn(shard.layout, identity.lsn, shard.lsns)
    placed = append_objects(layout, body.objects_bytes(), lsn=identity.lsn).placed
    digester = Digester(placed)
    end = placed[-1].end if placed else 0
    # One chunk for all, as nothing is written and so nothing waits for a transfer.
    chunk = Block(CHUNK_BYTES)
    for begin in range(0, end, CHUNK_BYTES):
        stop = min(end, begin + CHUNK_BYTES)
        if _held(body, begin, stop, digester) is None:
            body.fill(begin, chunk.view[: stop - begin], digester.update)
        progress.advance(stop - begin)
    return _written(shard, identity, placed, digester)


def _written(
    shard: ShardPlan, identity: ShardIdentity, placed: Sequence[Placed], digester: Digester
) -> Written:
    identity = shard.identity_in(identity)
    header = encode_header(identity, placed, digester.digests, shard.aliases, shard.room_bytes)
    header_digest = digest(header)
    record = FileRecord(
        shard.name,
        shard.room_bytes + (placed[-1].end if placed else 0),
        shard.room_bytes,
        header_digest,
        digest_of_file(header_digest, digester.digests),
    )
    names = (place.entry.name for place in placed)
    return Written(record, header, dict(zip(names, digester.digests, strict=True)))


def _held(body: Body, begin: int, stop: int, digester: Digester) -> memoryview | None:
    """Digest bytes ``[begin, stop)`` of the body and return them in place.

    The result extends to the next page boundary; the file is truncated later. None if the bytes do
    not lie in memory as in the file.
    """
    held = body.held(begin, stop + -(stop - begin) % DIRECT_ALIGNMENT_BYTES)
    if held is not None:
        for piece in pieces(held[: stop - begin]):
            digester.update(piece)
    return held


def _copied(
    body: Body, begin: int, stop: int, ring: ChunkRing, digester: Digester, timeout_s: float
) -> tuple[memoryview, Block]:
    """Copy such bytes into a chunk of the ring, digest them, and return both."""
    padded = stop - begin + -(stop - begin) % DIRECT_ALIGNMENT_BYTES
    block = ring.take(timeout_s)
    try:
        body.fill(begin, block.view[: stop - begin], digester.update)
    except BaseException:
        # No thread has the chunk yet; without this the ring would lose it.
        ring.give(block)
        raise
    # The padding is written to disk until truncate(): it must not contain bytes of other files.
    block.view[stop - begin : padded] = bytes(padded - (stop - begin))
    return block.view[:padded], block


def _write(file: WriteFile, data: memoryview, offset: int, block: Block, ring: ChunkRing) -> None:
    try:
        file.write(data, offset)
    finally:
        # Also after an error: the ring allocates no chunk in place of a lost one.
        ring.give(block)


def _write_header(file: WriteFile, header: bytes) -> None:
    aligned = Block(len(header))  # aligned memory, to bypass the page cache
    aligned.view[: len(header)] = header
    file.write(aligned.view[: len(header)], 0)


def _raise_failed(transfers: list[Future[None]]) -> None:
    for transfer in transfers:
        if transfer.done():
            # Raises the error of the write. Finished transfers are dropped below, so each is
            # checked once.
            transfer.result()
    transfers[:] = [transfer for transfer in transfers if not transfer.done()]


def _wait(transfers: list[Future[None]], ring: ChunkRing, timeout_s: float) -> None:
    for transfer in transfers:
        if not ring.is_over(transfer, timeout_s):
            raise DeadlineError(
                f"a write took longer than {timeout_s:g} s: the storage hangs",
                hint="check the disk or the network file system (dmesg, df, iostat)",
            )
        transfer.result()
