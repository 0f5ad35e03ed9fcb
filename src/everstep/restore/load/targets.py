"""Destinations of the entries of a base: live tensors, or memory that is copied or wrapped later.

A digest covers a complete piece of an entry. If only some of a piece is needed, the piece is read
completely and the rest is dropped.

Also the checks of tensors that share memory, and :func:`restore_into`, which restores a state from
host memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from everstep.errors import FormatError, MismatchError, RecoveryError
from everstep.format.header import ShardHeader
from everstep.restore.load.saved_ranks import Piece, SavedRanks, View
from everstep.run.tensors import copy_into, with_strides
from everstep.seams.machine import memory_available_bytes
from everstep.state.layout import Box, Entry
from everstep.state.layout.entries import DTYPE_BYTES
from everstep.state.layout.shards import overlaps
from everstep.state.providers import ModuleProvider, RestorePlan
from everstep.state.providers.gradients import discard_gradients
from everstep.state.training_state import State
from everstep.state.values.tensors import (
    byte_view,
    dtensor_over,
    empty_like_entry,
    is_dtensor,
    local_box,
    local_tensor,
    same_strides,
)
from everstep.state.values.tree import join, references


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """Copy of some elements of a piece into memory.

    Attributes:
        overlap: box of the elements, in the full tensor.
        box: box of the full tensor that ``memory`` holds, row-major.
    """

    piece: Piece
    overlap: Box
    box: Box
    memory: memoryview

    @property
    def run(self) -> tuple[int, int, int] | None:
        """``(begin, end, at)``: byte range of the piece that is contiguous both there and in
        the memory, where it starts at ``at``; None if it is not contiguous."""
        mine = self.overlap.shape[1:]
        theirs = self.piece.box
        # Only rows of full width are contiguous on both sides.
        if not mine == theirs.shape[1:] == self.box.shape[1:]:
            return None
        row = math.prod(mine) * DTYPE_BYTES[self.piece.entry.dtype]
        if not self.overlap.shape:
            return 0, row, 0
        first = self.overlap.offset[0]
        rows = self.overlap.shape[0]
        begin = (first - theirs.offset[0]) * row
        return begin, begin + rows * row, (first - self.box.offset[0]) * row

    def copy(self, data: bytearray | memoryview) -> None:
        """Copy the elements from the bytes of the complete piece."""
        # Unsigned integers of the same width: NumPy has no bfloat16 or float8, and all bits are
        # kept.
        dtype = np.dtype(f"u{DTYPE_BYTES[self.piece.entry.dtype]}")
        source = np.frombuffer(data, dtype).reshape(self.piece.box.shape)
        target = np.frombuffer(self.memory, dtype).reshape(self.box.shape)
        target[self.overlap.slices_in(self.box)] = source[self.overlap.slices_in(self.piece.box)]


def fills(pieces: Iterable[Piece], box: Box, memory: memoryview) -> tuple[list[Fill], int]:
    """Return the copies from ``pieces`` into ``memory``, which holds ``box``, and the number of
    elements that no piece has.

    Raises:
        FormatError: two pieces overlap.
    """
    found: list[Fill] = []
    for piece in pieces:
        overlap = box.meet(piece.box)
        if overlap is None or not box.size:
            continue
        # The number of missing elements below is a difference of sums: an overlap would hide a
        # hole.
        if any(overlap.meet(other.overlap) for other in found):
            raise FormatError(f"shards of {piece.entry.name!r} overlap")
        found.append(Fill(piece, overlap, box, memory))
    return found, box.size - sum(fill.overlap.size for fill in found)


def fills_by_file(
    saved: SavedRanks, wanted: Iterable[tuple[str, Iterable[Piece], Box, memoryview]]
) -> dict[int, list[Fill]]:
    """Return the copies to make, by file number.

    Args:
        wanted: for each tensor its name, its pieces, the box to read, and the memory for it.

    Raises:
        HoleError: elements are in no file; lists them.
        FormatError: two pieces overlap.
    """
    files: dict[int, list[Fill]] = {}
    holes: dict[str, str] = {}
    for name, pieces, box, memory in wanted:
        found, missing = fills(pieces, box, memory)
        if missing:
            holes[name] = f"{missing} of {box.size} elements at {list(box.offset)}"
        for fill in found:
            files.setdefault(fill.piece.file, []).append(fill)
    if holes:
        raise saved.hole(holes)
    return files


class PieceReads:
    """Copies the pieces of one file to their destinations as the bytes arrive.

    Args:
        fills: copies from pieces of this file.
    """

    def __init__(self, header: ShardHeader, fills: Sequence[Fill]) -> None:
        self._placed = header.placed
        self._fills: dict[int, list[Fill]] = {}
        for fill in fills:
            self._fills.setdefault(fill.piece.index, []).append(fill)
        self.wanted = sorted(self._fills)
        self._staged: dict[int, bytearray] = {}
        places = [(index, self._placed[index]) for index in self.wanted]
        # An empty entry begins where the next one does, and would take its key in ``_index``.
        filled = [(index, place) for index, place in places if place.end > place.begin]
        self._index = {place.begin: index for index, place in filled}
        self._some = [place for _, place in filled]
        self._ends = [place.end for place in self._some]

    def sink(self, begin: int, piece: memoryview) -> None:
        """Consume the next bytes of the body."""
        for place, start, stop in overlaps(self._some, self._ends, begin, piece.nbytes):
            index = self._index[place.begin]
            data = piece[start - begin : stop - begin]
            self._put(index, start - place.begin, data, place.end - place.begin)

    def entry_done(self, index: int) -> None:
        """Finish an entry that has arrived completely and was verified."""
        data = self._staged.pop(index, None)
        if data is not None:
            for fill in self._fills[index]:
                if fill.run is None:
                    fill.copy(data)

    def _put(self, index: int, at: int, data: memoryview, size_bytes: int) -> None:
        end = at + data.nbytes
        for fill in self._fills[index]:
            run = fill.run
            # Rows are not contiguous in the destination: collect the complete piece, and copy it
            # when verified.
            if run is None:
                staged = self._staged.get(index)
                if staged is None:
                    staged = self._staged[index] = bytearray(size_bytes)
                staged[at:end] = data
                continue
            # Written before the entry is verified: if it proves damaged, the caller restores
            # another base over it (``adr/006``).
            begin = max(at, run[0])
            stop = min(end, run[1])
            if begin < stop:
                to = begin - run[0] + run[2]
                fill.memory[to : to + stop - begin] = data[begin - at : stop - at]


@dataclass(slots=True)
class Targets:
    """Destinations of a restore.

    Attributes:
        tensors: by the names that trees refer to.
        memory: contiguous host memory to read into, by the same names, and the box of the full
            tensor that it holds.
        copies: ``(source, live)`` pairs for live tensors that cannot be read into directly.
        lay: strides of new tensors that were saved in another dense order. Fused kernels process
            parameters and moments side by side in memory order.
        spread: a template of each entry to be wrapped as a DTensor.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    memory: dict[str, tuple[torch.Tensor, Box]] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    spread: dict[str, torch.Tensor] = field(default_factory=dict)
    lay: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, plans: Mapping[str, RestorePlan], entries: Mapping[str, Entry]) -> Targets:
        """Choose the destination of each tensor.

        A live tensor on the CPU and contiguous is read into directly. Others get temporary memory,
        copied at the end.
        """
        targets = cls()
        fresh: dict[str, torch.Tensor | None] = {}
        separate = _separate_memory(plans, entries)
        for plan in plans.values():
            for name in references(plan.tree):
                live = separate.get(name, plan.in_place.get(name))
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
            # Tensors that were tied when saved are tied again.
            parts.setdefault(entry.name, (part_of(entry, box), box))
            if template is not None:
                self.spread[name] = template
            elif entry.stride is not None and _is_dense(entry):
                self.lay[name] = entry.stride
        claimed = sum(part.size_bytes for part, _ in parts.values())
        # Checked before anything is allocated: a forged header may claim any size.
        if claimed > memory_available_bytes():
            raise FormatError(
                f"the checkpoint claims {claimed} bytes of new tensors; this "
                f"machine has {memory_available_bytes()} bytes of memory available"
            )
        made = {name: (empty_like_entry(part), box) for name, (part, box) in parts.items()}
        for name in fresh:
            self.memory[name] = made[entries[name].name]
            self.tensors[name] = self.memory[name][0]

    def finish(self) -> dict[str, torch.Tensor]:
        """Return the tensors, after all bytes have arrived."""
        for source, live in self.copies:
            copy_into(live, source)
        for name, template in self.spread.items():
            self.tensors[name] = dtensor_over(template, self.memory[name][0])
        turned: dict[int, torch.Tensor] = {}  # each memory once, whatever its names
        for name, stride in self.lay.items():
            memory = self.memory[name][0]
            # Ids are unique here, since ``memory`` keeps all of these tensors alive.
            if id(memory) not in turned:
                turned[id(memory)] = with_strides(memory, stride)
            self.tensors[name] = turned[id(memory)]
        return self.tensors


