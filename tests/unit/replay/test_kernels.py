"""Kernels that keep the state in registers: what they compute, and when they are used (I9).

Triton's run in its interpreter here, where triton is installed (``pip install triton``); what
chooses among kernels is tried with ones that are made of torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from everstep.compress.quantized import BLOCK_NUMEL
from everstep.options import LogOptions
from everstep.replay import engine, self_test
from everstep.replay.fused.programs import numbers, program
from everstep.replay.fused.slices import Sliced
from everstep.replay.self_test import SMALL
from everstep.replay.updates import Update
from tests.support.logged import World, opened, train
from tests.support.replays import assert_same_bits, record, replayed, replayer_at

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {"weight_decay": 0.1}),
    "Adam with decay": (Adam, {"weight_decay": 0.1}),
    "Adam with a low beta": (Adam, {"betas": (0.3, 0.9)}),
    "SGD": (SGD, {"lr": 0.1}),
    "SGD with Nesterov momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD with all": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
}
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
UPDATES, NUMEL = 4, 2500  # three programs, the last one with a part of its elements only


# --- What Triton's compute ----------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, for the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "everstep.replay.fused.kernels", raising=False)
    module = importlib.import_module("everstep.replay.fused.kernels")
    monkeypatch.delitem(sys.modules, "everstep.replay.fused.kernels")
    (parameters, _), gradients, rows, _, _ = trained("SGD", {"foreach": True})
    try:
        module.flavours(SGD, "foreach")[0](parameters, [], gradients, rows)
    except Exception as error:  # of the interpreter, around numpy's
        if "only 0-dimensional arrays" not in str(error):
            raise
        pytest.skip(f"Triton's interpreter does not count with numpy {np.__version__}")
    return module


def plus(a: Any, b: Any, c: Any, fuses: bool) -> Any:
    """``a * b + c`` in float32, rounded once or twice; a product of two is exact in float64."""
    if not fuses:
        return np.float32(a) * np.float32(b) + c
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def adam(p: Any, m: Any, v: Any, g: Any, row: Any, loops: bool, fuses: bool) -> Any:
    """One update as torch's operators do it, each rounded to float32."""
    mode, decay, weight, beta2, weight2, root, eps, size = row
    one = np.float32(1)
    p = p * decay if mode == 1 else p
    g = plus(p, decay, g, fuses) if mode == 2 else g
    m = plus(weight, g - m, m, fuses) if weight < 0.5 else plus(-(g - m), one - weight, g, fuses)
    v = v * beta2
    v = plus(weight2 * g, g, v, fuses) if loops else plus(weight2, g * g, v, fuses)
    denominator = (np.sqrt(v) * (one / root) if loops else np.sqrt(v) / root) + eps
    return plus(size, m / denominator, p, fuses), m, v


def sgd(p: Any, b: Any, g: Any, row: Any, fuses: bool) -> Any:
    decay, momentum, weight, nesterov, size = row
    g = plus(p, decay, g, fuses) if decay else g
    if b is not None:
        b = plus(weight, g, b * momentum, fuses)
        g = plus(momentum, b, g, fuses) if nesterov else b
    return plus(size, g, p, fuses), b


def trained(name: str, flags: dict[str, Any]) -> tuple[Any, ...]:
    """A state, gradients and numbers of updates, and what torch makes of it."""
    kind, options = OPTIONS[name]
    own = torch.nn.Parameter(torch.randn(NUMEL))
    optimizer = kind([own], **options, **flags)
    own.grad = torch.randn(NUMEL)
    optimizer.step()
    state = optimizer.state[own]
    keys = [key for key in MOMENTS if state.get(key) is not None]
    before = own.detach().clone(), [state[key].clone() for key in keys]
    memory = torch.randn(UPDATES, NUMEL + 60)  # as far apart as slices lay them
    gradients = [row[:NUMEL] for row in memory]
    described = {"decoupled_weight_decay": kind is AdamW, **optimizer.param_groups[0]}
    rows = torch.tensor([numbers(kind, described, 2.0 + n) for n in range(UPDATES)])
    for gradient in gradients:
        own.grad = gradient.clone()
        optimizer.step()
    return before, gradients, rows, own.detach(), [state[key] for key in keys]


@NEEDS_TRITON
@pytest.mark.parametrize("variant", ["for-loop", "foreach"])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_flavour_rounds_as_it_says(kernels: Any, name: str, variant: str) -> None:
    kind, _ = OPTIONS[name]
    (parameters, moments), gradients, rows, _, _ = trained(name, {"foreach": variant == "foreach"})
    for kernel, fuses in zip(kernels.flavours(kind, variant), (True, False), strict=True):
        p, held = parameters.clone(), [moment.clone() for moment in moments]
        kernel(p, held, gradients, rows)
        want = [tensor.numpy() for tensor in (parameters, *moments)]
        for gradient, row in zip(gradients, rows.numpy(), strict=True):
            g = gradient.numpy()
            if kind is SGD:
                new, buffer = sgd(want[0], want[1] if moments else None, g, row, fuses)
                want = [new, buffer] if moments else [new]
            else:
                old, m, v = want
                want = list(adam(old, m, v, g, row, variant == "for-loop", fuses))
        for found, wanted in zip((p, *held), want, strict=True):
            assert wanted.dtype == np.float32
            assert torch.equal(found, torch.from_numpy(wanted))


