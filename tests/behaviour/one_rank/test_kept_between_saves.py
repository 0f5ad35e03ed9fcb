"""What is kept from one save or step mark to the next is of the state as it is now."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.arena import Arena
from everstep.errors import OutOfSpaceError
from everstep.link.pool import Block, CapturePool
from everstep.options import Budget, LogOptions
from tests.support.world import TIMEOUT_S, opened


def state_of(**more: Any) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    return {"model": model, "optimizer": optimizer, **more}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


@pytest.mark.parametrize("method", ["lazy", "checkfreq", "async"])
def test_a_parameter_in_other_memory_is_copied_from_there(run_folder: Path, method: str) -> None:
    state, restored = state_of(), state_of()
    with opened(run_folder, state, method=method) as ckpt:
        for value in (1.0, 2.0):
            train(state)
            with torch.no_grad():
                state["model"].weight.data = torch.full((2, 3), value)
            ckpt.step()
            ckpt.save()
            ckpt.wait(TIMEOUT_S)
    with opened(run_folder, restored, method=method) as ckpt:
        ckpt.resume()
    assert restored["model"].weight.eq(2).all()


def test_marks_hold_what_has_come_to_the_state_since_the_first(run_folder: Path) -> None:
    options: dict[str, Any] = {
        "method": "logged",
        "log": LogOptions(to="disk", batch_steps=1),
        "every": None,
    }
    state = state_of(data={"a": torch.zeros(2)})
    with opened(run_folder, state, **options) as ckpt:
        train(state)
        ckpt.step()
        state["data"]["b"] = torch.ones(2)
        train(state)
        ckpt.step()  # takes a base
        for _ in range(2):
            state["data"]["b"] += 1
            train(state)
            ckpt.step()
        ckpt.wait(TIMEOUT_S)
        recovery = ckpt.rewind(3)
        assert (recovery.step, recovery.base_step, recovery.replayed) == (3, 2, 1)
        assert state["data"]["b"].eq(2).all()


def test_a_state_that_grows_beyond_the_disk_budget_is_refused(run_folder: Path) -> None:
    state: dict[str, Any] = {"data": {"a": torch.zeros(10)}}
    with opened(run_folder, state, keep=1, budget=Budget(disk_bytes=1_000_000)) as ckpt:
        ckpt.step()
        ckpt.save()
        state["data"]["b"] = torch.zeros(200_000)
        ckpt.step()
        with pytest.raises(OutOfSpaceError, match="the budget is 1000000"):
            ckpt.save()


def test_views_of_rooms_are_of_these_rooms() -> None:
    pool = CapturePool(Arena.anonymous(200))
    pool.whole[:200] = torch.arange(200, dtype=torch.uint8)
    first = pool.block(Block(10, 20, 0))
    assert first.tolist() == list(range(10, 30))
    assert pool.block(Block(10, 20, 1)) is first
    assert pool.block(Block(10, 30, 0)).tolist() == list(range(10, 40))
    views = [weakref.ref(pool.block(Block(0, size_bytes, 0))) for size_bytes in range(1, 150)]
    assert sum(view() is not None for view in views) <= 64, "rooms of all sizes do not pile up"
