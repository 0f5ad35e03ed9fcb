"""Memory and disk space that a Checkpointer will need: computed, checked, and printed at the start.

Everything is computed before the run folder is opened, so that a refused start leaves no trace.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.filesize import decimal

from everstep.commit.job import COORDINATOR
from everstep.config import History, Options
from everstep.config.promise import Promise
from everstep.errors import EverstepError
from everstep.keeper.log import folder_bytes
from everstep.seams import FileSystem
from everstep.seams.progress import log_or_print
from everstep.state.ranks import RankInfo
from everstep.state.ranks.log_shares import bytes_logged_elsewhere
from everstep.state.survey import Shape
from everstep.state.training_state import State
from everstep.tiers import TierOptions, storage_errors
from everstep.trainer.budget import (
    RUN_BYTES,
    Bounds,
    LogLimits,
    MemoryPlan,
    base_memory_bytes,
    bases_in_flight_max,
    bounds_of,
    budget_in_words,
    captures_at_once,
    check_disk_budget,
    gradients_of,
    log_step_bytes,
    mark_entries,
    mark_memory_bytes,
    parks_captures,
    peer_log_bytes,
    plan_memory,
    shape_after_first_update,
)
from everstep.trainer.checks import (
    refuse_method,
    residual_bytes,
    why_inexact,
    why_replay_is_inexact,
)
from everstep.trainer.job import RunPlace, memory_notice, peer_notice
from everstep.trainer.job.place import TIERCHECK, tiercheck_notice
from everstep.trainer.refusals import in_one_line

_MARKED_MIN_BYTES = 1 << 20
_PLAIN_SHARE = 10  # of gradients; less plain data is not worth a word


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
        parks: captures of steps without a base are kept in memory.
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
    parks: bool

    @classmethod
    def of(cls, options: Options, place: RunPlace, state: State) -> Footprint:
        """Measure the state, predict the entries that optimizers will add, and check the budgets.

        Raises:
            OutOfSpaceError: A budget is too small.
        """
        shape, is_complete = shape_after_first_update(state, state.survey().shape)
        elements, gradient_bytes = gradients_of(state.optimizers.values())
        if options.logs:
            # Under DDP each rank records only its share of the gradients.
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
        bounds = bounds_of(options, shape, state.ranks, place.tiers)
        on_disk = options.log_on_disk
        check_disk_budget(
            options,
            place.run,
            bounds.base_bytes,
            beside=bounds.beside,
            other_bytes=RUN_BYTES if on_disk else 0,
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
            parks=parks_captures(options, state.ranks.world, memory.arena_bytes, state_bytes),
        )


def refusal_of(options: Options, place: RunPlace, state: State) -> str:
    """Return why ``method="auto"`` cannot choose the method of these options; empty if it can.

    A start with them would be refused, or a recovery would not be exact.
    """
    try:
        Footprint.of(options, place, state)
        refuse_method(options, state)
    except EverstepError as error:
        return in_one_line(error)
    return why_replay_is_inexact(options, state)


def print_footprint(
    footprint: Footprint,
    options: Options,
    place: RunPlace,
    state: State,
    limits: LogLimits,
    *,
    in_process: bool,
) -> None:
    """Report what the run will take: one line, or several, of rank 0.

    Args:
        limits: limits of the log, with those of the disk.
        in_process: the keeper is a separate process.
    """
    ranks = state.ranks
    run = place.run
    name = str(run) if ranks.world == 1 else f"{run}: rank {ranks.rank} of {ranks.world}"
    # One rank speaks for all: there may be thousands.
    level = logging.INFO if ranks.rank == COORDINATOR else logging.DEBUG
    log_or_print(_first_notice(footprint, options, name, ranks.world), level=level)
    for notice in _assurances(footprint, options, place):
        log_or_print(f"{name}: {notice}", level=level)
    filesystem = place.seams.filesystem
    if on_disk := _disk_notice(filesystem, run, options, footprint.bounds, limits, ranks):
        log_or_print(f"{name}: {on_disk}", level=level)
    for notice in _further_notices(footprint, options, place, state, in_process=in_process):
        log_or_print(f"{name}: {notice}", level=level)


def _further_notices(
    footprint: Footprint, options: Options, place: RunPlace, state: State, *, in_process: bool
) -> Iterator[str]:
    """Yield the lines of the start about the log, copies, peers, and the method's restrictions."""
    ranks = state.ranks
    in_memory = options.method.in_memory
    if options.logs and (marked := _marks_notice(footprint.shape, footprint.recorded_bytes)):
        yield marked
    if place.tiers:
        yield _copies_notice(footprint.bounds, place.tiers, ranks.world)
    if in_memory:
        yield memory_notice(ranks, options.method.disk_every, footprint.memory.own_bytes)
    if place.peers is not None and ranks.nodes:
        yield peer_notice(ranks, footprint.memory.peer_bytes, footprint.peer_log_bytes)
    if options.is_scheduled and not in_memory and not (footprint.parks and in_process):
        why = "without a keeper process,"
        if options.keeper.process:
            need_bytes = captures_at_once(ranks.world) * footprint.state_bytes
            why = f"several ranks need Budget(host_bytes={need_bytes}) or more on each of them; so"
        yield f"{why} captures between bases are not kept: none is taken"
    computes = options.is_multistep and not options.leaves_bases_fuzzy
    if (options.has_replica or computes) and (why := why_inexact(state)):
        yield why


