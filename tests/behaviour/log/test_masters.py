"""Masters of 32 bits whose gradients come from a backward of 16: the log on disk is half as large,
and every step comes back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from tests.support.following import opened, run_steps
from tests.support.logged import segments_of
from tests.support.multistep.rows import restored
from tests.support.world import forget

STEPS = 7
ON_DISK = everstep.LogOptions(to="disk", history="all")


class Masters:
    """As mixed-precision optimizers do by hand; copies of the masters follow by a declared update.

    Args:
        clip: norm of the gradients at most.
    """

    def __init__(self, *, seed: int = 1, clip: float | None = None) -> None:
        torch.manual_seed(seed)
        self.low = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256)).bfloat16()
        self.masters = nn.ParameterList([p.detach().float() for p in self.low.parameters()])
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=0.01)
        self.clip = clip
        self.state: dict[str, Any] = {"masters": self.masters, "optimizer": self.optimizer}

    def train(self) -> None:
        self.low(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
        for master, parameter in zip(self.masters, self.low.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.low.parameters(), strict=True):
                parameter.copy_(master)

    def snapshot(self) -> dict[str, bytes]:
        found = {str(n): m.detach().numpy().tobytes() for n, m in enumerate(self.masters)}
        for number, values in enumerate(self.optimizer.state.values()):
            found |= {f"{number}/{name}": value.numpy().tobytes() for name, value in values.items()}
        return found


@pytest.mark.parametrize(
    ("clip", "share"), [(None, 0.5), (1e6, 0.5), (1e-3, 1.0)], ids=["none", "above", "below"]
)
def test_every_step_comes_back(run_folder: Path, clip: float | None, share: float) -> None:
    """A norm that is not reached leaves the bits as they are."""
    world = Masters(clip=clip)
    with opened(run_folder, world, method="logged", every=4, log=ON_DISK) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, STEPS)
    elements = sum(master.numel() for master in world.masters)
    sizes = [path.stat().st_size for one in segments_of(run_folder) for path in _files(one)]
    forget(run_folder)
    assert abs(sum(sizes) / (4 * elements * STEPS) - share) < 0.2
    for step in range(1, STEPS + 1):
        assert restored(run_folder, Masters(seed=9), step) == states[step], step


def _files(segment: Any) -> list[Path]:
    return list(Path(segment.path).glob("*.safetensors"))
