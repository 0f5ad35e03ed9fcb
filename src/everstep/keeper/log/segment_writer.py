"""Write log segments to disk: data file, then marker."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from everstep.errors import DeadlineError, OutOfSpaceError
from everstep.format.header import ShardIdentity
from everstep.format.log import LogRecord, plan_segment
from everstep.format.names import LOG_DIR, marker_name, segment_dir, timeline_dir
from everstep.format.plan import ShardPlan
from everstep.format.records import Marker
from everstep.format.writer import ChunkRing, write_shard
from everstep.keeper.log.disk_space import LogSpace
from everstep.run.fence import Fence
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.files.stalls import observed
from everstep.seams.progress import silent
from everstep.state.layout.shards import Body
from everstep.tiers.durable_files import (
    create_in,
    ensure_dir,
    remove_if_there,
    storage_errors,
    temporary,
    write_durably,
)

_MARKER_BYTES = 1024
"""Reserved for a marker; about 450 bytes are used."""


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """Durations of one segment write.

    Attributes:
        price_s: seconds for everything but the body: names, header, marker, syncs of directories.
        work_s: seconds until the body was durable.
    """

    price_s: float
    work_s: float


class SegmentWriter:
    """Writes the segments of one timeline.

    Args:
        identity: identity of this rank; each segment gets its own step and LSN.
        space: the log's share of the disk budget; None: no limit.

    Attributes:
        now_s: clock for the durations of segments.
        moves: counter that increases with each completed disk operation.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        identity: ShardIdentity,
        ring: ChunkRing,
        *,
        timeout_s: float,
        space: LogSpace | None = None,
    ) -> None:
        self.moves = 0
        self._filesystem = observed(seams.filesystem, self._moved)
        self._space = space
        self.now_s = seams.clock.monotonic_s
        self._run = run
        self._identity = identity
        self._fence = Fence(self._filesystem, run, identity.timeline)
        self._ring = ring
        self._timeout_s = timeout_s
        self._has_dir = False
        self.written_bytes = 0

    def write(self, records: Sequence[LogRecord], after: int) -> SegmentTimes:
        """Make a segment durable.

        Args:
            after: the step before its first step.

        Raises:
            FencedError: a newer timeline has taken over the run.
            NoLogSpaceError: it does not fit into the budget; nothing was written.
            StorageError: the disk failed; the files of the segment were removed if the disk allowed
                it.
            DeadlineError: the disk hangs. Files without a marker may be left; readers ignore them,
                retention removes them.
        """
        began_s = self.now_s()
        last = records[-1].head
        identity = dataclasses.replace(
            self._identity, step=last.step, lsn=last.lsn, exact=last.exact
        )
        directory = segment_dir(self._run, identity.timeline, after, last.step)
        plan, body = plan_segment(identity, records)
        with storage_errors("write the log", directory, step=last.step, rank=identity.rank):
            # A segment is a commit: a process of an older timeline must not add to the history
            # (I11).
            self._fence.check()
            self._check_space(identity, plan)
            try:
                work_s = self._write(directory, identity, plan, body)
            except DeadlineError:
                # No cleanup: on a disk that hangs it would hang as well, and the error would
                # never be reported.
                raise
            except BaseException:
                self._clean_up(directory, plan.name)
                raise
        return SegmentTimes(max(0.0, self.now_s() - began_s - work_s), work_s)

    def _moved(self) -> None:
        self.moves += 1

    def _check_space(self, identity: ShardIdentity, plan: ShardPlan) -> None:
        """Raise before anything is written if the segment cannot fit, so that bases can use the
        free space.
        """
        if self._space is not None:
            self._space.reserve(plan.size_bytes + _MARKER_BYTES, step=identity.step)
        free_bytes = self._filesystem.free_bytes(self._run)
        if free_bytes < plan.size_bytes:
            raise OutOfSpaceError(
                f"a log segment takes {plan.size_bytes} bytes, {free_bytes} are free",
                step=identity.step,
                rank=identity.rank,
                tier="disk",
                path=self._run,
                hint="free some space, or keep fewer bases (keep=, everstep rm)",
            )

    def _write(
        self, directory: PurePath, identity: ShardIdentity, plan: ShardPlan, body: Body
    ) -> float:
        """Write file and marker; return the seconds until the body was durable."""
        filesystem = self._filesystem
        # Once per timeline: after the first sync of its parent the name of the directory is
        # durable.
        if not self._has_dir:
            ensure_dir(filesystem, timeline_dir(self._run, identity.timeline) / LOG_DIR)
            self._has_dir = True
        path = directory / plan.name
        # Temporary name until the bytes are durable: a crash leaves no file that looks complete.
        file = create_in(filesystem, temporary(path))
        limits: dict[str, Any] = {"timeout_s": self._timeout_s, "progress": silent}
        try:
            # A full disk is noticed here, before anything is written.
            file.reserve(plan.size_bytes)
            # The body takes the time from here to on_body. The rest is the fixed price of a
            # segment, which a batch of several steps pays once.
            at_s = [self.now_s()]
            limits["on_body"] = lambda: at_s.append(self.now_s())
            written = write_shard(file, plan, identity, body, self._ring, **limits)
        finally:
            file.close()
        # write_shard has synced the file. The rename is durable only after the sync of the
        # directory; the marker must come after both, as it promises that the file is complete.
        failpoint("log.before_rename")
        filesystem.rename(temporary(path), path)
        filesystem.sync_dir(directory)
        failpoint("log.before_marker")
        marker = Marker.of(identity, (written.record,)).encode()
        # May be deleted at once: if a base of its last step is already durable, retention
        # deletes the segment as soon as it has its marker.
        path = directory / marker_name(identity.rank)
        write_durably(filesystem, path, marker, may_go=True)
        self.written_bytes += plan.size_bytes
        return at_s[1] - at_s[0]

    def _clean_up(self, directory: PurePath, name: str) -> None:
        """Remove the files of a failed segment: they may take the last free space of the disk."""
        filesystem = self._filesystem
        marker = directory / marker_name(self._identity.rank)
        # The disk that failed the write may fail the cleanup, too: the first error counts.
        with contextlib.suppress(OSError):
            names = {entry.name for entry in filesystem.scan(directory)}
            # A segment with its marker is complete and may have been read: it stays. After a
            # takeover the files belong to the new timeline.
            if marker.name in names or self._fence.newest_or_next() != self._identity.timeline:
                return
            shard = directory / name
            for path in (temporary(shard), shard, temporary(marker)):
                remove_if_there(filesystem, path)
            # Fails, and does no harm, while another rank's files are in the directory.
            filesystem.remove_dir(directory)
