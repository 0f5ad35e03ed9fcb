"""This rank's parts of gradients that ranks of another number have consumed, found by offsets.

What an optimizer that acts element by element has done to a part of a tensor, it does to any other
part of it. So whoever has a parameter, or a part of one, takes the same part of its gradient from
the logs of all ranks that had any of it (``docs/design/ranks.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import FormatError, ReplayError
from everstep.format.log import LogRecord
from everstep.replay.exactness import is_elementwise, kind_name, variant_of
from everstep.replay.packed import Gradient, dense
from everstep.replay.updates import Update
from everstep.restore.load.saved_ranks import SavedLayout
from everstep.restore.redo.gradients import gradients_of
from everstep.restore.redo.updates import class_for, update_of
from everstep.run.tensors import tensor_of
from everstep.state.layout.names import PART_OBJECT, UPDATE_OBJECT
from everstep.state.layout.placement import Box, Placement, box_on_mesh
from everstep.state.providers.modules import ModuleProvider
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import ZeroProvider, local_optimizer
from everstep.state.training_state import State
from everstep.state.values.objects import decode, join_path
from everstep.state.values.tensors import local_box, local_tensor

__all__ = ["ReshardedGradients", "source_rank_of"]

_ANY_CUT = (torch.float32, torch.float64)


def source_rank_of(rank: int, layout: SavedLayout) -> int:
    """The rank of whose tensors this one has parts: where several ranks had different ones of the
    same name, what this one restores from a base is that one's (:class:`.SavedRanks`).

    Raises:
        ReplayError: the ranks had different parts of a state.
    """
    if rank < layout.world:
        return rank
    sections = layout.saved.sections_of(0)
    if any(layout.saved.sections_of(r) != sections for r in range(layout.world)):
        raise ReplayError("the ranks that wrote the log had different parts of a state")
    return rank % layout.world


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Of one parameter.

    Attributes:
        box: which part of it this rank has.
        shape: of all of it.
        boxes: by rank: which part that had, of those whose parts meet this one; empty: each of
            them had all of it.
    """

    box: Box
    shape: tuple[int, ...]
    boxes: Mapping[int, Box]

    @property
    def is_cut(self) -> bool:
        """Whether it is in other parts now."""
        if not self.boxes:
            return self.box.shape != self.shape
        return len(self.boxes) > 1 or self.box not in self.boxes.values()

    def of_whole(self, gradient: Gradient) -> Gradient:
        """This rank's part of all of a gradient.

        Raises:
            ValueError: it is of another shape.
        """
        if tuple(gradient.shape) != self.shape:
            there = list(gradient.shape)
            raise ValueError(f"a gradient has the shape {there}, not {list(self.shape)}")
        if not self.is_cut:
            return gradient
        whole = Box((0,) * len(self.shape), self.shape)
        return dense(gradient)[self.box.slices_in(whole)].contiguous()

    def of_parts(self, name: str, parts: Mapping[int, Mapping[str, Gradient]]) -> Gradient | None:
        """This rank's part of a gradient, put together; None: there was none.

        Raises:
            ValueError: a part is missing, or of another shape.
        """
        there = {r: parts[r][name] for r in self.boxes if name in parts[r]}
        if not there:
            return None
        if missing := [r for r, box in self.boxes.items() if r not in there and box.size]:
            raise ValueError(f"rank {missing[0]} has no gradient of {name!r}, and others have")
        for rank, gradient in there.items():
            if tuple(gradient.shape) != self.boxes[rank].shape:
                raise ValueError(f"rank {rank} has another part of the gradient of {name!r}")
        if not self.is_cut:
            return next(iter(there.values()))
        first = next(iter(there.values()))
        found = torch.empty(self.box.shape, dtype=first.dtype, device=first.device)
        for rank, gradient in there.items():
            if gradient.dtype != first.dtype:
                raise ValueError(f"the parts of the gradient of {name!r} are of several dtypes")
            part = self.box.meet(self.boxes[rank])
            if part is not None:
                source = dense(gradient)[part.slices_in(self.boxes[rank])]
                found[part.slices_in(self.box)] = source
        return found


