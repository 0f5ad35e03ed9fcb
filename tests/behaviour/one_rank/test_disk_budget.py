"""``Budget(disk_bytes=)`` with a log on disk: it is refused, or kept (I10)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest

import everstep
from everstep.arena import Arena
from everstep.errors import EverstepError, OptionError, OutOfSpaceError
from everstep.format.header import ShardIdentity
from everstep.format.names import base_dir, segment_dir, timeline_dir
from everstep.format.writer import ChunkRing
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.log.segment_queue import (
    Batch,
    LogSpace,
    SegmentQueue,
    SegmentTimes,
    SegmentWriter,
    StoredRecord,
    folder_bytes,
)
from everstep.link.messages import ENDED
from everstep.options import Budget, KeeperOptions, LogOptions
from everstep.seams import PosixFileSystem, Seams
from everstep.trainer.budget import LogLimits
from tests.support.given import options
from tests.support.log.budget import Trained
from tests.support.logged import World, opened
from tests.support.ranks.peer_logs import records_of_steps
from tests.support.world import TIMEOUT_S, forget, size_below

TO_DISK = LogOptions(to="disk", batch_steps=2)
KEEP = 2


def needed(run: Path, **chosen: Any) -> int:
    """The budget that is advised where one byte is all there is."""
    world = World()
    with (
        pytest.raises(OutOfSpaceError, match="the budget is 1") as caught,
        opened(run, world, log=TO_DISK, keep=KEEP, budget=Budget(disk_bytes=1), **chosen),
    ):
        pass
    said = re.match(r"Budget\(disk_bytes=(\d+)\)", str(caught.value.hint))
    assert said is not None
    return int(said[1])


@pytest.mark.thinned(6)
@pytest.mark.parametrize("every", [None, "auto", "1h"])
@pytest.mark.parametrize("process", [True, False])
def test_the_run_folder_stays_within_its_budget(
    run_folder: Path, every: str | None, process: bool
) -> None:
    """It grew with each step of the log, and nothing was said. Now a base is taken in time."""
    budget = 2 * needed(run_folder, every=every)
    world, told = World(), list[EverstepError]()
    chosen: dict[str, Any] = {"every": every, "keeper": KeeperOptions(process=process)}
    chosen |= {"budget": Budget(disk_bytes=budget), "on_failure": told.append}
    with opened(run_folder, world, log=TO_DISK, keep=KEEP, **chosen) as ckpt:
        ckpt.resume()
        for _ in range(60):
            world.train()
            ckpt.step()
            assert size_below(run_folder) <= budget
        ckpt.wait()
        stats = ckpt.stats()
    assert size_below(run_folder) <= budget
    assert told == []
    assert stats.log_steps_in_memory == 0, "and all of it is on disk"
    assert stats.committed > KEEP


def test_a_fixed_interval_whose_log_does_not_fit_is_refused_with_what_does(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = needed(run_folder, every=8)
    with Trained(run_folder, log=TO_DISK, every=8, keep=KEEP, budget=Budget(budget, budget)) as run:
        for _ in range(50):
            run.train(1)
            assert size_below(run_folder) <= budget
        assert run.ckpt.stats().committed == 1 + 50 // 8, "no base but those at the interval"
    said = capsys.readouterr().err
    assert "the log has the rest of a budget of" in said
    assert "(no daily budget)" in said
    with (
        pytest.raises(OutOfSpaceError, match="each with a log of 8 steps") as caught,
        opened(
            run_folder,
            World(),
            log=TO_DISK,
            every=8,
            keep=KEEP,
            budget=Budget(disk_bytes=budget - 1),
        ),
    ):
        pass
    every = int(re.findall(r"every=(\d+)", str(caught.value.hint))[0])
    assert 1 <= every < 8
    less = Budget(disk_bytes=budget - 1)
    with opened(run_folder, World(), log=TO_DISK, every=every, keep=KEEP, budget=less):
        pass
    forget(run_folder)


@pytest.mark.parametrize("history", ["all", "2h", "50GB"])
def test_a_history_beyond_the_bases_has_no_bound(history: str) -> None:
    log = LogOptions(to="disk", history=history)
    with pytest.raises(OptionError, match=f"history='{history}'"):
        options(method="logged", log=log, budget=Budget(disk_bytes=10**15))
    options(method="logged", log=log)
    options(method="logged", log=TO_DISK, budget=Budget(disk_bytes=10**15))


def test_what_is_there_beyond_the_budget_is_told(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bases of a larger ``keep`` go behind the next one: until then there is no helping it."""
    with Trained(run_folder, log=TO_DISK, every=2, keep=8) as run:
        run.train(20)
    budget = Budget(disk_bytes=needed(run_folder, every=2))
    assert budget.disk_bytes is not None
    assert size_below(run_folder) > budget.disk_bytes
    capsys.readouterr()
    with Trained(run_folder, log=TO_DISK, every=2, keep=KEEP, budget=budget) as run:
        assert "the run folder already has" in capsys.readouterr().err
        run.ckpt.resume()
        run.train(6)
        assert size_below(run_folder) <= budget.disk_bytes


