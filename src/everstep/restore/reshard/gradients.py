"""This rank's slices of gradients that another set of ranks consumed, found by offset.

An optimizer that works element by element treats every slice of a tensor alike. So a rank that now
holds some slice of a parameter takes the same slice of its gradient, from the logs of all ranks
that held any of it (``docs/design/ranks.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import FormatError, ReplayError
from everstep.format.log import LogRecord
from everstep.replay import Gradient, Update, is_elementwise, kind_name
from everstep.replay.exactness import variant_of
from everstep.replay.updates import dense
from everstep.restore.load import SavedLayout
from everstep.restore.redo.updates import gradients_of, replay_class, update_from_record
from everstep.run.tensors import tensor_of
from everstep.state.layout import Box, Placement
from everstep.state.layout.entries import PART_OBJECT, UPDATE_OBJECT
from everstep.state.layout.placement import box_on_mesh
from everstep.state.providers import (
    ModuleProvider,
    OptimizerProvider,
    ZeroProvider,
    local_optimizer,
)
from everstep.state.training_state import State
from everstep.state.values.objects import decode, join_path
from everstep.state.values.tensors import local_box, local_tensor

# Of these dtypes torch's vector and scalar code round alike, so a tensor may be cut anywhere (see
# replay.exactness.thread_dependence).
_ANY_CUT = (torch.float32, torch.float64)


def source_rank_of(rank: int, layout: SavedLayout) -> int:
    """Return the old rank whose tensors this rank has slices of.

    If ranks had different tensors of one name, the base restores that rank's version here
    (:class:`.SavedRanks`).

    Raises:
        ReplayError: the old ranks had different sections.
    """
    if rank < layout.world:
        return rank
    sections = layout.saved.sections_of(0)
    if any(layout.saved.sections_of(r) != sections for r in range(layout.world)):
        raise ReplayError("the ranks that wrote the log had different sections of a state")
    return rank % layout.world


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Slice of one parameter that this rank holds.

    Attributes:
        box: box of the slice.
        shape: shape of the full parameter.
        boxes: boxes of the old ranks whose slices overlap this one, of replicas as well, since one
            of them may have recorded the slice for all; empty if each held the full parameter.
    """

    box: Box
    shape: tuple[int, ...]
    boxes: Mapping[int, Box]

    @property
    def is_cut(self) -> bool:
        """True if the slice differs from that of each old rank."""
        if not self.boxes:
            return self.box.shape != self.shape
        return set(self.boxes.values()) != {self.box}

    def slice_of_full(self, gradient: Gradient) -> Gradient:
        """Return the slice of a full gradient.

        Raises:
            ValueError: the gradient has another shape.
        """
        if tuple(gradient.shape) != self.shape:
            there = list(gradient.shape)
            raise ValueError(f"a gradient has the shape {there}, not {list(self.shape)}")
        if not self.is_cut:
            return gradient
        full = Box((0,) * len(self.shape), self.shape)
        # A view would keep the strides of the full gradient, and kernels are chosen by strides.
        return dense(gradient)[self.box.slices_in(full)].contiguous()

    def assemble(self, name: str, parts: Mapping[int, Mapping[str, Gradient]]) -> Gradient | None:
        """Assemble the slice from those of the old ranks; None if there was no gradient.

        Raises:
            ValueError: a slice is missing, or has another shape.
        """
        there = {r: parts[r][name] for r in self.boxes if name in parts[r]}
        if not there:
            return None
        recorded = {self.boxes[rank] for rank in there}
        if missing := [r for r, b in self.boxes.items() if b not in recorded and b.size]:
            raise ValueError(f"rank {missing[0]} has no gradient of {name!r}, but other ranks have")
        for rank, gradient in there.items():
            if tuple(gradient.shape) != self.boxes[rank].shape:
                raise ValueError(f"rank {rank} has another slice of the gradient of {name!r}")
        if not self.is_cut:
            return next(iter(there.values()))
        first = next(iter(there.values()))
        # Not initialised: _find() has checked that the slices cover the box exactly.
        found = torch.empty(self.box.shape, dtype=first.dtype, device=first.device)
        for rank, gradient in there.items():
            if gradient.dtype != first.dtype:
                raise ValueError(f"the slices of the gradient of {name!r} have different dtypes")
            part = self.box.meet(self.boxes[rank])
            if part is not None:
                source = dense(gradient)[part.slices_in(self.boxes[rank])]
                found[part.slices_in(self.box)] = source
        return found


