"""A training on CUDA devices that are played."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.capture import batches as batches_module
from everstep.capture import cuda as cuda_module
from tests.support.fakecuda import FakeCuda, FakeEvent, cuda_device
from tests.support.world import TIMEOUT_S, freeze, opened

GPU = cuda_device(0)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """All but the smallest tensors lie on a device, whose copies run only where somebody waits
    for them; the lane's thread does not until the event is set."""
    cuda = FakeCuda(random.Random(1), eager=True)
    cuda.install(monkeypatch)
    monkeypatch.setattr(batches_module, "_SMALL_BYTES", 0)  # no packs across devices
    monkeypatch.setattr(
        cuda_module, "_device", lambda t: GPU if t.nbytes > 8 else torch.device("cpu")
    )
    opened, trainer = threading.Event(), threading.get_ident()
    synchronize = FakeEvent.synchronize

    def held(event: FakeEvent) -> None:
        if threading.get_ident() != trainer:
            assert opened.wait(TIMEOUT_S)
        synchronize(event)

    monkeypatch.setattr(FakeEvent, "synchronize", held)
    yield opened
    opened.set()
    assert not cuda.registered


class World:
    """A model with buffers, and an optimizer with step counters in host memory."""

    def __init__(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 7))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 40)).square().mean().backward()
        self.optimizer.step()

    def snapshot(self) -> Any:
        return freeze([self.model.state_dict(), self.optimizer.state_dict()])


def restored(run: Path, step: int) -> Any:
    world = World(seed=99)
    with opened(run, world.state) as ckpt:
        ckpt.resume(step)
    return world.snapshot()