# --- The keeper's part ------------------------------------------------------------------


class Store:
    """A log of 1000 bytes in each of three records of a step, and a step to a segment.

    Attributes:
        steps: that segments on disk have.
    """

    def __init__(self, run: Path, budget_bytes: int) -> None:
        Path(timeline_dir(run, 1)).mkdir(parents=True)
        self.run, self.told, self.reached = run, list[EverstepError](), list[int]()
        self.ring, self.arena = ChunkRing(4, 2), Arena.anonymous(4 << 20)
        told = {"disk_bytes": budget_bytes, "bases_bytes": 10_000}
        room = LogSpace(
            PosixFileSystem(),
            PurePath(run),
            0,
            1,
            budget_bytes=told["disk_bytes"],
            bases_bytes=told["bases_bytes"],
        )
        identity = ShardIdentity("0" * 32, 1, 0, 0, 0, 1, True)
        writer = SegmentWriter(
            Seams(), PurePath(run), identity, self.ring, timeout_s=TIMEOUT_S, space=room
        )
        segments = SegmentQueue(writer, self.told.append, self.reached.append, Batch(1))
        self.log = LogStore(self.arena, segments)
        self._number = self._offset = self._step = 0

    def train(self, steps: int) -> None:
        for record in records_of_steps(self._step + 1, self._step + steps, size_bytes=1000):
            self._number += 1
            end = self._offset + record.data.nbytes
            self.arena.view[self._offset : end] = record.data
            self.log.add(self._number, record.head, record.layout, record.objects, self._offset)
            self._offset = end
        self._step += steps
        self.log.settle(TIMEOUT_S)

    def retain(self, upto: int) -> None:
        """What retention does behind a base."""
        for step in range(1, upto + 1):
            shutil.rmtree(segment_dir(self.run, 1, step - 1, step), ignore_errors=True)

    @property
    def steps(self) -> list[int]:
        found = Path(timeline_dir(self.run, 1), "log").iterdir()
        return sorted(int(one.name.partition("-")[2]) for one in found)


@pytest.fixture
def store(run_folder: Path) -> Iterator[Store]:
    found = Store(run_folder, 10_000 + 50_000)
    yield found
    found.log.close()
    found.ring.close()


def test_what_has_no_room_waits_for_the_base_that_is_under_way(store: Store) -> None:
    store.log.expect_base(True)
    store.train(9)
    there = store.steps
    assert there == [1, 2, 3, 4, 5, 6]
    assert size_below(store.run) <= 50_000
    assert store.told == []
    store.log.flush()
    store.log.settle(TIMEOUT_S)
    assert store.steps == there
    store.retain(6)
    store.log.expect_base(True)  # another one is under way
    store.log.settle(TIMEOUT_S)
    assert store.steps == [7, 8, 9], "in segments as they would have been"
    store.train(5)
    assert store.steps == [7, 8, 9, 10, 11, 12]
    store.retain(12)
    store.log.expect_base(False)
    store.train(1)
    assert store.steps == [13, 14, 15]
    assert store.told == []
    assert store.reached == sorted(store.reached)
    assert ENDED not in store.reached


