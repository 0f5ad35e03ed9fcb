"""Lines on standard error for the person who watches the training.

Training must not fail because a line cannot be printed: standard error may be a file on a full
disk, a pipe without a reader, a closed terminal, or absent. Output that cannot be written is
dropped.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

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
