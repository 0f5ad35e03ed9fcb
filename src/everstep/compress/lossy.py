"""Lossy copies of gradients, which training does not consume: the adaptive log (TierCheck).

Eight bits for each element of a small tensor; of a large one the largest elements, in float16
with int32 indices (TierCheck section 3.2). Replay of such copies gives an approximation, and says
so (:class:`everstep.replay.updates.Update`).

The paper's float16 values overflow beyond 65504, and vanish below 2**-25, where gradients of
large models often are. So values are scaled by a power of two, which costs no bit: the largest
of a tensor lies just below 2**15, and what is stored is ``value * 2**-exponent``.

What no form stands for is left dense: no elements, NaN or infinity among them, dtypes that have
no form, and tensors whose form would not be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from everstep.compress.feedback import can_be_compressed, flat_of
from everstep.compress.floats import largest_magnitudes, narrowed
from everstep.compress.forms import INT8_BELOW, Form, adaptive
from everstep.compress.sparse import Sparse
from everstep.errors import FormatError

__all__ = ["Lossy", "lossy_copies", "restored_values"]

_TOP_EXPONENT = 15  # scaled magnitudes are below 2**15
_EXPONENT_MAX = 1100  # of any float64, with room


@dataclass(frozen=True, slots=True, eq=False)
class Lossy:
    """A lossy copy of a gradient.

    Attributes:
        form: float16 values in a sparse one.
        dtype: of the gradient.
        exponent: of the factor that sparse values are to be multiplied by, a power of two.
    """

    form: Form
    dtype: torch.dtype
    exponent: int = 0


def lossy_copies(
    gradients: Mapping[int, torch.Tensor], ratio: float, *, int8_below: int = INT8_BELOW
) -> dict[int, Lossy]:
    """Lossy copies of those gradients that have any.

    Args:
        gradients: strided, by any number.
        ratio: the share of a large one that is kept, in (0, 1].
        int8_below: of fewer elements is a small one.
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
    """The values of a sparse form as they are consumed, in ``dtype``.

    Raises:
        FormatError: these are not what a lossy copy has.
    """
    known = values.dtype == torch.float16 and isinstance(exponent, int)
    if not known or not dtype.is_floating_point or abs(exponent) > _EXPONENT_MAX:
        raise FormatError(f"no lossy gradient: {values.dtype} values, exponent {exponent!r}")
    wide = torch.promote_types(dtype, torch.float32)
    scaled = _times_power(values.to(wide), exponent)
    limit = torch.finfo(wide).max  # the largest one may have been rounded up to a power of two
    return narrowed(scaled.clamp_(-limit, limit), dtype)


def _times_power(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """``values * 2**exponent``, in two steps: the power alone may be out of the dtype's range."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    half = exponent // 2
    return wide * math.ldexp(1.0, half) * math.ldexp(1.0, exponent - half)
