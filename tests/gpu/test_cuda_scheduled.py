"""Planned captures on a CUDA device: bit for bit the state at each mark, with one optimizer and
with optimizers that update inside of backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from tests.gpu.world import DEVICE, NEEDS_CUDA, bytes_of
from tests.support.world import forget

pytestmark = NEEDS_CUDA


def training(order: str, seed: int) -> tuple[nn.Module, dict[str, Any], Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).to(DEVICE)
    state: dict[str, Any] = {"model": model}
    optimizers: list[torch.optim.Optimizer] = []
    if order == "after":
        optimizers.append(torch.optim.AdamW(model.parameters(), fused=True))
        state["optimizer"] = optimizers[0]
    else:
        for number, parameter in enumerate(model.parameters()):
            one = torch.optim.AdamW([parameter])
            state[f"optimizer {number}"] = one

            def update(_: torch.Tensor, one: torch.optim.Optimizer = one) -> None:
                one.step()
                one.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)

    def train() -> None:
        model(torch.randn(256, 1024, device=DEVICE)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return model, state, train


def snapshot(state: dict[str, Any]) -> Any:
    return bytes_of({key: part.state_dict() for key, part in state.items()})


@pytest.mark.parametrize("order", ["after", "inside"])
def test_every_capture_is_the_state_at_its_mark(order: str, run_folder: Path) -> None:
    _, state, train = training(order, 1)
    wanted = {}
    with everstep.Checkpointer(run_folder, state, method="checkflow", every=1, keep=100) as ckpt:
        ckpt.resume()
        for step in range(1, 13):
            train()
            wanted[step] = snapshot(state)
            ckpt.step()
        ckpt.wait()
        schedule = ckpt.stats().schedule
        assert schedule is not None
        assert schedule.plans >= 1
        assert schedule.followed_steps > 0
    forget(run_folder)
    _, other, _ = training(order, 2)
    with everstep.Checkpointer(run_folder, other, method="checkflow", every=None) as ckpt:
        for step in range(12, 3, -1):
            ckpt.resume(step)
            assert snapshot(other) == wanted[step], step
