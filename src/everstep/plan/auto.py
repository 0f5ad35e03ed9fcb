"""Chooses a method for the next start of a run, from what its earlier starts have measured.

``method="auto"``: the first start takes bases lazily, which costs little anywhere. Its event log
then has what a base, a step and a recovery take, and how often the process dies; each further start
chooses by the model below, per second of training::

    wasted = C / i  +  tax / t  +  (i / 2 + lag) * w / M  +  L / M
             bases     log         steps since a base        loading

``i`` is the time between two bases, ``C`` the stall of one, ``lag`` the time until it survives,
``t`` a step, ``M`` the time between failures, ``L`` the time to load; ``w`` is 1 without a log
(steps are trained again) and replay divided by training with one. It is GoCkpt's formula (section
3.1) with LowDiff's term for replay (section V-C). A method that has run before is judged by its
measured costs. To go back and forth costs more than a small gain, so another method must waste a
fifth less than the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import mean
from types import MappingProxyType

from everstep.config.method import presets
from everstep.errors import UnsupportedStateError
from everstep.events import Event
from everstep.plan.estimator import FailurePrior
from everstep.plan.multistep import Pipeline, best_cut, fewest_of

FIRST = "lazy"
HELD = "gockpt_o"
LOGGED = "logged"
_UNSEEN_S = 86_400.0  # least MTBF until something has failed
_NOT_CHECKED = "no start has checked yet if its updates can be logged"
_LESS = 0.8  # another method has to waste at most this share of what the last one does
_STEPS_MIN = 20  # fewer steps of a start measure nothing
_SAME_PACE = 1.05  # starts of the same method differ by as much
_STALL_S = 0.005  # of a base, until one was measured
_HELD_STEPS = presets[HELD].held_steps
_PARTS_MAX = 8  # of a base over several steps, as predicted
_FORWARD = 1 / 3  # of a step
_REPLAY_BYTES_PER_S = 2e9  # of state, until a replay was measured
_REPLAY_SHARE = 0.1  # of a step, at least, until then
_COPY_BYTES_PER_S = 2e9  # until a large base was captured
_LARGE_BYTES = 64e6
_SEGMENT_STEPS = 10
_DISK_SHARE = 0.5  # of a step, that writing its gradients may take


@dataclass(slots=True)
class _Start:
    """One start: its method, and the counters of its last progress."""

    method: str
    begun_s: float
    last_s: float
    begun_step: int = 0
    step: int = 0
    step_s: float | None = None
    base_cost_s: float | None = None
    log_stall_s: float | None = None
    closed: bool = False
    recovered: bool = False
    by_error: bool = False

    @property
    def seconds(self) -> float:
        """Time that it trained."""
        return self.last_s - self.begun_s


@dataclass(slots=True)
class Observed:
    """Measurements of earlier starts, of rank 0.

    Attributes:
        method: method of the last start.
        trained_s: time that processes trained.
        failures: starts that have ended by a kill or an error, without the one that chooses.
        step_s: seconds of a step, without bases; None if unknown.
        captured_s: mean seconds until the state of a base was copied, by method.
        durable_s: mean seconds until a base was on disk, by method.
        load_s: mean seconds of a resume.
        replay_s: seconds to replay a step; None if none was replayed.
        base_cost_s: seconds of training that a base has cost, by method without a log.
        log_cost_s: seconds by which a log has made a step longer; None if there was none.
        has_failed: True if the last start was killed.
        resumes, from_memory: resumes of a run that had steps, and those of them from memory.
        state_bytes, gradient_bytes: sizes of a base, and of the gradients of a step.
        why_not_logged: why updates cannot be logged, as a start has checked; empty if they can.
        given_mtbf_s: seconds between two failures, as the user has given them.
        given_interval_s: seconds between two bases, as the user has given them.
    """

    method: str = FIRST
    trained_s: float = 0.0
    failures: int = 0
    step_s: float | None = None
    captured_s: dict[str, float] = field(default_factory=dict)
    durable_s: dict[str, float] = field(default_factory=dict)
    load_s: float = 0.0
    has_failed: bool = False
    resumes: int = 0
    from_memory: int = 0
    replay_s: float | None = None
    base_cost_s: dict[str, float] = field(default_factory=dict)
    log_cost_s: float | None = None
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0
    why_not_logged: str = _NOT_CHECKED
    given_mtbf_s: float | None = None
    given_interval_s: float | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> Observed | None:
        """Return the measurements of a run; None if it has trained too little.

        Args:
            events: events of one rank, in the order of their times.
        """
        return _Reader().read(events)

    @property
    def is_unchecked(self) -> bool:
        """True if no start has checked yet if its updates can be logged."""
        return self.why_not_logged == _NOT_CHECKED

    @property
    def keeps_memory(self) -> bool:
        """True if the keeper's memory has mostly survived the failures, as far as is known."""
        return 2 * self.from_memory >= self.resumes

    def lag_s(self, method: str) -> float | None:
        """Return the seconds from the step of a base until it survives the failures of this run;
        None if unknown."""
        captured_s = self.captured_s.get(method)
        survives_s = captured_s if self.keeps_memory else self.durable_s.get(method)
        if survives_s is None or method != HELD:
            return survives_s
        # Its step is the last one of those over which it was copied.
        return max(0.0, survives_s - (captured_s or 0.0))

    @property
    def mtbf_s(self) -> float:
        """Seconds between two failures, as :class:`.FailurePrior` expects after those seen.

        Before the first one at least a day: no method is changed for what has not happened.
        """
        if self.given_mtbf_s is not None:
            return self.given_mtbf_s
        expected_s = FailurePrior().mtbf_s(self.failures, self.trained_s)
        return expected_s if self.failures else max(_UNSEEN_S, expected_s)

    def followed_by(self, *, keeper_lives: bool) -> Observed:
        """Return the same with the failure that the next start follows, if it was one."""
        if not self.has_failed:
            return self
        from_memory = self.from_memory + keeper_lives
        return replace(self, resumes=self.resumes + 1, from_memory=from_memory)


