"""The small JSON files of a run: run, timeline, marker, manifest, audit, annotations, pin.

A record is canonical JSON (sorted keys, one space of indentation, ASCII) whose field ``digest`` is
the xxh3-128 of the same JSON without that field. Decoding accepts exactly the bytes that encoding
produces, so a flipped bit anywhere is detected, white space included. The types and bounds of the
fields are checked by :mod:`msgspec`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from everstep.errors import DamageError, FormatError
from everstep.format.digests import digest
from everstep.format.header import ShardIdentity, refuse_newer
from everstep.format.message_codec import Count
from everstep.format.names import FORMAT_VERSION, parse_shard
from everstep.state.layout import ReplicaDigest
from everstep.state.layout.placement import describe_mismatch, ranks_of_digest

RECORD_BYTES_MAX = 64 << 20

# Below the bound of _Text: a marker with a longer reason could not be decoded again.
_REASON_CHARS_MAX = 2000
_WRITTEN_IF_SET = ("base", "common", "inexact")
_OF_RANK = ("rank", "files", "common", "inexact")

_Text = Annotated[str, Meta(max_length=4096)]
_World = Annotated[int, Meta(ge=0, le=1 << 20)]
_Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
# Ids made by everstep have 32 hexadecimal digits. An id becomes an argument of a command and a part
# of names of sockets, so no other characters are accepted.
_RunId = Annotated[str, Meta(pattern=r"\A(?!-)[0-9A-Za-z_.-]{0,64}\Z")]


def canonical(fields: Mapping[str, Any]) -> bytes:
    """Return the canonical JSON of a record.

    Raises:
        ValueError: a number is not finite.
        RecursionError: the fields are nested too deeply.
    """
    return json.dumps(fields, sort_keys=True, indent=1, allow_nan=False).encode("ascii") + b"\n"


class _Record:
    """Record with the fields of a dataclass.

    Attributes:
        KIND: field ``kind`` of the JSON.
    """

    __slots__ = ()
    KIND: ClassVar[str]

    def encode(self) -> bytes:
        return _encode(self.KIND, _fields_of(self))

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> Self:
        found: Self = _convert(_decode(cls.KIND, data, path), cls, path)
        return found


@dataclass(frozen=True, slots=True)
class RunRecord(_Record):
    """``run.json``: marks a directory as a run."""

    KIND = "run"

    run: _RunId


@dataclass(frozen=True, slots=True)
class TimelineRecord(_Record):
    """``timeline.json``: created exclusively when a process takes the run over; the fence.

    Attributes:
        timeline: its number; processes of smaller numbers are fenced off (I11).
        parent: timeline that it forked from; None for a fresh start.
        fork_step: step of ``parent`` at which it forked; later bases of the parent are not in this
            timeline's history.
        exact: everything up to the fork is exact (inherited, I9).
        world: number of ranks.
        fingerprint: versions and machine, for users and for the exactness matrix.
        created_unix_s: time of creation, for users.
        base: timeline and step of the base that was restored, if the fork was reached by replay
            from it; written only then.
    """

    KIND = "timeline"

    run: _Text
    timeline: Count
    parent: Count | None
    fork_step: Count
    exact: bool
    world: _World
    fingerprint: Mapping[str, str]
    created_unix_s: float
    base: tuple[Count, Count] | None = None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Entry of a marker for one file: its length, and digests of its header and of the entire
    file."""

    name: _Text
    length: Count
    header_length: Count
    header_digest: _Hex
    digest: _Hex


@dataclass(frozen=True, slots=True)
class Marker(_Record):
    """``rank-00000.done``: this rank's files of this base are durable.

    Attributes:
        step, lsn: the user's step, and the number of optimizer updates before it.
        exact: the state is exact, by lineage (I9).
        common: digests of entries that this rank shares with others; the others' must be equal.
        inexact: reason why the state is not exact, if known; written only then.
    """

    KIND = "marker"

    run: _Text
    timeline: Count
    step: Count
    lsn: Count
    rank: _World
    world: _World
    exact: bool
    files: tuple[FileRecord, ...]
    common: tuple[ReplicaDigest, ...] = ()
    inexact: _Text = ""

    @classmethod
    def of(cls, identity: ShardIdentity, files: tuple[FileRecord, ...]) -> Marker:
        """Return the marker of files whose headers have this identity."""
        return cls(
            run=identity.run,
            timeline=identity.timeline,
            step=identity.step,
            lsn=identity.lsn,
            rank=identity.rank,
            world=identity.world,
            exact=identity.exact,
            files=files,
            common=identity.common,
            inexact=identity.inexact[:_REASON_CHARS_MAX],
        )

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> Marker:
        return _marker(_decode(cls.KIND, data, path), path)


