"""The CUDA lane without a device: its decisions, played on devices whose streams run in any
order that CUDA's promises allow. Each promise of the lane is taken away once, to see that the
play notices."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import everstep
from everstep.arena import Arena
from everstep.capture import batches as batches_module
from everstep.capture import cuda as cuda_module
from everstep.capture import pinned as pinned_module
from everstep.capture import stage as stage_module
from everstep.capture.batches import Batch, Chunks, Runs, plan_batches
from everstep.capture.cuda import (
    CudaLane,
    CudaTransfer,
    DeviceLane,
    ignore_graph_captures,
    on_cuda,
    refuse_graph_capture,
)
from everstep.capture.lane import CpuLane
from everstep.capture.pinned import PinnedMemory
from everstep.capture.spot_check import SpotCheck
from everstep.errors import (
    EverstepError,
    OutOfSpaceError,
    RecoveryError,
    StateError,
    UnavailableError,
)
from everstep.seams import machine
from everstep.state.layout.shards import plan_shards
from everstep.state.values.tensors import tensor_entry
from everstep.testing import inspect
from tests.support import cuda_world
from tests.support.cuda_world import GPU, World, restored
from tests.support.fakecuda import (
    POISON,
    FakeCuda,
    FakeEvent,
    FakeHost,
    FakeThreads,
    Token,
    cuda_device,
)
from tests.support.inside import planted
from tests.support.world import TIMEOUT_S, opened

played = cuda_world.played  # the fixture
allocate = cuda_module._allocate  # before a fixture replaces it

PAGE = 4096


def slices_of(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is pinned in slices of this size, and nobody is let in between."""
    for name in ("_SLICE_BYTES", "_SLICE_BYTES_MAX"):
        monkeypatch.setattr(pinned_module, name, size_bytes)
    monkeypatch.setattr(PinnedMemory, "pause", lambda self, taken_s: None)


# --- A training loop, and the state that it saves ---------------------------------------


class Slot:
    """A tensor of the state: where, how arranged, and whose."""

    def __init__(self, name: str, device: torch.device, size: int, form: str, owner: str) -> None:
        self.name, self.device, self.size, self.form, self.owner = name, device, size, form, owner


class Flight:
    """A save under way, and how far its progress was told."""

    def __init__(self) -> None:
        self.transfer: Any = None
        self.told: list[int] = []


