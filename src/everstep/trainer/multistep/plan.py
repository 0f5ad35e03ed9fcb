"""Parts of a multi-step base, planned before the base is due (GoCkpt, section 4.2).

A parameter may be captured before the last step if replay can bring it there: all of its entries
are replayed, by one optimizer, and its optimizer state consists of tensors. Everything else
(buffers, random generators, tensors shared by two optimizers, averages) is captured at the last
step mark only.

A base is cut after a step in which nothing is captured, with the measurements so far; when it
begins, only changes since then are planned again. Where a device copies, the memory of the
gradients is pinned after that step, too (:mod:`everstep.capture.pinned`), which may take
longer than until the next base is due; as long as it does, bases are planned for the memory that is
ready."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from everstep.capture import Batch, Chunks, Lane, plan_batches
from everstep.link.assembly import Samples
from everstep.link.pool import CapturePool
from everstep.link.recordable import state_digest
from everstep.restore.redo import parameter_names
from everstep.state.layout import ShardLayout
from everstep.state.ownership import Owner
from everstep.state.providers import ModuleProvider, OptimizerProvider
from everstep.state.ranks import updated_elsewhere
from everstep.state.survey import Shape, same_objects
from everstep.state.training_state import State
from everstep.state.values.objects import TensorRef
from everstep.state.values.tree import references, split
from everstep.trainer.base import PlannedCopies, PreparedBase
from everstep.trainer.log import InputReader, WatchedTensors
from everstep.trainer.multistep.partition import Partitioner, Unit


@dataclass(frozen=True, slots=True)
class Part:
    """Entries captured in one step.

    Attributes:
        entries: names of the entries.
        parameters: names of the captured parameters, by the key of their optimizer.
        size_bytes: size of the entries.
    """

    entries: frozenset[str]
    parameters: Mapping[str, frozenset[str]]
    size_bytes: int

    @classmethod
    def of(cls, units: Iterable[Unit], others: Iterable[str] = ()) -> Part:
        """Return a part made of ``units`` and of the entries ``others``."""
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
    """Copies of some entries, and the tensors they were planned for.

    Attributes:
        tensors: the tensors.
        chunks: the copies, in chunks.
        copies: the copies with gates and checks.
        seen: survey's mapping they were last taken from, which never changes.
        owned: watched tensors, by the key of their optimizer; None until needed.
    """

    tensors: tuple[torch.Tensor, ...]
    chunks: Chunks
    copies: PlannedCopies
    seen: Mapping[str, torch.Tensor]
    owned: Mapping[str, WatchedTensors] | None = None


@dataclass(eq=False)
class WindowPlan:
    """Layout of a base, cut into parts.

    Args:
        prepared: layout of the base.
        cut: units that may be captured before the last step, by part, in the order of the state.
        chunk_bytes: size of the chunks that are copied at once.

    Attributes:
        parts: all parts, without the entries of the last step mark.
        rest: entries copied after the last step mark, besides the parts not captured by then.
    """

    prepared: PreparedBase
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
        """Return the units that may be captured before the last step, in the order of the state."""
        return [unit for units in self.cut for unit in units]

    def last(self, begin: int) -> Part:
        """Return everything from part ``begin`` on as the last part."""
        units = [unit for units in self.cut[begin:] for unit in units]
        return Part.of(units, self.rest)

    def captured(self, end: int) -> frozenset[str]:
        """Return the names of the entries of the parts before ``end``."""
        return frozenset(name for part in self.parts[:end] for name in part.entries)

    def copies(self, names: frozenset[str], tensors: Mapping[str, torch.Tensor]) -> PlannedCopies:
        """Return the copies of the entries ``names``, which may run after a step mark."""
        known = self._planned.get(names)
        if known is not None and known.seen is tensors:
            return known.copies
        selected = tuple(tensors[name] for name in sorted(names))
        if known is None or not same_objects(selected, known.tensors):
            known = self._planned[names] = self._plan(names, selected, tensors)
        known.seen = tensors
        return known.copies

    def owned(
        self, names: frozenset[str], tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, WatchedTensors]:
        """Return watched tensors for the entries ``names``, by the key of the optimizer that
        updates them."""
        self.copies(names, tensors)
        known = self._planned[names]
        owners = self.prepared.shape.owners
        if known.owned is None:
            found: dict[str, dict[str, torch.Tensor]] = {}
            for name in names:
                owner = owners[name]
                if owner.kind == "replayed" and owner.optimizer is not None:
                    found.setdefault(owner.optimizer, {})[name] = tensors[name]
            known.owned = {key: WatchedTensors(selected) for key, selected in found.items()}
        return known.owned

    def samples(self, end: int, tensors: Mapping[str, torch.Tensor]) -> list[Samples]:
        """Return samples of the parts before ``end`` as they are now (I8).

        Only of tensors on the CPU, where the keeper's replay gives the same bits."""
        names = [name for name in self.captured(end) if tensors[name].device.type == "cpu"]
        check = self.copies(frozenset(names), tensors).check
        if check is None:
            return []
        return [Samples(*some) for some in check.packed(check.take())]

    def copy_in(self, chunk_bytes: int) -> None:
        """Change the size of the chunks."""
        if chunk_bytes == self.chunk_bytes:
            return
        self.chunk_bytes = chunk_bytes
        for known in self._planned.values():
            known.chunks = known.chunks.cut_in(chunk_bytes)
            known.copies = replace(known.copies, batches=known.chunks)

    def _plan(
        self,
        names: frozenset[str],
        selected: tuple[torch.Tensor, ...],
        tensors: Mapping[str, torch.Tensor],
    ) -> _Planned:
        batches: list[Batch] = []
        layouts: list[tuple[ShardLayout, int]] = []
        ends: dict[str, int] = {}
        owners = self.prepared.shape.owners
        numbers = sorted(self._numbers[name] for name in names)
        for number, some in groupby(numbers, key=itemgetter(0)):
            shard = self.prepared.shards[number]
            offset = self.prepared.offsets[number]
            places = tuple(shard.layout.placed[at] for _, at in some)
            layouts.append((ShardLayout(places), offset))
            batches += plan_batches(ShardLayout(places), tensors, names, offset=offset)
            # Places come in file order, so the last one of each optimizer sets the end of its gate.
            for place in places:
                ends[owners[place.entry.name].optimizer or ""] = offset + place.end
        chunks = Chunks(batches, self.chunk_bytes)
        copies = PlannedCopies.of(chunks, ends, layouts, tensors, names)
        return _Planned(selected, chunks, copies, tensors)


