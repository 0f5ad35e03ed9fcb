"""What the ranks of a job have in common, as its wrappers and optimizers tell."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.provider import ModuleProvider, Provider
from everstep.state.providers.zero import ZeroProvider
from everstep.state.ranks.writers import Common
from everstep.state.survey.guards import canonical_key
from everstep.state.values.objects import join_path

__all__ = ["common_of", "ddp_in", "frozen_for_ddp", "ranks_of_ddp", "reduced_in", "why_not_shared"]


def common_of(
    providers: Iterable[Provider], aliases: Mapping[str, str], own: Collection[int]
) -> Common:
    """What is known of the sections that ``providers`` are of.

    Parameters inside of DistributedDataParallel are the same on all ranks of its group, and so is
    what one of torch's optimizers keeps for them; another may keep what is a rank's own. Those that
    were frozen when DDP was made, and trained since, are not: it reduces no gradients of them.
    Nor are buffers: each rank computes its own, and where they are broadcast, that happens before
    the next forward.

    Args:
        aliases: ``other name -> entry name``.
        own: ids of those parameters (:class:`.apart.Apart`).
    """
    providers = list(providers)
    entries: dict[int, str] = {}
    parameters: dict[str, tuple[int, ...]] = {}
    for provider in providers:
        if not isinstance(provider, ModuleProvider):
            continue
        ranks, ignored = _replicated(provider.outer)
        for key, parameter in provider.named_parameters():
            name = join_path(provider.section, key)
            name = aliases.get(name, name)
            entries.setdefault(id(parameter), name)
            if ranks is not None and key not in ignored and id(parameter) not in own:
                parameters[name] = ranks
    states: dict[str, str] = {}
    owned: dict[str, tuple[int, ...]] = {}
    updaters: dict[str, tuple[int, tuple[int, ...]]] = {}
    for provider in providers:
        if not isinstance(provider, OptimizerProvider):
            continue
        where = join_path(provider.section, "state")
        zero = provider if isinstance(provider, ZeroProvider) else None
        updated_by: dict[str, int] = {} if zero is None else zero.owners()
        for name, owner in provider.named():
            front = join_path(where, name)
            if id(owner) in entries and provider.is_function_of_gradients:
                states[front] = entries[id(owner)]
            if zero is not None:
                owned[front] = zero.ranks
                if id(owner) in entries:
                    updaters[entries[id(owner)]] = updated_by[name], zero.ranks
    modules = frozenset(one.section for one in providers if isinstance(one, ModuleProvider))
    return Common(parameters, states, owned, updaters, modules)


def why_not_shared(module: nn.Module) -> str | None:
    """Why a module cannot be saved by several ranks; None if it can."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: nobody uses it
    kind = None if fsdp is None else fsdp.FullyShardedDataParallel
    if kind is not None and any(isinstance(part, kind) for part in module.modules()):
        return "FullyShardedDataParallel is not supported; use torch.distributed.fsdp.fully_shard"
    return None


def frozen_for_ddp(providers: Iterable[Provider]) -> list[nn.Parameter]:
    """Parameters inside of DistributedDataParallel whose gradients it never reduces, though it was
    not told to ignore them: they were frozen when it was made. Until one is trained, all ranks have
    the same."""
    modules = [provider.outer for provider in providers if isinstance(provider, ModuleProvider)]
    return [parameter for module in modules for parameter in _unreduced(module)]


def ranks_of_ddp(module: nn.Module) -> tuple[int, ...]:
    """The ranks that keep a module's parameters equal; none, if it is in no DDP."""
    return _replicated(module)[0] or ()


def _replicated(module: nn.Module) -> tuple[tuple[int, ...] | None, frozenset[str]]:
    """Ranks that keep a module's parameters equal, and the keys of those that they do not."""
    ddp = ddp_in(module)
    if ddp is None:
        return None, frozenset()
    ranks = tuple(sorted(torch.distributed.get_process_group_ranks(ddp.process_group)))
    # As torch names them, wrappers of blocks in it included.
    return ranks, frozenset(map(canonical_key, ddp.parameters_to_ignore))


def ddp_in(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The wrapper, which may itself be compiled; None if there is none."""
    while not isinstance(module, nn.parallel.DistributedDataParallel):
        inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module


def reduced_in(ddp: nn.parallel.DistributedDataParallel) -> set[int]:
    """``id()`` of the parameters whose gradients it reduces."""
    named = ddp.module.named_parameters()
    ignored = ddp.parameters_to_ignore
    return {id(parameter) for name, parameter in named if name not in ignored}


_UNREDUCED: WeakKeyDictionary[nn.Module, tuple[nn.Parameter, ...]] = WeakKeyDictionary()


def _unreduced(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """See :func:`frozen_for_ddp`."""
    ddp = ddp_in(module)
    if ddp is None:
        return ()
    if ddp not in _UNREDUCED:
        ignored = ddp.parameters_to_ignore
        inside = [p for name, p in ddp.module.named_parameters() if name not in ignored]
        reduced = _reduced_by(ddp, len(inside))
        found = () if reduced is None else tuple(p for p in inside if id(p) not in reduced)
        _UNREDUCED[ddp] = found
    return _UNREDUCED[ddp]


def _reduced_by(ddp: Any, count: int) -> set[int] | None:
    """Ids of the parameters that DDP's reducer has; None: all ``count`` of them. A torch that does
    not tell: none, so each rank keeps its own of what is trained."""
    try:
        if ddp._get_ddp_logging_data()["num_parameter_tensors"] == count:
            return None
        # Gradients in zeros, for a moment; only of a model that is frozen in part.
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    except (AttributeError, KeyError, RuntimeError):
        return set()
