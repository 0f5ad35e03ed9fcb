"""Messages between ranks, and their encoding.

Every message carries the session: the one start of the job that it belongs to. A process of an
earlier start that wakes up has no effect, because its messages are of another session (I11).
Markers and manifests are sent as the bytes they have on disk, with their digests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import msgpack

from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError, FormatError
from everstep.format.records import Manifest, Marker

__all__ = [
    "Answer",
    "ChunkReply",
    "ChunkRequest",
    "Command",
    "CopyMessage",
    "CopyProgress",
    "CopyReply",
    "CopyRequest",
    "CopySettled",
    "DiskProgress",
    "Envelope",
    "FetchProgress",
    "GiveUpNotice",
    "ManifestAck",
    "ManifestNotice",
    "MarkerNotice",
    "MarkersRequest",
    "Message",
    "PeerCopyAck",
    "PeerCopyBegin",
    "PeerCopyChunk",
    "PeerLogAck",
    "PeerLogBegin",
    "PeerLogChunk",
    "PeerMessage",
    "PeerRound",
    "PeerRoundReply",
    "ReadBackReply",
    "ReadBackRequest",
    "StartFailed",
    "WatermarkAck",
    "WatermarkNotice",
    "accept",
    "decode_message",
    "encode_message",
    "plain_base",
    "to_base",
]

_WIRE = PurePath("message")


@dataclass(frozen=True, slots=True)
class MarkerNotice:
    """The sender's marker is durable."""

    marker: Marker


@dataclass(frozen=True, slots=True)
class MarkersRequest:
    """The manifest of ``base`` is overdue: send your marker, or the manifest."""

    base: BaseId


@dataclass(frozen=True, slots=True)
class ManifestNotice:
    """All markers are durable: every disk must have this manifest."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ManifestAck:
    """The manifest of ``base`` is durable on the sender's disk."""

    base: BaseId


@dataclass(frozen=True, slots=True)
class GiveUpNotice:
    """The sender has no files of ``base`` and never will, so the base will not exist."""

    base: BaseId
    reason: str


@dataclass(frozen=True, slots=True)
class DiskProgress:
    """The sender's disk is slow, but does not hang: an operation has completed."""


@dataclass(frozen=True, slots=True)
class ReadBackRequest:
    """Read your files of ``base`` back: bases are to be deleted, and none that stays is
    verified."""

    base: BaseId


@dataclass(frozen=True, slots=True)
class ReadBackReply:
    """Result of the read-back of the sender's files of ``base``; empty if they are intact."""

    base: BaseId
    problem: str


