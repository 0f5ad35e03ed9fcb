"""The gradient log: records, and the segments that hold some of them on disk.

A record is one update (of an optimizer: the gradients that it consumed, and its hyperparameters;
or a declared one, which a function of the program repeats) or one step mark (everything that no
update gives, in full). Records are never merged: moments
depend on the order of the gradients (a sum of gradients is another update for everything but
plain SGD).

A segment is an ordinary safetensors file. For every record and dtype it has one flat tensor,
``000007/F32``, with the elements of the record's entries one behind the other, and at the end
the object ``everstep/log``, which says what the records are. It is read back as a whole, or record
by record, every byte verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePath
from typing import Any, Literal

import msgpack
import numpy as np

from everstep.errors import DamageError, FormatError
from everstep.format.digests import digest
from everstep.format.header import ShardIdentity, header_size_bytes
from everstep.format.names import shard_name
from everstep.format.plan import ShardPlan
from everstep.state.layout.entries import DTYPE_BYTES, Entry
from everstep.state.layout.shards import Placed, ShardLayout, overlaps, plan_shards

__all__ = [
    "LOG_OBJECT",
    "NOT_EXACT",
    "LogRecord",
    "RecordHead",
    "RecordIndex",
    "SegmentBody",
    "gathered",
    "heads_of",
    "index_of_segment",
    "layout_from_index",
    "layout_to_index",
    "pack_index",
    "plan_segment",
    "record_digest",
    "records_of_packed",
    "records_of_segment",
]

LOG_OBJECT = "everstep/log"
NOT_EXACT = (
    "the log is of a state that was not exact, or of steps with another number of torch's threads, "
    "use of CUDA, or treatment of denormals, than at the start of their timeline"
)
"""Of records whose head says so."""

_RECORDS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Which record it is.

    Attributes:
        kind: ``"update"``: one call of an optimizer's ``step()``, or a declared update.
            ``"mark"``: the user's step is over; only here can a recovery end.
        step: that the mark ends; of an update, the step that it belongs to.
        lsn: of an update, its own number; of a mark, that of the last update before it.
        shape: digest of what the state consists of (see :func:`everstep.state.shape_digest`):
            a log is replayed only onto a state of the same shape.
        exact: whether replay may be: the state is by its lineage, and torch is used as the
            timeline's record says.
        declared: of a declared update, the pattern of the entries that it covers; ``""``
            of anything else.
    """

    kind: Literal["update", "mark"]
    timeline: int
    step: int
    lsn: int
    shape: str
    exact: bool = True
    declared: str = ""

    def __str__(self) -> str:
        what = f"update {self.lsn}" if self.kind == "update" else "the mark"
        what += f" ({self.declared!r})" if self.declared else ""
        return f"{what} of step {self.step}, timeline {self.timeline}"


