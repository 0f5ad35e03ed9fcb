"""Explain why an object cannot be stored, and suggest a form that can."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

_CODE = (FunctionType, BuiltinFunctionType, MethodType, partial, ModuleType)
_BASES = (OrderedDict, Counter, dict, list, tuple, set, frozenset, deque, bytes, bytearray)
_ADVICE: tuple[tuple[Any, str], ...] = (  # for instances of a type, or for types with an attribute
    (Enum, "an enum member; store its .name or .value"),
    (torch.Tensor, "tensors are found only in dicts, lists and tuples; put it in one of these"),
    (np.ndarray, "a subclass of numpy.ndarray; store numpy.array(value)"),
    (np.generic, "not the same on every machine, or a structure; store plain numbers"),
    ("_fields", "a namedtuple would come back as a tuple; store its _asdict()"),
    *((base, f"a subclass of {base.__name__}; store {base.__name__}(value)") for base in _BASES),
    ((int, float, complex, str), "a subclass of a plain type; convert it to that type"),
    (_CODE, "code cannot be stored; store the data that it depends on"),
    (type, "a class cannot be stored; store its name"),
    (
        DataLoader,
        "torch's own has no position; put everstep.data.ResumableLoader(loader) into the state, "
        "and iterate over that",
    ),
    ("state_dict", "give it a place of its own in the state, or store its state_dict()"),
    (np.random.BitGenerator, "store the numpy.random.Generator that draws from it"),
    ("bit_generator", "store its bit_generator.state"),
    ("get_state", "store its get_state()"),
    ("getstate", "store its getstate()"),
    ("isoformat", "store its isoformat()"),
    ("__fspath__", "store str(value)"),
    ("__dataclass_fields__", "store dataclasses.asdict(value)"),
    ("__next__", "an iterator's position cannot be stored; store its count"),
)
# Keys that are in every state_dict() of a kind of object.
_SNAPSHOTS = {
    "an optimizer": {"state", "param_groups"},
    "a scheduler": {"last_epoch", "_last_lr"},
    "a scaler": {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"},
}
_SNAPSHOT_DEPTH = 3


def storage_advice(value: object) -> str:
    """Return the type of an unsupported object, and a form to store instead."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    for mark, advice in _ADVICE:
        if hasattr(kind, mark) if isinstance(mark, str) else isinstance(value, mark):
            return f"{name}: {advice}"
    return f"{name}: only plain data can be stored; store its contents"


def copied_state_dict_owner(value: object, depth: int = 0) -> str | None:
    """Return the kind of object whose ``state_dict()`` was copied into plain data; None for other
    data.

    Training does not update such a copy, and restoring it does not change the object it came from.
    """
    if type(value) is dict:
        for kind, keys in _SNAPSHOTS.items():
            if keys <= value.keys():
                return kind
    items: Iterable[object] = ()
    if type(value) in (dict, OrderedDict) and isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    found = (
        (copied_state_dict_owner(item, depth + 1) for item in items)
        if depth < _SNAPSHOT_DEPTH
        else ()
    )
    return next(filter(None, found), None)