class _Reader:
    """Reads measurements from the events of one rank."""

    def __init__(self) -> None:
        self._found = Observed()
        self._starts: list[_Start] = []
        self._captured: dict[str, list[float]] = {}
        self._durable: dict[str, list[float]] = {}
        self._loads: list[float] = []
        self._replays: list[float] = []
        self._readers: Mapping[str, Callable[[_Start, Event], None]] = {
            "recovery": self._recovered,
            "base_captured": self._base_captured,
            "base_durable": self._base_durable,
            "log_checked": self._log_checked,
            "failure": self._failure,
            "progress": self._progressed,
            "closed": self._closed,
        }

    def read(self, events: Iterable[Event]) -> Observed | None:
        for event in events:
            if event.kind == "started":
                self._started(event)
            elif self._starts:
                start = self._starts[-1]
                start.last_s = max(start.last_s, event.unix_s)
                reader = self._readers.get(event.kind)
                if reader is not None:
                    reader(start, event)
        measured = [one for one in self._starts if one.step - one.begun_step >= _STEPS_MIN]
        if not measured or self._found.step_s is None:
            return None
        self._sum_up(measured)
        return self._found

    def _sum_up(self, measured: list[_Start]) -> None:
        found = self._found
        found.trained_s = sum(one.seconds for one in self._starts)
        found.failures = sum(one.by_error or not one.closed for one in self._starts)
        found.has_failed = not self._starts[-1].closed
        # Means, as what a failure loses grows with each of them, slow ones included.
        found.captured_s = {name: mean(values) for name, values in self._captured.items()}
        found.durable_s = {name: mean(values) for name, values in self._durable.items()}
        found.load_s = mean(self._loads) if self._loads else 0.0
        found.replay_s = _median(self._replays) if self._replays else None
        self._compare_costs(measured)

    def _compare_costs(self, measured: list[_Start]) -> None:
        found = self._found
        for method in (FIRST, HELD):
            costs = [one.base_cost_s for one in measured if one.method == method]
            if known := [cost for cost in costs if cost is not None]:
                found.base_cost_s[method] = _median(known)
        logged = [one for one in measured if one.log_stall_s is not None]
        if logged:
            stalled_s = sum(one.log_stall_s or 0.0 for one in logged)
            found.log_cost_s = stalled_s / sum(one.step - one.begun_step for one in logged)
            # It also shares memory, disk and cores with the steps.
            with_log = [one.step_s for one in logged if one.step_s]
            without = [one.step_s for one in measured if one.method in (FIRST, HELD) and one.step_s]
            if with_log and without:
                slower_s = _median(with_log) - _SAME_PACE * _median(without)
                found.log_cost_s = max(found.log_cost_s, slower_s)

    def _started(self, event: Event) -> None:
        method = str(event.details.get("method", FIRST))
        self._starts.append(_Start(method, event.unix_s, event.unix_s))
        self._found.method = method
        self._found.state_bytes = _number(event.details, "state_bytes") or 0.0
        self._found.gradient_bytes = _number(event.details, "gradient_bytes") or 0.0

    def _recovered(self, start: _Start, event: Event) -> None:
        again = start.recovered  # by rewind()
        start.recovered = True
        start.begun_s = event.unix_s
        start.begun_step = start.step = event.step
        if event.details.get("source") == "fresh":
            return
        # After an end in order nothing is in memory.
        if not again and len(self._starts) > 1 and not self._starts[-2].closed:
            self._found.resumes += 1
            self._found.from_memory += event.details.get("source") == "memory"
        self._loads.append(_number(event.details, "load_s") or 0.0)
        replayed = _number(event.details, "replayed")
        seconds = _number(event.details, "replay_s")
        if replayed and seconds:
            self._replays.append(seconds / replayed)

    def _base_captured(self, start: _Start, event: Event) -> None:
        seconds = _number(event.details, "seconds") or 0.0
        self._captured.setdefault(start.method, []).append(seconds)

    def _base_durable(self, start: _Start, event: Event) -> None:
        if event.details.get("tier") == "disk":
            seconds = _number(event.details, "seconds") or 0.0
            self._durable.setdefault(start.method, []).append(seconds)

    def _log_checked(self, start: _Start, event: Event) -> None:
        self._note_refusal(str(event.details.get("why_not", "")))

    def _failure(self, start: _Start, event: Event) -> None:
        # Of a log, or a base over several steps: an update that the first ones did not show.
        if event.details.get("error") == UnsupportedStateError.__name__:
            self._note_refusal(" ".join(str(event.details.get("message", "")).split()))

    def _note_refusal(self, why_not: str) -> None:
        # It stays: an update that has been refused once may come again.
        if self._found.why_not_logged in ("", _NOT_CHECKED):
            self._found.why_not_logged = why_not

    def _progressed(self, start: _Start, event: Event) -> None:
        start.step = event.step
        start.step_s = _number(event.details, "step_s")
        start.base_cost_s = _number(event.details, "base_cost_s")
        stalls = event.details.get("stall_s")
        if isinstance(stalls, Mapping):
            start.log_stall_s = _number(stalls, "log")
            saves = _number(event.details, "saves")
            if start.base_cost_s is None and saves:  # as earlier versions have emitted it
                start.base_cost_s = sum(_number(stalls, cause) or 0.0 for cause in stalls) / saves
        self._found.step_s = start.step_s or self._found.step_s

    def _closed(self, start: _Start, event: Event) -> None:
        start.closed = True
        start.by_error = event.details.get("by_error") is True


