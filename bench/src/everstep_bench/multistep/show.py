"""Output for people: facts, tables, verdicts."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from everstep_bench.multistep.figures import AUTO, Measurement, Row, allowed_s
from everstep_bench.multistep.options import WAYS
from everstep_bench.multistep.report import MultistepReport
from everstep_bench.persist.report import Spread
from everstep_bench.stall.show import machine_facts, plain_table, print_verdicts, titled

__all__ = ["present"]

_COLUMNS = ("way", "parts", "copies", "own work", "model", "measured", "min - max", "off",
            "waits: state", "gradients", "other", "slow-down", "bound", "")  # fmt: skip


def present(report: MultistepReport, console: Console) -> None:
    """Prints facts, one table for each length of a copy and share of gradients, and verdicts."""
    options = report.options
    for line in (
        *machine_facts(report.machine, report.folder, free_core=report.free_core),
        f"{report.size_bytes / 1e9:.3f} GB in about {report.tensors} tensors: {report.workload}",
        f"{options.repeats} saves of each number of parts, order drawn with seed {options.seed}; "
        f"{report.seconds:.0f} s",
        *report.labels(),
    ):
        console.print(line, soft_wrap=True)
    for found in report.found:
        console.print()
        title = (
            f"Milliseconds that a base holds training up: a copy takes {found.copy_steps:g} steps "
            f"(link of {found.link_bytes_per_s / 1e9:.3g} GB/s), gradients are {found.ratio} of "
            f"the state{_held(found.held_steps)}"
        )
        console.print(Text(titled(title, report.labels()), style="bold"), soft_wrap=True)
        console.print(_rows(found))
        for row in (*found.rows, *found.own):
            if row.error:
                console.print(f"  {row.way}, {row.parts or 'auto'}: {row.error}", soft_wrap=True)
        print_verdicts(report.verdicts(found), console)
    console.print()
    console.print(Text("In short", style="bold"))
    print_verdicts((report.summary(found, way) for found in report.found for way in WAYS), console)
    console.print()
    for line in _notes():
        console.print(line, soft_wrap=True)


def _rows(found: Measurement) -> Table:
    made = plain_table(_COLUMNS, words=("way", ""))
    for name in ("async", "lazy"):
        row = found.row(name)
        if row is not None:
            made.add_row(*_cells(found, row))
    for way in WAYS:
        for row in found.of(way):
            made.add_row(*_cells(found, row))
        row = found.row(way, AUTO)
        if row is not None:
            made.add_row(*_cells(found, row))
    return made


def _cells(found: Measurement, row: Row) -> tuple[str, ...]:
    stall = row.stall_s()
    assert stall is not None
    model_s = found.expected_s(row)
    has_parts = row.way in WAYS
    notes = []
    if has_parts and row.parts == AUTO:
        notes.append(f"everstep's choice: {row.chosen}")
    elif has_parts and (best := found.best_modelled(row.way)) and best[0] == row.parts:
        notes.append("the model's best")
    if model_s is not None and abs(stall.median - model_s) > allowed_s(model_s):
        notes.append("OFF")
    own_s = found.own_s(row.way, row.parts or row.chosen or 1)
    return (
        row.way,
        ("auto" if row.parts == AUTO else f"{row.parts}") if has_parts else "-",
        f"{1e3 * found.modelled_s(row):.1f}",
        "-" if own_s is None else f"{1e3 * own_s:.1f}",
        "-" if model_s is None else f"{1e3 * model_s:.1f}",
        f"{1e3 * stall.median:.1f}",
        f"{1e3 * stall.low:.1f} - {1e3 * stall.high:.1f}",
        "-" if model_s is None else f"{1e3 * (stall.median - model_s):+.1f}",
        _ms(row.spread(lambda save: save.causes.get("gate", 0.0))),
        _ms(row.spread(lambda save: save.causes.get("gradients", 0.0))),
        _ms(row.spread(lambda save: save.other_s)),
        _ms(row.spread(lambda save: save.slowdown_s)),
        f"{1e3 * found.bound_s(row):.1f}" if has_parts else "-",
        ", ".join(notes),
    )


def _ms(spread: Spread | None) -> str:
    return "-" if spread is None else f"{1e3 * spread.median:.1f}"


def _notes() -> list[str]:
    return [
        "copies: everstep.plan.multistep as the paper has it, errors mended: waiting for copies "
        "and nothing else, from the link's bandwidth, bytes, and the lengths of forward, backward "
        "and update while nothing is saved. own work: of the training thread, in as many parts, "
        "of another run through the same link: all that is no waiting. model: both, with "
        "the link copying during that work, and gradients of gockpt copied after their update. "
        "measured: what the training thread spends in the library, in calls and in hooks, from the "
        "beginning of a base until it is in host memory, and beyond what steps without a base "
        "take there; the median of the saves. state, gradients: waiting for copies of these; "
        "other: the work of the library itself. slow-down: the same by the clock on the wall, the "
        "steps next to as many without a save. bound: of copies alone, no way in so many equal "
        "parts does better. OFF: more than 15 % and more than 2 ms from the model.",
    ]


def _held(steps: int) -> str:
    return "" if steps == 1 else f"; gockpt_o keeps them for {steps} steps"
