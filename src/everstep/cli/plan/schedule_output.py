"""Output of ``everstep plan schedule``: document, summary, table of copies, picture.

Pictures: check that one can be drawn, and draw memory and copies of a step.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from everstep.cli.common.output import in_words, label, plain, say, seconds_in_words, table
from everstep.errors import OptionError, UnavailableError

if TYPE_CHECKING:
    from everstep.plan.schedule.exact import Planned
    from everstep.plan.schedule.plan_file import PlanFile, PlannedCopy


def document_of(
    found: Planned, about: dict[str, Any], mode: str, disk_bytes_per_s: float
) -> dict[str, Any]:
    """Return the plan, and what it costs, as plain data.

    Args:
        about: options that belong to it.
        disk_bytes_per_s: bandwidth of the disk.
    """
    problem = found.problem
    plan = found.schedule
    needed = found.needed_bytes_per_s
    return {
        **about,
        "mode": mode,
        "times": found.times,
        "traced_on": found.trace.device,
        "notes": list(found.trace.notes),
        "method": found.method,
        "operators": len(found.trace.operators),
        "step_s": problem.step_s,
        "link_bytes_per_s": problem.link_bytes_per_s,
        "needed_bytes_per_s": needed if needed < math.inf else None,
        "margin": problem.link_bytes_per_s / needed - 1,
        "snapshot_bytes": problem.size_bytes,
        "peak_bytes": {
            "without": problem.peak_bytes,
            "all_at_once": found.blocking_peak_bytes,
            "planned": None if plan is None else plan.peak_bytes,
            "bound": None if plan is None else plan.bound_bytes,
        },
        "gap": None if plan is None else plan.gap,
        "chunk_bytes": None if plan is None else plan.chunk_bytes,
        "chunks": None if plan is None else len(plan.placements),
        "duplicated_bytes": None if plan is None else _duplicated(found),
        "disk_bytes_per_s": found.disk_bytes_per_s,
        "persist_every_steps": found.every_steps(disk_bytes_per_s),
        "trace_s": found.trace_s,
        "plan_s": found.plan_s,
        "infeasible": None if found.infeasible is None else found.infeasible.message,
    }


def _duplicated(found: Planned) -> int:
    assert found.schedule is not None
    places = found.schedule.placements
    return sum(place.chunk.size_bytes for place in places if place.snapshot is not None)


def show(
    out: Console,
    found: Planned,
    document: dict[str, Any],
    written: tuple[PlanFile, Path] | None,
) -> None:
    """Print the summary; of a plan that was written, its copies, too."""
    problem = found.problem
    plan = found.schedule
    step = seconds_in_words(problem.step_s)
    out.print(
        f"{document['model']}, batch {document['batch']}, {document['optimizer']}: "
        f"{document['operators']} operators in {step} ({found.times})"
    )
    for note in found.trace.notes:
        out.print(note)
    needed = found.needed_bytes_per_s / 1e9
    link = problem.link_bytes_per_s / 1e9
    out.print(
        f"checkpoint of {in_words(problem.size_bytes)} each step: takes {needed:.1f} GB/s of the "
        f"link's {link:.1f} ({document['margin']:+.0%})"
    )
    if plan is None:
        assert found.infeasible is not None
        out.print(f"infeasible: {found.infeasible.message}")
        return
    extra = plan.peak_bytes - problem.peak_bytes
    out.print(
        f"peak of memory {in_words(plan.peak_bytes)}: {in_words(extra)} more than without "
        f"checkpoints, {in_words(found.blocking_peak_bytes - plan.peak_bytes)} less than with a "
        "duplicate of everything at once"
    )
    out.print(
        f"no plan has a peak below {in_words(plan.bound_bytes)}: gap {plan.gap:.2%}, with chunks "
        f"of {in_words(plan.chunk_bytes)}; {in_words(document['duplicated_bytes'])} are duplicated "
        f"({found.method})"
    )
    out.print(
        f"persisting each takes {found.disk_bytes_per_s / 1e9:.1f} GB/s of a disk; "
        f"it keeps up with one in {document['persist_every_steps']}"
    )
    out.print(
        f"traced on {document['traced_on']} in {seconds_in_words(found.trace_s)}, "
        f"planned in {seconds_in_words(found.plan_s)}"
    )
    if written is not None:
        _show_copies(out, *written)


_ROWS_MAX = 20


def _show_copies(out: Console, plan: PlanFile, path: Path) -> None:
    """Print the copies, largest tensors first, and how the plan is executed."""
    rows = _copies_of(plan)
    made = table(
        ("tensor", "size", "duplicated ms", "start ms", "end ms", "slot", "begins with"),
        right=("size", "duplicated ms", "start ms", "end ms", "slot"),
    )
    for name, copies in rows[:_ROWS_MAX]:
        created = [copy.creation_s for copy in copies if copy.creation_s is not None]
        slot = copies[0].slot
        made.add_row(
            label(name),
            in_words(sum(copy.end - copy.begin for copy in copies)),
            f"{min(created) * 1e3:.2f}" if created else "-",
            f"{copies[0].start_s * 1e3:.2f}",
            f"{copies[-1].end_s * 1e3:.2f}",
            f"{slot}",
            label(plan.events[slot]),
        )
    out.print(made)
    if len(rows) > _ROWS_MAX:
        out.print(f"... and {len(rows) - _ROWS_MAX:,} more tensors; {path} has them all")
    say(out, f'written: Method(base="scheduled", plan="{path}")')


def _copies_of(plan: PlanFile) -> list[tuple[str, list[PlannedCopy]]]:
    """Return the copies of each tensor, the largest tensor first."""
    found: dict[str, list[PlannedCopy]] = {}
    for copy in plan.copies:
        found.setdefault(copy.tensor, []).append(copy)
    return sorted(found.items(), key=lambda item: -plan.tensors[item[0]])


_INCHES = (10.0, 8.0)
_DPI = 150
_BARS_MAX = 40
_LABEL_CHARS = 48


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn, before anything is computed for it.

    Raises:
        UnavailableError: matplotlib is missing.
        OptionError: there is no such folder, or no such kind of picture.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError(
            "a picture needs matplotlib, which is not installed",
            hint="pip install matplotlib, or leave out --picture",
        )
    check_target(path)
    canvas: Any = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    kinds = canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise OptionError(
            f"--picture: no picture is drawn as {path.suffix!r}", hint=f"one of {', '.join(kinds)}"
        )


def check_target(path: Path) -> None:
    """Check that a file can be written to ``path``, before anything is computed for it.

    Raises:
        OptionError: there is no such folder, or it is one.
    """
    if not path.absolute().parent.is_dir():
        raise OptionError(f"there is no folder {path.absolute().parent}", hint="make it first")
    if path.is_dir():
        raise OptionError(f"{path} is a folder", hint="name a file in it")


def draw_plan(found: Planned, plan: PlanFile, title: str, path: Path) -> None:
    """Draw memory over the time of a step, with the plan's snapshots and without; below it a Gantt
    chart: duplicates and copies of the largest tensors."""
    from everstep.plan.schedule.schedule import memory_of

    assert found.schedule is not None
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=_INCHES, layout="constrained")
    axes, gantt = figure.subplots(2, sharex=True, height_ratios=(2, 3))
    ends_ms = [s * 1e3 for s in accumulate(found.problem.seconds)]
    planned = memory_of(found.problem, found.schedule.placements)
    for words, values in (("with checkpoints", planned), ("without", found.problem.live_bytes)):
        axes.step([0.0, *ends_ms], [v / 1e6 for v in (values[0], *values)], label=words)
    at_once = found.blocking_peak_bytes / 1e6
    axes.axhline(at_once, linestyle=":", color="grey", label="all duplicated at once (peak)")
    axes.set(ylabel="MB", title=title, ylim=(0, at_once * 1.05))
    axes.legend(loc="lower right")
    rows = _copies_of(plan)[:_BARS_MAX]
    for number, (_, copies) in enumerate(rows):
        for copy in copies:
            span_ms = (copy.end_s - copy.start_s) * 1e3
            gantt.barh(number, span_ms, left=copy.start_s * 1e3, height=0.8, color="tab:blue")
            if copy.creation_s is not None:
                kept_ms = (copy.end_s - copy.creation_s) * 1e3
                gantt.barh(number, kept_ms, left=copy.creation_s * 1e3, height=0.3, color="tab:red")
    gantt.set_yticks(range(len(rows)), [plain(name, _LABEL_CHARS) for name, _ in rows], fontsize=6)
    gantt.invert_yaxis()
    more = len(plan.tensors) - len(rows)
    rest = f", the largest of {len(plan.tensors)} tensors" if more > 0 else ""
    gantt.set(xlabel="ms of the step", title=f"copies; red: a duplicate is kept{rest}")
    agg.FigureCanvasAgg(figure).print_figure(str(path), dpi=_DPI)