@dataclass(frozen=True, slots=True, eq=False)
class LogRecord:
    """One record.

    Attributes:
        layout: what lies where in ``data``; widest dtype first, no holes.
        objects: encoded objects by name.
        digest: of data and objects, taken when they arrived.
        path: of the segment that it was read from; None: it was not, and its memory is there
            in any case.
        parts: records of the same update from other ranks' logs, by rank, where each rank has
            recorded a part (``docs/design/ranks.md``).
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
        """Raises:
        DamageError: a bit is not what it was.
        """
        if record_digest(self.data, self.objects) != self.digest:
            where = "" if self.path is None else f"{self.path}: "
            raise DamageError(
                f"{where}{self.head} is damaged: its digest does not match", path=self.path
            )


@dataclass(frozen=True, slots=True, eq=False)
class RecordIndex:
    """What the index of a segment says of one record; its data lies elsewhere in the file.

    Attributes:
        number: of the record in its segment, which the names of its flat tensors begin with.
    """

    number: int
    head: RecordHead
    layout: ShardLayout
    objects: Mapping[str, bytes]
    digest: str

    def record(self, data: memoryview, path: PurePath) -> LogRecord:
        """The record; nobody has verified it."""
        return LogRecord(self.head, self.layout, self.objects, data, self.digest, path)


def record_digest(data: memoryview, objects: Mapping[str, bytes]) -> str:
    """The digest of a record: of the digests of its parts."""
    parts = [digest(data)]
    for name, item in objects.items():
        parts += [digest(name.encode()), digest(item)]
    return digest("".join(parts).encode("ascii"))


def plan_segment(
    identity: ShardIdentity, records: Sequence[LogRecord]
) -> tuple[ShardPlan, SegmentBody]:
    """The file of a batch of records, which end with a mark.

    Args:
        identity: with the step and the LSN of that mark.
    """
    sources: dict[str, memoryview] = {}
    entries: list[Entry] = []
    for number, record in enumerate(records):
        for dtype, group in groupby(record.layout.placed, lambda place: place.entry.dtype):
            run = list(group)
            begin = run[0].begin
            end = run[-1].end
            if begin == end:
                continue
            entry = Entry.whole(f"{number:06d}/{dtype}", dtype, ((end - begin) // _width(dtype),))
            entries.append(entry)
            sources[entry.name] = record.data[begin:end]
    index = pack_index(records)
    (layout,) = plan_shards(entries, header_bytes_max=1 << 62)
    room_bytes = header_size_bytes(identity, layout.placed, [LOG_OBJECT], {})
    plan = ShardPlan(shard_name(identity.rank), layout, {}, room_bytes, len(index))
    return plan, SegmentBody(layout, sources, index)


class SegmentBody:
    """The body of a segment, gathered from the memory of its records.

    Attributes:
        index: its object, which says what the records are.
    """

    def __init__(
        self, layout: ShardLayout, sources: Mapping[str, memoryview], index: bytes
    ) -> None:
        end = layout.size_bytes
        last = Placed(Entry.whole(LOG_OBJECT, "U8", (len(index),)), end, end + len(index))
        self._placed = [*layout.placed, last]
        self._ends = [place.end for place in self._placed]
        self._sources = {**sources, LOG_OBJECT: memoryview(index)}
        self.index = index

    def source(self, name: str) -> bytes:
        """A copy of an entry."""
        return bytes(self._sources[name])

    @property
    def parts(self) -> list[memoryview]:
        """All of it, piece by piece, as it lies in the file."""
        return [self._sources[place.entry.name] for place in self._placed]

    def fill(self, begin: int, chunk: memoryview, seen: Any) -> None:
        """See :class:`everstep.state.layout.shards.Body`."""
        for place, start, stop in overlaps(self._placed, self._ends, begin, chunk.nbytes):
            part = chunk[start - begin : stop - begin]
            source = self._sources[place.entry.name]
            part[:] = source[start - place.begin : stop - place.begin]
            seen(part)

    def held(self, begin: int, end: int) -> memoryview | None:
        """Nothing lies in memory as it lies in the file."""
        return None

    def objects_bytes(self) -> Mapping[str, int]:
        """The one object that says what the records are."""
        return {LOG_OBJECT: len(self.index)}


def records_of_segment(
    identity: ShardIdentity, data: Mapping[str, memoryview], path: PurePath
) -> list[LogRecord]:
    """The records of a segment, from its verified entries.

    Raises:
        FormatError: they do not fit each other.
    """
    if LOG_OBJECT not in data:
        raise FormatError(f"{path} has no index", path=path)
    found = []
    for one in index_of_segment(identity, data[LOG_OBJECT], path):
        parts = {
            name.split("/", 1)[1]: part
            for name, part in data.items()
            if name.startswith(f"{one.number:06d}/")
        }
        found.append(one.record(gathered(one.layout, parts, path), path))
    return found


def index_of_segment(
    identity: ShardIdentity, data: bytes | memoryview, path: PurePath
) -> list[RecordIndex]:
    """What the records of a segment are, from its verified object ``everstep/log``.

    Raises:
        FormatError: it is none.
    """
    try:
        index = msgpack.unpackb(bytes(data), strict_map_key=False)
        layouts = [layout_from_index(fields) for fields in index["layouts"]]
        if len(index["records"]) > _RECORDS_MAX:
            raise FormatError(f"{path}: too many records")
        found = []
        for number, fields in enumerate(index["records"]):
            head = _head(identity.timeline, fields)
            layout_number, objects, said = _rest(fields)
            if head.kind not in ("update", "mark"):
                raise FormatError(f"{path}: no record of any kind that is known")
            found.append(RecordIndex(number, head, layouts[layout_number], objects, said))
    except FormatError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: not a segment of a log: {error!r}", path=path) from error
    if not found or found[-1].head.kind != "mark":
        raise FormatError(f"{path}: a segment ends with a step mark, this one does not", path=path)
    return found


def heads_of(timeline: int, data: bytes, path: PurePath) -> tuple[RecordHead, ...]:
    """What the records of a segment are, from its object ``everstep/log``.

    Raises:
        FormatError: it is none.
    """
    try:
        rows = msgpack.unpackb(data, strict_map_key=False)["records"]
        return tuple(_head(timeline, row) for row in rows)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: not a segment of a log: {error!r}", path=path) from error


def records_of_packed(
    timeline: int, index: bytes, data: memoryview, offsets: Sequence[int], path: PurePath
) -> list[LogRecord]:
    """Records whose data lie at ``offsets`` of ``data``; not verified.

    Raises:
        FormatError: ``index`` is not that of so many records, or they lie elsewhere.
    """
    try:
        fields = msgpack.unpackb(index, strict_map_key=False)
        layouts = [layout_from_index(layout) for layout in fields["layouts"]]
        records = []
        for row, offset in zip(fields["records"], offsets, strict=True):
            number, objects, found = _rest(row)
            layout = layouts[number]
            end = offset + layouts[number].size_bytes
            if not 0 <= offset <= end <= data.nbytes:
                raise FormatError(f"{path}: a record lies outside of it", path=path)
            head = _head(timeline, row)
            records.append(LogRecord(head, layout, objects, data[offset:end], found))
    except FormatError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: no records of a log: {error!r}", path=path) from error
    return records


def _head(timeline: int, row: Sequence[Any]) -> RecordHead:
    kind, step, lsn, shape, exact = row[:5]
    declared = row[8] if len(row) > 8 else ""
    if len(row) > 9 or not isinstance(declared, str) or (declared and kind != "update"):
        raise ValueError("no record that is known")
    if not (_is_size(step) and _is_size(lsn) and type(shape) is str and type(exact) is bool):
        raise ValueError("no record of any step")
    return RecordHead(kind, timeline, step, lsn, shape, exact, declared)


def _rest(row: Sequence[Any]) -> tuple[int, dict[str, bytes], str]:
    """The number of its layout, its objects, and its digest."""
    layout, objects, said = row[5:8]
    if type(layout) is not int or type(said) is not str or type(objects) is not dict:
        raise ValueError("no record with a layout, objects, and a digest")
    if any(type(name) is not str or type(data) is not bytes for name, data in objects.items()):
        raise ValueError("objects that are none")
    return layout, objects, said


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def layout_to_index(layout: ShardLayout) -> list[list[Any]]:
    """A layout of whole entries as plain data."""
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
    """The inverse of :func:`layout_to_index`.

    Raises:
        FormatError: for what is no layout.
    """
    placed = []
    position = 0
    for name, dtype, shape, stride, logical in fields:
        sizes = tuple(shape)
        twice = logical is not None
        whole = all(type(n) is int and 0 <= n < 1 << 48 for n in (*sizes, *(stride or ())))
        fits = stride is None or len(stride) == len(sizes) - twice
        known = not twice or (dtype, logical, sizes[-1:]) == ("F64", "complex128", (2,))
        if type(name) is not str or dtype not in DTYPE_BYTES or not (whole and fits and known):
            raise FormatError(f"a record has an impossible entry {name!r:.80}")
        entry = Entry.whole(
            name,
            dtype,
            sizes,
            stride=None if stride is None else tuple(stride),
            logical_dtype=logical,
        )
        placed.append(Placed(entry, position, position + entry.size_bytes))
        position += entry.size_bytes
    return ShardLayout(tuple(placed))


def gathered(layout: ShardLayout, parts: Mapping[str, memoryview], path: PurePath) -> memoryview:
    """A record's data from its flat tensors, by dtype.

    Raises:
        FormatError: they are not those that it lists.
    """
    dtypes = [d for d, _ in groupby(p.entry.dtype for p in layout.placed if p.end > p.begin)]
    if len(parts) == 1 and list(parts) == dtypes and parts[dtypes[0]].nbytes == layout.size_bytes:
        return parts[dtypes[0]]  # as it lies
    if sorted(dtypes) != sorted(parts) or layout.size_bytes != sum(
        p.nbytes for p in parts.values()
    ):
        raise FormatError(f"{path}: a record's tensors are not those that it lists", path=path)
    data = np.empty(layout.size_bytes, np.uint8)  # which other threads are not held up by
    position = 0
    for dtype in dtypes:
        part = np.frombuffer(parts[dtype], np.uint8)
        data[position : position + part.nbytes] = part
        position += part.nbytes
    return data.data


def pack_index(records: Sequence[LogRecord]) -> bytes:
    """What the records are, all but their data."""
    layouts: list[Any] = []
    numbers: dict[int, int] = {}
    rows = []
    for record in records:
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


def _width(dtype: str) -> int:
    return DTYPE_BYTES[dtype]
