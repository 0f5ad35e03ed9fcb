"""Several ranks with a log each: all go on from the newest step that every one of them reaches."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.commit.lineage import BaseId
from everstep.config.options import LogOptions
from everstep.errors import OptionError
from everstep.format.digests import digest
from everstep.format.names import AUDIT_RECORD, marker_name, shard_name
from everstep.format.records import AuditRecord
from everstep.keeper.retain.history import HistoryWindow, SegmentAges
from everstep.keeper.retain.retention import delete_segments
from everstep.options import History
from everstep.run.scan import scan_run
from everstep.run.verify import describe_audit
from everstep.seams import ManualClock, PosixFileSystem
from everstep.seams.fingerprint import fingerprint
from everstep.state.layout.entries import Entry, shape_digest
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.job import job as job_module
from everstep.trainer.session import session as session_module
from everstep.trainer.session.cadence import ASK_EVERY
from tests.support.logged import document, invoke
from tests.support.ranks.logs import ON_DISK, die, resumed, segment, until
from tests.support.ranks.together import (
    RankTraining,
    bases,
    folders,
    on_all,
    resume,
    train,
    trained,
    trainings,
)

FS = PosixFileSystem()


def lose(path: Path, rank: int, *steps: int) -> None:
    """Some steps of one rank's log."""
    for step in steps:
        (segment(path, step) / marker_name(rank)).unlink()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_no_more_than_the_step_in_flight_is_lost(tmp_path: Path, shared: bool) -> None:
    paths = folders(tmp_path, shared)
    until(paths, 6)
    resumed(paths, 6, replayed=2)
    for path in paths:
        record = scan_run(FS, path).timelines[2]
        assert record is not None
        assert (record.parent, record.fork_step, record.base) == (1, 6, (1, 4))
        assert record.exact


def test_marks_in_flight_cost_all_ranks_the_same_steps(tmp_path: Path) -> None:
    """Where rank 1 lacks a mark that rank 0 has, both go on from the step before."""
    paths = folders(tmp_path, shared=False)
    log = replace(ON_DISK["log"], in_flight_steps=2)
    until(paths, 7, log=log)
    lose(paths[1], 1, 7)
    with trainings(*paths, **{**ON_DISK, "log": log}) as ranks:
        for rank, one in enumerate(resume(ranks)):
            assert (one.step, one.exact) == (6, True), one
            assert torch.equal(ranks[rank].weight, trained(rank, 6))
        train(ranks, 4)
        for rank, training in enumerate(ranks):
            assert torch.equal(training.weight, trained(rank, 10))
        die(ranks)


