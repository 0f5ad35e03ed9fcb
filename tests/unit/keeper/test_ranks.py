"""What one rank does on its disk for the commits of several: small steps, durable in this order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.commit.base_commit import (
    CheckFence,
    FenceSeen,
    GatherMarkers,
    ManifestDurable,
    MarkersSeen,
    WriteFiles,
    WriteManifest,
    WriteMarker,
)
from everstep.commit.job.member import (
    BasesSeen,
    Delete,
    LookAtBases,
    Perform,
    ReadBack,
    ReadBackDone,
    Withdraw,
    Withdrawn,
)
from everstep.commit.job.offers import Choice, Offer, choose
from everstep.commit.lineage import BaseId
from everstep.errors import FencedError
from everstep.format.digests import digest
from everstep.format.names import (
    MANIFEST,
    TIMELINE_RECORD,
    base_dir,
    marker_name,
    shard_name,
    timeline_dir,
)
from everstep.format.records import FileRecord, Manifest, Marker, TimelineRecord, manifest_of
from everstep.keeper.persist.rank_disk import RankDisk
from everstep.restore.fetch.rank_copies import keep_manifest, offer_of, open_on_disk
from everstep.run.fence import Fence
from everstep.run.scan import newest_timeline, scan_run
from everstep.tiers.durable_files import ensure_dirs, temporary, write_durably
from tests.crash.sim.filesystem import SimFileSystem

RUN = PurePath("/disk/run")
BASE = BaseId(1, 10)
DATA = b"x" * 96


def marker(rank: int, base: BaseId = BASE) -> Marker:
    file = FileRecord(shard_name(rank), len(DATA), 0, digest(b""), digest(DATA))
    return Marker("run", base.timeline, base.step, base.step, rank, 2, True, (file,))


def manifest(base: BaseId = BASE) -> Manifest:
    found = manifest_of({rank: marker(rank, base) for rank in range(2)})
    assert found is not None
    return found


def record(number: int, session: str = "s") -> TimelineRecord:
    return TimelineRecord("run", number, None, 0, True, 2, {"session": session}, 0.0)


FRESH = Choice(None, None, {}, (), (), None, 1)


@pytest.fixture
def fs() -> SimFileSystem:
    fs = SimFileSystem()
    fs.make_dir(RUN.parent)
    fs.sync_dir(RUN.parent.parent)
    assert open_on_disk(fs, RUN, record(1), FRESH, "a")
    return fs


def disk(fs: SimFileSystem, rank: int = 0, *, fence: Fence | None = None) -> RankDisk:
    def write(base: BaseId) -> tuple[FileRecord, ...]:
        directory = base_dir(RUN, base.timeline, base.step)
        ensure_dirs(fs, directory)
        write_durably(fs, directory / shard_name(rank), DATA)
        return marker(rank, base).files

    def read(base: BaseId) -> str:
        path = base_dir(RUN, base.timeline, base.step) / shard_name(rank)
        return "" if str(path) in fs.paths() else "it is gone"

    files: Any = SimpleNamespace(write_shards=write, read_shards=read)
    return RankDisk(fs, RUN, rank, files, unique=f"rank {rank}", fence=fence)


def write_part(fs: SimFileSystem, rank: int = 0, base: BaseId = BASE) -> RankDisk:
    one = disk(fs, rank)
    one.perform(Perform(base, WriteFiles()))
    one.perform(Perform(base, WriteMarker(marker(rank, base))))
    return one


def offer(fs: SimFileSystem, rank: int = 0) -> Offer:
    return offer_of(fs, scan_run(fs, RUN), rank, f"disk {rank}")


def test_a_manifest_is_written_beside_the_own_marker(fs: SimFileSystem) -> None:
    one = write_part(fs)
    assert one.perform(Perform(BASE, WriteManifest(manifest()))) == ManifestDurable()
    seen = one.perform(Perform(BASE, GatherMarkers()))
    assert seen == MarkersSeen({rank: marker(rank) for rank in range(2)}, committed=True)
    assert one.perform(Perform(BASE, LookAtBases())).committed == (BASE,)  # type: ignore[union-attr]


def test_a_base_of_another_run_is_not_offered(fs: SimFileSystem) -> None:
    write_part(fs)
    inventory = scan_run(fs, RUN)
    assert BASE in offer_of(fs, inventory, 0, "disk 0").bases
    inventory.run = "another run"
    found = offer_of(fs, inventory, 0, "disk 0")
    assert (BASE in found.bases, found.lost) == (False, (BASE,))


@pytest.mark.parametrize("left", ["nothing", "the directory"])
def test_no_manifest_where_all_was_swept_away(fs: SimFileSystem, left: str) -> None:
    """A process that wakes up behind a newer timeline makes nothing out of nothing."""
    one = write_part(fs)
    open_on_disk(fs, RUN, record(2), FRESH, "b")
    disk(fs).sweep(2, spare=None)
    if left == "the directory":
        fs.make_dir(base_dir(RUN, 1, 10))
    with pytest.raises(FencedError, match="timeline 2 has taken the run over"):
        one.perform(Perform(BASE, WriteManifest(manifest())))
    assert not [path for path in fs.paths() if path.endswith(MANIFEST)]


def test_sweeping_spares_what_the_timeline_began_with(fs: SimFileSystem) -> None:
    write_part(fs)
    write_part(fs, base=BaseId(1, 20))
    open_on_disk(fs, RUN, record(2), FRESH, "b")
    disk(fs).sweep(2, spare=BaseId(1, 20))
    assert [found.id for found in scan_run(fs, RUN).bases] == [BaseId(1, 20)]


def test_sweeping_spares_what_is_committed_or_of_this_timeline(fs: SimFileSystem) -> None:
    write_part(fs).perform(Perform(BASE, WriteManifest(manifest())))
    open_on_disk(fs, RUN, record(2), FRESH, "b")
    write_part(fs, base=BaseId(2, 20))
    disk(fs).sweep(2, spare=None)
    assert [found.id for found in scan_run(fs, RUN).bases] == [BASE, BaseId(2, 20)]


def test_who_is_fenced_off_sweeps_nothing(fs: SimFileSystem) -> None:
    open_on_disk(fs, RUN, record(2), FRESH, "b")
    write_part(fs)
    open_on_disk(fs, RUN, record(3), FRESH, "c")
    with pytest.raises(FencedError):
        disk(fs).sweep(2, spare=None)
    assert [found.id for found in scan_run(fs, RUN).bases] == [BASE]


def test_what_a_newer_timeline_deleted_is_not_called_damaged(fs: SimFileSystem) -> None:
    """The answer names the timeline, by which the rank knows that it is fenced off."""
    one = write_part(fs)
    assert one.perform(Perform(BASE, ReadBack())) == ReadBackDone()
    open_on_disk(fs, RUN, record(2), FRESH, "b")
    disk(fs).sweep(2, spare=None)
    assert one.perform(Perform(BASE, ReadBack())) == ReadBackDone("it is gone", newest=2)


def test_what_is_offered_is_durable(fs: SimFileSystem) -> None:
    """A rank died when its marker had its name, and before that was synced."""
    directory = base_dir(RUN, 1, 10)
    one = disk(fs)
    one.perform(Perform(BASE, WriteFiles()))
    path = directory / marker_name(0)
    file = fs.create(temporary(path))
    file.write(memoryview(marker(0).encode()), 0)
    file.sync()
    file.close()
    fs.rename(temporary(path), path)
    nothing_survives = next(fs.crash_images(0, 0))
    assert not offer(nothing_survives).bases, "the marker was not durable"
    assert offer(fs).bases
    nothing_survives = next(fs.crash_images(0, 0))
    assert offer(nothing_survives).bases


def test_markers_are_durable_before_the_manifest_is_there(fs: SimFileSystem) -> None:
    """On each state that a power loss may leave, whoever has the manifest has the markers."""
    one = write_part(fs)
    other = disk(fs, rank=1)
    other.perform(Perform(BASE, WriteFiles()))
    path = base_dir(RUN, 1, 10) / marker_name(1)
    file = fs.create(temporary(path))
    file.write(memoryview(marker(1).encode()), 0)
    file.sync()
    file.close()
    fs.rename(temporary(path), path)
    seen: list[SimFileSystem] = []
    fs.watch(lambda operation, moment: seen.extend(fs.crash_images(operation.number, 8)))
    one.perform(Perform(BASE, WriteManifest(manifest())))
    assert seen
    for image in seen:
        names = {PurePath(path).name for path in image.paths()}
        assert MANIFEST not in names or {marker_name(0), marker_name(1)} <= names, image.origin


def test_withdrawing_removes_the_marker_first_and_leaves_what_is_others(fs: SimFileSystem) -> None:
    one = write_part(fs)
    write_part(fs, rank=1)
    before = len(fs.log)
    assert one.perform(Perform(BASE, Withdraw())) == Withdrawn()
    done = [(op.op, PurePath(op.path).name) for op in fs.log[before:]]
    assert done.index(("unlink", marker_name(0))) < done.index(("sync_dir", "000000000010"))
    assert done.index(("sync_dir", "000000000010")) < done.index(("unlink", shard_name(0)))
    names = {PurePath(path).name for path in fs.paths()}
    assert {marker_name(1), shard_name(1)} <= names
    assert not {marker_name(0), shard_name(0)} & names
    assert one.perform(Perform(BaseId(1, 99), Withdraw())) == Withdrawn(), "nothing was written"


def test_a_timeline_belongs_to_whoever_was_first(fs: SimFileSystem) -> None:
    assert open_on_disk(fs, RUN, record(2, "one"), FRESH, "one")
    assert open_on_disk(fs, RUN, record(2, "one"), FRESH, "another rank of it")
    assert not open_on_disk(fs, RUN, record(2, "two"), FRESH, "two")
    assert newest_timeline(fs, RUN) == 2
    assert disk(fs).perform(Perform(BASE, CheckFence())) == FenceSeen(2)


@pytest.mark.parametrize("record_is", ["gone", "another's"])
def test_nothing_is_deleted_in_a_folder_that_was_put_back(
    record_is: str, fs: SimFileSystem
) -> None:
    """As it was once: the timeline is not there yet, or another job has opened its number."""
    write_part(fs)
    open_on_disk(fs, RUN, record(2, "one"), FRESH, "one")
    one = disk(fs, fence=Fence(fs, RUN, 2))
    assert one.perform(Perform(BASE, Delete(CheckFence()))) == FenceSeen(2)
    fs.unlink(timeline_dir(RUN, 2) / TIMELINE_RECORD)
    if record_is == "another's":
        open_on_disk(fs, RUN, record(2, "two"), FRESH, "two")
    assert one.perform(Perform(BASE, Delete(CheckFence()))) == FenceSeen(3)
    before = fs.paths()
    with pytest.raises(FencedError):
        one.sweep(2, spare=None)
    assert fs.paths() == before


def test_what_is_put_back_half_while_it_is_swept_stays(
    fs: SimFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at the base saw what had been copied by then, and the manifest comes last."""
    write_part(fs)
    open_on_disk(fs, RUN, record(2), FRESH, "one")
    one = disk(fs, fence=Fence(fs, RUN, 2))
    directory, sync_dir = base_dir(RUN, 1, 10), fs.sync_dir

    def put_back(path: PurePath) -> None:
        if path == directory:
            monkeypatch.undo()
            fs.unlink(timeline_dir(RUN, 2) / TIMELINE_RECORD)
        sync_dir(path)

    monkeypatch.setattr(fs, "sync_dir", put_back)
    with pytest.raises(FencedError):
        one.sweep(2, spare=None)
    assert str(directory / shard_name(0)) in fs.paths()


