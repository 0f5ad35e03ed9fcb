"""What one rank's keeper does on its disk for the commits of several ranks.

The decisions are in :mod:`everstep.commit.job.member`; here they are carried out, one at a time,
and each is an operation (or a few) that a crash may interrupt anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import PurePath

from everstep.commit.job.steps import (
    BasesSeen,
    Delete,
    Do,
    Event,
    LookAtBases,
    ReadBack,
    ReadBackDone,
    Withdraw,
    Withdrawn,
)
from everstep.commit.lineage import BaseId
from everstep.commit.logs import needed_by
from everstep.commit.machine import (
    CheckFence,
    FenceSeen,
    FilesDurable,
    GatherMarkers,
    ManifestDurable,
    MarkerDurable,
    MarkersSeen,
    WriteFiles,
    WriteManifest,
    WriteMarker,
)
from everstep.errors import EverstepError, FencedError
from everstep.format.names import (
    LOG_DIR,
    MANIFEST,
    TEMPORARY_SUFFIX,
    base_dir,
    marker_name,
    parse_marker,
    parse_shard,
)
from everstep.format.reader import read_record_bytes
from everstep.format.records import FileRecord, Manifest, Marker
from everstep.keeper.retain.deletion import delete_files, delete_segments, perform_deletion
from everstep.keeper.retain.history import HistoryWindow
from everstep.restore.fetch.ranks import keep_manifest
from everstep.run.fence import Fence
from everstep.run.scan import (
    BaseFound,
    Inventory,
    KnownTimelines,
    bases_with_a_log,
    newest_timeline,
    scan_run,
)
from everstep.seams.files.filesystem import FileSystem
from everstep.tiers.disk import remove_if_there, temporary, write_durably

__all__ = ["RankDisk"]

WriteShards = Callable[[BaseId], tuple[FileRecord, ...]]
"""Writes this rank's files of a base, so that they have their names, durably."""

ReadShards = Callable[[BaseId], str]
"""Reads this rank's files of a base back; says what is wrong, or nothing."""


