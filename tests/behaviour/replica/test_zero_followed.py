"""A ZeroRedundancyOptimizer whose keepers follow what their ranks write: they are what these ranks
update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from everstep.errors import FormatError, UnsupportedStateError
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.format.records import TimelineRecord
from everstep.keeper.log.log_store import LoggedStep
from everstep.keeper.replica.replica_state import ReplicaState
from everstep.link.capture import shard_offsets
from everstep.seams.fingerprint import fingerprint
from everstep.state.layout.entries import UPDATE_OBJECT
from everstep.state.ranks.log_shares import log_shares, updated_elsewhere
from everstep.state.training_state import State
from everstep.state.values.tensors import host_bytes
from everstep.trainer.checks.keeper_replay import require_replayable, require_replicable
from everstep.trainer.log.update_inputs import InputReader, UpdateInputs
from everstep.trainer.multistep.plan import capturable_units
from tests.support.ranks.relogged import Looks, records_of, train
from tests.support.ranks.sharding import STEP, Values, as_rank, build

STEPS = 3
Near = tuple[int, ...] | None


def image_of(state: State) -> tuple[BasePlan, bytearray, dict[str, bytes]]:
    """This rank's part of a base, as it lies in a keeper's memory."""
    survey, info = state.survey(), state.ranks
    shape = survey.shape
    identity = ShardIdentity("run", 1, STEP, STEP, info.rank, info.world, True)
    files = plan_files(identity, shape.entries, shape.aliases, shape.objects_bytes)
    plan = BasePlan(identity, files)
    offsets, size_bytes = shard_offsets(plan)
    memory = bytearray(size_bytes)
    for file, offset in zip(files, offsets, strict=True):
        for place in file.layout.placed:
            data = host_bytes(survey.tensors[place.entry.name].detach().contiguous())
            memory[offset + place.begin : offset + place.end] = data
    return plan, memory, dict(survey.objects())


def steps_of(values: Values, state: State, part: Looks | None = None) -> list[LoggedStep]:
    """What this rank logs."""
    return [
        LoggedStep((update,), mark, step)
        for step, (update, mark) in records_of(values, state, STEPS, part=part)
    ]


class Captured:
    """As a base over several steps copies what an update consumes."""

    def __init__(self, state: State) -> None:
        units = capturable_units(state, state.survey().shape)
        self._names = frozenset(unit.parameter for unit in units if unit.optimizer)

    def look(
        self, consumption: InputReader, key: str
    ) -> tuple[UpdateInputs, str, Mapping[str, Any]]:
        """Gradients of what was captured before."""
        consumed = consumption.look(key, self._names)
        return consumed, UPDATE_OBJECT, consumed.about


@pytest.mark.thinned(3)
@pytest.mark.parametrize("world", [2, 5, 7])
def test_each_keepers_replica_is_what_its_rank_has(world: int) -> None:
    """Of seven ranks one has no parameter at all."""
    names, idle = list[str](), 0
    for rank in range(world):
        with as_rank(rank, world) as info:
            values = build("zero", info, 3)
            state = State(values, ranks=replace(info, followed=True))
            require_replicable(state)
            plan, memory, objects = image_of(state)
            trained = TimelineRecord("run", 1, None, 0, True, world, fingerprint(), 0.0)
            replica = ReplicaState(plan, memoryview(memory), objects, trained, threads=1)
            for step in steps_of(values, state):
                replica.advance([step])
            identity, objects = replica.settle()
            assert (identity.step, identity.exact, replica.why) == (STEP + STEPS, True, "")
            _, wanted, wanted_objects = image_of(state)
            assert memory == wanted
            assert objects == wanted_objects
            mine = [n for n in state.survey().tensors if n.startswith("model/") and "seen" not in n]
            names += mine
            idle += not mine
    assert sorted(names) == sorted(set(names))
    assert len(names) == 6
    assert idle == (world == 7)


def test_a_record_of_another_rank_is_noticed() -> None:
    def logged(rank: int) -> tuple[LoggedStep, ReplicaState]:
        with as_rank(rank, 2) as info:
            values = build("zero", info, 3)
            state = State(values, ranks=replace(info, followed=True))
            plan, memory, objects = image_of(state)
            replica = ReplicaState(plan, memoryview(memory), objects, None, threads=1)
            return steps_of(values, state)[0], replica

    (step, replica), (other, _) = logged(0), logged(1)
    with pytest.raises(FormatError, match="is in another rank's log"):
        replica.advance([replace(step, updates=other.updates)])


@pytest.mark.parametrize("near", [None, (0, 1), (0,), (0, 2)])
def test_who_records_a_parameter_writes_it_or_it_is_refused(near: Near) -> None:
    """On disks of their own ranks write what others update, for whom nobody sends them moments."""
    with as_rank(0, 3) as info:
        state = State(build("zero", info, 3), ranks=replace(info, near=near, followed=True))
        parts = log_shares(state)["optimizer"]
        mine = {f"model/{n.removeprefix('model.')}" for n, p in parts.items() if p.owner == 0}
        written = {n for n in state.survey().tensors if n.startswith("model/")} - {"model/seen"}
        if near is None:
            require_replicable(state)
            assert mine == written
            return
        assert mine <= written
        with pytest.raises(UnsupportedStateError, match="separate disks"):
            require_replicable(state)
        require_replayable(state)


def test_what_ddp_does_not_keep_equal_is_refused() -> None:
    """Each rank writes all of it."""
    with as_rank(1, 2) as info:
        model = build("one", info, 3)["model"]
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        state = State({"model": model, "o": optimizer}, ranks=replace(info, followed=True))
        with pytest.raises(UnsupportedStateError, match="no DistributedDataParallel"):
            require_replicable(state)


class Own(torch.optim.AdamW):
    """Whatever it does."""


@pytest.mark.parametrize("refuse", [require_replicable, require_replayable])
def test_what_no_keeper_could_repeat_is_refused(refuse: Callable[[State], None]) -> None:
    """By the class of the optimizer within."""
    with as_rank(1, 2) as info:
        model = build("ddp", info, 3)["model"]
        state = {"model": model, "o": ZeroRedundancyOptimizer(model.parameters(), Own)}
        with pytest.raises(UnsupportedStateError, match="Own"):
            refuse(State(state, ranks=replace(info, followed=True)))


@pytest.mark.parametrize("near", [None, (0,)])
def test_over_several_steps_a_rank_captures_what_it_updates(near: Near) -> None:
    """What others update it takes at the last step: it has no moments of that."""
    with as_rank(0, 3) as info:
        state = State(build("zero", info, 3), ranks=replace(info, near=near, followed=True))
        shape, elsewhere = state.survey().shape, updated_elsewhere(state)
        units = [unit for unit in capturable_units(state, shape) if unit.optimizer]
        provider: Any = state.providers["optimizer"]
        assert {unit.parameter for unit in units} == provider.owned()
        for unit in units:
            assert elsewhere.isdisjoint(unit.entries)
            assert len(unit.entries) == 4, "with its moments, and their count"
        written = {entry.name for entry in shape.entries}
        assert bool(written & elsewhere) == (near is not None)


@pytest.mark.parametrize("near", [None, (0,)])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_a_keeper_brings_what_was_captured_to_the_last_step(kind: str, near: Near) -> None:
    """Adagrad has moments of everything that it updates before its first update."""
    with as_rank(0, 2) as info:
        values = build("zero", info, 3)
        parameters, inner = values["model"].parameters(), getattr(torch.optim, kind)
        values["optimizer"] = ZeroRedundancyOptimizer(parameters, inner, lr=0.1)
        train(values, 0)
        values["optimizer"].step()
        state = State(values, ranks=replace(info, near=near, followed=True))
        plan, memory, objects = image_of(state)
        trained = TimelineRecord("run", 1, None, 0, True, 2, fingerprint(), 0.0)
        replica = ReplicaState(plan, memoryview(memory), objects, trained, threads=1)
        replica.advance(steps_of(values, state, Captured(state)))
        identity, _ = replica.settle()
        assert (identity.step, replica.why) == (STEP + STEPS, "")
        _, wanted, _ = image_of(state)
        assert memory == wanted
