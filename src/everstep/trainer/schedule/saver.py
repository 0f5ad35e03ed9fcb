"""Capture at every step: most captures stay in the keeper's memory, those that are due become
durable.

The newest complete capture is *parked*: it stays in its block of the arena, known to the keeper,
which offers it to a new process when the training process is killed. It is released when the next
one is complete, not before. So the arena holds two states, and while one is being written a third,
or training waits.

Several ranks that are killed are not at the same step, and must have a capture in common. Training
exchanges gradients in each step, so a rank whose capture of step ``s`` is complete has passed the
mark of ``s``, and then all ranks have passed that of ``s - 1``. At its mark of ``s - 1`` a rank
waits until the capture of ``s - 2`` is in its keeper. So the newest three captures suffice, and the
arena holds four states, five while a base is written. Where ranks do not exchange gradients in each
step there may be none in common: then they resume from a base."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from everstep.capture import Batch, Dispatch, Lane, Transfer
from everstep.capture.lane import Progress, Take
from everstep.errors import DeadlineError, KeeperError
from everstep.format import BasePlan, ShardIdentity
from everstep.link import Save, fail, failing_save
from everstep.link.capture import Capture
from everstep.link.pool import Block, CapturePool
from everstep.seams.processes import Outcome, wait_done
from everstep.state.survey import Survey
from everstep.trainer.attach.keeper import Service
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base import PlannedCopies, PreparedBase, Saver
from everstep.trainer.budget import CAPTURES_OF_RANKS
from everstep.trainer.participant import BaseRequest, Mark, Participant, TrainingContext
from everstep.trainer.schedule.given import GivenPlan
from everstep.trainer.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Parked:
    """Complete capture in memory.

    Attributes:
        starts: number of timelines begun before it.
    """

    capture: Capture
    starts: int


class ScheduledSaver(Saver):
    """Saver whose captures follow a plan.

    Args:
        given: plan to follow; None: plans are made from the steps.
        parks: captures of steps without a base are kept in memory.

    Attributes:
        scheduler: makes the plans and issues the copies.
    """

    copies_in_flight = 3

    def __init__(
        self,
        context: TrainingContext,
        participants: Sequence[Participant],
        given: GivenPlan | None = None,
        *,
        parks: bool = True,
    ) -> None:
        self.scheduler = Scheduler(context.run, context.state, context.lane, given)
        self._planned = _PlannedLane(context.lane, self.scheduler)
        super().__init__(replace(context, lane=self._planned), participants)
        self.parks = parks
        self._kept = CAPTURES_OF_RANKS if context.state.ranks.world > 1 else 1
        # For the fields below: captures become complete in the lane's thread.
        self._parking = threading.Lock()
        self._parked: list[_Parked] = []  # complete captures, the newest last
        # Steps of the newest captures that became complete since the start, due ones among them.
        self._completed: deque[int] = deque(maxlen=self._kept)
        self._newest: Save | None = None  # of the last park(), complete or not
        self._persist_when_complete: list[Save] = []  # each is to be persisted once it is complete
        self._starts = 0

    def start(self, service: Service) -> None:
        with self._parking:
            if service.pool is not self._pool:
                # A lost keeper will not report the end of a capture, so its memory is released
                # here.
                self._release(lambda parked: True)
            # A capture of an earlier timeline stays until newer ones are complete, since a crash
            # would be restored from it. It must not be persisted any more. Several ranks have
            # agreed on one; memory for their others was not planned.
            if self._kept > 1:
                self._release(lambda parked: parked.capture.step != service.step)
            self._completed.clear()
            self._newest = None
            self._persist_when_complete = []
            self._starts += 1
            self._service = None  # a capture for the old keeper may complete meanwhile
        super().start(service)

    @property
    def _process(self) -> RemoteKeeper | None:
        return None if self._service is None else self._service.process

    @property
    def reachable_step(self) -> int | None:
        """Return the step of the newest complete capture that the keepers of all ranks are known to
        hold; None if they hold none."""
        steps = list(self._completed)
        # Without a gap: another rank may have just the one that failed here.
        whole = len(steps) == self._kept and steps[-1] - steps[0] == self._kept - 1
        return steps[0] if whole else None

    def park(self, mark: Mark) -> None:
        """Take a capture that stays in memory until a newer one is complete.

        Does nothing without a keeper process, where it would not survive a crash.

        Raises:
            EverstepError: this capture, or an earlier save in the background, has failed and the
                failure policy raises.
        """
        # Even if nothing is parked: copies of a due base must be issued, and the step is learned
        # from.
        self.scheduler.end_step()
        if not self.parks or self._process is None:
            return
        self._await_last()
        identity = mark.identity
        save = self._newest = Save(identity.step, identity.timeline, parked=True)
        with failing_save(save, self.post):
            self._take(identity, save, None, show=False)
        self._last = save
        self._context.channel.check()

    def _await_last(self) -> None:
        """Wait until the keeper has the last capture, if other ranks rely on that."""
        last = self._last
        if self._kept == 1 or last is None or last.staged.done():
            return
        with self.stalled("capture"):
            self.scheduler.flush()  # a step without an update has issued no copies
            wait_done(last.staged, self._context.options.progress_timeout_s)

    def take(self, request: BaseRequest) -> Save:
        self._await_last()
        save = self._take_or_persist(request)
        if request.show:
            # The caller may wait for this base before the next step: copies planned for events of
            # that step would never be issued.
            self.scheduler.flush()
        return save

    def _take_or_persist(self, request: BaseRequest) -> Save:
        identity = request.identity
        again = None
        with contextlib.suppress(KeeperError):  # a lost keeper is reported by the take() below
            again = self._persist_newest(identity)
        if again is not None:
            self._context.channel.check()
            return again
        same = self._last is not None and self._last.is_of(identity)
        if not same or (self.last_is_in_memory and not request.in_memory):
            self.scheduler.end_step()
        return super().take(request)

    def persist_parked(self) -> None:
        """Make the newest complete capture durable if it is not; no copy may be in progress.

        Does nothing with several ranks: another one may not have it.

        Raises:
            KeeperError: the keeper is lost.
        """
        with self._parking:
            if self._kept > 1 or not self._parked or self._parked[-1].starts != self._starts:
                return
            self.saves += 1
            self._persist(self._parked.pop().capture)

    def close(self) -> None:
        """Remove all hooks."""
        self.scheduler.close()

    def _persist_newest(self, identity: ShardIdentity) -> Save | None:
        """Make the parked capture of this step durable; return None if there is none."""
        with self._parking:
            save = self._newest
            if save is None or save.is_lost or not save.is_of(identity):
                return None
            if save.is_durable:
                return save
            if save in self._persist_when_complete or not save.parked:
                return save
            self.saves += 1
            self.last_save_s = self._context.clock.monotonic_s()
            if self._parked and self._parked[-1].capture.save is save:
                self._persist(self._parked.pop().capture)
            else:
                waiting = (one for one in self._persist_when_complete if not one.durable.done())
                self._persist_when_complete = [*waiting, save]
        return save

    def _persist(self, capture: Capture) -> None:
        process = self._process
        assert process is not None
        capture.save.parked = False
        try:
            process.persist(capture)
        except KeeperError as error:
            fail(capture.save.durable, error)
            capture.on_end(capture)
            raise

    def _capture(self, prepared: PreparedBase, plan: BasePlan, survey: Survey, save: Save) -> None:
        service = self._service
        pool = self._pool
        assert service is not None
        assert pool is not None
        tensors = survey.tensors
        # The scheduler's gate knows what each update changes, so the base class gets no gate.
        copies = PlannedCopies((), {}, prepared.copies(tensors).check)
        room = self.acquire(prepared, survey)
        with pool.releasing(room):
            block = pool.block(room)
            dispatch = self.scheduler.dispatch(prepared, tensors, block, self._planned.release)
            complete = functools.partial(self.scheduler.complete, dispatch, prepared)
            notify = functools.partial(self._notify_keeper, service, pool, self._starts, complete)
            self._planned.next = dispatch
        try:
            self.fill(prepared, plan, survey, save, room, copies, notify)
        finally:
            self._planned.next = None  # of a capture that has failed before it began

    def finish_copies(self) -> None:
        self.scheduler.flush()

    def figures(self) -> Mapping[str, Any]:
        return {**super().figures(), "schedule": self.scheduler.stats()}

    def gate_update(self, optimizer: str | None) -> None:
        """Block an update until it cannot tear a planned capture (I1)."""
        timeout_s = self._context.options.progress_timeout_s
        wait_s, late = self.scheduler.gate(optimizer, timeout_s)
        self.stall_s["gate"] += wait_s
        # Do not block training for ever: the update goes on, these captures are void.
        for dispatch in late:
            dispatch.fail(
                DeadlineError(f"copying the state to host memory took longer than {timeout_s:g} s")
            )

    def _notify_keeper(
        self,
        service: Service,
        pool: CapturePool,
        starts: int,
        complete: Callable[[int], None],
        capture: Capture,
        objects: Mapping[str, bytes],
    ) -> None:
        """Notify the keeper of a complete capture, which replaces parked ones; in the lane's
        thread.

        If another keeper is in service by now, it does not know this capture, and nothing is
        replaced.
        """
        # First the newer capture is handed over, last the older one is released: a crash at any
        # moment leaves one of them complete.
        service.keeper.captured(capture, objects)
        pool.drop_kept()
        complete(capture.step)
        older: list[Capture] = []
        with self._parking:
            # Under the lock: start() clears the service before another keeper comes into use.
            serves = service.keeper is self._keeper
            if serves:
                if starts == self._starts:
                    self._completed.append(capture.step)
                older = self._superseded(capture, starts)
            if service.process is not None and capture.parked:
                service.process.set_aside(capture)
                if not serves:
                    older = [capture]
                elif capture.save in self._persist_when_complete:
                    self._persist_when_complete.remove(capture.save)
                    self._persist(capture)
                else:
                    self._parked.append(_Parked(capture, starts))
        for one in older:
            one.on_end(one)

    def acquire(self, prepared: PreparedBase, survey: Survey) -> Block:
        """Reserve a block; of several ranks, drop parked captures if there is no memory beside
        them: this one could not become complete, nor supersede them."""
        assert self._pool is not None
        while self._kept > 1 and self._parked:
            room = self._pool.acquire_now(prepared.size_bytes, prepared.objects_bytes)
            if room is not None:
                self._pool.release(room)
                break
            with self._parking:
                oldest = self._parked[:1]
                self._release(oldest.__contains__)
        return super().acquire(prepared, survey)

    def _release(self, is_over: Callable[[_Parked], bool]) -> None:
        """Release parked captures; with the lock held."""
        over = [parked for parked in self._parked if is_over(parked)]
        self._parked = [parked for parked in self._parked if not is_over(parked)]
        for parked in over:
            parked.capture.on_end(parked.capture)

    def _superseded(self, capture: Capture, starts: int) -> list[Capture]:
        """Remove and return the parked captures that nobody needs beside a complete one."""

        def is_needed(parked: _Parked) -> bool:
            if parked.starts != starts:
                return len(self._completed) < self._kept
            return capture.step - parked.capture.step < self._kept

        over = [parked.capture for parked in self._parked if not is_needed(parked)]
        self._parked = [parked for parked in self._parked if is_needed(parked)]
        return over


class _PlannedLane:
    """Lane on which the copies of a capture are issued one by one; jobs that must run after them
    wait until all are issued.

    Attributes:
        next: capture that :meth:`submit` is called for next.
    """

    def __init__(self, lane: Lane, scheduler: Scheduler) -> None:
        self._lane = lane
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._open = False
        self._jobs: list[tuple[Callable[[], None], Future[None]]] = []
        self.next: Dispatch | None = None

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        """See :class:`.Lane`."""
        self._lane.warm(tensors, block, take)

    def ready_bytes(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> int:
        """See :class:`.Lane`."""
        return self._lane.ready_bytes(tensors, block)

    def leave(self) -> None:
        """See :class:`.Lane`."""
        self._lane.leave()

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        """See :class:`.Lane`."""
        self._lane.copy_now(batches, block)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        """Begin the capture that is ``next``."""
        dispatch = self.next
        self.next = None
        assert dispatch is not None
        with self._lock:
            # Before the first unit is issued: begin() may issue all of them, and release() closes
            # it again.
            self._open = True
        self._scheduler.begin(dispatch)
        return dispatch

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        """See :class:`.Lane`."""
        return self._lane.submit_yielding(batches, block, progress)

    def release(self) -> None:
        """Run the waiting jobs: all copies of the capture were issued."""
        with self._lock:
            self._open = False
            jobs = self._jobs
            self._jobs = []
            # Under the lock: jobs that run() gets meanwhile must not overtake these.
            for job, future in jobs:
                self._lane.run(functools.partial(_run, job, future))

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` in the lane's thread, after the copies of the capture."""
        with self._lock:
            if not self._open:
                return self._lane.run(job)
            future = Outcome[None]()
            self._jobs.append((job, future))
            return future

    def close(self) -> None:
        """See :class:`.Lane`."""
        # Jobs that wait for copies may release memory: they must run even if nothing is issued any
        # more.
        self.release()
        self._lane.close()


def _run(job: Callable[[], None], future: Future[None]) -> None:
    try:
        job()
    except BaseException as error:
        future.set_exception(error)
        raise
    future.set_result(None)
