"""A training with lazy capture."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.world import freeze


class World:
    """A model with buffers, its optimizer, and plain data."""

    def __init__(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 7))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.plain = {"seen": [0], "array": np.zeros(5)}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "plain": self.plain,
        }
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 40)).square().mean().backward()
        self.plain["seen"][0] += 1
        self.plain["array"] += 1

    def snapshot(self) -> Any:
        return freeze(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "plain": self.plain,
            }
        )
