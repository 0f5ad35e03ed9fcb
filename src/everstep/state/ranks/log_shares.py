"""Assign the rank whose log holds each gradient that several ranks consume
(``docs/design/ranks.md``).

Under DistributedDataParallel every rank consumes the same gradients, so each of them records a
share. Each rank computes the assignment by itself, from the parameters, their sizes, and the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash

from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import ZeroProvider
from everstep.state.ranks.writers import WriterAssignment, balance, find_replication
from everstep.state.values.objects import join_path
from everstep.state.values.tensors import LocalShard, is_dtensor

if TYPE_CHECKING:
    from everstep.state.training_state import State

__all__ = [
    "LogShare",
    "bytes_logged_elsewhere",
    "log_shares",
    "names_digest",
    "other_logs_needed",
    "parameter_logged_twice",
    "updated_elsewhere",
    "zero_parameter_written_elsewhere",
]


@dataclass(frozen=True, slots=True)
class LogShare:
    """Assignment of one parameter that several ranks train with equal gradients.

    Attributes:
        ranks: these ranks, or those of them that share a disk.
        owner: the rank whose log holds the gradients.
        size_bytes: size of a gradient; 0 for a parameter that is frozen now.
    """

    ranks: tuple[int, ...]
    owner: int
    size_bytes: int


def log_shares(state: State) -> dict[str, dict[str, LogShare]]:
    """Return the assignments by optimizer and parameter name.

    If a keeper follows the log (``docs/design/log.md``), the rank that writes a parameter in a base
    also
    records its gradients, so each disk has all of them.
    """
    units: dict[tuple[int, ...], dict[str, int]] = {}
    taught: set[str] = set()
    shared: dict[str, dict[str, str]] = {}
    by_rank: dict[str, dict[str, LogShare]] = {}
    for alike in _replicated_parameters(state):
        entry = alike.entry
        parameter = alike.parameter
        if alike.owner is not None:
            size_bytes = parameter.numel() * parameter.element_size()
            part = LogShare(alike.ranks, alike.owner, size_bytes if parameter.requires_grad else 0)
            by_rank.setdefault(alike.key, {})[alike.name] = part
            continue
        units.setdefault(alike.ranks, {})[entry] = parameter.numel() * parameter.element_size()
        taught |= {entry} if parameter.requires_grad else set()
        shared.setdefault(alike.key, {})[alike.name] = entry
    if state.ranks.followed and state.sharing is not None:
        return by_rank | _shares_as_written(state.sharing, units, taught, shared)
    parts = {
        entry: LogShare(ranks, owner, sizes[entry] if entry in taught else 0)
        for ranks, sizes in units.items()
        for entry, owner in balance([(-size, e) for e, size in sizes.items()], ranks).items()
    }
    found = {key: {name: parts[e] for name, e in named.items()} for key, named in shared.items()}
    return by_rank | found


def _shares_as_written(
    sharing: WriterAssignment,
    units: Mapping[tuple[int, ...], Mapping[str, int]],
    taught: Collection[str],
    shared: Mapping[str, Mapping[str, str]],
) -> dict[str, dict[str, LogShare]]:
    """Assign gradients to the ranks that write the parameters in bases."""
    parts = {
        entry: LogShare(*sharing.split_of(entry), size if entry in taught else 0)
        for sizes in units.values()
        for entry, size in sizes.items()
    }
    found = {
        key: {name: parts[entry] for name, entry in named.items() if len(parts[entry].ranks) > 1}
        for key, named in shared.items()
    }
    return {key: named for key, named in found.items() if named}


class _ReplicatedParameter(NamedTuple):
    """A parameter that several ranks train with equal gradients.

    Attributes:
        key: section key of its optimizer.
        name: its name in the optimizer.
        entry: its name in the state.
        parameter: the live parameter.
        ranks: the ranks that train it.
        owner: the rank that updates it for all of them (ZeRO); None: each rank updates it.
    """

    key: str
    name: str
    entry: str
    parameter: torch.Tensor
    ranks: tuple[int, ...]
    owner: int | None = None


def _replicated_parameters(state: State) -> Iterator[_ReplicatedParameter]:
    if state.ranks.world == 1:
        return
    sharing = state.sharing if state.ranks.followed else None
    common = sharing.common if sharing else find_replication(state.providers.values(), {})
    for key, provider in state.providers.items():
        if not isinstance(provider, OptimizerProvider):
            continue
        zero = provider if isinstance(provider, ZeroProvider) else None
        owners = {} if zero is None else zero.owners()
        for name, parameter in provider.named():
            entry = common.states.get(join_path(join_path(key, "state"), name), "")
            if zero is not None:
                yield _ReplicatedParameter(key, name, entry, parameter, zero.ranks, owners[name])
                continue
            ranks = common.parameters.get(entry, ())
            if len(ranks) > 1 and not is_dtensor(parameter):
                yield _ReplicatedParameter(key, name, entry, parameter, ranks)


def bytes_logged_elsewhere(state: State) -> int:
    """Return the bytes of a step's gradients that this rank leaves to the logs of others."""
    found = [part for parts in log_shares(state).values() for part in parts.values()]
    return sum(part.size_bytes for part in found if part.owner != state.ranks.rank)


def other_logs_needed(state: State) -> Sequence[int]:
    """Return the other ranks whose logs a replay on this rank may need, however shares were
    assigned."""
    split = (one for one in _replicated_parameters(state) if one.owner is None)
    return sorted({other for one in split for other in one.ranks} - {state.ranks.rank})


def updated_elsewhere(state: State) -> frozenset[str]:
    """Return the entries that another rank updates and sends to this one (ZeRO)."""
    mine = state.ranks.rank
    return frozenset(
        one.entry for one in _replicated_parameters(state) if one.owner not in (None, mine)
    )


def zero_parameter_written_elsewhere(state: State) -> str:
    """Return a parameter that one rank updates for several (ZeRO) but does not write alone in
    bases; "" if there is none.

    The other ranks have disks of their own then, or hold it in another form.
    """
    sharing = state.sharing
    if sharing is None:
        return ""
    known = set(sharing.common.states.values())
    for one in _replicated_parameters(state):
        if one.owner is not None and one.entry in known:
            ranks, writer = sharing.split_of(one.entry)
            if (set(ranks), writer) != (set(one.ranks), one.owner):
                return join_path(one.key, one.name)
    return ""


def parameter_logged_twice(state: State) -> str:
    """Return a parameter of which several ranks train and record the same elements; "" if there is
    none.

    Such are DTensors replicated along a mesh dimension, plain parameters beside DTensors, and
    parameters recorded once for each disk.
    """
    plain: list[str] = []
    sharded = False
    split = log_shares(state)
    for one in _replicated_parameters(state):
        part = split.get(one.key, {}).get(one.name)
        if part is None or part.ranks != one.ranks:  # recorded once for each disk
            return join_path(one.key, one.name)
    for key, provider in state.providers.items():
        if not isinstance(provider, OptimizerProvider):
            continue
        for name, parameter in provider.named():
            if not is_dtensor(parameter):
                plain += [] if name in split.get(key, ()) else [join_path(key, name)]
                continue
            sharded = True
            placement = LocalShard.of(parameter).placement
            sides = zip(placement.cuts, placement.mesh, strict=True)
            if any(cut.dim is None and side > 1 for cut, side in sides):
                return join_path(key, name)
    return plain[0] if sharded and plain else ""


def names_digest(names: Iterable[str]) -> str:
    """Return the digest of parameter names with replicated gradients; equal on all ranks that
    share them."""
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(names)).encode())
