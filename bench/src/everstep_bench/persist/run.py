"""Screening of the limit, then rounds of all arms."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.arena import Block
from everstep.errors import OptionError
from everstep.workloads.processes import interruptible
from everstep_bench.persist.arms import Arm, Column
from everstep_bench.persist.machine import Machine, look_at
from everstep_bench.persist.meter import Sample
from everstep_bench.persist.ours import OursRead, OursWrite
from everstep_bench.persist.peers import PEERS, PeerRead, PeerWrite, installed
from everstep_bench.persist.raw import RawArm, Setting, make_ring, settings
from everstep_bench.persist.report import COLUMNS, PersistReport, Row
from everstep_bench.persist.show import Display
from everstep_bench.persist.state import SIZE_BYTES_MIN, BenchState
from everstep_bench.persist.workspace import check_room, workspace

__all__ = ["PersistOptions", "run_persist"]

_SCREEN_BYTES = 256 << 20
_SCREEN_TIMES = 2
_FINALISTS = 3


@dataclass(frozen=True, slots=True)
class PersistOptions:
    """Options of the benchmark.

    Attributes:
        size_bytes: of the state, about.
        repeats: rounds that count.
        seed: of the state's numbers and of the order of arms.
        folder: a folder is made in it, and removed at the end.

    Raises:
        OptionError: for what makes no measurement.
    """

    size_bytes: int = 1 << 30
    repeats: int = 5
    seed: int = 1234
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.size_bytes < SIZE_BYTES_MIN:
            raise OptionError(
                f"a state of {self.size_bytes} bytes is too small to measure",
                hint=f"at least {SIZE_BYTES_MIN >> 20}MiB",
            )
        if self.repeats < 1:
            raise OptionError(f"repeats={self.repeats}: at least one round is needed")


def run_persist(options: PersistOptions, display: Display) -> PersistReport:
    """Measures; everything that was written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when our own arm fails. A peer that fails is reported in its row.
    """
    start_s = time.monotonic()
    with interruptible() as signals, workspace(options.folder) as folder:
        machine = look_at(folder)
        check_room(machine, options.size_bytes, folder)
        display.begin(f"making a state of {options.size_bytes / 2**20:.0f} MiB", 1)
        state = BenchState(options.size_bytes, options.seed)
        bench = _Bench(options, machine, state, folder, display, signals)
        screened = bench.screen()
        rows = bench.saving(_best(screened)) + bench.loading(_best(screened))
        return PersistReport(
            machine=machine,
            size_bytes=state.size_bytes,
            state=state.description,
            rounds=options.repeats,
            seed=options.seed,
            rows=rows,
            screened={c: {str(s): v for s, v in screened[c].items()} for c in COLUMNS},
            load_after=os.getloadavg()[0],
            seconds=time.monotonic() - start_s,
            folder=str(folder.parent),
        )


class _Bench:
    def __init__(
        self,
        options: PersistOptions,
        machine: Machine,
        state: BenchState,
        folder: Path,
        display: Display,
        signals: Sequence[int] = (),
    ) -> None:
        self._signals = signals
        self._options = options
        self._direct = machine.direct
        self._state = state
        self._folder = folder
        self._display = display
        self._ring: Block = make_ring()
        self._random = random.Random(options.seed)

    def screen(self) -> dict[Column, dict[Setting, float]]:
        """GB/s of every raw setting, on a smaller file, a few times."""
        size_bytes = min(self._state.size_bytes, _SCREEN_BYTES)
        arms = [
            self._raw(column, setting, size_bytes, "screen")
            for column in COLUMNS
            for setting in settings(column)
        ]
        found: dict[Column, dict[Setting, list[float]]] = {column: {} for column in COLUMNS}
        self._display.begin("trying settings of the raw limit", _SCREEN_TIMES * len(arms))
        with _closing(arms):
            for arm in arms:
                arm.open()
            for _ in range(_SCREEN_TIMES):
                self._random.shuffle(arms)
                for arm in arms:
                    self._display.advance(f"{arm.column}: {arm.setting}")
                    sample = _timed(arm)
                    speeds = found[arm.column].setdefault(arm.setting, [])
                    speeds.append(size_bytes / 1e9 / sample.seconds)
        for path in self._folder.glob("screen-*"):
            path.unlink()
        return {c: {s: statistics.median(v) for s, v in found[c].items()} for c in COLUMNS}

    def saving(self, best: dict[Column, list[Setting]]) -> list[Row]:
        """All arms that write, one round that does not count and then those that do."""
        state = self._state
        folder = self._folder
        arms: list[Arm] = []
        columns: tuple[Column, ...] = ("fresh", "recycled")
        for column in columns:
            arms += [
                self._raw(column, setting, state.size_bytes, f"raw-{number}")  # files of its own
                for number, setting in enumerate(best[column])
            ]
            arms.append(OursWrite(column, state, folder / f"everstep-{column}"))
        for peer in PEERS:
            if installed(peer):
                arms.append(PeerWrite(peer, state, folder / f"saved-{peer.name}"))
        rows = self._rounds("saving", arms) + _absent()
        for path in folder.glob("raw-*"):
            path.unlink()
        return rows

    def loading(self, best: dict[Column, list[Setting]]) -> list[Row]:
        """All arms that read."""
        state = self._state
        folder = self._folder
        shutil.rmtree(folder / "everstep-fresh", ignore_errors=True)
        arms: list[Arm] = [self._raw("read", s, state.size_bytes, "raw") for s in best["read"]]
        arms.append(OursRead(state, folder / "everstep-recycled"))
        for peer in PEERS:
            if installed(peer):
                arms.append(PeerRead(peer, state, folder / f"loaded-{peer.name}"))
        return self._rounds("loading", arms)

    def _rounds(self, what: str, arms: list[Arm]) -> list[Row]:
        rows = {id(arm): Row.of(arm) for arm in arms}
        rounds = self._options.repeats
        with _closing(arms):
            for arm in arms:
                with self._peer_may_fail(arm, rows[id(arm)]):
                    arm.open()
            for number in range(rounds + 1):
                order = [arm for arm in arms if rows[id(arm)].error is None]
                self._random.shuffle(order)
                name = f"{what}, round {number} of {rounds}" if number else f"{what}, warming up"
                self._display.begin(name, len(order))
                gc.collect()
                for arm in order:
                    self._display.advance(arm.name)
                    row = rows[id(arm)]
                    with self._peer_may_fail(arm, row):
                        sample = _timed(arm)
                        if number:
                            row.samples[number] = sample
        return list(rows.values())

    @contextlib.contextmanager
    def _peer_may_fail(self, arm: Arm, row: Row) -> Iterator[None]:
        """A library that does not work on this machine is reported in its row."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # DCP's own is no Exception
            if arm.role != "peer" or self._signals:
                raise
            row.error = f"{type(error).__name__}: {error}"

    def _raw(self, column: Column, setting: Setting, size_bytes: int, prefix: str) -> RawArm:
        name = f"{prefix}-fresh" if column == "fresh" else f"{prefix}-kept"
        path = self._folder / name
        return RawArm(column, setting, path, size_bytes, self._ring, direct=self._direct)


def _timed(arm: Arm) -> Sample:
    """One run of an arm, with nothing of the arm before it still on its way to the disk."""
    try:
        arm.prepare()
        os.sync()
        return arm.run()
    finally:
        arm.clean()


def _best(screened: dict[Column, dict[Setting, float]]) -> dict[Column, list[Setting]]:
    return {
        column: sorted(speeds, key=lambda setting: -speeds[setting])[:_FINALISTS]
        for column, speeds in screened.items()
    }


def _absent() -> list[Row]:
    return [
        Row(peer.name, "fresh", "peer", peer.save_detail, error="not installed")
        for peer in PEERS
        if not installed(peer)
    ]


@contextlib.contextmanager
def _closing(arms: Sequence[Arm]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for arm in arms:
            stack.callback(arm.close)
        yield