class ReshardedGradients:
    """Gradients that this rank needs, from the logs of the old ranks.

    Args:
        state: as restored from the base that ``layout`` describes.

    Attributes:
        source_rank: see :func:`source_rank_of`.
        needed: old ranks whose logs are needed at each step.
        inexact: why replay is not bit for bit that of training; "" if it is.

    Raises:
        ReplayError: the log cannot be replayed in another layout; says why.
    """

    def __init__(self, state: State, layout: SavedLayout) -> None:
        self._layout = layout
        self._optimizers = state.optimizers
        self._resliced: dict[str, str] = {}  # by optimizer, one of its resharded parameters
        self.source_rank = source_rank_of(state.ranks.rank, layout)
        self.inexact = ""
        self._wanted: dict[str, dict[str, _Wanted]] = {}
        self._updated_elsewhere: dict[
            str, set[str]
        ] = {}  # by optimizer, parameters updated by other ranks
        needed = {self.source_rank}
        names: dict[int, str] = {}
        for section, provider in state.providers.items():
            if isinstance(provider, ModuleProvider):
                for at, one in provider.named_parameters():
                    names.setdefault(id(one), join_path(section, at))
        for key, optimizer in state.optimizers.items():
            provider = state.providers[key]
            assert isinstance(provider, OptimizerProvider)
            if [list(group) for group in layout.groups.get(key, ())] != provider.groups():
                raise ReplayError(f"{key} has other parameter groups than when the base was saved")
            self._wanted[key] = {}
            self._updated_elsewhere[key] = set()
            mine = provider.owned() if isinstance(provider, ZeroProvider) else None
            for name, parameter in provider.named():
                if mine is not None and name not in mine:
                    self._updated_elsewhere[key].add(name)
                    continue
                if id(parameter) not in names:
                    raise ReplayError(
                        f"{name!r}, which {key} trains, belongs to no module of the state"
                    )
                ranks, wanted = self._find(names[id(parameter)], parameter)
                needed |= ranks
                self._wanted[key][name] = wanted
                if wanted.is_cut:
                    self._resliced.setdefault(key, name)
                    self._check(key, optimizer, name, parameter)
        self.needed = frozenset(needed)

    def update(self, records: Mapping[int, LogRecord]) -> Update:
        """Return one update of this rank's slices.

        Args:
            records: records of the update, of all ranks in :attr:`needed`.

        Raises:
            FormatError: the records belong to different updates, or slices are missing.
            ReplayError: the optimizer does not work element by element on resharded parameters.
        """
        mine = records[self.source_rank]
        others = {r: x for r, x in records.items() if r != self.source_rank}
        head = mine.head
        for rank, record in others.items():
            # Slices of different updates would fit together, and give a wrong state that looks
            # exact.
            if (record.head.step, record.head.lsn) != (head.step, head.lsn):
                raise FormatError(f"rank {rank} has {record.head} instead of {head}")
        found = update_from_record(replace(mine, parts=others))
        try:
            wanted = self._wanted[found.optimizer]
            parts = {self.source_rank: found.gradients}
            lossy = found.lossy
            for rank in {rank for one in wanted.values() for rank in one.boxes} - {
                self.source_rank
            }:
                parts[rank], is_lossy = _gradients_in(records[rank], found.optimizer)
                lossy = lossy or is_lossy
            known = wanted.keys() | self._updated_elsewhere[found.optimizer]
            if unknown := found.gradients.keys() - known:
                raise ValueError(f"gradients of {min(unknown)!r}, which no optimizer trains here")
            gradients = dict(_slices(wanted, parts, self.source_rank))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise FormatError(
                f"{head} cannot be assembled from the records of several ranks: {error!r}"
            ) from error
        self._check_class(found)
        return replace(found, gradients=gradients, lossy=lossy)

    def _check_class(self, update: Update) -> None:
        key = update.optimizer
        kind, _ = replay_class(update, type(local_optimizer(self._optimizers[key])))
        if kind is not None and key in self._resliced and not is_elementwise(kind):
            raise ReplayError(
                f"{key} is a {kind_name(kind)}, which does not act element by element, and "
                f"{self._resliced[key]!r} is sharded differently than in training"
            )

    def _find(self, entry: str, parameter: torch.Tensor) -> tuple[set[int], _Wanted]:
        """Return the old ranks that held a parameter, and the slices needed."""
        pieces = self._layout.saved.pieces_of(entry, self.source_rank)
        if not pieces:
            raise ReplayError(f"{entry!r} is not in the base")
        placement = pieces[0].placement
        box = local_box(parameter)
        shape = tuple(parameter.shape)
        ranks = range(self._layout.world) if placement.ranks is None else placement.ranks
        if not placement.cuts:
            return set(ranks), _Wanted(box, shape, {})
        boxes = {rank: _box(placement, rank, shape) for rank in ranks}
        # The records of the source rank, and of its replicas, are needed in any case.
        source = boxes[self.source_rank]
        needed = {r for r, b in boxes.items() if b == source or box.meet(b) is not None}
        near = {r: b for r, b in boxes.items() if box.meet(b) is not None}
        meets = [part for b in set(near.values()) if (part := box.meet(b)) is not None]
        # The slices must cover this one exactly, or elements would be updated twice or never.
        if box.size and sum(part.size for part in meets) != box.size:
            raise ReplayError(f"the ranks that wrote the log did not hold all of {entry!r}")
        if any(one.meet(other) for n, one in enumerate(meets) for other in meets[:n]):
            raise ReplayError(f"slices of {entry!r} overlap")
        # An empty slice keeps the source rank, because no boxes at all means a full parameter.
        return needed, _Wanted(box, shape, near or {self.source_rank: source})

    def _check(self, key: str, optimizer: Optimizer, name: str, parameter: torch.Tensor) -> None:
        """Check that the resharded parameter can be replayed.

        Raises:
            ReplayError: it cannot.
        """
        local = local_tensor(parameter)
        group = next(
            group
            for group in optimizer.param_groups
            if any(one is parameter for one in group["params"])
        )
        if variant_of(group, local.device.type) == "fused":
            if not local.is_contiguous():
                raise ReplayError(
                    f"{name!r}: a fused kernel would process its elements in another order"
                )
            self.inexact = (
                f"{key} is fused: its kernel rounds the last elements of a tensor differently, and "
                f"{name!r} is sharded differently than in training"
            )
        held = [local, *optimizer.state.get(parameter, {}).values()]
        kinds = {one.dtype for one in held if isinstance(one, torch.Tensor)}
        if other := sorted(str(dtype) for dtype in kinds.difference(_ANY_CUT)):
            self.inexact = (
                f"{name!r} is {other[0].removeprefix('torch.')}, sharded differently than in "
                "training: torch rounds the last elements of a tensor differently"
            )


