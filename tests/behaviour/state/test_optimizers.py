"""A resumed optimizer goes on bit for bit as an uninterrupted one would: torch is the oracle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.oracle import AFTER, BEFORE, State, check_resume, model_of, train
from tests.support.world import opened, seed_everything


def with_optimizer(make: Callable[[Iterable[Any]], Optimizer]) -> Callable[[int], State]:
    def build(seed: int) -> State:
        model = model_of(seed)
        return {"model": model, "optimizer": make(model.parameters())}

    return build


def _adam(kind: type[Optimizer]) -> dict[str, Callable[[Iterable[Any]], Optimizer]]:
    name = kind.__name__
    variants: dict[str, dict[str, Any]] = {
        f"{name}-loop": {"foreach": False},
        f"{name}-foreach": {"foreach": True},
        f"{name}-fused": {"fused": True},
        f"{name}-amsgrad": {"amsgrad": True, "weight_decay": 0.1},
        f"{name}-tensor-lr": {"lr": torch.tensor(0.01), "foreach": False},
        f"{name}-fused-tensor-lr": {"lr": torch.tensor(0.01), "fused": True},
    }

    def make(options: dict[str, Any]) -> Callable[[Iterable[Any]], Optimizer]:
        def build(parameters: Iterable[Any]) -> Optimizer:
            lr = options.get("lr", 0.01)
            lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
            return kind(parameters, **{**options, "lr": lr})

        return build

    return {key: make(options) for key, options in variants.items()}


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    **_adam(torch.optim.Adam),
    **_adam(torch.optim.AdamW),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "Adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=1),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_equals_uninterrupted(name: str, run_folder: Path) -> None:
    method = "async" if hash_of(name) % 2 else "sync"
    check_resume(run_folder, with_optimizer(OPTIMIZERS[name]), method=method)


def hash_of(name: str) -> int:
    return sum(name.encode())


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", ["SGD-momentum", "Adam-loop", "AdamW-fused", "LBFGS", "ASGD"])
def test_loaded_into_an_optimizer_that_has_stepped(name: str, run_folder: Path) -> None:
    check_resume(run_folder, with_optimizer(OPTIMIZERS[name]), warm=2)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("name", ["SGD-momentum", "Adam-loop", "AdamW-fused", "LBFGS"])
@pytest.mark.parametrize("warm", [0, 2])
def test_saved_before_the_first_update(name: str, warm: int, run_folder: Path) -> None:
    """Lazy state is absent from the base, and gone after loading it into a stepped optimizer."""
    check_resume(run_folder, with_optimizer(OPTIMIZERS[name]), before=0, warm=warm)


def test_muon(run_folder: Path) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def build(seed: int) -> State:
        model = model_of(seed)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        muon = torch.optim.Muon(matrices)
        return {"model": model, "optimizer": muon, "rest": torch.optim.AdamW(others)}

    def step(state: State) -> None:
        train(state)
        state["rest"].step()
        state["rest"].zero_grad()

    check_resume(run_folder, build, step)


def test_sparse_adam(run_folder: Path) -> None:
    def build(seed: int) -> State:
        seed_everything(seed)
        model = nn.EmbeddingBag(20, 4, sparse=True)
        return {"model": model, "optimizer": torch.optim.SparseAdam(list(model.parameters()))}

    def step(state: State) -> None:
        state["optimizer"].zero_grad()
        words = torch.randint(0, 20, (6,))
        state["model"](words, torch.tensor([0, 3])).square().sum().backward()
        state["optimizer"].step()

    check_resume(run_folder, build, step)


def test_parameter_groups_of_their_own(run_folder: Path) -> None:
    def build(seed: int) -> State:
        model = model_of(seed)
        groups = [
            {"params": model[0].parameters(), "lr": 0.3, "label": ("body", 1)},
            {"params": model[3].parameters(), "weight_decay": 0.2},
            {"params": model[1].parameters()},
        ]
        return {"model": model, "optimizer": torch.optim.AdamW(groups, lr=0.01)}

    def step(state: State) -> None:
        train(state)
        state["optimizer"].param_groups[0]["lr"] *= 0.5

    check_resume(run_folder, build, step)


def test_a_group_that_gets_a_rate_of_its_own(run_folder: Path) -> None:
    """One tensor is the rate of three groups; from the second step on one has another."""

    def build(seed: int) -> State:
        model, lr = model_of(seed), torch.tensor(0.01)
        groups = [{"params": model[at].parameters(), "lr": lr} for at in (0, 1, 3)]
        return {"model": model, "optimizer": torch.optim.AdamW(groups, foreach=False)}

    def step(state: State) -> None:
        first, other, third = state["optimizer"].param_groups
        if other["lr"] is first["lr"]:
            other["lr"] = torch.tensor(0.03)
        other["lr"].mul_(0.5)
        assert third["lr"] is first["lr"], "as torch loads it"
        train(state)

    state = check_resume(run_folder, build, step)
    assert [group["lr"].item() for group in state["optimizer"].param_groups] == pytest.approx(
        [0.01, 0.03 * 0.5 ** (BEFORE + AFTER), 0.01]
    )


class _Held(torch.optim.AdamW):
    """With the tensor that a loop sets its rates by."""

    held: torch.Tensor


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["sync", "lazy"])
@pytest.mark.parametrize("where", ["two groups", "a tuple", "plain data"])
def test_a_tensor_of_the_groups_that_the_loop_holds(
    where: str, method: str, run_folder: Path
) -> None:
    """What the loop writes to it behind a resume is what the optimizer goes on with."""

    def build(seed: int) -> State:
        model = model_of(seed)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim < 2]
        if where == "two groups":
            held = torch.tensor(0.03)
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
            optimizer = _Held(groups, lr=held, foreach=False)
        elif where == "plain data":
            held = torch.tensor(0.03)
            optimizer = _Held(model.parameters(), lr=held, foreach=False)
            return {"model": model, "optimizer": optimizer, "loop": {"rate": held}}
        else:
            held = torch.tensor(0.9)
            optimizer = _Held(model.parameters(), betas=(held, torch.tensor(0.9)), foreach=False)
        optimizer.held = held
        return {"model": model, "optimizer": optimizer}

    def step(state: State) -> None:
        held_by(state).mul_(0.8)
        train(state)

    def held_by(state: State) -> torch.Tensor:
        held = state["loop"]["rate"] if "loop" in state else state["optimizer"].held
        assert isinstance(held, torch.Tensor)
        return held

    state = check_resume(run_folder, build, step, method=method, warm=1)
    for group in state["optimizer"].param_groups:
        held = group["betas"][0] if where == "a tuple" else group["lr"]
        assert held is held_by(state)


class _Odd(torch.optim.SGD):
    """With what torch's own ``load_state_dict`` takes apart in its state."""

    def __init__(self, params: Any, make: Callable[[], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.make = make

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["odd"], state["ones"] = self.make(), torch.ones(2)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(3.0),
        lambda: range(2, 9, 3),
        lambda: {"deep": [np.ones((2, 1), np.int16), torch.arange(2)]},
        lambda: deque([np.zeros(1)], 4),
    ],
    ids=["array", "range", "nested", "deque"],
)
def test_state_that_torch_cannot_load(make: Callable[[], Any], run_folder: Path) -> None:
    def build(seed: int) -> State:
        model = model_of(seed)
        return {"model": model, "optimizer": _Odd(model.parameters(), make)}

    optimizer = check_resume(run_folder, build)["optimizer"]
    for state in optimizer.state.values():
        assert repr(state["odd"]) == repr(make())
        assert type(state["odd"]) is type(make())


