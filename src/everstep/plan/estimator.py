"""How often, while training runs: costs as measured, and a choice that does not flap.

LowDiff's tuning module "adapts to runtime metrics (failure rate, bandwidth) using stepwise
adjustments" (section VII-A) without saying how. Here:

- Each cost is the median of its newest samples, where older samples weigh less. Single
  outliers (a stalled disk, a step that compiled something) do not move it.
- Failures are too few for a median. They are taken as a Poisson process whose rate has a Gamma
  prior: "as if :attr:`FailurePrior.failures` failures had been seen in
  :attr:`FailurePrior.seconds`". The MTBF is (prior seconds + trained seconds) / (prior failures
  + failures), sane before the first failure and overruled by evidence.
- The choice in force stays until the best one would waste clearly less. What is compared is
  the waste, not the interval: the waste is flat around its minimum, so noise changes nothing.

Nothing here has a clock or touches a file. What was learned is plain data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.errors import OptionError
from everstep.plan.costs import Costs, Waste, is_number, waste
from everstep.plan.interval import best_choice, interval_steps_min, without_log
from everstep.plan.median import weighted_median

__all__ = ["Estimator", "FailurePrior", "Recommendation"]

_VERSION = 1
_SERIES = ("step_s", "write_bytes_per_s", "load_bytes_per_s", "replay_s", "base_cost_s")
_SECONDS_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class FailurePrior:
    """What is believed of failures before any was seen: a Gamma distribution of their rate.

    The default is one failure in a day of training, about what is published for large jobs
    (OPT-175B: 112 failures in 90 days, quoted by LowDiff section I), at the weight of a single
    failure: a week without one makes the MTBF about a week, 10 in 10 hours make it 3 hours.

    Attributes:
        failures: shape of the distribution, the weight of the belief in failures.
        seconds: its rate, the seconds of training in which they would have been seen.

    Raises:
        OptionError: unless both are more than 0.
    """

    failures: float = 1.0
    seconds: float = 86_400.0

    def __post_init__(self) -> None:
        for name in ("failures", "seconds"):
            value = getattr(self, name)
            if not is_number(value) or value <= 0:
                raise OptionError(f"FailurePrior.{name} must be more than 0, not {value!r}")


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do from now on.

    Attributes:
        interval_steps: steps from base to base.
        waste: what that wastes with the costs as they are now estimated.
        costs: those costs.
        changed: whether it differs from what was recommended before.
    """

    interval_steps: int
    waste: Waste
    costs: Costs
    changed: bool


