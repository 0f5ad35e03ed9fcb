"""Step marks of another set of ranks, restored as a base of theirs would be.

The headers of a base say which rank held which slice of a tensor, and that also holds at later
steps. So marks are read by the code that reads a base of another number of ranks, with its rules
for per-rank state (``docs/design/ranks.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

import numpy as np
import torch

from everstep.capture.mark_samples import sample_indices
from everstep.errors import FormatError
from everstep.format import digest
from everstep.format.header import ShardHeader
from everstep.format.log import LogRecord
from everstep.format.reader import OpenShard
from everstep.restore.load import SavedLayout, SavedRanks
from everstep.restore.load.saved_ranks import View
from everstep.restore.load.targets import box_here, fills, part_of
from everstep.restore.redo import live_tensors
from everstep.restore.redo.live import require_fit, restore_from_mark
from everstep.run import OpenBase
from everstep.run.tensors import tensor_of
from everstep.state.layout import OBJECT_PREFIX, SAMPLE, Box, Entry, Placed, Placement
from everstep.state.layout.entries import SPOT
from everstep.state.providers import RestorePlan
from everstep.state.training_state import State
from everstep.state.values.tensors import (
    dtensor_over,
    empty_like_entry,
    host_bytes,
    local_tensor,
    torch_dtype,
)
from everstep.state.values.tree import references
from everstep.tiers import MemoryFile

_WHICH = f"{SPOT}which"


def restore_marks(state: State, layout: SavedLayout, marks: Mapping[int, LogRecord]) -> list[str]:
    """Restore the contents of the marks of a step, after the optimizers were replayed up to it;
    return notes.

    Args:
        marks: of all ranks that wrote the log, verified.

    Raises:
        MismatchError, FormatError: they do not fit the state, or each other.
    """
    ranks = {rank: _Mark.of(layout, rank, mark) for rank, mark in marks.items()}
    saved = SavedRanks([one.opened for one in ranks.values()])
    view = saved.view(state)
    plans = state.plan_restore(view.trees, view.entries, view.left_out)
    require_fit("the step marks do", plans)
    logged: dict[str, torch.Tensor] = {}
    for plan in plans.values():
        for name in references(plan.tree):
            slice_ = _logged_slice(name, view, plan, ranks)
            if slice_ is not None:
                logged[name] = slice_
    return [*view.notes, *restore_from_mark(state, plans, logged, live_tensors(state))]


@dataclass(frozen=True, slots=True)
class _Mark:
    """One rank's mark in the form of files of a base.

    Attributes:
        data: bytes of its tensors, by entry name.
    """

    opened: OpenBase
    data: Mapping[str, memoryview]

    @classmethod
    def of(cls, layout: SavedLayout, rank: int, mark: LogRecord) -> _Mark:
        entries = layout.entries(rank)
        base = layout.opened[rank]
        data: dict[str, memoryview] = {}
        for place in mark.layout.placed:
            name = place.entry.name
            if name.startswith(SAMPLE):
                continue
            entry = entries.get(name)
            if entry is None or (entry.dtype, entry.shape) != (
                place.entry.dtype,
                place.entry.shape,
            ):
                raise FormatError(f"rank {rank}, {mark.head}: has another {name!r} than the base")
            data[name] = mark.data[place.begin : place.end]
        placed: list[Placed] = []
        digests: list[str] = []
        for _, _, header, _ in base.shards:
            for place, before in zip(header.placed, header.digests, strict=True):
                entry = place.entry
                if entry.name.startswith(OBJECT_PREFIX):
                    continue
                # No bytes: the file of a mark has objects only, and tensors are taken from `data`.
                placed.append(Placed(entry, 0, 0))
                if entry.name in data:
                    digests.append(digest(data[entry.name]))
                elif Placement.parse(entry.placement).ranks == (rank,):
                    digests.append(
                        f"{before} of rank {rank}"
                    )  # its digest is unknown: replay has changed it
                else:
                    digests.append(before)
        begin = 0
        for name, item in mark.objects.items():
            end = begin + len(item)
            placed.append(Placed(Entry.whole(name, "U8", (len(item),)), begin, end))
            digests.append(digest(item))
            begin = end
        first = base.shards[0]
        aliases = {k: v for shard in base.shards for k, v in shard.header.aliases.items()}
        header = ShardHeader(first.header.identity, tuple(placed), tuple(digests), aliases, 0)
        file = MemoryFile([memoryview(item) for item in mark.objects.values()])
        path = PurePath(f"mark of rank {rank}")
        return cls(OpenBase(base.marker, [OpenShard(file, first.record, header, path)]), data)


def _logged_slice(
    name: str, view: View, plan: RestorePlan, ranks: Mapping[int, _Mark]
) -> torch.Tensor | None:
    """Return this rank's slice of a tensor that the marks hold; None if replay restores the tensor.

    Raises:
        FormatError: the marks hold only some of it.
    """
    # Empty slices are in every mark, since without memory their owner is unknown.
    pieces = [p for p in view.pieces[name] if p.box.size]
    entry = view.entries[name]
    held = [piece for piece in pieces if piece.entry.name in ranks[piece.rank].data]
    if not held:
        return None
    live = plan.in_place.get(name)
    template = plan.like.get(name)
    box = box_here(entry, live if live is not None else template)
    slice_ = empty_like_entry(part_of(entry, box))
    found, missing = fills(held, box, host_bytes(slice_))
    if missing or len(held) != len(pieces):
        raise FormatError(f"the step marks do not hold all of {name!r}")
    for fill in found:
        fill.copy(ranks[fill.piece.rank].data[fill.piece.entry.name])
    return slice_ if live is not None or template is None else dtensor_over(template, slice_)


@dataclass(eq=False)
class ReshardedSamples:
    """Comparison of this rank's tensors with the samples in marks of other ranks
    (:mod:`everstep.capture.mark_samples`).

    Attributes:
        source_rank: see :func:`.gradients.source_rank_of`; selects among different tensors of one
            name.
    """

    layout: SavedLayout
    source_rank: int
    _entries: dict[int, list[Entry]] = field(default_factory=dict, init=False)

    def first_difference(
        self, marks: Mapping[int, LogRecord], tensors: Mapping[str, torch.Tensor]
    ) -> str | None:
        """Return the name of a tensor that differs from a sample; None if there is none.

        Args:
            marks: of one step, by the rank that wrote them.
            tensors: of :func:`.live_tensors`.

        Raises:
            FormatError: a mark belongs to another state.
        """
        for rank, mark in marks.items():
            for entry, at, values in self._samples(rank, mark):
                live = tensors.get(entry.name)
                if live is None or not Placement.parse(entry.placement).holds(self.source_rank):
                    continue
                if _differs(entry, at, values, live):
                    return entry.name
        return None

    def _samples(
        self, rank: int, mark: LogRecord
    ) -> Iterator[tuple[Entry, np.ndarray, np.ndarray]]:
        """Yield for each sampled tensor the positions of the elements, one row each, and their
        values as integers."""
        logged = {
            place.entry.name: tensor_of(mark, place).numpy()
            for place in mark.layout.placed
            if place.entry.name.startswith(SPOT)
        }
        which = logged.pop(_WHICH, None)
        if which is None:
            return
        if rank not in self._entries:
            self._entries[rank] = [e for _, e in sorted(self.layout.entries(rank).items())]
        entries = self._entries[rank]
        used = dict.fromkeys(logged, 0)
        if which.size != (len(entries) + 7) // 8:
            raise FormatError("the samples belong to a state with other tensors")
        bits = np.unpackbits(which)[: len(entries)]
        for entry in (one for one, bit in zip(entries, bits, strict=True) if bit):
            if entry.logical_dtype is not None or entry.dtype.startswith("C"):
                continue  # complex tensors have samples of their own
            name = SPOT + str(torch_dtype(entry.dtype)).removeprefix("torch.")
            at = _coordinates(entry.shape, mark.head.step)
            # Samples of one dtype follow each other in the order of entry names, as MarkSampler
            # writes them.
            begin = used.get(name, 0)
            used[name] = begin + len(at)
            if name not in logged or used[name] > logged[name].size:
                raise FormatError("the samples belong to tensors of other dtypes")
            yield (
                entry,
                at + np.array(entry.global_offset, np.int64),
                logged[name][begin:][: len(at)],
            )


def _coordinates(shape: tuple[int, ...], step: int) -> np.ndarray:
    """Return the sampled elements of a tensor in a step: shape ``[elements, dimensions]``."""
    if not shape:
        return np.zeros((1, 0), np.int64)
    rows = []
    for index in sample_indices(shape, step):
        sides = [
            np.arange(extent)[one] if isinstance(one, slice) else np.array([one])
            for one, extent in zip(index, shape, strict=True)
        ]
        grid = np.meshgrid(*sides, indexing="ij")
        rows.append(np.stack([side.reshape(-1) for side in grid], axis=1))
    return np.concatenate(rows).astype(np.int64)


def _differs(entry: Entry, at: np.ndarray, values: np.ndarray, live: torch.Tensor) -> bool:
    """Return True if this rank holds other values at some of these elements."""
    box: Box = box_here(replace(entry, shape=entry.global_shape), live)
    own = at - np.array(box.offset, np.int64)
    inside = ((own >= 0) & (own < np.array(box.shape, np.int64))).all(axis=1)
    if not inside.any():
        return False
    local = local_tensor(live)
    index = tuple(torch.from_numpy(side) for side in own[inside].T)
    mine = local[index] if index else local.reshape(1)
    theirs = torch.from_numpy(values[inside].copy()).view(mine.dtype)
    # As integers: -0.0 and +0.0 are different bits.
    same = mine.view(_as_integers(mine)) == theirs.view(_as_integers(mine))
    if mine.is_floating_point():
        same |= mine.isnan() & theirs.isnan()  # NaN payloads may differ
    return not bool(same.all())


def _as_integers(tensor: torch.Tensor) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
