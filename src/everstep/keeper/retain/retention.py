"""Retention and cleaning: what is no longer needed goes, in an order that any crash survives.

A base is deleted in two steps. First it is condemned: its manifest is renamed, durably. Then,
after one more look at the fence, the mark is renamed once more, and its files go. A process
that resumes opens its timeline first and looks for the mark second, so either it sees the mark,
or the deleter sees the new timeline and lifts the mark again. If it sees the mark and needs the
base, it lifts the mark itself; where both rename, one of them succeeds (``adr/004``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import PurePath

from everstep.commit.lineage import BaseId
from everstep.commit.logs import needed_by
from everstep.config.options import History
from everstep.errors import DamageError, FencedError
from everstep.format.names import (
    AUDIT_RECORD,
    CONDEMNED,
    DELETING,
    LOG_DIR,
    MANIFEST,
    SLOTS_DIR,
    TEMPORARY_SUFFIX,
    parse_marker,
    parse_shard,
    timeline_dir,
)
from everstep.format.writer import ChunkRing
from everstep.keeper.retain.deletion import delete_base, delete_files, delete_segments
from everstep.keeper.retain.history import HistoryWindow, SegmentAges
from everstep.keeper.retain.readback import ReadBack
from everstep.run.fence import Fence
from everstep.run.lift import lift_mark
from everstep.run.scan import (
    BaseFound,
    Inventory,
    KnownTimelines,
    bases_with_a_log,
    scan_run,
)
from everstep.run.segments import KnownSegments
from everstep.seams.clock import Clock
from everstep.seams.files.filesystem import FileSystem
from everstep.tiers.disk import remove_if_there, storage_errors
from everstep.tiers.slots import SlotStore

__all__ = ["Retention"]


class Retention:
    """Retention of one process, for the timeline that it writes.

    Args:
        keep: bases to keep, at least 1.
        history: steps that can be gone back to (:meth:`everstep.config.options.History.parse`).
        slots: where data files of deleted bases are parked.
        clock: by whose monotonic time segments age.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        timeline: int,
        ring: ChunkRing,
        slots: SlotStore,
        *,
        keep: int,
        timeout_s: float,
        history: str = "last",
        clock: Clock,
    ) -> None:
        self._history = History.parse(history)
        self._ages = SegmentAges(filesystem, clock)
        self._segments = KnownSegments()
        self._timelines = KnownTimelines()
        self._filesystem = filesystem
        self._run = run
        self._timeline = timeline
        self._fence = Fence(filesystem, run, timeline)
        self._slots = slots
        self._good = ReadBack(
            filesystem, lambda: contextlib.nullcontext(ring), keep=keep, timeout_s=timeout_s
        )
        self.deleted = 0

    @property
    def verified(self) -> set[BaseId]:
        """Bases that were read and found whole."""
        return self._good.verified

    def run(self, post: Callable[[DamageError], None]) -> None:
        """Runs after a commit: deletes what may go, and cleans up after crashes.

        Args:
            post: told of a base that was committed and is found damaged when read back.

        Raises:
            FencedError, StorageError
        """
        with storage_errors("clean up old bases", self._run):
            inventory = self.look()
            self._retain(inventory, post)
            self._retain_log()
            self.sweep(inventory, in_flight=())

    def look(self) -> Inventory:
        """What there is now."""
        return scan_run(self._filesystem, self._run, self._timelines)

    def sweep(self, inventory: Inventory, *, in_flight: Collection[BaseId]) -> None:
        """Removes what crashes have left: temporary files, bases that are unfinished or half
        deleted, parked files of older timelines. Nothing of a newer timeline is touched, and no
        base of which nothing is gone: that is for the rules to say."""
        self._check_fence()
        if self._history.is_by_age:  # at the start, too: of what was there then files say the age
            self._ages.look(inventory)
        here = {self._timeline, *(n for n in inventory.timelines if n <= self._timeline)}
        self._remove_temporary(self._run)
        for base in inventory.bases:
            if base.id.timeline > self._timeline or base.id in in_flight:
                continue
            unfinished = base.status in ("incomplete", "condemned") and not base.is_usable
            if unfinished and _only_ours(base):
                delete_files(self._filesystem, base, self._slots, check_fence=self._check_fence)
            elif base.status in ("committed", "complete") and _temporary(
                f.name for f in base.files
            ):
                self._remove_temporary(base.path)
        for number in sorted(here | set(inventory.abandoned)):
            directory = timeline_dir(self._run, number)
            if number > self._timeline:
                continue
            if _temporary(inventory.names.get(number, ())):
                self._remove_temporary(directory)
            if number < self._timeline and inventory.may_hold(number, SLOTS_DIR):
                SlotStore(self._filesystem, directory / SLOTS_DIR).clear()

    def _retain(self, inventory: Inventory, post: Callable[[DamageError], None]) -> None:
        bases = {base.id: base for base in inventory.bases if self._counts(base)}
        going = self._good.plan(bases, inventory.branches, post)
        if going and self._history.is_more:
            needed = self._needed(inventory, bases, going)
            going = tuple(base for base in going if base not in needed)
        for base in bases.values():  # condemned by a process that died: it is kept after all
            if base.status == "condemned" and base.id not in going:
                self._check_fence()
                lift_mark(self._filesystem, base.path)
        for victim in going:
            self._delete(bases[victim])
            self._good.forget(victim)
            self.deleted += 1

    def _delete(self, base: BaseFound) -> None:
        own = self._timeline
        fence = self._fence
        try:
            delete_base(
                self._filesystem, self._run, base, self._slots, timeline=own, newest=fence.seen
            )
        except FencedError:
            fence.check()  # says what it is
            raise

    def _needed(
        self, inventory: Inventory, bases: Mapping[BaseId, BaseFound], going: Collection[BaseId]
    ) -> set[BaseId]:
        """Bases that would go, and that a step of the history is replayed from, or will be."""
        lsns = {
            base.id: base.manifest.markers[0].lsn
            for base in bases.values()
            if base.manifest is not None and base.id not in self._good.damaged
        }
        about = self._filesystem, inventory, self._history
        promise = HistoryWindow.of(*about, ages=self._ages, known=self._segments)
        return promise.kept(lsns, [base for base in going if base in lsns])

    def _counts(self, base: BaseFound) -> bool:
        """Whether a base is one to keep, or to delete by the rules: also where another process
        has condemned it, as long as nothing of it is gone."""
        spared = base.status == "condemned" and base.is_usable
        return base.status == "committed" or (spared and base.id.timeline <= self._timeline)

    def _retain_log(self) -> None:
        """Segments that lead nowhere from any base that is left."""
        inventory = self.look()
        left = bases_with_a_log(b for b in inventory.bases if b.is_usable or b.status == "damaged")
        mine = [n for n in inventory.timelines if n <= self._timeline]
        mine = [n for n in mine if inventory.may_hold(n, LOG_DIR)]
        delete_segments(
            self._filesystem,
            self._run,
            mine,
            lambda segment: not needed_by(segment, left),
            self._check_fence,
            own=self._timeline,
        )

    def _check_fence(self) -> None:
        self._fence.check()

    def _remove_temporary(self, directory: PurePath) -> None:
        with contextlib.suppress(FileNotFoundError):
            for entry in self._filesystem.scan(directory):
                if entry.kind == "file" and entry.name.endswith(TEMPORARY_SUFFIX):
                    remove_if_there(self._filesystem, directory / entry.name)


def _temporary(names: Iterable[str]) -> bool:
    return any(name.endswith(TEMPORARY_SUFFIX) for name in names)


def _only_ours(base: BaseFound) -> bool:
    """Whether all names in the directory are such as everstep writes."""

    def ours(name: str) -> bool:
        name = name.removesuffix(TEMPORARY_SUFFIX)
        known = name in (AUDIT_RECORD, MANIFEST, CONDEMNED, DELETING)
        return known or parse_marker(name) is not None or parse_shard(name) is not None

    return all(entry.kind == "file" and ours(entry.name) for entry in base.files)
