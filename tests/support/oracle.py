"""Torch is the oracle: a resumed training must go on bit for bit as an uninterrupted one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from everstep import Recovery
from tests.crash.sim.training import freeze
from tests.support.world import assert_same, opened, seed_everything

__all__ = ["AFTER", "BEFORE", "State", "check_resume", "model_of", "snapshot", "train"]

State = dict[str, Any]
BEFORE, AFTER = 2, 3


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """BatchNorm for buffers, Dropout for the generator."""
    seed_everything(seed)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)]
    return nn.Sequential(*layers).to(dtype)


def train(state: State, model: str = "model", optimizer: str = "optimizer") -> None:
    """One step that draws on all three generators."""
    module, update = state[model], state[optimizer]
    dtype = next(module.parameters()).dtype
    batch = torch.randn(5, 4).to(dtype) * (1 + random.random())
    target = torch.from_numpy(np.random.rand(5, 2)).to(dtype)

    def closure() -> torch.Tensor:
        update.zero_grad()
        loss: torch.Tensor = (module(batch) - target).square().mean()
        loss.backward()
        return loss

    if isinstance(update, torch.optim.LBFGS):
        update.step(closure)
    else:
        closure()
        update.step()


def snapshot(state: State) -> Any:
    held = {
        key: value.state_dict() if hasattr(value, "state_dict") else value
        for key, value in state.items()
    }
    rng = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    return freeze({**held, "rng": rng})


def check_resume(
    run: Path,
    build: Callable[[int], State],
    step: Callable[[State], None] = train,
    *,
    method: str = "sync",
    before: int = BEFORE,
    warm: int = 0,
) -> State:
    """Trains straight through, and again with an interruption; both must end the same.

    Args:
        before: steps before the interruption.
        warm: steps that the state which is restored into has made on its own.
    """
    state = build(1)
    for _ in range(before + AFTER):
        step(state)
    wanted = snapshot(state)

    state = build(1)
    with opened(run, state, method=method) as ckpt:
        ckpt.resume()
        for _ in range(before):
            step(state)
            ckpt.step()
        ckpt.save()

    state = build(2)
    for _ in range(warm):
        step(state)
    with opened(run, state, method=method) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.exact, recovery.mismatched) == (before, True, ())
        for _ in range(AFTER):
            step(state)
            ckpt.step()
    assert_same(snapshot(state), wanted)
    return state


def save_and_resume(run: Path, saved: dict[str, Any], live: dict[str, Any], **how: Any) -> Recovery:
    with opened(run, saved) as ckpt:
        ckpt.save()
    with opened(run, live) as ckpt:
        return ckpt.resume(**how)
