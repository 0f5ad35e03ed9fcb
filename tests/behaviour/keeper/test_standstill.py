"""Where all of this process stood still (stopped, frozen, on a paused machine), that is not held
against the storage; what hangs behind it is told of as ever."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.arena import PAGE_BYTES, Arena
from everstep.capture.dispatch import Dispatch
from everstep.capture.lane import CpuTransfer
from everstep.errors import DeadlineError
from everstep.format.reader import read_result
from everstep.format.writer import CHUNK_BYTES, ChunkRing, _wait
from everstep.keeper.ship.courier import Courier
from everstep.link.channel import BackgroundChannel
from everstep.link.pool import CapturePool
from everstep.seams import ManualClock, SystemClock
from everstep.seams import clock as clock_module
from everstep.seams.clock import WaitBudget
from everstep.seams.processes.threads import Condition, Outcome, wait_all, wait_done
from everstep.testing import inspect
from everstep.tiers.memory import MemoryTier
from everstep.trainer.attach.requests import ReplicaProgress
from tests.support.events import Capture
from tests.support.following import until
from tests.support.lost_keepers import stopped
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, opened, raising

HOUR_S, TIMEOUT_OF_PROGRESS_S = 3600.0, 120.0
RING = ChunkRing(1, 1)


class LookedAt(SystemClock):
    """The real one's way to count, by a clock that moves when told to."""

    def __init__(self, by: ManualClock) -> None:
        super().__init__(by.monotonic_s)
        self.by = by

    def goes_on(self, seconds: float) -> None:
        """So long somebody looks several times a second."""
        for _ in range(round(seconds / 0.25)):
            self.by.advance(0.25)
            self.running_s()


class Waits:
    """Every wait of a condition, without waiting: in the first an hour passes in which nobody runs,
    and behind it comes what was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.waited_s = ManualClock(), 0.0
        self.then: Callable[[], object] | None = None
        self._stood = False
        time_of = SimpleNamespace(monotonic=self.clock.monotonic_s)
        monkeypatch.setattr(clock_module, "time", time_of)
        monkeypatch.setattr(threading, "_time", self.clock.monotonic_s)
        monkeypatch.setattr(Condition, "wait", self._wait)

    def _wait(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        if not self._stood:
            self._stood = True
            self.clock.advance(HOUR_S)
            return False
        then, self.then = self.then, None
        if then is not None:
            then()
            return True
        self.clock.advance(timeout_s)
        self.waited_s += timeout_s
        assert self.waited_s < TIMEOUT_OF_PROGRESS_S + 0.3, "it is waited for again and again"
        return False

    def told_in_time(self) -> None:
        """Whatever has hung was waited for as long as is stated, and no longer: of the pause no
        more than a second counts."""
        assert TIMEOUT_OF_PROGRESS_S - 1.3 < self.waited_s < TIMEOUT_OF_PROGRESS_S + 0.3


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


class Looks:
    """The machine's clock, and the time that counts as those see it who look at it."""

    def __init__(self) -> None:
        self.counted_s, self._last_s = 0.0, time.monotonic()

    def __call__(self) -> float:
        now_s = time.monotonic()
        self.counted_s += min(now_s - self._last_s, 1.0)
        self._last_s = now_s
        return now_s


def test_a_look_that_comes_late_counts_for_a_second() -> None:
    clock = LookedAt(ManualClock())
    begin_s = clock.running_s()
    clock.goes_on(10.0)
    assert clock.running_s() - begin_s == pytest.approx(10.0)
    clock.by.advance(HOUR_S)
    assert clock.running_s() - begin_s == pytest.approx(11.0)
    clock.goes_on(10.0)
    assert clock.running_s() - begin_s == pytest.approx(21.0)


