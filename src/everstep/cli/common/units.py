"""Quantities as people write them: ``14GB``, ``3GB/s``, ``4h``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from everstep.config.given import nearest
from everstep.errors import OptionError

__all__ = ["parse_bytes", "parse_bytes_per_s", "parse_seconds", "seconds_in_words"]

_BYTES: dict[str, float] = {"B": 1.0, "KB": 1e3}  # kB is the right one, KB what people write
_BYTES |= {prefix + "B": 1000.0**power for power, prefix in enumerate("kMGTP", start=1)}
_BYTES |= {prefix + "iB": 1024.0**power for power, prefix in enumerate("KMGTP", start=1)}
_RATES = {unit + "/s": size for unit, size in _BYTES.items()}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_SECONDS |= {"min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*")
_BITS = re.compile(r"[KMGTP]i?b(ps|/s)?|[kKMGTP]?i?[Bb]its?(ps|/s)?")
# Prefixes of spelled-out units.
_SPELLED = {"hr": "h", "hour": "h", "minute": "min", "second": "s", "day": "d"}
_SPELLED |= {"mil": "ms", "mic": "us", "\N{MICRO SIGN}": "us", "\N{GREEK SMALL LETTER MU}": "us"}


def parse_bytes(name: str, text: str) -> float:
    """Parse ``"14GB"`` (powers of 1000), ``"12GiB"`` (of 1024), ``"3000"``; return bytes.

    Args:
        name: name of the option, for the error.
        text: text to parse.

    Raises:
        OptionError: for anything else, with the closest correct spelling.
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
    if match is None:
        raise OptionError(f"{name} {text!r} is not {what}", hint=f"like {example}")
    number = float(match[1])
    unit = match[2]
    scale = units.get(unit, 1.0 if not unit else None)
    if scale is None:
        hint = _meant(match[1], unit, units) or f"like {example}"
        raise OptionError(f"{name} {text!r} is not {what}", hint=hint)
    value = number * scale
    if not 0 < value < math.inf:
        raise OptionError(f"{name} {text!r} must be more than nothing, and finite")
    return value


def _meant(number: str, unit: str, units: Mapping[str, float]) -> str | None:
    """Return the correct spelling of the unit that was probably meant."""
    rate = "/s" if "B/s" in units else ""
    if units is not _SECONDS and _BITS.fullmatch(unit):
        return f"bytes, not bits: 8Gb{rate} is written 1GB{rate}"
    folded = {known.lower(): known for known in units}
    bare = unit.removesuffix("ps").removesuffix("/s")
    for guess in (unit, unit + "B" + rate, bare + rate):
        if guess.lower() in folded:
            return f"did you mean {number}{folded[guess.lower()]}?"
    if units is _SECONDS:
        for word, short in _SPELLED.items():
            if unit.lower().startswith(word):
                return f"did you mean {number}{short}?"
    close = nearest(unit, units) or nearest(unit.lower(), units)
    if close is None or close[0].lower() != unit[0].lower():
        # Another prefix is another size: do not guess it.
        return None
    return f"did you mean {number}{close}?"
