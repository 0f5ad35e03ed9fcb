"""Replay on a CUDA device: torch's own operators.

What passes here on a machine may be added to the exactness matrix for its device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from everstep.replay.exactness import MATRIX
from everstep.replay.updates import Update
from tests.gpu.world import NEEDS_CUDA
from tests.support.replays import Run, record, replayed

pytestmark = NEEDS_CUDA

FLAGS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {},  # what torch takes on this device where nothing is said
    "fused": {"fused": True},
}
ROWS = sorted(
    {
        (row.optimizer, row.variant)
        for row in MATRIX
        if row.optimizer != "SparseAdam" and (row.optimizer, row.variant) != ("Adagrad", "fused")
    }
)


def make(name: str, variant: str, groups: list[Any]) -> Optimizer:
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}
    optimizer: Optimizer = getattr(torch.optim, name)(groups, **options, **FLAGS[variant])
    return optimizer


def in_host_memory(run: Run) -> Run:
    """With gradients, and what a scaler gave, where a log has them."""
    run.updates[:] = [
        Update(
            update.lsn,
            update.optimizer,
            update.groups,
            {name: gradient.cpu() for name, gradient in update.gradients.items()},
            None if update.grad_scale is None else update.grad_scale.cpu(),
            None if update.found_inf is None else update.found_inf.cpu(),
        )
        for update in run.updates
    ]
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_a_configuration(name: str, variant: str, dtype: torch.dtype) -> None:
    run = record(lambda groups: make(name, variant, groups), dtype=dtype, device="cuda", late=False)
    replayer = replayed(run, 0, 5)
    assert not replayer.exact.exact  # until it is in the matrix
    replayed(in_host_memory(run), 4, 0)


def test_a_scaler_on_the_device() -> None:
    def scaler(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = 1.0 if step in (4, 7) else 0.0
        return torch.tensor(2.0**step, device="cuda"), torch.tensor(found, device="cuda")

    for name in ("SGD", "Adam", "AdamW"):
        run = record(
            lambda groups, name=name: make(name, "fused", groups),  # type: ignore[misc]
            device="cuda",
            scaler=scaler,
            late=False,
        )
        replayed(run, 2, 0)
