"""Result of a demo, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from everstep.demo.evidence import Survey
from everstep.demo.plan import DemoPlan, Kill
from everstep.workloads.comparison import Difference

_SAME_IN_JSON = ("resume_s", "back_s", "exact", "evidence", "source")


@dataclass(frozen=True, slots=True)
class KillReport:
    """One kill and the resume after it.

    Attributes:
        kill: as it happened.
        left: bases on disk and in the memory of a surviving keeper, right after the kill.
        reached: last step that the process had finished.
        recovered: step from which the next process went on.
        resume_s: seconds spent in ``resume()``.
        back_s: seconds from the death to the end of ``resume()``, with the start of Python
            and torch.
        exact, evidence: the claim of the recovery.
        source: origin of the state: ``"memory"`` of the keeper, or ``"disk"``.
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

    def as_json(self) -> dict[str, Any]:
        """Return the kill as plain data, for ``--json``."""
        return {
            "where": self.kill.where,
            "died": self.kill.died,
            "planned_step": self.kill.step,
            "planned_fraction": self.kill.fraction,
            "left": self.left.describe(),
            "files": list(self.left.files),
            "committed_step": self.left.committed,
            "held_step": self.left.held,
            "reached_step": self.reached,
            "recovered_step": self.recovered,
            "lost_steps": self.lost,
            **{name: getattr(self, name) for name in _SAME_IN_JSON},
        }


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Result of a demo.

    Attributes:
        plan: as it was carried out.
        kills: in their order.
        compared: number of things of each kind that were compared, in words.
        differences: everything that differs, checkpoint entries first.
        loss_first, loss_last: of the undisturbed run.
        seconds: duration of everything.
    """

    plan: DemoPlan
    kills: tuple[KillReport, ...]
    compared: tuple[str, ...]
    differences: tuple[Difference, ...]
    loss_first: float
    loss_last: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data, for ``--json``."""
        plan = self.plan
        return {
            "identical": not self.differences,
            "seed": plan.training.seed,
            "steps": plan.training.steps,
            "every": plan.every,
            "method": plan.method,
            "params": plan.model.params,
            "kills": [row.as_json() for row in self.kills],
            "compared": list(self.compared),
            "differences": [dataclasses.asdict(item) for item in self.differences],
            **{name: getattr(self, name) for name in ("loss_first", "loss_last", "seconds")},
        }