@dataclass(frozen=True, slots=True)
class WatermarkNotice:
    """``base`` is durable on all ranks; the bases in ``delete`` are no longer needed.

    Attributes:
        damaged: bases that some rank cannot read; nothing is replayed from them.
    """

    base: BaseId
    delete: tuple[BaseId, ...]
    damaged: tuple[BaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class WatermarkAck:
    """The sender knows the watermark ``base``.

    Attributes:
        held: bases on the sender's disk, if it leads there.
        needed: those that the logs on that disk need, at any age.
    """

    base: BaseId
    held: tuple[BaseId, ...]
    needed: tuple[BaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Copy your files of the base with this manifest to ``place``.

    Attributes:
        place: index of the tier among the job's tiers for copies.
    """

    place: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The sender is copying to ``place``, or ready to."""

    place: int


@dataclass(frozen=True, slots=True)
class CopyReply:
    """The sender's files of ``base`` are in ``place``, its marker last; or the problem."""

    place: int
    base: BaseId
    problem: str


@dataclass(frozen=True, slots=True)
class CopySettled:
    """No rank will be asked for its files of ``base``, or of an older base, any more."""

    place: int
    base: BaseId


@dataclass(frozen=True, slots=True)
class Command:
    """Step ``number`` of an agreement begins."""

    number: int
    phase: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The sender has completed step ``number`` of an agreement."""

    number: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class StartFailed:
    """``rank`` has failed during a start and does not continue."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRound:
    """State of the copies in peers' memory, from rank 0.

    Attributes:
        base: all ranks send their files of this base now; None between rounds.
        everywhere: newest base that is complete with all peers.
    """

    base: BaseId | None
    everywhere: BaseId | None


@dataclass(frozen=True, slots=True)
class PeerRoundReply:
    """State of the copy of the sender's files of ``base``.

    Attributes:
        state: ``"whole"``, ``"failed"``, ``"sending"``; ``"noted"`` for one that is complete with
        all
            peers.
    """

    base: BaseId
    state: str


@dataclass(frozen=True, slots=True)
class PeerCopyBegin:
    """The sender is about to send its files of a base.

    Attributes:
        record: record of the base's timeline, as it is on the sender's disk.
    """

    marker: Marker
    record: bytes


@dataclass(frozen=True, slots=True)
class PeerCopyChunk:
    """Bytes of the sender's files of ``base``; ``offset`` counts through all files."""

    base: BaseId
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PeerCopyAck:
    """Progress of the copy of the receiver's files of ``base`` that the sender holds.

    Attributes:
        received_bytes: number of bytes received so far.
        whole: all bytes are there and match the digests of the marker.
        problem: reason why no more will be accepted; empty to continue.
    """

    base: BaseId
    received_bytes: int
    whole: bool
    problem: str


@dataclass(frozen=True, slots=True)
class PeerLogBegin:
    """The sender is about to send steps of its log
    (:func:`everstep.restore.fetch.peer_log.pack_steps`).

    Attributes:
        timeline, first, last: the steps.
        record: record of the timeline, as it is on the sender's disk.
        index_bytes: size of the index of the records, at the end of the ``size_bytes``.
        index_digest: digest of the index; each record has a digest of its own.
    """

    timeline: int
    first: int
    last: int
    record: bytes
    size_bytes: int
    index_bytes: int
    index_digest: str


@dataclass(frozen=True, slots=True)
class PeerLogChunk:
    """Bytes of the sender's steps that begin with ``first``."""

    timeline: int
    first: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PeerLogAck:
    """Progress of the copy of the receiver's steps that the sender holds.

    Attributes:
        state: ``"more"``: send the next chunk; ``"whole"``: complete and verified; ``"full"``: no
            space until steps are dropped; ``"refused"``: see ``problem``.
    """

    timeline: int
    first: int
    received_bytes: int
    state: str
    problem: str


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """At a start: send these bytes of the copy of ``base`` that is held for ``rank``.

    Attributes:
        log: the copy of log steps that begins with that timeline and step, instead of a base.
    """

    base: BaseId
    rank: int
    offset: int
    size_bytes: int
    log: bool = False


@dataclass(frozen=True, slots=True)
class ChunkReply:
    """Bytes of such a copy."""

    base: BaseId
    rank: int
    offset: int
    data: bytes
    log: bool = False


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """At a start: the sender is alive. ``done``: it has fetched all it needs in this ``round``."""

    round: int
    done: bool


PeerMessage = (
    PeerRound
    | PeerRoundReply
    | PeerCopyBegin
    | PeerCopyChunk
    | PeerCopyAck
    | PeerLogBegin
    | PeerLogChunk
    | PeerLogAck
)
"""Messages between keepers about copies in peers' memory."""

CopyMessage = CopyRequest | CopyProgress | CopyReply | CopySettled
"""Messages between keepers about copies in other tiers."""

Message = (
    MarkerNotice
    | MarkersRequest
    | ManifestNotice
    | ManifestAck
    | GiveUpNotice
    | DiskProgress
    | ReadBackRequest
    | ReadBackReply
    | WatermarkNotice
    | WatermarkAck
    | CopyMessage
    | Command
    | Answer
    | StartFailed
    | PeerMessage
    | ChunkRequest
    | ChunkReply
    | FetchProgress
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender.

    Attributes:
        session: unique id of one start of the job.
    """

    session: str
    sender: int
    message: Message


def plain_base(base: BaseId) -> list[int]:
    """Return a base as plain data."""
    return [base.timeline, base.step]


def to_base(value: Any) -> BaseId:
    """Return the base encoded by :func:`plain_base`.

    Raises:
        ValueError, TypeError: ``value`` is not a base.
    """
    timeline, step = value
    if type(timeline) is not int or type(step) is not int or min(timeline, step) < 0:
        raise ValueError(f"{value!r} is not a base")
    return BaseId(timeline, step)


def _typed(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"{value!r} is not of type {kind.__name__}")
        return value

    return check


def _same(value: Any) -> Any:
    return value


_BASE = (plain_base, to_base)
_BASES = (lambda bases: [plain_base(b) for b in bases], lambda v: tuple(to_base(b) for b in v))
_TEXT = (_same, _typed(str))
_NUMBER = (_same, _typed(int))
_BYTES = (_same, _typed(bytes))
_FLAG = (_same, _typed(bool))
_MAYBE = (
    lambda base: None if base is None else plain_base(base),
    lambda value: None if value is None else to_base(value),
)
_MARKER = (lambda marker: marker.encode(), lambda value: Marker.decode(value, _WIRE))
_MANIFEST = (lambda manifest: manifest.encode(), lambda value: Manifest.decode(value, _WIRE))

_Fields = dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]
_STEPS: _Fields = {"timeline": _NUMBER, "first": _NUMBER}
_CHUNK: _Fields = {"base": _BASE, "rank": _NUMBER, "offset": _NUMBER}
_FIELDS: dict[type, _Fields] = {
    MarkerNotice: {"marker": _MARKER},
    MarkersRequest: {"base": _BASE},
    ManifestNotice: {"manifest": _MANIFEST},
    ManifestAck: {"base": _BASE},
    GiveUpNotice: {"base": _BASE, "reason": _TEXT},
    DiskProgress: {},
    ReadBackRequest: {"base": _BASE},
    ReadBackReply: {"base": _BASE, "problem": _TEXT},
    WatermarkNotice: {"base": _BASE, "delete": _BASES, "damaged": _BASES},
    WatermarkAck: {"base": _BASE, "held": _BASES, "needed": _BASES},
    CopyRequest: {"place": _NUMBER, "manifest": _MANIFEST},
    CopyProgress: {"place": _NUMBER},
    CopyReply: {"place": _NUMBER, "base": _BASE, "problem": _TEXT},
    CopySettled: {"place": _NUMBER, "base": _BASE},
    Command: {"number": _NUMBER, "phase": _TEXT, "payload": _BYTES},
    Answer: {"number": _NUMBER, "payload": _BYTES},
    StartFailed: {"rank": _NUMBER, "reason": _TEXT},
    PeerRound: {"base": _MAYBE, "everywhere": _MAYBE},
    PeerRoundReply: {"base": _BASE, "state": _TEXT},
    PeerCopyBegin: {"marker": _MARKER, "record": _BYTES},
    PeerCopyChunk: {"base": _BASE, "offset": _NUMBER, "data": _BYTES},
    PeerCopyAck: {"base": _BASE, "received_bytes": _NUMBER, "whole": _FLAG, "problem": _TEXT},
    PeerLogBegin: {
        **_STEPS,
        "last": _NUMBER,
        "record": _BYTES,
        "size_bytes": _NUMBER,
        "index_bytes": _NUMBER,
        "index_digest": _TEXT,
    },
    PeerLogChunk: {**_STEPS, "offset": _NUMBER, "data": _BYTES},
    PeerLogAck: {**_STEPS, "received_bytes": _NUMBER, "state": _TEXT, "problem": _TEXT},
    ChunkRequest: {**_CHUNK, "size_bytes": _NUMBER, "log": _FLAG},
    ChunkReply: {**_CHUNK, "data": _BYTES, "log": _FLAG},
    FetchProgress: {"round": _NUMBER, "done": _FLAG},
}
# The names on the wire stay when a class is renamed: keepers of an older version may be running.
_WIRE_NAMES: dict[type, str] = {
    MarkerNotice: "MarkerTold",
    MarkersRequest: "MarkersWanted",
    ManifestNotice: "ManifestTold",
    ManifestAck: "ManifestKept",
    GiveUpNotice: "GivenUp",
    DiskProgress: "DiskMoves",
    ReadBackRequest: "ReadBackWanted",
    ReadBackReply: "ReadBackTold",
    WatermarkNotice: "WatermarkTold",
    WatermarkAck: "WatermarkKept",
    CopyRequest: "CopyWanted",
    CopyProgress: "CopyGoesOn",
    CopyReply: "CopyTold",
    PeerRoundReply: "PeerSaid",
    PeerCopyBegin: "PeerBegun",
    PeerCopyChunk: "PeerPart",
    PeerCopyAck: "PeerAt",
    PeerLogBegin: "PeerLogBegun",
    PeerLogChunk: "PeerLogPart",
    PeerLogAck: "PeerLogAt",
    ChunkRequest: "PartWanted",
    ChunkReply: "PartTold",
    FetchProgress: "Fetching",
}
_NAMES = {kind: _WIRE_NAMES.get(kind, kind.__name__) for kind in _FIELDS}
_KINDS = {name: kind for kind, name in _NAMES.items()}


def encode_message(envelope: Envelope) -> bytes:
    """Return the bytes of a message."""
    message = envelope.message
    fields = _FIELDS[type(message)]
    values = [pack(getattr(message, name)) for name, (pack, _) in fields.items()]
    packed = [envelope.session, envelope.sender, _NAMES[type(message)], values]
    found: bytes = msgpack.packb(packed, use_bin_type=True)
    return found


def decode_message(data: bytes) -> Envelope:
    """Decode a message.

    Raises:
        FormatError: ``data`` is not a message.
    """
    try:
        session, sender, name, values = msgpack.unpackb(data, raw=False)
        kind = _KINDS[_TEXT[1](name)]
        unpack = [read for _, read in _FIELDS[kind].values()]
        message = kind(*(read(value) for read, value in zip(unpack, values, strict=True)))
        return Envelope(_TEXT[1](session), _NUMBER[1](sender), message)
    except EverstepError:
        raise
    except Exception as error:  # hostile or foreign bytes fail anywhere in msgpack or in a decoder
        raise FormatError(f"not a message between ranks: {error!r}") from error


def accept(data: bytes, session: str) -> Envelope | None:
    """Decode a message; return None if it belongs to another start of the job.

    Raises:
        FormatError: ``data`` is not a message.
    """
    envelope = decode_message(data)
    return envelope if envelope.session == session else None
