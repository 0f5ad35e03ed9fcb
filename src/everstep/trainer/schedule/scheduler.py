"""Plan the captures of every step from the steps themselves, follow the plan, and revise it.

The first captures issue everything at the step mark. When two steps have had the same sequence of
events, their times and the measured link make a plan (:mod:`everstep.plan.schedule.timeline`);
copies are then issued at the events it names. Unlike Checkflow (section III-B), which solves an ILP
over a known graph, plans follow from observed steps. A step that takes another course is captured
at once from the event where it strays; two such steps with the same events make a plan of their
own. Of several plans, the one is followed whose steps have mostly come after a step like the last
one. A plan is made again when training waits longer, or shorter, than it predicts. All of this runs
in the training thread, at step marks; results from the lane's thread are read there.

Capture plan bound to the tensors of a state: which copies are issued at which event of a
step.

Times of planned captures: when each copy ran, next to when it was planned.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal
from torch import nn

from everstep.capture import Batch, Dispatch, Lane, plan_batches
from everstep.capture.dispatch import Duplicates, Unit
from everstep.capture.step_events import Observed, StepEvents
from everstep.plan.schedule import Leaving, StepPlan, plan_departures
from everstep.seams.progress import log_or_print
from everstep.state.layout.shards import overlaps
from everstep.state.providers.modules import unwrap
from everstep.state.training_state import State
from everstep.trainer.base import PreparedBase
from everstep.trainer.schedule.given import GivenPlan


class TensorTimes(NamedTuple):
    """Times of the copy of an entry, in seconds after the step mark.

    Attributes:
        planned_start_s, planned_end_s: planned times; None without a plan.
        start_s, end_s: measured times.
        duplicated: True if some of it was copied from a duplicate.
    """

    planned_start_s: float | None
    planned_end_s: float | None
    start_s: float
    end_s: float
    duplicated: bool


BatchTimes = tuple[int, int, TensorTimes]
"""Range of a batch in the block, and its times."""


@dataclass(slots=True)
class ScheduleStats:
    """Statistics of plans and captures.

    Attributes:
        captures: number of captures.
        held_step: step of the newest complete capture; None before the first.
        plans: number of plans made.
        strayed_steps: number of steps that did not follow their plan's sequence of events.
        followed_steps: number of steps that did.
        link_bytes_per_s: measured bandwidth; None before the first complete capture.
        needed_bytes_per_s: bandwidth below which training waits under any plan (Checkflow, Eq. 9);
            None without a plan.
        step_s: duration of a step without waits; None without a plan.
        predicted_wait_s: time a step waits for copies by the plan; None without a plan.
        waited_s: measured waits of the latest steps under the same plan, oldest first.
        duplicated_bytes: device memory that duplicates take at most, between an update and the
            end of their copies.
        tensors: times of the newest complete capture, by entry.
        misfit: reason why the plan of ``Method(plan=)`` is not followed; None if it is.
    """

    captures: int = 0
    held_step: int | None = None
    plans: int = 0
    strayed_steps: int = 0
    followed_steps: int = 0
    link_bytes_per_s: float | None = None
    needed_bytes_per_s: float | None = None
    step_s: float | None = None
    predicted_wait_s: float | None = None
    waited_s: tuple[float, ...] = ()
    duplicated_bytes: int = 0
    tensors: Mapping[str, TensorTimes] = field(default_factory=dict)
    misfit: str | None = None


def batch_times(dispatch: Dispatch) -> list[BatchTimes]:
    """Return the times of each batch of a complete capture, without the memory that it filled."""
    found: list[BatchTimes] = []
    # Units run one after another on one queue.
    zero_s = start_s = dispatch.begun_s
    copies = [copy for copy in dispatch.copies if copy.arrived_s]
    for copy in sorted(copies, key=lambda copy: (copy.arrived_s[-1], copy.number)):
        assert copy.issued_s is not None
        # A unit begins when it is issued, or when the one before it on the queue has ended.
        start_s = max(start_s, copy.issued_s)
        unit = copy.unit
        arrived = copy.arrived_s
        for place, batch in enumerate(unit.batches):
            # A device may report progress less often than after each batch.
            end_s = arrived[place] if len(arrived) == len(unit.batches) else arrived[-1]
            planned: tuple[float | None, float | None] = (None, None)
            if unit.planned_s:
                planned = unit.planned_s[place]
            times = TensorTimes(*planned, start_s - zero_s, end_s - zero_s, unit.late)
            found.append((batch.begin, batch.end, times))
            start_s = end_s
    return found


def link_bandwidth(batches: Iterable[BatchTimes]) -> float | None:
    """Return bytes per second while copies were in progress; None if nothing was copied."""
    busy_s = size_bytes = 0.0
    for begin, end, times in batches:
        busy_s += times.end_s - times.start_s
        size_bytes += end - begin
    return size_bytes / busy_s if busy_s > 0 and size_bytes else None


def tensor_times(
    prepared: PreparedBase, batches: Iterable[BatchTimes]
) -> Mapping[str, TensorTimes]:
    """Return the first start and the last end of the copies of each entry, by name."""
    found: dict[str, TensorTimes] = {}
    for begin, end, times in batches:
        for layout, offset in prepared.layouts:
            placed = [place for place in layout.placed if place.end > place.begin]
            ends = [place.end for place in placed]
            for place, _, _ in overlaps(placed, ends, begin - offset, end - begin):
                before = found.get(place.entry.name, times)
                found[place.entry.name] = _merge_times(before, times)
    return found


def _merge_times(one: TensorTimes, other: TensorTimes) -> TensorTimes:
    starts = [s for s in (one.planned_start_s, other.planned_start_s) if s is not None]
    ends = [s for s in (one.planned_end_s, other.planned_end_s) if s is not None]
    return TensorTimes(
        min(starts, default=None),
        max(ends, default=None),
        min(one.start_s, other.start_s),
        max(one.end_s, other.end_s),
        one.duplicated or other.duplicated,
    )


_MISSES_MAX = 4
_PROBE_BYTES_MAX = 64 << 20


class CopySource(NamedTuple):
    """Copy that is made in one piece unless the plan cuts it."""

    owner: str
    batch: Batch

    @property
    def divisible(self) -> bool:
        """Return True if the plan may cut this copy into chunks."""
        return self.batch.rearranged is None and len(self.batch.sources) == 1

    @property
    def place(self) -> tuple[str, int, int, bool]:
        """Return owner, byte range in the block, and divisibility; equal places can be rebound."""
        return self.owner, self.batch.begin, self.batch.end, self.divisible


@dataclass(slots=True)
class BoundPlan:
    """Plan of a step, bound to tensors.

    Attributes:
        units: copies issued together, in order.
        plan: the plan; None while the first steps are observed.
        keys: sequence of events of the steps it is for.
        updates: index of the event at which each optimizer, by key, updates first.
        duplicates: duplicates made under it (Checkflow's snapshots).
        issuing_events: indices of the events at which units are issued.
        misses: latest consecutive steps that did not wait as predicted.
        misses_max: number of misses after which the plan is made again.
    """

    units: tuple[Unit, ...]
    plan: StepPlan | None = None
    keys: tuple[int, ...] = ()
    updates: Mapping[str, int] = field(default_factory=dict)
    duplicates: Duplicates = field(default_factory=Duplicates)
    issuing_events: frozenset[int] = frozenset()
    misses: list[Observed] = field(default_factory=list)
    misses_max: int = _MISSES_MAX


def copy_sources(
    prepared: PreparedBase, tensors: Mapping[str, torch.Tensor]
) -> Iterator[CopySource]:
    """Yield the copies that may run after the step mark, separately for each optimizer."""
    owners: dict[str, set[str]] = {}
    for name in prepared.gated:
        owner = prepared.shape.owners[name].optimizer or ""
        owners.setdefault(owner, set()).add(name)
    for owner, names in owners.items():
        for layout, offset in prepared.layouts:
            for batch in plan_batches(layout, tensors, names, offset=offset):
                yield CopySource(owner, batch)


def all_at_mark(sources: Sequence[CopySource], updates: Mapping[str, int]) -> tuple[Unit, ...]:
    """Return units that issue everything at the step mark, the earliest known update first."""
    by_owner: dict[str, list[Batch]] = {}
    for source in sources:
        by_owner.setdefault(source.owner, []).append(source.batch)
    # Larger than any event: entries whose update was not observed go last.
    last = len(by_owner) + max(updates.values(), default=0)
    order = sorted(by_owner, key=lambda owner: updates.get(owner, last))
    return tuple(Unit(0, owner, tuple(by_owner[owner])) for owner in order)


class _Together(NamedTuple):
    """Copies with the same values that follow each other are one unit."""

    event: int
    owner: str
    late: bool
    device: torch.device


def plan_units(plan: StepPlan, sources: Sequence[CopySource]) -> tuple[Unit, ...]:
    """Return the copies of a plan."""
    groups: list[tuple[_Together, list[tuple[Batch, tuple[float, float]]]]] = []
    for departure in plan.departures:
        source = sources[departure.chunk.item]
        key = _Together(
            departure.event, source.owner, departure.duplicated, source.batch.first.device
        )
        if not groups or groups[-1][0] != key:
            groups.append((key, []))
        batch = _cut(source.batch, departure.chunk.begin, departure.chunk.end)
        groups[-1][1].append((batch, (departure.start_s, departure.end_s)))
    units = []
    for key, found in groups:
        # In file order: Dispatch.admit() takes the end of the last batch as the end of the unit.
        found.sort(key=lambda pair: pair[0].begin)
        batches = tuple(batch for batch, _ in found)
        planned_s = tuple(times for _, times in found)
        units.append(Unit(key.event, key.owner, batches, key.late, planned_s))
    return tuple(units)


def _cut(batch: Batch, begin: int, end: int) -> Batch:
    if begin == 0 and end == batch.end - batch.begin:
        return batch
    return Batch(batch.begin + begin, batch.begin + end, (batch.sources[0][begin:end],))


def duplicate_speed(plan: StepPlan, sources: Sequence[CopySource]) -> float:
    """Return the speed, in bytes per second, at which duplicates hold up the training thread.

    Infinite on devices, which make them without the host.
    """
    devices = {
        sources[departure.chunk.item].batch.first.device.type
        for departure in plan.departures
        if departure.duplicated
    }
    if "cpu" not in devices:
        return float("inf")
    size_bytes = min(plan.duplicated_bytes, _PROBE_BYTES_MAX)
    source = torch.zeros(size_bytes, dtype=torch.uint8)
    start_s = time.perf_counter()
    torch.empty_like(source).copy_(source)
    return size_bytes / max(1e-9, time.perf_counter() - start_s)


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
        counts: counters, and the step of the newest complete capture.
        links: bandwidths of the latest captures, in bytes per second.
        waited_s: waits of the latest steps under the same plan.
        tensors: computes the times of the newest complete capture, by entry.
    """

    counts: ScheduleStats = field(default_factory=ScheduleStats)
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
        given: plan to follow; None: plans are made from the steps.

    Attributes:
        open: captures with copies that may be in progress.
    """

    def __init__(
        self, run: PurePath, state: State, lane: Lane, given: GivenPlan | None = None
    ) -> None:
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
        self._short = False  # a device had no memory for duplicates
        self._given = given
        self.open: list[Dispatch] = []

    def end_step(self) -> None:
        """Issue the remaining copies of the last capture, and learn from the step that has
        ended."""
        keys, known = self._events.end()
        self.flush()
        self._dispatch = None
        if keys:
            self._follow_next(keys)
        for observed in known:
            self._learn(observed)
        if keys:
            plans = self._programs.plans
            current = plans.get(self._bound_plan.keys, self._bound_plan)
            self._bound_plan = self._programs.predicted() or current

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
        self._measured.counts.captures += 1
        bound_plan = self._bound_plan
        # On a device each event costs microseconds: none are needed while steps go as planned.
        recent = self._programs.recent
        strayed = bool(recent) and recent[-1] not in self._programs.plans
        timed = bound_plan.plan is None or bool(bound_plan.misses) or strayed
        self._events.begin(bound_plan.keys, bound_plan.issuing_events, timed=timed)
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
        waited = self._events.waiting(event)
        start_s = time.perf_counter()
        # A list, so that a late capture does not end the loop: the update could tear each of them.
        late = [one for one in self.open if not one.admit(optimizer, timeout_s)]
        wait_s = time.perf_counter() - start_s
        waited()
        return wait_s, late

    def complete(self, dispatch: Dispatch, prepared: PreparedBase, step: int) -> None:
        """Note that a capture is complete and the keeper was notified; in the lane's thread."""
        batches = batch_times(dispatch)
        # The times of entries are computed in stats(): the next copies wait for this job.
        self._measured.tensors = functools.partial(tensor_times, prepared, batches)
        if (link := link_bandwidth(batches)) is not None:
            self._measured.links.append(link)
        self._measured.counts.held_step = step

    def close(self) -> None:
        """Remove all hooks."""
        self._events.close()
        self._dispatch = None
        self.open = []

    def stats(self) -> ScheduleStats:
        """Return the current statistics."""
        plan = self._bound_plan.plan
        measured = self._measured
        bound_plans = self._programs.plans.values()
        return replace(
            measured.counts,
            link_bytes_per_s=measured.link_bytes_per_s,
            needed_bytes_per_s=None if plan is None else plan.needed_bytes_per_s,
            step_s=None if plan is None else plan.step_s,
            predicted_wait_s=None if plan is None else plan.wait_s,
            waited_s=tuple(measured.waited_s),
            duplicated_bytes=max(
                (one.plan.duplicated_bytes for one in bound_plans if one.plan is not None),
                default=0,
            ),
            tensors=measured.tensors(),
            misfit=None if self._given is None else self._given.misfit,
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

    def _follow_next(self, keys: tuple[int, ...]) -> None:
        """Remember the events of the step that has ended."""
        plan = self._bound_plan
        self._programs.recent.append(keys)
        if plan.plan is not None and keys != plan.keys:
            self._measured.counts.strayed_steps += 1

    def _learn(self, observed: Observed) -> None:
        """Learn from a step whose times have become known."""
        programs = self._programs
        keys = observed.keys
        bound_plan = programs.plans.get(keys)
        if bound_plan is not None and bound_plan.plan is not None:
            if observed.followed:  # or another plan was predicted
                self._compare(bound_plan, bound_plan.plan, observed)
            return
        if not observed.seconds:
            return  # the next such step is timed
        before = programs.seen_once.pop(keys, None)
        if self._given is not None and not self._given.fits:
            before = before or observed  # its copies are known: one step is enough
        if before is not None and self._measured.links:
            why = "steps also have another sequence of events" if programs.plans else ""
            self._make_plan([before, observed], why)
        else:
            programs.note(observed)

    def _compare(self, bound_plan: BoundPlan, plan: StepPlan, observed: Observed) -> None:
        """Compare the waits of a step with the prediction; make the plan again after several
        misses."""
        self._measured.counts.followed_steps += 1
        self._measured.waited_s.append(observed.wait_s)
        short = bound_plan.duplicates.short and plan.duplicated_bytes > 0
        self._short = self._short or short
        off_s = abs(observed.wait_s - plan.wait_s)
        if not short and off_s <= max(_TOLERANCE * plan.wait_s, _TOLERANCE_S):
            bound_plan.misses = []
            return
        bound_plan.misses.append(observed)
        timed = [step for step in bound_plan.misses if step.seconds]
        if timed and (short or len(bound_plan.misses) >= bound_plan.misses_max):
            waited_s = statistics.median(step.wait_s for step in bound_plan.misses)
            self._make_plan(timed, f"steps wait {waited_s * 1e3:.1f} ms for copies")
            # Waits that cannot be predicted must not cause a new plan again and again.
            self._programs.plans[bound_plan.keys].misses_max = 2 * bound_plan.misses_max

    def _make_plan(self, steps: Sequence[Observed], why: str) -> None:
        link = self._measured.link_bytes_per_s
        assert link is not None
        last = steps[-1]
        seconds = tuple(_typical([step.seconds for step in steps]))
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
        plan_step = functools.partial(
            self._plan_step, replace(last, seconds=seconds), leaving, link
        )
        plan = plan_step()
        if self._short:
            why = f"{why}; the device has no memory for duplicates".removeprefix("; ")
            plan = plan_step(duplicates=False)
        elif plan.duplicated_bytes:
            # The speed changes the predicted waits only.
            speed = duplicate_speed(plan, self._sources)
            plan = plan_step(duplicate_bytes_per_s=speed)
        units = plan_units(plan, self._sources)
        self._measured.counts.plans += 1
        issuing_events = frozenset(unit.event for unit in units if unit.event)
        self._programs.add(
            BoundPlan(units, plan, last.keys, last.updates, Duplicates(), issuing_events)
        )
        self._announce(plan, why)

    def _plan_step(
        self, step: Observed, leaving: Sequence[Leaving], link: float, **options: Any
    ) -> StepPlan:
        """Return the plan of a step: the given one if it fits, else one made from its times."""
        given = self._given
        if given is not None:
            assert self._prepared is not None
            told = given.misfit
            ranges = [(source.batch.begin, source.batch.end) for source in self._sources]
            events = self._events.names_of(step)
            plan = given.bind(self._prepared, ranges, leaving, step, events, link, **options)
            if plan is not None:
                return plan
            if told is None and given.misfit is not None:
                log_or_print(
                    f"{self._run}: a step does not fit {given.path}, such steps are planned from "
                    f"themselves: {given.misfit}"
                )
        return plan_departures(step.seconds, leaving, link, **options)

    def _announce(self, plan: StepPlan, why: str) -> None:
        plans = self._measured.counts.plans
        if plans > _ANNOUNCED_MAX:
            return
        given = self._given
        if given is not None and given.bound:
            why = f"from {given.path}; {why}".removesuffix("; ")
        because = f" ({why})" if why else ""
        waits = "no step waits for them"
        if plan.wait_s > _TOLERANCE_S:
            waits = (
                f"each step waits {plan.wait_s * 1e3:.1f} ms for them; a link of "
                f"{decimal(round(min(plan.needed_bytes_per_s, 1e18)))}/s would do"
            )
        log_or_print(
            f"{self._run}: plan {plans} of captures{because}: a step of "
            f"{plan.step_s * 1e3:.1f} ms, copies at {decimal(round(plan.link_bytes_per_s))}/s, "
            f"{decimal(plan.duplicated_bytes)} duplicated; as predicted {waits}"
        )

    # --- Binding plans to tensors -------------------------------------------------------

    def _follow(self, prepared: PreparedBase, tensors: Mapping[str, torch.Tensor]) -> None:
        """Bind the plans to replaced tensors; drop the plans if the layout has changed."""
        if prepared is self._prepared and tensors is self._tensors:
            return
        if prepared is not self._prepared:
            values = self._state.values.items()
            roots = {key: unwrap(value) for key, value in values if isinstance(value, nn.Module)}
            self._events.watch(roots, self._state.optimizers)
        before = self._sources
        self._sources = tuple(copy_sources(prepared, tensors))
        same = prepared is self._prepared and [source.place for source in before] == [
            source.place for source in self._sources
        ]
        self._prepared = prepared
        self._tensors = tensors
        # The plan in use may have been replaced among the programs meanwhile.
        for bound_plan in (self._bound_plan, *self._programs.plans.values()) if same else ():
            if bound_plan.plan is not None:
                # Equal places: events and ends stay valid, and only the tensors are replaced.
                bound_plan.units = plan_units(bound_plan.plan, self._sources)
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
