"""Figures of a run, from its event log and its folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from everstep.events import Event
from everstep.look.run_status import DISK, MEMORY
from everstep.plan.models import daly_interval_s, gockpt_waste, young_interval_s

if TYPE_CHECKING:
    from everstep.run.scan import Inventory

_DAY_S = 86_400.0


@dataclass(slots=True)
class Life:
    """Training of one timeline: from a resume to the next, of one rank.

    Attributes:
        recovery: event of the resume.
        steps: ``(time, step)`` of each progress; the first is the resume.
        places: ``(time, step)`` of the newest step that each place could restore.
        stalls: cumulative seconds of stall by cause, ``(time, by cause)``.
        last: last event.
        base_step: step of the newest base that was begun.
    """

    recovery: Event
    steps: list[tuple[float, int]] = field(default_factory=list)
    places: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    stalls: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)
    last: Event | None = None
    base_step: int = 0

    def add(self, event: Event) -> None:
        """Add an event of this timeline."""
        self.last = event
        if event.kind == "base_begun":
            self.base_step = event.step
        if event.kind != "progress":
            return
        details = event.details
        self.steps.append((event.unix_s, event.step))
        known = {
            MEMORY: details.get("recoverable_step"),
            DISK: details.get("durable_step"),
            **details.get("recoverable_from", {}),
        }
        for place, step in known.items():
            if step is not None:
                self.places.setdefault(place, []).append((event.unix_s, step))
        self.stalls.append((event.unix_s, details.get("stall_s", {})))
        self.figures = details

    @property
    def seconds(self) -> float:
        """Time from the resume to the last event."""
        return 0.0 if self.last is None else max(0.0, self.last.unix_s - self.recovery.unix_s)

    @property
    def newest_step(self) -> int:
        """Newest step that the event log knows of."""
        return max(self.base_step, *(step for _, step in self.steps))

    @property
    def ended_in_order(self) -> bool:
        """True if the process has called close()."""
        return self.last is not None and self.last.kind == "closed"


@dataclass(frozen=True, slots=True)
class Recovery:
    """One resume.

    Attributes:
        life: timeline that it opened.
        forked_from: timeline and step that it continues; None for a fresh start.
        seen_step: last step of which the event log of the killed process knew; None for the first.
        down_s: seconds from the last event before it; None for the first.
    """

    life: Life
    forked_from: tuple[int, int] | None
    seen_step: int | None
    down_s: float | None

    @property
    def lost_steps(self) -> int | None:
        """Finished steps that were trained again, at least; None for the first start."""
        if self.seen_step is None:
            return None
        return max(0, self.seen_step - self.life.recovery.step)


@dataclass(slots=True)
class Base:
    """One base, from the events and the folder.

    Attributes:
        captured_s: seconds until training could change the state.
        durable_s: seconds until it was on disk.
        tiers: tiers that had it.
        status: status in the run folder; empty if it is not there any more.
        verdict: result of reading it back; empty if that was not done.
        audit: result of the keeper's replay.
    """

    timeline: int
    step: int
    begun_unix_s: float | None = None
    captured_s: float | None = None
    durable_s: float | None = None
    size_bytes: int | None = None
    tiers: list[str] = field(default_factory=list)
    failed: str = ""
    status: str = ""
    verdict: str = ""
    audit: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction next to the measurement.

    Attributes:
        basis: what the prediction was computed from.
    """

    name: str
    predicted: float
    measured: float
    unit: str
    basis: str


