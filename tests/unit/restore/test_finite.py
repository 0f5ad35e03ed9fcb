"""Parameters that are not finite are told of; they are looked at as they come, and only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.errors import MismatchError
from everstep.restore.load.load import is_finite
from everstep.testing import inspect
from tests.support.world import opened

WIDTH = 300  # its weight is looked at in several parts


def parts(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(5)
    model = nn.Linear(WIDTH, WIDTH).to(dtype)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def saved(run: Path, value: float, at: int, dtype: torch.dtype) -> None:
    live = parts(dtype)
    with torch.no_grad():
        live["model"].weight.view(-1)[at] = value
    with opened(run, live) as ckpt:
        ckpt.step()
        ckpt.save()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("at", [0, 32_768, WIDTH * WIDTH - 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_element_is_told_of(
    value: float, at: int, dtype: torch.dtype, run_folder: Path
) -> None:
    saved(run_folder, value, at, dtype)
    with opened(run_folder, parts(dtype)) as ckpt:
        notes = ckpt.resume().notes
    assert any("'model.weight' holds NaN or infinity" in note for note in notes)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64],
    ids=str,
)
def test_extreme_elements_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    real = torch.float32 if dtype.is_complex else dtype
    info = torch.finfo(real)
    for value in (info.max, info.min, info.tiny, -0.0, 1.0, *map(float, ("nan", "inf", "-inf"))):
        tensor = torch.zeros(70, dtype=real)
        tensor[33:35] = value
        if dtype.is_complex:
            tensor = tensor.view(dtype)
        assert is_finite(tensor) == bool(torch.isfinite(tensor).all())
    assert is_finite(torch.zeros(0, dtype=dtype))


def test_a_model_that_does_not_fit_leaves_no_chunk_taken(run_folder: Path) -> None:
    """Its bytes are on their way when that is found."""
    saved(run_folder, 1.0, 0, torch.float32)
    model = nn.Linear(WIDTH, 1)
    other = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with opened(run_folder, other) as ckpt:
        ring = inspect(ckpt).ring
        for _ in range(30):  # more often than there are chunks
            with pytest.raises(MismatchError):
                ckpt.resume()
        left = ring.free_chunks
        for _ in range(left):
            ring.take(1.0)
        assert left > 1
        assert ring.try_take() is None
