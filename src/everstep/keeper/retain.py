"""Retention and cleaning: what is no longer needed goes, in an order that any crash survives.

A base is deleted in two steps. First it is condemned: its manifest is renamed, durably, and
from then on no recovery will choose it. Then, after one more look at the fence, its files
go. A process that resumes opens its timeline first and looks for the condemned mark second,
so either it sees the mark and chooses another base, or the deleter sees the new timeline
and lifts the mark again: never both go ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import PurePath

from everstep.commit.deletion import (
    BaseDeletion,
    BaseGone,
    Condemn,
    Condemned,
    DeletionAction,
    DeletionEvent,
    FilesDeleted,
    Lift,
    Lifted,
)
from everstep.commit.lineage import BaseId
from everstep.commit.machine import CheckFence, FenceSeen
from everstep.commit.retention import plan_retention
from everstep.errors import DamageError, FencedError, StorageError
from everstep.format.names import (
    AUDIT_RECORD,
    CONDEMNED,
    MANIFEST,
    SLOTS_DIR,
    TEMPORARY_SUFFIX,
    parse_marker,
    parse_shard,
    timeline_dir,
)
from everstep.format.writer import ChunkRing
from everstep.keeper.retain_log import delete_segments, needed_by
from everstep.recover.scan import BaseFound, Inventory, newest_timeline, scan_run
from everstep.recover.verify import Verdict, verify_base
from everstep.seams.failpoints import failpoint
from everstep.seams.filesystem import FileSystem
from everstep.seams.progress import silent
from everstep.tiers.disk import remove_if_there, storage_errors
from everstep.tiers.slots import SlotStore

__all__ = ["Retention", "delete_base", "delete_files", "perform_deletion"]

_MAY_BE_NEEDED = ("committed", "complete", "damaged")


class Retention:
    """Retention of one process, for the timeline that it writes.

    Args:
        keep: bases to keep, at least 1.
        history: ``"last"``: segments of the log that no base needs go; ``"all"``: none does.
        slots: where data files of deleted bases are parked.
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
    ) -> None:
        self._history = history
        self._filesystem = filesystem
        self._run = run
        self._timeline = timeline
        self._ring = ring
        self._slots = slots
        self._keep = keep
        self._timeout_s = timeout_s
        self.verified: set[BaseId] = set()
        self.damaged: set[BaseId] = set()
        self.deleted = 0

    def run(self, post: Callable[[DamageError], None]) -> None:
        """Runs after a commit: deletes what may go, and cleans up after crashes.

        Args:
            post: told of a base that was committed and is found damaged when read back.

        Raises:
            FencedError, StorageError
        """
        with storage_errors("clean up old bases", self._run):
            inventory = scan_run(self._filesystem, self._run)
            self._retain(inventory, post)
            self._retain_log()
            self.sweep(inventory, in_flight=())

    def sweep(self, inventory: Inventory, *, in_flight: Collection[BaseId]) -> None:
        """Removes what crashes have left: temporary files, unfinished and condemned bases,
        parked files of older timelines. Nothing of a newer timeline is touched."""
        self._check_fence()
        here = {self._timeline, *(n for n in inventory.timelines if n <= self._timeline)}
        self._remove_temporary(self._run)
        for base in inventory.bases:
            if base.id.timeline > self._timeline or base.id in in_flight:
                continue
            if base.status in ("incomplete", "condemned") and _only_ours(base):
                delete_files(self._filesystem, base, self._slots)
            elif base.status in ("committed", "complete"):
                self._remove_temporary(base.path)
        for number in sorted(here | set(inventory.abandoned)):
            directory = timeline_dir(self._run, number)
            if number > self._timeline:
                continue
            self._remove_temporary(directory)
            if number < self._timeline:
                SlotStore(self._filesystem, directory / SLOTS_DIR).clear()

    def _retain(self, inventory: Inventory, post: Callable[[DamageError], None]) -> None:
        bases = {base.id: base for base in inventory.bases if base.status == "committed"}
        while True:
            plan = plan_retention(
                bases,
                inventory.branches,
                keep=self._keep,
                verified=self.verified,
                damaged=self.damaged,
            )
            if plan.verify is None:
                break
            verdict = self._read_back(bases[plan.verify])
            if verdict.damages:
                first = verdict.damages[0]
                if any(damage.unreadable for damage in verdict.damages):
                    raise StorageError(  # no reason to call it damaged: nothing is deleted now
                        f"{plan.verify} could not be read back: {first.problem}",
                        step=plan.verify.step,
                        tier="disk",
                        path=first.path,
                        hint="look at the disk or the network file system (dmesg, df, mount)",
                    )
                self.damaged.add(plan.verify)
                post(
                    DamageError(
                        f"{plan.verify} was committed, but read back it is damaged: "
                        f"{first.problem}; older bases are kept",
                        entry=first.entry,
                        step=plan.verify.step,
                        path=first.path,
                        hint="the disk or memory of this machine may be failing",
                    )
                )
            else:
                self.verified.add(plan.verify)
        for victim in plan.delete:
            delete_base(
                self._filesystem, self._run, bases[victim], self._slots, timeline=self._timeline
            )
            self.verified.discard(victim)
            self.damaged.discard(victim)
            self.deleted += 1

    def _retain_log(self) -> None:
        """Segments that lead nowhere from any base that is left."""
        if self._history == "all":
            return
        inventory = scan_run(self._filesystem, self._run)
        left = [base.id for base in inventory.bases if base.status in _MAY_BE_NEEDED]
        mine = [number for number in inventory.timelines if number <= self._timeline]
        delete_segments(
            self._filesystem,
            self._run,
            mine,
            lambda segment: not needed_by(segment, left),
            self._check_fence,
            own=self._timeline,
        )

    def _read_back(self, base: BaseFound) -> Verdict:
        return verify_base(
            self._filesystem, base, self._ring, timeout_s=self._timeout_s, progress=silent
        )

    def _check_fence(self) -> None:
        newest = newest_timeline(self._filesystem, self._run)
        if newest > self._timeline:
            raise _fenced(self._timeline, newest)

    def _remove_temporary(self, directory: PurePath) -> None:
        with contextlib.suppress(FileNotFoundError):
            for entry in self._filesystem.scan(directory):
                if entry.kind == "file" and entry.name.endswith(TEMPORARY_SUFFIX):
                    remove_if_there(self._filesystem, directory / entry.name)


