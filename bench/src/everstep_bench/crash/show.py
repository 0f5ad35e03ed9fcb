"""Output for people: facts, tables, verdicts."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table
from rich.text import Text

from everstep_bench.crash.interval import SaveCosts
from everstep_bench.crash.lives import Lives
from everstep_bench.crash.report import PEERS, CrashReport, CrashTable
from everstep_bench.stall.show import machine_facts, plain_table, print_verdicts, titled
from everstep_bench.step.options import NONE

__all__ = ["present"]

_COLUMNS = ("arm", "T_ckpt ms", "durable ms", "every", "steps/s", "of ideal", "model",
            "lost steps", "load ms", "from")  # fmt: skip


def present(report: CrashReport, console: Console) -> None:
    """Prints facts, one table for each distance of failures, and verdicts."""
    options = report.options
    for line in (
        *machine_facts(report.machine, report.folder, free_core=report.free_core),
        f"{report.size_bytes / 1e9:.3f} GB in {report.tensors} tensors: {report.workload}",
        f"{options.crashes} failures of each arm, their moments drawn with seed {options.seed}; "
        f"costs measured in {options.repeats} rounds; {report.seconds:.0f} s",
        *report.labels(),
    ):
        console.print(line, soft_wrap=True)
    for table in report.tables:
        console.print()
        title = f"A failure every {table.mtbf_s:g} s on average, each arm at its best interval"
        console.print(Text(titled(title, report.labels()), style="bold"), soft_wrap=True)
        console.print(_rows(report, table))
    console.print()
    for line in _notes(report):
        console.print(line, soft_wrap=True)
    console.print()
    print_verdicts(report.verdicts(), console)


def _rows(report: CrashReport, table: CrashTable) -> Table:
    made = plain_table(_COLUMNS, words=("arm", "from"))
    for lives in (table.ideal, *table.rows):
        made.add_row(*_cells(report, table, lives))
    return made


def _cells(report: CrashReport, table: CrashTable, lives: Lives) -> tuple[str | Text, ...]:
    ours = lives.arm not in (*PEERS, NONE, table.ideal.arm)
    name = Text(lives.arm, style="bold" if ours else "")
    if lives.error is not None:
        return name, lives.error, *[""] * (len(_COLUMNS) - 2)
    costs = report.costs.get(lives.arm)
    known = isinstance(costs, SaveCosts)
    share = table.share(lives)
    model = report.modelled_share(table, lives)
    lost = lives.lost()
    loads_s = lives.loads_s()
    sources = sorted({life.recovered.source for life in lives.lives[1:]})
    return (
        name,
        f"{1e3 * costs.save_s:.2f}" if isinstance(costs, SaveCosts) else "-",
        f"{1e3 * costs.durable_s:.1f}" if isinstance(costs, SaveCosts) else "-",
        f"{lives.every}" if known else "-",
        f"{lives.steps_per_s:.2f}",
        "-" if share is None else f"{100 * share:.1f} %",
        "-" if model is None else f"{100 * model:.1f} %",
        f"{statistics.mean(lost):.1f}" if lost else "-",
        f"{1e3 * statistics.mean(loads_s):.0f}" if loads_s else "-",
        ", ".join(sources) or "-",
    )


def _notes(report: CrashReport) -> list[str]:
    killed = "SIGKILL of the training process" + (
        "; its keeper goes on" if report.options.spare_keeper else " and of its keeper"
    )
    return [
        "T_ckpt: what a save takes from training: the time of its thread in the library, or the "
        "slow-down of steps where that is more. every: floor(sqrt(2 T_ckpt / "
        "p) / T_step), but one save is durable before the next begins; with a log, the interval "
        "that wastes the least, replay included. steps/s: useful steps, those that are there in "
        "the end, for each second of training and resuming. model: what the same formula "
        "promises. lost steps: that were completed, and had to be repeated, for each failure.",
        f"Real: training, saves, {killed}, resume() in a new process. Left out: what it takes to "
        "start that process. Made up: that something fails, and when. Page caches survive.",
    ]
