"""Storage that is slow, and storage that hangs: each operation takes a quarter of the time after
which nothing counts as moving any more, and all of them together many times as long."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import everstep
from everstep.arena import PAGE_BYTES, Arena
from everstep.commit.retention import KeepRules
from everstep.errors import DeadlineError, EverstepError
from everstep.format.header import ShardIdentity
from everstep.format.writer import ChunkRing
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.log.logs import Logs
from everstep.keeper.persist import job_committer as commits_module
from everstep.keeper.persist.job_committer import JobCommitter
from everstep.keeper.process.duty import AttachedTrainer
from everstep.keeper.retain.history import HistoryFlush
from everstep.keeper.ship.couriers import Couriers
from everstep.link.messages import JobSession
from everstep.link.pool import CapturePool
from everstep.link.save import Save, complete
from everstep.options import LogOptions
from everstep.seams import ManualClock, PosixFileSystem, Seams
from everstep.seams.filesystem import StallTimer, wait_while_active
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from everstep.trainer.attach.requests import Replies
from everstep.trainer.log.kept_records import DiskLog
from tests.support.log.every_step import World
from tests.support.ranks.peer_logs import Log
from tests.support.ranks.together import RankTraining, rank_seams, resume, trainings
from tests.support.serving import bench, hold_log
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, forget, opened, raising

LIMIT_S, EACH_S = 10.0, 2.5
SHORT_S = 0.02  # of real time, which nothing may depend on


class Slow(HookedFileSystem):
    """Each operation takes its time by a clock; whoever asks whether that is too long, is told.

    Attributes:
        clock: as given.
        looks: called in the middle of each.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.looks: Callable[[], object] = lambda: None
        self.took_s = 0.0
        self.clock, self._turn = clock, threading.Lock()

    def at(self, op: str, path: PurePath) -> None:
        super().at(op, path)
        with self._turn:  # as if the disk did one at a time
            self.clock.advance(EACH_S)
            self.took_s += EACH_S
            self.looks()


def slow_run(
    run: Path, **options: Any
) -> tuple[everstep.Checkpointer, World, Slow, list[EverstepError]]:
    """Of one rank, whose keeper is a thread."""
    forget(run)
    clock, world, told = ManualClock(), World(), list[EverstepError]()
    fs = Slow(clock)
    options = {"method": "async", "every": None, "keep": 1, "on_failure": told.append} | options
    ckpt = everstep.Checkpointer(
        run,
        world.state,
        progress_timeout_s=LIMIT_S,
        keeper=everstep.KeeperOptions(process=False),
        seams=Seams(filesystem=fs, clock=clock),
        **options,
    )
    ckpt.resume()
    fs.looks = lambda: told.extend(
        [DeadlineError("it hangs")] if inspect(ckpt).channel.hung() else []
    )
    fs.took_s = 0.0
    return ckpt, world, fs, told


def test_a_slow_disk_is_not_called_hung(run_folder: Path) -> None:
    """Bases, their retention, the last one at the end."""
    ckpt, world, fs, told = slow_run(run_folder)
    for _ in range(3):
        world.train()
        ckpt.step()
        ckpt.save()
        ckpt.wait()
    world.train()
    ckpt.step()
    ckpt.close()
    assert not told
    assert fs.took_s > 10 * LIMIT_S


@pytest.mark.parametrize("history", ["last", "all"])
def test_a_slow_disk_with_a_log_on_it_is_not_called_hung(history: str, run_folder: Path) -> None:
    log = LogOptions(to="disk", batch_steps=1, lag_steps=0, history=history)
    ckpt, world, fs, told = slow_run(run_folder, method="logged", log=log)
    assert isinstance(inspect(ckpt).keeper, ThreadKeeper)
    records = inspect(ckpt).keeper.records
    assert records is not None
    for step in range(1, 8):
        world.train()
        ckpt.step()
        records.settle(TIMEOUT_S)  # the clock does not go for two at a time
        if step % 3 == 0:
            ckpt.save()
        ckpt.wait()
    ckpt.close()
    assert not told
    assert fs.took_s > 10 * LIMIT_S


