"""Inputs of one call of an optimizer's ``step()``, decoded from a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep.replay.packed import Gradient

__all__ = ["Update"]


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
        return self.found_inf is not None and bool(self.found_inf.item() == 1)
