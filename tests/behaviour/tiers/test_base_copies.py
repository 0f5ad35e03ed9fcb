"""Copies of bases in another tier: whole or not there, by whoever may, and never the last one."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from everstep import Checkpointer, KeeperOptions
from everstep.commit.retention import KeepRules
from everstep.errors import (
    DamageError,
    EverstepError,
    FencedError,
    ForeignDirectoryError,
    OptionError,
    StorageError,
    UnreachableError,
)
from everstep.format.names import CONDEMNED, RUN_RECORD
from everstep.format.records import RunRecord
from everstep.format.writer import ChunkRing
from everstep.keeper.ship import base_copies as copies_module
from everstep.keeper.ship.base_copies import BaseCopies, CopyGroup
from everstep.keeper.ship.courier import (
    ROOT,
    CopyPlace,
    Courier,
    newest_timeline_in,
)
from everstep.restore.fetch.copies import RunWithCopies
from everstep.run.folder import open_run_folder, open_timeline
from everstep.run.scan import scan_run
from everstep.run.verify import verify_base
from everstep.seams import ManualClock, PosixFileSystem, Seams
from everstep.seams.progress import silent
from everstep.testing import inspect
from everstep.testing.faultytier import FaultyTier, TierFault
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.files import TierFileSystem
from everstep.tiers.memory import MemoryTier
from everstep.trainer.attach import keepers
from everstep.trainer.attach.keeper import ThreadKeeper
from tests.support.copying import FOREVER, Interloper, contents, put, train, wait_for
from tests.support.world import flip

FILES = PosixFileSystem()


def trained(run: Path, steps: int, *, keep: int = 9) -> dict[str, Any]:
    """A run with a base after each step; returns the state that it ends with."""
    torch.manual_seed(1)
    model = torch.nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(run, state, method="sync", every=1, keep=keep) as ckpt:
        start = ckpt.resume().step
        for step in range(start, steps):
            torch.manual_seed(step)
            model(torch.randn(3, 7)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
    return state


def copies_of(
    run: Path, tier: Any, timeline: int = 1, *, files: Any = FILES, keep: int = 2, **more: Any
) -> BaseCopies:
    """Copies of a run, made by hand: in no thread."""
    posted: list[EverstepError] = more.pop("posted", [])
    clock = more.pop("clock", ManualClock())
    courier = Courier(tier, timeline, clock, posted.append)
    group = CopyGroup(None, clock, 0, 0, 1, timeout_s=120.0)
    return BaseCopies(courier, files, PurePath(run), group, keep=KeepRules(keep), **more)


@contextlib.contextmanager
def copying(run: Path, tier: Any, **more: Any) -> Iterator[BaseCopies]:
    """Copies that are made in a thread, as in a keeper."""
    copies = copies_of(run, tier, **more)
    copies.courier.start(copies, "copies")
    try:
        yield copies
    finally:
        copies.courier.close()


def usable(tier: Any) -> list[int]:
    """Steps of the copies that exist; each of them must be whole."""
    files = TierFileSystem(tier, ROOT)
    found = []
    for base in scan_run(files, ROOT).bases:
        if base.status in ("committed", "complete"):
            assert not damages(tier, base), f"{base.id} exists, but is damaged"
            found.append(base.id.step)
    return sorted(found)


def damages(tier: Any, base: Any) -> tuple[Any, ...]:
    ring = ChunkRing(3, 1)
    try:
        files = TierFileSystem(tier, ROOT)
        return verify_base(files, base, ring, timeout_s=30, progress=silent).damages
    finally:
        ring.close()


# --- A copy -----------------------------------------------------------------------------


def test_a_copy_has_the_same_names_and_bytes(run_folder: Path) -> None:
    trained(run_folder, 1)
    tier = MemoryTier()
    assert copies_of(run_folder, tier).copy_newest() is not None
    local = {
        str(path.relative_to(run_folder)): path.read_bytes()
        for path in run_folder.rglob("*")
        if path.is_file() and not {"slots", "events"} & set(path.parts)
    }
    assert contents(tier) == local


def test_the_order_is_shards_markers_manifest(run_folder: Path) -> None:
    trained(run_folder, 1)
    tier = FaultyTier(MemoryTier())
    copies_of(run_folder, tier).copy_newest()
    written = [
        line.split()[2].rpartition("/")[2]
        for line in tier.log
        if " put " in line or " create " in line
    ]
    assert written == [
        "run.json",
        "timeline.json",
        "rank-00000.safetensors",
        "rank-00000.done",
        "manifest.json",
    ]
    last = len(tier.log) - 1
    assert "timeline.json" in tier.log[last - 1], "the fence is looked at just before the manifest"


def test_a_store_that_fails_at_any_operation(run_folder: Path) -> None:
    """From the first fault on nothing works any more: what is there then is whole, or is nothing;
    the next mirror makes it whole, and sends no shard twice."""
    trained(run_folder, 1)
    count = 0
    while True:
        count += 1
        inner = MemoryTier()
        dead = FaultyTier(inner, [TierFault("unavailable", at=count, count=FOREVER)])
        try:
            copies_of(run_folder, dead).copy_newest()
        except UnreachableError:
            assert usable(inner) in ([], [1])
            names = set(contents(inner))
            again = FaultyTier(inner)
            copies_of(run_folder, again).copy_newest()
            assert usable(inner) == [1]
            sent = [line.split()[2] for line in again.log if " put " in line]
            assert not names & set(sent)
        else:
            break
    assert count > 8


def test_a_damaged_base_is_not_copied(run_folder: Path) -> None:
    """Any byte of the file: of the header, of an entry, of an object."""
    trained(run_folder, 1)
    shard = next(run_folder.rglob("*.safetensors"))
    good = shard.read_bytes()
    for at in (0, 9, 700, 5000, len(good) // 2 + 2048, len(good) - 1):
        shard.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        tier = MemoryTier()
        with pytest.raises(StorageError):
            copies_of(run_folder, tier).copy_newest()
        assert not [name for name in contents(tier) if "base" in name], f"byte {at}"


def test_damage_that_comes_while_it_is_read_again(run_folder: Path) -> None:
    """The header was good when it was checked; the bytes that are sent are looked at, too."""
    trained(run_folder, 1)

    class Flips(PosixFileSystem):
        def open(self, path: Any, *, direct: Any = False) -> Any:
            file = super().open(path, direct=direct)
            if path.suffix != ".safetensors":
                return file
            reads = []

            class Flipped:
                size_bytes = file.size_bytes

                def read_into(self, buffer: Any, offset: Any) -> Any:
                    got = file.read_into(buffer, offset)
                    reads.append(offset)
                    if len(reads) > 1 and offset == 0:
                        buffer[100] ^= 1  # in the header's padding or text
                    return got

                def close(self) -> Any:
                    file.close()

            return Flipped()

    tier = MemoryTier()
    with pytest.raises(DamageError, match="header"):
        copies_of(run_folder, tier, files=Flips()).copy_newest()
    assert not usable(tier)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("damaged", ["flipped", "missing"])
@pytest.mark.parametrize("first", [True, False], ids=["empty", "copied before"])
def test_a_record_of_the_run_that_is_damaged_is_not_copied(
    run_folder: Path, damaged: str, first: bool
) -> None:
    """Everything else tells the run's id, too, and the copies are those of this run."""
    tier, record = MemoryTier(), run_folder / RUN_RECORD
    trained(run_folder, 1)
    wanted = record.read_bytes()
    if not first:
        assert copies_of(run_folder, tier).copy_newest() is not None
        trained(run_folder, 2)
    flip(record, len(wanted) // 4)
    if damaged == "missing":
        record.unlink()
    timeline = 1 if first else 2
    assert copies_of(run_folder, tier, timeline).copy_newest() is not None
    assert contents(tier)[RUN_RECORD] == wanted
    assert usable(tier) == [*range(1, timeline + 1)]


def test_the_run_of_somebody_else(run_folder: Path, tmp_path: Path) -> None:
    trained(run_folder, 1)
    trained(tmp_path / "other", 1)
    tier = MemoryTier()
    copies_of(tmp_path / "other", tier).copy_newest()
    before = contents(tier)
    with pytest.raises(ForeignDirectoryError, match="another run"):
        copies_of(run_folder, tier).copy_newest()
    assert contents(tier) == before
    files = RunWithCopies(FILES, PurePath(run_folder), [tier])
    with pytest.raises(ForeignDirectoryError, match="another run"):
        files.check_run((run_folder / "run.json").read_bytes())


# --- The fence --------------------------------------------------------------------------


def test_whoever_is_fenced_off_commits_nothing(run_folder: Path) -> None:
    """A newer timeline at any moment: either the manifest was there before it, or never comes."""
    trained(run_folder, 1)
    outcomes = set()
    for at in range(1, 40):
        tier = Interloper(inner := MemoryTier())
        tier.at = at
        names: list[str] = []
        try:
            copies_of(run_folder, tier).copy_newest()
        except FencedError:
            names = list(contents(inner))
            outcomes.add("fenced")
        manifest = "timeline-00001/base/000000000001/manifest.json"
        if len(tier.log) < at:
            assert manifest in contents(inner)
            outcomes.add("before")
            break
        last = [line for line in tier.log if line.endswith(manifest)]
        if names:
            assert manifest not in names
        else:  # between the last look and the manifest, as on any disk
            assert at == len(tier.log)
            assert last
    assert outcomes == {"fenced", "before"}


def test_a_stale_listing_hides_no_newer_timeline() -> None:
    tier = FaultyTier(MemoryTier(), [TierFault("stale_list", count=FOREVER)])
    tier.create("timeline-00001/timeline.json", b"1")
    tier.create("timeline-00002/timeline.json", b"2")
    tier.create("timeline-00003/timeline.json", b"3")
    assert "timeline-00003" not in str(tier.scan()), "the listing is not stale: nothing is tested"
    assert newest_timeline_in(tier) == 3
    place = CopyPlace(tier, 2)
    with pytest.raises(FencedError):
        place.check_fence()


def test_two_that_never_saw_each_other_are_told(run_folder: Path) -> None:
    """The same timeline number, opened by another process: the two histories have diverged."""
    trained(run_folder, 1)
    tier = MemoryTier()
    tier.create("run.json", (run_folder / "run.json").read_bytes())
    tier.create("timeline-00001/timeline.json", b"opened by another process")
    with pytest.raises(FencedError, match="opened by another process"):
        copies_of(run_folder, tier).copy_newest()
    assert not usable(tier)


# --- Retention --------------------------------------------------------------------------


def copied_steps(run: Path, tier: Any, steps: int, **more: Any) -> list[Any]:
    """A run of which each base was copied, with retention behind it."""
    found = []
    for step in range(1, steps + 1):
        trained(run, step)
        found.append(copies_of(run, tier, step, **more))
        found[-1].copy_newest()
        found[-1].retention.run()
    return found


def test_retention_keeps_the_newest(run_folder: Path) -> None:
    tier = MemoryTier()
    copied_steps(run_folder, tier, 5)
    assert usable(tier) == [4, 5]
    assert not [name for name in contents(tier) if "000000000001/" in name]


def test_what_a_keeper_that_was_killed_has_left_of_copies_goes(
    run_folder: Path, tmp_path: Path
) -> None:
    """Each may have left as much as a base. Not before there is a copy of this timeline: until then
    the last base of the one before is copied, and goes on where it was broken off."""
    place = tmp_path / "place"
    tier = DiskTier(FILES, PurePath(place))
    copied_steps(run_folder, tier, 2, keep=9)
    first, second = (place / f"timeline-0000{n}/base/00000000000{n}" for n in (1, 2))
    for name in ("manifest.json", "rank-00000.done"):  # broken off before it was all there
        (second / name).unlink()
    for directory in (first, second):
        (directory / "rank-00000.safetensors.77-0a0a0a0a.tmp").write_bytes(bytes(1000))
    segment = place / "timeline-00002/log/000000000002-000000000003"
    segment.mkdir(parents=True)
    (segment / "rank-00000.safetensors.77-0b0b0b0b.tmp").write_bytes(bytes(1000))

    def left() -> list[str]:
        return [path.name for path in place.rglob("*.tmp")]

    trained(run_folder, 3)
    copies = copies_of(run_folder, tier, 3, keep=9)
    copies.retention.run()
    assert len(left()) == 3
    assert second.exists()
    copies.copy_newest()
    copies.retention.run()
    assert left() == ["rank-00000.safetensors.77-0b0b0b0b.tmp"], "the log's are for who copies it"
    assert not second.exists()
    assert usable(tier) == [1, 3]
    tier.sweep("timeline-00002/log/000000000002-000000000003")
    assert not left()
    assert not segment.exists()
    assert (place / "timeline-00002").exists()


def test_retention_reads_back_before_it_deletes(run_folder: Path) -> None:
    tier = FaultyTier(MemoryTier())
    copied_steps(run_folder, tier, 3)
    first_delete = next(i for i, line in enumerate(tier.log) if " delete " in line)
    newest = "timeline-00003/base/000000000003/rank-00000.safetensors"
    assert [i for i, line in enumerate(tier.log[:first_delete]) if f"read {newest}" in line]


def test_a_damaged_copy_does_not_count(run_folder: Path) -> None:
    """The newest two are damaged in the store: what is older stays, and it is said."""
    tier = MemoryTier()
    copied_steps(run_folder, tier, 3, keep=3)
    for step in (2, 3):
        name = f"timeline-0000{step}/base/00000000000{step}/rank-00000.safetensors"
        data = bytearray(contents(tier)[name])
        data[-1] ^= 1
        put(tier, name, bytes(data))
    posted: list[EverstepError] = []
    copies_of(run_folder, tier, 3, keep=1, posted=posted).retention.run()
    there = [base.id.step for base in scan_run(TierFileSystem(tier, ROOT), ROOT).bases]
    assert 1 in there
    assert any(isinstance(error, DamageError) for error in posted)
    assert any("damaged" in str(error) for error in posted)


def test_retention_that_dies_anywhere_leaves_the_newest(run_folder: Path) -> None:
    """From each operation on nothing works: the copies that stay are there, and whole; the next
    retention finishes the rest."""
    for at in range(1, 200):
        inner = MemoryTier()
        if at == 1:
            copied_steps(run_folder, inner, 2)
            trained(run_folder, 3)
            copies_of(run_folder, inner, 3).copy_newest()
            start = contents(inner)
        else:
            for name, data in start.items():
                put(inner, name, data)
        dead = FaultyTier(inner, [TierFault("unavailable", at=at, count=FOREVER)])
        try:
            copies_of(run_folder, dead, 3).retention.run()
        except StorageError:
            assert set(usable(inner)) >= {2, 3}
            copies_of(run_folder, inner, 3).retention.run()
            assert usable(inner) == [2, 3]
            assert not [name for name in contents(inner) if "000000000001/" in name]
        else:
            break
    assert at > 10


def test_whoever_is_fenced_off_deletes_nothing(run_folder: Path) -> None:
    """At any moment of a deletion: the victim is there and not condemned, or its mark was there
    before the newer timeline, where whoever opened that has seen it."""
    inner = MemoryTier()
    copied_steps(run_folder, inner, 2)
    trained(run_folder, 3)
    copies_of(run_folder, inner, 3).copy_newest()
    start = contents(inner)
    mark = f"timeline-00001/base/000000000001/{CONDEMNED}"
    spared = deleted = 0
    for at in range(1, 400):
        inner = MemoryTier()
        for name, data in start.items():
            put(inner, name, data)
        marked: list[bool] = []

        class Later(FaultyTier):
            def begin(
                self, op: Any, name: Any, at: Any = at, inner: Any = inner, marked: Any = marked
            ) -> Any:
                if len(self.log) + 1 == at:
                    marked.append(mark in contents(inner))
                    inner.create("timeline-00004/timeline.json", b"somebody else's")
                return super().begin(op, name)

        tier = Later(inner)
        try:
            copies_of(run_folder, tier, 3).retention.run()
        except FencedError:
            assert mark not in contents(inner)
            assert usable(inner) == [1, 2, 3]
            spared += 1
        if len(tier.log) < at:
            break
        if usable(inner) == [2, 3]:
            assert marked == [True], "it was deleted, but whoever came could not have known"
            deleted += 1
    assert spared
    assert deleted


# --- When -------------------------------------------------------------------------------


def test_copies_are_so_far_apart(run_folder: Path) -> None:
    """In their own thread, by the clock; the last one does not wait."""
    trained(run_folder, 1)
    tier, clock = MemoryTier(), ManualClock()
    with copying(run_folder, tier, clock=clock, every_s=100.0) as copies:
        copies.base_durable()
        assert wait_for(lambda: copies.courier.stats.copied == 1 and not copies.busy)
        trained(run_folder, 3)
        for _ in range(3):
            copies.base_durable()
        assert copies.busy
        clock.advance(99.0)
        copies.base_durable()
        assert copies.busy
        assert usable(tier) == [1]
        copies.expedite()
        assert wait_for(lambda: not copies.busy)


def test_what_fails_is_told_and_the_next_base_is_copied(run_folder: Path) -> None:
    trained(run_folder, 1)
    inner = MemoryTier()
    tier = FaultyTier(inner, [TierFault("unavailable", count=2)])
    posted: list[EverstepError] = []
    with copying(run_folder, tier, posted=posted) as copies:
        for count in (1, 2):
            copies.base_durable()
            assert wait_for(lambda n=count: len(posted) == n and not copies.busy)  # type: ignore[misc]
            assert isinstance(posted[-1], UnreachableError)
        copies.base_durable()
        assert wait_for(lambda: copies.courier.stats.copied == 1)
    assert (copies.courier.stats.failed, usable(inner)) == (2, [1])


def test_a_bug_ends_no_thread(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run_folder, 1)
    posted: list[EverstepError] = []
    real = copies_module.scan_run
    calls = []

    def scan(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("a bug")
        return real(*arguments)

    monkeypatch.setattr(copies_module, "scan_run", scan)
    with copying(run_folder, MemoryTier(), posted=posted) as copies:
        copies.base_durable()
        assert wait_for(lambda: bool(posted) and not copies.busy)
        assert "internal error" in str(posted[0])
        copies.base_durable()
        assert wait_for(lambda: copies.courier.stats.copied == 1)


# --- Resuming from copies ---------------------------------------------------------------


def both(run: Path, tier: Any) -> Seams:
    return dataclasses.replace(Seams(), filesystem=RunWithCopies(FILES, PurePath(run), [tier]))


def test_a_folder_becomes_that_of_the_copies(run_folder: Path, tmp_path: Path) -> None:
    trained(run_folder, 2)
    tier = MemoryTier()
    copies_of(run_folder, tier).copy_newest()
    run_id = scan_run(FILES, PurePath(run_folder)).run
    elsewhere = tmp_path / "elsewhere"
    inventory = open_run_folder(both(elsewhere, tier).filesystem, PurePath(elsewhere))
    assert inventory.run == run_id
    assert [base.id.step for base in inventory.bases] == [2]
    assert scan_run(FILES, PurePath(elsewhere)).run == run_id


def test_two_machines_that_resume_at_once_open_different_timelines(
    run_folder: Path, tmp_path: Path
) -> None:
    """They have nothing in common but the store."""
    trained(run_folder, 1)
    tier = MemoryTier()
    copies_of(run_folder, tier).copy_newest()
    opened = []
    for name in ("one", "two"):
        run = PurePath(tmp_path / name)
        seams = both(tmp_path / name, tier)
        inventory = open_run_folder(seams.filesystem, run)
        opened.append((seams, run, inventory))
    base = opened[0][2].bases[0].id
    numbers = [
        open_timeline(seams, run, inventory, parent=base, exact=True)
        for seams, run, inventory in opened
    ]
    assert numbers == [2, 3]
    assert newest_timeline_in(tier) == 3


def test_a_store_that_is_down_lets_no_timeline_begin(run_folder: Path, tmp_path: Path) -> None:
    trained(run_folder, 1)
    inner = MemoryTier()
    copies_of(run_folder, inner).copy_newest()
    run = tmp_path / "fresh"
    inventory = open_run_folder(both(run, inner).filesystem, PurePath(run))
    down = both(run, FaultyTier(inner, [TierFault("unavailable", count=FOREVER)]))
    with pytest.raises(UnreachableError):
        open_timeline(down, PurePath(run), inventory, parent=None, exact=True)
    assert not list(run.glob("timeline-*/timeline.json"))


def test_a_copy_without_a_manifest_is_rolled_forward_where_it_is(
    run_folder: Path, tmp_path: Path
) -> None:
    """The keeper died between the last marker and the manifest."""
    state = trained(run_folder, 1)
    tier = MemoryTier()
    copies_of(run_folder, tier).copy_newest()
    manifest = "timeline-00001/base/000000000001/manifest.json"
    data = contents(tier)[manifest]
    tier.delete(manifest)
    fresh = tmp_path / "fresh"
    model = torch.nn.Linear(7, 5)
    live = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    seams = both(fresh, tier)
    open_run_folder(seams.filesystem, PurePath(fresh))
    with Checkpointer(fresh, live, method="sync", seams=seams) as ckpt:
        assert ckpt.resume().step == 1
    assert contents(tier)[manifest] == data
    assert torch.equal(model.weight, state["model"].weight)


def test_what_is_on_the_disk_is_read_there(run_folder: Path) -> None:
    trained(run_folder, 2)
    tier = FaultyTier(MemoryTier())
    copies_of(run_folder, tier).copy_newest()
    tier.log.clear()
    files = both(run_folder, tier).filesystem
    base = scan_run(files, PurePath(run_folder)).bases[-1]
    ring = ChunkRing(3, 1)
    try:
        assert not verify_base(files, base, ring, timeout_s=30, progress=silent).damages
    finally:
        ring.close()
    assert not [line for line in tier.log if " read " in line or " open " in line]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_what_is_damaged_on_the_disk_is_read_from_the_copy(run_folder: Path, damage: str) -> None:
    """The same base, not an older one; and it is said what was wrong."""
    state = trained(run_folder, 2)
    tier = FaultyTier(MemoryTier())
    copies_of(run_folder, tier).copy_newest()
    shard = run_folder / "timeline-00001/base/000000000002/rank-00000.safetensors"
    data = shard.read_bytes()
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if damage == "flip" else b""))
    tier.log.clear()
    model = torch.nn.Linear(7, 5)
    live = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with Checkpointer(run_folder, live, method="sync", seams=both(run_folder, tier)) as ckpt:
        recovery = ckpt.resume()
    assert recovery.step == 2
    assert torch.equal(model.weight, state["model"].weight)
    assert [line for line in tier.log if " read " in line]
    if damage != "remove":
        assert any(one.step == 2 for one in recovery.skipped)


