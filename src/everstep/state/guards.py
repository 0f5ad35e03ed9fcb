"""Guards: check that inspecting a module or an optimizer again would give the same as before.

A module's or optimizer's ``state_dict``, if it is torch's own and no hook takes part, is a function
of a few containers and their members. If those are the same objects, and every tensor among them is
still the same memory, the result is the same, but for the values in that memory. Guards compare
*identity*, and keep the objects they compare, so that no identity can pass to another object. They
do not rely on values or on version counters, which miss writes.

There is no guard for anything else: overrides, hooks, extra state, subclasses of containers or
tensors, or a torch whose methods read more than is known here.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.state.ownership import OwnedMemory
from everstep.state.survey import PLAIN_TENSORS, SectionContents, same_objects
from everstep.state.values.objects import Encoded, TensorRef, encode


def _is_torchs_own(function: object, names: frozenset[str]) -> bool:
    """Return True if ``function`` is defined by torch, not replaced, and uses no names but
    ``names``."""
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
    # Names that do not make the result depend on anything else.
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

# Attributes that a class must not define, or its modules may not behave as torch's do.
_MODULE_OWN = (
    *_MODULE_METHODS,
    *_MODULE_ATTRIBUTES,
    "__class__",
    "__eq__",
    "__getattribute__",
    "__hash__",
)

_MODULE = vars(nn.Module)
_METHODS = tuple(_MODULE_METHODS.values())
_MODULE_LACKS = tuple(name for name in _MODULE_OWN if name not in _MODULE_METHODS)

# Guards are checked at every save, so each of these calls handles many objects at once.
_own_dict = attrgetter("__dict__")
_keys = methodcaller("keys")
_values = methodcaller("values")
_bases_of = attrgetter("__mro__")
_members_of = itemgetter(*_MODULE_ATTRIBUTES)
_methods_of = itemgetter(*_MODULE_METHODS)
_overrides_none = methodcaller("isdisjoint", tuple(_MODULE_METHODS))
_HOOKS = slice(4, 6)  # in _MODULE_ATTRIBUTES
_UNSAVED = 3

_data_ptr = torch.Tensor.data_ptr
_is_set_to = torch.Tensor.is_set_to
_is_conj = torch.Tensor.is_conj
_is_neg = torch.Tensor.is_neg
_dtype = attrgetter("dtype")


def _is_set_to_is_reliable() -> bool:
    """Return True if ``is_set_to`` is False for conjugated and negated tensors, as
    ``TensorGuard`` requires."""
    pairs = torch.ones(1, dtype=torch.complex64, device="cpu")
    conjugated = pairs.conj()
    return not conjugated.is_set_to(pairs) and not conjugated.imag.is_set_to(pairs.imag)


_MODULES_PROVABLE = (
    _is_set_to_is_reliable()
    and all(_is_torchs_own(method, _MODULE_NAMES) for method in _MODULE_METHODS.values())
    and _MODULE.keys().isdisjoint(_MODULE_LACKS)
)
_OPTIMIZERS_PROVABLE = _is_set_to_is_reliable() and _is_torchs_own(
    _optimizer_state_dict, _OPTIMIZER_NAMES
)


class TensorGuard:
    """Check that tensors still have the memory of earlier views of them.

    The guard keeps tensors and views alive, so that none of the memory can be reused meanwhile: the
    same address is the same memory.

    Args:
        tensors: live tensors.
        views: a detached view of each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._views = views
        self._reading = None
        # is_set_to() is False for a conjugated or negated view, even against itself.
        is_plain = not any(map(_is_conj, views)) and not any(map(_is_neg, views))
        if len(tensors) == len(views) and is_plain:
            self._reading = _reading(views)

    def holds(self) -> bool:
        """Return True if views taken now would be the same.

        Compares storage, offset, shape and strides (``is_set_to``, which is False for conjugated
        and negated tensors), the address (a storage can move) and the dtype. Returns False in
        doubt.
        """
        if self._reading is None or _reading(self._tensors) != self._reading:
            return False
        try:
            with torch._C.DisableTorchFunction():
                return all(map(_is_set_to, self._tensors, self._views))
        except RuntimeError:  # a device without is_set_to()
            return False


def _reading(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.dtype]] | None:
    """Return address and dtype of each tensor; None if one is a tensor subclass, or has no
    memory of its own."""
    if not PLAIN_TENSORS.issuperset(map(type, tensors)):
        return None
    try:
        # Under a TorchFunctionMode of the user (a default device is one) each call takes ten
        # times as long. On plain tensors the mode does not change the results.
        with torch._C.DisableTorchFunction():
            return list(map(_data_ptr, tensors)), list(map(_dtype, tensors))
    except RuntimeError:
        return None


def canonical_key(key: str) -> str:
    """Return a state-dict key without the prefixes of ``torch.compile`` and of activation
    checkpointing wrappers.

    A wrapper for activation checkpointing adds its prefix to parameter names only; its
    ``state_dict()`` omits it.
    """
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


