"""A base that several ranks have saved is restored bit for bit by any number of ranks, and what
cannot be restored is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from typer.testing import CliRunner

from everstep.cli import app
from everstep.errors import (
    DamageError,
    FormatError,
    MismatchError,
    RecoveryError,
    UnsupportedStateError,
)
from everstep.format.writer import ChunkRing
from everstep.restore.load.load import Reads, check_contents
from everstep.restore.load.saved_ranks import needs_of
from everstep.restore.offline.load import load_job
from everstep.seams import PosixFileSystem
from everstep.state.layout.entries import OBJECT_PREFIX
from everstep.state.layout.placement import describe_mismatch
from everstep.state.providers.provider import RestorePlan
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from tests.support.ranks import sharding
from tests.support.ranks.relogged import logged, train
from tests.support.ranks.sharding import (
    STEP,
    TIMEOUT_S,
    Values,
    as_rank,
    build,
    found,
    load,
    locals_of,
    open_all,
    save,
    write,
)
from tests.support.world import flip, opened

SEED, OTHER = 3, 9
Job = tuple[str, int]
JOBS: list[Job] = [
    ("one", 1),
    ("ddp", 1),
    ("ddp", 2),
    ("ddp", 3),
    ("fsdp", 1),
    ("fsdp", 2),
    ("fsdp", 4),
    ("tp", 2),
    ("hsdp", 4),
    ("fsdp_tp", 4),
    ("zero", 2),
    ("zero", 3),
]
QUICK: list[tuple[Job, Job]] = [
    (("one", 1), ("fsdp", 4)),
    (("fsdp", 4), ("one", 1)),
    (("ddp", 2), ("ddp", 3)),
    (("fsdp", 2), ("fsdp_tp", 4)),
    (("fsdp_tp", 4), ("hsdp", 4)),
    (("hsdp", 4), ("tp", 2)),
    (("zero", 3), ("zero", 2)),
    (("zero", 2), ("fsdp", 2)),
]


@pytest.fixture(scope="module")
def ring() -> Iterator[ChunkRing]:
    made = ChunkRing(4, 2)
    yield made
    made.close()


def check_restored(base: Any, job: Job, ring: ChunkRing) -> None:
    """Every rank of a job gets what it would have had, whether its optimizer has state or not."""
    layout, world = job
    for rank in range(world):
        with as_rank(rank, world) as info:
            want = locals_of(build(layout, info, SEED))
            for stepped in (True, False):
                values = build(layout, info, OTHER, stepped=stepped)
                load(base, State(values, ranks=info), ring)
                got = locals_of(values)
                assert got.keys() == want.keys()
                for name, tensor in want.items():
                    assert torch.equal(got[name], tensor), (rank, name)
                assert values["own"] == {"n": SEED}
                assert values["scheduler"].base_lrs == [SEED]


@pytest.mark.thinned(9)
@pytest.mark.parametrize(("saved", "loaded"), QUICK, ids=str)
def test_a_job_takes_over_from_another(
    saved: Job, loaded: Job, tmp_path: Path, ring: ChunkRing
) -> None:
    check_restored(save(tmp_path, *saved, SEED, ring), loaded, ring)


class _Tied(sharding.Net):
    """One matrix in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight


