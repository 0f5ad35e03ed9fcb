"""Provider of ZeroRedundancyOptimizer: each rank has the state of its own parameters, by name.

The assignment of parameters depends on the number of ranks. So a tree records the ranks that hold
the state, and a restore joins their shards and selects those that this rank owns now.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import UnsupportedStateError
from everstep.state.layout import Placement
from everstep.state.ownership import OwnedMemory, owned_memory_of
from everstep.state.providers.modules import ParameterNames
from everstep.state.providers.optimizers import NamedShape, OptimizerProvider, numbered
from everstep.state.providers.provider import RestorePlan, Saved

PARTITIONED = "everstep/partitioned"
"""Key of an optimizer's tree: the ranks over which its state is distributed, as text."""


def is_zero(optimizer: Optimizer) -> bool:
    """Return True for torch's ZeroRedundancyOptimizer, without importing its module."""
    loaded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return loaded is not None and isinstance(optimizer, loaded.ZeroRedundancyOptimizer)


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that updates parameters on this rank: the inner one of a
    ZeroRedundancyOptimizer, otherwise the optimizer itself."""
    if not is_zero(optimizer):
        return optimizer
    inner: Optimizer = optimizer.optim  # type: ignore[attr-defined]
    return inner


class ZeroProvider(OptimizerProvider):
    """Provider of a ``torch.distributed.optim.ZeroRedundancyOptimizer``.

    Its own ``state_dict()`` would gather all state on one rank; here nothing is gathered.

    Raises:
        UnsupportedStateError: it overlaps with DistributedDataParallel, and replaces its inner
            optimizer after the first steps.
    """

    def __init__(self, section: str, optimizer: Any, names: ParameterNames) -> None:
        super().__init__(section, optimizer, names)
        if optimizer._overlap_with_ddp:
            reason = "ZeroRedundancyOptimizer with overlap_with_ddp=True is not supported"
            raise UnsupportedStateError(f"{section}: {reason}", leaves=((section, reason),))
        self._zero = optimizer

    @property
    def is_function_of_gradients(self) -> bool:
        return True  # one rank alone has the state of a parameter

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks over which the state is distributed."""
        return tuple(torch.distributed.get_process_group_ranks(self._zero.process_group))

    def owned(self) -> set[str]:
        """Return the names of the parameters whose state this rank keeps."""
        held = {id(p) for group in self._zero.optim.param_groups for p in group["params"]}
        return {name for name, parameter in self.named() if id(parameter) in held}

    def owners(self) -> dict[str, int]:
        """Return, by name of each parameter, the rank that updates it and broadcasts it."""
        ranks = self.ranks
        found = self._zero._param_to_rank
        return {name: ranks[found[parameter]] for name, parameter in self.named()}

    def sync_parameters(self) -> None:
        """Broadcast updated parameters, as at the end of each ``step()``. All ranks must call
        it."""
        self._zero._sync_params()

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        plan = super().plan(saved, live)
        if not plan.left_out:
            mine = self.owned()
            state = {name: values for name, values in plan.tree["state"].items() if name in mine}
            plan.tree = {**plan.tree, "state": state}
        return plan

    def _load(self, tree: Mapping[str, Any]) -> None:
        own = numbered(tree, self._numbers())
        # load_state_dict() replaces the state of those parameters only that the tree has.
        self._zero.optim.state.clear()
        self._zero.load_state_dict({key: own[key] for key in ("state", "param_groups")})
        self._zero.state.clear()  # load_state_dict() makes a second copy that is never used

    def _holding_now(self) -> OwnedMemory:
        outer = super()._holding_now()
        inner = owned_memory_of(self.section, self._zero.optim)
        return OwnedMemory(
            self.section,
            tuple(dict.fromkeys((*outer.slots, *inner.slots))),
            tuple(dict.fromkeys((*outer.shared, *inner.shared))),
        )

    def _collect(self, parameters: list[NamedShape]) -> dict[str, Any]:
        groups: list[dict[str, Any]] = self._zero.param_groups
        listed = [parameter for group in groups for parameter in group["params"]]
        named = {id(parameter): it for parameter, it in zip(listed, parameters, strict=True)}
        return {
            "state": {
                named[id(parameter)][0]: values
                for parameter, values in self._zero.optim.state.items()
            },
            "param_groups": [
                {**group, "params": [named[id(parameter)] for parameter in group["params"]]}
                for group in groups
            ],
            PARTITIONED: Placement(self.ranks).text,
        }
