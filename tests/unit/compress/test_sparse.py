"""Sparse forms against a plain sort, for every bit pattern; and the bounds that they state."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.compress import sparse as sparse_module
from everstep.compress.floats import FORMATS
from everstep.compress.sparse import (
    SAMPLE_NUMEL,
    DeviceScan,
    Hits,
    HostScan,
    Sparse,
    kernels_for,
    nonzero_count,
    sample_positions,
    sampled_threshold,
    topk,
)
from everstep.errors import FormatError, OptionError
from tests.support.inside import caches

fresh_caches = caches.fresh_caches  # the fixture

DTYPES = list(FORMATS)
Compress = Callable[[torch.Tensor, float], Sparse]


@pytest.mark.parametrize("gaps", [False, True])
def test_counting_leaves_the_memory_resizable(gaps: bool) -> None:
    """FSDP resizes the storages of gradients."""
    whole = torch.tensor([0.0, 1.0, -0.0, 2.0, 0.0, 0.0])
    flat = whole[::2] if gaps else whole
    assert nonzero_count(flat) == (1 if gaps else 3)
    whole.untyped_storage().resize_(0)


def make_parts_small(patch: pytest.MonkeyPatch) -> None:
    """Samples and blocks so small that a few elements are many of them."""
    patch.setattr(sparse_module, "SAMPLE_NUMEL", 16)
    patch.setattr(sparse_module, "_BLOCK_BYTES", 64)


def bits_of(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(FORMATS[tensor.dtype].signed).tolist()


def of_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    width = 8 * dtype.itemsize
    wrapped = [bit - 2**width if bit >= 2 ** (width - 1) else bit for bit in bits]
    return torch.tensor(wrapped, dtype=FORMATS[dtype].signed).view(dtype)


def key_of(tensor: torch.Tensor) -> list[int]:
    return [bits & FORMATS[tensor.dtype].mask for bits in bits_of(tensor)]


@st.composite
def flats(draw: st.DrawFn) -> torch.Tensor:
    """Any bits of any dtype: mixed, few that differ, mostly zero."""
    dtype = draw(st.sampled_from(DTYPES))
    any_bits = st.integers(0, 2 ** (8 * dtype.itemsize) - 1)
    form, sign = FORMATS[dtype], FORMATS[dtype].mask + 1
    special = [0, sign, 1, form.infinity - 1, form.infinity, sign | form.infinity]
    special += [form.infinity + 1, form.mask, sign | form.mask]  # several NaNs
    few = draw(st.lists(st.one_of(any_bits, st.sampled_from(special)), min_size=1, max_size=4))
    bits = draw(
        st.one_of(
            st.lists(any_bits, min_size=1, max_size=150),
            st.lists(st.sampled_from(few), min_size=1, max_size=300),
            st.lists(st.sampled_from([0] * 12 + few), min_size=1, max_size=300),
        )
    )
    return of_bits(bits, dtype)


RATIOS = st.one_of(st.sampled_from([1e-9, 0.01, 0.1, 0.5, 1.0]), st.floats(1e-6, 1.0))


def largest(flat: torch.Tensor, ratio: float) -> list[int]:
    """The oracle: sorts by magnitude, then index; not finite ones are always kept."""
    keys = key_of(flat)
    count = min(len(keys), max(1, math.ceil(ratio * len(keys))))
    count = max(count, sum(key >= FORMATS[flat.dtype].infinity for key in keys))
    order = sorted(range(len(keys)), key=lambda index: (-keys[index], index))
    if sum(key >= FORMATS[flat.dtype].infinity for key in keys) >= count:
        return [i for i, key in enumerate(keys) if key >= FORMATS[flat.dtype].infinity]
    return sorted(order[:count])


def check_form(form: Sparse, flat: torch.Tensor, kept: list[int]) -> None:
    """It holds exactly the elements ``kept``, and gives back exactly these."""
    form.check()
    assert form.numel == flat.numel()
    assert form.positions().tolist() == kept
    bits = bits_of(flat)
    assert bits_of(form.values) == [bits[i] for i in kept]
    wanted = [0] * flat.numel()
    for i in kept:
        wanted[i] = bits[i]
    assert bits_of(form.dense()) == wanted
    out = torch.full_like(flat, 3.0)
    assert form.dense(out=out) is out
    assert bits_of(out) == wanted
    assert form.size_bytes == len(kept) * (4 + flat.element_size())


# --- topk -------------------------------------------------------------------------------


@given(flats(), RATIOS)
def test_topk_is_what_a_sort_finds(flat: torch.Tensor, ratio: float) -> None:
    before = bits_of(flat)
    check_form(topk(flat, ratio), flat, largest(flat, ratio))
    assert bits_of(flat) == before


@given(flats(), RATIOS)
def test_topk_of_many_blocks_and_samples(flat: torch.Tensor, ratio: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_parts_small(patch)
        check_form(topk(flat, ratio), flat, largest(flat, ratio))


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_of_a_long_tensor(dtype: torch.dtype) -> None:
    """Longer than a sample and than blocks, as they are in use."""
    flat = torch.randn(3 * SAMPLE_NUMEL + 11).to(dtype)
    for ratio in (0.001, 0.01, 0.2, 0.7):
        form = topk(flat, ratio)
        keys = np.array(key_of(flat))
        order = np.lexsort((np.arange(len(keys)), -keys))
        kept = np.sort(order[: math.ceil(ratio * len(keys))])
        assert np.array_equal(form.positions().numpy(), kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_are_taken_from_the_lowest_index_on(dtype: torch.dtype) -> None:
    flat = torch.ones(200_000, dtype=dtype)
    flat[1::2] = -1
    flat[150_000] = 2
    kept = topk(flat, 0.01).positions().tolist()
    assert kept == [*range(1999), 150_000]


def test_zeros_fill_up_from_the_lowest_index_on() -> None:
    flat = torch.zeros(200_000)
    flat[[7, 100_000, 199_999]] = torch.tensor([1.0, -2.0, 1e-40])
    kept = topk(flat, 0.01).positions().tolist()
    assert kept == sorted([7, 100_000, 199_999, *(i for i in range(1998) if i != 7)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compress", [topk, sampled_threshold])
def test_what_is_not_finite_is_always_kept(dtype: torch.dtype, compress: Compress) -> None:
    flat = torch.randn(70_000).to(dtype)
    nan, inf = list(range(0, 7000, 7)), list(range(3, 7000, 7))
    flat[nan], flat[inf] = math.nan, -math.inf
    form = compress(flat, 0.001)
    assert form.positions().tolist() == sorted(nan + inf)  # more than asked for
    one = torch.randn(70_000).to(dtype)
    one[69_999] = math.nan
    assert 69_999 in compress(one, 1e-9).positions().tolist()


def test_nothing_but_nan_and_infinity_is_all_kept() -> None:
    flat = of_bits([0x7F800000 + i % 5 for i in range(100_000)], torch.float32)
    assert topk(flat, 1e-4).values.numel() == 100_000
    assert sampled_threshold(flat, 1e-4).values.numel() == 100_000


# --- sampled_threshold ------------------------------------------------------------------


def check_threshold(flat: torch.Tensor, ratio: float) -> None:
    form = sampled_threshold(flat, ratio)
    keys = key_of(flat)
    kept = form.positions().tolist()
    check_form(form, flat, kept)
    count = max(1, math.ceil(ratio * len(keys)))
    unusual = sum(key >= FORMATS[flat.dtype].infinity for key in keys)
    alive = sum(key > 0 for key in keys)
    assert len(kept) <= max(2 * count, unusual)
    assert len(kept) >= min(math.ceil(count / 2), alive)
    left_out = set(range(len(keys))) - set(kept)
    # Nothing that was left out is larger than anything that was kept.
    assert max((keys[i] for i in left_out), default=0) <= min(keys[i] for i in kept or [0])
    again = sampled_threshold(flat, ratio)
    assert again.positions().tolist() == kept


@given(flats(), RATIOS)
def test_threshold_keeps_its_bounds(flat: torch.Tensor, ratio: float) -> None:
    check_threshold(flat, ratio)


@given(flats(), RATIOS)
def test_threshold_keeps_its_bounds_when_samples_are_poor(flat: torch.Tensor, ratio: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_parts_small(patch)
        check_threshold(flat, ratio)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_threshold_is_near_what_was_asked_for(ratio: float) -> None:
    numel = 400_000
    for _ in range(3):
        kept = sampled_threshold(torch.randn(numel), ratio).values.numel()
        assert kept == pytest.approx(ratio * numel, rel=5 / math.sqrt(ratio * SAMPLE_NUMEL))


def test_a_sample_takes_one_of_each_stride_and_not_always_the_same_column() -> None:
    numel, row = SAMPLE_NUMEL * 64, 64
    found = sample_positions(numel, torch.device("cpu"))
    assert torch.equal(found // 64, torch.arange(SAMPLE_NUMEL))
    columns = torch.bincount(found % row, minlength=row)
    assert int(columns.min()) > SAMPLE_NUMEL / row / 2


def test_a_tensor_that_misleads_the_sample_is_chosen_from_exactly() -> None:
    """All that is large lies where the sample does not look."""
    flat = torch.full((400_000,), 1e-3)
    hidden = torch.ones(400_000, dtype=torch.bool)
    hidden[sample_positions(flat.numel(), flat.device)] = False
    large = torch.nonzero(hidden).view(-1)[:100_000]
    flat[large] = torch.arange(1.0, 100_001.0)
    for form in (sampled_threshold(flat, 0.001), topk(flat, 0.001)):
        assert torch.equal(form.positions(), large[-400:])


def test_a_sample_of_only_large_elements_is_chosen_from_exactly() -> None:
    flat = torch.linspace(0.1, 0.5, 400_000)
    sampled = sample_positions(flat.numel(), flat.device)
    flat[sampled] = 1.0
    form = sampled_threshold(flat, 0.5)
    assert form.values.numel() == 200_000
    assert bool(torch.isin(sampled, form.positions()).all())


def test_few_that_are_not_zero_are_all_that_a_threshold_keeps() -> None:
    flat = torch.zeros(400_000)
    flat[::1000] = -1e-30
    assert torch.equal(sampled_threshold(flat, 0.01).positions(), torch.arange(0, 400_000, 1000))


# --- forms in general --------------------------------------------------------------------


@given(flats(), st.data())
def test_plain_torch_finds_the_same_as_numpy(flat: torch.Tensor, data: st.DataObject) -> None:
    form = FORMATS[flat.dtype]
    count = data.draw(st.integers(1, flat.numel()))
    with pytest.MonkeyPatch.context() as patch:
        make_parts_small(patch)
        host, device = HostScan(flat, form), DeviceScan(flat, form)
        key = device.kth(count)
        assert host.kth(count) == key
        for one, other in (
            (host.at_least(key, flat.numel()), device.at_least(key, flat.numel())),
            (host.equal(key, count), device.equal(key, count)),
        ):
            assert one.positions.tolist() == other.positions.tolist()
            assert one.patterns.tolist() == other.patterns.tolist()
        assert host.at_least(0, flat.numel() - 1) is None
        assert device.at_least(0, flat.numel() - 1) is None


def test_half_precision_values_stay_finite() -> None:
    flat = torch.tensor([1.0 + 2**-12, -1e6, 1e-9, math.inf, math.nan, 65520.0])
    half = topk(flat, 1.0).to(torch.float16)
    half.check()
    assert half.size_bytes == 6 * (4 + 2)
    values = half.dense(out=torch.empty(6)).tolist()
    assert values[:4] == [1.0, -65504.0, 0.0, math.inf]
    assert math.isnan(values[4])
    assert values[5] == 65504.0


BROKEN = {
    "unordered": Sparse(5, torch.tensor([2, 1], dtype=torch.int32), torch.ones(2)),
    "twice": Sparse(5, torch.tensor([2, 2], dtype=torch.int32), torch.ones(2)),
    "negative": Sparse(5, torch.tensor([-1, 2], dtype=torch.int32), torch.ones(2)),
    "beyond": Sparse(5, torch.tensor([2, 5], dtype=torch.int32), torch.ones(2)),
    "int64": Sparse(5, torch.tensor([2]), torch.ones(1)),
    "lengths": Sparse(5, torch.tensor([2], dtype=torch.int32), torch.ones(2)),
    "integers": Sparse(5, torch.tensor([2], dtype=torch.int32), torch.ones(1).int()),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_form_is_refused(broken: Sparse) -> None:
    with pytest.raises(FormatError):
        broken.check()


@pytest.mark.parametrize("compress", [topk, sampled_threshold])
def test_what_cannot_be_compressed_is_refused(compress: Compress) -> None:
    refused = [torch.ones(3).int(), torch.ones(2, 2), torch.ones(8)[::2], torch.ones(0)]
    refused += [torch.ones(2, dtype=torch.complex64)]
    for flat in refused:
        with pytest.raises(OptionError):
            compress(flat, 0.1)
    for ratio in (0.0, -1.0, 1.5, math.nan, "much"):
        with pytest.raises(OptionError, match="ratio"):
            compress(torch.ones(3), ratio)
    with pytest.raises(OptionError, match="shape"):
        topk(torch.ones(3), 1.0).dense(out=torch.ones(4))


class FailingScan(DeviceScan):
    def at_least(self, key: int, most: int) -> Any:
        raise RuntimeError("Failed to find C compiler")


class WrongScan(DeviceScan):
    def at_least(self, key: int, most: int) -> Any:
        found = super().at_least(key, most)
        return None if found is None else Hits(found.positions + 1, found.patterns)


@pytest.mark.parametrize(
    ("scan", "why"),
    [(DeviceScan, ""), (FailingScan, "C compiler"), (WrongScan, "differs from torch"), (None, "")],
)
@pytest.mark.usefixtures("fresh_caches")
def test_kernels_that_do_not_run_are_done_without(
    scan: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container without a compiler trains all the same; said once. What is never asked for
    (``None``) is not looked for."""
    module = SimpleNamespace(TritonScan=scan)
    monkeypatch.setitem(sys.modules, "everstep.compress.kernels", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    tensor: Any = SimpleNamespace(is_cuda=scan is not None, device=torch.device("cpu"))
    with caplog.at_level(logging.WARNING, logger="everstep"):
        found = [kernels_for(tensor) for _ in range(2)]
    assert found == [module if scan is DeviceScan else None] * 2
    assert [why in record.message for record in caplog.records] == [True] * bool(why)
