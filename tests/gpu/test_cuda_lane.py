"""The lane on a real device: copies beside training, updates behind copies, pinned memory.

What can be told without one is told in ``tests/unit/capture/test_cuda_lane.py``."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from everstep.arena import Arena
from everstep.capture import pinned as pinned_module
from everstep.capture.batches import Batch, plan_batches
from everstep.capture.cuda import CudaLane, CudaTransfer, DeviceLane, Enqueued
from everstep.capture.lane import CpuLane
from everstep.capture.pinned import PinnedMemory
from everstep.errors import StateError, UnavailableError
from everstep.state.layout.shards import plan_shards
from everstep.state.values.tensors import byte_view, tensor_entry
from tests.gpu.world import DEVICE, ENVIRONMENT, NEEDS_CUDA, delay_gpu
from tests.support.world import TIMEOUT_S

pytestmark = NEEDS_CUDA

PAGE = 4096
_SLEEP_CYCLES = 1 << 29  # a fraction of a second on any card


@pytest.fixture
def lane() -> Iterator[CudaLane]:
    made = CudaLane(CpuLane())
    yield made
    made.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    """A memfd, like a keeper's; large enough for the largest test."""
    with Arena.create(600 << 20) as made:
        yield made


def block_of(arena: Arena, size_bytes: int = 64 << 20, *, offset: int = 0) -> torch.Tensor:
    whole = torch.frombuffer(arena.view, dtype=torch.uint8)
    assert offset + size_bytes <= whole.numel()
    return whole[offset : offset + size_bytes]


def copies_of(*tensors: torch.Tensor) -> list[Batch]:
    found, at = [], 0
    for tensor in tensors:
        flat = byte_view(tensor)
        found.append(Batch(at, at + flat.numel(), (flat,)))
        at += flat.numel()
    return found


def busy() -> None:
    """The device is; what is enqueued now runs later."""
    delay_gpu(_SLEEP_CYCLES)


def ignored(end: int) -> None: ...


# --- What is copied ---------------------------------------------------------------------

FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.randn(301, 7),
    "large": lambda: torch.randn(33 << 20),
    "bfloat16": lambda: torch.randn(1001).bfloat16(),
    "float8": lambda: torch.randn(64).to(torch.float8_e4m3fn),
    "int64": lambda: torch.arange(77),
    "bool": lambda: torch.rand(99) < 0.5,
    "complex": lambda: torch.randn(31, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(31, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(31, dtype=torch.complex64).conj().imag,
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.randn(40, 60).t(),
    "strided": lambda: torch.randn(50, 40)[:, ::3],
    "channels last": lambda: torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last),
    "large and transposed": lambda: torch.randn(1500, 1000).t(),
}


@pytest.mark.parametrize("when", ["mark", "submit"])
def test_every_tensor_lands_in_its_place(when: str, lane: CudaLane, arena: Arena) -> None:
    made = {name: form() for name, form in FORMS.items()}
    live = {name: t.to(DEVICE) for name, t in made.items()}
    live["conjugated"] = made["conjugated"].resolve_conj().conj_physical().to(DEVICE).conj()
    live["in host memory"] = torch.randn(500)
    live["a counter"] = torch.tensor(7.0)
    (layout,) = plan_shards([tensor_entry(name, tensor) for name, tensor in live.items()])
    block = block_of(arena, 256 << 20)
    batches = plan_batches(layout, live, live.keys())
    told: list[int] = []
    if when == "mark":
        lane.copy_now(batches, block)
        transfer = lane.submit((), block, told.append)
    else:
        transfer = lane.submit(batches, block, told.append)
    assert transfer.wait(TIMEOUT_S)
    for place in layout.placed:
        tensor = live[place.entry.name].detach().resolve_conj().resolve_neg()
        wanted = byte_view(tensor.cpu().contiguous())
        assert block[place.begin : place.end].equal(wanted), place.entry.name
    if when == "submit":
        assert told == sorted(told)
        assert told[-1] == batches[-1].end


