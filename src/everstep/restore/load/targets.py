"""What a base is read into: live tensors as they lie, or memory that is copied or wrapped later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.errors import FormatError, MismatchError, RecoveryError
from everstep.restore.load.nonfinite import are_finite, optimized
from everstep.restore.load.saved_ranks import View
from everstep.run.tensors import copy_into, with_strides
from everstep.seams.machine import memory_available_bytes
from everstep.state.layout.entries import Entry
from everstep.state.layout.placement import Box
from everstep.state.providers.gradients import discard_gradients
from everstep.state.providers.modules import ModuleProvider
from everstep.state.providers.provider import RestorePlan
from everstep.state.training_state import State
from everstep.state.values.tensors import (
    byte_view,
    dtensor_like,
    empty_like_entry,
    is_dtensor,
    local_box,
    local_tensor,
    same_strides,
)
from everstep.state.values.tree import join, references

__all__ = [
    "FiniteCheck",
    "Targets",
    "box_here",
    "overlap_conflicts",
    "overlapping_entries",
    "part_of",
    "restore_into",
    "restrided",
    "shared_memory_error",
    "tie_changes",
]


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
                local = local_tensor(live)
                box = box_here(entries[name], live)
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
            box = box_here(entry, template)
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
            copy_into(live, source)
        for name, (entry, template) in self.spread.items():
            self.tensors[name] = dtensor_like(template, entry, self.memory[name][0])
        turned: dict[int, torch.Tensor] = {}  # each once, whatever its names
        for name, stride in self.lay.items():
            memory = self.memory[name][0]
            if id(memory) not in turned:
                turned[id(memory)] = with_strides(memory, stride)
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
    local = local_tensor(tensor)
    return str(local.device), local.data_ptr()


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """FiniteCheck at the bytes of parameters as they come, while they lie in the cache.

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
    def of(cls, state: State, targets: Targets, view: View) -> FiniteCheck:
        live: dict[tuple[int, int], tuple[str, str]] = {}
        held = ((name, local_tensor(parameter)) for name, parameter in optimized(state))
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


def box_here(entry: Entry, tensor: torch.Tensor | None) -> Box:
    """Which part of an entry this rank wants: that of ``tensor``, or all of it."""
    shape = entry.global_shape
    if tensor is None:
        return Box((0,) * len(shape), shape)
    box = local_box(tensor)
    pairs = shape[len(box.shape) :]  # of complex128
    return Box((*box.offset, *(0 for _ in pairs)), (*box.shape, *pairs))


