"""What a state will consist of behind the first update, so that budgets are about that.

Most optimizers make their state in their first step: a state that is looked at before has a third
of its bytes. What torch's own optimizers will keep of each parameter is found by an update of
tensors without memory, on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.replay.own import build, own_step
from everstep.state.entries import Entry
from everstep.state.image import State
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.providers import ModuleProvider
from everstep.state.ranks.dtensors import local_of
from everstep.state.ranks.zero import acting
from everstep.state.survey.survey import Shape
from everstep.state.values.objects import join_path
from everstep.state.values.tensors import stored_form

__all__ = ["shape_after_first_update"]


def shape_after_first_update(state: State, shape: Shape) -> tuple[Shape, bool]:
    """The shape of what this rank writes when every optimizer has made an update, and whether that
    is all: what classes that are not torch's own will keep is not known.

    Args:
        shape: as it is now.
    """
    found = _ToCome(state, shape)
    entries = tuple(found.entries())
    return (replace(shape, entries=(*shape.entries, *entries)) if entries else shape), found.is_all


class _ToCome:
    def __init__(self, state: State, shape: Shape) -> None:
        self.is_all = True
        self._state = state
        self._aliases = shape.aliases
        self._written = {entry.name for entry in shape.entries}
        self._parameters: dict[int, str] = {}
        for section, provider in state.providers.items():
            if isinstance(provider, ModuleProvider):
                for key, parameter in provider.named_parameters():
                    self._parameters.setdefault(id(parameter), join_path(section, key))

    def entries(self) -> Iterator[Entry]:
        """Of all optimizers."""
        for key, optimizer in self._state.optimizers.items():
            provider = self._state.providers[key]
            inner = acting(optimizer)
            assert isinstance(provider, OptimizerProvider)
            names = {id(parameter): name for name, parameter in provider.named()}
            known: dict[Any, Mapping[str, torch.Tensor] | None] = {}
            for number, group in enumerate(inner.param_groups):
                for parameter in group["params"]:
                    if not parameter.requires_grad or inner.state.get(parameter):
                        continue
                    if inner is optimizer and not self._writes(parameter):
                        continue  # it is another rank's
                    local = local_of(parameter)
                    form = number, local.shape, local.dtype
                    if form not in known:
                        known[form] = _kept(type(inner), group, local)
                    kept = known[form]
                    if kept is None:
                        self.is_all = False
                        break
                    front = join_path(join_path(key, "state"), names[id(parameter)])
                    for name, tensor in kept.items():
                        yield stored_form(join_path(front, name), tensor)

    def _writes(self, parameter: torch.Tensor) -> bool:
        """Whether the state of a parameter is this rank's to write: it goes with the parameter."""
        name = self._parameters.get(id(parameter))
        return name is None or self._aliases.get(name, name) in self._written


def _kept(
    kind: type[Optimizer], group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """What an optimizer keeps of a parameter like this behind an update, as tensors without memory
    (small ones may have some); None: that cannot be told without running code that is not torch's,
    or without values."""
    if not f"{kind.__module__}.".startswith("torch.optim."):
        return None
    # Kernels for lists of tensors, fused ones and captured ones want a device; they keep the same.
    plain = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)
    options = {k: plain.get(k, v) for k, v in group.items() if k != "params"}
    stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    stand_in.grad = torch.empty_like(stand_in)
    try:
        optimizer = build(kind, [[stand_in]], [options])
        with torch.no_grad():
            own_step(kind)(optimizer)
    except (RuntimeError, TypeError):
        return None  # it looks at values (ASGD, Adafactor), or wants a closure (LBFGS)
    kept = optimizer.state.get(stand_in, {})
    return {key: value for key, value in kept.items() if isinstance(value, torch.Tensor)}
