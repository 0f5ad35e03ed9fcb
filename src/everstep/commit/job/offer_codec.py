"""Encoding of offers and choices: records as on disk, everything else as MessagePack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import PurePath
from typing import Any, TypeVar

import msgpack

from everstep.commit.job.messages import plain_base, to_base
from everstep.commit.job.offers import BaseOffer, Choice, Offer, Piece, Source
from everstep.commit.log_reach import LogReader, LogRun, Reach
from everstep.commit.retention import TIERS
from everstep.errors import EverstepError, FormatError
from everstep.format.records import Manifest, Marker, TimelineRecord
from everstep.state.layout.replica_digest import ReplicaDigest

__all__ = [
    "decode_choice",
    "decode_compared",
    "decode_offer",
    "decode_restored",
    "encode_choice",
    "encode_compared",
    "encode_offer",
    "encode_restored",
    "run_from_wire",
    "run_to_wire",
]

_WIRE = PurePath("message")
_T = TypeVar("_T")
_Restored = tuple[tuple[tuple[int, Source], ...], tuple[int, int] | None, bool, bool]
_Compared = tuple[
    tuple[tuple[int, Source], ...],
    tuple[int, int] | None,
    tuple[ReplicaDigest, ...],
    tuple[str, ...],
]


def encode_offer(offer: Offer) -> bytes:
    """Return the bytes of an offer."""
    bases = [
        [
            plain_base(base),
            [[piece.marker.encode(), list(piece.tiers)] for piece in one.pieces.values()],
            one.manifest,
            [marker.encode() for marker in one.listed],
        ]
        for base, one in offer.bases.items()
    ]
    timelines = [[n, None if r is None else r.encode()] for n, r in offer.timelines.items()]
    lost = [plain_base(base) for base in offer.lost]
    log = [run_to_wire(run) for run in offer.log]
    others = [[source, [*map(run_to_wire, runs)]] for source, runs in offer.others.items()]
    about = [offer.rank, offer.disk, offer.run, offer.next_timeline]
    return _pack([*about, timelines, bases, lost, log, others])


def decode_offer(data: bytes) -> Offer:
    """Decode an offer.

    Raises:
        FormatError: ``data`` is not an offer.
    """
    return _unpack(data, _offer)


def encode_choice(choice: Choice) -> bytes:
    """Return the bytes of a choice."""
    sources = [[rank, _plain_sources(found)] for rank, found in choice.sources.items()]
    return _pack(
        [
            None if choice.base is None else plain_base(choice.base),
            None if choice.manifest is None else choice.manifest.encode(),
            sources,
            [manifest.encode() for manifest in choice.complete],
            [record.encode() for record in choice.timelines],
            choice.run,
            choice.timeline,
            [[plain_base(base), why] for base, why in choice.skipped],
            [plain_base(base) for base in choice.unreadable],
            choice.durable,
            [plain_base(base) for base in choice.elsewhere],
            None if choice.reach is None else [*astuple(choice.reach)],
            [list(one) for one in choice.readers],
            choice.partly,
            choice.note,
        ]
    )


def decode_choice(data: bytes) -> Choice:
    """Decode a choice.

    Raises:
        FormatError: ``data`` is not a choice.
    """
    return _unpack(data, _choice)


def encode_restored(
    damaged: Iterable[tuple[int, Source]],
    unusable: tuple[int, int] | None,
    exact: bool,
    relaid: bool = False,
) -> bytes:
    """Encode the result of a rank's restore.

    Args:
        damaged: damaged files: owner and source.
        unusable: timeline and step at which this rank's log proved unusable.
        exact: the restored state is exact.
        relaid: the log has another layout than this rank.
    """
    files = [[rank, source.cost, source.rank] for rank, source in damaged]
    return _pack([files, unusable, exact, relaid])


def decode_restored(data: bytes) -> _Restored:
    """Decode the result of :func:`encode_restored`.

    Raises:
        FormatError: ``data`` is something else.
    """

    def make(found: Any) -> _Restored:
        files, unusable, exact, relaid = found
        return _damaged(files), _step(unusable), bool(exact), bool(relaid)

    return _unpack(data, make)


def encode_compared(
    damaged: Iterable[tuple[int, Source]],
    unusable: tuple[int, int] | None,
    common: Iterable[ReplicaDigest],
    why: Iterable[str],
) -> bytes:
    """Encode what a rank would leave out of a base.

    Args:
        damaged, unusable: as for :func:`encode_restored`.
        common: digests of the entries that the rank shares with others.
        why: descriptions.
    """
    files = [[rank, source.cost, source.rank] for rank, source in damaged]
    return _pack([files, unusable, [[*astuple(one)] for one in common], list(why)])


def decode_compared(data: bytes) -> _Compared:
    """Decode the result of :func:`encode_compared`.

    Raises:
        FormatError: ``data`` is something else.
    """

    def make(found: Any) -> _Compared:
        files, unusable, common, why = found
        damaged = _damaged(files)
        at = _step(unusable)
        said = (ReplicaDigest(str(r), str(s), int(n), str(d)) for r, s, n, d in common)
        return damaged, at, tuple(said), tuple(map(str, why))

    return _unpack(data, make)


def _damaged(files: Any) -> tuple[tuple[int, Source], ...]:
    return tuple((int(rank), Source(int(cost), int(at))) for rank, cost, at in files)


def _step(unusable: Any) -> tuple[int, int] | None:
    return None if unusable is None else (int(unusable[0]), int(unusable[1]))


def _offer(found: Any) -> Offer:
    rank, disk, run, next_timeline, timelines, bases, lost, log, others = found
    return Offer(
        int(rank),
        str(disk),
        None if run is None else str(run),
        int(next_timeline),
        {int(n): None if r is None else TimelineRecord.decode(r, _WIRE) for n, r in timelines},
        {to_base(base): _base_offer(*fields) for base, *fields in bases},
        tuple(to_base(base) for base in lost),
        tuple(run_from_wire(*fields) for fields in log),
        {int(source): tuple(run_from_wire(*one) for one in runs) for source, runs in others},
    )


def run_to_wire(run: LogRun) -> list[Any]:
    """Return steps of a log as plain data."""
    return [run.timeline, run.first, run.after, list(run.lsns), run.shape]


def run_from_wire(timeline: Any, first: Any, after: Any, lsns: Any, shape: Any) -> LogRun:
    """Return the inverse of :func:`run_to_wire`.

    Raises:
        ValueError, TypeError: the arguments are something else.
    """
    if not lsns:
        raise ValueError("a log without steps")
    return LogRun(int(timeline), int(first), int(after), tuple(map(int, lsns)), str(shape))


def _reach(fields: Any) -> Reach:
    return Reach(*map(int, fields))


def _base_offer(pieces: Any, manifest: Any, listed: Any) -> BaseOffer:
    found = {}
    for data, tiers in pieces:
        marker = Marker.decode(data, _WIRE)
        if not set(tiers) <= set(TIERS):
            raise ValueError(f"{tiers!r} are not tiers")
        found[marker.rank] = Piece(marker, tuple(tiers))
    others = tuple(Marker.decode(data, _WIRE) for data in listed)
    return BaseOffer(found, None if manifest is None else str(manifest), others)


def _choice(found: Any) -> Choice:
    base, manifest, sources, complete, timelines, run, timeline, skipped, *rest = found
    unreadable, safe, elsewhere, reach, readers, partly, note = rest
    return Choice(
        None if base is None else to_base(base),
        None if manifest is None else Manifest.decode(manifest, _WIRE),
        {int(rank): tuple(Source(int(c), int(r)) for c, r in places) for rank, places in sources},
        tuple(Manifest.decode(data, _WIRE) for data in complete),
        tuple(TimelineRecord.decode(data, _WIRE) for data in timelines),
        None if run is None else str(run),
        int(timeline),
        tuple((to_base(one), str(why)) for one, why in skipped),
        tuple(to_base(one) for one in unreadable),
        bool(safe),
        tuple(to_base(one) for one in elsewhere),
        None if reach is None else _reach(reach),
        tuple(LogReader(*map(int, one)) for one in readers),
        bool(partly),
        str(note),
    )


def _plain_sources(sources: tuple[Source, ...]) -> list[list[int]]:
    return [[source.cost, source.rank] for source in sources]


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _unpack(data: bytes, make: Callable[[Any], _T]) -> _T:
    try:
        return make(msgpack.unpackb(data, raw=False))
    except EverstepError:
        raise
    except Exception as error:  # hostile or foreign bytes fail anywhere in msgpack or in a decoder
        raise FormatError(f"not a message of a start: {error!r}") from error
