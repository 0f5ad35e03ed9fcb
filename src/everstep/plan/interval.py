"""Intervals of bases and log segments that waste the least time.

The model is in :mod:`everstep.plan.interval`. :func:`optimum` finds the best whole numbers of steps
exactly; :func:`continuous_optimum` and :func:`closed_form` (LowDiff Eq. 10) are the solutions over
real numbers. :func:`checkfreq_interval` is for saves without a log.

Cost of checkpointing and recovery: LowDiff's model of wasted time, with corrections.

Training loses time in two ways: to failures (load the newest base, replay the log, train again the
steps that are not in it) and to checkpointing itself. LowDiff section V-C adds both up (Eq. 8) for
an interval ``i = 1 / f`` between bases and an interval ``b`` between log segments. Per second of
training, with the symbols of :class:`Costs`::

    waste = ( b/2 + R_F + (i/b - 1)/2 * (R_D + r * b/t) ) / M  +  C / i  +  g / b
              |     |     |                                       |         |
              |     |     replaying half an interval              |         writing the log
              |     loading a base                                writing bases
              half a segment is lost and trained again

Eq. 8 is the case ``r = 0``, ``g = 0``, ``C = S / W``. Corrections:

- ``f`` is in 1/s and ``b`` in *seconds*, though Table I counts iterations; the text confuses
  "frequency" and "interval". A segment cannot be longer than the interval: ``1 / (f b) >= 1`` is a
  constraint that Eq. 10 ignores.
- Eq. 8 omits the cost of writing a segment, ``g / b``, and with it the reason for batching.
- Eq. 8 merges a whole batch at the cost of one differential, because LowDiff *sums* it. That is
  right only for SGD without momentum; Adam's moments depend on the order of gradients. Here each
  step has a record and is replayed by itself: ``r`` seconds each, and ``R_D`` per segment.
  :meth:`Costs.summed` returns LowDiff's case.

Like Eq. 8 this is a first-order model: it ignores failures during the loading or writing of a base,
and so holds where the waste is a small share of the time. The restart of the job itself
(scheduling, imports, data loading) is the same for all choices and not counted.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from everstep.config import is_number
from everstep.errors import InfeasibleError, OptionError

EQUAL = 1e-12
"""Relative difference below which values count as equal."""

# Wide enough for anything real, and products of four stay far from the ends of a float.
_LEAST = 1e-9
_MOST = 1e18
_SECONDS_MOST = 1e12
_SECONDS = ("replay_s", "step_s", "merge_s", "batch_write_s", "base_cost_s")
_MAY_BE_ZERO = ("replay_s", "merge_s", "batch_write_s")


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of checkpointing and recovery; symbols of LowDiff section V-C in brackets.

    Attributes:
        state_bytes: size of a base [S].
        write_bytes_per_s: bandwidth at which a base becomes durable [W].
        replay_s: seconds to replay one step from the log [r; 0 in the paper].
        mtbf_s: mean time between failures of the whole job, in seconds [M].
        step_s: seconds of a training step [t].
        load_bytes_per_s: bandwidth at which a base is loaded; None: as it is written.
        merge_s: seconds that recovery spends per segment regardless of its steps: opening it, or
            merging it where batches are summed [R_D].
        batch_write_s: seconds of training that writing a segment costs regardless of its steps [g].
            Costs that grow with the number of steps are the same for all choices.
        base_cost_s: seconds of training that a base costs [C]; None: its whole write, as in Eq. 8.
            Less if the write overlaps with training.
        accelerators: number of accelerators that wait together [N]. It scales the waste of a run
            and does not change the optimum.

    Raises:
        OptionError: a value is not a finite number in range, or replay takes no time at all.
    """

    state_bytes: float
    write_bytes_per_s: float
    replay_s: float
    mtbf_s: float
    step_s: float
    load_bytes_per_s: float | None = None
    merge_s: float = 0.0
    batch_write_s: float = 0.0
    base_cost_s: float | None = None
    accelerators: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if value == 0 and field.name in _MAY_BE_ZERO and is_number(value):
                continue
            most = _SECONDS_MOST if field.name in _SECONDS else _MOST
            if not is_number(value) or not _LEAST <= value <= most:
                raise OptionError(
                    f"Costs.{field.name} must be a number from {_LEAST:g} to {most:g}, "
                    f"not {value!r}"
                )
        if self.replay_s == 0 and self.merge_s == 0:
            raise OptionError("Costs.replay_s and merge_s are both 0: replay takes some time")
        if not isinstance(self.accelerators, int):
            raise OptionError(f"Costs.accelerators must be a count, not {self.accelerators!r}")

    @property
    def write_s(self) -> float:
        """Seconds until a base is durable [S / W]."""
        return self.state_bytes / self.write_bytes_per_s

    @property
    def load_s(self) -> float:
        """Seconds to load a base [R_F]."""
        return self.state_bytes / (self.load_bytes_per_s or self.write_bytes_per_s)

    def summed(self) -> Costs:
        """Return the costs if batches were summed, as LowDiff does: replayed at the cost of one
        step.
        """
        return replace(self, merge_s=self.merge_s + self.replay_s, replay_s=0.0)

    def wasted_accelerator_s(self, waste: Waste, run_s: float) -> float:
        """Return the accelerator-seconds wasted in a run of ``run_s`` seconds [T_wasted of Eq.
        8].
        """
        return self.accelerators * run_s * waste.total


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of the run time that are wasted; 0.01 is one percent.

    Attributes:
        lost: steps after the newest segment, trained again [b / 2M].
        load: loading bases [R_F / M].
        replay: replaying steps from the log.
        bases: writing bases [C / i].
        batches: writing the log [g / b].
    """

    lost: float
    load: float
    replay: float
    bases: float
    batches: float

    @property
    def total(self) -> float:
        """Sum of all shares."""
        return self.lost + self.load + self.replay + self.bases + self.batches


def waste(costs: Costs, interval_s: float, batch_s: float, *, write_cost: bool = True) -> Waste:
    """Return the waste with a base every ``interval_s`` and a log segment every ``batch_s``
    seconds.

    Args:
        write_cost: False: the right side of Eq. 8 as printed: writing the log is free, and a base
            costs its whole write. LowDiff's own figure, divided by ``N T``, is
            ``waste(costs.summed(), 1 / f, b, write_cost=False)``.

    Raises:
        OptionError: unless ``0 < batch_s <= interval_s``.
    """
    # With the tolerance: both may be multiples of step_s that were rounded differently.
    if not (0 < batch_s <= interval_s * (1 + EQUAL) and interval_s < math.inf):
        raise OptionError(
            f"a batch of {batch_s!r} s does not fit into an interval of {interval_s!r} s",
            hint="0 < batch_s <= interval_s",
        )
    base_s, batch_write_s = write_costs(costs, write_cost)
    # Rounding may make the quotient slightly less than 1.
    batches = max(0.0, interval_s / batch_s - 1) / 2  # to be redone, on average
    redo_s = batches * (costs.merge_s + costs.replay_s * batch_s / costs.step_s)
    return Waste(
        lost=batch_s / 2 / costs.mtbf_s,
        load=costs.load_s / costs.mtbf_s,
        replay=redo_s / costs.mtbf_s,
        bases=base_s / interval_s,
        batches=batch_write_s / batch_s,
    )


def write_costs(costs: Costs, write_cost: bool = True) -> tuple[float, float]:
    """Return the seconds of training that a base and a segment cost; see :func:`waste`."""
    if not write_cost:
        return costs.write_s, 0.0
    base_s = costs.write_s if costs.base_cost_s is None else costs.base_cost_s
    return base_s, costs.batch_write_s


def check_transfers(costs: Costs) -> None:
    """Bases can be written and loaded between two failures.

    Raises:
        InfeasibleError: one of both takes longer than the MTBF.
    """
    needed = costs.state_bytes / costs.mtbf_s
    for what, took_s, quantity in (
        ("writing", costs.write_s, "write_bytes_per_s"),
        ("loading", costs.load_s, "load_bytes_per_s"),
    ):
        if took_s >= costs.mtbf_s:
            raise InfeasibleError(
                f"{what} a base takes {took_s:.4g} s, and something fails every "
                f"{costs.mtbf_s:.4g} s: no base would be of use",
                quantity=quantity,
                needed=needed,
                hint=f"more than {needed:.4g} bytes/s, or an MTBF above {took_s:.4g} s",
            )


def check_batches(costs: Costs, batch_max: int | None) -> None:
    """The log can be written in less time than training takes for what is in it.

    Raises:
        InfeasibleError: writing the largest batch costs all of that time.
    """
    _, batch_write_s = write_costs(costs)
    if batch_max is not None and batch_write_s >= batch_max * costs.step_s:
        needed_s = batch_max * costs.step_s
        raise InfeasibleError(
            f"writing a batch costs {batch_write_s:.4g} s, and the steps in it take "
            f"{needed_s:.4g} s: no time is left for training",
            quantity="batch_write_s",
            needed=needed_s,
            hint=f"batches of more than {math.floor(batch_write_s / costs.step_s)} steps, or "
            f"writes in less than {needed_s:.4g} s",
        )


_ROUNDS_NO_MORE = 1_000_000


@dataclass(frozen=True, slots=True)
class Point:
    """Intervals in seconds, as real numbers, and their waste."""

    interval_s: float
    batch_s: float
    waste: Waste


@dataclass(frozen=True, slots=True)
class Choice:
    """Intervals in whole steps, and their waste.

    Attributes:
        interval_steps: steps between two bases, at least 1.
        batch_steps: steps per log segment, 1 to ``interval_steps``.
        interval_s, batch_s: the same in seconds.
    """

    interval_steps: int
    batch_steps: int
    interval_s: float
    batch_s: float
    waste: Waste


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best choice, and the solutions of formulas for comparison.

    Attributes:
        choice: the best of all whole numbers of steps.
        continuous: the minimum over real numbers of seconds.
        closed_form: LowDiff Eq. 10, with its waste by Eq. 8 as printed: batches summed, their
            writes free.
        without_log: the best interval between bases without a log.
    """

    choice: Choice
    continuous: Point
    closed_form: Point
    without_log: Choice


