"""What a rank of a timeline is asked to do, what comes of it, and what it reports.

The actions and events of :mod:`everstep.commit.job.member`, besides those of commits and deletions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.commit.base_commit import Action as CommitAction
from everstep.commit.base_commit import Event as CommitEvent
from everstep.commit.deletion import DeletionAction, DeletionEvent
from everstep.commit.job.messages import Message
from everstep.commit.lineage import BaseId, Branch
from everstep.errors import FencedError

__all__ = [
    "BaseDamaged",
    "BaseDurable",
    "BaseLate",
    "BasesSeen",
    "Delete",
    "Event",
    "Fenced",
    "GaveUp",
    "LookAtBases",
    "Out",
    "Pace",
    "Perform",
    "ReadBack",
    "ReadBackDone",
    "Send",
    "WatermarkMoved",
    "Withdraw",
    "Withdrawn",
]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a rank waits.

    Attributes:
        repeat_s: until it says again what was not answered.
        take_over_s: for a manifest, until it asks for the markers itself.
        late_s: for a manifest, until it reports which ranks are missing.
    """

    repeat_s: float = 1.0
    take_over_s: float = 10.0
    late_s: float = 120.0


# What a driver is asked to do besides what commits and deletions ask for, and its answers.


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Remove this rank's marker of the base, durably, then its files; answer :class:`Withdrawn`."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Read this rank's files of the base back; answer with :class:`ReadBackDone`."""


@dataclass(frozen=True, slots=True)
class LookAtBases:
    """Which bases are committed on this rank's disk? Answer with :class:`BasesSeen`.

    Attributes:
        damaged: bases that nothing can be replayed from, as far as is known.
    """

    damaged: tuple[BaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class Delete:
    """A part of the deletion of the base."""

    action: DeletionAction


@dataclass(frozen=True, slots=True)
class Perform:
    """Do something about a base, then report what came of it with :meth:`Member.done`."""

    base: BaseId
    action: CommitAction | Delete | Withdraw | ReadBack | LookAtBases


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """This rank's marker of the base is not there, durably."""


@dataclass(frozen=True, slots=True)
class ReadBackDone:
    """What is wrong with this rank's files, or nothing.

    Attributes:
        newest: timeline of the run, looked for after reading where there is a problem: a newer
            one may rightly have deleted the base.
    """

    problem: str = ""
    newest: int = 0


@dataclass(frozen=True, slots=True)
class BasesSeen:
    """What is committed on this rank's disk, and where timelines forked.

    Attributes:
        needed: bases without which a step that the logs there promise could not be replayed.
    """

    committed: tuple[BaseId, ...]
    branches: Mapping[int, Branch]
    needed: tuple[BaseId, ...] = ()


Event = CommitEvent | DeletionEvent | Withdrawn | ReadBackDone | BasesSeen


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``rank``."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class BaseDurable:
    """``base`` is committed: on this rank's disk, and with it the files of every rank."""

    base: BaseId


@dataclass(frozen=True, slots=True)
class GaveUp:
    """``base`` will not exist, because of a rank that could not write its files."""

    base: BaseId
    reason: str


@dataclass(frozen=True, slots=True)
class BaseLate:
    """``base`` waits for the markers of the ``missing`` ranks; to be reported."""

    base: BaseId
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BaseDamaged:
    """``base`` was committed, and ``rank`` finds it damaged; to be reported."""

    base: BaseId
    rank: int
    problem: str


@dataclass(frozen=True, slots=True)
class WatermarkMoved:
    """From now on everything older than ``base`` may be reclaimed, tier by tier
    (:mod:`everstep.commit.retention`)."""

    base: BaseId
    before: BaseId | None


@dataclass(frozen=True, slots=True)
class Fenced:
    """A newer timeline has begun: this rank neither commits nor deletes any more."""

    error: FencedError


Out = Perform | Send | BaseDurable | GaveUp | BaseLate | BaseDamaged | WatermarkMoved | Fenced