def capturable_units(state: State, shape: Shape) -> list[Unit]:
    """Return the units of a state that may be captured before the last step; those this rank
    writes.

    Args:
        state: the state.
        shape: its current shape.
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
    taken = set(updated_elsewhere(state))  # the rank that updates it has gradients and moments
    for key in state.optimizers:
        for name, parameter in _identified(state, trees, key, named):
            (entry,) = named[name]
            held = trees[key]["state"].get(name, {})
            if not _only_tensors(held):
                continue
            entries = (entry, *dict.fromkeys(canonical(ref) for ref in references(held)))
            replayed = all(_replays(key, owners.get(e)) for e in entries)
            # An entry belongs to one unit only. Others that share it are captured at the last mark.
            if replayed and taken.isdisjoint(entries):
                taken.update(entries)
                size_bytes = sum(sizes[e] for e in entries)
                gradient_bytes = sizes[entry] if parameter.requires_grad else 0
                found.append((places[entry], Unit(key, name, entries, size_bytes, gradient_bytes)))
    return [unit for _, unit in sorted(found, key=lambda item: item[0])]


def _identified(
    state: State, trees: Mapping[str, Any], key: str, named: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """Return names and parameters of an optimizer, if each parameter is exactly one entry.

    Otherwise nothing: without the program the keeper could not tell which entry a parameter is.
    """
    groups = OptimizerProvider.groups_of(trees[key]) or []
    names = [name for group in groups for name in group]
    if any(len(named.get(name, ())) != 1 for name in names):
        return []
    members = [p for group in state.optimizers[key].param_groups for p in group["params"]]
    return list(zip(names, members, strict=True))


def replayable_gradient_bytes(state: State, shape: Shape) -> int:
    """Return the approximate size of a step's gradients that multi-step bases may need, in
    bytes."""
    return sum(unit.gradient_bytes for unit in capturable_units(state, shape))


def _replays(optimizer: str, owner: Owner | None) -> bool:
    """Return True if this rank writes the entry and only the optimizer's updates change it."""
    return owner is not None and owner.kind == "replayed" and owner.optimizer == optimizer


def _only_tensors(held: Any) -> bool:
    """Return True if a parameter's optimizer state has no values besides its tensors that
    change."""
    return isinstance(held, dict) and all(
        value is None or isinstance(value, TensorRef) for value in held.values()
    )


def redo_bytes(parts: Sequence[Sequence[Unit]]) -> int:
    """Return the approximate size of the gradients a window copies: of each part those of
    all later steps."""
    return sum(
        (len(parts) - 1 - number) * sum(unit.gradient_bytes for unit in part)
        for number, part in enumerate(parts)
    )


