"""Which parameters have a gradient: not what it is, which is no part of a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch.optim import Optimizer

__all__ = ["has_gradient", "who_have_gradients"]

_gradient_of = attrgetter("grad")
_layout_of = attrgetter("layout")
_STRIDED = frozenset((torch.strided,))


def has_gradient(parameter: torch.Tensor) -> bool:
    """Whether there is one that an update would consume even if it is zero: of a sparse one no
    element is."""
    gradient = parameter.grad
    return gradient is not None and gradient.layout is torch.strided


def who_have_gradients(
    optimizer: Optimizer, named: Callable[[], Sequence[tuple[str, torch.Tensor]]]
) -> list[str] | bool:
    """Names of an optimizer's parameters that have one; True: all have; False: none.

    Not while another thread may be in backward: it writes to what is read here, and holds no lock
    of Python's.

    Args:
        named: gives the parameters with their names; asked only where some have one.
    """
    lists = [group["params"] for group in optimizer.param_groups]
    gradients = map(_gradient_of, chain.from_iterable(lists))
    held = [gradient for gradient in gradients if gradient is not None]
    if not held:
        return False
    if len(held) == sum(map(len, lists)) and _STRIDED.issuperset(map(_layout_of, held)):
        return True
    return [name for name, parameter in named() if has_gradient(parameter)]
