"""Shards as files: what the safetensors library reads, and what reading them back notices."""

from __future__ import annotations

import json
import struct
import threading
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from everstep.arena import Arena
from everstep.capture.batches import plan_batches
from everstep.capture.lane import CpuLane, LiveBody
from everstep.errors import DamageError, DeadlineError, FormatError
from everstep.format import header
from everstep.format.digests import Digester, digest, digest_of_file
from everstep.format.header import LENGTH_BYTES, ShardIdentity, plan_files
from everstep.format.reader import OpenShard, read_body, read_header, read_record_bytes
from everstep.format.records import RECORD_BYTES_MAX, FileRecord
from everstep.format.writer import CHUNK_BYTES, ChunkRing, digest_shard, write_shard
from everstep.link.capture import ArenaBody, Incoming
from everstep.seams import PosixFileSystem
from everstep.seams.progress import silent
from everstep.state.layout.entries import DTYPE_BYTES, Entry
from everstep.state.layout.shards import Placed, plan_shards
from everstep.state.values.tensors import DTYPE_CODES, byte_view
from tests.support.world import TIMEOUT_S, assert_same, base_folder, flip, inventory_of, opened

IDENTITY = ShardIdentity("run", 1, 2, 3, 0, 1, True)


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    top = 2 if dtype == torch.bool else 256
    return torch.randint(0, top, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def every_dtype() -> dict[str, torch.Tensor]:
    return {str(dtype).removeprefix("torch."): values(dtype, 3, 5) for dtype in DTYPE_CODES}


def saved(run: Path, state: dict[str, Any], **options: Any) -> Path:
    with opened(run, state, **options) as ckpt:
        ckpt.save().durable.result(TIMEOUT_S)
    return base_folder(run, 0)


@pytest.mark.parametrize("method", ["sync", "async"])
def test_the_safetensors_library_reads_every_file(method: str, run_folder: Path) -> None:
    tensors = every_dtype() | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "wide": values(torch.complex128, 4),
        "transposed": torch.randn(3, 4).t(),
    }
    shard = saved(run_folder, {"d": tensors}, method=method) / "rank-00000.safetensors"
    loaded = safetensors.torch.load_file(shard)
    with safetensors.safe_open(shard, "pt") as file:
        assert set(file.keys()) == set(loaded)
        assert list(file.metadata()) == ["everstep"]
    for name, tensor in tensors.items():
        found = loaded[f"d/{name}"]
        if tensor.dtype == torch.complex128:
            found = torch.view_as_complex(found)
        assert_same(found.contiguous(), tensor.contiguous())
    assert loaded["everstep/objects/d"].dtype == torch.uint8


