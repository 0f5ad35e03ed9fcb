"""Writes the body and header of a shard.

The calling thread brings the bytes into page-aligned chunks of the *file*, whatever
entries they cut through, and digests them while they are in the cache; a few threads write
the chunks past the page cache. The header comes last: until then the file begins with
zeros and no reader of safetensors accepts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from everstep.arena import Block
from everstep.errors import DeadlineError
from everstep.format.digests import Digester, digest, digest_of_file
from everstep.format.header import ShardIdentity, encode_header
from everstep.format.plan import ShardPlan
from everstep.format.records import FileRecord
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import DIRECT_ALIGNMENT_BYTES, WriteFile
from everstep.seams.files.stalls import wait_while_active
from everstep.seams.processes.conditions import Condition, wait_all
from everstep.seams.processes.threads import IoThreads
from everstep.seams.progress import ProgressSink, silent
from everstep.state.layout.shards import Body, Placed, append_objects, at_lsn, pieces

__all__ = ["CHUNK_BYTES", "ChunkRing", "Written", "digest_shard", "write_shard"]

CHUNK_BYTES = 4 << 20


_COPIED_MAX = 2
"""Chunks that are written while the next one is copied. More would leave the cache before the disk
fetches them, and more threads would take the core of the one that copies: next to six, a fifth less
of processor time, and up to 1.2 times as fast."""


class ChunkRing:
    """Page-aligned chunks that go round between the thread that fills and those that write.

    Args:
        chunks: number of chunks; one more than there are writers keeps all of them busy.

    Attributes:
        threads: that transfer.
        copied: that write chunks which somebody fills meanwhile.
    """

    def __init__(self, chunks: int, writers: int) -> None:
        self._free: list[Block] = []  # the last is used first: it is in the cache
        self._left = chunks  # that are not made yet
        self._changed = Condition()  # several threads may share the ring
        self.threads = IoThreads(writers, "everstep-io")
        self.copied = IoThreads(min(writers, _COPIED_MAX), "everstep-write")

    def try_take(self) -> Block | None:
        """A chunk that nobody has, if there is one. Whoever holds chunks already takes no more
        than that: two that wait for each other's would wait for ever."""
        with self._changed:
            return self._take_or_make()

    def take(self, timeout_s: float) -> Block:
        """A free chunk; chunks are made when they are first needed."""
        with self._changed:
            if self._changed.wait_for(lambda: self._free or self._left, timeout_s):
                block = self._take_or_make()
                assert block is not None
                return block
        raise DeadlineError(
            f"no chunk was transferred within {timeout_s:g} s: the storage hangs",
            hint="look at the disk or the network file system (dmesg, df, iostat)",
        )

    def _take_or_make(self) -> Block | None:
        if self._free:
            return self._free.pop()
        if not self._left:
            return None
        self._left -= 1
        return Block(CHUNK_BYTES, touch=False)

    def give(self, block: Block) -> None:
        """Hands a chunk back."""
        with self._changed:
            self._free.append(block)
            self._changed.notify()

    def is_over(self, transfer: Future[Any], timeout_s: float) -> bool:
        """Whether a transfer of this ring has ended, well or badly; False: it takes longer than
        ``timeout_s``. For as long, none of those that it waits behind may take, which are others'
        perhaps."""
        ahead = self.threads, self.copied

        def moves() -> object:
            return transfer.running() or [threads.ended for threads in ahead]

        return wait_while_active(transfer, timeout_s, moves)

    def close(self) -> None:
        """Ends the threads; transfers under way are finished first."""
        self.threads.close()
        self.copied.close()