class ReshardedGradients:
    """Which gradients this rank needs, and of whose log.

    Args:
        state: as it was restored from the base that ``layout`` is of.

    Attributes:
        giver: see :func:`source_rank_of`.
        asked: ranks whose logs are needed at each step.
        inexact: why replay does not give the bits of training; "" if it does.

    Raises:
        ReplayError: nothing can be replayed in other parts than it was trained in; says why.
    """

    def __init__(self, state: State, layout: SavedLayout) -> None:
        self._layout = layout
        self._optimizers = state.optimizers
        self._cut: dict[str, str] = {}  # by optimizer a parameter that is in other parts now
        self.giver = source_rank_of(state.ranks.rank, layout)
        self.inexact = ""
        self._wanted: dict[str, dict[str, _Wanted]] = {}
        self._elsewhere: dict[str, set[str]] = {}  # parameters that another rank updates for us
        asked = {self.giver}
        names: dict[int, str] = {}
        for section, provider in state.providers.items():
            if isinstance(provider, ModuleProvider):
                for at, one in provider.named_parameters():
                    names.setdefault(id(one), join_path(section, at))
        for key, optimizer in state.optimizers.items():
            provider = state.providers[key]
            assert isinstance(provider, OptimizerProvider)
            if [list(group) for group in layout.groups.get(key, ())] != provider.groups():
                raise ReplayError(f"{key} has other groups of parameters than it had")
            self._wanted[key], self._elsewhere[key] = {}, set()
            mine = provider.owned() if isinstance(provider, ZeroProvider) else None
            for name, parameter in provider.named():
                if mine is not None and name not in mine:
                    self._elsewhere[key].add(name)
                    continue
                if id(parameter) not in names:
                    raise ReplayError(f"{name!r}, which {key} trains, is in no module of the state")
                ranks, wanted = self._find(names[id(parameter)], parameter)
                asked |= ranks
                self._wanted[key][name] = wanted
                if wanted.is_cut:
                    self._cut.setdefault(key, name)
                    self._check(key, optimizer, name, parameter)
        self.asked = frozenset(asked)

    def update(self, records: Mapping[int, LogRecord]) -> Update:
        """One update, of this rank's parts.

        Args:
            records: of :attr:`asked`.

        Raises:
            FormatError: they are not of one update, or parts are missing.
            ReplayError: it does not act element by element on what is in other parts now.
        """
        mine = records[self.giver]
        others = {r: x for r, x in records.items() if r != self.giver}
        head = mine.head
        for rank, record in others.items():
            if (record.head.step, record.head.lsn) != (head.step, head.lsn):
                raise FormatError(f"rank {rank} has {record.head} instead of {head}")
        found = update_of(replace(mine, parts=others))
        try:
            wanted = self._wanted[found.optimizer]
            parts = {self.giver: found.gradients}
            lossy = found.lossy
            for rank in {rank for one in wanted.values() for rank in one.boxes} - {self.giver}:
                parts[rank], poor = _own(records[rank], found.optimizer)
                lossy = lossy or poor
            known = wanted.keys() | self._elsewhere[found.optimizer]
            if strange := found.gradients.keys() - known:
                raise ValueError(f"gradients of {min(strange)!r}, which nobody trains here")
            gradients = dict(_taken(wanted, parts, self.giver))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise FormatError(f"{head} of several ranks is none together: {error!r}") from error
        self._check_class(found)
        return replace(found, gradients=gradients, lossy=lossy)

    def _check_class(self, update: Update) -> None:
        key = update.optimizer
        kind, _ = class_for(update, type(local_optimizer(self._optimizers[key])))
        if kind is not None and key in self._cut and not is_elementwise(kind):
            raise ReplayError(
                f"{key} is a {kind_name(kind)}, which does not act element by element, and "
                f"{self._cut[key]!r} is in other parts than it was trained in"
            )

    def _find(self, entry: str, parameter: torch.Tensor) -> tuple[set[int], _Wanted]:
        """Whose gradients of a parameter are needed, and which parts."""
        pieces = self._layout.saved.pieces_of(entry, self.giver)
        if not pieces:
            raise ReplayError(f"{entry!r} is not in the base")
        placement = pieces[0].placement
        box = local_box(parameter)
        shape = tuple(parameter.shape)
        ranks = range(self._layout.world) if placement.ranks is None else placement.ranks
        if not placement.cuts:
            return set(ranks), _Wanted(box, shape, {})
        boxes = {rank: _box(placement, rank, shape) for rank in ranks}
        found: dict[Box, int] = {boxes[self.giver]: self.giver}
        for rank in sorted(ranks):  # of replicas one
            found.setdefault(boxes[rank], rank)
        near = {r: b for b, r in found.items() if r == self.giver or box.meet(b) is not None}
        meets = [part for b in near.values() if (part := box.meet(b)) is not None]
        if box.size and sum(part.size for part in meets) != box.size:
            raise ReplayError(f"the ranks that wrote the log had not all of {entry!r}")
        if any(one.meet(other) for n, one in enumerate(meets) for other in meets[:n]):
            raise ReplayError(f"parts of {entry!r} overlap")
        if box.size and box.meet(boxes[self.giver]) is None:
            del near[self.giver]
        return set(near), _Wanted(box, shape, near)

    def _check(self, key: str, optimizer: Optimizer, name: str, parameter: torch.Tensor) -> None:
        """Raises:
        ReplayError: what is in other parts now cannot be replayed.
        """
        local = local_tensor(parameter)
        group = next(
            group
            for group in optimizer.param_groups
            if any(one is parameter for one in group["params"])
        )
        if variant_of(group, local.device.type) == "fused":
            if not local.is_contiguous():
                raise ReplayError(f"{name!r}: a fused kernel over another order of elements")
            self.inexact = (
                f"{key} is fused: its kernel rounds the last elements of a tensor otherwise, and "
                f"{name!r} is in other parts than it was trained in"
            )
        held = [local, *optimizer.state.get(parameter, {}).values()]
        kinds = {one.dtype for one in held if isinstance(one, torch.Tensor)}
        if other := sorted(str(dtype) for dtype in kinds.difference(_ANY_CUT)):
            self.inexact = (
                f"{name!r} is {other[0].removeprefix('torch.')}, in other parts than it was "
                "trained in: torch rounds the last elements of a tensor otherwise"
            )


def _taken(
    wanted: Mapping[str, _Wanted], parts: Mapping[int, Mapping[str, Gradient]], giver: int
) -> Iterator[tuple[str, Gradient]]:
    for name, one in wanted.items():
        if one.boxes:
            gradient = one.of_parts(name, parts)
        else:
            whole = parts[giver].get(name)
            gradient = None if whole is None else one.of_whole(whole)
        if gradient is not None:
            yield name, gradient


def _own(record: LogRecord, optimizer: str) -> tuple[dict[str, Gradient], bool]:
    """Gradients in one rank's record, and whether they are lossy."""
    in_parts = PART_OBJECT in record.objects
    about: Any = decode(record.objects[PART_OBJECT if in_parts else UPDATE_OBJECT])
    if about["optimizer"] != optimizer:
        raise ValueError(f"an update of {about['optimizer']!r}, not of {optimizer!r}")
    tensors = {place.entry.name: tensor_of(record, place) for place in record.layout.placed}
    return gradients_of(about, tensors), bool(about.get("lossy", False))


def _box(placement: Placement, rank: int, shape: Sequence[int]) -> Box:
    at = placement.coordinate(rank)
    return box_on_mesh(shape, placement.mesh, at, placement.cuts)
