"""Events of a training step, as seen by hooks, with times.

Events are: a module with parameters of its own begins (with gradients enabled: an evaluation is not
part of a step), the gradient of a parameter is ready, an optimizer is about to update. Two steps
with the same sequence of events can follow the same plan.

The hooks change nothing. Backward hooks of modules would wrap their outputs, which could then no
longer be written in place, so the progress of backward is observed at the parameters. A dispatch
mode would cost tens of microseconds per operator. A limited number of modules and parameters is
watched, spread evenly, because each event costs some microseconds.

Times come from the clock of the device that the parameters are on, where there is one: the host
enqueues the work of a step long before the device does it. Events are recorded on the device's
current stream and read once it has passed them, a step or two later; nothing waits for that.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.capture.cuda import moment_of
from everstep.state.layout.shards import LRUCache

_WATCHED_MAX = 64  # modules, and parameters

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Observed:
    """Events of one step.

    Attributes:
        keys: events in order; the first is the step mark.
        seconds: time from each event to the next, and from the last one to the next mark, without
            the time that updates waited for copies; empty if only waits were measured.
        waits_s: that waiting time, by event.
        updates: event of each optimizer's first update, by key.
        followed: True if these are the events that a plan was made for.
    """

    keys: tuple[int, ...]
    seconds: tuple[float, ...]
    waits_s: Mapping[int, float]
    updates: Mapping[str, int]
    followed: bool = False

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
        clock: returns the moment that has come.
        timed: True to note the moment of each event, and not only of waits.
        moments: of the mark, and of each event if ``timed``.
        waits: event, begin and end of the waits of updates for copies.
        updates: event of each optimizer's first update, by key.
    """

    expected: Sequence[int]
    requested: Collection[int]
    follows: bool
    clock: Callable[[], Any]
    timed: bool
    keys: list[int]
    moments: list[Any]
    waits: list[tuple[int, Any, Any]] = field(default_factory=list)
    updates: dict[str, int] = field(default_factory=dict)

    @property
    def has_times(self) -> bool:
        """False if a CUDA graph was captured in it: no moments can be recorded then."""
        return all(moment is not None for moment in self._all_moments())

    @property
    def passed(self) -> bool:
        """True if the device has passed all moments; they may be on several streams."""
        return all(isinstance(one, float) or one.query() for one in self._all_moments())

    def _all_moments(self) -> Iterator[Any]:
        return itertools.chain(self.moments, *(wait[1:] for wait in self.waits))

    def observed(self) -> Observed:
        """Return the times of the step; the device has passed it."""
        seconds = [max(0.0, _between_s(*pair)) for pair in itertools.pairwise(self.moments)]
        waits_s: dict[int, float] = {}
        for event, begin, end in self.waits:
            waits_s[event] = waits_s.get(event, 0.0) + _between_s(begin, end)
        for event, wait_s in waits_s.items() if self.timed else ():
            seconds[event] = max(0.0, seconds[event] - wait_s)
        found = tuple(seconds) if self.timed else ()
        followed = self.follows and len(self.keys) == len(self.expected)
        return Observed(tuple(self.keys), found, waits_s, self.updates, followed)


