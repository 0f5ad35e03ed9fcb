"""Copies that are issued at events: which of them an update waits for, what is duplicated, and that
no order of events can tear anything. And the hooks that the events come from."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from everstep.capture import step_events
from everstep.capture.dispatch import Dispatch, UnitCopy
from everstep.capture.step_events import Observed, StepEvents
from everstep.errors import DeadlineError, StateError
from everstep.trainer.schedule.scheduler import Scheduler
from tests.support.events import SIZE, Capture
from tests.support.inside import planted
from tests.support.inside.hooks import hooks_on


def test_units_are_issued_at_their_events_in_order() -> None:
    capture = Capture([0, 2, 2, 5])
    dispatch = capture.dispatch
    counts = []
    for event in range(6):
        dispatch.reach(event)
        counts.append(len(capture.lane.submitted))
    assert counts == [1, 1, 3, 3, 3, 4]
    assert capture.over == 1
    assert [batches[0].begin for batches in capture.lane.submitted] == [0, 8, 16, 24]
    assert capture.right


def test_an_update_waits_for_its_own_copies_only() -> None:
    capture = Capture([0, 0, 0])
    capture.dispatch.reach(0)
    capture.update(0)
    assert capture.dispatch.copies[0].arrived_s
    assert not capture.dispatch.copies[1].arrived_s
    assert len(capture.lane.queue) == 2
    assert capture.right


def test_an_update_that_comes_before_its_event_is_not_torn() -> None:
    """A step that goes another way: what was not issued is issued, and waited for."""
    capture = Capture([0, 3, 4])
    capture.dispatch.reach(0)
    capture.update(2)
    capture.update(1)
    capture.dispatch.reach(4)
    assert capture.over == 1
    assert capture.right


def test_what_is_late_leaves_from_its_duplicate() -> None:
    capture = Capture([0, 5], late=[1])
    capture.dispatch.reach(0)
    capture.update(1)
    assert len(capture.lane.submitted) == 1, "the update was held up"
    assert [copy.duplicate is not None for copy in capture.dispatch.copies] == [False, True]
    capture.dispatch.reach(5)
    assert capture.right


def test_a_duplicate_is_freed_once_it_is_copied() -> None:
    capture = Capture([0, 5], late=[1])
    capture.dispatch.reach(0)
    capture.update(1)
    assert capture.dispatch.copies[1].duplicate
    capture.dispatch.reach(5)
    assert capture.right
    assert capture.dispatch.copies[1].duplicate == ()


def test_an_update_waits_where_there_is_no_memory_for_a_duplicate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture = Capture([0, 5], late=[1])
    capture.dispatch.reach(0)

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        capture.update(1)
    assert capture.duplicates.short
    assert capture.right


def test_duplicates_of_two_captures_are_not_in_memory_together() -> None:
    capture = Capture([0, 5], late=[1])
    first = capture.dispatch
    first.reach(0)
    capture.update(1)
    first.reach(5)  # issued, not copied
    block, capture.block = capture.block, torch.zeros_like(capture.block)
    capture.dispatch = capture.next()
    capture.dispatch.reach(0)
    capture.tensors[1].fill_(50)
    assert capture.dispatch.admit("b", 1.0)
    assert block.tolist() == [1] * SIZE + [2] * SIZE
    capture.dispatch.reach(5)
    assert capture.dispatch.wait(1.0)
    assert capture.block.tolist()[SIZE:] == [50] * SIZE


def test_a_device_that_has_not_copied_a_duplicate_gets_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gate lets the host go on at once: the next update waits for its own copy instead."""
    capture = Capture([0, 5], late=[1])
    first = capture.dispatch
    first.reach(0)
    capture.update(1)
    first.reach(5)
    transfer = first.copies[1].transfer
    assert transfer is not None
    monkeypatch.setattr(transfer, "gate", lambda *_: True)
    capture.dispatch = capture.next()
    capture.dispatch.reach(0)
    assert capture.dispatch.admit("b", 1.0)
    assert capture.dispatch.copies[1].duplicate is None
    assert capture.dispatch.copies[1].issued_s is not None


