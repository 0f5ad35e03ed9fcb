"""Slices of tensors that are laid end to end: the same bits as whole tensors (I3, I9).

They are made for CUDA devices, and run in host memory here; ``tests/gpu`` runs them on one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW

from everstep.compress.quantized import BLOCK_NUMEL, int8
from everstep.compress.sparse import topk
from everstep.replay import engine, functional, self_test
from everstep.replay.fused import slices, uploads
from everstep.replay.fused.slices import UPDATES_MAX, Sliced, SliceGroup, cut_slices, slice_elements
from everstep.replay.fused.uploads import Uploads
from everstep.replay.packed import Packed
from everstep.replay.updates import Update
from tests.support.fakecuda import FakeCuda, FakeEvent, FakeStream, cuda_device
from tests.support.replays import (
    SHAPES,
    Run,
    assert_same_bits,
    batches,
    record,
    replayed,
    replayer_at,
    tensors_of,
)

GPU = cuda_device(0)
LONG = {"long": (5 * 256 + 77,), "short": (3,), "matrix": (40, 30), "bias": (30,), "other": (900,)}
EVEN = {"long": (5 * 256 + 64,), "short": (64,), "matrix": (48, 32), "bias": (64,), "more": (640,)}
"""No last elements that torch's fused kernels on the CPU would round elsewhere than the others."""


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Slices stand for blocks, tiny ones; which way was taken, for how many updates."""
    taken: list[tuple[str, int]] = []
    step = engine.step_over

    class NotingSliced(Sliced):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, elements=BLOCK_NUMEL)

        def run(self, updates: Any) -> None:
            taken.append(("slices", len(updates)))
            super().run(updates)

    def noting_step(*args: Any) -> None:
        taken.append(("step", 1))
        step(*args)

    monkeypatch.setattr(engine, "_fast_path_kind", lambda device: "slices")
    monkeypatch.setattr(engine, "Sliced", NotingSliced)
    monkeypatch.setattr(engine, "step_over", noting_step)
    return taken


def options_of(kind: Any, number: int) -> dict[str, Any]:
    """Two sets of hyperparameters of a class."""
    of_sgd: list[dict[str, Any]] = [
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    ]
    of_adam: list[dict[str, Any]] = [
        {"amsgrad": True},
        {"weight_decay": 0.1, "betas": (0.4, 0.99)},
    ]
    return (of_sgd if kind is SGD else of_adam)[number]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("shapes", [SHAPES, LONG], ids=["small", "long"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_configuration(
    kind: Any, flags: dict[str, Any], number: int, shapes: Any, ways: list[tuple[str, int]]
) -> None:
    run = record(
        lambda groups: kind(groups, **options_of(kind, number), **flags), shapes=shapes, late=False
    )
    replayer = replayed(run, 3, 0)
    assert replayer.exact.exact
    assert ways == [("slices", 9)]
    replayed(run, 3, 2)
    replayed(run, 3, 1)


def in_slices(run: Run, step: int, size: int = 0) -> None:
    """As ``replayed``, without asking whether that is exact."""
    replayer, base = replayer_at(run, step)
    sliced = Sliced(replayer.optimizer, replayer.names, elements=BLOCK_NUMEL)
    for batch in batches(run.updates[step:], size):
        assert all(map(sliced.takes, batch))
        sliced.run(batch)
    assert_same_bits(base.tensors, run.moments[-1].tensors)
    assert_same_bits(replayer.state, run.moments[-1].state)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_fused(kind: Any, number: int) -> None:
    run = record(
        lambda groups: kind(groups, **options_of(kind, number), fused=True), shapes=EVEN, late=False
    )
    in_slices(run, 3)
    in_slices(run, 3, 2)
    in_slices(run, 3, 1)


def test_more_updates_than_one_pass_takes() -> None:
    steps = 2 * UPDATES_MAX + 4
    run = record(lambda groups: AdamW(groups, fused=True), shapes=EVEN, steps=steps, late=False)
    in_slices(run, 2)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_fused_kernels_that_round_last_elements_elsewhere(
    kind: Any, ways: list[tuple[str, int]]
) -> None:
    """torch's do on the CPU, so what is the last of a tensor must be so in a slice: the self-test
    finds it out, and whole tensors are updated."""
    run = record(lambda groups: kind(groups, lr=0.1, fused=True), shapes=LONG, steps=8, late=False)
    replayed(run, 2, 0)


def test_lazy_state_is_made_by_the_optimizer_itself(ways: list[tuple[str, int]]) -> None:
    run = record(lambda groups: Adam(groups, foreach=True), steps=6, late=False)
    replayed(run, 0, 0)
    assert ways == [("step", 1), ("slices", 5)]


def scaler(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale that moves; the calls 4 and 7 found infinities."""
    return torch.tensor(2.0**step), torch.tensor(1.0 if step in (4, 7) else 0.0)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_scaled_gradients_and_skips(kind: Any) -> None:
    """Steps that were skipped are not counted, and are not known before they are run."""
    options = {"momentum": 0.9, "lr": 0.1} if kind is SGD else {}
    run = record(
        lambda groups: kind(groups, fused=True, **options), shapes=EVEN, scaler=scaler, late=False
    )
    assert [update.lsn for update in run.updates if update.skipped] == [5, 8]
    in_slices(run, 2)


