"""Header of a shard: an ordinary safetensors header with everstep's metadata.

``8 bytes`` little-endian length N, then N bytes of JSON padded with spaces, so that 8 + N is a
multiple of 4096. The space is reserved before the body is written, from sizes known by then; the
header itself is written last.

Files of a base before they are written, and the place of each entry in them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from everstep.errors import FormatError, NewerFormatError
from everstep.format.digests import DIGEST_CHARS
from everstep.format.message_codec import Count
from everstep.format.names import FORMAT_VERSION, shard_name
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES
from everstep.state.layout import Entry, Placed, ReplicaDigest, ShardLayout
from everstep.state.layout.entries import DTYPE_BYTES
from everstep.state.layout.shards import at_lsn, plan_shards

LENGTH_BYTES = 8
METADATA_KEY = "everstep"
HEADER_SIZE_BYTES_MAX = 100_000_000
# Maximum of Count; sizes and offsets of tensors are signed 64-bit integers in torch.
_SIZE_MAX = (1 << 63) - 1
_Sizes = Annotated[tuple[Count, ...], Meta(max_length=64)]


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Identity of a shard: its base, and its rank.

    Attributes:
        behind_mark: the base was taken by ``save()`` after the log's step mark of its step, so
            entries without an owner may have changed since the mark.
        common: digests of entries shared with other ranks; for the marker, not in the header.
        inexact: reason why the base is not exact, if known; for the marker, not in the header.
        static: the file holds entries that never change. Later bases may link to it, so timeline,
            step and LSN are those of the base that it was written for.
    """

    run: str
    timeline: int
    step: int
    lsn: int
    rank: int
    world: int
    exact: bool
    behind_mark: bool = False
    common: tuple[ReplicaDigest, ...] = ()
    inexact: str = ""
    static: bool = False


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """A decoded header.

    Attributes:
        placed: entries in file order.
        digests: digest of each entry, in the same order.
        aliases: ``other name -> entry name``.
        room_bytes: size of the header, and file offset of the first data byte.
    """

    identity: ShardIdentity
    placed: tuple[Placed, ...]
    digests: tuple[str, ...]
    aliases: Mapping[str, str]
    room_bytes: int


# Fields of an identity that each header has, in this order.
_IDENTITY = ("run", "timeline", "step", "lsn", "rank", "world", "exact")


def refuse_newer(version: int, path: PurePath) -> None:
    """Refuse a file of a format that this everstep does not know.

    Raises:
        NewerFormatError: a newer everstep wrote it.
    """
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path}: written in format {version}; this everstep reads up to {FORMAT_VERSION}",
            path=path,
            hint="use the version of everstep that wrote it, or a newer one",
        )


def encode_header(
    identity: ShardIdentity,
    placed: Sequence[Placed],
    digests: Sequence[str],
    aliases: Mapping[str, str],
    room_bytes: int,
) -> bytes:
    """Return the header, exactly ``room_bytes`` long."""
    text = _header_json(identity, placed, digests, aliases)
    padding = room_bytes - LENGTH_BYTES - len(text)
    assert padding >= 0, "the reserved room is computed from the same entries"
    return struct.pack("<Q", room_bytes - LENGTH_BYTES) + text + b" " * padding


def header_size_bytes(
    identity: ShardIdentity,
    placed: Sequence[Placed],
    object_names: Sequence[str],
    aliases: Mapping[str, str],
) -> int:
    """Return the bytes to reserve for the header before digests and sizes of objects are known.

    The same for every base of this layout, at any step.
    """
    # The header is written last, in the place reserved before the body. So each number that may
    # change until then is given its maximum number of digits.
    widest = 10 ** len(str(_SIZE_MAX)) - 1
    # "false" is longer than "true", and "behind_mark" is written only if true.
    identity = replace(
        identity, timeline=widest, step=widest, lsn=widest, exact=False, behind_mark=True
    )
    known = at_lsn(ShardLayout(tuple(placed)), widest).placed
    unknown = [
        Placed(Entry.whole(name, "U8", (widest,), lsn=widest), widest, 2 * widest)
        for name in object_names
    ]
    guess = [*known, *unknown]
    text = _header_json(identity, guess, ["0" * DIGEST_CHARS] * len(guess), aliases)
    room = -(-(LENGTH_BYTES + len(text)) // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
    assert room <= HEADER_SIZE_BYTES_MAX, "shards are split before the header grows this large"
    return room


def decode_header(data: bytes, file_bytes: int, path: PurePath) -> ShardHeader:
    """Decode and check a header whose digest has already been verified.

    Raises:
        FormatError: the header does not describe a file of ``file_bytes`` bytes: holes, overlaps,
            sizes that do not match, ranges outside of the file.
    """
    # The digest proves that these are the bytes that were written, not that they make sense: a
    # program other than everstep may have written them.
    try:
        fields = _load(str(data[LENGTH_BYTES:], "utf-8"))
        metadata = _load(fields.pop("__metadata__")[METADATA_KEY])
        return _decode(fields, metadata, len(data), file_bytes, path)
    # It has its path already, and must not be reported as a malformed file.
    except NewerFormatError:
        raise
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}", path=path) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path}: not an everstep shard: {error!r}", path=path) from error