# --- Formulas ---------------------------------------------------------------------------


def closed_form(costs: Costs) -> Point:
    """Return LowDiff Eq. 10: the minimum of Eq. 8 as printed, batches summed and their writes free.

    If Eq. 10 makes a segment longer than the interval (``R_D > sqrt(2 M S / W)``), it is no
    solution; the minimum then has both equal to ``sqrt(2 M S / W)``, Young's formula: the log is
    useless.
    """
    costs = costs.summed()
    write_s = costs.write_s
    merge_s = costs.merge_s
    mtbf_s = costs.mtbf_s
    interval_s = (4 * write_s**2 * mtbf_s**2 / merge_s) ** (1 / 3)  # 1 / f*
    batch_s = (2 * write_s * merge_s * mtbf_s) ** (1 / 3)
    if batch_s > interval_s:
        interval_s = batch_s = math.sqrt(2 * mtbf_s * write_s)
    return Point(interval_s, batch_s, waste(costs, interval_s, batch_s, write_cost=False))


def continuous_optimum(costs: Costs) -> Point:
    """Return the minimum of :func:`~everstep.plan.interval.waste` over real ``0 < batch_s <=
    interval_s``.

    The waste is a posynomial (a sum of powers with positive factors), hence convex in the
    logarithms of both intervals. For each segment length the best interval is ``sqrt(2 M C / (R_D /
    b + r / t))``; the remaining function is convex in ``log b``, and its derivative is bisected.
    Without a reason for batching (``R_D = g = 0``) a segment is one step.

    Raises:
        InfeasibleError: replay is slower than training.
    """
    _check_replay(costs)
    base_s, batch_write_s = write_costs(costs)
    mtbf_s = costs.mtbf_s
    merge_s = costs.merge_s
    rate = costs.replay_s / costs.step_s

    def interval_for(batch_s: float) -> float:
        return math.sqrt(2 * mtbf_s * base_s / (merge_s / batch_s + rate))

    def falls(batch_s: float) -> bool:
        lost = (1 - rate) * batch_s / (2 * mtbf_s)
        merging = merge_s / batch_s * interval_for(batch_s) / (2 * mtbf_s)
        return lost < merging + batch_write_s / batch_s

    if merge_s == 0 and batch_write_s == 0:
        batch_s = min(costs.step_s, interval_for(costs.step_s))
    else:
        low = math.log(1e-30)
        high = math.log(1e30)
        while high - low > EQUAL:
            middle = (low + high) / 2
            # low and high are neighbouring floats: the interval cannot become shorter than that.
            if not low < middle < high:
                break
            low, high = (middle, high) if falls(math.exp(middle)) else (low, middle)
        batch_s = math.exp(high)
    interval_s = interval_for(batch_s)
    if batch_s > interval_s:  # convex: the minimum is then on the border
        interval_s = batch_s = math.sqrt(2 * mtbf_s * (base_s + batch_write_s))
    return Point(interval_s, batch_s, waste(costs, interval_s, batch_s))


