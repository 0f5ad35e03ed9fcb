"""Providers of plain data, and of the random generators of the process.

Plain data is read from the user's mapping at each save, and put back where it was. The training
loop may hold further references to it (a running mean, a list of losses in a dict of its own). So
tensors are read into their existing memory, and arrays and containers are refilled, if that is
safe: the form must match, and the object must occur at one place only, since several objects may
have been saved there. Generator objects are set to the saved state.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from everstep.errors import FormatError
from everstep.seams.memory import WritableMemory, copy_memory
from everstep.state.layout import Entry
from everstep.state.layout.entries import RNG_SECTION
from everstep.state.providers.provider import (
    RestorePlan,
    Saved,
    SectionProvider,
    difference,
    same_memory,
)
from everstep.state.survey import DeferredTree, SectionContents, TensorBlock
from everstep.state.values.generators import (
    GENERATORS,
    GeneratorState,
    RngStates,
    capture_rng,
    is_generator,
    kind_of,
    numpy_rng_mismatch,
    restore_rng,
    set_state,
    state_of,
    why_not_made,
)
from everstep.state.values.objects import MAX_DEPTH, TensorRef, join_path, kinds_within
from everstep.state.values.tensors import address_of

_IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes))


class Occurrences:
    """Count the places at which each container and each piece of memory occurs in some values.

    Args:
        values: all plain data of a state.
    """

    def __init__(self, values: Collection[object] = ()) -> None:
        self._memory: Counter[int] = Counter()
        self._objects: Counter[int] = Counter()
        self._writable = WritableMemory()
        for value in values:
            self._walk(value, 0)

    def is_alone(self, value: object) -> bool:
        """Return True if the value, or its memory, occurs at one place only."""
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return self._memory[_memory_of(value)] == 1
        return self._objects[id(value)] == 1

    def can_be_filled(self, tensor: torch.Tensor) -> bool:
        """Return True if reading other bytes into a tensor affects no one but its holder.

        The tensor must occur once, be a plain tensor without a graph, with each element in writable
        memory of its own.
        """
        if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.is_inference():
            return False
        if is_lazy(tensor) or tensor.layout is not torch.strided or not self.is_alone(tensor):
            return False
        # A stride of 0 means an expanded tensor, several elements of which share one place.
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        if tensor.is_conj() or tensor.is_neg() or any(n > 1 and not step for n, step in sizes):
            return False
        return tensor.device.type != "cpu" or self._writable.has(tensor.data_ptr())

    def _walk(self, value: object, depth: int) -> None:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self._memory[_memory_of(value)] += 1
        elif isinstance(value, (dict, list, tuple)) and depth < MAX_DEPTH:
            self._objects[id(value)] += 1
            items = value.values() if isinstance(value, dict) else value
            # Long lists of numbers are not walked item by item.
            if not _IMMUTABLE.issuperset(map(type, items)):
                for item in items:
                    self._walk(item, depth + 1)


def _memory_of(value: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """Return the address of the storage of a tensor or array; 0: it has none."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return int(value.__array_interface__["data"][0])
    return address_of(value)


def held_memory(
    groups: Iterable[Mapping[str, Any]], tensors: Iterable[torch.Tensor]
) -> Callable[[torch.Tensor], bool]:
    """Return a predicate: one of ``tensors``, or a group of an optimizer, has the memory of a
    tensor."""
    found = list(tensors)
    for group in groups:
        for value in group.values():
            several = value if isinstance(value, (tuple, list)) else (value,)
            found += (one for one in several if isinstance(one, torch.Tensor))
    held = set(map(address_of, found)) - {0}
    return lambda tensor: address_of(tensor) in held


