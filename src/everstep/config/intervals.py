"""How far apart bases are, and how much of a log stays: in steps, time and bytes, as people write
them."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from everstep.config.given import checked, is_int, is_number, plain
from everstep.errors import OptionError

__all__ = ["Every", "History", "bytes_hint"]

_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {
    **{unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}
_UNIT_WORDS = {
    **{unit: unit for unit in _UNITS_S},
    "secs": "s",
    "second": "s",
    "seconds": "s",
    "mins": "min",
    "minute": "min",
    "minutes": "min",
    "hr": "h",
    "hrs": "h",
    "hour": "h",
    "hours": "h",
    "day": "d",
    "days": "d",
}


@checked
@dataclass(frozen=True, slots=True)
class Every:
    """When a base is taken: every so many steps or seconds, as measured costs say, or only on
    demand.

    Attributes:
        steps, seconds: from base to base.
        auto: as often as wastes the least time, re-estimated while training goes on.
        mtbf_s: for ``auto``: seconds of training between two failures. None: one in a day, until
            those of the run say otherwise.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is not None) + (self.seconds is not None) + bool(self.auto) > 1:
            raise OptionError("Every: steps, seconds and auto exclude each other")
        if self.steps is not None and (not is_int(self.steps) or self.steps < 1):
            raise OptionError(f"every={self.steps!r}: bases are at least one step apart")
        if self.seconds is not None and not (is_number(self.seconds) and 0 < self.seconds < 1e12):
            raise OptionError(
                f"Every.seconds must be more than 0, and less than 1e12, not {self.seconds!r}"
            )
        if self.mtbf_s is not None and not (
            self.auto and is_number(self.mtbf_s) and 0 < self.mtbf_s < 1e12
        ):
            raise OptionError(
                f"Every.mtbf_s must be seconds, and is for auto=True only, not {self.mtbf_s!r}"
            )

    @property
    def in_words(self) -> str:
        """``"every 10 steps"``."""
        if self.steps is not None:
            return "every step" if self.steps == 1 else f"every {self.steps} steps"
        if self.seconds is not None:
            return f"every {self.seconds:g} s"
        return "every=auto" if self.auto else "on save() only"

    @classmethod
    def parse(cls, value: int | str | Every | None) -> Every:
        """Reads ``100``, ``"10min"``, ``"auto"`` or None (only :meth:`Checkpointer.save` takes
        bases).

        Raises:
            OptionError: for anything else.
        """
        if value is None or isinstance(value, Every):
            return value or cls()
        number = plain(value)
        if is_int(number):
            return cls(steps=number)
        if isinstance(value, str):
            if value.strip() == "auto":
                return cls(auto=True)
            match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", value)
            if match and match[2] in _UNITS_S and float(match[1]) > 0:
                return cls(seconds=float(match[1]) * _UNITS_S[match[2]])
        raise OptionError(f"every={value!r} is not an interval", hint=_interval_hint(value))

    def due(self, step: int, since_last_s: float) -> bool:
        """Whether a base is due at the end of ``step``; not for ``auto``."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and since_last_s >= self.seconds


@dataclass(frozen=True, slots=True)
class History:
    """How much of the log stays, beyond what the bases need that are kept.

    Attributes:
        age_s: segments that are no older; infinite: all of them.
        size_bytes: the newest segments, up to so many bytes.
    """

    age_s: float = 0.0
    size_bytes: int = 0

    @property
    def is_more(self) -> bool:
        """Whether anything stays for the sake of the log alone."""
        return self.age_s > 0 or self.size_bytes > 0

    @property
    def is_by_age(self) -> bool:
        """Whether it depends on how old a segment is."""
        return 0 < self.age_s < math.inf

    @classmethod
    def parse(cls, text: str) -> History:
        """What ``"last"``, ``"all"``, ``"2h"``, ``"50GB"`` mean.

        Raises:
            OptionError: for anything else.
        """
        if text in ("last", "all"):
            return cls(age_s=math.inf if text == "all" else 0.0)
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", str(text))
        amount = float(match[1]) if match else 0.0
        if match and amount and match[2] in _UNITS_S:
            return cls(age_s=amount * _UNITS_S[match[2]])
        if match and amount and match[2] in _UNITS_BYTES:
            return cls(size_bytes=round(amount * _UNITS_BYTES[match[2]]))
        raise OptionError(
            f"history={text!r} says not how much of the log stays",
            hint='"last", "all", a time as "30min", "2h", "7d", or a size as "50GB", "20GiB"',
        )


def bytes_hint(value: object) -> str | None:
    """The number that a size in words stands for, if it is one."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", str(value))
    if match is None or match[2] not in _UNITS_BYTES:
        return None
    return f"did you mean {round(float(match[1]) * _UNITS_BYTES[match[2]])}?"


def _interval_hint(value: object) -> str:
    """What was probably meant by what is no interval, and what would be one."""
    known = 'steps as an int (every=100), time as "30s", "10min", "2h", or "auto"'
    if not isinstance(value, str):
        return known
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)?\s*([A-Za-z]+)\.?\s*", value)
    if match is None:
        return known
    words = ["auto"] if match[1] is None else list(_UNIT_WORDS)
    found = difflib.get_close_matches(match[2].lower(), words, n=1, cutoff=0.75)
    if not found:
        return known
    guess = "auto" if match[1] is None else match[1] + _UNIT_WORDS[found[0]]
    if guess == value:  # it is well written, but nothing
        return known
    return f'did you mean "{guess}"? {known}'
