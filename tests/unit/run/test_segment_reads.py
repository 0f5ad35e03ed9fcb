"""Records read one by one from a segment into memory that is used again: the same bytes, nothing
that is damaged passes, and no memory is lent twice.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.arena import ReusedMemory
from everstep.errors import DamageError, EverstepError
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.format.writer import ChunkRing
from everstep.restore.log import LogFound
from everstep.restore.redo.driver import verified_steps
from everstep.run import log_reads
from everstep.run.chain import Chain
from everstep.run.log_reads import LogReads
from everstep.run.segments import read_segment, validated
from everstep.seams import PosixFileSystem
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import plan_shards
from tests.support.logged import segments_of, write_segment
from tests.support.world import TIMEOUT_S

RUN = "r" * 32
STEPS = 3


@pytest.fixture
def ring() -> Iterator[ChunkRing]:
    found = ChunkRing(2, 2)
    yield found
    found.close()


def small_record(kind: str, step: int, numel: int) -> LogRecord:
    """With tensors of two dtypes, or none."""
    entries = [Entry.whole("a", "F32", (numel,)), Entry.whole("b", "BF16", (numel // 2,))]
    (layout,) = plan_shards(entries)
    data = memoryview(torch.randint(0, 256, (layout.size_bytes,), dtype=torch.uint8).numpy()).cast(
        "B"
    )
    objects = {"about": bytes([step])}
    head = RecordHead(kind, 1, step, step, "shape")  # type: ignore[arg-type]
    return LogRecord(head, layout, objects, data, record_digest(data, objects))


def written(run: Path, ring: ChunkRing, numel: int) -> list[LogRecord]:
    """A segment of a few steps of one update each."""
    torch.manual_seed(1)
    records = []
    for step in range(1, STEPS + 1):
        records += [small_record("update", step, numel + step), small_record("mark", step, step)]
    (run / "timeline-00001").mkdir(parents=True)
    write_segment(run, RUN, records, 0, ring)
    return records


@contextmanager
def reading(run: Path, ring: ChunkRing) -> Iterator[tuple[LogReads, Callable[[int], LogRecord]]]:
    (segment,) = (validated(one, RUN) for one in segments_of(run))
    with closing(LogReads(PosixFileSystem(), ring, TIMEOUT_S)) as reads:
        yield reads, partial(reads.read, segment)


@pytest.mark.parametrize("numel", [0, 1, 1000, 5000])
@pytest.mark.parametrize("first", range(2 * STEPS))
def test_the_same_records_from_any_place_on(
    numel: int, first: int, tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reads of a page, of which several make up a record."""
    monkeypatch.setattr(log_reads, "_READ_BYTES", 4096)
    records = written(tmp_path, ring, numel)
    with reading(tmp_path, ring) as (_, read):
        found = [read(number) for number in range(first, len(records))]
    (segment,) = segments_of(tmp_path)
    whole = read_segment(PosixFileSystem(), segment, ring, timeout_s=TIMEOUT_S)
    for expected, other, got in zip(records[first:], whole[first:], found, strict=True):
        got.verify()
        assert got.head == expected.head
        assert bytes(got.data) == bytes(expected.data) == bytes(other.data)


def test_a_bit_flipped_anywhere_is_found_before_anything_is_decoded(
    tmpfs_folder: Path, ring: ChunkRing
) -> None:
    """At every byte of the file: no step comes out of it that is not what it was."""
    records = written(tmpfs_folder, ring, 5)
    wanted = [bytes(record.data) for record in records]
    chain = Chain((1, 0), tuple((1, step) for step in range(1, STEPS + 1)), "", None)  # type: ignore[arg-type]
    (segment,) = segments_of(tmpfs_folder)
    path = Path(segment.path) / "rank-00000.safetensors"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        log = LogFound((), [segment])  # as it was found before the bit flipped
        found: list[bytes] = []
        stopped = ""
        for updates, mark in log.reader(PosixFileSystem(), ring, TIMEOUT_S).steps(chain, 0):
            try:
                if isinstance(mark, EverstepError):
                    raise mark
                for record in (*updates, mark):
                    record.verify()
            except EverstepError as error:
                stopped = error.message
                break
            found += [bytes(record.data) for record in (*updates, mark)]
        assert str(segment.path) in stopped, at
        assert found == wanted[: len(found)]


