"""FSDP2 (``fully_shard``): gradients that it keeps until they are reduced, which no parameter has.

In a backward behind ``set_requires_gradient_sync(False)`` they lie in the parameter that was
gathered, or beside it in the dtype of the reduction; behind ``set_requires_all_reduce(False)``, in
the group of parameters. ``zero_grad()`` does not see them. Private names of torch are used, for
want of public ones; where a version of torch does not have them, that is said.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["forget_iteration", "unreduced_gradients"]

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
                gathered = _gathered(held)
                found = held.unsharded_accumulated_grad, getattr(gathered, "grad", None)
                for gradient in (*found, group._partial_reduce_output):
                    if gradient is not None:
                        yield held.sharded_param, gradient
    except AttributeError:  # whoever goes back is told
        return


def forget_iteration(module: nn.Module) -> list[str]:
    """Lets go of these gradients, and of an iteration that an error has broken off; returns what
    could not be done, in words."""
    try:
        states = _states(module)
        for group in _groups(states):
            for held in group.fsdp_params:
                if held.unsharded_accumulated_grad is not None:
                    held.unsharded_accumulated_grad = None
                if (gathered := _gathered(held)) is not None:
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


def _gathered(held: Any) -> Any:
    """The parameter that forwards compute with; None: it was never gathered."""
    if not held.all_gather_outputs and not hasattr(held, "_unsharded_param"):
        return None
    return held._unsharded_param
