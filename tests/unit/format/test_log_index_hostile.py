"""The index of a segment that somebody has made, with every digest right: it is refused as such."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import msgpack
import pytest

from everstep.errors import DamageError, FormatError
from everstep.format.header import ShardIdentity
from everstep.format.log import heads_of, index_of_segment, record_digest, records_of_packed
from everstep.run.tensors import tensor_of
from everstep.state.values.objects import decode, encode

PATH = PurePath("segment")
IDENTITY = ShardIdentity("r" * 32, 1, 2, 2, 0, 1, True)
OBJECTS = {"everstep/object/data": encode({"at": 1})}
INDEX: dict[str, Any] = {
    "layouts": [
        [["a", "F32", [2, 3], [1, 2], None], ["wide", "F64", [3, 2], [2], "complex128"]],
        [["b", "BF16", [], None, None], ["none", "I64", [0, 4], None, None]],
    ],
    "records": [
        ["update", 1, 1, "s" * 32, True, 0, OBJECTS, "d" * 32],
        ["update", 2, 2, "s" * 32, False, 1, {}, "d" * 32, "ema/*"],
        ["mark", 2, 2, "s" * 32, True, 1, OBJECTS, "d" * 32],
    ],
}
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 1 << 62, (1 << 64) - 1, 1.5, float("nan")),
    *("", "x", "F64", "complex128", "complex64", "mark", "d" * 32, b"", b"\xc1"),
    *([], [0], [3], [2, 3], [1, 1, 1], [-1, 2], [[]], {}, {"x": 1}, {1: b""}, {"x": b"\xc1"}),
]


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Paths to all parts of the index."""
    yield ()
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        for rest in places(value[key]):
            yield (key, *rest)


def put(path: tuple[Any, ...], odd: Any) -> Any:
    index = copy.deepcopy(INDEX)
    *above, last = path
    within = index
    for key in above:
        within = within[key]
    within[last] = odd
    return index


def read(index: Any) -> int:
    """Does with an index what those do who replay a log; returns how many records it has."""
    data = msgpack.packb(index)
    records = index_of_segment(IDENTITY, data, PATH)
    assert len(heads_of(1, data, PATH)) == len(records)
    for one in records:
        assert str(one.head)
        room = memoryview(bytearray(min(one.layout.size_bytes, 1 << 16)))
        if one.layout.size_bytes > room.nbytes:
            continue  # the file is not as large
        record = one.record(room, PATH)
        record_digest(record.data, record.objects)
        for place in record.layout.placed:
            tensor_of(record, place)
        for encoded in record.objects.values():
            decode(encoded)
    records_of_packed(1, data, memoryview(bytearray(1 << 16)), [0] * len(records), PATH)
    return len(records)


def test_as_it_is_written_it_is_read() -> None:
    assert read(INDEX) == 3


@pytest.mark.parametrize("path", [path for path in places(INDEX) if path], ids=str)
def test_whatever_stands_there_instead(path: tuple[Any, ...]) -> None:
    for odd in ODD:
        try:
            read(put(path, odd))
        except (FormatError, DamageError):
            continue
        except BaseException as error:
            raise AssertionError(f"{odd!r} at {path}") from error
