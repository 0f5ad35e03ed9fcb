"""What may go wrong while a base is captured over several steps, and what each guarantee is for."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.spot_check import SpotCheck
from everstep.errors import (
    AuditError,
    EverstepError,
    OptionError,
    OutOfSpaceError,
    UnsupportedStateError,
)
from everstep.keeper.replica import replica_state
from everstep.link.pool import CapturePool
from everstep.seams.failpoints import arm
from everstep.testing import inspect
from everstep.trainer.log.update_inputs import InputReader
from everstep.trainer.multistep import held_gradients as multistep_gradients
from everstep.trainer.multistep.driver import MultistepDriver
from everstep.trainer.multistep.held_gradients import (
    CopyGate,
    GradientCheck,
    GraphMemory,
    HeldGradients,
)
from tests.support.following import opened, run_steps, steps_on_disk
from tests.support.lanes import HeldLane, held
from tests.support.lost_keepers import cut
from tests.support.multistep.rows import over, restored
from tests.support.multistep.world import Method, World, begin, report_of, start
from tests.support.serving import Bench, die, serving
from tests.support.world import TIMEOUT_S, Gate

__all__ = ["held"]  # a fixture


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


# --- Ends and abandonments --------------------------------------------------------------


def test_close_within_a_window_ends_it_there(served: Bench) -> None:
    world = World()
    ckpt = start(served, world, over(4, overlap=True))
    states = run_steps(ckpt, world, 1)
    assert "zero_grad" in vars(world.model)
    ckpt.close()
    assert "zero_grad" not in vars(world.model)
    assert not any(p._backward_hooks for p in world.model.parameters())
    assert steps_on_disk(served.run) == [3]
    assert restored(served.run, World(seed=9), 3) == states[3]
    assert report_of(ckpt).abandoned == 0


@pytest.mark.parametrize("what", ["forward", "update", "data"])
def test_close_within_a_step_keeps_nothing_of_it(what: str, served: Bench) -> None:
    """What a forward has drawn and counted belongs to no step, and what an update has changed."""
    world = World()
    ckpt = start(served, world, over(4))
    states = run_steps(ckpt, world, 2)
    ckpt.save()
    run_steps(ckpt, world, 1)
    begin(ckpt)
    if what == "forward":
        world.model(torch.randn(8, 5))
    elif what == "data":
        world.state["data"]["seen"] += 1
    else:
        world.backward()
        world.optimizer.step()
    ckpt.close()
    assert steps_on_disk(served.run) == [4]
    assert restored(served.run, World(seed=9), 4) == states[4]
    assert report_of(ckpt).abandoned == 1


def test_save_within_a_window_ends_it_at_this_very_step(served: Bench) -> None:
    world = World()
    ckpt = start(served, world, over(6))
    states = run_steps(ckpt, world, 2)
    save = ckpt.save()
    assert save.step == 4
    assert save.durable.result(TIMEOUT_S) > 0
    assert ckpt.save() is save
    run_steps(ckpt, world, 1)
    ckpt.close()
    assert steps_on_disk(served.run) == [4]
    assert restored(served.run, World(seed=9), 4) == states[4]


@pytest.mark.parametrize("change", ["none", "in place", "unseen"])
def test_close_within_a_window_of_a_state_with_a_large_buffer(change: str, served: Bench) -> None:
    """Of what is too large to be remembered, versions and a few elements tell what it was."""
    world, other = World(), World(seed=9)
    for one in (world, other):
        one.model.register_buffer("table", torch.ones(200, 100))
    ckpt = start(served, world, over(4))
    states = run_steps(ckpt, world, 1)
    if change == "in place":
        world.model.table[7, 7] = 2.0
    elif change == "unseen":
        world.model.table.numpy()[...] = 2.0
    ckpt.close()
    assert steps_on_disk(served.run) == ([3] if change == "none" else [])
    assert report_of(ckpt).abandoned == (change != "none")
    if change == "none":
        assert restored(served.run, other, 3) == states[3]


def test_close_takes_a_base_of_one_step_where_that_of_the_window_is_void(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, over(4), on_failure=reported.append)
    with monkeypatch.context() as planted:
        planted.setattr(SpotCheck, "differing", lambda *_: "model/0.weight")
        states = run_steps(ckpt, world, 1)
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    if not inspect(ckpt).multistep.window:  # the first part was looked at by then
        inspect(ckpt).multistep.end.again = None
        begin(ckpt)
        inspect(ckpt).multistep.window.failed = AuditError("planted")
    ckpt.close()
    assert {type(error) for error in reported} == {AuditError}
    assert steps_on_disk(served.run) == [3]
    assert restored(served.run, World(seed=9), 3) == states[3]


def behind_its_back(world: World) -> None:
    """No counter moves: it shows when the keeper has replayed the gradients."""
    world.model[0].weight.detach().numpy()[...] *= 0.5


@pytest.mark.thinned(3)
@pytest.mark.parametrize("ends", ["close", "save, and wait", "all its steps"])
@pytest.mark.parametrize("policy", ["raise", "collect"])
def test_where_no_step_follows_a_base_of_one_step_takes_the_place_of_a_lost_one(
    ends: str, policy: str, served: Bench
) -> None:
    """That it is lost is found in the keeper only."""
    reported: list[EverstepError] = []
    world = World()
    on_failure: Any = "raise" if policy == "raise" else reported.append
    ckpt = start(served, world, over(3 if ends == "all its steps" else 6), on_failure=on_failure)
    run_steps(ckpt, world, 1)
    behind_its_back(world)
    states = run_steps(ckpt, world, 1)
    if ends == "save, and wait":
        assert ckpt.save().step == 4
        with contextlib.suppress(AuditError):
            ckpt.wait()
        ckpt.wait()
        assert steps_on_disk(served.run) == [4]
    try:
        ckpt.close()
    except AuditError as error:
        reported.append(error)
    if policy == "collect" or ends != "save, and wait":
        assert {type(error) for error in reported} == {AuditError}
    assert steps_on_disk(served.run) == [4]
    assert restored(served.run, World(seed=9), 4) == states[4]


@pytest.mark.parametrize("after", ["a forward", "an update", "a step", "a change that was told"])
def test_a_lost_base_is_not_taken_again_of_another_state(after: str, served: Bench) -> None:
    """Whatever has begun since belongs to no step, or to another."""
    reported: list[EverstepError] = []
    world = World(to_none=False)
    ckpt = start(served, world, over(6), on_failure=reported.append)
    run_steps(ckpt, world, 1)
    behind_its_back(world)
    run_steps(ckpt, world, 1)
    save = ckpt.save()
    assert isinstance(save.durable.exception(TIMEOUT_S), AuditError)
    states: dict[int, Any] = {}
    if after == "a forward":
        world.model(torch.randn(8, 5))
    elif after == "an update":  # without a forward: nothing but what the optimizer owns changes
        world.optimizer.step()
    elif after == "a step":
        states = run_steps(ckpt, world, 1)
    else:
        ckpt.before_update()
        with torch.no_grad():
            world.model[0].weight.mul_(0.5)
        ckpt.after_update()
    ckpt.close()
    assert steps_on_disk(served.run) == ([5] if after == "a step" else [])
    for step, state in states.items():
        assert restored(served.run, World(seed=9), step) == state


@pytest.mark.parametrize("policy", ["raise", "collect"])
def test_save_within_a_void_window_takes_a_base_of_its_step(policy: str, served: Bench) -> None:
    """Also where the reason is an error that is to be raised."""
    reported: list[EverstepError] = []
    world = World()
    on_failure: Any = "raise" if policy == "raise" else reported.append
    ckpt = start(served, world, over(6), on_failure=on_failure)
    states = run_steps(ckpt, world, 2)
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    inspect(ckpt).multistep.window.failed = AuditError("planted")
    try:
        ckpt.save()
    except AuditError as error:
        reported.append(error)
    assert ["planted" in error.message for error in reported] == [True]
    save = ckpt.save()
    assert (save.step, ckpt.stats().saves) == (4, 2)
    assert save.durable.result(TIMEOUT_S) > 0
    ckpt.close()
    assert steps_on_disk(served.run) == [4]
    assert restored(served.run, World(seed=9), 4) == states[4]


@pytest.mark.parametrize("place", ["acquire", "digest_of", "fill"])
def test_no_save_is_answered_with_one_that_was_interrupted(
    place: str, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C where a base of step 4 begins, at step 2, and where it ends; no memory is lost."""
    world = World()
    ckpt = opened(served.run, world, method=over(3))
    ckpt.resume()
    run_steps(ckpt, world, 2)
    planner = inspect(ckpt).part(MultistepDriver).planner
    owner = planner if place == "digest_of" else inspect(ckpt).saver
    goes_on = getattr(owner, place)
    interrupted: list[int] = []

    def interrupts(*about: Any) -> Any:
        if not interrupted:
            interrupted.append(ckpt.stats().step)
            raise KeyboardInterrupt
        return goes_on(*about)

    monkeypatch.setattr(owner, place, interrupts)
    with pytest.raises(KeyboardInterrupt):
        begin(ckpt)
        run_steps(ckpt, world, 2)
    run_steps(ckpt, world, 4 - ckpt.stats().step)
    wanted, save = world.snapshot(), ckpt.save()
    assert save.durable.result(TIMEOUT_S) > 0
    if place != "fill":  # which gives the memory back itself
        assert_nothing_left(ckpt)
    ckpt.close()
    assert interrupted == [4 if place == "fill" else 2]
    assert steps_on_disk(served.run) == [4]
    assert restored(served.run, World(seed=9), 4) == wanted