_HOLDERS = {
    "keeper": "the memory of the keeper",
    "disk": "the run folder",
    "peer": "the memory of another node",
    "store": "a place for copies",
}


def _assurances(footprint: Footprint, options: Options, place: RunPlace) -> Iterator[str]:
    """Yield the lines about what comes back after a failure, and what it costs."""
    if options.promise is not None:
        yield _promise_notice(options.promise, logs=options.logs)
    if options.method_name == TIERCHECK:
        yield tiercheck_notice(place)
    if options.method.log == "adaptive":
        yield (
            "the log has approximate gradients: a step that is replayed from it is one that "
            "training never had, and its recovery is not exact; method='tiercheck' keeps the exact "
            "ones in local memory"
        )
    if size_bytes := footprint.residual_bytes:
        yield (
            f"besides compressed gradients each step of the log has {decimal(size_bytes)} of "
            "residuals; Compressor(error_feedback=False) has none, and trains differently"
        )


def _promise_notice(promise: Promise, *, logs: bool) -> str:
    what = "the log" if logs else "a base"
    return (
        f"promised: {promise.in_words}; a step waits, if it must, until {what} is in "
        f"{_HOLDERS[promise.holder]} (stats().stall_s['promise'])"
    )


def _disk_notice(
    filesystem: FileSystem,
    run: PurePath,
    options: Options,
    bounds: Bounds,
    limits: LogLimits,
    ranks: RankInfo,
) -> str | None:
    """Return the line about the disk budget; None if there is nothing to report.

    Raises:
        StorageError: The run folder cannot be read.
    """
    budget_bytes = options.budget.disk_bytes
    if budget_bytes is None:
        return None
    notices = []
    if limits.disk_bytes is not None and limits.interval_bytes is not None:
        notices.append(
            f"the log on disk may take {decimal(limits.interval_bytes)} between two bases; then a "
            "base is taken early"
        )
    with storage_errors("look at the run", run):
        present_bytes = sum(folder_bytes(filesystem, run, ranks.rank, ranks.world))
    if present_bytes + bounds.base_bytes > budget_bytes:
        notices.append(
            f"the run folder already has {decimal(present_bytes)}: with the first base it exceeds "
            "Budget(disk_bytes=); bases beyond keep= are deleted after it"
        )
    return "; ".join(notices) or None


def _first_notice(footprint: Footprint, options: Options, name: str, world: int) -> str:
    """Return the first line: the chosen method, and the memory and disk space it will take.

    Args:
        name: name of the run, and of the rank if there are several.
        world: number of ranks.
    """
    parameters = footprint.gradients[0]
    state_bytes = footprint.shape.size_bytes
    state = decimal(state_bytes)
    if parameters:
        each = state_bytes / parameters
        shown = f"{each:.0f}" if each >= 1000 else f"{each:.3g}"
        at = "" if footprint.is_complete else " at the start"
        state += f"{at} ({shown} bytes per parameter)"
    when = options.every.in_words
    if footprint.parks:
        when = f"a capture every step, durable {when}"
    disk = decimal(footprint.bounds.disk_bytes)
    if options.budget.disk_bytes is not None:
        of = " for bases, the log has the rest of" if options.log_on_disk else " of"
        disk += f"{of} a budget of {decimal(options.budget.disk_bytes)}"
    elif options.log_on_disk:
        disk += " and the log"
        if History.parse(options.log.history).is_more:
            disk += f" with its bases (history={options.log.history!r})"
    return (
        f"{name}: {options.method_name}, {when}, keep {options.keep.in_words}; "
        f"state {state}; host memory {_host_words(footprint, options, world)}; "
        f"disk up to {disk}, written {_written_words(footprint, options)} "
        f"({budget_in_words(options)}){_stage_words(options)}"
    )


