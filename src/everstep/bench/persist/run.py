"""Checks, screening, rounds."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from everstep.arena import Block
from everstep.bench.persist.arms import Arm, Column
from everstep.bench.persist.machine import Machine, look_at
from everstep.bench.persist.meter import Sample
from everstep.bench.persist.ours import OursRead, OursWrite
from everstep.bench.persist.peers import PEERS, PeerRead, PeerWrite, installed
from everstep.bench.persist.raw import RING_BYTES, RawArm, Setting, make_ring, settings
from everstep.bench.persist.report import COLUMNS, PersistReport, Row
from everstep.bench.persist.show import Display
from everstep.bench.persist.state import SIZE_BYTES_MIN, BenchState
from everstep.errors import OptionError, OutOfSpaceError, PermissionDeniedError

__all__ = ["PersistOptions", "parse_size", "run_persist"]

_UNITS = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40}
_SCREEN_BYTES = 256 << 20
_SCREEN_TIMES = 2
_FINALISTS = 3
_COPIES_ON_DISK = 8  # the most that lie there at once: four bases, one file of each reader
_COPIES_IN_MEMORY = 2.5  # the state, what a peer loads, buffers of peers
_MEMORY_BESIDES = RING_BYTES + (512 << 20)


@dataclass(frozen=True, slots=True)
class PersistOptions:
    """What is measured.

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


def parse_size(text: str) -> int:
    """Bytes of ``"1GiB"``, ``"512M"``, ``"3000000"``; powers of 1024 throughout.

    Raises:
        OptionError: for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise OptionError(f"{text!r} is no size", hint="like 1GiB, 512MiB")
    return int(float(match[1]) * (1 << _UNITS[match[2]] if match[2] else 1))


def run_persist(options: PersistOptions, display: Display) -> PersistReport:
    """Measures; everything that was written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when our own arm fails. A peer that fails is reported in its row.
    """
    start_s = time.monotonic()
    with _interruptible() as signals, _folder(options.folder) as folder:
        machine = look_at(folder)
        _check_room(machine, options.size_bytes, folder)
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
        state, folder = self._state, self._folder
        arms: list[Arm] = []
        columns: tuple[Column, ...] = ("fresh", "recycled")
        for column in columns:
            arms += [self._raw(column, s, state.size_bytes, "raw") for s in best[column]]
            arms.append(OursWrite(column, state, folder / f"everstep-{column}"))
        for peer in PEERS:
            if installed(peer):
                arms.append(PeerWrite(peer, state, folder / f"saved-{peer.name}"))
        return self._rounds("saving", arms) + _absent()

    def loading(self, best: dict[Column, list[Setting]]) -> list[Row]:
        """All arms that read."""
        state, folder = self._state, self._folder
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


def _check_room(machine: Machine, size_bytes: int, folder: Path) -> None:
    need = _COPIES_ON_DISK * size_bytes
    if machine.free_bytes < need:
        raise OutOfSpaceError(
            f"the benchmark writes up to {need / 2**30:.1f} GiB at a time, "
            f"{machine.free_bytes / 2**30:.1f} GiB are free",
            tier="disk",
            path=folder.parent,
            hint="a smaller --size, or --dir on another file system",
        )
    need = int(_COPIES_IN_MEMORY * size_bytes) + _MEMORY_BESIDES
    if machine.memory_available_bytes < need:
        raise OutOfSpaceError(
            f"the benchmark takes {need / 2**30:.1f} GiB of memory, "
            f"{machine.memory_available_bytes / 2**30:.1f} GiB are available",
            tier="memory",
            hint="a smaller --size",
        )


@contextlib.contextmanager
def _interruptible() -> Iterator[Sequence[int]]:
    """Ctrl-C, SIGTERM and SIGHUP end the benchmark in good order.

    Yields:
        The signals that have come. A library may catch what the handler raises and raise
        something of its own: that, too, comes out as KeyboardInterrupt.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen  # only the main thread may set handlers
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt(f"signal {number}")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    earlier = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield seen
    except BaseException as error:
        if seen:
            raise KeyboardInterrupt(f"signal {seen[0]}") from error
        raise
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _folder(where: Path | None) -> Iterator[Path]:
    """A folder of its own, gone afterwards.

    Raises:
        OptionError: there is no such folder to make it in.
        PermissionDeniedError: it may not be written.
    """
    parent = Path.cwd() if where is None else where.absolute()
    if not parent.is_dir():
        raise OptionError(f"there is no folder {parent}", hint="make it first, or name another")
    try:
        folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=parent))
    except OSError as error:
        raise PermissionDeniedError(
            f"cannot write into {parent}: {error.strerror}",
            path=parent,
            hint="--dir: a folder that this user may write, on the file system to be measured",
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _closing(arms: Sequence[Arm]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for arm in arms:
            stack.callback(arm.close)
        yield