def test_a_log_that_ends_earlier_is_the_end_for_all(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    lose(path, 1, 7)
    found = resumed((path, path), 6, replayed=2)
    for one in found:
        assert "the log of rank 1 ends before; others reach 7" in str(one.skipped)


def test_a_rank_whose_log_is_gone_takes_all_back_to_the_base(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 6)
    lose(path, 0, 5, 6)
    resumed((path, path), 4, replayed=0)


def test_a_flipped_bit_in_one_log_takes_all_to_the_step_before(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    shard = next(p for p in segment(path, 6).iterdir() if p.name == shard_name(1))
    data = bytearray(shard.read_bytes())
    at = data.index(torch.full((12,), 0.7).numpy().tobytes())  # the gradient of this step
    data[at] ^= 1
    shard.write_bytes(data)
    resumed((path, path), 5, replayed=1)


def test_a_step_can_be_gone_back_to(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    resumed((path, path), 3, replayed=2, asked=3)


def test_the_history_goes_on_from_the_step_that_was_agreed_on(tmp_path: Path) -> None:
    """Rank 0's log has steps that the job has turned away from: they stay out of the history."""
    path = tmp_path / "run"
    until((path, path), 7)
    lose(path, 1, 7)
    until((path, path), 1)  # goes on from step 6, to 7, on a timeline of its own
    for rank in range(2):
        directory = path / "timeline-00002" / "base" / "000000000007"
        (directory / marker_name(rank)).unlink()
    (directory / "manifest.json").unlink()
    resumed((path, path), 7, replayed=3)


def test_no_step_counts_in_which_one_rank_made_another_number_of_updates(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path, **{**ON_DISK, "every": None}) as ranks:
        resume(ranks)
        train(ranks, 3)
        ranks[1].optimizer.step()
        train(ranks, 2)
        die(ranks)
    resumed((path, path), 3, replayed=2)


def test_a_log_in_memory_leads_back_in_the_same_processes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainings(path, path, method="logged", every=4) as ranks:
        resume(ranks)
        train(ranks, 6)
        found = on_all(*(lambda one=one: one.ckpt.rewind(5) for one in ranks))  # type: ignore[misc]
        for rank, one in enumerate(found):
            assert (one.step, one.replayed, one.exact) == (5, 1, True)
            assert torch.equal(ranks[rank].weight, trained(rank, 5))
        train(ranks, 3)
        for rank, training in enumerate(ranks):
            assert torch.equal(training.weight, trained(rank, 8))
        die(ranks)


def test_without_the_last_base_every_ranks_log_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's state has moved on, so it takes no last base, and its keeper stays with the log;
    which is of no use without that of rank 1."""
    path, stays = tmp_path / "run", dict[Any, bool]()
    for kind in (RemoteKeeper, ThreadKeeper):

        def noted(keeper: Any, *, stay: bool = False, close: Any = kind.close) -> None:
            stays[keeper] = stay
            close(keeper, stay=stay)

        monkeypatch.setattr(kind, "close", noted)
    monkeypatch.setattr(session_module, "_stays_for_log", lambda *_: True)
    with trainings(path, path, method="logged", every=None, progress_timeout_s=2.0) as ranks:
        resume(ranks)
        train(ranks, 3)
        held = [inspect(one.ckpt).keepers.current for one in ranks]
        ranks[0].optimizer.step()
        ranks[0].ckpt.close()
        with pytest.raises(everstep.EverstepError, match="step 3"):
            ranks[1].ckpt.close()
    assert [stays[keeper] for keeper in held] == [True, True]
    with trainings(path, path, method="logged", every=None) as ranks:
        resume(ranks)
        train(ranks, 2)
        held = [inspect(one.ckpt).keepers.current for one in ranks]
        on_all(*(one.ckpt.close for one in ranks))
    assert [stays[keeper] for keeper in held] == [False, False], "it is all in the last base"


def test_ranks_that_train_under_other_conditions_claim_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is where it was, and rank 1 was on another machine: the record is of both (I9)."""
    path, numbers = tmp_path / "run", itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(
            job_module, "fingerprint", lambda: {**fingerprint(), "threads": str(next(numbers))}
        )
        until((path, path), 6)
    record = scan_run(FS, path).timelines[1]
    assert record is not None
    assert record.fingerprint["threads"] == "0, 1"
    with trainings(path, path, **ON_DISK) as ranks:
        for one in resume(ranks):
            assert (one.step, one.replayed, one.exact) == (6, 2, False)
            assert "threads 0, 1" in one.evidence
        die(ranks)


def test_the_log_of_ranks_of_their_own_is_none_for_one_process(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 6)
    model = torch.nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "data": {"step": 0}}
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer(path, state, method="sync", every=None, keeper=keeper) as ckpt:
        found = ckpt.resume(strict=False)  # each rank had weights of its own
    assert (found.step, found.replayed) == (4, 0)
    assert "the log after it belongs to a state of another composition" in str(found.skipped)
    assert len(found.mismatched) == 3


def test_a_rank_whose_log_has_a_hole_gets_a_base_of_all(tmp_path: Path) -> None:
    """At the end of the next step: all hear of it within that."""
    path = tmp_path / "run"
    with trainings(path, path, method="logged", every=None) as ranks:
        resume(ranks)
        train(ranks, 3)
        recorder = inspect(ranks[1].ckpt).recorder
        assert recorder is not None
        recorder.skipped("a test")
        train(ranks, 1)
        on_all(*(lambda one=one: one.ckpt.wait(20) for one in ranks))  # type: ignore[misc]
        assert sorted(bases(path)) == [1]
        train(ranks, ASK_EVERY + 2)
        on_all(*(lambda one=one: one.ckpt.wait(20) for one in ranks))  # type: ignore[misc]
        assert [one.ckpt.stats().committed for one in ranks] == [2, 2]
        assert recorder.base_due is None
        die(ranks)
    assert sorted(bases(path)) == [1, 5]


def test_what_is_trained_later_costs_no_more_than_the_step_after(tmp_path: Path) -> None:
    """A layer that is used for the first time: from there on the optimizer has state of it."""
    path = tmp_path / "run"

    def later(one: RankTraining) -> nn.Parameter:
        one.model.late = nn.Parameter(torch.zeros(2))
        one.optimizer.add_param_group({"params": [one.model.late]})
        return one.model.late

    with trainings(path, path, **{**ON_DISK, "every": None}) as ranks:
        parameters = list(map(later, ranks))
        resume(ranks)
        train(ranks, 3)
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        train(ranks, 4)
        weights = [(one.weight, one.model.late.detach().clone()) for one in ranks]
        die(ranks)
    assert sorted(bases(path)) == [1, 5], "all hear of it within step 5"
    with trainings(path, path, **{**ON_DISK, "every": None}) as ranks:
        for one in ranks:
            later(one)
        for found in resume(ranks):
            assert (found.step, found.replayed, found.exact, found.skipped) == (7, 2, True, ())
        for one, (weight, late) in zip(ranks, weights, strict=True):
            assert torch.equal(one.weight, weight)
            assert torch.equal(one.model.late, late)
        die(ranks)


def test_where_no_log_leads_on_it_is_said_what_is_of_no_use(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    for rank in (0, 1):
        lose(path, rank, 6)
    for found in resumed((path, path), 5, replayed=1):
        assert [(one.timeline, one.step) for one in found.skipped] == [(1, 6)]
        assert "no rank reaches step 6" in found.skipped[0].reason
        assert "up to step 7 cannot be used" in found.skipped[0].reason


def test_the_log_of_another_part_of_a_tensor_is_another_log() -> None:
    whole = Entry.whole("model/weight", "F32", (2, 4))
    first = replace(whole, global_shape=(4, 4), placement="0-1")
    second = replace(first, global_offset=(2, 0))
    digests = {shape_digest([entry], {}, {}) for entry in (whole, first, second)}
    assert len(digests) == 3


def steps_on_disk(path: Path, rank: int) -> list[int]:
    markers = path.glob(f"timeline-00001/log/*/{marker_name(rank)}")
    return sorted(int(marker.parent.name.split("-")[1]) for marker in markers)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_segments_that_lead_nowhere_go_and_no_others(tmp_path: Path, shared: bool) -> None:
    paths = folders(tmp_path, shared)
    with trainings(*paths, **{**ON_DISK, "every": 3, "keep": 2}) as ranks:
        resume(ranks)
        for _ in range(8):
            train(ranks, 1)
            on_all(*(lambda one=one: one.ckpt.wait(20) for one in ranks))  # type: ignore[misc]
            for one in ranks:  # or the log comes to the disk when nothing cleans up there any more
                inspect(one.ckpt).keepers.current.records.settle(20.0)
        die(ranks)
    for rank, path in enumerate(paths):
        kept, oldest = steps_on_disk(path, rank), min(bases(path))
        assert kept == list(range(kept[0], 9))
        assert 1 < kept[0] <= oldest + 1 <= 7
    resumed(paths, 8, replayed=2)


def remember(paths: tuple[Path, Path], steps: int, history: str = "all", **options: Any) -> None:
    """A job whose every step can be gone back to, in segments that end where none of its bases
    is, with one base beside."""
    log = LogOptions(to="disk", batch_steps=2, history=history)
    given = {**ON_DISK, "every": 3, "keep": 1, "log": log, **options}
    with trainings(*paths, **given) as ranks:
        resume(ranks)
        for _ in range(steps):
            train(ranks, 1)
            on_all(*(lambda one=one: one.ckpt.wait(20) for one in ranks))  # type: ignore[misc]
            for one in ranks:
                inspect(one.ckpt).keepers.current.records.settle(20.0)
        for one in ranks:
            inspect(one.ckpt).keepers.current.records.flush()
        die(ranks)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_every_step_of_a_history_can_be_gone_back_to(tmp_path: Path, shared: bool) -> None:
    paths = folders(tmp_path, shared)
    remember(paths, 11)
    for rank, path in enumerate(paths):
        assert steps_on_disk(path, rank)[-1] == 11
        assert sorted(bases(path)) == [1, 9], "where the chain begins, and the newest"
    for step in range(1, 12, 2):
        copies = tuple(tmp_path / f"{step} {path.name}" for path in paths)
        for path, copy in dict(zip(paths, copies, strict=True)).items():
            shutil.copytree(path, copy)
        resumed(copies, step, replayed=step - (9 if step >= 9 else 1), asked=step)  # type: ignore[arg-type]
        for copy in copies:
            record = scan_run(FS, copy).timelines[2]
            assert record is not None
            assert (record.parent, record.fork_step) == (1, step)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_no_base_takes_the_place_of_steps_that_are_not_written_yet(
    tmp_path: Path, shared: bool
) -> None:
    """A batch of more steps than lie between the bases that are kept: of each rank's log."""
    paths = folders(tmp_path, shared)
    log = LogOptions(to="disk", batch_steps=10, history="all", audit=False)
    remember(paths, 13, every=2, keep=2, log=log)
    first = min(bases(paths[0]))
    assert first <= 2
    resumed(paths, 5, replayed=5 - first, asked=5)


@pytest.mark.parametrize("verdict", ["equal", "different"])
def test_a_state_of_several_ranks_rests_on_audits(tmp_path: Path, verdict: str) -> None:
    path = tmp_path / "run"
    until((path, path), 6)
    base = max(scan_run(FS, path).bases, key=lambda base: base.id)
    assert base.manifest is not None
    record = AuditRecord(
        run=base.manifest.markers[0].run,
        timeline=1,
        step=base.id.step,
        manifest=digest(base.manifest.encode()),
        before=(1, 1),
        verdict=verdict,
        reason="",
        steps=3,
        updates=3,
        entries=9,
        count=1 if verdict == "different" else 0,
        differing=("model/weight of rank 1",) if verdict == "different" else (),
        fingerprint={},
        created_unix_s=0.0,
    )
    Path(base.path / AUDIT_RECORD).write_bytes(record.encode())
    with trainings(path, path, **ON_DISK) as ranks:
        for one in resume(ranks):
            assert (one.step, one.exact) == (6, verdict == "equal")
            assert describe_audit(record) in one.evidence
        die(ranks)
    timeline = scan_run(FS, path).timelines[2]
    assert timeline is not None
    assert timeline.exact == (verdict == "equal")


def test_without_the_files_of_all_ranks_nothing_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "a"
    until((path, tmp_path / "b"), 3)
    (base,) = bases(path)
    found = document("restore", path, "--step", base, "--out", tmp_path / "new", status=1)
    assert "the files of rank(s) 1 are missing in this folder" in found["message"]
    assert document("ls", path, status=1)["timelines"][0]["log"]["steps"] == []


def test_a_segment_of_several_ranks_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "a"
    until((path, path), 6)
    (listed,) = (row["log"]["segments"] for row in document("ls", path)["timelines"])
    (measured,) = (row["log"]["segments"] for row in document("du", path)["timelines"])
    assert listed == measured == len(list(path.glob("timeline-00001/log/*/rank-00001.done")))
    assert len(document("verify", path)["segments"]) == 2 * listed, "each rank's is verified"
    assert f"{listed} of {listed} segments" in invoke("verify", path).stdout


def test_audits_take_a_folder_of_all_ranks(tmp_path: Path) -> None:
    options = {**ON_DISK, "log": LogOptions(to="disk", audit=True), "keeper": None}
    with (
        pytest.raises(OptionError, match="audit=True"),
        trainings(tmp_path / "a", tmp_path / "b", **options),
    ):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_the_log_of_any_rank_needs_its_bases(tmp_path: Path, rank: int) -> None:
    """Also where the other one's is gone from this disk: it may be in memory, or in a copy."""
    path = tmp_path / "run"
    remember((path, path), 8)
    for marker in path.glob(f"timeline-00001/log/*/{marker_name(1 - rank)}"):
        marker.unlink()
    inventory = scan_run(FS, path)
    promise = HistoryWindow.of(
        FS, inventory, History.parse("all"), ages=SegmentAges(FS, ManualClock())
    )
    lsns = {base.id: base.id.step for base in inventory.bases}
    assert promise.needed(lsns, sorted(lsns)[:-1]) == {BaseId(1, 1)}


def test_a_rank_deletes_no_segment_that_another_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 3)
    mine, before = steps_on_disk(path, 0), steps_on_disk(path, 1)
    assert mine[-2:] == before[-2:] == [2, 3], "step 1 goes when the first base is there"
    number = {"own": 1, "rank": 0}
    assert delete_segments(FS, path, 1, lambda _: True, lambda: None, **number) == len(mine)
    assert (steps_on_disk(path, 0), steps_on_disk(path, 1)) == ([], before)