@pytest.mark.parametrize("method", ["lazy", over(3)], ids=["lazy", "gockpt"])
def test_interrupted_while_another_keeper_takes_over(
    method: Any, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call goes on with that: nothing is told to one that is gone."""
    world = World()
    ckpt = opened(served.run, world, method=method)
    run_steps(ckpt, world, 2)
    cut(ckpt)

    def interrupts(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(inspect(ckpt).saver, "start", interrupts)
        with pytest.warns(RuntimeWarning, match="keeper"), pytest.raises(KeyboardInterrupt):
            run_steps(ckpt, world, 1)
    states = run_steps(ckpt, world, 1)
    assert ckpt.save().durable.result(TIMEOUT_S) > 0
    ckpt.close()
    assert steps_on_disk(served.run) == [4]
    assert restored(served.run, World(seed=9), 4) == states[4]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["lazy", "logged", over(3)], ids=["lazy", "logged", "gockpt"])
@pytest.mark.parametrize("begun", [True, False], ids=["within a step", "between steps"])
def test_what_was_lost_with_a_keeper_is_not_taken_of_half_a_step(
    begun: bool, method: Any, served: Bench
) -> None:
    """Training leaves with an error, in a forward perhaps, and another keeper is there."""
    world = World()
    ckpt = opened(served.run, world, method=method)
    states = run_steps(ckpt, world, 2)
    cut(ckpt)

    def leave() -> None:
        with ckpt:
            if begun:
                world.model(torch.randn(8, 5))
            raise ValueError("of the loop")

    with pytest.warns(RuntimeWarning, match="the keeper"), pytest.raises(ValueError, match="loop"):
        leave()
    found = steps_on_disk(served.run)
    assert all(restored(served.run, World(seed=9), step) == states[step] for step in found)
    assert (2 in found) is (method == "logged" and not begun)


def test_save_is_of_this_very_step_and_takes_no_other(served: Bench) -> None:
    world = World()
    ckpt = opened(served.run, world, method=over(6))
    states = run_steps(ckpt, world, 2)
    assert ckpt.save().durable.result(TIMEOUT_S) > 0
    ckpt.close()
    assert restored(served.run, World(seed=9), 2) == states[2]
    assert report_of(ckpt).windows == 0


def test_a_base_that_is_due_within_a_window_begins_behind_it(served: Bench) -> None:
    world = World()
    ckpt = opened(served.run, world, method=over(5), every=2)
    states = run_steps(ckpt, world, 12)
    ckpt.close()
    assert steps_on_disk(served.run) == [6, 12]  # which are those of steps 6 and 12, too
    for step in (6, 12):
        assert restored(served.run, World(seed=9), step) == states[step]
    assert (report_of(ckpt).windows, report_of(ckpt).deferred) == (2, 2)


def change_groups(world: World) -> None:
    group = world.optimizer.param_groups[0]
    moved = [group["params"].pop()]
    world.optimizer.add_param_group({**group, "params": moved})
    world.schedule.base_lrs.append(0.01)


def add_parameters(world: World) -> None:
    world.model.late = nn.Linear(2, 2)
    world.optimizer.add_param_group({"params": list(world.model.late.parameters())})
    world.schedule.base_lrs.append(0.01)


def load_another(world: World) -> None:
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))


@pytest.mark.parametrize("change", [change_groups, add_parameters, load_another])
def test_what_no_replay_repeats_begins_the_base_anew(
    change: Callable[[World], None], served: Bench
) -> None:
    world = World()
    ckpt = start(served, world, over(3))
    states = run_steps(ckpt, world, 1)
    change(world)
    states |= run_steps(ckpt, world, 4)
    ckpt.close()
    assert report_of(ckpt).abandoned == 1
    found = steps_on_disk(served.run)
    assert found == [6]
    other = World(seed=9)
    if change is not load_another:
        change(other)
    assert restored(served.run, other, 6) == states[6]


@pytest.mark.parametrize("when", ["for one update", "behind the last"])
def test_groups_that_change_within_a_step_begin_the_base_anew(when: str, served: Bench) -> None:
    world = World()
    change_groups(world)
    ckpt = start(served, world, over(3))
    groups = world.optimizer.param_groups
    if when == "for one update":  # the mark finds them as they were
        groups.reverse()
        world.train()
        groups.reverse()
    else:
        world.train()
        world.train()
        groups.reverse()
    ckpt.step()
    states = run_steps(ckpt, world, 3)
    ckpt.close()
    assert report_of(ckpt).abandoned == 1
    (found,) = steps_on_disk(served.run)
    other = World(seed=9)
    change_groups(other)
    if when == "behind the last":
        other.optimizer.param_groups.reverse()
    assert restored(served.run, other, found) == states[found]


def test_an_update_that_nobody_told_of_begins_it_anew(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason may be: the numbers of updates tell."""
    world = World()
    ckpt = start(served, world, over(4))
    states = run_steps(ckpt, world, 1)
    with monkeypatch.context() as patch:
        patch.setattr(inspect(ckpt).updates, "consumed", lambda key: None)
        patch.setattr(inspect(ckpt).updates, "applied", lambda key: None)
        world.train()
    world.train()
    ckpt.step()
    states |= run_steps(ckpt, world, 4)
    ckpt.close()
    assert report_of(ckpt).abandoned == 1
    (found,) = steps_on_disk(served.run)
    assert restored(served.run, World(seed=9), found) == states[found]


def test_a_change_that_was_declared_begins_it_anew(served: Bench) -> None:
    world = World()
    ckpt = start(served, world, over(3))
    ckpt.before_update()
    with torch.no_grad():
        world.model[0].weight.mul_(0.5)
    ckpt.after_update()
    states = run_steps(ckpt, world, 3)
    ckpt.close()
    assert report_of(ckpt).abandoned == 1
    assert steps_on_disk(served.run) == [5]
    assert restored(served.run, World(seed=9), 5) == states[5]


def test_an_update_that_fails_begins_it_anew(served: Bench) -> None:
    world = World()
    ckpt = start(served, world, over(3))
    world.optimizer.register_step_pre_hook(_interrupt := _Once())
    with pytest.raises(KeyboardInterrupt):
        world.train()
    assert _interrupt.over
    states = run_steps(ckpt, world, 4)
    ckpt.close()
    assert report_of(ckpt).abandoned == 1
    assert steps_on_disk(served.run) == [5]
    assert restored(served.run, World(seed=9), 5) == states[5]


class _Once:
    over = False

    def __call__(self, *_: Any) -> None:
        if not self.over:
            self.over = True
            raise KeyboardInterrupt


def test_parameters_that_stop_and_begin_to_learn_are_followed(served: Bench) -> None:
    world = World()
    ckpt = start(served, world, over(5))
    for parameter in world.model[3].parameters():
        parameter.requires_grad_(False)
    states = run_steps(ckpt, world, 2)
    for parameter in world.model[3].parameters():
        parameter.requires_grad_(True)
    states |= run_steps(ckpt, world, 2)
    ckpt.close()
    assert report_of(ckpt).abandoned == 0
    assert steps_on_disk(served.run) == [6]
    assert restored(served.run, World(seed=9), 6) == states[6]


def test_windows_that_always_become_void_end_in_a_base_of_one_step(served: Bench) -> None:
    world = World()
    ckpt = opened(served.run, world, method=over(4), every=1)
    states: dict[int, Any] = {}
    for _ in range(8):
        load_another(world)
        states |= run_steps(ckpt, world, 1)
    ckpt.wait()
    found = steps_on_disk(served.run)
    assert found, "no base at all"
    for step in found:
        assert restored(served.run, World(seed=9), step) == states[step]
    ckpt.close()


def test_going_back_within_a_window(served: Bench) -> None:
    world = World()
    ckpt = opened(served.run, world, method=over(4))
    states = run_steps(ckpt, world, 2)
    ckpt.save().durable.result(TIMEOUT_S)
    begin(ckpt)
    run_steps(ckpt, world, 1)
    assert ckpt.rewind(2).step == 2
    assert world.snapshot() == states[2]
    begin(ckpt)  # updates have the numbers again that they had
    again = run_steps(ckpt, world, 5)
    ckpt.close()
    assert again[4] == run_alone(4)
    assert steps_on_disk(served.run, timeline=2) == [5]
    assert restored(served.run, World(seed=9)) == again[5]


def run_alone(steps: int) -> dict[str, bytes]:
    world = World()
    for _ in range(steps):
        world.train()
    return world.snapshot()


def test_a_closure_that_is_called_twice_begins_it_anew(served: Bench) -> None:
    world = World()
    ckpt = start(served, world, over(3))

    def twice(*, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
            closure()

    def loss() -> torch.Tensor:
        world.optimizer.zero_grad()
        found: torch.Tensor = world.model(torch.randn(8, 5)).square().mean()
        found.backward()
        return found

    class Twice(torch.optim.AdamW):
        pass

    world.optimizer.step(loss)
    ckpt.step()
    assert report_of(ckpt).abandoned == 0
    run_steps(ckpt, world, 2)
    ckpt.close()
    assert steps_on_disk(served.run) == [4]


@pytest.mark.parametrize("place", ["log.update_inputs.InputReader.look", "multistep.copies.encode"])
def test_an_error_of_ours_is_no_reason_for_training_to_fail(
    place: str, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: in the training thread, and in the lane's."""
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, over(3), on_failure=reported.append)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(f"everstep.trainer.{place}", fails)
        states = run_steps(ckpt, world, 1)
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    states |= run_steps(ckpt, world, 6)
    ckpt.close()
    assert ["planted" in error.message for error in reported] == [True]
    assert report_of(ckpt).abandoned == 1
    (step,) = steps_on_disk(served.run)
    assert restored(served.run, World(seed=9), step) == states[step]


# --- Memory -----------------------------------------------------------------------------


def test_parts_that_do_not_fit_the_budget_are_refused_at_once(run_folder: Path) -> None:
    budget = everstep.Budget(host_bytes=45_000)
    with pytest.raises(OutOfSpaceError) as caught:
        opened(run_folder, World(), method=over(20), budget=budget)
    assert "in 20 parts" in caught.value.message
    assert "parts=" in str(caught.value.hint)


def test_without_memory_for_gradients_the_base_is_given_up_and_taken_in_fewer_parts(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    ckpt = start(served, world, over(6))
    acquire = CapturePool.acquire_now
    calls = [0]

    def scarce(pool: CapturePool, size_bytes: int) -> Any:
        """Nothing for the third update, not even after other memory was given back."""
        calls[0] += 1
        return None if calls[0] in (3, 4) else acquire(pool, size_bytes)

    monkeypatch.setattr(CapturePool, "acquire_now", scarce)
    states = run_steps(ckpt, world, 8)
    ckpt.close()
    report = report_of(ckpt)
    assert (report.abandoned, report.parts) == (1, 3)
    assert steps_on_disk(served.run) == [7]
    assert restored(served.run, World(seed=9), 7) == states[7]
    assert not inspect(ckpt).keepers.pool.lent_bytes


def test_a_small_arena_takes_fewer_parts_and_says_so(served: Bench) -> None:
    """What plain data takes beside it, gradients cannot have."""
    world = World()
    ckpt = opened(served.run, world, method=over(6), budget=everstep.Budget(host_bytes=61_440))
    run_steps(ckpt, world, 2)
    world.state["data"]["more"] = "x" * 8_000
    inspect(
        ckpt
    ).state.survey().objects()  # as at a base: how much it is, is seen where it is encoded
    with pytest.warns(RuntimeWarning, match="it is cut into"):
        begin(ckpt)
    states = run_steps(ckpt, world, 6)
    ckpt.close()
    (step,) = steps_on_disk(served.run)
    assert restored(served.run, World(seed=9), step) == states[step]


def test_nothing_is_left_in_the_arena(served: Bench) -> None:
    world = World()
    ckpt = opened(served.run, world, method=over(3, overlap=True), every=3)
    run_steps(ckpt, world, 12)
    begin(ckpt)
    run_steps(ckpt, world, 1)
    load_another(world)
    run_steps(ckpt, world, 1)
    assert_nothing_left(ckpt)
    ckpt.close()


def assert_nothing_left(ckpt: everstep.Checkpointer) -> None:
    """In the arena, once all bases are durable."""
    ckpt.wait()
    pool = inspect(ckpt).keepers.pool
    assert pool is not None
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    pool.drop_kept()
    assert pool.used_bytes == 0


# --- What each guarantee is for ---------------------------------------------------------


def test_the_update_waits_for_its_part_and_no_longer(held: Gate, served: Bench) -> None:
    """I1: forward and backward run while copies wait; the update does not."""
    world = World()
    ckpt = opened(served.run, world, method=over(3))
    ckpt.resume()
    run_steps(ckpt, world, 2)
    begin(ckpt)
    world.backward()
    updated = threading.Event()

    def update() -> None:
        world.optimizer.step()
        updated.set()

    thread = threading.Thread(target=update)
    thread.start()
    assert held.reached.wait(TIMEOUT_S)
    assert not updated.wait(0.05), "the update did not wait"
    held.open()
    thread.join(TIMEOUT_S)
    assert updated.is_set()
    world.optimizer.zero_grad()
    ckpt.step()
    states = {3: world.snapshot()} | run_steps(ckpt, world, 3)
    ckpt.close()
    assert restored(served.run, World(seed=9), 4) == states[4]


def torn_or_noticed(
    served: Bench,
    held: Gate,
    method: Method,
    *,
    to_none: bool = True,
    steps: int = 2,
) -> tuple[list[EverstepError], bool]:
    """Trains while no copy is made; then all of them are. What was reported, and whether a base
    holds something that its step had not."""
    reported: list[EverstepError] = []
    held.open()
    world = World(to_none=to_none)
    ckpt = opened(served.run, world, method=method, on_failure=reported.append)
    ckpt.resume()
    run_steps(ckpt, world, 2)
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    HeldLane.gate = gate = Gate()
    save = begin(ckpt)
    states = {2: world.snapshot()}
    for _ in range(steps):
        world.train()
        if len(states) == steps:  # all of it was overtaken: now the last mark
            gate.open()
        ckpt.step()
        states[ckpt.stats().step] = world.snapshot()
    save.durable.exception(TIMEOUT_S)
    failed = save.durable.exception(TIMEOUT_S)
    inspect(ckpt).multistep.end.again = None
    try:
        ckpt.close()
    except EverstepError as error:
        reported.append(error)
    wrong = failed is None and restored(served.run, World(seed=9), save.step) != states[save.step]
    return reported, wrong


@pytest.mark.parametrize("noticing", [True, False], ids=["noticed", "nobody looks"])
def test_without_the_gate_a_part_is_torn(
    noticing: bool, held: Gate, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CopyGate, "wait", nobody_waits)
    if not noticing:
        nobody_looks(monkeypatch)
    reported, wrong = torn_or_noticed(served, held, over(3))
    assert wrong is not noticing
    assert any(isinstance(error, AuditError) for error in reported) is noticing


def nobody_waits(*_: Any) -> None:
    """In the place of a wait."""


def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No audit of any kind."""
    monkeypatch.setattr(SpotCheck, "differing", lambda *_: None)
    monkeypatch.setattr(replica_state, "check_samples", lambda *_: None)
    monkeypatch.setattr(GradientCheck, "torn", lambda *_: None)


@pytest.mark.parametrize("noticing", [True, False], ids=["noticed", "nobody looks"])
def test_a_gradient_that_a_parameter_had_seen_already_is_not_applied_again(
    noticing: bool, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter is brought forward from the step at which it was captured."""
    look = InputReader.look
    monkeypatch.setattr(InputReader, "look", lambda self, key, only=None: look(self, key))
    if not noticing:
        nobody_looks(monkeypatch)
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, over(3), on_failure=reported.append)
    save = inspect(ckpt).multistep.last
    assert save is not None
    states = run_steps(ckpt, world, 2)
    error = save.durable.exception(TIMEOUT_S)
    inspect(ckpt).multistep.end.again = None
    ckpt.close()
    if noticing:
        assert isinstance(error, AuditError)
        assert restored(served.run, World(seed=9), 4) == states[4]  # taken by close()
    else:
        assert error is None
        assert restored(served.run, World(seed=9), 4) != states[4], "this test cannot fail"


@pytest.mark.parametrize("noticing", [True, False], ids=["noticed", "nobody looks"])
def test_without_the_wait_gradients_are_torn(
    noticing: bool, held: Gate, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GoCkpt: the update waits, because gradients are zeroed in place behind it."""
    late = _LateGradients(monkeypatch)
    monkeypatch.setattr(CopyGate, "wait", nobody_waits)
    if not noticing:
        nobody_looks(monkeypatch)
    reported, wrong = late.train(served, over(3))
    assert wrong is not noticing
    assert any(isinstance(error, AuditError) for error in reported) is noticing


@pytest.mark.parametrize("noticing", [True, False], ids=["noticed", "nobody looks"])
def test_without_its_guards_an_overlapped_gradient_is_torn(
    noticing: bool, held: Gate, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GoCkpt-O: zeroing, and the next backward, wait."""
    late = _LateGradients(monkeypatch)
    monkeypatch.setattr(HeldGradients, "gate", lambda *_, **__: None)
    if not noticing:
        nobody_looks(monkeypatch)
    reported, wrong = late.train(served, over(3, overlap=True))
    assert wrong is not noticing
    assert any(isinstance(error, AuditError) for error in reported) is noticing


class _LateGradients:
    """Parts are copied at once; the first gradients when the step is over that consumed them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        HeldLane.gate.open()
        look = InputReader.look
        late_ones = [True]

        def late(reader: InputReader, *about: Any) -> Any:
            inspect(self.ckpt).lane.run(lambda: None).result(TIMEOUT_S)
            if late_ones:
                late_ones.clear()
                HeldLane.gate = Gate()
            return look(reader, *about)

        monkeypatch.setattr(InputReader, "look", late)

    def train(self, served: Bench, method: Method) -> tuple[list[EverstepError], bool]:
        """Zeroes gradients in place."""
        reported: list[EverstepError] = []
        world = World(to_none=False)
        self.ckpt = ckpt = opened(served.run, world, method=method, on_failure=reported.append)
        ckpt.resume()
        run_steps(ckpt, world, 2)
        save = begin(ckpt)
        states = {}
        for step in (3, 4):
            world.train()
            HeldLane.gate.open()
            inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
            ckpt.step()
            states[step] = world.snapshot()
        failed = save.durable.exception(TIMEOUT_S)
        HeldLane.gate.open()
        inspect(ckpt).multistep.end.again = None
        ckpt.close()
        wrong = failed is None and restored(served.run, World(seed=9), 4) != states[4]
        return reported, wrong


@pytest.mark.thinned(2)
@pytest.mark.parametrize("owner", ["optimizer", "model"])
@pytest.mark.parametrize("to_none", [True, False], ids=["dropped", "zeroed"])
def test_zero_grad_waits_where_it_must_and_only_there(
    owner: str, to_none: bool, held: Gate, served: Bench
) -> None:
    held.open()
    world = World()
    ckpt = start(served, world, over(4, overlap=True))
    world.backward()
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    HeldLane.gate = gate = Gate()
    world.optimizer.step()
    assert "zero_grad" in vars(getattr(world, owner))
    done = threading.Event()

    def zero() -> None:
        getattr(world, owner).zero_grad(set_to_none=to_none)
        done.set()

    thread = threading.Thread(target=zero)
    thread.start()
    assert gate.reached.wait(TIMEOUT_S)
    assert done.wait(TIMEOUT_S if to_none else 0.05) is to_none
    gate.open()
    thread.join(TIMEOUT_S)
    world.schedule.step()
    world.state["data"]["seen"] += 1
    ckpt.step()
    states = run_steps(ckpt, world, 4)
    assert "zero_grad" not in vars(world.model)
    assert "zero_grad" not in vars(world.optimizer)
    assert not world.model[0].weight._backward_hooks
    ckpt.close()
    assert report_of(ckpt).abandoned == 0
    assert restored(served.run, World(seed=9), 5) == states[5]


def test_the_next_backward_waits_before_it_adds_to_a_gradient(held: Gate, served: Bench) -> None:
    held.open()
    world = World()
    ckpt = start(served, world, over(3, overlap=True))
    world.backward()
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    HeldLane.gate = gate = Gate()
    world.optimizer.step()  # and nobody zeroes
    ckpt.step()
    assert gate.reached.wait(TIMEOUT_S)
    done = threading.Event()

    def backward() -> None:
        world.backward()
        done.set()

    thread = threading.Thread(target=backward)
    thread.start()
    assert not done.wait(0.05), "it has added to gradients that were not copied"
    gate.open()
    thread.join(TIMEOUT_S)
    world.optimizer.step()
    ckpt.step()
    wanted = world.snapshot()
    ckpt.close()
    assert restored(served.run, World(seed=9), 4) == wanted


def test_gradients_in_shared_memory_are_waited_for(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of buckets, as DDP has them, may be written over without any of the hooks."""
    world = World()
    parameters = list(world.model.parameters())
    bucket = torch.zeros(sum(p.numel() for p in parameters))
    kept: list[Any] = []
    monkeypatch.setattr(HeldGradients, "hold", lambda self, *about: kept.append(about))
    ckpt = start(served, world, over(3, overlap=True))
    states = {}
    for step in (3, 4):
        world.backward()
        begin_at = 0
        for parameter in parameters:
            end = begin_at + parameter.numel()
            view = bucket[begin_at:end].view(parameter.shape)
            view.copy_(parameter.grad)
            parameter.grad = view
            begin_at = end
        world.optimizer.step()
        bucket.fill_(7.0)
        world.optimizer.zero_grad()
        ckpt.step()
        states[step] = world.snapshot()
    ckpt.close()
    assert not kept
    assert restored(served.run, World(seed=9), 4) == states[4]


def given_out(segments: int, size_bytes: int = 0) -> dict[str, dict[str, dict[str, int]]]:
    """What an allocator tells of what it has asked a device for."""
    sums = {"segment": segments, "reserved_bytes": size_bytes}
    return {key: {"all": {"allocated": value}} for key, value in sums.items()}


@pytest.mark.parametrize(("pool", "holds"), [((0, 0), True), ((0, 3), False), (None, False)])
def test_gradients_in_the_memory_of_a_graph_are_waited_for(
    pool: tuple[int, int] | None, holds: bool, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay writes over them, whoever refers to them; so may one where nobody says which."""
    kept: list[Any] = []
    asked: list[int] = []

    def snapshot() -> list[dict[str, Any]]:
        asked.append(1)
        if pool is None:
            raise RuntimeError("not with this allocator")
        return [{"address": 0, "total_size": 1 << 62, "segment_pool_id": pool}]

    monkeypatch.setattr(multistep_gradients, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: given_out(1))
    monkeypatch.setattr(HeldGradients, "hold", lambda self, *about: kept.append(about))
    world = World()
    ckpt = start(served, world, over(3, overlap=True))
    states = run_steps(ckpt, world, 2)
    ckpt.close()
    assert bool(kept) is holds
    assert asked == [1], "nothing was given out since"
    assert restored(served.run, World(seed=9), 4) == states[4]


def test_where_the_memory_of_graphs_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [(600, 50, (2, 0)), (100, 200, (0, 0)), (300, 100, (0, 1)), (400, 100, (0, 0))]
    keys = "address", "total_size", "segment_pool_id"
    segments = [dict(zip(keys, one, strict=True)) for one in apart]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(multistep_gradients, "on_cuda", lambda tensor: tensor.is_cuda)
    memory = GraphMemory()

    def at(address: int, *, cuda: bool = True) -> Any:
        return SimpleNamespace(is_cuda=cuda, device=0, data_ptr=lambda: address)

    inside = [n for n in range(0, 1000, 50) if memory.has([at(250), at(n)])]
    assert inside == [300, 350, 600]
    assert not memory.has([])
    assert not memory.has([at(300, cuda=False)])


def test_memory_of_graphs_is_looked_for_again_where_a_device_has_given_some_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that is captured in the middle of a training takes memory of its own."""
    found: list[dict[str, Any]] = []
    given: dict[int, Any] = {0: given_out(1, 10), 1: given_out(1, 10)}
    looked: list[bool] = []

    def snapshot(mempool_id: object = None, include_traces: bool = True) -> list[dict[str, Any]]:
        looked.append(include_traces)
        return list(found)

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", given.get)
    monkeypatch.setattr(multistep_gradients, "on_cuda", lambda tensor: True)
    memory = GraphMemory()

    def has(device: int) -> bool:
        tensor: Any = SimpleNamespace(device=device, data_ptr=lambda: 100)
        return memory.has([tensor])

    assert not has(0)
    assert not has(0)
    assert looked == [False], "once, and without a history that may be long"
    found.append({"address": 100, "total_size": 50, "segment_pool_id": (0, 1)})
    given[0] = given_out(2, 60)
    assert has(0)
    given[0] = given_out(2, 90)  # a segment that has grown
    found.clear()
    assert not has(0)
    assert not has(1), "another device, which is asked for the first time"
    assert not has(0)
    assert not has(1)
    assert len(looked) == 4, "each has given out nothing since"
    given[0] = {}
    assert not has(0)
    assert not has(0)
    assert len(looked) == 6, "who does not tell is looked at each time"


def test_a_gradient_that_somebody_else_writes_to_is_noticed_and_waited_for_from_then_on(
    held: Gate, served: Bench
) -> None:
    held.open()
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, over(3, overlap=True), on_failure=reported.append)
    world.backward()
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    HeldLane.gate = gate = Gate()
    world.optimizer.step()
    for parameter in world.model.parameters():
        parameter.grad.detach().numpy()[...] = 0  # no version moves
    gate.open()
    world.optimizer.zero_grad()
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    ckpt.step()
    states = run_steps(ckpt, world, 3)
    ckpt.close()
    assert [type(error) for error in reported] == [AuditError]
    assert "was written to while it was being copied" in reported[0].message
    assert report_of(ckpt).abandoned == 1
    assert inspect(ckpt).multistep.copies.waits
    (step,) = steps_on_disk(served.run)
    assert restored(served.run, World(seed=9), step) == states[step]


def by_hand(world: World) -> None:
    for parameter in world.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()


def by_its_layers(world: World) -> None:
    """Which are no values of the state, so nothing is in the place of their method."""
    for layer in world.model:
        layer.zero_grad(set_to_none=False)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("zero", [by_hand, by_its_layers])
@pytest.mark.parametrize("last", [False, True], ids=["within", "in the last step"])
def test_a_loop_that_zeroes_gradients_in_its_own_way_is_a_good_loop(
    last: bool, zero: Callable[[World], None], held: Gate, served: Bench
) -> None:
    """The base begins anew; that is said, and never raised."""
    held.open()
    world = World()
    ckpt = start(served, world, over(2 if last else 3, overlap=True))
    save = inspect(ckpt).multistep.last
    assert save is not None
    world.backward()
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    HeldLane.gate = gate = Gate()
    world.optimizer.step()
    zero(world)
    if last:
        ckpt.step()
        gate.open()
        assert isinstance(save.durable.exception(TIMEOUT_S), AuditError)
    else:
        gate.open()
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    with pytest.warns(RuntimeWarning, match="was written to while it was being copied"):
        ckpt.step()
    states = run_steps(ckpt, world, 4)
    ckpt.close()
    (step,) = steps_on_disk(served.run)
    assert restored(served.run, World(seed=9), step) == states[step]


def test_a_gradient_that_is_torn_in_the_last_step_begins_the_base_anew(
    held: Gate, served: Bench
) -> None:
    """Which is found out when the window is over."""
    held.open()
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, over(2, overlap=True), on_failure=reported.append)
    save = inspect(ckpt).multistep.last
    assert save is not None
    world.backward()
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    HeldLane.gate = gate = Gate()
    world.optimizer.step()
    for parameter in world.model.parameters():
        assert parameter.grad is not None
        parameter.grad.detach().numpy()[...] = 0
    world.optimizer.zero_grad()
    ckpt.step()
    gate.open()
    assert isinstance(save.durable.exception(TIMEOUT_S), AuditError)
    states = run_steps(ckpt, world, 2)
    ckpt.close()
    assert [type(error) for error in reported] == [AuditError]
    assert steps_on_disk(served.run) == [5]
    assert restored(served.run, World(seed=9), 5) == states[5]


def test_a_change_behind_everybodys_back_is_found(served: Bench) -> None:
    """I8: what was captured in a step before is compared with what the last step has."""
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, over(3), on_failure=reported.append)
    run_steps(ckpt, world, 1)
    world.model[0].weight.detach().numpy()[...] *= 0.5
    save = inspect(ckpt).multistep.last
    assert save is not None
    states = run_steps(ckpt, world, 1)
    assert isinstance(save.durable.exception(TIMEOUT_S), AuditError)
    states |= run_steps(ckpt, world, 3)
    ckpt.close()
    assert [type(error) for error in reported] == [AuditError]
    (step,) = steps_on_disk(served.run)
    assert restored(served.run, World(seed=9), step) == states[step]


def one_element(tensor: torch.Tensor) -> None:
    """Through torch, between the elements that are compared."""
    with torch.no_grad():
        tensor.view(-1)[1] += 1.0


@pytest.mark.thinned(3)
@pytest.mark.parametrize("rebuild", ["keeper", "recovery"])
@pytest.mark.parametrize("when", ["while it is copied", "behind its update", "at a mark alone"])
def test_a_change_of_one_element_begins_the_base_anew(
    when: str, rebuild: str, served: Bench
) -> None:
    """I8: samples need not hit it; a version counter moves."""
    world = World()
    ckpt = start(served, world, Method(base="multistep", parts=3, rebuild=rebuild))
    if when == "while it is copied":
        one_element(world.model[0].weight)
        states = run_steps(ckpt, world, 1)
    elif when == "behind its update":
        world.train()
        one_element(world.optimizer.state[world.model[0].weight]["exp_avg"])
        ckpt.step()
        states = {3: world.snapshot()}
    else:
        states = run_steps(ckpt, world, 1)
        one_element(world.model[0].weight)
        ckpt.step()
    states |= run_steps(ckpt, world, 4)
    ckpt.close()
    assert report_of(ckpt).abandoned == 1
    found = steps_on_disk(served.run)
    assert len(found) == 1
    assert restored(served.run, World(seed=9), found[0]) == states[found[0]]


@pytest.mark.parametrize("which", ["the last part", "a part before"])
def test_a_change_of_one_element_behind_the_last_mark(
    which: str, held: Gate, served: Bench
) -> None:
    """What is still being copied is torn; what was captured before is not."""
    held.open()
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, over(3), on_failure=reported.append)
    states = run_steps(ckpt, world, 1)
    world.train()
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    HeldLane.gate = gate = Gate()
    save = inspect(ckpt).multistep.last
    assert save is not None
    ckpt.step()
    states[4] = world.snapshot()
    captured = inspect(ckpt).multistep.ended
    assert captured is not None
    first = "model/0.weight" in captured.plan.captured(captured.next + 1)
    last = "model/4.weight" not in captured.plan.captured(captured.next + 1)
    assert first
    assert last
    one_element(world.model[4 if which == "the last part" else 0].weight)
    gate.open()
    if which == "a part before":
        assert save.durable.result(TIMEOUT_S) > 0
    else:
        error = save.durable.exception(TIMEOUT_S)
        assert isinstance(error, AuditError)
        assert "was changed while it was being copied" in error.message
    inspect(ckpt).multistep.end.again = None
    ckpt.close()
    assert len(reported) == (which == "the last part")
    assert all(restored(served.run, World(seed=9), s) == states[s] for s in [4] if not reported)


