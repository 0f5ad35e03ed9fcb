"""Objects of the user's that give their state chunk by chunk: the public :class:`Provider`.

The state providers of DataStates-LLM (V-A3), for objects that are neither modules nor optimizers
and have too much state for a ``state_dict()``. Each chunk is memory, which the capture engine reads
where it lies, or bytes that the copying thread makes while training continues. In a base the memory
is a tensor ``section/name`` at a fixed offset; all other chunks are in the object of the section,
which is appended to the file.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from everstep.state.providers.plain import Occurrences
from everstep.state.providers.provider import (
    RestorePlan,
    Saved,
    SectionProvider,
    difference,
    same_memory,
)
from everstep.state.survey import DeferredTree, SectionContents, unsupported
from everstep.state.values.objects import MAX_DEPTH, join_path
from everstep.state.values.tensors import is_dtensor, local_tensor

_ARRAYS = ("ndarray", "memmap")


class Provider:
    """An object of the state that gives its state as a stream of named chunks.

    Subclass it, and put the object into the state dict. The contents of a chunk are one of these:

    - a tensor, a NumPy array or a ``memoryview``: memory of the object, copied as a tensor of plain
      data is: within ``ckpt.step()``, or while training continues if a pattern of ``declared``
      matches its name. It comes back as a tensor. While it is in the state, Python refuses to
      resize a ``bytearray`` under a ``memoryview``;
    - a function without arguments that returns ``bytes``, or an iterable of ``bytes``. The copying
      thread calls it while training continues, so it must read only data that no longer changes.
      (The training thread calls it where a layout is planned: at the start, and when shapes have
      changed.) It comes back as ``bytes``;
    - another :class:`Provider`, which takes its own chunks back;
    - plain data, as the state dict may hold it, copied at once.

    A name is a non-empty text. Names, dtypes and shapes may change from save to save.
    At most 1 GiB of a section can be other data than memory.

    The checks of ``everstep.testing.providers`` find classes that break this contract.
    """

    replicated: ClassVar[bool] = False
    """True: all ranks hold the same memory chunks, and one of them writes each. Ranks that a larger
    job adds restore them, too. With a gradient log each rank still writes its own."""

    def chunks(self) -> Iterator[tuple[str, Any]]:
        """Yield name and contents of each chunk; nothing may change by it.

        The training thread calls it at each save, at each logged step, and before a restore.
        """
        raise NotImplementedError

    def restore(self, chunks: Mapping[str, Any]) -> None:
        """Take the state back.

        Where the object has writable memory of the saved dtype and shape in a chunk of the same
        name, that memory holds the saved values already, and the tensor in ``chunks`` is a view of
        it. Not so if two of its chunks overlap, elements of a chunk overlap, or a module of the
        state has the memory now and had not when it was saved. The object may keep the other
        tensors.

        Args:
            chunks: contents by name; those of providers inside are left out, and restored before.
        """
        raise NotImplementedError


class _Chunked(NamedTuple):
    """Chunks of a provider, and the names that lead to it from the outermost one."""

    provider: Provider
    path: tuple[str, ...]
    chunks: dict[str, Any]


class ChunkedProvider(SectionProvider):
    """Provider of a section of the state that is a :class:`Provider` of the user's.

    Args:
        section: key in the state dict.
        value: the user's provider.
        held: returns a predicate: a module or an optimizer of the state has the memory of a tensor.

    Attributes:
        section: key in the state dict.
        replicated: names of the memory chunks that all ranks hold, as of the last look.
    """

    def __init__(
        self,
        section: str,
        value: Provider,
        held: Callable[[], Callable[[torch.Tensor], bool]] = lambda: lambda tensor: False,
    ) -> None:
        self.section = section
        self._value = value
        self._held = held
        self._fillable: dict[str, torch.Tensor] = {}  # as it was planned
        self._found: list[_Chunked] = []  # those inside first
        self._later: list[tuple[tuple[str, ...], Callable[[], Any]]] = []
        self._read_only: set[str] = set()

    def collect(self) -> Any:
        self._found = list(_walk(self._value, self.section, ()))
        self._later = []
        self._read_only = set()
        trees: dict[tuple[str, ...], dict[str, Any]] = {}
        leaves: list[tuple[str, str]] = []
        replicated: list[str] = []
        for provider, path, chunks in self._found:
            tree: dict[str, Any] = {}
            trees[path] = tree
            for name, content in chunks.items():
                where = _name_of(self.section, *path, name)
                if isinstance(content, Provider):
                    tree[name] = trees[(*path, name)]
                    continue
                try:
                    memory = _memory_of(content)
                except (TypeError, ValueError) as error:
                    leaves.append((where, f"memory that torch cannot view: {error}"))
                    continue
                if memory is not None:
                    tree[name], writable = memory
                    replicated += [where] if provider.replicated else []
                    self._read_only |= set() if writable else {where}
                elif inspect.isroutine(content) or isinstance(content, functools.partial):
                    tree[name] = None  # its place in the order
                    self._later.append(((*path, name), content))
                else:
                    tree[name] = content
        if leaves:
            raise unsupported(leaves)
        self.replicated = frozenset(replicated)
        return trees[()]

    def look(self) -> SectionContents:
        part = self._look_at(self.collect())
        if not self._later:
            return part
        made = functools.partial(_with_later, part.tree, self.section, self._later)
        return replace(part, tree=DeferredTree(made))

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        problems = [
            (_name_of(self.section, *path), "a provider, for which the checkpoint has no chunks")
            for _, path, _ in self._found
            if type(_part_of(saved.tree, path)) is not dict
        ]
        if problems:
            return RestorePlan.without(problems)
        return self._plan_memory(saved, live)

    def _plan_memory(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        """Plan which memory is filled: while the base is read, or after it."""
        plan = RestorePlan(saved.tree)
        places = Occurrences([list(live.values())])
        held = self._held() if live else bool
        self._fillable = {}
        for name, tensor in live.items():
            entry = saved.entries.get(name)
            if entry is None or difference(entry, tensor) is not None:
                continue
            if is_dtensor(tensor):
                plan.like[name] = tensor
            is_tied = entry.name in saved.tied
            if name in self._read_only or not _has_own_elements(local_tensor(tensor)):
                continue
            # A tensor that a module has, too, gets the same values as the module's if it had then.
            if is_tied or not held(tensor):
                self._fillable[name] = tensor
            if not is_dtensor(tensor) and not is_tied and places.can_be_filled(tensor):
                plan.in_place[name] = tensor  # read there at once
        for name in _overlapping(self._fillable):
            del self._fillable[name]
        return plan

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        for provider, path, chunks in self._found:
            part = _part_of(tree, path)
            inside = {name for name, one in chunks.items() if isinstance(one, Provider)}
            provider.restore(
                {
                    name: self._filled(_name_of(self.section, *path, name), one)
                    for name, one in part.items()
                    if name not in inside
                }
            )
        return []

    def _filled(self, name: str, content: Any) -> Any:
        """Return the object's own memory, with the restored values, if a chunk may be put there."""
        live = self._fillable.get(name)
        if live is None or not isinstance(content, torch.Tensor) or same_memory(live, content):
            return content
        with torch.no_grad():
            local_tensor(live).copy_(local_tensor(content))
        return live


