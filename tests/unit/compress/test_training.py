"""Compressed training in one process: what the optimizer consumes, what stays behind, and that
nothing is lost in between, bit for bit, against plain code."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from everstep.compress.compressor import Compressor
from everstep.compress.feedback import KINDS, ErrorFeedback, adaptive, compression
from everstep.compress.quantized import Int8
from everstep.compress.sparse import Sparse
from everstep.errors import MismatchError, OptionError, StateError
from everstep.workloads.training import Training
from tests.support.inside.hooks import hooks_on
from tests.support.world import assert_same, opened

RATIO = 0.1


class Consumed(torch.optim.SGD):
    """Remembers the gradients that its update sees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.consumed: list[torch.Tensor | None] = []

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.consumed = [None if p.grad is None else p.grad.clone() for p in parameters]
        return loss


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.detach().reshape(-1), other.detach().reshape(-1)
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def sparse_layout(shape: tuple[int, int]) -> torch.Tensor:
    """A gradient as of ``nn.Embedding(sparse=True)``: two rows of it."""
    rows = torch.tensor([[3, 5]])
    return torch.sparse_coo_tensor(rows, torch.randn(2, shape[1]), shape, check_invariants=True)


def topk_oracle(total: torch.Tensor, ratio: float) -> torch.Tensor:
    """A mask of the largest, by a stable sort."""
    order = np.argsort(-total.double().abs().numpy(), kind="stable")
    keep = torch.zeros(total.numel(), dtype=torch.bool)
    keep[torch.from_numpy(order[: max(1, math.ceil(ratio * total.numel()))].copy())] = True
    return keep


# --- What is consumed, what is left ------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_topk_with_error_feedback_is_what_its_equations_say(dtype: torch.dtype) -> None:
    parameters = parameters_of((40, 30), (2000,), dtype=dtype)
    optimizer = Consumed(parameters, lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO)
    wide = torch.promote_types(dtype, torch.float32)
    residuals = [torch.zeros(p.numel(), dtype=wide) for p in parameters]
    for _ in range(4):
        grads = [torch.randn(p.shape).to(dtype) for p in parameters]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        for number, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            total = residuals[number] + grad.view(-1)
            keep = topk_oracle(total, RATIO)
            consumed = torch.where(keep, total, 0).to(dtype)
            residuals[number] = total - consumed.to(wide)
            found = optimizer.consumed[number]
            assert found is not None
            assert same_bits(found.view(-1), consumed)
            form = compressor.last[id(parameter)]
            assert isinstance(form, Sparse)
            assert same_bits(form.dense(), consumed)
            assert form.values.numel() == math.ceil(RATIO * parameter.numel())
        state = compressor.state_dict()["residuals"]
        assert all(same_bits(state[n], residual) for n, residual in enumerate(residuals))