def test_a_copy_of_the_model_has_none_of_our_guards(held: Gate, served: Bench) -> None:
    held.open()
    world = World()
    ckpt = start(served, world, over(4, overlap=True))
    world.train()
    assert "zero_grad" in vars(world.model)
    other = copy.deepcopy(world.model)
    other(torch.randn(8, 5)).sum().backward()
    world.backward()
    other.zero_grad(set_to_none=False)
    assert world.model[0].weight.grad is not None
    assert bool(world.model[0].weight.grad.any()), "the copy has zeroed its original"
    assert other[0].weight.grad is not None
    assert not bool(other[0].weight.grad.any())
    inspect(ckpt).multistep.go_back()
    ckpt.close()


# --- Deaths -----------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("within", range(4))
def test_a_trainer_that_dies_in_a_window_goes_back_to_the_base_before(
    within: int, served: Bench
) -> None:
    world = World()
    ckpt = opened(served.run, world, method=over(4))
    states = run_steps(ckpt, world, 2)
    ckpt.save().durable.result(TIMEOUT_S)
    begin(ckpt)
    states |= run_steps(ckpt, world, within)
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other, method=over(4))
    recovery = again.resume()
    wanted = 2 if within < 3 else 5  # all of it had been told
    assert recovery.step == wanted
    assert other.snapshot() == states[wanted]
    assert recovery.exact
    again.close()


