"""The small JSON files: exact, bounded, and suspicious of everything."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import DamageError, FormatError, NewerFormatError
from everstep.format.header import ShardIdentity
from everstep.format.records import (
    RECORD_BYTES_MAX,
    AuditRecord,
    FileRecord,
    Manifest,
    Marker,
    RunRecord,
    TimelineRecord,
    manifest_of,
)
from everstep.state.layout.placement import ReplicaDigest

PATH = PurePath("/run/record")
hexes = st.text("0123456789abcdef", min_size=32, max_size=32)
texts = st.text(max_size=20)
numbers = st.integers(0, 2**63 - 1)
reals = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def markers(draw: Any, rank: int | None = None, world: int | None = None) -> Marker:
    number = draw(st.integers(0, 99)) if rank is None else rank
    count = draw(st.integers(1, 3))
    files = []
    for part in range(count):
        name = f"rank-{number:05d}{f'-{part:05d}' if part else ''}.safetensors"
        length = draw(numbers)
        header = draw(st.integers(0, length))
        files.append(FileRecord(name, length, header, draw(hexes), draw(hexes)))
    size = draw(st.integers(1, 100)) if world is None else world
    fields = draw(st.tuples(texts, numbers, numbers, numbers, st.booleans()))
    run, timeline, step, lsn, exact = fields
    return Marker(run, timeline, step, lsn, number, size, exact, tuple(files))


def test_a_marker_is_of_the_base_that_its_files_are_of() -> None:
    file = FileRecord("rank-00005.safetensors", 8192, 4096, "a" * 32, "b" * 32)
    identity = ShardIdentity("r" * 32, 1, 2, 3, 5, 7, False)
    assert Marker.of(identity, (file,)) == Marker("r" * 32, 1, 2, 3, 5, 7, False, (file,))


@given(run=st.from_regex(r"([0-9A-Za-z_.][0-9A-Za-z_.-]{0,63})?", fullmatch=True))
def test_run_records(run: str) -> None:
    record = RunRecord(run)
    assert RunRecord.decode(record.encode(), PATH) == record


@pytest.mark.parametrize(
    "run", ["a\0b", "\ud800", "--detach", "../../x", "a b", "a\n", "ü", "r" * 65, "r" * 5000]
)
def test_what_no_run_is_called(run: str) -> None:
    """It would be an argument of the keeper's command, which refuses, or takes it for another."""
    with pytest.raises(FormatError):
        RunRecord.decode(RunRecord(run).encode(), PATH)


@given(
    run=texts,
    timeline=numbers,
    parent=st.none() | numbers,
    fork=numbers,
    exact=st.booleans(),
    world=st.integers(0, 2**20),
    prints=st.dictionaries(texts, texts, max_size=4),
    created=reals,
)
def test_timeline_records(
    run: str,
    timeline: int,
    parent: int | None,
    fork: int,
    exact: bool,
    world: int,
    prints: dict[str, str],
    created: float,
) -> None:
    record = TimelineRecord(run, timeline, parent, fork, exact, world, prints, created)
    assert TimelineRecord.decode(record.encode(), PATH) == record


@given(marker=markers())
def test_markers(marker: Marker) -> None:
    assert Marker.decode(marker.encode(), PATH) == marker


@given(data=st.data(), world=st.integers(1, 4))
def test_a_manifest_is_a_function_of_the_markers(data: Any, world: int) -> None:
    first = data.draw(markers(rank=0, world=world))
    found = {0: first}
    for rank in range(1, world):
        files = data.draw(markers(rank=rank, world=world)).files
        found[rank] = replace(first, rank=rank, files=files)
    manifest = manifest_of(found)
    assert manifest is not None
    assert manifest.encode() == manifest_of(dict(reversed(found.items()))).encode()  # type: ignore[union-attr]
    assert Manifest.decode(manifest.encode(), PATH) == manifest
    assert (manifest.step, manifest.timeline) == (first.step, first.timeline)
    for rank in range(world):
        fewer = {other: marker for other, marker in found.items() if other != rank}
        assert manifest_of(fewer) is None


COMMON = ReplicaDigest("0-1", "model", 4, "c" * 32)
OTHERS = [
    (),
    (replace(COMMON, count=3),),
    (replace(COMMON, digest="d" * 32),),
    (replace(COMMON, section="ema"),),
    (COMMON, replace(COMMON, section="ema")),
]


def of_two(*common: tuple[ReplicaDigest, ...]) -> dict[int, Marker]:
    return {
        rank: replace(MARKER, rank=rank, world=2, files=files_of(rank), common=own)
        for rank, own in enumerate(common)
    }


