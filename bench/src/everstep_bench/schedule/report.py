"""Plans as data: cells, bars, targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from everstep.plan.schedule.planned import every_steps
from everstep.plan.schedule.schedule import Mode
from everstep_bench.persist.report import Verdict
from everstep_bench.schedule.solving import Solved

__all__ = [
    "FIGURE",
    "LAUNCH_S",
    "SHORT",
    "Cell",
    "Column",
    "ScheduleOptions",
    "ScheduleReport",
]

LAUNCH_S = 25e-6
"""Least time of an operator in the second time model: eager launches, measured one by one."""

SHORT = "bert, 4 tokens"
"""The row of Table I with the sentences that MODeL's benchmark has."""

FIGURE = {
    "reduction, mean, batch 32": 0.128,
    "reduction, least, batch 32": 0.01,
    "reduction, most, batch 32": 0.42,
    "no extra peak, of eight, batch 32": 5.0,
    "disk, GB/s, more than, alexnet, batch 1": 37.0,
    "disk, GB/s, less than, larger models and batches": 5.0,
}
"""What section IV-B says in words of Fig. 2, whose bars carry no numbers, and of disks."""

_POINTS = 0.02
_GAP = 0.025
_GREEDY_S = 5.0
_EXACT_S = 120.0


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Options of the benchmark.

    Attributes:
        gpu: whose data sheet gives the times.
        batches: of Fig. 2.
        adam: Adam in place of plain SGD.
        exact_s: solve the integer program, too, where the greedy plan is not at the bound, each for
            at most so long.
        disk_bytes_per_s: that checkpoints are persisted at.
    """

    gpu: str = "rtx3090"
    batches: tuple[int, ...] = (1, 32)
    adam: bool = False
    exact_s: float | None = None
    disk_bytes_per_s: float = 3e9

    @property
    def as_in_the_paper(self) -> bool:
        """True if the paper's figures are comparable: its GPU, and plain SGD."""
        return self.gpu == "rtx3090" and not self.adam


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of Table I.

    Attributes:
        paper: what is printed there; None if it has no such row.
        feasible: by the roofline.
        holds_from_s: least time of an operator from which on it is feasible; 0 if by the roofline
            alone, None if not below a millisecond.
    """

    model: str
    batch: int
    link_bytes_per_s: float
    paper: bool | None
    feasible: bool
    needed_bytes_per_s: float
    holds_from_s: float | None


@dataclass(frozen=True, slots=True)
class Column:
    """A bar of Fig. 2.

    Attributes:
        order: ``"after"``: updates at the end; ``"inside"`` of backward, each as soon as it can be.
        mode: of the plan.
        least_s: least time of an operator.
        step_s: of the step.
        peak_bytes: of the step alone.
        at_once_bytes: with a duplicate of everything at once (CheckFreq).
        planned_bytes: None if the link is too slow.
        gap: to the lower bound.
    """

    model: str
    batch: int
    order: str
    mode: Mode
    least_s: float
    step_s: float
    state_bytes: int
    peak_bytes: int
    at_once_bytes: int
    planned_bytes: int | None
    gap: float | None
    plan_s: float

    @property
    def reduction(self) -> float | None:
        """Of the peak, next to CheckFreq's (Fig. 2a)."""
        return None if self.planned_bytes is None else 1 - self.planned_bytes / self.at_once_bytes

    @property
    def overhead_reduction(self) -> float | None:
        """Of what checkpointing adds to the peak, next to CheckFreq's (Fig. 2b)."""
        if self.planned_bytes is None:
            return None
        return 1 - (self.planned_bytes - self.peak_bytes) / self.state_bytes

    @property
    def disk_bytes_per_s(self) -> float:
        """That a disk must take to persist the checkpoint of every step (section IV-B)."""
        return self.state_bytes / self.step_s


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """Both, and how long it took to plan."""

    options: ScheduleOptions
    source: str
    cells: tuple[Cell, ...]
    columns: tuple[Column, ...]
    solved: tuple[Solved, ...]
    seconds: float

    def mean_reduction(self, batch: int, order: str, mode: Mode, least_s: float) -> float | None:
        """Over the networks that have a plan; None if none has."""
        found = [
            column.reduction
            for column in self.columns
            if (column.batch, column.order, column.mode, column.least_s)
            == (batch, order, mode, least_s)
            and column.reduction is not None
        ]
        return sum(found) / len(found) if found else None

    def as_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "options": asdict(self.options),
            "source": self.source,
            "table_1": [asdict(cell) for cell in self.cells],
            "figure_2": [
                {
                    **asdict(column),
                    "reduction": column.reduction,
                    "overhead_reduction": column.overhead_reduction,
                }
                for column in self.columns
            ],
            "solved": [asdict(row) for row in self.solved],
            "persisting": [
                {
                    "model": column.model,
                    "batch": column.batch,
                    "least_s": column.least_s,
                    "disk_bytes_per_s": column.disk_bytes_per_s,
                    "every_steps": every_steps(
                        column.disk_bytes_per_s, self.options.disk_bytes_per_s
                    ),
                }
                for column in self.persisting()
            ],
            "paper": FIGURE,
            "verdicts": [asdict(verdict) for verdict in self.verdicts()],
            "seconds": self.seconds,
        }

    def persisting(self) -> list[Column]:
        """One column for each network, batch and time model: what a step persists hangs on nothing
        else."""
        return [c for c in self.columns if (c.order, c.mode) == ("after", "paper")]

    def verdicts(self) -> list[Verdict]:
        """Return the targets and their results."""
        return [
            self._table_verdict(),
            self._mean_verdict(),
            self._gap_verdict(),
            self._direct_verdict(),
            _seconds_verdict(
                f"trace and greedy plan within {_GREEDY_S:.0f} s of processor time",
                [(row.trace_s + row.greedy_s, row) for row in self.solved],
                _GREEDY_S,
            ),
            _seconds_verdict(
                f"exact plan of chunks of 4 MiB or less, or its gap, within {_EXACT_S:.0f} s",
                [(row.exact_s, row) for row in self.solved if row.exact_s is not None],
                _EXACT_S,
            ),
        ]

    def all_met(self) -> bool:
        """Return True if every target is met."""
        return all(verdict.met is not False for verdict in self.verdicts())

    def _table_verdict(self) -> Verdict:
        """BERT with long sentences, as section IV-A says how much memory it takes."""
        cells = [c for c in self.cells if c.paper is not None and c.model != SHORT]
        same = sum(cell.feasible == cell.paper for cell in cells)
        met = same == len(cells) if cells and self.options.as_in_the_paper else None
        return Verdict("Table I as in the paper", f"{same} of {len(cells)}", met)

    def _mean_verdict(self) -> Verdict:
        paper = FIGURE["reduction, mean, batch 32"]
        target = f"Fig. 2, mean reduction at batch 32 within {_POINTS:.0%} of {paper:.1%}"
        means = {o: self.mean_reduction(32, o, "paper", 0.0) for o in ("after", "inside")}
        found = {order: mean for order, mean in means.items() if mean is not None}
        if not found or not self.options.as_in_the_paper:
            return Verdict(target, "-", None)
        without = sorted(
            {c.model for c in self.columns if (c.batch, c.least_s) == (32, 0.0) and c.gap is None}
        )
        figure = ", ".join(f"{mean:.1%} ({order} backward)" for order, mean in found.items())
        if without:
            figure += f"; without {', '.join(without)}, for which the link is too slow"
        return Verdict(target, figure, all(abs(m - paper) <= _POINTS for m in found.values()))

    def _gap_verdict(self) -> Verdict:
        gaps = [c.gap for c in self.columns if c.gap is not None]
        gaps += [row.gap for row in self.solved]
        target = f"gap to the lower bound at most {_GAP:.1%}"
        if not gaps:
            return Verdict(target, "-", None)
        return Verdict(target, f"{max(gaps):.2%} in {len(gaps)} plans", max(gaps) <= _GAP)

    def _direct_verdict(self) -> Verdict:
        plans = [
            c
            for c in self.columns
            if (c.mode, c.order) == ("direct", "after") and c.planned_bytes is not None
        ]
        none = sum(plan.planned_bytes == plan.peak_bytes for plan in plans)
        target = "direct, updates after backward: no extra peak where the link suffices"
        met = none == len(plans) if plans else None
        return Verdict(target, f"{none} of {len(plans)} plans", met)


def _seconds_verdict(target: str, found: list[tuple[float, Solved]], most_s: float) -> Verdict:
    if not found:
        return Verdict(target, "-", None)
    seconds, row = max(found, key=lambda pair: pair[0])
    figure = f"{seconds:.1f} s at most ({row.model}, batch {row.batch}, {row.mode})"
    return Verdict(target, figure, seconds <= most_s)
