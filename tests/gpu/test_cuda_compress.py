"""Compressed forms made on a CUDA device: as in host memory, with Triton and without."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import pytest
import torch

from everstep.compress import quantized, sparse
from everstep.compress.feedback import compression
from everstep.compress.floats import FORMATS
from everstep.compress.sparse import topk
from tests.gpu.world import DEVICE, NEEDS_CUDA

pytestmark = NEEDS_CUDA

NUMEL = 300_003
KINDS = ["topk", "threshold", "int8", "adaptive"]


@pytest.fixture(params=["triton", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With kernels where they run, and without them."""
    chosen: str = request.param
    if chosen == "torch":
        for module in (sparse, quantized):
            monkeypatch.setattr(module, "kernels_for", lambda tensor: None)
    return chosen


def drawn(dtype: torch.dtype) -> torch.Tensor:
    flat = torch.randn(NUMEL).mul_(torch.logspace(-6, 2, NUMEL)).to(dtype)
    flat[::7] = 0
    flat[5::100_000] = flat[6]  # equal magnitudes
    return flat


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_form_is_that_of_host_memory(kind: str, dtype: torch.dtype) -> None:
    flat, compress = drawn(dtype), compression(kind, 0.03)
    here, there = compress(flat), compress(flat.to(DEVICE))
    assert type(here) is type(there)
    wanted: Any = here.dense()
    found: Any = there.dense()
    assert found.device.type == "cuda"
    assert torch.equal(found.cpu(), wanted)


def test_parts_of_a_form() -> None:
    """Of one that lies on the device: edges are looked for there."""
    flat = drawn(torch.float32)
    form = topk(flat.to(DEVICE), 0.1)
    whole = form.dense()
    for begin, end in ((0, 1000), (1000, 256_001), (77, NUMEL)):
        assert torch.equal(form.part(begin, end).dense(), whole[begin:end])


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or not (shutil.which("gcc") or shutil.which("clang")),
    reason="no triton, or no compiler for what it makes",
)
def test_kernels_are_used_where_they_can_be() -> None:
    assert sparse.kernels_for(torch.ones(3, device=DEVICE)) is not None
