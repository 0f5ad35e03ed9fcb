"""Bases that were to be deleted, and of which nothing is gone: they come back where they are needed
(``adr/004``), and only there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

import everstep
from everstep.commit.base_commit import Condemn
from everstep.commit.lineage import BaseId
from everstep.commit.retention import KeepRules
from everstep.errors import FencedError, RecoveryError, StateError
from everstep.format.names import (
    CONDEMNED,
    DELETING,
    MANIFEST,
    SLOTS_DIR,
    marker_name,
    shard_name,
    timeline_dir,
)
from everstep.format.writer import ChunkRing
from everstep.keeper.retain.retention import Retention, delete_base, perform_deletion
from everstep.restore.fetch.copies import RunWithCopies
from everstep.run.fence import Fence
from everstep.run.scan import scan_base, scan_run
from everstep.run.uncondemn import uncondemn
from everstep.seams import ManualClock, PosixFileSystem
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.durable_files import SlotStore
from tests.support.world import HookedFileSystem, base_folder, flip, forget, inventory_of, opened

FILES = PosixFileSystem()


def saved(run: Path, steps: int, **options: Any) -> None:
    """A run with a base after each step; ``n`` is the number of the step."""
    state = {"n": 0, "pad": torch.arange(500.0)}
    with opened(run, state, **{"keep": 9} | options) as ckpt:
        for step in range(ckpt.resume().step, steps):
            state["n"] = step + 1
            ckpt.step()
            ckpt.save()
    forget(run)


def condemn(run: Path, step: int) -> Path:
    """What a deleter has done that dies before it looks at the fence again."""
    path = base_folder(run, step)
    perform_deletion(FILES, PurePath(path), Condemn(), None, lambda: 1)
    return path


def recovered(run: Path, *, step: int | None = None, fs: Any = None) -> everstep.Recovery:
    state = {"n": 0, "pad": torch.zeros(500)}
    with opened(run, state, fs=fs, keep=9) as ckpt:
        found = ckpt.resume(step=step)
    forget(run)
    assert state["n"] == found.step
    assert torch.equal(state["pad"], torch.arange(500.0) if found.step else torch.zeros(500))
    return found


def test_what_a_rewound_training_rests_on_comes_back(run_folder: Path) -> None:
    """A stale deleter condemns it when the new timeline has looked already, and dies; so does the
    training, before its first base."""
    saved(run_folder, 3)
    assert recovered(run_folder, step=1).timeline == 2
    path = condemn(run_folder, 1)
    found = recovered(run_folder)
    assert (found.step, found.timeline, found.source) == (1, 3, "disk")
    assert (path / MANIFEST).is_file()
    assert not (path / CONDEMNED).exists()


def test_the_mark_is_lifted_behind_the_fence_and_durably(run_folder: Path) -> None:
    saved(run_folder, 1)
    path, fs = condemn(run_folder, 1), HookedFileSystem()
    recovered(run_folder, fs=fs)
    seen = [f"{op} {name.name}" for op, name in fs.seen if op in ("link", "rename", "sync_dir")]
    opens, lifts = seen.index("link timeline.json"), seen.index(f"rename {MANIFEST}")
    assert opens < lifts
    assert f"sync_dir {path.name}" in seen[lifts:]


def test_it_is_passed_over_where_something_newer_is_there(run_folder: Path) -> None:
    saved(run_folder, 3)
    path = condemn(run_folder, 2)
    assert recovered(run_folder).step == 3
    assert (path / CONDEMNED).is_file()
    flip(base_folder(run_folder, 3) / shard_name(0), -5)
    assert recovered(run_folder).step == 2


def _mark(path: Path) -> None:
    (path / CONDEMNED).rename(path / DELETING)


def _cut(path: Path) -> None:
    shard = path / shard_name(0)
    shard.write_bytes(shard.read_bytes()[:-1])


BEGUN: dict[str, Callable[[Path], object]] = {
    "the mark says so": _mark,
    "a marker is gone": lambda path: (path / marker_name(0)).unlink(),
    "a file is gone, or parked": lambda path: (path / shard_name(0)).unlink(),
    "a file is shorter": _cut,
    "the mark is damaged": lambda path: flip(path / CONDEMNED, 20),
    "its bytes are others": lambda path: flip(path / shard_name(0), -5),
    "its header is invalid, as of a file that is used again": lambda path: flip(
        path / shard_name(0), 0, 6
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("what", BEGUN)
def test_it_does_not_come_back_when_files_were_touched(what: str, run_folder: Path) -> None:
    saved(run_folder, 2)
    path = condemn(run_folder, 2)
    BEGUN[what](path)
    found = recovered(run_folder)
    assert found.step == 1
    assert [skipped.step for skipped in found.skipped] == [2]
    assert not (path / MANIFEST).exists()
    saved(run_folder, 4, keep=1)
    assert not path.exists()


def test_alone_and_half_deleted_it_is_no_base(run_folder: Path) -> None:
    saved(run_folder, 1)
    _mark(condemn(run_folder, 1))
    assert recovered(run_folder).step == 0


def test_training_over_it_is_refused_without_resume(run_folder: Path) -> None:
    saved(run_folder, 1)
    condemn(run_folder, 1)
    with (
        opened(run_folder, {"n": 0, "pad": torch.zeros(500)}) as ckpt,
        pytest.raises(StateError, match="resume\\(\\) was not called"),
    ):
        ckpt.step()


@pytest.mark.parametrize("keep", [1, 3])
def test_retention_knows_it_again(keep: int, run_folder: Path) -> None:
    """Condemned when the new timeline had looked already; its process lives, and saves."""
    saved(run_folder, 3)
    state = {"n": 0, "pad": torch.zeros(500)}
    with opened(run_folder, state, keep=keep) as ckpt:
        assert ckpt.resume(step=1).timeline == 2
        path = condemn(run_folder, 1)
        ckpt.step()
        ckpt.save().durable.result(20)
        assert (path / MANIFEST).is_file() == (keep == 3)
        assert path.exists() == (keep == 3)
    there = sorted(base.id for base in inventory_of(run_folder).bases)
    assert there == ([BaseId(1, 1), BaseId(1, 3), BaseId(2, 2)] if keep == 3 else [BaseId(2, 2)])


def test_nothing_condemned_goes_before_something_newer_was_read_back(run_folder: Path) -> None:
    """The newer one is damaged on its way to the disk: the condemned one stays."""
    saved(run_folder, 3)
    posted: list[Exception] = []
    state = {"n": 0, "pad": torch.zeros(500)}
    fs = HookedFileSystem()
    with opened(run_folder, state, fs=fs, keep=1, on_failure=posted.append) as ckpt:
        ckpt.resume(step=1)
        path = condemn(run_folder, 1)
        new = base_folder(run_folder, 2, timeline=2)

        def damage(op: str, name: PurePath) -> None:
            if op == "sync_dir" and (new / MANIFEST).is_file():
                fs.hook = lambda op, name: None
                flip(new / shard_name(0), -5)

        fs.hook = damage
        ckpt.step()
        ckpt.save().durable.result(20)
    forget(run_folder)
    assert [type(error).__name__ for error in posted] == ["DamageError"]
    assert scan_base(FILES, PurePath(run_folder), BaseId(1, 1)).is_usable
    assert (path / MANIFEST).is_file()


def test_cleaning_up_leaves_it_alone(run_folder: Path) -> None:
    """A keeper cleans up when its timeline has begun: perhaps it rests on that very base."""
    saved(run_folder, 3)
    run = PurePath(run_folder)
    path, gone = condemn(run_folder, 1), condemn(run_folder, 2)
    _mark(gone)
    _retention(run, 1, FILES).sweep(scan_run(FILES, run))
    assert scan_base(FILES, run, BaseId(1, 1)).is_usable
    assert path.exists()
    assert not gone.exists()


def _retention(run: PurePath, timeline: int, fs: Any) -> Retention:
    slots = SlotStore(fs, timeline_dir(run, timeline) / SLOTS_DIR)
    ring = ChunkRing(1, 1)  # its threads start when it is first used, which a sweep does not
    clock = ManualClock()
    fence = Fence(fs, run, timeline)
    return Retention(fence, ring, slots, keep=KeepRules(1), timeout_s=20, clock=clock)


def test_of_lifting_and_removing_one_succeeds(run_folder: Path) -> None:
    saved(run_folder, 2)
    path = PurePath(condemn(run_folder, 1))
    assert uncondemn(FILES, path)
    assert not uncondemn(FILES, path)
    condemn(run_folder, 1)
    _mark(Path(path))
    assert not uncondemn(FILES, path)
    assert scan_base(FILES, PurePath(run_folder), BaseId(1, 1)).manifest is None


def test_a_second_deleter_finishes_what_the_first_has_begun(run_folder: Path) -> None:
    saved(run_folder, 2)
    condemn(run_folder, 1)
    victim = scan_base(FILES, PurePath(run_folder), BaseId(1, 1))
    delete_base(FILES, PurePath(run_folder), victim, None, timeline=1)
    assert not base_folder(run_folder, 1).exists()


def test_a_timeline_on_which_nobody_trained_hides_nothing(run_folder: Path) -> None:
    """A rewind to what is deleted at that very moment: its timeline was opened in vain."""
    saved(run_folder, 2)
    assert recovered(run_folder, step=1).timeline == 2
    saved(run_folder, 4)  # along timeline 3, from step 1
    fs = HookedFileSystem()

    def delete(op: str, name: PurePath) -> None:
        if op == "link" and name.name == "timeline.json":
            fs.hook = lambda op, name: None
            victim = scan_base(FILES, PurePath(run_folder), BaseId(1, 2))
            delete_base(FILES, PurePath(run_folder), victim, None, timeline=None)

    fs.hook = delete
    state = {"n": 0, "pad": torch.zeros(500)}
    with opened(run_folder, state, fs=fs, keep=9) as ckpt, pytest.raises(RecoveryError):
        flip(base_folder(run_folder, 2, timeline=3) / shard_name(0), -5)
        ckpt.resume(step=2)
    forget(run_folder)
    assert recovered(run_folder).step == 4


# --- Copies -----------------------------------------------------------------------------


def both(run: Path, copies: Path) -> RunWithCopies:
    return RunWithCopies(FILES, PurePath(run), [DiskTier(FILES, PurePath(copies))])


def test_a_copy_that_is_being_deleted_does_not_speak_for_the_disk(
    run_folder: Path, tmp_path: Path
) -> None:
    """Nor the disk for the copy."""
    saved(run_folder, 1)
    copies = tmp_path / "copies"
    _copy(run_folder, copies)
    relative = base_folder(run_folder, 1).relative_to(run_folder)
    manifest = (copies / relative / MANIFEST).read_bytes()
    (copies / relative / CONDEMNED).write_bytes(manifest)
    found = scan_run(both(run_folder, copies), PurePath(run_folder)).bases
    assert [base.status for base in found] == ["committed"]
    (copies / relative / CONDEMNED).unlink()
    _mark(condemn(run_folder, 1))
    found = scan_run(both(run_folder, copies), PurePath(run_folder)).bases
    assert [base.status for base in found] == ["committed"]


def test_a_condemned_copy_comes_back_where_there_is_no_other(
    run_folder: Path, tmp_path: Path
) -> None:
    saved(run_folder, 2)
    copies = tmp_path / "copies"
    _copy(run_folder, copies)
    relative = base_folder(run_folder, 2).relative_to(run_folder)
    (copies / relative / CONDEMNED).write_bytes((copies / relative / MANIFEST).read_bytes())
    elsewhere = tmp_path / "elsewhere"
    found = recovered(elsewhere, fs=both(elsewhere, copies))
    assert (found.step, found.timeline) == (2, 2)
    assert not (copies / relative / CONDEMNED).exists()
    assert (copies / relative / MANIFEST).is_file()


def _copy(run: Path, copies: Path) -> None:
    for path in sorted(run.rglob("*")):
        if path.is_file() and "slots" not in path.parts:
            target = copies / path.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


@pytest.mark.parametrize("back", ["whole", "half"])
def test_what_is_put_back_while_half_of_it_is_seen_stays(back: str, run_folder: Path) -> None:
    """A folder that is put back as it was once, while a keeper cleans up: where it looked there was
    a base that lacked its records, and where it deletes there is all of it, or soon will be."""
    saved(run_folder, 2)
    run, path = PurePath(run_folder), base_folder(run_folder, 1)
    copy = run_folder.parent / "copy"
    shutil.copytree(run_folder, copy)
    assert recovered(run_folder).timeline == 2
    fs = HookedFileSystem()
    retention = _retention(run, 2, fs)
    for name in (MANIFEST, marker_name(0)):
        (path / name).unlink()
    inventory = scan_run(FILES, run)
    assert scan_base(FILES, run, BaseId(1, 1)).status == "incomplete"

    def put_back(op: str, name: PurePath) -> None:
        if (op, name) == ("sync_dir", PurePath(path)):
            fs.hook = lambda op, name: None
            if back == "half":  # the data comes first
                shutil.rmtree(timeline_dir(run, 2))
            else:
                shutil.copytree(copy, run, dirs_exist_ok=True)

    fs.hook = put_back
    with nullcontext() if back == "whole" else pytest.raises(FencedError):
        retention.sweep(inventory)
    data = (copy / path.relative_to(run) / shard_name(0)).read_bytes()
    assert (path / shard_name(0)).read_bytes() == data
    assert scan_base(FILES, run, BaseId(1, 1)).is_usable == (back == "whole")


def test_nothing_of_a_folder_that_is_put_back_is_deleted(run_folder: Path) -> None:
    """Between two looks at the fence it is as it was once, when the base that goes was its only
    one."""
    saved(run_folder, 1)
    run, path = PurePath(run_folder), base_folder(run_folder, 1)
    copy = run_folder.parent / "copy"
    shutil.copytree(run_folder, copy)
    fs = HookedFileSystem()

    def put_back(op: str, name: PurePath) -> None:
        if (op, name) == ("rename", PurePath(path) / CONDEMNED):
            fs.hook = lambda op, name: None
            shutil.rmtree(run_folder)
            shutil.copytree(copy, run_folder)

    state = {"n": 0, "pad": torch.zeros(500)}
    with (
        pytest.raises(FencedError, match="timeline 2, which this process writes, has disappeared"),
        opened(run_folder, state, fs=fs, keep=1) as ckpt,
    ):
        assert ckpt.resume().timeline == 2
        fs.hook = put_back
        ckpt.step()
        ckpt.save()
    assert scan_base(FILES, run, BaseId(1, 1)).status == "committed"
    forget(run_folder)
    assert recovered(run_folder).step == 1
