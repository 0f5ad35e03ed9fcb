"""A plan from a file (``everstep plan schedule --out``, ``Method(plan=)``): it is followed, every
capture under it is the state of its step, and a file that does not fit is refused or said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everstep
from everstep.errors import FormatError, OptionError
from everstep.options import Method
from everstep.plan.schedule.exact import plan_step
from everstep.plan.schedule.plan_file import PlanFile, plan_file
from everstep.plan.schedule.steps import Device
from everstep.plan.schedule.trace import trace_of
from everstep.seams import ManualClock, Seams
from everstep.testing.emulated_link import EmulatedLink
from tests.support.scheduled import Loop

STEPS = 10


def factory(batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model of a :class:`Loop`, and its loss."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(48, 3))

    def loss() -> Tensor:
        result = torch.randn(batch, 48)
        for layer in model:
            result = layer(result)
        return result.square().mean()

    return model, loss


def planned(kind: str) -> PlanFile:
    """A plan for a link that is just fast enough, so that some tensors are duplicated."""
    trace = trace_of(factory, 8, torch.optim.AdamW, in_backward=kind == "inside")
    device = Device("slow", 1e9, 1e9, 1e9, 1e9, "made up")
    slow = plan_step(trace, 0.0, device, 1e3, "direct", executed=True)
    link = 1.02 * slow.needed_bytes_per_s
    found = plan_step(trace, 0.0, device, link, "direct", executed=True)
    assert found.schedule is not None
    return plan_file(trace, found.problem, found.schedule, {"model": kind})


def written(folder: Path, plan: PlanFile) -> Path:
    path = folder / "plan.json"
    path.write_bytes(plan.encode())
    return path


def train(
    run: Path, plan: Path, kind: str = "plain", loop: Loop | None = None
) -> tuple[dict[int, Any], Any]:
    """Every step durable; the state of each step, and what the schedule did."""
    loop = loop or Loop(kind)
    snapshots = {}
    seams = Seams(clock=ManualClock(), lane=lambda: EmulatedLink(20e6))
    method = Method(base="scheduled", plan=str(plan))
    with everstep.Checkpointer(
        run, loop.state, method=method, every=1, keep=100, seams=seams
    ) as ckpt:
        for step in range(1, STEPS + 1):
            loop.train(step)
            snapshots[step] = loop.snapshot()
            ckpt.step()
        ckpt.wait()
        return snapshots, ckpt.stats().schedule


def assert_restored(run: Path, kind: str, snapshots: dict[int, Any]) -> None:
    other = Loop(kind, seed=99)
    with everstep.Checkpointer(run, other.state, method="lazy", every=None, keep=100) as ckpt:
        for step in range(STEPS, 2, -1):
            ckpt.resume(step)
            assert other.snapshot() == snapshots[step], step


@pytest.mark.parametrize("kind", ["plain", "inside"])
def test_a_plan_is_followed_from_the_second_step_on(
    kind: str, run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = planned(kind)
    late = sum(copy.end - copy.begin for copy in plan.copies if copy.creation_s is not None)
    assert late > 0
    snapshots, stats = train(run_folder, written(tmp_path, plan), kind)
    assert stats.misfit is None
    assert stats.strayed_steps == 0
    assert stats.followed_steps >= STEPS - 3
    # Small tensors are copied together, so that more may be duplicated than planned.
    assert 0 < late <= stats.duplicated_bytes
    assert "plan.json)" in capfd.readouterr().err
    assert_restored(run_folder, kind, snapshots)


def test_a_plan_without_some_bytes_is_not_followed(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bytes that nobody copies would be those of an earlier capture."""
    plan = planned("plain")
    fields = json.loads(plan.encode())
    del fields["copies"][len(fields["copies"]) // 2]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(fields))
    snapshots, stats = train(run_folder, path)
    assert "does not copy byte" in stats.misfit
    assert "does not fit" in capfd.readouterr().err
    assert_restored(run_folder, "plain", snapshots)


def test_a_plan_with_bytes_twice_is_not_followed(run_folder: Path, tmp_path: Path) -> None:
    plan = planned("plain")
    fields = json.loads(plan.encode())
    fields["copies"].insert(3, fields["copies"][2])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(fields))
    snapshots, stats = train(run_folder, path)
    assert "does not copy byte" in stats.misfit
    assert_restored(run_folder, "plain", snapshots)


def test_a_step_that_goes_another_way_is_planned_from_itself(
    run_folder: Path, tmp_path: Path
) -> None:
    """The plan is for updates after backward, and this training updates within it."""
    snapshots, stats = train(run_folder, written(tmp_path, planned("plain")), "inside")
    assert "event" in stats.misfit
    assert stats.plans >= 1
    assert_restored(run_folder, "inside", snapshots)


def test_the_plan_of_another_model_is_refused_and_leaves_nothing(
    run_folder: Path, tmp_path: Path
) -> None:
    loop = Loop()
    loop.model.append(nn.Linear(3, 3))
    path = written(tmp_path, planned("plain"))
    with pytest.raises(OptionError, match=r"plan of another model: model/13.weight has 36 bytes"):
        train(run_folder, path, loop=loop)
    assert not run_folder.exists()


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (None, OptionError, "there is no such file"),
        ("{}", FormatError, "is not a plan"),
        ("not json", FormatError, "is not a plan"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(
    text: str | None, error: type[Exception], said: str, run_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=said):
        train(run_folder, path)
    assert not run_folder.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "has version 2"),
        ({"events": ["step mark"]}, "contradicts itself"),
        ({"tensors": {}}, "contradicts itself"),
        ({"more": 1}, "is not a plan"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change: dict[str, Any], said: str) -> None:
    fields = json.loads(planned("plain").encode()) | change
    with pytest.raises(FormatError, match=said):
        PlanFile.decode(json.dumps(fields).encode(), "plan.json")


def test_only_scheduled_captures_follow_a_plan() -> None:
    with pytest.raises(OptionError, match="base='scheduled'"):
        Method(base="lazy", plan="plan.json")
