"""Modules and optimizers within objects of the user's that are saved by their ``state_dict()``.

Torch's tutorials save a model and its optimizer in one such object. What it gives has no gradients,
so those that are there when training goes back, of a backward that is undone, are nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.state.providers.fsdp import forget_iteration

__all__ = ["forget_gradients"]


def forget_gradients(objects: Iterable[object], optimizers: Iterable[Optimizer]) -> list[str]:
    """Lets go of the gradients of what ``objects`` have as attributes, alone or in a list, tuple or
    dict; returns what could not be done, in words.

    Args:
        optimizers: of the state itself: they say what becomes of the gradients of theirs.
    """
    known = {id(one) for optimizer in optimizers for one in _parameters(optimizer)}
    notes = list[str]()
    for part in (part for value in objects for part in _parts(value)):
        parameters = [one for one in _parameters(part) if id(one) not in known]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = None
        if parameters and isinstance(part, nn.Module):
            notes += forget_iteration(part)
    return notes


def _parts(value: object) -> Iterator[nn.Module | Optimizer]:
    for found in getattr(value, "__dict__", {}).values():
        several: Iterable[object] = found if isinstance(found, (list, tuple)) else [found]
        for one in found.values() if isinstance(found, dict) else several:
            if isinstance(one, (nn.Module, Optimizer)):
                yield one


def _parameters(part: nn.Module | Optimizer) -> Iterable[torch.Tensor]:
    if isinstance(part, nn.Module):
        return part.parameters()
    found: Any = part.param_groups
    return (parameter for group in found for parameter in group["params"])
