"""Shard headers: ordinary safetensors headers, decoded without believing a word."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import FormatError, NewerFormatError
from everstep.format.header import (
    METADATA_KEY,
    ShardIdentity,
    decode_header,
    encode_header,
    header_size_bytes,
)
from everstep.state.layout.entries import DTYPE_BYTES, Entry
from everstep.state.layout.shards import append_objects, plan_shards

PATH = PurePath("/run/rank-00000.safetensors")
IDENTITY = ShardIdentity("run", 2, 1200, 2400, 0, 1, True)
ROOM = 4096

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
entries_of = st.lists(
    st.builds(
        lambda name, dtype, shape, lsn, stride: Entry.whole(
            name, dtype, shape, lsn=lsn, stride=tuple(stride[: len(shape)]) if stride else None
        ),
        names,
        st.sampled_from(list(DTYPE_BYTES)),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.integers(0, 2**63 - 1),
        st.none() | st.lists(st.integers(0, 99), min_size=3, max_size=3),
    ),
    unique_by=lambda entry: entry.name,
    max_size=8,
)


@given(entries=entries_of, objects=st.dictionaries(names, st.binary(max_size=9), max_size=3))
def test_headers_are_decoded_back(entries: list[Entry], objects: dict[str, bytes]) -> None:
    objects = {f"everstep/objects/{name}": data for name, data in objects.items()}
    layout = plan_shards(entries)[0]
    aliases = {f"other/{entry.name}": entry.name for entry in entries[:2]}
    aliases = {k: v for k, v in aliases.items() if k not in {e.name for e in entries}}
    room = header_size_bytes(IDENTITY, layout.placed, list(objects), aliases)
    sizes = {name: len(data) for name, data in objects.items()}
    placed = append_objects(layout, sizes, lsn=IDENTITY.lsn).placed
    digests = [f"{number:032x}" for number in range(len(placed))]
    data = encode_header(IDENTITY, placed, digests, aliases, room)
    size = placed[-1].end if placed else 0
    header = decode_header(data, room + size, PATH)
    assert header.identity == IDENTITY
    assert header.placed == placed
    assert header.digests == tuple(digests)
    assert dict(header.aliases) == aliases
    assert header.room_bytes == room == len(data)
    for wrong in (room + size - 1, room + size + 1, 0):
        with pytest.raises(FormatError):
            decode_header(data, wrong, PATH)


# What a hostile writer can make: any JSON, and the digests fit.


def good() -> tuple[dict[str, Any], dict[str, Any], int]:
    """``(header, metadata, size of the file)`` of a shard with two entries."""
    entries = [Entry.whole("m/a", "F32", (2, 3)), Entry.whole("m/b", "U8", (5,))]
    placed = plan_shards(entries)[0].placed
    data = encode_header(IDENTITY, placed, ["a" * 32, "b" * 32], {"m/c": "m/a"}, ROOM)
    header = json.loads(data[8:])
    return header, json.loads(header.pop("__metadata__")[METADATA_KEY]), ROOM + 29


def encoded(header: dict[str, Any], metadata: Any) -> bytes:
    text = json.dumps({"__metadata__": {METADATA_KEY: json.dumps(metadata)}, **header}).encode()
    return struct.pack("<Q", ROOM - 8) + text.ljust(ROOM - 8)


def decode(header: dict[str, Any], metadata: Any, size: int = ROOM + 29) -> Any:
    return decode_header(encoded(header, metadata), size, PATH)


def test_the_helper_writes_what_is_accepted() -> None:
    header, metadata, size = good()
    assert len(decode(header, metadata, size).placed) == 2


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def _set(part: str, *path_and_value: Any) -> Change:
    *path, last, value = path_and_value

    def change(header: dict[str, Any], metadata: dict[str, Any]) -> None:
        target: Any = header if part == "header" else metadata
        for key in path:
            target = target[key]
        target[last] = value

    return change


def _drop(part: str, *path: Any) -> Change:
    *above, last = path

    def change(header: dict[str, Any], metadata: dict[str, Any]) -> None:
        target: Any = header if part == "header" else metadata
        for key in above:
            target = target[key]
        del target[last]

    return change


HUGE = 2**63 - 1
CHANGES: dict[str, Change] = {
    "a hole": _set("header", "m/b", "data_offsets", [25, 30]),
    "an overlap": _set("header", "m/b", "data_offsets", [23, 28]),
    "backwards": _set("header", "m/b", "data_offsets", [29, 24]),
    "negative offset": _set("header", "m/a", "data_offsets", [-24, 0]),
    "offsets of floats": _set("header", "m/a", "data_offsets", [0.0, 24.0]),
    "offsets of bools": _set("header", "m/a", "data_offsets", [False, 24]),
    "three offsets": _set("header", "m/a", "data_offsets", [0, 24, 24]),
    "no offsets": _drop("header", "m/a", "data_offsets"),
    "huge offsets": _set("header", "m/b", "data_offsets", [HUGE - 5, HUGE]),
    "too large for any file": _set("header", "m/b", "data_offsets", [24, 2**70]),
    "shape that is no product": _set("header", "m/a", "shape", [2, 4]),
    "huge shape": _set("header", "m/a", "shape", [HUGE, HUGE]),
    "negative shape": _set("header", "m/a", "shape", [-2, -3]),
    "shape of bools": _set("header", "m/b", "shape", [True]),
    "shape with a null": _set("header", "m/b", "shape", [None]),
    "shape that is a number": _set("header", "m/b", "shape", 5),
    "far too many dimensions": _set("header", "m/b", "shape", [1] * 10_000 + [5]),
    "unknown dtype": _set("header", "m/a", "dtype", "F33"),
    "dtype that is a list": _set("header", "m/a", "dtype", ["F32"]),
    "an entry without description": _drop("metadata", "entries", "m/b"),
    "a description without entry": _set("metadata", "entries", "m/x", {}),
    "an entry that is a text": _set("header", "m/a", "x"),
    "descriptions that are a list": _set("metadata", "entries", ["m/a", "m/b"]),
    "digest that is a number": _set("metadata", "entries", "m/a", "digest", 5),
    "no digest": _drop("metadata", "entries", "m/a", "digest"),
    "negative lsn": _set("metadata", "entries", "m/a", "lsn", -1),
    "lsn that is a text": _set("metadata", "entries", "m/a", "lsn", "0"),
    "global shape that is a text": _set("metadata", "entries", "m/a", "global_shape", "23"),
    "placement that is a number": _set("metadata", "entries", "m/a", "placement", 0),
    "negative stride": _set("metadata", "entries", "m/a", "stride", [-1, 1]),
    "logical dtype of nothing": _set("metadata", "entries", "m/a", "logical_dtype", "complex128"),
    "logical dtype unknown": _set("metadata", "entries", "m/a", "logical_dtype", "x"),
    "alias of nothing": _set("metadata", "aliases", "m/c", "m/z"),
    "alias of an alias": _set("metadata", "aliases", {"m/c": "m/d", "m/d": "m/a"}),
    "alias named as an entry": _set("metadata", "aliases", {"m/b": "m/a"}),
    "alias of a number": _set("metadata", "aliases", "m/c", 5),
    "aliases that are a list": _set("metadata", "aliases", []),
    "exact that is a number": _set("metadata", "exact", 1),
    "run that is a number": _set("metadata", "run", 1),
    "step that is a bool": _set("metadata", "step", True),
    "no step": _drop("metadata", "step"),
    "format that is a text": _set("metadata", "format", "1"),
    "no format": _drop("metadata", "format"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_hostile_headers(change: str) -> None:
    header, metadata, size = good()
    CHANGES[change](header, metadata)
    with pytest.raises(FormatError):
        decode(header, metadata, size)


@pytest.mark.parametrize("metadata", [None, 5, [], "", {}, {"format": 1}], ids=str)
def test_hostile_metadata(metadata: Any) -> None:
    with pytest.raises(FormatError):
        decode(good()[0], metadata)


def raw(text: bytes) -> bytes:
    return struct.pack("<Q", ROOM - 8) + text.ljust(ROOM - 8)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"__metadata__":{}}',
        b'{"__metadata__":{"everstep":5}}',
        b'{"__metadata__":"everstep"}',
        b"[" * 4000,
        b'{"a":' * 800,
        b"\xff\xfe{\0}\0",
        b'{"__metadata__":{"everstep":"' + b"[" * 2000 + b'"}}',
        b"NaN",
        b"\0" * 4000,
    ],
    ids=range(13),
)
def test_hostile_texts(text: bytes) -> None:
    with pytest.raises(FormatError):
        decode_header(raw(text), ROOM, PATH)


@pytest.mark.parametrize("where", ["header", "entry", "metadata", "description"])
def test_a_key_that_is_there_twice(where: str) -> None:
    """One reader takes the first, another the last: refused."""
    header, metadata, size = good()
    text = encoded(header, metadata)[8:].rstrip(b" ").decode()
    twice = {
        "header": text.replace('"m/a": {"dtype"', '"m/a": {"dtype": "F64"}, "m/a": {"dtype"'),
        "entry": text.replace('"dtype": "U8"', '"dtype": "I8", "dtype": "U8"'),
        "metadata": text.replace('\\"step\\"', '\\"step\\": 1, \\"step\\"'),
        "description": text.replace('\\"lsn\\": 0', '\\"lsn\\": 9, \\"lsn\\": 0'),
    }[where]
    assert twice != text
    with pytest.raises(FormatError, match="duplicate key"):
        decode_header(raw(twice.encode()), size, PATH)


def test_a_newer_format_is_named_as_such() -> None:
    header, metadata, size = good()
    metadata["format"] = 2
    with pytest.raises(NewerFormatError, match="written in format 2"):
        decode(header, metadata, size)


def empty_entry(shape: list[int]) -> tuple[dict[str, Any], dict[str, Any], int]:
    header, metadata, _ = good()
    header["m/b"] = {"dtype": "U8", "shape": shape, "data_offsets": [24, 24]}
    metadata["entries"]["m/b"] |= {"global_shape": shape, "global_offset": [0] * len(shape)}
    return header, metadata, ROOM + 24


@pytest.mark.parametrize("shape", [[0, HUGE], [HUGE, 0, HUGE], [0] * 64])
def test_empty_entries_of_absurd_shape(shape: list[int]) -> None:
    """They take no bytes; torch has such tensors."""
    found = decode(*empty_entry(shape)).placed[1].entry.shape
    assert found == torch.empty(shape, device="cpu").shape


@pytest.mark.parametrize("shape", [[0, 2, HUGE // 2 + 1], [0, 3, HUGE], [HUGE, 0, 2, HUGE]])
def test_shapes_that_no_tensor_can_have(shape: list[int]) -> None:
    """Strides are counted in 63 bits, of empty tensors, too."""
    with pytest.raises(RuntimeError, match="overflow"):
        torch.empty(shape, device="cpu")
    with pytest.raises(FormatError, match="impossible shape"):
        decode(*empty_entry(shape))
