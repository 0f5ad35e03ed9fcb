"""Training with a ``GradScaler``, as a plan sees it: every step updates.

The scaler multiplies the loss, divides the gradients (``unscale_``), looks for infinities among
them (``found_inf``), and leaves out updates that would have used them. A step that updates nothing
has no deadline that one which does has not, so a plan is made of a step that updates; and whether
one does is a question to data, of which the meta device has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

__all__ = ["UpdatingScaler"]


class UpdatingScaler(GradScaler):
    """A ``GradScaler`` that leaves no update out, for tracing.

    It runs the operators that torch's own runs in a step that updates, in their order; the scale is
    1, so that a real step stays finite.

    Args:
        device: type of the device, like ``"cuda"``.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=1.0)

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        for found_inf in optimizer_state["found_inf_per_device"].values():
            if not _without_data(found_inf):
                found_inf.item()  # a device is waited for here, which takes its time
        loss: float | None = optimizer.step(*args, **kwargs)
        return loss


def _without_data(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" or type(tensor) is not torch.Tensor
