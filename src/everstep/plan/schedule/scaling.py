"""A ``GradScaler`` for tracing, which never skips an update.

A scaler multiplies the loss, divides the gradients (``unscale_``), looks for infinities among them
(``found_inf``), and skips updates that would use them. A step with an update has all deadlines of a
step without, so a plan is made for a step with one. The decision depends on data, which the meta
device does not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

__all__ = ["UpdatingScaler"]


class UpdatingScaler(GradScaler):
    """A ``GradScaler`` that never skips an update.

    It runs the operators of torch's own scaler in a step with an update, in the same order. The
    scale is 1, so that a real step stays finite.

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
                found_inf.item()  # torch synchronizes with the device here, so the trace does, too
        loss: float | None = optimizer.step(*args, **kwargs)
        return loss


def _without_data(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" or type(tensor) is not torch.Tensor
