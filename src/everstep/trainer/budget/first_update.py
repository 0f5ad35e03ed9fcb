"""Predicts the shape of a state after the first update, so that budgets apply to the full state.

Most optimizers create their state in their first step; before it, a state has a third of its final
size. For torch's own optimizers the additional entries are found by an update of tensors without
memory, on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.replay.optimizer_step import build, own_step
from everstep.state.layout.entries import Entry
from everstep.state.providers.modules import ModuleProvider
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import local_optimizer
from everstep.state.survey.survey import Shape
from everstep.state.training_state import State
from everstep.state.values.objects import join_path
from everstep.state.values.tensors import local_tensor, tensor_entry


def shape_after_first_update(state: State, shape: Shape) -> tuple[Shape, bool]:
    """Return the shape of this rank's entries after an update of every optimizer.

    Args:
        shape: current shape.

    Returns:
        The expected shape, and True if it is complete. Entries of optimizer classes that are not
        torch's own cannot be predicted.
    """
    found = _ExpectedEntries(state, shape)
    entries = tuple(found.entries())
    return (
        replace(shape, entries=(*shape.entries, *entries)) if entries else shape
    ), found.is_complete


class _ExpectedEntries:
    """Entries that the optimizers of a state will create."""

    def __init__(self, state: State, shape: Shape) -> None:
        self.is_complete = True
        self._state = state
        self._aliases = shape.aliases
        self._written = {entry.name for entry in shape.entries}
        self._parameters: dict[int, str] = {}
        for section, provider in state.providers.items():
            if isinstance(provider, ModuleProvider):
                for key, parameter in provider.named_parameters():
                    self._parameters.setdefault(id(parameter), join_path(section, key))

    def entries(self) -> Iterator[Entry]:
        """Yield the expected entries of all optimizers."""
        for key, optimizer in self._state.optimizers.items():
            provider = self._state.providers[key]
            inner = local_optimizer(optimizer)
            assert isinstance(provider, OptimizerProvider)
            names = {id(parameter): name for name, parameter in provider.named()}
            known: dict[Any, Mapping[str, torch.Tensor] | None] = {}
            for number, group in enumerate(inner.param_groups):
                for parameter in group["params"]:
                    if not parameter.requires_grad or inner.state.get(parameter):
                        continue
                    if inner is optimizer and not self._writes(parameter):
                        continue  # another rank writes it
                    local = local_tensor(parameter)
                    # One trial per group, shape and dtype: a trial for each parameter would give
                    # the same.
                    form = number, local.shape, local.dtype
                    if form not in known:
                        known[form] = _kept(type(inner), group, local)
                    kept = known[form]
                    if kept is None:
                        self.is_complete = False
                        break
                    front = join_path(join_path(key, "state"), names[id(parameter)])
                    for name, tensor in kept.items():
                        yield tensor_entry(join_path(front, name), tensor)

    def _writes(self, parameter: torch.Tensor) -> bool:
        """Return True if this rank writes the parameter, and so its optimizer state."""
        name = self._parameters.get(id(parameter))
        return name is None or self._aliases.get(name, name) in self._written


def _kept(
    kind: type[Optimizer], group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """Return the state that an optimizer will keep of a parameter, as tensors without memory.

    Small tensors may have memory. None if this cannot be found without running code that is not
    torch's, or without real values.
    """
    if not f"{kind.__module__}.".startswith("torch.optim."):
        return None
    # Foreach, fused and capturable kernels need a real device; the state they keep is the same.
    plain = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)
    options = {k: plain.get(k, v) for k, v in group.items() if k != "params"}
    stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    stand_in.grad = torch.empty_like(stand_in)
    try:
        optimizer = build(kind, [[stand_in]], [options])
        with torch.no_grad():
            own_step(kind)(optimizer)
    except (RuntimeError, TypeError):
        return None  # it reads values (ASGD, Adafactor), or needs a closure (LBFGS)
    kept = optimizer.state.get(stand_in, {})
    return {key: value for key, value in kept.items() if isinstance(value, torch.Tensor)}