def test_what_is_taken_for_replay_is_verified(
    tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading does not look at the bytes: what decodes them must."""
    records = written(tmp_path, ring, 1000)
    monkeypatch.setattr("everstep.restore.redo.driver.update_from_record", lambda record, **_: None)
    (segment,) = segments_of(tmp_path)
    path = Path(segment.path) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[data.index(bytes(records[2].data[:64])) + 10] ^= 4
    path.write_bytes(data)
    chain = Chain((1, 0), tuple((1, step) for step in range(1, STEPS + 1)), "", None)  # type: ignore[arg-type]
    log = LogFound((), [segment]).reader(PosixFileSystem(), ring, TIMEOUT_S)
    first, second, *rest = verified_steps(log.steps(chain, 0), log.verified)
    assert not isinstance(first, EverstepError)
    assert isinstance(second, DamageError)
    assert rest == []


def test_a_file_that_is_cut_while_it_is_read(
    tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reads, "_AHEAD_RECORDS", 0)
    written(tmp_path, ring, 100_000)
    (segment,) = segments_of(tmp_path)
    with reading(tmp_path, ring) as (_, read):
        read(0)
        os.truncate(Path(segment.path) / "rank-00000.safetensors", 8192)
        with pytest.raises(DamageError, match="is truncated"):
            read(1)


def test_memory_is_lent_once_at_a_time() -> None:
    """A tensor that is left of it is reason enough not to lend it again."""
    memory = ReusedMemory()
    lent = memory.take(1 << 20)
    lent[:4] = b"mine"
    tensor = torch.frombuffer(lent[:4], dtype=torch.uint8)
    address = tensor.data_ptr()
    part = tensor[1:]
    del lent, tensor
    gc.collect()
    other = memory.take(1 << 20)
    other[:4] = b"else"
    assert bytes(part.numpy()) == b"ine"
    del part
    again = memory.take(1 << 20)
    assert torch.frombuffer(again, dtype=torch.uint8).data_ptr() == address


@given(sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=30), kept=st.integers(0, 4))
def test_no_two_that_are_lent_lie_in_one_memory(sizes: list[int], kept: int) -> None:
    memory = ReusedMemory()
    held: list[tuple[int, memoryview]] = []
    for number, size in enumerate(sizes):
        view = memory.take(size)
        assert view.nbytes == size
        view[:] = bytes([number]) * size
        held = [*held, (number, view)][-kept:] if kept else []
        del view
        for owner, mine in held:
            assert bytes(mine) == bytes([owner]) * mine.nbytes


@pytest.mark.parametrize(("limit", "begun"), [(3000, 2), (1 << 20, 2 * STEPS)])
def test_no_more_is_begun_than_the_limit(
    limit: int, begun: int, tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of 5000 bytes and the small mark behind it; the next step is as large."""
    monkeypatch.setattr(log_reads, "_AHEAD_BYTES", limit)
    records = written(tmp_path, ring, 1000)
    with reading(tmp_path, ring) as (reads, read):
        first = read(0)
        assert bytes(first.data) == bytes(records[0].data)
        assert reads.pending == begun - 1
        assert [bytes(read(number).data) for number in range(1, len(records))] == [
            bytes(record.data) for record in records[1:]
        ]


@pytest.mark.parametrize("kept", [0, 1])
def test_one_step_is_read_while_another_is_in_use(
    kept: int, tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large steps: memory for two, even if the caller keeps the last one."""
    monkeypatch.setattr(log_reads, "_AHEAD_BYTES", 0)
    records = written(tmp_path, ring, 100_000)
    step_bytes = sum(record.layout.size_bytes for record in records[4:])
    most_bytes = 0
    take = ReusedMemory.take

    def noting(self: ReusedMemory, size_bytes: int) -> memoryview:
        nonlocal most_bytes
        memory = take(self, size_bytes)
        most_bytes = max(most_bytes, self.lent_bytes)
        return memory

    monkeypatch.setattr(ReusedMemory, "take", noting)
    with reading(tmp_path, ring) as (_, read):
        held: list[LogRecord] = []
        for number, record in enumerate(records):
            if number % 2 == 0:
                held = held[-2:] if kept else []
            held.append(read(number))
            assert bytes(held[-1].data) == bytes(record.data)
    assert step_bytes <= most_bytes <= (1 + kept) * (step_bytes + step_bytes // 8)


def test_a_small_request_does_not_cost_a_large_block() -> None:
    """As the mark between the gradients of two steps: the next ones would come fresh, slowly."""
    memory = ReusedMemory()
    large, other = memory.take(1 << 20), memory.take(1 << 20)
    large[:4] = b"used"
    del large
    small = memory.take(4096)
    again = memory.take(1 << 20)
    assert bytes(again[:4]) == b"used"
    assert memory.lent_bytes == small.nbytes + again.nbytes + other.nbytes


@given(
    sizes=st.lists(st.integers(1, 40).map(lambda pages: 4096 * pages), min_size=1, max_size=30),
    kept=st.integers(0, 4),
)
def test_hardly_more_is_taken_than_was_lent_at_one_time(sizes: list[int], kept: int) -> None:
    memory = ReusedMemory()
    held: list[memoryview] = []
    most_bytes = 0
    for size in sizes:
        view = memory.take(size)
        most_bytes = max(most_bytes, memory.lent_bytes)
        assert memory.lent_bytes >= size + sum(other.nbytes for other in held)
        assert memory.lent_bytes + memory.free_bytes <= most_bytes + most_bytes // 8
        held = [*held, view][-kept:] if kept else []
        del view
