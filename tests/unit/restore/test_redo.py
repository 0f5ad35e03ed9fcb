"""Redo in a live resume: read, checked and decoded ahead, replayed over parameters in parallel.

What training had, by torch itself, is what has to come out, bit for bit.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW

from everstep.errors import RecoveryError, ReplayError, StateError
from everstep.format.log import LogRecord
from everstep.format.names import base_dir
from everstep.replay import blocked, engine
from everstep.replay.blocked import Blocked
from everstep.replay.updates import Update
from everstep.restore.redo import driver, live
from everstep.restore.redo.driver import ReplayDriver, Step
from everstep.restore.redo.live import LiveMemory
from everstep.run.log_reads import LogReads, Prefetch
from everstep.run.segments import SegmentFound
from tests.support.log.redone import STEPS, Wide, resumed, trained
from tests.support.logged import World, opened, segments_of
from tests.support.world import TIMEOUT_S


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(live, "available_cores", lambda: [0, 1])


MOST = {SGD: {"momentum": 0.9, "nesterov": True}, Adam: {"amsgrad": True}, AdamW: {}}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {}], ids=str)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_every_row_that_is_replayed_in_blocks(
    kind: Any, flags: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(parameters: Any) -> Any:
        return kind(parameters, lr=0.01, weight_decay=0.1, **MOST[kind], **flags)

    states = trained(tmp_path / "run", make)
    taken: list[tuple[int, int]] = []

    class NotingBlocked(Blocked):
        def run(self, updates: Any) -> None:
            taken.append((len(updates), self._threads))
            super().run(updates)

    monkeypatch.setattr(engine, "Blocked", NotingBlocked)
    monkeypatch.setattr(Prefetch, "ready", True)  # replay never has to wait for the log
    with resumed(tmp_path / "run", make) as (world, recovery):
        assert (recovery.step, recovery.replayed, recovery.exact) == (STEPS, STEPS, True)
        assert world.snapshot() == states[STEPS]
    assert taken == [(driver.STEPS_AT_ONCE, 2), (STEPS - driver.STEPS_AT_ONCE, 2)]


@pytest.mark.parametrize(
    ("in_memory", "batches"),
    [
        pytest.param(False, [1] * STEPS, id="replayed while the next one is read"),
        pytest.param(
            True,
            [driver.STEPS_AT_ONCE, STEPS - driver.STEPS_AT_ONCE],
            id="a pass over the state takes longer than to verify the next one",
        ),
    ],
)
def test_steps_in_memory_wait_for_each_other_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool, batches: list[int]
) -> None:
    states = trained(tmp_path / "run", AdamW)
    taken: list[int] = []

    class NotingBlocked(Blocked):
        def run(self, updates: Any) -> None:
            taken.append(len(updates))
            super().run(updates)

    monkeypatch.setattr(engine, "Blocked", NotingBlocked)
    monkeypatch.setattr(Prefetch, "ready", False)
    if in_memory:
        monkeypatch.setattr(Step, "read_bytes", 0)
    with resumed(tmp_path / "run", AdamW) as (world, recovery):
        assert (recovery.replayed, recovery.exact) == (STEPS, True)
        assert world.snapshot() == states[STEPS]
    assert taken == batches
    assert 0 < recovery.replay_s < recovery.seconds


RUNS: dict[int, tuple[Path, dict[int, Any]]] = {}


@pytest.mark.slow
@settings(max_examples=25)
@given(
    batch_steps=st.integers(1, 4),
    step=st.integers(1, STEPS),
    window=st.integers(1, 6),
    memory_bytes=st.sampled_from([0, 30_000, 1 << 40]),
    block=st.sampled_from([64, 128, 1 << 18]),
)
def test_any_window_gives_the_same_bits(
    batch_steps: int,
    step: int,
    window: int,
    memory_bytes: int,
    block: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if batch_steps not in RUNS:
        run = tmp_path_factory.mktemp("trained") / "run"
        RUNS[batch_steps] = run, trained(run, batch_steps=batch_steps)
    run, states = RUNS[batch_steps]
    copy = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(run, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BLOCK_ELEMENTS", block)
        patch.setattr(driver, "STEPS_AT_ONCE", window)
        patch.setattr(driver, "memory_available_bytes", lambda: memory_bytes)
        with resumed(copy, step=step) as (world, recovery):
            assert (recovery.step, recovery.replayed, recovery.exact) == (step, step, True)
            assert world.snapshot() == states[step]


@pytest.mark.parametrize("window", [1, 5])
def test_damage_in_the_middle_ends_replay_before_it(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the damaged segment is applied, though it was read while others were (I4)."""
    monkeypatch.setattr(driver, "STEPS_AT_ONCE", window)
    run = tmp_path / "run"
    states = trained(run)
    third = segments_of(run)[2]
    (record,) = third.marker.files  # type: ignore[union-attr]
    path = Path(third.path) / record.name
    data = bytearray(path.read_bytes())
    data[record.header_length + 100] ^= 1
    path.write_bytes(data)
    with resumed(run) as (world, recovery):
        assert (recovery.step, recovery.replayed) == (third.after, third.after)
        assert "damaged" in recovery.skipped[-1].reason
        assert world.snapshot() == states[third.after]


