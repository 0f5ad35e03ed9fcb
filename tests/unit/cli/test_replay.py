"""``everstep replay``: a state without the updates of some steps, and what that changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.logged import World, document, invoke, opened, segments_of, train
from tests.support.world import flip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World, dict[int, Any]]:
    """Plain SGD: what an update does to the weights is its gradient times the rate, no more."""
    run = tmp_path_factory.mktemp("replay") / "run"
    world = World(lambda p: torch.optim.SGD(p, lr=0.125))
    return run, world, train(run, world, 10)


@pytest.fixture
def run(template: tuple[Path, World, dict[int, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(template[0], tmp_path / "run"))


def test_the_change_is_the_update_that_was_left_out(
    run: Path, template: tuple[Path, World, dict[int, Any]]
) -> None:
    found = document("replay", run, "--to", 7, "--drop", 6)
    assert (found["base"]["step"], found["step"], found["dropped"]) == (4, 7, [6])
    assert (found["exact"], found["logged_exact"]) == (False, True)
    changes = {change["entry"]: change for change in found["changes"]}
    gradients = template[1].gradients[5]
    for (key, _), gradient in zip(template[1].model.named_parameters(), gradients, strict=True):
        assert gradient is not None
        rate = 0.125 * 0.5  # StepLR has halved it at step 3, and again at 6, behind the update
        wanted = rate * float(gradient.abs().max())
        if wanted < 1e-6:  # in front of batch norm a bias has none
            continue
        name = f"model/{key}" if key != "3.weight" else "model/tied"
        assert changes[name]["max_abs"] == pytest.approx(wanted, rel=1e-3, abs=1e-7)
        assert 0 < changes[name]["relative"] < 1
    assert not [name for name in changes if "running" in name or "objects" in name]


def test_it_is_said_that_it_is_never_exact(run: Path) -> None:
    result = invoke("replay", run, "--from", 1, "--to", 7, "--drop", "5-6")
    assert result.exit_code == 0
    assert "from base 1 and 6 steps of the log, without the updates of 2 steps" in result.stdout
    assert "never exact: gradients are those of the logged run" in result.stdout
    assert "model/0.weight" in result.stdout
    nothing = invoke("replay", run, "--to", 7)
    assert "0 of" in nothing.stdout
    assert "as logged" in nothing.stdout


def test_the_result_as_a_run(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "without"
    found = document("replay", run, "--to", 7, "--drop", 6, "--out", out)
    record = json.loads((out / "timeline-00001" / "timeline.json").read_text())
    manifest = json.loads((out / "timeline-00001/base/000000000007/manifest.json").read_text())
    assert (record["exact"], manifest["exact"]) == (False, False)
    assert manifest["run"] == found["out_run"]
    world = World(lambda p: torch.optim.SGD(p, lr=0.125), seed=5)
    with opened(out, world) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.exact) == (7, False)
    changed = world.model[0].weight.detach()
    same = document("replay", run, "--to", 7, "--drop", 6)
    wanted = {one["entry"]: one["max_abs"] for one in same["changes"]}["model/0.weight"]
    logged = World(lambda p: torch.optim.SGD(p, lr=0.125), seed=6)
    document("restore", run, "--step", 7, "--out", tmp_path / "as-it-was")
    with opened(tmp_path / "as-it-was", logged) as ckpt:
        ckpt.resume()
    apart = changed.double() - logged.model[0].weight.detach().double()
    assert float(apart.abs().max()) == wanted


def test_numbers_that_are_none(run_folder: Path) -> None:
    """NaN and infinity are no JSON."""
    world = World(lambda p: torch.optim.SGD(p, lr=0.1))
    with opened(run_folder, world, every=1000) as ckpt:
        ckpt.resume()
        for step in range(4):
            for parameter in world.model.parameters():
                parameter.grad = torch.full_like(parameter, float("nan") if step == 2 else 1.0)
            world.optimizer.step()
            ckpt.step()
    result = invoke("replay", run_folder, "--to", 3, "--drop", 3, "--json")
    found = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(text))
    assert found["changes"]
    assert {one["max_abs"] for one in found["changes"]} == {None}
    assert "-" in invoke("replay", run_folder, "--to", 3, "--drop", 3).stdout


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--to", 7, "--drop", "six"], "'six' is neither a step nor a range"),
        (["--to", 7, "--drop", "6-5"], "is neither a step nor a range"),
        (["--to", 7, "--drop", "0"], "is neither a step nor a range"),
        (["--to", 7, "--drop", "1-9999999999"], "at most 1000000 steps"),
        (["--to", 7, "--drop", "8"], "step 8 comes after step 7"),
        (["--to", 7, "--from", 6, "--drop", "5"], "comes too late for step 5"),
        (["--to", 11], "has step 11"),
        (["--to", 7, "--out", "."], "is not empty"),
    ],
)
def test_usage(
    args: list[Any], told: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("replay", run, *args)
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_damaged_log(run: Path) -> None:
    segment = Path(segments_of(run)[2].path) / "rank-00000.safetensors"
    flip(segment, segment.stat().st_size // 2)
    found = document("replay", run, "--to", 6, "--drop", 5, status=1)
    assert segment.parent.name in found["message"]
