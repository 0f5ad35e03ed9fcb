"""Compressed training of sharded parameters (FSDP2), its residuals and its log: redone bit for bit
by as many ranks, by another number, and in another layout; or refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.compress import Compressor
from everstep.errors import OptionError, StateError
from everstep.format.writer import ChunkRing
from everstep.replay.updates import Packed
from everstep.restore.redo.driver import ReplayDriver, Step
from everstep.restore.redo.live import LiveMemory
from everstep.restore.redo.updates import update_from_record
from everstep.state.layout.placement import Box
from everstep.state.training_state import State
from everstep.state.values.tensors import local_box, local_tensor
from tests.support.ranks.relaid import Job
from tests.support.ranks.relogged import logged, redone, train
from tests.support.ranks.sharding import STEP, Values, as_rank, build, load, tensors_of

STEPS = 3
COMPRESS = {
    "topk": partial(Compressor, ratio=0.2, dense_below=8),
    "int8": partial(Compressor, kind="int8", dense_below=8),
    "no error feedback": partial(Compressor, ratio=0.2, dense_below=8, error_feedback=False),
}
JOBS: list[tuple[Job, Job]] = [
    (("fsdp", 4), ("fsdp", 4)),
    (("fsdp", 4), ("fsdp", 2)),
    (("fsdp", 2), ("fsdp", 3)),
    (("fsdp", 3), ("ddp", 2)),
    (("ddp", 2), ("fsdp", 3)),
    (("fsdp", 2), ("one", 1)),
    (("one", 1), ("fsdp", 2)),
    (("ddp", 2), ("ddp", 3)),
    (("hsdp", 4), ("hsdp", 4)),
    (("hsdp", 4), ("fsdp", 3)),
    (("fsdp", 2), ("hsdp", 4)),
]


@pytest.fixture(scope="module")
def ring() -> Iterator[ChunkRing]:
    made = ChunkRing(4, 2)
    yield made
    made.close()


def tensors_with_residuals(values: Values) -> dict[str, torch.Tensor]:
    """All that training goes on from, residuals in the shape of their parameters."""
    found = tensors_of(values)
    parameters = list(values["model"].parameters())
    for number, residual in values["compressor"].state_dict()["residuals"].items():
        shape = parameters[number].shape
        found[f"residual {number}"] = residual if residual.shape == shape else residual.view(shape)
    return found


def trained(layout: str, world: int, compress: Any) -> dict[str, torch.Tensor]:
    """Whole tensors of a job that nobody disturbed, put together of all ranks' parts."""
    whole: dict[str, torch.Tensor] = {}
    for rank in range(world):
        with as_rank(rank, world) as info:
            values = build(layout, info, 3)
            values["compressor"] = compress(values["optimizer"])
            for step in (0, *range(STEP + 1, STEP + 1 + STEPS)):
                train(values, step)
                values["optimizer"].step()
            for name, tensor in tensors_with_residuals(values).items():
                local, box = local_tensor(tensor).detach(), local_box(tensor)
                made = whole.setdefault(name, torch.full(tensor.shape, torch.nan).to(local.dtype))
                made[box.slices_in(Box((0,) * tensor.dim(), tuple(tensor.shape)))] = local
    return whole