@pytest.mark.thinned(6)
@pytest.mark.parametrize("loaded", [("fsdp", 3), ("fsdp", 4), ("ddp", 3), ("ddp", 5)], ids=str)
@pytest.mark.parametrize("saved", [("fsdp", 3), ("hsdp", 6), ("tp", 2)], ids=str)
def test_what_is_tied_is_where_a_rank_had_no_part_of_it(
    saved: Job, loaded: Job, tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts without elements have no memory by which to tell that they are of one matrix."""
    monkeypatch.setattr(sharding, "Net", _Tied)
    check_restored(save(tmp_path, *saved, SEED, ring), loaded, ring)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("job", [("fsdp", 3), ("hsdp", 6)], ids=str)
def test_the_log_of_what_is_tied_is_replayed_without_the_program(
    job: Job, tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "Net", _Tied)
    base, logs = logged(tmp_path, *job, ring, 2, seed=SEED)
    filesystem = PosixFileSystem()
    base = replace(base, files=tuple(filesystem.scan(base.path)))
    whole = load_job(filesystem, base, Reads(ring, TIMEOUT_S))
    for step in (STEP + 1, STEP + 2):
        of_ranks = {rank: logs[rank, step] for rank in range(job[1])}
        whole.take({rank: (records[:-1], records[-1]) for rank, records in of_ranks.items()})
    whole.finish()
    whole.compare()
    with as_rank(0, 1) as info:
        values = build("one", info, SEED)
        for step in (STEP + 1, STEP + 2):
            train(values, step)
            values["optimizer"].step()
        got = whole.whole()[0].tensors
        for name, tensor in values["model"].named_parameters():
            assert torch.equal(got[f"model/{name}"], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("saved", JOBS, ids=str)
def test_every_job_takes_over_from_every_other(saved: Job, tmp_path: Path, ring: ChunkRing) -> None:
    base = save(tmp_path, *saved, SEED, ring)
    for loaded in JOBS:
        check_restored(base, loaded, ring)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("job", [("ddp", 3), ("fsdp_tp", 4), ("hsdp", 4), ("zero", 2)], ids=str)
def test_every_byte_is_written_once(job: Job, tmp_path: Path, ring: ChunkRing) -> None:
    with as_rank(0, 1) as info:
        names = {
            e.name: e.size_bytes for e in State(build("one", info, SEED)).survey().shape.entries
        }
    base, sizes, own = save(tmp_path, *job, SEED, ring), dict[str, int](), set[str]()
    with open_all(base) as ranks:
        check_contents(ranks)
        for one in ranks:
            for place in one.placed():
                entry, alone = place.entry, f"whole@{one.marker.rank}"
                if entry.name.startswith(OBJECT_PREFIX):
                    continue
                if entry.placement == alone:
                    own.add(entry.name)
                else:
                    sizes[entry.name] = sizes.get(entry.name, 0) + entry.size_bytes
    # Names are those of a single process. Each rank has for itself:
    assert own == {"everstep/rng/torch", "model/seen"}
    shared = {name: size for name, size in names.items() if name not in own}
    if job == ("fsdp_tp", 4):  # nothing says that both columns of the mesh keep these equal
        shared |= {name: 2 * size for name, size in shared.items() if "norm." in name}
    assert sizes == shared


def test_only_what_is_needed_is_read_and_into_live_memory(tmp_path: Path, ring: ChunkRing) -> None:
    base = save(tmp_path, "fsdp", 4, SEED, ring)
    with as_rank(1, 4) as info:
        values = build("fsdp", info, OTHER)
        places = {n: p.to_local().data_ptr() for n, p in values["model"].named_parameters()}
        loaded = load(base, State(values, ranks=info), ring)
        after = {n: p.to_local().data_ptr() for n, p in values["model"].named_parameters()}
        mine = sum(t.nbytes for t in locals_of(values).values())
    assert places == after
    assert base.manifest is not None
    assert loaded.size_bytes < mine + 6000  # the states of random generators
    assert loaded.notes == ()


def test_a_new_rank_takes_what_all_had_and_says_what_it_has_not(
    tmp_path: Path, ring: ChunkRing
) -> None:
    def change(values: Values, info: RankInfo) -> None:
        torch.manual_seed(info.rank)
        values["own"]["n"] = 10 + info.rank

    base = save(tmp_path, "ddp", 2, SEED, ring, change=change)
    with as_rank(1, 3) as info:
        torch.manual_seed(77)
        values = build("ddp", info, OTHER)
        assert load(base, State(values, ranks=info), ring).notes == ()
        assert values["own"] == {"n": 11}
        assert torch.initial_seed() == 1
    with as_rank(2, 3) as info:
        torch.manual_seed(77)
        values = build("ddp", info, OTHER)
        before = torch.get_rng_state()
        loaded = load(base, State(values, ranks=info), ring)
        assert values["own"] == {"n": OTHER}
        assert values["scheduler"].base_lrs == [SEED]
        assert torch.equal(torch.get_rng_state(), before)
    assert [note.partition(":")[0] for note in loaded.notes] == ["own", "everstep/rng"]
    assert all("rank 2 is new" in note for note in loaded.notes)


def test_of_one_rank_a_new_one_takes_no_random_generator(tmp_path: Path, ring: ChunkRing) -> None:
    base = save(tmp_path, "one", 1, SEED, ring)
    with as_rank(1, 2) as info:
        loaded = load(base, State(build("ddp", info, OTHER), ranks=info), ring)
    assert [note.partition(":")[0] for note in loaded.notes] == ["everstep/rng"]


def test_what_ranks_that_are_gone_had_alone_is_reported(tmp_path: Path, ring: ChunkRing) -> None:
    def change(values: Values, info: RankInfo) -> None:
        torch.manual_seed(5)
        values["own"]["n"] = 10 + info.rank

    base = save(tmp_path, "ddp", 3, SEED, ring, change=change)
    with as_rank(0, 2) as info:
        values = build("ddp", info, OTHER)
        loaded = load(base, State(values, ranks=info), ring)
    assert values["own"] == {"n": 10}
    (note,) = loaded.notes
    assert note.startswith("own: per-rank state of rank(s) 2")


@pytest.mark.parametrize("job", [("ddp", 2), ("fsdp", 2)], ids=str)
def test_a_missing_rank_is_named_before_anything_is_touched(
    job: Job, tmp_path: Path, ring: ChunkRing
) -> None:
    base = save(tmp_path, *job, SEED, ring)
    touched: list[bool] = []
    with as_rank(0, 1) as info:
        state = State(build("one", info, OTHER), ranks=info)
        with pytest.raises((DamageError, FormatError), match=r"rank\(s\) 1 are not here"):
            load(base, state, ring, ranks=[0], on_touch=lambda: touched.append(True))
        with pytest.raises(RecoveryError, match=r"rank\(s\) 0 are needed"):
            load(base, state, ring, ranks=[1])
    assert not touched


def test_a_hole_is_listed_by_verify(
    tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = "everstep.state.ranks.writers.WriterAssignment.mine"

    def forgetful(self: Any) -> Any:
        return {n: e for n, e in original(self).items() if n != "model/up.weight"}

    from everstep.state.ranks.writers import WriterAssignment

    original = WriterAssignment.mine
    markers = []
    for rank in range(2):
        with as_rank(rank, 2) as info, monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(mine, forgetful)
            markers.append(write(tmp_path, State(build("fsdp", info, SEED), ranks=info), ring))
    base = found(tmp_path, markers)
    with open_all(base) as ranks, pytest.raises(DamageError, match=r"model/up.weight: 20 of 40"):
        check_contents(ranks)
    with as_rank(0, 1) as info:
        state = State(build("one", info, OTHER), ranks=info)
        with pytest.raises(DamageError, match=r"model/up\.weight"):
            load(base, state, ring)
    with as_rank(0, 2) as info:  # has a part that is there
        load(base, State(build("fsdp", info, OTHER), ranks=info), ring)


def test_a_flipped_bit_of_another_rank_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    base = save(tmp_path, "fsdp", 2, SEED, ring)
    with open_all(base) as ranks:
        _, _, header, path = ranks[1].shards[0]
        place = next(p for p in header.placed if p.entry.name == "model/down.weight")
        flip(Path(path), header.room_bytes + place.begin)
    with as_rank(0, 1) as info, pytest.raises(DamageError, match=r"rank-00001.*model/down.weight"):
        load(base, State(build("one", info, OTHER), ranks=info), ring)
    with as_rank(0, 2) as info:  # needs nothing of it
        load(base, State(build("fsdp", info, OTHER), ranks=info), ring)


def test_another_model_is_refused(tmp_path: Path, ring: ChunkRing) -> None:
    base = save(tmp_path, "fsdp", 2, SEED, ring)
    with as_rank(0, 1) as info:
        values = build("one", info, OTHER)
        values["model"].up = torch.nn.Linear(5, 9)
        with pytest.raises(MismatchError, match=r"model/up.weight: saved F32 \[8, 5\]"):
            load(base, State(values, ranks=info), ring)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("layout", ["ddp", "zero", "fsdp"])
def test_each_disk_has_what_its_ranks_need(layout: str, tmp_path: Path, ring: ChunkRing) -> None:
    base = save(tmp_path, layout, 4, SEED, ring, near=lambda r: (0, 1) if r < 2 else (2, 3))
    with open_all(base) as ranks:
        check_contents(ranks)
    for rank, near in ((0, [0, 1]), (3, [2, 3])):
        with as_rank(rank, 4) as info:
            values, want = build(layout, info, OTHER), locals_of(build(layout, info, SEED))
            load(base, State(values, ranks=info), ring, ranks=near)
            got = locals_of(values)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_who_needs_whose_files(tmp_path: Path, ring: ChunkRing) -> None:
    base = save(tmp_path, "fsdp", 2, SEED, ring)
    assert base.manifest is not None
    with as_rank(1, 2) as info:
        own = needs_of(State({"own": {"n": 1}, "model": torch.nn.Linear(2, 2)}, ranks=info))
        assert list(own(1, base.manifest)) == [1]
        shared = needs_of(State(build("ddp", info, SEED), ranks=info))
        assert list(shared(1, base.manifest)) == [0, 1]
    with as_rank(1, 3) as info:
        own = needs_of(State({"own": {"n": 1}}, ranks=info))
        assert list(own(1, base.manifest)) == [0, 1]


def test_ranks_that_share_nothing_know_that_others_do(tmp_path: Path, ring: ChunkRing) -> None:
    """All of them decide from it, and come to the same: what one needs only it can say."""
    base = save(tmp_path, "fsdp", 2, SEED, ring)
    assert base.manifest is not None
    found = []
    for rank, layout in enumerate(("one", "ddp")):
        with as_rank(rank, 2) as info:
            values = {"own": {"n": 1}} if layout == "one" else build(layout, info, SEED)
            needs = needs_of(State(values, ranks=info), [False, True])
            found.append([list(needs(other, base.manifest)) for other in range(2)])
    assert found == [[[0], [0, 1]]] * 2


def test_one_process_resumes_from_several_ranks(tmp_path: Path, ring: ChunkRing) -> None:
    save(tmp_path, "fsdp_tp", 4, SEED, ring)
    with as_rank(0, 1) as info:
        values, want = build("one", info, OTHER), locals_of(build("one", info, SEED))
    with opened(tmp_path, values) as ckpt:
        recovery = ckpt.resume()
        assert recovery.step == 7
        ckpt.save().durable.result(30)
    got = locals_of(values)
    assert all(torch.equal(got[name], want[name]) for name in want)


def command(*words: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words)
    return result.exit_code, result.output


def test_commands_on_a_base_of_several_ranks(tmp_path: Path, ring: ChunkRing) -> None:
    run = tmp_path / "run"
    base = save(run, "fsdp", 2, SEED, ring)

    assert command("verify", str(run))[0] == 0
    status, text = command("inspect", str(run))
    assert status == 0
    assert "rank-00001" in text
    assert "shard(0)@2:0-1" in text
    assert command("ls", str(run))[0] == 0
    status, text = command("restore", str(run), "--step", "7", "--out", str(tmp_path / "out"))
    assert status == 0
    assert "own: that of rank 0" not in text, "both ranks have the same"
    assert command("verify", str(tmp_path / "out"))[0] == 0
    with open_all(base) as ranks:
        _, _, header, path = ranks[1].shards[0]
        flip(Path(path), header.room_bytes)
    status, text = command("verify", str(run))
    assert status == 1
    assert "rank-00001" in text


def test_a_state_spread_over_more_ranks_than_told_is_refused() -> None:
    with as_rank(0, 2) as info:
        values = build("fsdp", info, SEED)
        with pytest.raises(UnsupportedStateError, match=r"distributed over 2 ranks.*given 1"):
            State(values)


def test_wrappers_that_cannot_be_saved_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with as_rank(0, 2) as info:
        wrapped = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
        with pytest.raises(
            UnsupportedStateError, match=r"use torch\.distributed\.fsdp\.fully_shard"
        ):
            State({"model": wrapped}, ranks=info)
        model = torch.nn.Linear(4, 4)
        zero: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        zero._overlap_with_ddp = True
        with pytest.raises(UnsupportedStateError, match="overlap_with_ddp"):
            State({"model": model, "optimizer": zero}, ranks=info)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("job", [("ddp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp_tp", 4), ("zero", 2)])
def test_where_all_leave_out_the_same_each_rank_says_the_same(job: tuple[str, int]) -> None:
    """In all layouts, also where a part of a tensor is empty."""
    layout, world = job
    said, optimizers = {}, {}
    for rank in range(world):
        with as_rank(rank, world) as info:
            state = State(build(layout, info, 1, stepped=False), ranks=info)
            plans = {key: RestorePlan.without([(key, "no")]) for key in state.providers}
            said[rank] = state.left_out(plans, {})
            plans["model"] = RestorePlan(dict.fromkeys(state.values["model"].state_dict()))
            plans["model"].tree |= {k.removeprefix("module."): 0 for k in plans["model"].tree}
            optimizers[rank] = state.left_out(plans, {})
    assert {one.section for one in said[0]} == {"model", "optimizer"}
    assert sum(one.count for one in said[0]) == 12
    assert {one.section for one in optimizers[0]} == {"optimizer"}
    assert describe_mismatch(said) == describe_mismatch(optimizers) == ""
    assert "'model'" in describe_mismatch({**said, 0: optimizers[0]})
