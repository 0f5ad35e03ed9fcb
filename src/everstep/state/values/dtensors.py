"""DTensors: the part that this rank holds, and where it lies in the whole.

``torch.distributed.tensor`` is not loaded here unless the program has done so: there are no
DTensors before.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from everstep.state.layout.entries import Entry
from everstep.state.layout.placement import Box, Cut, Placement, box_on_mesh
from everstep.state.values.tensors import stored_form

__all__ = ["LocalPart", "box_of", "is_dtensor", "like", "local_of", "sharded_form", "spread_as"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MODULE = "torch.distributed.tensor"
_Seen = tuple[int, tuple[int, ...], tuple[int, ...]]  # by which rank, ranks and shape

_meshes: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()


def is_dtensor(value: Any) -> bool:
    """Whether it is a DTensor (or a parameter that is one)."""
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor):
        return False
    loaded = sys.modules.get(_MODULE)
    return loaded is not None and isinstance(value, loaded.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, as it lies in memory; of any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach()


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a DTensor that this rank holds.

    Attributes:
        local: it, as it lies in memory.
        box: which part of the whole it is.
    """

    local: torch.Tensor
    box: Box
    placement: Placement

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LocalPart:
        """The part of ``tensor``.

        Raises:
            ValueError: nobody can tell which part of the whole it is.
        """
        shape = tuple(tensor.shape)
        placement = _placement(tensor)
        rank = torch.distributed.get_rank()
        if not placement.holds(rank):
            raise ValueError("this rank is not in its mesh")
        box = box_on_mesh(shape, placement.mesh, placement.coordinate(rank), placement.cuts)
        local = local_of(tensor)
        here = tuple(local.shape)
        if box.shape != here and (box.size or local.numel()):
            raise ValueError(f"this rank holds {list(here)}, by its placement {list(box.shape)}")
        return cls(local, box, placement)


def box_of(tensor: torch.Tensor) -> Box:
    """Which part of the whole this rank holds; of any other tensor all of it.

    Raises:
        ValueError: it cannot be told.
    """
    shape = tuple(tensor.shape)
    return LocalPart.of(tensor).box if is_dtensor(tensor) else Box((0,) * len(shape), shape)


def sharded_form(name: str, tensor: torch.Tensor, part: LocalPart) -> Entry:
    """The entry that this rank's part of a DTensor becomes; one of a single rank is whole."""
    whole = stored_form(name, part.local)
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


def like(template: torch.Tensor, entry: Entry, local: torch.Tensor) -> torch.Tensor:
    """A DTensor spread as ``template`` is, whose part on this rank is ``local``.

    Args:
        entry: of the whole; of the template's shape.
    """
    shape = tuple(template.shape)
    assert entry.global_shape[: len(shape)] == shape
    return spread_as(template, local)


def spread_as(template: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor over the memory of ``local``, this rank's part, spread as ``template`` is."""
    dtensor: Any = sys.modules[_MODULE].DTensor
    shape = tuple(template.shape)
    made: torch.Tensor = dtensor.from_local(
        local,
        template.device_mesh,  # type: ignore[attr-defined]
        template.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return made


def _placement(tensor: torch.Tensor) -> Placement:
    """The placement of a DTensor.

    Raises:
        ValueError: it has one that cannot be written down.
    """
    ranks, sides = _ranks_of(tensor.device_mesh)  # type: ignore[attr-defined]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    return Placement(ranks, tuple(_cut_of(one, tensor.dim()) for one in placements), sides)


def _ranks_of(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks of a mesh in row-major order, and its shape.

    torch works them out anew at each look, from the mesh and the rank that looks. That takes twice
    as long as all else that a survey does, and a state has hundreds of tensors on one mesh.
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
