"""How much of the log the keeper writes at a time, where it chooses that: it follows the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest

import everstep
from everstep.errors import OptionError
from everstep.format.names import marker_name, parse_segment
from everstep.keeper.log import segment_queue
from everstep.keeper.log.segment_queue import AutoBatch, Batch
from everstep.options import Budget, LogOptions
from everstep.seams import ManualClock, Seams, WriteFile
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from tests.support.cadence import MB, Run
from tests.support.logged import World, opened, segments_of
from tests.support.ranks.logs import ON_DISK, resumed
from tests.support.ranks.logs import die as die_together
from tests.support.ranks.together import resume, train, trainings
from tests.support.serving import serving
from tests.support.world import TIMEOUT_S, HookedFileSystem, forget

AUTO = LogOptions(to="disk", batch_steps="auto", history="all", audit=False)


class Clock(ManualClock):
    """Time of training; and in each thread what it has waited for the disk besides."""

    def __init__(self) -> None:
        super().__init__()
        self._waited = threading.local()

    def monotonic_s(self) -> float:
        return super().monotonic_s() + getattr(self._waited, "s", 0.0)

    def wait(self, seconds: float) -> None:
        self._waited.s = getattr(self._waited, "s", 0.0) + seconds


class Disk(HookedFileSystem):
    """A real disk, on which each segment of the log costs so much of a thread's time.

    Attributes:
        price_s: of its marker.
        bytes_per_s: of the records in its file.
        body_bytes: these of the last one.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(self._pay)
        self.clock, self.price_s, self.bytes_per_s = clock, 0.0, 1e12
        self.body_bytes = 0

    def _pay(self, op: str, path: PurePath) -> None:
        if op == "rename" and "log" in path.parts and path.name == marker_name(0):
            self.clock.wait(self.price_s)

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        file = super().create(path, direct=direct)
        return _Metered(self, file) if direct and "log" in path.parts else file


class _Metered:
    def __init__(self, disk: Disk, inner: WriteFile) -> None:
        self._disk, self._inner, self._bytes = disk, inner, 0
        self.reserve, self.close, self.truncate = inner.reserve, inner.close, inner.truncate

    def write(self, data: memoryview, offset: int) -> None:
        self._bytes += data.nbytes
        self._inner.write(data, offset)

    def sync(self) -> None:
        if self._bytes > 0:  # before the header
            self._disk.clock.wait(self._bytes / self._disk.bytes_per_s)
            self._disk.body_bytes = self._bytes
        self._bytes = -1 << 40
        self._inner.sync()


class Training:
    """One that goes on only when the log has done all that it will.

    Attributes:
        states: after each step.
    """

    def __init__(self, run: Path, **options: Any) -> None:
        self.run, self.clock = run, Clock()
        self.disk, self.world = Disk(self.clock), World()
        seams = Seams(filesystem=self.disk, clock=self.clock)
        self.options = {"log": AUTO, "every": 1000, "seams": seams} | options
        self.states: dict[int, Any] = {}

    @contextmanager
    def opened(self) -> Iterator[Training]:
        with opened(self.run, self.world, **self.options) as self.ckpt:
            self.ckpt.resume()
            yield self
        forget(self.run)

    def train(self, steps: int, step_s: float = 1.0) -> None:
        for _ in range(steps):
            self.clock.advance(step_s)
            self.world.train()
            self.ckpt.step()
            self.ckpt.wait()
            self.records.settle(TIMEOUT_S)
            self.states[self.ckpt.stats().step] = self.world.snapshot()

    @property
    def records(self) -> Any:
        keeper = inspect(self.ckpt).keeper
        assert isinstance(keeper, ThreadKeeper)
        assert keeper.records is not None
        return keeper.records

    @property
    def batch(self) -> int | None:
        return self.ckpt.stats().log_batch_steps


def lengths(run: Path) -> list[int]:
    return [segment.last - segment.after for segment in segments_of(run)]


@pytest.mark.slow
def test_the_batch_of_a_running_keeper_follows_the_disk(run_folder: Path) -> None:
    with Training(run_folder).opened() as run:
        run.disk.price_s = 0.245
        run.train(49)
        assert run.batch == 10, "as long as too little is known"
        run.train(15)
        assert run.batch == 3
        run.disk.price_s = 0.545  # another user of the disk has come
        run.train(80)
        assert run.batch == 6
        run.disk.price_s = 0.045
        run.train(130)
        assert run.batch == 1
        run.train(50, step_s=0.1)
        assert run.batch == 5, "a step takes less, so a write holds more of them"
    found = lengths(run_folder)
    assert found[:5] == [10] * 5
    assert {1, 3, 5, 6, 10} <= set(found)
    other = World(seed=9)
    for step in (2, 33, 61, 90, 200, 250, 290):
        with opened(run_folder, other, log=AUTO, every=1000) as ckpt:
            assert ckpt.resume(step=step).exact
            assert other.snapshot() == run.states[step], step
        forget(run_folder)


def test_bytes_that_take_their_time_leave_less_of_it(run_folder: Path) -> None:
    """The same price, beside writes that take 0.7 s of each second."""
    with Training(run_folder).opened() as run:
        run.disk.price_s = 0.245
        run.train(10)
        run.disk.bytes_per_s = run.disk.body_bytes / 10 / 0.7
        run.train(80)
        assert run.batch == pytest.approx(0.245 / (0.1 * 0.3), abs=2)  # and not 3


