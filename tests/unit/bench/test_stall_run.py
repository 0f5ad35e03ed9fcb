"""``everstep bench stall``: arms do what they say, rounds are fair, nothing stays."""

from __future__ import annotations

import concurrent.futures
import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import everstep
from everstep.capture.lane import CpuLane
from everstep.errors import (
    DeadlineError,
    EverstepError,
    KeeperTimeoutError,
    OptionError,
    OutOfSpaceError,
    UnavailableError,
)
from everstep.seams import Seams
from everstep.testing.emulated_link import EmulatedLink
from everstep_bench.harness import machine, placement, running
from everstep_bench.harness.loop import Loop, Step
from everstep_bench.harness.placement import Placement, descendants
from everstep_bench.harness.session import Session
from everstep_bench.options import StallOptions
from everstep_bench.stall import ours, peers, run
from everstep_bench.stall.arms import CAUSES, Arm, Pending
from everstep_bench.stall.ours import Ours
from everstep_bench.stall.peers import Saves, SavingArm
from everstep_bench.stall.run import Opened, run_stall
from tests.support.displays import Silent
from tests.support.stalls import MACHINE, invoke, session_of, shown_by

MIB = 1 << 20
TINY = 200_000
TIMEOUT_S = 60.0


# --- Cores, gauges ----------------------------------------------------------------------


@pytest.fixture
def cores_back() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("cores_back")
def test_training_is_pinned_and_other_threads_are_not() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core only")
    places, before = Placement(free_core=True), os.sched_getaffinity(0)
    assert places.free
    assert places.training not in places.others
    started, end, ids = threading.Event(), threading.Event(), []

    def other() -> None:
        ids.append(threading.get_native_id())
        started.set()
        end.wait(TIMEOUT_S)

    thread = threading.Thread(target=other)
    try:
        with places.pinned():
            assert os.sched_getaffinity(0) == {places.training}
            thread.start()
            assert started.wait(TIMEOUT_S)
            assert os.sched_getaffinity(ids[0]) == {places.training}  # inherited
            places.spread()
            assert os.sched_getaffinity(ids[0]) == set(places.others)
            assert os.sched_getaffinity(0) == {places.training}
        assert os.sched_getaffinity(0) == os.sched_getaffinity(ids[0]) == before
    finally:
        end.set()
        thread.join(TIMEOUT_S)


@pytest.mark.usefixtures("cores_back")
def test_without_a_free_core_all_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Placement(free_core=False)
    assert not places.free
    assert places.others == (places.training,)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert not Placement(free_core=True).free


