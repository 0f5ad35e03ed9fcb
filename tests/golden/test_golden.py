"""Format 1 stays readable: a run folder written once, kept for ever, read by today's code."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from everstep import Checkpointer
from tests.crash.sim.training import freeze
from tests.golden.make_golden import FOLDER, state, tensors


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy, as resuming writes to the folder."""
    return Path(shutil.copytree(FOLDER, tmp_path / "run"))


def restored(golden: Path, step: int | None) -> tuple[Any, dict[str, Any], Any]:
    live = state(99)
    with Checkpointer(golden, live, method="sync", every=None) as ckpt:
        recovery = ckpt.resume(step=step)
        generators = freeze([torch.get_rng_state(), np.random.get_state(), random.getstate()])
    return recovery, live, generators


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_every_base_bit_for_bit(golden: Path, step: int) -> None:
    recovery, live, generators = restored(golden, step)
    assert (recovery.step, recovery.exact, recovery.mismatched) == (step, True, ())
    expected = state(step)
    assert generators == freeze(
        [torch.get_rng_state(), np.random.get_state(), random.getstate()]
    ), "the generators are seeded with the step when the state is built"
    assert freeze(live["model"].state_dict()) == freeze(expected["model"].state_dict())
    assert freeze(live["optimizer"].state_dict()) == freeze(expected["optimizer"].state_dict())
    assert live["model"].first.weight is live["model"].second.weight
    assert same(live["plain"], expected["plain"])


def test_the_newest_is_rolled_forward(golden: Path) -> None:
    """Step 4 has its marker and no manifest; it is of the second timeline."""
    manifest = golden / "timeline-00002/base/000000000004/manifest.json"
    assert not manifest.exists()
    recovery, _, _ = restored(golden, None)
    assert (recovery.step, recovery.timeline, recovery.skipped) == (4, 3, ())
    assert manifest.exists()


def test_the_safetensors_library_opens_every_file() -> None:
    files = sorted(FOLDER.rglob("*.safetensors"))
    assert len(files) == 4
    for step, path in enumerate(files, start=1):
        found = safetensors.torch.load_file(path)
        for name, tensor in tensors(step).items():
            stored = found[f"plain/tensors/{name}"]
            wanted = torch.view_as_real(tensor) if name == "complex128" else tensor
            assert freeze(stored) == freeze(wanted), (step, name)


def same(found: Any, wanted: Any) -> bool:
    """Equal with the same types, nan included, tensors and arrays bit for bit."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, torch.Tensor):
        return bool(found.stride() == wanted.stride() or found.is_contiguous()) and freeze(
            found
        ) == freeze(wanted)
    if isinstance(wanted, np.ndarray):
        return bool(found.dtype == wanted.dtype and (found == wanted).all())
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted) or (wanted != wanted and found != found)


def test_the_comparison_can_fail() -> None:
    assert not same({"a": 1}, {"a": True})
    assert not same([torch.zeros(2)], [torch.tensor([0.0, -0.0])])
    assert not same((1,), [1])
    assert not same(np.zeros(2, ">i2"), np.zeros(2, "<i2"))
