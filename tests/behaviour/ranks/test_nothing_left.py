"""A run whose records say that it has had steps, and of which no base is left: nothing is started
over unasked, and what there is stays."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path, PurePath
from typing import Any

import pytest

from everstep.commit.job.offers import BaseOffer, Offer, choose
from everstep.commit.lineage import BaseId, describe_missing_steps, describe_unused
from everstep.errors import EverstepError, RecoveryError, StateError
from everstep.format.names import BASE_DIR, TIMELINE_RECORD, timeline_dir
from tests.support import logged
from tests.support.copying import train as train_copied
from tests.support.lineage import branches
from tests.support.logged import World, invoke
from tests.support.offers import offer, pieces, record
from tests.support.ranks.logs import ON_DISK
from tests.support.ranks.together import resume, save, trainings
from tests.support.ranks.together import train as train_all
from tests.support.resuming import look, train_on
from tests.support.world import HookedFileSystem, base_folder, flip, inventory_of, opened

HAD = r"the history of this run had step 4 \(timeline 2 started there, from timeline 1\)"


@pytest.fixture
def run(run_folder: Path) -> Path:
    """It was resumed at step 4, and has bases of steps 5 and 6 since."""
    train_on(run_folder, until=4)
    train_on(run_folder, until=6)
    for step in range(1, 5):
        shutil.rmtree(base_folder(run_folder, step))
    return run_folder


def spoil(run: Path, how: str) -> None:
    """As a copy that was made while bases were deleted; or somebody has deleted them."""
    for base in [one.path for one in inventory_of(run).bases]:
        if how == "deleted":
            shutil.rmtree(base)
            continue
        if how == "half deleted":
            Path(base / "manifest.json").rename(base / "manifest.deleting")
        Path(base / "manifest.json").unlink(missing_ok=True)
        Path(base / "rank-00000.done").unlink()


@pytest.mark.parametrize("how", ["half copied", "half deleted", "deleted"])
def test_it_is_not_started_over_unasked(run: Path, how: str) -> None:
    spoil(run, how)
    left = sorted(path for path in run.rglob("*") if path.is_file())
    for options in ({}, {"strict": False}):
        with pytest.raises(RecoveryError, match=HAD) as caught:
            look(run, **options)
        assert "resume(step=0) starts from scratch" in str(caught.value)
        assert ("step 6, timeline 2: " in str(caught.value)) == (how != "deleted")
    with opened(run, {"n": -1}) as ckpt, pytest.raises(StateError, match=HAD):
        ckpt.step()
    assert sorted(path for path in run.rglob("*") if path.is_file()) == left
    assert look(run, step=0)[0].source == "fresh"
    again, _ = look(run)
    assert (again.step, again.source, again.notes) == (0, "fresh", ()), "that was asked for"


@pytest.mark.parametrize("how", ["half copied", "deleted"])
def test_the_tools_say_what_resume_does(run: Path, how: str) -> None:
    spoil(run, how)
    shown = invoke("ls", run)
    assert shown.exit_code == 1
    told = " ".join(shown.stdout.split())
    assert "resume(): the history of this run had step 4" in told
    assert "afresh" not in told
    assert logged.document("ls", run, status=1)["resume"] is None
    assert "had step 4" in logged.document("verify", run, status=1)["problems"][0]["problem"]
    inspected = invoke("inspect", run)
    assert "had step 4" in " ".join(inspected.stderr.split())
    look(run, step=0)
    shown = invoke("ls", run)
    assert "it would start afresh" in shown.stdout
    assert logged.document("verify", run)["ok"]


@pytest.mark.parametrize("how", ["first", "not the first"])
def test_without_the_record_that_would_say_it(run: Path, how: str) -> None:
    """Of a first timeline it is known."""
    spoil(run, "deleted")
    if how == "first":
        shutil.rmtree(timeline_dir(run, 2))
    flip(run / timeline_dir(PurePath(), 1 if how == "first" else 2) / TIMELINE_RECORD, 30)
    if how == "first":
        assert look(run)[0].source == "fresh"
        return
    with pytest.raises(RecoveryError, match="the record of timeline 2 is damaged"):
        look(run)
    assert look(run, step=0)[0].source == "fresh"


@pytest.mark.slow
def test_a_base_that_the_history_has_turned_away_from_is_named(run_folder: Path) -> None:
    logged.train(run_folder, World(), 8)
    logged.train(run_folder, World(), 4, at=4)
    for base in inventory_of(run_folder).bases:
        if base.id != BaseId(1, 8):
            shutil.rmtree(base.path)
    with logged.opened(run_folder, World()) as ckpt:
        with pytest.raises(RecoveryError, match=HAD) as caught:
            ckpt.resume()
        assert "step 8, timeline 1: not in the history of the newest" in str(caught.value)
        assert "resume(step=8) continues from step 8 of timeline 1" in str(caught.value)
        assert ckpt.resume(8).step == 8
    logged.forget(run_folder)


def test_damage_to_what_was_given_up_is_no_reason_to_refuse(run: Path) -> None:
    look(run, step=0)
    for step in (5, 6):
        flip(base_folder(run, step, 2) / "manifest.json", 30)
        flip(base_folder(run, step, 2) / "rank-00000.done", 30)
    recovery, _ = look(run)
    assert (recovery.step, recovery.source) == (0, "fresh")
    assert "damaged" in str(recovery.skipped)


@pytest.mark.slow
def test_a_copy_is_a_base_that_is_left(run_folder: Path, tmp_path: Path) -> None:
    copies = [str(tmp_path / "copies")]
    for steps in (4, 6):
        train_copied(run_folder, steps, tiers=copies)
    spoil(run_folder, "deleted")
    assert train_copied(run_folder, 6, tiers=copies)[1].step == 6
    spoil(run_folder, "deleted")
    with pytest.raises(RecoveryError, match="the history of this run had step 6"):
        train_copied(run_folder, 6)


def test_what_an_older_process_commits_meanwhile_is_found(run: Path, tmp_path: Path) -> None:
    """It was looked at while the older process deleted a base, and committed the next."""
    older, newer, aside = base_folder(run, 5, 2), base_folder(run, 6, 2), tmp_path / "aside"
    newer.rename(aside)

    def hook(op: str, path: PurePath) -> None:
        if (op, path) == ("scan", PurePath(older)) and aside.exists():
            aside.rename(newer)
            (older / "manifest.json").rename(older / "manifest.deleting")
            (older / "rank-00000.done").unlink()

    with opened(run, {"n": -1}, fs=HookedFileSystem(hook)) as ckpt:
        assert ckpt.resume(strict=False).step == 6
    assert not aside.exists()


# --- Before the first base --------------------------------------------------------------


def test_a_kill_before_the_first_base_was_durable(run_folder: Path) -> None:
    train_on(run_folder, until=1)
    spoil(run_folder, "half copied")
    for _ in range(2):
        recovery, _ = look(run_folder)
        assert (recovery.step, recovery.source) == (0, "fresh")


def test_a_log_that_no_base_leads_to(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    logged.train(run_folder, World(), 6, every=1000)
    spoil(run_folder, "deleted")
    with (
        caplog.at_level(logging.WARNING, "everstep"),
        logged.opened(run_folder, World()) as ckpt,
    ):
        recovery = ckpt.resume()
    assert (recovery.step, recovery.source) == (0, "fresh")
    assert "there is incomplete data of step 6 of timeline 1" in str(recovery.notes)
    assert recovery.notes[0] in caplog.messages


@pytest.mark.slow
def test_a_log_behind_bases_that_are_gone(run_folder: Path) -> None:
    logged.train(run_folder, World(), 6)
    logged.train(run_folder, World(), 4)
    spoil(run_folder, "deleted")
    with logged.opened(run_folder, World()) as ckpt:
        with pytest.raises(RecoveryError, match="the history of this run had step 6"):
            ckpt.resume()
        assert ckpt.resume(step=0).notes == ()
    logged.forget(run_folder)


# --- Several ranks ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thinned(2)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_several_ranks(tmp_path: Path, shared: bool) -> None:
    paths = (tmp_path / "a", tmp_path / ("a" if shared else "b"))

    def failing(call: Any) -> list[BaseException]:
        with trainings(*paths, **ON_DISK) as ranks:
            found: list[BaseException] = []
            with pytest.raises(EverstepError) as caught:
                call(ranks)
            found.append(caught.value)
        return found

    for _ in range(2):
        with trainings(*paths, **ON_DISK) as ranks:
            resume(ranks)
            train_all(ranks, 3)
            save(ranks)
    for path in set(paths):
        for timeline in (1, 2):
            shutil.rmtree(path / timeline_dir(PurePath(), timeline) / BASE_DIR)
    for call in (resume, lambda ranks: train_all(ranks, 1)):
        (error,) = failing(call)
        assert "the history of this run had step 3" in str(error)
        assert "resume(step=0) starts from scratch" in str(error)
    for step in (0, None):
        with trainings(*paths, **ON_DISK) as ranks:
            assert {one.source for one in resume(ranks, step)} == {"fresh"}


@pytest.mark.slow
def test_several_ranks_behind_a_start_from_scratch(tmp_path: Path) -> None:
    """Whose process was killed before its first base: what was given up stays so."""
    path = tmp_path / "run"
    with trainings(path, path) as ranks:
        resume(ranks)
        train_all(ranks, 2)
        save(ranks)
    for step in (0, None):
        with trainings(path, path) as ranks:
            found = resume(ranks, step)
        assert {(one.step, one.source) for one in found} == {(0, "fresh")}
    assert [(one.timeline, one.step) for one in found[0].skipped] == [(1, 2)]
    with trainings(path, path) as ranks:
        assert resume(ranks, 2)[0].step == 2


def test_what_hosts_did_without_a_disk_gives_nothing_up_that_is_on_it() -> None:
    """They saw none of it, and were killed three times."""
    base = BaseId(1, 10)
    known = offer(0, {base: BaseOffer(pieces(base, [0, 1], 2))}, timelines={1: record(1)})
    fresh = {number: record(number, session="t") for number in (2, 3)}
    stranger = Offer(1, "disk 1", "run", 4, fresh, {})
    with pytest.raises(RecoveryError, match="not in the history of the newest timeline") as caught:
        choose([known, stranger])
    assert "resume(step=10) continues from step 10 of timeline 1" in str(caught.value)


# --- In words ---------------------------------------------------------------------------


def test_what_records_say() -> None:
    first, began = record(1), record(2, BaseId(1, 12))
    tree = branches((1, None, 0), (2, 1, None))  # no base is there: it may have come to nothing
    assert "had step 12" in str(describe_missing_steps({1: first, 2: began}, tree))
    assert "timeline 2 is damaged" in str(describe_missing_steps({1: first, 2: None}, tree))
    assert describe_missing_steps({1: first, 2: record(2, BaseId(1, 0))}, tree) is None
    assert describe_missing_steps({1: first}, branches((1, None, 0))) is None
    assert describe_missing_steps({1: None}, branches((1, None, None))) is None
    assert describe_missing_steps({}, {}) is None
    scratch = {1: first, 2: began, 3: record(3)}
    assert (
        describe_missing_steps(scratch, branches((1, None, 0), (2, 1, None), (3, None, 0))) is None
    )
    assert describe_unused([BaseId(2, 13)], branches((1, None, 0), (2, None, 0))) is not None
    assert describe_unused([BaseId(1, 13)], branches((1, None, 0), (2, None, 0))) is None