def test_what_ranks_have_in_common_is_in_their_markers_and_in_the_manifest() -> None:
    found = of_two((COMMON,), (COMMON,))
    assert all(Marker.decode(one.encode(), PATH) == one for one in found.values())
    manifest = manifest_of(found)
    assert manifest is not None
    assert Manifest.decode(manifest.encode(), PATH) == manifest == Manifest(tuple(found.values()))


@pytest.mark.parametrize("other", OTHERS)
def test_ranks_that_differ_in_what_they_have_in_common_have_no_base(
    other: tuple[ReplicaDigest, ...],
) -> None:
    assert manifest_of(of_two((COMMON,), other)) is None
    assert manifest_of(of_two(other, (COMMON,))) is None


def test_groups_have_nothing_to_do_with_each_other() -> None:
    one, other = replace(COMMON, ranks="0,2"), replace(COMMON, ranks="1,3", count=7)
    of_four = [(one,), (other,), (one,), (other,)]
    found = {
        rank: replace(MARKER, rank=rank, world=4, files=files_of(rank), common=own)
        for rank, own in enumerate(of_four)
    }
    assert manifest_of(found) is not None
    found[3] = replace(found[3], common=(one,))
    assert manifest_of(found) is None


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": "1-2"},
        {"ranks": "0-2"},
        {"ranks": "0-x"},
        {"ranks": "0-99999999"},
        {"ranks": ""},
        {"count": -1},
        {"digest": "no digest"},
        {"section": 7},
    ],
    ids=str,
)
def test_what_cannot_be_common_is_refused(change: dict[str, Any]) -> None:
    data = of_two((COMMON,), (COMMON,))[0].encode()
    fields = json.loads(data)
    assert Marker.decode(encoded(fields), PATH).encode() == data
    fields["common"][0] |= change
    with pytest.raises(FormatError):
        Marker.decode(encoded(fields), PATH)
    fields["common"] = []
    with pytest.raises(FormatError):
        Marker.decode(encoded(fields), PATH)


@given(flags=st.lists(st.booleans(), min_size=1, max_size=4))
def test_a_base_is_exact_if_every_rank_is(flags: list[bool]) -> None:
    """And each rank's marker is what it was, whoever reads it out of the manifest."""
    found = {
        rank: replace(MARKER, rank=rank, world=len(flags), exact=exact, files=files_of(rank))
        for rank, exact in enumerate(flags)
    }
    manifest = manifest_of(found)
    assert manifest is not None
    assert manifest.exact == all(flags)
    fields = json.loads(manifest.encode())
    assert fields["exact"] == all(flags)
    assert [rank.get("exact", fields["exact"]) for rank in fields["ranks"]] == flags
    decoded = Manifest.decode(manifest.encode(), PATH)
    assert decoded == manifest
    assert {marker.rank: marker for marker in decoded.markers} == found


@pytest.mark.parametrize(("whole", "part"), [(True, False), (False, True)])
def test_a_manifest_that_claims_what_its_ranks_do_not_is_refused(whole: bool, part: bool) -> None:
    fields = json.loads(manifest_of({0: MARKER}).encode())  # type: ignore[union-attr]
    fields["exact"], fields["ranks"][0]["exact"] = whole, part
    with pytest.raises(FormatError, match="contradicts the ranks' entries"):
        Manifest.decode(encoded(fields), PATH)


def files_of(rank: int) -> tuple[FileRecord, ...]:
    return (FileRecord(f"rank-{rank:05d}.safetensors", 8192, 4096, "a" * 32, "b" * 32),)


MARKER = Marker(
    "r" * 32,
    2,
    1200,
    2400,
    0,
    1,
    True,
    (FileRecord("rank-00000.safetensors", 8192, 4096, "a" * 32, "b" * 32),),
)
TIMELINE = TimelineRecord("r" * 32, 2, 1, 100, True, 1, {"torch": "2.13"}, 1.5)
AUDIT = AuditRecord(
    run="r" * 32,
    timeline=2,
    step=1200,
    manifest="c" * 32,
    before=(1, 1100),
    verdict="different",
    reason="",
    steps=100,
    updates=200,
    entries=115,
    count=2,
    differing=("model/a", "model/b"),
    fingerprint={"torch": "2.13"},
    created_unix_s=1.5,
)
RECORDS: list[Any] = [RunRecord("r" * 32), TIMELINE, MARKER, Manifest((MARKER,)), AUDIT]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_flipped_bit_is_noticed(record: Any) -> None:
    """White space, the digest itself, the kind, everything."""
    data = record.encode()
    for offset in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[offset] ^= 1 << bit
            with pytest.raises((FormatError, DamageError)):
                type(record).decode(bytes(bad), PATH)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_flipped_bit_is_not_taken_for_a_newer_format(record: Any) -> None:
    """One damaged record must not make all of the run look as if it were of the future."""
    data = record.encode()
    offset = data.index(b'"format": 1') + len(b'"format": ')
    for bit in range(8):
        bad = bytearray(data)
        bad[offset] ^= 1 << bit
        with pytest.raises((FormatError, DamageError)) as error:
            type(record).decode(bytes(bad), PATH)
        assert not isinstance(error.value, NewerFormatError)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_other_length_is_noticed(record: Any) -> None:
    data = record.encode()
    for length in range(len(data)):
        with pytest.raises((FormatError, DamageError)):
            type(record).decode(data[:length], PATH)
    for tail in (b"\n", b" ", b"\0", data, b"{}"):
        with pytest.raises((FormatError, DamageError)):
            type(record).decode(data + tail, PATH)


