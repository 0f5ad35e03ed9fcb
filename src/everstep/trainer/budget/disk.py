"""What a run may take of each place where bytes live: computed once, printed at the start.

Records count, not only the state: headers, markers and manifests of a small state are not little
beside it. What a failure leaves (a base that was cut off) goes with the next base, and is not in
these numbers; nor is a log that goes to disk, which is printed for itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.filesize import decimal

from everstep.commit.peers import NEEDED_MAX
from everstep.config.options import Options
from everstep.errors import OutOfSpaceError
from everstep.format.header import ShardIdentity
from everstep.format.plan import plan_files
from everstep.seams.files.filesystem import FileSystem
from everstep.state.ranks.ranks import RankInfo
from everstep.state.survey.survey import Shape
from everstep.tiers.disk import storage_errors
from everstep.tiers.options import TierOptions
from everstep.trainer.budget.host_memory import mark_entries

__all__ = [
    "DAY_S",
    "Bounds",
    "DayMeter",
    "Forecast",
    "bounds_of",
    "budget_in_words",
    "check_disk_budget",
    "free_bytes",
    "interval_steps_within",
    "log_step_bytes",
]

_RECORD_BYTES = 1024  # of a marker for one file; about 450 are used
_RUN_BYTES = 8192  # run.json, and a few timelines
_DRIFT_BYTES = 4096  # objects may grow so much before a base is planned anew
_DRIFT_SHARE = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of this rank, at most, while nothing fails.

    Attributes:
        host_bytes: host memory for captured state, the log and a replica.
        peer_bytes: host memory for copies of other ranks.
        base_bytes: of one base with its records, as files.
        beside: bases that are on the disk before the oldest goes, beyond those to keep: the one
            that is written; of several ranks one more, for rank 0 says when the oldest goes, and
            the others write the next one meanwhile; and those that stay because peers have them.
        disk_bytes: of all bases in the run folder.
        copies: where copies are made, and what this rank has in each place.
    """

    host_bytes: int
    peer_bytes: int
    base_bytes: int
    beside: int
    disk_bytes: int
    copies: tuple[tuple[str, int], ...] = ()

    @property
    def other_bytes(self) -> int:
        """Of the run folder, beside bases and log."""
        return _RUN_BYTES


def bounds_of(
    options: Options,
    shape: Shape,
    ranks: RankInfo,
    places: Sequence[TierOptions] = (),
    *,
    host_bytes: int,
    peer_bytes: int,
) -> Bounds:
    """The bounds of a rank whose state has this shape now."""
    base_bytes = _base_bytes(shape, ranks)
    copies = tuple(
        (place.where, ((place.keep or options.keep) + 1) * base_bytes + _RUN_BYTES)
        for place in places
    )
    beside = 1 if ranks.world == 1 else 2
    if len(set(ranks.nodes)) > 1 and not options.method.in_memory:
        beside += max(0, 1 + NEEDED_MAX - options.keep)
    disk_bytes = (options.keep + beside) * base_bytes + _RUN_BYTES
    return Bounds(host_bytes, peer_bytes, base_bytes, beside, disk_bytes, copies)


def _base_bytes(shape: Shape, ranks: RankInfo) -> int:
    identity = ShardIdentity("0" * 32, 0, 0, 0, ranks.rank, ranks.world, True)
    files = plan_files(identity, shape.entries, shape.aliases, shape.objects_bytes)
    drift = sum(max(_DRIFT_BYTES, n // _DRIFT_SHARE) for n in shape.objects_bytes.values())
    marker = _RECORD_BYTES * max(1, len(files))
    # The marker, and the manifest, which has those of all ranks.
    return sum(file.size_bytes for file in files) + drift + (2 + ranks.world) * marker


DAY_S = 86_400.0


_SLOT_S = 600.0


_NEVER_STEPS = 1 << 62


_STEP_BYTES = 16384  # random states, and what says what the records of a step are


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


def log_step_bytes(shape: Shape, recorded_bytes: int) -> int:
    """What a step takes in a log on disk, at most: what is recorded, what its mark holds besides,
    objects and random states included, and what says what they are."""
    entries = sum(entry.size_bytes for entry in mark_entries(shape))
    return recorded_bytes + entries + sum(shape.objects_bytes.values()) + _STEP_BYTES


def free_bytes(filesystem: FileSystem, run: PurePath) -> int:
    """Of the disk of a run.

    Raises:
        StorageError
    """
    with storage_errors("look at the disk", run):
        return filesystem.free_bytes(run)
