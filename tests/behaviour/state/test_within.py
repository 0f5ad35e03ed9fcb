"""Gradients of what an object of the user's has within it, where training goes back behind a
backward that is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.world import opened


class App:
    """A model and its optimizer in one object, as in torch's tutorials."""

    def __init__(self, how: str = "alone") -> None:
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.own = lambda: (model, optimizer)
        if how == "alone":
            self.model, self.optimizer = model, optimizer
        else:
            self.parts = {"dict": {"a": model, "b": optimizer}, "list": [0, optimizer]}[how]

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = self.own()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = self.own()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def backward(self, scale: float = 1.0) -> None:
        model, _ = self.own()
        (model(torch.ones(2, 4)).square().sum() * scale).backward()

    def update(self) -> None:
        _, optimizer = self.own()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["alone", "dict", "list"])
def test_a_rewind_leaves_nothing_of_a_backward(how: str, run_folder: Path) -> None:
    app, straight = App(how), App(how)
    with opened(run_folder, {"app": app}) as ckpt:
        ckpt.resume()
        for _ in range(2):
            app.backward()
            app.update()
            ckpt.step()
        ckpt.save()
        app.backward(float("nan"))
        found = ckpt.rewind(2)
        assert found.exact
        app.backward()
        app.update()
    for _ in range(3):
        straight.backward()
        straight.update()
    for mine, other in zip(app.own()[0].parameters(), straight.own()[0].parameters(), strict=True):
        assert torch.equal(mine, other)


class Average:
    """Has a model of the state within it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mean = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def test_gradients_of_what_the_state_itself_has_are_as_it_says(run_folder: Path) -> None:
    """Zeros where there were some: an update with weight decay is another one without."""

    def made() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        return {"model": model, "optimizer": optimizer, "average": Average(model)}

    state = made()
    with opened(run_folder, state) as ckpt:
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad(set_to_none=False)
        ckpt.step()
        ckpt.save()
    state = made()
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
    for parameter in state["model"].parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