@dataclass(frozen=True, slots=True)
class Manifest:
    """``manifest.json``: the commit record of a base. A pure function of the markers."""

    markers: tuple[Marker, ...] = field(default=())

    @property
    def step(self) -> int:
        return self.markers[0].step

    @property
    def timeline(self) -> int:
        return self.markers[0].timeline

    @property
    def exact(self) -> bool:
        """True if the files of every rank are exact (I9)."""
        return all(marker.exact for marker in self.markers)

    def encode(self) -> bytes:
        ranks = []
        for marker in self.markers:
            # "exact" of a rank is written only where it differs from that of the base, which
            # decode() assumes otherwise.
            own = {name: value for name, value in _fields_of(marker).items() if name in _OF_RANK}
            ranks.append(own | ({} if marker.exact == self.exact else {"exact": marker.exact}))
        base = {**_base_fields(self.markers[0]), "exact": self.exact}
        return _encode("manifest", {**base, "ranks": ranks})

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> Manifest:
        fields = _decode("manifest", data, path)
        ranks = _convert(fields.get("ranks"), list[dict[str, Any]], path)
        markers = []
        for rank in ranks:
            own = {name: rank[name] for name in (*_OF_RANK, "exact") if name in rank}
            markers.append(_marker({**fields, **own}, path))
        world = markers[0].world if markers else 1
        # Counted first: a record may claim any number of ranks.
        if len(markers) != world or any(marker.rank != n for n, marker in enumerate(markers)):
            raise FormatError(f"{path}: the manifest does not list each of {world} ranks once")
        found = cls(tuple(markers))
        if found.exact != fields.get("exact"):
            raise FormatError(f"{path}: 'exact' contradicts the ranks' entries")
        return found


@dataclass(frozen=True, slots=True)
class AuditRecord(_Record):
    """``audit.json``: comparison of a base with a replay from an older one (I9).

    Attributes:
        timeline, step: timeline and step of the base.
        manifest: digest of the manifest of the compared base.
        before: timeline and step of the older base.
        verdict: each of ``entries`` has the digest of the replay; ``count`` have not; or the
            comparison was impossible, because of ``reason``.
        steps, updates: number of replayed steps and updates.
        differing: names of the first entries that differ.
        fingerprint: versions and machine of the replay.
        created_unix_s: time of creation, for users.
    """

    KIND = "audit"

    run: _Text
    timeline: Count
    step: Count
    manifest: _Hex
    before: tuple[Count, Count]
    verdict: Literal["equal", "different", "unchecked"]
    reason: _Text
    steps: Count
    updates: Count
    entries: Count
    count: Count
    differing: tuple[str, ...]
    fingerprint: Mapping[str, str]
    created_unix_s: float

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> AuditRecord:
        found: AuditRecord = _convert(_decode(cls.KIND, data, path), cls, path)
        if len(found.differing) > found.count or (found.count and found.verdict == "equal"):
            raise FormatError(f"{path}: inconsistent audit")
        return found


@dataclass(frozen=True, slots=True)
class Annotations(_Record):
    """``annotations.json``: metrics and a note that the user gave to a base.

    Attributes:
        timeline, step: timeline and step of the base.
        metrics: finite numbers by name.
        note: text for people.
    """

    KIND = "annotations"

    timeline: Count
    step: Count
    metrics: Mapping[_Text, float]
    note: _Text


@dataclass(frozen=True, slots=True)
class PinRecord(_Record):
    """``pin.json``: retention keeps the base while this file exists, whatever it contains.

    Attributes:
        timeline, step: timeline and step of the base.
        note: text for people.
        created_unix_s: time of creation, for users.
    """

    KIND = "pin"

    timeline: Count
    step: Count
    note: _Text
    created_unix_s: float


