"""Records of the gradient log, and the segments that contain them on disk (``adr/011``).

A record is either one update or one step mark. An update is one call of an optimizer, with the
gradients that it consumed and its hyperparameters, or a declared one, which a function of the
program repeats. A step mark contains everything that no update recomputes, in full. Records are
never merged: moments depend on the order of the gradients, so a sum of gradients is another update
for everything but plain SGD.

A segment is an ordinary safetensors file. For each record and dtype it has one flat tensor,
``000007/F32``, with the elements of the record's entries in sequence. The object ``everstep/log``
at the end is the index of the records. A segment is read completely or record by record; every byte
is verified.

Gradients of 32-bit masters that come from 16-bit backward passes end in 16 zero bits (GoCkpt,
section 4.2: gradients are a seventh of the state). Where all elements of such a flat tensor do, it
is stored without them, as ``000007/F32/BF16``, half as large. The digest of the record is that of
the 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePath
from typing import Annotated, Any, Literal

import msgpack
import msgspec
import numpy as np
from msgspec import Meta

from everstep.errors import DamageError, FormatError
from everstep.format.digests import digest
from everstep.format.header import ShardIdentity, ShardPlan, header_size_bytes
from everstep.format.message_codec import Count
from everstep.format.names import shard_name
from everstep.state.layout import Entry, Placed, ShardLayout
from everstep.state.layout.entries import DTYPE_BYTES
from everstep.state.layout.shards import in_sequence, overlaps, plan_shards

LOG_OBJECT = "everstep/log"
NOT_EXACT = (
    "the state was not exact when the log was recorded, or torch's number of threads, use of CUDA "
    "or treatment of denormals had changed since the start of the timeline"
)
"""Reason for records whose head has ``exact=False``."""

_RECORDS_MAX = 1_000_000
_SHORT = "BF16"  # the high 16 bits of F32
_FIRST_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Identity of a record.

    Attributes:
        kind: ``"update"``: one call of an optimizer's ``step()``, or a declared update.
            ``"mark"``: the end of the user's step; recovery ends only here.
        step: step that the mark ends, or that the update belongs to.
        lsn: number of the update; for a mark, of the last update before it.
        shape: digest of the shape of the state (see :func:`.entries.shape_digest`): a log is
            replayed only onto a state of the same shape.
        exact: replay may be exact: the state is exact by lineage, and torch is used as the
            timeline's record describes.
        declared: pattern of the entries that a declared update covers; else ``""``.
    """

    kind: Literal["update", "mark"]
    timeline: int
    step: int
    lsn: int
    shape: str
    exact: bool = True
    declared: str = ""

    def __str__(self) -> str:
        name = f"update {self.lsn}" if self.kind == "update" else "the mark"
        name += f" ({self.declared!r})" if self.declared else ""
        return f"{name} of step {self.step}, timeline {self.timeline}"


@dataclass(frozen=True, slots=True, eq=False)
class LogRecord:
    """One record.

    Attributes:
        layout: place of each entry in ``data``; widest dtype first, no holes.
        objects: encoded objects by name.
        digest: digest of data and objects, computed when they arrived.
        path: segment that it was read from; None if it is in memory anyway.
        parts: records of the same update from other ranks' logs, by rank, if each rank has recorded
            a share of it (``docs/design/ranks.md``).
    """

    head: RecordHead
    layout: ShardLayout
    objects: Mapping[str, bytes]
    data: memoryview
    digest: str
    path: PurePath | None = None
    parts: Mapping[int, LogRecord] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return self.layout.size_bytes + sum(map(len, self.objects.values()))

    def verify(self) -> None:
        """Compare the digest.

        Raises:
            DamageError: data or objects have changed.
        """
        if record_digest(self.data, self.objects) != self.digest:
            where = "" if self.path is None else f"{self.path}: "
            raise DamageError(
                f"{where}{self.head} is damaged: its digest does not match", path=self.path
            )


@dataclass(frozen=True, slots=True, eq=False)
class RecordIndex:
    """Index entry of one record; its data lies elsewhere in the segment.

    Attributes:
        number: number of the record in its segment; names of its flat tensors begin with it.
    """

    number: int
    head: RecordHead
    layout: ShardLayout
    objects: Mapping[str, bytes]
    digest: str

    def record(self, data: memoryview, path: PurePath) -> LogRecord:
        """Return the record; its data is not verified."""
        return LogRecord(self.head, self.layout, self.objects, data, self.digest, path)


