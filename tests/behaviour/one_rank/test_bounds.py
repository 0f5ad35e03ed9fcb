"""What is printed as an upper bound is one: files and their records are measured against it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import everstep
from everstep.errors import OutOfSpaceError
from everstep.options import Budget
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.testing import inspect
from everstep.tiers.options import TierOptions
from everstep.trainer.budget import bounds_of
from tests.support.given import options
from tests.support.world import files_below, size_below

KEEP, EVERY, STEPS = 2, 2, 14


def state_of(layers: int) -> dict[str, object]:
    """Small tensors: their names and digests are as large as they are."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _step(model, optimizer)
    return {"model": model, "optimizer": optimizer, "note": "x" * 5000}


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layers", [1, 40])
def test_run_folder_and_copies_stay_below_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: int
) -> None:
    state, place = state_of(layers), tmp_path / "place"
    place.mkdir()
    with everstep.Checkpointer(
        tmp_path / "run",
        state,
        every=EVERY,
        keep=KEEP,
        tiers=[TierOptions(str(place), keep=1)],
    ) as ckpt:
        bounds = inspect(ckpt).footprint.bounds
        said = capsys.readouterr().err
        ckpt.resume()
        for _ in range(STEPS):
            _step(state["model"], state["optimizer"])  # type: ignore[arg-type]
            ckpt.step()
            ckpt.wait()
            assert size_below(tmp_path / "run") <= bounds.disk_bytes
            assert size_below(place) <= bounds.copies[0][1]
        one = max(path.stat().st_size for path in files_below(tmp_path / "run", "*.safetensors"))
        base = files_below(tmp_path / "run", "manifest.json")[0].parent
        assert one < size_below(base) <= bounds.base_bytes
    assert bounds.copies == ((str(place), 2 * bounds.base_bytes + 8192),)
    assert f"copies in {place}: keep 1, up to" in said


@pytest.mark.parametrize(
    ("keep", "nodes", "method", "bases"),
    [
        (3, (), "lazy", 5),
        (3, ("a", "a"), "lazy", 5),
        (3, ("a", "b"), "lazy", 6),
        (2, ("a", "b"), "lazy", 6),
        (5, ("a", "b"), "lazy", 7),
        (3, ("a", "b"), "gemini", 5),
    ],
)
def test_what_stays_because_peers_have_it_counts(
    keep: int, nodes: tuple[str, ...], method: str, bases: int
) -> None:
    """The newest beside three that a slow peer may have or get, and two that are being written."""
    chosen = options(keep=keep, method=method)
    ranks = RankInfo(0, 2, nodes=nodes)
    shape = State(state_of(1)).survey().shape
    bounds = bounds_of(chosen, shape, ranks)
    assert bounds.disk_bytes == bases * bounds.base_bytes + 8192


def test_it_is_what_the_budget_is_held_against(tmp_path: Path) -> None:
    """A budget that holds the tensors, and not the files, is refused at the start."""
    state = state_of(40)
    tensors = State(state).survey().shape.size_bytes
    with pytest.raises(OutOfSpaceError, match="one being written need"):
        everstep.Checkpointer(tmp_path, state, keep=1, budget=Budget(disk_bytes=2 * tensors + 100))
