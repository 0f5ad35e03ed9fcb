"""A step of a branch that was given up can be gone back to, is taken only where the present history
has none of that step, and is called what it is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from hypothesis import given

import everstep
from everstep.commit.lineage import (
    BaseId,
    Branch,
    describe_abandoned,
    describe_lost_steps,
    split_by_history,
)
from everstep.errors import RecoveryError
from everstep.format.names import TIMELINE_RECORD, timeline_dir
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.lineage import _bases, branches
from tests.support.lineage import trees as _trees
from tests.support.log.every_step import run_steps
from tests.support.logged import World, document, invoke, opened, segments_of, train
from tests.support.ranks.logs import ON_DISK, until
from tests.support.ranks.together import resume, trainings
from tests.support.resuming import look, shard, train_on
from tests.support.world import flip, inventory_of

FS = PosixFileSystem()


def parent_of(run: Path, timeline: int) -> tuple[int | None, int]:
    record = inventory_of(run).timelines[timeline]
    assert record is not None
    return record.parent, record.fork_step


# --- In words ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "tree"),
    [
        ((1, 8), [(1, None, 0), (2, 1, 4)]),
        ((1, 8), [(1, None, 0), (2, 1, 4), (3, 2, 6)]),
        ((2, 8), [(1, None, 0), (2, 1, 4), (3, 1, 2)]),
        ((2, 8), [(1, None, 0), (2, 1, 4), (3, 1, 6)]),
        ((2, 8), [(1, None, 0), (2, 1, 4), (3, 1, None)]),
        ((1, 8), [(1, None, 0), (2, None, 0), (3, 2, 1)]),
    ],
)
def test_a_step_outside_of_the_newest_history_is_said_to_be_abandoned(
    end: tuple[int, int], tree: Sequence[tuple[int, int | None, int | None]]
) -> None:
    said = describe_abandoned(BaseId(*end), branches(*tree))
    assert said is not None
    assert f"step 8 of timeline {end[0]} is on an abandoned branch" in said
    assert f"the history of timeline {tree[-1][0]}, the newest until now, has no step 8" in said


@given(_bases, _trees())
def test_what_is_of_the_history_is_not_called_given_up(
    bases: list[BaseId], tree: dict[int, Branch]
) -> None:
    here, _ = split_by_history(bases, tree)
    for base in bases:
        assert (describe_abandoned(base, tree) is None) == (base in here)


def test_what_the_history_had_behind_a_state() -> None:
    tree = branches((1, None, 0), (2, 1, 8), (3, 2, 12), (4, 3, 20))
    assert "timeline 4 started at step 20 of timeline 3" in str(
        describe_lost_steps(BaseId(3, 15), tree)
    )
    assert "steps 16 to 20 must be" in str(describe_lost_steps(BaseId(3, 15), tree))
    assert ": step 20 must be" in str(describe_lost_steps(BaseId(3, 19), tree))
    assert describe_lost_steps(BaseId(3, 20), tree) is None
    assert describe_lost_steps(BaseId(4, 21), tree) is None
    assert describe_lost_steps(BaseId(1, 4), branches((1, None, 0), (2, 1, None))) is None


@pytest.mark.parametrize(("reaches", "lost"), [(16, "17 to 20"), (20, ""), (23, "")])
def test_what_the_log_has_all_the_same_is_not_called_gone(reaches: int, lost: str) -> None:
    tree = branches((1, None, 0), (2, 1, 8), (3, 2, 12), (4, 3, 20))
    end = BaseId(3 if reaches <= 20 else 4, reaches)
    said = str(describe_lost_steps(BaseId(3, 15), tree, (end, "it is of another class")))
    own = "step 16 must" if reaches == 16 else f"steps 16 to {reaches} must"
    assert f"the log reaches {end}, but could not be replayed here (it is of another" in said
    assert f"): {own} be trained again; resume(step={reaches}) restores that step" in said
    assert ("which no base or log reaches any more" in said) == bool(lost)
    assert lost in said
    assert describe_lost_steps(BaseId(4, 23), tree, (BaseId(4, 23), "")) is None


# --- One rank ---------------------------------------------------------------------------


def test_a_base_of_a_branch_that_was_given_up(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_on(run_folder, until=8)
    train_on(run_folder, until=6, value=100, step=4)
    with caplog.at_level(logging.WARNING, "everstep"):
        recovery, value = look(run_folder, step=6)
        assert (value, recovery.notes) == (106, ()), "that of the present history"
        assert not caplog.records
        recovery, value = look(run_folder, step=8)
    assert (value, parent_of(run_folder, recovery.timeline)) == (8, (1, 8))
    (note,) = recovery.notes
    assert "step 8 of timeline 1 is on an abandoned branch" in note
    assert note in caplog.messages
    assert recovery.exact, "as it was"
    recovery, value = look(run_folder)
    assert (value, recovery.notes) == (8, ()), "from now on that is the present history"


def test_where_the_one_of_the_history_is_damaged_the_other_is_not_taken_for_it(
    run_folder: Path,
) -> None:
    train_on(run_folder, until=6)
    train_on(run_folder, until=6, value=100, step=4)
    flip(shard(run_folder, 6, 2), 4096 + 500)
    recovery, value = look(run_folder, step=6)
    assert value == 6
    assert "step 6 of timeline 1 is on an abandoned branch" in str(recovery.notes)
    assert "is damaged" in str(recovery.skipped)


def test_a_step_that_only_the_log_of_another_branch_has(run_folder: Path) -> None:
    """The log of the present one lacks it: what stands at the same number is another training."""
    train(run_folder, World(), 8, every=1000)
    world = World(seed=2)
    with opened(run_folder, world, every=1000) as ckpt:
        assert ckpt.resume(step=3).notes == ()
        torch.manual_seed(7)
        states = run_steps(ckpt, world, 4)
        assert ckpt.rewind(5).notes == ()
        assert world.snapshot() == states[5]
        recovery = ckpt.rewind(8)
    assert recovery.step == 8
    assert "step 8 of timeline 1 is on an abandoned branch" in str(recovery.notes)


def test_a_timeline_that_came_to_nothing_does_not_choose_the_branch(run_folder: Path) -> None:
    """Its base was deleted while it was opened: the present history is that of the one before, and
    a step is that of this history first, also where the log leads to both."""
    train(run_folder, World(), 4, every=1000)
    train(run_folder, World(seed=2), 4, at=1, every=1000)
    record = scan_run(FS, PurePath(run_folder)).timelines[2]
    assert record is not None
    nothing = replace(record, timeline=3, parent=1, fork_step=3, base=(1, 2))
    folder = Path(timeline_dir(PurePath(run_folder), 3))
    folder.mkdir()
    (folder / TIMELINE_RECORD).write_bytes(nothing.encode())
    with opened(run_folder, World(seed=3), every=1000) as ckpt:
        recovery = ckpt.resume(step=3)
    assert parent_of(run_folder, recovery.timeline) == (2, 3)
    assert recovery.notes == ()


@pytest.mark.parametrize("process", [False, True])
def test_a_log_in_memory_that_a_resume_has_gone_through(run_folder: Path, process: bool) -> None:
    """Without a keeper process it is gone then. What that costs is said."""
    world = World()
    keeper = everstep.KeeperOptions(process=process, linger_s=5)
    log = everstep.LogOptions(to="memory")
    with opened(run_folder, world, keeper=keeper, log=log, every=100) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 8)
        found = [ckpt.resume() for _ in range(3)]
        assert [one.step for one in found] == ([8, 8, 8] if process else [8, 1, 1])
        assert [bool(one.notes) for one in found] == [False, not process, False]
        if process:
            return
        assert "timeline 2 started at step 8 of timeline 1" in found[1].notes[0]
        assert "steps 2 to 8 must be trained again" in found[1].notes[0]
        with pytest.raises(RecoveryError, match="step 8"):
            ckpt.rewind(8)


# --- Several ----------------------------------------------------------------------------


def test_several_ranks_say_it_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run"
    until((path, path), 8)
    with trainings(path, path, **ON_DISK) as ranks:
        assert [one.notes for one in resume(ranks, 4)] == [(), ()]
    with caplog.at_level(logging.WARNING, "everstep"), trainings(path, path, **ON_DISK) as ranks:
        found = resume(ranks, 8)
    assert [(one.step, one.exact) for one in found] == [(8, True)] * 2
    assert found[0].notes == found[1].notes
    assert "step 8 of timeline 1 is on an abandoned branch" in found[0].notes[0]
    assert caplog.messages.count(found[0].notes[0]) == 1, "rank 0 says it"


# --- Commands ---------------------------------------------------------------------------


def test_commands_say_it(run_folder: Path, tmp_path: Path) -> None:
    train(run_folder, World(), 8)
    train(run_folder, World(seed=2), 2, at=4)
    about: tuple[Any, ...] = ("restore", run_folder, "--step")
    assert document(*about, 6, "--out", tmp_path / "a")["given_up"] is None
    said = document(*about, 8, "--out", tmp_path / "b")["given_up"]
    assert "step 8 of timeline 1 is on an abandoned branch" in said
    meant = document(*about, 8, "--timeline", 1, "--out", tmp_path / "c")
    assert (meant["timeline"], meant["given_up"]) == (1, None)
    shown = invoke(*about, 8, "--out", tmp_path / "d")
    assert said in " ".join(shown.stdout.split())
    assert segments_of(run_folder), "the log is there"
