"""The logs that a keeper process holds: of the training process, and of those before it."""

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
from everstep.keeper.log.attached import Attached
from everstep.keeper.log.log_store import LogStore, open_log
from everstep.link.channel import BackgroundChannel
from everstep.link.log_records import receive_layout
from everstep.link.messages import identity_from_wire
from everstep.run.fence import timeline_bytes
from everstep.seams import FileSystem, Seams

if TYPE_CHECKING:
    from everstep.link.keeper_stats import KeeperStats

__all__ = [
    "Histories",
    "Logs",
]


class Histories:
    """The timelines that were served, by what their records were then.

    A folder that is put back as it was once (from a copy, or a snapshot of its disk) has the same
    run and the same path, so the next process finds the same keeper; but it opens a timeline of a
    number that there was already, and what the keeper has of that one and those behind it is
    of a history that the folder knows nothing of.
    """

    def __init__(self, filesystem: FileSystem, run: PurePath) -> None:
        self._filesystem = filesystem
        self._run = run
        self._records: dict[int, bytes] = {}

    def begins(self, timeline: int) -> bool:
        """A timeline is served from now on; returns whether what there is of it and of those behind
        it is of another history."""
        known = self._records
        record = timeline_bytes(self._filesystem, self._run, timeline)
        other = known.get(timeline) not in (None, record) or any(n > timeline for n in known)
        self._records = {number: known[number] for number in known if number < timeline}
        if record is not None:
            self._records[timeline] = record
        return other

    def to_wire(self) -> list[list[int | bytes]]:
        """For ``recalled``."""
        return [[number, record] for number, record in self._records.items()]


_log = logging.getLogger("everstep.keeper")


class Logs:
    """One log for each timeline that was served, until a newer base is whole: a process that is
    killed before its first one needs what those before it have left.

    Attributes:
        histories: the timelines that were served, and whether they still are those of the folder.
    """

    def __init__(self, seams: Seams, run: PurePath, ring: ChunkRing) -> None:
        self._seams = seams
        self._run = run
        self._ring = ring
        self._timeline = 0
        self.histories = Histories(seams.filesystem, run)
        self._current: LogStore | None = None
        self._older: list[tuple[int, LogStore]] = []  # with their timelines
        self._lock = threading.Lock()

    def serve(
        self,
        trainer: Attached,
        channel: BackgroundChannel,
        message: dict[str, Any],
        timeout_s: float,
    ) -> bool:
        """A new timeline; ``message`` says whether its log is put on disk. Returns whether what
        there was of it, and of those behind it, is of another history; such logs are dropped."""
        if self._current is not None:
            if self._current.empty:
                self._current.close()
            else:
                with self._lock:
                    self._older.append((self._timeline, self._current))
        to_disk = message.get("log")
        self._timeline = message["timeline"]
        self._current = open_log(
            self._seams,
            self._run,
            self._ring,
            trainer.arena,
            to_disk,
            None if to_disk is None else identity_from_wire(message["identity"]),
            channel.post,
            lambda number: trainer.tell({"kind": "logged", "upto": number}),
            timeout_s=timeout_s,
        )
        served = self._timeline
        if not self.histories.begins(served):
            return False
        self._drop(lambda number: number >= served)
        return True

    def on_message(self, trainer: Attached, message: dict[str, Any]) -> None:
        """``log_layout``, ``log``, ``forget_log`` or ``log_to_disk``.

        Raises:
            KeeperError: it makes no sense.
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
        """Notes what the log of the current timeline has on disk."""
        if self._current is not None:
            self._current.add_to(stats)

    @property
    def current(self) -> LogStore | None:
        """Of the timeline that is served."""
        return self._current

    @property
    def arenas(self) -> list[Arena]:
        """The memory that records lie in, or may."""
        return [log.arena for log in self._all()]

    @property
    def memory_step(self) -> int | None:
        """The newest step of logs that are in memory only."""
        steps = [log.steps for log in self._all() if log.in_memory_only]
        return max((one[1] for one in steps if one is not None), default=None)

    def drop_older(self, timeline: int) -> None:
        """A base of this timeline is whole: nothing needs the logs of those before it; in any
        thread."""
        self._drop(lambda number: number < timeline)

    def _drop(self, is_over: Callable[[int], bool]) -> None:
        with self._lock:
            over = [log for number, log in self._older if is_over(number)]
            self._older = [one for one in self._older if not is_over(one[0])]
        for log in over:
            log.close()

    def recall(
        self, trainer: Attached, *, own: bool, timeout_s: float
    ) -> Iterator[tuple[Arena, bytes]]:
        """Arena and index of each log, oldest first (see :meth:`.log.LogStore.to_wire`). What is to
        go to disk goes there first; ``trainer`` is told that this goes on.

        Args:
            own: those of ``trainer`` itself, too.
        """
        for log in self._all():
            if (log.arena is not trainer.arena or own) and not log.empty:
                log.flush()  # now: it is fenced off as soon as there is a new timeline
                log.settle(timeout_s, trainer.goes_on)
                index: bytes = msgpack.packb(log.to_wire())
                yield log.arena, index

    @property
    def arriving(self) -> bool:
        """Whether a record is in memory that has no digest yet."""
        return any(log.arriving for log in self._all())

    def look(self) -> Iterator[tuple[Arena, bytes]]:
        """As :meth:`recall`, of all that has a digest; nothing is flushed or waited for."""
        for log in self._all():
            if not log.empty:
                yield log.arena, msgpack.packb(log.to_wire())

    def flush(self) -> None:
        """What is left of an unfinished batch goes to disk, if it will at all."""
        if self._current is not None:
            self._current.flush()

    def settle(self, timeout_s: float) -> None:
        """Returns when the current log is on disk up to its last mark, if it will be at all.

        Raises:
            DeadlineError: nothing of it was written for ``timeout_s``.
        """
        if self._current is not None:
            self._current.flush()
            self._current.settle(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Ends all threads, behind what they have to do."""
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

    def _add(self, trainer: Attached, message: dict[str, Any]) -> None:
        objects = message["objects"]
        if objects is None:  # too large for one message
            parts = trainer.objects.pop(-message["number"], {})
            objects = {name: bytes(data) for name, data in parts.items()}
        layout = trainer.log_layouts[message["layout"]]
        head = RecordHead(*message["head"])
        if self._current is None or head.timeline != self._timeline:
            raise KeeperError(f"a record of timeline {head.timeline}, which is not served")
        if not 0 <= message["offset"] <= trainer.arena.size_bytes - layout.size_bytes:
            raise KeeperError("a record outside of the arena")
        self._current.add(message["number"], head, layout, objects, message["offset"])
