"""Text for people: tables, labels, sizes, times. Names from a run folder cannot control the
terminal.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

LINE_CHARS_MAX = 4000
_NAME_CHARS_MAX = 240
_PIPE_COLUMNS = 10_000  # a program that reads lines must not get folded ones


def console() -> Console:
    """Return a console on standard output; wide enough for every line if it is a pipe."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    width = _PIPE_COLUMNS if piped else None
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=False, width=width)


def plain(text: str, chars_max: int = _NAME_CHARS_MAX) -> str:
    """Return ``text`` without terminal control characters, shortened to ``chars_max``.

    Names come from the run folder, which is not trusted: escapes, line ends and direction marks are
    spelled out.
    """
    if len(text) > chars_max:
        text = text[: chars_max - 3] + "..."
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def label(text: str, style: str = "", chars_max: int = _NAME_CHARS_MAX) -> Text:
    """Return ``text`` for a table or tree: :func:`plain`, and never parsed as markup."""
    return Text(plain(text, chars_max), style=style, overflow="fold")


def table(columns: Sequence[str], *, right: Collection[str] = ()) -> Table:
    """Return an empty table in the style of all verbs; lines are never folded in a pipe.

    Args:
        columns: titles.
        right: columns of numbers, which are never folded.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    for column in columns:
        number = column in right
        made.add_column(
            column, justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    return made


def in_words(size_bytes: int) -> str:
    """Return a size for people: ``"1.5 GB"``, in powers of 1000 as in all messages and options."""
    return decimal(size_bytes) if size_bytes >= 1000 else f"{size_bytes} B"


def count_of(count: int, what: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``"1 base"``, ``"3 bases"``."""
    return f"{count:,} {what if count == 1 else plural or what + 's'}"


def when(unix_s: float | None) -> str:
    """Return a time for people, in this machine's time zone; ``"?"`` if it is missing or
    invalid.
    """
    if unix_s is None:
        return "?"
    try:
        moment = datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc)
        return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "?"
