"""Copies in the memory of another node, as one of a keeper's duties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError
from everstep.format.names import TIMELINE_RECORD, timeline_dir
from everstep.format.reader import read_record_bytes
from everstep.format.records import FileRecord, Marker
from everstep.keeper.held import base_from_wire, base_to_wire
from everstep.keeper.holding import Holding
from everstep.keeper.peer_store import PeerStore
from everstep.keeper.seat import Seat
from everstep.recover.held import HeldBase
from everstep.recover.scan import scan_base
from everstep.seams import Clock, FileSystem, ReadFile

if TYPE_CHECKING:  # loaded where there are several ranks
    from everstep.keeper.commits import RankCommits
    from everstep.keeper.replicator import Replicator, ReplicatorStats, Source

__all__ = ["Peers"]


class Peers:
    """What a keeper holds for others, and what it sends to its own peer.

    Args:
        holding: what this rank has captured last, which is read from there as long as it is there.
    """

    def __init__(self, filesystem: FileSystem, run: PurePath, holding: Holding) -> None:
        self._filesystem, self._run, self._holding = filesystem, run, holding
        self._rank = 0
        self.store = PeerStore()
        self.replicator: Replicator | None = None

    def serve(
        self,
        told: Mapping[str, Any] | None,
        seat: Seat | None,
        commits: RankCommits | None,
        clock: Clock,
        tell: Callable[[EverstepError], None],
        *,
        timeout_s: float,
    ) -> None:
        """A new timeline begins.

        Args:
            told: ``bound_bytes`` for copies of others, ``bytes_per_s`` of what is sent; None: no
                rank sends anything.
            tell: told of what fails; training goes on.
        """
        self.close()
        if told is None or seat is None or commits is None or seat.peer is None:
            self.store = PeerStore()
            return
        from everstep.keeper.replicator import Pace, Replicator

        self._rank = seat.rank
        recovered = seat.recovered
        self.store.new_start(told["bound_bytes"], seat.sources, recovered)
        self.replicator = Replicator(
            seat,
            self.store,
            Pace(told["bytes_per_s"]),
            clock,
            self._find,
            commits.send,
            tell,
            timeout_s=timeout_s,
        )
        commits.on_peer = self.replicator.hear
        self.replicator.start()
        if recovered is not None:  # the copies of a node that was replaced are gone
            self.replicator.durable(recovered)

    def base_durable(self, base: BaseId) -> None:
        """A base of this rank is durable."""
        if self.replicator is not None:
            self.replicator.durable(base)

    def recall(self) -> tuple[list[dict[str, Any]], list[Arena]]:
        """What is held for other ranks, as messages hold it; and the memory it lies in."""
        found, arenas = [], []
        for copy, arena in self.store.whole():
            found.append({"marker": copy.marker.encode(), "record": copy.record})
            arenas.append(arena)
        return found, arenas

    @property
    def stats(self) -> ReplicatorStats:
        """What was sent since the timeline began."""
        from everstep.keeper.replicator import ReplicatorStats

        return ReplicatorStats() if self.replicator is None else self.replicator.stats

    def close(self) -> None:
        """Sends no more; what is held stays."""
        replicator, self.replicator = self.replicator, None
        if replicator is not None:
            replicator.close()

    def _find(self, base: BaseId) -> Source | None:
        try:
            path = timeline_dir(self._run, base.timeline) / TIMELINE_RECORD
            record = read_record_bytes(self._filesystem, path)
            found = self._in_memory(base) or self._on_disk(base)
        except (OSError, EverstepError):
            return None
        return None if found is None else (found, record)

    def _in_memory(self, base: BaseId) -> HeldBase | None:
        there = self._holding.durable(base)
        if there is None:
            return None
        capture, arena = there
        fields, blobs = base_to_wire(capture)
        held = base_from_wire(fields, dict(enumerate(blobs)), arena)
        files = tuple(
            (_Twofold(file, lambda: self._holding.has(capture), self._opener(base, record)), record)
            for file, record in held.files
        )
        return HeldBase(held.marker, files, durable=True)

    def _on_disk(self, base: BaseId) -> HeldBase | None:
        found = scan_base(self._filesystem, self._run, base)
        if found.status != "committed" or found.manifest is None:
            return None
        if self._rank >= len(found.manifest.markers):
            return None
        marker: Marker = found.manifest.markers[self._rank]
        files = tuple(
            (self._filesystem.open(found.path / record.name), record) for record in marker.files
        )
        return HeldBase(marker, files, durable=True)

    def _opener(self, base: BaseId, record: FileRecord) -> Callable[[], ReadFile]:
        def open_file() -> ReadFile:
            path = scan_base(self._filesystem, self._run, base).path / record.name
            return self._filesystem.open(path)

        return open_file


class _Twofold:
    """A file that is read from memory as long as it is there, and then from the disk.

    The memory may be written over between the two looks at ``is_there``: what was read then does
    not have its digest, and whoever receives it says so.
    """

    def __init__(
        self, memory: ReadFile, is_there: Callable[[], bool], open_file: Callable[[], ReadFile]
    ) -> None:
        self._memory, self._is_there, self._open = memory, is_there, open_file
        self._disk: ReadFile | None = None

    @property
    def size_bytes(self) -> int:
        return self._memory.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if self._is_there():
            got = self._memory.read_into(buffer, offset)
            if self._is_there():
                return got
        if self._disk is None:
            self._disk = self._open()
        return self._disk.read_into(buffer, offset)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
