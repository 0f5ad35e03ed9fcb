"""``everstep plan schedule``: output, exit status, models of one's own, what it refuses."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from everstep.cli import app
from everstep.cli.common.errors import ExitCode
from everstep.cli.plan.schedule import _MODULE
from everstep.plan.schedule.plan_file import PlanFile


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


@functools.cache
def alexnet() -> dict[str, Any]:
    """Its plain plan."""
    return document("--model", "alexnet", "--link", "63GB/s")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of models are not searched by other tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop(_MODULE, None)


def test_feasible() -> None:
    found = alexnet()
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
    assert "needs 44.1 GB/s" in found["infeasible"]  # rounded up: that is enough
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


def test_a_plan_is_written_and_shown(tmp_path: Path) -> None:
    model = factory(tmp_path, "model(x).square().mean()")
    out = tmp_path / "plan.json"
    words = ["--model", model, "--optimizer", "AdamW", "--link", "9000GB/s", "--out", str(out)]
    shown = run(*words).stdout
    assert "optimizer/state/model.weight/exp_avg" in shown
    assert "forward of model" in shown
    assert 'Method(base="scheduled", plan="' in shown
    plan = PlanFile.decode(out.read_bytes(), "plan.json")
    assert plan.tensors["model/weight"] == 4 * 64 * 64
    assert plan.about["optimizer"] == "AdamW"
    assert plan.peak_bytes["without"] <= plan.peak_bytes["planned"]
    assert sum(copy.end - copy.begin for copy in plan.copies) == sum(plan.tensors.values())


def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    head = "def optimizer(found): return torch.optim.RMSprop(found, lr=0.01, momentum=0.9)"
    model = factory(tmp_path, "model(x).square().mean()", head)
    words = ["--model", model, "--link", "9000GB/s"]
    found = document(*words, "--optimizer", model.replace(":factory", ":optimizer"))
    assert found["snapshot_bytes"] > 3 * 4 * (64 * 64 + 64)


def test_a_step_above_the_limit_of_memory_has_no_plan(tmp_path: Path) -> None:
    peak_bytes = alexnet()["peak_bytes"]["planned"]
    words = ["--model", "alexnet", "--link", "63GB/s", "--memory-limit"]
    assert document(*words, str(peak_bytes))["infeasible"] is None
    out = tmp_path / "plan.json"
    result = run(*words, str(peak_bytes // 2), "--out", str(out))
    assert result.exit_code == ExitCode.INFEASIBLE
    assert "more than the limit of" in result.output
    assert not out.exists()


def test_data_that_decides(tmp_path: Path) -> None:
    head = "import itertools\ncount = itertools.count()"
    model = factory(tmp_path, "(model(x) if next(count) < 2 else model(model(x))).sum()", head)
    result = run("--model", model)
    assert result.exit_code == ExitCode.INFEASIBLE
    assert "two steps of this model differ" in result.output


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
        (["--model", "alexnet", "--optimizer", "adamv"], "did you mean 'adam'"),
        (["--model", "alexnet", "--optimizer", "nowhere.py:o"], "there is no file"),
        (["--model", "alexnet", "--mode", "paper", "--out", "plan.json"], "in the mode direct"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code in (ExitCode.USAGE, ExitCode.INFEASIBLE)
    assert message in result.output


HOSTILE = """
import torch
def raises(batch):
    raise ValueError("my own words")
def ends(batch):
    raise SystemExit(3)
def wrong(batch):
    model, x = torch.nn.Linear(4, 4), torch.rand(batch, 5)
    return model, lambda: model(x).sum()
def nothing(batch):
    return None
def vector(batch):
    model, x = torch.nn.Linear(4, 4), torch.rand(batch, 4)
    return model, lambda: model(x)
