"""Provider of optimizers: state named by parameter, restored even into an optimizer without state.

torch numbers an optimizer's parameters; everstep stores their names, so that a base describes
itself, and a changed list of parameters is detected instead of loading state into the wrong ones.

With ZeroRedundancyOptimizer each rank has the state of its own parameters, by name. The assignment
of parameters depends on the number of ranks. So a tree records the ranks that hold the state, and a
restore joins their shards and selects those that this rank owns now.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from everstep.errors import StateError, UnsupportedStateError
from everstep.state.guards import OptimizerGuard
from everstep.state.layout import Entry, Placement
from everstep.state.ownership import Memory, OwnedMemory, owned_memory_of
from everstep.state.providers.encodings import Encodings, load_exactly
from everstep.state.providers.gradients import has_gradient, parameters_with_gradient
from everstep.state.providers.modules import ParameterNames
from everstep.state.providers.provider import RestorePlan, Saved, SectionProvider, difference
from everstep.state.survey import SectionContents, TensorBlock, storable_block, unsupported
from everstep.state.values.objects import is_fixed, join_path
from everstep.state.values.tensors import is_dtensor, why_not_storable
from everstep.state.values.tree import references, split

_log = logging.getLogger("everstep")

NamedShape = tuple[str, tuple[int, ...]]

CLASS = "everstep/class"
"""Key of an optimizer's tree: its class as text, if it is one of torch's own."""

FORMS = "everstep/forms"
"""Key of an optimizer's tree: names of the parameters whose state ``state_dict()`` returns in
another form than training has, each with the keys of that state. Missing: there are none."""

GRADIENTS = "everstep/gradients"
"""Key of an optimizer's tree: names of the parameters that have a gradient; True: all of them.
Missing: none, as after ``zero_grad()``."""

_ADDED_KEYS = (CLASS, FORMS, GRADIENTS)  # everstep's additions to state_dict()

_CALLS_NO_HOOKS = (
    "its step() calls no hooks, because torch.optim.Optimizer.__init__() was not called; put the "
    "optimizer that it wraps into the state, and its other data in an object with state_dict() "
    "and load_state_dict()"
)
_HOOKS = "_optimizer_step_pre_hooks"
_VALUE_CHARS_MAX = 60


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that performs updates, inside of framework wrappers (accelerate,
    Lightning).

    Such a wrapper derives from ``Optimizer``, but does not call its ``__init__``, so it has no
    hooks; Lightning's keeps loaded state. An optimizer with groups or state of its own is not a
    wrapper.
    """
    while _HOOKS not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or not all(
            getattr(optimizer, name, None) is getattr(inner, name, optimizer)
            for name in ("param_groups", "state")
        ):
            break
        optimizer = inner
    return optimizer


