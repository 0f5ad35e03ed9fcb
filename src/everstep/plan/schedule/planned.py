"""Capture plan of a model: from the trace of a step to the figures of the plan."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from everstep.errors import InfeasibleError, OptionError
from everstep.plan.schedule.devices import Device, times_of
from everstep.plan.schedule.exact import exact, has_solver
from everstep.plan.schedule.schedule import Mode, Problem, Schedule, problem_of, schedule
from everstep.plan.schedule.steps import StepTrace


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, or the reason why there is none.

    Attributes:
        schedule: the plan; None if the link is too slow.
        infeasible: reason why there is no plan.
        needed_bytes_per_s: bandwidth of the link below which there is no plan.
        times: description of the source of the operators' times.
        method: description of the algorithm that found the plan.
        trace_s, plan_s: duration of tracing and planning.
    """

    trace: StepTrace
    problem: Problem
    schedule: Schedule | None
    infeasible: InfeasibleError | None
    needed_bytes_per_s: float
    times: str
    method: str
    trace_s: float
    plan_s: float

    @property
    def blocking_peak_bytes(self) -> int:
        """Peak memory with a duplicate of the whole state at once, as CheckFreq makes it."""
        return self.problem.peak_bytes + self.problem.size_bytes

    @property
    def disk_bytes_per_s(self) -> float:
        """Bandwidth of a disk that persists the checkpoint of every step (section IV-B)."""
        return self.problem.size_bytes / self.problem.step_s

    def every_steps(self, disk_bytes_per_s: float) -> int:
        """Return the smallest ``k`` for which a disk keeps up with every ``k``-th checkpoint."""
        return every_steps(self.disk_bytes_per_s, disk_bytes_per_s)


def every_steps(needed_bytes_per_s: float, disk_bytes_per_s: float) -> int:
    """Return the smallest ``k`` for which a disk keeps up with every ``k``-th checkpoint.

    Args:
        needed_bytes_per_s: bandwidth that the checkpoint of every step needs.
    """
    return max(1, math.ceil(needed_bytes_per_s / disk_bytes_per_s))


def plan_step(
    trace: StepTrace,
    trace_s: float,
    device: Device | None,
    link_bytes_per_s: float,
    mode: Mode,
    *,
    exact_s: float | None = None,
    network_bytes_per_s: float | None = None,
) -> Planned:
    """Plan a traced step.

    Args:
        device: device whose roofline gives the times of operators; None: as measured.
        exact_s: time limit for the optimal plan of the same chunks. Without a solver the greedy
            plan is returned, and :attr:`Planned.method` states it.
        network_bytes_per_s: bandwidth at which each rank sends, for collectives.

    Raises:
        OptionError: no times are known, or the step takes no time.
    """
    seconds, times = times_of(trace, device, network_bytes_per_s)
    problem = problem_of(trace, seconds, link_bytes_per_s)
    if not problem.step_s:
        raise OptionError("no operator of this step takes any time: there is nothing to plan")
    start_s = time.perf_counter()
    found: Schedule | None = None
    infeasible: InfeasibleError | None = None
    method = "greedy"
    try:
        found = schedule(problem, mode)
        if exact_s is not None and found.peak_bytes > found.bound_bytes:
            if has_solver():
                found = _better(problem, found, exact_s)
                method = "integer program (SCIP)"
            else:
                method = "greedy: PySCIPOpt, which an exact plan needs, is not installed"
        elif exact_s is not None:
            method = "greedy, and at the bound: there is nothing to solve"
    except InfeasibleError as error:
        infeasible = error
    plan_s = time.perf_counter() - start_s
    needed = problem.needed_bytes_per_s(mode) if infeasible is None else infeasible.needed
    return Planned(trace, problem, found, infeasible, needed, times, method, trace_s, plan_s)


def _better(problem: Problem, greedy: Schedule, limit_s: float) -> Schedule:
    found = exact(problem, greedy.mode, greedy.chunk_bytes, limit_s=limit_s)
    return greedy if found is None or found.peak_bytes > greedy.peak_bytes else found