def test_a_base_that_is_damaged_everywhere_is_passed_over(run_folder: Path) -> None:
    """Each place is tried once, then the next older base."""
    trained(run_folder, 2)
    tier = MemoryTier()
    copies_of(run_folder, tier).copy_newest()
    name = "timeline-00001/base/000000000002/rank-00000.safetensors"
    for data in [bytearray((run_folder / name).read_bytes())]:
        data[-1] ^= 1
        (run_folder / name).write_bytes(data)
        put(tier, name, bytes(data))
    model = torch.nn.Linear(7, 5)
    live = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with Checkpointer(run_folder, live, method="sync", seams=both(run_folder, tier)) as ckpt:
        recovery = ckpt.resume()
    assert recovery.step == 1
    assert len([one for one in recovery.skipped if one.step == 2]) == 2


# --- All together -----------------------------------------------------------------------


def test_a_machine_without_the_disk_goes_on_from_the_copy(run_folder: Path, tmp_path: Path) -> None:
    """Through a keeper process, bit for bit as if nothing had happened."""
    copies = tmp_path / "copies"
    expected, _, _ = train(tmp_path / "whole", 8)
    _, _, _ = train(run_folder, 5, tiers=[str(copies)])
    tier = DiskTier(FILES, PurePath(copies))
    assert usable(tier)[-1] == 4
    shutil.rmtree(run_folder)
    weight, recovery, _ = train(run_folder, 8, tiers=[str(copies)])
    assert (recovery.step, recovery.exact, recovery.timeline) == (4, True, 2)
    assert recovery.source == "copy"
    assert torch.equal(weight, expected)
    assert usable(tier)[-1] == 8
    assert newest_timeline_in(tier) == 2


