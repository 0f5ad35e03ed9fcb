"""Data and models of the programs."""

from __future__ import annotations

import torch

__all__ = ["Noisy", "classifier"]


class Noisy(torch.utils.data.Dataset):
    """Samples with random augmentation, as vision transforms draw it.

    Args:
        count: number of samples; sample i is ``(i, 16 features, class)``.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        fixed = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return index, fixed + 0.1 * torch.randn(16), index % 4


def classifier() -> torch.nn.Module:
    """Return a small model with dropout, which draws random numbers in each step."""
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
    )
