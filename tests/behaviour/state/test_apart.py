"""Tensors in plain data that lie in each other's memory come back apart, and that is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.world import opened

SAID = "lie in the memory of others"


def whole() -> torch.Tensor:
    return torch.arange(12.0)


def parted() -> dict[str, Any]:
    t = whole()
    return {"data": {"train": t[:8], "test": t[8:]}}


def same() -> dict[str, Any]:
    t = whole()
    return {"kept": {"best": t, "last": t}}


def at_the_top() -> dict[str, Any]:
    t = whole()
    return {"all": t, "some": t[:4]}


def of_the_model() -> dict[str, Any]:
    model = nn.Linear(3, 4)
    return {"model": model, "seen": [model.weight, model.weight.detach()[0]]}


def empty() -> dict[str, Any]:
    t = whole()
    return {"kept": [t, t[:0], None, 3]}


def inside() -> dict[str, Any]:
    t = whole()
    return {"kept": {"all": t, "some": t[2:4]}}


def turned() -> dict[str, Any]:
    t = whole().reshape(3, 4)
    return {"kept": [t, t.t()]}


def in_two() -> dict[str, Any]:
    t = whole()
    return {"one": {"x": t[:5]}, "two": [t[4:]]}


def in_one_at_the_top() -> dict[str, Any]:
    t = whole()
    return {"all": t, "kept": {"some": t[3:]}}


@pytest.mark.parametrize("make", [parted, same, at_the_top, of_the_model, empty])
def test_what_comes_back_as_it_was(
    make: Callable[[], dict[str, Any]], run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(make, run_folder, exact=True)
    assert SAID not in caplog.text


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (inside, "kept/some in kept/all"),
        (turned, "kept/1 in kept/0"),
        (in_two, "two/0 in one/x"),
        (in_one_at_the_top, "kept/some in all"),
    ],
)
def test_what_comes_back_apart(
    make: Callable[[], dict[str, Any]],
    names: str,
    run_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training would go on otherwise than if nothing had been: that is marked as not exact."""
    check(make, run_folder, exact=False)
    assert f"1 tensor(s) in plain data {SAID} ({names})" in caplog.text


def check(make: Callable[[], dict[str, Any]], run: Path, *, exact: bool) -> None:
    with opened(run, make()) as ckpt:
        ckpt.step()
        ckpt.save()
    state = make()
    memory = {key: one.data_ptr() for key, one in state.items() if isinstance(one, torch.Tensor)}
    with opened(run, state) as ckpt:
        assert ckpt.resume().exact == exact
    for key, address in memory.items():
        assert state[key].data_ptr() == address


def moment(state: dict[str, Any]) -> None:
    model, optimizer = state["model"], state["optimizer"]
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state["kept"]["moment"] = optimizer.state[model.weight]["momentum_buffer"]


def tensor_of_the_top(state: dict[str, Any]) -> None:
    state["kept"]["last"] = state["best"]


@pytest.mark.parametrize("put", [moment, tensor_of_the_top])
def test_what_was_one_tensor_with_another_and_comes_back_apart(
    put: Callable[[dict[str, Any]], None], run_folder: Path
) -> None:
    """What is written to one of the two the other does not get, though the program had them as
    one before."""

    def made() -> dict[str, Any]:
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "best": torch.ones(2), "kept": {}}

    state = made()
    with opened(run_folder, state) as ckpt:
        put(state)
        ckpt.step()
        ckpt.save()
    state = made()
    put(state)
    with opened(run_folder, state) as ckpt:
        found = ckpt.resume()
    assert not found.exact
    assert "were one tensor when saved, and are separate tensors now" in "".join(found.notes)
