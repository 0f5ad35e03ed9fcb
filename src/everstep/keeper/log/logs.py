"""The logs that a keeper holds: of the attached training process, and of earlier ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgpack

from everstep.arena.memory import Arena
from everstep.errors import DeadlineError, KeeperError
from everstep.format.log import RecordHead
from everstep.format.writer import ChunkRing
from everstep.keeper.log.attached import AttachedTrainer
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.log.segment_queue import open_segments
from everstep.link.channel import BackgroundChannel
from everstep.link.log_records import receive_layout
from everstep.link.messages import identity_from_wire
from everstep.run.fence import timeline_bytes
from everstep.seams import FileSystem, Seams

if TYPE_CHECKING:
    from everstep.link.keeper_stats import KeeperStats

__all__ = [
    "Logs",
    "ServedTimelines",
]


class ServedTimelines:
    """Timeline records as they were when this keeper served them.

    A folder that was restored to an older state (from a copy or a disk snapshot) has the same run
    and path, so the next process finds the same keeper. It opens a timeline number that was used
    before. Data that the keeper holds for that number and higher ones then belongs to a history
    that the folder does not have any more.
    """

    def __init__(self, filesystem: FileSystem, run: PurePath) -> None:
        self._filesystem = filesystem
        self._run = run
        self._records: dict[int, bytes] = {}

    def start_timeline(self, timeline: int) -> bool:
        """Note that a timeline is served from now on.

        Returns:
            True if data of this timeline, or of higher numbers, belongs to another history and must
            be dropped.
        """
        known = self._records
        record = timeline_bytes(self._filesystem, self._run, timeline)
        other = known.get(timeline) not in (None, record) or any(n > timeline for n in known)
        self._records = {number: known[number] for number in known if number < timeline}
        if record is not None:
            self._records[timeline] = record
        return other

    def to_wire(self) -> list[list[int | bytes]]:
        """Encode the records for the ``recalled`` message."""
        return [[number, record] for number, record in self._records.items()]


_log = logging.getLogger("everstep.keeper")


class Logs:
    """One log per served timeline, kept until a newer base is durable.

    A process that is killed before its first base needs the logs of earlier processes.

    Attributes:
        served_timelines: records of the served timelines, to detect a restored folder.
    """

    def __init__(self, seams: Seams, run: PurePath, ring: ChunkRing) -> None:
        self._seams = seams
        self._run = run
        self._ring = ring
        self._timeline = 0
        self.served_timelines = ServedTimelines(seams.filesystem, run)
        self._current: LogStore | None = None
        # With their timelines.
        self._older: list[tuple[int, LogStore]] = []
        # The writing thread drops older logs while the serving thread reads or adds some.
        self._lock = threading.Lock()

    def serve(
        self,
        trainer: AttachedTrainer,
        channel: BackgroundChannel,
        message: dict[str, Any],
        timeout_s: float,
    ) -> bool:
        """Open the log of a new timeline.

        Args:
            message: the ``serve`` message; its ``log`` field says whether and how the log goes to
                disk.

        Returns:
            True if logs of this timeline or of higher numbers belonged to another history; they
            were dropped.
        """
        if self._current is not None:
            if self._current.empty:
                self._current.close()
            else:
                # The new process may resume from these records.
                with self._lock:
                    self._older.append((self._timeline, self._current))
        to_disk = message.get("log")
        self._timeline = message["timeline"]
        segments = open_segments(
            self._seams,
            self._run,
            self._ring,
            to_disk,
            None if to_disk is None else identity_from_wire(message["identity"]),
            channel.post,
            lambda number: trainer.send({"kind": "logged", "upto": number}),
            timeout_s=timeout_s,
        )
        self._current = LogStore(trainer.arena, segments)
        served = self._timeline
        if not self.served_timelines.start_timeline(served):
            return False
        self._drop(lambda number: number >= served)
        return True

    def on_message(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Handle ``log_layout``, ``log``, ``forget_log`` or ``log_to_disk``.

        Raises:
            KeeperError: the message is invalid.
        """
        kind = message["kind"]
        if kind == "log_layout":
            receive_layout(trainer.log_layouts, message)
        elif kind == "log_to_disk":
            if self._current is not None and self._current.arena is trainer.arena:
                self._current.to_disk(bool(message["on"]))
        elif kind == "forget_log":
            for log in self._all():
                if log.arena is trainer.arena:
                    log.forget(message["upto"])
        else:
            self._add(trainer, message)

    def add_to(self, stats: KeeperStats) -> None:
        """Add the figures of the current log to ``stats``."""
        if self._current is not None:
            self._current.segments.add_to(stats)

    @property
    def current(self) -> LogStore | None:
        """Log of the timeline that is served."""
        return self._current

    @property
    def arenas(self) -> list[Arena]:
        """Arenas that may hold records."""
        return [log.arena for log in self._all()]

    @property
    def memory_step(self) -> int | None:
        """Newest step of the logs that are in memory only; None: there is none."""
        steps = [log.steps for log in self._all() if log.segments.in_memory_only]
        return max((one[1] for one in steps if one is not None), default=None)

    def drop_older(self, timeline: int) -> None:
        """Drop the logs of older timelines: a base of this timeline is durable. Called in any
        thread.
        """
        self._drop(lambda number: number < timeline)

    def _drop(self, is_over: Callable[[int], bool]) -> None:
        with self._lock:
            over = [log for number, log in self._older if is_over(number)]
            self._older = [one for one in self._older if not is_over(one[0])]
        # Outside the lock: closing waits for the log's thread.
        for log in over:
            log.close()

    def recall(
        self, trainer: AttachedTrainer, *, own: bool, timeout_s: float
    ) -> Iterator[tuple[Arena, bytes]]:
        """Yield arena and index of each log, oldest first (see
        :meth:`.log_store.LogStore.to_wire`).

        Pending records are written to disk first, which may take a while; ``trainer`` gets progress
        messages meanwhile.

        Args:
            own: True: include the log of ``trainer`` itself.
        """
        for log in self._all():
            if (log.arena is not trainer.arena or own) and not log.empty:
                # Now: as soon as the new process opens its timeline, the fence forbids this.
                log.flush()
                log.settle(timeout_s, trainer.send_progress)
                index: bytes = msgpack.packb(log.to_wire())
                yield log.arena, index

    @property
    def arriving(self) -> bool:
        """True while a record in memory has no digest yet."""
        return any(log.arriving for log in self._all())

    def look(self) -> Iterator[tuple[Arena, bytes]]:
        """Yield arena and index of each log without flushing or waiting; only digested records are
        included.
        """
        for log in self._all():
            if not log.empty:
                yield log.arena, msgpack.packb(log.to_wire())

    def flush(self) -> None:
        """Write an unfinished segment of the current log to disk, if the log goes to disk."""
        if self._current is not None:
            self._current.flush()

    def settle(self, timeout_s: float) -> None:
        """Wait until the current log is on disk up to its last step mark, if it goes to disk.

        Raises:
            DeadlineError: no progress for ``timeout_s``.
        """
        if self._current is not None:
            self._current.flush()
            self._current.settle(timeout_s)

    def close(self, timeout_s: float) -> None:
        """End all threads after their pending work."""
        for log in self._all():
            try:
                log.settle(timeout_s)
            except DeadlineError as error:
                _log.error("%s", error)
            log.close()

    def _all(self) -> list[LogStore]:
        with self._lock:
            older = [log for _, log in self._older]
        return [*older, *([] if self._current is None else [self._current])]

    def _add(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        objects = message["objects"]
        if objects is None:
            # Too large for one message: sent before, as chunks under the negative record number.
            chunks = trainer.objects.pop(-message["number"], {})
            objects = {name: bytes(data) for name, data in chunks.items()}
        layout = trainer.log_layouts[message["layout"]]
        head = RecordHead(*message["head"])
        if self._current is None or head.timeline != self._timeline:
            raise KeeperError(
                f"received a log record of timeline {head.timeline}, which is not served"
            )
        # Offsets come from another process: an invalid one must not read beyond the arena.
        if not 0 <= message["offset"] <= trainer.arena.size_bytes - layout.size_bytes:
            raise KeeperError("received a log record that lies outside the arena")
        self._current.add(message["number"], head, layout, objects, message["offset"])
