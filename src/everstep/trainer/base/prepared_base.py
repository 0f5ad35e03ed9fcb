"""Layout of a base and the copies that fill it, computed once and reused by the bases after it.

Recomputed when the shape of the state changes (parameters, groups, new optimizer state), and in
part when tensors were replaced by others of the same shape.

State at a step mark, and detection of changes made since.

A base may have to be taken after its step mark: training ends, and ``close()`` comes later. A
forward pass that has started since (and ended in an exception or a Ctrl-C) has drawn random
numbers, counted batches and fetched data; the state then belongs to no step, although no optimizer
has updated. Tensors that optimizers own still have their values of the mark, and encoded objects
were copied there. All other tensors are compared: small ones in host memory byte by byte, the rest
by torch's version counters, large ones in host memory by a few elements as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from everstep.capture import Batch, Chunks, Versions, plan_batches
from everstep.capture.batches import Runs
from everstep.capture.spot_check import SpotCheck
from everstep.format import BasePlan, ShardIdentity
from everstep.format.header import ShardPlan, plan_files
from everstep.link.capture import shard_offsets
from everstep.seams.memory import copy_memory
from everstep.state.layout import ShardLayout
from everstep.state.survey import Shape, Survey, same_objects
from everstep.state.values.tensors import host_bytes


@dataclass(frozen=True, slots=True)
class PlannedCopies:
    """Copies that may run after a step mark, and the checks that they were made correctly.

    Attributes:
        batches: the copies, in file order.
        ends: bytes of the block that must be copied before an optimizer may update, by its key.
        check: samples of elements to compare after the copy; None if nothing is copied.
        versions: version counters of the copied tensors; None if they are checked elsewhere.
    """

    batches: Sequence[Batch]
    ends: Mapping[str, int]
    check: SpotCheck | None
    versions: Versions | None = None

    @classmethod
    def of(
        cls,
        batches: Sequence[Batch],
        ends: Mapping[str, int],
        layouts: Sequence[tuple[ShardLayout, int]],
        tensors: Mapping[str, torch.Tensor],
        names: Collection[str],
    ) -> PlannedCopies:
        """Return copies of the entries ``names``, with both checks; arguments as for
        :class:`.SpotCheck`."""
        check = SpotCheck(layouts, tensors, names) if names else None
        return cls(batches, ends, check, Versions({name: tensors[name] for name in names}))

    @property
    def end(self) -> int:
        """Return the offset in the block at which the last batch ends, in bytes."""
        if isinstance(self.batches, Chunks):  # indexing the last one would cut all of them
            return self.batches.end
        return self.batches[-1].end if self.batches else 0


@dataclass(slots=True)
class PreparedBase:
    """Layout of a base in host memory and in files, and the copies that fill it.

    Attributes:
        number: number that identifies this layout between trainer and keeper.
        shape: shape of the state laid out here.
        shards: files of the base.
        kinds: owner kind ("replayed", "static", ...) of each entry that has a gate, by name.
        offsets: offset of each shard in the block, in bytes.
        size_bytes: size of the block.
        gated: names of entries that may be copied after the step mark, guarded by the update gate.
        marked: names of entries that must be copied at the step mark.
        ends: bytes of the block that must be copied before an optimizer may update, by its key.
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
    _tensors: Mapping[str, torch.Tensor] | None = None  # of the last survey
    _gated_tensors: tuple[torch.Tensor, ...] = ()
    _marked_tensors: tuple[torch.Tensor, ...] = ()
    _marked_batches: tuple[Batch, ...] = ()
    _copies: PlannedCopies | None = None
    _owned: dict[str | None, frozenset[str]] = field(default_factory=dict)

    @property
    def layouts(self) -> list[tuple[ShardLayout, int]]:
        """Return the layout of each shard, with its offset in the block."""
        pairs = zip(self.shards, self.offsets, strict=True)
        return [(shard.layout, offset) for shard, offset in pairs]

    @property
    def objects_bytes(self) -> int:
        """Return the approximate size of the encoded objects, which are kept beside the block."""
        return sum(self.shape.objects_bytes.values())

    def owned_by(self, optimizer: str | None) -> frozenset[str]:
        """Return the gated entries that an optimizer (by key; None for any) may change."""
        found = self._owned.get(optimizer)
        if found is None:
            owners = self.shape.owners
            owned = (n for n in self.gated if optimizer in (None, owners[n].optimizer))
            found = self._owned[optimizer] = frozenset(owned)
        return found

    def plan(self, identity: ShardIdentity, *, behind_mark: bool = False) -> BasePlan:
        """Return the file plan of one base.

        Args:
            identity: step, timeline and rank of the base.
            behind_mark: see :class:`~everstep.format.header.ShardIdentity`.
        """
        identity = replace(identity, common=self.shape.common)
        if behind_mark:
            identity = replace(identity, behind_mark=True)
        return BasePlan(identity, self.shards, self.kinds)

    def copies(self, tensors: Mapping[str, torch.Tensor]) -> PlannedCopies:
        """Return the copies that may run after the step mark, with gates and checks."""
        self._follow(tensors)
        if self._copies is None:
            # A dict: ordered, so that the same entry is named in each process.
            names = dict.fromkeys(self.gated)
            batches = Runs(self._batches(tensors, frozenset(self.gated)))
            self._copies = PlannedCopies.of(batches, self.ends, self.layouts, tensors, names)
        return self._copies

    def marked_batches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Batch, ...]:
        """Return the copies that must be made at the step mark."""
        self._follow(tensors)
        return self._marked_batches

    def _follow(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Plan the copies again where tensors were replaced.

        The mapping of a survey never changes, so an identical mapping means identical tensors."""
        if tensors is self._tensors:
            return
        gated = tuple(tensors[name] for name in self.gated)
        if not same_objects(gated, self._gated_tensors):
            # Cleared first: an interrupt in between must not leave a plan that is taken for one of
            # the new tensors.
            self._copies = None
            self._gated_tensors = gated
        marked = tuple(tensors[name] for name in self.marked)
        if not same_objects(marked, self._marked_tensors):
            self._marked_batches = self._batches(tensors, frozenset(self.marked))
            self._marked_tensors = marked
        self._tensors = tensors

    def _batches(
        self, tensors: Mapping[str, torch.Tensor], names: frozenset[str]
    ) -> tuple[Batch, ...]:
        return tuple(
            batch
            for layout, offset in self.layouts
            for batch in plan_batches(layout, tensors, names, offset=offset)
        )


def prepare_base(
    survey: Survey, identity: ShardIdentity, *, number: int, gates: bool, static_apart: bool = False
) -> PreparedBase:
    """Lay out a state.

    Args:
        identity: identity of the base, for the names of files.
        number: number of this layout.
        gates: True to copy what optimizers own after the step mark; False to copy everything at it.
        static_apart: True to put static entries into files of their own, so that later bases can
            link to these instead of writing them again.
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
    gated_names = frozenset(gated)
    ends: dict[str, int] = {}
    for shard, offset in zip(shards, offsets, strict=True):
        for place in shard.layout.placed:
            if place.entry.name in gated_names:
                owner = shape.owners[place.entry.name].optimizer or ""
                # Places ascend, so the last entry of an owner decides. The gate waits for all bytes
                # before it, too.
                ends[owner] = offset + place.end
    return PreparedBase(
        number=number,
        shape=shape,
        shards=shards,
        kinds=kinds if gates else {},
        offsets=offsets,
        size_bytes=size_bytes,
        gated=gated,
        marked=tuple(entry.name for entry in shape.entries if entry.name not in gated_names),
        ends=ends,
    )


Tag = tuple[int, int | None]
"""Address of a tensor and its version counter; see :func:`version_tag`."""


@dataclass(frozen=True, slots=True)
class LastMark:
    """State at a step mark, for a base of that mark taken later (all methods but multi-step).

    Holds references to the tensors, so their memory stays alive, and their version tags."""

    _survey: Survey
    _tensors: tuple[torch.Tensor, ...]
    _tags: tuple[Tag, ...]
    _random: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def survey(self) -> Survey:
        """Return the survey taken at the mark.

        Later surveys write the states of random generators into the same tensors; this property
        first restores the values they had at the mark."""
        for tensor, kept in self._random:
            # Not Tensor.copy_(), which would move the version counter that is part of the tag.
            copy_memory(tensor.data_ptr(), kept.data_ptr(), kept.nbytes)
        return self._survey

    @classmethod
    def of(cls, survey: Survey, names: Sequence[str], random: Sequence[str]) -> LastMark:
        """Return the current state as that of a step mark.

        Args:
            names: entries recorded by the log's step marks: mutable, and owned by no optimizer.
            random: subset of ``names``: states of random generators.
        """
        tensors = tuple(survey.tensors[name] for name in names)
        kept = tuple((one, one.clone()) for one in map(survey.tensors.__getitem__, random))
        return cls(survey, tensors, tuple(map(version_tag, tensors)), kept)

    @property
    def is_intact(self) -> bool:
        """Return True if the tensors that no optimizer owns are unchanged since the mark.

        A tensor replaced since then does not matter: this object refers to the old one. BatchNorm
        updates its statistics without a version counter, but its batch counter has one."""
        return self._tags == tuple(map(version_tag, self._tensors))


def version_tag(tensor: torch.Tensor) -> Tag:
    """Return a tensor's address and version counter; the counter is None for inference tensors."""
    # An inference tensor has no counter, and cannot be written in place outside inference mode.
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


_LARGE_BYTES = 1 << 16
_SOME = 64  # elements of a large tensor


@dataclass(frozen=True, slots=True)
class MarkSnapshot:
    """State at a step mark without the tensors that optimizers own (multi-step bases), or the
    complete state before any training.

    Attributes:
        survey: survey taken at the mark, with copies of the objects.
        values: bytes of the tensors that no optimizer owns, by entry name; of large ones a sample.
        tags: version tags, by entry name, of the tensors not completely held in ``values``.
    """

    survey: Survey
    values: Mapping[str, bytes]
    tags: Mapping[str, Tag]

    @classmethod
    def of(cls, survey: Survey, names: Iterable[str]) -> MarkSnapshot:
        """Return a snapshot of the current state.

        Args:
            names: entries to compare.
        """
        values = {}
        tags = {}
        for name in names:
            tensor = survey.tensors[name]
            small = tensor.numel() * tensor.element_size() <= _LARGE_BYTES
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                tags[name] = version_tag(tensor)
            elif small:
                values[name] = bytes(host_bytes(tensor))
            else:
                tags[name] = version_tag(tensor)
                # A name of its own keeps the copy alive: host_bytes() returns a view.
                some = _some(tensor)
                values[name] = bytes(host_bytes(some))
        return cls(survey, values, tags)

    def holds(self, survey: Survey) -> bool:
        """Return True if ``survey`` found the same values and objects."""
        now = MarkSnapshot.of(survey, list({**self.values, **self.tags}))
        if now.values != self.values or now.tags != self.tags:
            return False
        then = {section: tree.data for section, tree in self.survey.encoded().items()}
        return then == {section: tree.data for section, tree in survey.encoded().items()}


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return about ``_SOME`` evenly spaced elements of a contiguous tensor, as a copy."""
    return tensor.detach().view(-1)[:: max(1, tensor.numel() // _SOME)].clone()
