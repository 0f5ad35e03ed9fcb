"""Tensors that share memory: which of those of a base must be the same here, and which were."""

from __future__ import annotations

from typing import Any

import torch

from everstep.errors import RecoveryError
from everstep.recover.reshard import View
from everstep.recover.targets import Targets
from everstep.state.dtensors import local_of

__all__ = ["sharing_memory", "tied_otherwise", "untied"]


def sharing_memory(view: View, targets: Targets) -> dict[str, str]:
    """``name -> digest`` of tensors that overlap in memory here, but are different entries:
    only what they hold in the end tells whether all of them got what was saved for them.

    Raises:
        RecoveryError: where two of them are the same memory and cannot both get their values.
    """
    live = {name: local_of(tensor) for name, tensor in targets.tensors.items()}
    spans = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + _extent_bytes(t), name)
        for name, t in live.items()
        if t.numel()
    )
    found: dict[str, str] = {}
    cluster: list[str] = []
    same: dict[tuple[Any, ...], str] = {}
    on, reach = "", 0
    for device, begin, end, name in [*spans, ("end", 0, 0, "")]:
        if device != on or begin >= reach:
            if len({view.entries[other].name for other in cluster}) > 1:
                found.update({other: _digest_of(view, other) for other in cluster})
            on, reach, cluster, same = device, end, [], {}
        if not name:
            break
        cluster.append(name)
        reach = max(reach, end)
        tensor, mine = live[name], view.pieces[name][0].digest
        if same.setdefault((begin, tensor.shape, tensor.stride(), tensor.dtype), mine) != mine:
            raise untied(name)
    return found


def tied_otherwise(view: View, targets: Targets, held: set[str]) -> tuple[str, ...]:
    """Which tensors of the program were one when they were saved, and are several now, or the
    other way round. All have got their values; training goes on as another one would.

    Args:
        held: names of those that the program had before, or has for itself.
    """
    names: dict[tuple[str, Any], str] = {}  # the first of each entry, and of each memory
    for name in sorted(targets.tensors.keys() & held):
        here = local_of(targets.tensors[name])
        if here.numel():
            where = str(here.device), here.data_ptr(), here.shape, here.stride(), here.dtype
            names.setdefault((view.entries[name].name, where), name)
    apart: dict[str, list[str]] = {}
    together: dict[Any, list[str]] = {}
    for (entry, where), name in names.items():
        apart.setdefault(entry, []).append(name)
        together.setdefault(where, []).append(name)
    were_one = "were one tensor when they were saved, and are several now"
    were_several = "were several tensors when they were saved, and are one now"
    return (
        *(f"{', '.join(tied)} {were_one}" for tied in apart.values() if len(tied) > 1),
        *(f"{', '.join(tied)} {were_several}" for tied in together.values() if len(tied) > 1),
    )


def _digest_of(view: View, name: str) -> str:
    """What a whole tensor will have as its digest."""
    pieces = view.pieces[name]
    if len(pieces) != 1 or pieces[0].entry.shape != view.entries[name].shape:
        raise untied(name)
    return pieces[0].digest


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element, gaps included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.element_size()


def untied(name: str) -> RecoveryError:
    """What is raised where tensors that are one here cannot all get their values."""
    return RecoveryError(
        f"{name!r} shares its memory with another tensor here, but different values are saved "
        "for the two",
        hint="build the model with the same tied weights and views as when it was saved",
    )
