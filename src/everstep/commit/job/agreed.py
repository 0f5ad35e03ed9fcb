"""What the ranks of a job that starts are to do, and what comes of it
(:mod:`everstep.commit.job.agreement`)."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.commit.job.messages import Message
from everstep.commit.job.offers import Choice, Offer, Source
from everstep.format.records import TimelineRecord
from everstep.state.layout.replica_digest import ReplicaDigest

__all__ = [
    "AgreementEvent",
    "AgreementOut",
    "Compare",
    "Compared",
    "Go",
    "InventorySeen",
    "IsSilent",
    "OpenTimeline",
    "Opened",
    "Refuse",
    "Restore",
    "Restored",
    "TakeInventory",
    "Tell",
]


@dataclass(frozen=True, slots=True)
class TakeInventory:
    """Look at what this rank can read; answer with :class:`InventorySeen`.

    Attributes:
        relaid: also at the logs of as many ranks as there are now, as at those of another number.
        partly: say also what manifests list and is not there.
    """

    relaid: bool = False
    partly: bool = False


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare ``choice.base`` with the live state, and touch nothing; answer with
    :class:`Compared`."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Restore:
    """Load what this rank needs of ``choice.base`` (nothing on a fresh start), check its digests,
    and replay this rank's log up to ``choice.reach``; answer with :class:`Restored`."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class OpenTimeline:
    """Create, on this rank's disk and durably: the record of the run, those of the timelines of
    ``choice`` that are missing there, its manifests where they are missing, and last, exclusively,
    ``record``, the fence. Answer with :class:`Opened`."""

    record: TimelineRecord
    choice: Choice


@dataclass(frozen=True, slots=True)
class Go:
    """All ranks have restored ``choice`` and opened ``timeline``: train.

    Attributes:
        exact: what all of them have restored is bit for bit what training had.
    """

    timeline: int
    choice: Choice
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is nothing that all ranks can restore, or what was asked for is not there.

    Attributes:
        unlike: they can, but some of them would leave out what others would not.
    """

    reason: str
    unlike: bool = False


@dataclass(frozen=True, slots=True)
class IsSilent:
    """Rank 0 waits for the answers of ``ranks`` in ``phase``; to be reported."""

    phase: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to ``rank``."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class InventorySeen:
    """What this rank can read."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Compared:
    """What this rank would leave out.

    Attributes:
        damaged, spoilt: as of :class:`Restored`.
        common: of what it has in common with others: the same on all of these, or none restores.
        why: in words.
    """

    damaged: tuple[tuple[int, Source], ...] = ()
    spoilt: tuple[int, int] | None = None
    common: tuple[ReplicaDigest, ...] = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """The state is that of the step that was chosen; or not.

    Attributes:
        damaged: files that are damaged: of which rank, and where.
        spoilt: timeline and step at which this rank's log turned out to be of no use.
        exact: it is bit for bit what training had.
        relaid: the log behind the base is of another layout than this rank has now.
    """

    damaged: tuple[tuple[int, Source], ...] = ()
    spoilt: tuple[int, int] | None = None
    exact: bool = True
    relaid: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """Whether the timeline is this session's on this rank's disk; else its number was taken by
    another start of the job."""

    ours: bool


AgreementOut = TakeInventory | Compare | Restore | OpenTimeline | Go | Refuse | IsSilent | Tell
AgreementEvent = InventorySeen | Compared | Restored | Opened