def raw_header(shard: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """``(length of the room, entries, everstep's metadata)`` read without everstep."""
    data = shard.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    return 8 + length, header, json.loads(header.pop("__metadata__")["everstep"])


@pytest.mark.parametrize("method", ["sync", "async"])
def test_where_there_is_no_disk(method: str, tmpfs_folder: Path) -> None:
    """A file system in memory: no direct I/O (or pretended), and all the rest works."""
    state: dict[str, Any] = {"t": torch.zeros(400_000)}
    with opened(tmpfs_folder / "run", state, method=method, keep=1) as ckpt:
        for number in range(1, 5):
            state["t"].fill_(number)
            ckpt.step()
            ckpt.save()
    live = {"t": torch.zeros(400_000)}
    with opened(tmpfs_folder / "run", live) as ckpt:
        assert ckpt.resume().step == 4
    assert (live["t"] == 4).all()


def test_the_room_alignment_and_holes(run_folder: Path) -> None:
    tensors = {f"t{n}": values(dtype, n % 7) for n, dtype in enumerate(list(DTYPE_CODES) * 3)}
    shard = saved(run_folder, {"d": tensors, "o": ["x" * 1001]}) / "rank-00000.safetensors"
    room, entries, _ = raw_header(shard)
    assert room % 4096 == 0
    position = 0
    for entry in entries.values():
        begin, end = entry["data_offsets"]
        assert begin == position
        assert (room + begin) % DTYPE_BYTES[entry["dtype"]] == 0
        position = end
    assert room + position == shard.stat().st_size


def test_what_the_metadata_says(run_folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with opened(run_folder, {"m": model, "o": optimizer, "t": torch.zeros(4, 2).t()}) as ckpt:
        ckpt.resume()
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        ckpt.step()
        ckpt.save()
        run_id = json.loads((run_folder / "run.json").read_text())["run"]
    _, entries, metadata = raw_header(base_folder(run_folder, 1) / "rank-00000.safetensors")
    described = metadata.pop("entries")
    assert metadata == {
        "format": 1,
        "run": run_id,
        "timeline": 1,
        "step": 1,
        "lsn": 2,
        "rank": 0,
        "world": 1,
        "exact": True,
        "aliases": {},
    }
    assert set(described) == set(entries)
    for name, entry in described.items():
        assert entry["lsn"] == 2
        assert entry["global_shape"] == entries[name]["shape"]
        assert entry["global_offset"] == [0] * len(entries[name]["shape"])
        assert entry["placement"] == "whole"
        assert len(entry["digest"]) == 32
    assert described["t"]["stride"] == [1, 2]
    assert [name for name in described if "stride" in described[name]] == ["t"]


def test_digests_can_be_checked_without_everstep(run_folder: Path) -> None:
    """The digest of a file is the digest of the digests of its parts."""
    folder = saved(run_folder, {"d": every_dtype(), "o": {"x": [1, 2]}})
    (file,) = json.loads((folder / "rank-00000.done").read_text())["files"]
    data = (folder / file["name"]).read_bytes()
    room, entries, metadata = raw_header(folder / file["name"])
    parts = [xxhash.xxh3_128_hexdigest(data[:room])]
    assert (file["length"], file["header_length"]) == (len(data), room)
    assert file["header_digest"] == parts[0]
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        parts.append(xxhash.xxh3_128_hexdigest(data[room + begin : room + end]))
        assert metadata["entries"][name]["digest"] == parts[-1]
    assert file["digest"] == xxhash.xxh3_128_hexdigest("".join(parts).encode())


def test_many_entries_are_split_over_several_files(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before safetensors' limit; here with a small one. Ties stay where their entry is."""
    monkeypatch.setattr(
        header, "plan_shards", lambda entries: plan_shards(entries, header_bytes_max=3000)
    )
    tensors: dict[str, Any] = {f"t{n:02}": torch.full((n,), float(n)) for n in range(20)}
    tensors["tie"] = tensors["t03"]
    tensors["last"] = tensors["t19"]
    folder = saved(run_folder, {"d": tensors, "o": "x"}, method="async")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards == [f"rank-00000-{n:05d}.safetensors" for n in range(1, len(shards))] + [
        "rank-00000.safetensors"
    ]
    loaded: dict[str, torch.Tensor] = {}
    for name in shards:
        part = safetensors.torch.load_file(folder / name)
        assert not set(part) & set(loaded)
        loaded |= part
    assert torch.equal(loaded["d/t07"], tensors["t07"])
    live: dict[str, Any] = {"d": None, "o": None}
    with opened(run_folder, live) as ckpt:
        assert ckpt.resume().skipped == ()
    assert_same(live, {"d": tensors, "o": "x"})
    assert live["d"]["tie"] is live["d"]["t03"]
    (base,) = inventory_of(run_folder).bases
    assert base.manifest is not None
    assert len(base.manifest.markers[0].files) == len(shards)


def test_until_it_is_whole_nobody_accepts_it(run_folder: Path) -> None:
    """The header comes last: killed before it, the file begins with zeros."""
    from everstep.seams import failpoints

    seen: list[bytes] = []

    def look(name: str) -> None:
        (staged,) = run_folder.rglob("*.safetensors.tmp")
        seen.append(staged.read_bytes())
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(staged, "pt").__enter__()

    failpoints.arm("save.before_header", look)
    saved(run_folder, {"t": torch.ones(3000)})
    assert seen[0][:4096] == bytes(4096)
    assert len(seen[0]) > 12_000


# Writing and reading shards directly.


class Written:
    """A shard of some tensors, written by hand."""

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.path = PurePath(path)
        entries = [Entry.whole(n, DTYPE_CODES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
        (self.shard,) = plan_files(IDENTITY, entries, {}, {})
        self.placed = self.shard.layout.placed
        self.room = self.shard.room_bytes
        self.body = LiveBody(self.shard.layout, tensors, {})
        self.ring = ChunkRing(4, 2)
        self.record: FileRecord | None = None

    def write(self, body: Any = None, timeout_s: float = TIMEOUT_S) -> FileRecord:
        file = PosixFileSystem().create(self.path, direct=True)
        try:
            written = write_shard(
                file,
                self.shard,
                IDENTITY,
                body or self.body,
                self.ring,
                timeout_s=timeout_s,
                progress=silent,
            )
        finally:
            file.close()
        assert written == digest_shard(self.shard, IDENTITY, body or self.body)
        self.record = written.record
        return self.record

    def read(self, sizes: list[int] | None = None) -> bytes:
        assert self.record is not None
        file = PosixFileSystem().open(self.path, direct=True)
        got = bytearray()

        def sink(begin: int, piece: memoryview) -> None:
            assert begin == len(got)
            got.extend(piece)

        try:
            header = read_header(file, self.record, self.path)
            read_body(
                OpenShard(file, self.record, header, self.path),
                self.ring,
                timeout_s=TIMEOUT_S,
                progress=silent,
                sink=sink,
            )
        finally:
            file.close()
        return bytes(got)


def body_of(placed: tuple[Placed, ...], tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(byte_view(tensors[p.entry.name]).numpy().tobytes() for p in placed)


def staged(shard: Written, tensors: dict[str, torch.Tensor]) -> ArenaBody:
    """The shard's tensors copied into an arena, as a capture does it."""
    size = -(-shard.shard.layout.size_bytes // 4096) * 4096
    arena = Arena.anonymous(max(4096, size))
    block = torch.frombuffer(arena.view, dtype=torch.uint8)
    lane = CpuLane()
    lane.copy_now(plan_batches(shard.shard.layout, tensors, set(tensors)), block)
    lane.close()
    incoming = Incoming(lambda: 0, timeout_s=TIMEOUT_S)
    incoming.arrived({})
    view = arena.view[:size]
    return ArenaBody(view, shard.shard.layout.size_bytes, 0, incoming, has_objects=True)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [4095],
        [4096],
        [4097],
        [CHUNK_BYTES],
        [CHUNK_BYTES - 1, 2],
        [CHUNK_BYTES + 1],
        [3, 0, 5, 2 * CHUNK_BYTES, 0, 7],
        [1000] * 50,
    ],
    ids=str,
)
def test_every_length_of_body(sizes: list[int], tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.randint(0, 255, (s,), dtype=torch.uint8) for n, s in enumerate(sizes)}
    for way in ("live", "staged"):
        shard = Written(tmp_path / way, tensors)
        size = sum(sizes)
        body: Any = shard.body
        if way == "staged":
            body = staged(shard, tensors)
        record = shard.write(body)
        expected = body_of(shard.placed, tensors)
        assert Path(shard.path).read_bytes()[shard.room :] == expected
        assert record.length == shard.room + size
        assert shard.read() == expected
        shard.ring.close()


@given(cuts=st.lists(st.integers(0, 40), max_size=12), entries=st.lists(st.integers(0, 30)))
def test_digests_do_not_depend_on_the_pieces(cuts: list[int], entries: list[int]) -> None:
    data = np.random.default_rng(1).integers(0, 255, sum(entries), dtype=np.uint8).tobytes()
    placed, position, expected = [], 0, []
    for number, size in enumerate(entries):
        placed.append(Placed(Entry.whole(str(number), "U8", (size,)), position, position + size))
        expected.append(xxhash.xxh3_128_hexdigest(data[position : position + size]))
        position += size
    order: list[int] = []
    digester = Digester(placed, lambda index, hex_: order.append(index))
    begin = 0
    for cut in [*cuts, len(data)]:
        end = min(len(data), begin + cut)
        digester.update(memoryview(data)[begin:end])
        begin = end
    digester.update(memoryview(data)[begin:])
    assert digester.digests == expected
    assert order == list(range(len(entries)))


def test_digests_are_xxh3_128() -> None:
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest_of_file("a" * 32, ["b" * 32]) == digest(b"a" * 32 + b"b" * 32)


def test_a_damaged_entry_is_named(tmp_path: Path) -> None:
    tensors = {"first": torch.zeros(100), "second": torch.zeros(100), "third": torch.zeros(100)}
    shard = Written(tmp_path / "s", tensors)
    shard.write()
    flip(tmp_path / "s", shard.room + 400)
    with pytest.raises(DamageError, match="entry 'second' is damaged") as error:
        shard.read()
    assert error.value.entry == "second"
    assert error.value.step == IDENTITY.step
    shard.ring.close()


@pytest.mark.slow
def test_every_byte_of_a_header_is_vouched_for(tmp_path: Path) -> None:
    """The padding behind it, and what no digest of an entry covers, such as LSNs and strides."""
    shard = Written(tmp_path / "s", {"t": torch.zeros(30)})
    record = shard.write()
    files = PosixFileSystem()
    for offset in range(record.header_length):
        flip(tmp_path / "s", offset, bit=offset % 8)
        file = files.open(shard.path)
        with pytest.raises(DamageError, match="the header's digest does not match"):
            read_header(file, record, shard.path)
        file.close()
        flip(tmp_path / "s", offset, bit=offset % 8)
    shard.read()
    shard.ring.close()


def test_the_digest_of_a_file_is_compared_with_its_marker(tmp_path: Path) -> None:
    shard = Written(tmp_path / "s", {"t": torch.zeros(30)})
    shard.record = replace(shard.write(), digest="0" * 32)
    with pytest.raises(DamageError, match="the file's digest does not match its marker"):
        shard.read()
    shard.ring.close()


@pytest.mark.parametrize("change", [-1, 1, 4096, -4096])
def test_another_length_is_noticed_before_anything_is_read(change: int, tmp_path: Path) -> None:
    shard = Written(tmp_path / "s", {"t": torch.zeros(3000)})
    record = shard.write()
    with (tmp_path / "s").open("r+b") as file:
        file.truncate(record.length + change)
    with pytest.raises(DamageError, match=f"{record.length + change} bytes"):
        shard.read()
    shard.ring.close()


@pytest.mark.parametrize("length", [0, 8, 1 << 62, 200_000_000])
def test_header_lengths_that_cannot_be(length: int, tmp_path: Path) -> None:
    shard = Written(tmp_path / "s", {"t": torch.zeros(3000)})
    record = shard.write()
    size = record.length
    if length == 200_000_000:  # a sparse file: claims much, holds nothing
        with (tmp_path / "s").open("r+b") as file:
            file.truncate(1 << 40)
        size = 1 << 40
    shard.record = FileRecord(record.name, size, length, record.header_digest, record.digest)
    with pytest.raises(FormatError, match="not a possible header length"):
        shard.read()
    shard.ring.close()


def test_a_length_field_that_contradicts_the_marker(tmp_path: Path) -> None:
    """Both digests are right, but another reader would take other bytes for the header."""
    shard = Written(tmp_path / "s", {"t": torch.zeros(3000)})
    record = shard.write()
    data = bytearray((tmp_path / "s").read_bytes())
    data[:LENGTH_BYTES] = struct.pack("<Q", record.header_length - 16)
    (tmp_path / "s").write_bytes(data)
    shard.record = FileRecord(
        record.name,
        record.length,
        record.header_length,
        digest(memoryview(data)[: record.header_length]),
        record.digest,
    )
    with pytest.raises(FormatError, match="contradicts its marker"):
        shard.read()
    shard.ring.close()


def test_records_are_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "record"
    with path.open("wb") as file:
        file.truncate(RECORD_BYTES_MAX + 1)
    with pytest.raises(FormatError, match="too many for a record"):
        read_record_bytes(PosixFileSystem(), path)
    path.write_bytes(b"abc")
    assert read_record_bytes(PosixFileSystem(), path) == b"abc"


class Broken:
    """A body whose bytes cannot be had."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def fill(self, begin: int, chunk: memoryview, seen: Any) -> None:
        raise self.error

    def held(self, begin: int, end: int) -> memoryview | None:
        return None

    def objects_bytes(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no"), DeadlineError("x")])
def test_chunks_are_not_lost_to_errors(error: BaseException, tmp_path: Path) -> None:
    shard = Written(tmp_path / "s", {"t": torch.zeros(3000)})
    for number in range(9):
        shard.path = PurePath(tmp_path / str(number))
        with pytest.raises(type(error)):
            shard.write(Broken(error))
    shard.path = PurePath(tmp_path / "good")
    shard.write(timeout_s=1.0)
    shard.ring.close()


def test_chunks_go_round() -> None:
    ring = ChunkRing(2, 1)
    first, second = ring.take(1), ring.take(1)
    with pytest.raises(DeadlineError, match="no chunk was transferred"):
        ring.take(0.01)
    ring.give(first)
    assert ring.take(1) is first
    ring.give(second)
    ring.close()


def test_few_copied_chunks_wait_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More would leave the cache before the disk fetches them: while one is copied, no more than
    two are on their way, however many the ring has."""
    shard = Written(tmp_path / "s", {"t": torch.zeros(7 * CHUNK_BYTES // 4)})
    shard.ring.close()
    shard.ring = ChunkRing(8, 6)
    most, filled, over, waited = 0, 0, [0], threading.Event()
    fill = LiveBody.fill

    def filling(*args: Any) -> None:
        nonlocal most, filled
        most, filled = max(most, filled - over[0]), filled + 1
        fill(*args)

    file = PosixFileSystem().create(shard.path, direct=True)
    write, is_over = file.write, shard.ring.is_over

    def writing(data: memoryview, offset: int) -> None:
        assert waited.wait(TIMEOUT_S)
        write(data, offset)
        over[0] += 1

    def waiting(transfer: Any, timeout_s: float) -> bool:
        waited.set()
        return is_over(transfer, timeout_s)

    monkeypatch.setattr(LiveBody, "fill", filling)
    monkeypatch.setattr(file, "write", writing)
    monkeypatch.setattr(shard.ring, "is_over", waiting)
    about = file, shard.shard, IDENTITY, shard.body, shard.ring
    write_shard(*about, timeout_s=TIMEOUT_S, progress=silent)
    file.close()
    shard.ring.close()
    assert most <= 2