def test_a_trainer_that_dies_while_its_base_is_made_whole(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, rebuild = Gate(), replica_state.rebuild

    def slow(*about: Any, **options: Any) -> Any:
        gate.wait_at()
        return rebuild(*about, **options)

    monkeypatch.setattr(replica_state, "rebuild", slow)
    world = World()
    ckpt = start(served, world, over(3))
    states = run_steps(ckpt, world, 2)
    assert gate.reached.wait(TIMEOUT_S)
    states |= run_steps(ckpt, world, 2)
    die(ckpt)
    gate.open()
    other = World(seed=9)
    again = opened(served.run, other, method=over(3))
    recovery = again.resume()
    assert (recovery.step, recovery.exact) == (4, True)
    assert other.snapshot() == states[4]
    again.close()


@pytest.mark.parametrize("place", ["rebuild.before", "rebuild.after"])
def test_a_keeper_that_fails_to_make_it_whole_says_so_and_another_is_taken(
    place: str, served: Bench
) -> None:
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, over(3), on_failure=reported.append)
    arm(place, "raise")
    save = inspect(ckpt).multistep.last
    assert save is not None
    states = run_steps(ckpt, world, 2)
    assert save.durable.exception(TIMEOUT_S) is not None
    states |= run_steps(ckpt, world, 3)
    ckpt.close()
    assert any("internal error while assembling a base" in e.message for e in reported)
    (step,) = steps_on_disk(served.run)
    assert restored(served.run, World(seed=9), step) == states[step]


