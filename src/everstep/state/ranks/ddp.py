"""Parameters inside of DistributedDataParallel, which its ranks keep equal.

Optimizer steps that would make replicas diverge are refused before they change anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from everstep.errors import UnsupportedStateError
from everstep.state.providers.modules import ModuleProvider
from everstep.state.survey.guards import canonical_key

if TYPE_CHECKING:
    from everstep.state.training_state import State


def ddp_replicas(module: nn.Module) -> tuple[tuple[int, ...] | None, frozenset[str]]:
    """Return the ranks that keep a module's parameters equal, and the keys of the parameters
    that DDP ignores."""
    ddp = find_ddp(module)
    if ddp is None:
        return None, frozenset()
    ranks = tuple(sorted(torch.distributed.get_process_group_ranks(ddp.process_group)))
    # DDP has the names that torch uses, with the prefixes of wrappers inside the module.
    return ranks, frozenset(map(canonical_key, ddp.parameters_to_ignore))


def find_ddp(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP wrapper, which may itself be compiled; None if there is none."""
    while not isinstance(module, nn.parallel.DistributedDataParallel):
        inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module


def reduced_parameter_ids(ddp: nn.parallel.DistributedDataParallel) -> set[int]:
    """Return the ``id()`` of each parameter whose gradients a DDP reduces."""
    named = ddp.module.named_parameters()
    ignored = ddp.parameters_to_ignore
    return {id(parameter) for name, parameter in named if name not in ignored}


# Weak keys: a DDP that the program has dropped is not kept alive.
_UNREDUCED: WeakKeyDictionary[nn.Module, tuple[nn.Parameter, ...]] = WeakKeyDictionary()


def _unreduced(ddp: nn.parallel.DistributedDataParallel) -> tuple[nn.Parameter, ...]:
    """Return parameters whose gradients a DDP never reduces because they were frozen when it was
    made; without those that it was told to ignore."""
    if ddp not in _UNREDUCED:
        ignored = ddp.parameters_to_ignore
        inside = [p for name, p in ddp.module.named_parameters() if name not in ignored]
        reduced = _reduced_by(ddp, len(inside))
        found = () if reduced is None else tuple(p for p in inside if id(p) not in reduced)
        _UNREDUCED[ddp] = found
    return _UNREDUCED[ddp]


def _reduced_by(ddp: Any, count: int) -> set[int] | None:
    """Return ids of the parameters in DDP's reducer; None: all ``count`` of them."""
    if ddp._get_ddp_logging_data()["num_parameter_tensors"] == count:
        return None
    # This allocates gradients of zeros for a moment, but only for a partly frozen model.
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}


_LOCAL_SGD = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"


def refuse_divergent_updates(state: State, gate: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``gate``, preceded by a check that refuses updates that would make DDP replicas
    diverge.

    One rank writes replicated state for all ranks. Once ranks consume different gradients their
    replicas differ, and a base would mix them. So such an update is refused before anything has
    changed. Detected are optimizer steps within ``no_sync()``, uneven inputs (``Join``), local
    SGD (``post_localSGD_hook``) and layers that were frozen when DDP was made; gradients that the
    program changes after DDP has reduced them are not.
    """
    if state.ranks.world == 1:
        return gate
    found = [(key, p.outer) for key, p in state.providers.items() if isinstance(p, ModuleProvider)]
    ddps = [(section, ddp) for section, module in found if (ddp := find_ddp(module)) is not None]
    if not ddps:
        return gate
    updated: dict[tuple[str, int], list[tuple[str, Any, list[nn.Parameter]]]] = {}

    def look(key: str) -> None:
        groups = state.optimizers[key].param_groups
        # Looked up once, as this runs before each update; add_param_group() makes it look again.
        if (at := (key, len(groups))) not in updated:
            theirs = {id(parameter) for group in groups for parameter in group["params"]}
            updated[at] = [
                (section, ddp, [p for p in _unreduced(ddp) if id(p) in theirs])
                for section, ddp in ddps
                if not theirs.isdisjoint(reduced_parameter_ids(ddp))
            ]
        for section, ddp, unreduced in updated[at]:
            if (why := _divergence(ddp, unreduced)) is not None:
                raise UnsupportedStateError(
                    f'the ranks would diverge: "{section}" is in '
                    f"DistributedDataParallel, and {why}; nothing was updated",
                    leaves=((section, why),),
                    rank=state.ranks.rank,
                    hint=f'put {{"{section}": ddp.module}} into the state: then each rank saves it',
                )
        gate(key)

    return look


def _divergence(
    ddp: nn.parallel.DistributedDataParallel, unreduced: Sequence[nn.Parameter]
) -> str | None:
    if not ddp.require_backward_grad_sync:
        return "its optimizer is called within no_sync()"
    join: Any = ddp._join_config
    if join.enable and not join.throw_on_early_termination:
        return (
            "inputs may be uneven (Join): a rank that runs out makes fewer updates (with "
            "throw_on_early_termination=True it ends the step of all)"
        )
    if any(parameter.grad is not None for parameter in unreduced):
        return (
            "it does not reduce the gradients of parameters that were frozen when it was made: "
            "make it again after unfreezing them"
        )
    hooks = sys.modules.get(_LOCAL_SGD)  # not imported: not in use
    if hooks is not None and any(
        isinstance(kept, hooks.PostLocalSGDState) for _, kept in ddp._comm_hooks
    ):
        return "its gradients are reduced within groups of ranks only (post_localSGD_hook)"
    return None
