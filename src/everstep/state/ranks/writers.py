"""Assign the rank that writes each entry: every byte of a job's state is written once, without
messages.

Replicated state is written by one rank, or, if the ranks write to several disks, by one for each
disk. Each rank computes the assignment by itself, from data that is equal on all replicas: the
parameters, their sizes, the ranks. A parameter's optimizer state is written by the parameter's
writer. With ZeRO, the rank that updates a parameter for all writes it where possible, so that the
marks of its log have samples of it, and its keeper can follow it.

This process's place in a job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

import xxhash

from everstep.state.layout import Entry, Placement, ReplicaDigest
from everstep.state.layout.placement import replica_digests, replicas_on_mesh
from everstep.state.providers import (
    ModuleProvider,
    OptimizerProvider,
    SectionProvider,
    ZeroProvider,
)
from everstep.state.ranks import ddp
from everstep.state.values.objects import join_path


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of a job.

    Attributes:
        rank: from 0.
        world: number of ranks that train together; 1: a job of one rank.
        near: ranks that write to the same disk as this one, this rank included; replicated state is
            written once to each disk. None: all ranks.
        here: number of ranks that share the memory of this machine, this rank included.
        nodes: node names by rank; empty if no rank sends its bases to a peer.
        followed: a keeper can compute this rank's entries of a base from its log, or from the
            gradients that it copies; all ranks divide bases and logs in the same way
            (``docs/design/multistep.md``,
            ``docs/design/log.md``).
        logged: there is a gradient log. Each rank restores the contents of marks from its own log,
            so each writes them.
        lossy: the log, or a copy of it, holds lossy gradients. Each element of a gradient is then
            in the log of one rank, so that all replicas replay the same values.
    """

    rank: int = 0
    world: int = 1
    near: tuple[int, ...] | None = None
    here: int = 1
    nodes: tuple[str, ...] = ()
    followed: bool = False
    logged: bool = False
    lossy: bool = False


ONE_RANK = RankInfo()
"""Job of one rank."""


_Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replication:
    """Replicated state of a job.

    Attributes:
        parameters: entry names of parameters that ranks keep equal -> those ranks.
        states: name prefixes of a parameter's optimizer state -> the parameter's entry.
        owned: name prefixes of optimizer state that only this rank holds, for parameters of all
            ranks (ZeRO) -> ranks of the optimizer.
        updaters: entry names of parameters that one rank updates for several (ZeRO) -> that rank,
            and all of them.
        modules: sections that are modules.
        everywhere: entry names of tensors that all ranks hold, as their provider declares.
    """

    parameters: Mapping[str, _Ranks]
    states: Mapping[str, str]
    owned: Mapping[str, _Ranks]
    updaters: Mapping[str, tuple[int, _Ranks]] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    everywhere: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class EntryReplicas:
    """Placement of an entry, and the ranks that could write it.

    Attributes:
        unit: the parameter that it is written with, or the entry itself.
        replicas: ranks that hold the same bytes and write to the same disk.
        placement: placement as written to headers.
    """

    unit: str
    replicas: _Ranks
    placement: Placement


