"""The log of as many ranks in another layout: it is noticed, and replayed by offsets by all, and a
start in the same layout does nothing for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.commit.job.agreement import TakeInventory
from everstep.commit.lineage import BaseId
from everstep.format.names import base_dir, marker_name, shard_name
from everstep.restore.start import rank_log, rank_restore
from everstep.restore.start.rank_sources import RankSources
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.testing import inspect
from tests.support.ranks.logs import die, segment
from tests.support.ranks.replicas import Replica, alike, folders, replicas, resume, train, until
from tests.support.ranks.replicas import trained as trained_to

__all__ = ["alike"]

FS = PosixFileSystem()
LAYOUTS = [(False, True), (True, False)]
"""Whether ranks have modules of their own, instead of what all train alike: before, and now."""


def came_back(
    paths: tuple[Path, ...], step: int, replayed: int, *, apart: bool, steps: int = 3
) -> list[everstep.Recovery]:
    """What all ranks come back to, and that it is what training had; they train on, and die."""
    with replicas(*paths, apart=apart) as ranks:
        found = resume(ranks)
        for one, training in zip(found, ranks, strict=True):
            assert (one.step, one.replayed, one.exact) == (step, replayed, True), one
            check(training, step)
        train(ranks, steps)
        for training in ranks:
            check(training, step + steps)
        die(ranks)
        return found


def check(training: Replica, step: int) -> None:
    assert all(map(torch.equal, training.weights, trained_to(step)))
    assert training.state["data"]["step"] == step


def lose(path: Path, timeline: int, step: int) -> None:
    """A base, as if the keepers had died before they had written it."""
    for file in Path(base_dir(path, timeline, step)).iterdir():
        file.unlink()


class Seen:
    """What ranks do at a start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = self.layouts = 0
        self.asked: list[bool] = []
        load, layout, offer = (
            rank_restore.load_ranks,
            rank_restore.read_layout,
            RankSources.offer,
        )

        def counted(*args: Any, **given: Any) -> Any:
            loaded = load(*args, **given)
            self.loads += 1
            return loaded

        def looked(*args: Any) -> Any:
            self.layouts += 1
            return layout(*args)

        def asked(sources: RankSources, wanted: TakeInventory) -> Any:
            self.asked.append(wanted.relaid)
            return offer(sources, wanted)

        monkeypatch.setattr(rank_restore, "load_ranks", counted)
        monkeypatch.setattr(rank_restore, "read_layout", looked)
        monkeypatch.setattr(RankSources, "offer", asked)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("before", "now"), LAYOUTS)
def test_another_layout_comes_back_to_the_last_step(
    tmp_path: Path, before: bool, now: bool, world: int
) -> None:
    paths = folders(tmp_path, True, world)
    until(paths, 6, apart=before)
    came_back(paths, 6, 2, apart=now)
    for path in paths:
        record = scan_run(FS, path).timelines[2]
        assert record is not None
        assert (record.parent, record.fork_step, record.base) == (1, 6, (1, 4))
        assert record.exact
    came_back(paths, 9, 1, apart=before)  # from the base of step 8, and a log of the other one


def test_where_each_disk_has_a_base_of_its_own_they_go_on_from_that(tmp_path: Path) -> None:
    """No rank sees what says which part of a log the others have."""
    paths = folders(tmp_path, False, 2)
    until(paths, 6)
    for one in came_back(paths, 4, 0, apart=True):
        assert "have in common are missing" in str(one.skipped)


def test_where_nobody_can_say_who_had_what_they_go_on_from_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    until((path, path), 6)
    monkeypatch.setattr(rank_restore, "read_layout", lambda *about: None)
    for one in came_back((path, path), 4, 0, apart=True):
        assert "the old layout is in files of other ranks, which are not available here" in str(
            one.skipped
        )


