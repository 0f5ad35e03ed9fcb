"""Proofs that looking at a part of the state again would find the same as before.

A module's or optimizer's ``state_dict``, where it is torch's own and no hook takes part, is a
function of a few containers and their members. So if those are the same objects, and every
tensor among them still is the same memory, the result would be the same, but for the values
in that memory. What is compared is *identity*, and what is compared is *kept*, so that no
identity can pass to another object. Nothing is concluded from values, or from version
counters, which miss writes.

There is no proof for anything else: overrides, hooks, extra state, subclasses of containers or
tensors, or a torch whose methods read more than is known here.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.state.objects import Encoded, TensorRef, encode
from everstep.state.owners import Holding
from everstep.state.survey import PLAIN_TENSORS, Part, same_objects

__all__ = ["ModuleProof", "OptimizerProof", "Watch", "canonical_key"]


def _is_torchs_own(function: object, names: frozenset[str]) -> bool:
    """Whether ``function`` is part of torch, nobody's replacement, and uses no names but these."""
    while isinstance(function, FunctionType):
        if str(function.__globals__.get("__name__")).partition(".")[0] != "torch":
            return False
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return names.issuperset(_names_in(function.__code__))
        function = inner
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


_MODULE_METHODS: dict[str, Any] = {
    name: getattr(nn.Module, name)
    for name in (
        "_named_members",
        "_save_to_state_dict",
        "get_extra_state",
        "named_modules",
        "named_parameters",
        "state_dict",
    )
}
_MODULE_MEMBERS = ("_parameters", "_buffers", "_modules")
_MODULE_ATTRIBUTES = (
    *_MODULE_MEMBERS,
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_MODULE_NAMES = frozenset((*_MODULE_METHODS, *_MODULE_ATTRIBUTES)) | set(
    # None of these makes the result depend on anything else.
    "FutureWarning Module OrderedDict RuntimeError _EXTRA_STATE_KEY_SUFFIX __class__ _metadata "
    "_version add detach dict getattr hasattr items len set values warn warnings".split()
)
_OPTIMIZER_ATTRIBUTES = (
    "param_groups",
    "state",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)
_OPTIMIZER_NAMES = frozenset(_OPTIMIZER_ATTRIBUTES) | set(
    "Any Dict List Tensor dict enumerate id int isinstance items len list pack_group "
    "param_mappings start_index str torch update values".split()
)
_optimizer_state_dict = Optimizer.state_dict

_MODULES_PROVABLE = all(_is_torchs_own(m, _MODULE_NAMES) for m in _MODULE_METHODS.values())
_OPTIMIZERS_PROVABLE = _is_torchs_own(_optimizer_state_dict, _OPTIMIZER_NAMES)
_MODULE_OWN = _MODULE_METHODS | {
    name: getattr(object, name) for name in ("__eq__", "__getattribute__", "__hash__")
}

_data_ptr, _is_set_to = torch.Tensor.data_ptr, torch.Tensor.is_set_to
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_is_conj, _is_neg, _dtype = torch.Tensor.is_conj, torch.Tensor.is_neg, attrgetter("dtype")


class Watch:
    """Tells whether tensors still are the memory that views of them are.

    It keeps both. So none of the memory can be given to something else meanwhile: what is at
    the same place is the same.

    Args:
        tensors: live tensors.
        views: a detached view of each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._views = views
        self._reading = _reading(views)

    def holds(self) -> bool:
        """Whether views taken now would be the same: the same storage, offset, shape and strides
        (``is_set_to``), at the same place (a storage can move), read as the same dtype.
        Whatever it cannot tell does not hold."""
        tensors, views = self._tensors, self._views
        if len(tensors) != len(views) or self._reading is None:
            return False
        if _reading(tensors) != self._reading:
            return False
        try:
            with torch._C.DisableTorchFunction():
                return all(map(_is_set_to, tensors, views))
        except RuntimeError:  # a device that cannot tell
            return False


def _reading(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.dtype]] | None:
    """Where tensors begin, and as what they are read; None if one is more than a tensor, has no
    memory of its own, or is conjugated or negated as it is read (``is_set_to`` cannot tell)."""
    if not PLAIN_TENSORS.issuperset(map(type, tensors)):
        return None
    try:
        # Under a mode of the user's (a default device is one) each call takes ten times as
        # long; on plain tensors none of these does anything else without it.
        with torch._C.DisableTorchFunction():
            dtypes = list(map(_dtype, tensors))
            if not _COMPLEX.isdisjoint(dtypes) and any(map(_is_conj, tensors)):
                return None
            if any(map(_is_neg, tensors)):
                return None
            return list(map(_data_ptr, tensors)), dtypes
    except RuntimeError:
        return None


def canonical_key(key: str) -> str:
    """A state-dict key without what ``torch.compile`` puts into it."""
    return key.replace("_orig_mod.", "")


class ModuleProof:
    """That a module's ``state_dict`` and the names of its parameters are as they were.

    Attributes:
        part: what was found in the module; its objects are encoded.
    """

    def __init__(self, modules: list[nn.Module], watch: Watch, part: Part) -> None:
        self.part = part
        self._modules = modules
        self._types = list(map(type, modules))
        self._members = _members(modules)
        self._unsaved = [frozenset(found) for found in _unsaved_buffers(modules)]
        self._watch = watch

    @classmethod
    def of(cls, module: nn.Module, part: Part) -> ModuleProof | None:
        """The proof that ``part`` is what looking at ``module`` finds, if there can be one."""
        modules: dict[int, nn.Module] = {}
        tensors: dict[str, torch.Tensor] = {}
        if not _MODULES_PROVABLE or not _find(module, "", modules, tensors):
            return None
        tree = part.tree
        if not isinstance(tree, dict) or not {TensorRef}.issuperset(map(type, tree.values())):
            return None
        if list(tree) != list(map(canonical_key, tensors)):
            return None
        (block,) = part.blocks
        watch = Watch(list(tensors.values()), block.tensors)
        found = Part(part.blocks, Encoded(encode(tree, checked=True)))
        proof = cls(list(modules.values()), watch, found)
        return proof if proof.holds(module) else None

    def holds(self, module: nn.Module) -> bool:
        """Whether looking at ``module`` now would find the same."""
        modules = self._modules
        if module is not modules[0] or not same_objects(list(map(type, modules)), self._types):
            return False
        if not all(map(_is_plain, set(self._types))):
            return False
        members = _members(modules)
        return (
            members is not None
            and self._members is not None
            and same_objects(members, self._members)
            and _unsaved_buffers(modules) == self._unsaved
            and self._watch.holds()
        )


def _is_plain(kind: type) -> bool:
    """Whether modules of this class do nothing but torch's own when their state is asked for."""
    return all(getattr(kind, name) is own for name, own in _MODULE_OWN.items()) and not any(
        hasattr(kind, name) for name in _MODULE_ATTRIBUTES
    )


def _find(
    module: nn.Module, prefix: str, modules: dict[int, nn.Module], tensors: dict[str, torch.Tensor]
) -> bool:
    """Finds all modules, and the tensors that torch's ``state_dict`` finds, by its keys; False
    where that is not sure to be torch's own."""
    if not _is_plain(type(module)):
        return False
    own = module.__dict__
    if not own.keys() >= set(_MODULE_ATTRIBUTES):
        return False
    parameters, buffers, children = (own[name] for name in _MODULE_MEMBERS)
    if not {dict, OrderedDict}.issuperset(map(type, (parameters, buffers, children))):
        return False
    modules[id(module)] = module
    unsaved = own["_non_persistent_buffers_set"]
    saved = {key: tensor for key, tensor in buffers.items() if key not in unsaved}
    for key, tensor in (*parameters.items(), *saved.items()):
        if tensor is not None:
            tensors[prefix + key] = tensor
    return all(
        child is None
        or (isinstance(child, nn.Module) and _find(child, f"{prefix}{key}.", modules, tensors))
        for key, child in children.items()
    )


def _members(modules: Sequence[nn.Module]) -> list[object] | None:
    """Parameters, buffers and children of every module with their names, in order; None where a
    hook or an override may take part.

    The containers themselves stand between their members, so that none of these can be taken
    for a member of the next one.
    """
    found: list[object] = []
    for module in modules:
        own = module.__dict__
        if own.get("_state_dict_hooks", True) or own.get("_state_dict_pre_hooks", True):
            return None
        if module.__class__ is not type(module) or not own.keys().isdisjoint(_MODULE_METHODS):
            return None
        for name in _MODULE_MEMBERS:
            members: Any = own.get(name)
            found.append(members)
            if members:
                found += members
                found += members.values()
    return found


def _unsaved_buffers(modules: Sequence[nn.Module]) -> list[Any]:
    """Names of the buffers of every module that are not saved."""
    return [module.__dict__.get("_non_persistent_buffers_set", ()) for module in modules]


class OptimizerProof:
    """That an optimizer's ``state_dict`` is as it was, but for the options of its groups.

    Attributes:
        state: the state's tensors, in canonical order.
        state_tree: the state, encoded.
        parameters: each group's list of names and shapes, encoded.
        holding: what it owns, but for hyperparameters, which are options.
    """

    def __init__(self, optimizer: Optimizer, part: Part, holding: Holding) -> None:
        (block,) = part.blocks
        tree: Any = part.tree
        self.holding = holding
        self._members = _optimizer_members(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = [t for values in optimizer.state.values() for t in values.values()]
        self.state = block.first(len(tensors))
        self.state_tree = Encoded(encode(tree["state"], checked=True))
        self.parameters = [
            Encoded(encode(group["params"], checked=True)) for group in tree["param_groups"]
        ]
        self._watches = (
            Watch(tensors, self.state.tensors),
            Watch(parameters, [parameter.detach() for parameter in parameters]),
        )

    @classmethod
    def of(cls, optimizer: Optimizer, part: Part, holding: Holding) -> OptimizerProof | None:
        """The proof that ``part`` and ``holding`` are what looking at ``optimizer`` finds, if
        there can be one."""
        if not _OPTIMIZERS_PROVABLE or _optimizer_members(optimizer) is None:
            return None
        tree: Any = part.tree
        if list(tree) != ["state", "param_groups"] or type(tree["state"]) is not dict:
            return None
        known = [list(values) for values in optimizer.state.values()]
        found = list(tree["state"].values())
        if not {dict}.issuperset(map(type, found)) or list(map(list, found)) != known:
            return None
        if any(type(leaf) is not TensorRef for values in found for leaf in values.values()):
            return None
        proof = cls(optimizer, part, holding)
        return proof if proof.holds(optimizer) else None

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether looking at ``optimizer`` now would find the same, given the same names of
        parameters, but for the options."""
        members = _optimizer_members(optimizer)
        return (
            members is not None
            and self._members is not None
            and same_objects(members, self._members)
            and all(watch.holds() for watch in self._watches)
        )


def _optimizer_members(optimizer: Optimizer) -> list[object] | None:
    """An optimizer's type, groups, parameters and state, in order, with the containers between
    them; None where that is not all there is, or not sure to be torch's own."""
    kind = type(optimizer)
    if (
        kind.state_dict is not _optimizer_state_dict
        or kind.__getattribute__ is not object.__getattribute__
        or any(hasattr(kind, name) for name in _OPTIMIZER_ATTRIBUTES)
    ):
        return None
    own = optimizer.__dict__
    if "state_dict" in own or any(own.get(name, True) for name in _OPTIMIZER_ATTRIBUTES[2:]):
        return None
    state: Any = own.get("state")
    groups: Any = own.get("param_groups")
    if type(state) not in (dict, defaultdict) or type(groups) is not list:
        return None
    found: list[object] = [kind, state, groups]
    for group in groups:
        if type(group) is not dict or type(group.get("params")) is not list:
            return None
        found += (group, group["params"])
        found += group["params"]
    found += state
    for values in state.values():
        if type(values) is not dict:
            return None
        found.append(values)
        found += values
        found += values.values()
    return found
