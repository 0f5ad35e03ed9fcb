"""Captures by a plan where times of a step become known only after later steps, as on a device."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import step_events
from everstep.seams import ManualClock, Seams
from everstep.testing.emulated_link import EmulatedLink
from everstep.trainer.schedule import scheduler
from tests.support.scheduled import Loop

STEPS = 24
ODD = 9


class LateClock:
    """Passes the moments of a step when the next one is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = 0
        monkeypatch.setattr(step_events, "moment_of", lambda optimizers: self.moment())

    def moment(self) -> Any:
        at_s, step = time.perf_counter(), self.step
        return SimpleNamespace(
            at_s=at_s,
            query=lambda: self.step > step,
            elapsed_time=lambda other: 1e3 * (other.at_s - at_s),
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LateClock:
    return LateClock(monkeypatch)


class Momentum(torch.optim.Optimizer):
    """In an odd step its momentum is another tensor afterwards."""

    def __init__(self, parameters: Any, clock: LateClock) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._clock = clock

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            if "m" not in own:
                own["m"] = parameter.grad.clone()
            elif self._clock.step == ODD:
                own["m"] = 0.9 * own["m"] + parameter.grad
            else:
                own["m"].mul_(0.9).add_(parameter.grad)
            parameter.sub_(own["m"], alpha=0.1)


def made(clock: LateClock) -> tuple[nn.Module, Momentum]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    return model, Momentum(model.parameters(), clock)


def state_of(model: nn.Module, optimizer: Momentum) -> list[torch.Tensor]:
    moments = [optimizer.state[one]["m"] for one in model.parameters()]
    return [one.detach().clone() for one in (*model.parameters(), *moments)]


def test_a_plan_that_was_replaced_is_not_followed_with_old_tensors(
    clock: LateClock, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits are never as predicted, so that plans are replaced while steps are under way; then a
    step has other events, and leaves other tensors."""
    monkeypatch.setattr(scheduler, "_TOLERANCE", -1.0)
    monkeypatch.setattr(scheduler, "_TOLERANCE_S", -1.0)
    model, optimizer = made(clock)
    found: dict[int, list[torch.Tensor]] = {}
    seams = Seams(clock=ManualClock(), lane=lambda: EmulatedLink(20e6))
    with everstep.Checkpointer(
        run_folder, {"model": model, "optimizer": optimizer},
        method="checkflow", every=1, keep=100, seams=seams,
    ) as ckpt:  # fmt: skip
        for step in range(1, STEPS + 1):
            clock.step = step
            if step == ODD:
                model[0](torch.randn(2, 64))  # type: ignore[index]
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found[step] = state_of(model, optimizer)
            ckpt.step()
        ckpt.wait()
    clock.step = 0
    model, optimizer = made(clock)
    with everstep.Checkpointer(
        run_folder, {"model": model, "optimizer": optimizer},
        method="lazy", every=None, keep=100,
    ) as ckpt:  # fmt: skip
        for step in range(STEPS, 0, -1):
            ckpt.resume(step)
            now = state_of(model, optimizer)
            assert all(map(torch.equal, now, found[step])), step


def test_steps_that_go_another_way_for_good_get_a_plan(clock: LateClock, run_folder: Path) -> None:
    """Events are timed again as soon as a step has strayed."""
    loop = Loop()
    seams = Seams(clock=ManualClock(), lane=lambda: EmulatedLink(20e6))
    with everstep.Checkpointer(
        run_folder, loop.state, method="checkflow", every=1, keep=100, seams=seams
    ) as ckpt:
        for step in range(1, STEPS + 1):
            clock.step = step
            if step == ODD:
                loop.model[0].requires_grad_(False)
            loop.train(step)
            ckpt.step()
        ckpt.wait()
        stats = ckpt.stats().schedule
    assert stats is not None
    assert stats.plans >= 2
    assert stats.strayed_steps <= 6
