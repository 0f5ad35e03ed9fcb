"""A device that has no lane of its own, played: what lies there is no memory of the host's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["DEVICE", "Elsewhere", "elsewhere"]

DEVICE = torch.device("xpu", 0)


class Elsewhere(torch.Tensor):
    """A tensor there. Who asks for its address reads what is not there, and what computes with it
    finds all tensors on one device, or fails, as with a real one; to copy is allowed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE
        if func == torch.Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return False
        assert func != torch.Tensor.data_ptr, "an address of the host's memory"
        if func == torch.cat:
            _are_together([*args[0], *filter(_is_tensor, kwargs.values())])
        found = super().__torch_function__(func, types, args, kwargs)
        return _back(found) if func == torch.Tensor.cpu else found


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, there."""
    return tensor.detach().as_subclass(Elsewhere)


def _are_together(tensors: Iterable[torch.Tensor]) -> None:
    if len({tensor.device for tensor in tensors}) > 1:
        raise RuntimeError("Expected all tensors to be on the same device")


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _back(found: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        copied: torch.Tensor = found.clone().as_subclass(torch.Tensor)
    return copied