def any_order(seed: int) -> tuple[Capture, bool]:
    """Events and updates in any order at all, with a lane that copies as late as it may: the
    capture, and whether it is right."""
    random_ = random.Random(seed)
    count = random_.randrange(2, 9)
    events = sorted(random_.randrange(10) for _ in range(count))
    events[0] = 0
    late = [number for number in range(1, count) if random_.random() < 0.4]
    capture = Capture(events, late or [count - 1])
    happenings: list[tuple[str, int]] = [("reach", event) for event in range(10)]
    happenings += [("update", number) for number in range(count)]
    random_.shuffle(happenings)
    capture.dispatch.reach(0)
    for what, number in happenings:
        if what == "reach":
            capture.dispatch.reach(number)
        else:
            capture.update(number)
        if random_.random() < 0.2:
            capture.lane.drain()
    capture.dispatch.flush()
    return capture, capture.right


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_events_and_updates_tears(seed: int) -> None:
    capture, right = any_order(seed)
    assert right
    assert capture.over == 1


@pytest.mark.parametrize("removed", ["admit", "duplicate"])
def test_without_the_guards_some_orders_tear(removed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: an update that waits for nothing; one that thinks that what is late
    was duplicated."""
    if removed == "admit":
        monkeypatch.setattr(Dispatch, "admit", lambda *_: True)
    else:

        def plant(issue: Any) -> Any:
            def forget(self: Dispatch, copy: UnitCopy) -> None:
                copy.duplicate = None
                issue(self, copy)

            return forget

        planted.replace(monkeypatch, Dispatch, "_issue", plant)
    assert not all(any_order(seed)[1] for seed in range(30))


def test_a_copy_that_fails_ends_the_capture_behind_all_others() -> None:
    """Who gave it up would leave its memory to copies that are under way; and it would be asked at
    each update, for ever."""
    capture = Capture([0, 0, 0])
    capture.dispatch.reach(0)

    def fails() -> None:
        capture.lane.transfers[1].end(OSError("the link is gone"))

    capture.lane.queue[1] = fails
    with pytest.raises(OSError, match="the link is gone"):
        capture.dispatch.wait(1.0)
    assert capture.dispatch.complete
    assert not capture.lane.queue
    assert capture.over == 1


def test_an_error_in_a_hook_is_the_captures_and_not_trainings() -> None:
    capture = Capture([0, 3])
    capture.dispatch.reach(0)
    capture.lane.fail = RuntimeError("the link is gone")
    capture.dispatch.reach(3)
    assert capture.over == 1
    assert capture.dispatch.admit("b", 1.0)
    with pytest.raises(RuntimeError, match="the link is gone"):
        capture.dispatch.wait(1.0)


def test_an_interrupt_ends_the_capture_and_goes_on_to_the_user() -> None:
    capture = Capture([0, 3, 4])
    capture.dispatch.reach(0)
    capture.lane.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        capture.dispatch.reach(3)
    capture.lane.fail = None
    capture.dispatch.flush()
    assert len(capture.lane.submitted) == 1
    with pytest.raises(StateError, match="interrupted"):
        capture.dispatch.wait(1.0)


def test_a_signal_handler_that_flushes_as_a_unit_is_issued_does_not_end_it() -> None:
    """Whoever waits for what has ended would not wait for that unit: it would be zeros."""
    capture = Capture([0, 1, 2])
    submit, ended = capture.lane.submit, []

    def handler(*about: Any) -> Any:
        capture.lane.submit = submit  # type: ignore[method-assign]
        capture.dispatch.flush()
        ended.append(capture.over)
        return submit(*about)

    capture.lane.submit = handler  # type: ignore[method-assign]
    capture.dispatch.reach(0)
    assert ended == [0]
    assert capture.over == 1
    assert capture.right


def test_an_interrupt_before_a_unit_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for one that was."""

    def interrupted(_: UnitCopy) -> Any:
        raise KeyboardInterrupt

    capture = Capture([0, 1])
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(UnitCopy, "batches", property(interrupted))
        capture.dispatch.reach(0)
    capture.dispatch.flush()
    with pytest.raises(StateError, match="interrupted"):
        capture.dispatch.wait(1.0)


def test_one_that_has_failed_issues_nothing_more() -> None:
    capture = Capture([0, 3])
    capture.dispatch.fail(DeadlineError("never begun"))
    capture.dispatch.flush()
    assert capture.lane.submitted == []
    assert capture.over == 1
    assert capture.dispatch.complete


# --- Hooks ------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.swapped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = (self.second, self.first) if self.swapped else (self.first, self.second)
        result: torch.Tensor = two(one(x).relu_())
        return result


def ended(events: StepEvents) -> Observed:
    """The step that ends now, in host memory."""
    keys, (observed,) = events.end()
    assert observed.keys == keys
    return observed


class Watched:
    """A model whose events are followed."""

    def __init__(self) -> None:
        self.reached: list[int] = []
        self.strays = 0
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.events = StepEvents(self.reached.append, self._stray)
        self.events.watch({"model": self.model}, {"optimizer": self.optimizer})

    def _stray(self) -> None:
        self.strays += 1

    def step(self, expected: Sequence[int] = (), asked: Sequence[int] = ()) -> Observed:
        self.events.begin(expected, asked)
        self.model(torch.randn(3, 4)).sum().backward()
        self.events.waiting(self.events.update("optimizer"))()
        self.optimizer.step()
        return ended(self.events)


def test_a_step_is_a_sequence_of_events() -> None:
    watched = Watched()
    one, other = watched.step(), watched.step()
    assert len(one.keys) == 1 + 2 + 4 + 1
    assert one.keys == other.keys
    assert len(one.seconds) == len(one.keys)
    assert all(s >= 0 for s in one.seconds)
    assert one.updates == {"optimizer": 7}


def test_events_that_were_asked_for_are_told() -> None:
    watched = Watched()
    keys = watched.step().keys
    watched.step(keys, [2, 5, 7])
    assert watched.reached == [2, 5, 7]
    assert watched.strays == 0


def swap(watched: Watched) -> None:
    watched.model.swapped = True


def evaluate(watched: Watched) -> None:
    watched.model.eval()


def freeze_one(watched: Watched) -> None:
    watched.model.first.bias.requires_grad_(False)
    watched.model.first.bias.grad = None


@pytest.mark.parametrize("change", [swap, evaluate, freeze_one])
def test_another_sequence_is_noticed_once(change: Callable[[Watched], None]) -> None:
    """Modules called in another order, another mode, a parameter without a gradient."""
    watched = Watched()
    keys = watched.step().keys
    watched.optimizer.zero_grad()
    change(watched)
    other = watched.step(keys, range(8)).keys
    assert other != keys
    assert watched.strays == 1
    assert watched.step(other).keys == other
    assert watched.strays == 1


def test_an_evaluation_without_gradients_is_no_part_of_a_step() -> None:
    watched = Watched()
    keys = watched.step().keys
    watched.events.begin(keys, ())
    with torch.no_grad():
        watched.model(torch.randn(3, 4))
    assert watched.events.end() == ((), [])


def test_what_updates_waited_is_no_part_of_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    events = StepEvents(lambda event: None, lambda: None, lambda: now[0])
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events.watch({"model": model}, {"optimizer": optimizer})
    events.begin()
    now[0] = 3.0
    waited = events.waiting(events.update("optimizer"))
    now[0] = 5.0
    waited()
    now[0] = 6.0
    observed = ended(events)
    assert observed.seconds == (3.0, 1.0)
    assert observed.wait_s == 2.0


class Device:
    """The clock of a device that is played: it passes moments when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.asked = 0
        self.passes = False
        self.captures = False
        monkeypatch.setattr(step_events, "moment_of", lambda optimizers: self.moment())

    def moment(self) -> Any:
        self.asked += 1
        if self.captures:
            return None
        at_s = self.now_s
        return SimpleNamespace(
            at_s=at_s,
            query=lambda: self.passes,
            elapsed_time=lambda other: 1e3 * (other.at_s - at_s),
        )


def device_step(device: Device, events: StepEvents, *, timed: bool = True) -> Any:
    events.begin(timed=timed)
    device.now_s += 3.0
    waited = events.waiting(events.update("optimizer"))
    device.now_s += 2.0
    waited()
    device.now_s += 1.0
    return events.end()


def test_times_of_a_device_are_known_once_it_has_passed_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    watched = Watched()
    keys, known = device_step(device, watched.events)
    assert len(keys) == 2
    assert known == []
    device.passes = True
    _, known = device_step(device, watched.events)
    assert [one.seconds for one in known] == [(3.0, 1.0)] * 2
    assert [one.wait_s for one in known] == [2.0] * 2


def test_only_waits_are_measured_where_times_are_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    device.passes = True
    watched = Watched()
    _, (one,) = device_step(device, watched.events, timed=False)
    assert one.seconds == ()
    assert one.wait_s == 2.0
    assert device.asked == 4  # both marks, and both ends of the wait


def test_a_step_in_which_a_graph_is_captured_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.passes = True
    watched = Watched()
    watched.events.begin()
    device.captures = True
    watched.events.waiting(watched.events.update("optimizer"))()
    device.captures = False
    keys, known = watched.events.end()
    assert len(keys) == 2
    assert known == []


def test_copies_of_a_model_have_no_hooks_that_do_anything() -> None:
    """An averaged model is a deep copy; a model may be pickled whole."""
    watched = Watched()
    twin = copy.deepcopy(watched.model)
    pickled = io.BytesIO()
    torch.save(watched.model.first, pickled)
    pickled.seek(0)
    loaded = torch.load(pickled, weights_only=False)
    shallow = copy.copy(watched.model.first)  # as replicas of a module are made
    watched.events.begin()
    shallow(torch.randn(3, 4))
    twin(torch.randn(3, 4)).sum().backward()
    loaded(torch.randn(3, 4)).sum().backward()
    assert watched.events.end() == ((), [])


def test_closed_they_leave_nothing_behind() -> None:
    watched = Watched()
    watched.events.close()
    for owner in [*watched.model.modules(), *watched.model.parameters()]:
        assert not hooks_on(owner)
    watched.events.close()


def test_a_compiled_model_is_compiled_whole() -> None:
    """No hook breaks its graph, and steps are alike."""
    watched = Watched()
    compiled = torch.compile(watched.model, backend="eager", fullgraph=True)

    def step() -> tuple[int, ...]:
        watched.events.begin()
        compiled(torch.randn(3, 4)).sum().backward()
        watched.events.update("optimizer")
        watched.optimizer.step()
        return ended(watched.events).keys

    first = step()
    assert step() == first
    torch.compiler.reset()


def test_at_most_so_many_are_watched() -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(300)])
    events = StepEvents(lambda event: None, lambda: None)
    events.watch({"model": model}, {"o": torch.optim.SGD(model.parameters(), lr=0.1)})
    watched = [hooks_on(owner) for owner in [*model.modules(), *model.parameters()]]
    assert sum(len(hooks) for found in watched for hooks in found.values()) == 2 * 64
    events.close()


def test_updates_of_ever_new_parameters_are_told_apart_and_forgotten() -> None:
    events = StepEvents(lambda event: None, lambda: None)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(10)]
    events.watch({}, {"o": torch.optim.SGD(parameters, lr=0.1)})
    seen: dict[int, int] = {}
    for number in [*range(1, 600), *range(590, 600), *range(1, 9)]:
        for bit, parameter in enumerate(parameters):
            parameter.grad = torch.zeros(1) if number >> bit & 1 else None
        events.begin()
        events.update("o")
        assert seen.setdefault(ended(events).keys[-1], number) == number
    assert len(seen) == 599 + 8  # of the first, nobody knew any more
    assert events.remembered <= 256 + 10 + 1
    events.close()


def test_an_update_waits_for_a_capture_before_the_last_one_too() -> None:
    """A step without an update: at the next one two captures may be under way, and of the newer
    one everything may be duplicated."""
    older, newer = Capture([0]), Capture([0, 5], late=[1])
    newer.units[1] = replace(newer.units[1], owner="a")
    newer.dispatch = newer.next()
    older.dispatch.reach(0)
    state: Any = None
    scheduler = Scheduler(PurePath("run"), state, older.lane)
    scheduler.open = [older.dispatch, newer.dispatch]
    wait_s, late = scheduler.gate("a", 1.0)
    assert older.dispatch.copies[0].arrived_s, "the older capture was not waited for"
    assert not late
    assert wait_s >= 0
