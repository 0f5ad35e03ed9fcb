"""Differences between two states, tensor by tensor: how far training has moved, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from everstep.look.open_state import OpenState

Kind = Literal["equal", "changed", "form", "only in the first", "only in the second"]
_GROUP_BYTES = 64 << 20
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """Values of one tensor.

    Attributes:
        dtype, shape: of the tensor.
        norm: 2-norm of its finite elements.
        nan, inf: number of elements that are NaN or infinite.
    """

    dtype: str
    shape: tuple[int, ...]
    norm: float
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Difference between two tensors of one name.

    Attributes:
        name: name of the tensor, ``"model/layer.weight"``.
        kind: ``"equal"``: bit for bit; ``"changed"``; ``"form"``: other dtype or shape; or which
            state alone has it.
        first, second: values in each state; None where it is missing.
        change_norm: 2-norm of the change of elements that are finite in both; None unless changed.
        change_max: largest absolute change of these.
        changed: share of the elements whose bits differ, 0 to 1.
    """

    name: str
    kind: Kind
    first: TensorSummary | None
    second: TensorSummary | None
    change_norm: float | None = None
    change_max: float | None = None
    changed: float | None = None

    @property
    def relative(self) -> float:
        """Norm of the change, divided by the norm of the first tensor."""
        if self.change_norm is None or self.first is None:
            return math.inf
        return self.change_norm / self.first.norm if self.first.norm else math.inf


def tensor_differences(first: OpenState, second: OpenState) -> Iterator[TensorDifference]:
    """Compare two states tensor by tensor; a few tensors at a time are in memory."""
    ours = first.outline.tensors
    theirs = second.outline.tensors
    for names in _grouped([name for name in ours if name in theirs], ours):
        mine = first.read([ours[name] for name in names])
        other = second.read([theirs[name] for name in names])
        for name, one, two in zip(names, mine, other, strict=True):
            yield _difference(name, one, two)
    for name in (name for name in ours if name not in theirs):
        yield TensorDifference(name, "only in the first", _summary(*first.read([ours[name]])), None)
    for name in (name for name in theirs if name not in ours):
        summary = _summary(*second.read([theirs[name]]))
        yield TensorDifference(name, "only in the second", None, summary)


def value_differences(first: Any, second: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the paths at which two nested values differ, with both values; tensors are skipped.

    A value that is missing is ``...``.
    """
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in dict.fromkeys([*first, *second]):
            below = f"{path}/{key}" if path else str(key)
            yield from value_differences(first.get(key, ...), second.get(key, ...), below)
    elif type(first) is type(second) and isinstance(first, (list, tuple)):
        for index in range(max(len(first), len(second))):
            mine = first[index] if index < len(first) else ...
            other = second[index] if index < len(second) else ...
            yield from value_differences(mine, other, f"{path}/{index}")
    elif not _same(first, second):
        yield path, first, second


def _same(first: Any, second: Any) -> bool:
    # Values such as arrays and generators have no plain comparison.
    return type(first) is type(second) and repr(first) == repr(second)


def _difference(name: str, first: torch.Tensor, second: torch.Tensor) -> TensorDifference:
    mine = _summary(first)
    other = _summary(second)
    if (mine.dtype, mine.shape) != (other.dtype, other.shape):
        return TensorDifference(name, "form", mine, other)
    changed = int((_bits(first) != _bits(second)).any(dim=-1).sum())
    if not changed:
        return TensorDifference(name, "equal", mine, other)
    one = _values(first)
    two = _values(second)
    finite = one.isfinite() & two.isfinite()
    change = torch.where(finite, two - one, 0.0)
    return TensorDifference(
        name,
        "changed",
        mine,
        other,
        change_norm=float(torch.linalg.vector_norm(change)),
        change_max=float(change.abs().max()),
        changed=changed / first.numel(),
    )


def _summary(tensor: torch.Tensor) -> TensorSummary:
    values = _values(tensor)
    finite = torch.where(values.isfinite(), values, 0.0)
    return TensorSummary(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        float(torch.linalg.vector_norm(finite)),
        int(values.isnan().sum()),
        int(values.isinf().sum()),
    )


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as float64, in one dimension; two for each complex element."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.reshape(-1).to(torch.float64)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element, of shape ``(elements, words)``."""
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.view(_AS_BITS[flat.element_size()]).reshape(tensor.numel(), -1)


def _grouped(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    group = list[str]()
    size_bytes = 0
    for name in names:
        if group and size_bytes + tensors[name].nbytes > _GROUP_BYTES:
            yield group
            group = []
            size_bytes = 0
        group.append(name)
        size_bytes += tensors[name].nbytes
    if group:
        yield group
