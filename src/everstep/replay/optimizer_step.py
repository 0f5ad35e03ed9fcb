"""The optimizer's own ``step()``, run over given gradients and without hooks."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim import optimizer as torch_hooks

from everstep.errors import UnsupportedStateError
from everstep.replay.cuts import copied
from everstep.replay.updates import Gradient, Packed, Update, dense


def _nothing() -> None: ...


# Code of the wrapper that torch puts around each step(). The wrapper takes over the name of the
# function, so only its code identifies it.
_HOOKED = Optimizer.profile_hook_step(_nothing).__code__
_NOT_OPTIONS = ("params", "param_names")
_LEAVE_GRADIENTS = (Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop)
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch_hooks._global_optimizer_pre_hooks,
    torch_hooks._global_optimizer_post_hooks,
)
_GLOBAL_HOOKS_LOCK = threading.Lock()
_DEFAULT_DTYPE_LOCK = threading.RLock()


def makes_state_when_built(kind: type[Optimizer], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if an optimizer of these groups' hyperparameters has state before its first
    update."""
    return bool(groups) and bool(build(kind, [[torch.zeros(1, device="cpu")]], groups[:1]).state)


def build(
    kind: type[Optimizer],
    parameters: Sequence[Sequence[torch.Tensor]],
    groups: Sequence[Mapping[str, Any]],
) -> Optimizer:
    """Build an optimizer over ``parameters`` with the hyperparameters of ``groups``.

    Raises:
        UnsupportedStateError: its class cannot be built from groups.
    """

    def described() -> list[dict[str, Any]]:
        own = [{k: _copied(v) for k, v in g.items() if k not in _NOT_OPTIONS} for g in groups]
        return [
            {**options, "params": list(members)}
            for options, members in zip(own, parameters, strict=True)
        ]

    try:
        # Defaults are not used: every group comes with all of its hyperparameters.
        return kind(described())  # type: ignore[call-arg]
    except TypeError as first:
        # The class of a user may have hyperparameters without defaults.
        accepted = inspect.signature(kind).parameters
        options = {k: v for k, v in groups[0].items() if k in accepted and k not in _NOT_OPTIONS}
        try:
            return kind(described(), **_copied(options))
        except TypeError:
            name = kind.__qualname__
            raise UnsupportedStateError(
                f"{name} cannot be built from its groups, {name}(groups): {first}",
                leaves=((name, str(first)),),
            ) from first


def set_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set the hyperparameters of each group.

    The value of a tensor is copied into the existing one, which a scheduler or a captured graph may
    hold.
    """
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            if key not in _NOT_OPTIONS:
                group[key] = _put(group.get(key), value)


def _put(old: Any, new: Any) -> Any:
    if isinstance(new, torch.Tensor):
        fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)
        if not fits:
            return _copied(new)
        if old is not new:
            old.detach().copy_(new.detach())
        return old
    if isinstance(new, tuple) and any(isinstance(item, torch.Tensor) for item in new):
        before = old if isinstance(old, tuple) and len(old) == len(new) else (None,) * len(new)
        return tuple(map(_put, before, new))
    return _copied(new)


def _copied(value: Any) -> Any:
    """Copy a value, with its tensors and containers."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value


def writes_gradients(kind: type[Optimizer], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if ``step()`` may write to the gradients, as far as is known without a scaler.

    foreach SGD with Nesterov momentum adds the momentum into them.
    """
    if kind in _LEAVE_GRADIENTS:
        return False
    if kind is SGD:
        return any(
            options.get("nesterov")
            and options.get("foreach") is not False  # None: foreach on accelerators
            and not options.get("fused")
            for options in groups
        )
    return True


def step_over(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], update: Update) -> None:
    """Run ``step()`` once over the gradients of ``update``, which must fit.

    ``grad`` of every parameter, hooks, and attributes that a ``GradScaler`` left on the optimizer
    are restored afterwards.
    """
    # Fused kernels write the unscaled gradients back.
    copies = update.grad_scale is not None or writes_gradients(type(optimizer), update.groups)
    before = [(parameter, parameter.grad) for parameter in parameters.values()]
    set_options(optimizer, update.groups)
    try:
        for name, parameter in parameters.items():
            logged = update.gradients.get(name)
            parameter.grad = None if logged is None else _as_consumed(logged, parameter, copies)
        with (
            _scaler(optimizer, update),
            default_dtype(update.default_dtype),
            _without_hooks(optimizer) as step,
            torch.no_grad(),
        ):
            step(optimizer)
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _as_consumed(gradient: Gradient, parameter: torch.Tensor, copies: bool) -> torch.Tensor:
    """Return a gradient for ``parameter.grad``; a copy of the logged one if ``copies``."""
    logged = dense(gradient)
    if logged.layout != torch.strided:  # sparse ones
        found = logged.to(parameter.device, parameter.dtype)
        return found.clone() if copies and found is logged else found
    there = (logged.device, logged.dtype) == (parameter.device, parameter.dtype)
    if there and (isinstance(gradient, Packed) or not copies):
        return logged
    return copied(logged, parameter.dtype, parameter.device)


def own_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return ``kind.step`` without torch's wrapper that calls the hooks."""
    step: Any = kind.step
    while getattr(step, "__code__", None) is _HOOKED:
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set torch's default dtype for a block; None: leave it. The dtype is global to the process:
    only one replay runs at a time, and other threads see it meanwhile."""
    if dtype is None:
        yield
        return
    with _DEFAULT_DTYPE_LOCK:
        before = torch.get_default_dtype()
        if dtype == before:
            yield
            return
        try:
            torch.set_default_dtype(dtype)
            yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[Callable[..., Any]]:
    """Yield the step function; no hook runs inside it, even if a subclass calls
    ``super().step()``."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):  # a single step function, already unwrapped
        yield own_step(kind)
        return
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    held = [getattr(optimizer, name) for name in names]
    # Global hooks are shared by all optimizers: two replays at a time would restore each other's.
    with _GLOBAL_HOOKS_LOCK:
        held_global = [dict(hooks) for hooks in _GLOBAL_HOOKS]
        try:
            for name in names:
                setattr(optimizer, name, OrderedDict())
            # Cleared in place: torch reads these dictionaries, and removal handles refer to them.
            for hooks in _GLOBAL_HOOKS:
                hooks.clear()
            yield own_step(kind)
        finally:
            for name, own in zip(names, held, strict=True):
                setattr(optimizer, name, own)
            for hooks, kept in zip(_GLOBAL_HOOKS, held_global, strict=True):
                hooks.update(kept)


@contextmanager
def _scaler(optimizer: Optimizer, update: Update) -> Iterator[None]:
    """Set the two attributes that ``GradScaler.step`` sets on a fused optimizer."""
    own = vars(optimizer)
    names = ("grad_scale", "found_inf")
    held = {name: own.pop(name) for name in names if name in own}
    try:
        if update.grad_scale is not None or update.found_inf is not None:
            own.update(grad_scale=update.grad_scale, found_inf=update.found_inf)
        yield
    finally:
        for name in names:
            own.pop(name, None)
        own.update(held)
