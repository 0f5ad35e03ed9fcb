"""The log of a training on a CUDA device: every step can be gone back to, by torch's own operators
on the same device, and nothing of it is called exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.compress.compressor import Compressor
from everstep.options import LogOptions
from tests.gpu.world import NEEDS_CUDA, World, opened

pytestmark = NEEDS_CUDA

DENSE = everstep.Method(base="lazy", log="dense")
ALL = LogOptions(to="disk", batch_steps=1, history="all")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "SGD that writes to gradients": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True
    ),
}


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Kernels that give the same bits each time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(run: Path, make: Callable[[int], World], **options: Any) -> None:
    world, states = make(1), {}
    with opened(run, world, every=100, log=ALL, **options) as ckpt:
        ckpt.resume()
        for step in range(1, 9):
            world.train()
            ckpt.step()
            states[step] = world.snapshot()
        assert ckpt.stats().log_holes <= 1  # before there is a base
    other = make(9)
    with opened(run, other, log=ALL, **options) as ckpt:
        for step in (7, 3, 5):
            recovery = ckpt.resume(step=step)
            assert (recovery.step, recovery.exact) == (step, False)
            assert recovery.replayed > 0
            assert "on cuda is not in the exactness matrix" in recovery.evidence
            assert other.snapshot() == states[step], step


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_can_be_gone_back_to(name: str, scaled: bool, run_folder: Path) -> None:
    """Gradients are freed by ``zero_grad()`` while the lane still copies them."""
    check(
        run_folder,
        lambda seed: World(OPTIMIZERS[name], seed=seed, width=512, scaled=scaled),
        method=DENSE,
    )


@pytest.mark.parametrize("kind", ["topk", "threshold", "int8", "adaptive"])
def test_compressed_training(kind: str, run_folder: Path) -> None:
    def make(seed: int) -> World:
        world = World(seed=seed, width=512)
        compressor = Compressor(world.optimizer, kind=kind, ratio=0.1, dense_below=100)
        world.state["compressor"] = compressor
        return world

    check(run_folder, make, method="lowdiff")
