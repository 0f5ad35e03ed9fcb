"""Schedulers, gradient scalers, generators and other objects with a state of their own."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs

from tests.support.oracle import State, check_resume, model_of, train
from tests.support.world import assert_same, opened, seed_everything

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.8),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lrs.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, total_iters=7, power=2),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, total_iters=2), lrs.CosineAnnealingLR(o, 5)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, total_iters=3), lrs.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


@pytest.mark.thinned(18)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_schedulers(name: str, run_folder: Path) -> None:
    def build(seed: int) -> State:
        model = model_of(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {"model": model, "optimizer": optimizer, "schedule": SCHEDULES[name](optimizer)}

    def step(state: State) -> None:
        train(state)
        metric = (torch.rand(()).item(),) if name == "ReduceLROnPlateau" else ()
        state["schedule"].step(*metric)

    check_resume(run_folder, build, step)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rate", ["tensor", "float"])
def test_a_scheduler_over_a_learning_rate_in_a_tensor(rate: str, run_folder: Path) -> None:
    def build(seed: int) -> State:
        model = model_of(seed)
        lr: Any = torch.tensor(0.05) if rate == "tensor" else 0.05
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        return {
            "model": model,
            "schedule": lrs.ExponentialLR(optimizer, 0.9),
            "optimizer": optimizer,
        }

    def step(state: State) -> None:
        train(state)
        state["schedule"].step()

    check_resume(run_folder, build, step)


def test_gradient_scaler(run_folder: Path) -> None:
    """A skipped update (infinite gradients) is no update, before and after resuming."""

    def build(seed: int) -> State:
        model = model_of(seed)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scaler": scaler, "count": [0]}

    def step(state: State) -> None:
        state["optimizer"].zero_grad()
        loss = state["model"](torch.randn(5, 4)).square().mean()
        state["count"][0] += 1
        if state["count"][0] % 3 == 2:
            loss = loss * float("inf")
        state["scaler"].scale(loss).backward()
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()

    state = check_resume(run_folder, build, step)
    assert state["scaler"].get_scale() != 2.0**10


def test_disabled_gradient_scaler(run_folder: Path) -> None:
    with opened(run_folder, {"scaler": torch.amp.GradScaler("cpu", enabled=False)}) as ckpt:
        ckpt.save()
    with opened(run_folder, {"scaler": torch.amp.GradScaler("cpu", enabled=False)}) as ckpt:
        assert ckpt.resume().step == 0


class Loader:
    """A resumable loader with a generator of its own, tensors and nested containers."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.order = torch.randperm(10, generator=self.generator)
        self.position = 0
        self.seen: list[Any] = [{"first": torch.zeros(2), 3: None}, ()]

    def next(self) -> torch.Tensor:
        self.position += 1
        self.seen[0]["first"] += torch.rand(2, generator=self.generator)
        return self.order[self.position % 10] * float(self.rng.random())

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self.generator.get_state(),
            "rng": self.rng.bit_generator.state,
            "order": self.order,
            "position": self.position,
            "seen": self.seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.rng.bit_generator.state = state["rng"]
        self.order, self.position, self.seen = state["order"], state["position"], state["seen"]


class Everything:
    """An object of objects."""

    def __init__(self, seed: int) -> None:
        self.loader, self.best = Loader(seed), torch.tensor(float(seed))

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "best": self.best, "kind": torch.bfloat16}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["kind"] is torch.bfloat16
        self.loader.load_state_dict(state["loader"])
        self.best = state["best"]


def test_objects_of_objects(run_folder: Path) -> None:
    def build(seed: int) -> State:
        model = model_of(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"all": Everything(seed), "model": model, "optimizer": optimizer}

    def step(state: State) -> None:
        scale = state["all"].loader.next()
        train(state)
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.mul_(1 + 1e-3 * float(scale))

    check_resume(run_folder, build, step, method="async")


def test_generators_go_on_where_they_were(run_folder: Path) -> None:
    """Also in the middle of a Gaussian pair, of which the generators keep the second half."""
    seed_everything(5)
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(3)
    with opened(run_folder, {"count": 0}) as ckpt:
        ckpt.save()
    wanted = [random.gauss(0, 1), np.random.standard_normal(), torch.randn(17), random.random()]
    seed_everything(6)
    with opened(run_folder, {"count": 0}) as ckpt:
        ckpt.resume()
    found = [random.gauss(0, 1), np.random.standard_normal(), torch.randn(17), random.random()]
    assert_same(found, wanted)


def test_saving_and_resuming_draw_no_random_numbers(run_folder: Path) -> None:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with opened(run_folder, {"x": torch.ones(3)}, method="async") as ckpt:
        ckpt.resume()
        for _ in range(3):
            ckpt.step()
            ckpt.save()
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert_same(after, before)


def test_nothing_warns(run_folder: Path) -> None:
    """A scheduler complains about a wrong order of calls; resuming must not look like one."""

    def build(seed: int) -> State:
        model = model_of(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {"model": model, "optimizer": optimizer, "s": lrs.StepLR(optimizer, 1)}

    def step(state: State) -> None:
        train(state)
        state["s"].step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_resume(run_folder, build, step)
