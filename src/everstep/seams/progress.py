"""Progress of work that may take longer than a second.

A line on standard error after one second, then every three seconds. Failures to display never
interrupt the work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from everstep.seams.stderr import print_line

_LINE_FIRST_S = 1.0
_LINE_EVERY_S = 3.0


class ProgressSink(Protocol):
    """Receiver of progress reports."""

    def advance(self, amount: int) -> None:
        """Report ``amount`` more units (bytes or items) as done."""
        ...


class Counted:
    """Count progress without displaying it."""

    def __init__(self) -> None:
        self.count = 0

    def advance(self, amount: int) -> None:
        self.count += amount


silent: ProgressSink = Counted()
"""Sink for callers that display nothing."""


class _Lines:
    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
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
def progress(label: str, total: int) -> Iterator[ProgressSink]:
    """Display the progress of the work in the ``with`` block.

    Args:
        label: name of the work, e.g. ``"resume"``.
        total: expected units, bytes or items; 0 if unknown.
    """
    shown = _Lines(label, total)
    try:
        yield shown
    finally:
        shown.close()
