"""What a loop holds of plain data, wherever in the state that lies, is what it goes on with behind
``resume()``: the same objects, with what was saved in them, where nothing speaks against it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.state.providers.plain import Occurrences
from tests.support.world import assert_same, opened


def resumed(run: Path, saved: dict[str, Any], live: dict[str, Any]) -> None:
    with opened(run, saved) as ckpt:
        ckpt.step()
        ckpt.save()
    with opened(run, live) as ckpt:
        found = ckpt.resume()
        assert (found.step, found.exact, found.notes) == (1, True, ())


def made(value: float) -> dict[str, Any]:
    return {
        "stats": {
            "mean": torch.full((3,), value),
            "turned": torch.full((2, 3), value).t(),
            "seen": np.full(2, value),
            "deep": [{"losses": [value] * int(value), "t": (torch.full((), value), 1)}],
            "ordered": OrderedDict(a=value, b=[value]),
        }
    }


def objects(state: dict[str, Any]) -> list[Any]:
    stats = state["stats"]
    deep = stats["deep"][0]
    kept = [stats, *(stats[key] for key in stats), deep, deep["losses"], deep["t"][0]]
    return [*kept, stats["ordered"]["b"]]


def test_they_are_the_same_objects(run_folder: Path) -> None:
    live = made(2.0)
    held = objects(live)
    resumed(run_folder, made(5.0), live)
    assert all(one is other for one, other in zip(objects(live), held, strict=True))
    assert_same(live, made(5.0))
    assert live["stats"]["turned"].stride() == (1, 3)


@pytest.mark.parametrize("method", ["sync", "logged"])
def test_a_loop_goes_on_with_what_it_holds(method: str, run_folder: Path) -> None:
    """The same losses as if nothing had been, behind a rewind, too."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean, seen, losses = torch.zeros(3), np.zeros(3), list[float]()
    stats = {"mean": mean, "inner": [{"seen": seen, "losses": losses}]}
    state = {"model": model, "optimizer": optimizer, "stats": stats}

    def train() -> float:
        batch = torch.randn(4, 3)
        mean.mul_(0.9).add_(batch.mean(0), alpha=0.1)
        seen[:] = seen * 0.9 + 0.1 * batch.numpy().mean(0)
        loss = model(batch - mean - torch.from_numpy(seen).float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ckpt.step()
        return losses[-1]

    with opened(run_folder, state, method=method, every=2) as ckpt:
        ckpt.resume()
        undisturbed = [train() for _ in range(8)]
        assert ckpt.rewind(4).exact
        assert losses == undisturbed[:4]
        assert [train() for _ in range(4)] == undisturbed[4:]
        assert losses == undisturbed


def two() -> list[torch.Tensor]:
    return [torch.ones(3), torch.full((3,), 2.0)]


def one_twice() -> list[Any]:
    placeholder = torch.zeros(3)
    return [placeholder, placeholder]


def views() -> list[Any]:
    memory = torch.zeros(6)
    return [memory[:3], memory[3:]]


def expanded() -> list[Any]:
    return [torch.zeros(1).expand(3), torch.zeros(3)]


def not_to_be_written() -> list[Any]:
    path = Path(__file__).with_suffix(".py")  # any file that is long enough
    mapped = np.memmap(path, dtype=np.float32, mode="r", shape=(3,))
    return [torch.from_numpy(mapped), torch.zeros(3)]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("make", [one_twice, views, expanded, not_to_be_written])
def test_tensors_that_are_put_there_anew(make: Callable[[], list[Any]], run_folder: Path) -> None:
    """One memory would get what two had; and what cannot be written to ends the process."""
    live: dict[str, Any] = {"kept": make(), "other": [torch.zeros(3)]}
    held, before = live["kept"][0], live["kept"][0].clone()
    resumed(run_folder, {"kept": two(), "other": [torch.ones(3)]}, live)
    assert_same(live["kept"], two())
    assert live["kept"][0] is not held
    assert torch.equal(held, before)


@pytest.mark.parametrize("across", [False, True])
def test_what_was_one_is_one(across: bool, run_folder: Path) -> None:
    """Although there are two to be filled."""
    shared = torch.ones(3)
    live: dict[str, Any] = {"one": {"x": torch.zeros(3), "y": None}, "two": [torch.zeros(3)]}
    if across:
        saved: dict[str, Any] = {"one": {"x": shared, "y": 1}, "two": [shared]}
    else:
        saved = {"one": {"x": shared, "y": shared}, "two": [torch.ones(3)]}
    resumed(run_folder, saved, live)
    live["one"]["x"].add_(1)
    other = live["two"][0] if across else live["one"]["y"]
    assert other.tolist() == [2.0] * 3


def test_containers_and_arrays_that_are_at_two_places(run_folder: Path) -> None:
    """Two different ones may have been saved."""
    inner, array = {"a": 0}, np.zeros(2)
    live: dict[str, Any] = {"one": [inner, array], "two": {"inner": inner, "array": array[:]}}
    saved = {
        "one": [{"a": 1}, np.ones(2)],
        "two": {"inner": {"a": 2}, "array": np.full(2, 2.0)},
    }
    resumed(run_folder, saved, live)
    assert_same(live, saved)
    assert inner == {"a": 0}
    assert array.tolist() == [0.0, 0.0]


def test_other_forms_are_put_there_anew(run_folder: Path) -> None:
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    live: dict[str, Any] = {"kept": [torch.zeros(2), np.zeros(3), frozen, {"a": 1}, [1], (1,)]}
    saved = {"kept": [torch.ones(3), np.ones(2), np.ones(2), [1, 2], {"b": 2}, [3]]}
    resumed(run_folder, saved, live)
    assert_same(live, saved)


def test_whoever_has_no_memory_is_nowhere() -> None:
    empty = torch.zeros(0)
    assert not Occurrences([empty]).can_be_filled(empty)
    assert not Occurrences([torch.zeros(2)]).is_alone(torch.ones(2))
    sparse = torch.zeros(2, 2).to_sparse()
    assert not Occurrences([sparse]).can_be_filled(sparse)
