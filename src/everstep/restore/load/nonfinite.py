"""Check that the parameters of a state are finite.

A non-finite parameter is restored like any other, but the user is warned about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import torch

from everstep.commit.lineage import BaseId
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.training_state import State
from everstep.state.values.tensors import local_tensor

__all__ = ["are_finite", "is_finite", "nonfinite_notice", "nonfinite_parameter", "optimized"]

# Largest slice that torch checks in the calling thread. Its pool threads would keep spinning after
# each check, on cores that the reading threads need.
_ELEMENTS = 32_768

_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "C64": np.float32}
_BF16_EXPONENT = np.uint16(0x7F80)


def nonfinite_parameter(state: State, but: Collection[str] = ()) -> str | None:
    """Return the name of an optimized parameter that holds NaN or infinity; None if all are finite.

    One pass over all parameters. Of a DTensor only the local shard is checked, since ranks need not
    call this at the same time.

    Args:
        but: names of parameters checked before.
    """
    for name, parameter in optimized(state):
        if name not in but and not is_finite(local_tensor(parameter.detach())):
            return name
    return None


def nonfinite_notice(state: State, end: BaseId | None, but: Collection[str]) -> tuple[str, ...]:
    """Return the warning about a restored parameter that is not finite; empty if all are finite.

    Args:
        end: timeline and step of the state.
        but: names of parameters checked before.
    """
    name = nonfinite_parameter(state, but)
    if name is None:
        return ()
    step = "" if end is None else f" of step {end.step}"
    return (
        f"the state{step} is not finite: {name!r} holds NaN or infinity. Training had this state; "
        "resume(step=...) restores an earlier step (everstep ls lists them)",
    )


def optimized(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of all optimizers with the names of their entries."""
    for key, optimizer in state.optimizers.items():
        provider = state.providers[key]
        assert isinstance(provider, OptimizerProvider)
        names = [name for group in provider.groups() for name in group]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        yield from zip(names, parameters, strict=True)


def are_finite(data: memoryview, dtype: str) -> bool:
    """Return True if all elements of type ``dtype`` (safetensors code) in ``data`` are finite.

    The data holds complete elements. For small chunks in the CPU cache this is three times faster
    than torch, and uses only the calling thread.
    """
    if dtype == "BF16":  # unknown to NumPy; non-finite if all bits of the exponent are set
        exponents = np.frombuffer(data, np.uint16) & _BF16_EXPONENT
        return not exponents.size or bool(exponents.max() < _BF16_EXPONENT)
    number = _FLOATS.get(dtype)
    return number is None or bool(np.isfinite(np.frombuffer(data, number)).all())


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all elements are finite."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel() or tensor.element_size() == 1:
        return True  # one-byte floats have no kernels for it
    # Minimum and maximum are NaN if any element is. One pass, and no temporary memory.
    on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    slices = torch.split(tensor.view(-1), _ELEMENTS) if on_host else [tensor]
    ends = [end for one in slices for end in torch.aminmax(one)]
    return bool(torch.isfinite(torch.stack(ends)).all())
