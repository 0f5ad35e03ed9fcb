"""What ranks say while they agree on what to restore, and hand each other of their logs meanwhile.

Where each rank has recorded a part of what all consumed alike (``docs/design/ranks.md``), replay
takes all
parts: each rank asks the others for theirs, step by step, and answers them whenever it looks at its
mailbox: between two steps, and while it loads. What belongs to the agreement waits meanwhile.

Where another number of ranks has written the log, each of theirs is read by one rank, which hands
it out in the same way, with the marks (``docs/design/ranks.md``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from everstep.commit.job.messages import Message, PartTold, PartWanted
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, FormatError
from everstep.format.digests import digest
from everstep.format.log import LogRecord
from everstep.restore.fetch.others import Others
from everstep.restore.fetch.peer_log import laid_out, records_in
from everstep.seams.clock import Clock

__all__ = ["LogExchange", "decode_records", "encode_records"]

_PART_BYTES = 1 << 20
_UNANSWERED_MAX = 8  # parts
_TICK_S = 0.05
_AGAIN_S = 2.0  # at first
_AGAIN_MAX_S = 30.0
_KEPT_BYTES = 64 << 20
_NUMBER_BYTES = 8
_DIGEST_BYTES = len(digest(b""))


def encode_records(records: Sequence[LogRecord]) -> bytes:
    """One rank's updates of a step, for another rank: how many bytes they are, and of the index of
    their records, these, and the digest of the index.

    Raises:
        DamageError: a record is not what it was when it came.
    """
    for record in records:
        record.verify()
    memory, index_bytes = laid_out(records)
    index = digest(memory[memory.nbytes - index_bytes :]).encode("ascii")
    total = 2 * _NUMBER_BYTES + memory.nbytes + _DIGEST_BYTES
    numbers = (total, index_bytes)
    front = b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in numbers)
    return b"".join([front, memory, index])


def decode_records(data: bytearray, timeline: int) -> list[LogRecord]:
    """The inverse of :func:`encode_records`, every byte compared with its digest; over ``data``.

    Raises:
        DamageError: they are other bytes.
        FormatError: they are no records.
    """
    begin = 2 * _NUMBER_BYTES
    end = len(data) - _DIGEST_BYTES
    index_bytes = int.from_bytes(data[_NUMBER_BYTES:begin], "little")
    index_digest = data[end:].decode("ascii", "replace")
    return records_in(timeline, memoryview(data)[begin:end], index_bytes, index_digest)


class _Coming:
    """One rank's part of a step, on its way.

    Attributes:
        reader: the rank that it comes from.
        data: what has come, in order; None: that rank cannot read it.
        total_bytes: known with the first of it.
        asked_bytes: of these.
        again_s: after so long without an answer it is asked for anew.
    """

    def __init__(self, reader: int, now_s: float) -> None:
        self.reader = reader
        self.data: bytearray | None = bytearray()
        self.total_bytes: int | None = None
        self.asked_bytes = 0
        self.asked_s = now_s
        self.again_s = _AGAIN_S

    @property
    def is_there(self) -> bool:
        return self.data is None or len(self.data) == self.total_bytes


class LogExchange:
    """Hands out this rank's log, and gets those of others.

    Args:
        own: gives what this rank reads of a step: of whose log, timeline, step; as
            :func:`encode_records` does; b"": it cannot be read, or is not this rank's to read.
    """

    def __init__(self, others: Others, clock: Clock, own: Callable[[int, int, int], bytes]) -> None:
        self._others = others
        self._clock = clock
        self._own = own
        self._kept: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        self._coming: dict[int, _Coming] = {}
        self._wanted = BaseId(0, 0)
        others.aside = self._take_aside

    def attend(self) -> None:
        """Answers whoever wants a part of this rank's log, and says that this one is there."""
        while self._others.attend():
            pass
        self._others.is_alive()

    def parts(
        self, readers: Mapping[int, int], timeline: int, step: int
    ) -> dict[int, list[LogRecord]]:
        """Other ranks' updates of a step.

        Args:
            readers: whose, and from which rank, another than this one, each comes.

        Raises:
            DamageError: one of them cannot be used.
            DeadlineError: a rank is silent.
            RecoveryError: a rank has failed.
        """
        self._wanted = BaseId(timeline, step)
        now_s = self._clock.monotonic_s()
        self._coming = {rank: _Coming(reader, now_s) for rank, reader in readers.items()}
        self._others.expect(readers.values())
        while missing := [rank for rank, one in self._coming.items() if not one.is_there]:
            for rank in missing:
                self._ask(rank, self._coming[rank])
            self._others.attend(_TICK_S)
            self._others.is_alive()
            self._others.raise_failed()
            self._others.check({self._coming[rank].reader for rank in missing})
        came = self._coming
        self._coming = {}
        found = {}
        for rank, one in came.items():
            if one.data is None:
                whose = "its part" if one.reader == rank else f"the log of rank {rank}"
                why = f"rank {one.reader} cannot read {whose} of step {step}"
                raise DamageError(why, rank=one.reader)
            try:
                found[rank] = decode_records(one.data, timeline)
            except (DamageError, FormatError) as error:
                why = f"the part of rank {rank} of step {step}: {error.message}"
                raise DamageError(why, rank=one.reader) from error
        return found

    def _take_aside(self, sender: int, message: Message) -> bool:
        if isinstance(message, PartWanted):
            self._hand_out(sender, message)
        elif isinstance(message, PartTold):
            self._take(sender, message)
        else:
            return False
        return True

    def _ask(self, rank: int, one: _Coming) -> None:
        """For the next bytes; anew, where nothing has come for long."""
        assert one.data is not None
        now_s = self._clock.monotonic_s()
        there = len(one.data)
        if one.asked_bytes > there and now_s - one.asked_s > one.again_s:
            one.asked_bytes, one.again_s = there, min(2 * one.again_s, _AGAIN_MAX_S)
        end = _PART_BYTES if one.total_bytes is None else one.total_bytes
        while one.asked_bytes < end and one.asked_bytes - there < _UNANSWERED_MAX * _PART_BYTES:
            size = min(end - one.asked_bytes, _PART_BYTES)
            wanted = PartWanted(self._wanted, rank, one.asked_bytes, size, log=True)
            self._others.tell(one.reader, wanted)
            one.asked_bytes += size
            one.asked_s = now_s

    def _hand_out(self, sender: int, wanted: PartWanted) -> None:
        if not wanted.log:
            return
        if wanted.offset < 0 or not 0 < wanted.size_bytes <= _PART_BYTES:
            return
        data = self._of_own(wanted.rank, wanted.base.timeline, wanted.base.step)
        piece = data[wanted.offset : wanted.offset + wanted.size_bytes]
        self._others.tell(
            sender, PartTold(wanted.base, wanted.rank, wanted.offset, piece, log=True)
        )

    def _of_own(self, rank: int, timeline: int, step: int) -> bytes:
        """What this rank reads; b"": it cannot. Ranks ask for the same steps, in pieces."""
        key = rank, timeline, step
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        data = self._kept[key] = self._own(rank, timeline, step)
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return data

    def _take(self, sender: int, told: PartTold) -> None:
        one = self._coming.get(told.rank)
        if one is None or not told.log or one.reader != sender or told.base != self._wanted:
            return
        if one.data is None or told.offset != len(one.data):
            return
        if not told.data:
            one.data = None
            return
        one.data += told.data
        if one.total_bytes is None:
            one.total_bytes = int.from_bytes(one.data[:_NUMBER_BYTES], "little")
            one.asked_bytes = len(one.data)
        if len(one.data) > one.total_bytes:
            one.data = None
            return
        one.asked_s = self._clock.monotonic_s()
