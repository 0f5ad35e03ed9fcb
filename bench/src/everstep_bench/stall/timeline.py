"""When training computed, stood still, was copied and was written: a picture."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import UnavailableError
from everstep_bench.harness.loop import Span, Step
from everstep_bench.harness.report import drawn
from everstep_bench.stall.figures import Block, Interval, Row

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


def picture(interval: Interval, title: str, path: Path) -> None:
    """Draw the last block of DCP and of some arms of ours, one above the other, on one scale.

    Raises:
        UnavailableError: matplotlib is missing, or none of these arms has a block.
    """
    shown = list(_pictured(interval))
    if not shown:
        raise UnavailableError("nothing to draw: none of the arms in pictures was measured")
    width, without, each = _INCHES
    with drawn(path, title, (width, without + each * len(shown)), rows=len(shown)) as axes:
        for axis, (row, block) in zip(axes, shown, strict=True):
            _draw(axis, row, block)
        axes[-1].set_xlabel("milliseconds from the call (light to dark: forward, backward, update)")


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
        rows = [row for row in map(interval.row, names) if row.blocks]
        for row in rows[:1]:
            yield row, row.blocks[max(row.blocks)]
