"""Partition of a base into parts, by the measured link, steps and memory (GoCkpt, section 4.2.3).

A *unit* must be captured at one step: a parameter, and all of its optimizer state. Parts are runs
of units in the order of the state, so that small tensors which are adjacent in the file are copied
together. Parts are equal, and as small as possible, or sized to fill their steps
(:mod:`everstep.plan.multistep`)."""

from __future__ import annotations

import math
import statistics
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from everstep.config import Options
from everstep.plan import PARTS_MAX, Cut, Overlap, Pipeline
from everstep.plan.multistep import best_cut, fewest, fewest_of, overlap
from everstep.seams import Clock
from everstep.seams.progress import log_or_print
from everstep.trainer.multistep.measurements import MultistepStats, StepTimes

_COPIES = 32
_LEAST_BYTES = 1 << 16  # smaller copies do not measure the link
_CHUNK_S = 1e-3  # longest wait of an urgent copy for a chunk in progress
_CHUNK_BYTES_MIN = 64 << 10  # at limit those of GoCkpt (section 4.4.2)
_CHUNK_BYTES_MAX = 4 << 20
_FEWER_PARTS = 1  # parts than a state that could be cut anywhere
_MORE_PARTS = 2
_KEEP_BELOW = 0.02  # of a step: smaller gains do not change a cut
_EQUAL = 0.02  # relative difference of copies that changes no choice
_EQUAL_STEPS = 0.005  # the same of steps: a base takes several, which adds up


@dataclass(frozen=True, slots=True)
class Unit:
    """A parameter with its optimizer state; or, without an optimizer, entries that never change.

    Attributes:
        optimizer: key of the optimizer that updates it; "" if none does.
        parameter: name of the parameter in that optimizer.
        entries: names of its entries.
        size_bytes: size of these entries.
        gradient_bytes: size of the parameter's gradient, if it has one.
    """

    optimizer: str
    parameter: str
    entries: tuple[str, ...]
    size_bytes: int
    gradient_bytes: int = 0


@dataclass(slots=True, eq=False)
class TimedCopy:
    """Copy that is measured.

    Attributes:
        submitted_s: time of submission, on the monotonic clock.
        ended: called in the lane's thread after the copy, with its duration by a device's clock, if
            there is one.
        exclusive: True if no other copy shared the link with it.
    """

    submitted_s: float
    ended: Callable[..., None]
    exclusive: bool = True


def _link(copies: Iterable[tuple[int, float]]) -> float:
    """Return the bandwidth at or above which half of all bytes were copied, in bytes per second.

    Not the mean: small copies beside an update, which starves the copying thread, do not
    measure the link, and parts cut for a slower link would make updates wait. No copy counts for
    more than the median size: the first base is a single copy of the complete state, beside a
    keeper that starts.
    """
    found = list(copies)
    most_bytes = statistics.median_low(size for size, _ in found)
    rates = sorted(((size / s, min(size, most_bytes)) for size, s in found), reverse=True)
    left_bytes = sum(counted for _, counted in rates) / 2
    for rate, counted in rates:
        left_bytes -= counted
        if left_bytes <= 0:
            return rate
    raise AssertionError("unreachable")


class _CutQuery(NamedTuple):
    """Conditions that a cut was chosen for.

    Attributes:
        pipeline: measured steps and copies.
        parts: best number of parts if units could be cut anywhere.
        limit: largest number of parts.
        held_steps: see :func:`everstep.plan.multistep.overlap`.
        memory_s: copy time of the gradients that fit in memory, in seconds.
    """

    pipeline: Pipeline
    parts: int
    limit: int
    held_steps: int | None
    memory_s: float


