"""The eight networks: parameters as published, and a step of each without a device."""

from __future__ import annotations

import pytest
import torch

from everstep.errors import OptionError
from everstep.workloads.published import PUBLISHED, published


@pytest.mark.thinned(15)
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("batch", [1, 32])
def test_size_and_a_step(name: str, batch: int) -> None:
    with torch.device("meta"):
        found = published(name)
        model, loss = found.training(batch)
        assert sum(p.numel() for p in model.parameters()) == found.params
        loss().backward()
    for parameter, tensor in model.named_parameters():
        assert tensor.grad is not None, parameter


@pytest.mark.parametrize("name", ["mnasnet", "transformer"])
def test_runs_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    _, loss = published(name).training(2)
    value = loss()
    value.backward()
    assert torch.isfinite(value)


def test_unknown_name() -> None:
    with pytest.raises(OptionError, match="did you mean 'resnet'"):
        published("resnt")
