"""Finds optimizers that update what a state has and are in no part of it.

Such an optimizer was forgotten, or the loop has bound a new one in mid-run. What it keeps
(moments, rates) is in no base, so nothing that is saved from its first update on is exact. Its
updates are held at the gate and counted like those of the state's own optimizers, and no log can
repeat them.

torch calls the hooks that are registered here before and after the step of every optimizer of the
process. Each optimizer is judged at its first step, and again when it has more groups; one that
updates nothing of the state also when the state has other entries. For all but those that are
reported the hook is a lookup in a dict.
"""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from everstep.capture.updates import UpdateHooks
from everstep.errors import StateError
from everstep.state.coverage import first_few
from everstep.state.providers.optimizers import unwrap_optimizer
from everstep.state.survey.ownership import AddressRanges, Memory, memory_of
from everstep.state.training_state import State
from everstep.state.values.tensors import local_tensor, why_not_storable

__all__ = ["Strangers", "is_held", "is_ours", "kind_of"]

_TOLD_MAX = 8  # there may be one for each parameter
_OBJECTS_MAX = 50_000
_ITEMS_MAX = 4096
_HOLDS_NONE = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None), type, torch.dtype),
    *(types.ModuleType, types.CodeType, types.FrameType, types.BuiltinFunctionType),
    *(torch.Tensor, torch.UntypedStorage, nn.Module),
)


@dataclass(slots=True)
class _Stranger:
    """An optimizer that may update what the state has, and is in no part of it.

    Attributes:
        groups: how many it had when it was judged.
        parameters: those that the state has.
        why: what to say of it.
        consumes: one of these has a gradient that its update, under way, consumes.
    """

    groups: int
    parameters: list[torch.Tensor]
    why: str
    consumes: bool = False


class Strangers:
    """The optimizers of the process, as far as they concern a state.

    Args:
        updates: counts updates, and holds the handles of all hooks.
        gate: called before anything of the state is updated (I1).
        lost: called, with the reason, behind an update that no log can repeat; None: there is none.
        tell: called, once for each kind, with what the user should know.
    """

    def __init__(
        self,
        state: State,
        updates: UpdateHooks,
        gate: Callable[[str | None], None],
        lost: Callable[[str], None] | None,
        tell: Callable[[StateError], None],
    ) -> None:
        self._state = state
        self._updates = updates
        self._gate = gate
        self._lost = lost
        self._tell = tell
        # With the number of groups then, and whether it is in a part of the state.
        self._others: dict[int, tuple[int, bool, object]] = {}
        self._strangers: dict[int, tuple[_Stranger, object]] = {}
        self._layout: object = None  # of the state that they were judged by
        self._hooked = self._is_started = False

    def watch(self) -> None:
        """Look at each step of each optimizer from now on, until the handles are removed."""
        self._updates.handles.append(register_optimizer_step_pre_hook(self._before))

    def started(self) -> None:
        """The state is that of a start; what updated it before (a search for a rate) is past."""
        self._is_started = True

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _uncompiled(self._look_before, optimizer)
        else:
            self._look_before(optimizer)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _uncompiled(self._look_after, optimizer)
        else:
            self._look_after(optimizer)

    def _look_before(self, optimizer: Optimizer) -> None:
        known = self._others.get(id(optimizer))
        same = self._layout is self._state.layout
        if same and known is not None and known[0] == len(optimizer.param_groups):
            return  # mostly
        if not self._is_started:
            return
        stranger = self._judged(optimizer)
        if stranger is None:
            return
        stranger.consumes = _any_gradient(stranger.parameters)
        if self._is_within_ours:
            self._updates.within = True  # and no log can repeat that one
        else:
            self._gate(None)
        if not self._hooked:  # it is called behind this very step, too
            self._hooked = True
            self._updates.handles.append(register_optimizer_step_post_hook(self._after))

    def _look_after(self, optimizer: Optimizer) -> None:
        stranger, _ref = self._strangers.get(id(optimizer), (None, None))
        if stranger is None:
            return
        # A closure computes gradients within the step, and a hook may free them there.
        if not (stranger.consumes or _any_gradient(stranger.parameters)):
            return
        known = self._state.coverage.unsaved_trainers
        if stranger.why not in known and len(known) < _TOLD_MAX:
            known.append(stranger.why)
            self._tell(self._notice(stranger.why))
        if self._is_within_ours:
            return  # of the update of one of the state's own, which is counted
        self._updates.updated()
        if self._lost is not None:
            self._lost(stranger.why)

    @property
    def _is_within_ours(self) -> bool:
        updates = self._updates
        return updates.outermost is not None and updates.thread == threading.get_ident()

    def _notice(self, why: str) -> StateError:
        log = " No log can repeat its updates: a base is taken at the end of each such step."
        return StateError(
            f"{why}: what it keeps (moments, rates) is not saved, resume() loses it, and nothing "
            f"that is saved from now on is called exact.{'' if self._lost is None else log}",
            hint='add it to the state, {"optimizer": optimizer}; where the loop goes on with a new '
            "optimizer, close this Checkpointer first and make one of a state that has the new one",
        )

    def _judged(self, optimizer: Optimizer) -> _Stranger | None:
        if self._layout is not self._state.layout:  # a module was replaced, or has grown
            self._layout = self._state.layout
            for number in [number for number, one in self._others.items() if not one[1]]:
                del self._others[number]
        key = id(optimizer)
        groups = len(optimizer.param_groups)
        if key in self._others and self._others[key][0] == groups:
            return None
        known, _ref = self._strangers.get(key, (None, None))
        if known is not None and known.groups == groups:
            return known
        # Numbers of objects are used again: what is known of one goes with it.
        others = self._others
        strangers = self._strangers

        def gone(_: object) -> None:
            others.pop(key, None)
            strangers.pop(key, None)

        alive = weakref.ref(optimizer, gone)
        ours = is_ours(optimizer, self._state)
        found = None if ours else self._updates_ours(optimizer)
        ours = ours or (found is not None and is_held(optimizer, self._state))
        if found is None or ours:
            others[key] = groups, ours, alive
            return None
        others.pop(key, None)
        strangers[key] = found, alive
        return found

    def _updates_ours(self, optimizer: Optimizer) -> _Stranger | None:
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        theirs = [(parameter, memory) for parameter in listed if (memory := _memory(parameter))]
        seen = [(name, memory) for name, one in self._state.seen() if (memory := _memory(one))]
        ours = AddressRanges(m for _, m in seen)
        spans = AddressRanges(m for _, m in theirs)
        parameters = [parameter for parameter, memory in theirs if ours.meet(memory)]
        if not parameters:
            return None
        names = list(dict.fromkeys(name for name, memory in seen if spans.meet(memory)))
        what = f"an optimizer that is in no part of the state ({kind_of(optimizer)})"
        why = f"{what} updates {len(names)} tensor(s) of it ({first_few(names)})"
        return _Stranger(len(optimizer.param_groups), parameters, why)


