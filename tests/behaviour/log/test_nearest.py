"""Of a step that several places have, the one is taken that is whole; and none where two timelines
of the same number have parted."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

import everstep.trainer.job.job as job_module
from everstep import LogOptions
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError, RecoveryError, StorageError
from everstep.format.log import LogRecord, record_digest
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.held import PeerLog, pack_steps
from everstep.restore.log import LogFound, LogReader
from everstep.restore.redo.driver import verified_steps
from everstep.run.chain import Chain
from everstep.run.scan import Inventory, scan_run
from everstep.run.segments import read_segment, scan_log
from everstep.seams import PosixFileSystem
from everstep.state.layout.entries import UPDATE_OBJECT
from everstep.state.values.objects import encode
from everstep.testing.conformance import walk
from everstep.tiers.contract import Item
from everstep.tiers.files import TierFileSystem
from everstep.tiers.memory import MemoryTier
from everstep.tiers.options import TierOptions
from everstep.trainer.job.run_folder import SharedRun
from tests.support.copying import contents, put
from tests.support.log.copies import ON_DISK, until
from tests.support.log.every_step import World, opened, run_steps
from tests.support.ranks.copying import store
from tests.support.ranks.logs import die as all_die
from tests.support.ranks.peer_logs import Copying, records_of_steps
from tests.support.ranks.peering import record_of
from tests.support.ranks.together import resume, trained, trainings
from tests.support.world import forget

__all__ = ["store"]  # a fixture

RUN = PurePath("/run")


def lossy(record: LogRecord) -> LogRecord:
    """What a peer that gets lossy gradients holds of a record."""
    if record.head.kind == "mark":
        return record
    objects = {UPDATE_OBJECT: encode({"lossy": True})}
    digest = record_digest(record.data, objects)
    return LogRecord(record.head, record.layout, objects, record.data, digest)


@pytest.mark.parametrize("where", ["disk", "copy"])
def test_whole_steps_on_disk_or_in_a_copy_go_before_lossy_ones_of_a_peer(where: str) -> None:
    whole = Copying(batch_steps=1)
    whole.train(1, 2, 3)
    files, empty = TierFileSystem(whole.tier, RUN), TierFileSystem(MemoryTier(), RUN)
    there = Inventory(RUN, timelines={1: record_of(1)})
    copies = [(files, there)] if where == "copy" else []
    lent = [lossy(record) for record in records_of_steps(2, 4)]
    mine = records_of_steps(1, 1)
    disk = files if where == "disk" else empty
    ring = ChunkRing(3, 1)
    log = LogFound.of(disk, there, mine, rank=1, lent=lent, copies=copies, bases=[BaseId(1, 0)])
    reader = log.reader(disk, ring, 20.0)
    try:
        told = {
            step: [UPDATE_OBJECT in one.objects for one in reader.records_of(1, step)]
            for step in range(1, 5)
        }
        assert reader.records_of(1, 1)[0] is mine[0]
    finally:
        reader.close()
        ring.close()
    assert told == {1: [False] * 2, 2: [False] * 2, 3: [False] * 2, 4: [True] * 2}
    assert sorted(log.index.marks) == [(1, step) for step in range(1, 5)]


def test_a_segment_that_cannot_be_used_does_not_hide_its_copy() -> None:
    disk, copy = Copying(batch_steps=2), Copying(batch_steps=2)
    for one in (disk, copy):
        one.train(1, 2)
    (name,) = [item.name for item in walk(disk.tier) if item.name.endswith("safetensors")]
    disk.tier.delete(name)
    here, far = (TierFileSystem(one.tier, RUN) for one in (disk, copy))
    there = Inventory(RUN, timelines={1: record_of(1)})
    ring = ChunkRing(3, 1)
    log = LogFound.of(here, there, [], rank=1, copies=[(far, there)], bases=[BaseId(1, 0)])
    reader = log.reader(here, ring, 20.0)
    try:
        assert len(reader.records_of(1, 2)) == 2
    finally:
        reader.close()
        ring.close()
    assert [one.step for one in log.skipped] == [2]


def _spoil(tier: MemoryTier, last: int) -> None:
    """Changes a bit of a record in the segment that ends with this step: its first."""
    end = f"-{last:012d}/rank-00001.safetensors"
    (name,) = [one for one in contents(tier) if one.endswith(end)]
    data = bytearray(contents(tier)[name])
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # behind the header; the index is at the end
    put(tier, name, bytes(data))


def _replayed(log: LogReader) -> list[Any]:
    """What replay gets of steps 1 to 6: what was recorded, and an error where it ends."""
    chain = Chain((1, 0), tuple((1, step) for step in range(1, 7)), "", None)  # type: ignore[arg-type]
    found: list[Any] = []
    for step in verified_steps(log.steps(chain, 0), log.verified):
        if isinstance(step, EverstepError):
            return [*found, step]
        found += [bytes(one.data) for one in (*(record for record, _ in step.updates), step.mark)]
    return found


@pytest.mark.parametrize("batch_steps", [2, 3], ids=["same segments", "other segments"])
@pytest.mark.parametrize("steps", [(), (2,), (2, 4, 6)])
@pytest.mark.parametrize("near", ["disk", "memory"])
def test_what_is_damaged_where_it_is_nearest_is_read_where_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, near: str, steps: tuple[int, ...], batch_steps: int
) -> None:
    """Only the replay notices: everything that is read of it before is whole."""
    monkeypatch.setattr("everstep.restore.redo.driver.update_from_record", lambda record, **_: None)
    disk, copy = Copying(batch_steps=2), Copying(batch_steps=batch_steps)
    for one in (disk, copy):
        one.train(*range(1, 7))
    mine = [] if near == "disk" else records_of_steps(1, 6)
    for last in steps:
        if near == "disk":
            _spoil(disk.tier, last)
        else:  # the memory of that step was written over, and nobody has said so
            for record in mine:
                record.data[:] = (
                    bytes(len(record.data)) if record.head.step == last else record.data
                )
    here, far = (TierFileSystem(one.tier, RUN) for one in (disk, copy))
    there = Inventory(RUN, timelines={1: record_of(1)})
    about = {"rank": 1, "copies": [(far, there)], "bases": [BaseId(1, 0)]}
    ring = ChunkRing(3, 1)
    of_all = LogFound.of(here, there, mine, **about)  # type: ignore[arg-type]
    log = of_all.reader(here, ring, 20.0)
    try:
        found = _replayed(log)
        lent = of_all.reader(here, ring, 20.0).records_of(1, 2)
    finally:
        log.close()
        ring.close()
    assert found == [bytes(one.data) for one in records_of_steps(1, 6)]
    assert [bytes(one.data) for one in lent] == [
        bytes(one.data) for one in records_of_steps(2, 2) if one.head.kind == "update"
    ]
    mended = log.take_repaired()
    first = 0 if near == "memory" else 1  # of a segment of two steps it is in the first
    assert {one.step for one in mended} == {step - first for step in steps}
    assert all("intact in another place" in one.reason for one in mended)
    assert log.take_repaired() == []


class _Unreadable(MemoryTier):
    """A disk with sectors that cannot be read any more: those of records."""

    bad = gone = False

    def open(self, name: str) -> Any:
        return _Sectors(self, super().open(name))

    def scan(self, prefix: str = "") -> list[Item]:
        if self.gone:
            raise StorageError("the place does not answer")
        return super().scan(prefix)


class _Sectors:
    def __init__(self, tier: _Unreadable, file: Any) -> None:
        self._tier, self._file, self.size_bytes = tier, file, file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if self._tier.bad and offset >= 4096 and len(buffer) >= 4096:  # whole pages
            raise StorageError("a sector cannot be read")
        return int(self._file.read_into(buffer, offset))

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("other", ["whole", "lossy", "damaged", "gone", "none"])
@pytest.mark.parametrize("fault", ["damage", "unreadable"])
def test_nothing_else_stands_in_for_a_record(
    monkeypatch: pytest.MonkeyPatch, other: str, fault: str
) -> None:
    """A lossy one of the same step, for one: all bits of it are what they were."""
    monkeypatch.setattr("everstep.restore.redo.driver.update_from_record", lambda record, **_: None)
    disk = Copying(_Unreadable(), batch_steps=1)
    copy = Copying(_Unreadable(), batch_steps=1, lossy=lossy if other == "lossy" else None)
    for one in (disk, copy):
        one.train(*range(1, 7))
    if fault == "damage":
        _spoil(disk.tier, 3)  # type: ignore[arg-type]
    if other == "damaged":
        _spoil(copy.tier, 3)  # type: ignore[arg-type]
    here, far = (TierFileSystem(one.tier, RUN) for one in (disk, copy))
    there = Inventory(RUN, timelines={1: record_of(1)})
    copies = [] if other == "none" else [(far, there)]
    ring = ChunkRing(3, 1)
    log = LogFound.of(here, there, [], rank=1, copies=copies, bases=[BaseId(1, 0)])
    disk.tier.bad = fault == "unreadable"  # type: ignore[attr-defined]
    copy.tier.gone = other == "gone"  # type: ignore[attr-defined]
    reader = log.reader(here, ring, 20.0)
    try:
        found = _replayed(reader)
    finally:
        reader.close()
        ring.close()
    wanted = [bytes(one.data) for one in records_of_steps(1, 6)]
    if other == "whole":
        assert found == wanted
        return
    *before, error = found
    assert isinstance(error, EverstepError)
    assert "damaged" in error.message if fault == "damage" else "sector" in error.message
    assert before == wanted[: len(before)]
    assert len(before) < len(wanted)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("upto", [6, 5], ids=["as far", "less far"])
def test_a_peer_s_whole_log_is_fetched_although_a_copy_has_a_lossy_one(
    tmp_path: Path, store: MemoryTier, monkeypatch: pytest.MonkeyPatch, upto: int
) -> None:
    """Rank 1 has lost all that it had. Its peer holds the log whole, the store lossy."""
    runs = [tmp_path / "a", tmp_path / "b"]
    until(runs, store, 6, ratio=0.5, **ON_DISK)
    files, ring, path = PosixFileSystem(), ChunkRing(3, 1), PurePath(runs[1])
    try:
        records = [
            record
            for segment in scan_log(files, path, [1], rank=1)
            if 4 < segment.last <= upto
            for record in read_segment(files, segment, ring, timeout_s=20.0)
        ]
    finally:
        ring.close()
    about = scan_run(files, path).timelines[1]
    assert about is not None
    held = [PeerLog(1, about.encode(), pack_steps(records))]
    fetch = job_module.fetch_from_peers

    def fetched(others: Any, clock: Any, say: Any, offer: Any, *about: Any, **more: Any) -> Any:
        more["logs"] = held if offer.rank == 0 else ()
        return fetch(others, clock, say, offer, *about, **more)

    monkeypatch.setattr(job_module, "fetch_from_peers", fetched)
    # All copies are fetched from other ranks, as on disks of their own.
    monkeypatch.setattr(SharedRun, "has_several_disks", property(lambda self: True))
    shutil.rmtree(runs[1])
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        found = resume(ranks)
        assert [(one.step, one.exact) for one in found] == [(6, upto == 6)] * 2
        assert torch.equal(ranks[0].weight, trained(0, 6))
        if upto == 6:
            assert torch.equal(ranks[1].weight, trained(1, 6))
        all_die(ranks)  # or one would wait for the other to save, too


@pytest.mark.slow
def test_a_disk_and_a_copy_that_have_parted_are_not_mixed(tmp_path: Path) -> None:
    """One process goes on without copies, another on a machine of its own, from these: both open
    timeline 2, and a base of the one fits the log of the other."""
    run, copies = tmp_path / "run", tmp_path / "copies"
    place, disk = TierOptions(str(copies), log="whole", log_steps=1), LogOptions(to="disk")
    try:
        for tiers, seed in (([place], 1), ([], 2)):
            world = World(seed=seed)
            with opened(run, world, tiers=tiers, log=disk) as ckpt:
                ckpt.resume()
                run_steps(ckpt, world, 2)
            forget(run)
        shutil.move(run, tmp_path / "kept")
        world = World(seed=3)
        with opened(run, world, tiers=[place], log=disk) as ckpt:
            assert ckpt.resume().step == 2
            run_steps(ckpt, world, 4)
        forget(run)
        shutil.rmtree(run)
        shutil.move(tmp_path / "kept", run)
        with pytest.raises(RecoveryError, match=r"timeline 2 .* (go different ways|have diverged)"):
            opened(run, World(seed=4), tiers=[place], log=disk)
        world = World(seed=4)
        with opened(run, world, log=disk) as ckpt:
            assert ckpt.resume().step == 4, "without the copies it goes on"
    finally:
        forget(run)
