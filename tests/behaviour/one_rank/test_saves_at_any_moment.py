"""A base is of a step mark, whenever it is asked for: in a signal handler, in another thread,
behind an update that has failed, or an interrupt while it was planned."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from everstep import Checkpointer
from everstep.capture.lane import CpuTransfer
from everstep.errors import AuditError, DamageError, EverstepError, StateError
from everstep.state.providers import optimizers
from everstep.testing import inspect
from everstep.trainer.base import prepared_base as prepared
from everstep.trainer.session import calls as calls_module
from everstep.trainer.session.calls import CallGuard, exclusive
from tests.support.interrupts import started_at
from tests.support.lanes import held
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, freeze, opened, raising

__all__ = ["held"]  # a fixture

METHODS = ["sync", "async", "lazy"]


class World:
    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(6, 8)).square().mean().backward()

    def update(self) -> None:
        self.backward()
        self.optimizer.step()

    def snapshot(self) -> Any:
        return freeze({"m": self.model.state_dict(), "o": self.optimizer.state_dict()})


def restored(run: Path) -> tuple[int, Any]:
    world = World(9)
    with opened(run, world.state) as ckpt:
        found = ckpt.resume()
    return found.step, world.snapshot()


@pytest.mark.thinned(6)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nth", [0, 1])
def test_an_interrupt_while_copies_are_planned(
    nth: int, method: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next base plans anew: nothing planned is taken for what was only begun."""
    world, plan, calls = World(), prepared.plan_batches, [0]

    def interrupted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth + 1:
            raise KeyboardInterrupt
        return plan(*args, **options)

    monkeypatch.setattr(prepared, "plan_batches", interrupted)
    with opened(run_folder, world.state, method=method, every=None) as ckpt:
        world.update()
        ckpt.step()
        if method == "sync":
            calls[0] = 9  # it plans no copies
        elif method == "async" and nth:
            calls[0] = 9  # nothing is copied behind the mark
        else:
            with pytest.raises(KeyboardInterrupt):
                ckpt.save()
        for _ in range(2):
            world.update()
            ckpt.step()
            ckpt.save()
    assert restored(run_folder) == (3, world.snapshot())


