"""Keepers of several ranks that send copies to each other, over a network and a clock that tests
move by hand; and files of bases that are no run's."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping

from everstep.commit.job.messages import (
    Envelope,
    Message,
    PeerCopyChunk,
    PeerLogChunk,
    PeerMessage,
    decode_message,
    encode_message,
)
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError
from everstep.format.header import ShardIdentity, plan_files
from everstep.format.records import Marker, TimelineRecord
from everstep.format.writer import digest_shard
from everstep.keeper.held.peer_stores import PeerBaseStore, PeerLogStore
from everstep.keeper.ship.peer_copies import PeerExchange
from everstep.keeper.ship.senders import Pace, PeerLink
from everstep.link.messages import JobSession
from everstep.restore.fetch.held import HeldBase, PeerCopy, files_over
from everstep.seams import ManualClock
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import Seen

__all__ = [
    "BOUND_BYTES",
    "BodyOfBytes",
    "Ring",
    "SlowRing",
    "bytes_of",
    "copy_of",
    "piece",
    "record_of",
]

RUN = "0" * 32
BOUND_BYTES = 64 << 20


class BodyOfBytes:
    """A body of these bytes (:class:`~everstep.state.layout.shards.Body`)."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
        chunk[:] = self._data[begin : begin + chunk.nbytes]
        seen(chunk)

    def held(self, begin: int, end: int) -> memoryview | None:
        return None

    def objects_bytes(self) -> Mapping[str, int]:
        return {}


