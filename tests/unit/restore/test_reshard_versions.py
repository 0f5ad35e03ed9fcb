"""Ranks that have different parameters of one name: restored where a rank is sure to mean what it
had, refused where that may be another stage's of the same shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from everstep.errors import MismatchError, RecoveryError
from everstep.format.writer import ChunkRing
from everstep.run.scan import BaseFound
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.state.values.tensors import local_tensor
from tests.support.ranks import sharding
from tests.support.ranks.sharding import (
    LAYOUTS,
    Values,
    as_rank,
    found,
    load,
    locals_of,
    plain,
    write,
)

SEED, OTHER = 3, 9
Groups = Sequence[tuple[int, ...]]
BY_STAGE: Groups = ((0, 1), (2, 3))
BY_COLUMN: Groups = ((0, 2), (1, 3))


@pytest.fixture(scope="module")
def ring() -> Iterator[ChunkRing]:
    made = ChunkRing(4, 2)
    yield made
    made.close()


def stage(rank: int, groups: Groups, wrap: str, seed: int = OTHER) -> Values:
    """What a rank has of a pipeline whose stages are alike, each on a group of ranks."""
    made = [distributed.new_group(list(group)) for group in groups]
    number = next(number for number, group in enumerate(groups) if rank in group)
    model: Any = plain(seed + number)
    if wrap == "ddp":
        group = made[number]
        model = nn.parallel.DistributedDataParallel(model, process_group=group, init_sync=False)
    elif wrap == "fsdp":
        sides = len(groups), len(groups[0])
        mesh = init_device_mesh("cpu", sides, mesh_dim_names=("stages", "shards"))
        model = fully_shard(model, mesh=mesh["shards"])
    elif wrap == "frozen":
        model.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 if parameter.requires_grad else None
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def saved(run: Path, groups: Groups, wrap: str, ring: ChunkRing) -> BaseFound:
    """A base of a pipeline."""
    markers, world = [], sum(map(len, groups))
    for rank in range(world):
        with as_rank(rank, world) as info:
            state = State(stage(rank, groups, wrap, SEED), ranks=info)
            markers.append(write(run, state, ring))
    return found(run, markers)


def refused(base: BaseFound, rank: int, groups: Groups, wrap: str, ring: ChunkRing) -> str:
    """Why a rank of another pipeline is not restored; it is left as it was."""
    with as_rank(rank, sum(map(len, groups))) as info:
        values, touched = stage(rank, groups, wrap), list[bool]()
        before = locals_of(values)
        with pytest.raises(MismatchError) as error:
            load(base, State(values, ranks=info), ring, on_touch=lambda: touched.append(True))
        after = locals_of(values)
    assert not touched
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return str(error.value)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp", "frozen"])
def test_as_many_ranks_in_the_same_groups_take_what_they_had(
    wrap: str, tmp_path: Path, ring: ChunkRing
) -> None:
    base = saved(tmp_path, BY_STAGE, wrap, ring)
    for rank in range(4):
        with as_rank(rank, 4) as info:
            values = stage(rank, BY_STAGE, wrap)
            want = locals_of(stage(rank, BY_STAGE, wrap, SEED))
            assert load(base, State(values, ranks=info), ring).mismatches == ()
            got = locals_of(values)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_stages_on_other_ranks_are_refused(tmp_path: Path, ring: ChunkRing) -> None:
    """The mesh is (data, stages) now, and was (stages, data)."""
    base = saved(tmp_path, BY_STAGE, "ddp", ring)
    for rank in range(4):
        why = refused(base, rank, BY_COLUMN, "ddp", ring)
        assert "model/up.weight: rank(s)" in why
        assert "optimizer/state/model.up.weight/exp_avg: rank(s)" in why


@pytest.mark.thinned(3)
@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1, 2), (3, 4, 5))], ids=["fewer", "more"])
@pytest.mark.parametrize("wrap", ["plain", "ddp", "frozen"])
def test_stages_on_another_number_of_ranks_are_refused(
    wrap: str, groups: Groups, tmp_path: Path, ring: ChunkRing
) -> None:
    base = saved(tmp_path, BY_STAGE, wrap, ring)
    for rank in (0, sum(map(len, groups)) - 1):
        why = refused(base, rank, groups, "plain" if len(groups[0]) == 1 else wrap, ring)
        assert "model/up.weight: rank(s)" in why
        assert "seen" not in why, "buffers are each rank's own"


def test_ranks_that_become_one_group_are_refused(tmp_path: Path, ring: ChunkRing) -> None:
    """Each would take its part of another stage."""
    base = saved(tmp_path, ((0,), (1,)), "plain", ring)
    for rank in range(2):
        assert "may mean either" in refused(base, rank, ((0, 1),), "fsdp", ring)


def test_what_other_disks_have_may_be_another_stage(tmp_path: Path, ring: ChunkRing) -> None:
    base = saved(tmp_path, BY_STAGE, "ddp", ring)
    with as_rank(1, 4) as info:
        values = stage(1, BY_COLUMN, "ddp")
        with pytest.raises(RecoveryError, match=r"the files of rank\(s\) 2-3 are needed"):
            load(base, State(values, ranks=info), ring, ranks=[0, 1])


def test_who_says_so_takes_what_its_number_had(tmp_path: Path, ring: ChunkRing) -> None:
    base = saved(tmp_path, ((0,), (1,)), "plain", ring)
    with as_rank(3, 4) as info:
        values = stage(3, ((0, 2), (1, 3)), "plain")
        want = locals_of(stage(1, ((0,), (1,)), "plain", SEED))
        loaded = load(base, State(values, ranks=info), ring, strict=False)
        got = locals_of(values)
    assert "model/up.weight" in dict(loaded.mismatches)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_copies_that_are_equal_are_one(tmp_path: Path, ring: ChunkRing) -> None:
    """Ranks without a wrapper whose parameters are the same go on in any number."""
    markers = []
    for rank in range(2):
        with as_rank(rank, 2) as info:
            markers.append(
                write(tmp_path, State(sharding.build("one", info, SEED), ranks=info), ring)
            )
    base = found(tmp_path, markers)
    for rank, world in ((0, 1), (2, 3)):
        with as_rank(rank, world) as info:
            values = sharding.build("one", info, OTHER)
            want = locals_of(sharding.build("one", info, SEED))
            assert load(base, State(values, ranks=RankInfo(rank, world)), ring).mismatches == ()
            got = locals_of(values)
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam])
def test_a_rank_on_its_own_disk_takes_what_goes_with_its_part(
    kind: Any, tmp_path: Path, ring: ChunkRing
) -> None:
    """Beside the moments of its part of a parameter, an optimizer has numbers that each rank
    writes: they are of that part, and no other rank's files are needed to know it."""

    def built(info: RankInfo, seed: int) -> Values:
        model = LAYOUTS["fsdp"](plain(seed), info.world)
        optimizer = kind(model.parameters(), lr=0.1 * seed)
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    markers = []
    for rank in range(2):
        with as_rank(rank, 2) as info:
            state = State(built(info, SEED), ranks=RankInfo(rank, 2, (rank,)))
            markers.append(write(tmp_path, state, ring))
    base = found(tmp_path, markers)
    for rank in range(2):
        with as_rank(rank, 2) as info:
            values, want = built(info, OTHER), locals_of(built(info, SEED))
            load(base, State(values, ranks=RankInfo(rank, 2, (rank,))), ring, ranks=[rank])
            got = locals_of(values)
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


