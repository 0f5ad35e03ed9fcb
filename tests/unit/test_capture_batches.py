"""What is copied where: against torch itself, for every kind of tensor; and what is written
while it is still arriving: never a byte that is not there yet."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.capture import batches
from everstep.capture.batches import plan_batches, run_batch
from everstep.capture.lane import CpuLane
from everstep.format.header import ShardIdentity
from everstep.state.layout import ShardLayout, plan_shards
from everstep.state.tensors import DTYPE_CODES, byte_view, stored_form
from tests.unit.world import TIMEOUT_S

IDENTITY = ShardIdentity("run", 1, 2, 3, 0, 1, True)
DTYPES = [*DTYPE_CODES, torch.complex128]
POISON = 0xAA


# --- Tensors into a block ---------------------------------------------------------------

FORMS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t() if t.dim() == 2 else t,
    "strided": lambda t: t[..., ::2] if t.dim() else t,
    "permuted": lambda t: t.permute(tuple(reversed(range(t.dim())))),
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "offset": lambda t: t.reshape(-1)[1:],
    "conjugated": lambda t: t.conj() if t.is_complex() else t,
    "negated": lambda t: t.conj().imag if t.is_complex() else t,
}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype, shape and arrangement in memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    top = 2 if dtype == torch.bool else 256
    noise = random.Random(draw(st.integers(0, 99))).randbytes(size)
    raw = torch.tensor([byte % top for byte in noise], dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    return FORMS[draw(st.sampled_from(sorted(FORMS)))](tensor)


def row_major(tensor: torch.Tensor) -> bytes:
    """What must be stored."""
    return byte_view(tensor.resolve_conj().resolve_neg().contiguous()).numpy().tobytes()


def layout_of(live: Mapping[str, torch.Tensor]) -> ShardLayout:
    (layout,) = plan_shards([stored_form(name, tensor) for name, tensor in live.items()])
    return layout


@pytest.fixture(params=["whole", "in pieces"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with limits so small that everything is large, and cut into pieces."""
    if request.param == "in pieces":
        monkeypatch.setattr(batches, "_SMALL_BYTES", 24)
        monkeypatch.setattr(batches, "_PACK_BYTES_MAX", 40)
        monkeypatch.setattr(batches, "_PIECE_BYTES", 16)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("lane", [False, True], ids=["run_batch", "lane"])
def test_every_tensor_lands_in_its_place(lane: bool) -> None:
    copier = CpuLane()

    @settings(max_examples=150)
    @given(st.lists(tensors(), max_size=8), st.data())
    def check(found: list[torch.Tensor], data: st.DataObject) -> None:
        live = {f"t{number}": tensor for number, tensor in enumerate(found)}
        chosen = {name for name in live if data.draw(st.booleans())}
        offset = 4096 * data.draw(st.integers(0, 1))
        layout = layout_of(live)
        block = torch.full((offset + layout.size_bytes + 64,), POISON, dtype=torch.uint8)
        planned = plan_batches(layout, live, chosen, offset=offset)
        ends = [batch.end for batch in planned]
        assert ends == sorted(ends), "progress goes one way"
        if lane:
            seen: list[int] = []
            assert copier.submit(planned, block, seen.append).wait(TIMEOUT_S)
            assert seen == ends
        else:
            for batch in planned:
                run_batch(batch, block)
        wanted = bytearray([POISON]) * block.numel()
        for place in layout.placed:
            if place.entry.name in chosen:
                stored = row_major(live[place.entry.name])
                assert len(stored) == place.end - place.begin
                wanted[offset + place.begin : offset + place.end] = stored
        assert block.numpy().tobytes() == bytes(wanted)

    try:
        check()
    finally:
        copier.close()


def test_a_batch_tells_nothing_of_what_comes_before_it() -> None:
    """A pack ends where the next chosen tensor does not follow at once: its end is the progress
    that is reported, and what was left out in between is somebody else's to copy."""
    live = {name: torch.full((4,), float(n)) for n, name in enumerate("abcd")}
    layout = layout_of(live)
    planned = plan_batches(layout, live, {"a", "b", "d"})
    assert [(batch.begin, batch.end, len(batch.sources)) for batch in planned] == [
        (0, 32, 2),
        (48, 64, 1),
    ]


def test_views_of_one_memory_are_stored_each_in_full() -> None:
    whole = torch.arange(12.0)
    live = {"whole": whole, "part": whole[3:7], "again": whole.view(3, 4).t()}
    layout = layout_of(live)
    block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for batch in plan_batches(layout, live, live.keys()):
        run_batch(batch, block)
    for place in layout.placed:
        found = block[place.begin : place.end].numpy().tobytes()
        assert found == row_major(live[place.entry.name])


@pytest.mark.parametrize("form", ["transposed", "conjugated", "expanded", "strided"])
def test_a_complex_tensor_behind_half_of_one(form: str) -> None:
    """complex128 is stored as pairs of float64: it need not begin at a multiple of its size."""
    live = {"one": torch.ones(1, dtype=torch.float64)}
    live["many"] = FORMS[form](torch.randn(3, 4, dtype=torch.complex128))
    layout = layout_of(live)
    block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for batch in plan_batches(layout, live, live.keys()):
        run_batch(batch, block)
    assert block.numpy().tobytes() == row_major(live["one"]) + row_major(live["many"])