def restrided(view: View, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
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


def overlapping_entries(view: View, targets: Targets) -> dict[str, str]:
    """``name -> digest`` of tensors that overlap in memory here, but are different entries:
    only what they hold in the end tells whether all of them got what was saved for them.

    Raises:
        RecoveryError: where two of them are the same memory and cannot both get their values.
    """
    live = {name: local_tensor(tensor) for name, tensor in targets.tensors.items()}
    found: dict[str, str] = {}
    for cluster in _overlapping(live):
        if len({view.entries[other].name for other in cluster}) > 1:
            found.update({other: _digest_of(view, other) for other in cluster})
        same: dict[tuple[Any, ...], str] = {}
        for name in cluster:
            mine = view.pieces[name][0].digest
            if same.setdefault(_place_of(live[name]), mine) != mine:
                raise shared_memory_error(name)
    return found


def overlap_conflicts(
    targets: Targets, entries: Mapping[str, Entry], tensors: Mapping[str, torch.Tensor]
) -> list[tuple[str, str]]:
    """Return tensors that overlap in memory here and were different ones when they were saved, with
    values that they cannot all get; each with what is wrong.

    Args:
        entries: by the names of the targets.
        tensors: the saved values, by the names of the entries.
    """
    live = {name: local_tensor(tensor) for name, tensor in targets.tensors.items()}
    found = list[tuple[str, str]]()
    for first, *others in _overlapping(live):
        mine = tensors[entries[first].name]
        for name in others:
            theirs = tensors[entries[name].name]
            if theirs is mine:
                continue
            same = _place_of(live[first]) == _place_of(live[name])
            if not (same and torch.equal(byte_view(mine), byte_view(theirs))):
                found.append((name, f"overlaps in memory with {first!r} here, of another value"))
    return found


def _overlapping(live: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of tensors that overlap in memory, those that overlap together."""
    spans = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + _extent_bytes(t), name)
        for name, t in live.items()
        if t.numel()
    )
    found: list[list[str]] = []
    on = ""
    reach = 0
    for device, begin, end, name in spans:
        if device != on or begin >= reach:
            found.append([])
            on = device
            reach = end
        found[-1].append(name)
        reach = max(reach, end)
    return [cluster for cluster in found if len(cluster) > 1]


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def tie_changes(view: View, targets: Targets, held: set[str]) -> tuple[str, ...]:
    """Which tensors of the program were one when they were saved, and are several now, or the
    other way round. All have got their values; training goes on as another one would.

    Args:
        held: names of those that the program had before, or has for itself.
    """
    names: dict[tuple[str, Any], str] = {}  # the first of each entry, and of each memory
    for name in sorted(targets.tensors.keys() & held):
        here = local_tensor(targets.tensors[name])
        if here.numel():
            where = str(here.device), here.data_ptr(), here.shape, here.stride(), here.dtype
            names.setdefault((view.entries[name].name, where), name)
    apart: dict[str, list[str]] = {}
    together: dict[Any, list[str]] = {}
    for (entry, where), name in names.items():
        apart.setdefault(entry, []).append(name)
        together.setdefault(where, []).append(name)
    were_one = "were one tensor when they were saved, and are several now"
    were_several = "were several tensors when they were saved, and are one now"
    return (
        *(f"{', '.join(tied)} {were_one}" for tied in apart.values() if len(tied) > 1),
        *(f"{', '.join(tied)} {were_several}" for tied in together.values() if len(tied) > 1),
    )


def _digest_of(view: View, name: str) -> str:
    """What a whole tensor will have as its digest."""
    pieces = view.pieces[name]
    if len(pieces) != 1 or pieces[0].entry.shape != view.entries[name].shape:
        raise shared_memory_error(name)
    return pieces[0].digest


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element, gaps included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.element_size()


def shared_memory_error(name: str) -> RecoveryError:
    """What is raised where tensors that are one here cannot all get their values."""
    return RecoveryError(
        f"{name!r} shares its memory with another tensor here, but different values are saved "
        "for the two",
        hint="build the model with the same tied weights and views as when it was saved",
    )


def restore_into(
    state: State,
    trees: Mapping[str, Any],
    entries: Mapping[str, Entry],
    tensors: Mapping[str, torch.Tensor],
    *,
    step: int,
    takes: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Restore all parts of ``state`` and return what could not be taken back, in words.

    Args:
        trees: object trees of the parts that the state has.
        entries: of whole tensors, by every name that the trees use.
        tensors: their values on the host, by the names of the entries.
        step: for the error.
        takes: says which entries of modules are restored; other parts are restored whole.

    Raises:
        MismatchError: listing every difference in names, shapes or dtypes; nothing was touched.
    """
    modules = {name for name, one in state.providers.items() if isinstance(one, ModuleProvider)}
    chosen = {
        section: {key: value for key, value in tree.items() if takes(f"{section}/{key}")}
        if section in modules and isinstance(tree, dict)
        else tree
        for section, tree in trees.items()
    }
    plans = state.plan_restore(chosen, entries)
    mismatches = tuple(
        (name, what)
        for section, plan in plans.items()
        for name, what in plan.mismatches
        if section not in modules or name == section or takes(name)
    )
    targets = None if mismatches else Targets.of(plans, entries)
    if targets is not None:
        mismatches = tuple(overlap_conflicts(targets, entries, tensors))
    if mismatches or targets is None:
        listed = "\n".join(f"  {name}: {problem}" for name, problem in mismatches)
        raise MismatchError(
            f"the checkpoint and the objects of into= differ in {len(mismatches)} place(s):\n"
            f"{listed}",
            mismatches=mismatches,
            step=step,
            hint="build the same objects, and give the modules that an optimizer trains along with "
            "it; load() without into= gives what is there",
        )
    for name, (memory, box) in targets.memory.items():
        whole = tensors[entries[name].name]
        for dim, (begin, size) in enumerate(zip(box.offset, memory.shape, strict=False)):
            whole = whole.narrow(dim, begin, size)
        with torch.no_grad():
            memory.copy_(whole)
    made = targets.finish()
    notes = list[str]()
    for section in state.restore_order():
        plan = plans[section]
        provider = state.providers[section]
        partly = section in modules and len(plan.tree) < len(trees[section])
        notes += provider.restore(join(plan.tree, made), strict=not partly)
    return notes + discard_gradients(state.stateful_objects, state.optimizers.values())