def encoded(fields: dict[str, Any]) -> bytes:
    """A record with a good digest, whatever is in it: what a hostile writer can make."""
    fields = {key: value for key, value in fields.items() if key != "digest"}

    def canonical(value: dict[str, Any]) -> bytes:
        return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"

    return canonical({**fields, "digest": xxhash.xxh3_128_hexdigest(canonical(fields))})


def test_the_helper_writes_what_everstep_writes() -> None:
    for record in RECORDS:
        assert encoded(json.loads(record.encode())) == record.encode()


@given(
    numbers=st.tuples(*[numbers] * 5),
    words=st.tuples(texts, texts, hexes),
    before=st.tuples(numbers, numbers),
    verdict=st.sampled_from(["equal", "different", "unchecked"]),
    names=st.lists(texts, max_size=3),
    more=st.integers(0, 9),
    created=reals,
)
def test_audits(
    numbers: tuple[int, ...],
    words: tuple[str, str, str],
    before: tuple[int, int],
    verdict: str,
    names: list[str],
    more: int,
    created: float,
) -> None:
    (timeline, step, steps, updates, entries), (run, reason, manifest) = numbers, words
    differing = () if verdict == "equal" else tuple(names)
    count = len(differing) + more if verdict != "equal" else 0
    record = AuditRecord(
        run=run,
        timeline=timeline,
        step=step,
        manifest=manifest,
        before=before,
        verdict=verdict,
        reason=reason,
        steps=steps,
        updates=updates,
        entries=entries,
        count=count,
        differing=differing,
        fingerprint={"torch": run},
        created_unix_s=created,
    )
    assert AuditRecord.decode(record.encode(), PATH) == record


HOSTILE_AUDIT: dict[str, list[Any]] = {
    "manifest": ["", "c" * 31, "C" * 32, None],
    "before": [None, [1], [1, 2, 3], [1, -1], [True, 2], "1"],
    "verdict": ["equal", "good", "", None, 5],  # equal: with entries that differ
    "reason": [None, 5, "x" * 5000],
    "steps": [-1, 1.0, None],
    "count": [1, -1, None, "2"],
    "differing": [None, "model/a", [5], [["x"]], ["x"] * 3, {}],
    "fingerprint": [None, [], {"torch": 2}],
    "created_unix_s": [None, "1", True],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in HOSTILE_AUDIT.items() for value in values],
    ids=lambda value: str(value)[:20],
)
def test_hostile_audits(name: str, value: Any) -> None:
    fields = json.loads(AUDIT.encode())
    with pytest.raises(FormatError):
        AuditRecord.decode(encoded({**fields, name: value}), PATH)
    del fields[name]
    with pytest.raises(FormatError):
        AuditRecord.decode(encoded(fields), PATH)


HOSTILE: dict[str, list[Any]] = {
    "run": [None, 5, ["x"], "x" * 5000, True],
    "timeline": [-1, 1.0, True, "1", None, 2**63, 10**400, [1]],
    "step": [-1, 2**64, False, 1e3, {}],
    "lsn": [-1, "0"],
    "rank": [1, -1, 2**21, None],
    "world": [2**21, -1, 0.5, None],
    "exact": [0, 1, None, "true"],
    "kind": ["manifest", None, 5, []],
    "format": [0, -1, True, "1", None, 1.0],
    "files": [None, {}, [], [5], [[]], [{}], "x"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in HOSTILE.items() for value in values],
    ids=lambda value: str(value)[:20],
)
def test_hostile_fields_of_a_marker(name: str, value: Any) -> None:
    fields = json.loads(MARKER.encode())
    with pytest.raises(FormatError):
        Marker.decode(encoded({**fields, name: value}), PATH)
    del fields[name]
    with pytest.raises(FormatError):
        Marker.decode(encoded(fields), PATH)