def test_a_keeper_does_not_end_before_it_has_heard_of_the_last_base(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever copies bases hears of one from ``on_done``: until then there is something to do."""
    model = torch.nn.Linear(7, 5)
    seen: list[list[int]] = []

    def hears(*about: Any, **options: Any) -> ThreadKeeper:
        return ThreadKeeper(*about, **options, on_done=heard)

    def heard(_: Any) -> None:
        seen.append([one.step for one in inspect(ckpt).keeper.waiting])

    monkeypatch.setattr(keepers, "ThreadKeeper", hears)
    in_thread = KeeperOptions(process=False)
    with Checkpointer(run_folder, {"model": model}, every=1, keeper=in_thread) as ckpt:
        ckpt.resume()
        ckpt.step()
        inspect(ckpt).keeper.wait(None)
        assert inspect(ckpt).keeper.waiting == []
    assert seen == [[1]]


def test_without_resume_copies_are_not_trained_over(run_folder: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    train(run_folder, 3, tiers=[str(copies)])
    shutil.rmtree(run_folder)
    model = torch.nn.Linear(7, 5)
    with (
        Checkpointer(run_folder, {"model": model}, tiers=[str(copies)]) as ckpt,
        pytest.raises(EverstepError, match="resume"),
    ):
        ckpt.step()


def test_places_that_cannot_be(run_folder: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(7, 5)
    for tiers in (
        [str(run_folder)],
        [str(run_folder / "in-it")],
        [str(tmp_path)],
        [str(tmp_path / "a"), str(tmp_path / "a" / "b")],
        ["relative"],
        ["ftp://x/y"],
        [7],
    ):
        with pytest.raises(EverstepError):
            Checkpointer(run_folder, {"model": model}, tiers=tiers)
    with pytest.raises(EverstepError, match="separate keeper process"):
        Checkpointer(run_folder, {"model": model}, method="sync", tiers=[str(tmp_path / "copies")])


def test_a_place_that_is_another_one_now_gets_no_copies(run_folder: Path, tmp_path: Path) -> None:
    """A disk that was unmounted; a folder that another run has now."""
    where = tmp_path / "copies"
    run, away = run_folder, tmp_path / "away"
    tier = DiskTier(PosixFileSystem(), PurePath(where))
    trained(run, 1)
    copies = copies_of(run, tier)
    assert copies.copy_newest() is not None
    where.rename(away)  # its mount point is left
    with pytest.raises(StorageError, match=r"run\.json has disappeared.*unmounted"):
        copies.copy_newest()
    assert not [path for path in where.rglob("*") if path.is_file()]
    tier.create(RUN_RECORD, RunRecord("f" * 32).encode())
    with pytest.raises(ForeignDirectoryError, match="holds copies of another run"):
        copies.copy_newest()
    shutil.rmtree(where)
    away.rename(where)
    assert copies.copy_newest() is not None


def test_a_place_that_leads_to_the_run_is_refused(run_folder: Path, tmp_path: Path) -> None:
    run_folder.mkdir(exist_ok=True)
    link = tmp_path / "link"
    link.symlink_to(run_folder)
    with pytest.raises(OptionError, match="a separate place"):
        Checkpointer(run_folder, {"n": 1}, tiers=[str(link)])
