"""Budgets: computed, printed and enforced before anything is captured (I10)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

import torch
from rich.filesize import decimal

from everstep.arena import PAGE_BYTES
from everstep.arena.memory import CONTROL_BYTES, PROGRESS_WORDS
from everstep.config.options import History, Options
from everstep.errors import OutOfSpaceError
from everstep.link.record_memory import RECORD_BYTES
from everstep.seams.machine import file_bytes_max, memory_available_bytes
from everstep.state.entries import Entry
from everstep.state.layout import plan_shards
from everstep.state.ranks.dtensors import local_of
from everstep.state.survey.survey import Shape, is_reserved

__all__ = [
    "DAY_S",
    "DayMeter",
    "Forecast",
    "announcement",
    "arena_budget_bytes",
    "base_memory_bytes",
    "bases_in_flight_max",
    "budget_in_words",
    "check_disk_budget",
    "check_multistep_budget",
    "gradients_of",
    "host_budget_bytes",
    "interval_steps_within",
    "log_budget_bytes",
    "log_step_bytes",
    "mark_memory_bytes",
    "marks_announcement",
    "own_budget_bytes",
    "replica_budget_bytes",
]

DAY_S = 86_400.0
_SLOT_S = 600.0
_NEVER_STEPS = 1 << 62
_IN_FLIGHT_MIN = 2
_QUEUE_BYTES = 64 << 20
_MARKED_MIN_BYTES = 1 << 20
_PLAIN_SHARE = 10  # of gradients; less plain data is not worth a word
_STEP_BYTES = 16384  # random states, and what says what the records of a step are


def base_memory_bytes(shape: Shape) -> int:
    """What a base of a state takes of host memory, in whole pages: its tensors, as they lie in the
    arena, and its plain data, which lies beside it."""
    static = shape.static  # in files of their own
    apart = [[e for e in shape.entries if (e.name in static) is kind] for kind in (False, True)]
    sizes = [layout.size_bytes for entries in apart for layout in plan_shards(entries)]
    return sum(map(_pages_bytes, [*sizes, sum(shape.objects_bytes.values())]))


def _pages_bytes(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def host_budget_bytes(options: Options, state_bytes: int, ranks_here: int = 1) -> int:
    """Host memory for captured state: by default, half of what is available.

    Args:
        ranks_here: of the job on this machine, which share that half.

    Raises:
        OutOfSpaceError: when the method needs more, with the number of bytes.
    """
    budget = options.budget.host_bytes or memory_available_bytes() // (2 * ranks_here)
    times = _bases_at_once(options)
    if options.method.base != "sync" and budget < times * state_bytes:
        raise OutOfSpaceError(
            f'method="{options.method_name}" copies the state ({state_bytes} bytes) into host '
            f"memory{', twice' if times == 2 else ''}; the budget is {budget} bytes",
            hint=f'Budget(host_bytes={times * state_bytes}) or more, or method="sync"',
        )
    return budget


def _bases_at_once(options: Options) -> int:
    # Where every step is captured, the capture before stays until the next is whole.
    return 2 if options.is_scheduled else 1


def arena_budget_bytes(options: Options, budget_bytes: int, state_bytes: int) -> int:
    """Return how much of the host memory that is left for it the arena may have.

    A keeper process shares the arena as a file in memory, which the limit of file sizes
    (``ulimit -f``) counts although its pages are taken only as they are needed.

    Args:
        budget_bytes: what the budget of host memory leaves for the arena.

    Raises:
        OutOfSpaceError: a base does not fit within the limit, with both numbers.
    """
    limit_bytes = file_bytes_max()
    if limit_bytes is None or options.method.base == "sync" or not options.keeper.process:
        return budget_bytes
    most_bytes = max(0, limit_bytes - CONTROL_BYTES) // PAGE_BYTES * PAGE_BYTES
    need_bytes = _bases_at_once(options) * state_bytes
    if most_bytes < need_bytes:
        raise OutOfSpaceError(
            f"the state takes {need_bytes} bytes of memory that training shares with its keeper, "
            f"and the limit of file sizes (ulimit -f) of {limit_bytes} bytes leaves {most_bytes}",
            hint=f"a limit of {need_bytes + CONTROL_BYTES} bytes or more (ulimit -f unlimited), "
            "KeeperOptions(process=False), or method='sync'",
        )
    return min(budget_bytes, most_bytes)


def bases_in_flight_max(options: Options, state_bytes: int) -> int | None:
    """How many bases may be in host memory that are on no disk yet; None: as many as fit.

    One that waits for a slow disk behind others is of no use before those are written, so training
    waits instead; unless memory was set apart for a queue, the state is so small that a few more
    are nothing, or the method has a bound of its own.
    """
    if options.budget.host_bytes is not None or options.is_scheduled:
        return None
    return min(PROGRESS_WORDS, max(_IN_FLIGHT_MIN, _QUEUE_BYTES // max(1, state_bytes)))


def own_budget_bytes(options: Options, host_bytes: int, state_bytes: int, *, peers: bool) -> int:
    """What bases of this rank that live in memory may take of the host memory: with what comes
    from peers a third, otherwise a half. Beside it captures need room.

    Args:
        state_bytes: with what optimizers will keep behind their first update.
        peers: other ranks' bases are held here, too.

    Raises:
        OutOfSpaceError: two bases do not fit, with the number of bytes.
    """
    if not options.method.in_memory:
        return 0
    parts = 3 if peers else 2
    found = host_bytes // parts
    if found < 2 * state_bytes:
        raise OutOfSpaceError(
            f"the newest two bases ({state_bytes} bytes each) live in the keeper's memory; of "
            f"{host_bytes} bytes of host memory {found} are for them",
            hint=f"Budget(host_bytes={2 * parts * state_bytes}) or more, or method='lazy'",
        )
    return found


def replica_budget_bytes(
    options: Options, host_bytes: int, state_bytes: int, step_bytes: int
) -> int:
    """What a replica may take of the host memory: a half. In the other are the base that it begins
    with and the steps that wait while it is written (at most two states, and the records
    of two steps).

    Args:
        step_bytes: of the records of a step.

    Raises:
        OutOfSpaceError: it is too little, with the number of bytes.
    """
    need = 2 * (state_bytes + 2 * step_bytes)
    if options.has_replica and host_bytes < need:
        raise OutOfSpaceError(
            f"a replica of the state ({state_bytes} bytes), and the records of two steps beside "
            f"the base that it begins with, take {need} bytes of host memory; the budget is "
            f"{host_bytes} bytes",
            hint=f"Budget(host_bytes={need}) or more, or apply='recovery'",
        )
    return host_bytes // 2 if options.has_replica else 0


def check_multistep_budget(
    options: Options, host_bytes: int, state_bytes: int, gradient_bytes: int
) -> None:
    """Refuses parts whose gradients do not fit beside the base.

    Args:
        gradient_bytes: of a step.

    Raises:
        OutOfSpaceError: with the number of bytes, or of parts, that would fit.
    """
    parts = options.method.parts
    if not isinstance(parts, int):
        return
    need = state_bytes + gradient_bytes * (parts - 1) // 2
    if host_bytes < need:
        fit = 1 + 2 * max(0, host_bytes - state_bytes) // max(1, gradient_bytes)
        raise OutOfSpaceError(
            f"a base in {parts} parts takes {need} bytes of host memory, with the gradients that "
            f"bring them to one step; the budget is {host_bytes} bytes",
            hint=f"Budget(host_bytes={need}) or more, or parts={fit}",
        )


def log_budget_bytes(arena_bytes: int, state_bytes: int) -> int:
    """Host memory for the gradient log: what two bases at turnover leave; at least a half of what
    one leaves."""
    return max(arena_bytes - 2 * state_bytes, (arena_bytes - state_bytes) // 2)


def check_disk_budget(
    options: Options,
    run: PurePath,
    base_bytes: int,
    *,
    beside: int = 1,
    step_bytes: int = 0,
    other_bytes: int = 0,
) -> None:
    """Refuses a base that does not fit the budget beside those to keep, and their log.

    Args:
        base_bytes: of one, as files.
        beside: bases that are there before the oldest goes, beyond those to keep.
        step_bytes: of a step of the log on disk, at most; the log behind each base is there, of as
            many steps as are between two, or, where that is not given in steps, of at least two.
        other_bytes: what else is there.

    Raises:
        OutOfSpaceError: with the number of bytes, of bases, or of steps that would fit.
    """
    budget = options.budget.disk_bytes
    bases = options.keep + beside
    steps = (options.every.steps or 2) * options.method.disk_every if step_bytes else 0
    each = base_bytes + steps * step_bytes
    need = bases * each + other_bytes
    if budget is None or need <= budget:
        return
    log = f", and behind each a log of {_steps(steps)}," if steps else ""
    fit = (budget - other_bytes) // each - beside
    instead = [f"Budget(disk_bytes={need})", *([f"keep={fit}"] if fit > 0 else [])]
    if options.every.steps is not None and steps:
        left = (budget - other_bytes) // bases - base_bytes
        every = left // (step_bytes * options.method.disk_every)
        instead += [f"every={every}"] if every > 0 else []
    raise OutOfSpaceError(
        f"{options.keep} bases to keep and {'one' if beside == 1 else beside} being written{log} "
        f"take {need} bytes, the budget is {budget}",
        path=run,
        hint=", or ".join(instead),
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run writes to disk in a day of training.

    Attributes:
        bases_bytes, log_bytes: by bases, and by a log that goes to disk.
    """

    bases_bytes: float
    log_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.bases_bytes + self.log_bytes

    @property
    def in_words(self) -> str:
        """``"bases of 4.6 GB and a log of 33.0 GB"``."""
        bases = decimal(round(self.bases_bytes))
        log = decimal(round(self.log_bytes))
        return f"bases of {bases}" + (f" and a log of {log}" if self.log_bytes else "")