class Loop:
    """Trains and saves as the engine does: updates behind the gate, buffers without one,
    parameters that are replaced, streams that change, saves that are given up, new arenas."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = self.rng = random.Random(seed)
        self.cuda = FakeCuda(rng)
        self.cuda.install(monkeypatch)
        for name, size in (("_SMALL_BYTES", 600), ("_PACK_BYTES_MAX", 900), ("_PIECE_BYTES", 700)):
            monkeypatch.setattr(batches_module, name, size)
        monkeypatch.setattr(cuda_module, "_EVENT_BYTES", rng.choice([1, 1000, 5000]))
        monkeypatch.setattr(cuda_module, "_DUPLICATES_BYTES_MAX", rng.choice([0, 1500, 1 << 20]))
        monkeypatch.setattr(cuda_module, "_AT_ONCE_BYTES", rng.choice([0, 400, 1 << 20]))
        slices_of(rng.choice([PAGE, 3 * PAGE]), monkeypatch)
        self.host = FakeHost(self.cuda)
        monkeypatch.setattr(stage_module, "_CARRY_BYTES", rng.choice([0, 1000, 1 << 20]))
        self.lane = CudaLane(self.host, rng.choice([0, 700, 3000, "auto"]))
        self.cuda.free_bytes = rng.choice([500, 1 << 20, 1 << 20])
        self.devices = [cuda_device(n) for n in range(rng.choice([1, 1, 2]))]
        self.slots = [self._slot(number) for number in range(rng.randint(2, 9))]
        self.values: dict[str, Any] = {}
        self.live: dict[str, torch.Tensor] = {}
        for slot in self.slots:
            self._place(slot)
        (self.layout,) = plan_shards([tensor_entry(s.name, self.live[s.name]) for s in self.slots])
        owners = {slot.name: slot.owner for slot in self.slots}
        self.ends: dict[str, int] = {}
        for place in self.layout.placed:
            if owners[place.entry.name]:
                self.ends[owners[place.entry.name]] = place.end
        self.block_bytes = -(-self.layout.size_bytes // PAGE) * PAGE
        self.arena = Arena.anonymous(3 * self.block_bytes)
        self.free = [n * self.block_bytes for n in range(3)]
        self.flights: list[Flight] = []
        self.finished = 0

    def _slot(self, number: int) -> Slot:
        rng = self.rng
        device = rng.choice([*self.devices, *self.devices, torch.device("cpu")])
        size = rng.choice([4, 8, 100, 500, 900, 2000, 5000])
        form = rng.choice(["plain", "plain", "turned"])
        return Slot(f"t{number}", device, size, form, rng.choice(["one", "two", ""]))

    def _place(self, slot: Slot) -> None:
        """New memory for a tensor: the one before is freed when nobody needs it."""
        if slot.device.type == "cuda":
            flat = self.cuda.alloc(slot.size, slot.device)
        else:
            flat = torch.empty(slot.size, dtype=torch.uint8)
        self.live[slot.name] = flat.view(4, -1).t() if slot.form == "turned" else flat
        self._write(slot)

    def _write(self, slot: Slot) -> None:
        tensor = self.live[slot.name]
        start = self.rng.randrange(250)
        value = (torch.arange(slot.size) + start).remainder(251).to(torch.uint8)
        self.values[slot.name] = value.numpy()
        value = value.view(tensor.shape)
        if slot.device.type == "cuda":
            self.cuda.later(tensor, value)
        else:
            tensor.copy_(value)

    # What the loop does.

    def update(self) -> None:
        owner = self.rng.choice(["one", "two"])
        end = self.ends.get(owner, 0)
        for flight in list(self.flights):
            while not flight.transfer.gate(end, 0.0):
                self.cuda.run_until(lambda: True)
        for slot in self.slots:
            if slot.owner == owner:
                self._write(slot)

    def forward(self) -> None:
        """Buffers, which nothing holds back."""
        for slot in self.slots:
            if not slot.owner and self.rng.random() < 0.7:
                self._write(slot)

    def replace(self) -> None:
        self._place(self.rng.choice(self.slots))

    def other_stream(self) -> None:
        device = self.rng.choice(self.devices)
        before = self.cuda.current_stream(device)
        stream = self.cuda.Stream(device)
        stream.wait_stream(before)
        self.cuda.use(stream)

    def other_arena(self) -> None:
        self.arena = Arena.anonymous(3 * self.block_bytes)
        self.free = [n * self.block_bytes for n in range(3)]

    def _batches(self, gated: bool) -> list[Batch]:
        """As planned, but for the devices that are only played here."""
        found = []
        for device in [torch.device("cpu"), *self.devices]:
            slots = [s for s in self.slots if s.device == device and bool(s.owner) == gated]
            found += plan_batches(self.layout, self.live, {slot.name for slot in slots})
        return sorted(found, key=lambda batch: batch.begin)

    def _block(self, arena: Arena, offset: int) -> torch.Tensor:
        whole = torch.frombuffer(arena.view, dtype=torch.uint8)
        return whole[offset : offset + self.block_bytes]

    def warm(self) -> None:
        if any(map(on_cuda, self.live.values())):
            self.lane.warm(self.live.values(), self._block(self.arena, 0))

    def save(self) -> None:
        if not self.free:
            return
        arena, free = self.arena, self.free
        offset = free.pop(self.rng.randrange(len(free)))
        block = self._block(arena, offset)
        block.fill_(POISON)
        marked, gated = self._batches(False), self._batches(True)
        wanted = np.full(self.block_bytes, POISON, np.uint8)
        for place in self.layout.placed:
            wanted[place.begin : place.end] = self.values[place.entry.name]
        flight = Flight()
        self.lane.copy_now(marked, block)

        def leave() -> None:
            begin = block.data_ptr()
            assert not self.cuda.copying(begin, begin + block.numel()), "left, and written to"
            free.append(offset)

        if self.rng.random() < 0.15:  # given up between mark and submit
            self.lane.run(leave)
            return
        whole = np.zeros(self.block_bytes, bool)
        for batch in marked:
            whole[batch.begin : batch.end] = True

        def progress(end: int) -> None:
            flight.told.append(end)
            seen = whole.copy()
            for batch in gated:
                seen[batch.begin : min(batch.end, end)] = True
            assert np.array_equal(block.numpy()[seen], wanted[seen]), "told of what is not there"

        def finish() -> None:
            assert flight.transfer.wait(0.0)
            assert np.array_equal(block.numpy(), wanted), "torn"
            assert flight.told == sorted(flight.told)
            assert not gated or flight.told[-1] == gated[-1].end
            self.flights.remove(flight)
            self.finished += 1
            leave()

        yields = self.rng.random() < 0.3
        submit = self.lane.submit_yielding if yields else self.lane.submit
        flight.transfer = submit(gated, block, progress)
        self.flights.append(flight)
        self.lane.run(finish)

    def train(self, steps: int) -> None:
        for slot in self.slots:
            self._write(slot)
        actions = [self.forward, self.update, self.save, self.update, self.save, self.replace]
        actions += [self.other_stream, self.warm, self.other_arena]
        weights = [4, 4, 4, 4, 4, 2, 1, 1, 1]
        for _ in range(steps):
            self.rng.choices(actions, weights)[0]()
            self.cuda.run_until(lambda: True)  # others may come in between
        self.lane.close()

    def run(self, steps: int = 30) -> None:
        try:
            trainer = self.cuda.start("trainer", lambda: self.train(steps))
            self.cuda.run_until(lambda: trainer.over)
            while self.cuda.pick():
                pass
        finally:
            self.cuda.stop()
        assert not self.flights
        assert not self.cuda.registered, "still pinned"
        assert self.host.ident not in self.cuda.strayed, "a context on the first device"


SEEDS = range(200)


@pytest.mark.slow
def test_every_schedule_gives_the_state_at_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = 0
    for seed in SEEDS:
        loop = Loop(seed, monkeypatch)
        try:
            loop.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finished += loop.finished
    assert finished > 500, "the loops hardly save"


def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaTransfer, "gate", lambda *_: True)


def gate_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = CudaTransfer.gate
    monkeypatch.setattr(CudaTransfer, "gate", lambda self, end, s: gate(self, end - 1000, s))


def no_wait_for_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(behind_current: Any) -> Any:
        def behind_nothing(*args: Any, **options: Any) -> Any:
            found = behind_current(*args, **options)
            return {  # recorded: nobody waits for it
                device: (stream, FakeEvent(stream.cuda, blocking=True))
                for device, (stream, _) in found.items()
            }

        return behind_nothing

    planted.replace(monkeypatch, CudaLane, "_behind_current", plant)


def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCuda, "play_used_on", lambda *_: None)


def marks_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaLane, "_hold_back", lambda *_: None)


def progress_before_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: None)


def marks_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(submit: Any) -> Any:
        def forgetful(lane: CudaLane, *args: Any, **options: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lane, "_begun", list)
                return submit(lane, *args, **options)

        return forgetful

    planted.replace(monkeypatch, CudaLane, "_submit", plant)


def jobs_not_behind_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.replace(
        monkeypatch, CudaLane, "run", lambda real: lambda self, job: self._host.run(job)
    )


def copies_over_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinnedMemory, "pieces", lambda self, block, begin, end: [(begin, end)])


def no_device_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaLane, "_here", lambda lane: contextlib.nullcontext())


def stage_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(issue: Any) -> Any:
        def unheld(lane: CudaLane, batches: Any, behind: Any, *args: Any, **options: Any) -> Any:
            issued = issue(lane, batches, behind, *args, **options)
            if issued is None:
                return None
            (stream, _), *_ = behind.values()
            found: Future[Any] = Future()

            def pass_on(done: Future[Any]) -> None:
                staged = done.result().staged.items()
                passed = FakeEvent(stream.cuda, blocking=True)  # never recorded
                early = {device: (begin, passed) for device, (begin, _) in staged}
                found.set_result(done.result()._replace(staged=early))

            issued.add_done_callback(pass_on)
            return found

        return unheld

    planted.replace(monkeypatch, CudaLane, "_issue_stage", plant)


def stage_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refilled while it is still copied to the host."""

    def plant(issue: Any) -> Any:
        def apart(lane: CudaLane, batches: Any, behind: Any, *args: Any, **options: Any) -> Any:
            streams = {d: (stream.cuda.Stream(d), at) for d, (stream, at) in behind.items()}
            return issue(lane, batches, streams, *args, **options)

        return apart

    planted.replace(monkeypatch, CudaLane, "_issue_stage", plant)


MUTATIONS = {
    stage_not_waited_for: "torn|told of what is not there",
    stage_on_a_stream_of_its_own: "torn|told of what is not there",
    no_gate: "torn|told of what is not there",
    gate_too_early: "torn|told of what is not there",
    no_wait_for_the_producer: "torn|told of what is not there",
    nothing_recorded: "torn|told of what is not there",
    marks_not_held_back: "told of what is not there|torn",
    marks_not_waited_for: "told of what is not there",
    progress_before_the_bytes: "told of what is not there",
    jobs_not_behind_copies: "left, and written to|unpinned",
    copies_over_edges: "over an edge",
    no_device_named: "a context on the first device",
}


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_without_it_some_schedule_goes_wrong(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=MUTATIONS[mutate]):
        for seed in SEEDS:
            Loop(seed, monkeypatch).run()