def _walk(provider: Provider, section: str, path: tuple[str, ...]) -> Iterator[_Chunked]:
    """Yield a provider after all providers inside of it.

    Raises:
        UnsupportedStateError: a name is not valid or occurs twice, or providers contain themselves.
    """
    chunks: dict[str, Any] = {}
    where = _name_of(section, *path)
    if len(path) >= MAX_DEPTH:
        reason = f"providers are nested more than {MAX_DEPTH} levels deep, or contain themselves"
        raise unsupported([(where, reason)])
    try:
        found = [(name, content) for name, content in provider.chunks()]
    except (TypeError, ValueError) as error:
        reason = f"chunks() must yield pairs of a name and contents: {error}"
        raise unsupported([(where, reason)]) from error
    for name, content in found:
        if not isinstance(name, str) or not name:
            reason = f"the name of a chunk must be a non-empty text, not {name!r}"
            raise unsupported([(where, reason)])
        if name in chunks:
            raise unsupported([(join_path(where, name), "two chunks have this name")])
        if isinstance(content, (nn.Module, Optimizer)):
            reason = f"a {type(content).__name__} needs a key of its own in the state dict"
            raise unsupported([(join_path(where, name), reason)])
        chunks[name] = content
        if isinstance(content, Provider):
            yield from _walk(content, section, (*path, name))
    yield _Chunked(provider, path, chunks)


