"""A capture on its way, seen from the training process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.capture.audit import Sample
from everstep.capture.lanes.lane import Transfer
from everstep.capture.versions import Versions
from everstep.link.capture import Capture
from everstep.link.pool import Block, CapturePool
from everstep.state.survey.survey import Survey
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.base.prepared import Copies, Prepared

if TYPE_CHECKING:  # which takes flights
    from everstep.trainer.base.saver import Tell

__all__ = ["Flight"]


@dataclass(eq=False, slots=True)
class Flight:
    """A capture whose copies may still be under way."""

    capture: Capture
    keeper: Keeper
    pool: CapturePool
    prepared: Prepared
    room: Block
    survey: Survey
    copies: Copies
    tell: Tell | None = None
    transfer: Transfer | None = None
    sample: Sample | None = None
    versions: Versions | None = None
    seen: list[int] = field(default_factory=list)
    passed: frozenset[str] = frozenset()
    looked: bool = False
    written: str | None = None
    decided: bool = False
    left: bool = False

    def objects(self) -> dict[str, bytes]:
        """Its objects, encoded; from now on they count as what they are."""
        objects = self.survey.objects()
        self.pool.charge(self.room, sum(map(len, objects.values())))
        return objects
