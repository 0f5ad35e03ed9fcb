"""Retention and cleanup: delete bases and segments in an order that survives any crash.

A base is deleted in two steps. First it is condemned: its manifest is renamed, durably. Then,
after another check of the fence, the condemned mark is renamed once more, and the files are
deleted. A process that resumes opens its timeline first and looks for the mark second. So either it
sees the mark, or the deleting process sees the new timeline and lifts the mark. A resuming process
that sees the mark and needs the base lifts the mark itself; if both rename, one of them succeeds
(``adr/004``).

Read bases back before retention deletes older ones (``adr/005``).

Works on a *place*: the run folder, or a tier with copies of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.commit.lineage import Branch
from everstep.commit.log_reach import needed_by
from everstep.commit.retention import plan_retention
from everstep.config import History
from everstep.errors import DamageError, FencedError, StorageError
from everstep.format import MANIFEST, timeline_dir
from everstep.format.names import (
    AUDIT_RECORD,
    CONDEMNED,
    DELETING,
    LOG_DIR,
    SLOTS_DIR,
    TEMPORARY_SUFFIX,
    parse_marker,
    parse_shard,
)
from everstep.format.writer import ChunkRing
from everstep.keeper.retain.deletion import delete_base, delete_files, delete_segments
from everstep.keeper.retain.history import HistoryWindow, SegmentAges
from everstep.run import BaseFound, Inventory, TimelineCache, scan_run
from everstep.run.fence import Fence
from everstep.run.scan import bases_keeping_log
from everstep.run.segments import SegmentCache
from everstep.run.uncondemn import uncondemn
from everstep.run.verify import verify_base
from everstep.seams import Clock, FileSystem
from everstep.seams.progress import silent
from everstep.tiers import SlotStore, remove_if_there, storage_errors


class ReadBack:
    """Plans retention in one place, and reads back the base that a plan relies on.

    Args:
        filesystem: the place.
        ring: lends the chunks to read into.
        keep: number of bases to keep.
        timeout_s: seconds without progress after which a single transfer counts as hung.
        tier: kind of the place, for errors.
        url: URL of a tier that holds copies; empty for the run folder.

    Attributes:
        verified: bases that were read back and found intact.
        damaged: bases that were read back and found damaged.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        ring: Callable[[], AbstractContextManager[ChunkRing]],
        *,
        keep: int,
        timeout_s: float,
        tier: str = "disk",
        url: str = "",
    ) -> None:
        self._filesystem = filesystem
        self._ring = ring
        self._keep = keep
        self._timeout_s = timeout_s
        self._tier = tier
        self._url = url
        self.verified: set[BaseId] = set()
        self.damaged: set[BaseId] = set()

    def plan(
        self,
        bases: Mapping[BaseId, BaseFound],
        branches: Mapping[int, Branch],
        post: Callable[[DamageError], None],
    ) -> tuple[BaseId, ...]:
        """Return the bases that may be deleted, oldest first.

        One of those that stay was read back and found intact.

        Args:
            post: receives an error for each base that is found damaged.

        Raises:
            StorageError: a base could not be read back: nothing may be deleted.
        """
        while True:
            plan = plan_retention(
                bases,
                branches,
                keep=self._keep,
                verified=self.verified,
                damaged=self.damaged,
            )
            # The result of a read-back changes the plan: repeat until it relies on verified bases
            # only.
            if plan.verify is None:
                return plan.delete
            self._read_back(bases[plan.verify], post)

    def forget(self, base: BaseId) -> None:
        """Forget a base that was deleted."""
        self.verified.discard(base)
        self.damaged.discard(base)

    def _read_back(self, base: BaseFound, post: Callable[[DamageError], None]) -> None:
        with self._ring() as ring:
            verdict = verify_base(
                self._filesystem, base, ring, timeout_s=self._timeout_s, progress=silent
            )
        if not verdict.damages:
            self.verified.add(base.id)
            return
        first = verdict.damages[0]
        where = f"{self._url}{first.path}"
        name = f"the copy of {base.id}" if self._url else str(base.id)
        # Checked before damage: one unreadable file makes the verdict on the whole base uncertain.
        if any(damage.unreadable for damage in verdict.damages):
            # Unreadable is not damaged: the storage may recover. Delete nothing meanwhile.
            raise StorageError(
                f"{name} could not be read back: {first.problem}",
                step=base.id.step,
                tier=self._tier,
                path=where,
                hint="check the store; nothing is deleted there meanwhile"
                if self._url
                else "check the disk or the network file system (dmesg, df, mount)",
            )
        # Remembered: a damaged base never counts as one of those to keep, and is reported once.
        self.damaged.add(base.id)
        found = "is damaged" if self._url else "was committed, but is damaged when read back"
        post(
            DamageError(
                f"{name} {found}: {first.problem}; older {'copies' if self._url else 'bases'} "
                "are kept",
                entry=first.entry,
                step=base.id.step,
                tier=self._tier,
                path=where,
                hint="the store or the connection to it may corrupt data"
                if self._url
                else "the disk or memory of this machine may be failing",
            )
        )