def _separate_memory(
    plans: Mapping[str, RestorePlan], entries: Mapping[str, Entry]
) -> dict[str, torch.Tensor]:
    """Allocate memory for copied tensors whose ties have changed since they were saved.

    An example is an optimizer group that got a learning rate tensor of its own in mid-run.
    """
    copied = {name for plan in plans.values() for name in plan.copied if name in plan.in_place}
    if not copied:
        return {}
    live = {name: tensor for plan in plans.values() for name, tensor in plan.in_place.items()}
    # A set: names that are tied both now and when saved are one pair, and count once on both sides.
    pairs = {(_memory(tensor), entries[name].name) for name, tensor in live.items()}
    here = Counter(memory for memory, _ in pairs)
    there = Counter(entry for _, entry in pairs)
    made: dict[str, torch.Tensor] = {}  # one memory per saved entry
    return {
        name: made.setdefault(entries[name].name, torch.empty_like(live[name]))
        for name in sorted(copied)
        if here[_memory(live[name])] > 1 or there[entries[name].name] > 1
    }


def _memory(tensor: torch.Tensor) -> tuple[str, int]:
    local = local_tensor(tensor)
    return str(local.device), local.data_ptr()


def box_here(entry: Entry, tensor: torch.Tensor | None) -> Box:
    """Return the box of an entry that this rank holds: that of ``tensor``, or all of it."""
    shape = entry.global_shape
    if tensor is None:
        return Box((0,) * len(shape), shape)
    box = local_box(tensor)
    pairs = shape[len(box.shape) :]  # trailing dimension of complex128
    return Box((*box.offset, *(0 for _ in pairs)), (*box.shape, *pairs))


