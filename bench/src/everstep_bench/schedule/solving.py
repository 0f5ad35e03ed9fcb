"""Duration of tracing and planning, and the gap to the best plan.

At the paper's 63 GB/s where that is enough, else at a twentieth more than is needed, which is the
hardest case that has a plan. Seconds are processor time: planning has one thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from everstep.errors import InfeasibleError
from everstep.plan.schedule.exact import exact
from everstep.plan.schedule.schedule import Mode, Problem, Schedule, problem_of, schedule
from everstep.plan.schedule.steps import Device, seconds_of
from everstep.plan.schedule.trace import trace_of
from everstep.workloads.published import PUBLISHED, published
from everstep_bench.harness.display import Display

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
                yield _solved(name, batch, mode, problem, trace_s, exact_s)


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)  # type: ignore[arg-type]


def _solved(
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
