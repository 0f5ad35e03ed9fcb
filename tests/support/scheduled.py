"""A training whose steps are captured by a plan (``method="checkflow"``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.world import freeze

OVERFLOWS = (5, 9, 10)  # steps whose gradients are infinite, where there is a scaler


class Loop:
    """A small training; ``kind`` says what is odd about it."""

    def __init__(self, kind: str = "plain", seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(48, 3))
        self.state: dict[str, Any] = {"model": self.model, "seen": {"steps": 0}}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        parameters = list(self.model.parameters())
        if kind == "frozen":
            parameters[0].requires_grad_(False)
        if kind in ("inside", "inside clipped"):
            for number, parameter in enumerate(parameters):
                one = torch.optim.AdamW([parameter], lr=0.05)
                self.optimizers[f"optimizer {number}"] = one
                parameter.register_post_accumulate_grad_hook(self._update_of(one))
        elif kind == "several":
            self.optimizers["first"] = torch.optim.SGD(parameters[::2], lr=0.1, momentum=0.9)
            self.optimizers["second"] = torch.optim.AdamW(parameters[1::2], lr=0.05)
        else:
            flags = {which: True for which in ("foreach", "fused") if which in kind}
            self.optimizers["optimizer"] = torch.optim.AdamW(parameters, lr=0.05, **flags)
        self.state |= self.optimizers
        if self.kind.startswith("scaled"):
            self.state["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    @staticmethod
    def _update_of(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def update(_: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update

    def train(self, step: int) -> None:
        self.state["seen"]["steps"] += 1
        if self.kind == "frozen" and step == 4:
            next(self.model.parameters()).requires_grad_(True)
        if self.kind == "evaluates" and step % 3 == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(torch.randn(4, 48))
            self.model.train()
        for _ in range(3 if self.kind == "accumulates" else 1):
            self.backward(step)
        if self.kind.startswith("inside"):
            return
        if self.kind.startswith("scaled"):
            self._scaled_update()
            return
        for key, optimizer in self.optimizers.items():
            if self.kind == "skips" and step % 4 == 0:
                optimizer.zero_grad()
                continue
            if self.kind == "several" and key == "second" and step % 2:
                continue
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.kind != "zeroes")

    def _scaled_update(self) -> None:
        scaler, optimizer = self.state["scaler"], self.optimizers["optimizer"]
        if self.kind == "scaled clipped":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def backward(self, step: int) -> None:
        result = torch.randn(8, 48)
        layers = list(self.model)
        if self.kind == "wanders" and step in (5, 9, 10, 11):
            layers[0], layers[3] = layers[3], layers[0]
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.kind.startswith("scaled")):
            for layer in layers:
                result = layer(result)
        loss = result.float().square().mean()
        if self.kind.startswith("scaled"):
            # Infinite gradients: the scaler leaves the update out, and halves its scale.
            loss = self.state["scaler"].scale(loss * (torch.inf if step in OVERFLOWS else 1.0))
        loss.backward()

    def snapshot(self) -> Any:
        parts = {key: part.state_dict() for key, part in self.optimizers.items()}
        if "scaler" in self.state:
            parts["scaler"] = self.state["scaler"].state_dict()
        return freeze({"model": self.model.state_dict(), **parts, "seen": self.state["seen"]})
