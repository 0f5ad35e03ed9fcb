"""One process goes on where several ranks have trained: what is in its way, and how it is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import NewerFormatError, RecoveryError
from everstep.format.names import base_dir, shard_name
from everstep.format.records import Manifest
from everstep.restore.start import rank_restore
from everstep.run.scan import Inventory, scan_run, starts_with_job_base
from everstep.seams import PosixFileSystem, Seams
from tests.support.multistep.fuzzy import left, lsns_on_disk
from tests.support.ranks.logs import die
from tests.support.ranks.relaid import alone, check
from tests.support.ranks.replicas import alike, replicas, resume, trained, until

__all__ = ["alike"]


def flip(path: Path, timeline: int, step: int, rank: int = 0) -> None:
    """A bit of the weights in a rank's file of a base."""
    shard = base_dir(path, timeline, step) / shard_name(rank)
    data = bytearray(Path(shard).read_bytes())
    at = max(data.find(one.numpy().tobytes()) for one in trained(step))
    assert at > 0
    data[at] ^= 1
    Path(shard).write_bytes(data)


@pytest.mark.slow
def test_behind_a_damaged_base_of_its_own_it_takes_the_logs_of_several(tmp_path: Path) -> None:
    """The newest base is of one process; the one before, and its log, of two ranks."""
    path = tmp_path / "run"
    until((path, path), 6)
    with alone(path) as (one,):
        one.ckpt.resume()
        one.train(1)
        die([one])
    flip(path, 2, 7)
    with alone(path) as (one,):
        found = one.ckpt.resume()
        assert (found.step, found.base_step, found.replayed, found.exact) == (6, 4, 2, True)
        check(one, 6)
        die([one])


def test_behind_a_damaged_base_of_several_it_takes_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 10)
    flip(path, 1, 8)
    with alone(path) as (one,):
        found = one.ckpt.resume()
        assert (found.step, found.base_step, found.replayed, found.exact) == (10, 4, 6, True)
        check(one, 10)
        die([one])


def test_where_all_is_damaged_it_is_told_why(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 6)
    for base in scan_run(PosixFileSystem(), path).bases:
        flip(path, base.id.timeline, base.id.step)
    with alone(path) as (one,), pytest.raises(RecoveryError) as raised:
        one.ckpt.resume()
    assert "there are bases, but none that can be read" in str(raised.value)
    assert "its digest does not match" in str(raised.value)


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_newer_everstep_has_written_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    path = tmp_path / "run"
    until((path, path), 10)
    load = rank_restore.load_ranks

    def newer(opened: Any, *about: Any, **given: Any) -> Any:
        if opened[0].marker.step == 8:
            raise NewerFormatError("a header is written in format 2")
        return load(opened, *about, **given)

    monkeypatch.setattr(rank_restore, "load_ranks", newer)
    seams = [Seams()] if world == 1 else None
    refused = pytest.raises(NewerFormatError, match="format 2")
    with replicas(*(path,) * world, seams=seams) as ranks, refused:
        resume(ranks)
    assert max(scan_run(PosixFileSystem(), path).timelines) == 1


def test_it_goes_back_within_its_training(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    with alone(path) as (one,):
        one.ckpt.resume()
        one.train(3)
        found = one.ckpt.rewind(6)
        assert (found.step, found.replayed, found.timeline) == (6, 2, 3)
        check(one, 6)
        one.train(2)
        check(one, 8)
        with pytest.raises(RecoveryError, match="no base of step 0, and this process has trained"):
            one.ckpt.resume(0)
        die([one])


def test_it_starts_from_scratch_where_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 6)
    with alone(path) as (one,):
        found = one.ckpt.resume(0)
        assert (found.step, found.source) == (0, "fresh")
        one.train(1)
        check(one, 1)


def test_what_is_left_out_is_left_out_once(tmp_path: Path) -> None:
    """No log leads on where parts are left out: its steps are not dropped unasked."""
    path = tmp_path / "run"
    until((path, path), 6)
    with alone(path) as (one,):
        one.ckpt.close()
    model = torch.nn.Linear(8, 8)
    state = {"model": model, "data": {"step": 0}}
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer(path, state, method="sync", every=None, keeper=keeper) as ckpt:
        with pytest.raises(RecoveryError, match="reaches step 6, but without 'optimizer'"):
            ckpt.resume(strict=False)
        found = ckpt.resume(4, strict=False)
    assert (found.step, found.replayed) == (4, 0)
    assert found.mismatched
    assert state["data"] == {"step": 4}


def in_memory(inventory: Inventory) -> Inventory:
    """As if of each base only the first rank's file had come, from a keeper."""
    bases = []
    for base in inventory.bases:
        assert base.manifest is not None
        bases.append(replace(base, manifest=Manifest(base.manifest.markers[:1])))
    return replace(inventory, bases=bases)


def test_a_base_of_several_is_one_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 6)
    inventory = scan_run(PosixFileSystem(), path)
    for found in (inventory, in_memory(inventory)):
        assert starts_with_job_base(found)
        assert starts_with_job_base(found, step=5)
        assert not starts_with_job_base(found, step=0)


def test_a_base_over_several_updates_is_for_several_ranks_too(tmp_path: Path) -> None:
    """Its tensors are of different updates until somebody makes it whole, which each rank does."""
    path = tmp_path / "run"
    options: dict[str, Any] = {"method": left(2), "log": None, "keeper": None}
    with replicas(path, seams=[Seams()], **options) as (one,):
        one.ckpt.resume()
        one.train(5)
        one.ckpt.wait(20)
    assert set(lsns_on_disk(path, 5).values()) == {4, 5}
    with replicas(path, path) as ranks:
        for one, found in zip(ranks, resume(ranks), strict=True):
            assert (found.step, found.skipped) == (5, ())
            assert not any("its redo file was replayed" in note for note in found.notes)
            assert all(map(torch.equal, one.weights, trained(5)))
        die(ranks)
