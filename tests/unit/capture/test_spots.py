"""The elements that marks hold: the same ones live and offline, whatever a tensor looks like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everstep.capture.mark_samples import (
    PHASES,
    MarkComparison,
    MarkSampler,
    mark_entries,
    sample_indices,
    sampled_bits,
)
from everstep.capture.version_counters import Versions
from everstep.errors import FormatError

DTYPES = (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e5m2 float8_e4m3fn"
).split()


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    """Bytes that are all different, as far as there are so many."""
    dtype = getattr(torch, name)
    if dtype == torch.bool:
        return torch.zeros(shape, dtype=dtype)
    size_bytes = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    data = (torch.arange(size_bytes) % 100).to(torch.uint8)
    return data.view(dtype).view(shape)


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Another value in the last element."""
    other = tensor.clone(memory_format=torch.preserve_format)
    if other.dtype == torch.bool:
        other.fill_(True)
    else:
        raw = other.view(torch.uint8) if other.dim() else other.view(1).view(torch.uint8)
        raw.view(-1)[-1] += 1
    return other


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (16,)])
def test_small_tensors_are_looked_at_whole(name: str, shape: tuple[int, ...]) -> None:
    if name == "complex128" and shape == (16,):
        shape = (8,)  # of two numbers each
    tensor = of_dtype(name, *shape)
    for step in range(PHASES):
        before = MarkSampler({"t": tensor}).take(step)
        assert MarkSampler({"t": tensor.clone()}).other(step, before) is None
        assert MarkSampler({"t": changed(tensor)}).other(step, before) == "t"


@pytest.mark.parametrize("shape", [(17,), (1000,), (40, 30), (3, 5, 7), (64, 3, 7, 7), (4, 5)])
def test_each_element_is_inside_and_none_comes_twice(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(int(np.prod(shape))).view(shape)
    seen: set[int] = set()
    for step in range(100, 100 + PHASES):
        found = np.concatenate([numbers.numpy()[index] for index in sample_indices(shape, step)])
        assert len(set(found.tolist())) == found.size
        assert found.size >= min(8, max(shape))
        assert MarkSampler({"t": numbers}).take(step)["int64"].tolist() == found.tolist()
        seen |= set(found.tolist())
    assert len(seen) > min(2 * 8, numbers.numel() // 4), "every step looks elsewhere"


@pytest.mark.parametrize("name", ["float32", "complex128", "bfloat16"])
def test_strides_make_no_difference(name: str) -> None:
    """A base holds row-major copies of what lay otherwise."""
    for shape, order in (((40, 30), (1, 0)), ((3, 4, 5, 6), (0, 2, 3, 1)), ((2, 3), (1, 0))):
        plain = of_dtype(name, *shape)
        back = [order.index(d) for d in range(len(shape))]
        strided = plain.permute(order).contiguous().permute(back)
        gaps = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=plain.dtype)[..., ::2]
        gaps.copy_(plain)
        assert not strided.is_contiguous()
        for step in range(PHASES):
            taken = MarkSampler({"t": plain}).take(step)
            assert MarkSampler({"t": strided}).other(step, taken) is None
            assert MarkSampler({"t": gaps}).other(step, taken) is None


def test_one_nan_is_as_good_as_another() -> None:
    one = torch.tensor([1.0, float("nan")])
    other = one.clone()
    other.view(torch.int32)[1] ^= 1 << 31  # its sign
    taken = MarkSampler({"t": one}).take(0)
    assert other[1].isnan()
    assert MarkSampler({"t": other}).other(0, taken) is None
    assert MarkSampler({"t": torch.tensor([-1.0, float("nan")])}).other(0, taken) == "t"
    assert MarkSampler({"t": torch.tensor([1.0, 2.0])}).other(0, taken) == "t"


def test_the_entry_that_differs_is_named() -> None:
    tensors = {name: torch.randn(size) for name, size in (("a", 5), ("b", 100), ("c", 3), ("d", 0))}
    spots = MarkSampler(tensors)
    for name in "abc":
        for step in range(PHASES):
            taken = spots.take(step)
            kept = tensors[name].clone()
            tensors[name].neg_()
            assert spots.other(step, taken) == name
            tensors[name].copy_(kept)


def test_a_mark_and_a_state() -> None:
    tensors = {name: torch.randn(20) for name in "zayb"}
    spots = MarkSampler({name: tensors[name] for name in "ya"})
    mark = mark_entries(spots, sampled_bits(spots, sorted(tensors)), 5)
    comparison = MarkComparison()
    assert comparison.other(mark, tensors, 5) is None
    assert comparison.other({}, tensors, 5) is None  # a mark of before there were any
    tensors["z"].zero_()
    assert comparison.other(mark, tensors, 5) is None
    tensors["y"].zero_()
    assert comparison.other(mark, tensors, 5) == "y"
    tensors["y"] = torch.randn(20)  # another tensor under the same name
    assert comparison.other(mark, tensors, 5) == "y"
    with pytest.raises(FormatError, match="other tensors"):
        comparison.other(mark, {f"{n}": torch.ones(3) for n in range(20)}, 5)
    with pytest.raises(FormatError, match="samples are of"):
        comparison.other(mark, {name: torch.ones(3) for name in tensors}, 5)
    with pytest.raises(FormatError, match="samples have"):
        comparison.other(mark, {name: torch.ones(20).double() for name in tensors}, 5)


def test_a_storage_that_is_gone_is_not_read() -> None:
    tensor = torch.randn(100)
    spots = MarkSampler({"t": tensor})
    assert spots.intact
    tensor.untyped_storage().resize_(0)
    assert not spots.intact


def test_counters() -> None:
    own, flat = torch.zeros(4), torch.zeros(8)
    tensors = {"own": own, "one": flat[:4], "empty": torch.zeros(0)}
    with torch.inference_mode():
        tensors["without"] = torch.zeros(3)
    versions = Versions(tensors)
    seen = versions.now()
    flat[6] = 1.0  # whose counter it is, nobody can tell
    own.data.add_(1)
    assert versions.moved(seen) is None
    own[2] = 3.0
    assert versions.moved(seen) == "own"
    assert versions.moved(versions.now()) is None
    whole = Versions(tensors | {"other": flat[4:]})
    seen = whole.now()
    flat[6] = 2.0  # whosoever it is, it is among them
    assert whole.moved(seen) in ("one", "other")
