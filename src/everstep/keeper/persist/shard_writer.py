"""Write one rank's files of a base durably, without marker and manifest; audit their digests."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from everstep.errors import AuditError, OutOfSpaceError
from everstep.format.names import base_dir
from everstep.format.plan import BasePlan
from everstep.format.writer import ChunkRing, Written, write_shard
from everstep.keeper.persist.static_files import StaticFiles
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import FileSystem, WriteFile
from everstep.seams.progress import ProgressSink
from everstep.state.layout.shards import Body
from everstep.tiers.durable_files import ensure_dir, remove_if_there, temporary
from everstep.tiers.slots import SlotStore


class ShardWriter:
    """Writes the files of one rank, of one base after the other.

    Args:
        run: the run folder.
        ring: chunks and threads that write to disk.
        slots: files of deleted bases, to be recycled.
        timeout_s: seconds without progress after which a single transfer counts as hung.

    Attributes:
        static: files that bases link to instead of writing them again.
        audit: compares the digests of each base with those of the base before it.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        ring: ChunkRing,
        slots: SlotStore,
        *,
        timeout_s: float,
    ) -> None:
        self.filesystem = filesystem
        self.run = run
        self._ring = ring
        self._slots = slots
        self._has_base_dir = False
        self.timeout_s = timeout_s
        self.static = StaticFiles(filesystem, run, ring, timeout_s=timeout_s)
        self.audit = DigestAudit()

    def write(
        self, plan: BasePlan, bodies: Sequence[Body], progress: ProgressSink
    ) -> tuple[Written, ...]:
        """Write the files of one rank durably under their final names, without marker and manifest.

        Raises:
            AuditError: the base is not the state of its step; its files stay, as below.
            OSError, EverstepError: the files written so far stay; the caller removes them.
        """
        directory = base_dir(self.run, plan.identity.timeline, plan.identity.step)
        written = self._write_files(plan, bodies, directory, progress)
        # Before the caller writes the marker: a base that fails the audit must never be committed.
        self.audit.check(plan, written)
        # After the audit: a static file that has changed must not be linked to by later bases.
        for shard, one in zip(plan.shards, written, strict=True):
            if shard.static:
                self.static.remember(directory / shard.name, one)
        return written

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
        filesystem = self.filesystem
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
                    timeout_s=self.timeout_s,
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

    def close(self) -> None:
        """Delete the parked files: they save allocation for a next base, which will not come."""
        with contextlib.suppress(OSError):
            self._slots.clear()

    def _open(self, path: PurePath, size_bytes: int) -> WriteFile:
        """Open a file for writing, recycled or new, with its blocks allocated."""
        recycled = self._slots.claim(path, size_bytes)
        if recycled is not None:
            return recycled
        # A leftover of a failed attempt may have other contents and another size.
        remove_if_there(self.filesystem, path)
        file = self.filesystem.create(path, direct=True)
        try:
            # Allocate all blocks first: a full disk fails here, before anything is written.
            file.reserve(size_bytes)
        except BaseException:
            file.close()
            raise
        return file

    def _check_space(self, plan: BasePlan, size_bytes: int) -> None:
        """Refuse a base that cannot fit, before it is written; parked files count as free space."""
        free_bytes = self.filesystem.free_bytes(self.run) + self._slots.parked_bytes()
        if free_bytes < size_bytes:
            raise OutOfSpaceError(
                f"a base takes {size_bytes} bytes, {free_bytes} are free",
                step=plan.identity.step,
                rank=plan.identity.rank,
                tier="disk",
                path=self.run,
                hint="free some space, or keep fewer bases (keep=, everstep rm)",
            )


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

    def check(self, plan: BasePlan, written: Sequence[Written]) -> None:
        """Compare a base, whose files have been digested, with the last one that passed.

        Raises:
            AuditError: the base is not the state of its step.
        """
        digests = {name: digest for shard in written for name, digest in shard.digests.items()}
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