class RankDisk:
    """One rank's disk.

    Args:
        unique: makes the temporary names this process's own.
        promise: what of the log on this disk can be gone back to; None: nothing but what bases
            that are there for other reasons lead to.
        fence: of the process that writes; None: it looks for newer timelines only.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        rank: int,
        *,
        write_shards: WriteShards,
        read_shards: ReadShards,
        unique: str,
        promise: Callable[[Inventory], HistoryWindow] | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._fence = fence
        self._filesystem = filesystem
        self._run = run
        self._rank = rank
        self._write_shards = write_shards
        self._read_shards = read_shards
        self._unique = unique
        self._promise = promise
        self._timelines = KnownTimelines()

    def perform(self, do: Do) -> Event:
        """Does what a :class:`~everstep.commit.job.member.Member` asks for.

        Raises:
            FencedError: a newer timeline has swept the base up.
            OSError, EverstepError: of the disk. Where files or a marker could not be written,
                :meth:`withdraw` removes what there is.
        """
        action = do.action
        base = do.base
        directory = base_dir(self._run, base.timeline, base.step)
        if isinstance(action, CheckFence):
            return FenceSeen(self._newest() if self._fence is None else self._fence.newest())
        if isinstance(action, WriteFiles):
            return FilesDurable(self._write_shards(base))
        if isinstance(action, WriteMarker):
            path = directory / marker_name(self._rank)
            write_durably(self._filesystem, path, action.marker.encode())
            return MarkerDurable()
        if isinstance(action, GatherMarkers):
            return self._markers(directory)
        if isinstance(action, WriteManifest):
            return self._write_manifest(base, directory, action.manifest)
        if isinstance(action, Delete):
            return perform_deletion(self._filesystem, directory, action.action, None, self._newest)
        if isinstance(action, Withdraw):
            self.withdraw(base)
            return Withdrawn()
        if isinstance(action, ReadBack):
            problem = self._read_shards(base)
            newest = self._newest() if problem else 0
            return ReadBackDone(problem, newest)
        assert isinstance(action, LookAtBases)
        inventory = scan_run(self._filesystem, self._run, self._timelines)
        committed = tuple(
            found.id
            for found in inventory.bases
            if found.status == "committed" or _is_spared(found)
        )
        return BasesSeen(committed, inventory.branches, self._needed(inventory, action.damaged))

    def _needed(self, inventory: Inventory, damaged: Collection[BaseId]) -> tuple[BaseId, ...]:
        """Bases that have to stay, so that every promised step that can be reached by the logs on
        this disk can be reached without the others, whichever of them go."""
        if self._promise is None:
            return ()
        lsns = {
            found.id: found.manifest.markers[0].lsn
            for found in inventory.bases
            if found.manifest is not None and found.id not in damaged
            if found.status == "committed" or _is_spared(found)
        }
        return tuple(sorted(self._promise(inventory).kept(lsns, sorted(lsns)[:-1])))

    def withdraw(self, base: BaseId) -> None:
        """Removes this rank's marker, durably, and then its files: what is left of a base that
        will not exist."""
        filesystem = self._filesystem
        directory = base_dir(self._run, base.timeline, base.step)
        try:
            names = [entry.name for entry in filesystem.scan(directory)]
        except FileNotFoundError:
            return
        marker = directory / marker_name(self._rank)
        remove_if_there(filesystem, marker)
        remove_if_there(filesystem, temporary(marker))
        filesystem.sync_dir(directory)
        for name in names:
            shard = parse_shard(name.removesuffix(TEMPORARY_SUFFIX))
            if shard is not None and shard[0] == self._rank:
                remove_if_there(filesystem, directory / name)

    def sweep(self, timeline: int, *, spare: BaseId | None) -> None:
        """Removes what older timelines have left unfinished on this disk, when every rank trains.

        Whatever was whole over all disks has its manifest here by then (``open_on_disk``).

        Args:
            timeline: the one that was opened.
            spare: what it began with, if that is not durable: the parts that are on disks may
                be needed until the next base is.

        Raises:
            FencedError: a newer timeline has begun.
        """
        for found in scan_run(self._filesystem, self._run, self._timelines).bases:
            unfinished = found.status in ("incomplete", "condemned") and not _is_spared(found)
            if unfinished and found.id.timeline < timeline and found.id != spare:
                check_fence = partial(self._check_fence, timeline, found.id)
                check_fence()
                delete_files(self._filesystem, found, None, check_fence=check_fence)

    def retain_log(self, timeline: int, *, leads: bool) -> None:
        """Deletes segments of this rank's log behind which no base is left on this disk that they
        could be replayed on; not a base only that is whole here: of one that is not, others may
        have the rest.

        Args:
            timeline: the one that was opened.
            leads: this rank cleans up for those that were there before, too: of older timelines
                nobody writes anything any more.

        Raises:
            FencedError: a newer timeline has begun.
        """
        inventory = scan_run(self._filesystem, self._run, self._timelines)
        left = bases_with_a_log(inventory.bases)
        for number in sorted(n for n in inventory.timelines if n <= timeline):
            if not inventory.may_hold(number, LOG_DIR):
                continue
            delete_segments(
                self._filesystem,
                self._run,
                [number],
                lambda segment: not needed_by(segment, left),
                partial(self._check_fence, timeline, BaseId(timeline, 0)),
                own=timeline,
                rank=None if leads and number < timeline else self._rank,
            )

    def _write_manifest(self, base: BaseId, directory: PurePath, manifest: Manifest) -> Event:
        """Only beside this rank's own marker: where that is gone, a newer timeline has swept up,
        and what is made here now must count for nothing. Nor may it where a newer timeline has
        begun meanwhile: it took its inventory without this, and may be sweeping up on other disks.
        One that begins later finds it."""
        marker = marker_name(self._rank)
        try:
            if marker in {entry.name for entry in self._filesystem.scan(directory)}:
                keep_manifest(self._filesystem, self._run, manifest, self._unique, make=False)
                there = marker in {entry.name for entry in self._filesystem.scan(directory)}
                if there and self._newest() <= base.timeline:
                    return ManifestDurable()
        except FileNotFoundError:
            pass
        raise self._fenced(base)

    def _check_fence(self, timeline: int, base: BaseId) -> None:
        if self._newest() > timeline:
            raise self._fenced(base)

    def _newest(self) -> int:
        if self._fence is not None:
            return self._fence.seen()
        return newest_timeline(self._filesystem, self._run)

    def _fenced(self, base: BaseId) -> FencedError:
        newest = self._newest()
        return FencedError(
            f"{base}: timeline {newest} has taken the run over",
            step=base.step,
            rank=self._rank,
            path=self._run,
            hint="another process resumed this run; end this one, or use another folder",
        )

    def _markers(self, directory: PurePath) -> MarkersSeen:
        filesystem = self._filesystem
        try:
            names = {entry.name for entry in filesystem.scan(directory)}
        except FileNotFoundError:
            return MarkersSeen({})
        try:
            if MANIFEST in names:
                path = directory / MANIFEST
                manifest = Manifest.decode(read_record_bytes(filesystem, path), path)
                filesystem.sync_dir(directory)  # whoever wrote it may not have got so far
                return MarkersSeen({m.rank: m for m in manifest.markers}, committed=True)
            found = {}
            for name in sorted(names):
                if (rank := parse_marker(name)) is not None:
                    path = directory / name
                    found[rank] = Marker.decode(read_record_bytes(filesystem, path), path)
            return MarkersSeen(found)
        except (FileNotFoundError, EverstepError):  # gone meanwhile, or damaged: not there
            return MarkersSeen({})


def _is_spared(found: BaseFound) -> bool:
    """Whether a base is condemned, and nothing of it was removed from this disk: the rules say what
    becomes of it, as of any other (``adr/004``)."""
    return found.status == "condemned" and found.manifest is not None