class DayMeter:
    """How much of a growing total falls into the last 24 hours; never too little."""

    def __init__(self) -> None:
        self._slots: deque[tuple[float, int]] = deque()  # when each began, and the total then
        self._total = 0

    def reached(self, now_s: float, total: int) -> None:
        """The total is now so large."""
        if not self._slots or now_s - self._slots[-1][0] >= _SLOT_S:
            self._slots.append((now_s, self._total))
        self._total = max(self._total, total)

    def last_day_bytes(self, now_s: float) -> int:
        """Of the last day, and at most ten minutes more."""
        while len(self._slots) > 1 and self._slots[1][0] <= now_s - DAY_S:
            self._slots.popleft()
        return self._total - self._slots[0][1] if self._slots else 0


def interval_steps_within(bytes_per_day: float, base_bytes: int, step_s: float) -> int:
    """The fewest steps between bases whose writes stay within ``bytes_per_day``."""
    if bytes_per_day <= 0:
        return _NEVER_STEPS
    return min(_NEVER_STEPS, max(1, math.ceil(base_bytes * DAY_S / (step_s * bytes_per_day))))


def budget_in_words(options: Options) -> str:
    """The daily write budget: ``"budget of 40.0 GB a day"``."""
    budget = options.budget.write_bytes_per_day
    return "no daily budget" if budget is None else f"budget of {decimal(budget)} a day"


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