def unsaved_inner_optimizers(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """Return optimizers held by another one, by attribute, whose state its ``state_dict()`` omits.

    torch's own ``state_dict`` returns only ``optimizer.state``; one defined by a class may return
    all.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return []
    found = vars(optimizer).items()
    inside = [(name, unwrap_optimizer(one)) for name, one in found if isinstance(one, Optimizer)]
    return [(name, one) for name, one in inside if one.state is not optimizer.state]


class OptimizerProvider(SectionProvider):
    """Provider of a ``torch.optim.Optimizer``.

    The tree is ``state_dict()`` with three changes: ``state`` is keyed by parameter name, each
    group's ``params`` lists ``(name, shape)``, and torch's own classes are named. Lazy state (Adam
    before its first step) is simply absent, on save and in the optimizer that is restored.

    Gradients are not saved, but the tree lists the parameters that have one: zeros, as left by
    ``zero_grad(set_to_none=False)``, update a parameter that the next loss does not depend on
    (frozen ones, too), and ``None`` does not.

    Args:
        section: key in the state dict.
        optimizer: the optimizer.
        names: names of parameters; those outside of every module of the state are named by their
            position.

    Raises:
        UnsupportedStateError: its ``step()`` calls no hooks, so no update could be held back while
            its tensors are being copied.
    """

    def __init__(self, section: str, optimizer: Optimizer, names: ParameterNames) -> None:
        kind = type(optimizer)
        if _HOOKS not in vars(optimizer) or not getattr(kind.step, "hooked", False):
            reason = f"{kind.__module__}.{kind.__qualname__}: {_CALLS_NO_HOOKS}"
            raise UnsupportedStateError(f"{section}: {reason}", leaves=((section, reason),))
        self.section = section
        self._optimizer = optimizer
        self._names = names
        self._have_gradients: list[str] | bool = False
        self._encodings = Encodings()
        self._forms: dict[str, list[str]] = {}  # found last, by name
        self._has_warned = False
        self._holding: OwnedMemory | None = None  # found last
        self._proof: OptimizerGuard | None = None
        self._named: list[NamedShape] = []  # parameters, and the names that they had, at the proof
        self._names_then: Mapping[int, str] = {}

    def collect(self) -> dict[str, Any]:
        tree = self.collect_state(self._parameters(self._names.now()))
        return {**tree, **self._added_keys()}

    def look(self) -> SectionContents:
        names = self._names.as_looked_at()
        # A guard that fails is dropped before the inspection, which may raise an error.
        if self._proof is None or not self._holds(self._proof, names):
            self._proof = None
            named = self._parameters(names)
            part = self._look_at(self.collect_state(named))
            holding = self._holding_now()
            self._proof = OptimizerGuard.of(self._optimizer, part, holding, names)
            if self._proof is None:
                tree = {**cast("dict[str, Any]", part.tree), **self._added_keys()}
                return replace(part, tree=tree, holding=self._as_before(holding))
            self._named = named
            self._names_then = names
        return self._with_options(self._proof)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return its parameters by their current names, each once."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        names = [name for name, _ in self._parameters(self._names.now())]
        return list(dict(zip(names, parameters, strict=True)).items())

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that performs updates."""
        return self._optimizer

    @property
    def has_its_parameters(self) -> bool:
        """True if a guard proves that its parameters are those of the last inspection."""
        return self._proof is not None and self._proof.has_its_parameters(self._optimizer)

    @property
    def is_function_of_gradients(self) -> bool:
        """True if ranks that consume equal gradients keep equal state.

        torch's own optimizers do; others may keep rank-local state (local momentum, residuals).
        """
        return type(self._optimizer).__module__.startswith("torch.optim.")

    def groups(self) -> list[list[str]]:
        """Return the names of the parameters of each group, now."""
        named = iter(self._parameters(self._names.now()))
        return [[next(named)[0] for _ in group["params"]] for group in self._optimizer.param_groups]

    @staticmethod
    def state_dict_of(tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved tree in the form of torch's ``state_dict()``.

        Parameters are numbered in the order of the groups, so it fits an optimizer of the same
        parameters in the same order.
        """
        groups = OptimizerProvider.groups_of(tree)
        assert groups is not None
        numbers: dict[str, int] = {}
        for name in (name for group in groups for name in group):
            numbers.setdefault(name, len(numbers))
        return numbered(tree, numbers)

    @staticmethod
    def groups_of(tree: Any) -> list[list[str]] | None:
        """Return the names of the parameters of each group in a saved tree; None if it is not an
        optimizer's."""
        groups = _named_groups(tree) if isinstance(tree, dict) else None
        return None if groups is None else [[name for name, _ in group] for group in groups]

    def _holds(self, proof: OptimizerGuard, names: Mapping[int, str]) -> bool:
        """Return True if the guard holds, and parameters have the same names."""
        same = names is self._names_then  # and so the modules are proven
        if not proof.holds(self._optimizer, modules_hold=same):
            return False
        if not same and self._parameters(names) != self._named:
            return False
        self._names_then = names
        return True

    def _added_keys(self) -> dict[str, Any]:
        """Return everstep's additions to ``state_dict()``: the class, encoded state, parameters
        with a gradient."""
        name = _name_in_torch(self._optimizer)
        found: dict[str, Any] = {} if name is None else {CLASS: name}
        if self._forms:
            found[FORMS] = self._forms
        if self._names.asks_gradients:
            self._have_gradients = parameters_with_gradient(self._optimizer, self.named)
        return {**found, GRADIENTS: self._have_gradients} if self._have_gradients else found

    def _put_gradients(self, tree: Mapping[str, Any]) -> None:
        """Set gradients to zero or to None, as listed in the tree."""
        held = tree.get(GRADIENTS, ())
        for name, parameter in self.named():
            if held is not True and name not in held:
                parameter.grad = None
            elif has_gradient(parameter):
                # In place: a gradient that is a view of a DDP bucket must stay one.
                parameter.grad.detach().zero_()  # type: ignore[union-attr]
            else:  # newer versions of torch let it have a dtype of its own
                dtype = getattr(parameter, "grad_dtype", None)
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)

    def _holding_now(self) -> OwnedMemory:
        return owned_memory_of(self.section, self._optimizer)

    def _with_options(self, proof: OptimizerGuard) -> SectionContents:
        """Return the guarded contents with the current options of the groups.

        Options are always read anew, since values that compare equal (1, 1.0 and True; 0.0 and
        -0.0) may differ.
        """
        groups: list[Any] = [dict(group) for group in self._optimizer.param_groups]
        for options in groups:
            del options["params"]
        holding = proof.holding
        block = TensorBlock.of({}, ())
        if not all(map(is_fixed, groups)):
            groups, block = self._checked(groups)
            shared = tuple(key for key in block.identities if isinstance(key, Memory))
            holding = replace(holding, shared=shared)
        self._blocks = (proof.state, block)
        for options, parameters in zip(groups, proof.parameters, strict=True):
            options["params"] = parameters
        tree = {"state": proof.state_tree, "param_groups": groups, **self._added_keys()}
        return SectionContents(self._blocks, tree, self._as_before(holding))

    def _checked(self, groups: list[Any]) -> tuple[list[Any], TensorBlock]:
        """Return copies of options that are mutable or tensors, and the tensors."""
        where = join_path(self.section, "param_groups")
        named = dict[str, torch.Tensor]()
        copies = [
            split(options, join_path(where, number), named, depth=2)
            for number, options in enumerate(groups)
        ]
        tree = {"param_groups": copies}
        return copies, storable_block(tree, named, self.section, self._blocks)

    def _look_at_forms(
        self, saved: Mapping[Any, Any], indices: Sequence[Any], parameters: Sequence[NamedShape]
    ) -> None:
        encodings = self._encodings
        encodings.look(self._optimizer, saved, indices)
        self._forms = {parameters[number][0]: keys for number, keys in encodings.forms.items()}
        if self.loses and not self._has_warned:
            self._has_warned = True
            lost = [f"{key} of {parameters[number][0]}" for number, key in encodings.lossy]
            _log.warning(
                "everstep: the state_dict() of %r does not keep %d tensor(s) bit for bit: %s; a "
                "resume from this state is not called exact",
                self.section,
                len(lost),
                ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else ""),
            )

    @property
    def encodes(self) -> bool:
        """True if its ``state_dict()`` returns state in another form than training has, or omits
        some."""
        return bool(self._forms or self._encodings.lossy)

    @property
    def loses(self) -> bool:
        """True if its ``state_dict()`` loses bits of the state, or may."""
        return bool(self._encodings.lossy)

    def _as_before(self, holding: OwnedMemory) -> OwnedMemory:
        """Return the memory that it owns; the object of the last look if they are equal."""
        if self._holding is None or self._holding != holding:
            self._holding = holding
        return self._holding

    def collect_state(self, parameters: list[NamedShape]) -> dict[str, Any]:
        try:
            state_dict = self._optimizer.state_dict()
        except KeyError as error:
            raise StateError(
                f"{self.section}: its state_dict() fails ({error!r}): the optimizer may have state "
                "of parameters that are in none of its groups",
                hint="remove it: optimizer.state.pop(parameter)",
            ) from error
        try:
            saved_state = state_dict["state"]
            saved_groups = state_dict["param_groups"]
            indices = [index for group in saved_groups for index in group["params"]]
            named = dict(zip(indices, parameters, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            reason = (
                f"{type(self._optimizer).__name__}.state_dict() does not have the form of "
                "torch.optim; wrap it in an object whose state_dict() and load_state_dict() call "
                "those of the optimizer"
            )
            raise UnsupportedStateError(
                f"{self.section}: {reason}", leaves=((self.section, reason),)
            ) from error
        self._look_at_forms(saved_state, indices, parameters)
        state = {
            named[key][0] if isinstance(key, int) and key in named else key: value
            for key, value in saved_state.items()
        }
        groups = [
            {**group, "params": [named[index] for index in group["params"]]}
            for group in saved_groups
        ]
        return {**state_dict, "state": state, "param_groups": groups}

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        saved_groups = _named_groups(saved.tree)
        if saved_groups is None:
            problem = "the checkpoint has no optimizer here, the state has one"
            return RestorePlan.without([(self.section, problem)])
        plan = RestorePlan(tree=dict(saved.tree))
        live_groups = [group["params"] for group in self.collect()["param_groups"]]
        if len(saved_groups) != len(live_groups):
            plan.mismatches.append(
                (
                    f"{self.section}/param_groups",
                    f"saved {len(saved_groups)} groups, live {len(live_groups)}",
                )
            )
        for number, (theirs, mine) in enumerate(zip(saved_groups, live_groups, strict=False)):
            plan.mismatches += self._compare_group(number, theirs, mine)
        plan.mismatches += self._of_another_class(saved.tree)
        if plan.mismatches:  # an optimizer is restored as a whole or not at all
            return RestorePlan.without(plan.mismatches)
        for name, entry in saved.entries.items():
            tensor = live.get(name)
            if tensor is not None and difference(entry, tensor) is None:
                plan.in_place[name] = tensor
        plan.copied = frozenset(references(saved.tree["param_groups"]))
        plan.like = self._like(saved.tree["state"], saved.entries)
        return plan

    def _like(self, state: Any, entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
        """Return the placement for missing state of DTensor parameters: that of a parameter of
        the same shape."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.named():
            if is_dtensor(parameter):
                for saved in references(state.get(name, {})):
                    if difference(entries[saved], parameter, dtype=False) is None:
                        found[saved] = parameter
        return found

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        before = [dict(group) for group in self._optimizer.param_groups]
        self._load(tree)
        self._put_gradients(tree)
        return self._kept_options(before)

    def _kept_options(self, before: Sequence[Mapping[str, Any]]) -> list[str]:
        """Put options back that a group had before the load and the base does not have.

        torch replaces the whole group. Options that torch itself adds to a group of an older
        version stay.

        Returns:
            Descriptions of these options. The saved training had none, so continuing with one is
                not exact.
        """
        notes = []
        for number, (old, new) in enumerate(
            zip(before, self._optimizer.param_groups, strict=False)
        ):
            for name in [name for name in old if name not in new]:
                new[name] = old[name]
                where = join_path(f"{self.section}/param_groups/{number}", name)
                value = repr(old[name])
                value = value if len(value) < _VALUE_CHARS_MAX else type(old[name]).__name__
                notes.append(f"{where} is not in the base: the program's value is kept, {value}")
        return notes

    def _load(self, tree: Mapping[str, Any]) -> None:
        numbers = self._numbers()
        forms = {numbers[name]: keys for name, keys in _forms_of(tree).items() if name in numbers}
        load_exactly(self._optimizer, numbered(tree, numbers), forms)

    def _numbers(self) -> dict[str, int]:
        """Return torch's numbers of the parameters, by name."""
        named = self._parameters(self._names.now())
        return {name: index for index, (name, _) in enumerate(named)}

    def _parameters(self, names: Mapping[int, str]) -> list[NamedShape]:
        """Return ``(name, shape)`` of all parameters in the order in which torch numbers them.

        Section "a" with key "b.c" and section "a.b" with key "c" have names in common; the later
        one gets a number.

        Raises:
            UnsupportedStateError: a parameter is not initialised yet.
        """
        unique: dict[int, str] = {}
        taken: set[str] = set()
        found: list[NamedShape] = []
        for number, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                key = id(parameter)
                if key not in unique:
                    name = wanted = names.get(key, f"group{number}[{position}]")
                    again = 2
                    while name in taken:
                        name = f"{wanted}~{again}"
                        again = again + 1
                    taken.add(name)
                    unique[key] = name
                    if is_lazy(parameter):
                        leaf = join_path(self.section, name), why_not_storable(parameter) or ""
                        raise unsupported([leaf])
                found.append((unique[key], tuple(parameter.shape)))
        return found

    def _of_another_class(self, tree: Any) -> list[tuple[str, str]]:
        """Return the reasons why the saved state belongs to another class of optimizer.

        torch would load it without an error, and ignore options that this class does not know, or
        train (AdamW with Adam's options) as the other class. Bases name torch's own classes. For
        other classes, which users may rename, and for older bases, the options decide: an option of
        torch's that this class does not have is a mismatch. Options that schedulers and users add,
        or that another version of torch has, are not.
        """
        kind = type(self._optimizer)
        problems = list[tuple[str, str]]()
        theirs = tree.get(CLASS)
        mine = _name_in_torch(self._optimizer)
        if isinstance(theirs, str) and mine is not None and theirs != mine:
            problems.append((self.section, f"saved by a {theirs}, live is a {mine}"))
        known = _options_of_torch()
        pairs = zip(tree["param_groups"], self._optimizer.param_groups, strict=False)
        for number, (saved, live) in enumerate(pairs):
            here = {*live, *self._optimizer.defaults}
            strange = sorted((saved.keys() & known) - here)
            lacking = self._optimizer.defaults.keys() - saved.keys()
            if strange and (lacking or self.is_function_of_gradients):
                where = f"{self.section}/param_groups/{number}"
                text = f"saved by another class: {kind.__name__} has no {', '.join(strange)}"
                problems.append((where, text))
        return problems

    def _compare_group(
        self, number: int, theirs: list[NamedShape], mine: list[NamedShape]
    ) -> list[tuple[str, str]]:
        where = f"{self.section}/param_groups/{number}"
        live = dict(mine)
        saved = dict(theirs)
        problems = [
            (join_path(where, name), "not in the checkpoint") for name in live if name not in saved
        ]
        for name, shape in saved.items():
            if name not in live:
                problems.append((join_path(where, name), "in the checkpoint, not in the optimizer"))
            elif tuple(shape) != tuple(live[name]):
                problems.append(
                    (join_path(where, name), f"saved {list(shape)}, live {list(live[name])}")
                )
        if not problems and list(saved) != list(live):  # LBFGS has one state for all, in order
            problems.append((where, f"saved in the order {list(saved)}, live {list(live)}"))
        return problems


def numbered(tree: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return a saved tree in the form of torch's ``state_dict()``, with these numbers of
    parameters."""
    own = {key: value for key, value in tree.items() if key not in _ADDED_KEYS}
    own["state"] = {numbers.get(key, key): value for key, value in tree["state"].items()}
    own["param_groups"] = [
        {**group, "params": [numbers[name] for name, _ in group["params"]]}
        for group in tree["param_groups"]
    ]
    return own


def _name_in_torch(optimizer: Optimizer) -> str | None:
    """Return the public name of a class of torch, which no version changes; None for other
    classes."""
    kind = type(optimizer)
    own = getattr(torch.optim, kind.__name__, None) is kind
    return f"torch.optim.{kind.__name__}" if own else None


@functools.cache
def _options_of_torch() -> frozenset[str]:
    """Return the names of all options of torch's optimizers, except for options added to a class
    after the oldest supported torch."""
    kinds = (kind for kind in vars(torch.optim).values() if isinstance(kind, type))
    names = {
        name
        for kind in kinds
        if issubclass(kind, Optimizer) and kind is not Optimizer
        for name in inspect.signature(kind).parameters
    }
    return frozenset(names - {"params", "decoupled_weight_decay"})


def _forms_of(tree: Mapping[str, Any]) -> dict[str, list[str]]:
    forms = tree.get(FORMS)
    pairs = forms.items() if isinstance(forms, dict) else ()
    return {name: list(keys) for name, keys in pairs if isinstance(keys, (list, tuple))}


def _named_groups(tree: Any) -> list[list[NamedShape]] | None:
    """Return name and shape of each parameter in each group; None if the tree is not an
    optimizer's."""
    try:
        groups = [
            [(str(name), tuple(shape)) for name, shape in map(_pair, group["params"])]
            for group in tree["param_groups"]
        ]
        return groups if isinstance(tree["state"], dict) else None
    except (KeyError, TypeError, ValueError):
        return None


def _pair(named: Any) -> Any:
    # DCP has the name of a parameter alone here. One of two letters would count as a pair.
    if isinstance(named, str):
        raise TypeError("a name without a shape")
    return named


PARTITIONED = "everstep/partitioned"
"""Key of an optimizer's tree: the ranks over which its state is distributed, as text."""


def is_zero(optimizer: Optimizer) -> bool:
    """Return True for torch's ZeroRedundancyOptimizer, without importing its module."""
    loaded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return loaded is not None and isinstance(optimizer, loaded.ZeroRedundancyOptimizer)


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that updates parameters on this rank: the inner one of a
    ZeroRedundancyOptimizer, otherwise the optimizer itself."""
    if not is_zero(optimizer):
        return optimizer
    inner: Optimizer = optimizer.optim  # type: ignore[attr-defined]
    return inner


class ZeroProvider(OptimizerProvider):
    """Provider of a ``torch.distributed.optim.ZeroRedundancyOptimizer``.

    Its own ``state_dict()`` would gather all state on one rank; here nothing is gathered.

    Raises:
        UnsupportedStateError: it overlaps with DistributedDataParallel, and replaces its inner
            optimizer after the first steps.
    """

    def __init__(self, section: str, optimizer: Any, names: ParameterNames) -> None:
        super().__init__(section, optimizer, names)
        if optimizer._overlap_with_ddp:
            reason = "ZeroRedundancyOptimizer with overlap_with_ddp=True is not supported"
            raise UnsupportedStateError(f"{section}: {reason}", leaves=((section, reason),))
        self._zero = optimizer

    @property
    def is_function_of_gradients(self) -> bool:
        return True  # one rank alone has the state of a parameter

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks over which the state is distributed."""
        return tuple(torch.distributed.get_process_group_ranks(self._zero.process_group))

    def owned(self) -> set[str]:
        """Return the names of the parameters whose state this rank keeps."""
        held = {id(p) for group in self._zero.optim.param_groups for p in group["params"]}
        return {name for name, parameter in self.named() if id(parameter) in held}

    def owners(self) -> dict[str, int]:
        """Return, by name of each parameter, the rank that updates it and broadcasts it."""
        ranks = self.ranks
        found = self._zero._param_to_rank
        return {name: ranks[found[parameter]] for name, parameter in self.named()}

    def sync_parameters(self) -> None:
        """Broadcast updated parameters, as at the end of each ``step()``. All ranks must call
        it."""
        self._zero._sync_params()

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        plan = super().plan(saved, live)
        if not plan.left_out:
            mine = self.owned()
            state = {name: values for name, values in plan.tree["state"].items() if name in mine}
            plan.tree = {**plan.tree, "state": state}
        return plan

    def _load(self, tree: Mapping[str, Any]) -> None:
        own = numbered(tree, self._numbers())
        # load_state_dict() replaces the state of those parameters only that the tree has.
        self._zero.optim.state.clear()
        self._zero.load_state_dict({key: own[key] for key in ("state", "param_groups")})
        self._zero.state.clear()  # load_state_dict() makes a second copy that is never used

    def _holding_now(self) -> OwnedMemory:
        outer = super()._holding_now()
        inner = owned_memory_of(self.section, self._zero.optim)
        return OwnedMemory(
            self.section,
            tuple(dict.fromkeys((*outer.slots, *inner.slots))),
            tuple(dict.fromkeys((*outer.shared, *inner.shared))),
        )

    def collect_state(self, parameters: list[NamedShape]) -> dict[str, Any]:
        groups: list[dict[str, Any]] = self._zero.param_groups
        listed = [parameter for group in groups for parameter in group["params"]]
        named = {id(parameter): it for parameter, it in zip(listed, parameters, strict=True)}
        return {
            "state": {
                named[id(parameter)][0]: values
                for parameter, values in self._zero.optim.state.items()
            },
            "param_groups": [
                {**group, "params": [named[id(parameter)] for parameter in group["params"]]}
                for group in groups
            ],
            PARTITIONED: Placement(self.ranks).text,
        }