@dataclass(slots=True)
class RunReport:
    """All figures of the report of one run.

    Attributes:
        started: events of the starts of rank 0.
        lives: training of rank 0 by timeline, in order.
        messages: failures and notices of all ranks.
    """

    path: str
    run: str
    world: int
    started: list[Event]
    lives: list[Life]
    recoveries: list[Recovery]
    bases: list[Base]
    messages: list[Event]
    is_verified: bool

    @classmethod
    def of(
        cls,
        events: Sequence[Event],
        inventory: Inventory,
        verdicts: Mapping[tuple[int, int], str] | None = None,
    ) -> RunReport:
        """Return the report of a run.

        Args:
            events: events of all ranks, in the order of their times.
            inventory: the run folder.
            verdicts: results of reading bases back, by timeline and step; None if none was read.
        """
        own = [event for event in events if event.rank == 0]
        lives = _lives(own)
        started = [event for event in own if event.kind == "started"]
        worlds = [int(event.details.get("world", 1)) for event in started]
        messages = [event for event in events if event.kind in ("failure", "notice", "base_failed")]
        return cls(
            path=str(inventory.path),
            run=inventory.run or "",
            world=worlds[-1] if worlds else 1,
            started=started,
            lives=lives,
            recoveries=_recoveries(lives, inventory),
            bases=_bases(own, inventory, verdicts or {}),
            messages=messages,
            is_verified=verdicts is not None,
        )

    @property
    def trained_s(self) -> float:
        """Time that processes trained."""
        return sum(life.seconds for life in self.lives)

    @property
    def span_s(self) -> float:
        """Time from the first event to the last."""
        if not self.lives or self.lives[-1].last is None:
            return 0.0
        return max(0.0, self.lives[-1].last.unix_s - self.lives[0].recovery.unix_s)

    @property
    def step(self) -> int:
        """Newest step."""
        return self.lives[-1].steps[-1][1] if self.lives and self.lives[-1].steps else 0

    @property
    def failures(self) -> int:
        """Lives that ended without close(), and were followed by another one."""
        return sum(not life.ended_in_order for life in self.lives[:-1])

    @property
    def lost_steps(self) -> int:
        """Finished steps that were trained again."""
        return sum(one.lost_steps or 0 for one in self.recoveries)

    @property
    def stall_s(self) -> dict[str, float]:
        """Seconds that training was stalled, by cause."""
        found: dict[str, float] = {}
        for life in self.lives:
            # Counters go on over a rewind within one process: only their growth counts.
            first = life.stalls[0][1] if life.stalls else {}
            rewound = life.recovery.details.get("source") != "fresh" and _continues(self, life)
            for cause, seconds in (life.stalls[-1][1] if life.stalls else {}).items():
                begun = first.get(cause, 0.0) if rewound else 0.0
                found[cause] = found.get(cause, 0.0) + seconds - begun
        return found

    @property
    def step_s(self) -> float | None:
        """Seconds of a step without bases, as measured last; None if unknown."""
        known = [life.figures.get("step_s") for life in self.lives]
        return next((value for value in reversed(known) if value), None)

    @property
    def comparisons(self) -> list[Comparison]:
        """Predictions next to measurements, as far as there are both."""
        return [*_bytes_a_day(self), *_against_models(self)]


def _lives(events: Iterable[Event]) -> list[Life]:
    lives: list[Life] = []
    for event in events:
        if event.kind == "recovery":
            life = Life(event, [(event.unix_s, event.step)], last=event)
            lives.append(life)
        elif lives and event.timeline == lives[-1].recovery.timeline:
            lives[-1].add(event)
    return lives


def _continues(report: RunReport, life: Life) -> bool:
    """Return True if the process of this life had trained before: it called rewind()."""
    starts = [event.unix_s for event in report.started]
    number = report.lives.index(life)
    if number == 0:
        return False
    before_s = report.lives[number - 1].recovery.unix_s
    return not any(before_s < start_s <= life.recovery.unix_s for start_s in starts)


def _recoveries(lives: Sequence[Life], inventory: Inventory) -> list[Recovery]:
    found = []
    for number, life in enumerate(lives):
        record = inventory.timelines.get(life.recovery.timeline)
        parent = None if record is None or record.parent is None else record
        forked = (
            None if parent is None or parent.parent is None else (parent.parent, parent.fork_step)
        )
        before = lives[number - 1] if number else None
        seen = None if before is None else before.newest_step
        last_s = None if before is None or before.last is None else before.last.unix_s
        down_s = None if last_s is None else life.recovery.unix_s - last_s
        found.append(Recovery(life, forked, seen, down_s))
    return found


