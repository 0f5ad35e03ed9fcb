"""Decides when the next base is due, and keeps bases and log within the daily write budget.

Measurements of steps, bases and failures go into :class:`~everstep.plan.estimator.Estimator`, which
recommends an interval (``every="auto"``). The recommendation is then limited:

- A base is durable before the next one is taken (CheckFreq's rule).
- The log between two bases fits into its memory and its share of the disk.
- The bases of a day fit into the write budget (I10).

If the last two contradict each other, the log has priority and a message says so: without a base,
steps would be lost. All methods run in the training thread, at the end of a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from rich.filesize import decimal

from everstep.commit.job import COORDINATOR
from everstep.config import Every, Options
from everstep.errors import InfeasibleError
from everstep.link import Save
from everstep.plan import Estimator, FailurePrior, checkfreq_interval, seldom, without_log
from everstep.seams.progress import log_or_print
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.base import Saver
from everstep.trainer.budget import (
    DAY_S,
    DayMeter,
    Forecast,
    LogLimits,
    budget_in_words,
    interval_steps_within,
)
from everstep.trainer.log import Recorder
from everstep.trainer.participant import Mark, Participant, RestoredState, TrainingContext

ASK_EVERY = 10
"""Maximum number of steps between two exchanges of the ranks of a job."""

FIRST_STEPS = 10
"""Number of steps that are measured before an interval is chosen and a first base is taken."""

REPLAY_SHARE = 0.1
"""Assumed duration of replaying a step, relative to the step, until a resume has measured it."""

# Most steps between two reviews of the choices. First ones come sooner: each doubles the steps that
# were measured, and with them the time that is known to have passed without a failure.
_REVIEW_STEPS = 64
_WRITE_SHARE = 0.2  # of the time, for writing bases before the first failure
# Weight, in failures, of an MTBF that the user has given: observed failures do not change it.
_CERTAIN = 1e6


TOLERANCE = 0.25
"""Relative difference up to which the current interval is kept.

