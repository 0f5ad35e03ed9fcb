"""``everstep diff``: what has changed between two steps, in figures that torch computes as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from tests.support.logged import World, invoke, opened, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases 1, 4, 8, 10, and all of the log."""
    run = tmp_path_factory.mktemp("diff") / "run"
    train(run, World(), 10)
    return run


def document(*arguments: Any) -> tuple[int, dict[str, Any]]:
    result = invoke("diff", *arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize(("first", "second"), [(4, 8), (4, 7), (7, 6)])
def test_figures_of_each_tensor(first: int, second: int, run: Path) -> None:
    """Between bases, and steps of the log."""
    status, found = document(run, first, second, "--only", "model")
    assert (status, found["first"]["step"], found["second"]["step"]) == (1, first, second)
    mine = everstep.load(run, first).state_dict("model")
    theirs = everstep.load(run, second).state_dict("model")
    told = {one["name"]: one for one in found["different"]}
    changed = {name for name in mine if not torch.equal(mine[name], theirs[name])}
    assert set(told) == {f"model/{name}" for name in changed}
    assert found["equal"] == len(mine) - len(changed)
    for name in changed:
        one, two = mine[name].double(), theirs[name].double()
        about = told[f"model/{name}"]
        assert about["first"]["norm"] == pytest.approx(one.norm().item())
        assert about["second"]["norm"] == pytest.approx(two.norm().item())
        assert about["change_norm"] == pytest.approx((two - one).norm().item())
        assert about["change_max"] == pytest.approx((two - one).abs().max().item())
        assert about["changed"] == pytest.approx((one != two).double().mean().item())
    ratios = [one["change_norm"] / one["first"]["norm"] for one in found["different"]]
    assert ratios == sorted(ratios, reverse=True)


def test_plain_values(run: Path) -> None:
    _, found = document(run, 4, 8)
    values = {one["name"]: (one["first"], one["second"]) for one in found["values"]}
    assert values["plain/seen"] == ("4", "8")
    assert values["optimizer/param_groups/0/lr"] == ("0.005", "0.0025")


def test_a_step_is_equal_to_itself(run: Path) -> None:
    status, found = document(run, 8, 8)
    assert (status, found["different"], found["values"]) == (0, [], [])
    result = invoke("diff", run, 8, 8)
    assert result.exit_code == 0
    assert "0 tensors differ" in result.stdout


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run whose base 1 has a NaN, an infinity, a new tensor, and one of another shape."""
    world = World(seed=4)
    with torch.no_grad():
        world.model[0].weight[0, 0] = float("nan")
        world.model[0].weight[1, 1] = float("inf")
        world.model[0].bias.zero_()
    world.model.extra = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    world.model[4] = torch.nn.Linear(6, 3)
    with opened(tmp_path / "other", world, method="lazy", log=None) as ckpt:
        ckpt.resume()
        ckpt.save().durable.result(60)
    return tmp_path / "other"


def test_two_runs(run: Path, other: Path) -> None:
    status, found = document(run, 1, 0, "--of", other, "--only", "model")
    assert status == 1
    told = {one["name"]: one for one in found["different"]}
    assert told["model/extra"]["kind"] == "only in the second"
    assert told["model/extra"]["second"]["norm"] == pytest.approx(3**0.5)
    assert told["model/4.weight"]["kind"] == "form"
    weight = told["model/0.weight"]
    assert (weight["second"]["nan"], weight["second"]["inf"]) == (1, 1)
    assert weight["change_norm"] < 100  # of the finite elements
    result = invoke("diff", run, 1, 0, "--of", other, "--only", "model")
    assert "1 NaN and 1 infinite in B" in result.stdout
    assert "float32 (2, 6) in A, float32 (3, 6) in B" in result.stdout


def test_a_nan_is_equal_to_itself(other: Path) -> None:
    assert document(other, 0, 0)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("4", "77"), "neither a base nor the log has step 77"),
        (("4", "8", "--only", "nothing"), "matches nothing"),
        (("4", "8", "--of", "nowhere"), "there is no run"),
    ],
)
def test_refused(arguments: tuple[str, ...], problem: str, run: Path) -> None:
    result = invoke("diff", run, *arguments)
    assert result.exit_code in (1, 2)
    assert problem in result.output
