"""What people see: a bar on a terminal or plain lines elsewhere; then the table."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from everstep.bench.demo.plan import DemoPlan
from everstep.bench.demo.report import DemoReport

__all__ = ["Display", "Position", "as_json", "introduce", "present", "progress_display"]

Position = tuple[int, float | None]
"""A run's last step and loss."""

_LINE_EVERY_S = 5.0
_PLAIN_WIDTH = 118
_DIFFERENCES_SHOWN = 12


class Display(Protocol):
    """Where the supervisor shows how far it is."""

    def event(self, text: str) -> None:
        """Something happened that is worth a line."""
        ...

    def progress(self, alone: Position, victim: Position) -> None:
        """Where both runs are; called often."""
        ...


class _Bars:
    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._alone = progress.add_task("uninterrupted", total=steps, loss="")
        self._victim = progress.add_task("killed", total=steps, loss="")

    def event(self, text: str) -> None:
        self._progress.console.print(escape(text))

    def progress(self, alone: Position, victim: Position) -> None:
        for task, (step, loss) in ((self._alone, alone), (self._victim, victim)):
            self._progress.update(task, completed=step, loss=_loss(loss))


class _Lines:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._start_s = self._last_s = time.monotonic()

    def event(self, text: str) -> None:
        self._say(text)

    def progress(self, alone: Position, victim: Position) -> None:
        if time.monotonic() - self._last_s >= _LINE_EVERY_S:
            self._last_s = time.monotonic()
            self._say(
                f"uninterrupted: step {alone[0]} of {self._steps} {_loss(alone[1])}; "
                f"killed: step {victim[0]} {_loss(victim[1])}"
            )

    def _say(self, text: str) -> None:
        after_s = time.monotonic() - self._start_s
        print(f"[{after_s:5.1f} s] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_display(steps: int) -> Iterator[Display]:
    """Bars on a terminal, plain lines elsewhere; both on standard error."""
    if not sys.stderr.isatty():
        yield _Lines(steps)
        return
    columns = (
        TextColumn("{task.description:13}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bars(progress, steps)


def introduce(plan: DemoPlan) -> list[str]:
    """What is going to happen, line by line."""
    lines = [
        f"a GPT of {plan.model.params:,} parameters, {plan.steps} steps of AdamW on Python's own "
        f"source text; method {plan.method}, a base every {plan.every} steps; seed {plan.seed}",
        "two processes train it side by side from that seed: one undisturbed, one killed "
        f"{len(plan.kills)} times with SIGKILL:",
    ]
    return lines + [f"  {number}. {kill.describe()}" for number, kill in enumerate(plan.kills, 1)]


def present(report: DemoReport, console: Console | None = None) -> None:
    """Prints the table and the verdict to standard output."""
    if console is None:
        console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    console.print(_table(report))
    for line in report.verdict.compared:
        console.print(f"compared: {line}", highlight=False)
    console.print(
        f"loss {report.loss_first:.4f} -> {report.loss_last:.4f} in {report.plan.steps} steps; "
        f"{report.seconds:.1f} s in all",
        highlight=False,
    )
    if report.verdict.identical:
        console.print(
            "[bold green]IDENTICAL[/]: the run that was killed "
            f"{len(report.kills)} times and the run that was not end in the same bits"
        )
        return
    differences = report.verdict.differences
    console.print(
        f"[bold red]DIFFERENT[/]: {len(differences)} differences (uninterrupted != killed)"
    )
    for item in differences[:_DIFFERENCES_SHOWN]:
        console.print(f"  {escape(f'{item.witness}: {item.name}: {item.detail}')}", highlight=False)
    if len(differences) > _DIFFERENCES_SHOWN:
        console.print(f"  and {len(differences) - _DIFFERENCES_SHOWN} more")


def as_json(report: DemoReport) -> dict[str, Any]:
    """The report as plain data, for ``--json``."""
    plan = report.plan
    return {
        "identical": report.verdict.identical,
        "seed": plan.seed,
        "steps": plan.steps,
        "every": plan.every,
        "method": plan.method,
        "params": plan.model.params,
        "kills": [
            {
                "where": row.kill.where,
                "planned_step": row.kill.step,
                "planned_fraction": row.kill.fraction,
                "left_on_disk": row.left.describe(),
                "files": list(row.left.files),
                "committed_step": row.left.committed,
                "reached_step": row.reached,
                "recovered_step": row.recovered,
                "lost_steps": row.lost,
                "resume_s": row.resume_s,
                "back_s": row.back_s,
                "exact": row.exact,
                "evidence": row.evidence,
                "source": row.source,
            }
            for row in report.kills
        ],
        "compared": list(report.verdict.compared),
        "differences": [
            {"witness": item.witness, "name": item.name, "detail": item.detail}
            for item in report.verdict.differences
        ],
        "loss_first": report.loss_first,
        "loss_last": report.loss_last,
        "seconds": report.seconds,
    }


def _table(report: DemoReport) -> Table:
    table = Table(title=f"{len(report.kills)} kills, {len(report.kills)} resumes")
    table.add_column("killed with SIGKILL")
    table.add_column("left on disk")
    for heading in (
        "step\nreached",
        "recovered\nstep",
        "steps\nlost",
        "resume\ns",
        "kill to\nresumed s",
    ):
        table.add_column(heading, justify="right")
    table.add_column("claim")
    for row in report.kills:
        table.add_row(
            row.kill.describe().replace(", ", "\n"),
            row.left.describe().replace(": ", "\n"),
            str(row.reached),
            str(row.recovered),
            str(row.lost),
            f"{row.resume_s:.2f}",
            f"{row.back_s:.1f}",
            f"{'exact' if row.exact else 'not exact'}\n{row.source}",
        )
    return table


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"loss {loss:.3f}"
