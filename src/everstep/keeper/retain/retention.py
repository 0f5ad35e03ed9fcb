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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.commit.base_commit import (
    AlreadyDeleted,
    BaseDeletion,
    CheckFence,
    Condemn,
    Condemned,
    DeletionAction,
    DeletionEvent,
    FenceSeen,
    FilesDeleted,
    Lift,
    Lifted,
)
from everstep.commit.lineage import Branch
from everstep.commit.log_reach import needed_by
from everstep.commit.retention import KeepRules, plan_retention
from everstep.errors import DamageError, FencedError, StorageError
from everstep.format import MANIFEST, timeline_dir
from everstep.format.names import (
    CONDEMNED,
    DELETING,
    LOG_DIR,
    PIN_RECORD,
    RECORDS_OF_BASE,
    SLOTS_DIR,
    TEMPORARY_SUFFIX,
    parse_marker,
    parse_rank,
    parse_segment,
    parse_shard,
)
from everstep.format.writer import ChunkRing
from everstep.keeper.retain.history import HistoryWindows
from everstep.run import BaseFound, Inventory, TimelineCache, newest_timeline, scan_run
from everstep.run.fence import Fence
from everstep.run.scan import bases_keeping_log
from everstep.run.uncondemn import uncondemn
from everstep.run.verify import verify_base
from everstep.seams import Clock, FileSystem, failpoint
from everstep.seams.progress import silent
from everstep.tiers import SlotStore, remove_if_there, storage_errors


def delete_base(
    filesystem: FileSystem,
    run: PurePath,
    base: BaseFound,
    slots: SlotStore | None,
    *,
    timeline: int | None,
    newest: Callable[[], int] | None = None,
) -> None:
    """Delete a committed base: condemn it, check the fence again, delete its files.

    Args:
        slots: parks the data files instead of deleting them; None deletes them.
        timeline: timeline of the deleting process; None for a person at the command line, whom no
            timeline fences off.
        newest: returns the number of the newest timeline; None reads it from the folder.

    Raises:
        FencedError: a newer timeline has begun. The base is unchanged, or the process of that
            timeline saw the mark and has deleted it.
    """
    look = newest or (lambda: newest_timeline(filesystem, run))
    deletion = BaseDeletion(base.id, timeline)
    action: DeletionAction | None = deletion.start()
    while action is not None:
        action = deletion.on(perform_deletion(filesystem, base.path, action, slots, look))


def perform_deletion(
    filesystem: FileSystem,
    path: PurePath,
    action: DeletionAction,
    slots: SlotStore | None,
    newest: Callable[[], int],
) -> DeletionEvent:
    """Carry out one action of the deletion of the base at ``path``.

    Args:
        newest: returns the number of the newest timeline.
    """
    if isinstance(action, CheckFence):
        return FenceSeen(newest())
    try:
        if isinstance(action, Condemn):
            _condemn(filesystem, path)
            failpoint("retain.after_condemn")
            return Condemned()
        if isinstance(action, Lift):
            lifted = uncondemn(filesystem, path)
            return Lifted() if lifted else AlreadyDeleted(newest())
        # A pin that came after the plan: whoever pins a base looks for the mark after it.
        if any(entry.name == PIN_RECORD for entry in filesystem.scan(path)):
            uncondemn(filesystem, path)
            return AlreadyDeleted(newest())
        # Fails if a resuming process has lifted the mark first: of two renames one succeeds.
        filesystem.rename(path / CONDEMNED, path / DELETING)
        _delete_files(filesystem, path, slots)
        return FilesDeleted()
    except FileNotFoundError:
        # Another process deletes the base, too, or has lifted the mark.
        return AlreadyDeleted(newest())


def _condemn(filesystem: FileSystem, path: PurePath) -> None:
    """Replace the manifest of a base with the condemned mark, durably."""
    try:
        filesystem.rename(path / MANIFEST, path / CONDEMNED)
    except FileNotFoundError:
        # A process that died may have condemned the base: continue its deletion.
        if all(entry.name != CONDEMNED for entry in filesystem.scan(path)):
            raise
    # Durable before the next look at the fence: a process that opens its timeline after that look
    # must find the mark, even after a crash of the machine.
    filesystem.sync_dir(path)


def delete_files(
    filesystem: FileSystem,
    base: BaseFound,
    slots: SlotStore | None,
    *,
    check_fence: Callable[[], None] = lambda: None,
) -> None:
    """Delete the files of a base that is unfinished or half-deleted, unless it has been completed
    since.

    Markers go first: without them the remaining files cannot become a base again.

    Args:
        check_fence: called again before data is deleted. While a folder is being put back to an
            older state, a scan may have seen only half of a base.

    Raises:
        FencedError: raised by ``check_fence``; no data was deleted.
    """
    if base.status == "condemned":
        # The mark may have this name already, or may have been lifted; the scan below tells.
        with contextlib.suppress(FileNotFoundError):
            filesystem.rename(base.path / CONDEMNED, base.path / DELETING)
        if all(entry.name != DELETING for entry in filesystem.scan(base.path)):
            return
    _delete_files(filesystem, base.path, slots, check_fence)


