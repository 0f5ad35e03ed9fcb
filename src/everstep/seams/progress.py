"""Progress of work that may take longer than a second.

On a terminal: a rich progress bar. Elsewhere: a line after one second, then every three seconds.
Both go to standard error; failures to display never interrupt the work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Literal, Protocol, cast

from everstep.seams.stderr import TolerantStderr, print_line

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Counted", "ProgressSink", "progress", "silent"]

_QUIET_S = 0.5
_LINE_FIRST_S = 1.0
_LINE_EVERY_S = 3.0


class ProgressSink(Protocol):
    """Receiver of progress reports."""

    def advance(self, amount: int) -> None:
        """Report ``amount`` more units (bytes or items) as done."""
        ...


class _Silent:
    def advance(self, amount: int) -> None:
        pass


class Counted:
    """Count progress without displaying it."""

    def __init__(self) -> None:
        self.count = 0

    def advance(self, amount: int) -> None:
        self.count += amount


silent: ProgressSink = _Silent()
"""Sink for callers that display nothing."""


class _Bar:
    def __init__(self, label: str, total: int, unit: Literal["bytes", "items"]) -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._start_s = time.monotonic()
        self._bar: Progress | None = None
        self._done = 0

    def advance(self, amount: int) -> None:
        self._done += amount
        if self._bar is None and time.monotonic() - self._start_s > _QUIET_S:
            self._bar = self._draw()
            self._task = self._bar.add_task(self._label, total=self._total or None)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def _draw(self) -> Progress:
        # Imported late: a keeper displays nothing, and should start without rich.
        from rich import progress as bars
        from rich.console import Console

        label = bars.TextColumn("{task.description}")
        bar = bars.BarColumn()
        columns: list[bars.ProgressColumn] = [label, bar]
        if self._unit == "bytes":
            columns += [bars.DownloadColumn(), bars.TransferSpeedColumn()]
        else:
            columns += [bars.MofNCompleteColumn()]
        columns += [bars.TimeRemainingColumn()]
        # rich's own console would end the process if standard error is a pipe without a reader.
        shown = Console(file=cast("IO[str]", TolerantStderr()))
        drawn = bars.Progress(*columns, console=shown, transient=True)
        drawn.start()
        return drawn

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Lines:
    def __init__(self, label: str, total: int, unit: Literal["bytes", "items"]) -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._start_s = self._last_s = time.monotonic()
        self._done = 0
        self._spoke = False

    def advance(self, amount: int) -> None:
        self._done += amount
        now_s = time.monotonic()
        if now_s - self._last_s > (_LINE_EVERY_S if self._spoke else _LINE_FIRST_S):
            self._last_s = now_s
            self._spoke = True
            far = f"{now_s - self._start_s:.0f} s"
            # The total may have been too low: never show more than 100 %.
            if self._total:
                far = f"{min(100, 100 * self._done // self._total)} %"
            print_line(f"{self._label}: {far}")

    def close(self) -> None:
        if self._spoke:
            took_s = time.monotonic() - self._start_s
            print_line(f"{self._label}: ended after {took_s:.1f} s")


@contextmanager
def progress(
    label: str, total: int, unit: Literal["bytes", "items"] = "bytes"
) -> Iterator[ProgressSink]:
    """Display the progress of the work in the ``with`` block.

    Args:
        label: name of the work, e.g. ``"resume"``.
        total: expected units, bytes or items; 0 if unknown.
        unit: kind of the units.
    """
    shown = _Bar(label, total, unit) if TolerantStderr().isatty() else _Lines(label, total, unit)
    try:
        yield shown
    finally:
        shown.close()
