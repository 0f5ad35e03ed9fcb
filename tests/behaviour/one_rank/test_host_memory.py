"""Plain data counts as host memory: in bases that wait for a disk, and in the log (I10)."""

from __future__ import annotations

import re
import resource
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.arena import PAGE_BYTES, Arena
from everstep.errors import DeadlineError, EverstepError, OutOfSpaceError
from everstep.format.log import RecordHead
from everstep.keeper.log.segment_queue import Batch
from everstep.link.messages import RECORD_BYTES, record_memory_bytes
from everstep.link.pool import CapturePool
from everstep.options import Budget, KeeperOptions
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from everstep.trainer.log.kept_records import LogMemory, LogTarget
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, acquiring, opened, raising

MB = 1 << 20


# --- Memory beside the arena ------------------------------------------------------------


def pool_of(pages: int) -> CapturePool:
    return CapturePool(Arena.anonymous(pages * PAGE_BYTES))


def test_what_lies_beside_a_block_is_room_that_others_do_not_have() -> None:
    pool = pool_of(8)
    first = pool.acquire(PAGE_BYTES, beside_bytes=3 * PAGE_BYTES, timeout_s=0)
    second = pool.acquire(PAGE_BYTES, beside_bytes=2 * PAGE_BYTES, timeout_s=0)
    assert pool.acquire_now(2 * PAGE_BYTES) is None
    with pytest.raises(DeadlineError, match="no host memory was released"):
        pool.acquire(PAGE_BYTES, beside_bytes=1, timeout_s=0)
    assert pool.taken_bytes == 7 * PAGE_BYTES
    pool.charge(second, 10)  # less than was thought
    assert pool.acquire_now(PAGE_BYTES, PAGE_BYTES) is not None
    pool.release(first)
    pool.release(second)
    assert pool.acquire_now(PAGE_BYTES, 6 * PAGE_BYTES) is not None


def test_more_than_was_thought_is_there_already_and_the_next_waits() -> None:
    pool = pool_of(8)
    first = pool.acquire(PAGE_BYTES, timeout_s=0)
    pool.charge(first, 20 * PAGE_BYTES)
    assert pool.acquire_now(1) is None
    pool.release(first)
    assert pool.acquire_now(8 * PAGE_BYTES) is not None


def test_a_base_that_is_kept_goes_with_all_that_belongs_to_it() -> None:
    pool, told = pool_of(8), list[str]()
    room = pool.acquire(PAGE_BYTES, beside_bytes=6 * PAGE_BYTES, timeout_s=0)
    pool.keep(room, lambda: told.append("forgotten"))
    pool.acquire(PAGE_BYTES, beside_bytes=6 * PAGE_BYTES, timeout_s=0)
    assert told == ["forgotten"]


def test_the_log_gives_way_only_where_no_base_will() -> None:
    pool, asked = pool_of(8), list[int]()
    record = pool.acquire_now(4 * PAGE_BYTES)
    assert record is not None

    def give_way() -> bool:
        asked.append(len(asked))
        pool.release(record)
        return True

    log: Any = SimpleNamespace(give_way=give_way)
    pool.log = log
    base = pool.acquire(3 * PAGE_BYTES, timeout_s=0)
    with pytest.raises(DeadlineError):
        pool.acquire(5 * PAGE_BYTES, timeout_s=0)
    assert not asked, "the base before is going to be released"
    pool.release(base)
    assert pool.acquire(5 * PAGE_BYTES, timeout_s=0).offset == 0
    assert asked == [0]