class WriterAssignment:
    """Assignment of a writer to each entry that this rank holds.

    Args:
        ranks: this rank of the job.
        entries: all entries that this rank holds.
        common: the replicated state.
        alone: names of entries that every rank writes for itself.

    Attributes:
        common: the replicated state.
    """

    def __init__(
        self,
        ranks: RankInfo,
        entries: Iterable[Entry],
        common: Replication,
        alone: Collection[str] = (),
    ) -> None:
        self._ranks = ranks
        self._alone = alone
        self.common = common
        self._entries = {entry.name: entry for entry in entries}
        self._everyone = tuple(range(ranks.world))
        self._shares = {entry.name: self._share(entry) for entry in self._entries.values()}
        self._writers = self._assign()

    def mine(self) -> dict[str, Entry]:
        """Return the entries that this rank writes, by name, with the placement to write."""
        found: dict[str, Entry] = {}
        for name, share in self._shares.items():
            if self._writer(share) == self._ranks.rank:
                text = share.placement.text
                found[name] = replace(self._entries[name], placement=text)
        return found

    def replica_digests(self, aliases: Mapping[str, str]) -> tuple[ReplicaDigest, ...]:
        """Return digests of this rank's replicated tensors; all replicas must compute the same
        ones.

        Optimizer state on a mesh may be missing on a rank whose shard is empty, so it is compared
        only among ranks that hold the same shard.

        Args:
            aliases: ``other name -> entry name``. All names count: ranks with an empty shard of a
                tied tensor do not know which of them names the entry.
        """
        lines: dict[tuple[_Ranks, str], list[str]] = {}
        names = {name: name for name in self._shares} | {
            other: name for other, name in aliases.items() if name in self._shares
        }
        for name, of in names.items():
            share = self._shares[of]
            entry = self._entries[of]
            if _parameter_prefix(of) in self.common.owned:
                continue  # each parameter's state is on one rank only, so there are no replicas
            section = name.partition("/")[0]
            placement = share.placement
            ranks = self._everyone if placement.ranks is None else placement.ranks
            if placement.mesh and section not in self.common.modules:
                ranks = share.replicas
            if len(ranks) > 1:
                about = name, entry.dtype, entry.logical_dtype, entry.global_shape, placement.text
                lines.setdefault((tuple(sorted(ranks)), section), []).append(repr(about))
        return replica_digests(lines)

    def split_of(self, parameter: str) -> tuple[_Ranks, int]:
        """Return the ranks that could write a parameter's entry, and the one that does."""
        share = self._shares[parameter]
        return share.replicas, self._writer(share)

    def is_shared(self) -> bool:
        """Return True if other ranks hold or write any entry of this rank."""
        own = (self._ranks.rank,)
        return bool(self.common.owned) or any(
            share.placement.ranks != own for share in self._shares.values()
        )

    def unit_of(self, name: str) -> str:
        """Return the parameter that an entry is written with; other entries are units of their
        own."""
        if name in self.common.parameters:
            return name
        return self.common.states.get(_parameter_prefix(name), name)

    def ranks_of(self, name: str) -> frozenset[int]:
        """Return the ranks that hold replicas of an entry; this rank alone for an unknown entry."""
        share = self._shares.get(name)
        if share is None:
            return frozenset({self._ranks.rank})
        ranks = share.placement.ranks
        return frozenset(self._everyone if ranks is None else ranks)

    def _share(self, entry: Entry) -> EntryReplicas:
        name = entry.name
        me = self._ranks.rank
        unit = self.unit_of(name)
        front = _parameter_prefix(name)
        placement = Placement.parse(entry.placement)
        if name in self._alone:
            own = placement if placement.ranks is not None else self._held_by((me,))
            return EntryReplicas(unit, (me,), own)
        if placement.ranks is not None:
            return EntryReplicas(unit, self._near(replicas_on_mesh(placement, me)), placement)
        if front in self.common.owned:
            return EntryReplicas(unit, (me,), self._held_by(self.common.owned[front]))
        if name in self.common.everywhere:
            return EntryReplicas(unit, self._near(self._everyone), self._held_by(self._everyone))
        together = self.common.parameters.get(unit)
        # Step counters are plain tensors even where the moments beside them are DTensors.
        counts = name.endswith("/step") and entry.size_bytes <= _COUNTER_BYTES
        if together is None and unit != name and counts:
            together = self._on_the_mesh_of(unit)
            if together is not None and self._ranks.followed:  # written with its parameter
                part = Placement.parse(self._entries[unit].placement)
                near = self._near(replicas_on_mesh(part, me))
                return EntryReplicas(unit, near, self._held_by(together))
        together = together or (me,)
        return EntryReplicas(unit, self._near(together), self._held_by(together))

    def _near(self, ranks: _Ranks) -> _Ranks:
        """Return the ranks among these that write to this rank's disk."""
        near = self._ranks.near
        return ranks if near is None else tuple(rank for rank in ranks if rank in near)

    def _on_the_mesh_of(self, parameter: str) -> _Ranks | None:
        """Return the ranks of a DTensor parameter's mesh, which all have the same step counter."""
        entry = self._entries.get(parameter)
        ranks = None if entry is None else Placement.parse(entry.placement).ranks
        return None if ranks is None else tuple(sorted(ranks))

    def _held_by(self, ranks: _Ranks) -> Placement:
        return Placement(None if ranks == self._everyone else ranks)

    def _assign(self) -> dict[tuple[_Ranks, str], int]:
        """Assign a writer to each parameter, by the ranks that hold the same shard of it.

        The rank that updates a parameter for all writes it. The others are distributed largest
        first, each to the rank with the fewest bytes so far. A rank knows the updaters only of
        optimizers that it takes part in.
        """
        units: dict[_Ranks, list[tuple[int, str]]] = {}
        loads: dict[_Ranks, Counter[int]] = {}
        writers: dict[tuple[_Ranks, str], int] = {}
        parameters = {*self.common.parameters, *self.common.states.values()}
        for name in parameters & self._shares.keys():
            replicas = self._shares[name].replicas
            size_bytes = self._entries[name].size_bytes
            updater, known = self.common.updaters.get(name, (-1, ()))
            if updater in replicas and set(replicas) <= set(known):
                writers[replicas, name] = updater
                loads.setdefault(replicas, Counter())[updater] += size_bytes
            else:
                units.setdefault(replicas, []).append((-size_bytes, name))
        for replicas, found in units.items():
            for name, rank in balance(found, replicas, loads.get(replicas)).items():
                writers[replicas, name] = rank
        return writers

    def _writer(self, share: EntryReplicas) -> int:
        replicas = share.replicas
        if len(replicas) == 1:
            return replicas[0]
        writer = self._writers.get((replicas, share.unit))
        if writer is None:  # no parameter has these replicas: choose by the name alone
            # Not hash(), whose values for strings differ between processes.
            writer = replicas[xxhash.xxh32_intdigest(share.unit.encode()) % len(replicas)]
        return writer


