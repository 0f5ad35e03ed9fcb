"""Segments of the log on disk, as the keeper writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from everstep.format.header import ShardIdentity
from everstep.format.log import LogRecord, plan_segment
from everstep.format.names import LOG_DIR, marker_name, segment_dir, timeline_dir
from everstep.format.records import Marker
from everstep.format.writer import ChunkRing, write_shard
from everstep.keeper.log_batch import SegmentTimes
from everstep.recover.fence import Fence
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.progress import silent
from everstep.tiers.disk import (
    create_in,
    ensure_dir,
    storage_errors,
    temporary,
    write_durably,
)

__all__ = ["SegmentWriter"]


class SegmentWriter:
    """Writes segments of one timeline.

    Args:
        identity: of this rank; step and LSN are those of each segment.

    Attributes:
        now_s: the clock by which it says what a segment took.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        identity: ShardIdentity,
        ring: ChunkRing,
        *,
        timeout_s: float,
    ) -> None:
        self._filesystem = seams.filesystem
        self.now_s = seams.clock.monotonic_s
        self._run = run
        self._identity = identity
        self._fence = Fence(seams.filesystem, run, identity.timeline)
        self._ring = ring
        self._timeout_s = timeout_s
        self._has_dir = False
        self.written_bytes = 0

    def write(self, records: Sequence[LogRecord], after: int) -> SegmentTimes:
        """Makes a segment durable.

        Args:
            after: the step before its first.

        Raises:
            FencedError: a newer timeline has begun.
            StorageError, DeadlineError: nothing half-made is left that anyone would read.
        """
        began_s = self.now_s()
        last = records[-1].head
        identity = dataclasses.replace(
            self._identity, step=last.step, lsn=last.lsn, exact=last.exact
        )
        directory = segment_dir(self._run, identity.timeline, after, last.step)
        with storage_errors("write the log", directory, step=last.step, rank=identity.rank):
            self._fence.check()
            work_s = self._write(directory, identity, records)
        return SegmentTimes(max(0.0, self.now_s() - began_s - work_s), work_s)

    def _write(
        self, directory: PurePath, identity: ShardIdentity, records: Sequence[LogRecord]
    ) -> float:
        """Returns seconds until the bytes of its body were durable."""
        filesystem = self._filesystem
        plan, body = plan_segment(identity, records)
        if not self._has_dir:
            ensure_dir(filesystem, timeline_dir(self._run, identity.timeline) / LOG_DIR)
            self._has_dir = True
        path = directory / plan.name
        file = create_in(filesystem, temporary(path), direct=True)
        limits: dict[str, Any] = {"timeout_s": self._timeout_s, "progress": silent}
        try:
            file.reserve(plan.size_bytes)
            at_s = [self.now_s()]
            limits["on_body"] = lambda: at_s.append(self.now_s())
            written = write_shard(file, plan, identity, body, self._ring, **limits)
        finally:
            file.close()
        failpoint("log.before_rename")
        filesystem.rename(temporary(path), path)
        filesystem.sync_dir(directory)
        failpoint("log.before_marker")
        marker = Marker.of(identity, (written.record,)).encode()
        # A base of its last step may be there by then: then retention takes the segment.
        path = directory / marker_name(identity.rank)
        write_durably(filesystem, path, marker, may_go=True)
        self.written_bytes += plan.size_bytes
        return at_s[1] - at_s[0]
