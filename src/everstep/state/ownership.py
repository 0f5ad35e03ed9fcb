"""Assign an owner to each entry, who accounts for its changes between two bases (invariant I8).

Every entry that can change is replayed by the optimizer that owns it, or logged in full at each
step mark, or covered by a declared update, or static. An optimizer's entries are found by memory
and not by name: its parameters lie in the sections of modules.

Hyperparameters that are tensors are *logged*: a scheduler changes them between updates.

In doubt an entry is *logged*: that is correct whatever changes it, only larger. Doubtful are
entries that two optimizers own, or one of them twice, and entries that share some of their memory
with other tensors, because a replay on separate copies would give other values. Updates read such
entries all the same: each step starts from the values in the last mark.
"""

from __future__ import annotations

import difflib
import inspect
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch.optim import Optimizer

from everstep.errors import OptionError, StateError
from everstep.state.values.objects import MAX_DEPTH
from everstep.state.values.tensors import local_tensor, why_not_storable

DeclaredUpdate = Callable[[], object]
"""A function that updates entries which no optimizer owns, from the state alone."""


class Owner(NamedTuple):
    """Owner of an entry.

    Attributes:
        kind: ``"replayed"``: by its optimizer. ``"logged"``: in full at each step mark.
            ``"declared"``: changes only when announced to everstep. ``"static"``: does not change;
            its digest is compared at each base.
        optimizer: section key of the optimizer that replays it.
        update: pattern of the function that replay runs for a declared entry; None: there is no
            function, so the entry is logged as well.
        read: extent to which updates read an entry that no single optimizer replays. ``"whole"``:
            an optimizer owns it. ``"inside"``: it consists of memory that updates read, of this
            entry or others. ``"part"``: some of its memory is read by updates. ``""``: none.
    """

    kind: Literal["replayed", "logged", "declared", "static"]
    optimizer: str | None = None
    update: str | None = None
    read: Literal["", "part", "inside", "whole"] = ""

    @property
    def in_marks(self) -> bool:
        """Return True if each step mark of a log holds the entry in full."""
        return self.kind not in ("replayed", "static") and self.update is None


