"""``everstep plan schedule``: output, exit status, models of one's own, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from everstep.cli import app
from everstep.cli._common import ExitCode


def run(*words: str, columns: int = 200) -> Result:
    env = {"COLUMNS": str(columns)}
    result = CliRunner(env=env).invoke(app, ["plan", "schedule", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def document(*words: str, status: int = ExitCode.OK) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def factory(folder: Path, body: str, head: str = "") -> str:
    path = folder / "model.py"
    path.write_text(
        f"import torch\n{head}\n"
        "def factory(batch):\n"
        "    model = torch.nn.Linear(64, 64)\n"
        "    x = torch.rand(batch, 64)\n"
        f"    return model, lambda: {body}\n"
    )
    return f"{path}:factory"


def test_feasible() -> None:
    found = document("--model", "alexnet", "--link", "63GB/s")
    assert found["snapshot_bytes"] == 4 * 61_100_840
    assert found["needed_bytes_per_s"] == pytest.approx(44e9, rel=0.01)
    assert found["margin"] == pytest.approx(63 / 44 - 1, rel=0.02)
    peak = found["peak_bytes"]
    assert peak["planned"] == peak["bound"] == peak["without"]
    assert peak["all_at_once"] == peak["without"] + found["snapshot_bytes"]
    assert found["duplicated_bytes"] == 0
    assert found["persist_every_steps"] == 15
    shown = run("--model", "alexnet", "--link", "63GB/s").stdout
    assert "0 B more than without" in shown


def test_infeasible() -> None:
    found = document("--model", "alexnet", "--link", "40GB/s", status=ExitCode.INFEASIBLE)
    assert found["peak_bytes"]["planned"] is None
    assert "44 GB/s" in found["infeasible"]
    assert run("--model", "alexnet", "--link", "40GB/s").exit_code == ExitCode.INFEASIBLE


def test_the_papers_way_duplicates_everything() -> None:
    found = document("--model", "alexnet", "--link", "63GB/s", "--mode", "paper")
    assert found["duplicated_bytes"] == found["snapshot_bytes"]
    assert found["peak_bytes"]["planned"] > found["peak_bytes"]["without"]


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    model = factory(tmp_path, "model(x).square().mean()")
    found = document("--model", model, "--optimizer", "adam", "--gpu", "h100", "--link", "9000GB/s")
    assert found["traced_on"] == "meta"
    assert found["snapshot_bytes"] == 3 * 4 * (64 * 64 + 64) + 2 * 4  # two step counters


def test_data_that_decides(tmp_path: Path) -> None:
    head = "import itertools\ncount = itertools.count()"
    model = factory(tmp_path, "(model(x) if next(count) < 2 else model(model(x))).sum()", head)
    result = run("--model", model)
    assert result.exit_code != ExitCode.OK
    assert "not alike" in result.output


def test_what_has_no_kernel_without_data_is_traced_on_the_cpu(tmp_path: Path) -> None:
    model = factory(tmp_path, "model(x[(x[:, 0] >= 0).nonzero().flatten()]).sum()")
    assert document("--model", model, "--link", "9000GB/s")["traced_on"] == "cpu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "alexnt"], "did you mean 'alexnet'"),
        (["--model", "alexnet", "--gpu", "rtx309"], "did you mean 'rtx3090'"),
        (["--model", "nowhere.py:factory"], "there is no file"),
        (["--model", f"{__file__}:nothing"], "has no function"),
        (["--model", "alexnet", "--link", "40"], ""),
        (["--model", "alexnet", "--batch", "0"], "batch"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code in (ExitCode.USAGE, ExitCode.INFEASIBLE)
    assert message in result.output


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    words = ("--model", "alexnet", "--link", "63GB/s", "--mode", "paper")
    assert run(*words, "--picture", str(path)).exit_code == ExitCode.OK
    assert path.read_bytes().startswith(b"\x89PNG")
    assert run(*words, "--picture", str(tmp_path / "no" / "x.png")).exit_code == ExitCode.USAGE
