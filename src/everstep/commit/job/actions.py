"""Actions, events and reports of :mod:`everstep.commit.job.member`.

Those of commits and deletions are in their own modules.
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


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and timeouts of a rank.

    Attributes:
        repeat_s: seconds between repetitions of an unanswered message.
        take_over_s: seconds without a manifest after which a rank requests the markers itself.
        late_s: seconds without a manifest after which a rank reports the missing ranks.
    """

    repeat_s: float = 1.0
    take_over_s: float = 10.0
    late_s: float = 120.0


# Actions of a driver, besides those of commits and deletions, and the events that answer them.


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Remove this rank's marker of the base durably, then its files; answer with
    :class:`Withdrawn`."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Read this rank's files of the base back; answer with :class:`ReadBackDone`."""


@dataclass(frozen=True, slots=True)
class LookAtBases:
    """List the bases committed on this rank's disk; answer with :class:`BasesSeen`.

    Attributes:
        damaged: bases known to be damaged, from which nothing can be replayed.
    """

    damaged: tuple[BaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class Delete:
    """One action of the deletion of the base."""

    action: DeletionAction


@dataclass(frozen=True, slots=True)
class Perform:
    """Perform an action for a base, then report its event with :meth:`Member.done`."""

    base: BaseId
    action: CommitAction | Delete | Withdraw | ReadBack | LookAtBases


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """This rank's marker of the base is durably absent."""


@dataclass(frozen=True, slots=True)
class ReadBackDone:
    """Result of a read-back; an empty ``problem`` means that the files are intact.

    Attributes:
        newest: newest timeline of the run, looked up after reading if there is a problem: a newer
            timeline may rightly have deleted the base.
    """

    problem: str = ""
    newest: int = 0


@dataclass(frozen=True, slots=True)
class BasesSeen:
    """Bases committed on this rank's disk, and the forks of timelines.

    Attributes:
        needed: bases without which a logged step on this disk could not be replayed.
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
    """``base`` is committed on this rank's disk, so the files of every rank are durable."""

    base: BaseId


@dataclass(frozen=True, slots=True)
class GaveUp:
    """``base`` will not exist, because a rank could not write its files."""

    base: BaseId
    reason: str


@dataclass(frozen=True, slots=True)
class BaseLate:
    """``base`` still waits for the markers of the ``missing`` ranks; report it."""

    base: BaseId
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BaseDamaged:
    """``base`` was committed, and ``rank`` found it damaged; report it."""

    base: BaseId
    rank: int
    problem: str


@dataclass(frozen=True, slots=True)
class WatermarkMoved:
    """Everything older than ``base`` may be reclaimed in each tier
    (:mod:`everstep.commit.retention`)."""

    base: BaseId
    before: BaseId | None


@dataclass(frozen=True, slots=True)
class Fenced:
    """A newer timeline has begun: this rank no longer commits or deletes."""

    error: FencedError


Out = Perform | Send | BaseDurable | GaveUp | BaseLate | BaseDamaged | WatermarkMoved | Fenced
