"""What ranks tell each other at a start that they hold of bases, and what comes of it."""

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

__all__ = ["CopyOffer", "FetchResult", "FetchedBase", "OfferExtras", "unproven_marker"]


@dataclass(frozen=True, slots=True)
class FetchedBase:
    """What has come from another node: from the memory there, or from a disk.

    Attributes:
        record: of the timeline that it is of.
        tier: where it was found.
        disk: it was on the disk of another rank.
    """

    held: HeldBase
    record: TimelineRecord
    tier: str = "peer"
    disk: bool = False

    @classmethod
    def of_own(cls, copy: PeerCopy) -> FetchedBase:
        """What lies in the memory of this rank's own keeper."""
        held = HeldBase(copy.marker, files_over(copy.marker, copy.memory), durable=False)
        return cls(held, copy.timeline, "memory")

    def is_of(self, inventory: Inventory) -> bool:
        """Whether its timeline is what this disk has under that number, or it has none (I7)."""
        known = inventory.timelines.get(self.record.timeline)
        return known is None or known == self.record


@dataclass(frozen=True, slots=True)
class CopyOffer:
    """A rank's files of a base that some rank can hand out.

    Attributes:
        holder: that rank.
        disk: they are on its disk; otherwise a copy in the memory of its keeper.
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
        """Names it among all that the holder has."""
        return self.base, self.marker.rank, False

    @property
    def size_bytes(self) -> int:
        return size_of(self.marker)

    @property
    def key(self) -> tuple[int, ...]:
        """Names it among all of them."""
        front = self.holder, self.marker.rank, self.base.timeline, self.base.step
        return (*front, 2) if self.disk else front


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What has come to a rank.

    Attributes:
        logs: steps of its own log.
        proven: of the base in the memory of its own keeper that its disk knows no timeline of:
            the record of that, where others have proven which one it is.
    """

    bases: list[FetchedBase]
    logs: list[FetchedLog]
    proven: TimelineRecord | None = None


@dataclass(frozen=True, slots=True)
class OfferExtras:
    """What a rank can tell beside what it offers, if it is asked.

    Attributes:
        unproven: the base that its keeper holds, of a timeline that its disk knows nothing of.
        left: what it can read, with what manifests list and is not there; and whose entries are
            in what it has. Asked for only where no base can be read by all.
    """

    unproven: Marker | None
    left: Callable[[], tuple[Offer, Coverage]]


def unproven_marker(inventory: Inventory | None, held: HeldBase | None) -> Marker | None:
    """What a rank's keeper holds, where the disk knows nothing of its timeline."""
    if inventory is None or held is None or held.id.timeline in inventory.timelines:
        return None
    return held.marker
