"""The outcome of a demo, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.demo.evidence import Survey
from everstep.demo.plan import DemoPlan, Kill
from everstep.demo.verdict import Verdict

__all__ = ["DemoReport", "KillReport"]


@dataclass(frozen=True, slots=True)
class KillReport:
    """One kill and the resume that followed.

    Attributes:
        kill: as planned.
        left: what was on disk, and in the memory of a keeper that was spared, when the
            process was gone.
        reached: last step that it had finished.
        recovered: step at which the next process went on.
        resume_s: seconds spent in ``resume()``.
        back_s: seconds from the death to the end of ``resume()``, with the start of Python
            and torch.
        exact: what the recovery claims, and ``evidence`` likewise.
        source: where the state came back from: ``"memory"`` of the keeper, or ``"disk"``.
    """

    kill: Kill
    left: Survey
    reached: int
    recovered: int
    resume_s: float
    back_s: float
    exact: bool
    evidence: str
    source: str

    @property
    def lost(self) -> int:
        """Finished steps that had to be taken again."""
        return self.reached - self.recovered


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The outcome of a demo."""

    plan: DemoPlan
    kills: tuple[KillReport, ...]
    verdict: Verdict
    loss_first: float
    loss_last: float
    seconds: float
