"""Plan the captures of every step from the steps themselves, follow the plan, and revise it.

The first captures issue everything at the step mark. When two steps have had the same sequence of
events, their times and the measured link make a plan (:mod:`everstep.plan.schedule.timeline`);
copies are then issued at the events it names. Unlike Checkflow (section III-B), which solves an ILP
over a known graph, plans follow from observed steps. A step that takes another course is captured
at once from the event where it strays; two such steps with the same events make a plan of their
own. Of several plans, the one is followed whose steps have mostly come after a step like the last
one. A plan is made again when training waits longer, or shorter, than it predicts. All of this runs
in the training thread, at step marks; results from the lane's thread are read there."""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import torch
from rich.filesize import decimal
from torch import nn

from everstep.capture.dispatch import Dispatch, Duplicates
from everstep.capture.lanes.lane import Lane
from everstep.capture.step_events import Observed, StepEvents
from everstep.plan.schedule.timeline import Leaving, StepPlan, plan_departures
from everstep.seams.stderr import print_line
from everstep.state.training_state import State
from everstep.trainer.base.prepared_base import PreparedBase
from everstep.trainer.schedule.bound_plan import (
    BoundPlan,
    CopySource,
    all_at_mark,
    allocate_duplicates,
    copy_sources,
    plan_units,
)
from everstep.trainer.schedule.stats import (
    ScheduleStats,
    TensorTimes,
    batch_times,
    link_bandwidth,
    tensor_times,
)

_PROGRAMS_MAX = 4  # sequences of events with a plan
_HISTORY = 16  # steps used to predict the next one's events
_TOLERANCE = 0.1  # of the predicted wait
_TOLERANCE_S = 2e-3
_WAITS = 64  # waits remembered
_LINK_SAMPLES = 5  # captures whose median bandwidth counts
_ANNOUNCED_MAX = 8  # plans that are announced


@dataclass(slots=True)
class _Programs:
    """Sequences of events that steps have had, and the plans made for them.

    Attributes:
        plans: plans by sequence of events.
        seen_once: steps without a plan, by sequence of events, newest last.
        recent: sequences of the latest steps, with which the next one's is predicted.
    """

    plans: dict[tuple[int, ...], BoundPlan] = field(default_factory=dict)
    seen_once: dict[tuple[int, ...], Observed] = field(default_factory=dict)
    recent: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def add(self, plan: BoundPlan) -> None:
        """Add a plan, in place of the oldest one if there are too many."""
        if len(self.plans) >= _PROGRAMS_MAX and plan.keys not in self.plans:
            del self.plans[next(iter(self.plans))]
        self.plans[plan.keys] = plan

    def note(self, observed: Observed) -> None:
        """Remember a step that has no plan."""
        self.seen_once[observed.keys] = observed
        if len(self.seen_once) > _PROGRAMS_MAX:
            del self.seen_once[next(iter(self.seen_once))]

    def predicted(self) -> BoundPlan | None:
        """Return the plan of the most likely sequence of events of the next step."""
        last = self.recent[-1]
        then = Counter(
            after
            for before, after in itertools.pairwise(list(self.recent))
            if before == last and after in self.plans
        )
        return self.plans.get(then.most_common(1)[0][0] if then else last)


@dataclass(slots=True)
class _Measured:
    """Measurements and counters of captures.

    Attributes:
        captures: number of captures.
        held_step: step of the newest complete capture; None before the first.
        plans: number of plans made.
        strayed_steps: number of steps that did not follow their plan's sequence of events.
        followed_steps: number of steps that did.
        links: bandwidths of the latest captures, in bytes per second.
        waited_s: waits of the latest steps under the same plan.
        tensors: computes the times of the newest complete capture, by entry.
    """

    captures: int = 0
    held_step: int | None = None
    plans: int = 0
    strayed_steps: int = 0
    followed_steps: int = 0
    links: deque[float] = field(default_factory=lambda: deque(maxlen=_LINK_SAMPLES))
    waited_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WAITS))
    tensors: Callable[[], Mapping[str, TensorTimes]] = dict

    @property
    def link_bytes_per_s(self) -> float | None:
        """Return the bandwidth; None before the first complete capture."""
        return statistics.median(self.links) if self.links else None


