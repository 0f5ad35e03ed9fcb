"""Captures of every step by a plan (``method="checkflow"``): each is the state of its own step, to
the bit, however the loop goes and however slow the link is; those that are due become durable, of
the others the newest whole one is what a killed process comes back to."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.dispatch import Dispatch, Unit, UnitCopy
from everstep.capture.lane import Lane
from everstep.capture.spot_check import SpotCheck
from everstep.errors import AuditError, EverstepError, KeeperError, OptionError, OutOfSpaceError
from everstep.link.save import Save
from everstep.options import Budget, Method, presets
from everstep.plan.schedule import StepPlan, plan_departures
from everstep.seams import ManualClock, Seams, failpoints
from everstep.testing import inspect
from everstep.testing.emulated_link import EmulatedLink
from everstep.trainer.attach.keeper import Service
from everstep.trainer.participant import BaseRequest
from everstep.trainer.schedule import scheduler as scheduled
from everstep.trainer.schedule.saver import ScheduledSaver
from everstep.trainer.schedule.scheduler import all_at_mark
from tests.support.lanes import HeldLane, gives_up_soon, held
from tests.support.lost_keepers import cut
from tests.support.scheduled import OVERFLOWS, Loop
from tests.support.serving import Bench, die, serving
from tests.support.world import TIMEOUT_S, Gate, forget, inventory_of

__all__ = ["held"]  # a fixture

SLOW = 30e6  # bytes per second: a step's copies take as long as the step


KINDS = [
    "plain",
    "foreach",
    "fused",
    "inside",
    "several",
    "accumulates",
    "evaluates",
    "frozen",
    "skips",
    "wanders",
    "zeroes",
    "scaled",
    "scaled clipped",
    "scaled fused",
]


@contextmanager
def checkpointer(
    path: Path,
    state: dict[str, Any],
    *,
    lane: Callable[[], Lane] | None = None,
    **options: Any,
) -> Iterator[everstep.Checkpointer]:
    """One with a keeper in a thread: it holds nothing, but what is due goes all the way."""
    options = {"every": 1, "method": "checkflow", "keep": 100} | options
    seams = Seams(clock=ManualClock(), lane=lane)
    with everstep.Checkpointer(path, state, seams=seams, **options) as ckpt:
        yield ckpt


def restored(run: Path, kind: str, step: int | None = None) -> Any:
    loop = Loop(kind, seed=99)
    if kind == "frozen" and (step is None or step >= 4):
        next(loop.model.parameters()).requires_grad_(True)
    with checkpointer(run, loop.state, every=None) as ckpt:
        ckpt.resume(step)
    return loop.snapshot()


def stats_of(ckpt: everstep.Checkpointer) -> Any:
    schedule = ckpt.stats().schedule
    assert schedule is not None
    return schedule


# --- Every capture is the state of its step ---------------------------------------------


@pytest.mark.thinned(18)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_torn(kind: str, run_folder: Path) -> None:
    """A link so slow that updates wait and copies are late, and every step is restored."""
    loop, snapshots = Loop(kind), {}
    with checkpointer(run_folder, loop.state, lane=lambda: EmulatedLink(SLOW)) as ckpt:
        for step in range(1, 13):
            loop.train(step)
            snapshots[step] = loop.snapshot()
            ckpt.step()
        ckpt.wait()
        schedule = stats_of(ckpt)
        assert ckpt.stats().committed == 12
        assert schedule.plans >= 1
        assert schedule.followed_steps > 0
    other = Loop(kind, seed=99)
    if kind == "frozen":
        next(other.model.parameters()).requires_grad_(True)
    with checkpointer(run_folder, other.state, every=None) as ckpt:
        for step in range(12, 3, -1):
            ckpt.resume(step)
            assert other.snapshot() == snapshots[step], step


def all_late(seconds: Any, leaving: Any, link: float, **options: Any) -> StepPlan:
    """A plan that duplicates everything, unless there is no memory for that."""
    plan = plan_departures(seconds, leaving, link, **options)
    if not options.get("duplicates", True):
        return plan
    last = len(seconds) - 1
    late = [dataclasses.replace(one, event=last, duplicated=True) for one in plan.departures]
    return dataclasses.replace(
        plan, departures=tuple(late), duplicated_bytes=sum(one.chunk.size_bytes for one in late)
    )


@pytest.mark.parametrize("memory", [True, False])
def test_updates_wait_only_without_memory_for_duplicates(
    memory: bool, run_folder: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Then the next plan has none; every capture is right before and after."""
    monkeypatch.setattr(scheduled, "plan_departures", all_late)
    if not memory:
        monkeypatch.setattr(UnitCopy, "make_duplicate", lambda self: False)
    loop, snapshots = Loop("inside"), {}
    with checkpointer(run_folder, loop.state) as ckpt:
        for step in range(1, 13):
            loop.train(step)
            snapshots[step] = loop.snapshot()
            ckpt.step()
        ckpt.wait()
        assert (stats_of(ckpt).duplicated_bytes > 0) == memory
    assert ("no memory for duplicates" in capfd.readouterr().err) != memory
    for step in (4, 8, 12):
        assert restored(run_folder, "inside", step) == snapshots[step]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["scaled", "scaled fused"])