class Estimator:
    """Running estimates of :class:`~everstep.plan.costs.Costs`, and the choice they lead to.

    Samples are seconds of this run as it is; times of failures are seconds *of training* since
    the run began, over all its processes (time in which nothing was trained does not count).

    Args:
        log: whether there is a log to redo steps from; otherwise all since the base is lost.
        replay_share: the share of a step that redoing it is believed to take, until it was
            measured; None: there is no recommendation before.
        window: newest samples of each cost that count.
        half_life: a sample weighs half as much as one that is so many samples newer.
        prior: what is believed of failures before any was seen.
        failure_half_life_s: failures, and training without them, weigh half as much after so
            many seconds of training; None: they always count in full.
        margin: another choice is recommended once it saves this share of the waste.
        accelerators: as in :class:`~everstep.plan.costs.Costs`.

    Raises:
        OptionError: for an argument out of range.
    """

    def __init__(
        self,
        *,
        log: bool = True,
        replay_share: float | None = None,
        window: int = 64,
        half_life: float = 16.0,
        prior: FailurePrior | None = None,
        failure_half_life_s: float | None = 30 * 86_400.0,
        margin: float = 0.05,
        accelerators: int = 1,
    ) -> None:
        if replay_share is not None and (not is_number(replay_share) or not 0 < replay_share < 1):
            raise OptionError(f"replay_share must be between 0 and 1, not {replay_share!r}")
        if not isinstance(window, int) or not 1 <= window <= 100_000:
            raise OptionError(f"window must be a number of samples, not {window!r}")
        _positive("half_life", half_life)
        if failure_half_life_s is not None:
            _positive("failure_half_life_s", failure_half_life_s)
        if not is_number(margin) or not 0 <= margin < 1:
            raise OptionError(f"margin must be at least 0 and less than 1, not {margin!r}")
        if not isinstance(accelerators, int) or accelerators < 1:
            raise OptionError(f"accelerators must be 1 or more, not {accelerators!r}")
        self._log = log
        self._replay_share = replay_share
        self._half_life = half_life
        self._prior = prior or FailurePrior()
        self._failure_half_life_s = failure_half_life_s
        self._margin = margin
        self._accelerators = accelerators
        self._series: dict[str, deque[float]] = {name: deque(maxlen=window) for name in _SERIES}
        self._state_bytes: float | None = None
        self._trained_s = 0.0
        self._seen_s = 0.0
        self._failures = 0.0
        self._held: int | None = None

    # --- What was seen ------------------------------------------------------------------

    def observe_step(self, step_s: float) -> None:
        """A training step took so long, without what a save added to it."""
        usual = type(step_s) is float and 0 < step_s < math.inf  # at each step: few calls
        self._series["step_s"].append(step_s if usual else _positive("step_s", step_s))

    def observe_base(self, size_bytes: float, write_s: float, cost_s: float | None = None) -> None:
        """A base of ``size_bytes`` became durable in ``write_s``.

        Args:
            cost_s: seconds of training that it cost; None if that is not known, then a base
                counts with all of its write.
        """
        rate = _positive("size_bytes", size_bytes) / _positive("write_s", write_s)
        if cost_s is not None:
            # Never quite nothing: the interval would have no lower end.
            self._add("base_cost_s", max(_at_least_0("cost_s", cost_s), _SECONDS_LEAST))
        self._add("write_bytes_per_s", rate)
        self._state_bytes = float(size_bytes)

    def observe_load(self, size_bytes: float, load_s: float) -> None:
        """A base of ``size_bytes`` was loaded in ``load_s``."""
        rate = _positive("size_bytes", size_bytes) / _positive("load_s", load_s)
        self._add("load_bytes_per_s", rate)

    def observe_replay(self, steps: int, replay_s: float) -> None:
        """So many steps were redone from the log in ``replay_s``, reading them included."""
        self._add("replay_s", _positive("replay_s", replay_s) / _positive("steps", steps))

    def observe_failure(self, at_s: float) -> None:
        """Something failed after ``at_s`` seconds of training."""
        self.advance(at_s)
        self._failures += 1

    def advance(self, at_s: float) -> None:
        """Training went on until ``at_s`` seconds of training.

        A time before the newest one changes nothing: after a failure, steps are trained again.
        """
        passed_s = _at_least_0("at_s", at_s) - self._trained_s
        if passed_s <= 0:
            return
        self._trained_s += passed_s
        half_life_s = self._failure_half_life_s
        if half_life_s is None:
            self._seen_s += passed_s
            return
        kept = 0.5 ** (passed_s / half_life_s)
        self._failures *= kept
        self._seen_s = self._seen_s * kept + half_life_s / math.log(2) * (1 - kept)

    # --- What follows from it -----------------------------------------------------------

    @property
    def trained_s(self) -> float:
        """Seconds of training seen so far; where a restarted process goes on counting."""
        return self._trained_s

    @property
    def has_steps(self) -> bool:
        """Whether there was a step: :attr:`step_s` is known, which takes longer to work out."""
        return bool(self._series["step_s"])

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None before there was one."""
        return self._median("step_s")

    @property
    def base_cost_s(self) -> float | None:
        """Seconds of training that a base costs; None before that is known."""
        return self._median("base_cost_s")

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures: the inverse of the posterior mean of their rate."""
        prior = self._prior
        return (prior.seconds + self._seen_s) / (prior.failures + self._failures)

    def costs(self) -> Costs | None:
        """Costs as estimated; None before there was a step, a base and, where there is a log,
        a replay or a belief of it.

        As long as no base was loaded, loading counts as fast as writing; that concerns the
        waste, not the choice. Without a log, steps are trained again: redoing one takes a step.

        Raises:
            OptionError: for samples that are beyond all reason.
        """
        step_s = self._median("step_s")
        rate = self._median("write_bytes_per_s")
        replay_s = self._median("replay_s") if self._log else step_s
        if replay_s is None and step_s is not None and self._replay_share is not None:
            replay_s = step_s * self._replay_share
        if step_s is None or rate is None or replay_s is None or self._state_bytes is None:
            return None
        return Costs(
            state_bytes=self._state_bytes,
            write_bytes_per_s=rate,
            replay_s=replay_s,
            mtbf_s=self.mtbf_s,
            step_s=step_s,
            load_bytes_per_s=self._median("load_bytes_per_s"),
            base_cost_s=self._median("base_cost_s"),
            accelerators=self._accelerators,
        )

    def recommend(self) -> Recommendation | None:
        """How often from now on; None as long as :meth:`costs` are not known.

        Raises:
            InfeasibleError: with the costs as measured no choice helps; what was recommended
                before stays in force.
        """
        costs = self.costs()
        if costs is None:
            return None
        best = best_choice(costs) if self._log else without_log(costs)
        chosen = best.interval_steps
        wasted = best.waste
        if self._held is not None and self._held >= interval_steps_min(costs):
            interval_s = self._held * costs.step_s
            held = waste(costs, interval_s, costs.step_s if self._log else interval_s)
            if wasted.total >= held.total * (1 - self._margin):
                chosen = self._held
                wasted = held
        changed = chosen != self._held
        self._held = chosen
        return Recommendation(chosen, wasted, costs, changed)

    def _add(self, name: str, value: float) -> None:
        self._series[name].append(_positive(name, value))

    def _median(self, name: str) -> float | None:
        return weighted_median(self._series[name], self._half_life)

    # --- Saved with the run -------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain data (numbers, strings, lists, dicts)."""
        return {
            "version": _VERSION,
            "series": {name: list(values) for name, values in self._series.items()},
            "state_bytes": self._state_bytes,
            "trained_s": self._trained_s,
            "seen_s": self._seen_s,
            "failures": self._failures,
            "held": self._held,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what another estimator has learned; arguments stay those of this one.

        Raises:
            OptionError: for anything that :meth:`state_dict` does not return; nothing is
                changed then.
        """
        try:
            if state["version"] != _VERSION:
                raise ValueError(f"version {state['version']!r}")
            series = {
                name: deque(map(float, state["series"][name]), maxlen=own.maxlen)
                for name, own in self._series.items()
            }
            held = state["held"]
            if held is not None and (type(held) is not int or held < 1):
                raise ValueError(f"held {held!r}")
            size = state["state_bytes"]
            size = None if size is None else _positive("state_bytes", size)
            numbers = [_at_least_0(n, state[n]) for n in ("trained_s", "seen_s", "failures")]
            for name, values in series.items():
                for value in values:
                    _positive(name, value)
        except (KeyError, TypeError, ValueError) as error:
            reason = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            raise OptionError(
                f"this is no state of an interval estimator: {reason}",
                hint="what state_dict() returned; or begin without one",
            ) from error
        self._series = series
        self._held = held
        self._state_bytes = size
        self._trained_s, self._seen_s, self._failures = numbers


def _positive(name: str, value: float) -> float:
    if not is_number(value) or value <= 0:
        raise OptionError(f"{name} must be more than 0, not {value!r}")
    return float(value)


def _at_least_0(name: str, value: float) -> float:
    if not is_number(value) or value < 0:
        raise OptionError(f"{name} must not be negative, nor {value!r}")
    return float(value)
