"""The logs that a keeper holds: of the attached training process, and of earlier ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgpack

from everstep.arena import Arena
from everstep.errors import DeadlineError, KeeperError
from everstep.format.log import RecordHead
from everstep.format.writer import ChunkRing
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.log.segment_queue import open_segments
from everstep.keeper.process import AttachedTrainer
from everstep.link.messages import identity_from_wire, receive_layout
from everstep.run.fence import timeline_bytes
from everstep.seams import FileSystem, Seams

if TYPE_CHECKING:
    from everstep.keeper.process.duty import Handler, ServedTimeline
    from everstep.link.messages import KeeperStats


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

    Args:
        on_record: called before each record of the attached process.

    Attributes:
        current: log of the timeline that is served; None before the first.
        served_timelines: records of the served timelines, to detect a restored folder.
    """

    def __init__(
        self, seams: Seams, run: PurePath, ring: ChunkRing, on_record: Callable[[], None]
    ) -> None:
        self._on_record = on_record
        self._timeout_s = 0.0
        self._bases_durable = 0
        self._seams = seams
        self._run = run
        self._ring = ring
        self._timeline = 0
        self.served_timelines = ServedTimelines(seams.filesystem, run)
        self.current: LogStore | None = None
        # With their timelines.
        self._older: list[tuple[int, LogStore]] = []
        # The writing thread drops older logs while the serving thread reads or adds some.
        self._lock = threading.Lock()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of messages about the log."""
        return {
            "log_layout": self._add_layout,
            "log": self._add,
            "forget_log": self._forget,
            "log_to_disk": self._to_disk,
        }

    def serve(self, timeline: ServedTimeline) -> None:
        """Open the log of a timeline; its ``log`` setting says whether the log goes to disk."""
        if self.current is not None:
            if self.current.empty:
                self.current.close()
            else:
                # The new process may resume from these records.
                with self._lock:
                    self._older.append((self._timeline, self.current))
        trainer = timeline.trainer
        to_disk = timeline.settings.get("log")
        self._timeline = number = timeline.number
        self._timeout_s = timeline.timeout_s
        self._bases_durable = 0
        segments = open_segments(
            self._seams,
            self._run,
            self._ring,
            to_disk,
            None if to_disk is None else identity_from_wire(timeline.settings["identity"]),
            timeline.channel.post,
            lambda upto: trainer.send({"kind": "logged", "upto": upto}),
            timeout_s=timeline.timeout_s,
        )
        self.current = timeline.log = LogStore(trainer.arena, segments)
        if timeline.put_back:
            self._drop(lambda older: older >= number)

    def _add_layout(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        receive_layout(trainer.log_layouts, message)

    def _to_disk(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        if self.current is not None and self.current.arena is trainer.arena:
            self.current.to_disk(bool(message["on"]))

    def _forget(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        # Older logs, too: a trainer that opens another timeline keeps its arena for both logs.
        for log in self._all():
            if log.arena is trainer.arena:
                log.forget(message["upto"])

    def add_to(self, stats: KeeperStats) -> None:
        """Add the figures of the current log to ``stats``."""
        if self.current is not None:
            self.current.segments.add_to(stats)

    @property
    def arenas(self) -> list[Arena]:
        """Arenas that may hold records."""
        return [log.arena for log in self._all()]

    @property
    def memory_step(self) -> int | None:
        """Newest step of the logs that are in memory only; None: there is none."""
        steps = [log.steps for log in self._all() if log.segments.in_memory_only]
        return max((one[1] for one in steps if one is not None), default=None)

    def base_durable(self, timeline: int, *, at_peers: bool) -> None:
        """Drop the logs before a base of this timeline that is durable on all ranks. Called in the
        writing thread.

        Args:
            at_peers: peers hold the log, too. Then recovery from the loss of a node needs the log
                before the first base that all peers hold: it is dropped after two more durable
                bases at the latest.
        """
        self._bases_durable += 1
        if not at_peers or self._bases_durable > 2:
            self.drop_older(timeline)

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

    def recall(self, trainer: AttachedTrainer, *, own: bool) -> Iterator[tuple[Arena, bytes]]:
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
                log.settle(trainer.timeout_s, trainer.send_progress)
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
        if self.current is not None:
            self.current.flush()

    def settle(self) -> None:
        """Wait until the current log is on disk up to its last step mark, if it goes to disk.

        Raises:
            DeadlineError: no progress for too long.
        """
        if self.current is not None:
            self.current.flush()
            self.current.settle(self._timeout_s)

    def close(self, *, timeout_s: float = 0.0) -> None:
        """End all threads after their pending work."""
        self.flush()
        for log in self._all():
            try:
                log.settle(timeout_s)
            except DeadlineError as error:
                _log.error("%s", error)
            log.close()

    def _all(self) -> list[LogStore]:
        with self._lock:
            older = [log for _, log in self._older]
        return [*older, *([] if self.current is None else [self.current])]

    def _add(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        self._on_record()
        objects = message["objects"]
        if objects is None:
            # Too large for one message: sent before, as chunks under the negative record number.
            chunks = trainer.objects.pop(-message["number"], {})
            objects = {name: bytes(data) for name, data in chunks.items()}
        layout = trainer.log_layouts[message["layout"]]
        head = RecordHead(*message["head"])
        if self.current is None or head.timeline != self._timeline:
            raise KeeperError(
                f"received a log record of timeline {head.timeline}, which is not served"
            )
        # Offsets come from another process: an invalid one must not read beyond the arena.
        if not 0 <= message["offset"] <= trainer.arena.size_bytes - layout.size_bytes:
            raise KeeperError("received a log record that lies outside the arena")
        self.current.add(message["number"], head, layout, objects, message["offset"])
