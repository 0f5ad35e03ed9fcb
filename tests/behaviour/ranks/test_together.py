"""Several ranks with a Checkpointer each: one base of all of them, and one timeline."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

import everstep
from everstep.commit.job.member import BaseLate
from everstep.commit.job.offers import all_ranks
from everstep.commit.lineage import BaseId
from everstep.errors import (
    DeadlineError,
    FencedError,
    KeeperError,
    RecoveryError,
    StateError,
    StorageError,
)
from everstep.format.writer import ChunkRing
from everstep.keeper.persist.job_committer import outcome_error
from everstep.restore.fetch.held import KeeperContents
from everstep.restore.fetch.rank_copies import open_on_disk
from everstep.restore.fetch.start_channel import Meeting
from everstep.restore.start import rank_sources
from everstep.restore.start.report import ResumeRequest
from everstep.restore.start.resume_job import resume_all_ranks
from everstep.run.scan import scan_run
from everstep.seams import FileSystem, ManualClock, Seams
from everstep.seams.mailbox import TcpMailbox
from everstep.state.training_state import State
from everstep.testing import inspect
from everstep.trainer.job.job import Job
from tests.support.ranks.together import (
    FS,
    RankTraining,
    bases,
    folders,
    on_all,
    rank_seams,
    resume,
    save,
    train,
    trained,
    trainings,
)
from tests.support.world import HookedFileSystem, raising


@pytest.mark.thinned(6)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
@pytest.mark.parametrize("method", ["sync", "async", "lazy", "checkfreq", "checkflow"])
def test_a_base_of_two_ranks_comes_back(tmp_path: Path, method: str, shared: bool) -> None:
    paths = folders(tmp_path, shared)
    with trainings(*paths, method=method, every=2, keep=2) as ranks:
        resume(ranks)
        train(ranks, 5)
        on_all(*(one.ckpt.close for one in ranks))
        assert [one.ckpt.stats().committed for one in ranks] == [2, 2]
    for path in paths:
        assert bases(path) == {2: "committed", 4: "committed"}
    files = {file.name for base in scan_run(FS, paths[0]).bases for file in base.files}
    theirs = {"rank-00001.safetensors", "rank-00001.done"} if shared else set()
    assert files == {"manifest.json", "rank-00000.safetensors", "rank-00000.done"} | theirs
    with trainings(*paths, method=method) as ranks:
        found = resume(ranks)
        assert [(one.step, one.timeline, one.exact) for one in found] == [(4, 2, True)] * 2
        train(ranks, 1)
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 5))


def test_the_first_step_without_a_resume_is_agreed_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path) as ranks:
        train(ranks, 1)
        save(ranks)
    assert bases(path) == {1: "committed"}
    with trainings(path, path) as ranks, pytest.raises(StateError, match=r"resume\(\) was not"):
        train(ranks, 1)


def test_one_rank_reports_the_start_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trainings(*folders(tmp_path, True), method="sync") as ranks:
        resume(ranks)
        on_all(*(one.ckpt.close for one in ranks))
    shown = capsys.readouterr().err
    assert shown.count("rank 0 of 2: sync") == 1
    assert "rank 1 of 2" not in shown


def test_only_as_many_bases_are_kept_as_was_said(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path, every=1, keep=2) as ranks:
        resume(ranks)
        train(ranks, 5)
        on_all(*(one.ckpt.close for one in ranks))
    assert sorted(bases(path)) == [4, 5]


def test_a_torn_file_of_one_rank_takes_both_back_to_the_base_before(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path, every=1, keep=3) as ranks:
        resume(ranks)
        train(ranks, 3)
    shard = path / "timeline-00001" / "base" / "000000000003" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with trainings(path, path) as ranks:
        assert [one.step for one in resume(ranks)] == [2, 2]
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 2))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_damaged_first_base_is_no_fresh_start_for_the_others(tmp_path: Path, bad: int) -> None:
    """One rank has loaded it by then: the ranks would begin with different weights."""
    path = tmp_path / "run"
    with trainings(path, path) as ranks:
        resume(ranks)
        save(ranks)
        train(ranks, 2)
        save(ranks)
    shard = path / "timeline-00001" / "base" / "000000000000" / f"rank-{bad:05d}.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with trainings(path, path) as ranks:
        with pytest.raises(RecoveryError, match="no longer that of a fresh start"):
            resume(ranks, 0)
        with pytest.raises(StateError, match="partly overwritten"):
            ranks[1 - bad].train()
        assert [one.step for one in resume(ranks)] == [2, 2]
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 2))


def test_what_several_ranks_have_trained_is_no_fresh_start(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path) as ranks:
        resume(ranks)
        resume(ranks, 0)
        train(ranks, 2)
        with pytest.raises(RecoveryError, match="no base of step 0, and this process has trained"):
            resume(ranks, 0)
        train(ranks, 1)
        save(ranks)
    with trainings(path, path) as ranks:
        assert [one.step for one in resume(ranks)] == [3, 3]


def test_a_base_of_ranks_that_made_other_updates_fails_with_the_reason(tmp_path: Path) -> None:
    """A scaler that skips on one rank, and not on the other."""
    path = tmp_path / "run"
    with trainings(path, path) as ranks:
        resume(ranks)
        train(ranks, 2)
        ranks[1].optimizer.step()
        train(ranks, 1)
        for lsn in (3, 4):  # the first one is not in the way of the next
            with pytest.raises(StorageError, match=rf"rank\(s\) 0: {lsn}, rank\(s\) 1: {lsn + 1}"):
                save(ranks)
            train(ranks, 1)
    assert bases(path) == {}


def test_what_one_rank_could_not_write_exists_on_none(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path, every=1) as ranks:
        resume(ranks)
        train(ranks, 1)
    (path / "timeline-00001" / "base" / "000000000001" / "rank-00001.done").unlink()
    (path / "timeline-00001" / "base" / "000000000001" / "manifest.json").unlink()
    with trainings(path, path) as ranks:
        assert [one.step for one in resume(ranks)] == [0, 0]


def test_a_base_that_lacks_only_its_manifest_is_rolled_forward(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path, every=1) as ranks:
        resume(ranks)
        train(ranks, 1)
    (path / "timeline-00001" / "base" / "000000000001" / "manifest.json").unlink()
    with trainings(path, path) as ranks:
        assert [one.step for one in resume(ranks)] == [1, 1]
    assert bases(path) == {1: "committed"}


def test_an_older_start_is_fenced_off(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path) as old, trainings(path, path) as new:
        resume(old)
        train(old, 1)
        save(old)
        resume(new)
        train(new, 1)
        with pytest.raises(FencedError):
            train(old, 1)
            save(old)
        save(new)
    assert bases(path) == {1: "committed", 2: "committed"}


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path, method="async") as ranks:
        resume(ranks)
        train(ranks, 1)
        first = ranks[0].ckpt.save()
        train(ranks, 1)
        second = ranks[1].ckpt.save()
        with pytest.raises(StorageError, match="rank 1 captured a base of step 2, but none of 1"):
            first.durable.result(20)
        assert not second.durable.done()
        with pytest.raises(StorageError, match="rank 1 captured a base of step 2"):
            ranks[0].ckpt.wait(20)  # which is reported behind that
        save(ranks)
    assert bases(path) == {2: "committed"}


def test_a_rank_that_does_not_save_is_named_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run"
    told: list[everstep.EverstepError] = []
    options: dict[str, Any] = {"method": "async", "on_failure": told.append}
    clock, waited = ManualClock(), threading.Event()
    with trainings(path, path, seams=rank_seams(2, clock=clock), **options) as ranks:
        resume(ranks)
        ranks[0].train(1)
        late = ranks[0].ckpt.save()
        written = path / "timeline-00001" / "base" / "000000000001" / "rank-00000.done"
        for _ in range(2000):
            if late.durable.done():
                break
            if written.exists():  # from then on it waits
                clock.advance(1.0)
            waited.wait(0.01)
        with pytest.raises(DeadlineError, match=r"rank\(s\) 1 have not written") as caught:
            late.durable.result(0)
        assert "they have not taken this base (every rank must call" in str(caught.value)
    assert told
    assert bases(path) == {1: "incomplete"}
    with trainings(path, path) as ranks:
        assert [one.step for one in resume(ranks)] == [0, 0]


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ((1, 3), "rank(s) 1, 3 have not written"),
        ((), "rank(s) that lead on a disk have not written"),
    ],
)
def test_what_is_known_of_ranks_without_a_part_is_said(missing: tuple[int, ...], says: str) -> None:
    late, run = BaseLate(BaseId(1, 6), missing), PurePath("/run")
    error = outcome_error(late, run, 8.0)
    assert isinstance(error, DeadlineError)
    assert says in str(error)
    assert "within 8 s [step 6" in str(error)
    assert "hint: they have not taken this base" in str(error)
    assert "every rank must call ckpt.step() at the end of the same steps" in str(error)


def test_a_rank_that_says_nothing_while_others_agree_is_named(tmp_path: Path) -> None:
    silent = TcpMailbox("127.0.0.1")
    mine = TcpMailbox("127.0.0.1")
    mine.open("session", 0, [mine.address, silent.address])
    meeting = Meeting("session", 0, ("0", "0"), mine)
    ring = ChunkRing(1, 1)
    try:
        with pytest.raises(DeadlineError, match=r"rank\(s\) 1 were silent"):
            resume_all_ranks(
                ResumeRequest(
                    Seams(),
                    tmp_path,
                    State({"data": 1}),
                    ring,
                    KeeperContents(),
                    step=None,
                    strict=True,
                    timeout_s=0.3,
                ),
                meeting,
                needs=all_ranks,
            )
    finally:
        mine.close()
        silent.close()
        ring.close()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_base_that_is_withdrawn_while_a_rank_looks_is_no_error(tmp_path: Path, rank: int) -> None:
    """By a keeper of the start before, which has heard that another rank has no part of it."""
    path = tmp_path / "run"
    with trainings(path, path, every=1) as ranks:
        resume(ranks)
        train(ranks, 2)
    base = path / "timeline-00001" / "base" / "000000000002"
    (base / "rank-00001.done").unlink()
    (base / "manifest.json").unlink()
    fs = HookedFileSystem(raising(lambda: shutil.rmtree(base), "sync_dir", str(base)))
    seams = rank_seams(2)
    seams[rank] = dataclasses.replace(seams[rank], filesystem=fs)
    with trainings(path, path, seams=seams, progress_timeout_s=5.0) as ranks:
        assert [one.step for one in resume(ranks)] == [1, 1]
    assert ("sync_dir", base) in fs.seen


@pytest.mark.parametrize("bad", range(3))
def test_a_rank_that_fails_says_why_to_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """Nobody waits for it, nor has to look for the reason in what another rank prints."""

    def fails(fs: FileSystem, run: Path, record: Any, choice: Any, unique: str) -> bool:
        if unique.endswith(f"-{bad}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_on_disk(fs, run, record, choice, unique)

    monkeypatch.setattr(rank_sources, "open_on_disk", fails)
    path, found = tmp_path / "run", dict[int, everstep.EverstepError]()

    def resumes(one: RankTraining) -> None:
        with pytest.raises(everstep.EverstepError) as caught:
            one.ckpt.resume()
        found[one.rank] = caught.value

    with trainings(path, path, path, progress_timeout_s=10.0) as ranks:
        on_all(*(lambda one=one: resumes(one) for one in ranks))  # type: ignore[misc]
    why = found.pop(bad)
    assert isinstance(why, StorageError)
    for error in found.values():
        assert isinstance(error, RecoveryError)
        assert error.message == f"rank {bad} could not resume: {why.message}"


@pytest.mark.thinned(3)
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("begin", ["resume", "first step"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (lambda ckpt: inspect(ckpt).keepers, "open"),
        (lambda ckpt: inspect(ckpt).keepers, "recall_leftovers"),
        (lambda ckpt: inspect(ckpt).keepers, "listen"),
        (lambda ckpt: Job, "open_mailbox"),
        (lambda ckpt: inspect(ckpt).state, "is_shared"),
    ],
    ids=["keeper", "what it has left", "its mailbox", "own mailbox", "state"],
)
def test_a_rank_that_fails_before_they_meet_says_why_to_all_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Callable[[Any], object],
    name: str,
    begin: str,
    bad: int,
) -> None:
    path, found = tmp_path / "run", dict[int, Exception]()

    open_mailbox = Job.open_mailbox

    def fails(*args: object, **options: object) -> object:
        if args and isinstance(args[0], Job) and args[0].info.rank != bad:
            return open_mailbox(args[0])  # all ranks of this test share the class
        raise KeeperError("no space is left")

    def begins(one: RankTraining) -> None:
        with pytest.raises(everstep.EverstepError) as caught:
            one.ckpt.resume() if begin == "resume" else one.train(1)
        found[one.rank] = caught.value

    with trainings(path, path, path) as ranks:
        with monkeypatch.context() as patch:
            patch.setattr(owner(ranks[bad].ckpt), name, fails)
            on_all(*(lambda one=one: begins(one) for one in ranks))  # type: ignore[misc]
        assert isinstance(found.pop(bad), KeeperError)
        for error in found.values():
            assert isinstance(error, RecoveryError)
            assert error.message == f"rank {bad} could not resume: no space is left"
        assert [one.step for one in resume(ranks)] == [0, 0, 0], "the next try finds all of them"


def test_what_fails_here_is_not_hidden_by_others_who_do_not_come() -> None:
    class Alone:
        rank, world, host = 0, 2, "127.0.0.1"

        def exchange(self, what: str, data: bytes) -> list[bytes]:
            raise DeadlineError(f"not all ranks {what}")

    with pytest.raises(KeeperError, match="no space"), Job(Alone(), 1.0).reporting_failure():
        raise KeeperError("no space is left")


def test_a_rank_that_dies_while_what_was_replayed_is_handed_on_is_no_error_of_torch_alone() -> None:
    class Torn(State):
        def gather(self) -> None:
            raise RuntimeError("Connection closed by peer")

    class Alone:
        rank, world, host = 1, 2, "127.0.0.1"

    with pytest.raises(DeadlineError, match="closed by peer") as caught:
        Job(Alone(), 1.0).collectively(Torn({"steps": 1}).gather, "hand it on")
    assert caught.value.rank == 1
    assert "output of the other ranks" in str(caught.value)


def test_the_last_answer_of_a_start_gets_to_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little time a mailbox has to say its last words when it is closed."""
    close = TcpMailbox.close
    monkeypatch.setattr(TcpMailbox, "close", lambda self, timeout_s=1.0: close(self, 0.0))
    path = tmp_path / "run"
    for _ in range(3):
        with trainings(path, path, progress_timeout_s=10.0) as ranks:
            resume(ranks)


