"""A capture plan for a model, from a step of it to the figures that one chooses by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.errors import InfeasibleError, UnsupportedStateError
from everstep.plan.devices import Device, seconds_of
from everstep.plan.exact import exact
from everstep.plan.schedule import Mode, Problem, Schedule, problem_of, schedule
from everstep.plan.trace import StepTrace, trace_training

__all__ = ["Optimizers", "Planned", "Training", "plan_step", "trace_of"]

Training = Callable[[int], tuple[nn.Module, Callable[[], Tensor]]]
"""Makes, on the default device, a model and its loss on one batch of the given size."""

Optimizers = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes an optimizer of parameters."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, or why there is none.

    Attributes:
        schedule: None if the link is too slow.
        infeasible: why there is none.
        needed_bytes_per_s: bandwidth of the link below which there is none.
        trace_s, plan_s: seconds it took.
    """

    trace: StepTrace
    problem: Problem
    schedule: Schedule | None
    infeasible: InfeasibleError | None
    needed_bytes_per_s: float
    trace_s: float
    plan_s: float

    @property
    def blocking_peak_bytes(self) -> int:
        """With a duplicate of the whole state at once, as CheckFreq makes it."""
        return self.problem.peak_bytes + self.problem.size_bytes

    @property
    def disk_bytes_per_s(self) -> float:
        """That a disk must take to persist the checkpoint of every step (section IV-B)."""
        return self.problem.size_bytes / self.problem.step_s

    def every_steps(self, disk_bytes_per_s: float) -> int:
        """The smallest ``k`` such that a disk keeps up with every ``k``-th checkpoint."""
        return max(1, math.ceil(self.disk_bytes_per_s / disk_bytes_per_s))


def trace_of(
    training: Training, batch: int, optimizer: Optimizers, *, in_backward: bool = False
) -> StepTrace:
    """A step of a model, traced on the meta device, twice; on the CPU where that cannot be.

    Args:
        in_backward: each parameter is updated as soon as its gradient is there.

    Raises:
        UnsupportedStateError: the second step is not like the first.
    """
    try:
        with torch.device("meta"):
            first, second = _two(training, batch, optimizer, in_backward)
    except UnsupportedStateError:  # an operator that needs data; the trace says where it was made
        first, second = _two(training, batch, optimizer, in_backward)
    if first.signature != second.signature:
        raise UnsupportedStateError(
            "two steps of this model are not alike: what it does depends on its data, so no plan "
            "holds for every step",
            leaves=(("model", "a step that depends on data"),),
            hint='method="lazy" needs no plan',
        )
    return first


def plan_step(
    trace: StepTrace,
    trace_s: float,
    device: Device | None,
    link_bytes_per_s: float,
    mode: Mode,
    *,
    exact_s: float | None = None,
) -> Planned:
    """Plans a traced step.

    Args:
        device: whose roofline gives the times of operators; None: as measured.
        exact_s: look for the best plan of the same chunks, for at most so long.

    Raises:
        UnavailableError: an exact plan was asked for, and there is no solver.
    """
    problem = problem_of(trace, seconds_of(trace.operators, device), link_bytes_per_s)
    start_s = time.perf_counter()
    found: Schedule | None = None
    infeasible: InfeasibleError | None = None
    try:
        found = schedule(problem, mode)
        if exact_s is not None:
            found = exact(problem, mode, found.chunk_bytes, limit_s=exact_s) or found
    except InfeasibleError as error:
        infeasible = error
    plan_s = time.perf_counter() - start_s
    needed = problem.needed_bytes_per_s(mode)
    return Planned(trace, problem, found, infeasible, needed, trace_s, plan_s)


def _two(
    training: Training, batch: int, optimizer: Optimizers, in_backward: bool
) -> tuple[StepTrace, StepTrace]:
    """Two steps, one behind the other."""
    model, loss = training(batch)
    update: Optimizer | dict[nn.Parameter, Optimizer]
    if in_backward:
        update = {parameter: optimizer([parameter]) for parameter in model.parameters()}
    else:
        update = optimizer(model.parameters())
    return trace_training(model, update, loss), trace_training(model, update, loss)