class Memory(NamedTuple):
    """Memory region and its interpretation: equal for two tensors that always hold the same values.

    Attributes:
        device: device of the memory.
        begin: address of the first element.
        shape: shape of the tensor.
        stride: strides in elements.
        dtype: dtype of the elements.
        conjugated: the conjugate bit is set.
        negated: the negative bit is set.
    """

    device: torch.device
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    @property
    def end(self) -> int:
        """Address after the last byte."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return self.begin + (last + 1) * self.dtype.itemsize

    def overlaps(self, other: Memory | None) -> bool:
        """Return True if the byte ranges from first to last element overlap."""
        if other is None or self.device != other.device:
            return False
        return self.begin < other.end and other.begin < self.end

    @property
    def is_dense(self) -> bool:
        """Return True if the elements fill the byte range without gaps."""
        spread = zip(self.shape, self.stride, strict=True)
        expected = 1
        for step, n in sorted((step, n) for n, step in spread if n > 1):
            if step != expected:
                return False
            expected *= n
        return True


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Return the memory of a storable tensor; None if it has none."""
    if tensor.numel() == 0 or tensor.data_ptr() == 0:
        return None
    return Memory(
        tensor.device,
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


@dataclass(frozen=True, slots=True)
class OwnedMemory:
    """Memory that one registered optimizer owns.

    Attributes:
        optimizer: section key.
        slots: memory of each parameter and of each tensor of its state.
        shared: memory of hyperparameters, which its groups may share.
    """

    optimizer: str
    slots: tuple[Memory, ...]
    shared: tuple[Memory, ...] = ()


def owned_memory_of(section: str, optimizer: Optimizer) -> OwnedMemory:
    """Return the memory that ``optimizer`` owns, regardless of its ``state_dict``."""
    slots = updated_tensors(optimizer)
    shared = list[torch.Tensor]()
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                shared.extend(_tensors_in(value))
    return OwnedMemory(section, _memories(slots), _memories(shared))


def updated_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer updates: its parameters and its state."""
    groups = (group["params"] for group in optimizer.param_groups)
    found = [tensor for group in groups for tensor in _tensors_in(group)]
    return [*found, *_tensors_in(optimizer.state)]  # without the keys, which are parameters


def _memories(tensors: Iterable[torch.Tensor]) -> tuple[Memory, ...]:
    """Return the memory of the tensors that can be entries and have memory."""
    parts = map(local_tensor, tensors)
    found = (memory_of(tensor) for tensor in parts if why_not_storable(tensor) is None)
    return tuple(memory for memory in found if memory is not None)


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)) and depth < MAX_DEPTH:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth + 1)


class AddressRanges:
    """Set of bytes as sorted, disjoint address ranges, for lookups."""

    def __init__(self, found: Iterable[Memory]) -> None:
        self._begins: dict[torch.device, list[int]] = defaultdict(list)
        self._ends: dict[torch.device, list[int]] = defaultdict(list)
        for memory in sorted(found, key=lambda memory: memory.begin):
            begins = self._begins[memory.device]
            ends = self._ends[memory.device]
            if ends and memory.begin <= ends[-1]:
                ends[-1] = max(memory.end, ends[-1])
            else:
                begins.append(memory.begin)
                ends.append(memory.end)

    def meet(self, memory: Memory) -> bool:
        """Return True if any byte from the first to the last of ``memory`` is in the set."""
        begins = self._begins.get(memory.device, [])
        # Ranges are disjoint and sorted, so the last one that begins before the end reaches
        # farthest.
        before = bisect_left(begins, memory.end)
        return before > 0 and self._ends[memory.device][before - 1] > memory.begin

    def hold(self, memory: Memory) -> bool:
        """Return True if all these bytes are in the set."""
        upto = bisect_right(self._begins.get(memory.device, []), memory.begin)
        return upto > 0 and self._ends[memory.device][upto - 1] >= memory.end


class OwnershipIndex:
    """Index of the memory that all registered optimizers own together.

    Attributes:
        options: memory of hyperparameters only.
        read: memory that updates read from the state.
    """

    def __init__(self, holdings: Iterable[OwnedMemory]) -> None:
        owned: dict[Memory, list[str]] = defaultdict(list)
        holdings = tuple(holdings)
        for holding in holdings:
            for memory in (*holding.slots, *set(holding.shared)):
                owned[memory].append(holding.optimizer)
        self._owned = dict(owned)
        # Schedulers change options outside of updates, at times that a replay cannot reproduce.
        self.options = {m for holding in holdings for m in holding.shared} - {
            m for holding in holdings for m in holding.slots
        }
        # An update's record holds its hyperparameters, so the update does not read them here.
        self.read = owned.keys() - self.options
        self._spans, self._spans_read = AddressRanges(owned), AddressRanges(self.read)
        self._all_read = AddressRanges(memory for memory in self.read if memory.is_dense)

    def own_part_of(self, memory: Memory) -> bool:
        """Return True if an optimizer owns any byte from the first to the last of ``memory``."""
        return self._spans.meet(memory)

    def read_of(self, memory: Memory | None) -> Literal["", "part", "inside", "whole"]:
        """Return the extent to which updates read an entry (see :class:`Owner`)."""
        if memory is None or not self._spans_read.meet(memory):
            return ""
        if memory in self.read:
            return "whole"
        return "inside" if self._all_read.hold(memory) else "part"

    def optimizers(self, memory: Memory | None) -> list[str]:
        """Return the section keys of the optimizers that own exactly ``memory``, repeated if one
        owns it twice."""
        return [] if memory is None else self._owned.get(memory, [])

    def overlapping(self, others: Iterable[Memory]) -> set[Memory]:
        """Return the regions of ``others`` and of owned memory that share bytes with another of
        them."""
        return set(chain.from_iterable(overlapping_pairs({*self._owned, *others})))


def overlapping_pairs(memories: Iterable[Memory]) -> Iterator[tuple[Memory, Memory]]:
    """Yield each region that shares bytes with one that begins before it, and the one of these
    that reaches farthest."""
    reaching: dict[torch.device, Memory] = {}  # whose end is the largest so far
    for memory in sorted(memories, key=lambda memory: memory.begin):
        reached = reaching.get(memory.device)
        if reached is not None and memory.begin < reached.end:
            yield memory, reached
        if reached is None or memory.end > reached.end:
            reaching[memory.device] = memory


@dataclass(frozen=True, slots=True)
class OwnershipRules:
    """The user's rules on entries, by patterns on their names.

    A pattern is a name, or one with ``*``, ``?`` and ``[...]`` as in file names.

    Attributes:
        declared: patterns of entries that a declared update covers.
        static: patterns of entries that do not change.
        updates: functions that replay runs, by the pattern of the entries that they update.
        replays: True: a function reads the same values in replay as in training; otherwise the
            entries it updates are logged in full.
    """

    declared: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    updates: Mapping[str, DeclaredUpdate] = field(default_factory=dict)
    replays: bool = True

    @classmethod
    def of(
        cls,
        declared: Sequence[str] | Mapping[str, DeclaredUpdate | None],
        static: Sequence[str],
    ) -> OwnershipRules:
        """Create the rules; check them as far as possible without the state.

        Raises:
            OptionError: an option is not a sequence of patterns, or a function cannot be called
                without arguments.
        """
        for option, patterns in (("declared", declared), ("static", static)):
            listed = isinstance(patterns, Iterable) and not isinstance(patterns, (str, bytes))
            if not listed or not all(isinstance(pattern, str) for pattern in patterns):
                raise OptionError(
                    f"{option}= must be a list of patterns on names of entries, not {patterns!r}",
                    hint=f'for example {option}=["model/running_*"]',
                )
        updates: dict[str, DeclaredUpdate] = {}
        if isinstance(declared, Mapping):
            updates = {key: update for key, update in declared.items() if update is not None}
        for pattern, update in updates.items():
            _check_callable(pattern, update)
        return cls(tuple(declared), tuple(static), updates)

    def kinds(self, names: Sequence[str]) -> set[Literal["declared", "static"]]:
        """Return the declared kinds of an entry with all these names."""
        kinds: set[Literal["declared", "static"]] = set()
        if any(_matches(pattern, names) for pattern in self.declared):
            kinds.add("declared")
        if any(_matches(pattern, names) for pattern in self.static):
            kinds.add("static")
        return kinds

    def updates_of(self, names: Sequence[str]) -> list[str]:
        """Return the patterns with a function that match an entry with all these names."""
        return [pattern for pattern in self.updates if _matches(pattern, names)]

    def check_updates(self, patterns: Iterable[str]) -> None:
        """Check that each pattern has a function.

        Raises:
            OptionError: a pattern has no function.
        """
        for pattern in patterns:
            if pattern not in self.updates:
                there = ", ".join(map(repr, self.updates)) or "none"
                raise OptionError(
                    f"no function is registered for {pattern!r}; there are: {there}",
                    hint=f"Checkpointer(..., declared={{{pattern!r}: function}}); "
                    "or after_update() without a name, and a log takes a base instead",
                )

    def check_used(self, names: Iterable[str]) -> None:
        """Check that each pattern matches an entry.

        Raises:
            OptionError: a pattern matches none of ``names``; lists the nearest ones.
        """
        names = list(names)
        for option, patterns in (("declared", self.declared), ("static", self.static)):
            for pattern in patterns:
                if _matches(pattern, names):
                    continue
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
                raise OptionError(
                    f"{option}={pattern!r} matches no entry of the state",
                    hint=f"nearest names: {', '.join(near)}" if near else None,
                )


def assign_owners(
    names: Mapping[str, Sequence[str]],
    memory: Mapping[str, Memory],
    claims: OwnershipIndex,
    rules: OwnershipRules,
    *,
    error: type[OptionError] | type[StateError],
) -> dict[str, Owner]:
    """Return the owner of every entry.

    Args:
        names: all names of each entry, by the first of them; names that patterns may not match are
            left out of the values.
        memory: memory of the entries that have some.
        claims: memory that optimizers own.
        rules: the user's rules.
        error: class of the exception to raise.

    Raises:
        error: a pattern matches an entry that an optimizer owns, or two kinds, or two functions,
            match one entry.
    """
    overlapping = claims.overlapping(memory.values())
    owners: dict[str, Owner] = {}
    for name, also in names.items():
        kinds = rules.kinds(also)
        optimizers = claims.optimizers(memory.get(name))
        if kinds and optimizers:
            raise error(
                f"{name} is declared as {' and '.join(sorted(kinds))}, but it is "
                f"updated by {' and '.join(dict.fromkeys(optimizers))}",
                hint="parameters and state of an optimizer are replayed; make the pattern narrower",
            )
        if len(kinds) > 1:
            raise error(
                f"{name} matches patterns of both declared and static",
                hint="make one of the patterns narrower",
            )
        own = len(optimizers) == 1 and memory[name] not in claims.options
        alone = memory.get(name) not in overlapping
        if own and alone:
            owners[name] = Owner("replayed", optimizers[0])
            continue
        read = claims.read_of(memory.get(name))
        if kinds == {"declared"}:
            updates = rules.updates_of(also)
            if len(updates) > 1:
                raise error(
                    f"{name} is updated by the functions of {' and '.join(map(repr, updates))}",
                    hint="make one of the patterns narrower",
                )
            known = updates and alone and rules.replays
            owners[name] = Owner("declared", None, updates[0] if known else None, read)
        else:
            owners[name] = Owner(kinds.pop() if kinds else "logged", read=read)
    return owners


def _check_callable(pattern: str, update: DeclaredUpdate) -> None:
    try:
        inspect.signature(update).bind()
    except ValueError:
        pass  # a C function without a signature
    except TypeError as error:
        raise OptionError(
            f"declared={{{pattern!r}: ...}}: it cannot be called without arguments: {error}",
            hint='for example declared={"ema/*": lambda: ema.update_parameters(model)}',
        ) from error


def _matches(pattern: str, names: Iterable[str]) -> bool:
    """Return True if a pattern matches one of these names."""
    return any(pattern == name or fnmatchcase(name, pattern) for name in names)
