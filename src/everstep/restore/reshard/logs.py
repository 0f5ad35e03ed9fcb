"""Logs of ranks that trained in another number than this job has, or in another layout
(``docs/design/ranks.md``): what of them this rank reads, for itself and for the others.

Each segment is looked at, and read, by one rank: those that see the same disk share them out among
each other, all share out what copies have. What lies in a keeper's memory is read by whoever that
keeper serves.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.commit.lineage import BaseId
from everstep.commit.logs import LogRun, runs_of
from everstep.errors import DamageError, FormatError
from everstep.format.log import LogRecord
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.peer_log import PeerLog, unpacked
from everstep.restore.log.log_found import LogFound
from everstep.run.candidates import Skipped
from everstep.run.scan import Inventory
from everstep.seams.files.filesystem import FileSystem

__all__ = ["LogsInMemory", "ReshardedLogs"]

_log = logging.getLogger("everstep")


@dataclass(frozen=True, slots=True)
class LogsInMemory:
    """What keepers on this machine have in memory.

    Attributes:
        records: by the rank that they are the log of.
        held: steps of other ranks' logs.
    """

    records: Mapping[int, Sequence[LogRecord]]
    held: Sequence[PeerLog] = ()

    def of(self, source: int, inventory: Inventory) -> list[LogRecord]:
        """All records of one rank's log, of timelines that are what this disk has under that number
        (I7)."""
        known = inventory.timelines
        found = [
            record
            for record in self.records.get(source, ())
            if known.get(record.head.timeline) is not None
        ]
        there = {(record.head.kind, record.head.timeline, record.head.lsn) for record in found}
        for log in self.held:
            timeline = known.get(log.steps.run.timeline)
            if log.source != source or timeline is None or timeline.encode() != log.record:
                continue
            try:
                records = unpacked(log.steps)
            except (DamageError, FormatError) as error:
                _log.warning("steps of the log of rank %d are of no use: %s", source, error)
                continue
            for record in records:
                head = record.head
                if (head.kind, head.timeline, head.lsn) not in there:
                    found.append(record)
        return found


class ReshardedLogs:
    """What this rank reads of them.

    Args:
        filesystem: of the run folder.
        rank, world: of the job that starts.
        memory: of keepers.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        rank: int,
        world: int,
        memory: LogsInMemory,
        ring: ChunkRing,
        *,
        timeout_s: float,
    ) -> None:
        self._filesystem = filesystem
        self._rank = rank
        self._world = world
        self._memory = memory
        self._ring = ring
        self._timeout_s = timeout_s
        self._logs: dict[tuple[int, int], LogFound] = {}  # by the world that wrote it, and rank
        self._worlds: dict[int, int] = {}
        self._mended: list[Skipped] = []

    def look(
        self,
        inventory: Inventory,
        copies: Sequence[tuple[FileSystem, Inventory]],
        bases: Collection[BaseId],
        *,
        near: Sequence[int],
        relaid: bool = False,
    ) -> dict[int, tuple[LogRun, ...]]:
        """What there is now, by the rank whose log it is.

        Args:
            copies: places that have copies of the run, nearest first.
            bases: that this rank could begin with; of copies only what leads on from there counts.
            near: the ranks that see the same disk, this one among them.
            relaid: of as many ranks as this job has, too.

        Raises:
            OSError: a directory cannot be read.
        """
        self.close()
        self._logs = {}
        self._worlds = {}
        for known in (inventory, *(there for _, there in copies)):
            for number, record in known.timelines.items():
                if record is not None and (relaid or record.world != self._world):
                    self._worlds.setdefault(number, record.world)
        found: dict[int, list[LogRun]] = {}
        for world in sorted(set(self._worlds.values())):
            numbers = {n for n, each in self._worlds.items() if each == world}
            here = _only(inventory, numbers)
            there = [(files, _only(other, numbers)) for files, other in copies]
            for source in range(world):
                mine = near[source * len(near) // world] == self._rank
                nearest = source * self._world // world == self._rank
                records = self._memory.of(source, here)
                if not (mine or records or (nearest and there)):
                    continue
                log = LogFound.of(
                    self._filesystem,
                    here if mine else _only(inventory, ()),
                    (),
                    rank=source,
                    lent=records,
                    copies=there if nearest else (),
                    bases=bases,
                )
                runs = runs_of(log.index.marks, log.index.updates)
                if runs or log.skipped:
                    self._logs[world, source] = log
                    found.setdefault(source, []).extend(runs)
        return {source: tuple(runs) for source, runs in found.items()}

    @property
    def skipped(self) -> Iterator[Skipped]:
        """Segments that cannot be used, and records that were read in another place."""
        yield from self._mended
        for log in self._logs.values():
            yield from log.skipped

    def has(self, source: int, timeline: int) -> bool:
        """Whether this rank reads a log of a timeline that is looked at here."""
        return (self._worlds.get(timeline), source) in self._logs

    def records(self, source: int, timeline: int, step: int) -> list[LogRecord]:
        """Updates and mark of a step, verified.

        Raises:
            EverstepError: one cannot be read, or is damaged in every place.
            LookupError: they are not there, or not this rank's to read.
        """
        log = self._logs[self._worlds[timeline], source]
        about = self._filesystem, self._ring, self._timeout_s
        try:
            return log.step_of(timeline, step, *about)
        finally:
            self._mended += log.take_repaired()

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        for log in self._logs.values():
            log.close()


def _only(inventory: Inventory, timelines: Collection[int]) -> Inventory:
    """An inventory of these timelines."""
    chosen = {n: record for n, record in inventory.timelines.items() if n in timelines}
    return replace(inventory, timelines=chosen)
