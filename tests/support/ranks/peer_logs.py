"""Logs of ranks that keepers send to each other, and steps of them that are no training's."""

from __future__ import annotations

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.keeper.log.log import LogStore
from everstep.keeper.ship.log_sender import LogSender
from everstep.restore.fetch.peer_log import PeerLog, packed
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import ShardLayout, plan_shards
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
    return PeerLog(source, record_of(timeline, session).encode(), packed(records))


class Log:
    """The log of a rank in its keeper's memory."""

    def __init__(self, size_bytes: int = 300) -> None:
        self._arena = Arena.anonymous(4 << 20)
        self._size_bytes = size_bytes
        self.store = LogStore(self._arena, None, lambda error: None)
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
    ) -> None:
        super().__init__(nodes, timeout_s=timeout_s)
        self.mine = [Log(size) for _ in nodes]
        self._log_bytes, self._log_rate = log_bytes, log_rate
        for rank in range(self.world):
            self.join(rank)

    def join(self, rank: int) -> None:
        """The keeper of a rank begins to send and to hold logs."""
        one = self.ranks[rank]
        one.logs.new_start(self._log_bytes, [(rank - 1) % self.world])
        one.log = LogSender(
            rank,
            one.peer,
            self._log_rate,
            self.clock,
            lambda timeline: record_of(timeline).encode(),
            lambda message: self._send(rank, one.peer, message),
            one.complain,
            timeout_s=self._timeout_s,
        )
        one.log.follow(self.mine[rank].store, 1)

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
