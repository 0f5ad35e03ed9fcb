"""Screening of the limit, then rounds of all arms."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import statistics
from collections.abc import Iterator, Sequence

from everstep_bench.harness.display import Display
from everstep_bench.harness.gauges import Sample
from everstep_bench.harness.session import Session, session
from everstep_bench.options import PersistOptions
from everstep_bench.persist.arms import Arm, Column
from everstep_bench.persist.ours import OursRead, OursWrite
from everstep_bench.persist.peers import PEERS, PeerRead, PeerWrite, installed
from everstep_bench.persist.raw import RING_BYTES, RawArm, Setting, make_ring, settings
from everstep_bench.persist.report import COLUMNS, PersistReport, Row
from everstep_bench.persist.state import BenchState

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
