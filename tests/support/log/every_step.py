"""A training with a log: stepped by hand, killed, compared with an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everstep
from everstep.options import LogOptions
from tests.support.world import forget

DENSE = everstep.Method(base="lazy", log="dense")


ON_DISK = LogOptions(to="disk", batch_steps=2)


class World:
    """A model with dropout, batch norm and tied weights, trained with clipping and a schedule."""

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer] | None = None,
        *,
        seed: int = 1,
        clip: bool = True,
        accumulate: int = 1,
        set_to_none: bool = True,
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 24),
            nn.BatchNorm1d(24),
            nn.Dropout(0.2),
            nn.Linear(24, 24),
            nn.Linear(24, 3),
        )
        self.model.tied = self.model[3].weight  # type: ignore[assignment]
        self.make = make or (lambda p: torch.optim.AdamW(p, lr=0.01))
        self.optimizer = self.make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.clip, self.accumulate, self.set_to_none = clip, accumulate, set_to_none
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "plain": {"seen": 0},
        }

    def train(self) -> None:
        for _ in range(self.accumulate):
            self.model(torch.randn(6, 8)).square().mean().backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        self.scheduler.step()
        self.state["plain"]["seen"] += 1

    def snapshot(self) -> dict[str, bytes]:
        found = {k: v.numpy().tobytes() for k, v in self.model.state_dict().items()}
        for number, values in enumerate(self.optimizer.state.values()):
            for key, value in values.items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                found[f"{number}.{key}"] = tensor.numpy().tobytes()
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        found["groups"] = repr(groups).encode()
        found["scheduler"] = repr(self.scheduler.state_dict()).encode()
        found["plain"] = str(self.state["plain"]).encode()
        found["rng"] = torch.get_rng_state().numpy().tobytes()
        return found


def opened(run: Path, world: World, **options: Any) -> everstep.Checkpointer:
    forget(run)
    return everstep.Checkpointer(run, world.state, **({"every": 4, "method": DENSE} | options))


def run_steps(ckpt: everstep.Checkpointer, world: World, count: int) -> dict[int, dict[str, bytes]]:
    """Trains; the state after each step."""
    found = {}
    for _ in range(count):
        world.train()
        ckpt.step()
        found[ckpt.stats().step] = world.snapshot()
    return found