class _DictGuard:
    """Check that dicts still hold the same keys and values, in the same order.

    The guard keeps the dicts themselves; it does not check who refers to them.
    """

    def __init__(self, dicts: Sequence[Mapping[Any, Any]]) -> None:
        self._dicts = dicts
        self._filled = [held for held in dicts if held]
        self._lengths = list(map(len, dicts))
        self._keys = list(chain.from_iterable(self._filled))
        self._values = list(chain.from_iterable(map(_values, self._filled)))

    def hold(self) -> bool:
        """Return True if keys, values and their order are unchanged."""
        # The lengths ensure that no member counts for the next dict.
        return (
            list(map(len, self._dicts)) == self._lengths
            and all(map(is_, chain.from_iterable(self._filled), self._keys))
            and all(map(is_, chain.from_iterable(map(_values, self._filled)), self._values))
        )


class ModuleGuard:
    """Check that a module's ``state_dict`` and the names of its parameters are unchanged.

    Attributes:
        part: contents of the module at the last inspection; its objects are encoded.
    """

    def __init__(self, modules: list[nn.Module], watch: TensorGuard, part: SectionContents) -> None:
        self.part = part
        self._modules = modules
        self._types = list(map(type, modules))
        self._kinds = list(dict.fromkeys(self._types))
        self._bases = list(map(_bases_of, self._kinds))
        kinds = set(chain.from_iterable(self._bases)) - {nn.Module, object}
        self._classes = list(map(_own_dict, kinds))
        self._defined = list(map(list, self._classes))  # names: no class has a new method
        self._owns = list(map(_own_dict, modules))
        held = [_members_of(own) for own in self._owns]
        self._held = list(chain.from_iterable(held))
        containers = [members for row in held for members in row[:_UNSAVED]]
        self._containers = _DictGuard([members for members in containers if members])
        unsaved = [row[_UNSAVED] for row in held]
        self._empty = [hooks for row in held for hooks in row[_HOOKS]]
        self._empty += [members for members in (*containers, *unsaved) if not members]
        self._unsaved = [names for names in unsaved if names]
        self._unsaved_then = list(map(frozenset, self._unsaved))
        self._watch = watch

    @classmethod
    def of(cls, module: nn.Module, part: SectionContents) -> ModuleGuard | None:
        """Return a guard of ``part``, the contents of ``module``; None if there can be none."""
        modules: dict[int, nn.Module] = {}
        tensors: dict[str, torch.Tensor] = {}
        if not _MODULES_PROVABLE or not _collect_tensors(module, "", modules, tensors):
            return None
        tree = part.tree
        if not isinstance(tree, dict) or not {TensorRef}.issuperset(map(type, tree.values())):
            return None
        if list(tree) != list(map(canonical_key, tensors)):
            return None
        (block,) = part.blocks
        watch = TensorGuard(list(tensors.values()), block.tensors)
        found = SectionContents(part.blocks, Encoded(encode(tree, checked=True)))
        proof = cls(list(modules.values()), watch, found)
        return proof if proof.holds(module) else None

    def holds(self, module: nn.Module) -> bool:
        """Return True if inspecting ``module`` now would give the same."""
        modules = self._modules
        return (
            module is modules[0]
            and all(map(is_, map(type, modules), self._types))
            and all(map(is_, map(_bases_of, self._kinds), self._bases))
            and list(map(list, self._classes)) == self._defined
            and _is_torch_unpatched()
            and all(map(is_, map(_own_dict, modules), self._owns))
            and self._members_hold()
            and self._watch.holds()
        )

    def _members_hold(self) -> bool:
        """Return True if every module has the same members as before, and no hooks or overrides."""
        try:
            held = list(chain.from_iterable(map(_members_of, self._owns)))
        except KeyError:
            return False
        return (
            same_objects(held, self._held)
            and all(map(_overrides_none, map(_keys, self._owns)))
            and not any(self._empty)
            and self._unsaved == self._unsaved_then
            and self._containers.hold()
        )


def _is_torch_unpatched() -> bool:
    """Return True if ``nn.Module`` has its own methods, and no patched attributes."""
    return same_objects(_methods_of(_MODULE), _METHODS) and _MODULE.keys().isdisjoint(_MODULE_LACKS)


def _is_plain(bases: tuple[type, ...]) -> bool:
    """Return True if a class with these bases leaves collecting the state entirely to torch."""
    others = [vars(kind).keys() for kind in bases if kind not in (nn.Module, object)]
    return (
        nn.Module in bases
        and _is_torch_unpatched()
        and all(names.isdisjoint(_MODULE_OWN) for names in others)
    )


