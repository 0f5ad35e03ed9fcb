"""Interval of bases during training, from measured costs.

LowDiff's tuning module "adapts to runtime metrics (failure rate, bandwidth) using stepwise
adjustments" (section VII-A) without details. Here:

- Each cost is the median of its newest samples, with less weight for older ones. Single outliers (a
  stalled disk, a step that compiled something) do not change it.
- Failures are too few for a median. They are modelled as a Poisson process whose rate has a Gamma
  prior: "as if :attr:`FailurePrior.failures` failures had been seen in
  :attr:`FailurePrior.seconds`". The MTBF is (prior seconds + trained seconds) / (prior failures +
  failures): plausible before the first failure, and overruled by evidence.
- The current choice stays until the best one would waste clearly less. The waste is compared, not
  the interval: it is flat around its minimum, so noise changes nothing.

Number of steps per log segment: the fewest that the disk sustains.

Writing a segment has a fixed cost: a directory, two files, and the syncs that make names and bytes
durable. LowDiff (section V-B) batches steps because of this cost, and weighs it against the steps
lost with a node (half a segment; :mod:`.interval`). It counts the cost to *training* [g]. A keeper
writes in the background, at no measurable cost to training; with ``g = 0`` the model says one step
per segment. Other limits then apply: the writing thread must keep up, and the disk and the core are
shared. So a segment has the fewest steps with which the fixed costs take at most
:data:`PRICE_SHARE` of the time that the bytes leave::

    price <= share * b * (t - w)

``b`` steps per segment, ``t`` seconds per step, ``w`` seconds to digest and write the records of
one step. If the bytes alone take all the time, no segment size helps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from everstep.plan.interval import (
    Choice,
    Costs,
    best_choice,
    interval_steps_min,
    waste,
    without_log,
)

PRICE_SHARE = 0.1
"""Share of the time not needed for the log's bytes that fixed costs of writes may take."""

LONGEST_S = 60.0
"""Maximum seconds of training in a segment, however slow the disk is.

With a node, at most this much and the segment being written are lost.
"""

# Samples before the size is adapted.
_WRITES_MIN = 5
_STEPS_MIN = 8
_WINDOW = 64  # as in the other estimator
_HALF_LIFE = 16.0
# Tolerance of the share within which the current size stays.
_NEAR = 0.25
_LEAST_S = 1e-9


def least_batch(
    price_s: float, work_s: float, step_s: float, *, most: int, share: float = PRICE_SHARE
) -> int:
    """Return the fewest steps ``b`` with ``price_s <= share * b * (step_s - work_s)``, at most
    ``most``.

    Args:
        price_s: fixed cost of a write, in seconds.
        work_s: seconds of the writing thread per step, for digesting and writing its bytes.
        step_s: seconds of a training step.
        most: maximum number of steps, at least 1.
    """

    def suffices(steps: int) -> bool:
        return price_s <= share * steps * (step_s - work_s)

    # The right side grows with the number of steps, or is never positive: the search then ends at
    # `most`.
    return 1 + bisect_left(range(1, most), True, key=suffices)


def weighted_median(values: Sequence[float], half_life: float) -> float | None:
    """Return the weighted median of samples in the order of their arrival; None if there are none.

    Single outliers (a stalled disk, a step that compiled something) do not change it.

    Args:
        half_life: number of newer samples after which a sample's weight is halved.
    """
    newest = len(values) - 1
    weighted = sorted(
        (value, 0.5 ** ((newest - place) / half_life)) for place, value in enumerate(values)
    )
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in weighted:
        half -= weight
        if half <= 0:
            return value
    return weighted[-1][0] if weighted else None


