"""Progress of a bench or drill on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINE_EVERY_S = 5.0
_DRILL_LINE_EVERY_S = 10.0


class Display(Protocol):
    """Receiver of the progress of a benchmark. Only called between timed runs."""

    def begin(self, what: str, total: int) -> None:
        """A part of ``total`` runs begins."""
        ...

    def advance(self, what: str) -> None:
        """A run is over; ``what`` comes next."""
        ...


class Bar:
    """A bar on a terminal; see :class:`Lines` for its calls."""

    def __init__(self, progress: Progress, steps: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task("starting" if steps else "", total=steps, now="")

    def event(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(escape(text), highlight=False)

    def progress(self, name: str, step: int) -> None:
        """Show the position of a start of a drill."""
        self._progress.update(self._task, description=name, completed=step)

    def begin(self, what: str, total: int) -> None:
        """Begin again, with another part."""
        self._progress.reset(self._task, description=what, total=total, now="")
        self._progress.refresh()

    def advance(self, what: str) -> None:
        """Show that a run is over."""
        self._progress.update(self._task, advance=1, now=what)
        self._progress.refresh()


class Lines:
    """Lines with the seconds since the start; those that come often only now and then.

    Args:
        steps: of a drill; None: of a bench.
    """

    def __init__(self, steps: int | None) -> None:
        self._start_s = self._last_s = time.monotonic()
        self._every_s = _LINE_EVERY_S if steps is None else _DRILL_LINE_EVERY_S
        self._what = ""
        self._total = steps or 0
        self._done = 0

    def event(self, text: str) -> None:
        """Print a line."""
        self._last_s = time.monotonic()
        print(f"[{self._last_s - self._start_s:5.1f} s] {text}", file=sys.stderr, flush=True)

    def progress(self, name: str, step: int) -> None:
        """Print the position of a start of a drill."""
        self._sometimes(f"{name}: step {step} of {self._total}")

    def begin(self, what: str, total: int) -> None:
        """Print what begins."""
        self._what = what
        self._total = total
        self._done = 0
        self.event(f"{what}: {total} runs" if total > 1 else what)

    def advance(self, what: str) -> None:
        """Print how many runs are over."""
        self._done += 1
        self._sometimes(f"{self._what}: {self._done} of {self._total}")

    def _sometimes(self, text: str) -> None:
        """Print a line if there was none for a while."""
        if time.monotonic() - self._last_s >= self._every_s:
            self.event(text)


@contextlib.contextmanager
def progress_display(steps: int | None = None) -> Iterator[Bar | Lines]:
    """Show progress until the end of the block.

    Args:
        steps: of each start of a drill; None: it is a bench.
    """
    if not sys.stderr.isatty():
        yield Lines(steps)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        # In a bench no thread draws: it would take its time from the runs that are measured.
        auto_refresh=steps is not None,
    ) as progress:
        yield Bar(progress, steps)