def test_a_record_that_is_not_what_it_was_is_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips in memory, behind the checks of the file."""
    run = tmp_path / "run"
    states = trained(run)
    read = LogReads.read

    def flipping(self: LogReads, segment: SegmentFound, place: int) -> LogRecord:
        record = read(self, segment, place)
        if record.head.kind == "update" and record.head.step == 6:
            record.data[40] ^= 1
        return record

    monkeypatch.setattr(LogReads, "read", flipping)
    with resumed(run) as (world, recovery):
        assert (recovery.step, recovery.replayed) == (5, 5)
        assert str(segments_of(run)[0].path.parent) in recovery.skipped[-1].reason
        assert world.snapshot() == states[5]


def test_the_next_segment_is_read_while_one_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay of the first segment waits here until the second one has been read."""
    monkeypatch.setattr(driver, "STEPS_AT_ONCE", 1)
    states = trained(tmp_path / "run", batch_steps=1)
    count = threading.Semaphore(0)
    apply = LiveMemory.apply
    read = LogReads.read
    overlapped: list[bool] = []

    def noting(self: LogReads, segment: SegmentFound, place: int) -> LogRecord:
        record = read(self, segment, place)
        if record.head.kind == "mark":
            count.release()
        return record

    def waiting(self: LiveMemory, key: str, updates: Sequence[Update]) -> None:
        if not overlapped:
            overlapped.append(all(count.acquire(timeout=TIMEOUT_S) for _ in range(2)))
        apply(self, key, updates)

    monkeypatch.setattr(LogReads, "read", noting)
    monkeypatch.setattr(LiveMemory, "apply", waiting)
    with resumed(tmp_path / "run") as (world, _):
        assert world.snapshot() == states[STEPS]
    assert overlapped == [True]


@pytest.mark.parametrize("batch_steps", [1, STEPS])
def test_no_more_is_read_than_memory_allows(
    batch_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for nothing: one step in hand, and one being made."""
    monkeypatch.setattr(driver, "memory_available_bytes", lambda: 0)
    states = trained(tmp_path / "run", batch_steps=batch_steps)
    read = LogReads.read
    apply = LiveMemory.apply
    done: list[str] = []
    most: list[int] = []

    def noting(self: LogReads, segment: SegmentFound, place: int) -> LogRecord:
        record = read(self, segment, place)
        if record.head.kind == "mark":
            done.append("read")
            most.append(done.count("read") - done.count("applied"))
        return record

    def applied(self: LiveMemory, key: str, updates: Sequence[Update]) -> None:
        apply(self, key, updates)
        done.append("applied")

    monkeypatch.setattr(LogReads, "read", noting)
    monkeypatch.setattr(LiveMemory, "apply", applied)
    with resumed(tmp_path / "run") as (world, recovery):
        assert recovery.replayed == STEPS
        assert world.snapshot() == states[STEPS]
    assert max(most) <= 2


class Failing:
    """Makes the redo of one step fail, once its updates have been applied.

    Attributes:
        times: failures so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, times: int = 1000) -> None:
        self.times = 0
        step = ReplayDriver.step
        finish = ReplayDriver.finish

        def fail() -> None:
            self.times += 1
            raise ReplayError("it does not fit")

        def failing(redo: ReplayDriver, one: Any) -> None:
            step(redo, one)
            if one.mark.head.step == at and self.times < times:
                redo.idle()
                fail()

        def failing_end(redo: ReplayDriver) -> list[str]:
            if at < 0 and redo.last is not None and redo.last.head.step == -at:
                redo.idle()
                fail()
            return finish(redo)

        monkeypatch.setattr(ReplayDriver, "step", failing)
        monkeypatch.setattr(ReplayDriver, "finish", failing_end)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("at", [1, 2, 7, STEPS, -STEPS])
