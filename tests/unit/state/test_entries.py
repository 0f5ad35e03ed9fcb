"""Entries: which tensors can be stored, and as what."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep.state.layout.entries import DTYPE_BYTES, Entry
from everstep.state.values.tensors import (
    DTYPE_CODES,
    byte_view,
    empty_like_entry,
    tensor_entry,
    torch_dtype,
    why_not_storable,
)


@pytest.mark.parametrize("code", DTYPE_BYTES)
def test_codes_and_dtypes_belong_together(code: str) -> None:
    dtype = torch_dtype(code)
    assert DTYPE_CODES[dtype] == code
    assert torch.empty((), dtype=dtype).element_size() == DTYPE_BYTES[code]


def test_a_dtype_without_a_code() -> None:
    assert torch.complex128 not in DTYPE_CODES
    assert torch.complex32 not in DTYPE_CODES


@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    dtype=st.sampled_from([*DTYPE_CODES, torch.complex128]),
)
def test_the_stored_form_has_the_tensors_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    entry = tensor_entry("x", tensor, lsn=7)
    assert entry.size_bytes == tensor.numel() * tensor.element_size() == byte_view(tensor).numel()
    assert (entry.lsn, entry.stride, entry.placement) == (7, None, "whole")
    assert entry.global_shape == entry.shape
    assert entry.global_offset == (0,) * len(entry.shape)
    again = empty_like_entry(entry)
    assert (again.dtype, tuple(again.shape)) == (dtype, shape)
    assert again.is_contiguous()


def test_complex128_is_stored_as_pairs() -> None:
    entry = tensor_entry("x", torch.zeros(3, 2, dtype=torch.complex128))
    assert (entry.dtype, entry.shape, entry.logical_dtype) == ("F64", (3, 2, 2), "complex128")


def test_strides_are_noted_where_they_matter() -> None:
    assert tensor_entry("x", torch.zeros(3, 4).t()).stride == (1, 4)
    assert tensor_entry("x", torch.zeros(3, 4)).stride is None


def test_a_byte_view_is_no_copy() -> None:
    tensor = torch.zeros(2, dtype=torch.int32)
    byte_view(tensor)[4] = 1
    assert tensor.tolist() == [0, 1]


def unstorable() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about old kinds of tensors
        return {
            "sparse_coo": torch.eye(3).to_sparse(),
            "sparse_csr": torch.eye(3).to_sparse_csr(),
            "meta device": torch.empty(3, device="meta"),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "jagged nested": torch.nested.nested_tensor(
                [torch.ones(2), torch.ones(3)], layout=torch.jagged
            ),
            "not initialised": nn.LazyLinear(3).weight,
            "complex32": torch.zeros(2, dtype=torch.complex32),
            "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "type Odd": torch.ones(2).as_subclass(Odd),
        }


class Odd(torch.Tensor):
    """A subclass may carry more than its elements."""


@pytest.mark.parametrize("kind", unstorable())
def test_what_cannot_be_stored_says_why(kind: str) -> None:
    reason = why_not_storable(unstorable()[kind])
    assert reason
    assert kind.split()[-1] in reason


def test_plain_tensors_and_parameters_can_be_stored() -> None:
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))):
        assert why_not_storable(tensor) is None


def test_an_entry_is_a_value() -> None:
    assert Entry.whole("a", "F32", (2,)) == Entry("a", "F32", (2,), (2,), (0,))
    assert len({Entry.whole("a", "F32", (2,)), Entry.whole("a", "F32", (2,))}) == 1
