"""Check that the parameters of a state are finite.

A non-finite parameter is restored like any other, but the user is warned about it.
"""

from __future__ import annotations

import torch

from everstep.commit.lineage import BaseId
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.training_state import State
from everstep.state.values.tensors import local_tensor


def nonfinite_parameter(state: State) -> str | None:
    """Return the name of an optimized parameter that holds NaN or infinity; None if all are finite.

    One pass over all parameters. Of a DTensor only the local shard is checked, since ranks need not
    call this at the same time.
    """
    for key, optimizer in state.optimizers.items():
        provider = state.providers[key]
        assert isinstance(provider, OptimizerProvider)
        names = [name for group in provider.groups() for name in group]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            if not is_finite(local_tensor(parameter.detach())):
                return name
    return None


def nonfinite_notice(state: State, end: BaseId | None) -> tuple[str, ...]:
    """Return the warning about a restored parameter that is not finite; empty if all are finite.

    Args:
        end: timeline and step of the state.
    """
    name = nonfinite_parameter(state)
    if name is None:
        return ()
    step = "" if end is None else f" of step {end.step}"
    return (
        f"the state{step} is not finite: {name!r} holds NaN or infinity. Training had this state; "
        "resume(step=...) restores an earlier step (everstep ls lists them)",
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all elements are finite."""
    if tensor.is_complex():
        # view_as_real() does not accept a lazily conjugated tensor.
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return True  # one-byte floats have no kernels for it
    # A sum takes one pass and no memory; only if it is not finite, which an overflow may be, each
    # element is looked at.
    # On a GPU each bool() waits for the device; the second one is rarely needed.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
