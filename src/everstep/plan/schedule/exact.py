"""Optimal plans for chunks of a given size, by integer programming (Checkflow section III-A).

The paper's program has binary variables for every item and operator (562 000 for BERT). Here chunks
of equal size and deadline are interchangeable, so there is one integer per group and operator: the
number of chunks offloaded there. The time of their snapshots follows from it (:mod:`.schedule`).
Operators during which no chunk fits are omitted. The bound of divisible items and the greedy plan
enclose the optimum from the beginning; if they meet, there is nothing to solve.

Needs PySCIPOpt (``pip install "everstep[plan]"``).

Capture plan of a model: from the trace of a step to the figures of the plan.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from dataclasses import dataclass, replace
from typing import Any

from everstep.errors import InfeasibleError, OptionError, UnavailableError
from everstep.plan.schedule.plan_file import executed_problem
from everstep.plan.schedule.schedule import (
    Group,
    Mode,
    Placement,
    Problem,
    Schedule,
    bound,
    greedy,
    groups_of,
    peak_of,
    problem_of,
    schedule,
)
from everstep.plan.schedule.steps import Device, StepTrace, times_of


def has_solver() -> bool:
    """Return True if PySCIPOpt is installed."""
    return importlib.util.find_spec("pyscipopt") is not None


def exact(problem: Problem, mode: Mode, chunk_bytes: int, *, limit_s: float) -> Schedule | None:
    """Return the best plan with chunks of at most ``chunk_bytes``.

    Args:
        limit_s: time limit for building and solving the program, in seconds;
            :attr:`.Schedule.bound_bytes` of the result is the bound proved by then.

    Returns:
        None if these chunks cannot all be offloaded within the step, or no plan was found in time.

    Raises:
        InfeasibleError: no plan exists with any chunks.
        UnavailableError: the solver is not installed.
    """
    deadline_s = time.monotonic() + limit_s
    lowest = bound(problem, mode)
    start = greedy(problem, mode, chunk_bytes)
    if start is not None and start.peak_bytes == lowest:
        return start
    if not has_solver():
        raise UnavailableError(
            "an exact plan needs PySCIPOpt, which is not installed",
            hint='pip install "everstep[plan]"; the greedy plan states its gap',
        )
    program = _Program(problem, mode, groups_of(problem, chunk_bytes), lowest)
    found = program.solve(start, deadline_s - time.monotonic())
    if found is None:
        return start
    placements, proved = found
    # Computed from the plan: the objective of the solver is exact only within its tolerance.
    peak = peak_of(problem, placements)
    if start is not None and start.peak_bytes <= peak:
        placements = list(start.placements)
        peak = start.peak_bytes
    return Schedule(mode, tuple(placements), peak, min(peak, max(lowest, proved)), chunk_bytes)


class _Program:
    def __init__(self, problem: Problem, mode: Mode, groups: list[Group], lowest: int) -> None:
        scip: Any = importlib.import_module("pyscipopt")
        self._problem = problem
        self._groups = groups
        self._paper = mode == "paper"
        self._model = model = scip.Model()
        model.hideOutput()
        most = problem.peak_bytes + problem.size_bytes
        self._peak = model.addVar("peak", lb=lowest, ub=most)
        model.setObjective(self._peak)
        capacities = problem.capacities(mode)
        count = len(capacities)
        self._moved: list[list[Any]] = [[] for _ in range(count)]
        self._kept: list[list[Any]] = [[] for _ in range(count)]
        self._leaves = [self._group(number, capacities) for number in range(len(groups))]
        for number, capacity in enumerate(capacities):
            if self._moved[number]:
                model.addCons(scip.quicksum(self._moved[number]) <= capacity)
            if self._kept[number]:
                kept = scip.quicksum(self._kept[number])
                model.addCons(kept <= self._peak - problem.live_bytes[number])

    def _group(self, number: int, capacities: list[int]) -> dict[int, Any]:
        """Add the variables of a group: the number of chunks offloaded during each operator."""
        group = self._groups[number]
        model = self._model
        count = len(capacities)
        leaves = {
            at: model.addVar(f"x{number}.{at}", "I", lb=0, ub=group.count)
            for at, capacity in enumerate(capacities)
            if capacity >= group.size_bytes
        }
        for at, variable in leaves.items():
            self._moved[at].append(group.size_bytes * variable)
            # In the paper's mode a snapshot takes memory at its operator and at the one before.
            if self._paper and at < group.update - 1:
                self._kept[at].append(group.size_bytes * variable)
            if self._paper and at < group.update:
                # `at` is not 0: in this mode the capacity of the first operator is 0.
                self._kept[at - 1].append(group.size_bytes * variable)
        # Chunks that are not offloaded by the last operator before their first write are
        # duplicated there, and kept until they are offloaded.
        left: Any = group.count - sum(v for at, v in leaves.items() if at < group.update - 1)
        for at in range(group.update - 1, count):
            rest = model.addVar(lb=0, ub=group.count)
            model.addCons(rest == left)
            after = rest - leaves[at] if at in leaves else rest
            here = rest if self._paper or at >= group.update else after
            self._kept[at].append(group.size_bytes * here)
            left = after
        model.addCons(left == 0)
        return leaves

    def solve(self, start: Schedule | None, limit_s: float) -> tuple[list[Placement], int] | None:
        """Return placements, and the peak below which the solver has proved that no plan exists."""
        if limit_s <= 0:
            return None
        self._model.setParam("limits/time", limit_s)
        if start is not None:
            # The solver accepts only objectives below the limit, so a plan as good as the greedy
            # one still counts.
            self._model.setObjlimit(start.peak_bytes + 1)
        self._model.optimize()
        if not self._model.getNSols():
            return None
        placements = []
        for number, leaves in enumerate(self._leaves):
            group = self._groups[number]
            chunks = iter(group.chunks())
            for at, variable in leaves.items():
                # Values of integer variables are floats within a tolerance.
                for _ in range(round(self._model.getVal(variable))):
                    snapshot = min(group.update, at) - 1 if self._paper else None
                    if at >= group.update:
                        snapshot = group.update - 1
                    placements.append(Placement(next(chunks), snapshot, at))
        # Rounded up, as peaks are whole bytes, less the tolerance of the solver.
        return placements, int(self._model.getDualbound() + 1 - 1e-6)


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

    def within(self, limit_bytes: float | None) -> Planned:
        """Return the plan; without a schedule if its peak is above a limit of device memory.

        The peak of a plan is the lowest one that was found, so that no other plan helps.
        """
        plan = self.schedule
        if plan is None or limit_bytes is None or plan.peak_bytes <= limit_bytes:
            return self
        error = InfeasibleError(
            f"a step takes {plan.peak_bytes / 1e9:.3g} GB of device memory, "
            f"{self.problem.peak_bytes / 1e9:.3g} GB without checkpoints: more than the limit of "
            f"{limit_bytes / 1e9:.3g} GB",
            quantity="device_bytes",
            needed=float(plan.peak_bytes),
        )
        return replace(self, schedule=None, infeasible=error)

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
    executed: bool = False,
) -> Planned:
    """Plan a traced step.

    Args:
        device: device whose roofline gives the times of operators; None: as measured.
        exact_s: time limit for the optimal plan of the same chunks. Without a solver the greedy
            plan is returned, and :attr:`Planned.method` states it.
        network_bytes_per_s: bandwidth at which each rank sends, for collectives.
        executed: plan for a file (:mod:`.plan_file`): with the deadlines of a running step.

    Raises:
        OptionError: no times are known, or the step takes no time.
    """
    seconds, times = times_of(trace, device, network_bytes_per_s)
    problem = (executed_problem if executed else problem_of)(trace, seconds, link_bytes_per_s)
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