def test_where_an_update_fails_the_step_before_is_restored(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the base again: what had been applied by then is of no step. Negative: the mark."""
    states = trained(tmp_path / "run", batch_steps=1)
    with monkeypatch.context() as patch:
        failing = Failing(patch, at)
        with resumed(tmp_path / "run") as (world, recovery):
            assert (recovery.step, recovery.replayed) == (abs(at) - 1, abs(at) - 1)
            assert world.snapshot() == states[abs(at) - 1]
            assert recovery.exact
            (lost,) = recovery.skipped
            assert (lost.step, "does not fit" in lost.reason) == (abs(at), True)
    assert failing.times == 2
    said = f"step {abs(at)}: the log cannot be replayed: it does not fit"
    assert said in capfd.readouterr().err
    assert not any(thread.name == "everstep-ahead" for thread in threading.enumerate())


def test_what_fails_once_and_not_again_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = trained(tmp_path / "run", batch_steps=1)
    with monkeypatch.context() as patch:
        Failing(patch, 7, times=1)
        with resumed(tmp_path / "run") as (world, recovery):
            assert (recovery.step, recovery.skipped) == (STEPS, ())
            assert world.snapshot() == states[STEPS]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("at", [3, 7, -7])
def test_a_step_that_cannot_be_redone_is_an_error_to_who_asks_for_it(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the mixture that is left is not taken for a state."""
    states = trained(tmp_path / "run", batch_steps=1)
    with monkeypatch.context() as patch:
        Failing(patch, at)
        with resumed(tmp_path / "run", step=2) as (world, recovery):
            assert (recovery.step, world.snapshot()) == (2, states[2])
        with opened(tmp_path / "run", Wide(seed=2), every=None) as ckpt:
            with pytest.raises(RecoveryError, match="cannot be replayed: it does not fit"):
                ckpt.resume(step=7)
            with pytest.raises(StateError, match="that of no step"):
                ckpt.step()
    assert not any(thread.name == "everstep-ahead" for thread in threading.enumerate())


# --- Memory formats ---------------------------------------------------------------------

ROWS, CHANNELS = torch.contiguous_format, torch.channels_last


class Formed(World):
    """A convolution's weight, in some memory format, and gradients that lie as it does."""

    def __init__(self, form: torch.memory_format, dtype: torch.dtype, **flags: Any) -> None:
        super().__init__()
        weight = torch.randn(7, 5, 3, 3).to(dtype).to(memory_format=form)
        self.model = nn.Module()  # type: ignore[assignment]
        self.model.weight = nn.Parameter(weight)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, **flags)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.state |= {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape).to(parameter)
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        self.optimizer.step()


def formed(run: Path, world: Formed) -> dict[str, bytes]:
    """Trains behind a base; the state in the end."""
    with opened(run, world, every=None) as ckpt:
        ckpt.resume()
        for step in range(4):
            world.train()
            ckpt.step()
            if step == 0:
                ckpt.save().durable.result(TIMEOUT_S)
        found = world.snapshot()
    shutil.rmtree(base_dir(PurePath(run), 1, 4))
    return found


@pytest.mark.thinned(3)
@pytest.mark.parametrize("now", [ROWS, CHANNELS], ids=str)
@pytest.mark.parametrize("then", [ROWS, CHANNELS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_another_memory_format(
    dtype: torch.dtype, then: torch.memory_format, now: torch.memory_format, tmp_path: Path
) -> None:
    """Half precision is rounded by how tensors lie: that is marked as not exact."""
    wanted = formed(tmp_path / "run", Formed(then, dtype))
    world = Formed(now, dtype)
    with opened(tmp_path / "run", world, every=None) as ckpt:
        recovery = ckpt.resume()
    assert (recovery.step, recovery.base_step, recovery.skipped) == (4, 1, ())
    assert recovery.exact == (then == now or dtype == torch.float32)
    if recovery.exact:
        found = world.snapshot()
        assert {k: v for k, v in found.items() if k != "rng"} == {
            k: v for k, v in wanted.items() if k != "rng"
        }
    else:
        assert "the memory layout of 'model/weight' differs" in str(recovery.evidence)


@pytest.mark.parametrize("now", [ROWS, CHANNELS], ids=str)
def test_a_fused_kernel_in_another_memory_format(now: torch.memory_format, tmp_path: Path) -> None:
    """It would give elements each other's gradients: nothing has written to them."""
    formed(tmp_path / "run", Formed(CHANNELS, torch.float32, fused=True))
    world = Formed(now, torch.float32, fused=True)
    with opened(tmp_path / "run", world, every=None) as ckpt:
        recovery = ckpt.resume()
    if now == CHANNELS:
        assert (recovery.step, recovery.exact, recovery.skipped) == (4, True, ())
        return
    assert recovery.step == 1
    assert "the memory layout of 'model/weight' differs" in str(recovery.skipped)
    assert "written" not in str(recovery.skipped)