class BatchEstimator:
    """Running estimates of the three costs, and the segment size that follows from them.

    Each estimate is the median of the newest samples, as in :mod:`.estimator`. The current size
    stays while it is optimal for a share within a quarter of :data:`PRICE_SHARE`, so that noise of
    the disk changes nothing.

    Args:
        first: steps per segment until enough was measured.
        most: maximum steps per segment.
        bytes_max: maximum bytes per segment; None: no limit. A single step may be larger.

    Attributes:
        steps: steps of the next segment.
    """

    def __init__(self, first: int, most: int, bytes_max: int | None = None) -> None:
        self.steps = first
        self._most = most
        self._bytes_max = bytes_max
        self._step_s = deque[float](maxlen=_WINDOW)
        self._price_s = deque[float](maxlen=_WINDOW)
        self._step_bytes = deque[float](maxlen=_WINDOW)
        self._bytes_per_s = deque[float](maxlen=_WINDOW)

    def observe_step(self, step_s: float) -> None:
        """Add the duration of a training step, including its waits."""
        self._step_s.append(max(_LEAST_S, step_s))

    def observe_write(self, steps: int, size_bytes: int, price_s: float, work_s: float) -> None:
        """Add a durable segment.

        Args:
            size_bytes: size of its records.
            price_s: seconds for everything but its bytes.
            work_s: seconds for digesting and writing its bytes.
        """
        self._price_s.append(max(_LEAST_S, price_s))
        self._step_bytes.append(size_bytes / steps)
        self._bytes_per_s.append(size_bytes / max(_LEAST_S, work_s))

    def choose(self) -> int:
        """Evaluate the costs again; return the steps of the next segment."""
        price_s = weighted_median(self._price_s, _HALF_LIFE)
        step_bytes = weighted_median(self._step_bytes, _HALF_LIFE)
        bytes_per_s = weighted_median(self._bytes_per_s, _HALF_LIFE)
        step_s = weighted_median(self._step_s, _HALF_LIFE)
        enough = len(self._price_s) >= _WRITES_MIN and len(self._step_s) >= _STEPS_MIN
        if not enough or not (price_s and step_bytes and bytes_per_s and step_s):
            return self.steps
        # A clock that stands still, as in tests.
        if step_s <= _LEAST_S:
            return self.steps
        most = min(self._most, LONGEST_S / step_s)
        if self._bytes_max is not None:
            most = min(most, self._bytes_max / step_bytes)

        def least(share: float) -> int:
            work_s = step_bytes / bytes_per_s
            return least_batch(price_s, work_s, step_s, most=max(1, int(most)), share=share)

        # A larger share allows shorter segments: this is the lower end of the range.
        low = least(PRICE_SHARE * (1 + _NEAR))
        high = least(PRICE_SHARE * (1 - _NEAR))
        if not low <= self.steps <= high:
            self.steps = least(PRICE_SHARE)
        return self.steps


_SERIES = ("step_s", "write_bytes_per_s", "load_bytes_per_s", "replay_s", "stall_s", "slowed_s")
_SECONDS_LEAST = 1e-9
# Seconds of training after which the weight of failures, and of training without them, is halved.
_FAILURE_HALF_LIFE_S = 30 * 86_400.0
_EXPECTED_BASES = 4  # weight of expected costs, in bases
_SLOW = 3.0  # a step longer than so many usual ones is an outlier
_BASES_MIN = 4  # that are written and loaded before the first failure
_MARGIN = 0.05  # share of the waste that another interval has to save


@dataclass(frozen=True, slots=True)
class FailurePrior:
    """Prior belief about failures: a Gamma distribution of their rate.

    The default knows next to nothing: Jeffreys' prior of a Poisson rate, after ten first seconds. A
    run that has trained for an hour without a failure expects the next one in two hours, after a
    day in two days. Jobs fail most often soon after they were started, and large ones several times
    a day (OPT-175B: 112 failures in 90 days, quoted by LowDiff section I); a prior of one failure a
    day would take hours of failures to be overruled.

    Attributes:
        failures: shape of the distribution: the weight of the prior in failures.
        seconds: its rate: seconds of training in which these would have occurred.
    """

    failures: float = 0.5
    seconds: float = 10.0

    def mtbf_s(self, failures: float, trained_s: float) -> float:
        """Return the mean time between failures after so many in so many seconds of training."""
        return (self.seconds + trained_s) / (self.failures + failures)


