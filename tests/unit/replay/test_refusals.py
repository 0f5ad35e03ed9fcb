"""What replay refuses, and that nothing has changed then (I3); what it says of exactness (I9)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from everstep.errors import OptionError, ReplayError, UnsupportedStateError
from everstep.replay import exactness as module
from everstep.replay.engine import Replayer, ReplayOptions
from everstep.replay.exactness import (
    MATRIX,
    Exactness,
    Row,
    declare,
    exactness,
    is_elementwise,
    kind_name,
    refusal,
    replay_kind,
    thread_dependence,
    variant_of,
)
from everstep.replay.updates import Update
from tests.support.ranks.sharding import LAYOUTS, as_rank, plain
from tests.support.replays import Run, assert_same_bits, record, replayed, replayer_at


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DECLARED", {})


@pytest.fixture
def run() -> Run:
    return record(lambda groups: AdamW(groups, fused=True), steps=6, late=False)


def with_gradient(update: Update, name: str, gradient: torch.Tensor) -> Update:
    return replace(update, gradients={**update.gradients, name: gradient})


def with_options(update: Update, **options: Any) -> Update:
    return replace(update, groups=tuple({**group, **options} for group in update.groups))


def without_lr(update: Update) -> Update:
    groups = [{k: v for k, v in group.items() if k != "lr"} for group in update.groups]
    return replace(update, groups=tuple(groups))


SPOILT: dict[str, tuple[Callable[[Update], Update], str]] = {
    "unknown parameter": (
        lambda u: with_gradient(u, "ghost", torch.zeros(3)),
        "update 5 of 'optimizer': gradient of 'ghost', which is not one of its parameters",
    ),
    "shape": (
        lambda u: with_gradient(u, "bias", torch.zeros(14)),
        r"gradient of 'bias' has shape \[14\], the parameter \[13\]",
    ),
    "wider dtype": (
        lambda u: with_gradient(u, "bias", torch.zeros(13, dtype=torch.float64)),
        "gradient of 'bias' is torch.float64, the parameter torch.float32",
    ),
    "complex": (
        lambda u: with_gradient(u, "bias", torch.zeros(13, dtype=torch.complex64)),
        "is torch.complex64",
    ),
    "integers": (
        lambda u: with_gradient(u, "bias", torch.zeros(13, dtype=torch.int8)),
        "is torch.int8",
    ),
    "sparse": (
        lambda u: with_gradient(u, "bias", torch.zeros(13).to_sparse()),
        "torch.sparse_coo; only torch.strided can be replayed",
    ),
    "a group too few": (
        lambda u: replace(u, groups=u.groups[:1]),
        "has 1 parameter groups, the base 2",
    ),
    "no learning rate": (without_lr, "group 0 has no lr"),
    "differentiable": (lambda u: with_options(u, differentiable=True), "differentiable=True"),
    "capturable": (lambda u: with_options(u, capturable=True), "capturable=True"),
    "scale without fused": (
        lambda u: replace(with_options(u, fused=False), grad_scale=torch.tensor(2.0)),
        "grad_scale for a group that is not fused",
    ),
    "scales": (lambda u: replace(u, grad_scale=torch.ones(2)), "grad_scale has 2 elements"),
    "order": (lambda u: replace(u, lsn=4), "update 4 cannot follow update 4"),
    "another optimizer": (
        lambda u: replace(u, optimizer="other"),
        "update 5 is one of 'other', not of 'optimizer'",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own
@pytest.mark.parametrize("name", SPOILT)
def test_a_refused_update_changes_nothing(run: Run, name: str) -> None:
    """Nor do the good ones before it in the same call."""
    spoil, message = SPOILT[name]
    replayer, base = replayer_at(run, 2)
    replayer.apply(run.updates[2:3])
    held = copy.deepcopy((base.tensors, dict(replayer.state)))
    with pytest.raises(ReplayError, match=message):
        replayer.apply([run.updates[3], spoil(run.updates[4]), run.updates[5]])
    assert_same_bits(base.tensors, held[0])
    assert_same_bits(replayer.state, held[1])
    assert replayer.lsn == 3
    replayer.apply(run.updates[3:])  # and it can go on
    assert_same_bits(base.tensors, run.moments[-1].tensors)
    assert_same_bits(replayer.state, run.moments[-1].state)
    assert replayer.lsn == 6


def test_no_update_is_applied_twice(run: Run) -> None:
    replayer, base = replayer_at(run, 0)
    replayer.apply([])
    assert replayer.lsn is None
    replayer.apply(run.updates)
    for again in (run.updates[-1:], run.updates[:1]):
        with pytest.raises(ReplayError, match="cannot follow update 6"):
            replayer.apply(again)
    assert_same_bits(base.tensors, run.moments[-1].tensors)


def build(run: Run, **changes: Any) -> Replayer:
    base = copy.deepcopy(run.moments[2])
    given: dict[str, Any] = {
        "kind": AdamW,
        "params": run.names,
        "tensors": base.tensors,
        "state": base.state,
        "groups": base.groups,
    }
    return Replayer(**{**given, **changes})


def test_what_does_not_fit_together_is_refused(run: Run) -> None:
    names, base = run.names, run.moments[2]
    for changes, message in [
        ({"params": names[:1]}, "1 groups of parameters, 2 of options"),
        ({"params": [names[0], names[0]]}, "listed more than once"),
        ({"tensors": {"bias": base.tensors["bias"]}}, "no tensors of parameters"),
        ({"state": {"ghost": {}}}, "state of parameters that are in no group: .*ghost"),
        ({"options": ReplayOptions(0)}, "threads=0"),
    ]:
        with pytest.raises(ReplayError, match=message):
            build(run, **changes)


def test_state_that_is_made_with_the_optimizer_must_be_there() -> None:
    """Adagrad's accumulators may start with any value: none is guessed."""
    run = record(lambda groups: torch.optim.Adagrad(groups), steps=2)
    with pytest.raises(ReplayError, match=r"Adagrad makes its state when it is built.*weight"):
        build(run, kind=torch.optim.Adagrad, state={}, groups=run.moments[0].groups)


