"""Messages between ranks.

Every message carries the session: the one start of the job that it belongs to. A process of an
earlier start that wakes up has no effect, because its messages are of another session (I11).
Markers and manifests are sent as the bytes they have on disk, with their digests.

Ranks of a job, and the disks they share. Encoding of the offers and choices of a start: records as
they are on disk, everything else typed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from everstep.commit.job.offers import BaseOffer, Choice, Offer, Piece, Source
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogReader, LogRun, Reach
from everstep.commit.retention import Tier
from everstep.errors import FormatError
from everstep.format import Manifest, Marker, TimelineRecord
from everstep.format.message_codec import (
    Count,
    Decoder,
    Rank,
    Stored,
    Text,
    TypedMessage,
    encode,
    union_of,
)


class Message(TypedMessage, frozen=True):
    """Message from one rank to another."""


class CopyMessage(Message, frozen=True):
    """Message between keepers about copies in other tiers.

    Attributes:
        place: index of the tier among the job's tiers for copies.
    """

    place: Count


class PeerMessage(Message, frozen=True):
    """Message between keepers about copies in peers' memory."""


class MarkerNotice(Message, frozen=True):
    """The sender's marker is durable."""

    marker: Stored[Marker]


class MarkersRequest(Message, frozen=True):
    """The manifest of ``base`` is overdue: send your marker, or the manifest."""

    base: BaseId


class ManifestNotice(Message, frozen=True):
    """All markers are durable: every disk must have this manifest."""

    manifest: Stored[Manifest]


class ManifestAck(Message, frozen=True):
    """The manifest of ``base`` is durable on the sender's disk."""

    base: BaseId


class GiveUpNotice(Message, frozen=True):
    """The sender has no files of ``base`` and never will, so the base will not exist."""

    base: BaseId
    reason: Text


class DiskProgress(Message, frozen=True):
    """The sender's disk is slow, but does not hang: an operation has completed."""


class ReadBackRequest(Message, frozen=True):
    """Read your files of ``base`` back: bases are to be deleted, and none that stays is
    verified."""

    base: BaseId


class ReadBackReply(Message, frozen=True):
    """Result of the read-back of the sender's files of ``base``; empty if they are intact."""

    base: BaseId
    problem: Text


class WatermarkNotice(Message, frozen=True):
    """``base`` is durable on all ranks; the bases in ``delete`` are no longer needed.

    Attributes:
        damaged: bases that some rank cannot read; nothing is replayed from them.
    """

    base: BaseId
    delete: tuple[BaseId, ...]
    damaged: tuple[BaseId, ...] = ()


class WatermarkAck(Message, frozen=True):
    """The sender knows the watermark ``base``.

    Attributes:
        held: bases on the sender's disk, if it leads there.
        needed: those that the logs on that disk need, at any age.
    """

    base: BaseId
    held: tuple[BaseId, ...]
    needed: tuple[BaseId, ...] = ()


class CopyRequest(CopyMessage, frozen=True):
    """Copy your files of the base with this manifest to ``place``."""

    manifest: Stored[Manifest]


class CopyProgress(CopyMessage, frozen=True):
    """The sender is copying to ``place``, or ready to."""


class CopyReply(CopyMessage, frozen=True):
    """The sender's files of ``base`` are in ``place``, its marker last; or the problem."""

    base: BaseId
    problem: Text


class CopySettled(CopyMessage, frozen=True):
    """No rank will be asked for its files of ``base``, or of an older base, any more."""

    base: BaseId


class Command(Message, frozen=True):
    """Step ``number`` of an agreement begins."""

    number: Count
    phase: Text
    payload: bytes


class Answer(Message, frozen=True):
    """The sender has completed step ``number`` of an agreement."""

    number: Count
    payload: bytes


class StartFailed(Message, frozen=True):
    """``rank`` has failed during a start and does not continue."""

    rank: Rank
    reason: Text


class PeerRound(PeerMessage, frozen=True):
    """State of the copies in peers' memory, from rank 0.

    Attributes:
        base: all ranks send their files of this base now; None between rounds.
        everywhere: newest base that is complete with all peers.
    """

    base: BaseId | None
    everywhere: BaseId | None


class PeerRoundReply(PeerMessage, frozen=True):
    """State of the copy of the sender's files of ``base``.

    Attributes:
        state: ``"noted"`` for a copy that is complete with all peers.
    """

    base: BaseId
    state: Annotated[str, Meta(pattern="^(whole|failed|sending|noted)$")]


class PeerCopyBegin(PeerMessage, frozen=True):
    """The sender is about to send its files of a base.

    Attributes:
        record: record of the base's timeline, as it is on the sender's disk.
    """

    marker: Stored[Marker]
    record: bytes