def balance(
    units: Iterable[tuple[int, str]], ranks: _Ranks, before: Mapping[int, int] | None = None
) -> dict[str, int]:
    """Assign a rank to each name: largest first, each to the rank with the fewest bytes so far.

    Args:
        units: negated size in bytes, and name.
        ranks: ranks to choose from.
        before: bytes that ranks have already.
    """
    loads = [((before or {}).get(rank, 0), rank) for rank in ranks]
    found = dict[str, int]()
    # Sorted by size and name: all ranks must get the same result, and sets have another order in
    # each process.
    for size, name in sorted(units):
        load, rank = min(loads)
        loads[loads.index((load, rank))] = (load - size, rank)
        found[name] = rank
    return found


_COUNTER_BYTES = 16  # one element of any dtype, complex128 at most


def _parameter_prefix(name: str) -> str:
    """Return ``section/state/PARAMETER`` of the name of an optimizer's entry."""
    return "/".join(name.split("/", 3)[:3])


def find_replication(
    providers: Iterable[SectionProvider], aliases: Mapping[str, str]
) -> Replication:
    """Find the state that ranks replicate, from wrappers and optimizers.

    Parameters inside of DistributedDataParallel are equal on all ranks of its group, and so is the
    state that torch's own optimizers keep for them; other optimizers may keep rank-local state.
    Buffers are rank-local: each rank computes its own, and a broadcast of them happens only before
    the next forward.

    Args:
        providers: providers of the sections.
        aliases: ``other name -> entry name``.
    """
    providers = list(providers)
    entries: dict[int, str] = {}
    parameters: dict[str, tuple[int, ...]] = {}
    for provider in providers:
        if not isinstance(provider, ModuleProvider):
            continue
        ranks, ignored = ddp.ddp_replicas(provider.outer)
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
    modules = frozenset(one.section for one in providers if isinstance(one, ModuleProvider))
    # An alias is written with its entry.
    everywhere = frozenset[str]().union(*map(attrgetter("replicated"), providers)) - aliases.keys()
    return Replication(parameters, states, owned, updaters, modules, everywhere)
