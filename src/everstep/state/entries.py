"""Entries: the named, typed byte ranges that a state is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

__all__ = [
    "DTYPE_BYTES",
    "DTYPE_CODES",
    "Entry",
    "byte_view",
    "dtype_code",
    "empty_like_entry",
    "stored_form",
    "torch_dtype",
    "why_not_storable",
]

_NAMES: dict[str, tuple[str, int]] = {
    # safetensors code: (torch attribute, bytes per element)
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}

DTYPE_BYTES: dict[str, int] = {code: size for code, (_, size) in _NAMES.items()}
"""Bytes per element of every safetensors dtype that everstep writes and reads."""

DTYPE_CODES: dict[torch.dtype, str] = {
    getattr(torch, name): code for code, (name, _) in _NAMES.items() if hasattr(torch, name)
}
"""The safetensors code of every torch dtype that has one in this build of torch."""

_TORCH_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def dtype_code(dtype: torch.dtype) -> str | None:
    """The safetensors code of ``dtype``, or None if it has none."""
    return DTYPE_CODES.get(dtype)


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code.

    Raises:
        KeyError: when this build of torch does not know the dtype.
    """
    return _TORCH_DTYPES[code]


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor (or ``U8`` object) of the state, without its bytes.

    Attributes:
        name: path in the state, ``section/key/...``, unique in a base.
        dtype: safetensors code.
        shape: shape of the bytes held by this rank.
        global_shape: shape over all ranks; equal to ``shape`` where it is not sharded.
        global_offset: where this rank's part begins in each dimension of ``global_shape``.
        placement: how it lies over the ranks: ``"whole"``, or the DTensor placements.
        stride: the live tensor's strides in elements where it was not contiguous; the
            stored bytes are always in row-major order.
        logical_dtype: the torch dtype where safetensors has no code for it, e.g.
            ``"complex128"``, stored as ``F64`` with a last dimension of 2.
        lsn: number of the last redo record applied to it .
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    placement: str = "whole"
    stride: tuple[int, ...] | None = None
    logical_dtype: str | None = None
    lsn: int = 0

    @classmethod
    def whole(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        *,
        stride: tuple[int, ...] | None = None,
        logical_dtype: str | None = None,
        lsn: int = 0,
    ) -> Entry:
        """An entry of which this rank holds everything."""
        zeros = (0,) * len(shape)
        return cls(name, dtype, shape, shape, zeros, "whole", stride, logical_dtype, lsn)

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's part."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


_COMPLEX_AS_REAL = {torch.complex128: "F64"}  # no safetensors code: a last dimension of 2


def why_not_storable(tensor: torch.Tensor) -> str | None:
    """The reason why ``tensor`` cannot be an entry, or None if it can."""
    if is_lazy(tensor):
        return "it is not initialised yet; run a batch through the module first"
    if tensor.is_nested:
        return "nested tensors are not supported; store .values() and .offsets()"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"tensors of type {type(tensor).__name__} are not supported in this version"
    if tensor.layout != torch.strided:
        return f"{tensor.layout} tensors are not supported; store .to_dense()"
    if tensor.is_quantized:
        return "quantized tensors are not supported; store .int_repr(), scale and zero point"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no bytes; call module.to_empty(device=...) first"
    if tensor.dtype not in DTYPE_CODES and tensor.dtype not in _COMPLEX_AS_REAL:
        return f"{tensor.dtype} has no safetensors code"
    return None


def stored_form(name: str, tensor: torch.Tensor, lsn: int = 0) -> Entry:
    """The entry that ``tensor`` becomes; it must be storable."""
    shape = tuple(tensor.shape)
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    if tensor.dtype in _COMPLEX_AS_REAL:
        code, logical = _COMPLEX_AS_REAL[tensor.dtype], str(tensor.dtype).removeprefix("torch.")
        return Entry.whole(name, code, (*shape, 2), stride=stride, logical_dtype=logical, lsn=lsn)
    return Entry.whole(name, DTYPE_CODES[tensor.dtype], shape, stride=stride, lsn=lsn)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat ``uint8`` tensor; no copy."""
    assert tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8)


def empty_like_entry(entry: Entry) -> torch.Tensor:
    """An uninitialised contiguous CPU tensor of the entry's dtype and shape."""
    if entry.logical_dtype is not None:
        logical = {str(d).removeprefix("torch."): d for d in _COMPLEX_AS_REAL}
        return torch.empty(entry.shape[:-1], dtype=logical[entry.logical_dtype])
    return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
