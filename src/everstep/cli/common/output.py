"""Text for people: tables, labels, sizes, times. Names from a run folder cannot control the
terminal.

Quantities as people write them: ``14GB``, ``3GB/s``, ``4h``.
"""

from __future__ import annotations

import datetime
import math
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from everstep.errors import OptionError

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


def say(out: Console, text: str, style: str = "") -> None:
    """Print a line that may be long: up to 4000 characters, not folded."""
    out.print(label(text, style, LINE_CHARS_MAX), soft_wrap=True)


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


def left_out(out: Console, count: int, most: int) -> None:
    """Print how many of ``count`` rows were left out, if only ``most`` were shown."""
    if count > most:
        out.print(f"... and {count - most:,} more; --json has them all")


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


_BYTES: dict[str, float] = {"B": 1.0, "KB": 1e3}  # kB is the right one, KB what people write
_BYTES |= {prefix + "B": 1000.0**power for power, prefix in enumerate("kMGTP", start=1)}
_BYTES |= {prefix + "iB": 1024.0**power for power, prefix in enumerate("KMGTP", start=1)}
_RATES = {unit + "/s": size for unit, size in _BYTES.items()}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_SECONDS |= {"min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*")


def parse_bytes(name: str, text: str) -> float:
    """Parse ``"14GB"`` (powers of 1000), ``"12GiB"`` (of 1024), ``"3000"``; return bytes.

    Args:
        name: name of the option, for the error.
        text: text to parse.

    Raises:
        OptionError: for anything else.
    """
    return _parse(name, text, "a size", _BYTES, example="14GB or 12GiB")


def parse_bytes_per_s(name: str, text: str) -> float:
    """Parse ``"3GB/s"``, ``"500MiB/s"`` as :func:`parse_bytes` does; return bytes per second."""
    return _parse(name, text, "a bandwidth", _RATES, example="3GB/s or 500MiB/s")


def parse_seconds(name: str, text: str) -> float:
    """Parse ``"30s"``, ``"5min"``, ``"4h"``, ``"0.2"`` as :func:`parse_bytes` does; return
    seconds.
    """
    return _parse(name, text, "a duration", _SECONDS, example="30s, 5min or 4h")


def seconds_in_words(seconds: float) -> str:
    """Return a duration for people: ``"14.3 min"``, ``"50 ms"``."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _parse(name: str, text: str, what: str, units: Mapping[str, float], example: str) -> float:
    match = _NUMBER.fullmatch(text)
    scale = None if match is None else {**units, "": 1.0}.get(match[2])
    if match is None or scale is None:
        raise OptionError(f"{name} {text!r} is not {what}", hint=f"like {example}")
    value = float(match[1]) * scale
    if not 0 < value < math.inf:
        raise OptionError(f"{name} {text!r} must be more than nothing, and finite")
    return value
