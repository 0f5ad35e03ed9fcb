"""The LSN counts optimizer updates, whatever the hooks do (torch fires some of them twice)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from everstep.capture.update_hooks import UpdateHooks
from everstep.errors import StateError
from tests.support.world import TIMEOUT_S


class Twice(torch.optim.SGD):
    """Fires the hooks of its own step and of the one it inherits."""

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Failing(torch.optim.SGD):
    fail = False

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise RuntimeError("no update")
        return super().step(closure)


def watched(kind: type[torch.optim.SGD]) -> tuple[torch.optim.SGD, UpdateHooks]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = kind([parameter], lr=0.1)
    counter = UpdateHooks(lambda key: None)
    counter.watch("o", optimizer)
    return optimizer, counter


@pytest.mark.parametrize("kind", [torch.optim.SGD, Twice, Failing])
def test_one_update_counts_once(kind: type[torch.optim.SGD]) -> None:
    optimizer, counter = watched(kind)
    for expected in (1, 2, 3):
        optimizer.step()
        assert counter.lsn == expected


def test_a_step_that_raised_is_not_counted_and_the_next_one_is() -> None:
    optimizer, counter = watched(Failing)
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="no update"):
        optimizer.step()
    assert counter.lsn == 0
    optimizer.fail = False
    optimizer.step()
    assert counter.lsn == 1


def test_closed_it_counts_no_more() -> None:
    optimizer, counter = watched(torch.optim.SGD)
    counter.close()
    optimizer.step()
    assert counter.lsn == 0


def test_behind_a_hook_that_comes_later_it_is_the_last_again_in_the_next_step() -> None:
    """Only there can it tell, before the update, what is consumed (I2)."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    told: list[str] = []

    def consumed(_: str) -> None:
        told.append("before" if hooks.reports else "behind")

    hooks = UpdateHooks(lambda key: None, consumed, lambda key: told.append("applied"))
    hooks.watch("o", optimizer)
    optimizer.register_step_pre_hook(lambda *_: told.append("theirs"))
    optimizer.step()
    optimizer.step()
    late = ["theirs", "behind", "applied"]
    assert told == [*late, "theirs", "before", "applied"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, Twice])
def test_a_closure_tells_what_is_consumed_whoever_calls_it(kind: type[torch.optim.SGD]) -> None:
    """Also within the call of an inherited ``step()``, which fires the hooks once more."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = kind([parameter], lr=0.1)
    told: list[tuple[str, bool]] = []
    hooks = UpdateHooks(
        lambda key: None,
        lambda key: told.append(("consumed", parameter.grad is not None)),
        lambda key: told.append(("applied", True)),
    )
    hooks.watch("o", optimizer)

    def closure() -> float:
        parameter.grad = torch.ones(1)
        return 0.0

    optimizer.step(closure)
    assert told == [("consumed", True), ("applied", True)]
    assert hooks.lsn == 1


def test_of_two_that_watch_one_optimizer_both_see_gradients_before_the_update() -> None:
    """And not only behind it, where nothing overlaps the update any more."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    seen: dict[str, list[float]] = {"one": [], "other": []}

    def watch(name: str) -> UpdateHooks:
        hooks = UpdateHooks(
            lambda key: None,
            consumed=lambda key: seen[name].append(parameter.item()),
            applied=lambda key: None,
        )
        hooks.watch("o", optimizer)
        return hooks

    both = [watch(name) for name in seen]
    for _ in range(3):
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert seen["one"] == seen["other"] == pytest.approx([0.0, -0.1, -0.2])
    for hooks in both:
        hooks.close()


# --- Several threads ----------------------------------------------------------------------


class Slow(torch.optim.SGD):
    """Says that its update is under way, and waits."""

    begun, goes_on = threading.Event(), threading.Event()

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        self.begun.set()
        assert self.goes_on.wait(TIMEOUT_S)
        return super().step(closure)


def in_two_threads(kind: type[torch.optim.SGD]) -> tuple[list[str], UpdateHooks, Any, Any]:
    """What is told of an update that begins within one of another thread."""
    Slow.begun.clear()
    Slow.goes_on.clear()
    told: list[str] = []
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    counter = UpdateHooks(lambda key: None)
    counter.consumed = lambda key: told.append(f"{key} consumes")
    counter.applied = lambda key: told.append(f"{key} is over, {counter.lsn}")
    counter.lost = told.append
    first, second = kind([parameter], lr=0.1), torch.optim.SGD([parameter], lr=0.1)
    counter.watch("first", first)
    counter.watch("second", second)
    return told, counter, first, second


def test_updates_of_several_threads_are_made_one_after_another() -> None:
    told, counter, first, second = in_two_threads(Slow)
    threads = [threading.Thread(target=one.step, daemon=True) for one in (first, second)]
    threads[0].start()
    assert Slow.begun.wait(TIMEOUT_S)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    assert told == ["first consumes"]
    Slow.goes_on.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    parts = ["first consumes", "first is over, 0", "second consumes", "second is over, 1"]
    assert (told, counter.lsn) == (parts, 2)


def test_nobody_waits_for_an_update_that_has_failed_in_another_thread() -> None:
    told, _, first, second = in_two_threads(Failing)
    first.fail = True

    def fails() -> None:
        with pytest.raises(RuntimeError, match="no update"):
            first.step()

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join(TIMEOUT_S)
    second.step()
    assert told[1:] == ["an update of first has failed", "second consumes", "second is over, 1"]


def test_an_update_that_never_ends_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.capture.update_hooks._TURN_S", 0.01)
    _, _, first, second = in_two_threads(Slow)
    thread = threading.Thread(target=first.step, daemon=True)
    thread.start()
    assert Slow.begun.wait(TIMEOUT_S)
    with pytest.raises(StateError, match="second waits for an update of first"):
        second.step()
    Slow.goes_on.set()
    thread.join(TIMEOUT_S)
