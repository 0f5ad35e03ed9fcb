"""Make one base durable: drive the commit machine over the file system; audit its digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from everstep.commit.base_commit import (
    Action,
    BaseCommit,
    CheckFence,
    Event,
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
from everstep.commit.lineage import BaseId
from everstep.errors import AuditError, FencedError, OutOfSpaceError
from everstep.format.names import MANIFEST, base_dir, marker_name
from everstep.format.plan import BasePlan
from everstep.format.reader import read_record_bytes
from everstep.format.records import Marker
from everstep.format.writer import ChunkRing, Written, write_shard
from everstep.keeper.persist.static_files import StaticFiles
from everstep.run.fence import Fence
from everstep.run.scan import newest_timeline, scan_base
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import FileSystem, WriteFile
from everstep.seams.progress import ProgressSink
from everstep.state.layout.shards import Body
from everstep.tiers.durable_files import (
    ensure_dir,
    remove_if_there,
    storage_errors,
    temporary,
    write_durably,
)
from everstep.tiers.slots import SlotStore

__all__ = [
    "Audit",
    "DigestAudit",
    "Persister",
    "digests_of",
]

Audit = Callable[[Mapping[str, str]], None]
"""Receives the digests of all entries by name before the commit; raises to refuse the base."""


class Persister:
    """Writes bases of one timeline, one after the other.

    Args:
        run: the run folder.
        ring: chunks and threads that write to disk.
        slots: files of deleted bases, to be recycled.
        timeout_s: seconds without progress after which a single transfer counts as hung.
        fence: fence of the writing process; None: only newer timelines fence it off.

    Attributes:
        static: files that bases link to instead of writing them again.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        ring: ChunkRing,
        slots: SlotStore,
        *,
        timeout_s: float,
        fence: Fence | None = None,
    ) -> None:
        self._fence = fence
        self._filesystem = filesystem
        self._run = run
        self._ring = ring
        self._slots = slots
        self._has_base_dir = False
        self._timeout_s = timeout_s
        self.static = StaticFiles(filesystem, run, ring, timeout_s=timeout_s)

    def persist(
        self,
        plan: BasePlan,
        bodies: Sequence[Body],
        progress: ProgressSink,
        audit: Audit = lambda digests: None,
    ) -> tuple[Written, ...]:
        """Write and commit a base.

        Returns:
            The files of the base; an empty tuple if it was committed before.

        Raises:
            FencedError: a newer timeline has taken over the run.
            StorageError: the file system failed; the files of the base were removed.
        """
        commit = BaseCommit(plan.identity)
        written: tuple[Written, ...] = ()
        directory = base_dir(self._run, plan.identity.timeline, plan.identity.step)
        where = {"step": plan.identity.step, "rank": plan.identity.rank}
        with storage_errors("write the base", directory, **where):
            # An earlier attempt may have failed after its commit: files of a committed base must
            # never be overwritten. Its manifest was renamed but perhaps not synced: sync it.
            if self._is_committed(plan):
                self._filesystem.sync_dir(directory)
                return ()
            try:
                action: Action | None = commit.start()
                while action is not None:
                    if isinstance(action, WriteFiles):
                        written = self.write(plan, bodies, progress, audit)
                        event: Event = FilesDurable(tuple(shard.record for shard in written))
                    else:
                        event = self._perform(action, plan, directory)
                    action = commit.on(event)
                return written
            except FencedError:
                # No cleanup: the process of the new timeline may rely on these files, and deletes
                # them if it does not.
                raise
            except FileNotFoundError:
                # A newer process may have swept the directory: raise FencedError in that case.
                BaseCommit(plan.identity).on(self._look_at_fence())
                # The fence is open: the directory was deleted by hand, or the disk has lost it.
                self._clean_up(plan, directory)
                raise
            except BaseException:
                self._clean_up(plan, directory)
                raise

    def write(
        self,
        plan: BasePlan,
        bodies: Sequence[Body],
        progress: ProgressSink,
        audit: Audit = lambda digests: None,
    ) -> tuple[Written, ...]:
        """Write the files of one rank durably under their final names, without marker and manifest.

        Raises:
            OSError, EverstepError: the files written so far stay; the caller removes them.
        """
        directory = base_dir(self._run, plan.identity.timeline, plan.identity.step)
        written = self._write_files(plan, bodies, directory, progress)
        # Before the caller writes the marker: a base that fails the audit must never be committed.
        audit({k: v for shard in written for k, v in shard.digests.items()})
        # After the audit: a static file that has changed must not be linked to by later bases.
        for shard, one in zip(plan.shards, written, strict=True):
            if shard.static:
                self.static.remember(directory / shard.name, one)
        return written

    def _look_at_fence(self) -> FenceSeen:
        fence = self._fence
        newest = newest_timeline(self._filesystem, self._run) if fence is None else fence.newest()
        return FenceSeen(newest)

    def _is_committed(self, plan: BasePlan) -> bool:
        try:
            return scan_base(self._filesystem, self._run, _base(plan)).status == "committed"
        except FileNotFoundError:
            return False

    def _perform(self, action: Action, plan: BasePlan, directory: PurePath) -> Event:
        if isinstance(action, CheckFence):
            return self._look_at_fence()
        if isinstance(action, WriteMarker):
            failpoint("save.before_marker")
            path = directory / marker_name(action.marker.rank)
            # The files were synced before: a marker on disk promises that all files of its rank are
            # durable.
            write_durably(self._filesystem, path, action.marker.encode())
            return MarkerDurable()
        if isinstance(action, GatherMarkers):
            return MarkersSeen(self._markers(plan, directory))
        assert isinstance(action, WriteManifest)
        failpoint("save.before_manifest")
        # The commit point: the base exists if and only if this rename is durable.
        write_durably(self._filesystem, directory / MANIFEST, action.manifest.encode())
        failpoint("save.after_manifest")
        return ManifestDurable()

    def _write_files(
        self,
        plan: BasePlan,
        bodies: Sequence[Body],
        directory: PurePath,
        progress: ProgressSink,
    ) -> tuple[Written, ...]:
        failpoint("save.before_write")
        static = self.static
        sizes = [s.size_bytes for s in plan.shards if not static.may_link(s, plan.identity)]
        # Only files that the next base can reuse are kept; larger or smaller ones only take space.
        self._slots.count_max = len(sizes)
        self._slots.drop_unfit(sizes)
        filesystem = self._filesystem
        self._check_space(plan, sum(sizes))
        # Once per process: the name of the directory stays durable after its first sync.
        if not self._has_base_dir:
            ensure_dir(filesystem, directory.parent)
            self._has_base_dir = True
        ensure_dir(filesystem, directory)
        written = []
        for shard, body in zip(plan.shards, bodies, strict=True):
            path = directory / shard.name
            if shard.static:
                linked = static.link(shard, plan.identity, body, path, progress)
                if linked is not None:
                    written.append(linked)
                    continue
            file = self._open(temporary(path), shard.size_bytes)
            try:
                # Written under a temporary name: a crash leaves a file that the next sweep deletes.
                shard_written = write_shard(
                    file,
                    shard,
                    plan.identity,
                    body,
                    self._ring,
                    timeout_s=self._timeout_s,
                    progress=progress,
                )
            finally:
                file.close()
            written.append(shard_written)
            failpoint("save.before_rename")
            # After write_shard() has synced the data: a final name never has partial contents.
            filesystem.rename(temporary(path), path)
        # One sync of the directory makes all names durable, before the marker refers to them.
        filesystem.sync_dir(directory)
        return tuple(written)

    def _open(self, path: PurePath, size_bytes: int) -> WriteFile:
        """Open a file for writing, recycled or new, with its blocks allocated."""
        recycled = self._slots.claim(path, size_bytes)
        if recycled is not None:
            return recycled
        # A leftover of a failed attempt may have other contents and another size.
        remove_if_there(self._filesystem, path)
        file = self._filesystem.create(path, direct=True)
        try:
            # Allocate all blocks first: a full disk fails here, before anything is written.
            file.reserve(size_bytes)
        except BaseException:
            file.close()
            raise
        return file

    def _markers(self, plan: BasePlan, directory: PurePath) -> dict[int, Marker]:
        found = {}
        for rank in range(plan.identity.world):
            path = directory / marker_name(rank)
            found[rank] = Marker.decode(read_record_bytes(self._filesystem, path), path)
        return found

    def _check_space(self, plan: BasePlan, size_bytes: int) -> None:
        """Refuse a base that cannot fit, before it is written; parked files count as free space."""
        free_bytes = self._filesystem.free_bytes(self._run) + self._slots.parked_bytes()
        if free_bytes < size_bytes:
            raise OutOfSpaceError(
                f"a base takes {size_bytes} bytes, {free_bytes} are free",
                step=plan.identity.step,
                rank=plan.identity.rank,
                tier="disk",
                path=self._run,
                hint="free some space, or keep fewer bases (keep=, everstep rm)",
            )

    def _clean_up(self, plan: BasePlan, directory: PurePath) -> None:
        """Remove the files of a base that failed; a committed base stays.

        A process that resumes the run meanwhile may complete the base and rely on it. It opens its
        timeline first and looks for the marker second; this method renames the marker first and
        looks for
        the timeline second. So at least one of the two sees the other (``adr/004``).
        """
        filesystem = self._filesystem
        try:
            names = {entry.name for entry in filesystem.scan(directory)}
            # With a manifest the base is committed; fenced off, the files belong to the newer
            # timeline.
            if MANIFEST in names or self._is_fenced_off():
                return
            marker = marker_name(plan.identity.rank)
            # The marker first: files with a marker could be rolled forward to a base of mixed
            # contents.
            if marker in names:
                set_aside = directory / temporary(PurePath(marker)).name
                # Renamed, not deleted: it is put back if a newer timeline turns out to exist. Both
                # renames are synced, so that a crash leaves the state that the other process has
                # seen.
                filesystem.rename(directory / marker, set_aside)
                filesystem.sync_dir(directory)
                if self._is_fenced_off():
                    filesystem.rename(set_aside, directory / marker)
                    filesystem.sync_dir(directory)
                    return
            # Only this rank's files: other ranks clean up their own.
            mine = {shard.name for shard in plan.shards} | {marker, MANIFEST}
            for name in mine | {temporary(PurePath(name)).name for name in mine}:
                remove_if_there(filesystem, directory / name)
            if not filesystem.scan(directory):
                filesystem.remove_dir(directory)
        except OSError:
            # The disk that failed the save may fail the cleanup, too: retention repeats it later.
            pass

    def _is_fenced_off(self) -> bool:
        return self._fence is not None and self._fence.newest_or_next() != self._fence.timeline


