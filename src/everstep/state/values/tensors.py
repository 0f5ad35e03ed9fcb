"""torch tensors as entries: which can be stored, as what, and their memory as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from everstep.seams.memory import memory_at
from everstep.state.layout.entries import DTYPE_NAMES, Entry

__all__ = [
    "DTYPE_CODES",
    "byte_view",
    "dtype_code",
    "empty_like_entry",
    "host_bytes",
    "same_strides",
    "stored_form",
    "torch_dtype",
    "why_not_storable",
]

DTYPE_CODES: dict[torch.dtype, str] = {
    getattr(torch, name): code for code, (name, _) in DTYPE_NAMES.items() if hasattr(torch, name)
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
        code = _COMPLEX_AS_REAL[tensor.dtype]
        logical = str(tensor.dtype).removeprefix("torch.")
        return Entry.whole(name, code, (*shape, 2), stride=stride, logical_dtype=logical, lsn=lsn)
    return Entry.whole(name, DTYPE_CODES[tensor.dtype], shape, stride=stride, lsn=lsn)


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether tensors of a shape lie alike: where there is one element, its stride says nothing."""
    return all(n < 2 or a == b for n, a, b in zip(shape, one, other, strict=True))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat ``uint8`` tensor; no copy."""
    assert tensor.is_contiguous()
    # No more calls than needed: it is made for every gradient of every step.
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.dim() != 1:
        flat = flat.view(-1)
    if flat.stride(0) != 1:  # of a single element, or none: contiguous all the same
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory, to read or write; of no use once the
    tensor is gone.

    Not ``Tensor.numpy()``, after which the storage can never be resized again (FSDP does that
    to the user's).
    """
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def empty_like_entry(entry: Entry) -> torch.Tensor:
    """An uninitialised contiguous CPU tensor of the entry's dtype and shape."""
    if entry.logical_dtype is not None:
        logical = {str(d).removeprefix("torch."): d for d in _COMPLEX_AS_REAL}
        return torch.empty(entry.shape[:-1], dtype=logical[entry.logical_dtype], device="cpu")
    return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
