"""Gradients that are kept for several steps until they are copied (``Method.held_steps``): the
state goes first, training waits for what is due and no sooner, and every bit is what it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.lane import CpuLane
from everstep.link.recordable import Layouts
from everstep.plan.multistep import Pipeline, best_cut, lower_bound_s, overlap
from everstep.testing import inspect
from everstep.trainer.multistep.held_gradients import (
    GradientCheck,
    HeldGradients,
)
from tests.support.elsewhere import elsewhere
from tests.support.following import run_steps
from tests.support.multistep.measured import Bench as Choices
from tests.support.multistep.rows import over, restored
from tests.support.multistep.world import World, begin, report_of, start
from tests.support.serving import Bench, serving
from tests.support.world import TIMEOUT_S


class SlowGradients(CpuLane):
    """What yields is copied only when a test says so; all else goes on."""

    go = threading.Event()

    def _let_pass(self) -> None:
        super()._let_pass()
        for _ in range(int(TIMEOUT_S / 0.01)):
            if self.go.wait(0.01):
                return
            super()._let_pass()
        raise AssertionError("nobody let gradients be copied")


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(SlowGradients, "go", threading.Event())
    monkeypatch.setattr("everstep.trainer.session.components.CpuLane", SlowGradients)
    yield SlowGradients.go
    SlowGradients.go.set()


def waits(what: Callable[[], object], go: threading.Event) -> bool:
    """Whether something is over only when gradients are copied."""
    done = threading.Event()

    def run() -> None:
        what()
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    waited = not done.wait(0.3)
    if waited:
        go.set()
    thread.join(TIMEOUT_S)
    assert done.is_set()
    return waited


@pytest.mark.thinned(3)
@pytest.mark.parametrize("held_steps", [2, 3, 4])
def test_the_update_that_they_are_due_at_waits(
    held_steps: int, slow: threading.Event, served: Bench
) -> None:
    """Parts of the state are copied meanwhile, though they come later."""
    world = World()
    ckpt = start(served, world, over(6, overlap=held_steps))
    run_steps(ckpt, world, held_steps)
    assert ckpt.stats().stall_s["gradients"] < 0.3, "training has waited already"
    world.backward()
    assert waits(world.optimizer.step, slow)
    world.optimizer.zero_grad()
    world.schedule.step()
    world.state["data"]["seen"] += 1
    ckpt.step()
    states = {3 + held_steps: world.snapshot()} | run_steps(ckpt, world, 5)
    ckpt.close()
    assert report_of(ckpt).abandoned == 0
    assert restored(served.run, World(seed=9), 7) == states[7]


def test_zeroing_in_place_waits_for_all(slow: threading.Event, served: Bench) -> None:
    world = World()
    ckpt = start(served, world, over(6, overlap=4))
    run_steps(ckpt, world, 2)
    world.backward()
    world.optimizer.step()
    assert waits(lambda: world.optimizer.zero_grad(set_to_none=False), slow)
    world.schedule.step()
    world.state["data"]["seen"] += 1
    ckpt.step()
    states = run_steps(ckpt, world, 5)
    ckpt.close()
    assert restored(served.run, World(seed=9), 7) == states[7]


def test_behind_the_last_part_nobody_waits_until_another_base_has_as_many(
    slow: threading.Event, served: Bench
) -> None:
    """A base is durable when its gradients are there, and not before."""
    world = World()
    ckpt = start(served, world, over(3, overlap=3))
    save = inspect(ckpt).multistep.last
    assert save is not None
    states = run_steps(ckpt, world, 6)
    assert not inspect(ckpt).multistep.window
    assert not save.durable.done()
    assert world.model[0].weight._backward_hooks, "they are still held"
    begin(ckpt)  # of step 8; gradients of two updates are held
    states |= run_steps(ckpt, world, 1)
    world.backward()
    assert waits(world.optimizer.step, slow), "now of three"
    world.optimizer.zero_grad()
    world.schedule.step()
    world.state["data"]["seen"] += 1
    ckpt.step()
    states[10] = world.snapshot()
    assert save.durable.exception(TIMEOUT_S) is None
    states |= run_steps(ckpt, world, 4)
    ckpt.wait()
    states |= run_steps(ckpt, world, 1)
    assert not world.model[0].weight._backward_hooks
    assert "zero_grad" not in vars(world.optimizer)
    ckpt.close()
    assert report_of(ckpt).abandoned == 0
    for step in (4, 10):
        assert restored(served.run, World(seed=9), step) == states[step]


def test_closing_waits_for_them(slow: threading.Event, served: Bench) -> None:
    world = World()
    ckpt = start(served, world, over(6, overlap=5))
    states = run_steps(ckpt, world, 2)
    assert waits(ckpt.close, slow)
    assert restored(served.run, World(seed=9), 4) == states[4]


def test_without_being_held_they_are_torn(
    slow: threading.Event, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is noticed, and the base is not taken for whole."""
    hold = everstep.trainer.multistep.held_gradients.HeldGradients.hold
    monkeypatch.setattr(
        everstep.trainer.multistep.held_gradients.HeldGradients,
        "hold",
        lambda self, window, key, transfer, end, held, check: hold(
            self, window, key, transfer, end, [], check
        ),
    )
    world = World(to_none=False)
    reported: list[everstep.EverstepError] = []
    ckpt = start(served, world, over(3, overlap=3), on_failure=reported.append)
    kept = world.optimizer.zero_grad
    monkeypatch.setattr(world.optimizer, "zero_grad", lambda **_: kept(set_to_none=True))
    world.backward()
    world.optimizer.step()
    for parameter in world.model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.zero_()
    slow.set()
    ckpt.step()
    run_steps(ckpt, world, 4)
    ckpt.close()
    assert "was written to while it was being copied" in str(reported[0])


