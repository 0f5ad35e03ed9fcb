"""Progress of a bench on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINE_EVERY_S = 5.0


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


class Lines:
    """Lines with the seconds since the start; those that come often only now and then."""

    def __init__(self, every_s: float = _LINE_EVERY_S) -> None:
        self._start_s = self._last_s = time.monotonic()
        self._every_s = every_s
        self._what = ""
        self._total = 0
        self._done = 0

    def begin(self, what: str, total: int) -> None:
        """Print what begins."""
        self._what = what
        self._total = total
        self._done = 0
        self.say(f"{what}: {total} runs" if total > 1 else what)

    def advance(self, what: str) -> None:
        """Print how many runs are over."""
        self._done += 1
        self.say_sometimes(f"{self._what}: {self._done} of {self._total}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._last_s = time.monotonic()
        print(f"[{self._last_s - self._start_s:5.1f} s] {text}", file=sys.stderr, flush=True)

    def say_sometimes(self, text: str) -> None:
        """Print a line if there was none for a while."""
        if time.monotonic() - self._last_s >= self._every_s:
            self.say(text)


@contextlib.contextmanager
def progress_display() -> Iterator[Display]:
    """Show progress until the end of the block."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    # No thread that draws: it would take its time from the runs that are measured.
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        auto_refresh=False,
    ) as progress:
        yield _Bars(progress)
