"""Log records that ranks send each other while they resume together.

If each rank recorded a share of updates that all ranks made alike (``docs/design/ranks.md``),
replay needs the
shares of all. Each rank requests those of the others step by step. It answers requests whenever it
checks its mailbox: between steps, and while it loads. Messages of the agreement wait meanwhile.

If another number of ranks wrote the log, each old rank's log is read by one rank, which sends the
records, marks included, in the same way (``docs/design/ranks.md``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from everstep.commit.job.messages import ChunkReply, ChunkRequest
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, FormatError
from everstep.format.digests import digest
from everstep.format.log import LogRecord
from everstep.restore.fetch.peer_log import lay_out_records, records_from_pack
from everstep.restore.fetch.start_channel import CHUNK_BYTES, IncomingBytes, StartChannel
from everstep.seams.clock import Clock

_TICK_S = 0.05
_CACHE_BYTES = 64 << 20
_NUMBER_BYTES = 8
_DIGEST_BYTES = len(digest(b""))


def encode_records(records: Sequence[LogRecord]) -> bytes:
    """Encode one rank's records of a step for another rank.

    The result consists of the total size, the size of the record index, the records and their
    index, and the digest of the index.

    Raises:
        DamageError: a record is damaged.
    """
    for record in records:
        record.verify()
    memory, index_bytes = lay_out_records(records)
    index = digest(memory[memory.nbytes - index_bytes :]).encode("ascii")
    total = 2 * _NUMBER_BYTES + memory.nbytes + _DIGEST_BYTES
    numbers = (total, index_bytes)
    front = b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in numbers)
    return b"".join([front, memory, index])


def decode_records(data: bytearray, timeline: int) -> list[LogRecord]:
    """Invert :func:`encode_records`, verifying every byte; the records share the memory of
    ``data``.

    Raises:
        DamageError: the bytes are damaged.
        FormatError: the bytes are not records.
    """
    begin = 2 * _NUMBER_BYTES
    end = len(data) - _DIGEST_BYTES
    index_bytes = int.from_bytes(data[_NUMBER_BYTES:begin], "little")
    index_digest = data[end:].decode("ascii", "replace")
    # The size comes from another rank. records_from_pack() compares it with the bytes before use.
    return records_from_pack(timeline, memoryview(data)[begin:end], index_bytes, index_digest)


@dataclass(slots=True)
class _PendingStep:
    """One rank's records of a step while they arrive.

    Attributes:
        reader: rank that sends them.
        incoming: their bytes, which begin with the total size.
        unreadable: that rank cannot read them.
    """

    reader: int
    incoming: IncomingBytes
    unreadable: bool = False

    @property
    def is_complete(self) -> bool:
        return self.unreadable or self.incoming.is_complete


EncodedLog = Callable[[int, int, int], bytes]
"""Returns the records that a rank wrote for a step of a timeline (rank, timeline, step), encoded by
:func:`encode_records`; b"" if they cannot be read here."""


class LogExchange:
    """Sends this rank's log records to other ranks, and fetches theirs.

    Args:
        encoded: log of this rank; None: it has none to send.
    """

    def __init__(self, others: StartChannel, clock: Clock, encoded: EncodedLog | None) -> None:
        self._others = others
        self._clock = clock
        self._encode = encoded
        # Ranks request the chunks of a step one by one, and several ranks the same step.
        self._cache: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        self._pending: dict[int, _PendingStep] = {}
        self._wanted = BaseId(0, 0)

    def serve(self) -> None:
        """Answer pending requests of other ranks, and report that this rank is alive."""
        while self._others.attend():
            pass
        self.answer()
        self._others.is_alive()

    def answer(self) -> None:
        """Process the requests and replies that have arrived."""
        while self._others.chunks:
            sender, message = self._others.chunks.popleft()
            if isinstance(message, ChunkRequest):
                self._reply(sender, message)
            elif isinstance(message, ChunkReply):
                self._take(sender, message)

    def fetch(
        self, readers: Mapping[int, int], timeline: int, step: int
    ) -> dict[int, list[LogRecord]]:
        """Fetch the records of a step from other ranks.

        Args:
            readers: by the rank whose records are needed, the rank (not this one) that reads them.

        Raises:
            DamageError: records are damaged or unreadable.
            DeadlineError: a rank does not respond.
            RecoveryError: a rank has failed.
        """
        self._wanted = BaseId(timeline, step)
        now_s = self._clock.monotonic_s()
        self._pending = {
            rank: _PendingStep(reader, IncomingBytes(now_s)) for rank, reader in readers.items()
        }
        self._others.expect(readers.values())
        while missing := [rank for rank, one in self._pending.items() if not one.is_complete]:
            for rank in missing:
                self._request(rank, self._pending[rank])
            self._others.attend(_TICK_S)
            # Ranks fetch from each other at the same time: answering here avoids a deadlock.
            self.answer()
            self._others.is_alive()
            # The rank that reads the records may fail or hang, as in the agreement.
            self._others.raise_failed()
            self._others.check({self._pending[rank].reader for rank in missing})
        received = self._pending
        self._pending = {}
        found = {}
        for rank, one in received.items():
            if one.unreadable:
                whose = "its own log" if one.reader == rank else f"the log of rank {rank}"
                why = f"rank {one.reader} cannot read {whose} for step {step}"
                raise DamageError(why, rank=one.reader)
            try:
                found[rank] = decode_records(one.incoming.data, timeline)
            except (DamageError, FormatError) as error:
                why = f"the log of rank {rank}, step {step}: {error.message}"
                raise DamageError(why, rank=one.reader) from error
        return found

    def _request(self, rank: int, one: _PendingStep) -> None:
        """Request the next bytes; repeat the request if nothing has arrived for long."""
        for offset, size in one.incoming.next_requests(self._clock.monotonic_s()):
            self._others.tell(one.reader, ChunkRequest(self._wanted, rank, offset, size, log=True))

    def _reply(self, sender: int, wanted: ChunkRequest) -> None:
        if not wanted.log:
            return
        if wanted.offset < 0 or not 0 < wanted.size_bytes <= CHUNK_BYTES:
            return
        data = self._encoded(wanted.rank, wanted.base.timeline, wanted.base.step)
        piece = data[wanted.offset : wanted.offset + wanted.size_bytes]
        self._others.tell(
            sender, ChunkReply(wanted.base, wanted.rank, wanted.offset, piece, log=True)
        )

    def _encoded(self, rank: int, timeline: int, step: int) -> bytes:
        """Return the records that this rank reads; b"" if it cannot.

        Ranks request the same steps in chunks, hence the cache.
        """
        key = rank, timeline, step
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        data = b"" if self._encode is None else self._encode(rank, timeline, step)
        # Also b"", so that a step that cannot be read is not tried again for every request.
        self._cache[key] = data
        # The last step stays, however large: otherwise each of its chunks would encode it anew.
        while len(self._cache) > 1 and sum(map(len, self._cache.values())) > _CACHE_BYTES:
            self._cache.popitem(last=False)
        return data

    def _take(self, sender: int, reply: ChunkReply) -> None:
        one = self._pending.get(reply.rank)
        if one is None or not reply.log or one.reader != sender or reply.base != self._wanted:
            return
        incoming = one.incoming
        if not incoming.add(reply.offset, reply.data, self._clock.monotonic_s()):
            return
        # An empty reply at the expected offset is no repetition: the reader has no bytes to send.
        one.unreadable = not reply.data
        if incoming.size_bytes is None and not one.unreadable:
            incoming.size_bytes = int.from_bytes(incoming.data[:_NUMBER_BYTES], "little")
