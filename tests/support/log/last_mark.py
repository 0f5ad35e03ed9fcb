"""A training that ends within a step, and its comparison with an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from everstep import Checkpointer
from everstep.restore.start.report import Recovery


class Training:
    """Dropout, running statistics, and a position in the data."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model = torch.nn.Sequential(
            torch.nn.Dropout(0.2), torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.data = {"at": 0}

    def opened(self, run: Path, **options: Any) -> Checkpointer:
        state = {"model": self.model, "optimizer": self.optimizer, "data": self.data}
        return Checkpointer(run, state, method="logged", every=5, **options)

    def train(self) -> None:
        self.model(torch.randn(4, 8)).pow(2).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.data["at"] += 1

    def seen(self) -> list[Any]:
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        moments = [self.optimizer.state[p]["exp_avg_sq"] for p in self.model.parameters()]
        return [t.clone() for t in (*tensors, *moments)] + [self.data["at"]]


def resumed(run: Path, **options: Any) -> tuple[Recovery, list[Any]]:
    it = Training()
    with it.opened(run, **options) as ckpt:
        recovery = ckpt.resume()
        return recovery, it.seen()


def same(some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
