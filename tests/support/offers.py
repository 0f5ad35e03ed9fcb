"""Offers of bases, as ranks make them when they start."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.commit.job.offers import BaseOffer, Offer, Piece
from everstep.commit.lineage import BaseId
from everstep.format.names import shard_name
from everstep.format.records import FileRecord, Marker, TimelineRecord


def marker(base: BaseId, rank: int, world: int, *, attempt: str = "a") -> Marker:
    file = FileRecord(shard_name(rank), 96, 0, "0" * 32, attempt * 32)
    return Marker("run", base.timeline, base.step, base.step, rank, world, True, (file,))


def record(number: int, parent: BaseId | None = None, session: str = "s") -> TimelineRecord:
    timeline, step = (None, 0) if parent is None else (parent.timeline, parent.step)
    return TimelineRecord("run", number, timeline, step, True, 2, {"session": session}, 0.0)


FIRST = {1: record(1)}


def pieces(
    base: BaseId, ranks: Iterable[int], world: int, tiers: tuple[str, ...] = ("disk",)
) -> dict[int, Piece]:
    return {rank: Piece(marker(base, rank, world), tiers) for rank in ranks}


def offer(rank: int, bases: dict[BaseId, BaseOffer], **changed: object) -> Offer:
    fields: dict = {"run": "run", "next_timeline": 2, "timelines": FIRST, **changed}
    return Offer(rank, f"disk {rank}", bases=bases, **fields)


def own(rank: int, *steps: int, world: int = 2) -> Offer:
    """A rank that has its own files of some steps, on a disk of its own."""
    bases = [BaseId(1, step) for step in steps]
    return offer(rank, {base: BaseOffer(pieces(base, [rank], world)) for base in bases})
