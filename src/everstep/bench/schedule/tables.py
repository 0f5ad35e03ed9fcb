"""What Checkflow reports in section IV, planned anew.

Times of operators are not printed there; they were measured on an RTX 3090. Here they are the
roofline of its data sheet, and next to it a second model in which no operator takes less than a
given time, as when each is launched by itself. Where a cell hangs on that, the least time from
which on it holds is given.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everstep.bench.persist.show import Display
from everstep.bench.schedule.solving import Solved, solve_all
from everstep.bench.workloads.published import PUBLISHED, published, sentences
from everstep.errors import InfeasibleError
from everstep.plan.devices import Device, device, seconds_of
from everstep.plan.schedule import Mode, Problem, problem_of, schedule
from everstep.plan.steps import StepTrace
from everstep.plan.tracing import Optimizers, Training, trace_of

__all__ = [
    "FIGURE",
    "LAUNCH_S",
    "TABLE",
    "Cell",
    "Column",
    "ScheduleOptions",
    "ScheduleReport",
    "run_schedule",
]

LAUNCH_S = 25e-6
"""Least time of an operator in the second time model: eager launches, measured one by one."""

TABLE = (
    ("alexnet", 32, (True, False, False)),
    ("alexnet", 1024, (True, True, True)),
    ("bert", 32, (True, True, True)),
)
"""Network, batch, and whether the paper says feasible at 63, 40 and 20 GB/s."""

FIGURE = {
    "reduction, mean, batch 32": 0.128,
    "reduction, least, batch 32": 0.01,
    "reduction, most, batch 32": 0.42,
    "no extra peak, of eight, batch 32": 5.0,
}
"""What section IV-B says in words of Fig. 2; its bars carry no numbers."""

_LINKS_BYTES_PER_S = (63e9, 40e9, 20e9)
_TOKENS = 512
_LEAST_S_MAX = 1e-3


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """What is planned.

    Attributes:
        gpu: whose data sheet gives the times.
        batches: of Fig. 2.
        adam: Adam in place of plain SGD.
        exact_s: solve the integer program, too, where the greedy plan is not at the bound, each for
            at most so long.
    """

    gpu: str = "rtx3090"
    batches: tuple[int, ...] = (1, 32)
    adam: bool = False
    exact_s: float | None = None


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
            "paper": FIGURE,
            "seconds": self.seconds,
        }


def run_schedule(options: ScheduleOptions, display: Display) -> ScheduleReport:
    """Plans all cells.

    Raises:
        OptionError: there is no such GPU.
    """
    start_s = time.monotonic()
    on = device(options.gpu)
    optimizer: Optimizers = torch.optim.Adam if options.adam else _sgd
    cells = _table(on, optimizer, display)
    columns: list[Column] = []
    display.begin("Fig. 2", 2 * len(PUBLISHED) * len(options.batches))
    for name in PUBLISHED:
        for batch in options.batches:
            for order in ("after", "inside"):
                display.advance(f"{name}, batch {batch}, updates {order} backward")
                trace = trace_of(
                    published(name).training, batch, optimizer, in_backward=order == "inside"
                )
                columns += _columns(name, batch, order, trace, on)
    solved = tuple(solve_all(on, options.batches, display, exact_s=options.exact_s))
    return ScheduleReport(
        *(options, on.source, tuple(cells), tuple(columns), solved, time.monotonic() - start_s)
    )


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def _table(on: Device, optimizer: Optimizers, display: Display) -> list[Cell]:
    found = []
    rows = list(_rows())
    display.begin("Table I", len(rows))
    for name, batch, training, expected in rows:
        display.advance(f"{name}, batch {batch}")
        trace = trace_of(training, batch, optimizer)
        for link, said in zip(_LINKS_BYTES_PER_S, expected, strict=True):
            problem = problem_of(trace, seconds_of(trace.operators, on), link)
            needed = problem.needed_bytes_per_s("paper")
            least_s = _holds_from(problem)
            found.append(Cell(name, batch, link, said, least_s == 0, needed, least_s))
    return found


def _rows() -> Iterator[tuple[str, int, Training, tuple[bool, ...]]]:
    """The rows of Table I; BERT with long sentences, too, which its 24 GB speak for."""
    for name, batch, said in TABLE:
        if name == "bert":
            yield f"bert, {_TOKENS} tokens", batch, _long_bert, said
            yield "bert, 4 tokens", batch, published(name).training, said
        else:
            yield name, batch, published(name).training, said


def _long_bert(batch: int) -> tuple[nn.Module, Any]:
    model = published("bert").make()
    (tokens,) = sentences(batch, _TOKENS)

    def loss() -> Tensor:
        features: Tensor = model(tokens)
        return features.square().mean()

    return model, loss


def _holds_from(problem: Problem) -> float | None:
    """The least time of an operator from which on everything leaves within the step."""

    def enough(least_s: float) -> bool:
        return _at_least(problem, least_s).needed_bytes_per_s("paper") <= problem.link_bytes_per_s

    if enough(0.0):
        return 0.0
    if not enough(_LEAST_S_MAX):
        return None
    low, high = 0.0, _LEAST_S_MAX
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _at_least(problem: Problem, least_s: float) -> Problem:
    """The same, with no operator that takes less."""
    return dataclasses.replace(problem, seconds=tuple(max(s, least_s) for s in problem.seconds))


def _columns(name: str, batch: int, order: str, trace: StepTrace, on: Device) -> list[Column]:
    found = []
    modes: tuple[Mode, ...] = ("paper", "direct")
    plain = problem_of(trace, seconds_of(trace.operators, on), _LINKS_BYTES_PER_S[0])
    for least_s in (0.0, LAUNCH_S):
        problem = _at_least(plain, least_s)
        for mode in modes:
            start_s = time.monotonic()
            planned = gap = None
            try:
                plan = schedule(problem, mode)
                planned, gap = plan.peak_bytes, plan.gap
            except InfeasibleError:
                pass
            found.append(
                Column(
                    name,
                    batch,
                    order,
                    mode,
                    least_s,
                    problem.size_bytes,
                    problem.peak_bytes,
                    problem.peak_bytes + problem.size_bytes,
                    planned,
                    gap,
                    time.monotonic() - start_s,
                )
            )
    return found