@dataclass(frozen=True, slots=True)
class Written:
    """A shard that is durable, but for its name.

    Attributes:
        record: length and digests, for the marker.
        header: its first bytes.
        digests: of each entry, by name.
        linked: it was there already, and has one more name now.
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
    """Writes a whole shard and makes its bytes (not its name) durable.

    Whole chunks of tensors go out while later ones are still being captured; then come the
    objects, whose sizes are known only now, and the header.

    Args:
        file: an empty file, or a recycled one whose header has been invalidated.
        timeout_s: a single transfer that takes longer counts as hung.
        on_body: called when the bytes of the body are durable, before the header.

    Raises:
        OSError: what the file system said.
        DeadlineError: when a transfer hangs.
    """
    digester = Digester(shard.layout.placed)
    transfers: list[Future[None]] = []

    def send(first: int, end: int) -> None:
        for begin in range(first, end, CHUNK_BYTES):
            stop = min(end, begin + CHUNK_BYTES)
            _raise_failed(transfers)
            at = shard.room_bytes + begin
            held = _held(body, begin, stop, digester)
            if held is not None:
                transfers.append(ring.threads.submit(file.write, held, at))
            else:
                _wait(transfers[:-_COPIED_MAX], ring, timeout_s)
                data, block = _copied(body, begin, stop, ring, digester, timeout_s)
                transfers.append(ring.copied.submit(_write, file, data, at, block, ring))
            progress.advance(stop - begin)

    try:
        whole = shard.layout.size_bytes - shard.layout.size_bytes % CHUNK_BYTES
        send(0, whole)
        # From here on while the disk still has chunks to write: it need not wait for any of it.
        layout = at_lsn(shard.layout, identity.lsn, shard.lsns)
        placed = append_objects(layout, body.objects_bytes(), lsn=identity.lsn).placed
        digester.extend(placed[len(layout.placed) :])
        end = placed[-1].end if placed else 0
        send(whole, end)
        written = _written(shard, identity, placed, digester)
        _wait(transfers, ring, timeout_s)
    finally:
        # Whatever happened, nobody may still be reading from chunks that are used again.
        wait_all(transfers, timeout_s)
    file.truncate(shard.room_bytes + end)
    file.sync()  # the body is durable before any header vouches for it
    on_body()
    failpoint("save.before_header")
    _write_header(file, written.header)
    file.sync()
    return written


def digest_shard(
    shard: ShardPlan, identity: ShardIdentity, body: Body, progress: ProgressSink = silent
) -> Written:
    """What :func:`write_shard` would return, without writing anything."""
    layout = at_lsn(shard.layout, identity.lsn, shard.lsns)
    placed = append_objects(layout, body.objects_bytes(), lsn=identity.lsn).placed
    digester = Digester(placed)
    end = placed[-1].end if placed else 0
    chunk = Block(CHUNK_BYTES, touch=False)
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
    """Bytes ``[begin, stop)`` of the body where they lie, digested, and up to the next page
    boundary, where they will be cut off again."""
    held = body.held(begin, stop + -(stop - begin) % DIRECT_ALIGNMENT_BYTES)
    if held is not None:
        for piece in pieces(held[: stop - begin]):
            digester.update(piece)
    return held


def _copied(
    body: Body, begin: int, stop: int, ring: ChunkRing, digester: Digester, timeout_s: float
) -> tuple[memoryview, Block]:
    """The same of bytes that lie elsewhere, and the chunk that holds them."""
    padded = stop - begin + -(stop - begin) % DIRECT_ALIGNMENT_BYTES
    block = ring.take(timeout_s)
    try:
        body.fill(begin, block.view[: stop - begin], digester.update)
    except BaseException:
        ring.give(block)
        raise
    block.view[stop - begin : padded] = bytes(padded - (stop - begin))
    return block.view[:padded], block


def _write(file: WriteFile, data: memoryview, offset: int, block: Block, ring: ChunkRing) -> None:
    try:
        file.write(data, offset)
    finally:
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


def _wait(transfers: list[Future[None]], ring: ChunkRing, timeout_s: float) -> None:
    for transfer in transfers:
        if not ring.is_over(transfer, timeout_s):
            raise DeadlineError(
                f"a write took longer than {timeout_s:g} s: the storage hangs",
                hint="look at the disk or the network file system (dmesg, df, iostat)",
            )
        transfer.result()
