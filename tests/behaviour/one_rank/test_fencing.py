"""Two processes on one run: the newer one owns it, whatever the order in which they act."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

import everstep
from everstep.commit.lineage import BaseId
from everstep.errors import FencedError, RecoveryError, StorageError
from everstep.format.names import CONDEMNED, DELETING, MANIFEST
from everstep.keeper.retain.retention import delete_base
from everstep.run.folder import open_timeline
from everstep.run.scan import newest_timeline, scan_base
from everstep.seams import ManualClock, PosixFileSystem, Seams
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from tests.support.world import (
    HookedFileSystem,
    base_folder,
    forget,
    inventory_of,
    opened,
    raising,
    verdict_of,
)


@contextmanager
def two(
    run: Path, older: dict[str, Any], newer: dict[str, Any], **options: Any
) -> Iterator[tuple[everstep.Checkpointer, everstep.Checkpointer]]:
    """Two Checkpointers of one run, as of two processes; the older one has a base of step 1."""
    fs = options.pop("older_fs", None)
    with opened(run, older, fs=fs, **{"on_failure": lambda error: None} | options) as first:
        first.resume()
        first.step()
        first.save().durable.result(20)
        forget(run)
        with opened(run, newer, **options) as second:
            yield first, second


@pytest.mark.parametrize("method", ["sync", "async"])
def test_the_older_one_can_no_longer_commit(method: str, run_folder: Path) -> None:
    with two(run_folder, {"n": 1}, {"n": 0}, method=method) as (older, newer):
        assert newer.resume().timeline == 2
        older.step()
        error = older.save().durable.exception(20)
        assert isinstance(error, FencedError)
        assert "timeline 2 has taken the run over" in str(error)
        newer.step()
        newer.save().durable.result(20)
    assert [base.id for base in inventory_of(run_folder).bases] == [BaseId(1, 1), BaseId(2, 2)]


def test_it_is_raised_at_the_next_call(run_folder: Path) -> None:
    with two(run_folder, {"n": 1}, {"n": 0}, on_failure="raise", every=1) as (older, newer):
        newer.resume()
        with pytest.raises(FencedError):
            older.step()
        with pytest.raises(FencedError):
            older.step()  # again and again: it may not go on unnoticed


def test_fenced_off_between_files_and_manifest(run_folder: Path) -> None:
    """The new owner sweeps the unfinished base away; the older one is told why."""
    fs, recoveries = HookedFileSystem(), list[everstep.Recovery]()
    with two(run_folder, {"n": 1}, {"n": 0}, older_fs=fs) as (older, newer):
        older.step()
        fs.hook = raising(lambda: recoveries.append(newer.resume()), "rename", "*.done")
        assert isinstance(older.save().durable.exception(20), FencedError)
    assert recoveries[0].step == 1
    with opened(run_folder, {"n": 0}) as ckpt:
        recovery = ckpt.resume()
    assert (recovery.step, recovery.timeline, recovery.skipped) == (1, 3, ())


def test_a_base_whose_marker_is_there_is_rolled_forward(run_folder: Path) -> None:
    """Taken over between marker and manifest: the base is complete, and nobody's loss."""
    fs, older_state, live = HookedFileSystem(), {"n": 1}, {"n": 0}
    recoveries: list[everstep.Recovery] = []
    with two(run_folder, older_state, live, older_fs=fs) as (older, newer):
        older_state["n"] = 2
        older.step()
        fs.hook = raising(lambda: recoveries.append(newer.resume()), "open", "*.done")
        assert isinstance(older.save().durable.exception(20), FencedError)
    assert recoveries[0].step == 2
    assert live == {"n": 2}
    assert scan_base(PosixFileSystem(), run_folder, BaseId(1, 2)).status == "committed"