def test_named_parameters(run_folder: Path) -> None:
    def build(seed: int) -> State:
        model = model_of(seed)
        return {"model": model, "optimizer": torch.optim.Adam(model.named_parameters())}

    check_resume(run_folder, build)


def test_several_optimizers(run_folder: Path) -> None:
    """A GAN: two models, two optimizers, each step uses both."""

    def build(seed: int) -> State:
        maker, judge = model_of(seed), model_of(seed + 10)
        return {
            "maker": maker,
            "judge": judge,
            "maker_optimizer": torch.optim.Adam(maker.parameters(), betas=(0.5, 0.9)),
            "judge_optimizer": torch.optim.RMSprop(judge.parameters()),
        }

    def step(state: State) -> None:
        train(state, "maker", "maker_optimizer")
        for _ in range(2):
            train(state, "judge", "judge_optimizer")

    check_resume(run_folder, build, step)


def test_frozen_and_unused_parameters(run_folder: Path) -> None:
    """Where no gradient came there is no state, which is not the same as zeros."""

    def build(seed: int) -> State:
        model = model_of(seed)
        model[0].bias.requires_grad_(False)  # type: ignore[union-attr, operator]
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    state = check_resume(run_folder, build)
    held = state["optimizer"].state
    assert state["model"][0].bias not in held
    assert state["model"][0].weight in held


@pytest.mark.thinned(18)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("method", ["sync", "lazy"])
def test_parameters_in_another_order_of_memory(
    kind: type[Optimizer], flags: dict[str, Any], method: str, run_folder: Path
) -> None:
    """As ``channels_last`` makes it: moments that a new process gets lie as they did, or a fused
    kernel, which goes through both as they lie, would pair them with other elements."""
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def build(seed: int) -> State:
        model = model_of(seed)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        return {"model": model, "optimizer": kind(model.parameters(), 0.1, **momentum, **flags)}

    state = check_resume(run_folder, build, method=method)
    for parameter, values in state["optimizer"].state.items():
        for value in values.values():
            assert value.dim() == 0 or value.stride() == parameter.stride()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("to_none", [True, False])
