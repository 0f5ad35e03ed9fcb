"""Gradients, which are not part of a state: find those that exist, and discard them on restore.

FSDP2 (``fully_shard``) keeps gradients that it has not reduced yet in places where no parameter has
them. After a backward with ``set_requires_gradient_sync(False)`` they are in the unsharded
parameter, or beside it in the dtype of the reduction; with ``set_requires_all_reduce(False)``, in
the group of parameters. ``zero_grad()`` does not reach them. Private names of torch are used,
because there are no public ones; for a version of torch without these names, the notes of a restore
mention it.

torch's tutorials save a model and its optimizer in one object with ``state_dict()``, which has no
gradients. On restore, existing gradients of such models belong to a backward that is undone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_gradient_of = attrgetter("grad")
_layout_of = attrgetter("layout")
_STRIDED = frozenset((torch.strided,))


def has_gradient(parameter: torch.Tensor) -> bool:
    """Return True if an update would consume a gradient of the parameter even if it is all
    zeros; a sparse gradient of zeros has no elements."""
    gradient = parameter.grad
    return gradient is not None and gradient.layout is torch.strided


def parameters_with_gradient(
    optimizer: Optimizer, named: Callable[[], Sequence[tuple[str, torch.Tensor]]]
) -> list[str] | bool:
    """Return names of an optimizer's parameters that have a gradient; True: all have; False: none.

    Must not run while another thread may be in backward, which writes to ``.grad`` without Python's
    lock.

    Args:
        optimizer: the optimizer.
        named: returns the parameters with their names; called only if some have a gradient.
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
    "everstep cannot find unreduced gradients of fully_shard in this version of torch: if some "
    "were being accumulated, they are added to those of the next step"
)
_BROKEN_OFF = (
    "fully_shard was interrupted in a forward or backward, and this version of torch cannot reset "
    "it (FSDPModule.reset_iter_state()): its next gradients may be wrong"
)


def unreduced_gradients(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield gradients that FSDP2 will add to the next backward, each with its sharded parameter."""
    try:
        for group in _groups(_states(module)):
            for held in group.fsdp_params:
                gathered = _unsharded_parameter(held)
                found = held.unsharded_accumulated_grad, getattr(gathered, "grad", None)
                for gradient in (*found, group._partial_reduce_output):
                    if gradient is not None:
                        yield held.sharded_param, gradient
    except AttributeError:  # discard_unreduced_gradients() reports this version of torch
        return


def discard_unreduced_gradients(module: nn.Module) -> list[str]:
    """Discard these gradients, and an iteration that an exception has interrupted.

    Returns:
        Descriptions of everything that this version of torch does not allow to reset.
    """
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
    """Return FSDP2's state of each module that it shards: those within ``module``, and those of
    the same root."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not in use
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
    """Return the parameter that forwards compute with; None: it was never unsharded."""
    if not held.all_gather_outputs and not hasattr(held, "_unsharded_param"):
        return None
    return held._unsharded_param


def discard_gradients(objects: Iterable[object], optimizers: Iterable[Optimizer]) -> list[str]:
    """Discard the gradients of modules and optimizers that ``objects`` have as attributes, directly
    or in a list, tuple or dict.

    Args:
        objects: objects of the state with a ``state_dict()`` of their own.
        optimizers: optimizers of the state itself, which restore their own gradients.

    Returns:
        Descriptions of everything that could not be reset.
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
