"""Replay of steps that another number of ranks trained, or as many in another layout
(``docs/design/ranks.md``).

Each update is assembled from the slices of the gradients that all old ranks consumed. State that no
optimizer replays is restored from the last marks of all of them.

The headers of a base say which rank held which slice of a tensor, and that also holds at later
steps. So marks are read by the code that reads a base of another number of ranks, with its rules
for per-rank state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePath

import numpy as np
import torch

from everstep.capture.mark_samples import sample_indices
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, EverstepError, FormatError, ReplayError
from everstep.format.digests import digest
from everstep.format.header import ShardHeader
from everstep.format.log import NOT_EXACT, LogRecord
from everstep.format.records import FileRecord, TimelineRecord
from everstep.replay.updates import Update
from everstep.restore.load.pieces import fills
from everstep.restore.load.restored import Restored
from everstep.restore.load.saved_ranks import SavedLayout, SavedRanks, View
from everstep.restore.load.targets import box_here, part_of
from everstep.restore.redo.conditions import fingerprint_difference
from everstep.restore.redo.driver import MarkEntries, ReplayDriver, Step
from everstep.restore.redo.live import (
    LiveMemory,
    live_tensors,
    mark_holds_less,
    require_fit,
    restore_from_mark,
)
from everstep.restore.reshard.gradients import ReshardedGradients
from everstep.run.candidates import Skipped
from everstep.run.open_base import OpenBase
from everstep.run.tensors import tensor_of
from everstep.seams.progress import progress
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX, SAMPLE, SPOT
from everstep.state.layout.placement import Box, Placement
from everstep.state.layout.shards import Placed
from everstep.state.providers.provider import RestorePlan
from everstep.state.ranks.log_shares import updated_elsewhere
from everstep.state.training_state import State
from everstep.state.values.tensors import (
    dtensor_like,
    empty_like_entry,
    host_bytes,
    local_tensor,
    torch_dtype,
)
from everstep.state.values.tree import references

__all__ = ["Fetch", "replay_resharded"]

Fetch = Callable[[Sequence[int], int, int], Mapping[int, Sequence[LogRecord]]]
"""Returns the updates and the mark of a step (timeline, step) of the logs of some ranks, verified.

Raises:
    DamageError: one of them cannot be used.
