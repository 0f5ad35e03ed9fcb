"""The outcome: rows, ratios, targets; all of it as plain data.

A ratio of two arms is taken within each round, where both met the same machine, and the
median over the rounds counts. The limit of a column is the one of its settings with the best
median, in every round the same: not the luckiest sample of many.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep_bench.persist.arms import Arm, Column, Role
from everstep_bench.persist.machine import Machine
from everstep_bench.persist.meter import Sample

__all__ = ["BASELINE", "COLUMNS", "PersistReport", "Row", "Spread", "Verdict"]

COLUMNS: tuple[Column, ...] = ("fresh", "recycled", "read")
BASELINE = "torch.save"

_FRESH_MIN = 0.9
_RECYCLED_MIN = 0.9
_BASELINE_MIN = 2.5
_CPU_S_PER_GB_MAX = 0.2
_READ_MIN = 0.8


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, median and greatest of some figures."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None for no figures."""
        if not values:
            return None
        return cls(min(values), statistics.median(values), max(values))

    def as_json(self) -> dict[str, float]:
        """The three figures by name."""
        return {"min": self.low, "median": self.median, "max": self.high}


@dataclass(slots=True)
class Row:
    """Figures of one arm.

    Attributes:
        samples: by number of the round.
        error: why it has none, or no more.
    """

    name: str
    column: Column
    role: Role
    detail: str
    samples: dict[int, Sample] = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def of(cls, arm: Arm) -> Row:
        """An empty row for ``arm``."""
        return cls(arm.name, arm.column, arm.role, arm.detail)

    def spread(self, figure: Callable[[Sample], float]) -> Spread | None:
        """Of one figure over the rounds."""
        return Spread.of([figure(sample) for sample in self.samples.values()])

    def faster_than(self, other: Row) -> Spread | None:
        """Return the speed-up, round by round."""
        both = sorted(self.samples.keys() & other.samples.keys())
        return Spread.of([other.samples[n].seconds / self.samples[n].seconds for n in both])


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target and what was measured; ``met`` is None where it could not be."""

    target: str
    figure: str
    met: bool | None


@dataclass(slots=True)
class PersistReport:
    """Everything that was found.

    Attributes:
        size_bytes: of all tensors; the GB in every figure are these.
        state: the state in words.
        screened: GB/s of every setting of the raw limit in the short round.
    """

    machine: Machine
    size_bytes: int
    state: str
    rounds: int
    seed: int
    rows: list[Row]
    screened: dict[Column, dict[str, float]]
    load_after: float
    seconds: float
    folder: str

    @property
    def size_gb(self) -> float:
        """The state in units of 10**9 bytes."""
        return self.size_bytes / 1e9

    def in_column(self, column: Column) -> list[Row]:
        """Rows of one column, the fastest setting of the limit first."""

        def order(row: Row) -> float:
            speed = self.gb_per_s(row)
            return -speed.median if row.role == "limit" and speed else 0.0

        rows = [row for row in self.rows if row.column == column]
        limits = sorted((row for row in rows if row.role == "limit"), key=order)
        return limits + [row for row in rows if row.role != "limit"]

    def limit(self, column: Column) -> Row | None:
        """The limit of a column: its best setting."""
        rows = self.in_column(column)
        return rows[0] if rows and rows[0].role == "limit" and rows[0].samples else None

    def baseline(self, column: Column) -> Row | None:
        """torch.save; for reading, torch.load."""
        column = "fresh" if column == "recycled" else column
        return next((r for r in self.in_column(column) if r.name == BASELINE), None)

    def gb_per_s(self, row: Row) -> Spread | None:
        """Speed of an arm."""
        return row.spread(lambda sample: self.size_gb / sample.seconds)

    def cpu_s_per_gb(self, row: Row) -> Spread | None:
        """CPU seconds of this process for each GB, all threads."""
        return row.spread(lambda sample: sample.cpu_s / self.size_gb)

    def of_limit(self, row: Row) -> Spread | None:
        """Share of the limit of its column that an arm reaches."""
        limit = self.limit(row.column)
        return None if limit is None else row.faster_than(limit)

    def of_baseline(self, row: Row) -> Spread | None:
        """Return the speed-up over torch.save (or torch.load)."""
        baseline = self.baseline(row.column)
        return None if baseline is None else row.faster_than(baseline)

    def others_cores(self) -> float:
        """Cores that other processes kept busy during the timed runs, on average."""
        samples = [sample for row in self.rows for sample in row.samples.values()]
        total_s = sum(sample.seconds for sample in samples)
        return sum(s.others_cores * s.seconds for s in samples) / total_s if total_s else 0.0

    def verdicts(self) -> list[Verdict]:
        """The targets, each with the measured figure."""
        fresh, recycled, read = (self._ours(column) for column in COLUMNS)
        cpu = [self.cpu_s_per_gb(row) for row in (fresh, recycled) if row is not None]
        worst = max((spread.median for spread in cpu if spread is not None), default=None)
        return [
            _at_least("fresh: share of the raw limit", _FRESH_MIN, self._share(fresh)),
            _at_least(
                "recycled: share of the raw limit, rewritten files",
                _RECYCLED_MIN,
                self._share(recycled),
            ),
            _at_least(
                f"fresh: times {BASELINE} + fsync",
                _BASELINE_MIN,
                None if fresh is None else self.of_baseline(fresh),
            ),
            Verdict(
                f"CPU seconds per GB, live tensors to durable: at most {_CPU_S_PER_GB_MAX}",
                "-" if worst is None else f"{worst:.3f}",
                None if worst is None else worst <= _CPU_S_PER_GB_MAX,
            ),
            _at_least(
                "verified load: share of reading raw, uncached",
                _READ_MIN,
                self._share(read),
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything, every sample included."""
        return {
            "machine": self.machine.as_json(),
            "load_after": self.load_after,
            "others_cores": self.others_cores(),
            "folder": self.folder,
            "size_bytes": self.size_bytes,
            "state": self.state,
            "rounds": self.rounds,
            "seed": self.seed,
            "seconds": self.seconds,
            "screened_gb_per_s": self.screened,
            "limits": {c: limit.name if (limit := self.limit(c)) else None for c in COLUMNS},
            "arms": [self._row_as_json(row) for c in COLUMNS for row in self.in_column(c)],
            "targets": [
                {"target": v.target, "figure": v.figure, "met": v.met} for v in self.verdicts()
            ],
        }

    def _share(self, row: Row | None) -> Spread | None:
        return None if row is None else self.of_limit(row)

    def _ours(self, column: Column) -> Row | None:
        rows = (row for row in self.in_column(column) if row.role == "ours" and row.samples)
        return next(rows, None)

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        figures = {
            "gb_per_s": self.gb_per_s(row),
            "cpu_s_per_gb": self.cpu_s_per_gb(row),
            "of_limit": self.of_limit(row),
            f"times_{BASELINE}": self.of_baseline(row),
            "after_s": row.spread(lambda sample: sample.after_s),
        }
        return {
            "name": row.name,
            "column": row.column,
            "role": row.role,
            "detail": row.detail,
            "error": row.error,
            **{name: spread and spread.as_json() for name, spread in figures.items()},
            "samples": [
                {
                    "round": number,
                    "seconds": sample.seconds,
                    "cpu_s": sample.cpu_s,
                    "others_cores": sample.others_cores,
                    "after_s": sample.after_s,
                }
                for number, sample in sorted(row.samples.items())
            ],
        }


def _at_least(what: str, least: float, found: Spread | None) -> Verdict:
    if found is None:
        return Verdict(f"{what}: at least {least}", "-", None)
    figure = f"{found.median:.2f}"
    return Verdict(f"{what}: at least {least}", figure, found.median >= least)
