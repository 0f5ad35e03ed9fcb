"""The log of ranks that train alike, where the keepers of some have made their parts lossy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.compress.lossy import lossy_copies
from everstep.format.log import LogRecord, RecordHead, plan_segment, record_digest
from everstep.keeper.log import segment_queue
from everstep.keeper.ship.log_copies import lossy_record
from everstep.replay.engine import ReplayOptions
from everstep.replay.updates import Packed, dense
from everstep.restore.redo.live import make_replayer
from everstep.restore.redo.updates import update_from_record
from everstep.state.layout.entries import PART_OBJECT
from everstep.state.ranks.log_shares import log_shares
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.state.values.objects import encode
from everstep.state.values.tensors import byte_view, local_tensor
from everstep.trainer.log.update_inputs import InputReader, RankInputReader
from tests.support.ranks import replicas as parts
from tests.support.ranks.logs import die
from tests.support.ranks.replicas import layers, records_of, replicas, resume, trained, until
from tests.support.ranks.sharding import as_rank, build

alike = parts.alike  # which every test here takes, too
two = parts.two


def waves(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    """Gradients that no eight bits hold; otherwise as :func:`take`."""
    for number, parameter in enumerate(model.parameters()):
        wave = torch.arange(float(parameter.numel())).add(at + number).cos()
        parameter.grad = wave.reshape(parameter.shape)
    optimizer.step()


def lossy_ones(rank: int, model: nn.Module) -> list[str]:
    """Of which parameters a rank has the gradients."""
    state = State(
        {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, ranks=RankInfo(0, 2)
    )
    return [n for n, part in log_shares(state)["optimizer"].items() if part.owner == rank]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}], ids=["rank 0", "rank 1", "both"])
def test_lossy_parts_of_some_ranks_take_all_to_the_same_approximation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: set[int]
) -> None:
    """Never called exact: not by those either whose own parts are whole."""

    def plan(identity: Any, records: list[LogRecord], **options: Any) -> Any:
        lossy = identity.rank in ranks
        records = [lossy_record(r, 0.1) if lossy else r for r in records]
        return plan_segment(identity, records, **options)

    monkeypatch.setattr(segment_queue, "plan_segment", plan)
    monkeypatch.setattr(parts, "take", waves)
    until((tmp_path / "run",) * 2, 6)
    model = layers((0, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    named = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    changed = {name for rank in ranks for name in lossy_ones(rank, model)}

    def spoil(*_: Any) -> None:
        there = {number: p.grad for number, p in enumerate(own) if p.grad is not None}
        for number, copy in lossy_copies(there, 0.1).items():
            own[number].grad = copy.form.dense().view(own[number].shape)

    own = [parameter for name, parameter in named.items() if name in changed]
    for at in range(6):
        if at == 4:  # where the last base is
            optimizer.register_step_pre_hook(spoil)
        waves(model, optimizer, at)
    with replicas(*(tmp_path / "run",) * 2) as found:
        for recovery, one in zip(resume(found), found, strict=True):
            assert (recovery.step, recovery.replayed, recovery.exact) == (6, 2, False)
            assert any("lossy copies" in str(line) for line in (recovery.evidence, *recovery.notes))
            assert all(map(torch.equal, one.weights, model.parameters()))
            assert not all(map(torch.equal, one.weights, trained(6)))
        die(found)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}], ids=["rank 0", "rank 1", "both"])
def test_an_update_of_lossy_parts_says_so(two: list[list[LogRecord]], ranks: set[int]) -> None:
    parts = [lossy_record(two[r][1], 0.1) if r in ranks else two[r][1] for r in range(2)]
    updates = [update_from_record(replace(parts[r], parts={1 - r: parts[1 - r]})) for r in range(2)]
    assert [update.lossy for update in updates] == [True, True]
    whole = update_from_record(replace(two[0][1], parts={1: two[1][1]}))
    changed = {name for rank in ranks for name in lossy_ones(rank, layers((0, 1)))}
    for update in updates:
        assert update.gradients.keys() == whole.gradients.keys()
        for name, gradient in update.gradients.items():
            assert isinstance(gradient, Packed) == (name in changed)
            torch.testing.assert_close(dense(gradient), dense(whole.gradients[name]))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("lossy", range(3))
def test_one_lossy_part_of_three_is_enough(tmp_path: Path, lossy: int) -> None:
    until((tmp_path / "run",) * 3, 3)
    parts = {rank: records_of(tmp_path / "run", 3, rank)[0] for rank in range(3)}
    parts[lossy] = lossy_record(parts[lossy], 0.1)
    for rank, own in parts.items():
        others = {other: part for other, part in parts.items() if other != rank}
        assert update_from_record(replace(own, parts=others)).lossy


def test_a_lossy_part_is_what_training_would_have_recorded() -> None:
    model = layers((0, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    state = State({"model": model, "optimizer": optimizer}, ranks=RankInfo(1, 2))
    waves(model, optimizer, 0)
    mine, wanted = lossy_record(recorded(state), 0.1), recorded(state, 0.1)
    assert (mine.objects, mine.layout) == (wanted.objects, wanted.layout)
    assert mine.data == wanted.data
    assert PART_OBJECT in mine.objects


def recorded(state: State, ratio: float | None = None) -> LogRecord:
    """What this rank records of the update that is next."""
    consumption = InputReader(state, lossy_ratio=ratio)
    consumed, name, about = RankInputReader(state).look(consumption, "optimizer")
    data = memoryview(bytearray(consumed.layout.size_bytes))
    for place in consumed.layout.placed:
        data[place.begin : place.end] = bytes(byte_view(consumed.tensors[place.entry.name]))
    objects = {name: encode(about)}
    head = RecordHead("update", 1, 1, 1, "shape")
    return LogRecord(head, consumed.layout, objects, data, record_digest(data, objects))


def test_sharded_parameters_are_replayed_by_lossy_gradients_of_this_ranks_shards() -> None:
    with as_rank(0, 2) as info:
        values = build("fsdp", info, 1)
        optimizer = values["optimizer"]
        parameters = {f"model.{name}": p for name, p in values["model"].named_parameters()}
        for parameter in parameters.values():
            parameter.grad = parameter.detach().sin()
        update = update_from_record(lossy_record(recorded(State(values, ranks=info)), 0.1))
        assert update.lossy
        assert any(isinstance(gradient, Packed) for gradient in update.gradients.values())
        shards = {name: local_tensor(p.detach()).clone() for name, p in parameters.items()}
        by_torch = torch.optim.AdamW(shards.values(), lr=0.1)
        for name, shard in shards.items():
            kept = optimizer.state[parameters[name]].items()
            by_torch.state[shard] = {key: local_tensor(value).clone() for key, value in kept}
            shard.grad = dense(update.gradients[name])
        by_torch.step()
        names = {id(parameter): name for name, parameter in parameters.items()}
        replayer = make_replayer(
            optimizer, names, options=ReplayOptions(1, torch.get_num_threads())
        )
        replayer.apply([update])
        assert not replayer.exact.exact
        for name, shard in shards.items():
            assert torch.equal(local_tensor(parameters[name].detach()), shard)