def test_copies_that_share_the_link_say_nothing_about_it() -> None:
    bench = Choices()
    for _ in range(3):
        gradients = bench.choice.timed(1 << 20, yielding=True)
        part = bench.choice.timed(1 << 20)
        bench.clock.advance(10.0)
        gradients.ended()
        part.ended()
    assert bench.stats.link_bytes_per_s is None
    alone = bench.choice.timed(1 << 20, yielding=True)
    bench.clock.advance(0.5)
    alone.ended()
    assert bench.stats.link_bytes_per_s == pytest.approx(2 << 20)
    bench.choice.over(bench.choice.timed(1 << 20, yielding=True))  # given up
    part = bench.choice.timed(1 << 20)
    assert part.exclusive


@pytest.mark.parametrize(("copy", "ratio", "held_steps"), [(4, 4 / 12, 3), (8, 2 / 14, 4)])
def test_it_reaches_the_bound_that_one_step_does_not(
    copy: int, ratio: float, held_steps: int
) -> None:
    """In steps: with one step ``T - 1 / r`` is waited for, in however many parts."""
    pipeline = Pipeline(copy, copy * ratio, 0.9, 0.0, 0.1, behind_update=True)
    bounds = [lower_bound_s(pipeline, parts) for parts in range(1, 25)]
    least = {
        held: min(best_cut(pipeline, parts, held).overlap.stall_s for parts in range(1, 25))
        for held in (1, held_steps)
    }
    assert min(bounds) == 0
    assert least[held_steps] == pytest.approx(0, abs=1e-9)
    assert least[1] >= copy - 1 / ratio - 1e-9 > 0.9


def test_the_state_goes_first_in_the_model_too() -> None:
    pipeline = Pipeline(4.0, 4 / 3, 1.0, 0.0, 0.0, behind_update=True)
    found = overlap(pipeline, 5, 4)
    assert found.state_wait_s == 0
    assert found.held_s > overlap(pipeline, 5, 1).held_s


class _Copies:
    """On a device: whoever waits for them has its stream wait."""

    complete = False


class _Waits:
    """In the place of the gate: which copies were waited for."""

    def __init__(self) -> None:
        self.waited: list[tuple[Any, int]] = []

    def wait(self, window: Any, transfer: Any, end: int, cause: str) -> None:
        self.waited.append((transfer, end))


def test_each_stream_waits_for_copies_off_a_device() -> None:
    """A backward in one stream, zeroing in another: each asks for itself, until they are made."""
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    parameter.grad = torch.empty(2, device="meta")
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    state: Any = SimpleNamespace(values={}, optimizers={"optimizer": optimizer})
    gate: Any = _Waits()
    waited = gate.waited
    held = HeldGradients(state, gate)
    copies: Any = _Copies()
    window: Any = None
    held.hold(window, "optimizer", copies, 8, [(parameter, parameter.grad)], None)
    for times in (1, 2):
        held.gate("optimizer")
        assert waited == [(copies, 8)] * times
    optimizer.zero_grad(set_to_none=False)
    assert len(waited) == 3
    copies.complete = True
    held.gate("optimizer")
    assert len(waited) == 3
    assert not held.open
    held.release()


@pytest.mark.parametrize("device", ["host", "elsewhere"])
@pytest.mark.parametrize(
    ("order", "torn"),
    [
        ("write gate", True),
        ("write copied gate", True),
        ("write", True),
        ("gate write", False),
        ("gate write copied", False),
        ("copied write gate", False),
        ("copied write", False),
    ],
)
def test_a_write_is_seen_wherever_it_is_until_somebody_may_write(
    order: str, torn: bool, device: str
) -> None:
    """Of a single element, which no sample is of. Behind the gate writes come behind the copy, long
    before the lane tells that it is made; and behind that they are everybody's own business."""
    parameter = nn.Parameter(torch.empty(1000))
    gradient = torch.randn(1000) if device == "host" else elsewhere(torch.randn(1000))
    named = {"gradient/w": gradient}
    layout = Layouts().of(named)
    block = gradient.cpu().clone().view(torch.uint8)
    state: Any = SimpleNamespace(values={}, optimizers={})
    copies: Any = _Copies()
    gate: Any = _Waits()
    held = HeldGradients(state, gate)
    check = GradientCheck(named, layout, 0)
    window: Any = None
    held.hold(window, "optimizer", copies, block.numel(), [(parameter, gradient)], check)
    events = {
        "write": lambda: gradient[1:2].zero_(),
        "gate": lambda: held.gate("optimizer"),
        "copied": lambda: check.copied(block.numel()),
    }
    for event in order.split():
        events[event]()
    assert check.torn(block) == ("w" if torn else None)
    held.release()
