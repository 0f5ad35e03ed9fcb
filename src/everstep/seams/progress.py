"""Progress of work that may take longer than a second.

A line on standard error after one second, then every three seconds. Failures to display never
interrupt the work.

Notices for the person who watches the training: records of the logger ``everstep``, or lines on
standard error.

Training must not fail because a line cannot be printed: standard error may be a file on a full
disk, a pipe without a reader, a closed terminal, or absent. Output that cannot be written is
dropped.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_log = logging.getLogger("everstep")

# ValueError: the stream is closed, or its encoding lacks a character.
_FAILURES = (OSError, ValueError)


def print_line(text: str) -> None:
    """Print a line on standard error; drop it if that fails."""
    print_line_to(sys.stderr, text)


def print_line_to(stream: Any, text: str) -> None:
    """Print a line on ``stream``; drop it if that fails.

    Args:
        stream: text stream, or None if the process was started without one. Then nothing is
            printed; ``print`` would use standard output.
    """
    if stream is not None:
        with contextlib.suppress(*_FAILURES):
            print(text, file=stream, flush=True)


def log_or_print(text: str, *, level: int = logging.INFO, stream: Any = None) -> None:
    """Report something to the person who watches the training.

    It goes to the logger ``everstep`` if the program has configured logging. Otherwise it is a line
    on standard error, unless it is only for debugging.

    Args:
        level: level of the record.
        stream: stream for the line; None for standard error. A process that is ending may have
            closed that.
    """
    if logging_is_configured():
        _log.log(level, "%s", text)
    elif level >= logging.INFO:
        print_line_to(stream or sys.stderr, f"everstep: {text}")


def logging_is_configured() -> bool:
    """Return True if some handler receives the records of the logger ``everstep``."""
    return _log.hasHandlers()


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