def test_a_thread_looks_for_whoever_does_not() -> None:
    looks = Looks()
    clock = SystemClock(looks)
    before = set(threading.enumerate())
    with clock.ticking():
        counted_s = looks.counted_s
        until(lambda: looks.counted_s - counted_s > 0.5, "a look")
        assert {t.name for t in set(threading.enumerate()) - before} == {"everstep-clock"}
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("checked_path", [False, True])
def test_a_pause_is_no_hanging_storage(checked_path: bool) -> None:
    manual = ManualClock()
    clock = LookedAt(manual) if checked_path else manual
    channel = BackgroundChannel("raise", clock, progress_timeout_s=TIMEOUT_OF_PROGRESS_S)
    work = channel.begin("writing the base of step 2", 2)

    def stands_still() -> None:
        manual.advance(HOUR_S) if checked_path else manual.stand_still(HOUR_S)

    def goes_on(seconds: float) -> None:
        clock.goes_on(seconds) if isinstance(clock, LookedAt) else manual.advance(seconds)

    goes_on(60.0)
    stands_still()
    assert not channel.hung()
    channel.check()
    channel.progressed(work)
    stands_still()
    goes_on(TIMEOUT_OF_PROGRESS_S - 2.0)
    channel.check()
    goes_on(3.0)
    assert channel.hung()
    with pytest.raises(DeadlineError, match=r"no progress for 12[12] s"):
        channel.check()
    channel.check()
    channel.end(work)
    assert not channel.hung()


def test_a_pause_is_no_replica_that_gets_nowhere() -> None:
    clock = ManualClock()
    moves = ReplicaProgress(clock, TIMEOUT_OF_PROGRESS_S)
    moves.check(1)
    clock.stand_still(HOUR_S)
    moves.check(1)
    clock.advance(2 * TIMEOUT_OF_PROGRESS_S + 1.0)
    with pytest.raises(DeadlineError, match="made no progress for 241 s"):
        moves.check(1)


def test_a_pause_is_no_place_that_hangs() -> None:
    clock, gate = ManualClock(), Gate()
    courier = Courier(MemoryTier(), 1, clock, raising)
    work: Any = SimpleNamespace(turn=gate.wait_at)
    thread = threading.Thread(target=courier.take_turn, args=(work,))
    thread.start()
    try:
        assert gate.reached.wait(TIMEOUT_S)
        clock.stand_still(HOUR_S)
        assert courier.stalled_s == 0.0
        clock.advance(600.0)
        assert courier.stalled_s == 600.0
    finally:
        gate.open()
        thread.join(TIMEOUT_S)
    assert courier.stalled_s == 0.0, "nothing is under way"


def test_a_transfer_goes_on_behind_a_pause(waits: Waits) -> None:
    future = Outcome[None]()
    waits.then = lambda: future.set_result(None)
    _wait([future], RING, TIMEOUT_OF_PROGRESS_S)
    with pytest.raises(DeadlineError, match="a write took longer than 120 s"):
        _wait([Outcome()], RING, TIMEOUT_OF_PROGRESS_S)
    waits.told_in_time()


def test_a_transfer_that_hangs_behind_a_pause_is_told_of(waits: Waits) -> None:
    with pytest.raises(DeadlineError, match="a write took longer than 120 s"):
        _wait([Outcome()], RING, TIMEOUT_OF_PROGRESS_S)
    waits.told_in_time()


def test_a_read_goes_on_behind_a_pause(waits: Waits) -> None:
    future = Outcome[int]()
    waits.then = lambda: future.set_result(7)
    assert read_result(future, RING, TIMEOUT_OF_PROGRESS_S, PurePath("f")) == 7
    with pytest.raises(DeadlineError, match="f: a read took longer than 120 s"):
        read_result(Outcome(), RING, TIMEOUT_OF_PROGRESS_S, PurePath("f"))
    waits.told_in_time()


def test_a_read_that_the_system_gives_up_is_no_hanging_one() -> None:
    future = Outcome[int]()
    future.set_exception(TimeoutError(110, "Connection timed out"))
    with pytest.raises(TimeoutError, match="Connection timed out"):
        read_result(future, RING, TIMEOUT_OF_PROGRESS_S, PurePath("f"))


def test_a_chunk_comes_back_behind_a_pause(waits: Waits) -> None:
    ring = ChunkRing(1, 1)
    block = ring.take(TIMEOUT_OF_PROGRESS_S)
    assert block.view.nbytes == CHUNK_BYTES
    waits.then = lambda: ring.give(block)
    assert ring.take(TIMEOUT_OF_PROGRESS_S) is block
    with pytest.raises(DeadlineError, match="no chunk was transferred within 120 s"):
        ring.take(TIMEOUT_OF_PROGRESS_S)
    waits.told_in_time()


def test_a_copy_goes_on_behind_a_pause(waits: Waits) -> None:
    """At the gate, that is: the update that waits there is not let go on over it."""
    transfer = CpuTransfer()
    waits.then = lambda: transfer.advance(4096)
    assert transfer.gate(4096, TIMEOUT_OF_PROGRESS_S)
    assert not transfer.gate(8192, TIMEOUT_OF_PROGRESS_S)
    waits.told_in_time()