def _between_s(begin: Any, end: Any) -> float:
    """Return the seconds between two moments of one clock."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3


_PASSED_MAX = 8  # steps that the device has not passed yet


class StepEvents:
    """Observer of the steps of a training.

    Args:
        reached: called at each requested event, while the step follows the expected sequence.
        strayed: called once per step, at the first unexpected event.
        now_s: monotonic clock; None: that of the device, or of the host if there is none.
    """

    def __init__(
        self,
        reached: Callable[[int], None],
        strayed: Callable[[], None],
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self._reached = reached
        self._strayed = strayed
        self._now_s = now_s
        self._handles: list[Any] = []
        self._numbers: dict[Hashable, int] = {}
        self._names: dict[int, str] = {}  # of numbers, except those of updates
        self._patterns = LRUCache[Hashable, int]()  # numbers of updates
        self._next = itertools.count()
        self._roots: tuple[nn.Module, ...] = ()
        self._optimizers: Mapping[str, Optimizer] = {}
        self._pid = os.getpid()
        self._step: _Step | None = None  # None while no step is watched
        self._ended: deque[_Step] = deque(maxlen=_PASSED_MAX)

    @property
    def remembered(self) -> int:
        """Number of events, and patterns of updates, that have a number."""
        return len(self._numbers) + len(self._patterns)

    def watch(self, roots: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
        """Watch these modules and optimizers, by name, from now on, and no others."""
        self.close()
        self._roots = tuple(roots.values())
        self._optimizers = optimizers
        modules: dict[int, tuple[str, nn.Module]] = {}
        names: dict[int, str] = {}  # of parameters
        for root, one in roots.items():
            for path, module in one.named_modules():
                if next(module.parameters(recurse=False), None) is not None:
                    modules.setdefault(id(module), (f"{root}.{path}".rstrip("."), module))
            for path, owned in one.named_parameters():
                names.setdefault(id(owned), f"{root}.{path}")
        for name, module in _spread(list(modules.values())):
            number = self._number(("module", id(module)), f"forward of {name}")
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
            name = names.get(id(parameter), "a parameter")
            number = self._number(("gradient", id(parameter)), f"gradient of {name}")
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(_GradientHook(self, number)))

    def begin(
        self,
        expected: Sequence[int] = (),
        requested: Collection[int] = (),
        *,
        timed: bool = True,
    ) -> None:
        """Begin a step at its mark, event 0.

        Args:
            expected: sequence of events that a plan was made for, if there is one.
            requested: events of it at which ``reached`` is called.
            timed: False if only waits are of interest; each event costs microseconds on a device.
        """
        mark = self._number("mark", "step mark")
        clock: Callable[[], Any] = partial(moment_of, self._optimizers.values())
        moment = clock() if self._now_s is None else None
        if moment is None:
            clock = self._now_s or time.perf_counter
            moment = clock()
            timed = True
        self._step = _Step(expected, requested, bool(expected), clock, timed, [mark], [moment])

    def end(self) -> tuple[tuple[int, ...], list[Observed]]:
        """End the step at the next mark.

        Returns:
            Its events, none if no step has begun or it has no events; and the steps whose times
            became known, oldest first. On a device they are earlier ones.
        """
        step = self._step
        self._step = None
        keys = () if step is None or len(step.keys) < 2 else tuple(step.keys)
        if step is not None and keys:
            step.moments.append(step.clock())
            if step.has_times:
                self._ended.append(step)
        known = []
        while self._ended and self._ended[0].passed:
            # Moments on two devices cannot be compared: parameters were moved in that step.
            with contextlib.suppress(RuntimeError):
                known.append(self._ended.popleft().observed())
        return keys, known

    def update(self, key: str) -> int | None:
        """Record that an optimizer is about to update; return the number of the event, if steps are
        watched.

        The set of parameters without gradients, and the training mode, are part of the event's
        identity.
        """
        step = self._step
        if step is None or os.getpid() != self._pid:
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

    def waiting(self, event: int | None) -> Callable[[], None]:
        """Note that an update begins to wait for copies; return the function to call afterwards.

        That function calls ``reached`` for the update.
        """
        step = self._step
        if event is None or step is None:
            return lambda: None
        begin = step.clock()

        def waited() -> None:
            step.waits.append((event, begin, step.clock()))
            self._reach(step, event)

        return waited

    def notify(self, number: int) -> None:
        """Record an event; called by hooks."""
        step = self._step
        # A forked child inherits the hooks, and must not touch the device.
        if step is not None and os.getpid() == self._pid:
            self._reach(step, self._note(step, number))

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._numbers.clear()
        self._names.clear()
        self._patterns = LRUCache()
        self._step = None
        self._ended.clear()

    def _note(self, step: _Step, number: int) -> int:
        """Add an event, and return its index."""
        event = len(step.keys)
        step.keys.append(number)
        if step.timed:
            step.moments.append(step.clock())
        if step.follows and (event >= len(step.expected) or step.expected[event] != number):
            step.follows = False
            self._strayed()
        return event

    def _reach(self, step: _Step, event: int) -> None:
        if step.follows and event in step.requested:
            self._reached(event)

    def _number(self, source: Hashable, name: str) -> int:
        number = self._numbers.get(source)
        if number is None:
            number = self._numbers[source] = next(self._next)
            self._names[number] = name
        return number

    def names_of(self, observed: Observed) -> list[str]:
        """Return the names of a step's events, the same in every process that watches them.

        Numbers are given in each process anew. An optimizer's updates after the first one of a step
        have no name of their own.
        """
        firsts = {event: f"update by {key}" for key, event in observed.updates.items()}
        return [
            self._names.get(number) or firsts.get(event, "update")
            for event, number in enumerate(observed.keys)
        ]


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