HOSTILE_FILE: dict[str, list[Any]] = {
    "name": [
        "../rank-00000.safetensors",
        "/etc/passwd",
        "rank-00001.safetensors",
        "rank-00000.done",
        "rank-00000.safetensors\0",
        "",
        5,
        None,
    ],
    "length": [-1, 2**63, 1.5, True, "8192", None],
    "header_length": [-1, 8193, 2**62, None],
    "header_digest": ["", "a" * 31, "A" * 32, "g" * 32, 5],
    "digest": ["b" * 33, None],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in HOSTILE_FILE.items() for value in values],
    ids=lambda value: str(value)[:20],
)
def test_hostile_files_of_a_marker(name: str, value: Any) -> None:
    fields = json.loads(MARKER.encode())
    fields["files"][0][name] = value
    with pytest.raises(FormatError):
        Marker.decode(encoded(fields), PATH)


def test_a_file_listed_twice() -> None:
    fields = json.loads(MARKER.encode())
    fields["files"] *= 2
    with pytest.raises(FormatError, match="or a duplicate file"):
        Marker.decode(encoded(fields), PATH)


@pytest.mark.parametrize(
    "ranks",
    [[], [{}], None, [0, 0], [1], [0, 2], [1, 0]],
    ids=str,
)
def test_hostile_manifests(ranks: Any) -> None:
    fields = json.loads(Manifest((MARKER,)).encode())
    one = fields["ranks"][0]

    def of(rank: int) -> dict[str, Any]:
        name = f"rank-{rank:05d}.safetensors"
        return {"rank": rank, "files": [{**one["files"][0], "name": name}]}

    if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
        fields["world"] = max(1, len(ranks))
        fields["ranks"] = [of(rank) for rank in ranks]
    else:
        fields["ranks"] = ranks
    with pytest.raises(FormatError):
        Manifest.decode(encoded(fields), PATH)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_newer_format_is_named_as_such(record: Any) -> None:
    fields = json.loads(record.encode())
    with pytest.raises(NewerFormatError, match="written in format 2"):
        type(record).decode(encoded({**fields, "format": 2}), PATH)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"5",
        b'"run"',
        b"\xff\xfe{}",
        b"{" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"kind":"run","format":1,"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"kind":"run","format":1e999}',
        b'{"kind":"run","format":NaN}',
        b'{"kind":"run","format":' + b"9" * 5000 + b"}",
        b"\0" * 4096,
    ],
    ids=range(13),
)
def test_hostile_texts(data: bytes) -> None:
    for kind in (RunRecord, TimelineRecord, Marker, Manifest):
        with pytest.raises(FormatError):
            kind.decode(data, PATH)


def test_a_key_that_is_there_twice() -> None:
    """Another reader might take the first one."""
    data = MARKER.encode()
    assert data.count(b' "step": 1200,') == 1
    bad = data.replace(b' "step": 1200,', b' "step": 1300,\n "step": 1200,')
    with pytest.raises(DamageError):
        Marker.decode(bad, PATH)


def test_numbers_that_are_not_finite_are_not_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(TIMELINE, created_unix_s=float("nan")).encode()


@pytest.mark.parametrize("value", ["Infinity", "NaN", "-Infinity"])
def test_numbers_that_are_not_finite_are_not_read(value: str) -> None:
    fields = {**json.loads(TIMELINE.encode()), "created_unix_s": float(value.lower())}
    with pytest.raises(FormatError):
        TimelineRecord.decode(encoded(fields), PATH)


def test_a_claimed_world_allocates_little() -> None:
    """A million ranks are claimed by a record of a few hundred bytes."""
    fields = {**json.loads(MARKER.encode()), "world": 2**20}
    marker = Marker.decode(encoded(fields), PATH)
    manifest = {**json.loads(Manifest((MARKER,)).encode()), "world": 2**20}
    tracemalloc.start()
    try:
        assert manifest_of({0: marker}) is None
        with pytest.raises(FormatError):
            Manifest.decode(encoded(manifest), PATH)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_record_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(FormatError, match="too many for a record"):
        RunRecord.decode(bytes(RECORD_BYTES_MAX + 1), PATH)


def test_markers_that_disagree_yield_no_manifest() -> None:
    two = replace(MARKER, world=2)
    files = (FileRecord("rank-00001.safetensors", 8192, 4096, "a" * 32, "b" * 32),)
    other = replace(two, rank=1, files=files)
    assert manifest_of({0: two, 1: other}) is not None
    for changed in (
        {"step": 1201},
        {"timeline": 3},
        {"lsn": 1},
        {"run": "x"},
        {"world": 3},
        {"rank": 0},
    ):
        assert manifest_of({0: two, 1: replace(other, **changed)}) is None  # type: ignore[arg-type]
    assert manifest_of({}) is None
    assert manifest_of({1: other}) is None
