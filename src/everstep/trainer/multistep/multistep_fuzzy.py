"""What a base over several steps takes along if whoever restores it is to make it whole.

The training process says which update each part has seen, and what the last step mark holds for
replay: elements of what was captured before it, as training had them then, so that a change behind
the optimizer's back is found when the base is made whole (I8).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from everstep.capture.multistep import Unit
from everstep.capture.spots import Spots, marked, which_of
from everstep.format.plan import BasePlan
from everstep.keeper.replica.hyperparameters import pack_tensors, tensor_hyperparameters
from everstep.link.assembly import FuzzyParts
from everstep.state.values.tensors import host_bytes, tensor_entry
from everstep.trainer.log.untold import Owned

__all__ = ["CapturedParts", "fuzzy_parts", "redo_bytes", "spots_at_mark"]


class CapturedParts:
    """What the parts of a base were captured from, as training goes on (I8).

    A change that no update makes is in no gradient. Whoever makes the base whole compares a few
    elements of each tensor, and would not see one that is between them: version counters do, at
    least where torch was asked to make it. Where that is whoever restores the base, such bases
    would be committed until then, and better ones deleted; there elements are looked at here, too.
    """

    def __init__(self) -> None:
        self._owned: dict[str, list[Owned]] = {}
        self._looks = False

    def add(self, owned: Mapping[str, Owned], step: int, *, looks: bool) -> None:
        """A part is being captured at this step mark.

        Args:
            owned: by the key of their optimizer.
            looks: at elements, too.
        """
        self._looks = looks
        for key, mine in owned.items():
            mine.settle(step if looks else None)
            self._owned.setdefault(key, []).append(mine)

    def applied(self, key: str, step: int) -> None:
        """An update is over."""
        for owned in self._owned.get(key, ()):
            owned.settle(step if self._looks else None)

    def written(self, key: str | None = None) -> str | None:
        """The name of a tensor of an optimizer (of any) that was written to since its update."""
        some = self._owned.values() if key is None else [self._owned.get(key, [])]
        return next((name for many in some for one in many if (name := one.written())), None)


def redo_bytes(parts: Sequence[Sequence[Unit]]) -> int:
    """Gradients that are written with a base in these parts, about: of each part those of each step
    behind its own."""
    return sum(
        (len(parts) - 1 - number) * sum(unit.gradient_bytes for unit in part)
        for number, part in enumerate(parts)
    )


def spots_at_mark(
    names: Collection[str], tensors: Mapping[str, torch.Tensor], step: int
) -> dict[str, torch.Tensor]:
    """A few elements of some entries as they are now, as marks of the log hold them.

    Args:
        names: of the entries; those on a device are left out.
        tensors: all of the state, by entry name.
    """
    spots = Spots({name: tensors[name] for name in names})
    return marked(spots, which_of(spots, sorted(tensors)), step)


def fuzzy_parts(
    plan: BasePlan,
    memory: memoryview,
    objects: Mapping[str, bytes],
    seen: Sequence[tuple[int, Collection[str]]],
    spots: Mapping[str, torch.Tensor],
) -> FuzzyParts:
    """What the keeper is told of a base that stays as it was captured.

    Args:
        memory: its block, as of the last step mark but for the parts.
        objects: encoded objects of that mark.
        seen: of each part but the last, the last update that it has seen, and its entries.
        spots: see :func:`spots_at_mark`.
    """
    held = tensor_hyperparameters(plan, memory, objects)
    for name, tensor in spots.items():
        held[name] = tensor_entry(name, tensor), host_bytes(tensor)
    return FuzzyParts(seen, *pack_tensors(held))