def test_a_commit_that_comes_too_late_is_no_progress(run_folder: Path) -> None:
    """Committed after the last look at the fence: the base is there, and in nobody's history."""
    older_state, newer_state = {"n": 1}, {"n": 0}
    late, aside = base_folder(run_folder, 2), run_folder.with_name("aside")
    with two(run_folder, older_state, newer_state) as (older, newer):
        older_state["n"] = 666
        older.step()
        older.save().durable.result(20)
        late.rename(aside)
        assert newer.resume().step == 1
        aside.rename(late)
        newer_state["n"] = 2
        newer.step()
        newer.save()
    assert scan_base(PosixFileSystem(), run_folder, BaseId(1, 2)).status == "committed"
    live = {"n": 0}
    with opened(run_folder, live) as ckpt:
        recovery = ckpt.resume()
    assert live == {"n": 2}
    assert [(s.timeline, s.step) for s in recovery.skipped] == [(1, 2)]


def test_the_older_one_can_no_longer_delete(run_folder: Path) -> None:
    with two(run_folder, {"n": 1}, {"n": 0}, keep=1) as (older, newer):
        newer.resume()
        newer.step()
        newer.save()
        keeper = inspect(older).keeper
        assert isinstance(keeper, ThreadKeeper)
        with pytest.raises(FencedError, match="has taken the run over"):
            keeper.committer.retain()
    assert base_folder(run_folder, 2, timeline=2).is_dir()


def test_the_older_one_may_take_the_run_over_again(run_folder: Path) -> None:
    older_state = {"n": 1}
    with two(run_folder, older_state, {"n": 0}) as (older, newer):
        newer.resume()
        newer.step()
        newer.save()
        assert older.resume().step == 2
        older.step()
        older.save().durable.result(20)
        newer.step()
        with pytest.raises(FencedError):
            newer.save()


@pytest.mark.parametrize("method", ["async", "lazy"])
def test_who_takes_the_run_over_again_hears_no_more_of_the_time_before(
    method: str, run_folder: Path
) -> None:
    """What was reported of it, and not raised yet, neither stops the resume nor follows it."""
    options: dict[str, Any] = {"on_failure": "raise", "method": method, "every": None}
    with two(run_folder, {"n": 1}, {"n": 0}, **options) as (older, newer):
        newer.resume()
        older.step()
        with pytest.raises(FencedError):  # of save(), if that has heard of it before it returns
            older.save().durable.result(20)
        inspect(older).channel.post(FencedError("another one"))
        assert older.resume().timeline == 3
        older.step()
        assert older.save().durable.result(20) > 0
        older.wait()
        newer.step()
        with pytest.raises(FencedError):
            newer.save()
            newer.wait()


def test_who_does_not_take_it_over_again_hears_of_it(run_folder: Path) -> None:
    """A resume that fails has changed nothing; what else is wrong is raised as ever."""
    with two(run_folder, {"n": 1}, {"n": 0}, on_failure="raise") as (older, newer):
        newer.resume()
        inspect(older).channel.post(FencedError("fenced off"))
        with pytest.raises(RecoveryError):
            older.resume(77)
        inspect(older).channel.post(StorageError("the disk is full"))
        with pytest.raises(FencedError):
            older.step()
        with pytest.raises(StorageError):
            older.resume()


def test_both_resume_at_the_same_moment(run_folder: Path) -> None:
    """Each gets a timeline of its own, and exactly one of them owns the run."""
    fs, recoveries = HookedFileSystem(), list[everstep.Recovery]()
    with two(run_folder, {"n": 1}, {"n": 0}, on_failure="raise") as (_, newer):
        forget(run_folder)
        with opened(run_folder, {"n": 0}, fs=fs) as third:
            fs.hook = raising(lambda: recoveries.append(newer.resume()), "link")
            recoveries.append(third.resume())
            assert sorted(recovery.timeline for recovery in recoveries) == [2, 3]
            assert {recovery.step for recovery in recoveries} == {1}
            owners = []
            for ckpt in (newer, third):
                try:
                    ckpt.step()
                    ckpt.save()
                    owners.append(ckpt)
                except FencedError:
                    pass
            assert len(owners) == 1


