"""Eight bits per element: symmetric integers with one scale per block.

TierCheck section 3.2 uses this form for small tensors, whose sparse form would be mostly indices.
In a block of ``BLOCK_NUMEL`` elements with largest magnitude ``m``::

    scale = m / 127        q = round(x / scale)        x is read back as q * scale

rounded to nearest, ties to even, with true divisions: the same bits on every device. The error of
an element is at most half its block's scale.

- A block of zeros has scale 0 and reads back as zeros. So does one with ``m < 127 * 2**-126``,
  whose scale would be subnormal, which some devices flush to zero.
- A block with NaN or infinity has scale NaN and reads back as NaN throughout: non-finite values
  never become finite.

float16, bfloat16 and float32 are computed in float32 and have float32 scales; float64 has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from everstep.compress.floats import FORMATS, checked_flat
from everstep.compress.sparse import kernels_for
from everstep.errors import FormatError, OptionError

BLOCK_NUMEL: Final = 256
"""Elements that share a scale: 4 bytes of scale for 256 of values."""

_LEVELS = 127
_HOST_BLOCKS = 2**10  # at a time, so that temporaries stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Int8:
    """Flat tensor with eight bits per element.

    Attributes:
        values: int8, one per element, in [-127, 127].
        scales: float32 (float64 for float64 tensors), one per block; the last block may be shorter
            than ``BLOCK_NUMEL``.
        dtype: dtype of :meth:`dense`.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.values.numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def dense(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the flat tensor.

        Args:
            out: flat tensor of ``numel`` elements to write to and return; values are rounded to
                ``dtype`` first, then to its dtype.

        Raises:
            OptionError: ``out`` has another size.
        """
        if out is None:
            out = torch.empty(self.numel, dtype=self.dtype, device=self.values.device)
        elif out.shape != (self.numel,):
            raise OptionError(f"out has shape {list(out.shape)}, not [{self.numel}]")
        wide = self.scales.dtype
        # Finite values must stay finite in a narrower dtype; NaN passes, and infinity cannot occur.
        limit = min(torch.finfo(dtype).max for dtype in (wide, self.dtype, out.dtype))
        kernels = kernels_for(out) if wide == torch.float32 else None
        for target, values, scales in _rows(out, self):
            direct = self.dtype == out.dtype == wide
            part = target if direct else torch.empty_like(target, dtype=wide)
            if kernels is not None and values.shape[1] == BLOCK_NUMEL:
                kernels.dequantize(values, scales, part)
            else:
                part.copy_(values).mul_(scales[:, None])
            if limit < torch.finfo(wide).max:
                part.clamp_(-limit, limit)
            if not direct:
                target.copy_(part.to(self.dtype))
        return out

    def part(self, begin: int, end: int) -> Int8:
        """Return elements ``[begin, end)`` as views; ``begin`` must be the start of a block."""
        assert begin % BLOCK_NUMEL == 0
        scales = self.scales[begin // BLOCK_NUMEL : -(-end // BLOCK_NUMEL)]
        return Int8(self.values[begin:end], scales, self.dtype)

    def to(self, dtype: torch.dtype) -> Int8:
        """Return the same form of a tensor of another dtype; :meth:`dense` rounds to it."""
        return replace(self, dtype=dtype)

    def check(self) -> None:
        """Check the components of a form from an untrusted source.

        Raises:
            FormatError: their dtypes or shapes do not match.
        """
        scales = torch.float64 if self.dtype == torch.float64 else torch.float32
        blocks = -(-self.numel // BLOCK_NUMEL)
        if (
            self.dtype not in FORMATS
            or self.values.dtype != torch.int8
            or self.values.dim() != 1
            or self.scales.dtype != scales
            or self.scales.shape != (blocks,)
        ):
            raise FormatError("values and scales of an int8 gradient differ in dtype or shape")


def int8(flat: torch.Tensor) -> Int8:
    """Return the int8 form of a tensor.

    Args:
        flat: contiguous, of a dtype in ``FORMATS``, with at least one element.

    Raises:
        OptionError: the tensor cannot be compressed.
    """
    checked_flat(flat)
    wide = torch.promote_types(flat.dtype, torch.float32)
    blocks = -(-flat.numel() // BLOCK_NUMEL)
    form = Int8(
        torch.empty(flat.numel(), dtype=torch.int8, device=flat.device),
        torch.empty(blocks, dtype=wide, device=flat.device),
        flat.dtype,
    )
    kernels = kernels_for(flat) if wide == torch.float32 else None
    for rows, values, scales in _rows(flat, form):
        if kernels is not None and rows.shape[1] == BLOCK_NUMEL:
            kernels.quantize(rows, values, scales, _largest_scaled(wide))
        else:
            wide_rows = rows.to(wide)
            scales.copy_(_scales(wide_rows))
            _quantize(wide_rows, scales, values)
    return form


def _largest_scaled(dtype: torch.dtype) -> float:
    """Return slightly less than the maximum: 127 times its scale must not round to infinity."""
    info = torch.finfo(dtype)
    return info.max * (1 - 8 * info.eps)


def _scales(rows: torch.Tensor) -> torch.Tensor:
    info = torch.finfo(rows.dtype)
    form = FORMATS[rows.dtype]
    # By keys: NaN has the greatest one. Ten times as fast as a norm.
    largest = (rows.view(form.signed) & form.mask).amax(dim=1).view(rows.dtype)
    limited = largest.clamp(max=_largest_scaled(rows.dtype))
    # Divide by a tensor: CUDA replaces division by a scalar with multiplication by its inverse,
    # which rounds differently.
    scale = torch.where(largest <= info.max, limited, torch.nan) / limited.new_full((), _LEVELS)
    return torch.where(scale < info.tiny, 0.0, scale)


def _quantize(rows: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    # Division by infinity gives 0. A scale of 0 or NaN would give NaN or infinity.
    divisors = torch.where(scales > 0, scales, torch.inf)
    values.copy_((rows / divisors[:, None]).round_())
    # The conversion of NaN to an integer depends on the processor.
    unusable = scales.isnan()
    # On a device always: any() would wait for it.
    if scales.device.type != "cpu" or bool(unusable.any()):
        values.masked_fill_(unusable[:, None], 0)


def _rows(
    flat: torch.Tensor, form: Int8
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield full blocks as rows, some at a time, of the tensor, its values and its scales; then the
    rest as a shorter row. On a device all full blocks come at once.
    """
    blocks = flat.numel() // BLOCK_NUMEL
    whole = blocks * BLOCK_NUMEL
    tensor = flat[:whole].view(-1, BLOCK_NUMEL)
    values = form.values[:whole].view(-1, BLOCK_NUMEL)
    step = _HOST_BLOCKS if flat.device.type == "cpu" else max(1, blocks)
    for begin in range(0, blocks, step):
        end = min(begin + step, blocks)
        yield tensor[begin:end], values[begin:end], form.scales[begin:end]
    if whole < flat.numel():
        yield flat[None, whole:], form.values[None, whole:], form.scales[blocks:]