class PlainProvider(SectionProvider):
    """Provider of plain data in the user's mapping.

    Args:
        section: key in the state dict.
        state: the user's state dict.
        held: returns a predicate: a module or optimizer of the state has the memory of a tensor,
            too.
        places: returns the occurrences of all plain data of the state.
    """

    def __init__(
        self,
        section: str,
        state: MutableMapping[str, Any],
        held: Callable[[], Callable[[torch.Tensor], bool]] = lambda: lambda tensor: False,
        places: Callable[[], Occurrences] = Occurrences,
    ) -> None:
        self.section = section
        self._state = state
        self._held = held
        self._places = places
        self._there = Occurrences()  # as it was planned

    def collect(self) -> Any:
        return self._state[self.section]

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        """Plan to read trained tensors into their existing memory: a new tensor in their place
        would leave training with its initial values."""
        value = self._state[self.section]
        held = self._held() if live else bool
        plan = RestorePlan(saved.tree)
        self._there = self._places()
        flags = _trained_flags(value) if live else ()
        for name, trained in zip(live, flags, strict=True):
            tensor = live[name]
            if not (trained or isinstance(value, torch.Tensor) or held(tensor)):
                if self._fits(saved, name, tensor):
                    plan.in_place[name] = tensor
                continue  # or one in a container is put there anew
            problem: str | None = "the checkpoint has no tensor here, the state has one"
            if name in saved.entries:
                problem = difference(saved.entries[name], tensor)
            if problem:
                plan.mismatches.append((name, problem))
            plan.in_place[name] = tensor
        kinds = kinds_within(value) | kinds_within(saved.tree)
        if not kinds.isdisjoint(GENERATORS | {GeneratorState}):
            plan.mismatches += _generator_mismatches(value, saved.tree, self.section)
        return RestorePlan.without(plan.mismatches) if plan.mismatches else plan

    def _fits(self, saved: Saved, name: str, tensor: torch.Tensor) -> bool:
        """Return True if saved data can be read into a tensor inside of a container."""
        entry: Entry | None = saved.entries.get(name)
        if entry is None or entry.name in saved.tied or not self._there.can_be_filled(tensor):
            return False
        return difference(entry, tensor) is None

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        """Restore the data; containers keep their identity, so other references to them see it."""
        value = self._state[self.section]
        if isinstance(value, torch.Tensor):
            return []  # was read in place
        found = self._put(value, tree, at_top=True)
        if found is not value:
            self._state[self.section] = found
        return []

    def _put(self, value: Any, tree: Any, *, at_top: bool = False) -> Any:
        """Return the object for the place of ``value``: ``value`` itself, refilled, if possible."""
        if isinstance(tree, torch.Tensor):
            return value if same_memory(value, tree) else tree
        if is_generator(tree) and is_generator(value):
            set_state(value, state_of(tree))
            return value
        fits = type(value) is type(tree) and self._there.is_alone(value)
        if type(tree) in (dict, OrderedDict):
            mine = value if isinstance(value, dict) else {}
            items = {key: self._put(mine.get(key), item) for key, item in tree.items()}
            if fits or (at_top and isinstance(value, dict)):
                value.clear()
                value.update(items)
                return value
            return type(tree)(items)
        if type(tree) in (list, tuple):
            there = value if isinstance(value, (list, tuple)) else ()
            pairs = enumerate(tree)
            found = [self._put(there[n] if n < len(there) else None, item) for n, item in pairs]
            if type(tree) is list and (fits or (at_top and isinstance(value, list))):
                value[:] = found
                return value
            return type(tree)(found)
        if isinstance(tree, np.ndarray) and isinstance(value, np.ndarray):
            same = (value.shape, value.dtype) == (tree.shape, tree.dtype)
            if same and value.flags.writeable and (fits or at_top):
                value[...] = tree
                return value
        return tree


def _generator_mismatches(value: Any, tree: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield generators of another kind than saved, or that cannot be created here, by name, with
    the reason."""
    if is_generator(value) or isinstance(tree, GeneratorState):
        mine = kind_of(value) if is_generator(value) else None
        saved = tree.kind if isinstance(tree, GeneratorState) else None
        if saved is None or (mine is not None and mine != saved):
            yield name, f"saved {saved or 'no random generator'}, live {mine}"
        elif mine is None and (reason := why_not_made(saved)):
            yield name, reason
    elif isinstance(tree, dict):
        known = value if isinstance(value, dict) else {}
        for key, item in tree.items():
            yield from _generator_mismatches(known.get(key), item, join_path(name, key))
    elif isinstance(tree, (list, tuple)):
        there = value if isinstance(value, (list, tuple)) else ()
        for index, item in enumerate(tree):
            other = there[index] if index < len(there) else None
            yield from _generator_mismatches(other, item, join_path(name, index))


def _trained_flags(value: Any, *, of_module: bool = False) -> Iterator[bool]:
    """Yield, for each tensor in plain data, in the order of ``split``, whether a module or an
    optimizer has it, too: parameters, and tensors of a module's ``state_dict()``."""
    if isinstance(value, torch.Tensor):
        yield of_module or (value.requires_grad and value.is_leaf)
    elif type(value) in (dict, OrderedDict):
        of_module = of_module or hasattr(value, "_metadata")
        for item in value.values():
            yield from _trained_flags(item, of_module=of_module)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _trained_flags(item, of_module=of_module)


class RngProvider(SectionProvider):
    """Provider of the random generators of the process: Python, NumPy, torch, and the CUDA
    devices in use."""

    section = RNG_SECTION

    def collect(self) -> Any:
        return capture_rng()

    def look(self) -> SectionContents:
        states = RngStates.now()
        found = [states.torch, *(states.cuda or ())]
        sizes = [tensor.nbytes for tensor in found]  # len() of a tensor is a method in Python
        kept = self._blocks[0] if self._blocks else TensorBlock()
        if not states.is_usual or sizes != [tensor.nbytes for tensor in kept.tensors]:
            return self._look_at(states.tree(states.torch, states.cuda))
        # Copy into the same tensors, so that copy plans stay valid. This is safe, as they are read
        # only at the step mark. Copy bytes, as inference mode may be on now or may have been then.
        for tensor, target, size in zip(found, kept.tensors, sizes, strict=True):
            copy_memory(target.data_ptr(), tensor.data_ptr(), size)
        first, *others = map(TensorRef, kept.names)
        return SectionContents(
            self._blocks, DeferredTree(functools.partial(states.tree, first, others))
        )

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        problem = numpy_rng_mismatch(saved.tree)
        if problem is None:
            return RestorePlan(saved.tree)
        return RestorePlan.without([(f"{RNG_SECTION}/numpy", problem)])

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        try:
            return restore_rng(tree)
        # The saved state is not trusted: random, NumPy and torch raise any of these if it is
        # malformed.
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as e:
            raise FormatError(
                f"{RNG_SECTION} holds no valid state of random generators: {e!r}"
            ) from e
