"""What the tests of the replica share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

import everstep
from everstep.commit.lineage import BaseId
from everstep.format.writer import ChunkRing
from everstep.restore.load.load import Reads
from everstep.restore.offline.load import load_job
from everstep.restore.offline.memory import OfflineState
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.testing import inspect
from tests.support.serving import Bench
from tests.support.world import TIMEOUT_S, forget

__all__ = ["base_of", "opened", "run_steps", "steps_on_disk", "taken_here", "until", "until_at"]


def opened(run: Path, world: Any, **options: Any) -> everstep.Checkpointer:
    """A Checkpointer whose keeper has a replica; it takes its first base in the first step."""
    forget(run)
    options = {"every": None, "keep": 50, "method": "lowdiff_plus"} | options
    return everstep.Checkpointer(run, world.state, **options)


def run_steps(ckpt: everstep.Checkpointer, world: Any, count: int) -> dict[int, Any]:
    """Trains; the state after each step."""
    found = {}
    for _ in range(count):
        world.train()
        ckpt.step()
        found[ckpt.stats().step] = world.snapshot()
    return found


def until(there: Callable[[], bool], what: str = "it", *, timeout_s: float = TIMEOUT_S) -> None:
    """Waits for something that another thread does."""
    deadline_s = time.monotonic() + timeout_s
    tick = iter(_ticks())
    while not there():
        assert time.monotonic() < deadline_s, f"{what} never came"
        next(tick)


def _ticks() -> Iterator[None]:
    import threading

    never = threading.Event()
    while True:
        never.wait(0.005)
        yield


def until_at(bench: Bench, step: int) -> None:
    """Waits until the replica has a step."""
    until(lambda: bench.replicas.step == step, f"step {step}")


def taken_here(ckpt: everstep.Checkpointer) -> int:
    """How many bases the training process has captured itself."""
    return inspect(ckpt).captured


def steps_on_disk(run: Path, timeline: int = 1) -> list[int]:
    """Of the bases that are committed."""
    bases = scan_run(PosixFileSystem(), PurePath(run)).bases
    there = [base.id for base in bases if base.status == "committed"]
    return sorted(key.step for key in there if key.timeline == timeline)


@contextmanager
def base_of(run: Path, step: int, timeline: int = 1) -> Iterator[OfflineState]:
    """A base on disk, read as a whole."""
    filesystem = PosixFileSystem()
    inventory = scan_run(filesystem, PurePath(run))
    (base,) = [one for one in inventory.bases if one.id == BaseId(timeline, step)]
    ring = ChunkRing(4, 2)
    try:
        yield load_job(filesystem, base, Reads(ring, TIMEOUT_S)).whole()[0]
    finally:
        ring.close()


class Odd:
    """Parameters of all kinds, two optimizers that share one, and a tensor for a learning rate."""

    def __init__(self, *, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Module()
        parameters = {
            "large": torch.randn(700, 97),
            "transposed": torch.randn(9, 33).t(),
            "channels_last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
            "scalar": torch.randn(()),
            "empty": torch.randn(0, 3),
            "precise": torch.randn(13, dtype=torch.float64),
            "short": torch.randn(33, 7, dtype=torch.bfloat16),
            "turning": torch.randn(5, dtype=torch.complex64),
            "wide": torch.randn(5, dtype=torch.complex128),
            "shared": torch.randn(17),
            "frozen": torch.randn(11),
        }
        for name, tensor in parameters.items():
            self.model.register_parameter(name, nn.Parameter(tensor))
        self.model.frozen.requires_grad_(False)
        self.model.register_buffer("drawn", torch.zeros(3))
        self.model.register_buffer("count", torch.zeros((), dtype=torch.int64))
        named = dict(self.model.named_parameters())
        rest = [tensor for name, tensor in named.items() if name not in ("large", "short")]
        self.first = torch.optim.AdamW(rest, lr=torch.tensor(0.01))
        self.second = torch.optim.SGD(
            [named["large"], named["short"], named["shared"]], lr=0.1, momentum=0.9
        )
        self.state: dict[str, Any] = {
            "model": self.model,
            "first": self.first,
            "second": self.second,
        }

    def train(self) -> None:
        loss = torch.zeros(())
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.numel():
                value = parameter.abs() if parameter.is_complex() else parameter
                loss = loss + (value.to(torch.float32) * torch.randn(value.shape)).square().sum()
        loss.backward()
        self.first.step()
        if int(self.model.count) % 2 == 0:
            self.second.step()
        self.second.zero_grad()
        self.first.zero_grad()
        self.first.param_groups[0]["lr"].mul_(0.9)
        self.model.drawn.copy_(torch.randn(3))
        self.model.count.add_(1)

    def snapshot(self) -> dict[str, bytes]:
        found = {name: _bytes(tensor) for name, tensor in self.model.state_dict().items()}
        for key, optimizer in (("first", self.first), ("second", self.second)):
            for number, values in enumerate(optimizer.state.values()):
                for name, value in values.items():
                    found[f"{key}.{number}.{name}"] = _bytes(torch.as_tensor(value))
        found["rng"] = _bytes(torch.get_rng_state())
        return found


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