def test_a_step_that_updates_nothing(kind: str, run_folder: Path) -> None:
    """It is captured like any other; an optimizer that is not called lets the step stray."""
    loop, snapshots, strays = Loop(kind), {}, {}
    with checkpointer(run_folder, loop.state, lane=lambda: EmulatedLink(SLOW)) as ckpt:
        for step in range(1, 13):
            loop.train(step)
            snapshots[step] = loop.snapshot()
            ckpt.step()
            inspect(ckpt).saver.finish_captures()
            strays[step] = stats_of(ckpt).strayed_steps
    called = kind == "scaled fused"  # whose kernel looks at the gradients itself
    assert (strays[5] == strays[4]) == called
    scales = [snapshots[step]["scaler"]["scale"] for step in (4, 5, 9, 10)]
    assert scales == [("float", scale) for scale in (16.0, 8.0, 8.0, 4.0)]
    parameter = "0.weight"
    for step in OVERFLOWS:
        before, after = snapshots[step - 1], snapshots[step]
        assert after["model"][parameter] == before["model"][parameter]
        assert after["model"]["1.running_mean"] != before["model"]["1.running_mean"]
        assert restored(run_folder, kind, step) == after


def test_the_update_waits_for_the_copy(held: Gate, run_folder: Path) -> None:
    loop = Loop()
    with checkpointer(run_folder, loop.state, lane=HeldLane) as ckpt:
        saved = loop.snapshot()
        ckpt.step()
        loop.backward(1)
        updated = threading.Event()

        def update() -> None:
            loop.optimizers["optimizer"].step()
            updated.set()

        thread = threading.Thread(target=update)
        thread.start()
        assert held.reached.wait(TIMEOUT_S)
        assert not updated.wait(0.05), "the update did not wait"
        held.open()
        thread.join(TIMEOUT_S)
        assert updated.is_set()
        ckpt.wait()
    assert restored(run_folder, "plain", 1)["model"] == saved["model"]


@pytest.mark.parametrize("checked", [True, False], ids=["spot check", "no spot check"])
def test_without_the_gate_it_is_torn(
    checked: bool, held: Gate, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dispatch, "admit", lambda *_: True)
    if not checked:
        monkeypatch.setattr(SpotCheck, "differing", lambda *_: None)
    loop = Loop()
    with checkpointer(run_folder, loop.state, lane=HeldLane, every=None, on_failure="warn") as ckpt:
        ckpt.step()
        saved = loop.snapshot()
        save = ckpt.save()
        loop.train(2)
        inspect(ckpt).saver.scheduler.flush()
        held.open()
        error = save.durable.exception(TIMEOUT_S)
        if checked:
            assert isinstance(error, AuditError)
            with pytest.warns(RuntimeWarning, match="was changed while it was being copied"):
                ckpt.wait()
        else:
            assert error is None
    if not checked:
        assert restored(run_folder, "plain", 1)["model"] != saved["model"], "this cannot fail"


