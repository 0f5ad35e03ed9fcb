"""Every row of the exactness matrix, bit for bit against torch itself (I9)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from everstep.replay import blocked
from everstep.replay.exactness import MATRIX, Row
from tests.support.replays import record, replayed

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "maximize": True},
    ],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}],
    "AdamW": [{}, {"amsgrad": True}, {"weight_decay": 0.0, "maximize": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"lr": 0.01}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "Adamax": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adadelta": [{}, {"weight_decay": 0.1}],
    "ASGD": [{"t0": 3}, {"weight_decay": 0.1, "t0": 1e6}],
    "Rprop": [{}, {"maximize": True}],
    "SparseAdam": [{}, {"maximize": True}],
}
"""Hyperparameters that make torch take another way through its code."""

FLAGS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
ROWS = [row for row in MATRIX if row.optimizer != "SparseAdam"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 64)


def name_of(row: Row) -> str:
    return f"{row.optimizer}-{row.variant}-{row.device}"


def maker(row: Row, options: dict[str, Any]) -> Any:
    kind: Any = getattr(torch.optim, row.optimizer)

    def make(groups: list[Any]) -> Optimizer:
        optimizer: Optimizer = kind(groups, **options, **FLAGS[row.variant])
        return optimizer

    return make


def changing(step: int, groups: list[dict[str, Any]]) -> None:
    """Schedules: a warm-up from 0, another rate in each group, betas or momentum that move."""
    for number, group in enumerate(groups):
        group["lr"] = 0.01 * step * (1 + number)
        if "betas" in group:
            group["betas"] = (0.9 - 0.01 * step, 0.99 + 0.0005 * step)
        if group.get("momentum"):
            group["momentum"] = 0.9 - 0.01 * step
        if group.get("weight_decay"):
            group["weight_decay"] = 0.01 * step


@pytest.mark.thinned(3)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_row(row: Row) -> None:
    for options, (base, size) in zip(
        OPTIONS[row.optimizer], itertools.cycle([(0, 5), (4, 0), (3, 1)]), strict=False
    ):
        lazy = row.optimizer != "Adagrad"
        late = (row.optimizer, row.variant) != ("SGD", "fused")
        run = record(maker(row, options), schedule=changing, late=late)
        assert bool(run.moments[0].state) != lazy
        replayer = replayed(run, base, size, threads=2)
        assert replayer.exact.exact, replayer.exact.why


@pytest.mark.thinned(3)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_a_row_in_other_dtypes(row: Row, dtype: torch.dtype) -> None:
    if row.variant == "fused" and dtype.is_complex:
        pytest.skip("torch has no fused complex optimizers")
    run = record(maker(row, {"lr": 0.01}), dtype=dtype, steps=6)
    replayed(run, 2, 0, threads=2)
    replayed(run, 0, 2)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own
def test_the_sparse_one() -> None:
    def gradients(step: int) -> dict[str, torch.Tensor]:
        rows = torch.tensor([[step % 3, 5, step % 3]])
        return {"table": torch.sparse_coo_tensor(rows, torch.randn(3, 4), (9, 4))}

    row = next(row for row in MATRIX if row.optimizer == "SparseAdam")
    assert (row.variant, row.device) == ("for-loop", "cpu")
    for options in OPTIONS["SparseAdam"]:
        run = record(
            partial(torch.optim.SparseAdam, **options),
            shapes={"table": (9, 4)},
            steps=7,
            gradients=gradients,
        )
        assert replayed(run, 0, 1).exact.exact
        assert replayed(run, 3, 0).exact.exact


def test_every_optimizer_has_options_here() -> None:
    assert {row.optimizer for row in MATRIX} == set(OPTIONS)
