"""What is copied in which step of a base over several steps: computed once per layout (GoCkpt 4.2).

A parameter may be captured before the last step if replay can bring it there: all of its
entries are replayed, by one optimizer, and its state consists of tensors. Everything else (buffers,
generators, what two optimizers share, averages) is captured at the last step mark only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from everstep.capture.lanes.batches import Batch, Chunks, plan_batches
from everstep.capture.multistep import Unit
from everstep.capture.versions import Versions
from everstep.link.samples import Samples
from everstep.restore.redo.owned import parameter_names
from everstep.state.layout.shards import ShardLayout
from everstep.state.providers.modules import ModuleProvider
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.ranks.log_shares import updated_elsewhere
from everstep.state.survey.ownership import Owner
from everstep.state.survey.survey import Shape, same_objects
from everstep.state.training_state import State
from everstep.state.values.objects import TensorRef
from everstep.state.values.tree import references, split
from everstep.trainer.base.prepared import Copies, Prepared
from everstep.trainer.log.untold import Owned

__all__ = ["Part", "PartsPlan", "taught_bytes", "units_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """What is captured in one step.

    Attributes:
        entries: their names.
        parameters: names of the captured parameters, by the key of their optimizer.
        size_bytes: of the entries.
    """

    entries: frozenset[str]
    parameters: Mapping[str, frozenset[str]]
    size_bytes: int

    @classmethod
    def of(cls, units: Iterable[Unit], others: Iterable[str] = ()) -> Part:
        """A part that consists of ``units``, and of ``others``, which are entries."""
        parameters: dict[str, set[str]] = defaultdict(set)
        entries = set(others)
        size_bytes = 0
        for unit in units:
            entries.update(unit.entries)
            size_bytes += unit.size_bytes
            if unit.optimizer:
                parameters[unit.optimizer].add(unit.parameter)
        found = {key: frozenset(names) for key, names in parameters.items()}
        return cls(frozenset(entries), found, size_bytes)


@dataclass(slots=True, eq=False)
class _Planned:
    """Copies of some entries, and the tensors that they were planned for.

    Attributes:
        seen: the mapping that they were last taken from, which never changes.
        owned: what each optimizer owns of them, once somebody has asked.
    """

    tensors: tuple[torch.Tensor, ...]
    chunks: Chunks
    copies: Copies
    seen: Mapping[str, torch.Tensor]
    owned: Mapping[str, Owned] | None = None


@dataclass(eq=False)
class PartsPlan:
    """A layout, cut into parts.

    Args:
        prepared: the layout.
        cut: what may be captured before the last step, in parts, in the order of the state.
        chunk_bytes: that are copied in one go.

    Attributes:
        parts: all but what belongs to the last step mark.
        rest: entries that are copied behind the last step mark, besides what is left of the parts.
    """

    prepared: Prepared
    cut: Sequence[Sequence[Unit]]
    chunk_bytes: int
    parts: tuple[Part, ...] = ()
    rest: frozenset[str] = frozenset()
    _planned: dict[frozenset[str], _Planned] = field(default_factory=dict)
    _numbers: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts = tuple(Part.of(units) for units in self.cut)
        captured = {name for unit in self.units for name in unit.entries}
        self.rest = frozenset(self.prepared.gated) - captured
        self._numbers = {
            place.entry.name: (number, at)
            for number, shard in enumerate(self.prepared.shards)
            for at, place in enumerate(shard.layout.placed)
        }

    @property
    def units(self) -> list[Unit]:
        """What may be captured before the last step, in the order of the state."""
        return [unit for units in self.cut for unit in units]

    def last(self, begin: int) -> Part:
        """All that is left from part ``begin`` on, as the last part."""
        units = [unit for units in self.cut[begin:] for unit in units]
        return Part.of(units, self.rest)

    def captured(self, end: int) -> frozenset[str]:
        """Entries of the parts before ``end``."""
        return frozenset(name for part in self.parts[:end] for name in part.entries)

    def copies(self, names: frozenset[str], tensors: Mapping[str, torch.Tensor]) -> Copies:
        """How to copy the entries ``names``, which may be done behind a step mark."""
        known = self._planned.get(names)
        if known is not None and known.seen is tensors:
            return known.copies
        mine = tuple(tensors[name] for name in sorted(names))
        if known is None or not same_objects(mine, known.tensors):
            known = self._planned[names] = self._plan(names, mine, tensors)
        known.seen = tensors
        return known.copies

    def plan_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Everything that a whole base needs, before it is needed."""
        parts = self.parts[: len(self.parts) - 1]
        for part in parts:
            self.owned(part.entries, tensors)
        self.copies(self.last(len(parts)).entries, tensors)
        self.copies(self.captured(len(parts)), tensors)

    def owned(
        self, names: frozenset[str], tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, Owned]:
        """Watches the entries ``names``, by the key of the optimizer that updates them."""
        self.copies(names, tensors)
        known = self._planned[names]
        owners = self.prepared.shape.owners
        if known.owned is None:
            found: dict[str, dict[str, torch.Tensor]] = {}
            for name in names:
                owner = owners[name]
                if owner.kind == "replayed" and owner.optimizer is not None:
                    found.setdefault(owner.optimizer, {})[name] = tensors[name]
            known.owned = {key: Owned(mine) for key, mine in found.items()}
        return known.owned

    def samples(self, end: int, tensors: Mapping[str, torch.Tensor]) -> list[Samples]:
        """Of the parts before ``end``, as they are now; on the CPU, where the keeper's replay gives
        the same bits (I8)."""
        names = [name for name in self.captured(end) if tensors[name].device.type == "cpu"]
        check = self.copies(frozenset(names), tensors).check
        if check is None:
            return []
        return [Samples(*some) for some in check.packed(check.take())]

    def copy_in(self, chunk_bytes: int) -> None:
        """From now on chunks have another size."""
        if chunk_bytes == self.chunk_bytes:
            return
        self.chunk_bytes = chunk_bytes
        for known in self._planned.values():
            known.chunks = known.chunks.cut_in(chunk_bytes)
            known.copies = replace(known.copies, batches=known.chunks)

    def _plan(
        self,
        names: frozenset[str],
        mine: tuple[torch.Tensor, ...],
        tensors: Mapping[str, torch.Tensor],
    ) -> _Planned:
        batches: list[Batch] = []
        ends: dict[str, int] = {}
        owners = self.prepared.shape.owners
        numbers = sorted(self._numbers[name] for name in names)
        for number, some in groupby(numbers, key=itemgetter(0)):
            shard = self.prepared.shards[number]
            offset = self.prepared.offsets[number]
            places = tuple(shard.layout.placed[at] for _, at in some)
            batches += plan_batches(ShardLayout(places), tensors, names, offset=offset)
            for place in places:
                ends[owners[place.entry.name].optimizer or ""] = offset + place.end
        # What it takes of memory was found out for all of the layout, in whatever parts it is cut.
        whole = self.prepared.copies(tensors).check if names else None
        check = None if whole is None else whole.some(names)
        chunks = Chunks(batches, self.chunk_bytes)
        versions = Versions({name: tensors[name] for name in names})
        return _Planned(mine, chunks, Copies(chunks, ends, check, versions), tensors)


