"""A small training whose bases are copied to other tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everstep import Checkpointer
from everstep.link.registry import list_keepers
from everstep.testing.conformance import walk
from everstep.testing.faultytier import FaultyTier
from everstep.tiers.memory import MemoryFile, MemoryTier
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


FOREVER = 1 << 40


def put(tier: Any, name: str, data: bytes) -> None:
    tier.put(name, MemoryFile([memoryview(data)]))


def contents(tier: MemoryTier) -> dict[str, bytes]:
    found = {}
    for item in walk(tier):
        file = tier.open(item.name)
        buffer = bytearray(file.size_bytes)
        file.read_into(memoryview(buffer), 0)
        found[item.name] = bytes(buffer)
    return found


class Interloper(FaultyTier):
    """Opens a newer timeline just before an operation."""

    at = FOREVER

    def begin(self, op: Any, name: Any) -> Any:
        if len(self.log) + 1 == self.at:
            self._inner.create("timeline-00002/timeline.json", b"somebody else's")
        return super().begin(op, name)


def wait_for(done: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    never = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if done():
            return True
        never.wait(0.01)
    return done()