def delete_base(
    filesystem: FileSystem,
    run: PurePath,
    base: BaseFound,
    slots: SlotStore | None,
    *,
    timeline: int | None,
) -> None:
    """Deletes a committed base: condemns it, looks at the fence once more, removes its files.

    Args:
        slots: parks the data files instead of deleting them, if given.
        timeline: of the process that deletes; None for a person at the command line, whom no
            timeline fences off.

    Raises:
        FencedError: a newer timeline has begun; the base is whole and there as before, or the
            process of that timeline, which saw the mark, has deleted it itself.
    """

    deletion = BaseDeletion(base.id, timeline)
    action: DeletionAction | None = deletion.start()
    while action is not None:
        action = deletion.on(perform_deletion(filesystem, run, base.path, action, slots))


def perform_deletion(
    filesystem: FileSystem,
    run: PurePath,
    path: PurePath,
    action: DeletionAction,
    slots: SlotStore | None,
) -> DeletionEvent:
    """Does what the deletion of the base at ``path`` asks for."""
    if isinstance(action, CheckFence):
        return FenceSeen(newest_timeline(filesystem, run))
    try:
        if isinstance(action, Condemn):
            filesystem.rename(path / MANIFEST, path / CONDEMNED)
            filesystem.sync_dir(path)
            failpoint("retain.after_condemn")
            return Condemned()
        if isinstance(action, Lift):
            filesystem.rename(path / CONDEMNED, path / MANIFEST)
            filesystem.sync_dir(path)
            return Lifted()
        _delete_files(filesystem, path, slots)
        return FilesDeleted()
    except FileNotFoundError:  # somebody else was deleting it, too
        return BaseGone(newest_timeline(filesystem, run))


def delete_files(filesystem: FileSystem, base: BaseFound, slots: SlotStore | None) -> None:
    """Removes the files of a base that is condemned or was never finished.

    Markers first: with them gone nothing can be made of the files that are left.
    """
    _delete_files(filesystem, base.path, slots)


def _delete_files(filesystem: FileSystem, base: PurePath, slots: SlotStore | None) -> None:
    entries = sorted(filesystem.scan(base), key=lambda entry: entry.name)
    filesystem.sync_dir(base)  # the mark of whoever condemned it, if that was not durable
    for entry in entries:
        if parse_marker(entry.name) is not None:
            remove_if_there(filesystem, base / entry.name)
    filesystem.sync_dir(base)
    for entry in entries:
        path = base / entry.name
        if parse_shard(entry.name) is not None and entry.kind == "file":
            failpoint("retain.before_unlink")
            if slots is not None:
                slots.park(path, entry.size_bytes)
            else:
                remove_if_there(filesystem, path)
        elif entry.name.endswith(TEMPORARY_SUFFIX) and entry.kind == "file":
            remove_if_there(filesystem, path)
    filesystem.sync_dir(base)
    # Last: until then the directory says what it was.
    for name in (AUDIT_RECORD, MANIFEST, CONDEMNED):
        remove_if_there(filesystem, base / name)
    with contextlib.suppress(OSError):  # somebody put a file of their own there: it stays
        filesystem.remove_dir(base)
    filesystem.sync_dir(base.parent)


def _only_ours(base: BaseFound) -> bool:
    """Whether all names in the directory are such as everstep writes."""

    def ours(name: str) -> bool:
        name = name.removesuffix(TEMPORARY_SUFFIX)
        known = name in (AUDIT_RECORD, MANIFEST, CONDEMNED) or parse_marker(name) is not None
        return known or parse_shard(name) is not None

    return all(entry.kind == "file" and ours(entry.name) for entry in base.files)


def _fenced(timeline: int, newest: int) -> FencedError:
    return FencedError(
        f"this process writes timeline {timeline}, but timeline {newest} has taken the run over: "
        "it may not delete anything",
        hint="another process resumed this run; end this one, or use another folder",
    )
