"""The small JSON files of a run: run, timeline, marker, manifest, audit.

A record is canonical JSON (sorted keys, one space of indentation, ASCII) whose field ``digest`` is
the xxh3-128 of the same JSON without that field. Decoding accepts exactly the bytes that encoding
produces, so a flipped bit anywhere is detected, white space included.

The canonical form is that of ``json.dumps(fields, sort_keys=True, indent=1, allow_nan=False)`` plus
a line end. :func:`canonical` is several times faster, because Python's compiled encoder does not
support indentation; decoding encodes each record again to compare it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from json.encoder import encode_basestring_ascii
from pathlib import PurePath
from typing import Any

from everstep.errors import DamageError, FormatError, NewerFormatError
from everstep.format.digests import DIGEST_CHARS, digest
from everstep.format.header import ShardIdentity
from everstep.format.names import FORMAT_VERSION, parse_shard
from everstep.state.layout.replica_digest import ReplicaDigest, describe_mismatch, ranks_of_digest

__all__ = [
    "RECORD_BYTES_MAX",
    "VERDICTS",
    "AuditRecord",
    "FileRecord",
    "Manifest",
    "Marker",
    "RunRecord",
    "TimelineRecord",
    "canonical",
    "manifest_of",
    "rows_of",
]

_encode_scalar = json.JSONEncoder(allow_nan=False).encode
_MARGIN = "\n "


def rows_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return each field as encoded, by name.

    Raises:
        ValueError: a number is not finite.
        RecursionError: the fields are nested too deeply.
    """
    return {
        name: f"{encode_basestring_ascii(name)}: {_encode_value(value, _MARGIN)}"
        for name, value in fields.items()
    }


def canonical(rows: Mapping[str, str]) -> bytes:
    """Return the JSON of the fields with these rows; there is at least one."""
    body = f",{_MARGIN}".join([rows[name] for name in sorted(rows)])
    return f"{{{_MARGIN}{body}\n}}\n".encode("ascii")


def _encode_value(value: Any, margin: str) -> str:
    """Encode a value; lines after its first begin with ``margin``."""
    kind = type(value)
    if kind is str:
        return encode_basestring_ascii(value)
    if kind is int:
        return repr(value)
    if not value or kind not in (dict, list, tuple):
        return _encode_scalar(value)
    inner = margin + " "
    if kind is dict:
        rows = [
            f"{encode_basestring_ascii(name)}: {_encode_value(value[name], inner)}"
            for name in sorted(value)
        ]
        return f"{{{inner}{f',{inner}'.join(rows)}{margin}}}"
    return f"[{inner}{f',{inner}'.join([_encode_value(item, inner) for item in value])}{margin}]"


RECORD_BYTES_MAX = 64 << 20
VERDICTS = ("equal", "different", "unchecked")
"""Verdicts of an audit."""

_NUMBER_MAX = (1 << 63) - 1
_WORLD_MAX = 1 << 20
_REASON_CHARS_MAX = 2000


# Ids made by everstep have 32 hexadecimal digits. An id becomes an argument of a command and a part
# of names of sockets, so no other characters are accepted.
_RUN_ID = re.compile(r"(?!-)[0-9A-Za-z_.-]{0,64}")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``run.json``: marks a directory as a run."""

    run: str
    format: int = FORMAT_VERSION

    def encode(self) -> bytes:
        return _encode("run", {"format": self.format, "run": self.run})

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> RunRecord:
        fields = _decode("run", data, path)
        run = fields.text("run")
        if not _RUN_ID.fullmatch(run):
            raise FormatError(f"{path}: {run[:64]!r} is not a valid run id")
        return cls(run, fields.number("format"))


@dataclass(frozen=True, slots=True)
class TimelineRecord:
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

    run: str
    timeline: int
    parent: int | None
    fork_step: int
    exact: bool
    world: int
    fingerprint: Mapping[str, str]
    created_unix_s: float
    base: tuple[int, int] | None = None

    def encode(self) -> bytes:
        return _encode(
            "timeline",
            {
                "format": FORMAT_VERSION,
                "run": self.run,
                "timeline": self.timeline,
                "parent": self.parent,
                "fork_step": self.fork_step,
                "exact": self.exact,
                "world": self.world,
                "fingerprint": dict(self.fingerprint),
                "created_unix_s": self.created_unix_s,
                **({} if self.base is None else {"base": list(self.base)}),
            },
        )

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> TimelineRecord:
        fields = _decode("timeline", data, path)
        return cls(
            fields.text("run"),
            fields.number("timeline"),
            None if fields.value("parent") is None else fields.number("parent"),
            fields.number("fork_step"),
            fields.flag("exact"),
            fields.number("world", _WORLD_MAX),
            fields.texts("fingerprint"),
            fields.real("created_unix_s"),
            fields.pair("base"),
        )


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Entry of a marker for one file: its length, and digests of its header and of the entire
    file."""

    name: str
    length: int
    header_length: int
    header_digest: str
    digest: str


