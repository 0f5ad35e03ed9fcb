"""The outcome: rows, ratios, targets, tables.

A ratio of two arms is taken within each round, where both met the same machine, and the
median over the rounds counts. The limit of a column is the one of its settings with the best
median, in every round the same: not the luckiest sample of many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from everstep_bench.harness import figures
from everstep_bench.harness.figures import Spread, Verdict
from everstep_bench.harness.gauges import Sample
from everstep_bench.harness.report import Report, Table, busy_note, number, range_of
from everstep_bench.persist.arms import Column

COLUMNS: tuple[Column, ...] = ("fresh", "recycled", "read")
BASELINE = "torch.save"

_HEADINGS = {
    "fresh": "Saving into fresh files",
    "recycled": "Saving over files that have their blocks already",
    "read": "Loading, uncached",
}
_FRESH_MIN = 0.9
_RECYCLED_MIN = 0.9
_BASELINE_MIN = 2.5
_CPU_S_PER_GB_MAX = 0.2
_READ_MIN = 0.8


@dataclass(slots=True)
class Row(figures.Row[Sample]):
    """Figures of one arm; ``blocks`` are its timed runs."""

    column: Column = "fresh"

    def faster_than(self, other: Row | None) -> Spread | None:
        """Return the speed-up, round by round."""
        if other is None:
            return None
        return self.paired(other.blocks, lambda mine, theirs: theirs.seconds / mine.seconds)


@dataclass
class PersistReport(Report):
    """Everything that was found.

    Attributes:
        screened: GB/s of every setting of the raw limit in the short round.
    """

    rows: list[Row]
    screened: dict[Column, dict[str, float]]

    @property
    def size_gb(self) -> float:
        """The state in units of 10**9 bytes."""
        return self.facts.size_bytes / 1e9

    def in_column(self, column: Column) -> list[Row]:
        """Return the rows of one column, the fastest setting of the limit first."""

        def order(row: Row) -> float:
            speed = self.gb_per_s(row)
            return -speed.median if speed else 0.0

        rows = [row for row in self.rows if row.column == column]
        limits = sorted((row for row in rows if row.role == "limit"), key=order)
        return limits + [row for row in rows if row.role != "limit"]

    def limit(self, column: Column) -> Row | None:
        """Return the limit of a column: its best setting."""
        rows = self.in_column(column)
        return rows[0] if rows and rows[0].role == "limit" and rows[0].blocks else None

    def baseline(self, column: Column) -> Row | None:
        """Return torch.save; for reading, torch.load."""
        column = "fresh" if column == "recycled" else column
        return next((r for r in self.in_column(column) if r.name == BASELINE), None)

    def gb_per_s(self, row: Row) -> Spread | None:
        """Return the speed of an arm."""
        return row.spread(lambda sample: self.size_gb / sample.seconds)

    def figures_of(self, row: Row) -> dict[str, Spread | None]:
        """Return the figures of an arm by name."""
        return {
            "gb_per_s": self.gb_per_s(row),
            # Of this process, all threads.
            "cpu_s_per_gb": row.spread(lambda sample: sample.cpu_s / self.size_gb),
            "of_limit": row.faster_than(self.limit(row.column)),
            f"times_{BASELINE}": row.faster_than(self.baseline(row.column)),
            "after_s": row.spread(lambda sample: sample.after_s),
        }

    def others_cores(self) -> float:
        """Return the cores that other processes kept busy during the timed runs, on average."""
        samples = [sample for row in self.rows for sample in row.blocks.values()]
        total_s = sum(sample.seconds for sample in samples)
        return sum(s.others_cores * s.seconds for s in samples) / total_s if total_s else 0.0

    def verdicts(self) -> list[Verdict]:
        """Return the targets, each with the measured figure."""
        fresh, recycled, read = (self._ours(column) for column in COLUMNS)
        cpu = [found["cpu_s_per_gb"] for found in (fresh, recycled)]
        worst = max((spread.median for spread in cpu if spread is not None), default=None)
        rewritten = "recycled: share of the raw limit, rewritten files"
        return [
            _at_least("fresh: share of the raw limit", _FRESH_MIN, fresh["of_limit"]),
            _at_least(rewritten, _RECYCLED_MIN, recycled["of_limit"]),
            _at_least(
                f"fresh: times {BASELINE} + fsync", _BASELINE_MIN, fresh[f"times_{BASELINE}"]
            ),
            figures.at_most(
                f"CPU seconds per GB, live tensors to durable: at most {_CPU_S_PER_GB_MAX}",
                worst,
                _CPU_S_PER_GB_MAX,
                number(worst, 3),
            ),
            _at_least("verified load: share of reading raw, uncached", _READ_MIN, read["of_limit"]),
        ]

    def tables(self) -> Iterator[Table]:
        """Yield a table for each column."""
        for column in COLUMNS:
            baseline = "torch.load" if column == "read" else BASELINE
            columns = ("arm", "GB/s", "min - max", "CPU s/GB", "of limit", f"x {baseline}")
            yield Table(_HEADINGS[column], columns, map(self._cells, self.in_column(column)))

    def details(self) -> Iterator[str]:
        """Yield the description of each arm, or why it did not run; the limit in one line."""
        lines = {}
        for row in self.rows:
            name = "raw" if row.role == "limit" else row.name
            lines[name, row.column] = f"{name}, {row.column}: {row.error or row.detail}"
        yield from lines.values()

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "Medians. GB are 10^9 bytes of tensors. Ratios: taken within each round, then the "
            "median. The limit is the raw setting with the best median."
        )
        after = self._ours("recycled")["after_s"]
        if after:
            yield (
                "everstep, recycled: durable after the time that counts here; then "
                f"{after.median:.2f} s of retention, which reads the new base back before it gives "
                "up the old one."
            )
        yield from busy_note(self.facts, self.others_cores())

    def figures(self) -> dict[str, Any]:
        """Return everything, every sample included."""
        return {
            "state": self.facts.workload,
            "others_cores": self.others_cores(),
            "screened_gb_per_s": self.screened,
            "limits": {c: limit.name if (limit := self.limit(c)) else None for c in COLUMNS},
            "arms": [self._row_as_json(row) for c in COLUMNS for row in self.in_column(c)],
        }

    def _ours(self, column: Column) -> dict[str, Spread | None]:
        rows = (row for row in self.in_column(column) if row.role == "ours" and row.blocks)
        return self.figures_of(next(rows, Row("", column=column)))

    def _cells(self, row: Row) -> tuple[str | Text, ...]:
        if row.error is not None and not row.blocks:
            return row.name, "-"
        found = self.figures_of(row)
        return (
            Text(row.name, style="bold" if row.role == "ours" else ""),
            number(found["gb_per_s"]),
            range_of(found["gb_per_s"], 2),
            number(found["cpu_s_per_gb"], 3),
            number(found["of_limit"]),
            number(found[f"times_{BASELINE}"]),
        )

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        return {
            "name": row.name,
            "column": row.column,
            "role": row.role,
            "detail": row.detail,
            "error": row.error,
            **self.figures_of(row),
            "samples": [
                {"round": number, **figures.plain(sample)}
                for number, sample in sorted(row.blocks.items())
            ],
        }


def _at_least(what: str, least: float, found: Spread | None) -> Verdict:
    met = None if found is None else found.median >= least
    return Verdict(f"{what}: at least {least}", number(found), met)