def _number(fields: Mapping[str, object], name: str) -> float | None:
    value = fields.get(name)
    usable = isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
    return float(value) if usable else None  # type: ignore[arg-type]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One method, as predicted for the next start.

    Attributes:
        wasted: share of the time that it wastes; infinite if it cannot be used.
        overhead: of this, what bases and log cost while nothing fails.
        lost_s: training that a failure loses on average.
        interval_steps: steps between two bases.
        log_to: place of its log, as of ``LogOptions.to``; empty without one.
        why_not: why it cannot be used; empty if it can.
        base_cost_s, base_write_s: seconds of training that its bases have cost, and until they were
            on disk; None if not measured.
    """

    method: str
    wasted: float
    overhead: float = 0.0
    lost_s: float = 0.0
    interval_steps: int = 1
    log_to: str = ""
    why_not: str = ""
    base_cost_s: float | None = None
    base_write_s: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Method of the next start.

    Attributes:
        why: reason, for people.
        candidates: all methods, the one that wastes least first; empty before anything was
            measured.
    """

    method: str
    why: str
    candidates: tuple[Candidate, ...] = ()

    @property
    def candidate(self) -> Candidate | None:
        """Prediction of the method; None before anything was measured."""
        return next((one for one in self.candidates if one.method == self.method), None)