OPERATIONS = ["make_dir", "create", "reserve", "write", "sync", "truncate", "rename", "sync_dir"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("op", OPERATIONS)
def test_an_operation_that_never_returns_is_found_behind_slow_ones(
    op: str, run_folder: Path
) -> None:
    ckpt, world, fs, told = slow_run(run_folder)
    gate = Gate()
    world.train()
    ckpt.step()
    fs.hook = raising(gate.wait_at, op, "*")
    ckpt.save()
    assert gate.reached.wait(TIMEOUT_S)
    fs.clock.advance(LIMIT_S - 1)
    assert not inspect(ckpt).channel.hung()
    fs.clock.advance(2)
    fs.looks = lambda: None
    assert inspect(ckpt).channel.hung()
    world.train()
    ckpt.step()
    gate.open()
    assert [f"made no progress for {LIMIT_S + 1:.0f} s" in error.message for error in told] == [
        True
    ]
    ckpt.close()
    assert len(told) == 1


# Several ranks


class Told:
    """How far the news of a rank's disk have got to another one."""

    def __init__(self, slow: JobCommitter, other: JobCommitter) -> None:
        self.sent = self.heard = self.turns = 0
        send = slow.link.send
        hear = other.link.deliver
        receive = other.link.receive

        def sending(rank: int, message: Any) -> None:
            self.sent += type(message).__name__ == "DiskProgress"
            send(rank, message)

        def hearing(data: bytes) -> Any:
            envelope = hear(data)
            if envelope is not None:
                self.heard += type(envelope.message).__name__ == "DiskProgress"
            return envelope

        def receiving(timeout_s: float) -> bytes | None:
            self.turns += 1
            return receive(timeout_s)

        slow.link.send = sending  # type: ignore[method-assign]
        other.link.deliver = hearing  # type: ignore[method-assign]
        other.link.receive = receiving  # type: ignore[method-assign]

    def wait(self) -> None:
        """Until the other one has looked at the clock since all of them have come."""
        never = threading.Event()
        while self.heard < self.sent:
            never.wait(0.001)
        turns = self.turns + 2
        while self.turns < turns:
            never.wait(0.001)


def commits_of(one: RankTraining) -> JobCommitter:
    keeper = inspect(one.ckpt).keeper
    assert isinstance(keeper, ThreadKeeper)
    commits = keeper.committer
    assert isinstance(commits, JobCommitter)
    return commits


class Pair:
    """Two ranks, and the disk of one."""

    def __init__(self, ranks: list[RankTraining], disks: list[HookedFileSystem], slow: int) -> None:
        self.ranks, self.disk, self.slow = ranks, disks[slow], slow
        self.told = Told(commits_of(ranks[slow]), commits_of(ranks[1 - slow]))

    def close(self, clock: ManualClock) -> None:
        """Whichever waits for the last base of the other gives up by the clock."""

        def end(one: RankTraining) -> None:
            with contextlib.suppress(EverstepError):
                one.ckpt.close()

        closing = [threading.Thread(target=end, args=(one,)) for one in self.ranks]
        for thread in closing:
            thread.start()
        for thread in closing:
            while thread.is_alive():
                clock.advance(1.0)
                thread.join(0.05)

    def save(self) -> list[Save]:
        for one in self.ranks:
            one.train(1)
        return [one.ckpt.save() for one in self.ranks]


@pytest.fixture(params=["one disk", "disks of their own"])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    own = request.param != "one disk"
    return tmp_path / "run", tmp_path / ("other" if own else "run")


@pytest.fixture
def errors() -> list[EverstepError]:
    return []


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=[0, 1])
def pair(
    request: pytest.FixtureRequest,
    paths: tuple[Path, Path],
    errors: list[EverstepError],
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Pair]:
    monkeypatch.setattr(commits_module, "_TICK_S", 0.01)
    disks = [HookedFileSystem(), HookedFileSystem()]
    seams = rank_seams(2, clock=clock)
    about = [
        Seams(filesystem=fs, clock=clock, group=one.group)
        for fs, one in zip(disks, seams, strict=True)
    ]
    options: dict[str, Any] = {"method": "async", "keep": 1, "on_failure": errors.append}
    options["progress_timeout_s"] = LIMIT_S
    with trainings(*paths, seams=about, **options) as ranks:
        resume(ranks)
        pair = Pair(ranks, disks, request.param)
        for save in pair.save():  # behind its messages nothing of before is under way
            save.durable.result(TIMEOUT_S)
        yield pair
        pair.disk.hook = lambda op, path: None
        pair.close(clock)