def test_a_forked_child_has_no_part_in_it(served: Bench) -> None:
    import os

    world = World()
    ckpt = start(served, world, over(3, overlap=True))
    states = run_steps(ckpt, world, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            world.train()  # nothing hangs, nothing is told
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    states |= run_steps(ckpt, world, 2)
    ckpt.close()
    assert report_of(ckpt).abandoned == 0
    assert restored(served.run, World(seed=9), 4) == states[4]


# --- What is refused --------------------------------------------------------------------


class Own(torch.optim.SGD):
    """Declared by its user: a keeper does not have it."""


def test_what_a_keeper_cannot_repeat_is_refused_at_once(run_folder: Path) -> None:
    world = World()
    world.state["optimizer"] = torch.optim.LBFGS(world.model.parameters())
    with pytest.raises(UnsupportedStateError, match="cannot follow 1 optimizer"):
        opened(run_folder, world, method="gockpt")
    world.state["optimizer"] = Own(world.model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedStateError, match="cannot follow 1 optimizer"):
        opened(run_folder, world, method="gockpt_o")
    world.state["optimizer"] = torch.optim.SparseAdam(list(world.model.parameters()))
    with pytest.raises(UnsupportedStateError, match="SparseAdam consumes sparse gradients"):
        opened(run_folder, world, method="gockpt")


def test_without_a_keeper_process_it_is_refused(run_folder: Path) -> None:
    keeper = everstep.KeeperOptions(process=False)
    with pytest.raises(OptionError, match="a separate keeper process"):
        opened(run_folder, World(), method="gockpt", keeper=keeper)
