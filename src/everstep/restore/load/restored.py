"""State of a restore in progress: a base, and the steps of the log replayed on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.commit.lineage import BaseId
from everstep.restore.load.load import LoadedBase
from everstep.run.candidates import Skipped
from everstep.run.scan import BaseFound

OTHER_STATE = "the log after it belongs to a state of another composition"
"""Reason why a log is not replayed on a state."""


@dataclass(slots=True)
class Restored:
    """Live state while a restore proceeds.

    Attributes:
        base, loaded: None on a fresh start.
        end: timeline and step of the state.
        lsn: LSN of the state.
        replayed: number of steps replayed.
        inexact: why replay is not exact; "" if it is exact, or nothing was replayed.
        load_s, replay_s: seconds spent loading the base and replaying the log.
        skipped: bases and steps that were skipped.
        unreplayed: last step of the log that could not be replayed, and why; None if there is none.
        passed_over: message about a newer base that was passed over because it lacks sections of
            the state.
    """

    base: BaseFound | None = None
    loaded: LoadedBase | None = None
    end: BaseId | None = None
    lsn: int = 0
    replayed: int = 0
    inexact: str = ""
    load_s: float = 0.0
    replay_s: float = 0.0
    skipped: list[Skipped] = field(default_factory=list)
    unreplayed: tuple[BaseId, str] | None = None
    passed_over: str = ""
