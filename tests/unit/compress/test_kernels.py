"""The Triton kernels against their torch references, bit for bit, on CUDA where there is one and
else in Triton's interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from everstep.compress.floats import FORMATS
from everstep.compress.quantized import _largest_scaled, int8
from everstep.compress.sparse import DeviceScan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="neither a CUDA device nor TRITON_INTERPRET=1",
    ),
]
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def kernels() -> Any:
    return importlib.import_module("everstep.compress.kernels")


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("numel", [1, 4095, 4096, 9000])
def test_the_scan_finds_what_torch_finds(kernels: Any, dtype: torch.dtype, numel: int) -> None:
    flat = torch.randn(numel).to(dtype).to(DEVICE)
    if numel > 8:
        flat[3], flat[5], flat[7] = torch.nan, -torch.inf, -0.0
    form = FORMATS[dtype]
    mine, reference = kernels.TritonScan(flat, form), DeviceScan(flat, form)
    for key in (0, 1, reference.kth(max(1, numel // 100)), form.infinity):
        found, wanted = mine.at_least(key, numel), reference.at_least(key, numel)
        assert torch.equal(found.positions, wanted.positions)
        assert torch.equal(found.patterns, wanted.patterns)
    assert mine.at_least(0, numel - 1) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int8_and_back(kernels: Any, dtype: torch.dtype) -> None:
    rows = (torch.randn(40, 256) * torch.logspace(-44, 37, 40)[:, None]).to(dtype)
    rows[0] = 0
    rows[5, 1], rows[6, 2], rows[7] = torch.nan, torch.inf, torch.finfo(dtype).max
    wanted = int8(rows.view(-1))  # in host memory
    values = torch.empty(rows.shape, dtype=torch.int8, device=DEVICE)
    scales = torch.empty(40, device=DEVICE)
    kernels.quantize(rows.to(DEVICE), values, scales, _largest_scaled(torch.float32))
    assert torch.equal(values.cpu().view(-1), wanted.values)
    torch.testing.assert_close(scales.cpu(), wanted.scales, rtol=0, atol=0, equal_nan=True)
    out = torch.empty(rows.shape, device=DEVICE)
    kernels.dequantize(values, scales, out)
    read = wanted.to(torch.float32).dense()
    torch.testing.assert_close(out.cpu().view(-1), read, rtol=0, atol=0, equal_nan=True)
