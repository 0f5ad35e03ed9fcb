"""Nested state taken apart into tensors and a tree of plain objects, and put together again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch.nn.parameter import is_lazy

from everstep.errors import UnsupportedStateError
from everstep.state.objects import MAX_DEPTH, TensorRef, join_path

__all__ = ["join", "references", "split"]


def split(value: object, name: str, tensors: dict[str, torch.Tensor], _depth: int = 0) -> object:
    """Replaces every tensor in ``value`` by a :class:`TensorRef`.

    Containers are copied, everything else is kept as it is.

    Args:
        name: path of ``value`` in the state; becomes the front of the entries' names.
        tensors: receives the tensors, detached, by name.

    Raises:
        UnsupportedStateError: for containers nested too deeply (or that contain themselves).
    """
    if isinstance(value, torch.Tensor):
        unique, number = name, 2
        while unique in tensors:  # keys 0 and "0" in one dict share a path
            unique, number = f"{name}~{number}", number + 1
        tensors[unique] = value if is_lazy(value) else value.detach()
        return TensorRef(unique)
    if type(value) not in (dict, OrderedDict, list, tuple):
        return value
    if _depth >= MAX_DEPTH:
        reason = f"nested more than {MAX_DEPTH} levels deep, or contains itself"
        raise UnsupportedStateError(
            f"the state cannot be stored: {name}: {reason}", leaves=((name, reason),)
        )

    def part(key: object, item: object) -> object:
        return split(item, join_path(name, key), tensors, _depth + 1)

    if isinstance(value, (dict, OrderedDict)):
        return type(value)((key, part(key, item)) for key, item in value.items())
    assert isinstance(value, (list, tuple))
    return type(value)(part(index, item) for index, item in enumerate(value))


def join(tree: object, tensors: Mapping[str, torch.Tensor]) -> object:
    """The inverse of :func:`split`: puts tensors back where their references stand.

    Raises:
        KeyError: for a reference to a tensor that is not in ``tensors``.
    """
    if isinstance(tree, TensorRef):
        return tensors[tree.name]
    if type(tree) in (dict, OrderedDict):  # not a Counter, which would count the pairs
        assert isinstance(tree, dict)
        return type(tree)((key, join(item, tensors)) for key, item in tree.items())
    if type(tree) in (list, tuple):
        assert isinstance(tree, (list, tuple))
        return type(tree)(join(item, tensors) for item in tree)
    return tree


def references(tree: object) -> Iterator[str]:
    """Names of all tensors that ``tree`` refers to, in order."""
    if isinstance(tree, TensorRef):
        yield tree.name
    elif type(tree) in (dict, OrderedDict):
        assert isinstance(tree, dict)
        for item in tree.values():
            yield from references(item)
    elif type(tree) in (list, tuple):
        assert isinstance(tree, (list, tuple))
        for item in tree:
            yield from references(item)