def choose(
    observed: Observed | None,
    *,
    host_bytes: float = math.inf,
    overhead: float | None = None,
    refused: Mapping[str, str] = MappingProxyType({}),
    why_not_on_disk: str = "",
) -> Choice:
    """Choose the method of the next start.

    Args:
        observed: measurements; None before there are any.
        host_bytes: host memory that captures and a log may take.
        overhead: share of the time that bases and log may take (``Budget.overhead``); None: any.
        refused: why a method cannot be used with this state and these options, by method.
        why_not_on_disk: why a log cannot be on disk; empty if it can.
    """
    if observed is None or observed.step_s is None:
        return Choice(
            FIRST, "too little was measured yet; a later start chooses by what this one is"
        )
    why_not = {one: refused.get(one) or observed.why_not_logged for one in (HELD, LOGGED)}
    candidates = (
        _lazy(observed, overhead),
        _held(observed, overhead, why_not[HELD]),
        _logged(observed, host_bytes, overhead, why_not[LOGGED], why_not_on_disk),
    )
    measured = [_as_measured(one, observed) for one in candidates]
    ordered = tuple(sorted(measured, key=lambda one: one.wasted))
    best = ordered[0]
    last = next((one for one in ordered if one.method == observed.method), None)
    if last is not None and last is not best and best.wasted > _LESS * last.wasted:
        why = f"{last.wasted:.2%} of the time wasted, not a fifth more than {best.method}"
        return Choice(last.method, f"as before: {why}", ordered)
    others = ", ".join(
        f"{one.method} {one.wasted:.2%}" if not one.why_not else f"{one.method}: {one.why_not}"
        for one in ordered[1:]
    )
    return Choice(
        best.method,
        f"{best.wasted:.2%} of the time wasted with a failure every {observed.mtbf_s:.3g} s "
        f"({others})",
        ordered,
    )


def _as_measured(one: Candidate, seen: Observed) -> Candidate:
    method = FIRST if one.method == LOGGED else one.method  # bases of both are copied alike
    costs = seen.base_cost_s.get(method), seen.durable_s.get(method)
    return replace(one, base_cost_s=costs[0], base_write_s=costs[1])


def _lazy(seen: Observed, most: float | None) -> Candidate:
    return _without_log(seen, FIRST, _stall_s(seen), most)


def _held(seen: Observed, most: float | None, why_not: str) -> Candidate:
    """Return bases over several steps, which pay if a copy takes longer than a step."""
    assert seen.step_s is not None
    if why_not:
        return Candidate(HELD, math.inf, why_not=why_not)
    copy_s = seen.captured_s.get(FIRST)
    if copy_s is None or copy_s <= seen.step_s or not seen.state_bytes:
        return Candidate(HELD, math.inf, why_not="a copy takes less than a step")
    pipeline = Pipeline(
        state_s=copy_s,
        gradients_s=copy_s * seen.gradient_bytes / seen.state_bytes,
        forward_s=_FORWARD * seen.step_s,
        backward_s=(1 - _FORWARD) * seen.step_s,
    )
    costs = [best_cut(pipeline, n, _HELD_STEPS).overlap for n in range(1, _PARTS_MAX + 1)]
    whole = costs[0]
    parts = costs[fewest_of(lambda n: costs[n - 1].stall_s, _PARTS_MAX, 0.0) - 1]
    if parts is whole:
        return Candidate(HELD, math.inf, why_not="in one part a base costs least")
    predicted_s = max(_STALL_S, _stall_s(seen) * parts.stall_s / whole.stall_s)
    stall_s = seen.base_cost_s.get(HELD, predicted_s)
    if HELD not in seen.durable_s:
        first_s = seen.durable_s.get(FIRST, copy_s)
        seen = replace(
            seen,
            captured_s={**seen.captured_s, HELD: parts.whole_s},
            durable_s={**seen.durable_s, HELD: first_s + parts.whole_s - whole.whole_s},
        )
    return _without_log(seen, HELD, stall_s, most)