def parts_of(values: Values, whole: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not this rank's parts of ``whole``."""
    found = tensors_with_residuals(values)
    assert found.keys() == whole.keys()
    return [
        name
        for name, tensor in found.items()
        if not torch.equal(
            local_tensor(tensor).detach(),
            whole[name][local_box(tensor).slices_in(Box((0,) * tensor.dim(), tuple(tensor.shape)))],
        )
    ]


@pytest.mark.thinned(18)
@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize(("wrote", "starts"), JOBS, ids=str)
def test_every_part_is_replayed_bit_for_bit(
    wrote: Job, starts: Job, kind: str, tmp_path: Path, ring: ChunkRing
) -> None:
    compress = COMPRESS[kind]
    base, logs = logged(tmp_path, *wrote, ring, STEPS, compress=compress)
    whole = trained(*wrote, compress)
    assert any(name.startswith("residual") for name in whole) == (kind != "no error feedback")
    layout, world = starts
    for rank in range(world):
        with as_rank(rank, world) as info:
            values, restored = redone(base, logs, layout, info, ring, STEPS, compress=compress)
            assert (restored.replayed, restored.inexact, restored.skipped) == (STEPS, "", [])
            assert parts_of(values, whole) == [], rank


def test_as_many_ranks_replay_their_own_logs(tmp_path: Path, ring: ChunkRing) -> None:
    """And take their parts of residuals out of the last marks."""
    compress = COMPRESS["topk"]
    base, logs = logged(tmp_path, "fsdp", 3, ring, STEPS, compress=compress)
    whole = trained("fsdp", 3, compress)
    for rank in range(3):
        with as_rank(rank, 3) as info:
            values = build("fsdp", info, 9)
            values["compressor"] = compress(values["optimizer"])
            state = State(values, ranks=info)
            load(base, state, ring)
            redo = ReplayDriver(LiveMemory(state))
            for step in range(STEP + 1, STEP + 1 + STEPS):
                update, mark = logs[rank, step]
                redo.step(Step.of([update], mark))
            assert redo.finish() == []
            assert parts_of(values, whole) == [], rank


def test_parts_are_logged_in_compact_form(tmp_path: Path, ring: ChunkRing) -> None:
    _, logs = logged(tmp_path, "fsdp", 2, ring, 1, compress=COMPRESS["topk"])
    for rank in range(2):
        gradients = update_from_record(logs[rank, STEP + 1][0]).gradients
        assert isinstance(gradients["model.up.weight"], Packed)
        assert not isinstance(gradients["model.down.bias"], Packed)


def test_a_gradient_is_compressed_on_all_ranks_or_on_none() -> None:
    """Also where one rank's part has fewer elements, or none."""
    for rank in range(3):
        with as_rank(rank, 3) as info:
            values = build("fsdp", info, 3)
            compressor = Compressor(values["optimizer"], ratio=0.2, dense_below=8)
            train(values, 1)
            values["optimizer"].step()
            kept = compressor.state_dict()["residuals"]
            sizes = [p.numel() for p in values["model"].parameters()]
            assert sorted(kept) == [number for number, size in enumerate(sizes) if size >= 8]
            for number, parameter in enumerate(values["model"].parameters()):
                if number in kept:
                    assert kept[number].placements == parameter.placements
                    form = compressor.last[id(parameter)]
                    assert (form is not None) == (local_tensor(parameter).numel() > 0)


@pytest.mark.parametrize("layout", ["tp", "fsdp_tp"])
def test_some_parts_that_several_ranks_hold_alike_are_refused(layout: str) -> None:
    with as_rank(0, 4) as info:
        values = build(layout, info, 3)
        with pytest.raises(OptionError, match="several ranks hold the same shard"):
            Compressor(values["optimizer"])


def test_replicas_of_some_parameters_only_are_refused() -> None:
    """Ranks of one replica of these have different parts of the others."""
    with as_rank(0, 4) as info:
        models = [build(layout, info, 3)["model"] for layout in ("hsdp", "fsdp")]
        both = [parameter for model in models for parameter in model.parameters()]
        with pytest.raises(OptionError, match="but not of all"):
            Compressor(torch.optim.AdamW(both))
        Compressor(torch.optim.AdamW([p for p in both if len(p.placements) == 2]))


def test_sharded_parameters_beside_others_are_refused() -> None:
    """Early; and at the step, if they come later."""
    with as_rank(0, 2) as info:
        values, other = build("fsdp", info, 3), torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW(values["model"].parameters())
        compressor = Compressor(optimizer)
        optimizer.add_param_group({"params": [other]})
        train(values, 1)
        with pytest.raises(StateError, match="some are not"):
            optimizer.step()
        compressor.close()
        with pytest.raises(OptionError, match="some are not"):
            Compressor(optimizer)


def test_a_gradient_that_is_spread_otherwise_is_refused() -> None:
    with as_rank(0, 2) as info:
        values = build("fsdp", info, 3)
        Compressor(values["optimizer"])
        train(values, 1)
        parameter = next(iter(values["model"].parameters()))
        kind: Any = torch.distributed.tensor
        local = torch.zeros(parameter.shape)
        parameter.grad = kind.DTensor.from_local(
            local, parameter.device_mesh, [kind.Replicate()], run_check=False
        )
        with pytest.raises(StateError, match="is not sharded like "):
            values["optimizer"].step()


def test_residuals_of_a_base_are_each_ranks_part(tmp_path: Path, ring: ChunkRing) -> None:
    base, _ = logged(tmp_path, "fsdp", 4, ring, 0, compress=COMPRESS["topk"])
    for rank in range(2):
        with as_rank(rank, 2) as info:
            values = build("fsdp", info, 9)
            values["compressor"] = COMPRESS["topk"](values["optimizer"])
            load(base, State(values, ranks=info), ring)
            kept = values["compressor"].state_dict()["residuals"]
            assert all(
                local_tensor(one).any() for one in kept.values() if local_tensor(one).numel() > 4
            )
