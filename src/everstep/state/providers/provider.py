"""The base class of state providers, and restore plans.

A provider collects a tree with live tensors in it, decides which saved entries can be read straight
into live memory and which do not match, and takes the loaded tree back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.state.layout import Entry
from everstep.state.survey import SectionContents, TensorBlock, inspect_plain, inspect_tree
from everstep.state.values.tensors import local_tensor, tensor_entry


class SectionProvider:
    """Provider of one section of the state.

    Attributes:
        section: key in the state dict.
        replicated: entry names of tensors that all ranks hold, beside those of modules and
            optimizers; as of the last look.
    """

    section: str
    replicated: frozenset[str] = frozenset()
    _blocks: tuple[TensorBlock, ...] = ()  # found last

    def collect(self) -> Any:
        """Return the section as a tree with live tensors in it; nothing is copied."""
        raise NotImplementedError

    def look(self) -> SectionContents:
        """Return the current contents of the section, reusing unchanged ones.

        Here it is collected anew each time. Most sections are small; large ones are plain data,
        which compiled code encodes.

        Raises:
            UnsupportedStateError: some leaves cannot be stored; lists all of them.
        """
        part = inspect_plain(self.collect(), self.section, self._blocks)
        self._blocks = part.blocks
        return part

    def _look_at(self, collected: Any) -> SectionContents:
        part = inspect_tree(collected, self.section, self._blocks)
        self._blocks = part.blocks
        return part

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        """Compare with a saved section. ``live`` are the section's live tensors by entry name."""
        raise NotImplementedError

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        """Take the loaded tree; return descriptions of everything that could not be restored."""
        raise NotImplementedError


def describe(entry: Entry) -> str:
    """Return an entry's dtype and shape for messages: ``F32 [2, 3]``."""
    return f"{entry.logical_dtype or entry.dtype} {list(entry.shape)}"


def difference(entry: Entry, tensor: torch.Tensor, *, dtype: bool = True) -> str | None:
    """Describe the difference in dtype or shape between a saved entry and a live tensor; None if
    they match.

    Args:
        entry: saved entry.
        tensor: live tensor.
        dtype: False: a tensor of another dtype matches, too.
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
    """Return True if two tensors have the same address, shape, strides and dtype."""
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
    """Saved section of a base: the object tree, and its tensors' entries by name.

    Attributes:
        tree: object tree.
        entries: entries of its tensors, by name.
        tied: names of entries, of the whole base, that stood at several places of the state.
    """

    tree: Any
    entries: Mapping[str, Entry]
    tied: Collection[str] = ()


@dataclass(slots=True)
class RestorePlan:
    """Plan to restore one section, made before anything is changed.

    Attributes:
        tree: subtree of the saved tree that will be restored. None is a value like any other.
        in_place: live tensors to read straight into, by entry name.
        like: DTensors (mostly parameters) whose placement a missing tensor takes, by entry name.
        copied: names of tensors of which the section gets copies, wherever they are read into.
        mismatches: ``(name, difference)``.
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
        """Create a plan that leaves the section as the program made it."""
        return cls(None, mismatches=list(mismatches), left_out=True)
