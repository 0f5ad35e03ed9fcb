"""Tracks whether the live state is that of a step mark, and which updates have changed it.

Updates come from the optimizers of the state, from functions of the program between
``before_update()`` and ``after_update()``, and from optimizers that are not part of the state.
:class:`StateWatch` counts them and passes them on to the log, or to a multi-step base. It also
decides which state ``save()`` may take: the live one, or that of the last step mark.

A step may be under way although nothing in the state shows it: a forward draws random numbers and
counts batches, and a loader fetches data, long before an optimizer updates anything.
:func:`mid_step_position` detects this from the call stack.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from everstep.capture import UpdateHooks
from everstep.errors import EverstepError, StateError
from everstep.format import ShardIdentity
from everstep.link.recordable import refuse_encoded
from everstep.state.layout.entries import RNG_SECTION
from everstep.state.survey import Survey
from everstep.state.training_state import State
from everstep.trainer.base import LastMark, MarkSnapshot
from everstep.trainer.checks import LoopChecks
from everstep.trainer.log import WatchedTensors
from everstep.trainer.session.components import Components

_log = logging.getLogger("everstep")

_RANDOM = f"{RNG_SECTION}/"


class Position:
    """Position of this rank's training.

    Attributes:
        step: step that the last call of ``step()`` has ended.
        timeline: number of the timeline; 0 before the first.
    """

    def __init__(self, run_id: str, state: State, updates: UpdateHooks) -> None:
        self.step = 0
        self.timeline = 0
        self._run_id = run_id
        self._state = state
        self._updates = updates

    @property
    def lsn(self) -> int:
        """Number of updates so far."""
        return self._updates.lsn

    def identity(self, exact: bool = True) -> ShardIdentity:
        """Return the identity of a base of the current step."""
        state = self._state
        return ShardIdentity(
            self._run_id,
            self.timeline,
            self.step,
            self.lsn,
            state.ranks.rank,
            state.ranks.world,
            exact and state.exact,
            inexact=state.why_inexact,
        )


class _MarkedState:
    """State at the last step mark, and the means to see that it is still the live one.

    Args:
        watches: compare all tensors; False if a log does, whose checks cover those of optimizers.

    Attributes:
        lsn: number of updates at the mark.
        handled: attributes of the exception that the loop was handling at the mark.
        last: state at the mark, if it is surveyed at each mark; else None.
    """

    def __init__(self, *, watches: bool) -> None:
        self._watches = watches
        self._entries: object = None  # of the shape that the names below belong to
        self._names: tuple[str, ...] = ()
        self._random: tuple[str, ...] = ()
        self._tensors: object = None
        self._all: WatchedTensors | None = None
        self.lsn = 0
        self.handled: Mapping[str, Any] | None = None
        self.last: LastMark | None = None

    @property
    def is_intact(self) -> bool:
        """True if the state at the mark is known and was not written to since."""
        intact = self.last is not None and self.last.is_intact
        return intact and (self._all is None or self._all.written() is None)

    def begin(self, lsn: int) -> None:
        """Begin a mark, whose state is not known yet."""
        self.last = None
        self.lsn = lsn
        # Its attributes only: a reference to it would keep the frames of its traceback alive, and
        # its id may be that of a later exception.
        error = sys.exc_info()[1]
        self.handled = None if error is None else vars(error)

    def take(self, survey: Survey) -> None:
        """Take the surveyed state as that of the mark."""
        shape = survey.shape
        if shape.entries is not self._entries:  # once for each shape, not at each step
            self._names = tuple(e.name for e in shape.entries if shape.owners[e.name].in_marks)
            self._random = tuple(name for name in self._names if name.startswith(_RANDOM))
            # Last: after an interrupt before this line, the next mark computes the names again.
            self._entries = shape.entries
        self.last = LastMark.of(survey, self._names, self._random)
        if not self._watches:
            return
        # The states of random generators are left out: each survey copies them again.
        if survey.tensors is not self._tensors or self._all is None:
            tensors = survey.tensors.items()
            self._all = WatchedTensors(
                {name: one for name, one in tensors if not name.startswith(_RANDOM)}
            )
            self._tensors = survey.tensors
        self._all.settle(self.lsn)


class StateWatch:
    """Track the updates of a state between two step marks, and pass them to the participants.

    Args:
        at: position of training.

    Attributes:
        abandoned: True after training was left by an error, perhaps in the middle of a step.
        changing: True between ``before_update()`` and ``after_update()``.
        checks: checks of the training loop.
    """

    def __init__(self, parts: Components, at: Position) -> None:
        state = parts.state
        updates = parts.updates
        gate = parts.saver.gate
        tell = parts.channel.post_notice
        self._state = state
        self._at = at
        self._gate = gate
        self._pid = os.getpid()
        self._channel = parts.channel
        self._updates = updates
        self._participants = parts.participants
        self._follows = any(one.follows_updates for one in parts.participants)
        self._parts = parts
        self._refusals = parts.refusals
        self.abandoned = False
        self.changing = False
        self._mark = _MarkedState(watches=not parts.reads_marks)
        self._fresh: MarkSnapshot | None = None
        skipped = self._skipped if self._follows else None
        self.checks = LoopChecks(state, updates, gate, skipped, tell)

    @property
    def _logs(self) -> bool:
        return self._parts.reads_marks

    @property
    def surveys(self) -> bool:
        """True if the state is surveyed at each mark: there is a log, or bases live in memory (then
        a last base goes to disk at the end)."""
        return self._parts.options.method.in_memory or self._logs

    def abandon(self) -> None:
        """Note that training ended without ``close()``. Other ranks are not waited for."""
        self.abandoned = True
        for participant in self._participants:
            participant.leave()

    @property
    def is_between_steps(self) -> bool:
        """True if nothing was updated since the last step mark, and no update is running."""
        updates = self._updates
        idle = updates.outermost is None and not updates.failed and not self.changing
        return idle and updates.lsn == self._mark.lsn

    def refuse_mid_step(self) -> None:
        """Check that the state is still that of the last step mark.

        Raises:
            StateError: It was changed since.
        """
        updates = self._updates
        if updates.outermost is not None:
            raise StateError(
                f"save() was called while {updates.key} is updating: the state is that of no step",
                step=self._at.step,
                hint="call it from the training loop, after ckpt.step()",
            )
        if self.changing:
            raise StateError(
                "save() was called between before_update() and after_update(): the state is that "
                "of no step",
                step=self._at.step,
                hint="call after_update() first, when the change is complete",
            )
        if not self.is_between_steps:
            raise StateError(
                "save() was called after optimizer.step() and before ckpt.step(): the state "
                "belongs to an unfinished step",
                step=self._at.step,
                hint="call ckpt.step() first, then ckpt.save()",
            )

    def survey_for_save(self) -> tuple[Survey | None, bool]:
        """Return the state that ``save()`` takes, and whether the base may be called exact.

        Returns:
            The state at the last step mark if the next step may be under way and that state is
            known; None for the live state. The live state is not exact if the next step may be
            under way: a forward, for example, may have drawn random numbers.

        Raises:
            StateError: The state was updated since the last step mark.
        """
        self.refuse_mid_step()
        where = mid_step_position(self._mark.handled)
        if not where:
            return None, True
        if (survey := self.survey_at_mark) is not None:
            return survey, True
        problem = (
            f"save() was called {where}: random numbers, batch counts or loader positions may "
            "already be those of "
        )
        how = "in a signal handler, set a flag and call save() after ckpt.step(); or use preempt="
        if self._logs and self._refusals.are_errors:
            # The log already has this step exactly, so a base that is not exact would be a loss.
            raise StateError(
                f"{problem}the next step, and the log has this one already",
                step=self._at.step,
                hint=how,
            )
        _log.warning(
            "everstep: %sstep %d; a resume from this base is not called exact (%s)",
            problem,
            self._at.step + 1,
            how,
        )
        return None, False

    @property
    def is_at_a_step(self) -> bool:
        """True if the state of the last step is live or still available, as far as is known.

        It is not after an error: a failed forward has drawn random numbers and counted batches, and
        the program may have loaded other weights.
        """
        known = self.survey_at_mark is not None or (self._mark.last is None and not self.abandoned)
        return self.is_between_steps and known

    @property
    def survey_at_mark(self) -> Survey | None:
        """State at the last step mark, even if the next step has begun.

        None if that state no longer exists, for example because other weights were loaded for an
        evaluation.
        """
        mark = self._mark
        if not self.is_between_steps or not mark.is_intact:
            return None
        if not all(one.is_as_marked for one in self._participants):
            return None
        return None if mark.last is None else mark.last.survey

    def survey(self) -> Survey | None:
        """Survey the state at the end of a step.

        Returns:
            None if the state cannot be stored and the policy is not to raise. The log then
            continues with the next base.

        Raises:
            EverstepError: The state cannot be stored, and the policy is to raise.
        """
        try:
            survey = self._state.survey()
            if self._logs:
                refuse_encoded(self._state)
            return survey
        except EverstepError as error:
            if self._logs:
                self._skipped("the state could not be stored")
            self._refusals.post(error)
            self._channel.check()
            return None

    def started(self, survey: Survey | None, *, fresh: bool) -> None:
        """Begin to track a state after a start.

        Args:
            survey: the state, if it was surveyed.
            fresh: True if nothing was restored.
        """
        self.marked(survey)
        self.checks.started()
        if fresh:
            current = survey or self._state.survey()
            self._fresh = MarkSnapshot.of(current, current.tensors)

    def has_moved(self) -> bool:
        """Return True if the state may differ from that of a fresh start.

        That is the case after a step, and after a failed one: its forward may have drawn random
        numbers or counted batches.
        """
        updates = self._updates
        updates.settle()
        if self._at.step > 0 or updates.lsn > 0 or updates.failed or self.changing:
            return True
        return self._fresh is not None and not self._fresh.holds(self._state.survey())

    def step_ended(self) -> None:
        """Check that the step is complete (gradients consumed, scaler updated), and mark it."""
        self.checks.step_ended(self._at.step, updated=self._updates.lsn != self._mark.lsn)
        self.marked()

    def marked(self, survey: Survey | None = None) -> None:
        """Take the live state as that of a step mark.

        Args:
            survey: the state, if it is surveyed at each mark.
        """
        self._fresh = None
        self._mark.begin(self._updates.lsn)
        self._updates.failed = self.changing = False
        if survey is not None:
            self._mark.take(survey)

    def consumed(self, key: str) -> None:
        """Pass on an optimizer whose gradients are final and about to be consumed."""
        if os.getpid() != self._pid:  # hooks are inherited by forked children
            return
        updates = self._updates
        for participant in self._participants:
            participant.consumed(key, updates.lsn + 1, self._at.step + 1, over=not updates.reports)

    def _applied(self, key: str) -> None:
        for participant in self._participants:
            participant.applied(key)

    def _skipped(self, why: str) -> None:
        for participant in self._participants:
            participant.skipped(why)

    def begin_change(self) -> None:
        """Wait for copies in flight, before a change that no optimizer makes (I1)."""
        self._refuse_during_replay()
        # Before the wait: a save() in a signal handler must not take the state from here on.
        self.changing = True
        self._gate(None)

    def changed(self, declared: Sequence[str]) -> None:
        """Count a change that no optimizer has made.

        Args:
            declared: patterns whose registered functions have made it; empty if anything may have
                changed.

        Raises:
            OptionError: No function is registered for one of the patterns.
        """
        self._refuse_during_replay()
        self._state.ownership_rules.check_updates(declared)
        self.changing = False
        for pattern in declared:
            self._updates.updated()
            for participant in self._participants:
                participant.declared(pattern, self._updates.lsn, self._at.step + 1)
        if not declared:
            self._updates.updated()
            self._skipped("a change that no optimizer made")

    def count_untracked_write(self) -> None:
        """Count a write that no hook has announced as an update of its own.

        Otherwise two bases with different contents would have the same LSN. Not with several ranks:
        their LSNs must agree, and only one of them may have seen the write.
        """
        if self._state.ranks.world == 1:
            self._updates.updated()
            self._mark.lsn = self._updates.lsn

    def install(self, wait_for_others: Callable[[str], None]) -> None:
        """Install the hooks that count updates, delay them at the gate, and pass them on.

        Args:
            wait_for_others: called before an update; waits for a base that another thread takes.
        """
        updates = self._updates
        updates.wait_for_others = wait_for_others
        updates.counts_failed = self._state.ranks.world == 1
        if self._follows:
            updates.consumed = self.consumed
            updates.applied = self._applied
            updates.lost = self._skipped
        for key, optimizer in self._state.optimizers.items():
            updates.watch(key, optimizer)
        self.checks.watch()

    def _refuse_during_replay(self) -> None:
        """Check that no replay is running.

        Raises:
            StateError: The call comes from a registered function, which replay calls.
        """
        if self._state.replaying:
            raise StateError(
                "a registered function calls before_update() or after_update() itself",
                hint="register only the change that is made between the two calls",
            )


# Frames are compared by their code: every module runs that of nn.Module, whatever its class.
_FORWARD = frozenset((nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__))
_BACKWARD = frozenset((torch.autograd.backward.__code__, torch.autograd.grad.__code__))


def mid_step_position(handled: Mapping[str, Any] | None = None) -> str:
    """Return a description of the caller's position if a step may be under way, otherwise "".

    Only the caller's own stack is examined: the stack of another thread cannot be walked while that
    thread runs.

    Args:
        handled: attributes, which identify it, of the exception that was being handled at the end
            of the last step. A training loop may run within an ``except`` block.
    """
    error = sys.exc_info()[1]
    left = "" if error is None or vars(error) is handled else _position_of_error(error)
    return _position(sys._getframe(1), _handlers()) or left


def _position(frame: FrameType | None, handlers: frozenset[CodeType]) -> str:
    while frame is not None:
        code = frame.f_code
        if code in _FORWARD:
            return "in a module's forward"
        if code in _BACKWARD:
            return "in a backward"
        if code in handlers and _receives_caller_frame(frame):
            return "in a signal handler"
        frame = frame.f_back
    return ""


def _position_of_error(error: BaseException) -> str:
    """Return a description of the position where an exception, being handled, left the step."""
    # It may have interrupted any instruction, so its traceback does not show how far the step was.
    if isinstance(error, KeyboardInterrupt):
        return "after a KeyboardInterrupt"
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in _FORWARD | _BACKWARD:
            return f"after a forward or backward that failed with {type(error).__name__}"
        trace = trace.tb_next
    return ""


def _receives_caller_frame(frame: FrameType) -> bool:
    """Return True if a call has its caller's frame as an argument, as signal handlers do.

    This distinguishes the handler from an ordinary call of the same function.
    """
    given = list(frame.f_locals.values())
    given += [one for some in given if isinstance(some, tuple) for one in some]
    return any(one is frame.f_back for one in given)


def _handlers() -> frozenset[CodeType]:
    """Return the code objects of this process's signal handlers."""
    found = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    return frozenset(code for code in found if code is not None)


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler) or isinstance(handler, type):
        return None
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = getattr(type(handler).__call__, "__func__", type(handler).__call__)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
