"""When training computed, stood still, was copied and was written: a trace and a picture.

The trace is in Chrome's trace-event format: chrome://tracing and ui.perfetto.dev show it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from everstep.bench.stall.figures import Block, Interval, Row
from everstep.bench.stall.report import StallReport
from everstep.errors import OptionError, PermissionDeniedError, UnavailableError

__all__ = ["LANES", "Event", "check_picture", "check_target", "events", "picture", "trace"]

LANES = ("compute", "blocked", "copy", "write")
"""What is told apart: steps; calls that hold training up; the state on its way to memory
that does not change; on its way to the disk."""

_PICTURED = (("lazy",), ("dcp-warm", "dcp", "dcp-process", "dcp-overlap"))
_COLOURS = {"compute": "#7f9fbf", "blocked": "#c0392b", "copy": "#e0a030", "write": "#4f8f5f"}
_INCHES = (11.0, 5.0)
_DPI = 150
_MARGIN = 0.03
_GATE_S_MIN = 0.0002


class Event(NamedTuple):
    """Something that lasted, in seconds of the monotonic clock."""

    lane: str
    name: str
    begin_s: float
    end_s: float


def events(block: Block) -> Iterator[Event]:
    """What happened in a block, as far as it is known without hooks in any library.

    Waiting at a gate is what the optimizer's hooks took. Writing that overlaps the copy ends
    when the save is done and is as long as the library counts it; where it counts nothing, it
    follows the copy.
    """
    for number, step in enumerate(block.steps, start=1):
        gate = step.hooks
        if gate is None or gate.end_s - gate.begin_s < _GATE_S_MIN:
            yield Event("compute", f"step {number}", step.begin_s, step.end_s)
            continue
        yield Event("compute", f"step {number}", step.begin_s, gate.begin_s)
        yield Event("blocked", "gate", gate.begin_s, gate.end_s)
        yield Event("compute", f"step {number}, update", gate.end_s, step.end_s)
    if block.done_s is None:
        return
    yield Event("blocked", "save()", block.begin_s, block.called_s)
    if block.staged_s is not None:
        yield Event("copy", "copy", block.begin_s, block.staged_s)
    if block.persist_s is not None:
        begin_s = block.done_s - block.persist_s
    else:
        begin_s = block.begin_s if block.staged_s is None else block.staged_s
    yield Event("write", "write", max(begin_s, block.begin_s), block.done_s)


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
    document = {
        "traceEvents": found,
        "displayTimeUnit": "ms",
        "otherData": {"labels": report.labels(), "workload": report.workload},
    }
    _write(path, json.dumps(document).encode("ascii"))


def check_picture(path: Path) -> None:
    """Looks, before anything is measured, whether a picture can be drawn.

    Raises:
        UnavailableError: matplotlib is missing.
        OptionError: there is no such folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError(
            "a picture needs matplotlib, which is not installed",
            hint="pip install matplotlib, or leave out --picture",
        )
    check_target(path)


def check_target(path: Path) -> None:
    """Looks, before anything is measured, whether a file can be written there.

    Raises:
        OptionError: there is no such folder, or it is one.
    """
    if not path.absolute().parent.is_dir():
        raise OptionError(f"there is no folder {path.absolute().parent}", hint="make it first")
    if path.is_dir():
        raise OptionError(f"{path} is a folder", hint="name a file in it")


def picture(report: StallReport, path: Path) -> None:
    """Draws the last block of ``lazy`` and of DCP, one above the other, on one scale.

    Raises:
        UnavailableError: matplotlib is missing, or neither arm has a block.
    """
    check_picture(path)
    shown = [(row, block) for row, block in _pictured(report.intervals[0])]
    if not shown:
        raise UnavailableError("nothing to draw: neither lazy nor DCP was measured")
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    agg.FigureCanvasAgg(figure)  # no window, whatever the user has configured
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (row, block) in zip(axes, shown, strict=True):
        _draw(axis, row, block)
    axes[-1].set_xlabel("milliseconds from the call")
    size = f"{report.size_bytes / 1e9:.3f} GB, {report.tensors} tensors"
    title = [f"One save while training goes on ({size})", *report.labels()]
    figure.suptitle("\n".join(title), fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise _refused(path, error) from error


def _draw(axis: Any, row: Row, block: Block) -> None:
    for event in events(block):
        height = len(LANES) - 1 - LANES.index(event.lane)
        begin_ms = 1e3 * (event.begin_s - block.begin_s)
        width_ms = 1e3 * (event.end_s - event.begin_s)
        colour = _COLOURS[event.lane]
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