def test_both_make_the_run_at_the_same_moment(run_folder: Path) -> None:
    """One id for all: the bases of either can be resumed."""
    fs, ids = HookedFileSystem(), []

    def other_first() -> None:
        with opened(run_folder, {"n": 1}) as other:
            other.step()
            other.save()
            ids.append(inspect(other).run_id)

    fs.hook = raising(other_first, "link", "*/run.json")
    with opened(run_folder, {"n": 0}, fs=fs) as ckpt:
        ids.append(inspect(ckpt).run_id)
        assert ckpt.resume().step == 1
    assert len(set(ids)) == 1


# Deleting and resuming at the same time. The deleter looks at the fence after condemning,
# the resumer looks for the mark after fencing: never do both go ahead.


DELETER_STEPS = ["scan before", "rename", "sync_dir", "scan after", "rename again", "unlink"]


@pytest.mark.parametrize("when", DELETER_STEPS)
def test_resumed_while_being_deleted(when: str, run_folder: Path) -> None:
    """``when``: the moment of the deletion at which the other process resumes."""
    run, fs = run_folder, HookedFileSystem()
    with opened(run, {"n": 1}, keep=5) as ckpt:
        for _ in range(2):
            ckpt.step()
            ckpt.save()
    victim = scan_base(fs, run, BaseId(1, 2))
    recoveries: list[everstep.Recovery] = []
    live = {"n": 0}

    def resume_now() -> None:
        fs.hook = lambda op, path: None
        with opened(run, live, keep=5) as other:
            recoveries.append(other.resume())

    condemned = False

    def hook(op: str, path: PurePath) -> None:
        nonlocal condemned
        condemned = condemned or (op == "rename" and path.name == CONDEMNED)
        moment = f"scan {'after' if condemned else 'before'}" if path == run else op
        moment += " again" if path.name == DELETING else ""
        if moment == when:
            resume_now()

    fs.hook = hook
    fenced = False
    try:
        delete_base(fs, run, victim, None, timeline=1)
    except FencedError:
        fenced = True
    (recovery,) = recoveries
    there = base_folder(run, 2)
    if recovery.step == 2:
        assert fenced, "deleted under the feet of the one that resumed from it"
        assert (there / MANIFEST).is_file()
        assert not verdict_of(scan_base(PosixFileSystem(), run, BaseId(1, 2))).damages
    else:
        assert recovery.step == 1
        assert [s.step for s in recovery.skipped if s.reason == "is being deleted"] == [2]
        assert fenced
    assert live == {"n": 1}
    assert recovery.step == (1 if when == "unlink" else 2)


RESUMER_STEPS = [("scan", "*/run"), ("open", "*/manifest.json"), ("open", "*.safetensors")]
RESUMER_STEPS += [("create", "*/timeline.json.*"), ("link", "*/timeline.json")]


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("op", "path"), RESUMER_STEPS)
def test_deleted_while_being_resumed(op: str, path: str, run_folder: Path) -> None:
    """The older process commits a newer base and deletes the one that is being read (keep=1):
    the resumer notices, and takes the newer one instead of failing."""
    fs, live, older_state = HookedFileSystem(), {"n": 0}, {"n": 1, "pad": torch.ones(400_000)}
    with opened(run_folder, older_state, keep=1, on_failure=lambda error: None) as older:
        older.step()
        older.save()
        forget(run_folder)
        live |= {"pad": torch.zeros(400_000)}  # type: ignore[dict-item]
        with opened(run_folder, live, fs=fs, keep=1) as newer:

            def replace() -> None:
                older_state["n"] = 2
                older.step()
                older.save()

            fs.hook = raising(replace, op, path)
            recovery = newer.resume()
            newer.step()
            newer.save()
    assert recovery.step == 2
    assert live["n"] == 2
    assert not base_folder(run_folder, 1).exists()


