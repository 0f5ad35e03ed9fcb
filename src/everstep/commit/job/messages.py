"""What ranks tell each other, and how that is written as bytes.

Every message carries the session: the one start of the job that it belongs to. A process of an
earlier start that wakes up speaks to nobody: what it says is not of this session (I11).
Markers and manifests travel in the bytes that they have on disk, with their digests.
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
    """The manifest of ``base`` does not come: who has a marker, or the manifest?"""

    base: BaseId


@dataclass(frozen=True, slots=True)
class ManifestNotice:
    """All markers are durable: every disk is to have this manifest."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ManifestAck:
    """The manifest of ``base`` is durable on the sender's disk."""

    base: BaseId


@dataclass(frozen=True, slots=True)
class GiveUpNotice:
    """The sender has no files of ``base`` and never will: the base will not exist."""

    base: BaseId
    reason: str


@dataclass(frozen=True, slots=True)
class DiskProgress:
    """The sender's disk is slow, perhaps, and does not hang: an operation has come back."""


@dataclass(frozen=True, slots=True)
class ReadBackRequest:
    """Read your files of ``base`` back: something is to be deleted, and nothing is verified."""

    base: BaseId


@dataclass(frozen=True, slots=True)
class ReadBackReply:
    """Whether the sender's files of ``base`` are what they should be; empty: they are."""

    base: BaseId
    problem: str


@dataclass(frozen=True, slots=True)
class WatermarkNotice:
    """``base`` is durable on all ranks; ``delete`` is no longer needed.

    Attributes:
        damaged: bases of which a rank cannot read its files: nothing is replayed from there.
    """

    base: BaseId
    delete: tuple[BaseId, ...]
    damaged: tuple[BaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class WatermarkAck:
    """The sender knows of the watermark ``base``; its disk, if it leads there, holds ``held``, of
    which the logs there need ``needed``, however old they are."""

    base: BaseId
    held: tuple[BaseId, ...]
    needed: tuple[BaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Copy your part of the base with this manifest to ``place``.

    Attributes:
        place: which of the job's places that keep copies.
    """

    place: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The sender is at work for ``place``, or ready to be."""

    place: int


@dataclass(frozen=True, slots=True)
class CopyReply:
    """The sender's part of ``base`` is in ``place``, its marker last; or why it is not."""

    place: int
    base: BaseId
    problem: str


@dataclass(frozen=True, slots=True)
class CopySettled:
    """Nobody is going to be asked for a part of ``base``, or of an older one, any more."""

    place: int
    base: BaseId


@dataclass(frozen=True, slots=True)
class Command:
    """Of an agreement: step ``number`` of it begins."""

    number: int
    phase: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Of an agreement: the sender has done step ``number``."""

    number: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class StartFailed:
    """At a start: ``rank`` has raised an error, and does not go on."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRound:
    """Of copies in peers' memory: all ranks send their parts of ``base`` now (None: of none), and
    ``everywhere`` is whole with all peers."""

    base: BaseId | None
    everywhere: BaseId | None


@dataclass(frozen=True, slots=True)
class PeerRoundReply:
    """What has become of the sender's part of ``base``: ``"whole"``, ``"failed"``, or, of one that
    is everywhere, ``"noted"``."""

    base: BaseId
    state: str


@dataclass(frozen=True, slots=True)
class PeerCopyBegin:
    """The sender is going to send its files of a base; ``record`` is that of the timeline of the
    base, as it is on the sender's disk."""

    marker: Marker
    record: bytes


@dataclass(frozen=True, slots=True)
class PeerCopyChunk:
    """Bytes of the sender's files of ``base``, counted through all of them."""

    base: BaseId
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PeerCopyAck:
    """How much of its part of ``base`` the sender of the message holds for its receiver.

    Attributes:
        whole: all of it, with the digests that the marker has.
        problem: why there will be no more of it; empty: go on.
    """

    base: BaseId
    received_bytes: int
    whole: bool
    problem: str


@dataclass(frozen=True, slots=True)
class PeerLogBegin:
    """The sender is going to send steps of its log
    (:func:`everstep.restore.fetch.peer_log.pack_steps`).

    Attributes:
        timeline, first, last: the steps.
        record: that of the timeline, as it is on the sender's disk.
        index_bytes: of the ``size_bytes``, at the end, those that say what the records are.
        index_digest: of these; each record has a digest of its own.
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
    """How much of such steps the sender of the message holds for its receiver.

    Attributes:
        state: ``"more"`` is waited for; ``"whole"``: all are there, with their digests; ``"full"``:
            there is no room before steps are let go; ``"refused"``, for ``problem``.
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
        log: of the steps of its log that begin with that timeline and step, and of no base.
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
    """At a start: the sender is there; ``done``: it has fetched what it needs in this ``round``."""

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
"""Between keepers, of copies in peers' memory."""

CopyMessage = CopyRequest | CopyProgress | CopyReply | CopySettled
"""Between keepers, of copies in other tiers."""

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
    """A message, and who sent it.

    Attributes:
        session: names one start of the job; no other start has the same.
    """

    session: str
    sender: int
    message: Message


def plain_base(base: BaseId) -> list[int]:
    """A base as plain data."""
    return [base.timeline, base.step]


def to_base(value: Any) -> BaseId:
    """The base that ``value`` was made of.

    Raises:
        ValueError, TypeError: it is something else.
    """
    timeline, step = value
    if type(timeline) is not int or type(step) is not int or min(timeline, step) < 0:
        raise ValueError(f"{value!r} is no base")
    return BaseId(timeline, step)


def _typed(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"{value!r} is no {kind.__name__}")
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
_PART: _Fields = {"base": _BASE, "rank": _NUMBER, "offset": _NUMBER}
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
    ChunkRequest: {**_PART, "size_bytes": _NUMBER, "log": _FLAG},
    ChunkReply: {**_PART, "data": _BYTES, "log": _FLAG},
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
    """The bytes of a message."""
    message = envelope.message
    fields = _FIELDS[type(message)]
    values = [pack(getattr(message, name)) for name, (pack, _) in fields.items()]
    packed = [envelope.session, envelope.sender, _NAMES[type(message)], values]
    found: bytes = msgpack.packb(packed, use_bin_type=True)
    return found


def decode_message(data: bytes) -> Envelope:
    """The message that ``data`` is.

    Raises:
        FormatError: it is none.
    """
    try:
        session, sender, name, values = msgpack.unpackb(data, raw=False)
        kind = _KINDS[_TEXT[1](name)]
        unpack = [read for _, read in _FIELDS[kind].values()]
        message = kind(*(read(value) for read, value in zip(unpack, values, strict=True)))
        return Envelope(_TEXT[1](session), _NUMBER[1](sender), message)
    except EverstepError:
        raise
    except Exception as error:  # of msgpack, or of a shape that is not ours
        raise FormatError(f"not a message between ranks: {error!r}") from error


def accept(data: bytes, session: str) -> Envelope | None:
    """The message that ``data`` is, or None: it is of another start of the job.

    Raises:
        FormatError: it is no message.
    """
    envelope = decode_message(data)
    return envelope if envelope.session == session else None
