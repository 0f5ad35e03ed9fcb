"""A training whose bases are captured over several steps, one call at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import everstep
from everstep.testing import inspect
from tests.support.following import opened, run_steps
from tests.support.serving import Bench

Method = everstep.Method


class World:
    """A model with buffers, dropout and a schedule; gradients are dropped, or zeroed in place."""

    def __init__(self, *, seed: int = 1, to_none: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(5, 40),
            nn.BatchNorm1d(40),
            nn.Dropout(0.1),
            nn.Linear(40, 40),
            nn.Linear(40, 2),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.to_none = to_none
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "data": {"seen": 0},
        }

    def backward(self) -> None:
        self.model(torch.randn(8, 5)).square().mean().backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.to_none)
        self.schedule.step()
        self.state["data"]["seen"] += 1

    def snapshot(self) -> dict[str, bytes]:
        found = {f"model/{name}": _bytes(t) for name, t in self.model.state_dict().items()}
        for number, values in enumerate(self.optimizer.state.values()):
            found |= {f"{number}/{name}": _bytes(value) for name, value in values.items()}
        found["schedule"] = repr(self.schedule.state_dict()).encode()
        found["data"] = repr(self.state["data"]).encode()
        found["rng"] = _bytes(torch.get_rng_state())
        return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def start(bench: Bench, world: Any, method: Method, **options: Any) -> everstep.Checkpointer:
    """After two steps; a window begins behind the second."""
    ckpt = opened(bench.run, world, method=method, **({"every": None} | options))
    ckpt.resume()
    run_steps(ckpt, world, 2)
    begin(ckpt)
    return ckpt


def begin(ckpt: everstep.Checkpointer) -> everstep.link.save.Save:
    """A base is due now."""
    return inspect(ckpt).take_due()


def report_of(ckpt: everstep.Checkpointer) -> Any:
    return ckpt.stats().multistep