def _header_json(
    identity: ShardIdentity,
    placed: Sequence[Placed],
    digests: Sequence[str],
    aliases: Mapping[str, str],
) -> bytes:
    described = {
        place.entry.name: _describe(place.entry, hex_)
        for place, hex_ in zip(placed, digests, strict=True)
    }
    metadata = {
        "format": FORMAT_VERSION,
        **{name: getattr(identity, name) for name in _IDENTITY},
        **({"behind_mark": True} if identity.behind_mark else {}),
        **({"static": True} if identity.static else {}),
        "aliases": dict(aliases),
        "entries": described,
    }
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: _dump(metadata)}}
    for place in placed:
        header[place.entry.name] = {
            "dtype": place.entry.dtype,
            "shape": list(place.entry.shape),
            "data_offsets": [place.begin, place.end],
        }
    return _dump(header).encode("utf-8")


def _describe(entry: Entry, hex_: str) -> dict[str, Any]:
    """Return the attributes of an entry that safetensors has no field for."""
    described: dict[str, Any] = {
        "digest": hex_,
        "lsn": entry.lsn,
        "global_shape": list(entry.global_shape),
        "global_offset": list(entry.global_offset),
        "placement": entry.placement,
    }
    if entry.stride is not None:
        described["stride"] = list(entry.stride)
    if entry.logical_dtype is not None:
        described["logical_dtype"] = entry.logical_dtype
    return described


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def _load(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_twins)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: JSON readers differ in the one that they use."""
    found = dict(pairs)
    _require(len(found) == len(pairs), "duplicate key")
    return found


def _decode(
    fields: Mapping[str, Any],
    metadata: Mapping[str, Any],
    room_bytes: int,
    file_bytes: int,
    path: PurePath,
) -> ShardHeader:
    refuse_newer(msgspec.convert(metadata["format"], Count), path)
    # After the version: fields of a newer format need not have these types.
    described = msgspec.convert(metadata, _Metadata)
    places = msgspec.convert(fields, dict[str, _Place])
    names = (*_IDENTITY, "behind_mark", "static")
    identity = ShardIdentity(**{name: getattr(described, name) for name in names})
    _require(set(described.entries) == set(fields), "header and metadata list different entries")
    found: list[tuple[Placed, str]] = []
    for name, place in places.items():
        begin, end = place.data_offsets
        entry = _entry(name, place, described.entries[name])
        _require(end - begin == entry.size_bytes, f"{name}: its range does not match its size")
        found.append((Placed(entry, begin, end), described.entries[name].digest))
    # Entries are read by their offsets into memory planned from their sizes, so a hole or an
    # overlap would put bytes of one entry into another.
    position = 0
    for placed_entry, _ in found:
        name = placed_entry.entry.name
        _require(placed_entry.begin == position, f"{name}: hole or overlap before it")
        position = placed_entry.end
    _require(room_bytes + position == file_bytes, "the entries do not fill the file")
    aliases = described.aliases
    _require(set(aliases.values()) <= set(fields), "alias of a missing entry")
    _require(not set(aliases) & set(fields), "alias with the name of an entry")
    placed = tuple(p for p, _ in found)
    digests = tuple(d for _, d in found)
    return ShardHeader(identity, placed, digests, aliases, room_bytes)


class _Place(msgspec.Struct):
    """Type, shape and place of an entry, as safetensors records them."""

    dtype: str
    shape: _Sizes
    data_offsets: tuple[Count, Count]


class _Description(msgspec.Struct):
    """Attributes of an entry that safetensors has no field for."""

    digest: str
    lsn: Count
    global_shape: _Sizes
    global_offset: _Sizes
    placement: str
    stride: _Sizes | None = None
    logical_dtype: str | None = None


class _Metadata(msgspec.Struct):
    """Metadata of a shard."""

    run: str
    timeline: Count
    step: Count
    lsn: Count
    rank: Count
    world: Count
    exact: bool
    aliases: dict[str, str]
    entries: dict[str, _Description]
    behind_mark: bool = False
    static: bool = False


def _entry(name: str, place: _Place, described: _Description) -> Entry:
    _require(place.dtype in DTYPE_BYTES, f"{name}: unknown dtype")
    # A tensor with a dimension of 0 has no bytes, and could claim any other dimensions; strides are
    # computed from them and must not overflow.
    for sizes in (place.shape, described.global_shape):
        widest = math.prod(size or 1 for size in sizes[1:])
        _require(widest <= _SIZE_MAX, f"{name}: impossible shape {list(sizes)}")
    logical = described.logical_dtype
    if logical is not None:
        pairs = place.dtype == "F64" and place.shape[-1:] == (2,)
        _require(pairs and logical == "complex128", f"{name}: unknown logical dtype")
    return Entry(
        name,
        place.dtype,
        place.shape,
        described.global_shape,
        described.global_offset,
        described.placement,
        described.stride,
        logical,
        described.lsn,
    )


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise FormatError(problem)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file of a base.

    Attributes:
        layout: its tensors; their LSN is that of the base, except for those in ``lsns``.
        aliases: ``other name -> entry name``.
        room_bytes: size reserved for the header.
        objects_bytes: estimated size of the objects after the tensors.
        lsns: last update of each entry that was captured before the base's step.
        static: its entries are declared to never change (``adr/050``).
    """

    name: str
    layout: ShardLayout
    aliases: Mapping[str, str]
    room_bytes: int
    objects_bytes: int
    lsns: Mapping[str, int] = field(default_factory=dict)
    static: bool = False

    @property
    def size_bytes(self) -> int:
        """Estimated size of the file."""
        return self.room_bytes + self.layout.size_bytes + self.objects_bytes

    def identity_in(self, base: ShardIdentity) -> ShardIdentity:
        """Return the identity for the header of this file.

        A static file must not contain anything that is untrue for other bases that link to it.
        """
        return replace(base, static=True, behind_mark=False) if self.static else base


