"""The page of a report: one file of HTML, with inline SVG and style, which needs no network.

The charts are computed here, in the coordinates of the SVG; ``page.html`` places them.
"""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jinja2
from rich.filesize import decimal

from everstep.report.figures import Life, RunReport

_ROWS_MAX = 300
WIDTH = 960
HEIGHT = 300
LEFT = 70
BOTTOM = 34
TOP = 12
RIGHT = 12

# Distinct with common color blindness (Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")


@dataclass(frozen=True, slots=True)
class Line:
    """A line, or the outline of an area, in the order of the legend.

    Attributes:
        points: the SVG attribute ``points`` of each piece.
    """

    name: str
    color: str
    points: Sequence[str]
    is_area: bool = False
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a title."""

    x: float
    title: str


@dataclass(slots=True)
class Chart:
    """One chart.

    Attributes:
        x_ticks, y_ticks: ``(position, label)``.
    """

    title: str
    about: str
    lines: list[Line] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)


class _Axes:
    """Map times and values to positions."""

    def __init__(self, begin_s: float, end_s: float, highest: float) -> None:
        self.begin_s = begin_s
        self.end_s = max(end_s, begin_s + 1e-3)
        self.highest = highest if highest > 0 else 1.0

    def x(self, unix_s: float) -> float:
        share = (unix_s - self.begin_s) / (self.end_s - self.begin_s)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 2)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - value / self.highest * (HEIGHT - BOTTOM - TOP), 2)

    def points(self, pairs: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(unix_s)},{self.y(value)}" for unix_s, value in pairs)

    def x_ticks(self) -> list[tuple[float, str]]:
        step_s = _nice((self.end_s - self.begin_s) / 6, time=True)
        ticks = []
        at_s = 0.0
        while at_s <= self.end_s - self.begin_s:
            ticks.append((self.x(self.begin_s + at_s), _span(at_s)))
            at_s += step_s
        return ticks

    def y_ticks(self, suffix: str = "") -> list[tuple[float, str]]:
        step = _nice(self.highest / 4)
        count = math.floor(self.highest / step)
        return [(self.y(n * step), f"{n * step:g}{suffix}") for n in range(count + 1)]


def _nice(rough: float, *, time: bool = False) -> float:
    """Return a round number near ``rough``."""
    if time:
        steps = (
            1,
            2,
            5,
            10,
            15,
            30,
            60,
            120,
            300,
            600,
            900,
            1800,
            3600,
            7200,
            14_400,
            43_200,
            86_400,
        )
        return next(
            (float(step) for step in steps if step >= rough), math.ceil(rough / 86_400) * 86_400.0
        )
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-12)))
    return next(power * one for one in (1, 2, 5, 10) if power * one >= rough * 0.999)


def _span(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def charts_of(report: RunReport) -> list[Chart]:
    """Return the charts of a report; none without progress."""
    if not any(len(life.steps) > 1 for life in report.lives):
        return []
    return [_steps(report), _lost(report), _stalls(report)]


def _axes(report: RunReport, highest: float) -> _Axes:
    lives = report.lives
    ends = [life.last.unix_s for life in lives if life.last is not None]
    return _Axes(lives[0].recovery.unix_s, max(ends), highest)


def _restarts(report: RunReport, axes: _Axes) -> list[Mark]:
    marks = []
    for one in report.recoveries:
        event = one.life.recovery
        lost = "" if one.lost_steps is None else f", {one.lost_steps} steps lost"
        title = (
            f"timeline {event.timeline}: step {event.step} from {event.details.get('source')}{lost}"
        )
        marks.append(Mark(axes.x(event.unix_s), title))
    return marks


def _places(report: RunReport) -> list[str]:
    found: dict[str, None] = {}
    for life in report.lives:
        found |= dict.fromkeys(life.places)
    return list(found)


def _steps(report: RunReport) -> Chart:
    """Draw the step that training was at, and the newest base or log on each tier."""
    highest = max(step for life in report.lives for _, step in life.steps)
    axes = _axes(report, highest * 1.05)
    lines = [Line("training", COLORS[0], [axes.points(life.steps) for life in report.lives])]
    for place, color in zip(_places(report), COLORS[1:], strict=False):
        pieces = [axes.points(_stairs(life.places[place])) for life in _with(report, place)]
        lines.append(Line(f"could be restored from: {place}", color, pieces, is_dashed=True))
    return Chart(
        "Steps",
        "The step that training had ended, and the newest step on each tier. A vertical line is a "
        "resume; where the line of training falls, steps were trained again.",
        lines,
        _restarts(report, axes),
        axes.x_ticks(),
        axes.y_ticks(),
    )


def _lost(report: RunReport) -> Chart:
    """Draw the steps that would have been lost if only one place had survived."""
    series: dict[str, list[list[tuple[float, float]]]] = {}
    for place in _places(report):
        for life in _with(report, place):
            steps = dict(life.steps)
            pairs = [(at_s, float(steps[at_s] - step)) for at_s, step in life.places[place]]
            series.setdefault(place, []).append(pairs)
    highest = max(
        (lag for one in series.values() for pairs in one for _, lag in pairs), default=0.0
    )
    axes = _axes(report, max(highest * 1.05, 1.0))
    lines = [
        Line(place, color, [axes.points(pairs) for pairs in pieces])
        for (place, pieces), color in zip(series.items(), COLORS[1:], strict=False)
    ]
    return Chart(
        "Steps that a failure would have cost",
        "Finished steps beyond the newest one on each tier: what would have been lost if that tier "
        "alone had survived.",
        lines,
        _restarts(report, axes),
        axes.x_ticks(),
        axes.y_ticks(),
    )


def _stalls(report: RunReport) -> Chart:
    """Draw the share of the time that training was delayed, by cause, one above the other."""
    causes: dict[str, None] = {}
    shares: list[list[tuple[float, dict[str, float]]]] = []
    for life in report.lives:
        piece = list(_shares(life))
        shares.append(piece)
        for _, by_cause in piece:
            causes |= dict.fromkeys(cause for cause, share in by_cause.items() if share > 0)
    tops = [sum(by_cause.values()) for piece in shares for _, by_cause in piece]
    axes = _axes(report, max([*tops, 1e-4]) * 105)
    lines = []
    below: list[list[float]] = [[0.0] * len(piece) for piece in shares]
    for cause, color in zip(causes, COLORS, strict=False):
        pieces = []
        for piece, base in zip(shares, below, strict=True):
            if not piece:
                continue
            times = [at_s for at_s, _ in piece]
            top = [
                low + 100 * by_cause.get(cause, 0.0)
                for low, (_, by_cause) in zip(base, piece, strict=True)
            ]
            outline = [
                *zip(times, top, strict=True),
                *reversed(list(zip(times, base, strict=True))),
            ]
            pieces.append(axes.points(outline))
            base[:] = top
        lines.append(Line(cause, color, pieces, is_area=True))
    return Chart(
        "Time that training was stalled",
        "Percent of the time, by cause (docs: Stats.stall_s), one above the other.",
        lines,
        [],
        axes.x_ticks(),
        axes.y_ticks(" %"),
    )


def _shares(life: Life) -> Iterable[tuple[float, dict[str, float]]]:
    """Yield, for each progress, the share of the time since the one before, by cause."""
    for (before_s, before), (at_s, after) in zip(life.stalls, life.stalls[1:], strict=False):
        seconds = at_s - before_s
        if seconds > 0:
            yield (
                at_s,
                {
                    cause: max(0.0, one - before.get(cause, 0.0)) / seconds
                    for cause, one in after.items()
                },
            )


def _with(report: RunReport, place: str) -> list[Life]:
    return [life for life in report.lives if place in life.places]


def _stairs(pairs: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return the corners of a line that rises only at its points."""
    found: list[tuple[float, float]] = []
    for at_s, step in pairs:
        if found:
            found.append((at_s, found[-1][1]))
        found.append((at_s, float(step)))
    return found


def page_of(report: RunReport, written_unix_s: float) -> str:
    """Return the page as text.

    Args:
        written_unix_s: time that the page shows, in seconds since 1970.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("everstep.report", ""),
        # Names come from the run folder, which is not trusted.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["moment"] = _moment
    environment.filters["bytes"] = _bytes
    environment.filters["number"] = _number
    environment.filters["amount"] = _amount
    template = environment.get_template("page.html")
    return template.render(
        report=report,
        charts=charts_of(report),
        shape=sys.modules[__name__],
        written_unix_s=written_unix_s,
        rows_max=_ROWS_MAX,
    )


def _moment(unix_s: float | None) -> str:
    if unix_s is None:
        return ""
    try:
        moment = datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc)
    except (OverflowError, ValueError, OSError):
        return "?"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _bytes(size_bytes: float | None) -> str:
    return "" if size_bytes is None else decimal(round(size_bytes))


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _amount(value: float, unit: str) -> str:
    """Return a figure with its unit."""
    if unit == "bytes":
        return _bytes(value)
    if unit == "share":
        return f"{value:.2%}"
    return f"{value:,.0f} {unit}"