def test_the_name_of_the_run_is_durable_whoever_made_it() -> None:
    """The folder was made by a process that died before it could sync its name."""
    fs = SimFileSystem()
    fs.make_dir(RUN.parent)
    fs.sync_dir(RUN.parent.parent)
    fs.make_dir(RUN)
    open_on_disk(fs, RUN, record(1), FRESH, "a")
    assert newest_timeline(next(fs.crash_images(0, 0)), RUN) == 1


def test_every_disk_learns_the_history_and_what_is_whole(fs: SimFileSystem) -> None:
    """Two disks with a rank each, and a third that is empty: all can tell what there was."""
    other, empty = SimFileSystem(), SimFileSystem()
    for each in (other, empty):
        each.make_dir(RUN.parent)
        each.sync_dir(RUN.parent.parent)
    open_on_disk(other, RUN, record(1), FRESH, "a")
    write_part(fs, 0)
    write_part(other, 1)
    choice = choose([offer(fs, 0), offer(other, 1), offer(empty, 2)])
    assert choice.base == BASE
    for each in (fs, other, empty):
        open_on_disk(each, RUN, record(2), choice, "b")
        image = next(each.crash_images(0, 0))
        inventory = scan_run(image, RUN)
        assert sorted(inventory.timelines) == [1, 2]
        assert [found.status for found in inventory.bases] == ["committed"]
    assert sorted(offer(empty, 2).bases[BASE].pieces) == []


