"""Segments read one behind the other: what comes next is on its way before it is asked for, and
whatever is wrong with it shows in its own place.
"""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import ItemsView, Iterator
from contextlib import closing
from pathlib import Path, PurePath

import pytest
import torch

from everstep.arena import ReusedMemory
from everstep.errors import EverstepError
from everstep.format.header import ShardIdentity
from everstep.format.log import (
    LOG_OBJECT,
    LogRecord,
    RecordHead,
    plan_segment,
    record_digest,
    records_of_segment,
)
from everstep.format.writer import ChunkRing
from everstep.restore.log import LogFound
from everstep.restore.redo.driver import ReplayDriver
from everstep.run import log_reads
from everstep.run.chain import Chain
from everstep.run.log_reads import LogReads
from everstep.run.segments import SegmentFound
from everstep.seams import PosixFileSystem
from everstep.seams.filesystem import ReadFile
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import plan_shards
from tests.support.log.redone import STEPS as TRAINED
from tests.support.log.redone import resumed, trained
from tests.support.logged import segments_of, write_segment
from tests.support.world import TIMEOUT_S

RUN = "r" * 32
STEPS = 6
NUMEL = 5000


@pytest.fixture
def ring() -> Iterator[ChunkRing]:
    found = ChunkRing(2, 2)
    yield found
    found.close()


class Files(PosixFileSystem):
    """Notes which segments were opened, by their last step."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        self.opened.append(int(path.parent.name.split("-")[-1]))
        return super().open(path, direct=direct)


def record(kind: str, step: int) -> LogRecord:
    (layout,) = plan_shards([Entry.whole("a", "F32", (NUMEL if kind == "update" else 1,))])
    data = torch.randint(0, 256, (layout.size_bytes,), dtype=torch.uint8).numpy().data.cast("B")
    objects = {"about": bytes([step])}
    head = RecordHead(kind, 1, step, step, "shape")  # type: ignore[arg-type]
    return LogRecord(head, layout, objects, data, record_digest(data, objects))


def written(run: Path, ring: ChunkRing, batch_steps: int) -> list[list[LogRecord]]:
    """A log of a few steps; their records."""
    torch.manual_seed(1)
    (run / "timeline-00001").mkdir(parents=True)
    steps = [[record("update", step), record("mark", step)] for step in range(1, STEPS + 1)]
    for after in range(0, STEPS, batch_steps):
        records = [one for step in steps[after : after + batch_steps] for one in step]
        write_segment(run, RUN, records, after, ring)
    return steps


def chain_of(first: int = 1, last: int = STEPS) -> Chain:
    steps = tuple((1, step) for step in range(first, last + 1))
    return Chain((1, first - 1), steps, "", None)  # type: ignore[arg-type]


def noting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is lent each time that memory for a part of a record was taken."""
    found: list[int] = []
    take = ReusedMemory.take

    def taking(self: ReusedMemory, size_bytes: int) -> memoryview:
        memory = take(self, size_bytes)
        found.append(self.lent_bytes)
        return memory

    monkeypatch.setattr(ReusedMemory, "take", taking)
    return found


def file_of(run: Path, last: int) -> Path:
    (found,) = (one for one in segments_of(run) if one.last == last)
    return Path(found.path) / "rank-00000.safetensors"