def _without_log(seen: Observed, method: str, stall_s: float, most: float | None) -> Candidate:
    mtbf_s = seen.mtbf_s
    lag_s = seen.lag_s(method) or 0.0
    least_s = max(seen.durable_s.get(method, 0.0), seen.step_s or 0.0)
    interval_s = max(math.sqrt(2 * stall_s * mtbf_s), least_s)
    if most is not None:
        interval_s = max(interval_s, stall_s / most)
    if seen.given_interval_s is not None:
        interval_s = max(seen.given_interval_s, least_s)
    overhead = stall_s / interval_s
    lost_s = interval_s / 2 + lag_s
    wasted = overhead + (lost_s + seen.load_s) / mtbf_s
    return Candidate(method, wasted, overhead, lost_s, _steps(seen, interval_s))


def _stall_s(seen: Observed) -> float:
    return seen.base_cost_s.get(FIRST, _STALL_S)


def _logged(
    seen: Observed, host_bytes: float, most: float | None, why_not: str, why_not_on_disk: str
) -> Candidate:
    assert seen.step_s is not None
    if not seen.keeps_memory:
        why_not = why_not or why_not_on_disk or _disk_is_too_slow(seen)
    if why_not:
        return Candidate(LOGGED, math.inf, why_not=why_not)
    steps_max = math.inf
    if seen.gradient_bytes > 0:
        steps_max = (host_bytes - 2 * seen.state_bytes) / seen.gradient_bytes
    if steps_max < 2:
        return Candidate(LOGGED, math.inf, why_not="host memory does not hold two steps of a log")
    tax = _tax_s(seen) / seen.step_s
    if most is not None and tax >= most:
        why_not = f"a log takes {tax:.1%} of the time, Budget(overhead={most:g}) allows less"
        return Candidate(LOGGED, math.inf, why_not=why_not)
    stall_s = _stall_s(seen)
    guess_s = max(seen.state_bytes / _REPLAY_BYTES_PER_S, _REPLAY_SHARE * seen.step_s)
    replay_s = seen.replay_s or guess_s
    weight = min(1.0, replay_s / seen.step_s)
    mtbf_s = seen.mtbf_s
    best_s = math.sqrt(2 * stall_s * mtbf_s / max(weight, 1e-6))
    if most is not None:
        best_s = max(best_s, stall_s / (most - tax))
    best_s = seen.given_interval_s or best_s
    interval_s = max(min(best_s, steps_max * seen.step_s), seen.durable_s.get(FIRST, 0.0))
    overhead = stall_s / interval_s + tax
    # The step in flight; of a log on disk also the steps of a segment that was being written.
    log_to = "memory" if seen.keeps_memory else "disk"
    lost_s = seen.step_s / 2 if seen.keeps_memory else _SEGMENT_STEPS * seen.step_s
    again_s = weight * interval_s / 2
    wasted = overhead + (again_s + lost_s + seen.load_s) / mtbf_s
    return Candidate(LOGGED, wasted, overhead, lost_s, _steps(seen, interval_s), log_to)


def _steps(seen: Observed, interval_s: float) -> int:
    assert seen.step_s is not None
    return max(1, round(interval_s / seen.step_s)) if seen.step_s > 0 else 1


def _tax_s(seen: Observed) -> float:
    """Return the seconds that a log stalls a step."""
    if seen.log_cost_s is not None:
        return seen.log_cost_s
    rate = _COPY_BYTES_PER_S
    # The copy of a small state takes as long as one lets it, beside a forward.
    copy_s = seen.captured_s.get(FIRST)
    if copy_s and seen.state_bytes >= _LARGE_BYTES:
        rate = seen.state_bytes / copy_s
    return seen.gradient_bytes / rate


def _disk_is_too_slow(seen: Observed) -> str:
    """Return why the disk cannot take a log; empty if it can, or need not."""
    durable_s = seen.durable_s.get(FIRST)
    if not durable_s or seen.state_bytes <= 0:
        return "the keeper dies, too, and how fast the disk is was not measured"
    write_s = seen.gradient_bytes * durable_s / seen.state_bytes
    assert seen.step_s is not None
    share = write_s / seen.step_s
    return "" if share <= _DISK_SHARE else f"the disk takes {share:.0%} of a step for its gradients"
