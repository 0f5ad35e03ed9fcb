"""Ranks at a start that find copies in the memory of other nodes, without threads."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from everstep.commit.job.messages import Message, decode_message
from everstep.commit.job.offers import BaseOffer, Offer, Piece
from everstep.commit.lineage import BaseId
from everstep.format.records import Manifest, TimelineRecord
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.peers import CopyOffer
from everstep.restore.fetch.start_channel import Meeting, StartChannel
from everstep.seams import Clock
from tests.support.ranks.peering import RUN, piece, record_of


def own(rank: int, manifest: Manifest) -> Collection[int]:
    return (rank,)


def offer(
    rank: int, *bases: BaseId, tiers: tuple[str, ...] = ("disk",), session: str = "s"
) -> Offer:
    """What a rank with a disk of its own can read."""
    timelines: dict[int, TimelineRecord | None] = {1: record_of(1, session)} if bases else {}
    found = {base: BaseOffer({rank: Piece(piece(rank, base).marker, tiers)}) for base in bases}
    return Offer(rank, str(rank), RUN if bases else None, 2 if bases else 1, timelines, found)


def told(holder: int, held: HeldBase, session: str = "s") -> CopyOffer:
    return CopyOffer(holder, held.marker, record_of(held.marker.timeline, session).encode())


@dataclass
class Box:
    """A mailbox among threads."""

    rank: int
    boxes: list[Box]
    lost: Callable[[Message], bool]

    def __post_init__(self) -> None:
        self.arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def open(self, session: str, rank: int, peers: Sequence[tuple[str, int]]) -> None: ...

    def send(self, rank: int, message: bytes) -> None:
        assert rank != self.rank, "a mailbox leads to the others"
        if not self.lost(decode_message(message).message):
            self.boxes[rank].arrived.put(message)

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            return self.arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def is_disconnected(self, rank: int) -> bool:
        return False

    def close(self) -> None: ...


def channel(rank: int, world: int, box: Any, clock: Clock, timeout_s: float = 20.0) -> StartChannel:
    """Between the ranks of a start, of which each has a disk."""
    meeting = Meeting("s", rank, tuple(map(str, range(world))), box)
    return StartChannel(meeting, clock, PurePath("run"), timeout_s=timeout_s)