def test_all_ranks_do_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path) as ranks, pytest.raises(StateError, match="make different calls"):
        on_all(lambda: ranks[0].ckpt.resume(), lambda: ranks[1].train())  # type: ignore[arg-type]


def test_folders_of_different_runs_are_refused(tmp_path: Path) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    for path in paths:
        everstep.Checkpointer(path, {"data": 1}, method="sync").close()
    with pytest.raises(RecoveryError, match="different runs"), trainings(*paths):
        pass


def test_a_rank_that_does_not_know_the_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StateError, match="init_process_group"):
        everstep.Checkpointer(tmp_path / "run", {"data": 1})
    assert not (tmp_path / "run").exists()


def test_three_ranks_on_two_disks(tmp_path: Path) -> None:
    paths = tmp_path / "a", tmp_path / "a", tmp_path / "b"
    with trainings(*paths, every=1, keep=1) as ranks:
        resume(ranks)
        train(ranks, 2)
    with trainings(*paths, seams=rank_seams(3)) as ranks:
        assert [one.step for one in resume(ranks)] == [2, 2, 2]
        for rank in range(3):
            assert torch.equal(ranks[rank].weight, trained(rank, 2))


def test_going_back_is_done_together(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path, every=1, method="async") as ranks:
        resume(ranks)
        train(ranks, 3)
        on_all(*(one.ckpt.wait for one in ranks))
        assert [one.timeline for one in resume(ranks, 2)] == [2, 2]
        train(ranks, 2)
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 4))