def test_narrow_gradients_are_widened(ways: list[tuple[str, int]]) -> None:
    rounded = [{n: t.bfloat16().float() for n, t in tensors_of().items()} for _ in range(5)]
    run = record(lambda groups: AdamW(groups, foreach=True), gradients=rounded.__getitem__, steps=5)
    run.updates[2:4] = [
        Update(u.lsn, u.optimizer, u.groups, {n: g.bfloat16() for n, g in u.gradients.items()})
        for u in run.updates[2:4]
    ]
    replayed(run, 1, 0)
    assert ways == [("slices", 4)]


@pytest.mark.parametrize("form", ["topk", "int8"])
def test_compressed_gradients(form: str, ways: list[tuple[str, int]]) -> None:
    """Small tensors come first: the large ones are cut where int8 forms may be."""
    shapes = {"small": (7,), "x": (3,), "long": (5 * 256 + 77,), "y": (3,), "matrix": (40, 30)}

    def packed(tensor: torch.Tensor) -> Packed:
        flat = tensor.view(-1)
        return Packed(topk(flat, 0.1) if form == "topk" else int8(flat), tuple(tensor.shape))

    drawn = [{n: packed(t) for n, t in tensors_of(shapes=shapes).items()} for _ in range(6)]
    run = record(
        lambda groups: AdamW(groups, foreach=True),
        shapes=shapes,
        gradients=lambda step: {name: one.dense() for name, one in drawn[step].items()},
        steps=6,
    )
    run.updates[:] = [
        Update(update.lsn, update.optimizer, update.groups, gradients)
        for update, gradients in zip(run.updates, drawn, strict=True)
    ]
    replayed(run, 2, 0)
    assert ways == [("slices", 4)]


def test_what_slices_do_not_take(ways: list[tuple[str, int]]) -> None:
    """A gradient in another memory order, and hyperparameters that are tensors."""
    run = record(lambda groups: AdamW(groups, foreach=True), steps=5, late=False)
    gradients: Any = run.updates[4].gradients
    gradients["image"] = gradients["image"].contiguous()
    replayed(run, 3, 0)
    assert ways == [("slices", 1), ("step", 1)]
    ways.clear()
    run = record(lambda groups: AdamW(groups, lr=torch.tensor(0.1)), steps=3, late=False)
    replayed(run, 1, 0)
    assert ways == [("step", 1)] * 2


def test_what_the_self_test_does_not_prove_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ways: list[tuple[str, int]]
) -> None:
    """A torch whose functions look at where a tensor begins: what lies end to end goes wrong."""
    adamw = functional.adamw

    def astray(params: Any, *args: Any, **options: Any) -> None:
        adamw(params, *args, **options)
        with torch.no_grad():
            for parameter in params:
                parameter.view(-1)[:1].add_(1e-3)

    monkeypatch.setattr(functional, "adamw", astray)
    monkeypatch.setattr(self_test, "_proven", {})
    run = record(lambda groups: AdamW(groups), steps=4, late=False)
    replayed(run, 1, 0)
    assert ways == [("step", 1)] * 3
    assert caplog.text.count("slices of AdamW (torch.float32) are not bit-equal") == 1


@settings(max_examples=60)
@given(
    numels=st.lists(st.integers(0, 5 * BLOCK_NUMEL), min_size=1, max_size=12),
    blocks=st.integers(1, 4),
)
def test_slices_hold_every_element_once(numels: list[int], blocks: int) -> None:
    sizes = {f"p{number}": numel for number, numel in enumerate(numels)}
    group = SliceGroup(0, (), (torch.float32, None, torch.bfloat16), None, list(sizes))
    found = list(cut_slices(group, sizes, blocks * BLOCK_NUMEL))
    ends = dict.fromkeys(sizes, 0)
    for one in found:
        assert one.numel == sum(part.stop - part.start for _, part in one.pieces)
        assert one.numel <= blocks * BLOCK_NUMEL
        for name, part in one.pieces:
            assert part.start == ends[name]  # in order
            assert part.start % BLOCK_NUMEL == 0
            ends[name] = part.stop
        places = one.places()
        assert [(number, dtype) for number, dtype, _ in places] == [
            (0, torch.float32),
            (2, torch.bfloat16),
        ]
        for (_, _, first), (_, _, second) in itertools.pairwise(places):
            assert first.stop <= second.start
            assert second.start % 16 == 0
    assert ends == sizes
    assert {name for one in found for name, _ in one.pieces} == set(sizes)


