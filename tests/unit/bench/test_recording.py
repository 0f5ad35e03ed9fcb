"""Recording of the copies that lanes make, and the picture of a save."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everstep.capture.batches import Batch
from everstep.capture.lane import CpuLane
from everstep.options import Method
from everstep.state.values.tensors import byte_view
from everstep.testing.emulated_link import EmulatedLink
from everstep_bench.harness.loop import Loop, Span, Step
from everstep_bench.harness.placement import Placement
from everstep_bench.options import StallOptions
from everstep_bench.stall import run, timeline
from everstep_bench.stall.arms import CAUSES, Arm, Copied, Copies, Pending, recorded
from everstep_bench.stall.figures import Block
from everstep_bench.stall.ours import Ours
from everstep_bench.stall.timeline import Event
from tests.support.stalls import session_of

TIMEOUT_S = 60.0


# --- Copies -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CpuLane, EmulatedLink])
def test_copies_are_written_down_apart_for_state_and_gradients(kind: Any) -> None:
    state, gradient = torch.ones(1000), torch.ones(500)
    copies = Copies()
    copies.begin([state])
    arguments = (1e9,) if kind is EmulatedLink else ()
    lane: Any = recorded(kind, copies, *arguments)()
    assert isinstance(lane, kind)
    block = torch.zeros(8000, dtype=torch.uint8)
    begin_s = time.monotonic()
    try:
        lane.copy_now([Batch(0, 2000, (byte_view(gradient),))], block)  # a mark: no gradient
        several = [
            Batch(2000, 4000, (byte_view(state)[:2000],)),
            Batch(4000, 6000, (byte_view(gradient),)),
            Batch(6000, 8000, (), gradient),
        ]
        assert lane.submit(several, block, lambda end: None).wait(TIMEOUT_S)
        lane.run(lambda: None).result(TIMEOUT_S)
    finally:
        lane.close()
    assert bool((block.view(torch.float32) == 1).all())  # and they are copied
    found = copies.found()
    assert [(copy.size_bytes, copy.gradients) for copy in found] == [
        (2000, False),
        (2000, False),
        (2000, True),
        (2000, True),
    ]
    for copy in found:
        assert begin_s <= copy.begin_s <= copy.end_s <= time.monotonic()
    copies.begin([state])
    assert copies.found() == ()


def test_our_arms_tell_what_they_copied(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    loop = Loop(StallOptions(params=200_000))
    arm: Any = Ours("lazy", loop, tmp_path, Placement(free_core=True), StallOptions())
    try:
        arm.open()
        arm.prepare()
        pending = arm.save()
        arm.settle(pending)
        found = arm.copies()
    finally:
        arm.close()
        os.sched_setaffinity(0, before)
    assert not any(copy.gradients for copy in found)
    assert sum(copy.size_bytes for copy in found) >= loop.size_bytes
    options = StallOptions(device="cuda")  # the engine's own lane does not tell
    assert Ours("lazy", loop, tmp_path, Placement(free_core=True), options).copies() == ()


@pytest.mark.slow
def test_parts_and_gradients_of_a_base_over_several_steps_are_told_apart(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    loop = Loop(StallOptions(params=200_000))
    arm: Any = Ours("gockpt_o", loop, tmp_path, Placement(free_core=True), StallOptions())
    arm.method = Method(base="multistep", parts=3, overlap_forward=True)
    try:
        arm.open()
        loop.step()
        arm.prepare()
        pending = arm.save()
        while not pending.over:
            loop.step()
            arm.after_step()
        arm.settle(pending)
        found = arm.copies()
    finally:
        arm.close()
        os.sched_setaffinity(0, before)
    state_bytes = sum(copy.size_bytes for copy in found if not copy.gradients)
    gradient_bytes = sum(copy.size_bytes for copy in found if copy.gradients)
    assert state_bytes >= loop.size_bytes
    # Those of one part, then of two: about one third, and two.
    assert gradient_bytes == pytest.approx(loop.gradient_bytes, rel=0.35)


# --- Blocks -----------------------------------------------------------------------------


class Saving(Arm):
    """Saves that are done with the second step."""

    role = "ours"

    def __init__(self, told: list[str]) -> None:
        super().__init__("lazy", "")
        self.told = told
        self.pending: Pending | None = None
        self.left = 0

    def prepare(self) -> None:
        self.told.append("prepare")

    def save(self) -> Pending:
        self.told.append("save")
        self.pending, self.left = Pending(), 2
        return self.pending

    def after_step(self) -> None:
        self.told.append("step")
        self.left -= 1
        if not self.left and self.pending is not None:
            self.pending.finish()

    def held_up(self, **seconds: float) -> None:
        for cause, held_s in seconds.items():
            self._stalls[cause] += held_s

    def copies(self) -> tuple[Copied, ...]:
        return (Copied(1.0, 2.0, 3, False),)

    def clean(self) -> None:
        self.told.append("clean")


def test_what_is_captured_within_steps_counts_once() -> None:
    """An arm that copies in its hooks: what it counts there is no part of its calls."""
    arm = Saving([])
    arm.captures_in_steps = True

    def step() -> Step:
        begin_s = time.monotonic()
        arm.held_up(capture=0.5, gradients=0.25)
        return Step(begin_s, time.monotonic())

    loop: Any = SimpleNamespace(step=step)
    arm.save()
    bench = run.Bench(session_of(StallOptions()), loop)
    _, after_s, within_s = bench.steps(arm, 2, arm.pending)
    assert within_s == pytest.approx(2 * 0.75)
    assert after_s < 0.5
    block = Block(
        0.0, 1.0, 9.0, (), calls_s=1.2, within_s=1.5,
        causes=dict.fromkeys(CAUSES, 0.0) | {"capture": 2.0, "gradients": 0.5},
    )  # fmt: skip
    assert block.stall_s == pytest.approx(2.7)
    assert block.other_s == pytest.approx(0.2)  # of 1.2 in calls, 1.0 is capture


# --- The timeline -----------------------------------------------------------------------


def test_phases_of_a_step_and_the_waits_between_them() -> None:
    step = Step(10.0, 12.0, Span(10.9, 11.2), 10.3, Span(11.5, 11.8))
    block = Block(10.0, 10.0, 12.0, (step,))
    assert list(timeline.events(block)) == [
        Event("compute", "step 1, forward", 10.0, 10.3),
        Event("compute", "step 1, backward", 10.3, 10.9),
        Event("waits", "gate", 10.9, 11.2),
        Event("compute", "step 1, update", 11.2, 11.5),
        Event("waits", "gradients", 11.5, 11.8),
        Event("compute", "step 1, update", 11.8, 12.0),
    ]
    quick = Step(10.0, 12.0, Span(10.9, 10.9), 10.3, Span(11.5, 11.5))
    assert list(timeline.events(Block(10.0, 10.0, 12.0, (quick,)))) == [
        Event("compute", "step 1, forward", 10.0, 10.3),
        Event("compute", "step 1, backward", 10.3, 10.9),
        Event("compute", "step 1, update", 10.9, 12.0),
    ]


def test_copies_of_a_step_are_one_part_and_gradients_another() -> None:
    steps = (Step(10.1, 11.0), Step(11.2, 12.0))
    copies = (
        Copied(10.1, 10.4, 100, False),
        Copied(10.4, 10.6, 100, False),
        Copied(10.8, 10.9, 50, True),
        Copied(11.2, 11.5, 100, False),
    )
    block = Block(10.0, 10.1, 12.0, steps, done_s=12.0, persist_s=0.1, copies=copies)
    found = [event for event in timeline.events(block) if event.lane != "compute"]
    assert found == [
        Event("waits", "save()", 10.0, 10.1),
        Event("waits", "step()", 11.0, 11.2),
        Event("state", "state, step 1", 10.1, 10.6),
        Event("state", "state, step 2", 11.2, 11.5),
        Event("gradients", "gradients, step 1", 10.8, 10.9),
        Event("write", "write", 11.9, 12.0),
    ]


def test_real_steps_tell_their_phases() -> None:
    loop = Loop(StallOptions(params=200_000))
    loop.watch_hooks()
    step = loop.step()
    assert step.forward_end_s is not None
    assert step.hooks is not None
    assert step.applied is not None
    times = [step.begin_s, step.forward_end_s, *step.hooks, *step.applied, step.end_s]
    assert times == sorted(times)
