"""Whether the parameters of a state are finite: one that is not is recovered like any other, but
whoever goes on from it should know."""

from __future__ import annotations

import torch

from everstep.state.dtensors import local_of
from everstep.state.image import State
from everstep.state.optimizers import OptimizerProvider

__all__ = ["nonfinite_parameter"]


def nonfinite_parameter(state: State) -> str | None:
    """The name of a parameter, of those that optimizers have, with NaN or infinity in it; None if
    all are numbers. One pass over all of them; of a DTensor over what this rank holds, as other
    ranks need not be at the same place."""
    for key, optimizer in state.optimizers.items():
        provider = state.providers[key]
        assert isinstance(provider, OptimizerProvider)
        names = [name for group in provider.groups() for name in group]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            if not _is_finite(local_of(parameter.detach())):
                return name
    return None


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel() or tensor.element_size() == 1:
        return True  # those of one byte have no kernels for it
    # Both are NaN where any element is; in one pass, and without memory.
    least, most = torch.aminmax(tensor)
    return bool(torch.isfinite(least)) and bool(torch.isfinite(most))
