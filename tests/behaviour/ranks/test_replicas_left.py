"""Ranks that trained alike, each on a disk of its own: what is left of some is what all had in
common, and no base is thrown away because the files of others are gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.errors import RecoveryError
from everstep.format.names import MANIFEST, base_dir, marker_name, shard_name
from everstep.seams import Seams
from tests.support.ranks.replicas import alike, folders, replicas, resume, train, trained
from tests.support.ranks.replicas_left import BASES, own_models, saved
from tests.support.ranks.together import on_all

__all__ = ["alike"]


def start(paths: tuple[Path, ...], step: int | None = None, **options: Any) -> list[Any]:
    """What all ranks of another job come back to; and it trains on, and comes back from that."""
    about = {**BASES, **options}
    if len(paths) == 1:
        about["seams"] = [Seams()]
    with replicas(*paths, **about) as ranks:
        found = on_all(*(lambda one=one: one.ckpt.resume(step) for one in ranks))  # type: ignore[misc]
        for training in ranks:
            weights = trained(found[0].step)
            assert all(map(torch.equal, training.weights, weights)), found[0]
        train(ranks, 2)
        for training in ranks:
            training.ckpt.wait(20)
            assert all(map(torch.equal, training.weights, trained(found[0].step + 2)))
    return found


def check(found: list[Any], step: int, gone: str) -> None:
    for one in found:
        assert (one.step, one.exact) == (step, False), one
        assert f"the files of rank(s) {gone} are not here" in str(one.notes)


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("world", "left"), [(2, (0,)), (2, (1,)), (3, (2,)), (3, (0, 2)), (4, (1, 3)), (4, (0, 1))]
)
def test_whoever_is_left_has_what_all_had_in_common(
    tmp_path: Path, world: int, left: tuple[int, ...]
) -> None:
    paths = folders(tmp_path, shared=False, world=world)
    saved(paths)
    mine = tuple(paths[rank] for rank in left)
    gone = ", ".join(str(rank) for rank in range(world) if rank not in left)
    found = start(mine)
    for one in found:
        assert (one.step, one.exact) == (4, False), one
    if len(left) == 1:
        check(found, 4, gone)
    for one in start(mine):  # a base of their own is whole; its history stays as it was
        assert (one.step, one.notes, one.exact) == (6, (), False), one


def test_what_a_lost_rank_had_for_itself_is_said(tmp_path: Path) -> None:
    paths = folders(tmp_path, shared=False)
    saved(paths)
    (one,) = start(paths[1:])
    notes = str(one.notes)
    assert "data: rank 0 starts with that of rank 1" in notes
    assert "rng: rank 0 starts with the state its program made" in notes


def test_a_base_that_is_whole_comes_first(tmp_path: Path) -> None:
    """An older one, of which the files of all are there."""
    paths = folders(tmp_path, shared=False)
    saved(paths)
    for name in (shard_name(1), marker_name(1)):
        shutil.copy(Path(base_dir(paths[1], 1, 2)) / name, base_dir(paths[0], 1, 2))
    assert start(paths[:1])[0].step == 2


def test_what_only_the_lost_rank_had_is_missed(tmp_path: Path) -> None:
    """A tensor of one rank is none of another's, whatever it is called."""
    paths = folders(tmp_path, shared=False)
    with own_models(paths) as ranks:
        resume(ranks)
        train(ranks, 2)
        for one in ranks:
            one.ckpt.wait(20)
    with own_models(paths[1:], seams=[Seams()]) as (one,):
        before = one.weights
        with pytest.raises(RecoveryError, match=r"files of rank\(s\) 0 are not here"):
            one.ckpt.resume()
        assert all(map(torch.equal, one.weights, before)), "nothing has been touched"


def test_damage_to_what_is_left_is_noticed(tmp_path: Path) -> None:
    paths = folders(tmp_path, shared=False)
    saved(paths)
    file = Path(base_dir(paths[1], 1, 4)) / shard_name(1)
    data = bytearray(file.read_bytes())
    at = data.find(trained(4)[0].numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    file.write_bytes(data)
    found = start(paths[1:])
    assert found[0].step == 2, "the base before"


def test_a_base_without_manifest_is_none(tmp_path: Path) -> None:
    """Nobody knows whether it was ever whole."""
    paths = folders(tmp_path, shared=False)
    saved(paths)
    newest = Path(base_dir(paths[1], 1, 4))
    (newest / MANIFEST).unlink()
    assert start(paths[1:])[0].step == 2


def test_a_step_can_be_asked_for(tmp_path: Path) -> None:
    paths = folders(tmp_path, shared=False)
    saved(paths)
    check(start(paths[:1], step=2), 2, "1")


def test_a_whole_start_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort costs nothing where it is not needed."""
    from everstep.restore.fetch import rank_copies as of_ranks

    asked: list[bool] = []
    look = of_ranks.offer_of

    def offer_of(*args: Any, partly: bool = False, **options: Any) -> Any:
        asked.append(partly)
        return look(*args, partly=partly, **options)

    monkeypatch.setattr("everstep.restore.start.rank_sources.offer_of", offer_of)
    paths = folders(tmp_path, shared=False)
    saved(paths)
    with replicas(*paths, **BASES) as ranks:
        found = resume(ranks)
        assert all(one.exact for one in found)
    assert asked
    assert not any(asked)