def test_copies_that_are_planned_have_the_time_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pause in one of them takes nothing from the others."""
    clock, given_s, planned = ManualClock(), list[float](), Capture([0, 0])

    def pause(self: CpuTransfer, *about: float) -> bool:
        clock.advance(HOUR_S)
        given_s.append(about[-1])
        return True

    monkeypatch.setattr(CpuTransfer, "gate", pause)
    monkeypatch.setattr(CpuTransfer, "wait", pause)
    about = planned.lane, planned.block, planned.units, planned.duplicates, lambda: None
    dispatch = Dispatch(*about, clock.monotonic_s)
    assert dispatch.admit(None, TIMEOUT_OF_PROGRESS_S)
    assert dispatch.wait(TIMEOUT_OF_PROGRESS_S)
    assert given_s == [TIMEOUT_OF_PROGRESS_S] * 4


def test_memory_comes_back_behind_a_pause(waits: Waits) -> None:
    pool = CapturePool(Arena.anonymous(PAGE_BYTES))
    room = pool.acquire(PAGE_BYTES, timeout_s=0.0)
    waits.then = lambda: pool.release(room)
    assert pool.acquire(PAGE_BYTES, timeout_s=TIMEOUT_OF_PROGRESS_S).offset == room.offset
    with pytest.raises(DeadlineError, match="no host memory was released within 120 s"):
        pool.acquire(PAGE_BYTES, timeout_s=TIMEOUT_OF_PROGRESS_S)
    waits.told_in_time()


def test_all_of_several_share_the_time(waits: Waits) -> None:
    first, second = Outcome[None](), Outcome[None]()
    second.cancel()
    waits.then = lambda: first.set_exception(OSError("broken"))
    assert wait_all([first, second], TIMEOUT_OF_PROGRESS_S)
    with pytest.raises(CancelledError):
        second.result(0)
    assert not wait_all([Outcome(), Outcome()], TIMEOUT_OF_PROGRESS_S)
    waits.told_in_time()


def test_no_time_is_no_wait() -> None:
    assert not wait_done(Outcome(), 0.0)
    assert not wait_done(Outcome(), -1.0)
    assert Condition().wait_for(lambda: 7, 0.0) == 7
    assert WaitBudget(-1.0).left_s == 0.0


def test_training_is_told_of_a_disk_that_hangs_though_it_does_not_look(run_folder: Path) -> None:
    """In a step that takes long, say: then the next one tells."""
    gate, fs, looks = Gate(), HookedFileSystem(), Looks()
    clock = SystemClock(looks)
    with opened(run_folder, {"n": 1}, fs=fs, clock=clock, method="async") as ckpt:
        ckpt.step()
        fs.hook = raising(gate.wait_at, "rename", "*.safetensors*")
        ckpt.save()
        assert gate.reached.wait(TIMEOUT_S)
        inspect(ckpt).channel.progress_timeout_s, counted_s = 1.5, looks.counted_s
        until(lambda: looks.counted_s - counted_s > 1.6, "time")
        with pytest.raises(DeadlineError, match="no progress for"):
            ckpt.step()
        inspect(ckpt).channel.progress_timeout_s = TIMEOUT_S
        gate.open()


CHILD = """
import sys, threading
from everstep.link.channel import BackgroundChannel
from everstep.seams import SystemClock
from everstep.seams.processes.threads import Outcome, wait_done

clock, future = SystemClock(), Outcome()
channel = BackgroundChannel("raise", clock, progress_timeout_s=float(sys.argv[1]))

def writes():
    sys.stdin.readline()
    future.set_result(None)

with clock.ticking():
    channel.begin("writing the base of step 2", 2)
    threading.Thread(target=writes).start()
    print("ready", flush=True)
    print(wait_done(future, float(sys.argv[1])))
    channel.check()
"""


def test_a_process_that_was_stopped() -> None:
    timeout_s = 4.0
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with stopped(child.pid):
            since_s = time.monotonic()
            until(lambda: time.monotonic() - since_s > timeout_s, "time")
            child.stdin.write("\n")
            child.stdin.flush()
        assert child.stdout.read() == "True\n"
    assert child.returncode == 0
