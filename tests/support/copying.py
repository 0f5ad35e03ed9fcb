"""A small training whose bases are copied to other tiers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from everstep import Checkpointer
from everstep.link.registry import list_keepers
from tests.support.world import TIMEOUT_S

__all__ = ["train"]


def train(run: Path, steps: int, **more: Any) -> tuple[torch.Tensor, Any, Any]:
    """Trains to ``steps`` with a keeper process, which has copied everything and ended; weights,
    what was resumed, and what it cost."""
    torch.manual_seed(1)
    model = torch.nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(run, {"model": model, "optimizer": optimizer}, every=2, **more) as ckpt:
        recovery = ckpt.resume()
        for step in range(recovery.step, steps):
            torch.manual_seed(step)
            model(torch.randn(3, 7)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
    waited, left = threading.Event(), int(TIMEOUT_S / 0.02)
    while any(keeper.run == str(run) for keeper in list_keepers()):
        assert left, "the keeper does not end"
        left -= 1
        waited.wait(0.02)
    return model.weight.detach().clone(), recovery, ckpt.stats()