def test_a_flush_measures_what_it_has_written(store: Store) -> None:
    """Without the records of the unfinished step, which the next segment has."""
    measured = list[tuple[int, int, float]]()

    class Measuring(Batch):
        def segment_written(
            self, steps: int, size_bytes: int, digest_s: float, times: SegmentTimes
        ) -> None:
            measured.append((steps, size_bytes, digest_s))

    segments = store.log.segments
    segments.batch = Measuring(100)
    for number, record in enumerate(records_of_steps(1, 3, size_bytes=1000)):
        item = StoredRecord(number, record.head, record.layout, record.objects, 0, 0.0, record)
        segments.add(item, 1.0)
        if number == 4:  # step 2 has two records, and no mark
            segments.flush()
    segments.flush()
    assert measured == [(1, 3000, 3.0), (2, 6000, 6.0)]
    assert store.steps == [1, 3]


def test_what_no_base_makes_room_for_is_told_and_not_written(store: Store) -> None:
    store.train(20)
    assert size_below(store.run) <= 50_000
    (error,) = store.told
    assert isinstance(error, OutOfSpaceError)
    assert "Budget(disk_bytes=60000)" in error.message
    assert "continues after the next base" in str(error.hint)
    assert store.reached[-1] == ENDED


def test_a_base_that_makes_no_room_leaves_a_hole_that_is_told(store: Store) -> None:
    store.log.expect_base(True)
    store.train(20)
    assert store.told == []
    store.log.expect_base(False)
    store.log.settle(TIMEOUT_S)
    (error,) = store.told
    assert isinstance(error, OutOfSpaceError)
    assert store.reached[-1] == ENDED


def test_a_replica_that_is_asked_for_a_base_is_waited_for(store: Store) -> None:
    asked = {1}
    store.log.segments.bases_expected.append(lambda: bool(asked))
    store.train(20)
    assert store.told == []
    asked.clear()
    store.train(1)
    assert store.reached[-1] == ENDED


def test_each_rank_counts_its_own_files(run_folder: Path) -> None:
    """Those of a rank that there is no longer are rank 0's, as all that is of none."""
    run = PurePath(run_folder)
    for rank, size_bytes in ((0, 1), (1, 10), (2, 100)):
        for directory, times in ((base_dir(run, 1, 4), 1), (segment_dir(run, 1, 4, 6), 1000)):
            Path(directory).mkdir(parents=True, exist_ok=True)
            name = f"rank-{rank:05d}.safetensors"
            Path(directory, name).write_bytes(bytes(size_bytes * times))
    Path(run_folder, "run.json").write_bytes(bytes(5))
    files = PosixFileSystem()
    assert folder_bytes(files, run, 1, 2) == (10, 10_000)
    assert folder_bytes(files, run, 0, 2) == (5 + 101, 101_000)
    assert folder_bytes(files, run) == (5 + 111, 111_000)
    assert folder_bytes(files, run / "missing") == (0, 0)


# --- Without a budget -------------------------------------------------------------------


def test_an_interval_that_is_chosen_leaves_half_of_the_free_disk() -> None:
    found = LogLimits.of(0, 1000, 100)
    auto = options(method="logged", log=TO_DISK, every="auto")
    assert found.on_disk(auto, 4, 500, lambda: 80_000).interval_bytes == 10_000
    fixed = options(method="logged", log=TO_DISK, every=10)
    assert found.on_disk(fixed, 4, 500, lambda: 80_000) == found
    in_memory = options(method="logged", every="auto")
    assert found.on_disk(in_memory, 4, 500, lambda: 80_000) == found
    bound = options(
        method="logged", log=TO_DISK, every="auto", budget=everstep.Budget(disk_bytes=8500)
    )
    limits = found.on_disk(bound, 4, 500, lambda: 80_000)
    assert (limits.interval_bytes, limits.disk_bytes, limits.bases_bytes) == (2000, 8500, 500)