def record_digest(data: memoryview, objects: Mapping[str, bytes]) -> str:
    """Return the digest of a record: a digest of the digests of its data and objects."""
    digests = [digest(data)]
    for name, item in objects.items():
        digests += [digest(name.encode()), digest(item)]
    return digest("".join(digests).encode("ascii"))


def plan_segment(
    identity: ShardIdentity, records: Sequence[LogRecord], *, narrow: bool = False
) -> tuple[ShardPlan, SegmentBody]:
    """Plan the file of a batch of records that ends with a mark.

    Args:
        identity: identity with step and LSN of that mark.
        narrow: store flat tensors without low bits that are all zero.
    """
    sources: dict[str, memoryview | _HighHalves] = {}
    entries: list[Entry] = []
    for number, record in enumerate(records):
        # Entries of a dtype are adjacent (link/recordable.py), so each group is one slice of the
        # data and is not copied.
        for dtype, group in groupby(record.layout.placed, lambda place: place.entry.dtype):
            run = list(group)
            begin = run[0].begin
            end = run[-1].end
            # Entries without elements have no flat tensor; gathered() expects none.
            if begin == end:
                continue
            count = (end - begin) // DTYPE_BYTES[dtype]
            name = f"{number:06d}/{dtype}"
            data = record.data[begin:end]
            short = _HighHalves.of(data) if narrow and dtype == "F32" else None
            if short is None:
                entry = Entry.whole(name, dtype, (count,))
            else:
                entry = Entry.whole(f"{name}/{_SHORT}", _SHORT, (count,))
            entries.append(entry)
            sources[entry.name] = short or data
    # One file, however many entries: a segment is complete or absent as a whole.
    index = pack_index(records)
    (layout,) = plan_shards(entries, header_bytes_max=1 << 62)
    room_bytes = header_size_bytes(identity, layout.placed, [LOG_OBJECT], {})
    plan = ShardPlan(shard_name(identity.rank), layout, {}, room_bytes, len(index))
    return plan, SegmentBody(layout, sources, index)


