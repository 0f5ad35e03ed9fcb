"""Disk operations of one rank's keeper for commits of several ranks.

:mod:`everstep.commit.job.member` makes the decisions; this module carries them out, one at a time.
Each consists of a few file operations, and a crash may interrupt it anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import partial
from pathlib import PurePath
from typing import Protocol

from everstep.commit import BaseId
from everstep.commit.base_commit import (
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
from everstep.commit.job.member import (
    BasesSeen,
    Delete,
    Event,
    LookAtBases,
    Perform,
    ReadBack,
    ReadBackDone,
    Withdraw,
    Withdrawn,
)
from everstep.commit.lineage import fenced_error
from everstep.errors import EverstepError, FencedError
from everstep.format import MANIFEST, FileRecord, Manifest, Marker, base_dir
from everstep.format.names import TEMPORARY_SUFFIX, marker_name, parse_marker, parse_shard
from everstep.format.reader import read_record_bytes
from everstep.keeper.retain import (
    KeptBases,
    delete_files,
    perform_deletion,
    retain_log,
)
from everstep.restore.fetch.rank_copies import keep_manifest
from everstep.run import BaseFound, Inventory, TimelineCache, newest_timeline, scan_run
from everstep.run.fence import Fence
from everstep.run.scan import bases_keeping_log
from everstep.seams import FileSystem, failpoint
from everstep.tiers import remove_if_there, write_durably
from everstep.tiers.durable_files import temporary


class RankFiles(Protocol):
    """Writes and reads this rank's files of a base."""

    def write_shards(self, base: BaseId) -> tuple[FileRecord, ...]:
        """Write the files durably, under their final names."""
        ...

    def read_shards(self, base: BaseId) -> str:
        """Read the files back; return a description of the damage, or ``""``."""
        ...