@dataclass(frozen=True, slots=True)
class BasePlan:
    """All files of this rank.

    Attributes:
        kinds: kind of change by entry name (see :mod:`everstep.state.ownership`), if the
            capture depends on it; nothing is assumed of other entries.
    """

    identity: ShardIdentity
    shards: tuple[ShardPlan, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Estimated size of all files."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def objects_in(self) -> ShardPlan:
        """File that ends with the objects: the last one that is not static."""
        return next(shard for shard in reversed(self.shards) if not shard.static)


def plan_files(
    identity: ShardIdentity,
    entries: Sequence[Entry],
    aliases: Mapping[str, str],
    objects_bytes: Mapping[str, int],
    static: Collection[str] = (),
) -> tuple[ShardPlan, ...]:
    """Distribute entries over files.

    Objects go to the end of the last file that is not static. Files of static entries follow it,
    because no optimizer waits for their copies.

    Args:
        identity: identity of any base of this rank; all bases have the same layout.
        objects_bytes: estimated size of each object, by name.
        static: names of entries that never change; they get files of their own.
    """
    layouts = plan_shards([entry for entry in entries if entry.name not in static])
    ends_with_objects = len(layouts) - 1
    if static:
        layouts += plan_shards([entry for entry in entries if entry.name in static])
    shards = []
    for part, layout in enumerate(layouts):
        names = {place.entry.name for place in layout.placed}
        mine = {other: name for other, name in aliases.items() if name in names}
        objects = objects_bytes if part == ends_with_objects else {}
        shard = ShardPlan(
            shard_name(identity.rank, part),
            layout,
            mine,
            0,
            sum(objects.values()),
            static=part > ends_with_objects,
        )
        # Needs the ShardPlan: the identity in the header of a static file differs (identity_in).
        header_bytes = header_size_bytes(
            shard.identity_in(identity), layout.placed, list(objects), mine
        )
        shards.append(replace(shard, room_bytes=header_bytes))
    return tuple(shards)
