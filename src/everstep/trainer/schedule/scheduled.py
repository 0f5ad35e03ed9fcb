"""Captures of every step by a plan: learnt from the steps themselves, kept to, made anew.

The first captures are lazy: everything is issued at the step mark. When two steps have had the same
events, their times and the link that was measured make a plan
(:mod:`everstep.plan.schedule.timeline`), and
from then on copies are issued where it says. A step that goes another way is captured lazily from
where it strays; two that go the same other way make a plan of their own, and of several plans the
one is followed whose steps have mostly come behind a step like the last one. A plan is made anew
when training waits longer, or shorter, than it predicts. All of it happens in the training thread,
at step marks; what the lane's thread reports is read there.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

import torch
from rich.filesize import decimal
from torch import nn

from everstep.capture.events import Observed, StepEvents
from everstep.capture.lanes.lane import Lane
from everstep.capture.scheduled import Dispatch, Duplicates
from everstep.plan.schedule.timeline import Leaving, StepPlan, plan_departures
from everstep.seams.messages import say
from everstep.state.training_state import State
from everstep.trainer.base.prepared import Prepared
from everstep.trainer.schedule.program import (
    Program,
    Source,
    lazily,
    memory_of,
    sources_of,
    units_of,
)
from everstep.trainer.schedule.schedule_stats import Executed, ScheduleStats, link_of, tensor_times

__all__ = ["Scheduler"]

_ALIKE = 2  # steps that make a plan
_WAYS = 4  # in which steps may go, with a plan each
_HISTORY = 16  # steps from which the next one's way is foretold
_CLOSE = 0.1  # of the prediction, or
_CLOSE_S = 2e-3
_LINKS = 5  # captures whose median is the link
_SAID_MAX = 8  # plans that are announced


class _Planned(Dispatch):
    """A capture, and what it goes by."""

    program: Program
    prepared: Prepared


class Scheduler:
    """Plans the captures of one Checkpointer.

    Args:
        run: the run folder; for messages.
    """

    def __init__(self, run: PurePath, state: State, lane: Lane) -> None:
        self._run = run
        self._state = state
        self._lane = lane
        self._pid = os.getpid()
        self._events = StepEvents(self._reached, self._strayed)
        self._prepared: Prepared | None = None
        self._tensors: Mapping[str, torch.Tensor] | None = None
        self._sources: tuple[Source, ...] = ()
        self._program = Program(())
        self._programs: dict[tuple[int, ...], Program] = {}  # by sequence of events
        self._seen: dict[tuple[int, ...], Observed] = {}  # likewise, once, newest last
        self._ways: deque[tuple[int, ...]] = deque(maxlen=_HISTORY)
        self._links: deque[float] = deque(maxlen=_LINKS)
        self._waited_s: deque[float] = deque(maxlen=64)
        self._dispatch: Dispatch | None = None  # of the step that is followed
        self._open: list[Dispatch] = []  # whose copies may still be under way
        self._whole: Executed | None = None
        self._plans = self._strays = self._followed = 0
        self.captures = 0
        self.held_step: int | None = None

    def ended(self) -> None:
        """A step mark, before anything is captured: what is left of the capture before is issued,
        and what the step has shown is learnt."""
        observed = self._events.end()
        self.flush()
        self._dispatch = None
        if observed is not None:
            self._learn(observed)

    def flush(self) -> None:
        """Everything that is left is issued."""
        for dispatch in self._open:
            dispatch.flush()

    def dispatch(
        self,
        prepared: Prepared,
        tensors: Mapping[str, torch.Tensor],
        block: torch.Tensor,
        over: Callable[[], None],
    ) -> Dispatch:
        """The copies of a capture; they begin with :meth:`begin`.

        Args:
            over: called when all of them were issued.
        """
        self._follow(prepared, tensors)
        program = self._program
        dispatch = _Planned(self._lane, block, program.units, program.duplicates, over)
        dispatch.program = program
        dispatch.prepared = prepared
        self._dispatch = dispatch
        self._open = [*(older for older in self._open if not older.complete), dispatch]
        self.captures += 1
        return dispatch

    def begin(self, dispatch: Dispatch) -> None:
        """The step mark is over: from now on the step is followed."""
        self._events.begin(self._program.keys, self._program.asked)
        dispatch.reach(0)

    def gate(self, optimizer: str | None, timeout_s: float) -> tuple[float, list[Dispatch]]:
        """Holds an update back until it can tear nothing (I1).

        Args:
            optimizer: key of the optimizer that updates; None: anything may be updated.

        Returns:
            For how many seconds, and the captures that were not copied after ``timeout_s``.
        """
        event = None if optimizer is None else self._events.update(optimizer)
        start_s = time.perf_counter()
        late = [one for one in self._open if not one.admit(optimizer, timeout_s)]
        wait_s = time.perf_counter() - start_s
        self._events.waited(event, wait_s)
        return wait_s, late

    def whole(self, dispatch: Dispatch, step: int) -> None:
        """In the lane's thread: all of a capture has arrived, and its keeper knows."""
        assert isinstance(dispatch, _Planned)
        self._whole = executed = Executed.of(dispatch, dispatch.program, dispatch.prepared)
        if (link := link_of(executed)) is not None:
            self._links.append(link)
        self.held_step = step

    def close(self) -> None:
        """Takes all hooks away."""
        self._events.close()
        self._dispatch = None
        self._open = []

    def stats(self) -> ScheduleStats:
        """What became of the plans."""
        plan = self._program.plan
        duplicates = sum(p.duplicates.size_bytes for p in self._programs.values())
        return ScheduleStats(
            captures=self.captures,
            held_step=self.held_step,
            plans=self._plans,
            strayed_steps=self._strays,
            followed_steps=self._followed,
            link_bytes_per_s=self._link,
            needed_bytes_per_s=None if plan is None else plan.needed_bytes_per_s,
            step_s=None if plan is None else plan.step_s,
            predicted_wait_s=None if plan is None else plan.wait_s,
            waited_s=tuple(self._waited_s),
            duplicated_bytes=duplicates,
            tensors={} if self._whole is None else tensor_times(self._whole),
        )

    # --- What the events bring ----------------------------------------------------------

    def _reached(self, event: int) -> None:
        dispatch = self._dispatch
        if dispatch is not None and os.getpid() == self._pid:
            dispatch.reach(event)

    def _strayed(self) -> None:
        dispatch = self._dispatch
        if dispatch is not None and os.getpid() == self._pid:
            dispatch.flush()

    # --- Learning -----------------------------------------------------------------------

    def _learn(self, observed: Observed) -> None:
        program = self._program
        keys = observed.keys
        self._ways.append(keys)
        if program.plan is not None and keys == program.keys:
            self._check(program, program.plan, observed)
        else:
            self._strays += program.plan is not None
            before = self._seen.pop(keys, None)
            if keys in self._programs:
                pass  # only not the one that was foretold
            elif before is not None and self._link is not None:
                why = "steps go another way, too" if self._programs else ""
                self._plan([before, observed], why)
            else:
                self._seen[keys] = observed
                if len(self._seen) > _WAYS:
                    del self._seen[next(iter(self._seen))]
        self._program = self._programs.get(self._foretold(), self._program)

    def _foretold(self) -> tuple[int, ...]:
        """The way that the next step will mostly go, of those with a plan."""
        last = self._ways[-1]
        ways = list(self._ways)
        then = Counter(
            after
            for before, after in itertools.pairwise(ways)
            if before == last and after in self._programs
        )
        return then.most_common(1)[0][0] if then else last

    def _check(self, program: Program, plan: StepPlan, observed: Observed) -> None:
        """Whether training waits as predicted."""
        self._followed += 1
        self._waited_s.append(observed.wait_s)
        off_s = abs(observed.wait_s - plan.wait_s)
        if off_s <= max(_CLOSE * plan.wait_s, _CLOSE_S):
            program.off = []
            return
        program.off.append(observed)
        if len(program.off) >= program.off_max:
            waited_s = statistics.median(step.wait_s for step in program.off)
            self._plan(program.off, f"steps wait {waited_s * 1e3:.1f} ms for copies")
            # What cannot be predicted is not planned again and again.
            self._programs[program.keys].off_max = 2 * program.off_max

    @property
    def _link(self) -> float | None:
        return statistics.median(self._links) if self._links else None

    def _plan(self, steps: Sequence[Observed], why: str) -> None:
        link = self._link
        assert link is not None
        last = steps[-1]
        seconds = _typical([step.seconds for step in steps])
        events = len(last.keys)
        leaving = [
            Leaving(
                source.batch.end - source.batch.begin,
                last.updates.get(source.owner, events),
                source.divisible,
            )
            for source in self._sources
        ]
        self._waited_s.clear()
        plan = plan_departures(seconds, leaving, link)
        duplicates = Duplicates({})
        speed = float("inf")
        if plan.duplicated_bytes:
            units, _, sizes = units_of(plan, self._sources)
            found = memory_of(sizes)
            if found is None:
                why = f"{why}; no memory for duplicates on the device".removeprefix("; ")
                plan = plan_departures(seconds, leaving, link, duplicates=False)
            else:
                duplicates, speed = found
                plan = plan_departures(seconds, leaving, link, duplicate_bytes_per_s=speed)
        units, planned_s, _ = units_of(plan, self._sources)
        self._plans += 1
        asked = frozenset(unit.event for unit in units if unit.event)
        if len(self._programs) >= _WAYS and last.keys not in self._programs:
            del self._programs[next(iter(self._programs))]
        self._programs[last.keys] = Program(
            units, plan, last.keys, last.updates, planned_s, duplicates, asked
        )
        self._say(plan, why)

    def _say(self, plan: StepPlan, why: str) -> None:
        if self._plans > _SAID_MAX:
            return
        because = f" ({why})" if why else ""
        waits = "no step waits for them"
        if plan.wait_s > _CLOSE_S:
            waits = (
                f"each step waits {plan.wait_s * 1e3:.1f} ms for them; a link of "
                f"{decimal(round(min(plan.needed_bytes_per_s, 1e18)))}/s would do"
            )
        say(
            f"everstep: {self._run}: plan {self._plans} of captures{because}: a step of "
            f"{plan.step_s * 1e3:.1f} ms, copies at {decimal(round(plan.link_bytes_per_s))}/s, "
            f"{decimal(plan.duplicated_bytes)} duplicated; as predicted {waits}"
        )

    # --- Binding plans to tensors -------------------------------------------------------

    def _follow(self, prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> None:
        """Binds the plan to tensors that were replaced; drops it where that cannot be."""
        if prepared is self._prepared and tensors is self._tensors:
            return
        if prepared is not self._prepared:
            roots = [value for value in self._state.values.values() if isinstance(value, nn.Module)]
            self._events.watch(roots, self._state.optimizers)
        before = self._sources
        self._sources = tuple(sources_of(prepared, tensors))
        same = prepared is self._prepared and [source.place for source in before] == [
            source.place for source in self._sources
        ]
        self._prepared = prepared
        self._tensors = tensors
        for program in self._programs.values() if same else ():
            assert program.plan is not None
            program.units, program.planned_s, _ = units_of(program.plan, self._sources)
        if not same or self._program.plan is None:
            updates = self._program.updates
            self._programs = {}
            self._seen = {}
            self._ways.clear()
            self._program = Program(lazily(self._sources, updates), updates=updates)


def _typical(steps: Sequence[Sequence[float]]) -> list[float]:
    """Each interval's median, stretched to the median of whole steps: where a machine is busy, now
    here and now there, the medians alone add up to less."""
    medians = [statistics.median(values) for values in zip(*steps, strict=True)]
    total_s = statistics.median(sum(step) for step in steps)
    sum_s = sum(medians)
    return [s * total_s / sum_s for s in medians] if sum_s else medians
