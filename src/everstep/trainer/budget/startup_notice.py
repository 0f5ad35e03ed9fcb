"""Lines printed at the start: the chosen method, and the memory and disk space it will take.

Only the training process imports this module: it needs libraries that the keeper does not load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from rich.filesize import decimal

from everstep.config.options import History, Options
from everstep.keeper.log.log_room import folder_bytes
from everstep.seams.files.filesystem import FileSystem
from everstep.state.ranks.rank_info import RankInfo
from everstep.state.survey.survey import Shape
from everstep.tiers.disk import storage_errors
from everstep.tiers.options import TierOptions
from everstep.tiers.rate import pace_s
from everstep.trainer.budget.disk import Bounds, budget_in_words
from everstep.trainer.budget.host_memory import bases_in_flight_max, mark_entries
from everstep.trainer.budget.log_limits import LogLimits

__all__ = [
    "copies_notice",
    "disk_notice",
    "marks_notice",
    "startup_notice",
]


def disk_notice(
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


_MARKED_MIN_BYTES = 1 << 20


_PLAIN_SHARE = 10  # of gradients; less plain data is not worth a word


def startup_notice(
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
    """Return the first line: the chosen method, and the memory and disk space it will take.

    Args:
        whose: name of the run, and of the rank if there are several.
        gradients: result of :func:`gradients_of`. A dense log records the gradients of each step.
        disk_bytes: bytes of all bases on disk at the same time, with their records.
        memory_bytes: host memory of a base.
        plain_bytes: bytes of plain data, which each base and each step of a log contains.
        residual_bytes: bytes of error feedback, which each step mark of a log contains.
        static_bytes: bytes of entries that never change, which bases link to after the first write.
        is_all: False if optimizers may create more state in their first step.
        parks: True if captures between bases are kept, too (with a capture of every step).
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


def marks_notice(shape: Shape, recorded_bytes: int) -> str | None:
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


def copies_notice(
    bounds: Bounds, places: Sequence[TierOptions], world: int, gradients_bytes: int
) -> str:
    """Return the line about copies: how many are kept at each place, and their size.

    Args:
        gradients_bytes: bytes that the log of this rank takes in each step, including residuals;
            0 if unknown because they are compressed.
    """
    notices = [
        f"{place.where}: keep {place.keep}, up to {decimal(size_bytes)}"
        f"{_log_announcement(place, gradients_bytes)}{_cap_announcement(place, world)}"
        for place, (_, size_bytes) in zip(places, bounds.copies, strict=True)
    ]
    of = "" if world == 1 else " of this rank"
    return f"copies{of} in {'; in '.join(notices)}"


def _log_announcement(place: TierOptions, gradients_bytes: int) -> str:
    if place.log == "none":
        return ""
    size_bytes = gradients_bytes
    form = "exact"
    if place.log == "adaptive":  # float16 values and int32 indices instead of 4 bytes
        form = "lossy"
        size_bytes = round(gradients_bytes * place.log_ratio * 6 / 4)
    about = f", about {decimal(size_bytes)} in each step" if size_bytes else ""
    return f", and the log after them, {form}{about}"


def _cap_announcement(place: TierOptions, world: int) -> str:
    cap = place.objects_per_hour
    share = place.of_rank(world).objects_per_hour
    if cap is None:
        return ""
    whose = "" if world == 1 else f" by all {world} ranks, {share} by this one"
    pace = "" if place.log == "none" else f" (a segment of the log every {pace_s(share):.0f} s)"
    return f", at most {cap} objects an hour{whose}{pace}"
