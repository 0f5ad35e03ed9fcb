"""The short way of a survey finds what looking anew finds, whatever was done to the state."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from everstep.errors import StateError, UnsupportedStateError
from everstep.state import survey as survey_module
from everstep.state.guards import (
    _MODULE_NAMES,
    _OPTIMIZER_NAMES,
    TensorGuard,
    _is_torchs_own,
)
from everstep.state.layout.entries import is_reserved
from everstep.state.providers.modules import ModuleProvider
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.survey import Survey
from everstep.state.training_state import State
from tests.support.state_changes import CHANGES, EXTRA, SHAPES, Values, step, world
from tests.support.world import assert_same


def outcome(survey: Callable[[], Survey]) -> Survey | tuple[Any, ...]:
    try:
        return survey()
    except Exception as error:  # of a hook, for example
        return (type(error), getattr(error, "leaves", str(error)))


def assert_as_new(state: State, values: Values) -> None:
    """A survey is what that of a new State would be."""
    got = outcome(state.survey)  # first: a hook of the user's may change the state
    wanted = outcome(lambda: State(values).survey())
    if not isinstance(wanted, Survey) or not isinstance(got, Survey):
        assert got == wanted
        return
    assert got.shape.entries == wanted.shape.entries
    assert got.shape.aliases == wanted.shape.aliases
    assert got.shape.owners == wanted.shape.owners
    assert list(got.tensors) == list(wanted.tensors) == [e.name for e in got.shape.entries]
    for name, tensor in got.tensors.items():
        other = wanted.tensors[name]
        assert not tensor.requires_grad
        assert tensor.dtype == other.dtype
        assert tensor.stride() == other.stride()
        assert (tensor.is_conj(), tensor.is_neg()) == (other.is_conj(), other.is_neg())
        if is_reserved(name):  # made by each survey for itself
            assert_same(tensor, other)
        else:
            assert tensor.shape == other.shape
            assert tensor.data_ptr() == other.data_ptr()
    assert got.objects() == wanted.objects()


@contextmanager
def looks() -> Iterator[list[str]]:
    """Sections of modules and optimizers that are looked at anew meanwhile."""
    found: list[str] = []
    of_module, of_optimizer = ModuleProvider.collect, OptimizerProvider.collect_state

    def module(self: ModuleProvider) -> dict[str, Any]:
        found.append(self.section)
        return of_module(self)

    def optimizer(self: OptimizerProvider, *args: Any) -> dict[str, Any]:
        found.append(self.section)
        return of_optimizer(self, *args)

    with (
        mock.patch.object(ModuleProvider, "collect", module),
        mock.patch.object(OptimizerProvider, "collect_state", optimizer),
    ):
        yield found


# --- Nothing has changed ------------------------------------------------------------------


def assert_unchanged(before: Survey, after: Survey) -> None:
    assert after.shape is before.shape
    assert list(after.tensors) == list(before.tensors)
    for name, tensor in before.tensors.items():
        assert is_reserved(name) or after.tensors[name] is tensor


def test_what_is_as_it_was_is_not_looked_at() -> None:
    values = world()
    state = State(values)
    first = state.survey()
    with looks() as looked:
        for _ in range(3):
            assert_unchanged(first, state.survey())
    assert looked == []


def test_training_changes_values_only() -> None:
    values = world()
    state = State(values)
    first = state.survey()
    with looks() as looked:
        for _ in range(3):
            step(values)
            values["scheduler"].step()
            values["model"].body(torch.randn(4, 3))  # running statistics
            values["data"]["best"] += 0.25
            survey = state.survey()
            assert_unchanged(first, survey)
    assert looked == []
    assert survey.objects() != first.objects()
    assert_as_new(state, values)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: [p.requires_grad_(not p.requires_grad) for p in v["model"].parameters()],
        lambda v: v["model"].eval(),
        lambda v: v["optimizer"].zero_grad(),
        lambda v: v["model"].norm.weight.data.fill_(3),
        lambda v: v["model"].register_forward_hook(lambda *_: None),
        lambda v: v["model"].register_buffer("later", torch.ones(1), persistent=False),
        lambda v: v["critic"].weight.detach().numpy().fill(1),
    ],
    ids=["requires_grad", "eval", "zero_grad", "data", "hook", "unsaved buffer", "numpy"],
)
def test_what_does_not_matter(change: Callable[[Values], Any]) -> None:
    values = world()
    state = State(values)
    first = state.survey()
    change(values)
    assert_unchanged(first, state.survey())
    assert_as_new(state, values)


def test_a_default_device_is_no_detour() -> None:
    state = State(world())
    first = state.survey()
    with torch.device("meta"), looks() as looked:
        assert_unchanged(first, state.survey())
    assert looked == []


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
        lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Rprop(p),
    ],
)
def test_optimizers_of_torch_are_not_looked_at_again(make: Callable[[Any], Optimizer]) -> None:
    model = nn.Linear(3, 3)
    values = {"model": model, "optimizer": make(model.parameters())}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    values["optimizer"].step()
    state = State(values)
    first = state.survey()
    with looks() as looked:
        values["optimizer"].step()
        assert_unchanged(first, state.survey())
    assert looked == []
    assert_as_new(state, values)


def test_a_compiled_model_is_not_looked_at_again() -> None:
    inner: Any = torch.compile(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), inner)
    values = {"model": torch.compile(model), "o": torch.optim.Adam(model.parameters())}
    state = State(values)
    first = state.survey()
    assert "model/1.weight" in first.tensors
    with looks() as looked:
        assert_unchanged(first, state.survey())
    assert looked == []


def test_one_change_leaves_the_other_tensors_as_they_were() -> None:
    values = world()
    state = State(values)
    first = state.survey()
    values["model"].mask = torch.zeros(3)
    second = state.survey()
    assert second.shape is first.shape
    changed = {name for name, t in second.tensors.items() if t is not first.tensors[name]}
    assert {name for name in changed if not is_reserved(name)} == {"model/mask"}


# --- Everything that can change -----------------------------------------------------------


@pytest.mark.thinned(30)
@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_noticed(name: str) -> None:
    values = world()
    state = State(values)
    before = state.survey().shape
    CHANGES[name](values)
    assert_as_new(state, values)
    if isinstance(after := outcome(state.survey), Survey):
        assert (after.shape is not before) == SHAPES[name]
        assert state.survey().shape is after.shape
    assert_as_new(state, values)


def test_a_change_of_torch_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = world()
    state = State(values)
    original, optimizers = nn.Module.state_dict, Optimizer.state_dict

    def patched(self: nn.Module, *args: Any, **how: Any) -> Any:
        found = original(self, *args, **how)
        found[how.get("prefix", "") + "patched"] = EXTRA[7]
        return found

    monkeypatch.setattr(nn.Module, "state_dict", patched)
    assert_as_new(state, values)
    assert "model/patched" in {**state.survey().tensors, **state.survey().shape.aliases}
    monkeypatch.setattr(Optimizer, "state_dict", lambda self: {**optimizers(self), "more": 1})
    assert_as_new(state, values)


@pytest.mark.parametrize("where", ["a module", "a module with a hook", "no module"])
def test_an_optimizer_follows_parameters_that_move(where: str) -> None:
    """Else what it owns would be what it owned."""
    model = nn.Linear(2, 2)
    if where == "a module with a hook":
        model.register_state_dict_post_hook(lambda *_: None)
    values: Values = {"model": model, "o": torch.optim.Adam(model.parameters())}
    if where == "no module":
        values = {**values, "model": model.weight}
    state = State(values)
    state.survey()
    model.weight.data = torch.zeros(2, 2)
    assert_as_new(state, values)
    assert "replayed" in [owner.kind for owner in state.survey().shape.owners.values()]
    assert "logged" not in [
        owner.kind for name, owner in state.survey().shape.owners.items() if not is_reserved(name)
    ]


@pytest.mark.parametrize("where", ["class", "base", "bases"])
def test_a_method_put_into_a_class_is_noticed(where: str) -> None:
    class Base(nn.Linear):
        pass

    class Mine(Base):
        pass

    def save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "only"] = EXTRA[5]

    class Other(nn.Linear):
        _save_to_state_dict = save

    values: Values = {"model": nn.Sequential(Mine(2, 2))}
    state = State(values)
    state.survey()
    changed: Any = Mine if where == "class" else Base
    if where == "bases":
        Mine.__bases__ = (Other,)
    else:
        changed._save_to_state_dict = save
    assert_as_new(state, values)
    assert "model/0.only" in state.survey().tensors


@pytest.mark.slow
@settings(max_examples=60)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from([True, True, False])),
        min_size=2,
        max_size=8,
    )
)
def test_any_sequence_of_changes(moves: list[tuple[str, bool]]) -> None:
    """Some of the changes are surveyed one by one, others together."""
    values = world()
    state = State(values)
    for name, look in moves:
        try:
            CHANGES[name](values)
        except Exception:
            continue
        if look:
            assert_as_new(state, values)
    assert_as_new(state, values)


# --- What is never proven -----------------------------------------------------------------


class Own(nn.Linear):
    """Whoever asks for its parameters runs its code."""

    @property
    def _parameters(self) -> Any:
        return self.__dict__["_parameters"]

    @_parameters.setter
    def _parameters(self, parameters: Any) -> None:
        self.__dict__["_parameters"] = parameters


class Guarded(nn.Linear):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Equal(nn.Linear):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 1


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 3


class Saving(nn.Linear):
    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)


class Naming(nn.Linear):
    def named_parameters(self, *args: Any, **how: Any) -> Any:
        return super().named_parameters(*args, **how)


class Proxy(nn.Linear):
    __class__ = property(lambda self: nn.Linear)


def hooked(method: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module, method)(lambda *_: None)
    return module


def with_own(name: str, kind: type) -> nn.Module:
    module = nn.Linear(2, 2)
    module.__dict__[name] = kind(module.__dict__[name])
    return module


def conjugated() -> nn.Module:
    module = nn.Module()
    module.register_buffer("c", torch.ones(2, dtype=torch.complex64).conj())
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: partial(kind, 2, 2) for kind in (Own, Guarded, Equal, Extra)},
    **{kind.__name__: partial(kind, 2, 2) for kind in (Saving, Naming, Proxy)},
    "hook": lambda: hooked("register_state_dict_post_hook"),
    "pre-hook": lambda: hooked("register_state_dict_pre_hook"),
    "parameters": lambda: with_own("_parameters", type("Mine", (dict,), {})),
    "modules": lambda: with_own("_modules", type("Mine", (OrderedDict,), {})),
    "buffers": lambda: with_own("_buffers", type("Mine", (dict,), {})),
    "conjugated": conjugated,
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("inside", [False, True])
def test_modules_that_are_looked_at_each_time(kind: str, inside: bool) -> None:
    module = MODULES[kind]()
    values: Values = {"model": nn.Sequential(module) if inside else module}
    state = State(values)
    first = state.survey()
    with looks() as looked:
        second = state.survey()
    assert looked == ["model"]
    if kind != "conjugated":
        assert_unchanged(first, second)  # even so
    assert_as_new(state, values)


class OwnStateDict(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class OwnGroups(torch.optim.SGD):
    @property
    def param_groups(self) -> Any:
        return list(self.__dict__["param_groups"])

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["param_groups"] = groups


def _hold(held: Any) -> Callable[[Optimizer, nn.Parameter], Any]:
    return lambda optimizer, parameter: optimizer.state.update({parameter: held})


OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], Callable[[Any, nn.Parameter], Any]]] = {
    "state_dict": (OwnStateDict, lambda o, p: None),
    "groups": (OwnGroups, lambda o, p: None),
    "hook": (torch.optim.SGD, lambda o, p: o.register_state_dict_post_hook(lambda *_: None)),
    "pre-hook": (torch.optim.SGD, lambda o, p: o.register_state_dict_pre_hook(lambda *_: None)),
    "number": (torch.optim.SGD, _hold({"step": 1})),
    "list": (torch.optim.SGD, _hold({"history": [torch.ones(1)]})),
    "ordered": (torch.optim.SGD, _hold(OrderedDict(a=torch.ones(1)))),
    "tensor": (torch.optim.SGD, _hold(torch.ones(1))),
    "mixed": (torch.optim.SGD, _hold({"one": 1, "two": [torch.ones(1), torch.ones(1)]})),
    "group": (
        torch.optim.SGD,
        lambda o, p: o.param_groups.append(OrderedDict(o.param_groups.pop())),
    ),
    "tuple": (torch.optim.SGD, lambda o, p: o.param_groups[0].update(params=(p,))),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_that_are_looked_at_each_time(kind: str) -> None:
    make, edit = OPTIMIZERS[kind]
    weight = nn.Parameter(torch.ones(2))
    optimizer = make([weight], lr=0.1)
    edit(optimizer, weight)
    values: Values = {"optimizer": optimizer}
    state = State(values)
    first = state.survey()
    with looks() as looked:
        second = state.survey()
    assert looked == ["optimizer"]
    assert_unchanged(first, second)
    assert_as_new(state, values)


def test_a_torch_that_reads_more_is_not_proven() -> None:
    def reads(module: nn.Module) -> Any:
        return module._state_dict_hooks, module.something_new

    for method in (nn.Module.state_dict, Optimizer.state_dict):
        names = _MODULE_NAMES | _OPTIMIZER_NAMES
        assert _is_torchs_own(method, names)
        assert not _is_torchs_own(method, names - {"state", "_modules"})
        wrapped = wraps(method)(lambda *args: None)
        assert not _is_torchs_own(wrapped, names)
    mine = FunctionType(reads.__code__, vars(torch.nn.modules.module))
    assert not _is_torchs_own(mine, _MODULE_NAMES)
    assert _is_torchs_own(mine, _MODULE_NAMES | {"something_new"})
    assert not _is_torchs_own(len, _MODULE_NAMES)


# --- Wrappers, names, ties ----------------------------------------------------------------


def test_what_a_wrapper_wraps_may_change() -> None:
    values: Values = {"model": torch.compile(nn.Linear(2, 2))}
    state = State(values)
    state.survey()
    values["model"].add_module("_orig_mod", nn.Linear(3, 3))
    assert_as_new(state, values)
    assert state.survey().tensors["model/weight"].shape == (3, 3)


def test_names_of_parameters_that_sections_have_in_common() -> None:
    inner, outer = nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2, bias=False))
    parameters = [outer[0].weight, inner.weight, nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    values: Values = {"a": outer, "a.0": inner, "o": optimizer}
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter] = {"m": torch.full((1,), float(number))}
    state = State(values)
    for _ in range(2):
        tensors = state.survey().tensors
        found = {name: tensor.item() for name, tensor in tensors.items() if name.startswith("o/")}
        assert found == {
            "o/state/a.0.weight/m": 0,
            "o/state/a.0.weight~02/m": 1,
            "o/state/group0[2]/m": 2,
        }
    optimizer.param_groups[0]["params"].reverse()
    assert_as_new(state, values)


@settings(max_examples=80)
@given(
    moves=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=3),
        min_size=1,
        max_size=6,
    )
)
def test_ties_come_and_go(moves: list[list[tuple[int, int]]]) -> None:
    """Plain tensors are put at random into a few places, some of them owned or overlapping."""
    memory = torch.zeros(8)
    weight = nn.Parameter(torch.zeros(2))
    places = [memory[0:2], memory[2:4], memory[4:6], memory[5:7], weight, torch.zeros(2)]
    optimizer = torch.optim.SGD([weight], lr=0.1)
    values: Values = {"data": [torch.zeros(2) for _ in range(5)], "o": optimizer, "w": weight}
    state = State(values)
    for batch in moves:
        for which, place in batch:
            values["data"][which] = places[place] if place < len(places) else torch.zeros(2)
        assert_as_new(state, values)


def test_random_states_of_generators_are_no_reason_to_look_for_ties() -> None:
    values = world()
    state = State(values)
    kept = []
    with mock.patch.object(survey_module, "_TensorIndex", side_effect=AssertionError) as known:
        for number in range(100):
            values["data"]["seen"] = torch.zeros(3)
            survey = state.survey()
            if number % 3:
                kept.append(survey)
    assert not known.called


# --- After an error -----------------------------------------------------------------------


def test_a_survey_that_fails_leaves_nothing_half_done() -> None:
    values = world()
    state = State(values)
    values["adam"].state.clear()
    values["model"].register_buffer("more", torch.ones(1))
    values["data"]["bad"] = object()
    with pytest.raises(UnsupportedStateError) as error:
        state.survey()
    assert [name for name, _ in error.value.leaves] == ["data/bad"]
    step(values)
    del values["data"]["bad"]
    assert_as_new(state, values)


def test_leaves_of_all_sections_are_listed_in_order() -> None:
    values = world()
    state = State(values)
    values["adam"].param_groups[0]["fn"] = len
    values["model"].register_buffer("sparse", torch.eye(2).to_sparse())
    values["data"]["bad"] = object()
    values["optimizer"].param_groups[1]["fn"] = len
    with pytest.raises(UnsupportedStateError) as error:
        state.survey()
    assert [name for name, _ in error.value.leaves] == [
        "optimizer/param_groups/1/fn",
        "model/sparse",
        "adam/param_groups/0/fn",
        "data/bad",
    ]


def test_state_of_parameters_that_are_in_no_group() -> None:
    values = world()
    state = State(values)
    values["optimizer"].param_groups.pop()
    with pytest.raises(StateError, match="state of parameters that are in none of its"):
        state.survey()


# --- Objects ------------------------------------------------------------------------------


def mutable() -> dict[str, Any]:
    return {
        "array": np.arange(6).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "bytes": bytearray(b"abc"),
        "list": [1, [2, {"x": [3]}]],
        "natives": [1.0, 2.0],
        "dict": {"a": 1, "b": {"c": 2}},
        "ordered": OrderedDict(x=[1]),
        "set": {1, 2},
        "deque": deque([[1], np.ones(2)], maxlen=5),
        "counter": Counter("aab"),
        "odd counter": Counter({"k": [1]}),
        "slice": slice([1], None, None),
        "tuple": ([1], np.zeros(1)),
    }


def mutate(data: dict[str, Any]) -> None:
    data["array"][0, 0] = 99
    data["fortran"][1, 1] = 99
    data["bytes"][0] = 0
    data["list"][1][1]["x"].append(4)
    data["natives"][0] = 5.0
    data["dict"]["b"]["c"] = 3
    data["ordered"]["x"].append(2)
    data["set"].add(3)
    data["deque"][0].append(2)
    data["deque"][1][0] = 7
    data["counter"]["a"] = 9
    data["odd counter"]["k"].append(2)
    data["slice"].start.append(2)
    data["tuple"][0].append(2)
    data["tuple"][1][0] = 1


@pytest.mark.parametrize("kind", mutable())
def test_later_changes_of_objects_do_not_show(kind: str) -> None:
    data = mutable()
    values: Values = {"data": {kind: data[kind]}, "plain": data[kind]}
    state = State(values)
    survey, wanted = state.survey(), State(values).survey().objects()
    mutate(data)
    assert survey.objects() == wanted
    now = state.survey().objects()
    names = [f"everstep/objects/{key}" for key in values]
    assert all(now[name] != wanted[name] for name in names)


def test_objects_are_encoded_from_another_thread_while_training_goes_on() -> None:
    values = world()
    state = State(values)
    survey, wanted = state.survey(), State(values).survey().objects()
    step(values)
    values["optimizer"].param_groups[0]["lr"] = 7
    values["scheduler"].base_lrs[0] = 9
    values["data"]["rows"] += 1
    values["model"].body.append(nn.Linear(2, 2))
    torch.rand(3)
    np.random.rand(3)
    state.survey()
    found: list[dict[str, bytes]] = []
    thread = threading.Thread(target=lambda: found.append(survey.objects()))
    thread.start()
    thread.join(20)
    assert found == [wanted]
    assert survey.objects() == wanted


def test_sizes_of_objects_follow_when_they_are_far_off() -> None:
    name = "everstep/objects/history"
    values: Values = {"history": [1] * 20_000}
    state = State(values)
    first = state.survey()
    assert first.shape.objects_bytes[name] == len(first.objects()[name])
    values["history"] += [1] * 2000  # about the same
    state.survey().objects()
    assert state.survey().shape is first.shape
    values["history"] += [1] * 20_000
    grown = state.survey().objects()
    later = state.survey().shape
    assert later.objects_bytes[name] == len(grown[name])
    assert later.entries is first.shape.entries
    assert state.survey().shape is later


# --- Memory -------------------------------------------------------------------------------


def test_what_was_replaced_is_kept_until_the_next_survey_only() -> None:
    values = world()
    state = State(values)
    state.survey()
    model, optimizer = values["model"], values["optimizer"]
    gone = [
        weakref.ref(model.body[1].running_mean),
        weakref.ref(model.body[3]),
        weakref.ref(model.body[3].weight),
        weakref.ref(optimizer.state[model.norm.weight]["exp_avg"]),
    ]
    model.body[1].running_mean = torch.zeros(3)
    model.body[3] = nn.Identity()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter in optimizer.param_groups[0]["params"][-2:]:
        optimizer.state.pop(parameter)
    del optimizer.param_groups[0]["params"][-2:], parameter
    state.survey()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_memory_is_not_taken_for_what_was_there_before() -> None:
    """Tensors replaced again and again may get the same address; each survey sees the new one."""
    values: Values = {"model": nn.Linear(4, 4), "x": torch.zeros(64)}
    state = State(values)
    for number in range(50):
        values["model"].weight.data = torch.full((4, 4), float(number))
        values["x"] = torch.full((64,), float(number))
        tensors = state.survey().tensors
        assert tensors["model/weight"].eq(number).all()
        assert tensors["x"].eq(number).all()


def test_a_view_of_freed_memory_is_not_used() -> None:
    module = nn.Linear(64, 64)
    state = State({"model": module})
    assert state.survey().tensors["model/weight"].data_ptr() == module.weight.data_ptr()
    storage = module.weight.data.untyped_storage()
    storage.resize_(0)  # as sharded wrappers do
    module.weight.data = torch.ones(64, 64)
    tensor = state.survey().tensors["model/weight"]
    assert tensor.data_ptr() == module.weight.data_ptr()
    assert tensor.eq(1).all()


# --- Watch --------------------------------------------------------------------------------

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(3, 4),
    "parameter": lambda: nn.Parameter(torch.randn(3, 4)),
    "scalar": lambda: torch.tensor(1.0),
    "empty": lambda: torch.empty(0, 4),
    "strided": lambda: torch.randn(6, 8)[::2, ::2],
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
}
EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "new memory": lambda t: setattr(t, "data", t.data.clone()),
    "transposed": lambda t: setattr(t, "data", t.data.transpose(0, -1)),
    "offset": lambda t: setattr(t, "data", t.data.reshape(-1)[1:]),
    "shape": lambda t: setattr(t, "data", t.data.unsqueeze(0)),
    "dtype": lambda t: setattr(t, "data", t.data.view(torch.uint8)),
    "conjugate": lambda t: setattr(t, "data", t.data.conj()),
    "negated": lambda t: setattr(t, "data", torch._neg_view(t.data)),
    "class": lambda t: setattr(t, "__class__", type("Mine", (torch.Tensor,), {})),
    "sparse": lambda t: torch.utils.swap_tensors(t, torch.eye(2).to_sparse()),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_watch_notices_what_makes_a_view_different(kind: str, edit: str) -> None:
    tensor = TENSORS[kind]()
    others = [torch.randn(2), nn.Parameter(torch.randn(2))]
    watched = [others[0], tensor, others[1]]
    before = tensor.detach()
    watch = TensorGuard(watched, [others[0].detach(), before, others[1].detach()])
    assert watch.holds() != tensor.is_conj()
    try:
        EDITS[edit](tensor)
    except RuntimeError:
        pytest.skip("torch does not allow it")
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and not before.is_conj()
    assert watch.holds() == (plain and alike(tensor, before))


def alike(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a new view would be equal, told otherwise than a watch does."""
    if tensor.layout != torch.strided:
        return False
    now = tensor.detach()
    return (
        now.data_ptr() == view.data_ptr()
        and now.is_set_to(view)  # storage, offset, shape and strides
        and now.dtype == view.dtype
        and (now.is_conj(), now.is_neg()) == (view.is_conj(), view.is_neg())
    )


