"""Every rank is told how each of them has come back."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks.logs import die
from tests.support.ranks.replicas import alike, folders, replicas, resume, train, until
from tests.support.ranks.replicas_left import BASES

__all__ = ["alike"]


def test_bytes_seconds_and_steps_of_each_rank_are_told_to_all(tmp_path: Path) -> None:
    paths = folders(tmp_path, shared=False)
    until(paths, 6)
    with replicas(*paths) as ranks:
        found = resume(ranks)
        die(ranks)
    assert found[0].ranks == found[1].ranks
    assert [one.rank for one in found[0].ranks] == [0, 1]
    for recovery, back in zip(found, found[0].ranks, strict=True):
        assert (back.source, back.replayed, back.exact) == (recovery.source, 2, True)
        assert (back.load_s, back.replay_s) == (recovery.load_s, recovery.replay_s)
        assert back.load_s > 0
        assert back.replay_s > 0
        read = [one.size_bytes for one in recovery.reads if one.rank == back.rank]
        assert back.size_bytes == sum(read) > 0


def test_which_rank_is_not_exact_is_told(tmp_path: Path) -> None:
    """One that is new has nothing that was its own: the whole job is not what it was."""
    path = tmp_path / "run"
    with replicas(path, path, **BASES) as ranks:
        resume(ranks)
        for rank, one in enumerate(ranks):
            one.state["data"]["of its own"] = rank
        train(ranks, 2)
        for one in ranks:
            one.ckpt.wait(20)
    with replicas(path, path, path, **BASES) as ranks:
        found = resume(ranks)
    for one in found:
        assert not one.exact
        assert [back.exact for back in one.ranks] == [True, True, False]
        assert [back.replayed for back in one.ranks] == [0, 0, 0]


def test_a_fresh_start_says_so(tmp_path: Path) -> None:
    with replicas(*folders(tmp_path, shared=False), **BASES) as ranks:
        for one in resume(ranks):
            assert [back.source for back in one.ranks] == ["fresh", "fresh"]
            assert all(back.size_bytes == 0 for back in one.ranks)