def test_parameters_that_the_next_loss_does_not_depend_on(run_folder: Path, to_none: bool) -> None:
    """Where gradients are zeroed in place an update changes them all the same, by weight decay and
    momentum; where there is none it does not."""

    def training(seed: int) -> tuple[nn.Module, Optimizer]:
        seed_everything(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def one_step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        model[0].requires_grad_(step < 3)  # type: ignore[index]
        model[1].requires_grad_(step > 5)  # type: ignore[index]
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)

    def bits(model: nn.Module, optimizer: Optimizer) -> list[bytes]:
        tensors = [*model.parameters()]
        tensors += [tensor for values in optimizer.state.values() for tensor in values.values()]
        return [tensor.detach().numpy().tobytes() for tensor in tensors]

    ours, wanted = training(1), []
    with opened(run_folder, {"model": ours[0], "optimizer": ours[1]}, keep=9) as ckpt:
        for step in range(1, 8):
            one_step(*ours, step)
            wanted.append(bits(*ours))
            ckpt.step()
            ckpt.save()
    for at in (2, 4, 5):
        other = training(9)
        with opened(run_folder, {"model": other[0], "optimizer": other[1]}) as ckpt:
            ckpt.resume(step=at)
            for step in range(at + 1, 8):
                one_step(*other, step)
                assert bits(*other) == wanted[step - 1], (at, step)


def test_parameters_outside_of_every_module(run_folder: Path) -> None:
    """They are named by position; a module called like such a position is not mistaken for one."""

    def build(seed: int) -> State:
        seed_everything(seed)
        inside = nn.ParameterList([nn.Parameter(torch.randn(3))])
        loose = nn.Parameter(torch.randn(3))
        optimizer = torch.optim.Adam([loose, inside[0]])
        return {"group0": inside, "optimizer": optimizer, "loose": loose}

    def step(state: State) -> None:
        state["optimizer"].zero_grad()
        (state["group0"][0].square() * 2 + state["loose"].square()).sum().backward()
        state["optimizer"].step()

    state = check_resume(run_folder, build, step)
    first, second = state["optimizer"].param_groups[0]["params"]
    assert set(state["optimizer"].state) == {first, second}


class Odd(Optimizer):
    """State that ``load_state_dict`` would spoil: other dtypes, nested, text, a global part."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["past"] = [torch.zeros(p.shape), (torch.zeros(3, dtype=torch.int64),)]
                    state["more"] = {"count": torch.tensor(2**40 + 1), "mask": p.detach() > 0}
                    state["kind"] = "odd"
                    state["wide"] = torch.zeros(p.numel(), 8 * p.numel())
                state["past"][0].add_(p.grad.float(), alpha=0.1)
                state["past"][1][0].add_(1)
                state["more"]["count"].add_(1)
                state["wide"].add_(1e-3)
                state["master"].sub_(state["past"][0] + state["wide"].sum(), alpha=group["lr"])
                p.data.copy_(state["master"])


@pytest.mark.parametrize("warm", [0, 1])
def test_state_of_other_dtypes_than_the_parameters(warm: int, run_folder: Path) -> None:
    """fp32 moments of bf16 parameters, counters that bf16 cannot hold, state far larger than
    the parameters (as Shampoo's): all of it comes back as it was."""

    def build(seed: int) -> State:
        model = model_of(seed, torch.bfloat16)
        return {"model": model, "optimizer": Odd(model.parameters())}

    state = check_resume(run_folder, build, warm=warm)
    held = state["optimizer"].state[state["model"][0].weight]
    assert held["kind"] == "odd"
    assert held["past"][0].dtype == held["master"].dtype == torch.float32
    assert held["more"]["count"].item() == 2**40 + 1 + BEFORE + AFTER
    assert held["more"]["mask"].dtype == torch.bool


def test_state_shared_between_parameters_stays_shared(run_folder: Path) -> None:
    class Sharing(Optimizer):
        def __init__(self, parameters: Iterable[Any]) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            parameters = self.param_groups[0]["params"]
            clock = self.state[parameters[0]].setdefault("clock", torch.zeros(()))
            clock.add_(1)
            for p in parameters:
                self.state[p]["clock"] = clock
                p.data.sub_(p.grad * clock)

    state = check_resume(run_folder, with_optimizer(Sharing))
    clocks = {id(held["clock"]) for held in state["optimizer"].state.values()}
    assert len(clocks) == 1


@pytest.mark.parametrize("method", ["sync", "async"])
def test_a_learning_rate_in_a_tensor_keeps_its_bits(method: str, run_folder: Path) -> None:
    rate = 0.1 + 2**-30

    def build(seed: int) -> State:
        model = model_of(seed)
        lr = torch.tensor(rate / seed, dtype=torch.float64)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=lr)}

    state = check_resume(run_folder, build, method=method)
    lr = state["optimizer"].param_groups[0]["lr"]
    assert (lr.dtype, lr.item()) == (torch.float64, rate)
