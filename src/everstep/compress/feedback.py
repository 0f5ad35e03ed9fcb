"""Error feedback: the error of compressing a gradient is added to the next one.

With ``g`` the gradient, ``e`` the residual and ``C`` the compression::

    total = g + e        form = C(total)        e = total - form

Nothing is lost: the consumed form and the residual add up to the total, bit for bit. A sparse form
keeps elements exactly, so their residual is zero; with an int8 form, and with values rounded to a
narrower dtype, the residual is the rounding error, which is itself a floating-point number.

A residual has the gradient's dtype, but at least float32: accumulated in bfloat16, contributions
below 1/256 of the residual would vanish.

Kinds of compression by name, as users and the gradient log choose them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, TypeAlias

import torch

from everstep.compress.floats import FORMATS, NUMEL_MAX, kept_count
from everstep.compress.quantized import Int8, int8
from everstep.compress.sparse import Sparse, sampled_threshold, topk
from everstep.config import nearest
from everstep.errors import MismatchError, OptionError, StateError

Form: TypeAlias = Sparse | Int8
"""A compressed flat tensor."""

KINDS: Final = ("topk", "threshold", "int8", "adaptive")

INT8_BELOW: Final = 100_000
"""Elements below which :func:`adaptive` quantizes (TierCheck section 3.2 and its defaults)."""


def adaptive(flat: torch.Tensor, ratio: float = 0.01, *, int8_below: int = INT8_BELOW) -> Form:
    """int8 for small tensors, sampled-threshold sparse for large ones (TierCheck section 3.2).

    TierCheck's log has float16 values: ``adaptive(flat).to(torch.float16)``, which is lossy.

    Args:
        flat: contiguous, of a dtype in ``FORMATS``, with at least one element.
        ratio: the share that is kept of a large tensor, in (0, 1].
        int8_below: tensors with fewer elements are small.

    Raises:
        OptionError: for what cannot be compressed.
    """
    return int8(flat) if flat.numel() < int8_below else sampled_threshold(flat, ratio)


def compression(kind: str, ratio: float) -> Callable[[torch.Tensor], Form]:
    """The function that compresses a flat tensor.

    Args:
        kind: one of ``KINDS``.
        ratio: the share of elements that sparse forms keep, in (0, 1].

    Raises:
        OptionError: for an unknown kind or a ratio that cannot work.
    """
    # Called for its check: a wrong ratio is refused here and not in the first step.
    kept_count(1, ratio)
    kinds: dict[str, Callable[[torch.Tensor], Form]] = {
        "topk": partial(topk, ratio=ratio),
        "threshold": partial(sampled_threshold, ratio=ratio),
        "int8": int8,
        "adaptive": partial(adaptive, ratio=ratio),
    }
    if kind not in kinds:
        guess = nearest(kind, KINDS)
        raise OptionError(
            f"no compression {kind!r}; there are: {', '.join(KINDS)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    return kinds[kind]


_HOST_NUMEL = 2**17  # a multiple of the block of int8 forms


class ErrorFeedback:
    """Compress gradients and keep the residual of each.

    Args:
        compress: compresses a flat tensor.
        enabled: False: no residuals; the compression error is lost.

    Attributes:
        residuals: flat tensors in row-major order, by the caller's key of the parameter; each
            exists from the first compression of the parameter's gradient.
    """

    def __init__(self, compress: Callable[[torch.Tensor], Form], *, enabled: bool) -> None:
        self._compress = compress
        self.enabled = enabled
        self.residuals: dict[Hashable, torch.Tensor] = {}

    def take(self, key: Hashable, flat: torch.Tensor) -> Form:
        """Return the form of a gradient plus its residual, in the gradient's dtype.

        Args:
            key: the caller's key of the parameter.
            flat: gradient, finite and in row-major order; not modified.

        Raises:
            StateError: the residual has another size or device.
        """
        if not self.enabled:
            return self._compress(flat)
        # Computed in place, without a temporary of the gradient's size: the residual's memory holds
        # the sum first, and at the end the compression error.
        total = self._residual(key, flat)
        for begin, end in _ranges_of(total):
            total[begin:end].add_(flat[begin:end].to(total.dtype))
        form = self._compress(total)
        # A sum of finite numbers may overflow: let the largest ones saturate.
        if not _is_finite(form):
            limit = torch.finfo(total.dtype).max
            total.clamp_(-limit, limit)
            form = self._compress(total)
        # Rounded before the error is computed, so that the residual includes the rounding.
        form = form.to(flat.dtype)
        if isinstance(form, Sparse):
            positions = form.positions()
            left = total[positions] - form.values.to(total.dtype)
            total.index_copy_(0, positions, left)
        else:
            for begin, end in _ranges_of(total):
                total[begin:end].sub_(form.part(begin, end).dense().to(total.dtype))
        return form

    def size_bytes_for(self, parameters: Iterable[torch.Tensor], dense_below: int) -> int:
        """Return the bytes of the residuals of these parameters, once all of them exist."""
        if not self.enabled:
            return 0
        found = (p for p in parameters if can_be_compressed(p, dense_below))
        return sum(p.numel() * torch.promote_types(p.dtype, torch.float32).itemsize for p in found)

    def reserve(self, key: Hashable, flat: torch.Tensor) -> None:
        """Create a zero residual for a gradient if there is none; errors as for :meth:`take`."""
        if self.enabled:
            self._residual(key, flat)

    def _residual(self, key: Hashable, flat: torch.Tensor) -> torch.Tensor:
        residual = self.residuals.get(key)
        if residual is None:
            dtype = torch.promote_types(flat.dtype, torch.float32)
            residual = torch.zeros(flat.numel(), dtype=dtype, device=flat.device)
            self.residuals[key] = residual
        elif residual.shape != flat.shape or residual.device != flat.device:
            raise StateError(
                f"a gradient of {flat.numel()} elements on {flat.device} has a residual of "
                f"{residual.numel()} on {residual.device}",
                hint="make a new Compressor (or DDPCompression) after parameters are resized or "
                "moved",
            )
        return residual


def can_be_compressed(grad: torch.Tensor, dense_below: int) -> bool:
    """Return True if a gradient is strided, of a dtype with forms, and has at least ``dense_below``
    elements, and not too many.
    """
    known = grad.layout == torch.strided and grad.dtype in FORMATS
    return known and max(1, dense_below) <= grad.numel() <= NUMEL_MAX


def flat_of(grad: torch.Tensor) -> torch.Tensor:
    """Return a strided gradient in row-major order: a view if its strides allow it."""
    return grad.resolve_neg().reshape(-1)


def refuse_residuals(whose: str, mismatches: Sequence[tuple[str, str]]) -> None:
    """Refuse saved residuals that do not fit, if there are any mismatches.

    Raises:
        MismatchError: lists them.
    """
    if mismatches:
        listed = "\n".join(f"  {name}: {problem}" for name, problem in mismatches)
        raise MismatchError(
            f"the residuals belong to {whose}:\n{listed}", mismatches=tuple(mismatches)
        )


def _ranges_of(flat: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges small enough that converted values stay in the cache of the host; on a device,
    one range.

    Operators on two dtypes are several times slower than converting first.
    """
    step = _HOST_NUMEL if flat.device.type == "cpu" else max(1, flat.numel())
    for begin in range(0, flat.numel(), step):
        yield begin, min(begin + step, flat.numel())


def _is_finite(form: Form) -> bool:
    telling = form.values if isinstance(form, Sparse) else form.scales
    return bool(telling.isfinite().all())
