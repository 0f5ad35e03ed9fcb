"""What the tests on a CUDA device share: a training on it, and its state as bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from tests.support.world import forget

__all__ = [
    "DEVICE",
    "ENVIRONMENT",
    "NEEDS_CUDA",
    "World",
    "bytes_of",
    "delay_gpu",
    "opened",
    "restored",
    "warm_up",
]

DEVICE = torch.device("cuda")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
}
"""Of a process of its own, which finds what this one has found."""

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

Make = Callable[[Any], torch.optim.Optimizer]


def delay_gpu(cycles: int) -> None:
    """Keeps the current stream busy for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)


def warm_up(work: Callable[[], object]) -> None:
    """Three times on a side stream, as torch wants it before a graph is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)


def bytes_of(value: Any) -> Any:
    """A state, comparable: tensors by the digests of their bytes."""
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        digest = hashlib.sha256(host.reshape(-1).view(torch.uint8).numpy()).hexdigest()
        return str(value.dtype), list(value.shape), digest
    if isinstance(value, dict):
        return {key: bytes_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bytes_of(item) for item in value]
    return value


class World:
    """A model with batch norm and dropout, so with buffers and the device's generator.

    Args:
        make: the optimizer of parameters.
        width: of the layers; 2048 makes a state of about 100 MB.
        scaled: trains in mixed precision with a GradScaler.
    """

    def __init__(
        self,
        make: Make | None = None,
        *,
        seed: int = 1,
        width: int = 64,
        scaled: bool = False,
        device: torch.device = DEVICE,
    ) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.width = width
        self.model = nn.Sequential(
            nn.Linear(32, width),
            nn.BatchNorm1d(width),
            nn.Dropout(0.2),
            nn.Linear(width, width),
            nn.Linear(width, 5),
        ).to(device)
        make = make or (lambda p: torch.optim.AdamW(p, lr=0.01))
        self.optimizer = make(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10) if scaled else None
        if self.scaler is not None:
            self.state["scaler"] = self.scaler

    def train(self) -> None:
        batch = torch.randn(16, 32, device=self.device)
        self.optimizer.zero_grad()
        if self.scaler is None:
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            return
        with torch.autocast(self.device.type, dtype=torch.float16):
            loss = self.model(batch).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def live(self) -> dict[str, Any]:
        """Copies of the state on the device: cheap, and the device does not wait for them."""
        found: dict[str, Any] = {
            name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()
        }
        for number, values in enumerate(self.optimizer.state.values()):
            for key, tensor in values.items():
                found[f"{number}.{key}"] = tensor.detach().clone()
        return found

    def snapshot(self) -> Any:
        """All of the state, the generators included."""
        found = {key: bytes_of(value.state_dict()) for key, value in self.state.items()}
        found["rng"] = bytes_of([torch.get_rng_state(), torch.cuda.get_rng_state_all()])
        return found


@contextlib.contextmanager
def opened(run: Path, world: World, **options: Any) -> Iterator[everstep.Checkpointer]:
    """With a keeper process; a Checkpointer of another process, as far as it knows."""
    forget(run)
    options = {"every": None, "method": "lazy", "keep": 100} | options
    with everstep.Checkpointer(run, world.state, **options) as ckpt:
        yield ckpt


def restored(run: Path, step: int, **options: Any) -> World:
    """A world of another seed, with the state of a base."""
    world = World(seed=99, **options)
    with opened(run, world, method="sync") as ckpt:
        assert ckpt.resume(step).step == step
    return world
