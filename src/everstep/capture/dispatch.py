"""Copies issued in planned order, at planned events of the step (Checkflow, section III).

A capture is cut into *units*. Each is issued at its event, so that the lane's queue never holds
more than the plan wants there. An update waits for the units that hold the entries it is going to
change (I1), and for no others: an optimizer of all parameters waits for all of them, because torch
calls no hook between the parameters of one ``step()``; an optimizer of a single parameter, which
updates during backward, waits for its own. A unit planned for later than its update is duplicated
first, into memory that is taken then and freed once the unit is copied, and the update does not
wait for it. If the device has no memory for that, the update waits.

No order of events can tear a tensor: a unit not yet issued at its update is issued then, and the
update waits for it.

Events of a training step, as seen by hooks, with times.

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
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.capture.batches import Batch, run_batch
from everstep.capture.lane import Lane, Transfer
from everstep.errors import StateError
from everstep.state.layout.shards import LRUCache


@dataclass(frozen=True, slots=True)
class Unit:
    """Copies that are issued together.

    Attributes:
        event: event of the step at which they are issued.
        owner: key of the optimizer that updates their sources; ``""`` if none does.
        batches: the copies, in file order.
        late: it is duplicated before its update and copied from the duplicate.
        planned_s: for each batch, planned start and end in seconds after the step mark; empty
            without a plan.
    """

    event: int
    owner: str
    batches: tuple[Batch, ...]
    late: bool = False
    planned_s: tuple[tuple[float, float], ...] = ()


@dataclass(slots=True)
class Duplicates:
    """Duplicates made under one plan.

    Attributes:
        readers: transfer that reads the latest duplicate of a unit, by the number of the unit.
        short: True once a device had no memory for a duplicate.
    """

    readers: dict[int, Transfer] = field(default_factory=dict)
    short: bool = False


_ALIGNED_BYTES = 512  # of each batch in a duplicate


@dataclass(slots=True, eq=False)
class UnitCopy:
    """Progress of one unit of a capture.

    Attributes:
        number: number of the unit, in the order of the link.
        duplicate: copies out of its duplicate; None without one.
        transfer: its copies, once they are issued.
        issued_s: time of issue, on the capture's clock; None until then.
        arrived_s: arrival times of its batches.
    """

    number: int
    unit: Unit
    duplicate: tuple[Batch, ...] | None = None
    transfer: Transfer | None = None
    issued_s: float | None = None
    arrived_s: list[float] = field(default_factory=list)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Copies to issue: out of the duplicate, if there is one."""
        return self.unit.batches if self.duplicate is None else self.duplicate

    def make_duplicate(self) -> bool:
        """Copy the unit within its device, in the order of the current stream.

        Returns:
            False if the device has no memory for it.
        """
        begins = [0]
        for batch in self.unit.batches:
            begins.append(begins[-1] + -(-batch.size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES)
        device = self.unit.batches[0].first.device
        try:
            memory = torch.empty(begins[-1], dtype=torch.uint8, device=device)
        # Host memory that is short raises a plain RuntimeError.
        except (torch.OutOfMemoryError, RuntimeError):
            return False
        copies = []
        for batch, begin in zip(self.unit.batches, begins, strict=False):
            end = begin + batch.size_bytes
            run_batch(Batch(begin, end, batch.sources, batch.rearranged), memory)
            copies.append(Batch(batch.begin, batch.end, (memory[begin:end],)))
        self.duplicate = tuple(copies)
        return True

    def arrived(self, end: int, now_s: float) -> None:
        """Note that the unit was copied up to a position; at its end, free the duplicate."""
        self.arrived_s.append(now_s)
        if self.duplicate and end >= self.unit.batches[-1].end:
            self.duplicate = ()


class Dispatch:
    """A capture in progress: a transfer whose copies are issued one after the other.

    Args:
        block: memory that the copies fill, flat ``uint8``.
        units: units in the order of the link.
        duplicates: duplicates of late units.
        over: called once, in any thread, when nothing is left to issue.

    Attributes:
        copies: progress of each unit.
        begun_s: time of the beginning, on the clock ``now_s``.
        complete: all copies are complete.
        copied_s: not known; None.
    """

    copied_s: float | None = None

    def __init__(
        self,
        lane: Lane,
        block: torch.Tensor,
        units: Sequence[Unit],
        duplicates: Duplicates,
        over: Callable[[], None],
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.copies = [UnitCopy(number, unit) for number, unit in enumerate(units)]
        self._lane = lane
        self._block = block
        self._duplicates = duplicates
        self._over = over
        self._now_s = now_s
        # Hooks also run in autograd's threads. Reentrant, because a signal handler may flush.
        self._lock = threading.RLock()
        self._next = 0  # all units before it were issued
        self._issuing = 0  # units being issued by the thread that holds the lock
        self._of: dict[str | None, list[UnitCopy]] = {None: self.copies}
        for copy in self.copies:
            self._of.setdefault(copy.unit.owner, []).append(copy)
        self._ended = False
        self._error: BaseException | None = None
        self.complete = False
        self.begun_s = now_s()

    @property
    def all_issued(self) -> bool:
        """Return True if nothing is left to issue."""
        return self._next == len(self.copies)

    def reach(self, event: int) -> None:
        """Issue all units planned for this event of the step, or for an earlier one."""
        with self._lock:
            while not self._ended and self._next < len(self.copies):
                copy = self.copies[self._next]
                if copy.unit.event > event:
                    return
                self._issue(copy)
            # Otherwise a signal handler has interrupted _issue(), which ends the capture itself.
            if not self._issuing:
                self._end()

    def admit(self, owner: str | None, timeout_s: float) -> bool:
        """Hold an update back until it cannot tear any copy.

        Args:
            owner: key of the optimizer; None if anything may change.

        Returns:
            False if one of its copies has taken ``timeout_s`` after the one before it.
        """
        awaited: list[tuple[Transfer, int]] = []
        if owner is None:
            self.flush()
        with self._lock:
            for copy in self._of.get(owner, ()):
                if copy.issued_s is None and copy.duplicate is None:
                    if copy.unit.late:
                        self._duplicate(copy, timeout_s)
                    else:
                        self._issue(copy)
                if copy.transfer is not None and copy.duplicate is None:
                    awaited.append((copy.transfer, copy.unit.batches[-1].end))
        # Without the lock: hooks in autograd's threads must be able to issue copies meanwhile.
        return all(transfer.gate(end, timeout_s) for transfer, end in awaited)

    def flush(self) -> None:
        """Issue everything in planned order: the step deviates from the plan, or is over."""
        self.reach(max((copy.unit.event for copy in self.copies), default=0))

    def fail(self, error: BaseException) -> None:
        """Issue nothing more: the capture has failed with this error."""
        with self._lock:
            self._error = self._error or error
            # Without a transfer no copy writes to the block.
            self.complete = self.complete or not any(copy.transfer for copy in self.copies)
            self._end()

    def gate(self, end: int, timeout_s: float) -> bool:
        """Wait as for any transfer. Units do not arrive in file order, so any part means
        everything."""
        return end <= 0 or self.admit(None, timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all copies are complete; everything has been issued.

        Raises:
            Exception: error of a copy, or of issuing one.
        """
        for copy in self.copies:
            try:
                if copy.transfer is not None and not copy.transfer.wait(timeout_s):
                    return False
            except Exception as error:  # go on: other transfers may still be in progress
                self.fail(error)
        self.complete = True
        if self._error is not None:
            raise self._error
        return True

    def _issue(self, copy: UnitCopy) -> None:
        if self._ended or copy.issued_s is not None:
            self._advance()
            return
        self._issuing += 1  # a signal handler may flush meanwhile, and must not end the capture
        try:
            # Before the submission: a signal handler that flushes now must not issue the unit
            # again.
            copy.issued_s = self._now_s()
            copy.transfer = self._lane.submit(
                copy.batches, self._block, lambda end: copy.arrived(end, self._now_s())
            )
            if copy.duplicate is not None:
                self._duplicates.readers[copy.number] = copy.transfer
        except Exception as error:  # runs in a hook of training, which must not fail
            self.fail(error)
            return
        except BaseException:  # interrupted: no caller could wait for the copies begun
            self.fail(StateError("a capture was interrupted"))
            raise
        finally:
            self._issuing -= 1
        self._advance()

    def _advance(self) -> None:
        while not self.all_issued and self.copies[self._next].issued_s is not None:
            self._next += 1
        if self.all_issued and not self._issuing:
            self._end()

    def _duplicate(self, copy: UnitCopy, timeout_s: float) -> None:
        reader = self._duplicates.readers.get(copy.number)
        try:
            if reader is not None and not reader.gate(copy.unit.batches[-1].end, timeout_s):
                self._issue(copy)  # the duplicate of the step before is still being copied
            elif not copy.make_duplicate():
                self._duplicates.short = True
                self._issue(copy)
        except Exception as error:
            self.fail(error)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._over()


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
        self._names: dict[int, str] = {}  # of numbers, except those of updates
        self._patterns = LRUCache[Hashable, int]()  # numbers of updates
        self._next = itertools.count()
        self._roots: tuple[nn.Module, ...] = ()
        self._optimizers: Mapping[str, Optimizer] = {}
        self._step: _Step | None = None  # None while no step is watched

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

    def begin(self, expected: Sequence[int] = (), requested: Collection[int] = ()) -> None:
        """Begin a step at its mark, event 0.

        Args:
            expected: sequence of events that a plan was made for, if there is one.
            requested: events of it at which ``reached`` is called.
        """
        mark = self._number("mark", "step mark")
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
        self._names.clear()
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
