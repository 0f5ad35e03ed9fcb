"""Status of a run from its events: pace, stalls, and what each failure would cost now.

Used by ``everstep watch`` and ``everstep report``. Pure: it is given events, and reads no clock and
no file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.events import Event
from everstep.tiers.options import PEER

DISK = "disk"
MEMORY = "memory"

_NEAREST = (MEMORY, DISK, PEER)
_PACE_S = 60.0  # the pace is that of this time
_ERRORS = ("failure", "base_failed", "notice", "replica_stopped")
KEPT_S = 600.0
"""Time that a keeper keeps its memory after its trainer is gone (``KeeperOptions.linger_s``)."""
_MESSAGES_MAX = 200  # errors and recoveries that are kept of each rank

FAILURES: Mapping[str, str] = {
    "process": "the training process dies",
    "machine": "the machine dies, not its disk",
    "node": "a node dies with its disk",
    "rack": "a rack dies with its disks",
}
"""Failures, from the mildest to the worst."""
_ORDER = tuple(FAILURES)

Survival = Callable[[str], str]
"""Return the worst failure (of :data:`FAILURES`) that a place, by its name, survives."""


def survival(of_places: Survival, run: str) -> Survival:
    """Return the worst failure that each place survives, the run folder and memory included.

    Args:
        of_places: the same for places for copies, and for the run folder by its path.
        run: path of the run folder.
    """

    def worst(place: str) -> str:
        if place == DISK:
            return of_places(run)
        return {MEMORY: "process", PEER: "node"}.get(place) or of_places(place)

    return worst


@dataclass(frozen=True, slots=True)
class Loss:
    """Cost of a failure now.

    Attributes:
        failure: one of :data:`FAILURES`.
        place: where the state would come from; None if nothing survives.
        step: step that training would continue from.
        lost_steps: finished steps that would be trained again.
        lost_s: training time of these; None if the pace is unknown.
    """

    failure: str
    place: str | None
    step: int
    lost_steps: int
    lost_s: float | None


@dataclass(slots=True)
class RankStatus:
    """Newest events of one rank.

    Attributes:
        progress: events of progress of the last minute, at least two if there were any.
        messages: last failures, notices and recoveries.
        timeline: newest timeline; events of older ones do not count.
    """

    started: Event | None = None
    last: Event | None = None
    progress: deque[Event] = field(default_factory=deque)
    messages: deque[Event] = field(default_factory=lambda: deque(maxlen=_MESSAGES_MAX))
    recovery: Event | None = None
    timeline: int = 0
    keepers_lost: int = 0

    def add(self, event: Event) -> None:
        """Add the next event."""
        if 0 < event.timeline < self.timeline:
            return
        self.timeline = max(self.timeline, event.timeline)
        self.last = event
        if event.kind == "started":
            self.started = event
            self.progress.clear()
        elif event.kind == "progress":
            self.progress.append(event)
            while len(self.progress) > 2 and event.unix_s - self.progress[1].unix_s >= _PACE_S:
                self.progress.popleft()
        elif event.kind == "recovery":
            self.recovery = event
            self.progress.clear()
            self.messages.append(event)
        elif event.kind in _ERRORS:
            self.messages.append(event)
        elif event.kind == "keeper" and event.details.get("lost"):
            self.keepers_lost += 1
            self.messages.append(event)

    @property
    def step(self) -> int:
        """Newest step that is known."""
        newest = self.progress[-1] if self.progress else self.recovery
        return 0 if newest is None else newest.step

    @property
    def figures(self) -> Mapping[str, Any]:
        """Figures of the last progress; empty before the first."""
        return self.progress[-1].details if self.progress else {}

    def rate_of(self, name: str) -> float | None:
        """Return the change of a counter per second in the last minute; None if unknown."""
        first, last = self._span()
        if first is None or last is None:
            return None
        seconds = last.unix_s - first.unix_s
        before = first.details.get(name)
        after = last.details.get(name)
        if seconds <= 0 or before is None or after is None:
            return None
        return float(after - before) / seconds

    @property
    def step_s(self) -> float | None:
        """Seconds of a step in the last minute, with stalls; None if unknown."""
        first, last = self._span()
        if first is None or last is None or last.step <= first.step:
            return self.figures.get("step_s")
        return (last.unix_s - first.unix_s) / (last.step - first.step)

    @property
    def stalled(self) -> dict[str, float]:
        """Share of the last minute that training was delayed, by cause."""
        first, last = self._span()
        if first is None or last is None or last.unix_s <= first.unix_s:
            return {}
        before = first.details.get("stall_s", {})
        after = last.details.get("stall_s", {})
        seconds = last.unix_s - first.unix_s
        return {name: (value - before.get(name, 0.0)) / seconds for name, value in after.items()}

    @property
    def steps_by_place(self) -> dict[str, int]:
        """Newest step that can be restored from each place."""
        figures = self.figures
        in_memory = figures.get("recoverable_step")
        on_disk = figures.get("durable_step")
        known = {DISK: on_disk, **figures.get("recoverable_from", {})}
        # Without a keeper process, or without steps beyond the disk, this is the disk's.
        if in_memory is not None and (on_disk is None or in_memory > on_disk):
            known[MEMORY] = in_memory
        return {place: step for place, step in known.items() if step is not None}

    def _span(self) -> tuple[Event | None, Event | None]:
        if len(self.progress) < 2:
            return None, None
        return self.progress[0], self.progress[-1]


def _common_steps(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the newest step that every rank can restore from each place."""
    places = set.intersection(*map(set, ranks))
    steps = {place: min(one[place] for one in ranks) for place in places}
    # One rank's memory is as good as another one's disk, if only processes die.
    in_memory = min(max(one.get(MEMORY, -1), one.get(DISK, -1)) for one in ranks)
    if in_memory > steps.get(DISK, -1):
        steps[MEMORY] = in_memory
    return steps