value = 5
"""


@pytest.mark.parametrize(
    ("body", "name", "said"),
    [
        (HOSTILE, "raises", "line 4: ValueError: my own words"),
        (HOSTILE, "ends", "line 6: SystemExit: 3"),  # which means another thing
        (HOSTILE, "wrong", "line 9: RuntimeError: mat1 and mat2 shapes"),
        (HOSTILE, "nothing", "returned NoneType, not a model and its loss"),
        (HOSTILE, "vector", "the loss is a tensor of 128"),
        (HOSTILE, "value", "has no function 'value'"),
        ("import no_such_module_here", "f", "line 1: ModuleNotFoundError"),
        ("def f(:", "f", "SyntaxError: invalid syntax"),
        ("raise SystemExit", "f", "line 1: SystemExit"),
    ],
)
def test_what_a_file_raises_is_said(body: str, name: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(body)
    result = run("--model", f"{path}:{name}")
    assert result.exit_code == ExitCode.USAGE, result.output
    assert said in result.output
    assert document("--model", f"{path}:{name}", status=ExitCode.USAGE)["error"] == "OptionError"


def test_our_own_faults_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("ours")

    monkeypatch.setattr("everstep.plan.schedule.trace.state_of", broken)
    model = factory(tmp_path, "model(x).sum()")
    # The innermost frame is this test's, which is not of everstep: as if a file had raised it.
    result = CliRunner().invoke(app, ["plan", "schedule", "--model", model])
    assert result.exit_code == ExitCode.USAGE
    monkeypatch.undo()
    monkeypatch.setattr(
        "everstep.plan.schedule.trace.difference", None
    )  # called by everstep itself
    result = CliRunner().invoke(app, ["plan", "schedule", "--model", model])
    assert isinstance(result.exception, TypeError)


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("x = 1")
    result = run("--model", f"{tmp_path}/model.txt:f")
    assert result.exit_code == ExitCode.USAGE
    assert "is no Python file" in result.output


def test_a_file_is_loaded_as_python_runs_it(tmp_path: Path) -> None:
    """With what lies beside it, and dataclasses whose annotations are strings."""
    (tmp_path / "beside_the_model.py").write_text("WIDTH = 8")
    (tmp_path / "model.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from beside_the_model import WIDTH\n"
        "@dataclass\n"
        "class Config:\n"
        "    width: int = WIDTH\n"
        "def factory(batch):\n"
        "    model, x = torch.nn.Linear(Config().width, 2), torch.rand(batch, WIDTH)\n"
        "    return model, lambda: model(x).sum()\n"
    )
    found = document("--model", f"{tmp_path}/model.py:factory", "--link", "9000GB/s")
    assert found["snapshot_bytes"] == 4 * (8 * 2 + 2)


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    words = ("--model", "alexnet", "--link", "63GB/s", "--mode", "paper")
    assert run(*words, "--picture", str(path)).exit_code == ExitCode.OK
    assert path.read_bytes().startswith(b"\x89PNG")
    assert run(*words, "--picture", str(tmp_path / "no" / "x.png")).exit_code == ExitCode.USAGE
    result = run(*words, "--picture", str(tmp_path / "x.txt"))
    assert result.exit_code == ExitCode.USAGE
    assert "no picture is drawn as '.txt'" in result.output
    (tmp_path / "link.png").symlink_to("none/x.png")
    result = run(*words, "--picture", str(tmp_path / "link.png"))
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "could not draw the picture: No such file" in result.output


OWN_OPERATOR = """
from torch import library