class Scheduler:
    """Plan and issue the captures of one Checkpointer.

    Args:
        run: run folder, for messages.
        state: state to capture.
        lane: makes the copies.

    Attributes:
        open: captures with copies that may be in progress.
    """

    def __init__(self, run: PurePath, state: State, lane: Lane) -> None:
        self._run = run
        self._state = state
        self._lane = lane
        self._pid = os.getpid()
        self._events = StepEvents(self._reached, self._strayed)
        self._prepared: PreparedBase | None = None
        self._tensors: Mapping[str, torch.Tensor] | None = None
        self._sources: tuple[CopySource, ...] = ()
        self._bound_plan = BoundPlan(())
        self._programs = _Programs()
        self._measured = _Measured()
        self._dispatch: Dispatch | None = None  # of the step in progress
        self.open: list[Dispatch] = []

    def end_step(self) -> None:
        """Issue the remaining copies of the last capture, and learn from the step that has
        ended."""
        observed = self._events.end()
        self.flush()
        self._dispatch = None
        if observed is not None:
            self._learn(observed)

    def flush(self) -> None:
        """Issue all remaining copies."""
        for dispatch in self.open:
            dispatch.flush()

    def dispatch(
        self,
        prepared: PreparedBase,
        tensors: Mapping[str, torch.Tensor],
        block: torch.Tensor,
        over: Callable[[], None],
    ) -> Dispatch:
        """Return the copies of a capture; nothing is copied before :meth:`begin`.

        Args:
            prepared: layout of the base.
            tensors: live tensors, by entry name.
            block: destination.
            over: called when all copies were issued.
        """
        self._follow(prepared, tensors)
        bound_plan = self._bound_plan
        return Dispatch(self._lane, block, bound_plan.units, bound_plan.duplicates, over)

    def begin(self, dispatch: Dispatch) -> None:
        """Follow the step from now on, and issue the copies planned for the step mark."""
        self._dispatch = dispatch
        # Older captures stay listed until they are complete, as the next update could tear them,
        # too.
        self.open = [*(older for older in self.open if not older.complete), dispatch]
        self._measured.captures += 1
        self._events.begin(self._bound_plan.keys, self._bound_plan.issuing_events)
        dispatch.reach(0)

    def gate(self, optimizer: str | None, timeout_s: float) -> tuple[float, list[Dispatch]]:
        """Block an update until it cannot tear any capture (I1; Checkflow, Eq. 8).

        Args:
            optimizer: key of the optimizer about to update; None if anything may be updated.
            timeout_s: timeout of each capture, in seconds.

        Returns:
            The time waited, in seconds, and the captures not copied within ``timeout_s``.
        """
        event = None if optimizer is None else self._events.update(optimizer)
        start_s = time.perf_counter()
        # A list, so that a late capture does not end the loop: the update could tear each of them.
        late = [one for one in self.open if not one.admit(optimizer, timeout_s)]
        wait_s = time.perf_counter() - start_s
        self._events.waited(event, wait_s)
        return wait_s, late

    def complete(self, dispatch: Dispatch, prepared: PreparedBase, step: int) -> None:
        """Note that a capture is complete and the keeper was notified; in the lane's thread."""
        batches = batch_times(dispatch)
        # The times of entries are computed in stats(): the next copies wait for this job.
        self._measured.tensors = functools.partial(tensor_times, prepared, batches)
        if (link := link_bandwidth(batches)) is not None:
            self._measured.links.append(link)
        self._measured.held_step = step

    def close(self) -> None:
        """Remove all hooks."""
        self._events.close()
        self._dispatch = None
        self.open = []

    def stats(self) -> ScheduleStats:
        """Return the current statistics."""
        plan = self._bound_plan.plan
        measured = self._measured
        duplicates = sum(p.duplicates.size_bytes for p in self._programs.plans.values())
        return ScheduleStats(
            captures=measured.captures,
            held_step=measured.held_step,
            plans=measured.plans,
            strayed_steps=measured.strayed_steps,
            followed_steps=measured.followed_steps,
            link_bytes_per_s=measured.link_bytes_per_s,
            needed_bytes_per_s=None if plan is None else plan.needed_bytes_per_s,
            step_s=None if plan is None else plan.step_s,
            predicted_wait_s=None if plan is None else plan.wait_s,
            waited_s=tuple(measured.waited_s),
            duplicated_bytes=duplicates,
            tensors=measured.tensors(),
        )

    # --- What the events bring ----------------------------------------------------------

    def _reached(self, event: int) -> None:
        dispatch = self._dispatch
        # A forked child inherits the hooks, but not the lane.
        if dispatch is not None and os.getpid() == self._pid:
            dispatch.reach(event)

    def _strayed(self) -> None:
        dispatch = self._dispatch
        if dispatch is not None and os.getpid() == self._pid:
            dispatch.flush()

    # --- Learning -----------------------------------------------------------------------

    def _learn(self, observed: Observed) -> None:
        bound_plan = self._bound_plan
        programs = self._programs
        keys = observed.keys
        programs.recent.append(keys)
        if bound_plan.plan is not None and keys == bound_plan.keys:
            self._compare(bound_plan, bound_plan.plan, observed)
        else:
            self._measured.strayed_steps += bound_plan.plan is not None
            before = programs.seen_once.pop(keys, None)
            if keys in programs.plans:
                pass  # it has a plan, but another one was predicted
            elif before is not None and self._measured.links:
                why = "steps also have another sequence of events" if programs.plans else ""
                self._make_plan([before, observed], why)
            else:
                programs.note(observed)
        self._bound_plan = programs.predicted() or self._bound_plan

    def _compare(self, bound_plan: BoundPlan, plan: StepPlan, observed: Observed) -> None:
        """Compare the waits of a step with the prediction; make the plan again after several
        misses."""
        self._measured.followed_steps += 1
        self._measured.waited_s.append(observed.wait_s)
        off_s = abs(observed.wait_s - plan.wait_s)
        if off_s <= max(_TOLERANCE * plan.wait_s, _TOLERANCE_S):
            bound_plan.misses = []
            return
        bound_plan.misses.append(observed)
        if len(bound_plan.misses) >= bound_plan.misses_max:
            waited_s = statistics.median(step.wait_s for step in bound_plan.misses)
            self._make_plan(bound_plan.misses, f"steps wait {waited_s * 1e3:.1f} ms for copies")
            # Waits that cannot be predicted must not cause a new plan again and again.
            self._programs.plans[bound_plan.keys].misses_max = 2 * bound_plan.misses_max

    def _make_plan(self, steps: Sequence[Observed], why: str) -> None:
        link = self._measured.link_bytes_per_s
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
        self._measured.waited_s.clear()
        plan = plan_departures(seconds, leaving, link)
        duplicates = Duplicates({})
        speed = float("inf")
        if plan.duplicated_bytes:
            units, sizes = plan_units(plan, self._sources)
            found = allocate_duplicates(sizes)
            if found is None:
                why = f"{why}; the device has no memory for duplicates".removeprefix("; ")
                plan = plan_departures(seconds, leaving, link, duplicates=False)
            else:
                duplicates, speed = found
                # The speed changes the predicted waits only; the slots allocated above still fit.
                plan = plan_departures(seconds, leaving, link, duplicate_bytes_per_s=speed)
        units, _ = plan_units(plan, self._sources)
        self._measured.plans += 1
        issuing_events = frozenset(unit.event for unit in units if unit.event)
        self._programs.add(
            BoundPlan(units, plan, last.keys, last.updates, duplicates, issuing_events)
        )
        self._announce(plan, why)

    def _announce(self, plan: StepPlan, why: str) -> None:
        if self._measured.plans > _ANNOUNCED_MAX:
            return
        because = f" ({why})" if why else ""
        waits = "no step waits for them"
        if plan.wait_s > _TOLERANCE_S:
            waits = (
                f"each step waits {plan.wait_s * 1e3:.1f} ms for them; a link of "
                f"{decimal(round(min(plan.needed_bytes_per_s, 1e18)))}/s would do"
            )
        print_line(
            f"everstep: {self._run}: plan {self._measured.plans} of captures{because}: a step of "
            f"{plan.step_s * 1e3:.1f} ms, copies at {decimal(round(plan.link_bytes_per_s))}/s, "
            f"{decimal(plan.duplicated_bytes)} duplicated; as predicted {waits}"
        )

    # --- Binding plans to tensors -------------------------------------------------------

    def _follow(self, prepared: PreparedBase, tensors: Mapping[str, torch.Tensor]) -> None:
        """Bind the plans to replaced tensors; drop the plans if the layout has changed."""
        if prepared is self._prepared and tensors is self._tensors:
            return
        if prepared is not self._prepared:
            roots = [value for value in self._state.values.values() if isinstance(value, nn.Module)]
            self._events.watch(roots, self._state.optimizers)
        before = self._sources
        self._sources = tuple(copy_sources(prepared, tensors))
        same = prepared is self._prepared and [source.place for source in before] == [
            source.place for source in self._sources
        ]
        self._prepared = prepared
        self._tensors = tensors
        for bound_plan in self._programs.plans.values() if same else ():
            assert bound_plan.plan is not None
            # Equal places: events, slots and ends stay valid, and only the tensors are replaced.
            bound_plan.units, _ = plan_units(bound_plan.plan, self._sources)
        if not same or self._bound_plan.plan is None:
            updates = self._bound_plan.updates
            self._programs = _Programs()
            self._bound_plan = BoundPlan(all_at_mark(self._sources, updates), updates=updates)


def _typical(steps: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each interval, scaled so that they add up to the median step.

    On a busy machine delays fall into different intervals, so the medians alone add up to less."""
    medians = [statistics.median(values) for values in zip(*steps, strict=True)]
    total_s = statistics.median(sum(step) for step in steps)
    sum_s = sum(medians)
    return [s * total_s / sum_s for s in medians] if sum_s else medians
