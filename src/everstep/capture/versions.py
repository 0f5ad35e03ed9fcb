"""Version counters: who has written to a tensor in place, at least as far as torch tells.

They are hints and no proof: they do not move for ``.data`` writes, NumPy, fused kernels and
collectives. But where one has moved between two updates, something was written (I8).
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch

__all__ = ["Versions"]

_VERSION = attrgetter("_version")


class Versions:
    """The counters of some tensors.

    Args:
        tensors: by name. Those that share their storage with others are left out, because they
            may share the counter as well; so are inference tensors, which have none.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        counted = {name: tensor for name, tensor in tensors.items() if _is_counted(tensor)}
        self._names, self._tensors = tuple(counted), tuple(counted.values())

    def now(self) -> list[int]:
        """The counters."""
        return list(map(_VERSION, self._tensors))

    def moved(self, since: list[int]) -> str | None:
        """The name of a tensor that was written to since they were so; None if there is none."""
        now = self.now()
        if now == since:
            return None
        pairs = zip(self._names, now, since, strict=True)
        return next(name for name, version, seen in pairs if version != seen)


def _is_counted(tensor: torch.Tensor) -> bool:
    if tensor.is_inference() or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
