"""The int8 form against plain arithmetic in Python, and its edges: zeros, the smallest and the
largest numbers, what is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.compress import quantized
from everstep.compress.floats import FORMATS
from everstep.compress.quantized import BLOCK_NUMEL, Int8, int8
from everstep.errors import FormatError, OptionError

DTYPES = list(FORMATS)
TINY = 2.0**-126


def oracle(values: Sequence[float]) -> tuple[list[int], float]:
    """One block of float32 numbers: its integers and its scale, by numpy's scalars."""
    if not all(math.isfinite(value) for value in values):
        return [0] * len(values), math.nan
    most = np.float32(float(np.finfo(np.float32).max) * (1 - 2.0**-20))
    scale = min(np.float32(max(abs(v) for v in values)), most) / np.float32(127)
    if scale < TINY:
        return [0] * len(values), 0.0
    return [round(float(np.float32(v) / scale)) for v in values], float(scale)


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_a_block_is_what_the_definition_says(values: list[float]) -> None:
    form = int8(torch.tensor(values))
    form.check()
    integers, scale = oracle(values)
    assert form.values.tolist() == integers
    assert form.scales.tolist() == pytest.approx([scale], rel=0, abs=0, nan_ok=True)
    read = form.dense().tolist()
    wanted = [float(np.float32(q) * np.float32(scale)) for q in integers]
    assert read == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)
    if math.isfinite(scale):
        assert all(math.isfinite(x) for x in read)
    else:
        assert all(math.isnan(x) for x in read)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1000, 300_000])
def test_the_error_is_half_a_scale(dtype: torch.dtype, numel: int) -> None:
    flat = (torch.randn(numel) * torch.logspace(-3, 3, numel)).to(dtype)
    form = int8(flat)
    form.check()
    assert form.numel == numel
    assert form.size_bytes == numel + -(-numel // BLOCK_NUMEL) * form.scales.element_size()
    wide = torch.promote_types(dtype, torch.float32)
    scales = form.scales.repeat_interleave(BLOCK_NUMEL)[:numel]
    read = form.to(wide).dense()
    assert bool(((read - flat.to(wide)).abs() <= scales * 0.50001).all())
    out = torch.empty_like(flat)
    assert form.dense(out=out) is out
    assert torch.equal(out, read.to(dtype))
    assert torch.equal(form.dense(), out)


def test_chunks_of_host_memory_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.randn(5000)
    whole = int8(flat)
    monkeypatch.setattr(quantized, "_HOST_BLOCKS", 3)
    parts = int8(flat)
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.scales, parts.scales)
    assert torch.equal(whole.dense(), parts.dense())


def test_a_part_reads_back_as_a_part() -> None:
    form = int8(torch.randn(1000))
    for begin, end in ((0, 1000), (256, 512), (512, 700), (768, 1000), (256, 256)):
        assert torch.equal(form.part(begin, end).dense(), form.dense()[begin:end])


def test_zeros_and_numbers_too_small_read_back_as_zeros() -> None:
    flat = torch.zeros(3 * BLOCK_NUMEL)
    flat[BLOCK_NUMEL] = 126 * TINY
    flat[2 * BLOCK_NUMEL] = 128 * TINY
    form = int8(flat)
    assert form.scales[:2].tolist() == [0.0, 0.0]
    assert not bool(form.dense()[: 2 * BLOCK_NUMEL].any())
    assert form.dense()[2 * BLOCK_NUMEL] == pytest.approx(128 * TINY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_stay_finite(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    flat = torch.tensor([most, -most, most / 2, 0.0], dtype=dtype)
    for low, high in ((most * 0.99, most), (most, most)):
        flat[2], flat[0] = low, high
        read = int8(flat).dense()
        assert bool(read.isfinite().all())
        assert torch.allclose(read, flat, rtol=0.01)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_is_not_finite_is_nan_and_no_other(dtype: torch.dtype, strange: float) -> None:
    flat = torch.randn(3 * BLOCK_NUMEL + 5).to(dtype)
    clean = int8(flat).dense()
    flat[BLOCK_NUMEL + 3] = strange
    flat[-1] = strange
    form = int8(flat)
    form.check()
    read = form.dense()
    hit = torch.zeros(flat.shape, dtype=torch.bool)
    hit[BLOCK_NUMEL : 2 * BLOCK_NUMEL] = True
    hit[3 * BLOCK_NUMEL :] = True
    assert bool(read[hit].isnan().all())
    assert torch.equal(read[~hit], clean[~hit])


def test_a_form_for_a_narrower_dtype_saturates() -> None:
    form = int8(torch.tensor([1e6, -1e6, 1.0])).to(torch.float16)
    assert form.dense().dtype == torch.float16
    assert form.dense().tolist() == [65504.0, -65504.0, 0.0]
    assert int8(torch.tensor([1e6])).dense(out=torch.empty(1).half()).tolist() == [65504.0]


def test_ties_go_to_even() -> None:
    flat = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert int8(flat).values.tolist() == [127, 0, 2, 2, 0, -2]


BROKEN = {
    "dtype": Int8(torch.ones(3, dtype=torch.int8), torch.ones(1), torch.int32),
    "values": Int8(torch.ones(3, dtype=torch.uint8), torch.ones(1), torch.float32),
    "shape": Int8(torch.ones(3, 1, dtype=torch.int8), torch.ones(1), torch.float32),
    "scales": Int8(torch.ones(3, dtype=torch.int8), torch.ones(2), torch.float32),
    "double": Int8(torch.ones(3, dtype=torch.int8), torch.ones(1).double(), torch.float32),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_form_is_refused(broken: Int8) -> None:
    with pytest.raises(FormatError):
        broken.check()


def test_what_cannot_be_compressed_is_refused() -> None:
    for flat in (torch.ones(3).int(), torch.ones(2, 2), torch.ones(8)[::2], torch.ones(0)):
        with pytest.raises(OptionError):
            int8(flat)
    with pytest.raises(OptionError, match="shape"):
        int8(torch.ones(3)).dense(out=torch.ones(4))