def test_deleted_after_the_new_timeline_is_open(run_folder: Path) -> None:
    """Too late for the deleter: it lifts its mark again."""
    fs, older_state, live = HookedFileSystem(), {"n": 1}, {"n": 0}
    with opened(run_folder, older_state, keep=1, on_failure=lambda error: None) as older:
        older.step()
        older.save()
        forget(run_folder)
        with opened(run_folder, live, fs=fs, keep=1) as newer:

            def replace() -> None:
                older.step()
                assert isinstance(older.save().durable.exception(20), FencedError)

            fs.hook = raising(replace, "sync_dir", "*/timeline-00002")
            recovery = newer.resume()
    assert (recovery.step, recovery.timeline) == (1, 2)
    assert verdict_of(scan_base(PosixFileSystem(), run_folder, BaseId(1, 1))).damages == ()


def test_whoever_keeps_deleting_is_named(run_folder: Path) -> None:
    """A deleter that no fence stops (a person) cannot make the resumer wait for ever."""
    fs = HookedFileSystem()
    with opened(run_folder, {"n": 1}, keep=20) as ckpt:
        for _ in range(12):
            ckpt.step()
            ckpt.save()

    def hook(op: str, path: PurePath) -> None:
        if op == "link" and path.name == "timeline.json":
            fs.hook, kept = (lambda op, path: None), fs.hook
            newest = max(inventory_of(run_folder).bases, key=lambda base: base.id)
            delete_base(PosixFileSystem(), run_folder, newest, None, timeline=None)
            fs.hook = kept

    with opened(run_folder, {"n": 1}, fs=fs) as ckpt:
        fs.hook = hook
        with pytest.raises(RecoveryError, match="another process keeps deleting"):
            ckpt.resume()


# Files of other processes in the way.


def test_a_sweep_that_takes_our_temporary_file(run_folder: Path) -> None:
    """Another process that cleans up cannot know that it is in use: we write it again."""
    swept = 0

    def sweep(op: str, path: PurePath) -> None:
        nonlocal swept
        if op == "link" and swept < 3:
            swept += 1
            for left in Path(path).parent.glob("*.tmp"):
                left.unlink()

    fs = HookedFileSystem(sweep)
    with opened(run_folder, {"n": 1}, fs=fs) as ckpt:
        swept = 0
        ckpt.resume()
        ckpt.step()
        ckpt.save()
    assert newest_timeline(PosixFileSystem(), run_folder) == 1


def test_temporary_names_do_not_collide_between_machines(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers every process has number 1: each needs a temporary file of its own."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    fs = HookedFileSystem()
    with opened(run_folder, {"n": 1}, fs=fs) as ckpt:
        ckpt.resume()
        ckpt.resume()
    staged = [str(path) for op, path in fs.seen if op == "create" and "timeline.json" in path.name]
    endings = {name.rsplit("timeline.json", 1)[1] for name in staged}
    assert len(endings) == len(staged) == 2


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_where_there_are_no_hard_links(code: int, run_folder: Path) -> None:
    """The fence is created exclusively instead; still only one can have a number."""

    def no_links(op: str, path: PurePath) -> None:
        if op == "link":
            raise OSError(code, "no links here")

    fs = HookedFileSystem(no_links)
    seams = Seams(filesystem=fs, clock=ManualClock())
    with opened(run_folder, {"n": 1}, fs=fs) as ckpt:
        assert ckpt.resume().timeline == 1
        inventory = inventory_of(run_folder)
        first = open_timeline(seams, PurePath(run_folder), inventory, parent=None, exact=True)
        second = open_timeline(seams, PurePath(run_folder), inventory, parent=None, exact=True)
        assert (first, second) == (2, 3)
    assert all(inventory_of(run_folder).timelines.values())