@dataclass(frozen=True, slots=True)
class Marker:
    """``rank-00000.done``: this rank's files of this base are durable.

    Attributes:
        step, lsn: the user's step, and the number of optimizer updates before it.
        exact: the state is exact, by lineage (I9).
        common: digests of entries that this rank shares with others; the others' must be equal.
        inexact: reason why the state is not exact, if known; written only then.
    """

    run: str
    timeline: int
    step: int
    lsn: int
    rank: int
    world: int
    exact: bool
    files: tuple[FileRecord, ...]
    common: tuple[ReplicaDigest, ...] = ()
    inexact: str = ""

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

    def encode(self) -> bytes:
        return _encode("marker", {**_base_fields(self), **_rank_fields(self)})

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> Marker:
        fields = _decode("marker", data, path)
        return _marker(fields, fields)


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
        fields = {**_base_fields(self.markers[0]), "exact": self.exact}
        ranks = [_rank_fields(marker) for marker in self.markers]
        for marker, rank in zip(self.markers, ranks, strict=True):
            rank.update({} if marker.exact == self.exact else {"exact": marker.exact})
        return _encode("manifest", {**fields, "ranks": ranks})

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> Manifest:
        fields = _decode("manifest", data, path)
        ranks = fields.items("ranks")
        markers = tuple(_marker(fields, rank) for rank in ranks)
        world = fields.number("world", _WORLD_MAX)
        complete = len(markers) == world and world > 0
        if not complete or [marker.rank for marker in markers] != list(range(world)):
            raise FormatError(f"{path}: the manifest does not list each of {world} ranks once")
        found = cls(markers)
        if found.exact != fields.flag("exact"):
            raise FormatError(f"{path}: 'exact' contradicts the ranks' entries")
        return found


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """``audit.json``: comparison of a base with a replay from an older one (I9).

    Attributes:
        timeline, step: timeline and step of the base.
        manifest: digest of the manifest of the compared base.
        before: timeline and step of the older base.
        verdict: one of :data:`VERDICTS`: each of ``entries`` has the digest of the replay;
        ``count``
            have not; or the comparison was impossible, because of ``reason``.
        steps, updates: number of replayed steps and updates.
        differing: names of the first entries that differ.
        fingerprint: versions and machine of the replay.
        created_unix_s: time of creation, for users.
    """

    run: str
    timeline: int
    step: int
    manifest: str
    before: tuple[int, int]
    verdict: str
    reason: str
    steps: int
    updates: int
    entries: int
    count: int
    differing: tuple[str, ...]
    fingerprint: Mapping[str, str]
    created_unix_s: float

    def encode(self) -> bytes:
        fields = asdict(self)
        fields |= {"before": list(self.before), "differing": list(self.differing)}
        return _encode("audit", {"format": FORMAT_VERSION, **fields})

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> AuditRecord:
        fields = _decode("audit", data, path)
        before = fields.pair("before")
        verdict = fields.text("verdict")
        if before is None or verdict not in VERDICTS:
            raise FormatError(f"{path}: audit without an older base, or without a verdict")
        count = fields.number("count")
        differing = fields.names("differing")
        if len(differing) > count or (count and verdict == "equal"):
            raise FormatError(f"{path}: inconsistent audit")
        return cls(
            fields.text("run"),
            fields.number("timeline"),
            fields.number("step"),
            fields.hex("manifest"),
            before,
            verdict,
            fields.text("reason"),
            fields.number("steps"),
            fields.number("updates"),
            fields.number("entries"),
            count,
            differing,
            fields.texts("fingerprint"),
            fields.real("created_unix_s"),
        )


def manifest_of(markers: Mapping[int, Marker]) -> Manifest | None:
    """Return the manifest of ``markers``; None while some are missing or contradict each other."""
    if not markers:
        return None
    first = next(iter(markers.values()))
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
    return {
        "format": FORMAT_VERSION,
        "run": marker.run,
        "timeline": marker.timeline,
        "step": marker.step,
        "lsn": marker.lsn,
        "world": marker.world,
        "exact": marker.exact,
    }


def _rank_fields(marker: Marker) -> dict[str, Any]:
    files = [
        {
            "name": file.name,
            "length": file.length,
            "header_length": file.header_length,
            "header_digest": file.header_digest,
            "digest": file.digest,
        }
        for file in marker.files
    ]
    common = [asdict(one) for one in marker.common]
    found: dict[str, Any] = {"rank": marker.rank, "files": files}
    found |= {"common": common} if common else {}
    return found | ({"inexact": marker.inexact} if marker.inexact else {})


