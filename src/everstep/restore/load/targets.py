"""What a base is read into: live tensors as they lie, or memory that is copied or wrapped later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from everstep.errors import FormatError
from everstep.restore.load.nonfinite import are_finite, optimized
from everstep.restore.load.reshard import View
from everstep.run.tensors import as_it_lay, write_into
from everstep.seams.machine import memory_available_bytes
from everstep.state.layout.entries import Entry
from everstep.state.layout.placement import Box
from everstep.state.providers.provider import RestorePlan
from everstep.state.training_state import State
from everstep.state.values.tensors import (
    box_of,
    empty_like_entry,
    is_dtensor,
    like,
    local_of,
    same_strides,
)
from everstep.state.values.tree import references

__all__ = ["Looks", "Targets", "part_of", "relaid", "wanted_box"]


@dataclass(slots=True)
class Targets:
    """What gets the values.

    Attributes:
        tensors: by the name by which trees refer to them.
        memory: what is read into, contiguous on the host, by the same names, and which box of
            the whole tensor it is.
        copies: from there into live tensors that could not be read into as they lie.
        lay: strides of what is made here and lay in another order when it was saved, without gaps.
            Fused kernels go through parameters and moments as they lie in memory, side by side.
        spread: what will be DTensors: entry, and one that is spread alike.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    memory: dict[str, tuple[torch.Tensor, Box]] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    spread: dict[str, tuple[Entry, torch.Tensor]] = field(default_factory=dict)
    lay: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, plans: Mapping[str, RestorePlan], entries: Mapping[str, Entry]) -> Targets:
        """A live tensor that can be read into as it lies is its own target. One that cannot (on
        a device, not contiguous) gets a fresh contiguous one first and a copy at the end."""
        targets = cls()
        fresh: dict[str, torch.Tensor | None] = {}
        apart = _apart(plans, entries)
        for plan in plans.values():
            for name in references(plan.tree):
                live = apart.get(name, plan.in_place.get(name))
                if live is None:
                    fresh[name] = plan.like.get(name)
                    continue
                targets.tensors[name] = live
                local = local_of(live)
                box = wanted_box(entries[name], live)
                if not _readable_in_place(local):
                    source = empty_like_entry(part_of(entries[name], box))
                    targets.copies.append((source, local))
                    local = source
                targets.memory[name] = (local, box)
        targets._make(fresh, entries)
        return targets

    def _make(self, fresh: Mapping[str, torch.Tensor | None], entries: Mapping[str, Entry]) -> None:
        parts: dict[str, tuple[Entry, Box]] = {}
        for name, template in fresh.items():
            entry = entries[name]
            box = wanted_box(entry, template)
            # Tensors that were one when they were saved become one again.
            parts.setdefault(entry.name, (part_of(entry, box), box))
            if template is not None:
                self.spread[name] = (entry, template)
            elif entry.stride is not None and _is_dense(entry):
                self.lay[name] = entry.stride
        claimed = sum(part.size_bytes for part, _ in parts.values())
        if claimed > memory_available_bytes():  # before any of it is taken
            raise FormatError(
                f"the checkpoint claims {claimed} bytes of state that is not here yet; this "
                f"machine has {memory_available_bytes()} bytes of memory left"
            )
        made = {name: (empty_like_entry(part), box) for name, (part, box) in parts.items()}
        for name in fresh:
            self.memory[name] = made[entries[name].name]
            self.tensors[name] = self.memory[name][0]

    def finish(self) -> dict[str, torch.Tensor]:
        """The tensors, all of whose bytes have come."""
        for source, live in self.copies:
            write_into(live, source)
        for name, (entry, template) in self.spread.items():
            self.tensors[name] = like(template, entry, self.memory[name][0])
        turned: dict[int, torch.Tensor] = {}  # each once, whatever its names
        for name, stride in self.lay.items():
            memory = self.memory[name][0]
            if id(memory) not in turned:
                turned[id(memory)] = as_it_lay(memory, stride)
            self.tensors[name] = turned[id(memory)]
        return self.tensors


