"""Trainers that take over a run from each other, with a keeper within this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everstep
from tests.support.world import forget


class World:
    """A model and its optimizer."""

    def __init__(self, seed: int = 1, width: int = 30) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "plain": {"seen": 0},
        }
        self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().mean().backward()
        self.optimizer.step()
        self.state["plain"]["seen"] += 1

    def snapshot(self) -> list[bytes]:
        found = [t.numpy().tobytes() for t in self.model.state_dict().values()]
        for values in self.optimizer.state.values():
            found += [t.numpy().tobytes() for t in values.values()]
        return [*found, str(self.state["plain"]).encode(), torch.get_rng_state().numpy().tobytes()]


def opened(run: Path, world: World, **options: Any) -> everstep.Checkpointer:
    """A Checkpointer of another process, as far as it knows."""
    forget(run)
    options = {"every": None, "method": "lazy"} | options
    return everstep.Checkpointer(run, world.state, **options)


def stepped(ckpt: everstep.Checkpointer, world: World) -> list[bytes]:
    """Trains one step; the state after it."""
    world.train()
    ckpt.step()
    return world.snapshot()


def until(there: Callable[[], bool]) -> None:
    """Waits for what other threads do."""
    waited = threading.Event()
    for _ in range(2000):
        if there():
            return
        waited.wait(0.01)
    raise AssertionError("it never came")
