"""Into how many parts a base is cut, from what was measured (GoCkpt 4.2.3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.plan.multistep import Overlap, Pipeline, best_cut, fewest
from everstep.seams import ManualClock
from everstep.trainer.multistep.measurements import MultistepBase, MultistepStats, StepTimes
from everstep.trainer.multistep.partition import Unit, cut_by_cost, modelled_overlap
from tests.support.multistep.measured import Bench

STATE_BYTES = 48 * 42 * 10_000


def best_parts(given: Pipeline, held: int | None) -> Overlap:
    """The best number of parts, up to 24."""
    found = [best_cut(given, parts, held).overlap for parts in range(1, 25)]
    return found[fewest([one.lost_s for one in found]) - 1]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("copy_s", [0.5, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("ratio", [2 / 14, 4 / 12])
@pytest.mark.parametrize("update_s", [0.0, 0.2])
def test_as_many_as_the_model_says(
    waits: bool, copy_s: float, ratio: float, update_s: float
) -> None:
    link = STATE_BYTES / copy_s
    bench = Bench(update_s=update_s, link=link)
    assert bench.stats.link_bytes_per_s == pytest.approx(link)
    pipeline = Pipeline(copy_s, copy_s * ratio, 1 - update_s, 0.0, update_s, behind_update=True)
    found = bench.parts(STATE_BYTES, round(STATE_BYTES * ratio), waits=waits)
    assert found == best_parts(pipeline, None if waits else 1).parts


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("copy_s", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("ratio", [2 / 14, 4 / 12])
def test_parameters_are_captured_whole(waits: bool, copy_s: float, ratio: float) -> None:
    """Where parts that fill their windows do not come out in whole ones, others may hold
    training up for less."""
    size_bytes, part_s, held_steps = STATE_BYTES // 48, 0.02, 8
    units = [Unit("o", str(n), (), size_bytes, round(size_bytes * ratio)) for n in range(48)]
    bench = Bench(update_s=0.03, link=STATE_BYTES / copy_s, held_steps=held_steps)
    bench.stats.bases += [MultistepBase(0, 9, 9 * part_s, 0.0, 0.0, 1, 1, 9.0)] * 2
    held = None if waits else held_steps
    pipeline = Pipeline(copy_s, copy_s * ratio, 0.97, 0.0, 0.03, part_s, behind_update=True)
    whole = [
        modelled_overlap(cut_by_cost(units, pipeline, n, held), pipeline, held)
        for n in range(1, 25)
    ]
    anywhere = best_parts(pipeline, held).parts
    found = len(bench.cut(units, waits=waits))
    assert found == fewest([cost.lost_s for cost in whole])
    assert waits or (found > anywhere) == (copy_s == 8.0)


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_paid_once_is_not_held_against_parts(waits: bool) -> None:
    """The first base is planned while training waits, and so is the first one that is cut anew."""
    bench = Bench(link=48e6 / 4)

    def parts() -> int:
        return bench.parts(48_000_000, 16_000_000, waits=waits)

    def taken(count: int, begin_s: float) -> None:
        base = MultistepBase(0, count, begin_s, 0.0, 0.0, 48_000_000, 16_000_000, 10.0)
        bench.stats.bases.append(base)

    best = parts()
    assert best > 1
    taken(1, 1.0)  # a lazy one, until the link is known
    assert parts() == best
    taken(best, best * 0.5)  # the first in so many parts
    assert parts() == best
    taken(best, best * 0.4)  # that is what each of them costs
    assert parts() < best
    taken(best - 1, 10.0)
    assert bench.stats.part_s == pytest.approx(0.4)
    taken(best, best * 1e-6)
    assert parts() == best
    assert bench.stats.report().part_s == bench.stats.part_s


@pytest.mark.parametrize("beside_s", [0.01, 0.05])
def test_windows_are_as_long_as_they_are_beside_copies(beside_s: float) -> None:
    """The link uses what they are longer by. Here it copies 4.02 s in a step less."""
    quiet, beside = (Bench(update_s=0.01, link=STATE_BYTES / 4.02, held_steps=8) for _ in range(2))
    for bench in (quiet, beside):
        base = MultistepBase(0, 4, 4 * 0.004, 0.0, 0.0, 1, 1, 9.0)
        bench.stats.bases += [base] * 2
    for number in range(4):
        assert beside.parts(STATE_BYTES, 0, waits=False) == 5, f"{number} say too little"
        beside.clock.advance(0.99 + beside_s)
        beside.choice.steps.gated(0.0, quiet=False)
        beside.clock.advance(0.01)
        beside.choice.steps.marked(0.0)
    assert quiet.parts(STATE_BYTES, 0, waits=False) == 5
    lengths = beside.choice.steps.known()
    assert lengths == pytest.approx((0.99, 0.99 + beside_s, 0.01))
    few = 5 if beside_s < 0.02 else 4
    assert beside.parts(STATE_BYTES, 0, waits=False) == few
    pipeline = Pipeline(4.02, 0.0, 0.99 + beside_s, 0.0, 0.01, 0.004, behind_update=True)
    assert few == best_parts(pipeline, 8).parts


def test_steps_become_others_and_are_no_longer_by_as_much() -> None:
    """What is copied beside is remembered for as long as it takes to the next base."""
    clock = ManualClock()
    steps = StepTimes(clock)

    def step(immutable_s: float, *, quiet: bool) -> None:
        steps.marked(0.0)
        clock.advance(immutable_s)
        steps.gated(0.0, quiet=quiet)
        clock.advance(0.01)

    for quiet in [True] * 8 + [False] * 6:
        step(0.1 if quiet else 0.11, quiet=quiet)
    assert steps.known() == pytest.approx((0.1, 0.11, 0.01))
    for _ in range(40):
        step(0.4, quiet=True)
    assert steps.known() == pytest.approx((0.4, 0.41, 0.01))
    for _ in range(100):  # one base behind the other, from now on, of shorter steps
        step(0.2, quiet=False)
    assert steps.known() == pytest.approx((0.2, 0.2, 0.01))
    for _ in range(20):
        step(0.3, quiet=True)
    assert steps.known() == pytest.approx((0.3, 0.3, 0.01))


def test_steps_that_are_all_beside_copies() -> None:
    clock = ManualClock()
    steps = StepTimes(clock)
    for _ in range(4):
        ran(Device(), clock, steps, quiet=False)
    assert steps.known() == pytest.approx((0.2, 0.2, 0.3))


def test_what_each_part_costs_training_counts_too() -> None:
    """Many parts that save next to nothing are not worth it."""
    bench = Bench(link=48e6 / 4)
    assert bench.stats.part_s is None
    assert bench.stats.report().part_s is None
    assert bench.parts(48_000_000, 16_000_000, waits=False) > 8
    for step in range(4):
        base = MultistepBase(step, 10, 1.0, 0.0, 0.0, 48_000_000, 16_000_000, 10.0)
        bench.stats.bases.append(base)
    assert bench.stats.part_s == pytest.approx(0.1)
    pipeline = Pipeline(4.0, 4 / 3, 1.0, 0.0, 0.0, part_s=0.1, behind_update=True)
    lost = [best_cut(pipeline, parts, 1).overlap.lost_s for parts in range(1, 25)]
    assert bench.parts(48_000_000, 16_000_000, waits=False) == fewest(lost) < 8


def test_one_base_on_a_busy_machine_says_little() -> None:
    stats = MultistepStats(ManualClock(), {})
    for begin_s in (9.0, 0.10, 0.12, 5.0, 0.11, 0.10):
        stats.bases.append(MultistepBase(0, 10, begin_s, 0.0, 0.0, 1, 1, 10.0))
    assert stats.part_s == pytest.approx(0.011)


def test_until_the_link_is_known_a_base_is_lazy() -> None:
    assert Bench().parts(48_000_000, 4_800_000) == 1
    assert Bench(parts=5).parts(48_000_000, 4_800_000) == 5


def test_a_base_is_lazy_where_gradients_are_as_large_as_the_state() -> None:
    """They would take the link as long as what they bring forward."""
    for copy_s in (4, 40):
        bench = Bench(link=48e6 / copy_s)
        for waits in (True, False):
            assert bench.parts(48_000_000, 48_000_000, waits=waits) == 1
            assert bench.parts(48_000_000, 16_000_000, waits=waits) > 1


def test_it_ends_before_the_next_is_due() -> None:
    assert Bench(link=48e6 / 4).parts(48_000_000, 4_800_000, waits=False) == 5
    assert Bench(link=48e6 / 4, every=3).parts(48_000_000, 4_800_000, waits=False) == 3


def test_what_is_held_is_copied_before_the_next_is_due() -> None:
    """Otherwise the next base waits for what the one before has left."""
    copy_s, gradients_s, held_steps = 8.0, 8 / 3, 8
    pipeline = Pipeline(copy_s, gradients_s, 1.0, 0.0, 0.0, behind_update=True)

    def best(every: int) -> tuple[float, float, int]:
        found = [best_cut(pipeline, parts, held_steps).overlap for parts in range(1, every + 1)]
        late_s = [max(0.0, one.whole_s - every - one.stall_s) for one in found]
        lost_s = [one.stall_s + late for one, late in zip(found, late_s, strict=True)]
        parts = fewest(lost_s)
        return found[parts - 1].stall_s, late_s[parts - 1], parts

    for every in (10, 14, 100):
        bench = Bench(link=48e6 / copy_s, every=every, held_steps=held_steps)
        found = bench.parts(48_000_000, 16_000_000, waits=False)
        assert found == best(every)[2], every
    assert best(100)[:2] == (0.0, 0.0)
    assert best(10)[2] < best(14)[2] < best(100)[2]


def test_no_more_than_memory_holds() -> None:
    bench = Bench(link=48e6 / 4)
    arena = 48_000_000 + 2 * 4_800_000
    assert bench.parts(48_000_000, 4_800_000, waits=False) == 5
    assert bench.parts(48_000_000, 4_800_000, waits=False, arena=arena) == 5
    assert bench.parts(48_000_000, 4_800_000, waits=False, arena=arena - 2_400_000) == 4
    assert bench.parts(48_000_000, 4_800_000, waits=False, arena=48_000_000) == 1
    given = Bench(parts=9)
    with pytest.warns(RuntimeWarning, match="needs 67200000 bytes .* it is cut into 5"):
        assert given.parts(48_000_000, 4_800_000, arena=arena) == 5
    assert given.parts(48_000_000, 4_800_000, arena=arena) == 5  # said once


def test_where_gradients_did_not_fit_fewer_parts_are_tried() -> None:
    bench = Bench(parts=8)
    bench.stats.parts = 8
    bench.choice.too_large()
    assert bench.parts(48_000_000, 4_800_000) == 4


def test_what_training_waited_for_is_no_part_of_a_step() -> None:
    bench = Bench(link=48e6 / 4)
    before = bench.parts(48_000_000, 4_800_000)
    for stalled in range(1, 33):
        bench.clock.advance(1.0)
        bench.choice.steps.gated(9.0 * (stalled - 1), quiet=True)
        bench.clock.advance(9.0)  # at the gate
        bench.choice.steps.marked(9.0 * stalled)
    assert bench.parts(48_000_000, 4_800_000) == before


def test_small_copies_that_are_held_up_do_not_make_the_link_slow() -> None:
    """Beside an update, whose thread takes turns with the one that copies: parts that are cut for a
    slower link than there is are waited for."""
    bench = Bench()
    for part_bytes, gradient_bytes in ((16 << 20, 4 << 20), (16 << 20, 12 << 20)):
        for size_bytes, slower in ((part_bytes, 1.0), (gradient_bytes, 2.5)):
            timed = bench.choice.timed(size_bytes)
            bench.clock.advance(slower * size_bytes / 3e8)
            timed.ended()
    assert bench.stats.link_bytes_per_s == pytest.approx(3e8)


def test_a_first_base_that_was_slow_is_not_believed_for_long() -> None:
    """A base of which most copies share the link has one that says something about it."""
    bench = Bench()
    for size_bytes, link in ((48 << 20, 2e8), (7 << 20, 3e8)):
        timed = bench.choice.timed(size_bytes)
        bench.clock.advance(size_bytes / link)
        timed.ended()
        assert bench.stats.link_bytes_per_s == pytest.approx(link)


# --- Where a device computes ------------------------------------------------------------------


class Device:
    """What it is given takes its time; the host only asks for it."""

    def __init__(self) -> None:
        self.given_s = self.passed_s = 0.0

    def moment(self) -> Moment:
        return Moment(self, self.given_s)


class Moment:
    def __init__(self, device: Device, at_s: float) -> None:
        self.device, self.at_s = device, at_s

    def query(self) -> bool:
        return self.device.passed_s >= self.at_s

    def elapsed_time(self, other: Moment) -> float:
        assert self.query()
        assert other.query()
        return 1e3 * (other.at_s - self.at_s)


def ran(device: Device, clock: ManualClock, steps: StepTimes, *, quiet: bool) -> None:
    """A step: 0.9 s and 0.1 s on the device, 0.2 s and 0.3 s of asking for it; what is captured
    holds the device up for 5 s more."""
    steps.marked(0.0)
    device.given_s += 0.9
    clock.advance(0.2)
    steps.gated(0.0, quiet=quiet)
    device.given_s += 0.1 if quiet else 5.1
    clock.advance(0.3)


def test_steps_of_a_device_are_as_long_as_it_says() -> None:
    device, clock = Device(), ManualClock()
    steps = StepTimes(clock, device.moment)
    for _ in range(4):
        ran(device, clock, steps, quiet=True)
    assert steps.known() == pytest.approx((0.2, 0.2, 0.3)), "it has not come so far"
    device.passed_s = 2.0
    ran(device, clock, steps, quiet=True)
    assert steps.known() == pytest.approx((0.9, 0.9, 0.1))
    for _ in range(40):
        ran(device, clock, steps, quiet=False)
        device.passed_s = device.given_s
    ran(device, clock, steps, quiet=True)
    assert steps.known() == pytest.approx((0.9, 0.9, 0.1)), "it waits while something is captured"


def test_a_device_is_asked_at_few_marks_once_it_is_known() -> None:
    """Each time takes the training thread as long as all else that it does at a mark."""
    device, clock, asked = Device(), ManualClock(), []

    def moment() -> Any:
        asked.append(clock.monotonic_s())
        return device.moment()

    steps = StepTimes(clock, moment)
    for _ in range(40):
        ran(device, clock, steps, quiet=True)
        device.passed_s = device.given_s
    asked.clear()
    for _ in range(70):
        ran(device, clock, steps, quiet=True)
        device.passed_s = device.given_s
    assert len(asked) == 30, "a mark, an update and the next mark, of every seventh step"
    assert steps.known() == pytest.approx((0.9, 0.9, 0.1))
    for _ in range(7 * 20):
        ran(device, clock, steps, quiet=True)
        device.given_s += 1.0  # it takes longer from now on
        device.passed_s = device.given_s
    assert steps.known() == pytest.approx((0.9, 0.9, 1.1))


def test_a_model_that_leaves_its_device() -> None:
    device, clock, here = Device(), ManualClock(), [True]
    steps = StepTimes(clock, lambda: device.moment() if here else None)
    for _ in range(4):
        ran(device, clock, steps, quiet=True)
        device.passed_s = device.given_s
    steps.marked(0.0)
    assert steps.known() == pytest.approx((0.9, 0.9, 0.1))
    here.clear()
    for _ in range(4):
        ran(device, clock, steps, quiet=True)
    assert steps.known() == pytest.approx((0.2, 0.2, 0.3))


def test_a_step_that_is_not_captured_from_its_middle_on_is_not_measured() -> None:
    """The update before asked for a copy; a mark without an update behind it tells nothing."""
    device, clock = Device(), ManualClock()
    steps = StepTimes(clock, device.moment)
    steps.marked(0.0)
    steps.marked(0.0)
    device.passed_s = 1.0
    steps.marked(0.0)
    assert steps.known() is None


@pytest.mark.slow
def test_only_steps_in_which_nothing_is_copied_are_quiet(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a base are copied in the two steps behind the mark at which it was due."""
    told: list[bool] = []
    gated = StepTimes.gated

    def noted(self: StepTimes, stall_s: float, *, quiet: bool) -> None:
        told.append(quiet)
        gated(self, stall_s, quiet=quiet)

    monkeypatch.setattr(StepTimes, "gated", noted)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    method = everstep.Method(base="multistep", parts=3, overlap_forward=True)
    quiet: dict[int, bool] = {}
    with everstep.Checkpointer(run_folder, state, method=method, every=6) as ckpt:
        ckpt.resume()
        for step in range(1, 12):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            told.clear()
            optimizer.step()
            quiet[step] = told[0]
            ckpt.step()
            if step == 9:
                ckpt.wait()
    assert [step for step in range(1, 9) if not quiet[step]] == [7, 8]
    assert quiet[11], "all of it has been copied"
