"""Write one rank's files of a base durably, without marker and manifest; audit their digests.

Files of entries that never change: written once, then hard-linked by later bases (``adr/050``).

No declaration is trusted: the entries of each base are digested, and a base links to an older file
only if that holds the same entries with the same digests.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.errors import AuditError, DamageError, EverstepError
from everstep.format import BasePlan, FileRecord, ShardIdentity, base_dir
from everstep.format.header import ShardHeader, ShardPlan, decode_header
from everstep.format.names import ANNOTATIONS
from everstep.format.reader import OpenShard, read_body, read_header
from everstep.format.records import Annotations
from everstep.format.writer import ChunkRing, Written, digest_shard, write_shard
from everstep.keeper.log import full_disk_error
from everstep.run import OpenBase, scan_run
from everstep.seams import FileSystem, WriteFile, failpoint
from everstep.seams.progress import ProgressSink
from everstep.state.layout import Body, ShardLayout
from everstep.state.layout.shards import at_lsn
from everstep.tiers import (
    SlotStore,
    ensure_dir,
    remove_if_there,
    storage_errors,
    write_durably,
)
from everstep.tiers.durable_files import temporary

_log = logging.getLogger("everstep.keeper")


@dataclass(frozen=True, slots=True)
class _Source:
    """File that can be linked to."""

    path: PurePath
    record: FileRecord
    header: ShardHeader

    def has_layout_of(self, shard: ShardPlan, identity: ShardIdentity) -> bool:
        """Return True if the file is laid out as a shard would be, apart from base and digests."""
        mine = self.header.identity
        theirs = shard.identity_in(identity)
        theirs = replace(theirs, timeline=mine.timeline, step=mine.step, lsn=mine.lsn)
        # Fields of markers only; the header of a file does not have them.
        theirs = replace(theirs, common=(), inexact="")
        return (
            mine == theirs
            and self.header.room_bytes == shard.room_bytes
            and self.header.aliases == shard.aliases
            and at_lsn(ShardLayout(self.header.placed), 0) == at_lsn(shard.layout, 0)
        )


class StaticFiles:
    """One rank's static files in a run folder, whose contents are known to be intact.

    Attributes:
        refused: reason of the file system for its last refusal to link a file; ``""`` without one.
    """

    def __init__(
        self, filesystem: FileSystem, run: PurePath, ring: ChunkRing, *, timeout_s: float
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._ring = ring
        self._timeout_s = timeout_s
        self._sources: list[_Source] = []
        self.refused = ""

    def may_link(self, shard: ShardPlan, identity: ShardIdentity) -> bool:
        """Return True if a shard is likely to need no space."""
        return any(source.has_layout_of(shard, identity) for source in self._sources)

    def link(
        self,
        shard: ShardPlan,
        identity: ShardIdentity,
        body: Body,
        target: PurePath,
        progress: ProgressSink,
    ) -> Written | None:
        """Give a file with the bytes of ``body`` the name ``target``, durable after a sync of the
        directory.

        Returns:
            None if there is no such file or the file system refuses the link: the shard has to be
                written.

        Raises:
            OSError: the file system failed at anything but the link.
        """
        digested: Written | None = None
        for source in self._candidates(shard, identity):
            # Digested once for all candidates: reading the body is the expensive part.
            digested = digested or digest_shard(shard, identity, body, progress)
            if tuple(digested.digests.values()) != source.header.digests:
                continue
            # A file of another process: read it back once, as its digests alone say nothing about
            # the disk.
            if source not in self._sources and not self._is_good(source, progress):
                continue
            header = self._link(source, target)
            if header is None:
                continue
            record = replace(source.record, name=shard.name)
            return Written(record, header, digested.digests, linked=True)
        return None

    def remember(self, path: PurePath, written: Written) -> None:
        """Offer a static file that this process has written or linked to later bases."""
        header = decode_header(written.header, written.record.length, path)
        others = [one for one in self._sources if one.path.name != path.name]
        self._sources = [*others, _Source(path, written.record, header)]

    def forget(self) -> None:
        """Forget all files after damage on the disk: they are read back before they are linked
        again."""
        self._sources.clear()

    def _link(self, source: _Source, target: PurePath) -> bytes | None:
        """Link a file to ``target``; return its header, or None if that failed."""
        filesystem = self._filesystem
        staged = temporary(target)
        # A leftover of a failed attempt would make link() fail.
        remove_if_there(filesystem, staged)
        try:
            filesystem.link(source.path, staged)
        except OSError as error:
            # ENOENT: its base was withdrawn or deleted meanwhile.
            if error.errno == errno.ENOENT:
                self._drop(source)
            else:
                self._warn_refused(source.path, error)
            return None
        # Read after the link: a file with two names is never recycled (``tiers/slots``), so its
        # contents can no longer change.
        try:
            header = _header_bytes(filesystem, staged, source.record)
        except (OSError, EverstepError):
            self._drop(source)
            remove_if_there(filesystem, staged)
            return None
        filesystem.rename(staged, target)
        # If target was the same file already, rename() does nothing and both names stay.
        remove_if_there(filesystem, staged)
        return header

    def _drop(self, source: _Source) -> None:
        self._sources = [one for one in self._sources if one is not source]

    def _candidates(self, shard: ShardPlan, identity: ShardIdentity) -> Iterator[_Source]:
        """Yield files that may have the bytes of a shard.

        Files of this process first; if there are none, files in the run folder, newest base first.
        """
        yield from (one for one in list(self._sources) if one.has_layout_of(shard, identity))
        if not self.may_link(shard, identity):
            yield from (
                one for one in self._on_disk(identity) if one.has_layout_of(shard, identity)
            )

    def _on_disk(self, identity: ShardIdentity) -> Iterator[_Source]:
        bases = scan_run(self._filesystem, self._run).bases
        for base in sorted(bases, key=lambda base: base.id, reverse=True):
            if base.status != "committed" or base.manifest is None:
                continue
            # Of another number of ranks: the entries are spread differently over files.
            if len(base.manifest.markers) != identity.world:
                continue
            # A base that cannot be opened is not linked to; its shard is written instead.
            with contextlib.suppress(OSError, EverstepError):
                opened = OpenBase.open(self._filesystem, base, identity.rank)
                opened.close()
                for _, record, header, path in opened.shards:
                    if header.identity.static:
                        yield _Source(path, record, header)

    def _is_good(self, source: _Source, progress: ProgressSink) -> bool:
        """Read back a file that another process has written; return True if it is intact.

        The process that restored its base may have read another copy, so nobody has verified this
        one.
        """
        try:
            # Direct I/O: the page cache could hide damage on the disk.
            file = self._filesystem.open(source.path, direct=True)
            try:
                shard = OpenShard(file, source.record, source.header, source.path)
                read_body(shard, self._ring, timeout_s=self._timeout_s, progress=progress)
            finally:
                file.close()
        except (OSError, DamageError) as error:
            _log.warning("%s is not linked to: %s", source.path, error)
            return False
        return True

    def _warn_refused(self, path: PurePath, error: OSError) -> None:
        """Warn once that the file system refuses hard links."""
        if not self.refused:
            _log.warning(
                "%s: the file system refuses hard links (%s): each base writes static entries anew",
                path,
                error.strerror or error,
            )
        self.refused = error.strerror or str(error)


def _header_bytes(filesystem: FileSystem, path: PurePath, record: FileRecord) -> bytes:
    file = filesystem.open(path)
    try:
        read_header(file, record, path)
        data = bytearray(record.header_length)
        file.read_into(memoryview(data), 0)
        return bytes(data)
    finally:
        file.close()


class PendingAnnotations:
    """Annotations of bases that are not committed yet. Any thread may add some.

    Args:
        run: the run folder.
    """

    def __init__(self, filesystem: FileSystem, run: PurePath) -> None:
        self._filesystem = filesystem
        self._run = run
        self._pending: dict[BaseId, Annotations] = {}
        self._lock = threading.Lock()

    def add(self, annotations: Annotations) -> None:
        """Keep annotations until their base is committed; they replace earlier ones."""
        with self._lock:
            self._pending[BaseId(annotations.timeline, annotations.step)] = annotations

    def write(self, base: BaseId, post: Callable[[EverstepError], None]) -> None:
        """Write the annotations of a committed base, if there are any; forget those of older bases.

        Args:
            post: called with the error if they cannot be written: the base itself is durable.
        """
        with self._lock:
            annotations = self._pending.get(base)
            self._pending = {one: kept for one, kept in self._pending.items() if one > base}
        if annotations is None:
            return
        path = base_dir(self._run, base.timeline, base.step) / ANNOTATIONS
        try:
            with storage_errors("write the annotations of a base", path, step=base.step):
                write_durably(self._filesystem, path, annotations.encode())
        except EverstepError as error:
            post(error)


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
        annotations: metrics and notes for bases that are not committed yet.
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
        self.annotations = PendingAnnotations(filesystem, run)

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
            raise full_disk_error("a base", size_bytes, free_bytes, self.run, plan.identity)


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
