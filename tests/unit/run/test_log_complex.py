"""complex128 that comes to lie where float64 may: torch's kernels end the process there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep import Checkpointer
from everstep.run.tensors import as_complex
from tests.support.world import freeze

STEPS = 7


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Module()
        # In the file: one float64, then complex128 of one, of three, and of two elements.
        self.model.register_parameter("a", parameter(torch.randn(1, dtype=torch.float64)))
        for name, count in (("b", 1), ("c", 3), ("d", 2)):
            self.model.register_parameter(name, parameter(torch.randn(count, dtype=torch.cfloat)))
            setattr(self.model, name, parameter(torch.randn(count, dtype=torch.complex128)))
        self.model.register_buffer("e", torch.randn(1, dtype=torch.complex128))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        self.optimizer.zero_grad()
        parts = [(p * torch.randn(())).abs().square().sum() for p in self.model.parameters()]
        torch.stack(parts).sum().backward()
        self.optimizer.step()
        self.model.e.mul_(1.5)

    def snapshot(self) -> Any:
        return freeze({"m": self.model.state_dict(), "o": self.optimizer.state_dict()})


def parameter(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["logged", "lowdiff_plus", "gockpt_o", "lazy"])
def test_it_comes_back(method: str, run_folder: Path) -> None:
    it = Training(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a keeper that has died, a replica that has stopped
        ckpt = Checkpointer(run_folder, it.state, method=method, every=3)
        ckpt.resume()
        wanted = []
        for _ in range(STEPS):
            it.train()
            ckpt.step()
            wanted.append(it.snapshot())
        ckpt.wait()
        assert ckpt.stats().keeper_restarts == 0
        ckpt.close()
    # Which steps a replica is written at is a matter of time.
    for step in (None,) if method == "lowdiff_plus" else (6, None):
        again = Training(9)
        with Checkpointer(run_folder, again.state, method=method, every=None) as other:
            found = other.resume(step)
            assert found.step == (step or found.step) > 1
            assert again.snapshot() == wanted[found.step - 1]


@pytest.mark.parametrize("count", range(6))
@pytest.mark.parametrize("shift", [0, 8])
def test_pairs_anywhere(shift: int, count: int) -> None:
    memory = torch.arange(2.0 * count + 2, dtype=torch.float64).numpy()
    assert memory.ctypes.data % 16 == 0
    data = memoryview(memory).cast("B")[shift : shift + 16 * count]
    pairs = torch.zeros(0, 2, dtype=torch.float64)
    if count:
        pairs = torch.frombuffer(data, dtype=torch.float64).view(count, 2)
    numbers = as_complex(pairs)
    assert torch.view_as_real(numbers.clone() * 1).equal(pairs)
    assert (numbers.data_ptr() == pairs.data_ptr()) == (count == 0 or shift == 0)
