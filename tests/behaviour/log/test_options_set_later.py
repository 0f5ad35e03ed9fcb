"""Options with which no log can be replayed, set while training: refused at the step that shows it,
as they are at the start; nothing is lost behind it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import EverstepError, UnsupportedStateError
from everstep.link import recordable
from everstep.replay import exactness
from tests.support.logged import opened
from tests.support.serving import Bench, die, serving
from tests.support.world import TIMEOUT_S, forget


@pytest.fixture(autouse=True)
def without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused kernel writes behind half-precision momenta, to what is not its own: it is not
    called."""
    sgd: Any = importlib.import_module("torch.optim.sgd")
    monkeypatch.setattr(sgd, "_fused_sgd", sgd._single_tensor_sgd)


class World:
    """``gaps``: between the elements of its parameters in memory."""

    def __init__(self, kind: str = "half", *, seed: int = 1) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Module()
        for name in ("one", "two", "three"):
            whole = torch.randn(64, 2, generator=drawn)
            made = {"half": whole.bfloat16(), "gaps": whole[:, 0]}.get(kind, whole)
            self.model.register_parameter(name, torch.nn.Parameter(made))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.seen = 0

    def set(self, **options: Any) -> None:
        self.optimizer.param_groups[0].update(options)

    def train(self) -> None:
        self.seen += 1
        drawn = torch.Generator().manual_seed(self.seen)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype)
        with torch.no_grad():  # what is differentiable cannot change a leaf otherwise
            self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> list[Any]:
        held = [value for values in self.optimizer.state.values() for value in values.values()]
        return [t.detach().clone().tolist() for t in (*self.model.parameters(), *held)]


REFUSED = {
    "half": ({"fused": True}, "fused SGD with momentum in half precision"),
    "gaps": ({"fused": True}, "a parameter with gaps"),
    "plain": ({"differentiable": True}, "part of a graph"),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", REFUSED)
def test_options_set_later(kind: str, run_folder: Path) -> None:
    """A base leads on from there, and the log again once they are set back."""
    (options, why), world, states = REFUSED[kind], World(kind), {}
    with opened(run_folder, world, every=100) as ckpt:
        ckpt.resume()
        for step in range(1, 9):
            if step in (3, 5):
                before = dict.fromkeys(options, False)
                world.set(**(options if step == 3 else before))
            world.train()
            states[step] = world.snapshot()
            if step in (3, 4):
                with pytest.raises(UnsupportedStateError, match=why) as refused:
                    ckpt.step()
                assert "group 0 of optimizer now has options" in str(refused.value)
                assert refused.value.leaves[0][0] == "optimizer"
            else:
                ckpt.step()
        assert ckpt.stats().log_holes >= 2
    forget(run_folder)
    other = World(kind, seed=9)
    with opened(run_folder, other, every=None) as ckpt:
        recovery = ckpt.resume(step=7)
        assert recovery.exact
        assert recovery.replayed > 0
        assert other.snapshot() == states[7]


def test_a_failure_that_does_not_end_training_makes_a_base_due(run_folder: Path) -> None:
    said: list[EverstepError] = []
    world = World()
    with opened(run_folder, world, every=100, on_failure=said.append) as ckpt:
        ckpt.resume()
        for step in range(1, 6):
            if step == 3:
                world.set(fused=True)
            world.train()
            ckpt.step()
            ckpt.wait(TIMEOUT_S)
        bases = ckpt.stats().committed
    assert {type(error) for error in said} == {UnsupportedStateError}
    assert bases >= 3  # of step 1, and of each that is in no log


def test_options_that_a_base_has_brought(run_folder: Path) -> None:
    """They were not there as the Checkpointer was made."""
    world = World()
    world.set(fused=True)
    with opened(run_folder, world, method="lazy", log=None, every=1) as ckpt:
        ckpt.resume()
        world.train()
        ckpt.step()
    forget(run_folder)
    other = World(seed=9)
    with opened(run_folder, other) as ckpt:
        assert ckpt.resume().step == 1
        other.train()
        with pytest.raises(UnsupportedStateError, match="fused SGD with momentum"):
            ckpt.step()
        other.set(fused=False)


def test_a_group_that_is_added_later(run_folder: Path) -> None:
    world = World("plain")
    late = torch.nn.Parameter(torch.ones(4, 2)[:, 0])
    world.state["late"] = torch.nn.ParameterList([late])
    world.set(fused=True)
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        for step in range(3):
            if step == 2:
                world.optimizer.add_param_group({"params": [late], "fused": True})
            if step:
                late.grad = torch.ones(4)
            world.train()
            ckpt.step()
        late.grad = torch.ones(4)
        world.train()
        with pytest.raises(UnsupportedStateError, match="group 1 of optimizer"):
            ckpt.step()
        world.optimizer.param_groups[1]["fused"] = False


def test_they_are_looked_at_once_where_nothing_changes(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is in the training thread, in each step."""
    asked: list[Any] = []

    def ask(kind: Any, options: Any, parameters: Any) -> str | None:
        asked.append(options["fused"])
        return exactness.options_refusal(kind, options, parameters)

    monkeypatch.setattr(recordable, "options_refusal", ask)
    world = World("plain")
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        for step in range(1, 8):
            world.set(lr=0.1 / step)
            if step == 5:
                world.set(fused=True)
            world.train()
            ckpt.step()
        assert ckpt.stats().log_holes == 0
    assert asked[-1] is True
    assert len(asked) <= 4  # what the state consists of changes with the first step


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as bench:
        yield bench


def test_a_base_over_several_steps_is_void(served: Bench) -> None:
    method = everstep.Method(base="multistep", parts=3)
    world, said = World(), list[EverstepError]()
    ckpt = everstep.Checkpointer(
        served.run, world.state, method=method, every=4, on_failure=said.append
    )
    ckpt.resume()
    for step in range(1, 10):
        if step == 6:
            world.set(fused=True)
        world.train()
        ckpt.step()
    ckpt.wait(TIMEOUT_S)
    assert "group 0 of optimizer now has options" in str(said[0])  # not the keeper, later
    die(ckpt)


@pytest.mark.parametrize("nesterov", [True, False])
def test_gradients_in_common_that_are_written_to(nesterov: bool, run_folder: Path) -> None:
    """What torch makes of them, one after the other, no copies of each give again."""
    world = World("plain")
    world.set(nesterov=nesterov, foreach=True)
    heard: list[EverstepError] = []
    with opened(run_folder, world, every=100, on_failure=heard.append) as ckpt:
        ckpt.resume()
        for step in range(1, 7):
            one, two, three = world.model.parameters()
            for parameter in (one, three):
                parameter.grad = torch.full_like(parameter, 0.1 * step)
            two.grad = one.grad if step > 2 else torch.full_like(two, 0.3)
            world.optimizer.step()
            world.optimizer.zero_grad()
            ckpt.step()
    assert bool(heard) == nesterov
    assert all("share memory" in str(error) for error in heard)
    again = World("plain", seed=9)
    with opened(run_folder, again, every=100) as ckpt:
        found = ckpt.resume()
    assert (found.step, found.exact) == (6, True)
    assert again.snapshot() == world.snapshot()