@library.custom_op("everstep_tests_cli::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
twice.register_autograd(lambda context, gradient: gradient * 2)
"""


def test_an_operator_of_ones_own_is_named(tmp_path: Path) -> None:
    model = factory(tmp_path, "twice(model(x)).sum()", OWN_OPERATOR)
    found = document("--model", model, "--link", "9000GB/s", "--batch", "64")
    assert found["traced_on"] == "cpu"
    assert "everstep_tests_cli::twice" in found["notes"][0]


def test_where_data_decide_is_said(tmp_path: Path) -> None:
    head = "import itertools\ncount = itertools.count()"
    model = factory(tmp_path, "(model(x) if next(count) < 2 else model(model(x))).sum()", head)
    shown = run("--model", model).output
    assert "the first difference is at operator 1: aten::sum" in shown
    assert "in the first step, aten::addmm" in shown


def test_without_a_solver_the_greedy_plan_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--model", "alexnet", "--link", "63GB/s", "--mode", "paper", "--exact")
    monkeypatch.setattr("everstep.plan.schedule.exact.has_solver", lambda: False)
    found = document(*words)
    assert "PySCIPOpt" in found["method"]
    assert "greedy" in found["method"]
    assert 0 < found["gap"] < 0.025
    shown = run(*words).stdout
    assert "gap 0." in shown
    assert "not installed" in shown


def test_exact_says_how_it_was_found() -> None:
    pytest.importorskip("pyscipopt")
    words = ("--model", "alexnet", "--link", "63GB/s", "--exact")
    assert "SCIP" in document(*words, "--mode", "paper")["method"]
    assert "nothing to solve" in document(*words)["method"]
    assert alexnet()["method"] == "greedy"


def test_autocast() -> None:
    plain = document("--model", "vgg", "--link", "900GB/s")
    found = document("--model", "vgg", "--link", "900GB/s", "--autocast", "bf16")
    assert found["snapshot_bytes"] == plain["snapshot_bytes"]  # master weights
    assert found["peak_bytes"]["without"] < plain["peak_bytes"]["without"]
    assert found["step_s"] < plain["step_s"]
    assert found["autocast"] == "bf16"


def test_scaler() -> None:
    words = ("--model", "vgg", "--link", "900GB/s", "--autocast", "fp16")
    plain, found = document(*words), document(*words, "--scaler")
    assert found["scaler"]
    assert not plain["scaler"]
    assert found["operators"] > plain["operators"]
    assert found["step_s"] > plain["step_s"]  # all gradients are read and written once more
    assert found["snapshot_bytes"] == plain["snapshot_bytes"] + 2 * 4  # scale and counter
    result = run(*words, "--scaler", "--in-backward")
    assert result.exit_code == ExitCode.USAGE
    assert "too late for updates" in result.output


def test_ranks() -> None:
    words = ("--model", "alexnet", "--link", "63GB/s")
    plain = alexnet()
    found = document(*words, "--ranks", "8", "--network", "10GB/s")
    # 244 MB of gradients in buckets; 7/4 of them sent, which is far longer than backward.
    gradients = plain["snapshot_bytes"]
    assert found["step_s"] > 2 * 7 / 8 * gradients / 10e9
    assert found["peak_bytes"]["without"] >= plain["peak_bytes"]["without"] + gradients
    assert document(*words, "--ranks", "8", "--network", "9TB/s")["step_s"] < found["step_s"] / 4
    assert "go together" in run(*words, "--ranks", "8").output
    assert run(*words, "--ranks", "1", "--network", "1GB/s").exit_code == ExitCode.USAGE


def test_figures_of_ones_own() -> None:
    words = ("--model", "alexnet", "--link", "900GB/s")
    slow = document(*words, "--flops", "1e12", "--memory", "100GB/s")
    assert slow["step_s"] > 5 * document(*words)["step_s"]
    assert "given: flops_per_s, memory_bytes_per_s" in slow["times"]


def test_measured_here(tmp_path: Path) -> None:
    model = factory(tmp_path, "model(x).square().mean()")
    found = document("--model", model, "--gpu", "cpu", "--link", "90GB/s")
    assert "measured on cpu" in found["times"]
    assert found["traced_on"] == "cpu"
    assert "how fast the link is" in run("--model", model, "--gpu", "cpu").output
    assert "nothing can be put" in run("--model", model, "--gpu", "cpu", "--flops", "1").output
    if not torch.cuda.is_available():
        result = run("--model", model, "--gpu", "cuda", "--link", "9GB/s")
        assert result.exit_code == ExitCode.ENVIRONMENT
        assert "no CUDA device" in result.output
