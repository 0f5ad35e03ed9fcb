"""Logs of ranks that keepers send to each other, and steps of them that are no training's."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from everstep.arena import Arena
from everstep.commit.lineage import BaseId
from everstep.commit.retention import KeepRules
from everstep.errors import EverstepError
from everstep.format.header import ShardIdentity
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.format.writer import ChunkRing
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.log.segment_queue import SegmentQueue
from everstep.keeper.ship.courier import Courier
from everstep.keeper.ship.log_copies import LogCopies
from everstep.keeper.ship.senders import CopyStats, LogSender
from everstep.restore.fetch.held import PeerLog, pack_steps
from everstep.run.segments import read_segment, scan_log
from everstep.seams import ManualClock
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import ShardLayout, plan_shards
from everstep.tiers.contract import Tier
from everstep.tiers.files import TierFileSystem
from everstep.tiers.memory import MemoryTier
from tests.support.ranks.peering import Ring, record_of

__all__ = ["LOG_BYTES", "Log", "LogRing", "heads_of_step", "log_of", "records_of_steps"]

LOG_BYTES = 1 << 20


def heads_of_step(
    step: int, *, timeline: int = 1, updates: int = 2, shape: str = "s"
) -> list[RecordHead]:
    """The records of a step, each of which has so many updates."""
    first = (step - 1) * updates + 1
    heads = [
        RecordHead("update", timeline, step, lsn, shape) for lsn in range(first, first + updates)
    ]
    return [*heads, RecordHead("mark", timeline, step, step * updates, shape)]


def _layout(size_bytes: int) -> ShardLayout:
    (layout,) = plan_shards([Entry.whole("t", "U8", (size_bytes,))], header_bytes_max=1 << 62)
    return layout


def records_of_steps(
    first: int, last: int, *, timeline: int = 1, size_bytes: int = 300, shape: str = "s"
) -> list[LogRecord]:
    """Records with bytes that no other record has."""
    found = []
    for step in range(first, last + 1):
        for place, head in enumerate(heads_of_step(step, timeline=timeline, shape=shape)):
            data = memoryview(bytearray((step * 7 + place + at) % 251 for at in range(size_bytes)))
            objects = {"o": f"{head}".encode()}
            found.append(
                LogRecord(head, _layout(size_bytes), objects, data, record_digest(data, objects))
            )
    return found


def log_of(source: int, first: int, last: int, *, session: str = "s", timeline: int = 1) -> PeerLog:
    """Steps that a keeper holds for ``source``."""
    records = records_of_steps(first, last, timeline=timeline)
    return PeerLog(source, record_of(timeline, session).encode(), pack_steps(records))


class Log:
    """The log of a rank in its keeper's memory."""

    def __init__(self, size_bytes: int = 300) -> None:
        self._arena = Arena.anonymous(4 << 20)
        self._size_bytes = size_bytes
        self.store = LogStore(self._arena, SegmentQueue(None, lambda error: None))
        self._number = self._offset = 0

    def step(self, step: int, *, timeline: int = 1) -> None:
        """A step of training."""
        for record in records_of_steps(step, step, timeline=timeline, size_bytes=self._size_bytes):
            self.add(record)

    def add(self, record: LogRecord) -> None:
        self._number += 1
        end = self._offset + record.data.nbytes
        self._arena.view[self._offset : end] = record.data
        self.store.add(self._number, record.head, record.layout, record.objects, self._offset)
        self._offset = end
        self.store.settle(10.0)

    def overwrite(self) -> None:
        """The memory of all records is used again, and nobody has said so yet."""
        self._arena.view[: self._offset] = bytes(self._offset)

    def forget_all(self) -> None:
        self.store.forget(self._number)


class LogRing(Ring):
    """Keepers that send their logs, too."""

    def __init__(
        self,
        nodes: str,
        *,
        log_bytes: int = LOG_BYTES,
        log_rate: float | None = None,
        size: int = 300,
        timeout_s: float = 20.0,
        shrink: Any = None,
    ) -> None:
        super().__init__(nodes, timeout_s=timeout_s)
        self._shrink = shrink
        self.mine = [Log(size) for _ in nodes]
        self._log_bytes, self._log_rate = log_bytes, log_rate
        for rank in range(self.world):
            self.join(rank)

    def join(self, rank: int) -> None:
        """The keeper of a rank begins to send and to hold logs."""
        one = self.ranks[rank]
        one.logs.new_start(self._log_bytes, [(rank - 1) % self.world])
        one.log = LogSender(
            one.link,
            self.mine[rank].store,
            1,
            lambda timeline: record_of(timeline).encode(),
            bytes_per_s=self._log_rate,
            shrink=self._shrink,
        )

    def train(self, *steps: int) -> None:
        for step in steps:
            for log in self.mine:
                log.step(step)

    def logs(self, rank: int) -> list[tuple[int, list[int]]]:
        """Whose steps a rank's keeper holds."""
        found: dict[int, list[int]] = {}
        for log, _ in self.ranks[rank].logs.whole()[0]:
            run = log.steps.run
            found.setdefault(log.source, []).extend(range(run.first, run.last + 1))
        return sorted((source, sorted(steps)) for source, steps in found.items())

    def base(self, step: int, *, wait: bool = True) -> BaseId:
        base = BaseId(1, step)
        self.take(base)
        if wait:
            self.run()
        return base


IDENTITY = ShardIdentity("0" * 32, 1, 0, 0, 1, 2, True)


RUN = PurePath("/run")


class Copying:
    """Copies of the log of rank 1 of two, in no thread of their own."""

    def __init__(self, tier: Tier | None = None, **more: Any) -> None:
        self.tier = tier or MemoryTier()
        self.clock = ManualClock()
        self.posted: list[EverstepError] = []
        self.log = Log()
        self.copies = self.again(self.tier, **{"batch_steps": 2, **more})

    def again(
        self, tier: Tier, *, identity: ShardIdentity = IDENTITY, log: Log | None = None, **more: Any
    ) -> LogCopies:
        """Another keeper copies this log, or another one, to a place."""
        courier = Courier(tier, identity.timeline, self.clock, self.posted.append, retry_s=5.0)
        store = (log or self.log).store
        return LogCopies(courier, store, identity, keep=KeepRules(1), **more)

    @property
    def stats(self) -> CopyStats:
        return self.copies.courier.stats

    def turn(self, *, flush: bool = False) -> None:
        if flush:
            self.copies.flush()
        self.copies.turn()

    def train(self, *steps: int, flush: bool = False) -> None:
        for step in steps:
            self.log.step(step)
            self.turn(flush=flush)

    def there(self, rank: int = 1) -> list[tuple[int, int]]:
        """Steps of the segments that can be read, each compared with what was logged."""
        files, ring, found = TierFileSystem(self.tier, RUN), ChunkRing(3, 1), []
        try:
            for segment in scan_log(files, RUN, [1, 2], rank=rank):
                assert segment.problem is None
                read = read_segment(files, segment, ring, timeout_s=20.0)
                wanted = records_of_steps(segment.after + 1, segment.last)
                assert [_told(one) for one in read] == [_told(one) for one in wanted]
                found.append((segment.after, segment.last))
        finally:
            ring.close()
        return found


def _told(record: LogRecord) -> tuple[Any, ...]:
    return record.head, bytes(record.data), dict(record.objects)