def units_of(state: State, shape: Shape) -> list[Unit]:
    """What of a state may be captured before the last step of a base over several steps; of several
    ranks', of what this one writes.

    Args:
        shape: of the state as it is now.
    """
    aliases = shape.aliases
    owners = shape.owners
    sizes = {entry.name: entry.size_bytes for entry in shape.entries}
    places = {entry.name: number for number, entry in enumerate(shape.entries)}

    def canonical(name: str) -> str:
        return aliases.get(name, name)

    trees: dict[str, Any] = {
        section: split(provider.collect(), section, {})
        for section, provider in state.providers.items()
        if isinstance(provider, (ModuleProvider, OptimizerProvider))
    }
    named = parameter_names(trees, canonical)
    found: list[tuple[int, Unit]] = []
    for name, owner in owners.items():
        if owner.kind == "static":
            found.append((places[name], Unit("", "", (name,), sizes[name])))
    taken = set(updated_elsewhere(state))  # whoever updates it has its gradients, and its moments
    for key in state.optimizers:
        groups = OptimizerProvider.groups_of(trees[key]) or []
        names = [name for group in groups for name in group]
        if any(len(named.get(name, ())) != 1 for name in names):
            continue  # nobody could say without the program which entry a parameter is
        members = [p for group in state.optimizers[key].param_groups for p in group["params"]]
        for name, parameter in zip(names, members, strict=True):
            (entry,) = named[name]
            held = trees[key]["state"].get(name, {})
            if not _only_tensors(held):
                continue
            entries = (entry, *dict.fromkeys(canonical(ref) for ref in references(held)))
            mine = all(_replays(key, owners.get(e)) for e in entries)
            if mine and taken.isdisjoint(entries):
                taken.update(entries)
                size_bytes = sum(sizes[e] for e in entries)
                taught = sizes[entry] if parameter.requires_grad else 0
                found.append((places[entry], Unit(key, name, entries, size_bytes, taught)))
    return [unit for _, unit in sorted(found, key=lambda item: item[0])]


def taught_bytes(state: State, shape: Shape) -> int:
    """Of the gradients of a step, about those that a base over several steps may need."""
    return sum(unit.gradient_bytes for unit in units_of(state, shape))


def _replays(optimizer: str, owner: Owner | None) -> bool:
    """Whether its updates are all that changes an entry, which this rank writes."""
    return owner is not None and owner.kind == "replayed" and owner.optimizer == optimizer


def _only_tensors(held: Any) -> bool:
    """Whether the state of a parameter has no values that change beside its tensors."""
    return isinstance(held, dict) and all(
        value is None or isinstance(value, TensorRef) for value in held.values()
    )