def _distance(place: str) -> tuple[int, str]:
    near = _NEAREST.index(place) if place in _NEAREST else len(_NEAREST)
    return near, place


class RunStatus:
    """Status of all ranks of a run.

    Attributes:
        ranks: status by rank, of the ranks of the newest start.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.ranks: dict[int, RankStatus] = {}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Add the next event of some rank."""
        self.ranks.setdefault(event.rank, RankStatus()).add(event)

    @property
    def active(self) -> list[RankStatus]:
        """Ranks of the newest timeline: a job may continue with fewer."""
        return [one for one in self.ranks.values() if one.timeline == self.timeline]

    @property
    def timeline(self) -> int:
        """Newest timeline."""
        return max((one.timeline for one in self.ranks.values()), default=0)

    @property
    def world(self) -> int:
        """Number of ranks of the newest start."""
        started = [one.started for one in self.active if one.started is not None]
        return max((int(event.details.get("world", 1)) for event in started), default=1)

    @property
    def silent_ranks(self) -> int:
        """Number of ranks of the newest start without progress yet."""
        return max(0, self.world - sum(bool(one.progress) for one in self.active))

    @property
    def step(self) -> int:
        """Newest step that all ranks have ended."""
        return min((one.step for one in self.active), default=0)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, of the slowest rank."""
        return max((one.step_s for one in self.active if one.step_s is not None), default=None)

    @property
    def stalled(self) -> dict[str, float]:
        """Largest share of any rank that training was delayed, by cause."""
        found: dict[str, float] = {}
        for one in self.active:
            for cause, share in one.stalled.items():
                found[cause] = max(found.get(cause, 0.0), share)
        return found

    def rate_of(self, name: str) -> float | None:
        """Return the change of a counter per second, of all ranks together; None if unknown."""
        rates = [one.rate_of(name) for one in self.active]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    def total_of(self, name: str) -> float | None:
        """Return the sum of a figure over the ranks; None if no rank has it."""
        known = [value for one in self.active if (value := one.figures.get(name)) is not None]
        return sum(known) if known else None

    def losses(self, survival_of: Survival, age_s: float = 0.0) -> list[Loss]:
        """Return what each failure would have cost at the last progress.

        A step counts for a place if every rank can restore it from there. Nothing is claimed
        (an empty list) before every rank of the start has an event of progress.

        Args:
            age_s: seconds since then. The memory of a keeper is given up some time after the
                training process has ended.
        """
        if self.silent_ranks or not self.active:
            return []
        ranks = [one for one in self.active if one.progress]
        now = max(one.progress[-1].step for one in ranks)
        steps = _common_steps([one.steps_by_place for one in ranks])
        if age_s > KEPT_S:
            steps.pop(MEMORY, None)
        survived = {place: _ORDER.index(survival_of(place)) for place in steps}
        found = []
        for number, failure in enumerate(_ORDER):
            left = {place: step for place, step in steps.items() if survived[place] >= number}
            # Of places with the same step the nearest one.
            nearest = sorted(left, key=_distance)
            place = max(nearest, key=left.__getitem__, default=None)
            step = 0 if place is None else left[place]
            lost = max(0, now - step)
            lost_s = None if self.step_s is None else lost * self.step_s
            found.append(Loss(failure, place, step, lost, lost_s))
        return found

    @property
    def messages(self) -> list[Event]:
        """Failures, notices and recoveries of all ranks, oldest first."""
        return sorted(
            (event for one in self.ranks.values() for event in one.messages),
            key=lambda event: event.unix_s,
        )

    @property
    def last_unix_s(self) -> float | None:
        """Time of the newest event of the rank that was silent for longest; None without events."""
        times = [one.last.unix_s for one in self.active if one.last is not None]
        return min(times, default=None)

    @property
    def as_of_unix_s(self) -> float | None:
        """Time of the oldest last progress of the ranks; None before there is one of each."""
        if self.silent_ranks:
            return None
        return min((one.progress[-1].unix_s for one in self.active if one.progress), default=None)

    @property
    def is_closed(self) -> bool:
        """True if every rank has ended in order."""
        last = [one.last for one in self.active if one.last is not None]
        return bool(last) and all(event.kind == "closed" for event in last)
