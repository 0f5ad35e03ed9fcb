"""Upper bounds for a run's disk space, and the daily write budget.

The bounds include records: headers, markers and manifests of a small state are not negligible. They
do not include leftovers of a failure (an incomplete base is removed with the next one), nor a log
on disk, which is announced separately.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.filesize import decimal

from everstep.commit.peer_copies import NEEDED_MAX
from everstep.config import Options
from everstep.errors import OutOfSpaceError
from everstep.format import ShardIdentity
from everstep.format.header import plan_files
from everstep.seams import FileSystem
from everstep.state.ranks import RankInfo
from everstep.state.survey import Shape
from everstep.tiers import TierOptions, storage_errors
from everstep.trainer.budget.host_memory import mark_entries

_RECORD_BYTES = 1024  # size of a marker for one file; about 450 bytes are used
RUN_BYTES = 8192
"""Bytes of the run folder without bases and log: ``run.json`` and a few timelines."""
# Growth of encoded objects before a base is planned again.
_DRIFT_BYTES = 4096
_DRIFT_SHARE = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds for this rank in bytes, as long as nothing fails.

    Attributes:
        base_bytes: files of one base, with its records.
        beside: bases on disk in addition to those to keep. One is being written. With several
            ranks there is one more, because other ranks write the next base before rank 0 has
            allowed them to delete the oldest. Peers may need further ones.
        disk_bytes: all bases in the run folder.
        copies: places for copies, and the bytes of this rank in each.
    """

    base_bytes: int
    beside: int
    disk_bytes: int
    copies: tuple[tuple[str, int], ...] = ()


def bounds_of(
    options: Options,
    shape: Shape,
    ranks: RankInfo,
    places: Sequence[TierOptions] = (),
) -> Bounds:
    """Return the bounds for a state of this shape."""
    base_bytes = _base_bytes(shape, ranks)
    copies = tuple(
        (place.where, ((place.keep or options.keep) + 1) * base_bytes + RUN_BYTES)
        for place in places
    )
    beside = 1 if ranks.world == 1 else 2
    if len(set(ranks.nodes)) > 1 and not options.method.in_memory:
        beside += max(0, 1 + NEEDED_MAX - options.keep)
    disk_bytes = (options.keep + beside) * base_bytes + RUN_BYTES
    return Bounds(base_bytes, beside, disk_bytes, copies)


def _base_bytes(shape: Shape, ranks: RankInfo) -> int:
    identity = ShardIdentity("0" * 32, 0, 0, 0, ranks.rank, ranks.world, True)
    files = plan_files(identity, shape.entries, shape.aliases, shape.objects_bytes)
    # A layout is used again while objects grow by less than this (state/survey.py), so a
    # base may exceed its plan.
    drift = sum(max(_DRIFT_BYTES, n // _DRIFT_SHARE) for n in shape.objects_bytes.values())
    marker = _RECORD_BYTES * max(1, len(files))
    # The marker, and the manifest, which contains the markers of all ranks.
    return sum(file.size_bytes for file in files) + drift + (2 + ranks.world) * marker


DAY_S = 86_400.0


_SLOT_S = 600.0


_NEVER_STEPS = 1 << 62


_STEP_BYTES = 16384  # random states and record headers of a step


def check_disk_budget(
    options: Options,
    run: PurePath,
    base_bytes: int,
    *,
    beside: int = 1,
    step_bytes: int = 0,
    other_bytes: int = 0,
) -> None:
    """Check that the bases to keep fit into the disk budget, with their logs.

    Args:
        base_bytes: files of one base.
        beside: bases on disk in addition to those to keep.
        step_bytes: maximum size of a step of the log on disk. Each base has a log of as many steps
            as the interval has, or of at least two if the interval is not given in steps.
        other_bytes: further bytes in the run folder.

    Raises:
        OutOfSpaceError: They do not fit. The hint names the bytes, bases or steps that would.
    """
    budget = options.budget.disk_bytes
    bases = options.keep + beside
    steps = (options.every.steps or 2) * options.method.disk_every if step_bytes else 0
    each = base_bytes + steps * step_bytes
    need = bases * each + other_bytes
    if budget is None or need <= budget:
        return
    log = f", each with a log of {_steps(steps)}," if steps else ""
    fit = (budget - other_bytes) // each - beside
    instead = [f"Budget(disk_bytes={need})", *([f"keep={fit}"] if fit > 0 else [])]
    if options.every.steps is not None and steps:
        left = (budget - other_bytes) // bases - base_bytes
        every = left // (step_bytes * options.method.disk_every)
        instead += [f"every={every}"] if every > 0 else []
    raise OutOfSpaceError(
        f"{options.keep} bases to keep and {'one' if beside == 1 else beside} being written{log} "
        f"need {need} bytes; the budget is {budget}",
        path=run,
        hint=", or ".join(instead),
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes that a run writes to disk in a day of training.

    Attributes:
        bases_bytes: bytes of bases.
        log_bytes: bytes of a log on disk.
    """

    bases_bytes: float
    log_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.bases_bytes + self.log_bytes

    @property
    def in_words(self) -> str:
        """Describe the forecast, as in ``"bases of 4.6 GB and a log of 33.0 GB"``."""
        bases = decimal(round(self.bases_bytes))
        log = decimal(round(self.log_bytes))
        return f"bases of {bases}" + (f" and a log of {log}" if self.log_bytes else "")


class DayMeter:
    """Measure the growth of a total in the last 24 hours, rounded up."""

    def __init__(self) -> None:
        self._slots: deque[tuple[float, int]] = deque()  # start time, and the total then
        self._total = 0

    def reached(self, now_s: float, total: int) -> None:
        """Note the current total."""
        if not self._slots or now_s - self._slots[-1][0] >= _SLOT_S:
            self._slots.append((now_s, self._total))
        self._total = max(self._total, total)

    def last_day_bytes(self, now_s: float) -> int:
        """Return the growth in the last day, plus at most ten minutes."""
        # The slot that began before the day stays, so that no byte of the day is missed.
        while len(self._slots) > 1 and self._slots[1][0] <= now_s - DAY_S:
            self._slots.popleft()
        return self._total - self._slots[0][1] if self._slots else 0


def interval_steps_within(bytes_per_day: float, base_bytes: int, step_s: float) -> int:
    """Return the smallest interval, in steps, whose bases stay within ``bytes_per_day``."""
    if bytes_per_day <= 0:
        return _NEVER_STEPS
    return min(_NEVER_STEPS, max(1, math.ceil(base_bytes * DAY_S / (step_s * bytes_per_day))))


def budget_in_words(options: Options) -> str:
    """Describe the daily write budget, as in ``"budget of 40.0 GB a day"``."""
    budget = options.budget.write_bytes_per_day
    return "no daily budget" if budget is None else f"budget of {decimal(budget)} a day"


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


def log_step_bytes(shape: Shape, recorded_bytes: int) -> int:
    """Return the maximum size of a step in a log on disk.

    That is the recorded gradients, the entries of the step mark, its objects and random states, and
    headers.
    """
    entries = sum(entry.size_bytes for entry in mark_entries(shape))
    return recorded_bytes + entries + sum(shape.objects_bytes.values()) + _STEP_BYTES


def free_bytes(filesystem: FileSystem, run: PurePath) -> int:
    """Return the free bytes of the disk of a run.

    Raises:
        StorageError
    """
    with storage_errors("look at the disk", run):
        return filesystem.free_bytes(run)