def test_plain_data_beyond_the_budget_is_refused_with_a_number_that_will_do() -> None:
    with pytest.raises(OutOfSpaceError, match=r"\(8000 of them plain data\)") as caught:
        pool_of(2).acquire(100, beside_bytes=8_000, timeout_s=0)
    (need,) = re.findall(r"host_bytes=(\d+)", str(caught.value.hint))
    pool_of(int(need) // PAGE_BYTES).acquire(100, beside_bytes=8_000, timeout_s=0)


# --- The log ----------------------------------------------------------------------------


class _Keeper:
    def forget_log(self, upto: int) -> None:
        pass


class _Disk:
    on = False

    def has(self, number: int) -> bool:
        return True


class Rooms:
    """The memory of a log of which each step has one record."""

    def __init__(self, bytes_max: int, *, arena_bytes: int = 64 * MB) -> None:
        self.pool = CapturePool(Arena.anonymous(arena_bytes))
        disk: Any = _Disk()
        keeper: Any = _Keeper()
        self.rooms, self.step = LogMemory(disk, bytes_max), 0
        self.into = LogTarget(keeper, self.pool, 1)
        self.rooms.start(self.into)

    def record(self, size_bytes: int, plain_bytes: int = 0, known: int | None = None) -> bool:
        room = self.rooms.take(size_bytes, plain_bytes if known is None else known)
        if room is None:
            return False
        self.step += 1
        head = RecordHead("mark", 1, self.step, self.step, "s")
        assert self.rooms.keep(self.into, head, room, plain_bytes) is not None
        return True

    def until_half_full(self, size_bytes: int, plain_bytes: int = 0) -> int:
        """Records until a base is asked for."""
        while not self.rooms.half_full:
            assert self.record(size_bytes, plain_bytes)
        return self.step


def test_plain_data_of_records_fills_the_log() -> None:
    log = Rooms(10 * MB)
    assert log.until_half_full(100, 200_000) <= 5 * MB // 200_000 + 1
    assert log.rooms.kept_bytes == log.step * (PAGE_BYTES + 200_000 + RECORD_BYTES)
    while log.record(100, 200_000):
        pass
    assert log.step * 200_000 < 10 * MB
    log.rooms.base_durable(log.step)
    assert log.rooms.kept_bytes == 0
    assert log.pool.acquire_now(64 * MB) is not None, "all of it was given back"


def test_what_was_not_known_when_the_room_was_taken_counts_too() -> None:
    log = Rooms(10 * MB)
    log.record(100, 6 * MB, known=0)
    log.record(100)
    assert log.rooms.half_full


@pytest.mark.parametrize("size_bytes", [1, 100, PAGE_BYTES + 1])
def test_small_records_count_as_the_pages_that_they_take(size_bytes: int) -> None:
    """The arena was full of them while they counted as a quarter of it: each time there was a
    hole, and then two bases."""
    log = Rooms(2 * MB, arena_bytes=2 * MB)
    log.until_half_full(size_bytes)
    assert 2 * log.pool.used_bytes <= 2 * MB
    assert log.rooms.kept_bytes == log.step * record_memory_bytes(size_bytes, {})


def test_while_a_base_is_under_way_no_other_is_asked_for_until_what_follows_is_as_much() -> None:
    log = Rooms(10 * MB)
    first = log.until_half_full(MB // 2)
    log.rooms.base_taken()
    log.record(MB // 2)
    assert not log.rooms.half_full, "the one under way relieves it"
    log.rooms.base_failed()
    log.record(MB // 2)
    assert log.rooms.half_full, "it does not"
    log.rooms.base_taken()
    log.rooms.base_durable(log.step)
    assert log.until_half_full(MB // 2) == 2 * first + 2
    log.rooms.base_taken()
    log.rooms.base_durable(first)  # one that was asked for before
    log.record(MB // 2)
    assert not log.rooms.half_full


def test_records_that_go_are_not_moved_about() -> None:
    """Taken from the front of a list, 300,000 of them held training up for 8 s."""
    assert isinstance(Rooms(MB).rooms.kept, deque)


def test_a_segment_is_full_when_its_records_take_so_much_memory() -> None:
    """What waits to be written cannot be let go of, and plain data of it neither."""
    batch = Batch(1000, 10 * MB, 2 * MB)
    assert not batch.is_full(10, 100, MB)
    assert batch.is_full(10, 100, 2 * MB)


# --- Of a Checkpointer ------------------------------------------------------------------


class World:
    """A tiny model, and as much plain data as a test wants."""

    def __init__(self, plain_bytes: int) -> None:
        model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.model = model
        self.state: dict[str, Any] = {"m": model, "o": self.optimizer, "order": b"x" * plain_bytes}

    def train(self) -> None:
        self.model(torch.ones(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def logging_options(run: Path, host_bytes: int, **more: Any) -> dict[str, Any]:
    keeper = everstep.KeeperOptions(process=False)
    budget = Budget(host_bytes=host_bytes)
    return {"method": "logged", "every": None, "budget": budget, "keeper": keeper, **more}


def held_by(ckpt: everstep.Checkpointer) -> int:
    """Bytes of plain data that the log of a keeper in this process holds."""
    keeper = inspect(ckpt).keeper
    assert isinstance(keeper, ThreadKeeper)
    assert keeper.records is not None
    keeper.records.settle(TIMEOUT_S)
    return sum(_size(record.objects) for record in keeper.records.records())


def _size(objects: Mapping[str, bytes]) -> int:
    return sum(map(len, objects.values()))


def test_a_log_of_plain_data_stays_within_the_budget(run_folder: Path) -> None:
    """10 MB of it in a budget of 4 MB: bases come in time, and there is no hole."""
    world, most = World(100_000), 0
    with everstep.Checkpointer(run_folder, world.state, **logging_options(run_folder, 4 * MB)) as c:
        c.resume()
        for _ in range(100):
            world.train()
            c.step()
            c.wait()
            most = max(most, held_by(c))
        stats = c.stats()
        assert most < 4 * MB
        assert stats.host_bytes <= 4 * MB
        assert stats.host_bytes >= most, "and it is told"
        assert stats.log_holes == 0
        assert 5 <= stats.saves <= 10


def test_a_log_of_which_no_step_fits_is_refused_with_a_number_that_will_do(
    run_folder: Path,
) -> None:
    world = World(300_000)
    refused = pytest.raises(OutOfSpaceError, match=r"plain data.* of the budget of")
    with refused as caught:
        everstep.Checkpointer(run_folder, world.state, **logging_options(run_folder, 500_000))
    (need,) = re.findall(r"host_bytes=(\d+)", str(caught.value.hint))
    options = logging_options(run_folder, int(need))
    with everstep.Checkpointer(run_folder, world.state, **options) as ckpt:
        ckpt.resume()
        for _ in range(3):
            world.train()
            ckpt.step()
            ckpt.wait()
        assert ckpt.stats().log_holes == 0


def test_plain_data_that_outgrows_the_log_is_told_once_and_training_goes_on(
    run_folder: Path,
) -> None:
    world, told = World(1000), list[EverstepError]()
    options = logging_options(run_folder, MB, on_failure=told.append)
    with everstep.Checkpointer(run_folder, world.state, **options) as ckpt:
        ckpt.resume()
        for step in range(12):
            if step == 4:
                world.state["order"] = b"x" * (2 * MB)
            if step == 8:
                world.state["order"] = b"x"
            world.train()
            ckpt.step()
            ckpt.wait()
        holes = ckpt.stats().log_holes
        for _ in range(3):
            world.train()
            ckpt.step()
            ckpt.wait()
        assert holes >= 1
        assert ckpt.stats().log_holes == holes, "the log goes on"
    records = [error for error in told if error.message.startswith("a record of the log needs")]
    assert len(records) == 1
    bases = [error for error in told if error not in records]
    assert bases
    assert all("copy of the state takes" in error.message for error in bases)


def test_a_base_that_has_no_room_beside_the_log_comes_first(run_folder: Path) -> None:
    """Only a base lets the log go, and only the log leaves room for a base: neither would ever
    have gone on."""
    world, told = World(1000), list[EverstepError]()
    options = logging_options(run_folder, 4 * MB, on_failure=told.append)
    with everstep.Checkpointer(run_folder, world.state, **options) as ckpt:
        ckpt.resume()
        for _ in range(80):
            world.train()
            ckpt.step()
        ckpt.wait()
        assert (ckpt.stats().durable_step, ckpt.stats().log_holes) == (1, 0)
        assert inspect(ckpt).recorder is not None
        assert inspect(ckpt).recorder.memory.kept_bytes > MB
        world.state["order"] = b"x" * (3 * MB)
        inspect(ckpt).state.survey().measure()
        for _ in range(2):
            world.train()
            ckpt.step()
        ckpt.wait()
        assert ckpt.stats().durable_step == 82
        assert ckpt.stats().host_bytes <= 4 * MB
    assert any("log was dropped" in error.message for error in told)
    assert not any(isinstance(error, DeadlineError) for error in told)
    again = World(1)
    other = run_folder.with_name("other")
    run_folder.rename(other)
    with everstep.Checkpointer(other, again.state, method="lazy") as ckpt:
        assert ckpt.resume().step == 82
    assert again.state["order"] == world.state["order"]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["async", "lazy"])
@pytest.mark.parametrize("room", [None, 3])
def test_bases_of_plain_data_wait_for_a_slow_disk(
    room: int | None, method: str, run_folder: Path
) -> None:
    """Only so many as are announced; 97 of them waited where it said 29."""
    plain_bytes = 30 * MB
    state = {"t": torch.zeros(10), "order": b"x" * plain_bytes}
    budget = Budget(host_bytes=room and room * (plain_bytes + 65_536))
    gate, fs = Gate(), HookedFileSystem()
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    options = {"method": method, "budget": budget, "keep": 9}
    with opened(run_folder, state, fs=fs, **options) as ckpt:
        for _ in range(room or 2):
            ckpt.step()
            ckpt.save()
        ckpt.step()
        no_memory = pytest.raises(DeadlineError, match="no host memory was released")
        with no_memory, acquiring(ckpt, timeout_s=0.5):
            ckpt.save()
        assert ckpt.stats().host_bytes >= (room or 2) * plain_bytes
        gate.open()
        ckpt.wait()
        assert ckpt.stats().committed == (room or 2)


def test_a_base_of_plain_data_that_can_never_fit_is_refused_early(run_folder: Path) -> None:
    state = {"t": torch.zeros(10), "order": b"x" * MB}
    budget = Budget(host_bytes=MB)
    with pytest.raises(OutOfSpaceError, match="copies the state"):
        everstep.Checkpointer(run_folder, state, method="lazy", every=None, budget=budget)


def test_the_announcement_tells_of_plain_data_in_each_step(
    run_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world = World(MB)
    options = logging_options(run_folder, 64 * MB)
    with everstep.Checkpointer(run_folder, world.state, **options):
        assert re.search(r"of gradients and 1\.1 MB of plain data for each", capfd.readouterr().err)
    lazy: dict[str, Any] = {"method": "lazy", "every": None}
    with everstep.Checkpointer(run_folder.with_name("lazy"), world.state, **lazy):
        assert "per base in flight, 63 at most" in capfd.readouterr().err


# --- A limit of file sizes (ulimit -f), which counts for shared memory, too -------------


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["lazy", "logged", "lowdiff_plus"])
def test_a_small_state_is_saved_under_a_limit_of_file_sizes(
    method: str, file_limit: Callable[[int], None], run_folder: Path
) -> None:
    file_limit(64 * MB)  # far less than half of the memory of a machine
    model = nn.Linear(4, 4)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with everstep.Checkpointer(run_folder, state, method=method, every=1) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.wait()
        assert ckpt.stats().durable_step == 1


def test_a_state_beyond_the_limit_of_file_sizes_is_refused_with_the_numbers(
    file_limit: Callable[[int], None], run_folder: Path
) -> None:
    file_limit(2 * MB)
    state = {"model": nn.Linear(1, MB, bias=False)}
    said = r"needs \d{7} bytes .* file sizes \(ulimit -f\) of 2097152 bytes leaves 2031616"
    with pytest.raises(OutOfSpaceError, match=said) as caught:
        everstep.Checkpointer(run_folder, state)
    assert "ulimit -f unlimited" in str(caught.value.hint)
    assert not run_folder.exists()
    everstep.Checkpointer(run_folder, state, keeper=KeeperOptions(process=False)).close()
