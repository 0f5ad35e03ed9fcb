"""Entries of log records as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from everstep.errors import DamageError, FormatError
from everstep.format.log import LogRecord
from everstep.seams.machine import memory_available_bytes
from everstep.state.layout.shards import Placed
from everstep.state.values.tensors import torch_dtype

__all__ = ["as_complex", "as_it_lay", "tensor_of", "write_into"]

_COMPLEX_BYTES = 16  # torch's kernels end the process where one begins elsewhere


def tensor_of(record: LogRecord, place: Placed) -> torch.Tensor:
    """An entry of a record as a tensor; it may share the record's memory, so only to read."""
    entry = place.entry
    data = record.data[place.begin : place.end]
    if entry.logical_dtype is not None:
        tensor = as_complex(_from_memory(data, torch_dtype(entry.dtype), entry.shape))
    else:
        tensor = _from_memory(data, torch_dtype(entry.dtype), entry.shape)
    if entry.stride is None:
        return tensor
    return as_it_lay(tensor, entry.stride)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """complex128 over these pairs of float64; over a copy where they lie as float64 may lie, and
    complex128 may not."""
    if pairs.numel() and pairs.data_ptr() % _COMPLEX_BYTES:
        pairs = pairs.clone()
    return torch.view_as_complex(pairs)


def as_it_lay(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with these strides; where one is 0, as in an expanded tensor, all elements along it
    are one element in memory, as they were.

    Raises:
        FormatError: they claim more memory than this machine has left.
    """
    shape = tuple(tensor.shape)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    claimed = span * tensor.element_size()
    if span > tensor.numel() and claimed > memory_available_bytes():
        raise FormatError(f"strides {tuple(stride)} of {shape} claim {claimed} bytes of memory")
    for dim, step in enumerate(stride):
        if step == 0:
            tensor = tensor.narrow(dim, 0, min(1, shape[dim]))
    strided = torch.empty_strided(tuple(tensor.shape), tuple(stride), dtype=tensor.dtype)
    return strided.copy_(tensor).expand(shape)


def write_into(live: torch.Tensor, source: torch.Tensor) -> None:
    """Copies into a live tensor; of an expanded dimension only the one element there is."""
    with torch.no_grad():
        for dim, stride in enumerate(live.stride()):
            if stride == 0 and live.shape[dim] > 1:
                live = live.narrow(dim, 0, 1)
                source = source.narrow(dim, 0, 1)
        live.copy_(source)


def _from_memory(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if data.readonly:
        data = memoryview(bytearray(data))
    try:
        return torch.frombuffer(data, dtype=dtype).view(shape)
    except ValueError as error:  # not aligned for the dtype
        raise DamageError(f"an entry of the log lies where none can: {error}") from error
