"""Tensors of log records.

Shape digest of a base, which the gradient log is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from everstep.errors import DamageError, FormatError
from everstep.format.log import LogRecord
from everstep.seams.machine import memory_available_bytes
from everstep.state.layout import OBJECT_PREFIX, Placed
from everstep.state.layout.entries import shape_digest
from everstep.state.providers import OptimizerProvider
from everstep.state.values.tensors import torch_dtype

_COMPLEX_BYTES = 16  # alignment; torch's kernels crash on a complex128 that lacks it


def tensor_of(record: LogRecord, place: Placed) -> torch.Tensor:
    """Return an entry of a record as a tensor. Read only: it may share the record's memory."""
    entry = place.entry
    data = record.data[place.begin : place.end]
    tensor = _from_memory(data, torch_dtype(entry.dtype), entry.shape)
    if entry.logical_dtype is not None:
        tensor = as_complex(tensor)
    return tensor if entry.stride is None else with_strides(tensor, entry.stride)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """View pairs of float64 as complex128; copies them first if they are not aligned for
    complex128."""
    if pairs.numel() and pairs.data_ptr() % _COMPLEX_BYTES:
        pairs = pairs.clone()
    return torch.view_as_complex(pairs)


def with_strides(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a copy with the given strides.

    Along a dimension of stride 0, as in an expanded tensor, all elements share memory again.

    Raises:
        FormatError: the strides claim more memory than this machine has available.
    """
    shape = tuple(tensor.shape)
    # Elements from the first to the last in memory.
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    claimed = span * tensor.element_size()
    if span > tensor.numel() and claimed > memory_available_bytes():
        raise FormatError(f"strides {tuple(stride)} of {shape} claim {claimed} bytes of memory")
    for dim, step in enumerate(stride):
        # Expanded again at the end: copy_() refuses a target whose elements share memory.
        if step == 0:
            tensor = tensor.narrow(dim, 0, min(1, shape[dim]))
    strided = torch.empty_strided(tuple(tensor.shape), tuple(stride), dtype=tensor.dtype)
    return strided.copy_(tensor).expand(shape)


def copy_into(live: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a live tensor; along expanded dimensions, into their only element."""
    with torch.no_grad():
        for dim, stride in enumerate(live.stride()):
            if stride == 0 and live.shape[dim] > 1:
                live = live.narrow(dim, 0, 1)
                source = source.narrow(dim, 0, 1)
        live.copy_(source)


def _from_memory(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # torch.frombuffer() refuses an empty buffer, and warns about read-only memory.
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if data.readonly:
        data = memoryview(bytearray(data))
    try:
        return torch.frombuffer(data, dtype=dtype).view(shape)
    except ValueError as error:
        raise DamageError(f"a log entry is not aligned for its dtype: {error}") from error


def shape_of_base(
    placed: Iterable[Placed], aliases: Mapping[str, str], trees: Mapping[str, Any]
) -> str:
    """Return the shape digest of a base (see :mod:`everstep.state.layout.entries`).

    Args:
        placed: entries of the base; objects are ignored.
        aliases: other names of tensors, and the names of their entries.
        trees: decoded objects by section.
    """
    entries = [p.entry for p in placed if not p.entry.name.startswith(OBJECT_PREFIX)]
    groups = {}
    for section, tree in trees.items():
        names = OptimizerProvider.groups_of(tree)
        if names is not None:
            groups[section] = names
    return shape_digest(entries, aliases, groups)
