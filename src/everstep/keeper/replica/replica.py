"""The keeper's replica: a copy of the state that follows the log, and from which bases are written.

See LowDiff section VI and ``docs/design/log.md``. The replica starts from a base that the training
process has captured, in memory of its own. One thread applies complete steps (I3) as they arrive.
While a base is written from that memory, new steps wait in the log. This module does not import
torch; the thread imports it when it starts to work.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.arena import Arena
from everstep.commit import BaseId
from everstep.errors import AuditError, DamageError, EverstepError, OutOfSpaceError, StateError
from everstep.format import BasePlan, TimelineRecord
from everstep.keeper.log import LoggedStep
from everstep.keeper.process import ServedTimeline
from everstep.link import Save, complete, error_to_wire
from everstep.link.assembly import Samples, check_samples
from everstep.link.capture import Capture, Incoming, shard_offsets
from everstep.seams import failpoint
from everstep.seams.memory import copy_view
from everstep.seams.processes import Condition
from everstep.state.layout.shards import pieces

_log = logging.getLogger("everstep.keeper")

_STEPS_AT_ONCE = 4
"""Most steps applied at once.

More steps per pass over the state are faster; other threads wait for a pass to end.
"""

CATCH_UP_STEPS_MAX = 4
"""Most steps that the replica of one of several ranks applies while the ranks resume."""


@dataclass(frozen=True, slots=True)
class BaseRequest:
    """A request of the training process for a base made from the replica.

    Attributes:
        number: number that identifies the request.
        step: step that just ended in training.
        exact: True: the base must be of this step; False: a later step will do.
        samples: samples of the live state at this step.
    """

    number: int
    step: int
    exact: bool
    samples: tuple[Samples, ...] = ()


class Reports:
    """Reports the events of a replica to its training process, and refusals to the other ranks.

    Called in any thread.

    Args:
        timeline: timeline of the training process.
        requested: numbers of the bases that are neither durable nor refused; reduced here.
    """

    def __init__(self, timeline: ServedTimeline, requested: set[int]) -> None:
        self._timeline = timeline
        self._trainer = timeline.trainer
        self._requested = requested

    def persisted(self, requests: Sequence[BaseRequest], base: Capture) -> None:
        """Report that a base that answers these requests is durable, or has failed."""
        error = base.save.durable.exception()
        if error is not None:
            known = error if isinstance(error, EverstepError) else EverstepError(repr(error))
            self.refused(requests, known, base.step)
            return
        self._requested.difference_update(request.number for request in requests)
        self._trainer.send(
            {
                "kind": "persisted",
                "numbers": [request.number for request in requests],
                "step": base.step,
                "size_bytes": base.plan.size_bytes,
            }
        )

    def refused(
        self, requests: Sequence[BaseRequest], error: EverstepError, step: int | None = None
    ) -> None:
        """Report that a base will not be made.

        Args:
            step: step of the base that failed; None: none was begun.
        """
        self._requested.difference_update(request.number for request in requests)
        for request in requests:
            # Otherwise the other ranks would wait for this rank's files until a timeout.
            reason = f"this rank's replica cannot provide it: {error.message}"
            base = BaseId(self._timeline.number, request.step)
            self._timeline.writer.committer.refuse(base, reason)
        self._trainer.send(
            {
                "kind": "asks_refused",
                "numbers": [request.number for request in requests],
                "step": step,
                "error": error_to_wire(error),
            }
        )

    def stopped(self, error: EverstepError, *, for_good: bool) -> None:
        """Report that the replica has stopped, until the next base or ``for_good``."""
        _log.error("the replica has stopped: %s", error)
        self._trainer.send({"kind": "error", "error": error_to_wire(error)})
        self._trainer.send({"kind": "replica_stopped", "for_good": for_good, "why": error.message})


@dataclass(slots=True)
class _PendingRequests:
    """Open requests, and the step at which the next base is due.

    Attributes:
        requests: requests without a base.
        target: step at which the next base is due; None: none is.
        unchecked: requests whose samples have not been compared.
    """

    requests: list[BaseRequest] = field(default_factory=list)
    target: int | None = None
    unchecked: list[BaseRequest] = field(default_factory=list)

    def take(self, step: int) -> list[BaseRequest]:
        """Remove and return the requests that a base of ``step`` answers."""
        found = [request for request in self.requests if request.step <= step]
        self.requests = [request for request in self.requests if request.step > step]
        return found

    def aim(self, newest: int) -> None:
        """Choose the step of the next base.

        Requests that any later step answers are answered by one base of the newest step: requests
        that arrive while a base is written cause one more base, not one each (CheckFreq's rule).
        """
        exact = [request.step for request in self.requests if request.exact]
        due = max(newest, self.requests[-1].step) if self.requests else None
        self.target = min(exact) if exact else due


@dataclass(slots=True)
class _Followed:
    """State that follows the log; a new one from each base that the replica starts from.

    Attributes:
        base: base that it started from; None: there is no state.
        state: a ReplicaState; made by the thread, as it needs torch.
        objects: encoded objects of the base, or of the state once a base was made of it.
        frozen: the state as a base whose memory is being read, by a writer or for a restarted
            process.
        stalled: the log cannot be applied to the state.
        base_failed: a base of the training process failed; the log after it starts from that base.
    """

    base: Capture | None = None
    state: Any = None
    objects: Mapping[str, bytes] = field(default_factory=dict)
    frozen: Capture | None = None
    stalled: bool = False
    base_failed: bool = False


class _Access:
    """Access to the state for one at a time: the replica's thread, which yields to callers between
    two passes, or a caller.

    Attributes:
        changed: lock of everything that both touch, notified of changes.
        closed: the thread must end.
    """

    def __init__(self) -> None:
        self.changed = Condition()
        self.closed = False
        self._in_use = False
        self._waiting_callers = 0
        self._wake_pending = False

    @property
    def busy(self) -> bool:
        """True while somebody works on the state, or the thread is about to."""
        return self._in_use or self._wake_pending

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep the thread away from the state."""
        with self.changed:
            # Counted before the wait: the thread starts no further pass while a caller waits.
            self._waiting_callers += 1
            self.changed.wait_for(lambda: not self._in_use)
            self._waiting_callers -= 1
            self._in_use = True
        try:
            yield
        finally:
            # The caller may have changed the state or the requests: let the thread look again.
            self.release(more=True)

    def wake(self) -> None:
        """Let the thread look for work."""
        with self.changed:
            self._wake_pending = True
            self.changed.notify_all()

    def acquire(self) -> bool:
        """Wait for work and for the state to be free; return False if the thread must end."""
        with self.changed:
            # Callers first: they wait for a pass to end, and a busy thread would never let them in.
            self.changed.wait_for(
                lambda: (
                    self.closed
                    or (self._wake_pending and not self._in_use and not self._waiting_callers)
                )
            )
            if self.closed:
                return False
            self._wake_pending = False
            self._in_use = True
        return True

    def release(self, *, more: bool) -> None:
        """Give the state back.

        Args:
            more: there may be more work.
        """
        with self.changed:
            self._in_use = False
            self._wake_pending = self._wake_pending or more
            self.changed.notify_all()


class Replica:
    """Replica of one timeline, from its first base on.

    Args:
        timeline: the timeline; its ``replica`` setting limits memory and threads.
        read_record: reads the timeline's record.
        reports: receives events.

    Attributes:
        access: lets one at a time work on the state.
        applied: number of the last record that is not needed any more.
    """

    def __init__(
        self,
        timeline: ServedTimeline,
        read_record: Callable[[], TimelineRecord | None],
        reports: Reports,
    ) -> None:
        self._log = timeline.log
        self._keeper = timeline.writer
        self._read_record = read_record
        self._limits = timeline.settings["replica"]
        self._reports = reports
        self._timeout_s = timeline.timeout_s
        self.access = _Access()
        self._disabled = False
        self._finishing = False
        self._arena: Arena | None = None
        self._now = _Followed()
        self._pending = _PendingRequests()
        self._durable_step = -1
        self.applied = 0
        self._log.listeners.append(self.access.wake)
        # A daemon: a pass that hangs in torch must not keep the keeper from ending.
        self._thread = threading.Thread(target=self._run, name="everstep-replica", daemon=True)
        self._thread.start()

    @property
    def step(self) -> int | None:
        """Step of the state; None: there is no state."""
        now = self._now
        if now.state is not None:
            return int(now.state.step)
        return None if now.base is None else now.base.step

    @property
    def reach(self) -> tuple[int, int] | None:
        """Step of the state and newest complete step of the log, if the replica of one of several
        ranks can be frozen at the latter; else None."""
        state = self._now.state
        if state is None or self._now.stalled:
            return None
        step = int(state.step)
        # A log that is empty was dropped up to a base that is not newer than the state.
        _, newest = self._log.steps or (step, step)
        return (step, max(step, newest)) if step >= newest - CATCH_UP_STEPS_MAX else None

    @property
    def is_frozen(self) -> bool:
        """True while the memory of the state is being read as a base."""
        return self._now.frozen is not None

    @property
    def requested_steps(self) -> list[int]:
        """Steps of which a base was requested that is neither being written nor refused."""
        return [request.step for request in self._pending.requests]

    @property
    def target(self) -> int | None:
        """Step at which the next base is due; None: none is."""
        return self._pending.target

    @property
    def arena(self) -> Arena | None:
        """Memory of the replica; None before the first base, and after it was released for good."""
        return self._arena

    def begin(self, base: Capture, arena: Arena) -> None:
        """Start again from a durable base; errors are reported as events. In the writing thread.

        The base must not change until this returns.
        """
        with self.access.exclusive():
            if self._disabled or self.access.closed:
                return
            # Already past that step: starting again from the older base would lose progress.
            if self._now.frozen is not None and self._now.frozen.step > base.step:
                self._now.base_failed = False
                return
            # An older state that is not written yet: its memory is overwritten below.
            if self._now.frozen is not None:
                self._now.frozen.withdrawn = True
            self.reset()
            _, size_bytes = shard_offsets(base.plan)
            try:
                memory = self._memory(max(1, size_bytes))
            except EverstepError as error:
                self.stop(error, for_good=True)
                return
            source = arena.view[base.offset : base.offset + size_bytes]
            # A copy: the arena's block is reused as soon as the base is durable.
            for piece, copy in zip(pieces(source), pieces(memory[:size_bytes]), strict=True):
                copy_view(copy, piece)
            self._now.base = base
            self._now.objects = dict(base.incoming.objects())
            self._durable_step = base.step
            self._pending.unchecked = [
                request for request in self._pending.unchecked if request.step > base.step
            ]
            with self.access.changed:
                answered = self._pending.take(base.step)
                self._pending.aim(0)
        # Outside the lock: receivers send messages.
        self._reports.persisted(answered, base)

    def request_base(self, request: BaseRequest) -> None:
        """Queue a request for a base; the step has arrived in the log."""
        # Under the lock that stop() takes: a request is either refused here or by stop().
        with self.access.changed:
            refused = self._disabled or self._now.stalled or self._is_unanswerable(request)
            if not refused:
                self._pending.requests.append(request)
                self._pending.unchecked.append(request)
                if self._now.frozen is None and self._pending.target is None:
                    self._pending.aim(0)
        if refused:
            self._reports.refused(
                [request], StateError("no replica follows the log", step=request.step)
            )
        self.access.wake()

    def freeze(self, at: int | None = None) -> Capture | None:
        """Return the state as a base in memory that stays unchanged until :meth:`thaw`; None: no
        state.

        Steps that have arrived but are not applied stay in the log.

        Args:
            at: step up to which the log is applied first; without that step nothing is frozen.
        """
        with self.access.exclusive():
            if at is not None and not self._reaches(at):
                return None
            if self._now.frozen is not None or self._now.base is None:
                return self._now.frozen
            try:
                frozen = self._base_of_state()
            except EverstepError as error:
                self.stop(error, for_good=True)
                return None
            frozen.incoming.arrived(self._now.objects)
            if frozen.step == self._durable_step:
                complete(frozen.save.durable, frozen.plan.size_bytes)
            self._now.frozen = frozen
            return frozen

    def thaw(self) -> None:
        """Let the state change again."""
        with self.access.exclusive():
            self._now.frozen = None

    def _reaches(self, at: int) -> bool:
        """Apply the log up to a step; return True if the state is of that step."""
        now = self._now
        if now.frozen is not None:
            return now.frozen.step == at
        with self._stops_on_error():
            while now.state is not None and not now.stalled and now.state.step < at:
                self._check()
                steps = self._steps_up_to(lambda: [*self._ends(), at])
                if not steps:
                    break
                now.state.advance(steps)
            if now.state is not None:
                self._check()
        # Not ``now``: after an error there is another.
        state = self._now.state
        return state is not None and not self._now.stalled and int(state.step) == at

    def _is_unanswerable(self, request: BaseRequest) -> bool:
        """Return True if there is no state to make a base from, and none is coming.

        A process that closes takes no further base and would wait for ever.
        """
        leads = self._now.base is not None and not self._now.base_failed
        captures = (c for c in self._keeper.waiting if c.arena is None and c.step < request.step)
        ends = (capture.save.durable for capture in captures)
        return not leads and all(end.done() and end.exception() is not None for end in ends)

    def failed(self, base: Capture, error: EverstepError) -> None:
        """Refuse requests that waited for a failed base of the training process.

        With several ranks, all requests after it: the other ranks would wait for this one.
        """
        with self.access.changed:
            self._now.base_failed = True
            # With one rank a base of a later step answers a request as well.
            several = self._keeper.is_one_of_several
            later = [request for request in self._pending.requests if request.step > base.step]
            requests = [request for request in later if several or self._is_unanswerable(request)]
            refused = {request.number for request in requests}
            self._pending.requests = [
                request for request in self._pending.requests if request.number not in refused
            ]
            if self._now.frozen is None:
                self._pending.aim(0)
        self._reports.refused(requests, error)

    def drop_requests(self) -> None:
        """Drop all requests whose base is not being written: the process that made them is gone.

        :meth:`finish` computes its goal again: it may have begun before the process was gone.
        """
        with self.access.changed:
            self._pending = _PendingRequests()
            self._finishing = False

    def finish(self) -> bool:
        """Make the newest step durable when no process is left to request it.

        Returns:
            True while its base is still coming.
        """
        with self.access.changed:
            step = self.step
            newest = self._log.steps
            if self._disabled or step is None:
                return False
            if self._now.frozen is not None:
                return True
            # Only once: if that base fails, its steps are still in the log.
            if not self._finishing:
                self._finishing = True
                goal = step if newest is None else max(step, newest[1])
                if goal > self._durable_step:
                    self._pending.requests = []
                    self._pending.target = goal
                    self.access.wake()
            elif self._pending.target is not None and not self._is_under_way():
                # The log cannot be applied up to the goal (a gap, or another shape): settle for
                # the step that was reached.
                self._pending.target = step if step > self._durable_step else None
                self.access.wake()
            return self._pending.target is not None

    def _is_under_way(self) -> bool:
        """Return True if the thread has work, or is about to get some."""
        if self.access.busy or self._log.arriving:
            return True
        return self._now.state is not None and not self._now.stalled and bool(self._next_steps())

    def close(self, *, timeout_s: float = 0.0) -> None:
        """End the thread after its current steps; wait at most ``timeout_s`` for it."""
        if self.access.wake in self._log.listeners:
            self._log.listeners.remove(self.access.wake)
        self.access.closed = True
        self.access.wake()
        self._thread.join(timeout_s)

    # --- The thread -----------------------------------------------------------------------

    def _run(self) -> None:
        loaded = False
        while self.access.acquire():
            if self._now.base is not None and not loaded:
                # The import takes seconds. The state is released meanwhile: a newer base may
                # replace it, or a restarted process may freeze it.
                self.access.release(more=True)
                import_torch()
                loaded = True
                continue
            more = False
            try:
                with self._stops_on_error():
                    more = self._run_once()
            finally:
                self.access.release(more=more)

    @contextlib.contextmanager
    def _stops_on_error(self) -> Iterator[None]:
        """Stop the replica if the log cannot be applied."""
        try:
            yield
        except DamageError as error:
            # The state is good: the damaged record was not applied.
            self.stop(error, stalled=True)
        except AuditError as error:
            self.stop(error)
        except EverstepError as error:
            self.stop(error, for_good=True)
        except Exception as error:
            internal = EverstepError(f"internal error in the replica: {error!r}", step=self.step)
            self.stop(internal, for_good=True)

    def _run_once(self) -> bool:
        """Do one pass; return True if there may be more work."""
        if (
            self._now.base is None
            or self._now.frozen is not None
            or self._disabled
            or self.access.closed
        ):
            return False
        if self._now.state is None:
            self._now.state = self._load_state(self._now.base)
        self._check()
        if self._is_due() and self._persist():
            return False
        steps = [] if self._now.stalled else self._next_steps()
        if not steps:
            return False
        failpoint("replica.before_apply")
        self._now.state.advance(steps)
        failpoint("replica.after_apply")
        # The newest step stays: settle() reads its mark again.
        self.applied = steps[-1].first - 1
        return True

    def _load_state(self, base: Capture) -> Any:
        from everstep.keeper.replica.replica_state import ReplicaState

        assert self._arena is not None
        return ReplicaState(
            base.plan,
            self._arena.view,
            self._now.objects,
            self._read_record(),
            threads=self._limits["threads"],
        )

    def _is_due(self) -> bool:
        target = self._pending.target
        return target is not None and int(self._now.state.step) >= target

    def _next_steps(self) -> list[LoggedStep]:
        """Return the steps to apply now: none after a step with a due base, or with samples.

        One of several ranks does not apply its newest step before the next one arrives, or a base
        of it is due: another rank that dies may lack that step, and all resume from the newest
        step that all of them have (LowDiff VI-C).
        """
        newest = self._log.steps
        steps = self._steps_up_to(self._ends)
        target = self._pending.target
        if self._keeper.is_one_of_several and newest is not None:
            due = -1 if target is None else target
            steps = [step for step in steps if step.mark.head.step < max(newest[1], due + 1)]
        return steps

    def _ends(self) -> list[int]:
        """Return the steps at which the state is compared, or a base of it is due."""
        with self.access.changed:
            step = int(self._now.state.step)
            ends = [request.step for request in self._pending.unchecked if request.step > step]
            return ends + ([self._pending.target] if self._pending.target is not None else [])

    def _steps_up_to(self, ends: Callable[[], Collection[int]]) -> list[LoggedStep]:
        """Return the next steps of the log that fit the state, up to the first of ``ends``."""
        state = self._now.state
        steps = self._log.steps_after(state.step, state.lsn, _STEPS_AT_ONCE)
        # After reading the steps: a request arrives before the steps that follow it.
        last = ends()
        found = []
        for step in steps:
            if step.mark.head.shape != state.shape:
                # The state has changed its shape: training takes a new base, which is coming.
                break
            found.append(step)
            if step.mark.head.step in last:
                break
        return found

    def _check(self) -> None:
        """Compare the state with samples of the same step, where replay yields the bits of
        training.
        """
        step = int(self._now.state.step)
        base = self._now.base
        arena = self._arena
        assert base is not None
        assert arena is not None
        with self.access.changed:
            requests = [request for request in self._pending.unchecked if request.step == step]
            self._pending.unchecked = [
                request for request in self._pending.unchecked if request.step > step
            ]
        if not self._now.state.why:
            for request in requests:
                check_samples(request.samples, base.plan, arena.view, step)

    def _persist(self) -> bool:
        """Queue the state for writing; later steps wait until it is written. Return False if no
        base is due any more.
        """
        frozen = self._base_of_state()
        failpoint("replica.before_persist")
        # In one step under the lock: a process that takes the run over waits for bases that have
        # begun; none may begin after that.
        with self.access.changed:
            if not self._is_due():
                return False
            self._pending.target = None
            self._now.frozen = frozen
            self._keeper.begin(frozen)
        self._keeper.captured(frozen, self._now.objects)
        return True

    def _base_of_state(self) -> Capture:
        """Return the current state as a base over the replica's memory."""
        base = self._now.base
        assert base is not None
        identity = base.plan.identity
        if self._now.state is not None:
            identity, self._now.objects = self._now.state.settle()
        plan = BasePlan(identity, base.plan.shards, base.plan.kinds)
        _, size_bytes = shard_offsets(plan)
        return Capture(
            number=0,
            layout=base.layout,
            plan=plan,
            save=Save(identity.step, identity.timeline),
            offset=0,
            word=0,
            stream=False,
            incoming=Incoming(lambda: size_bytes, timeout_s=self._timeout_s),
            on_end=self._on_end,
            arena=self._arena,
        )

    def _on_end(self, base: Capture) -> None:
        """Handle the end of a base made from the replica. In the writing thread."""
        newest = self._log.steps
        with self.access.changed:
            answered = self._pending.take(base.step)
            # Requests are answered by a failed base, too: its error is their answer.
            if base.durable:
                self._durable_step = max(self._durable_step, base.step)
            # Not if a base of the trainer has replaced the state since (begin).
            if self._now.frozen is base:
                self._now.frozen = None
                self._pending.aim(0 if newest is None else newest[1])
        self._reports.persisted(answered, base)
        self.access.wake()

    # --- Memory and errors ----------------------------------------------------------------

    def _memory(self, size_bytes: int) -> memoryview:
        """Return the memory block, of at least ``size_bytes``; allocate it within the limit."""
        if self._arena is not None and self._arena.size_bytes >= size_bytes:
            return self._arena.view
        limit_bytes = self._limits["size_bytes"]
        if size_bytes > limit_bytes:
            raise OutOfSpaceError(
                f"a replica of the state takes {size_bytes} bytes of host memory; the budget "
                f"leaves {limit_bytes} for it",
                hint="raise Budget(host_bytes=...), or use apply='recovery'",
            )
        self._arena = Arena.create(size_bytes)
        # Allocate the pages now: without memory this fails here, not in the middle of a step.
        self._arena.populate(0, size_bytes)
        return self._arena.view

    def reset(self) -> None:
        """Forget the state, until the next base of the training process."""
        self._now = _Followed()

    def stop(self, error: EverstepError, *, for_good: bool = False, stalled: bool = False) -> None:
        """Stop following the log, and refuse all requests.

        Args:
            for_good: True: release the memory; the replica never starts again.
            stalled: True: the state is good, but the log cannot be applied to it.
        """
        with self.access.changed:
            requests = self._pending.requests
            self._pending = _PendingRequests()
            self._disabled = self._disabled or for_good
            if stalled:
                self._now.stalled = True
            else:
                self.reset()
            # For good: nobody reads this memory any more, and training may need it.
            if for_good:
                self._arena = None
        self._reports.stopped(error, for_good=for_good)
        self._reports.refused(requests, error)


_IMPORTING = threading.Lock()


def import_torch() -> None:
    """Import torch and the modules that need it.

    One thread at a time: Python locks each module, and two threads that enter the same modules from
    different ends would wait for each other.
    """
    with _IMPORTING:
        import everstep.keeper.replica.lossy_update
        import everstep.keeper.replica.replica_state  # noqa: F401