def _marker(base: _Fields, rank: _Fields) -> Marker:
    number = rank.number("rank", _WORLD_MAX)
    files = []
    for item in rank.items("files"):
        name = item.text("name")
        if (parse_shard(name) or (None,))[0] != number:
            raise FormatError(f"{base.path}: {name!r} is not a file of rank {number}")
        length = item.number("length")
        header_length = item.number("header_length", length)
        files.append(
            FileRecord(name, length, header_length, item.hex("header_digest"), item.hex("digest"))
        )
    if not files or len({file.name for file in files}) != len(files):
        raise FormatError(f"{base.path}: rank {number} has no files, or a duplicate file")
    world = base.number("world", _WORLD_MAX)
    return Marker(
        base.text("run"),
        base.number("timeline"),
        base.number("step"),
        base.number("lsn"),
        number,
        world,
        (rank if "exact" in rank.fields else base).flag("exact"),
        tuple(files),
        _common(rank, number, world) if "common" in rank.fields else (),
        rank.text("inexact") if "inexact" in rank.fields else "",
    )


def _common(rank: _Fields, number: int, world: int) -> tuple[ReplicaDigest, ...]:
    found = []
    for item in rank.items("common"):
        one = ReplicaDigest(
            item.text("ranks"), item.text("section"), item.number("count"), item.hex("digest")
        )
        found.append(one)
        try:
            ranks = ranks_of_digest(one)
        except ValueError as error:
            raise FormatError(f"{rank.path}: {one.ranks!r} is not a list of ranks") from error
        if number not in ranks or max(ranks) >= world:
            raise FormatError(f"{rank.path}: rank {number} of {world} is not among {one.ranks!r}")
    if not found or len({(one.ranks, one.section) for one in found}) != len(found):
        raise FormatError(f"{rank.path}: 'common' is empty, or has duplicates")
    return tuple(found)


def _encode(kind: str, fields: Mapping[str, Any]) -> bytes:
    rows = rows_of({"kind": kind, **fields})
    rows |= rows_of({"digest": digest(canonical(rows))})
    return canonical(rows)


def _decode(kind: str, data: bytes, path: PurePath) -> _Fields:
    if len(data) > RECORD_BYTES_MAX:
        raise FormatError(f"{path}: {len(data)} bytes are too many for a record")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a record: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise FormatError(f"{path}: not a {kind} record")
    version = found.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{path}: no format version")
    claimed = found.pop("digest", None)
    try:
        rows = rows_of(found)
        genuine = digest(canonical(rows)) == claimed
        rows |= rows_of({"digest": claimed})
        genuine = genuine and canonical(rows) == data
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a record: {error}") from error
    if not genuine:
        raise DamageError(f"{path}: the record's digest does not match its contents", path=path)
    # Checked after the digest, which all formats compute in the same way: so a flipped bit is
    # reported as damage, not as a newer format.
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path}: written in format {version}; this everstep reads up to {FORMAT_VERSION}",
            path=path,
            hint="use the version of everstep that wrote it, or a newer one",
        )
    return _Fields(found, path)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Decoded JSON, read with checks of types and bounds; a hostile record raises FormatError."""

    fields: Mapping[str, Any]
    path: PurePath

    def value(self, name: str) -> Any:
        if name not in self.fields:
            raise FormatError(f"{self.path}: field {name!r} is missing")
        return self.fields[name]

    def number(self, name: str, largest: int = _NUMBER_MAX) -> int:
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
            raise FormatError(f"{self.path}: {name!r} is not an integer in 0..{largest}")
        return value

    def pair(self, name: str) -> tuple[int, int] | None:
        value = self.fields.get(name)
        if value is None:
            return None
        numbers = isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)
        if not numbers or not all(0 <= n <= _NUMBER_MAX for n in value):
            raise FormatError(f"{self.path}: {name!r} is not a pair of integers")
        return value[0], value[1]

    def real(self, name: str) -> float:
        value = self.value(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise FormatError(f"{self.path}: {name!r} is not a number")
        return value

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise FormatError(f"{self.path}: {name!r} is neither true nor false")
        return value

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str) or len(value) > 4096:
            raise FormatError(f"{self.path}: {name!r} is not a string, or too long")
        return value

    def hex(self, name: str) -> str:
        value = self.text(name)
        if len(value) != DIGEST_CHARS or value.strip("0123456789abcdef"):
            raise FormatError(f"{self.path}: {name!r} is not a digest")
        return value

    def texts(self, name: str) -> dict[str, str]:
        value = self.value(name)
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise FormatError(f"{self.path}: {name!r} is not a mapping to strings")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        value = self.value(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise FormatError(f"{self.path}: {name!r} is not a list of strings")
        return tuple(value)

    def items(self, name: str) -> list[_Fields]:
        value = self.value(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise FormatError(f"{self.path}: {name!r} is not a list of mappings")
        return [_Fields(item, self.path) for item in value]
