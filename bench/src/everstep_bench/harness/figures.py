"""Figures over rounds, rows of arms, targets, and all of it as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import PurePath
from typing import Any, Generic, Literal, TypeVar

Role = Literal["limit", "ideal", "control", "ours", "peer"]

_Block = TypeVar("_Block")
_Other = TypeVar("_Other")


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, median and greatest of some figures."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Return the spread of the known values; None if there are none."""
        known = [value for value in values if value is not None]
        return cls(min(known), statistics.median(known), max(known)) if known else None

    def as_json(self) -> dict[str, float]:
        """Return the three figures by name."""
        return {"min": self.low, "median": self.median, "max": self.high}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target and what was measured; ``met`` is None where it could not be."""

    target: str
    figure: str
    met: bool | None


def at_most(what: str, found: float | None, most: float, figure: str) -> Verdict:
    """Return the verdict on a figure that has an upper bound."""
    return Verdict(what, "-", None) if found is None else Verdict(what, figure, found <= most)


@dataclass(slots=True)
class Row(Generic[_Block]):
    """Figures of one arm.

    Attributes:
        detail: what exactly the arm does, in a few words.
        blocks: what was measured, by number of the round.
        error: why it has none, or no more.
    """

    name: str
    role: Role = "ours"
    detail: str = ""
    blocks: dict[int, _Block] = field(default_factory=dict)
    error: str | None = None

    def spread(self, figure: Callable[[_Block], float | None]) -> Spread | None:
        """Return one figure over the rounds; None where it is not known in any."""
        return Spread.of([figure(block) for block in self.blocks.values()])

    def median(self, figure: Callable[[_Block], float | None]) -> float | None:
        """Return the median of one figure over the rounds."""
        spread = self.spread(figure)
        return None if spread is None else spread.median

    def paired(
        self, others: Mapping[int, _Other], figure: Callable[[_Block, _Other], float | None]
    ) -> Spread | None:
        """Return a figure of two blocks that met the same machine in the same round."""
        both = sorted(self.blocks.keys() & others.keys())
        return Spread.of([figure(self.blocks[number], others[number]) for number in both])


def picked(source: object, names: str) -> dict[str, Any]:
    """Return some attributes by name; ``names`` has them with spaces between."""
    return {name: getattr(source, name) for name in names.split()}


def plain(value: Any) -> Any:
    """Return dataclasses, spreads, paths and containers as plain data."""
    if hasattr(value, "as_json"):
        return plain(value.as_json())
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value