@pytest.mark.thinned(2)
def test_ranks_wait_for_one_whose_disk_is_slow(
    pair: Pair, errors: list[EverstepError], clock: ManualClock
) -> None:
    start_s, hung = clock.monotonic_s(), list[bool]()

    def slow(op: str, path: PurePath) -> None:
        clock.advance(EACH_S)
        pair.told.wait()
        hung.append(inspect(pair.ranks[pair.slow].ckpt).channel.hung())

    for one in pair.ranks:
        one.ckpt.wait(TIMEOUT_S)
    pair.disk.hook = slow
    for save in pair.save():
        save.durable.result(2 * TIMEOUT_S)
    pair.disk.hook = lambda op, path: None
    assert not errors
    assert not any(hung)
    assert clock.monotonic_s() - start_s > 3 * LIMIT_S


@pytest.mark.thinned(2)
def test_ranks_name_one_whose_disk_hangs_behind_slow_operations(
    pair: Pair, errors: list[EverstepError], clock: ManualClock
) -> None:
    gate, seen = Gate(), list[str]()

    def slow(op: str, path: PurePath) -> None:
        clock.advance(EACH_S)
        pair.told.wait()
        seen.append(op)
        if op == "sync":
            gate.wait_at()

    for one in pair.ranks:
        one.ckpt.wait(TIMEOUT_S)
    pair.disk.hook = slow
    saves = pair.save()
    assert gate.reached.wait(TIMEOUT_S)
    waits, hangs = saves[1 - pair.slow], pair.ranks[pair.slow]
    begun_s = clock.monotonic_s()
    for _ in range(2000):
        if waits.durable.done():
            break
        clock.advance(EACH_S / 5)
        pair.told.wait()
    late = waits.durable.exception(0)
    assert isinstance(late, DeadlineError)
    assert f"rank(s) {pair.slow} have not written their shards" in late.message
    assert clock.monotonic_s() - begun_s < 1.5 * LIMIT_S
    clock.advance(1.0)
    assert inspect(hangs.ckpt).channel.hung()
    pair.disk.hook = lambda op, path: None
    gate.open()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_hear_of_a_copy_to_a_slow_directory(rank: int, tmp_path: Path) -> None:
    """Also between the last byte and the name."""
    clock, heard_s = ManualClock(), list[float]()
    link: Any = SimpleNamespace(
        session=JobSession("session", rank, ("one", "two"), ()),
        send=lambda to, message: heard_s.append(clock.monotonic_s()),
        subscribe=lambda kind, receiver: None,
    )
    told = [{"where": str(tmp_path / "copies"), "keep": 1}]
    files = Slow(clock)
    couriers = Couriers(Seams(filesystem=files, clock=clock), PurePath(tmp_path / "run"))
    identity = ShardIdentity("0" * 32, 1, 0, 0, rank, 2, True)
    couriers.start(
        told, identity, Log().store, pytest.fail, keep=KeepRules(1), timeout_s=LIMIT_S, link=link
    )
    (tmp_path / "part").write_bytes(b"x" * 100)
    source = PosixFileSystem().open(tmp_path / "part")
    begun_s = clock.monotonic_s()
    couriers.bases[0].put("base/part", source)
    source.close()
    ends_s = [begun_s, *heard_s, clock.monotonic_s()]
    assert ends_s[-1] - begun_s > 2 * LIMIT_S
    assert max(b - a for a, b in itertools.pairwise(ends_s)) < 1.5 * EACH_S
    couriers.close()


# A keeper process


def test_a_keeper_process_says_how_far_its_disk_is(run_folder: Path) -> None:
    with bench(run_folder) as served:
        one = served.trainer()
        one.serve()
        one.take(1, 5)
        one.await_("done")
        before = len(one.hear("progress"))
        served.until(lambda: len(one.hear("progress")) > before, "a word of it")
        operations, log = one.hear("progress")[-1]["moves"]
        assert operations > one.hear("progress")[-1]["written_bytes"] + 10
        assert log == 0