def restrided(view: View, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of tensors whose strides differ from those when they were saved.

    Replay of later updates then processes them in another order. Shards are not compared: their
    strides are unknown.
    """
    found = set()
    for name, tensor in tensors.items():
        pieces = view.pieces[name]
        if len(pieces) != 1 or is_dtensor(tensor) or not tensor.numel():
            continue
        entry = pieces[0].entry
        shape = tuple(tensor.shape)
        if entry.stride is None and tensor.is_contiguous():  # the usual case
            continue
        # An entry of complex128 has one more dimension than its tensor.
        if entry.shape != entry.global_shape or entry.shape[: len(shape)] != shape:
            continue
        # A tensor on the meta device has the default strides and no memory.
        stride = entry.stride or torch.empty(shape, device="meta").stride()
        if len(stride) != len(shape) or not same_strides(shape, stride, tensor.stride()):
            found.add(name)
    return frozenset(found)


def part_of(entry: Entry, box: Box) -> Entry:
    """Return an entry for one box of a tensor."""
    return Entry.whole(entry.name, entry.dtype, box.shape, logical_dtype=entry.logical_dtype)


def _is_dense(entry: Entry) -> bool:
    """Return True if the strides cover the elements without gaps or overlaps."""
    # The strides are those of the complex tensor, without the dimension of its pairs.
    shape = entry.shape[:-1] if entry.logical_dtype is not None else entry.shape
    stride = entry.stride or ()
    if len(stride) != len(shape):
        return False
    expected = 1
    for step, count in sorted(zip(stride, shape, strict=True)):
        # A dimension of size 1 may have any stride.
        if count > 1:
            if step != expected:
                return False
            expected *= count
    return True


def _readable_in_place(tensor: torch.Tensor) -> bool:
    # The memory of a lazily conjugated or negated view has other values than the view.
    plain = not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and plain


def overlapping_entries(view: View, targets: Targets) -> dict[str, str]:
    """Return ``name -> digest`` of tensors that overlap in memory but are different entries.

    Only their final contents show whether each got its saved value.

    Raises:
        RecoveryError: two of them share all memory and have different values.
    """
    live = {name: local_tensor(tensor) for name, tensor in targets.tensors.items()}
    found: dict[str, str] = {}
    for cluster in _overlapping(live):
        if len({view.entries[other].name for other in cluster}) > 1:
            found.update({other: _digest_of(view, other) for other in cluster})
        same: dict[tuple[Any, ...], str] = {}
        for name in cluster:
            mine = view.pieces[name][0].digest
            # Two views of exactly the same elements cannot both get their values, in whatever order
            # they are written.
            if same.setdefault(_place_of(live[name]), mine) != mine:
                raise shared_memory_error(name)
    return found


def overlap_conflicts(
    targets: Targets, entries: Mapping[str, Entry], tensors: Mapping[str, torch.Tensor]
) -> list[tuple[str, str]]:
    """Return tensors that overlap in memory, were separate when saved, and have different values;
    with the reason.

    Args:
        entries: by the names of the targets.
        tensors: saved values, by the names of the entries.
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
                found.append((name, f"shares memory with {first!r}, which has another saved value"))
    return found


def _overlapping(live: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return groups of names of tensors that overlap in memory."""
    spans = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + _extent_bytes(t), name)
        for name, t in live.items()
        if t.numel()
    )
    found: list[list[str]] = []
    on = ""
    reach = 0
    # One sweep over sorted address ranges. A range includes gaps, so interleaved views also count
    # as overlapping.
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
    """Return, in words, tensors that were tied when saved and are separate now, or the other way
    round.

    All get their values, but training continues differently.

    Args:
        held: names of tensors that the program had before, or holds itself.
    """
    names: dict[tuple[str, Any], str] = {}  # one name per entry and memory
    for name in sorted(targets.tensors.keys() & held):
        here = local_tensor(targets.tensors[name])
        # Empty tensors may all have the address 0 without being tied.
        if here.numel():
            where = str(here.device), here.data_ptr(), here.shape, here.stride(), here.dtype
            names.setdefault((view.entries[name].name, where), name)
    separate: dict[str, list[str]] = {}
    together: dict[Any, list[str]] = {}
    for (entry, where), name in names.items():
        separate.setdefault(entry, []).append(name)
        together.setdefault(where, []).append(name)
    were_one = "were one tensor when saved, and are separate tensors now"
    were_several = "were separate tensors when saved, and are one tensor now"
    return (
        *(f"{', '.join(tied)} {were_one}" for tied in separate.values() if len(tied) > 1),
        *(f"{', '.join(tied)} {were_several}" for tied in together.values() if len(tied) > 1),
    )


def _digest_of(view: View, name: str) -> str:
    """Return the expected digest of an entire tensor."""
    pieces = view.pieces[name]
    if len(pieces) != 1 or pieces[0].entry.shape != view.entries[name].shape:
        raise shared_memory_error(name)
    return pieces[0].digest


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last one, gaps included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.element_size()


def shared_memory_error(name: str) -> RecoveryError:
    """Return the error for tensors that share memory but have different saved values."""
    return RecoveryError(
        f"{name!r} shares its memory with another tensor, but the two were saved with "
        "different values",
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
    """Restore all sections of ``state`` from host memory; return notes in words.

    Args:
        trees: object trees of the sections that the state has.
        entries: of full tensors, by every name that the trees use.
        tensors: values on the host, by the names of the entries.
        step: step of the state, for error messages.
        takes: returns True for module entries to restore; other sections are restored completely.

    Raises:
        MismatchError: lists every difference in names, shapes or dtypes; nothing was modified.
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
        (name, problem)
        for section, plan in plans.items()
        for name, problem in plan.mismatches
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
            hint="build the same objects, and pass an optimizer together with its modules; "
            "load() without into= returns the saved state",
        )
    for name, (memory, box) in targets.memory.items():
        whole = tensors[entries[name].name]
        # Not strict: the box of a complex128 entry also has the dimension of its pairs.
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
