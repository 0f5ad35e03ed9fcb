"""Output for people: a bar on a terminal or plain lines elsewhere; then the tables."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from everstep_bench.persist.report import BASELINE, COLUMNS, PersistReport, Row, Spread

__all__ = ["Display", "present", "progress_display"]

_LINE_EVERY_S = 5.0
_BUSY_CORES = 0.25
_HEADINGS = {
    "fresh": "Saving into fresh files",
    "recycled": "Saving over files that have their blocks already",
    "read": "Loading, uncached",
}


class Display(Protocol):
    """Receiver of the progress of a benchmark. Only called between timed runs."""

    def begin(self, what: str, total: int) -> None:
        """A part of ``total`` runs begins."""
        ...

    def advance(self, what: str) -> None:
        """A run is over; ``what`` comes next."""
        ...


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, now="")

    def begin(self, what: str, total: int) -> None:
        self._progress.reset(self._task, description=what, total=total, now="")
        self._progress.refresh()

    def advance(self, what: str) -> None:
        self._progress.update(self._task, advance=1, now=what)
        self._progress.refresh()


class _Lines:
    def __init__(self) -> None:
        self._start_s = self._last_s = time.monotonic()
        self._what = ""
        self._total = 0
        self._done = 0

    def begin(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._say(f"{what}: {total} runs" if total > 1 else what)

    def advance(self, what: str) -> None:
        self._done += 1
        if time.monotonic() - self._last_s >= _LINE_EVERY_S:
            self._say(f"{self._what}: {self._done} of {self._total}")

    def _say(self, text: str) -> None:
        self._last_s = time.monotonic()
        print(f"[{self._last_s - self._start_s:5.1f} s] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_display() -> Iterator[Display]:
    """A bar on a terminal, plain lines elsewhere; both on standard error."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    # No thread that draws: it would take its time from the runs that are measured.
    console = Console(file=sys.stderr)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
    ) as progress:
        yield _Bars(progress)


def present(report: PersistReport, console: Console) -> None:
    """Prints facts, tables and verdicts."""
    for line in _facts(report):
        console.print(line)
    for column in COLUMNS:
        rows = report.in_column(column)
        if rows:
            console.print()
            console.print(_table(report, _HEADINGS[column], rows))
            for line in _details(rows):
                console.print(Text(line, style="dim"))
    console.print()
    for line in _notes(report):
        console.print(line)
    console.print()
    for verdict in report.verdicts():
        word, style = {True: ("met", "green"), False: ("not met", "red"), None: ("-", "dim")}[
            verdict.met
        ]
        console.print(Text.assemble((f"{word:8}", style), f"{verdict.target}: {verdict.figure}"))


def _facts(report: PersistReport) -> list[str]:
    machine = report.machine
    return [
        f"{machine.cpu}, {machine.cores} cores; torch {machine.torch}, Python {machine.python}, "
        f"{machine.system}",
        f"{report.folder} on {machine.device}, {machine.file_system}, "
        f"{machine.free_bytes / 1e9:.0f} GB free"
        + ("" if machine.direct else "; no O_DIRECT here: everything is buffered"),
        f"{report.size_gb:.3f} GB: {report.state}",
        f"{report.rounds} rounds, order drawn with seed {report.seed}; {report.seconds:.0f} s",
    ]


def _table(report: PersistReport, title: str, rows: list[Row]) -> Table:
    reading = rows[0].column == "read"
    made = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline", title=title,
        title_justify="left", title_style="bold",
    )  # fmt: skip
    made.add_column("arm", no_wrap=True)
    baseline = "torch.load" if reading else BASELINE
    for heading in ("GB/s", "min - max", "CPU s/GB", "of limit", f"x {baseline}"):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.error is not None and not row.samples:
            made.add_row(row.name, "-", "", "", "", "")
            continue
        speed = report.gb_per_s(row)
        made.add_row(
            Text(row.name, style="bold" if row.role == "ours" else ""),
            _middle(speed, 2),
            f"{speed.low:.2f} - {speed.high:.2f}" if speed else "",
            _middle(report.cpu_s_per_gb(row), 3),
            _middle(report.of_limit(row), 2),
            _middle(report.of_baseline(row), 2),
        )
    return made


def _details(rows: list[Row]) -> list[str]:
    """Print the description of each arm, or why it did not run; the limit in one line."""
    lines = {}
    for row in rows:
        name = "raw" if row.role == "limit" else row.name
        lines[name] = f"  {name}: {row.error if row.error else row.detail}"
    return list(lines.values())


def _notes(report: PersistReport) -> list[str]:
    notes = [
        "Medians. GB are 10^9 bytes of tensors. Ratios: taken within each round, then the median. "
        "The limit is the raw setting with the best median.",
    ]
    ours = next((r for r in report.in_column("recycled") if r.role == "ours"), None)
    after = ours and ours.spread(lambda sample: sample.after_s)
    if after:
        notes.append(
            f"everstep, recycled: durable after the time that counts here; then {after.median:.2f} "
            "s of retention, which reads the new base back before it gives up the old one."
        )
    others = report.others_cores()
    if others > _BUSY_CORES:
        notes.append(
            f"The machine was not idle: other processes kept {others:.1f} of "
            f"{report.machine.cores} cores busy during the timed runs (load "
            f"{report.machine.load:.1f} before, {report.load_after:.1f} after). That slows every "
            "arm that needs a core, and the raw limit hardly."
        )
    return notes


def _middle(spread: Spread | None, digits: int) -> str:
    return "-" if spread is None else f"{spread.median:.{digits}f}"
