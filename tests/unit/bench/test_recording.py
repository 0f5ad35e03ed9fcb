"""What lanes copied when, and how busy keeper and link were: recorded, drawn, traced."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everstep.capture.lanes.batches import Batch
from everstep.capture.lanes.lane import CpuLane
from everstep.errors import UnavailableError
from everstep.options import Method
from everstep.state.values.tensors import byte_view
from everstep.testing.emulated_link import EmulatedLink
from everstep_bench.stall import run, timeline
from everstep_bench.stall.arms import CAUSES, Arm, Pending
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.figures import Block
from everstep_bench.stall.loop import Loop, Span, Step
from everstep_bench.stall.options import StallOptions
from everstep_bench.stall.ours import ours_arm
from everstep_bench.stall.recording import Copied, Copies, CpuSample, Curve, Sampler, recorded
from everstep_bench.stall.report import StallReport
from everstep_bench.stall.timeline import Event
from tests.support.stalls import ideal_of, interval_of, invoke, report_of, row_of, saved

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
    arm: Any = ours_arm(
        "lazy-thread", loop, tmp_path, Placement(free_core=True), device="cpu",
        link_bytes_per_s=None,
    )  # fmt: skip
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
    cuda: Any = ours_arm(
        "lazy", loop, tmp_path, Placement(free_core=True), device="cuda", link_bytes_per_s=None
    )
    assert cuda._seams.lane is None
    assert cuda.copies() == ()


@pytest.mark.slow
def test_parts_and_gradients_of_a_base_over_several_steps_are_told_apart(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    loop = Loop(StallOptions(params=200_000))
    arm: Any = ours_arm(
        "gockpt_o", loop, tmp_path, Placement(free_core=True), device="cpu", link_bytes_per_s=None
    )
    arm._method = Method(base="multistep", parts=3, overlap_forward=True)
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


# --- Curves -----------------------------------------------------------------------------


def curve_of(*copies: Copied, samples: tuple[CpuSample, ...] = (), end_s: float = 11.0) -> Curve:
    steps = (Step(10.0, 10.5), Step(10.5, end_s))
    return Curve("lazy", 10.0, end_s, (10.0, 10.6), steps, copies, samples)


def test_bytes_through_the_link_are_spread_over_the_time_of_their_copy() -> None:
    curve = curve_of(Copied(10.1, 10.3, 2000, False), Copied(10.3, 10.3, 500, True))
    found = curve.link_bytes_per_s(0.2)
    assert [at_s for at_s, _ in found] == pytest.approx([10.0, 10.2, 10.4, 10.6, 10.8])
    counts = [rate * 0.2 for _, rate in found]
    assert counts[0] == pytest.approx(1000)
    assert counts[1] == pytest.approx(1000, abs=501)
    assert counts[2:] == pytest.approx([0, 0, 0])
    whole = curve_of(Copied(10.05, 10.95, 9000, False))
    rates = [rate for _, rate in whole.link_bytes_per_s(0.1)]
    assert sum(rates) * 0.1 == pytest.approx(9000)
    assert max(rates) == pytest.approx(10_000)


def test_cores_are_processor_time_by_time() -> None:
    samples = tuple(CpuSample(10 + 0.1 * n, 5 + 0.05 * max(0, n - 5)) for n in range(11))
    found = curve_of(samples=samples).cores(0.1 - 1e-9)
    assert [cores for _, cores in found] == pytest.approx([0.0] * 5 + [0.5] * 5)
    coarse = curve_of(samples=samples).cores(0.5 - 1e-9)
    assert coarse == [(10.0, pytest.approx(0.0)), (pytest.approx(10.5), pytest.approx(0.5))]


def test_the_sampler_counts_the_time_of_processes() -> None:
    with Sampler([os.getpid()]) as sampler:
        busy_until_s = time.process_time() + 0.05
        while time.process_time() < busy_until_s:
            pass
    first, last = sampler.samples[0], sampler.samples[-1]
    assert last.cpu_s - first.cpu_s >= 0.05
    assert [s.at_s for s in sampler.samples] == sorted(s.at_s for s in sampler.samples)
    assert not any(thread.name == "bench-sampler" for thread in threading.enumerate())


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

    def copies(self) -> tuple[Copied, ...]:
        return (Copied(1.0, 2.0, 3, False),)

    def clean(self) -> None:
        self.told.append("clean")


def bench_of(**options: Any) -> Any:
    loop = SimpleNamespace(step=lambda: Step(time.monotonic(), time.monotonic()))
    placement = SimpleNamespace(spread=lambda one_core=False: None)
    display = SimpleNamespace(begin=lambda what, total: None, advance=lambda what: None)
    return run._Bench(StallOptions(**options), loop, placement, None, display)  # type: ignore[arg-type]


def test_a_recording_has_some_saves_one_behind_the_other() -> None:
    told: list[str] = []
    arm, peer = Saving(told), Saving(told)
    peer.role = "peer"
    opened = [run._Opened(arm), run._Opened(peer), run._Opened(Saving(told), error="broken")]
    (curve,) = bench_of().curves(opened, 3)
    assert told == ["prepare", *["save", "step", "step", "step"] * 3, "clean"]
    assert len(curve.saves_s) == 3
    assert len(curve.steps) == 9
    assert curve.begin_s <= curve.saves_s[0] <= curve.saves_s[2] <= curve.end_s
    assert curve.copies == arm.copies()
    assert len(curve.samples) >= 2


def test_what_is_captured_within_steps_counts_once() -> None:
    """An arm that copies in its hooks: what it counts there is no part of its calls."""
    arm = Saving([])
    arm.captures_in_steps = True

    def step() -> Step:
        begin_s = time.monotonic()
        arm._stalls["capture"] += 0.5
        arm._stalls["gradients"] += 0.25
        return Step(begin_s, time.monotonic())

    bench = bench_of()
    bench._loop = SimpleNamespace(step=step)
    arm.save()
    _, after_s, within_s = bench._steps(arm, 2, arm.pending)
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


def recorded_report(**options: Any) -> StallReport:
    report = report_of(
        interval_of([ideal_of(1.0)], row_of("lazy", "ours", saved(0.001))), **options
    )
    samples = tuple(CpuSample(10 + 0.1 * n, 0.05 * n) for n in range(11))
    report.curves = [curve_of(Copied(10.1, 10.3, 2000, False), samples=samples)]
    return report


def test_curves_are_in_the_trace_and_in_plain_data(tmp_path: Path) -> None:
    report = recorded_report(curves=True)
    timeline.trace(report, tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    counters = [event for event in found if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"link GB/s", "keeper cores"}
    (pid,) = {
        e["pid"] for e in found if e["name"] == "process_name" and e["args"]["name"] == "lazy"
    }
    assert {event["pid"] for event in counters} == {pid}
    (curve,) = report.as_json()["curves"]
    assert curve["copies"] == [
        {"begin_s": 10.1, "end_s": 10.3, "size_bytes": 2000, "gradients": False}
    ]
    assert len(curve["keeper_cpu"]) == 11


def test_the_picture_of_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "c.png"
    timeline.curves(recorded_report(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    empty = report_of(interval_of([ideal_of(1.0)]))
    with pytest.raises(UnavailableError, match="nothing to draw"):
        timeline.curves(empty, tmp_path / "no.png")


def test_curves_are_recorded_where_somebody_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[StallOptions] = []

    def measure(options: StallOptions, display: Any) -> StallReport:
        asked.append(options)
        return recorded_report()

    monkeypatch.setattr(run, "run_stall", measure)
    assert invoke("stall").exit_code == 0
    assert invoke("stall", "--json").exit_code == 0
    assert invoke("stall", "--trace", str(tmp_path / "t.json")).exit_code == 0
    assert [options.curves for options in asked] == [False, True, True]
    assert invoke("stall", "--curves", str(tmp_path / "no" / "c.png")).exit_code in (2, 4)
