"""Plans for the tables of Checkflow's section IV.

Times of operators are not printed there; they were measured on an RTX 3090. Here they are the
roofline of its data sheet, and next to it a second model in which no operator takes less than a
given time, as when each is launched by itself. Where a cell hangs on that, the least time from
which on it holds is given.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from everstep.errors import InfeasibleError
from everstep.plan.schedule.schedule import Mode, Problem, problem_of, schedule
from everstep.plan.schedule.steps import Device, StepTrace, device, seconds_of
from everstep.plan.schedule.trace import Optimizers, Training, trace_of
from everstep.workloads.published import PUBLISHED, published, sentences
from everstep_bench.harness.display import Display
from everstep_bench.options import ScheduleOptions
from everstep_bench.schedule import executed
from everstep_bench.schedule.report import (
    LAUNCH_S,
    SHORT,
    Cell,
    Column,
    ScheduleReport,
)
from everstep_bench.schedule.solving import solve_all

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
) -> ScheduleReport | executed.ExecutedReport:
    """Plan all cells; or carry plans out, if that is asked for.

    Raises:
        OptionError: there is no such GPU.
    """
    if options.executed:
        chosen = executed.ExecutedOptions(compute=options.compute, folder=options.folder)
        return executed.run_executed(chosen, display)
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
