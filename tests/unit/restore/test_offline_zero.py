"""The log of a ZeroRedundancyOptimizer without the program that trained it: what each rank has
recorded and updated for all comes together bit for bit, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from everstep.errors import FormatError, ReplayError, UnsupportedStateError
from everstep.format.log import record_digest
from everstep.format.writer import ChunkRing
from everstep.restore.load.load import Reads
from everstep.restore.offline.job_state import JobState, rank_entry_name
from everstep.restore.offline.load import load_job
from everstep.restore.offline.memory import OfflineState
from everstep.run.scan import BaseFound, scan_base
from everstep.seams import PosixFileSystem
from everstep.state.layout.entries import OBJECT_PREFIX
from everstep.state.providers.optimizers import PARTITIONED
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.state.values.objects import decode, encode
from tests.support.ranks.relogged import Logs, logged, train
from tests.support.ranks.sharding import (
    STEP,
    TIMEOUT_S,
    Values,
    as_rank,
    build,
    found,
    locals_of,
    open_all,
    write,
)

STEPS, LR = 3, 0.1
FS = PosixFileSystem()
OPTIMIZER = f"{OBJECT_PREFIX}optimizer"


class Synced(ZeroRedundancyOptimizer):
    """Ranks are on their own here: what others would send, each of them computes."""

    def _sync_params(self) -> None:
        mine = {id(p) for group in self.optim.param_groups for p in group["params"]}
        if "others" not in vars(self):
            every = [p for group in self.param_groups for p in group["params"]]
            self.others = sgd([p for p in every if id(p) not in mine])
        self.others.step()


class Apart(ZeroRedundancyOptimizer):
    def _sync_params(self) -> None:
        """Nobody has sent anything."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def synced(parameters: Any) -> Synced:
    return Synced(parameters, torch.optim.SGD, lr=LR, momentum=0.9)


@pytest.fixture(scope="module")
def ring() -> Iterator[ChunkRing]:
    made = ChunkRing(4, 2)
    yield made
    made.close()


def loaded(base: BaseFound, ring: ChunkRing) -> JobState:
    """A base in memory, by its files alone."""
    there = replace(scan_base(FS, base.path.parents[2], base.id), manifest=base.manifest)
    return load_job(FS, there, Reads(ring, TIMEOUT_S))


def replayed(base: BaseFound, logs: Logs, ring: ChunkRing) -> JobState:
    """The same behind the log."""
    state = loaded(base, ring)
    world = 1 + max(rank for rank, _ in logs)
    for step in range(STEP + 1, STEP + 1 + STEPS):
        records = {rank: (logs[rank, step][:-1], logs[rank, step][-1]) for rank in range(world)}
        state.take(records)
    state.finish()
    assert state.exactness.exact, state.exactness.why
    state.compare()
    return state


def whole(state: JobState) -> OfflineState:
    return state.whole()[0]


def tensors_of(state: OfflineState) -> dict[str, torch.Tensor]:
    """By the names that :func:`locals_of` gives."""
    return {
        name.replace("optimizer/state/model.", "optimizer/"): tensor
        for name, tensor in state.tensors.items()
        if name.startswith(("model/", "optimizer/state/"))
    }


def trained_alone(steps: int) -> dict[str, torch.Tensor]:
    """What one process has that trains on the same gradients."""
    with as_rank(0, 1) as info:
        values = build("one", info, 3)
        for step in range(STEP + 1, STEP + 1 + steps):
            train(values, step)
            values["optimizer"].step()
        return locals_of(values)