class Own(Adam):
    def __init__(self, params: Any, fancy: int) -> None:
        super().__init__(params)


class Unbuildable(Optimizer):
    def __init__(self, params: Any, secret: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def test_classes_that_are_refused(run: Run) -> None:
    for kind, message in [
        (torch.optim.LBFGS, "evaluates the loss several times"),
        (Own, "a subclass of Adam may do anything"),
    ]:
        with pytest.raises(UnsupportedStateError, match=message):
            build(run, kind=kind)
    declare(Unbuildable, elementwise=True)
    with pytest.raises(UnsupportedStateError, match=r"cannot be built from its groups.*secret"):
        build(run, kind=Unbuildable)
    with pytest.raises(UnsupportedStateError, match=r"bias: torch.sparse_coo parameters"):
        sparse = torch.eye(3).to_sparse()
        Replayer(SGD, [["bias"]], {"bias": sparse}, {}, [{"lr": 0.1}])


def test_declarations() -> None:
    assert replay_kind(kind_name(Own)) is None
    declare(Own, elementwise=True)
    assert replay_kind(kind_name(Own)) is Own
    assert is_elementwise(Own)
    declare(Own, elementwise=False)
    assert not is_elementwise(Own)
    for wrong, message in [
        (int, "no torch.optim.Optimizer"),
        (torch.optim.LBFGS, "fixed"),
        (AdamW, "fixed"),
    ]:
        with pytest.raises(OptionError, match=message):
            declare(wrong, elementwise=True)


def test_kinds_by_name() -> None:
    for name in {row.optimizer for row in MATRIX}:
        kind = getattr(torch.optim, name)
        assert replay_kind(f"torch.optim.{name}") is kind
        assert replay_kind(kind_name(kind)) is kind
        assert is_elementwise(kind)
    for unknown in (
        "AdamW",
        "os.AdamW",
        "torch.optim.LBFGS",
        "torch.optim.lbfgs.LBFGS",
        "torch.optim.Optimizer",
        "torch.optim.adamw",
        "",
    ):
        assert replay_kind(unknown) is None
    for name in ("Adafactor", "Muon"):
        if hasattr(torch.optim, name):
            assert not is_elementwise(getattr(torch.optim, name))


@pytest.mark.parametrize(
    ("options", "device", "variant"),
    [
        ({"foreach": None, "fused": None}, "cpu", "for-loop"),
        ({"foreach": None, "fused": None}, "cuda", "foreach"),
        ({"foreach": None}, "cuda", "foreach"),
        ({}, "cuda", "for-loop"),  # no such choice: SparseAdam
        ({"foreach": None, "fused": False}, "cuda", "for-loop"),
        ({"foreach": True, "fused": None}, "cpu", "foreach"),
        ({"foreach": None, "fused": True}, "cpu", "fused"),
        ({"foreach": None, "fused": None, "lr": torch.tensor(0.1)}, "cuda", "for-loop"),
        ({"foreach": None, "lr": torch.tensor(0.1), "capturable": True}, "cuda", "foreach"),
    ],
)
def test_variants(options: dict[str, Any], device: str, variant: str) -> None:
    assert variant_of(options, device) == variant


def test_what_is_not_in_the_matrix_is_not_exact() -> None:
    fused, loop = {"fused": True, "foreach": None}, {"fused": None, "foreach": None}
    assert exactness(AdamW, [fused, loop], "cpu") == Exactness(True, "")
    assert Row("AdamW", "fused", "cuda") not in MATRIX
    for kind, groups, device, why in [
        (AdamW, [fused], "cuda", "torch.optim.adamw.AdamW, fused, on cuda"),
        (AdamW, [fused, {"foreach": True}], "mps", "on mps"),
        (torch.optim.LBFGS, [{}], "cpu", "lbfgs.LBFGS is unknown"),
        (torch.optim.RMSprop, [fused], "cpu", "rmsprop.RMSprop, fused, on cpu"),
        (Own, [loop], "cpu", "Own is unknown"),
    ]:
        found = exactness(kind, groups, device)
        assert not found.exact
        assert why in found.why
    if hasattr(torch.optim, "Adafactor"):
        assert not exactness(torch.optim.Adafactor, [loop], "cpu").exact


def test_exactness_is_lost_for_ever() -> None:
    """The last updates are of a listed variant again, but they build on what went before."""
    run = record(lambda groups: torch.optim.RMSprop(groups), steps=4, late=False)
    replayer, _ = replayer_at(run, 1)
    assert replayer.exact.exact
    # Some fused form that this version knows nothing of.
    replayer.apply([run.updates[1], with_options(run.updates[2], fused=True)])
    assert not replayer.exact.exact
    replayer.apply(run.updates[3:])
    assert "fused" in replayer.exact.why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_thread_dependence(dtype: torch.dtype) -> None:
    large, small = torch.zeros(40_000, dtype=dtype), torch.zeros(30_000, dtype=dtype)
    half = dtype == torch.bfloat16
    assert (thread_dependence({"foreach": True}, [small, large]) is not None) == half
    assert thread_dependence({"foreach": True}, [small]) is None
    assert thread_dependence({"fused": True}, [large]) is None


def signs_by(threads: int, kind: Any, key: str, options: dict[str, Any]) -> torch.Tensor:
    """Bits of a moment behind five updates, half of whose gradients are zeros of either sign."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parameter = torch.nn.Parameter(torch.zeros(300_019))
        optimizer = kind([parameter], lr=1e-3, **options)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            drawn = torch.randn(300_019, generator=generator)
            parameter.grad = drawn * (torch.rand(300_019, generator=generator) < 0.5)
            optimizer.step()
        moment: torch.Tensor = optimizer.state[parameter][key]
        return moment.view(torch.int32)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("kind", "key"), [(Adam, "exp_avg"), (torch.optim.RMSprop, "grad_avg")])
def test_the_sign_of_a_zero_depends_on_threads_where_all_of_a_moment_is_new(
    kind: Any, key: str, kept: float
) -> None:
    adam = {"betas": (kept, 0.99)}
    options: dict[str, Any] = adam if kind is Adam else {"centered": True, "alpha": kept}
    one, several = signs_by(1, kind, key, options), signs_by(2, kind, key, options)
    assert torch.equal(one, several) == (thread_dependence(options, [torch.zeros(300_019)]) is None)


def test_optimizers_over_whole_tensors() -> None:
    """Not elementwise: replayed by their own step, exact or not."""
    shapes = {"weight": (13, 31), "square": (8, 8)}
    for name in ("Adafactor", "Muon"):
        kind = getattr(torch.optim, name, None)
        if kind is not None:
            run = record(kind, shapes=shapes, steps=6)
            assert not replayed(run, 0, 2).exact.exact
            replayed(run, 2, 0)


@pytest.mark.parametrize("asks_for_grad", [False, True])
def test_views_of_one_memory(run: Run, asks_for_grad: bool) -> None:
    """A replica: parameters and moments are parts of one block, which others read."""
    base = copy.deepcopy(run.moments[1])
    flat = torch.full((10_000,), -1.0).requires_grad_(asks_for_grad)
    used = 0

    def moved(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        nonlocal used
        part = memory[used : used + tensor.numel()].as_strided(tensor.shape, tensor.stride(), used)
        used += tensor.numel()
        part.detach().copy_(tensor)
        return part

    tensors = {name: moved(tensor, flat) for name, tensor in base.tensors.items()}
    state = {
        name: {key: moved(value, flat.detach()) for key, value in values.items()}
        for name, values in base.state.items()
    }
    whole = [*tensors.values(), *(t for values in state.values() for t in values.values())]
    replayer = Replayer(AdamW, run.names, tensors, state, base.groups, ReplayOptions(2))
    replayer.apply(run.updates[1:])
    assert_same_bits({n: t.detach() for n, t in tensors.items()}, run.moments[-1].tensors)
    assert_same_bits(replayer.state, run.moments[-1].state)
    assert all(t.untyped_storage().data_ptr() == flat.data_ptr() for t in whole)
    assert bool((flat[used:] == -1.0).all())


def test_tensors_of_the_caller_keep_their_gradients(run: Run) -> None:
    base = copy.deepcopy(run.moments[0])
    tensors = {name: torch.nn.Parameter(tensor) for name, tensor in base.tensors.items()}
    for tensor in tensors.values():
        tensor.grad = torch.full_like(tensor, 3.0)
    Replayer(AdamW, run.names, tensors, base.state, base.groups).apply(run.updates)
    assert_same_bits({n: t.detach() for n, t in tensors.items()}, run.moments[-1].tensors)
    assert all(bool((t.grad == 3.0).all()) for t in tensors.values())


def test_whole_matrices_are_not_replayed_in_parts() -> None:
    """What Muon does to a matrix follows from all of it: of parts replay would make another."""
    with as_rank(0, 2):
        model = LAYOUTS["fsdp"](plain(1), 2)
        muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
        assert "does not act element by element" in (refusal(muon, parts=True) or "")
        assert refusal(torch.optim.AdamW(model.parameters()), parts=True) is None
    whole = torch.optim.Muon([p for p in plain(1).parameters() if p.dim() == 2])
    assert refusal(whole, parts=True) is None, "under DDP each rank has all of it"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_with_momentum_in_half_precision(momentum: float, dtype: torch.dtype) -> None:
    tensors = [torch.nn.Parameter(torch.ones(3, dtype=dtype))]
    why = refusal(SGD(tensors, lr=0.1, momentum=momentum, fused=True))
    refused = momentum > 0 and dtype != torch.float32
    assert (why is not None and "from memory of other tensors" in why) == refused
