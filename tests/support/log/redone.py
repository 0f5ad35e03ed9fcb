"""A log of a small training, and a resume that redoes it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from everstep.format.names import base_dir
from everstep.options import LogOptions
from everstep.restore.start.report import Recovery
from tests.support.logged import World, opened
from tests.support.world import TIMEOUT_S

STEPS = 9


class Wide(World):
    """Tensors of several blocks of 64 elements."""

    def __init__(self, make: Any = None, *, seed: int = 1) -> None:
        super().__init__(make, seed=seed)
        self.model = nn.Sequential(
            nn.Linear(4, 70), nn.BatchNorm1d(70), nn.Dropout(0.2), nn.Linear(70, 9), nn.Linear(9, 2)
        )
        self.optimizer = (make or (lambda p: AdamW(p, lr=0.01)))(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.state |= {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }


def trained(run: Path, make: Any = None, *, batch_steps: int = 2) -> dict[int, Any]:
    """A base, then :data:`STEPS` steps in the log on disk, and no base behind them: as after a
    kill. The state after each step."""
    world = Wide(make)
    world.train()  # the optimizer makes its state
    log = LogOptions(to="disk", batch_steps=batch_steps, history="all")
    found = {0: world.snapshot()}
    with opened(run, world, every=None, log=log) as ckpt:
        ckpt.resume()
        ckpt.save().durable.result(TIMEOUT_S)
        for step in range(1, STEPS + 1):
            world.train()
            ckpt.step()
            found[step] = world.snapshot()
    shutil.rmtree(base_dir(PurePath(run), 1, STEPS))
    return found


@contextmanager
def resumed(
    run: Path, make: Any = None, step: int | None = None, **options: Any
) -> Iterator[tuple[Wide, Recovery]]:
    world = Wide(make, seed=2)
    with opened(run, world, every=None, **options) as ckpt:
        yield world, ckpt.resume(step=step)
