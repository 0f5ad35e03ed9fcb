"""Checks of the training loop: optimizers and schedulers outside of the state, incomplete steps.

An optimizer that acts on the state but is not part of it was forgotten in the state, or the program
has made a new one in the middle of a run. Its moments and rates are in no base, so nothing saved
after its first update is exact. Its updates wait at the gate and are counted like those of the
state's own optimizers, but no log can repeat them. Likewise the counters of a scheduler outside of
the state are in no base; frameworks often make one of their own.

torch calls the hooks registered here before and after the step of every optimizer of the process.
An optimizer is classified at its first step, and again when it has more parameter groups. One that
updates no tensor of the state is classified again when the state has new entries. For all other
steps the hook is a lookup in a dict.

A gradient compressor or a communication hook of DistributedDataParallel that keeps data between
steps (residuals) may be outside of the state, too.

``ckpt.step()`` may be called before the step is complete: gradients that wait for an update, and
results that a ``GradScaler`` has not processed yet, are not part of the state. A resume at such a
step mark would continue without them.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from everstep.capture import UpdateHooks
from everstep.compress.compressor import Compressor
from everstep.errors import StateError
from everstep.link.recordable import compressors_of, exchanges_of
from everstep.state.coverage import first_few
from everstep.state.ownership import AddressRanges, Memory, memory_of
from everstep.state.providers import ModuleProvider, StatefulProvider, unwrap_optimizer
from everstep.state.providers.gradients import unreduced_gradients
from everstep.state.providers.stateful import has_inspected_gradients
from everstep.state.ranks import find_ddp, reduced_parameter_ids
from everstep.state.training_state import State
from everstep.state.values.tensors import is_dtensor, local_tensor, why_not_storable
from everstep.state.values.tree import find_referrers

_log = logging.getLogger("everstep")

_REPORTED_MAX = 8  # a program may have an optimizer for each parameter
_OBJECTS_MAX = 50_000
_ITEMS_MAX = 4096
_HOLDS_NONE = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None), type, torch.dtype),
    *(types.ModuleType, types.CodeType, types.FrameType, types.BuiltinFunctionType),
    *(torch.Tensor, torch.UntypedStorage, nn.Module),
)


@dataclass(slots=True)
class _Untracked:
    """Optimizer outside of the state that may update tensors of the state.

    Attributes:
        groups: number of its parameter groups when it was classified.
        parameters: its parameters that are in the state.
        why: description for the warning.
        consumes: True if one of these has a gradient that the running update consumes.
    """

    groups: int
    parameters: list[torch.Tensor]
    why: str
    consumes: bool = False


class UntrackedOptimizers:
    """Watch all optimizers of the process for updates of the state.

    Args:
        updates: counts updates, and holds the handles of all hooks.
        gate: called before a tensor of the state is updated (I1).
        lost: called with the reason after an update that no log can repeat; None without a log.
        tell: called with a warning, once for each kind of optimizer.
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
        # By id: number of groups, whether the state saves the optimizer, and a weak reference.
        self._others: dict[int, tuple[int, bool, object]] = {}
        self._untracked: dict[int, tuple[_Untracked, object]] = {}
        # The layout is compared by identity; the reference keeps its id from being reused.
        self._layout: object = None  # layout of the state at the last classification
        self._hooked = self._is_started = False

    def watch(self) -> None:
        """Look at each step of each optimizer from now on, until the handles are removed."""
        self._updates.handles.append(register_optimizer_step_pre_hook(self._before))

    def started(self) -> None:
        """Begin to classify. Earlier updates (a search for a learning rate) do not matter."""
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
            return  # the usual case
        if not self._is_started:
            return
        found = self._classify(optimizer)
        if found is None:
            return
        found.consumes = _any_gradient(found.parameters)
        if self._is_within_ours:
            self._updates.within = True  # no log can repeat the outer update, either
        else:
            # It has no key in any plan of copies, so the gate waits for all of them.
            self._gate(None)
        if not self._hooked:  # the new hook is called after this very step, too
            self._hooked = True
            self._updates.handles.append(register_optimizer_step_post_hook(self._after))

    def _look_after(self, optimizer: Optimizer) -> None:
        found, _ref = self._untracked.get(id(optimizer), (None, None))
        if found is None:
            return
        # A closure computes gradients within the step, and a hook may free them there.
        if not (found.consumes or _any_gradient(found.parameters)):
            return
        known = self._state.coverage.unsaved_trainers
        if found.why not in known and len(known) < _REPORTED_MAX:
            known.append(found.why)
            self._tell(self._notice(found.why))
        if self._is_within_ours:
            return  # the update of the outer optimizer is counted
        self._updates.updated()
        if self._lost is not None:
            self._lost(found.why)

    @property
    def _is_within_ours(self) -> bool:
        updates = self._updates
        return updates.outermost is not None and updates.thread == threading.get_ident()

    def _notice(self, why: str) -> StateError:
        log = " No log can repeat its updates: a base is taken at the end of each such step."
        return StateError(
            f"{why}: its own state (moments, rates) is not saved, resume() loses it, and nothing "
            f"that is saved from now on is called exact.{'' if self._lost is None else log}",
            hint='add it to the state, {"optimizer": optimizer}; to continue with a new optimizer, '
            "close this Checkpointer first and make one for a state with the new optimizer",
        )

    def _classify(self, optimizer: Optimizer) -> _Untracked | None:
        if self._layout is not self._state.layout:  # a module was replaced, or has new parameters
            self._layout = self._state.layout
            for number in [number for number, one in self._others.items() if not one[1]]:
                del self._others[number]
        key = id(optimizer)
        groups = len(optimizer.param_groups)
        if key in self._others and self._others[key][0] == groups:
            return None
        known, _ref = self._untracked.get(key, (None, None))
        if known is not None and known.groups == groups:
            return known
        # Ids of objects are used again, so entries must go with their optimizer.
        others = self._others
        untracked = self._untracked

        def forget(_: object) -> None:
            others.pop(key, None)
            untracked.pop(key, None)

        alive = weakref.ref(optimizer, forget)
        ours = belongs_to_state(optimizer, self._state)
        found = None if ours else self._updates_ours(optimizer)
        ours = ours or (found is not None and is_held(optimizer, self._state))
        if found is None or ours:
            others[key] = groups, ours, alive
            return None
        others.pop(key, None)
        untracked[key] = found, alive
        return found

    def _updates_ours(self, optimizer: Optimizer) -> _Untracked | None:
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        theirs = [(parameter, memory) for parameter in listed if (memory := _memory(parameter))]
        seen = [(name, memory) for name, one in self._state.seen() if (memory := _memory(one))]
        ours = AddressRanges(m for _, m in seen)
        spans = AddressRanges(m for _, m in theirs)
        parameters = [parameter for parameter, memory in theirs if ours.meet(memory)]
        if not parameters:
            return None
        names = list(dict.fromkeys(name for name, memory in seen if spans.meet(memory)))
        which = f"an optimizer that is not part of the state ({kind_of(optimizer)})"
        why = f"{which} updates {len(names)} tensor(s) of it ({first_few(names)})"
        return _Untracked(len(optimizer.param_groups), parameters, why)


