"""A scheduler that is not the one that was saved: torch puts the attributes of one into the other,
and trains on with neither."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from everstep.errors import MismatchError
from tests.support.oracle import save_and_resume

_Make = Callable[[torch.optim.Optimizer], Any]

MAKES: dict[str, _Make] = {
    "StepLR": lambda o: schedules.StepLR(o, 3),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [3, 5]),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 10),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 0.5),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, 20),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.9)], [2]
    ),
}


def trained(make: _Make, steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR's own
            scheduler.step(*([1.0] if isinstance(scheduler, schedules.ReduceLROnPlateau) else []))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": steps}


@pytest.mark.thinned(18)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("live", MAKES)
@pytest.mark.parametrize("saved", MAKES)
def test_another_scheduler_is_a_mismatch(saved: str, live: str, run_folder: Path) -> None:
    state = trained(MAKES[live], 0)
    if saved == live:
        save_and_resume(run_folder, trained(MAKES[saved], 4), state)
        assert state["scheduler"].last_epoch == 4
        return
    with pytest.raises(MismatchError, match=f"scheduler: saved by another scheduler than {live}"):
        save_and_resume(run_folder, trained(MAKES[saved], 4), state)
    assert state["seen"] == 0


def test_all_else_comes_back_where_that_is_wanted(run_folder: Path) -> None:
    state = trained(MAKES["CosineAnnealingLR"], 0)
    recovery = save_and_resume(run_folder, trained(MAKES["StepLR"], 4), state, strict=False)
    assert [name for name, _ in recovery.mismatched] == ["scheduler"]
    assert state["seen"] == 4
    assert state["scheduler"].last_epoch == 0


def test_a_scheduler_of_which_torch_keeps_more_now_is_the_same(run_folder: Path) -> None:
    state = trained(MAKES["StepLR"], 0)
    state["scheduler"].new_in_torch = 1
    save_and_resume(run_folder, trained(MAKES["StepLR"], 4), state)
    assert state["scheduler"].last_epoch == 4


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("live", [False, True])
def test_a_scaler_that_is_on_or_off(saved: bool, live: bool, run_folder: Path) -> None:
    def state(enabled: bool, seen: int) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=float(2 + seen))
        return {"scaler": scaler, "seen": seen}

    mine = state(live, 0)
    if saved == live:
        save_and_resume(run_folder, state(saved, 6), mine)
        assert mine["scaler"].get_scale() == (8.0 if live else 1.0)
        return
    word = "enabled" if saved else "disabled"
    with pytest.raises(
        MismatchError, match=f"scaler: saved by a scaler that is {word}, the live one is not"
    ):
        save_and_resume(run_folder, state(saved, 6), mine)
    assert mine["seen"] == 0
    other = run_folder.with_name("other")
    recovery = save_and_resume(other, state(saved, 6), mine, strict=False)
    assert [name for name, _ in recovery.mismatched] == ["scaler"]
    assert mine["seen"] == 6
