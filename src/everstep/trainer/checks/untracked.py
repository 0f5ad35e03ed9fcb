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
import logging
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from everstep.state.providers.optimizers import unwrapped
from everstep.state.providers.stateful import StatefulProvider
from everstep.state.survey.ownership import Memory, Spans, memory_of
from everstep.state.training_state import State, some_of
from everstep.state.values.referrers import holders_of
from everstep.state.values.tensors import local_of, why_not_storable

__all__ = [
    "UntrackedOptimizers",
    "UntrackedSchedulers",
    "belongs_to_state",
    "is_held",
    "kind_of",
]

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


class UntrackedOptimizers:
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
        known = self._state.strangers
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
        ours = belongs_to_state(optimizer, self._state)
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
        ours = Spans(m for _, m in seen)
        spans = Spans(m for _, m in theirs)
        parameters = [parameter for parameter, memory in theirs if ours.meet(memory)]
        if not parameters:
            return None
        names = list(dict.fromkeys(name for name, memory in seen if spans.meet(memory)))
        what = f"an optimizer that is in no part of the state ({kind_of(optimizer)})"
        why = f"{what} updates {len(names)} tensor(s) of it ({some_of(names)})"
        return _Stranger(len(optimizer.param_groups), parameters, why)


@_disable_dynamo
def _uncompiled(look: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    """Look when the step runs, not when it is compiled: this is no part of the graph."""
    look(optimizer)


def belongs_to_state(optimizer: Optimizer, state: State) -> bool:
    """Return whether it is an optimizer of the state, or within one of these: what it keeps is
    saved with the outer one's then, or it is said at the start that it is not."""
    for one in state.optimizers.values():
        inside = (value for value in vars(one).values() if isinstance(value, Optimizer))
        if optimizer is one or any(unwrapped(inner) is optimizer for inner in inside):
            return True
    return False


def is_held(wanted: object, state: State) -> bool:
    """Return whether ``wanted`` is within an object of the state that may save it: one with a
    ``state_dict()`` of its own, which has it as an attribute or an item, however deeply. (Of huge
    structures the nearest objects are looked at.) torch's schedulers do not save the optimizer that
    they hold."""
    own = state.optimizers.values()
    holders = [o for o in own if type(o).state_dict is not Optimizer.state_dict]
    todo = deque[object]([*state.stateful, *holders])
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
    local = local_of(tensor)
    return None if why_not_storable(local) else memory_of(local)


def _any_gradient(parameters: Iterable[torch.Tensor]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


_log = logging.getLogger("everstep")


class UntrackedSchedulers:
    """The schedulers of the process, as far as they concern a state.

    torch keeps no list of the schedulers of an optimizer, so what refers to the optimizer is
    searched for them at the start. Almost all schedulers also mark the ``step`` of their optimizer
    when they are made (ReduceLROnPlateau does not). Where there is such a mark, the search is
    repeated at step marks 1, 2, 4, 8 and so on after the start, for those that are made later. A
    scheduler that exists may be one that nobody uses any more: it is reported once it has counted
    a step.

    Args:
        lost: called, with the reason, as a new base is due that carries it: what a log leads to
            rests on an older one that is exact; None: there is no log.
        tell: called, once for each, with what the user should know.
    """

    def __init__(
        self,
        state: State,
        lost: Callable[[str], None] | None,
        tell: Callable[[StateError], None],
    ) -> None:
        self._state = state
        self._lost = lost
        self._tell = tell
        self._idle: dict[int, tuple[weakref.ref[LRScheduler], object]] = {}  # with what it counted
        self._parts_then: dict[str, object] = {}
        self._marks = 0  # since the start
        for key, scheduler in self._parts():
            driven = unwrapped(scheduler.optimizer)
            if (
                state.optimizers
                and not belongs_to_state(driven, state)
                and not is_held(driven, state)
            ):
                why = f"{key!r} drives an optimizer that is in no part of the state"
                state.strangers.append(f"{why} ({kind_of(driven)})")
                _log.warning(
                    "everstep: %s: its steps do not drive the optimizer of the state, and nothing "
                    "is called exact\n  hint: give the scheduler that drives the optimizer of the "
                    "state, or the optimizer that it drives; a framework's train() may make "
                    "new ones: make the Checkpointer after that",
                    state.strangers[-1],
                )

    def started(self) -> None:
        """The state is that of a start: what counts from now on is looked for."""
        self._idle = {id(one): (weakref.ref(one), _count(one)) for one in self._beside()}
        self._parts_then = {key: _count(one) for key, one in self._parts()}
        self._marks = 0

    def marked(self) -> None:
        """A step is over."""
        self._marks += 1
        if self._marks.bit_count() == 1 and self._are_marked:
            for one in self._beside():
                self._idle.setdefault(id(one), (weakref.ref(one), _count_when_made(one)))
        if self._idle:
            self._look()

    def _look(self) -> None:
        for key, (ref, before) in list(self._idle.items()):
            scheduler = ref()
            if scheduler is not None and _count(scheduler) == before:
                continue
            del self._idle[key]
            if scheduler is not None and not self._may_be_saved(scheduler):
                self._found(scheduler)

    def _may_be_saved(self, scheduler: LRScheduler) -> bool:
        """Return whether an object of the state has it, and may save it. Not one that has a whole
        framework, where that has put the scheduler in the place of one that is a part of the state
        itself and counts no more, and saves nothing like it."""
        if not is_held(scheduler, self._state):
            return False
        driven = unwrapped(scheduler.optimizer)
        replaced = any(
            unwrapped(one.optimizer) is driven and self._parts_then.get(key) == _count(one)
            for key, one in self._parts()
        )
        if not replaced:
            return True
        counted = [{"last_epoch": one.last_epoch} for one in _counting(scheduler)]
        others = (one for one in self._state.stateful if not isinstance(one, LRScheduler))
        saved = [one.state_dict() for one in others]  # type: ignore[attr-defined]
        return all(_has(saved, wanted) for wanted in counted)

    def _found(self, scheduler: LRScheduler) -> None:
        driven = unwrapped(scheduler.optimizer)
        key = next(key for key, one in self._state.optimizers.items() if one is driven)
        why = f"a scheduler that is in no part of the state ({kind_of(scheduler)}) drives {key!r}"
        if why in self._state.strangers:
            return
        self._state.strangers.append(why)
        self._tell(
            StateError(
                f"{why}: what it counts is not saved, resume() loses it, and nothing that is saved "
                "from now on is called exact",
                hint='add it to the state, {"scheduler": scheduler}; a framework\'s train() may '
                "make one of its own: make the Checkpointer after that, of what is used then",
            )
        )
        if self._lost is not None:
            self._lost(why)

    def _parts(self) -> Iterator[tuple[str, LRScheduler]]:
        """Yield the schedulers of the state, as they are or as a framework wraps them."""
        for key, value in self._state.values.items():
            if isinstance(self._state.providers.get(key), StatefulProvider):
                inner = value if isinstance(value, LRScheduler) else _inner(value)
                if isinstance(inner, LRScheduler):
                    yield key, inner

    @property
    def _are_marked(self) -> bool:
        """Return whether a scheduler has been made for an optimizer of the state."""
        own = self._state.optimizers.values()
        return any(hasattr(one.step, "_wrapped_by_lr_sched") for one in own)

    def _beside(self) -> list[LRScheduler]:
        """Return the schedulers of the state's optimizers that are no part of the state."""
        own = self._state.optimizers.values()
        if not own:
            return []
        parts = {id(scheduler) for _, scheduler in self._parts()}
        holders = holders_of(own, Optimizer, LRScheduler, depth=2)
        # Frameworks put an optimizer into another, which a scheduler may hold instead of it.
        around = [one for one in holders if Optimizer in type(one).__mro__]
        if wrappers := [one for one in around if any(unwrapped(one) is o for o in own)]:
            holders += holders_of(wrappers, LRScheduler, depth=2)
        found = []
        for one in {id(one): one for one in holders if LRScheduler in type(one).__mro__}.values():
            driven = vars(one).get("optimizer")
            if id(one) not in parts and isinstance(driven, Optimizer):
                found += [one] if any(unwrapped(driven) is o for o in own) else []
        return found


def _inner(value: object) -> object:
    return vars(value).get("scheduler") if hasattr(value, "__dict__") else None


def _has(tree: object, wanted: Mapping[str, object]) -> bool:
    if isinstance(tree, Mapping):
        found = all(key in tree and tree[key] == value for key, value in wanted.items())
        return found or any(_has(value, wanted) for value in tree.values())
    return isinstance(tree, (list, tuple)) and any(_has(value, wanted) for value in tree)


def _inside(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return the schedulers that it calls (ChainedScheduler, SequentialLR)."""
    found: list[LRScheduler] = []
    for value in vars(scheduler).values():
        several = value if isinstance(value, (list, tuple)) else (value,)
        found += (one for one in several if isinstance(one, LRScheduler))
    return found


def _counting(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return what counts steps: itself, or those that it calls (ChainedScheduler counts none)."""
    if hasattr(scheduler, "last_epoch"):
        return [scheduler]
    return [one for inner in _inside(scheduler) for one in _counting(inner)]


def _count(scheduler: LRScheduler) -> tuple[int, ...]:
    """Return how often it was called."""
    return tuple(
        # A step() of its own (CosineAnnealingWarmRestarts) may leave _step_count as it is.
        getattr(one, "_step_count", 0) if _is_plain(one) else one.last_epoch
        for one in _counting(scheduler)
    )


def _count_when_made(scheduler: LRScheduler) -> tuple[int, ...]:
    """Return what it had counted when it was made, whatever ``last_epoch`` it was given."""
    return tuple(int(_is_plain(one)) for one in _counting(scheduler))


def _is_plain(scheduler: LRScheduler) -> bool:
    return type(scheduler).step is LRScheduler.step