@_disable_dynamo
def _uncompiled(look: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    """Examine the optimizer when the step runs, outside of the compiled graph."""
    look(optimizer)


def belongs_to_state(optimizer: Optimizer, state: State) -> bool:
    """Return True if the optimizer is in the state, or wrapped by one that is.

    The wrapping optimizer saves its state, or a warning at the start has said that it does not.
    """
    for one in state.optimizers.values():
        inside = (value for value in vars(one).values() if isinstance(value, Optimizer))
        if optimizer is one or any(unwrap_optimizer(inner) is optimizer for inner in inside):
            return True
    return False


def is_held(wanted: object, state: State) -> bool:
    """Return True if an object of the state holds ``wanted`` and may save it.

    That is an object with its own ``state_dict()`` that has ``wanted`` as an attribute or item, at
    any depth. The search ends after a number of objects. torch's schedulers hold an optimizer but
    do not save it.
    """
    own = state.optimizers.values()
    holders = [o for o in own if type(o).state_dict is not Optimizer.state_dict]
    todo = deque[object]([*state.stateful_objects, *holders])
    seen = {id(one) for one in todo}
    while todo and len(seen) < _OBJECTS_MAX:
        one = todo.popleft()
        if isinstance(one, LRScheduler):
            held: Iterable[object] = [v for k, v in vars(one).items() if k != "optimizer"]
        elif isinstance(one, types.FunctionType):  # not its globals
            held = [*(one.__closure__ or ()), *(one.__defaults__ or ())]
        else:
            # By the garbage collector: attribute access could run code of the program.
            held = gc.get_referents(one)[:_ITEMS_MAX]
        for inner in held:
            if inner is wanted:
                return True
            if id(inner) not in seen and not isinstance(inner, _HOLDS_NONE):
                seen.add(id(inner))
                todo.append(inner)
    return False


def kind_of(value: object) -> str:
    """Return the qualified name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _memory(tensor: torch.Tensor) -> Memory | None:
    local = local_tensor(tensor)
    return None if why_not_storable(local) else memory_of(local)


def _any_gradient(parameters: Iterable[torch.Tensor]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


class UntrackedSchedulers:
    """Detect schedulers that drive an optimizer of the state but are not part of it.

    torch has no list of an optimizer's schedulers, so at the start all objects that refer to the
    optimizer are searched. Almost all schedulers also mark the ``step`` method of their optimizer
    (ReduceLROnPlateau does not). If there is a mark, the search is repeated at the step marks 1, 2,
    4, 8 and so on, to find schedulers made later. A scheduler may no longer be in use, so it is
    reported only once it has counted a step.

    Args:
        lost: called with the reason when a new base is due, because the log continues from a base
            that does not know about the scheduler; None without a log.
        tell: called with a warning, once for each scheduler.
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
        self._own_counts: dict[str, object] = {}
        self._marks = 0  # since the start
        for key, scheduler in self._own_schedulers():
            driven = unwrap_optimizer(scheduler.optimizer)
            if (
                state.optimizers
                and not belongs_to_state(driven, state)
                and not is_held(driven, state)
            ):
                why = f"{key!r} drives an optimizer that is not part of the state"
                state.coverage.unsaved_trainers.append(f"{why} ({kind_of(driven)})")
                _log.warning(
                    "everstep: %s: its steps do not drive the optimizer of the state, and nothing "
                    "is called exact\n  hint: pass the scheduler that drives the optimizer of the "
                    "state, or the optimizer that it drives; a framework's train() may make "
                    "new ones: make the Checkpointer after that",
                    state.coverage.unsaved_trainers[-1],
                )

    def started(self) -> None:
        """Find schedulers at a start; those that count from now on are reported."""
        self._idle = {id(one): (weakref.ref(one), _count(one)) for one in self._find_untracked()}
        self._own_counts = {key: _count(one) for key, one in self._own_schedulers()}
        self._marks = 0

    def marked(self) -> None:
        """Examine the schedulers at a step mark."""
        self._marks += 1
        if self._marks.bit_count() == 1 and self._has_marks:
            found = self._find_untracked()
            # A new one may have the id of one that was freed.
            self._idle = {key: idle for key, idle in self._idle.items() if idle[0]() is not None}
            for one in found:
                self._idle.setdefault(id(one), (weakref.ref(one), _count_when_made(one)))
        if self._idle:
            self._examine()

    def _examine(self) -> None:
        for key, (ref, before) in list(self._idle.items()):
            scheduler = ref()
            if scheduler is not None and _count(scheduler) == before:
                continue
            del self._idle[key]
            if scheduler is not None and not self._may_be_saved(scheduler):
                self._report(scheduler)

    def _may_be_saved(self, scheduler: LRScheduler) -> bool:
        """Return True if an object of the state holds the scheduler and may save it.

        A framework object may hold a scheduler that has replaced one of the state. If the replaced
        one no longer counts, and no object saves matching counters, the new one is not saved.
        """
        if not is_held(scheduler, self._state):
            return False
        driven = unwrap_optimizer(scheduler.optimizer)
        replaced = any(
            unwrap_optimizer(one.optimizer) is driven and self._own_counts.get(key) == _count(one)
            for key, one in self._own_schedulers()
        )
        if not replaced:
            return True
        counted = [{"last_epoch": one.last_epoch} for one in _counting(scheduler)]
        others = (one for one in self._state.stateful_objects if not isinstance(one, LRScheduler))
        saved = [one.state_dict() for one in others]  # type: ignore[attr-defined]
        return all(_has(saved, wanted) for wanted in counted)

    def _report(self, scheduler: LRScheduler) -> None:
        driven = unwrap_optimizer(scheduler.optimizer)
        key = next(key for key, one in self._state.optimizers.items() if one is driven)
        why = f"a scheduler that is not part of the state ({kind_of(scheduler)}) drives {key!r}"
        if why in self._state.coverage.unsaved_trainers:
            return
        self._state.coverage.unsaved_trainers.append(why)
        self._tell(
            StateError(
                f"{why}: its counters are not saved, resume() loses them, and nothing saved "
                "from now on is called exact",
                hint='add it to the state, {"scheduler": scheduler}; a framework\'s train() may '
                "make one of its own: make the Checkpointer after that, with that scheduler",
            )
        )
        if self._lost is not None:
            self._lost(why)

    def _own_schedulers(self) -> Iterator[tuple[str, LRScheduler]]:
        """Yield the schedulers of the state, unwrap_optimizer from framework objects."""
        for key, value in self._state.values.items():
            if isinstance(self._state.providers.get(key), StatefulProvider):
                inner = value if isinstance(value, LRScheduler) else _inner(value)
                if isinstance(inner, LRScheduler):
                    yield key, inner

    @property
    def _has_marks(self) -> bool:
        """True if a scheduler was made for an optimizer of the state."""
        own = self._state.optimizers.values()
        return any(hasattr(one.step, "_wrapped_by_lr_sched") for one in own)

    def _find_untracked(self) -> list[LRScheduler]:
        """Return the schedulers of the state's optimizers that are not part of the state."""
        own = self._state.optimizers.values()
        if not own:
            return []
        tracked = {id(scheduler) for _, scheduler in self._own_schedulers()}
        holders = find_referrers(own, Optimizer, LRScheduler, depth=2)
        # Frameworks wrap an optimizer in another one, which a scheduler may hold instead.
        around = [one for one in holders if Optimizer in type(one).__mro__]
        if wrappers := [one for one in around if any(unwrap_optimizer(one) is o for o in own)]:
            holders += find_referrers(wrappers, LRScheduler, depth=2)
        found = []
        for one in {id(one): one for one in holders if LRScheduler in type(one).__mro__}.values():
            driven = vars(one).get("optimizer")
            if id(one) not in tracked and isinstance(driven, Optimizer):
                found += [one] if any(unwrap_optimizer(driven) is o for o in own) else []
        return found


def _inner(value: object) -> object:
    return vars(value).get("scheduler") if hasattr(value, "__dict__") else None


def _has(tree: object, wanted: Mapping[str, object]) -> bool:
    if isinstance(tree, Mapping):
        found = all(key in tree and tree[key] == value for key, value in wanted.items())
        return found or any(_has(value, wanted) for value in tree.values())
    return isinstance(tree, (list, tuple)) and any(_has(value, wanted) for value in tree)


def _inside(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return the schedulers that a scheduler calls (ChainedScheduler, SequentialLR)."""
    found: list[LRScheduler] = []
    for value in vars(scheduler).values():
        several = value if isinstance(value, (list, tuple)) else (value,)
        found += (one for one in several if isinstance(one, LRScheduler))
    return found


def _counting(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return the schedulers that count steps: itself, or those that it calls.

    ChainedScheduler has no counter of its own.
    """
    if hasattr(scheduler, "last_epoch"):
        return [scheduler]
    return [one for inner in _inside(scheduler) for one in _counting(inner)]


def _count(scheduler: LRScheduler) -> tuple[int, ...]:
    """Return how often the scheduler was called."""
    return tuple(
        # An overridden step() (CosineAnnealingWarmRestarts) may not change _step_count.
        getattr(one, "_step_count", 0) if _is_plain(one) else one.last_epoch
        for one in _counting(scheduler)
    )


def _count_when_made(scheduler: LRScheduler) -> tuple[int, ...]:
    """Return the counters of a newly made scheduler, for any ``last_epoch`` argument."""
    return tuple(int(_is_plain(one)) for one in _counting(scheduler))


def _is_plain(scheduler: LRScheduler) -> bool:
    return type(scheduler).step is LRScheduler.step


# --- Residuals ----------------------------------------------------------------------------

_OURS = "add it to the state, under a name of its own"
_THEIRS = (
    "add an object to the state that holds it as an attribute, and whose state_dict() and "
    "load_state_dict() return and restore its data (docs/EXACTNESS.md has one for PowerSGD); or "
    "use everstep's DDPCompression, which can be added to the state itself"
)
_OF_TORCH = ("torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks",)
_GROUPS = (dist.ProcessGroup,) if dist.is_available() else ()
_FIXED = (
    *(type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device),
    *(weakref.ref, types.ModuleType, types.FunctionType, *_GROUPS),
)


def residual_bytes(state: State) -> int:
    """Return the size of the residuals held in the state, in bytes; each step mark of the log
    holds them."""
    of_compressors = sum(one.residual_bytes for one in compressors_of(state).values())
    return of_compressors + sum(one.residual_bytes for one in exchanges_of(state))


def warn_of_unsaved_residuals(state: State) -> None:
    """Warn once of each gradient compressor or communication hook that keeps data between steps
    and is not in the state; note it in ``state.coverage.unsaved_inputs`` (then inexact)."""
    saved = _saved(state)
    found = list[str]()
    for section, kind, kept in _keeping(state):
        if id(kept) in saved:
            continue
        if kind:
            finding = f"a {kind} compresses gradients of {section!r}"
            lost = "its residual"
            hint = _OURS
        else:
            kind = type(kept).__name__
            finding = f"a communication hook of {section!r} uses a {kind}"
            lost = "its data (residuals, counters)"
            hint = _THEIRS
        found.append(f"{finding}, which is not in the state")
        if found[-1] not in state.coverage.unsaved_inputs:
            _log.warning(
                "everstep: %s: %s is not saved, and resume() loses it\n  hint: %s",
                found[-1],
                lost,
                hint,
            )
    state.coverage.unsaved_inputs = tuple(found)


def _saved(state: State) -> set[int]:
    """Return the ids of the objects in a state, and of the attributes of the program's own
    objects."""
    found = set(map(id, state.values.values()))
    for value in state.values.values():
        if not isinstance(value, nn.Module | torch.optim.Optimizer):
            found.update(map(id, getattr(value, "__dict__", {}).values()))
    return found


def _keeping(state: State) -> Iterator[tuple[str, str, object]]:
    """Yield section, kind and object of everything that keeps data gradients depend on between
    steps.

    The kind is empty for objects that are not everstep's own."""
    for section, optimizer in state.optimizers.items():
        for hook in optimizer._optimizer_step_pre_hooks.values():
            one = getattr(hook, "__self__", None)
            if isinstance(one, Compressor) and one.residual_bytes:
                yield section, "Compressor", one
    loaded = sys.modules.get("everstep.compress.ddp")  # not loaded: not used
    for section, provider in state.providers.items():
        if not isinstance(provider, ModuleProvider):
            continue
        for module in provider.outer.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                for hook, kept in getattr(module, "_comm_hooks", ()):
                    if loaded is not None and isinstance(kept, loaded.DDPCompression):
                        if kept.residual_bytes:
                            yield section, "DDPCompression", kept
                    else:
                        owners = (kept, getattr(hook, "__self__", None))
                        yield from ((section, "", one) for one in owners if not _is_fixed(one))


def _is_fixed(kept: object) -> bool:
    """Return True if a hook cannot keep data in ``kept`` that a restart would lose."""
    if isinstance(kept, tuple):
        return all(map(_is_fixed, kept))
    if is_dataclass(kept) and not isinstance(kept, type):
        frozen = type(kept).__dataclass_params__.frozen  # type: ignore[attr-defined]
        return bool(frozen) or type(kept).__module__ in _OF_TORCH
    return isinstance(kept, _FIXED) or type(kept).__name__ == "DeviceMesh"


# --- Complete steps -----------------------------------------------------------------------


class PendingGradients:
    """Detect gradients that wait for an update at a step mark.

    Gradients are examined only at step marks without an update, and once more at the next such mark
    or before the next update. A gradient that was written to at most once in between has waited: it
    was not zeroed and computed again (as after a step that a GradScaler has skipped), though a
    backward may have added to it. DDP writes once more, when it copies the reduced gradients back.
    Gradients that FSDP2 has not reduced yet always wait, as ``zero_grad()`` does not reach them.

    Args:
        updates: hooks of the state; holds the handles of the hooks made here.
        tell: called once with the warning.
    """

    def __init__(
        self, state: State, updates: UpdateHooks, tell: Callable[[StateError], None]
    ) -> None:
        self._optimizers = state.optimizers
        self._updates = updates
        self._tell = tell
        modules = (one for one in state.providers.values() if isinstance(one, ModuleProvider))
        self._modules = [one.outer for one in modules]
        self._waiting: dict[str, _Gradient] = {}
        self._hooked: set[str] = set()
        self._reported = False

    def marked(self, step: int) -> None:
        """Examine gradients at the mark of a ``step`` without an update."""
        if self._reported:
            return
        pairs = (pair for module in self._modules for pair in unreduced_gradients(module))
        unreduced = {id(parameter): gradient for parameter, gradient in pairs}
        for key, optimizer in self._optimizers.items():
            self._examine(key, writes_min=1)  # without a write there was no backward, and no step
            beside = (unreduced.get(id(parameter)) for parameter in _parameters(optimizer))
            if not self._reported and any(one is not None and not _is_zero(one) for one in beside):
                self._report(key, step)
            if self._reported:
                return
            if (found := _Gradient.of(optimizer, step, self._writes_max)) is not None:
                self._waiting[key] = found
                if key not in self._hooked:
                    self._watch(key, optimizer)

    def _writes_max(self, parameter: torch.Tensor) -> int:
        """Return how often a backward writes to the parameter's gradient."""
        ddps = (ddp for module in self._modules if (ddp := find_ddp(module)) is not None)
        return 2 if any(id(parameter) in reduced_parameter_ids(ddp) for ddp in ddps) else 1

    def _watch(self, key: str, optimizer: Optimizer) -> None:
        """Examine gradients before each update, permanently: a hook cannot remove itself."""

        def look(*_: object) -> None:
            self._examine(key)

        # It only observes, so it may run after the last hook of the log (update_hooks._is_last).
        look.looks_on = True  # type: ignore[attr-defined]
        self._updates.handles.append(optimizer.register_step_pre_hook(look))
        self._hooked.add(key)

    def _examine(self, key: str, writes_min: int = 0) -> None:
        before = self._waiting.pop(key, None)
        if before is not None and not self._reported and before.has_waited(writes_min):
            self._report(key, before.step)

    def _report(self, key: str, step: int) -> None:
        self._reported = True
        self._tell(
            StateError(
                f"ckpt.step() was called while gradients of {key!r} waited for an update: they "
                "are not part of the state, and a resume at that step continues without them",
                step=step,
                hint="call ckpt.step() after optimizer.step(), once for all of its micro-batches",
            )
        )


@dataclass(frozen=True, slots=True)
class _Gradient:
    """Gradient found at a step mark, with its version counters then."""

    parameter: torch.Tensor
    tensor: weakref.ref[torch.Tensor]
    versions: tuple[int, int]
    step: int
    writes_max: int

    @classmethod
    def of(
        cls, optimizer: Optimizer, step: int, writes_max: Callable[[torch.Tensor], int]
    ) -> _Gradient | None:
        """Return the first gradient that is not zero; None without one."""
        for parameter in _parameters(optimizer):
            found = parameter.grad
            if found is not None and not _is_zero(found):
                return cls(
                    parameter=parameter,
                    # Weak: a reference would keep the memory of the gradient after zero_grad().
                    tensor=weakref.ref(found),
                    versions=_versions(found),
                    step=step,
                    writes_max=writes_max(parameter),
                )
        return None

    def has_waited(self, writes_min: int) -> bool:
        """Return True if the gradient was written to a number of times that a backward explains."""
        there = self.parameter.grad
        if there is None or there is not self.tensor():
            return False
        now, local = _versions(there)
        # FSDP2 writes to the local tensor of a DTensor any number of times.
        writes = now - self.versions[0] + (local != self.versions[1])
        return writes_min <= writes <= self.writes_max and not _is_zero(there)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    """Return the version of the gradient, and that of a DTensor's local tensor."""
    return gradient._version, local_tensor(gradient)._version if is_dtensor(gradient) else 0


def _is_zero(gradient: torch.Tensor) -> bool:
    own = local_tensor(gradient.detach())  # local: a collective call would wait for other ranks
    # Waits for the device; called only around steps without an update.
    return own.layout == torch.strided and not bool(own.any())


class PendingScalers:
    """Detect gradient scalers of the state whose ``update()`` was not called before a step mark.

    Args:
        tell: called once with the warning.
    """

    def __init__(self, values: Mapping[str, Any], tell: Callable[[StateError], None]) -> None:
        self._scalers = {k: value for k, value in values.items() if isinstance(value, GradScaler)}
        self._tell = tell

    def marked(self, step: int) -> None:
        """Examine the scalers at a step mark."""
        for key, scaler in self._scalers.items():
            if has_inspected_gradients(scaler):
                self._scalers = {}  # once
                self._tell(
                    StateError(
                        f"ckpt.step() was called before the update() of {key!r}: the result of its "
                        "check for non-finite gradients is not part of the state, and a resume at "
                        "that step continues with the old scale",
                        step=step,
                        hint="call ckpt.step() after the scaler's update()",
                    )
                )
                return


class LoopChecks:
    """Checks of the training loop at its updates and step marks.

    Args:
        state: state that is trained.
        updates: counts updates, and holds the handles of all hooks.
        gate: called before a tensor of the state is updated (I1).
        lost: called with the reason when the log cannot continue; None without a log.
        tell: called with warnings.

    Attributes:
        optimizers: check of optimizers that are not part of the state.
    """

    def __init__(
        self,
        state: State,
        updates: UpdateHooks,
        gate: Callable[[str | None], None],
        lost: Callable[[str], None] | None,
        tell: Callable[[StateError], None],
    ) -> None:
        self._gradients = PendingGradients(state, updates, tell)
        self._scalers = PendingScalers(state.values, tell)
        self.optimizers = UntrackedOptimizers(state, updates, gate, lost, tell)
        self._schedulers = UntrackedSchedulers(state, lost, tell)

    def watch(self) -> None:
        """Look at each step of each optimizer from now on."""
        self.optimizers.watch()

    def started(self) -> None:
        """Begin after a start; earlier updates do not matter."""
        self.optimizers.started()
        self._schedulers.started()

    def step_ended(self, step: int, *, updated: bool) -> None:
        """Check that the step is complete: gradients consumed, scaler updated.

        Args:
            updated: the step has updated the state.
        """
        if not updated:
            self._gradients.marked(step)
        self._scalers.marked(step)
        self._schedulers.marked()
