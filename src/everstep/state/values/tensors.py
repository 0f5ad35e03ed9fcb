"""torch tensors and DTensors as entries: storable forms, this rank's shard, and memory as bytes.

``torch.distributed.tensor`` is not imported here unless the program has done so: before that no
DTensor can exist.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from everstep.seams.memory import memory_at
from everstep.state.layout import Box, Entry, Placement
from everstep.state.layout.entries import DTYPE_NAMES
from everstep.state.layout.placement import Cut, box_on_mesh

DTYPE_CODES: dict[torch.dtype, str] = {
    getattr(torch, name): code for code, (name, _) in DTYPE_NAMES.items() if hasattr(torch, name)
}
"""The safetensors code of every torch dtype that has one in this build of torch."""

_TORCH_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def torch_dtype(code: str) -> torch.dtype:
    """Return the torch dtype of a safetensors code.

    Raises:
        KeyError: this build of torch does not have the dtype.
    """
    return _TORCH_DTYPES[code]


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes per element, to compare elements bit for bit: as floats a NaN differs from
itself, and -0.0 equals 0.0."""

_COMPLEX_AS_REAL = {torch.complex128: "F64"}  # no safetensors code: a last dimension of 2


def why_not_storable(tensor: torch.Tensor) -> str | None:
    """Return the reason why ``tensor`` cannot be an entry, or None if it can."""
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


def tensor_entry(name: str, tensor: torch.Tensor, lsn: int = 0) -> Entry:
    """Return the entry of a storable tensor."""
    shape = tuple(tensor.shape)
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    if tensor.dtype in _COMPLEX_AS_REAL:
        code = _COMPLEX_AS_REAL[tensor.dtype]
        logical = str(tensor.dtype).removeprefix("torch.")
        return Entry.whole(name, code, (*shape, 2), stride=stride, logical_dtype=logical, lsn=lsn)
    return Entry.whole(name, DTYPE_CODES[tensor.dtype], shape, stride=stride, lsn=lsn)


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if two tensors of ``shape`` have the same memory layout.

    The stride of a dimension with one element does not matter.
    """
    return all(n < 2 or a == b for n, a, b in zip(shape, one, other, strict=True))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as a flat ``uint8`` tensor, without a copy."""
    assert tensor.is_contiguous()
    # As few calls as possible: this runs for every gradient of every step.
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.dim() != 1:
        flat = flat.view(-1)
    if flat.stride(0) != 1:  # one element or none: contiguous, whatever the stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, to read or write; invalid once the tensor is
    freed.

    ``Tensor.numpy()`` is not used: it makes the storage impossible to resize, and FSDP resizes the
    storages of the user's parameters.
    """
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def empty_like_entry(entry: Entry, device: str = "cpu") -> torch.Tensor:
    """Return an uninitialised contiguous tensor of the entry's dtype and shape."""
    if entry.logical_dtype is not None:
        logical = {str(d).removeprefix("torch."): d for d in _COMPLEX_AS_REAL}
        return torch.empty(entry.shape[:-1], dtype=logical[entry.logical_dtype], device=device)
    return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=device)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MODULE = "torch.distributed.tensor"
_MeshRanks = tuple[int, tuple[int, ...], tuple[int, ...]]  # this rank, the mesh's ranks, its shape

_meshes: weakref.WeakKeyDictionary[Any, _MeshRanks] = weakref.WeakKeyDictionary()


def is_dtensor(value: Any) -> bool:
    """Return True for a DTensor, or a parameter that is one."""
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor):
        return False
    loaded = sys.modules.get(_MODULE)
    return loaded is not None and isinstance(value, loaded.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local tensor of a DTensor; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    # to_local() is differentiable, and would record an operation of the program's graph.
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach()


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none yet, or none of its own."""
    local = local_tensor(tensor)
    if is_lazy(local) or local.layout is not torch.strided:
        return 0
    return local.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The shard of a DTensor that this rank holds.

    Attributes:
        local: the local tensor, with its memory layout.
        box: box of the global tensor that it covers.
        placement: placement of the DTensor.
    """

    local: torch.Tensor
    box: Box
    placement: Placement

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LocalShard:
        """Return this rank's shard of ``tensor``.

        Raises:
            ValueError: the box of the global tensor cannot be determined.
        """
        shape = tuple(tensor.shape)
        placement = _placement(tensor)
        rank = torch.distributed.get_rank()
        if not placement.holds(rank):
            raise ValueError("this rank is not in its mesh")
        box = box_on_mesh(shape, placement.mesh, placement.coordinate(rank), placement.cuts)
        local = local_tensor(tensor)
        here = tuple(local.shape)
        if box.shape != here and (box.size or local.numel()):
            raise ValueError(f"this rank holds {list(here)}, by its placement {list(box.shape)}")
        return cls(local, box, placement)


def local_box(tensor: torch.Tensor) -> Box:
    """Return the box of the global tensor that this rank holds; of a plain tensor, all of it.

    Raises:
        ValueError: the box cannot be determined.
    """
    shape = tuple(tensor.shape)
    return LocalShard.of(tensor).box if is_dtensor(tensor) else Box((0,) * len(shape), shape)


def shard_entry(name: str, tensor: torch.Tensor, part: LocalShard) -> Entry:
    """Return the entry of this rank's shard of a DTensor; a mesh of one rank gives an unsharded
    entry."""
    whole = tensor_entry(name, part.local)
    box = part.box
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    if mesh.size() == 1:
        return whole
    pairs = whole.shape[tensor.dim() :]  # of complex128
    return replace(
        whole,
        shape=(*box.shape, *pairs),
        global_shape=(*tensor.shape, *pairs),
        global_offset=(*box.offset, *(0 for _ in pairs)),
        placement=part.placement.text,
    )


def dtensor_over(template: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor over the memory of ``local``, placed as ``template`` is."""
    dtensor: Any = sys.modules[_MODULE].DTensor
    shape = tuple(template.shape)
    made: torch.Tensor = dtensor.from_local(
        local,
        template.device_mesh,  # type: ignore[attr-defined]
        template.placements,  # type: ignore[attr-defined]
        # The check is a collective call, but not all ranks create the same tensors.
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return made


def _placement(tensor: torch.Tensor) -> Placement:
    """Return the placement of a DTensor.

    Raises:
        ValueError: the placement has no text form.
    """
    ranks, sides = _ranks_of(tensor.device_mesh)  # type: ignore[attr-defined]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    return Placement(ranks, tuple(_cut_of(one, tensor.dim()) for one in placements), sides)


def _ranks_of(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of a mesh in row-major order, and its shape.

    torch computes both anew at each access. Uncached, that takes twice as long as the rest of a
    survey, and a state has hundreds of tensors on one mesh.
    """
    rank = torch.distributed.get_rank()
    known = _meshes.get(mesh)
    if known is None or known[0] != rank:
        found: torch.Tensor = mesh.mesh
        known = _meshes[mesh] = rank, tuple(found.flatten().tolist()), tuple(found.shape)
    return known[1:]


def _cut_of(placement: Any, dims: int) -> Cut:
    kind = type(placement).__name__
    if kind == "Replicate":
        return Cut(None)
    if kind in ("Shard", "_StridedShard"):
        factor = placement.split_factor if kind == "_StridedShard" else 1
        return Cut(placement.dim % dims, factor)
    raise ValueError(f"it is placed as {placement}")
