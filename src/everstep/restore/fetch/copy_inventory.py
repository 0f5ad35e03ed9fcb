"""Messages that list the base copies each rank can serve at a start, and the results of
fetching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep.commit.job.offers import Offer
from everstep.commit.lineage import BaseId
from everstep.format.records import Marker, TimelineRecord
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.peer_copy import PeerCopy, files_over, size_of
from everstep.restore.fetch.peer_log import FetchedLog
from everstep.restore.fetch.served_files import Coverage
from everstep.run.scan import Inventory

__all__ = ["CopyOffer", "FetchResult", "FetchedBase", "OfferExtras"]


@dataclass(frozen=True, slots=True)
class FetchedBase:
    """Base files fetched from another node.

    Attributes:
        held: the files in memory.
        record: timeline record of the base.
        tier: tier in which they were found.
        disk: they were on the disk of another rank.
    """

    held: HeldBase
    record: TimelineRecord
    tier: str = "peer"
    disk: bool = False

    @classmethod
    def of_own(cls, copy: PeerCopy) -> FetchedBase:
        """Wrap a copy in the memory of this rank's own keeper."""
        held = HeldBase(copy.marker, files_over(copy.marker, copy.memory), durable=False)
        return cls(held, copy.timeline, "memory")

    def is_of(self, inventory: Inventory) -> bool:
        """Return True if this disk has the same timeline under that number, or none (I7)."""
        known = inventory.timelines.get(self.record.timeline)
        return known is None or known == self.record


@dataclass(frozen=True, slots=True)
class CopyOffer:
    """One rank's files of a base that rank ``holder`` can serve.

    Attributes:
        holder: rank that can serve them.
        marker: marker of the files.
        record: timeline record of the base, as bytes.
        disk: they are on its disk; otherwise in the memory of its keeper.
    """

    holder: int
    marker: Marker
    record: bytes
    disk: bool = False

    @property
    def base(self) -> BaseId:
        return BaseId(self.marker.timeline, self.marker.step)

    @property
    def place(self) -> tuple[BaseId, int, bool]:
        """Key among everything that the holder has."""
        return self.base, self.marker.rank, False

    @property
    def size_bytes(self) -> int:
        return size_of(self.marker)

    @property
    def key(self) -> tuple[int, ...]:
        """Key among all offers."""
        front = self.holder, self.marker.rank, self.base.timeline, self.base.step
        return (*front, 2) if self.disk else front


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Result of fetching on one rank.

    Attributes:
        bases: fetched files of bases.
        logs: fetched steps of its own log.
        proven: timeline record of the base in its keeper's memory, if its disk has none and other
            ranks
            proved it.
    """

    bases: list[FetchedBase]
    logs: list[FetchedLog]
    proven: TimelineRecord | None = None


@dataclass(frozen=True, slots=True)
class OfferExtras:
    """Information of a rank besides its offer.

    Attributes:
        unproven: marker of the base that its keeper holds, of a timeline unknown to its disk.
        left: returns its offer with markers of missing files, and the coverage of its disk. Called
            only
            if no base can be read by all ranks.
    """

    unproven: Marker | None
    left: Callable[[], tuple[Offer, Coverage]]
