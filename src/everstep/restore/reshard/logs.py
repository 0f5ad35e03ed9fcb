"""Logs of ranks that trained in another number, or in another layout (``docs/design/ranks.md``).

Each segment is read by one rank of this job. Ranks that see the same disk share out its segments;
all ranks share out those in copies. Records in the memory of a keeper are read by the rank that it
serves.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.commit import BaseId
from everstep.commit.log_reach import LogRun, runs_of
from everstep.errors import DamageError, FormatError
from everstep.format.log import LogRecord
from everstep.format.writer import ChunkRing
from everstep.restore.fetch import PeerLog
from everstep.restore.fetch.held import unpack_steps
from everstep.restore.log import LogFound, LogReader
from everstep.run import Inventory, Skipped
from everstep.seams import FileSystem

_log = logging.getLogger("everstep")


@dataclass(frozen=True, slots=True)
class LogsInMemory:
    """Log records in the memory of keepers on this machine.

    Attributes:
        records: by the rank that wrote them.
        held: steps of the logs of ranks on other nodes.
    """

    records: Mapping[int, Sequence[LogRecord]]
    held: Sequence[PeerLog] = ()

    def of(self, source: int, inventory: Inventory) -> list[LogRecord]:
        """Return all records of one rank, of timelines that mean the same on this disk (I7)."""
        known = inventory.timelines
        found = [
            record
            for record in self.records.get(source, ())
            if known.get(record.head.timeline) is not None
        ]
        there = {(record.head.kind, record.head.timeline, record.head.lsn) for record in found}
        for log in self.held:
            timeline = known.get(log.steps.run.timeline)
            # Records are compared, not numbers: two starts may have opened the same timeline
            # number.
            if log.source != source or timeline is None or timeline.encode() != log.record:
                continue
            try:
                records = unpack_steps(log.steps)
            except (DamageError, FormatError) as error:
                _log.warning("steps of the log of rank %d are unusable: %s", source, error)
                continue
            for record in records:
                head = record.head
                if (head.kind, head.timeline, head.lsn) not in there:
                    found.append(record)
        return found


class ReshardedLogs:
    """The logs of the old ranks that this rank reads.

    Args:
        filesystem: file system of the run folder.
        rank, world: rank, and number of ranks, in the job that starts.
        memory: records in the memory of keepers.
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
        # By number of ranks that wrote it, and rank.
        self._logs: dict[tuple[int, int], LogReader] = {}
        self._worlds: dict[int, int] = {}
        self._repaired: list[Skipped] = []

    def look(
        self,
        inventory: Inventory,
        copies: Sequence[tuple[FileSystem, Inventory]],
        bases: Collection[BaseId],
        *,
        near: Sequence[int],
        relaid: bool = False,
    ) -> dict[int, tuple[LogRun, ...]]:
        """Scan the logs; return the runs of steps by the rank that wrote them.

        Args:
            copies: places with copies of the run, nearest first.
            bases: bases that this rank could start from; of copies only records that lead on from
                these count.
            near: ranks that see the same disk, including this one.
            relaid: include logs of as many ranks as this job has.

        Raises:
            OSError: a directory cannot be read.
        """
        # Readers of an earlier scan may still have reads in flight into the buffers of the ring.
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
                # All ranks compute the same shares, so each log on this disk is read by exactly one
                # of them.
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
                    reader = log.reader(self._filesystem, self._ring, self._timeout_s)
                    self._logs[world, source] = reader
                    found.setdefault(source, []).extend(runs)
        return {source: tuple(runs) for source, runs in found.items()}

    @property
    def skipped(self) -> Iterator[Skipped]:
        """Unusable segments, and damaged records that were read from another place."""
        yield from self._repaired
        for log in self._logs.values():
            yield from log.found.skipped

    def has(self, source: int, timeline: int) -> bool:
        """Return True if this rank reads the log of ``source`` on a timeline."""
        return (self._worlds.get(timeline), source) in self._logs

    def records(self, source: int, timeline: int, step: int) -> list[LogRecord]:
        """Return the updates and the mark of a step, verified.

        Raises:
            EverstepError: a record cannot be read, or is damaged in every place.
            LookupError: there are none, or another rank reads them.
        """
        log = self._logs[self._worlds[timeline], source]
        try:
            return log.step_of(timeline, step)
        finally:
            self._repaired += log.take_repaired()

    def close(self) -> None:
        """Cancel outstanding reads. Idempotent."""
        for log in self._logs.values():
            log.close()


def _only(inventory: Inventory, timelines: Collection[int]) -> Inventory:
    """Return the inventory restricted to these timelines."""
    chosen = {n: record for n, record in inventory.timelines.items() if n in timelines}
    return replace(inventory, timelines=chosen)