def _collect_tensors(
    module: nn.Module, prefix: str, modules: dict[int, nn.Module], tensors: dict[str, torch.Tensor]
) -> bool:
    """Collect all modules, and the tensors that torch's ``state_dict`` collects, by its keys.

    Returns:
        False if the result is not certain to be that of torch.
    """
    bases = _bases_of(type(module))
    own = module.__dict__
    if not _is_plain(bases) or type(own) is not dict:
        return False
    if not own.keys() >= set(_MODULE_ATTRIBUTES):
        return False
    parameters, buffers, children, unsaved, *_ = _members_of(own)
    if not {dict, OrderedDict}.issuperset(map(type, (parameters, buffers, children))):
        return False
    if type(unsaved) is not set:
        return False
    modules[id(module)] = module
    saved = {key: tensor for key, tensor in buffers.items() if key not in unsaved}
    for key, tensor in (*parameters.items(), *saved.items()):
        if tensor is not None:
            tensors[prefix + key] = tensor
    return all(
        child is None
        or (
            isinstance(child, nn.Module)
            and _collect_tensors(child, f"{prefix}{key}.", modules, tensors)
        )
        for key, child in children.items()
    )


class OptimizerGuard:
    """Check that an optimizer's ``state_dict`` is unchanged, except for the options of its groups.

    Attributes:
        state: tensors of the state, in canonical order.
        state_tree: the state, encoded.
        parameters: each group's list of names and shapes, encoded.
        holding: memory that it owns, without hyperparameters, which are options.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        part: SectionContents,
        holding: OwnedMemory,
        named: Container[int],
    ) -> None:
        (block,) = part.blocks
        tree: Any = part.tree
        self.holding = replace(holding, shared=())
        self._parts = _state_and_groups(optimizer)
        self._groups = list(optimizer.param_groups)
        self._lists = [group["params"] for group in self._groups]
        self._lengths = list(map(len, self._lists))
        self._parameters = list(chain.from_iterable(self._lists))
        self._containers = _DictGuard([optimizer.state, *optimizer.state.values()])
        tensors = [t for values in optimizer.state.values() for t in values.values()]
        self.state = block.first(len(tensors))
        self.state_tree = Encoded(encode(tree["state"], checked=True))
        self.parameters = [
            Encoded(encode(group["params"], checked=True)) for group in tree["param_groups"]
        ]
        self._state_watch = TensorGuard(tensors, self.state.tensors)
        inside = [parameter for parameter in self._parameters if id(parameter) in named]
        outside = [parameter for parameter in self._parameters if id(parameter) not in named]
        self._inside_watch, self._outside_watch = map(_watch_of, (inside, outside))

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        part: SectionContents,
        holding: OwnedMemory,
        named: Container[int],
    ) -> OptimizerGuard | None:
        """Return a guard of ``part`` and ``holding``, the contents of ``optimizer``; None if there
        can be none.

        Args:
            optimizer: the optimizer.
            part: its contents.
            holding: the memory that it owns.
            named: ids of the parameters of all modules of the state.
        """
        parts = _state_and_groups(optimizer)
        if not _OPTIMIZERS_PROVABLE or parts is None or not _is_plainly_kept(*parts[1:]):
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
        proof = cls(optimizer, part, holding, named)
        return proof if proof.holds(optimizer) else None

    def holds(self, optimizer: Optimizer, *, modules_hold: bool = False) -> bool:
        """Return True if inspecting ``optimizer`` now would give the same, with the same names of
        parameters, except for the options.

        Args:
            optimizer: the optimizer.
            modules_hold: the guards of all modules hold since this guard last did, and so their
                parameters are the same memory.
        """
        parts = _state_and_groups(optimizer)
        return (
            parts is not None
            and self._parts is not None
            and same_objects(parts, self._parts)
            and same_objects(parts[2], self._groups)
            and self._lists_hold()
            and self._containers.hold()
            and self._state_watch.holds()
            and self._outside_watch.holds()
            and (modules_hold or self._inside_watch.holds())
        )

    def has_its_parameters(self, optimizer: Optimizer) -> bool:
        """Return True if the groups are the same, with the same parameters."""
        return same_objects(optimizer.param_groups, self._groups) and self._lists_hold()

    def _lists_hold(self) -> bool:
        """Return True if the groups have the same lists of the same parameters."""
        lists: list[Any] = [group.get("params") for group in self._groups]
        return (
            same_objects(lists, self._lists)
            and list(map(len, lists)) == self._lengths
            and same_objects(list(chain.from_iterable(lists)), self._parameters)
        )


def _watch_of(tensors: Sequence[torch.Tensor]) -> TensorGuard:
    return TensorGuard(tensors, [tensor.detach() for tensor in tensors])


def _state_and_groups(optimizer: Optimizer) -> tuple[Any, Any, Any] | None:
    """Return an optimizer's type, state and groups; None if ``state_dict`` may read anything
    else."""
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
    return kind, own.get("state"), own.get("param_groups")


def _is_plainly_kept(state: Any, groups: Any) -> bool:
    """Return True if an optimizer keeps everything in containers whose members can be compared."""
    if type(state) not in (dict, defaultdict) or type(groups) is not list:
        return False
    return {dict}.issuperset(map(type, (*groups, *state.values()))) and all(
        type(group.get("params")) is list for group in groups
    )