def test_a_copy_that_hangs_does_not_hang_training(
    held: Gate, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: the capture is lost, training is not, and the next one is right."""
    loop = Loop()
    options: dict[str, Any] = {"progress_timeout_s": TIMEOUT_S, "on_failure": "warn"}
    with checkpointer(run_folder, loop.state, lane=HeldLane, **options) as ckpt:
        ckpt.step()
        save = ckpt.save()
        with monkeypatch.context() as impatient:
            gives_up_soon(impatient, TIMEOUT_S)
            loop.train(2)
        held.open()
        assert save.durable.exception(TIMEOUT_S) is not None
        with pytest.warns(RuntimeWarning):
            ckpt.wait()
        ckpt.step()
        saved = loop.snapshot()
        ckpt.wait()
    assert restored(run_folder, "plain", 2) == saved


def test_a_capture_that_never_began_copies_nothing(run_folder: Path) -> None:
    """Its room is given to the next one."""
    loop, snapshots = Loop(), {}
    with checkpointer(run_folder, loop.state, on_failure="warn") as ckpt:
        for step in range(1, 9):
            loop.train(step)
            snapshots[step] = loop.snapshot()
            if step == 5:
                failpoints.arm("capture.before_mark", "raise")
                ckpt.step()
                with pytest.warns(RuntimeWarning, match="internal error"):
                    ckpt.wait()
                failpoints.disarm_all()
                assert all(one.complete for one in inspect(ckpt).saver.scheduler.open)
                assert stats_of(ckpt).captures == 4
            else:
                ckpt.step()
    for step in (4, 6, 8):
        assert restored(run_folder, "plain", step) == snapshots[step]


def test_a_capture_that_cannot_be_planned_takes_no_memory(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    with checkpointer(run_folder, loop.state, every=None) as ckpt:
        loop.train(1)
        ckpt.step()
        pool = inspect(ckpt).keepers.pool
        assert pool is not None
        with monkeypatch.context() as patched:
            patched.setattr(scheduled, "Dispatch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save()
        assert pool.used_bytes == 0
        ckpt.save()
        saved = loop.snapshot()
    assert restored(run_folder, "plain", 1) == saved


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


# --- Plans ------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is made anew because a busy machine made a step wait."""
    monkeypatch.setattr(scheduled, "_TOLERANCE_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_step_that_goes_another_way_is_lazy_and_two_make_a_plan(run_folder: Path) -> None:
    """Steps 5 and 9 stray, the second makes a plan of its own; then steps go on as foretold."""
    loop = Loop("wanders")
    plans, strays = [0], [0]
    with checkpointer(run_folder, loop.state, every=None) as ckpt:
        ckpt.save()
        for step in range(1, 15):
            loop.train(step)
            ckpt.step()
            ckpt.save()
            inspect(ckpt).saver.finish_captures()
            plans.append(stats_of(ckpt).plans)
            strays.append(stats_of(ckpt).strayed_steps)
    assert plans[4] == 1
    assert plans[8] == 1
    assert [strays[5] - strays[4], strays[9] - strays[8]] == [1, 1]
    assert plans[9:] == [2] * 6
    assert strays[14] == strays[13]


@pytest.mark.usefixtures("patient")
def test_steps_that_take_turns_have_a_plan_each(run_folder: Path) -> None:
    """A second optimizer updates in every other step: from the sixth on nothing strays."""
    loop = Loop("several")
    strays = []
    with checkpointer(run_folder, loop.state) as ckpt:
        for step in range(1, 16):
            loop.train(step)
            ckpt.step()
            inspect(ckpt).saver.finish_captures()
            strays.append(stats_of(ckpt).strayed_steps)
        assert stats_of(ckpt).plans == 2
    assert strays[-1] == strays[7]
    assert stats_of(ckpt).followed_steps >= 7


def test_each_tensor_has_its_planned_and_its_actual_times(run_folder: Path) -> None:
    loop = Loop()
    with checkpointer(run_folder, loop.state, lane=lambda: EmulatedLink(SLOW)) as ckpt:
        for step in range(1, 8):
            loop.train(step)
            ckpt.step()
        ckpt.wait()
        schedule = stats_of(ckpt)
        survey = inspect(ckpt).state.survey()
    gated = {
        entry.name
        for entry in survey.shape.entries
        if survey.shape.owners[entry.name].kind == "replayed"
    }
    assert set(schedule.tensors) == gated
    for times in schedule.tensors.values():
        assert times.planned_start_s <= times.planned_end_s
        assert 0 <= times.start_s <= times.end_s
    assert 0 < schedule.link_bytes_per_s < 1.1 * SLOW
    assert schedule.predicted_wait_s >= 0
    assert len(schedule.waited_s) <= schedule.followed_steps


def test_a_state_that_nobody_updates_is_captured(run_folder: Path) -> None:
    state: dict[str, Any] = {"model": nn.Linear(4, 4), "plain": {"a": 1}}
    with checkpointer(run_folder, state) as ckpt:
        for _ in range(4):
            ckpt.step()
        ckpt.wait()
        assert ckpt.stats().committed == 4


def test_averages_swapped_in_with_before_update(run_folder: Path) -> None:
    """A change of the state outside the optimizer waits for all copies."""
    loop = Loop()
    with checkpointer(run_folder, loop.state, lane=lambda: EmulatedLink(SLOW)) as ckpt:
        for step in range(1, 6):
            loop.train(step)
            ckpt.step()
        saved = loop.snapshot()
        ckpt.before_update()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(0.5)
        ckpt.after_update()
        ckpt.step()
        ckpt.wait()
    assert restored(run_folder, "plain", 5) == saved


def test_hooks_are_gone_when_it_is_closed(run_folder: Path) -> None:
    loop = Loop()
    with checkpointer(run_folder, loop.state) as ckpt:
        loop.train(1)
        ckpt.step()
        assert any(module._forward_pre_hooks for module in loop.model.modules())
    assert not any(module._forward_pre_hooks for module in loop.model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in loop.model.parameters())


# --- What stays in memory ---------------------------------------------------------------


@pytest.fixture
def keeper(run_folder: Path) -> Iterator[Bench]:
    """A keeper that Checkpointers find."""
    with serving(run_folder) as made:
        yield made


def bases(run: Path) -> set[int]:
    return {base.id.step for base in inventory_of(run).bases}


def trained(
    run: Path, loop: Loop, steps: int, **options: Any
) -> tuple[everstep.Checkpointer, Mapping[int, Any]]:
    """A Checkpointer that has seen so many steps."""
    options = {"every": 4, "method": "checkflow"} | options
    ckpt = everstep.Checkpointer(run, loop.state, **options)
    ckpt.resume()
    snapshots = {}
    for step in range(1, steps + 1):
        loop.train(step)
        snapshots[step] = loop.snapshot()
        ckpt.step()
    return ckpt, snapshots


def test_every_kth_is_persisted_and_the_last_at_the_end(keeper: Bench, run_folder: Path) -> None:
    ckpt, snapshots = trained(run_folder, Loop(), 10, keep=100)
    inspect(ckpt).saver.finish_captures()
    assert stats_of(ckpt).captures == 10
    assert stats_of(ckpt).held_step == 10
    ckpt.wait()
    assert bases(run_folder) == {4, 8}
    ckpt.close()
    assert bases(run_folder) == {4, 8, 10}
    assert ckpt.stats().saves == 3
    for step in (4, 8, 10):
        assert restored(run_folder, "plain", step) == snapshots[step]


@pytest.mark.parametrize("kind", ["plain", "inside"])
def test_a_dead_process_comes_back_to_its_newest_whole_step(
    kind: str, keeper: Bench, run_folder: Path
) -> None:
    ckpt, snapshots = trained(run_folder, Loop(kind), 7)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    forget(run_folder)
    other = Loop(kind, seed=50)
    with everstep.Checkpointer(run_folder, other.state, method="checkflow", every=4) as again:
        recovery = again.resume()
        assert (recovery.step, recovery.source, recovery.exact) == (7, "memory", True)
        assert other.snapshot() == snapshots[7]
        other.train(8)
        again.step()  # what came from memory only is persisted at once
        again.wait()
        assert 8 in bases(run_folder)


def test_a_capture_that_was_not_whole_is_not_what_comes_back(
    held: Gate, keeper: Bench, run_folder: Path
) -> None:
    held.open()
    ckpt, snapshots = trained(run_folder, Loop(), 6, seams=Seams(lane=HeldLane))
    inspect(ckpt).saver.finish_captures()
    HeldLane.gate = Gate()
    ckpt.step()
    inspect(ckpt).saver.scheduler.flush()  # whenever it was planned for
    die_now = threading.Thread(target=die, args=(ckpt,))
    assert HeldLane.gate.reached.wait(TIMEOUT_S)
    cut(ckpt)
    HeldLane.gate.open()
    die_now.start()
    die_now.join(TIMEOUT_S)
    forget(run_folder)
    other = Loop(seed=50)
    with everstep.Checkpointer(run_folder, other.state, method="checkflow", every=4) as again:
        assert again.resume().step == 6
        assert other.snapshot() == snapshots[6]


def test_save_makes_the_capture_of_this_step_durable(keeper: Bench, run_folder: Path) -> None:
    """It is not copied twice."""
    ckpt, snapshots = trained(run_folder, Loop(), 3, every=None)
    save = ckpt.save()
    assert ckpt.save() is save
    ckpt.wait()
    assert save.durable.result(TIMEOUT_S) > 0
    assert stats_of(ckpt).captures == 3
    assert bases(run_folder) == {3}
    ckpt.close()
    assert bases(run_folder) == {3}
    assert restored(run_folder, "plain") == snapshots[3]


def test_saves_of_two_captures_that_are_not_complete_yet(keeper: Bench, run_folder: Path) -> None:
    """Each of them becomes durable, also if the lane's thread has two steps left to copy."""
    loop = Loop()
    gate = Gate()
    saves = list[Save]()
    ckpt, _ = trained(run_folder, loop, 1, every=None, keep=100)
    saver = inspect(ckpt).saver
    assert isinstance(saver, ScheduledSaver)
    saver.finish_captures()
    complete = saver.scheduler.complete

    def late(*args: Any) -> None:
        gate.wait_at()
        complete(*args)

    saver.scheduler.complete = late  # type: ignore[method-assign]
    for step in (2, 3):
        loop.train(step)
        ckpt.step()
        saves.append(ckpt.save())
    assert gate.reached.wait(TIMEOUT_S)
    gate.open()
    ckpt.wait()
    assert [save.durable.done() for save in saves] == [True, True]
    assert bases(run_folder) == {2, 3}
    ckpt.close()


def test_save_without_a_keeper_is_lost_and_told_once(keeper: Bench, run_folder: Path) -> None:
    """Behind the last look whether it is there; the next takes its place, and says so."""
    forget(run_folder)
    loop, reported = Loop(), list[EverstepError]()
    options: dict[str, Any] = {"every": 100, "on_failure": reported.append}
    ckpt = everstep.Checkpointer(run_folder, loop.state, method="checkflow", **options)
    loop.train(1)
    ckpt.step()
    inspect(ckpt).saver.finish_captures()
    lost = cut(ckpt).lost
    assert lost is not None
    save = inspect(ckpt).saver.take(BaseRequest(inspect(ckpt).identity, None, True))
    assert isinstance(save.durable.exception(TIMEOUT_S), KeeperError)
    assert not reported
    with pytest.warns(RuntimeWarning, match="is gone"):
        ckpt.close()
    assert reported == [lost]
    assert bases(run_folder) == {1}


def test_closed_in_the_middle_of_a_step_the_last_mark_is_durable(
    keeper: Bench, run_folder: Path
) -> None:
    loop = Loop()
    ckpt, snapshots = trained(run_folder, loop, 3, every=None)
    loop.train(4)
    ckpt.close()
    assert bases(run_folder) == {3}
    assert restored(run_folder, "plain") == snapshots[3]


def test_going_back_does_not_bring_back_what_was_parked(keeper: Bench, run_folder: Path) -> None:
    """What another timeline has parked is neither what comes back nor what is persisted."""
    loop = Loop()
    ckpt, snapshots = trained(run_folder, loop, 7)
    ckpt.resume(4)
    assert loop.snapshot() == snapshots[4]
    ckpt.close()
    assert bases(run_folder) == {4}
    assert restored(run_folder, "plain") == snapshots[4]


@pytest.mark.parametrize("same", [False, True])
def test_what_becomes_whole_behind_a_start_is_not_what_the_next_keeper_has(
    same: bool, keeper: Bench, run_folder: Path
) -> None:
    """Told of by the lane's thread, in the middle of that: another keeper knows nothing of it, and
    to the same one it is of a timeline that is over."""
    loop, gate = Loop(), Gate()
    ckpt, _ = trained(run_folder, loop, 6)
    saver = inspect(ckpt).saver
    assert isinstance(saver, ScheduledSaver)
    saver.finish_captures()
    whole = saver.scheduler.complete

    def late(*about: Any) -> None:
        gate.wait_at()
        whole(*about)

    saver.scheduler.complete = late  # type: ignore[method-assign]
    loop.train(7)
    ckpt.step()
    saver.scheduler.flush()
    assert gate.reached.wait(TIMEOUT_S)
    service = inspect(ckpt).keepers.service
    assert service is not None
    another: Any = SimpleNamespace()
    saver.start(service if same else Service(another, None, None, None, 1))
    gate.open()
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    assert saver.reachable_step is None
    before = saver.saves
    saver.persist_parked()
    assert saver.saves == before, "it is of a timeline that is over"
    die(ckpt)


def test_two_states_are_room_enough(keeper: Bench, run_folder: Path) -> None:
    """I10: with no room for a third, steps wait while a base is written; nothing is dropped."""
    loop = Loop()
    size = 2 * sum(p.nbytes for p in loop.model.state_dict().values()) * 4
    ckpt, snapshots = trained(run_folder, loop, 9, budget=Budget(host_bytes=size), every=3)
    assert ckpt.stats().host_bytes <= size
    inspect(ckpt).saver.finish_captures()
    assert stats_of(ckpt).held_step == 9
    ckpt.close()
    assert {3, 6, 9} == bases(run_folder)
    assert restored(run_folder, "plain") == snapshots[9]


def test_room_for_one_state_is_refused(run_folder: Path) -> None:
    loop = Loop()
    size = sum(p.nbytes for p in loop.model.state_dict().values())
    with pytest.raises(OutOfSpaceError, match="twice"):
        everstep.Checkpointer(
            run_folder, loop.state, method="checkflow", budget=Budget(host_bytes=size + 4096)
        )


def test_a_torn_capture_is_reported_and_the_one_before_stays(
    keeper: Bench, run_folder: Path
) -> None:
    loop = Loop()
    ckpt, snapshots = trained(run_folder, loop, 5, on_failure="warn")
    inspect(ckpt).saver.finish_captures()
    with torch.no_grad():
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
        gate = Gate()
        inspect(ckpt).lane.run(gate.wait_at)
        ckpt.step()
        for parameter in loop.model.parameters():
            parameter.data.mul_(0.5)
        gate.open()
    inspect(ckpt).saver.finish_captures()
    with pytest.warns(RuntimeWarning, match="was changed while it was being copied"):
        ckpt.wait()
    assert stats_of(ckpt).held_step == 5
    die(ckpt)
    forget(run_folder)
    other = Loop(seed=50)
    with everstep.Checkpointer(run_folder, other.state, method="checkflow") as again:
        assert again.resume().step == 5
        assert other.snapshot() == snapshots[5]


def test_without_a_keeper_process_nothing_is_parked(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would survive nothing, so it is not taken, and that is said."""
    loop = Loop()
    with checkpointer(run_folder, loop.state, every=4) as ckpt:
        for step in range(1, 9):
            loop.train(step)
            ckpt.step()
        ckpt.wait()
        assert stats_of(ckpt).captures == 2
        assert isinstance(inspect(ckpt).saver, ScheduledSaver)
    assert "captures between bases are not kept" in capsys.readouterr().err


def test_options() -> None:
    assert presets["checkflow"] == Method(base="scheduled")
    with pytest.raises(OptionError, match="captures every step"):
        Method(base="scheduled", log="dense")


def test_a_base_of_a_step_that_is_in_memory_begins_behind_what_is_copied(run_folder: Path) -> None:
    """One capture's copies are issued behind the other's."""
    method = Method(base="scheduled", tiers=("memory", "peer", "disk"), disk_every=50)
    seams, loop, left = Seams(lane=lambda: EmulatedLink(10e6)), Loop("inside"), list[Any]()
    with everstep.Checkpointer(run_folder, loop.state, method=method, every=1, seams=seams) as ckpt:
        ckpt.resume()
        for step in range(1, 30):
            loop.train(step)
            ckpt.step()
            saver: Any = inspect(ckpt).saver
            left = [one for one in saver.scheduler.open if not one.all_issued]
            if left:
                break
        assert left, "a plan was made, and leaves something for later events"
        saved = loop.snapshot()
        save = ckpt.save()
        assert all(one.all_issued for one in left)
        ckpt.wait()
        assert not save.in_memory
    assert restored(run_folder, "inside", step) == saved


@pytest.fixture
def all_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that put every copy into the step that follows."""

    def later(*about: Any) -> tuple[Unit, ...]:
        return tuple(dataclasses.replace(unit, event=1) for unit in all_at_mark(*about))

    monkeypatch.setattr(scheduled, "all_at_mark", later)


@pytest.mark.usefixtures("all_later")
@pytest.mark.parametrize("every", [None, 1])
def test_who_waits_for_a_save_needs_no_next_step(every: int | None, run_folder: Path) -> None:
    """Of a step that nothing was captured of, and of one whose base is under way."""
    loop = Loop()
    with checkpointer(run_folder, loop.state, every=every) as ckpt:
        loop.train(1)
        saved = loop.snapshot()
        ckpt.step()
        assert ckpt.save().durable.result(TIMEOUT_S) > 0
    assert restored(run_folder, "plain") == saved


@pytest.mark.usefixtures("all_later")
def test_who_waits_for_a_save_of_what_was_parked_needs_no_next_step(
    keeper: Bench, run_folder: Path
) -> None:
    ckpt, snapshots = trained(run_folder, Loop(), 1, every=None)
    assert None in [one.issued_s for one in inspect(ckpt).saver.scheduler.open[-1].copies]
    assert ckpt.save().durable.result(TIMEOUT_S) > 0
    assert stats_of(ckpt).captures == 1
    ckpt.close()
    assert restored(run_folder, "plain") == snapshots[1]
