"""Steps traced on a CUDA device: with times, and as much memory as the allocator says."""

from __future__ import annotations

import pytest
import torch

from everstep.plan.schedule.steps import times_of
from everstep.plan.schedule.trace import trace_of, trace_training
from everstep.workloads.published import published
from tests.gpu.world import DEVICE, NEEDS_CUDA

pytestmark = NEEDS_CUDA


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def test_times_are_measured() -> None:
    trace = trace_of(published("resnet").training, 32, sgd, measured_on="cuda")
    assert trace.step_s is not None
    seconds, words = times_of(trace, None)
    assert 0 < sum(seconds) <= trace.step_s * 1.001
    assert "measured on cuda" in words


@pytest.mark.parametrize("name", ["resnet", "vgg", "vit"])
def test_the_peak_is_what_the_allocator_has_had(name: str) -> None:
    """Of active bytes, within 5 %; what libraries allocate inside of operators is not traced."""
    trace = trace_of(published(name).training, 32, sgd, measured_on="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with DEVICE:
        model, loss = published(name).training(32)
        optimizer = sgd(model.parameters())
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            loss().backward()
            optimizer.step()
    found = torch.cuda.max_memory_allocated() - before
    assert max(trace.live_bytes()) == pytest.approx(found, rel=0.05)


def test_a_step_on_the_device() -> None:
    with DEVICE:
        model, loss = published("mnasnet").training(2)
        trace = trace_training(model, torch.optim.Adam(model.parameters()), loss)
    assert trace.device == "cuda"


def test_casts_as_on_cuda() -> None:
    trace = trace_of(published("transformer").training, 2, sgd, autocast=torch.float16)
    assert any("casts as on cuda" in note for note in trace.notes)
    assert torch.float16 in {operator.dtype for operator in trace.operators}
