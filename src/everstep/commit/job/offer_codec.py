"""Encoding of offers and choices: records as they are on disk, everything else typed."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from everstep.commit.job.offers import BaseOffer, Choice, Offer, Piece, Source
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogReader, LogRun, Reach
from everstep.commit.retention import Tier
from everstep.format import Manifest, Marker, TimelineRecord
from everstep.format.message_codec import Count, Decoder, Rank, Stored, Text, encode


class _BaseOffer(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    base: BaseId
    pieces: list[tuple[Stored[Marker], tuple[Tier, ...]]]
    manifest: str | None
    listed: list[Stored[Marker]]


class _Offer(msgspec.Struct, forbid_unknown_fields=True):
    rank: Rank
    disk: str
    run: str | None
    next_timeline: Count
    timelines: dict[Count, Stored[TimelineRecord] | None]
    bases: list[_BaseOffer]
    lost: tuple[BaseId, ...]
    log: tuple[LogRun, ...]
    others: dict[Rank, tuple[LogRun, ...]]


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    base: BaseId | None
    manifest: Stored[Manifest] | None
    sources: dict[Rank, tuple[Source, ...]]
    complete: list[Stored[Manifest]]
    timelines: list[Stored[TimelineRecord]]
    run: str | None
    timeline: Count
    skipped: tuple[tuple[BaseId, Text], ...]
    unreadable: tuple[BaseId, ...]
    durable: bool
    elsewhere: tuple[BaseId, ...]
    reach: Reach | None
    readers: tuple[LogReader, ...]
    partly: bool
    note: Text


_OFFER = Decoder[_Offer](_Offer, "an offer of a rank")
_CHOICE = Decoder[_Choice](_Choice, "a choice for all ranks")


def encode_offer(offer: Offer) -> bytes:
    """Return the bytes of an offer."""
    bases = [
        _BaseOffer(
            base,
            [(Stored(piece.marker), piece.tiers) for piece in one.pieces.values()],
            one.manifest,
            [*map(Stored, one.listed)],
        )
        for base, one in offer.bases.items()
    ]
    # None stands for a damaged record, and stays None.
    timelines = {n: one and Stored(one) for n, one in offer.timelines.items()}
    return encode(_Offer(**{**_fields(offer), "timelines": timelines, "bases": bases}))


def decode_offer(data: bytes) -> Offer:
    """Decode an offer.

    Raises:
        FormatError: ``data`` is not an offer.
    """
    found = _OFFER.decode(data)
    timelines = {n: one and one.record for n, one in found.timelines.items()}
    bases = {one.base: _base_offer(one) for one in found.bases}
    return Offer(**{**msgspec.structs.asdict(found), "timelines": timelines, "bases": bases})


def _base_offer(found: _BaseOffer) -> BaseOffer:
    pieces = {one.record.rank: Piece(one.record, tiers) for one, tiers in found.pieces}
    return BaseOffer(pieces, found.manifest, tuple(one.record for one in found.listed))


def encode_choice(choice: Choice) -> bytes:
    """Return the bytes of a choice."""
    records = {
        "manifest": choice.manifest and Stored(choice.manifest),
        "complete": [*map(Stored, choice.complete)],
        "timelines": [*map(Stored, choice.timelines)],
    }
    return encode(_Choice(**{**_fields(choice), **records}))


def decode_choice(data: bytes) -> Choice:
    """Decode a choice.

    Raises:
        FormatError: ``data`` is not a choice.
    """
    found = _CHOICE.decode(data)
    records = {
        "manifest": found.manifest and found.manifest.record,
        "complete": tuple(one.record for one in found.complete),
        "timelines": tuple(one.record for one in found.timelines),
    }
    return Choice(**{**msgspec.structs.asdict(found), **records})


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, without converting their values."""
    # Not dataclasses.asdict(), which would turn nested records into dicts.
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