def test_a_watch_notices_that_a_storage_has_moved() -> None:
    tensor = torch.zeros(4)
    watch = TensorGuard([tensor], [tensor.detach()])
    begin = tensor.data_ptr()
    tensor.untyped_storage().resize_(1 << 22)
    assert tensor.data_ptr() != begin
    assert not watch.holds()


def test_a_watch_of_nothing_holds() -> None:
    assert TensorGuard([], []).holds()
    assert not TensorGuard([torch.ones(1)], []).holds()


@pytest.mark.parametrize(
    "fill",
    [
        lambda module: module.register_parameter("a", nn.Parameter(torch.ones(2))),
        lambda module: module.register_buffer("a", torch.ones(2)),
        lambda module: module.add_module("a", nn.Linear(2, 2)),
    ],
    ids=["parameter", "buffer", "module"],
)
def test_what_was_empty_is_looked_at(fill: Callable[[nn.Module], object]) -> None:
    empty = nn.Module()
    values: Values = {"model": nn.Sequential(empty, nn.Linear(2, 2))}
    state = State(values)
    for _ in range(2):
        assert len(state.survey().tensors) == 3  # with torch's generator
    fill(empty)
    found = state.survey().tensors
    assert len(found) > 3
    assert list(found) == list(State(values).survey().tensors)