@_disable_dynamo
def _uncompiled(look: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    """Look when the step runs, not when it is compiled: this is no part of the graph."""
    look(optimizer)


def is_ours(optimizer: Optimizer, state: State) -> bool:
    """Return whether it is an optimizer of the state, or within one of these: what it keeps is
    saved with the outer one's then, or it is said at the start that it is not."""
    for one in state.optimizers.values():
        inside = (value for value in vars(one).values() if isinstance(value, Optimizer))
        if optimizer is one or any(unwrap_optimizer(inner) is optimizer for inner in inside):
            return True
    return False


def is_held(wanted: object, state: State) -> bool:
    """Return whether ``wanted`` is within an object of the state that may save it: one with a
    ``state_dict()`` of its own, which has it as an attribute or an item, however deeply. (Of huge
    structures the nearest objects are looked at.) torch's schedulers do not save the optimizer that
    they hold."""
    own = state.optimizers.values()
    holders = [o for o in own if type(o).state_dict is not Optimizer.state_dict]
    todo = deque[object]([*state.stateful_objects, *holders])
    seen = {id(one) for one in todo}
    while todo and len(seen) < _OBJECTS_MAX:
        one = todo.popleft()
        if isinstance(one, LRScheduler):
            parts: Iterable[object] = [v for k, v in vars(one).items() if k != "optimizer"]
        elif isinstance(one, types.FunctionType):  # not its globals
            parts = [*(one.__closure__ or ()), *(one.__defaults__ or ())]
        else:
            parts = gc.get_referents(one)[:_ITEMS_MAX]
        for part in parts:
            if part is wanted:
                return True
            if id(part) not in seen and not isinstance(part, _HOLDS_NONE):
                seen.add(id(part))
                todo.append(part)
    return False


def kind_of(value: object) -> str:
    """Return the name of its class, with that of the module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _memory(tensor: torch.Tensor) -> Memory | None:
    local = local_tensor(tensor)
    return None if why_not_storable(local) else memory_of(local)


def _any_gradient(parameters: Iterable[torch.Tensor]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)