class Partitioner:
    """Measure copies, and choose the parts of bases.

    Attributes:
        steps: durations of steps.
    """

    def __init__(
        self,
        options: Options,
        clock: Clock,
        stats: MultistepStats,
        moment: Callable[[], Any] = lambda: None,
    ) -> None:
        self.steps = StepTimes(clock, moment)
        self._options = options
        self._clock = clock
        self._stats = stats
        self._copies: deque[tuple[int, float]] = deque(maxlen=_COPIES)
        self._parts_max = PARTS_MAX
        self._warned = False
        self._said_lazy = False
        self._ended_s = 0.0  # end of the last copy
        self._yielding: list[TimedCopy] = []  # under way
        self._known: Pipeline | None = None  # pipeline of the last choice
        self._cuts: dict[tuple[int, int | None], Cut] = {}  # best cuts for it
        self._last_query: _CutQuery | None = None
        self._last_cut: Sequence[Sequence[Unit]] | None = None

    @property
    def knows_link(self) -> bool:
        """Return True if the bandwidth was measured."""
        return self._stats.link_bytes_per_s is not None

    def timed(self, size_bytes: int, *, yielding: bool = False) -> TimedCopy:
        """Measure a copy that is about to be submitted; the lane's thread reports its end.

        Copies run one at a time: one begins when it is submitted, or when the one before ends. A
        copy that overtakes yielding ones says nothing about the link, nor do these. A device
        begins a copy only when its stream reaches it, which its own clock shows.

        Args:
            size_bytes: size of the copy.
            yielding: later copies may overtake it.
        """

        def ended(copied_s: float | None = None) -> None:
            end_s = self._clock.monotonic_s()
            begin_s = max(timed.submitted_s, self._ended_s)
            self._ended_s = end_s
            if copied_s is not None:
                begin_s = end_s - copied_s
            self.over(timed)
            if timed.exclusive and size_bytes >= _LEAST_BYTES and end_s > begin_s:
                # Only the lane's thread reads and writes the list; training reads the resulting
                # number.
                self._copies.append((size_bytes, end_s - begin_s))
                self._stats.link_bytes_per_s = _link(self._copies)

        timed = TimedCopy(self._clock.monotonic_s(), ended)
        if yielding:
            self._yielding.append(timed)
        # A copy of the list, because the lane's thread may remove entries meanwhile.
        elif under_way := list(self._yielding):
            for one in [timed, *under_way]:
                one.exclusive = False
        return timed

    def over(self, timed: TimedCopy) -> None:
        """Note that a copy has ended, whether or not it has reported so."""
        if timed in self._yielding:
            self._yielding.remove(timed)

    def too_large(self) -> None:
        """Halve the number of parts: there was no memory for the gradients of so many."""
        self._parts_max = max(1, (self._stats.parts or 1) // 2)
        self._warned = True  # by the base that was abandoned

    @property
    def chunk_bytes(self) -> int:
        """Return the size of chunks: a power of two, about a millisecond of the measured link.

        The next urgent copy waits for at most one chunk; GoCkpt uses at most 4 MiB (section 4.4.2).
        """
        wanted = self._options.method.chunk_bytes
        if isinstance(wanted, int):
            return wanted
        link = self._stats.link_bytes_per_s
        if link is None:
            return _CHUNK_BYTES_MAX
        # Rounded down, so that a chunk takes no longer than _CHUNK_S.
        fits = 1 << max(0, int(link * _CHUNK_S).bit_length() - 1)
        return max(_CHUNK_BYTES_MIN, min(fits, _CHUNK_BYTES_MAX))

    def cut(
        self,
        units: Sequence[Unit],
        base_bytes: int,
        arena_bytes: int,
        *,
        waits: bool,
        now: Sequence[Sequence[Unit]] | None,
        warn: bool = True,
    ) -> Sequence[Sequence[Unit]]:
        """Return the parts of the next base; a single part means a lazy base.

        Args:
            units: units that may be captured before the last step.
            base_bytes: size of the base in memory.
            arena_bytes: memory for the base and for gradients.
            waits: updates wait for the copies of their gradients.
            now: current parts of these units, kept unless others are worth planning.
            warn: warn if there is not enough memory for the requested number of parts.
        """
        count = self.parts(units, base_bytes, arena_bytes, waits=waits, warn=warn)
        pipeline = self._pipeline(units)
        if now is not None and pipeline is None and len(now) == count:
            return now
        if pipeline is None or count == 1:
            return cut_parts(units, count)
        memory_s = self._memory_s(pipeline, units, arena_bytes - base_bytes)
        held_steps = None if waits else self._options.method.held_steps
        explicit = isinstance(self._options.method.parts, int)
        limit = count if explicit else self._parts_limit(units, base_bytes, arena_bytes)
        query = _CutQuery(pipeline, count, limit, held_steps, memory_s)
        # With equal measurements another search would end with the same cut.
        if now is None or now is not self._last_cut or query != self._last_query:
            now = self._cut_again(units, query, now)
        self._last_query = query
        self._last_cut = now
        return now

    def _cut_again(
        self,
        units: Sequence[Unit],
        query: _CutQuery,
        now: Sequence[Sequence[Unit]] | None,
    ) -> Sequence[Sequence[Unit]]:
        """Return the cheapest cut near ``query.parts`` parts; ``now`` if it is about as good."""
        pipeline, count, limit, held_steps, memory_s = query
        explicit = isinstance(self._options.method.parts, int)
        near = range(max(2, count - _FEWER_PARTS), min(count + _MORE_PARTS, limit) + 1)
        cuts = [
            cut_by_cost(
                units, pipeline, n, held_steps, memory_s, self._best(pipeline, n, held_steps)
            )
            for n in ([min(count, len(units))] if explicit else near)
        ]
        costs = [modelled_overlap(one, pipeline, held_steps) for one in cuts]
        number = fewest([self._cost_s(cost) for cost in costs]) - 1
        found = cuts[number]
        new = costs[number]
        if now is None or not (count if explicit else 2) <= len(now) <= limit:
            return found
        kept = modelled_overlap(now, pipeline, held_steps)
        gained_s = self._cost_s(kept) - self._cost_s(new)
        enough = kept.gradients_s <= memory_s
        return now if enough and gained_s <= _KEEP_BELOW * pipeline.step_s else found

    def parts(
        self,
        units: Sequence[Unit],
        base_bytes: int,
        arena_bytes: int,
        *,
        waits: bool,
        warn: bool = True,
    ) -> int:
        """Return the number of parts of the next base if they could be cut anywhere; 1 for a lazy
        base.

        Complete parameters may need one part less, or two more. Arguments as for :meth:`cut`."""
        wanted = self._options.method.parts
        limit = self._parts_limit(units, base_bytes, arena_bytes)
        if isinstance(wanted, int):
            if limit < wanted <= len(units) and warn and not self._warned:
                self._warned = True
                gradient_bytes = sum(unit.gradient_bytes for unit in units)
                need = base_bytes + gradient_bytes * (wanted - 1) // 2
                warnings.warn(
                    f"everstep: a base in {wanted} parts needs {need} bytes of host memory, but "
                    f"there are {arena_bytes}: it is cut into {max(1, limit)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return max(1, min(wanted, limit))
        pipeline = self._pipeline(units)
        if pipeline is None or limit <= 1:
            return 1
        held_steps = None if waits else self._options.method.held_steps
        memory_s = self._memory_s(pipeline, units, arena_bytes - base_bytes)

        def cost_s(parts: int) -> float:
            found = self._best(pipeline, parts, held_steps).overlap
            if found.gradients_s > memory_s:
                found = overlap(pipeline, parts, held_steps)
            return self._cost_s(found)

        found = fewest_of(cost_s, limit, self._stats.part_s or 0.0)
        if found == 1 and warn and not self._said_lazy:
            self._said_lazy = True
            log_or_print(
                'parts="auto": bases are taken in one part for now, as with method="lazy": at the '
                f"measured {self._stats.link_bytes_per_s or 0:.3g} bytes/s and "
                f"{pipeline.step_s:.3g} s per step more parts would hold training up longer; "
                "Method(parts=N) sets a number"
            )
        return found

    def _parts_limit(self, units: Sequence[Unit], base_bytes: int, arena_bytes: int) -> int:
        """Return the number of equal parts that fit in memory and are copied before the next
        base is due."""
        gradient_bytes = sum(unit.gradient_bytes for unit in units)
        limit = min(len(units), self._parts_max)
        if gradient_bytes:
            # In n equal parts, (n - 1) / 2 times the gradients of a step are held: each part needs
            # those of all later parts' steps.
            limit = min(limit, 1 + 2 * max(0, arena_bytes - base_bytes) // gradient_bytes)
        automatic = not isinstance(self._options.method.parts, int)
        if automatic and self._options.every.steps is not None:
            limit = min(limit, self._options.every.steps)
        return limit

    def _cost_s(self, found: Overlap) -> float:
        """Return the time a base costs training, in seconds: waits for copies, and work for each
        part.

        If its gradients are still being copied when the next base is due, that one waits for the
        rest.
        """
        cost_s = found.stall_s + (self._stats.part_s or 0.0) * found.parts
        every = self._options.every.steps
        pipeline = self._known
        if self._options.method.held_steps > 1 and every is not None and pipeline is not None:
            cost_s += max(0.0, found.whole_s - every * pipeline.step_s - cost_s)
        return cost_s

    def _pipeline(self, units: Sequence[Unit]) -> Pipeline | None:
        """Return measured steps and copies; None until both are known."""
        link = self._stats.link_bytes_per_s
        steps = self.steps.known()
        if link is None or steps is None or steps.immutable_s <= 0:
            return None
        state_bytes = sum(unit.size_bytes for unit in units)
        gradient_bytes = sum(unit.gradient_bytes for unit in units)
        now = Pipeline(
            state_bytes / link,
            gradient_bytes / link,
            steps.beside_s,
            0.0,
            steps.update_s,
            part_s=self._stats.part_s or 0.0,
            behind_update=True,
        )
        # Noise of the measurements must not cost a new search, which takes milliseconds, at each
        # base.
        if self._known is None or not _are_equal(now, self._known):
            self._known = now
            self._cuts.clear()
        return self._known

    def _best(self, pipeline: Pipeline, parts: int, held_steps: int | None) -> Cut:
        """Return the best cut into so many parts; cached, as it takes milliseconds to find."""
        found = self._cuts.get((parts, held_steps))
        if found is None:
            found = self._cuts[parts, held_steps] = best_cut(pipeline, parts, held_steps)
        return found

    def _memory_s(self, pipeline: Pipeline, units: Sequence[Unit], room_bytes: int) -> float:
        """Return the copy time of the gradients that fit in memory, in seconds."""
        gradient_bytes = sum(unit.gradient_bytes for unit in units)
        if not gradient_bytes:
            return math.inf
        return pipeline.gradients_s * max(0, room_bytes) / gradient_bytes


def _are_equal(one: Pipeline, other: Pipeline) -> bool:
    """Return True if two pipelines differ by no more than a fraction of a copy or of a step."""
    copies = (one.state_s, other.state_s), (one.gradients_s, other.gradients_s)
    steps = (
        (one.forward_s, other.forward_s),
        (one.update_s, other.update_s),
        (one.part_s, other.part_s),
    )
    return all(abs(a - b) <= _EQUAL * b for a, b in copies) and all(
        abs(a - b) <= _EQUAL_STEPS * other.step_s for a, b in steps
    )


def cut_by_cost(
    units: Sequence[Unit],
    pipeline: Pipeline,
    parts: int,
    held_steps: int | None,
    gradients_s_max: float = float("inf"),
    best: Cut | None = None,
) -> list[list[Unit]]:
    """Cut units so that a base holds training up least: into parts that fill their steps, or into
    equal ones (GoCkpt, section 4.2.3).

    Args:
        units: units in the order of the state.
        pipeline: measured steps and copies.
        parts: number of parts.
        held_steps: see :func:`everstep.plan.multistep.overlap`.
        gradients_s_max: copy time of all gradients that fit in host memory; equal parts are used if
            others need more.
        best: result of :func:`~everstep.plan.multistep.best_cut` for so many parts, if known.
    """
    equal = cut_parts(units, parts)
    if len(equal) <= 1:
        return equal
    best = best or best_cut(pipeline, len(equal), held_steps)
    filling = cut_by_shares(units, best.shares)
    found = modelled_overlap(filling, pipeline, held_steps)
    if found.gradients_s > gradients_s_max:
        return equal
    return (
        equal if modelled_overlap(equal, pipeline, held_steps).stall_s < found.stall_s else filling
    )


def modelled_overlap(
    cut: Sequence[Sequence[Unit]], pipeline: Pipeline, held_steps: int | None
) -> Overlap:
    """Return the modelled cost of a base in these parts."""
    return overlap(pipeline, len(cut), held_steps, shares_of(cut))


def shares_of(cut: Sequence[Sequence[Unit]]) -> list[float]:
    """Return the share of each part in the bytes of all parts."""
    sizes = [sum(unit.size_bytes for unit in run) for run in cut]
    total = sum(sizes)
    return [size / total if total else 1 / len(sizes) for size in sizes]


def cut_parts(units: Sequence[Unit], count: int) -> list[list[Unit]]:
    """Cut units into at most ``count`` non-empty runs, the largest as small as possible.

    Args:
        units: units in the order of the state.
        count: at least 1.
    """
    if not units:
        return [[]]
    count = min(count, len(units))
    least = max(unit.size_bytes for unit in units)
    most = sum(unit.size_bytes for unit in units)
    # Binary search for the smallest size of runs of which `count` are enough.
    while least < most:
        middle = (least + most) // 2
        if len(_runs(units, middle)) <= count:
            most = middle
        else:
            least = middle + 1
    runs = _runs(units, least)
    # Units of equal size can give fewer runs than asked for: split the largest until the count
    # fits.
    while len(runs) < count:
        large = max((run for run in runs if len(run) > 1), key=_size_bytes)
        at = runs.index(large)
        runs[at : at + 1] = _halves(large)
    return runs


def cut_by_shares(units: Sequence[Unit], shares: Sequence[float]) -> list[list[Unit]]:
    """Cut units into non-empty runs that end as close as possible to the given shares.

    Return as many runs as there are shares, or as units if those are fewer.

    Args:
        units: units in the order of the state.
        shares: shares of the bytes of all units; their sum is 1.
    """
    count = min(len(shares), len(units))
    whole = _size_bytes(list(units))
    ends = [0]  # bytes of all units before each unit
    for unit in units:
        ends.append(ends[-1] + unit.size_bytes)
    runs: list[list[Unit]] = []
    begin = 0
    wanted = 0.0
    for number in range(count - 1):
        wanted += shares[number] * whole
        last = len(units) - (count - 1 - number)  # leave a unit for each remaining run
        end = min(max(bisect_left(ends, wanted), begin + 1), last)
        # bisect_left() has found the first end at or above the share; the one below may be closer.
        if end - 1 > begin and wanted - ends[end - 1] < ends[end] - wanted:
            end -= 1
        runs.append(list(units[begin:end]))
        begin = end
    return [*runs, list(units[begin:])]


def _runs(units: Sequence[Unit], size_bytes: int) -> list[list[Unit]]:
    """Return the fewest runs of which none is larger than ``size_bytes``."""
    runs: list[list[Unit]] = []
    left = 0
    for unit in units:
        if not runs or unit.size_bytes > left:
            runs.append([])
            left = size_bytes
        runs[-1].append(unit)
        left -= unit.size_bytes
    return runs


def _halves(run: list[Unit]) -> list[list[Unit]]:
    """Cut a run in two, the larger as small as possible."""
    whole = _size_bytes(run)
    first = 0
    best = (float("inf"), 1)
    for at in range(1, len(run)):
        first += run[at - 1].size_bytes
        best = min(best, (max(first, whole - first), at))
    return [run[: best[1]], run[best[1] :]]


def _size_bytes(run: list[Unit]) -> int:
    return sum(unit.size_bytes for unit in run)