def _delete_files(
    filesystem: FileSystem,
    base: PurePath,
    slots: SlotStore | None,
    check_fence: Callable[[], None] = lambda: None,
) -> None:
    """Delete the files of a base in an order that is safe against crashes."""
    entries = sorted(filesystem.scan(base), key=lambda entry: entry.name)
    # The mark must be durable before the first file is deleted: after a crash it is the only sign
    # that the base is incomplete on purpose.
    filesystem.sync_dir(base)
    for entry in entries:
        if parse_marker(entry.name) is not None:
            remove_if_there(filesystem, base / entry.name)
    # Markers before data: a marker without its files would count as a complete share.
    filesystem.sync_dir(base)
    check_fence()
    # The folder was put back meanwhile, and the base is complete: it needs no markers then.
    if any(entry.name == MANIFEST for entry in filesystem.scan(base)):
        return
    for entry in entries:
        path = base / entry.name
        if parse_shard(entry.name) is not None and entry.kind == "file":
            failpoint("retain.before_unlink")
            # Never recycle a file with two names: another base links to the same bytes.
            if slots is not None and entry.links == 1:
                slots.park(path, entry.size_bytes)
            else:
                remove_if_there(filesystem, path)
        elif entry.name.endswith(TEMPORARY_SUFFIX) and entry.kind == "file":
            remove_if_there(filesystem, path)
    filesystem.sync_dir(base)
    # The mark goes last, after the removal of the data is durable: a crash before that point
    # leaves a directory that the next sweep recognizes as half-deleted.
    for name in RECORDS_OF_BASE:
        remove_if_there(filesystem, base / name)
    # A directory with files of the user stays.
    with contextlib.suppress(OSError):
        filesystem.remove_dir(base)
    filesystem.sync_dir(base.parent)


def retain_log(
    filesystem: FileSystem,
    inventory: Inventory,
    bases: Collection[BaseId],
    check_fence: Callable[[], None],
    *,
    own: int,
    rank: int | None = None,
    leads: bool = False,
) -> None:
    """Delete the log segments that can be replayed on none of the bases that are left.

    Args:
        bases: bases whose log stays (:func:`~everstep.run.scan.bases_keeping_log`).
        check_fence: raises if a newer timeline has begun.
        own: timeline of this process. Segments of a newer one belong to the process that has
            superseded this one.
        rank: deletes only the files of this rank; None deletes those of all ranks.
        leads: this rank also cleans up for earlier ranks: nobody writes to older timelines any
            more.

    Raises:
        FencedError: a newer timeline has begun.
    """
    for number in sorted(n for n in inventory.timelines if n <= own):
        if inventory.may_hold(number, LOG_DIR):
            delete_segments(
                filesystem,
                inventory.path,
                number,
                lambda segment: not needed_by(segment, bases),
                check_fence,
                own=own,
                rank=None if leads and number < own else rank,
            )


def delete_segments(
    filesystem: FileSystem,
    run: PurePath,
    timeline: int,
    unneeded: Callable[[tuple[int, int, int]], bool],
    check_fence: Callable[[], None],
    *,
    own: int,
    rank: int | None = None,
) -> int:
    """Delete log segments of a timeline, each with its marker first: nobody reads a segment
    without one.

    Args:
        unneeded: returns True for a segment ``(timeline, first, last)`` to delete.
        check_fence: raises if a newer timeline has begun.
        own: timeline of this process. A segment of it without a marker may be being written, unless
            a later one has a marker: segments are written one after the other.
        rank: deletes only the files of this rank; None deletes those of all ranks.

    Returns:
        The number of segments deleted.

    Raises:
        FencedError: a newer timeline has begun; no further segment is deleted.
    """
    directory = timeline_dir(run, timeline) / LOG_DIR
    try:
        entries = filesystem.scan(directory)
    except FileNotFoundError:
        return 0
    names = sorted(entry.name for entry in entries if entry.kind == "dir")
    deleted = 0
    written: int | None = None
    for name in names:
        steps = parse_segment(name)
        if steps is None or not unneeded((timeline, *steps)):
            continue
        check_fence()
        failpoint("retain.before_segment")
        # Determined before the first deletion, which would remove the markers it looks for.
        if timeline == own and written is None:
            written = _last_written(filesystem, directory, names, rank)
        complete_only = timeline == own and steps[1] >= (written or 0)
        # Another process may be deleting the same segment.
        with contextlib.suppress(FileNotFoundError):
            deleted += _delete_segment(
                filesystem, directory / name, complete_only=complete_only, rank=rank
            )
    return deleted


