"""Plans for the tables of Checkflow's section IV, targets, and how long planning takes.

Times of operators are not printed there; they were measured on an RTX 3090. Here they are the
roofline of its data sheet, and next to it a second model in which no operator takes less than a
given time, as when each is launched by itself. Where a cell hangs on that, the least time from
which on it holds is given.

Planning is timed at the paper's 63 GB/s where that is enough, else at a twentieth more than is
needed, which is the hardest case that has a plan. Seconds are processor time: planning has one
thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from everstep.errors import InfeasibleError
from everstep.plan.schedule.exact import every_steps, exact
from everstep.plan.schedule.schedule import Mode, Problem, Schedule, problem_of, schedule
from everstep.plan.schedule.steps import Device, StepTrace, device, seconds_of
from everstep.plan.schedule.trace import Optimizers, Training, trace_of
from everstep.workloads.published import PUBLISHED, published, sentences
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Verdict, picked, plain
from everstep_bench.harness.report import Findings, Table, mb, number
from everstep_bench.options import ScheduleOptions
from everstep_bench.schedule import executed, peaks

_LINK_BYTES_PER_S = 63e9
_MARGIN = 1.05
_MODES: tuple[Mode, ...] = ("paper", "direct")


@dataclass(frozen=True, slots=True)
class Solved:
    """A row.

    Attributes:
        trace_s: for two steps on the meta device, as ``everstep plan schedule`` takes them.
        greedy_s, gap: of the plan, with chunks as small as it takes, at most 4 MiB.
        exact_s, exact_gap: of the integer program for chunks of the same size; None if it was not
            asked for, or the greedy plan is at the bound. These seconds are of the clock.
    """

    model: str
    batch: int
    mode: Mode
    operators: int
    link_bytes_per_s: float
    trace_s: float
    greedy_s: float
    chunk_bytes: int
    gap: float
    exact_s: float | None
    exact_gap: float | None


def solve_all(
    on: Device, batches: tuple[int, ...], display: Display, *, exact_s: float | None = None
) -> Iterator[Solved]:
    """All networks, with plain SGD.

    Args:
        exact_s: seconds for each integer program; None: none is solved.

    Raises:
        UnavailableError: there is no solver.
    """
    display.begin("solve times", len(PUBLISHED) * len(batches))
    for name in PUBLISHED:
        for batch in batches:
            display.advance(f"{name}, batch {batch}")
            start_s = time.process_time()
            trace = trace_of(published(name).training, batch, _sgd)
            trace_s = time.process_time() - start_s
            seconds = seconds_of(trace.operators, on)
            for mode in _MODES:
                problem = problem_of(trace, seconds, _LINK_BYTES_PER_S)
                yield _solve(name, batch, mode, problem, trace_s, exact_s)


def _solve(
    name: str, batch: int, mode: Mode, problem: Problem, trace_s: float, exact_s: float | None
) -> Solved:
    start_s = time.process_time()
    try:
        found = schedule(problem, mode)
    except InfeasibleError as error:
        problem = dataclasses.replace(problem, link_bytes_per_s=_MARGIN * error.needed)
        start_s = time.process_time()
        found = schedule(problem, mode)
    greedy_s = time.process_time() - start_s
    spent_s: float | None = None
    best: Schedule | None = None
    if exact_s is not None and found.peak_bytes > found.bound_bytes:
        clock_s = time.monotonic()
        best = exact(problem, mode, found.chunk_bytes, limit_s=exact_s)
        spent_s = time.monotonic() - clock_s
    return Solved(
        *(name, batch, mode, len(problem.seconds), problem.link_bytes_per_s),
        *(trace_s, greedy_s, found.chunk_bytes, found.gap),
        *(spent_s, None if best is None else best.gap),
    )


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
"""Statements of section IV-B about Fig. 2, whose bars carry no numbers, and about disks."""

_WORDS = ("network",)
_SLOW = f"operators of {LAUNCH_S * 1e6:.0f} us"
_FIGURE_2 = ("network", "alone", "all at once", "paper's way", "less", "overhead less", "direct",
             "less", f"paper's, {LAUNCH_S * 1e6:.0f} us", "less")  # fmt: skip
_SOLVED = ("network", "batch", "way", "operators", "link, GB/s", "chunks, KiB", "trace", "greedy",
           "gap", "exact", "its gap")  # fmt: skip
_POINTS = 0.02
_GAP = 0.025
_GREEDY_S = 5.0
_EXACT_S_MAX = 120.0


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


@dataclass(frozen=True)
class ScheduleReport(Findings):
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

    def figures(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "options": self.options,
            "source": self.source,
            "table_1": self.cells,
            "figure_2": [
                plain(column) | picked(column, "reduction overhead_reduction")
                for column in self.columns
            ],
            "solved": self.solved,
            "persisting": [
                {
                    **picked(column, "model batch least_s disk_bytes_per_s"),
                    "every_steps": every_steps(
                        column.disk_bytes_per_s, self.options.disk_bytes_per_s
                    ),
                }
                for column in self.persisting()
            ],
            "paper": FIGURE,
            "verdicts": self.verdicts(),
            "seconds": self.seconds,
        }

    def lines(self) -> Iterator[str]:
        """Yield where times come from."""
        yield (
            f"times: roofline of {self.options.gpu} ({self.source}); a dash: the link is too slow"
        )

    def tables(self) -> Iterator[Table]:
        """Yield Table I, Fig. 2, what persisting takes, and how long planning does."""
        links = dict.fromkeys(f"{cell.link_bytes_per_s / 1e9:.0f} GB/s" for cell in self.cells)
        yield Table(
            "Table I: does a checkpoint of every step leave within the step (yes, no: by the "
            "roofline; paper's in brackets; from: where no operator takes less)",
            ("network", "batch", "needs, GB/s", *links),
            self._cells(),
            _WORDS,
        )
        for batch in self.options.batches:
            for order in ("after", "inside"):
                yield Table(
                    f"Fig. 2, batch {batch}, updates {order} backward: peak of memory, MB",
                    _FIGURE_2,
                    self._peaks(batch, order),
                    _WORDS,
                )
        disk = self.options.disk_bytes_per_s / 1e9
        yield Table(
            f"Section IV-B: persisting every step; every k-th at {disk:g} GB/s",
            ("network", "batch", "state, MB", "GB/s", "k", f"{_SLOW}: GB/s", "k"),
            self._persisted(),
            _WORDS,
        )
        yield Table(
            "To trace and to plan, seconds of processor time (exact: of the clock)",
            _SOLVED,
            map(_solved, self.solved),
            _WORDS,
        )

    def notes(self) -> Iterator[str]:
        """Yield means, and what the paper says."""
        for least_s in (0.0, LAUNCH_S):
            for order in ("after", "inside"):
                mean = self.mean_reduction(32, order, "paper", least_s)
                if mean is not None:
                    yield (
                        f"batch 32, updates {order} backward, operators of {least_s * 1e6:.0f} us "
                        f"at least: mean reduction {mean:.1%}"
                    )
        for what, value in FIGURE.items():
            yield f"the paper says: {what}: {value:.3g}"
        gaps = [column.gap for column in self.columns if column.gap is not None]
        yield (
            f"{len(self.columns)} plans, largest gap {max(gaps, default=0):.2%}; "
            f"{self.seconds:.0f} s in all"
        )

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for (model, batch), group in groupby(self.cells, key=lambda cell: (cell.model, cell.batch)):
            row = list(group)
            needed = number(row[0].needed_bytes_per_s, 1, 1e-9)
            yield model, str(batch), needed, *map(_feasible, row)

    def _peaks(self, batch: int, order: str) -> Iterator[tuple[str, ...]]:
        chosen = [c for c in self.columns if (c.batch, c.order) == (batch, order)]
        for model, group in groupby(chosen, key=lambda column: column.model):
            by = {(column.mode, column.least_s): column for column in group}
            paper = by["paper", 0.0]
            yield (
                model,
                mb(paper.peak_bytes),
                mb(paper.at_once_bytes),
                *_planned(paper),
                _share(paper.overhead_reduction),
                *_planned(by["direct", 0.0]),
                *_planned(by["paper", LAUNCH_S]),
            )

    def _persisted(self) -> Iterator[tuple[str, ...]]:
        rows = sorted(self.persisting(), key=lambda column: (column.model, column.batch))
        for (model, batch), group in groupby(rows, key=lambda column: (column.model, column.batch)):
            found = sorted(group, key=lambda column: column.least_s)
            figures = []
            for column in found:
                needed = column.disk_bytes_per_s
                k = every_steps(needed, self.options.disk_bytes_per_s)
                figures += [number(needed, 1, 1e-9), str(k)]
            yield model, str(batch), mb(found[0].state_bytes), *figures

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
                f"exact plan of chunks of 4 MiB or less, or its gap, within {_EXACT_S_MAX:.0f} s",
                [(row.exact_s, row) for row in self.solved if row.exact_s is not None],
                _EXACT_S_MAX,
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


def _feasible(cell: Cell) -> str:
    said = {True: " (yes)", False: " (no)", None: ""}[cell.paper]
    if cell.feasible:
        return "yes" + said
    if cell.holds_from_s is None:
        return "no" + said
    return f"no, from {cell.holds_from_s * 1e6:.0f} us{said}"


def _planned(column: Column) -> tuple[str, str]:
    return mb(column.planned_bytes), _share(column.reduction)


def _share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _solved(row: Solved) -> tuple[str, ...]:
    return (
        row.model,
        str(row.batch),
        row.mode,
        str(row.operators),
        number(row.link_bytes_per_s, 1, 1e-9),
        str(row.chunk_bytes >> 10),
        number(row.trace_s),
        number(row.greedy_s),
        _share(row.gap, 2),
        number(row.exact_s, 0),
        _share(row.exact_gap, 2),
    )


TABLE = (
    ("alexnet", 32, (True, False, False)),
    ("alexnet", 1024, (True, True, True)),
    ("bert", 32, (True, True, True)),
)
"""Network, batch, and whether the paper says feasible at 63, 40 and 20 GB/s."""

_LINKS_BYTES_PER_S = (63e9, 40e9, 20e9)
_TOKENS = 512
_EXACT_S = 115.0  # two minutes, with what a solver takes to notice
_LEAST_S_MAX = 1e-3


def run_schedule(
    options: ScheduleOptions, display: Display
) -> ScheduleReport | executed.ExecutedReport | peaks.PeaksReport:
    """Plan all cells; or carry plans out, if that is asked for.

    Raises:
        OptionError: there is no such GPU.
    """
    if options.executed:
        chosen = executed.ExecutedOptions(compute=options.compute, folder=options.folder)
        return executed.run_executed(chosen, display)
    if options.peaks:
        return peaks.run_peaks(options.folder, adam=options.adam, display=display)
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
    exact_s = _EXACT_S if options.exact else None
    solved = tuple(solve_all(on, options.batches, display, exact_s=exact_s))
    seconds = time.monotonic() - start_s
    return ScheduleReport(options, on.source, tuple(cells), tuple(columns), solved, seconds)


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
            yield SHORT, batch, published(name).training, said
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
    low = 0.0
    high = _LEAST_S_MAX
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
                planned = plan.peak_bytes
                gap = plan.gap
            except InfeasibleError:
                pass
            found.append(
                Column(
                    name,
                    batch,
                    order,
                    mode,
                    least_s,
                    problem.step_s,
                    problem.size_bytes,
                    problem.peak_bytes,
                    problem.peak_bytes + problem.size_bytes,
                    planned,
                    gap,
                    time.monotonic() - start_s,
                )
            )
    return found
