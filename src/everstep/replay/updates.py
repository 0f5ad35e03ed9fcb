"""Inputs of one call of an optimizer's ``step()``, decoded from a record.

Compressed gradients are kept in that form until an update needs them: a log of them is small, but
in dense form five steps of it would take more memory than the parameters and their moments. A block
of a gradient is made dense in the cache, just before the update of that block (LowDiff section
IV-C: decompression is part of recovery).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep.compress.quantized import BLOCK_NUMEL, Int8
from everstep.compress.sparse import Sparse


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Compressed gradient; represents a contiguous tensor.

    Attributes:
        form: compressed flat tensor in row-major order; checked, since it may come from outside.
        shape: shape of the tensor.
    """

    form: Sparse | Int8
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the dense tensor."""
        return self.form.dtype

    @property
    def device(self) -> torch.device:
        """Device of the form and of the dense tensor."""
        return self.form.values.device

    @property
    def layout(self) -> torch.layout:
        """Layout of the dense tensor."""
        return torch.strided

    def numel(self) -> int:
        """Return the number of elements of the dense tensor."""
        return math.prod(self.shape)

    def dense(self) -> torch.Tensor:
        """Return the tensor that training consumed, in memory of its own."""
        return self.form.dense().view(self.shape)

    def part(self, elements: slice) -> Packed:
        """Return a range of elements in row-major order, shape ``[n]``; shares memory with this
        one.

        Args:
            elements: start and stop, in range; int8 forms must start at a multiple of 256.
        """
        begin = elements.start
        end = elements.stop
        return Packed(self.form.part(begin, end), (end - begin,))

    def into(self, out: torch.Tensor) -> torch.Tensor:
        """Write the dense tensor to ``out``, flat and of a dtype that is no narrower; return it in
        its shape."""
        return self.form.dense(out).view(self.shape)

    def splits_at(self, elements: int) -> bool:
        """Return True if ranges may start at multiples of this number of elements."""
        return isinstance(self.form, Sparse) or elements % BLOCK_NUMEL == 0


Gradient = torch.Tensor | Packed


def dense(gradient: Gradient) -> torch.Tensor:
    """Return a gradient as the tensor that the optimizer consumed."""
    return gradient.dense() if isinstance(gradient, Packed) else gradient.detach()


def is_widening(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return True if ``wide`` has every value of ``narrow``: a log may leave out low bits that are
    zero."""
    if narrow == wide:
        return True
    if narrow.is_complex != wide.is_complex or narrow.is_floating_point != wide.is_floating_point:
        return False
    try:
        return torch.promote_types(narrow, wide) == wide
    except RuntimeError:  # fp8 and the like have no promotion
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Inputs of one call of an optimizer's ``step()`` (I2).

    Replay never writes to these tensors.

    Attributes:
        lsn: the state's LSN after this call; the record's number.
        optimizer: key of the optimizer in the state.
        groups: hyperparameters of each parameter group in that call, without ``"params"``. Values
            may be
            0-dim tensors (a tensor learning rate).
        gradients: by parameter name, in the parameter's shape and with the gradient's strides;
            compressed ones in the form that training consumed. An absent parameter had
            ``grad is None``: its step counter does not move, unlike with a zero gradient. To bring
            only
            some parameters to a later LSN (a multi-step base), leave the others out.
        grad_scale: from a ``GradScaler`` with a fused optimizer. The kernel divides the gradients
            by it:
            ``gradients`` are then the *scaled* ones.
        found_inf: likewise; a fused kernel does nothing if it is 1.
        lossy: the gradients are lossy copies of those that training consumed: the result is an
            approximation (I9).
        kind: name of the class whose ``step()`` it was; "" if the record does not name it.
        default_dtype: torch's default dtype in training, which ASGD computes its factors in and all
            optimizers create step counters in; None if the record does not name it.
    """

    lsn: int
    optimizer: str
    groups: tuple[Mapping[str, Any], ...]
    gradients: Mapping[str, Gradient]
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    lossy: bool = False
    kind: str = ""
    default_dtype: torch.dtype | None = None

    @property
    def skipped(self) -> bool:
        """True if a ``GradScaler`` found infinities or NaNs, so that nothing was updated.

        torch's kernels compare with 1: with parameters on several devices, ``found_inf`` is the sum
        over the devices, and at 2 they do *not* skip. An optimizer that is not fused is not called
        at all in this case, so it has no such update.
        """
        # item() synchronises with the device if the tensor is on one.
        return self.found_inf is not None and bool(self.found_inf.item() == 1)