def _apart(
    plans: Mapping[str, RestorePlan], entries: Mapping[str, Entry]
) -> dict[str, torch.Tensor]:
    """Memory for what is copied in any case, where it is one tensor here and was several when it
    was saved, or the other way round: a group of an optimizer got a rate of its own in mid-run."""
    copied = {name for plan in plans.values() for name in plan.copied if name in plan.in_place}
    if not copied:
        return {}
    live = {name: tensor for plan in plans.values() for name, tensor in plan.in_place.items()}
    pairs = {(_memory(tensor), entries[name].name) for name, tensor in live.items()}
    here = Counter(memory for memory, _ in pairs)
    there = Counter(entry for _, entry in pairs)
    made: dict[str, torch.Tensor] = {}  # what was one when it was saved is one
    return {
        name: made.setdefault(entries[name].name, torch.empty_like(live[name]))
        for name in sorted(copied)
        if here[_memory(live[name])] > 1 or there[entries[name].name] > 1
    }


def _memory(tensor: torch.Tensor) -> tuple[str, int]:
    local = local_of(tensor)
    return str(local.device), local.data_ptr()


@dataclass(frozen=True, slots=True)
class Looks:
    """Looks at the bytes of parameters as they come, while they lie in the cache.

    Attributes:
        live: by the number of the file and the index of the only piece that fills a parameter,
            which lies in the target's memory: its name, and the dtype of what comes.
        finite: names of those that hold nothing but numbers.
        nonfinite: those of which something came that is none.
    """

    live: Mapping[tuple[int, int], tuple[str, str]]
    finite: set[str] = field(default_factory=set)
    nonfinite: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, state: State, targets: Targets, view: View) -> Looks:
        live: dict[tuple[int, int], tuple[str, str]] = {}
        held = ((name, local_of(parameter)) for name, parameter in optimized(state))
        names = {here.data_ptr(): (name, here.numel()) for name, here in held}
        for entry, (memory, _) in targets.memory.items():
            pieces = view.pieces[entry]
            name, size = names.get(memory.data_ptr(), ("", 0))
            if size == memory.numel() and len(pieces) == 1:  # all of it comes from there
                live[pieces[0].file, pieces[0].index] = name, pieces[0].entry.dtype
        return cls(live)

    def came(self, file: int, index: int, data: memoryview) -> None:
        """Some whole elements of an entry."""
        name, dtype = self.live.get((file, index), ("", ""))
        if name and name not in self.nonfinite and not are_finite(data, dtype):
            self.nonfinite.add(name)

    def entry_done(self, file: int, index: int) -> None:
        """All of an entry has come, and it is good."""
        name, _ = self.live.get((file, index), ("", ""))
        if name and name not in self.nonfinite:
            self.finite.add(name)


def wanted_box(entry: Entry, tensor: torch.Tensor | None) -> Box:
    """Which part of an entry this rank wants: that of ``tensor``, or all of it."""
    shape = entry.global_shape
    if tensor is None:
        return Box((0,) * len(shape), shape)
    box = box_of(tensor)
    pairs = shape[len(box.shape) :]  # of complex128
    return Box((*box.offset, *(0 for _ in pairs)), (*box.shape, *pairs))


def relaid(view: View, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Names of those that lie otherwise in memory than when they were saved: what replays the
    updates behind the base takes other ways through them. Of parts of tensors nothing is known."""
    found = set()
    for name, tensor in tensors.items():
        pieces = view.pieces[name]
        if len(pieces) != 1 or is_dtensor(tensor) or not tensor.numel():
            continue
        entry = pieces[0].entry
        shape = tuple(tensor.shape)
        if entry.stride is None and tensor.is_contiguous():  # mostly
            continue
        if entry.shape != entry.global_shape or entry.shape[: len(shape)] != shape:
            continue
        stride = entry.stride or torch.empty(shape, device="meta").stride()
        if len(stride) != len(shape) or not same_strides(shape, stride, tensor.stride()):
            found.add(name)
    return frozenset(found)


def part_of(entry: Entry, box: Box) -> Entry:
    """The entry of a part of a tensor alone."""
    return Entry.whole(entry.name, entry.dtype, box.shape, logical_dtype=entry.logical_dtype)


def _is_dense(entry: Entry) -> bool:
    """Whether its strides are those of as many elements, each at a place of its own."""
    shape = entry.shape[:-1] if entry.logical_dtype is not None else entry.shape
    stride = entry.stride or ()
    if len(stride) != len(shape):
        return False
    expected = 1
    for step, count in sorted(zip(stride, shape, strict=True)):
        if count > 1:
            if step != expected:
                return False
            expected *= count
    return True


def _readable_in_place(tensor: torch.Tensor) -> bool:
    plain = not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and plain
