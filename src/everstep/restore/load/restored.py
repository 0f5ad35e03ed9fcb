"""State of a restore in progress: a base, and the steps of the log replayed on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.commit.lineage import BaseId
from everstep.restore.load.load import LoadedBase
from everstep.run.candidates import Skipped
from everstep.run.scan import BaseFound

__all__ = ["OTHER_STATE", "Restored"]

OTHER_STATE = "the log after it belongs to a state of another composition"
"""Why a log is not replayed."""


@dataclass(slots=True)
class Restored:
    """What has become of the live state.

    Attributes:
        base, loaded: None on a fresh start.
        end: timeline and step of the state.
        inexact: why replay is not exact; "" if it is, or there was none.
        kept: how far the log leads that could not be replayed, and why; None: no further.
        fewer: which newer base was passed over, as it was saved from a part of the state.
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
    kept: tuple[BaseId, str] | None = None
    fewer: str = ""
