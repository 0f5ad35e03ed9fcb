"""Replay of steps that another number of ranks trained, or as many in another layout
(``docs/design/ranks.md``).

Each update is assembled from the slices of the gradients that all old ranks consumed. State that no
optimizer replays is restored from the last marks of all of them.

Each segment of the log is read by one rank of this job. Ranks that see the same disk share out its
segments; all ranks share out those in copies. Records in the memory of a keeper are read by the
rank that it serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from everstep.commit import BaseId
from everstep.commit.log_reach import LogRun, runs_of
from everstep.errors import DamageError, EverstepError, FormatError, ReplayError
from everstep.format import TimelineRecord
from everstep.format.log import NOT_EXACT, LogRecord
from everstep.format.writer import ChunkRing
from everstep.replay import Update
from everstep.restore.fetch import PeerLog
from everstep.restore.fetch.held import unpack_steps
from everstep.restore.load import Restored, SavedLayout
from everstep.restore.log import LogFound, LogReader
from everstep.restore.redo import (
    LiveMemory,
    MarkEntries,
    ReplayDriver,
    Step,
    fingerprint_difference,
    live_tensors,
)
from everstep.restore.redo.live import mark_holds_less
from everstep.restore.reshard.gradients import ReshardedGradients
from everstep.restore.reshard.marks import ReshardedSamples, restore_marks
from everstep.run import Inventory, Skipped
from everstep.seams import FileSystem
from everstep.seams.progress import progress
from everstep.state.ranks import updated_elsewhere
from everstep.state.training_state import State

_log = logging.getLogger("everstep")


@dataclass(frozen=True, slots=True)
class LogsInMemory:
    """Log records in the memory of keepers on this machine.

    Attributes:
        records: by the rank that wrote them.
        held: steps of the logs of ranks on other nodes.
    """

    records: Mapping[int, Sequence[LogRecord]]
    held: Sequence[PeerLog] = ()

    def of(self, source: int, inventory: Inventory) -> list[LogRecord]:
        """Return all records of one rank, of timelines that mean the same on this disk (I7)."""
        known = inventory.timelines
        found = [
            record
            for record in self.records.get(source, ())
            if known.get(record.head.timeline) is not None
        ]
        there = {(record.head.kind, record.head.timeline, record.head.lsn) for record in found}
        for log in self.held:
            timeline = known.get(log.steps.run.timeline)
            # Records are compared, not numbers: two starts may have opened the same timeline
            # number.
            if log.source != source or timeline is None or timeline.encode() != log.record:
                continue
            try:
                records = unpack_steps(log.steps)
            except (DamageError, FormatError) as error:
                _log.warning("steps of the log of rank %d are unusable: %s", source, error)
                continue
            for record in records:
                head = record.head
                if (head.kind, head.timeline, head.lsn) not in there:
                    found.append(record)
        return found


class ReshardedLogs:
    """The logs of the old ranks that this rank reads.

    Args:
        filesystem: file system of the run folder.
        rank, world: rank, and number of ranks, in the job that starts.
        memory: records in the memory of keepers.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        rank: int,
        world: int,
        memory: LogsInMemory,
        ring: ChunkRing,
        *,
        timeout_s: float,
    ) -> None:
        self._filesystem = filesystem
        self._rank = rank
        self._world = world
        self._memory = memory
        self._ring = ring
        self._timeout_s = timeout_s
        # By number of ranks that wrote it, and rank.
        self._logs: dict[tuple[int, int], LogReader] = {}
        self._worlds: dict[int, int] = {}
        self._repaired: list[Skipped] = []

    def look(
        self,
        inventory: Inventory,
        copies: Sequence[tuple[FileSystem, Inventory]],
        bases: Collection[BaseId],
        *,
        near: Sequence[int],
        relaid: bool = False,
    ) -> dict[int, tuple[LogRun, ...]]:
        """Scan the logs; return the runs of steps by the rank that wrote them.

        Args:
            copies: places with copies of the run, nearest first.
            bases: bases that this rank could start from; of copies only records that lead on from
                these count.
            near: ranks that see the same disk, including this one.
            relaid: include logs of as many ranks as this job has.

        Raises:
            OSError: a directory cannot be read.
        """
        # Readers of an earlier scan may still have reads in flight into the buffers of the ring.
        self.close()
        self._logs = {}
        self._worlds = {}
        for known in (inventory, *(there for _, there in copies)):
            for number, record in known.timelines.items():
                if record is not None and (relaid or record.world != self._world):
                    self._worlds.setdefault(number, record.world)
        found: dict[int, list[LogRun]] = {}
        for world in sorted(set(self._worlds.values())):
            numbers = {n for n, each in self._worlds.items() if each == world}
            here = _only(inventory, numbers)
            there = [(files, _only(other, numbers)) for files, other in copies]
            for source in range(world):
                # All ranks compute the same shares, so each log on this disk is read by exactly one
                # of them.
                mine = near[source * len(near) // world] == self._rank
                nearest = source * self._world // world == self._rank
                records = self._memory.of(source, here)
                if not (mine or records or (nearest and there)):
                    continue
                log = LogFound.of(
                    self._filesystem,
                    here if mine else _only(inventory, ()),
                    (),
                    rank=source,
                    lent=records,
                    copies=there if nearest else (),
                    bases=bases,
                )
                runs = runs_of(log.index.marks, log.index.updates)
                if runs or log.skipped:
                    reader = log.reader(self._filesystem, self._ring, self._timeout_s)
                    self._logs[world, source] = reader
                    found.setdefault(source, []).extend(runs)
        return {source: tuple(runs) for source, runs in found.items()}

    @property
    def skipped(self) -> Iterator[Skipped]:
        """Unusable segments, and damaged records that were read from another place."""
        yield from self._repaired
        for log in self._logs.values():
            yield from log.found.skipped

    def has(self, source: int, timeline: int) -> bool:
        """Return True if this rank reads the log of ``source`` on a timeline."""
        return (self._worlds.get(timeline), source) in self._logs

    def records(self, source: int, timeline: int, step: int) -> list[LogRecord]:
        """Return the updates and the mark of a step, verified.

        Raises:
            EverstepError: a record cannot be read, or is damaged in every place.
            LookupError: there are none, or another rank reads them.
        """
        log = self._logs[self._worlds[timeline], source]
        try:
            return log.step_of(timeline, step)
        finally:
            self._repaired += log.take_repaired()

    def close(self) -> None:
        """Cancel outstanding reads. Idempotent."""
        for log in self._logs.values():
            log.close()


def _only(inventory: Inventory, timelines: Collection[int]) -> Inventory:
    """Return the inventory restricted to these timelines."""
    chosen = {n: record for n, record in inventory.timelines.items() if n in timelines}
    return replace(inventory, timelines=chosen)


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
        self._samples = ReshardedSamples(layout, gradients.source_rank)
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
        return restore_marks(self._state, self._layout, self._marks)


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
    with progress("replay", len(steps)) as bar:
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
                # The state is a mixture of steps here. The caller sees that the end was not
                # reached, and the base is loaded again.
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
        # A missing update would give a wrong state without any other sign (I4).
        if numbers != list(range(lsn + 1, self.mark.head.lsn + 1)):
            raise FormatError(
                f"rank {rank}: updates {numbers} of step {at[1]} do not follow update {lsn}"
            )
        # Base and log must be of the same ranks: slices are located by the layout in the base.
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
