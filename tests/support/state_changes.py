"""A small training state with a bit of everything, and all that can be done to it."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["CHANGES", "EXTRA", "SHAPES", "Values", "outcome", "step", "world"]

Values = dict[str, Any]


class Net(nn.Module):
    """Tied weights, persistent and other buffers, a child that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))
        self.norm = nn.LayerNorm(3)
        self.again = self.norm
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)


def world() -> Values:
    torch.manual_seed(0)
    model, critic = Net(), nn.Linear(2, 2)
    groups = [
        {"params": list(model.body.parameters()), "lr": 0.1},
        {"params": [model.emb.weight, *model.norm.parameters()], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    values = {
        "optimizer": optimizer,  # before the model whose names it uses
        "model": model,
        "critic": critic,
        "adam": torch.optim.Adam(critic.parameters()),
        "scheduler": LambdaLR(optimizer, lambda step: 0.9**step),
        "empty": torch.empty(0),
        "data": {"best": 1.5, "history": [1, 2], "rows": np.arange(4), "seen": torch.ones(3)},
        "note": "plain",
    }
    step(values)
    return values


def step(values: Values) -> None:
    """One training step of everything that has a gradient."""
    for key in ("optimizer", "adam"):
        for group in values[key].param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.5)
        values[key].step()


EXTRA = [torch.ones(2) for _ in range(8)]  # what hooks and overrides add
CHANGES: dict[str, Callable[[Values], Any]] = {}
SHAPES: dict[str, bool] = {}  # whether the change shows in the shape


def change(*, shape: bool) -> Callable[[Callable[[Values], Any]], Callable[[Values], Any]]:
    def register(make: Callable[[Values], Any]) -> Callable[[Values], Any]:
        CHANGES[make.__name__], SHAPES[make.__name__] = make, shape
        return make

    return register


@change(shape=True)  # the optimizer still has the old one
def replace_parameter(v: Values) -> None:
    v["model"].norm.weight = nn.Parameter(torch.randn_like(v["model"].norm.weight))


@change(shape=False)
def swap_data(v: Values) -> None:
    v["model"].norm.weight.data = torch.randn_like(v["model"].norm.weight)


@change(shape=False)
def swap_tensors(v: Values) -> None:
    linear = v["model"].body[0]
    linear.weight.grad = linear.bias.grad = None
    for node in ("weight", "bias"):
        old = getattr(linear, node)
        torch.utils.swap_tensors(old, nn.Parameter(torch.randn_like(old)))


@change(shape=False)
def move_storage(v: Values) -> None:
    storage = v["critic"].bias.data.untyped_storage()
    size = storage.nbytes()
    storage.resize_(size + 4096)
    storage.resize_(size)


@change(shape=True)
def transpose_in_place(v: Values) -> None:
    v["model"].body[0].weight.data.t_()
    v["model"].body[3].weight.data = v["model"].body[3].weight.data.t()


@change(shape=True)
def other_dtype(v: Values) -> None:
    v["critic"].to(torch.bfloat16 if v["critic"].weight.dtype == torch.float32 else torch.float32)


@change(shape=True)
def same_bytes_as_another_dtype(v: Values) -> None:
    mask = v["model"].mask
    mask.data = mask.data.view(torch.int32 if mask.dtype == torch.float32 else torch.float32)


@change(shape=True)
def empty_of_another_dtype(v: Values) -> None:
    empty = v["empty"]
    empty.data = empty.data.view(torch.int32 if empty.dtype == torch.float32 else torch.float32)


@change(shape=True)
def resize(v: Values) -> None:
    v["model"].mask.resize_(v["model"].mask.numel() + 1)


@change(shape=True)
def narrow(v: Values) -> None:
    v["model"].mask.data = torch.zeros(3)[1:]


@change(shape=True)
def add_buffer(v: Values) -> None:
    names = (f"more{number}" for number in itertools.count())
    name = next(name for name in names if not hasattr(v["model"], name))
    v["model"].register_buffer(name, torch.zeros(1))


@change(shape=True)
def remove_buffer(v: Values) -> None:
    del v["model"].mask
    v["model"].register_buffer("mask", None)


@change(shape=True)
def save_buffer_or_not(v: Values) -> None:
    v["model"]._non_persistent_buffers_set ^= {"scratch"}


@change(shape=False)
def replace_buffer(v: Values) -> None:
    v["model"].body[1].running_mean = torch.zeros(3)


@change(shape=True)
def add_module(v: Values) -> None:
    v["model"].body.append(nn.Linear(1, 1))


@change(shape=True)
def replace_module(v: Values) -> None:
    v["model"].body[3] = nn.Linear(3, 3)


@change(shape=True)
def remove_module(v: Values) -> None:
    if hasattr(v["model"], "again"):
        del v["model"].again
    v["model"].add_module("third", v["model"].norm)


@change(shape=True)
def reorder_modules(v: Values) -> None:
    first, child = next(v["model"].named_children())
    delattr(v["model"], first)
    v["model"].add_module(first, child)


@change(shape=True)
def reorder_parameters(v: Values) -> None:
    norm = v["model"].norm
    first, parameter = next(norm.named_parameters(recurse=False))
    delattr(norm, first)
    norm.register_parameter(first, parameter)


@change(shape=True)
def rename_parameter(v: Values) -> None:
    norm = v["model"].norm
    for key, parameter in list(norm.named_parameters(recurse=False)):
        delattr(norm, key)
        norm.register_parameter(f"{key}_{len(key)}", parameter)


@change(shape=True)
def rename_module(v: Values) -> None:
    for key, child in list(v["model"].named_children()):
        delattr(v["model"], key)
        v["model"].add_module(f"{key}_", child)


@change(shape=True)
def parameter_to_buffer(v: Values) -> None:
    norm = v["model"].norm
    weight = norm.weight
    del norm.weight
    norm.register_buffer("moved", weight)


@change(shape=True)
def untie(v: Values) -> None:
    v["model"].head.weight = nn.Parameter(torch.randn(4, 3))


@change(shape=False)
def tie(v: Values) -> None:
    v["model"].head.weight = v["model"].emb.weight


@change(shape=True)
def tie_to_another_section(v: Values) -> None:
    v["data"]["seen"] = v["model"].norm.weight


@change(shape=True)
def tie_to_a_section_before(v: Values) -> None:
    v["critic"].bias.data = v["model"].norm.weight.data


@change(shape=True)
def view_of_a_parameter(v: Values) -> None:
    v["data"]["seen"] = v["model"].emb.weight.detach()[1]


@change(shape=False)
def new_plain_tensor(v: Values) -> None:
    v["data"]["seen"] = torch.zeros(3)


@change(shape=True)
def other_plain_tensor(v: Values) -> None:
    v["data"]["seen"] = torch.zeros(3, dtype=torch.int16)


@change(shape=True)
def take_parameter_into_second_optimizer(v: Values) -> None:
    v["adam"].param_groups[0]["params"].append(v["model"].norm.bias)


@change(shape=True)
def add_param_group(v: Values) -> None:
    v["adam"].add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": torch.tensor(0.5)})


@change(shape=False)  # its state goes too, but there was some of others
def remove_param_group(v: Values) -> None:
    if len(v["optimizer"].param_groups) > 1:
        v["optimizer"].param_groups.pop()


@change(shape=False)
def reorder_param_groups(v: Values) -> None:
    v["optimizer"].param_groups.reverse()


@change(shape=False)
def reorder_parameters_of_a_group(v: Values) -> None:
    v["optimizer"].param_groups[0]["params"].reverse()


@change(shape=True)
def forget_state(v: Values) -> None:
    v["adam"].state.clear()


@change(shape=False)
def state_appears(v: Values) -> None:
    step(v)


@change(shape=True)
def reorder_state(v: Values) -> None:
    state = v["adam"].state
    if state:
        first = next(iter(state))
        state[first] = state.pop(first)


@change(shape=False)
def replace_state_tensor(v: Values) -> None:
    for held in list(v["adam"].state.values())[:1]:
        held["exp_avg"] = torch.zeros_like(held["exp_avg"])


@change(shape=False)
def swap_data_of_state(v: Values) -> None:
    for held in list(v["adam"].state.values())[-1:]:
        held["exp_avg_sq"].data = torch.zeros_like(held["exp_avg_sq"])


@change(shape=True)
def rename_state(v: Values) -> None:
    for held in list(v["adam"].state.values())[-1:]:
        held["renamed"] = held.pop("exp_avg")
        held["exp_avg"] = torch.zeros(1)


@change(shape=True)
def rename_state_in_place(v: Values) -> None:
    for held in list(v["adam"].state.values())[:1]:
        renamed = {f"{key}_": tensor for key, tensor in held.items()}
        held.clear()
        held.update(renamed)


@change(shape=True)
def exchange_state(v: Values) -> None:
    state = v["optimizer"].state
    norm = [p for p in v["optimizer"].param_groups[1]["params"] if p.dim() == 1 and p in state]
    items = list(state.items())
    other = dict(zip(norm, reversed(norm), strict=True))
    state.clear()
    state.update((other.get(key, key), held) for key, held in items)


@change(shape=False)
def ordered_state(v: Values) -> None:
    state = v["adam"].state
    for key in list(state)[:1]:
        state[key] = OrderedDict(state[key])


@change(shape=False)
def replaced_state_dict_of_state(v: Values) -> None:
    v["adam"].state = defaultdict(dict, v["adam"].state)


@change(shape=True)
def number_in_state(v: Values) -> None:
    for held in list(v["adam"].state.values())[:1]:
        held["step"] = 7


@change(shape=True)
def share_state_tensor(v: Values) -> None:
    held = list(v["adam"].state.values())
    if len(held) > 1:
        held[0]["step"] = held[1]["step"]


@change(shape=False)
def load_optimizer(v: Values) -> None:
    v["optimizer"].load_state_dict(copy.deepcopy(v["optimizer"].state_dict()))


@change(shape=False)
def load_model(v: Values) -> None:
    v["critic"].load_state_dict({k: t.clone() for k, t in v["critic"].state_dict().items()})


@change(shape=True)  # the optimizer still has the old ones
def load_model_by_assignment(v: Values) -> None:
    state = {k: t.clone() for k, t in v["critic"].state_dict().items()}
    v["critic"].load_state_dict(state, assign=True)


def _lr(value: Any, *, shape: bool = False) -> None:
    def set_lr(v: Values) -> None:
        v["optimizer"].param_groups[0]["lr"] = value() if callable(value) else value

    set_lr.__name__ = f"lr {value!r}" if not callable(value) else "lr tensor"
    change(shape=shape)(set_lr)


for _value in (1, 1.0, True, 0.0, -0.0, None, (0.5, 1)):
    _lr(_value)
_lr(lambda: torch.tensor(0.5), shape=True)


@change(shape=True)
def tensor_betas(v: Values) -> None:
    beta = torch.tensor(0.9)
    for group in v["adam"].param_groups:
        group["betas"] = (beta, torch.tensor(0.99))


@change(shape=False)
def option_added_and_order(v: Values) -> None:
    group = v["optimizer"].param_groups[0]
    group["note"] = {"rows": np.arange(3)}
    group["lr"] = group.pop("lr")


@change(shape=False)
def option_mutated_in_place(v: Values) -> None:
    group = v["optimizer"].param_groups[0]
    group.setdefault("list", []).append(len(group))


@change(shape=False)
def optimizer_of_another_class(v: Values) -> None:
    v["adam"].__class__ = type("MyAdam", (torch.optim.Adam,), {})


@change(shape=True)
def optimizer_with_its_own_state_dict(v: Values) -> None:
    def state_dict(self: Any) -> dict[str, Any]:
        return {**torch.optim.Adam.state_dict(self), "extra": EXTRA[0]}

    v["adam"].__class__ = type("MyAdam", (torch.optim.Adam,), {"state_dict": state_dict})


@change(shape=True)
def optimizer_patched(v: Values) -> None:
    original = v["adam"].state_dict
    v["adam"].state_dict = lambda: {**original(), "patched": EXTRA[1]}


@change(shape=True)
def optimizer_hook(v: Values) -> None:
    v["adam"].register_state_dict_post_hook(lambda self, state: {**state, "hooked": EXTRA[2]})


@change(shape=False)
def optimizer_pre_hook(v: Values) -> None:
    counts = iter(range(100))

    def hook(self: Any) -> None:
        next(counts)

    v["optimizer"].register_state_dict_pre_hook(hook)


@change(shape=True)
def module_hook(v: Values) -> None:
    def hook(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "hooked"] = module.weight.detach()[:1]

    v["model"].norm.register_state_dict_post_hook(hook)


@change(shape=True)
def module_pre_hook(v: Values) -> None:
    def hook(module: nn.Module, *_: Any) -> None:
        module.register_buffer("late", EXTRA[3])

    v["model"].head.register_state_dict_pre_hook(hook)


@change(shape=True)
def module_patched(v: Values) -> None:
    module = v["model"].norm
    original = module.state_dict

    def patched(*args: Any, **how: Any) -> Any:
        found = original(*args, **how)
        found[how["prefix"] + "patched"] = EXTRA[4]
        return found

    module.state_dict = patched


@change(shape=True)
def root_patched(v: Values) -> None:
    v["critic"].state_dict = lambda: {"adapter": v["critic"].weight.detach()}


@change(shape=True)
def save_patched(v: Values) -> None:
    def save(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "only"] = EXTRA[5]

    v["critic"]._save_to_state_dict = save


@change(shape=True)
def class_with_extra_state(v: Values) -> None:
    members = {"get_extra_state": lambda self: EXTRA[6]}
    v["critic"].__class__ = type("Extra", (nn.Linear,), members)


@change(shape=True)
def class_with_state_dict(v: Values) -> None:
    def state_dict(self: Any, *args: Any, **how: Any) -> Any:
        return {"mine": self.weight.detach()}

    v["critic"].__class__ = type("Mine", (nn.Linear,), {"state_dict": state_dict})


@change(shape=True)
def class_that_lies_about_its_members(v: Values) -> None:
    members = {"_parameters": property(lambda self: {"w": self.__dict__["_parameters"]["weight"]})}
    v["critic"].__class__ = type("Liar", (nn.Linear,), members)


@change(shape=True)
def names_patched(v: Values) -> None:
    original = v["model"].named_parameters
    v["model"].named_parameters = lambda *a, **k: ((f"x.{n}", p) for n, p in original(*a, **k))


@change(shape=True)
def buffers_elsewhere(v: Values) -> None:
    v["critic"]._buffers = {"b": torch.ones(1)}


class Renaming(OrderedDict):
    def items(self) -> Any:
        return [(f"renamed_{key}", value) for key, value in super().items()]


@change(shape=True)
def container_with_a_will_of_its_own(v: Values) -> None:
    v["critic"]._parameters = Renaming(v["critic"]._parameters)


@change(shape=True)
def conjugate(v: Values) -> None:
    v["model"].mask = torch.ones(3, dtype=torch.complex64)


@change(shape=False)
def conjugate_the_same_memory(v: Values) -> None:
    mask = v["model"].mask
    if mask is not None and mask.is_complex():
        mask.data = mask.data.conj()


@change(shape=True)
def unsupported_buffer(v: Values) -> None:
    v["model"].register_buffer("sparse", torch.eye(2).to_sparse())


@change(shape=False)
def numpy_in_place(v: Values) -> None:
    v["data"]["rows"] += 1


@change(shape=False)
def plain_in_place(v: Values) -> None:
    v["data"]["history"].append(3.5)
    v["note"] = v["note"] + "!"


@change(shape=False)
def draw_random_numbers(v: Values) -> None:
    torch.rand(1)
    np.random.rand()


@change(shape=False)
def scheduler_step(v: Values) -> None:
    v["scheduler"].last_epoch += 1
    v["scheduler"].base_lrs[0] *= 2


def outcome(survey: Callable[[], Any]) -> Any:
    """What a survey finds, to be compared with what another does."""
    try:
        found = survey()
    except Exception as error:  # of a hook, for example
        return type(error), getattr(error, "leaves", None)
    return found.shape.entries, found.shape.aliases, found.objects()