def test_the_write_budget_counts_what_waits_to_be_written() -> None:
    """Behind the last look ahead steps get 100 times as quick; the log stops in time for what is
    in a segment that is still to come."""
    log, budget = LogOptions(to="disk", batch_steps="auto"), Budget(write_bytes_per_day=3 * MB)
    found = {}
    for steps in (2, 5):
        run = Run("logged", every=None, log=log, budget=budget)
        run.stats.log_batch_steps = steps
        run.train(60, step_s=100.0)
        assert run.told == []
        run.train(12, step_s=1.0, log_bytes=400_000)
        assert run.told == [False]
        found[steps] = run.stats.log_bytes
        assert found[steps] + steps * 400_000 <= 3 * MB
    assert found[2] == found[5] + 3 * 400_000


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("lag_steps", "first"), [(0, 1), (3, 4), (30, 10)])
def test_it_is_no_longer_than_training_waits_for(
    lag_steps: int, first: int, run_folder: Path
) -> None:
    options = replace(AUTO, lag_steps=lag_steps)
    with Training(run_folder, log=options, progress_timeout_s=5).opened() as run:
        run.disk.price_s = 5.0
        run.train(1)
        assert run.batch == first
        run.train(60)
        assert run.batch == lag_steps + 1
    assert max(lengths(run_folder)) <= lag_steps + 1


@pytest.mark.thinned(2)
@pytest.mark.parametrize("batch_steps", [10, 1000, "auto"])
def test_a_batch_leaves_room_for_what_comes(batch_steps: int | str, run_folder: Path) -> None:
    """What waits to be written is not let go of: a log whose memory was full of it made holes,
    each of which took a base, and wrote nothing."""
    options: dict[str, Any] = {"log": replace(AUTO, batch_steps=batch_steps), "seams": Seams()}
    options |= {"budget": Budget(host_bytes=240_000), "progress_timeout_s": 5}
    with Training(run_folder, **options).opened() as run:
        run.train(60)
        stats = run.ckpt.stats()
        assert (stats.log_holes, stats.saves < 30) == (0, True)
        assert stats.log_written_bytes > 50 * 392
    assert max(lengths(run_folder)) < 10
    assert min(lengths(run_folder)[1:-1]) > 1 or batch_steps == "auto"


def test_each_rank_may_have_a_batch_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    monkeypatch.setattr(segment_queue, "batch_from_wire", lambda told: Batch(told["steps"]))
    with trainings(path, path, **ON_DISK | {"every": 1000}) as ranks:
        resume(ranks)
        for rank, one in enumerate(ranks):
            records = inspect(one.ckpt).keeper.records
            records.segments.batch.steps = (3, 2)[rank]
        train(ranks, 8)
        die_together(ranks)
    found = [
        {parse_segment(p.parent.name) for p in path.rglob(f"log/*/{marker_name(rank)}")}
        for rank in (0, 1)
    ]
    assert found[0] - found[1]
    assert found[1] - found[0]
    (path / "timeline-00001/log/000000000006-000000000008" / marker_name(1)).unlink()
    resumed((path, path), 6, replayed=5)


# --- As it was asked for ----------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("every", "batch_steps", "auto", "first"),
    [
        (100, None, False, 10),
        ("auto", None, True, 10),
        ("auto", 10, False, 10),
        ("auto", 3, False, 3),
        (100, "auto", True, 10),
        (100, 25, False, 25),
    ],
)
def test_who_chooses(
    every: int | str, batch_steps: int | str | None, auto: bool, first: int, run_folder: Path
) -> None:
    """A number is a number; with ``every="auto"`` the batch is chosen, too, unless there is one."""
    options = LogOptions(to="disk", batch_steps=batch_steps)
    with Training(run_folder, log=options, every=every).opened() as run:
        assert inspect(run.ckpt).options.batch_auto is auto
        assert isinstance(run.records.segments.batch, AutoBatch) is auto
        run.train(3)
        assert run.batch == first


@pytest.mark.parametrize("batch_steps", [0, -1, 100_001, 2.5, True, "automatic", ""])
def test_batches_that_are_none(batch_steps: Any) -> None:
    with pytest.raises(OptionError, match=r'batch_steps must be 1 to 100000, or "auto", not'):
        LogOptions(to="disk", batch_steps=batch_steps)


def test_a_number_that_does_not_go_with_the_lag_is_refused() -> None:
    with pytest.raises(OptionError) as caught:
        LogOptions(to="disk", batch_steps=5, lag_steps=3)
    assert caught.value.hint == 'LogOptions(batch_steps=4), or "auto"'


def test_the_lag_bounds_the_batch_that_nobody_gave() -> None:
    assert LogOptions(to="disk").batch_first == 10
    for batch_steps in (None, "auto"):
        firsts = [
            LogOptions(to="disk", batch_steps=batch_steps, lag_steps=lag).batch_first
            for lag in (0, 3, 30)
        ]
        assert firsts == [1, 4, 10]


def test_a_log_in_memory_has_no_batch(run_folder: Path) -> None:
    with Training(run_folder, log=LogOptions(batch_steps="auto"), every="auto").opened() as run:
        run.train(3)
        assert run.batch is None


def test_a_keeper_process_says_what_it_chose(run_folder: Path) -> None:
    """By the clocks of this machine: something that is carried."""
    with serving(run_folder) as served:
        world = World()
        keeper = everstep.KeeperOptions()
        with opened(served.run, world, log=AUTO, every=1000, keeper=keeper) as ckpt:
            ckpt.resume()
            for _ in range(40):
                world.train()
                ckpt.step()
            ckpt.save()
            ckpt.wait()
            stats = ckpt.stats()
            current = served.server.duties.logs.current
            assert current is not None
            assert isinstance(current.segments.batch, AutoBatch)
            assert (stats.log_batch_steps or 0) >= 1
            assert stats.log_written_bytes > 0