def _name_of(section: str, *path: str) -> str:
    """Return the name of an entry, as :func:`everstep.state.values.tree.split` makes it."""
    return functools.reduce(join_path, path, section)


class _WritableView:
    """The memory of a read-only array, declared writable: torch warns about read-only ones, and
    everstep only reads from it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _memory_of(content: Any) -> tuple[torch.Tensor, bool] | None:
    """Return a tensor over the memory of a chunk, and True if it is writable; None if the chunk is
    not memory.

    Raises:
        TypeError, ValueError: torch has no such dtype or strides, or a buffer is not contiguous.
    """
    if isinstance(content, torch.Tensor):
        return content, True
    if type(content) is memoryview:
        content = np.frombuffer(content.cast("B") if content.nbytes else b"", np.uint8)
    # Others carry more than their memory: a mask, say.
    if not isinstance(content, np.ndarray) or type(content).__name__ not in _ARRAYS:
        return None
    if content.flags.writeable:
        return torch.from_numpy(content), True
    return torch.from_numpy(np.asarray(_WritableView(content))), False


def _part_of(tree: Any, path: tuple[str, ...]) -> Any:
    """Return the part of a tree of dicts at ``path``; None if there is none."""
    for name in path:
        tree = tree.get(name) if type(tree) is dict else None
    return tree


def _bytes_of(data: Any) -> bytes:
    """Return the bytes that a function of a chunk has returned, in one piece.

    Raises:
        TypeError: it has returned something else.
    """
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if data is not None and not isinstance(data, (str, torch.Tensor, np.ndarray)):
        pieces = list(data)
        if all(isinstance(one, bytes) for one in pieces):
            return b"".join(pieces)
    raise TypeError(f"it must return bytes or an iterable of bytes, not {type(data).__name__}")


def _has_own_elements(tensor: torch.Tensor) -> bool:
    """Return True if no two elements share memory."""
    sides = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    span = 1
    for step, size in sides:
        if size > 1 and step < span:
            return False
        span += (size - 1) * step
    return True


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of tensors whose memory overlaps that of another one."""
    spans: list[tuple[str, int, int]] = []
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        steps = zip(local.stride(), local.shape, strict=True)
        span = 1 + sum((size - 1) * step for step, size in steps)
        if local.numel():
            begin = local.data_ptr()
            spans.append((name, begin, begin + span * local.element_size()))
    spans.sort(key=lambda one: one[1])
    found: set[str] = set()
    furthest: tuple[str, int, int] | None = None
    for one in spans:
        if furthest is not None and one[1] < furthest[2]:
            found |= {one[0], furthest[0]}
        if furthest is None or one[2] > furthest[2]:
            furthest = one
    return found


def _with_later(
    tree: Any, section: str, later: list[tuple[tuple[str, ...], Callable[[], Any]]]
) -> Any:
    """Return the tree with the bytes that the functions return.

    Raises:
        UnsupportedStateError: a function has failed, or returned something else; lists all of them.
    """
    leaves: list[tuple[str, str]] = []
    failed: Exception | None = None
    for path, function in later:
        reason = ""
        try:
            data = _bytes_of(function())
        # A user's function may raise anything.
        except Exception as error:
            failed = error
            reason = f"the function of this chunk failed: {error!r}"
            leaves.append((_name_of(section, *path), reason))
            continue
        _part_of(tree, path[:-1])[path[-1]] = data
    if leaves:
        raise unsupported(leaves) from failed
    return tree
