"""Memory and disk space that a Checkpointer will need: computed, checked, and printed at the start.

Everything is computed before the run folder is opened, so that a refused start leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from everstep.config.options import Options
from everstep.seams.stderr import print_line
from everstep.state.ranks.log_shares import bytes_logged_elsewhere
from everstep.state.survey.survey import Shape
from everstep.state.training_state import State
from everstep.trainer.budget.disk import Bounds, bounds_of, check_disk_budget, log_step_bytes
from everstep.trainer.budget.first_update import shape_after_first_update
from everstep.trainer.budget.host_memory import (
    MemoryPlan,
    base_memory_bytes,
    gradients_of,
    mark_memory_bytes,
    peer_log_bytes,
    plan_memory,
)
from everstep.trainer.budget.log_limits import LogLimits
from everstep.trainer.budget.startup_notice import (
    copies_notice,
    disk_notice,
    marks_notice,
    startup_notice,
)
from everstep.trainer.checks.keeper_replay import why_inexact
from everstep.trainer.job.peer_nodes import memory_notice, peer_notice
from everstep.trainer.job.place import RunPlace
from everstep.trainer.log.residuals import residual_bytes

__all__ = ["Footprint", "print_footprint"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Expected sizes of the state of this rank, and the limits that follow from the budgets.

    Attributes:
        shape: shape of the state after the first update of each optimizer.
        is_complete: False if an optimizer may create further state that cannot be predicted.
        state_bytes: host memory of a base.
        gradients: number of parameter elements, and bytes of the gradients of a step.
        residual_bytes: bytes of error feedback in each step mark.
        recorded_bytes: bytes that a log records in each step; compressed gradients count as 0.
        static_bytes: bytes of static entries that bases link to; multi-step bases do not link.
        memory: shares of the host memory.
        bounds: upper bounds for all places.
        limits: limits of the log, as far as they follow from host memory.
        peer_log_bytes: memory here for logs of other ranks; None if no log is sent to peers.
    """

    shape: Shape
    is_complete: bool
    state_bytes: int
    gradients: tuple[int, int]
    residual_bytes: int
    recorded_bytes: int
    static_bytes: int
    memory: MemoryPlan
    bounds: Bounds
    limits: LogLimits
    peer_log_bytes: int | None

    @classmethod
    def of(cls, options: Options, place: RunPlace, state: State) -> Footprint:
        """Measure the state, predict the entries that optimizers will add, and check the budgets.

        Raises:
            OutOfSpaceError: A budget is too small.
        """
        shape, is_complete = shape_after_first_update(state, state.survey().shape)
        elements, gradient_bytes = gradients_of(state.optimizers.values())
        if options.logs:
            gradient_bytes -= bytes_logged_elsewhere(state)
        state_bytes = base_memory_bytes(shape)
        mark_bytes = mark_memory_bytes(shape)
        residuals = residual_bytes(state) if options.logs else 0
        recorded_bytes = residuals + (0 if options.method.log == "topk" else gradient_bytes)
        memory = plan_memory(
            options,
            state.ranks,
            place.peers,
            state_bytes=state_bytes,
            step_bytes=gradient_bytes + mark_bytes,
        )
        bounds = bounds_of(
            options,
            shape,
            state.ranks,
            place.tiers,
            host_bytes=memory.arena_bytes + memory.replica_bytes + memory.own_bytes,
            peer_bytes=memory.peer_bytes,
        )
        on_disk = options.log_on_disk
        check_disk_budget(
            options,
            place.run,
            bounds.base_bytes,
            beside=bounds.beside,
            other_bytes=bounds.other_bytes if on_disk else 0,
            step_bytes=log_step_bytes(shape, recorded_bytes) if on_disk else 0,
        )
        limits = LogLimits()
        if options.logs:
            limits = LogLimits.of(memory.host_bytes, memory.arena_bytes, state_bytes)
            limits.check(mark_bytes)
        peer_log = None
        if options.logs and place.peers is not None and place.peers.log != "none":
            peer_log = peer_log_bytes(state.ranks, memory.peer_bytes, bounds.base_bytes)
        return cls(
            shape=shape,
            is_complete=is_complete,
            state_bytes=state_bytes,
            gradients=(elements, gradient_bytes),
            residual_bytes=residuals,
            recorded_bytes=recorded_bytes,
            static_bytes=0 if options.is_multistep else shape.static_bytes,
            memory=memory,
            bounds=bounds,
            limits=limits,
            peer_log_bytes=peer_log,
        )

    def copying(self, gradient_bytes: int) -> Footprint:
        """Return the footprint with another number of gradient bytes in a step."""
        return replace(self, gradients=(self.gradients[0], gradient_bytes))


def print_footprint(
    footprint: Footprint,
    options: Options,
    place: RunPlace,
    state: State,
    limits: LogLimits,
    *,
    in_process: bool,
) -> None:
    """Print the lines of the start.

    Args:
        limits: limits of the log, with those of the disk.
        in_process: the keeper is a separate process.
    """
    ranks = state.ranks
    run = place.run
    name = str(run) if ranks.world == 1 else f"{run}: rank {ranks.rank} of {ranks.world}"
    print_line(
        startup_notice(
            options,
            name,
            footprint.shape.size_bytes,
            footprint.memory.host_bytes,
            footprint.gradients,
            disk_bytes=footprint.bounds.disk_bytes,
            memory_bytes=footprint.state_bytes,
            plain_bytes=sum(footprint.shape.objects_bytes.values()),
            residual_bytes=footprint.residual_bytes,
            static_bytes=footprint.static_bytes,
            is_all=footprint.is_complete,
            parks=ranks.world == 1 and not options.method.in_memory,
        )
    )
    filesystem = place.seams.filesystem
    if on_disk := disk_notice(filesystem, run, options, footprint.bounds, limits, ranks):
        print_line(f"everstep: {name}: {on_disk}")
    for notice in _further_notices(footprint, options, place, state, in_process=in_process):
        print_line(f"everstep: {name}: {notice}")


def _further_notices(
    footprint: Footprint, options: Options, place: RunPlace, state: State, *, in_process: bool
) -> Iterator[str]:
    """Yield the lines of the start about the log, copies, peers, and the method's restrictions."""
    ranks = state.ranks
    in_memory = options.method.in_memory
    if options.logs and (marked := marks_notice(footprint.shape, footprint.recorded_bytes)):
        yield marked
    if place.tiers:
        yield copies_notice(footprint.bounds, place.tiers, ranks.world, footprint.recorded_bytes)
    if in_memory:
        yield memory_notice(ranks, options.method.disk_every, footprint.memory.own_bytes)
    if place.peers is not None and ranks.nodes:
        yield peer_notice(
            place.peers,
            ranks,
            footprint.memory.peer_bytes,
            footprint.peer_log_bytes,
            at_once=in_memory,
        )
    alone = ranks.world == 1
    if options.is_scheduled and not in_memory and not (alone and in_process):
        where = "without a keeper process" if alone else "with several ranks"
        yield f"{where}, captures between bases are not kept: none is taken"
    computes = options.is_multistep and not options.leaves_bases_fuzzy
    if (options.has_replica or computes) and (why := why_inexact(state)):
        yield why