def _last_written(
    filesystem: FileSystem, directory: PurePath, names: Sequence[str], rank: int | None
) -> int:
    """Return the last step of the newest segment that has a marker (of ``rank``); 0 without one."""
    for name in reversed(names):
        steps = parse_segment(name)
        if steps is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            ranks = {parse_marker(entry.name) for entry in filesystem.scan(directory / name)}
            if ranks - {None} if rank is None else rank in ranks:
                return steps[1]
    return 0


def _delete_segment(
    filesystem: FileSystem, path: PurePath, *, complete_only: bool, rank: int | None
) -> bool:
    """Delete one segment; return True if it was deleted.

    Args:
        complete_only: leaves a segment without a marker, which is being written.
    """
    names = sorted(entry.name for entry in filesystem.scan(path) if entry.kind == "file")
    if rank is not None:
        names = [name for name in names if parse_rank(name.removesuffix(TEMPORARY_SUFFIX)) == rank]
    if complete_only and not any(parse_marker(name) is not None for name in names):
        return False
    # Nothing of this rank is left; the last rank also removes the directory.
    if not names:
        with contextlib.suppress(OSError):
            filesystem.remove_dir(path)
        return False
    for name in names:
        if parse_marker(name.removesuffix(TEMPORARY_SUFFIX)) is not None:
            remove_if_there(filesystem, path / name)
    # Durable before the data goes: after a crash a marker would vouch for missing records.
    filesystem.sync_dir(path)
    # Not synced after it: data that a crash brings back has no marker, and is deleted again.
    for name in names:
        if parse_shard(name.removesuffix(TEMPORARY_SUFFIX)) is not None:
            remove_if_there(filesystem, path / name)
    # A directory with files of the user, or of other ranks, stays.
    with contextlib.suppress(OSError):
        filesystem.remove_dir(path)
    return True


def kept_by(
    rules: KeepRules,
    bases: Iterable[BaseFound],
    branches: Mapping[int, Branch],
    damaged: Collection[BaseId] = (),
) -> set[BaseId]:
    """Return the good bases that the rules or a pin keep in addition to the newest ones."""
    good = [base for base in bases if base.id not in damaged]
    metrics = {
        base.id: {} if base.annotations is None else base.annotations.metrics for base in good
    }
    return rules.kept(metrics, {base.id for base in good if base.is_pinned}, branches)


class KeptBases:
    """Bases that stay in addition to the newest ones, and bases whose log stays.

    Args:
        rules: bases to keep.
        windows: reads the steps that the log must keep reachable.
    """

    def __init__(self, rules: KeepRules, windows: HistoryWindows) -> None:
        self._rules = rules
        self._windows = windows

    def needed(
        self, inventory: Inventory, bases: Collection[BaseFound], damaged: Collection[BaseId]
    ) -> set[BaseId]:
        """Return the bases that the rules keep, and those that steps of the history need."""
        self._windows.observe(inventory)
        kept = kept_by(self._rules, bases, inventory.branches, damaged)
        return kept | self._windows.needed(inventory, bases, damaged)

    def keeping_log(
        self,
        inventory: Inventory,
        bases: Collection[BaseFound],
        damaged: Collection[BaseId] = (),
    ) -> list[BaseId]:
        """Return the bases whose log stays: not those that only the rules keep."""
        kept = kept_by(self._rules, bases, inventory.branches, damaged)
        kept -= self._windows.needed(inventory, bases, damaged, kept)
        return bases_keeping_log(bases, kept, self._rules.newest)


class ReadBack:
    """Plans retention in one place, and reads back the base that a plan relies on.

    Args:
        filesystem: the place.
        ring: lends the chunks to read into.
        keep: bases to keep.
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
        keep: KeepRules,
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
                keep=self._keep.newest,
                verified=self.verified,
                damaged=self.damaged,
                needed=kept_by(self._keep, bases.values(), branches, self.damaged),
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
        keep: bases to keep.
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
        keep: KeepRules,
        timeout_s: float,
        history: str = "last",
        clock: Clock,
    ) -> None:
        filesystem = fence.filesystem
        self._windows = HistoryWindows(filesystem, clock, history)
        self._timelines = TimelineCache()
        self._filesystem = filesystem
        self._run = fence.run
        self._timeline = fence.timeline
        self._fence = fence
        self._slots = slots
        self._kept = KeptBases(keep, self._windows)
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
        self._windows.observe(inventory)
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
        if victims:
            damaged = self._good.damaged
            needed = self._windows.needed(inventory, bases.values(), damaged, victims)
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
        left = [b for b in inventory.bases if b.is_usable or b.status == "damaged"]
        retain_log(
            self._filesystem,
            inventory,
            self._kept.keeping_log(inventory, left, self._good.damaged),
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
        known = name in RECORDS_OF_BASE
        return known or parse_marker(name) is not None or parse_shard(name) is not None

    return all(entry.kind == "file" and ours(entry.name) for entry in base.files)