@settings(max_examples=60)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.integers(1, 600),
    st.floats(1e-4, 1.0),
    st.integers(0, 10**6),
)
def test_nothing_is_lost(
    kind: str, dtype: torch.dtype, numel: int, ratio: float, seed: int
) -> None:
    """What is consumed and what stays add up to the total, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    feedback = ErrorFeedback(compression(kind, ratio), enabled=True)
    total = torch.zeros(numel, dtype=torch.promote_types(dtype, torch.float32))
    for step in range(3):
        scale = 10.0 ** (torch.rand(numel, generator=generator) * 8 - 6 + step)
        grad = (torch.randn(numel, generator=generator) * scale).to(dtype)
        total = total + grad
        form = feedback.take("p", grad)
        consumed, left = form.dense(), feedback.residuals["p"]
        assert consumed.dtype == dtype
        assert bool(consumed.isfinite().all())
        assert torch.equal(consumed.to(left.dtype) + left, total)  # -0.0 == 0.0
        if isinstance(form, Sparse) and dtype == left.dtype:  # elements are taken whole
            kept = torch.zeros(numel, dtype=torch.bool)
            kept[form.positions()] = True
            assert same_bits(torch.where(kept, consumed, left), total)
            assert not bool(left[kept].any())
        total = left.clone()


def test_without_error_feedback_what_is_left_out_is_lost() -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = Consumed([parameter], lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO, error_feedback=False)
    for _ in range(2):
        grad = torch.randn(2000)
        parameter.grad = grad.clone()
        optimizer.step()
        wanted = torch.where(topk_oracle(grad, RATIO), grad, 0)
        assert same_bits(optimizer.consumed[0], wanted)
    assert compressor.state_dict()["residuals"] == {}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_logged_as_it_is_consumed(kind: str) -> None:
    parameters = parameters_of((300, 400), (1500,))
    optimizer = Consumed(parameters, lr=0.1)
    compressor = Compressor(optimizer, kind=kind, ratio=RATIO)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
        compressor.check()
        for parameter, consumed in zip(parameters, optimizer.consumed, strict=True):
            form = compressor.last[id(parameter)]
            assert form is not None
            assert same_bits(form.dense(), consumed.view(-1))
    kinds = [type(compressor.last[id(parameter)]) for parameter in parameters]
    by_size = [Sparse, Int8]
    assert kinds == {"int8": [Int8] * 2, "adaptive": by_size}.get(kind, [Sparse] * 2)


def test_forms_of_one_step_are_not_written_to_in_the_next() -> None:
    parameters = parameters_of((2000,), (120_000,))
    optimizer = Consumed(parameters, lr=0.1)
    for kind in KINDS:
        compressor = Compressor(optimizer, kind=kind, ratio=RATIO)
        held = []
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step()
            held.append([(f, f.dense()) for f in compressor.last.values() if f is not None])
        assert all(same_bits(form.dense(), then) for form, then in held[0])
        compressor.close()


def test_adaptive_quantizes_small_tensors_and_thins_large_ones() -> None:
    assert isinstance(adaptive(torch.randn(99_999)), Int8)
    large = adaptive(torch.randn(100_000)).to(torch.float16)
    assert isinstance(large, Sparse)
    assert large.values.dtype == torch.float16


# --- Gradients of every sort --------------------------------------------------------------


def test_strides_stay_and_positions_are_row_major() -> None:
    (parameter,) = parameters_of((8, 6, 5, 7))
    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    optimizer = Consumed([parameter], lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO)
    for _ in range(2):
        total = torch.randn(8, 6, 5, 7)
        left = compressor.state_dict()["residuals"].get(0, torch.zeros(total.numel()))
        row_major = left + total.reshape(-1)
        parameter.grad = grad = total.contiguous(memory_format=torch.channels_last)
        stride = grad.stride()
        optimizer.step()
        assert parameter.grad is grad
        assert grad.stride() == stride
        wanted = torch.where(topk_oracle(row_major, RATIO), row_major, 0)
        assert same_bits(grad.reshape(-1), wanted)
        compressor.check()


def test_a_transposed_gradient() -> None:
    parameters = parameters_of((50, 40))
    optimizer = Consumed(parameters, lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO)
    parameters[0].grad = torch.randn(40, 50).t()
    wanted = parameters[0].grad.clone().reshape(-1)
    optimizer.step()
    compressor.check()
    (consumed,) = optimizer.consumed
    assert same_bits(consumed.reshape(-1), torch.where(topk_oracle(wanted, RATIO), wanted, 0))


def test_what_has_no_compressed_form_stays_as_it_is() -> None:
    parameters = [
        *parameters_of((), (0,), (100,), (2000,)),
        nn.Parameter(torch.zeros(2000, dtype=torch.complex64)),
        nn.Parameter(torch.zeros(100, 20)),
    ]
    optimizer = Consumed(parameters, lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO, dense_below=101)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
    parameters[5].grad = sparse_layout((100, 20))
    before = [p.grad.clone() for p in parameters]
    optimizer.step()
    for number in (0, 1, 2, 4):
        assert same_bits(parameters[number].grad, before[number])
        assert compressor.last[id(parameters[number])] is None
    assert torch.equal(parameters[5].grad.to_dense(), before[5].to_dense())
    assert compressor.last[id(parameters[5])] is None
    assert compressor.last[id(parameters[3])] is not None
    assert list(compressor.state_dict()["residuals"]) == [3]


def test_small_gradients_can_be_compressed_too() -> None:
    parameters = parameters_of((), (0,), (7,))
    optimizer = Consumed(parameters, lr=0.1)
    compressor = Compressor(optimizer, ratio=1e-9, dense_below=0)
    parameters[0].grad, parameters[1].grad = torch.tensor(3.0), torch.zeros(0)
    parameters[2].grad = torch.arange(7.0)
    optimizer.step()
    assert parameters[0].grad.item() == 3.0
    assert parameters[2].grad.tolist() == [0.0] * 6 + [6.0]
    assert compressor.last[id(parameters[1])] is None


def test_a_parameter_without_a_gradient_has_no_part_and_keeps_its_residual() -> None:
    parameters = parameters_of((2000,), (2000,))
    optimizer = Consumed(parameters, lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO)
    for parameter in parameters:
        parameter.grad = torch.randn(2000)
    optimizer.step()
    kept = compressor.state_dict()["residuals"][0].clone()
    optimizer.zero_grad()
    parameters[1].grad = torch.randn(2000)
    optimizer.step()
    assert optimizer.consumed[0] is None
    assert list(compressor.last) == [id(parameters[1])]
    assert same_bits(compressor.state_dict()["residuals"][0], kept)


def test_a_group_may_come_later() -> None:
    first, second = parameters_of((2000,), (3000,))
    optimizer = Consumed([first], lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO)
    first.grad = torch.randn(2000)
    optimizer.step()
    optimizer.add_param_group({"params": [second]})
    first.grad, second.grad = torch.randn(2000), torch.randn(3000)
    optimizer.step()
    assert {n: r.numel() for n, r in compressor.state_dict()["residuals"].items()} == {
        0: 2000,
        1: 3000,
    }


# --- Not finite, scaled, accumulated ------------------------------------------------------


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["in it", "in a small one", "in a sparse one"])
def test_a_step_that_is_not_finite_passes_and_leaves_no_trace(
    strange: float, kind: str, where: str
) -> None:
    parameters = parameters_of((2000,), (5,), (2000,), (10, 2))
    optimizer = Consumed(parameters, lr=0.1)
    compressor = Compressor(optimizer, kind=kind, ratio=RATIO)

    def grads() -> list[torch.Tensor]:
        return [torch.randn(2000), torch.randn(5), torch.randn(2000), sparse_layout((10, 2))]

    for parameter, grad in zip(parameters, grads(), strict=True):
        parameter.grad = grad
    optimizer.step()
    kept = copy.deepcopy(compressor.state_dict())
    bad = grads()
    if where == "in a sparse one":
        bad[3] = bad[3] * strange
    else:
        bad[0 if where == "in it" else 1][3] = strange
    for parameter, grad in zip(parameters, bad, strict=True):
        parameter.grad = grad.clone()
    optimizer.step()
    for consumed, grad in zip(optimizer.consumed, bad, strict=True):
        assert same_bits(consumed.to_dense(), grad.to_dense())
    assert set(compressor.last.values()) == {None}
    assert_same(compressor.state_dict(), kept)
    for parameter, grad in zip(parameters, grads(), strict=True):
        parameter.grad = grad
    optimizer.step()
    assert all(bool(r.isfinite().all()) for r in compressor.state_dict()["residuals"].values())
    assert compressor.last[id(parameters[0])] is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_beyond_the_largest_number_saturate(kind: str, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    (parameter,) = parameters_of((2000,), dtype=dtype)
    optimizer = Consumed([parameter], lr=0.1)
    compressor = Compressor(optimizer, kind=kind, ratio=1e-3)
    for _ in range(4):
        parameter.grad = torch.full((2000,), most * 0.9, dtype=dtype)
        parameter.grad[::2] *= -1
        optimizer.step()
        assert bool(optimizer.consumed[0].isfinite().all())
    assert bool(compressor.state_dict()["residuals"][0].isfinite().all())


def scaled_step(optimizer: Optimizer, scaler: Any, *, unscale: bool) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler.scale((parameter * torch.linspace(-1, 1, 2000)).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_scaler_what_is_compressed_is_unscaled(fused: bool) -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    compressor = Compressor(optimizer, ratio=RATIO)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled_step(optimizer, scaler, unscale=True)
    grad = torch.linspace(-1, 1, 2000)
    keep = topk_oracle(grad, RATIO)
    assert torch.equal(parameter.detach(), -torch.where(keep, grad, 0))
    assert torch.equal(compressor.state_dict()["residuals"][0], torch.where(keep, 0, grad))


def test_a_step_that_a_scaler_skips_leaves_no_trace() -> None:
    (parameter,) = parameters_of((2000,))
    for fused in (False, True):
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
        compressor = Compressor(optimizer, ratio=RATIO)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaled_step(optimizer, scaler, unscale=True)
        optimizer.zero_grad()
        kept = copy.deepcopy(compressor.state_dict())
        before = parameter.detach().clone()
        scaler.update(2.0**127)
        (parameter * 1e30).sum().backward()
        parameter.grad.mul_(1e30)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert torch.equal(parameter.detach(), before)
        assert_same(compressor.state_dict(), kept)
        optimizer.zero_grad()


def test_a_fused_optimizer_that_would_unscale_after_us_is_refused() -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    Compressor(optimizer)
    with pytest.raises(StateError, match="unscale_"):
        scaled_step(optimizer, torch.amp.GradScaler("cpu"), unscale=False)
    assert not bool(parameter.detach().any())


def test_accumulated_gradients_are_compressed_once() -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = Consumed([parameter], lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO)
    parts = [torch.randn(2000) for _ in range(3)]
    for part in parts:
        (parameter * part).sum().backward()
    assert not compressor.last
    total = parts[0] + parts[1] + parts[2]
    optimizer.step()
    assert same_bits(optimizer.consumed[0], torch.where(topk_oracle(total, RATIO), total, 0))


# --- Steps of every sort ------------------------------------------------------------------


class Twice(Consumed):
    """Fires the hooks of its own step and of the one it inherits."""

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Failing(Consumed):
    fail = False

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise RuntimeError("no update")
        return super().step(closure)


def closures(
    optimizer: Optimizer, parameter: nn.Parameter, grad: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    def closure() -> float:
        parameter.grad = grad.clone()
        return 3.0

    def plain() -> None:
        closure()
        optimizer.step()

    return {
        "plain": plain,
        "closure": lambda: optimizer.step(closure),
        "keyword": lambda: optimizer.step(closure=closure),
    }


@pytest.mark.parametrize("kind", [Consumed, Twice, Failing])
@pytest.mark.parametrize("how", ["plain", "closure", "keyword"])
def test_a_step_compresses_once(
    kind: type[Consumed], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = kind([parameter], lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO)
    taken: list[Any] = []  # twice would not show otherwise: nothing is lost, so nothing changes
    take = ErrorFeedback.take
    monkeypatch.setattr(
        ErrorFeedback, "take", lambda *args: (taken.append(args[1]), take(*args))[1]
    )
    left = torch.zeros(2000)
    for _ in range(3):
        grad = torch.randn(2000)
        result = closures(optimizer, parameter, grad)[how]()
        assert result == (None if how == "plain" else 3.0)
        total = left + grad
        keep = topk_oracle(total, RATIO)
        left = torch.where(keep, 0, total)
        assert same_bits(optimizer.consumed[0], torch.where(keep, total, 0))
    assert same_bits(compressor.state_dict()["residuals"][0], left)
    assert len(taken) == 3


def test_a_step_that_raised_does_not_hide_the_next() -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = Failing([parameter], lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO)
    parameter.grad = torch.randn(2000)
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="no update"):
        optimizer.step()
    first = compressor.last[id(parameter)]
    optimizer.fail = False
    parameter.grad = torch.randn(2000)
    optimizer.step()
    assert compressor.last[id(parameter)] is not first
    assert int((parameter.grad != 0).sum()) == 200


def test_an_optimizer_that_calls_its_closure_again_is_refused() -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = torch.optim.LBFGS([parameter], lr=0.1)
    Compressor(optimizer, ratio=RATIO)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (parameter - torch.linspace(0, 1, 2000)).square().sum()
        loss.backward()
        return loss

    with pytest.raises(StateError, match="more than once"):
        optimizer.step(closure)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_changes_gradients_afterwards_shows(kind: str) -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = Consumed([parameter], lr=0.1)
    compressor = Compressor(optimizer, kind=kind, ratio=RATIO)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([parameter], 1e-3)

    handle = optimizer.register_step_pre_hook(clip)
    parameter.grad = torch.randn(2000)
    optimizer.step()
    with pytest.raises(StateError, match="changed"):
        compressor.check()
    handle.remove()
    parameter.grad = torch.randn(2000)
    optimizer.step()
    compressor.check()


def test_hooks_registered_later_see_what_is_consumed() -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = Consumed([parameter], lr=0.1)
    Compressor(optimizer, ratio=RATIO)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad.clone()))
    parameter.grad = torch.randn(2000)
    optimizer.step()
    assert same_bits(seen[0], optimizer.consumed[0])


def test_closed_it_compresses_no_more() -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = Consumed([parameter], lr=0.1)
    with pytest.raises(OptionError, match="already"):
        Compressor(optimizer).close()  # the first one; then there may be another
        Compressor(optimizer)
        Compressor(optimizer)
    hooks_on(optimizer)["optimizer_step_pre"].clear()
    compressor = Compressor(optimizer)
    compressor.close()
    compressor.close()
    parameter.grad = grad = torch.randn(2000)
    optimizer.step()
    assert same_bits(optimizer.consumed[0], grad)


def test_nothing_keeps_an_optimizer_alive() -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = Consumed([parameter], lr=0.1)
    compressor = Compressor(optimizer)
    parameter.grad = torch.randn(2000)
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer, compressor
    gc.collect()
    assert gone() is None


def test_gradients_in_one_memory_and_of_strange_types_are_refused() -> None:
    class Mine(torch.Tensor):
        pass

    parameters = parameters_of((2000,), (2000,))
    optimizer = Consumed(parameters, lr=0.1)
    compressor = Compressor(optimizer)
    parameters[0].grad = parameters[1].grad = torch.randn(2000)
    with pytest.raises(StateError, match="one gradient"):
        optimizer.step()
    parameters[1].grad = torch.randn(2000).as_subclass(Mine)
    with pytest.raises(StateError, match="Mine"):
        optimizer.step()
    assert compressor.state_dict()["residuals"] == {}


@pytest.mark.parametrize(
    "options",
    [{"kind": "topkk"}, {"kind": "none"}, {"ratio": 0.0}, {"ratio": 2.0}, {"dense_below": -1}],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    optimizer = Consumed(parameters_of((5,)), lr=0.1)
    with pytest.raises(OptionError):
        Compressor(optimizer, **options)
    assert not hooks_on(optimizer)


# --- State --------------------------------------------------------------------------------


def train(training: Training, steps: int) -> list[float]:
    return [training.step() for _ in range(steps)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_goes_on_bit_for_bit(
    kind: str, make_training: Callable[[int], Training], run_folder: Path
) -> None:
    def begun(steps: int) -> tuple[Training, dict[str, Any]]:
        training = make_training(1)
        compressor = Compressor(training.optimizer, kind=kind, ratio=0.05)
        train(training, steps)
        return training, {**training.state(), "compressor": compressor}

    training, state = begun(3)
    with opened(run_folder, state) as ckpt:
        ckpt.save()
    wanted = train(training, 3)
    resumed, live = begun(2)
    with opened(run_folder, live) as ckpt:
        ckpt.resume()
    assert train(resumed, 3) == wanted
    for key in ("model", "optimizer", "compressor"):
        assert_same(live[key].state_dict(), state[key].state_dict())
    forgetful, live = begun(0)
    with opened(run_folder, live) as ckpt:
        ckpt.resume()
    live["compressor"].load_state_dict({**live["compressor"].state_dict(), "residuals": {}})
    assert train(forgetful, 3) != wanted  # the residuals do make a difference


def test_residuals_are_captured_before_the_next_step_changes_them(
    make_training: Callable[[int], Training], run_folder: Path
) -> None:
    """I1: the copy is made behind the step; the hook that compresses waits for it, too."""
    training = make_training(1)
    compressor = Compressor(training.optimizer, ratio=0.05)
    state = {**training.state(), "compressor": compressor}
    train(training, 2)
    with opened(run_folder, state, method="lazy") as ckpt:
        then = copy.deepcopy(compressor.state_dict())
        ckpt.save()
        train(training, 1)
        assert not torch.equal(compressor.state_dict()["residuals"][0], then["residuals"][0])
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
    assert_same(compressor.state_dict(), then)


def test_loaded_residuals_are_copies() -> None:
    (parameter,) = parameters_of((2000,))
    optimizer = Consumed([parameter], lr=0.1)
    compressor = Compressor(optimizer, ratio=RATIO)
    parameter.grad = torch.randn(2000)
    optimizer.step()
    state = copy.deepcopy(compressor.state_dict())
    held = copy.deepcopy(state)
    compressor.load_state_dict(state)
    parameter.grad = torch.randn(2000)
    optimizer.step()
    assert_same(state, held)


def test_the_state_of_other_parameters_is_refused() -> None:
    def compressor_of(*shapes: tuple[int, ...]) -> Compressor:
        parameters = parameters_of(*shapes)
        optimizer = Consumed(parameters, lr=0.1)
        compressor = Compressor(optimizer)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
        return compressor

    saved = compressor_of((20, 100), (3000,)).state_dict()
    kept = compressor_of((3000,), (20, 100))
    before = copy.deepcopy(kept.state_dict())
    with pytest.raises(MismatchError) as caught:
        kept.load_state_dict(saved)
    assert len(caught.value.mismatches) >= 2
    assert_same(kept.state_dict(), before)
    with pytest.raises(MismatchError, match="saved 2, live 1"):
        compressor_of((20, 100)).load_state_dict(saved)
    compressor_of((20, 100), (3000,)).load_state_dict(saved)
