"""Split nested state into tensors and a tree of plain objects, and join them again.

Find objects that refer to given objects, through the garbage collector. ``gc.get_objects()`` is not
used: for a moment it holds references to tuples that other threads are still filling, and a
``tuple(generator)`` in such a thread then fails with a SystemError. ``gc.get_referrers()`` touches
only objects that refer to the given ones.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from everstep.errors import UnsupportedStateError
from everstep.state.values.generators import (
    GeneratorState,
    is_generator,
    kind_of,
    new_generator,
    set_state,
    state_of,
)
from everstep.state.values.objects import (
    MAX_DEPTH,
    TensorRef,
    decode,
    encode,
    join_path,
    kinds_within,
)
from everstep.state.values.registered import RegisteredValue, stored_form, value_of
from everstep.state.values.tensors import is_dtensor

_IMMUTABLE = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes),
        *(TensorRef, GeneratorState, RegisteredValue),
    )
)
_CONSTANTS = frozenset((type(None), bool, int, float, complex, str, bytes))
_NESTED = frozenset((dict, OrderedDict, Counter, list, tuple, deque, slice))


def split(
    value: object, name: str, tensors: dict[str, torch.Tensor] | None, depth: int = 0
) -> object:
    """Replace every tensor in ``value`` by a :class:`TensorRef`.

    All mutable data but tensors is copied, so later changes do not reach the tree. Objects that
    cannot be stored are kept as they are; so are tensors in other containers than dicts, lists and
    tuples.

    Args:
        value: nested state.
        name: path of ``value`` in the state; becomes the front of the entries' names.
        tensors: receives the tensors, detached, by name; None: they are kept as they are.
        depth: number of containers around ``value``.

    Raises:
        UnsupportedStateError: containers are nested too deeply, or contain themselves.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if isinstance(value, torch.Tensor):
        return value if tensors is None else _reference(value, name, tensors)
    if kind in (np.ndarray, set, bytearray):
        return value.copy()  # type: ignore[attr-defined]  # members of a set do not change
    if kind not in _NESTED:
        if is_generator(value):
            return GeneratorState(kind_of(value), encode(state_of(value), name))
        stored = stored_form(value, name)
        return value if stored is None else stored
    _check_depth(name, depth)
    # join() finds references in these containers only. Tensors in others are refused as leaves.
    inside = tensors if kind in (dict, OrderedDict, list, tuple) else None

    def child(key: object, item: object) -> object:
        if type(item) in _IMMUTABLE:
            return item
        return split(item, join_path(name, key), inside, depth + 1)

    return _rebuilt(value, child)


def _reference(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> TensorRef:
    unique = name
    number = 2
    while unique in tensors:  # keys 0 and "0" in one dict share a path
        unique = f"{name}~{number}"
        number = number + 1
    tensors[unique] = tensor if is_lazy(tensor) or _is_detached_dtensor(tensor) else tensor.detach()
    return TensorRef(unique)


def _rebuilt(value: object, child: Callable[[object, object], object]) -> object:
    """Return a container like ``value`` of the results of ``child`` for each key and item."""
    kind: Any = type(value)
    if isinstance(value, Counter):
        copy: Counter[Any] = Counter()  # which would count pairs
        dict.update(copy, {key: child(key, item) for key, item in value.items()})
        return copy
    if isinstance(value, dict):
        if _IMMUTABLE.issuperset(map(type, value.values())):
            return value.copy()
        return kind((key, child(key, item)) for key, item in value.items())
    if isinstance(value, slice):
        return slice(*(child(key, getattr(value, key)) for key in ("start", "stop", "step")))
    assert isinstance(value, (list, tuple, deque))
    if kind is not deque and _IMMUTABLE.issuperset(map(type, value)):
        return kind(value)
    items = (child(index, item) for index, item in enumerate(value))
    return deque(items, value.maxlen) if isinstance(value, deque) else kind(items)


def _is_detached_dtensor(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor outside of any autograd graph.

    Detaching it would go through its dispatcher, which takes twenty times as long as for a plain
    tensor.
    """
    return is_dtensor(tensor) and not tensor.requires_grad


def _check_depth(name: str, depth: int) -> None:
    if depth >= MAX_DEPTH:
        reason = f"nested more than {MAX_DEPTH} levels deep, or contains itself"
        raise UnsupportedStateError(
            f"the state cannot be stored: {name}: {reason}", leaves=((name, reason),)
        )


def join(tree: object, tensors: Mapping[str, torch.Tensor]) -> object:
    """Put tensors back where their references stand, create generators from their states, and
    values of registered types from their bytes.

    The inverse of :func:`split`.

    Raises:
        KeyError: a reference to a tensor that is not in ``tensors``.
    """
    if isinstance(tree, TensorRef):
        return tensors[tree.name]
    if type(tree) in (dict, OrderedDict):  # not a Counter, which would count the pairs
        assert isinstance(tree, dict)
        if _CONSTANTS.issuperset(map(type, tree.values())):
            return tree.copy()
        return type(tree)((key, join(item, tensors)) for key, item in tree.items())
    if type(tree) in (list, tuple):
        assert isinstance(tree, (list, tuple))
        if _CONSTANTS.issuperset(map(type, tree)):
            return type(tree)(tree)
        return type(tree)(join(item, tensors) for item in tree)
    if isinstance(tree, RegisteredValue):
        return value_of(tree)
    if isinstance(tree, GeneratorState):
        generator = new_generator(tree.kind)
        set_state(generator, decode(tree.data))
        return generator
    return tree


def references(tree: object) -> Iterator[str]:
    """Yield the names of all tensors that ``tree`` refers to, in order."""
    # Most objects of a large tree refer to none.
    if TensorRef in kinds_within(tree):
        yield from _references(tree)


def _references(tree: object) -> Iterator[str]:
    if isinstance(tree, TensorRef):
        yield tree.name
    elif type(tree) in (dict, OrderedDict):
        assert isinstance(tree, dict)
        for item in tree.values():
            yield from _references(item)
    elif type(tree) in (list, tuple):
        assert isinstance(tree, (list, tuple))
        for item in tree:
            yield from _references(item)


def find_referrers(values: Iterable[object], *kinds: type, depth: int) -> list[Any]:
    """Return the objects of some classes that refer to one of ``values``, directly or through dicts
    and lists, such as the ``__dict__`` of an instance.

    Each level takes a pass over all objects of the process: tens of milliseconds for 300 000.

    Args:
        values: objects to find the holders of.
        kinds: classes of the holders, or their bases.
        depth: maximum number of references between a holder and a value.
    """
    found: list[Any] = []
    seen: set[int] = set()
    level = list(values)
    while level and depth:
        depth -= 1
        further: list[object] = []
        for one in gc.get_referrers(*level):
            # The list `level` refers to all of them as well.
            if one is level or id(one) in seen:
                continue
            seen.add(id(one))
            # Not isinstance(): it reads __class__, which may run foreign code.
            if any(kind in type(one).__mro__ for kind in kinds):
                found.append(one)
            elif type(one) in (dict, list):
                further.append(one)
        level = further
    return found
