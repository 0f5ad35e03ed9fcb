"""Sparse forms of a flat tensor: the elements of largest magnitude, and their positions.

:func:`topk` keeps an exact number of elements (LowDiff section II-C: sparsification);
:func:`sampled_threshold` an approximate number with one pass less (TierCheck section 3.2: a
threshold from a sample, then one pass that extracts all elements above it); :func:`nonzeros` keeps
every nonzero element and is lossless.

All results are functions of the tensor's bits alone: elements of equal magnitude are taken from the
lowest index on. NaN and infinity are always kept, even beyond the requested number, because the
optimizer must see them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from everstep.compress.floats import FORMATS, checked_flat, kept_count, narrowed
from everstep.compress.scan import SAMPLE_NUMEL, DeviceScan, Hits, sample_positions, scan_of
from everstep.errors import FormatError, OptionError

__all__ = ["CHUNK_NUMEL", "Sparse", "nonzero_count", "nonzeros", "sampled_threshold", "topk"]

CHUNK_NUMEL: Final = 2**31
"""Elements that an int32 index can tell apart; longer tensors are indexed chunk by chunk."""

_MARGIN = 4.0  # standard deviations of the sample between the filter and the exact threshold
_SLACK = 4  # with more candidates than this factor the sample was misleading


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Some elements of a flat tensor; all others are zero.

    Attributes:
        numel: elements of the tensor.
        indices: positions of the kept elements, int32, ascending. Position ``i`` of a tensor with
            more than ``CHUNK_NUMEL`` elements is ``i % CHUNK_NUMEL``: each chunk counts from 0
            (TierCheck section 3.2: oversized tensors are rebased).
        values: kept elements, in the dtype of the tensor or a narrower one (:meth:`to`).
        counts: number of kept elements per chunk; one number for most tensors.
    """

    numel: int
    indices: torch.Tensor
    values: torch.Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, numel: int, positions: torch.Tensor, values: torch.Tensor) -> Sparse:
        """Make a form of ``values`` at ``positions`` (int64, ascending, unique) of ``numel``
        elements.
        """
        chunks = max(1, math.ceil(numel / CHUNK_NUMEL))
        if chunks == 1:
            return cls(numel, positions.to(torch.int32), values, (positions.numel(),))
        bounds = torch.arange(chunks + 1, device=positions.device) * CHUNK_NUMEL
        counts = torch.searchsorted(positions, bounds).diff()
        indices = (positions % CHUNK_NUMEL).to(torch.int32)
        return cls(numel, indices, values, tuple(counts.tolist()))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of indices and values."""
        return self.indices.nbytes + self.values.nbytes

    def positions(self) -> torch.Tensor:
        """Return the positions of the values, int64, counted from the tensor's beginning."""
        positions = self.indices.to(torch.int64)
        begin = 0
        for chunk, count in enumerate(self.counts):
            if chunk:
                positions[begin : begin + count] += chunk * CHUNK_NUMEL
            begin += count
        return positions

    def dense(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the flat tensor: the values at their positions, zero elsewhere.

        Args:
            out: flat tensor of ``numel`` elements to write to and return; values are rounded to its
                dtype if that is narrower.

        Raises:
            OptionError: ``out`` has another size.
        """
        if out is None:
            out = torch.empty(self.numel, dtype=self.dtype, device=self.values.device)
        elif out.shape != (self.numel,):
            raise OptionError(f"out has shape {list(out.shape)}, not [{self.numel}]")
        out.zero_()
        return out.index_copy_(0, self.positions(), narrowed(self.values, out.dtype))

    def part(self, begin: int, end: int) -> Sparse:
        """Return elements ``[begin, end)``, counted from ``begin``; the values are views."""
        first = 0
        positions = []
        values = []
        for chunk, count in enumerate(self.counts):
            base = chunk * CHUNK_NUMEL
            if base < end and begin < base + CHUNK_NUMEL:
                own = self.indices[first : first + count]
                low, high = (_first_at(own, edge - base) for edge in (begin, end))
                positions.append(own[low:high].to(torch.int64) + (base - begin))
                values.append(self.values[first + low : first + high])
            first += count
        if len(positions) > 1:
            return Sparse.of(end - begin, torch.cat(positions), torch.cat(values))
        return Sparse.of(end - begin, positions[0], values[0])

    def to(self, dtype: torch.dtype) -> Sparse:
        """Return the same form with values in ``dtype``, rounded to nearest.

        float16 halves the size of float32 values and is lossy: finite values beyond 65504 become
        65504, those below 2**-25 zero. NaN and infinity stay.
        """
        return replace(self, values=narrowed(self.values, dtype))

    def check(self) -> None:
        """Check every index of a form from an untrusted source.

        Raises:
            FormatError: :meth:`dense` would write out of bounds or twice to one position.
        """
        chunks = max(1, math.ceil(self.numel / CHUNK_NUMEL))
        kept = self.indices.numel()
        shapes_fit = self.indices.shape == self.values.shape == (kept,)
        counts_fit = len(self.counts) == chunks and min(self.counts) >= 0
        if self.indices.dtype != torch.int32 or self.dtype not in FORMATS or not shapes_fit:
            raise FormatError("indices and values of a sparse gradient differ in dtype or shape")
        if not counts_fit or sum(self.counts) != kept:
            raise FormatError(f"a sparse gradient of {kept} values has counts {self.counts}")
        positions = self.positions()
        ascending = bool((positions.diff() > 0).all())
        inside = kept == 0 or bool(self.indices.min() >= 0 and positions[-1] < self.numel)
        ends = torch.tensor(self.counts, device="cpu").cumsum(0).tolist()
        bounds_kept = all(
            end == 0 or int(positions[end - 1]) < (chunk + 1) * CHUNK_NUMEL
            for chunk, end in enumerate(ends)
        )
        if not (ascending and inside and bounds_kept):
            raise FormatError(
                f"a sparse gradient has indices out of order, or outside its {self.numel} elements"
            )


def topk(flat: torch.Tensor, ratio: float) -> Sparse:
    """Return the ``k = max(1, ceil(ratio numel))`` elements of largest magnitude, exactly.

    A threshold slightly below the exact one, estimated from a sample, leaves few candidates; the
    exact choice is made among these. If the sample misleads (few distinct values, nearly all zero),
    the exact threshold is found by counting digits.

    Args:
        flat: contiguous, of a dtype in ``FORMATS``, with at least one element.
        ratio: fraction of elements to keep, in (0, 1].

    Returns:
        ``k`` elements; all non-finite ones if there are more than ``k``.

    Raises:
        OptionError: the tensor cannot be compressed.
    """
    scan = scan_of(flat, checked_flat(flat))
    return _sparse(scan, _largest(scan, kept_count(flat.numel(), ratio)))


def sampled_threshold(flat: torch.Tensor, ratio: float, *, seed: int = 0) -> Sparse:
    """Return about ``k = max(1, ceil(ratio numel))`` elements: all above an estimated threshold.

    Args:
        flat: contiguous, of a dtype in ``FORMATS``, with at least one element.
        ratio: fraction of elements to keep, in (0, 1].
        seed: selects the elements of the sample; equal seeds give equal results.

    Returns:
        At least ``k / 2`` elements, or all nonzero ones if there are fewer; at most ``2 k``, or all
            non-finite ones if there are more. If the sample was not representative and the result
            is outside these bounds, the result of :func:`topk`.

    Raises:
        OptionError: the tensor cannot be compressed.
    """
    scan = scan_of(flat, checked_flat(flat))
    count = kept_count(flat.numel(), ratio)
    rank = max(1, round(count / flat.numel() * min(flat.numel(), SAMPLE_NUMEL)))
    low = _threshold(scan, rank, seed)
    found = scan.at_least(low, 2 * count)
    if found is None or (2 * found.found < count and low > 1):
        found = _largest(scan, count)
    return _sparse(scan, found)


def nonzeros(flat: torch.Tensor) -> Sparse:
    """Return every element that is not +0.0: a lossless form.

    Raises:
        OptionError: the tensor cannot be compressed.
    """
    scan = scan_of(flat, checked_flat(flat))
    return _sparse(scan, scan.nonzero_bits())


def nonzero_count(flat: torch.Tensor) -> int:
    """Return the number of elements that :func:`nonzeros` keeps."""
    bits = flat.view(FORMATS[flat.dtype].signed)
    # numpy counts at memory speed, two to three times as fast as torch.
    if bits.device.type == "cpu":
        return int(np.count_nonzero(bits.numpy()))
    return int(torch.count_nonzero(bits))


def _first_at(indices: torch.Tensor, edge: int) -> int:
    """Return the number of ascending indices below ``edge``, which may be out of int32's range."""
    if edge <= 0 or edge >= CHUNK_NUMEL:
        return 0 if edge <= 0 else indices.numel()
    where = torch.tensor(edge, dtype=torch.int32, device=indices.device)
    return int(torch.searchsorted(indices, where))


def _sparse(scan: DeviceScan, hits: Hits) -> Sparse:
    return Sparse.of(scan.numel, hits.positions, hits.patterns.view(scan.flat.dtype))


def _largest(scan: DeviceScan, count: int) -> Hits:
    """Return the elements of the ``count`` greatest keys, and all non-finite elements."""
    candidates = _candidates(scan, count)
    if candidates is None:
        return _by_exact_threshold(scan, count)
    # Fewer candidates are all nonzero elements: fill up with zeros.
    if candidates.found < count:
        return _merged(candidates, scan.equal(0, count - candidates.found))
    keys = scan.keys(candidates.patterns)
    threshold = scan.kth_of(keys, count)
    if threshold >= scan.form.infinity:
        return candidates.where(keys >= scan.form.infinity)
    keep = keys > threshold
    ties = torch.nonzero(keys == threshold).view(-1)
    keep[ties[: count - int(keep.sum())]] = True
    return candidates.where(keep)


def _candidates(scan: DeviceScan, count: int) -> Hits | None:
    """Return slightly more than ``count`` elements, with all of the greatest among them.

    Fewer than ``count`` only if these are all nonzero elements. None if the sample misled.
    """
    rank = count
    if scan.numel > SAMPLE_NUMEL:
        expected = count / scan.numel * SAMPLE_NUMEL
        rank = math.ceil(expected + _MARGIN * math.sqrt(expected) + _MARGIN)
        if rank > SAMPLE_NUMEL // 2:
            return None
    low = _threshold(scan, rank, 0)
    found = scan.at_least(low, _SLACK * count + SAMPLE_NUMEL)
    return found if found is not None and (found.found >= count or low == 1) else None


def _threshold(scan: DeviceScan, rank: int, seed: int) -> int:
    """Return the ``rank``-th greatest key of a sample.

    At least 1: zeros are only ever taken from the lowest index on. At most infinity's key, because
    NaN has greater ones.
    """
    sample = scan.at(sample_positions(scan.numel, seed, scan.flat.device))
    key = scan.kth_of(scan.keys(sample.patterns), rank)
    return min(max(1, key), scan.form.infinity)


def _by_exact_threshold(scan: DeviceScan, count: int) -> Hits:
    threshold = min(scan.kth(count), scan.form.infinity - 1)
    above = scan.at_least(threshold + 1, scan.numel)
    assert above is not None
    return _merged(above, scan.equal(threshold, max(0, count - above.found)))


def _merged(one: Hits, other: Hits) -> Hits:
    both = Hits(*(torch.cat(pair) for pair in zip(one, other, strict=True)))
    return both.where(both.positions.argsort())