class Local(torch.optim.Optimizer):
    """Keeps what is a rank's own: as those that send a part of the momentum only."""

    def __init__(self, parameters: Any, own: float) -> None:
        super().__init__(parameters, {"own": own})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            local = local_tensor(parameter)
            self.state[parameter] = {
                "momentum": torch.full(tuple(local.shape), self.param_groups[0]["own"]),
                "norm": torch.tensor(self.param_groups[0]["own"]),
                "step": torch.tensor(1.0),
            }


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_what_an_optimizer_keeps_for_each_rank_comes_back_to_it(
    layout: str, tmp_path: Path, ring: ChunkRing
) -> None:
    def built(info: RankInfo, own: float) -> Values:
        model = LAYOUTS[layout](plain(SEED), info.world)
        optimizer = Local(model.parameters(), own)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    markers = []
    for rank in range(2):
        with as_rank(rank, 2) as info:
            markers.append(write(tmp_path, State(built(info, rank + 1.0), ranks=info), ring))
    base = found(tmp_path, markers)
    for rank in range(2):
        with as_rank(rank, 2) as info:
            values = built(info, 9.0)
            load(base, State(values, ranks=info), ring)
            for state in values["optimizer"].state.values():
                assert bool((state["momentum"] == rank + 1.0).all())
                assert state["norm"] == rank + 1.0
