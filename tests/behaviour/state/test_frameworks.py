"""What frameworks and users put around optimizers and modules: the state that trains is saved, and
what is restored reaches it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer

import everstep
from everstep.errors import MismatchError, UnsupportedStateError
from everstep.state.providers.optimizers import unwrap_optimizer
from tests.support.oracle import State, check_resume, model_of, train
from tests.support.world import opened


class ByProperties(Optimizer):
    """As accelerate's: an optimizer by its class, which nothing but its own code has made."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class ByClass:
    """As Lightning's: takes on the class of what it wraps, and all that is read from it is that
    one's. What torch's ``load_state_dict()`` writes to it stays with it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Wrapped{kind.__name__}", (type(self), kind), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


WRAPPERS: dict[str, Any] = {
    "by properties": ByProperties,
    "by class": ByClass,
    "in each other": lambda optimizer: ByProperties(ByClass(optimizer)),  # type: ignore[arg-type]
}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("method", ["lazy", "logged"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_optimizer_in_a_wrapper(wrapper: str, method: str, run_folder: Path) -> None:
    """The one inside is restored, and its updates are seen and held back."""

    def build(seed: int) -> State:
        model = model_of(seed)
        inner = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {"model": model, "optimizer": WRAPPERS[wrapper](inner)}

    state = check_resume(run_folder, build, train, method=method)
    inner = state["optimizer"].optimizer
    while not type(inner).__module__.startswith("torch.optim."):
        inner = inner.optimizer
    assert len(inner.state) == len(list(state["model"].parameters()))
    assert {int(values["step"]) for values in inner.state.values()} == {5}


def test_a_compressor_of_an_optimizer_in_a_wrapper(run_folder: Path) -> None:
    model = model_of(1)
    optimizer: Any = ByProperties(torch.optim.SGD(model.parameters(), lr=0.05))
    compressor = everstep.compress.Compressor(optimizer, ratio=0.5, dense_below=1)
    state = {"model": model, "optimizer": optimizer, "compressor": compressor}
    with opened(run_folder, state, method="lowdiff") as ckpt:
        ckpt.resume()
        for _ in range(3):
            train(state)
            ckpt.step()
        assert ckpt.stats().log_holes == 0
    assert any(form is not None for form in compressor.last.values())


class Bare(Optimizer):
    """Calls none of torch's code, and wraps nothing."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.state: Any = {}


class Unpatched(Bare):
    """Has hooks, which nobody calls."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure: Any = None) -> Any:
        return closure


class Slow(Bare):
    """As Lookahead is written here and there: no mere wrapper, it keeps state of its own."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups = self.optimizer.param_groups
        self.state = {}


@pytest.mark.parametrize("kind", [Bare, Unpatched, Slow])
def test_an_optimizer_whose_step_calls_no_hooks_is_refused(kind: Any, run_folder: Path) -> None:
    """Else an update would tear what is being copied."""
    model = model_of(1)
    state = {"model": model, "optimizer": kind(model.parameters())}
    with (
        pytest.raises(UnsupportedStateError, match=r"calls no hooks.*put the optimizer"),
        opened(run_folder, state),
    ):
        pass


def test_unwrapped_stops_at_optimizers_that_keep_state_of_their_own() -> None:
    inner = torch.optim.SGD(model_of(1).parameters(), lr=0.1)
    outer = Around(inner)
    assert unwrap_optimizer(outer) is outer
    assert unwrap_optimizer(ByProperties(outer)) is outer


# --- Others hold what an optimizer is made of ---------------------------------------------


