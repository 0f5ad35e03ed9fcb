"""Training on a CUDA device, saved and resumed: bit for bit the state at each mark, from disk
and from the memory of a keeper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.capture.cuda import CudaLane, CudaTransfer, DeviceLane
from everstep.capture.spot_check import SpotCheck
from everstep.errors import AuditError, StateError
from everstep.link.registry import list_keepers
from everstep.seams.processes.processes import process_ended
from everstep.testing import inspect
from tests.gpu.world import (
    DEVICE,
    ENVIRONMENT,
    NEEDS_CUDA,
    World,
    delay_gpu,
    opened,
    restored,
    warm_up,
)
from tests.support.keeper_process import finish
from tests.support.world import TIMEOUT_S

pytestmark = NEEDS_CUDA


@pytest.fixture(autouse=True)
def no_keeper_stays() -> Iterator[None]:
    yield
    for keeper in list_keepers():
        os.kill(keeper.pid, signal.SIGKILL)
        assert process_ended(keeper.pid, TIMEOUT_S)


@pytest.fixture
def exact() -> Iterator[None]:
    """Kernels that give the same bits each time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# --- The state at the mark --------------------------------------------------------------


def same(world: World, wanted: dict[str, Any]) -> bool:
    found = world.live()
    assert found.keys() == wanted.keys()
    return all(bool((found[key] == wanted[key]).all()) for key in wanted)


@pytest.mark.parametrize("method", ["lazy", "checkfreq", "async", "sync"])
def test_a_base_is_the_state_at_its_mark(method: str, run_folder: Path) -> None:
    """100 MB, saved again and again while training goes on without a wait on the CPU."""
    world, wanted = World(width=2048), {}
    with opened(run_folder, world, method=method) as ckpt:
        for step in range(1, 13):
            world.train()
            ckpt.step()
            if step % 3 == 1:
                wanted[step] = world.live()
                ckpt.save()
        assert isinstance(inspect(ckpt).lane, DeviceLane)
        assert isinstance(inspect(ckpt).lane.current, CudaLane) or method == "sync"
        ckpt.wait()
        assert ckpt.stats().committed == 4
    for step, expected in wanted.items():
        assert same(restored(run_folder, step, width=2048), expected), step


def test_without_the_gate_it_is_not(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaTransfer, "gate", lambda *_: True)
    monkeypatch.setattr(SpotCheck, "differing", lambda *_: None)
    world, wanted = World(width=4096), {}
    with opened(run_folder, world, method="lazy") as ckpt:
        for step in range(1, 9):
            world.train()
            ckpt.step()
            wanted[step] = world.live()
            ckpt.save()
            world.train()
    found = {step: restored(run_folder, step, width=4096) for step in wanted}
    assert not all(same(found[step], wanted[step]) for step in wanted), "this test cannot fail"


@pytest.mark.parametrize("method", ["lazy", "async"])
def test_what_no_optimizer_owns_may_change_at_once(method: str, run_folder: Path) -> None:
    """Running statistics and averaged weights, on the device."""
    world = World()
    average = torch.full((1 << 20,), 1.0, device=DEVICE)
    world.state["average"] = {"weight": average}
    with opened(run_folder, world, method=method) as ckpt:
        world.train()
        ckpt.step()
        wanted = world.live()
        delay_gpu(1 << 28)
        ckpt.save()
        average.fill_(2.0)
        world.model[1].running_mean.fill_(5.0)
        world.train()
    other = World(seed=99)
    other.state["average"] = {"weight": torch.zeros(1 << 20, device=DEVICE)}
    with opened(run_folder, other, method="sync") as ckpt:
        ckpt.resume()
    assert same(other, wanted)
    assert (other.state["average"]["weight"] == 1).all()


def test_a_change_past_the_optimizer_is_refused(run_folder: Path) -> None:
    world = World(width=2048)
    with opened(run_folder, world, on_failure="warn") as ckpt:
        world.train()
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        (side,) = inspect(ckpt).lane.current.side_streams.values()
        world.train()
        ckpt.step()
        with torch.cuda.stream(side):
            delay_gpu(1 << 28)  # the copies come later
        save = ckpt.save()
        for parameter in world.model.parameters():
            parameter.data.fill_(7.0)  # no gate
        error = save.durable.exception(TIMEOUT_S)
        assert isinstance(error, AuditError), error
        with pytest.warns(RuntimeWarning, match="was changed while it was being copied"):
            ckpt.wait()
        torch.cuda.synchronize()


