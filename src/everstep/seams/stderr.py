"""Lines on standard error, for whoever watches the training.

They are for people, and training is not ended by one that cannot be printed: standard error may be
on a disk that is full, a pipe that nobody reads any more, a terminal that was hung up, closed, or
none at all. What it cannot take is dropped; there is nobody to be told.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, cast

__all__ = ["TolerantStderr", "print_line", "print_line_to"]

_FAILURES = (OSError, ValueError)  # the latter: it is closed, or has no such character


def print_line(text: str) -> None:
    """Prints a line on standard error, or nothing where that fails."""
    print_line_to(sys.stderr, text)


def print_line_to(stream: Any, text: str) -> None:
    """Prints a line there, or nothing where that fails.

    Args:
        stream: None, as standard error is of a process that began without one: nothing is printed.
            ``print`` itself would take standard output.
    """
    if stream is not None:
        with contextlib.suppress(*_FAILURES):
            print(text, file=stream, flush=True)


class TolerantStderr:
    """Standard error as it is now, for a library that draws on it: nothing of it fails."""

    def __init__(self) -> None:
        # A bar that is drawn already has put something of its own in the place of the stream.
        self._stream: Any = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self.encoding = getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Writes as much of ``text`` as goes; the caller hears that it was all."""
        with contextlib.suppress(AttributeError, *_FAILURES):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As of any stream."""
        with contextlib.suppress(AttributeError, *_FAILURES):
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal: none is where there is no stream, or it is closed."""
        with contextlib.suppress(AttributeError, *_FAILURES):
            return bool(self._stream.isatty())
        return False

    def fileno(self) -> int:
        """As of any stream: whoever asks for it knows that a stream may have none."""
        return cast("int", self._stream.fileno())