def _stage_words(options: Options) -> str:
    """Return the GPU memory for captures; "" if there is none."""
    stage = options.budget.device_bytes
    if not stage:
        return ""
    size = "what is free" if isinstance(stage, str) else f"up to {decimal(stage)}"
    return f"; {size} of each GPU for captures"


def _log_words(footprint: Footprint, options: Options) -> str:
    """Return the size of a step in the log."""
    gradient_bytes = footprint.gradients[1]
    plain_bytes = sum(footprint.shape.objects_bytes.values())
    words = "compressed gradients"
    if options.method.log == "dense":
        words = f"{decimal(gradient_bytes)} of gradients"
    if footprint.residual_bytes:
        words += f" and {decimal(footprint.residual_bytes)} of residuals"
    if plain_bytes > gradient_bytes // _PLAIN_SHARE:
        words += f" and {decimal(plain_bytes)} of plain data"
    return words


def _host_words(footprint: Footprint, options: Options, world: int) -> str:
    """Return the host memory that the method takes."""
    if options.method.base == "sync":
        return "a few chunks"
    state_bytes = footprint.shape.size_bytes
    words = f"{decimal(state_bytes)} per base in flight"
    if options.method.base != "checkfreq":  # there it is one
        most = bases_in_flight_max(options, footprint.state_bytes)
        words += "" if most is None else f", {most} at most"
    if footprint.parks:
        times = captures_at_once(world)
        words = (
            f"{decimal((times - 1) * state_bytes)}, {decimal(times * state_bytes)} while a base is "
            "written"
        )
    if options.logs:
        both = "a base and its replica" if options.has_replica else "two bases"
        log = _log_words(footprint, options)
        words = f"{decimal(2 * state_bytes)} for {both} and {log} for each step since"
    if options.is_multistep and not options.logs:
        words += f" and up to half of {decimal(footprint.gradients[1])} of gradients for each part"
    return f"{words} (budget {decimal(footprint.memory.host_bytes)})"


def _written_words(footprint: Footprint, options: Options) -> str:
    """Return the bytes that bases and a log write to disk."""
    words = f"{decimal(footprint.shape.size_bytes - footprint.static_bytes)} per base"
    if footprint.static_bytes:
        words += f", {decimal(footprint.static_bytes)} of static entries once"
    if options.leaves_bases_fuzzy:
        words += f" and up to half of {decimal(footprint.gradients[1])} of gradients for each part"
    if options.log_on_disk:
        batch = "batch_steps=auto" if options.batch_auto else str(options.log.batch_first)
        words += f", {_log_words(footprint, options)} per step, in segments of {batch}"
    return words


def _marks_notice(shape: Shape, recorded_bytes: int) -> str | None:
    """Return the line for a log whose step marks contain large entries; None for small ones.

    This happens with models that are mostly frozen.

    Args:
        recorded_bytes: bytes recorded in each step: gradients and residuals.
    """
    held = mark_entries(shape)
    size_bytes = sum(entry.size_bytes for entry in held)
    if size_bytes < max(_MARKED_MIN_BYTES, recorded_bytes):
        return None
    largest = max(held, key=lambda entry: entry.size_bytes)
    return (
        f"each step of the log also contains {decimal(size_bytes)} that no optimizer updates "
        f'({largest.name!r} is the largest): use static=["name/*"] for entries that never change, '
        'declared={"name/*": function} for entries that a function of the program updates'
    )


def _copies_notice(bounds: Bounds, places: Sequence[TierOptions], world: int) -> str:
    """Return the line about copies: how many are kept at each place, and their size."""
    notices = [
        f"{place.where}: keep {place.keep}, up to {decimal(size_bytes)}"
        for place, (_, size_bytes) in zip(places, bounds.copies, strict=True)
    ]
    of = "" if world == 1 else " of this rank"
    return f"copies{of} in {'; in '.join(notices)}"