def test_progress_is_told_of_bytes_that_are_there(lane: CudaLane, arena: Arena) -> None:
    """A quarter of a GB, told in several pieces, each looked at as it is told."""
    live = {f"t{n}": torch.full((16 << 20,), n + 1.0, device=DEVICE) for n in range(4)}
    (layout,) = plan_shards([tensor_entry(name, tensor) for name, tensor in live.items()])
    block, told, seen = block_of(arena, 256 << 20), [], 0

    def progress(end: int) -> None:
        nonlocal seen
        values = block[seen:end].view(torch.float32)
        wanted = torch.arange(seen // 4, end // 4).div(16 << 20, rounding_mode="floor") + 1
        assert values.equal(wanted.float()), "told of what is not there"
        seen = end
        told.append(end)

    busy()
    assert lane.submit(plan_batches(layout, live, live.keys()), block, progress).wait(TIMEOUT_S)
    assert len(told) >= 4


# --- Order ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["default", "another"])
def test_an_update_waits_for_the_copy_and_the_cpu_does_not(
    stream: str, lane: CudaLane, arena: Arena
) -> None:
    """The copy waits for what made the state, the update for the copy; the trainer for nothing."""
    own = torch.cuda.Stream() if stream == "another" else torch.cuda.default_stream()
    weight = torch.zeros(64 << 20, device=DEVICE)
    block = block_of(arena, weight.nbytes)
    lane.warm([weight], block)
    lane.submit(copies_of(weight), block, ignored).wait(TIMEOUT_S)  # pinned, and warm
    torch.cuda.synchronize()
    with torch.cuda.stream(own):
        busy()
        weight.fill_(1.0)
        start_s = time.perf_counter()
        transfer = lane.submit(copies_of(weight), block, ignored)
        assert transfer.gate(weight.nbytes, TIMEOUT_S)
        weight.fill_(2.0)
        enqueued_s = time.perf_counter() - start_s
        assert not own.query(), "the device was not busy: this test shows nothing"
        assert not transfer.wait(0.0)
        own.synchronize()
        whole_s = time.perf_counter() - start_s
    assert transfer.wait(TIMEOUT_S)
    assert enqueued_s < whole_s / 3, "the trainer's thread was held up"
    assert (block[: weight.nbytes].view(torch.float32) == 1).all()
    assert (weight == 2).all()


def test_without_the_gate_it_is_torn(lane: CudaLane, arena: Arena) -> None:
    """The reason for the gate."""
    weight = torch.ones(128 << 20, device=DEVICE)
    block = block_of(arena, weight.nbytes)
    lane.submit(copies_of(weight), block, ignored).wait(TIMEOUT_S)
    torch.cuda.synchronize()
    transfer = lane.submit(copies_of(weight), block, ignored)
    weight.fill_(2.0)
    assert transfer.wait(TIMEOUT_S)
    assert (block[: weight.nbytes].view(torch.float32) == 2).any(), "this test cannot fail"


def test_marks_may_change_at_once(lane: CudaLane, arena: Arena) -> None:
    """Duplicates up to a limit; the rest holds the device back, and is right, too."""
    tensors = [torch.full((40 << 20,), n + 1.0, device=DEVICE) for n in range(3)]  # 480 MB
    block = block_of(arena, 480 << 20)
    lane.warm(tensors, block)
    busy()
    lane.copy_now(copies_of(*tensors), block)
    for tensor in tensors:
        tensor.zero_()
    assert lane.submit((), block, ignored).wait(TIMEOUT_S)
    found = block[: 3 * tensors[0].nbytes].view(torch.float32).view(3, -1)
    for number, values in enumerate(found):
        assert (values == number + 1).all()


def test_memory_that_is_freed_meanwhile_is_not_reused(lane: CudaLane, arena: Arena) -> None:
    """Gradients are freed by zero_grad(); the allocator gives their memory to the next forward."""
    block = block_of(arena)
    first = torch.full((16 << 20,), 1.0, device=DEVICE)
    lane.submit(copies_of(first), block, ignored).wait(TIMEOUT_S)
    del first
    torch.cuda.synchronize()
    freed = torch.full((16 << 20,), 1.0, device=DEVICE)
    side = lane.side_streams[freed.device]
    with torch.cuda.stream(side):
        busy()  # the copy runs later
    transfer = lane.submit(copies_of(freed), block, ignored)
    size = freed.nbytes
    del freed
    others = [torch.full((16 << 20,), 2.0, device=DEVICE) for _ in range(8)]
    assert transfer.wait(TIMEOUT_S)
    assert (block[:size].view(torch.float32) == 1).all()
    assert all((other == 2).all() for other in others)


def test_jobs_run_behind_copies_that_nobody_waits_for(lane: CudaLane, arena: Arena) -> None:
    """A save that is given up between mark and submit leaves its memory only then."""
    tensor = torch.ones(1 << 20, device=DEVICE)
    block = block_of(arena)
    lane.copy_now(copies_of(tensor), block)
    torch.cuda.synchronize()
    block.zero_()
    with torch.cuda.stream(lane.side_streams[tensor.device]):
        busy()
    lane.copy_now(copies_of(tensor), block)
    seen: list[bool] = []
    there = lane.run(lambda: seen.append(bool((block[: tensor.nbytes] != 0).any())))
    there.result(TIMEOUT_S)
    assert seen == [True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device only")
def test_several_devices(lane: CudaLane, arena: Arena) -> None:
    devices = [torch.device("cuda", n) for n in range(2)]
    tensors = [torch.full((8 << 20,), n + 1.0, device=devices[n % 2]) for n in range(4)]
    marks = [torch.full((1000,), n + 9.0, device=devices[n % 2]) for n in range(2)]
    block = block_of(arena, 256 << 20)
    offset = sum(tensor.nbytes for tensor in tensors)
    lane.copy_now(
        [
            Batch(offset + n * 4000, offset + (n + 1) * 4000, (byte_view(t),))
            for n, t in enumerate(marks)
        ],
        block,
    )
    for mark in marks:
        mark.zero_()
    transfer = lane.submit(copies_of(*tensors), block, ignored)
    assert transfer.gate(offset, TIMEOUT_S)
    for tensor in tensors:
        tensor.zero_()
    assert transfer.wait(TIMEOUT_S)
    found = block[:offset].view(torch.float32).view(4, -1)
    assert [set(values.tolist()) for values in found[:, ::4096]] == [{1.0}, {2.0}, {3.0}, {4.0}]
    assert (block[offset : offset + 8000].view(torch.float32) >= 9).all()


SECOND = """
import torch
from everstep.arena import Arena
from everstep.capture.batches import Batch
from everstep.capture.cuda import CudaLane
from everstep.capture.lane import CpuLane
from everstep.state.values.tensors import byte_view
lane, block = CudaLane(CpuLane()), torch.frombuffer(Arena.create(1 << 20).view, dtype=torch.uint8)
tensor = torch.ones(1000, device="cuda:1")
lane.warm([tensor], block)
for _ in range(3):
    assert lane.submit([Batch(0, 4000, (byte_view(tensor),))], block, lambda end: None).wait(60)
    lane.run(lambda: tensor.sum().item()).result(60)
lane.close()
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0), "a context on a device that nobody has named"
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device only")
def test_the_lanes_thread_makes_no_context_on_the_first_device() -> None:
    """Which is another rank's: of eight ranks seven would take some hundred MB of it."""
    subprocess.run(
        [sys.executable, "-c", SECOND], env=ENVIRONMENT, timeout=6 * TIMEOUT_S, check=True
    )


# --- Pinned memory ----------------------------------------------------------------------


def test_what_is_used_is_pinned_until_the_lane_is_closed(arena: Arena) -> None:
    lane, block = CudaLane(CpuLane()), block_of(arena)
    lane.warm([torch.ones(1, device=DEVICE)], block)
    lane.run(lambda: None).result(TIMEOUT_S)
    assert block.is_pinned()
    # A tensor of its own: torch looks at where the memory begins.
    assert not torch.frombuffer(arena.view[128 << 20 :], dtype=torch.uint8).is_pinned()
    lane.close()
    assert not block.is_pinned()


def test_copies_over_the_edge_of_two_registrations(
    lane: CudaLane, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA need not take a copy that goes over one."""
    for name in ("_SLICE_BYTES", "_SLICE_BYTES_MAX"):
        monkeypatch.setattr(pinned_module, name, PAGE)
    tensor = torch.randn(5 * PAGE, device=DEVICE)
    block = block_of(arena, 8 * tensor.nbytes)
    assert lane.submit(copies_of(tensor), block, ignored).wait(TIMEOUT_S)
    assert block[: tensor.nbytes].view(torch.float32).equal(tensor.cpu())


def test_memory_that_cannot_be_pinned_is_refused_and_no_kernel_is_told(arena: Arena) -> None:
    block = block_of(arena, 8 * PAGE)
    torch.ones(1, device=DEVICE)
    cudart: Any = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(block.data_ptr() + 4 * PAGE, PAGE, 1)) == 0
    pinned = PinnedMemory(block, torch.device("cuda", 0))
    try:
        with pytest.raises(UnavailableError, match=f"{8 * PAGE} bytes of host memory cannot be"):
            pinned.pin(block)  # a part is registered by somebody else
        assert (torch.ones(10, device=DEVICE) + 1).sum().item() == 20
    finally:
        cudart.cudaHostUnregister(block.data_ptr() + 4 * PAGE)
    pinned.pin(block)
    assert block.is_pinned()
    pinned.release()
    assert not block.is_pinned()


# --- Captured graphs --------------------------------------------------------------------


def test_saves_inside_of_a_captured_graph_are_refused(lane: CudaLane, arena: Arena) -> None:
    tensor, block = torch.ones(1000, device=DEVICE), block_of(arena)
    lane.submit(copies_of(tensor), block, ignored).wait(TIMEOUT_S)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        tensor.add_(1)
        for call in (
            lambda: lane.copy_now(copies_of(tensor), block),
            lambda: lane.submit(copies_of(tensor), block, ignored),
        ):
            with pytest.raises(StateError, match="captured into a CUDA graph"):
                call()
    graph.replay()
    torch.cuda.synchronize()
    assert (tensor == 2).all()


def test_others_capture_graphs_while_the_lane_pins_and_copies(arena: Arena) -> None:
    """In torch's default mode, in which CUDA refuses what other threads do and may be unsafe. A
    lane of its own, since each thread says once that it has nothing to do with it."""
    lane, tensor = CudaLane(CpuLane()), torch.full((16 << 20,), 1.0, device=DEVICE)
    block, captures = block_of(arena, tensor.nbytes, offset=128 << 20), threading.Event()
    lane.run(lambda: None).result(TIMEOUT_S)
    held = [lane.run(lambda: _told(captures)), lane.issuer.issue(lambda: _told(captures))]
    transfer = lane.submit(copies_of(tensor), block, ignored)  # pins, copies, waits for the copies
    values, graph = torch.arange(1000.0, device=DEVICE), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            doubled = values * 2
            captures.set()
            assert transfer.wait(TIMEOUT_S)
            result = doubled + 1
    finally:
        captures.set()
        lane.close()
    assert all(one.done() for one in held)
    assert (block.view(torch.float32) == 1).all()
    values.fill_(4.0)
    graph.replay()
    assert (result == 9).all()


def _told(captures: threading.Event) -> Any:
    """Until then: what comes behind it happens during the capture."""
    assert captures.wait(TIMEOUT_S)
    return Enqueued()


def test_the_engine_finds_its_lane(arena: Arena) -> None:
    lane = DeviceLane(CpuLane())
    transfer = lane.submit(copies_of(torch.ones(10)), block_of(arena), ignored)
    assert not isinstance(transfer, CudaTransfer)
    transfer = lane.submit(copies_of(torch.ones(10, device=DEVICE)), block_of(arena), ignored)
    assert isinstance(transfer, CudaTransfer)
    assert transfer.wait(TIMEOUT_S)
    lane.close()
