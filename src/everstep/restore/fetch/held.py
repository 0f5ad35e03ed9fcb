"""A base in the memory of a keeper that has outlived its training process."""

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

__all__ = ["HeldBase", "KeeperContents"]

_log = logging.getLogger("everstep")


@dataclass(frozen=True, slots=True)
class HeldBase:
    """A whole base, mostly in memory; verified while it is read, like one on disk.

    Attributes:
        marker: as it is, or would be, on disk.
        files: its files, with their records.
        durable: whether it is on disk, too.
    """

    marker: Marker
    files: tuple[tuple[ReadFile, FileRecord], ...]
    durable: bool

    @property
    def id(self) -> BaseId:
        return BaseId(self.marker.timeline, self.marker.step)

    def open(self) -> OpenBase:
        """Opens it for reading.

        Raises:
            DamageError, FormatError: for what the headers say.
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
    """What a keeper has in memory.

    Attributes:
        base: the newest whole one.
        records: of the log, in the order in which they were made.
        copies: held for other ranks, and of this one what lives in memory.
        logs: steps of their logs that are held.
        served: what ``timeline.json`` was when the keeper came to serve each timeline.
        missed: it could not be asked, as it serves another process now.
    """

    base: HeldBase | None = None
    records: tuple[LogRecord, ...] = field(default=())
    copies: tuple[PeerCopy, ...] = ()
    logs: tuple[PeerLog, ...] = ()
    served: Mapping[int, bytes] = field(default_factory=dict)
    missed: bool = False

    def of_history(self, filesystem: FileSystem, run: PurePath) -> KeeperContents:
        """Without what is of another history: who puts the folder back as it was once, and goes on
        from there without this keeper, opens the same timelines again. A base of the one with the
        log of the other behind it would be a state that nobody has ever had."""
        others = [
            number
            for number, record in self.served.items()
            if timeline_bytes(filesystem, run, number) not in (None, record)
        ]
        if not others:
            return self
        first = min(others)
        _log.warning(
            "%s: a keeper has steps from timeline %d on in memory, which another process has "
            "opened in this folder since: they are left out",
            run,
            first,
        )
        base = None if self.base is None or self.base.id.timeline >= first else self.base
        records = tuple(record for record in self.records if record.head.timeline < first)
        return replace(self, base=base, records=records)

    @property
    def newest(self) -> HeldBase | None:
        """For a process that trains alone: the newest base, of those that live in memory, too."""
        copies = [
            HeldBase(copy.marker, files_over(copy.marker, copy.memory), durable=False)
            for copy in self.copies
        ]
        bases = [*copies, *([] if self.base is None else [self.base])]
        return max(bases, key=lambda base: base.id, default=None)
