"""Segments of the log on disk, as the keeper writes them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from everstep.errors import DeadlineError, OutOfSpaceError
from everstep.format.header import ShardIdentity
from everstep.format.log import LogRecord, plan_segment
from everstep.format.names import LOG_DIR, marker_name, segment_dir, timeline_dir
from everstep.format.plan import ShardPlan
from everstep.format.records import Marker
from everstep.format.writer import ChunkRing, write_shard
from everstep.keeper.log.log_batch import SegmentTimes
from everstep.keeper.log.log_room import LogRoom
from everstep.run.fence import Fence
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.files.stalls import ObservedFileSystem
from everstep.seams.progress import silent
from everstep.state.layout.shards import Body
from everstep.tiers.disk import (
    create_in,
    ensure_dir,
    remove_if_there,
    storage_errors,
    temporary,
    write_durably,
)

__all__ = ["SegmentWriter"]

_MARKER_BYTES = 1024  # at most; about 450 are used


class SegmentWriter:
    """Writes segments of one timeline.

    Args:
        identity: of this rank; step and LSN are those of each segment.
        room: what the budget leaves for the log; None: it has no bound.

    Attributes:
        now_s: the clock by which it says what a segment took.
        moves: changes with each operation on the disk that has come back.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        identity: ShardIdentity,
        ring: ChunkRing,
        *,
        timeout_s: float,
        room: LogRoom | None = None,
    ) -> None:
        self.moves = 0
        self._filesystem = ObservedFileSystem(seams.filesystem, self._moved)
        self._room = room
        self.now_s = seams.clock.monotonic_s
        self._run = run
        self._identity = identity
        self._fence = Fence(self._filesystem, run, identity.timeline)
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
            NoRoomError: the budget leaves no room for it; nothing was begun.
            StorageError: nothing of it is left, as far as the disk lets it go.
            DeadlineError: nothing half-made is left that anyone would read; retention removes it.
        """
        began_s = self.now_s()
        last = records[-1].head
        identity = dataclasses.replace(
            self._identity, step=last.step, lsn=last.lsn, exact=last.exact
        )
        directory = segment_dir(self._run, identity.timeline, after, last.step)
        plan, body = plan_segment(identity, records)
        with storage_errors("write the log", directory, step=last.step, rank=identity.rank):
            self._fence.check()
            self._check_space(identity, plan)
            try:
                work_s = self._write(directory, identity, plan, body)
            except DeadlineError:
                raise  # where the disk hangs, removing files may, too, and nobody would be told
            except BaseException:
                self._clean_up(directory, plan.name)
                raise
        return SegmentTimes(max(0.0, self.now_s() - began_s - work_s), work_s)

    def _moved(self) -> None:
        self.moves += 1

    def _check_space(self, identity: ShardIdentity, plan: ShardPlan) -> None:
        """Refuses before writing what cannot fit: bases may find room in what is left."""
        if self._room is not None:
            self._room.take(plan.size_bytes + _MARKER_BYTES, step=identity.step)
        room = self._filesystem.free_bytes(self._run)
        if room < plan.size_bytes:
            raise OutOfSpaceError(
                f"a segment of the log takes {plan.size_bytes} bytes, {room} are free",
                step=identity.step,
                rank=identity.rank,
                tier="disk",
                path=self._run,
                hint="free some space, or keep fewer bases (keep=, everstep rm)",
            )

    def _write(
        self, directory: PurePath, identity: ShardIdentity, plan: ShardPlan, body: Body
    ) -> float:
        """Returns seconds until the bytes of its body were durable."""
        filesystem = self._filesystem
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

    def _clean_up(self, directory: PurePath, name: str) -> None:
        """Leaves nothing of a segment that failed: its room may be the last of the disk. One with
        its marker is whole, and stays: somebody may have read it. What was taken over is the new
        timeline's to judge and to delete."""
        filesystem = self._filesystem
        marker = directory / marker_name(self._identity.rank)
        with contextlib.suppress(OSError):  # the disk that failed the segment may fail this, too
            names = {entry.name for entry in filesystem.scan(directory)}
            if marker.name in names or self._fence.newest_or_next() != self._identity.timeline:
                return
            shard = directory / name
            for path in (temporary(shard), shard, temporary(marker)):
                remove_if_there(filesystem, path)
            filesystem.remove_dir(directory)  # unless another rank has its part there