def manifest_of(markers: Mapping[int, Marker]) -> Manifest | None:
    """Return the manifest of ``markers``; None while some are missing or contradict each other."""
    if not markers:
        return None
    first = next(iter(markers.values()))
    # The number is compared first: a marker that claims a huge world must not make this allocate a
    # list of that length.
    if len(markers) != first.world or sorted(markers) != list(range(first.world)):
        return None
    ordered = tuple(markers[rank] for rank in range(first.world))
    # Ranks may differ in `exact`; all other fields must be equal.
    comparable = (replace(marker, exact=first.exact) for marker in ordered)
    if any(_base_fields(marker) != _base_fields(first) for marker in comparable):
        return None
    if any(marker.rank != rank for rank, marker in enumerate(ordered)):
        return None
    if describe_mismatch({marker.rank: marker.common for marker in ordered}):
        return None
    return Manifest(ordered)


def _base_fields(marker: Marker) -> dict[str, Any]:
    """Return the fields that are equal for all ranks of a base, except ``exact``."""
    names = ("run", "timeline", "step", "lsn", "world", "exact")
    return {name: getattr(marker, name) for name in names}


def _fields_of(record: Any) -> dict[str, Any]:
    fields = asdict(record)
    return {name: value for name, value in fields.items() if value or name not in _WRITTEN_IF_SET}


def _convert(fields: Any, kind: Any, path: PurePath) -> Any:
    """Return fields as an object of a type.

    Raises:
        FormatError: types or bounds are violated, or a field is missing.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{path}: {error}") from error


def _marker(fields: dict[str, Any], path: PurePath) -> Marker:
    found: Marker = _convert(fields, Marker, path)
    rank = found.rank
    for file in found.files:
        # The name is appended to the path of the base: only a parsed name cannot lead out of it.
        if (parse_shard(file.name) or (None,))[0] != rank or file.header_length > file.length:
            raise FormatError(f"{path}: {file.name!r} is not a file of rank {rank}")
    if not found.files or len({file.name for file in found.files}) != len(found.files):
        raise FormatError(f"{path}: rank {rank} has no files, or a duplicate file")
    for one in found.common:
        _convert((one.ranks, one.section, one.count, one.digest), _Common, path)
        try:
            ranks = ranks_of_digest(one)
        except ValueError as error:
            raise FormatError(f"{path}: {one.ranks!r} is not a list of ranks") from error
        if rank not in ranks or max(ranks) >= found.world:
            raise FormatError(f"{path}: rank {rank} of {found.world} is not among {one.ranks!r}")
    unique = len({(one.ranks, one.section) for one in found.common}) == len(found.common)
    if not unique or fields.get("common") == []:
        raise FormatError(f"{path}: 'common' is empty, or has duplicates")
    return found


_Common = tuple[_Text, _Text, Count, _Hex]


def _encode(kind: str, fields: Mapping[str, Any]) -> bytes:
    fields = {"kind": kind, "format": FORMAT_VERSION, **fields}
    return canonical({**fields, "digest": digest(canonical(fields))})


def _decode(kind: str, data: bytes, path: PurePath) -> dict[str, Any]:
    if len(data) > RECORD_BYTES_MAX:
        raise FormatError(f"{path}: {len(data)} bytes are too many for a record")
    try:
        found = json.loads(data)
        if not isinstance(found, dict) or found.get("kind") != kind:
            raise FormatError(f"{path}: not a {kind} record")
        claimed = found.pop("digest", None)
        genuine = digest(canonical(found)) == claimed
        # The digest covers the values only. The comparison of bytes covers white space and the
        # order of keys.
        genuine = genuine and canonical({**found, "digest": claimed}) == data
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a record: {error}") from error
    version = _convert(found.get("format"), Annotated[int, Meta(ge=1)], path)
    if not genuine:
        raise DamageError(f"{path}: the record's digest does not match its contents", path=path)
    # Checked after the digest, which all formats compute in the same way: so a flipped bit is
    # reported as damage, not as a newer format.
    refuse_newer(version, path)
    return found
