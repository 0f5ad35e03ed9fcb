"""What people see: a bar on a terminal or plain lines elsewhere; then the table."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from everstep.demo.plan import DemoPlan, Kill
from everstep.demo.report import DemoReport

__all__ = ["Display", "Position", "as_json", "introduce", "present", "progress_display"]

Position = tuple[int, float | None]
"""A run's last step and loss."""

_LINE_EVERY_S = 5.0
_PLAIN_WIDTH = 100
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
            runs = (("uninterrupted", alone), ("killed", victim))
            self._say(", ".join(self._where(name, *position) for name, position in runs))

    def _where(self, name: str, step: int, loss: float | None) -> str:
        return f"{name}: step {step} of {self._steps} {_loss(loss)}".rstrip()

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
        "two processes train it side by side: one undisturbed, one killed with SIGKILL "
        f"{len(plan.kills)} times:",
    ]
    kills = [
        f"  {number}. {kill.describe()}: {_meaning(kill)}"
        for number, kill in enumerate(plan.kills, 1)
    ]
    return lines + kills


def present(report: DemoReport, console: Console | None = None) -> None:
    """Prints the table and the verdict to standard output."""
    if console is None:
        console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    console.print(_table(report))
    console.print(
        "died at, back at: finished steps; back in: from the kill to the end of resume(), with "
        "the start of Python and torch",
        highlight=False,
    )
    if any(row.kill.keeper == "spared" for row in report.kills):
        console.print(
            "left: as seen right after the kill; a keeper that lives goes on writing",
            highlight=False,
        )
    for number, row in enumerate(report.kills, 1):
        claim = "exact" if row.exact else "not exact"
        console.print(
            f"recovery {number} says: {claim}, from {row.source}, {row.evidence}", highlight=False
        )
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
                "died": row.kill.died,
                "planned_step": row.kill.step,
                "planned_fraction": row.kill.fraction,
                "left": row.left.describe(),
                "files": list(row.left.files),
                "committed_step": row.left.committed,
                "held_step": row.left.held,
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
    table = Table(box=box.HORIZONTALS, padding=(0, 1, 0, 0))
    table.add_column("killed with\nSIGKILL at", no_wrap=True)
    table.add_column("who died", no_wrap=True)
    table.add_column("left")
    table.add_column("died\nat", justify="right")
    table.add_column("back\nat", justify="right")
    table.add_column("from")
    for heading in ("lost\nsteps", "resume\nin s", "back\nin s"):
        table.add_column(heading, justify="right")
    for row in report.kills:
        table.add_row(
            row.kill.describe().replace(", ", "\n"),
            row.kill.died.replace(" + ", "\n+ "),
            row.left.describe().replace("; ", "\n"),
            str(row.reached),
            str(row.recovered),
            row.source,
            str(row.lost),
            f"{row.resume_s:.2f}",
            f"{row.back_s:.1f}",
        )
    return table


def _meaning(kill: Kill) -> str:
    """What a kill stands for."""
    if kill.keeper == "spared":
        return "the trainer dies, its keeper lives"
    if kill.keeper == "dies":
        return "trainer and keeper die, as with their machine"
    return "the trainer dies"


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"loss {loss:.3f}"
