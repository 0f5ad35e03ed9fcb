"""Events of a training step, as seen by hooks, with times.

Events are: a module with parameters of its own begins (with gradients enabled: an evaluation is not
part of a step), the gradient of a parameter is ready, an optimizer is about to update. Two steps
with the same sequence of events can follow the same plan.

The hooks change nothing. Backward hooks of modules would wrap their outputs, which could then no
longer be written in place, so the progress of backward is observed at the parameters. A dispatch
mode would cost tens of microseconds per operator. A limited number of modules and parameters is
watched, spread evenly, because each event costs some microseconds.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.state.layout.lru import LRUCache

_WATCHED_MAX = 64  # modules, and parameters

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Observed:
    """Events of one step.

    Attributes:
        keys: events in order; the first is the step mark.
        seconds: time from each event to the next, and from the last one to the next mark, without
            the time that updates waited for copies.
        waits_s: that waiting time, by event.
        updates: event of each optimizer's first update, by key.
    """

    keys: tuple[int, ...]
    seconds: tuple[float, ...]
    waits_s: Mapping[int, float]
    updates: Mapping[str, int]

    @property
    def wait_s(self) -> float:
        """Waiting time of all updates."""
        return sum(self.waits_s.values())


@dataclass(slots=True)
class _Step:
    """Step in progress.

    Attributes:
        expected: sequence of events that a plan was made for; empty without one.
        requested: events of it at which the plan issues copies.
        follows: True as long as the step follows that sequence.
        keys: events so far.
        times_s: their times.
        waits_s: time that updates waited for copies, by event.
        updates: event of each optimizer's first update, by key.
    """

    expected: Sequence[int]
    requested: Collection[int]
    follows: bool
    keys: list[int]
    times_s: list[float]
    waits_s: dict[int, float] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)


class StepEvents:
    """Observer of the steps of a training.

    Args:
        reached: called at each requested event, while the step follows the expected sequence.
        strayed: called once per step, at the first unexpected event.
        now_s: monotonic clock.
    """

    def __init__(
        self,
        reached: Callable[[int], None],
        strayed: Callable[[], None],
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._reached = reached
        self._strayed = strayed
        self._now_s = now_s
        self._handles: list[Any] = []
        self._numbers: dict[Hashable, int] = {}
        self._patterns = LRUCache[Hashable, int]()  # numbers of updates
        self._next = itertools.count()
        self._roots: tuple[nn.Module, ...] = ()
        self._optimizers: Mapping[str, Optimizer] = {}
        self._step: _Step | None = None  # None while no step is watched

    def watch(self, roots: Iterable[nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
        """Watch these modules and optimizers from now on, and no others."""
        self.close()
        self._roots = tuple(roots)
        self._optimizers = optimizers
        modules = {
            id(module): module
            for root in self._roots
            for module in root.modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        for module in _spread(list(modules.values())):
            number = self._number(("module", id(module)))
            hook = _ModuleHook(self, number, module)
            self._handles.append(module.register_forward_pre_hook(hook))
        parameters = {
            id(parameter): parameter
            for optimizer in optimizers.values()
            for parameter in _parameters(optimizer)
            # torch accepts the hook below on leaf tensors only.
            if parameter.requires_grad and parameter.is_leaf
        }
        for parameter in _spread(list(parameters.values())):
            number = self._number(("gradient", id(parameter)))
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(_GradientHook(self, number)))

    def begin(self, expected: Sequence[int] = (), requested: Collection[int] = ()) -> None:
        """Begin a step at its mark, event 0.

        Args:
            expected: sequence of events that a plan was made for, if there is one.
            requested: events of it at which ``reached`` is called.
        """
        mark = self._number("mark")
        self._step = _Step(expected, requested, bool(expected), [mark], [self._now_s()])

    def end(self) -> Observed | None:
        """End the step at the next mark; None if no step has begun, or it has no events."""
        step = self._step
        self._step = None
        if step is None or len(step.keys) < 2:
            return None
        times_s = [*step.times_s, self._now_s()]
        seconds = [after - before for before, after in itertools.pairwise(times_s)]
        for event, wait_s in step.waits_s.items():
            seconds[event] = max(0.0, seconds[event] - wait_s)
        return Observed(tuple(step.keys), tuple(seconds), step.waits_s, step.updates)

    def update(self, key: str) -> int | None:
        """Record that an optimizer is about to update; return the number of the event, if steps are
        watched.

        The set of parameters without gradients, and the training mode, are part of the event's
        identity.
        """
        step = self._step
        if step is None:
            return None
        parameters = _parameters(self._optimizers[key])
        lacking = tuple(n for n, parameter in enumerate(parameters) if parameter.grad is None)
        modes = tuple(root.training for root in self._roots)
        pattern = key, lacking, modes
        number = self._patterns.get(pattern)
        if number is None:  # a new number, never a reused one: plans may still refer to that
            number = next(self._next)
            self._patterns.add(pattern, number, 1 + len(lacking))
        event = self._note(step, number)
        step.updates.setdefault(key, event)
        return event

    def waited(self, event: int | None, wait_s: float) -> None:
        """Record that an update waited for copies, and call ``reached`` for it."""
        step = self._step
        if event is None or step is None:
            return
        step.waits_s[event] = step.waits_s.get(event, 0.0) + wait_s
        self._reach(step, event)

    def notify(self, number: int) -> None:
        """Record an event; called by hooks."""
        step = self._step
        if step is not None:
            self._reach(step, self._note(step, number))

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._numbers.clear()
        self._patterns = LRUCache()
        self._step = None

    def _note(self, step: _Step, number: int) -> int:
        """Add an event, and return its index."""
        event = len(step.keys)
        step.keys.append(number)
        step.times_s.append(self._now_s())
        if step.follows and (event >= len(step.expected) or step.expected[event] != number):
            step.follows = False
            self._strayed()
        return event

    def _reach(self, step: _Step, event: int) -> None:
        if step.follows and event in step.requested:
            self._reached(event)

    def _number(self, source: Hashable) -> int:
        number = self._numbers.get(source)
        if number is None:
            number = self._numbers[source] = next(self._next)
        return number


class _ModuleHook:
    """Hook of one module.

    Copies of the module share its hooks, and must not report events: copied and pickled modules get
    a hook that does nothing.
    """

    def __init__(self, events: StepEvents, number: int, module: nn.Module) -> None:
        # Weak: a module outlives its Checkpointer, and must not keep a dropped one alive.
        self._events = weakref.ref(events)
        self._number = number
        self._module = weakref.ref(module)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():  # a constant in compiled code: the hook vanishes there
            return
        events = self._events()
        if events is not None and module is self._module() and torch.is_grad_enabled():
            events.notify(self._number)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_hook, ()


class _GradientHook:
    def __init__(self, events: StepEvents, number: int) -> None:
        self._events = weakref.ref(events)
        self._number = number

    def __call__(self, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        events = self._events()
        if events is not None:
            events.notify(self._number)


def _nothing(*_: Any) -> None:
    """Do nothing; hook of copied modules."""


def _nothing_hook() -> Callable[..., None]:
    return _nothing


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _spread(found: list[_T]) -> list[_T]:
    """Return at most ``_WATCHED_MAX`` of them, spread evenly."""
    count = min(len(found), _WATCHED_MAX)
    return [found[number * len(found) // count] for number in range(count)]
