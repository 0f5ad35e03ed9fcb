"""Lossy copies of gradients: what they keep, in which range, and what they leave dense."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.compress.lossy import Lossy, lossy_copies, restored_values
from everstep.compress.quantized import Int8
from everstep.compress.sparse import Sparse
from everstep.errors import FormatError

NUMEL = 2000
HALF_ERROR = 2.0**-11


def copy_of(gradient: torch.Tensor, *, ratio: float = 0.05, int8_below: int = 0) -> Lossy | None:
    return lossy_copies({7: gradient}, ratio, int8_below=int8_below).get(7)


def sparse_of(gradient: torch.Tensor, **options: Any) -> Lossy:
    copy = copy_of(gradient, **options)
    assert copy is not None
    assert isinstance(copy.form, Sparse)
    assert copy.form.values.dtype == torch.float16
    assert copy.form.indices.dtype == torch.int32
    return copy


def dense_of(copy: Lossy) -> torch.Tensor:
    """As replay has it."""
    form = copy.form
    if isinstance(form, Int8):
        return form.dense()
    values = restored_values(form.values, copy.dtype, copy.exponent)
    dense = torch.zeros(form.numel, dtype=copy.dtype)
    dense[form.positions()] = values
    return dense


@pytest.mark.parametrize(
    ("dtype", "lowest", "highest"),
    [
        (torch.float32, -120, 127),
        (torch.float64, -1000, 1023),
        (torch.bfloat16, -120, 127),
        (torch.float16, -12, 15),
    ],
)
@given(data=st.data())
def test_any_magnitude(dtype: torch.dtype, lowest: int, highest: int, data: st.DataObject) -> None:
    """float16 alone reaches from 2**-24 to 65504."""
    power = data.draw(st.integers(lowest, highest))
    shape = torch.linspace(0.5, 0.999, NUMEL, dtype=torch.float64) * math.ldexp(1.0, power)
    gradient = (shape * torch.where(torch.arange(NUMEL) % 2 == 0, 1.0, -1.0)).to(dtype)
    found = dense_of(sparse_of(gradient))
    kept = found != 0
    assert int(kept.sum()) >= NUMEL * 0.05 / 2
    wrong = (found[kept].double() - gradient[kept].double()).abs()
    allowed = HALF_ERROR if dtype in (torch.float32, torch.float64, torch.float16) else 2.0**-8
    assert (wrong <= allowed * gradient[kept].double().abs()).all()


def test_the_largest_number_stays_finite() -> None:
    """In float16 it is rounded up to a power of two that float32 has not."""
    gradient = torch.zeros(NUMEL)
    gradient[3], gradient[9] = torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max
    found = dense_of(sparse_of(gradient))
    assert found.isfinite().all()
    assert found[3] == gradient[3]
    assert found[9] == gradient[9]


def test_the_largest_are_kept_and_about_as_many_as_asked_for() -> None:
    gradient = torch.randn(200_000, generator=torch.Generator().manual_seed(5)) * 1e-7
    copy = sparse_of(gradient, ratio=0.01, int8_below=100_000)
    kept = torch.zeros(gradient.numel(), dtype=torch.bool)
    kept[copy.form.positions()] = True
    assert abs(int(kept.sum()) - 2000) < 6 * 0.04 * 2000  # standard deviations of the sample
    assert gradient[kept].abs().min() > gradient[~kept].abs().max()


def test_small_ones_are_quantized() -> None:
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(5))
    copy = copy_of(gradient, int8_below=NUMEL + 1)
    assert copy is not None
    assert isinstance(copy.form, Int8)
    scale = gradient.abs().max() / 127
    assert (dense_of(copy) - gradient).abs().max() <= scale / 2


def test_row_major_whatever_the_strides() -> None:
    gradient = torch.randn(2, 8, 8, 16).to(memory_format=torch.channels_last)
    assert not gradient.is_contiguous()
    copy = copy_of(gradient, int8_below=10**6)
    assert copy is not None
    assert (dense_of(copy).view(gradient.shape) - gradient).abs().max() < 0.05


@pytest.mark.parametrize(
    "gradient",
    [
        torch.empty(0),
        torch.empty(3, 0),
        torch.tensor(2.0),
        torch.full((NUMEL,), math.nan),
        torch.cat([torch.ones(NUMEL), torch.tensor([math.inf])]),
        torch.ones(NUMEL, dtype=torch.complex64),
        torch.ones(NUMEL).to_sparse(),
    ],
    ids=["none", "none in two dimensions", "one", "NaN", "inf", "complex", "sparse"],
)
@pytest.mark.parametrize("int8_below", [0, 10**6])
def test_what_stays_dense(gradient: torch.Tensor, int8_below: int) -> None:
    assert copy_of(gradient, int8_below=int8_below) is None


def test_zeros() -> None:
    copy = sparse_of(torch.zeros(NUMEL))
    assert not dense_of(copy).any()
    assert copy.exponent == 0


def test_several_at_once_keep_their_numbers() -> None:
    gradients = {3: torch.ones(NUMEL), 1: torch.full((NUMEL,), math.inf), 2: -torch.ones(NUMEL)}
    found = lossy_copies(gradients, 0.1)
    assert sorted(found) == [2, 3]
    assert (dense_of(found[2]) == -1).all()


@pytest.mark.parametrize(
    ("values", "dtype", "exponent"),
    [
        (torch.ones(2), torch.float32, 0),
        (torch.ones(2, dtype=torch.float16), torch.int32, 0),
        (torch.ones(2, dtype=torch.float16), torch.float32, 10**6),
        (torch.ones(2, dtype=torch.float16), torch.float32, "1"),
    ],
)
def test_damaged_forms(values: torch.Tensor, dtype: torch.dtype, exponent: Any) -> None:
    with pytest.raises(FormatError, match="not a lossy gradient"):
        restored_values(values, dtype, exponent)
