"""Assign the rank whose log holds each gradient that several ranks consume
(``docs/design/ranks.md``).

Under DistributedDataParallel every rank consumes the same gradients, so each of them records a
share. So do ranks that hold the same shard of a DTensor (HSDP, tensor parallelism), but only with a
lossy log: there, an element that two ranks recorded could be restored with two values. Each rank
computes the assignment by itself, from the parameters, their sizes, and the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash

from everstep.state.layout.placement import replicas_on_mesh
from everstep.state.providers import OptimizerProvider, ZeroProvider
from everstep.state.ranks.writers import balance, find_replication
from everstep.state.values.objects import join_path
from everstep.state.values.tensors import LocalShard, is_dtensor, local_tensor

if TYPE_CHECKING:
    from everstep.state.training_state import State


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
    also records its gradients, so each disk has all of them.
    """
    replicated = list(_replicated_parameters(state, shards=state.ranks.lossy))
    assigned: dict[str, tuple[tuple[int, ...], int]] = {}
    if state.ranks.followed and state.sharing is not None:
        assigned = {
            one.entry: state.sharing.split_of(one.entry) for one in replicated if one.owner is None
        }
    else:
        units: dict[tuple[int, ...], dict[str, int]] = {}
        for one in replicated:
            if one.owner is None:
                units.setdefault(one.ranks, {})[one.entry] = -one.size_bytes
        for ranks, sizes in units.items():
            owners = balance([(size, entry) for entry, size in sizes.items()], ranks)
            assigned |= {entry: (ranks, owner) for entry, owner in owners.items()}
    found: dict[str, dict[str, LogShare]] = {}
    for one in replicated:
        ranks, owner = assigned[one.entry] if one.owner is None else (one.ranks, one.owner)
        if one.owner is not None or len(ranks) > 1:
            size_bytes = one.size_bytes if one.parameter.requires_grad else 0
            found.setdefault(one.key, {})[one.name] = LogShare(ranks, owner, size_bytes)
    return found


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

    @property
    def size_bytes(self) -> int:
        """Bytes of a gradient, or of this rank's shard of it."""
        return local_tensor(self.parameter).nbytes


def _replicated_parameters(state: State, *, shards: bool = False) -> Iterator[_ReplicatedParameter]:
    """Yield the parameters that several ranks train with equal gradients.

    Args:
        shards: include DTensors of which other ranks hold the same shard.
    """
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
            if is_dtensor(parameter):
                placement = LocalShard.of(parameter).placement
                ranks = replicas_on_mesh(placement, state.ranks.rank) if shards and entry else ()
            if len(ranks) > 1:
                yield _ReplicatedParameter(key, name, entry, parameter, ranks)


def bytes_logged_elsewhere(state: State) -> int:
    """Return the bytes of a step's gradients that this rank leaves to the logs of others."""
    found = [part for parts in log_shares(state).values() for part in parts.values()]
    return sum(part.size_bytes for part in found if part.owner != state.ranks.rank)


def other_logs_needed(state: State, *, shards: bool) -> Sequence[int]:
    """Return the other ranks whose logs a replay on this rank may need, however shares were
    assigned.

    Args:
        shards: include ranks that hold the same shards of DTensors; only lossy logs need theirs.
    """
    split = (one for one in _replicated_parameters(state, shards=shards) if one.owner is None)
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
    """Return a parameter of which several ranks train and record the same elements, or may do so;
    "" if there is none.

    Such are parameters recorded once for each disk; plain parameters beside DTensors, and DTensors
    of other ranks than the rest, as more ranks may hold them than they tell; and replicas of
    DTensors that no module has.

    Args:
        state: state of a job with a lossy log.
    """
    split = log_shares(state)
    for one in _replicated_parameters(state, shards=True):
        part = split.get(one.key, {}).get(one.name)
        if part is None or part.ranks != one.ranks:  # recorded once for each disk
            return join_path(one.key, one.name)
    meshes: dict[str, frozenset[int]] = {}  # by parameter; a plain one is on no mesh
    for key, provider in state.providers.items():
        for name, parameter in provider.named() if isinstance(provider, OptimizerProvider) else ():
            if is_dtensor(parameter):
                placement = LocalShard.of(parameter).placement
                others = replicas_on_mesh(placement, state.ranks.rank)
                if len(others) > 1 and name not in split.get(key, ()):
                    return join_path(key, name)
                meshes[join_path(key, name)] = frozenset(placement.ranks or ())
            elif name not in split.get(key, ()):
                meshes[join_path(key, name)] = frozenset()
    fewest = min(meshes, key=lambda name: len(meshes[name]), default="")
    return fewest if len(set(meshes.values())) > 1 else ""


def names_digest(names: Iterable[str]) -> str:
    """Return the digest of parameter names with replicated gradients; equal on all ranks that
    share them."""
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(names)).encode())