class _HighHalves:
    """The high 16 bits of 32-bit elements, copied slice by slice as they are written."""

    def __init__(self, halves: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
        self._halves = halves

    @classmethod
    def of(cls, data: memoryview) -> _HighHalves | None:
        """Return them; None if any low bit is set."""
        halves = np.frombuffer(data, "<u2")
        # The first elements refuse nearly all gradients that have low bits.
        if halves[: 2 * _FIRST_ELEMENTS : 2].any() or halves[::2].any():
            return None
        return cls(halves[1::2])

    def __getitem__(self, wanted: slice) -> memoryview:
        # Flat tensors begin at even offsets, as do the chunks of a file.
        assert wanted.start % 2 == 0
        assert wanted.stop % 2 == 0
        found = np.ascontiguousarray(self._halves[wanted.start // 2 : wanted.stop // 2])
        return found.view(np.uint8).data


def _from_high_halves(data: memoryview) -> memoryview:
    """Return the 32-bit elements of their high 16 bits."""
    short = np.frombuffer(data, "<u2")
    halves = np.zeros(2 * short.size, "<u2")
    halves[1::2] = short
    return halves.view(np.uint8).data


class SegmentBody:
    """Body of a segment, gathered from the memory of its records.

    Attributes:
        index: encoded index of the records.
    """

    def __init__(
        self,
        layout: ShardLayout,
        sources: Mapping[str, memoryview | _HighHalves],
        index: bytes,
    ) -> None:
        end = layout.size_bytes
        last = Placed(Entry.whole(LOG_OBJECT, "U8", (len(index),)), end, end + len(index))
        self._placed = [*layout.placed, last]
        self._ends = [place.end for place in self._placed]
        self._sources: dict[str, memoryview | _HighHalves] = {
            **sources,
            LOG_OBJECT: memoryview(index),
        }
        self.index = index

    def source(self, name: str) -> bytes:
        """Return a copy of the bytes of an entry."""
        return bytes(self._view(name))

    @property
    def views(self) -> list[memoryview]:
        """Bytes of all entries, in file order."""
        return [self._view(place.entry.name) for place in self._placed]

    def _view(self, name: str) -> memoryview:
        found = self._sources[name]
        assert isinstance(found, memoryview), "only the file has it"
        return found

    def fill(self, begin: int, chunk: memoryview, seen: Any) -> None:
        """Fill ``chunk``; see :class:`everstep.state.layout.shards.Body`."""
        for place, start, stop in overlaps(self._placed, self._ends, begin, chunk.nbytes):
            target = chunk[start - begin : stop - begin]
            source = self._sources[place.entry.name]
            target[:] = source[start - place.begin : stop - place.begin]
            seen(target)

    def held(self, begin: int, end: int) -> memoryview | None:
        """Return None: no bytes lie in memory as in the file."""
        return None

    def objects_bytes(self) -> Mapping[str, int]:
        """Return the size of the index."""
        return {LOG_OBJECT: len(self.index)}


def records_of_segment(
    identity: ShardIdentity, data: Mapping[str, memoryview], path: PurePath
) -> list[LogRecord]:
    """Return the records of a segment, from its verified entries.

    Raises:
        FormatError: the entries are inconsistent.
    """
    if LOG_OBJECT not in data:
        raise FormatError(f"{path} has no index", path=path)
    flat: dict[str, dict[str, memoryview]] = {}  # tensors of each record, by dtype
    for name, view in data.items():
        number, _, dtype = name.partition("/")
        flat.setdefault(number, {})[dtype] = view
    return [
        one.record(gathered(one.layout, flat.get(f"{one.number:06d}", {}), path), path)
        for one in index_of_segment(identity, data[LOG_OBJECT], path)
    ]


def index_of_segment(
    identity: ShardIdentity, data: bytes | memoryview, path: PurePath
) -> list[RecordIndex]:
    """Return the index of a segment, from its verified object ``everstep/log``.

    Raises:
        FormatError: the object is not an index.
    """
    index = _decode_index(data, path)
    layouts = [_layout_of(entries) for entries in index.layouts]
    found = [
        RecordIndex(
            number, row.head(identity.timeline), layouts[row.layout], row.objects, row.digest
        )
        for number, row in enumerate(index.records)
    ]
    # Recovery ends only at a mark. Updates after the last one would belong to no complete step.
    if not found or found[-1].head.kind != "mark":
        raise FormatError(f"{path}: the segment does not end with a step mark", path=path)
    return found


def heads_of(timeline: int, data: bytes, path: PurePath) -> tuple[RecordHead, ...]:
    """Return the heads of a segment's records, from its object ``everstep/log``.

    Raises:
        FormatError: the object is not an index.
    """
    return tuple(row.head(timeline) for row in _decode_index(data, path).records)


def records_of_packed(
    timeline: int, index: bytes, data: memoryview, offsets: Sequence[int], path: PurePath
) -> list[LogRecord]:
    """Return records whose data lie at ``offsets`` of ``data``; they are not verified.

    Raises:
        FormatError: ``index`` has another number of records, or they lie outside of ``data``.
    """
    found = _decode_index(index, path)
    layouts = [_layout_of(entries) for entries in found.layouts]
    if len(found.records) != len(offsets):
        raise FormatError(f"{path}: not the index of {len(offsets)} records", path=path)
    records = []
    for row, offset in zip(found.records, offsets, strict=True):
        layout = layouts[row.layout]
        end = offset + layout.size_bytes
        # The offsets come from another node. A slice past the end would silently be shorter.
        if not 0 <= offset <= end <= data.nbytes:
            raise FormatError(f"{path}: a record lies outside of the data", path=path)
        records.append(
            LogRecord(row.head(timeline), layout, row.objects, data[offset:end], row.digest)
        )
    return records


_Length = Annotated[int, Meta(ge=0, lt=1 << 48)]


class _IndexedEntry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An entry in the index, as :func:`layout_to_index` writes it."""

    name: str
    dtype: str
    shape: tuple[_Length, ...]
    stride: tuple[_Length, ...] | None
    logical_dtype: str | None


class _IndexedRecord(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A record in the index, as :func:`pack_index` writes it.

    Attributes:
        layout: number of its layout.
    """

    kind: Literal["update", "mark"]
    step: Count
    lsn: Count
    shape: str
    exact: bool
    layout: Count
    objects: dict[str, bytes]
    digest: str
    declared: str = ""

    def head(self, timeline: int) -> RecordHead:
        return RecordHead(
            self.kind, timeline, self.step, self.lsn, self.shape, self.exact, self.declared
        )


class _Index(msgspec.Struct):
    # The index is verified, but a hostile one could still claim any number of records.
    layouts: list[list[_IndexedEntry]]
    records: Annotated[list[_IndexedRecord], Meta(max_length=_RECORDS_MAX)]


_INDEX = msgspec.msgpack.Decoder(_Index)


def _decode_index(data: bytes | memoryview, path: PurePath) -> _Index:
    try:
        index = _INDEX.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{path}: not a segment of a log: {error}", path=path) from error
    if any(row.declared and row.kind != "update" for row in index.records):
        raise FormatError(
            f"{path}: not a segment of a log: a mark with a declared update", path=path
        )
    if any(row.layout >= len(index.layouts) for row in index.records):
        raise FormatError(f"{path}: a record without a layout", path=path)
    return index


def layout_to_index(layout: ShardLayout) -> list[list[Any]]:
    """Return a layout of entire entries as plain data."""
    return [
        [
            e.name,
            e.dtype,
            list(e.shape),
            None if e.stride is None else list(e.stride),
            e.logical_dtype,
        ]
        for e in (place.entry for place in layout.placed)
    ]


def layout_from_index(fields: Sequence[Sequence[Any]]) -> ShardLayout:
    """Return the inverse of :func:`layout_to_index`.

    Raises:
        FormatError: ``fields`` is not a layout.
    """
    try:
        return _layout_of(msgspec.convert(fields, list[_IndexedEntry]))
    except msgspec.ValidationError as error:
        raise FormatError(f"not the layout of a record: {error}") from error


def _layout_of(entries: Sequence[_IndexedEntry]) -> ShardLayout:
    found = []
    for one in entries:
        twice = one.logical_dtype is not None
        # A complex entry is stored with a last dimension of 2 that its strides do not have.
        fits = one.stride is None or len(one.stride) == len(one.shape) - twice
        stored = (one.dtype, one.logical_dtype, one.shape[-1:])
        known = not twice or stored == ("F64", "complex128", (2,))
        if one.dtype not in DTYPE_BYTES or not (fits and known):
            raise FormatError(f"a record has an impossible entry {one.name!r:.80}")
        logical = one.logical_dtype
        found.append(
            Entry.whole(one.name, one.dtype, one.shape, stride=one.stride, logical_dtype=logical)
        )
    return ShardLayout(in_sequence(found))


def gathered(layout: ShardLayout, flat: Mapping[str, memoryview], path: PurePath) -> memoryview:
    """Return a record's data from its flat tensors by dtype.

    Raises:
        FormatError: the tensors do not match the layout.
    """
    if (short := flat.get(f"F32/{_SHORT}")) is not None:
        if "F32" in flat or short.nbytes % DTYPE_BYTES[_SHORT]:
            raise FormatError(f"{path}: a record's tensors do not match its index", path=path)
        flat = {name: view for name, view in flat.items() if view is not short}
        flat["F32"] = _from_high_halves(short)
    dtypes = [d for d, _ in groupby(p.entry.dtype for p in layout.placed if p.end > p.begin)]
    if len(flat) == 1 and list(flat) == dtypes and flat[dtypes[0]].nbytes == layout.size_bytes:
        return flat[dtypes[0]]  # already in one piece
    flat_bytes = sum(view.nbytes for view in flat.values())
    if sorted(dtypes) != sorted(flat) or layout.size_bytes != flat_bytes:
        raise FormatError(f"{path}: a record's tensors do not match its index", path=path)
    data = np.empty(layout.size_bytes, np.uint8)  # numpy copies without the interpreter lock
    position = 0
    for dtype in dtypes:
        view = np.frombuffer(flat[dtype], np.uint8)
        data[position : position + view.nbytes] = view
        position += view.nbytes
    return data.data


def pack_index(records: Sequence[LogRecord]) -> bytes:
    """Encode the index of records: everything except their data."""
    layouts: list[Any] = []
    numbers: dict[int, int] = {}
    rows = []
    for record in records:
        # By identity: equal records share a layout object, and comparing layouts would take longer.
        # The ids stay valid because `records` refers to the layouts.
        key = id(record.layout)
        if key not in numbers:
            numbers[key] = len(layouts)
            layouts.append(layout_to_index(record.layout))
        head = record.head
        rows.append(
            [
                head.kind,
                head.step,
                head.lsn,
                head.shape,
                head.exact,
                numbers[key],
                dict(record.objects),
                record.digest,
                *([head.declared] if head.declared else []),
            ]
        )
    data: bytes = msgpack.packb({"layouts": layouts, "records": rows})
    return data