class Estimator:
    """Running estimates of :class:`~everstep.plan.interval.Costs`, and the choice that follows from
    them.

    Samples are seconds of this run. Times of failures are seconds *of training* since the run
    began, over all its processes; time without training does not count.

    Args:
        log: True if there is a log to replay steps from; otherwise all steps since the base are
            lost.
        replay_share: assumed duration of replay as a share of a step until it was measured; None:
            no recommendation before.
        prior: prior belief about failures.

    Attributes:
        log: as given; may change while training runs.
    """

    def __init__(
        self,
        *,
        log: bool = True,
        replay_share: float | None = None,
        prior: FailurePrior | None = None,
    ) -> None:
        self.log = log
        self._replay_share = replay_share
        self._prior = prior or FailurePrior()
        self._series: dict[str, deque[float]] = {name: deque(maxlen=_WINDOW) for name in _SERIES}
        self._expected: dict[str, float] = {}
        self._state_bytes: float | None = None
        self._trained_s = 0.0
        self._seen_s = 0.0
        self._failures = 0.0
        self._held: int | None = None

    # --- What was seen ------------------------------------------------------------------

    def observe_step(self, step_s: float) -> None:
        """Add the duration of a training step, without time added by a save."""
        self._series["step_s"].append(step_s)

    def observe_base(
        self,
        size_bytes: float,
        write_s: float,
        stall_s: float | None = None,
        slowed_s: float = 0.0,
    ) -> None:
        """Add a base of ``size_bytes`` that became durable in ``write_s`` seconds.

        Args:
            stall_s: seconds that it has blocked training; None: unknown, its whole write counts as
                its cost.
            slowed_s: seconds that the steps beside it took longer; negative if they were shorter.
        """
        if stall_s is not None:
            self._series["stall_s"].append(stall_s)
            self._series["slowed_s"].append(slowed_s)
        self._series["write_bytes_per_s"].append(size_bytes / write_s)
        self._state_bytes = float(size_bytes)

    def expect_base(self, size_bytes: float, write_s: float, cost_s: float) -> None:
        """Set the costs of bases that earlier processes have measured: they count as a few bases
        of this one.

        Args:
            cost_s: seconds of training that a base costs.
        """
        rate = size_bytes / write_s
        self._expected = {"write_bytes_per_s": rate, "stall_s": cost_s, "slowed_s": 0.0}
        self._state_bytes = float(size_bytes)

    def observe_load(self, size_bytes: float, load_s: float) -> None:
        """Add a base of ``size_bytes`` that was loaded in ``load_s`` seconds."""
        self._series["load_bytes_per_s"].append(size_bytes / load_s)

    def observe_replay(self, steps: int, replay_s: float) -> None:
        """Add a replay of ``steps`` steps from the log in ``replay_s`` seconds, including reads."""
        self._series["replay_s"].append(replay_s / steps)

    def observe_failure(self, at_s: float) -> None:
        """Add a failure after ``at_s`` seconds of training."""
        self.advance(at_s)
        self._failures += 1

    def advance(self, at_s: float) -> None:
        """Note that training has reached ``at_s`` seconds.

        An earlier time changes nothing: after a failure, steps are trained again.
        """
        passed_s = at_s - self._trained_s
        if passed_s <= 0:
            return
        self._trained_s += passed_s
        kept = 0.5 ** (passed_s / _FAILURE_HALF_LIFE_S)
        self._failures *= kept
        # The integral of the decaying weight over the time that has passed.
        self._seen_s = self._seen_s * kept + _FAILURE_HALF_LIFE_S / math.log(2) * (1 - kept)

    # --- What follows from it -----------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """True after the first failure."""
        return self._failures > 0

    @property
    def has_steps(self) -> bool:
        """True after the first step; cheaper than :attr:`step_s`."""
        return bool(self._series["step_s"])

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None before the first."""
        return self._median("step_s")

    def slower_s(self, beside_s: Sequence[float]) -> float:
        """Return the seconds that steps beside a base took longer than as many others; negative if
        they were shorter.

        Means are compared, as steps are seldom shorter than usual and often longer. Very slow ones
        (an evaluation) count as a few usual ones in both.
        """
        step_s = self.step_s
        if step_s is None:
            return 0.0
        most_s = _SLOW * step_s
        usual = [min(value, most_s) for value in self._series["step_s"]]
        return sum(min(value, most_s) for value in beside_s) - len(beside_s) * mean(usual)

    @property
    def base_cost_s(self) -> float | None:
        """Seconds of training that a base costs; None if unknown.

        The noise of steps beside a base has both signs, and counts only as far as it does not
        cancel out over several bases.
        """
        return _cost_s(self._median("stall_s"), self._median("slowed_s"))

    @property
    def measured_base_cost_s(self) -> float | None:
        """The same without what was expected; None before the first base."""
        stall_s, slowed_s = (
            weighted_median(self._series[name], _HALF_LIFE) for name in ("stall_s", "slowed_s")
        )
        return _cost_s(stall_s, slowed_s)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures: the inverse of the posterior mean of their rate."""
        return self._prior.mtbf_s(self._failures, self._seen_s)

    def costs(self) -> Costs | None:
        """Return the estimated costs; None until a step, a base and, with a log, a replay were
        measured.

        Until a base was loaded, loading counts as fast as writing; that affects the waste, not the
        choice. Without a log, steps are trained again: replaying one takes a step.

        Raises:
            OptionError: samples are out of any reasonable range.
        """
        step_s = self._median("step_s")
        rate = self._median("write_bytes_per_s")
        replay_s = self._median("replay_s") if self.log else step_s
        if replay_s is None and step_s is not None and self._replay_share is not None:
            replay_s = step_s * self._replay_share
        if step_s is None or rate is None or replay_s is None or self._state_bytes is None:
            return None
        costs = Costs(
            state_bytes=self._state_bytes,
            write_bytes_per_s=rate,
            replay_s=replay_s,
            mtbf_s=self.mtbf_s,
            step_s=step_s,
            load_bytes_per_s=self._median("load_bytes_per_s"),
            base_cost_s=self.base_cost_s,
        )
        if self.has_failed:
            return costs
        # Of a job that has just begun, nothing says that it fails before a base is of use.
        return replace(costs, mtbf_s=max(costs.mtbf_s, _BASES_MIN * (costs.write_s + costs.load_s)))

    def recommend(self) -> Choice | None:
        """Return the recommended interval; None as long as :meth:`costs` returns None.

        Raises:
            InfeasibleError: no choice helps with the measured costs; the previous recommendation
                stays.
        """
        costs = self.costs()
        if costs is None:
            return None
        chosen = best_choice(costs) if self.log else without_log(costs)
        # A write may take longer by now than the current interval, which is not kept then.
        if self._held is not None and self._held >= interval_steps_min(costs):
            interval_s = self._held * costs.step_s
            batch_s = costs.step_s if self.log else interval_s
            wasted = waste(costs, interval_s, batch_s)
            if chosen.waste.total >= wasted.total * (1 - _MARGIN):
                batch_steps = 1 if self.log else self._held
                chosen = Choice(self._held, batch_steps, interval_s, batch_s, wasted)
        self._held = chosen.interval_steps
        return chosen

    def _median(self, name: str) -> float | None:
        expected = [self._expected[name]] * _EXPECTED_BASES if name in self._expected else []
        return weighted_median([*expected, *self._series[name]], _HALF_LIFE)


def _cost_s(stall_s: float | None, slowed_s: float | None) -> float | None:
    if stall_s is None or slowed_s is None:
        return None
    # Never quite nothing: the interval would have no lower end.
    return max(stall_s + max(0.0, slowed_s), _SECONDS_LEAST)
