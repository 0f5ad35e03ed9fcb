"""Which parameters have a gradient: not what it is, which is no part of a state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = [
    "discard_gradients",
    "discard_unreduced_gradients",
    "has_gradient",
    "parameters_with_gradient",
    "unreduced_gradients",
]

_gradient_of = attrgetter("grad")
_layout_of = attrgetter("layout")
_STRIDED = frozenset((torch.strided,))


def has_gradient(parameter: torch.Tensor) -> bool:
    """Whether there is one that an update would consume even if it is zero: of a sparse one no
    element is."""
    gradient = parameter.grad
    return gradient is not None and gradient.layout is torch.strided


def parameters_with_gradient(
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


_UNKNOWN = (
    "this version of torch keeps gradients that fully_shard has not reduced where everstep does "
    "not look: if some were being accumulated, they are added to those of the next step"
)
_BROKEN_OFF = (
    "fully_shard was broken off in a forward or backward, which this version of torch has no way "
    "to clean up behind (FSDPModule.reset_iter_state()): its next gradients may be wrong"
)


def unreduced_gradients(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients that the next backward will be added to, each with a parameter that it is of, as an
    optimizer has that."""
    try:
        for group in _groups(_states(module)):
            for held in group.fsdp_params:
                gathered = _unsharded_parameter(held)
                found = held.unsharded_accumulated_grad, getattr(gathered, "grad", None)
                for gradient in (*found, group._partial_reduce_output):
                    if gradient is not None:
                        yield held.sharded_param, gradient
    except AttributeError:  # whoever goes back is told
        return


def discard_unreduced_gradients(module: nn.Module) -> list[str]:
    """Lets go of these gradients, and of an iteration that an error has broken off; returns what
    could not be done, in words."""
    try:
        states = _states(module)
        for group in _groups(states):
            for held in group.fsdp_params:
                if held.unsharded_accumulated_grad is not None:
                    held.unsharded_accumulated_grad = None
                if (gathered := _unsharded_parameter(held)) is not None:
                    gathered.grad = None
            if group._partial_reduce_output is not None:
                group._partial_reduce_output = None
        return _reset(states)
    except AttributeError:
        return [_UNKNOWN]


def _reset(states: list[Any]) -> list[str]:
    for root in states:
        if not root._is_root:  # None: there was no forward yet
            continue
        if hasattr(root, "_reset_iter_state"):
            root._reset_iter_state()
        elif any(one._training_state.name != "IDLE" for one in (*states, *_groups(states))):
            return [_BROKEN_OFF]
    return []


def _states(module: nn.Module) -> list[Any]:
    """What FSDP2 keeps for each of the modules that it shards: those within ``module``, and those
    that are of one root with them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: nobody uses it
    if fsdp is None:
        return []
    parts: list[Any] = [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]
    found = {}
    for part in parts:
        state = part._get_fsdp_state()
        for one in (state, *state._state_ctx.all_states):
            found[id(one)] = one
    return list(found.values())


def _groups(states: list[Any]) -> list[Any]:
    found: list[Any] = []
    for state in states:
        if hasattr(state, "_fsdp_param_groups"):
            found += state._fsdp_param_groups
        elif state._fsdp_param_group is not None:  # older versions of torch
            found.append(state._fsdp_param_group)
    return found


def _unsharded_parameter(held: Any) -> Any:
    """The parameter that forwards compute with; None: it was never gathered."""
    if not held.all_gather_outputs and not hasattr(held, "_unsharded_param"):
        return None
    return held._unsharded_param


def discard_gradients(objects: Iterable[object], optimizers: Iterable[Optimizer]) -> list[str]:
    """Lets go of the gradients of what ``objects`` have as attributes, alone or in a list, tuple or
    dict; returns what could not be done, in words.

    Args:
        optimizers: of the state itself: they say what becomes of the gradients of theirs.
    """
    known = {id(one) for optimizer in optimizers for one in _parameters(optimizer)}
    notes = list[str]()
    for part in (part for value in objects for part in _attributes_of(value)):
        parameters = [one for one in _parameters(part) if id(one) not in known]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = None
        if parameters and isinstance(part, nn.Module):
            notes += discard_unreduced_gradients(part)
    return notes


def _attributes_of(value: object) -> Iterator[nn.Module | Optimizer]:
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