def _slices(
    wanted: Mapping[str, _Wanted], parts: Mapping[int, Mapping[str, Gradient]], source_rank: int
) -> Iterator[tuple[str, Gradient]]:
    for name, one in wanted.items():
        if one.boxes:
            gradient = one.assemble(name, parts)
        else:
            full = parts[source_rank].get(name)
            gradient = None if full is None else one.slice_of_full(full)
        if gradient is not None:
            yield name, gradient


def _gradients_in(record: LogRecord, optimizer: str) -> tuple[dict[str, Gradient], bool]:
    """Return the gradients in one rank's record, and True if they are lossy."""
    in_parts = PART_OBJECT in record.objects
    fields: Any = decode(record.objects[PART_OBJECT if in_parts else UPDATE_OBJECT])
    if fields["optimizer"] != optimizer:
        raise ValueError(f"an update of {fields['optimizer']!r}, not of {optimizer!r}")
    tensors = {place.entry.name: tensor_of(record, place) for place in record.layout.placed}
    return gradients_of(fields, tensors), bool(fields.get("lossy", False))


def _box(placement: Placement, rank: int, shape: Sequence[int]) -> Box:
    at = placement.coordinate(rank)
    return box_on_mesh(tuple(shape), placement.mesh, at, placement.cuts)
