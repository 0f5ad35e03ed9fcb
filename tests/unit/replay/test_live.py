"""Replay on the optimizer of a training process, as a recovery does it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from everstep.errors import ReplayError, UnsupportedStateError
from everstep.replay import blocked, exactness
from everstep.replay.engine import Replayer
from everstep.replay.exactness import declare
from everstep.replay.updates import Update
from tests.support.replays import Run, assert_same_bits, options_of, record


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(exactness, "_DECLARED", {})


def put_back(run: Run, step: int) -> Replayer:
    """The live optimizer and its parameters as they were before ``step``."""
    moment = copy.deepcopy(run.moments[step])
    run.optimizer.state.clear()
    with torch.no_grad():
        for name, parameter in run.parameters.items():
            parameter.copy_(moment.tensors[name])
            if name in moment.state:
                run.optimizer.state[parameter] = moment.state[name]
    for group, options in zip(run.optimizer.param_groups, moment.groups, strict=True):
        group.update(options)
    return Replayer.of(run.optimizer, {id(p): name for name, p in run.parameters.items()})


def assert_at_the_end(run: Run) -> None:
    now, end = run.moment(), run.moments[-1]
    assert_same_bits(now.tensors, end.tensors)
    assert_same_bits(now.state, end.state)
    assert_same_bits(dict(enumerate(now.groups)), dict(enumerate(options_of(run.optimizer))))


MAKERS: dict[str, Any] = {
    "adamw": lambda groups: AdamW(groups),
    "fused": lambda groups: Adam(groups, fused=True),
    "sgd without state": lambda groups: SGD(groups, lr=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_live_optimizer_ends_where_training_ended(name: str) -> None:
    run = record(MAKERS[name], shapes={"weight": (13, 31), "bias": (13,), "line": (357,)})
    for step in (0, 5):
        put_back(run, step).apply(run.updates[step:])
        assert_at_the_end(run)


@contextmanager
def global_hooks() -> Iterator[list[str]]:
    """Global hooks that note themselves, and spoil every gradient."""
    called: list[str] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        called.append("before")
        spoil(optimizer)

    handles = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def spoil(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Calling(AdamW):
    """A subclass whose step calls its parent's: torch fires hooks inside of it, too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [AdamW, torch.optim.RMSprop, Calling])
def test_no_hook_runs_and_all_are_there_afterwards(kind: Any) -> None:
    if kind is Calling:
        declare(Calling, elementwise=True)
    run = record(lambda groups: kind(groups), steps=6)
    own = [
        run.optimizer.register_step_pre_hook(spoil),
        run.optimizer.register_step_post_hook(lambda *_: called.append("own")),
    ]
    with global_hooks() as called:
        put_back(run, 2).apply(run.updates[2:])
        assert not called
        assert_at_the_end(run)
        for parameter in run.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        run.optimizer.step()
        assert set(called) == {"before", "after", "own"}
    assert all(float(p.grad.max()) <= 0.25 for p in run.parameters.values() if p.numel())
    for handle in own:  # they still belong to the same lists
        handle.remove()
    called.clear()
    run.optimizer.step()
    assert not called


def test_gradients_are_those_from_before() -> None:
    run = record(lambda groups: torch.optim.Adamax(groups), steps=4)
    replayer = put_back(run, 1)
    parameters = list(run.parameters.values())
    kept = [torch.full_like(parameter, 7.0) for parameter in parameters]
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient
    parameters[2].grad = None
    replayer.apply(run.updates[1:])
    assert parameters[2].grad is None
    for parameter, gradient in zip(parameters, kept, strict=True):
        if parameter is not parameters[2]:
            assert parameter.grad is gradient
            assert bool((gradient == 7.0).all())


def test_hyperparameters_are_those_of_the_last_update() -> None:
    """Also tensors, which are written in place: a scheduler or a CUDA graph may hold them."""
    rate = torch.tensor(0.1)
    run = record(
        lambda groups: SGD([{**group, "lr": rate.clone()} for group in groups], lr=0.1),
        schedule=lambda step, groups: [group["lr"].fill_(0.1 / (step + 1)) for group in groups],
        steps=5,
    )
    replayer = put_back(run, 2)
    held = run.optimizer.param_groups[0]["lr"]
    replayer.apply(run.updates[2:4])
    assert run.optimizer.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(0.1 / 4)
    replayer.apply(run.updates[4:])
    assert_at_the_end(run)
    assert held.item() == pytest.approx(0.1 / 5)
    logged = run.updates[-1].groups[0]["lr"]
    held.fill_(3.0)
    assert logged.item() == pytest.approx(0.1 / 5)  # the log has its own


def test_a_scheduler_on_the_optimizer_is_no_obstacle() -> None:
    run = record(lambda groups: AdamW(groups), steps=4)
    scheduler = LambdaLR(run.optimizer, lambda step: 1.0)
    replayer = put_back(run, 1)
    replayer.apply(run.updates[1:])
    assert_at_the_end(run)
    assert not getattr(run.optimizer, "_opt_called", False)  # nothing was counted
    assert scheduler.last_epoch == 0