class Retention:
    """Retention of one process, for the timeline that it writes.

    Args:
        fence: fence of the process; names the run folder and the timeline.
        ring: chunks to read bases back into.
        slots: parks data files of deleted bases.
        keep: number of bases to keep, at least 1.
        timeout_s: seconds without progress after which a single transfer counts as hung.
        history: steps that resume can go back to (:meth:`everstep.config.options.History.parse`).
        clock: its monotonic time measures the age of segments.
    """

    def __init__(
        self,
        fence: Fence,
        ring: ChunkRing,
        slots: SlotStore,
        *,
        keep: int,
        timeout_s: float,
        history: str = "last",
        clock: Clock,
    ) -> None:
        filesystem = fence.filesystem
        self._history = History.parse(history)
        self._ages = SegmentAges(filesystem, clock)
        self._segments = SegmentCache()
        self._timelines = TimelineCache()
        self._filesystem = filesystem
        self._run = fence.run
        self._timeline = fence.timeline
        self._fence = fence
        self._slots = slots
        self._good = ReadBack(
            filesystem, lambda: contextlib.nullcontext(ring), keep=keep, timeout_s=timeout_s
        )

    @property
    def verified(self) -> set[BaseId]:
        """Bases that were read back and found intact."""
        return self._good.verified

    def run(self, post: Callable[[DamageError], None]) -> None:
        """Delete unneeded bases and segments after a commit, and clean up after crashes.

        Args:
            post: receives an error for each committed base that is damaged when read back.

        Raises:
            FencedError: a newer timeline has begun.
            StorageError: the file system failed.
        """
        with storage_errors("clean up old bases", self._run):
            inventory = self.scan()
            # Bases before segments: a segment is needed as long as a base that it leads from.
            self._retain(inventory, post)
            self._retain_log()
            self.sweep(inventory)

    def scan(self) -> Inventory:
        """Return the current contents of the run folder."""
        return scan_run(self._filesystem, self._run, self._timelines)

    def sweep(self, inventory: Inventory) -> None:
        """Remove leftovers of crashes: temporary files, unfinished or half-deleted bases, parked
        files.

        Files of a newer timeline stay, and so does every base that is complete: the rules of
        retention decide on those.

        Args:
            inventory: contents of the run folder; no base is being written.

        Raises:
            FencedError: a newer timeline has begun.
        """
        # A superseded process must delete nothing: its view of complete bases is out of date.
        self._fence.check()
        # At the start, too: the ages of segments that exist now come from the times of their files.
        if self._history.is_by_age:
            self._ages.observe(inventory)
        self._remove_temporary(self._run)
        self._sweep_bases(inventory)
        self._sweep_timelines(inventory)

    def _sweep_bases(self, inventory: Inventory) -> None:
        """Delete unfinished bases, and temporary files next to finished ones."""
        for base in inventory.bases:
            # Its process may be writing this base now.
            if base.id.timeline > self._timeline:
                continue
            unfinished = base.status in ("incomplete", "condemned") and not base.is_usable
            # A directory with files of the user stays, even if nothing in it can be loaded.
            if unfinished and _only_ours(base):
                delete_files(self._filesystem, base, self._slots, check_fence=self._fence.check)
            elif base.status in ("committed", "complete") and _temporary(
                f.name for f in base.files
            ):
                self._remove_temporary(base.path)

    def _sweep_timelines(self, inventory: Inventory) -> None:
        """Remove temporary files of all timelines, and parked files of older ones."""
        here = {self._timeline, *(n for n in inventory.timelines if n <= self._timeline)}
        for number in sorted(here | set(inventory.abandoned)):
            directory = timeline_dir(self._run, number)
            if number > self._timeline:
                continue
            if _temporary(inventory.names.get(number, ())):
                self._remove_temporary(directory)
            # Only the process of a timeline recycles its parked files, and the older ones have
            # ended.
            if number < self._timeline and inventory.may_hold(number, SLOTS_DIR):
                SlotStore(self._filesystem, directory / SLOTS_DIR).clear()

    def _retain(self, inventory: Inventory, post: Callable[[DamageError], None]) -> None:
        """Delete the bases that retention does not keep."""
        bases = {base.id: base for base in inventory.bases if self._counts(base)}
        victims = self._good.plan(bases, inventory.branches, post)
        if victims and self._history.is_more:
            needed = self._needed(inventory, bases, victims)
            victims = tuple(base for base in victims if base not in needed)
        # A process that died may have condemned a base that the rules keep: lift its mark.
        for base in bases.values():
            if base.status == "condemned" and base.id not in victims:
                self._fence.check()
                uncondemn(self._filesystem, base.path)
        for victim in victims:
            # Oldest first: after a crash in between, the newest bases are still complete.
            self._delete(bases[victim])
            self._good.forget(victim)

    def _delete(self, base: BaseFound) -> None:
        own = self._timeline
        fence = self._fence
        try:
            # Reads the fence again between the two steps of the deletion.
            delete_base(
                self._filesystem,
                self._run,
                base,
                self._slots,
                timeline=own,
                newest=fence.newest_or_next,
            )
        except FencedError:
            # Raises with the details that the deletion does not have, if the fence is still closed.
            fence.check()
            raise

    def _needed(
        self, inventory: Inventory, bases: Mapping[BaseId, BaseFound], victims: Collection[BaseId]
    ) -> set[BaseId]:
        """Return the victims that steps of the history need as the start of their replay."""
        lsns = {
            base.id: base.manifest.markers[0].lsn
            for base in bases.values()
            if base.manifest is not None and base.id not in self._good.damaged
        }
        window = HistoryWindow.of(
            self._filesystem, inventory, self._history, ages=self._ages, known=self._segments
        )
        return window.kept(lsns, [base for base in victims if base in lsns])

    def _counts(self, base: BaseFound) -> bool:
        """Return True if the rules of retention apply to a base.

        They also apply to a base that another process has condemned, as long as all its files
        exist.
        """
        spared = base.status == "condemned" and base.is_usable
        return base.status == "committed" or (spared and base.id.timeline <= self._timeline)

    def _retain_log(self) -> None:
        """Delete segments that can be replayed on none of the bases that are left."""
        inventory = self.scan()
        # A damaged base counts: another copy of it may be intact, and then needs the log.
        left = bases_keeping_log(b for b in inventory.bases if b.is_usable or b.status == "damaged")
        # Segments of a newer timeline belong to the process that has superseded this one.
        mine = [n for n in inventory.timelines if n <= self._timeline]
        mine = [n for n in mine if inventory.may_hold(n, LOG_DIR)]
        delete_segments(
            self._filesystem,
            self._run,
            mine,
            lambda segment: not needed_by(segment, left),
            self._fence.check,
            own=self._timeline,
        )

    def _remove_temporary(self, directory: PurePath) -> None:
        # The directory may be deleted at the same time, by another rank or by the user.
        with contextlib.suppress(FileNotFoundError):
            for entry in self._filesystem.scan(directory):
                if entry.kind == "file" and entry.name.endswith(TEMPORARY_SUFFIX):
                    remove_if_there(self._filesystem, directory / entry.name)


def _temporary(names: Iterable[str]) -> bool:
    return any(name.endswith(TEMPORARY_SUFFIX) for name in names)


def _only_ours(base: BaseFound) -> bool:
    """Return True if everstep writes files of all the names in the directory."""

    def ours(name: str) -> bool:
        name = name.removesuffix(TEMPORARY_SUFFIX)
        known = name in (AUDIT_RECORD, MANIFEST, CONDEMNED, DELETING)
        return known or parse_marker(name) is not None or parse_shard(name) is not None

    return all(entry.kind == "file" and ours(entry.name) for entry in base.files)
