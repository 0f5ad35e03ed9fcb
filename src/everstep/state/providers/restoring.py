"""What is restored of a section: what a base holds, and what a provider makes of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.state.layout.entries import Entry

__all__ = ["RestorePlan", "Saved"]


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
