"""Screening of the limit, then rounds of all arms; ratios, targets, tables.

A ratio of two arms is taken within each round, where both met the same machine, and the
median over the rounds counts. The limit of a column is the one of its settings with the best
median, in every round the same: not the luckiest sample of many.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from everstep_bench.harness import figures
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Spread, Verdict
from everstep_bench.harness.machine import Sample
from everstep_bench.harness.report import Report, Table, busy_note, number, range_of
from everstep_bench.harness.session import Session, session
from everstep_bench.options import PersistOptions
from everstep_bench.persist.arms import (
    PEERS,
    Arm,
    BenchState,
    Column,
    OursRead,
    OursWrite,
    PeerRead,
    PeerWrite,
    installed,
)
from everstep_bench.persist.raw import RING_BYTES, RawArm, Setting, make_ring, settings

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
            **figures.picked(row, "name column role detail error"),
            **self.figures_of(row),
            "samples": [
                {"round": number, **figures.plain(sample)}
                for number, sample in sorted(row.blocks.items())
            ],
        }


def _at_least(what: str, least: float, found: Spread | None) -> Verdict:
    met = None if found is None else found.median >= least
    return Verdict(f"{what}: at least {least}", number(found), met)


_SCREEN_BYTES = 256 << 20
_SCREEN_TIMES = 2
_FINALISTS = 3
_COPIES_ON_DISK = 12  # the most that lie there at once: four bases, six files of raw, one of a peer
_COPIES_IN_MEMORY = 2.5  # the state, what a peer loads, buffers of peers
_MEMORY_BESIDES = RING_BYTES + (512 << 20)

_Best = dict[Column, list[Setting]]


def run_persist(options: PersistOptions, display: Display) -> PersistReport:
    """Measure; everything that was written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when our own arm fails. A peer that fails is reported in its row.
    """
    with session(options, display) as run:
        run.refuse_without_room(
            disk_bytes=_COPIES_ON_DISK * options.size_bytes,
            memory_bytes=_COPIES_IN_MEMORY * options.size_bytes + _MEMORY_BESIDES,
            hint="a smaller --size",
        )
        display.begin(f"making a state of {options.size_bytes / 2**20:.0f} MiB", 1)
        state = BenchState(options.size_bytes, options.seed)
        bench = Bench(run, state)
        screened = bench.screen()
        best = {
            column: sorted(speeds, key=lambda setting: -speeds[setting])[:_FINALISTS]
            for column, speeds in screened.items()
        }
        rows = bench.saving(best) + bench.loading(best)
        facts = run.facts(state.size_bytes, state.tensors, state.description)
        names = {c: {str(s): v for s, v in screened[c].items()} for c in COLUMNS}
        return PersistReport(options, facts, rows, names)


class Bench:
    """All arms of one run, over one state."""

    def __init__(self, run: Session, state: BenchState) -> None:
        self._run = run
        self._folder = run.folder
        self._state = state
        self._ring = make_ring()
        self._turns = run.turns()

    def screen(self) -> dict[Column, dict[Setting, float]]:
        """Return GB/s of every raw setting, on a smaller file, a few times."""
        size_bytes = min(self._state.size_bytes, _SCREEN_BYTES)
        arms = [
            self._raw(column, setting, size_bytes, "screen")
            for column in COLUMNS
            for setting in settings(column)
        ]
        found: dict[Column, dict[Setting, list[float]]] = {column: {} for column in COLUMNS}
        display = self._run.display
        display.begin("trying settings of the raw limit", _SCREEN_TIMES * len(arms))
        drawn = random.Random(self._run.options.seed)
        with _closing(arms):
            for arm in arms:
                arm.open()
            for _ in range(_SCREEN_TIMES):
                drawn.shuffle(arms)
                for arm in arms:
                    display.advance(f"{arm.column}: {arm.setting}")
                    speeds = found[arm.column].setdefault(arm.setting, [])
                    speeds.append(size_bytes / 1e9 / _timed(arm).seconds)
        for path in self._folder.glob("screen-*"):
            path.unlink()
        return {c: {s: statistics.median(v) for s, v in found[c].items()} for c in COLUMNS}

    def saving(self, best: _Best) -> list[Row]:
        """Measure all arms that write."""
        state = self._state
        arms: list[Arm] = []
        columns: tuple[Column, ...] = ("fresh", "recycled")
        for column in columns:
            arms += [
                self._raw(column, setting, state.size_bytes, f"raw-{number}")  # files of its own
                for number, setting in enumerate(best[column])
            ]
            arms.append(OursWrite(column, state, self._folder / f"everstep-{column}"))
        for peer in filter(installed, PEERS):
            arms.append(PeerWrite(peer, state, self._folder / f"saved-{peer.name}"))
        rows = self.rounds("saving", arms)
        for path in self._folder.glob("raw-*"):
            path.unlink()
        absent = [peer for peer in PEERS if not installed(peer)]
        return rows + [Row(p.name, "peer", p.save_detail, error="not installed") for p in absent]

    def loading(self, best: _Best) -> list[Row]:
        """Measure all arms that read."""
        state = self._state
        shutil.rmtree(self._folder / "everstep-fresh", ignore_errors=True)
        arms: list[Arm] = [self._raw("read", s, state.size_bytes, "raw") for s in best["read"]]
        arms.append(OursRead(state, self._folder / "everstep-recycled"))
        for peer in filter(installed, PEERS):
            arms.append(PeerRead(peer, state, self._folder / f"loaded-{peer.name}"))
        return self.rounds("loading", arms)

    def rounds(self, what: str, arms: Sequence[Arm]) -> list[Row]:
        """Let arms take turns: one round that does not count, and then those that do."""
        turns = self._turns
        rows = [Row(arm.name, arm.role, arm.detail, column=arm.column) for arm in arms]
        by_row = {id(row): arm for row, arm in zip(rows, arms, strict=True)}
        with _closing(arms):
            for row in rows:
                with turns.may_fail(row):
                    by_row[id(row)].open()
            for number, turn in turns.rounds(what, rows, self._run.options.repeats):
                for row in turn:
                    with turns.may_fail(row):
                        sample = _timed(by_row[id(row)])
                        if number:
                            row.blocks[number] = sample
        return rows

    def _raw(self, column: Column, setting: Setting, size_bytes: int, prefix: str) -> RawArm:
        path = self._folder / (f"{prefix}-fresh" if column == "fresh" else f"{prefix}-kept")
        direct = self._run.machine.direct
        return RawArm(column, setting, path, size_bytes, self._ring, direct=direct)


def _timed(arm: Arm) -> Sample:
    """Run an arm once, with nothing of the arm before it still on its way to the disk."""
    try:
        arm.prepare()
        os.sync()
        return arm.run()
    finally:
        arm.clean()


@contextlib.contextmanager
def _closing(arms: Sequence[Arm]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for arm in arms:
            stack.callback(arm.close)
        yield
