"""State providers: one per value of the state dict; each knows how to collect and restore it.

A provider collects a tree with live tensors in it, says which saved entries may be read
straight into live memory and what does not match, and takes the loaded tree back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from everstep.state.layout.entries import Entry
from everstep.state.survey.survey import SectionContents, TensorBlock, inspect_tree
from everstep.state.values.tensors import local_tensor, tensor_entry

__all__ = [
    "Provider",
    "RestorePlan",
    "Saved",
    "UnguardedProvider",
    "describe",
    "difference",
    "same_memory",
]


class Provider(Protocol):
    """One section of the state."""

    section: str

    def collect(self) -> Any:
        """The section as a tree, with live tensors in it; nothing is copied."""
        ...

    def look(self) -> SectionContents:
        """What is in the section now, found by the shortest way that is sure to be right.

        Raises:
            UnsupportedStateError: listing every leaf that cannot be stored.
        """
        ...

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        """Compares with what is saved. ``live`` are the section's live tensors by entry name."""
        ...

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        """Takes the loaded tree; returns what could not be restored, in words."""
        ...


def describe(entry: Entry) -> str:
    """``F32 [2, 3]``: an entry's dtype and shape for messages."""
    return f"{entry.logical_dtype or entry.dtype} {list(entry.shape)}"


class UnguardedProvider:
    """A provider that collects its section anew each time: such sections are small."""

    section: str
    _blocks: tuple[TensorBlock, ...] = ()  # found last

    def collect(self) -> Any:
        raise NotImplementedError

    def look(self) -> SectionContents:
        return self._look_at(self.collect())

    def _look_at(self, collected: Any) -> SectionContents:
        part = inspect_tree(collected, self.section, self._blocks)
        self._blocks = part.blocks
        return part


def difference(entry: Entry, tensor: torch.Tensor, *, dtype: bool = True) -> str | None:
    """How the saved entry and the live tensor differ in dtype or shape; None if they do not.

    Args:
        dtype: False: a tensor of another dtype would do.
    """
    live = tensor_entry("", tensor)
    if not dtype and _shape_of(live) == _shape_of(entry):
        return None
    if (live.dtype, live.shape, live.logical_dtype) == (
        entry.dtype,
        entry.shape,
        entry.logical_dtype,
    ):
        return None
    return f"saved {describe(entry)}, live {describe(live)}"


def _shape_of(entry: Entry) -> tuple[int, ...]:
    return entry.shape if entry.logical_dtype is None else entry.shape[:-1]


def same_memory(owner: Any, tensor: Any) -> bool:
    """Whether two tensors are one, as they lie: address, shape, strides, dtype."""
    if not isinstance(owner, torch.Tensor) or not isinstance(tensor, torch.Tensor):
        return False
    owner = local_tensor(owner)
    tensor = local_tensor(tensor)
    same: bool = (
        owner.data_ptr() == tensor.data_ptr()
        and owner.shape == tensor.shape
        and owner.dtype == tensor.dtype
        and owner.stride() == tensor.stride()
    )
    return same


@dataclass(frozen=True, slots=True)
class Saved:
    """What a base holds for one section: the object tree, and its tensors' entries by name.

    Attributes:
        tied: names of those, of all entries, that were at several places of the state.
    """

    tree: Any
    entries: Mapping[str, Entry]
    tied: Collection[str] = ()


@dataclass(slots=True)
class RestorePlan:
    """What a provider makes of a saved section, before anything is touched.

    Attributes:
        tree: the part of the saved tree that will be restored. None is a value as any other.
        in_place: live tensors to read straight into, by entry name.
        like: DTensors (parameters, mostly) as which a tensor that is not there yet is spread over
            the ranks, by entry name.
        copied: names of tensors of which the section gets copies, wherever they are read into.
        mismatches: ``(name, what differs)``.
        left_out: nothing is restored, and there is no tree.
    """

    tree: Any
    in_place: dict[str, torch.Tensor] = field(default_factory=dict)
    like: dict[str, torch.Tensor] = field(default_factory=dict)
    copied: Collection[str] = ()
    mismatches: list[tuple[str, str]] = field(default_factory=list)
    left_out: bool = False

    @classmethod
    def without(cls, mismatches: Sequence[tuple[str, str]] = ()) -> RestorePlan:
        """The section stays as the program made it."""
        return cls(None, mismatches=list(mismatches), left_out=True)
