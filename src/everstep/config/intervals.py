"""Base intervals and log history, parsed from text such as ``"10min"``, ``"2h"`` or ``"50GB"``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from everstep.config.given import checked, is_int, is_number, plain
from everstep.errors import OptionError

_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {
    **{unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}
_INTERVALS = 'steps as an int (every=100), time as "30s", "10min", "2h", or "auto"'


@checked
@dataclass(frozen=True, slots=True)
class Every:
    """Interval between bases: in steps, in seconds, chosen automatically, or on demand only.

    Attributes:
        steps, seconds: interval between two bases.
        auto: choose the interval that wastes the least time, from costs measured while training
            runs.
        mtbf_s: for ``auto``: mean training time between two failures, in seconds. None: one day,
            until the run has recorded failures of its own.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is not None) + (self.seconds is not None) + bool(self.auto) > 1:
            raise OptionError("Every: steps, seconds and auto exclude each other")
        if self.steps is not None and (not is_int(self.steps) or self.steps < 1):
            raise OptionError(f"every={self.steps!r}: the interval must be at least one step")
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
        """The interval as text, e.g. ``"every 10 steps"``."""
        if self.steps is not None:
            return "every step" if self.steps == 1 else f"every {self.steps} steps"
        if self.seconds is not None:
            return f"every {self.seconds:g} s"
        return "every=auto" if self.auto else "on save() only"

    @classmethod
    def parse(cls, value: int | str | Every | None) -> Every:
        """Parse ``100``, ``"10min"``, ``"auto"`` or None (bases on :meth:`Checkpointer.save` only).

        Raises:
            OptionError: for any other value.
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
        raise OptionError(f"every={value!r} is not an interval", hint=_INTERVALS)

    def due(self, step: int, since_last_s: float) -> bool:
        """Return True if a base is due at the end of ``step``. Not used with ``auto``."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and since_last_s >= self.seconds


@dataclass(frozen=True, slots=True)
class History:
    """Log history to keep in addition to the segments that the kept bases need.

    Attributes:
        age_s: keep segments up to this age, in seconds; infinite: keep all.
        size_bytes: keep the newest segments up to this total size.
    """

    age_s: float = 0.0
    size_bytes: int = 0

    @property
    def is_more(self) -> bool:
        """True if segments are kept that no kept base needs."""
        return self.age_s > 0 or self.size_bytes > 0

    @property
    def is_by_age(self) -> bool:
        """True if the age of a segment decides."""
        return 0 < self.age_s < math.inf

    @classmethod
    def parse(cls, text: str) -> History:
        """Parse ``"last"``, ``"all"``, a time such as ``"2h"`` or a size such as ``"50GB"``.

        Raises:
            OptionError: for any other text.
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
            f"history={text!r} is not a log history",
            hint='"last", "all", a time as "30min", "2h", "7d", or a size as "50GB", "20GiB"',
        )


def bytes_hint(value: object) -> str | None:
    """Suggest the number of bytes for a size given as text, if it is one."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", str(value))
    if match is None or match[2] not in _UNITS_BYTES:
        return None
    return f"did you mean {round(float(match[1]) * _UNITS_BYTES[match[2]])}?"
