"""Lossy copies of gradients that training does not consume: the adaptive log (TierCheck).

Eight bits per element for a small tensor; for a large one the largest elements, in float16 with
int32 indices (TierCheck section 3.2). Replay of such copies gives an approximation, marked as such
(:class:`everstep.replay.updates.Update`).

The paper's float16 values overflow beyond 65504 and vanish below 2**-25, where gradients of large
models often are. So values are scaled by a power of two, which costs no bit: the largest of a
tensor is just below 2**15, and the stored number is ``value * 2**-exponent``.

Gradients stay dense if they have no elements, contain NaN or infinity, have a dtype without forms,
or if the form would not be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from everstep.compress.feedback import INT8_BELOW, Form, adaptive, can_be_compressed, flat_of
from everstep.compress.floats import largest_magnitudes, narrowed
from everstep.compress.sparse import Sparse
from everstep.errors import FormatError

_TOP_EXPONENT = 15  # scaled magnitudes are below 2**15
_EXPONENT_MAX = 1100  # above the exponent of any float64


@dataclass(frozen=True, slots=True, eq=False)
class Lossy:
    """Lossy copy of a gradient.

    Attributes:
        form: compressed values; float16 in a sparse form.
        dtype: dtype of the gradient.
        exponent: sparse values are multiplied by 2 to this power when they are read.
    """

    form: Form
    dtype: torch.dtype
    exponent: int = 0


def lossy_copies(
    gradients: Mapping[int, torch.Tensor], ratio: float, *, int8_below: int = INT8_BELOW
) -> dict[int, Lossy]:
    """Return lossy copies of the gradients that can be compressed.

    Args:
        gradients: strided gradients by number.
        ratio: fraction of a large gradient that is kept, in (0, 1].
        int8_below: gradients with fewer elements are small.
    """
    known = {
        key: gradient.detach()
        for key, gradient in gradients.items()
        if can_be_compressed(gradient, 1)
    }
    found = {}
    for (key, gradient), largest in zip(
        known.items(), largest_magnitudes(list(known.values())), strict=True
    ):
        if not math.isfinite(largest):
            continue
        copy = _copy(gradient, largest, ratio, int8_below)
        if copy.form.size_bytes < gradient.nbytes:
            found[key] = copy
    return found


def _copy(gradient: torch.Tensor, largest: float, ratio: float, int8_below: int) -> Lossy:
    form = adaptive(flat_of(gradient), ratio, int8_below=int8_below)
    if not isinstance(form, Sparse):
        return Lossy(form, gradient.dtype)
    exponent = math.frexp(largest)[1] - _TOP_EXPONENT if largest else 0
    scaled = _times_power(form.values, -exponent)
    return Lossy(replace(form, values=narrowed(scaled, torch.float16)), gradient.dtype, exponent)


def restored_values(values: torch.Tensor, dtype: torch.dtype, exponent: int) -> torch.Tensor:
    """Return the values of a sparse form as they are consumed, in ``dtype``.

    Raises:
        FormatError: dtype or exponent cannot be those of a lossy copy.
    """
    # dtype and exponent come from a record: ldexp() raises if the exponent is far outside the
    # range.
    known = values.dtype == torch.float16 and isinstance(exponent, int)
    if not known or not dtype.is_floating_point or abs(exponent) > _EXPONENT_MAX:
        raise FormatError(f"not a lossy gradient: {values.dtype} values, exponent {exponent!r}")
    wide = torch.promote_types(dtype, torch.float32)
    scaled = _times_power(values.to(wide), exponent)
    limit = torch.finfo(wide).max  # rounding to float16 may have reached 2**16
    return narrowed(scaled.clamp_(-limit, limit), dtype)


def _times_power(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return ``values * 2**exponent``, in two steps: the power alone may overflow."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    half = exponent // 2
    return wide * math.ldexp(1.0, half) * math.ldexp(1.0, exponent - half)
