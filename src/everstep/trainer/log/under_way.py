"""An update whose gradients are being copied for the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep.capture.lanes.lane import Transfer
from everstep.trainer.log.rooms import Loan

__all__ = ["UnderWay"]


@dataclass(slots=True, eq=False)
class UnderWay:
    """An update that is being copied.

    Attributes:
        end: of its bytes.
        job: tells the keeper of it, behind the copies.
        loan: of the memory for it.
        calls: of the optimizer's closure.
    """

    transfer: Transfer
    end: int
    job: Callable[[], None]
    loan: Loan
    calls: int = 1
