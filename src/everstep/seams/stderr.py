"""Lines on standard error for the person who watches the training.

Training must not fail because a line cannot be printed: standard error may be a file on a full
disk, a pipe without a reader, a closed terminal, or absent. Output that cannot be written is
dropped.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, cast

__all__ = ["TolerantStderr", "print_line", "print_line_to"]

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


class TolerantStderr:
    """Standard error as a stream whose operations never raise, for a library that draws on it."""

    def __init__(self) -> None:
        # A rich progress bar that is already active has replaced sys.stderr by a proxy.
        self._stream: Any = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self.encoding = getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Write as much of ``text`` as possible and report all of it as written."""
        with contextlib.suppress(AttributeError, *_FAILURES):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with contextlib.suppress(AttributeError, *_FAILURES):
            self._stream.flush()

    def isatty(self) -> bool:
        """Return True if the stream is an open terminal."""
        with contextlib.suppress(AttributeError, *_FAILURES):
            return bool(self._stream.isatty())
        return False

    def fileno(self) -> int:
        """Return the descriptor; raises, like any stream, if there is none."""
        return cast("int", self._stream.fileno())