The waste is flat around its minimum, so a change of the interval would gain almost nothing.
"""

HYSTERESIS = 0.1
"""Relative margin between a limit that is exceeded and the value that is allowed again."""


@dataclass(frozen=True, slots=True)
class IntervalProposal:
    """Base interval that one rank proposes according to its measurements, or that all agree on.

    Attributes:
        steps: number of steps between two bases.
        why: reason, for the message.
        least: minimum number of steps that the budgets allow.
        most: maximum number of steps that the log has space for; None if there is no limit.
        full: name of the space that limits ``most``.
    """

    steps: int
    why: str
    least: int
    most: int | None
    full: str

    def keeps(self, current: int | None) -> bool:
        """Return True if the ``current`` interval is within the limits and close enough."""
        if current is None or current == self.steps:
            return current is not None
        within = current >= self.least and (self.most is None or current <= self.most)
        return within and abs(current - self.steps) <= TOLERANCE * current


def agree_on_interval(proposals: Sequence[IntervalProposal]) -> IntervalProposal:
    """Return the interval for all ranks.

    It is the longest proposed interval, moved into the limits of all ranks. If the limits
    contradict each other, ``most`` wins: without a base, steps would be lost.

    Args:
        proposals: one for each rank, in the order of ranks.
    """
    rank = max(range(len(proposals)), key=lambda rank: proposals[rank].steps)
    steps = proposals[rank].steps
    why = proposals[rank].why
    least = max(proposal.least for proposal in proposals)
    limits = [(proposal.most, proposal.full) for proposal in proposals if proposal.most is not None]
    most, full = min(limits) if limits else (None, "")
    if len(proposals) > 1:
        why = f"according to rank {rank}, {why}"
    if steps < least:
        steps = round(least * (1 + HYSTERESIS))
        why = "the budget allows no shorter interval"
    if most is not None and steps > most:
        steps = most
        why = f"{full} has space for no more"
    return IntervalProposal(steps, why, least, most, full)


@dataclass(slots=True)
class _Seen:
    """Totals at the last measurement of a base."""

    saves: int = 0
    stall_s: float = 0.0
    committed: int = 0
    persist_s: float = 0.0
    linked_bytes: int = 0


class _Measurements:
    """Measurements of steps, bases and failures, for the choice of the interval.

    Args:
        base_bytes: bytes that a base writes to disk, until one was written.

    Attributes:
        estimator: holds the results.
        base_bytes: bytes that a base writes to disk.
        passed_s: duration of the last step with its stalls; None if not known.
        steps: number of measured steps.
    """

    def __init__(self, options: Options, saver: Saver, keepers: Keepers, base_bytes: int) -> None:
        prior = None
        if options.every.mtbf_s is not None:
            prior = FailurePrior(_CERTAIN, _CERTAIN * options.every.mtbf_s)
        self.estimator = Estimator(log=options.logs, replay_share=REPLAY_SHARE, prior=prior)
        self._auto = options.every.auto
        self._saver = saver
        self._keepers = keepers
        self.base_bytes = base_bytes
        auto = options.auto
        if auto is not None and auto.base_cost_s is not None and auto.base_write_s:
            self.estimator.expect_base(base_bytes, auto.base_write_s, auto.base_cost_s)
        # Steps at which failures happened; None once their times are counted.
        self._failed_at: list[int] | None = []
        self._first_step = 0
        self._trained_s = 0.0
        self._last_s: float | None = None
        self.passed_s: float | None = None
        self._last_stall_s = 0.0
        self.steps = 0
        self._seen = _Seen()
        self._in_flight: Save | None = None
        self._beside_s: list[float] = []  # durations of the steps since it was taken

    @property
    def is_free(self) -> bool:
        """True if no base is in flight."""
        return self._in_flight is None or self._in_flight.durable.done()

    def restored(self, restored: RestoredState) -> None:
        """Measure the restore; count failures if this process has not trained before."""
        resumed = restored.resumed
        # The time since the last mark contains the restore, and is not that of a step.
        self._last_s = None
        loaded = resumed.loaded
        if loaded is not None and resumed.load_s > 0:
            self.estimator.observe_load(loaded.size_bytes, resumed.load_s)
        if resumed.replayed and resumed.replay_s > 0:
            self.estimator.observe_replay(resumed.replayed, resumed.replay_s)
        if not restored.again and self._failed_at is not None:
            self._first_step = resumed.step
            self._failed_at = [*resumed.forks, *([] if loaded is None else [resumed.step])]

    def base_taken(self, save: Save) -> None:
        """Measure a base until it ends."""
        self._in_flight = save
        self._beside_s = []

    def measure_step(self, now_s: float) -> None:
        """Measure the step that has ended now."""
        stall_s = self._saver.base_stall_s
        if self._last_s is not None:
            self.passed_s = now_s - self._last_s
            took_s = self.passed_s - (stall_s - self._last_stall_s)
            if took_s > 0:
                self._observe_step(took_s)
                self._trained_s += took_s
                self.steps += 1
        self._last_s = now_s
        self._last_stall_s = stall_s

    def _observe_step(self, took_s: float) -> None:
        """Add the duration of a step, without its stalls, to the estimate.

        A step beside a base in flight may take longer, as they share memory, disk and cores. The
        difference counts as a cost of the base, so these steps are kept apart.
        """
        if self._auto and self._in_flight is not None:
            self._beside_s.append(took_s)
            # A base that takes longer than this must not keep the estimate of a step from being
            # updated.
            if len(self._beside_s) < _REVIEW_STEPS:
                return
        self.estimator.observe_step(took_s)

    def _slowed_s(self) -> float:
        """Return the additional seconds of the steps beside the last base; may be negative, as
        steps vary."""
        beside_s = self._beside_s
        self._beside_s = []
        return self.estimator.slower_s(beside_s)

    def measure_base(self) -> bool:
        """Measure the base in flight if it has ended; return True if a base was committed."""
        save = self._in_flight
        if save is None or not save.durable.done():
            return False
        self._in_flight = None
        slowed_s = self._slowed_s()
        if save.is_lost:
            return False
        keeper = self._keepers.stats
        before = self._seen
        # Totals: several bases may have ended since the last measurement, so averages are used.
        self._seen = _Seen(
            self._saver.saves,
            self._saver.base_stall_s,
            keeper.committed,
            keeper.persist_s,
            keeper.linked_bytes,
        )
        bases = self._seen.committed - before.committed
        if bases > 0:
            size_bytes = save.durable.result()
            linked_bytes = (self._seen.linked_bytes - before.linked_bytes) // bases
            self.base_bytes = max(1, size_bytes - linked_bytes)
            persist_s = (self._seen.persist_s - before.persist_s) / bases
            saves = max(1, self._seen.saves - before.saves)
            stall_s = (self._seen.stall_s - before.stall_s) / saves
            self.estimator.observe_base(size_bytes, max(persist_s, 1e-9), stall_s, slowed_s)
        return bases > 0

    def count_failures(self, step_s: float) -> None:
        """Count each earlier takeover of the run as a failure.

        Times are derived from step numbers, because clocks of other machines may differ.
        """
        for at in sorted(self._failed_at or []):
            self.estimator.observe_failure(at * step_s)
        if self._failed_at is not None:
            self._trained_s += self._first_step * step_s
        self._failed_at = None
        self.estimator.advance(self._trained_s)


class _LogSpace:
    """Space that the log has in memory, on disk and in the daily write budget.

    Args:
        recorder: records the log; None without one.
        limits: limits of the log.
    """

    def __init__(
        self,
        context: TrainingContext,
        keepers: Keepers,
        recorder: Recorder | None,
        limits: LogLimits,
    ) -> None:
        self._context = context
        self._options = context.options
        self._keepers = keepers
        self._recorder = recorder
        self._limits = limits
        self._meter = DayMeter()
        self._recorded = 0
        self._before_base = 0  # bytes recorded before the last base that goes to disk

    def base_taken(self, save: Save) -> None:
        """Count the records after a base from now on, if it goes to disk."""
        if self._recorder is not None and not save.in_memory:
            self._before_base = self._recorder.stats.record_bytes

    @property
    def leads_on(self) -> bool:
        """True if steps can be replayed from a log: there is one, and it was not given up."""
        return self._recorder is not None and not self._recorder.is_over

    @property
    def on_disk(self) -> bool:
        """True if records made now go to disk."""
        return self._recorder is not None and self._recorder.disk.on and self.leads_on

    @property
    def step_bytes(self) -> float:
        """Average bytes of the records of a step."""
        stats = None if self._recorder is None else self._recorder.stats
        return stats.record_bytes / stats.marks if stats is not None and stats.marks else 0.0

    @property
    def memory_step_bytes(self) -> float:
        """Average host memory of the records of a step, in bytes."""
        assert self._recorder is not None
        return self._recorder.memory.taken_bytes / max(1, self._recorder.stats.marks)

    def bytes_per_day(self, step_s: float) -> float:
        """Return the bytes of records in a day of steps of this duration."""
        return self.step_bytes * DAY_S / step_s

    def interval_max(self) -> tuple[int | None, str]:
        """Return the largest interval that the log has space for, in steps, and the space's name.

        After more steps the log itself would need a base.
        """
        recorder = self._recorder
        if recorder is None or recorder.is_over or not self.step_bytes:
            return None, ""
        found: list[tuple[int, str]] = []
        if self._options.method.apply != "replica":  # it drops records once applied
            # A log that fills half of its memory requests a base by itself.
            in_memory = recorder.memory.bytes_max // 2 / self.memory_step_bytes
            found.append((max(1, int(in_memory)), "the memory of the log"))
        if self._limits.interval_bytes is not None and self.on_disk:
            on_disk = self._limits.interval_bytes / self.step_bytes
            found.append((max(1, int(on_disk)), "the log's share of the disk"))
        return min(found, default=(None, ""))

    def relieve_disk(self) -> None:
        """Request a base when the log on disk has reached its limit between two bases."""
        recorder = self._recorder
        most = self._limits.interval_bytes
        if recorder is None or most is None or not self.on_disk:
            return
        # One step in reserve: it is recorded before the base can relieve the disk.
        if recorder.stats.record_bytes - self._before_base > most - self.step_bytes:
            recorder.memory.half_full = True

    def meter_day(self, now_s: float) -> None:
        """Stop the log on disk if the bytes written in the last 24 hours reach the budget."""
        budget = self._options.budget.write_bytes_per_day
        recorder = self._recorder
        if budget is None or recorder is None or not self._options.log_on_disk:
            return
        stats = self._keepers.stats
        self._meter.reached(now_s, stats.written_bytes + stats.log_bytes)
        recorded = self._recorded
        self._recorded = recorder.stats.record_bytes
        steps = stats.log_batch_steps or self._options.log.batch_first
        batch = (steps + 1) * (self._recorded - recorded)
        written = self._meter.last_day_bytes(now_s)
        # A segment is written at once, so the log stops before the write that would exceed the
        # budget.
        if recorder.disk.on and written + batch > budget:
            self.hold(
                f"{decimal(written)} were written within a day, and the next segment of about "
                f"{decimal(batch)} would exceed it"
            )

    def last_day_bytes(self, now_s: float) -> int:
        """Return the bytes written in the last 24 hours."""
        return self._meter.last_day_bytes(now_s)

    def host_bytes_for(self, interval_steps: int) -> int | None:
        """Return the budget of host memory in which so many steps fit; None if unknown."""
        # Twice, since a base is requested when half of the memory is full.
        log_bytes = 2 * math.ceil(self.memory_step_bytes * interval_steps * (1 + HYSTERESIS))
        return self._limits.host_bytes_for(log_bytes)

    def continue_on_disk(self) -> bool:
        """Write the log to disk again from the next base on; return False if it is not held."""
        recorder = self._recorder
        return recorder is not None and not recorder.disk.on and recorder.disk.again()

    def hold(self, why: str) -> None:
        """Keep the log in memory from now on, and say why."""
        assert self._recorder is not None
        self._recorder.stop_disk()
        _say(
            self._context,
            f"{budget_in_words(self._options)}: from now on the log stays in memory ({why}); "
            "a lost machine then costs all steps after the newest base",
        )


class Cadence(Participant):
    """Measure the steps and bases of one training process, and decide when a base is due.

    With several ranks and ``every="auto"`` no interval is chosen before all ranks have reported
    their measurements (:meth:`decide`).

    Args:
        base_bytes: bytes that a base writes to disk, until one was written.
        limits: limits of the log.

    Attributes:
        interval_steps: number of steps between two bases, the same on all ranks. None if it is
            not known yet, or given in seconds.
        forecast: bytes written in a day at the current pace; None if not known yet.
    """

    def __init__(
        self,
        context: TrainingContext,
        saver: Saver,
        keepers: Keepers,
        recorder: Recorder | None,
        *,
        base_bytes: int,
        limits: LogLimits,
    ) -> None:
        options = context.options
        self._context = context
        self._options = options
        self._alone = context.state.ranks.world == 1
        self._saver = saver
        self._clock = context.clock
        self._measured = _Measurements(options, saver, keepers, base_bytes)
        self._log = _LogSpace(context, keepers, recorder, limits)
        self._reviewed = 0  # number of samples at the last review
        self._base_step = 0
        self._warned = False  # that bases exceed the budget
        self._proposal: IntervalProposal | None = None
        self.interval_steps = options.every.steps
        if options.every.auto and options.auto is not None:
            # As earlier starts have measured, until this one has.
            steps = options.auto.interval_steps or FIRST_STEPS
            expected = options.auto.base_cost_s is not None
            self.interval_steps = steps if expected else min(steps, FIRST_STEPS)
        self._forecasts = recorder is not None or options.every != Every()
        self.forecast: Forecast | None = None

    def restored(self, restored: RestoredState) -> None:
        """Continue from a restored state; count failures if this process has not trained before."""
        self._base_step = restored.resumed.step
        self._measured.restored(restored)

    def base_requested(self, step: int) -> None:
        """Count the interval from ``step`` on, even if the base of it fails."""
        self._base_step = step

    def base_taken(self, save: Save) -> None:
        """Measure the base that was requested until it ends."""
        self._measured.base_taken(save)
        self._log.base_taken(save)

    def due(self, step: int) -> bool:
        """Return True if a base is due at the end of ``step``, for a single rank."""
        every = self._options.every
        if every.auto:
            return self.decide([self.report()], step)[0]
        return every.due(step, self._clock.monotonic_s() - self._saver.last_save_s)

    def report(self) -> dict[str, Any]:
        """Return this rank's measurements as a message for :meth:`decide`."""
        return {
            "since_s": self._clock.monotonic_s() - self._saver.last_save_s,
            "step_s": self._measured.passed_s,
            "base_step": self._base_step,
            "free": self._measured.is_free,
            "measured": self._measured.steps >= FIRST_STEPS,
            "interval_steps": self.interval_steps,
            # Plain data, as messages between ranks are encoded with msgpack.
            "wish": None if self._proposal is None else astuple(self._proposal),
        }

    def decide(self, reports: Sequence[Mapping[str, Any]], step: int) -> tuple[bool, int]:
        """Decide from all ranks' reports whether a base is due at the end of ``step``.

        The result depends on the reports only, so it is the same on every rank.

        Args:
            reports: one :meth:`report` for each rank.

        Returns:
            True if a base is due, and the number of steps until the next exchange.
        """
        every = self._options.every
        if every.seconds is not None:
            # The time must be over on all ranks; the slowest step gives the earliest next exchange.
            since_s = min(report["since_s"] for report in reports)
            due = every.due(step, since_s)
            step_s = max(report["step_s"] or 0.0 for report in reports)
            left_s = every.seconds - (0.0 if due else since_s)
            return due, 1 if not step_s else max(1, min(ASK_EVERY, int(left_s / step_s)))
        if not every.auto:
            return every.due(step, 0.0), ASK_EVERY
        self._apply_proposals(reports)
        return self._decide_auto(reports, step)

    def _decide_auto(self, reports: Sequence[Mapping[str, Any]], step: int) -> tuple[bool, int]:
        interval = self.interval_steps
        since = step - max(report["base_step"] for report in reports)
        if interval is None and not all(report["measured"] for report in reports):
            return False, max(1, FIRST_STEPS - since)
        interval = interval or FIRST_STEPS
        # A base is durable before the next one is taken.
        due = since >= interval and all(report["free"] for report in reports)
        left = interval if due else interval - since
        return due, min(left, ASK_EVERY) if left > 0 else ASK_EVERY

    def figures(self) -> Mapping[str, Any]:
        """Return the interval, what it follows from, and what it costs."""
        return {
            "interval_steps": self.interval_steps,
            "step_s": self._measured.estimator.step_s,
            "base_cost_s": self._measured.estimator.measured_base_cost_s,
            "mtbf_s": self._measured.estimator.mtbf_s,
            "forecast_bytes_per_day": None if self.forecast is None else self.forecast.total_bytes,
        }

    def mark(self, mark: Mark) -> bool:
        """Measure the step that has ended, and review the choices from time to time."""
        now_s = self._clock.monotonic_s()
        measured = self._measured
        measured.measure_step(now_s)
        self._log.meter_day(now_s)
        self._log.relieve_disk()
        new = measured.measure_base() and not self._is_chosen and self._forecasts
        long_ago = measured.steps - self._reviewed >= min(_REVIEW_STEPS, self._reviewed)
        # Not known while all steps so far ran beside the first base.
        known = measured.estimator.has_steps
        if measured.steps >= FIRST_STEPS and known and (new or long_ago or not self._reviewed):
            self._reviewed = measured.steps
            if self._options.every.auto:
                self._choose()
            self._forecast_day()
        return False

    @property
    def _is_chosen(self) -> bool:
        """True if the interval is given, or follows from measurements of this start."""
        unmeasured = self._options.every.auto and self._proposal is None
        return self.interval_steps is not None and not unmeasured

    # --- Choice of the interval ---------------------------------------------------------

    def _choose(self) -> None:
        estimator = self._measured.estimator
        step_s = estimator.step_s
        assert step_s is not None
        self._measured.count_failures(step_s)
        costs = estimator.costs()
        if costs is None:
            return
        why = ""
        scheduled = self._saver.parks
        if self._options.method.apply == "replica" or scheduled:
            # Copies of every step are made whether or not one of them becomes durable.
            cost_s = 0.0 if scheduled else estimator.base_cost_s or 0.0
            wanted = checkfreq_interval(step_s=step_s, stall_s=cost_s, persist_s=costs.write_s)
            why = "as often as a base is durable before the next one"
        else:
            log = estimator.log = self._log.leads_on
            try:
                found = estimator.recommend()
                assert found is not None
            except InfeasibleError as error:
                found = without_log(costs)
                why = f"{error.message}; "
                log = False
            wanted, wasted = seldom(costs, found, log=log)
            if not estimator.has_failed and self._options.every.mtbf_s is None:
                # To spare the disk, as long as a failure is a mere guess.
                wanted = max(wanted, math.ceil(costs.write_s / (_WRITE_SHARE * step_s)))
            why += (
                f"{wasted:.2%} of the time wasted with a failure every {costs.mtbf_s / 3600:.3g} h"
            )
        least = self._interval_min(step_s)
        (most, full) = self._log.interval_max()
        # The log has a share of the write budget: without it, bases may be closer to each other.
        if most is not None and least > most and self._log.on_disk:
            self._log.hold("with the bases that it needs, it would exceed the budget")
            least = self._interval_min(step_s)
            (most, full) = self._log.interval_max()
        self._proposal = IntervalProposal(wanted, why, least, most, full)
        if self._alone:
            self._apply_proposals([self.report()])

    def _apply_proposals(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Choose the interval once all ranks have proposed one."""
        if any(report["wish"] is None for report in reports):
            return
        # From a report, not from this rank: all ranks must compare with the same interval.
        current = reports[0]["interval_steps"]
        new = agree_on_interval([IntervalProposal(*report["wish"]) for report in reports])
        if new.most is not None and new.least > new.most:
            self._report_conflict(new.least, new.most, new.full)
        if new.keeps(current):
            self.interval_steps = current
            return
        self.interval_steps = wanted = new.steps
        if not self._alone:
            self._reviewed = 0  # compute the forecast again
        step_s = self._measured.estimator.step_s
        assert step_s is not None
        before = "" if current is None else f"; before: {_steps(current)}"
        self._say(f"a base every {_steps(wanted)} ({wanted * step_s:.3g} s): {new.why}{before}")

    def _interval_min(self, step_s: float) -> int:
        """Return the smallest interval that the budgets allow, in steps."""
        least = self._within_overhead(step_s)
        budget = self._options.budget.write_bytes_per_day
        if budget is None:
            return least
        log = self._log.bytes_per_day(step_s) if self._log.on_disk else 0.0
        # A log that uses up the budget alone leaves nothing for bases, and the result is the
        # maximum.
        return max(least, interval_steps_within(budget - log, self._measured.base_bytes, step_s))

    def _within_overhead(self, step_s: float) -> int:
        """Return the smallest interval in which bases stay within their share of the time."""
        share = self._options.budget.overhead
        cost_s = self._measured.estimator.base_cost_s
        if share is None or cost_s is None or step_s <= 0:
            return 1
        return max(1, math.ceil(cost_s / (share * step_s)))

    def _report_conflict(self, least: int, most: int, full: str) -> None:
        """Report once that the log needs bases more often than the budgets allow."""
        step_s = self._measured.estimator.step_s
        budget = self._options.budget
        if self._warned or step_s is None:
            return
        self._warned = True
        host_bytes = self._log.host_bytes_for(least) if "memory" in full else None
        more = "" if host_bytes is None else f"Budget(host_bytes={host_bytes}) or more, "
        if budget.write_bytes_per_day is None:
            self._say(
                f"Budget(overhead={budget.overhead:g}) allows a base every {_steps(least)}, but "
                f"{full} has space for {_steps(most)}, and later steps would be lost without a "
                f"base: bases take more of the time. To stay within it, use {more}a method without "
                "a log"
            )
            return
        day_bytes = math.ceil(self._measured.base_bytes * DAY_S / (step_s * most))
        self._say(
            f"{budget_in_words(self._options)}: it allows a base every {_steps(least)}, but {full} "
            f"has space for {_steps(most)}, and later steps would be lost without a base: bases "
            f"write {decimal(day_bytes)} a day, more than the budget. To stay within it, use {more}"
            f"write_bytes_per_day={day_bytes}, or a method without a log"
        )

    # --- Daily write budget -------------------------------------------------------------

    def _forecast_day(self) -> None:
        """Forecast the bytes of a day, print them once, and apply the budget to the log."""
        step_s = self._measured.estimator.step_s
        every = self._options.every
        if step_s is None or (every.auto and not self._is_chosen):
            return
        bases_s = every.seconds
        if self.interval_steps is not None:
            bases_s = self.interval_steps * step_s
        first = self.forecast is None
        bases_bytes = 0.0 if bases_s is None else self._measured.base_bytes * DAY_S / bases_s
        bases_bytes /= self._options.method.disk_every
        log_bytes = self._log.bytes_per_day(step_s) if self._options.log_on_disk else 0.0
        self.forecast = Forecast(bases_bytes, log_bytes if self._log.on_disk else 0.0)
        if first and self.forecast.total_bytes:
            self._say(
                f"a step takes {step_s:.3g} s: {self.forecast.in_words} a day to disk; "
                f"{budget_in_words(self._options)}"
            )
        self._keep_within(Forecast(bases_bytes, log_bytes))
        if not self._log.on_disk:
            self.forecast = Forecast(bases_bytes, 0.0)

    def _keep_within(self, forecast: Forecast) -> None:
        """Stop or restart the log on disk, depending on the forecast."""
        budget = self._options.budget.write_bytes_per_day
        if budget is None:
            return
        if forecast.bases_bytes > budget and not self._warned:
            self._warned = True
            how = ' (to stay within it, use every="auto" or a longer interval)'
            how = "" if self._options.every.auto else how
            self._say(f"bases alone exceed the daily budget; they are taken anyway{how}")
        if not self._options.log_on_disk:
            return
        if self._log.on_disk:
            if forecast.total_bytes > budget:
                self._log.hold(f"{forecast.in_words} a day would exceed the budget")
        elif self._fits_clearly(forecast, budget) and self._log.continue_on_disk():
            self._say("the budget has space again: from the next base on, the log goes to disk")

    def _fits_clearly(self, forecast: Forecast, budget: int) -> bool:
        """Return True if the log fits the budget with a margin, so that it does not flap."""
        now_s = self._clock.monotonic_s()
        most = max(forecast.total_bytes, self._log.last_day_bytes(now_s))
        return most <= (1 - HYSTERESIS) * budget

    def _say(self, text: str) -> None:
        _say(self._context, text)


def _say(context: TrainingContext, text: str) -> None:
    # One rank speaks for all: there may be thousands.
    speaks = context.state.ranks.rank == COORDINATOR
    level = logging.INFO if speaks else logging.DEBUG
    log_or_print(f"{context.run}: {text}", level=level)


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