@pytest.mark.parametrize("method", ["lazy", "logged"])
def test_a_loop_that_holds_a_group(method: str, run_folder: Path) -> None:
    """A rate that it sets there after a resume counts, as it did before."""

    def build(seed: int) -> State:
        model = model_of(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        held[:] = optimizer.param_groups
        return {"model": model, "optimizer": optimizer, "count": [0]}

    def step(state: State) -> None:
        state["count"][0] += 1
        held[0]["lr"] = 0.01 * state["count"][0]
        train(state)

    held: list[Any] = []
    state = check_resume(run_folder, build, step, method=method)
    assert state["optimizer"].param_groups[0] is held[0]
    assert held[0]["lr"] == pytest.approx(0.05)


def test_a_loop_that_holds_a_group_and_goes_back(run_folder: Path) -> None:
    model = model_of(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer}
    groups, group, kept = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    with opened(run_folder, state, method="logged") as ckpt:
        ckpt.resume()
        for _ in range(3):
            group["lr"] *= 0.5
            train(state)
            ckpt.step()
        assert ckpt.rewind(2).exact
        assert group["lr"] == 0.0125
    assert optimizer.param_groups is groups
    assert groups[0] is group
    assert optimizer.state is kept


class Around(Optimizer):
    """As SAM is mostly written: it hands its groups to another optimizer, which updates."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


def test_optimizers_that_share_their_groups(run_folder: Path) -> None:
    """A schedule of the outer one's rates is that of the inner one after a resume, too."""

    def build(seed: int) -> State:
        model = model_of(seed)
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        outer = Around(inner)
        schedule = torch.optim.lr_scheduler.ExponentialLR(outer, 0.5)
        return {"model": model, "optimizer": outer, "inner": inner, "schedule": schedule}

    def step(state: State) -> None:
        train(state)
        state["schedule"].step()

    state = check_resume(run_folder, build, step, method="lazy")
    assert state["inner"].param_groups is state["optimizer"].param_groups


@pytest.mark.parametrize("given", [False, True])
def test_an_optimizer_in_another_is_told_of(
    given: bool, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its moments are in no state_dict() of the other."""
    model = model_of(1)
    outer = Around(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    state: dict[str, Any] = {"model": model, "optimizer": outer}
    if given:
        state["inner"] = ByProperties(outer.inner)
    with caplog.at_level(logging.WARNING, "everstep"), opened(run_folder, state):
        pass
    assert ("'optimizer' holds another optimizer (inner)" in caplog.text) is not given


# --- Modules ------------------------------------------------------------------------------


class AsFabrics(nn.Module):
    """As Lightning Fabric's: hands out the state of the module in it, by that one's names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module
        self._original_module = module

    def forward(self, batch: torch.Tensor) -> Any:
        return self._forward_module(batch)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self._original_module.state_dict(*args, **options)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        return self._original_module.load_state_dict(state_dict, *args, **options)


def test_a_module_in_fabrics_wrapper_has_its_own_names(run_folder: Path) -> None:
    def build(seed: int) -> State:
        model = AsFabrics(model_of(seed))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}

    check_resume(run_folder, build, method="logged")
    check_plain_names(run_folder)


def check_plain_names(run_folder: Path) -> None:
    """A model without any wrapper takes what is there."""
    plain = model_of(2)
    state = {"model": plain, "optimizer": torch.optim.AdamW(plain.parameters(), lr=0.05)}
    with opened(run_folder, state, method="lazy") as ckpt:
        assert ckpt.resume().mismatched == ()


class Observed(nn.Module):
    """As torch's quantization: a range that the first batch gives a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("rate", torch.tensor([1.0]))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = batch.detach().amin(0)
        if self.low.numel() == 0:
            self.low.resize_(found.shape)
            self.rate = torch.ones(found.shape)
            self.low.copy_(found)
        self.low.copy_(torch.minimum(self.low, found))
        self.rate = self.rate * 0.9
        return batch * self.rate - self.low

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in ("low", "rate"):
            setattr(self, name, state_dict[prefix + name].clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("method", ["lazy", "logged"])
def test_a_buffer_that_the_first_batch_gives_a_shape(method: str, run_folder: Path) -> None:
    def build(seed: int) -> State:
        model = nn.Sequential(model_of(seed), Observed())
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}

    check_resume(run_folder, build, method=method)


@pytest.mark.parametrize("kind", ["of a parameter", "in a module of torch's", "not a placeholder"])
def test_no_other_tensor_may_have_another_shape(kind: str, run_folder: Path) -> None:
    def model_with(size: int) -> nn.Module:
        if kind == "in a module of torch's":
            return nn.BatchNorm1d(size)
        model = Observed()
        if kind == "of a parameter":
            model.register_parameter("weight", nn.Parameter(torch.ones(size)))
        else:
            model.low = torch.zeros(size + 1)
        return model

    with opened(run_folder, {"model": model_with(2)}) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.save()
    with (
        opened(run_folder, {"model": model_with(1)}) as ckpt,
        pytest.raises(MismatchError, match=r"saved F32 \[[23]\], live F32 \[[12]\]"),
    ):
        ckpt.resume()


def test_names_within_a_wrapper_for_activation_checkpointing(run_folder: Path) -> None:
    """Its state_dict() has the names of what is in it, and so have optimizers."""

    def build(seed: int) -> State:
        model = model_of(seed)
        model[0] = checkpoint_wrapper(model[0])  # type: ignore[index,operator]
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}

    check_resume(run_folder, build, method="logged")
    check_plain_names(run_folder)


@pytest.mark.parametrize("where", ["plain data", "another name"])
def test_a_replica_of_parameters_that_no_base_names_is_refused_at_once(
    where: str, run_folder: Path
) -> None:
    """The keeper would find out, minutes later, and training would end with an error."""
    state: dict[str, Any]
    if where == "plain data":
        weight = torch.zeros(3, requires_grad=True)
        state, parameters = {"weights": {"first": weight}}, [weight]
    else:
        module = nn.Linear(2, 2)
        module.register_state_dict_post_hook(_renames)
        state, parameters = {"model": module}, list(module.parameters())
    state["optimizer"] = torch.optim.AdamW(parameters)
    with pytest.raises(UnsupportedStateError, match="under that name") as caught:
        everstep.Checkpointer(run_folder, state, method="lowdiff_plus")
    assert caught.value.hint is not None
    assert "logged" in caught.value.hint
    everstep.Checkpointer(run_folder, state, method="logged").close()


def _renames(module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
    for key in list(state_dict):
        state_dict[f"{prefix}renamed.{key.removeprefix(prefix)}"] = state_dict.pop(key)


# --- Loaders ------------------------------------------------------------------------------


class Loader:
    """As torchdata's StatefulDataLoader: its iterator is made when it is asked for, or for its
    state, and draws a number from torch's generator then."""

    def __init__(self) -> None:
        self.position = self.seed = 0
        self.is_made = False

    def _make(self) -> None:
        if not self.is_made:
            self.is_made = True
            self.seed = int(torch.randint(1 << 30, ()))

    def state_dict(self) -> dict[str, int]:
        self._make()
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position, self.is_made = state_dict["position"], False

    def next(self) -> int:
        self._make()
        self.position += 1
        return self.position


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["sync", "lazy", "logged"])
def test_a_loader_that_draws_when_its_iterator_is_made(method: str, run_folder: Path) -> None:
    """Behind a resume nothing is drawn that an undisturbed training would not draw."""

    def build(seed: int) -> State:
        model = model_of(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loader = Loader()
        loader.next()
        return {"model": model, "optimizer": optimizer, "loader": loader, "seen": []}

    def step(state: State) -> None:
        state["seen"].append(state["loader"].next())
        train(state)

    check_resume(run_folder, build, step, method=method)


# --- Models that are frozen for the most part -----------------------------------------------


@pytest.mark.parametrize("options", [{}, {"static": ["model/0.*"]}, {"method": "lazy"}])
def test_what_a_log_holds_of_frozen_weights_is_told(
    options: dict[str, Any], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than the gradients by far, and nothing else in the first line says so."""
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 2))
    model[0].requires_grad_(False)
    state = {"model": model, "optimizer": torch.optim.AdamW(model[1].parameters())}
    with opened(run_folder, state, **{"method": "logged", **options}):
        said = capsys.readouterr().err
    there = "each step of the log also contains 1.4 MB" in said and "'model/0.weight'" in said
    assert there is (not options)
    assert ("static=" in said) is (not options)