"""


class _ReshardedMemory(LiveMemory):
    """Live state to which the updates of another set of ranks are applied.

    Args:
        state: live state, restored from a base of these ranks.
        layout: layout of the state over these ranks.
        gradients: gradients of these ranks.
        relaid: entries whose memory layout differs from that of the saved tensors.
    """

    def __init__(
        self,
        state: State,
        layout: SavedLayout,
        gradients: ReshardedGradients,
        relaid: Collection[str],
    ) -> None:
        super().__init__(state, relaid)
        self._layout = layout
        self._needed = gradients.needed
        self._samples = _ReshardedSamples(layout, gradients.source_rank)
        self._marks: Mapping[int, LogRecord] = {}
        self._doubtful_checked = False

    def must_start_over(self, step: Step, last: LogRecord) -> bool:
        """Return True if another program, or another optimizer class, continues.

        Raises:
            ReplayError: it does, and the marks of some ranks are not at hand.
        """
        changes = self._changes_class(step)
        # Marks of single ranks are incomplete; only those of all ranks can be restored.
        if len(self._marks) == len(step.marks) == self._layout.world:
            less = (mark_holds_less(step.marks[rank], than=m) for rank, m in self._marks.items())
            return changes or any(less)
        if changes:
            raise ReplayError(
                f"{step.mark.head}: an optimizer has another class than at the previous step"
            )
        return False

    def start_over(self) -> None:
        """Forget the replayers: everything is now as the last marks hold it."""
        super().start_over()
        self._doubtful_checked = False

    def begin(self, step: Step) -> MarkEntries:
        """Take note of a step.

        Raises:
            ReplayError: a logged entry is updated by an optimizer as well.
        """
        found = super().begin(step)
        self._marks = step.marks
        if not self._doubtful_checked:
            for rank in self._needed:
                self._program.doubtful = None
                found = self._doubtful_entries(step.marks[rank])
                if names := [p.entry.name for _, p in found if p.end > p.begin]:
                    why = "it is updated by an optimizer and by something else"
                    raise ReplayError(f"{names[0]!r} cannot be replayed in another layout: {why}")
            self._doubtful_checked = True
        return ()

    def first_difference(self, mark: LogRecord) -> str | None:
        """Return the name of an entry that differs from its samples in the marks of the ranks whose
        gradients are needed."""
        elsewhere = updated_elsewhere(self._state)
        live = live_tensors(self._state)
        mine = {name: tensor for name, tensor in live.items() if name not in elsewhere}
        marks = {rank: self._marks[rank] for rank in self._needed}
        return self._samples.first_difference(marks, mine)

    def restore(self, mark: LogRecord) -> list[str]:
        """Restore the contents of the last marks of all ranks; return notes.

        Raises:
            MismatchError, FormatError: they do not fit the state.
        """
        return _restore_marks(self._state, self._layout, self._marks)


def replay_resharded(
    restored: Restored,
    steps: Sequence[tuple[int, int]],
    state: State,
    fetch: Fetch,
    timelines: Mapping[int, TimelineRecord | None],
    *,
    together: bool,
    alive: Callable[[], None],
) -> None:
    """Replay steps on a base of another number of ranks.

    Args:
        restored: state restored from the base; updated.
        steps: timeline and step of each.
        together: replay several steps in one pass; otherwise an error concerns step
            ``restored.replayed``.
        alive: called at each step.

    Raises:
        EverstepError: a step cannot be replayed; the state is a mixture of steps.
        RecoveryError, DeadlineError: another rank has failed, or does not respond.
    """
    loaded = restored.loaded
    assert loaded is not None
    layout = loaded.layout
    if layout is None or loaded.mismatches:
        why = "the log after it belongs to a state of another composition"
        if not loaded.mismatches:
            why = "log: the old layout is in files of other ranks, which are not available here"
        restored.skipped.append(Skipped(*steps[0], why))
        return
    if state.ownership_rules.updates:
        raise ReplayError("declared updates cannot be replayed in another layout")
    gradients = ReshardedGradients(state, layout)
    conditions = fingerprint_difference(timelines.get(timeline) for timeline, _ in steps)
    driver = ReplayDriver(
        _ReshardedMemory(state, layout, gradients, loaded.restrided),
        compares=not conditions and not gradients.inexact,
        together=together,
    )
    needed = tuple(sorted(gradients.needed))
    outside = [rank for rank in range(layout.world) if rank not in gradients.needed]
    # At a change of timeline another program continues: all marks on both sides are needed.
    turns = {at for two in pairwise(steps) if two[0][0] != two[1][0] for at in two}
    with progress("replay", len(steps), "items") as bar:
        for at in steps:
            alive()
            marks: dict[int, LogRecord] = {}
            try:
                # Of ranks whose gradients are not needed only the mark is kept, rank by rank.
                for rank in outside if at in {*turns, steps[-1]} else ():
                    records = fetch((rank,), *at)[rank]
                    marks[rank] = _StepRecords(rank, at, restored.lsn, records, layout).mark
                    del records
                found = fetch(needed, *at)
            except DamageError as error:
                restored.skipped.append(Skipped(*at, f"log: {error.message}"))
                return
            logs = {
                rank: _StepRecords(rank, at, restored.lsn, of, layout) for rank, of in found.items()
            }
            marks |= {rank: log.mark for rank, log in logs.items()}
            marks = dict(sorted(marks.items()))
            step = _step_of(logs, marks, gradients)
            driver.step(step)
            restored.replayed += 1
            restored.end = BaseId(*at)
            restored.lsn = step.mark.head.lsn
            if not all(mark.head.exact for mark in marks.values()):
                restored.inexact = NOT_EXACT
            bar.advance(1)
            del found, logs, step  # free their memory before the next step arrives
    try:
        notes = driver.finish()
    except EverstepError:
        restored.replayed -= 1  # the last marks do not fit
        raise
    restored.inexact = restored.inexact or conditions or gradients.inexact or driver.exactness.why
    new = (note for note in notes if note not in loaded.notes)
    restored.loaded = replace(loaded, notes=(*loaded.notes, *new))


class _StepRecords:
    """One rank's records of a step.

    Attributes:
        mark: a copy, since it is needed during the next step, and the records of another rank share
            one block of memory.

    Raises:
        FormatError: records are missing, or belong to a state of another shape than the base.
        ReplayError: a record cannot be replayed by other ranks.
    """

    def __init__(
        self,
        rank: int,
        at: tuple[int, int],
        lsn: int,
        records: Sequence[LogRecord],
        layout: SavedLayout,
    ) -> None:
        marks = [one for one in records if one.head.kind == "mark"]
        self.updates = sorted(
            (one for one in records if one.head.kind == "update"), key=lambda one: one.head.lsn
        )
        if len(marks) != 1 or any((r.head.timeline, r.head.step) != at for r in records):
            raise FormatError(f"rank {rank}: has records of other steps than {at[1]}")
        self.mark = replace(marks[0], data=memoryview(bytearray(marks[0].data)))
        numbers = [one.head.lsn for one in self.updates]
        if numbers != list(range(lsn + 1, self.mark.head.lsn + 1)):
            raise FormatError(
                f"rank {rank}: updates {numbers} of step {at[1]} do not follow update {lsn}"
            )
        if self.mark.head.shape != layout.shapes[rank]:
            raise FormatError(f"rank {rank}: at step {at[1]} the state has another composition")
        for one in self.updates:
            if one.head.declared:
                what = f"a declared update of {one.head.declared!r}"
                raise ReplayError(f"{one.head}: {what} cannot be replayed by other ranks")


def _step_of(
    logs: Mapping[int, _StepRecords], marks: Mapping[int, LogRecord], gradients: ReshardedGradients
) -> Step:
    mine = logs[gradients.source_rank]
    updates: list[tuple[LogRecord, Update | None]] = []
    for rank, mark in marks.items():
        if mark.head.lsn != mine.mark.head.lsn:
            raise FormatError(f"rank {rank} made another number of updates: {mark.head}")
    for number, record in enumerate(mine.updates):
        of_all = {rank: logs[rank].updates[number] for rank in gradients.needed}
        updates.append((record, gradients.update(of_all)))
    return Step(updates, mine.mark, marks)


_WHICH = f"{SPOT}which"


def _restore_marks(state: State, layout: SavedLayout, marks: Mapping[int, LogRecord]) -> list[str]:
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


class _BytesFile:
    """Encoded objects, concatenated, as a file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        slice_ = self._data[offset : offset + buffer.nbytes]
        buffer[: len(slice_)] = slice_
        return len(slice_)

    def close(self) -> None:
        pass


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
        aliases = {k: v for _, _, header, _ in base.shards for k, v in header.aliases.items()}
        header = ShardHeader(first[2].identity, tuple(placed), tuple(digests), aliases, 0)
        record: FileRecord = first[1]
        file = _BytesFile(b"".join(mark.objects.values()))
        path = PurePath(f"mark of rank {rank}")
        return cls(OpenBase(base.marker, [(file, record, header, path)]), data)


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
    return slice_ if live is not None or template is None else dtensor_like(template, entry, slice_)


class _ReshardedSamples:
    """Comparison of this rank's tensors with the samples in marks of other ranks
    (:mod:`everstep.capture.mark_samples`).

    Args:
        source_rank: see :func:`.gradients.source_rank_of`; selects among different tensors of one
            name.
    """

    def __init__(self, layout: SavedLayout, source_rank: int) -> None:
        self._layout = layout
        self._giver = source_rank
        self._entries: dict[int, list[Entry]] = {}

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
                if live is None or not Placement.parse(entry.placement).holds(self._giver):
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
            self._entries[rank] = [e for _, e in sorted(self._layout.entries(rank).items())]
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
    same = mine.view(_as_integers(mine)) == theirs.view(_as_integers(mine))
    if mine.is_floating_point():
        same |= mine.isnan() & theirs.isnan()  # NaN payloads may differ
    return not bool(same.all())


def _as_integers(tensor: torch.Tensor) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
