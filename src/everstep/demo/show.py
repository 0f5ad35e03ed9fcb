"""Progress lines on standard error, the result on standard output."""

from __future__ import annotations

import sys
import time

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from everstep.demo.plan import DemoPlan, Kill
from everstep.demo.report import DemoReport

Position = tuple[int, float | None]
"""A run's last step and its loss."""

_LINE_EVERY_S = 5.0
_PLAIN_WIDTH = 100
_DIFFERENCES_SHOWN = 12


class Display:
    """Progress of both runs, one line every few seconds.

    Args:
        steps: of either run.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._start_s = self._last_s = time.monotonic()

    def event(self, text: str) -> None:
        """Print one line."""
        after_s = time.monotonic() - self._start_s
        print(f"[{after_s:5.1f} s] {text}", file=sys.stderr, flush=True)

    def progress(self, alone: Position, victim: Position) -> None:
        """Print the positions of both runs, if the last line is some seconds old."""
        if time.monotonic() - self._last_s >= _LINE_EVERY_S:
            self._last_s = time.monotonic()
            runs = (("uninterrupted", *alone), ("killed", *victim))
            texts = [
                f"{name}: step {step} of {self._steps}{_loss(loss)}" for name, step, loss in runs
            ]
            self.event(", ".join(texts))


def introduce(plan: DemoPlan) -> list[str]:
    """Return the lines that announce the plan."""
    training = plan.training
    return [
        f"a GPT of {plan.model.params:,} parameters, {training.steps} steps of AdamW on Python's "
        f"own source text; method {plan.method}, a base every {plan.every} steps; "
        f"seed {training.seed}",
        "two processes train it side by side: one undisturbed, one killed with SIGKILL "
        f"{len(plan.kills)} times:",
        *(f"  {n}. {kill.describe()}: {_meaning(kill)}" for n, kill in enumerate(plan.kills, 1)),
    ]


def present(report: DemoReport, console: Console | None = None) -> None:
    """Print the table and the verdict."""
    console = console or Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    console.print(_table(report))
    lines = [
        "died at, back at: finished steps; back in: from the kill to the end of resume(), with "
        "the start of Python and torch"
    ]
    if any(row.kill.keeper == "spared" for row in report.kills):
        lines.append("left: as seen right after the kill; a keeper that survives keeps writing")
    for number, row in enumerate(report.kills, 1):
        claim = "exact" if row.exact else "not exact"
        lines.append(f"recovery {number} is {claim}, from {row.source}, {row.evidence}")
    lines += [f"compared: {line}" for line in report.compared]
    lines.append(
        f"loss {report.loss_first:.4f} -> {report.loss_last:.4f} in "
        f"{report.plan.training.steps} steps; {report.seconds:.1f} s in all"
    )
    differences = report.differences
    lines.append(
        f"[bold red]DIFFERENT[/]: {len(differences)} differences (uninterrupted != killed)"
        if differences
        else f"[bold green]IDENTICAL[/]: the run that was killed {len(report.kills)} times and the "
        "run that was not end in the same bits"
    )
    for item in differences[:_DIFFERENCES_SHOWN]:
        lines.append(f"  {escape(f'{item.witness}: {item.name}: {item.detail}')}")
    if len(differences) > _DIFFERENCES_SHOWN:
        lines.append(f"  and {len(differences) - _DIFFERENCES_SHOWN} more")
    for line in lines:
        console.print(line, highlight=False)


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


def _loss(loss: float | None) -> str:
    return "" if loss is None else f" loss {loss:.3f}"


def _meaning(kill: Kill) -> str:
    return {
        "spared": "the trainer dies, its keeper lives",
        "dies": "trainer and keeper die, as with their machine",
        "none": "the trainer dies",
    }[kill.keeper]