def piece(
    rank: int, base: BaseId, *, size_bytes: int = 3000, world: int = 2, salt: int = 0
) -> HeldBase:
    """One rank's file of a base: ``size_bytes`` of tensors that no other rank or base has."""
    identity = ShardIdentity(RUN, base.timeline, base.step, base.step, rank, world, True)
    pattern = bytes((at * 7 + rank * 31 + base.step + salt) % 251 for at in range(251))
    data = (pattern * (size_bytes // 251 + 1))[:size_bytes]
    (plan,) = plan_files(identity, [Entry.whole("t", "U8", (size_bytes,))], {}, {})
    written = digest_shard(plan, identity, BodyOfBytes(data))
    files = (written.record,)
    marker = Marker(RUN, base.timeline, base.step, base.step, rank, world, True, files)
    whole = memoryview(bytearray(written.header + data))
    return HeldBase(marker, files_over(marker, whole), durable=True)


def bytes_of(held: HeldBase) -> bytes:
    """Its files, one after the other."""
    data = bytearray()
    for file, _ in held.files:
        part = bytearray(file.size_bytes)
        file.read_into(memoryview(part), 0)
        data += part
    return bytes(data)


def record_of(timeline: int, session: str = "s", parent: int | None = None) -> TimelineRecord:
    return TimelineRecord(RUN, timeline, parent, 0, True, 2, {"session": session}, 0.0)


def copy_of(held: HeldBase, session: str = "s") -> PeerCopy:
    record = record_of(held.marker.timeline, session).encode()
    return PeerCopy(held.marker, record, memoryview(bytearray(bytes_of(held))))


class Ring:
    """As many keepers as nodes, one rank on each.

    Attributes:
        bases: what each rank can read, by rank and base.
        lost: whether a message is lost, by sender and receiver; told of each.
        notices: what training was told, by rank.
    """

    def __init__(self, nodes: str, *, bytes_per_s: float | None = None, timeout_s: float = 30.0):
        self.world, self.clock = len(nodes), ManualClock()
        self.bases: dict[tuple[int, BaseId], HeldBase] = {}
        self.lost: Callable[[int, int, Message], bool] = lambda sender, to, message: False
        self.stores = [PeerBaseStore() for _ in nodes]
        self.notices: list[list[EverstepError]] = [[] for _ in nodes]
        self.said: list[tuple[int, int, Message]] = []
        self._nodes, self._rate, self._timeout_s = tuple(nodes), bytes_per_s, timeout_s
        self._on_way: deque[tuple[int, int, bytes]] = deque()
        self.ranks = [self.make(rank) for rank in range(self.world)]

    def make(self, rank: int, recovered: BaseId | None = None) -> PeerExchange:
        disks = tuple(map(str, range(self.world)))
        job_session = JobSession("s", rank, disks, (), recovered, nodes=self._nodes)
        self.stores[rank].new_start(BOUND_BYTES, job_session.sources, recovered)
        link = PeerLink(
            job_session,
            self.clock,
            lambda to, message: self.send(rank, to, message),
            self.notices[rank].append,
            timeout_s=self._timeout_s,
        )
        return PeerExchange(
            link,
            self.stores[rank],
            PeerLogStore(),
            Pace(self._rate),
            lambda base: self._find(rank, base),
            lambda base: None,
        )

    def replace(self, rank: int) -> None:
        """Another keeper, with nothing in memory."""
        self.stores[rank] = PeerBaseStore()
        self.ranks[rank] = self.make(rank)

    def take(self, base: BaseId, *, size_bytes: int = 3000) -> None:
        """A base becomes durable on all ranks; rank 0 hears of it first."""
        for rank in range(self.world):
            self.bases[rank, base] = piece(rank, base, size_bytes=size_bytes, world=self.world)
        for one in self.ranks:
            one.durable(base)

    def run(self, seconds: float = 1.0, *, tick_s: float = 0.1) -> None:
        """Lets all keepers do what they have to, for so long."""
        for _ in range(max(1, round(seconds / tick_s))):
            for _ in itertools.repeat(None, 100):
                for one in self.ranks:
                    one.turn(0.0)
                if not self._on_way:
                    break
                self.deliver()
            self.clock.advance(tick_s)

    def held(self, rank: int) -> list[tuple[int, int]]:
        return self.stores[rank].held

    def _find(self, rank: int, base: BaseId) -> tuple[HeldBase, bytes] | None:
        found = self.bases.get((rank, base))
        return None if found is None else (found, record_of(base.timeline).encode())

    def send(self, sender: int, to: int, message: Message) -> None:
        self.said.append((sender, to, message))
        if not self.lost(sender, to, message):
            self._on_way.append((sender, to, encode_message(Envelope("s", sender, message))))

    def deliver(self) -> None:
        for _ in range(len(self._on_way)):
            sender, to, data = self._on_way.popleft()
            message = decode_message(data).message
            assert isinstance(message, PeerMessage)
            self.ranks[to].receive(sender, message)


class SlowRing(Ring):
    """One of the keepers is at the end of a slow link, over which messages come in order.

    Attributes:
        most_on_way_bytes: on that link at once; ``arrived_bytes``: of bases and logs, there.
    """

    def __init__(
        self, nodes: str, *, to: int = 1, bytes_per_s: float = 10_000.0, timeout_s: float = 60.0
    ) -> None:
        super().__init__(nodes, timeout_s=timeout_s)
        self._slow, self._link_rate = to, bytes_per_s
        self._free_s = 0.0
        self._link: deque[tuple[float, tuple[int, int, bytes]]] = deque()
        self.most_on_way_bytes = self.arrived_bytes = 0

    def stand_still(self, seconds: float) -> None:
        """Nothing more arrives for so long."""
        self._free_s += seconds
        self._link = deque((due_s + seconds, one) for due_s, one in self._link)

    def send(self, sender: int, to: int, message: Message) -> None:
        if to != self._slow or sender == to:
            super().send(sender, to, message)
            return
        data = encode_message(Envelope("s", sender, message))
        self._free_s = max(self._free_s, self.clock.monotonic_s()) + len(data) / self._link_rate
        self._link.append((self._free_s, (sender, to, data)))
        on_way_bytes = sum(len(one[2]) for _, one in self._link)
        self.most_on_way_bytes = max(self.most_on_way_bytes, on_way_bytes)

    def deliver(self) -> None:
        while self._link and self._link[0][0] <= self.clock.monotonic_s():
            _, one = self._link.popleft()
            message = decode_message(one[2]).message
            self.arrived_bytes += (
                len(message.data) if isinstance(message, PeerCopyChunk | PeerLogChunk) else 0
            )
            self._on_way.append(one)
        super().deliver()

    def run(self, seconds: float = 1.0, *, tick_s: float = 0.1) -> None:
        for _ in range(max(1, round(seconds / tick_s))):
            self.deliver()
            super().run(tick_s, tick_s=tick_s)