def _bases(
    events: Iterable[Event], inventory: Inventory, verdicts: Mapping[tuple[int, int], str]
) -> list[Base]:
    found: dict[tuple[int, int], Base] = {}

    def base_of(timeline: int, step: int) -> Base:
        return found.setdefault((timeline, step), Base(timeline, step))

    for event in events:
        details = event.details
        if event.kind == "base_begun":
            base_of(event.timeline, event.step).begun_unix_s = event.unix_s
        elif event.kind == "base_captured":
            base_of(event.timeline, event.step).captured_s = details.get("seconds")
        elif event.kind == "base_failed":
            base_of(event.timeline, event.step).failed = str(details.get("message", ""))
        elif event.kind == "base_durable":
            base = base_of(event.timeline, event.step)
            base.tiers.append(str(details.get("tier")))
            if details.get("tier") in (DISK, MEMORY):
                base.durable_s = details.get("seconds")
                base.size_bytes = details.get("size_bytes")
    for there in inventory.bases:
        base = base_of(there.id.timeline, there.id.step)
        base.status = there.status
        base.size_bytes = base.size_bytes or there.size_bytes
        base.audit = "" if there.audit is None else there.audit.verdict
        base.verdict = verdicts.get((there.id.timeline, there.id.step), "")
    return sorted(found.values(), key=lambda base: (base.timeline, base.step))


def _bytes_a_day(report: RunReport) -> list[Comparison]:
    if not report.lives:
        return []
    life = report.lives[-1]
    forecast = life.figures.get("forecast_bytes_per_day")
    if not forecast or life.seconds <= 0:
        return []
    names = ("written_bytes", "log_written_bytes")
    written = sum(life.figures.get(name) or 0 for name in names)
    measured = written / life.seconds * _DAY_S
    basis = "size of a base and of a step of the log, interval, duration of a step"
    return [Comparison("written to disk in a day", forecast, measured, "bytes", basis)]


def _cost_of_base_s(report: RunReport) -> float | None:
    count = sum(life.figures.get("saves") or 0 for life in report.lives)
    total_s = sum(report.stall_s.values()) - report.stall_s.get("log", 0.0)
    return total_s / count if count and total_s > 0 else None


def _interval_steps(report: RunReport) -> float | None:
    gaps = []
    for life in report.lives:
        steps = sorted(one.step for one in report.bases if one.timeline == life.recovery.timeline)
        gaps += [after - before for before, after in pairwise(steps)]
    return sorted(gaps)[len(gaps) // 2] if gaps else None


def _against_models(report: RunReport) -> list[Comparison]:
    """Compare the wasted time with GoCkpt's formula (section 3.1), and the interval with Young's
    and Daly's best; nothing before a base and a failure have been measured."""
    cost_s = _cost_of_base_s(report)
    interval = _interval_steps(report)
    step_s = report.step_s
    if cost_s is None or not interval or not step_s or not report.failures:
        return []
    mtbf_s = report.trained_s / report.failures
    events = [one.life.recovery for one in report.recoveries[1:]]
    resumes = [float(event.details.get("seconds", 0.0)) for event in events]
    load_s = sum(resumes) / len(resumes) if resumes else 0.0
    predicted = gockpt_waste(interval, step_s, cost_s, load_s, mtbf_s)
    wasted_s = sum(report.stall_s.values()) + report.lost_steps * step_s + sum(resumes)
    useful_s = max(1e-9, report.trained_s - wasted_s)
    basis = "GoCkpt 3.1: cost of a base, interval and failures of this run; without a log"
    models = (("Young", young_interval_s), ("Daly", daly_interval_s))
    return [
        Comparison("time wasted", predicted, wasted_s / useful_s, "share", basis),
        *(
            Comparison(
                f"interval between bases, best by {name}",
                best(cost_s, mtbf_s) / step_s,
                interval,
                "steps",
                "stall of a base and time between failures of this run; without a log",
            )
            for name, best in models
        ),
    ]
