"""Tensors that share memory: which of those of a base must be the same here, and which were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everstep.errors import RecoveryError
from everstep.restore.load.reshard import View
from everstep.restore.load.targets import Targets
from everstep.state.layout.entries import Entry
from everstep.state.values.tensors import byte_view, local_of

__all__ = ["sharing_memory", "sharing_values", "tied_otherwise", "untied"]


def sharing_memory(view: View, targets: Targets) -> dict[str, str]:
    """``name -> digest`` of tensors that overlap in memory here, but are different entries:
    only what they hold in the end tells whether all of them got what was saved for them.

    Raises:
        RecoveryError: where two of them are the same memory and cannot both get their values.
    """
    live = {name: local_of(tensor) for name, tensor in targets.tensors.items()}
    found: dict[str, str] = {}
    for cluster in _overlapping(live):
        if len({view.entries[other].name for other in cluster}) > 1:
            found.update({other: _digest_of(view, other) for other in cluster})
        same: dict[tuple[Any, ...], str] = {}
        for name in cluster:
            mine = view.pieces[name][0].digest
            if same.setdefault(_place_of(live[name]), mine) != mine:
                raise untied(name)
    return found


def sharing_values(
    targets: Targets, entries: Mapping[str, Entry], tensors: Mapping[str, torch.Tensor]
) -> list[tuple[str, str]]:
    """Return tensors that overlap in memory here and were different ones when they were saved, with
    values that they cannot all get; each with what is wrong.

    Args:
        entries: by the names of the targets.
        tensors: the saved values, by the names of the entries.
    """
    live = {name: local_of(tensor) for name, tensor in targets.tensors.items()}
    found = list[tuple[str, str]]()
    for first, *others in _overlapping(live):
        mine = tensors[entries[first].name]
        for name in others:
            theirs = tensors[entries[name].name]
            if theirs is mine:
                continue
            same = _place_of(live[first]) == _place_of(live[name])
            if not (same and torch.equal(byte_view(mine), byte_view(theirs))):
                found.append((name, f"overlaps in memory with {first!r} here, of another value"))
    return found


def _overlapping(live: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of tensors that overlap in memory, those that overlap together."""
    spans = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + _extent_bytes(t), name)
        for name, t in live.items()
        if t.numel()
    )
    found: list[list[str]] = []
    on = ""
    reach = 0
    for device, begin, end, name in spans:
        if device != on or begin >= reach:
            found.append([])
            on = device
            reach = end
        found[-1].append(name)
        reach = max(reach, end)
    return [cluster for cluster in found if len(cluster) > 1]


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


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