def test_threads_of_the_backward_pass_belong_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[int, set[int]] = {}
    monkeypatch.setattr(placement, "_threads", lambda pid: [7, 8])
    monkeypatch.setattr(placement, "_name", lambda thread: "pt_autograd_0" if thread == 7 else "x")
    monkeypatch.setattr(placement, "_keep", lambda thread, on: kept.update({thread: set(on)}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    Placement(free_core=True).spread()
    assert kept == {7: {0}, 8: {1, 2}}


def test_descendants_and_their_processor_time() -> None:
    before = descendants()
    code = (
        "import sys\nx = 0\nfor n in range(10**6): x += n\nprint(x, flush=True)\nsys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in descendants() - before
        assert 0.001 < machine.cpu_s(child.pid) < 60
    finally:
        child.communicate(timeout=TIMEOUT_S)
    assert child.pid not in descendants()
    assert machine.cpu_s(child.pid) == 0.0
    assert machine.cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=1.0)


# --- Saves under way --------------------------------------------------------------------


def test_a_pending_save_ends_with_its_future() -> None:
    pending, future = Pending(), concurrent.futures.Future[int]()
    future.add_done_callback(pending.on_done)
    assert not pending.over
    assert pending.done_s is None
    future.set_result(3)
    assert pending.over
    assert pending.done_s is not None
    pending.wait()


def test_a_pending_save_fails_with_its_future() -> None:
    pending, future = Pending(), concurrent.futures.Future[int]()
    future.add_done_callback(pending.on_done)
    future.set_exception(ValueError("the disk is gone"))
    assert pending.over
    with pytest.raises(ValueError, match="the disk is gone"):
        pending.wait()
    cancelled = concurrent.futures.Future[int]()
    pending = Pending()
    cancelled.add_done_callback(pending.on_done)
    cancelled.cancel()
    with pytest.raises(DeadlineError, match="cancelled"):
        pending.wait()
    with pytest.raises(DeadlineError, match="not done after"):
        Pending().wait(timeout_s=0.0)


# --- Rounds ---------------------------------------------------------------------------------


class Steps:
    """A loop without training; tells what happened in which order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.on_step: Any = lambda: None

    def step(self) -> Step:
        begin_s = time.monotonic()
        self.told.append("step")
        self.on_step()
        return Step(begin_s, time.monotonic())


class Slow(Arm):
    """A save that is done after so many steps."""

    def __init__(self, loop: Steps, name: str, steps: int, role: str = "ours") -> None:
        super().__init__(name, "")
        self.role = role  # type: ignore[assignment]
        self.steps = steps
        self.loop = loop
        self.error: BaseException | None = None

    def save(self) -> Pending:
        self.loop.told.append(f"save {self.name}")
        pending, left = Pending(), self.steps

        def count() -> None:
            nonlocal left
            left -= 1
            if not left:
                pending.finish(self.error)

        self.loop.on_step = count
        self._stalls["gate"] += 0.25
        return pending

    def settle(self, pending: Pending) -> float:
        pending.wait()
        self.loop.told.append(f"settled {self.name}")
        return 0.5

    def clean(self) -> None:
        self.loop.told.append(f"clean {self.name}")
        self.loop.on_step = lambda: None


def bench_of(loop: Steps, *, begin_s: float = 0.0, **options: Any) -> Any:
    return run.Bench(session_of(StallOptions(**options), begin_s=begin_s), loop)  # type: ignore[arg-type]


def opened_by(*arms: Arm) -> list[Opened]:
    return [Opened.of(arm) for arm in arms]


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.mark.usefixtures("no_wait")
def test_rounds_hold_every_arm_once_and_blocks_do_not_overlap() -> None:
    loop = Steps()
    opened = opened_by(Slow(loop, "quick", 1), Slow(loop, "slow", 6))
    interval = bench_of(loop, repeats=3).measure(opened, 4)
    quick, slow = interval.rows
    assert list(quick.blocks) == list(slow.blocks) == list(interval.ideals) == [1, 2, 3]
    assert {len(block.steps) for block in quick.blocks.values()} == {4}
    assert {len(block.steps) for block in slow.blocks.values()} == {6}  # until it is done
    for ideal in interval.ideals.values():
        assert [len(block.steps) for block in ideal.blocks] == [4, 4]
        assert all(block.done_s is None and block.stall_s == 0 for block in ideal.blocks)
    for block in slow.blocks.values():
        assert block.causes == {**dict.fromkeys(CAUSES, 0.0), "gate": 0.25}
        assert block.sync_s == 0.5
        assert block.stall_s == pytest.approx(0.25 + block.calls_s)
        assert block.done_s is not None
        assert block.begin_s < block.done_s <= block.end_s
    # Between a save and the next one it is settled and cleared away.
    words = [word for word in loop.told if word != "step"]
    saves = [n for n, word in enumerate(words) if word.startswith("save ")]
    assert len(saves) == 2 * (3 + 1)
    for at in saves:
        name = words[at].split()[1]
        assert words[at + 1 : at + 3] == [f"settled {name}", f"clean {name}"]


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize(("within_s", "rounds"), [(1e-9, [1]), (1e9, [1, 2, 3])])
def test_rounds_for_which_there_is_no_time_are_left_out(within_s: float, rounds: list[int]) -> None:
    loop = Steps()
    bench = bench_of(loop, repeats=3, within_s=within_s, begin_s=time.monotonic())
    interval = bench.measure(opened_by(Slow(loop, "a", 1)), 4)
    assert list(interval.ideals) == list(interval.rows[0].blocks) == rounds


@pytest.mark.usefixtures("no_wait")
def test_the_order_is_drawn_with_the_seed() -> None:
    def order(seed: int) -> list[str]:
        loop = Steps()
        opened = opened_by(*(Slow(loop, name, 1) for name in "abcdef"))
        bench_of(loop, repeats=2, seed=seed).measure(opened, 1)
        return [word for word in loop.told if word.startswith("save")]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:6] != order(1)[6:12]


@pytest.mark.usefixtures("no_wait")
def test_short_blocks_have_longer_ideals() -> None:
    loop = Steps()
    interval = bench_of(loop, repeats=1).measure(opened_by(Slow(loop, "a", 1)), 1)
    assert [len(block.steps) for block in interval.ideals[1].blocks] == [4, 4]
    assert len(interval.rows[0].blocks[1].steps) == 1


@pytest.mark.usefixtures("no_wait")
def test_a_peer_that_fails_is_reported_in_its_row() -> None:
    loop = Steps()
    broken, fine = Slow(loop, "broken", 1, "peer"), Slow(loop, "fine", 1)
    broken.error = BaseException("no disk\n\n  at line 3\n  OSError: really none\n")
    opened = opened_by(broken, fine)
    interval = bench_of(loop, repeats=2).measure(opened, 1)
    assert interval.rows[0].error == "BaseException: no disk ... OSError: really none"
    assert not interval.rows[0].blocks
    assert len(interval.rows[1].blocks) == 2
    assert loop.told.count("save broken") == 1
    assert loop.told.count("clean broken") == 1


@pytest.mark.usefixtures("no_wait")
def test_an_arm_of_ours_that_fails_ends_the_benchmark() -> None:
    loop = Steps()
    broken = Slow(loop, "lazy", 1)
    broken.error = EverstepError("the disk is full")
    with pytest.raises(EverstepError, match="the disk is full"):
        bench_of(loop).measure(opened_by(broken), 1)
    assert loop.told[-1] == "clean lazy"


@pytest.mark.usefixtures("no_wait")
def test_a_save_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Steps()
    monkeypatch.setattr(run, "TIMEOUT_S", 0.0)
    interval = bench_of(loop, repeats=1).measure(opened_by(Slow(loop, "p", 10**9, "peer")), 3)
    assert interval.rows[0].error is not None
    assert "is not done after 0 s" in interval.rows[0].error


def test_too_little_disk_or_memory_is_said_before_anything_is_written(tmp_path: Path) -> None:
    size_bytes = 10**9

    def check(free_bytes: int, memory_bytes: int) -> None:
        machine = replace(MACHINE, free_bytes=free_bytes, memory_available_bytes=memory_bytes)
        nothing: Any = None
        begun = Session(StallOptions(), nothing, tmp_path, machine, nothing, (), 0.0)
        run.check_room(begun, size_bytes)

    check(10**12, 10**12)
    with pytest.raises(OutOfSpaceError, match="free"):
        check(size_bytes, 10**12)
    with pytest.raises(OutOfSpaceError, match="memory"):
        check(10**12, size_bytes)


# --- Arms -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop(StallOptions(params=TINY))


def test_peers_are_given_every_tensor_once(loop: Loop) -> None:
    nested = loop.nested()
    assert set(nested) == {"model", "optimizer", "scheduler", "loader", "progress"}
    model = loop.training.model
    assert loop.tensors == 4 * sum(1 for _ in model.parameters())  # step and two moments each
    assert "head.weight" not in nested["model"]
    assert loop.size_bytes == pytest.approx(
        12 * sum(p.numel() for p in model.parameters()), rel=0.01
    )


def test_steps_tell_when_the_hooks_before_the_update_ran() -> None:
    loop = Loop(StallOptions(params=TINY))
    ran: list[float] = []
    loop.training.optimizer.register_step_pre_hook(lambda *_: ran.append(time.monotonic()))
    assert loop.step().hooks is None
    loop.watch_hooks()
    step = loop.step()
    assert step.hooks is not None
    assert step.begin_s <= step.hooks.begin_s <= ran[-1] <= step.hooks.end_s <= step.end_s


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="no CUDA device"):
        Loop(StallOptions(device="cuda"))


def test_a_checkpointer_copies_through_the_lane_that_it_is_given(run_folder: Path) -> None:
    class Watched(CpuLane):
        copied = 0
        closed = False

        def copy_now(self, batches: Any, block: torch.Tensor) -> None:
            super().copy_now(batches, block)
            self.copied += sum(batch.end - batch.begin for batch in batches)

        def close(self) -> None:
            super().close()
            self.closed = True

    lane = Watched()
    state = {"weights": torch.arange(1000.0)}
    ckpt = everstep.Checkpointer(
        run_folder,
        state,
        method="async",
        every=None,
        keeper=everstep.KeeperOptions(process=False),
        seams=Seams(lane=lambda: lane),
    )
    ckpt.step()
    ckpt.save().durable.result(TIMEOUT_S)
    ckpt.close()
    assert lane.copied >= 4000
    assert lane.closed


def test_an_arm_is_closed_when_its_keeper_has_ended(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm: Any = Ours("lazy", loop, tmp_path, Placement(free_core=True), StallOptions())
    told: list[Any] = []
    closing = SimpleNamespace(close=lambda: told.append("close"))
    monkeypatch.setattr(ours, "Checkpointer", lambda *_, **__: closing)
    arm.open()
    monkeypatch.setattr(arm, "processes", lambda: [77])
    monkeypatch.setattr(running, "process_ended", lambda pid, _: told.append(pid) or True)
    arm.close()
    assert told == ["close", 77]
    monkeypatch.setattr(running, "process_ended", lambda *_: False)
    with pytest.raises(KeeperTimeoutError, match="process 77"):
        arm.close()


def test_a_link_is_in_every_arm_of_ours_and_in_its_words(loop: Loop, tmp_path: Path) -> None:
    options = StallOptions(link_bytes_per_s=2e9)
    for name in ("sync", "async", "checkfreq", "lazy", "gockpt", "gockpt_o-held"):
        arm: Any = Ours(name, loop, tmp_path, Placement(free_core=True), options)
        lane = arm.seams.lane()
        assert isinstance(lane, EmulatedLink)
        lane.close()
        assert "EMULATED link of 2 GB/s" in arm.detail
    assert "held on the device for up to 8 steps" in arm.detail


def test_arms_with_a_stage_need_a_device(loop: Loop, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="lazy-half needs a device"):
        StallOptions(arms=("lazy", "lazy-half")).check()
    options = StallOptions(device="cuda", arms=("lazy-staged",))
    options.check()
    arm = Ours("lazy-half", loop, tmp_path, Placement(free_core=True), options)
    assert arm.method == "lazy"
    assert "a stage of 0.5 times the state" in arm.detail


def test_torch_save_is_durable_when_its_call_returns(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def watched(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    arm = peers.TorchSave(loop, tmp_path)
    arm.prepare()
    pending = arm.save()
    (path,) = (tmp_path / "torch.save").iterdir()
    assert {path.stat().st_ino, path.parent.stat().st_ino} <= set(synced)
    assert pending.over
    assert arm.settle(pending) < 1.0
    assert arm.stalls()["persist"] > 0
    kept = torch.load(path, weights_only=True)
    assert torch.equal(kept["model"]["tokens.weight"], loop.training.model.tokens.weight)
    arm.clean()
    assert not list((tmp_path / "torch.save").iterdir())


def test_what_a_peer_leaves_unsynced_is_synced_outside_of_its_call(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(SavingArm):
        def begin(self, path: Path) -> Pending:
            (path / "deep").mkdir(parents=True)
            (path / "deep" / "file").write_bytes(b"x")
            return Pending.finished()

    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    arm = Lazy("lazy", "", loop, Saves(tmp_path / "saves"))
    arm.prepare()
    pending = arm.save()
    assert not synced
    assert arm.settle(pending) > 0
    inside = [path.stat().st_ino for path in (tmp_path / "saves").rglob("*")]
    assert {*inside, (tmp_path / "saves").stat().st_ino} == set(synced)
    first = set((tmp_path / "saves").iterdir())
    arm.clean()
    arm.prepare()
    arm.save()
    assert not first & set((tmp_path / "saves").iterdir())  # a new name each time


def test_a_save_that_was_interrupted_is_awaited_before_its_files_go(
    loop: Loop, tmp_path: Path
) -> None:
    class Late(SavingArm):
        def begin(self, path: Path) -> Pending:
            pending, self.go = Pending(), threading.Event()

            def write() -> None:
                assert self.go.wait(TIMEOUT_S)
                path.write_bytes(b"late")
                pending.finish(OSError("no disk"))

            self.thread = threading.Thread(target=write)
            self.thread.start()
            return pending

    arm = Late("late", "", loop, Saves(tmp_path / "saves"))
    arm.prepare()
    pending = arm.save()
    wait = pending.wait

    def watched(timeout_s: float) -> None:
        arm.go.set()
        wait(timeout_s)

    pending.wait = watched  # type: ignore[method-assign]
    arm.clean()
    arm.thread.join(TIMEOUT_S)
    assert not list((tmp_path / "saves").iterdir())


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchsnapshot" else find(name)
    )
    assert not peers.installed("torchsnapshot")
    assert peers.installed("lazy")


# --- End to end -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One tiny run through the command line: result, and where it has run."""
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "sync", lambda: None)
        cores_before = os.sched_getaffinity(0)
        result = invoke(
            "stall", "--params", "200K", "--repeats", "2", "--every", "2",
            "--arms", "lazy,torch.save", "--dir", str(place), "--json",
        )  # fmt: skip
    return SimpleNamespace(result=result, place=place, cores_before=cores_before)


def test_a_tiny_run_from_end_to_end(whole: Any) -> None:
    assert whole.result.exit_code == 0, whole.result.output
    found = json.loads(whole.result.stdout)
    assert (found["rounds"], found["seed"], found["device"]) == (2, 1234, "cpu")
    assert found["labels"] == ([] if found["free_core"] else found["labels"])
    (interval,) = found["intervals"]
    assert interval["every"] == 2
    assert interval["ideal_step_s"]["median"] > 0
    assert interval["noise_s"] >= 0
    assert [arm["name"] for arm in interval["arms"]] == ["torch.save", "lazy"]
    for arm in interval["arms"]:
        assert arm["error"] is None
        assert [block["round"] for block in arm["blocks"]] == [1, 2]
        for name in ("stall_s", "slowdown_s", "difference_s", "durable_s", "loop_rate"):
            assert set(arm[name]) == {"min", "median", "max"}
        for block in arm["blocks"]:
            assert block["steps"] >= 2
            parts = block["stall_by_cause_s"]
            assert set(parts) == {*CAUSES, "other"}
            assert sum(parts.values()) == pytest.approx(block["stall_s"])
            assert block["durable_s"] > 0
    torch_save, lazy = interval["arms"]
    assert torch_save["loop_rate"]["max"] == 0.0
    assert lazy["helper_cpu_s"]["median"] > 0
    assert [target["met"] for target in interval["targets"]][1] is None  # DCP was not measured


def test_a_run_leaves_nothing_behind(whole: Any) -> None:
    assert not list(whole.place.iterdir())
    assert os.sched_getaffinity(0) == whole.cores_before


@pytest.mark.usefixtures("no_wait")
def test_an_interrupt_behind_the_last_round_loses_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To give back much pinned memory takes as long as a round."""
    close = run.Bench.close

    def interrupted(self: Any, opened: Any) -> None:
        close(self, opened)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Bench, "close", interrupted)
    options = StallOptions(
        params=TINY, repeats=1, every=(1,), arms=("torch.save",), folder=tmp_path
    )
    report = run_stall(options, Silent())
    assert sorted(report.intervals[0].ideals) == [1]
    assert "torch.save" in shown_by(report)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("no_wait")
def test_all_installed_peers_run(tmp_path: Path) -> None:
    """Warnings are errors here; DCP's are silenced by the benchmark itself."""
    shown = Silent()
    options = StallOptions(
        params=TINY, repeats=1, every=(1,), folder=tmp_path,
        arms=("dcp", "dcp-warm", "dcp-overlap", "sync", "torchsnapshot", "neighbour"),
    )  # fmt: skip
    report = run_stall(options, shown)
    errors = {row.name: row.error for row in report.intervals[0].rows if row.error}
    if not peers.installed("torchsnapshot"):
        assert errors.pop("torchsnapshot") == "not installed"
    assert errors == {}
    assert not list(tmp_path.iterdir())
