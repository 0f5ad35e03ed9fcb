"""Items of a state dict as entries of a base: their names, boxes and dtypes.

torch flattens a nested state dict: ``{"model": {"0.weight": w}}`` has one item ``model.0.weight``,
whose path is ``("model", "0.weight")``. A base has the same nested state: the first key of the path
is the section, and the entry is named ``model/0.weight``. So everstep's own commands and
:func:`everstep.load` show the state dict that was saved.

Each rank writes the slices that torch's plan gives it; all ranks have the tensor in common.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from everstep.commit import split_by_history
from everstep.errors import OptionError, UnsupportedStateError
from everstep.run import BaseFound, Inventory
from everstep.run.folder import run_path
from everstep.state.layout import Entry
from everstep.state.layout.entries import RESERVED
from everstep.state.layout.placement import SLICED, WHOLE
from everstep.state.values.objects import join_path
from everstep.state.values.tensors import tensor_entry

INDEX = f"{RESERVED}/dcp"
"""Section with the keys of the flat state dict (``keys``), and the ``planner_data`` that torch's
planner needs to load it."""

Path = tuple[str | int, ...]

_NUMBER_AT_END = re.compile(r"\d{1,15}\Z", re.ASCII)


def folder_of(checkpoint_id: Any) -> PurePath:
    """Return the run folder that a checkpoint id names.

    Raises:
        OptionError: there is no id, or it is not the path of a local folder.
    """
    if checkpoint_id is None:
        raise OptionError(
            "no folder is given to torch.distributed.checkpoint",
            hint="pass checkpoint_id=, or the path to the storage writer or reader",
        )
    return run_path(checkpoint_id)


def step_of(folder: PurePath) -> int:
    """Return the step of a checkpoint: the number at the end of the folder's name, else 0."""
    number = _NUMBER_AT_END.search(folder.name)
    return int(number[0]) if number else 0


def newest_base(inventory: Inventory) -> BaseFound | None:
    """Return the newest base that is complete, or was before it was damaged."""
    found = {one.id: one for one in inventory.bases if one.is_usable or one.status == "damaged"}
    here, _ = split_by_history(found, inventory.branches)
    return found[here[0]] if here else None


def path_of(key: str, planner_data: Any) -> Path:
    """Return the path of an item in the nested state dict; that of a flat one is its key."""
    path = planner_data.get(key) if isinstance(planner_data, Mapping) else None
    if not isinstance(path, tuple) or not path or not isinstance(path[0], str):
        return (key,)
    return path


def name_of(key: str, path: Path) -> str:
    """Return the name of the entry of an item.

    Raises:
        UnsupportedStateError: the name is everstep's own, or empty.
    """
    if path[0] in ("", RESERVED):
        reason = f"a state dict cannot have the key {path[0]!r}"
        raise UnsupportedStateError(f"{key!r} cannot be stored: {reason}", leaves=((key, reason),))
    name = ""
    for part in path:
        name = join_path(name, part)
    return name


def entry_of(name: str, item: WriteItem) -> Entry:
    """Return the entry of a tensor, or of a slice of one.

    Raises:
        UnsupportedStateError: safetensors has no such dtype.
    """
    data = item.tensor_data
    assert data is not None
    try:
        mine = tensor_entry(
            name, torch.empty(data.chunk.sizes, dtype=data.properties.dtype, device="meta")
        )
    except KeyError:
        reason = f"{data.properties.dtype} has no safetensors code"
        raise UnsupportedStateError(
            f"{item.index.fqn!r} cannot be stored: {reason}", leaves=((item.index.fqn, reason),)
        ) from None
    # The two numbers of each complex128.
    pairs = mine.shape[len(data.size) :]
    return Entry(
        name,
        mine.dtype,
        mine.shape,
        global_shape=(*data.size, *pairs),
        global_offset=(*data.chunk.offsets, *(0 for _ in pairs)),
        placement=WHOLE if data.chunk.sizes == data.size else SLICED,
        logical_dtype=mine.logical_dtype,
    )


def chunk_of(entry: Entry) -> ChunkStorageMetadata:
    """Return the box of an entry, as torch describes it."""
    dims = dims_of(entry)
    return ChunkStorageMetadata(
        offsets=torch.Size(entry.global_offset[:dims]), sizes=torch.Size(entry.shape[:dims])
    )


def dims_of(entry: Entry) -> int:
    """Return the number of dimensions of an entry's tensor."""
    return len(entry.shape) - (entry.logical_dtype is not None)


def describe_gap(key: str, tensor: TensorStorageMetadata) -> str:
    """Return what the slices of a tensor lack, or have twice; "" if they are all of it."""
    size = math.prod(tensor.size)
    found = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    return "" if found == size else f"the slices of {key!r} have {found} of {size} elements"