def gradients_of(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[int, int]:
    """How many elements of parameters are here, and the bytes of all their gradients that may be
    there."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = {id(parameter): parameter for group in groups for parameter in group["params"]}
    taught = [parameter for parameter in found.values() if parameter.requires_grad]
    return (
        sum(local_of(parameter).numel() for parameter in found.values()),
        sum(local_of(one).numel() * one.element_size() for one in taught),
    )


def announcement(
    options: Options,
    whose: str,
    state_bytes: int,
    host_bytes: int,
    gradients: tuple[int, int] = (0, 0),
    *,
    disk_bytes: int,
    memory_bytes: int = 0,
    plain_bytes: int = 0,
    residual_bytes: int = 0,
    static_bytes: int = 0,
    is_all: bool = True,
    parks: bool = True,
) -> str:
    """The line printed at start: what was chosen, and what it will take.

    Args:
        whose: the run, and which rank of several.
        gradients: as :func:`gradients_of` says; those of a step are what a dense log records.
        disk_bytes: of all bases at once, their records included.
        memory_bytes: of host memory for a base.
        plain_bytes: of plain data, which each base and each step of a log holds.
        residual_bytes: of error feedback, which each step mark of a log holds.
        static_bytes: of entries that never change, which bases link to once they are written.
        is_all: False: optimizers may make more state in their first step.
        parks: captures that are not due are held, too, where every step is captured.
    """
    parameters, gradient_bytes = gradients
    when = options.every.in_words
    state = decimal(state_bytes)
    if parameters:
        each = state_bytes / parameters
        shown = f"{each:.0f}" if each >= 1000 else f"{each:.3g}"
        state += f"{'' if is_all else ' at the start'} ({shown} bytes per parameter)"
    log = "compressed gradients"
    if options.method.log == "dense":
        log = f"{decimal(gradient_bytes)} of gradients"
    if residual_bytes:
        log += f" and {decimal(residual_bytes)} of residuals"
    if plain_bytes > gradient_bytes // _PLAIN_SHARE:
        log += f" and {decimal(plain_bytes)} of plain data"
    host = "a few chunks"
    if options.method.base != "sync":
        host = f"{decimal(state_bytes)} per base in flight"
        if options.method.base != "checkfreq":  # there it is one
            most = bases_in_flight_max(options, memory_bytes)
            host += "" if most is None else f", {most} at most"
        if options.is_scheduled and parks:
            when = f"a capture every step, durable {when}"
            host = f"{decimal(2 * state_bytes)}, {decimal(3 * state_bytes)} while a base is written"
        if options.logs:
            both = "a base and its replica" if options.has_replica else "two bases"
            host = f"{decimal(2 * state_bytes)} for {both} and {log} for each step since"
        if options.is_multistep:
            host += f" and up to half of {decimal(gradient_bytes)} of gradients for each part"
        host += f" (budget {decimal(host_bytes)})"
    written = f"{decimal(state_bytes - static_bytes)} per base"
    if static_bytes:
        written += f", {decimal(static_bytes)} of static entries once"
    if options.leaves_bases_fuzzy:
        written += f" and up to half of {decimal(gradient_bytes)} of gradients for each part"
    if options.log_on_disk:
        batch = "batch_steps=auto" if options.batch_auto else str(options.log.batch_first)
        written += f", {log} per step, in segments of {batch}"
    disk = decimal(disk_bytes)
    if options.budget.disk_bytes is not None:
        of = " for bases, the log has the rest of" if options.log_on_disk else " of"
        disk += f"{of} a budget of {decimal(options.budget.disk_bytes)}"
    elif options.log_on_disk:
        disk += " and the log"
        if History.parse(options.log.history).is_more:
            disk += f" with its bases (history={options.log.history!r})"
    return (
        f"everstep: {whose}: {options.method_name}, {when}, keep {options.keep}; state {state}; "
        f"host memory {host}; disk up to {disk}, written "
        f"{written} ({budget_in_words(options)})"
    )


def log_step_bytes(shape: Shape, recorded_bytes: int) -> int:
    """What a step takes in a log on disk, at most: what is recorded, what its mark holds besides,
    objects and random states included, and what says what they are."""
    entries = sum(entry.size_bytes for entry in _in_marks(shape))
    return recorded_bytes + entries + sum(shape.objects_bytes.values()) + _STEP_BYTES


def mark_memory_bytes(shape: Shape) -> int:
    """What the mark of a step takes of host memory, in a log of a state of this shape."""
    entries_bytes = sum(entry.size_bytes for entry in _in_marks(shape))
    return _pages_bytes(entries_bytes) + sum(shape.objects_bytes.values()) + RECORD_BYTES


def _in_marks(shape: Shape) -> list[Entry]:
    """What each step mark holds in full, but for what everstep keeps itself."""
    owners = shape.owners  # not of what the first update is expected to make
    marked = {name for name, one in owners.items() if one.in_marks and not is_reserved(name)}
    return [entry for entry in shape.entries if entry.name in marked]


def marks_announcement(shape: Shape, recorded_bytes: int) -> str | None:
    """The line that follows where each step mark of a log holds much besides, as of models that
    are frozen for the most part; None where that is less than what is recorded anyway.

    Args:
        recorded_bytes: of a step: gradients, and residuals, which marks hold, too.
    """
    held = _in_marks(shape)
    size_bytes = sum(entry.size_bytes for entry in held)
    if size_bytes < max(_MARKED_MIN_BYTES, recorded_bytes):
        return None
    largest = max(held, key=lambda entry: entry.size_bytes)
    return (
        f"each step of the log holds {decimal(size_bytes)} besides, which no optimizer updates "
        f'({largest.name!r} is the largest): static=["name/*"] for what never changes, '
        'declared={"name/*": function} for what a function of the program updates'
    )