def test_a_start_in_the_same_layout_does_nothing_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    until((path, path), 6)
    seen = Seen(monkeypatch)
    came_back((path, path), 6, 2, apart=False)
    assert (seen.loads, seen.layouts) == (2, 0)
    assert not any(seen.asked)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("before", "now"), LAYOUTS)
def test_in_another_layout_the_base_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool, now: bool
) -> None:
    """It is noticed behind the base, and before anything is replayed: the base stands."""
    path = tmp_path / "run"
    until((path, path), 6, apart=before)
    seen = Seen(monkeypatch)
    came_back((path, path), 6, 2, apart=now)
    assert (seen.loads, seen.layouts) == (2, 2)
    assert any(seen.asked)


def test_what_one_rank_notices_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose part is what it was has replayed its log meanwhile, or could not: it goes back
    to the base, and replays with the others. What it could not use is no hole in the log."""
    path = tmp_path / "run"
    until((path, path), 6)
    notices = rank_log.RankLog.is_other_layout
    monkeypatch.setattr(
        rank_log.RankLog,
        "is_other_layout",
        lambda log, *about: log._rank == 1 and notices(log, *about),
    )
    came_back((path, path), 6, 2, apart=True)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("before", "now"), LAYOUTS)
def test_the_first_step_behind_it_waits_for_a_base(tmp_path: Path, before: bool, now: bool) -> None:
    """Its own log leads on from no base of the layout before: without one, it would be lost."""
    path = tmp_path / "run"
    until((path, path), 6, apart=before)
    with replicas(path, path, apart=now) as ranks:
        resume(ranks)
        for one in ranks:
            recorder = inspect(one.ckpt).recorder
            assert recorder is not None
            assert recorder.reachable_step is None
        train(ranks, 1)
        die(ranks)
    bases = [base.id for base in scan_run(FS, path).bases]
    assert BaseId(2, 7) in bases
    came_back((path, path), 7, 0, apart=now)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("before", "now"), LAYOUTS)
def test_where_nothing_was_replayed_its_log_leads_on_from_that_base(
    tmp_path: Path, before: bool, now: bool
) -> None:
    """For those who have its layout: what they restore is in the parts that it is of."""
    path = tmp_path / "run"
    until((path, path), 8, apart=before)
    came_back((path, path), 8, 0, apart=now, steps=1)
    lose(path, 2, 9)
    came_back((path, path), 9, 1, apart=now, steps=1)
    lose(path, 3, 10)
    for one in came_back((path, path), 8, 0, apart=before, steps=1):
        assert "at step 9 the state has another composition" in str(one.skipped)


def test_a_log_without_a_base_of_its_layout_is_refused_and_said(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 6)
    came_back((path, path), 6, 2, apart=True, steps=1)
    lose(path, 2, 7)
    (one, _) = came_back((path, path), 6, 2, apart=True, steps=1)
    assert "the layout of its ranks is not that of the base before it" in str(one.skipped)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("before", "now"), LAYOUTS)
def test_a_hole_in_one_log_ends_it_for_all(
    tmp_path: Path, before: bool, now: bool, rank: int
) -> None:
    path = tmp_path / "run"
    until((path, path), 7, apart=before)
    (segment(path, 6) / marker_name(rank)).unlink()
    for one in came_back((path, path), 5, 1, apart=now):
        assert f"the log of rank {rank} ends before; others reach 7" in str(one.skipped)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("before", "now"), LAYOUTS)
def test_a_flipped_bit_takes_all_to_the_step_before(
    tmp_path: Path, before: bool, now: bool, rank: int
) -> None:
    path = tmp_path / "run"
    until((path, path), 7, apart=before)
    shard = next(p for p in segment(path, 6).iterdir() if p.name == shard_name(rank))
    data = bytearray(shard.read_bytes())
    values = [torch.full((4,), 0.6 + number).numpy().tobytes() for number in range(6)]
    at = max(data.find(value) for value in values)
    assert at > 0
    data[at] ^= 1
    shard.write_bytes(data)
    came_back((path, path), 5, 1, apart=now)