class PeerCopyChunk(PeerMessage, frozen=True):
    """Bytes of the sender's files of ``base``; ``offset`` counts through all files."""

    base: BaseId
    offset: Count
    data: bytes


class PeerCopyAck(PeerMessage, frozen=True):
    """Progress of the copy of the receiver's files of ``base`` that the sender holds.

    Attributes:
        received_bytes: number of bytes received so far.
        whole: all bytes are there and match the digests of the marker.
        problem: reason why no more will be accepted; empty to continue.
    """

    base: BaseId
    received_bytes: Count
    whole: bool
    problem: Text


class PeerLogBegin(PeerMessage, frozen=True):
    """The sender is about to send steps of its log
    (:func:`everstep.restore.fetch.held.pack_steps`).

    Attributes:
        timeline, first, last: the steps.
        record: record of the timeline, as it is on the sender's disk.
        index_bytes: size of the index of the records, at the end of the ``size_bytes``.
        index_digest: digest of the index; each record has a digest of its own.
    """

    timeline: Count
    first: Count
    last: Count
    record: bytes
    size_bytes: Count
    index_bytes: Count
    index_digest: Text


class PeerLogChunk(PeerMessage, frozen=True):
    """Bytes of the sender's steps that begin with ``first``."""

    timeline: Count
    first: Count
    offset: Count
    data: bytes


class PeerLogAck(PeerMessage, frozen=True):
    """Progress of the copy of the receiver's steps that the sender holds.

    Attributes:
        state: ``"more"``: send the next chunk; ``"whole"``: complete and verified; ``"full"``: no
            space until steps are dropped; ``"lost"``: unknown here, begin again; ``"refused"``: see
            ``problem``.
    """

    timeline: Count
    first: Count
    received_bytes: Count
    state: Annotated[str, Meta(pattern="^(more|whole|full|lost|refused)$")]
    problem: Text


class ChunkRequest(Message, frozen=True):
    """At a start: send these bytes of the copy of ``base`` that is held for ``rank``.

    Attributes:
        log: the copy of log steps that begins with that timeline and step, instead of a base.
    """

    base: BaseId
    rank: Rank
    offset: Count
    size_bytes: Count
    log: bool = False


class ChunkReply(Message, frozen=True):
    """Bytes of such a copy."""

    base: BaseId
    rank: Rank
    offset: Count
    data: bytes
    log: bool = False


class FetchProgress(Message, frozen=True):
    """At a start: the sender is alive. ``done``: it has fetched all it needs in this ``round``."""

    round: Count
    done: bool


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message with its sender.

    Attributes:
        session: unique id of one start of the job.
    """

    session: str
    sender: Rank
    message: Message


class _Sealed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An envelope whose message is not decoded yet."""

    session: str
    sender: Rank
    message: msgspec.Raw


_SEALED = Decoder[_Sealed](_Sealed, "a message between ranks")
_MESSAGE = Decoder[Message](union_of(Message), "a message between ranks")


def encode_message(envelope: Envelope) -> bytes:
    """Return the bytes of a message."""
    return encode(envelope)


def decode_message(data: bytes) -> Envelope:
    """Decode a message.

    Raises:
        FormatError: ``data`` is not a message.
    """
    return _open(_SEALED.decode(data))


def accept(data: bytes, session: str) -> Envelope | None:
    """Decode a message; return None if it belongs to another start of the job.

    Raises:
        FormatError: ``data`` is not a message.
    """
    # The session first: a start in another version of everstep may have other messages.
    sealed = _SEALED.decode(data)
    return _open(sealed) if sealed.session == session else None


def _open(sealed: _Sealed) -> Envelope:
    try:
        message = _MESSAGE.decode(sealed.message)
    except FormatError as error:
        raise FormatError(f"from rank {sealed.sender}: {error.message}") from error
    return Envelope(sealed.session, sealed.sender, message)


COORDINATOR = 0
"""The rank that sends requests and collects replies. Its decisions are functions of the replies."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks of a job and their disks.

    A folder shared by all ranks and disks local to each node are treated alike: of the ranks that
    see the same disk, the first leads. It writes the manifest there and deletes there.

    Attributes:
        disks: name of the disk that each rank writes to, by rank.
    """

    disks: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.disks, "a job has at least one rank"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.disks)

    def leader_of(self, rank: int) -> int:
        """Return the rank that leads on the disk of ``rank``."""
        # The first one: each rank computes the same leader without an exchange.
        return self.disks.index(self.disks[rank])

    @property
    def leaders(self) -> tuple[int, ...]:
        """Leading rank of each disk, in order."""
        return tuple(rank for rank in range(self.world) if self.leader_of(rank) == rank)

    def others(self, rank: int) -> tuple[int, ...]:
        """Return all ranks but ``rank``."""
        return tuple(other for other in range(self.world) if other != rank)


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``rank``."""

    rank: int
    message: Message


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
