"""Quantities as people write them: ``14GB``, ``3GB/s``, ``4h``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from everstep.errors import OptionError

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
