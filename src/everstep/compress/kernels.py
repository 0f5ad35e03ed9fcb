"""Triton kernels for CUDA: threshold and compaction, int8 and back.

Results are bit-identical to the torch references. Two passes without atomics: the first counts the
kept elements of each block, a prefix sum gives each block its place, the second pass writes. So
positions ascend whatever the order of the blocks. TierCheck section 3.2 fuses both into one pass,
whose order varies between runs.

Numbers are compared as integers (:mod:`everstep.compress.floats`), so bfloat16 is never converted
for a sparse form. Import this module only where triton is installed.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call"
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from everstep.compress.sparse import DeviceScan, Hits

_BLOCK = 4096  # elements of one program
_ROWS = 16  # int8 blocks of one program


class TritonScan(DeviceScan):
    """Scan by Triton kernels; operations without a full pass use torch."""

    def at_least(self, key: int, most: int) -> Hits | None:
        bits = self.flat.view(self.form.signed)
        blocks = triton.cdiv(self.numel, _BLOCK)
        counts = torch.empty(blocks, dtype=torch.int32, device=bits.device)
        constants: dict[str, Any] = {"MASK": self.form.mask, "BLOCK": _BLOCK}
        # Triton launches on the current device, which need not be the tensor's.
        with torch.cuda.device_of(bits):
            _count[(blocks,)](bits, counts, self.numel, key, **constants)
        ends = counts.cumsum(0, dtype=torch.int64)
        # Synchronises with the device: the sizes of the results depend on it.
        total = int(ends[-1])
        if total > most:
            return None
        positions = torch.empty(total, dtype=torch.int64, device=bits.device)
        patterns = torch.empty(total, dtype=bits.dtype, device=bits.device)
        begins = ends - counts
        with torch.cuda.device_of(bits):
            _compact[(blocks,)](bits, begins, positions, patterns, self.numel, key, **constants)
        return Hits(positions, patterns)


def quantize(rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, limit: float) -> None:
    """Write int8 ``values`` and float32 ``scales`` of ``rows``.

    Args:
        rows: contiguous, of 16 or 32 bits per element; the number of columns is a power of 2.
        values: int8, in the shape of ``rows``.
        scales: float32, one per row.
        limit: larger magnitudes count as ``limit`` when the scale is computed.
    """
    count, columns = rows.shape
    grid = (triton.cdiv(count, _ROWS),)
    with torch.cuda.device_of(rows):
        _quantize[grid](rows, values, scales, count, limit, COLUMNS=columns, ROWS=_ROWS)


def dequantize(values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``values * scales`` to ``out``, float32; shapes as in :func:`quantize`."""
    count, columns = values.shape
    grid = (triton.cdiv(count, _ROWS),)
    with torch.cuda.device_of(values):
        _dequantize[grid](values, scales, out, count, COLUMNS=columns, ROWS=_ROWS)


@triton.jit
def _count(bits, counts, numel, low, MASK: tl.constexpr, BLOCK: tl.constexpr):
    # 64 bits: with up to 2**31 - 1 elements the last block reaches past the end of int32.
    program = tl.program_id(0).to(tl.int64)
    places = program * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(bits + places, mask=places < numel, other=0) & MASK
    hit = (keys >= low) & (places < numel)
    tl.store(counts + program, tl.sum(hit.to(tl.int32), axis=0))


@triton.jit
def _compact(
    bits, begins, positions, patterns, numel, low, MASK: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    places = program * BLOCK + tl.arange(0, BLOCK)
    pattern = tl.load(bits + places, mask=places < numel, other=0)
    hit = ((pattern & MASK) >= low) & (places < numel)
    into = tl.load(begins + program) + tl.cumsum(hit.to(tl.int32), axis=0) - 1
    tl.store(positions + into, places, mask=hit)
    tl.store(patterns + into, pattern, mask=hit)


@triton.jit
def _quantize(rows, values, scales, count, limit, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row[:, None] < count
    x = tl.load(rows + places, mask=inside, other=0.0).to(tl.float32)
    # Compared as integers: a maximum of floats may drop NaN.
    key = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    # Correctly rounded divisions: Triton's default one is approximate, and bits must equal torch's.
    scale = tl.div_rn(tl.minimum(key.to(tl.float32, bitcast=True), limit), 127.0)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)  # the smallest normal number
    scale = tl.where(key >= 0x7F800000, float("nan"), scale)
    usable = scale > 0.0
    quotient = tl.div_rn(x, tl.where(usable, scale, 1.0)[:, None])
    # Adding 1.5 * 2**23, where float32 numbers are 1 apart, rounds to nearest, ties to even.
    rounded = (quotient + 12582912.0) - 12582912.0
    q = tl.where(usable[:, None], rounded, 0.0).to(tl.int8)
    tl.store(scales + row, scale, mask=row < count)
    tl.store(values + places, q, mask=inside)


@triton.jit
def _dequantize(values, scales, out, count, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row[:, None] < count
    scale = tl.load(scales + row, mask=row < count, other=0.0)
    q = tl.load(values + places, mask=inside, other=0).to(tl.float32)
    tl.store(out + places, q * scale[:, None], mask=inside)
