"""Base, log records and copies in the memory of a keeper that outlived its training process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from everstep.commit.lineage import BaseId
from everstep.format.log import LogRecord
from everstep.format.reader import read_header
from everstep.format.records import FileRecord, Marker
from everstep.restore.fetch.peer_copy import PeerCopy, files_over
from everstep.restore.fetch.peer_log import PeerLog
from everstep.run.fence import timeline_bytes
from everstep.run.open_base import OpenBase, check_identity
from everstep.seams import FileSystem, ReadFile

_log = logging.getLogger("everstep")


@dataclass(frozen=True, slots=True)
class HeldBase:
    """Complete base, mostly in memory; verified while it is read, like one on disk.

    Attributes:
        marker: marker that is, or would be, on disk.
        files: files, each with its record.
        durable: the base is on disk as well.
    """

    marker: Marker
    files: tuple[tuple[ReadFile, FileRecord], ...]
    durable: bool

    @property
    def id(self) -> BaseId:
        return BaseId(self.marker.timeline, self.marker.step)

    @classmethod
    def of_copy(cls, marker: Marker, memory: memoryview) -> HeldBase:
        """Wrap the files of a copy, which are stored one after the other in ``memory``."""
        return cls(marker, files_over(marker, memory), durable=False)

    def open(self) -> OpenBase:
        """Open the base for reading.

        Raises:
            DamageError, FormatError: a header is damaged or invalid.
        """
        opened = OpenBase(self.marker)
        for file, record in self.files:
            path = PurePath("memory") / record.name
            header = check_identity(read_header(file, record, path), self.marker, path)
            opened.shards.append((file, record, header, path))
        opened.split_redo_file()
        return opened


@dataclass(frozen=True, slots=True)
class KeeperContents:
    """Contents of a keeper's memory.

    Attributes:
        base: newest complete base.
        records: records of the log, in the order in which they were made.
        copies: copies held for other ranks, and bases of this rank that live in memory only.
        logs: steps of other ranks' logs.
        served: bytes of ``timeline.json`` when the keeper began to serve each timeline.
        missed: True if the keeper could not be queried, since it serves another process now.
    """

    base: HeldBase | None = None
    records: tuple[LogRecord, ...] = field(default=())
    copies: tuple[PeerCopy, ...] = ()
    logs: tuple[PeerLog, ...] = ()
    served: Mapping[int, bytes] = field(default_factory=dict)
    missed: bool = False

    def of_history(self, filesystem: FileSystem, run: PurePath) -> KeeperContents:
        """Return the contents without those of another history.

        If the folder was put back to an earlier state and training continued from there without
        this keeper, the same timeline numbers were opened again. A base of one history with the log
        of the other would be a state that never existed.
        """

        def is_other(number: int, record: bytes) -> bool:
            # A record that is missing or cannot be read (None) does not prove another history.
            return timeline_bytes(filesystem, run, number) not in (None, record)

        # Each copy carries the record of its timeline: the keeper need not have served it.
        copies = tuple(
            copy for copy in self.copies if not is_other(copy.marker.timeline, copy.record)
        )
        mine = replace(self, copies=copies)
        others = [number for number, record in self.served.items() if is_other(number, record)]
        if not others:
            return mine
        # Later timelines of the keeper descend from this one, even if their numbers are still free
        # in this folder.
        first = min(others)
        _log.warning(
            "%s: the keeper's steps of timeline %d and later are ignored: another process "
            "opened that timeline again in this folder",
            run,
            first,
        )
        base = None if self.base is None or self.base.id.timeline >= first else self.base
        records = tuple(record for record in self.records if record.head.timeline < first)
        return replace(mine, base=base, records=records)

    @property
    def newest(self) -> HeldBase | None:
        """Newest base for a process that trains alone, including bases that live in memory only."""
        copies = [HeldBase.of_copy(copy.marker, copy.memory) for copy in self.copies]
        bases = [*copies, *([] if self.base is None else [self.base])]
        return max(bases, key=lambda base: base.id, default=None)