class RankDisk:
    """One rank's disk.

    Args:
        files: writes and reads this rank's files.
        unique: suffix that makes the temporary names of this process unique.
        kept: bases of this disk that stay in addition to the newest ones, whose number rank 0
            knows; None: there are none.
        fence: fence of the writing process; None: only newer timelines fence it off.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        rank: int,
        files: RankFiles,
        *,
        unique: str,
        kept: KeptBases | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._fence = fence
        self._filesystem = filesystem
        self._run = run
        self._rank = rank
        self._files = files
        self._unique = unique
        self._kept = kept
        self._timelines = TimelineCache()

    def perform(self, do: Perform) -> Event:
        """Carry out one action of a :class:`~everstep.commit.job.member.Member`.

        Raises:
            FencedError: a newer timeline has removed the base.
            OSError, EverstepError: the disk failed. If files or a marker could not be written,
                :meth:`withdraw` removes the rest.
        """
        action = do.action
        base = do.base
        directory = base_dir(self._run, base.timeline, base.step)
        if isinstance(action, CheckFence):
            # Read from the folder; also raises if the folder was put back to an older state.
            return FenceSeen(self._newest() if self._fence is None else self._fence.newest())
        if isinstance(action, WriteFiles):
            return FilesDurable(self._files.write_shards(base))
        if isinstance(action, WriteMarker):
            failpoint("save.before_marker")
            # The files were synced before: a marker on disk promises that all files of its rank are
            # durable.
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
            problem = self._files.read_shards(base)
            # Damage may only look like it: a newer timeline may be deleting the base.
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
        """Return the bases that stay in addition to the newest ones: those that the rules keep, and
        those that steps of the history need."""
        if self._kept is None:
            return ()
        bases = [one for one in inventory.bases if one.status == "committed" or _is_spared(one)]
        return tuple(sorted(self._kept.needed(inventory, bases, damaged)))

    def withdraw(self, base: BaseId) -> None:
        """Remove this rank's marker durably, and then its files of a base that will not exist."""
        filesystem = self._filesystem
        directory = base_dir(self._run, base.timeline, base.step)
        try:
            # Read before the first deletion: the names decide which files belong to this rank.
            names = [entry.name for entry in filesystem.scan(directory)]
        except FileNotFoundError:
            return
        marker = directory / marker_name(self._rank)
        remove_if_there(filesystem, marker)
        remove_if_there(filesystem, temporary(marker))
        # The removal of the marker must be durable before any file is deleted: after a crash, a
        # marker without its files would count as a complete share of the base.
        filesystem.sync_dir(directory)
        for name in names:
            shard = parse_shard(name.removesuffix(TEMPORARY_SUFFIX))
            if shard is not None and shard[0] == self._rank:
                remove_if_there(filesystem, directory / name)

    def remove_empty(self, base: BaseId) -> None:
        """Remove the directory of a base; the last rank that withdraws succeeds."""
        with contextlib.suppress(OSError):
            self._filesystem.remove_dir(base_dir(self._run, base.timeline, base.step))

    def markers_of(self, timeline: int) -> dict[BaseId, Marker]:
        """Return this rank's markers of the bases of a timeline."""
        return {
            base.id: marker
            for base in scan_run(self._filesystem, self._run).bases
            if base.id.timeline == timeline
            for marker in (base.manifest.markers if base.manifest else base.markers)
            if marker.rank == self._rank
        }

    def sweep(self, timeline: int, *, spare: BaseId | None) -> None:
        """Remove the unfinished bases of older timelines on this disk, once every rank trains.

        A base that is complete over all disks has its manifest here by then (``open_on_disk``).

        Args:
            timeline: number of the timeline that was opened.
            spare: base that the timeline started from, if it is not durable: its shards on disks
                may be
                needed until the next base is durable.

        Raises:
            FencedError: a newer timeline has begun.
        """
        for found in scan_run(self._filesystem, self._run, self._timelines).bases:
            unfinished = found.status in ("incomplete", "condemned") and not _is_spared(found)
            if unfinished and found.id.timeline < timeline and found.id != spare:
                check_fence = partial(self._check_fence, timeline)
                # A newer process may have chosen this base meanwhile: look again right before the
                # deletion.
                check_fence()
                delete_files(self._filesystem, found, None, check_fence=check_fence)

    def retain_log(self, timeline: int, *, leads: bool) -> None:
        """Delete segments of this rank's log that can be replayed on no base that is left on this
        disk.

        A base counts even if it is incomplete here: other ranks may have its other shards.

        Args:
            timeline: number of the timeline that was opened.
            leads: True if this rank also cleans up for earlier ranks: nobody writes to older
                timelines any more.

        Raises:
            FencedError: a newer timeline has begun.
        """
        inventory = scan_run(self._filesystem, self._run, self._timelines)
        check_fence = partial(self._check_fence, timeline)
        bases = (
            bases_keeping_log(inventory.bases)
            if self._kept is None
            else self._kept.keeping_log(inventory, inventory.bases)
        )
        retain_log(
            self._filesystem,
            inventory,
            bases,
            check_fence,
            own=timeline,
            rank=self._rank,
            leads=leads,
        )

    def _write_manifest(self, base: BaseId, directory: PurePath, manifest: Manifest) -> Event:
        """Write the manifest of a base.

        Raises:
            FencedError: a newer timeline has begun, or has removed this rank's marker.
        """
        marker = marker_name(self._rank)
        failpoint("save.before_manifest")
        try:
            # Only next to this rank's own marker: if that is missing, a newer timeline has swept
            # the base, and a manifest written now must not count.
            if marker in {entry.name for entry in self._filesystem.scan(directory)}:
                keep_manifest(self._filesystem, self._run, manifest, self._unique, make=False)
                # Checked again after the write. A timeline opened before the manifest was durable
                # took its inventory without it, and may be deleting shards on other disks. A
                # timeline opened later finds the manifest.
                there = marker in {entry.name for entry in self._filesystem.scan(directory)}
                if there and self._newest() <= base.timeline:
                    failpoint("save.after_manifest")
                    return ManifestDurable()
        except FileNotFoundError:
            pass
        raise self._fenced(base.timeline, self._newest(), step=base.step)

    def _check_fence(self, timeline: int) -> None:
        if (newest := self._newest()) > timeline:
            raise self._fenced(timeline, newest)

    def _newest(self) -> int:
        if self._fence is not None:
            return self._fence.newest_or_next()
        return newest_timeline(self._filesystem, self._run)

    def _fenced(self, timeline: int, newest: int, step: int | None = None) -> FencedError:
        then = "it can no longer commit or delete bases"
        return fenced_error(timeline, newest, then, step=step, rank=self._rank, path=self._run)

    def _markers(self, directory: PurePath) -> MarkersSeen:
        """Return the markers of all ranks in a base's directory."""
        filesystem = self._filesystem
        try:
            names = {entry.name for entry in filesystem.scan(directory)}
        except FileNotFoundError:
            return MarkersSeen({})
        try:
            if MANIFEST in names:
                path = directory / MANIFEST
                manifest = Manifest.decode(read_record_bytes(filesystem, path), path)
                # Its writer may have crashed between rename and sync: make it durable before any
                # rank relies on the commit.
                filesystem.sync_dir(directory)
                return MarkersSeen({m.rank: m for m in manifest.markers}, committed=True)
            found = {}
            for name in sorted(names):
                if (rank := parse_marker(name)) is not None:
                    path = directory / name
                    found[rank] = Marker.decode(read_record_bytes(filesystem, path), path)
            return MarkersSeen(found)
        except (FileNotFoundError, EverstepError):
            # Removed meanwhile, or damaged: both count as missing.
            return MarkersSeen({})


def _is_spared(found: BaseFound) -> bool:
    """Return True if a base is condemned but no file was removed from this disk.

    The rules of retention decide on it like on any other base (``adr/004``).
    """
    return found.status == "condemned" and found.manifest is not None
