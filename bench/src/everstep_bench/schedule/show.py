"""The two tables, the paper's figures beside ours."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table

from everstep.plan.schedule.planned import every_steps
from everstep_bench.schedule.report import FIGURE, LAUNCH_S, Cell, Column, ScheduleReport
from everstep_bench.schedule.solving import Solved
from everstep_bench.stall.show import print_verdicts

__all__ = ["present"]


def present(report: ScheduleReport, console: Console) -> None:
    """Prints everything."""
    console.print(
        f"times: roofline of {report.options.gpu} ({report.source}); a dash: the link is too slow"
    )
    console.print(_table(report.cells))
    console.print(
        "yes, no: by the roofline; paper's in brackets; from: where no operator takes less"
    )
    for batch in report.options.batches:
        for order in ("after", "inside"):
            console.print()
            console.print(_figure(report, batch, order))
    console.print()
    console.print(_persisting(report))
    console.print()
    for least_s in (0.0, LAUNCH_S):
        for order in ("after", "inside"):
            mean = report.mean_reduction(32, order, "paper", least_s)
            if mean is not None:
                console.print(
                    f"batch 32, updates {order} backward, operators of {least_s * 1e6:.0f} us at "
                    f"least: mean reduction {mean:.1%}"
                )
    for what, value in FIGURE.items():
        console.print(f"the paper says: {what}: {value:.3g}")
    gaps = [column.gap for column in report.columns if column.gap is not None]
    console.print(
        f"{len(report.columns)} plans, largest gap {max(gaps, default=0):.2%}; "
        f"{report.seconds:.0f} s in all"
    )
    if report.solved:
        console.print()
        console.print(_solved(report.solved))
    console.print()
    print_verdicts(report.verdicts(), console)


def _made(title: str, *columns: str) -> Table:
    made = Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
    return made


def _table(cells: tuple[Cell, ...]) -> Table:
    links = dict.fromkeys(cell.link_bytes_per_s for cell in cells)
    made = _made(
        "Table I: does a checkpoint of every step leave within the step",
        *("network", "batch", "needs, GB/s", *(f"{link / 1e9:.0f} GB/s" for link in links)),
    )
    for (model, batch), row in groupby(cells, key=lambda cell: (cell.model, cell.batch)):
        found = list(row)
        needed = f"{found[0].needed_bytes_per_s / 1e9:.1f}"
        made.add_row(model, str(batch), needed, *(_cell(cell) for cell in found))
    return made


def _cell(cell: Cell) -> str:
    said = {True: " (yes)", False: " (no)", None: ""}[cell.paper]
    if cell.feasible:
        return "yes" + said
    if cell.holds_from_s is None:
        return "no" + said
    return f"no, from {cell.holds_from_s * 1e6:.0f} us{said}"


def _figure(report: ScheduleReport, batch: int, order: str) -> Table:
    made = _made(
        f"Fig. 2, batch {batch}, updates {order} backward: peak of memory, MB",
        *("network", "alone", "all at once", "paper's way", "less", "overhead less"),
        *("direct", "less", f"paper's, {LAUNCH_S * 1e6:.0f} us", "less"),
    )
    chosen = [c for c in report.columns if (c.batch, c.order) == (batch, order)]
    for model, group in groupby(chosen, key=lambda column: column.model):
        by = {(column.mode, column.least_s): column for column in group}
        paper = by["paper", 0.0]
        direct = by["direct", 0.0]
        slow = by["paper", LAUNCH_S]
        made.add_row(
            *(model, _mb(paper.peak_bytes), _mb(paper.at_once_bytes)),
            *(_mb(paper.planned_bytes), _less(paper), _share(paper.overhead_reduction)),
            *(_mb(direct.planned_bytes), _less(direct), _mb(slow.planned_bytes), _less(slow)),
        )
    return made


def _persisting(report: ScheduleReport) -> Table:
    disk = report.options.disk_bytes_per_s
    slow = f"operators of {LAUNCH_S * 1e6:.0f} us"
    made = _made(
        f"Section IV-B: persisting every step; every k-th at {disk / 1e9:g} GB/s",
        *("network", "batch", "state, MB", "GB/s", "k", f"{slow}: GB/s", "k"),
    )
    rows = sorted(report.persisting(), key=lambda column: (column.model, column.batch))
    for (model, batch), group in groupby(rows, key=lambda column: (column.model, column.batch)):
        found = sorted(group, key=lambda column: column.least_s)
        figures = []
        for column in found:
            needed = column.disk_bytes_per_s
            figures += [f"{needed / 1e9:.1f}", str(every_steps(needed, disk))]
        made.add_row(model, str(batch), _mb(found[0].state_bytes), *figures)
    return made


def _solved(rows: tuple[Solved, ...]) -> Table:
    made = _made(
        "To trace and to plan, seconds of processor time (exact: of the clock)",
        *("network", "batch", "way", "operators", "link, GB/s", "chunks, KiB"),
        *("trace", "greedy", "gap", "exact", "its gap"),
    )
    for row in rows:
        made.add_row(
            *(row.model, str(row.batch), row.mode, str(row.operators)),
            *(f"{row.link_bytes_per_s / 1e9:.1f}", str(row.chunk_bytes >> 10)),
            *(f"{row.trace_s:.2f}", f"{row.greedy_s:.2f}", f"{row.gap:.2%}"),
            "-" if row.exact_s is None else f"{row.exact_s:.0f}",
            "-" if row.exact_gap is None else f"{row.exact_gap:.2%}",
        )
    return made


def _less(column: Column) -> str:
    return _share(column.reduction)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _mb(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 1e6:.1f}"
