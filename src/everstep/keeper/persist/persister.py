"""Makes one base durable: drives the commit machine over the file system."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from everstep.commit.lineage import BaseId
from everstep.commit.machine import (
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
from everstep.tiers.disk import (
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
"""Told the digests of all entries, by name, before they are committed; raises to refuse."""


class Persister:
    """Writes bases of one timeline, one after the other.

    Args:
        run: the run folder.
        timeout_s: a single transfer that takes longer counts as hung.
        fence: of the process that writes; None: it looks for newer timelines only.

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
        """Returns when the base is committed: what its files are (nothing if it was already).

        Raises:
            FencedError: when a newer timeline has taken over.
            StorageError: with what the file system said; nothing half-made is left behind.
        """
        commit = BaseCommit(plan.identity)
        written: tuple[Written, ...] = ()
        directory = base_dir(self._run, plan.identity.timeline, plan.identity.step)
        where = {"step": plan.identity.step, "rank": plan.identity.rank}
        with storage_errors("write the base", directory, **where):
            if self._is_committed(plan):
                # An attempt that failed after its commit: nothing may be written over it.
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
                raise  # what lies there is the new timeline's to judge and to delete
            except FileNotFoundError:  # swept away by whoever has taken the run over?
                BaseCommit(plan.identity).on(self._look_at_fence())
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
        """Writes the files of one rank, so that they have their names, durably; no more.

        Raises:
            OSError, EverstepError: and leaves what there is to the caller.
        """
        directory = base_dir(self._run, plan.identity.timeline, plan.identity.step)
        written = self._write_files(plan, bodies, directory, progress)
        audit({k: v for shard in written for k, v in shard.digests.items()})
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
            write_durably(self._filesystem, path, action.marker.encode())
            return MarkerDurable()
        if isinstance(action, GatherMarkers):
            return MarkersSeen(self._markers(plan, directory))
        assert isinstance(action, WriteManifest)
        failpoint("save.before_manifest")
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
        self._slots.count_max = len(sizes)
        self._slots.drop_unfit(sizes)
        filesystem = self._filesystem
        self._check_space(plan, sum(sizes))
        if not self._has_base_dir:  # its name is durable from the first base on
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
            filesystem.rename(temporary(path), path)
        filesystem.sync_dir(directory)
        return tuple(written)

    def _open(self, path: PurePath, size_bytes: int) -> WriteFile:
        recycled = self._slots.claim(path, size_bytes)
        if recycled is not None:
            return recycled
        remove_if_there(self._filesystem, path)
        file = self._filesystem.create(path, direct=True)
        try:
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
        """Refuses before writing what cannot fit; parked files count as room."""
        room = self._filesystem.free_bytes(self._run) + self._slots.parked_bytes()
        if room < size_bytes:
            raise OutOfSpaceError(
                f"a base takes {size_bytes} bytes, {room} are free",
                step=plan.identity.step,
                rank=plan.identity.rank,
                tier="disk",
                path=self._run,
                hint="free some space, or keep fewer bases (keep=, everstep rm)",
            )

    def _clean_up(self, plan: BasePlan, directory: PurePath) -> None:
        """Leaves nothing of a base that failed: marker first, so that no mixture can be
        rolled forward, then the files. A committed base is past this.

        Whoever resumes meanwhile may make it whole, and rest on it. It looks whether the marker is
        there behind its new timeline, and we look for that behind the marker's going: of the two
        one sees the other (``adr/004``)."""
        filesystem = self._filesystem
        try:
            names = {entry.name for entry in filesystem.scan(directory)}
            if MANIFEST in names or self._is_fenced_off():
                return
            marker = marker_name(plan.identity.rank)
            if marker in names:
                gone = directory / temporary(PurePath(marker)).name
                filesystem.rename(directory / marker, gone)
                filesystem.sync_dir(directory)
                if self._is_fenced_off():
                    filesystem.rename(gone, directory / marker)
                    filesystem.sync_dir(directory)
                    return
            mine = {shard.name for shard in plan.shards} | {marker, MANIFEST}
            for name in mine | {temporary(PurePath(name)).name for name in mine}:
                remove_if_there(filesystem, directory / name)
            if not filesystem.scan(directory):
                filesystem.remove_dir(directory)
        except OSError:
            pass  # the disk that failed the save may fail this too; retention cleans up later

    def _is_fenced_off(self) -> bool:
        return self._fence is not None and self._fence.seen() != self._fence.timeline


def _base(plan: BasePlan) -> BaseId:
    return BaseId(plan.identity.timeline, plan.identity.step)


class DigestAudit:
    """Compares each base with the one before, of one timeline."""

    def __init__(self) -> None:
        self._lsn = -1
        self._digests: Mapping[str, str] = {}
        self._forms: Mapping[str, object] = {}

    def of(self, plan: BasePlan) -> Audit:
        """What to ask before a base is committed."""

        def audit(digests: Mapping[str, str]) -> None:
            forms = {
                place.entry.name: (place.entry.dtype, place.entry.shape)
                for shard in plan.shards
                for place in shard.layout.placed
                if place.entry.name in plan.kinds or place.entry.name not in shard.lsns
            }
            idle = plan.identity.lsn == self._lsn
            for name, kind in plan.kinds.items():
                same_form = self._forms.get(name) == forms.get(name)
                if not same_form or self._digests[name] == digests[name]:
                    continue
                if kind == "static":
                    raise AuditError(
                        f"{name!r} was declared static and has changed",
                        step=plan.identity.step,
                        hint="do not declare it static",
                    )
                if idle:
                    raise AuditError(
                        f"{name!r} has changed, but no update was seen since the base before: "
                        "something writes to it behind the optimizer's back",
                        step=plan.identity.step,
                        hint="call before_update() and after_update() around updates that go past "
                        'optimizer.step(), CUDA graphs among them, or use method="async"',
                    )
            self._lsn = plan.identity.lsn
            self._digests = digests
            self._forms = forms

        return audit


def digests_of(written: Sequence[Written]) -> dict[str, str]:
    """Of all entries of files that were written, by name."""
    return {name: digest for shard in written for name, digest in shard.digests.items()}