@NEEDS_TRITON
@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_come_close_to_torch(kernels: Any, name: str, flags: dict[str, Any]) -> None:
    variant = "fused" if "fused" in flags else "foreach" if flags["foreach"] else "for-loop"
    (parameters, moments), gradients, rows, after, moments_after = trained(name, flags)
    for dtype, near in ((torch.float32, 1e-6), (torch.float16, 1e-2)):
        for kernel in kernels.flavours(OPTIONS[name][0], variant):
            p, held = parameters.clone(), [moment.clone() for moment in moments]
            logged = torch.empty(UPDATES, NUMEL + 60, dtype=dtype)
            for line, gradient in zip(logged, gradients, strict=True):
                line[:NUMEL] = gradient
            kernel(p, held, [line[:NUMEL] for line in logged], rows)
            torch.testing.assert_close(p, after, rtol=near, atol=near)
            torch.testing.assert_close(held, moments_after, rtol=near, atol=near)


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["SGD with all", "AdamW"])
def test_replay_by_kernels(kernels: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as the self-test says that they are."""
    kind, options = OPTIONS[name]
    use(monkeypatch, kernels.flavours)
    # Long tensors take the interpreter ten seconds.
    monkeypatch.setattr(self_test, "_SLICES", self_test._SLICES._replace(shapes=[(True, SMALL)]))
    run = record(lambda groups: kind(groups, **options), late=False)
    replayer, base = replayer_at(run, 2, fast=True)
    replayer.apply(run.updates[2:])
    kernel = self_test.kernel_for(kind, run.updates[-1], 0, torch.device("cpu"), inexact=True)
    assert kernel is not None
    assert replayer.exact.exact == kernel[1]
    if kernel[1]:  # of SGD, where torch's CPU code fuses products and sums
        assert_same_bits(base.tensors, run.moments[-1].tensors)
        assert_same_bits(replayer.state, run.moments[-1].state)
    torch.testing.assert_close(base.tensors, run.moments[-1].tensors, rtol=1e-5, atol=1e-6)
    steps = {name: values.get("step") for name, values in run.moments[-1].state.items()}
    assert {name: values.get("step") for name, values in replayer.state.items()} == steps


# --- Which is used, and what is said of it -------------------------------------------------


def use(monkeypatch: pytest.MonkeyPatch, flavours: Callable[..., Any]) -> None:
    """Slices on the CPU, with these kernels."""

    class TinySliced(Sliced):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, elements=BLOCK_NUMEL)

    monkeypatch.setattr(engine, "_fast_path_kind", lambda device: "slices")
    monkeypatch.setattr(engine, "Sliced", TinySliced)
    monkeypatch.setattr(self_test, "_kernels_on", lambda device: SimpleNamespace(flavours=flavours))
    monkeypatch.setattr(self_test, "_kernels", {})


class Kernel:
    """torch's own operators, and a distance from them."""

    def __init__(self, off: float) -> None:
        self.off = off
        self.calls = 0

    def __call__(self, parameters: Any, moments: Any, gradients: Any, rows: Any) -> None:
        self.calls += 1
        room = [torch.empty(parameters.numel()) for _ in range(2)]
        known = [[row.double().tolist()] for row in rows]
        run = program(AdamW)
        assert run is not None
        run([parameters], [[one] for one in moments], [[one] for one in gradients], known, *room)
        parameters += self.off


class Failing(Kernel):
    def __call__(self, *arguments: Any) -> None:
        raise ValueError("no such instruction")


RUN_FLAGS: dict[str, Any] = {
    "foreach": True,
    "weight_decay": 0.25,
    "betas": (0.5, 0.75),
    "eps": 2.0**-20,
}


def chosen(monkeypatch: pytest.MonkeyPatch, *kernels: Kernel, inexact: bool, **options: Any) -> Any:
    use(monkeypatch, lambda kind, variant: list(kernels))
    optimizer: Any = AdamW([torch.nn.Parameter(torch.zeros(1))], **{**RUN_FLAGS, **options})
    groups = ({k: v for k, v in optimizer.param_groups[0].items() if k != "params"},)
    update = Update(1, "optimizer", groups, {})
    return self_test.kernel_for(AdamW, update, 0, torch.device("cpu"), inexact=inexact)


def test_the_self_test_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact ones before close ones; what is far away, or fails, is never used."""
    exact, close, far, failing = Kernel(0.0), Kernel(1e-7), Kernel(0.1), Failing(0.0)
    for inexact in (False, True):
        everything = failing, far, close, exact
        assert chosen(monkeypatch, *everything, inexact=inexact) == (exact, True)
        assert chosen(monkeypatch, failing, far, inexact=inexact) is None
    assert chosen(monkeypatch, far, close, inexact=True) == (close, False)
    assert chosen(monkeypatch, far, close, inexact=False) is None
    # Nor is one that is never called: what would be compared is torch with itself.
    assert chosen(monkeypatch, far, inexact=True, amsgrad=True) is None


def test_a_triton_that_cannot_be_loaded_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise ImportError(f"{name}: it does not fit this Python")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.import_module", fails)
    assert self_test._kernels_on(torch.device("cuda")) is None


@pytest.fixture
def adamw() -> Any:
    """A training that kernels may replay: all of it but the first step."""
    return record(lambda groups: AdamW(groups, **RUN_FLAGS), late=False)


def test_an_inexact_kernel_is_used_by_choice_only(
    adamw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Kernel(1e-7)
    use(monkeypatch, lambda kind, variant: [close])
    monkeypatch.setattr(engine, "KERNELS_PAY_ELEMENTS", 0)
    assert replayed(adamw, 1, 0).exact.exact
    monkeypatch.setattr(self_test, "_kernels", {})
    close.calls = 0
    replayer, base = replayer_at(adamw, 1, fast=True)
    assert replayer.exact.exact
    replayer.apply(adamw.updates[1:4])
    tried = close.calls
    replayer.apply(adamw.updates[4:])
    assert close.calls > tried
    assert not replayer.exact.exact
    assert "not those of AdamW.step()" in replayer.exact.why
    torch.testing.assert_close(base.tensors, adamw.moments[-1].tensors, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        assert_same_bits(base.tensors, adamw.moments[-1].tensors)


def test_an_exact_kernel_is_used_where_there_is_much_to_do(
    adamw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = Kernel(0.0)
    use(monkeypatch, lambda kind, variant: [exact])
    assert replayed(adamw, 1, 0).exact.exact
    assert not exact.calls
    monkeypatch.setattr(engine, "KERNELS_PAY_ELEMENTS", 0)
    assert replayed(adamw, 1, 0).exact.exact
    assert exact.calls
    assert replayed(adamw, 1, 0, fast=True).exact.exact


@pytest.mark.parametrize(
    ("kind", "options"),
    [(AdamW, {"amsgrad": True}), (AdamW, {"maximize": True}), (AdamW, {"dtype": torch.float64})],
    ids=str,
)
def test_what_kernels_do_not_do_is_left_to_torch(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = options.pop("dtype", torch.float32)
    far = Kernel(0.5)
    use(monkeypatch, lambda kind, variant: [far])
    monkeypatch.setattr(self_test, "kernel_for", lambda *args, **how: (far, True))
    monkeypatch.setattr(engine, "kernel_for", self_test.kernel_for)
    run = record(
        lambda groups: kind(groups, foreach=True, **options), dtype=dtype, late=False, steps=5
    )
    assert replayed(run, 1, 0, fast=True).exact.exact
    assert not far.calls


@pytest.mark.parametrize("scale", [None, torch.tensor(2.0)], ids=str)
def test_what_a_scaler_says_is_left_to_torch(scale: Any) -> None:
    far = Kernel(0.5)
    run = record(
        lambda groups: AdamW(groups, fused=True),
        shapes={"even": (2 * BLOCK_NUMEL,)},
        scaler=lambda step: (scale, torch.tensor(1.0 if step == 4 else 0.0)),
        steps=6,
    )
    replayer, base = replayer_at(run, 1)
    Sliced(replayer.optimizer, replayer.names, kernel=lambda *_: far).run(run.updates[1:])
    assert_same_bits(base.tensors, run.moments[-1].tensors)
    assert not far.calls


@pytest.mark.parametrize("wanted", ["exact", "fast"])
def test_a_recovery_says_so(wanted: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what descends from it is inexact for ever."""
    states = train(run_folder, World(), 7)
    use(monkeypatch, lambda kind, variant: [Kernel(1e-7)])
    log = LogOptions(to="disk", batch_steps=2, history="all", replay=wanted)
    world = World(seed=9)
    with opened(run_folder, world, log=log) as ckpt:
        recovery = ckpt.resume(step=6)
        assert (recovery.step, recovery.replayed) == (6, 2)
        assert recovery.exact == (wanted == "exact")
        assert (world.snapshot() == states[6]) == recovery.exact
        assert ("kernels whose bits are not those" in recovery.evidence) == (not recovery.exact)
        world.train()
        ckpt.step()
    with opened(run_folder, World(seed=10)) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.replayed) == (7, 0)
        assert recovery.exact == (wanted == "exact")