class Failing(torch.optim.SGD):
    """Fails half-way when it is told to."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fails:
            next(iter(self.param_groups[0]["params"])).add_(1.0)
            raise RuntimeError("half-way")
        return super().step(closure)


def failing() -> tuple[World, Failing]:
    world = World()
    world.optimizer = optimizer = Failing(world.model.parameters(), lr=0.1)
    world.state["optimizer"] = optimizer
    return world, optimizer


def test_going_back_behind_an_update_that_has_failed(run_folder: Path) -> None:
    """Then the state is that of a step again."""
    world, optimizer = failing()
    with opened(run_folder, world.state, method="sync", every=1) as ckpt:
        world.update()
        ckpt.step()
        at_one = world.snapshot()
        optimizer.fails = True
        with pytest.raises(RuntimeError, match="half-way"):
            world.update()
        ckpt.rewind(1)
        assert world.snapshot() == at_one
        ckpt.save()


def refused_behind_a_failure(world: World, optimizer: Failing, ckpt: Checkpointer) -> None:
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="half-way"):
        world.update()
    with pytest.raises(StateError, match="the state belongs to an unfinished step"):
        ckpt.save()


@pytest.mark.parametrize("method", METHODS)
def test_behind_an_update_that_has_failed(method: str, run_folder: Path) -> None:
    """An emergency save in an ``except`` block would store a mixture; the next step mark is a step
    again."""
    world, optimizer = failing()
    with opened(run_folder, world.state, method=method, every=None) as ckpt:
        for _ in range(2):
            world.update()
            ckpt.step()
            ckpt.save()
        at_two = world.snapshot()
        ckpt.wait()
        refused_behind_a_failure(world, optimizer, ckpt)
        assert world.snapshot() != at_two
        optimizer.fails = False
        ckpt.step()  # the loop goes on: this is what it has
        ckpt.save().durable.result(TIMEOUT_S)
        assert restored(run_folder)[1] == world.snapshot()


def test_where_ranks_have_their_numbers_in_common_none_is_counted(run_folder: Path) -> None:
    """Others have seen no update that failed: a base is refused all the same."""
    world, optimizer = failing()
    with opened(run_folder, world.state, method="sync", every=None) as ckpt:
        inspect(ckpt).updates.counts_failed = False
        world.update()
        ckpt.step()
        refused_behind_a_failure(world, optimizer, ckpt)
        assert inspect(ckpt).updates.lsn == 1


@pytest.mark.parametrize("method", [*METHODS, "logged"])
def test_in_the_middle_of_an_update(method: str, run_folder: Path) -> None:
    """As a signal handler may be."""
    world = World()
    refused: list[str] = []
    with opened(run_folder, world.state, method=method, every=None) as ckpt:
        world.update()
        ckpt.step()

        def within(*_: Any) -> None:
            with pytest.raises(
                StateError, match="save\\(\\) was called while optimizer is updating"
            ) as caught:
                ckpt.save()
            refused.append(str(caught.value))

        handle = world.optimizer.register_step_pre_hook(within)
        world.update()
        handle.remove()
        assert len(refused) == 1
        ckpt.step()
        ckpt.save()
        wanted = world.snapshot()
    assert restored(run_folder) == (2, wanted)


def test_between_before_update_and_after_update(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world.state, method="lazy", every=None) as ckpt:
        world.update()
        ckpt.step()
        ckpt.before_update()
        with torch.no_grad():
            world.model[0].weight.mul_(0.5)
        with pytest.raises(StateError, match="between before_update\\(\\) and after_update\\(\\)"):
            ckpt.save()
        ckpt.after_update()
        with pytest.raises(StateError, match=r"before ckpt\.step"):
            ckpt.save()
        ckpt.step()
        ckpt.save()
        ckpt.before_update()  # and nothing was changed: the next step mark is one all the same
        ckpt.step()
        ckpt.save()
    assert restored(run_folder) == (3, world.snapshot())


@pytest.mark.thinned(15)
@pytest.mark.parametrize("inner", ["save", "step", "resume", "wait", "close"])
@pytest.mark.parametrize("outer", ["step", "save", "resume"])
def test_in_the_middle_of_another_call(
    outer: str, inner: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for what the call below it holds, or has begun."""
    world, refused = World(), list[str]()
    with opened(run_folder, world.state, method="async", every=None) as ckpt:
        world.update()
        ckpt.step()

        def within(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                wanted = f"{inner}\\(\\) was called inside {outer}\\(\\)"
                with pytest.raises(StateError, match=wanted) as caught:
                    getattr(ckpt, inner)()
                refused.append(str(caught.value.hint))
                return function(*args, **options)

            return call

        cadence = inspect(ckpt).cadence
        name = {"step": "mark", "save": "base_taken", "resume": "restored"}[outer]
        world.update()
        with monkeypatch.context() as patched:
            patched.setattr(cadence, name, within(getattr(cadence, name)))
            ckpt.step()
            ckpt.save()
            ckpt.wait()
            ckpt.rewind(2)
        assert len(refused) == 1
        assert "preempt=" in refused[0]
        ckpt.wait()
        wanted = world.snapshot()
    assert restored(run_folder) == (2, wanted)


@pytest.mark.parametrize("inner", ["wait", "close"])
def test_on_failure_is_called_in_the_middle_of_a_call(inner: str, run_folder: Path) -> None:
    world = World()

    def end(error: EverstepError) -> None:
        getattr(ckpt, inner)()

    with opened(run_folder, world.state, method="async", every=None, on_failure=end) as ckpt:
        world.update()
        inspect(ckpt).channel.post(DamageError("as if a disk had said so"))
        with pytest.raises(StateError, match=f"{inner}\\(\\) was called inside step\\(\\)"):
            ckpt.step()
        ckpt.save()
    assert restored(run_folder) == (1, world.snapshot())


def test_an_interrupted_call_is_over(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    with opened(run_folder, world.state, method="async", every=None) as ckpt:
        world.update()

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(CallGuard, "end", lambda self: None)  # an interrupt came before it
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(inspect(ckpt).cadence, "mark", interrupted)
            ckpt.step()
        ckpt.save()
        world.update()
        ckpt.step()
        ckpt.save()
    assert restored(run_folder) == (2, world.snapshot())


def wait_until(reached: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < end_s


def test_an_update_waits_for_a_base_of_another_thread(run_folder: Path) -> None:
    """It is taken from the state as it is; with the update in the middle it would be a mixture."""
    world = World()
    gate, fs = Gate(), HookedFileSystem()
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    with opened(run_folder, world.state, fs=fs, method="sync", every=None) as ckpt:
        world.update()
        ckpt.step()
        world.backward()
        at_one = world.snapshot()
        saving = threading.Thread(target=ckpt.save)
        saving.start()
        assert gate.reached.wait(TIMEOUT_S)
        updating = threading.Thread(target=world.optimizer.step)
        updating.start()
        wait_until(lambda: inspect(ckpt).updates.outermost is not None)
        assert world.snapshot() == at_one
        assert updating.is_alive()
        gate.open()
        for thread in (saving, updating):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        assert world.snapshot() != at_one
        assert restored(run_folder) == (1, at_one)


def test_gradients_are_not_looked_at_in_another_thread(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward, in the one that trains, writes to them without Python's lock: reading them there
    ended the process. Who has one is as it was at the last base."""
    world, who = World(), optimizers.parameters_with_gradient
    asked: list[int] = []

    def noted(*args: Any) -> Any:
        asked.append(threading.get_ident())
        return who(*args)

    monkeypatch.setattr(optimizers, "parameters_with_gradient", noted)
    with opened(run_folder, world.state, method="sync", every=None, keep=9) as ckpt:
        world.update()
        ckpt.step()
        ckpt.save()  # with gradients
        world.update()
        ckpt.step()
        asked.clear()
        world.optimizer.zero_grad()
        saving = threading.Thread(target=ckpt.save)
        saving.start()
        saving.join(TIMEOUT_S)
        assert not saving.is_alive()
        assert not asked
        ckpt.step()
        ckpt.save()
        assert set(asked) == {threading.get_ident()}
    for step, there in ((1, True), (2, True), (3, False)):
        again = World(9)
        with opened(run_folder, again.state) as ckpt:
            assert ckpt.resume(step).step == step
        assert all((p.grad is not None) == there for p in again.model.parameters())


def this_frame() -> FrameType:
    """That of the caller."""
    here = currentframe()
    assert here is not None
    assert here.f_back is not None
    return here.f_back


def test_a_call_waits_for_one_of_another_thread() -> None:
    calls, gate, order = CallGuard(TIMEOUT_S), Gate(), list[str]()
    hurried, hold = CallGuard(0.0), Gate()

    def call(guard: CallGuard, name: str, inside: Callable[[], Any]) -> None:
        guard.begin(name, this_frame())
        order.append(name)
        inside()
        guard.end()

    first = threading.Thread(target=call, args=(calls, "save", gate.wait_at))
    first.start()
    assert gate.reached.wait(TIMEOUT_S)
    second = threading.Thread(target=call, args=(calls, "step", lambda: None))
    second.start()
    third = threading.Thread(target=call, args=(hurried, "save", hold.wait_at))
    third.start()
    assert hold.reached.wait(TIMEOUT_S)
    with pytest.raises(StateError, match="in another thread"):
        hurried.begin("step", this_frame())
    with pytest.raises(StateError, match="optimizer waited 0 s for save"):
        hurried.wait_for_others("optimizer")
    hold.open()
    third.join(TIMEOUT_S)
    hurried.wait_for_others("optimizer")
    assert order == ["save", "save"]
    gate.open()
    for thread in (first, second):
        thread.join(TIMEOUT_S)
    assert order == ["save", "save", "step"]


@pytest.mark.parametrize("writes", [False, True])
def test_counters_are_looked_at_until_all_is_copied(
    writes: bool, held: Gate, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what no update was let at: a GAN's other half, of which one element is written to behind
    the first update. (The copy of the first half is there already, as far as its gate knows.)"""
    torch.manual_seed(1)
    one, two = nn.Linear(50, 50), nn.Linear(50, 50)
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(two.parameters(), lr=0.1)
    state: dict[str, Any] = {"one": one, "two": two, "first": first, "second": second}
    with opened(run_folder, state, method="lazy", on_failure="warn", every=None) as ckpt:
        ckpt.step()
        save = ckpt.save()
        for parameter in one.parameters():
            parameter.grad = torch.zeros_like(parameter)  # its counter moves, and nothing else
        with monkeypatch.context() as patched:
            patched.setattr(CpuTransfer, "gate", lambda self, end, timeout_s: True)
            first.step()
        if writes:
            with torch.no_grad():
                two.weight.view(-1)[1] += 1.0  # between the samples
        held.open()
        error = save.durable.exception(TIMEOUT_S)
        if writes:
            assert isinstance(error, AuditError)
            assert "two/weight" in str(error)
            with pytest.warns(RuntimeWarning, match="was changed while it was being copied"):
                ckpt.wait()
        else:
            assert error is None


@pytest.mark.parametrize("moves", [False, True])
def test_a_parameter_that_moves_to_another_optimizer(
    moves: bool, held: Gate, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its copy is under way: its new optimizer waits for that, too."""
    torch.manual_seed(1)
    one, two = nn.Linear(50, 50), nn.Linear(50, 50)
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(two.parameters(), lr=0.1)
    state: dict[str, Any] = {"one": one, "two": two, "first": first, "second": second}
    ends: list[int] = []
    gate = CpuTransfer.gate

    def seen(self: CpuTransfer, end: int, timeout_s: float) -> bool:
        ends.append(end)
        held.open()
        return gate(self, end, timeout_s)

    monkeypatch.setattr(CpuTransfer, "gate", seen)
    with opened(run_folder, state, method="lazy", every=None) as ckpt:
        ckpt.step()
        wanted = freeze({"one": one.state_dict(), "two": two.state_dict()})
        save = ckpt.save()
        size_bytes = inspect(ckpt).pending[0].prepared.size_bytes
        own = dict(inspect(ckpt).pending[0].prepared.ends)
        if moves:
            second.param_groups[0]["params"] = [two.bias]
            first.add_param_group({"params": [two.weight]})
        for parameter in (*one.parameters(), *two.parameters()):
            parameter.grad = torch.ones_like(parameter)
        first.step()
        assert ends == [size_bytes if moves else own["first"]]
        assert own["first"] < size_bytes
        save.durable.result(TIMEOUT_S)
    for parameter in (*one.parameters(), *two.parameters()):
        parameter.data.zero_()
    second.param_groups[0]["params"] = list(two.parameters())
    del first.param_groups[1:]
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
    assert freeze({"one": one.state_dict(), "two": two.state_dict()}) == wanted


def test_what_is_not_contiguous_is_looked_at(held: Gate, run_folder: Path) -> None:
    """Averaged weights swapped in behind the mark, the usual way, which no counter sees."""
    model = nn.Conv2d(4, 6, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not model.weight.is_contiguous()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with opened(run_folder, state, method="lazy", on_failure="warn", every=None) as ckpt:
        ckpt.step()
        save = ckpt.save()
        model.weight.data.mul_(0.5)
        held.open()
        assert isinstance(save.durable.exception(TIMEOUT_S), AuditError)
        with pytest.warns(RuntimeWarning, match="was changed while it was being copied"):
            ckpt.wait()
        ckpt.step()
        ckpt.save().durable.result(TIMEOUT_S)


class Counted:
    """Its calls exclude each other; ``most`` were in progress at once."""

    def __init__(self) -> None:
        self._calls = CallGuard(TIMEOUT_S)
        self.now = self.most = 0

    @exclusive("call")
    def call(self, last_s: float = 0.0) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        threading.Event().wait(last_s)
        self.now -= 1


def test_two_threads_that_begin_a_call_at_once() -> None:
    """At any line of the one's beginning the other one begins its own."""
    one = Counted()
    for line in itertools.count():
        other = threading.Thread(target=one.call, args=[0.3])
        with started_at(line, CallGuard.begin, other):
            one.call()
        if other.ident is None:
            break
        other.join()
        assert one.most == 1, line
    assert line > 3


def test_behind_the_last_call_no_other_thread_begins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, gate, refused = CallGuard(TIMEOUT_S), Gate(), list[str]()

    def train() -> None:
        calls.begin("save", this_frame())
        gate.wait_at()
        calls.end()
        for call in (
            lambda: calls.begin("step", this_frame()),
            lambda: calls.refuse_within("close"),
        ):
            with pytest.raises(StateError, match="while the interpreter is shutting down") as error:
                call()
            refused.append(error.value.message.partition(" ")[0])

    thread = threading.Thread(target=train)
    thread.start()
    assert gate.reached.wait(TIMEOUT_S)
    with monkeypatch.context() as patch:
        patch.setattr(calls_module, "_LAST_CALL_S", 0.01)
        calls.last()  # what never ends is not waited for
    waited = threading.Timer(0.05, gate.open)
    waited.start()
    calls.last()
    assert gate.is_open, "what is under way comes to its end"
    thread.join(TIMEOUT_S)
    waited.join(TIMEOUT_S)
    assert refused == ["step()", "close()"]
    calls.begin("save", this_frame())
    calls.end()
    calls.refuse_within("close")
    assert not calls.over, "here it may still be closed"