# --- The lane, decision by decision -----------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A device on which nothing happens unless somebody waits for it."""
    played = FakeCuda(random.Random(1))
    played.install(monkeypatch)
    yield played
    played.stop()


def on_device(cuda: FakeCuda, value: int, size: int = 100, device: int = 0) -> torch.Tensor:
    tensor = cuda.alloc(size, cuda_device(device))
    tensor.fill_(value)
    return tensor


def block_of(pages: int = 4) -> torch.Tensor:
    return torch.frombuffer(Arena.anonymous(pages * PAGE).view, dtype=torch.uint8)


def batches_of(*tensors: torch.Tensor) -> list[Batch]:
    found, at = [], 0
    for tensor in tensors:
        found.append(Batch(at, at + tensor.numel(), (tensor,)))
        at += tensor.numel()
    return found


def losing_host(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """Its copies fail."""
    host = FakeHost(cuda)

    def fails(batch: Batch, block: torch.Tensor) -> None:
        raise OSError("lost")

    monkeypatch.setattr(host, "copy_batch", fails)
    return host


def test_an_update_waits_for_the_stage_only(cuda: FakeCuda) -> None:
    """The host has nothing yet when the update may change the parameters."""
    lane, block = CudaLane(FakeHost(cuda), 1 << 20), block_of()
    weights = [on_device(cuda, 1), on_device(cuda, 2)]
    transfer = lane.submit(batches_of(*weights), block, lambda end: None)
    assert transfer.gate(200, TIMEOUT_S)
    stream = cuda.current_stream(GPU)
    for weight in weights:
        cuda.later(weight, torch.full((100,), 9, dtype=torch.uint8))
    cuda.run_until(lambda: not stream.queue)
    assert [int(weight[0]) for weight in weights] == [9, 9]
    assert int(block[:200].max()) == 0
    cuda.run_until(lambda: transfer.complete)
    assert [int(block[at]) for at in (0, 99, 100, 199)] == [1, 1, 2, 2]
    lane.close()


def test_of_a_small_stage_the_last_tensors_have_the_use(cuda: FakeCuda) -> None:
    lane, block = CudaLane(FakeHost(cuda), 150), block_of()
    first, last = on_device(cuda, 1), on_device(cuda, 2)
    transfer = lane.submit(batches_of(first, last), block, lambda end: None)
    assert transfer.gate(200, TIMEOUT_S)
    stream = cuda.current_stream(GPU)
    cuda.later(last, torch.full((100,), 9, dtype=torch.uint8))
    cuda.run_until(lambda: not stream.queue)
    assert int(block[99]) == 1, "the update went on before the first was copied"
    cuda.run_until(lambda: transfer.complete)
    assert int(block[199]) == 2
    lane.close()


def test_a_stage_of_its_own_size_leaves_a_tenth_free(cuda: FakeCuda) -> None:
    cuda.free_bytes = 200
    lane, block = CudaLane(FakeHost(cuda), "auto"), block_of()
    transfer = lane.submit(batches_of(*map(partial(on_device, cuda), (1, 2))), block, lambda _: 0)
    assert transfer.gate(200, TIMEOUT_S)
    assert cuda.free_bytes == 20
    cuda.run_until(lambda: transfer.complete)
    assert [int(block[at]) for at in (99, 100)] == [1, 2]
    lane.close()


def test_a_stage_grows_and_is_given_back(cuda: FakeCuda) -> None:
    """The memory before is not held meanwhile; and none of it when the lane is closed."""
    lane, block = CudaLane(FakeHost(cuda), 1 << 20), block_of()
    small = Runs(batches_of(on_device(cuda, 1)))
    large = Runs(batches_of(*map(partial(on_device, cuda), (2, 3, 4))))

    def staged() -> list[int]:
        gc.collect()
        return [one.base.size for one in cuda.allocations if one.tracked() is not None]

    before = staged()
    for batches in (small, large, small):
        transfer = lane.submit(batches, block, lambda end: None)
        cuda.run_until(lambda one=transfer: one.complete)  # type: ignore[misc]
    assert int(block[0]) == 1
    assert sorted(staged()) == sorted([*before, 112 * 3])
    lane.close()
    assert staged() == before


def test_a_stage_keeps_no_gradients_alive(cuda: FakeCuda) -> None:
    """Those of each step are other tensors, and training needs their memory."""
    lane, block = CudaLane(FakeHost(cuda), 1 << 20), block_of()

    def held() -> int:
        gc.collect()
        return sum(one.tracked() is not None for one in cuda.allocations)

    for step in range(3):
        transfer = lane.submit(batches_of(on_device(cuda, step + 1)), block, lambda end: None)
        cuda.run_until(lambda one=transfer: one.complete)  # type: ignore[misc]
        del transfer
    while cuda.pick():
        pass
    assert held() == 1, "more than the stage"
    lane.close()


def test_a_capture_that_cannot_be_staged_is_made_without(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(copy: Any) -> None:
        raise OutOfSpaceError("no memory to rearrange")

    monkeypatch.setattr(cuda_module, "_stage", fails)
    lane, block = CudaLane(FakeHost(cuda), 1 << 20), block_of()
    transfer = lane.submit(batches_of(on_device(cuda, 1)), block, lambda end: None)
    assert transfer.gate(100, TIMEOUT_S)
    cuda.run_until(lambda: transfer.complete)
    assert transfer.wait(0.0)
    assert int(block[99]) == 1
    assert "not staged: no memory to rearrange" in caplog.text
    lane.close()


def test_a_device_without_memory_for_a_stage_says_so(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", no_memory)
    assert allocate(100, GPU) is None
    assert "no 100 bytes free for Budget.device_bytes" in caplog.text
    monkeypatch.undo()


def test_the_gate_does_not_hold_the_cpu(cuda: FakeCuda) -> None:
    """Copies of the parameters are under way; the gate returns, and nothing has run meanwhile."""
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    weight = on_device(cuda, 1)
    transfer = lane.submit(batches_of(weight), block, lambda end: None)
    assert not transfer.gate(100, 0.0), "the copy is not even enqueued"
    assert transfer.gate(100, TIMEOUT_S)
    cuda.later(weight, torch.full((100,), 2, dtype=torch.uint8))
    assert block[0] == 0
    assert not transfer.wait(0.0)
    lane.close()
    assert (block[:100] == 1).all()
    while cuda.pick():
        pass
    assert (weight == 2).all()


def test_the_gate_waits_for_no_more_than_it_must(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of the first optimizer comes behind the copies of its own parameters."""
    monkeypatch.setattr(cuda_module, "_EVENT_BYTES", 1)
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    tensors = [on_device(cuda, n, device=n % 2) for n in range(6)]
    transfer = lane.submit(batches_of(*tensors), block, lambda end: None)
    stream = cuda.current_stream(GPU)
    assert transfer.gate(0, 0.0)
    assert not isinstance(stream.queue[-1], Token)
    assert transfer.gate(250, TIMEOUT_S)
    other = cuda.current_stream(cuda_device(1))
    for waits, copied in ((stream, [0, 0, 2, 0, 0, 0]), (other, [0, 1, 2, 0, 0, 0])):
        token = waits.queue[-1]
        assert isinstance(token, Token)
        there = [one for one in cuda.streams if one.device == waits.device]
        while not token.reached:
            next(one for one in there if one.may_run).run_one()
        assert block[:600:100].tolist() == copied
    lane.close()


def test_small_tensors_in_host_memory_are_copied_at_once(cuda: FakeCuda) -> None:
    """Adam's step counters: the gate need not wait for a thread because of them."""
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    weight, step = on_device(cuda, 1), torch.full((4,), 7, dtype=torch.uint8)
    told: list[int] = []
    transfer = lane.submit(batches_of(weight, step), block, told.append)
    step.fill_(8)
    assert transfer.gate(104, TIMEOUT_S)
    assert told == []
    lane.close()
    assert told == [100, 104]
    assert block[99:105].tolist() == [1, 7, 7, 7, 7, 0]


def test_large_tensors_in_host_memory_are_waited_for(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizer state that was moved to the CPU."""
    monkeypatch.setattr(cuda_module, "_AT_ONCE_BYTES", 50)
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    moment, weight = torch.full((80,), 3, dtype=torch.uint8), on_device(cuda, 1)
    other = torch.full((80,), 4, dtype=torch.uint8)
    transfer = lane.submit(batches_of(moment, weight, other), block, lambda end: None)
    assert not transfer.gate(10, 0.0)
    cuda.run_until(lambda: transfer.gate(10, 0.0))
    cuda.run_until(lambda: transfer.gate(260, 0.0))
    lane.close()
    assert block[:261].tolist() == [3] * 80 + [1] * 100 + [4] * 80 + [0]


def test_a_copy_that_fails_is_told_and_nothing_after_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_module, "_AT_ONCE_BYTES", 0)
    host = losing_host(cuda, monkeypatch)
    lane = CudaLane(host)
    told: list[int] = []
    tensors = on_device(cuda, 1), torch.ones(8, dtype=torch.uint8)
    transfer = lane.submit(batches_of(*tensors), block_of(), told.append)
    ran = threading.Event()
    lane.run(ran.set)
    lane.close()
    with pytest.raises(OSError, match="lost"):
        transfer.wait(0.0)
    assert told == []
    assert ran.is_set(), "who waits for the end would never learn of it"


@pytest.mark.parametrize("kind", [tuple, lambda batches: Chunks(batches, 64)], ids=["all", "cut"])
def test_what_is_copied_is_not_kept(kind: Callable[[Any], Any], cuda: FakeCuda) -> None:
    """Gradients, which the next step makes anew: they would take the memory of a device."""
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    gradient = on_device(cuda, 1)
    kept = weakref.ref(gradient)
    transfer = lane.submit(kind(batches_of(gradient)), block, lambda end: None)
    del gradient
    cuda.run_until(lambda: transfer.complete)
    gc.collect()
    assert kept() is None
    lane.close()


def test_what_could_not_be_copied_is_not_kept(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all where the device has no memory left; nor does the error keep it."""

    def full(batch: Batch) -> torch.Tensor:
        try:
            raise MemoryError("the device's own")
        except MemoryError as error:
            raise OutOfSpaceError("the GPU has no 100 bytes left") from error

    monkeypatch.setattr(cuda_module, "packed", full)
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    gradient, turned = on_device(cuda, 1), on_device(cuda, 2)
    kept = [weakref.ref(gradient), weakref.ref(turned)]
    copies = [*batches_of(gradient), Batch(100, 200, (), turned.view(4, -1).t())]
    transfer = lane.submit(copies, block, lambda end: None)
    del gradient, turned, copies
    cuda.run_until(lambda: transfer.complete)
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    with pytest.raises(OutOfSpaceError, match="no 100 bytes"):
        transfer.wait(0.0)
    lane.close()


def test_whatever_enqueuing_fails_with_nobody_waits_for_ever(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise SystemExit

    lane, block = CudaLane(FakeHost(cuda)), block_of()
    monkeypatch.setattr(cuda_module, "_send", fails)
    transfer = lane.submit(batches_of(on_device(cuda, 1)), block, lambda end: None)
    assert transfer.gate(100, TIMEOUT_S)
    ran: list[int] = []
    lane.run(lambda: ran.append(1))
    with contextlib.suppress(SystemExit):  # which the played thread hands on
        lane.close()
    with pytest.raises(SystemExit):
        transfer.wait(0.0)


def test_an_interrupt_behind_the_handing_over(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are made, and nobody has them: their memory is not given away before."""
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    submit = FakeThreads.submit

    def interrupted(thread: FakeThreads, work: Callable[[], Any]) -> Any:
        submit(thread, work)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FakeThreads, "submit", interrupted)
        patch.setattr(Future, "cancel", lambda future: False)  # it has begun
        with pytest.raises(KeyboardInterrupt):
            lane.submit(batches_of(on_device(cuda, 1)), block, lambda end: None)
    seen: list[int] = []
    lane.run(lambda: seen.append(int(block[:100].sum())))
    lane.close()
    assert seen == [100]


def test_an_interrupt_before_the_handing_over(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what is not begun, and it is not begun later."""
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    late: list[Callable[[], Any]] = []

    def interrupted(thread: FakeThreads, work: Callable[[], Any]) -> Any:
        late.append(work)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FakeThreads, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lane.submit(batches_of(on_device(cuda, 1)), block, lambda end: None)
    ran: list[int] = []
    lane.run(lambda: ran.append(1))
    lane.close()
    assert ran
    late[0]()
    assert not cuda.copying(block.data_ptr(), block.data_ptr() + block.numel())


def test_a_clock_that_has_not_seen_all_copies_tells_nothing(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_module, "_AT_ONCE_BYTES", 0)
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    alone = lane.submit(batches_of(on_device(cuda, 1)), block, lambda end: None)
    tensors = on_device(cuda, 1), torch.ones(8, dtype=torch.uint8)
    both = lane.submit(batches_of(*tensors), block, lambda end: None)
    lane.close()
    assert (alone.copied_s, both.copied_s) == (0.002, None)


def test_a_job_is_behind_copies_that_are_yet_to_be_enqueued(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody waits for them any more, since another copy has failed."""
    monkeypatch.setattr(cuda_module, "_AT_ONCE_BYTES", 0)
    host = losing_host(cuda, monkeypatch)
    lane, block = CudaLane(host), block_of()
    tensors = on_device(cuda, 1), torch.ones(8, dtype=torch.uint8)
    transfer = lane.submit(batches_of(*tensors), block, lambda end: None)
    seen: list[int] = []
    lane.run(lambda: seen.append(int(block[:100].sum())))
    thread = next(actor for actor in cuda.actors if actor.name == "lane")
    while thread.may_go_on:
        thread.go_on()
    assert not seen
    lane.close()
    assert seen == [100]
    with pytest.raises(OSError, match="lost"):
        transfer.wait(0.0)


def test_a_device_that_fails_is_told(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(event: FakeEvent) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    lane = CudaLane(FakeHost(cuda))
    told: list[int] = []
    transfer = lane.submit(batches_of(on_device(cuda, 1)), block_of(), told.append)
    ran = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "synchronize", fails)
        lane.run(ran.set)
        cuda.run_until(ran.is_set)
    with pytest.raises(RuntimeError, match="launch failure"):
        transfer.wait(0.0)
    assert told == []
    lane.close()


def test_a_job_is_behind_copies_that_were_enqueued_before_one_failed(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is given back then is not copied into any more."""
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    weight, turned = on_device(cuda, 1), on_device(cuda, 2).view(4, -1).t()
    monkeypatch.setattr(cuda_module, "_EVENT_BYTES", 1)

    def full(batch: Batch) -> torch.Tensor:
        raise OutOfSpaceError("the GPU has no 100 bytes left")

    monkeypatch.setattr(cuda_module, "packed", full)
    copies = [*batches_of(weight, weight), Batch(200, 300, (), turned)]
    transfer = lane.submit(copies, block, lambda end: None)
    seen: list[int] = []
    lane.run(lambda: seen.append(int(block[:200].sum())))
    lane.close()
    with pytest.raises(OutOfSpaceError, match="no 100 bytes"):
        transfer.wait(0.0)
    assert seen == [200]
    assert transfer.gate(300, TIMEOUT_S), "training goes on"


@pytest.mark.parametrize("what", ["record", "synchronize", "stream", "device"])
def test_a_device_that_has_failed_holds_up_neither_jobs_nor_the_end(
    what: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of CUDA fails from then on; memory is given back by jobs, and training ends."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    @contextlib.contextmanager
    def fails_when_entered(_: Any) -> Iterator[None]:
        yield fails()

    lane = CudaLane(FakeHost(cuda))
    transfer = lane.submit(batches_of(on_device(cuda, 1)), block_of(), lambda end: None)
    assert transfer.gate(1, TIMEOUT_S)
    while any(stream.may_run for stream in cuda.streams):  # it has failed behind the copy
        next(stream for stream in cuda.streams if stream.may_run).run_one()
    ran = threading.Event()
    with monkeypatch.context() as patch:
        if what in ("stream", "device"):
            patch.setattr(cuda, what, fails_when_entered)
        else:
            patch.setattr(FakeEvent, what, fails)
        lane.run(ran.set)
        lane.close()
    assert ran.is_set()


@pytest.mark.parametrize("room", [0, 150])
def test_marks_that_are_too_much_hold_the_device_back(
    room: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``async`` copies the whole state at its mark: duplicates of it need not fit the device."""
    monkeypatch.setattr(cuda_module, "_DUPLICATES_BYTES_MAX", room)
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    tensors = [on_device(cuda, n + 1) for n in range(3)]
    before = len(cuda.allocations)
    lane.copy_now(batches_of(*tensors), block)
    assert len(cuda.allocations) - before == room // 100
    for tensor in tensors:
        cuda.later(tensor, torch.zeros(100, dtype=torch.uint8))
    lane.submit((), block, lambda end: None)
    lane.close()
    assert block[:301].tolist() == [1] * 100 + [2] * 100 + [3] * 100 + [0]


def test_marks_without_memory_for_duplicates(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(batch: Batch) -> torch.Tensor:
        raise OutOfSpaceError("the GPU has no 100 bytes left")

    monkeypatch.setattr(cuda_module, "packed", full)
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    tensor = on_device(cuda, 1)
    lane.copy_now(batches_of(tensor), block)
    cuda.later(tensor, torch.zeros(100, dtype=torch.uint8))
    lane.submit((), block, lambda end: None)
    lane.close()
    assert block[:101].tolist() == [1] * 100 + [0]


def test_a_full_device_is_an_error_that_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "cat", full)
    parts = (torch.ones(8, dtype=torch.uint8), torch.ones(9, dtype=torch.uint8))
    with pytest.raises(OutOfSpaceError, match="the GPU has no 17 bytes of free memory"):
        cuda_module.packed(Batch(0, 17, parts))


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(3, 5).t(),
    "strided": lambda: torch.randn(4, 6)[:, ::2],
    "conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "a parameter": lambda: nn.Parameter(torch.randn(3, 4)).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_packed_is_row_major_and_no_view(form: str) -> None:
    tensor = FORMS[form]()
    packed = cuda_module.packed(Batch(0, tensor.nbytes, (), tensor))
    wanted = tensor.detach().resolve_conj().resolve_neg().contiguous()
    assert packed.numpy().tobytes() == wanted.numpy().tobytes()
    assert packed.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert not packed.requires_grad


def test_a_duplicate_of_one_tensor_is_no_view() -> None:
    tensor = torch.arange(9, dtype=torch.uint8)
    packed = cuda_module.packed(Batch(0, 9, (tensor,)))
    assert packed.data_ptr() != tensor.data_ptr()
    assert packed.equal(tensor)


# --- Pinned memory ----------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 40 * PAGE), st.integers(0, 12 * PAGE)), max_size=8),
    st.sampled_from([PAGE, 3 * PAGE, 100 * PAGE]),
    st.data(),
)
def test_everything_is_pinned_once(
    wanted: list[tuple[int, int]], slice_bytes: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda(random.Random(1))
        cuda.install(patch)
        slices_of(slice_bytes, patch)
        whole = block_of(60)
        pinned = PinnedMemory(whole, GPU)
        for offset, size in wanted:
            pinned.pin(whole[offset : offset + size])
        for begin, end in cuda.registered.items():
            assert begin % PAGE == end % PAGE == 0
            assert end - begin <= slice_bytes
        assert pinned.size_bytes == sum(end - a for a, end in cuda.registered.items())
        for offset, size in wanted:
            block = whole[offset : offset + size]
            begin = data.draw(st.integers(0, size))
            end = data.draw(st.integers(begin, size))
            pieces = list(pinned.pieces(block, begin, end))
            assert pieces[0][0] == begin
            assert pieces[-1][1] == end
            for (_, stop), (start, _) in itertools.pairwise(pieces):
                assert stop == start
            for start, stop in pieces:
                first, last = block.data_ptr() + start, block.data_ptr() + stop
                whole_in_one = any(a <= first and last <= e for a, e in cuda.registered.items())
                assert whole_in_one or start == stop
        pinned.release()
        assert not cuda.registered


class Pinning:
    """What pinning takes, and what happens meanwhile; on a clock of its own."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, rate: float) -> None:
        self.now_s, self.sizes, self.did = 0.0, [], []  # type: tuple[float, list[int], list[str]]
        register = cuda.cudaHostRegister

        def slow(address: int, size_bytes: int, flags: int) -> int:
            self.now_s += size_bytes / rate
            self.sizes.append(size_bytes)
            self.did.append("pin")
            return register(address, size_bytes, flags)

        def sleep(seconds: float) -> None:
            assert seconds == pytest.approx(min(0.05, self.sizes[-1] / rate))
            self.did.append("pause")

        monkeypatch.setattr(cuda, "cudaHostRegister", slow)
        clock = SimpleNamespace(perf_counter=lambda: self.now_s, sleep=sleep)
        monkeypatch.setattr(pinned_module, "time", clock)
        take = lambda address, size_bytes: self.did.append("take")  # noqa: E731
        monkeypatch.setattr(pinned_module, "take_pages", take)


@pytest.mark.parametrize(("rate", "largest"), [(0.5e9, 32), (40e9, 64), (1e12, 256)])
def test_nobody_waits_long_for_memory_to_be_pinned(
    rate: float, largest: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices are as large as some milliseconds allow, their pages are taken before, and whoever has
    waited is let in; only who waits for all of it needs no pause."""
    seen, whole = Pinning(cuda, monkeypatch, rate=rate), block_of((600 << 20) // PAGE)
    pinned = PinnedMemory(whole, GPU)
    pinned.pin(whole)
    assert pinned.size_bytes == 600 << 20
    assert seen.did == ["take", "pin", "pause"] * len(seen.sizes)
    assert max(seen.sizes) == largest << 20
    assert min(seen.sizes[:-1]) == 32 << 20
    pinned.release()
    seen.did.clear()
    pinned.pin(whole[: 64 << 20], at_once=True)
    assert "pause" not in seen.did
    pinned.release()


def test_what_is_ready_is_told_from_the_beginning(cuda: FakeCuda) -> None:
    lane, whole, there = CudaLane(FakeHost(cuda)), block_of(9), [on_device(cuda, 1)]
    assert lane.ready_bytes(there, whole) == 0
    for pinned, ready in ((whole[2 * PAGE : 4 * PAGE], 0), (whole[: PAGE + 1], 4 * PAGE)):
        registered = len(cuda.registered) + 1
        lane.warm(there, pinned)
        assert lane.ready_bytes(there, whole) == 0
        cuda.run_until(partial(lambda wanted: len(cuda.registered) == wanted, registered))
        assert lane.ready_bytes(there, whole) == ready
    assert lane.ready_bytes(there, whole[PAGE : 3 * PAGE]) == 2 * PAGE
    assert lane.ready_bytes(there, whole[5 * PAGE :]) == 0
    assert lane.ready_bytes(there, block_of(9)) == 0, "of another arena"
    assert lane.ready_bytes([torch.ones(1)], whole) == whole.numel(), "in host memory all is"
    lane.close()
    new = DeviceLane(FakeHost(cuda))
    assert new.ready_bytes([torch.ones(1)], whole) == whole.numel()
    assert new.ready_bytes([torch.ones(1), *there], whole) == 0, "nothing was copied off it yet"
    new.close()


def test_the_lane_does_other_things_while_memory_is_made_ready(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices_of(PAGE, monkeypatch)
    host, whole, there = FakeHost(cuda), block_of(20), [on_device(cuda, 1)]
    lane = CudaLane(host)
    lane.warm(there, whole)
    ready: list[int] = []
    over = lane.run(lambda: ready.append(lane.ready_bytes(there, whole)))
    cuda.run_until(over.done)
    assert ready == [PAGE]
    lane.warm(there, whole)  # which is under way
    lane.warm(there, whole[: 9 * PAGE])
    assert host.waiting == 1
    lane.leave()
    left = lane.run(lambda: None)
    cuda.run_until(left.done)
    assert not cuda.registered, "memory that was let go of is pinned again"
    lane.warm(there, whole)
    cuda.run_until(lambda: lane.ready_bytes(there, whole) == whole.numel())
    lane.close()
    assert not cuda.registered


def test_training_does_not_pause_for_itself(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks are copied in its thread; whoever enqueues behind it lets it in between."""
    paused: list[int | None] = []
    pause = lambda self, taken_s: paused.append(threading.get_ident())  # noqa: E731
    monkeypatch.setattr(PinnedMemory, "pause", pause)
    lane, block = CudaLane(FakeHost(cuda)), block_of(2)
    lane.copy_now(batches_of(on_device(cuda, 1)), block[:PAGE])
    assert cuda.registered
    assert not paused
    transfer = lane.submit(batches_of(on_device(cuda, 1)), block[PAGE:], lambda end: None)
    cuda.run_until(lambda: transfer.complete)
    assert paused
    assert threading.get_ident() not in paused
    lane.close()


@pytest.mark.parametrize("why", ["the system does not pin it", "there are no pages"])
def test_that_memory_cannot_be_made_ready_is_said_once(
    why: str, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    lane, whole, there = CudaLane(FakeHost(cuda)), block_of(4), [on_device(cuda, 1)]

    def take(end: int) -> None:
        if why == "there are no pages":
            raise OutOfSpaceError("no pages")

    cuda.status = 2
    for _ in range(2):  # tried again
        lane.warm(there, whole, take)
        over = lane.run(lambda: None)
        cuda.run_until(over.done)
    assert caplog.text.count("memory for copies could not be pinned ahead") == 1
    assert ("no pages" in caplog.text) == (why == "there are no pages")
    assert ("cannot be pinned" in caplog.text) == (why == "the system does not pin it")
    assert lane.ready_bytes(there, whole) == 0
    cuda.status = 0
    lane.warm(there, whole)
    cuda.run_until(lambda: lane.ready_bytes(there, whole) == whole.numel())
    lane.close()


def test_memory_that_cannot_be_pinned_is_refused_with_the_numbers(cuda: FakeCuda) -> None:
    """And training's next kernel is not told of it: CUDA's memory of the error is cleared."""
    whole = block_of(8)
    pinned = PinnedMemory(whole, GPU)
    pinned.pin(whole[:PAGE])
    cuda.status = 2
    with pytest.raises(UnavailableError) as caught:
        pinned.pin(whole)
    text = str(caught.value)
    assert f"{7 * PAGE} bytes of host memory cannot be pinned" in text
    assert "out of memory (CUDA error 2)" in text
    assert f"{PAGE} bytes are pinned already" in text
    assert "limit for locked memory is " in text
    assert "ulimit -l" in text
    assert cuda.launched == 1
    cuda.status = 0
    pinned.pin(whole)
    assert pinned.size_bytes == 8 * PAGE
    pinned.release()


def test_the_arena_of_another_keeper_takes_its_place(cuda: FakeCuda) -> None:
    """What is still being copied into the old one is not pulled away."""
    lane, blocks = CudaLane(FakeHost(cuda)), [block_of(), block_of()]
    transfers = [
        lane.submit(batches_of(on_device(cuda, n + 1)), block, lambda end: None)
        for n, block in enumerate(blocks)
    ]
    assert all(transfer.gate(1, TIMEOUT_S) for transfer in transfers)
    assert len(cuda.registered) == 2
    cuda.run_until(lambda: len(cuda.registered) == 1)
    assert transfers[0].wait(0.0)
    lane.close()
    assert not cuda.registered
    assert [block[0].item() for block in blocks] == [1, 2]


def test_memory_is_pinned_before_it_is_needed(cuda: FakeCuda) -> None:
    lane, block = DeviceLane(FakeHost(cuda)), block_of()
    took: list[tuple[int, int]] = []

    def take(end: int) -> None:
        took.append((end, len(cuda.registered)))

    lane.warm([torch.ones(3)], block, take)
    assert cuda.actor() is None
    assert not took, "nor are pages taken there"
    cuda.run_until(lambda: bool(took))
    weight = on_device(cuda, 1)
    lane.warm([torch.ones(3), weight], block, take)
    assert not cuda.registered, "pinning takes time: not in the trainer's thread"
    cuda.run_until(lambda: bool(cuda.registered))
    lane.warm([torch.ones(3)], block, take)  # moved back: nothing is left to pin for
    cuda.run_until(lambda: len(took) == 3)
    assert took == [(block.numel(), 0), (block.numel(), 0), (block.numel(), 1)], "pages first"
    lane.close()
    assert not cuda.registered


def test_who_gets_another_keeper_leaves_the_memory_of_the_one_before(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(DeviceLane, "leave", lambda self: order.append("leave"))
    with opened(run_folder, {"model": nn.Linear(3, 3)}, method="lazy") as ckpt:
        ckpt.resume()
        ckpt.step()
        saver, service = inspect(ckpt).saver, inspect(ckpt).keepers.service
        assert service is not None
        with monkeypatch.context() as patched:
            patched.setattr(service.pool, "close", lambda *, later: order.append("close"))
            saver.start(replace(service, pool=None))
            inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
        assert order == ["leave", "close"]
        saver.start(service)


def test_pinned_memory_goes_before_that_of_the_next_keeper_is_taken(cuda: FakeCuda) -> None:
    """Or host memory would hold both in full: after a keeper that was killed for memory, too."""
    lane, block = DeviceLane(FakeHost(cuda)), block_of()
    lane.leave()
    lane.warm([on_device(cuda, 1)], block)
    cuda.run_until(lambda: bool(cuda.registered))
    transfer = lane.submit(batches_of(on_device(cuda, 1)), block, lambda end: None)
    order: list[int] = []
    lane.leave()
    lane.run(lambda: order.append(len(cuda.registered)))
    lane.warm([on_device(cuda, 1)], block_of())
    cuda.run_until(lambda: bool(order))
    assert order == [0], "behind copies that were under way, and before anything else"
    assert transfer.wait(0.0)
    assert block[0].item() == 1
    lane.close()
    assert not cuda.registered


# --- Which lane -------------------------------------------------------------------------


class Untouchable:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"torch.cuda.{name} without a CUDA tensor")


def test_states_in_host_memory_touch_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first call would take hundreds of MB of a device, and break children that are forked."""
    monkeypatch.setattr(cuda_module, "_cuda", Untouchable())
    lane, block = DeviceLane(CpuLane()), block_of()
    tensors = torch.ones(100, dtype=torch.uint8), torch.ones(5, dtype=torch.uint8)
    lane.warm(tensors, block)
    lane.copy_now(batches_of(*tensors), block)
    assert lane.submit(batches_of(*tensors), block, lambda end: None).wait(TIMEOUT_S)
    lane.run(lambda: None).result(TIMEOUT_S)
    lane.close()
    assert block[:106].tolist() == [1] * 105 + [0]


def test_a_model_may_be_moved_after_construction(cuda: FakeCuda) -> None:
    lane, block = DeviceLane(FakeHost(cuda)), block_of()
    here = torch.ones(100, dtype=torch.uint8)
    first = lane.submit(batches_of(here), block[:PAGE], lambda end: None)
    assert isinstance(lane.current, CpuLane)
    lane.copy_now(batches_of(on_device(cuda, 2)), block[PAGE:])
    assert isinstance(lane.current, CudaLane)
    second = lane.submit(batches_of(here), block[2 * PAGE :], lambda end: None)
    order: list[str] = []
    lane.run(lambda: order.extend(["first"] * first.wait(0.0) + ["second"] * second.wait(0.0)))
    lane.close()
    assert order == ["first", "second"], "one thread, one order"
    assert [block[n * PAGE].item() for n in range(3)] == [1, 2, 1]


# --- Captured graphs --------------------------------------------------------------------


def test_captured_updates_and_saves_are_refused(cuda: FakeCuda) -> None:
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    batches = batches_of(on_device(cuda, 1))
    cuda.capturing = True
    for call in (
        refuse_graph_capture,
        lambda: lane.copy_now(batches, block),
        lambda: lane.submit(batches, block, lambda end: None),
    ):
        with pytest.raises(StateError, match="captured into a CUDA graph"):
            call()
    cuda.initialized = False  # nothing is asked then
    refuse_graph_capture()
    assert not cuda.registered


def test_threads_of_the_engine_are_left_out_of_what_others_capture(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever captures a graph behind the first step, when memory is pinned, could not."""
    told: list[tuple[str, int]] = []

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
            value = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value
            told.append((threading.current_thread().name, value))
            return 0

    def in_a_thread(name: str, times: int = 2) -> None:
        work = [ignore_graph_captures] * times
        thread = threading.Thread(target=lambda: [one() for one in work], name=name)
        thread.start()
        thread.join(TIMEOUT_S)

    monkeypatch.setattr(machine.ctypes, "CDLL", Driver)
    cuda.initialized = False
    in_a_thread("before there is a device")
    cuda.initialized = True
    in_a_thread("lane")
    in_a_thread("issue")
    assert told == [("lane", 1), ("issue", 1)], "each says so once"

    def none(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine.ctypes, "CDLL", none)
    in_a_thread("where there is no driver of that name")


def test_all_jobs_that_wait_or_pin_say_so_first(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(cuda_module, "ignore_graph_captures", lambda: told.append(1))
    lane, block = CudaLane(FakeHost(cuda)), block_of()
    lane.warm([on_device(cuda, 1)], block)
    cuda.run_until(lambda: bool(cuda.registered))
    assert len(told) == 1
    transfer = lane.submit(batches_of(on_device(cuda, 1)), block, lambda end: None)
    over = lane.run(lambda: None)
    cuda.run_until(over.done)
    assert transfer.wait(0.0)
    assert len(told) == 5, "the end of what is pinned, who enqueues, who watches, the job behind"
    lane.close()


@pytest.mark.parametrize("method", ["lazy", "sync"])
def test_a_captured_step_is_refused_whether_or_not_a_save_is_under_way(
    method: str, cuda: FakeCuda, run_folder: Path
) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with opened(run_folder, {"model": model, "optimizer": optimizer}, method=method) as ckpt:
        ckpt.step()
        cuda.capturing = True
        with pytest.raises(StateError, match=r"optimizer\.step\(\).* captured into a CUDA graph"):
            optimizer.step()
        cuda.capturing = False
        optimizer.step()


# --- The whole engine -------------------------------------------------------------------


@pytest.mark.parametrize("stage_bytes", [0, 30_000, "auto"])
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
def test_a_base_is_the_state_at_its_mark(
    gate: bool,
    stage_bytes: int | str,
    played: threading.Event,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through Checkpointer, Saver and keeper; and without the gate it is not."""
    if not gate:
        monkeypatch.setattr(CudaTransfer, "gate", lambda *_: True)
        monkeypatch.setattr(SpotCheck, "differing", lambda *_: None)
    world, snapshots = World(), {}
    budget = everstep.Budget(device_bytes=stage_bytes)
    with opened(run_folder, world.state, method="lazy", keep=100, budget=budget) as ckpt:
        for step in range(1, 5):
            ckpt.step()
            snapshots[step] = world.snapshot()
            ckpt.save()
            world.train()
        assert isinstance(inspect(ckpt).lane, DeviceLane)
        assert isinstance(inspect(ckpt).lane.current, CudaLane)
        played.set()
        ckpt.wait()
    found = {step: restored(run_folder, step) for step in snapshots}
    assert (found == snapshots) == gate


@pytest.mark.parametrize("stage_bytes", [0, 30_000, "auto"])
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
def test_a_log_has_what_updates_consumed(
    gate: bool,
    stage_bytes: int | str,
    played: threading.Event,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients are zeroed in place as soon as their update is over, on the stream that was made to
    wait for their copies; and if it was not, what is replayed is something else."""
    if not gate:
        monkeypatch.setattr(CudaTransfer, "gate", lambda *_: True)
    played.set()
    world, snapshots = World(), {}
    log = everstep.LogOptions(to="disk", batch_steps=1, history="all")
    budget = everstep.Budget(device_bytes=stage_bytes)
    options = {"method": "logged", "log": log, "keep": 100, "budget": budget}
    with opened(run_folder, world.state, every=100, **options) as ckpt:
        for step in range(1, 7):
            ckpt.step()
            snapshots[step] = world.snapshot()
            played.clear()  # no copy runs by itself until the gradients are zeroed
            world.train()
            world.optimizer.zero_grad(set_to_none=False)
            played.set()
        assert isinstance(inspect(ckpt).lane, DeviceLane)
        assert isinstance(inspect(ckpt).lane.current, CudaLane)
    other = World(seed=99)
    with opened(run_folder, other.state, **options) as ckpt:
        if not gate:
            with pytest.raises(RecoveryError, match=r"gives another .* than training had"):
                ckpt.resume(6)
            return
        for step, wanted in snapshots.items():
            assert ckpt.resume(step).replayed == step - 1
            assert other.snapshot() == wanted, step


def test_a_mark_whose_copies_were_never_made_is_in_no_log(
    played: threading.Event, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device fails between the last update of a step and its mark, and the keeper lives on."""
    played.set()
    log = everstep.LogOptions(to="disk", batch_steps=1, history="all")
    options = {"method": "logged", "log": log, "keep": 100}
    world = World()
    with opened(run_folder, world.state, every=100, **options) as ckpt:
        ckpt.step()
        world.train()
        ckpt.step()
        wanted = world.snapshot()
        world.train()
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)  # gradients are there

        def failed(*_: Any) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        with monkeypatch.context() as patch:
            patch.setattr(FakeEvent, "synchronize", failed)
            patch.setattr(cuda_module, "_send", lambda sources, targets: None)
            with pytest.raises(EverstepError, match="not copied: CUDA error"):
                ckpt.step()
        assert ckpt.stats().log_holes == 1
        inspect(ckpt).release()  # as a program does that dies of it
    other = World(seed=99)
    with opened(run_folder, other.state, **options) as ckpt:
        assert ckpt.resume().step == 2
        assert other.snapshot() == wanted


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["async", "sync", "checkfreq"])
def test_other_methods(method: str, played: threading.Event, run_folder: Path) -> None:
    played.set()
    world, snapshots = World(), {}
    with opened(run_folder, world.state, method=method, keep=100) as ckpt:
        for step in range(1, 4):
            ckpt.step()
            snapshots[step] = world.snapshot()
            ckpt.save()
            world.train()
    for step, wanted in snapshots.items():
        assert restored(run_folder, step) == wanted


def test_memory_that_cannot_be_pinned_loses_the_base_and_not_the_training(
    played: threading.Event, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.set()
    monkeypatch.setattr(FakeCuda, "cudaHostRegister", lambda *_: 2)
    world = World()
    with opened(run_folder, world.state, method="lazy", on_failure="warn") as ckpt:
        ckpt.step()

        def saved() -> everstep.Save:
            save = ckpt.save()
            ckpt.wait()
            return save

        with pytest.warns(RuntimeWarning, match="cannot be pinned for the GPU"):
            save = saved()
        assert isinstance(save.durable.exception(TIMEOUT_S), UnavailableError)
        world.train()
