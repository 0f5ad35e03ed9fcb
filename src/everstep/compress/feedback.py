"""Error feedback: what compression leaves out of a gradient is added to the next one.

With ``g`` the gradient, ``e`` the residual and ``C`` the compression::

    total = g + e        form = C(total)        e = total - form

Nothing is lost: what training consumes and what stays behind add up to the total, bit for bit.
A sparse form takes elements whole, so their residual is zero; of an int8 form, and of values
rounded to a narrower dtype, the rounding error stays, and that is a floating-point number
itself.

A residual has the gradient's dtype, but at least float32: added up in bfloat16, what is less
than 1/256 of the residual would vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

import torch

from everstep.compress.floats import FORMATS
from everstep.compress.forms import Form
from everstep.compress.sparse import Sparse
from everstep.errors import StateError

__all__ = ["ErrorFeedback", "can_be_compressed", "flat_of", "write_back"]

_HOST_NUMEL = 2**17  # whole blocks of int8 forms


class ErrorFeedback:
    """Compresses gradients and keeps the residual of each.

    Args:
        compress: the compression of a flat tensor.
        enabled: False: no residuals; what compression leaves out is lost.

    Attributes:
        residuals: flat, in row-major order, by whatever the caller calls the parameter; there
            is one from the first time that a parameter's gradient is compressed.
    """

    def __init__(self, compress: Callable[[torch.Tensor], Form], *, enabled: bool) -> None:
        self._compress = compress
        self.enabled = enabled
        self.residuals: dict[Hashable, torch.Tensor] = {}

    def take(self, key: Hashable, flat: torch.Tensor) -> Form:
        """The form of a gradient and its residual, in the gradient's dtype.

        Args:
            key: what the caller calls the parameter.
            flat: the gradient, finite and in row-major order; it is not changed.

        Raises:
            StateError: if the residual is of another size or on another device.
        """
        if not self.enabled:
            return self._compress(flat)
        total = self._residual(key, flat)
        for begin, end in _parts_of(total):
            total[begin:end].add_(flat[begin:end].to(total.dtype))
        form = self._compress(total)
        if not _is_finite(form):  # the sum of finite numbers: the largest ones saturate
            limit = torch.finfo(total.dtype).max
            total.clamp_(-limit, limit)
            form = self._compress(total)
        form = form.to(flat.dtype)
        if isinstance(form, Sparse):
            positions = form.positions()
            left = total[positions] - form.values.to(total.dtype)
            total.index_copy_(0, positions, left)
        else:
            for begin, end in _parts_of(total):
                total[begin:end].sub_(form.part(begin, end).dense().to(total.dtype))
        return form

    def size_bytes_for(self, parameters: Iterable[torch.Tensor], dense_below: int) -> int:
        """What residuals of the gradients of these parameters take, once all of them are there."""
        if not self.enabled:
            return 0
        found = (p for p in parameters if can_be_compressed(p, dense_below))
        return sum(p.numel() * torch.promote_types(p.dtype, torch.float32).itemsize for p in found)

    def reserve(self, key: Hashable, flat: torch.Tensor) -> None:
        """Makes a gradient's residual of zeros, if there is none; errors as for :meth:`take`."""
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
                hint="compress anew after parameters were resized or moved",
            )
        return residual


def can_be_compressed(grad: torch.Tensor, dense_below: int) -> bool:
    """Whether it is strided, of a dtype that has forms, and not so small that it stays dense."""
    known = grad.layout == torch.strided and grad.dtype in FORMATS
    return known and grad.numel() >= max(1, dense_below)


def flat_of(grad: torch.Tensor) -> torch.Tensor:
    """A strided gradient in row-major order, whatever its strides: a view where that can be."""
    return grad.resolve_neg().reshape(-1)


def write_back(form: Form, grad: torch.Tensor, flat: torch.Tensor) -> None:
    """Puts what ``form`` stands for into ``grad``, in place: its strides stay what they are.

    Args:
        form: the compressed gradient.
        grad: the gradient.
        flat: ``flat_of(grad)``, which is written to.
    """
    form.dense(out=flat)
    if flat.data_ptr() != grad.data_ptr() or not grad.is_contiguous():
        grad.copy_(flat.view(grad.shape))


def _parts_of(flat: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Ranges so small in host memory that what is converted stays in the cache; elsewhere one.

    Operators on two dtypes at once are several times slower than converting first.
    """
    step = _HOST_NUMEL if flat.device.type == "cpu" else max(1, flat.numel())
    for begin in range(0, flat.numel(), step):
        yield begin, min(begin + step, flat.numel())


def _is_finite(form: Form) -> bool:
    telling = form.values if isinstance(form, Sparse) else form.scales
    return bool(telling.isfinite().all())