def test_training_on_another_stream(run_folder: Path) -> None:
    world, wanted = World(width=1024), {}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), opened(run_folder, world) as ckpt:
        for step in range(1, 7):
            world.train()
            ckpt.step()
            wanted[step] = world.live()
            ckpt.save()
        torch.cuda.synchronize()
    for step, expected in wanted.items():
        assert same(restored(run_folder, step, width=1024), expected), step


def test_a_model_that_is_moved_after_construction(run_folder: Path) -> None:
    world = World(device=torch.device("cpu"))
    with opened(run_folder, world) as ckpt:
        world.model.cuda()
        world.device = DEVICE
        for _ in range(3):
            world.train()
            ckpt.step()
            ckpt.save()
        wanted = world.live()
        assert isinstance(inspect(ckpt).lane, DeviceLane)
        assert isinstance(inspect(ckpt).lane.current, CudaLane)
    assert same(restored(run_folder, 3), wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device only")
def test_a_model_on_two_devices(run_folder: Path) -> None:
    torch.manual_seed(1)
    parts = [torch.nn.Linear(2000, 2000, device=f"cuda:{n}") for n in range(2)]
    model = torch.nn.ModuleList(parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train() -> None:
        optimizer.zero_grad()
        batch = torch.randn(4, 2000, device="cuda:0")
        parts[1](parts[0](batch).to("cuda:1")).square().mean().backward()
        optimizer.step()

    state = {"model": model, "optimizer": optimizer}
    with everstep.Checkpointer(run_folder, state, every=None, keep=100) as ckpt:
        wanted = {}
        for step in range(1, 5):
            train()
            ckpt.step()
            wanted[step] = [p.detach().clone() for p in model.parameters()]
            ckpt.save()
    for step, expected in wanted.items():
        with everstep.Checkpointer(run_folder, state, every=None, method="sync") as ckpt:
            ckpt.resume(step)
        for parameter, value in zip(model.parameters(), expected, strict=True):
            assert parameter.equal(value)


# --- Resumed trainings ------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "AdamW with lr on the device": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01, device=DEVICE), fused=True
    ),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def check_resumed(run: Path, build: Callable[[int], World], **options: Any) -> None:
    """Trains straight through, and again with an interruption; both must end the same."""
    world = build(1)
    for _ in range(7):
        world.train()
    wanted = world.snapshot()
    world = build(1)
    with opened(run, world, **options) as ckpt:
        ckpt.resume()
        for _ in range(4):
            world.train()
            ckpt.step()
        ckpt.save()
    world = build(2)
    world.train()
    with opened(run, world, **options) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.exact) == (4, True)
        for _ in range(3):
            world.train()
            ckpt.step()
    assert world.snapshot() == wanted


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_training_ends_as_an_uninterrupted_one(name: str, run_folder: Path) -> None:
    """With dropout: so the device's generator is restored, too."""
    check_resumed(run_folder, lambda seed: World(OPTIMIZERS[name], seed=seed))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("fused", [False, True])
def test_mixed_precision_with_a_scaler(fused: bool, run_folder: Path) -> None:
    """The scaler skips steps, and its scale is part of the state."""
    check_resumed(
        run_folder,
        lambda seed: World(
            lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused), seed=seed, scaled=True
        ),
    )


def test_generators_of_all_devices_are_restored(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world) as ckpt:
        world.train()
        ckpt.step()
        ckpt.save()
        wanted = [torch.rand(9, device=f"cuda:{n}") for n in range(torch.cuda.device_count())]
    other = World(seed=99)
    with opened(run_folder, other, method="sync") as ckpt:
        recovery = ckpt.resume()
        assert not recovery.notes
        found = [torch.rand(9, device=f"cuda:{n}") for n in range(torch.cuda.device_count())]
    assert all(map(torch.equal, found, wanted))


LATER = """
import sys, torch, everstep
torch.manual_seed(99)  # which CUDA hears of when it comes into use
with everstep.Checkpointer(sys.argv[1], {"n": 0}, every=None) as ckpt:
    assert not torch.cuda.is_initialized()
    recovery = ckpt.resume()
    assert recovery.exact and not recovery.notes, recovery
    print(torch.rand(9, device="cuda").tolist())
"""


