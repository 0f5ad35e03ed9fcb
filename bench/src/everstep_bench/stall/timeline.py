"""When training computed, stood still, was copied and was written: a trace and a picture.

The trace is in Chrome's trace-event format: chrome://tracing and ui.perfetto.dev show it.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from everstep.cli.common.pictures import check_picture
from everstep.errors import PermissionDeniedError, UnavailableError
from everstep_bench.stall.figures import Block, Interval, Row
from everstep_bench.stall.loop import Span, Step
from everstep_bench.stall.recording import Curve
from everstep_bench.stall.report import StallReport

__all__ = [
    "BIN_S",
    "LANES",
    "Event",
    "curves",
    "drawn",
    "events",
    "picture",
    "trace",
]

BIN_S = 0.02
"""Of curves."""

LANES = ("compute", "waits", "state", "gradients", "write")
"""What is told apart (GoCkpt Fig. 4 and 7): forward, backward and update; what holds training
up; the state on its way to memory that does not change; gradients on their way there; the
state on its way to the disk."""

_PICTURED = (
    ("dcp-warm", "dcp", "dcp-process", "dcp-overlap"),
    ("async",),
    ("lazy",),
    ("gockpt",),
    ("gockpt_o",),
)
_COLOURS = {
    "compute": "#7f9fbf",
    "waits": "#c0392b",
    "state": "#e0a030",
    "gradients": "#8e5fa8",
    "write": "#4f8f5f",
}
_PHASES = {"forward": "#a9c1d9", "backward": "#7f9fbf", "update": "#55789c"}
_INCHES = (11.0, 1.0, 2.0)  # wide; high without an arm, and with each
_DPI = 150
_MARGIN = 0.03
_WAIT_S_MIN = 0.0002
_APART_S = 0.0005  # copies that follow each other sooner are one, to look at


class Event(NamedTuple):
    """Something that lasted, in seconds of the monotonic clock."""

    lane: str
    name: str
    begin_s: float
    end_s: float


def events(block: Block) -> Iterator[Event]:
    """Return the events of a block, as far as they are known without hooks in any library.

    Waiting for a copy is what the optimizer's hooks took, before its update (for the state) and
    behind it (for gradients), and what the library did between two steps. Copies are as the lane
    tells, one event for each part: what of the state was copied in one step. Where no lane tells,
    the state is on its way until the library says that it is copied. Writing that overlaps the
    copy ends when the save is done and is as long as the library counts it; where it counts
    nothing, it follows the copy.
    """
    for number, step in enumerate(block.steps, start=1):
        yield from _phases(number, step)
    if block.done_s is None:
        return
    yield Event("waits", "save()", block.begin_s, block.called_s)
    for step, after in itertools.pairwise(block.steps):
        if after.begin_s - step.end_s >= _WAIT_S_MIN:
            yield Event("waits", "step()", step.end_s, after.begin_s)
    if block.copies:
        yield from _copies(block)
    elif block.staged_s is not None:
        yield Event("state", "state", block.begin_s, block.staged_s)
    if block.persist_s is not None:
        begin_s = block.done_s - block.persist_s
    else:
        begin_s = block.begin_s if block.staged_s is None else block.staged_s
    yield Event("write", "write", max(begin_s, block.begin_s), block.done_s)


def _phases(number: int, step: Step) -> Iterator[Event]:
    """Forward, backward, update of a step, as far as anybody looked, and the waits between."""
    looked = step.forward_end_s is not None
    borders: list[tuple[str, Span | None, str]] = [
        ("gate", step.hooks, "update"),
        ("gradients", step.applied, "update"),
    ]
    at_s = step.begin_s
    name = f"step {number}"
    if step.forward_end_s is not None:
        yield Event("compute", f"{name}, forward", at_s, step.forward_end_s)
        at_s = step.forward_end_s
        name = f"{name}, backward"
    for what, span, phase in borders:
        if span is None:
            continue
        waited = span.end_s - span.begin_s >= _WAIT_S_MIN
        if not waited and (not looked or what == "gradients"):
            continue
        yield Event("compute", name, at_s, span.begin_s)
        if waited:
            yield Event("waits", what, span.begin_s, span.end_s)
        at_s = span.end_s
        name = f"step {number}, {phase}"
    yield Event("compute", name, at_s, step.end_s)


def _copies(block: Block) -> Iterator[Event]:
    """Copies of a block, those that follow each other within a step put together."""
    lanes = {False: "state", True: "gradients"}
    ends_s = [step.end_s for step in block.steps]
    for gradients in (False, True):
        merged: list[tuple[int, float, float]] = []
        for copy in block.copies:
            if copy.gradients != gradients:
                continue
            step = bisect.bisect_right(ends_s, copy.begin_s)
            if merged and merged[-1][0] == step and copy.begin_s - merged[-1][2] < _APART_S:
                merged[-1] = (step, merged[-1][1], max(merged[-1][2], copy.end_s))
            else:
                merged.append((step, copy.begin_s, copy.end_s))
        for step, begin_s, end_s in merged:
            what = f"gradients, step {step + 1}" if gradients else f"state, step {step + 1}"
            yield Event(lanes[gradients], what, begin_s, end_s)


def trace(report: StallReport, path: Path) -> None:
    """Writes every block of every arm: one process for each arm, one thread for each lane."""
    found: list[dict[str, Any]] = []
    for number, name in enumerate(_names(report), start=1):
        found.append(_meta("process_name", number, 0, name))
        found += [_meta("thread_name", number, at, lane) for at, lane in enumerate(LANES, 1)]
        for interval in report.intervals:
            for turn, block in _blocks(interval, name):
                where = {"arm": name, "round": turn, "every": interval.every}
                found += [
                    {
                        "name": event.name,
                        "cat": event.lane,
                        "ph": "X",
                        "ts": 1e6 * (event.begin_s - report.start_s),
                        "dur": 1e6 * max(0.0, event.end_s - event.begin_s),
                        "pid": number,
                        "tid": 1 + LANES.index(event.lane),
                        "args": where,
                    }
                    for event in events(block)
                ]
        found += list(_counters(report, number, name))
    document = {
        "traceEvents": found,
        "displayTimeUnit": "ms",
        "otherData": {"labels": report.labels(), "workload": report.workload},
    }
    _write(path, json.dumps(document).encode("ascii"))


def _counters(report: StallReport, process: int, name: str) -> Iterator[dict[str, Any]]:
    """The curves of an arm."""
    for curve in report.curves:
        if curve.name != name:
            continue
        series = {
            "link GB/s": [(at_s, rate / 1e9) for at_s, rate in curve.link_bytes_per_s(BIN_S)],
            "keeper cores": curve.cores(BIN_S),
        }
        for what, points in series.items():
            for at_s, value in points:
                yield {
                    "name": what,
                    "ph": "C",
                    "ts": 1e6 * (at_s - report.start_s),
                    "pid": process,
                    "args": {what: value},
                }


def picture(report: StallReport, path: Path) -> None:
    """Draws the last block of DCP and of some arms of ours, one above the other, on one scale.

    Raises:
        UnavailableError: matplotlib is missing, or none of these arms has a block.
    """
    shown = [(row, block) for row, block in _pictured(report.intervals[0])]
    if not shown:
        raise UnavailableError("nothing to draw: none of the arms in pictures was measured")
    with drawn(
        path, panels=len(shown), title=_title(report, "One save while training goes on")
    ) as (axes):
        for axis, (row, block) in zip(axes, shown, strict=True):
            _draw(axis, row, block)
        axes[-1].set_xlabel("milliseconds from the call (light to dark: forward, backward, update)")


def curves(report: StallReport, path: Path) -> None:
    """Draws how many cores the keeper of each arm keeps busy, and what goes through the link
    (GoCkpt Fig. 8 and 9).

    Raises:
        UnavailableError: matplotlib is missing, or nothing was recorded.
    """
    if not report.curves:
        raise UnavailableError("nothing to draw: no arm of everstep was measured")
    title = _title(report, "Keeper and link over some consecutive saves")
    with drawn(path, panels=len(report.curves), title=title) as axes:
        for axis, curve in zip(axes, report.curves, strict=True):
            _draw_curve(axis, curve)
        axes[-1].set_xlabel("milliseconds")


@contextlib.contextmanager
def drawn(path: Path, *, panels: int, title: str) -> Iterator[Any]:
    """A picture of panels one above the other, saved at the end of the block; yields their axes.

    Raises:
        UnavailableError: matplotlib is missing.
        PermissionDeniedError: it cannot be written.
    """
    check_picture(path)
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    width, without, each = _INCHES
    size = (width, without + each * panels)
    figure = figures.Figure(figsize=size, dpi=_DPI, layout="constrained")
    agg.FigureCanvasAgg(figure)  # no window, whatever the user has configured
    yield figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(title, fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise _refused(path, error) from error


def _title(report: StallReport, what: str) -> str:
    size = f"{report.size_bytes / 1e9:.3f} GB, {report.tensors} tensors"
    return "\n".join([f"{what} ({size})", *report.labels()])


def _draw_curve(axis: Any, curve: Curve) -> None:
    def points(found: list[tuple[float, float]], scale: float) -> tuple[list[float], list[float]]:
        return (
            [1e3 * (at_s - curve.begin_s) for at_s, _ in found],
            [value / scale for _, value in found],
        )

    axis.step(*points(curve.cores(BIN_S), 1.0), where="post", color=_COLOURS["write"])
    axis.set_ylabel("keeper, cores", color=_COLOURS["write"])
    axis.set_ylim(bottom=0)
    beside = axis.twinx()
    beside.step(*points(curve.link_bytes_per_s(BIN_S), 1e9), where="post", color=_COLOURS["state"])
    beside.set_ylabel("link, GB/s", color=_COLOURS["state"])
    beside.set_ylim(bottom=0)
    for at_s in curve.saves_s:
        axis.axvline(1e3 * (at_s - curve.begin_s), color=_COLOURS["waits"], linewidth=0.8)
    axis.set_title(f"{curve.name} (lines: save() was called)", fontsize="small", loc="left")
    axis.margins(x=_MARGIN)


def _draw(axis: Any, row: Row, block: Block) -> None:
    for event in events(block):
        height = len(LANES) - 1 - LANES.index(event.lane)
        begin_ms = 1e3 * (event.begin_s - block.begin_s)
        width_ms = 1e3 * (event.end_s - event.begin_s)
        colour = _PHASES.get(event.name.rpartition(" ")[2], _COLOURS[event.lane])
        axis.barh(height, width_ms, left=begin_ms, color=colour, edgecolor="white", linewidth=0.6)
    axis.set_yticks(range(len(LANES)), reversed(LANES))
    axis.set_title(f"{row.name}: {row.detail}", fontsize="small", loc="left")
    axis.margins(x=_MARGIN)


def _pictured(interval: Interval) -> Iterator[tuple[Row, Block]]:
    for names in _PICTURED:
        rows = [row for row in map(interval.row, names) if row is not None]
        for row in rows[:1]:
            yield row, row.blocks[max(row.blocks)]


def _names(report: StallReport) -> list[str]:
    return ["ideal", *(row.name for row in report.intervals[0].rows if row.blocks)]


def _blocks(interval: Interval, name: str) -> Iterator[tuple[int, Block]]:
    if name == "ideal":
        for number, ideal in interval.ideals.items():
            for block in ideal.blocks:
                yield number, block
        return
    row = interval.row(name)
    if row is not None:
        yield from row.blocks.items()


def _meta(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> PermissionDeniedError:
    return PermissionDeniedError(f"cannot write {path}: {error.strerror}", path=path)