def _base(plan: BasePlan) -> BaseId:
    return BaseId(plan.identity.timeline, plan.identity.step)


class DigestAudit:
    """Digest audit (I8): compares the digests of each base with the previous base of the timeline.

    A base is captured during the next step, on the promise that only a registered optimizer (or a
    declared update) writes to the tensors that it owns. An optimizer step inside a CUDA graph, or a
    write without torch, breaks the promise silently. The digests, which are computed anyway, reveal
    it: without an update between two bases, no updated entry may differ, and no static entry may
    ever differ.
    """

    def __init__(self) -> None:
        self._lsn = -1
        self._digests: Mapping[str, str] = {}
        self._forms: Mapping[str, object] = {}

    def of(self, plan: BasePlan) -> Audit:
        """Return the check to run on the digests of a base before it is committed."""

        def audit(digests: Mapping[str, str]) -> None:
            forms = {
                place.entry.name: (place.entry.dtype, place.entry.shape)
                for shard in plan.shards
                for place in shard.layout.placed
                if place.entry.name in plan.kinds or place.entry.name not in shard.lsns
            }
            idle = plan.identity.lsn == self._lsn
            for name, kind in plan.kinds.items():
                # An entry of another dtype or shape is a new entry: nothing to compare.
                same_form = self._forms.get(name) == forms.get(name)
                if not same_form or self._digests[name] == digests[name]:
                    continue
                if kind == "static":
                    raise AuditError(
                        f"{name!r} was declared static but has changed",
                        step=plan.identity.step,
                        hint="do not declare it static",
                    )
                if idle:
                    raise AuditError(
                        f"{name!r} has changed since the previous base, but no update was seen: "
                        "code other than the optimizer writes to it",
                        step=plan.identity.step,
                        hint="call before_update() and after_update() around updates that bypass "
                        'optimizer.step() (CUDA graphs, for example), or use method="async"',
                    )
            # Updated only after success: the next base is compared with the last good one.
            self._lsn = plan.identity.lsn
            self._digests = digests
            self._forms = forms

        return audit


def digests_of(written: Sequence[Written]) -> dict[str, str]:
    """Return the digests of all entries in ``written``, by name."""
    return {name: digest for shard in written for name, digest in shard.digests.items()}