# --- Whole numbers of steps -------------------------------------------------------------


def interval_steps_min(costs: Costs) -> int:
    """Return the fewest steps between bases: one must be durable before the next begins."""
    return max(1, _ceil(costs.write_s / costs.step_s))


def optimum(costs: Costs, *, batch_max: int | None = None) -> Optimum:
    """Return the best whole numbers of steps, and the solutions of formulas.

    Args:
        batch_max: maximum steps per segment, limited by memory.

    Raises:
        InfeasibleError: see :func:`best_choice`.
    """
    return Optimum(
        best_choice(costs, batch_max=batch_max),
        continuous_optimum(costs),
        closed_form(costs),
        without_log(costs),
    )


def best_choice(costs: Costs, *, batch_max: int | None = None) -> Choice:
    """Return the best of all whole numbers of steps.

    Among equals, the shortest segment, which loses the fewest steps; then the shortest interval,
    which is replayed fastest.

    Args:
        batch_max: see :func:`optimum`.

    Raises:
        InfeasibleError: loading or writing a base takes longer than the MTBF, replay is slower than
            training, or no time is left for training.
    """
    if batch_max is not None and (not isinstance(batch_max, int) or batch_max < 1):
        raise OptionError(f"batch_max must be at least one step, not {batch_max!r}")
    check_transfers(costs)
    _check_replay(costs)
    check_batches(costs, batch_max)
    best = _least(costs, batch_max)
    if best.waste.total >= 1:
        needed_s = _mtbf_needed(costs, batch_max)
        raise InfeasibleError(
            f"a failure every {costs.mtbf_s:.4g} s leaves no time for training: at best "
            f"{best.waste.total:.0%} of it would be wasted",
            quantity="mtbf_s",
            needed=needed_s,
            hint=f"an MTBF above {needed_s:.4g} s, or faster writes, loads or replays",
        )
    return best


