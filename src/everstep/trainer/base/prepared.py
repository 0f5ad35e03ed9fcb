"""What a save needs that is the same as at the save before: computed once, reused.

Recomputed when the state's shape changes (parameters, groups, optimizer state that appears),
and in part when tensors were replaced by others of the same shape.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from everstep.capture.audit import SpotCheck
from everstep.capture.lanes.batches import Batch, Chunks, Runs, plan_batches
from everstep.capture.versions import Versions
from everstep.format.header import ShardIdentity
from everstep.format.plan import BasePlan, ShardPlan, plan_files
from everstep.link.capture import shard_offsets
from everstep.state.survey.survey import Shape, Survey

__all__ = ["Copies", "Prepared", "prepare"]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies that may run behind a step mark, and how to see afterwards that they are right.

    Attributes:
        ends: how much of the block must be there before an optimizer (by key) may update.
        check: None where there is nothing to look at.
        versions: counters of what is copied; None: nobody asks them.
    """

    batches: Sequence[Batch]
    ends: Mapping[str, int]
    check: SpotCheck | None
    versions: Versions | None = None

    @property
    def end(self) -> int:
        """Of all batches."""
        if isinstance(self.batches, Chunks):  # to look at the last would be to cut them all
            return self.batches.end
        return self.batches[-1].end if self.batches else 0


@dataclass(slots=True)
class Prepared:
    """A layout, and the copies that fill it.

    Attributes:
        number: names the layout between trainer and keeper.
        offsets: of each shard in the block of ``size_bytes``.
        gated: names of entries that may be copied behind the step mark.
        ends: how much of the block must be there before an optimizer (by key) may update.
    """

    number: int
    shape: Shape
    shards: tuple[ShardPlan, ...]
    kinds: Mapping[str, str]
    offsets: tuple[int, ...]
    size_bytes: int
    gated: tuple[str, ...]
    marked: tuple[str, ...]
    ends: Mapping[str, int]
    _tensors: Mapping[str, torch.Tensor] | None = None  # seen last
    _gated_tensors: tuple[torch.Tensor, ...] = ()
    _gated_batches: tuple[Batch, ...] = ()
    _marked_tensors: tuple[torch.Tensor, ...] = ()
    _marked_batches: tuple[Batch, ...] = ()
    _check: SpotCheck | None = None
    _versions: Versions | None = None
    _copies: Copies | None = None
    _owned: dict[str | None, frozenset[str]] = field(default_factory=dict)

    @property
    def objects_bytes(self) -> int:
        """Of its plain data, about, which lies beside the block."""
        return sum(self.shape.objects_bytes.values())

    def owned_by(self, optimizer: str | None) -> frozenset[str]:
        """Names of the gated entries of an optimizer, by its key; None: all of them."""
        found = self._owned.get(optimizer)
        if found is None:
            owners = self.shape.owners
            mine = (n for n in self.gated if optimizer in (None, owners[n].optimizer))
            found = self._owned[optimizer] = frozenset(mine)
        return found

    def plan(self, identity: ShardIdentity, *, behind_mark: bool = False) -> BasePlan:
        """The files of one base.

        Args:
            behind_mark: see :class:`~everstep.format.header.ShardIdentity`.
        """
        identity = replace(identity, common=self.shape.common)
        if behind_mark:
            identity = replace(identity, behind_mark=True)
        return BasePlan(identity, self.shards, self.kinds)

    def gated_batches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Batch, ...]:
        """Copies that may run behind the next step, in file order."""
        self._follow(tensors)
        return self._gated_batches

    def copies(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
        """Those, with all that belongs to them."""
        gated = self.gated_batches(tensors)
        if self._copies is None or self._copies.batches is not gated:
            check = self.spot_check(tensors) if gated else None
            versions = self.versions(tensors) if gated else None
            self._copies = Copies(gated, self.ends, check, versions)
        return self._copies

    def marked_batches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Batch, ...]:
        """Copies that must be made at the step mark."""
        self._follow(tensors)
        return self._marked_batches

    def spot_check(self, tensors: Mapping[str, torch.Tensor]) -> SpotCheck:
        """Of the gated entries; after :meth:`gated_batches`."""
        if self._check is None:
            layouts = [
                (shard.layout, offset)
                for shard, offset in zip(self.shards, self.offsets, strict=True)
            ]
            self._check = SpotCheck(layouts, tensors, frozenset(self.gated))
        return self._check

    def versions(self, tensors: Mapping[str, torch.Tensor]) -> Versions:
        """Counters of the gated entries."""
        self._follow(tensors)
        if self._versions is None:
            self._versions = Versions({name: tensors[name] for name in self.gated})
        return self._versions

    def _follow(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Plans anew where tensors are others. A survey's mapping never changes: where it is the
        same, they are. What is planned for is noted down last: an interrupt leaves no plan that is
        taken for one of these tensors."""
        if tensors is self._tensors:
            return
        gated = tuple(tensors[name] for name in self.gated)
        if not _same(gated, self._gated_tensors):
            self._gated_tensors = ()
            self._check = None
            self._versions = None
            self._gated_batches = Runs(self._batches(tensors, frozenset(self.gated)))
            self._gated_tensors = gated
        marked = tuple(tensors[name] for name in self.marked)
        if not _same(marked, self._marked_tensors):
            self._marked_batches = self._batches(tensors, frozenset(self.marked))
            self._marked_tensors = marked
        self._tensors = tensors

    def _batches(
        self, tensors: Mapping[str, torch.Tensor], names: frozenset[str]
    ) -> tuple[Batch, ...]:
        return tuple(
            batch
            for shard, offset in zip(self.shards, self.offsets, strict=True)
            for batch in plan_batches(shard.layout, tensors, names, offset=offset)
        )


def prepare(
    survey: Survey, identity: ShardIdentity, *, number: int, gates: bool, static_apart: bool = False
) -> Prepared:
    """Lays out a state.

    Args:
        gates: copy what an optimizer owns behind the step; otherwise everything at its mark.
        static_apart: put static entries into files of their own, which later bases link to.
    """
    shape = survey.shape
    static = shape.static if static_apart else frozenset[str]()
    shards = plan_files(identity, shape.entries, shape.aliases, shape.objects_bytes, static)
    offsets, size_bytes = shard_offsets(BasePlan(identity, shards))
    kinds = {
        entry.name: shape.owners[entry.name].kind
        for entry in shape.entries
        if shape.owners[entry.name].kind != "logged"
    }
    gated = tuple(entry.name for entry in shape.entries if entry.name in kinds) if gates else ()
    waiting = frozenset(gated)
    ends: dict[str, int] = {}
    for shard, offset in zip(shards, offsets, strict=True):
        for place in shard.layout.placed:
            if place.entry.name in waiting:
                owner = shape.owners[place.entry.name].optimizer or ""
                ends[owner] = offset + place.end
    return Prepared(
        number=number,
        shape=shape,
        shards=shards,
        kinds=kinds if gates else {},
        offsets=offsets,
        size_bytes=size_bytes,
        gated=gated,
        marked=tuple(entry.name for entry in shape.entries if entry.name not in waiting),
        ends=ends,
    )


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