def test_a_scalers_leftovers_stay() -> None:
    run = record(
        lambda groups: AdamW(groups, fused=True),
        scaler=lambda step: (torch.tensor(4.0), torch.tensor(0.0)) if step % 2 else (None, None),
        steps=6,
    )
    replayer = put_back(run, 1)
    optimizer: Any = run.optimizer
    optimizer.grad_scale = left = torch.tensor(64.0)
    optimizer.register_step_pre_hook(spoil)
    replayer.apply(run.updates[1:])
    assert_at_the_end(run)
    assert optimizer.grad_scale is left
    assert not hasattr(optimizer, "found_inf")
    optimizer.state.clear()
    again = put_back(run, 0)
    optimizer.grad_scale = left
    again.apply(run.updates)  # the first one by the optimizer's own step
    assert_at_the_end(run)
    assert optimizer.grad_scale is left


def test_a_parameter_without_name_is_refused() -> None:
    run = record(lambda groups: AdamW(groups), steps=1)
    names = {id(p): name for name, p in run.parameters.items() if name != "line"}
    with pytest.raises(ReplayError, match="parameter 2 of group 0 has no name"):
        Replayer.of(run.optimizer, names)


def test_a_group_that_was_added_is_refused() -> None:
    run = record(lambda groups: AdamW(groups), steps=3)
    replayer = put_back(run, 1)
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ReplayError, match="parameters have been replaced"):
        replayer.apply(run.updates[1:])


class Sharded(torch.Tensor):
    pass


def test_what_cannot_be_replayed_is_refused_with_the_reason() -> None:
    plain = torch.nn.Parameter(torch.zeros(3))
    sharded = torch.zeros(3).as_subclass(Sharded)
    for optimizer, why in [
        (torch.optim.LBFGS([plain]), "evaluates the loss several times"),
        (Adam([plain], differentiable=True), "differentiable=True"),
        (Adam([plain], capturable=True), "capturable=True: torch has no such update on cpu"),
        (Calling([plain]), "Calling is not one of torch.optim's classes.*declare"),
        (SGD([sharded], lr=0.1), "a Sharded is not a plain tensor"),
        (
            SGD([torch.zeros(3).half()], lr=0.1, momentum=0.9, fused=True),
            "fused SGD with momentum in half precision",
        ),
    ]:
        assert why.split(".*")[0] in str(exactness.refusal(optimizer))
        with pytest.raises(UnsupportedStateError, match=why) as raised:
            Replayer.of(optimizer, {})
        assert raised.value.leaves


def test_a_step_that_was_replaced_is_refused() -> None:
    optimizer: Any = AdamW([torch.nn.Parameter(torch.zeros(3))])
    LambdaLR(optimizer, lambda step: 1.0)  # wraps, and changes nothing
    assert exactness.refusal(optimizer) is None
    optimizer.step = lambda: None
    assert "was replaced" in str(exactness.refusal(optimizer))


class Rebinding(Optimizer):
    """Binds new tensors and numbers in its state, and writes to the gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(count=0, old=torch.zeros_like(parameter), older=None)
                state["count"] += 1
                state["older"], state["old"] = state["old"], parameter.grad.mul_(group["lr"]) + 1
                parameter -= state["old"] * state["count"] + state["older"]


def test_a_declared_optimizer() -> None:
    declare(Rebinding, elementwise=True)
    run = record(lambda groups: Rebinding(groups, lr=0.1), steps=7)
    put_back(run, 3).apply(run.updates[3:])
    assert_at_the_end(run)
    base = copy.deepcopy(run.moments[3])
    given = {(n, k): v for n, values in base.state.items() for k, v in values.items()}
    replayer = Replayer(Rebinding, run.names, base.tensors, base.state, base.groups)
    replayer.apply(run.updates[3:])
    assert_same_bits(base.tensors, run.moments[-1].tensors)
    assert_same_bits(replayer.state, run.moments[-1].state)
    for (name, key), value in given.items():
        if isinstance(value, torch.Tensor):  # in place, though it binds new ones
            assert replayer.state[name][key] is value
    assert not replayer.exact.exact
    assert "declared by its user" in replayer.exact.why


def test_updates_of_two_optimizers_share_the_numbers() -> None:
    one = record(lambda groups: SGD(groups, lr=0.1), steps=3, key="generator")
    two = record(lambda groups: Adam(groups), steps=3, key="discriminator")
    for run, lsns in ((one, (1, 3, 4)), (two, (2, 5, 6))):
        run.updates[:] = [
            Update(lsn, u.optimizer, u.groups, u.gradients)
            for lsn, u in zip(lsns, run.updates, strict=True)
        ]
        replayer = put_back(run, 0)
        replayer.apply(run.updates[:2])
        with pytest.raises(ReplayError, match=f"cannot follow update {lsns[1]}"):
            replayer.apply(run.updates[1:])
        replayer.apply(run.updates[2:])
        assert_at_the_end(run)
        other = two if run is one else one
        with pytest.raises(ReplayError, match="is one of"):
            replayer.apply([Update(9, other.updates[0].optimizer, (), {})])
