"""DTensors: the part that this rank holds, and where it lies in the whole.

``torch.distributed.tensor`` is not loaded here unless the program has done so: there are no
DTensors before.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from everstep.state.entries import Entry
from everstep.state.placing import Box, Cut, Placement, box_on_mesh
from everstep.state.tensors import stored_form

__all__ = ["box_of", "is_dtensor", "like", "local_of", "sharded_form", "why_not_told"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MODULE = "torch.distributed.tensor"


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


def box_of(tensor: torch.Tensor) -> Box:
    """Which part of the whole this rank holds; of any other tensor all of it.

    Raises:
        ValueError: it cannot be told.
    """
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Box((0,) * len(shape), shape)
    placement = _placement(tensor)
    rank = torch.distributed.get_rank()
    if not placement.holds(rank):
        raise ValueError("this rank is not in its mesh")
    box = box_on_mesh(shape, placement.mesh, placement.coordinate(rank), placement.cuts)
    local = local_of(tensor)
    if box.shape != tuple(local.shape) and (box.size or local.numel()):
        raise ValueError(f"this rank holds {list(local.shape)}, by its placement {list(box.shape)}")
    return box


def why_not_told(tensor: torch.Tensor) -> str | None:
    """Why a DTensor cannot be an entry: nobody can tell which part of the whole it is."""
    try:
        box_of(tensor)
    except ValueError as error:
        return f"a DTensor whose parts cannot be told: {error}"
    return None


def sharded_form(name: str, tensor: torch.Tensor) -> Entry:
    """The entry that this rank's part of a DTensor becomes; one of a single rank is whole."""
    whole = stored_form(name, local_of(tensor))
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    if mesh.size() == 1:
        return whole
    box, pairs = box_of(tensor), whole.shape[tensor.dim() :]  # of complex128
    return replace(
        whole,
        shape=(*box.shape, *pairs),
        global_shape=(*tensor.shape, *pairs),
        global_offset=(*box.offset, *(0 for _ in pairs)),
        placement=_placement(tensor).text,
    )


def like(template: torch.Tensor, entry: Entry, local: torch.Tensor) -> torch.Tensor:
    """A DTensor spread as ``template`` is, whose part on this rank is ``local``.

    Args:
        entry: of the whole; of the template's shape.
    """
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
    assert entry.global_shape[: len(shape)] == shape
    return made


def _placement(tensor: torch.Tensor) -> Placement:
    """The placement of a DTensor.

    Raises:
        ValueError: it has one that cannot be written down.
    """
    mesh: torch.Tensor = tensor.device_mesh.mesh  # type: ignore[attr-defined]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    cuts = tuple(_cut_of(placement, tensor.dim()) for placement in placements)
    return Placement(tuple(mesh.flatten().tolist()), cuts, tuple(mesh.shape))


def _cut_of(placement: Any, dims: int) -> Cut:
    kind = type(placement).__name__
    if kind == "Replicate":
        return Cut(None)
    if kind in ("Shard", "_StridedShard"):
        factor = placement.split_factor if kind == "_StridedShard" else 1
        return Cut(placement.dim % dims, factor)
    raise ValueError(f"it is placed as {placement}")