class WindowPlanner:
    """Plans of the windows of one training process.

    Args:
        state: state to capture.
        lane: lane whose memory is pinned ahead.
        partitioner: chooses the parts.
        consumption: knows the parameter groups.
        explicit: the user set the number of parts, which then does not depend on pinned memory.
        logged: the log has the gradients: a window copies none.

    Attributes:
        plan: last plan made for the current keeper.
        timed: done when a base of one step has measured the link; None before it.
        is_ahead: True if the next base is planned and nothing has happened since.
    """

    def __init__(
        self,
        state: State,
        lane: Lane,
        partitioner: Partitioner,
        consumption: InputReader,
        *,
        explicit: bool,
        logged: bool = False,
    ) -> None:
        self._state = state
        self._lane = lane
        self._partitioner = partitioner
        self._consumption = consumption
        self._explicit = explicit
        self._logged = logged
        self._digest: tuple[object, str] = (None, "")
        self.plan: WindowPlan | None = None
        self.timed: Future[None] | None = None
        self.is_ahead = False

    def digest_of(self, shape: Shape) -> str:
        """Return the digest of the state's shape and of its current parameter groups."""
        consumption = self._consumption
        # By identity: the entries stay the same object as long as the shape is the same.
        if self._digest[0] is not shape.entries or not consumption.grouped_as_before():
            self._digest = (shape.entries, state_digest(shape, consumption.regroup()))
        return self._digest[1]

    @property
    def is_timing(self) -> bool:
        """Return True until the first base has measured the link; plans made before would
        not be used."""
        waits = self.timed is not None and not self.timed.done()
        return waits and not self._partitioner.knows_link

    @contextlib.contextmanager
    def timing_link(
        self, size_bytes: int, tensors: Mapping[str, torch.Tensor], pool: CapturePool
    ) -> Iterator[None]:
        """Measure the link by a base of one step, whose copies the block submits."""
        timed = None
        # Otherwise the copy would measure how fast memory is touched, not the link.
        if self._lane.ready_bytes(tensors.values(), pool.whole) >= size_bytes:
            timed = self._partitioner.timed(size_bytes)
        yield
        if timed is not None:
            self.timed = self._lane.run(timed.ended)

    def start(self) -> None:
        """Forget all plans: another keeper is in service, which has received no layout."""
        self.plan = None
        self.is_ahead = False

    def next(
        self,
        prepared: PreparedBase,
        tensors: Mapping[str, torch.Tensor],
        pool: CapturePool,
        *,
        waits: bool,
        ahead: bool = False,
    ) -> WindowPlan:
        """Return the plan of the base that begins now, or ahead of it.

        It is for all memory if that is ready or the user set the number of parts, else for the
        memory that is ready beside the previous base.

        Args:
            prepared: layout of the base.
            tensors: live tensors, by entry name.
            pool: host memory for the base and for gradients.
            waits: updates wait for the copies of their gradients.
            ahead: no base is due yet; prepare the memory that the plan wants.
        """
        self.is_ahead = ahead
        plan = self.plan
        if plan is not None and plan.prepared is not prepared:
            plan = None
        units = self._units(prepared.shape) if plan is None else plan.units
        now = None if plan is None else plan.cut

        def cut_for(memory_bytes: int) -> Sequence[Sequence[Unit]]:
            return self._partitioner.cut(
                units, prepared.size_bytes, memory_bytes, waits=waits, now=now, warn=not ahead
            )

        plain_bytes = prepared.objects_bytes
        cut = cut_for(pool.arena.size_bytes - plain_bytes)
        if len(cut) > 1:
            base_bytes = pool.rounded_bytes(prepared.size_bytes)
            # Two bases, because the previous one may be in the arena until this one is complete.
            # Plain data counts against the arena, too.
            most_bytes = max(0, pool.arena.size_bytes - 2 * plain_bytes)
            wanted_bytes = min(2 * base_bytes + redo_bytes(cut), most_bytes)
            ready_bytes = self._lane.ready_bytes(tensors.values(), pool.whole)
            if ready_bytes < wanted_bytes:
                if ahead:
                    self._lane.warm(tensors.values(), pool.whole[:wanted_bytes], pool.warm)
                if not self._explicit:
                    cut = cut_for(max(0, ready_bytes - base_bytes))
        # The same object means that the parts are the current ones, whose planned copies stay
        # valid.
        if plan is None or plan.cut is not cut:
            plan = self.plan = WindowPlan(prepared, cut, self._partitioner.chunk_bytes)
        plan.copy_in(self._partitioner.chunk_bytes)
        return plan

    def _units(self, shape: Shape) -> list[Unit]:
        """Return the units that may be captured before the last step, with the gradients that a
        window copies."""
        units = capturable_units(self._state, shape)
        return [replace(unit, gradient_bytes=0) for unit in units] if self._logged else units