@pytest.mark.parametrize("batch_steps", [1, 2, STEPS])
@pytest.mark.parametrize(("first", "last"), [(1, STEPS), (2, 5), (4, 4), (6, 6)])
def test_the_same_records_wherever_a_chain_begins_and_ends(
    first: int,
    last: int,
    batch_steps: int,
    tmp_path: Path,
    ring: ChunkRing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And none but these are read."""
    steps = written(tmp_path, ring, batch_steps)
    taken = noting(monkeypatch)
    files, log = Files(), LogFound((), segments_of(tmp_path))
    found = log.reader(files, ring, TIMEOUT_S).steps(chain_of(first, last), first - 1)
    for expected, (updates, mark) in zip(steps[first - 1 : last], found, strict=True):
        assert not isinstance(mark, EverstepError)
        for one, other in zip(expected, (*updates, mark), strict=True):
            other.verify()
            assert one.head == other.head
            assert bytes(one.data) == bytes(other.data)
    needed = [one.last for one in segments_of(tmp_path) if one.last >= first and one.after < last]
    assert files.opened == needed
    assert len(taken) == 2 * (last - first + 1)


@pytest.mark.parametrize("records", [1, 16])
def test_the_next_segments_are_on_their_way(
    records: int, tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first step comes, and no segment is opened twice."""
    monkeypatch.setattr(log_reads, "_AHEAD_RECORDS", records)
    written(tmp_path, ring, 1)
    files, log = Files(), LogFound((), segments_of(tmp_path))
    with closing(log.reader(files, ring, TIMEOUT_S).steps(chain_of(), 0)) as found:
        next(found)
        assert files.opened == ([1, 2] if records == 1 else list(range(1, STEPS + 1)))
        assert len(list(found)) == STEPS - 1
    assert files.opened == list(range(1, STEPS + 1))


@pytest.mark.parametrize("batch_steps", [1, 2])
def test_segments_together_take_no_more_memory_than_one(
    batch_steps: int, tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large steps: memory for the one in use and the one being read."""
    monkeypatch.setattr(log_reads, "_AHEAD_BYTES", 0)
    written(tmp_path, ring, batch_steps)
    most = noting(monkeypatch)
    log = LogFound((), segments_of(tmp_path))
    for _, mark in log.reader(PosixFileSystem(), ring, TIMEOUT_S).steps(chain_of(), 0):
        assert not isinstance(mark, EverstepError)
        del mark
    pages = -(-4 * NUMEL // 4096) + 1  # of an update that begins anywhere in a page
    assert (pages + 1) * 4096 < max(most) <= 2 * (pages + 1) * 4096


@pytest.mark.parametrize("batch_steps", [1, 2])
@pytest.mark.parametrize("spoil", ["header", "missing", "cut"])
def test_a_segment_that_cannot_be_read_ahead_is_an_error_in_its_place(
    spoil: str, batch_steps: int, tmp_path: Path, ring: ChunkRing
) -> None:
    """All steps before it are there, and what is behind it does not come."""
    steps = written(tmp_path, ring, batch_steps)
    # As it was found before it was unusable.
    log = LogFound((), segments_of(tmp_path)).reader(PosixFileSystem(), ring, TIMEOUT_S)
    path = file_of(tmp_path, 4)
    if spoil == "header":
        path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    elif spoil == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 8192)
    found = list(log.steps(chain_of(), 0))
    good = 4 - batch_steps
    assert len(found) == good + 1
    for expected, (updates, mark) in zip(steps[:good], found, strict=False):
        assert not isinstance(mark, EverstepError)
        assert [bytes(one.data) for one in (*updates, mark)] == [bytes(r.data) for r in expected]
    error = found[-1][1]
    assert isinstance(error, EverstepError)
    assert str(path.parent) in error.message
    assert log.take_repaired() == []  # nothing but that was damaged


def test_what_was_not_expected_is_read_too(tmp_path: Path, ring: ChunkRing) -> None:
    """In any order: going back, leaving out, and behind what was expected."""
    steps = written(tmp_path, ring, 2)
    found = sorted(segments_of(tmp_path), key=lambda one: one.last)
    expected: list[tuple[SegmentFound, int]] = [(found[0], 0), (found[0], 1), (found[1], 0)]
    with closing(LogReads(PosixFileSystem(), ring, TIMEOUT_S, expected)) as reads:
        asked = [(0, 0), (0, 3), (0, 1), (1, 2), (2, 3), (1, 0), (1, 1), (0, 0), (2, 1), (2, 2)]
        for number, place in asked:
            got = reads.read(found[number], place)
            wanted = [one for step in steps[2 * number : 2 * number + 2] for one in step][place]
            assert bytes(got.data) == bytes(wanted.data)
            assert reads.digest_of(found[number], place) == wanted.digest
            assert reads.digest_of(found[number - 1], place) is None
        del got
        reads.close()
        assert reads.lent_bytes == 0


@pytest.mark.usefixtures("no_garbage")
def test_whoever_stops_leaves_nothing_under_way(tmp_path: Path, ring: ChunkRing) -> None:
    written(tmp_path, ring, 1)
    descriptors = set(os.listdir("/proc/self/fd"))
    log = LogFound((), segments_of(tmp_path))
    with closing(log.reader(PosixFileSystem(), ring, TIMEOUT_S).steps(chain_of(), 0)) as found:
        next(found)
        assert len(os.listdir("/proc/self/fd")) > len(descriptors)
    assert set(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.thinned(3)
@pytest.mark.parametrize("batch_steps", [1, 3, TRAINED])
@pytest.mark.parametrize("at", [2, 5, TRAINED])
def test_a_step_that_was_read_ahead_is_verified_before_it_is_applied(
    at: int, batch_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of a later step, flipped on the way from the disk, while those before it come."""
    states = trained(tmp_path / "run", batch_steps=batch_steps)
    read = LogReads.read
    step = ReplayDriver.step
    applied: list[int] = []

    def flipping(self: LogReads, segment: SegmentFound, place: int) -> LogRecord:
        found = read(self, segment, place)
        if found.head.kind == "update" and found.head.step == at:
            found.data[-1] ^= 0x10
        return found

    def noting(self: ReplayDriver, one: object) -> None:
        applied.append(one.mark.head.step)  # type: ignore[attr-defined]
        step(self, one)  # type: ignore[arg-type]

    monkeypatch.setattr(LogReads, "read", flipping)
    monkeypatch.setattr(ReplayDriver, "step", noting)
    with resumed(tmp_path / "run") as (world, recovery):
        assert (recovery.step, recovery.replayed) == (at - 1, at - 1)
        assert recovery.skipped
        assert world.snapshot() == states[at - 1]
    assert applied == list(range(1, at))


def test_names_of_a_segment_are_looked_at_once() -> None:
    """However many records it has."""

    class Tensors(UserDict[str, memoryview]):
        looks = 0

        def items(self) -> ItemsView[str, memoryview]:
            self.looks += 1
            return super().items()

    records = [record(kind, step) for step in range(1, 4) for kind in ("update", "mark")]
    identity = ShardIdentity(RUN, 1, 3, 3, 0, 1, True)
    plan, body = plan_segment(identity, records)
    names = [place.entry.name for place in plan.layout.placed]
    tensors = Tensors({name: memoryview(body.source(name)) for name in [*names, LOG_OBJECT]})
    found = records_of_segment(identity, tensors, PurePath("segment"))
    assert [(one.head, bytes(one.data)) for one in found] == [
        (one.head, bytes(one.data)) for one in records
    ]
    assert tensors.looks == 1
