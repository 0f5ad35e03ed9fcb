"""A replicated provider: one rank writes its memory, all ranks and new ones restore it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import EverstepError, OptionError
from tests.support.ranks.together import on_all, rank_seams
from tests.support.world import forget_open_runs


class Table(everstep.Provider):
    """The same table on all ranks."""

    replicated = True

    def __init__(self, value: float, rows: int = 3) -> None:
        self.rows = torch.full((rows,), value)

    def chunks(self) -> Iterator[tuple[str, Any]]:
        yield "rows", self.rows
        yield "format", lambda: b"1"

    def restore(self, chunks: Mapping[str, Any]) -> None:
        assert chunks["format"] == b"1"
        self.rows = chunks["rows"]


class OwnTable(Table):
    """A table of each rank."""

    replicated = False


def job(run: Path, tables: list[Table]) -> list[everstep.Checkpointer]:
    """Resume a job of one rank for each table."""
    seams = rank_seams(len(tables))
    keeper = everstep.KeeperOptions(process=False)

    def start(rank: int) -> everstep.Checkpointer:
        ckpt = everstep.Checkpointer(
            run, {"table": tables[rank]}, every=None, keeper=keeper, seams=seams[rank]
        )
        forget_open_runs()  # another start of the job is another process
        ckpt.resume()
        return ckpt

    return on_all(*(functools.partial(start, rank) for rank in range(len(tables))))


def save(ranks: list[everstep.Checkpointer]) -> None:
    def one_saves(ckpt: everstep.Checkpointer) -> None:
        with ckpt:
            ckpt.step()
            ckpt.save()
            ckpt.wait(20)

    on_all(*(functools.partial(one_saves, ckpt) for ckpt in ranks))


def close(ranks: list[everstep.Checkpointer]) -> None:
    on_all(*(ckpt.close for ckpt in ranks))


def written(run: Path) -> list[str]:
    """Names of the files of a base that hold the rows."""
    files = run.glob("**/base/*1/*.safetensors")
    return [path.name for path in files if b'"table/rows"' in path.read_bytes()]


def test_one_rank_writes_what_all_restore(run_folder: Path) -> None:
    save(job(run_folder, [Table(5.0), Table(5.0)]))
    assert len(written(run_folder)) == 1
    again = [Table(0.0) for _ in range(3)]  # one more than before
    close(job(run_folder, again))
    assert [table.rows.tolist() for table in again] == [[5] * 3] * 3


def test_each_rank_writes_its_own(run_folder: Path) -> None:
    save(job(run_folder, [OwnTable(5.0), OwnTable(6.0)]))
    assert len(written(run_folder)) == 2
    again: list[Table] = [OwnTable(0.0), OwnTable(0.0)]
    close(job(run_folder, again))
    assert [table.rows.tolist() for table in again] == [[5] * 3, [6] * 3]


def test_ranks_whose_chunks_differ_are_refused(run_folder: Path) -> None:
    ranks = job(run_folder, [Table(1.0), Table(1.0, rows=4)])
    with pytest.raises(EverstepError, match="table"):
        save(ranks)


def test_ranks_give_a_tier_the_same_form_of_log(tmp_path: Path) -> None:
    """Else some would record shares of gradients, and others all of them."""
    seams = rank_seams(2)

    def start(rank: int) -> everstep.Checkpointer:
        place = everstep.TierOptions(str(tmp_path / "copies"), log=("whole", "adaptive")[rank])
        return everstep.Checkpointer(
            tmp_path / "run",
            {"table": Table(1.0)},
            method="logged",
            keeper=everstep.KeeperOptions(process=False),
            seams=seams[rank],
            tiers=[place],
        )

    with pytest.raises(OptionError, match=r"TierOptions\.log"):
        on_all(*(functools.partial(start, rank) for rank in range(2)))
