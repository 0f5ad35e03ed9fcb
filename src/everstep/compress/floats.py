"""Floating-point numbers as integers that sort by magnitude.

Without its sign bit, the bit pattern of an IEEE number grows with its magnitude: zero, subnormal
numbers, normal ones, infinity, NaN. This integer is the element's *key*. Comparing keys instead of
values places NaN and infinity at the top, needs no conversion of bfloat16, and gives the same
result on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from everstep.config import is_number
from everstep.errors import OptionError


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Bit pattern of a floating-point dtype.

    Attributes:
        unsigned: numpy's unsigned integer of the same width.
        signed: torch's signed integer of the same width.
        infinity: key of infinity; non-finite elements have this key or a greater one.
        mask: all bits but the sign: ``bits & mask`` is the key.
    """

    unsigned: type[np.unsignedinteger[Any]]
    signed: torch.dtype
    infinity: int
    mask: int


FORMATS: Final = {
    torch.float16: FloatFormat(np.uint16, torch.int16, 0x7C00, 2**15 - 1),
    torch.bfloat16: FloatFormat(np.uint16, torch.int16, 0x7F80, 2**15 - 1),
    torch.float32: FloatFormat(np.uint32, torch.int32, 0x7F80_0000, 2**31 - 1),
    torch.float64: FloatFormat(np.uint64, torch.int64, 0x7FF0_0000_0000_0000, 2**63 - 1),
}
"""The dtypes that can be compressed."""

NUMEL_MAX: Final = 2**31 - 1
"""Most elements of a tensor that can be compressed: positions, and their end, fit into int32."""


def checked_flat(flat: torch.Tensor) -> FloatFormat:
    """Return the format of a tensor that can be compressed.

    Raises:
        OptionError: it is not contiguous and one-dimensional, is empty or too long, or has
            another dtype.
    """
    if flat.dtype not in FORMATS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORMATS)
        raise OptionError(f"{flat.dtype} cannot be compressed; these can: {known}")
    if flat.layout != torch.strided or flat.dim() != 1 or not flat.is_contiguous():
        raise OptionError(
            f"only a flat contiguous tensor can be compressed, not one of shape {list(flat.shape)}",
            hint="tensor.reshape(-1)",
        )
    if not 0 < flat.numel() <= NUMEL_MAX:
        raise OptionError(f"a tensor of {flat.numel()} elements cannot be compressed")
    return FORMATS[flat.dtype]


def kept_count(numel: int, ratio: float) -> int:
    """Return the number of elements that a sparse form keeps: ``max(1, ceil(ratio numel))``.

    Raises:
        OptionError: the ratio is outside (0, 1].
    """
    if not is_number(ratio) or not 0.0 < ratio <= 1.0:
        raise OptionError(f"ratio must be in (0, 1], not {ratio!r}")
    return min(numel, max(1, math.ceil(ratio * numel)))


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values`` in another dtype, rounded to nearest; finite values saturate and stay
    finite.

    Non-finite values stay, and values too small for ``dtype`` become zero.
    """
    if values.dtype == dtype:
        return values
    there = values.to(dtype)
    # No finite value overflows in a dtype of the same or a larger range.
    if torch.finfo(dtype).max >= torch.finfo(values.dtype).max:
        return there
    limit = torch.finfo(dtype).max
    overflown = there.isinf() & values.isfinite()
    return torch.where(overflown, there.sign() * limit, there)


def largest_magnitudes(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest magnitude of each strided floating-point or complex tensor.

    NaN if a tensor contains one, 0 if it is empty. One pass, and one synchronisation with the
    device.
    """
    found = [_largest_magnitude(tensor) for tensor in tensors]
    if not found:
        return []
    magnitudes: list[float] = torch.stack([one.to(found[0].device) for one in found]).tolist()
    return magnitudes


def _largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.numel():
        largest = tensor.new_zeros(())
    elif tensor.device.type == "cpu":  # ten times as fast as a norm
        # Both aminmax() and maximum() propagate NaN.
        low, high = torch.aminmax(tensor)
        largest = torch.maximum(-low, high)
    else:
        largest = torch.linalg.vector_norm(tensor, float("inf"))
    return largest.to(torch.promote_types(largest.dtype, torch.float32))