def test_the_mark_of_what_was_chosen_is_lifted_behind_the_fence(fs: SimFileSystem) -> None:
    """Not of anything else; and not by whoever finds that the timeline is another start's."""
    older = BaseId(1, 5)
    for base in (older, BASE):
        for rank in range(2):
            write_part(fs, rank, base)
        disk(fs).perform(Perform(base, WriteManifest(manifest(base))))
    marks = [base_dir(RUN, 1, base.step) / "manifest.condemned" for base in (older, BASE)]
    for mark in marks:
        fs.rename(mark.with_name(MANIFEST), mark)
    choice = choose([offer(fs)])
    assert choice.base == BASE
    open_on_disk(fs, RUN, record(2, "theirs"), replace(choice, base=None), "t")
    assert not open_on_disk(fs, RUN, record(2), choice, "a")
    assert all(str(mark) in fs.paths() for mark in marks)
    assert open_on_disk(fs, RUN, record(3), choice, "a")
    image = next(fs.crash_images(0, 0))
    assert [str(mark) in image.paths() for mark in marks] == [True, False]
    assert [found.status for found in scan_run(image, RUN).bases] == ["condemned", "committed"]


def test_what_is_being_deleted_is_not_committed_anew(fs: SimFileSystem) -> None:
    write_part(fs).perform(Perform(BASE, WriteManifest(manifest())))
    directory = base_dir(RUN, 1, 10)
    fs.rename(directory / MANIFEST, directory / "manifest.condemned")
    keep_manifest(fs, RUN, manifest(), "b")
    assert [found.status for found in scan_run(fs, RUN).bases] == ["condemned"]
    seen = disk(fs).perform(Perform(BASE, LookAtBases()))
    assert isinstance(seen, BasesSeen)
    assert seen.committed == (BASE,)  # nothing of it is gone: the rules say what becomes of it
    assert sorted(offer(fs).bases[BASE].pieces) == [0]
    fs.rename(directory / "manifest.condemned", directory / "manifest.deleting")
    keep_manifest(fs, RUN, manifest(), "b")
    assert [found.status for found in scan_run(fs, RUN).bases] == ["condemned"]
    seen = disk(fs).perform(Perform(BASE, LookAtBases()))
    assert isinstance(seen, BasesSeen)
    assert seen.committed == ()
    assert not offer(fs).bases


def test_a_torn_record_of_a_timeline_is_somebody_elses(fs: SimFileSystem) -> None:
    directory = timeline_dir(RUN, 2)
    fs.make_dir(directory)
    write_durably(fs, directory / "timeline.json", b"{")
    assert not open_on_disk(fs, RUN, record(2), FRESH, "a")
