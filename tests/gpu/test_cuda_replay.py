"""Replay on a CUDA device: torch's own operators, on whole tensors and in slices, and kernels.

What passes here on a machine may be added to the exactness matrix for its device.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from everstep.compress.quantized import BLOCK_NUMEL
from everstep.replay import engine, self_test
from everstep.replay.exactness import MATRIX
from everstep.replay.fused.slices import Sliced, slice_elements
from everstep.replay.updates import Update
from tests.gpu.world import DEVICE, NEEDS_CUDA
from tests.support.replays import Run, assert_same_bits, record, replayed, replayer_at

pytestmark = NEEDS_CUDA

FLAGS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {},  # what torch takes on this device where nothing is said
    "fused": {"fused": True},
}
ROWS = sorted(
    {
        (row.optimizer, row.variant)
        for row in MATRIX
        if row.optimizer != "SparseAdam" and (row.optimizer, row.variant) != ("Adagrad", "fused")
    }
)


def make(name: str, variant: str, groups: list[Any]) -> Optimizer:
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}
    optimizer: Optimizer = getattr(torch.optim, name)(groups, **options, **FLAGS[variant])
    return optimizer


def in_host_memory(run: Run) -> Run:
    """With gradients, and what a scaler gave, where a log has them."""
    run.updates[:] = [
        Update(
            update.lsn,
            update.optimizer,
            update.groups,
            {name: gradient.cpu() for name, gradient in update.gradients.items()},
            None if update.grad_scale is None else update.grad_scale.cpu(),
            None if update.found_inf is None else update.found_inf.cpu(),
        )
        for update in run.updates
    ]
    return run


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many updates each call took slices, tiny ones."""
    taken: list[int] = []

    class NotingSliced(Sliced):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, elements=BLOCK_NUMEL)

        def run(self, updates: Any) -> None:
            taken.append(len(updates))
            super().run(updates)

    monkeypatch.setattr(engine, "Sliced", NotingSliced)
    return taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_a_configuration(name: str, variant: str, dtype: torch.dtype) -> None:
    run = record(lambda groups: make(name, variant, groups), dtype=dtype, device="cuda", late=False)
    replayer = replayed(run, 0, 5)
    assert not replayer.exact.exact  # until it is in the matrix
    replayed(in_host_memory(run), 4, 0)


def test_a_scaler_on_the_device() -> None:
    def scaler(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = 1.0 if step in (4, 7) else 0.0
        return torch.tensor(2.0**step, device="cuda"), torch.tensor(found, device="cuda")

    for name in ("SGD", "Adam", "AdamW"):
        run = record(
            lambda groups, name=name: make(name, "fused", groups),  # type: ignore[misc]
            device="cuda",
            scaler=scaler,
            late=False,
        )
        replayed(run, 2, 0)


LONG = {"long": (5 * 256 + 77,), "short": (3,), "matrix": (40, 30), "bias": (30,), "other": (900,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", FLAGS)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_slices_where_they_are_proven(
    kind: Any, variant: str, dtype: torch.dtype, slices: list[int]
) -> None:
    """The bits are torch's, whether or not the self-test lets slices be used."""
    run = record(
        lambda groups: make(kind.__name__, variant, groups),
        dtype=dtype,
        shapes=LONG,
        device="cuda",
        late=False,
    )
    replayed(in_host_memory(run), 3, 0)
    proven = self_test.sliced_is_exact(kind, run.updates[-1], 0, dtype, torch.device("cuda", 0))
    assert slices == ([9] if proven else [])


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_scaled_and_skipped_in_slices(kind: Any, slices: list[int]) -> None:
    def scaler(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = 1.0 if step in (4, 7) else 0.0
        return torch.tensor(2.0**step, device="cuda"), torch.tensor(found, device="cuda")

    run = record(
        lambda groups: make(kind.__name__, "fused", groups),
        shapes=LONG,
        device="cuda",
        scaler=scaler,
        late=False,
    )
    replayed(in_host_memory(run), 2, 0)


@pytest.mark.parametrize("variant", FLAGS)
def test_slices_as_large_as_the_cache(variant: str) -> None:
    """Several of them, so that both slots of the uploads are used again and again."""
    elements = slice_elements(torch.device("cuda", 0), 16)
    shapes = {"large": (3 * elements + 1001,), "small": (33,), "more": (2 * elements + 7,)}
    run = record(
        lambda groups: make("AdamW", variant, groups),
        shapes=shapes,
        steps=6,
        device="cuda",
        late=False,
    )
    run = in_host_memory(run)
    for _ in range(3):
        replayer, base = replayer_at(run, 1)
        replayer.apply(run.updates[1:])
        assert_same_bits(base.tensors, run.moments[-1].tensors)
        assert_same_bits(replayer.state, run.moments[-1].state)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("variant", FLAGS)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_kernels(kind: Any, variant: str) -> None:
    """As exact as the self-test says, and close in any case. Which are is in the report."""
    run = record(
        lambda groups: make(kind.__name__, variant, groups),
        shapes=LONG,
        device="cuda",
        late=False,
    )
    run = in_host_memory(run)
    replayer, base = replayer_at(run, 3, fast=True)
    replayer.apply(run.updates[3:])
    device = next(iter(base.tensors.values())).device
    found = self_test.kernel_for(kind, run.updates[-1], 0, device, inexact=True)
    assert found is not None, "no kernel comes close"
    print(f"{kind.__name__}, {variant}, {torch.cuda.get_device_name(DEVICE)}: exact {found[1]}")
    if found[1]:
        assert_same_bits(base.tensors, run.moments[-1].tensors)
        assert_same_bits(replayer.state, run.moments[-1].state)
    torch.testing.assert_close(base.tensors, run.moments[-1].tensors, rtol=1e-5, atol=1e-6)