def test_a_generator_is_restored_before_its_device_is_in_use(run_folder: Path) -> None:
    torch.cuda.manual_seed_all(7)
    torch.rand(5, device=DEVICE)
    with everstep.Checkpointer(run_folder, {"n": 1}, every=None) as ckpt:
        ckpt.save()
    wanted = torch.rand(9, device=DEVICE).tolist()
    found = subprocess.run(
        [sys.executable, "-c", LATER, str(run_folder)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=6 * TIMEOUT_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == str(wanted).split()


KILLED = """
import json, os, signal, sys, torch, everstep
from everstep.testing import inspect
from tests.gpu.world import World
run, source = sys.argv[1:]
world = World(width=1024)
ckpt = everstep.Checkpointer(run, world.state, every=None)
recovery = ckpt.resume()
print(json.dumps({"step": recovery.step, "source": recovery.source}), flush=True)
if recovery.step:
    print(json.dumps(world.snapshot()))
    ckpt.close()
    sys.exit(0)
for step in range(3):
    world.train()
    ckpt.step()
    ckpt.save()
print(json.dumps(world.snapshot()), flush=True)
inspect(ckpt).saver.finish_captures()
if source == "disk":
    ckpt.close()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_a_killed_training_comes_back_from(source: str, run_folder: Path) -> None:
    """The keeper outlives the process, whose pinned memory it shares."""
    said = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(run_folder), source],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        status, lines, err = finish(process)
        assert status in (0, -signal.SIGKILL), err
        said.append(lines)
    assert said[0][0]["source"] == "fresh"
    assert said[1][0] == {"step": 3, "source": source}
    assert said[0][1] == said[1][1]


# --- Captured graphs --------------------------------------------------------------------


def test_an_update_captured_into_a_graph_is_refused(run_folder: Path) -> None:
    world = World(lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True))
    with opened(run_folder, world) as ckpt:
        warm_up(world.train)
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            with pytest.raises(StateError, match=r"captured into a CUDA graph"):
                world.optimizer.step()
            world.model[0].weight.grad.add_(0)  # a graph that is not empty
        world.train()  # outside of the graph all is well
        ckpt.step()
        ckpt.save().durable.result(TIMEOUT_S)


def test_a_graph_may_be_captured_while_a_base_is_copied(run_folder: Path) -> None:
    """The first base: its copies are waited for while training captures forward and backward, in
    torch's default mode, which allows other threads next to nothing."""
    world, wanted, captures = World(width=4096), {}, threading.Event()
    batch = torch.randn(16, 32, device=DEVICE)

    def backward() -> None:
        world.model(batch).square().mean().backward()

    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        warm_up(world.train)
        ckpt.step()
        wanted[1] = world.live()
        world.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        inspect(ckpt).lane.run(lambda: _assert_told(captures))
        first = ckpt.save()
        with torch.cuda.graph(graph):
            assert not first.staged.done(), "no copy was under way: this test shows nothing"
            captures.set()
            first.staged.result(TIMEOUT_S)
            backward()
        for step in range(2, 5):
            graph.replay()
            world.optimizer.step()
            ckpt.step()
            ckpt.save()
            wanted[step] = world.live()
        ckpt.wait()
    for step, live in wanted.items():
        assert same(restored(run_folder, step, width=4096), live), step


def _assert_told(captures: threading.Event) -> None:
    assert captures.wait(TIMEOUT_S)


def test_the_trainers_thread_is_not_held_up_by_a_save(run_folder: Path) -> None:
    """While the device is busy, step, save, gate and update only enqueue."""
    world = World(width=4096)
    with opened(run_folder, world) as ckpt:
        for _ in range(2):
            world.train()
            ckpt.step()
            ckpt.save()
        ckpt.wait()
        torch.cuda.synchronize()
        delay_gpu(1 << 30)
        busy = torch.cuda.Event()
        busy.record()
        world.train()
        ckpt.step()
        save = ckpt.save()
        world.train()
        assert not busy.query(), "something waited for the device"
        assert not save.staged.done()
        ckpt.step()
        ckpt.wait()
        assert ckpt.stats().stall_s["gate"] < 0.5
