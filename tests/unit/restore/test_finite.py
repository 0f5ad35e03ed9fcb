"""Parameters that are not finite are told of; they are looked at as they come, and only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep.restore.load.nonfinite as nonfinite
import everstep.restore.load.targets as targets
from everstep.errors import MismatchError
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


def test_what_was_seen_as_it_came_is_not_looked_at_again(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(run_folder, 1.0, 0, torch.float32)
    came: list[int] = []
    again: list[int] = []

    def seen(data: memoryview, dtype: str) -> bool:
        assert dtype == "F32"
        came.append(data.nbytes // 4)
        return True

    def looked(tensor: torch.Tensor) -> bool:
        again.append(tensor.numel())
        return True

    monkeypatch.setattr(targets, "are_finite", seen)
    monkeypatch.setattr(nonfinite, "is_finite", looked)
    with opened(run_folder, parts()) as ckpt:
        assert ckpt.resume().step == 1
    assert (sum(came), again) == (WIDTH + WIDTH * WIDTH, [])


def test_what_was_seen_to_be_no_number_is_looked_at_again(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(run_folder, float("nan"), 32_768, torch.float32)
    again: list[int] = []

    def looked(tensor: torch.Tensor) -> bool:
        again.append(tensor.numel())
        return True

    monkeypatch.setattr(nonfinite, "is_finite", looked)
    with opened(run_folder, parts()) as ckpt:
        assert ckpt.resume().step == 1
    assert again == [WIDTH * WIDTH]


_CODES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


@pytest.mark.parametrize("dtype", _CODES, ids=str)
def test_bytes_are_judged_as_torch_judges_the_tensor(dtype: torch.dtype) -> None:
    real = torch.float32 if dtype.is_complex else dtype
    info = torch.finfo(real)
    for value in (info.max, info.min, info.tiny, -0.0, 1.0, *map(float, ("nan", "inf", "-inf"))):
        tensor = torch.zeros(70, dtype=real)
        tensor[33] = value
        data = memoryview(bytearray(tensor.view(torch.uint8).tolist()))
        if dtype.is_complex:
            tensor = tensor.view(dtype)
        assert nonfinite.are_finite(data, _CODES[dtype]) == bool(torch.isfinite(tensor).all())
        assert nonfinite.are_finite(data, _CODES[dtype]) == nonfinite.is_finite(tensor)
    assert nonfinite.are_finite(memoryview(b""), _CODES[dtype])


@pytest.mark.parametrize("dtype", ["BOOL", "U8", "I64", "F8_E5M2"])
def test_what_cannot_be_infinite_or_is_never_looked_at_is_finite(dtype: str) -> None:
    assert nonfinite.are_finite(memoryview(b"\xff" * 16), dtype)


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
        left = ring._left + len(ring._free)
        for _ in range(left):
            ring.take(1.0)
        assert left > 1
        assert ring.try_take() is None