def differing(mine: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    assert mine.keys() == wanted.keys()
    return [name for name, tensor in wanted.items() if not mine[name].equal(tensor)]


@pytest.mark.parametrize("world", [2, 3])
def test_what_all_ranks_have_updated_comes_together(
    world: int, tmp_path: Path, ring: ChunkRing
) -> None:
    base, logs = logged(tmp_path, "zero", world, ring, STEPS)
    state = whole(replayed(base, logs, ring))
    assert (state.step, state.lsn) == (STEP + STEPS, STEP + STEPS)
    wanted = trained_alone(STEPS)
    assert differing(tensors_of(state), wanted) == []
    tree: Any = decode(state.objects[OPTIMIZER])
    assert PARTITIONED not in tree
    names = {name for name in wanted if name.startswith("model/") and "seen" not in name}
    assert {f"model/{name.removeprefix('model.')}" for name in tree["state"]} == names


@pytest.mark.parametrize("layout", ["ddp", "one"])
def test_it_is_the_base_that_each_rank_writes(layout: str, tmp_path: Path, ring: ChunkRing) -> None:
    """Digest for digest: each rank's part of the objects, and its own copies of parameters that are
    in no DDP."""
    markers = []

    def write_base(values: Values, info: RankInfo) -> None:
        if values["own"]["n"] == STEP + STEPS:
            markers.append(write(tmp_path / "then", State(values, ranks=info), ring, STEP + STEPS))

    about: dict[str, Any] = {"optimizer": synced, "change": write_base}
    base, logs = logged(tmp_path / "run", layout, 2, ring, STEPS, **about)
    wanted: dict[str, str] = {}
    with open_all(found(tmp_path / "then", markers, STEP + STEPS)) as ranks:
        for rank, one in enumerate(ranks):
            for _, _, header, _ in one.shards:
                for place, digest in zip(header.placed, header.digests, strict=True):
                    wanted[rank_entry_name(place.entry.name, rank)] = digest
    assert wanted[f"{OPTIMIZER} of rank 0"] != wanted[f"{OPTIMIZER} of rank 1"]
    state = replayed(base, logs, ring)
    assert state.digests() == wanted
    assert {n.rpartition(" of ")[0] for n in state.replayed} >= {"model/up.weight"}
    left_out = state.whole()[1]
    assert not any(note.startswith("optimizer") for note in left_out), left_out


def test_a_part_that_is_missing_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    """Not taken for a parameter without a gradient."""
    base, logs = logged(tmp_path, "zero", 3, ring, STEPS)
    update, mark = logs[2, STEP + 2]
    logs[2, STEP + 2] = [replace(logs[1, STEP + 2][0], head=update.head), mark]
    with pytest.raises(FormatError, match="missing"):
        replayed(base, logs, ring)


def test_hyperparameters_of_each_ranks_own_are_refused(tmp_path: Path, ring: ChunkRing) -> None:
    """One rank computes for all: by the hyperparameters of one."""

    def change(values: Values, info: RankInfo) -> None:
        if info.rank == 1:
            values["optimizer"].param_groups[0]["lr"] = 0.2

    base, logs = logged(tmp_path, "zero", 2, ring, STEPS, change=change)
    with pytest.raises(UnsupportedStateError, match=r"rank 1 has updated .* hyperparameters") as e:
        replayed(base, logs, ring)
    assert e.value.step == STEP + 2
    assert "resume(step=...)" in str(e.value.hint)


def test_copies_that_ranks_had_apart_are_refused(tmp_path: Path, ring: ChunkRing) -> None:
    """Before its first update a rank may have any copy of what another one updates for it."""
    about: dict[str, Any] = {"optimizer": lambda p: Apart(p, torch.optim.SGD, lr=LR)}
    base, logs = logged(tmp_path, "one", 2, ring, STEPS, **about)
    with pytest.raises(UnsupportedStateError, match="different copies of 'model"):
        replayed(base, logs, ring)


def edited(logs: Logs, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Another mark of the last step, whose digest vouches for it."""
    update, mark = logs[rank, STEP + STEPS]
    tree: Any = decode(mark.objects[OPTIMIZER])
    change(tree)
    objects = {**mark.objects, OPTIMIZER: encode(tree, "optimizer")}
    digest = record_digest(mark.data, objects)
    logs[rank, STEP + STEPS] = [update, replace(mark, objects=objects, digest=digest)]


def test_state_of_one_parameter_in_two_marks_is_refused(tmp_path: Path, ring: ChunkRing) -> None:
    base, logs = logged(tmp_path, "zero", 2, ring, STEPS)
    theirs: Any = decode(logs[0, STEP + STEPS][-1].objects[OPTIMIZER])["state"]
    edited(logs, 1, lambda tree: tree["state"].update(theirs))
    with pytest.raises(FormatError, match="two ranks have the state of"):
        replayed(base, logs, ring)


def test_state_in_no_mark_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    base, logs = logged(tmp_path, "zero", 2, ring, STEPS)
    edited(logs, 1, lambda tree: tree["state"].popitem())
    with pytest.raises(ReplayError, match="replay gives state of"):
        replayed(base, logs, ring)
