"""When bases are taken, what that writes in a day, and whether the log may go to disk.

What is measured while training runs goes to :class:`~everstep.plan.estimator.Estimator`; what
it recommends is kept within bounds: a base is durable before the next is taken (CheckFreq's rule),
the log between two bases fits its memory and its part of the disk, and a day's bases fit the write
budget (I10). Where the last two contradict each other the log goes first, and that is said: without
a base, steps would be lost.
All of it happens in the training thread, at the end of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import PurePath
from typing import Any

from rich.filesize import decimal

from everstep.config.options import Every, Options
from everstep.errors import InfeasibleError
from everstep.link.save import Save
from everstep.plan.estimator import Estimator, FailurePrior, Recommendation
from everstep.plan.interval import Choice, checkfreq_interval, without_log
from everstep.plan.seldom import seldom
from everstep.restore.start.resume import Resumed
from everstep.seams import Clock
from everstep.seams.messages import say
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.base.saver import Saver
from everstep.trainer.budget.disk import (
    DAY_S,
    DayMeter,
    Forecast,
    budget_in_words,
    interval_steps_within,
)
from everstep.trainer.budget.log_limits import LogLimits
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.session.interval_vote import HYSTERESIS, IntervalProposal, agree_on_interval

__all__ = ["ASK_EVERY", "FIRST_STEPS", "REPLAY_SHARE", "Cadence"]

ASK_EVERY = 10
"""Steps between two exchanges of the ranks of a job, at most."""

FIRST_STEPS = 10
"""So many steps are measured before anything is said or chosen; then a first base is."""

REPLAY_SHARE = 0.1
"""Of a step, what redoing it is believed to take until a resume has measured it."""

_LOOK_AGAIN_STEPS = 64
_CERTAIN = 1e6  # a belief of so many failures is not moved by those that happen


@dataclass(slots=True)
class _Seen:
    """Totals when a base was last measured."""

    saves: int = 0
    stall_s: float = 0.0
    committed: int = 0
    persist_s: float = 0.0
    linked_bytes: int = 0


class Cadence:
    """Watches steps and bases of one training process, and says when the next base is due.

    Args:
        run: the run folder; for messages.
        base_bytes: what a base writes to disk, until one was written.
        limits: of the log.
        alone: False: with ``every="auto"`` nothing is chosen before all ranks have said what they
            measure (:meth:`agreed`).

    Attributes:
        interval_steps: from base to base; None as long as that is not known, or where it is
            given in seconds. Of all ranks the same.
        forecast: bytes that are written in a day at this pace; None before it is known.
    """

    def __init__(
        self,
        options: Options,
        run: PurePath,
        saver: Saver,
        keepers: Keepers,
        recorder: Recorder | None,
        clock: Clock,
        *,
        base_bytes: int,
        limits: LogLimits | None = None,
        alone: bool = True,
    ) -> None:
        self._options = options
        self._alone = alone
        self._limits = limits or LogLimits()
        self._run = run
        self._saver = saver
        self._keepers = keepers
        self._recorder = recorder
        self._clock = clock
        self._base_bytes = base_bytes
        prior = None
        if options.every.mtbf_s is not None:
            prior = FailurePrior(_CERTAIN, _CERTAIN * options.every.mtbf_s)
        self._estimator = Estimator(log=options.logs, replay_share=REPLAY_SHARE, prior=prior)
        self._failed_at: list[int] | None = []  # steps; until it is known how long they take
        self._first_step = 0
        self._trained_s = 0.0
        self._last_s: float | None = None
        self._passed_s: float | None = None
        self._last_stall_s = 0.0
        self._samples = 0
        self._looked = 0
        self._seen = _Seen()
        self._under: Save | None = None
        self._beside_s: list[float] = []  # steps since it was taken
        self._base_step = 0
        self._meter = DayMeter()
        self._recorded = 0
        self._batch_steps = options.log.batch_first
        self._told = False  # that bases exceed the budget
        self._wish: IntervalProposal | None = None
        self._before_base = 0  # bytes recorded before the last base that goes to disk
        self.interval_steps = options.every.steps
        self._foretells = recorder is not None or options.every != Every()
        self.forecast: Forecast | None = None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step without what bases add, as measured; None before there was one."""
        return self._estimator.step_s

    @property
    def mtbf_s(self) -> float:
        """Seconds of training between two failures, as estimated."""
        return self._estimator.mtbf_s

    def began(self, resumed: Resumed, *, again: bool) -> None:
        """A state was restored, and training goes on from there.

        Args:
            again: this very process had trained before; nothing has failed.
        """
        self._last_s = None
        self._base_step = resumed.step
        loaded = resumed.loaded
        if loaded is not None and resumed.load_s > 0:
            self._estimator.observe_load(loaded.size_bytes, resumed.load_s)
        if resumed.replayed and resumed.replay_s > 0:
            self._estimator.observe_replay(resumed.replayed, resumed.replay_s)
        if not again and self._failed_at is not None:
            self._first_step = resumed.step
            self._failed_at = [*resumed.forks, *([] if loaded is None else [resumed.step])]

    def asked(self, step: int) -> None:
        """A base of ``step`` is asked for; if it fails, the next is due an interval later."""
        self._base_step = step

    def taken(self, save: Save) -> None:
        """That base is under way."""
        self._under = save
        self._beside_s = []
        if self._recorder is not None and not save.in_memory:
            self._before_base = self._recorder.stats.record_bytes

    def due(self, step: int) -> bool:
        """Whether a base is due at the end of ``step``, by what this process knows."""
        every = self._options.every
        if every.auto:
            return self.agreed([self.says()], step)[0]
        return every.due(step, self._clock.monotonic_s() - self._saver.last_save_s)

    def says(self) -> dict[str, Any]:
        """What this process knows of when the next base is due: plain data."""
        return {
            "since_s": self._clock.monotonic_s() - self._saver.last_save_s,
            "step_s": self._passed_s,
            "base_step": self._base_step,
            "free": self._under is None or self._under.durable.done(),
            "measured": self._samples >= FIRST_STEPS,
            "interval_steps": self.interval_steps,
            "wish": None if self._wish is None else astuple(self._wish),
        }

    def agreed(self, said: Sequence[Mapping[str, Any]], step: int) -> tuple[bool, int]:
        """Whether a base is due at the end of ``step``, and behind how many steps that is to be
        asked again; nothing but what all have said makes the answer.

        Args:
            said: by each rank.
        """
        every = self._options.every
        if every.seconds is not None:
            since_s = min(one["since_s"] for one in said)
            due = every.due(step, since_s)
            step_s = max(one["step_s"] or 0.0 for one in said)
            left_s = every.seconds - (0.0 if due else since_s)
            return due, 1 if not step_s else max(1, min(ASK_EVERY, int(left_s / step_s)))
        if not every.auto:
            return every.due(step, 0.0), ASK_EVERY
        self._take_over(said)
        interval = self.interval_steps
        since = step - max(one["base_step"] for one in said)
        if interval is None and not all(one["measured"] for one in said):
            return False, max(1, FIRST_STEPS - since)
        interval = interval or FIRST_STEPS
        due = since >= interval and all(one["free"] for one in said)
        left = interval if due else interval - since
        return due, min(left, ASK_EVERY) if left > 0 else ASK_EVERY

    def stepped(self) -> None:
        """A step is over, and recorded."""
        now_s = self._clock.monotonic_s()
        stall_s = sum(self._saver.stall_s.values())
        if self._last_s is not None:
            self._passed_s = now_s - self._last_s
            took_s = self._passed_s - (stall_s - self._last_stall_s)
            if took_s > 0:
                self._watch(took_s)
                self._trained_s += took_s
                self._samples += 1
        self._last_s = now_s
        self._last_stall_s = stall_s
        self._meter_day(now_s)
        self._relieve_disk()
        new = self._measure() and self.interval_steps is None and self._foretells
        long_ago = self._samples - self._looked >= _LOOK_AGAIN_STEPS
        known = self._estimator.has_steps  # not while all were beside the first base
        if self._samples >= FIRST_STEPS and known and (new or long_ago or not self._looked):
            self._looked = self._samples
            if self._options.every.auto:
                self._choose()
            self._look_ahead()
            self._tell_of_batch()

    # --- What was measured --------------------------------------------------------------

    def _watch(self, took_s: float) -> None:
        """A step took so long beyond what it waited. Beside a base that is being copied and
        written it may take longer (memory, disk, and cores are shared): that is part of what the
        base costs, and not of what a step takes."""
        if self._options.every.auto and self._under is not None:
            self._beside_s.append(took_s)
            if len(self._beside_s) < _LOOK_AGAIN_STEPS:
                return
        self._estimator.observe_step(took_s)

    def _slowed_s(self) -> float:
        """What the steps beside the last base took more than others."""
        beside_s = self._beside_s
        self._beside_s = []
        if not beside_s:  # what a step takes is worked out of many samples
            return 0.0
        step_s = self._estimator.step_s
        return 0.0 if step_s is None else max(0.0, sum(beside_s) - len(beside_s) * step_s)

    def _measure(self) -> bool:
        """The base that is under way, if it is over."""
        save = self._under
        if save is None or not save.durable.done():
            return False
        self._under, slowed_s = None, self._slowed_s()
        if save.durable.cancelled() or save.durable.exception() is not None:
            return False
        keeper = self._keepers.stats
        before = self._seen
        self._seen = _Seen(
            self._saver.saves,
            sum(self._saver.stall_s.values()),
            keeper.committed,
            keeper.persist_s,
            keeper.linked_bytes,
        )
        bases = self._seen.committed - before.committed
        if bases > 0:
            size_bytes = save.durable.result()
            linked_bytes = (self._seen.linked_bytes - before.linked_bytes) // bases
            self._base_bytes = max(1, size_bytes - linked_bytes)
            persist_s = (self._seen.persist_s - before.persist_s) / bases
            saves = max(1, self._seen.saves - before.saves)
            cost_s = (self._seen.stall_s - before.stall_s) / saves + slowed_s
            self._estimator.observe_base(size_bytes, max(persist_s, 1e-9), cost_s)
        return bases > 0

    def _count_failures(self, step_s: float) -> None:
        """Each time that another process took the run over, something had failed.

        Its time is counted in steps, not by clocks of other machines.
        """
        for at in sorted(self._failed_at or []):
            self._estimator.observe_failure(at * step_s)
        if self._failed_at is not None:
            self._trained_s += self._first_step * step_s
        self._failed_at = None
        self._estimator.advance(self._trained_s)

    # --- What follows from it -----------------------------------------------------------

    def _choose(self) -> None:
        step_s = self._estimator.step_s
        assert step_s is not None
        self._count_failures(step_s)
        costs = self._estimator.costs()
        if costs is None:
            return
        why = ""
        scheduled = self._options.is_scheduled and self._alone
        if self._options.method.apply == "replica" or scheduled:
            # Copies of every step are made whether or not one of them becomes durable.
            cost_s = 0.0 if scheduled else self._estimator.base_cost_s or 0.0
            wanted = checkfreq_interval(step_s=step_s, stall_s=cost_s, persist_s=costs.write_s)
            why = "as often as one is durable before the next"
        else:
            found: Choice | Recommendation
            log = self._options.logs
            try:
                recommended = self._estimator.recommend()
                assert recommended is not None
                found = recommended
            except InfeasibleError as error:
                found = without_log(costs)
                why = f"{error.message}; "
                log = False
            wanted, wasted = seldom(costs, found, log=log)
            why += f"{wasted:.2%} of the time wasted with a failure in {costs.mtbf_s / 3600:.3g} h"
        least = self._interval_min(step_s)
        (most, full) = self._interval_max()
        if most is not None and least > most and self._logs_to_disk:
            self._hold_log("with the bases that it needs it is more than the budget")
            least = self._interval_min(step_s)
            (most, full) = self._interval_max()
        self._wish = IntervalProposal(wanted, why, least, most, full)
        if self._alone:
            self._take_over([self.says()])

    def _take_over(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Chooses the interval of the rank that wants the longest one, or what comes next to it
        within the bounds of all."""
        if any(one["wish"] is None for one in said):
            return
        held = said[0]["interval_steps"]
        new = agree_on_interval([IntervalProposal(*one["wish"]) for one in said])
        if new.most is not None and new.least > new.most:
            self._tell_of_conflict(new.least, new.most, new.full)
        if new.stays(held):
            self.interval_steps = held
            return
        self.interval_steps = wanted = new.steps
        if not self._alone:
            self._looked = 0  # what that writes in a day is worked out anew
        step_s = self._estimator.step_s
        assert step_s is not None
        before = "" if held is None else f"; before: {_steps(held)}"
        self._say(f"a base every {_steps(wanted)} ({wanted * step_s:.3g} s): {new.why}{before}")

    def _interval_min(self, step_s: float) -> int:
        """The fewest steps between bases that the write budget allows."""
        budget = self._options.budget.write_bytes_per_day
        if budget is None:
            return 1
        log = self._log_bytes_per_day(step_s) if self._logs_to_disk else 0.0
        return interval_steps_within(budget - log, self._base_bytes, step_s)

    def _interval_max(self) -> tuple[int | None, str]:
        """The most steps between bases: behind so many the log would ask for one itself; and what
        is full then."""
        recorder = self._recorder
        if recorder is None or not self._log_step_bytes:
            return None, ""
        found: list[tuple[int, str]] = []
        if self._options.method.apply != "replica":  # which needs no records behind it
            in_memory = recorder.rooms.bytes_max // 2 / self._memory_step_bytes
            found.append((max(1, int(in_memory)), "the memory of the log"))
        if self._limits.interval_bytes is not None and self._logs_to_disk:
            on_disk = self._limits.interval_bytes / self._log_step_bytes
            found.append((max(1, int(on_disk)), "the log's part of the disk"))
        return min(found, default=(None, ""))

    def _relieve_disk(self) -> None:
        """Asks for a base where the log on disk is as long as it may become between two."""
        recorder = self._recorder
        most = self._limits.interval_bytes
        if recorder is None or most is None or not self._logs_to_disk:
            return
        if recorder.stats.record_bytes - self._before_base > most - self._log_step_bytes:
            recorder.rooms.half_full = True

    def _tell_of_conflict(self, least: int, most: int, full: str) -> None:
        """Once: the log cannot wait for as long as the write budget wants."""
        step_s = self._estimator.step_s
        budget = self._options.budget.write_bytes_per_day
        if self._told or step_s is None or budget is None:
            return
        self._told = True
        log_bytes = 2 * math.ceil(self._memory_step_bytes * least * (1 + HYSTERESIS))
        host_bytes = self._limits.host_bytes_for(log_bytes) if "memory" in full else None
        more = "" if host_bytes is None else f"Budget(host_bytes={host_bytes}) or more, "
        day_bytes = math.ceil(self._base_bytes * DAY_S / (step_s * most))
        self._say(
            f"{budget_in_words(self._options)}: it allows a base every {_steps(least)}, but {full} "
            f"holds {_steps(most)}, and steps beyond would be lost without one: bases write "
            f"{decimal(day_bytes)} a day, more than the budget. {more}write_bytes_per_day="
            f"{day_bytes}, or a method without a log would keep it"
        )

    @property
    def _logs_to_disk(self) -> bool:
        return self._recorder is not None and self._recorder.disk.on

    @property
    def _log_step_bytes(self) -> float:
        """Of the records of a step, on average."""
        stats = None if self._recorder is None else self._recorder.stats
        return stats.record_bytes / stats.marks if stats is not None and stats.marks else 0.0

    @property
    def _memory_step_bytes(self) -> float:
        """What these take of host memory, on average."""
        assert self._recorder is not None
        return self._recorder.rooms.taken_bytes / max(1, self._recorder.stats.marks)

    def _log_bytes_per_day(self, step_s: float) -> float:
        return self._log_step_bytes * DAY_S / step_s

    # --- Bytes of a day -----------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Forecasts a day's bytes, once aloud, and keeps the log within the budget."""
        step_s = self._estimator.step_s
        every = self._options.every
        if step_s is None or (every.auto and self.interval_steps is None):
            return
        bases_s = every.seconds
        if self.interval_steps is not None:
            bases_s = self.interval_steps * step_s
        first = self.forecast is None
        bases_bytes = 0.0 if bases_s is None else self._base_bytes * DAY_S / bases_s
        bases_bytes /= self._options.method.disk_every
        log_bytes = self._log_bytes_per_day(step_s) if self._options.log_on_disk else 0.0
        self.forecast = Forecast(bases_bytes, log_bytes if self._logs_to_disk else 0.0)
        if first and self.forecast.total_bytes:
            self._say(
                f"a step takes {step_s:.3g} s: {self.forecast.in_words} a day to disk; "
                f"{budget_in_words(self._options)}"
            )
        self._keep_within(Forecast(bases_bytes, log_bytes))
        if not self._logs_to_disk:
            self.forecast = Forecast(bases_bytes, 0.0)

    def _keep_within(self, forecast: Forecast) -> None:
        """Stops the log on disk, or lets it go on, by what would be written with it."""
        budget = self._options.budget.write_bytes_per_day
        recorder = self._recorder
        if budget is None:
            return
        if forecast.bases_bytes > budget and not self._told:
            self._told = True
            how = ' (every="auto", or a longer interval, would keep it)'
            how = "" if self._options.every.auto else how
            self._say(f"bases alone write more a day than the budget; they are taken anyway{how}")
        if recorder is None or not self._options.log_on_disk:
            return
        if recorder.disk.on and forecast.total_bytes > budget:
            self._hold_log(f"{forecast.in_words} a day are more than the budget")
        elif not recorder.disk.on and self._has_room(forecast, budget) and recorder.disk.again():
            self._say("the budget has room again: from the next base on the log goes to disk")

    def _has_room(self, forecast: Forecast, budget: int) -> bool:
        """Clearly: what goes back and forth is of no use."""
        now_s = self._clock.monotonic_s()
        most = max(forecast.total_bytes, self._meter.last_day_bytes(now_s))
        return most <= (1 - HYSTERESIS) * budget

    def _meter_day(self, now_s: float) -> None:
        """What was written within a day counts, too, and not only what was foretold."""
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
        if recorder.disk.on and written + batch > budget:
            self._hold_log(
                f"{decimal(written)} were written within a day, and with the next segment, of "
                f"about {decimal(batch)}, it would be more"
            )

    def _hold_log(self, why: str) -> None:
        assert self._recorder is not None
        self._recorder.disk.stop()
        self._say(
            f"{budget_in_words(self._options)}: from now on the log stays in memory ({why}); a "
            "lost machine costs all steps behind the newest base"
        )

    def _tell_of_batch(self) -> None:
        """How much of the log goes to disk at a time, if the keeper chooses that and it differs."""
        if not self._options.batch_auto or not self._logs_to_disk:
            return
        steps = self._keepers.stats.log_batch_steps
        before = self._batch_steps
        if not steps or before / 2 < steps < before * 2:
            return
        self._batch_steps = steps
        step_s = self._estimator.step_s or 0.0
        took = f"{_steps(steps)} ({steps * step_s:.3g} s); before: {_steps(before)}"
        self._say(f"the log goes to disk every {took}")

    def _say(self, text: str) -> None:
        say(f"everstep: {self._run}: {text}")


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
