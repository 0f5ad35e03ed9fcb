"""Compressed gradients made dense a block at a time: the very bits of the dense tensor (I2, I9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW

from everstep.compress.quantized import int8
from everstep.compress.sparse import Sparse, topk
from everstep.replay import blocked, engine
from everstep.replay.blocked import Blocked
from everstep.replay.updates import Gradient, Packed, Update
from tests.support.replays import Run, bits, record, replayed, tensors_of

SHAPES = {"matrix": (40, 50), "line": (64 * 9 + 5,), "small": (7,), "image": (4, 6, 5, 3)}
STRAIGHT = {name: shape for name, shape in SHAPES.items() if name != "image"}
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {"topk": lambda t: topk(t, 0.1), "int8": int8}


def packed(tensor: torch.Tensor, form: str) -> Packed:
    return Packed(FORMS[form](tensor.contiguous().view(-1)), tuple(tensor.shape))


@settings(max_examples=80)
@given(
    numel=st.integers(1, 300),
    ends=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    wide=st.booleans(),
    seed=st.integers(0, 9),
)
def test_parts_of_a_sparse_form(
    numel: int, ends: tuple[int, int], dtype: torch.dtype, wide: bool, seed: int
) -> None:
    begin, end = sorted(min(edge, numel) for edge in ends)
    drawn = torch.Generator().manual_seed(seed)
    flat = torch.randn(numel, generator=drawn).to(dtype)
    flat[0] = torch.nan
    positions = (torch.rand(numel, generator=drawn) < 0.3).nonzero().view(-1)
    whole = Packed(Sparse.of(numel, positions, flat[positions]), (numel,))
    whole.form.check()
    if begin < end:
        part = whole.part(slice(begin, end))
        assert part.shape == (end - begin,)
        out = torch.full((end - begin,), 9.0, dtype=torch.float32 if wide else dtype)
        want = whole.dense()[begin:end].to(out.dtype)
        assert torch.equal(bits(part.into(out)), bits(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_an_int8_form(dtype: torch.dtype) -> None:
    flat = torch.randn(1000).to(dtype)
    flat[300] = torch.inf
    whole = packed(flat, "int8")
    assert whole.splits_at(512)
    assert not whole.splits_at(64)
    for begin, end in ((0, 256), (256, 1000), (512, 768), (0, 1000)):
        part = whole.part(slice(begin, end)).into(torch.empty(end - begin, dtype=torch.float32))
        assert torch.equal(bits(part), bits(whole.dense()[begin:end].float()))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each update was applied."""
    taken: list[str] = []
    step = engine.step_over

    class NotingBlocked(Blocked):
        def run(self, updates: Any) -> None:
            taken.extend(["blocks"] * len(updates))
            super().run(updates)

    def noting_step(*args: Any) -> None:
        taken.append("step")
        step(*args)

    monkeypatch.setattr(engine, "Blocked", NotingBlocked)
    monkeypatch.setattr(engine, "step_over", noting_step)
    return taken


def compressed_run(
    kind: Any,
    form: str,
    *,
    flags: dict[str, bool],
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
) -> Run:
    """torch trains on what the compressed gradients stand for; the log has them compressed."""
    logged: list[dict[str, Packed]] = []

    def gradients(step: int) -> dict[str, torch.Tensor]:
        forms = {n: packed(t, form) for n, t in tensors_of(dtype, shapes).items()}
        logged.append(forms)
        return {name: gradient.dense() for name, gradient in forms.items()}

    options = {"momentum": 0.9, "nesterov": True} if kind is SGD else {}
    run = record(
        lambda groups: kind(groups, lr=0.1, **options, **flags),
        dtype=dtype,
        shapes=shapes,
        gradients=gradients,
        steps=6,
    )
    both: list[dict[str, Gradient]] = [{**forms} for forms in logged]
    run.updates[:] = [
        Update(update.lsn, update.optimizer, update.groups, forms)
        for update, forms in zip(run.updates, both, strict=True)
    ]
    return run


@pytest.mark.thinned(9)
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {}], ids=str)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize(("form", "block"), [("topk", 64), ("topk", 1 << 18), ("int8", 256)])
def test_replay_of_compressed_gradients(
    kind: Any,
    flags: dict[str, bool],
    form: str,
    block: int,
    ways: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", block)
    run = compressed_run(kind, form, flags=flags, shapes=STRAIGHT)
    replayed(run, 1, 0, threads=2)
    assert set(ways) == {"blocks"}


@pytest.mark.parametrize(("form", "shapes"), [("int8", STRAIGHT), ("topk", SHAPES)])
def test_where_blocks_cannot_be_cut_out_the_tensor_is_made_dense(
    form: str,
    shapes: dict[str, tuple[int, ...]],
    ways: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """int8 has a scale for 256 elements; and a form is in row-major order, a channels-last
    parameter is not."""
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 64)
    run = compressed_run(AdamW, form, flags={"fused": True}, shapes=shapes)
    replayed(run, 1, 0)
    assert set(ways) == {"step"}


def test_half_precision(monkeypatch: pytest.MonkeyPatch, ways: list[str]) -> None:
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 512)
    for form in FORMS:
        run = compressed_run(
            AdamW, form, flags={"fused": True}, shapes=STRAIGHT, dtype=torch.bfloat16
        )
        replayed(run, 1, 0, threads=2)
    assert set(ways) == {"blocks"}
