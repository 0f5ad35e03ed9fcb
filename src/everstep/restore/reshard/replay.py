"""Replay of steps that another number of ranks trained, or as many in another layout
(``docs/design/ranks.md``).

Each update is assembled from the slices of the gradients that all old ranks consumed. State that no
optimizer replays is restored from the last marks of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, EverstepError, FormatError, ReplayError
from everstep.format.log import NOT_EXACT, LogRecord
from everstep.format.records import TimelineRecord
from everstep.replay.updates import Update
from everstep.restore.load.restored import Restored
from everstep.restore.load.saved_ranks import SavedLayout
from everstep.restore.redo.conditions import fingerprint_difference
from everstep.restore.redo.marks import mark_holds_less
from everstep.restore.redo.redo import Redo, Step, divergence_error
from everstep.restore.reshard.gradients import ReshardedGradients
from everstep.restore.reshard.marks import ReshardedSamples, live_tensors, restore_marks
from everstep.run.candidates import Skipped
from everstep.seams.progress import progress
from everstep.state.ranks.log_shares import updated_elsewhere
from everstep.state.training_state import State

__all__ = ["Fetch", "replay_resharded"]

Fetch = Callable[[Sequence[int], int, int], Mapping[int, Sequence[LogRecord]]]
"""Returns the updates and the mark of a step (timeline, step) of the logs of some ranks, verified.

Raises:
    DamageError: one of them cannot be used.
"""


class _ReshardedRedo(Redo):
    """Replay of updates of another set of ranks.

    Attributes:
        marks: marks of the step applied last, by rank.
    """

    def __init__(
        self, state: State, layout: SavedLayout, source_rank: int, relaid: Collection[str]
    ) -> None:
        super().__init__(state, relaid)
        self._layout = layout
        self._samples = ReshardedSamples(layout, source_rank)
        self.marks: Mapping[int, LogRecord] = {}
        self._taken_bytes = 0
        self._doubtful_checked = False

    def take(self, step: Step, marks: Mapping[int, LogRecord]) -> None:
        """Replay a step, with the marks of all ranks whose logs are needed.

        Raises:
            FormatError, ReplayError, AuditError: as of :meth:`step`.
        """
        size_bytes = sum(_gradient_bytes(update) for _, update in step.updates)
        # Gradients of waiting updates stay in memory: apply them before the limit is exceeded.
        if self._taken_bytes + size_bytes > self.limit_bytes:
            self.idle()
            self._taken_bytes = 0
        self._taken_bytes += size_bytes
        self.marks = marks
        self.step(step)
        if not self._pending:
            self._taken_bytes = 0

    def put_back(self, marks: Mapping[int, LogRecord]) -> list[str]:
        """Restore the contents of the last marks of all ranks; return notes.

        Raises:
            MismatchError, FormatError: they do not fit the state.
            AuditError, ReplayError: as of :meth:`step`.
        """
        self.idle()
        notes = restore_marks(self._state, self._layout, marks)
        return list(dict.fromkeys((*self._notes, *notes)))

    def restore_if_changed(
        self, marks: Mapping[int, LogRecord], step: Step, new_marks: Mapping[int, LogRecord]
    ) -> None:
        """Restore the marks of the previous step if another program, or another optimizer class,
        continues.

        Does nothing unless the marks of all ranks of both steps are given.

        Args:
            marks: marks of the previous step.
            step, new_marks: the next step, and its marks.

        Raises:
            MismatchError, FormatError, AuditError, ReplayError: as of :meth:`restore_from_mark`.
        """
        # Marks of single ranks are incomplete; only those of all ranks can be restored.
        if not len(marks) == len(new_marks) == self._layout.world:
            return
        less = (mark_holds_less(new_marks[rank], than=mark) for rank, mark in marks.items())
        if self._changes_class(step) or any(less):
            self._notes = self.put_back(marks)
            self._begin_anew()
            self._doubtful_checked = False

    def _turn_over(self, mark: LogRecord, changes: bool) -> None:
        if changes:  # the mark of one rank is incomplete
            raise ReplayError(
                f"{mark.head}: an optimizer has another class than at the previous step"
            )

    def _find_doubtful(self, mark: LogRecord) -> list[str]:
        if not self._doubtful_checked:
            for one in self.marks.values():
                self._doubtful = None
                found = super()._find_doubtful(one)
                there = {p.entry.name for p in one.layout.placed if p.end > p.begin}
                if names := [name for name in found if name in there]:
                    why = "it is updated by an optimizer and by something else"
                    raise ReplayError(f"{names[0]!r} cannot be replayed in another layout: {why}")
            self._doubtful_checked = True
        return []

    def _compare(self) -> None:
        mark = self._last
        done = self._compared
        if mark is not None and mark is not done and self.compares and self.exactness.exact:
            elsewhere = updated_elsewhere(self._state)
            live = live_tensors(self._state)
            mine = {name: tensor for name, tensor in live.items() if name not in elsewhere}
            name = self._samples.first_difference(self.marks, mine)
            if name is not None:
                raise divergence_error(name, mark.head.step)
        self._compared = mark


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
    redo = _ReshardedRedo(state, layout, gradients.source_rank, loaded.restrided)
    if not together:
        redo.limit_bytes = 0
    conditions = fingerprint_difference(timelines.get(timeline) for timeline, _ in steps)
    redo.compares = not conditions and not gradients.inexact
    needed = tuple(sorted(gradients.needed))
    outside = [rank for rank in range(layout.world) if rank not in gradients.needed]
    # At a change of timeline another program continues: all marks on both sides are needed.
    turns = {at for two in pairwise(steps) if two[0][0] != two[1][0] for at in two}
    marks: dict[int, LogRecord] = {}
    with progress("replay", len(steps), "items") as bar:
        for at in steps:
            alive()
            before = marks
            marks = {}
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
            redo.restore_if_changed(before, step, marks)
            redo.take(step, {rank: marks[rank] for rank in needed})
            restored.replayed += 1
            restored.end = BaseId(*at)
            restored.lsn = step.mark.head.lsn
            if not all(mark.head.exact for mark in marks.values()):
                restored.inexact = NOT_EXACT
            bar.advance(1)
            del found, logs, step  # free their memory before the next step arrives
    try:
        notes = redo.put_back(marks)
    except EverstepError:
        restored.replayed -= 1  # the last marks do not fit
        raise
    own = "" if redo.exactness.exact else redo.exactness.why
    restored.inexact = restored.inexact or conditions or gradients.inexact or own
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
    return Step(tuple(updates), mine.mark)


def _gradient_bytes(update: Update | None) -> int:
    found = () if update is None else update.gradients.values()
    return sum(one.numel() * one.dtype.itemsize for one in found)