@pytest.mark.parametrize(
    ("cache_bytes", "elements"),
    [(50 << 20, 1638400), (0, slices.ELEMENTS_MIN), (1 << 40, slices.ELEMENTS_MAX)],
)
def test_a_slice_is_as_large_as_the_cache_allows(
    cache_bytes: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 MiB: that of an H100. Parameter, two moments and a gradient are 16 bytes in float32."""

    class Properties:
        L2_cache_size = cache_bytes

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    assert slice_elements(GPU, 16) == elements


# --- Uploads, on a device that runs whatever its streams allow ----------------------------


def uploaded(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What updates read of slices 0 to 7, each filled with its number."""
    rng = random.Random(seed)
    cuda = FakeCuda(rng)
    monkeypatch.setattr(uploads, "_cuda", cuda)
    memory = torch.zeros(4, 4, dtype=torch.uint8).unbind()
    rows = iter(memory)
    monkeypatch.setattr(uploads, "_memory", lambda device, size: (next(rows), next(rows)))
    monkeypatch.setattr(uploads, "_used_on", lambda tensor, stream: None)

    def send(source: torch.Tensor, target: torch.Tensor) -> None:
        cuda.current_stream(GPU).push(lambda: target.copy_(source))

    monkeypatch.setattr(uploads, "_send", send)
    read: list[list[int]] = []

    def note(there: torch.Tensor) -> None:
        read.append(there.tolist())

    def fill(number: int) -> Callable[[torch.Tensor], int]:
        return lambda memory: len(memory.fill_(number))

    found = Uploads(GPU, 4)
    found.send(0, fill(0))
    for number in range(8):
        there = found.receive(number)
        cuda.current_stream(GPU).push(partial(note, there))
        found.release(number)
        if number < 7:
            found.send(number + 1, fill(number + 1))
        while rng.random() < 0.5 and cuda.pick():
            pass
    while cuda.pick():
        pass
    return read


RIGHT = [[number] * 4 for number in range(8)]


@pytest.mark.parametrize("seed", range(50))
def test_updates_read_their_own_slice(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert uploaded(seed, monkeypatch) == RIGHT


@pytest.mark.parametrize("lost", ["the host's", "the copy's", "the updates'"])
def test_each_wait_is_needed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The play notices when one of them is taken away."""
    wait = FakeEvent.wait

    def some(self: FakeEvent, stream: FakeStream) -> None:
        is_side = stream is not self.cuda._defaults.get(GPU)
        if is_side != (lost == "the copy's"):
            wait(self, stream)

    if lost == "the host's":
        monkeypatch.setattr(FakeEvent, "synchronize", lambda self: None)
    else:
        monkeypatch.setattr(FakeEvent, "wait", some)
    with monkeypatch.context() as patch:
        assert any(uploaded(seed, patch) != RIGHT for seed in range(50))


def test_slices_are_sent_ahead_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is on its way before anybody waits for it, and no slot is taken too early."""
    told: list[tuple[str, int]] = []

    class NotingUploads(Uploads):
        def send(self, number: int, fill: Any) -> None:
            told.append(("send", number))
            super().send(number, fill)

        def receive(self, number: int) -> torch.Tensor:
            told.append(("receive", number))
            return super().receive(number)

        def release(self, number: int) -> None:
            told.append(("release", number))
            super().release(number)

    monkeypatch.setattr(slices, "Uploads", NotingUploads)
    run = record(lambda groups: AdamW(groups, fused=True), shapes={"a": (3 * BLOCK_NUMEL,)})
    replayer, _ = replayer_at(run, 3)
    Sliced(replayer.optimizer, replayer.names, elements=BLOCK_NUMEL).run(run.updates[3:6])
    at = {one: place for place, one in enumerate(told)}
    assert len(at) == len(told) == 9
    for number in range(3):
        assert at["send", number] < at["receive", number] < at["release", number]
    assert at["send", 1] < at["receive", 1]
    assert at["release", 0] < at["send", 2]
