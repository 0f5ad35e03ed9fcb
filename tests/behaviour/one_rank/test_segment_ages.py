"""``history="20s"``: what clocks do takes nothing that is promised; what is old still goes."""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.format.names import marker_name, segment_dir
from everstep.keeper.retain.history import HistoryWindows, SegmentAges, _ages
from everstep.options import LogOptions
from everstep.run.scan import Inventory, scan_run
from everstep.seams import ManualClock, PosixFileSystem
from everstep.seams.filesystem import DirEntry
from tests.support.log.budget import Trained
from tests.support.world import HookedFileSystem

FILES = PosixFileSystem()
HOURS_S = 3 * 3600.0
PROMISED = 20  # steps, of a second each
EVERY = 4
LOG = LogOptions(to="disk", batch_steps=1, history=f"{PROMISED}s", audit=False)


class ClockedFiles(HookedFileSystem):
    """Segments have their times from a clock that a test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.times: dict[PurePath, float] = {}

    def rename(self, source: PurePath, target: PurePath) -> None:
        if target.name == marker_name(0):
            self.times[target.parent] = self.clock.unix_s()
        super().rename(source, target)

    def scan(self, path: PurePath) -> list[DirEntry]:
        return [
            dataclasses.replace(entry, mtime_s=self.times.get(path / entry.name, entry.mtime_s))
            for entry in super().scan(path)
        ]


class Life(Trained):
    """One process: the wall clock goes on, and the other begins where the machine likes."""

    def __init__(self, run: Path, fs: ClockedFiles, *, wall_s: float | None = None) -> None:
        super().__init__(run, fs=fs, log=LOG, every=EVERY, keep=1)
        if wall_s is not None:
            self.clock.advance(777.0)
            self.clock.jump(wall_s - self.clock.unix_s())
        fs.clock = self.clock

    def __enter__(self) -> Life:
        super().__enter__()
        self.step = self.ckpt.resume().step
        return self


def oldest(run: Path) -> int:
    """The step of the oldest base, from which the log leads on."""
    return min(base.id.step for base in scan_run(FILES, PurePath(run)).bases)


def assert_kept(run: Life, unsure: int = 0) -> None:
    """All that is promised can be gone back to, and not much more than twice that."""
    first = oldest(run.run)
    assert first <= max(1, run.step - PROMISED + unsure), "what is promised is there"
    assert first >= run.step - 2 * PROMISED - 3 * EVERY, "what is old has gone"


def test_old_ones_go(run_folder: Path) -> None:
    with Life(run_folder, ClockedFiles()) as run:
        for _ in range(20):
            run.train_slowly(EVERY)
            assert_kept(run)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("jump_s", [HOURS_S, -HOURS_S], ids=["forward", "back"])
def test_a_jump_in_training_takes_nothing_and_keeps_nothing(
    run_folder: Path, jump_s: float
) -> None:
    with Life(run_folder, ClockedFiles()) as run:
        run.train_slowly(18)
        run.clock.jump(jump_s)
        for _ in range(15):
            run.train_slowly(EVERY)
            assert_kept(run)


@pytest.mark.slow
@pytest.mark.thinned(6)
@pytest.mark.parametrize("jump_s", [0.0, HOURS_S, -HOURS_S], ids=["none", "forward", "back"])
@pytest.mark.parametrize("later_s", [0.0, HOURS_S, -HOURS_S], ids=["at once", "late", "earlier"])
def test_behind_a_start_a_jump_before_it_is_none(
    run_folder: Path, jump_s: float, later_s: float
) -> None:
    """One in the process before, and a pause, or another clock, between the two."""
    fs = ClockedFiles()
    with Life(run_folder, fs) as run:
        run.train_slowly(14)
        run.clock.jump(jump_s)
        run.train_slowly(18)
    wall_s = run.clock.unix_s() + later_s
    with Life(run_folder, fs, wall_s=wall_s) as run:
        assert run.step == 32
        for _ in range(10):
            run.train_slowly(EVERY)
            assert_kept(run, unsure=4)  # a jump, or a pause, counts for four usual segments


def test_a_jump_of_the_process_before_counts_for_four_segments() -> None:
    stamps = [0.0, 1.0, 2.0, 2.0 + HOURS_S, 3.0 + HOURS_S, 4.0 + HOURS_S]
    assert _ages(stamps) == [8.0, 7.0, 6.0, 2.0, 1.0, 0.0]
    assert _ages([s if s < HOURS_S else s - 2 * HOURS_S for s in stamps]) == [4, 3, 2, 2, 1, 0]


@given(st.lists(st.integers(-100, 100)), st.floats(allow_nan=False, allow_infinity=False))
def test_ages_of_any_times(stamps: list[int], jump_s: float) -> None:
    ages = _ages([float(stamp) for stamp in stamps])
    assert len(ages) == len(stamps)
    assert ages == sorted(ages, reverse=True)
    assert ages[-1:] == [0.0] * bool(stamps)
    assert _ages([0.0, jump_s]) == [0.0, 0.0], "of one pause nobody knows whether it is usual"


# --- Several processes look at one folder ------------------------------------------------


def folder(path: Path, *spans: tuple[int, int]) -> Inventory:
    """A run folder with segments, as far as ages go."""
    for span in spans:
        Path(segment_dir(path, 1, *span)).mkdir(parents=True)
    return Inventory(PurePath(path), "r", {1: None})


def test_another_one_in_the_place_of_a_segment_is_young(tmp_path: Path) -> None:
    fs, clock = ClockedFiles(), ManualClock()
    ages, inventory = SegmentAges(fs, clock), folder(tmp_path, (0, 1), (1, 2))
    ages.observe(inventory)
    paths = [segment_dir(tmp_path, 1, *span) for span in ((0, 1), (1, 2))]
    clock.advance(10.0)
    ages.observe(inventory)
    assert [ages.of_s(path) for path in paths] == [10.0, 10.0]
    fs.times[paths[1]] = 5.0
    ages.observe(inventory)
    clock.advance(1.0)
    assert [ages.of_s(path) for path in paths] == [11.0, 1.0]
    assert ages.of_s(tmp_path) == 0.0, "it was not seen yet"


def test_each_rank_judges_by_what_it_has_seen(run_folder: Path) -> None:
    """As :class:`.ranks.RankDisk` asks: it needs no more than what is there."""
    fs = ClockedFiles()
    with Life(run_folder, fs) as run:
        run.train_slowly(30)
    inventory, clock = scan_run(fs, PurePath(run_folder)), ManualClock()
    promise = HistoryWindows(fs, clock, f"{PROMISED}s")
    lsns = {b.id: b.manifest.markers[0].lsn for b in inventory.bases if b.manifest is not None}
    going = sorted(lsns)[:-1]

    def needed() -> list[int]:
        promise.observe(inventory)
        return [base.step for base in sorted(promise.read(inventory).needed(lsns, going))]

    before = needed()
    assert before
    clock.jump(HOURS_S)
    assert needed() == before
    clock.jump(-2 * HOURS_S)
    assert needed() == before
    clock.advance(PROMISED + 1.0)
    assert needed() == []
