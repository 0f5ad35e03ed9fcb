"""What the ranks of a job have in common, as its wrappers and optimizers tell."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from everstep.state.objects import join_path
from everstep.state.optimizers import OptimizerProvider
from everstep.state.proofs import canonical_key
from everstep.state.providers import ModuleProvider, Provider
from everstep.state.sharing import Common
from everstep.state.zero import ZeroProvider

__all__ = ["common_of", "why_not_shared"]


def common_of(providers: Iterable[Provider], aliases: Mapping[str, str]) -> Common:
    """What is known of the sections that ``providers`` are of.

    Parameters inside of DistributedDataParallel are the same on all ranks of its group, and so is
    what one of torch's optimizers keeps for them; another may keep what is a rank's own. Buffers
    are not: each rank computes its own, and where they are broadcast, that happens before the next
    forward.

    Args:
        aliases: ``other name -> entry name``.
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
            if ranks is not None and key not in ignored:
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
    return Common(parameters, states, owned, updaters)


def why_not_shared(module: nn.Module) -> str | None:
    """Why a module cannot be saved by several ranks; None if it can."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: nobody uses it
    kind = None if fsdp is None else fsdp.FullyShardedDataParallel
    if kind is not None and any(isinstance(part, kind) for part in module.modules()):
        return "FullyShardedDataParallel is not supported; use torch.distributed.fsdp.fully_shard"
    return None


def _replicated(module: nn.Module) -> tuple[tuple[int, ...] | None, frozenset[str]]:
    """Ranks that keep a module's parameters equal, and the keys of those that they do not."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            group = module.process_group
            ranks = tuple(sorted(torch.distributed.get_process_group_ranks(group)))
            # As torch names them, wrappers of blocks in it included.
            return ranks, frozenset(map(canonical_key, module.parameters_to_ignore))
        inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None, frozenset()
        module = inner
