"""Optimizers whose state_dict() gives their state in a form of their own: they, and nobody else,
say what becomes of it as it is loaded; what is less than training has is marked as not exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import EverstepError, UnsupportedStateError
from everstep.state.providers.encodings import Encodings
from everstep.testing import inspect
from tests.support.following import opened as following
from tests.support.serving import serving
from tests.support.world import freeze, opened

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def in_form(state_dict: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    def of(values: dict[str, Any]) -> dict[str, Any]:
        return {key: form(value) if key in MOMENTS else value for key, value in values.items()}

    state = {number: of(values) for number, values in state_dict["state"].items()}
    return {**state_dict, "state": state}


def words(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.int32)


def numbers(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.float32)


class Packed(torch.optim.AdamW):
    """Decodes before torch's part."""

    def state_dict(self) -> dict[str, Any]:
        return in_form(super().state_dict(), words)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(in_form(state_dict, numbers))


class Wide(torch.optim.SGD):
    """Decodes behind torch's part."""

    def state_dict(self) -> dict[str, Any]:
        return in_form(super().state_dict(), torch.Tensor.double)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for values in self.state.values():
            values.update({key: value.float() for key, value in values.items() if key in MOMENTS})


def hooked(optimizer: torch.optim.Optimizer, save: Any, load: Any = None) -> torch.optim.Optimizer:
    optimizer.register_state_dict_post_hook(lambda _, found: in_form(found, save))
    if load is not None:
        optimizer.register_load_state_dict_pre_hook(lambda _, given: in_form(given, load))
    return optimizer


def without_moments(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "state": {}}


def dropping(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.register_state_dict_post_hook(lambda _, found: without_moments(found))
    return optimizer


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


LOSSLESS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "class, before": lambda ps: Packed(ps, lr=0.01),
    "class, behind": lambda ps: Wide(ps, lr=0.1, momentum=0.9),
    "hooks": lambda ps: hooked(adamw(ps), words, numbers),
    "clones": lambda ps: hooked(adamw(ps), torch.clone),
}
LOSSY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rounded": lambda ps: hooked(adamw(ps), torch.Tensor.bfloat16),
    "rounded, of SGD": lambda ps: hooked(sgd(ps), torch.Tensor.bfloat16),
    "rounded, in the same dtype": lambda ps: hooked(sgd(ps), lambda v: v.bfloat16().float()),
    "dropped": dropping,
}


class World:
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], *, dtype: Any = None) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(6, 3).to(dtype or torch.float32)
        self.optimizer = make(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: int, ckpt: Any = None) -> list[float]:
        losses = []
        for _ in range(steps):
            batch = torch.randn(5, 6, dtype=self.model.weight.dtype)
            loss = self.model(batch).square().mean()
            losses.append(loss.item())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if ckpt is not None:
                ckpt.step()
        return losses

    def moments(self) -> Any:
        return freeze([dict(values) for values in self.optimizer.state.values()])


def resumed(make: Callable[[Any], torch.optim.Optimizer], run: Path, method: str) -> Any:
    """Losses behind step 4 of a run that was resumed there, and whether that was called exact."""
    world = World(make)
    with opened(run, world.state, method=method) as ckpt:
        world.train(4, ckpt)
        ckpt.save()
    world = World(make)
    with opened(run, world.state, method=method) as ckpt:
        found = ckpt.resume()
        assert found.step == 4
        return world.train(4, ckpt), found.exact


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["sync", "lazy"])
@pytest.mark.parametrize("kind", LOSSLESS)
def test_what_it_makes_of_its_own_form(kind: str, method: str, run_folder: Path) -> None:
    undisturbed = World(LOSSLESS[kind]).train(8)
    assert resumed(LOSSLESS[kind], run_folder, method) == (undisturbed[4:], True)


@pytest.mark.parametrize("kind", LOSSY)
def test_what_is_less_than_training_has(
    kind: str, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes back as it does with torch's own load_state_dict(), and is marked as not exact."""
    world = World(LOSSY[kind])
    world.train(4)
    saved = copy.deepcopy((world.model.state_dict(), world.optimizer.state_dict()))
    random = torch.get_rng_state()
    again = World(LOSSY[kind])
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    torch.set_rng_state(random)
    wanted = again.train(4)
    assert resumed(LOSSY[kind], run_folder, "sync") == (wanted, False)
    assert "state_dict() of 'optimizer' does not keep" in caplog.text
    assert "not called exact" in caplog.text


def test_what_it_decodes_keeps_its_dtype(run_folder: Path) -> None:
    """torch would cast float32 moments to the dtype of their parameters, decoded ones, too."""

    class Precise(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    moment = self.state[parameter].setdefault(
                        "exp_avg", torch.zeros_like(parameter, dtype=torch.float32)
                    )
                    with torch.no_grad():
                        moment.mul_(0.9).add_(parameter.grad.float())
                        parameter.sub_(moment * 0.01)

    make = lambda ps: hooked(Precise(ps, lr=0.1), words, numbers)  # noqa: E731
    world = World(make, dtype=torch.bfloat16)
    with opened(run_folder, world.state) as ckpt:
        world.train(3, ckpt)
        ckpt.save()
    wanted = world.moments()
    again = World(make, dtype=torch.bfloat16)
    with opened(run_folder, again.state) as ckpt:
        assert ckpt.resume().exact
    assert again.moments() == wanted


@pytest.mark.parametrize("kind", ["hooks", "rounded"])
def test_a_log_is_refused(kind: str, run_folder: Path) -> None:
    """Whoever replays it, a keeper, or a command, has no optimizer that could read that form."""
    make = {**LOSSLESS, **LOSSY}[kind]
    world = World(make)
    with opened(run_folder, world.state, method="logged") as ckpt:
        with pytest.raises(UnsupportedStateError, match="encodes the optimizer's state") as caught:
            world.train(2, ckpt)
        assert caught.value.hint == 'method="lazy" needs no log'
        heard: list[EverstepError] = [caught.value]
    assert [leaf for leaf, _ in heard[0].leaves] == ["optimizer"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["none", "hooks"])
def test_bases_are_of_one_step(kind: str, run_folder: Path) -> None:
    """Nobody but the optimizer could bring the parts of one to the same step."""
    make = {"none": adamw, **LOSSLESS}[kind]
    world = World(make)
    over = everstep.Method(base="multistep", parts=3)
    with serving(run_folder) as bench:
        with following(bench.run, world, method=over, every=4) as ckpt:
            world.train(12, ckpt)
            assert inspect(ckpt).multistep is not None
            assert (inspect(ckpt).multistep.stats.windows > 0) == (kind == "none")
            ckpt.save()
        again = World(make)
        with opened(bench.run, again.state) as ckpt:
            assert ckpt.resume().step == 12
    assert again.moments() == world.moments()


def test_zeros_say_nothing_about_what_is_lost() -> None:
    """Behind the first step of a parameter that the loss does not depend on, say."""
    world = World(LOSSY["rounded, of SGD"])
    world.train(1)
    moments = world.optimizer.state[world.model.weight]["momentum_buffer"]
    kept = moments.clone()
    encodings, found = Encodings(), world.optimizer.state_dict()
    moments.zero_()
    encodings.look(world.optimizer, found["state"], [0, 1])
    assert encodings.lossy == [(1, "momentum_buffer")]
    moments.copy_(kept)
    encodings.look(world.optimizer, world.optimizer.state_dict()["state"], [0, 1])
    assert (0, "momentum_buffer") in encodings.lossy