def test_a_keeper_that_writes_the_log_first_says_that_it_is_at_work(
    store: tuple[LogStore, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, gate = store
    moving, told = Moving(6, gate.open), list[Any]()
    monkeypatch.setattr(LogStore, "moves", property(lambda self: moving()))
    logs = Logs(Seams(), PurePath("/run"), ChunkRing(2, 1), lambda: None)
    logs.current = log
    connection: Any = SimpleNamespace(send=told.append)
    trainer = AttachedTrainer(connection, 1, log.arena, timeout_s=SHORT_S)
    ((arena, index),) = logs.recall(trainer, own=True)
    assert arena is log.arena
    assert index
    assert told
    changed = threading.Condition()
    replies = Replies(changed, ManualClock())
    for message in told:
        replies.add_blob(message)
    assert replies.chunks == len(told)


# What waits for something


class Moving:
    """A count that goes up at each look.

    Args:
        looks: so many, and something ends; with nothing to end, it goes up no more.
    """

    def __init__(self, looks: int, end: Callable[[], object] | None = None) -> None:
        self._looks, self._end = looks, end
        self.at = 0

    def __call__(self) -> int:
        self.at += self._end is not None or self.at < self._looks
        if self.at == self._looks and self._end is not None:
            self._end()
        return self.at


def test_what_stands_still_is_noticed_from_where_it_did() -> None:
    clock = ManualClock()
    still = StallTimer(10.0, clock.monotonic_s)
    for at in range(5):
        assert not still.is_over(at)
        clock.advance(9.0)
        assert not still.is_over(at)
        clock.advance(1.0)
        assert still.for_s(at) == 10.0
    clock.advance(0.5)
    assert still.is_over(4)
    assert not still.is_over(5)


def test_an_end_is_waited_for_as_long_as_something_moves() -> None:
    end, looked = Future[int](), list[int]()
    moving = Moving(9, lambda: end.set_result(7))
    assert wait_while_active(end, SHORT_S, moving, alive=lambda: looked.append(moving.at))
    assert looked
    assert not wait_while_active(Future[int](), SHORT_S, Moving(5))
    failed = Future[int]()
    failed.set_exception(TimeoutError("of a server"))
    assert wait_while_active(failed, SHORT_S, Moving(0))


@pytest.fixture
def store() -> tuple[LogStore, Gate]:
    log, gate = Log(), Gate()
    log.step(1)
    hold_log(log.store, gate)
    return log.store, gate


def test_a_log_that_is_written_slowly_is_waited_for(
    store: tuple[LogStore, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, gate = store
    moving = Moving(6, gate.open)
    monkeypatch.setattr(LogStore, "moves", property(lambda self: moving()))
    log.settle(SHORT_S)
    assert moving.at >= 6


def test_the_log_of_a_promise_keeps_its_base_alive(
    store: tuple[LogStore, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, gate = store
    moving, seen = Moving(6, gate.open), list[int]()
    monkeypatch.setattr(LogStore, "moves", property(lambda self: moving()))
    log.segments.after = 0
    HistoryFlush("all", 1).before_base(9, log, SHORT_S, lambda: seen.append(moving.at))
    assert seen


@pytest.mark.parametrize("moves", [True, False])
def test_training_waits_for_a_log_as_long_as_it_moves(moves: bool) -> None:
    told = list[EverstepError]()
    options: Any = SimpleNamespace(
        log_on_disk=True, log=SimpleNamespace(lag_steps=0), progress_timeout_s=SHORT_S
    )
    disk = DiskLog(options, SimpleNamespace(post=told.append))  # type: ignore[arg-type]
    moving = Moving(6, lambda: disk.reached(1))

    class Keeper:
        lost, moves, written_bytes = None, 0, 0
        log_moves = property(lambda self: moving() if moves else 0)

    disk.start(Keeper())  # type: ignore[arg-type]
    disk.marked(1, 1)
    assert ["was written to disk within" in error.message for error in told] == [True] * (not moves)


@pytest.mark.parametrize("moves", [True, False])
def test_training_waits_for_the_base_of_a_log_as_long_as_it_moves(moves: bool) -> None:
    told, save = list[EverstepError](), Save(1, 1)
    options: Any = SimpleNamespace(
        log_on_disk=True, log=SimpleNamespace(lag_steps=0), progress_timeout_s=SHORT_S
    )
    disk = DiskLog(options, SimpleNamespace(post=told.append))  # type: ignore[arg-type]
    moving = Moving(6, lambda: complete(save.durable, 1))

    class Keeper:
        lost, log_moves, written_bytes = None, 0, 0
        moves = property(lambda self: moving() if going else 0)

    going = moves
    disk.start(Keeper())  # type: ignore[arg-type]
    disk.base_taken(save, 0, leads=False)
    disk.over(2)
    assert ["is not durable" in error.message for error in told] == [True] * (not moves)


@pytest.mark.parametrize("moves", [True, False])
def test_memory_is_waited_for_as_long_as_a_base_moves(moves: bool) -> None:
    pool = CapturePool(Arena.anonymous(PAGE_BYTES))
    room = pool.acquire(PAGE_BYTES, timeout_s=0)
    moving = Moving(6, lambda: pool.release(room))

    class Keeper:
        lost, log_moves = None, 0
        moves = property(lambda self: moving() if moves else 0)

    keeper: Any = Keeper()
    pool.keeper = keeper
    if moves:
        assert pool.acquire(PAGE_BYTES, timeout_s=SHORT_S).offset == 0
        return
    with pytest.raises(DeadlineError, match="no host memory was released within"):
        pool.acquire(PAGE_BYTES, timeout_s=SHORT_S)


class _Keeper:
    """One that answers, or does not."""

    pid, lost, log_moves, written_bytes, moves = 7, None, 0, 0, 0


@pytest.mark.parametrize("says", ["parts", "operations", "segments"])
def test_an_answer_is_waited_for_as_long_as_anything_comes(says: str) -> None:
    """The keeper's memory may be large, and the machine busy."""
    changed, clock, keeper = threading.Condition(), ManualClock(), _Keeper()
    replies = Replies(changed, clock)
    left = 9

    def look(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        nonlocal left
        left -= 1
        clock.advance(0.9 * LIMIT_S)
        if says == "parts":
            replies.add_blob({"number": 0, "part": b"x"})
        elif says == "operations":
            keeper.moves += 1
        else:
            keeper.log_moves += 1
        if not left:
            changed.release()
            replies.arrived({"kind": "recalled"}, [])
            changed.acquire()
        return predicate()

    changed.wait_for = look  # type: ignore[method-assign]
    message, _ = replies.wait(keeper, "recall", "recalled", LIMIT_S)
    assert message["blobs"] == ({0: b"x" * 9} if says == "parts" else {})


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    changed, clock, waited = threading.Condition(), ManualClock(), list[float]()
    replies = Replies(changed, clock)

    def look(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if len(waited) < 3:
            replies.add_blob({"number": 0, "part": b"x"})
        waited.append(1.0)
        clock.advance(1.0)
        return predicate()

    changed.wait_for = look  # type: ignore[method-assign]
    with pytest.raises(DeadlineError, match="has not replied to 'recall' within 10 s"):
        replies.wait(_Keeper(), "recall", "recalled", LIMIT_S)
    assert LIMIT_S < sum(waited) - 3 <= LIMIT_S + 1


def test_a_transfer_behind_those_of_others_does_not_hang() -> None:
    """Bases and the log share their threads: what is ahead of a segment may be a whole base."""
    ring, gates, limit_s = ChunkRing(2, 1), [Gate() for _ in range(4)], 0.5
    ahead = [ring.threads.submit(gate.wait_at) for gate in gates]
    mine = ring.threads.submit(lambda: 7)
    ended: Any = type(ring.threads).ended
    looks = iter(zip(gates, ahead, strict=True))

    def look(threads: Any) -> int:
        if threads is ring.threads and (transfer := next(looks, None)) is not None:
            transfer[0].open()
            transfer[1].result(TIMEOUT_S)
        return int(ended.fget(threads))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(ring.threads), "ended", property(look))
        assert ring.is_over(mine, limit_s)
    hangs = Gate()
    stuck = ring.threads.submit(hangs.wait_at)
    assert not ring.is_over(stuck, SHORT_S)
    hangs.open()
    stuck.result(TIMEOUT_S)
    ring.close()


def test_whoever_waits_for_memory_looks_at_the_keeper_that_writes(run_folder: Path) -> None:
    with opened(run_folder, {"n": torch.ones(4)}, method="lazy") as ckpt:
        ckpt.resume()
        pool = inspect(ckpt).keepers.pool
        assert pool is not None
        assert pool.keeper is not None
        before = pool.keeper.moves
        ckpt.step()
        ckpt.save()
        ckpt.wait(TIMEOUT_S)
        assert pool.keeper.moves != before