def curve(
    costs: Costs,
    intervals_steps: Iterable[int],
    *,
    batch_max: int | None = None,
) -> list[Choice]:
    """Return the best segment length for each interval; intervals too short for a base are
    lengthened.

    Raises:
        InfeasibleError: replay is slower than training.
    """
    _check_replay(costs)
    grid = _Grid.of(costs, batch_max)
    intervals = sorted({max(grid.interval_min, steps) for steps in intervals_steps})
    return [_choice(costs, n, grid.best_batch(n)) for n in intervals]


@dataclass(frozen=True, slots=True)
class _Grid:
    """Waste of ``n`` steps between bases and ``k`` steps per segment, without its constant terms.

    ``a k + e n + d n / k + c / n + h / k``, where ``n >= interval_min``, ``k <= batch_max`` and ``k
    <= n``.
    """

    a: float
    e: float
    d: float
    c: float
    h: float
    interval_min: int
    batch_max: int | None

    @classmethod
    def of(cls, costs: Costs, batch_max: int | None) -> _Grid:
        base_s, batch_write_s = write_costs(costs)
        return cls(
            a=(costs.step_s - costs.replay_s) / (2 * costs.mtbf_s),
            e=costs.replay_s / (2 * costs.mtbf_s),
            d=costs.merge_s / (2 * costs.mtbf_s),
            c=base_s / costs.step_s,
            h=batch_write_s / costs.step_s,
            interval_min=interval_steps_min(costs),
            batch_max=batch_max,
        )

    def value(self, n: float, k: int) -> float:
        return self.a * k + self.e * n + self.d * n / k + self.c / n + self.h / k

    def best_interval(self, k: int) -> float:
        """Return the best real ``n`` for segments of ``k`` steps."""
        return max(k, self.interval_min, math.sqrt(self.c / (self.e + self.d / k)))

    def bound(self, k: int) -> float:
        """Return a lower bound of the waste for ``k``; convex in ``log k``, so it has one
        minimum.
        """
        return self.value(self.best_interval(k), k)

    def best_batch(self, n: int) -> int:
        most = n if self.batch_max is None else min(n, self.batch_max)
        k = min(most, max(1, math.floor(math.sqrt((self.d * n + self.h) / self.a))))
        # The waste is convex in k: the best whole number is next to the best real one.
        better = k < most and self.value(n, k + 1) < self.value(n, k) * (1 - EQUAL)
        return k + 1 if better else k

    def best(self) -> tuple[int, int]:
        """Return the best ``(n, k)``: search outwards from the minimum of the bound until it
        exceeds the best.

        For one ``k`` the waste is convex in ``n``, so the best ``n`` are next to the best real one.
        """
        start = self._start()
        end = self.batch_max
        upward = itertools.count(start) if end is None else range(start, end + 1)
        found: list[tuple[int, int, float]] = []
        least = math.inf
        for batches in (upward, range(start - 1, 0, -1)):
            for k in batches:
                real = self.best_interval(k)
                # With so many steps, the whole number of them makes no difference.
                settled = real > _ROUNDS_NO_MORE and abs(k - start) > 1
                if settled or self.bound(k) > least * (1 + EQUAL):
                    break
                for n in (math.floor(real), math.floor(real) + 1):
                    found.append((k, n, self.value(n, k)))
                    least = min(least, found[-1][2])
        # Of equal ones the least k, then the least n (see best_choice).
        k, n, _ = min(one for one in found if one[2] <= least * (1 + EQUAL))
        return n, k

    def _start(self) -> int:
        """Return the ``k`` with the least bound, by ternary search.

        Differences of neighbours would drown in rounding for large ``k``.
        """
        low = 1
        high = self.batch_max or 2
        while self.batch_max is None and self.bound(high) < self.bound(high // 2):
            high *= 2
        while high - low > 2:
            third = (high - low) // 3
            left = self.bound(low + third)
            right = self.bound(high - third)
            if left <= right:
                high -= third
            if left >= right:
                low += third
        return min(range(low, high + 1), key=self.bound)


def _least(costs: Costs, batch_max: int | None) -> Choice:
    n, k = _Grid.of(costs, batch_max).best()
    return _choice(costs, n, k)


def _choice(costs: Costs, n: int, k: int) -> Choice:
    interval_s = n * costs.step_s
    batch_s = k * costs.step_s
    return Choice(n, k, interval_s, batch_s, waste(costs, interval_s, batch_s))


def without_log(costs: Costs) -> Choice:
    """Return the best interval between bases without a log, in whole steps.

    Young's choice (GoCkpt section 3.1): all steps since the base are lost. Bases are never closer
    than the duration of one write, however frequent failures are.
    """
    costs = replace(costs, batch_write_s=0.0)
    base_s, _ = write_costs(costs)
    lost = costs.step_s / (2 * costs.mtbf_s)
    base = base_s / costs.step_s
    n = max(interval_steps_min(costs), math.floor(math.sqrt(base / lost)))
    if lost * (n + 1) + base / (n + 1) < (lost * n + base / n) * (1 - EQUAL):
        n += 1
    return _choice(costs, n, n)


WASTE_OF_NO_ACCOUNT = 0.0025
"""Share of the time: with ``every="auto"``, waste below this is not reduced by more bases."""


def seldom(costs: Costs, best: Choice, *, log: bool) -> tuple[int, float]:
    """Return the longest interval in steps that wastes no more than the best, and its waste.

    A waste of :data:`WASTE_OF_NO_ACCOUNT` is always accepted. If bases cost training next to
    nothing, the optimum is to write continuously, which wears out the disk and takes it from others
    for an unnoticeable gain.

    Args:
        log: True if there is a log; without one, all steps since a base are lost.
    """

    def wasted(steps: int) -> float:
        interval_s = steps * costs.step_s
        batch_s = costs.step_s if log else interval_s
        return waste(costs, interval_s, batch_s).total

    # Loading is not reduced by any interval.
    allowed = max(best.waste.total, best.waste.load + WASTE_OF_NO_ACCOUNT)
    least = best.interval_steps
    # The waste is convex in the interval, so the accepted intervals have no gap: doubling and
    # bisection find the longest of them.
    beyond = 2 * best.interval_steps
    while wasted(beyond) <= allowed:
        least = beyond
        beyond = 2 * beyond
    between = range(least + 1, beyond)
    least += bisect_left(between, True, key=lambda steps: wasted(steps) > allowed)
    return least, wasted(least)


# --- What cannot be helped --------------------------------------------------------------


def _check_replay(costs: Costs) -> None:
    if costs.replay_s >= costs.step_s:
        plain = without_log(costs)
        raise InfeasibleError(
            f"replaying a step from the log takes {costs.replay_s:.4g} s, training it "
            f"{costs.step_s:.4g} s: the log gains nothing",
            quantity="replay_s",
            needed=costs.step_s,
            hint=f"a replay in less than {costs.step_s:.4g} s; or no log, and a base every "
            f"{plain.interval_steps} steps ({plain.waste.total:.2%} wasted)",
        )


def _mtbf_needed(costs: Costs, batch_max: int | None) -> float:
    """Return the MTBF at which the best choice wastes all of the time."""

    def enough(mtbf_s: float) -> bool:
        return _least(replace(costs, mtbf_s=mtbf_s), batch_max).waste.total < 1

    low = high = costs.mtbf_s
    while not enough(high):
        low = high
        high = 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# --- Saves without a log ----------------------------------------------------------------


def checkfreq_interval(
    *, step_s: float, stall_s: float, persist_s: float = 0.0, share: float = 0.035
) -> int:
    """Return the fewest steps between saves that keep their cost within a share of training.

    CheckFreq's rule: saves may slow training down by ``share`` (3.5 %; quoted in TierCheck
    experiment 3), and one must be durable before the next begins. CheckFreq's code starts at the
    second bound and adds two steps while the first is exceeded; here both are solved for.

    Args:
        step_s: seconds of a step without saves.
        stall_s: seconds for which a save blocks training.
        persist_s: seconds for which it continues in the background.
        share: maximum of ``stall_s`` as a share of the training time between two saves.
    """
    return max(1, _ceil(stall_s / step_s / share), _ceil(persist_s / step_s))


def _ceil(quotient: float) -> int:
    """Return the next whole number, ignoring an excess due to rounding."""
    return math.ceil(quotient * (1 - EQUAL))
